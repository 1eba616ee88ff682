"""Cost: FLOPs, bytes and seconds of kernels and instructions; the table of hardware; measuring a machine."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from inspect import getattr_static
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from errors import raises
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from toys import chain, llama, lower, rows, run_chain

import fnshard as fs
from fnshard import Hardware, SpecError
from fnshard.analysis import measure as measuring
from fnshard.analysis.flops import GraphCost, graph_cost
from fnshard.analysis.hardware import TABLE, Curve, Link
from fnshard.analysis.timeline import HardwarePricer
from fnshard.compiler.frontend.exchange import EXCHANGE
from fnshard.compiler.schedule import instructions as lines
from fnshard.compiler.schedule.instructions import (
    AllReduce,
    Exchange,
    Gather,
    Instruction,
    ReduceScatter,
    Run,
    ToDevice,
    ToHost,
    Update,
)
from fnshard.mesh.host import control_groups

H100 = Hardware.named("h100")


def graphs(fn: Any, params: Any, *batch: Any) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Return the forward and backward of a program of one segment."""
    (kernel,) = lower(fn, params, *batch, ranks=1, policy={"unit": "all"}).kernels.values()
    return kernel.forward, kernel.backward.module


# ------------------------------------------------------------------ FLOPs


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_torchs_formula_and_half_of_it_where_causal(causal: bool) -> None:
    b, h, t, k = 2, 3, 16, 8
    params = {n: torch.randn(b, h, t, k) for n in "qkv"}

    def loss(p: Any, scale: Any) -> Any:
        q, k, v = (p[n] * scale for n in "qkv")
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).sum()

    forward, backward = graphs(loss, params, torch.ones(1))
    full = sdpa_flop_count((b, h, t, k), (b, h, t, k), (b, h, t, k))
    assert graph_cost(forward, fused=True).flops == full * (0.5 if causal else 1.0)
    assert graph_cost(backward, fused=True).flops == 2.5 * full * (0.5 if causal else 1.0)
    assert {w.kind for w in graph_cost(forward, fused=True).work if w.flops} == {"attention"}


def test_flops_are_torchs_own_count() -> None:
    params = {"a": torch.randn(8, 12), "b": torch.randn(12, 5)}

    def plain(p: Any, x: Any) -> Any:
        return ((x @ p["a"]).tanh() @ p["b"]).sum()

    x = torch.randn(3, 7, 8)
    leaves = {n: v.requires_grad_() for n, v in params.items()}
    with FlopCounterMode(display=False) as counter:
        plain(leaves, x).backward()
    forward, backward = graphs(plain, {n: v.detach() for n, v in params.items()}, x)
    got = graph_cost(forward, fused=True).flops + graph_cost(backward, fused=True).flops
    assert got == counter.get_total_flops() > 0


# ------------------------------------------------------------------ bytes


def memory(cost: GraphCost) -> list[tuple[float, float]]:
    return [(w.read_bytes, w.written_bytes) for w in cost.work if w.kind == "memory"]


def trace_graph(fn: Any, *args: torch.Tensor) -> torch.fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(fn, tracing_mode="fake")(*args)


def test_a_chain_reads_and_writes_once_where_it_is_fused() -> None:
    graph = trace_graph(lambda x: torch.tanh(x * 2 + 1), torch.randn(10, 10))
    assert memory(graph_cost(graph, fused=False)) == [(400, 400)] * 3
    assert memory(graph_cost(graph, fused=True)) == [(400, 400)]
    (work,) = graph_cost(graph, fused=True).work
    assert (work.cheap, work.costly) == (200, 100)


def test_chains_end_at_matmuls_and_do_not_reach_around_them() -> None:
    """`x * 2` is read by a matmul, whose result is added to it: one loop cannot hold both."""

    def fn(x: Any, w: Any) -> Any:
        y = x * 2
        return (y @ w + y) * 3

    cost = graph_cost(trace_graph(fn, torch.randn(10, 10), torch.randn(10, 10)), fused=True)
    assert [w.kind for w in cost.work] == ["memory", "matmul", "memory"]
    assert memory(cost) == [(400, 400), (800, 400)]


