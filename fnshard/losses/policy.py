"""Losses of language models that learn from rewards and preferences, as pure functions of log-probabilities.

Losses of rewards take one `PolicyInputs`. Each loss returns a `Mean` and metrics, which `fn` of a step may
return as they are. A mean is exact over ranks, micro-batches, tensor and context axes; a mean of means would
weigh tokens unequally.

Tokens that do not count (padding, prompts) may hold anything, NaN and infinity too. They are replaced before
any function sees them: a weight of 0 after a function would leave 0 * NaN in the loss or in gradients. A
probability of 0 or of 1 gives finite losses and gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fnshard.errors import SpecError, StateError, misfits, one_of
from fnshard.losses.mean import Mean

__all__ = [
    "Correction", "PolicyInputs", "bnpo", "dapo", "dpo", "dr_grpo", "gae", "group_advantages", "grpo", "gspo",
    "ipo", "kto", "orpo", "ppo", "simpo",
]  # fmt: skip

Loss = tuple[Mean, dict[str, Mean]]

LEAST_LOGPROB = -1e6  # in place of the logarithm of 0; 90,000 tokens at 11 nats each are above it
MOST_GAP = 20.0  # for larger differences of log-probabilities the exponential, 5e8, continues as a line


@dataclass(frozen=True)
class PolicyInputs:
    """The inputs of every loss of rewards, token by token.

    Float tensors are [B, T] unless another shape is named.

    Args:
        logprobs: log-probabilities of the sampled tokens by the policy that trains.
        sampler: their log-probabilities by the model that sampled them. A token for which it is not finite
            does not count.
        advantages: [B, T], or [B, 1] for whole rows.
        mask: bool, true for sampled tokens, false for prompts and padding.
        old: log-probabilities by the policy before the updates on these samples; by default `sampler`.
        reference: log-probabilities by the model to stay close to.
        sequences: int64, the number of each token's sequence within its row, from 0; by default a row is
            one sequence. A token that counts and whose number is not below `max_sequences`, or is negative,
            makes the loss infinite.
        max_sequences: the most sequences in a row.
        entropy: the policy's entropy at each token, which is only a metric.
    """

    logprobs: Tensor
    sampler: Tensor
    advantages: Tensor
    mask: Tensor
    old: Tensor | None = None
    reference: Tensor | None = None
    sequences: Tensor | None = None
    max_sequences: int = 1
    entropy: Tensor | None = None

    @property
    def counted(self) -> PolicyInputs:
        """A copy in which tokens that do not count are 0 in all fields, and masked.

        Those are masked tokens, and tokens for which the sampler has no finite number.
        """
        mask = self.mask & self.sampler.isfinite()
        named = {n: getattr(self, n) for n in ("logprobs", "sampler", "old", "reference")}
        logprobs = {n: _make_finite(v, mask) for n, v in named.items() if v is not None}
        advantages = torch.where(mask, self.advantages, 0.0)
        entropy = None if self.entropy is None else torch.where(mask, self.entropy, 0.0)
        return replace(self, mask=mask, advantages=advantages, entropy=entropy, **logprobs)

    def sums(self, values: Tensor) -> Tensor:
        """Sum [B, T] over the counted tokens of each sequence, into [B, S]."""
        values = torch.where(self.mask, values, 0.0)
        if self.sequences is None:
            return values.sum(1, keepdim=True)
        return torch.einsum("bt,bts->bs", values, self._member.to(values.dtype))

    def spread(self, values: Tensor) -> Tensor:
        """Return each token's entry of [B, S], as [B, T]."""
        if self.sequences is None:
            return values.expand_as(self.logprobs)
        return torch.einsum("bs,bts->bt", values, self._member.to(values.dtype))

    @property
    def _member(self) -> Tensor:
        """Whether each token belongs to each of its row's sequences, bool [B, T, S]."""
        return self.sequences[..., None] == torch.arange(self.max_sequences, device=self.sequences.device)

    def lengths(self) -> Tensor:
        """Return the number of counted tokens of each sequence, [B, S]."""
        return self.sums(torch.ones_like(self.logprobs))


