"""Checkpoints of others: dialects, ZeRO, which bytes are read, what is refused."""

from __future__ import annotations

import enum
import io
import itertools
import os
import pickle
import shutil
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from corrupt import payloads
from errors import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict import get_state_dict
from trained import LR, STEPS, assert_same, loss_of, make_model, rows_of, step_here, train_module
from zero_folders import write_zero

import fnshard as fs
from fnshard import LayoutSpec, P
from fnshard.checkpoint.foreign.boxes import boxes_of_run
from fnshard.checkpoint.foreign.dcp import read_dcp
from fnshard.checkpoint.foreign.dcp_writing import Item, write_items, write_metadata
from fnshard.checkpoint.overlap import have_overlap
from fnshard.errors import CheckpointError, StateError
from fnshard.runtime.files import torchfile
from fnshard.runtime.files.tensorfile import Corrupt
from fnshard.runtime.files.torchfile import PlacedTensor, read_torch_file, resolve_torch_name, unpickle

LOAD: Mapping[str, Callable[..., Any]] = {
    "dcp": fs.checkpoint.load_dcp, "zero": fs.checkpoint.load_deepspeed, "torch": fs.checkpoint.load_torch,
}  # fmt: skip


# ------------------------------------------------------------------ dialects


class Application:
    """An object with a state dict of model and optimizer, as in DCP's tutorial."""

    def __init__(self, weights: Any, moments: Any):
        self.both = {"model": weights, "optim": moments}

    def state_dict(self) -> dict[str, Any]:
        return self.both

    def load_state_dict(self, state: Any) -> None: ...


def flat(moments: Any) -> dict[str, Any]:
    """Return optimizer state as torchtitan has it: flattened by name."""
    return {f"state.{n}.{s}": v for n, own in moments["state"].items() for s, v in own.items()}


DIALECTS: Mapping[str, Callable[[Any, Any], Any]] = {
    "FSDP2": lambda w, m: {"model": w, "optim": m},
    "DCP's tutorial": lambda w, m: {"app": Application(w, m)},
    "torchtitan": lambda w, m: {**w, "optimizer": flat(m), "train_state": {"step": 3}},
    "torchtitan, once": lambda w, m: {"model": w, "optimizer": flat(m), "lr_scheduler": {"last_epoch": 3}},
    "Lightning": lambda w, m: {"model": w, "optimizer_0": m},
    "compiled": lambda w, m: {
        "model": {f"_orig_mod.{n}": v for n, v in w.items()}, "optim": {"state": {
            f"_orig_mod.{n}": v for n, v in m["state"].items()}}},
}  # fmt: skip


@pytest.mark.parametrize("dialect", DIALECTS)
def test_dialects_of_dcp(dialect: str, tmp_path: Path) -> None:
    model, optimizer = train_module()
    dcp.save(DIALECTS[dialect](*get_state_dict(model, optimizer)), checkpoint_id=tmp_path, no_dist=True)
    assert_same(fs.checkpoint.load_dcp(tmp_path, step_here(fs.make_mesh(shard=1))), model, optimizer)


def test_accelerate_has_two_folders(tmp_path: Path) -> None:
    model, optimizer = train_module()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0", no_dist=True)
    step = step_here(fs.make_mesh(shard=1))
    with raises(CheckpointError, leaves="0.weight/mu", fix="step.adopt"):
        fs.checkpoint.load_dcp(tmp_path, step)
    alone = fs.checkpoint.load_dcp(tmp_path, step.specs, step.mesh)
    assert int(step.adopt(alone.params).step) == 0 and alone.opt_state["0.weight"] == {}
    dcp.save({"optimizer": moments}, checkpoint_id=tmp_path / "optimizer_0", no_dist=True)
    assert_same(fs.checkpoint.load_dcp(tmp_path, step), model, optimizer)


TORCH_FILES: Mapping[str, Callable[[nn.Module, Any], Any]] = {
    "numbered": lambda model, o: {"model": model.state_dict(), "optimizer": o.state_dict(), "epoch": 3},
    "Lightning": lambda model, o: {
        "state_dict": {f"net.{n}": v for n, v in model.state_dict().items()}, "global_step": 3,
        "optimizer_states": [o.state_dict()], "hyper_parameters": {"lr": LR},
    },
    "named": lambda model, o: dict(zip(("model", "optim"), get_state_dict(model, o), strict=True)),
}  # fmt: skip


