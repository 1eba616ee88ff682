"""Names of leaves in the files of a Hugging Face model, and names of tensors there that are no leaf."""

from __future__ import annotations

import fnmatch
import glob
import importlib
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fnshard import tree
from fnshard.compiler.deferred.deferred_init import recipe_of
from fnshard.errors import SpecError, StateError, leaves
from fnshard.functional import aliases, leaves_of, make_functional
from fnshard.layout.spec import LayoutSpec
from fnshard.runtime.files.tensorfile import TensorToWrite


@dataclass(frozen=True)
class Transposed:
    """A name, given by `names=`, of a tensor that is a leaf's transpose, as GPT-2's of an `nn.Linear`'s."""

    name: str


Named = str | Transposed
Names = Mapping[str, Named] | Callable[[str], Named | None] | None


_ROTARY = ("*rotary_emb.*inv_freq",)  # also "original_inv_freq", and those of each kind of layers


@dataclass(frozen=True)
class Family:
    """The facts of an architecture by which names in files differ from paths of leaves.

    The first three come from the module given as `model=`.

    Args:
        prefix: the module that some files leave out, and some models are: "model" of "model.layers.0".
        tied: `{other name: the path it is stored under}`.
        unsaved: globs of leaves that are not saved, since they are buffers that their modules make.
        ignored: globs of tensors that some files hold and no leaf needs.
        renamed: `{part of a path: what the files have in its place}`.
        experts: `{leaf of all experts, [E, ...]: the matrices of one, which lie one below another}`, where
            files have the matrices of each expert.
    """

    prefix: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)
    unsaved: tuple[str, ...] = _ROTARY
    ignored: tuple[str, ...] = _ROTARY
    renamed: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def parts(self, path: str) -> tuple[str, ...]:
        """Return the matrices of one expert that a leaf holds for all; any other leaf has none."""
        *_, module, name = ("", *path.split("."))
        return self.experts.get(name, ()) if module == "experts" else ()

    def name(self, path: str) -> str:
        """Return what the files call a leaf."""
        for part, other in {f"{tree.COMPILED}.": "", **self.renamed}.items():
            path = path.replace(part, other)
        return path

    def saves(self, path: str) -> bool:
        """Return whether files hold this leaf."""
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
        renamed={  # the names in its module are younger than its files
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


def family_of(config: Mapping[str, Any], model: nn.Module | None, specs: Mapping[str, LayoutSpec]) -> Family:
    """Return the facts of a configuration with a `model_type`, and of a model.

    Raises:
        SpecError: the model has other leaves than the specs, or leaves of other shapes.
    """
    kind = config.get("model_type")
    known = FAMILIES.get(kind, Family()) if isinstance(kind, str) else Family()
    if model is None:
        return known
    if not isinstance(model, nn.Module):
        raise SpecError(f"model= is {type(model).__name__}.", fix="the nn.Module that the leaves are of.")

    # The model's leaves must be those of the specs.
    owned = make_functional(model)[1]
    wrong = [f"params[{p!r}] has no spec, and the model has it" for p in owned if p not in specs]
    wrong += [f"specs[{p!r}] has no leaf in the model" for p in specs if p not in owned]
    wrong += [f"params[{p!r}] {list(specs[p].shape)}, and {list(leaf.shape)} in the model"
              for p, leaf in owned.items() if p in specs and leaf.shape != specs[p].shape]  # fmt: skip
    if wrong:
        raise SpecError(
            f"model={type(model).__name__} is another model than the leaves are of, in {leaves(len(wrong))}:",
            wrong if len(wrong) <= 12 else [*wrong[:12], "..."],
            "give the module that make_functional was called with, or one of the same configuration.",
        )

    # Buffers that are not persistent are leaves, but no file has them.
    saved = {id(value) for value in model.state_dict(keep_vars=True).values()}
    unsaved = tuple(glob.escape(path) for path, leaf in leaves_of(model).items() if id(leaf) not in saved)
    return replace(
        known,
        prefix=getattr(model, "base_model_prefix", ""),
        tied=aliases(model),
        unsaved=unsaved,
        ignored=(*unsaved, *known.ignored),
    )


SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "n_head", "tie_word_embeddings",
)  # fmt: skip
_CHOICES = {"_attn_implementation", "_experts_implementation"}  # they choose the code that transformers runs


def check_config(values: Mapping[str, Any], model: nn.Module | None, shapes: Mapping[str, Any]) -> None:
    """Refuse a configuration of other leaves than these, or of other sizes than the module's.

    To see its leaves, a module of the model's class, or else of the class that the configuration names, is
    built on meta.

    Raises:
        StateError: the configuration does not fit.
    """
    actual = {path: list(shape) for path, shape in shapes.items()}
    kind, own = values.get("model_type"), getattr(model, "config", None)
    has_class = bool(kind) and hasattr(model, "config_class")
    wrong: list[str] = []
    built: dict[str, list[int]] = {}
    compared: Iterable[str] = ()
    if own is not None and kind not in (None, getattr(own, "model_type", kind)):
        wrong.append(f"model_type: the module's is {own.model_type!r}, config.json's {kind!r}")
    elif has_class:
        built, failure = _build_shapes(type(model), type(own), values)
        # A class that cannot be built by its own configuration, either, says nothing of this one.
        if failure and not _build_shapes(type(model), type(own), own.to_dict())[1]:
            wrong.append(f"config.json makes no {type(model).__name__}: {failure}")
        compared = {**actual, **built} if built else ()
    elif kind and model is None:
        classes = _find_class(values)
        if classes is not None:
            built, _ = _build_shapes(*classes, values)
            # Leaves may have any names here: all are compared only where most have the class's names.
            known = actual.keys() & built.keys()
            compared = {**actual, **built} if 2 * len(known) > len(built) else known
    wrong += [f"{p!r}: {actual.get(p, 'no such leaf')}, and {built.get(p, 'none')} by config.json"
              for p in compared if actual.get(p) != built.get(p)]  # fmt: skip

    # Leaves of the right shapes do not show all sizes: that of heads, for example.
    if has_class and not wrong:
        sizes = [n for n in SIZES if values.get(n) is not None and hasattr(own, n)]
        wrong += [f"{n}: the module's is {getattr(own, n)!r}, config.json's {values[n]!r}"
                  for n in sizes if values[n] != getattr(own, n)]  # fmt: skip
    if wrong:
        raise StateError(
            f"the configuration does not fit {leaves(len(wrong))}:",
            wrong[:12],
            "config=model.config, with the sizes that the module has now.",
        )


