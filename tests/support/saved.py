"""A small state whose every number is known, in any layout: for checkpoints to save, restore and compare; and
what `verify` and `restore` make of checkpoints that were ruined, under two guards."""

from __future__ import annotations

import functools
import os
import resource
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fnshard as fs
from fnshard.checkpoint.state_leaves import state_leaves
from fnshard.errors import CheckpointError
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.runtime.files import tensorfile
from fnshard.runtime.packing import local_block

# Uneven on 2 and 4 ranks, a scalar, smaller than any mesh, empty, a frozen leaf; and a buffer, "steps".
SHAPES = {
    "embed.w": (7, 5),
    "layers.0.w": (6, 4),
    "layers.0.b": (3,),
    "layers.1.w": (2, 9),
    "scale": (),
    "empty": (0, 4),
    "frozen": (5, 2),
}
STORED = {
    "fp32": {},
    "bf16": {"storage_dtype": torch.bfloat16, "optimizer_dtype": torch.float32},
    "fp64": {"storage_dtype": torch.float64},
    "host": {"memory": "host", "optimizer_memory": "host"},
    "disk": {"memory": "disk", "optimizer_memory": "disk"},
}
MESHES: Mapping[str, Any] = {
    "full_shard": lambda world: {"shard": world},
    "zero1": lambda world: {"shard": world},
    "no_shard": lambda world: {"shard": world},
    "hybrid_shard": lambda world: {"replicate": max(1, world // 2), "shard": min(world, 2)},
}


def number(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the full leaf by that name: values that bf16 holds exactly."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(-128, 128, shape, generator=generator).double() / 64


def params() -> dict[str, Tensor]:
    """Return full leaves; "steps" is a buffer, "frozen" does not train."""
    full: dict[str, Any] = {p: torch.nn.Parameter(number(p, s).float()) for p, s in SHAPES.items()}
    full["frozen"].requires_grad_(False)
    return full | {"steps": torch.tensor([3, 4, 5])}


def loss_fn(p: Any, x: Tensor) -> Tensor:
    """Compute a loss that uses every leaf that trains."""
    used = sum(p[name].square().sum() for name in SHAPES)
    return used * x.mean()


def step_of(
    preset: str, stored: str, mesh: Any, optimizer: Any = None, folder: Path | None = None, **options: Any
) -> Any:
    """Make a step in that layout."""
    specs = getattr(fs.presets, preset)(params(), mesh, **STORED[stored])
    chosen, disk_dir = optimizer or fs.optim.adamw(0.1), folder and str(folder)
    return fs.shard_step(
        loss_fn, specs, mesh=mesh, optimizer=chosen, backend="eager", disk_dir=disk_dir, **options
    )


def mesh_of(preset: str, world: int) -> Any:
    """Make a mesh of the preset's axes over all ranks there are."""
    return fs.make_mesh(**MESHES[preset](world), device="cpu")


def make_known(step: Any, number_of_steps: int = 7) -> fs.TrainState:
    """Make this rank's part of the known state after so many steps, in a step's layout."""
    state = step.init(params(), seed=11)
    state.step.fill_(number_of_steps)
    leaves = state_leaves(state, ResolvedSpecs.of(state.where[0]), state.where[1])
    for name, value in expect_leaves(state).items():
        leaves[name].block.copy_(value)
    return state


def expect_leaves(state: fs.TrainState) -> dict[str, Tensor]:
    """Return what every leaf of a state must be, by name, layout and step; masters are their parameters."""
    specs, mesh = state.where
    out, steps = {}, int(state.step)
    for name, leaf in state_leaves(state, ResolvedSpecs.of(specs), mesh).items():
        kind, _, rest = name.partition("/")
        path = rest if kind == "params" else rest.rpartition("/")[0]
        source = path if kind == "params" or rest.endswith("/master") else name
        full = number(f"{source} {steps}", leaf.shape)
        if path == "steps" or name == "loss_scale/good_steps":
            full = torch.tensor([3, 4, 5] if path == "steps" else 17) + steps
        if name != "loss_scale/scale":
            out[name] = local_block(full, leaf.layout, mesh).to(leaf.block.dtype)
    return out


def differences(state: fs.TrainState) -> list[str]:
    """Return the names of the leaves that are not what they must be, to the bit."""
    specs, mesh = state.where
    leaves = state_leaves(state, ResolvedSpecs.of(specs), mesh)
    return [
        name for name, value in expect_leaves(state).items() if not torch.equal(leaves[name].block, value)
    ]


# ------------------------------------------------------------------ on ranks of a pool


def save_all(rank: int, world: int, root: str, stored: list[str], presets: list[str]) -> None:
    """Save the known state in every layout, each in a directory of its own."""
    for preset in presets:
        for kind in stored:
            step = step_of(preset, kind, mesh_of(preset, world), folder=Path(root))
            fs.checkpoint.save(f"{root}/{world}-{preset}-{kind}", make_known(step), data={"position": 5})


def restore_all(
    rank: int, world: int, root: str, names: list[str], stored: list[str], presets: list[str]
) -> list[str]:
    """Restore every checkpoint in every layout here, and return what was not as it must be."""
    wrong = []
    for preset in presets:
        for kind in stored:
            step = step_of(preset, kind, mesh_of(preset, world), folder=Path(root))
            for name in names:
                with warnings.catch_warnings():
                    warnings.simplefilter("error", fs.errors.CheckpointWarning)
                    state = fs.checkpoint.restore(f"{root}/{name}", step)
                found = differences(state)
                if (int(state.step), int(state.seed), state.data) != (7, 11, {"position": 5}):
                    found.append(f"step {int(state.step)}, seed {int(state.seed)}, data {state.data}")
                wrong += [f"{name} on {world} {preset} {kind}: {what}" for what in found]
    return wrong


# ------------------------------------------------------------------ checkpoints to be ruined

MANIFEST, SEAL = "manifest.json", "manifest.json.sha256"
STEPS = (100, 200, 300)
ROOM_MB = 256  # what restoring a few hundred bytes may take
CONFIG = {"model": {"width": 5, "tied": False}, "rates": [0.1, 1e-5], "name": "tüte", "none": None}
DATA = {"epoch": 2, "at": (3, 4), "key": b"\0\xff", 7: "seven"}


def step_on(mesh: fs.Mesh) -> Any:
    """Make a step whose state has bf16 leaves with master copies, an integer buffer and a loss scale."""
    return step_of("full_shard", "bf16", mesh, loss_scale="dynamic")


def save_steps(rank: int, world: int, folder: str) -> None:
    """Save checkpoints of STEPS at `folder/<step>`."""
    step = step_on(fs.make_mesh(shard=world, device="cpu"))
    with small_blocks():
        for number in STEPS:
            extras = {"data": DATA, "config": CONFIG, "metrics": {"loss": 1 / (number + 1)}}
            fs.checkpoint.save(Path(folder, str(number)), make_known(step, number), **extras)


def is_known(state: Any, number: int) -> bool:
    """Return whether a restored state is all that was saved at that step; a message is not."""
    counters = None if isinstance(state, str) else (int(state.step), int(state.seed), state.data)
    return counters == (number, 11, DATA) and differences(state) == []


_EVENTS = ("open", "os.", "shutil.", "pickle.", "subprocess.", "socket.", "exec", "ctypes.", "import")
_seen: list[tuple[str, Any]] | None = None


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _seen is not None and event.startswith(_EVENTS):
        is_written = event == "open" and bool(args[2] & (os.O_WRONLY | os.O_RDWR))
        _seen.append(("open to write" if is_written else event, args[0] if args else None))


@functools.cache
def _listen() -> None:
    torch.zeros_like(torch.empty(2, device="meta"))  # makes torch import what it needs for it: not a finding
    sys.addaudithook(_hook)  # for good: Python takes none away again


@contextmanager
def confine(folder: Path) -> Iterator[None]:
    """Fail if anything but `folder` is looked into, or anything is unpickled, changed or started."""
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
    """Refuse memory to who asks for more than that."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (more_mb << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def outcome(work: Callable[..., Any], *args: Any) -> str | Any:
    """Return the message of a CheckpointError, or what `work` returns; any other error fails the test."""
    try:
        return work(*args)
    except CheckpointError as error:
        if not str(error).strip():
            raise AssertionError("an error that says nothing") from error
        return str(error)


def verify_and_restore(folder: Path, step: Any) -> tuple[Any, Any]:
    """Return what `verify` and `restore` give of a checkpoint, in little memory and in its directory alone.

    These are their results, or the messages of their errors.
    """
    with little_memory(ROOM_MB), confine(folder):
        return outcome(fs.checkpoint.verify, folder), outcome(fs.checkpoint.restore, folder, step)


@contextmanager
def small_blocks() -> Iterator[None]:
    """Let leaves of 60 bytes have several checksums, as leaves of gigabytes do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorfile, "BLOCK_BYTES", 32)
        yield


@pytest.fixture
def short_blocks() -> Iterator[None]:
    with small_blocks():
        yield


@pytest.fixture(scope="session")
def roots(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make roots of three checkpoints each, by how many ranks saved them."""
    out = {name: tmp_path_factory.mktemp(name) for name in ("one", "two")}
    save_steps(0, 1, str(out["one"]))
    ranks(2).run(save_steps, 2, str(out["two"]))
    return out


@pytest.fixture(scope="session")
def restoring() -> Any:
    """Make a step on a mesh of one to which such a checkpoint belongs."""
    return step_on(fs.make_mesh(shard=1, device="cpu"))
