"""Launch: from a command line to the ranks that do its work.

`python -m experiments.train` composes the configuration and checks it against this machine
(`fit_to_machine`), takes a folder, writes both into `job.json` there and starts a process for each rank
(`start`): on a CPU a fork of itself, elsewhere the same command with `--as-rank job.json` in place of its
arguments. Ranks compose nothing (`be_rank`). Under `torchrun`, whose processes are ranks already, each rank
composes, and rank 0 takes the folder; the same happens where SLURM starts one torchrun for each node.

SIGTERM to the process of the command goes on to the ranks (`fnshard.launcher.local`), each of which notes it
in a `Stop`; the job tells all ranks with its next step, saves after the one that follows, and ends. What a
rank finds wrong ends all of them (`end_together`).
"""

from __future__ import annotations

import dataclasses
import errno
import gc
import json
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch.distributed.elastic.multiprocessing.errors import record

from experiments import AS_RANK, python_path
from experiments.lib.checks import ConfigError, pluralize
from experiments.lib.compose import (
    FAILURE,
    LOCAL,
    MISTAKE,
    Command,
    Composed,
    build,
    compose,
    exit_with,
    from_shell,
    is_mistake,
    is_outside,
    read,
    run_sweep,
    text_of,
)
from experiments.lib.config import AUTO, NEVER, rows_of
from experiments.lib.files import DamagedError, read_json, write_json
from experiments.lib.folder import (
    RESULT,
    STOPPED,
    RunFolder,
    claim,
    discard,
    is_finished,
    newest_step,
    read_result,
    search_value,
    write_result,
)
from experiments.lib.metrics import METRICS, read_rows
from experiments.lib.record import process_began
from experiments.lib.trackers import check_installed
from experiments.lib.watchdog import DivergedError
from fnshard.checkpoint.replicas import most_copies
from fnshard.compiler.ir import deferred_imports
from fnshard.compiler.kernels import store
from fnshard.compiler.kernels.inductor import import_compiler
from fnshard.errors import (
    BudgetError,
    CheckpointError,
    CollectiveError,
    OptimizerError,
    SpecError,
    TraceError,
    report,
)
from fnshard.launcher.fork import may_fork
from fnshard.launcher.local import LaunchError, launch, under_launcher
from fnshard.launcher.rank import LOGS, Stop, end_with_parent, run_rank
from fnshard.mesh.process_group import leave_group

SIDE_BY_SIDE = "joblib"  # Hydra's name of the launcher that runs jobs side by side
CPU_RANKS = 2  # the ranks where there is no accelerator and nobody says how many
FIRST_PORT, PORTS = 20_000, 10_000  # a rendezvous under SLURM takes one of these ports, by the job's number
# Errors that depend on inputs that are equal on all ranks, so that all ranks have them.
ALIKE = (SpecError, TraceError, OptimizerError, HydraException)
REFUSAL = "refused.json"  # it says why the ranks ended together; the process that started them reads it
PATIENCE_S = 30.0  # the seconds that a rank waits for torchrun to end it, if the command line is wrong
NO_TRIAL = "No trials are completed"  # Optuna's error where every trial of a search has failed
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)  # errors of a disk, not of the program


@dataclass(frozen=True)
class Job:
    """A command whose work ranks do together.

    Args:
        command: its command line; the configuration has `run`, `mesh` and `data`, as `TrainConfig` does.
        prepare: a function that runs before ranks start, with the configuration on this machine, and returns
            the one for the ranks. It finds mistakes in what the configuration names (files, directories).
        work: the work of a rank, a function of (configuration, `RunFolder`, overrides, `Stop`).
    """

    command: Command
    prepare: Callable[[Any], Any]
    work: Callable[[Any, RunFolder, list[str], Stop], None]

    @property
    def name(self) -> str:
        return self.command.name


class Sweep:
    """A place for the sweep that this process has begun, which its table's callback sets before the first
    job."""

    begun: DictConfig | None = None


# ------------------------------------------------------------------ the process that a person starts


def main(job: Job) -> None:
    """Run the command line of a job, or be one of its ranks."""
    deferred_imports.defer()  # the compiler is not needed if files have all kernels
    if sys.argv[1:2] == [AS_RANK]:
        be_rank_of_file(job, Path(sys.argv[2]))
    gc.enable()  # see `experiments.train`
    exit_with(lambda: run(job))


