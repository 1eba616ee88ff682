"""Losses of rewards and preferences: by their papers' formulas, over ranks, and next to TRL's."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors import raises
from torch import Tensor

import fnshard as fs
from fnshard.errors import SpecError
from fnshard.losses import Mean, policy
from fnshard.losses.policy import Correction, PolicyInputs

B, T, V, D = 4, 6, 11, 8
NOT_THERE = (1, 4)  # a token that the sampler has no number for


def inputs_of(seed: int = 0, packed: bool = False) -> PolicyInputs:
    random = torch.Generator().manual_seed(seed)
    draw = lambda scale=0.3: scale * torch.randn(B, T, generator=random, dtype=torch.float64)  # noqa: E731
    logprobs = -2 + draw()
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[:, 0], mask[0, 3:], mask[3] = False, False, False  # prompts, a short row, one with no token
    sampler = logprobs + draw(0.1)
    sampler[NOT_THERE] = -math.inf
    more = {"sequences": (torch.arange(T) // 3).expand(B, T), "max_sequences": 2} if packed else {}
    return PolicyInputs(
        logprobs, sampler, draw(1.0) if packed else draw(1.0)[:, :1], mask, old=logprobs + draw(0.2),
        reference=logprobs + draw(0.2), entropy=draw().exp(), **more,
    )  # fmt: skip


# ------------------------------------------------------------------ formulas, token by token


def by_hand(name: str, x: PolicyInputs, beta: float, clip: float, high: float, weight: Any) -> float:
    """Compute what the papers say, in loops."""
    sequences: dict[tuple[int, int], list[int]] = defaultdict(list)
    for b in range(B):
        for t in range(T):
            if x.mask[b, t] and x.sampler[b, t].isfinite():
                sequences[b, 0 if x.sequences is None else int(x.sequences[b, t])].append(t)
    found = {}
    for (b, s), tokens in sequences.items():
        gaps = [float(x.logprobs[b, t] - x.old[b, t]) for t in tokens]
        drift = [float(x.old[b, t] - x.sampler[b, t]) for t in tokens]
        if name == "gspo":
            gaps = [sum(gaps) / len(gaps)] * len(gaps)
        found[b, s] = each = []
        for t, gap, own in zip(tokens, gaps, drift, strict=True):
            gain, r = float(x.advantages[b, min(t, x.advantages.shape[1] - 1)]), math.exp(gap)
            d = float(x.reference[b, t] - x.logprobs[b, t])
            gained = min(r * gain, min(max(r, 1 - clip), 1 + high) * gain)
            each.append(-gained * weight(own, sum(drift)) + beta * (math.exp(d) - d - 1))
    everything = [loss for each in found.values() for loss in each]
    if name in ("grpo", "gspo"):
        return sum(sum(each) / len(each) for each in found.values()) / len(found)
    return sum(everything) / (len(found) * 16 if name == "dr_grpo" else len(everything))


WEIGHTS: dict[str, tuple[Correction | None, Callable[[float, float], float]]] = {
    "none": (None, lambda token, all_: 1.0),
    "truncated": (Correction(high=1.05), lambda token, all_: min(math.exp(token), 1.05)),
    "truncated sequences": (
        Correction(level="sequence", high=1.05), lambda token, all_: min(math.exp(all_), 1.05),
    ),
    "masked": (
        Correction("mask", high=1.1, low=0.9),
        lambda token, all_: math.exp(token) * (0.9 <= math.exp(token) <= 1.1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("correction", WEIGHTS)
@pytest.mark.parametrize("name", ["grpo", "gspo", "dr_grpo", "bnpo", "dapo"])
def test_it_is_the_papers_formula(name: str, correction: str, packed: bool) -> None:
    x, (how, weight) = inputs_of(packed=packed), WEIGHTS[correction]
    more = {"max_length": 16} if name == "dr_grpo" else {}
    loss, aux = getattr(policy, name)(x, clip=0.1, clip_high=0.15, beta=0.05, correction=how, **more)
    expected = by_hand(name, x, 0.05, 0.1, 0.15, weight)
    assert float(loss.total / loss.count) == pytest.approx(expected, abs=1e-12)
    token_count = int(x.mask.sum()) - 1
    assert {int(mean.count) for mean in aux.values()} == {token_count}
    assert (
        set(aux) == {"clip_fraction", "kl", "entropy", "mismatch"}
        and 0 < float(aux["clip_fraction"].total) < token_count
    )


def test_values_that_do_not_count_are_nowhere_and_a_missing_reference_is_said() -> None:
    """NaN in prompts, padding and where the sampler has none; also in the gradient."""
    x = inputs_of()
    gone = ~(x.mask & x.sampler.isfinite())
    names = ("logprobs", "old", "reference", "sampler")
    spoiled = {n: getattr(x, n).masked_fill(gone, math.nan).requires_grad_() for n in names}
    loss, _ = policy.grpo(replace(x, **spoiled), beta=0.1)
    plain, _ = policy.grpo(x, beta=0.1)
    (slope,) = torch.autograd.grad(loss.total, spoiled["logprobs"])
    assert float(loss.total) == float(plain.total) and not slope[gone].any() and slope.isfinite().all()
    assert slope[~gone].all()
    with raises(ValueError, leaves=["beta=0.1", "inputs.reference"]):
        policy.grpo(replace(x, reference=None), beta=0.1)


@pytest.mark.parametrize("word", ["token_truncate", "Mask", None, ["mask"]])
@pytest.mark.parametrize("name", ["how", "level"])
def test_a_correction_of_another_word_is_refused(name: str, word: Any) -> None:
    with raises(SpecError, leaves=f"{name}={word!r}", fix="Correction("):
        Correction(**{name: word})
    with raises(SpecError, leaves=["how='no'", "level='no'"]):  # both in one error
        Correction("no", "no")


def lose(name: str, x: PolicyInputs, **how: Any) -> Mean:
    """Compute any loss of rewards with numbers in place of its other arguments."""
    if name == "ppo":
        return policy.ppo(x, x.logprobs * 0.1, x.old, x.reference, **how)[0]
    return getattr(policy, name)(x, **({"max_length": 16} if name == "dr_grpo" else {}), **how)[0]


OF_REWARDS = ["grpo", "gspo", "dr_grpo", "bnpo", "dapo", "ppo"]


@pytest.mark.parametrize("first", [-1, 1])
@pytest.mark.parametrize("name", OF_REWARDS)
def test_a_counted_token_of_no_sequence_makes_the_loss_infinite(name: str, first: int) -> None:
    """It is seen so, and gradients stay finite; a forgotten `max_sequences` is the same mistake."""
    x = replace(inputs_of(packed=True), logprobs=inputs_of().logprobs.requires_grad_())
    assert lose(name, x).total.isfinite()
    numbered = replace(x, sequences=x.sequences + first)
    alone = replace(numbered, mask=numbered.mask & (numbered.sequences == (2 if first > 0 else -1)))
    for wrong in (numbered, alone, replace(x, max_sequences=1)):
        loss = lose(name, wrong, correction=Correction(level="sequence"))
        assert loss.total.isposinf()
        (slope,) = torch.autograd.grad(loss.total, x.logprobs)
        assert slope.isfinite().all()
    known = (numbered.sequences >= 0) & (numbered.sequences < 2)
    assert lose(name, replace(numbered, mask=numbered.mask & known)).total.isfinite()


@pytest.mark.parametrize("first", [0, 3])
def test_a_step_shows_tokens_of_no_sequence(first: int) -> None:
    """Also where no token of the batch is counted in a sequence, which makes the count 0."""
    numbers, mask = torch.ones(1, 4), torch.ones(1, 4, dtype=torch.bool)
    packed = first + torch.tensor([[0, 0, 1, 1]])  # and `max_sequences` is 1

    def loss(p: Any, x: Tensor, mask: Tensor, packed: Tensor) -> Any:
        return policy.grpo(PolicyInputs(p["w"] * x, -x, x, mask, sequences=packed))

    step = fs.shard_step(loss, {"w": fs.LayoutSpec()}, optimizer=fs.optim.sgd(0.1), backend="eager")
    _, metrics = step(step.init({"w": -torch.ones(4)}), numbers, mask, packed)
    assert metrics.numbers()["loss"] == math.inf


def test_ppo_has_a_clipped_value_loss() -> None:
    x = replace(inputs_of(), reference=None)
    random = torch.Generator().manual_seed(1)
    values, old, returns = torch.randn(3, B, T, generator=random, dtype=torch.float64)
    loss, aux = policy.ppo(x, values, old, returns, clip_values=0.3, value_weight=0.5)
    near = old + (values - old).clamp(-0.3, 0.3)
    squares = [
        max(float(values[i] - returns[i]) ** 2, float(near[i] - returns[i]) ** 2)
        for i in map(tuple, (x.mask & x.sampler.isfinite()).nonzero().tolist())
    ]
    assert float(aux["value_loss"].total) == pytest.approx(sum(squares) / 2)
    alone, _ = policy.bnpo(x)
    assert float(loss.total) == pytest.approx(float(alone.total) + 0.5 * sum(squares) / 2)


def test_advantages_by_groups_and_by_a_value_head() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 5.0, 5.0, 5.0], dtype=torch.float64)
    found = policy.group_advantages(rewards, 3)
    spread = rewards[:3].std() + 1e-4
    torch.testing.assert_close(found, torch.cat([(rewards[:3] - 1 / 3) / spread, torch.zeros(3).double()]))
    assert policy.group_advantages(rewards, 3, scale=False)[0] == pytest.approx(2 / 3)
    rewards, values = torch.randn(2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(3, 7, dtype=torch.bool)
    mask[0, 2:6], mask[1, :], mask[2, 4:5] = True, True, True
    advantages, returns = policy.gae(rewards, values, mask, gamma=0.9, lam=0.8)
    for b in range(3):
        own = mask[b].nonzero().flatten().tolist()
        for i, t in enumerate(own):
            total = 0.0
            for k, u in enumerate(own[i:]):
                after = float(values[b, u + 1]) if u != own[-1] else 0.0
                total += (0.9 * 0.8) ** k * float(rewards[b, u] + 0.9 * after - values[b, u])
            assert float(advantages[b, t]) == pytest.approx(total)
            assert float(returns[b, t]) == pytest.approx(total + float(values[b, t]))
    assert not advantages[~mask].any() and not returns[~mask].any()


# By name, the loss and its formula; c, r: chosen, rejected; rc, rr: the same by the reference.
PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "dpo": (policy.dpo, lambda c, r, rc, rr: -F.logsigmoid(0.1 * (c - rc - r + rr))),
    "smoothed dpo": (
        partial(policy.dpo, label_smoothing=0.1),
        lambda c, r, rc, rr: -0.9 * F.logsigmoid(0.1 * (c - rc - r + rr))
        - 0.1 * F.logsigmoid(0.1 * (rc - c + r - rr)),
    ),
    "ipo": (policy.ipo, lambda c, r, rc, rr: (c - rc - r + rr - 5.0) ** 2),
    "orpo": (
        lambda c, r, rc, rr, **how: policy.orpo(c, r, **how),
        lambda c, r, rc, rr: -c - 0.1 * F.logsigmoid(
            (c.exp() / (1 - c.exp())).log() - (r.exp() / (1 - r.exp())).log()
        ),
    ),
    "simpo": (
        lambda c, r, rc, rr, **how: policy.simpo(c, r, **how),
        lambda c, r, rc, rr: -F.logsigmoid(2.0 * c - 2.0 * r - 1.0),
    ),
    "kto": (
        lambda c, r, rc, rr, **how: policy.kto(
            c, rc, torch.arange(B) % 2 == 0, torch.tensor(0.7), weights=(1.0, 0.1), **how
        ),
        lambda c, r, rc, rr: torch.where(
            torch.arange(B) % 2 == 0,
            1 - torch.sigmoid(0.1 * (c - rc) - 0.07), 0.1 * (1 - torch.sigmoid(0.07 - 0.1 * (c - rc))),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_preferences_are_their_papers_formulas(name: str) -> None:
    ours, formula = PAIRS[name]
    numbers = -torch.rand(4, B, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) - 0.1
    some = torch.tensor([True, False, True, True])
    loss, aux = ours(*numbers, counted=some)
    expected = formula(*numbers.double())[some]
    assert float(loss.total / loss.count) == pytest.approx(float(expected.mean()), abs=1e-7)
    assert {int(mean.count) for mean in aux.values()} == {3}
    if name in ("dpo", "ipo"):
        c, r, rc, rr = numbers
        assert float(aux["accuracy"].total) == float((c - rc > r - rr)[some].sum())


# ------------------------------------------------------------------ over ranks


def loss_of(name: str, p: Any, tokens: Tensor, x: dict[str, Tensor]) -> tuple[Mean, dict[str, Mean]]:
    """Compute a loss of the log-probabilities of a model of one table and one matrix."""
    logits = F.embedding(tokens, p["embed"]).tanh() @ p["layers.0.w"] @ p["embed"].T
    logprobs = logits.log_softmax(-1).gather(-1, x["drawn"][..., None]).squeeze(-1)
    names = ("sampler", "advantages", "mask", "old", "reference", "sequences")
    inputs = PolicyInputs(logprobs, **{n: x[n] for n in names}, max_sequences=2)
    correction = Correction(level="sequence", high=1.1)
    if name == "ppo":
        return policy.ppo(inputs, logprobs * 0.1, x["old"], x["reference"], beta=0.1, correction=correction)
    more = {"max_length": 9} if name == "dr_grpo" else {}
    return getattr(policy, name)(inputs, beta=0.1, correction=correction, **more)


def batch_of(rows: int) -> tuple[Tensor, dict[str, Tensor]]:
    random = torch.Generator().manual_seed(5)
    tokens, drawn = torch.randint(V, (2, rows, T), generator=random)
    numbers = -2.4 + 0.2 * torch.randn(3, rows, T, generator=random, dtype=torch.float64)
    x = dict(zip(("sampler", "old", "reference"), numbers, strict=True))
    x["advantages"] = torch.randn(rows, T, generator=random, dtype=torch.float64)
    x["mask"] = torch.rand(rows, T, generator=random) < 0.7
    x["mask"][0], x["mask"][1, 2:] = False, False
    x["sequences"] = (torch.arange(T) // 3).expand(rows, T).contiguous()
    return tokens, x | {"drawn": drawn}


AXES = [{"shard": 2}, {"context": 2}, {"shard": 2, "tensor": 2}, {"shard": 4}]


@pytest.mark.suite({
    "dapo-*": "over tokens of four ranks",
    "ppo-*": "with values",
})  # fmt: skip
@pytest.mark.parametrize(("name", "axes"), [
    pytest.param(name, axes, marks=[pytest.mark.long] * (i % 4 != j))
    for i, name in enumerate(["grpo", "gspo", "dr_grpo", "dapo", "ppo"]) for j, axes in enumerate(AXES)
], ids=str)  # fmt: skip
def test_means_are_exact_over_ranks_micro_batches_and_axes(name: str, axes: dict[str, int]) -> None:
    random = torch.Generator().manual_seed(2)
    shapes = {"embed": (V + 1, D), "layers.0.w": (D, D)}
    params = {n: torch.randn(s, generator=random, dtype=torch.float64) for n, s in shapes.items()}
    rows = 4 * axes.get("shard", 1)
    tokens, x = batch_of(rows)
    known = {n: v.clone().requires_grad_() for n, v in params.items()}
    full, aux = loss_of(name, known, tokens, x)
    (full.total / full.count).backward()
    mesh = fs.make_mesh(**{"shard": 1} | axes, simulated=True)
    specs = fs.presets.full_shard(params, mesh, tensor="tensor" if "tensor" in axes else None)
    fn = partial(loss_of, name)
    step = fs.shard_step(fn, specs, mesh=mesh, backend="eager", accumulate=2)

    def work(rank: int) -> list[float]:
        at = rank // (mesh.size // axes.get("shard", 1))  # the other axes are the inner ones
        part = slice(4 * at, 4 * at + 4)
        own = tokens[part], {n: v[part] for n, v in x.items()}
        (loss, found), grads = step(fs.shard(params, specs, mesh), *own)
        cut = fs.shard({n: v.grad for n, v in known.items()}, specs, mesh)
        apart = [(grads[n] - cut[n]).abs().max().item() for n in grads]
        apart += [abs(float(found[n]) - float(m.total / m.count)) for n, m in aux.items()]
        return [*apart, abs(float(loss) - float(full.total / full.count))]

    # Python's `max` would pass over a NaN.
    assert torch.tensor(fs.simulate(mesh, work)).max() < 1e-10


# ------------------------------------------------------------------ TRL


@pytest.mark.long  # the package takes seconds to import
@pytest.mark.parametrize("kind", ["grpo", "gspo", "bnpo", "dr_grpo", "dapo"])
def test_it_is_trls_loss(kind: str) -> None:
    """TRL also counts rows without a token, which this library does not: here every row has one."""
    trl = pytest.importorskip("trl")
    x = inputs_of()
    mask = x.mask & x.sampler.isfinite()
    mask[3, 1] = True
    x = replace(x, mask=mask)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (x.logprobs, x.entropy, None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=0.05,
        importance_sampling_level="sequence" if kind == "gspo" else "token",
        loss_type="grpo" if kind == "gspo" else kind, epsilon_low=0.1, epsilon_high=0.15, use_vllm=True,
        vllm_importance_sampling_correction=True, max_completion_length=16, _entropy_bonus_enabled=False,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None), _metrics={"eval": defaultdict(list)},
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda v, **_: v, gather=lambda v: v),
    )  # fmt: skip
    correction = Correction(high=1.05)
    ids = torch.ones(B, T, dtype=torch.int64)
    given = {
        "prompt_ids": ids[:, :0], "prompt_mask": ids[:, :0], "completion_ids": ids,
        "completion_mask": x.mask.long(), "advantages": x.advantages, "old_per_token_logps": x.old,
        "ref_per_token_logps": x.reference, "num_items_in_batch": x.mask.sum(),
        "importance_sampling_ratio": correction.weights(x.counted),
    }  # fmt: skip
    theirs = trl.GRPOTrainer._compute_loss(trainer, None, given)
    more = {"max_length": 16} if kind == "dr_grpo" else {}
    loss, aux = getattr(policy, kind)(x, clip=0.1, clip_high=0.15, beta=0.05, correction=correction, **more)
    assert float(loss.total / loss.count) == pytest.approx(float(theirs), abs=1e-6)
    clipped = trainer._metrics["eval"]["clip_ratio/region_mean"][0]
    if kind != "gspo":  # TRL's is of sequences there
        assert float(aux["clip_fraction"].total / aux["clip_fraction"].count) == pytest.approx(clipped)


def trainer_of(**own: Any) -> SimpleNamespace:
    """Return a stand-in for TRL's trainers with all that they read of themselves."""
    same = lambda value, **_: value  # noqa: E731
    accelerator = {"device": torch.device("cpu"), "gather_for_metrics": same, "gather": same}
    return SimpleNamespace(
        accelerator=SimpleNamespace(**accelerator, num_processes=1), model=SimpleNamespace(training=False),
        aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=True, use_weighting=False, alpha=0.0,
        f_divergence_type="reverse_kl", loss_weights=[1.0], label_smoothing=0.0, calculate_KL=True,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None), _total_train_tokens=0,
        _metrics=defaultdict(lambda: defaultdict(list)), **own,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dpo", "ipo", "simpo", "orpo", "kto"])
