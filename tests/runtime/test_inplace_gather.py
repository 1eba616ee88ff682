"""Leaves that lie once a host: written by all ranks in place, and used again when no rank holds them."""

from __future__ import annotations

import os
import time
from typing import Any
from unittest import mock

import pytest
import sharded
import torch
from models import model_of
from torch import Tensor

import fnshard as fs
from fnshard.compiler.schedule.buckets import ALIGN_BYTES, end_to_end, leaf_runs, make_buckets
from fnshard.compiler.schedule.instructions import Gather, Update
from fnshard.errors import CollectiveError
from fnshard.layout.partition import Fused
from fnshard.layout.spec import LayoutSpec, P
from fnshard.mesh import make_mesh
from fnshard.runtime.collectives.base import Group
from fnshard.runtime.collectives.connect import connect, connection
from fnshard.runtime.collectives.messages import PAGE
from fnshard.runtime.collectives.shared_memory import SharedLeaves
from fnshard.runtime.packing import Packer, local_block
from fnshard.step.settings import fill_depths

NUMEL = 3 * PAGE // 4  # of a rank's part: whole pages of fp32
UNIT = 4 * NUMEL  # bytes of it
LAYOUTS = [
    P("shard"), P(None, "shard"), P("replicate", "shard"), P("shard", "replicate"),
    P(("shard", "replicate")), P(("replicate", "shard")),
]  # fmt: skip


def issue(by: Any, value: float, axes: tuple[str, ...] = ("shard",)) -> Any:
    """Gather a leaf of fp32 whose part of each rank is `value` plus the rank's place."""
    ranks = by.mesh.group_ranks(axes)
    place = ranks.index(by.mesh.rank)

    def write(leaves: list[Tensor]) -> None:
        leaves[0].view(len(ranks), NUMEL)[place] = value + place

    total = len(ranks) * NUMEL
    return by.gather_leaves([(0, total)], total, torch.float32, write, axes)


def check(leaves: list[Tensor], value: float) -> None:
    rows = leaves[0].view(-1, NUMEL)
    assert torch.equal(rows, (value + torch.arange(len(rows))).view(-1, 1).expand_as(rows).float())


# ------------------------------------------------------------------ where blocks lie
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (3, 1), (1, 9), (5, 4, 3)], ids=str)
def test_all_ranks_blocks_make_up_the_leaf(shape, layout):
    mesh = make_mesh(replicate=2, shard=2, abstract=True)
    specs = {p: LayoutSpec(layout).resolve(torch.empty(shape), "u") for p in "ab"}
    (bucket,) = make_buckets(specs, mesh, lambda s: s.storage, lambda s: torch.float32, "gather")
    fulls = {p: torch.randn(shape, dtype=torch.float64) for p in "ab"}
    runs, total = leaf_runs(bucket)
    memory = torch.full((total,), float("nan"))
    leaves = [memory[start : start + count] for start, count in runs]
    for rank in range(4):
        blocks = {p: local_block(full, layout, mesh, rank) for p, full in fulls.items()}
        Packer(bucket, mesh, rank).write_blocks(blocks, leaves)
    for (start, _), leaf, full in zip(runs, leaves, fulls.values(), strict=True):
        assert 4 * start % ALIGN_BYTES == 0 and torch.equal(leaf.view(shape), full.float())


# ------------------------------------------------------------------ slots
def _signs_late(rank: int) -> int:
    """Run `_one_after_the_other` while rank 1 takes a while to sign what has died."""
    plain = SharedLeaves.sweep

    def late(units: SharedLeaves) -> None:
        time.sleep(0.002 * rank)  # far longer than it takes the leader to look
        plain(units)

    with mock.patch.object(SharedLeaves, "sweep", late):
        return _one_after_the_other(rank)


def _one_after_the_other(rank: int) -> int:
    by = connect(make_mesh(shard=2, device="cpu"), timeout=20)
    before = by.transport_bytes()
    leaves, value = issue(by, 0.0).wait(), 0.0
    for number in range(1, 300):
        ahead = issue(by, float(number)).wait()
        check(leaves, value)
        leaves, value = ahead, float(number)
        del ahead
        if number % 7 == 3 * rank:  # now and then, never both ranks at once
            os.sched_yield()
    del leaves
    by.gather_object("")
    used = by.transport_bytes() - before
    by.close()
    return used


