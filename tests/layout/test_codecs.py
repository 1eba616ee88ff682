"""Codecs: what is stored, sent and kept are codes; what `fn` sees is what they decode to, in steps and
checkpoints too."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fnshard as fs
from fnshard import LayoutSpec, P, codecs
from fnshard.analysis.storages import INPUTS, StorageTracker
from fnshard.errors import CheckpointError, SpecError, StateError

BOTH = ("int8", "nf4")


def encode_and_decode(value: Tensor, codec: str, dtype: torch.dtype | None = None) -> Tensor:
    chosen = codecs.CODECS[codec]
    return chosen.decode(chosen.encode(value), tuple(value.shape), dtype or value.dtype)


def loss_fn(p: Any, x: Tensor) -> Tensor:
    for i in range(3):
        y = F.linear(x, p[f"layers.{i}.w"])
        x = torch.tanh(y + F.linear(F.linear(x, p[f"layers.{i}.a"]), p[f"layers.{i}.b"]))
    return x.square().mean()


def full(width: int = 96, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    out = {}
    for i in range(3):
        out[f"layers.{i}.w"] = torch.randn(width, width, generator=generator, dtype=dtype) / 8
        out[f"layers.{i}.a"] = torch.randn(4, width, generator=generator, dtype=dtype) / 8
        out[f"layers.{i}.b"] = torch.randn(width, 4, generator=generator, dtype=dtype) / 8
    return out


def code_weights(params: Any, codec: str, **more: Any) -> Any:
    return fs.match_specs(
        params,
        [
            ("*.w", LayoutSpec(P("shard"), codec=codec, trainable=False, **more)),
            ("*", LayoutSpec(P("shard"), **{k: v for k, v in more.items() if k == "compute_dtype"})),
        ],
    )


# ------------------------------------------------------------------ the codes


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(BOTH), st.integers(1, 9), st.lists(st.integers(1, 40), min_size=1, max_size=2), st.data()
)
def test_any_rows_are_coded_by_themselves(codec: str, rows: int, rest: list[int], data: Any) -> None:
    """Shapes and dtypes are as announced, and a run of rows has a run of the codes: no block straddles."""
    shape = (rows, *rest)
    value = torch.randn(shape, generator=torch.Generator().manual_seed(rows))
    full = codecs.CODECS[codec].encode(value)
    announced = codecs.CODECS[codec].parts(shape)
    assert {n: (tuple(v.shape), v.dtype) for n, v in full.items()} == announced
    low = data.draw(st.integers(0, rows - 1))
    high = data.draw(st.integers(low + 1, rows))
    part = codecs.CODECS[codec].encode(value[low:high])
    assert all(torch.equal(part[n], full[n][low:high]) for n in full)


def test_nf4_takes_the_nearest_level_of_its_coded_scale() -> None:
    value = torch.randn(8, 64 * 300)  # 300 scales: two groups of them, one not full
    parts = codecs.CODECS["nf4"].encode(value)
    scales = codecs._nf4_decode_scales(parts, 300)
    exact = value.view(8, 300, 64).abs().amax(2)
    assert (scales - exact).abs().max() <= parts["scale_scales"][..., 0].max() * 0.51
    levels = scales.unsqueeze(2).unsqueeze(3) * torch.tensor(codecs.NF4)
    nearest = (levels - value.view(8, 300, 64, 1)).abs().amin(3)
    error = (encode_and_decode(value, "nf4") - value).abs().view(8, 300, 64)
    torch.testing.assert_close(error, nearest, atol=1e-6, rtol=0)


@pytest.mark.parametrize("codec", BOTH)
def test_zeros_and_lone_weights_survive(codec: str) -> None:
    assert torch.equal(encode_and_decode(torch.zeros(3, 70), codec), torch.zeros(3, 70))
    lone = torch.zeros(2, 64)
    lone[0, 5] = -3.0
    torch.testing.assert_close(encode_and_decode(lone, codec), lone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("codec", BOTH)
@pytest.mark.parametrize("count", [1, 90, 127, 128, 180, 254, 1000])
def test_denormals_do_not_wrap_around(codec: str, count: int) -> None:
    """A 127th of a denormal rounds to a coarse step: 180 of the smallest one are 180 steps of one."""
    smallest = 2.0**-149
    value = torch.zeros(2, 64 * 300)
    value[:, ::64] = torch.linspace(-count, count, 300).round() * smallest  # 300 scales, themselves coded
    off = (encode_and_decode(value, codec) - value).abs().max().item()
    assert off <= 64 * smallest


# ------------------------------------------------------------------ what coding takes


def spec_of(value: Tensor, codec: str) -> LayoutSpec:
    return fs.match_specs({"w": value}, [("*", LayoutSpec(codec=codec, trainable=False))])["w"]


def peak_of(work: Callable[[], Any], *given: Tensor) -> int:
    """Return the bytes of what operators make, at the worst moment, results too."""
    with torch.no_grad(), StorageTracker("cpu") as tracker:
        for value in given:
            tracker.adopt(value, INPUTS, size=0)
        work()
    return tracker.peak.bytes


@pytest.mark.parametrize("codec", BOTH)
@pytest.mark.parametrize("shape", [(1, 3000), (7, 90), (50, 3, 33), (130, 1)])
@pytest.mark.parametrize("run", [1, 200, 1000])
def test_runs_of_rows_make_the_codes_of_all(
    codec: str, shape: tuple[int, ...], run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows longer than a run, runs that do not divide them."""
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    full = codecs.CODECS[codec].encode(value.detach())
    monkeypatch.setattr(codecs, "RUN", run)
    made = codecs.encode(value, spec_of(value, codec))
    assert not any(v.requires_grad for v in made.values())
    announced = codecs.CODECS[codec].parts(shape)
    assert {n: (tuple(v.shape), v.dtype) for n, v in made.items()} == announced
    assert all(torch.equal(made[n], full[n]) for n in full)
    assert codecs._cut_runs(value.to("meta")) == [...], "70B weights on paper take no time either"
    on_meta = codecs.encode(value.to("meta"), spec_of(value, codec))
    assert {n: (tuple(v.shape), v.dtype) for n, v in on_meta.items()} == announced