def _build_shapes(
    make: Callable[[Any], nn.Module], config_class: Any, values: Mapping[str, Any]
) -> tuple[dict[str, list[int]], str]:
    """Return the shapes of the leaves that a class makes of a configuration and that files have.

    Where the class cannot be built this way, there are none, and the second result says why.
    """
    try:  # a user's class may have to be built in another way
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = config_class.from_dict(dict(values))
            for name in _CHOICES:
                if hasattr(config, name):
                    setattr(config, name, None)  # the file's choice may be code of the hub
            model = make(config)
            saved = model.state_dict(keep_vars=True)
            return {p: list(v.shape) for p, v in make_functional(model)[1].items() if p in saved}, ""
    except Exception as error:
        return {}, " ".join(str(error).split())[:200] or type(error).__name__


def _find_class(values: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Return the class of transformers that a configuration names, and the class of its configuration.

    If it names none, take the class of language models of its kind. Return None if there is no such class, if
    transformers is not installed, or if the configuration comes with code.
    """
    if "auto_map" in values:
        return None
    with suppress(Exception):  # the configuration may hold anything
        library = importlib.import_module("transformers")
        causal_lms = library.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        (name,) = values.get("architectures") or [causal_lms[values["model_type"]]]
        model_class = getattr(library, name)
        if model_class.config_class.model_type == values["model_type"]:
            return model_class, model_class.config_class
    return None


def config_of_tensors(values: Mapping[str, Any], entries: Sequence[TensorToWrite]) -> dict[str, Any]:
    """Return a configuration whose entries agree with the tensors that are written.

    "dtype" is that of most numbers, in parts of the model too. An entry of quantization stays only where a
    tensor has numbers of one byte.
    """
    floats: dict[torch.dtype, int] = {}
    for entry in entries:
        if entry.dtype.is_floating_point:
            floats[entry.dtype] = floats.get(entry.dtype, 0) + math.prod(entry.shape)
    config = dict(values)
    if all(entry.dtype.is_floating_point and entry.dtype.itemsize > 1 for entry in entries):
        config.pop("quantization_config", None)
    if not floats:
        return config
    name = str(max(floats, key=floats.__getitem__)).removeprefix("torch.")

    def fill_in(part: dict[str, Any], is_whole: bool) -> dict[str, Any]:
        filled = {k: fill_in(v, False) if isinstance(v, dict) else v for k, v in part.items()}
        # A part that names no dtype keeps none.
        return filled | {k: name for k in DTYPES & part.keys() if is_whole or part[k] is not None}

    return fill_in(config, True)


DTYPES = frozenset({"dtype", "torch_dtype"})  # the entry's name in transformers 5, and before


def read_name(path: str, names: Names) -> Named | None:
    """Return what `names=` calls a leaf, or None.

    Raises:
        StateError: it is neither a name nor `Transposed`.
    """
    if names is None:
        return None
    named = names(path) if callable(names) else names.get(path)
    if named is not None and not isinstance(named, str | Transposed):
        raise StateError(
            f"names gives {type(named).__name__} for params[{path!r}].",
            fix='the tensor\'s name, or fs.hf.Transposed("its name"), or None for the usual one.',
        )
    return named


def possible_names(path: str, family: Family) -> list[str]:
    """Return the names that files may have for a leaf, the likeliest first."""
    names: list[str] = []
    prefix = f"{family.prefix}."
    other_paths = [other for other, stored in family.tied.items() if stored == path]
    for known_path in [path, *other_paths]:
        # Each by its path and by the family's name for it, and both with the prefix or without it.
        for name in dict.fromkeys((known_path, family.name(known_path))):
            names.append(name)
            if family.prefix:
                names.append(name.removeprefix(prefix) if name.startswith(prefix) else prefix + name)
    return names


def check_names(names: Names, paths: Iterable[str]) -> None:
    """Refuse a `names=` that names leaves that do not exist.

    Raises:
        StateError: there are such, or it is no mapping and no function.
    """
    if names is None or callable(names):
        return
    if not isinstance(names, Mapping):
        raise StateError(f"names={type(names).__name__}: a dict, or a function, from paths to names.")
    unknown = sorted(set(names) - set(paths))
    if unknown:
        raise StateError(
            "names= has paths of no leaf:",
            [repr(p) for p in unknown],
            "its keys are paths of the parameter tree, its values names in the files.",
        )


def compute_buffers(model: nn.Module, paths: Iterable[str]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the values of a module's buffers by path, and why others have none.

    Args:
        model: a module with values, or one built under `deferred`, which knows how its buffers are made.
        paths: the paths of the buffers.
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