@pytest.mark.parametrize("program", [_one_after_the_other, _signs_late])
def test_two_units_alive_take_two_slots_however_late_a_rank_is(ranks, program):
    for used in ranks(2).run(program):
        assert 2 * UNIT <= used <= 2 * UNIT + 3 * PAGE  # of two leaves of two units, this rank's half


def _keep_leaves(rank: int, who: int) -> list[int]:
    by = connect(make_mesh(shard=2, device="cpu"), timeout=20)
    (kept,), seen = issue(by, 7.0).wait(), []
    kept = kept if rank == who else None
    for number in range(20):
        check(issue(by, float(number)).wait(), float(number))
    seen.append(by.transport_bytes())
    for number in range(20):
        check(issue(by, float(number)).wait(), float(number))
    seen.append(by.transport_bytes())
    if kept is not None:
        check([kept], 7.0)
    kept = None
    leaves = [issue(by, float(number)).wait() for number in range(2)]
    seen.append(by.transport_bytes())
    del leaves
    by.close()
    return seen


@pytest.mark.parametrize("who", [0, 1])
def test_a_leaf_that_a_rank_keeps_costs_its_slot_and_nobody_waits(ranks, who):
    for first, second, last in ranks(2).run(_keep_leaves, who):
        assert first == second == last


# ------------------------------------------------------------------ leaves that stay
def _stays(rank: int) -> dict[str, Any]:
    """Gather a leaf whose blocks stay where it was gathered, and one that a rank holds elsewhere."""
    by = connect(make_mesh(shard=2, device="cpu"), timeout=20)
    memory, total = by.host.memories[0], 2 * NUMEL
    seen: dict[str, Any] = {"wrote": [], "used": []}

    def gather(block: Tensor) -> tuple[Tensor, Tensor]:
        def write(leaves: list[Tensor]) -> None:
            seen["wrote"][-1] = True
            leaves[0].view(2, NUMEL)[rank] = block

        moved: list[Tensor] = []
        seen["wrote"].append(False)
        blocks = [(block, rank * NUMEL)]
        handle = by.gather_leaves([(0, total)], total, torch.float32, write, ("shard",), blocks, moved.extend)
        seen["used"].append(by.transport_bytes())
        return handle.wait()[0], moved[0]

    leaf, block = gather(torch.full((NUMEL,), float(rank)))
    assert memory.offset_of(block) is not None and block.untyped_storage().nbytes() == block.nbytes
    check([leaf], 0.0)
    del leaf
    by.gather_object("")  # as a step's reduction does, it lets nobody write what a peer still reads
    block += 10.0 + rank  # what an update does
    leaf, again = gather(block)
    assert again is block
    assert torch.equal(leaf.view(2, NUMEL)[:, 0], torch.tensor([10.0, 12.0]))
    del leaf
    for value in range(3):  # what does not stay takes other memory, again and again the same
        check(issue(by, float(value)).wait(), float(value))
    assert block[0] == 10.0 + 2 * rank
    # One rank has its block elsewhere: all write theirs, and both blocks move.
    leaf, block = gather(block.clone() if rank else block)
    assert torch.equal(leaf.view(2, NUMEL)[:, 0], torch.tensor([10.0, 12.0]))
    del leaf, again
    leaf, block = gather(block)
    del leaf, block
    by.gather_object("")
    check(issue(by, 1.0).wait(), 1.0)
    seen["used"].append(by.transport_bytes())
    by.close()
    return seen


def test_blocks_stay_where_their_leaf_was_gathered_as_long_as_they_live(ranks):
    for seen in ranks(2).run(_stays):
        assert seen["wrote"] == [True, False, True, False]
        assert seen["used"][1] == seen["used"][0] and seen["used"][-1] == seen["used"][-2]


