"""TrainState: everything a resume needs, as plain local tensors."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fnshard import tree
from fnshard.errors import StateError, report
from fnshard.transform import Optimizer

__all__ = ["Metrics", "TrainState"]

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # typing's has `default` from Python 3.13 on

    OptimizerT = TypeVar("OptimizerT", bound=Optimizer | None, default=None)
    LossT = TypeVar("LossT", default=Tensor)  # what a step without an optimizer returns as its loss
else:
    from typing import TypeVar

    OptimizerT, LossT = TypeVar("OptimizerT"), TypeVar("LossT")


@dataclass(frozen=True)
class Checked:
    """Tensors of a state that a step has checked, in place of which it returns the same.

    `blocks`: of the parameters, by path; `tensors`: of parameters and optimizer, as the state holds them.
    """

    step: Any
    blocks: Mapping[str, Tensor]
    tensors: list[Tensor]


_FIELDS = ("step", "params", "opt_state", "loss_scale", "seed")


class Metrics(dict[str, Any]):
    """What a step reports, by name: `loss`, `lr`, `grad_norm`, ..., `aux`.

    A dict of 0-d tensors, which it prints as numbers; nothing is waited for before that.

    >>> metrics = Metrics(loss=torch.tensor(0.25), lr=torch.tensor(0.5), aux={"accuracy": torch.tensor(0.75)})
    >>> metrics.numbers()
    {'loss': 0.25, 'lr': 0.5, 'accuracy': 0.75}
    >>> Metrics(loss=torch.tensor(0.25), lr=torch.tensor(3e-4))
    {'loss': 0.25, 'lr': 0.0003}
    """

    __slots__ = ("reading",)  # a step's, whose copy to the host has begun

    def scalars(self) -> dict[tuple[str, ...], Tensor]:
        """Its 0-d tensors by their place: ("loss",), and ("aux", "accuracy") of an `aux` that is a dict."""
        aux = self.get("aux")
        named = {(k,): v for k, v in self.items()}
        named |= {("aux", k): v for k, v in aux.items()} if isinstance(aux, dict) else {}
        plain = (n for n, v in named.items() if isinstance(v, Tensor) and v.dim() == 0 and not v.is_complex())
        return {n: named[n] for n in plain}

    def numbers(self) -> dict[str, float]:
        """Its scalars as Python numbers by name, those of an `aux` that is a dict, too.

        Waits for the end of this step, and for nothing that was launched behind it: a loop that reads the
        numbers of one step after it has called the next step leaves a device no gap.
        """
        return {name[-1]: number for name, number in self._numbers().items()}

    def _numbers(self) -> dict[tuple[str, ...], float]:
        sent, scalars = getattr(self, "reading", None), self.scalars()
        known = {} if sent is None else sent.numbers()
        return {n: known[n] if n in known else v.item() for n, v in scalars.items()}

    def __repr__(self) -> str:
        numbers = self._numbers()
        shown = {k: numbers.get((k,), v) for k, v in self.items()}
        parts = (f"{k!r}: {v:.6g}" if isinstance(v, float) else f"{k!r}: {v!r}" for k, v in shown.items())
        return "{" + ", ".join(parts) + "}"


class TrainState:
    """One rank's part of a training run between two steps.

    Args:
        step: 0-d int64 on the host, the number of steps made; those skipped by dynamic loss scaling too.
        params: the parameter tree of stored shards (padded blocks, see `LayoutSpec.storage`).
        opt_state: `{path: {slot: block}}`, in `LayoutSpec.optimizer`; "master" is the copy in
            `optimizer_dtype` where that differs from storage.
        loss_scale: `{"scale": 0-d fp32, "good_steps": 0-d int64, "skipped_steps": 0-d int64}` where the
            scale is dynamic, else empty.
        seed: 0-d int64; random ops draw from (seed, step, rank, micro-batch).
        where: the spec tree and the mesh that the tensors are laid out by, where they are known
            (`step.init` knows them): so a checkpoint needs to be told neither.
        data: of a state that was restored, the position in the data that was saved with it.

    A step takes a state over ("donation"): its tensors are updated in place and live on in the new
    state; the old one is marked consumed, and reading it is an error.

    Raises:
        StateError: on reading a field of a consumed state.
    """

    __slots__ = ("_checked", "_consumed_by", "_values", "data", "where")

    def __init__(
        self,
        step: Tensor,
        params: Any,
        opt_state: dict[str, dict[str, Tensor]],
        loss_scale: dict[str, Tensor],
        seed: Tensor,
        *,
        where: tuple[Any, Any] | None = None,
        data: Any = None,
    ):
        self._values = dict(zip(_FIELDS, (step, params, opt_state, loss_scale, seed), strict=True))
        self._consumed_by: str | None = None
        self._checked: Checked | None = None
        self.where, self.data = where, data

    def __getattr__(self, name: str) -> Any:
        if name not in _FIELDS:
            raise AttributeError(f"TrainState has no {name!r}; it has {', '.join(_FIELDS)}")
        if self._consumed_by is not None:
            raise StateError(
                report(
                    f"this TrainState was consumed by {self._consumed_by}: the state that was returned "
                    "takes its place (if it failed, there is none); the tensors were written to or freed.",
                    fix="write `state, metrics = step(state, ...)`, `state = fs.reshard(state, ...)`; to "
                    "keep an old one, clone its tensors before (state.copy()).",
                )
            )
        return self._values[name]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_FIELDS})

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return {name: getattr(self, name) for name in _FIELDS}

    def copy(self) -> TrainState:
        """A state with tensors of its own; of what rests on disk too they are in the host's memory."""

        def copied(tensor: Tensor) -> Tensor:
            pinned = tensor.device.type == "cpu" and tensor.is_pinned()
            return torch.empty_like(tensor, pin_memory=pinned).copy_(tensor)

        fields = {k: tree.map(copied, v) for k, v in self.as_dict().items()}
        return TrainState(**fields, where=self.where, data=self.data)

    def replace(self, **fields: Any) -> TrainState:
        """The same with other fields; the data has moved on."""
        return TrainState(**{**self.as_dict(), **fields}, where=self.where)

    def checked_by(self, step: Any) -> Checked | None:
        """What `step` found when it checked these tensors, unless one has been replaced since."""
        known = self._checked
        if known is None or known.step is not step:
            return None
        tensors = self._tensors()
        same = len(tensors) == len(known.tensors) and all(map(operator.is_, tensors, known.tensors))
        return known if same else None

    def remember(self, checked: Checked | None, step: Any, blocks: Mapping[str, Tensor]) -> None:
        """Note that `step` knows these tensors, by path these blocks; `checked`: of the state before."""
        self._checked = checked or Checked(step, blocks, self._tensors())

    def _tensors(self) -> list[Tensor]:
        slots = (slot for slots in self.opt_state.values() for slot in slots.values())
        return [*tree.flatten(self.params)[0], *slots]

    def consume(self, by: str | None = None) -> TrainState:
        """Hand the tensors on: a new state that holds them; this one becomes unreadable.

        A step does so before it runs: one that fails half way leaves no state that looks whole.

        Args:
            by: who takes it, as the error says it; None is the step that follows this state.
        """
        fields = self.as_dict()
        self._consumed_by = by or f"step {int(fields['step'])}"
        self._values = {}
        return TrainState(**fields, where=self.where)

    def __repr__(self) -> str:
        if self._consumed_by is not None:
            return f"TrainState(consumed by {self._consumed_by})"
        return f"TrainState(step={int(self.step)}, {len(self.opt_state)} leaves with optimizer state)"


