"""Adapters: merge LoRA's, save and load them as PEFT's files; and batch norm over all ranks."""

from fnshard.adapters.peft import load, merge, save
from fnshard.compiler.frontend.statistics import batch_norm

__all__ = ["batch_norm", "load", "merge", "save"]