def run(job: Job) -> None:
    """Answer a command line: by one run, or by a sweep of runs that Hydra's launcher starts."""
    if under_launcher():
        record(be_rank_of_torchrun)(job)  # torchrun shows the error, whichever rank ends first
        return
    if count_nodes() > 1:
        raise ConfigError(
            f"srun starts this command on {count_nodes()} nodes. Fix: launcher=slurm hydra.launcher.nodes= "
            "with --multirun, outside of srun; or, inside of an allocation, torchrun: srun "
            "--ntasks-per-node 1 torchrun --nnodes $SLURM_NNODES --nproc-per-node 8 --rdzv-backend c10d "
            "--rdzv-id $SLURM_JOB_ID --rdzv-endpoint FIRST_NODE:29400 -m experiments.train."
        )
    composed = from_shell(job.command)
    if isinstance(composed, Composed):
        start(
            job, composed.config, composed.folder, composed.overrides,
            chosen=composed.is_chosen, began=process_began(),
        )  # fmt: skip
    elif composed:
        Sweep.begun = None
        try:
            run_sweep(job.command, partial(run_of_sweep, job, os.getpid()))
        except Exception as error:
            # Hydra makes no table of a sweep that breaks, as a search does in which every trial fails.
            last = Sweep.begun
            if last is not None and Path(last.hydra.sweep.dir).is_dir():
                with suppress(SystemExit):
                    instantiate(last.hydra.callbacks.table).on_multirun_end(last)
            if NO_TRIAL in str(error):  # each trial has printed why it failed
                sys.exit(FAILURE)
            raise


def run_of_sweep(job: Job, sweep: int, composed: DictConfig) -> float | None:
    """Do one run of a `--multirun`, in the process that its launcher gives it.

    Args:
        sweep: the process of the command.

    Returns:
        The number that a search optimises.
    """
    here = HydraConfig.get()
    folder, launcher = Path(here.runtime.output_dir).resolve(), here.runtime.choices["hydra/launcher"]
    overrides = list(here.overrides.task)
    if launcher == SIDE_BY_SIDE and os.getpid() != sweep:
        end_with_parent(signal.SIGTERM, sweep)  # otherwise a worker outlives the command, unseen

    # A run that fails is a row of the table, and the other runs follow.
    try:
        requested = read(job.command, composed)
        if requested.run.resume != NEVER and is_finished(folder, requested):
            print(f"resume: {folder} is finished", flush=True)
        elif start(job, requested, folder, overrides, chosen=True) == STOPPED and launcher == LOCAL:
            raise SystemExit(0)  # whoever stopped this run stopped the sweep
    except Exception as error:
        known = is_mistake(error) or is_outside(error)
        text = f"error: {text_of(error)}" if known else "".join(traceback.format_exception(error))
        print(text, file=sys.stderr, flush=True)
        reason = "" if known else f"{type(error).__name__}: {error}".splitlines()[0]
        with suppress(OSError):  # on a full disk
            write_result(folder, status="failed", overrides=overrides, error=text, reason=reason)

    # A search needs one number. Its direction is an enumeration of the sweeper's, or a text.
    direction = getattr(here.sweeper, "direction", None) or "minimize"
    is_said = any(o.lstrip("+").startswith("hydra.sweeper.direction=") for o in here.overrides.hydra)
    name = str(getattr(direction, "name", direction))
    return search_value(folder, here.callbacks.table.metric, name, is_said=is_said)


