"""Method: decide which leaves of a language model train, and how the others are kept.

`make_tuning` makes the tree that a step has (the model, adapters, heads, a reference), and functions of it.
`plan_method` plans the step, and chooses the peak rate. `make_first_state` loads the leaves.
"""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import fnshard as fs
from experiments.lib.checks import ConfigError
from experiments.lib.config import PrecisionConfig
from experiments.lib.plan import Plan, axis_of, dtypes_of, plan_step
from experiments.lib.task import make_optimizer
from experiments.tuning.config import (
    ALL_LINEAR,
    EXPERTS,
    OBJECTIVE_KINDS,
    VISION_LINEAR,
    FinetuneConfig,
    MethodConfig,
)
from experiments.tuning.lm import LanguageModel, from_directory
from fnshard import tree
from fnshard.adapters.lora import Lora, match_leaves, settings_of, with_adapters
from fnshard.errors import CheckpointError, SpecError, StateError, report
from fnshard.layout.spec import P

Fn = Callable[..., Any]
CODECS = {"qlora8": "int8", "qlora4": "nf4"}  # the codecs of frozen matrices, by method


@dataclass(frozen=True)
class Tuning:
    """A language model with a method.

    Args:
        params: the tree of the step. It is the model's leaves, or `{"base", "adapters"}`, or `{"policy"}`
            with `"reference"` if the whole model is tuned against its former self or beside a head. All but
            the first may have the leaves of heads, `"value"` and `"score"`. Leaves are on meta, except for
            adapters and heads.
        lora: the settings of adapters, if there are any.
        teacher: the model that a student learns from, whose frozen leaves are `"teacher"` in the tree.
        coded: the paths, in the tree, of leaves that are kept as codes.
    """

    lm: LanguageModel
    method: MethodConfig
    params: Any
    lora: Lora | None = None
    coded: tuple[str, ...] = ()
    teacher: LanguageModel | None = None

    @property
    def models(self) -> tuple[str, ...]:
        """Return the keys of the tree that hold the model's leaves; "" stands for the whole tree."""
        if self.lora is not None:
            return ("base",)
        return tuple(name for name in ("policy", "reference") if name in self.params) or ("",)

    @property
    def has_expert_adapters(self) -> bool:
        """Return whether adapters have a matrix for each expert. PEFT's files have no format for these."""
        adapters = self.params.get("adapters", {}) if self.lora is not None else {}
        return any(parts["a"].dim() > 2 for parts in adapters.values())

    def policy(self, fn: Fn, *, training: bool = False) -> Fn:
        """Make `fn(the model's leaves, ...)` a function of the tree, with the model as it is tuned."""
        if self.lora is not None:
            return with_adapters(fn, self.lora if training else replace(self.lora, dropout=0.0))
        return _select_part(fn, self.models[0])

    def reference(self, fn: Fn) -> Fn:
        """Make `fn(the model's leaves, ...)` a function of the tree, with the model as it was.

        Without a frozen copy that is the tuned model, and objectives that need no reference do not call it.
        """
        return _select_part(fn, self.models[-1])

    def specs(self, mesh: fs.Mesh, precision: PrecisionConfig, preset: Fn, **storage: Any) -> Any:
        """Make specs by a preset of `fs.presets`. Frozen leaves are stored in their compute dtype.

        Args:
            storage: keywords of the preset for leaves that train, such as `optimizer_memory`. Frozen
                leaves have only `memory` of these.
        """
        # Leaves that train, frozen leaves and codes each have storage of their own.
        named, structure = tree.flatten_with_paths(self.params)
        units = fs.units.numeric(self.params)
        dtypes = dtypes_of(precision)
        is_fp8 = dtypes["compute_dtype"] == torch.float8_e4m3fn  # only leaves that train can have it
        compute = torch.bfloat16 if is_fp8 else dtypes["compute_dtype"]
        frozen = {
            "storage_dtype": compute, "compute_dtype": compute, "trainable": False,
            "memory": storage.get("memory", "device"),
        }  # fmt: skip
        plain = [p for p in named if p not in self.coded]
        kinds = [
            ([p for p in plain if named[p].requires_grad], dtypes | storage),
            ([p for p in plain if not named[p].requires_grad], frozen),
            (list(self.coded), {**frozen, "codec": CODECS.get(self.method.name)}),
        ]

        # Over a tensor axis adapters are split as their matrices are, and codes only by rows.
        axis = axis_of("tensor", mesh)
        splits: dict[str, P] = {}
        if axis is not None:
            splits = {p: spec.compute for p, spec in fs.presets.no_shard(named, mesh, tensor=axis).items()}
            splits |= {p: P(*splits[p].parts[:1]) for p in self.coded}

        # Codes are gathered, so that all experts are computed with them.
        expert = None if any("experts" in p for p in self.coded) else axis_of("expert", mesh)
        specs: dict[str, Any] = {}
        for paths, fields in kinds:
            if paths:
                tensor = {p: splits[p] for p in paths if p in splits}
                stacked = expert if any("experts" in p and named[p].dim() == 3 for p in paths) else None
                specs |= preset(
                    {p: named[p] for p in paths}, mesh, units=lambda _: units, tensor=tensor, expert=stacked,
                    **fields,
                )  # fmt: skip
        return tree.unflatten([specs[p] for p in named], structure)

    def describe_codes(self, blocks: Any) -> str:
        """Return a line on the bytes of codes that a rank holds, or "" if there are none."""
        if not self.coded:
            return ""
        leaves = tree.flatten_with_paths(blocks)[0]
        size = sum(v.nbytes for p, v in leaves.items() if p.rpartition(".")[0] in self.coded)
        named = tree.flatten_with_paths(self.params)[0]
        plain = 2 * sum(named[p].numel() for p in self.coded)
        return f"codes: {size / 1e6:.1f} MB on this rank, {size / plain:.3f} of bf16 on every rank\n"