def test_a_norm_is_one_loop_and_a_sum_over_rows_ends_it() -> None:
    normed = trace_graph(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1), torch.randn(10, 10))
    assert memory(graph_cost(normed, fused=True)) == [(400, 400)]
    summed = trace_graph(lambda x: x / (x + 1).sum(0, keepdim=True), torch.randn(10, 10))
    assert memory(graph_cost(summed, fused=True)) == [(400, 40), (440, 400)]


def test_views_cost_nothing_and_a_slice_is_read_as_a_slice() -> None:
    graph = trace_graph(lambda x: x.t().reshape(-1)[:10].exp(), torch.randn(10, 10))
    assert memory(graph_cost(graph, fused=True))[-1][1] == 40
    graph = trace_graph(lambda x: x[:2].t() + 1, torch.randn(10, 10))
    assert memory(graph_cost(graph, fused=True)) == [(80, 80)]


# ------------------------------------------------------------------ instructions


def price(low: Any, kind: type, hardware: Hardware = H100) -> Any:
    line = next(i for i in low.schedule.instructions if type(i) is kind)
    return line.price(HardwarePricer(low.schedule, hardware, low.sizes, fused=False))


def loss(p: Any, x: Any) -> Any:
    return run_chain(p, x).sum()


def test_every_instruction_says_all_about_itself() -> None:
    """Each has `bind` and `price`; those that issue something say what their Wait does, too."""
    kinds = {k for k in vars(lines).values() if isinstance(k, type) and issubclass(k, Instruction)}
    kinds -= {Instruction, lines.OfBucket}
    assert len(kinds) == 27
    for kind in kinds:
        methods = ["bind", "price"] + ["bind_wait"] * (kind.lane != lines.COMPUTE)
        assert [m for m in methods if getattr_static(kind, m) is getattr_static(Instruction, m)] == [], kind


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_algorithm_bandwidth(ranks: int) -> None:
    rate, wait = 1e9, 1e-3
    hardware = replace(H100, node=Link.even(wait, rate), network=Link.even(wait, rate), ranks_per_node=1024)
    params, size = chain(2, 64), 64 * 64 * 4
    share, meeting = (ranks - 1) / ranks, wait * math.ceil(math.log2(ranks))
    sharded = lower(loss, params, rows(64), ranks=ranks)
    for kind in (Gather, ReduceScatter):
        assert price(sharded, kind, hardware).flight_seconds == pytest.approx(meeting + share * size / rate)
    full = lower(loss, params, rows(64), ranks=ranks, preset="no_shard")
    assert price(full, AllReduce, hardware).flight_seconds == pytest.approx(meeting + 2 * share * size / rate)
    swap = lambda p, x: EXCHANGE(run_chain(p, x), "all_to_all", "shard", 1, ranks).sum()  # noqa: E731
    seconds = price(lower(swap, params, rows(64), ranks=ranks), Exchange, hardware).flight_seconds
    assert seconds == pytest.approx(meeting + share * rows(64).nbytes / rate)


def test_groups_that_span_nodes_go_through_the_network() -> None:
    """16 ranks on 2 nodes: over the inner axis NVLink, over the outer one adapter, over both eight."""
    node, network = H100.node.gather.at(1e6), H100.network.gather.at(1e6)
    mesh = fs.make_mesh(replicate=2, shard=8, abstract=True)
    inner, outer = mesh.group_ranks(["shard"], 0), mesh.group_ranks(["replicate"], 0)
    both = mesh.group_ranks(["replicate", "shard"], 0)
    assert H100.link(inner).gather.at(1e6) == node
    assert H100.link(outer).gather.at(1e6) == network
    assert H100.link(both).gather.at(1e6) == min(node, 8 * network)
    assert (
        H100.link(both).all_to_all.at(1e6) == network * 15 / 8
    )  # 8 of 15 parts leave the node, by one adapter


