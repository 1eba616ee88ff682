"""The main job's configuration, and groups that other commands share: frozen dataclasses.

`lib.compose` makes them of a command line. A dataclass checks its own values when it is made.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import field, replace
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
)
from pydantic_core import PydanticCustomError

from experiments.lib.checks import TARGET, configuration
from experiments.lib.decoder import DecoderConfig
from fnshard.analysis.hardware import TABLE
from fnshard.compiler.kernels.remat import check
from fnshard.layout.presets import PRESETS
from fnshard.optim import schedules

AUTO = "auto"  # the strategy that `fnshard.fit` chooses within run.device_gb; the hardware that is here
NEVER = "never"  # a value of run.resume
MULTIPLE = 32  # padded rows have a multiple of so many positions
STRATEGIES = (*PRESETS, AUTO)
HARDWARE = (AUTO, *sorted(TABLE), "measure")
MEASURED = "measured:"  # followed by a folder of runs, whose measurements correct the hardware
SCHEDULES = tuple(schedules.SCHEDULES)


Tier = Literal["device", "host", "disk"]
Dtype = Literal["float64", "float32", "bfloat16", "float16"]
Fraction = Annotated[float, Field(ge=0, lt=1)]


def _check_target(values: dict[str, Any]) -> dict[str, Any]:
    """Refuse a group without a dotted name as its `_target_`."""
    if not isinstance(values.get(TARGET), str):
        raise PydanticCustomError("target", "expected a dotted name as _target_")
    return values


# A user's own group, in place of a dataclass: hydra.utils.instantiate calls what `_target_` names with the
# other keys.
Target = Annotated[dict[str, Any], AfterValidator(_check_target)]
TARGET_ROWS = {"rows": 8, "held_out_rows": 128}  # keys of a `data` that is a `_target_`, with their defaults

# ------------------------------------------------------------------ one dataclass per group


@configuration
class MeshConfig:
    """Ranks by axis; `shard: null` takes all that are left.

    Ranks along `replicate`, `shard` and `expert` take different rows. Those along `expert` also have
    different experts of a mixture, to which rows go, with room as `expert_capacity` says (`shard_step`).
    Those along `tensor` and `context` split the matrices and the sequences of the same rows; attention over
    split sequences runs as `context_attention` says. Those along `pipeline` each have some of the layers,
    through which the rows of `run.accumulate` micro-batches pass.
    """

    replicate: PositiveInt = 1
    shard: PositiveInt | None = None
    expert: PositiveInt = 1
    tensor: PositiveInt = 1
    context: PositiveInt = 1
    pipeline: PositiveInt = 1
    context_attention: Literal["auto", "ulysses", "gather", "ring"] = "auto"
    expert_capacity: PositiveFloat | None = None

    @property
    def axes(self) -> dict[str, int]:
        """Return the axes that `fnshard.make_mesh` takes.

        The last axis varies fastest, so ranks of a tensor group are neighbours, and stages, which send least,
        are farthest apart.
        """
        stages = {"pipeline": self.pipeline} if self.pipeline > 1 else {}
        sizes = stages | {"replicate": self.replicate, "shard": self.shard or 1}
        split = {"expert": self.expert, "context": self.context, "tensor": self.tensor}
        return sizes | {name: size for name, size in split.items() if size > 1}

    @property
    def ranks(self) -> int:
        return math.prod(self.axes.values())

    @property
    def data_ranks(self) -> int:
        """Return the number of ranks that take different rows."""
        return self.replicate * (self.shard or 1) * self.expert

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of `fnshard.shard_step` and `shard_forward` that choose what runs along axes."""
        return {"context_attention": self.context_attention, "expert_capacity": self.expert_capacity}


