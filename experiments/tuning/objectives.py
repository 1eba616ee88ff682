"""Losses of language models that are tuned, each of a batch, as a pure function of a `Tuning`'s tree;
`table.OBJECTIVES` has all objectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import fnshard as fs
from experiments.data.prepared import SIDES
from experiments.tuning.config import ObjectiveConfig
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

    Of the others than dpo an answer's log-probability is the mean of its tokens'.

    The batch: `chosen` and `rejected`, each int64 [B, T] `tokens` and `targets`; or packed pairs, int64
    [B, T] `tokens`, `targets`, `positions` and `documents`, with `pairs`, as `dataset.Samples` has them.
    """

    def logprobs(params: Any, batch: Batch) -> Tensor:
        sums, lengths = document_logprobs(tuning.lm, params, batch)
        return sums if config.name == "dpo" else sums / lengths.clamp(min=1)

    policy, reference = tuning.policy(logprobs, training=training), tuning.reference(logprobs)
    of_name = {"dpo": {"label_smoothing": config.label_smoothing}, "simpo": {"margin": config.margin}}
    how = {"beta": config.beta or config.kind.beta, **of_name.get(config.name, {})}

    def loss(params: Any, batch: Batch) -> tuple[Mean, dict[str, Mean]]:
        both, counted = sides_of(batch)
        numbers = split_sides(policy(params, both), both)
        if config.kind.reference:
            with torch.no_grad():
                numbers += split_sides(reference(params, both), both)
        return getattr(fs.losses.policy, config.name)(*numbers, counted=counted, **how)

    return loss


def policy_gradient(tuning: Tuning, config: ObjectiveConfig, *, training: bool) -> Loss:
    """A loss by rewards, the function of `fs.losses.policy` that the config names, on the policy's answers.

    The batch: `tokens` and `targets`, int64 [N, T]; `sampler` and `entropy`, fp32 [N, T]; `advantages`, fp32
    [N, 1]; `rewards`, fp32 [N], and `each` of them by name. Of ppo `advantages`, `values` and `returns` are
    fp32 [N, T]. Of packed answers `advantages` are [B, T], `positions` and `documents` int64 [B, T], and
    `rewards` [B, S] are of documents 1 to S, of which bool `answers` [B, S] are some.
    """
    lm, hot = tuning.lm, config.temperature

    def both(params: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        hidden = lm.hidden(params, batch["tokens"], batch.get("positions"), batch.get("documents"))
        return hidden, -lm.losses(params, hidden, batch["targets"], temperature=hot)

    policy, reference = tuning.policy(both, training=training), tuning.reference(both)
    how = {"max_length": config.tokens} if config.name == "dr_grpo" else {}

    def loss(params: Any, batch: Batch) -> tuple[Mean, dict[str, Mean]]:
        hidden, logprobs = policy(params, batch)
        inputs = PolicyInputs(
            logprobs, batch["sampler"], batch["advantages"], batch["targets"] != IGNORE,
            entropy=batch["entropy"],
        )  # fmt: skip
        rows = float(len(batch["rewards"]))
        if "answers" in batch:
            count, rows = batch["answers"].shape[1], batch["answers"].sum()
            inputs = replace(inputs, sequences=batch["documents"] - 1, max_sequences=count)
        if config.kind.reference:
            with torch.no_grad():
                inputs = replace(inputs, reference=reference(params, batch)[1])
        values = (value_of(params, hidden), batch["values"], batch["returns"]) if config.kind.values else ()
        loss, aux = getattr(fs.losses.policy, config.name)(inputs, *values, beta=config.beta or 0.0, **how)
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


def sides_of(batch: Batch) -> tuple[Batch, Tensor]:
    """Return a batch of pairs as one of documents, and which of its pairs count, bool [N]: of a pair that is
    padding neither side has a token."""
    if "pairs" in batch:
        return batch, batch["pairs"].flatten()
    sides = next(names for names in SIDES.values() if names[0] in batch)
    both = {n: torch.cat([batch[side][n] for side in sides]) for n in ("tokens", "targets")}
    learned = [(batch[side]["targets"] != IGNORE).any(1) for side in sides]
    return both, learned[0] & learned[1]


def split_sides(numbers: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the numbers of both sides' documents, [N, ...] each, of those of a batch of `sides_of`:
    [B, ...], or [B, 2 N, ...] of packed pairs."""
    if "pairs" in batch:
        return numbers.unflatten(1, (-1, 2)).flatten(0, 1).unbind(1)
    return numbers.chunk(2)


def document_logprobs(lm: LanguageModel, params: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return log p of each document's learned tokens, fp32, and how many these are.

    [B]: a row is a document, which is padded at the end; or, of packed pairs, [B, 2 N].
    """
    counted = batch["targets"] != IGNORE
    if "pairs" not in batch:
        return row_logprobs(lm, params, batch), counted.sum(1)
    hidden = lm.hidden(params, batch["tokens"], batch["positions"], batch["documents"])
    each = -lm.losses(params, hidden, batch["targets"])
    member = members(batch["documents"], 2 * batch["pairs"].shape[1], each.dtype)
    return torch.einsum("bt,bts->bs", each, member), torch.einsum(
        "bt,bts->bs", counted.to(each.dtype), member
    )


def members(documents: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return which of `count` documents, from 1, each position is of: [B, T, count] of 0 and 1."""
    numbers = torch.arange(1, count + 1, device=documents.device)
    return (documents[..., None] == numbers).to(dtype)
