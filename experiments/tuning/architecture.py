"""Architecture: what a model of transformers consists of.

Where that is possible, it is found by inspecting the model rather than by names of architectures.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from experiments.lib.checks import ConfigError
from fnshard.errors import report

LAYER_KINDS = ("full_attention", "sliding_attention")  # whose masks are made here
CACHES = ("cache", "past_key_values")  # a trunk's parameter since transformers 5.24, and before


def no_decoder_error(name: str, *why: str) -> ConfigError:
    """Return the error for a model that cannot be tuned here."""
    return ConfigError(
        report(
            f"{name} is no causal language model that can be tuned here:",
            why,
            "take a decoder whose layers all attend causally (Llama, Qwen, Mistral, Gemma, GPT-2), dense or "
            "of experts as Mixtral, Qwen3-MoE, OLMoE and gpt-oss have them.",
        )
    )


def trunk_of(model: nn.Module) -> str:
    """Return the path of the module that is all but the head. In a vision-language model it is the decoder
    of its text."""
    if not hasattr(model.config, "vision_config"):
        return model.base_model_prefix
    decoder = model.get_decoder()
    return next(name for name, module in model.named_modules() if module is decoder)


def check_decoder(model: nn.Module) -> None:
    """Check that a model is a causal decoder that can be masked and cached by hand."""
    config, prefix = getattr(model, "config", None), getattr(model, "base_model_prefix", "")
    trunk = getattr(model, prefix, None) if prefix else None
    if config is None or not isinstance(trunk, nn.Module) or model.get_output_embeddings() is None:
        raise no_decoder_error(type(model).__name__, "it is no trunk with a head over a vocabulary")
    trunk, config = model.get_submodule(trunk_of(model)), config.get_text_config()
    wrong = []

    # No layer may see tokens after a query, and its kind of mask has to be known here.
    causal = [m.is_causal for m in trunk.modules() if hasattr(m, "is_causal")]
    if getattr(config, "is_encoder_decoder", False):
        wrong.append("it is an encoder with a decoder")
    elif not all(causal) or not getattr(config, "is_causal", True):
        wrong.append("it is an encoder: tokens see those after them")
    elif len(causal) < config.num_hidden_layers:
        wrong.append(f"{config.num_hidden_layers - len(causal)} of its layers have no causal attention")
    other = sorted(set(getattr(config, "layer_types", None) or ()) - set(LAYER_KINDS))
    wrong += [f"layers of the kind {kind!r}, whose masks are not known here" for kind in other]

    # The trunk has to take positions, masks and a cache as arguments.
    parameters = inspect.signature(trunk.forward).parameters
    needed = ("attention_mask", "position_ids")
    wrong += [f"its trunk takes no {name}" for name in needed if name not in parameters]
    if not parameters.keys() & set(CACHES):
        wrong.append(f"its trunk takes no {' and no '.join(CACHES)}")
    attention = getattr(config, "_attn_implementation", None)
    if attention not in ("sdpa", "eager", "fnshard"):
        wrong.append(f"its attention is {attention!r}, not 'sdpa' or 'eager'")
    if getattr(config, "alibi", False):
        wrong.append("its positions are slopes of attention (ALiBi)")

    # The only leaves of more than two dims that are known are those of experts and convolutions.
    convolved = [f"{n}.weight" for n, m in trunk.named_modules() if isinstance(m, nn.Conv1d)]
    known = {*experts_of(trunk), *convolved}
    odd = [f"{n} {list(p.shape)}" for n, p in trunk.named_parameters() if p.dim() > 2 and n not in known]
    if odd:
        others = f" and {len(odd) - 1} more are" if len(odd) > 1 else " is"
        wrong.append(f"{odd[0]}{others} of experts of another kind")
    if wrong:
        raise no_decoder_error(type(model).__name__, *wrong)


def cache_parameter(trunk: nn.Module) -> str:
    """Return the one of `CACHES` that a trunk takes. The trunk has passed `check_decoder`."""
    return next(name for name in CACHES if name in inspect.signature(trunk.forward).parameters)


def experts_of(trunk: nn.Module) -> dict[str, bool]:
    """Return the trunk's leaves with a matrix for each expert, by path, and whether these are [in, out]."""
    return {
        f"{name}.{key}": getattr(module, "is_transposed", False)
        for name, module in trunk.named_modules()
        for key, leaf in module.named_parameters(recurse=False)
        if name.split(".")[-1] == "experts" and leaf.dim() == 3
    }


def windows_of(trunk: nn.Module, config: Any) -> dict[str, int | None]:
    """Return, by kind of layers, how many keys a query sees, its own included; None stands for all before it.

    Some configurations have windows that their models never use. So a window counts only if the model's own
    code makes such masks.
    """
    names = inspect.unwrap(type(trunk).forward).__code__.co_names
    window = getattr(config, "sliding_window", None) if _WINDOWED in names else None
    if window is None:
        return {LAYER_KINDS[0]: None}
    kinds = getattr(config, "layer_types", None) or LAYER_KINDS[1:]
    return {kind: window if kind == LAYER_KINDS[1] else None for kind in sorted(set(kinds))}


_WINDOWED = "create_sliding_window_causal_mask"  # of transformers


class StatelessCache:
    """A cache that keeps nothing. It tells a model that a row is one sequence.

    The model then asks for plain causal attention. Without a cache it looks for packed documents in the
    positions, and builds a T x T mask when traced.
    """

    is_compileable = False

    def update(self, keys: Tensor, values: Tensor, layer: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Return the keys and values that the layer attends to."""
        return keys, values

    def get_seq_length(self, layer: int = 0) -> int:
        return 0

    def get_query_offset(self, layer: int = 0) -> int:
        return 0

    def get_mask_sizes(self, queries: int, layer: int = 0) -> tuple[int, int]:
        """Return the number of keys, and the position of the first."""
        return queries, 0


class _Watch(TorchFunctionMode):
    """An observer that finds the results of `F.linear` of some values and a weight, without a bias."""

    def __init__(self, inputs: Tensor, weight: Tensor):
        super().__init__()
        self.weight = weight
        self.inputs = [inputs]  # and slices of it
        self.products: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is Tensor.__getitem__ and any(args[0] is t for t in self.inputs):
            self.inputs.append(out)
        if func is F.linear and any(args[0] is t for t in self.inputs) and args[1] is self.weight:
            if len(args) < 3 or args[2] is None:
                self.products.append(out)
        elif func is Tensor.__getitem__ and any(args[0] is t for t in self.products):
            self.products.append(out)
        return out


def has_plain_head(unembedding: Callable[..., Any], leaves: Mapping[str, Tensor], head: str) -> bool:
    """Return whether logits are the product of hidden states and the head, and nothing more.

    A run is observed for that, since softcaps, scales and biases have other names in every architecture.

    Args:
        unembedding: the model as a function of the leaves, with a stand-in for its trunk, which returns
            `inputs_embeds` as hidden states.
        leaves: the leaves, on meta.
        head: the path of the head.
    """
    weight = leaves[head]
    inputs = torch.empty(1, 2, weight.shape[1], dtype=weight.dtype, device="meta")
    with torch.no_grad(), _Watch(inputs, weight) as watch:
        logits = unembedding(leaves, inputs_embeds=inputs, use_cache=False).logits
    return any(logits is product for product in watch.products)