@configuration
class StrategyConfig:
    """A preset of `fnshard.presets`, how many units are gathered ahead, and what saves memory.

    `overlap` is the number of kernels after which a reduction is waited for; null lets `shard_step` choose.
    `remat`, `memory`, `optimizer_memory` and `update_on` are options of `shard_step` and `LayoutSpec`.
    `chunks` is the number of chunks of each stage of a pipeline. `auto` is no preset: `fnshard.fit` chooses
    all of these.
    """

    name: Literal[STRATEGIES] = "full_shard"
    prefetch_forward: NonNegativeInt = 1
    prefetch_backward: NonNegativeInt = 1
    overlap: NonNegativeInt | None = None
    remat: Any = "none"
    memory: Tier = "device"
    optimizer_memory: Tier = "device"
    update_on: Literal["device", "host"] | None = None
    chunks: PositiveInt = 1

    def __post_init__(self) -> None:
        if wrong := check(self.remat, ()):
            raise ValueError(f"strategy.{wrong[0]}.")
        if self.update_on == "host" and self.optimizer_memory == "device":
            raise ValueError("strategy.update_on='host': needs strategy.optimizer_memory=host or disk.")
        chosen = [f.name for f in dataclasses.fields(self)[1:] if getattr(self, f.name) != f.default]
        if self.name == AUTO and chosen:
            raise ValueError(f"strategy=auto chooses {' and '.join(chosen)} by itself; leave the default.")


@configuration
class PrecisionConfig:
    """The dtypes of stored parameters, of compute, of gradients that are summed, and of the optimizer.

    null takes what the device is fast in. `scaling` gives fp8 a scale for each tensor or each row.
    """

    storage: Dtype | None = None
    compute: Dtype | Literal["float8_e4m3fn"] | None = None
    reduce: Dtype | None = None
    optimizer: Dtype | None = None
    scaling: Literal["tensorwise", "rowwise"] = "tensorwise"

    def on(self, device: str, sums: bool) -> PrecisionConfig:
        """Return a copy without null: fp32 on CPUs, and elsewhere bf16 with an fp32 master.

        Args:
            sums: whether gradients of ranks or micro-batches are summed, which is done in fp32.
        """
        fast = "float32" if device == "cpu" else "bfloat16"
        defaults = {
            "storage": fast, "compute": fast, "reduce": "float32" if sums else fast, "optimizer": "float32",
        }  # fmt: skip
        return replace(
            self, **{name: value for name, value in defaults.items() if getattr(self, name) is None}
        )


@configuration
class AdamWConfig:
    """`fnshard.optim.adamw`, or `adamw_8bit`, without decay on norms and embeddings. `clip: null` clips
    nothing; `lr: null` is for fine-tuning, which has defaults."""

    name: Literal["adamw", "adamw_8bit"] = "adamw"
    lr: PositiveFloat | None = 4e-3
    b1: Fraction = 0.9
    b2: Fraction = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    clip: PositiveFloat | None = 1.0


@configuration
class SGDConfig:
    """`fnshard.optim.sgd`, without decay on norms and embeddings. `clip: null` clips nothing."""

    name: Literal["sgd"] = "sgd"
    lr: PositiveFloat | None = 0.3
    momentum: Fraction = 0.9
    nesterov: bool = True
    weight_decay: NonNegativeFloat = 0.0
    clip: PositiveFloat | None = 1.0

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise ValueError("optimizer.nesterov=true: needs optimizer.momentum above 0.")


@configuration
class ScheduleConfig:
    """The rate by step, a schedule of `fnshard.schedules`.

    `warmup` and `decay` (for `wsd` alone) are fractions of the run's steps, and `floor` is a fraction of the
    peak rate.
    """

    name: Literal[SCHEDULES] = "warmup_cosine"
    warmup: Fraction = 0.0
    decay: Fraction = 0.0
    floor: Fraction = 0.0

    def __post_init__(self) -> None:
        if self.warmup + self.decay > 1:
            raise ValueError("schedule: warmup + decay is more than the whole run; make it at most 1.")
        takes = {"constant": (), "wsd": ("warmup", "decay", "floor")}.get(self.name, ("warmup", "floor"))
        idle = [n for n in ("warmup", "decay", "floor") if getattr(self, n) and n not in takes]
        if idle:
            raise ValueError(f"schedule: {self.name} does nothing with {' and '.join(idle)}; leave 0.")


@configuration
class DataConfig:
    """Files below `root`, or with null those of Python's standard library; the global batch has `rows`."""

    name: Literal["text"] = "text"
    root: str | None = None
    suffix: str = ".py"
    held_out_percent: Annotated[int, Field(ge=1, lt=100)] = 10
    rows: PositiveInt = 8
    held_out_rows: PositiveInt = 128


