"""Weights out of and into safetensors files: blocks, memory, names, broken files, full disks."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fnshard as fs
from fnshard import LayoutSpec, P
from fnshard.checkpoint import coordination, rows
from fnshard.errors import CheckpointError, StateError
from fnshard.hf import write as hf_write
from fnshard.layout.spec import block_shape, block_slices
from fnshard.runtime.collectives.connect import connection
from fnshard.runtime.collectives.simulated import Simulated
from fnshard.runtime.files import fileblocks, tensorfile
from fnshard.runtime.packing import local_block

safetensors = pytest.importorskip("safetensors.torch")


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Everything in a directory's files."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        part = safetensors.load_file(file)
        assert not found.keys() & part.keys()
        found |= part
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Equal to the bit, names and dtypes too."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype and value.shape == other[name].shape, name
        assert torch.equal(
            value.contiguous().view(-1).view(torch.uint8), other[name].contiguous().view(-1).view(torch.uint8)
        ), name


def tree_of(**leaves: Any) -> dict[str, Tensor]:
    """Distinct numbers in every leaf, by shape or (shape, dtype)."""
    out = {}
    for number, (name, what) in enumerate(leaves.items()):
        shape, dtype = what if isinstance(what[-1] if what else None, torch.dtype) else (what, torch.float32)
        made = torch.Generator().manual_seed(number)
        values = torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=made)
        out[name.replace("__", ".")] = values.to(dtype)
    return out


PARAMS = tree_of(
    embed=(13, 6), layers__0__w=(7, 5), layers__0__b=(5,), layers__1__w=(7, 5), scale=(),
    step=((3,), torch.int64), mask=((2, 2), torch.bool), half=((9, 4), torch.bfloat16), cube=(3, 5, 4),
    none=(0, 3),
)  # fmt: skip


def sharded(mesh: fs.Mesh, params: dict[str, Tensor] = PARAMS, **policy: Any) -> dict[str, LayoutSpec]:
    """Specs that split dims of all sorts; uneven ones among them."""
    wide = "outer" in mesh.names
    rules = [
        ("*0.w", LayoutSpec(P(None, mesh.names[-1]), buffers=True, **policy)),
        ("cube", LayoutSpec(P(None, *(mesh.names if wide else ("shard",))), buffers=True, **policy)),
        ("embed", LayoutSpec(P(mesh.names if wide else "shard"), buffers=True, **policy)),
        ("scale", LayoutSpec(**policy)),
        ("*", LayoutSpec(P("shard"), buffers=True, **policy)),
    ]
    return fs.match_specs(params, [r for r in rules if r[0] == "*" or r[0] in params or r[0] == "*0.w"])


MESHES = [{"shard": 1}, {"shard": 2}, {"shard": 4}, {"outer": 2, "shard": 2}, {"shard": 3, "outer": 2}]

# ------------------------------------------------------------------ blocks


@st.composite
def cases(draw: st.DrawFn) -> tuple[fs.Mesh, tuple[int, ...], P, torch.dtype]:
    names = draw(st.permutations(["a", "b", "c"]))[: draw(st.integers(1, 3))]
    mesh = fs.make_mesh(**{n: draw(st.integers(1, 3)) for n in names}, abstract=True)
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    free, parts = list(names), []
    for _ in shape:
        count = draw(st.integers(0, len(free)))
        parts.append(tuple(free[:count]) or None)
        free = free[count:]
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64]))
    return mesh, shape, P(*parts), dtype


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(8, 200), st.sampled_from([0, 16, 4096]), st.integers(0, 7))
def test_any_block_of_any_layout_is_what_slicing_gives(
    tmp_path_factory: pytest.TempPathFactory, case: Any, room: int, gap: int, head: int
) -> None:
    mesh, shape, layout, dtype = case
    full = torch.arange(math.prod(shape)).view(shape)
    full = full % 2 == 0 if dtype == torch.bool else full.to(dtype)
    path = tmp_path_factory.getbasetemp() / "block"
    path.write_bytes(b"x" * head + bytes(tensorfile.bytes_of(full)))
    fd = os.open(path, os.O_RDONLY)
    try:
        with mock.patch.multiple(fileblocks, BUFFER_bytes=room, GAP_bytes=gap):
            for rank in range(mesh.size):
                slices = block_slices(shape, layout, mesh, mesh.coordinate(rank))
                out = torch.zeros(block_shape(shape, layout, mesh), dtype=dtype)
                fileblocks.read_block(fd, head, dtype, shape, slices, out)
                assert torch.equal(out, local_block(full, layout, mesh, rank))
    finally:
        os.close(fd)


def test_a_block_is_cast_as_it_is_read_and_a_short_file_is_told(tmp_path: Path) -> None:
    full = torch.randn(6, 8)
    (tmp_path / "f").write_bytes(bytes(tensorfile.bytes_of(full))[:-1])
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    out = torch.zeros(6, 4, dtype=torch.bfloat16)
    fileblocks.read_block(fd, 0, torch.float32, (6, 8), (slice(0, 6), slice(0, 4)), out)
    assert torch.equal(out, full[:, :4].bfloat16())
    with pytest.raises(tensorfile.Corrupt, match="ends at byte 191"):
        fileblocks.read_block(fd, 0, torch.float32, (6, 8), (slice(0, 6), slice(4, 8)), out)
    os.close(fd)


@pytest.mark.parametrize("layout", [P("shard"), P(None, "shard")])
def test_a_rank_reads_its_own_slices_alone(tmp_path: Path, layout: P) -> None:
    """Bytes that are asked of the system, and memory held for it, counted: 1/8 of the file, and a buffer."""
    params = {f"layers.{i}.w": torch.randn(256, 8192) for i in range(3)}  # rows of 32 KiB, blocks of 1 MiB
    safetensors.save_file(params, tmp_path / "model.safetensors")
    mesh = fs.make_mesh(shard=8, abstract=True)
    specs = fs.match_specs(params, [("*", LayoutSpec(layout))])
    asked, buffers = [], []
    plain, make = os.preadv, torch.empty

    def counted(fd: int, into: Any, at: int) -> int:
        asked.append(sum(len(b) for b in into))
        return plain(fd, into, at)

    def made(*args: Any, **how: Any) -> Tensor:
        buffers.append(make(*args, **how))
        return buffers[-1]

    with (
        mock.patch.object(os, "preadv", counted),
        mock.patch.object(fileblocks, "BUFFER_bytes", 1 << 17),
        mock.patch.object(torch, "empty", made),
    ):
        blocks = fs.hf.load(tmp_path, specs, mesh)
    same(blocks, fs.shard(params, specs, mesh))
    header = 8 + int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    assert sum(asked) <= 3 * (1 << 20) + header
    assert 0 < max(b.numel() * b.element_size() for b in buffers) <= 1 << 17


@pytest.mark.parametrize("layout", [P("shard"), P(None, "shard"), P()])
def test_a_leaf_is_gathered_a_piece_at_a_time(layout: P) -> None:
    """Of a leaf of 4 KiB no rank sends, or is given, more than 256 bytes at once, or a row."""
    params = {"w": torch.randn(64, 16)}
    mesh = fs.make_mesh(shard=2, simulated=True)
    specs = fs.match_specs(params, [("*", LayoutSpec(layout))])
    given, sent = [], []
    plain = Simulated.send_buffer

    def counted(self: Any, numel: int, dtype: torch.dtype, axes: Any, rows: int = 1) -> Tensor:
        sent.append(rows * numel * dtype.itemsize)
        return plain(self, numel, dtype, axes, rows)

    def run(rank: int) -> Tensor:
        whole = torch.full((64, 16), float("nan"))
        block = fs.shard(params, specs, mesh)["w"]
        for first, part in rows.gather_rows(block, specs["w"], mesh, connection(mesh), receives=rank == 1):
            given.append(part.nbytes)
            whole[first : first + part.shape[0]] = part
        return whole

    with mock.patch.object(rows, "PIECE_bytes", 256), mock.patch.object(Simulated, "send_buffer", counted):
        other, whole = fs.simulate(mesh, run)
    assert torch.equal(whole, params["w"]) and bool(other.isnan().all())
    assert max(given) <= 256 and len(given) == 4096 // max(given)
    assert sent == ([] if layout == P() else [128] * 32)


# ------------------------------------------------------------------ in and out


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize(
    "policy", [{}, {"memory": "host"}, {"memory": "disk"}], ids=["device", "host", "disk"]
)
def test_loaded_and_saved_again_is_bitwise_the_same(tmp_path: Path, axes: Any, policy: Any) -> None:
    """Several files in, several others out; pieces of a few rows."""
    parts = [dict(list(PARAMS.items())[:4]), dict(list(PARAMS.items())[4:])]
    (tmp_path / "in").mkdir()
    for number, part in enumerate(parts):
        safetensors.save_file(part, tmp_path / f"in/part-{number}.safetensors", {"format": "pt"})
    weight_map = {n: f"part-{number}.safetensors" for number, part in enumerate(parts) for n in part}
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    mesh = fs.make_mesh(**axes, simulated=True)
    specs = sharded(mesh, **policy)

    def run(rank: int) -> Any:
        blocks = fs.hf.load(tmp_path / "in", specs, mesh, disk_dir=str(tmp_path))
        same(blocks, fs.shard(PARAMS, specs, mesh, disk_dir=str(tmp_path)))
        fs.hf.save(blocks, tmp_path / "out", specs, mesh, max_file_bytes=300)
        fs.hf.export(blocks, tmp_path / "all.safetensors", specs, mesh)
        fs.hf.export(blocks, tmp_path / "all.pt", specs, mesh)

    with mock.patch.object(rows, "PIECE_bytes", 64):
        fs.simulate(mesh, run)
    same(tensors_of(tmp_path / "out"), PARAMS)
    same(safetensors.load_file(tmp_path / "all.safetensors"), PARAMS)
    same(torch.load(tmp_path / "all.pt", weights_only=True), PARAMS)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = {f: safetensors.load_file(tmp_path / "out" / f) for f in set(index["weight_map"].values())}
    assert all(name in files[file] for name, file in index["weight_map"].items())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in PARAMS.values())
    count = len(files)
    assert sorted(files) == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert count > 2
    for held in files.values():
        assert len(held) == 1 or sum(v.nbytes for v in held.values()) <= 300
    assert not list(tmp_path.glob(".*"))


def test_a_directory_is_needed_where_parameters_rest_on_disk(tmp_path: Path) -> None:
    params = {"w": torch.ones(4)}
    safetensors.save_file(params, tmp_path / "model.safetensors")
    on_disk = fs.match_specs(params, [("*", LayoutSpec(memory="disk"))])
    with pytest.raises(StateError, match=r"1 leaves rest on disk(?s:.*)params\['w'\]"):
        fs.hf.load(tmp_path, on_disk)
    same(fs.hf.load(tmp_path, on_disk, disk_dir=str(tmp_path)), params)
    same(fs.hf.load(tmp_path, fs.match_specs(params, [("*", LayoutSpec(optimizer_memory="disk"))])), params)


def test_one_file_if_it_fits_and_floats_cast(tmp_path: Path) -> None:
    mesh = fs.make_mesh(shard=2, simulated=True)
    specs = sharded(mesh)

    def run(rank: int) -> Any:
        blocks = fs.shard(PARAMS, specs, mesh)
        fs.hf.save(blocks, tmp_path / "m", specs, mesh, dtype=torch.float16, config={"model_type": "none"})
        wide = fs.match_specs(PARAMS, [("*", LayoutSpec(P(), storage_dtype=torch.float64))])
        return fs.hf.load(tmp_path / "m", wide, mesh)

    wanted = {n: v.half() if v.is_floating_point() else v for n, v in PARAMS.items()}
    for got in fs.simulate(mesh, run):
        same(got, {n: v.double() if v.is_floating_point() else v for n, v in wanted.items()})
    same(tensors_of(tmp_path / "m"), wanted)
    assert sorted(os.listdir(tmp_path / "m")) == ["config.json", "model.safetensors"]
    with safetensors.safe_open(tmp_path / "m/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert json.loads((tmp_path / "m/config.json").read_text()) == {"model_type": "none"}


def test_names_and_transposes_both_ways(tmp_path: Path) -> None:
    """A dict, or a function, from paths to names; what it leaves out is called by its path."""
    mesh = fs.make_mesh(shard=2, simulated=True)
    params = {n: PARAMS[n] for n in ("embed", "layers.0.w", "layers.0.b", "layers.1.w")}
    specs = sharded(mesh, params)
    names = {"layers.0.w": fs.hf.Transposed("h.0.c.weight"), "embed": "wte"}

    def numbered(path: str) -> Any:
        return names.get(path)

    def run(rank: int) -> Any:
        blocks = fs.shard(params, specs, mesh)
        fs.hf.save(blocks, tmp_path / "m", specs, mesh, names=names)
        got = fs.hf.load(tmp_path / "m", specs, mesh, names=numbered)
        same(got, blocks)

    fs.simulate(mesh, run)
    wanted = {"h.0.c.weight": params["layers.0.w"].t(), "wte": params["embed"]}
    same(tensors_of(tmp_path / "m"), wanted | {n: params[n] for n in ("layers.0.b", "layers.1.w")})


def test_a_state_knows_its_layout_and_a_step_adopts_what_was_loaded(tmp_path: Path) -> None:
    """The same losses as from the whole tree, and the file of the trained state what unshard gives."""
    params = {"w": torch.randn(5, 3), "v": torch.randn(3)}
    safetensors.save_file(params, tmp_path / "model.safetensors")
    mesh = fs.make_mesh(shard=2, simulated=True)
    specs = fs.presets.full_shard(params, mesh, optimizer_dtype=torch.float64)
    step = fs.shard_step(
        lambda p, x: ((x @ p["w"]) * p["v"]).square().mean(), specs, mesh=mesh, optimizer=fs.optim.adamw(0.1),
        backend="eager",
    )  # fmt: skip
    x = torch.randn(4, 5)

    def run(rank: int) -> Any:
        loaded = step.adopt(fs.hf.load(tmp_path, specs, mesh), seed=3)
        whole = step.init(params, seed=3)
        for _ in range(2):
            loaded, got = step(loaded, x)
            whole, wanted = step(whole, x)
            assert got["loss"] == wanted["loss"]
        fs.hf.save(loaded, tmp_path / "trained")
        return int(loaded.seed), fs.unshard(loaded.params, specs, mesh)

    for seed, trained in fs.simulate(mesh, run):
        assert seed == 3
        same(tensors_of(tmp_path / "trained"), trained)
        assert not torch.equal(trained["w"], params["w"])


def test_what_a_step_does_not_adopt() -> None:
    params = {"w": torch.randn(5, 3)}
    mesh = fs.make_mesh(shard=2, abstract=True)
    specs = fs.presets.full_shard(params, mesh)
    step = fs.shard_step(lambda p: p["w"].sum(), specs, mesh=mesh, optimizer=fs.optim.sgd(0.1))
    with pytest.raises(StateError, match=r"params\['w'\] is \[5, 3\].*expected a block \[3, 3\]"):
        step.adopt(params)
    with pytest.raises(fs.SpecError, match=r"params\['v'\] has no spec"):
        step.adopt({"v": params["w"]})
    with pytest.raises(StateError, match="seed=True"):
        step.adopt(fs.shard(params, specs, mesh), seed=True)


def processes(rank: int, folder: str, world: int) -> list[int]:
    """Load, save, export, on a group; bytes of own blocks, and what a save and a load took beside them."""
    into, mesh = Path(folder), fs.make_mesh(shard=world, device="cpu")
    specs = sharded(mesh)
    blocks = fs.hf.load(into / "in", specs, mesh)
    same(blocks, fs.shard(PARAMS, specs, mesh))
    fs.hf.save(blocks, into / "out", specs, mesh, max_file_bytes=400)
    fs.hf.export(blocks, into / "all.pt", specs, mesh)
    shapes = {f"{i}.w": (2048, 4096) if i % 2 else (1024, 8192) for i in range(6)}  # 32 MiB each
    meta = {n: torch.empty(shape, device="meta") for n, shape in shapes.items()}
    specs = fs.match_specs(meta, [("[135].*", LayoutSpec(P("shard"))), ("*", LayoutSpec(P(None, "shard")))])
    big = {n: torch.full((1024, 4096), float(rank)) for n in shapes}
    own = sum(b.nbytes for b in big.values())
    with mock.patch.object(rows, "PIECE_bytes", 1 << 20):
        before = peak(reset=True)
        fs.hf.save(big, into / "big", specs, mesh)
        saving = peak() - before
    before = peak(reset=True)
    again = fs.hf.load(into / "big", specs, mesh)
    loading = peak() - before - own
    same(again, big)
    return [own, saving, loading]


def peak(*, reset: bool = False) -> int:
    """The most memory that this process has had, in bytes; from now on."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))


