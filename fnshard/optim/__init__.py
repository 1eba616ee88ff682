"""Optimizers (`adamw`, `muon`, `soap` and others), chains of them, rate schedules and loss scaling."""

from fnshard.optim.compact import adafactor, adamw_8bit
from fnshard.optim.muon import muon
from fnshard.optim.optimizer import Optimizer, Step, apply_updates, init_slots
from fnshard.optim.optimizers import (
    OPTIMIZERS,
    adamw,
    by_path,
    chain,
    clip_by_global_norm,
    ema,
    ema_params,
    lars,
    lion,
    register,
    schedule_free_adamw,
    sgd,
)
from fnshard.optim.soap import soap

__all__ = [
    "OPTIMIZERS", "Optimizer", "Step", "adafactor", "adamw", "adamw_8bit", "apply_updates", "by_path",
    "chain", "clip_by_global_norm", "ema", "ema_params", "init_slots", "lars", "lion", "muon", "register",
    "schedule_free_adamw", "sgd", "soap",
]  # fmt: skip
