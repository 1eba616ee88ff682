"""The fine-tuning job, as one rank runs it."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import fnshard as fs
from experiments.configs.plan import write_plan
from experiments.configs.train import AUTO
from experiments.data.files import read_json, write_json, write_text
from experiments.data.loader import place_of
from experiments.finetune.base_models import EXPORTED
from experiments.finetune.config import FinetuneConfig
from experiments.finetune.dataset import FinetuneData, Shown, opened, window_of
from experiments.finetune.evaluate import mean_over
from experiments.finetune.lm import from_directory
from experiments.finetune.method import MethodPlan, choose_method
from experiments.finetune.objectives import OBJECTIVES
from experiments.finetune.tuning import Tuning, first_state
from experiments.training.checkpoints import Saver, replicas_of, restored
from experiments.training.metrics_file import METRICS
from experiments.training.report import Report, plot_losses
from experiments.training.resume import RunFolder
from experiments.training.run_record import TimeSpent
from experiments.training.sample import Sampler, last_logits
from experiments.training.steps import Training, begin_report, finish_run, print_resume, print_stop, run_steps
from fnshard.hf.reading import read_config
from fnshard.launcher.rank import Stop

BEFORE, SAMPLES, ADAPTERS = "before.json", "samples.txt", "adapters"


@dataclass(frozen=True)
class FinetuneSetup:
    config: FinetuneConfig
    mesh: fs.Mesh
    planned: MethodPlan
    data: FinetuneData
    step: Any
    held_out: Any
    shown: Shown
    batch: Any

    @property
    def tuning(self) -> Tuning:
        return self.planned.tuning


def finetune(config: FinetuneConfig, run: RunFolder, overrides: list[str], stop: Stop) -> None:
    """Tune, from the run's newest checkpoint if it has one; rank 0 writes everything to the run's folder and
    prints its path.

    Args:
        config: its model is a directory, its data are folders of `dataset.prepared`.
        stop: once it is asked on any rank, all finish the step, save, and return.
    """
    spent = TimeSpent()
    with spent.on("start"):
        setup = prepare(config)
        folder, mesh = Path(run.folder), setup.mesh
        replicas = replicas_of(config.run, setup.step, folder)
        state, loader, found = begin(setup, run, replicas)
        if mesh.rank == 0:
            print_resume(config.run, state, found)
        sides = 2 if setup.data.train.kind == "pairs" else 1
        report = begin_report(
            "finetune", setup.config, run, setup.step, overrides, int(state.step), found, spent=spent,
            tokens=config.data.rows * loader.source.width * sides,
        )  # fmt: skip
        if mesh.rank == 0:
            codes = setup.tuning.codes(state.params)
            shown = setup.data.shown(colour=sys.stdout.isatty())
            print(
                f"{setup.planned.why}\n{codes}data: {setup.data.train}\n"
                f"the first of them, what is learned between « and »:\n{shown}\n",
                flush=True,
            )
            write_plan(setup.planned.plan, folder)
    compile_ahead(setup, state, spent)
    with report:
        before = baseline(setup, state, folder, spent)
        training = Training(
            config, setup.planned.plan, setup.step, loader, lambda params: held_out_loss(setup, params)[0],
            lambda: begin(setup, run)[:2], report, Saver(config, run.root, mesh.rank), spent, replicas,
        )  # fmt: skip
        state, held_out = run_steps(training, state, stop)
        report.close()
        if held_out is None:
            print_stop(config.run, state, run, overrides, report)
            return
        after = evaluated(setup, state, spent)
        with spent.on("export"):
            written = export(setup, state, folder)
        with spent.on("saves"):
            fs.checkpoint.wait()
        if isinstance(report, Report):
            print_end(report, setup, run, overrides, before, after, written)


def compile_ahead(setup: FinetuneSetup, state: fs.TrainState, spent: TimeSpent) -> None:
    """Compile the step in a thread, while the model is measured as it is."""
    with spent.on("compile"):
        setup.step.lower(state, setup.batch).compile_async()


def begin(
    setup: FinetuneSetup, run: RunFolder, replicas: fs.checkpoint.Replicas | None = None
) -> tuple[fs.TrainState, Any, str]:
    """The state to go on from, a loader that stands there, and the checkpoint that they are of."""
    config, mesh = setup.config, setup.mesh
    loader = setup.data.loader(config, mesh)
    state, found = restored(run.root, run.source, setup.step, mesh, loader, replicas)
    if state is None:
        specs = setup.planned.plan.specs
        state = first_state(setup.tuning, setup.step, specs, mesh, config.model, config.run.seed)
    return state, loader, found


def print_end(
    report: Report,
    setup: FinetuneSetup,
    run: RunFolder,
    overrides: list[str],
    before: dict[str, Any],
    after: dict[str, Any],
    written: list[str],
) -> None:
    """What is left of a finished run."""
    folder = Path(run.folder)
    table = setup.shown.table(before["answers"], after["answers"])
    write_text(folder / SAMPLES, table)
    with report.record.spent.on("reports"):
        plot_losses(folder / METRICS, {}, folder / "loss.png", unit="token")
    numbers = {name: value for name, value in after.items() if name != "answers"}
    closing = finish_run(report, run, overrides, numbers, sample=SAMPLES)
    lines = [_changed(name, before.get(name), value) for name, value in numbers.items()]
    lines += [*written, closing, f"results: {folder}"]
    print(f"\n{table}\n" + "\n".join(lines), flush=True)


def prepare(config: FinetuneConfig) -> FinetuneSetup:
    run = config.run
    mesh = fs.make_mesh(**config.mesh.axes, device=run.device)
    lm, data = from_directory(config.model), opened(config)
    (batch,) = next(data.loader(config, mesh))
    chosen = choose_method(config, lm, mesh, batch)
    config = replace(config, optimizer=replace(config.optimizer, lr=chosen.rate))
    tuning, plan = chosen.tuning, chosen.plan
    objective = OBJECTIVES[config.objective.name]
    loss = objective(tuning, config.objective, training=True)
    step = fs.shard_step(loss, plan.specs, mesh=mesh, optimizer=chosen.optimizer, **plan.options)
    how = {
        "mesh": mesh, "backend": run.backend, "deterministic": run.deterministic, "timeout": run.timeout_s,
    }  # fmt: skip
    objective_of_data = objective(tuning, config.objective, training=False)
    held_out = fs.shard_forward(objective_of_data, plan.specs, kernels=step, **how)
    examples = data.examples(run, lm.context)
    answer = fs.shard_forward(tuning.policy(last_logits(lm.hidden, lm.unembed)), plan.specs, **how)
    window = window_of(examples, run.sample_tokens, lm.context)
    sampler = Sampler(answer, window, mesh.device, temperature=0.0)
    shown = Shown(sampler, data.tokenizer, examples, run.sample_tokens)
    return FinetuneSetup(config, mesh, chosen, data, step, held_out, shown, batch)


# ------------------------------------------------------------------ what is measured of a model


def held_out_loss(setup: FinetuneSetup, params: Any) -> tuple[float, dict[str, float]]:
    """The objective's mean over held-out data, and the means of its `aux`; all ranks call it together."""
    config, mesh = setup.config, setup.mesh
    rows = config.data.rows // setup.planned.plan.accumulate  # as a training step holds at once
    batches = setup.data.measured.once(rows, config.data.held_out_rows, **place_of(mesh))
    return mean_over(setup.held_out, params, batches, mesh.device)


