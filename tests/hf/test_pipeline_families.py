"""Models of transformers on two stages: training, and files of whole models and of adapters."""

from __future__ import annotations

from pathlib import Path

import families
import pytest
import reference
import sharded
import torch
from lora_models import add_adapters, ids, llama
from safetensors.torch import load_file
from weights import tensors_of

import fnshard as fs
from fnshard import LayoutSpec, P, adapters

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:accumulate="
)
AXES = {"pipeline": 2, "shard": 2}


@pytest.mark.suite({
    "llama-*": "rotary tables of all stages",
})  # fmt: skip
@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("llama", "full_shard"),
        ("qwen2", "shard_grad_op"),
        pytest.param("gpt2", "zero2", marks=pytest.mark.long),  # a tied table, and one of positions
        pytest.param("t5", "full_shard", marks=pytest.mark.long),  # the decoder reads the encoder's end
        pytest.param("bert", "full_shard", marks=pytest.mark.long),
        pytest.param("vit", "full_shard", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_a_family_trains_on_two_stages_as_on_one_device(name: str, preset: str) -> None:
    """No rule says which stage has a leaf: units are cut in the module's order, tied tables on both."""
    family = families.FAMILIES[name]
    model = families.model_of(family.build())
    expected = reference.train(
        model.loss, model.params, [[b] for b in model.batches(3)], reference.sgd(0.1), frozen=model.frozen
    )
    for got in sharded.simulate(model, preset, AXES, fs.optim.sgd(0.1), accumulate=2):
        sharded.assert_same(got, expected, family.atol)


@pytest.mark.long  # test_pipeline_state saves models of stages
@pytest.mark.parametrize("codec", [None, "nf4"])
def test_files_of_two_stages_are_those_of_one_device(codec: str | None, tmp_path: Path) -> None:
    """`hf.save`, `adapters.save` and `adapters.merge`, from leaves of which each rank has some."""
    model = llama().float()
    fn, tree, _ = add_adapters(model)
    frozen = LayoutSpec(P("shard"), codec=codec, trainable=False)

    def write(axes: dict[str, int], folder: Path) -> None:
        mesh = fs.make_mesh(**axes, simulated=True)
        specs = fs.presets.full_shard(tree, mesh, rules=[("base.*_proj*", frozen)])
        step = fs.shard_step(fn, specs, mesh=mesh, optimizer=fs.optim.sgd(0.5), backend="eager")

        def run(rank: int) -> None:
            state, _ = step(step.init(tree), ids())
            adapters.save(state, folder / "adapters", fn.lora)
            blocks, plain = adapters.merge(state, fn.lora)
            fs.hf.save(blocks, folder / "merged", plain, mesh, model=model, config=model.config)

        fs.simulate(mesh, run)

    write({"shard": 1}, tmp_path / "one")
    write({"pipeline": 2, "shard": 1}, tmp_path / "two")
    pairs = [
        (
            load_file(tmp_path / way / "adapters" / "adapter_model.safetensors"),
            tensors_of(tmp_path / way / "merged"),
        )
        for way in ("one", "two")
    ]
    for one, two in zip(*pairs, strict=True):
        assert one.keys() == two.keys() and one
        for name, value in one.items():
            torch.testing.assert_close(two[name], value, rtol=1e-5, atol=1e-6, msg=name)
    served = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "merged")
    assert served(ids()).logits.isfinite().all()
