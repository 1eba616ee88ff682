"""Schedules under an executor that punishes every wrong read, and `verify`, which names the wrong line.

A collective reads its inputs at issue in one run and at Wait in another, its outputs are NaN until
waited for, and what is freed is filled with NaN, buffers of the host's pool too. A right schedule gives the
same bits in all of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any
from unittest import mock

import pytest
import sharded
import torch
from errors import raises
from models import Model, model_of
from tiered import TIERS, Adversary
from torch import Tensor

import fnshard as fs
from fnshard.compiler import lower as lower_module
from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.kernels.segments import Way
from fnshard.compiler.schedule.instructions import (
    AllReduce,
    Free,
    Gather,
    Instruction,
    Norms,
    Publish,
    Reduced,
    ReduceScatter,
    Run,
    ToDevice,
    Update,
    Wait,
)
from fnshard.compiler.schedule.ir import Schedule, follow_aliases, reduced_names
from fnshard.compiler.schedule.passes.order import insert_frees
from fnshard.compiler.schedule.verify import verify
from fnshard.errors import CollectiveError, ScheduleError
from fnshard.runtime.collectives.simulated import poison
from fnshard.step import runner

PRESETS = ("full_shard", "shard_grad_op", "zero2", "zero1", "no_shard", "hybrid_shard")
ADVERSARIES = (None, "early", "late")
OPTIMIZERS = {
    "adamw": fs.optim.adamw(3e-3),
    "clipped": fs.optim.chain(fs.optim.clip_by_global_norm(0.2), fs.optim.sgd(0.1)),
    "soap": fs.optim.soap(3e-3, others=""),
    "muon": fs.optim.muon(3e-3, others="", dtype=None),
    "adafactor": fs.optim.adafactor(3e-3),
    "averaged": fs.optim.chain(fs.optim.clip_by_global_norm(0.2), fs.optim.adamw(3e-3), fs.optim.ema(0.9)),
}
MODES: Mapping[str, Mapping[str, Any]] = {
    "once": {},
    "reduce": {"accumulate": 3, "accumulate_mode": "reduce"},
    "local": {"accumulate": 3, "accumulate_mode": "local"},
    "breadth": {"accumulate": 3, "micro_order": "breadth"},
}
STEPS = 2


def states(
    model: Model, preset: str, optimizer: str, adversaries: Any = ADVERSARIES,
    policy: Mapping[str, Any] | None = None, **options: Any,
) -> list[list[dict[str, Tensor]]]:  # fmt: skip
    """Return, for each adversary, the state of every rank after some steps, flat."""
    world = 4 if preset == "hybrid_shard" else 2
    mesh = fs.make_mesh(**sharded.meshes(world, preset), simulated=True)
    specs = sharded.specs_of(model, preset, mesh, **(policy or {}))
    step = sharded.make_step(mesh, model, specs, OPTIMIZERS[optimizer], **options)

    def run(rank: int) -> dict[str, Tensor]:
        state = step.init(model.params)
        losses = []
        for batch in model.batches(STEPS):
            state, metrics = step(state, *sharded.part(batch, rank, world))
            losses.append(metrics["loss"])
        slots = {f"{p}/{k}": v for p, kept in state.opt_state.items() for k, v in kept.items()}
        return {**state.params, **slots, "losses": torch.stack(losses)}

    return [fs.simulate(mesh, run, adversary=adversary) for adversary in adversaries]


def same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Return whether all are equal and none is NaN (`torch.equal` says that NaN differs from itself)."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# ------------------------------------------------------------------ what is freed is NaN


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors of a value: a tensor, a dict, a bucket's gradients, or what is in flight."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Reduced):
        return [*value.blocks.values(), *tensors(value.flat)]
    if isinstance(value, Mapping):
        return [t for v in value.values() for t in tensors(v)]
    return tensors(getattr(getattr(value, "handle", value), "sent", {}))


def bury(name: str, value: Any, env: Mapping[str, Any]) -> bool:
    """Fill what died with NaN; returns whether anything was filled.

    Nothing at all may share memory with a gathered leaf that is freed, nor with a buffer of the host's pool.
    Other values hand their memory on (a sum into its first term, a reduction in place): those are filled once
    nobody holds them.
    """
    kept = {t.untyped_storage()._cdata for v in env.values() for t in tensors(v)}
    alone = name.startswith("p:") or getattr(name, "is_pooled", False)
    doomed = [t for t in tensors(value) if alone or t.untyped_storage()._cdata not in kept]
    for tensor in doomed:
        poison(tensor.detach())
    return bool(doomed)


@contextmanager
def poison_frees() -> Iterator[list[str]]:
    """Let all steps that are bound in the block bury what they free; yield the names of what was filled."""
    plain, buried = runner.bind, []

    def bind(context: Any) -> Callable[[Any], Any]:
        here: dict[str, Any] = {}

        def freed(name: str, value: Any) -> None:
            if bury(name, value, here["env"]):
                buried.append(name)

        run = plain(replace(context, freed=freed))

        def remember(env: Any) -> Any:
            here["env"] = env
            return run(env)

        return remember

    with mock.patch.object(runner, "bind", bind):
        yield buried


@pytest.mark.suite({
    "full_shard-reduce": "leaves that are freed and gathered again",
    "zero1-breadth": "gradients kept whole over all micro-batches",
    "zero2-local": "gradients reduced at the end",
    "shard_grad_op-once": "one micro-batch",
    "no_shard-breadth": "reductions of whole leaves",
    "hybrid_shard-local": "two axes",
})  # fmt: skip
@pytest.mark.parametrize(("preset", "mode"), [
    pytest.param(preset, mode, marks=[pytest.mark.long] * ((i + j) % 3 == 2))
    for i, preset in enumerate(PRESETS) for j, mode in enumerate(MODES)
])  # fmt: skip
def test_bits_do_not_depend_on_when_buffers_are_read(preset: str, mode: str) -> None:
    """Two depths of each pass (all nine pairs once), all adversaries, freed values poisoned: one result."""
    model = model_of("early_and_late")
    optimizer = "clipped" if mode == "reduce" else "adamw"
    expected = states(model, preset, optimizer, (None,), prefetch=0, overlap=0, **MODES[mode])[0]
    depths = [(p, (p + len(preset) + len(mode)) % 3) for p in (0, 2)]  # rows have different ones
    if (preset, mode) == ("hybrid_shard", "once"):
        depths = [(p, o) for p in (0, 1, 2) for o in (0, 1, 2)]
    for prefetch, overlap in depths:
        with poison_frees() as buried:
            got = states(model, preset, optimizer, prefetch=prefetch, overlap=overlap, **MODES[mode])
        assert any(n.startswith("g:") for n in buried)
        assert any(n.startswith("p:") for n in buried) == (
            preset in ("full_shard", "shard_grad_op", "hybrid_shard")
        )
        for adversary, ranks in zip(ADVERSARIES, got, strict=True):
            for rank, state in enumerate(ranks):
                assert same_bits(state, expected[rank]), (prefetch, overlap, adversary, rank)


@pytest.mark.suite({
    "odd_leaves-*": "buckets with padding",
})  # fmt: skip
@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("tied", "zero2"),
        ("odd_leaves", "hybrid_shard"),
        pytest.param("masked_mean", "zero2", marks=pytest.mark.long),
        pytest.param("several_outputs", "hybrid_shard", marks=pytest.mark.long),
    ],
)
def test_bits_of_other_models(name: str, preset: str) -> None:
    model = model_of(name)
    expected = states(model, preset, "clipped", (None,), prefetch=0, overlap=0)[0]
    with poison_frees():
        got = states(model, preset, "clipped", prefetch=2, overlap=1)
    assert all(same_bits(s, expected[r]) for ranks in got for r, s in enumerate(ranks))


@pytest.mark.suite(but={
    "soap-*": "muon has stacks, adafactor reductions",
})  # fmt: skip
@pytest.mark.parametrize(
    ("optimizer", "preset"),
    [
        pytest.param(optimizer, preset, marks=[pytest.mark.long] * ((i + j) % 4 != 0))
        for i, optimizer in enumerate(("muon", "soap", "adafactor", "averaged"))
        for j, preset in enumerate(("full_shard", "zero2", "zero1", "hybrid_shard"))
    ],
)
def test_bits_of_updates_that_exchange(optimizer: str, preset: str) -> None:
    """Reductions and stacks of updates too: read early or late, and NaN until they are waited for."""
    model = model_of("early_and_late")
    expected = states(model, preset, optimizer, (None,), prefetch=0, overlap=0)[0]
    with poison_frees() as buried:
        got = states(model, preset, optimizer, ("early", "late"), prefetch=1, overlap=1)
    assert any(name.startswith("u:") for name in buried) or optimizer == "averaged"
    assert all(same_bits(state, expected[rank]) for ranks in got for rank, state in enumerate(ranks))


# ------------------------------------------------------------------ proof that all this can fail


def first(lines: list[Instruction], kind: type, **fields: Any) -> int:
    """Return the index of the first line of a kind with these fields."""
    return next(
        i for i, line in enumerate(lines)
        if isinstance(line, kind) and all(getattr(line, k) == v for k, v in fields.items())
    )  # fmt: skip


def move(lines: list[Instruction], source: int, target: int) -> None:
    lines.insert(target, lines.pop(source))


def run_before_its_gather_is_waited_for(lines: list[Instruction]) -> None:
    wait = first(lines, Wait, of=Gather)
    move(lines, first(lines, Run, unit=lines[wait].unit), wait)


def update_before_its_reduction_is_waited_for(lines: list[Instruction]) -> None:
    wait = first(lines, Wait, of=ReduceScatter)
    move(lines, first(lines, Update, bucket=lines[wait].bucket), wait)


def publish_before_its_update(lines: list[Instruction]) -> None:
    publish = first(lines, Publish)
    bucket = lines[publish].bucket.replace("publish", "reduce")
    move(lines, publish, first(lines, Update, bucket=bucket))


def wait_left_out(lines: list[Instruction]) -> None:
    wait = lines.pop(first(lines, Wait, of=Gather))
    for i, line in enumerate(lines):
        lines[i] = replace(line, reads=tuple(n for n in line.reads if n not in wait.writes),
                           drops=tuple(n for n in line.drops if n not in wait.writes))  # fmt: skip


def update_with_what_an_all_reduce_may_overwrite(lines: list[Instruction]) -> None:
    """Let an update read this rank's part, which the sum in flight may be written into."""
    issue = first(lines, AllReduce)
    update = first(lines, Update, bucket=lines[issue].bucket)
    reads = (lines[issue].reads[0], *lines[update].reads[1:])
    lines[update] = replace(lines[update], reads=reads)
    move(lines, update, issue + 1)


