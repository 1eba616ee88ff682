"""Fine-tune a causal language model, whole or by adapters, sharded over ranks.

    python -m experiments.finetune model=FOLDER data.train=my.jsonl    # two ranks on a CPU, or all GPUs
    torchrun --nproc-per-node 8 -m experiments.finetune model=FOLDER   # ranks that torchrun starts

What happens, in order: `main` (`lib.launch`) composes the command line and checks all of it (`lib.compose`,
whose dataclasses are in `tuning.config`); `prepare`, below, finds the model's directory and tokenises the
data; the ranks are started. Each of them calls `finetune`, which makes the parts of the run (`build`), and
goes on from its newest checkpoint, if it has one, to the last step.

Where to look: what a run is besides its steps (folder, rows, trackers, checkpoints, SIGTERM, NaN) is in
`lib.run`, as for `experiments.train`; what trains, and the peak rate, in `tuning.method`; the loss of each
objective, from `tuning.table`; answers that are drawn and rewarded in `tuning.rewarded`.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    # Imports and traces free little: to look for what they might have freed takes a sixth of a start.
    # `lib.launch` turns that on again, and `lib.run` in ranks.
    gc.disable()

import json
import math
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import fnshard as fs
from experiments.data.loader import Loader, place_of
from experiments.data.rows import readable
from experiments.evaluate.scorer import Scorer
from experiments.evaluate.tasks import Task, check_tasks, read_tasks
from experiments.lib.checks import ConfigError, attempt
from experiments.lib.compose import CONF, Command
from experiments.lib.config import AUTO
from experiments.lib.decoder import Sampler, last_logits
from experiments.lib.files import DamagedError, read_record, write_record, write_text
from experiments.lib.folder import RunFolder
from experiments.lib.launch import Job, main
from experiments.lib.metrics import HELD_OUT, METRICS, Goal, draw_run
from experiments.lib.plan import forward_options
from experiments.lib.run import Run, mean_over
from experiments.lib.task import make_target
from experiments.tuning.budget import budget_bytes, check_fits, find_most_tokens, read_saved_tokens
from experiments.tuning.config import FinetuneConfig
from experiments.tuning.dataset import (
    AnswerTable,
    FinetuneData,
    open_data,
    prepare_data,
    token_limits,
    window_of,
)
from experiments.tuning.lm import from_directory
from experiments.tuning.method import MethodPlan, make_first_state, make_tuning, plan_method
from experiments.tuning.model_directory import (
    BASES,
    check_teacher,
    directory_of,
    export,
    find_directory,
    keep_base,
)
from experiments.tuning.rewarded import RewardedBatches, RewardedData, make_rewarded_batches
from experiments.tuning.rewards import make_rewards
from experiments.tuning.table import OBJECTIVES
from fnshard.launcher.rank import Stop

BEFORE, SAMPLES = "before.json", "samples.txt"
TASKS = ("prompts", "answers")  # the built-in data of problems, which the base "tasks" has seen
WIDTHS = 8  # the positions of a row of answers are a multiple of it
Measured = dict[str, Any]  # held-out numbers by name, and "answers"

COMMAND = Command(
    "finetune",
    FinetuneConfig,
    "Fine-tune a causal language model, whole or by adapters, on JSONL files of prompts and responses (or of "
    "pairs, objective=dpo; or of prompts whose answers are rewarded, objective=grpo; to a teacher, "
    "objective=distill; as a reward model, a classifier or an embedding, objective=reward, classify, embed). "
    "With nothing said: a tiny base and docstrings of Python's own library.",
    {
        "python -m experiments.finetune experiment=sft_lora run.steps=50": (
            "a whole recipe; what follows it changes it"
        ),
        "python -m experiments.finetune model=FOLDER data.train=my.jsonl method=qlora4 precision=bf16": (
            "a model and data of your own, the base as 4-bit codes"
        ),
        "python -m experiments.finetune --multirun method=full,lora,qlora8 run.steps=100": (
            "a sweep: three runs, and a table of them"
        ),
    },
    CONF / "finetune",  # a group that is called "model", as the main job has, would take `model=` for its own
)


def prepare(config: FinetuneConfig) -> FinetuneConfig:
    """Find, before a rank starts, what is wrong with what the configuration names.

    Returns:
        The configuration with directories in place of names: that of the model, and those of tokenised data.

    Raises:
        ConfigError: files, tasks, rewards or directories cannot be used. One error has all that is found
            before a base is made.
    """
    # Check everything that costs little.
    data, run, tasks = config.data, config.run, config.run.evaluate
    wrong: list[str] = []
    for path in filter(None, (data.train, data.held_out)):
        attempt(partial(readable, path), wrong)
    if tasks:
        attempt(lambda: [check_tasks(tasks), *read_tasks(tasks)], task_errors := [])
        wrong += [f"run.evaluate: {each}" for each in task_errors]
    is_base = config.model in BASES
    model = None if is_base else attempt(lambda: directory_of(config), wrong)
    reward, environment = config.objective.reward, config.objective.environment
    if environment is not None:
        attempt(lambda: make_target("objective.environment", environment, partly=True), wrong)
    else:
        reward = reward or ("exact" if data.train else "solved")
        attempt(lambda: make_rewards(reward), wrong)  # a mistake is refused before anything runs
    teacher = config.objective.teacher
    if teacher is not None and teacher not in BASES:
        teacher = str(attempt(lambda: find_directory(teacher, "objective.teacher").resolve(), wrong))
    if wrong:
        raise ConfigError("\n".join(wrong))

    # A base that does not exist yet is made once by `experiments.bases`, and kept.
    base_options = (f"run.backend={run.backend}", f"run.device={run.device}")
    kind = config.objective.kind
    if is_base:
        # Built-in tasks need the base that has seen such; a student learns them from its teacher.
        needs_tasks = data.train is None and kind.examples in TASKS and not kind.teacher
        name = "tasks" if needs_tasks and config.model == "stdlib" else config.model
        if name in ("stdlib", "tasks"):  # what does not fit the model shows before it is trained
            directory_of(replace(config, model=keep_base("tiny")))
        model = directory_of(replace(config, model=keep_base(name, *base_options)))
    if teacher is not None:
        if teacher in BASES:
            teacher = keep_base(teacher, *base_options)
        check_teacher(model, teacher, data.context)

    # Tokenise the data. The answers to built-in problems are short.
    tokens = config.objective.tokens or (128 if data.train else 4)
    objective = replace(config.objective, reward=reward, tokens=tokens, teacher=teacher)
    return prepare_data(replace(config, model=model, objective=objective))


def finetune(config: FinetuneConfig, folder: RunFolder, overrides: list[str], stop: Stop) -> None:
    """Tune on this rank. Rank 0 writes records, pictures and results to the run's folder and prints its
    path; every rank writes its part of the checkpoints.

    Args:
        config: a configuration that `prepare` returned.
    """
    with Run("finetune", config, folder, overrides, stop) as run:
        # Make mesh, model, data, plan, step, and what measures. A rate that was null is chosen there.
        parts = build(config, tokens=read_saved_tokens(folder))
        run.config = config = parts.config
        mesh, step, goal = parts.mesh, parts.step, parts.goal

        # Restore the newest checkpoint's state and place in the data, or begin with the first of both.
        state, loader = run.restore(step, parts.make_loader, parts.make_state)
        run.open_report(state, parts.planned.plan, goal, parts.tokens, "token")
        if mesh.rank == 0:
            introduce(parts, state)

        # Measure the model before the first step, while a thread compiles the step.
        with run.timer.during("lowering"):
            step.lower(state, parts.batch).compile_async()
        before = measure_first(parts, run, state)

        def measure(number: int, state: fs.TrainState) -> float:
            with run.timer.during("evaluation"):
                value, more = parts.evaluate(state.params)
            return run.report_held_out(number, value, more)

        # The loop begins with the measurement of the last saved step if that is due: the last process may
        # have been killed between saving and measuring.
        before_first = run.first - 1
        held_out = measure(before_first, state) if run.is_measured_after(before_first) else None
        for number in run.numbers():
            with run.timer.during("data"):
                batch = next(loader)
            # The model draws answers to a batch's prompts, and they are rewarded.
            if parts.rewarded is not None:
                with run.timer.during("rollouts"):
                    batch = (parts.rewarded.batch(state, *batch),)
            state = run.make_step(number, state, batch)

            # NaN ends the run, and so does SIGTERM to any rank. Other nodes get a copy if one is due.
            run.check_and_replicate(number, state, loader)
            if run.watch.fault:
                del state  # its memory is needed to find where that arose
                raise run.watch.diagnose()

            # Measure the held-out loss and save a checkpoint, if they are due.
            held_out = measure(number, state) if run.is_measured_after(number) else None
            run.save_if_due(number, state, loader, held_out)

        if run.is_ending:
            run.end_early(int(state.step))
            return

        # At the end, measure and export the tuned model, and wait for the last checkpoint.
        run.report.close()
        after = measure_all(parts, run, state)
        with run.timer.during("export"):
            written = export(config, parts.planned, parts.data.tokenizer, state, step, run.folder)
        with run.timer.during("saves"):
            fs.checkpoint.wait()
        if mesh.rank != 0:
            return

        # Rank 0 writes the results: answers before and after, the curve, the totals.
        table = parts.answers.table({"before": before["answers"], "after": after["answers"]})
        if table:
            write_text(run.folder / SAMPLES, table)
        with run.timer.during("reports"):
            title = f"{goal.name} of fine-tuning by {config.objective.name}"
            draw_run(run.folder / METRICS, goal, {}, run.folder / f"{goal.name}.png", title)
        numbers = {name: value for name, value in after.items() if name != "answers"}
        closing = run.finish(numbers, sample=SAMPLES)
        lines = []
        for name, value in numbers.items():
            label = name.replace("_", " ").replace("held out", "held-out")
            # A run from another one's checkpoint has no numbers from before.
            if before.get(name) is None:
                lines.append(f"{label}: {value:.3f}")
            else:
                lines.append(f"{label}: {before[name]:.3f} before, {value:.3f} after")
        lines += [*written, closing, f"results: {run.folder}"]
        print(f"\n{table}\n" + "\n".join(lines), flush=True)


# ------------------------------------------------------------------ what a run is made of


@dataclass(frozen=True)
class Parts:
    """The parts of a tuning run. `experiments.generate` reads a checkpoint into them, too.

    Args:
        config: the configuration, with the peak rate that was chosen.
        planned: what trains, and the plan of a step.
        held_out: the objective as a forward.
        answers: the table of prompts whose answers people see.
        batch: an example batch, whose shape all batches have.
        rewarded: what draws answers and rewards them; None if the objective has no rewards.
        tasks, scorer: public benchmarks of `run.evaluate`, and what measures the model by them.
    """

    config: FinetuneConfig
    mesh: fs.Mesh
    planned: MethodPlan
    data: FinetuneData
    step: Any
    held_out: Any
    answers: AnswerTable
    batch: Any
    rewarded: RewardedBatches | None
    tasks: tuple[Task, ...]
    scorer: Scorer

    @property
    def tokens(self) -> int:
        """Return the tokens of one step, of all ranks."""
        if self.rewarded is not None:
            prompts = self.rewarded.prompts
            return prompts.answers * prompts.ranks * prompts.width
        return self.make_loader().rows * self.data.rows.positions

    @property
    def goal(self) -> Goal:
        """Return what the run is judged by."""
        # The loss of samples is in nats per token; losses of pairs and rewards have no unit.
        kind = self.config.objective.kind
        if kind.data == "prompts" and not kind.teacher:
            return Goal("reward", is_maximised=True)
        return Goal(unit="nats per token" if kind.data == "samples" or kind.teacher else "")

    def make_loader(self) -> Loader:
        """Make this rank's batches, from the first step on."""
        return self.data.loader(self.config, self.mesh)

    def make_state(self) -> fs.TrainState:
        """Make the state before the first step: the base from its directory, adapters from the seed."""
        model, seed, planned = self.config.model, self.config.run.seed, self.planned
        specs, teacher = planned.plan.specs, self.config.objective.teacher
        return make_first_state(planned.tuning, self.step, specs, self.mesh, model, seed, teacher)

    def evaluate(self, params: Any) -> tuple[float, dict[str, float]]:
        """Return the goal's number on held-out data, and more numbers by name. All ranks call it together.

        The goal's number is the mean of the objective or of the reward. Numbers of tasks are called
        `task/metric`.
        """
        if self.goal.name == "reward":
            more = self.rewarded.mean_rewards(params)
            value = more.pop(self.goal.name)
        elif self.rewarded is not None:
            drawn = self.rewarded.held_out_batches(params)
            value, more = mean_over(self.held_out, params, zip(drawn), self.mesh.device)
        else:
            # A forward holds as many rows at once as a training step.
            measured, rows = self.data.measured, self.config.data.rows // self.planned.plan.accumulate
            if self.config.data.tokens is not None:
                rows = measured.at_once * self.mesh.data_size
            batches = measured.one_pass(
                rows, measured.rows_for(self.config.data.held_out_rows), **place_of(self.mesh)
            )
            value, more = mean_over(self.held_out, params, zip(batches), self.mesh.device)
        # Each rank answers a part of a task's questions, and the sums of all ranks are added.
        for task in self.tasks:
            results = [result for _, result in self.scorer.results(params, task)]
            sums = {metric: sum(result[metric] for result in results) for metric in task.metrics}
            all_sums = list(map(json.loads, self.step.gather_strings(json.dumps(sums))))
            copies = self.mesh.size // self.mesh.data_size  # ranks that answer the same questions
            count = len(task.questions) * copies
            for metric in sums:
                more[f"{task.name}/{metric}"] = sum(each[metric] for each in all_sums) / count
        return value, more

    def sample(self, params: Any) -> str:
        """Return prompts and the model's answers."""
        return self.answers.table({"answer": self.answers.answers(params)})