@pytest.mark.parametrize("kind", TORCH_FILES)
def test_torch_files(kind: str, tmp_path: Path) -> None:
    model, optimizer = train_module()
    torch.save(TORCH_FILES[kind](model, optimizer), tmp_path / "state.pt")
    names = (lambda path: f"net.{path}") if kind == "Lightning" else None
    step = step_here(fs.make_mesh(shard=1))
    assert_same(fs.checkpoint.load_torch(tmp_path / "state.pt", step, names=names), model, optimizer)


def test_numbers_of_an_optimizer_that_has_names_or_several_groups(tmp_path: Path) -> None:
    """An optimizer whose order is another says so, where it was given names; else it is refused."""
    model, step = make_model(), step_here(fs.make_mesh(shard=1))
    named = list(reversed(list(model.named_parameters())))
    for kind, groups in {"named": named, "groups": [{"params": [p]} for _, p in named]}.items():
        optimizer = torch.optim.AdamW(groups, lr=LR)
        loss_of(model(rows_of(0, 0)[0]), rows_of(0, 0)[1]).backward()
        for _ in range(STEPS):
            optimizer.step()
        file = tmp_path / f"{kind}.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        if kind == "named":
            assert_same(fs.checkpoint.load_torch(file, step), model, optimizer)
        else:
            with raises(CheckpointError, says=["6 groups", "by name"]):
                fs.checkpoint.load_torch(file, step)