def _select_part(fn: Fn, part: str) -> Fn:
    """Turn a function of the model's leaves into one of the tree, which holds them under the key `part`."""
    return (lambda params, *batch: fn(params[part], *batch)) if part else fn


def make_tuning(config: FinetuneConfig, lm: LanguageModel) -> Tuning:
    """Make the configuration's method for a model.

    Raises:
        ConfigError: the model has no such targets, or its matrices are narrower than the rank.
    """
    chosen, kind = config.method, config.objective.kind
    check_method(config, lm)

    # The leaves beside the model's: heads, and a teacher.
    beside: dict[str, Any] = {}
    if kind.values:
        beside["value"] = _make_head(lm)
    if kind.score:
        beside["score"] = _make_head(lm, len(config.objective.classes or ("score",)))
    teacher = from_directory(config.objective.teacher) if kind.teacher else None
    if teacher is not None:
        beside["teacher"] = {p: _freeze(leaf) for p, leaf in teacher.params.items()}

    # The whole model trains, beside a frozen copy if the objective compares with the model as it was.
    if chosen.name == "full":
        params = _freeze_some(lm.params, chosen.freeze)
        if kind.reference:
            beside["reference"] = {p: _freeze(leaf) for p, leaf in lm.params.items()}
        return Tuning(lm, chosen, {"policy": params, **beside} if beside else params, teacher=teacher)

    # Adapters train. The frozen base is the reference, so it needs no copy.
    fn, params = fs.lora(lm.logits, lm.params, **_lora_arguments(chosen, lm), seed=config.run.seed)
    coded = tuple(f"base.{p}" for p in (*lm.matrices(), *lm.experts())) if chosen.name in CODECS else ()
    return Tuning(lm, chosen, {**params, **beside}, fn.lora, coded, teacher)


def check_method(config: FinetuneConfig, lm: LanguageModel) -> None:
    """Check that a model can have a method, before anything is made of it.

    Raises:
        ConfigError: it cannot, for one of the reasons of `make_tuning`.
    """
    chosen = config.method
    if config.mesh.expert > 1 and not lm.experts():
        raise ConfigError(
            f"mesh.expert={config.mesh.expert}: the model has no experts. Fix: mesh.expert=1, mesh.shard="
            f"{config.mesh.expert}."
        )
    if chosen.name == "full":
        _freeze_some(lm.params, chosen.freeze)
        return
    try:
        settings = settings_of(lm.params, **_lora_arguments(chosen, lm))
    except SpecError as error:
        raise ConfigError(f"method.targets={chosen.targets}, method.rank={chosen.rank}: {error}") from None
    if config.export in ("adapters", "both") and any(lm.params[p].dim() > 2 for p in settings.targets):
        raise ConfigError(
            f"export={config.export}: adapters of experts are not written as PEFT's. Fix: export=merged."
        )


def _lora_arguments(chosen: MethodConfig, lm: LanguageModel) -> dict[str, Any]:
    """Return the arguments of `fs.lora` for a method and a model."""
    named = {ALL_LINEAR: lm.matrices(), VISION_LINEAR: lm.vision_matrices(), EXPERTS: lm.experts()}
    targets = [path for part in chosen.targets.split("|") for path in named.get(part) or [part]]
    paths = set(match_leaves("targets", targets, lm.params))
    return {
        "rank": chosen.rank, "alpha": chosen.alpha, "targets": targets,
        "transposed": "|".join(p for p in lm.transposed_matrices() if p in paths), "dropout": chosen.dropout,
        "rank_stabilised": chosen.rank_stabilised, "dora": chosen.dora,
    }  # fmt: skip


