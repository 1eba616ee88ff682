"""Updates: find the memory that a stretch of an update takes by running it on tensors without data."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fnshard.analysis.storages import INPUTS, StorageTracker, tensors_of
from fnshard.compiler.schedule.ir import Schedule
from fnshard.compiler.update.derive import Compute
from fnshard.compiler.update.family import Family
from fnshard.compiler.update.slot_shapes import Slots
from fnshard.compiler.update.steps import flow_of, stacks_of
from fnshard.layout.partition import block_shape
from fnshard.optim.optimizer import Step
from fnshard.runtime.executor.compiled_update import is_compilable
from fnshard.runtime.executor.control import StepControl
from fnshard.runtime.executor.fused_update import find_fused
from fnshard.runtime.executor.update import Updater

# Bytes by family, for as long as the family lives: schedules of one optimizer and mesh share them.
_KNOWN: weakref.WeakKeyDictionary[Family, dict[Any, int]] = weakref.WeakKeyDictionary()


@dataclass
class UpdateMemory:
    """The memory that the updates of a schedule take besides what they change.

    Args:
        slots: the shapes and dtypes of the state on this rank.
        compiled: whether updates on the device are compiled. Those take no memory besides.
    """

    schedule: Schedule
    slots: Slots
    compiled: bool = False

    def __post_init__(self) -> None:
        # These leaves' shards of gradients are summed over micro-batches, in a dtype of their own.
        sums = [
            name for name, value in self.schedule.reduced.items() if value.original.version.startswith("+")
        ]
        self._summed = {path for name in sums for path in self.schedule.buckets[name].paths}

    def bytes(self, paths: Sequence[str], number: int, barrier: bool) -> int:
        """Count the bytes that one stretch of the updates of leaves takes, on the device that updates them.

        Leaves are updated one after the other, so the largest one counts. Leaves with a fused operator are
        updated together.

        Args:
            number: the number of the stretch.
            barrier: whether the step's scalars are known by then, so that gradients may be scaled by them.
        """
        largest, fused = 0, dict[Family, int]()
        for path in paths:
            spec, family = self.schedule.specs[path], self.schedule.families[path]
            if self.compiled and spec.updated_on == "device" and is_compilable(family):
                continue
            if find_fused(family) is None:
                largest = max(largest, self._count_leaf_bytes(path, number, barrier))
            elif self._get_sum_dtype(path) != spec.optimizer_dtype:  # gradients are cast first
                block = block_shape(spec.shape, spec.optimizer, self.schedule.mesh)
                fused[family] = fused.get(family, 0) + size_of(block, spec.optimizer_dtype)
        return max([largest, *fused.values()])

    def _count_leaf_bytes(self, path: str, number: int, barrier: bool) -> int:
        """Count the bytes of one leaf's update, once for all leaves that are alike."""
        spec, mesh = self.schedule.specs[path], self.schedule.mesh
        known = _KNOWN.setdefault(self.schedule.families[path], {})
        layouts = tuple(spec.shape), spec.storage, spec.gradient, spec.optimizer
        dtypes = spec.storage_dtype, self._get_sum_dtype(path)
        key = number, barrier, layouts, dtypes, spec.memory, spec.updated_on, mesh.device_type, mesh.rank
        if key not in known:
            known[key] = self._run_update(path, number, barrier)
        return known[key]

    def _run_update(self, path: str, number: int, barrier: bool) -> int:
        """Count the bytes that updating a leaf takes, by an update of fake tensors."""
        spec, mesh, family = self.schedule.specs[path], self.schedule.mesh, self.schedule.families[path]
        # Fakes of a device that torch was not built for cannot be written to.
        device = torch.device("cuda" if mesh.device_type == "cuda" and torch.cuda.is_available() else "cpu")
        nodes = family.traced.placeholders if family.traced else {}
        number_dtypes = [n.meta["val"].dtype for name, n in nodes.items() if name.startswith("number.")]
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            # Bind the update as a step does, and make what it is called with.
            numbers = [torch.empty((), dtype=dtype) for dtype in number_dtypes]
            updater = Updater({path: family}, {path: spec}, mesh, mesh.rank, without_data=device)
            update = updater.bind((path,), number)

            block = torch.empty(
                block_shape(spec.shape, spec.gradient, mesh), dtype=self._get_sum_dtype(path), device=device
            )
            stored = torch.empty(
                block_shape(spec.shape, spec.storage, mesh), dtype=spec.storage_dtype, device=device
            )
            own_slots = {n: torch.empty(s, dtype=d, device=device) for n, (s, d) in self.slots[path].items()}
            params = {} if spec.updated_on == "host" and spec.memory == "device" else {path: stored}
            made = {path: make_earlier_parts(family, number)} if number else {}
            scale = torch.empty((), dtype=torch.float64, device=device) if barrier else None
            control = StepControl(step=Step(torch.tensor(0)), scale=scale)
            control.once((family, updater.device(path)), lambda: numbers)

            # Its arguments are counted elsewhere, and so are its results.
            tracker = StorageTracker(mesh.device_type)
            for value in tensors_of([block, stored, own_slots, made]):
                tracker.adopt(value, INPUTS, size=0)
            with tracker:
                out = update({path: block}, {path: own_slots}, params, made, control)
                kept = sum(t.nbytes for t in tensors_of(out))
        return max(tracker.peak.bytes - kept, 0)

    def bytes_of_whole(self, path: str) -> int:
        """Count the bytes that computing a whole leaf takes, besides what was sent and what goes back."""
        family = self.schedule.families[path]
        known, key = _KNOWN.setdefault(family, {}), (self.schedule.mesh.device_type, "whole")
        if key not in known:
            step = next(s for s in family.derived.steps if isinstance(s, Compute) and s.whole)
            sent, _ = stacks_of(family.derived)

            # Shapes and dtypes of what it reads: values sent to it, inputs of the update, and values of
            # earlier steps.
            kinds = dict(zip(sent.receives, zip(sent.shapes, sent.dtypes, strict=True), strict=True))
            inputs = {n: node.meta["val"] for n, node in family.traced.placeholders.items()}
            kinds |= {n: (tuple(v.shape), v.dtype) for n, v in inputs.items() if n in step.reads}

            tracker = StorageTracker(self.schedule.mesh.device_type)
            with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
                kinds |= {n: family.derived.values[n] for n in step.reads if n not in kinds}
                arguments = [torch.empty(shape, dtype=dtype) for shape, dtype in map(kinds.get, step.reads)]
                for value in arguments:
                    tracker.adopt(value, INPUTS, size=0)
                with tracker:
                    kept = sum(t.nbytes for t in tensors_of(step.run(*arguments)))
            known[key] = max(tracker.peak.bytes - kept, 0)
        return known[key]

    def _get_sum_dtype(self, path: str) -> torch.dtype:
        spec = self.schedule.specs[path]
        return spec.sum_dtype if path in self._summed else spec.reduce_dtype


def make_earlier_parts(family: Family, number: int) -> dict[str, torch.Tensor]:
    """Make tensors like those that earlier steps of the update have handed on, by name."""
    # Exchanges hand on what they receive, and stretches what they keep.
    names = dict[str, None]()
    for before, step in enumerate(family.derived.steps[:number]):
        if not isinstance(step, Compute):
            names |= dict.fromkeys(step.receives)
        elif not step.whole:
            names |= dict.fromkeys(flow_of(family.derived, before).keeps)
    kinds = {name: family.shape_and_dtype(name) for name in names}
    return {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in kinds.items()}


def size_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of a dense tensor."""
    return math.prod(shape) * dtype.itemsize
