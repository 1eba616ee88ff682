"""What optimizers allocate and launch, their schedules, and the mistakes made with them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizers import (
    ALL,
    RATE,
    copy,
    hugging_face_cosine,
    make_info,
    random_tree,
    row_sgd,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fnshard import optim, schedules
from fnshard.errors import OptimizerError
from fnshard.optim import contract
from fnshard.optim.contract import Optimizer, StepInfo
from fnshard.optim.optimizers import adamw, chain, clip_by_global_norm, ema, lars, sgd

# ------------------------------------------------------------------ memory


class Peak(TorchDispatchMode):
    """Bytes of the tensors that operators make, all counted as if none were freed."""

    made = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        inputs = {t.data_ptr() for a in args for t in (a if isinstance(a, list | tuple) else [a])
                  if isinstance(t, Tensor)}  # fmt: skip
        for t in out if isinstance(out, list | tuple) else [out]:
            if isinstance(t, Tensor) and t.data_ptr() not in inputs:
                self.made += t.nbytes
        return out


@pytest.mark.parametrize("name", ["sgd", "nesterov", "adamw", "adamw_rules", "clip_adamw_ema"])
def test_apply_allocates_nothing_of_unit_size(name):
    params = random_tree(0, {"embed.w": (100, 30), "a.norm.w": (100,), "a.w": (100, 100)})
    optimizer = ALL[name]
    slots = optimizer.init(params)
    grads = random_tree(1, {p: t.shape for p, t in params.items()})
    for dtype, most in ((torch.float64, 0), (torch.float32, 1)):
        given_grads = {p: g.to(dtype) for p, g in grads.items()}
        info = make_info(0, given_grads, params, 0.5)
        unit = sum(t.nbytes for t in params.values())
        with Peak() as peak:
            optimizer.apply(given_grads, slots, params, info)
        assert peak.made <= most * unit + 400, (peak.made, unit)


class Calls(TorchDispatchMode):
    """How often each operator is called, and the dtypes of what scales many tensors."""

    def __init__(self):
        super().__init__()
        self.seen, self.factors = Counter(), set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.seen[op._schema.name] += 1
        if op._schema.name == "aten::_foreach_mul_":
            self.factors.add((args[0][0].dtype, args[1].dtype))
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["sgd", "adamw", "clip_adamw_ema"])
def test_an_update_makes_as_many_calls_for_many_leaves_as_for_few(name, dtype):
    """Gradients in wire dtype are cast by one call and scaled by one, in the parameters' dtype."""

    def calls_of(count):
        shapes = {f"layers.{i}.w": (4, 3) for i in range(count)}
        params, grads = random_tree(0, shapes, dtype), random_tree(1, shapes, torch.bfloat16)
        info = make_info(0, grads, params, 0.5)
        with Calls() as calls:
            ALL[name].apply(grads, ALL[name].init(params), params, info)
        return calls

    few, many = calls_of(2), calls_of(20)
    for call in (
        "aten::_to_copy",
        "aten::_foreach_copy_",
        "aten::_foreach_mul_",
        "aten::copy_",
        "aten::mul_",
    ):
        assert few.seen[call] == many.seen[call], call
    assert many.seen["aten::_foreach_copy_"] == 1
    assert many.factors == {(dtype, dtype)}


# ------------------------------------------------------------------ schedules


def test_schedules_equal_their_formulas():
    steps = torch.arange(0, 12)
    cosine = schedules.warmup_cosine(0.1, 2, 6, floor=0.01)
    for step in steps:
        assert cosine(step).item() == pytest.approx(0.1 * hugging_face_cosine(int(step)), abs=1e-15)
    values = [schedules.wsd(1.0, warmup=2, total=10, decay=4, floor=0.2)(s).item() for s in steps]
    assert values == pytest.approx([0, 0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])
    values = [schedules.linear(1.0, warmup=2, total=6)(s).item() for s in steps[:8]]
    assert values == pytest.approx([0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0])
    assert schedules.constant(0.3)(steps[4]).item() == 0.3


def test_a_schedule_of_ones_own_may_return_python_numbers():
    for rate in (lambda step: 0.1 * 0.9 ** int(step), lambda step: np.float32(0.25), lambda step: 1):
        value = schedules.as_schedule(rate)(torch.tensor(3))
        assert value.shape == () and value.dtype == torch.float64
        assert value.item() == pytest.approx(float(rate(3)))


