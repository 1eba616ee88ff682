"""The trace of an update equals the update, for all optimizers; what cannot be traced is refused."""

from __future__ import annotations

import operator
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from errors import raises
from foreign import FOREIGN
from optimizers import ALL, assert_close, make_step, plain_cond, random_tree
from torch import Tensor, cond, fx

import fnshard as fs
from fnshard.compiler.frontend.control_flow import dynamo_patch
from fnshard.compiler.update.family import families_of
from fnshard.compiler.update.trace import Branch, TracedUpdate, trace_update
from fnshard.errors import OptimizerError
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.optim import Optimizer, Step, adamw
from fnshard.optim.fused import ADAMW
from fnshard.optim.optimizer import init_slots, update_leaf

SHAPES = {"embed.w": (7, 3), "a.norm.w": (5,), "a.w": (4, 6), "b.scalar": (), "experts.w": (2, 3, 4)}
EVERY = {**ALL, **FOREIGN}


def trace(optimizer: Optimizer, path: str, param: Tensor, slots: Mapping[str, Tensor]) -> TracedUpdate:
    described = {name: (tuple(slot.shape), slot.dtype) for name, slot in slots.items()}
    own = optimizer.of(path, param.shape)
    return trace_update(own, path, param.shape, param.dtype, param.dtype, described)


def run(traced: TracedUpdate, grad: Tensor, slots: Mapping[str, Tensor], param: Tensor, step: Step) -> Any:
    """Return what the traced graph makes of these: the update, and the slots that change."""
    numbers = {f"number.{i}": value for i, value in enumerate(traced.prologue.numbers(step))}
    given = {"grad": grad, "param": param, **numbers, **traced.constants}
    given |= {f"slots.{name}": slot for name, slot in slots.items()}
    results = fx.Interpreter(fx.GraphModule({}, traced.graph)).run(*(given[n] for n in traced.inputs))
    update, *new = results
    return update, {n.removeprefix("slots."): v for n, v in zip(traced.outputs[1:], new, strict=True)}


@pytest.mark.suite(but={
    "clip_*": "each of the two by itself",
    "two_*": "each of the two by itself",
    "rules_of_*": "adamw_rules and sgd_rules",
    "ema_schedule*": "ema",
    "sgd_decay*": "sgd_rules",
    "nesterov*": "momentum",
    "adamw_rate*": "adamw",
})  # fmt: skip
@pytest.mark.parametrize(("name", "dtype"), [
    pytest.param(name, dtype, id=f"{name}-{dtype}", marks=[pytest.mark.long] * ((i + j) % 2))
    for i, name in enumerate(EVERY) for j, dtype in enumerate((torch.float64, torch.bfloat16))
])  # fmt: skip
def test_a_traced_update_is_the_update(name: str, dtype: torch.dtype) -> None:
    """They agree in three steps, the later ones of which start from slots that are not zero."""
    optimizer, params = EVERY[name], random_tree(0, SHAPES, dtype)
    slots = init_slots(optimizer, params)
    graphs = {path: trace(optimizer, path, params[path], slots[path]) for path in params}
    tolerance = 1e-12 if dtype == torch.float64 else 1e-2
    for count in range(3):
        grads = random_tree(100 + count, SHAPES, dtype)
        step = make_step(count, grads)
        with plain_cond():
            made = {p: update_leaf(optimizer, p, grads[p], slots[p], params[p], step) for p in params}
        for path, (update, new) in made.items():
            found, changed = run(graphs[path], grads[path], slots[path], params[path], step)
            assert_close({"update": found, **changed}, {"update": update, **new}, tolerance, tolerance)
        params = {path: params[path] + update for path, (update, _) in made.items()}
        slots = {path: {**slots[path], **new} for path, (_, new) in made.items()}


def test_an_update_of_adamw_is_one_node_and_what_the_step_decides_is_cut_off() -> None:
    param = torch.zeros(4, 3)
    traced = trace(adamw(1e-2, weight_decay=0.1, lr_scale=0.5), "w", param, {"mu": param, "nu": param})
    called = [n.target for n in traced.graph.find_nodes(op="call_function", target=ADAMW)]
    assert called == [ADAMW]
    assert {n.target for n in traced.graph.nodes if n.op == "call_function"} == {ADAMW, operator.getitem}
    numbers = [float(number) for number in traced.prologue.numbers(Step(torch.tensor(2)))]
    assert sorted(numbers) == pytest.approx([0.005, (1 - 0.999**3) ** 0.5, 1 - 0.9**3, 2], abs=1e-15)
    assert not traced.prologue.norm