def _freeze_some(params: dict[str, torch.Tensor], globs: str | None) -> dict[str, torch.Tensor]:
    """Return the leaves of a model, of which those that globs name, joined by "|", do not train."""
    try:
        frozen = set() if globs is None else set(match_leaves("freeze", globs, params))
    except SpecError as error:
        raise ConfigError(f"method.freeze={globs}: {error}") from None
    return {path: _freeze(leaf) if path in frozen else leaf for path, leaf in params.items()}


def _make_head(lm: LanguageModel, rows: int | None = None) -> dict[str, torch.Tensor]:
    """Make a head that gives a number, or `rows` of them, for a token's hidden state. It begins as 0."""
    head = lm.head(lm.params)
    shape = head.shape[1:] if rows is None else (rows, head.shape[1])
    return {"weight": torch.nn.Parameter(torch.zeros(shape, dtype=head.dtype))}


def _freeze(leaf: torch.Tensor) -> torch.Tensor:
    """Return a copy of a leaf that does not train."""
    if not isinstance(leaf, torch.nn.Parameter):
        return leaf
    frozen = torch.nn.Parameter(leaf.detach(), requires_grad=False)
    if "tied_names" in leaf.__dict__:  # the other names of a tied leaf, as `fs.make_functional` notes them
        frozen.__dict__["tied_names"] = leaf.__dict__["tied_names"]
    return frozen


def make_first_state(
    tuning: Tuning, step: Any, specs: Any, mesh: fs.Mesh, path: str, seed: int, teacher: str | None = None
) -> fs.TrainState:
    """Make the state before the first step, in which each rank reads only its own shards.

    The model comes from its directory, and the teacher from its own.
    """
    blocks: Any = {}
    try:
        for part in tuning.models:
            loaded = fs.hf.load(path, specs[part] if part else specs, mesh, model=tuning.lm.model)
            blocks = {**blocks, part: loaded} if part else loaded
        if tuning.teacher is not None:
            path = teacher  # for the error
            blocks["teacher"] = fs.hf.load(teacher, specs["teacher"], mesh, model=tuning.teacher.model)
    except (StateError, CheckpointError) as error:  # the latter if another rank has found the error
        raise ConfigError(report(f"model={path}:", [str(error)])) from None
    # Adapters and heads are in no file, and have their first values already.
    for part in ("adapters", "value", "score"):
        if part in tuning.params:
            blocks[part] = fs.shard(tuning.params[part], specs[part], mesh)
    return step.adopt(blocks, seed=seed)


# ------------------------------------------------------------------ the plan and the rate

# `{(data, what trains): ((parameters of the base below, peak rate of AdamW), ...)}`. Rates of adapters, with
# codes or without, are QLoRA's (Dettmers et al. 2023, table 9), and those of whole models Alpaca's and Llama
# 2's. Rates of pairs are Zephyr's (Tunstall et al. 2023). For the tiny bases here, below 50M parameters, 5e-3
# was tried, and the others are guesses.
TINY, LARGE = 5e7, 2e10
DEFAULT_RATES: Mapping[tuple[str, str], Sequence[tuple[float, float]]] = {
    ("samples", "full"): ((TINY, 1e-3), (3e9, 2e-5), (LARGE, 1e-5), (math.inf, 5e-6)),
    ("samples", "adapters"): ((TINY, 5e-3), (LARGE, 2e-4), (math.inf, 1e-4)),
    ("pairs", "full"): ((TINY, 1e-4), (math.inf, 5e-7)),
    ("prompts", "full"): ((TINY, 3e-4), (math.inf, 1e-6)),
    ("prompts", "adapters"): ((TINY, 1e-3), (math.inf, 1e-5)),
    ("pairs", "adapters"): ((TINY, 5e-4), (math.inf, 5e-6)),
    ("heads", "full"): ((TINY, 1e-3), (math.inf, 1e-5)),
    ("heads", "adapters"): ((TINY, 5e-3), (math.inf, 1e-4)),
    ("twins", "full"): ((TINY, 5e-4), (math.inf, 1e-5)),
    ("twins", "adapters"): ((TINY, 2e-3), (math.inf, 1e-4)),  # 5e-3 leaves all texts at one point
}