def test_betas_are_b1_and_b2():
    assert adamw(0.1, betas=(0.8, 0.95)).name == adamw(0.1, b1=0.8, b2=0.95).name
    assert adamw(betas=(0.9, 0.95)).name == adamw(1e-3, b2=0.95).name  # torch's own default rate


@given(
    peak=st.floats(0, 1), warmup=st.integers(0, 20), rest=st.integers(1, 20), decay=st.integers(0, 20),
    floor=st.floats(0, 1), step=st.integers(0, 60),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_schedules_stay_between_their_bounds(peak, warmup, rest, decay, floor, step):
    floor, total = floor * peak, warmup + rest
    made = [schedules.warmup_cosine(peak, warmup, total, floor), schedules.linear(peak, warmup, total, floor)]
    made.append(schedules.wsd(peak, warmup, total + decay, decay, floor))
    for schedule in made:
        value = schedule(torch.tensor(step))
        assert value.shape == () and value.dtype == torch.float64
        assert (0 if step < warmup else floor) - 1e-12 <= value.item() <= peak + 1e-12


def test_schedules_never_read_the_step_back():
    """A meta step has no value: `.item()` or a Python branch on it would raise."""
    for made in (RATE, schedules.linear(1.0, 2, 6), schedules.wsd(1.0, 2, 6, 2), schedules.constant(1.0)):
        value = made(torch.empty((), dtype=torch.int64, device="meta"))
        assert value.shape == () and value.dtype == torch.float64


def test_the_rate_is_a_metric_and_is_made_once_a_step():
    calls = []

    def rate(step):
        calls.append(int(step))
        return torch.tensor(0.5, dtype=torch.float64)

    optimizer = adamw(rate)
    params, grads = random_tree(0), random_tree(1)
    slots, info = optimizer.init(params), make_info(3, grads, params)
    for path in params:
        optimizer.apply({path: grads[path]}, slots, params, info)
    assert optimizer.metrics(info)["lr"].item() == 0.5
    assert calls == [3]
    both = chain(clip_by_global_norm(1.0), clip_by_global_norm(0.1), optimizer)
    assert both.metrics(info).keys() == {"lr", "grad_norm"}
    assert both.metrics(info)["grad_norm"] is info.global_norm


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_fused_kernels_take_exact_rates_and_leaves_lie_elsewhere(name, monkeypatch):
    """torch's CUDA kernels read a tensor's rate as fp32; the step is on the host, the leaves need not be."""
    rates: list[float] = []
    monkeypatch.setattr(torch, f"_fused_{name}_", lambda *_, lr, **__: rates.append(lr))
    optimizer = getattr(optim, name)(schedules.linear(0.1, 0, 7), lr_scale=1 / 3)
    params, info = random_tree(0), StepInfo(torch.tensor(4))
    optimizer.apply(copy(params), optimizer.init(params), params, info)
    assert rates and all(type(r) is float and abs(r - 0.1 * (1 - 4 / 7) / 3) < 1e-16 for r in rates), rates
    away = {path: value.to("meta") for path, value in params.items()}
    updates, _ = optimizer.update(away, optimizer.init(away), away, info)
    assert {u.device.type for u in updates.values()} == {"meta"}


# ------------------------------------------------------------------ mistakes


def test_rules_that_do_not_meet_the_leaves_are_refused():
    params = random_tree(0)
    with pytest.raises(OptimizerError, match=r"rules of weight_decay that match no leaf(.|\n)*'\*nrm\*'"):
        adamw(1e-3, weight_decay=[("*nrm*", 0.0), ("*", 0.1)]).init(params)
    with pytest.raises(OptimizerError, match=r"earlier rule took(.|\n)*'\*norm\*'(.|\n)*narrow globs first"):
        chain(sgd(0.1, lr_scale=[("*", 1.0), ("*norm*", 0.0)]), ema(0.9)).init(params)
    with pytest.raises(OptimizerError, match=r"4 leaves of 5 matched by no rule(.|\n)*params\['a.w'\]"):
        adamw(1e-3, weight_decay=[("*norm*", 0.0)]).init(params)


def test_a_blind_optimizer_on_sharded_leaves_is_refused():
    blind = Optimizer("spectral()", lambda path, grad, slots, param, info: (-grad, {}), elementwise=False)
    contract.check(blind, [])
    with pytest.raises(
        OptimizerError, match=r"spectral\(\)(.|\n)*2 leaves(.|\n)*'a.w'(.|\n)*'b.w'(.|\n)*Fix"
    ):
        contract.check(blind, ["a.w", "b.w"])
    with pytest.raises(OptimizerError, match="not elementwise"):
        contract.check(chain(clip_by_global_norm(1.0), blind), ["a.w"])
    for optimizer in (adamw(0.1), lars(0.1), row_sgd(0.1), ALL["clip_lars"]):
        contract.check(optimizer, ["a.w", "b.w"])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: adamw(-1.0), r"lr=-1.0 is no rate"),
        (lambda: adamw("3e-4"), r"lr='3e-4' is no rate"),
        (lambda: adamw(1e-3, betas=(1.0, 0.9)), r"b1=1.0 must be at least 0 and below 1"),
        (lambda: adamw(1e-3, betas=0.9), r"betas=0.9 are not two numbers"),
        (lambda: adamw(1e-3, b2=0.95, betas=(0.9, 0.95)), r"betas=.* and b1=0.9, b2=0.95: give one or"),
        (lambda: adamw(1e-3, b1=1.0), r"b1=1.0 must be at least 0 and below 1"),
        (lambda: adamw(1e-3, weight_decay=-0.1), r"weight_decay=-0.1: -0.1 is negative"),
        (lambda: sgd(0.1, nesterov=True), "nesterov needs a momentum"),
        (lambda: clip_by_global_norm(0.0), "norm must be a number above 0"),
        (lambda: clip_by_global_norm("1"), "norm must be a number above 0"),
        (lambda: ema(1.5), "decay=1.5"),
        (lambda: ema("0.9"), "decay='0.9'"),
        (lambda: chain(torch.optim.SGD), r"(?s)transforms of fnshard.optim.*SGD"),
        (lambda: schedules.warmup_cosine(0.1, 10, 5), "phases do not fit in 5"),
        (lambda: schedules.wsd(0.1, 3, 5, 3), "phases do not fit in 5"),
        (lambda: chain(), "no members"),
        (lambda: chain(adamw(0.1), clip_by_global_norm(1.0)), r"clip_by_global_norm\(max_norm=1.0\) at 1"),
        (lambda: chain(ema(0.9), adamw(0.1)), r"ema\(decay=0.9\) at 0"),
        (lambda: Optimizer("x()", None, needs=frozenset({"hessian"})), "needs 'hessian'"),
        (lambda: optim.ema_params({"w": {"mu": torch.zeros(1)}}), r"params\['w'\] has mu"),
    ],
)
def test_mistakes_are_named(make, words):
    with pytest.raises(OptimizerError, match=words):
        make()


