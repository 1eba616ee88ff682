"""Sampled programs, shapes, specs and meshes: gradients and two steps of sgd, against plain autograd."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import reference
import sharded
import torch
from cases import layouts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import MODELS, Model, generator
from torch import Tensor

import fnshard as fs
from fnshard import LayoutSpec

AXES: list[Mapping[str, int]] = [
    {"shard": 1}, {"shard": 2}, {"shard": 3}, {"shard": 4}, {"replicate": 2, "shard": 2},
    {"replicate": 3, "shard": 1},
]  # fmt: skip
ROWS = 12
KINDS = (
    "linear",
    "linear",
    "bias",
    "scale",
    "again",
    "skip",
    "cat",
    "island",
    "norm",
    "penalty",
    "in_place",
    "buried",
)


@dataclass(frozen=True)
class Op:
    """One op of a sampled program; `leaf` is the path it reads, `source` an earlier value."""

    kind: str
    leaf: str = ""
    source: int = 0


@dataclass(frozen=True)
class Program:
    """A chain of ops over [ROWS, width] values; called, it is the loss."""

    ops: tuple[Op, ...]

    def __call__(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        values, terms = [x], []
        for op in self.ops:
            leaf, other = params.get(op.leaf), values[op.source]
            x = values[-1]
            if op.kind in ("linear", "again"):
                x = torch.tanh(x @ leaf)
            elif op.kind in ("bias", "scale"):
                x = x + leaf if op.kind == "bias" else x * leaf
            elif op.kind == "norm":
                x = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * leaf
            elif op.kind == "skip":
                x = x + other
            elif op.kind == "cat":
                x = torch.cat([x, other[:, :2]], -1)
            elif op.kind == "island":
                with torch.no_grad():
                    shift = torch.tanh(x.mean(-1, keepdim=True) * leaf.sum())
                x = x * (1 + shift)
            elif op.kind == "in_place":
                x = x * 1.0
                flat = x.view(-1)
                x += leaf
                x[:, :1].mul_(leaf[0])
                x = x + flat.view(x.shape)
            elif op.kind == "buried":  # a leaf behind functions of leaves alone
                x = x * (leaf.square() + 1).log().sum()
            if op.kind == "penalty":
                terms.append(leaf.square().sum())
            values.append(x)
        # a mean over rows, so that any cut of the batch gives the same loss
        return values[-1].square().sum(-1).mean() + 0.1 * sum(terms)


@dataclass(frozen=True)
class Case:
    program: Program
    shapes: Mapping[str, tuple[int, ...]]
    width: int
    axes: Mapping[str, int]
    specs: Mapping[str, LayoutSpec]
    options: Mapping[str, Any]

    @property
    def params(self) -> dict[str, Tensor]:
        made = generator(len(self.shapes))
        return {p: torch.randn(s, generator=made, dtype=torch.float64) * 0.5 for p, s in self.shapes.items()}

    def batch(self, seed: int) -> tuple[Tensor]:
        return (torch.randn(ROWS, self.width, generator=generator(seed), dtype=torch.float64),)


@st.composite
def cases(draw: Any) -> Case:
    width = first = draw(st.integers(1, 6))
    widths, ops = [width], []
    shapes: dict[str, tuple[int, ...]] = {}

    def new(*shape: int) -> str:
        path = f"{draw(st.sampled_from('abc'))}.{draw(st.integers(0, 1))}.w{len(shapes)}"
        shapes[path] = shape
        return path

    for kind in draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=7)):
        same = [i for i, w in enumerate(widths) if w == width]
        square = [p for p, s in shapes.items() if s == (width, width)]
        if kind == "linear" or not shapes:
            out = draw(st.integers(1, 7))
            ops.append(Op("linear", new(width, out)))
            width = out
        elif kind == "again":
            if square:
                ops.append(Op("again", draw(st.sampled_from(square))))
        elif kind in ("bias", "norm", "in_place"):
            ops.append(Op(kind, new(width)))
        elif kind == "scale":
            ops.append(Op(kind, new()))
        elif kind == "skip":
            ops.append(Op(kind, source=draw(st.sampled_from(same))))
        elif kind == "cat":
            source = draw(st.integers(0, len(widths) - 1))
            ops.append(Op(kind, source=source))
            width += min(2, widths[source])
        else:
            ops.append(Op(kind, draw(st.sampled_from(sorted(shapes)))))
        if len(widths) < len(ops) + 1:
            widths.append(width)
    for _ in range(draw(st.integers(0, 1))):
        new(draw(st.integers(0, 3)), 2)  # nobody reads it; it may be empty
    axes = draw(st.sampled_from(AXES))
    specs = {p: draw(layouts(s, tuple(axes))) for p, s in shapes.items()}
    linear = ops[0].leaf
    specs[linear] = LayoutSpec(**{**vars(specs[linear]), "trainable": True})
    accumulate = draw(
        st.sampled_from([n for n in (1, 2, 3) if ROWS // (axes.get("replicate", 1) * axes["shard"]) % n == 0])
    )
    options = {
        "prefetch": (draw(st.integers(0, 3)), draw(st.integers(0, 3))),
        "overlap": draw(st.integers(0, 3)),
        "accumulate": accumulate,
        "accumulate_mode": draw(st.sampled_from(["reduce", "local"])),
    }
    return Case(Program(tuple(ops)), shapes, first, axes, specs, options)


MODEST = settings(
    max_examples=40, derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip


def specs_of(case: Case) -> dict[str, LayoutSpec]:
    return fs.match_specs(case.params, [(p.replace("[", "[[]"), s) for p, s in case.specs.items()])


@MODEST
@given(cases())
def test_gradients_of_sampled_programs(case: Case) -> None:
    params, specs = case.params, specs_of(case)
    mesh = fs.make_mesh(**case.axes, simulated=True)
    step = fs.shard_step(case.program, specs, mesh=mesh, backend="eager", **case.options)
    batch = case.batch(0)
    expected, value = reference.gradients(case.program, params, *batch)

    def run(rank: int) -> Any:
        loss, grads = step(fs.shard(params, specs, mesh), *sharded.part(batch, rank, mesh.size))
        return loss, fs.unshard(grads, specs, mesh, layout="gradient")

    for loss, grads in fs.simulate(mesh, run):
        torch.testing.assert_close(loss, value, rtol=0, atol=sharded.ATOL)
        assert [p for p, g in grads.items() if g is None] == [p for p, s in specs.items() if not s.trainable]
        for path in [p for p, g in grads.items() if g is not None]:
            torch.testing.assert_close(grads[path], expected[path], rtol=0, atol=sharded.ATOL, msg=path)


@MODEST
@given(cases())
def test_training_of_sampled_programs(case: Case) -> None:
    specs = specs_of(case)
    frozen = tuple(p for p, s in specs.items() if not s.trainable)
    model = Model(case.params, case.program, case.batch, frozen)
    expected = reference.train(
        model.loss, model.params, [[b] for b in model.batches(2)], reference.sgd(0.05, 0.9), frozen=frozen
    )
    mesh = fs.make_mesh(**case.axes, simulated=True)
    step = sharded.make_step(
        mesh, model, specs, fs.optim.sgd(0.05, momentum=0.9), grad_norm=True, **case.options
    )
    for got in fs.simulate(mesh, lambda rank: sharded.train(rank, mesh, model, specs, None, 2, step=step)):
        sharded.assert_same(got, expected)
        sharded.assert_floats(got.norms, expected.norms)


# ------------------------------------------------------------------ writes in place


def test_a_residual_written_in_place_does_not_stop_the_cuts() -> None:
    model = MODELS["in_place"]()
    mesh = fs.make_mesh(shard=2, abstract=True)
    specs = sharded.specs_of(model, "full_shard", mesh)
    lowered = sharded.make_step(mesh, model, specs, None).lower(model.params, *model.batch(0))
    assert [s.units for s in lowered.segments.segments] == [(f"layers.{i}",) for i in range(4)]
    assert "aten.add_" not in lowered.program.as_text()


@pytest.mark.parametrize("name", ["several_outputs", "in_place", "unet", "islands"])
def test_what_crosses_a_cut_fills_its_memory(name: str) -> None:
    """A view of a larger tensor would keep all of it alive, and its copy would have other strides."""
    model = MODELS[name]()
    mesh = fs.make_mesh(shard=2, abstract=True)
    specs = sharded.specs_of(model, "full_shard", mesh)
    lowered = sharded.make_step(mesh, model, specs, None).lower(model.params, *model.batch(0))
    for segment in lowered.segments.segments:
        for value in (lowered.segments.values[n] for n in segment.outputs):
            assert value.untyped_storage().nbytes() == value.numel() * value.element_size(), segment