def evaluated(setup: FinetuneSetup, state: fs.TrainState, spent: TimeSpent) -> dict[str, Any]:
    """All that is measured of a model, and its answers; all ranks call it together."""
    with spent.on("evaluation"):
        values = measured(setup, state)
    with spent.on("samples"):
        return values | {"answers": setup.shown.answers(state.params)}


def measured(setup: FinetuneSetup, state: fs.TrainState) -> dict[str, Any]:
    """Held-out loss and perplexity; all ranks call it together."""
    loss, more = held_out_loss(setup, state.params)
    values: dict[str, Any] = {"held_out_loss": loss}
    if setup.config.objective.name == "sft":
        values["perplexity"] = math.exp(min(loss, 700.0))
    values |= {f"held_out_{name}": value for name, value in more.items()}
    return values


def baseline(setup: FinetuneSetup, state: fs.TrainState, folder: Path, spent: TimeSpent) -> dict[str, Any]:
    """What was measured before the first step: now, or by the process that began the run."""
    path, of = folder / BEFORE, _baseline_key(setup.config)
    known = read_json(path)
    known = known if known.get("of") == of else {}  # another configuration's
    fresh = setup.step.gather_strings("" if int(state.step) or known else "fresh")[0]
    if fresh:
        values = {"of": of, **evaluated(setup, state, spent)}
        if setup.mesh.rank == 0:
            write_json(path, values)
        return values
    # A run that goes on from another one's checkpoint has none.
    return known or {"answers": ["-"] * len(setup.shown.examples)}


