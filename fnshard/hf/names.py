"""Names: what the files of a Hugging Face model call a leaf, and what they hold that is none."""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fnshard.errors import SpecError, StateError, report
from fnshard.functional import aliases, make_functional
from fnshard.shards import compare_paths


@dataclass(frozen=True)
class Transposed:
    """In `names=`: the tensor of the files is the leaf's transpose, as GPT-2's are of a `nn.Linear`."""

    name: str


Named = str | Transposed
Names = Mapping[str, Named] | Callable[[str], Named | None] | None


@dataclass(frozen=True)
class Family:
    """What must be known of an architecture; a leaf's name is its path but for this.

    Args:
        prefix: the module that some files leave out, and some models are: "model" of "model.layers.0".
        tied: `{other name: the path it is stored under}`.
        unsaved: globs of leaves that are not saved: buffers that their modules make.
        ignored: globs of tensors that some files hold and no leaf needs.
        renamed: `{part of a path: what the files have in its place}`.
    """

    prefix: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)
    unsaved: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)

    def name(self, path: str) -> str:
        """What the files call a leaf."""
        for part, other in self.renamed.items():
            path = path.replace(part, other)
        return path

    def saves(self, path: str) -> bool:
        """Whether files hold this leaf."""
        return not any(fnmatch.fnmatchcase(path, pattern) for pattern in self.unsaved)


_ROTARY = ("*rotary_emb.*inv_freq",)  # and the original ones, one for each kind of layers
_MASKS = ("*.attn.bias", "*.attn.masked_bias")
_UNKNOWN = Family(unsaved=_ROTARY, ignored=_ROTARY)
_LLAMA = Family("model", {"lm_head.weight": "model.embed_tokens.weight"}, _ROTARY, _ROTARY)
_GEMMA = replace(_LLAMA, unsaved=(*_ROTARY, "*.embed_scale"))

_BERT = Family(
    "bert", {"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"},
    ("*.position_ids", "*.token_type_ids"), ("*.position_ids", "*.token_type_ids"),
)  # fmt: skip
_VIT = Family(
    "vit",
    renamed={  # its files are older than the names in its module
        "layers.": "encoder.layer.",
        ".attention.q_proj.": ".attention.attention.query.",
        ".attention.k_proj.": ".attention.attention.key.",
        ".attention.v_proj.": ".attention.attention.value.",
        ".attention.o_proj.": ".attention.output.dense.",
        ".mlp.fc1.": ".intermediate.dense.",
        ".mlp.fc2.": ".output.dense.",
    },
)

# By the `model_type` of config.json. A module given as `model=` says the same of itself, but for `renamed`.
FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _GEMMA),
    "bert": _BERT,
    "vit": _VIT,
    "gpt2": Family("transformer", {"lm_head.weight": "transformer.wte.weight"}, _MASKS, _MASKS),
}


def family_of(config: Mapping[str, Any], model: nn.Module | None, paths: Iterable[str]) -> Family:
    """Of a model, and of a configuration with a `model_type`.

    Args:
        model: the module whose leaves are meant, on any device.
        paths: of all leaves.

    Raises:
        SpecError: the module has other leaves.
    """
    kind = config.get("model_type")
    known = FAMILIES.get(kind, _UNKNOWN) if isinstance(kind, str) else _UNKNOWN
    if model is None:
        here = set(paths)
        return replace(known, tied={other: p for other, p in known.tied.items() if other not in here})
    if not isinstance(model, nn.Module):
        raise SpecError(
            report(f"model= is {type(model).__name__}.", fix="the nn.Module that the leaves are of.")
        )
    owned = make_functional(model)[1]
    compare_paths(dict.fromkeys(paths), owned)
    saved = model.state_dict(keep_vars=True).keys()
    unsaved = tuple(glob.escape(path) for path in owned if path not in saved)
    prefix = getattr(model, "base_model_prefix", "") or known.prefix
    return Family(prefix, aliases(model), unsaved, (*unsaved, *known.ignored), known.renamed)


