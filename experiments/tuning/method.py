"""The method, the plan and the peak rate of a job."""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import fnshard as fs
from experiments.lib.plan import Plan, plan_step
from experiments.lib.task import make_optimizer
from experiments.tuning.config import OBJECTIVE_KINDS, FinetuneConfig
from experiments.tuning.lm import LanguageModel
from experiments.tuning.objectives import OBJECTIVES
from experiments.tuning.tuning import Tuning, tuning_of
from fnshard import tree

# `{(data, what trains): ((parameters of the base below, peak rate of AdamW), ...)}`. Adapters, as codes
# or not: QLoRA's (Dettmers et al. 2023, table 9). All of a model: Alpaca's and Llama 2's. DPO: Zephyr's
# (Tunstall et al. 2023). Below 50M parameters, the tiny bases here: 5e-3 was tried, the rest are guesses.
TINY, LARGE = 5e7, 2e10
DEFAULT_RATES: Mapping[tuple[str, str], Sequence[tuple[float, float]]] = {
    ("samples", "full"): ((TINY, 1e-3), (3e9, 2e-5), (LARGE, 1e-5), (math.inf, 5e-6)),
    ("samples", "adapters"): ((TINY, 5e-3), (LARGE, 2e-4), (math.inf, 1e-4)),
    ("pairs", "full"): ((TINY, 1e-4), (math.inf, 5e-7)),
    ("prompts", "full"): ((TINY, 3e-4), (math.inf, 1e-6)),
    ("prompts", "adapters"): ((TINY, 1e-3), (math.inf, 1e-5)),
    ("pairs", "adapters"): ((TINY, 5e-4), (math.inf, 5e-6)),
}


def default_rate(objective: str, method: str, parameters: int) -> float:
    """Return the peak rate where none is named.

    Args:
        objective: a name of `OBJECTIVE_KINDS`.
        method: "full", or one with adapters.
        parameters: of the base.

    >>> default_rate("sft", "qlora4", 8_000_000_000), default_rate("dpo", "full", 8_000_000_000)
    (0.0002, 5e-07)
    """
    rows = DEFAULT_RATES[OBJECTIVE_KINDS[objective].data, "full" if method == "full" else "adapters"]
    return next(rate for below, rate in rows if parameters < below)


EMBEDDING = re.compile(r"embed|\bwte\b|\bwpe\b")


@dataclass(frozen=True)
class MethodPlan:
    """The method of a run: what trains, by which plan, and why; `rate`: the peak, as it was named or by
    default."""

    tuning: Tuning
    optimizer: fs.optim.Optimizer
    plan: Plan
    why: str
    rate: float


def choose_method(config: FinetuneConfig, lm: LanguageModel, mesh: fs.Mesh, batch: Any) -> MethodPlan:
    """Choose by the configuration's method and strategy; the same on every rank.

    Raises:
        BudgetError: nothing fits into `run.device_gb`.
        ConfigError: see `tuning.tuning_of`.
    """
    tuning = tuning_of(config, lm)
    optimizer = _optimizer(config, tuning)
    loss = OBJECTIVES[config.objective.name](tuning, config.objective, training=True)
    specs = partial(tuning.specs, mesh, config.precision)
    plan = plan_step(
        config.strategy, config.run, loss, tuning.params, mesh, optimizer,
        batch=(batch,), specs=specs, hardware=config.hardware.name, along=config.mesh.options,
    )  # fmt: skip
    why = f"method={tuning.method.name}: {_counts(tuning)}\n{_rate_in_words(config, tuning)}"
    return MethodPlan(tuning, optimizer, plan, why, rate_of(config, tuning))


def _optimizer(config: FinetuneConfig, tuning: Tuning) -> fs.optim.Optimizer:
    """Make the optimizer; norms, biases and embeddings do not decay."""
    named = tree.flatten_with_paths(tuning.params)[0]
    trained = {p: v for p, v in named.items() if v.requires_grad}
    still = [p for p, v in trained.items() if v.dim() < 2 or EMBEDDING.search(p.partition(".")[2])]
    chosen = replace(config.optimizer, lr=rate_of(config, tuning))
    if len(still) == len(trained):  # a rule for the rest would match nothing
        chosen, still = replace(chosen, weight_decay=0.0), []
    rates = [("adapters.*.b", config.method.b_rate), ("*", 1.0)] if config.method.b_rate != 1 else 1.0
    undecayed = tuple(glob.escape(p) for p in still)
    return make_optimizer(chosen, config.schedule, config.run.steps, undecayed, rates)


def rate_of(config: FinetuneConfig, tuning: Tuning) -> float:
    """Return the peak rate: the configuration's, or the default of this method, objective and base."""
    if config.optimizer.lr is not None:
        return config.optimizer.lr
    return default_rate(config.objective.name, tuning.method.name, _size_of_base(tuning))


def _size_of_base(tuning: Tuning) -> int:
    """Return how many parameters the model has; its buffers, such as rotary tables, are none."""
    return sum(leaf.numel() for leaf in tuning.lm.model.parameters())


def _rate_in_words(config: FinetuneConfig, tuning: Tuning) -> str:
    text = f"optimizer.lr={rate_of(config, tuning):g}"
    if config.optimizer.lr is not None:
        return text
    what = f"objective={config.objective.name} method={tuning.method.name}"
    return f"{text}, the default of {what} and a base of {_size_of_base(tuning):,} parameters"


def _counts(tuning: Tuning) -> str:
    named = tree.flatten_with_paths(tuning.params)[0]
    trains = sum(v.numel() for v in named.values() if v.requires_grad)
    buffers = {f"{place}.{name}".lstrip(".") for place in tuning.models
               for name, _ in tuning.lm.model.named_buffers()}  # fmt: skip
    total = sum(v.numel() for path, v in named.items() if path not in buffers)
    coded = sum(named[p].numel() for p in tuning.coded)
    kept = f", {coded:,} of them as codes" if coded else ""
    return f"{trains:,} of {total:,} parameters train{kept}"
