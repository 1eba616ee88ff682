"""Tape: the operators that build a module, as a log in program order, and its replay leaf by leaf.

Every tensor of the log is an alias on the meta device, so views need no entry: only what makes or writes a
memory is a `RecordedCall`. The value of a leaf is a slice of the log, run in program order. Random
operators are a chain: each begins in the generator state in which another one ended.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fnshard.compiler.ir.program import storage_id

START = -1  # the call that every chain of random operators begins after: the seed
CPU = torch.device("cpu")
LARGE = 1 << 32  # random numbers of a module, from which on leaves do not wait for one another's
CHUNK = 1 << 16  # numbers of a large module's leaf that are drawn together
Take = Callable[[str, Tensor, bool], None]  # a leaf by its path, and whether all of it is there
generator_lock = threading.Lock()  # torch's default generator belongs to all threads, simulated ranks too


@contextmanager
def seeded(seed: int, devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Torch's default generators, seeded as by `torch.manual_seed`, and restored afterwards."""
    kind = devices[0].type if devices else "cuda"
    with generator_lock, torch.random.fork_rng(devices=list(devices), device_type=kind):
        if devices:
            torch.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)
        yield


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
        alike: it sets each element of a whole memory by itself, or changes it.
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
    alike: bool = False
    default_dtype: torch.dtype = torch.float32

    @property
    def is_random(self) -> bool:
        return self.follows is not None

    @property
    def drawn(self) -> int:
        """How many random numbers it draws, about."""
        tensors = [*leaves_of((self.args, self.kwargs), Tensor), *self.makes.values()]
        return max((t.numel() for t in tensors), default=1) if self.is_random else 0

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

    def replay(
        self, leaves: Mapping[str, Tensor], seed: int, take: Take, rows: Callable[[str], set[int]]
    ) -> list[str]:
        """Hand each leaf to `take` as building the module under this seed makes it, one at a time.

        Random calls run in program order: the state in which each ends is kept, where others begin. A leaf is
        made when the last one that it depends on is due; those before it run again. In a module of `LARGE`
        random numbers each call has a seed of its own, and so has each chunk of a leaf whose elements are set
        alike: no more of these is made than has `rows`.

        Args:
            rows: those of a leaf that are needed, of a large module.

        Returns:
            The leaves that no call sets, in whole or in part; `take` does not get them.
        """
        by_memory: dict[int, dict[str, Tensor]] = {}
        for path, alias in leaves.items():
            by_memory.setdefault(storage_id(alias), {})[path] = alias
        unset: list[str] = []
        large = sum(call.drawn for call in self.calls) >= LARGE

        def make(memory: int | None, calls: list[int], ends: dict[int, Tensor]) -> None:
            storage = self._run(memory, calls, ends, seed if large else None)
            blank = any(self.calls[n].blank for n in calls)
            for path, alias in by_memory.get(memory, {}).items():
                leaf = shown(alias, storage)
                if blank and (len(calls) == 1 or has_blanks(leaf)):
                    unset.append(path)
                else:
                    take(path, leaf, True)

        with torch.no_grad(), torch.autocast("cpu", enabled=False), seeded(seed):
            if large:
                for memory, aliases in by_memory.items():
                    calls = self.slice([memory], len(self.calls))
                    if self._alike(calls, aliases):
                        self._make_rows(calls, aliases, seed, take, rows)
                    else:
                        make(memory, calls, {})
                return unset
            jobs = self._jobs(by_memory)
            ends = {START: torch.default_generator.get_state()}
            for number in sorted(jobs):
                for job in jobs[number]:
                    make(*job, ends)
        return unset

    def _alike(self, numbers: Sequence[int], aliases: Mapping[str, Tensor]) -> bool:
        """Whether these calls set all of a memory's elements alike, and leaves are the whole memory."""
        calls = [self.calls[n] for n in numbers]
        if not all(call.alike for call in calls) or not calls[0].overwrites:
            return False
        tensors = [t for call in calls for t in leaves_of((call.args, call.kwargs), Tensor)]
        (layout, *others) = {_layout(t) for t in (*tensors, *aliases.values())}
        return not others and bool(layout[1]) and next(iter(aliases.values())).is_contiguous()

    def _make_rows(
        self, numbers: Sequence[int], aliases: Mapping[str, Tensor], seed: int, take: Take,
        rows: Callable[[str], set[int]],
    ) -> None:  # fmt: skip
        """A leaf of which the chunks are made that have these rows; no memory is taken by the rest."""
        alias = next(iter(aliases.values()))
        leaf = torch.empty(alias.shape, dtype=alias.dtype)
        size = max(1, CHUNK // max(1, leaf[0].numel()))
        for chunk in sorted({row // size for path in aliases for row in rows(path)}):
            part = leaf[chunk * size : (chunk + 1) * size]
            for number in numbers:
                call = self.calls[number]
                args, kwargs = map_leaves((call.args, call.kwargs), Tensor, lambda _: part)  # noqa: B023
                torch.default_generator.manual_seed(_seed_of(seed, number, chunk))
                with _default_dtype(call.default_dtype):
                    call.op(*args, **kwargs)
        for path in aliases:
            take(path, leaf, False)

    def _jobs(self, memories: Iterable[int]) -> dict[int, list[tuple[int | None, list[int]]]]:
        """Memories, each with the calls that make it, by the last random one of these.

        A random call that is the last one for no memory runs for the sake of the generator, for None.
        """
        jobs: dict[int, list[tuple[int | None, list[int]]]] = {}
        for memory in memories:
            numbers = self.slice([memory], len(self.calls))
            last = max((n for n in numbers if self.calls[n].is_random), default=START)
            jobs.setdefault(last, []).append((memory, numbers))
        for number in range(max(jobs, default=START)):
            if self.calls[number].is_random and number not in jobs:
                jobs[number] = [(None, [*self.slice(self.calls[number].reads, number), number])]
        return jobs

    def _run(
        self, needed: int | None, numbers: Sequence[int], ends: dict[int, Tensor], seed: int | None = None
    ) -> torch.UntypedStorage | None:
        """A memory that calls make; of others no more is kept than the calls to come use.

        Args:
            ends: the generator's state after each random call that has run; it grows.
            seed: of the module, where each call has one of its own.
        """
        last = {memory: n for n in numbers for memory in self.calls[n].memories}
        memories: dict[int, torch.UntypedStorage] = {}
        for number in numbers:
            call = self.calls[number]
            if call.is_random and seed is not None:
                torch.default_generator.manual_seed(_seed_of(seed, call.follows))
            elif call.is_random:
                torch.default_generator.set_state(ends[call.follows])
            _execute(call, memories)
            if call.is_random:
                ends[number] = torch.default_generator.get_state()
            for memory in [m for m in memories if last[m] == number and m != needed]:
                del memories[memory]
        return memories.get(needed)


def _seed_of(*numbers: int) -> int:
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _execute(call: RecordedCall, memories: dict[int, torch.UntypedStorage]) -> None:
    def real(alias: Tensor) -> Tensor:
        if storage_id(alias) not in memories:
            memories[storage_id(alias)] = torch.UntypedStorage(alias.untyped_storage().nbytes())
        return shown(alias, memories[storage_id(alias)])

    args, kwargs = map_leaves((call.args, call.kwargs), Tensor, real)
    with _default_dtype(call.default_dtype):
        results = leaves_of(call.op(*args, **kwargs), Tensor)
    shared = {storage.data_ptr() for storage in memories.values()}
    for place, alias in call.makes.items():
        result, size = results[place], alias.untyped_storage().nbytes()
        storage = result.untyped_storage()
        if _layout(result) != _layout(alias) or storage.data_ptr() in shared or storage.nbytes() < size:
            storage = torch.UntypedStorage(size)
            shown(alias, storage).copy_(result)
        memories[storage_id(alias)] = storage
        if call.blank:
            fill_blank(shown(alias, storage))


def _layout(value: Tensor) -> tuple[Any, ...]:
    return value.dtype, value.shape, value.stride(), value.storage_offset(), value.is_conj()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    if dtype == before:  # it belongs to all threads
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def fill_blank(value: Tensor) -> None:
    """Fill with what `has_blanks` finds: NaN, or the largest integer; no bool can mark what is unset."""
    if value.dtype.is_floating_point or value.dtype.is_complex:
        value.fill_(float("nan"))
    else:
        value.fill_(True if value.dtype == torch.bool else torch.iinfo(value.dtype).max)


def has_blanks(value: Tensor) -> bool:
    """Whether elements are left as `fill_blank` filled them."""
    if value.numel() == 0 or value.dtype == torch.bool:
        return False
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return bool(value.isnan().any())
    return bool((value == torch.iinfo(value.dtype).max).any())
