"""Messages between stages: one contract for all backends; peers that die or stay silent."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from fnshard.errors import CollectiveError
from fnshard.mesh import Mesh, make_mesh
from fnshard.runtime.collectives import mail, shared_memory
from fnshard.runtime.collectives.connect import connect
from fnshard.runtime.collectives.simulated import simulate

TRANSPORTS = ("auto", "p2p", "native")
AXES = {2: {"pipeline": 2}, 4: {"pipeline": 2, "shard": 2}}
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64)
SHAPES = ((), (3,), (0, 4), (127, 5), (70_001,))


def letter(sender: int, number: int) -> list[Tensor]:
    """Draw a rank's message of a number: tensors of several shapes and dtypes."""
    made = torch.Generator().manual_seed(1000 * sender + number)
    shape, dtype = SHAPES[number % len(SHAPES)], DTYPES[number % len(DTYPES)]
    values = torch.randint(0, 8, (*shape, 2), generator=made).to(dtype)
    return [values[..., 0], torch.tensor(number)][: 1 + number % 2]  # strided at first


def likes(tensors: list[Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(t.shape), t.dtype) for t in tensors]


def exchange(by: Any, count: int) -> None:
    """Send all of both stages before either receives, and wait in another order than that of issue."""
    here, peer = by.mesh.rank, by.mesh.partner(1 - by.mesh.stage)
    by.open_groups([a for a in (("shard",),) if "shard" in by.mesh.names])
    sent = [letter(here, n) for n in range(count)]
    handles = [by.send(tensors, peer, f"message {n}") for n, tensors in enumerate(sent)]
    for tensors, handle in zip(sent, handles, strict=True):
        handle.wait()
        for tensor in tensors:
            tensor.zero_()  # which is what was sent no more
    expected = [letter(peer, n) for n in range(count)]
    waiting = [by.recv(likes(tensors), peer, f"message {n}") for n, tensors in enumerate(expected)]
    for number in [*range(1, count, 2), *range(0, count, 2)]:
        for got, tensor in zip(waiting[number].wait(), expected[number], strict=True):
            assert got.dtype == tensor.dtype and got.is_contiguous() and torch.equal(got, tensor), number
            assert got.data_ptr() % 16 == 0
            got.fill_(1)  # it is the receiver's own
    by.flush()


def contract(rank: int, mesh: Mesh, transport: str = "auto") -> str:
    by = connect(mesh, timeout=20, transport=transport)
    exchange(by, 12)
    if by.mesh.size > 2:
        by.all_reduce(torch.ones(3), ("shard",)).wait()
    by.all_gather(torch.ones(70_000), ("pipeline",)).wait()
    exchange(by, 5)
    by.gather_object("")
    by.close()
    return type(by).__name__


@pytest.mark.parametrize("adversary", [None, "early", "late"])
@pytest.mark.parametrize("world", [2, 4])
def test_simulated_ranks_send_each_other_messages(world, adversary):
    mesh = make_mesh(simulated=True, device="cpu", **AXES[world])
    assert set(simulate(mesh, contract, mesh, adversary=adversary, timeout=60)) == {"Simulated"}


def real(rank: int, axes: dict[str, int], transport: str) -> str:
    return contract(rank, make_mesh(device="cpu", **axes), transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [2, 4])
def test_real_ranks_send_each_other_messages(ranks, world, transport):
    assert set(ranks(world).run(real, AXES[world], transport)) == {
        "Shared" if transport == "auto" else "Group"
    }


def on_two_hosts(rank: int) -> str:
    host = shared_memory.host
    shared_memory.host = lambda: f"host {rank // 2}"
    try:
        return contract(rank, make_mesh(device="cpu", **AXES[4]))
    finally:
        shared_memory.host = host


def test_stages_on_two_hosts_send_through_the_process_group(ranks):
    assert ranks(4).run(on_two_hosts) == ["Shared"] * 4