def build(config: FinetuneConfig, only_prompt: bool = False, tokens: int | None = None) -> Parts:
    """Make all parts of a run but its state.

    Args:
        only_prompt: whether `run.prompt` is the only prompt that is shown.
        tokens: with `data.tokens=auto`, the tokens of a micro-batch that a resumed run has had, as another
            number would make other batches. None measures how many fit.
    """
    # The mesh arranges ranks along axes. Ranks along data axes take different rows.
    run = config.run
    mesh = fs.make_mesh(**config.mesh.axes, device=run.device)

    # Make pure functions of the directory's model. The first state has the parameters' values.
    lm = replace(from_directory(config.model), fp32_head=config.objective.fp32_head)

    # Make the method, which says what trains, and its loss.
    tuning, objective = make_tuning(config, lm), OBJECTIVES[config.objective.name]
    loss = objective(tuning, config.objective, training=True)

    # Open the data, take one batch, plan how each leaf is stored, gathered and reduced, and make the step.
    # If answers are rewarded, the batch is a blank one of the shape of all.
    def build_step(config: FinetuneConfig) -> tuple[Any, ...]:
        data = open_data(config, lm.vision)
        if config.objective.kind.data == "prompts":
            multiple = math.lcm(WIDTHS, config.mesh.context)
            prompts = RewardedData(config, data, mesh.data_size, multiple, mesh.device)
            prompts.check(lm)
            batch, micro_rows = prompts.blank(), prompts.micro_rows
        else:
            prompts, (batch,) = None, next(data.loader(config, mesh))
            micro_rows = None if config.data.tokens is None else data.rows.at_once
        planned = plan_method(config, tuning, loss, mesh, batch, micro_rows)
        specs, options = planned.plan.specs, planned.plan.options
        step = fs.shard_step(loss, specs, mesh=mesh, optimizer=planned.optimizer, **options)
        return data, prompts, batch, planned, step

    def set_tokens(tokens: int) -> FinetuneConfig:
        # The budget of bytes has become one of tokens.
        run = replace(config.run, device_gb=None)
        return replace(config, data=replace(config.data, tokens=tokens), run=run)

    def predict_peak(tokens: int) -> int:
        *_, batch, _, step = build_step(set_tokens(tokens))
        return step.lower(tuning.params, batch).memory_analysis().peak_bytes

    # With data.tokens=auto, find how many tokens fit, unless the run has begun with some number.
    if config.data.tokens == AUTO:
        budget = budget_bytes(config, mesh)
        if tokens is None:
            tokens = find_most_tokens(predict_peak, budget, *token_limits(config))
        else:
            check_fits(tokens, predict_peak(tokens), budget)
        config = set_tokens(tokens)
    data, prompts, batch, planned, step = build_step(config)
    specs = planned.plan.specs
    config = replace(config, optimizer=replace(config.optimizer, lr=planned.rate))

    # Make forwards of the same leaves: the objective on held-out data, and answers that are shown.
    options = forward_options(config, mesh)
    held_out = fs.shard_forward(objective(tuning, config.objective, training=False), specs, **options)
    examples = data.examples(run, lm.context)
    if config.objective.kind.exported:  # classifiers and the like write no text
        examples = []
    elif only_prompt:  # the one that `run.prompt` names is the last
        examples = examples[-1:]

    def hidden(params: Any, tokens: torch.Tensor, *images: Any) -> torch.Tensor:  # prompts may have images
        return lm.hidden(params, tokens, **({"images": images[0]} if images else {}))

    answer = fs.shard_forward(tuning.policy(last_logits(hidden, lm.unembed)), specs, **options)
    window = window_of(examples, run.sample_length, lm.context)
    images = data.images_of(examples, window, mesh.device)
    sampler = Sampler(answer, window, mesh.device, temperature=0.0, more=images)
    answers = AnswerTable(sampler, data.tokenizer, examples, run.sample_length)

    # Make what draws answers and rewards them, and what measures tasks.
    rewarded = None if prompts is None else make_rewarded_batches(prompts, tuning, step, specs, mesh, options)
    tasks = tuple(read_tasks(run.evaluate))
    longest = max((len(q.choices) for task in tasks for q in task.questions), default=1)
    scorer = Scorer(
        lm, data.tokenizer, mesh, lambda fn: fs.shard_forward(tuning.policy(fn), specs, **options),
        rows=max(config.data.rows // mesh.data_size, longest),
    )  # fmt: skip
    return Parts(config, mesh, planned, data, step, held_out, answers, batch, rewarded, tasks, scorer)


# ------------------------------------------------------------------ before the first step, and after the last


def introduce(parts: Parts, state: fs.TrainState) -> None:
    """Print, on rank 0, what trains, and on what."""
    first_record = parts.data.show_first(colour=sys.stdout.isatty())
    drawn = "" if parts.rewarded is None else f"{parts.rewarded}\n"
    if parts.config.data.tokens is not None:
        drawn += f"data.tokens={parts.config.data.tokens}: {parts.data.budget}\n"
    print(
        f"{parts.planned.why}\n{parts.planned.tuning.describe_codes(state.params)}{drawn}"
        f"data: {parts.data.train}\n"
        f"the first of them; what is learned stands between « and »:\n{first_record}\n",
        flush=True,
    )


def measure_first(parts: Parts, run: Run, state: fs.TrainState) -> Measured:
    """Return the model's numbers before the first step, measured now or by the process that began the run."""
    # A file has the numbers, and what they depend on.
    config, path = parts.config, run.folder / BEFORE
    of = [config.model, config.objective.name, config.data.held_out, config.run.prompt]
    of += [config.run.sample_length, *config.run.evaluate]
    try:
        known = read_record(path) or {}
    except DamagedError as error:
        if parts.mesh.rank == 0:
            print(f"{error} It counts as none.", file=sys.stderr, flush=True)
        known = {}
    if known.get("of") != of:  # another configuration's
        known = {}
    # Rank 0 decides for all ranks, since they measure together.
    is_fresh = parts.step.gather_strings("" if int(state.step) or known else "fresh")[0]
    if is_fresh:
        values = {"of": of, **measure_all(parts, run, state)}
        if parts.mesh.rank == 0:
            write_record(path, values)
        return values
    # A run that goes on from another one's checkpoint has none.
    return known or {"answers": ["-"] * len(parts.answers.examples)}


def measure_all(parts: Parts, run: Run, state: fs.TrainState) -> Measured:
    """Measure the goal's number on held-out data, perplexity, and answers. All ranks call it together."""
    with run.timer.during("evaluation"):
        loss, more = parts.evaluate(state.params)
    values: Measured = {parts.goal.held_out: loss}
    if parts.config.objective.name == "sft":
        values["perplexity"] = math.exp(min(loss, 700.0))  # exp(710) overflows
    values |= {HELD_OUT + name: value for name, value in more.items()}
    with run.timer.during("samples"):
        return values | {"answers": parts.answers.answers(state.params)}


JOB = Job(COMMAND, prepare, finetune)

if __name__ == "__main__":
    # By its own name, so that launchers of sweeps can pickle it.
    from experiments import finetune as job

    main(job.JOB)