@pytest.mark.parametrize("codec", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_coding_takes_beside_the_leaf_and_its_codes_does_not_grow_with_it(
    codec: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codecs, "RUN", 1 << 13)
    value = torch.randn(1 << 9, 1 << 9, dtype=dtype)
    made: dict[str, Tensor] = {}
    peak = peak_of(lambda: made.update(codecs.encode(value, spec_of(value, codec))), value)
    kept = sum(v.nbytes for v in made.values())
    assert kept <= peak <= kept + 16.5 * (1 << 13)  # one run of 32
    look = peak_of(lambda: codecs.Unfit().look("w", spec_of(value, codec), value), value)
    assert 0 < look <= 12 * (1 << 13)


@pytest.mark.parametrize("codec", BOTH)
def test_decoding_takes_eight_bytes_a_weight_at_most(codec: str) -> None:
    """Nothing is fused here: these are what is looked up, and what it is times its scale."""
    value = torch.randn(1 << 9, 1 << 9)
    parts, chosen = codecs.CODECS[codec].encode(value), codecs.CODECS[codec]
    for dtype in (torch.float32, torch.bfloat16):
        peak = peak_of(lambda d=dtype: chosen.decode(parts, tuple(value.shape), d), *parts.values())
        assert 4 * value.numel() < peak <= 8.2 * value.numel()


# ------------------------------------------------------------------ what is not finite


def broken(value: float) -> tuple[dict[str, Tensor], Any]:
    """Make two leaves with one such value each, in rows of different ranks, and one with none."""
    params = {n: torch.ones(6, 70, dtype=torch.float64) for n in ("sound", "one", "other")}
    params["one"][5, 69] = params["other"][0, 0] = value
    coded = LayoutSpec(P("shard"), codec="nf4", trainable=False)
    specs = fs.match_specs(
        params, [("sound", coded), ("one", replace(coded, codec="int8")), ("other", coded)]
    )
    return params, specs


NOT_FINITE = {
    "leaves": ["params['one'] [6, 70]", "codec='int8'", "params['other']"],
    "fix": "codec=None",
    "says": ["2 leaves", "1 of 420"],
}


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e300])  # the last: too large for fp32
def test_what_is_not_finite_is_refused_by_all_ranks_with_every_leaf(value: float, tmp_path: Path) -> None:
    params, specs = broken(value)
    mesh = fs.make_mesh(shard=2, simulated=True)
    step = fs.shard_step(lambda p, x: (p["sound"] * x).sum(), specs, mesh=mesh, backend="eager")

    def refused(rank: int) -> None:
        for make in (lambda: fs.shard(params, specs, mesh), lambda: step.init(params)):
            with raises(StateError, **NOT_FINITE):
                make()

    fs.simulate(mesh, refused)
    plain = fs.match_specs(params, [("*", LayoutSpec())])
    fs.hf.save(params, tmp_path / "model", plain, fs.make_mesh(shard=1))
    with raises(StateError, **NOT_FINITE):
        fs.hf.load(tmp_path / "model", specs, fs.make_mesh(shard=1))


