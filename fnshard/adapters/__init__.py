"""Adapters: merge, save and load those of LoRA, as PEFT's files; and batch norm over all ranks."""

from fnshard.adapters.peft import load, merge, save
from fnshard.compiler.frontend.statistics import batch_norm

__all__ = ["batch_norm", "load", "merge", "save"]