How = Literal["truncate", "mask"]
Level = Literal["token", "sequence"]


@dataclass(frozen=True)
class Correction:
    """A correction by importance sampling, for a sampler whose numerics or weights differ from `old`.

    Args:
        how: "truncate" uses weights exp(old - sampler), at most `high` (Yao et al. 2025, TIS); "mask" counts
            those outside of [`low`, `high`] as 0 (IcePop, Ling team 2025).
        level: whether weights belong to tokens, or are the product over a sequence.
        high, low: the bounds of weights.

    Raises:
        SpecError: `how` or `level` is another word.
    """

    how: How = "truncate"
    level: Level = "token"
    high: float = 2.0
    low: float = 0.0

    def __post_init__(self) -> None:
        expected = {"how": one_of(*get_args(How)), "level": one_of(*get_args(Level))}
        if wrong := misfits({"how": self.how, "level": self.level}, expected):
            raise SpecError("no such correction:", wrong, 'Correction(how="truncate", level="token").')

    def weights(self, inputs: PolicyInputs) -> Tensor:
        """Return the weights of tokens, [B, T], without gradient."""
        gap = (_get_old_logprobs(inputs) - inputs.sampler).detach()
        weights = _exp_bounded(inputs.spread(inputs.sums(gap)) if self.level == "sequence" else gap)
        if self.how == "truncate":
            return weights.clamp(max=self.high)
        return torch.where((weights >= self.low) & (weights <= self.high), weights, 0.0)


# ------------------------------------------------------------------ rewards


def grpo(
    inputs: PolicyInputs, *, clip: float = 0.2, clip_high: float | None = None, beta: float = 0.0,
    correction: Correction | None = None,
) -> Loss:  # fmt: skip
    """Optimise a policy by its group (GRPO, Shao et al. 2024): the mean over sequences of token means.

    A token's loss is -min(r A, clip(r, 1 - clip, 1 + clip_high) A) + beta * KL, with r = exp(logprobs - old),
    and KL = exp(d) - d - 1 with d = reference - logprobs.

    Args:
        clip, clip_high: how far r counts below and above 1; `clip_high` is `clip` by default.
        beta: the weight of the KL to the reference.
        correction: corrects for a sampler that differs from `old`.

    Returns:
        The loss, and metrics: `kl` to the reference, `clip_fraction` (of tokens whose r is clipped),
        `entropy`, and `mismatch` (the KL from the sampler to `old`, by the same estimate).

    Raises:
        ValueError: there is a `beta`, but no reference.

    >>> import torch
    >>> logprobs = torch.tensor([[-1.0, -2.0, -0.5]], requires_grad=True)
    >>> mask, advantages = torch.tensor([[False, True, True]]), torch.tensor([[2.0]])
    >>> loss, aux = grpo(PolicyInputs(logprobs, logprobs.detach(), advantages, mask))
    >>> float(loss.total / loss.count), float(aux["clip_fraction"].total)
    (-2.0, 0.0)
    """
    inputs = inputs.counted
    each, aux = _compute_token_losses(inputs, _compute_ratios(inputs), clip, clip_high, beta, correction)
    return _average_sequences(inputs, each), aux


def gspo(
    inputs: PolicyInputs, *, clip: float = 3e-4, clip_high: float | None = 4e-4, beta: float = 0.0,
    correction: Correction | None = None,
) -> Loss:  # fmt: skip
    """Optimise by group and sequence (GSPO, Zheng et al. 2025): `grpo` with r's geometric mean by sequence.

    Arguments and results are those of `grpo`.
    """
    inputs = inputs.counted
    means = inputs.sums(inputs.logprobs - _get_old_logprobs(inputs)) / inputs.lengths().clamp(min=1)
    ratios = _exp_bounded(inputs.spread(means))
    each, aux = _compute_token_losses(inputs, ratios, clip, clip_high, beta, correction)
    return _average_sequences(inputs, each), aux


