"""Tiers and features of training, its expected result, and transfers that punish every wrong read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import reference
import sharded
import torch
from models import model_of
from torch import Tensor

import fnshard as fs
from fnshard.runtime.collectives.simulated import poison
from fnshard.runtime.tiers import Transfers, map_tensors

PRESETS = ("full_shard", "shard_grad_op", "zero2", "zero1", "no_shard", "hybrid_shard")
TIERS: Mapping[str, Mapping[str, str]] = {
    "optimizer_host": {"optimizer_memory": "host"},
    "all_host": {"memory": "host", "optimizer_memory": "host"},
    "streamed": {"optimizer_memory": "host", "update_on": "device"},
    "streamed_all": {"memory": "host", "optimizer_memory": "host", "update_on": "device"},
    "parameters_host": {"memory": "host"},
    "all_disk": {"memory": "disk", "optimizer_memory": "disk"},
    "mixed": {"memory": "host", "optimizer_memory": "disk"},
}
CLIPPED = fs.optim.chain(fs.optim.clip_by_global_norm(0.2), fs.optim.adamw(3e-3, weight_decay=0.1))
FEATURES: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "plain": (fs.optim.adamw(3e-3, weight_decay=0.1), {}),
    "clip": (CLIPPED, {}),
    "reduce": (CLIPPED, {"accumulate": 3}),
    "local": (fs.optim.adamw(3e-3, weight_decay=0.1), {"accumulate": 3, "accumulate_mode": "local"}),
    "breadth": (CLIPPED, {"accumulate": 3, "micro_order": "breadth"}),
}
CPU = torch.device("cpu")


@cache
def compute_expected(clip: bool) -> reference.Trained:
    model = model_of("tied")
    steps = [[batch] for batch in model.batches(sharded.STEPS)]
    return reference.train(
        model.loss, model.params, steps, reference.adamw(3e-3, 0.1), frozen=model.frozen,
        clip=0.2 if clip else None,
    )  # fmt: skip


class Adversary(Transfers):
    """Transfers that copy late (at the Wait) or early; targets hold NaN until the Wait and when free."""

    late = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.open: list[Any] = []

    def _copy(self, sources: Any, targets: Any, stream: Any, after: Any = None) -> Any:
        into_state = [map_tensors(t, lambda x: x.clone()) for t in targets]
        copied = None if self.late else [map_tensors(s, lambda x: x.clone()) for s in sources]
        for target in targets:
            map_tensors(target, _poison)
        plain, me = super()._copy, self

        class Late:
            def wait(self, on_host: bool = False) -> Any:
                if self in me.open:
                    me.open.remove(self)
                    plain(sources if me.late else copied, targets, stream)
                return targets

        assert len(into_state) == len(targets)
        me.open.append(Late())
        return me.open[-1]

    def join(self) -> None:
        super().join()
        for late in [*self.open]:
            late.wait()

    def finish(self) -> None:
        self.join()  # what the worker has sent is waited for at the end of a step
        super().finish()

    def give(self, value: Any) -> None:
        map_tensors(value, _poison)
        super().give(value)


def _poison(tensor: Tensor) -> Tensor:
    poison(tensor)
    return tensor