def _train(rank: int, other: bool) -> tuple[list[float], list[int], dict[str, Tensor]]:
    """Return losses of steps, how many gathers have copied leaves that may stay, and parameters.

    The counts are of the other state's steps and of this one's, in turn.

    Args:
        other: whether another state trains in turn, and a rank puts blocks of its own into the state.
    """
    model, mesh = model_of("dense_skips"), make_mesh(shard=2, device="cpu")
    step = sharded.make_step(mesh, model, sharded.specs_of(model, "full_shard", mesh), fs.optim.adamw(1e-2))
    state, losses, written = step.init(model.params), [], []
    schedule = step.lower(model.params, *sharded.part(model.batch(0), rank, 2)).schedule
    gathers = [line for line in schedule.instructions if isinstance(line, Gather)]
    stay = {line.bucket for line in gathers if line.keeps_place(schedule)}
    assert len(stay) > 1
    second = step.init(model.params) if other else None
    plain = Packer.write_blocks

    def write(self: Packer, *args: Any) -> None:
        written[-1] += self.bucket.name in stay
        plain(self, *args)

    with mock.patch.object(Packer, "write_blocks", write):
        for number in range(6):
            batch = sharded.part(model.batch(number), rank, 2)
            written.append(0)
            if other:
                second, _ = step(second, *sharded.part(model.batch(9 - number), rank, 2))
            if other and number == 3 and rank:
                state = state.copy()
            written.append(0)
            state, metrics = step(state, *batch)
            losses.append(metrics["loss"].item())
    params = fs.unshard(state.params, step.specs, mesh)
    connection(mesh).close()
    return losses, written, {p: v.clone() for p, v in params.items()}


def test_a_step_copies_no_leaf_that_has_been_gathered_before(ranks):
    alone, in_turn = (ranks(2).run(_train, other) for other in (False, True))
    for (losses, written, params), (others, moved, same) in zip(alone, in_turn, strict=True):
        assert written[1] > 1 and sum(written) == written[1]
        assert others == losses and all(torch.equal(same[p], v) for p, v in params.items())
        assert [n for n, count in enumerate(moved) if count] == [0, 1, 7]


def _schedule(optimizer: Any, **policy: Any) -> Any:
    mesh = make_mesh(shard=2, abstract=True)
    params = {f"layers.{i}.w": torch.ones(8, 8) for i in range(3)}
    specs = fs.presets.full_shard(params, mesh, **policy)
    loss = lambda p, x: sum((x.to(w.dtype) @ w).tanh().sum() for w in p.values())  # noqa: E731
    how = {"mesh": mesh, "backend": "eager", "prefetch": 0, "overlap": 0}
    step = fs.shard_step(loss, specs, optimizer=optimizer, **how)
    return step.lower(params, torch.ones(2, 8)).schedule


def _staying(schedule: Any) -> set[str]:
    lines = [line for line in schedule.instructions if isinstance(line, Gather)]
    return {line.bucket for line in lines if line.keeps_place(schedule)}


def test_leaves_stay_where_no_rank_writes_what_another_still_reads():
    schedule = _schedule(fs.optim.sgd(0.1))
    buckets = {line.bucket for line in schedule.instructions if isinstance(line, Gather)}
    assert len(buckets) == 3 and _staying(schedule) == buckets
    # An update before the last reader: a peer may still read the leaf then.
    lines = list(schedule.instructions)
    update = next(line for line in lines if isinstance(line, Update))
    lines.remove(update)
    read = [k for k, line in enumerate(lines) if any(n.path in update.paths for n in line.drops)]
    early = schedule.with_instructions([*lines[: read[0]], update, *lines[read[0] :]])
    assert _staying(early) == buckets - {f"gather/{update.unit}"}
    # The state is not this step's to move, or leaves are cast on their way.
    assert _staying(_schedule(None)) == set()
    assert _staying(_schedule(fs.optim.sgd(0.1), compute_dtype=torch.bfloat16)) == set()


# ------------------------------------------------------------------ peers that fail
def _differ(rank: int) -> str:
    by = connect(make_mesh(shard=2, device="cpu"), timeout=5)
    try:
        (issue(by, 0.0) if rank else by.all_gather(torch.ones(4), ("shard",))).wait()
    except CollectiveError as error:
        return str(error)
    return ""