def test_two_models_in_one_file_are_refused(tmp_path: Path) -> None:
    """An average of the weights has their names: which of the two is meant, no key says for sure."""
    one, other = make_model().state_dict(), {n: v + 1 for n, v in make_model().state_dict().items()}
    mesh, file = fs.make_mesh(shard=1), tmp_path / "x.pt"
    specs = step_here(mesh).specs
    for tree, paths in (
        ({"model": one, "ema": {"model": other}}, ("model.0.weight", "ema.model.0.weight")),
        (
            {"online": {"state_dict": one}, "target": {"state_dict": other}},
            ("online.state_dict.0.weight", "target.state_dict.0.weight"),
        ),
        ({"state_dict": one, "model": other}, ("state_dict.0.weight", "model.0.weight")),
        ({**one, **{f"_orig_mod.{n}": v for n, v in other.items()}}, ("0.weight", "_orig_mod.0.weight")),
    ):
        torch.save(tree, file)
        with raises(CheckpointError, leaves=[repr(path) for path in paths], fix="model.state_dict()"):
            fs.checkpoint.load_torch(file, specs, mesh)
    dcp.save({"model": one, "ema": {"model": other}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    both = ["'model.0.weight'", "'ema.model.0.weight'"]
    with raises(CheckpointError, leaves=both, fix="model.state_dict()"):
        fs.checkpoint.load_dcp(tmp_path / "dcp", specs, mesh)

    # One model under two keys is one, and what is under no model's key is left aside.
    for tree in ({"state_dict": one, "model": one}, {"model": one, "ema": other}):
        torch.save(tree, file)
        params = fs.checkpoint.load_torch(file, specs, mesh).params
        assert all(torch.equal(params[name], value) for name, value in one.items())


def test_layouts_that_are_written(tmp_path: Path) -> None:
    model, optimizer = train_module()
    torch.save(TORCH_FILES["named"](model, optimizer), tmp_path / "state.pt")
    step = step_here(fs.make_mesh(shard=1))
    state = fs.checkpoint.load_torch(tmp_path / "state.pt", step)
    for layout in ("fsdp", "accelerate", "torchtitan"):
        folder = fs.checkpoint.save_dcp(tmp_path / layout, state, layout=layout, optimizer={"lr": LR})
        assert_same(fs.checkpoint.load_dcp(folder, step), model, optimizer)
    keys = read_keys(tmp_path / "torchtitan")
    assert {"0.weight", "optimizer.state.0.weight.exp_avg", "optimizer.param_groups.0.weight.lr"} <= keys
    with raises(CheckpointError, leaves=str(tmp_path / "fsdp"), fix=["elsewhere", "remove it"]):
        fs.checkpoint.save_dcp(tmp_path / "fsdp", state)


def test_masters_and_complex_leaves_there_and_back(tmp_path: Path) -> None:
    """A leaf in bf16 is written from its master copy, a complex one as complex numbers."""
    params = {"w": nn.Parameter(torch.randn(4, 3)), "c": nn.Parameter(torch.randn(3, dtype=torch.complex64))}
    narrow = LayoutSpec(storage_dtype=torch.bfloat16, optimizer_dtype=torch.float32)
    specs = fs.match_specs(params, [("w", narrow), ("*", LayoutSpec())])
    fn = lambda p, x: (p["w"].float().square().sum() + p["c"].abs().square().sum()) * x.mean()  # noqa: E731
    adamw, mesh = fs.optim.adamw(0.1), fs.make_mesh(shard=1)
    step = fs.shard_step(fn, specs, mesh=mesh, optimizer=adamw, backend="eager")
    state, _ = step(step.init(params), torch.ones(2))
    folder = fs.checkpoint.save_dcp(tmp_path / "x", state)
    found = read_dcp(folder)
    assert torch.equal(found.params["w"].data[...], state.opt_state["w"]["master"])
    assert torch.equal(found.params["c"].data[...], state.params["c"])
    assert found.slots["c"]["mu"].dtype == torch.complex64 and "master" not in found.slots["w"]
    again = fs.checkpoint.load_dcp(folder, step)
    assert all(torch.equal(again.params[p], leaf) for p, leaf in state.params.items())
    for path, slots in state.opt_state.items():
        assert all(torch.equal(again.opt_state[path][n], slot) for n, slot in slots.items()), path


def save_transposed(rank: int, folder: str) -> Any:
    """Save a state with transposed leaves from two ranks, load it again, and return the whole leaves."""
    torch.manual_seed(0)
    sizes = {"rows": (7, 5), "columns": (6, 4), "complex": (3, 4)}
    params = {p: nn.Parameter(torch.randn(size, dtype=KINDS.get(p))) for p, size in sizes.items()}
    names = lambda path: fs.hf.Transposed(f"net.{path}")  # noqa: E731
    mesh = fs.make_mesh(shard=2)
    specs = fs.match_specs(params, [("columns", LayoutSpec(P(None, "shard"))), ("*", LayoutSpec(P("shard")))])
    fn = lambda p, x: sum(leaf.abs().square().sum() for leaf in p.values()) * x.mean()  # noqa: E731
    step = fs.shard_step(fn, specs, mesh=mesh, optimizer=fs.optim.adamw(0.1), backend="eager")
    state, _ = step(step.init(params), torch.ones(1))
    fs.checkpoint.save_dcp(folder, state, names=names)
    again = fs.checkpoint.load_dcp(folder, step, names=names)
    for path, slots in state.opt_state.items():
        assert torch.equal(again.params[path], state.params[path])
        assert all(torch.equal(again.opt_state[path][n], slot) for n, slot in slots.items()), path
    return fs.unshard(state.params, specs, mesh)


KINDS = {"complex": torch.complex64}


def test_transposed_leaves_there_and_back(ranks: Any, tmp_path: Path) -> None:
    """torch finds the transposes of matrices and of their moments."""
    full = ranks(2).run(save_transposed, str(tmp_path / "x"))[0]
    found = read_dcp(tmp_path / "x")
    for path, leaf in full.items():
        there = {"model": {f"net.{path}": torch.zeros_like(leaf.t()).contiguous()}}
        dcp.load(there, checkpoint_id=tmp_path / "x", no_dist=True)
        assert torch.equal(there["model"][f"net.{path}"], leaf.t())
        assert found.slots[f"net.{path}"]["mu"].shape == leaf.t().shape


def test_what_names_cannot_say_of_a_folder_is_refused(tmp_path: Path) -> None:
    step = step_here(fs.make_mesh(shard=1))
    state = step.init(make_model())
    with raises(CheckpointError, leaves="params['0.bias'] [9]", fix="names={path: name}"):
        fs.checkpoint.save_dcp(tmp_path / "x", state, names={"0.bias": fs.hf.Transposed("b")})
    with raises(StateError, leaves="params['0.bias']", fix="fs.hf.Transposed"):
        fs.checkpoint.save_dcp(tmp_path / "x", state, names={"0.bias": 3})
    twice = {"0.weight": fs.hf.Transposed("w"), "3.weight": "w"}
    with raises(CheckpointError, leaves="'w'"):
        fs.checkpoint.save_dcp(tmp_path / "x", state, names=twice)


def read_keys(folder: Path) -> set[str]:
    return set(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)


# ------------------------------------------------------------------ ZeRO


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 3])
def test_zero(stage: int, count: int, tmp_path: Path) -> None:
    model, optimizer = train_module()
    params = {n: p.detach() for n, p in model.named_parameters()}
    moments = {n: optimizer.state[p] for n, p in model.named_parameters()}
    groups = [{n: p for n, p in params.items() if p.dim() == dim} for dim in (2, 1)]
    buffers = dict(model.named_buffers())
    write_zero(tmp_path / "global_step3", stage, count, groups, moments, STEPS, buffers=buffers)
    (tmp_path / "latest").write_text("global_step3")
    step = step_here(fs.make_mesh(shard=1))
    assert_same(fs.checkpoint.load_deepspeed(tmp_path, step), model, optimizer)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")  # what zero_to_fp32.py makes
    whole = fs.checkpoint.load_torch(tmp_path, step.specs, step.mesh)
    assert all(torch.equal(whole.params[n], v) for n, v in model.state_dict().items())