def dr_grpo(
    inputs: PolicyInputs, *, max_length: int, clip: float = 0.2, clip_high: float | None = None,
    beta: float = 0.0, correction: Correction | None = None,
) -> Loss:  # fmt: skip
    """Optimise by Dr. GRPO (Liu et al. 2025): the mean over sequences of token sums, divided by `max_length`.

    So no length counts more than another. Its advantages are not divided by a deviation. The other arguments
    and the results are those of `grpo`.

    Args:
        max_length: the most tokens that a sequence may have.
    """
    inputs = inputs.counted
    each, aux = _compute_token_losses(inputs, _compute_ratios(inputs), clip, clip_high, beta, correction)
    has_tokens = inputs.lengths() > 0
    total = torch.where(inputs.mask, each, 0.0).sum() / max_length + _sum_strays(inputs)
    return Mean(total, has_tokens.sum(), bound=float(has_tokens.numel())), aux


def bnpo(
    inputs: PolicyInputs, *, clip: float = 0.2, clip_high: float | None = None, beta: float = 0.0,
    correction: Correction | None = None,
) -> Loss:  # fmt: skip
    """Take the mean over all tokens of all ranks, as TRL's `loss_type="bnpo"`; the rest is as in `grpo`."""
    inputs = inputs.counted
    each, aux = _compute_token_losses(inputs, _compute_ratios(inputs), clip, clip_high, beta, correction)
    return _average_tokens(inputs, each), aux


def dapo(
    inputs: PolicyInputs, *, clip: float = 0.2, clip_high: float | None = 0.28, beta: float = 0.0,
    correction: Correction | None = None,
) -> Loss:  # fmt: skip
    """Optimise by DAPO (Yu et al. 2025): `bnpo`, clipped higher above than below.

    The other parts of DAPO belong in the training loop.
    """
    return bnpo(inputs, clip=clip, clip_high=clip_high, beta=beta, correction=correction)


def ppo(
    inputs: PolicyInputs, values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float = 0.2,
    clip_values: float = 0.2, value_weight: float = 0.1, beta: float = 0.0,
    correction: Correction | None = None,
) -> Loss:  # fmt: skip
    """Optimise a policy (PPO, Schulman et al. 2017): `bnpo`, and a value head's clipped squared error.

    Args:
        values, old_values: [B, T], the value head's values, now and when the tokens were sampled.
        returns: [B, T], which `gae` computes with the advantages.
        clip_values: how far values may move from the old ones.
        value_weight: the weight of the value loss, half of max((values - returns)^2, (clipped - returns)^2).

    Returns:
        The results of `grpo`, and the metric `value_loss`.
    """
    inputs = inputs.counted
    values, old_values, returns = (torch.where(inputs.mask, v, 0.0) for v in (values, old_values, returns))
    each, aux = _compute_token_losses(inputs, _compute_ratios(inputs), clip, None, beta, correction)
    clipped = old_values + (values - old_values).clamp(-clip_values, clip_values)
    errors = 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())
    aux["value_loss"] = _make_metric(inputs, errors)
    return _average_tokens(inputs, each + value_weight * errors), aux


