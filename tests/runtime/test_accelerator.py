"""What an accelerator asks of the code around it; where there is none, torch.cuda and NCCL are stood in."""

from __future__ import annotations

import datetime
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from errors import raises
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import fnshard as fs
from fnshard import SpecError, StateError
from fnshard.compiler import lower
from fnshard.compiler.frontend import contexts
from fnshard.debug.reference import on_device
from fnshard.launcher import post_mortem
from fnshard.mesh import process_group
from fnshard.runtime.collectives import base
from fnshard.runtime.collectives.base import Group
from fnshard.runtime.tiers import copy_to_device
from fnshard.step import lowered

CUDA = fs.make_mesh(shard=2, device="cuda", abstract=True)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand in for a machine with two GPUs, as far as `torch.accelerator` and `init_process_group` see."""
    seen = SimpleNamespace(count=2, index=0, groups=[], synchronized=0)
    found = {
        "is_available": lambda: True,
        "current_accelerator": lambda: torch.device("cuda"),
        "device_count": lambda: seen.count,
        "current_device_index": lambda: seen.index,
        "set_device_index": lambda index: setattr(seen, "index", index),
        "synchronize": lambda: setattr(seen, "synchronized", seen.synchronized + 1),
    }
    for name, value in found.items():
        monkeypatch.setattr(torch.accelerator, name, value)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **how: seen.groups.append((backend, "device_id" in how))
    )
    monkeypatch.setattr(process_group, "_joined", [])
    monkeypatch.setattr(process_group, "_wait_for_all", lambda *_: None)
    monkeypatch.setattr(process_group, "peers", Mock())
    return seen


# ------------------------------------------------------------------ joining and leaving
@pytest.mark.parametrize(
    ("visible", "local", "device"), [(2, "1", "cuda:1"), (1, "1", "cuda:0"), (1, "0", "cuda:0")]
)
def test_a_rank_has_its_own_gpu_whether_it_sees_all_or_one(
    gpus, monkeypatch, tmp_path, visible, local, device
):
    gpus.count = visible
    there = {"RANK": local, "LOCAL_RANK": local, "WORLD_SIZE": "2", process_group.RENDEZVOUS: str(tmp_path)}
    for name, value in there.items():
        monkeypatch.setenv(name, value)
    process_group.join_group()
    assert gpus.groups == [("cpu:gloo,cuda:nccl", False)]  # a device would start a communicator nobody uses
    assert torch.device("cuda", gpus.index) == torch.device(device)
    process_group.join_group("cpu")
    assert gpus.groups[1:] == [("gloo", False)]


def test_ranks_that_share_a_gpu_are_one_error():
    store, soon = dist.HashStore(), datetime.timedelta(seconds=5)
    devices = ["device 7 of a", "device 7 of a", "device 7 of b"]
    with ThreadPoolExecutor(3) as threads:
        found = [
            threads.submit(process_group._wait_for_all, store, rank, 3, soon, lambda: False, device)
            for rank, device in enumerate(devices)
        ]
    for each in found[:2]:
        with raises(
            SpecError, leaves=["device 7 of a", "2 ranks"], fix=["as many ranks", "CUDA_VISIBLE_DEVICES"]
        ):
            each.result()
    assert found[2].result() is None
    for rank in range(2):  # CPUs may be shared
        process_group._wait_for_all(store, rank, 3, soon, lambda: False, "")


def test_what_is_strided_is_pinned_as_it_is_copied(monkeypatch):
    pinned: list[bool] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: (pinned.append(t.is_contiguous()), t)[1])
    assert copy_to_device(torch.ones(4, 6)[:, :-1], torch.device("meta")).shape == (4, 5)
    assert pinned == [True]


def test_no_device_is_an_error(gpus):
    gpus.count = 0
    with raises(SpecError, leaves="device='cuda'", fix='device="cpu"'):
        process_group.join_group("cuda")


@pytest.mark.parametrize(("device_type", "calls"), [("cpu", 0), ("cuda", 1)])
def test_a_cpu_rank_leaves_without_a_call_of_the_driver(gpus, monkeypatch, device_type, calls):
    process_group.make_group(device_type, dist.HashStore(), 0, 1, datetime.timedelta(seconds=9))
    for name in ("destroy_process_group", "is_initialized"):
        monkeypatch.setattr(dist, name, lambda *_: True)
    process_group.leave_group()
    assert gpus.synchronized == calls


def test_nccls_communicators_go_before_kernels_and_give_up_in_time(monkeypatch):
    made: list[dict[str, Any]] = []

    def new(*_, **how):
        made.append(how)
        return None, []

    nccl = SimpleNamespace(Options=SimpleNamespace)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(dist, "new_subgroups_by_enumeration", new)
    monkeypatch.setattr(base, "peers", Mock(return_value=Mock(counts={})))
    group = Group(CUDA, timeout=10.0)
    group.group(("shard",), "gather")
    (own,) = made
    options = own["pg_options"]
    assert options.is_high_priority_stream and options._timeout == own["timeout"]
    assert own["timeout"].total_seconds() == 10.0


# ------------------------------------------------------------------ what fails
@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_what_the_device_says_is_no_peers_death(monkeypatch, kind):
    def fails(*_, **__):
        raise kind("CUDA error")

    monkeypatch.setattr(dist, "all_reduce", fails)
    group = Group(CUDA)
    group.groups[("shard",), "reduce"] = None, (0, 1)
    with pytest.raises(kind, match=r"^CUDA error$"):
        group.all_reduce(torch.ones(2), ("shard",))


# ------------------------------------------------------------------ tensors on the host
NUMBER, TABLE, PLACES = torch.tensor(2.0), torch.arange(8.0), torch.tensor([1, 0])
ELSEWHERE: dict[str, Callable[..., Any]] = {
    "a number closed over": lambda p, x: (x @ p["w"]).sum() * NUMBER,
    "what is computed of it": lambda p, x: (x @ p["w"]).sum() + NUMBER.exp(),
    "a table closed over": lambda p, x: (x @ p["w"] + TABLE).sum(),
    "what is computed of a table": lambda p, x: (x @ p["w"] + TABLE.exp()).sum(),
    "positions closed over": lambda p, x: (x[PLACES] @ p["w"]).sum(),
    "in a list": lambda p, x: torch.stack([(x @ p["w"])[0], TABLE]).sum(),
    "moved by hand": lambda p, x: (x @ p["w"] + TABLE.to(x.device)).sum(),
    "a number made": lambda p, x: (x @ p["w"]).sum() * torch.tensor(3.0) + torch.zeros(()),
    "a mask made": lambda p, x: x.sum() + p["w"].masked_fill(torch.ones(8, 8).tril().bool(), 0).sum(),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_no_tensor_of_the_host_enters_a_kernel(monkeypatch, case):
    """The meta device stands for CUDA: torch without CUDA cannot differentiate on that."""
    monkeypatch.setattr(lower, "trace_device", lambda mesh: torch.device("meta"))
    params = {"w": torch.ones(8, 8)}
    step = fs.shard_step(ELSEWHERE[case], fs.presets.full_shard(params, CUDA), mesh=CUDA)
    found = step.lower(params, torch.ones(2, 8))
    graphs = [g.graph for k in found.kernels.values() for g in (k.forward, k.backward) if g is not None]
    graphs.append(found.program.graph)
    values = [(n, n.meta.get("val")) for graph in graphs for n in graph.nodes]
    assert len(values) > 10
    assert [n for n, v in values if isinstance(v, torch.Tensor) and v.device.type == "cpu"] == []
    assert {v.device.type for v in found.program.constants.values()} <= {"meta"}


def test_simulated_ranks_are_on_the_cpu_and_both_sides_of_a_comparison_with_them(gpus):
    assert fs.make_mesh(shard=2, simulated=True).device_type == "cpu"
    assert fs.make_mesh(shard=2, simulated=True, device="cuda").device_type == "cuda"
    assert fs.make_mesh(shard=2, abstract=True).device_type == "cuda"
    params, here = {"w": torch.ones(4, 4)}, fs.make_mesh(shard=2, simulated=True)
    specs = fs.match_specs(params, [("*", fs.LayoutSpec(fs.P("shard")))])
    assert fs.debug.check(lambda p, x: (x @ p["w"]).square().mean(), params, torch.ones(4, 4), specs)
    away = on_device(SimpleNamespace(device="meta"), (params, fs.Whole(torch.ones(2)), 3))
    assert away[0]["w"].is_meta and away[1].value.is_meta and away[2] == 3
    assert on_device(here, params)["w"] is params["w"]


NCCL = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:42, "


@pytest.mark.parametrize(
    "text",
    [
        NCCL
        + "remote process exited or there was a network error\nncclRemoteError: A call failed possibly due "
        "to a network error or a remote process exiting prematurely.",
        NCCL + "unhandled system error\nIt can be also caused by unexpected exit of a remote peer",
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0.",
    ],
)
def test_what_nccl_says_of_a_peer_is_an_echo(text):
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file="")
    failure.error_file_data = {"message": {"extraInfo": {"py_callstack": text}}}
    assert post_mortem.echo_level(failure) > 1


def test_who_is_still_at_work_when_nccls_watchdog_ends_the_others_is_named(tmp_path):
    aborted = {rank: ProcessFailure(rank, 1, -signal.SIGABRT, "") for rank in (0, 2)}
    shown = post_mortem.PostMortem(aborted, killed=[1]).describe(3, tmp_path)
    assert "rank 0 of 3 was killed by signal 6 (SIGABRT)" in shown
    assert "Still at work, and killed: rank 1" in shown


# ------------------------------------------------------------------ the same bits again
def test_a_deterministic_step_after_a_product_without_its_workspace_is_one_error(monkeypatch):
    class Ones:
        def mm(self, other):
            raise RuntimeError("Deterministic behavior was enabled ... set CUBLAS_WORKSPACE_CONFIG=:4096:8")

    contexts._check_cublas.cache_clear()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is as before when the test has ended
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: Ones())
    late = raises(StateError, leaves="deterministic=True", fix="CUBLAS_WORKSPACE_CONFIG=:4096:8")
    with late, contexts.deterministic(True):
        pytest.fail("the block must not run")
    assert not torch.are_deterministic_algorithms_enabled()
    contexts._check_cublas.cache_clear()


def test_a_deterministic_step_is_so_where_it_is_traced_compiled_and_run(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is as before when the test has ended
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    seen: dict[str, list[bool]] = {"trace": [], "compile": [], "run": []}

    def note(where: str) -> None:
        from torch._inductor import config as inductor

        exact = torch.are_deterministic_algorithms_enabled() and inductor.deterministic
        seen[where].append(exact and os.environ.get("CUBLAS_WORKSPACE_CONFIG") == ":4096:8")

    def loss(p, x):
        note("trace")
        return (x @ p["w"]).sum()

    def rate(count):
        note("run")
        return 0.1

    own = fs.optim.Optimizer(
        "own()", lambda path, param: {}, lambda path, grad, slots, param, step: (-step.host(rate) * grad, {})
    )

    mesh, params = fs.make_mesh(shard=2, simulated=True), {"w": torch.ones(4, 4)}
    compile_graphs = lowered.compile_graphs
    monkeypatch.setattr(
        lowered, "compile_graphs", lambda *a, **k: (note("compile"), compile_graphs(*a, **k))[1]
    )
    step = fs.shard_step(
        loss, fs.presets.full_shard(params, mesh), mesh=mesh, optimizer=own,
        backend="eager", deterministic=True,
    )  # fmt: skip
    fs.simulate(mesh, lambda rank: step(step.init(params), torch.ones(2, 4)))
    for noted in (seen["trace"], seen["compile"], seen["run"][-2:]):
        assert noted and all(noted), seen
    assert seen["run"][0] is False, seen
    assert not torch.are_deterministic_algorithms_enabled()
    with raises(SpecError, leaves="deterministic='yes'", says="True, False"):
        fs.shard_step(loss, step.specs, mesh=mesh, deterministic="yes")