@pytest.mark.parametrize("by_name", [False, True])  # as newer Pythons, and as 3.11.0 to 3.11.3 pickle enums
@pytest.mark.parametrize("stage", ["optimizer_states", "gradients", "weights"])
def test_zero_files_hold_objects_of_deepspeed(
    stage: str, by_name: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    """These are not made, and not needed; the stage is one of them. Others are refused."""
    config = types.ModuleType("deepspeed.runtime.zero.config")
    config.ZeroStageEnum = enum.IntEnum(
        "ZeroStageEnum", {"optimizer_states": 1, "gradients": 2, "weights": 3}, module=config.__name__
    )
    config.ZeroStageEnum.__reduce_ex__ = reduce_by_name if by_name else reduce_by_value
    config.LossScaler = type("LossScaler", (), {"__module__": config.__name__, "scale": 1.0})
    for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, config.__name__, config)
    params = {"w": torch.randn(5, 3)}
    moments = {"w": {"exp_avg": torch.randn(5, 3), "exp_avg_sq": torch.rand(5, 3)}}
    extra = {"zero_stage": config.ZeroStageEnum[stage], "loss_scaler": config.LossScaler()}
    number = config.ZeroStageEnum[stage].value
    write_zero(tmp_path / "z", number, 2, [params], moments, 4, extra=extra)
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    mesh = fs.make_mesh(shard=1)
    specs = fs.presets.full_shard(params, mesh)
    state = fs.checkpoint.load_deepspeed(tmp_path / "z", specs, mesh)
    assert torch.equal(state.params["w"], params["w"])
    write_zero(tmp_path / "odd", 2, 2, [params], moments, 4, extra={"rates": Namesake(), "more": Namesake()})
    with raises(CheckpointError, says="test_foreign.Namesake"):
        fs.checkpoint.load_deepspeed(tmp_path / "odd", specs, mesh)


class Namesake:
    """An object of a stranger's."""


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_has_frozen_parameters(stage: int, tmp_path: Path) -> None:
    params = {"w": torch.randn(5, 3), "frozen": torch.randn(7, 2)}
    moments = {"w": {"exp_avg": torch.randn(5, 3), "exp_avg_sq": torch.rand(5, 3)}}
    frozen = {"frozen": params["frozen"]}
    write_zero(tmp_path / "z", stage, 2, [{"w": params["w"]}], moments, 4, frozen=frozen)
    mesh = fs.make_mesh(shard=1)
    specs = fs.match_specs(params, [("frozen", LayoutSpec(trainable=False)), ("*", LayoutSpec())])
    state = fs.checkpoint.load_deepspeed(tmp_path / "z", specs, mesh)
    assert all(torch.equal(state.params[n], v) for n, v in params.items())
    assert torch.equal(state.opt_state["w"]["nu"], moments["w"]["exp_avg_sq"]) and int(state.step) == 4


