"""Losses of language models that are tuned, each of a batch as a pure function of a `Tuning`'s tree.

`table.OBJECTIVES` has all objectives.
"""

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
    """Make the loss -log p of the learned tokens, averaged over all of them exactly.

    For a mixture of experts `balance` times its load balance is added, which is in `aux` in any case.

    The batch has int64 [B, T] `tokens`, `targets`, `positions`, and `documents` if rows are packed. That of a
    model that sees has `images`, too (`vision.Vision.rows`).
    """
    lm = replace(tuning.lm, noise=tuning.method.neftune if training else 0.0)
    mixture = bool(lm.experts())

    def losses(params: Any, batch: Batch) -> tuple[Tensor, Mean | None]:
        routers = [] if mixture else None
        inputs = (batch.get(name) for name in ("tokens", "positions", "documents", "images"))
        each = lm.losses(params, lm.hidden(params, *inputs, routers), batch["targets"])
        if routers is None:
            return each, None
        top_k = lm.model.config.get_text_config().num_experts_per_tok
        return each, fs.losses.load_balance(routers, top_k, _find_real(batch).flatten(), fs.psum)

    policy = tuning.policy(losses, training=training)

    def loss(params: Any, batch: Batch) -> tuple[Mean, dict[str, Mean]]:
        counted = (batch["targets"] != IGNORE).sum()
        each, balance = policy(params, batch)
        total, aux = each.sum(), {}
        if balance is not None:
            aux = {"balance": Mean(balance.total.detach(), balance.count)}
            # The mean divides by all ranks' targets, whereas the balance is a mean over their tokens.
            if config.balance and training:
                share = fs.psum(counted) / fs.psum(balance.count).clamp(min=1)
                total = total + config.balance * share * balance.total
        return Mean(total, counted, bound=float(batch["targets"].numel())), aux

    return loss


def _find_real(batch: Batch) -> Tensor:
    """Return which tokens of a batch are no padding, bool [B, T]."""
    if "documents" in batch:
        return batch["documents"] != 0
    # A row of one sample: positions begin anew with its padding. A row without targets is padding as a whole.
    is_first_run = (batch["positions"] == 0).cumsum(1) == 1
    return is_first_run & (batch["targets"] != IGNORE).any(1, keepdim=True)


def preference(tuning: Tuning, config: ObjectiveConfig, *, training: bool) -> Loss:
    """Make a loss of pairs, of `fs.losses.policy`. The reference is the same base without its adapters.

    An answer's log-probability is the sum of its tokens' in dpo, and their mean in the others.

    The batch has `chosen` and `rejected`, each int64 [B, T] `tokens` and `targets`. Packed pairs are int64
    [B, T] `tokens`, `targets`, `positions` and `documents`, with `pairs`, as `dataset.Samples` makes them.
    """

    def logprobs(params: Any, batch: Batch) -> Tensor:
        sums, lengths = document_logprobs(tuning.lm, params, batch)
        return sums if config.name == "dpo" else sums / lengths.clamp(min=1)

    policy, reference = tuning.policy(logprobs, training=training), tuning.reference(logprobs)
    options = {"beta": config.kind.beta if config.beta is None else config.beta}
    if config.name == "dpo":
        options["label_smoothing"] = config.label_smoothing
    elif config.name == "simpo":
        options["margin"] = config.margin

    def loss(params: Any, batch: Batch) -> tuple[Mean, dict[str, Mean]]:
        both, counted = join_sides(batch)
        numbers = split_sides(policy(params, both), both)
        if config.kind.reference:
            with torch.no_grad():
                numbers += split_sides(reference(params, both), both)
        return getattr(fs.losses.policy, config.name)(*numbers, counted=counted, **options)

    return loss


