"""The configuration of `experiments.plan`: groups of the main job, and what is looked for."""

from __future__ import annotations

import math
import re
from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import PositiveFloat, PositiveInt

from experiments.explain.config import PER_PARAMETER, PaperShardsConfig, PaperTextConfig, not_on_paper
from experiments.lib.checks import configuration
from experiments.lib.compose import Command
from experiments.lib.config import (
    AdamWConfig,
    Dtype,
    HardwareConfig,
    MeshConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
    SGDConfig,
    StrategyConfig,
    Target,
    TrackerConfig,
    nameless_sizes,
    rows_of,
    uneven_splits,
)
from experiments.lib.decoder import DecoderConfig

if TYPE_CHECKING:
    from experiments.explain.subject import Subject

BATCH_TOKENS = 4_000_000  # about as many tokens has a step by default
DEVICE_SHARE = 0.9  # the share of a device's memory that a step may take by default
# The keys of the main job that a plan depends on. A recipe may have others, which the plan chooses, or which
# have no effect on it.
IN_PLAN = {"run": (), "data": ("rows",), "mesh": (), "strategy": ()}


@configuration
class PlanConfig:
    """The whole configuration of `experiments.plan`. It takes recipes of the main job, whose model,
    precision, optimizer and rows count here.

    `devices`: the number of devices. `days`: in place of `devices`, the number of days in which `tokens` are
    to be read; the search finds the fewest devices that do, by powers of two up to `most_devices`. `rows`:
    the rows of a step's batch on all ranks; null is the power of two that makes about four million tokens.
    `tokens`: the tokens that the whole training reads, or the rows, of data of one's own; null is 20 tokens a
    parameter, and no number of rows. `optimizer_dtypes`: dtypes of the optimizer's state that are tried
    besides the precision's; they take fewer bytes, and give other numbers. `device_gb`: the bytes of a device
    that a step may take, in 1e9; null is nine tenths of what the hardware has (the rest belongs to the
    allocator and NCCL).
    """

    model: DecoderConfig | Target
    precision: PrecisionConfig
    optimizer: AdamWConfig | SGDConfig | Target
    hardware: HardwareConfig
    data: PaperTextConfig | PaperShardsConfig | Target
    strategy: StrategyConfig
    run: RunConfig = field(default_factory=RunConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    objective: Target | None = None
    specs: list[tuple[str, str | dict[str, Any] | None]] | None = None
    devices: PositiveInt = 8
    days: PositiveFloat | None = None
    most_devices: PositiveInt = 65_536
    rows: PositiveInt | None = None
    tokens: PositiveFloat | None = None
    optimizer_dtypes: tuple[Dtype, ...] = ()
    device_gb: PositiveFloat | None = None

    def __post_init__(self) -> None:
        wrong = not_on_paper(self.hardware, self.optimizer)
        wrong += nameless_sizes(self.model, self.data, self.objective)
        if self.days is not None and self.tokens is None and self.unit == "row":
            wrong.append(f"days={self.days:g}: of data of one's own, say how many rows are read: tokens=1e9.")
        if wrong:
            raise ValueError("\n  ".join(wrong))

    @property
    def is_decoder(self) -> bool:
        """Return whether the model is the main job's own."""
        return isinstance(self.model, DecoderConfig) and self.objective is None

    @cached_property
    def is_layered(self) -> bool:
        """Return whether few layers say what all need. That holds for the main job's decoder, and for a
        language model of one's own that has a key `layers` and leaves `layers.0`, `layers.1` and so on."""
        if self.is_decoder:
            return True
        count = self.model.get("layers") if isinstance(self.model, dict) and self.objective is None else None
        return type(count) is int and {*self._shapes_by_layer} == {*range(count)}

    @property
    def layers(self) -> int:
        """Return the number of layers, which is 1 for a model that is looked at as a whole."""
        return (self.model.layers if self.is_decoder else self.model["layers"]) if self.is_layered else 1

    @cached_property
    def odd_layers(self) -> int:
        """Return the number of first layers behind which all layers are alike."""
        if self.is_decoder or not self.is_layered:
            return 0
        *first, last = self._shapes_by_layer.values()
        return max((number for number, shapes in enumerate(first, 1) if shapes != last), default=0)

    @cached_property
    def experts(self) -> int:
        """Return the number of experts of a layer, which the axis "expert" has to divide; 1 without
        experts."""
        if self.is_decoder:
            return 1
        named = tree_of(self._whole.params)
        return math.gcd(*(v.shape[0] for p, v in named.items() if "experts" in p and v.dim() == 3)) or 1

    @cached_property
    def _shapes_by_layer(self) -> dict[int, dict[str, Any]]:
        """Return the shapes of the leaves of each layer."""
        found: dict[int, dict[str, Any]] = {}
        for path, leaf in tree_of(self._whole.params).items():
            if (number := layer_of(path)) is not None:
                found.setdefault(number, {})[path.removeprefix(f"layers.{number}")] = leaf.shape
        return found

    @cached_property
    def _whole(self) -> Subject:
        """Return the model with all its layers."""
        from experiments.explain.subject import make_subject

        return make_subject(self)

    @property
    def row_tokens(self) -> int:
        """Return the number of tokens of a row, which is 1 for data of one's own, where rows are counted."""
        if self.objective is not None:
            return 1
        return self.model["context"] if isinstance(self.model, dict) else self.model.context

    @property
    def unit(self) -> str:
        """Return the name of what is counted: tokens, or rows of data of one's own."""
        return "token" if self.objective is None else "row"

    @property
    def parameters(self) -> int:
        """Return how many parameters the model has."""
        return self.model.parameters if self.is_decoder else self._whole.parameters

    def subject(self, layers: int) -> Subject:
        """Return the model and its data, with some layers. They are made once, since a model and data of
        one's own may take a while."""
        from experiments.explain.subject import make_subject  # and with it torch

        if not self.is_layered:
            return self._whole
        if layers not in self._subjects:
            self._subjects[layers] = make_subject(self, layers)
        return self._subjects[layers]

    @cached_property
    def _subjects(self) -> dict[int, Subject]:
        return {}

    @property
    def budget(self) -> int | None:
        """Return the number of tokens, or rows, that the whole training reads; None where nobody has said how
        many rows of one's own data."""
        if self.tokens is None and self.unit == "row":
            return None
        return int(self.tokens or PER_PARAMETER * self.parameters)

    @property
    def batch_rows(self) -> int:
        """Return the rows of a step on all ranks, from the plan's configuration or from a recipe."""
        said = self.rows or rows_of(self.data)["rows"]
        return said or 2 ** max(0, round(math.log2(BATCH_TOKENS / self.row_tokens)))

    def can_split(self, mesh: MeshConfig) -> bool:
        """Return whether a mesh can split the model. Matrices of a model of one's own are not split, since
        nobody knows what divides them."""
        if self.is_decoder:
            return not uneven_splits(self.model, mesh)
        is_whole = mesh.tensor * mesh.context == 1 and (mesh.pipeline == 1 or self.is_layered)
        return is_whole and self.experts % mesh.expert == 0


def layer_of(name: str) -> int | None:
    """Return the number of the layer that a unit or a leaf belongs to; None if it belongs to none.

    >>> layer_of("layers.12.mlp.up"), layer_of("head.weight")
    (12, None)
    """
    found = re.match(r"layers\.(\d+)(\.|$)", name)
    return None if found is None else int(found[1])


def tree_of(params: Any) -> dict[str, Any]:
    """Return leaves by path."""
    import fnshard as fs  # and with it torch

    return fs.tree.flatten_with_paths(params)[0]


COMMAND = Command(
    "plan",
    PlanConfig,
    "The fastest plan for a model on so many devices: axes, micro-batches, what is recomputed and what rests "
    "on the host, by bytes first and then by time; its rivals, days and cost. Nothing runs.",
    {
        "python -m experiments.plan model=70b devices=64": "70B on 64 H100s",
        "python -m experiments.plan model=405b devices=16384 tokens=15e12 rows=2048": "Llama 3.1's own size",
        "python -m experiments.plan model=8b days=30 tokens=1e12": "the fewest that take 30 days",
    },
)