def test_losses_of_pairs_are_trls(kind: str) -> None:
    """Of ORPO only the second term is compared: TRL's first is a mean over the batch's tokens."""
    trl = pytest.importorskip("trl")
    draw, pairs, length = torch.Generator().manual_seed(0), 3, 5
    each = -torch.rand(2 * pairs, length, generator=draw, dtype=torch.float64)
    reference = -torch.rand(2 * pairs, generator=draw, dtype=torch.float64) * length
    mask = torch.tensor([[0, *[1] * n, *[0] * (length - n)] for n in (5, 2, 3, 4, 5, 1)])
    each = each * mask[:, 1:]
    sums, means = each.sum(1), each.sum(1) / mask.sum(1)
    zeros = torch.zeros_like(each)
    outputs = SimpleNamespace(log_probs=each, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    ids = torch.ones_like(mask)
    given = {"input_ids": ids, "attention_mask": ids, "completion_mask": mask}
    if kind in ("dpo", "ipo"):
        trainer = trainer_of(beta=0.3, loss_types=["sigmoid" if kind == "dpo" else "ipo"])
        chosen, rejected = reference.chunk(2)
        given |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        theirs = trl.DPOTrainer._compute_loss(trainer, lambda **_: outputs, given, False)
        ours = (sums, reference) if kind == "dpo" else (means, reference / mask.sum(1))
        loss, _ = getattr(policy, kind)(*ours[0].chunk(2), *ours[1].chunk(2), beta=0.3)
    elif kind == "simpo":
        from trl.experimental.cpo import CPOTrainer

        trainer = trainer_of(beta=2.0, loss_type="simpo", simpo_gamma=0.7)
        theirs = CPOTrainer.cpo_loss(trainer, *means.chunk(2))[0].mean()
        loss, _ = policy.simpo(*means.chunk(2), beta=2.0, margin=0.7)
    elif kind == "orpo":
        from trl.experimental.orpo import ORPOTrainer

        theirs = -ORPOTrainer.odds_ratio_loss(trainer_of(beta=0.3), *means.chunk(2))[0].mean()
        loss, _ = policy.orpo(*means.chunk(2), beta=0.3)
        loss = replace(loss, total=loss.total + means.chunk(2)[0].sum())
    else:
        desirable, divergence = torch.tensor([1, 0, 1, 1, 0, 0]).bool(), torch.tensor(0.4).double()
        trainer = trainer_of(
            beta=0.3, loss_type="kto", desirable_weight=1.5, undesirable_weight=0.5,
            _compute_kl_logps=lambda *_: divergence.expand(6),
        )  # fmt: skip
        zeros = torch.zeros(6, dtype=torch.float64)
        given |= {"label": desirable, "ref_logps": reference, "ref_KL_logps": torch.zeros(6)}
        theirs = trl.KTOTrainer._compute_loss(trainer, lambda **_: outputs, given, False)
        loss, _ = policy.kto(sums, reference, desirable, divergence, beta=0.3, weights=(1.5, 0.5))
    assert float(loss.total / loss.count) == pytest.approx(float(theirs), abs=1e-6)
