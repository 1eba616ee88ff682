"""LoRA: numbers, globs, targets and files of adapters that are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors import raises
from lora_models import add_adapters, llama
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fnshard as fs
from fnshard import LayoutSpec, adapters
from fnshard.errors import SpecError, StateError, TraceError

transformers = pytest.importorskip("transformers")


def test_mistakes_are_named() -> None:
    params = {"layers.0.q_proj.weight": torch.zeros(4, 4), "norm": torch.ones(4)}

    def fn(p: Any, x: Tensor) -> Tensor:
        return (x * p["norm"]).sum() + p["layers.0.q_proj.weight"].sum()

    with raises(
        SpecError, leaves=["targets='*.k_proj|*.q_proj'", "*.k_proj"], fix="globs of the leaves' paths"
    ):
        fs.lora(fn, params, targets="*.k_proj|*.q_proj")
    with raises(SpecError, leaves="params['norm'] [4]", fix="name matrices", says=["1 leaf", "no matrix"]):
        fs.lora(fn, params, targets="norm")
    with raises(SpecError, leaves="q_proj.weight']", says=["trains", "an adapter"]):
        fs.lora(fn, params, targets="*.q_proj", train="*.q_proj")
    tuned_fn, tree = fs.lora(fn, params, rank=4, targets="*.q_proj")
    with raises(TraceError, leaves=["q_proj", "sum"], fix="transposed=", says="nowhere"):
        tuned_fn(tree, torch.ones(4))


@pytest.mark.parametrize(
    ("wrong", "leaves", "fix"),
    [
        ({"rank": 5}, ["2 leaves", "params['a'] [4, 9]: rank=5", "params['b'] [9, 4]"], "a smaller rank"),
        ({"alpha": math.nan}, "alpha=nan", ()),
        ({"dropout": 1.0}, ["dropout=1.0", "from 0, below 1"], ()),
        ({"rank": 0, "alpha": 0, "dropout": -1}, ["rank=0", "alpha=0", "dropout=-1"], ()),
        ({"targets": 5}, ["targets=5", "globs"], ()),
        ({"targets": []}, "targets=''", ()),
    ],
)
def test_numbers_and_globs_that_are_none(wrong: dict[str, Any], leaves: Any, fix: Any) -> None:
    params = {"a": torch.zeros(4, 9), "b": torch.zeros(9, 4)}
    with raises(SpecError, leaves=leaves, fix=fix):
        fs.lora(lambda p, x: x, params, **{"rank": 2, "targets": "a|b", **wrong})


CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    ("odd", "leaves", "says"),
    [
        ([], "'list' adapters", "LoRA"),
        ({"r": "4", "lora_alpha": ...}, ['r is "4"', "lora_alpha"], "missing"),
        ({"lora_alpha": math.nan}, "lora_alpha is NaN", "a number above 0"),
        ({"lora_dropout": 1}, "lora_dropout is 1", "a share"),
        ({"fan_in_fan_out": 1}, "fan_in_fan_out is 1", "true or false"),
        ({"use_dora": True}, "params[", ["6 leaves", "a, b, magnitude"]),
        ({"use_dora": "yes"}, 'use_dora is "yes"', "true or false"),
        (
            {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 9}},
            ["rank_pattern", "alpha_pattern"],
            (),
        ),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights is "pissa"', "base's weights"),
        ({"r": 8}, "params[", ["6 leaves", "a, b"]),
    ],
)
def test_odd_configurations_of_adapters_are_refused(
    odd: Any, leaves: Any, says: Any, saved_adapters: Any
) -> None:
    folder, shapes = saved_adapters
    config = odd if isinstance(odd, list) else {k: v for k, v in {**CONFIG, **odd}.items() if v is not ...}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with raises(StateError, leaves=leaves, says=says):
        adapters.load(folder, shapes)


@pytest.mark.parametrize("modules", ["all-linear", ["q_proj"]])
def test_the_tensors_say_what_is_targeted_whatever_the_configuration_matches_by(
    modules: Any, saved_adapters: Any
) -> None:
    folder, shapes = saved_adapters
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, "target_modules": modules}))
    asked, found = adapters.load(folder, shapes)
    assert asked.targets == tuple(found) and len(found) == 6
    assert (asked.rank, asked.alpha, asked.dropout, asked.rank_stabilised) == (4, 8.0, 0.0, False)


@pytest.fixture
def saved_adapters(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    fn, tree, _ = add_adapters(llama().float())
    adapters.save(tree, tmp_path, fn.lora, fs.match_specs(tree, [("*", LayoutSpec())]))
    return tmp_path, tree["base"]


def test_files_of_adapters_that_are_broken_or_empty(saved_adapters: Any) -> None:
    folder, shapes = saved_adapters
    kept = load_file(folder / "adapter_model.safetensors")
    first, *_ = kept
    save_file({n: v for n, v in kept.items() if n != first}, folder / "adapter_model.safetensors")
    with raises(StateError, leaves=["params[", "a, b"], says="1 leaf"):
        adapters.load(folder, shapes)
    save_file({}, folder / "adapter_model.safetensors")
    with raises(StateError, leaves="adapter_model.safetensors"):
        adapters.load(folder, shapes)
    for text in ("{", "[" * 100_000, '{"a":' * 100_000, "\xff\xfe"):
        (folder / "adapter_config.json").write_bytes(text.encode("latin-1"))
        with raises(StateError, leaves=str(folder), says="PEFT's"):
            adapters.load(folder, shapes)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with raises(StateError, leaves="adapter_model.bin", fix="save_pretrained(other)"):
        adapters.load(folder, shapes)


def test_which_leaves_are_in_out_is_read_from_their_shapes(tmp_path: Path) -> None:
    """PEFT says it of all or none; a square leaf goes by what it says."""
    tensors = {}
    for leaf, rows, columns in (("straight", 6, 9), ("turned", 9, 6), ("square", 6, 6)):
        name = f"base_model.model.{leaf}.lora_"
        tensors |= {f"{name}A.weight": torch.ones(2, columns), f"{name}B.weight": torch.ones(rows, 2)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    shapes = {n: torch.empty(*s) for n, s in (("straight", (6, 9)), ("turned", (6, 9)), ("square", (6, 6)))}
    for said, wanted in ((False, ("turned",)), (True, ("turned", "square"))):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**CONFIG, "r": 2, "fan_in_fan_out": said}))
        assert adapters.load(tmp_path, shapes)[0].transposed == wanted


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.mid = nn.Linear(4, 4)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.mid(self.embed(x)))

    apply, params = fs.make_functional(Tied())
    _, tree = fs.lora(lambda p, x: apply(p, x).sum(), params, rank=2, targets="mid")
    specs = fs.match_specs(tree, [("base.head.weight", LayoutSpec()), ("*", LayoutSpec())])
    assert list(specs["base"]) == ["embed.weight", "mid.weight", "mid.bias"]


@pytest.mark.parametrize(
    ("use", "func"),
    [
        (lambda x, w: torch.cat([w, w]).sum(), "cat"),
        (lambda x, w: torch.add(x.sum(), other=w).sum(), "add"),
        (lambda x, w: w.unbind(0)[0].sum(), "unbind"),
        (lambda x, w: F.linear(w, w).sum(), "linear"),
        (lambda x, w: torch.mm(x, w.t()).sum(), "t"),
        (lambda x, w: F.embedding(torch.tensor([1, 2]), w).sum(), "embedding"),
    ],
)
def test_a_target_that_also_goes_elsewhere_is_refused_in_whatever_it_lies(use: Any, func: str) -> None:
    """The target may be in a list, a keyword, given twice, or the call may return a tuple."""
    tuned_fn, tree = fs.lora(
        lambda p, x: F.linear(x, p["w"]).sum() + use(x, p["w"]), {"w": torch.randn(4, 4)}, rank=2, targets="w"
    )
    with raises(TraceError, leaves=["params['w']", func], says="1 leaf"):
        tuned_fn(tree, torch.ones(3, 4))
    plain, tree = fs.lora(
        lambda p, x: F.linear(x, p["w"]) * len(p["w"].shape) * p["w"].numel(),
        tree["base"],
        rank=2,
        targets="w",
    )
    plain(tree, torch.ones(3, 4))  # asking for a shape is no use


def test_a_product_that_does_more_is_refused() -> None:
    """The update would know nothing of `alpha` and `out`."""
    for more in ({"alpha": 2.0}, {"beta": 0.5}, {"out": torch.empty(3, 4)}):

        def fn(p: Any, x: Tensor, more: Any = more) -> Tensor:
            with torch.no_grad():
                return torch.addmm(torch.zeros(4), x, p["w"], **more)

        tuned_fn, tree = fs.lora(fn, {"w": torch.randn(4, 4)}, rank=2, targets="w", transposed="w")
        with raises(TraceError, leaves=["params['w']", "addmm"], says="nowhere"):
            tuned_fn(tree, torch.ones(3, 4))


def test_what_pefts_files_have_no_place_for_is_refused(tmp_path: Path) -> None:
    fn, tree, _ = add_adapters(llama().float(), train="*norm*")
    with raises(StateError, leaves="norm", fix="fs.adapters.merge"):
        adapters.save(tree, tmp_path, fn.lora, fs.match_specs(tree, [("*", LayoutSpec())]))
    base = {name: nn.Parameter(torch.randn(4, 4)) for name in "ab"}
    fn, tree = fs.lora(lambda p, x: F.linear(x @ p["a"], p["b"]), base, rank=2, targets="a|b", transposed="a")
    specs = fs.match_specs(tree, [("base.*", LayoutSpec(trainable=False)), ("*", LayoutSpec())])
    with raises(StateError, leaves="params['base']['a'] is [in, out]", fix="fs.adapters.merge"):
        adapters.save(tree, tmp_path, fn.lora, specs)
    assert list(tmp_path.iterdir()) == []