def test_ranks_that_issue_different_collectives_are_an_error(ranks):
    for text in ranks(2).run(_differ):
        assert "ranks issued different collectives" in text and "none of them below `if rank == 0:`" in text
        assert f"rank 1: gather_leaves of [{2 * NUMEL}] torch.float32" in text


def _abandon(rank: int, who: int, dies: bool) -> tuple[str, float]:
    by = connect(make_mesh(shard=2, device="cpu"), timeout=6 if dies else 1)
    check(issue(by, 1.0).wait(), 1.0)
    if rank == who:
        if dies:
            os._exit(9)
        return "", 0.0
    began = time.monotonic()
    try:
        issue(by, 2.0).wait()
    except CollectiveError as error:
        return str(error), time.monotonic() - began
    return "nothing was raised", 0.0


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_dies_is_named_within_seconds(ranks, who):
    text, seconds = ranks(2).run(_abandon, who, True, lost=(who,))[1 - who]
    assert f"gather_leaves over (shard) of ranks 0, 1, on rank {1 - who}" in text
    assert f"rank {who} has left" in text and seconds < 5


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_does_not_come_is_named_at_the_timeout(ranks, who):
    text, seconds = ranks(2).run(_abandon, who, False)[1 - who]
    assert f"rank {who} did not come within 1 s" in text and 0.5 < seconds < 20


# ------------------------------------------------------------------ reductions of two
@pytest.mark.parametrize("layout", [P("shard"), P(None, "shard")], ids=str)
@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (3, 1), (1, 9), (5, 4, 3)], ids=str)
def test_a_peers_row_and_ones_own_gradients_make_the_sum(shape, layout):
    mesh = make_mesh(shard=2, abstract=True)
    specs = {p: LayoutSpec(layout).resolve(torch.empty(shape), "u") for p in "ab"}
    (bucket,) = make_buckets(specs, mesh, lambda s: s.gradient, lambda s: torch.float32, "reduce")
    packers = [Packer(bucket, mesh, rank) for rank in range(2)]
    full = [{p: torch.randn(shape) for p in "ab"} for _ in range(2)]
    rows = [torch.full((2 * bucket.numel,), float("nan")) for _ in range(2)]
    for packer, inputs, row in zip(packers, full, rows, strict=True):
        packer.pack_full(inputs, row)
    for rank, (packer, inputs) in enumerate(zip(packers, full, strict=True)):
        got, out = (torch.full((bucket.numel,), float("nan")) for _ in range(2))
        packers[1 - rank].pack_for_peer(full[1 - rank], got)
        assert torch.equal(got, rows[1 - rank].view(2, -1)[rank])
        packer.add_to_own(inputs, got, out)
        assert torch.equal(out, (rows[0] + rows[1]).view(2, -1)[rank])
        packer.add_to_own(inputs, got, got)
        assert torch.equal(got, out)


# ------------------------------------------------------------------ in a step
def _watch_steps(rank: int, clip: bool) -> dict[str, Any]:
    """Make two steps; return what lies in the group's memory, and what travels.

    Lists of whether each gathered leaf, and each reduction's sum, lies there; bytes of reductions that are
    sent and bytes of a row each; and how many units' slots the memory has.
    """
    model = model_of("gpt")
    mesh = make_mesh(shard=2, device="cpu")
    optimizer = fs.optim.sgd(0.1)
    if clip:
        optimizer = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), optimizer)
    step = sharded.make_step(mesh, model, sharded.specs_of(model, "full_shard", mesh), optimizer)
    options = step.options  # nothing would travel during a kernel; elsewhere it does
    assert (options.prefetch, options.overlap) == ((0, 0), 0)
    for kind in ("simulated", "abstract"):
        elsewhere = fill_depths(fs.StepOptions(), make_mesh(shard=2, **{kind: True}))
        assert (elsewhere.prefetch, elsewhere.overlap) == ((1, 1), 1)
    state, batch = step.init(model.params), sharded.part(model.batch(0), rank, 2)
    buckets = step.lower(model.params, *batch).schedule.buckets
    shared = connection(mesh)
    memory = shared.host.memories[0]
    seen: dict[str, Any] = {"leaves": [], "sums": [], "sent": 0, "rows": 0}

    def watch(number: int, line: Any, action: Any) -> Any:
        def run(env: dict[str, Any]) -> None:
            action(env)
            waited = line.of.verb if line.verb == "wait" else ""
            if waited == "gather":
                seen["leaves"] += [memory.offset_of(env[n]) is not None for n in line.writes]
            if waited == "reduce_scatter":
                seen["sums"].append(memory.offset_of(env[line.writes[0]].flat) is not None)
            if line.verb == "reduce_scatter":
                seen["rows"] += 2 * buckets[line.bucket].row_bytes

        return run

    def gather(units: SharedLeaves, name: str, runs: Any, total: int, dtype: torch.dtype, *how: Any) -> Any:
        seen["sent"] += total * dtype.itemsize if name == "reduce_pair" else 0
        return plain(units, name, runs, total, dtype, *how)

    plain = SharedLeaves.gather
    with step.watching(watch), mock.patch.object(SharedLeaves, "gather", gather):
        for _ in range(2):
            state, _ = step(state, *batch)
    (units,) = shared.shared_leaves.values()
    largest = max(2 * b.numel * b.dtype.itemsize for b in buckets.values())
    seen["slots"] = (units.slots.top - units.slots.floor) // largest
    shared.close()
    return seen


