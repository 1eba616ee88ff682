"""TrainState: all that a training run needs to resume, as plain local tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from fnshard import tree
from fnshard.compiler.frontend.size_bounds import check_limits
from fnshard.errors import StateError

__all__ = ["Metrics", "TrainState"]

_FIELDS = ("step", "params", "opt_state", "loss_scale", "seed")


class Metrics(dict[str, Any]):
    """A dict of what a step reports, by name: `loss`, `lr`, `grad_norm`, ..., `aux`.

    Its values are 0-d tensors, except `aux`, which is what `fn` returned. Printing it prints their numbers;
    nothing waits for a device before that.

    >>> metrics = Metrics(loss=torch.tensor(0.25), lr=torch.tensor(0.5), aux={"accuracy": torch.tensor(0.75)})
    >>> metrics
    {'loss': 0.25, 'lr': 0.5, 'accuracy': 0.75}
    """

    __slots__ = ("_sent",)  # a step's scalars, and the reading that brings them to the host

    def with_reading(self, reading: Any) -> Metrics:
        """Note the `runtime.readback.Reading` that brings the scalars to the host; return this object."""
        self._sent = self.scalars(), reading
        return self

    def scalars(self) -> dict[str, Tensor]:
        """Return the 0-d tensors by name, also those of an `aux` dict, as "aux.loss" where names clash."""
        named: dict[str, Any] = dict(self)
        aux = self.get("aux")
        if isinstance(aux, dict):
            named |= {f"aux.{k}" if k in self else str(k): v for k, v in aux.items()}
        return {
            n: v for n, v in named.items() if isinstance(v, Tensor) and v.dim() == 0 and not v.is_complex()
        }

    def numbers(self) -> dict[str, float]:
        """Return the scalars as Python numbers by name.

        This waits for the end of the step, and for nothing that was launched after it: a loop that reads the
        numbers of one step after it has called the next step leaves a device no gap.

        Raises:
            StateError: the step exceeds a limit of `fn`'s, see `fs.bounded`.
        """
        tensors, reading = getattr(self, "_sent", ({}, None))
        arrived = reading.numbers() if reading is not None else {}
        check_limits(arrived)
        # A tensor that was assigned since the step is not in the reading.
        return {n: arrived[n] if tensors.get(n) is v else v.item() for n, v in self.scalars().items()}

    @property
    def ready(self) -> bool:
        """Whether `numbers` would not wait for a device."""
        return not hasattr(self, "_sent") or self._sent[1].ready

    def __reduce__(self) -> Any:
        return type(self), (dict(self),)

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{name!r}: {value:.6g}" for name, value in self.numbers().items()) + "}"


class TrainState:
    """One rank's part of a training run between two steps.

    Args:
        step: the number of steps made, including those that dynamic loss scaling skipped: 0-d int64 on the
            host.
        params: the parameter tree of stored shards (padded blocks, see `LayoutSpec.storage`).
        opt_state: `{path: {slot: block}}`, laid out by `LayoutSpec.optimizer`; "master" is the copy in
            `optimizer_dtype` where that differs from storage. Slots of a complex leaf are real, [..., 2].
        loss_scale: `{"scale": 0-d fp32, "good_steps": 0-d int64, "skipped_steps": 0-d int64}` where the
            scale is dynamic, else empty.
        seed: the seed, 0-d int64; random ops draw from (seed, step, data rank, micro-batch).
        where: the spec tree and the mesh by which the tensors are laid out, if they are known (`step.init`
            knows them): a checkpoint then needs neither as an argument.
        data: the position in the data that was saved with the state, if it was restored.
        slot_shapes: by path and slot, the shapes of whole slots that do not have their leaf's shape.

    A step takes a state over ("donation"): its tensors are updated in place and live on in the new
    state; the old one is marked consumed, and reading it is an error.

    Raises:
        StateError: a field of a consumed state is read.
    """

    __slots__ = ("_consumed_by", "_values", "data", "slot_shapes", "where")

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
        slot_shapes: Mapping[str, Mapping[str, tuple[int, ...]]] | None = None,
    ):
        self._values = dict(zip(_FIELDS, (step, params, opt_state, loss_scale, seed), strict=True))
        self._consumed_by: str | None = None
        self.where, self.data, self.slot_shapes = where, data, slot_shapes or {}

    def __getattr__(self, name: str) -> Any:
        if name not in _FIELDS:
            raise AttributeError(f"TrainState has no {name!r}; it has {', '.join(_FIELDS)}")
        if self._consumed_by is not None:
            raise StateError(
                f"this TrainState was consumed by {self._consumed_by}: the state that was returned "
                "takes its place (if it failed, there is none); the tensors were written to or freed.",
                fix="write `state, metrics = step(state, ...)`, `state = fs.reshard(state, ...)`; to "
                "keep an old one, clone its tensors before (state.copy()).",
            )
        return self._values[name]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_FIELDS})

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {name: getattr(self, name) for name in _FIELDS}

    def copy(self) -> TrainState:
        """Return a state with its own tensors; those of leaves on disk are copied to the host's memory."""

        def copy_tensor(tensor: Tensor) -> Tensor:
            # Tensors that are copied to a device must stay pinned, or these copies would block.
            pinned = tensor.device.type == "cpu" and tensor.is_pinned()
            return torch.empty_like(tensor, pin_memory=pinned).copy_(tensor)

        fields = {k: tree.map(copy_tensor, v) for k, v in self.as_dict().items()}
        return self.replace(data=self.data, **fields)

    def replace(self, **fields: Any) -> TrainState:
        """Return a state with some fields replaced.

        `data` is left out unless it is given: a position in the data holds for one state.
        """
        known = {"where": self.where, "slot_shapes": self.slot_shapes}
        return TrainState(**{**self.as_dict(), **known, **fields})

    def consume(self, by: str | None = None) -> TrainState:
        """Hand the tensors to a new state, which is returned; this one becomes unreadable.

        A step does so before it runs, so that one that fails half way leaves no state that looks whole.

        Args:
            by: what takes the tensors, as an error names it; None is the step that follows this state.
        """
        fields = self.as_dict()
        self._consumed_by = by or f"step {int(fields['step'])}"
        self._values = {}
        return TrainState(**fields, where=self.where, slot_shapes=self.slot_shapes)

    def __repr__(self) -> str:
        if self._consumed_by is not None:
            return f"TrainState(consumed by {self._consumed_by})"
        return f"TrainState(step={int(self.step)}, {len(self.opt_state)} leaves with optimizer state)"