def test_what_an_init_makes_not_finite_is_refused() -> None:
    class Wild(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.constant_(self.weight, math.inf)

    with fs.deferred():
        model = Wild(70, 6, bias=False)
    specs = fs.match_specs(fs.make_functional(model)[1], [("*", LayoutSpec(codec="nf4", trainable=False))])
    step = fs.shard_step(lambda p, x: (p["weight"] * x).sum(), specs, backend="eager")
    with raises(StateError, leaves="params['weight']", fix="codec=None", says=["1 leaf", "420 of 420"]):
        step.init(model)


# ------------------------------------------------------------------ one of your own


def _fp8(rows: Tensor) -> dict[str, Tensor]:
    flat = rows.reshape(rows.shape[0], -1).float()
    scale = flat.abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
    return {"codes": (flat / scale).to(torch.float8_e4m3fn), "scale": scale}


FP8 = codecs.Codec(
    "fp8",
    lambda shape: {
        "codes": ((shape[0], math.prod(shape[1:])), torch.float8_e4m3fn),
        "scale": ((shape[0], 1), torch.float32),
    },
    _fp8,
    lambda parts, shape, dtype: (parts["codes"].float() * parts["scale"]).reshape(shape).to(dtype),
)


def test_a_third_codec_can_be_registered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Loaded, sharded, gathered, trained with, saved and restored like those that are built in."""
    monkeypatch.setattr(codecs, "CODECS", dict(codecs.CODECS))
    codecs.register(FP8)
    codecs.register(FP8)  # again is no harm
    params, x = full(), torch.randn(2, 96, dtype=torch.float64)
    known = {p: encode_and_decode(v, "fp8") if p.endswith("w") else v for p, v in params.items()}
    assert known["layers.0.w"].sub(params["layers.0.w"]).abs().max() < 0.05
    mesh = fs.make_mesh(shard=2, simulated=True)
    specs = code_weights(params, "fp8")
    plain = fs.match_specs(params, [("*", LayoutSpec())])
    fs.hf.save(params, tmp_path / "model", plain, fs.make_mesh(shard=1))
    step = fs.shard_step(loss_fn, specs, mesh=mesh, backend="eager")

    def work(rank: int) -> float:
        blocks = fs.hf.load(tmp_path / "model", specs, mesh)
        assert blocks["layers.0.w"]["codes"].dtype == torch.float8_e4m3fn
        return float(step(blocks, x)[0])

    assert fs.simulate(mesh, work) == pytest.approx([float(loss_fn(known, x))] * 2, abs=1e-10)

    paper = fs.make_mesh(shard=8, abstract=True)
    bare = {p: v for p, v in params.items() if p.endswith("w")}
    frozen = fs.match_specs(bare, [("*", LayoutSpec(P("shard"), codec="fp8", trainable=False))])
    low = fs.shard_forward(lambda p, x: F.linear(x, p["layers.0.w"]).sum(), frozen, mesh=paper).lower(bare, x)
    assert low.comm_analysis()["gather"]["bytes"] == 96 * (96 + 4)  # codes of a byte, a scale a row

    alone = fs.make_mesh(shard=1)
    step = fs.shard_step(loss_fn, specs, mesh=alone, optimizer=fs.optim.adamw(0.1), backend="eager")
    state, _ = step(step.init(params), x)
    fs.checkpoint.save(tmp_path / "1", state)
    again = fs.checkpoint.restore(tmp_path / "1", step)
    first = fs.shard(params, specs, alone)["layers.1.w"]
    for name, value in again.params["layers.1.w"].items():
        assert torch.equal(value.view(torch.uint8), first[name].view(torch.uint8))
    assert step(again, x)[1]["loss"] == step(state, x)[1]["loss"]
    params["layers.2.w"][0, 0] = math.nan
    with raises(StateError, leaves=["params['layers.2.w']", "codec='fp8'"], fix="codec=None", says="1 leaf"):
        step.init(params)


def test_a_codec_that_breaks_its_contract_is_refused() -> None:
    shifted = codecs.Codec("shifted", FP8.parts, lambda rows: _fp8(rows - rows.mean()), FP8.decode)
    with raises(SpecError, leaves="'shifted'", says="first row alone"):
        codecs.register(shifted)
    other = codecs.Codec("other", lambda shape: {"codes": (shape, torch.int8)}, _fp8, FP8.decode)
    with raises(SpecError, leaves=["'other'", "parts are codes", "encode gives codes, scale"]):
        codecs.register(other)
    twin = codecs.Codec("twin", codecs.CODECS["int8"].parts, _fp8, FP8.decode)
    with raises(SpecError, leaves=["'twin'", "'int8'"], fix="another name"):
        codecs.register(twin)
    with raises(SpecError, leaves="'nf4'", fix="another name"):
        codecs.register(codecs.Codec("nf4", FP8.parts, FP8.encode, FP8.decode))
    with raises(SpecError, leaves="fs.codecs.register", says=["Codec", "str"]):
        codecs.register("fp8")  # type: ignore[arg-type]


def test_what_cannot_be_coded_is_refused_with_the_reason() -> None:
    params = {n: torch.zeros(4, 8) for n in "abcd"} | {"v": torch.zeros(8)}
    rules = [
        ("a", LayoutSpec(codec="nf4", trainable=True)),
        ("b", LayoutSpec(codec="nf5", trainable=False)),
        ("c", LayoutSpec(P(None, "shard"), codec="int8", trainable=False)),
        ("v", LayoutSpec(codec="int8", trainable=False)),
        ("*", LayoutSpec()),
    ]
    with raises(
        SpecError,
        leaves=[
            "params['a']",
            "trainable=True",
            "params['b']",
            "codec='nf5'",
            "params['c']",
            "storage=P(None, 'shard')",
            "params['v']",
        ],
        fix=["trainable=False", "fs.lora", "'int8', 'nf4'", "P('shard')", "codec=None", "two dims"],
        says="4 leaves",
    ):
        fs.shard_step(lambda p: p["d"].sum(), fs.match_specs(params, rules), mesh=fs.make_mesh(shard=1))


def test_presets_shard_the_rows_of_what_they_code() -> None:
    params, mesh = {"w": torch.zeros(10, 64)}, fs.make_mesh(shard=4, abstract=True)
    assert fs.presets.full_shard(params, mesh)["w"].storage == P(None, "shard")
    assert fs.presets.full_shard(params, mesh, codec="nf4", trainable=False)["w"].storage == P("shard")


# ------------------------------------------------------------------ the step


def test_codes_travel_and_nothing_decoded_is_kept() -> None:
    """Wire bytes of a gathered nf4 unit are about 0.26 of bf16's; the backward gathers codes again."""
    width = 1024
    params = {f"layers.{i}.w": torch.empty(width, width, device="meta") for i in range(4)}
    params |= {f"layers.{i}.{n}": torch.empty(s, device="meta") for i in range(4) for n, s in
               (("a", (4, width)), ("b", (width, 4)))}  # fmt: skip
    mesh, x = fs.make_mesh(shard=8, abstract=True), torch.empty(2, width, dtype=torch.bfloat16, device="meta")

    def loss(p: Any, x: Tensor) -> Tensor:
        for i in range(4):
            w, a, b = (p[f"layers.{i}.{n}"] for n in "wab")
            x = torch.tanh(F.linear(x, w) + F.linear(F.linear(x, a), b))
        return x.float().square().mean()

    def lowered(codec: str | None) -> Any:
        bf16 = {"storage_dtype": torch.bfloat16, "compute_dtype": torch.bfloat16}
        specs = fs.match_specs(
            params, [("*.w", LayoutSpec(P("shard"), codec=codec, trainable=False, **bf16)),
                     ("*", LayoutSpec(**bf16))],
        )  # fmt: skip
        return fs.shard_step(loss, specs, mesh=mesh).lower(params, x)

    plain, codes = lowered(None), lowered("nf4")
    ratio = codes.comm_analysis()["gather"]["bytes"] / plain.comm_analysis()["gather"]["bytes"]
    assert ratio < 0.27
    per_row = 1024 / 2 + 1024 / 64 + 8  # codes, 8-bit scales, a scale and a mean for all of them
    passes = 2 * 4 - 2  # the last unit is still gathered, and the first one's input has no gradient
    assert codes.comm_analysis()["gather"]["bytes"] == pytest.approx(passes * 1024 * per_row, rel=0.01)
    adapters = 4 * 2 * 4 * width * 2
    at_rest = [low.memory_analysis().resident_bytes - adapters for low in (codes, plain)]
    assert at_rest[0] < 0.27 * at_rest[1]
    kernels = {line.kernel for line in codes.schedule.instructions if line.verb == "run"}
    for name in kernels:
        saved = codes.schedule.kernels[name].forward.graph.output_node().args[0]
        sizes = [v.meta["val"].numel() for v in saved]
        assert max(sizes) <= 2 * width  # activations: no weight, decoded or not


# ------------------------------------------------------------------ coded otherwise than before


def three_ways() -> tuple[dict[str, Tensor], dict[str | None, Any]]:
    params = {"w": torch.randn(10, 130, generator=torch.Generator().manual_seed(0)), "b": torch.ones(10)}
    return params, {
        codec: fs.match_specs(
            params,
            [("w", LayoutSpec(P("shard"), codec=codec, trainable=False)), ("*", LayoutSpec(P("shard")))],
        )
        for codec in (None, "int8", "nf4")
    }


@pytest.mark.suite({
    "nf4-None": "into codes",
    "None-int8": "out of them",
    "int8-nf4": "from code to code",
    "nf4-nf4": "as they are",
})  # fmt: skip
@pytest.mark.parametrize("before", [None, "int8", "nf4"])
@pytest.mark.parametrize("after", [None, "int8", "nf4"])
def test_a_state_is_resharded_into_codes_and_out_of_them(before: str | None, after: str | None) -> None:
    params, specs = three_ways()
    mesh = fs.make_mesh(shard=4, simulated=True)
    target = fs.match_specs(
        params,
        [("w", LayoutSpec(P("shard"), codec=after, trainable=False, memory="host")), ("*", LayoutSpec())],
    )
    step = fs.shard_step(
        lambda p, x: (F.linear(x, p["w"]) * p["b"]).sum(), target, mesh=mesh, backend="eager"
    )
    seen = params["w"] if before is None else encode_and_decode(params["w"], before)

    def work(rank: int) -> Any:
        blocks = fs.shard(params, specs[before], mesh)
        tree = fs.reshard(blocks, specs[before], target, mesh)
        state = fs.TrainState(torch.tensor(3), blocks, {}, {}, torch.tensor(0))
        moved = fs.reshard(state, specs[before], target, mesh)
        assert int(moved.step) == 3 and moved.where[0] is target
        named = [fs.tree.flatten_with_paths(t)[0] for t in (tree, moved.params)]
        assert all(torch.equal(named[0][p], v) for p, v in named[1].items())
        step(tree, torch.ones(1, 130))  # its blocks are as the specs say
        return fs.unshard(tree, target, mesh)

    for whole in fs.simulate(mesh, work):
        known = seen if after in (None, before) else encode_and_decode(seen, after)
        assert torch.equal(whole["w"], known)
        assert torch.equal(whole["b"], params["b"])


def test_a_rank_that_cannot_code_its_block_fails_on_all() -> None:
    params, specs = three_ways()
    params["w"][9, 0] = math.nan
    mesh = fs.make_mesh(shard=2, simulated=True)

    def work(rank: int) -> None:
        blocks = fs.shard(params, specs[None], mesh)
        kind, says = (StateError, ["params['w'] [10, 130]", "codec='nf4'", "1 of 650"]) if rank else (
            CheckpointError, ["rank 1", "StateError"])  # fmt: skip
        with raises(kind, says=says):
            fs.reshard(blocks, specs[None], specs["nf4"], mesh)

    fs.simulate(mesh, work)


def test_a_checkpoint_that_is_coded_otherwise_says_so_and_the_way_out_works(tmp_path: Path) -> None:
    params, specs = three_ways()
    mesh = fs.make_mesh(shard=1)
    for name, codec in (("plain", None), ("coded", "nf4")):
        state = fs.TrainState(torch.tensor(1), fs.shard(params, specs[codec], mesh), {}, {}, torch.tensor(0))
        fs.checkpoint.save(tmp_path / name, state, specs=specs[codec], mesh=mesh)
    for name, expected, there in (("plain", "nf4", None), ("coded", None, "nf4"), ("coded", "int8", "nf4")):
        for restore in (fs.checkpoint.restore, fs.checkpoint.restore_params):
            with raises(
                CheckpointError,
                leaves=["params['w']", f"codec={expected!r} here", f"{there!r} there"],
                fix=[f"codec={there!r}", "fs.reshard(state", "fs.checkpoint.restore_params"],
                says="1 leaf",
            ):
                restore(tmp_path / name, specs[expected], mesh)
    blocks = fs.checkpoint.restore_params(tmp_path / "plain", specs[None], mesh)
    there = fs.checkpoint.restore_params(tmp_path / "coded", specs["nf4"], mesh)
    again = fs.reshard(blocks, specs[None], specs["nf4"], mesh)
    assert all(torch.equal(again["w"][n], v) for n, v in there["w"].items())
    with raises(CheckpointError, leaves="only=5", says=["glob", "list"]):
        fs.checkpoint.restore_params(tmp_path / "plain", specs[None], mesh, only=5)
