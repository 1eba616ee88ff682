"""Rank memory: one rank's memory on paper, which `Instruction.memory` reads and changes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fnshard.analysis.footprint import CallArgument, Footprint
from fnshard.analysis.live_memory import LiveMemory
from fnshard.analysis.transport import Transport
from fnshard.compiler.ir.values import Kind
from fnshard.compiler.schedule.buckets import Bucket
from fnshard.compiler.schedule.instructions import OfBucket, Run
from fnshard.compiler.schedule.paper import ACTIVATIONS, GRADIENTS, PaperTensor
from fnshard.layout.spec import LayoutSpec

FootprintOf = Callable[[str, bool, Sequence[CallArgument]], Footprint]


@dataclass
class RankMemory:
    """What instructions change on paper, and what they need for it.

    `footprint`: of a kernel (by name, backward or not). `update_bytes`: what an Update of a bucket takes
    beside what it changes.
    """

    live: LiveMemory
    transport: Transport
    footprint: FootprintOf
    update_bytes: Callable[[Bucket, bool], int]
    rank: int
    tangent_strides: dict[str, list[tuple[int, tuple[int, ...]]]] = field(default_factory=dict)

    @property
    def specs(self) -> Mapping[str, LayoutSpec]:
        return self.live.schedule.specs

    @property
    def on_cpu(self) -> bool:
        return self.live.device.type == "cpu"

    def bucket(self, line: OfBucket) -> Bucket:
        return self.live.schedule.buckets[line.bucket]

    def updates_here(self, line: OfBucket) -> bool:
        """Whether the optimizer runs in the memory that is counted as the device's."""
        return self.on_cpu or self.specs[line.paths[0]].updated_on != "host"

    def call(self, line: Run) -> None:
        """A kernel: arguments die in it, results appear."""
        live = self.live
        args = [live.names[n] for n in line.reads]
        for arg in args:
            live.keep(arg.storage)
        if line.backward:
            args = self._as_traced(line, args)
        for name in line.drops:
            live.drop(name)
        refs_of_call = Counter(arg.storage for arg in args)
        numbers: dict[int | None, int] = {}
        entries = []
        for index, arg in enumerate(args):
            if arg.storage is None:
                entries.append(CallArgument(-1 - index))
                continue
            storage = live.storages[arg.storage]
            only = storage.refs == refs_of_call[arg.storage] and storage.slot is None
            number = numbers.setdefault(arg.storage, len(numbers))
            entries.append(CallArgument(number, only, storage.bytes if only else 0))
        self._results(line, args, numbers, self.footprint(line.kernel, line.backward, tuple(entries)))

    def _as_traced(self, line: Run, args: list[PaperTensor]) -> list[PaperTensor]:
        """Tangents whose strides are not those of the traced ones are copied."""
        live = self.live
        if line.kernel not in self.tangent_strides:
            self.tangent_strides[line.kernel] = live.schedule.kernels[line.kernel].tangent_strides
        for index, stride in self.tangent_strides[line.kernel]:
            arg = args[index]
            if arg.stride is not None and arg.stride != stride:
                args[index] = replace(live.like(arg, ACTIVATIONS), stride=stride)
                live.keep(args[index].storage)
                live.release_early(args[index])
                live.release(arg.storage)
        return args

    def _results(
        self, line: Run, args: list[PaperTensor], numbers: Mapping[int | None, int], footprint: Footprint
    ) -> None:
        """The call's worst moment, then its end."""
        live = self.live
        storage_of = {number: storage for storage, number in numbers.items()}
        category = [GRADIENTS if n.kind is Kind.GRADIENT else ACTIVATIONS for n in line.writes]
        first = {o.new: c for o, c in reversed(list(zip(footprint.outputs, category, strict=True)))}
        for number in footprint.freed:
            for arg in args:
                if arg.storage == storage_of[number]:
                    live.release(arg.storage)
        left = [a for a in args if a.storage is None or numbers[a.storage] not in footprint.freed]
        made = {j: live.new(footprint.new_bytes[j], first[j]) for j in footprint.alive}
        live.spike(footprint.workspace_bytes)
        results = []
        for output in footprint.outputs:
            storage = storage_of.get(output.argument) if output.new is None else None
            results.append((output, storage))
            live.keep(storage)
        for arg in left:
            live.release(arg.storage)
        for j, size in enumerate(footprint.new_bytes):
            if j not in made:
                made[j] = live.new(size, first[j])
        kernel = live.schedule.kernels[line.kernel]
        copied = [i for i in kernel.shared if line.writes[i].kind is Kind.GRADIENT] if line.backward else []
        for index, (name, (output, storage)) in enumerate(zip(line.writes, results, strict=True)):
            home = storage if output.new is None else made[output.new]
            value = PaperTensor(home, math.prod(output.shape), output.dtype, output.shape, output.stride)
            live.set(name, live.like(value, GRADIENTS) if index in copied else value)
        for _, storage in results:
            live.release(storage)