def saved_value_freed_before_the_backward(lines: list[Instruction]) -> None:
    run = first(lines, Run, way=Way.BACKWARD)
    value = next(n for n in lines[run].drops if n.startswith("x"))
    lines[run] = replace(lines[run], drops=tuple(n for n in lines[run].drops if n != value))
    lines.insert(run, Free("-", "backward", drops=(value,)))


BROKEN = {
    run_before_its_gather_is_waited_for: ("full_shard", ["run k0.fwd", "reads p:", "not alive"]),
    update_before_its_reduction_is_waited_for: (
        "full_shard",
        ["update reduce/", "reads r:", "not alive"],
    ),
    publish_before_its_update: ("zero2", ["update reduce/", "changes ['s:", "reads it"]),
    wait_left_out: ("full_shard", ["~gather/", "never waited for"]),
    update_with_what_an_all_reduce_may_overwrite: (
        "hybrid_shard",
        ["update reduce/", "reads r:", "may overwrite"],
    ),
    saved_value_freed_before_the_backward: ("full_shard", [".bwd", "reads", "not alive"]),
}


@pytest.mark.parametrize("breaker", BROKEN, ids=lambda b: b.__name__)
def test_a_broken_schedule_is_named_by_verify_and_seen_by_the_adversary(breaker: Callable[..., None]) -> None:
    preset, found = BROKEN[breaker]
    model = model_of("early_and_late")

    def broken(schedule: Schedule) -> Schedule:
        lines = list(schedule.instructions)
        breaker(lines)
        return schedule.with_instructions(lines)

    caught: list[ScheduleError] = []

    def ignore(schedule: Schedule) -> Schedule:
        schedule = broken(schedule)
        try:
            verify(schedule)
        except ScheduleError as error:
            caught.append(error)
        return schedule

    expected = states(model, preset, "adamw", (None,))[0]
    with mock.patch.object(lower_module, "verify", ignore):
        seen = []
        for adversary in ("early", "late"):
            try:
                with poison_frees():
                    got = states(model, preset, "adamw", (adversary,))[0]
                seen.append(not all(same_bits(s, expected[r]) for r, s in enumerate(got)))
            except (KeyError, AttributeError, RuntimeError):
                seen.append(True)
    assert any(seen), "the run came out right: the schedule was not broken, or the adversary is blind"
    assert caught, "verify let it pass"
    with raises(ScheduleError, says=found):
        raise caught[0]