def checked_rng(rng: Any) -> tuple[int, int]:
    """The (seed, step) that random ops of a step without an optimizer draw from; (0, 0) for None.

    Raises:
        StateError: it is something else.
    """
    if rng is None:
        return 0, 0
    if isinstance(rng, tuple) and len(rng) == 2 and all(isinstance(v, int) for v in rng):
        return rng
    raise StateError(
        report(
            f"rng is {type(rng).__name__}, and without an optimizer it is what random ops draw from.",
            fix="rng=(seed, step), two integers; an argument of `fn` needs another name.",
        )
    )


def check_state(value: Any, has_optimizer: bool, paths: Collection[str]) -> bool:
    """Whether a step's first argument is a TrainState, as a step with an optimizer takes it.

    Args:
        paths: of the parameters' leaves.

    Raises:
        StateError: a tree for a state, a state for a tree, or the loss that a step without an optimizer
            returns first.
    """
    training = isinstance(value, TrainState)
    if has_optimizer and not training:
        returned = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], TrainState)
        kind = "what a step returned, (state, metrics)" if returned else type(value).__name__
        raise StateError(
            report(
                f"the first argument of this step is a TrainState, not {kind}.",
                fix="state = step.init(params); state, metrics = step(state, *batch).",
            )
        )
    if not has_optimizer and training:
        raise StateError("this step has no optimizer: pass state.params, or make it with optimizer=.")
    loss = value[0] if isinstance(value, tuple) and len(value) == 2 else value
    is_number = isinstance(loss, Tensor) and loss.dim() == 0
    if is_number and tree.flatten_with_paths(value)[0].keys() != set(paths):
        raise StateError(
            report(
                "the first argument of this step is a loss, not parameters: made without an optimizer, it "
                "returns (loss, grads), and not (state, metrics).",
                fix="shard_step(..., optimizer=fs.optim.adamw(3e-4)) and state = step.init(params); or "
                "loss, grads = step(params, *batch).",
            )
        )
    return training
