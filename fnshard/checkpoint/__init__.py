"""Checkpoint: a training state on disk, whole or absent, and back onto any mesh."""

from fnshard.checkpoint.api import (
    Keep,
    Manifest,
    Saving,
    all_steps,
    latest,
    manifest,
    restore,
    restore_params,
    save,
    save_async,
    verify,
    wait,
)

__all__ = [
    "Keep",
    "Manifest",
    "Saving",
    "all_steps",
    "latest",
    "manifest",
    "restore",
    "restore_params",
    "save",
    "save_async",
    "verify",
    "wait",
]
