"""Small checkpoints that hold one of everything, and ways to ruin them; all of it seeded."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import socket
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fnshard as fs
from fnshard import LayoutSpec, P

MANIFEST, SEAL = "manifest.json", "manifest.json.sha256"
CONFIG = {"model": {"width": 5, "tied": False}, "rates": [0.1, 1e-5], "name": "tüte", "none": None}
DATA = {"epoch": 2, "at": (3, 4), "generator": torch.arange(5, dtype=torch.uint8), "key": b"\0\xff", 7: "seven"}


# ------------------------------------------------------------------ a checkpoint


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


# ------------------------------------------------------------------ what a process does meanwhile

_EVENTS = ("open", "os.", "shutil.", "pickle.", "subprocess.", "socket.", "exec", "ctypes.", "import")
_seen: list[tuple[str, Any]] | None = None


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _seen is not None and event.startswith(_EVENTS):
        _seen.append((event, args[0] if args else None))


sys.addaudithook(_hook)


@contextmanager
def confined(folder: Path) -> Iterator[None]:
    """Fails where anything but `folder` is looked into, or anything is unpickled, changed or started."""
    global _seen
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


# ------------------------------------------------------------------ bytes


def flip(folder: Path, name: str, bit: int) -> None:
    """One bit of a file."""
    with (folder / name).open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def some_bits(folder: Path, count: int, seed: int) -> list[tuple[str, int]]:
    """Of all files: half of them spread over the files, half over the bytes."""
    rng, sizes = random.Random(seed), {p.name: p.stat().st_size for p in sorted(folder.iterdir())}
    names = rng.choices(list(sizes), k=count // 2)
    names += rng.choices(list(sizes), weights=list(sizes.values()), k=count - count // 2)
    return [(name, rng.randrange(8 * sizes[name])) for name in names]


# Folder, a file in it, a source of whims; gives the names of the files it hurt, if more than that.
Wreck = Callable[[Path, str, random.Random], list[str] | None]


def _rewrite(change: Callable[[bytearray, random.Random], bytes]) -> Wreck:
    def wreck(folder: Path, name: str, rng: random.Random) -> None:
        (folder / name).write_bytes(change(bytearray((folder / name).read_bytes()), rng))

    return wreck


def _run(content: bytearray, rng: random.Random, new: Callable[[bytes], bytes]) -> bytes:
    """A run of bytes made new, in a way that changes something."""
    first = rng.randrange(len(content))
    last = min(len(content), first + rng.randint(1, 64))
    made = new(bytes(content[first:last]))
    while made == content[first:last]:
        made = rng.randbytes(last - first)
    content[first:last] = made
    return bytes(content)


def _instead(put: Callable[[Path, Path], None]) -> Wreck:
    """Something else by the file's name; the file itself is kept beside the checkpoint."""

    def wreck(folder: Path, name: str, rng: random.Random) -> None:
        outside = folder.parent / f"outside-{name}"
        os.replace(folder / name, outside)
        put(folder / name, outside)

    return wreck