@pytest.mark.parametrize("clip", [False, True])
def test_gathered_leaves_lie_there_and_gradients_updated_at_once_stay_in_the_slot_they_left(ranks, clip):
    """At the default depths of ranks that share memory; two ranks send each other's row alone."""
    for seen in ranks(2).run(_watch_steps, clip):
        assert seen["leaves"] and all(seen["leaves"])
        assert seen["sums"] and seen["slots"] == 1
        assert set(seen["sums"]) == {not clip}
        assert seen["sent"] == seen["rows"] > 0


# ------------------------------------------------------------------ torch's own collectives
def _natively(rank: int, transport: str) -> tuple[set[str], dict[str, Tensor]]:
    mesh = make_mesh(shard=2, device="cpu")
    mesh.connections[20] = by = connect(mesh, timeout=20, transport=transport)
    made, used = torch.Generator().manual_seed(0), set()
    params = {p: torch.randn(64, 32, generator=made) for p in ("up", "down")}
    issue = by._issue
    loss = lambda p, x: ((x @ p["up"].T).tanh() @ p["down"]).square().mean()  # noqa: E731
    specs, sgd = fs.presets.full_shard(params, mesh), fs.optim.sgd(0.1)
    step = fs.shard_step(loss, specs, mesh=mesh, optimizer=sgd, timeout=20)
    state = step.init(params)
    with mock.patch.object(Group, "_issue", lambda _, name, *rest: (used.add(name), issue(name, *rest))[1]):
        for _ in range(3):
            state, _ = step(state, torch.randn(4, 32, generator=made))
    shards = {p: state.params[p].clone() for p in params}
    by.close()
    return used, shards


@pytest.mark.long
def test_torchs_own_collectives_read_and_write_leaves_where_they_lie(ranks):
    (used, own), _ = ranks(2).run(_natively, "native")
    assert {"gather_blocks", "reduce_leaves"} <= used and not {"all_gather", "reduce_scatter"} & used
    (_, packed), _ = ranks(2).run(_natively, "p2p")
    for path, shard in packed.items():
        assert torch.allclose(own[path], shard, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("layout", "shape", "whole"),
    [
        (P(("replicate", "shard")), (8, 32), True),
        (P(("shard", "replicate")), (8, 32), False),  # blocks in another order
        (P("replicate", "shard"), (8, 64), False),  # columns
        (P(("replicate", "shard")), (7, 32), False),  # padding
        (P(("replicate", "shard")), (8, 33), False),  # a gap before the next leaf
        (P((Fused("replicate", 2), "shard")), (8, 32), False),
    ],
)
def test_which_leaves_need_no_packing(layout, shape, whole):
    mesh = make_mesh(replicate=2, shard=2, abstract=True)
    specs = {p: LayoutSpec(layout).resolve(torch.empty(shape), "u") for p in "ab"}
    (bucket,) = make_buckets(specs, mesh, lambda s: s.storage, lambda s: torch.float32, "gather")
    assert end_to_end(bucket, mesh) == whole