def test_processes_write_what_simulated_ranks_do_and_hold_no_more_than_their_own(
    ranks: Any, tmp_path: Path
) -> None:
    """Units are of 32 MiB: a rank that has 96 MiB of 192 holds less than two beside them."""
    (tmp_path / "in").mkdir()
    safetensors.save_file(PARAMS, tmp_path / "in/model.safetensors")
    for own, *beside in ranks(2).run(processes, str(tmp_path), 2):
        assert own == 96 << 20
        assert max(beside) < 64 << 20, [f"{each >> 20} MiB" for each in beside]
    same(tensors_of(tmp_path / "out"), PARAMS)
    same(torch.load(tmp_path / "all.pt", weights_only=True), PARAMS)
    for name, value in tensors_of(tmp_path / "big").items():
        zeros, ones = value.chunk(2, dim=0 if int(name[0]) % 2 else 1)
        assert bool((zeros == 0).all() and (ones == 1).all()), name


# ------------------------------------------------------------------ what does not fit


def test_all_that_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    given = tree_of(a=(2, 3), b=(4, 3), c=((3,), torch.float8_e4m3fn), d=(3,), extra=(1,), other=(2,))
    safetensors.save_file(given, tmp_path / "model.safetensors")
    params = tree_of(a=(2, 3), b=(3, 4), c=(3,), d=((3,), torch.int64), gone=(5,), buffer=(2,))
    specs = fs.match_specs(params, [("*", LayoutSpec())])
    with pytest.raises(StateError) as raised:
        fs.hf.load(tmp_path, specs, missing={"buffer": torch.ones(3), "a": given["a"], "zzz": given["a"]},
                   ignore=["other", "nothing*"])  # fmt: skip
    said = str(raised.value)
    for line in (
        "files and specs do not fit each other, 9 problems:",
        "params['gone'] [5]: no tensor 'gone'",
        "'extra' [1] torch.float32 in model.safetensors: no leaf takes it",
        "params['b'] [3, 4]: 'b' is [4, 3] torch.float32 in model.safetensors (its transpose would fit)",
        "params['c'] is stored as torch.float32: 'c' is [3] torch.float8_e4m3fn",
        "params['d'] is stored as torch.int64: 'd' is [3] torch.float32",
        "params['buffer'] [2]: the value given is [3]",
        "missing['a']: the files have it, as 'a'",
        "missing['zzz']: no such leaf",
        "ignore='nothing*' matches no tensor",
        "Fix: a leaf that is called otherwise: names=",
        "ignore=[globs of names]",
        "fs.hf.Transposed(name)",
    ):
        assert line in said, (line, said)
    assert "'other'" not in said
    with pytest.raises(StateError, match="names= has 1 paths of no leaf"):
        fs.hf.load(tmp_path, specs, names={"nope": "a"})
    with pytest.raises(StateError, match=r"names gives int for params\['a'\]"):
        fs.hf.load(tmp_path, specs, names=lambda path: 3)
    with pytest.raises(StateError, match="do not know the full shapes of 1 leaf"):
        fs.hf.load(tmp_path, {"a": LayoutSpec()})


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch $BOMB",)