def start(
    job: Job, requested: Any, fresh: Path, overrides: list[str], *, chosen: bool, began: float | None = None
) -> str:
    """Start a run's ranks and wait for them; results go to `fresh`, or to where the run goes on.

    Args:
        chosen: whether the command names the folder.
        began: the time at which the command began, in seconds of `time.time`; None is now, as for a job of a
            sweep.

    Returns:
        The result's status, "ok" or "stopped".

    Raises:
        ConfigError: the configuration does not fit this machine (see `fit_to_machine`), `job.prepare` finds a
            mistake, or there is no checkpoint where `run.resume` says; nothing was started. Or ranks found
            that no plan fits into `run.device_gb`.
        LaunchError: a rank failed, or a checkpoint could not be read or written.
    """
    began = time.time() if began is None else began
    if (several := count_nodes()) > 1:
        return start_on_nodes(job, requested, fresh, overrides, several, chosen=chosen, began=began)

    torch.set_num_threads(1)  # a fork would lack threads that this process has

    # Check the configuration with what this machine has, and with what it names.
    config = job.prepare(fit_to_machine(requested))

    # Take the folder, which no other process gets until the block is left, and write for the ranks there.
    with claim(requested, fresh, chosen=chosen) as claimed:
        run_folder, folder = replace(claimed, began=began), Path(claimed.folder)
        write_overrides(folder, overrides)
        for name in (REFUSAL, RESULT):
            (folder / name).unlink(missing_ok=True)
        job_file = folder / "job.json"
        write_json(job_file, {**job_values(config, overrides), "run": dataclasses.asdict(run_folder)})

        # Ranks on a CPU are forks of this process, which imports once what each of them would import: the
        # compiler, too, if no code is kept yet.
        fork = partial(be_rank_of_file, job, job_file) if config.run.device == "cpu" and may_fork() else None
        if fork is not None:
            gc.disable()  # see `experiments.train`
            if not store.has_machine_code():
                import_compiler(config.run.backend)
            gc.freeze()  # nor do ranks look through these objects again
            gc.enable()

        # Start the ranks, and turn their errors into this process's.
        try:
            launch(
                rank_command(job, job_file),
                ranks=config.mesh.ranks,
                logs=folder / "ranks",
                env={"PYTHONPATH": python_path()},
                max_restarts=config.run.max_restarts,
                fork=fork,
            )
        except KeyboardInterrupt:
            reached = max((row["step"] for row in read_rows(folder / METRICS, sys.maxsize)), default=0)
            saved = newest_step(folder)
            goes_on = f"goes on from {saved}" if saved else "begins anew: nothing was saved"
            print(f"\ninterrupted: step {reached}; the same command {goes_on}", file=sys.stderr, flush=True)
            raise
        except LaunchError as error:
            if not folder.is_dir():
                raise LaunchError(
                    f"{folder} was deleted while the run was at work in it: nothing of it is left. Fix: the "
                    "same command begins anew."
                ) from None
            # Ranks that ended together have left their reason. A mistake leaves no folder behind if no step
            # was made.
            refused = read_json(folder / REFUSAL)
            if refused.get("mistake") and discard(claimed):
                raise ConfigError(refused["message"]) from None
            kind = ConfigError if refused.get("mistake") else LaunchError
            known = kind(refused["message"]) if refused else error
            with suppress(OSError):  # the disk may be what failed
                write_result(folder, status="failed", overrides=overrides, error=str(known))
            raise known from None
        return read_result(folder)["status"]


def job_values(config: Any, overrides: list[str]) -> dict[str, Any]:
    """Return what a rank needs of a command, see `be_rank`."""
    return {"config": dataclasses.asdict(config), "overrides": overrides}


def rank_command(job: Job, job_file: Path) -> list[str]:
    """Return the command line of a rank of a job."""
    return [sys.executable, "-u", "-m", f"experiments.{job.name}", AS_RANK, str(job_file)]


def write_overrides(folder: Path, overrides: list[str]) -> None:
    """Write the arguments of a single run where Hydra writes those of a run of a sweep."""
    path = folder / ".hydra" / "overrides.yaml"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(OmegaConf.to_yaml(OmegaConf.create(overrides)), encoding="utf-8")


# ------------------------------------------------------------------ this machine