def group_advantages(rewards: Tensor, size: int, *, scale: bool = True, eps: float = 1e-4) -> Tensor:
    """Return rewards [N] less their group's mean, divided by its deviation.

    Args:
        size: the size of a group: the samples of one prompt, which are neighbours.
        scale: False leaves the deviation out, as Dr. GRPO does.
        eps: a number that is added to the deviation. A group of one, or of equal rewards, has advantage 0.

    Raises:
        StateError: `size` does not divide the number of rewards.

    >>> import torch
    >>> group_advantages(torch.tensor([1.0, 0.0, 3.0, 3.0]), 2, scale=False).tolist()
    [0.5, -0.5, 0.0, 0.0]
    """
    if not isinstance(size, Integral) or size is True or size < 1 or rewards.numel() % size:
        raise StateError(
            f"size={size!r}: {rewards.numel()} rewards are no groups of that many.",
            fix="give as `size` how many answers each prompt has, and the rewards of all of them.",
        )
    wide = rewards if rewards.is_floating_point() else rewards.to(torch.get_default_dtype())
    groups = wide.reshape(-1, size)
    advantages = groups - groups.mean(1, keepdim=True)
    if scale:
        # A group of one has no sample deviation: without the correction it is 0.
        deviation = groups.std(1, keepdim=True, correction=min(1, size - 1)) + eps
        advantages = advantages / torch.where(deviation > 0, deviation, 1.0)
    return advantages.reshape(-1)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Estimate advantages and returns [B, T] (GAE, Schulman et al. 2016), for use in a loop.

    Args:
        rewards, values: [B, T]; a sequence's reward is that of its last token.
        mask: bool [B, T], true for sampled tokens, which are one run in each row.
        gamma, lam: the discount, and the decay with which errors of later tokens count.
    """
    # From the last token back: the next token's advantage and value are 0 where no sampled token follows.
    next_advantage = torch.zeros_like(values[:, 0])
    next_value = torch.zeros_like(values[:, 0])
    advantages = torch.zeros_like(values)
    for t in range(values.shape[1] - 1, -1, -1):
        is_sampled = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(is_sampled, delta + gamma * lam * next_advantage, 0.0)
        next_value = torch.where(is_sampled, values[:, t], 0.0)
        advantages[:, t] = next_advantage
    return advantages, torch.where(mask, advantages + values, 0.0)


def _get_old_logprobs(inputs: PolicyInputs) -> Tensor:
    """Return log-probabilities by the policy before these updates, without gradient."""
    return (inputs.sampler if inputs.old is None else inputs.old).detach()


def _compute_ratios(inputs: PolicyInputs) -> Tensor:
    """Return exp(logprobs - old) of each token."""
    return _exp_bounded(inputs.logprobs - _get_old_logprobs(inputs))


def _make_finite(logprobs: Tensor, counted: Tensor | None) -> Tensor:
    """Return finite log-probabilities, with 0 in place of those that do not count."""
    if counted is not None:
        logprobs = torch.where(counted != 0, logprobs, 0.0)
    # A quarter of a short dtype's range, so that a margin of four of them does not overflow.
    return logprobs.clamp(min=max(LEAST_LOGPROB, torch.finfo(logprobs.dtype).min / 4))


def _exp_bounded(gap: Tensor) -> Tensor:
    """Return exp(gap), and from `MOST_GAP` on its tangent: large gaps have a finite value and a slope."""
    near = gap.clamp(max=MOST_GAP)
    return near.exp() * (1 + (gap - near))


def _compute_token_losses(
    inputs: PolicyInputs, ratios: Tensor, clip: float, clip_high: float | None, beta: float,
    correction: Correction | None,
) -> tuple[Tensor, dict[str, Mean]]:  # fmt: skip
    """Return the loss of each token [B, T], and the metrics."""
    if beta and inputs.reference is None:
        raise ValueError(f"beta={beta}: inputs.reference is None, and a KL is to something.")

    # The lesser of both is taken, so that no token gains by leaving the bounds.
    high = clip if clip_high is None else clip_high
    gains = inputs.advantages.detach()
    bounded = ratios.clamp(1 - clip, 1 + high)
    each = -torch.minimum(ratios * gains, bounded * gains)
    if correction is not None:
        each = each * correction.weights(inputs)

    # A ratio counts as clipped only where the bound makes its token's gain smaller.
    is_clipped = ((ratios < 1 - clip) & (gains < 0)) | ((ratios > 1 + high) & (gains > 0))
    aux = {
        "clip_fraction": _make_metric(inputs, is_clipped.to(ratios.dtype)),
        "mismatch": _make_metric(inputs, _estimate_kl(_get_old_logprobs(inputs), inputs.sampler)),
    }
    if inputs.reference is not None:
        divergence = _estimate_kl(inputs.logprobs, inputs.reference)
        aux["kl"] = _make_metric(inputs, divergence)
        each = each + beta * divergence if beta else each
    if inputs.entropy is not None:
        aux["entropy"] = _make_metric(inputs, inputs.entropy)
    return each, aux


def _estimate_kl(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return an unbiased estimate of KL(ours | theirs) that is never negative (Schulman 2020, "k3")."""
    gap = theirs - ours
    return _exp_bounded(gap) - gap - 1


