"""Tuning: what a method makes of a language model: which leaves train, how the others are kept, and the
functions of the tree that comes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import fnshard as fs
from experiments.lib.checks import ConfigError
from experiments.lib.config import PrecisionConfig
from experiments.lib.plan import axis_of, dtypes_of
from experiments.tuning.config import ALL_LINEAR, EXPERTS, VISION_LINEAR, FinetuneConfig, MethodConfig
from experiments.tuning.lm import LanguageModel
from fnshard import tree
from fnshard.adapters.lora import Lora, matched_leaves, settings_of, with_adapters
from fnshard.errors import CheckpointError, SpecError, StateError, report
from fnshard.layout.spec import P

Fn = Callable[..., Any]
CODECS = {"qlora8": "int8", "qlora4": "nf4"}  # of the frozen matrices, by method


@dataclass(frozen=True)
class Tuning:
    """A language model with a method.

    Args:
        params: the tree that the step is of: the model's leaves; or `{"base", "adapters"}`; or, where the
            whole model is tuned against its former self or beside a value head, `{"policy"}` with
            `"reference"`. `"value"`, of any but the first, is the value head's leaf. On meta, but adapters.
        lora: of the adapters, if there are any.
        coded: paths, in the tree, of leaves that are kept as codes.
    """

    lm: LanguageModel
    method: MethodConfig
    params: Any
    lora: Lora | None = None
    coded: tuple[str, ...] = ()

    @property
    def models(self) -> tuple[str, ...]:
        """Return where in the tree the model's leaves are; "" is the tree itself."""
        if self.lora is not None:
            return ("base",)
        return tuple(name for name in ("policy", "reference") if name in self.params) or ("",)

    @property
    def stacked(self) -> bool:
        """Return whether adapters have a matrix for each expert, for which PEFT's files have no place
        here."""
        adapters = self.params.get("adapters", {}) if self.lora is not None else {}
        return any(parts["a"].dim() > 2 for parts in adapters.values())

    def policy(self, fn: Fn, *, training: bool = False) -> Fn:
        """Make `fn(the model's leaves, ...)` a function of the tree: the model as it is tuned."""
        if self.lora is not None:
            return with_adapters(fn, self.lora if training else replace(self.lora, dropout=0.0))
        return _of(fn, self.models[0])

    def reference(self, fn: Fn) -> Fn:
        """Make `fn(the model's leaves, ...)` a function of the tree: the model as it was."""
        return _of(fn, self.models[-1])

    def specs(self, mesh: fs.Mesh, precision: PrecisionConfig, preset: Fn, **policy: Any) -> Any:
        """Make specs by a preset of `fs.presets`; what is frozen rests in the dtype that it is computed
        in."""
        named, structure = tree.flatten_with_paths(self.params)
        units = fs.units.numeric(self.params)
        dtypes = dtypes_of(precision)
        narrow = dtypes["compute_dtype"] == torch.float8_e4m3fn  # which is for what trains
        compute = torch.bfloat16 if narrow else dtypes["compute_dtype"]
        frozen = {"storage_dtype": compute, "compute_dtype": compute}
        where = {"trainable": False, "memory": policy.get("memory", "device")}
        rest = [p for p in named if p not in self.coded]
        kinds = [
            ([p for p in rest if named[p].requires_grad], dtypes | policy),
            ([p for p in rest if not named[p].requires_grad], frozen | where),
            (list(self.coded), {**frozen, **where, "codec": CODECS.get(self.method.name)}),
        ]
        computes = self._computes(mesh)
        # Codes are gathered; what is computed with them is then of all experts.
        expert = None if any("experts" in p for p in self.coded) else axis_of("expert", mesh)
        made: dict[str, Any] = {}
        for paths, fields in kinds:
            if paths:
                tensor = {p: computes[p] for p in paths if p in computes}
                stacked = expert if any("experts" in p and named[p].dim() == 3 for p in paths) else None
                made |= preset(
                    {p: named[p] for p in paths}, mesh, units=lambda _: units, tensor=tensor, expert=stacked,
                    **fields,
                )  # fmt: skip
        return tree.unflatten([made[p] for p in named], structure)

    def _computes(self, mesh: fs.Mesh) -> dict[str, P]:
        """`LayoutSpec.compute` by path: adapters split as their matrices do; codes only by rows."""
        axis = axis_of("tensor", mesh)
        if axis is None:
            return {}
        named = tree.flatten_with_paths(self.params)[0]
        found = {p: spec.compute for p, spec in fs.presets.no_shard(named, mesh, tensor=axis).items()}
        return found | {p: P(*found[p].parts[:1]) for p in self.coded}

    def codes(self, blocks: Any) -> str:
        """Return a line on what a rank holds of the coded leaves; nothing where there are none."""
        if not self.coded:
            return ""
        leaves = tree.flatten_with_paths(blocks)[0]
        size = sum(v.nbytes for p, v in leaves.items() if p.rpartition(".")[0] in self.coded)
        named = tree.flatten_with_paths(self.params)[0]
        plain = 2 * sum(named[p].numel() for p in self.coded)
        return f"codes: {size / 1e6:.1f} MB on this rank, {size / plain:.3f} of bf16 on every rank\n"


