"""Objectives: the loss of a batch, as a pure function of a `Tuning`'s tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import fnshard as fs
from experiments.tuning.config import OBJECTIVE_KINDS, ObjectiveConfig
from experiments.tuning.lm import LanguageModel
from experiments.tuning.method import Tuning
from fnshard.losses import IGNORE, Mean
from fnshard.losses.policy import PolicyInputs

Batch = Mapping[str, Any]
Loss = Callable[[Any, Batch], tuple[Mean, dict[str, Mean]]]


def sft(tuning: Tuning, config: ObjectiveConfig, *, training: bool) -> Loss:
    """-log p of the learned tokens, averaged over all of them exactly; of a mixture of experts and `balance`
    times its load balance, which its `aux` has in any case.

    The batch: int64 [B, T] `tokens`, `targets`, `positions`, and `documents` if rows are packed; `images` of
    a model that sees (`vision.Vision.rows`).
    """
    lm = replace(tuning.lm, noise=tuning.method.neftune if training else 0.0)
    mixture = bool(lm.experts())

    def losses(params: Any, batch: Batch) -> tuple[Tensor, Mean | None]:
        routers = [] if mixture else None
        seen = (batch.get(name) for name in ("tokens", "positions", "documents", "images"))
        found = lm.losses(params, lm.hidden(params, *seen, routers), batch["targets"])
        if routers is None:
            return found, None
        real = batch["documents"] != 0 if "documents" in batch else None
        top_k = lm.model.config.get_text_config().num_experts_per_tok
        counted = None if real is None else real.flatten()
        return found, fs.losses.load_balance(routers, top_k, counted, fs.psum)

    policy = tuning.policy(losses, training=training)

    def loss(params: Any, batch: Batch) -> tuple[Mean, dict[str, Mean]]:
        counted = (batch["targets"] != IGNORE).sum()
        each, balance = policy(params, batch)
        total, aux = each.sum(), {}
        if balance is not None:
            aux = {"balance": Mean(balance.total.detach(), balance.count)}
            if config.balance and training:  # a sum over ranks of what is divided by all ranks' tokens
                share = fs.psum(counted) / fs.psum(balance.count).clamp(min=1)
                total = total + config.balance * share * balance.total
        return Mean(total, counted, bound=float(batch["targets"].numel())), aux

    return loss


def preference(tuning: Tuning, config: ObjectiveConfig, *, training: bool) -> Loss:
    """A loss of pairs, of `fs.losses.policy`; the reference is the same base without its adapters.

    Of the others than dpo a row's log-probability is the mean of its tokens'.

    The batch: `chosen` and `rejected`, each int64 [B, T] `tokens` and `targets`.
    """

    def logprobs(params: Any, batch: Batch) -> Tensor:
        sums = row_logprobs(tuning.lm, params, batch)
        return sums if config.name == "dpo" else sums / (batch["targets"] != IGNORE).sum(1).clamp(min=1)

    policy, reference = tuning.policy(logprobs, training=training), tuning.reference(logprobs)
    of_name = {"dpo": {"label_smoothing": config.label_smoothing}, "simpo": {"margin": config.margin}}
    how = {"beta": config.beta or config.kind.beta, **of_name.get(config.name, {})}

    def loss(params: Any, batch: Batch) -> tuple[Mean, dict[str, Mean]]:
        both = {n: torch.cat([batch["chosen"][n], batch["rejected"][n]]) for n in ("tokens", "targets")}
        numbers = policy(params, both).chunk(2)
        if config.kind.reference:
            with torch.no_grad():
                numbers += reference(params, both).chunk(2)
        learned = [(batch[name]["targets"] != IGNORE).any(1) for name in ("chosen", "rejected")]
        counted = learned[0] & learned[1]  # of a pair that is padding neither response has a token
        return getattr(fs.losses.policy, config.name)(*numbers, counted=counted, **how)

    return loss


def policy_gradient(tuning: Tuning, config: ObjectiveConfig, *, training: bool) -> Loss:
    """A loss by rewards, the function of `fs.losses.policy` that the config names, on the policy's answers.

    The batch: `tokens` and `targets`, int64 [N, T]; `sampler` and `entropy`, fp32 [N, T]; `advantages`, fp32
    [N, 1]; `rewards`, fp32 [N], and `each` of them by name. Of ppo `advantages`, `values` and `returns` are
    fp32 [N, T].
    """
    lm, hot = tuning.lm, config.temperature

    def both(params: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        hidden = lm.hidden(params, batch["tokens"])
        return hidden, -lm.losses(params, hidden, batch["targets"], temperature=hot)

    policy, reference = tuning.policy(both, training=training), tuning.reference(both)
    how = {"max_length": config.tokens} if config.name == "dr_grpo" else {}

    def loss(params: Any, batch: Batch) -> tuple[Mean, dict[str, Mean]]:
        hidden, logprobs = policy(params, batch)
        inputs = PolicyInputs(
            logprobs, batch["sampler"], batch["advantages"], batch["targets"] != IGNORE,
            entropy=batch["entropy"],
        )  # fmt: skip
        if config.kind.reference:
            with torch.no_grad():
                inputs = replace(inputs, reference=reference(params, batch)[1])
        values = (value_of(params, hidden), batch["values"], batch["returns"]) if config.kind.values else ()
        loss, aux = getattr(fs.losses.policy, config.name)(inputs, *values, beta=config.beta or 0.0, **how)
        rows = float(len(batch["rewards"]))
        return loss, {
            **aux, "reward": Mean(batch["rewards"].sum(), rows),
            **{name: Mean(each.sum(), rows) for name, each in batch["each"].items()},
            "length": Mean(inputs.mask.sum().float(), rows),
        }  # fmt: skip

    return loss


def values_of(tuning: Tuning) -> Callable[[Any, Tensor], Tensor]:
    """The value of each token, `fn(params, tokens [N, T]) -> fp32 [N, T]`."""
    hidden = tuning.policy(tuning.lm.hidden)
    return lambda params, tokens: value_of(params, hidden(params, tokens))


def value_of(params: Any, hidden: Tensor) -> Tensor:
    """The value head's, in fp32 or wider, of hidden states [N, T, D]."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return hidden.to(wide) @ params["value"]["weight"].to(wide)


def row_logprobs(lm: LanguageModel, params: Any, batch: Batch) -> Tensor:
    """log p of each row's learned tokens, fp32 [B]; rows are padded at the end, not packed."""
    tokens = batch["tokens"]
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return -lm.losses(params, lm.hidden(params, tokens, positions), batch["targets"]).sum(-1)


BY_DATA: Mapping[str, Callable[..., Loss]] = {"samples": sft, "pairs": preference, "prompts": policy_gradient}
OBJECTIVES = {name: BY_DATA[kind.data] for name, kind in OBJECTIVE_KINDS.items()}
