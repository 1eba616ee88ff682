"""Hugging Face models, unmodified, tiny and random: the gradients of plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sharded
import torch
from families import FAMILIES, MIXTURES, Case, Family, case_of, transformers

import fnshard as fs
from fnshard.step.lowered import Lowered

safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def check(case: Case, blocks: Callable[[Any, fs.Mesh], Any], atol: float = sharded.ATOL) -> Lowered:
    """Loss and gradients of two ranks equal autograd's.

    Args:
        blocks: a rank's stored blocks, by the specs.
    """
    mesh = fs.make_mesh(shard=2, simulated=True)
    specs = fs.presets.full_shard(case.params, mesh)
    step = fs.shard_step(case.loss, specs, mesh=mesh, backend="eager")

    def run(rank: int) -> Any:
        got, grads = step(blocks(specs, mesh), *sharded.part(case.batch, rank, 2))
        return got, fs.unshard(grads, specs, mesh, layout="gradient")

    for got, grads in fs.simulate(mesh, run):
        torch.testing.assert_close(got, case.value, rtol=0, atol=atol)
        grads = {path: grad for path, grad in grads.items() if grad is not None}
        for path, grad in grads.items():
            expected = case.grads.get(path, torch.zeros_like(grad))
            torch.testing.assert_close(
                grad, expected, rtol=0, atol=atol, msg=lambda m, path=path: f"{path}: {m}"
            )
        assert case.grads.keys() <= grads.keys()
    return step.lower(case.params, *sharded.part(case.batch, 0, 2))


def layers_gathered(lowered: Lowered) -> list[str]:
    """Units of a numbered module, by their gathers in the forward: one of each layer is expected."""
    lines = [line.split() for line in lowered.as_text().splitlines()]
    gathered = [line[2] for line in lines if line[1:2] == ["forward"] and line[3:4] == ["gather"]]
    return [unit for unit in gathered if any(part.isdigit() for part in unit.split("."))]


# The others are built of the same parts; several of them are split in test_tensor_families, and one is read.
QUICK = ("t5", "vit")


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(n, marks=pytest.mark.long) for n in FAMILIES if n not in QUICK)]
)
def test_gradients_of_an_unmodified_model(name: str) -> None:
    family = FAMILIES[name]
    case = case_of(family.build())
    if family.tied:
        first, other = family.tied
        assert first in case.params and other not in case.params
    lowered = check(case, lambda specs, mesh: fs.shard(case.params, specs, mesh), family.atol)
    gathered = layers_gathered(lowered)
    assert len(set(gathered)) == family.layers, gathered
    if name != "t5":  # whose decoder layers all read the first one's table of relative positions
        assert len(gathered) == family.layers, gathered


@pytest.mark.parametrize("family", [
    pytest.param(family, marks=[pytest.mark.long] * (name == "qwen2_moe"), id=name)
    for name, family in MIXTURES.items()
])  # fmt: skip
def test_gradients_of_a_mixture_of_experts(family: Family) -> None:
    """One product of groups for all experts, as transformers computes; the truth is a loop over experts."""
    module = family.build()
    module.set_experts_implementation("eager")
    case = case_of(module)
    module.set_experts_implementation("grouped_mm")
    check(case, lambda specs, mesh: fs.shard(case.params, specs, mesh), family.atol)


AUTO = {"bert": "AutoModelForMaskedLM", "vit": "AutoModelForImageClassification"}


@pytest.mark.parametrize(
    ("name", "with_model"),
    [
        *((n, True) for n in ("qwen3", "gemma", "gemma3", "vit")),
        ("gemma2", False),
        ("bert", False),
        ("bert", True),
    ],
)
def test_a_model_of_a_local_directory(name: str, with_model: bool, tmp_path: Path) -> None:
    """Read by `from_pretrained`, and on meta by its configuration and `fs.hf.load`: the same leaves, the
    tied head among them; and `fs.hf.save` calls them what transformers does. One on a tensor axis."""
    family = FAMILIES[name]
    family.build().save_pretrained(tmp_path / "model")
    auto = getattr(transformers, AUTO.get(name, "AutoModelForCausalLM"))
    read = auto.from_pretrained(tmp_path / "model", local_files_only=True)
    leaves = fs.make_functional(read)[1]
    with fs.deferred():
        meta = auto.from_config(read.config, dtype=torch.float64)
    made = {p for p in leaves if p not in read.state_dict()} - set(dict(read.named_parameters()))
    how = {"model": meta} if with_model else {"missing": {p: leaves[p] for p in made}}
    mesh = fs.make_mesh(**({"tensor": 2} if name == "gemma3" else {"shard": 2}), simulated=True)
    tensor = "tensor" if "tensor" in mesh.names else None
    specs = fs.presets.full_shard(fs.make_functional(meta)[1], mesh, tensor=tensor)

    def run(rank: int) -> Any:
        blocks = fs.hf.load(tmp_path / "model", specs, mesh, **how)
        fs.hf.save(blocks, tmp_path / "out", specs, mesh, config=tmp_path / "model", model=how.get("model"))
        return fs.unshard(blocks, specs, mesh)

    for got in fs.simulate(mesh, run):
        assert got.keys() == leaves.keys()
        for path, leaf in leaves.items():
            assert torch.equal(got[path], leaf.detach()), path
    files = [safetensors.load_file(tmp_path / n / "model.safetensors") for n in ("model", "out")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][n], files[1][n]) for n in files[0])


def test_gradients_of_a_model_read_from_a_directory(tmp_path: Path) -> None:
    FAMILIES["qwen3"].build().save_pretrained(tmp_path / "model")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    assert read.dtype == torch.float64
    check(case_of(read.eval()), lambda specs, mesh: fs.hf.load(tmp_path / "model", specs, mesh, model=read))