def header(**entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def index(**where: Any) -> str:
    return json.dumps({"weight_map": where})


MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
GOOD = header(w=F32) + bytes(8)
MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "neither model.safetensors nor model.safetensors.index.json"),
    "pickles": ({"pytorch_model.bin": pickle.dumps(Bomb())}, "holds pickled weights alone"),
    "pickled_safetensors": ({MODEL: pickle.dumps(Bomb())}, "model.safetensors: a header of"),
    "another_file": ({"adapter.safetensors": GOOD}, "adapter.safetensors\nFix: name one of these files"),
    "empty": ({MODEL: b""}, "0 bytes are no safetensors file"),
    "truncated": ({MODEL: GOOD[:-1]}, "is not what bytes 0 to 8 can hold"),
    "huge_header": ({MODEL: (1 << 60).to_bytes(8, "little") + bytes(64)}, "does not fit a file"),
    "no_json": ({MODEL: header()[:8] + b"[}" + bytes(8)}, "no safetensors header"),
    "deep_json": ({MODEL: (9000).to_bytes(8, "little") + b"[" * 9000}, "no safetensors header"),
    "unknown_dtype": ({MODEL: header(w={**F32, "dtype": "X9"}) + bytes(8)}, "header .'X9'"),
    "negative": ({MODEL: header(w={**F32, "shape": [-2]}) + bytes(8)}, "whole numbers from 0"),
    "outside": ({MODEL: header(w={**F32, "data_offsets": [8, 16]}) + bytes(8)}, "can hold"),
    "a_directory": ({MODEL: None}, "model.safetensors: is no file"),
    "index_no_json": ({INDEX: "{"}, "index.json in .* cannot be read"),
    "index_a_list": ({INDEX: "[]"}, "no JSON object"),
    "index_without_map": ({INDEX: "{}"}, "has no weight_map"),
    "index_of_numbers": ({INDEX: index(w=3)}, "has no weight_map"),
    "index_outside": ({INDEX: index(w="../x.safetensors")}, "'../x.safetensors' is no name"),
    "index_absolute": ({INDEX: index(w="/x.safetensors")}, "'/x.safetensors' is no name"),
    "index_dots": ({INDEX: index(w="..")}, "'..' is no name of a file"),
    "index_gone": ({INDEX: index(w="a.safetensors")}, "a.safetensors: No such file"),
    "index_wrong": (
        {INDEX: index(w="a.safetensors", v="a.safetensors"), "a.safetensors": GOOD},
        "the index says that 'v' is there, and it is not",
    ),
    "twice": (
        {INDEX: index(w="a.safetensors", v="b.safetensors"), "a.safetensors": GOOD,
         "b.safetensors": GOOD},
        "'w' is in a.safetensors and in b.safetensors",
    ),
    "broken_config": ({MODEL: GOOD, "config.json": "{"}, "config.json in .* cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_directory_is_told(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOMB", str(tmp_path / "ran"))
    files, said = MALFORMED[what]
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "x.safetensors").write_bytes(GOOD)
    for name, content in files.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    specs = fs.match_specs({"w": torch.zeros(2)}, [("*", LayoutSpec())])
    with pytest.raises(StateError, match=f"(?s){said}"):
        fs.hf.load(folder, specs)
    assert not (tmp_path / "ran").exists()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_head_is_told_or_does_no_harm(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Bytes of the header and of the index changed, cut out or put in: an error of ours, or tensors."""
    params = {"w": torch.arange(6.0).view(2, 3), "v": torch.arange(4)}
    folder = tmp_path_factory.getbasetemp() / "damaged"
    folder.mkdir(exist_ok=True)
    safetensors.save_file(params, folder / "a.safetensors", {"format": "pt"})
    (folder / INDEX).write_text(index(w="a.safetensors", v="a.safetensors"))
    file = folder / data.draw(st.sampled_from(["a.safetensors", INDEX]))
    content = bytearray(file.read_bytes())
    end = len(content) - (56 if file.suffix == ".safetensors" else 0)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, end - 1))
        new = data.draw(
            st.sampled_from([b"", b"0", b"9" * 30, b'"', b"[", b"{}", b"-1", b"\xff", b"1e400", b"NaN"])
        )
        content[at : at + data.draw(st.integers(0, 2))] = new
    file.write_bytes(content)
    specs = fs.match_specs(params, [("*", LayoutSpec())])
    try:
        got = fs.hf.load(folder, specs)
    except StateError as error:
        assert str(error)
    else:
        assert {n: (v.shape, v.dtype) for n, v in got.items()} == {
            n: (v.shape, v.dtype) for n, v in params.items()
        }


def test_links_of_a_cache_and_single_files_are_read_and_names_on_a_hub_are_not(tmp_path: Path) -> None:
    specs = fs.match_specs({"w": torch.zeros(2)}, [("*", LayoutSpec())])
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "blobs/1").write_bytes(GOOD)
    (tmp_path / "snapshot/model.safetensors").symlink_to("../blobs/1")
    assert torch.equal(fs.hf.load(tmp_path / "snapshot", specs)["w"], torch.zeros(2))
    assert torch.equal(fs.hf.load(tmp_path / "snapshot/model.safetensors", specs)["w"], torch.zeros(2))
    with pytest.raises(StateError, match="snapshot_download"):
        fs.hf.load("someone/a-model", specs)


# ------------------------------------------------------------------ what cannot be written


def save_all(rank: int, folder: Path, mesh: fs.Mesh, how: str) -> None:
    specs = sharded(mesh)
    blocks = fs.shard(PARAMS, specs, mesh)
    if how == "folder":
        fs.hf.save(blocks, folder / "out", specs, mesh, max_file_bytes=400, config={"model_type": "x"})
    else:
        fs.hf.export(blocks, folder / f"out.{how}", specs, mesh)


FAILS = {"folder": [("pwrite", 0), ("pwrite", 4), ("fsync", 0), ("replace", 0)],
         "safetensors": [("pwrite", 0), ("pwrite", 4), ("fsync", 0), ("replace", 0)],
         "pt": [("posix_fallocate", 0), ("posix_fallocate", 3), ("fsync", 0)]}  # fmt: skip


class Full:
    """A file system that takes so many calls, and then no more."""

    def __init__(self, calls: int, plain: Callable[..., Any]):
        self.left, self.plain = calls, plain

    def __call__(self, *args: Any, **how: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.plain(*args, **how)


@pytest.mark.parametrize(("how", "call", "after"), [(how, *each) for how in FAILS for each in FAILS[how]])
def test_a_full_disk_fails_all_ranks_and_leaves_nothing(
    tmp_path: Path, how: str, call: str, after: int
) -> None:
    mesh = fs.make_mesh(shard=2, simulated=True)
    said = []

    def run(rank: int) -> None:
        try:
            save_all(rank, tmp_path, mesh, how)
        except (CheckpointError, StateError) as error:
            said.append((rank, str(error)))

    with mock.patch.object(os, call, Full(after, getattr(os, call))):
        fs.simulate(mesh, run)
    assert sorted(rank for rank, _ in said) == [0, 1]
    for _, text in said:
        assert "No space left on device" in text or "is full" in text, text
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("how", ["folder", "safetensors", "pt"])
def test_what_cannot_be_made_fails_all_ranks(tmp_path: Path, how: str) -> None:
    (tmp_path / "file").write_text("")
    mesh = fs.make_mesh(shard=2, simulated=True)
    said = []

    def run(rank: int) -> None:
        try:
            save_all(rank, tmp_path / "file", mesh, how)
        except CheckpointError as error:
            said.append((rank, str(error)))

    fs.simulate(mesh, run)
    assert sorted(rank for rank, _ in said) == [0, 1]
    assert all(
        "rank 0: " in text and ("Not a directory" in text or "File exists" in text) for _, text in said
    )


def failing(rank: int, folder: str, how: str) -> str:
    """On a process group; returns what this rank was told."""
    mesh = fs.make_mesh(shard=2, device="cpu")
    specs = sharded(mesh)
    blocks = fs.shard(PARAMS, specs, mesh)
    if how == "blocks" and rank == 1:
        blocks["embed"] = torch.zeros(1)
    plain = Full(3, os.pwrite) if how == "full" else os.pwrite
    names = {"embed": "other"} if how == "names" and rank == 1 else None
    try:
        with mock.patch.object(os, "pwrite", plain):
            fs.hf.save(blocks, Path(folder) / "out", specs, mesh, names=names)
    except fs.FnshardError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_ranks_fail_together(ranks: Any, tmp_path: Path) -> None:
    zero, one = ranks(2).run(failing, str(tmp_path), "full", timeout=60.0)
    assert zero.startswith("CheckpointError: saving to") and "rank 0: OSError" in zero and zero == one
    zero, one = ranks(2).run(failing, str(tmp_path), "blocks", timeout=60.0)
    assert "rank 1: StateError: not this rank's stored blocks" in zero and one.startswith(
        "StateError: not this"
    )
    for text in ranks(2).run(failing, str(tmp_path), "names", timeout=60.0):
        assert text.startswith("AgreementError") and "rank(s) 1 mean another file or other leaves" in text
    assert os.listdir(tmp_path) == []
    assert ranks(2).run(failing, str(tmp_path), "", timeout=60.0) == ["no error"] * 2


def loading(rank: int, folder: str, how: str) -> str:
    """On a process group; what this rank was told, after a collective that both take part in."""
    mesh = fs.make_mesh(shard=2, device="cpu")
    shapes = {"w": torch.empty(6, 70, device="meta"), "b": torch.empty(4, device="meta")}
    coded = LayoutSpec(P("shard"), codec="nf4", trainable=False)
    specs = fs.match_specs(shapes, [("w", coded), ("b", LayoutSpec(P("shard")))])
    alone = rank == 1
    path = Path(folder) / ("nowhere" if how == "files" and alone else "bad" if how == "values" else "good")
    more: dict[str, Any] = {"names": {"other": "x"}} if how == "names" and alone else {}
    if how == "specs" and alone:
        specs = {"w": coded, "b": LayoutSpec()}  # of unknown shapes
    said = "no error"
    try:
        fs.hf.load(path, specs, mesh, **more)
    except fs.FnshardError as error:
        said = f"{type(error).__name__}: {error}"
    connection(mesh).barrier()
    return said


def test_ranks_refuse_what_is_loaded_together(ranks: Any, tmp_path: Path) -> None:
    """Each sees its own slices alone: a rank that went on would wait for the other."""
    values = {"w": torch.ones(6, 70), "b": torch.ones(4)}
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
        safetensors.save_file(values, tmp_path / name / "model.safetensors")
        values["w"][5, 69] = math.nan  # in the slice of rank 1
    for how, says in {
        "values": "StateError: 1 leaf cannot be coded: inf, nan or too large for fp32 are",
        "files": "StateError: no weights in",
        "names": "StateError: names= has 1 paths of no leaf",
        "specs": "StateError: the specs do not know the full shapes of 2 leaves",
    }.items():
        zero, one = ranks(2).run(loading, str(tmp_path), how, timeout=60.0)
        assert one.startswith(says), one
        assert zero.startswith("CheckpointError: loading '") and f"rank 1: {says}" in zero, zero
    assert ranks(2).run(loading, str(tmp_path), "", timeout=60.0) == ["no error"] * 2


def test_a_peer_that_is_lost_is_told_at_once() -> None:
    """Nobody waits for it once more to say so."""

    class Lost:
        def gather_object(self, text: str) -> list[str]:
            raise AssertionError("there is nobody to tell")

    def work() -> None:
        raise fs.CollectiveError("rank 1 is gone")

    with pytest.raises(fs.CollectiveError, match="rank 1 is gone"):
        coordination.all_or_none(Lost().gather_object, "saving", work)


def test_what_is_there_is_not_touched_and_leftovers_are(tmp_path: Path) -> None:
    mesh = fs.make_mesh(shard=1)
    params = {"w": torch.ones(2)}
    specs = fs.match_specs(params, [("*", LayoutSpec())])
    (tmp_path / "out").mkdir()
    (tmp_path / "out/precious").write_text("")
    with pytest.raises(StateError, match="there is something at"):
        fs.hf.save(params, tmp_path / "out", specs, mesh)
    assert os.listdir(tmp_path / "out") == ["precious"]
    (tmp_path / "hollow").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "hollow")
    with pytest.raises(StateError, match="there is something at"):
        fs.hf.save(params, tmp_path / "link", specs, mesh)
    (tmp_path / "empty").mkdir()
    left = hf_write.staging_path(tmp_path / "empty")
    left.mkdir()
    (left / "model.safetensors").write_text("of a save that was killed")
    fs.hf.save(params, tmp_path / "empty", specs, mesh)
    same(tensors_of(tmp_path / "empty"), params)
    assert not left.exists()
    with pytest.raises(StateError, match="is a directory: name a file"):
        fs.hf.export(params, tmp_path / "empty", specs, mesh)
    with pytest.raises(StateError, match=r"written to \.safetensors, \.pt or \.pth"):
        fs.hf.export(params, tmp_path / "out.bin", specs, mesh)
    (tmp_path / "w.pt").write_text("old")
    fs.hf.export(params, tmp_path / "w.pt", specs, mesh)
    same(torch.load(tmp_path / "w.pt"), params)


def test_a_model_of_empty_tensors(tmp_path: Path) -> None:
    params = {"w": torch.ones(0, 3)}
    specs = fs.match_specs(params, [("*", LayoutSpec(P("shard")))])
    fs.hf.save(params, tmp_path / "m", specs)
    same(tensors_of(tmp_path / "m"), params)
    same(fs.hf.load(tmp_path / "m", specs), params)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"names": {"a": "b"}}, r"'b' is to be params\['a'\] and params\['b'\]"),
        (
            {"names": {"v": fs.hf.Transposed("x")}},
            r"params\['v'\] \[2\] is to be transposed, and is no matrix",
        ),
        ({"dtype": torch.int8}, "a float dtype"),
        ({"max_file_bytes": 0}, "max_file_bytes=0"),
        ({"config": "nowhere"}, "config='nowhere' is none"),
    ],
)
def test_what_save_refuses(tmp_path: Path, how: Any, said: str) -> None:
    params = tree_of(a=(2, 2), b=(2, 2), v=(2,))
    specs = fs.match_specs(params, [("*", LayoutSpec())])
    with pytest.raises(StateError, match=said):
        fs.hf.save(params, tmp_path / "out", specs, **how)
    with pytest.raises(StateError, match="nobody has said how these blocks are laid out"):
        fs.hf.save(params, tmp_path / "out")
    odd = {"z": torch.zeros(2, dtype=torch.complex128)}
    with pytest.raises(StateError, match=r"no such dtype, 1 leaf:\n  params\['z'\] is torch.complex128"):
        fs.hf.save(odd, tmp_path / "out", fs.match_specs(odd, [("*", LayoutSpec(trainable=False))]))
    assert os.listdir(tmp_path) == []


def test_a_modules_state_dict_with_tied_names_and_without_unsaved_buffers(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("kept", torch.arange(3.0))
            self.register_buffer("made", torch.ones(2), persistent=False)

    model = Tied()
    _, params = fs.make_functional(model)
    mesh = fs.make_mesh(shard=2, simulated=True)
    specs = fs.presets.full_shard(params, mesh)

    def run(rank: int) -> None:
        for name in ("a.pt", "a.safetensors"):
            fs.hf.export(fs.shard(params, specs, mesh), tmp_path / name, specs, mesh, model=model)

    fs.simulate(mesh, run)
    wanted = {k: v.detach() for k, v in model.state_dict().items()}
    assert list(wanted) == ["kept", "embed.weight", "head.weight"]
    loaded = torch.load(tmp_path / "a.pt")
    assert list(loaded) == list(wanted)
    assert loaded["embed.weight"].data_ptr() == loaded["head.weight"].data_ptr()
    same(loaded, wanted)
    same(safetensors.load_file(tmp_path / "a.safetensors"), wanted)
    for kept in (loaded, safetensors.load_file(tmp_path / "a.safetensors")):
        fresh = Tied()
        fresh.load_state_dict(kept, strict=True)
        assert fresh.head.weight is fresh.embed.weight and torch.equal(fresh.embed.weight, model.embed.weight)
    (tmp_path / "a.pt").rename(tmp_path / "b.pt")
    # Both names in one file: they must be the same, and the module's own buffer is taken.
    got = fs.hf.load(tmp_path / "a.safetensors", specs, fs.make_mesh(shard=2, abstract=True), model=model)
    same({p: got[p] for p in ("made", "kept")}, {"made": torch.ones(2), "kept": wanted["kept"]})
    safetensors.save_file({**wanted, "head.weight": wanted["head.weight"] + 1}, tmp_path / "c.safetensors")
    with pytest.raises(StateError, match=r"'head.weight' .* is not what 'embed.weight' is"):
        fs.hf.load(tmp_path / "c.safetensors", specs, fs.make_mesh(shard=2, abstract=True), model=model)


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    """Every test gives its file descriptors back."""
    before = set(os.listdir("/proc/self/fd"))
    yield
    left = {
        n: os.readlink(f"/proc/self/fd/{n}") for n in set(os.listdir("/proc/self/fd")) - before if _is_open(n)
    }
    assert not [path for path in left.values() if path.endswith((".safetensors", ".pt", ".json"))], left


def _is_open(number: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")
