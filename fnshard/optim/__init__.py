"""Optimizers: the contract, `sgd`, `adamw` and what chains are made of, schedules, loss scaling."""

from fnshard.optim.contract import Optimizer, StepInfo
from fnshard.optim.muon import muon
from fnshard.optim.optimizers import (
    OPTIMIZERS,
    adamw,
    by_path,
    chain,
    clip_by_global_norm,
    ema,
    ema_params,
    register,
    sgd,
)

__all__ = [
    "OPTIMIZERS", "Optimizer", "StepInfo", "adamw", "by_path", "chain", "clip_by_global_norm", "ema",
    "ema_params", "muon", "register", "sgd",
]  # fmt: skip