def read_rng(rng: Any) -> tuple[int, int]:
    """Return the (seed, step) that random ops of a step without an optimizer draw from; for None, (0, 0).

    Raises:
        StateError: `rng` is no pair of integers.
    """
    if rng is None:
        return 0, 0
    if isinstance(rng, tuple) and len(rng) == 2 and all(isinstance(v, int) for v in rng):
        return rng
    raise StateError(
        f"rng is {type(rng).__name__}, and without an optimizer it is what random ops draw from.",
        fix="rng=(seed, step), two integers; an argument of `fn` needs another name.",
    )


def check_state(value: Any, has_optimizer: bool, paths: Collection[str]) -> bool:
    """Return whether a step's first argument is a TrainState, which a step with an optimizer takes.

    Raises:
        StateError: there is an optimizer and it is no state; or there is none, and it is a state, or a loss
            where parameters belong.
    """
    # A step with an optimizer takes a state; without one it takes parameters.
    training = isinstance(value, TrainState)
    if has_optimizer and not training:
        returned = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], TrainState)
        kind = "what a step returned, (state, metrics)" if returned else type(value).__name__
        raise StateError(
            f"the first argument of this step is a TrainState, not {kind}.",
            fix="state = step.init(params); state, metrics = step(state, *batch).",
        )
    if not has_optimizer and training:
        raise StateError("this step has no optimizer.", fix="pass state.params, or make it with optimizer=.")

    # A loop that was written for an optimizer passes a loss on. But a 0-d tensor may also be all parameters.
    loss = value[0] if isinstance(value, tuple) and len(value) == 2 else value
    is_number = isinstance(loss, Tensor) and loss.dim() == 0
    if is_number and tree.flatten_with_paths(value)[0].keys() != set(paths):
        raise StateError(
            "the first argument of this step is a loss, not parameters: made without an optimizer, it "
            "returns (loss, grads), and not (state, metrics).",
            fix="shard_step(..., optimizer=fs.optim.adamw(3e-4)) and state = step.init(params); or "
            "loss, grads = step(params, *batch).",
        )
    return training
