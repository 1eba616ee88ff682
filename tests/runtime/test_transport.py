"""On real ranks: nothing that a transport lends is kept, and a mesh is connected once."""

import os
import threading

import torch

import fnshard as fs
from fnshard.optim.contract import Optimizer


def row_norm_sgd(lr):
    """Divides a leaf's gradient by the norm of the *whole* leaf: needs a gather."""

    def leaf(path, grad, slots, param, info):
        whole = info.require("gather")(path, grad)
        return -lr * grad / whole.norm(), {}

    return Optimizer(f"row_norm_sgd({lr})", leaf, needs=frozenset({"gather"}), elementwise=False)


def gathering_steps(rank, steps):
    mesh = fs.make_mesh(shard=2, device="cpu")
    params = {"l.0.w": torch.arange(1.0, 7.0).double().reshape(3, 2), "l.1.w": torch.ones(5).double()}
    specs = fs.presets.full_shard(params, mesh)
    loss = lambda p, x: (p["l.0.w"].pow(2).sum() + p["l.1.w"].pow(3).sum()) * x.mean()  # noqa: E731
    step = fs.shard_step(loss, specs, mesh=mesh, optimizer=row_norm_sgd(0.01), backend="eager")
    state = step.init(params)
    for _ in range(steps):
        state, _ = step(state, torch.ones(1).double())
    return fs.unshard(state.params, specs, mesh)


def test_an_optimizer_that_gathers_can_step_for_long(ranks):
    results = ranks(2).run(gathering_steps, 80)
    w0, w1 = torch.arange(1.0, 7.0).double().reshape(3, 2), torch.ones(5).double()
    for _ in range(80):
        g0, g1 = 2 * w0, 3 * w1.pow(2)
        w0, w1 = w0 - 0.01 * g0 / g0.norm(), w1 - 0.01 * g1 / g1.norm()
    for got in results:
        assert (got["l.0.w"] - w0).abs().max() < 1e-12 and (got["l.1.w"] - w1).abs().max() < 1e-12


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