def test_updates_go_by_what_the_optimizer_holds() -> None:
    memory_bound = replace(H100, floor_seconds=0.0, update=Curve.flat(1e9))
    momentum = fs.optim.sgd(0.1, momentum=0.9)
    for optimizer, tensors in ((fs.optim.sgd(0.1), 3), (momentum, 5), (fs.optim.adamw(0.1), 7)):
        low = lower(loss, chain(2, 64), rows(64), ranks=4, optimizer=optimizer)
        seconds = price(low, Update, memory_bound).device_seconds
        assert seconds == pytest.approx(tensors * 64 * 64 / 4 * 4 / 1e9)


def test_a_host_update_is_on_the_host_and_transfers_go_at_the_host_link() -> None:
    policy = {"optimizer_memory": "host"}
    low = lower(loss, chain(2, 64), rows(64), ranks=4, policy=policy)
    assert price(low, Update).on_host
    hardware = replace(H100, host_link_bytes_per_s=1e6)
    got = price(low, ToDevice, hardware)
    assert (got.lane, got.flight_seconds) == ("transfer", pytest.approx(64 * 64 / 4 * 4 / 1e6))


TIERS = {
    "optimizer": {"optimizer_memory": "host"},
    "parameters": {"memory": "host"},
    "streamed": {"optimizer_memory": "host", "update_on": "device"},
    "disk": {"memory": "host", "optimizer_memory": "disk"},
}
MASTER = {"optimizer_dtype": torch.float32}


@pytest.mark.suite({
    "streamed": "both ways, of leaves and slots",
    "disk": "through the host",
})  # fmt: skip
@pytest.mark.parametrize("tier", TIERS)
def test_transfers_are_priced_by_the_bytes_of_what_they_read(tier: str) -> None:
    """Line by line."""
    one = replace(H100, host_link_bytes_per_s=1.0, disk_bytes_per_s=math.inf)
    for accumulate, dtypes, remat in itertools.product((1, 2), ({}, MASTER), ("none", "offload")):
        dtype = torch.bfloat16 if dtypes else torch.float32
        params = {p: v.to(dtype) for p, v in chain(3).items()}
        more = {"accumulate": accumulate, "policy": TIERS[tier] | dtypes, "remat": remat}
        low = lower(loss, params, rows().to(dtype), ranks=3, **more)
        transfers = [i for i in low.schedule.instructions if i.lane == lines.TRANSFER]
        moved = [sum(low.sizes[n] for n in i.reads) for i in transfers]
        assert transfers and all(moved)
        pricer = HardwarePricer(low.schedule, one, low.sizes)
        assert [i.price(pricer).flight_seconds for i in transfers] == moved


def test_copies_of_mapped_files_hold_the_host_up() -> None:
    for tier, blocking in (("host", False), ("disk", True)):
        low = lower(loss, chain(2, 64), rows(64), ranks=4, policy={"memory": tier})
        assert price(low, ToDevice).blocking == blocking
        low = lower(loss, chain(2, 64), rows(64), ranks=4, policy={"optimizer_memory": tier})
        assert price(low, ToDevice).blocking == blocking  # a master copy, that rests with the slots
        assert not price(low, ToHost).blocking  # gradients


@pytest.mark.long
def test_kernels_cost_more_uncompiled() -> None:
    low = lower(*llama(2), ranks=2)
    run = next(i for i in low.schedule.instructions if isinstance(i, Run) and "layers.0" in i.units)
    pricers = [HardwarePricer(low.schedule, H100, low.sizes, fused=f) for f in (True, False)]
    fused, eager = (run.price(pricer) for pricer in pricers)
    assert fused.device_seconds < eager.device_seconds and fused.host_seconds < eager.host_seconds
    assert len({pricer.kernel_cost(run).flops for pricer in pricers}) == 1


# ------------------------------------------------------------------ hardware


@pytest.mark.parametrize("name", TABLE)
def test_the_table_survives_json(name: str) -> None:
    hardware = Hardware.named(name)
    values = json.loads(json.dumps(hardware.as_dict()))
    assert Hardware.from_dict(values) == hardware
    assert hardware.name == name and name in str(hardware)
    assert all(curve.best <= hardware.peak_flops[dtype] for dtype, curve in hardware.flops.items())


