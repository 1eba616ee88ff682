"""Ranks whose data end at different steps stop at the same one; flags ride on the loss reduction."""

import pytest
import torch
from errors import raises
from toys import step_of

import fnshard as fs

PARAMS = {"w": torch.arange(1.0, 5.0)}


def make(world):
    mesh = fs.make_mesh(shard=world, simulated=True)
    specs = fs.presets.full_shard(PARAMS, mesh)
    loss = lambda p, x: (p["w"] * x).sum()  # noqa: E731
    return mesh, fs.shard_step(loss, specs, mesh=mesh, optimizer=fs.optim.sgd(0.1), backend="eager")


@pytest.mark.parametrize("lengths", [(3, 5), (5, 3), (4, 4), (0, 2), (2, 0), (1, 7), (1, 1), (2, 7), (2, 1)])
def test_all_ranks_make_as_many_steps_as_the_shortest_has_batches(lengths):
    mesh, step = make(2)

    def run(rank):
        state = step.init(PARAMS)
        for x in fs.lockstep([torch.ones(4)] * lengths[rank], step):
            state, _ = step(state, x)
        return int(state.step)

    assert fs.simulate(mesh, run) == [min(lengths)] * 2


def test_a_flag_reaches_all_ranks_once_a_step_later_and_no_collective_is_added():
    mesh, step = make(2)
    batch = torch.ones(4)
    assert step.lower(PARAMS, batch).schedule.counts()["reduce_scalars"] == 1

    def run(rank):
        state, flags = step.init(PARAMS), []
        for i in range(4):
            if i == 1 and rank == 1:
                step.raise_flag("stop")
            state, _ = step(state, batch)
            flags.append(step.flag_raised("stop"))
        return flags

    assert fs.simulate(mesh, run) == [[False, False, True, False]] * 2


def test_an_unknown_flag_is_refused():
    _, step = make(1)
    with raises(fs.StateError, leaves="'halt'", says=["out_of_data", "stop"]):
        step.raise_flag("halt")


def test_without_lockstep_a_rank_that_leaves_is_an_error_and_not_a_hang():
    mesh, step = make(2)

    def run(rank):
        state = step.init(PARAMS)
        for _ in range(1 + rank):
            state, _ = step(state, torch.ones(4))

    with raises(fs.CollectiveError, leaves=["line 1", "forward w wait gather"]):
        fs.simulate(mesh, run)


def test_a_loop_that_ended_or_was_left_early_leaves_nothing_behind():
    mesh, step = make(2)

    def run(rank):
        state, counts = step.init(PARAMS), []
        for leave in (True, False, False):
            before = int(state.step)
            for i, x in enumerate(fs.lockstep([torch.ones(4)] * 3, step)):
                if leave and i == 2:
                    break
                state, _ = step(state, x)
            counts.append(int(state.step) - before)
        return counts

    assert fs.simulate(mesh, run) == [[2, 3, 3]] * 2


def test_a_batch_without_a_step_is_an_error():
    step = step_of(lambda p, x: (p["w"] * x).sum(), PARAMS)
    with raises(fs.StateError, leaves="lockstep", fix="call the step once"):
        for _ in fs.lockstep([torch.ones(4)] * 2, step):
            pass