def test_sides_of_a_cond_are_graphs_that_run_where_they_are_taken() -> None:
    """Also one within another, and what both read stays outside."""
    param = torch.rand(3, 3, dtype=torch.float64)

    def update(path: str, grad: Tensor, slots: Any, param: Tensor, step: Step) -> Any:
        both = grad @ grad.T
        inner = lambda: torch.cond(step.count > 5, lambda: torch.linalg.qr(both)[0], lambda: both.T)  # noqa: E731
        made = torch.cond(step.count == 0, lambda: torch.linalg.eigh(both)[1], inner)
        return made, {}

    traced = trace(Optimizer("sides()", lambda path, param: {}, update), "w", param, {})
    names = lambda graph: [n.name for n in graph.nodes if n.op == "call_function"]  # noqa: E731
    (outer,) = [n.target for n in traced.graph.nodes if isinstance(n.target, Branch)]
    assert not [n for n in names(traced.graph) if "eigh" in n or "qr" in n]
    assert [n for n in names(traced.graph) if n.startswith("mm")] == ["mm"]
    assert any("eigh" in n for n in names(outer.true.graph))
    (inner,) = [n.target for n in outer.false.graph.nodes if isinstance(n.target, Branch)]
    assert any("qr" in n for n in names(inner.true.graph)) and not names(inner.false.graph)[1:]
    for count in (0, 1, 6):
        with plain_cond():
            expected = update("w", param, {}, param, Step(torch.tensor(count)))[0]
        torch.testing.assert_close(run(traced, param, {}, param, Step(torch.tensor(count)))[0], expected)


def test_a_cond_of_another_thread_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """While an update is traced, which may have imported `cond` by its name."""
    owner, name, _ = dynamo_patch()
    asked, true = [], torch.tensor(True)

    def ask_dynamo(*_: Any, **__: Any) -> Any:
        asked.append(threading.get_ident())
        return lambda *_: None

    def update(path: str, grad: Tensor, slots: Any, param: Tensor, step: Step) -> Any:
        other = threading.Thread(target=cond, args=(true, lambda: true, lambda: true))
        other.start()
        other.join()
        return cond(step.count > 0, lambda: -grad, lambda: grad), {}

    monkeypatch.setattr(owner, name, ask_dynamo)
    traced = trace(Optimizer("threads()", lambda path, param: {}, update), "w", torch.zeros(2), {})
    assert [n.target for n in traced.graph.nodes if isinstance(n.target, Branch)]
    assert asked and threading.get_ident() not in asked
    assert getattr(owner, name) is ask_dynamo


ONES = torch.ones(6)
SIZES = {  # how often three shapes are traced, and what the update computes
    "elementwise": (1, lambda grad, m: m.lerp(grad, 0.1).sign()),
    "of a shape": (3, lambda grad, m: grad / grad.shape[0]),
    "of dims": (3, lambda grad, m: -grad if grad.dim() > 1 else grad),
    "of a size that is written down": (3, lambda grad, m: grad * torch.full((6,), 2.0)),
    "of a tensor from outside": (3, lambda grad, m: grad * ONES),
    "of rows": (3, lambda grad, m: grad / grad.sum(-1, keepdim=True)),
}


@pytest.mark.parametrize("kind", SIZES)
def test_an_update_that_asks_for_no_size_is_traced_once(kind: str) -> None:
    """Its updates of leaves of each shape are right, and so is their state."""
    traces, change = SIZES[kind]
    calls = Counter()

    def init(path: str, param: Tensor) -> Any:
        calls["init"] += 1
        return {"m": torch.ones_like(param)}

    def update(path: str, grad: Tensor, slots: Any, param: Tensor, step: Step) -> Any:
        calls["update"] += 1
        made = change(grad, slots["m"])
        return made, {"m": slots["m"] + made * step.host(lambda count: 0.5)}

    optimizer, mesh = Optimizer("counts()", init, update, rules=()), fs.make_mesh(shard=2, abstract=True)
    params = {"a": torch.rand(4, 6), "b": torch.rand(6), "c": torch.rand(3, 6)}
    specs = ResolvedSpecs.of(fs.presets.full_shard(params, mesh)).resolve(params).stored
    families = families_of(optimizer, specs, mesh)
    assert calls == {"init": 1, "update": traces}
    step = Step(torch.tensor(0))
    for path, param in params.items():
        family, slots = families[path], {"m": torch.rand(param.shape)}
        assert family.slots["m"].shape == param.shape and family.slots["m"].fill == 1
        found, new = run(family.traced, param, slots, param, step)
        expected, changed = update_leaf(optimizer, path, param, slots, param, step)
        assert_close({"update": found, **new}, {"update": expected, **changed})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_leaf_of_one_number_is_updated_as_one_of_several(dtype: torch.dtype) -> None:
    """It is updated in fp32, though a step's numbers are fp64 and 0-d too (`lerp` takes one dtype)."""

    def update(path: str, grad: Tensor, slots: Any, param: Tensor, step: Step) -> Any:
        change = grad * step.host(lambda count: 0.1 / (1 + int(count))) / step.global_norm
        return -change, {"mean": slots["mean"].lerp(change, 0.5)}

    optimizer = Optimizer("numbers()", lambda path, param: {"mean": torch.zeros_like(param)}, update)
    step = Step(torch.tensor(2), torch.tensor(3.0, dtype=torch.float64))
    found = []
    for shape in ((), (1,)):
        param, slots = torch.full(shape, 0.7, dtype=dtype), {"mean": torch.full(shape, 0.3, dtype=dtype)}
        traced = trace(optimizer, "w", param, slots)
        made = {node.meta["val"].dtype for node in traced.graph.nodes if node.op == "call_function"}
        assert made <= {dtype, torch.float32}
        update_of_leaf, new = update_leaf(optimizer, "w", param, slots, param, step)
        assert_close({"update": run(traced, param, slots, param, step)[0]}, {"update": update_of_leaf})
        found.append({"update": update_of_leaf.view(1), "mean": new["mean"].view(1)})
    assert_close(*found, atol=1e-7, rtol=1e-7)


