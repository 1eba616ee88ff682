"""Kernels: shared by the ranks of a host through PyTorch's cache."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from errors import raises
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.cpu_vec_isa import VecAVX2, VecISA
from torch._inductor.exc import InductorError, InvalidCxxCompiler
from toys import step_of

import fnshard as fs
from fnshard import LayoutSpec
from fnshard.compiler.kernels import inductor
from fnshard.errors import MissingExtraError


def loss(params: dict[str, Tensor], x: Tensor) -> Any:
    y = torch.relu(x @ params["up"].T) @ params["down"].T
    return y.square().mean(), {"mean": y.mean()}


def cache_counts() -> dict[str, int]:
    return {kind: counters["inductor"][f"fxgraph_cache_{kind}"] for kind in ("miss", "hit", "bypass")}


def on_ranks(rank: int, folder: str) -> tuple[Any, ...]:
    """Train a step and measure with a forward, as a rank of a launcher's."""
    torch.manual_seed(0)
    params, x = {"up": torch.randn(8, 4), "down": torch.randn(4, 8)}, torch.randn(4, 4)[rank * 2 :][:2]
    mesh = fs.make_mesh(shard=2)
    specs = fs.presets.full_shard(params, mesh)
    place = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "TORCHINDUCTOR_CACHE_DIR": folder}
    place |= {"FNSHARD_CACHE": "off"}  # so that it is Inductor that looks for them
    counters.clear()
    with mock.patch.dict(os.environ, place):
        step = fs.shard_step(loss, specs, mesh=mesh, optimizer=fs.optim.adamw(1e-2))
        state, _ = step(step.init(params), x)
        graphs = inductor.graphs_of(step.lower(state, x).kernels.values())
        cached = cache_counts()
        forward = fs.shard_forward(loss, specs, mesh=mesh)
        forward.lower(state, x).compile_async()
        measured = float(forward(state, x)[0])
    expected = float(fs.shard_forward(loss, specs, mesh=mesh, backend="eager")(state, x)[0])
    return len(graphs), cached, measured, expected


def test_ranks_of_a_host_compile_a_share_each_and_a_second_start_compiles_nothing(
    tmp_path: Path, ranks: Any
) -> None:
    first, second = (ranks(2).run(on_ranks, str(tmp_path)) for _ in range(2))
    count = first[0][0]
    assert count > 1 and all(each[1]["miss"] for each in first)
    assert sum(each[1]["miss"] for each in first) == count  # each by one of them
    assert [each[1] for each in second] == [{"miss": 0, "hit": count, "bypass": 0}] * 2
    for *_, measured, expected in (*first, *second):
        assert measured == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
def test_kernels_of_a_graph_are_one_shared_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def three(params: dict[str, Tensor], x: Tensor) -> Tensor:
        for _ in range(3):  # products stand between loops; equal loops are one kernel
            x = torch.tanh(x @ params["w"]) + 0.2718
        return x.square().mean()

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FNSHARD_CACHE", "off")
    params, x = {"w": torch.randn(4, 4)}, torch.randn(2, 4)
    forward = fs.shard_forward(three, fs.presets.full_shard(params, fs.make_mesh(shard=1)))
    value = forward(params, x)
    assert float(value) == pytest.approx(float(three(params, x)), rel=1e-5)
    units = [path.read_text() for path in tmp_path.rglob("*.main.cpp")]
    assert [unit.count("PyInit_") for unit in units] == [2]


def test_vector_instructions_that_torch_runs_with_are_not_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known = inductor.vector_settings.__wrapped__()
    assert bool(known) == (torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"))
    monkeypatch.setattr(VecISA, "check_build", lambda *_: pytest.fail("it was tried"))
    with config.patch(known):
        assert VecAVX2()
    old = tmp_path / "g++"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o700)
    for other in ({"cpp.cxx": (str(old),)}, {"cpp.vec_isa_ok": False}):  # a user's own choice
        with config.patch(other):
            assert inductor.vector_settings.__wrapped__() == {}


def test_no_compiler_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **how: Any) -> None:
        raise InductorError(InvalidCxxCompiler(), None)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", fails)
    monkeypatch.setenv("FNSHARD_CACHE", "off")
    with raises(MissingExtraError, leaves="C++ compiler", fix=["g++", "CXX", 'backend="eager"']):
        step_of(loss, PARAMS, backend="inductor")(PARAMS, torch.ones(2, 4))


PARAMS = {"up": torch.ones(8, 4), "down": torch.ones(4, 8)}


@pytest.mark.long
def test_sums_of_many_numbers_are_right_in_compiled_kernels() -> None:
    """They are summed to one number, and to two; lanes of fp32 are off by more than 1e-5 here."""
    x = torch.full((1 << 20, 2), 0.1)

    def fn(p: Any, x: Any) -> Any:
        y = x * p["w"]
        found = {
            "mean": y.mean(), "columns": y.mean(0), "norm": y.norm(), "norms": y.norm(dim=0), "var": y.var(0),
            "sizes": y.square().sum(0), "logsumexp": y.logsumexp(0).exp(), "largest": y.norm(p=math.inf),
        }  # fmt: skip
        return y.mean(0).sum(), found

    params = {"w": torch.tensor([1.0, 2.0])}
    specs = fs.match_specs(params, [("*", LayoutSpec())])
    (_, found), grads = fs.shard_step(fn, specs)(params, x)
    leaf = {"w": params["w"].double().requires_grad_()}
    loss, expected = fn(leaf, x.double())
    [grad] = torch.autograd.grad(loss, [leaf["w"]])
    torch.testing.assert_close(grads["w"].double(), grad, rtol=1e-6, atol=0)
    for name, value in found.items():
        torch.testing.assert_close(value.double(), expected[name].detach(), rtol=1e-6, atol=1e-9, msg=name)