def _make_metric(inputs: PolicyInputs, values: Tensor) -> Mean:
    """Return the mean over counted tokens, without gradient."""
    return Mean(torch.where(inputs.mask, values, 0.0).detach().sum(), inputs.mask.sum())


def _average_tokens(inputs: PolicyInputs, each: Tensor) -> Mean:
    """Return the mean over counted tokens."""
    total = torch.where(inputs.mask, each, 0.0).sum() + _sum_strays(inputs)
    return Mean(total, inputs.mask.sum(), bound=float(inputs.mask.numel()))


def _average_sequences(inputs: PolicyInputs, each: Tensor) -> Mean:
    """Return the mean over the sequences that have a token."""
    lengths = inputs.lengths()
    means = inputs.sums(each) / lengths.clamp(min=1)
    return Mean(means.sum() + _sum_strays(inputs), (lengths > 0).sum(), bound=float(lengths.numel()))


def _sum_strays(inputs: PolicyInputs) -> Tensor | float:
    """Return infinity if a counted token's number is that of no sequence, which no sum has, else 0."""
    if inputs.sequences is None:
        return 0.0
    is_stray = (inputs.sequences < 0) | (inputs.sequences >= inputs.max_sequences)
    # The sum is over tokens, so that it is also exact where ranks have parts of a row.
    infinity = torch.full_like(inputs.logprobs, torch.inf)
    return torch.where(inputs.mask & is_stray, infinity, 0.0).sum()


# ------------------------------------------------------------------ preferences


def dpo(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    counted: Tensor | None = None,
) -> Loss:
    """Optimise for preferences (DPO, Rafailov et al. 2023), averaged over all pairs of all ranks.

    The reference is the same frozen base without its adapters (`tuned.__wrapped__` of `fs.lora`), under
    `torch.no_grad()`, so that there is no second model.

    Args:
        chosen, rejected, reference_chosen, reference_rejected: log-probabilities [B], `sequence_logprobs`.
        beta: the weight of the distance from the reference.
        label_smoothing: the share of pairs that may be the wrong way round (Mitchell 2023).
        counted: bool [B], false for pairs that are padding; by default all count.

    Returns:
        The loss, and metrics: rewards, their margin, and how often the chosen one is ahead.

    >>> import torch
    >>> loss, aux = dpo(*torch.tensor([[-1.0], [-2.0], [-1.5], [-1.5]]))
    >>> round(float(loss.total), 4), float(aux["accuracy"].total)
    (0.6444, 1.0)
    """
    chosen, rejected, reference_chosen, reference_rejected = (
        _make_finite(each, counted) for each in (chosen, rejected, reference_chosen, reference_rejected)
    )
    gains, losses = beta * (chosen - reference_chosen), beta * (rejected - reference_rejected)
    margin = gains - losses
    each = -F.logsigmoid(margin) * (1 - label_smoothing) - F.logsigmoid(-margin) * label_smoothing
    return _average_pairs(each, gains, losses, counted)


def ipo(
    chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, *,
    beta: float = 0.1, counted: Tensor | None = None,
) -> Loss:  # fmt: skip
    """Optimise for preferences (IPO, Azar et al. 2023): (margin - 1 / (2 beta))^2.

    The arguments are mean log-probabilities of a response's tokens [B]. The results are those of `dpo`.
    """
    chosen, rejected, reference_chosen, reference_rejected = (
        _make_finite(each, counted) for each in (chosen, rejected, reference_chosen, reference_rejected)
    )
    gains, losses = chosen - reference_chosen, rejected - reference_rejected
    return _average_pairs((gains - losses - 1 / (2 * beta)).square(), beta * gains, beta * losses, counted)