# ------------------------------------------------------------------ mistakes


def own(update: Any, **slots: Any) -> Optimizer:
    """Make an optimizer whose update is a function of gradient, slots, parameter and step."""
    init = lambda path, param: {name: make(param) for name, make in slots.items()}  # noqa: E731
    return Optimizer("own()", init, lambda path, *args: update(*args))


MEAN = {"mean": torch.zeros_like}
KEY = {"key": lambda param: torch.zeros(1, 1, dtype=torch.int64)}
MISTAKES: dict[str, tuple[Optimizer, str | list[str]]] = {  # and what the error names beside the leaf
    "another shape": (own(lambda g, s, p, step: (g.sum(0), {})), ["update is [3]", "[4, 3]"]),
    "no tensor": (own(lambda g, s, p, step: (0.5, {})), "update is float"),
    "another kind": (own(lambda g, s, p, step: ((g > 0).int(), {})), "update is torch.int32"),
    "complex": (own(lambda g, s, p, step: (torch.fft.fft(g), {})), "update is torch.complex64"),
    "no pair": (own(lambda g, s, p, step: -g), ["one tensor", "(update, slots)"]),
    "slots of another shape": (
        own(lambda g, s, p, step: (-g, {"mean": g.mean(0)}), **MEAN), ["slot 'mean' is [3]", "[4"],
    ),
    "slots of another kind": (
        own(lambda g, s, p, step: (-g, {"key": s["key"] * 0.5}), **KEY),
        ["slot 'key' is torch.float32", "torch.int64"],
    ),
    "slots that no tensors are": (own(lambda g, s, p, step: (-g, {"mean": 1}), **MEAN), "slot 'mean' is int"),
    "slots that init does not make": (own(lambda g, s, p, step: (-g, {"nu": g})), "slot 'nu' is none"),
    "in place": (
        own(lambda g, s, p, step: (-s["mean"].lerp_(g, 0.1), {}), **MEAN),
        ["slots['mean']", "new tensors"],
    ),
    "in place of the gradient": (own(lambda g, s, p, step: (g.mul_(-0.1), {})), "in place to grad"),
    "in place of the parameter": (own(lambda g, s, p, step: (p.sub_(g) * 0, {})), "in place to param"),
    "in place of a view": (own(lambda g, s, p, step: (p[0].sub_(1) + g, {})), "in place to param"),
    "random numbers": (own(lambda g, s, p, step: (g * torch.randn_like(g), {})), ["random", "a key"]),
    "dropout": (own(lambda g, s, p, step: (torch.nn.functional.dropout(g), {})), ["random", "a key"]),
    "a value": (own(lambda g, s, p, step: (g / float(p.abs().max()), {})), ["float()", "torch.where"]),
    "an item": (own(lambda g, s, p, step: (g * g.sum().item(), {})), ".item()"),
    "a branch": (own(lambda g, s, p, step: (g if g.sum() > 0 else -g, {})), "torch.where or torch.cond"),
    "a branch by the step": (own(lambda g, s, p, step: (g if step.count > 9 else -g, {})), "step.host("),
    "numpy": (own(lambda g, s, p, step: (torch.from_numpy(g.numpy()), {})), "numpy"),
    "sides of a cond": (
        own(lambda g, s, p, step: (torch.cond(step.count > 0, lambda: g, lambda: g[0]), {})),
        ["torch.cond", "same names"],
    ),
    "a write in a cond": (
        own(lambda g, s, p, step: (torch.cond(step.count > 0, lambda: p.add_(g), lambda: g), {})),
        ["torch.cond", "add_"],
    ),
    "it fails": (own(lambda g, s, p, step: (g.nothing, {})), "AttributeError"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISTAKES)
def test_what_is_no_update_is_refused(kind: str) -> None:
    optimizer, says = MISTAKES[kind]
    param = torch.zeros(4, 3)
    with raises(OptimizerError, leaves=["own()", "params['a.w']"], says=says) as error:
        trace(optimizer, "a.w", param, optimizer.init("a.w", param))
    text = str(error.value)
    assert "params['a.w']" in text and "Fix:" in text and len(text) < 800


def test_a_step_refuses_an_optimizer_that_looks_at_values_before_it_has_any() -> None:
    fickle = own(lambda g, s, p, step: (g if float(g.sum()) > 0 else -g, {}))
    mesh, params = fs.make_mesh(shard=2, abstract=True), {"w": torch.ones(3, 2)}
    specs = fs.presets.full_shard(params, mesh)
    with raises(OptimizerError, leaves=["own()", "params['w']"], fix="torch.where"):
        fs.shard_step(lambda p, x: (p["w"] * x).sum(), specs, mesh=mesh, optimizer=fickle)
