"""Adapters: LoRA, and adapters in and out of PEFT's files."""

from fnshard.adapters.peft import load, merge, save

__all__ = ["load", "merge", "save"]