# ------------------------------------------------------------------ bytes


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_a_placed_tensor_is_the_tensor(tmp_path_factory: Any, data: Any) -> None:
    """Any box of any view of a saved tensor."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    tensor = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
    cuts = [tuple(sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2)))) for size in tensor.shape]
    half = tuple(slice(size // 2, None) for size in tensor.shape)
    view = tensor[half] if data.draw(st.booleans()) else tensor
    path = tmp_path_factory.mktemp("placed") / "x.pt"
    torch.save({"x": view, "same": [view]}, path)
    placed = read_torch_file(path)["x"]
    slices = tuple(slice(*cut) for cut in cuts)
    assert isinstance(placed, PlacedTensor) and torch.equal(placed[...], view)
    assert torch.equal(placed[slices], view[slices])


@pytest.mark.parametrize("spare", [0, 8, 1 << 16])  # bytes of gaps that are read along
@pytest.mark.parametrize(
    "view",
    [
        torch.tensor([[1.0], [2.0], [3.0]]).expand(3, 4),
        torch.full((1,), 7.0).expand(6),
        torch.full((), 7.0).expand(2, 3),
        torch.arange(3.0).expand(4, 3),
        torch.arange(8.0).unfold(0, 3, 1),
        torch.arange(12.0).unfold(0, 5, 2),
        torch.arange(12.0).view(4, 3)[::2, :2, None].expand(2, 2, 3),  # gaps and shared bytes together
        torch.arange(4.0)[::3, None].expand(2, 2),  # as many elements as it spans
    ],
    ids=lambda view: str((*view.shape, view.stride())),
)
def test_elements_of_a_placed_tensor_may_share_bytes(
    view: Tensor, spare: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchfile, "SPARE_BYTES", spare)
    torch.save({"x": view, "behind": torch.full((64,), -1.0)}, tmp_path / "x.pt")
    placed = read_torch_file(tmp_path / "x.pt")["x"]
    assert torch.equal(placed[...], view)
    for box in itertools.product(*[(slice(0, n), slice(n - 1, n), slice(0, n - 1)) for n in view.shape]):
        assert torch.equal(placed[box], view[box])
    specs = fs.presets.full_shard({"x": torch.zeros(view.shape)}, mesh := fs.make_mesh(shard=1))
    assert torch.equal(fs.checkpoint.load_torch(tmp_path / "x.pt", specs, mesh, ignore="*").params["x"], view)


@given(st.lists(st.integers(1, 4), min_size=0, max_size=4), st.integers(0, 200), st.integers(0, 200))
def test_a_run_of_elements_is_boxes(shape: list[int], first: int, last: int) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    first, last = sorted((min(first, whole.numel()), min(last, whole.numel())))
    boxes = list(boxes_of_run(shape, first, last))
    parts = [whole[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))].flatten() for box in boxes]
    assert torch.cat([*parts, torch.empty(0)]).tolist() == list(range(first, last))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(st.data())
def test_boxes_that_share_an_element_are_found(data: Any) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=3))
    cuts = st.tuples(*[st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in shape])
    seen, boxes = torch.zeros(shape, dtype=torch.int64), []
    for box in data.draw(st.lists(cuts, max_size=5)):
        seen[tuple(slice(*cut) for cut in box)] += 1
        boxes.append(([first for first, _ in box], [last - first for first, last in box]))
    assert have_overlap(boxes) == bool((seen > 1).any())


@pytest.mark.parametrize("grid", [(1 << 14, 1), (1, 1 << 14), (128, 128)])
@pytest.mark.timeout(20)  # it takes a tenth of a second; to compare each pair takes minutes
def test_boxes_of_many_ranks_are_soon_compared(grid: tuple[int, int]) -> None:
    boxes = [((3 * i, 2 * j), (3, 2)) for i in range(grid[0]) for j in range(grid[1])]
    assert not have_overlap(boxes)
    assert have_overlap([*boxes, ((1, 1), (1, 1))])


LAYOUTS = {"rows": P("shard"), "columns": P(None, "shard")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_reads_its_part_alone(layout: str, tmp_path: Path, monkeypatch: Any) -> None:
    """A leaf lies in two shards; a rank of four reads a quarter, and some hundred bytes besides."""
    full = torch.randn(512, 2**16 // 4)
    boxes = [((0, 0), (300, 2**14)), ((300, 0), (212, 2**14))]
    write_shards(tmp_path / "x", {"w": full}, boxes)
    mesh = fs.make_mesh(shard=4, abstract=True, device="cpu")
    specs = fs.match_specs({"w": full}, [("*", LayoutSpec(LAYOUTS[layout]))])
    read, preadv = [0], os.preadv

    def count(fd: int, buffers: Any, at: int) -> int:
        done = preadv(fd, buffers, at)
        read[0] += done
        return done

    monkeypatch.setattr(os, "preadv", count)
    state = fs.checkpoint.load_dcp(tmp_path / "x", specs, mesh)
    own = full[:128] if layout == "rows" else full[:, : 2**14 // 4]
    assert torch.equal(state.params["w"], own)
    assert own.nbytes <= read[0] < 1.01 * own.nbytes


def write_shards(folder: Path, tensors: Mapping[str, Tensor], boxes: Any) -> None:
    """Write tensors in these boxes, each in a file of its own, as ranks would."""
    folder.mkdir()
    written = []
    for rank, (at, size) in enumerate(boxes):
        where = tuple(slice(a, a + n) for a, n in zip(at, size, strict=True))
        items = [
            Item(("model", n), tuple(t.shape), t.dtype, [((at, size), lambda t=t, w=where: t[w])])
            for n, t in tensors.items()
        ]
        written += write_items(folder, rank, items)
    write_metadata(folder, written)


# ------------------------------------------------------------------ what is refused


def folders(tmp_path: Path) -> dict[str, Path]:
    """Make a checkpoint of each kind."""
    model, optimizer = train_module()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    params = {n: p.detach() for n, p in model.named_parameters()}
    buffers = dict(model.named_buffers())
    of = {n: optimizer.state[p] for n, p in model.named_parameters()}
    write_zero(tmp_path / "zero", 2, 2, [params], of, STEPS, buffers=buffers)
    torch.save({"model": weights, "optim": moments}, tmp_path / "torch.pt")
    return {"dcp": tmp_path / "dcp", "zero": tmp_path / "zero", "torch": tmp_path / "torch.pt"}


def test_a_payload_is_refused_and_does_not_run(tmp_path: Path) -> None:
    """It lies in the metadata, in a tensor's stream, beside the tensors of a file, or in a rank's file."""
    made, marker, mesh = folders(tmp_path), tmp_path / "marker", fs.make_mesh(shard=1)
    step = step_here(mesh)
    (item,) = [file for file in made["dcp"].iterdir() if file.suffix == ".distcp"]
    rank = made["zero"] / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    for name, target in {"dcp": made["dcp"] / ".metadata", "torch": made["torch"], "zero": rank}.items():
        before = target.read_bytes()
        for kind, payload in payloads(marker).items():
            if (kind == "torch") != (name != "dcp"):
                continue
            target.write_bytes(payload)
            with pytest.raises(CheckpointError, match=r"would run or make \w+\.open"):
                LOAD[name](made[name], step)
            assert not marker.exists()
        target.write_bytes(before)
        LOAD[name](made[name], step)
    # Beside tensors; and in the place of one.
    by_torch = payloads(marker)["torch"]
    metadata = dcp.FileSystemReader(made["dcp"]).read_metadata()
    item.write_bytes(item.read_bytes() + by_torch)
    index = next(i for i in metadata.storage_data if i.fqn == "model.0.weight")
    metadata.storage_data[index].offset = item.stat().st_size - len(by_torch)
    metadata.storage_data[index].length = len(by_torch)
    (made["dcp"] / ".metadata").write_bytes(pickle.dumps(metadata))
    with raises(CheckpointError, leaves="'model.0.weight'", says="pickle"):
        fs.checkpoint.load_dcp(made["dcp"], step)
    assert not marker.exists()


def test_enums_are_read_as_older_pythons_pickle_them(tmp_path: Path) -> None:
    """Python 3.11.0 to 3.11.3 pickle a member as `getattr(class, name)`; of other things that is refused."""
    with mock.patch.object(_MEM_FORMAT_ENCODING, "__reduce_ex__", reduce_by_name):
        made = folders(tmp_path)
    assert b"getattr" in (made["dcp"] / ".metadata").read_bytes()
    step = step_here(fs.make_mesh(shard=1))
    again = LOAD["dcp"](made["dcp"], step)
    assert all(torch.equal(again.params[n], v) for n, v in LOAD["torch"](made["torch"], step).params.items())
    (made["dcp"] / ".metadata").write_bytes(pickle.dumps(Attribute()))
    with raises(CheckpointError, says="would run or make builtins.getattr"):
        LOAD["dcp"](made["dcp"], step)


def reduce_by_name(member: enum.Enum, protocol: int) -> Any:
    return getattr, (type(member), member.name)


def reduce_by_value(member: enum.Enum, protocol: int) -> Any:
    return type(member), (member.value,)


REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"


def test_a_pickle_sets_no_state_of_what_it_is_given(tmp_path: Path) -> None:
    """Otherwise it would name other files by a tensor, or change the functions that read the next one."""
    tensor, mesh = torch.ones(3), fs.make_mesh(shard=1)
    torch.save({"model": {"w": Moved(tensor)}}, tmp_path / "moved.pt")
    with raises(CheckpointError, says="sets the state of a tensor"):
        fs.checkpoint.load_torch(tmp_path / "moved.pt", fs.presets.full_shard({"w": tensor}, mesh), mesh)
    torch.save({"model": {"w": Forged()}}, tmp_path / "forged.pt")
    with raises(CheckpointError, says="no storage"):
        fs.checkpoint.load_torch(tmp_path / "forged.pt", fs.presets.full_shard({"w": tensor}, mesh), mesh)
    for state in ({"at": 0}, (None, {"__defaults__": ()})):
        planted = b"\x80\x02" + REBUILD + pickle.dumps(state, 2)[2:-1] + b"b."
        with raises(Corrupt):
            unpickle(io.BytesIO(planted), resolve_torch_name)
    assert torch.equal(read_torch_file(save_plain(tmp_path, tensor))["w"][...], tensor)


def save_plain(folder: Path, tensor: Tensor) -> Path:
    torch.save({"w": tensor}, folder / "plain.pt")
    return folder / "plain.pt"


class Moved:
    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def __reduce__(self) -> Any:
        """Pickle a tensor, and where in its file it is said to lie."""
        function, arguments = self.tensor.__reduce_ex__(2)[:2]
        return function, arguments, {"at": 0, "path": Path("/etc/hostname")}


class Forged:
    def __reduce__(self) -> Any:
        """Pickle a tensor of another file, of objects that have a storage's attributes."""
        folder, storage = OrderedDict(), OrderedDict()
        folder.__dict__.update(parent="/etc", name="hostname")
        storage.__dict__.update(path=folder, at=0, size=1 << 40, dtype=torch.float32)
        return torch._utils._rebuild_tensor_v2, (storage, 0, (3,), (1,), False, OrderedDict())


