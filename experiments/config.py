"""The main job's configuration: frozen dataclasses, checked whole before any rank starts.

Hydra composes `conf/` against `register`ed schemas; `build` checks what came out once more (keys
added with `+`, deleted with `~`, numbers that make no sense), all problems in one error.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.model import DecoderConfig
from fnshard.compiler.remat import check as check_remat
from fnshard.errors import report
from fnshard.hardware import TABLE

AUTO = "auto"  # of strategies: `fnshard.fit` chooses, within run.device_gb
NEVER = "never"  # of run.resume
STRATEGIES = ("full_shard", "shard_grad_op", "zero3", "zero2", "zero1", "no_shard", "hybrid_shard", AUTO)
TIERS = ("device", "host", "disk")
HARDWARE = (AUTO, *TABLE, "measure")
DTYPES = ("float64", "float32", "bfloat16", "float16")
SCHEDULES = ("warmup_cosine", "linear", "wsd", "constant")


class ConfigError(ValueError):
    """The configuration is wrong; the message lists every problem."""


# ------------------------------------------------------------------ one dataclass per group


@dataclass(frozen=True)
class MeshConfig:
    """Ranks by axis; `shard: null` means all that are left."""

    replicate: int = 1
    shard: int | None = None

    def __post_init__(self) -> None:
        at_least(1, self, "replicate", "shard")


@dataclass(frozen=True)
class StrategyConfig:
    """A preset of `fnshard.presets`, how many units are gathered ahead, and what saves memory.

    `remat`, `memory`, `optimizer_memory`, `update_on`: as `shard_step` and `LayoutSpec` take them. `auto`
    is no preset: all of these are found by `fnshard.fit`.
    """

    name: str = "full_shard"
    prefetch_forward: int = 1
    prefetch_backward: int = 1
    remat: Any = "none"
    memory: str = "device"
    optimizer_memory: str = "device"
    update_on: str | None = None

    def __post_init__(self) -> None:
        one_of(STRATEGIES, self, "name")
        at_least(0, self, "prefetch_forward", "prefetch_backward")
        one_of(TIERS, self, "memory", "optimizer_memory")
        one_of(TIERS[:2], self, "update_on")
        wrong = check_remat(self.remat, ())
        if wrong:
            raise ValueError(f"strategy.{wrong[0]}.")
        if self.update_on == "host" and self.optimizer_memory == "device":
            raise ValueError("strategy.update_on='host': needs strategy.optimizer_memory=host or disk.")
        chosen = [f.name for f in dataclasses.fields(self)[1:] if getattr(self, f.name) != f.default]
        if self.name == AUTO and chosen:
            raise ValueError(f"strategy=auto chooses {' and '.join(chosen)} by itself; leave the default.")


@dataclass(frozen=True)
class PrecisionConfig:
    """dtypes of the stored parameters, of compute, of gradients on the wire, of the optimizer."""

    storage: str = "float32"
    compute: str = "float32"
    reduce: str = "float32"
    optimizer: str = "float32"

    def __post_init__(self) -> None:
        one_of(DTYPES, self, "storage", "compute", "reduce", "optimizer")


@dataclass(frozen=True)
class AdamWConfig:
    """`fnshard.optim.adamw`; no decay on norms and embeddings. `clip: null` clips nothing."""

    name: str = "adamw"
    lr: float = 4e-3
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        one_of(("adamw",), self, "name")
        above(0, self, "lr", "eps", "clip")
        at_least(0, self, "weight_decay")
        fraction(self, "b1", "b2")


@dataclass(frozen=True)
class SGDConfig:
    """`fnshard.optim.sgd`; no decay on norms and embeddings. `clip: null` clips nothing."""

    name: str = "sgd"
    lr: float = 0.3
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 0.0
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        one_of(("sgd",), self, "name")
        above(0, self, "lr", "clip")
        at_least(0, self, "weight_decay")
        fraction(self, "momentum")
        if self.nesterov and not self.momentum:
            raise ValueError("optimizer.nesterov=true: needs optimizer.momentum above 0.")


@dataclass(frozen=True)
class ScheduleConfig:
    """The rate by step: a name of `fnshard.schedules`.

    `warmup` and `decay` (for `wsd` alone) are fractions of the run's steps, `floor` of the peak rate.
    """

    name: str = "warmup_cosine"
    warmup: float = 0.0
    decay: float = 0.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        one_of(SCHEDULES, self, "name")
        fraction(self, "warmup", "decay", "floor")
        if self.warmup + self.decay > 1:
            raise ValueError("schedule: warmup + decay is more than the whole run; make it at most 1.")
        takes = {"constant": (), "wsd": ("warmup", "decay", "floor")}.get(self.name, ("warmup", "floor"))
        idle = [n for n in ("warmup", "decay", "floor") if getattr(self, n) and n not in takes]
        if idle:
            raise ValueError(f"schedule: {self.name} does nothing with {' and '.join(idle)}; leave 0.")


@dataclass(frozen=True)
class DataConfig:
    """Files below `root` (null: Python's standard library); `rows` of the global batch."""

    name: str = "text"
    root: str | None = None
    suffix: str = ".py"
    held_out_percent: int = 10
    rows: int = 8
    held_out_rows: int = 128

    def __post_init__(self) -> None:
        one_of(("text",), self, "name")
        at_least(1, self, "held_out_percent", "rows", "held_out_rows")
        if self.held_out_percent > 99:
            raise ValueError(f"data.held_out_percent={self.held_out_percent}: must be below 100.")


@dataclass(frozen=True)
class ShardsConfig:
    """Shards of tokens in `root`/train and `root`/held_out, as `python -m experiments.tokenize` writes them;
    `rows` of the global batch."""

    name: str = "shards"
    root: str | None = None
    rows: int = 8
    held_out_rows: int = 128

    def __post_init__(self) -> None:
        one_of(("shards",), self, "name")
        at_least(1, self, "rows", "held_out_rows")
        if not self.root:
            raise ValueError(
                "data=shards: needs the folder that experiments.tokenize wrote. Fix: data.root=FOLDER."
            )


@dataclass(frozen=True)
class RunConfig:
    """How long, on what, and what is told of it.

    `device_gb`: what `strategy=auto` may take of one rank's device, in 1e9 bytes; `hardware`: whose speed it
    plans for, "measure" takes a few seconds on this machine; `disk_dir`: for what rests on disk.

    Checkpoints: one every `save_every` steps (0: only at the end and on SIGTERM), in the background with
    `async_save`; the last `keep` stay, those of every `keep_every` steps, the `keep_best` by held-out loss.
    `resume`: "auto" goes on with the unfinished run of the same configuration, "never" begins anew, a path
    (a run, or one of its checkpoints) starts from there. `max_restarts`: after a rank died. `stop_grace_s`:
    what SIGTERM leaves the ranks to finish a step and save.
    """

    steps: int = 600
    accumulate: int = 1
    accumulate_mode: str = "reduce"
    seed: int = 0
    backend: str = "inductor"
    device: str = "auto"
    held_out_every: int = 200
    sample_tokens: int = 256
    prompt: str | None = "def "
    timeout_s: float = 600.0
    device_gb: float | None = None
    hardware: str = AUTO
    disk_dir: str | None = None
    save_every: int = 100
    async_save: bool = False
    keep: int = 2
    keep_every: int | None = None
    keep_best: int = 0
    resume: str = AUTO
    max_restarts: int = 2
    stop_grace_s: float = 120.0

    def __post_init__(self) -> None:
        at_least(1, self, "steps", "accumulate", "held_out_every", "keep", "keep_every")
        above(0, self, "device_gb", "stop_grace_s")
        one_of(HARDWARE, self, "hardware")
        at_least(0, self, "seed", "sample_tokens", "save_every", "keep_best", "max_restarts")
        if not self.resume:
            raise ValueError("run.resume='': must be auto, never, or a path.")
        if self.seed >= 2**63:
            raise ValueError(f"run.seed={self.seed}: must be below 2**63.")
        above(0, self, "timeout_s")
        one_of(("inductor", "eager"), self, "backend")
        one_of(("reduce", "local"), self, "accumulate_mode")


@dataclass(frozen=True)
class TrainConfig:
    """Everything the main job is told."""

    model: DecoderConfig
    mesh: MeshConfig
    strategy: StrategyConfig
    precision: PrecisionConfig
    optimizer: AdamWConfig | SGDConfig
    schedule: ScheduleConfig
    data: DataConfig | ShardsConfig
    run: RunConfig

    def __post_init__(self) -> None:
        wrong = misfits(self.strategy, self.run)
        if isinstance(self.data, DataConfig) and self.model.vocab < 256:
            wrong.append(f"model.vocab={self.model.vocab}: must be 256 or more, tokens are bytes.")
        if not self.run.prompt:
            wrong.append(f"run.prompt={self.run.prompt!r}: a sample needs at least one byte to start from.")
        if wrong:
            raise ValueError("\n  ".join(wrong))


def misfits(strategy: StrategyConfig, run: RunConfig, *, budgeted: bool = False) -> list[str]:
    """Options of `run` that the strategy has no use for, or lacks.

    Args:
        budgeted: something else than the strategy looks at `run.device_gb`, too.
    """
    wrong = []
    auto, tiers = strategy.name == AUTO, (strategy.memory, strategy.optimizer_memory)
    if auto and run.device_gb is None:
        wrong.append("strategy=auto: needs a budget. Fix: run.device_gb=24.")
    if auto and run.accumulate != 1:
        wrong.append(f"run.accumulate={run.accumulate}: strategy=auto chooses the micro-batches; leave 1.")
    if not (auto or budgeted) and run.device_gb is not None:
        wrong.append(f"run.device_gb={run.device_gb:g}: a budget is for strategy=auto.")
    if not auto and run.hardware != AUTO:
        wrong.append(f"run.hardware={run.hardware}: only strategy=auto plans for a hardware.")
    if "disk" in tiers and run.disk_dir is None:
        wrong.append("run.disk_dir=None: what rests on disk needs a directory. Fix: run.disk_dir=/fast/disk.")
    if "disk" not in tiers and run.disk_dir is not None:
        wrong.append(f"run.disk_dir={run.disk_dir!r}: nothing rests on disk (strategy.optimizer_memory).")
    return wrong


def _node(config: object) -> str:
    return {
        "AdamWConfig": "optimizer",
        "SGDConfig": "optimizer",
        "ShardsConfig": "data",
    }.get(type(config).__name__, type(config).__name__.removesuffix("Config").lower())


def _each(config: object, names: tuple[str, ...], good: Any, wanted: str) -> None:
    bad = [n for n in names if getattr(config, n) is not None and not good(getattr(config, n))]
    if bad:
        shown = " and ".join(f"{_node(config)}.{n}={getattr(config, n)!r}" for n in bad)
        raise ValueError(f"{shown}: must be {wanted}.")


def at_least(least: int, config: object, *names: str) -> None:
    _each(config, names, lambda v: v >= least, f"{least} or more")


def above(bound: int, config: object, *names: str) -> None:
    _each(config, names, lambda v: v > bound, f"above {bound}")


def fraction(config: object, *names: str) -> None:
    _each(config, names, lambda v: 0 <= v < 1, "0 or more and below 1")


def one_of(choices: tuple[str, ...], config: object, *names: str) -> None:
    _each(config, names, lambda v: v in choices, f"one of {', '.join(choices)}")


# ------------------------------------------------------------------ from plain values to dataclasses


def build(values: Mapping[str, Any], kind: type = TrainConfig) -> Any:
    """Make the dataclasses from nested dicts.

    Raises:
        ConfigError: unknown or missing keys, wrong types, values out of range; all of them at once.
    """
    problems: list[str] = []
    config = _build(kind, values, "", problems)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(report(f"the configuration has {count}:", problems))
    return config


def _build(kind: type, values: Any, path: str, problems: list[str]) -> Any:
    """`kind(**values)`, or None with something added to `problems`."""
    if not isinstance(values, Mapping):
        problems.append(f"{path or 'the configuration'}={values!r}: expected keys below it.")
        return None
    before = len(problems)
    hints = typing.get_type_hints(kind)
    known = [field.name for field in dataclasses.fields(kind)]
    at = f"{path}." if path else ""
    for key in values:
        if key not in known:
            problems.append(f"{at}{key}: no such key; {path or 'the top'} has {', '.join(known)}.")
    made = {}
    for name in known:
        if name not in values:
            problems.append(f"{at}{name}: is missing.")
            continue
        made[name] = _value(hints[name], values[name], f"{at}{name}", problems)
    if len(problems) > before:
        return None
    try:
        return kind(**made)
    except ValueError as error:
        problems.append(str(error))
        return None


def _value(hint: Any, value: Any, path: str, problems: list[str]) -> Any:
    if hint is Any:  # the dataclass looks at it
        return value
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    groups = [option for option in options if dataclasses.is_dataclass(option)]
    if groups:
        name = value.get("name") if isinstance(value, Mapping) else None
        named = [g for g in groups if getattr(g, "name", None) == name]
        return _build((named or groups)[0], value, path, problems)
    if value is None and types.NoneType in options:
        return None
    wanted = next(option for option in options if option is not types.NoneType)
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        problems.append(f"{path}={value!r}: expected {wanted.__name__}, got {type(value).__name__}.")
    elif wanted is float and not math.isfinite(value):
        problems.append(f"{path}={value!r}: expected a finite number.")
    return value


def register(
    kind: type = TrainConfig, name: str = "schema", without_files: tuple[str, ...] = ("mesh",)
) -> None:
    """Tell Hydra's `ConfigStore` the schemas, so that it refuses wrong keys and types by itself.

    Args:
        kind: a job's configuration.
        name: of its schema.
        without_files: groups that have no files to choose from, and start from their defaults.
    """
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    hints = typing.get_type_hints(kind)
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    groups: list[Any] = []
    for group, hint in hints.items():
        if isinstance(hint, types.UnionType) and any(map(dataclasses.is_dataclass, typing.get_args(hint))):
            groups.append((group, Any))
        elif not dataclasses.is_dataclass(hint):
            groups.append((group, hint, dataclasses.field(default=defaults[group])))
        else:
            schema = _schema(hint)
            field = (dataclasses.field(default_factory=schema),) if group in without_files else ()
            groups.append((group, schema, *field))
    groups.sort(key=len)
    store.store(name=name, node=dataclasses.make_dataclass(kind.__name__, groups))
    for group, kinds in (("optimizer", (AdamWConfig, SGDConfig)), ("data", (DataConfig, ShardsConfig))):
        for each in kinds:
            store.store(group=group, name=f"schema_{each.name}", node=_schema(each))


def _schema(kind: type) -> type:
    """The same fields, not frozen: OmegaConf would make frozen ones read-only, to overrides too."""
    hints = typing.get_type_hints(kind)
    fields = [
        (f.name, hints[f.name], dataclasses.field(default=f.default))
        if f.default is not dataclasses.MISSING
        else (f.name, hints[f.name])
        for f in sorted(dataclasses.fields(kind), key=lambda f: f.default is not dataclasses.MISSING)
    ]
    return dataclasses.make_dataclass(kind.__name__, fields)
