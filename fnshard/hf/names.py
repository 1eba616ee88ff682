"""Names: what the files of a Hugging Face model call a leaf, and what they hold that is none."""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fnshard import tree
from fnshard.compiler.deferred.deferred_init import recipe_of
from fnshard.errors import SpecError, StateError, leaves
from fnshard.functional import aliases, leaves_of, make_functional
from fnshard.layout.resolved import compare_paths


@dataclass(frozen=True)
class Transposed:
    """In `names=`: the tensor of the files is the leaf's transpose, as GPT-2's are of a `nn.Linear`."""

    name: str


Named = str | Transposed
Names = Mapping[str, Named] | Callable[[str], Named | None] | None


_ROTARY = ("*rotary_emb.*inv_freq",)  # and the original ones, one for each kind of layers


@dataclass(frozen=True)
class Family:
    """What must be known of an architecture; a leaf's name is its path but for this.

    Args:
        prefix: the module that some files leave out, and some models are: "model" of "model.layers.0"; this
            and the next two are what the module given as `model=` says.
        tied: `{other name: the path it is stored under}`.
        unsaved: globs of leaves that are not saved: buffers that their modules make.
        ignored: globs of tensors that some files hold and no leaf needs.
        renamed: `{part of a path: what the files have in its place}`.
        experts: `{leaf of all experts, [E, ...]: the matrices of one, which lie one below another}`, where
            files have each expert's own.
    """

    prefix: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)
    unsaved: tuple[str, ...] = _ROTARY
    ignored: tuple[str, ...] = _ROTARY
    renamed: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def parts(self, path: str) -> tuple[str, ...]:
        """The matrices of one expert that a leaf has of all; none of any other leaf."""
        *_, module, name = ("", *path.split("."))
        return self.experts.get(name, ()) if module == "experts" else ()

    def name(self, path: str) -> str:
        """What the files call a leaf."""
        for part, other in {f"{tree.COMPILED}.": "", **self.renamed}.items():
            path = path.replace(part, other)
        return path

    def saves(self, path: str) -> bool:
        """Whether files hold this leaf."""
        return not any(fnmatch.fnmatchcase(path, pattern) for pattern in self.unsaved)