def _socket(path: Path, outside: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _swap(folder: Path, name: str, rng: random.Random) -> list[str]:
    other = rng.choice(sorted(p.name for p in folder.iterdir() if p.name != name))
    first, second = (folder / name).read_bytes(), (folder / other).read_bytes()
    (folder / name).write_bytes(second)
    (folder / other).write_bytes(first)
    return [name, other]


def _nested(content: bytearray, rng: random.Random) -> bytes:
    return rng.choice([b"[", b'{"a":', b'{"leaves":{"a":']) * rng.randint(10_000, 200_000)


BYTES: dict[str, Wreck] = {
    "truncated": _rewrite(lambda c, rng: bytes(c[: rng.randrange(len(c))])),
    "longer": _rewrite(lambda c, rng: bytes(c) + rng.randbytes(rng.randint(1, 4096))),
    "longer by zeros": _rewrite(lambda c, rng: bytes(c) + bytes(rng.randint(1, 4096))),
    "a run flipped": _rewrite(lambda c, rng: _run(c, rng, lambda b: bytes(255 - x for x in b))),
    "a run zero": _rewrite(lambda c, rng: _run(c, rng, lambda b: bytes(len(b)))),
    "a run moved": _rewrite(lambda c, rng: _run(c, rng, lambda b: b[1:] + b[:1])),
    "a byte less": _rewrite(lambda c, rng: bytes(c[: (at := rng.randrange(len(c)))] + c[at + 1 :])),
    "empty": _rewrite(lambda c, rng: b""),
    "noise": _rewrite(lambda c, rng: rng.randbytes(len(c))),
    "no text": _rewrite(lambda c, rng: b"\xff\xfe\x80" + bytes(c)[3:]),
    "nested": _rewrite(_nested),
    "huge": lambda folder, name, rng: os.truncate(folder / name, 1 << rng.randint(33, 42)),
    "gone": lambda folder, name, rng: (folder / name).unlink(),
    "swapped": _swap,
    "a link outside": _instead(lambda path, outside: path.symlink_to(outside)),
    "a link out": _instead(lambda path, outside: path.symlink_to(Path("..") / outside.name)),
    "a link to zeros": _instead(lambda path, outside: path.symlink_to("/dev/zero")),
    "a link to nothing": _instead(lambda path, outside: path.symlink_to("nothing")),
    "a link to itself": _instead(lambda path, outside: path.symlink_to(path.name)),
    "a directory": _instead(lambda path, outside: path.mkdir()),
    "a pipe": _instead(lambda path, outside: os.mkfifo(path)),
    "a socket": _instead(_socket),
}


# ------------------------------------------------------------------ headers of data files


def header(content: bytes) -> tuple[int, dict[str, Any]]:
    """A safetensors header and its length."""
    count = int.from_bytes(content[:8], "little")
    return count, json.loads(content[8 : 8 + count])


def _reheaded(content: bytearray, said: Any, count: int | None = None) -> bytes:
    """Another header in the place of the old one, as long as that if it can be."""
    old, _ = header(content)
    text = (said if isinstance(said, bytes) else json.dumps(said, separators=(",", ":")).encode()).ljust(old)
    return (len(text) if count is None else count).to_bytes(8, "little") + text + bytes(content[8 + old :])


def _entry(change: Callable[[dict[str, Any], random.Random], Any]) -> Callable[[bytearray, random.Random], bytes]:
    def made(content: bytearray, rng: random.Random) -> bytes:
        _, said = header(content)
        name = rng.choice(sorted(n for n in said if n != "__metadata__" and said[n]["shape"]))
        change(said[name], rng)
        return _reheaded(content, said)

    return made


def _longer_by(length: int) -> Callable[[bytearray, random.Random], bytes]:
    return lambda content, rng: (length + rng.randrange(9)).to_bytes(8, "little") + bytes(content[8:])


HEADERS: dict[str, Callable[[bytearray, random.Random], bytes]] = {
    "a size": _entry(lambda e, rng: e["shape"].__setitem__(0, e["shape"][0] + rng.choice([-1, 1, 1 << 40]))),
    "a shape": _entry(lambda e, rng: e.update(shape=rng.choice([[], [1 << 62] * 3, None, [-1], ["a"], 3]))),
    "a dtype": _entry(lambda e, rng: e.update(dtype="F16" if e["dtype"] == "BF16" else rng.choice(["I8", "X", 3]))),
    "offsets": _entry(lambda e, rng: e.update(data_offsets=rng.choice([[0, 1 << 60], [-8, 0], [8, 0], [0], "a"]))),
    "no dtype": _entry(lambda e, rng: e.pop("dtype")),
    "metadata": lambda c, rng: _reheaded(c, {**header(c)[1], "__metadata__": {"a": "b" * 99}}),
    "fewer": lambda c, rng: _reheaded(c, dict(list(header(c)[1].items())[: rng.randint(0, 5)])),
    "no object": lambda c, rng: _reheaded(c, rng.choice([[], None, 3, "a", [[]], b"\xff\xff", b"", b"{"])),
    "deep": lambda c, rng: _reheaded(c, b"[" * rng.randint(5_000, 100_000)),
    "as long as the file": _longer_by(0),
    "longer than the limit": _longer_by((100 << 20) + 1),
    "2^40 long": _longer_by(1 << 40),
    "2^63 long": _longer_by(1 << 63),
    "-1 long": lambda c, rng: b"\xff" * 8 + bytes(c[8:]),
}  # fmt: skip


# ------------------------------------------------------------------ manifests with a seal that fits


def reseal(folder: Path, said: Any) -> None:
    """Put a manifest in the place of the one that is there, sealed."""
    text = said if isinstance(said, bytes) else json.dumps(said).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / SEAL).write_text(f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n")


def adopt(folder: Path) -> None:
    """Let the manifest say what the data files now are: their lengths, and their old headers' places."""
    said = json.loads((folder / MANIFEST).read_bytes())
    for name, file in said["files"].items():
        content = (folder / name).read_bytes()
        file.update(bytes=len(content), header_crc32=zlib.crc32(content[: file["header_bytes"]]))
    reseal(folder, said)


Where = tuple[Any, ...]  # keys and places, from the top


def nodes(value: Any, at: Where = ()) -> Iterator[tuple[Where, Any]]:
    """Every value of a JSON tree, and where it is."""
    if at:
        yield at, value
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from nodes(inner, (*at, key))


def replaced(tree: Any, at: Where, value: Any) -> Any:
    """A copy of the tree with another value there."""
    out = copy.deepcopy(tree)
    inner = out
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return out


def without(tree: Any, at: Where) -> Any:
    """A copy of the tree without what is there."""
    out = copy.deepcopy(tree)
    inner = out
    for key in at[:-1]:
        inner = inner[key]
    del inner[at[-1]]
    return out


_WRONG = [
    None, True, False, 0, -1, 3, 1 << 63, 1 << 70, -(1 << 63), 10**400, 1.5, 3.0, -0.0, float("nan"), float("inf"),
    "", "3", "F32", "a\0b", "\ud800", [], [[]], ["a"], [0], [1 << 62, 1 << 62], [None], {}, {"a": 1}, {"__is__": "no"},
]  # fmt: skip


def wrong_for(value: Any) -> list[Any]:
    """Values of other types than this one; numbers also of no possible size."""
    impossible = [-1, 1 << 63, 1 << 70, -(1 << 63) - 1] if type(value) is int else []
    return [w for w in _WRONG if _type(w) != _type(value)] + impossible


def _type(value: Any) -> type:
    return type(value)


# ------------------------------------------------------------------ payloads


class Payload:
    """What unpickling of it does: make a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


def payloads(marker: Path) -> dict[str, bytes]:
    """Pickles of several kinds."""
    by_torch = marker.with_suffix(".pt")
    torch.save(Payload(marker), by_torch)
    out = {f"protocol {n}": pickle.dumps(Payload(marker), protocol=n) for n in (0, 2, 5)}
    return {**out, "torch": by_torch.read_bytes()}


def copied(pristine: Path, folder: Path) -> Path:
    """A fresh copy to be ruined."""
    for left in (folder, *folder.parent.glob("outside-*")):
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() and not left.is_symlink() else left.unlink(True)
    shutil.copytree(pristine, folder)
    return folder


def taken(items: Sequence[Any], count: int, seed: int) -> list[Any]:
    """So many of them, or all."""
    return list(items) if count >= len(items) else random.Random(seed).sample(list(items), count)