def orpo(chosen: Tensor, rejected: Tensor, *, beta: float = 0.1, counted: Tensor | None = None) -> Loss:
    """Optimise for preferences by the odds ratio (ORPO, Hong et al. 2024).

    A pair's loss is -chosen - beta log s(log odds ratio).

    The arguments are mean log-probabilities of a response's tokens [B]; there is no reference. The first term
    is each response's mean, as in the paper; TRL's is the mean over the batch's tokens.
    """
    chosen, rejected = _make_finite(chosen, counted), _make_finite(rejected, counted)
    # The odds of a probability of 1 are infinite: it counts as one rounding less.
    bounded = [p.clamp(max=-torch.finfo(p.dtype).eps) for p in (chosen, rejected)]
    log_odds = [p - torch.log(-torch.expm1(p)) for p in bounded]
    each = -chosen - beta * F.logsigmoid(log_odds[0] - log_odds[1])
    return _average_pairs(each, beta * chosen, beta * rejected, counted)


def simpo(
    chosen: Tensor, rejected: Tensor, *, beta: float = 2.0, margin: float = 1.0,
    counted: Tensor | None = None,
) -> Loss:  # fmt: skip
    """Optimise for preferences (SimPO, Meng et al. 2024): -log s(beta (chosen - rejected) - margin).

    The arguments are mean log-probabilities of a response's tokens [B]; there is no reference.
    """
    gains, losses = beta * _make_finite(chosen, counted), beta * _make_finite(rejected, counted)
    return _average_pairs(-F.logsigmoid(gains - losses - margin), gains, losses, counted)


def kto(
    logprobs: Tensor, reference: Tensor, desirable: Tensor, divergence: Tensor, *, beta: float = 0.1,
    weights: tuple[float, float] = (1.0, 1.0), counted: Tensor | None = None,
) -> Loss:  # fmt: skip
    """Optimise by single responses that are good or bad (KTO, Ethayarajh et al. 2024).

    The loss is 1 - s(beta (logprobs - reference) - z) for desirable responses, and 1 - s(z - ...) for others.

    Args:
        logprobs, reference: log-probabilities [B] of responses.
        desirable: bool [B].
        divergence: 0-d, the KL to the reference, estimated on prompts with another prompt's response. z is
            beta times it, at least 0, and has no gradient.
        weights: the weights of desirable and of other responses.
        counted: as in `dpo`.

    Returns:
        The loss, and the mean `reward`.
    """
    rewards = beta * (_make_finite(logprobs, counted) - _make_finite(reference, counted))
    z = beta * divergence.detach().clamp(min=0)
    good = desirable.to(rewards.dtype)
    # 1 - s(x) is s(-x): the sign of rewards - z is turned for desirable responses.
    each = (good * weights[0] + (1 - good) * weights[1]) * torch.sigmoid((1 - 2 * good) * (rewards - z))
    mean = _make_averager(rewards, counted)
    return mean(each, float(each.numel())), {"reward": mean(rewards.detach())}


def _make_averager(like: Tensor, counted: Tensor | None) -> Callable[..., Mean]:
    """Return a function from values like `like`, one per row, to their `Mean` over the rows that count."""
    if counted is None:
        return lambda value, bound=None: Mean(value.sum(), float(like.numel()), bound)
    count, weights = counted.sum(), counted.to(like.dtype)
    return lambda value, bound=None: Mean(torch.where(counted != 0, value * weights, 0.0).sum(), count, bound)


def _average_pairs(each: Tensor, gains: Tensor, losses: Tensor, counted: Tensor | None) -> Loss:
    """Return a loss of pairs, and metrics of the rewards of chosen and rejected responses."""
    mean = _make_averager(each, counted)
    margin = (gains - losses).detach()
    return mean(each, float(each.numel())), {
        "chosen_reward": mean(gains.detach()),
        "rejected_reward": mean(losses.detach()),
        "margin": mean(margin),
        "accuracy": mean((margin > 0).to(margin.dtype)),
    }