def many(rank: int) -> tuple[int, int]:
    by = connect(make_mesh(pipeline=2, device="cpu"), timeout=20)
    for _ in range(3):
        exchange(by, 10)
        by.gather_object("")
    warm = by.transport_bytes()
    for _ in range(30):
        exchange(by, 10)
        by.gather_object("")
    last = by.transport_bytes()
    by.close()
    return warm, last


def test_slots_of_messages_are_used_again(ranks):
    for warm, last in ranks(2).run(many):
        assert last == warm


def fill_a_ring(rank: int) -> str:
    by = connect(make_mesh(pipeline=2, device="cpu"), timeout=20)
    text = ""
    if rank == 0:
        try:
            for _ in range(mail.RING + 1):
                by.send([torch.ones(1)], 1, "one too many")
        except CollectiveError as error:
            text = str(error)
    by.gather_object("")
    by.close()
    return text


@pytest.mark.long
def test_more_messages_than_a_ring_has_rows_are_refused(ranks):
    assert f"{mail.RING} messages before it were not taken" in ranks(2).run(fill_a_ring)[0]


# ------------------------------------------------------------------ what goes wrong
def other_message(rank: int, mesh: Mesh) -> str:
    by = connect(mesh, timeout=5)
    if mesh.rank == 0:
        by.send([torch.ones(3)], 1, "micro 0 h").wait()
        return ""
    with pytest.raises(CollectiveError) as error:
        by.recv([((3,), torch.float32)], 0, "micro 1 h").wait()
    return str(error.value)


def other_real_message(rank: int) -> str:
    mesh = make_mesh(pipeline=2, device="cpu")
    found = other_message(rank, mesh)
    connect(mesh).gather_object("")
    return found


def test_another_message_than_was_awaited_is_named(ranks):
    mesh = make_mesh(pipeline=2, simulated=True, device="cpu")
    for text in (simulate(mesh, other_message, mesh)[1], ranks(2).run(other_real_message)[1]):
        assert "recv of micro 1 h from rank 0 to rank 1" in text and "rank 0: " in text


def abandon_group(rank: int, transport: str, how: str) -> tuple[str, float]:
    by = connect(make_mesh(pipeline=2, device="cpu"), timeout=6 if how == "dies" else 1, transport=transport)
    exchange(by, 3)
    if rank == 1:
        if how == "dies":
            os._exit(9)
        time.sleep(2)
        return "", 0.0
    began = time.monotonic()
    try:
        by.recv([((100_000,), torch.float32)], 1, "micro 3 h").wait()
    except CollectiveError as error:
        return str(error), time.monotonic() - began
    return "nothing was raised", 0.0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stage_that_dies_is_named_within_seconds(ranks, transport):
    text, seconds = ranks(2).run(abandon_group, transport, "dies", lost=(1,))[0]
    assert "recv of micro 3 h from rank 1 to rank 0: a peer died" in text and "rank 1 has left" in text
    assert seconds < 5


@pytest.mark.suite({
    "auto": "shared memory",
})  # fmt: skip
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stage_that_stays_silent_is_named_when_the_time_is_up(ranks, transport):
    text, seconds = ranks(2).run(abandon_group, transport, "is silent", lost=(0, 1))[0]
    assert "rank 1 did not come within 1 s" in text and seconds < 5


def waits_for_the_end(rank: int, transport: str) -> str:
    """Let the second stage end without what was sent to it; the first is told so at its flush."""
    by = connect(make_mesh(pipeline=2, device="cpu"), timeout=3, transport=transport)
    exchange(by, 3)
    if rank == 1:
        os._exit(9)
    by.send([torch.ones(100_000)], 1, "micro 0 h").wait()
    try:
        by.flush()
    except CollectiveError as error:
        return str(error)
    return "nothing was raised"


def test_what_nobody_takes_is_an_error_where_it_would_be_lost(ranks):
    text = ranks(2).run(waits_for_the_end, "p2p", lost=(1,))[0]
    assert "send of micro 0 h from rank 0 to rank 1: a peer died" in text
