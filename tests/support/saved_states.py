"""Small checkpoints with one of all, and what verify and restore make of them: fixtures, two guards."""

from __future__ import annotations

import functools
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fnshard as fs
from fnshard import LayoutSpec, P
from fnshard.checkpoint import blocks
from fnshard.errors import CheckpointError
from fnshard.runtime.files import tensorfile

MANIFEST, SEAL = "manifest.json", "manifest.json.sha256"
STEPS = (100, 200, 300)
ROOM_MB = 256  # what restoring a few hundred bytes may take
CONFIG = {"model": {"width": 5, "tied": False}, "rates": [0.1, 1e-5], "name": "tüte", "none": None}
DATA = {
    "epoch": 2,
    "at": (3, 4),
    "generator": torch.arange(5, dtype=torch.uint8),
    "key": b"\0\xff",
    7: "seven",
}


# ------------------------------------------------------------------ checkpoints


def loss(params: Any, x: Tensor) -> Tensor:
    return sum(p.float().sum() for p in params.values() if p.is_floating_point()) * x.sum()


def step_on(mesh: fs.Mesh) -> Any:
    """A step whose state has bf16, fp64 and integer leaves, 0-d and uneven ones, master copies, a scale."""
    generator = torch.Generator().manual_seed(5)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    params = {
        "wide.weight": rand(5, 3).bfloat16(),
        "bias": rand(7),
        "gain": rand(),
        "cube": rand(3, 5, 2).double(),
        "count": nn.Buffer(torch.arange(4)),
        "empty": rand(0, 4),
    }
    sharded = LayoutSpec(P("shard"))
    specs = fs.match_specs(
        params,
        [
            ("wide.*", LayoutSpec(P("shard"), optimizer_dtype=torch.float32)),
            ("cube", LayoutSpec(P(None, "shard"))),
            ("bias", sharded),
            ("*", LayoutSpec()),
        ],
    )
    made = fs.shard_step(
        loss, specs, mesh=mesh, optimizer=fs.optim.adamw(1e-3), backend="eager", loss_scale="dynamic"
    )
    return made, params


def state_on(mesh: fs.Mesh, step: int) -> tuple[Any, Any]:
    """The step, and a state of random values, the same on any mesh but for its layout."""
    made, params = step_on(mesh)
    state = made.init(params, seed=11)
    generator = torch.Generator().manual_seed(step)
    by_path = made.specs
    for path, slots in state.opt_state.items():
        for slot in slots.values():
            if slot.dim() == 0:
                slot.copy_(torch.randn((), generator=generator))
                continue
            full = torch.randn(by_path[path].shape, generator=generator).to(slot.dtype)
            slot.copy_(fs.shard({path: full}, {path: by_path[path]}, mesh)[path])
    state.step.fill_(step)
    state.loss_scale["good_steps"].fill_(17 + step)
    return made, state


def save(folder: Path, step: int, mesh: fs.Mesh) -> None:
    """One of those, at `folder/<step>`."""
    _, state = state_on(mesh, step)
    fs.checkpoint.save(folder / str(step), state, data=DATA, config=CONFIG, metrics={"loss": 1 / (step + 1)})


def values(state: Any) -> dict[str, Any]:
    """All that a state says, to be compared bit by bit."""
    out: dict[str, Any] = {"step": int(state.step), "seed": int(state.seed), "data": _plain(state.data)}
    tensors = {f"params/{p}": t for p, t in state.params.items()}
    tensors |= {f"{p}/{n}": t for p, slots in state.opt_state.items() for n, t in slots.items()}
    tensors |= state.loss_scale
    for name, tensor in tensors.items():
        out[name] = str(tensor.dtype), list(tensor.shape), tensor.reshape(-1).view(torch.uint8).tolist()
    return out


def _plain(data: Any) -> Any:
    if not isinstance(data, dict):
        return repr(data)
    return {k: v.tolist() if isinstance(v, Tensor) else v for k, v in data.items()}


@functools.cache
def expected(step: int) -> dict[str, Any]:
    """What was saved."""
    state = state_on(fs.make_mesh(shard=1, device="cpu"), step)[1]
    state.data = DATA
    return values(state)


# ------------------------------------------------------------------ what a process does meanwhile

_EVENTS = ("open", "os.", "shutil.", "pickle.", "subprocess.", "socket.", "exec", "ctypes.", "import")
_seen: list[tuple[str, Any]] | None = None


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _seen is not None and event.startswith(_EVENTS):
        _seen.append((event, args[0] if args else None))


@functools.cache
def _listen() -> None:
    torch.zeros_like(torch.empty(2, device="meta"))  # makes torch import what it needs for it: not a finding
    sys.addaudithook(_hook)  # for good: Python takes none away again


@contextmanager
def confined(folder: Path) -> Iterator[None]:
    """Fails where anything but `folder` is looked into, or anything is unpickled, changed or started."""
    global _seen
    _listen()
    _seen = []
    try:
        yield
    finally:
        seen, _seen = _seen, None
    odd = []
    for event, what in seen:
        path = os.fsdecode(what) if isinstance(what, str | bytes | os.PathLike) else None
        inside = path is not None and Path(os.path.abspath(path)).is_relative_to(folder)
        source = event == "open" and (isinstance(what, int) or str(path).endswith(".py"))  # of tracebacks
        if not source and not (inside and event in ("open", "os.listdir", "os.scandir")):
            odd.append((event, what))
    if odd:
        raise AssertionError(f"done outside {folder}: {odd}")


@contextmanager
def little_memory(more_mb: int) -> Iterator[None]:
    """Who asks for more than that is refused it."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (more_mb << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def outcome(work: Callable[..., Any], *args: Any) -> str | Any:
    """The message of the error, or what came of it; any other error is a failure of the test."""
    try:
        return work(*args)
    except CheckpointError as error:
        if not str(error).strip():
            raise AssertionError("an error that says nothing") from error
        return str(error)


def restored(folder: Path, step: Any) -> tuple[Any, Any]:
    """What `verify` and `restore` make of a checkpoint, in little memory and in its directory alone."""
    with little_memory(ROOM_MB), confined(folder):
        seen = outcome(fs.checkpoint.verify, folder)
        got = outcome(fs.checkpoint.restore, folder, step)
    return seen, got if isinstance(got, str) else values(got)


# ------------------------------------------------------------------ fixtures


@contextmanager
def small_blocks() -> Iterator[None]:
    """Leaves of 60 bytes have several checksums, as leaves of gigabytes do."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (tensorfile, blocks):
            patch.setattr(module, "BLOCK_bytes", 32)
        yield


@pytest.fixture
def short_blocks() -> Iterator[None]:
    with small_blocks():
        yield


def save_all(rank: int, world: int, folder: str) -> None:
    mesh = fs.make_mesh(shard=world, device="cpu")
    with small_blocks():
        for step in STEPS:
            save(Path(folder), step, mesh)


@pytest.fixture(scope="session")
def roots(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Roots of three checkpoints each, by how many ranks had saved them."""
    out = {name: tmp_path_factory.mktemp(name) for name in ("one", "two")}
    save_all(0, 1, str(out["one"]))
    ranks(2).run(save_all, 2, str(out["two"]))
    return out


@pytest.fixture(scope="session")
def restoring() -> Any:
    """A step on a mesh of one that such a checkpoint is of."""
    return step_on(fs.make_mesh(shard=1, device="cpu"))[0]
