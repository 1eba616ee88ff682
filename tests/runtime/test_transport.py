"""On real ranks: a transport takes its memory back, names who died, and connects a mesh once."""

import gc
import os
import threading
from pathlib import Path

import torch

import fnshard as fs
from fnshard.runtime.collectives.connect import connect


def unshard_often(rank, times):
    mesh = fs.make_mesh(shard=2, device="cpu")
    params = {"w": torch.ones(4)}
    specs = fs.presets.full_shard(params, mesh)
    shards = fs.shard(params, specs, mesh)
    gc.collect()  # of what other tests have left in this rank
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
    """Let rank 3 die, rank 2 wait for it, and rank 0 for rank 2."""
    by = connect(fs.make_mesh(replicate=2, shard=2, device="cpu"), timeout=20)
    by.gather_object("")
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
