"""Tape: the operators that build a module, as a log in program order, and its replay leaf by leaf.

Every tensor of the log is an alias on the meta device, so views need no entry: only what makes or writes a
memory is a `RecordedCall`. The value of a leaf is a slice of the log, run in program order. Random
operators are a chain: each begins in the generator state in which another one ended.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fnshard.compiler.ir.program import storage_id

START = -1  # the call that every chain of random operators begins after: the seed
CPU = torch.device("cpu")
Take = Callable[[str, Tensor], None]  # a leaf by its path
generator_lock = threading.Lock()  # torch's default generator belongs to all threads, simulated ranks too


def map_leaves(value: Any, kind: type, fn: Callable[[Any], Any]) -> Any:
    """The arguments or results of an operator, with `fn` applied to those of a type."""
    return fx.node.map_aggregate(value, lambda v: fn(v) if isinstance(v, kind) else v)


def leaves_of(value: Any, kind: type) -> list[Any]:
    """Those among the arguments or results of an operator that are of a type, in order."""
    found: list[Any] = []
    map_leaves(value, kind, found.append)
    return found


def shown(alias: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """What a tensor on the meta device shows, of a real memory."""
    value = torch.empty(0, dtype=alias.dtype, device=CPU)
    value.set_(storage, alias.storage_offset(), alias.shape, alias.stride())
    return value.conj() if alias.is_conj() else value


@dataclass(slots=True)
class RecordedCall:
    """An operator of the log.

    Args:
        args, kwargs: as it was called, with an alias of each tensor: what this shows may be changed later.
        reads: memories whose contents it depends on.
        overwrites: memories that it makes, or fills without reading.
        makes: its results that have a memory of their own, by their place among the results.
        follows: of a random operator, the random call in whose last state of the generator it begins.
        blank: it makes a memory without setting it.
        default_dtype: torch's default at the call.
    """

    op: Callable[..., Any]
    args: Any
    kwargs: Any
    reads: tuple[int, ...] = ()
    overwrites: tuple[int, ...] = ()
    makes: Mapping[int, Tensor] = field(default_factory=dict)
    follows: int | None = None
    blank: bool = False
    default_dtype: torch.dtype = torch.float32

    @property
    def is_random(self) -> bool:
        return self.follows is not None

    @property
    def memories(self) -> set[int]:
        """Of all tensors that it takes or makes."""
        return set(map(storage_id, [*leaves_of((self.args, self.kwargs), Tensor), *self.makes.values()]))


@dataclass(slots=True)
class Tape:
    """The log.

    Args:
        writers: of each memory, the numbers of the calls that make or write it.
    """

    calls: list[RecordedCall] = field(default_factory=list)
    writers: dict[int, list[int]] = field(default_factory=dict)

    def add(self, call: RecordedCall, writes: Iterable[int]) -> int:
        """Append a call that makes or writes these memories."""
        number = len(self.calls)
        self.calls.append(call)
        for memory in dict.fromkeys(writes):
            self.writers.setdefault(memory, []).append(number)
        return number

    def slice(self, needed: Iterable[int], end: int) -> list[int]:
        """The calls before `end` that the contents of these memories depend on, in program order."""
        found: set[int] = set()
        visited: set[tuple[int, int]] = set()
        todo = [(memory, end) for memory in needed]
        while todo:
            memory, before = todo.pop()
            writers = self.writers[memory]
            for number in reversed(writers[: bisect_left(writers, before)]):
                if (memory, number) in visited:
                    break
                visited.add((memory, number))
                call = self.calls[number]
                if number not in found:
                    found.add(number)
                    todo += [(read, number) for read in call.reads]
                if memory in call.overwrites:
                    break
        return sorted(found)

    def value(self, alias: Tensor) -> Tensor | None:
        """The tensor as it is now, or None if it depends on random numbers."""
        numbers = self.slice([storage_id(alias)], len(self.calls))
        if any(self.calls[n].is_random for n in numbers):
            return None
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return shown(alias, self._run(storage_id(alias), numbers, {}))

    def replay(self, leaves: Mapping[str, Tensor], seed: int, take: Take) -> list[str]:
        """Hand each leaf to `take` as building the module under this seed makes it, one at a time.

        Leaves go in the order of the last random calls that they depend on. The state in which a random call
        ends is kept, where another begins; calls of several leaves run again for each.

        Returns:
            The leaves that no call sets; `take` does not get them.
        """
        by_memory: dict[int, dict[str, Tensor]] = {}
        for path, alias in leaves.items():
            by_memory.setdefault(storage_id(alias), {})[path] = alias
        slices = {memory: self.slice([memory], len(self.calls)) for memory in by_memory}
        draws = {m: [n for n in numbers if self.calls[n].is_random] for m, numbers in slices.items()}
        unset: list[str] = []
        with (
            generator_lock,
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
        ):
            torch.default_generator.manual_seed(seed)
            ends = {START: torch.default_generator.get_state()}
            for memory in sorted(by_memory, key=lambda m: max(draws[m], default=START)):
                if all(self.calls[n].blank for n in slices[memory]):
                    unset += by_memory[memory]
                    continue
                storage = self._run(memory, slices[memory], ends)
                for path, alias in by_memory[memory].items():
                    take(path, shown(alias, storage))
                del storage  # before the next one is made
        return unset

    def _run(
        self, needed: int | None, numbers: Sequence[int], ends: dict[int, Tensor]
    ) -> torch.UntypedStorage | None:
        """A memory that calls make; of others no more is kept than the calls to come use.

        Args:
            ends: the generator's state after each random call that has run; it grows.
        """
        for number in numbers:  # before any memory is taken
            self._draw_up_to(self.calls[number].follows, ends)
        last = {memory: n for n in numbers for memory in self.calls[n].memories}
        memories: dict[int, torch.UntypedStorage] = {}
        for number in numbers:
            call = self.calls[number]
            if call.is_random:
                torch.default_generator.set_state(ends[call.follows])
            _execute(call, memories)
            if call.is_random:
                ends[number] = torch.default_generator.get_state()
            for memory in [m for m in memories if last[m] == number and m != needed]:
                del memories[memory]
        return memories.get(needed)

    def _draw_up_to(self, number: int | None, ends: dict[int, Tensor]) -> None:
        """Run random calls for the sake of the generator, so that its state after this one is known."""
        missing = []
        while number is not None and number not in ends:
            missing.append(number)
            number = self.calls[number].follows
        for draw in reversed(missing):
            self._run(None, [*self.slice(self.calls[draw].reads, draw), draw], ends)


def _execute(call: RecordedCall, memories: dict[int, torch.UntypedStorage]) -> None:
    def real(alias: Tensor) -> Tensor:
        if storage_id(alias) not in memories:
            memories[storage_id(alias)] = torch.UntypedStorage(alias.untyped_storage().nbytes())
        return shown(alias, memories[storage_id(alias)])

    args, kwargs = map_leaves((call.args, call.kwargs), Tensor, real)
    before = torch.get_default_dtype()
    torch.set_default_dtype(call.default_dtype)
    try:
        results = leaves_of(call.op(*args, **kwargs), Tensor)
    finally:
        torch.set_default_dtype(before)
    shared = {storage.data_ptr() for storage in memories.values()}
    for place, alias in call.makes.items():
        result, size = results[place], alias.untyped_storage().nbytes()
        storage = result.untyped_storage()
        if _layout(result) != _layout(alias) or storage.data_ptr() in shared or storage.nbytes() < size:
            storage = torch.UntypedStorage(size)
            shown(alias, storage).copy_(result)
        memories[storage_id(alias)] = storage
        if call.blank:
            shown(alias, storage).zero_()


def _layout(value: Tensor) -> tuple[Any, ...]:
    return value.dtype, value.shape, value.stride(), value.storage_offset(), value.is_conj()
