"""Export: the results of a tuning run in the Hugging Face format, adapters or the whole model."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import torch

import fnshard as fs
from experiments.lib.config import AUTO
from experiments.tuning.config import FinetuneConfig
from experiments.tuning.dataset import FinetuneData
from experiments.tuning.method import MethodPlan
from fnshard.hf.reading import read_config

EXPORTED, ADAPTERS = "model", "adapters"  # in a run's folder


def export(
    config: FinetuneConfig,
    planned: MethodPlan,
    data: FinetuneData,
    state: fs.TrainState,
    step: Any,
    folder: Path,
) -> list[str]:
    """Write what the configuration asks for, in the Hugging Face format; all ranks call it together.

    Returns:
        What was written, a line each.
    """
    tuning, mesh = planned.tuning, step.mesh
    kinds = config.export
    if kinds == AUTO:
        kinds = "merged" if tuning.lora is None or tuning.stacked else "adapters"
    lines = []
    if kinds in ("adapters", "both") and tuning.lora is not None:
        fs.adapters.save(state, folder / ADAPTERS, tuning.lora, base=config.model)
        if mesh.rank == 0:
            data.tokenizer.save(folder / ADAPTERS)
        lines.append(f"adapters, as PEFT reads them: {folder / ADAPTERS}")
    if kinds in ("merged", "both"):
        blocks, specs = _merge_adapters(planned, state)
        final = folder / EXPORTED
        aside = folder / f".{EXPORTED}.writing"
        if mesh.rank == 0:  # of an attempt that was cut off
            shutil.rmtree(aside, ignore_errors=True)
        step.gather_strings("")  # no rank writes before it is gone
        dtype = stored_dtype(config.model)
        fs.hf.save(blocks, aside, specs, mesh, model=tuning.lm.model, config=config.model, dtype=dtype)
        if mesh.rank == 0:
            data.tokenizer.save(aside)  # with the chat template that was learned by
            _take_place(aside, final)
        lines.append(f"the tuned model, as transformers reads it: {final}")
    return lines


def _take_place(made: Path, final: Path) -> None:
    """Rename a folder; what has the name already is kept under another one: it may be somebody's only
    copy."""
    if os.path.lexists(final):
        others = (final.with_name(f"{final.name}.{n}") for n in itertools.count(1))
        os.rename(final, next(path for path in others if not os.path.lexists(path)))
    os.rename(made, final)


def stored_dtype(directory: str) -> torch.dtype | None:
    """Return the dtype that a model directory's configuration says its weights are of."""
    config = read_config(Path(directory))
    named = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."), None)
    return named if isinstance(named, torch.dtype) else None


def _merge_adapters(planned: MethodPlan, state: fs.TrainState) -> tuple[Any, Any]:
    """Return the model with its adapters merged into it, and its specs."""
    tuning, specs = planned.tuning, planned.plan.specs
    if tuning.lora is not None:
        return fs.adapters.merge(state, tuning.lora)
    place = tuning.models[0]
    return (state.params[place], specs[place]) if place else (state.params, specs)
