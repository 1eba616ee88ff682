"""A hang is an error: within the timeout, with the instruction, its unit, and the rank that did not come."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import sharded
import torch.distributed as dist
from errors import raises
from models import model_of

import fnshard as fs
from fnshard.mesh import deadlock
from fnshard.runtime.collectives.connect import connect

TIMEOUT_S = 2
KINDS = {
    "all_gather": {"gather"},
    "gather_leaves": {"gather"},
    "gather_blocks": {"gather"},
    "reduce_scatter": {"reduce_scatter"},
    "reduce_pair": {"reduce_scatter"},
    "reduce_leaves": {"reduce_scatter"},
    "all_reduce": {"all_reduce", "reduce_scalars"},
}  # the instructions that issue a collective, or wait for it


def step_without_the_other(rank: int, preset: str, transport: str) -> tuple[str, float, str]:
    """Let rank 1 make one step and rank 0 two; return rank 0's error, its seconds, and the schedule."""
    model = model_of("gpt")
    mesh = fs.make_mesh(shard=2, device="cpu")
    mesh.connections[TIMEOUT_S] = connect(mesh, timeout=TIMEOUT_S, transport=transport)
    specs = sharded.specs_of(model, preset, mesh)
    step = sharded.make_step(mesh, model, specs, fs.optim.sgd(0.1), timeout=TIMEOUT_S)
    state, batch = step.init(model.params), sharded.part(model.batch(0), rank, 2)
    step.lower(model.params, *batch)  # a rank that lowers for longer than the timeout is no hang
    dist.barrier()
    state, _ = step(state, *batch)
    if rank == 1:
        return "", 0.0, ""
    began = time.monotonic()
    try:
        step(state, *batch)
    except fs.CollectiveError as error:
        return str(error), time.monotonic() - began, step.lower(model.params, *batch).as_text()
    return "no error", 0.0, ""


@pytest.mark.suite({
    "full_shard-p2p": "messages; test_collectives has the other transports",
})  # fmt: skip
@pytest.mark.parametrize(
    ("preset", "transport"),
    [
        ("full_shard", "auto"),
        ("full_shard", "p2p"),
        ("no_shard", "native"),
    ],
)
def test_it_names_the_instruction_the_unit_and_the_rank(ranks: Any, preset: str, transport: str) -> None:
    message, seconds, schedule = ranks(2).run(step_without_the_other, preset, transport)[0]
    where = re.match(r"line (\d+) of the schedule, (\w+) (\S+) (\w+) (.*?): (\w+) over \(shard\)", message)
    assert where, message
    number, phase, unit, verb, detail, collective = where.groups()
    assert KINDS[collective] & {verb, detail.split()[0]}, message
    (line,) = [text for text in schedule.splitlines() if text.split()[:1] == [number]]
    assert line.split()[1:4] == [phase, unit, verb] and detail.split()[0] in line
    assert re.search(rf"\n  rank 1 did not (come|answer) within {TIMEOUT_S} s", message), message
    assert TIMEOUT_S - 0.5 < seconds < TIMEOUT_S + 7


def ask_to_end(rank: int) -> str:
    """Ask rank 0 to end while it waits for rank 1, which computes for a while and then sleeps."""
    here, at_work = deadlock.peers(), time.monotonic() + 4 * deadlock.LOOK_S
    here.exchange("first", b"", 60)
    if rank == 1:
        while time.monotonic() < at_work:
            pass
        time.sleep(3)
        return ""
    with mock.patch.object(here, "asked", lambda: True), mock.patch.object(deadlock, "STOP_S", 1.0):
        try:
            here.exchange("second", b"", 60)
        except fs.CollectiveError as error:
            return f"{time.monotonic() > at_work} {error}"
    return "no error"


def test_who_is_asked_to_end_waits_for_peers_at_work_and_names_those_that_are_not(ranks: Any) -> None:
    text = ranks(2).run(ask_to_end)[0]
    assert text.startswith("True ") and "asked to end (SIGTERM) while it waited for rank 1" in text


def test_a_message_longer_than_a_store_takes_at_once_comes_whole_and_nothing_of_it_stays() -> None:
    here = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    there = dist.TCPStore("127.0.0.1", here.port, is_master=False, wait_for_workers=False)
    both = [deadlock.Peers(store, rank, 2) for rank, store in enumerate((here, there))]
    with ThreadPoolExecutor(2) as pool:
        for sent in ([bytes(9 << 20), b"a\nb"], [b"", b"short"]):
            exchanged = pool.map(lambda p, data: p.exchange("save", data, 60.0, call="save"), both, sent)
            assert list(exchanged) == [sent, sent]
    assert here.num_keys() == 2 * 2  # of each rank its process, and its last message


@pytest.mark.parametrize("of", [None, (0,)])
def test_what_came_after_a_rank_gave_up_is_no_answer_to_its_next_try(of: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(deadlock, "ROLL_S", 0.0)
    store = dist.HashStore()
    first, second = (deadlock.Peers(store, rank, 2) for rank in range(2))
    with raises(fs.CollectiveError, leaves="rank 1", says="0.1 s"):
        first.exchange("save", b"early", 0.1, call="save")
    with raises(fs.CollectiveError, leaves="rank 0", says="gave up"):
        second.exchange("save", b"late", 5.0, of, call="save")
    with raises(fs.CollectiveError, leaves="rank 1", says="gave up"):
        first.exchange("save", b"again", 5.0, call="save")