def _baseline_key(config: FinetuneConfig) -> list[Any]:
    """What the numbers and answers before the first step depend on."""
    data, run = config.data, config.run
    return [config.model, config.objective.name, data.held_out, run.prompt, run.sample_tokens]


# ------------------------------------------------------------------ what is left of a run


def export(setup: FinetuneSetup, state: fs.TrainState, folder: Path) -> list[str]:
    """Write what the configuration asks for, in the Hugging Face format; all ranks call it together.

    Returns:
        What was written, a line each.
    """
    config, tuning, mesh = setup.config, setup.tuning, setup.mesh
    kinds = config.export
    if kinds == AUTO:
        kinds = "merged" if tuning.lora is None else "adapters"
    lines = []
    if kinds in ("adapters", "both") and tuning.lora is not None:
        fs.adapters.save(state, folder / ADAPTERS, tuning.lora, base=config.model)
        if mesh.rank == 0:
            setup.data.tokenizer.save(folder / ADAPTERS)
        lines.append(f"adapters, as PEFT reads them: {folder / ADAPTERS}")
    if kinds in ("merged", "both"):
        blocks, specs = _merged(setup, state)
        final = folder / EXPORTED
        aside = folder / f".{EXPORTED}.writing"
        if mesh.rank == 0:  # of an attempt that was cut off
            shutil.rmtree(aside, ignore_errors=True)
        setup.step.gather_strings("")  # no rank writes before it is gone
        dtype = stored_dtype(config.model)
        fs.hf.save(blocks, aside, specs, mesh, model=tuning.lm.model, config=config.model, dtype=dtype)
        if mesh.rank == 0:
            setup.data.tokenizer.save(aside)  # with the chat template that was learned by
            _take_place(aside, final)
        lines.append(f"the tuned model, as transformers reads it: {final}")
    return lines


def _take_place(made: Path, final: Path) -> None:
    """Rename; what has the name already is kept under another one: it may be somebody's only copy."""
    if os.path.lexists(final):
        others = (final.with_name(f"{final.name}.{n}") for n in itertools.count(1))
        os.rename(final, next(path for path in others if not os.path.lexists(path)))
    os.rename(made, final)


def stored_dtype(directory: str) -> torch.dtype | None:
    """What a model directory's configuration says that its weights are of."""
    config = read_config(Path(directory))
    named = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."), None)
    return named if isinstance(named, torch.dtype) else None


def _merged(setup: FinetuneSetup, state: fs.TrainState) -> tuple[Any, Any]:
    tuning, specs = setup.tuning, setup.planned.plan.specs
    if tuning.lora is not None:
        return fs.adapters.merge(state, tuning.lora)
    place = tuning.models[0]
    return (state.params[place], specs[place]) if place else (state.params, specs)


def _changed(name: str, old: float | None, new: float) -> str:
    return f"{name}: {new:.3f}" if old is None else f"{name}: {old:.3f} -> {new:.3f}"
