"""The configuration of a fine-tuning job. `lib.config` has the groups that it shares with the main job."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from experiments.lib.checks import configuration
from experiments.lib.config import (
    AUTO,
    MULTIPLE,
    AdamWConfig,
    Fraction,
    HardwareConfig,
    MeshConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
    SGDConfig,
    StrategyConfig,
    TrackerConfig,
    misfits,
    refuse_pipeline,
)

METHODS = ("full", "lora", "qlora8", "qlora4")  # from the most memory to the least
ALL_LINEAR, VISION_LINEAR, EXPERTS = "all-linear", "vision-linear", "experts"  # words for method.targets


@configuration
class MethodConfig:
    """The method, which says what trains.

    With `full` all leaves train, except those that the globs of `freeze` name, joined by "|". With `lora`
    adapters train, and the base is frozen, as it is or as codes (`qlora8`, `qlora4`).

    `targets` are globs of leaves, joined by "|". Three words may be among them: "all-linear" for every matrix
    of the layers, "vision-linear" for every matrix that a model sees with, and "experts". `rank_stabilised`
    is rsLoRA, `dora` is DoRA. `b_rate` is the rate of B by that of A (LoRA+, Hayou et al. 2024: 16).
    `neftune` is the strength of the noise on embeddings in training (NEFTune, Jain et al. 2023: 5).
    """

    name: Literal[METHODS] = "lora"
    rank: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    targets: str = ALL_LINEAR
    freeze: str | None = None
    dropout: Fraction = 0.0
    rank_stabilised: bool = False
    dora: bool = False
    b_rate: PositiveFloat = 1.0
    neftune: NonNegativeFloat = 0.0


@dataclass(frozen=True)
class ObjectiveKind:
    """A kind of objectives, by its needs.

    Args:
        data: "samples", "pairs", "prompts", whose answers are drawn and rewarded, or "labels" or "twins" of
            `experiments.data.labelled`.
        reference: whether it needs the model as it was.
        beta: its default.
        values: whether it needs a value head.
        teacher: whether it needs a teacher.
        score: whether it needs a head that scores hidden states.
        targets: the kind of a batch's targets, of `tuning.dataset.TARGETS`.
        exported: the end of the name of transformers' class that opens the tuned model, if that is no
            language model any more.
        rates: a row of `tuning.method.DEFAULT_RATES`; None stands for that of its data.
        built_in: a name of `tuning.dataset.BUILT_IN`, the data where no file is named; None: its data.
    """

    data: str
    reference: bool = False
    beta: float = 0.1
    values: bool = False
    teacher: bool = False
    score: bool = False
    targets: str = "next"
    exported: str | None = None
    rates: str | None = None
    built_in: str | None = None

    @property
    def examples(self) -> str:
        """Return the name, in `dataset.BUILT_IN`, of the data that are used where no file is named."""
        return self.built_in or self.data

    @property
    def records(self) -> str:
        """Return the kind of records in its files."""
        return self.data if self.data in ("pairs", "labels", "twins") else "samples"


REWARDED = ObjectiveKind("prompts", beta=0.0)
OBJECTIVE_KINDS = {
    "sft": ObjectiveKind("samples"),
    "dpo": ObjectiveKind("pairs", reference=True),
    "ipo": ObjectiveKind("pairs", reference=True),
    "orpo": ObjectiveKind("pairs"),
    "simpo": ObjectiveKind("pairs", beta=2.0),
    **dict.fromkeys(("grpo", "dr_grpo", "bnpo", "dapo", "gspo"), REWARDED),
    "ppo": replace(REWARDED, values=True),
    "distill": ObjectiveKind("samples", teacher=True),
    "reward": ObjectiveKind(
        "pairs",
        score=True,
        targets="ends",
        exported="ForSequenceClassification",
        rates="heads",
        built_in="answers",
    ),
    "classify": ObjectiveKind(
        "labels", score=True, targets="classes", exported="ForSequenceClassification", rates="heads"
    ),
    "embed": ObjectiveKind("twins", targets="ends", exported="Model"),
}


@configuration
class ObjectiveConfig:
    """The loss of a fine-tuning job.

    `sft` raises the likelihood of responses. `balance` weighs the load balance of a mixture of experts in it
    (Switch Transformer: 0.01). `fp32_head` computes logits in fp32 whatever the rest is.

    dpo, ipo, orpo and simpo raise the chosen answer of a pair above the rejected one, by `beta` (null: its
    paper's), `label_smoothing` in dpo and `margin` in simpo.

    grpo, dr_grpo, bnpo, dapo, gspo and ppo learn from rewards. `group` answers to each prompt, of at most
    `tokens` tokens (null: 128, or 4 for the built-in tasks), are drawn at `temperature` and `top_p`. `reward`
    is a name, a mapping with _target_, a reward model's directory, or a list of these, whose sum counts
    (null: exact, or solved without `data.train`). `beta` weighs the KL to the model as it was, `lam` shapes
    ppo's advantages, and `updates` steps learn from the same answers. `environment` takes the place of a
    reward: a mapping with _target_, of a function (prompt, ask) -> (messages, reward) that talks with the
    model for at most `turns` answers. With `gather_once` ranks hold the whole model while they draw a step's
    answers, and otherwise gather a layer at a time for each token (null: hold it if it takes a quarter of a
    device's memory at most).

    `distill` lowers the reverse KL to a `teacher`, a model directory, with `on_policy` on the student's own
    answers to prompts. `reward` makes a reward model from pairs. `classify` learns the classes of texts, or
    with `level=token` of their words; `classes` are their names (null: those that occur). `embed` brings
    texts that belong together near each other, by InfoNCE of cosines times `scale`; for each of `dims` so
    many first dims of a hidden state are an embedding, too (Matryoshka).
    """

    name: Literal[tuple(OBJECTIVE_KINDS)] = "sft"
    beta: NonNegativeFloat | None = None
    group: Annotated[int, Field(ge=2)] = 16
    tokens: PositiveInt | None = None
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    reward: str | dict[str, Any] | list[str | dict[str, Any]] | None = None
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    updates: PositiveInt = 1
    environment: dict[str, Any] | None = None
    turns: PositiveInt = 8
    fp32_head: bool = False
    gather_once: bool | None = None
    balance: NonNegativeFloat = 0.0
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    margin: NonNegativeFloat = 1.0
    teacher: str | None = None
    on_policy: bool = False
    level: Literal["sequence", "token"] = "sequence"
    classes: tuple[str, ...] | None = None
    dims: tuple[PositiveInt, ...] = ()
    scale: PositiveFloat = 20.0

    def __post_init__(self) -> None:
        if self.name == "distill" and self.teacher is None:
            raise ValueError("objective=distill: needs a teacher. Fix: objective.teacher=FOLDER.")
        # Options that only one objective reads: that objective, and whether the option is set.
        idle = {
            "teacher": ("distill", self.teacher), "on_policy": ("distill", self.on_policy),
            "level": ("classify", self.level != "sequence"), "classes": ("classify", self.classes),
            "dims": ("embed", self.dims),
        }  # fmt: skip
        wrong = [
            f"objective.{option}: is of objective={name}"
            for option, (name, is_set) in idle.items()
            if is_set and self.name != name
        ]
        if wrong:
            raise ValueError(f"{'; '.join(wrong)}; leave the default.")
        if list(self.dims) != sorted(set(self.dims)):
            raise ValueError(f"objective.dims={list(self.dims)}: expected each once, the smallest first.")

    @property
    def kind(self) -> ObjectiveKind:
        kind = OBJECTIVE_KINDS[self.name]
        if self.on_policy:
            return replace(kind, data="prompts")
        if self.level == "token":
            return replace(kind, exported="ForTokenClassification", built_in="words")
        return replace(kind, reference=True) if kind.data == "prompts" and self.beta else kind


@configuration
class FinetuneDataConfig:
    """The data: files that `experiments.data.rows` reads.

    Null `train` stands for built-in examples of the objective's kind (`data.builtin`).

    If only `held_out` is null, one in 20 of the records of `train` is held out. The global batch
    has `rows` of `context` tokens each; with `pack` several samples share a row. `too_long` says what is done
    about samples that are longer than the context, and `broken` about records that cannot be used.

    With `tokens` a rank's micro-batch has so many positions, padding included, whatever the lengths. Records
    share its rows (`pack`), or each has a padded one. "auto" is the most that fits into `run.device_gb`, or
    into nine tenths of a GPU. `rows` are then the micro-batches of a step, of all ranks together, or the
    prompts of a step, whose answers take as many micro-batches as they need.
    """

    train: str | None = None
    held_out: str | None = None
    context: Annotated[int, Field(ge=8)] = 256
    rows: PositiveInt = 8
    tokens: Annotated[int, Field(ge=MULTIPLE, multiple_of=MULTIPLE)] | Literal["auto"] | None = None
    held_out_rows: PositiveInt = 32
    pack: bool = True
    too_long: Literal["refuse", "skip", "truncate"] = "refuse"
    broken: Literal["refuse", "skip"] = "refuse"

    def __post_init__(self) -> None:
        if self.train is None and self.held_out is not None:
            raise ValueError("data.held_out: without data.train there is nothing it is held out of.")


@configuration
class FinetuneRunConfig(RunConfig):
    """The main job's `RunConfig`, and tasks to `evaluate`.

    They are FORMAT:FILE as in `experiments.evaluate`, and measured with each held-out loss, before the first
    step and after the last.
    """

    evaluate: tuple[str, ...] = ()


@configuration
class FinetuneConfig:
    """The whole configuration of a fine-tuning job.

    `model` is a Hugging Face model directory, a model of its cache, or a base that `experiments.bases` makes.
    `export` is what is written at the end; "auto" stands for the adapters if there are some, and otherwise
    for the whole model.
    """

    method: MethodConfig
    objective: ObjectiveConfig
    strategy: StrategyConfig
    precision: PrecisionConfig
    optimizer: AdamWConfig | SGDConfig
    schedule: ScheduleConfig
    run: FinetuneRunConfig
    hardware: HardwareConfig
    mesh: MeshConfig = field(default_factory=MeshConfig)
    data: FinetuneDataConfig = field(default_factory=FinetuneDataConfig)
    model: str = "stdlib"
    export: Literal["auto", "adapters", "merged", "both", "none"] = AUTO
    tracker: TrackerConfig = field(default_factory=TrackerConfig)

    def __post_init__(self) -> None:
        fits = self.data.tokens == AUTO
        wrong = misfits(self.strategy, self.run, fits) + refuse_pipeline(self.mesh, "fine-tuning")
        wrong += self._find_budget_problems() + self._find_environment_problems()

        # What the objective needs of the others.
        name = self.objective.name
        if name in ("dpo", "ipo", "simpo") and self.objective.beta == 0:
            wrong.append(f"objective.beta=0: objective={name} learns nothing then; leave the default.")
        updates = self.objective.updates
        if updates > 1 and self.objective.kind.data != "prompts":
            wrong.append(f"objective.updates={updates}: is of objectives that draw answers; leave 1.")
        else:
            for key in ("steps", "save_every"):
                number = getattr(self.run, key)
                if number % updates:
                    wrong.append(
                        f"run.{key}={number}: has to be a multiple of objective.updates={updates}, so that "
                        f"no answers are drawn twice. Fix: run.{key}={-(-number // updates) * updates}."
                    )

        # Rows have lengths that all ranks of the context axis can share.
        most = math.gcd(self.data.context, MULTIPLE, self.mesh.context)
        if most < self.mesh.context:
            wrong.append(
                f"mesh.context={self.mesh.context}: has to divide data.context={self.data.context} and "
                f"{MULTIPLE}, of which rows that are not packed are multiples. Fix: mesh.context={most}."
            )

        # What the method has no use for.
        idle = []
        if self.method.dora:
            idle.append("dora")
        if self.method.b_rate != 1:
            idle.append("b_rate")
        if self.method.name == "full" and idle:
            wrong.append(
                f"method.{' and method.'.join(idle)}: method=full has no adapters; leave the default."
            )
        if self.method.name != "full" and self.method.freeze is not None:
            wrong.append(
                f"method.freeze: method={self.method.name} trains adapters alone; leave the default."
            )
        if isinstance(self.optimizer, SGDConfig) and self.method.b_rate != 1:
            wrong.append("method.b_rate: is of AdamW's rates. Fix: optimizer=adamw.")

        # What can be written at the end.
        if self.objective.kind.exported and self.export in ("adapters", "both"):
            wrong.append(
                f"export={self.export}: adapters alone are no model of objective={self.objective.name}. "
                "Fix: export=merged."
            )
        if self.method.name == "full" and self.export in ("adapters", "both"):
            wrong.append(f"export={self.export}: method=full has no adapters. Fix: export=merged.")

        # What the optimizer and the data cannot have.
        if isinstance(self.optimizer, SGDConfig) and self.optimizer.lr is None:
            wrong.append("optimizer.lr=null: the defaults are AdamW's. Fix: optimizer.lr=0.1.")
        if not self.data.pack and self.objective.kind.data in ("pairs", "twins"):
            wrong.append("data.pack=false: pairs are never packed; leave the default.")
        if wrong:
            raise ValueError("\n  ".join(wrong))

    def _find_environment_problems(self) -> list[str]:
        """Return what is wrong with an environment, a line each."""
        chosen, tokens = self.objective, self.data.tokens
        if chosen.environment is None:
            return []
        wrong = []
        if chosen.kind.data != "prompts" or chosen.kind.values or chosen.kind.teacher:
            wrong.append(
                f"objective.environment: is of answers to prompts, not of objective={chosen.name}. "
                "Fix: objective=grpo."
            )
        if chosen.reward is not None:
            wrong.append("objective.reward: the environment says what an answer is worth; leave null.")
        if tokens is None or (tokens != AUTO and tokens < self.data.context):
            least = -(-self.data.context // MULTIPLE) * MULTIPLE
            wrong.append(
                f"data.tokens={tokens}: turns are of many lengths, and a micro-batch holds the longest. "
                f"Fix: data.tokens={4 * least}."
            )
        return wrong

    def _find_budget_problems(self) -> list[str]:
        """Return what is wrong with a budget of tokens, a line each."""
        tokens, wrong = self.data.tokens, []
        if tokens is None:
            return wrong
        if self.strategy.name == AUTO:
            wrong.append(
                f"data.tokens={tokens}: strategy=auto chooses the micro-batches. Fix: data.tokens=null, or "
                "a strategy, and data.tokens=auto for the most that fits."
            )
        if self.run.accumulate != 1:
            wrong.append(
                f"run.accumulate={self.run.accumulate}: with data.tokens a step has as many micro-batches as "
                "it takes; leave 1."
            )
        if self.objective.kind.values:
            wrong.append(
                f"data.tokens={tokens}: objective={self.objective.name} says values of padded rows. "
                "Fix: data.tokens=null, or objective=grpo."
            )
        return wrong
