"""A causal language model of transformers as pure functions: hidden states, the head, losses."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

import fnshard as fs
from experiments.data.model_files import MEND, attention_of, read_model_config
from experiments.lib.checks import ConfigError
from experiments.lib.files import read_json
from experiments.tuning.architecture import (
    StatelessCache,
    cache_parameter,
    check_decoder,
    experts_of,
    has_plain_head,
    no_decoder_error,
    trunk_of,
    windows_of,
)
from experiments.tuning.vision import Vision, vision_of
from fnshard.errors import StateError, report
from fnshard.functional import aliases
from fnshard.hf.reading import check_model_directory, find_codes
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.losses import IGNORE, linear_token_losses

Mask = Tensor | dict[str, Tensor] | None


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model without dropout, which `from_model`, `from_config` or `from_directory` makes.

    Args:
        model: the module in eval mode, which may be on meta.
        apply, params: the results of `fs.make_functional(model)`. All functions here take these leaves.
        plain_head: whether logits are `hidden @ head.T`, and nothing else is done to them.
        windows: the number of keys that a query sees, by kind of layers; None stands for all before it.
        fp32_head: whether logits are computed in fp32 whatever the rest is, which keeps the sampler's and the
            trainer's log-probabilities together (MiniMax-M1, 2025).
        noise: the strength of the noise on embeddings (NEFTune).
        vision: the vision of a model that sees.
    """

    model: nn.Module
    apply: Callable[..., Any]
    params: dict[str, Tensor]
    plain_head: bool
    windows: Mapping[str, int | None]
    fp32_head: bool
    noise: float
    vision: Vision | None
    _trunk: _Part  # from tokens or their embeddings to hidden states
    _embedding: _Part  # from tokens to their embeddings
    _unembedding: _Part  # from hidden states to logits, with all that the model does to them
    _head: str  # the path of the head's weights
    _cache: str  # the name of the trunk's parameter for its cache

    @property
    def context(self) -> int | None:
        """Return the most tokens that the model was made for; None if it does not say."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @property
    def vocab(self) -> int:
        return self.params[self._head].shape[0]

    def matrices(self) -> list[str]:
        """Return the paths of all matrices of the trunk's layers, without embeddings and the head."""
        return [*self._find_weights(nn.Linear), *self.transposed_matrices()]

    def vision_matrices(self) -> list[str]:
        """Return the paths of all matrices with which a model sees. None is the trunk's or the head."""
        if self.vision is None:
            return []
        skipped = (f"{trunk_of(self.model)}.", self._head)
        linear = [f"{n}.weight" for n, m in self.model.named_modules() if isinstance(m, nn.Linear)]
        return [path for path in linear if path in self.params and not path.startswith(skipped)]

    def transposed_matrices(self) -> list[str]:
        """Return those of `matrices` and `experts` that are stored [in, out], as GPT-2's are."""
        from transformers.pytorch_utils import Conv1D

        experts = [path for path, is_transposed in self._find_experts().items() if is_transposed]
        return [*self._find_weights(Conv1D), *experts]

    def experts(self) -> list[str]:
        """Return the paths of leaves that have a matrix of each expert. A dense model has none."""
        return list(self._find_experts())

    def _find_experts(self) -> dict[str, bool]:
        """Return the paths of the experts' leaves, and whether these are stored [in, out]."""
        trunk = trunk_of(self.model)
        experts = experts_of(self.model.get_submodule(trunk))
        return {f"{trunk}.{path}": is_transposed for path, is_transposed in experts.items()}

    def _find_weights(self, kind: type[nn.Module]) -> list[str]:
        """Return the paths of the weights of the trunk's modules of a kind. A tied leaf has one path."""
        prefix = f"{trunk_of(self.model)}."
        owners = [n for n, m in self.model.named_modules() if isinstance(m, kind) and n.startswith(prefix)]
        paths = [f"{name}.weight" for name in owners]
        return [path for path in paths if path in self.params and path != self._head]

    def run(
        self, params: Any, tokens: Tensor, positions: Tensor | None, mask: Mask,
        cache: StatelessCache | None, routers: list[Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Run the trunk, and return its output after the final norm, [B, T, D].

        Args:
            tokens: int64 [B, T], or their embeddings, [B, T, D].
            positions: int64 [B, T], or [B, 3, T] for a trunk that has three; None counts from 0.
            mask: a result of `mask`, or None for what the model itself would do with this cache.
            routers: a list that takes the logits of each layer's router, [B T, E].
        """
        if self.noise and not tokens.is_floating_point():
            tokens = self._add_noise(self.embed(params, tokens))
        if positions is not None and positions.dim() > 2:
            positions = positions.movedim(1, 0)  # [3, B, T], as transformers has them
        # The names of these arguments depend on the model, and on what it is given.
        input_name = "inputs_embeds" if tokens.is_floating_point() else "input_ids"
        named = {input_name: tokens, self._cache: cache}
        if routers is not None:
            named["output_router_logits"] = True
        out = self._trunk(
            params, position_ids=positions, attention_mask=mask, use_cache=cache is not None, **named
        )
        if routers is not None:
            routers.extend(out.router_logits)
        return out.last_hidden_state

    def embed(self, params: Any, tokens: Tensor) -> Tensor:
        """Embed tokens [B, T] as the trunk sees them, [B, T, D]."""
        return self._embedding(params, tokens)

    def _add_noise(self, embedded: Tensor) -> Tensor:
        """Add uniform noise in [-1, 1] times `noise` / sqrt(T D)."""
        scale = self.noise / math.sqrt(embedded.shape[-2] * embedded.shape[-1])
        return embedded + (2 * torch.rand_like(embedded) - 1) * scale

    def hidden(
        self,
        params: Any,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        images: Mapping[str, Tensor] | None = None,
        routers: list[Tensor] | None = None,
    ) -> Tensor:
        """Compute the trunk's output after the final norm, [B, T, D], without logits.

        Args:
            tokens: int64 [B, T].
            positions: int64 [B, T], the place of each token in its document; None counts from 0.
            documents: int64 [B, T], the document of its row to which a token belongs, 0 for padding.
                Documents do not see each other (`fs.attention`). None makes a row one sequence, with torch's
                own causal kernel.
            images: a result of `Vision.rows`; None if no token stands for an image.
            routers: a list that takes the logits of routers, as in `run`.
        """
        if images is not None:
            embedded = self.embed(params, tokens)
            embedded = self._add_noise(embedded) if self.noise else embedded
            tokens = self.vision.merge(params, embedded, tokens, images)
            positions = images.get("positions", positions)

        # A row of one sequence, or of documents for which `fs.attention` takes their numbers as the mask.
        if documents is None:
            return self.run(params, tokens, positions, None, StatelessCache(), routers)
        if self.model.config._attn_implementation != "eager":
            return self.run(params, tokens, positions, documents[:, None, None], None, routers)

        # Eager attention needs the whole mask.
        index = torch.arange(tokens.shape[1], device=tokens.device)
        distance = index[:, None] - index  # [T, T]: how far a key is before a query
        real = documents[:, None, :] != 0
        see = (documents[:, :, None] == documents[:, None, :]) & real & (distance >= 0)
        # Padding sees itself, since a softmax over nothing would be NaN, and so would every gradient.
        mask = self.mask(params, (see | (distance == 0))[:, None], distance)
        return self.run(params, tokens, positions, mask, None, routers)

    def mask(self, params: Any, see: Tensor, distance: Tensor) -> Mask:
        """Make the mask of a trunk's attention, or one for each kind of layers if they differ.

        Args:
            see: bool [B, 1, queries, keys], the keys of the past that queries may see.
            distance: how far keys are before queries. Windows as wide as all keys do not count.
        """
        masks: dict[str, Tensor] = {}
        narrow = {kind: w for kind, w in self.windows.items() if w is not None and w < distance.shape[-1]}
        dtype = params[self._head].dtype  # the dtype of scores, to which a mask is added
        for kind in self.windows:
            seen = see & (distance < narrow[kind]) if kind in narrow else see
            masks[kind] = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
        return masks if len(masks) > 1 and narrow else next(iter(masks.values()))

    def head(self, params: Any) -> Tensor:
        """Return the matrix of logits, [V, D]: lm_head.weight, or the embedding it is tied to.

        If `plain_head` is False, there is more to logits than this matrix.
        """
        return params[self._head]

    def unembed(self, params: Any, hidden: Tensor) -> Tensor:
        """Make logits [B, T, V] of hidden states [B, T, D] as the model itself does."""
        hidden, head = self._widen(hidden, self.head(params))
        params = {**params, self._head: head}
        return self._unembedding(params, inputs_embeds=hidden, use_cache=False).logits

    def _widen(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return tensors in fp32 if `fp32_head` asks for it."""
        is_too_narrow = self.fp32_head and tensors[0].dtype.itemsize < 4
        return tuple(t.float() for t in tensors) if is_too_narrow else tensors

    def logits(self, params: Any, *batch: Any, **more: Any) -> Tensor:
        """Compute logits [B, T, V], from the arguments of `hidden`."""
        return self.unembed(params, self.hidden(params, *batch, **more))

    def losses(self, params: Any, hidden: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
        """Compute -log p of every target after hidden states [B, T, D], as [B, T] in fp32 or wider.

        It is 0 where the target is `IGNORE`. If the head is plain, only a few tokens' logits are in memory
        at once.

        Args:
            targets: int64 [B, T], the token that follows each one.
            temperature: the number by which logits are divided.
        """
        if self.plain_head:
            hidden, head = self._widen(hidden, self.head(params))
            hidden = hidden if temperature == 1.0 else hidden / temperature
            return linear_token_losses(hidden, head, targets)
        hidden = torch.where((targets != IGNORE).unsqueeze(-1), hidden, 0.0)  # padding may hold NaN
        flat = self.unembed(params, hidden).flatten(0, 1)
        flat = flat.float() if flat.dtype.itemsize < 4 else flat
        losses = F.cross_entropy(flat / temperature, targets.flatten(), ignore_index=IGNORE, reduction="none")
        return losses.view(targets.shape)


@dataclass(frozen=True)
class _Part:
    """A module of a model as a pure function of the model's leaves."""

    apply: Callable[..., Any]
    paths: Mapping[str, str]  # {the module's name of a leaf: the model's}

    @classmethod
    def make(cls, module: nn.Module, prefix: str, tied: Mapping[str, str]) -> _Part:
        apply, params = fs.make_functional(module)
        return cls(apply, {name: tied.get(prefix + name, prefix + name) for name in params})

    def __call__(self, params: Any, *args: Any, **kwargs: Any) -> Any:
        return self.apply({name: params[path] for name, path in self.paths.items()}, *args, **kwargs)


class _KnownTrunk(nn.Module):
    """A stand-in for the trunk, which returns the output that it is given."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> Any:
        return _Output(inputs_embeds)


@dataclass(frozen=True)
class _Output:
    """A stand-in for the output of a trunk of any class, which has the hidden states and nothing else."""

    last_hidden_state: Tensor

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None


# ------------------------------------------------------------------ making one


def from_model(model: nn.Module) -> LanguageModel:
    """Make a `LanguageModel` of one of transformers, which is put into eval mode.

    Raises:
        ConfigError: it is no causal decoder that can be tuned here.
    """
    check_decoder(model)
    model.eval()
    # Replace attention and experts by implementations that a step can trace on every mesh.
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(fs.hf.register_attention())
    if experts_of(model.get_submodule(trunk_of(model))):
        model.set_experts_implementation("grouped_mm")  # its shapes do not depend on the routing
    config, prefix, path = model.config.get_text_config(), model.base_model_prefix, trunk_of(model)
    inner = model.get_submodule(path)

    # The trunk, and all that follows it, are each a function of the whole model's leaves. The latter is the
    # model with a stand-in for its trunk, so that it keeps softcaps and scales of logits.
    apply, params = fs.make_functional(model)
    tied = aliases(model)
    trunk = _Part.make(inner, f"{path}.", tied)
    without_trunk = copy.copy(model)  # it gets its own dict of modules, so that `model` keeps its trunk
    vars(without_trunk)["_modules"] = {**model._modules, prefix: _KnownTrunk()}
    unembedding = _Part.make(without_trunk, "", tied)
    weight = model.get_output_embeddings().weight
    head = next(path for path, leaf in model.named_parameters() if leaf is weight)
    try:
        plain = has_plain_head(unembedding, {p: v.detach().to("meta") for p, v in params.items()}, head)
    except (AttributeError, KeyError, TypeError) as error:
        raise no_decoder_error(type(model).__name__, f"its head reaches into its trunk ({error})") from error

    # What its layers attend to, how it embeds tokens, and how it sees.
    windows, cache = windows_of(inner, config), cache_parameter(inner)
    embeddings = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is embeddings)
    embedding = _Part.make(embeddings, f"{name}.", tied)
    vision = vision_of(model, tied, _Part.make)
    return LanguageModel(
        model, apply, params, plain, windows, fp32_head=False, noise=0.0, vision=vision, _trunk=trunk,
        _embedding=embedding, _unembedding=unembedding, _head=head, _cache=cache,
    )  # fmt: skip


def from_config(config: Any, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """Build a model under `fs.deferred`, by a configuration of transformers.

    Args:
        dtype: the dtype of the leaves.

    Raises:
        ConfigError: `from_model` refuses it, or transformers has no class for it.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = copy.deepcopy(config)  # transformers writes the dtype into it
    if getattr(config, "is_encoder_decoder", False):
        raise no_decoder_error(type(config).__name__, "it is an encoder with a decoder")
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    if type(config) not in kind._model_mapping:
        raise no_decoder_error(type(config).__name__, "transformers has no model of it that writes texts")
    try:
        with fs.deferred():
            model = kind.from_config(
                config, dtype=dtype, trust_remote_code=False,
                attn_implementation=attention_of(config), experts_implementation=None,
            )  # fmt: skip
        return from_model(model)
    except ConfigError:
        raise
    except Exception as error:  # a configuration may hold anything, so errors are of every kind
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        what = f"{type(error).__name__}: {why:.300}"
        raise ConfigError(report(f"config.json makes no {type(config).__name__}:", [what], MEND)) from error


def from_directory(path: str | Path, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """Build a model under `fs.deferred`, by the config.json of its directory. `fs.hf.load` reads its weights.

    Nothing is fetched, and no code of the directory is run.

    Raises:
        ConfigError: `from_model` refuses it, or the directory, its config.json or its weights are missing or
            unknown.
    """
    folder = Path(path)
    wrong = [] if folder.is_dir() else ["it is no directory"]
    if folder.is_dir():
        if "config.json" not in {path.name for path in folder.iterdir()}:
            wrong.append("there is no config.json")
        if not any(folder.glob("*.safetensors")):
            wrong.append("there are no *.safetensors files")
        refuse_codes(folder)
    if wrong:
        raise ConfigError(
            report(
                f"{str(folder)!r} is no model directory:",
                wrong,
                "name a local directory, with config.json and model.safetensors, as save_pretrained of "
                "transformers writes it (of a model on the hub: what huggingface_hub.snapshot_download "
                "returns).",
            )
        )
    try:
        return from_config(read_model_config(folder), dtype)
    except ConfigError as error:  # the error names its own way out
        raise ConfigError(f"model={folder}: {error}") from error


def check_weights(path: str | Path, lm: LanguageModel) -> None:
    """Check that the files of a directory have each of the model's weights.

    Raises:
        ConfigError: files are damaged, or belong to another model than config.json says.
    """
    specs = ResolvedSpecs.of(fs.match_specs(lm.params, [("*", fs.LayoutSpec())])).leaves
    try:
        check_model_directory(Path(path), specs, lm.model)
    except StateError as error:
        raise ConfigError(report(f"model={path}:", [str(error)])) from None


def refuse_codes(folder: Path) -> None:
    """Refuse a directory whose weights are codes of a quantisation.

    Raises:
        ConfigError: they are. The error says which, and what to name in their place.
    """
    if "quantization_config" not in read_json(folder / "config.json"):
        return
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                codes = find_codes(file.keys())
        except (OSError, SafetensorError):
            continue  # the error is raised where weights are read
        if codes:
            raise ConfigError(
                f"model={folder}: {path.name} holds codes of {codes[0]}, as {codes[1]!r}. "
                "Fix: name the directory that it was made from; method=qlora4 makes codes of it itself."
            )