# ------------------------------------------------------------------ views of buffers on the host
ON_HOST: Mapping[str, tuple[str, Mapping[str, Any]]] = {  # an optimizer and options
    "soap": ("soap", {"policy": TIERS["optimizer_host"]}),
    "soap accumulated": ("soap", {"policy": TIERS["all_host"], **MODES["reduce"]}),
    "muon": ("muon", {"policy": TIERS["optimizer_host"]}),
    "adafactor": ("adafactor", {"policy": TIERS["optimizer_host"]}),
    "clipped": ("clipped", {"policy": TIERS["all_host"], **MODES["reduce"]}),
    "streamed soap": ("soap", {"policy": TIERS["streamed"]}),
    "offload": ("adamw", {"policy": TIERS["mixed"], "remat": "offload"}),
}
SHORT = ("clipped",)


def on_host(case: str, **more: Any) -> list[list[dict[str, Tensor]]]:
    optimizer, options = ON_HOST[case]
    with tempfile.TemporaryDirectory() as folder:
        return states(model_of("early_and_late"), "full_shard", optimizer, disk_dir=folder, **options, **more)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.long] * (c not in SHORT)) for c in ON_HOST]
)
def test_bits_on_the_host_do_not_depend_on_what_freed_buffers_hold(case: str) -> None:
    expected = on_host(case, adversaries=(None,))[0]
    for late in (False, True):
        with (
            poison_frees() as buried,
            mock.patch.object(runner, "Transfers", Adversary),
            mock.patch.object(Adversary, "late", late),
        ):
            got = on_host(case, adversaries=("late",))[0]
        assert any(n.startswith("h:") for n in buried) or case == "streamed soap"
        assert all(same_bits(state, expected[rank]) for rank, state in enumerate(got))


