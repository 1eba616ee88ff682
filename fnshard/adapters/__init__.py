"""Adapters: LoRA, merged or written as PEFT's files, and batch norm over all ranks."""

from fnshard.adapters.peft import merge, save
from fnshard.compiler.frontend.statistics import batch_norm

__all__ = ["batch_norm", "merge", "save"]
