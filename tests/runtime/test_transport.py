"""On real ranks: a transport takes its memory back, names who died, and connects a mesh once."""

import gc
import os
import threading
from pathlib import Path

import pytest
import torch

import fnshard as fs
from fnshard.optim.contract import Optimizer
from fnshard.runtime.collectives.connect import connect


def unshard_often(rank, times):
    mesh = fs.make_mesh(shard=2, device="cpu")
    params = {"w": torch.ones(4)}
    specs = fs.presets.full_shard(params, mesh)
    shards = fs.shard(params, specs, mesh)
    counts = []
    for _ in range(times):
        fs.unshard(shards, specs, mesh)
        counts.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
    return counts


def test_unshard_opens_nothing_after_its_first_call(ranks):
    for counts in ranks(2).run(unshard_often, 8):
        assert counts[0] == counts[-1]


def close_and_go_on(rank):
    mesh = fs.make_mesh(shard=2, device="cpu")
    params = {"w": torch.arange(5.0)}
    specs = fs.presets.full_shard(params, mesh)
    shards = fs.shard(params, specs, mesh)
    first = fs.unshard(shards, specs, mesh)["w"]
    next(iter(mesh.connections.values())).close()
    return torch.equal(first, fs.unshard(shards, specs, mesh)["w"]), len(mesh.connections)


def test_a_mesh_whose_connection_was_closed_connects_anew(ranks):
    assert ranks(2).run(close_and_go_on) == [(True, 1)] * 2


def mappings():
    return Path("/proc/self/maps").read_text().count("memfd:fnshard")


def keep_a_leaf(rank):
    gc.collect()
    before = mappings()
    by = connect(fs.make_mesh(shard=2, device="cpu"), timeout=20)
    (leaf,) = by.gather_leaves([(0, 2)], 2, torch.int64, lambda _: None, ("shard",)).wait()
    by.all_reduce(torch.ones(3), ("shard",)).wait()
    counts = [mappings() - before]
    by.close()
    gc.collect()
    counts += [mappings() - before, int(leaf.sum())]
    del leaf
    by.close()  # again is nothing
    return [*counts, mappings() - before]


def test_what_is_closed_is_unmapped_with_the_last_leaf_that_lies_there(ranks):
    assert ranks(2).run(keep_a_leaf) == [[2, 1, 0, 0]] * 2  # the leaf lies in the first rank's memory


def waits_for_who_waits(rank):
    """Rank 3 dies, rank 2 waits for it, and rank 0 for rank 2."""
    by = connect(fs.make_mesh(replicate=2, shard=2, device="cpu"), timeout=20)
    by.barrier()
    if rank == 3:
        os._exit(9)
    try:
        {0: lambda: by.all_reduce(torch.ones(2), ("replicate",)).wait(), 1: lambda: None,
         2: lambda: by.all_reduce(torch.ones(2), ("shard",)).wait()}[rank]()  # fmt: skip
    except fs.CollectiveError as error:
        return str(error)


def test_who_died_is_named_and_not_who_waits_for_it(ranks):
    zero, one, two, _ = ranks(4).run(waits_for_who_waits, lost=(3,))
    assert "rank 3 has left" in zero and "rank 3 has left" in two and one is None


# ------------------------------------------------------------------ an optimizer's gathers are instructions
def momentum_over_norm(lr):
    """Gathers its momentum, and then what rests on that: two gathers a leaf, one after the other."""

    def leaf(path, grad, slots, param, info):
        momentum = 0.9 * slots["m"] + grad
        full = info.require("gather")(path, momentum)
        scaled = info.require("gather")(path, grad / full.norm())
        return -lr * info.require("cut")(path, full * scaled.norm()), {"m": momentum}

    slots = {"m": torch.zeros_like}
    return Optimizer("momentum_over_norm", leaf, slots=slots, needs=frozenset({"gather"}), elementwise=False)


def gathering_step(ranks, optimizer, **policy):
    mesh = fs.make_mesh(shard=ranks, device="cpu", simulated=True)
    params = {"l.0.w": torch.arange(1.0, 7.0).double().reshape(3, 2), "l.1.w": torch.ones(5).double()}
    specs = fs.presets.full_shard(params, mesh, **policy)
    loss = lambda p, x: (p["l.0.w"].pow(2).sum() + p["l.1.w"].pow(3).sum()) * x.mean()  # noqa: E731
    step = fs.shard_step(loss, specs, mesh=mesh, optimizer=optimizer, backend="eager")
    lowered = step.lower(params, torch.ones(1).double())

    def run(rank):
        state = step.init(params)
        for _ in range(3):
            state, _ = step(state, torch.ones(1).double())
        return fs.unshard(state.params, specs, mesh)

    return lowered, fs.simulate(mesh, run)[0]


def test_nothing_communicates_inside_an_update():
    lowered, _ = gathering_step(2, momentum_over_norm(0.01))
    lines = [i for i in lowered.schedule.instructions if i.unit == "l.0" and i.phase == "update"]
    assert [i.verb for i in lines] == [*["update_gather", "wait"] * 2, "update", "free"]
    assert [n for n in lines[4].reads if n.startswith("w:")] == ["w:update/l.0", "w:update/l.0.1"]
    assert lines[2].reads[-1] == "w:update/l.0"  # the second rests on the first
    # Blocks of [3, 1] and of 3, each twice, of two ranks, in fp64.
    assert lowered.comm_analysis()["update_gather"] == {"count": 4, "bytes": 2 * 2 * (3 + 3) * 8}
    assert sum(c.startswith("update_gather") for c in lowered.schedule.communication()) == 4
    plain, _ = gathering_step(2, fs.optim.sgd(0.01))
    assert plain.schedule.fingerprint() != lowered.schedule.fingerprint()
    alone, _ = gathering_step(1, momentum_over_norm(0.01))
    assert "update_gather" not in alone.schedule.counts()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("place", ["device", "host", "streamed"])
def test_an_optimizer_that_gathers_is_the_same_on_any_mesh(ranks, place):
    tiers = {
        "host": {"optimizer_memory": "host", "update_on": "host"},
        "streamed": {"optimizer_memory": "host"},
    }
    make = lambda: fs.optim.chain(fs.optim.clip_by_global_norm(0.5), momentum_over_norm(0.01))  # noqa: E731
    _, expected = gathering_step(1, make())
    _, got = gathering_step(ranks, make(), **tiers.get(place, {}))
    assert all((got[p] - expected[p]).abs().max() < 1e-12 for p in got)


def test_an_optimizer_whose_gathers_depend_on_values_is_refused():
    def leaf(path, grad, slots, param, info):
        return (-info.require("gather")(path, grad)[:1] if float(grad.sum()) > 0 else grad), {}

    optimizer = Optimizer("fickle()", leaf, needs=frozenset({"gather"}), elementwise=False)
    with pytest.raises(fs.OptimizerError, match=r"fickle.*does not run on fake tensors"):
        gathering_step(2, optimizer)