def frees_too_early(schedule: Schedule) -> dict[tuple[str, str], Schedule]:
    """Return schedules that free a buffer right before its last reader, by that line's verb and value."""
    lines, memory, out = list(schedule.instructions), follow_aliases(schedule.instructions), {}
    for at, free in enumerate(lines):
        for name in [n for n in free.drops if isinstance(free, Free) and n.is_pooled]:
            readers = [
                (i, n) for i, line in enumerate(lines[:at]) for n in line.reads
                if n == name or name in memory.get(n, ())
            ]  # fmt: skip
            reader, read = readers[-1]
            broken = [*lines]
            broken[at] = replace(free, drops=tuple(n for n in free.drops if n != name))
            broken.insert(reader, replace(free, drops=(name,)))
            kept = [line for line in broken if line.drops or not isinstance(line, Free)]
            out.setdefault((lines[reader].verb, str(read.original.kind)), schedule.with_instructions(kept))
    return out


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.long] * (c not in SHORT)) for c in ON_HOST if c != "streamed soap"],
)
def test_a_buffer_that_is_freed_before_a_view_of_it_is_read_is_found(case: str) -> None:
    """`verify` and a run find it, for each kind of line that reads a host buffer or a view of one."""
    found: list[dict[tuple[str, str], Schedule]] = []

    def look(schedule: Schedule) -> Schedule:
        found.append(frees_too_early(verify(schedule)))
        return schedule

    with mock.patch.object(lower_module, "verify", look):
        expected = on_host(case, adversaries=(None,))[0]
    kinds = found[0].keys()
    assert any(verb == "update" for verb, _ in kinds), "nothing is updated on the host"
    for kind in kinds:
        with pytest.raises(ScheduleError, match=r"reads .*, (which is not alive|a view of h:)"):
            verify(found[0][kind])
        plant = lambda schedule, kind=kind: frees_too_early(schedule)[kind]  # noqa: E731
        with (
            mock.patch.object(lower_module, "verify", plant),
            mock.patch.object(runner, "Transfers", Adversary),
        ):
            try:
                with poison_frees():
                    got = on_host(case, adversaries=("late",))[0]
                seen = not all(same_bits(s, expected[r]) for r, s in enumerate(got))
            except (KeyError, CollectiveError):  # what is freed is gone; the other rank waits for this one
                seen = True
            assert seen, f"{kind}: the adversary is blind"