def _of(fn: Fn, place: str) -> Fn:
    return (lambda params, *batch: fn(params[place], *batch)) if place else fn


def tuning_of(config: FinetuneConfig, lm: LanguageModel) -> Tuning:
    """Make the configuration's method, for a model.

    Raises:
        ConfigError: targets that the model has not, a rank that is more than its matrices are wide.
    """
    chosen, kind = config.method, config.objective.kind
    check_method(config, lm)
    value = {"value": _value_head(lm)} if kind.values else {}
    if chosen.name == "full":
        params = _partly_frozen(lm.params, chosen.freeze)
        if not (kind.reference or value):
            return Tuning(lm, chosen, params)
        frozen = {p: _frozen(leaf) for p, leaf in lm.params.items()} if kind.reference else None
        reference = {"reference": frozen} if frozen else {}
        return Tuning(lm, chosen, {"policy": params, **reference, **value})
    fn, params = fs.lora(lm.logits, lm.params, **_adapters(chosen, lm), seed=config.run.seed)
    coded = tuple(f"base.{p}" for p in (*lm.matrices(), *lm.experts())) if chosen.name in CODECS else ()
    return Tuning(lm, chosen, {**params, **value}, fn.lora, coded)


def check_method(config: FinetuneConfig, lm: LanguageModel) -> None:
    """Refuse a method that a model cannot have, before anything is made of it.

    Raises:
        ConfigError: as `tuning_of`.
    """
    chosen = config.method
    if config.mesh.expert > 1 and not lm.experts():
        raise ConfigError(
            f"mesh.expert={config.mesh.expert}: the model has no experts. Fix: mesh.expert=1, mesh.shard="
            f"{config.mesh.expert}."
        )
    if chosen.name == "full":
        _partly_frozen(lm.params, chosen.freeze)
        return
    try:
        settings = settings_of(lm.params, **_adapters(chosen, lm))
    except SpecError as error:
        raise ConfigError(f"method.targets={chosen.targets}, method.rank={chosen.rank}: {error}") from None
    if config.export in ("adapters", "both") and any(lm.params[p].dim() > 2 for p in settings.targets):
        raise ConfigError(
            f"export={config.export}: adapters of experts are not written as PEFT's. Fix: export=merged."
        )


def _adapters(chosen: MethodConfig, lm: LanguageModel) -> dict[str, Any]:
    """Return the arguments of `fs.lora`, of a method for a model."""
    named = {ALL_LINEAR: lm.matrices(), VISION_LINEAR: lm.vision_matrices(), EXPERTS: lm.experts()}
    targets = [path for part in chosen.targets.split("|") for path in named.get(part) or [part]]
    paths = set(matched_leaves("targets", targets, lm.params))
    return {
        "rank": chosen.rank, "alpha": chosen.alpha, "targets": targets,
        "transposed": "|".join(p for p in lm.transposed() if p in paths), "dropout": chosen.dropout,
        "rank_stabilised": chosen.rank_stabilised, "dora": chosen.dora,
    }  # fmt: skip


def _partly_frozen(params: dict[str, torch.Tensor], globs: str | None) -> dict[str, torch.Tensor]:
    try:
        frozen = set() if globs is None else set(matched_leaves("freeze", globs, params))
    except SpecError as error:
        raise ConfigError(f"method.freeze={globs}: {error}") from None
    return {path: _frozen(leaf) if path in frozen else leaf for path, leaf in params.items()}


def _value_head(lm: LanguageModel) -> dict[str, torch.Tensor]:
    """Make a row that makes a token's value of its hidden state; at first 0, on every rank."""
    head = lm.head(lm.params)
    return {"weight": torch.nn.Parameter(torch.zeros(head.shape[1], dtype=head.dtype))}


def _frozen(leaf: torch.Tensor) -> torch.Tensor:
    """Return a copy of a leaf that does not train."""
    if not isinstance(leaf, torch.nn.Parameter):
        return leaf
    made = torch.nn.Parameter(leaf.detach(), requires_grad=False)
    made.__dict__.update({k: v for k, v in leaf.__dict__.items() if k == "tied_names"})
    return made


def first_state(tuning: Tuning, step: Any, specs: Any, mesh: fs.Mesh, path: str, seed: int) -> fs.TrainState:
    """Make the state before the first step: the model from its directory, each rank its own shards alone."""
    blocks: Any = {}
    try:
        for place in tuning.models:
            part = specs[place] if place else specs
            loaded = fs.hf.load(path, part, mesh, model=tuning.lm.model)
            blocks = {**blocks, place: loaded} if place else loaded
    except (StateError, CheckpointError) as error:  # the latter where another rank has found it
        raise ConfigError(report(f"model={path}:", [str(error)])) from None
    for place in ("adapters", "value"):
        if place in tuning.params:
            blocks[place] = fs.shard(tuning.params[place], specs[place], mesh)
    return step.adopt(blocks, seed=seed)
