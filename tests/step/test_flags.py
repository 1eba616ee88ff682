"""Flags ride on the loss reduction; a rank that leaves is an error."""

import pytest
import torch

import fnshard as fs

PARAMS = {"w": torch.arange(1.0, 5.0)}


def make(world):
    mesh = fs.make_mesh(shard=world, simulated=True)
    specs = fs.presets.full_shard(PARAMS, mesh)
    loss = lambda p, x: (p["w"] * x).sum()  # noqa: E731
    return mesh, fs.shard_step(loss, specs, mesh=mesh, optimizer=fs.optim.sgd(0.1), backend="eager")


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
    with pytest.raises(fs.StateError, match="flag 'halt' is not one of stop"):
        step.raise_flag("halt")


def test_a_rank_that_leaves_is_an_error_and_not_a_hang():
    mesh, step = make(2)

    def run(rank):
        state = step.init(PARAMS)
        for _ in range(1 + rank):
            state, _ = step(state, torch.ones(4))

    with pytest.raises(fs.CollectiveError, match="line 1 of the schedule, forward w wait gather"):
        fs.simulate(mesh, run)