@pytest.mark.parametrize("points", [(), ((1.0, 0.0),), ((2.0, 1.0), (1.0, 1.0)), ((0.0, 1.0),)])
def test_curves_that_are_none(points: Any) -> None:
    with raises(SpecError, leaves="a Curve"):
        Curve(points)


def test_a_curve_is_interpolated_and_flat_beyond_its_ends() -> None:
    curve = Curve(((1e2, 1.0), (1e4, 3.0)))
    assert [curve.at(s) for s in (1, 1e2, 1e4, 1e9)] == [1.0, 1.0, 3.0, 3.0]
    assert curve.at(1e3) == pytest.approx(2.0)
    assert curve.seconds(0) == 0


def quick() -> Any:
    """Take one short sample of each benchmark."""
    sizes = {
        "MATMULS": (32, 64, 128),
        "LENGTHS": (32, 64),
        "COUNTS": (1 << 10, 1 << 11, 1 << 12, 1 << 14),
        "PARTS": (64, 4096),
        "COLD_BYTES": 1 << 16,
    }
    return mock.patch.multiple(measuring, SAMPLES=1, SAMPLE_S=1e-6, **sizes)


def test_measuring_this_machine() -> None:
    with quick():
        found = Hardware.measure()
    assert Hardware.from_dict(json.loads(json.dumps(found.as_dict()))) == found
    assert {"f32", "bf16"} <= set(found.flops) and not found.overlap
    timeline = lower(loss, chain(2), rows(), ranks=2).timeline(found)
    assert timeline.step_seconds > 0


def test_hardware_by_name_or_as_it_is() -> None:
    low = lower(loss, chain(2), rows(), ranks=2)
    assert low.timeline("h100").as_dict() == low.timeline(H100).as_dict()
    for wrong in ("b9", None, 1e12, Hardware):
        with raises(SpecError, leaves=repr(wrong), fix=["'h100'", "fs.Hardware.measure()"]):
            low.timeline(wrong)


GROUPS = {
    "2": ("0::/a/b\n", {"a/b/memory.max": "700\n", "a/memory.max": "900", "memory.max": "max"}, [700, 900]),
    "2, seen from within": ("0::/a/b\n", {"memory.max": "500"}, [500]),
    "2, no limit": ("0::/\n", {"memory.max": "max\n"}, []),
    "1": (
        "5:cpu:/a\n4:memory:/a\n0::/\n",
        {"memory/a/memory.limit_in_bytes": "300", "memory/memory.limit_in_bytes": "9223372036854771712"},
        [300, 9223372036854771712],
    ),
    "none": ("", {}, []),
}


@pytest.mark.parametrize("name", GROUPS)
def test_limits_of_control_groups(name: str, tmp_path: Path) -> None:
    text, files, expected = GROUPS[name]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(text)
    for file, value in files.items():
        path = tmp_path / "sys/fs/cgroup" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value)
        (path.parent / {"memory.max": "memory.current"}.get(path.name, "memory.usage_in_bytes")).write_text(
            "5"
        )
    assert sorted(control_groups(tmp_path)) == [(limit, 5) for limit in expected]
    assert control_groups(tmp_path / "nowhere") == []


def test_ranks_of_one_host_share_its_memory_and_heed_a_limit() -> None:
    cpu = torch.device("cpu")
    with mock.patch.object(measuring, "control_groups", lambda: []):
        full = measuring.memory_bytes(cpu, 1)
        assert measuring.memory_bytes(cpu, 4) == full // 4
    with mock.patch.object(measuring, "control_groups", lambda: [(full // 2, 0), (2 * full, 0)]):
        assert measuring.memory_bytes(cpu, 2) == full // 2 // 2


def _measure(rank: int) -> Any:
    with quick():
        return Hardware.measure(fs.make_mesh(shard=2, device="cpu")).as_dict()


def test_ranks_measure_together_and_get_equal_numbers(ranks: Any) -> None:
    first, second = ranks(2).run(_measure)
    assert first == second
    assert first["memory_bytes"] == measuring.memory_bytes(torch.device("cpu"), 2)
    assert first["ranks_per_node"] == 2 and first["node"]["latency_seconds"] > 0
