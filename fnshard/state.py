"""TrainState: everything a resume needs, as plain local tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fnshard.errors import StateError, report

_FIELDS = ("step", "params", "opt_state", "loss_scale", "seed")


class TrainState:
    """One rank's part of a training run between two steps.

    Args:
        step: 0-d int64 on the host, the number of steps made.
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

    __slots__ = ("_consumed_at", "_values", "data", "where")

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
        self._consumed_at: int | None = None
        self.where, self.data = where, data

    def __getattr__(self, name: str) -> Any:
        if name not in _FIELDS:
            raise AttributeError(f"TrainState has no {name!r}; it has {', '.join(_FIELDS)}")
        if self._consumed_at is not None:
            raise StateError(
                report(
                    f"this TrainState was consumed by step {self._consumed_at}: its tensors were updated "
                    "in place and belong to the state that step returned (or are lost, if it failed).",
                    fix="write `state, metrics = step(state, ...)`; to keep an old one, clone its tensors "
                    "before the step (state.copy()).",
                )
            )
        return self._values[name]

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return {name: getattr(self, name) for name in _FIELDS}

    def copy(self) -> TrainState:
        """A state with tensors of its own; of what rests on disk too they are in the host's memory."""
        from fnshard import tree

        def copied(tensor: Tensor) -> Tensor:
            pinned = tensor.device.type == "cpu" and tensor.is_pinned()
            return torch.empty_like(tensor, pin_memory=pinned).copy_(tensor)

        fields = {k: tree.map(copied, v) for k, v in self.as_dict().items()}
        return TrainState(**fields, where=self.where, data=self.data)

    def replace(self, **fields: Any) -> TrainState:
        """The same with other fields; the data has moved on."""
        return TrainState(**{**self.as_dict(), **fields}, where=self.where)

    def consume(self) -> TrainState:
        """Hand the tensors on: a new state that holds them; this one becomes unreadable.

        A step does so before it runs: one that fails half way leaves no state that looks whole.
        """
        fields = self.as_dict()
        self._consumed_at = int(fields["step"])
        self._values = {}
        return TrainState(**fields, where=self.where)

    def __repr__(self) -> str:
        if self._consumed_at is not None:
            return f"TrainState(consumed by step {self._consumed_at})"
        return f"TrainState(step={int(self.step)}, {len(self.opt_state)} leaves with optimizer state)"