_EXPERTS = Family(experts={"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)})
_QWEN_VL = Family(renamed={"model.language_model.": "model.", "model.visual.": "visual."})

# By the `model_type` of config.json, where files differ from their module.
FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe"), _EXPERTS),
    "mixtral": Family(
        renamed={".mlp.": ".block_sparse_moe."},
        experts={"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
    ),
    "bert": Family(ignored=("*.position_ids", "*.token_type_ids")),
    "vit": Family(
        renamed={  # its files are older than the names in its module
            "layers.": "encoder.layer.",
            ".attention.q_proj.": ".attention.attention.query.",
            ".attention.k_proj.": ".attention.attention.key.",
            ".attention.v_proj.": ".attention.attention.value.",
            ".attention.o_proj.": ".attention.output.dense.",
            ".mlp.fc1.": ".intermediate.dense.",
            ".mlp.fc2.": ".output.dense.",
        },
    ),
    "llava": Family(
        renamed={
            "model.language_model.": "language_model.model.",
            "model.vision_tower.": "vision_tower.vision_model.",
            "model.multi_modal_projector.": "multi_modal_projector.",
            "lm_head.": "language_model.lm_head.",
        },
    ),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _QWEN_VL),
    "gpt2": Family(ignored=("*.attn.bias", "*.attn.masked_bias")),
}


def family_of(config: Mapping[str, Any], model: nn.Module | None, paths: Iterable[str]) -> Family:
    """Of a configuration with a `model_type`, and of a model."""
    kind = config.get("model_type")
    known = FAMILIES.get(kind, Family()) if isinstance(kind, str) else Family()
    if model is None:
        return known
    if not isinstance(model, nn.Module):
        raise SpecError(f"model= is {type(model).__name__}.", fix="the nn.Module that the leaves are of.")
    owned = make_functional(model)[1]
    compare_paths(dict.fromkeys(paths), owned)
    saved = {id(value) for value in model.state_dict(keep_vars=True).values()}
    unsaved = tuple(glob.escape(path) for path, leaf in leaves_of(model).items() if id(leaf) not in saved)
    return replace(
        known,
        prefix=getattr(model, "base_model_prefix", ""),
        tied=aliases(model),
        unsaved=unsaved,
        ignored=(*unsaved, *known.ignored),
    )


_CHOICES = {"_attn_implementation", "_experts_implementation"}  # which code runs, in transformers


def check_config(values: Mapping[str, Any], model: nn.Module | None, shapes: Mapping[str, Any]) -> None:
    """Refuse a configuration of which the module's class makes other leaves than these; one is built, on
    meta."""
    made, here = {}, {path: list(shape) for path, shape in shapes.items()}
    kind, own = values.get("model_type"), getattr(model, "config", None)
    if kind and hasattr(model, "config_class") and getattr(own, "model_type", kind) == kind:
        with suppress(Exception), torch.device("meta"):  # a class of one's own may be built in another way
            asked = type(own).from_dict(dict(values))
            for name in (name for name in _CHOICES if hasattr(asked, name)):
                setattr(asked, name, None)  # of the file's choice, it may be code of the hub
            built = type(model)(asked)
            saved = built.state_dict(keep_vars=True)
            made = {p: list(v.shape) for p, v in make_functional(built)[1].items() if p in saved}
    wrong = [f"{p!r}: {here.get(p, 'no such leaf')}, and {made.get(p, 'none')} by config.json"
             for p in {**here, **made} if made and here.get(p) != made.get(p)]  # fmt: skip
    if own is not None and kind not in (None, getattr(own, "model_type", kind)):
        wrong = [f"model_type: the module's is {own.model_type!r}, config.json's {kind!r}"]
    if wrong:
        raise StateError(
            f"the configuration does not fit {leaves(len(wrong))}:",
            wrong[:12],
            "config=model.config, with the sizes that the module has now.",
        )


def given_name(path: str, names: Names) -> Named | None:
    """What `names=` calls a leaf; None where it does not say."""
    named = names(path) if callable(names) else names.get(path) if names is not None else None
    if named is not None and not isinstance(named, str | Transposed):
        raise StateError(
            f"names gives {type(named).__name__} for params[{path!r}].",
            fix='the tensor\'s name, or fs.hf.Transposed("its name"), or None for the usual one.',
        )
    return named


def possible_names(path: str, family: Family) -> list[str]:
    """What files may call a leaf, the likeliest first."""
    out: list[str] = []
    start = f"{family.prefix}."
    for own in [path, *(other for other, stored in family.tied.items() if stored == path)]:
        for name in dict.fromkeys((own, family.name(own))):
            out.append(name)
            if family.prefix:
                out.append(name.removeprefix(start) if name.startswith(start) else start + name)
    return out


def check_names(names: Names, paths: Iterable[str]) -> None:
    """Refuse a `names=` of leaves that there are not."""
    if names is None or callable(names):
        return
    if not isinstance(names, Mapping):
        raise StateError(f"names={type(names).__name__}: a dict, or a function, from paths to names.")
    unknown = sorted(set(names) - set(paths))
    if unknown:
        raise StateError(
            f"names= has {len(unknown)} paths of no leaf:",
            [repr(p) for p in unknown],
            "its keys are paths of the parameter tree, its values names in the files.",
        )


def computed_buffers(model: nn.Module, paths: Iterable[str]) -> tuple[dict[str, Tensor], list[str]]:
    """Values of a module's buffers by path, and why others could not be had.

    Args:
        model: with values; or built under `deferred`, which says how its buffers are made.
        paths: of the buffers.
    """
    values: dict[str, Tensor] = {}
    problems: list[str] = []
    owned = make_functional(model)[1]
    for path in paths:
        recipe = recipe_of(owned[path])
        value = owned[path] if recipe is None else recipe.value()
        if value is None:
            problems.append(f"params[{path!r}] depends on random numbers: give it in missing=")
        elif value.is_meta:
            problems.append(f"params[{path!r}] is on meta: build the module in `with fs.deferred():`")
        else:
            values[path] = value.detach()
    return values, problems