def fit_to_machine(
    config: Any, *, accelerators: Mapping[str, int] | None = None, world: int | None = None, nodes: int = 1
) -> Any:
    """Return `config` with `run.device`, `mesh.shard` and `precision` filled in for the machine.

    Args:
        accelerators: devices by type, `{"cuda": 8}`; None takes those of this machine.
        world: the number of ranks that already run (under `torchrun`); None if they are to be started here.
        nodes: the number of machines like this one that the ranks are to be started on, equally many on each.

    Raises:
        ConfigError: a tracker is not installed; there are more ranks than devices; axes do not multiply to
            the ranks that there are, or do not divide over the nodes; nodes cannot hold so many replicas; a
            batch does not divide over ranks and micro-batches; or `run.disk_dir` is not there.
    """
    accelerators = find_accelerators() if accelerators is None else accelerators
    check_installed(config.tracker)
    disk_dir = config.run.disk_dir
    if disk_dir is not None and not os.path.isdir(disk_dir):
        raise ConfigError(f"run.disk_dir={disk_dir!r} is no directory. Fix: make it, or name another.")
    device, mesh = device_of("run.device", config.run.device, accelerators), config.mesh

    # There are as many ranks as the mesh asks for, or as there are devices or processes.
    fixed = mesh.replicate * mesh.expert * mesh.tensor * mesh.context
    available = world or nodes * (CPU_RANKS if device == "cpu" else accelerators[device])
    if mesh.shard is None:
        if available % fixed and (world or fixed < available):
            raise ConfigError(
                f"{_name_axes(mesh)} does not divide {available} ranks. "
                "Fix: another mesh.replicate, or say mesh.shard too."
            )
        mesh = replace(mesh, shard=max(1, available // fixed))
    ranks = mesh.ranks
    product = f"{_name_axes(mesh)} asks for {pluralize(ranks, 'rank')}"
    if world and ranks != world:
        raise ConfigError(f"{product}; {world} were started. Fix: torchrun --nproc-per-node {ranks}.")
    if device != "cpu" and not world and ranks > available:
        where = "this machine has" if nodes == 1 else f"{nodes} nodes have"
        has = pluralize(available, f"{device} device")
        raise ConfigError(f"{product}; {where} {has}. Fix: a smaller mesh, or run.device=cpu.")
    if ranks % nodes:
        fix = f"mesh.shard={max(1, available // fixed)}"
        raise ConfigError(f"{product}, which do not divide over {nodes} nodes. Fix: {fix}.")
    most = most_copies(nodes)
    if config.run.replicas > most and not world:
        raise ConfigError(
            f"run.replicas={config.run.replicas}: {pluralize(nodes, 'node')} can hold {most}. "
            f"Fix: run.replicas={most}, or more nodes."
        )

    # Rows have to divide over the ranks that take different ones, and over micro-batches.
    over = pluralize(mesh.data_ranks, "rank")
    if mesh.ranks > mesh.data_ranks:
        over += " that take other rows"
    micro = f" times run.accumulate={config.run.accumulate}" if config.run.accumulate > 1 else ""
    parts = {
        "rows": (mesh.data_ranks * config.run.accumulate, over + micro),
        "held_out_rows": (mesh.data_ranks, over),
    }
    wrong, fixes = [], []
    for name, (divisor, shown) in parts.items():
        rows = rows_of(config.data)[name]
        if rows % divisor:
            wrong.append(f"data.{name}={rows} does not divide over {shown}.")
            fixes.append(f"data.{name}={math.ceil(rows / divisor) * divisor}")
    if wrong:
        raise ConfigError(report("the batch cannot be cut:", wrong, " ".join(fixes)))

    # Gradients are summed over ranks or micro-batches, of which a budget of tokens or the search makes some.
    has_budget = getattr(config.data, "tokens", None) is not None
    sums = ranks > 1 or config.run.accumulate > 1 or config.strategy.name == AUTO or has_budget
    return replace(
        config,
        mesh=mesh,
        run=replace(config.run, device=device),
        precision=config.precision.on(device, sums),
    )


def find_accelerators() -> dict[str, int]:
    """Return the accelerators of this machine by type: `{"cuda": 8}`, or an empty dict."""
    if not torch.accelerator.is_available():
        return {}
    return {torch.accelerator.current_accelerator().type: torch.accelerator.device_count()}


def device_of(key: str, asked: str, accelerators: Mapping[str, int]) -> str:
    """Return the type of device that a key asks for: "auto" is the accelerator, or a CPU if there is none.

    Raises:
        ConfigError: this machine has none of it.
    """
    device = next(iter(accelerators), "cpu") if asked == AUTO else asked
    if device != "cpu" and device not in accelerators:
        has = ", ".join(["cpu", *accelerators])
        raise ConfigError(f"{key}={asked}: this machine has {has}. Fix: {key}=auto.")
    return device


def _name_axes(mesh: Any) -> str:
    """Return replicate, shard and the other axes of several ranks with their sizes, as a message has them."""
    sizes = {"replicate": mesh.replicate, "shard": mesh.shard}
    split = {name: getattr(mesh, name) for name in ("pipeline", "expert", "tensor", "context")}
    sizes |= {name: size for name, size in split.items() if size > 1}
    return " times ".join(f"mesh.{name}={size}" for name, size in sizes.items() if size is not None)


# ------------------------------------------------------------------ SLURM: several nodes


def count_nodes() -> int:
    """Return the number of nodes of the job step that this process is a task of; 1 outside of `srun`."""
    return int(os.environ.get("SLURM_STEP_NUM_NODES", "1")) if "SLURM_STEP_ID" in os.environ else 1


def start_on_nodes(
    job: Job, requested: Any, fresh: Path, overrides: list[str], nodes: int, *, chosen: bool, began: float
) -> str:
    """Start a run on each node of a SLURM job, as `start` does on one.

    torchrun starts the ranks, which meet on the first node, and rank 0 takes the run's folder.
    """
    config = fit_to_machine(requested, nodes=nodes)
    job_file = fresh / f"job.{os.environ['SLURM_NODEID']}.json"
    run = {"requested": dataclasses.asdict(requested), "fresh": str(fresh), "chosen": chosen, "began": began}
    write_json(job_file, {**job_values(config, overrides), **run})
    # The ranks' command begins with Python and `-u`, which torchrun adds itself.
    agent = torchrun_arguments(config.mesh.ranks // nodes, config.run.max_restarts)
    command = [sys.executable, *agent, *rank_command(job, job_file)[2:]]
    if subprocess.run(command, env={**os.environ, "PYTHONPATH": python_path()}).returncode:
        raise LaunchError(f"the ranks on {nodes} nodes failed: the output of torchrun says why.")
    return read_result(fresh)["status"]


def torchrun_arguments(ranks: int, max_restarts: int) -> list[str]:
    """Return the arguments of Python that start torchrun on each node of submitit's job.

    Args:
        ranks: the number of ranks of a node.

    Raises:
        ConfigError: SLURM has not started one task on each node.
    """
    from submitit import JobEnvironment  # the extra `slurm` is installed: it has started this job

    job = JobEnvironment()
    if job.num_tasks != job.num_nodes:
        raise ConfigError(
            f"SLURM started {job.num_tasks} tasks on {job.num_nodes} nodes; each starts all ranks of its "
            "node. Fix: hydra.launcher.tasks_per_node=1."
        )
    number = job.raw_job_id
    return [
        "-m", "torch.distributed.run", "--nnodes", str(job.num_nodes), "--nproc-per-node", str(ranks),
        "--max-restarts", str(max_restarts), "--rdzv-backend", "c10d", "--rdzv-id", number,
        "--rdzv-endpoint", f"{job.hostnames[0]}:{FIRST_PORT + int(number) % PORTS}",
    ]  # fmt: skip


# ------------------------------------------------------------------ a rank


def be_rank_of_torchrun(job: Job) -> NoReturn:
    """Compose the command line, and be a rank of it."""
    arguments = sys.argv[1:]
    try:
        flags = [a for a in arguments if a.startswith("-")]
        if flags:
            raise ConfigError(f"under torchrun only key=value arguments are taken, not {' '.join(flags)}.")
        composed = compose(job.command, arguments)
        config = fit_to_machine(composed.config, world=int(os.environ["WORLD_SIZE"]))
    except Exception as error:
        if not is_mistake(error) or os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise  # torchrun shows the traceback
        # All ranks have this command line, so all find the mistake. The first rank of each machine prints it,
        # and torchrun ends the others when that one has ended.
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(PATIENCE_S)
        print(f"error: {text_of(error)}", file=sys.stderr, flush=True)
        sys.exit(MISTAKE)
    requested = {"requested": dataclasses.asdict(composed.config), "fresh": str(composed.folder)}
    be_rank(job, {**job_values(config, arguments), **requested, "chosen": composed.is_chosen})


def be_rank_of_file(job: Job, path: Path) -> NoReturn:
    """Be a rank of the run that a file describes, see `start`."""
    be_rank(job, json.loads(path.read_text(encoding="utf-8")))


def be_rank(job: Job, values: Mapping[str, Any]) -> NoReturn:
    """Join the other ranks, do the job's work, and leave.

    Args:
        values: `config` (nested dicts of a configuration on this machine), `overrides`; and `run` (a
            `RunFolder` as a dict), or what finds it: `requested` (the configuration as the command has it),
            `fresh`, `chosen`; and perhaps `began`, of the command that started these ranks.
    """
    gc.disable()  # until the first step, see `experiments.train`
    config, stop = build(values["config"], job.command.config), Stop()
    if config.run.device != "cpu":
        import_compiler(config.run.backend)  # before ranks meet, so that none waits for another's import

    def work() -> None:
        try:
            with find_folder(job, values) as run:
                if int(os.environ.get("RANK", "0")) == 0 and LOGS in os.environ:
                    for name in (REFUSAL, RESULT):  # files of an earlier attempt
                        _refusal_path().with_name(name).unlink(missing_ok=True)
                # Where torchrun started the ranks, no process has prepared for them.
                prepared = config if "run" in values else prepare_on_ranks(job, config)
                job.work(prepared, run, list(values["overrides"]), stop)
        except BudgetError as error:
            end_together(f"run.device_gb={config.run.device_gb:g}: {error}", mistake=True)
        except DamagedError as error:  # perhaps only this rank has the error, as below
            sys.exit(f"error: {error}")
        except (CheckpointError, ConfigError, DivergedError, *ALIKE) as error:
            end_together(str(error), mistake=is_mistake(error))
        except OSError as error:  # only this rank has the error: the others end when it does
            if error.errno not in FULL:
                raise
            sys.exit(describe_full_disk(error))

    run_rank(work, device_type=config.run.device, timeout_s=config.run.timeout_s, stop=stop)


def prepare_on_ranks(job: Job, config: Any) -> Any:
    """Return what `job.prepare` makes of the configuration, where no process of ours has started the ranks.

    The first rank of each machine prepares, and the others find the files there.
    """
    problem, is_first = "", os.environ.get("LOCAL_RANK", "0") == "0"
    for turn_of_first in (True, False):
        if turn_of_first == is_first:
            try:
                config = job.prepare(config)
            except ConfigError as error:
                problem = str(error)
        # Ranks meet after each turn: the others begin when the first ones are done, and all end if one fails.
        problems = [problem]
        if dist.is_initialized():
            problems = [""] * dist.get_world_size()
            dist.all_gather_object(problems, problem)
        if any(problems):
            raise ConfigError(next(filter(None, problems)))
    return config


@contextmanager
def find_folder(job: Job, values: Mapping[str, Any]) -> Iterator[RunFolder]:
    """Yield the run's folder: the one that this rank was told, or (under `torchrun`) the one that rank 0
    finds."""
    if "run" in values:
        yield RunFolder(**values["run"])
        return
    answer: list[Any] = [None, ""]
    with ExitStack() as stack:
        if int(os.environ.get("RANK", "0")) == 0:
            try:
                requested, fresh = build(values["requested"], job.command.config), Path(values["fresh"])
                found = stack.enter_context(claim(requested, fresh, chosen=values["chosen"]))
                write_overrides(Path(found.folder), list(values["overrides"]))
                answer[0] = dataclasses.asdict(found) | {"began": values.get("began", process_began())}
            except ConfigError as error:
                answer[1] = str(error)
        if dist.is_initialized():
            dist.broadcast_object_list(answer, src=0)
        if answer[0] is None:
            end_together(answer[1], mistake=True)
        yield RunFolder(**answer[0])


def describe_full_disk(error: OSError) -> str:
    """Return the message of a disk's error, with the path and the way out.

    >>> print(describe_full_disk(OSError(28, "No space left on device", "run/metrics.jsonl")))
    cannot write run/metrics.jsonl: No space left on device.
    Fix: make room, or another hydra.run.dir; the same command goes on from the newest checkpoint.
    """
    fix = "make room, or another hydra.run.dir; the same command goes on from the newest checkpoint."
    return report(f"cannot write {error.filename or 'a file'}: {error.strerror}.", fix=fix)


def end_together(message: str, *, mistake: bool) -> NoReturn:
    """End all ranks with exit code 1.

    The reason goes to a file for the process that started them, or to stderr if torchrun did.

    As a rule all ranks have the same reason, and rank 0 tells it. Another rank tells it if the others have
    not failed, as when a user's reward fails on some answers.
    """
    rank, code = int(os.environ.get("RANK", "0")), 1
    # With a file every rank tells its reason at once: it may not know whether the others have failed, too,
    # before they are gone. On stderr the reason would show repeatedly, so rank 0 comes first.
    tells_now = rank == 0 or LOGS in os.environ
    if tells_now and not (rank != 0 and _refusal_path().exists()):
        code = say_why(message, mistake)
    try:
        leave_group()  # no rank ends before it has the reason
    except CollectiveError:
        if not tells_now:
            code = say_why(message, mistake)
    sys.exit(code)


def say_why(message: str, mistake: bool) -> int | str:
    """Say why ranks end. Return the exit code, or the message if it could not be written."""
    if LOGS not in os.environ:
        print(f"error: {message}", file=sys.stderr, flush=True)
        return 1
    try:
        write_json(_refusal_path(), {"message": message, "mistake": mistake})
    except OSError:  # on a full disk
        return message
    return 1


def _refusal_path() -> Path:
    """Return the file for the reason, in the run's folder, above that of the ranks' logs."""
    return Path(os.environ[LOGS]).parent / REFUSAL