@configuration
class ShardsConfig:
    """Shards of tokens in `root`/train and `root`/held_out, as `python -m experiments.tokenize` writes them;
    the global batch has `rows`."""

    name: Literal["shards"] = "shards"
    root: str | None = None
    rows: PositiveInt = 8
    held_out_rows: PositiveInt = 128

    def __post_init__(self) -> None:
        if not self.root:
            raise ValueError(
                "data=shards: needs the folder that experiments.tokenize wrote. Fix: data.root=FOLDER."
            )


@configuration
class TrackerConfig:
    """The trackers that get a run's rows besides its `metrics.jsonl`; there may be several:
    `tracker=[tensorboard,wandb]`.

    `project` is what wandb calls the project and MLflow the experiment. `store` is MLflow's: a folder below
    the one that the job is started in, or a URI. `own` lists trackers of your own, each a `_target_`.
    """

    tensorboard: bool = False
    wandb: bool = False
    mlflow: bool = False
    project: str = "fnshard"
    store: str = "mlruns"
    own: tuple[Target, ...] = ()


@configuration
class RunConfig:
    """The length of a run, its device, its checkpoints, its reports.

    `device_gb` is how much `strategy=auto` may take of one rank's device, in 1e9 bytes. `disk_dir` is the
    folder for tensors that are kept on disk. `micro_order` runs each of the `accumulate` micro-batches by
    itself ("depth"), all of them unit by unit ("breadth"), or, in a pipeline, gradients of leaves apart
    ("zero_bubble", within `zero_bubble_memory` times the memory of "depth"); see `fnshard.StepOptions`.
    `deterministic` gives the same bits again on the same GPUs, and is slower; CPUs do so anyway.

    A checkpoint is saved every `save_every` steps (with 0 only at the end and on SIGTERM), in the background
    with `async_save`. The last `keep` checkpoints stay, those of every `keep_every` steps, and the
    `keep_best` by held-out loss. With `resume` "auto" resumes the unfinished run of the same configuration,
    "never" begins anew, and a path (a run, or one of its checkpoints) starts from there. `max_restarts` is
    the number of restarts after a rank died. `replicas` is the number of nodes that hold a copy of each
    rank's blocks in memory, of every `replica_every`th step, so that a rank that dies costs no step; 0 keeps
    none.

    `sample_tokens` is the length of the sample at the end; null is 256, and in a short run two for each step.

    `profile` is the number of steps that are traced into `profile/`. `watch` chooses what is done about NaN:
    "hunt" ends the run and says where it arose, "stop" only ends it, "off" does nothing.
    """

    steps: PositiveInt = 600
    accumulate: PositiveInt = 1
    accumulate_mode: Literal["reduce", "local"] = "reduce"
    micro_order: Literal["depth", "breadth", "zero_bubble"] = "depth"
    zero_bubble_memory: Annotated[float, Field(ge=1)] = 1.0
    seed: NonNegativeInt = 0
    backend: Literal["inductor", "eager"] = "inductor"
    device: str = AUTO
    held_out_every: PositiveInt = 200
    sample_tokens: NonNegativeInt | None = None
    prompt: str | None = "def "
    timeout_s: PositiveFloat = 600.0
    device_gb: PositiveFloat | None = None
    disk_dir: str | None = None
    deterministic: bool = False
    save_every: NonNegativeInt = 100
    async_save: bool = False
    keep: PositiveInt = 2
    keep_every: PositiveInt | None = None
    keep_best: NonNegativeInt = 0
    resume: Annotated[str, Field(min_length=1)] = AUTO
    max_restarts: NonNegativeInt = 2
    replicas: NonNegativeInt = 0
    replica_every: PositiveInt = 1
    profile: NonNegativeInt = 0
    watch: Literal["hunt", "stop", "off"] = "hunt"

    @property
    def sample_length(self) -> int:
        """Return the tokens of a sample. Each takes a forward, so a run of a few steps gets a short one."""
        return min(256, 2 * self.steps) if self.sample_tokens is None else self.sample_tokens