def said_by(model: nn.Module | None) -> dict[str, Any]:
    """As much of a configuration as a module has with it."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return {"model_type": kind} if isinstance(kind, str) else {}


def name_of(path: str, names: Names) -> Named | None:
    """What `names=` calls a leaf; None where it does not say.

    Raises:
        StateError: something that is no name.
    """
    named = names(path) if callable(names) else names.get(path) if names is not None else None
    if named is not None and not isinstance(named, str | Transposed):
        raise StateError(
            report(
                f"names gives {type(named).__name__} for params[{path!r}].",
                fix='the tensor\'s name, or fs.hf.Transposed("its name"), or None for the usual one.',
            )
        )
    return named


def candidates(path: str, family: Family) -> list[str]:
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
    """Refuse a `names=` of leaves that there are not.

    Raises:
        StateError: it is no dict and no function; paths of no leaf.
    """
    if names is None or callable(names):
        return
    if not isinstance(names, Mapping):
        raise StateError(f"names={type(names).__name__}: a dict, or a function, from paths to names.")
    unknown = sorted(set(names) - set(paths))
    if unknown:
        raise StateError(
            report(
                f"names= has {len(unknown)} paths of no leaf:",
                [repr(p) for p in unknown],
                "its keys are paths of the parameter tree, its values names in the files.",
            )
        )


# ------------------------------------------------------------------ what no file holds


def buffers_of(model: nn.Module, paths: Iterable[str]) -> tuple[dict[str, Tensor], list[str]]:
    """Values of a module's buffers by path, and why others could not be had.

    A buffer on meta is made by its module's `reset_parameters`, or by the `_init_weights` that transformers'
    models have.

    Args:
        paths: the buffers that are wanted.
    """
    values: dict[str, Tensor] = {}
    problems: list[str] = []
    wanted: dict[str, list[str]] = {}
    for path in paths:
        wanted.setdefault(path.rpartition(".")[0], []).append(path.rpartition(".")[2])
    for owner, keys in wanted.items():
        module = model.get_submodule(owner)
        held = {key: module._buffers.get(key) for key in keys}
        real = {key: value for key, value in held.items() if value is not None and not value.is_meta}
        made = _made(model, owner, [key for key in keys if key not in real])
        for key in keys:
            path, value = f"{owner}.{key}".lstrip("."), real.get(key, made.get(key))
            if value is None:
                problems.append(
                    f"params[{path!r}]: {type(module).__name__} cannot make it from the meta device"
                )
            else:
                values[path] = value.detach()
    return values, problems


def _made(model: nn.Module, owner: str, keys: list[str]) -> dict[str, Tensor]:
    """Buffers of a module that is on meta, on the host, as its resets fill them; without those they leave."""
    module = model.get_submodule(owner)
    blank = {k: _unset(module._buffers[k]) for k in keys if module._buffers.get(k) is not None}
    if not blank:
        return {}
    fresh = object.__new__(type(module))
    vars(fresh).update(vars(module))
    vars(fresh)["_buffers"] = {**module._buffers, **blank}
    made: dict[str, Tensor] = {}
    for reset in _resets(model, owner):
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same on every rank
            reset(fresh)
        found = {k: fresh._buffers[k] for k in blank}
        made = {k: v for k, v in found.items() if not v.is_meta and not _is_unset(v)}
        if len(made) == len(blank):
            break  # what a module does for itself comes first
    return made


def _resets(model: nn.Module, owner: str) -> list[Callable[[nn.Module], Any]]:
    """The module's own (which knows of no buffers that a subclass has), and that of the model it is in."""
    found: list[Callable[[nn.Module], Any]] = []
    if hasattr(model.get_submodule(owner), "reset_parameters"):
        found.append(lambda fresh: fresh.reset_parameters())
    parts = owner.split(".") if owner else []
    for count in range(len(parts), -1, -1):
        above = model.get_submodule(".".join(parts[:count]))
        if hasattr(above, "_init_weights"):
            return [*found, above._init_weights]
    return found


def _unset(like: Tensor) -> Tensor:
    value = torch.empty(like.shape, dtype=like.dtype)
    if like.dtype.is_floating_point or like.dtype.is_complex:
        return value.fill_(float("nan"))
    return value.fill_(True if like.dtype == torch.bool else torch.iinfo(like.dtype).max)


def _is_unset(value: Tensor) -> bool:
    if value.dtype == torch.bool:  # nothing can mark one
        return False
    if value.is_floating_point() or value.is_complex():
        return bool(value.isnan().any())
    return bool((value == torch.iinfo(value.dtype).max).any())
