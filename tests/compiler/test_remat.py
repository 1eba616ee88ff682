"""Remat: what is kept, that gradients do not change by a bit, that dropout draws the same mask twice."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import sharded
import torch
import torch.nn.functional as F
from errors import raises
from models import Model, gpt
from torch import nn

import fnshard as fs
from fnshard.compiler.schedule.instructions import Run, ToHost
from fnshard.errors import SpecError

ADAMW = fs.optim.adamw(3e-3, weight_decay=0.1)


class Noisy(nn.Module):
    """A module of blocks with dropout."""

    def __init__(self, blocks: int = 3, width: int = 16):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.5)) for _ in range(blocks)
        )
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + F.dropout(layer(x), 0.3, self.training)
        return self.head(x).square().mean()


def grads_of(remat: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    module = Noisy().double().train()
    apply, params = fs.make_functional(module)
    mesh = fs.make_mesh(shard=1)
    specs = fs.presets.full_shard(params, mesh)
    step = fs.shard_step(apply, specs, mesh=mesh, remat=remat, **{"backend": "eager", **options})
    x = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return step(fs.shard(params, specs, mesh), x, rng=(3, 7))


@pytest.mark.suite({
    "unit-options0-1": "all is made again",
    "0.0-options1-1": "nothing is",
    "offload-options3-1": "values are moved",
    "remat5-options5-2": "units differ",
    "unit-options6-1": "an op is saved",
})  # fmt: skip
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("remat", "options"),
    [
        ("unit", {}), (0.0, {}), (0.3, {}), ("offload", {}), ("unit+offload", {"overlap": 5}),
        ({"layers.1": "unit", "layers.*": 0.3}, {}), ("unit", {"save": ["matmul"]}),
    ],
)  # fmt: skip
def test_not_a_bit_changes_and_dropout_draws_the_same_mask(
    remat: Any, options: dict[str, Any], accumulate: int
) -> None:
    """fp64, eager: what is computed again is computed alike."""
    want_loss, want = grads_of("none", accumulate=accumulate)
    loss, grads = grads_of(remat, accumulate=accumulate, **options)
    assert torch.equal(loss, want_loss)
    assert all(torch.equal(grads[p], g) for p, g in want.items())


# ------------------------------------------------------------------ what is kept


@cache
def three_blocks() -> Model:
    """Make three blocks, the first of which has a kernel of its own."""
    return gpt(layers=3)


def lower_step(**options: Any) -> Any:
    model = three_blocks()
    mesh = fs.make_mesh(shard=2, abstract=True)
    specs = sharded.specs_of(model, "full_shard", mesh)
    step = fs.shard_step(model.loss, specs, mesh=mesh, optimizer=ADAMW, **options)
    return step.lower(model.params, *model.batches(1)[0])


@cache
def lower_once(remat: str = "none", save: str = "") -> Any:
    """Lower a step once for all tests that look at it."""
    return lower_step(remat=remat, save=[save]) if save else lower_step(remat=remat)


def saved(low: Any, prefix: str = "layers.") -> dict[str, int]:
    """Return the bytes that each segment of these units keeps besides its inputs."""
    out = {}
    for line in low.schedule.instructions:
        if isinstance(line, Run) and not line.backward and line.unit.startswith(prefix):
            kernel = low.schedule.kernels[line.kernel]
            out[line.unit] = sum(
                torch.empty(a.shape, dtype=a.dtype, device="meta").nbytes for a in kernel.saved
            )
    return out


def test_a_unit_keeps_its_inputs_alone() -> None:
    everything, unit = lower_once(), lower_once(remat="unit")
    assert saved(everything).keys() == saved(unit).keys() == {f"layers.{i}" for i in range(3)}
    assert all(saved(everything).values()) and not any(saved(unit).values())
    for line in unit.schedule.instructions:
        if isinstance(line, Run) and line.backward and line.unit.startswith("layers."):
            kernel = unit.schedule.kernels[line.kernel]
            kinds = [kernel.source.inputs[r.index].kind for r in kernel.backward.inputs if r.kind == "input"]
            assert kinds.count("value") == 1, "one boundary tensor, not two"


def test_the_last_segment_keeps_what_it_wants() -> None:
    """Its backward follows at once: recomputing would only cost time."""
    everything, unit = lower_once(), lower_once(remat="unit")
    last = [i for i in everything.schedule.instructions if isinstance(i, Run) and not i.backward][-1].unit
    assert saved(everything, last) == saved(unit, last) != {last: 0}


MATMULS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
ATTENTION = ("aten._scaled_dot_product_flash_attention_for_cpu.default",)


def test_selective_saving() -> None:
    """Matmuls are kept and not made again; everything else is made again."""

    def made(low: Any, backward: bool, names: tuple[str, ...] = MATMULS) -> int:
        kernels = [
            low.schedule.kernels[i.kernel]
            for i in low.schedule.instructions
            if isinstance(i, Run) and i.backward == backward and i.unit.startswith("layers.")
        ]
        graphs = [(k.backward if backward else k.forward).graph for k in kernels]
        return sum(str(n.target) in names for g in graphs for n in g.nodes)

    everything, unit = lower_once(), lower_once(remat="unit")
    chosen = lower_once("unit", "aten.mm")
    assert made(unit, True) > made(everything, True)
    assert made(chosen, True) == made(everything, True)
    assert 0 < sum(saved(chosen).values()) < sum(saved(everything).values())
    attended = lower_once("unit", "attention")  # of several results
    assert made(unit, True, ATTENTION) > made(attended, True, ATTENTION) == made(everything, True, ATTENTION)


def test_globs_choose_units() -> None:
    low = lower_step(remat={"layers.1": "unit"})
    kept = saved(low)
    assert kept["layers.1"] == 0 < kept["layers.0"]
    assert len(low.kernels) == len(lower_once().kernels) + 1 == len(lower_once(remat="unit").kernels) + 1


def test_what_is_offloaded_leaves_the_device_after_its_last_reader() -> None:
    low = lower_once(remat="offload")
    sent = {n for i in low.schedule.instructions if isinstance(i, ToHost) for n in i.reads}
    assert sent
    for name in sent:
        runs = [i for i in low.schedule.instructions if isinstance(i, Run) and name in i.reads]
        assert not any(line.backward for line in runs), "the backward reads a copy"


def test_what_is_read_again_at_once_stays() -> None:
    """Between the last reader before and the first after, two kernels run at least."""
    lines = lower_step(remat={"*": "offload"}).schedule.instructions
    sent = [(i, line) for i, line in enumerate(lines) if isinstance(line, ToHost)]
    assert sent
    for i, line in sent:
        reader = next(k for k, r in enumerate(lines) if any(n[2:].split("#")[0] in line.reads
                      for n in r.reads if n.startswith("t:")))  # fmt: skip
        last = max(k for k, r in enumerate(lines[:reader]) if isinstance(r, Run)
                   and set(line.reads) & {*r.reads, *r.writes})  # fmt: skip
        assert i > last
        assert sum(isinstance(r, Run) for r in lines[last + 1 : reader]) >= 2


# ------------------------------------------------------------------ mistakes


def test_all_that_is_no_policy_is_one_mistake() -> None:
    wrong = {"a": "block", "b": 1.5, "c": True}
    with raises(SpecError, leaves=["'a': 'block'", "'b': 1.5", "'c': True", "save=['mm']"]):
        lower_step(remat=wrong, save=["mm"])


def test_globs_that_match_no_unit() -> None:
    with raises(SpecError, leaves="'blocks.*'", says=["1 remat rule(s)", "layers.0"]):
        lower_step(remat={"blocks.*": "unit", "layers.*": "unit"})


def test_saving_an_op_that_is_not_there() -> None:
    with raises(SpecError, leaves=["save", "conv"], fix="'matmul'", says="1 op(s)"):
        lower_step(remat="unit", save=["conv", "mm"])