@configuration
class HardwareConfig:
    """The hardware whose speed is planned for and compared with, a name of `analysis.hardware.TABLE`.

    "auto" is what the job runs on, "measure" takes a few seconds to find out, and "measured:FOLDER" corrects
    the hardware that earlier runs were predicted for by what they measured. `price_per_hour` is the price of
    one device, in a currency of your choice; null leaves costs out.
    """

    name: Literal[HARDWARE] | Annotated[str, StringConstraints(pattern=f"^{MEASURED}.")] = AUTO
    price_per_hour: NonNegativeFloat | None = None


@configuration
class TrainConfig:
    """The whole configuration of the main job.

    A `model` with a `_target_` is a module from tokens [B, T] to logits [B, T, V]; its keys `context` (T) and
    `vocab` (V) hold for the data, too. An `optimizer` with a `_target_` is an `fnshard.optim.Optimizer`; its
    `lr`, if it has one, is the rate by step that `schedule` makes of it.

    `data` with a `_target_` gives `(train, held_out)`, two map-style data sets; its keys `rows` and
    `held_out_rows`, of which `TARGET_ROWS` are the defaults, are not passed on. Then `objective` has a
    `_target_`, too: a loss `(model, *batch)`; and `model` is any module, or gives `(apply, params)`.

    `specs` are rules `[glob, how]` in place of the strategy's preset; `how` is null (whole on every rank), an
    axis that splits dim 0, or fields of `LayoutSpec`.
    """

    model: DecoderConfig | Target
    mesh: MeshConfig
    strategy: StrategyConfig
    precision: PrecisionConfig
    optimizer: AdamWConfig | SGDConfig | Target
    schedule: ScheduleConfig
    data: DataConfig | ShardsConfig | Target
    run: RunConfig
    hardware: HardwareConfig
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    objective: Target | None = None
    specs: list[tuple[str, str | dict[str, Any] | None]] | None = None

    def __post_init__(self) -> None:
        wrong = misfits(self.strategy, self.run)
        wrong += [
            f"data.{name}={rows}: must be a whole number above 0."
            for name, rows in rows_of(self.data).items()
            if type(rows) is not int or rows < 1
        ]
        # The strategy, the specs and the mesh have to go together, and the user's own parts with the others.
        wrong += specs_twice(self.strategy, self.specs)
        unnamed = nameless_sizes(self.model, self.data, self.objective)
        wrong += unnamed
        if isinstance(self.model, DecoderConfig):
            wrong += uneven_splits(self.model, self.mesh)
        wrong += idle_chunks(self.mesh, self.strategy, self.specs)
        if not isinstance(self.optimizer, dict) and self.optimizer.lr is None:
            wrong.append("optimizer.lr=null: only fine-tuning has defaults. Fix: optimizer.lr=4e-3.")
        if isinstance(self.data, DataConfig) and not unnamed and self.vocab < 256:
            wrong.append(f"model.vocab={self.vocab}: must be 256 or more, tokens are bytes.")
        if not self.run.prompt:
            wrong.append(f"run.prompt={self.run.prompt!r}: a sample needs at least one byte to start from.")
        if wrong:
            raise ValueError("\n  ".join(wrong))

    @property
    def context(self) -> int:
        """Return T, the longest sequence that the model is trained for."""
        return self.model.context if isinstance(self.model, DecoderConfig) else self.model.get("context")

    @property
    def vocab(self) -> int:
        """Return V, the size of the vocabulary."""
        return self.model.vocab if isinstance(self.model, DecoderConfig) else self.model.get("vocab")


def specs_twice(strategy: StrategyConfig, specs: Any) -> list[str]:
    """Return what is wrong with specs that are given, if the strategy chooses them."""
    if specs is None or strategy.name != AUTO:
        return []
    return ["specs: strategy=auto chooses them by itself; leave null."]


def nameless_sizes(model: Any, data: Any, objective: Any) -> list[str]:
    """Return what a user's model, data and loss leave open, in words."""
    if isinstance(data, dict) != (objective is not None):
        return ["data and objective: either both are a _target_ of your own, or neither."]
    if isinstance(data, dict) or not isinstance(model, dict):
        return []
    sizes = {name: model.get(name) for name in ("context", "vocab")}
    return [
        f"model.{name}={size}: a model of one's own names its {name} here, a whole number above 0."
        for name, size in sizes.items()
        if type(size) is not int or size < 1
    ]


