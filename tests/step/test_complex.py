"""Complex leaves: trained as torch.optim trains them, in every layout and tier, and kept as they are."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import reference
import sharded
import torch
from errors import raises
from models import MODELS
from torch import Tensor
from toys import step_of

import fnshard as fs
from fnshard import CheckpointError, LayoutSpec, OptimizerError, P, SpecError, StateError, TraceError
from fnshard.runtime.files import tensorfile

MODEL = MODELS["complex_leaves"]()
SGD = fs.optim.sgd(0.05, momentum=0.9, nesterov=True, weight_decay=0.1)
CLIPPED = fs.optim.chain(fs.optim.clip_by_global_norm(0.1), fs.optim.adamw(3e-3, weight_decay=0.1))


def save_state(model: Any, folder: Any, **policy: Any) -> tuple[Any, Any, Any]:
    """Save a state of a step on one rank; return the step, its specs and the state."""
    mesh = fs.make_mesh(shard=1, device="cpu")
    specs = sharded.specs_of(model, "full_shard", mesh, **policy)
    step = sharded.make_step(mesh, model, specs, fs.optim.adamw(0.1))
    state, _ = step(step.init(model.params), *model.batch(0))
    fs.checkpoint.save(folder, state)
    return step, specs, state


@pytest.mark.suite({
    "complex64": "the narrow one",
})  # fmt: skip
@pytest.mark.parametrize("model", [MODEL, sharded.as_float(MODEL)], ids=["complex128", "complex64"])
def test_they_are_saved_restored_and_moved_as_they_are(model: Any, tmp_path: Any) -> None:
    step, specs, state = save_state(model, tmp_path / "a")
    kinds = {n: leaf.dtype for n, leaf in fs.checkpoint.manifest(tmp_path / "a").leaves.items()}
    real_name = "F64" if model is MODEL else "F32"
    assert kinds["params/layers.0.mix"] == kinds["optimizer/layers.0.mix/mu"] == real_name
    wide = fs.match_specs(
        model.params,
        [("*mix", LayoutSpec(optimizer_dtype=torch.complex128)), ("*", LayoutSpec(memory="host"))],
    )
    other = fs.shard_step(model.loss, wide, backend="eager", optimizer=fs.optim.adamw(0.1))
    for restored in (
        fs.checkpoint.restore(tmp_path / "a", step),
        fs.checkpoint.restore(tmp_path / "a", specs),
        fs.checkpoint.restore(tmp_path / "a", other),
        fs.checkpoint.restore(tmp_path / "a", {p: LayoutSpec() for p in model.params}),
        fs.reshard(state.copy(), specs, wide),
    ):
        for path, block in state.params.items():
            assert torch.equal(restored.params[path], block), path
            for name, slot in state.opt_state[path].items():
                assert torch.equal(restored.opt_state[path][name].to(slot.dtype), slot), (path, name)
    blocks = fs.checkpoint.restore_params(tmp_path / "a", other)
    assert all(torch.equal(blocks[path], block) for path, block in state.params.items())
    assert other(fs.reshard(state, specs, wide), *model.batch(1))[1]["loss"].isfinite()


BEFORE = Path(__file__).parent.parent / "checkpoint" / "complex_before"
RULES = [
    ("a.z", LayoutSpec(P("shard"), optimizer_dtype=torch.complex128)), ("seen", LayoutSpec(buffers=True)),
    ("*", LayoutSpec()),
]  # fmt: skip


def test_what_was_saved_as_complex_numbers_opens_bit_for_bit() -> None:
    """Two ranks wrote it when states and files had complex optimizer state."""
    kinds = {"a.z": ((5, 3), torch.complex64), "b.z": ((4,), torch.complex128), "w": ((3, 2), torch.float32),
             "c.z": ((6, 2), torch.complex64), "seen": ((2,), torch.complex64)}  # fmt: skip
    params = {p: torch.ones(shape, dtype=dtype) for p, (shape, dtype) in kinds.items()}
    params["seen"] = torch.nn.Buffer(params["seen"])
    loss = lambda p, x: sum((v.abs() * x.mean()).square().sum() for v in p.values())  # noqa: E731
    own = [("b.*", fs.optim.adafactor(0.1)), ("c.*", fs.optim.adamw_8bit(0.1, block=2))]
    step = fs.shard_step(
        loss, fs.match_specs(params, RULES), mesh=fs.make_mesh(shard=1, device="cpu"), backend="eager",
        optimizer=fs.optim.chain(fs.optim.by_path(*own, ("*", fs.optim.adamw(0.1))), fs.optim.ema(0.5)),
    )  # fmt: skip
    written = json.loads((BEFORE / "manifest.json").read_text())["leaves"]
    unknown = {p: LayoutSpec() for p in params} | {"a.z": RULES[0][1], "seen": LayoutSpec(trainable=False)}
    for state in (fs.checkpoint.restore(BEFORE, step), fs.checkpoint.restore(BEFORE, unknown)):
        found = {f"params/{p}": v for p, v in state.params.items()}
        found |= {f"optimizer/{p}/{n}": v for p, own in state.opt_state.items() for n, v in own.items()}
        assert found.keys() == written.keys()
        for name, block in found.items():
            data = b""
            for chunk in sorted(written[name]["chunks"], key=lambda chunk: chunk["offset"]):
                size = math.prod(chunk["shape"]) * tensorfile.STATE_DTYPES[written[name]["dtype"]].itemsize
                data += (BEFORE / chunk["file"]).read_bytes()[chunk["at"] : chunk["at"] + size]
            assert bytes(tensorfile.bytes_of(block)) == data, name
        assert {p: (tuple(v.shape), v.dtype) for p, v in state.params.items()} == kinds
    assert step(fs.checkpoint.restore(BEFORE, step), torch.ones(2))[1]["loss"].isfinite()


@pytest.mark.long
def test_files_of_hugging_face_have_complex64_alone(tmp_path: Any) -> None:
    _, specs, state = save_state(sharded.as_float(MODEL), tmp_path / "a")
    fs.hf.save(state, tmp_path / "hf")
    loaded = fs.hf.load(tmp_path / "hf", specs)
    assert all(torch.equal(loaded[path], block) for path, block in state.params.items())
    _, _, state = save_state(MODEL, tmp_path / "b")
    with raises(StateError, leaves=["filter']", "torch.complex128"], fix="storage_dtype="):
        fs.hf.save(state, tmp_path / "no")


def test_a_complex_leaf_and_a_real_one_of_its_pairs_are_two_leaves(tmp_path: Any) -> None:
    save_state(MODEL, tmp_path / "a")
    real = {p: torch.view_as_real(v) if v.is_complex() else v for p, v in MODEL.params.items()}
    specs = fs.match_specs(real, [("*", LayoutSpec())])
    with raises(CheckpointError, leaves="layers.0.filter", says="complex"):
        fs.checkpoint.restore_params(tmp_path / "a", specs)
    halves = fs.match_specs({p: v.real for p, v in MODEL.params.items()}, [("*", LayoutSpec())])
    with raises(CheckpointError, leaves="layers.0.filter", says="complex"):
        fs.checkpoint.restore_params(tmp_path / "a", halves)


@pytest.mark.parametrize("optimizer", [fs.optim.muon(0.1), fs.optim.soap(0.1)], ids=["muon", "soap"])
def test_no_matrices_are_made_of_pairs(optimizer: Any) -> None:
    with raises(OptimizerError, leaves="params['z']", fix="by_path"):
        step_of(lambda p, x: x, {"z": torch.ones(4) * 1j}, optimizer=optimizer)


@pytest.mark.parametrize(
    ("policy", "leaves", "fix"),
    [
        ({"compute_dtype": torch.bfloat16}, ["mix'] torch.complex128", "compute_dtype=torch.bfloat16"], ()),
        (
            {"optimizer_dtype": torch.float32},
            "optimizer_dtype=torch.float32",
            "optimizer_dtype=torch.complex64",
        ),
        (
            {"codec": "int8", "trainable": False},
            ["mix'] [7, 7]", "codec='int8' of torch.complex128"],
            "codec=None",
        ),
        ({"storage": P(None, None, "shard")}, ["mix'] [7, 7]", "P(None, None, 'shard')", "has 2"], "P()"),
    ],
)
def test_what_no_complex_leaf_can_be_is_refused_by_leaf(
    policy: dict[str, Any], leaves: Any, fix: Any
) -> None:
    specs = fs.match_specs(MODEL.params, [("layers.0.*", LayoutSpec(**policy)), ("*", LayoutSpec())])
    for make in (
        lambda: fs.shard(MODEL.params, specs, fs.make_mesh()),
        lambda: sharded.make_step(None, MODEL, specs, SGD),
    ):
        with raises(SpecError, leaves=leaves, fix=fix):
            make()


@pytest.mark.long
def test_gradients_forwards_and_checks_are_of_complex_leaves() -> None:
    mesh = fs.make_mesh(shard=2, simulated=True)
    specs = fs.match_specs(MODEL.params, [("*mix", LayoutSpec(P(None, "shard"))), ("*", LayoutSpec())])
    grads_of = sharded.make_step(mesh, MODEL, specs, None)
    with_aux = sharded.make_step(
        mesh, MODEL, specs, None, accumulate=3,
        loss=lambda p, x, y: (MODEL.loss(p, x, y), {"z": (p["layers.0.phase"] * x).mean(), "x": x * 1j}),
    )  # fmt: skip
    mean = (MODEL.params["layers.0.phase"] * MODEL.batch(0)[0]).mean()
    forward = fs.shard_forward(
        lambda p, x: p["layers.0.mix"] @ p["layers.0.filter"] + x.sum(), specs, mesh=mesh, backend="eager"
    )
    expected, loss = reference.gradients(MODEL.loss, MODEL.params, *MODEL.batch(0))

    def run(rank: int) -> None:
        blocks = fs.shard(MODEL.params, specs, mesh)
        value, grads = grads_of(blocks, *sharded.part(MODEL.batch(0), rank, 2))
        grads = fs.unshard(grads, specs, mesh, layout="gradient")
        torch.testing.assert_close((value, grads), (loss, expected), rtol=0, atol=1e-10)
        (_, aux), _ = with_aux(blocks, *sharded.part(MODEL.batch(0), rank, 2))
        torch.testing.assert_close(aux["z"], mean, rtol=0, atol=1e-10)
        assert aux["x"].dtype == torch.complex128
        out = MODEL.params["layers.0.mix"] @ MODEL.params["layers.0.filter"] + 1
        torch.testing.assert_close(forward(blocks, torch.ones(1)), out)

    fs.simulate(mesh, run)
    fs.debug.check(MODEL.loss, MODEL.params, MODEL.batch(0), specs=specs, mesh=mesh)


def test_a_complex_buffer_that_is_written_to_is_stored() -> None:
    mesh = fs.make_mesh(shard=2, simulated=True)
    params = {"w": torch.ones(3, dtype=torch.float64), "seen": torch.nn.Buffer(torch.zeros(3) * 1j)}

    def loss(p: Any, x: Tensor) -> Tensor:
        z = torch.polar(x, x)
        p["seen"].lerp_(z.mean(0).to(torch.complex64), 0.5)
        return ((z * p["w"]).real.square() * p["seen"].abs().detach()).mean()

    step = fs.shard_step(loss, fs.presets.full_shard(params, mesh), mesh=mesh, optimizer=SGD, backend="eager")
    rows = torch.arange(12.0, dtype=torch.float64).view(4, 3)
    expected = torch.polar(rows, rows).mean(0).to(torch.complex64) / 2

    def run(rank: int) -> None:
        state, _ = step(step.init(params), rows[2 * rank : 2 * rank + 2])
        torch.testing.assert_close(state.params["seen"], expected)

    fs.simulate(mesh, run)


@pytest.mark.parametrize(
    "optimizer", [fs.optim.adafactor(0.1), fs.optim.adamw_8bit(0.1, block=2)], ids=["adafactor", "adamw8"]
)
def test_state_of_other_shapes_than_leaves_is_split_with_them(optimizer: Any) -> None:
    params = {"z": torch.randn(5, 3, dtype=torch.complex128)}
    loss = lambda p, x: (p["z"].abs().square() * x.mean()).sum()  # noqa: E731
    rows, full = torch.arange(1.0, 5.0, dtype=torch.float64), {}
    for ranks in (1, 2):
        mesh = fs.make_mesh(shard=ranks, simulated=True)
        specs = fs.match_specs(params, [("*", LayoutSpec(P("shard")))])
        step = fs.shard_step(loss, specs, mesh=mesh, optimizer=optimizer, backend="eager")

        def run(rank: int, step: Any = step, specs: Any = specs, mesh: Any = mesh) -> Tensor:
            state = step.init(params)
            for _ in range(3):
                state, _ = step(state, sharded.part([rows], rank, mesh.size)[0])
            return fs.unshard(state.params, specs, mesh)["z"]

        full[ranks] = fs.simulate(mesh, run)[0]
    torch.testing.assert_close(full[2], full[1], rtol=0, atol=1e-10)


@pytest.mark.long
def test_what_computes_with_pairs_is_what_computes_with_their_own_leaf() -> None:
    """The schedule, and every byte of it, is that of real leaves [..., 2]."""
    real = {p: torch.view_as_real(v) if v.is_complex() else v for p, v in MODEL.params.items()}

    def of_pairs(p: dict[str, Tensor], *batch: Tensor) -> Tensor:
        return MODEL.loss(
            {q: torch.view_as_complex(v) if MODEL.params[q].is_complex() else v for q, v in p.items()}, *batch
        )

    mesh = fs.make_mesh(shard=2, abstract=True)
    lowered = [
        fs.shard_step(
            fn, fs.match_specs(params, [("*mix", LayoutSpec(P("shard"))), ("*", LayoutSpec())]), mesh=mesh,
            optimizer=CLIPPED, backend="eager",
        ).lower(params, *MODEL.batch(0))
        for fn, params in ((MODEL.loss, MODEL.params), (of_pairs, real))
    ]  # fmt: skip
    assert str(lowered[0].schedule) == str(lowered[1].schedule)
    assert lowered[0].memory_analysis().peak_bytes == lowered[1].memory_analysis().peak_bytes


@pytest.mark.parametrize("view", [torch.conj, lambda z: z.mT.contiguous().mH, lambda z: z.conj().imag])
def test_conjugated_views_are_what_they_show(view: Any, tmp_path: Any) -> None:
    value, batch = (view(torch.randn(4, 6, dtype=torch.complex128)) for _ in range(2))
    loss = lambda p, z: (p["w"] * z * (1 + 1j)).real.sum()  # noqa: E731
    step, expected = step_of(loss, {"w": value}, optimizer=SGD), loss({"w": value}, batch)
    state = step.adopt({"w": value})
    fs.checkpoint.save(tmp_path / "a", state)
    assert torch.equal(fs.checkpoint.restore_params(tmp_path / "a", step)["w"], value)
    torch.testing.assert_close(step(state, batch)[1]["loss"], expected, rtol=0, atol=sharded.ATOL)
    if value.is_conj():
        with raises(TraceError, leaves="a conjugated view", fix="x.resolve_conj()"):
            step_of(lambda p, x: loss(p, batch), {"w": value})({"w": value}, batch)
