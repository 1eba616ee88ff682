"""One contract for all backends; what the adversary sees; peers that die, leave or stay silent."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from errors import raises

from fnshard.errors import CollectiveError
from fnshard.mesh import Mesh, make_mesh
from fnshard.runtime.collectives import messages, shared_memory
from fnshard.runtime.collectives.base import Group, sum_rows
from fnshard.runtime.collectives.connect import connect
from fnshard.runtime.collectives.simulated import simulate

REDUCED = (torch.float32, torch.bfloat16, torch.float64)
GATHERED = (*REDUCED, torch.int64, torch.uint8, torch.bool)
SIZES = (1, 3, 127, 4099, 70001)
MESHES = {1: [{"shard": 1}], 2: [{"shard": 2}], 4: [{"shard": 4}, {"replicate": 2, "shard": 2}]}
TRANSPORTS = ("auto", "p2p", "native")


def data(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Draw what `rank` sends: small whole numbers, so that sums of four are exact in every dtype."""
    made = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 8, (numel,), generator=made).to(dtype)


def groups(mesh: Mesh) -> list[tuple[str, ...]]:
    if len(mesh.names) == 1:
        return [mesh.names]
    return [("replicate",), ("shard",), ("replicate", "shard"), ("shard", "replicate")]


def pack_rows(by, tensor: torch.Tensor, axes, rows: int = 1) -> torch.Tensor:
    return by.send_buffer(tensor.numel() // rows, tensor.dtype, axes, rows).copy_(tensor)


def expect(got: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    assert got.dtype == expected.dtype and torch.equal(got, expected), what


# ------------------------------------------------------------------ the contract
def check_gather(by, axes, numel: int, dtype: torch.dtype, seed: int, buffered: bool):
    """Issue a gather, and return what to call at the Wait."""
    mesh = by.mesh
    sent = data(mesh.rank, numel, dtype, seed)
    handle = by.all_gather(pack_rows(by, sent, axes) if buffered else sent, axes)

    def finish() -> None:
        rows = handle.wait()
        for rank, row in zip(mesh.group_ranks(axes), rows, strict=True):
            expect(row, data(rank, numel, dtype, seed), ("gather", axes, numel, dtype))
        handle.release()

    return finish


def check_scatter(by, axes, numel: int, dtype: torch.dtype, seed: int, buffered: bool):
    mesh, ranks = by.mesh, by.mesh.group_ranks(axes)
    n, here = len(ranks), ranks.index(mesh.rank)
    sent = data(mesh.rank, n * numel, dtype, seed)
    handle = by.reduce_scatter(pack_rows(by, sent, axes, n) if buffered else sent, axes)

    def finish() -> None:
        full = sum(data(rank, n * numel, dtype, seed) for rank in ranks)
        expect(handle.wait(), full.view(n, -1)[here], ("reduce_scatter", axes, numel, dtype))

    return finish


def check_reduce(by, axes, numel: int, dtype: torch.dtype, seed: int, buffered: bool):
    mesh = by.mesh
    sent = data(mesh.rank, numel, dtype, seed)
    handle = by.all_reduce(pack_rows(by, sent, axes) if buffered else sent, axes)

    def finish() -> None:
        full = sum(data(rank, numel, dtype, seed) for rank in mesh.group_ranks(axes))
        expect(handle.wait(), full, ("all_reduce", axes, numel, dtype))

    return finish


def check_swap(by, axes, numel: int, dtype: torch.dtype, seed: int, buffered: bool):
    mesh, ranks = by.mesh, by.mesh.group_ranks(axes)
    n, here = len(ranks), ranks.index(mesh.rank)
    sent = data(mesh.rank, n * numel, dtype, seed)
    handle = by.all_to_all(pack_rows(by, sent, axes, n) if buffered else sent, axes)

    def finish() -> None:
        rows = [data(rank, n * numel, dtype, seed).view(n, -1)[here] for rank in ranks]
        expect(handle.wait(), torch.cat(rows), ("all_to_all", axes, numel, dtype))
        handle.release()

    return finish


def check_permute(by, axes, numel: int, dtype: torch.dtype, seed: int, buffered: bool):
    """Permute from one, two or all but one places before."""
    mesh, ranks = by.mesh, by.mesh.group_ranks(axes)
    sent, distance = data(mesh.rank, numel, dtype, seed), (1, 2, -1)[seed % 3]
    handle = by.permute(pack_rows(by, sent, axes) if buffered else sent, axes, distance)

    def finish() -> None:
        source = ranks[(ranks.index(mesh.rank) - distance) % len(ranks)]
        expect(handle.wait(), data(source, numel, dtype, seed), ("permute", axes, numel, dtype))
        handle.release()

    return finish


def can_run_in_place(by, axes) -> bool:
    """Return whether leaves travel from where they lie: torch's own collectives, whose ranks ascend."""
    ranks = list(by.mesh.group_ranks(axes))
    return type(by) is Group and not by.peer_to_peer and len(ranks) > 1 and ranks == sorted(ranks)


def check_blocks(by, axes, numel: int, dtype: torch.dtype, seed: int, buffered: bool):
    """Gather two leaves at once from their blocks, if a backend can."""
    mesh = by.mesh
    sent = [data(mesh.rank, size, dtype, seed + size) for size in (numel, 2)]
    handle = getattr(by, "gather_blocks", lambda *_: None)(sent, axes)
    assert (handle is not None) == can_run_in_place(by, axes)

    def finish() -> None:
        if handle is not None:
            for size, leaf in zip((numel, 2), handle.wait(), strict=True):
                rows = [data(rank, size, dtype, seed + size) for rank in mesh.group_ranks(axes)]
                expect(leaf, torch.cat(rows), ("gather_blocks", axes, numel, dtype))

    return finish


def check_leaves(by, axes, numel: int, dtype: torch.dtype, seed: int, buffered: bool):
    """Reduce two leaves at once where they lie, if a backend can."""
    mesh, ranks = by.mesh, by.mesh.group_ranks(axes)
    n, here = len(ranks), ranks.index(mesh.rank)
    sent = [data(mesh.rank, n * size, dtype, seed + size) for size in (numel, 2)]
    handle = getattr(by, "reduce_leaves", lambda *_: None)(sent, axes)
    assert (handle is not None) == can_run_in_place(by, axes)

    def finish() -> None:
        if handle is not None:
            sums = [sum(data(rank, n * size, dtype, seed + size) for rank in ranks) for size in (numel, 2)]
            row = torch.cat([full.view(n, -1)[here] for full in sums])
            expect(handle.wait(), row, ("reduce_leaves", axes, numel, dtype))

    return finish


CHECKS = {
    check_gather: GATHERED, check_scatter: REDUCED, check_reduce: REDUCED, check_swap: GATHERED,
    check_permute: GATHERED, check_blocks: GATHERED, check_leaves: REDUCED,
}  # fmt: skip


def contract(rank: int, mesh: Mesh, transport: str = "auto") -> str:
    """Check every collective, dtype and group, and fp32 of every size; alone, then several in flight."""
    by = connect(mesh, timeout=20, transport=transport)
    assert by.gather_object(f"rank {rank}") == [f"rank {r}" for r in range(mesh.size)]
    for axes in groups(mesh):
        for check, dtypes in CHECKS.items():
            for dtype in dtypes:
                for seed, numel in enumerate(SIZES):
                    if dtype != torch.float32 and numel not in (3, 4099):
                        continue
                    check(by, axes, numel, dtype, seed, buffered=seed % 2 == 0)()
    in_flight(by, rounds=20)
    out_of_order(by, count=100)
    by.gather_object("")
    by.close()
    return type(by).__name__


def out_of_order(by, count: int) -> None:
    """Wait for the first of many last, as for a step's scalars; for the rest in any order."""
    dice = random.Random(1)
    first = check_reduce(by, by.mesh.names, 5, torch.float64, seed=99, buffered=False)
    checks = [dice.choice(list(CHECKS)) for _ in range(count)]
    waiting = [check(by, by.mesh.names, 3, torch.float32, i, i % 2 == 0) for i, check in enumerate(checks)]
    dice.shuffle(waiting)
    for finish in [*waiting, first]:
        finish()


def in_flight(by, rounds: int, largest: int = 3000) -> None:
    """Issue random collectives, up to six at once, and wait in their order; equal on all ranks."""
    dice = random.Random(0)
    for seed in range(rounds):
        waiting = []
        for _ in range(dice.randint(2, 6)):
            check = dice.choice(list(CHECKS))
            dtype, axes = dice.choice(CHECKS[check]), dice.choice(groups(by.mesh))
            waiting.append(check(by, axes, dice.randint(1, largest), dtype, seed, dice.random() < 0.5))
            if dice.random() < 0.3:
                waiting.pop(0)()
        for finish in waiting:
            finish()


def test_local():
    assert contract(0, make_mesh(shard=1, device="cpu")) == "Group"


@pytest.mark.parametrize(
    ("axes", "adversary"),
    [
        *((axes, None) for axes in (MESHES[1][0], {"replicate": 1, "shard": 2}, MESHES[4][0])),
        *itertools.product((MESHES[2][0], MESHES[4][1]), ("early", "late")),
    ],
    ids=str,
)
def test_simulated(axes, adversary):
    mesh = make_mesh(simulated=True, device="cpu", **axes)
    assert set(simulate(mesh, contract, mesh, adversary=adversary, timeout=60)) == {"Simulated"}


def _real(rank: int, axes: dict[str, int], transport: str) -> str:
    return contract(rank, make_mesh(device="cpu", **axes), transport)


@pytest.mark.suite({
    "{'replicate': 2, 'shard': 2}-native": "torch's, of two axes",
    "{'replicate': 2, 'shard': 2}-auto": "shared memory, of two axes",
    "{'shard': 4}-p2p": "messages",
    "{'shard': 2}-auto": "two ranks",
})  # fmt: skip
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("axes", [*MESHES[2], *MESHES[4]], ids=str)
def test_real_ranks(ranks, axes, transport):
    world = 2 if axes in MESHES[2] else 4
    names = set(ranks(world).run(_real, axes, transport))
    assert names == {"Shared" if transport == "auto" else "Group"}


def _many(rank: int) -> int:
    by = connect(make_mesh(shard=2, device="cpu"), timeout=20)
    in_flight(by, rounds=200)
    last = by.transport_bytes()
    by.close()
    return last


def test_200_rounds_of_random_sizes_take_no_more_memory(ranks):
    # Six in flight of [2 * 3000] fp64 are 288 kB; a peer may be late by as many.
    for last in ranks(2).run(_many):
        assert 0 < last < 3 * 6 * 2 * 3000 * 8


def _two_hosts(rank: int) -> tuple[bool, bool]:
    host = shared_memory.host
    shared_memory.host = lambda: f"host {rank // 2}"
    try:
        mesh = make_mesh(replicate=2, shard=2, device="cpu")
        assert contract(rank, mesh) == "Shared"
        by = connect(mesh)
        apart = not by.shares_memory(("replicate",)) and not by.shares_memory(("replicate", "shard"))
        together = by.shares_memory(("shard",))
        by.close()
        return apart, together
    finally:
        shared_memory.host = host


def test_groups_that_span_hosts_go_through_the_process_group(ranks):
    assert ranks(4).run(_two_hosts) == [(True, True)] * 4


def _no_memfd(rank: int) -> str:
    create = os.memfd_create
    if rank == 1:
        os.memfd_create = _refuse
    try:
        by = connect(make_mesh(shard=2, device="cpu"), timeout=20)
        by.close()
        return type(by).__name__
    finally:
        os.memfd_create = create


def _refuse(*_):
    raise OSError("no memory files here")


def test_one_rank_without_shared_memory_takes_it_from_all(ranks):
    assert ranks(2).run(_no_memfd) == ["Group", "Group"]


def _bits(rank: int, transport: str) -> torch.Tensor:
    by = connect(make_mesh(shard=4, device="cpu"), timeout=20, transport=transport)
    made = torch.Generator().manual_seed(rank)
    sums = [by.all_reduce(torch.randn(n, generator=made), ("shard",)).wait() for n in (7, 50_001)]
    by.close()
    return torch.cat(sums)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sums_are_the_same_bits_on_all_ranks(ranks, transport):
    first, *others = ranks(4).run(_bits, transport)
    assert all(torch.equal(first, other) for other in others)


def test_half_types_are_summed_in_fp32():
    parts = [torch.tensor([256.0, 1.0]).bfloat16(), *[torch.tensor([1.0, 1.0]).bfloat16()] * 3]
    exact = torch.stack(parts).float().sum(0).bfloat16()
    in_bf16 = parts[0] + parts[1] + parts[2] + parts[3]
    assert torch.equal(sum_rows(parts, torch.empty_like(parts[0])), exact)
    assert not torch.equal(in_bf16, exact)
    exact = (parts[0].float() + parts[1].float()).bfloat16()
    assert torch.equal(sum_rows(parts[:2], torch.empty_like(exact)), exact)


# ------------------------------------------------------------------ peers that fail
def _abandon(rank: int, transport: str, how: str, name: str = "all_gather") -> tuple[str, float]:
    timeout = 6 if how == "dies" else 1
    by = connect(make_mesh(shard=2, device="cpu"), timeout=timeout, transport=transport)
    by.all_reduce(torch.ones(100_000), ("shard",)).wait()
    if rank == 1:
        if how == "dies":
            os._exit(9)
        return "", 0.0
    began = time.monotonic()
    try:
        getattr(by, name)(torch.ones(100_000), ("shard",)).wait()
    except CollectiveError as error:
        return str(error), time.monotonic() - began
    return "nothing was raised", 0.0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_dies_is_an_error_within_seconds(ranks, transport):
    text, seconds = ranks(2).run(_abandon, transport, "dies", lost=(1,))[0]
    assert "all_gather over (shard) of ranks 0, 1, on rank 0: a peer died" in text
    assert seconds < 5  # less than the timeout: the death itself was seen


@pytest.mark.suite({
    "auto-*": "shared memory",
    "p2p-*": "messages",
})  # fmt: skip
@pytest.mark.parametrize(
    ("transport", "name"), [("auto", "all_to_all"), ("p2p", "all_gather"), ("native", "all_gather")]
)
def test_a_rank_that_does_not_come_is_an_error_at_the_timeout(ranks, transport, name):
    text, seconds = ranks(2).run(_abandon, transport, "stays away", name)[0]
    assert f"{name} over (shard) of ranks 0, 1, on rank 0" in text and "did not answer" in text
    assert 0.5 < seconds < 20


def _differ(rank: int, mesh: Mesh | None = None) -> str:
    by = connect(mesh or make_mesh(shard=2, device="cpu"), timeout=5)
    try:
        by.all_reduce(torch.ones(4 + rank), ("shard",)).wait()
    except CollectiveError as error:
        return str(error)
    return ""


DIFFERENT = """all_reduce over (shard) of ranks 0, 1, on rank {}: ranks issued different collectives or sizes.
  rank 0: all_reduce of [4] torch.float32
  rank 1: all_reduce of [5] torch.float32
Fix: all ranks make the same calls in the same order: none of them below `if rank == 0:`. \
Their programs and specs must be alike too."""


def test_ranks_that_issue_different_sizes_are_an_error(ranks, pair):
    expected = [DIFFERENT.format(rank) for rank in (0, 1)]
    assert ranks(2).run(_differ) == expected
    assert simulate(pair, _differ, pair) == expected


def test_a_pool_reports_the_remote_traceback(ranks):
    with raises(AssertionError, leaves="rank 0, 1 of 2", says=["Traceback", "3 ranks"]):
        ranks(2).run(_real, {"shard": 3}, "auto")


class Unreadable:
    def __reduce__(self):
        return int, ("no number",)


def _raises_nothing(rank: int) -> None:
    with pytest.raises(ValueError):
        pass


def test_a_pool_says_what_a_rank_could_not_read_and_what_is_no_exception(ranks):
    with raises(AssertionError, leaves="rank 0, 1 of 2", says=["Traceback", "'no number'"]):
        ranks(2).run(_real, Unreadable(), "auto")
    with raises(AssertionError, leaves="rank 0, 1 of 2", says=["Traceback", "DID NOT RAISE"]):
        ranks(2).run(_raises_nothing)


# ------------------------------------------------------------------ simulated ranks
@pytest.fixture
def pair() -> Mesh:
    return make_mesh(shard=2, simulated=True, device="cpu")


def test_the_first_real_exception_is_raised_again(pair):
    def fn(rank):
        if rank == 1:
            raise KeyError("the cause")
        connect(pair).gather_object("")

    with pytest.raises(KeyError, match="the cause"):
        simulate(pair, fn)


def test_waiting_for_a_rank_that_has_returned(pair):
    def fn(rank):
        if rank == 0:
            connect(pair).all_reduce(torch.ones(2), ("shard",)).wait()

    with raises(CollectiveError, leaves=["all_reduce over (shard)", "ranks 0, 1", "rank 0"], says="returned"):
        simulate(pair, fn)


def test_a_stuck_rank_ends_at_the_timeout(pair):
    never = threading.Event()
    with raises(CollectiveError, leaves="rank-0, rank-1", says="0.2 s"):
        simulate(pair, lambda rank: never.wait(30), timeout=0.2)
    never.set()


def test_outside_of_simulate(pair):
    with raises(CollectiveError, leaves="mesh", fix="simulate(mesh, fn)"):
        connect(pair).all_reduce(torch.ones(2), ("shard",))


def test_ranks_take_turns(pair):
    running = []

    def fn(rank):
        for _ in range(20):
            running.append(rank)
            time.sleep(0)
            assert running.pop() == rank and not running
            connect(pair).gather_object("")

    simulate(pair, fn)


def _reuses_too_early(rank: int, mesh: Mesh) -> torch.Tensor:
    """Write to the packed buffer between the issue and the Wait, as a wrong schedule would."""
    by = connect(mesh)
    sent = by.send_buffer(2, torch.float32, ("shard",)).fill_(rank)
    handle = by.all_gather(sent, ("shard",))
    sent.fill_(7)
    return torch.cat(handle.wait())


def test_the_adversary_sees_a_buffer_written_too_early(pair):
    early = simulate(pair, _reuses_too_early, pair, adversary="early")
    late = simulate(pair, _reuses_too_early, pair, adversary="late")
    assert torch.equal(early[0], torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert torch.equal(late[0], torch.full((4,), 7.0))


@pytest.mark.parametrize("adversary", ["early", "late"])
def test_the_adversary_poisons_what_must_not_be_read(pair, adversary):
    def fn(rank):
        by = connect(pair)
        fresh = by.send_buffer(3, torch.float32, ("shard",))
        assert fresh.isnan().all()
        handle = by.all_gather(fresh.fill_(rank), ("shard",))
        rows = handle.wait()
        kept = torch.cat(rows)
        handle.release()
        assert torch.cat(rows).isnan().all()
        flat = torch.ones(2)
        reduction = by.all_reduce(flat, ("shard",))
        unread = flat.clone()
        assert torch.equal(reduction.wait(), torch.full((2,), 2.0))
        return kept, unread

    for kept, unread in simulate(pair, fn, adversary=adversary):
        assert torch.equal(kept, torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 1.0]))
        assert unread.isnan().all() == (adversary == "early")


# ------------------------------------------------------------------ slots
def test_slots_are_used_again_when_all_are_done():
    slots = messages.Slots(start=messages.PAGE)
    first, second = slots.take(5000), slots.take(100)
    assert (first.start, first.end, second.start) == (4096, 12288, 12288)
    assert slots.find_packed(first.start, 5000) is first and slots.find_packed(first.start + 8, 10) is None
    done = {first: False, second: False}
    for slot in done:
        slot.use = SimpleNamespace(free=lambda s=slot: done[s], finished=False)
    assert slots.take(100).start == 16384
    done[first] = True
    assert slots.take(4096).start == 4096
    assert slots.take(4096).start == 8192
    assert slots.top == 20480


def _open_for_long(rank: int) -> list[float]:
    """Keep a gather open while the two rows of control words go round, and return sums of meanwhile."""
    by = connect(make_mesh(shard=2, device="cpu"), timeout=20)
    rows = by.all_gather(torch.tensor([float(rank)]), ("shard",))
    sums = [by.all_reduce(torch.ones(1), ("shard",)).wait() for _ in range(5 * messages.ROWS)]
    by.all_gather(torch.tensor([7.0]), ("shard",)).wait()
    seen = [*torch.cat(rows.wait()).tolist(), torch.cat(sums).mean().item()]
    by.close()
    return seen


def test_a_message_may_stay_open_for_longer_than_control_words_go_round(ranks):
    assert ranks(2).run(_open_for_long) == [[0.0, 1.0, 2.0]] * 2


def _of_nothing(rank: int, mesh: Mesh) -> None:
    by = connect(mesh)
    for dtype in (messages.DTYPES[0], torch.float32):
        handle = by.all_gather(torch.empty(0, dtype=dtype), ("shard",))
        assert [len(row) for row in handle.wait()] == [0, 0]
        handle.release()


def test_nothing_is_gathered_of_any_dtype(pair):
    simulate(pair, _of_nothing, pair, timeout=5)


def test_groups_of_a_mesh_have_one_order():
    mesh = make_mesh(replicate=2, shard=2, abstract=True)
    assert shared_memory.group_names(mesh) == groups(mesh)


def test_a_second_wait_is_refused(pair):
    def fn(rank):
        handle = connect(pair).all_reduce(torch.ones(2), ("shard",))
        handle.wait()
        with raises(CollectiveError, fix="first result", says="twice"):
            handle.wait()

    simulate(pair, fn, timeout=5)


def test_more_than_a_region_holds_is_refused(monkeypatch):
    monkeypatch.setattr(messages, "REGION", 1 << 14)
    slots = messages.Slots(start=messages.PAGE)
    slots.take(1 << 13)
    with raises(CollectiveError, says="in flight"):
        slots.take(1 << 13)


def test_an_unknown_adversary_is_refused(pair):
    with raises(CollectiveError, leaves="adversary='soon'", says="'late'"):
        simulate(pair, lambda rank: None, adversary="soon")