class Attribute:
    def __reduce__(self) -> Any:
        """Pickle this as an attribute of a class that a reader has."""
        return getattr, (set, "__subclasses__")


def cut_off(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize("damage", [Path.unlink, cut_off])
@pytest.mark.parametrize("kind", ["dcp", "zero", "torch"])
def test_a_shard_that_is_missing_or_cut_off(kind: str, damage: Any, tmp_path: Path) -> None:
    made, step = folders(tmp_path), step_here(fs.make_mesh(shard=1))
    path = made[kind]
    files = [path] if kind == "torch" else [f for f in path.iterdir() if f.suffix in (".distcp", ".pt")]
    file = max(files)
    damage(file)
    with pytest.raises(CheckpointError) as caught:
        LOAD[kind](path, step)
    assert file.name in str(caught.value) or "missing are the files of 1" in str(caught.value)


def test_boxes_that_overlap_are_refused(tmp_path: Path) -> None:
    """They have as many numbers as the tensor, so that others are missing."""
    write_shards(tmp_path / "x", {"w": torch.randn(7, 5)}, [((0, 0), (7, 3)), ((0, 2), (7, 2))])
    with raises(Corrupt, leaves="model.w"):
        read_dcp(tmp_path / "x")


def test_another_model(tmp_path: Path) -> None:
    made, mesh = folders(tmp_path), fs.make_mesh(shard=1)
    theirs = fs.make_functional(make_model())[1]
    other = {("0.up" if p == "0.weight" else p): v for p, v in theirs.items() if p != "3.bias"}
    other["3.weight"] = torch.zeros(5, 8)
    specs = fs.presets.full_shard(other, mesh)
    for kind, path in made.items():
        with pytest.raises(StateError) as caught:
            LOAD[kind](path, specs, mesh)
        text = str(caught.value)
        assert "'0.up'" in text and "nearest: '0.weight'" in text  # lacking
        assert "'3.bias' [5]" in text  # left over
        assert "params['3.weight'] [5, 8]" in text  # of another shape
    prefixed = fs.presets.full_shard({f"net.{p}": v for p, v in theirs.items()}, mesh)
    with raises(StateError, fix="path.removeprefix('net.')"):
        fs.checkpoint.load_torch(made["torch"], prefixed, mesh)
    fs.checkpoint.load_torch(made["torch"], prefixed, mesh, names=lambda path: path.removeprefix("net."))


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    made, step = folders(tmp_path), step_here(fs.make_mesh(shard=1))
    with raises(CheckpointError, leaves=str(tmp_path), says="dcp"):
        fs.checkpoint.load_dcp(tmp_path, step)
    lacks = {"dcp": "no .metadata", "zero": "*_optim_states.pt", "torch": "no folder with"}
    for kind, load in LOAD.items():
        with raises(CheckpointError, says=lacks[kind]):
            load(made["zero" if kind != "zero" else "dcp"], step)
    old = tmp_path / "old.bin"
    torch.save({"w": torch.ones(2)}, old, _use_new_zipfile_serialization=False)
    with raises(CheckpointError, leaves=str(old), says="torch before 1.6"):
        fs.checkpoint.load_torch(old, step)
    rank = made["zero"] / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(rank, rank.with_name("zero_pp_rank_0_mp_rank_01_optim_states.pt"))
    with raises(CheckpointError, leaves=str(made["zero"]), says="tensor or pipeline axis"):
        fs.checkpoint.load_deepspeed(made["zero"], step)
    torch.save([1, 2], tmp_path / "list.pt")
    with raises(CheckpointError, leaves=str(tmp_path / "list.pt"), says="a list"):
        fs.checkpoint.load_torch(tmp_path / "list.pt", step)
    torch.save({"optimizer_state_dict": {"partition_count": 2}}, rank)
    rank.with_name("zero_pp_rank_0_mp_rank_01_optim_states.pt").unlink()
    with raises(CheckpointError, leaves=str(made["zero"])):
        fs.checkpoint.load_deepspeed(made["zero"], step)


def test_moments_without_a_step_are_refused(tmp_path: Path) -> None:
    model, optimizer = train_module()
    weights, moments = get_state_dict(model, optimizer)
    step = step_here(fs.make_mesh(shard=1))
    moments["state"]["0.weight"]["step"] = torch.tensor(2.0)
    torch.save({"model": weights, "optim": moments}, tmp_path / "x.pt")
    with raises(CheckpointError, leaves="'0.weight'", says=["2 to 3 updates", "after 2"]):
        fs.checkpoint.load_torch(tmp_path / "x.pt", step)
    del moments["state"]["0.weight"]["step"]
    torch.save({"model": weights, "optim": moments}, tmp_path / "x.pt")
    with raises(CheckpointError, leaves="'0.weight'", says="steps"):
        fs.checkpoint.load_torch(tmp_path / "x.pt", step)


def test_a_kept_name_of_the_metadata_is_read_by_torch(tmp_path: Path) -> None:
    """torch's own reader reads what is written here, whatever the boxes are."""
    full = torch.randn(7, 5)
    write_shards(tmp_path / "x", {"w": full}, [((0, 0), (7, 2)), ((0, 2), (3, 3)), ((3, 2), (4, 3))])
    there = {"model": {"w": torch.zeros(7, 5)}}
    dcp.load(there, checkpoint_id=tmp_path / "x", no_dist=True)
    assert torch.equal(there["model"]["w"], full)
    assert torch.equal(read_dcp(tmp_path / "x").params["w"].data[...], full)
