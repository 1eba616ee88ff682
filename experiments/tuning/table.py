"""The table of objectives: the function that makes the loss of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from experiments.tuning.classify import classify
from experiments.tuning.distill import distill
from experiments.tuning.embed import embed
from experiments.tuning.objectives import Loss, policy_gradient, preference, sft
from experiments.tuning.reward_model import reward

OBJECTIVES: Mapping[str, Callable[..., Loss]] = {
    "sft": sft,
    **dict.fromkeys(("dpo", "ipo", "orpo", "simpo"), preference),
    **dict.fromkeys(("grpo", "dr_grpo", "bnpo", "dapo", "gspo", "ppo"), policy_gradient),
    "distill": distill,
    "reward": reward,
    "classify": classify,
    "embed": embed,
}