VIEW = ValueName(Kind.VALUE, "view")


@dataclass(frozen=True)
class HandsOn(Update):
    """An update that hands on a view of its gradients, and leaves these as they are."""

    overwrites = ()

    def aliases(self) -> Mapping[ValueName, tuple[ValueName, ...]]:
        return super().aliases() | {VIEW: reduced_names(self.reads)}


def hands_on() -> Schedule:
    """Return a schedule without frees whose first update on the host hands on a view that a line reads."""
    optimizer, options = ON_HOST["clipped"]
    model, mesh = model_of("early_and_late"), fs.make_mesh(shard=2, abstract=True)
    specs = sharded.specs_of(model, "full_shard", mesh, **options["policy"])
    step = sharded.make_step(mesh, model, specs, OPTIMIZERS[optimizer])
    schedule = step.lower(model.params, *sharded.part(model.batch(0), 0, 2)).schedule
    lines = [replace(line, drops=()) for line in schedule.instructions if not isinstance(line, Free)]
    at = first(lines, Update)
    assert any(n.is_pooled for n in lines[at].reads)
    values = {field.name: getattr(lines[at], field.name) for field in fields(lines[at])}
    lines[at] = HandsOn(**{**values, "writes": (*lines[at].writes, VIEW)})
    lines.insert(at + 1, Instruction("-", "update", reads=(VIEW,)))
    return schedule.with_instructions(lines)


def test_frees_that_follow_no_aliases_are_found() -> None:
    """A view of a buffer would be read after the buffer was given back."""
    schedule = hands_on()
    verify(insert_frees(schedule))
    with mock.patch("fnshard.compiler.schedule.passes.order.follow_aliases", lambda lines: {}):
        broken = insert_frees(schedule)
    with raises(ScheduleError, says=["reads view", "a view of h:r:", "frees"]):
        verify(broken)


def test_a_buffer_is_given_back_once_and_no_output_is_a_view_of_it() -> None:
    schedule = insert_frees(hands_on())
    with raises(ScheduleError, says=["output view", "a view of h:r:"]):
        verify(replace(schedule, outputs=(*schedule.outputs, VIEW)))
    lines = list(schedule.instructions)
    freed = next(i for i, line in enumerate(lines) if any(n.is_pooled for n in line.drops))
    lines.insert(freed, lines[freed])
    with raises(ScheduleError, says=["gives h:r:", "back", "has done"]):
        verify(schedule.with_instructions(lines))