def rows_of(data: Any) -> dict[str, int]:
    """Return `rows` and `held_out_rows` of a group, or of a `_target_`."""
    if isinstance(data, dict):
        return {name: data.get(name, default) for name, default in TARGET_ROWS.items()}
    return {name: getattr(data, name) for name in TARGET_ROWS}


def misfits(strategy: StrategyConfig, run: RunConfig, fits: bool = False) -> list[str]:
    """Return what is wrong with options of `run`: the strategy has no use for them, or lacks them.

    Args:
        fits: whether something else is sized to fit the device, so that a budget makes sense without auto.
    """
    wrong = []
    auto, tiers = strategy.name == AUTO, (strategy.memory, strategy.optimizer_memory)
    if auto and run.device_gb is None:
        wrong.append("strategy=auto: needs a budget. Fix: run.device_gb=24.")
    if auto and run.accumulate != 1:
        wrong.append(f"run.accumulate={run.accumulate}: strategy=auto chooses the micro-batches; leave 1.")
    if not (auto or fits) and run.device_gb is not None:
        wrong.append(f"run.device_gb={run.device_gb:g}: a budget is for strategy=auto.")
    if run.replica_every != 1 and not run.replicas:
        wrong.append(f"run.replica_every={run.replica_every}: nothing is copied. Fix: run.replicas=1.")
    if "disk" in tiers and run.disk_dir is None:
        wrong.append("run.disk_dir=None: what rests on disk needs a directory. Fix: run.disk_dir=/fast/disk.")
    if "disk" not in tiers and run.disk_dir is not None:
        wrong.append(f"run.disk_dir={run.disk_dir!r}: nothing rests on disk (strategy.optimizer_memory).")
    return wrong


def idle_chunks(mesh: MeshConfig, strategy: StrategyConfig, specs: Any) -> list[str]:
    """Return what is wrong with several chunks a stage: there are no stages, or rules say the chunks."""
    if strategy.chunks == 1:
        return []
    key, wrong = f"strategy.chunks={strategy.chunks}", []
    if mesh.pipeline == 1:
        wrong.append(f"{key}: chunks are of the stages of a pipeline. Fix: mesh.pipeline=2.")
    if specs is not None:
        wrong.append(f"{key}: specs say which chunk has a leaf (chunk: 0). Fix: strategy.chunks=1.")
    return wrong


def refuse_pipeline(mesh: MeshConfig, job: str) -> list[str]:
    """Return what is wrong with a mesh for a job that runs no pipelines."""
    if mesh.pipeline == 1:
        return []
    fix = "Fix: mesh.pipeline=1, and mesh.shard or mesh.tensor."
    return [f"mesh.pipeline={mesh.pipeline}: {job} runs no pipelines. {fix}"]


def uneven_splits(model: DecoderConfig, mesh: MeshConfig) -> list[str]:
    """Return what is wrong with axes that do not divide what they split of a model.

    >>> sizes = DecoderConfig(width=64, layers=2, heads=4, kv_heads=2, context=128)
    >>> uneven_splits(sizes, MeshConfig(tensor=4))
    ['mesh.tensor=4: has to divide model.kv_heads=2. Fix: mesh.tensor=2.']
    """
    sizes = {"heads": model.heads, "kv_heads": model.kv_heads, "mlp": model.hidden, "vocab": model.vocab}
    wrong = []
    if mesh.expert > 1:
        wrong.append(f"mesh.expert={mesh.expert}: the model has no experts. Fix: mesh.expert=1.")
    for axis, split in {"tensor": sizes, "context": {"context": model.context}}.items():
        ranks = getattr(mesh, axis)
        uneven = [f"model.{name}={size}" for name, size in split.items() if size % ranks]
        if uneven:
            fix = f"Fix: mesh.{axis}={math.gcd(ranks, *split.values())}."
            wrong.append(f"mesh.{axis}={ranks}: has to divide {' and '.join(uneven)}. {fix}")
    return wrong
