"""The fine-tuning job, as one rank runs it."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fnshard as fs
from experiments.configs.plan import Plan
from experiments.configs.train import AUTO
from experiments.data.files import DamagedError, read_record, write_record, write_text
from experiments.data.loader import Loader, place_of
from experiments.evaluate.scorer import Scorer
from experiments.evaluate.tasks import Task, tasks_of
from experiments.finetune.base_models import EXPORTED
from experiments.finetune.config import FinetuneConfig
from experiments.finetune.dataset import FinetuneData, Shown, opened, window_of
from experiments.finetune.lm import LanguageModel, from_directory
from experiments.finetune.method import MethodPlan, choose_method
from experiments.finetune.objectives import OBJECTIVES
from experiments.finetune.rewarded import RewardedBatches, RewardedData, rewarded_batches
from experiments.finetune.tuning import Tuning, first_state
from experiments.training.goal import HELD_OUT, Goal
from experiments.training.metrics_file import METRICS
from experiments.training.report import draw_run
from experiments.training.resume import RunFolder
from experiments.training.run import Ending, run_job
from experiments.training.run_record import TimeSpent
from experiments.training.sample import Sampler, last_logits
from experiments.training.steps import Setup, mean_over
from fnshard.hf.reading import read_config
from fnshard.launcher.rank import Stop

BEFORE, SAMPLES, ADAPTERS = "before.json", "samples.txt", "adapters"
WIDTHS = 8  # what a batch of answers is a multiple of
Measured = dict[str, Any]  # held-out numbers by name, and "answers"


def finetune(config: FinetuneConfig, run: RunFolder, overrides: list[str], stop: Stop) -> None:
    """Tune, from the run's newest checkpoint if it has one; rank 0 writes everything to the run's folder and
    prints its path.

    Args:
        config: its model is a directory, its data are folders of `dataset.prepared`.
        stop: once it is asked on any rank, all finish the step, save, and return.
    """
    run_job("finetune", lambda: prepare(config), run, overrides, stop)


@dataclass(frozen=True)
class FinetuneSetup(Setup):
    """Of a fine-tuning job: all is compiled ahead, when the model is measured before the first step."""

    config: FinetuneConfig
    mesh: fs.Mesh
    planned: MethodPlan
    data: FinetuneData
    step: Any
    held_out: Any
    shown: Shown
    first_batch: Any
    rewarded: RewardedBatches | None
    tasks: tuple[Task, ...]
    scorer: Scorer

    unit: str = field(default="token", init=False)

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    @property
    def tuning(self) -> Tuning:
        return self.planned.tuning

    @property
    def tokens(self) -> int:
        if self.rewarded is not None:
            return self.rewarded.of.answers * self.rewarded.of.ranks * self.rewarded.of.width
        sides = 2 if self.data.train.kind == "pairs" else 1
        return self.config.data.rows * self.data.rows.width * sides

    @property
    def goal(self) -> Goal:
        """The loss of samples is in nats per token; losses of pairs and rewards have no unit of their own."""
        kind = self.config.objective.kind.data
        if kind == "prompts":
            return Goal("reward", is_maximised=True)
        return Goal(unit="nats per token" if kind == "samples" else "")

    def loader(self) -> Loader:
        return self.data.loader(self.config, self.mesh)

    def first_state(self) -> fs.TrainState:
        model, seed = self.config.model, self.config.run.seed
        return first_state(self.tuning, self.step, self.plan.specs, self.mesh, model, seed)

    def introduce(self, state: fs.TrainState) -> None:
        """Print what trains, and on what."""
        shown = self.data.shown(colour=sys.stdout.isatty())
        drawn = "" if self.rewarded is None else f"{self.rewarded}\n"
        print(
            f"{self.planned.why}\n{self.tuning.codes(state.params)}{drawn}data: {self.data.train}\n"
            f"the first of them; what is learned stands between « and »:\n{shown}\n",
            flush=True,
        )

    def baseline(self, state: fs.TrainState, folder: Path, spent: TimeSpent) -> Measured:
        """What is measured before the first step: now, or by the process that began the run."""
        with spent.on("lowering"):  # of the step; a thread compiles it while the model is measured as it is
            self.step.lower(state, self.first_batch).compile_async()
        data, run = self.config.data, self.config.run
        of = [self.config.model, self.config.objective.name, data.held_out, run.prompt, run.sampled]
        of += run.evaluate
        try:
            known = read_record(folder / BEFORE) or {}
        except DamagedError as error:
            if self.mesh.rank == 0:
                print(f"{error} It counts as none.", file=sys.stderr, flush=True)
            known = {}
        known = known if known.get("of") == of else {}  # another configuration's
        fresh = self.step.gather_strings("" if int(state.step) or known else "fresh")[0]
        if fresh:
            values = {"of": of, **self._measure(state, spent)}
            if self.mesh.rank == 0:
                write_record(folder / BEFORE, values)
            return values
        # A run that goes on from another one's checkpoint has none.
        return known or {"answers": ["-"] * len(self.shown.examples)}

    def batch(self, state: fs.TrainState, loaded: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the loader gives; answers to it, where they are rewarded."""
        return loaded if self.rewarded is None else (self.rewarded.batch(state, *loaded),)

    def evaluate(self, params: Any) -> tuple[float, dict[str, float]]:
        """Return the objective's mean over held-out data, or the mean reward, and the means of its `aux`; and
        the results of tasks. All ranks call it together."""
        return self._held_out(params)

    def sample(self, params: Any) -> str:
        """Prompts and answers."""
        return self.shown.table({"answer": self.shown.answers(params)})

    def finish(self, end: Ending, baseline: Measured) -> None:
        """Measure and export the tuned model; on rank 0 write and print the results."""
        after = self._measure(end.state, end.spent)
        with end.spent.on("export"):
            written = export(self, end.state, end.folder)
        with end.spent.on("saves"):
            fs.checkpoint.wait()
        if self.mesh.rank != 0:
            return
        table = self.shown.table({"before": baseline["answers"], "after": after["answers"]})
        if table:
            write_text(end.folder / SAMPLES, table)
        with end.spent.on("reports"):
            picture = end.folder / f"{self.goal.name}.png"
            title = f"{self.goal.name} of fine-tuning by {self.config.objective.name}"
            draw_run(end.folder / METRICS, self.goal, {}, picture, title)
        numbers = {name: value for name, value in after.items() if name != "answers"}
        closing = end.write_result(numbers, sample=SAMPLES)
        lines = [_changed(name, baseline.get(name), value) for name, value in numbers.items()]
        if end.run.makes:  # for another command, whose results stand at its end
            print("\n".join([*lines, f"{end.run.makes} is made\n"]), flush=True)
            return
        lines += [*written, closing, f"results: {end.folder}"]
        print(f"\n{table}\n" + "\n".join(lines), flush=True)

    def _held_out(self, params: Any) -> tuple[float, dict[str, float]]:
        loss, more = self._objective(params)
        return loss, more | self._tasks(params)

    def _objective(self, params: Any) -> tuple[float, dict[str, float]]:
        if self.rewarded is not None:
            means = self.rewarded.mean_rewards(params)
            return means.pop(self.goal.name), means
        rows = self.config.data.rows // self.plan.accumulate  # as a training step holds at once
        batches = self.data.measured.once(rows, self.config.data.held_out_rows, **place_of(self.mesh))
        return mean_over(self.held_out, params, zip(batches), self.mesh.device)

    def _tasks(self, params: Any) -> dict[str, float]:
        """`{task/metric: mean}` of the tasks of `run.evaluate`."""
        out: dict[str, float] = {}
        for task in self.tasks:
            results = [result for _, result in self.scorer.results(params, task)]
            sums = {metric: sum(result[metric] for result in results) for metric in task.metrics}
            every = list(map(json.loads, self.step.gather_strings(json.dumps(sums))))
            count = (
                len(task.questions) * self.mesh.size // self.mesh.data_size
            )  # some ranks have the same rows
            out |= {f"{task.name}/{metric}": sum(each[metric] for each in every) / count for metric in sums}
        return out

    def _measure(self, state: fs.TrainState, spent: TimeSpent) -> Measured:
        """Measure the goal's number on held-out data, perplexity, and answers; all ranks call it together."""
        with spent.on("evaluation"):
            loss, more = self._held_out(state.params)
        values: Measured = {self.goal.held_out: loss}
        if self.config.objective.name == "sft":
            values["perplexity"] = math.exp(min(loss, 700.0))
        values |= {HELD_OUT + name: value for name, value in more.items()}
        with spent.on("samples"):
            return values | {"answers": self.shown.answers(state.params)}