def test_a_slot_is_not_changed_while_the_parameter_that_is_a_view_of_it_is_sent() -> None:
    optimizer, options = ON_HOST["soap"]
    model, mesh = model_of("early_and_late"), fs.make_mesh(shard=2, abstract=True)
    specs = sharded.specs_of(model, "full_shard", mesh, **options["policy"])
    step = sharded.make_step(mesh, model, specs, OPTIMIZERS[optimizer])
    schedule = step.lower(model.params, *sharded.part(model.batch(0), 0, 2)).schedule
    lines = list(schedule.instructions)
    sent = next(i for i, line in enumerate(lines) if isinstance(line, ToDevice) and line.into)
    update = next(line for line in lines[:sent] if set(lines[sent].reads) & set(line.writes))
    slots = tuple(n for n in update.writes if n.is_state)
    lines.insert(sent + 1, Instruction("-", "update", reads=slots, writes=slots))
    with raises(ScheduleError, says=["changes ['h:s:", "reads it"]):
        verify(schedule.with_instructions(lines))


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.long] * (c not in SHORT)) for c in ON_HOST]
)
def test_lines_share_no_memory_that_they_do_not_declare(case: str) -> None:
    """A line writes to memory of its own, of what it takes over, or of what `aliases` names."""
    plain, wrong, shared = runner.bind, [], set()

    def watch(number: int, line: Instruction, action: Callable[[Any], None]) -> Callable[[Any], None]:
        def run(env: Any) -> None:
            before = {n: storages(env[n]) for n in line.reads if n in env}
            action(env)
            aliases = line.aliases()
            for name in (n for n in line.writes if n in env and not n.is_state):
                for other, own in before.items():
                    if storages(env[name]) & own:
                        shared.add(line.verb)
                        allowed = {*aliases.get(name, ()), *line.overwrites, *line.drops, *line.writes}
                        wrong.extend([f"{line.verb}: {name} of {other}"] * (other not in allowed))

        return run

    def storages(value: Any) -> set[int]:
        return {t.untyped_storage()._cdata for t in tensors(value) if t.numel()}

    with mock.patch.object(runner, "bind", lambda context: plain(replace(context, watch=watch))):
        on_host(case, adversaries=(None,))
    assert not wrong
    assert shared


def test_norms_are_taken_before_an_update_may_scale_its_gradients() -> None:
    model, mesh = model_of("early_and_late"), fs.make_mesh(shard=2, abstract=True)
    specs = sharded.specs_of(model, "full_shard", mesh)
    step = sharded.make_step(mesh, model, specs, OPTIMIZERS["adamw"], grad_norm=True)
    schedule = step.lower(model.params, *sharded.part(model.batch(0), 0, 2)).schedule
    lines = list(schedule.instructions)
    norms = first(lines, Norms)
    move(lines, norms, first(lines, Update, bucket=lines[norms].bucket))
    with raises(ScheduleError, says=["norms reduce/", "reads r:", "may overwrite"]):
        verify(schedule.with_instructions(lines))


def test_a_value_that_outlives_its_gathered_leaf_is_poisoned() -> None:
    """An activation that is a view of a gathered leaf would lose ZeRO 3 in silence."""
    leaf = torch.ones(3, 2)
    env = {"view_1": leaf.T}
    assert bury("p:w#f0.0", leaf, env)
    assert env["view_1"].isnan().all()


def test_a_value_that_hands_its_memory_on_is_not_poisoned() -> None:
    total = torch.ones(3)
    env = {"g:w@0+": total}
    assert not bury("g:w@1", total, env)
    assert not env["g:w@0+"].isnan().any()
    assert bury("g:w@1", torch.ones(2), env)