def default_rate(objective: str, method: str, parameters: int) -> float:
    """Return the peak rate of a run that names none.

    Args:
        objective: a name of `OBJECTIVE_KINDS`.
        method: "full", or a method with adapters.
        parameters: the number of the base's parameters.

    >>> default_rate("sft", "qlora4", 8_000_000_000), default_rate("dpo", "full", 8_000_000_000)
    (0.0002, 5e-07)
    """
    kind = OBJECTIVE_KINDS[objective]
    rows = DEFAULT_RATES[kind.rates or kind.data, "full" if method == "full" else "adapters"]
    return next(rate for below, rate in rows if parameters < below)


EMBEDDING = re.compile(r"embed|\bwte\b|\bwpe\b")


@dataclass(frozen=True)
class MethodPlan:
    """The method of a run, with its plan.

    Args:
        why: what trains and at what rate, in words.
        rate: the peak rate, as it was named or by default.
    """

    tuning: Tuning
    optimizer: fs.optim.Optimizer
    plan: Plan
    why: str
    rate: float


def plan_method(
    config: FinetuneConfig, tuning: Tuning, loss: Fn, mesh: fs.Mesh, batch: Any, micro_rows: int | None = None
) -> MethodPlan:
    """Plan a method's step by the configuration's strategy. The plan is the same on every rank.

    Args:
        loss: the objective's loss, as a function of the tuning's tree and a batch.
        micro_rows: the rows of a micro-batch, if there is a budget of tokens.

    Raises:
        BudgetError: nothing fits into `run.device_gb`.
    """
    optimizer = _make_optimizer(config, tuning)
    specs = partial(tuning.specs, mesh, config.precision)
    plan = plan_step(
        config.strategy, config.run, loss, tuning.params, mesh, optimizer,
        batch=(batch,), specs=specs, hardware=config.hardware.name,
        along={**config.mesh.options, "micro_rows": micro_rows},
    )  # fmt: skip
    rate = choose_rate(config, tuning)
    why = f"method={tuning.method.name}: {_describe_parameters(tuning)}\noptimizer.lr={rate:g}"
    if config.optimizer.lr is None:
        chosen_by = f"objective={config.objective.name} method={tuning.method.name}"
        why += f", the default of {chosen_by} and a base of {_count_base_parameters(tuning):,} parameters"
    return MethodPlan(tuning, optimizer, plan, why, rate)


def _make_optimizer(config: FinetuneConfig, tuning: Tuning) -> fs.optim.Optimizer:
    """Make the optimizer. Norms, biases and embeddings do not decay."""
    named = tree.flatten_with_paths(tuning.params)[0]
    trained = {p: v for p, v in named.items() if v.requires_grad}
    # The whole path counts: its first part is a key such as "policy" in some methods, and a leaf's in others.
    undecayed_paths = [p for p, v in trained.items() if v.dim() < 2 or EMBEDDING.search(p)]
    chosen = replace(config.optimizer, lr=choose_rate(config, tuning))
    if len(undecayed_paths) == len(trained):  # a rule for the others would match nothing
        chosen, undecayed_paths = replace(chosen, weight_decay=0.0), []
    rates = [("adapters.*.b", config.method.b_rate), ("*", 1.0)] if config.method.b_rate != 1 else 1.0
    undecayed = tuple(glob.escape(p) for p in undecayed_paths)
    return make_optimizer(chosen, config.schedule, config.run.steps, undecayed, rates)


def choose_rate(config: FinetuneConfig, tuning: Tuning) -> float:
    """Return the peak rate: the configuration's, or the default of this method, objective and base."""
    if config.optimizer.lr is not None:
        return config.optimizer.lr
    return default_rate(config.objective.name, tuning.method.name, _count_base_parameters(tuning))


def _count_base_parameters(tuning: Tuning) -> int:
    """Count the model's parameters. Its buffers, such as rotary tables, do not count."""
    return sum(leaf.numel() for leaf in tuning.lm.model.parameters())


def _describe_parameters(tuning: Tuning) -> str:
    """Return how many parameters train, of how many, and how many are codes. Buffers do not count."""
    named = tree.flatten_with_paths(tuning.params)[0]
    trains = sum(v.numel() for v in named.values() if v.requires_grad)
    buffers = {f"{part}.{name}".lstrip(".") for part in tuning.models
               for name, _ in tuning.lm.model.named_buffers()}  # fmt: skip
    total = sum(v.numel() for path, v in named.items() if path not in buffers)
    coded = sum(named[p].numel() for p in tuning.coded)
    kept = f", {coded:,} of them as codes" if coded else ""
    return f"{trains:,} of {total:,} parameters train{kept}"
