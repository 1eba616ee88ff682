"""Weights out of and into safetensors files: slices, pieces, memory, dtypes, names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from weights import MESHES, PARAMS, same, sharded, tensors_of

import fnshard as fs
from fnshard import LayoutSpec, P
from fnshard.errors import StateError
from fnshard.hf import reading, writing
from fnshard.runtime.collectives.connect import connection
from fnshard.runtime.collectives.simulated import Simulated

safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.usefixtures("nothing_is_left_open")


# ------------------------------------------------------------------ slices and pieces


@pytest.mark.parametrize("layout", [P("shard"), P(None, "shard")])
def test_a_rank_reads_its_own_slices_alone(tmp_path: Path, layout: P) -> None:
    """An eighth of the file, as views of its map; no block is made but the rank's own."""
    params = {f"layers.{i}.w": torch.randn(16, 24) for i in range(3)}
    safetensors.save_file(params, tmp_path / "model.safetensors")
    mesh = fs.make_mesh(shard=8, abstract=True)
    specs = fs.match_specs(params, [("*", LayoutSpec(layout))])
    viewed = []
    plain = reading.LeafSource.read

    def counted(self: reading.LeafSource, slices: Any) -> Tensor:
        viewed.append(plain(self, slices))
        return viewed[-1]

    with mock.patch.object(reading.LeafSource, "read", counted):
        blocks = fs.hf.load(tmp_path, specs, mesh)
    same(blocks, fs.shard(params, specs, mesh))
    assert sum(view.nbytes for view in viewed) == sum(v.nbytes for v in params.values()) // 8
    assert not any(block.data_ptr() == view.data_ptr() for block in blocks.values() for view in viewed)


@pytest.mark.parametrize("layout", [P("shard"), P(None, "shard"), P()])
def test_a_leaf_is_gathered_a_piece_at_a_time(layout: P) -> None:
    """Of a leaf of 4 KiB no rank sends more than 128 bytes at once; cast on arrival."""
    params = {"w": torch.randn(64, 16)}
    mesh = fs.make_mesh(shard=2, simulated=True)
    specs = fs.match_specs(params, [("*", LayoutSpec(layout))])
    sent = []
    plain = Simulated.send_buffer

    def counted(self: Any, numel: int, dtype: torch.dtype, axes: Any, rows: int = 1) -> Tensor:
        sent.append(rows * numel * dtype.itemsize)
        return plain(self, numel, dtype, axes, rows)

    def run(rank: int) -> Tensor | None:
        whole = torch.full((64, 16), float("nan"), dtype=torch.bfloat16) if rank else None
        block = fs.shard(params, specs, mesh)["w"]
        writing.gather_leaf(block, specs["w"], mesh, connection(mesh), whole)
        return whole

    with mock.patch.object(writing, "PIECE_bytes", 256), mock.patch.object(Simulated, "send_buffer", counted):
        _, whole = fs.simulate(mesh, run)
    assert torch.equal(whole, params["w"].bfloat16())
    assert sent == ([] if layout == P() else [128] * 32)


# ------------------------------------------------------------------ in and out


@pytest.mark.parametrize(
    ("axes", "policy"),
    [*((axes, {}) for axes in MESHES), *((MESHES[3], {"memory": tier}) for tier in ("host", "disk"))],
    ids=str,
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

    with mock.patch.object(writing, "PIECE_bytes", 64):
        fs.simulate(mesh, run)
    same(tensors_of(tmp_path / "out"), PARAMS)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = {f: safetensors.load_file(tmp_path / "out" / f) for f in set(index["weight_map"].values())}
    assert all(name in files[file] for name, file in index["weight_map"].items())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in PARAMS.values())
    count = len(files)
    assert sorted(files) == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert count > 2
    for tensors in files.values():
        assert len(tensors) == 1 or sum(v.nbytes for v in tensors.values()) <= 300
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


def processes(rank: int, folder: str, world: int) -> int:
    """Load and save on a group; bytes that a save of blocks of 96 MiB took besides them."""
    into, mesh = Path(folder), fs.make_mesh(shard=world, device="cpu")
    specs = sharded(mesh)
    blocks = fs.hf.load(into / "in", specs, mesh)
    same(blocks, fs.shard(PARAMS, specs, mesh))
    fs.hf.save(blocks, into / "out", specs, mesh, max_file_bytes=400)
    shapes = {f"{i}.w": (2048, 4096) if i % 2 else (1024, 8192) for i in range(6)}  # 32 MiB each
    meta = {n: torch.empty(shape, device="meta") for n, shape in shapes.items()}
    specs = fs.match_specs(meta, [("[135].*", LayoutSpec(P("shard"))), ("*", LayoutSpec(P(None, "shard")))])
    big = {n: torch.full((1024, 4096), float(rank)) for n in shapes}
    with mock.patch.object(writing, "PIECE_bytes", 1 << 20):
        before = peak(reset=True)
        fs.hf.save(big, into / "big", specs, mesh)
        saving = peak() - before
    same(fs.hf.load(into / "big", specs, mesh), big)
    return saving


def peak(*, reset: bool = False) -> int:
    """The most memory that this process has had, in bytes; from now on."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))


def test_processes_write_what_simulated_ranks_do_a_leaf_at_a_time(ranks: Any, tmp_path: Path) -> None:
    """Leaves are of 32 MiB: rank 0 has less than two besides its own blocks."""
    (tmp_path / "in").mkdir()
    safetensors.save_file(PARAMS, tmp_path / "in/model.safetensors")
    for saving in ranks(2).run(processes, str(tmp_path), 2):
        assert saving < 64 << 20, f"{saving >> 20} MiB"
    same(tensors_of(tmp_path / "out"), PARAMS)
    for name, value in tensors_of(tmp_path / "big").items():
        zeros, ones = value.chunk(2, dim=0 if int(name[0]) % 2 else 1)
        assert bool((zeros == 0).all() and (ones == 1).all()), name