def test_a_step_without_what_is_needed_is_named():
    params = random_tree(0)
    for optimizer, name in ((clip_by_global_norm(1.0), "global_norm"), (lars(0.1), "leaf_norms")):
        with pytest.raises(OptimizerError, match=f"StepInfo.{name}"):
            optimizer.update(params, optimizer.init(params), params, StepInfo(torch.tensor(0)))


def test_step_info_moves_to_another_device():
    info = make_info(0, random_tree(1), random_tree(0), 0.5)
    moved = info.to(torch.device("meta"))
    norm = moved.leaf_norms["a.w"]
    values = (moved.global_norm, moved.grad_scale, norm.param, norm.grad)
    assert {value.device.type for value in values} == {"meta"} and moved.step is info.step
    assert moved.gather is info.gather and moved.cut is info.cut


def test_registries_name_constructors():
    assert optim.OPTIMIZERS["adamw"](lr=1e-3).name.startswith("adamw(lr=0.001")
    made = {"constant": (1.0,), "warmup_cosine": (1.0, 1, 4), "linear": (1.0, 1, 4), "wsd": (1.0, 1, 4, 1)}
    for name, make in schedules.SCHEDULES.items():
        assert repr(make(*made[name])).startswith(name)


@pytest.mark.parametrize(
    "alone", [clip_by_global_norm(1.0), ema(0.9), chain(clip_by_global_norm(1.0), ema(0.9))]
)
def test_a_chain_without_an_update_rule_is_refused(alone: Optimizer) -> None:
    with pytest.raises(OptimizerError, match=r"has no update rule(.|\n)*chain\(.*adamw\(3e-4\)\)"):
        contract.check_kind(alone)
    contract.check_kind(chain(clip_by_global_norm(1.0), sgd(0.1), ema(0.9)))
