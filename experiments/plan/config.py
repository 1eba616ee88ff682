"""The configuration of `experiments.plan`: groups of the main job, and the kind of plan to look for."""

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

BATCH_TOKENS = 4_000_000  # by default a step has about as many tokens
DEVICE_SHARE = 0.9  # the share of a device's memory that a step may take by default
# The keys of the main job that a plan depends on. A recipe may have others, which the plan chooses, or which
# have no effect on it.
IN_PLAN = {"run": (), "data": ("rows",), "mesh": (), "strategy": ()}


@configuration
class PlanConfig:
    """The whole configuration of `experiments.plan`. It takes recipes of the main job, whose model,
    precision, optimizer and rows count here.

    `devices` is the number of devices. `days` may take its place: it is the number of days in which `tokens`
    are to be read, and the search finds the fewest devices that do so, by powers of two up to `most_devices`.
    `rows` are the rows of a step's batch on all ranks; null is the power of two that makes about four million
    tokens. `tokens` are those that the whole training reads, or its rows if the data are your own; null is 20
    tokens a parameter, and no number of rows. `optimizer_dtypes` are dtypes of the optimizer's state that are
    tried besides the precision's; they take fewer bytes, and give other numbers. `device_gb` are the bytes of
    a device that a step may take, in 1e9; null is nine tenths of what the hardware has (the allocator and
    NCCL need the rest).
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
        """Return whether the price of all layers follows from that of a few.

        That holds for the main job's decoder, and for the user's own language model if it has a key `layers`
        and leaves `layers.0`, `layers.1` and so on.
        """
        if self.is_decoder:
            return True
        count = self.model.get("layers") if isinstance(self.model, dict) and self.objective is None else None
        return type(count) is int and {*self._shapes_by_layer} == {*range(count)}

    @property
    def layers(self) -> int:
        """Return the number of layers, which is 1 for a model that is priced as a whole."""
        if not self.is_layered:
            return 1
        return self.model.layers if self.is_decoder else self.model["layers"]

    @cached_property
    def odd_layers(self) -> int:
        """Return the number of first layers after which all layers are alike."""
        if self.is_decoder or not self.is_layered:
            return 0
        *first, last = self._shapes_by_layer.values()
        return max((number for number, shapes in enumerate(first, 1) if shapes != last), default=0)

    @cached_property
    def experts(self) -> int:
        """Return the number of experts of a layer, which the axis "expert" has to divide; 1 if there are
        none."""
        if self.is_decoder:
            return 1
        named = tree_of(self._whole.params)
        return math.gcd(*(v.shape[0] for p, v in named.items() if "experts" in p and v.dim() == 3)) or 1

    @cached_property
    def _shapes_by_layer(self) -> dict[int, dict[str, Any]]:
        """Return the shapes of the leaves of each layer."""
        shapes: dict[int, dict[str, Any]] = {}
        for path, leaf in tree_of(self._whole.params).items():
            number = layer_of(path)
            if number is not None:
                shapes.setdefault(number, {})[path.removeprefix(f"layers.{number}")] = leaf.shape
        return shapes

    @cached_property
    def _whole(self) -> Subject:
        """Return the model with all its layers."""
        from experiments.explain.subject import make_subject

        return make_subject(self)

    @property
    def row_tokens(self) -> int:
        """Return the number of tokens of a row. It is 1 for the user's own data, whose rows are counted."""
        if self.objective is not None:
            return 1
        return self.model["context"] if isinstance(self.model, dict) else self.model.context

    @property
    def unit(self) -> str:
        """Return the name of what is counted: tokens, or rows of the user's own data."""
        return "token" if self.objective is None else "row"

    @property
    def parameters(self) -> int:
        """Return the number of the model's parameters."""
        return self.model.parameters if self.is_decoder else self._whole.parameters

    def subject(self, layers: int) -> Subject:
        """Return the model and its data, with a number of layers. They are made once, since the user's own
        may take a while."""
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
        """Return the number of tokens, or rows, that the whole training reads; None if the number of rows of
        the user's own data is not known."""
        if self.tokens is None and self.unit == "row":
            return None
        return int(self.tokens or PER_PARAMETER * self.parameters)

    @property
    def batch_rows(self) -> int:
        """Return the rows of a step on all ranks, from the plan's configuration or from a recipe."""
        rows = self.rows or rows_of(self.data)["rows"]
        return rows or 2 ** max(0, round(math.log2(BATCH_TOKENS / self.row_tokens)))

    def can_split(self, mesh: MeshConfig) -> bool:
        """Return whether a mesh can split the model. Matrices of the user's own model are not split, since it
        is not known what divides them."""
        if self.is_decoder:
            return not uneven_splits(self.model, mesh)
        is_whole = mesh.tensor * mesh.context == 1 and (mesh.pipeline == 1 or self.is_layered)
        return is_whole and self.experts % mesh.expert == 0


def layer_of(name: str) -> int | None:
    """Return the number of the layer of a unit or a leaf; None if it belongs to no layer.

    >>> layer_of("layers.12.mlp.up"), layer_of("head.weight")
    (12, None)
    """
    match = re.match(r"layers\.(\d+)(\.|$)", name)
    return None if match is None else int(match[1])


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
