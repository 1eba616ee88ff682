"""`fs.debug`: planted faults, each found at its instruction; and nothing where there is nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from sharded import remembered_kernels
from torch import Tensor
from toys import chain, rows, run_chain

import fnshard as fs
from fnshard import LayoutSpec, runner
from fnshard.compiler import lower as lower_module
from fnshard.compiler.context import Context, Reduced
from fnshard.compiler.schedule import (
    AllReduce,
    Cast,
    Free,
    Instruction,
    Run,
    Schedule,
    Update,
    Wait,
)
from fnshard.debug.layouts import Bisected
from fnshard.debug.values import tensors
from fnshard.errors import DebugError, SpecError, StateError

PARAMS = chain(3)
ADAMW = fs.optim.adamw(1e-2)
PRESETS = fs.presets.PRESETS


def loss(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """A mean over rows of a chain of three units."""
    return run_chain(params, x.to(params["layers.0.w"].dtype)).float().square().mean()


def mesh_of(**axes: int) -> fs.Mesh:
    return fs.make_mesh(**(axes or {"shard": 2}), simulated=True)


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with remembered_kernels():
        yield


# ------------------------------------------------------------------ faults


@dataclass
class Liar:
    """Collectives of which one, the `nth` of a verb, brings something else."""

    comm: Any
    verb: str
    nth: int
    lie: Callable[[Any], Any]
    calls: int = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.comm, name)
        if name != self.verb:
            return real

        def lying(*args: Any) -> Any:
            handle, self.calls = real(*args), self.calls + 1
            return Lied(handle, self.lie) if self.calls == self.nth + 1 else handle

        return lying


@dataclass
class Lied:
    handle: Any
    lie: Callable[[Any], Any]

    def wait(self) -> Any:
        return self.lie(self.handle.wait())

    def release(self) -> None:
        self.handle.release()


def sharded(context: Context) -> bool:
    """Whether this is side `b`: the one that is not no_shard."""
    return any(s.gradient.axes or s.storage.axes for s in context.schedule.specs.values())


@contextmanager
def planted(
    plant: Callable[[Context], Context], before: Callable[[Any], None] | None = None, both: bool = False
) -> Iterator[None]:
    """Steps bound in here are wrong, where they are sharded; `before`: what is done to the environment."""
    plain = runner.bind

    def bind(context: Context) -> Callable[[Any], Any]:
        if not (both or sharded(context)):
            return plain(context)
        run = plain(plant(context))

        def wrong(env: Any) -> Any:
            if before:
                before(env)
            return run(env)

        return wrong

    with mock.patch.object(runner, "bind", bind):
        yield


def lying(verb: str, nth: int, lie: Callable[[Any], Any], rank: int | None = None) -> Any:
    """A collective that lies, on all ranks or on one."""

    def plant(context: Context) -> Context:
        if rank not in (None, context.rank):
            return context
        return replace(context, comm=Liar(context.comm, verb, nth, lie))

    return planted(plant)


def kernel_wrong(name: str, backward: bool, output: int, wrong: Callable[[Tensor], Tensor]) -> Any:
    """A kernel one of whose results is wrong."""

    def plant(context: Context) -> Context:
        pair = list(context.kernels[name])
        right = pair[backward]

        def run(args: list[Tensor]) -> list[Tensor]:
            out = list(right(args))
            out[output] = wrong(out[output])
            return out

        pair[backward] = run
        return replace(context, kernels={**context.kernels, name: tuple(pair)})

    return planted(plant)


def leaf_wrong(path: str) -> Any:
    return planted(lambda c: c, lambda env: env.update({f"s:{path}": env[f"s:{path}"] * 1.01}))


def update_wrong() -> Any:
    def plant(context: Context) -> Context:
        right = context.updater.bind

        def bind(bucket: Any) -> Any:
            update = right(bucket)

            def wrong(blocks: Any, *rest: Any) -> None:
                update({p: b * (2 if p == "layers.1.w" else 1) for p, b in blocks.items()}, *rest)

            return wrong

        context.updater.bind = bind
        return context

    return planted(plant)


@contextmanager
def schedule_wrong(breaker: Callable[[list[Instruction]], None]) -> Iterator[None]:
    """Sharded schedules come out broken, and `verify` looks away."""

    def ignore(schedule: Schedule) -> Schedule:
        if not any(s.gradient.axes for s in schedule.specs.values()):
            return schedule
        lines = list(schedule.instructions)
        breaker(lines)
        return schedule.with_instructions(lines)

    with mock.patch.object(lower_module, "verify", ignore):
        yield


def first(lines: Any, kind: type, **fields: Any) -> int:
    return next(
        i for i, line in enumerate(lines)
        if isinstance(line, kind) and all(getattr(line, k) == v for k, v in fields.items())
    )  # fmt: skip


def leave_out(lines: list[Instruction], number: int) -> None:
    gone = lines.pop(number)
    for i, line in enumerate(lines):
        drops = tuple(n for n in line.drops if n not in gone.writes)
        lines[i] = replace(line, drops=drops)


def gather_not_waited_for(lines: list[Instruction]) -> None:
    leave_out(lines, first(lines, Wait, of="gather", unit="layers.1"))


def update_before_its_reduction(lines: list[Instruction]) -> None:
    wait = first(lines, Wait, of="reduce_scatter", unit="layers.1")
    lines.insert(wait, lines.pop(first(lines, Update, unit="layers.1")))


def saved_value_freed(lines: list[Instruction]) -> None:
    run = first(lines, Run, backward=True, unit="layers.1")
    value = next(n for n in lines[run].drops if n.startswith("x"))
    lines[run] = replace(lines[run], drops=tuple(n for n in lines[run].drops if n != value))
    lines.insert(run, Free("-", "backward", drops=(value,)))


def wrong_leaf_read(lines: list[Instruction]) -> None:
    """The kernel of unit 2 computes with the leaf of unit 1, which is alive: nobody but a number tells."""
    run = first(lines, Run, unit="layers.2", backward=False)
    other = next(n for n in lines[first(lines, Run, unit="layers.1")].reads if n.startswith("p:"))
    for i, line in enumerate(lines[:run]):
        lines[i] = replace(line, drops=tuple(n for n in line.drops if n != other))
    swapped = [other if n.startswith("p:") else n for n in lines[run].reads]
    lines[run] = replace(lines[run], reads=tuple(swapped))


def update_with_a_part_of_the_sum(lines: list[Instruction]) -> None:
    """Hybrid: what the reduce-scatter left, and the all-reduce in flight may overwrite."""
    issue = first(lines, AllReduce, unit="layers.2")
    update = first(lines, Update, unit="layers.2")
    lines[update] = replace(lines[update], reads=(lines[issue].reads[0], *lines[update].reads[1:]))
    move = lines.pop(update)
    lines.insert(issue + 1, move)


# ------------------------------------------------------------------ check


@pytest.mark.parametrize("preset", PRESETS)
def test_check_says_nothing_of_what_is_right(preset: str) -> None:
    mesh = mesh_of(replicate=2, shard=2) if preset == "hybrid_shard" else mesh_of()
    found = fs.debug.check(loss, PARAMS, rows(), PRESETS[preset](PARAMS, mesh), mesh)
    assert found and not found.failed
    assert {a.leaf for a in found.leaves} == set(PARAMS)
    assert str(found).startswith("3 gradients and the loss on mesh ")


def test_check_of_micro_batches_means_and_lower_precision() -> None:
    mesh = mesh_of()
    bf16 = PRESETS["full_shard"](PARAMS, mesh, compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert fs.debug.check(loss, PARAMS, (rows(),), bf16, mesh, remat="unit")

    def masked(params: Any, x: Tensor, keep: Tensor) -> fs.Mean:
        return fs.Mean((run_chain(params, x).square().sum(-1) * keep).sum(), keep.sum())

    keep = torch.tensor([1.0, 1.0, 1.0, 0.0])
    specs = PRESETS["full_shard"](PARAMS, mesh)
    assert fs.debug.check(masked, PARAMS, (rows(), keep), specs, accumulate=2)


@pytest.mark.parametrize("which", ["scaled", "own part", "one rank"])
def test_check_names_the_leaf_whose_gradient_is_wrong(which: str) -> None:
    lie = {"scaled": lambda r: r * 2, "own part": lambda r: r / 2, "one rank": lambda r: r + 1}[which]
    specs = PRESETS["full_shard"](PARAMS, mesh_of())
    # Units are reduced last to first.
    with lying("reduce_scatter", 1, lie, 1 if which == "one rank" else None):
        found = fs.debug.check(loss, PARAMS, rows(), specs, strict=False)
        with pytest.raises(DebugError, match=r"1 beyond rtol=0.0001(.|\n)*layers.1.w(.|\n)*fs.debug.bisect"):
            fs.debug.check(loss, PARAMS, rows(), specs)
    assert [a.leaf for a in found.failed] == ["layers.1.w"] == [found.leaves[0].leaf]
    assert found.leaves[0].relative > 0.4
    assert which != "one rank" or found.leaves[0].rank == 1
    assert "the sharded step" in found.cause


def test_check_tells_a_function_that_is_no_mean_from_a_wrong_layout() -> None:
    specs = PRESETS["full_shard"](PARAMS, mesh_of())
    with pytest.raises(DebugError, match=r"`fn` itself(.|\n)*mean over rows \(of a sum the step gives 1/2\)"):
        fs.debug.check(lambda p, x: run_chain(p, x).square().sum(), PARAMS, rows(), specs)


def test_check_refuses_what_it_cannot_compare() -> None:
    specs = PRESETS["full_shard"](PARAMS, mesh_of())
    with pytest.raises(StateError, match=r"cannot be cut into 2 parts(.|\n)*batch\['0'\] \[3, 8\]"):
        fs.debug.check(loss, PARAMS, rows()[:3], specs)
    with pytest.raises(StateError, match="draws random numbers"):
        fs.debug.check(lambda p, x: F.dropout(run_chain(p, x), 0.5).mean(), PARAMS, rows(), specs)
    with pytest.raises(SpecError, match=r"is local(.|\n)*simulated=True|is abstract(.|\n)*simulated=True"):
        fs.debug.check(loss, PARAMS, rows(), specs, fs.make_mesh(shard=2, abstract=True))


# ------------------------------------------------------------------ bisect


def bisected(preset: str = "full_shard", policy: Any = None, **how: Any) -> Bisected:
    mesh = mesh_of(replicate=2, shard=2) if preset == "hybrid_shard" else mesh_of()
    a, b = PRESETS["no_shard"](PARAMS, mesh), PRESETS[preset](PARAMS, mesh)
    b = {p: replace(s, **(policy or {}).get(p, {})) for p, s in b.items()}
    return fs.debug.bisect(loss, a, b, PARAMS, rows(), mesh=mesh, **{"optimizer": ADAMW, **how})


@pytest.mark.parametrize("preset", PRESETS)
def test_bisect_says_nothing_of_what_is_right(preset: str) -> None:
    found = bisected(preset, options_b={"remat": "unit", "prefetch": 0})
    assert not found, found
    assert str(found) == f"no difference in {found.compared} values"
    kinds = {k for k in ("leaf", "kernel", "collective", "first", "failure") if getattr(found, k)}
    assert kinds == set()
    assert found.compared > 25


BF16 = {"layers.1.w": {"compute_dtype": torch.bfloat16}}
RED16 = {"layers.1.w": {"reduce_dtype": torch.bfloat16}}
RANK0 = [lambda got: [got[0]] * 2, lambda got: got[::-1]]
ROUND = lambda got: [row.bfloat16().to(row.dtype) for row in got]  # noqa: E731
AT = Mapping[str, Any]
WRONG: Mapping[str, tuple[Callable[[], Any], AT, type, AT, str]] = {
    "reduce op: twice": (
        lambda: lying("reduce_scatter", 0, lambda r: r * 2), {}, Wait,
        {"of": "reduce_scatter", "unit": "layers.2"}, "b is 2 times a"),
    "reduce op: a part": (
        lambda: lying("reduce_scatter", 1, lambda r: r * 0.9), {}, Wait,
        {"of": "reduce_scatter", "unit": "layers.1"}, "layers.1.w"),
    "reduce: one rank": (
        lambda: lying("reduce_scatter", 2, lambda r: r + 0.1, 1), {}, Wait,
        {"of": "reduce_scatter", "unit": "layers.0"}, "rank 1"),
    "all_reduce: left out": (
        lambda: lying("all_reduce", 2, lambda r: r / 2), {"preset": "hybrid_shard"}, Wait,
        {"of": "all_reduce", "unit": "layers.1"}, "b is 0.5 times a"),
    "gather: ranks swapped": (
        lambda: lying("all_gather", 1, RANK0[1]), {}, Wait,
        {"of": "gather", "unit": "layers.1"}, "leaf as kernels see it 'layers.1.w'"),
    "gather: own row twice": (
        lambda: lying("all_gather", 0, RANK0[0]), {}, Wait,
        {"of": "gather", "unit": "layers.0"}, "layers.0.w"),
    "gather: for the backward": (
        lambda: lying("all_gather", 3, RANK0[1]), {}, Wait,
        {"of": "gather", "unit": "layers.1", "phase": "backward"}, "layers.1.w"),
    "dtype on the wire": (
        lambda: lying("all_gather", 2, ROUND), {}, Wait,
        {"of": "gather", "unit": "layers.2"}, "layers.2.w"),
    "publish": (
        lambda: lying("all_gather", 1, RANK0[1]), {"preset": "zero2"}, Wait,
        {"of": "publish"}, "updated leaf"),
    "scalars": (
        lambda: lying("all_reduce", 0, lambda r: r * 2), {}, Wait, {"of": "reduce_scalars"}, "scalar 'loss'"),
    "dtype of a leaf": (
        lambda: planted(lambda c: c), {"policy": BF16}, Wait,
        {"of": "gather", "unit": "layers.1"}, "a has float32, b bfloat16"),
    "dtype of a reduction": (
        lambda: planted(lambda c: c), {"policy": RED16}, Wait,
        {"of": "reduce_scatter", "unit": "layers.1"}, "a has float32, b bfloat16"),
    "kernel": (
        lambda: kernel_wrong("k1", False, 0, lambda v: v + 0.1), {}, Run,
        {"unit": "layers.1", "backward": False}, "value 'matmul_default_1'"),
    "kernel, loss": (
        lambda: kernel_wrong("k2", False, 0, lambda v: v * 3), {}, Run,
        {"unit": "layers.2", "backward": False}, "b is 3 times a"),
    "backward: the leaf": (
        lambda: kernel_wrong("k1", True, 1, lambda v: v.T), {}, Run,
        {"unit": "layers.1", "backward": True}, "gradient of leaf 'layers.1.w'"),
    "backward: the value": (
        lambda: kernel_wrong("k2", True, 0, torch.zeros_like), {}, Run,
        {"unit": "layers.2", "backward": True}, "gradient of value"),
    "bad leaf": (lambda: leaf_wrong("layers.1.w"), {}, type(None), {}, "stored leaf 'layers.1.w'"),
    "update": (update_wrong, {}, Update, {"unit": "layers.1"}, "layers.1.w"),
    "other optimizer": (
        lambda: planted(lambda c: c), {"options_b": {"optimizer": fs.optim.adamw(2e-2)}}, Update, {},
        "updated leaf"),
    "missing wait": (
        lambda: schedule_wrong(gather_not_waited_for), {}, Run, {"unit": "layers.1"},
        "KeyError: 'p:layers.1.w"),
    "update too early": (
        lambda: schedule_wrong(update_before_its_reduction), {}, Update, {"unit": "layers.1"},
        "KeyError: 'r:"),
    "freed too early": (
        lambda: schedule_wrong(saved_value_freed), {}, Run, {"unit": "layers.1", "backward": True},
        "KeyError: 'x1"),
    "the wrong leaf read": (
        lambda: schedule_wrong(wrong_leaf_read), {}, Run, {"unit": "layers.2"}, "value 'mean_default'"),
    "micro-batch": (
        lambda: lying("reduce_scatter", 3, lambda r: r * 2),
        {"options_a": {"accumulate": 2}, "options_b": {"accumulate": 2}}, Wait,
        {"of": "reduce_scatter", "unit": "layers.2", "phase": "backward.1"}, "gradient of a micro-batch"),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_bisect_names_the_instruction_that_was_made_wrong(fault: str) -> None:
    plant, how, kind, fields, said = WRONG[fault]
    with plant():
        found = bisected(**how)
    assert found
    number = found.first.number
    line = found.schedules[1].instructions[number] if number >= 0 else None
    assert isinstance(line, kind), found
    assert {k: getattr(line, k) for k in fields} == fields, found
    assert said in str(found.first), found
    named = {Run: "kernel", Wait: "collective"}.get(kind)
    if not found.first.failed and named:
        assert getattr(found, named) is found.first
    if "layers." in said and not found.first.failed:
        assert found.leaf is found.first


def test_bisect_of_other_micro_batches_and_of_a_spec_tree_with_itself() -> None:
    found = bisected(options_b={"accumulate": 2})
    assert not found, found
    assert "micro-batches differ" in found.note
    mesh = mesh_of()
    specs = PRESETS["full_shard"](PARAMS, mesh)
    with lying("reduce_scatter", 0, lambda r: r + 1):  # on both sides
        assert not fs.debug.bisect(loss, specs, specs, PARAMS, rows(), options_b={"remat": "unit"})


def test_bisect_of_a_layout_that_rests_on_the_host() -> None:
    host = {p: {"memory": "host", "optimizer_memory": "host"} for p in PARAMS}
    for how in ({}, {"options_a": {"accumulate": 2}, "options_b": {"accumulate": 2}}):
        found = bisected(policy=host, **how)
        assert not found, found
        with lying("reduce_scatter", 1, lambda r: r * 2):
            found = bisected(policy=host, **how)
        assert " wait reduce_scatter reduce/layers.1" in found.first.instruction


def test_bisect_looks_at_every_replica_of_either_side_and_not_at_parts_of_sums() -> None:
    def plant(context: Context) -> Context:
        if sharded(context) or context.rank == 0:
            return context
        return replace(context, comm=Liar(context.comm, "all_reduce", 2, lambda r: r * 1.5))

    mesh = mesh_of()
    whole, cut = (PRESETS[name](PARAMS, mesh) for name in ("no_shard", "full_shard"))
    for sides in ((whole, cut), (cut, whole)):
        with planted(plant, both=True):
            found = fs.debug.bisect(loss, *sides, PARAMS, rows(), mesh=mesh)
        assert found.first is not None, "a replica that is wrong on rank 1 alone"
        assert found.first.what == "reduced gradient 'layers.1.w'", found
    mesh = mesh_of(replicate=2, shard=2)
    hybrid = PRESETS["hybrid_shard"](PARAMS, mesh)
    found = fs.debug.bisect(loss, hybrid, hybrid, PARAMS, rows(), mesh=mesh, options_b={"prefetch": 0})
    assert not found, found


def test_bisect_takes_the_state_of_one_rank_and_no_other() -> None:
    alone, mesh = fs.make_mesh(shard=1), mesh_of()
    specs = PRESETS["full_shard"](PARAMS, alone)
    state = fs.shard_step(loss, specs, mesh=alone, optimizer=ADAMW, backend="eager").init(PARAMS)
    assert not fs.debug.bisect(loss, specs, specs, state, rows())
    step = fs.shard_step(loss, specs, mesh=mesh, optimizer=ADAMW, backend="eager")
    part = fs.simulate(mesh, lambda rank: step.init(PARAMS))[0]
    with pytest.raises(StateError, match=r"one rank's part(.|\n)*fs.unshard"):
        fs.debug.bisect(loss, specs, specs, part, rows())


def test_bisect_under_an_adversary_sees_what_is_read_before_it_was_summed() -> None:
    with schedule_wrong(update_with_a_part_of_the_sum):
        found = bisected("hybrid_shard", adversary="early")
    line = found.schedules[1].instructions[found.first.number]
    assert isinstance(line, Update) and line.unit == "layers.2"


# ------------------------------------------------------------------ nan_hunt


def hunted(
    fn: Callable[..., Any] = loss,
    params: Any = PARAMS,
    batch: Any = None,
    *,
    preset: str = "full_shard",
    policy: Mapping[str, Any] | None = None,
    spoil: Callable[[int, Any], None] | None = None,
    optimizer: Any = ADAMW,
    **options: Any,
) -> Any:
    """A hunt on two ranks that each hold half the batch; both must say the same."""
    mesh = mesh_of()
    specs = PRESETS[preset](params, mesh, **(policy or {}))
    step = fs.shard_step(fn, specs, mesh=mesh, optimizer=optimizer, backend="eager", **options)
    batch = rows() if batch is None else batch

    def run(rank: int) -> Any:
        state = step.init(params)
        if spoil:
            spoil(rank, state)
        before = [t.clone() for t in held_by(state)]
        found = fs.debug.nan_hunt(step, state, batch[rank * 2 : rank * 2 + 2])
        assert step.count == 0
        assert all(
            torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, held_by(state), strict=True)
        )
        return found

    one, other = fs.simulate(mesh, run)
    assert one == other or str(one) == str(other)  # NaN is not equal to itself
    return one


def held_by(state: Any) -> list[Tensor]:
    """What a state holds, which a hunt must leave as it is."""
    return [t for _, t in tensors({"p": state.params, "o": state.opt_state})]


def spoiled(path: str, value: float, slot: str | None = None, on: int = 1) -> Callable[[int, Any], None]:
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


def exp_overflow(params: Any, x: Tensor) -> Tensor:
    return (run_chain(params, x) * 500).exp().mean()


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
        {"spoil": spoiled("layers.1.w", NAN)}, -1, {}, "nan", "stored leaf 'layers.1.w'", ""),
    "inf in a stored leaf": (
        {"spoil": spoiled("layers.2.w", float("inf"), on=0)}, -1, {}, "inf", "stored leaf 'layers.2.w'", ""),
    "NaN in one replica": (
        {"spoil": spoiled("layers.0.w", NAN), "preset": "no_shard"}, -1, {}, "nan",
        "stored leaf 'layers.0.w'", ""),
    "NaN in a moment": (
        {"spoil": spoiled("layers.0.w", NAN, "mu")}, -1, {}, "nan",
        "optimizer state of leaf 'layers.0.w', slot 'mu'", ""),
    "NaN in the batch of one rank": (
        {"batch": rows().index_fill(0, torch.tensor([3]), NAN)}, -1, {}, "nan", "batch leaf '0'", ""),
    "log of 0": ({"fn": log_in_the_middle}, Run, {"backward": False}, "inf", "value", "aten.log"),
    "sqrt at 0": ({"fn": sqrt_at_zero}, Run, {"backward": True}, "inf", "gradient of", "aten.sqrt"),
    "0 / 0": ({"fn": zero_by_zero}, Run, {"backward": False}, "nan", "value", "aten.div.Tensor"),
    "exp": ({"fn": exp_overflow}, Run, {"backward": False}, "inf", "value", "aten.exp"),
    "no key is seen": (
        {"fn": no_key_is_seen}, Run, {"backward": False}, "nan", "value", "aten.softmax.int"),
    "fp16: a kernel": (
        {"fn": half_overflow, "policy": FP16, "loss_scale": 1.0}, Run, {"backward": False}, "inf", "value",
        "aten.mul.Tensor"),
    "fp16: the cast of a leaf": (
        {"params": BIG, "policy": FP16, "preset": "no_shard", "loss_scale": 1.0}, Cast,
        {"unit": "layers.1"}, "inf", "gathered leaf 'layers.1.w'", ""),
    "fp16: the gradient": (
        {"policy": FP16, "loss_scale": 1e9}, Run, {"backward": True}, "inf", "gradient of", ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", HUNTS)
def test_nan_hunt_names_where_it_arose(fault: str) -> None:
    how, kind, fields, value, what, op = HUNTS[fault]
    found = hunted(**how)
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
    if kind == -1 and value == "nan":
        assert len(found.found) == 1, found  # what comes of it elsewhere is no finding of its own
    text = str(found)
    assert value in text.lower() and what in text and "step 0: loss" in text


@pytest.mark.parametrize("fn", [log_in_the_middle, sqrt_at_zero, zero_by_zero])
def test_nan_hunt_names_the_line_of_the_users_code(fn: Callable[..., Any]) -> None:
    source = hunted(fn).first.source
    marks = {log_in_the_middle: ".abs().log()", sqrt_at_zero: ".abs().sqrt()", zero_by_zero: "gap / gap"}
    assert "test_debug.py:" in source and marks[fn] in source


def test_nan_hunt_says_nothing_of_what_is_finite_and_of_masks() -> None:
    assert not hunted()
    assert str(hunted()).endswith("loss, gradients and state are finite")

    def masked(params: Any, x: Tensor) -> Tensor:
        """A mask that crosses units, and an infinity that is masked away again."""
        mask = torch.zeros_like(x).masked_fill(torch.ones_like(x).triu(1) > 0, float("-inf"))
        for weight in params.values():
            x = (torch.tanh(x @ weight) + mask).softmax(-1)
        return torch.where(x > 0, (x.detach() - x.detach()).log(), 0.0).exp().mean() + x.square().mean()

    found = hunted(masked)
    assert not found, found


def test_nan_hunt_blames_the_fault_and_not_the_mask_beside_it() -> None:
    def fn(params: Any, x: Tensor) -> Tensor:
        mask = torch.full_like(x, float("-inf")).triu(1)
        for weight in params.values():
            x = (torch.tanh(x @ weight) + mask).softmax(-1)
        x = torch.where(x < 2, x, (x.detach() - x.detach()).log())  # infinite, and not taken
        return (x - 1).clamp(min=0).log().mean()

    found = hunted(fn)
    assert (found.first.kind, found.first.op) == ("inf", "aten.log"), found
    assert "clamp" in found.first.source


def test_nan_hunt_blames_no_mask_that_comes_with_the_batch() -> None:
    def fn(params: Any, mask: Tensor) -> Tensor:
        x = (run_chain(params, mask.isfinite().float()) + mask).softmax(-1)
        return (x - 1).clamp(min=0).log().mean() if broken else x.square().mean()

    mask = torch.zeros(4, 8).masked_fill(torch.ones(4, 8).triu(1) > 0, float("-inf"))
    broken = False
    assert not hunted(fn, batch=mask)
    broken = True
    found = hunted(fn, batch=mask)
    assert (found.first.op, found.first.number > 0) == ("aten.log", True), found


def test_nan_hunt_of_a_collective_that_brings_nan() -> None:
    with lying("reduce_scatter", 1, lambda r: r.clone().fill_(float("nan")), 1):
        found = hunted()
    assert "wait reduce_scatter reduce/layers.1" in found.first.instruction
    assert found.first.what == "reduced gradient of leaf 'layers.1.w'" and found.first.rank == 1


def test_nan_hunt_of_a_sum_that_overflows_and_of_norms() -> None:
    clipped = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), ADAMW)
    found = hunted(lambda p, x: (run_chain(p, x) * 1e30).mean(), optimizer=clipped)
    assert "norms" in found.first.instruction and found.first.kind == "inf", found
    with lying("reduce_scatter", 0, lambda r: r * 1e30 * 1e30):
        assert "wait reduce_scatter reduce/layers.2" in hunted().first.instruction


def test_nan_hunt_of_an_update() -> None:
    def plant(context: Context) -> Context:
        right = context.updater.bind

        def bind(bucket: Any) -> Any:
            update = right(bucket)

            def wrong(blocks: Any, slots: Any, params: Any, env: Any) -> None:
                update(blocks, slots, params, env)
                for path, stored in params.items():
                    if path == "layers.0.w":
                        stored.div_(0.0)

            return wrong

        context.updater.bind = bind
        return context

    with planted(plant):
        found = hunted()
    assert " update reduce/layers.0" in found.first.instruction
    assert found.first.what == "stored leaf 'layers.0.w'"


def test_nan_hunt_of_a_buffer_that_is_read_while_it_is_summed() -> None:
    mesh = mesh_of(replicate=2, shard=2)
    specs = PRESETS["hybrid_shard"](PARAMS, mesh)
    with schedule_wrong(update_with_a_part_of_the_sum):
        step = fs.shard_step(loss, specs, mesh=mesh, optimizer=ADAMW, backend="eager")
        part = rows()[:1]
        ranks = fs.simulate(
            mesh, lambda rank: fs.debug.nan_hunt(step, step.init(PARAMS), part), adversary="early"
        )
    assert " update reduce/layers.2" in ranks[0].first.instruction


def test_nan_hunt_says_where_a_replay_broke_off() -> None:
    with (
        schedule_wrong(gather_not_waited_for),
        pytest.raises(
            DebugError, match=r"broke off at line \d+: forward layers.1 run k1.fwd(.|\n)*KeyError: 'p:"
        ),
    ):
        hunted()


def on_a_rank(rank: int) -> Any:
    mesh = fs.make_mesh(shard=2, device="cpu")
    specs = PRESETS["full_shard"](PARAMS, mesh)
    step = fs.shard_step(sqrt_at_zero, specs, mesh=mesh, optimizer=ADAMW, backend="eager")
    state = step.init(PARAMS)
    kept = state.copy()
    step(state, rows()[rank * 2 :][:2])
    found = fs.debug.nan_hunt(step, kept, rows()[rank * 2 :][:2])
    return found.first.of, found.first.number, found.first.rank, step.count


def test_nan_hunt_on_real_ranks(ranks: Any) -> None:
    one, other = ranks(2).run(on_a_rank)
    assert one == other
    assert (one[0], one[2:]) == ("aten.sqrt", (0, 1))


def test_nan_hunt_without_an_optimizer_and_with_dropout() -> None:
    params = {"w": torch.tensor([1.0, 0.0])}
    specs = fs.match_specs(params, [("*", LayoutSpec())])

    def fn(p: Any, x: Tensor) -> Tensor:
        return (F.dropout(p["w"] * x, 0.0) + F.dropout(x, 0.5).sum() * 0).sqrt().sum()

    step = fs.shard_step(fn, specs, backend="eager")
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
    with pytest.raises(StateError, match=r"consumed by step 0(.|\n)*state.copy\(\)"):
        fs.debug.nan_hunt(step, state, rows())
    with pytest.raises(StateError, match="what shard_step made, not function"):
        fs.debug.nan_hunt(loss, state, rows())


@pytest.mark.long
def test_nan_hunt_replays_a_step_that_inductor_compiled() -> None:
    mesh = fs.make_mesh(shard=1)
    step = fs.shard_step(sqrt_at_zero, PRESETS["full_shard"](PARAMS, mesh), mesh=mesh, optimizer=ADAMW)
    state = step.init(PARAMS)
    kept = state.copy()
    step(state, rows())
    assert fs.debug.nan_hunt(step, kept, rows()).first.of == "aten.sqrt"


# ------------------------------------------------------------------ assert_max_compiles


def small_step(**options: Any) -> tuple[Any, dict[str, Tensor]]:
    params = {"w": torch.ones(3)}
    specs = fs.match_specs(params, [("*", LayoutSpec())])
    return fs.shard_step(lambda p, x: (p["w"] * x).sum(), specs, backend="eager", **options), params


def test_compiles_are_counted_and_one_too_many_says_what_changed() -> None:
    step, params = small_step()
    with fs.debug.assert_max_compiles(1) as compiled:
        for _ in range(3):
            step(params, torch.ones(2, 3))
        assert len(compiled) == 1
        assert "its first batch: batch['0'] [2, 3] torch.float32" in str(compiled)
        with pytest.raises(DebugError, match=r"compilation 2, and at most 1(.|\n)*batch\['0'\] from \[2, 3\] "
                           r"torch.float32 to \[5, 3\] torch.float32"):  # fmt: skip
            step(params, torch.ones(5, 3))
    with pytest.warns(UserWarning, match="compiling again"):
        step(params, torch.ones(5, 3))  # outside nobody counts


def test_compiles_of_another_step_of_what_was_on_paper_and_of_what_was_forgotten() -> None:
    step, params = small_step(cache=1)
    lowered = step.lower(params, torch.ones(2, 3))
    assert lowered.compiled is None
    with pytest.raises(DebugError, match="compilation 1, and at most 0"), fs.debug.assert_max_compiles(0):
        step(params, torch.ones(2, 3))
    step(params, torch.ones(2, 3))
    with fs.debug.assert_max_compiles(0):
        step(params, torch.ones(2, 3))
    with fs.debug.assert_max_compiles(2) as compiled, pytest.warns(UserWarning, match="compiling again"):
        step.lower(params, torch.ones(4, 3))
        step(params, torch.ones(4, 3))
        assert len(compiled) == 1
        step(params, torch.ones(2, 3))
    with fs.debug.assert_max_compiles(3) as compiled:
        with pytest.warns(UserWarning, match="compiling again"):
            step(params, torch.ones(4, 3))
            step(params, torch.ones(2, 3))
            step(params, torch.ones(4, 3))
        assert "forgot (cache=1)" in str(compiled).splitlines()[-1]
    with fs.debug.assert_max_compiles(2) as compiled:
        for _ in range(2):
            other, params = small_step()
            other(params, torch.ones(2, 3))
    assert "a new step of a function that has one" in str(compiled)
    with pytest.raises(SpecError, match="how many compilations"), fs.debug.assert_max_compiles(-1):
        pass


def test_compiles_of_simulated_ranks_count_once() -> None:
    mesh = mesh_of()
    step = fs.shard_step(loss, PRESETS["full_shard"](PARAMS, mesh), mesh=mesh, backend="eager")
    with fs.debug.assert_max_compiles(1) as compiled:
        fs.simulate(mesh, lambda rank: step(step.init(PARAMS), rows()[:2])[0])
    assert len(compiled) == 1


# ------------------------------------------------------------------ unwatched


def test_a_step_that_nobody_watches_runs_its_plain_actions() -> None:
    seen: list[Context] = []
    plain = runner.bind

    def bind(context: Context) -> Any:
        seen.append(context)
        return plain(context)

    step, params = small_step()
    with mock.patch.object(runner, "bind", bind):
        step(params, torch.ones(2, 3))
    assert [c.watch for c in seen] == [None]


def test_values_are_found_wherever_they_are_held() -> None:
    one = torch.ones(2)
    held = {"a": one, "b": {"m": one}, "c": Reduced({"w": one})}
    assert [name for name, _ in tensors(held)] == ["a", "b/m", "c/w"]
    assert list(tensors(object())) == []