def prepare(config: FinetuneConfig, only_prompt: bool = False) -> FinetuneSetup:
    """Mesh, model, specs, step: all of fnshard that the job uses. With `only_prompt` no other is shown than
    `run.prompt`."""
    run = config.run
    mesh = fs.make_mesh(**config.mesh.axes, device=run.device)
    lm = replace(from_directory(config.model), fp32_head=config.objective.fp32_head)
    data = opened(config, lm.vision)
    if config.objective.kind.data == "prompts":
        multiple = math.lcm(WIDTHS, config.mesh.context)
        prompts = RewardedData(config, data, mesh.data_size, multiple, mesh.device)
        prompts.check(lm)
        batch = prompts.blank()
    else:
        prompts, (batch,) = None, next(data.loader(config, mesh))
    chosen = choose_method(config, lm, mesh, batch)
    config = replace(config, optimizer=replace(config.optimizer, lr=chosen.rate))
    tuning, plan = chosen.tuning, chosen.plan
    objective = OBJECTIVES[config.objective.name]
    loss = objective(tuning, config.objective, training=True)
    step = fs.shard_step(loss, plan.specs, mesh=mesh, optimizer=chosen.optimizer, **plan.options)
    how = {
        "mesh": mesh, "backend": run.backend, "deterministic": run.deterministic, "timeout": run.timeout_s,
        **config.mesh.options,
    }  # fmt: skip
    objective_of_data = objective(tuning, config.objective, training=False)
    held_out = fs.shard_forward(objective_of_data, plan.specs, **how)
    examples = data.examples(run, lm.context)[-1 if only_prompt else 0 :]
    hidden = lm.hidden if not data.measured.images else partial(_of_images, lm)
    answer = fs.shard_forward(tuning.policy(last_logits(hidden, lm.unembed)), plan.specs, **how)
    window = window_of(examples, run.sampled, lm.context)
    sampler = Sampler(
        answer, window, mesh.device, temperature=0.0, more=data.images_of(examples, window, mesh.device)
    )
    shown = Shown(sampler, data.tokenizer, examples, run.sampled)
    rewarded = None if prompts is None else rewarded_batches(prompts, tuning, step, plan.specs, mesh, how)
    tasks = tuple(tasks_of(run.evaluate))
    longest = max((len(q.choices) for task in tasks for q in task.questions), default=1)
    scorer = Scorer(
        lm, data.tokenizer, mesh, lambda fn: fs.shard_forward(tuning.policy(fn), plan.specs, **how),
        rows=max(config.data.rows // mesh.data_size, longest),
    )  # fmt: skip
    return FinetuneSetup(config, mesh, chosen, data, step, held_out, shown, batch, rewarded, tasks, scorer)


def _of_images(lm: LanguageModel, params: Any, tokens: torch.Tensor, images: Any) -> torch.Tensor:
    return lm.hidden(params, tokens, images=images)


# ------------------------------------------------------------------ what is left of a run


def export(setup: FinetuneSetup, state: fs.TrainState, folder: Path) -> list[str]:
    """Write what the configuration asks for, in the Hugging Face format; all ranks call it together.

    Returns:
        What was written, a line each.
    """
    config, tuning, mesh = setup.config, setup.tuning, setup.mesh
    kinds = config.export
    if kinds == AUTO:
        kinds = "merged" if tuning.lora is None or tuning.stacked else "adapters"
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
    tuning, specs = setup.tuning, setup.plan.specs
    if tuning.lora is not None:
        return fs.adapters.merge(state, tuning.lora)
    place = tuning.models[0]
    return (state.params[place], specs[place]) if place else (state.params, specs)


def _changed(name: str, old: float | None, new: float) -> str:
    shown = name.replace("_", " ").replace("held out", "held-out")
    return f"{shown}: {new:.3f}" if old is None else f"{shown}: {old:.3f} before, {new:.3f} after"
