"""Adapters: LoRA, adapters in and out of PEFT's files, and batch norm over all ranks."""

from fnshard.adapters.norms import batch_norm
from fnshard.adapters.peft import load, merge, save

__all__ = ["batch_norm", "load", "merge", "save"]
