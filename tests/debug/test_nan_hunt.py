"""`fs.debug.nan_hunt`: NaN and inf are found where they arose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors import raises
from faults import (
    ADAMW,
    AT,
    PARAMS,
    PRESETS,
    gather_not_waited_for,
    loss,
    lying,
    mesh_of,
    plant_fault,
    schedule_wrong,
)
from torch import Tensor, nn
from toys import rows, run_chain, step_of

import fnshard as fs
from fnshard.compiler.kernels.inductor import compile_graphs
from fnshard.compiler.kernels.segments import Way
from fnshard.compiler.schedule.instructions import Cast, Run, Wait
from fnshard.debug.nan_search import tensors
from fnshard.errors import DebugError, StateError
from fnshard.runtime.executor.context import ExecutorContext
from fnshard.step import lowered


def hunt_on_ranks(
    fn: Callable[..., Any] = loss,
    params: Any = PARAMS,
    batch: Any = None,
    *,
    preset: str = "full_shard",
    policy: Mapping[str, Any] | None = None,
    spoil: Callable[[int, Any], None] | None = None,
    optimizer: Any = ADAMW,
    plant: Callable[[], Any] = nullcontext,
    **options: Any,
) -> Any:
    """Hunt on two ranks that each hold half the batch; both must say the same."""
    mesh = mesh_of()
    specs = PRESETS[preset](params, mesh, **(policy or {}))
    step = fs.shard_step(fn, specs, mesh=mesh, optimizer=optimizer, backend="eager", **options)
    batch = rows() if batch is None else batch

    def run(rank: int) -> Any:
        state = step.init(params)
        if spoil:
            spoil(rank, state)
        before = [t.clone() for t in tensors_of(state)]
        assert len(before) >= len(params)
        found = fs.debug.nan_hunt(step, state, batch[rank * 2 : rank * 2 + 2])
        assert all(
            torch.equal(a.nan_to_num(), b.nan_to_num())
            for a, b in zip(before, tensors_of(state), strict=True)
        )
        return found

    with plant():
        one, other = fs.simulate(mesh, run)
    assert one == other or str(one) == str(other)  # NaN is not equal to itself
    return one


def tensors_of(state: Any) -> list[Tensor]:
    """Return the tensors of a state, which a hunt must leave as they are."""
    return [t for _, t in tensors({"p": state.params, "o": state.opt_state})]


def spoil_with(path: str, value: float, slot: str | None = None, on: int = 1) -> Callable[[int, Any], None]:
    def spoil(rank: int, state: Any) -> None:
        if rank == on:
            (state.params[path] if slot is None else state.opt_state[path][slot])[1, 2] = value

    return spoil


def log_in_the_middle(params: Any, x: Tensor) -> Tensor:
    x = torch.tanh(x @ params["layers.0.w"])
    x = (x - x[:, :1]).abs().log()
    return run_chain({k: params[k] for k in ("layers.1.w", "layers.2.w")}, x).mean()


def sqrt_at_zero(params: Any, x: Tensor) -> Tensor:
    x = torch.tanh(x @ params["layers.0.w"])
    x = (x - x[:, :1]).abs().sqrt() + torch.ones_like(x).sqrt()
    return run_chain({k: params[k] for k in ("layers.1.w", "layers.2.w")}, x).mean()


def zero_by_zero(params: Any, x: Tensor) -> Tensor:
    x = run_chain(params, x)
    gap = x - x
    return (gap / gap).mean()


def half_overflow(params: Any, x: Tensor) -> Tensor:
    x = run_chain(params, x.to(params["layers.0.w"].dtype))
    return (x * 3e4 * 3e4).float().mean()


def no_key_is_seen(params: Any, x: Tensor) -> Tensor:
    scores = run_chain(params, x)
    mask = torch.full_like(scores, float("-inf"))
    return scores.add(mask).softmax(-1).square().mean()


FP16 = {"compute_dtype": torch.float16, "reduce_dtype": torch.float16}
BIG = {**PARAMS, "layers.1.w": PARAMS["layers.1.w"] * 1e6}
NAN = float("nan")
HUNTS: Mapping[str, tuple[AT, int | type, AT, str, str, str]] = {
    "NaN in a stored leaf": (
        {"spoil": spoil_with("layers.1.w", NAN)}, -1, {}, "nan", "stored 'layers.1.w'", ""),
    "NaN in one replica": (
        {"spoil": spoil_with("layers.0.w", NAN), "preset": "no_shard"}, -1, {}, "nan",
        "stored 'layers.0.w'", ""),
    "NaN in a moment": (
        {"spoil": spoil_with("layers.0.w", NAN, "mu")}, -1, {}, "nan",
        "slots 'layers.0.w', 'mu'", ""),
    "log of 0": ({"fn": log_in_the_middle}, Run, {"backward": False}, "inf", "value", "aten.log"),
    "sqrt at 0": ({"fn": sqrt_at_zero}, Run, {"backward": True}, "inf", "'", "aten.sqrt"),
    "0 / 0": ({"fn": zero_by_zero}, Run, {"backward": False}, "nan", "value", "aten.div.Tensor"),
    "no key is seen": (
        {"fn": no_key_is_seen}, Run, {"backward": False}, "nan", "value", "aten.softmax.int"),
    "fp16: a kernel": (
        {"fn": half_overflow, "policy": FP16, "loss_scale": 1.0}, Run, {"backward": False}, "inf", "value",
        "aten.mul.Tensor"),
    "fp16: the cast of a leaf": (
        {"params": BIG, "policy": FP16, "preset": "no_shard", "loss_scale": 1.0}, Cast,
        {"unit": "layers.1"}, "inf", "gathered 'layers.1.w'", ""),
    "fp16: on the wire alone": (
        {"policy": {"reduce_dtype": torch.float16}, "loss_scale": 1e9}, Wait, {"unit": "layers.2"}, "nan",
        "'layers.2.w'", ""),
    "reduce op: a product": (
        {"plant": lambda: lying("reduce_scatter", 0, lambda r: r * 1e30 * 1e30)}, Wait,
        {"unit": "layers.2"}, "inf", "'layers.2.w'", ""),
    "gather: for the backward, one rank": (
        {"plant": lambda: lying("all_gather", 3, lambda got: [row * NAN for row in got], 1)}, Wait,
        {"unit": "layers.1"}, "nan", "gathered 'layers.1.w'", ""),
    "scalars": (
        {"plant": lambda: lying("all_reduce", 0, lambda r: r * NAN)}, Wait, {}, "nan", "the step's loss", ""),
}  # fmt: skip


# What the line of the user's code must hold.
MARKS = {log_in_the_middle: ".abs().log()", sqrt_at_zero: ".abs().sqrt()", zero_by_zero: "gap / gap"}


@pytest.mark.parametrize("fault", HUNTS)
def test_nan_hunt_names_where_it_arose(fault: str) -> None:
    how, kind, fields, value, what, op = HUNTS[fault]
    found = hunt_on_ranks(**how)
    assert found, found
    if kind == -1:
        assert found.first.number == -1
    else:
        verb, way = kind.__name__.lower(), ".bwd(" if fields.get("backward") else ".fwd("
        assert f" {verb} " in found.first.instruction
        assert "backward" not in fields or way in found.first.instruction
        assert fields.get("unit", "") in found.first.instruction
    assert (found.first.kind, what in found.first.what) == (value, True), found
    assert op == (found.first.of or found.first.op) or not op, found
    if how.get("fn") in MARKS:
        assert "test_nan_hunt.py:" in found.first.source and MARKS[how["fn"]] in found.first.source
    text = str(found)
    assert value in text.lower() and what in text and "step 0: loss" in text


def test_nan_hunt_says_nothing_of_what_is_finite_and_of_masks() -> None:
    found = hunt_on_ranks()
    assert not found and str(found).endswith("loss, gradients and state are finite")

    def masked(params: Any, x: Tensor) -> Tensor:
        """Compute with a mask that crosses units, and an infinity that is masked away again."""
        mask = torch.zeros_like(x).masked_fill(torch.ones_like(x).triu(1) > 0, float("-inf"))
        for weight in params.values():
            x = (torch.tanh(x @ weight) + mask).softmax(-1)
        return torch.where(x > 0, (x.detach() - x.detach()).log(), 0.0).exp().mean() + x.square().mean()

    found = hunt_on_ranks(masked)
    assert not found, found


def test_nan_hunt_blames_the_fault_and_not_the_mask_beside_it() -> None:
    def fn(params: Any, x: Tensor) -> Tensor:
        mask = torch.full_like(x, float("-inf")).triu(1)
        for weight in params.values():
            x = (torch.tanh(x @ weight) + mask).softmax(-1)
        x = torch.where(x < 2, x, (x.detach() - x.detach()).log())  # infinite, and not taken
        return (x - 1).clamp(min=0).log().mean()

    found = hunt_on_ranks(fn)
    assert (found.first.kind, found.first.op) == ("inf", "aten.log"), found
    assert "clamp" in found.first.source


def test_nan_hunt_blames_no_mask_that_comes_with_the_batch() -> None:
    def fn(params: Any, mask: Tensor) -> Tensor:
        x = (run_chain(params, mask.isfinite().float()) + mask).softmax(-1)
        return (x - 1).clamp(min=0).log().mean() if broken else x.square().mean()

    mask = torch.zeros(4, 8).masked_fill(torch.ones(4, 8).triu(1) > 0, float("-inf"))
    broken = False
    assert not hunt_on_ranks(fn, batch=mask)
    broken = True
    found = hunt_on_ranks(fn, batch=mask)
    assert (found.first.op, found.first.number > 0) == ("aten.log", True), found


def test_nan_hunt_blames_no_mask_in_a_buffer() -> None:
    def fn(params: Any, x: Tensor) -> Tensor:
        x = (run_chain({k: params[k] for k in PARAMS}, x) + params["mask"]).softmax(-1)
        return (x - 1).clamp(min=0).log().mean() if broken else x.square().mean()

    mask = torch.tensor([0.0] * 5 + [-float("inf")] * 3)
    params = {**PARAMS, "mask": nn.Buffer(mask)}
    broken = False
    assert not hunt_on_ranks(fn, params)
    broken = True
    found = hunt_on_ranks(fn, params)
    assert (found.first.op, found.first.number > 0) == ("aten.log", True), found

    # NaN and +inf are faults in a buffer, too, and so is -inf in a leaf that trains.
    broken = False
    for value in (float("inf"), NAN):
        found = hunt_on_ranks(fn, {**PARAMS, "mask": nn.Buffer(torch.full((8,), value))})
        assert (found.first.number, found.first.what) == (-1, "stored 'mask'"), found
    found = hunt_on_ranks(fn, params, spoil=spoil_with("layers.1.w", -float("inf")))
    assert (found.first.number, found.first.what) == (-1, "stored 'layers.1.w'"), found


def test_nan_hunt_of_norms() -> None:
    clipped = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), ADAMW)
    found = hunt_on_ranks(lambda p, x: (run_chain(p, x) * 1e30).mean(), optimizer=clipped)
    assert "norms" in found.first.instruction and found.first.kind == "inf", found


def test_nan_hunt_of_an_update() -> None:
    def plant(context: ExecutorContext) -> ExecutorContext:
        right = context.updater.bind

        def bind(paths: Any, number: int) -> Any:
            update = right(paths, number)

            def wrong(blocks: Any, slots: Any, params: Any, *rest: Any) -> Any:
                made = update(blocks, slots, params, *rest)
                for path, stored in params.items():
                    if path == "layers.0.w":
                        stored.div_(0.0)
                return made

            return wrong

        context.updater.bind = bind
        return context

    with plant_fault(plant):
        found = hunt_on_ranks()
    assert " update reduce/layers.0" in found.first.instruction
    assert found.first.what == "stored 'layers.0.w'"


def test_nan_hunt_says_where_a_replay_broke_off() -> None:
    with (
        schedule_wrong(gather_not_waited_for),
        raises(DebugError, leaves="forward layers.1 run k1.fwd", says="KeyError: 'p:"),
    ):
        hunt_on_ranks()


def test_nan_hunt_without_an_optimizer_and_with_dropout() -> None:
    params = {"w": torch.tensor([1.0, 0.0])}

    def fn(p: Any, x: Tensor) -> Tensor:
        return (F.dropout(p["w"] * x, 0.0) + F.dropout(x, 0.5).sum() * 0).sqrt().sum()

    step = step_of(fn, params)
    step(params, torch.ones(2))
    found = fs.debug.nan_hunt(step, params, torch.ones(2), rng=(7, 3))
    assert found.step == 3
    assert found.first.of == "aten.sqrt" and ".bwd(" in found.first.instruction
    assert torch.equal(params["w"], torch.tensor([1.0, 0.0]))


def test_nan_hunt_refuses_a_consumed_state_and_what_is_no_step() -> None:
    mesh = fs.make_mesh(shard=1)
    step = fs.shard_step(
        loss, PRESETS["full_shard"](PARAMS, mesh), mesh=mesh, optimizer=ADAMW, backend="eager"
    )
    state = step.init(PARAMS)
    step(state, rows())
    with raises(StateError, leaves="consumed by step 0", fix="state.copy()"):
        fs.debug.nan_hunt(step, state, rows())
    with raises(StateError, leaves="function", fix="fs.shard_step("):
        fs.debug.nan_hunt(loss, state, rows())


@pytest.mark.long
def test_nan_hunt_replays_a_step_that_inductor_compiled() -> None:
    mesh = fs.make_mesh(shard=1)
    step = fs.shard_step(sqrt_at_zero, PRESETS["full_shard"](PARAMS, mesh), mesh=mesh, optimizer=ADAMW)
    state = step.init(PARAMS)
    kept = state.copy()
    step(state, rows())
    assert fs.debug.nan_hunt(step, kept, rows()).first.of == "aten.sqrt"


@pytest.mark.parametrize("training", [True, False])
def test_nan_hunt_names_the_kernel_where_only_the_compiled_one_fails(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler whose backward of the second unit gives NaN."""

    def compile_wrong(graphs: Any, *, backend: str, options: Any) -> Any:
        right = compile_graphs(graphs, backend="eager", options={})
        if backend == "eager":
            return right
        wrong = {key: lambda args, run=run: [g * NAN for g in run(args)] for key, run in right.items()}
        return {key: wrong[key] if key == ("k1", Way.BACKWARD) else run for key, run in right.items()}

    monkeypatch.setattr(lowered, "compile_graphs", compile_wrong)
    mesh = fs.make_mesh(shard=1)
    specs = PRESETS["full_shard"](PARAMS, mesh)
    step = fs.shard_step(loss, specs, mesh=mesh, optimizer=ADAMW if training else None, update="eager")
    state = step.init(PARAMS)
    found = fs.debug.nan_hunt(step, state, rows())
    assert (found.first.kind, found.first.kernel, found.first.only) == ("nan", "k1.bwd", "inductor"), found
    assert "k1.bwd" in str(found) and 'backend="eager"' in str(found)
    monkeypatch.setattr(lowered, "compile_graphs", compile_graphs)
    eager = fs.shard_step(loss, specs, mesh=mesh, optimizer=step.optimizer, backend="eager")
    assert not fs.debug.nan_hunt(eager, state, rows())
