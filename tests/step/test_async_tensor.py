"""Async tensor parallelism: exchanges in chunks, beside the products; and when the timeline says so."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from families import FAMILIES, Case, case_of
from sharded import make_step, part
from tensor_models import decoder

import fnshard as fs
from experiments.training.decoder import Decoder, DecoderConfig, loss_function
from fnshard.compiler.schedule.instructions import Exchange, Run, Wait


@cache
def case(name: str) -> Case:
    family = FAMILIES[name]
    return case_of(replace(family, sizes=family.sizes | {"vocab_size": 64}).build(), time=8)


@pytest.mark.parametrize(
    ("name", "count"),
    [("gpt2", 2), ("qwen3", 2), ("bert", 2), pytest.param("phi", 2, marks=pytest.mark.long)],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gradients_are_those_of_one_process(name: str, count: int) -> None:
    """Whatever products are written with: linear, addmm of merged rows, with and without biases."""
    of, mesh = case(name), fs.make_mesh(shard=2, tensor=2, simulated=True)
    specs = fs.presets.full_shard(of.params, mesh, tensor="tensor")
    step = fs.shard_step(of.loss, specs, mesh=mesh, backend="eager", async_tensor=count)

    def run(rank: int) -> tuple[Any, Any]:
        loss, grads = step(fs.shard(of.params, specs, mesh), *part(of.batch, mesh.data_rank, mesh.data_size))
        return loss, fs.unshard(grads, specs, mesh, layout="gradient")

    for loss, grads in fs.simulate(mesh, run):
        torch.testing.assert_close(loss, of.value, rtol=0, atol=1e-10)
        found = {path: grads[path] for path in of.grads}
        torch.testing.assert_close(found, of.grads, rtol=0, atol=1e-10)


@pytest.mark.parametrize("adversary", ["early", "late"])
def test_whenever_what_travels_arrives_the_bits_are_the_same(adversary: str) -> None:
    model, mesh = decoder(fused=True), fs.make_mesh(shard=2, tensor=2, simulated=True)
    specs = fs.presets.full_shard(model.params, mesh, tensor="tensor")
    step = make_step(mesh, model, specs, fs.optim.sgd(0.1), async_tensor=2, remat="unit")

    def run(rank: int) -> Any:
        return step(step.init(model.params), *part(model.batch(0), mesh.data_rank, 2))[0].params

    for one, other in zip(fs.simulate(mesh, run), fs.simulate(mesh, run, adversary=adversary), strict=True):
        assert all(torch.equal(one[path], other[path]) for path in one)


def lowered(layers: int, **options: Any) -> Any:
    model, mesh = decoder(layers=layers), fs.make_mesh(tensor=2, abstract=True)
    specs = fs.presets.full_shard(model.params, mesh, tensor="tensor")
    return make_step(mesh, model, specs, None, overlap=1, **options).lower(model.params, *model.batch(0))


def test_chunks_are_lines_of_as_many_bytes_and_blocks_share_their_kernels() -> None:
    plain, two, three = lowered(2), lowered(2, async_tensor=2), lowered(3, async_tensor=2)
    assert len(two.kernels) == len(three.kernels)
    sums = [low.comm_analysis()["exchange"] for low in (plain, two)]
    assert sums[0]["bytes"] == sums[1]["bytes"] and sums[0]["count"] < sums[1]["count"]
    chunks: list[Counter] = []
    for low in (two, three):
        lines = [i for i in low.schedule.instructions if isinstance(i, Exchange) and i.chunk]
        chunks.append(Counter((i.phase, i.kind) for i in lines))
    assert "all_gather(outgoing_default_2 value f64[4, 2, 8]') over tensor, chunk 1 of 2" in two.as_text()
    pairs = [(phase, kind) for phase in ("forward", "backward") for kind in ("all_gather", "reduce_scatter")]
    assert chunks[1] - chunks[0] == dict.fromkeys(pairs, 4)  # two gathers and two sums of a block, by two


def test_a_chunk_travels_while_the_one_before_computes() -> None:
    """In an MLP the second gather is issued before the first kernel, and the first sum before the second."""
    lines, letters = lowered(1, async_tensor=2).schedule.instructions, {Exchange: "e", Run: "r", Wait: "w"}
    chunks = {n for i in lines if isinstance(i, Exchange) and i.chunk for n in i.writes}
    for phase, expected in (("forward", "eewrewrewwr"), ("backward", "eewrewr")):
        found = [
            i for i in lines if i.phase == phase and (isinstance(i, Run) or chunks & {*i.reads, *i.writes})
        ]
        assert expected in "".join(letters[type(i)] for i in found)


# ------------------------------------------------------------------ when


@cache
def paper(width: int, time: int) -> tuple[Any, Any, fs.Mesh]:
    """A block in bf16 on eight devices that are connected as those of a node."""
    with fs.deferred():
        sizes = {"width": width, "context": time, "heads": width // 128, "kv_heads": width // 128}
        model = Decoder(DecoderConfig(vocab=1024, layers=1, **sizes))
    return *loss_function(model), fs.make_mesh(tensor=8, abstract=True, device="cuda")


def on_paper(width: int, time: int, option: Any) -> Any:
    loss, params, mesh = paper(width, time)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        specs = fs.presets.full_shard(params, mesh, tensor="tensor", compute_dtype=torch.bfloat16)
    tokens = torch.zeros(1, time, dtype=torch.int64)
    return fs.shard_step(loss, specs, mesh=mesh, async_tensor=option).lower(params, tokens, tokens)


def test_the_timeline_decides() -> None:
    """A wide model is faster in chunks, and waits less for exchanges; a narrow one stays as it was."""
    off, auto = (on_paper(8192, 8192, option) for option in ("off", "auto"))
    before, after = off.timeline("h100"), auto.timeline("h100")
    assert after.step_seconds < before.step_seconds
    assert after.exposed_communication_seconds < 0.75 * before.exposed_communication_seconds
    assert ", chunk 1 of " in auto.as_text() and ", chunk" not in off.as_text()
    assert on_paper(1024, 256, "auto").as_text() == on_paper(1024, 256, "off").as_text()
    assert on_paper(8192, 8192, "cpu").as_text() == off.as_text()  # where nothing overlaps


@pytest.mark.parametrize("option", [0, True, "on", None])
def test_what_is_no_option_is_refused(option: Any) -> None:
    with pytest.raises(
        fs.SpecError, match=r"async_tensor=.*'off', 'auto', a number of chunks, or a Hardware"
    ):
        lowered(1, async_tensor=option)