def policy_gradient(tuning: Tuning, config: ObjectiveConfig, *, training: bool) -> Loss:
    """Make the loss of `fs.losses.policy` that the config names, from rewards of the policy's answers.

    The batch has int64 [N, T] `tokens` and `targets`, fp32 [N, T] `sampler` and `entropy`, fp32 [N, 1]
    `advantages`, fp32 [N] `rewards`, and `each` of them by name. In ppo `advantages`, `values` and `returns`
    are fp32 [N, T]. Packed answers have [B, T] `advantages` and int64 [B, T] `positions` and `documents`;
    their [B, S] `rewards` are those of documents 1 to S, of which bool [B, S] `answers` marks those that
    count.
    """
    lm = tuning.lm

    def hidden_and_logprobs(params: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        hidden = lm.hidden(params, batch["tokens"], batch.get("positions"), batch.get("documents"))
        return hidden, -lm.losses(params, hidden, batch["targets"], temperature=config.temperature)

    policy = tuning.policy(hidden_and_logprobs, training=training)
    reference = tuning.reference(hidden_and_logprobs)
    policy_loss = getattr(fs.losses.policy, config.name)
    options = {"max_length": config.tokens} if config.name == "dr_grpo" else {}

    def loss(params: Any, batch: Batch) -> tuple[Mean, dict[str, Mean]]:
        hidden, logprobs = policy(params, batch)
        inputs = PolicyInputs(
            logprobs, batch["sampler"], batch["advantages"], batch["targets"] != IGNORE,
            entropy=batch["entropy"],
        )  # fmt: skip
        # Metrics are means over answers. A padded row is one; packed rows have several.
        rows = float(len(batch["rewards"]))
        if "answers" in batch:
            count, rows = batch["answers"].shape[1], batch["answers"].sum()
            inputs = replace(inputs, sequences=batch["documents"] - 1, max_sequences=count)
        if config.kind.reference:
            with torch.no_grad():
                inputs = replace(inputs, reference=reference(params, batch)[1])
        values = (value_of(params, hidden), batch["values"], batch["returns"]) if config.kind.values else ()
        loss, aux = policy_loss(inputs, *values, beta=config.beta or 0.0, **options)
        return loss, {
            **aux, "reward": Mean(batch["rewards"].sum(), rows),
            **{name: Mean(each.sum(), rows) for name, each in batch["each"].items()},
            "length": Mean(inputs.mask.sum().float(), rows),
        }  # fmt: skip

    return loss


def make_values(tuning: Tuning) -> Callable[[Any, Tensor], Tensor]:
    """Make `fn(params, tokens [N, T]) -> fp32 [N, T]`, which computes the value of each token."""
    hidden = tuning.policy(tuning.lm.hidden)
    return lambda params, tokens: value_of(params, hidden(params, tokens))


def value_of(params: Any, hidden: Tensor) -> Tensor:
    """Compute the value head's numbers [N, T] of hidden states [N, T, D], in fp32 or wider."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return hidden.to(wide) @ params["value"]["weight"].to(wide)


def row_logprobs(lm: LanguageModel, params: Any, batch: Batch) -> Tensor:
    """Compute log p of each row's learned tokens, fp32 [B]. Rows are padded at the end, not packed."""
    tokens = batch["tokens"]
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return -lm.losses(params, lm.hidden(params, tokens, positions), batch["targets"]).sum(-1)


def join_sides(batch: Batch) -> tuple[Batch, Tensor]:
    """Return a batch of pairs as one of documents, and which of its pairs count, bool [N].

    Padded rows of one side are followed by those of the other; packed pairs are documents already. A pair
    that is padding has no learned token on either side.
    """
    if "pairs" in batch:
        return batch, batch["pairs"].flatten()
    sides = next(names for names in SIDES.values() if names[0] in batch)
    both = {n: torch.cat([batch[side][n] for side in sides]) for n in ("tokens", "targets")}
    learned = [(batch[side]["targets"] != IGNORE).any(1) for side in sides]
    return both, learned[0] & learned[1]


def split_sides(numbers: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Divide numbers of the documents of a `join_sides` batch into those of either side, [N, ...] each.

    The numbers are [B, ...], or [B, 2 N, ...] for packed pairs.
    """
    if "pairs" in batch:
        return numbers.unflatten(1, (-1, 2)).flatten(0, 1).unbind(1)
    return numbers.chunk(2)


def document_logprobs(lm: LanguageModel, params: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Compute log p of each document's learned tokens, fp32, and the number of these.

    Both are [B] if each row is a document that is padded at the end, and [B, 2 N] for packed pairs.
    """
    counted = batch["targets"] != IGNORE
    if "pairs" not in batch:
        return row_logprobs(lm, params, batch), counted.sum(1)
    hidden = lm.hidden(params, batch["tokens"], batch["positions"], batch["documents"])
    each = -lm.losses(params, hidden, batch["targets"])
    member = one_hot_documents(batch["documents"], 2 * batch["pairs"].shape[1], each.dtype)
    sums = torch.einsum("bt,bts->bs", each, member)
    return sums, torch.einsum("bt,bts->bs", counted.to(each.dtype), member)


def one_hot_documents(documents: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return 1 where a position belongs to a document, from 1 to `count`, and 0 elsewhere: [B, T, count]."""
    numbers = torch.arange(1, count + 1, device=documents.device)
    return (documents[..., None] == numbers).to(dtype)
