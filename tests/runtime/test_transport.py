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


# ------------------------------------------------------------------ what owners compute is instructions
def momentum_over_norm(lr):
    """The momentum over its norm, which is of a whole leaf."""

    def before(path, grad, slots, param, info):
        momentum = 0.9 * slots["m"] + grad
        return momentum, {"m": momentum}

    return Optimizer(
        "momentum_over_norm", lambda path, update, slots, param, info: (-lr * update, {}),
        slots={"m": torch.zeros_like}, elementwise=False, before=before,
        whole=lambda path, momentum, *_: (momentum / momentum.norm(), {}),
    )  # fmt: skip


def owned_step(ranks, optimizer, **policy):
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
    lowered, _ = owned_step(2, momentum_over_norm(0.01))
    lines = [i for i in lowered.schedule.instructions if i.phase == "update" and i.verb != "free"]
    exchange = ["update_exchange", "wait"]
    own = [*["update_begin"] * 2, *exchange, "update_whole", *exchange, "update"]
    assert [i.verb for i in lines if i.unit != "-"] == own
    # A leaf of [3, 2] and one of [5] have owners of their own: two rows of 128 and 3 elements each, in fp64.
    bucket = next(b for name, b in lowered.schedule.buckets.items() if name.startswith("owners/"))
    assert [(p.path, p.offset) for p in bucket.pieces] == [("l.0.w", 0), ("l.1.w", bucket.numel // 2 + 16)]
    assert lowered.comm_analysis()["update_exchange"] == {"count": 2, "bytes": 2 * 2 * (16 + 16) * 8}
    assert sum(c.startswith("update_exchange") for c in lowered.schedule.communication()) == 2
    plain, _ = owned_step(2, fs.optim.sgd(0.01))
    assert plain.schedule.fingerprint() != lowered.schedule.fingerprint()
    alone, _ = owned_step(1, momentum_over_norm(0.01))
    assert "update_exchange" not in alone.schedule.counts()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("place", ["device", "host", "streamed"])
def test_an_optimizer_that_gathers_is_the_same_on_any_mesh(ranks, place):
    tiers = {
        "host": {"optimizer_memory": "host", "update_on": "host"},
        "streamed": {"optimizer_memory": "host"},
    }
    make = lambda: fs.optim.chain(fs.optim.clip_by_global_norm(0.5), momentum_over_norm(0.01))  # noqa: E731
    _, expected = owned_step(1, make())
    _, got = owned_step(ranks, make(), **tiers.get(place, {}))
    assert all((got[p] - expected[p]).abs().max() < 1e-12 for p in got)


def test_an_optimizer_whose_owners_look_at_values_is_refused():
    optimizer = Optimizer(
        "fickle()", lambda path, update, slots, param, info: (-update, {}), elementwise=False,
        whole=lambda path, grad, *_: (grad if float(grad.sum()) > 0 else -grad, {}),
    )  # fmt: skip
    with pytest.raises(fs.OptimizerError, match=r"fickle.*does not run on fake tensors"):
        owned_step(2, optimizer)
