"""A log of the operators that build a module, in program order, of which each leaf needs a slice.

Every tensor of the log is an alias on the meta device, so that views need no entry: only a call that makes or
writes a memory is a `RecordedCall`. The value of a leaf is a slice of the log, run in program order. A random
operator draws from a key of its own, and depends on no other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fnshard.compiler.deferred.draws import draw_of, fill
from fnshard.compiler.ir.program import OpOverload, arguments_of, storage_id

CPU = torch.device("cpu")


def map_leaves(value: Any, kind: type, fn: Callable[[Any], Any]) -> Any:
    """Apply `fn` to those arguments or results of an operator that have a type."""
    return fx.node.map_aggregate(value, lambda v: fn(v) if isinstance(v, kind) else v)


def leaves_of(value: Any, kind: type) -> list[Any]:
    """Return the arguments or results of an operator that have a type, in order."""
    leaves: list[Any] = []
    map_leaves(value, kind, leaves.append)
    return leaves


@dataclass(slots=True)
class RecordedCall:
    """An operator of the log.

    Args:
        op: the operator.
        args, kwargs: its arguments, with an alias in place of each tensor, which may be resized later.
        reads: memories whose contents it depends on.
        overwrites: memories that it makes, or fills without reading.
        makes: results that have a memory of their own, by their place among the results.
        is_random: whether it draws random numbers.
        is_blank: whether it makes a memory without setting it.
        constant: values with which it makes a memory.
        default_dtype: torch's default dtype at the call.
    """

    op: Callable[..., Any]
    args: Any
    kwargs: Any
    reads: tuple[int, ...] = ()
    overwrites: tuple[int, ...] = ()
    makes: Mapping[int, Tensor] = field(default_factory=dict)
    is_random: bool = False
    is_blank: bool = False
    constant: Tensor | None = None
    default_dtype: torch.dtype = torch.float32

    @property
    def aliases(self) -> list[Tensor]:
        """All tensors that the call takes or makes."""
        return [*leaves_of((self.args, self.kwargs), Tensor), *self.makes.values()]

    @property
    def memories(self) -> set[int]:
        return set(map(storage_id, self.aliases))

    @property
    def name(self) -> str:
        """The name of the operator, without its overload."""
        schema = getattr(self.op, "_schema", None)
        return schema.name.partition("::")[2] if schema else self.op.__name__

    @property
    def given(self) -> dict[str, Any]:
        """The arguments by name."""
        if not isinstance(self.op, OpOverload):
            return dict(self.kwargs)
        return arguments_of(self.op, self.args, self.kwargs)

    def draw(self) -> tuple[Tensor, Any] | None:
        """Return the tensor that a random operator draws, and its draw; None if it is drawn whole only."""
        target = self.makes.get(0) if self.makes else self.args[0]
        draw = draw_of(self.name, self.given, target.dtype) if isinstance(target, Tensor) else None
        return None if draw is None else (target, draw)


@dataclass(slots=True)
class Tape:
    """A log of the calls of one block.

    Args:
        calls: the calls in program order.
        writers: for each memory, the numbers of the calls that make or write it.
    """

    calls: list[RecordedCall] = field(default_factory=list)
    writers: dict[int, list[int]] = field(default_factory=dict)

    def add(self, call: RecordedCall, writes: Iterable[int]) -> None:
        """Append a call that makes or writes these memories."""
        for memory in dict.fromkeys(writes):
            self.writers.setdefault(memory, []).append(len(self.calls))
        self.calls.append(call)

    def slice(self, needed: int) -> list[int]:
        """Return the numbers of the calls that the contents of a memory depend on, in program order."""
        numbers: set[int] = set()
        visited: set[tuple[int, int]] = set()
        todo = [(needed, len(self.calls))]
        while todo:
            memory, before = todo.pop()

            # Go back to the last write that leaves nothing of the former contents.
            writers = self.writers[memory]
            for number in reversed(writers[: bisect_left(writers, before)]):
                if (memory, number) in visited:
                    break
                visited.add((memory, number))
                call = self.calls[number]
                if number not in numbers:
                    numbers.add(number)
                    todo += [(read, number) for read in call.reads]
                if memory in call.overwrites:
                    break
        return sorted(numbers)

    def value(self, alias: Tensor) -> Tensor | None:
        """Return the current value of a tensor, or None if it depends on random numbers."""
        numbers = self.slice(storage_id(alias))
        if any(self.calls[n].is_random for n in numbers):
            return None
        return self.run(alias, numbers, Memories(), {})

    def run(self, alias: Tensor, numbers: Sequence[int], space: Memories, keys: Mapping[int, int]) -> Tensor:
        """Run calls and return a tensor; every other memory is freed after its last use.

        Args:
            numbers: the calls to run.
            space: where memories are held.
            keys: keys of the random calls, by number.
        """
        last_use = {memory: n for n in numbers for memory in self.calls[n].memories}
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for number in numbers:
                space.execute(self.calls[number], keys.get(number))
                for memory in [m for m in space.held if last_use[m] == number and m != storage_id(alias)]:
                    del space.held[memory]
            return space.show(alias)


class Memories:
    """A space that holds memories whole, as the constructor had them, while calls run again."""

    def __init__(self) -> None:
        self.held: dict[int, Any] = {}

    def show(self, alias: Tensor) -> Tensor:
        """Return the real tensor that an alias on the meta device stands for."""
        if storage_id(alias) not in self.held:
            self.held[storage_id(alias)] = torch.UntypedStorage(alias.untyped_storage().nbytes())
        value = torch.empty(0, dtype=alias.dtype, device=CPU)
        value.set_(self.held[storage_id(alias)], alias.storage_offset(), alias.shape, alias.stride())
        return value.conj() if alias.is_conj() else value

    def execute(self, call: RecordedCall, key: int | None) -> None:
        """Run a call on real memories."""
        drawn = call.draw() if call.is_random else None
        if drawn is not None:
            alias, draw = drawn
            fill(self.show(alias), alias.storage_offset(), key, draw)
            return

        # Run any other call as it was recorded; a random one draws from a generator that its key seeds.
        args, kwargs = map_leaves((call.args, call.kwargs), Tensor, self.show)
        with torch.random.fork_rng(devices=[], enabled=call.is_random):
            if call.is_random:
                torch.default_generator.manual_seed(key)
            results = leaves_of(run_call(call, args, kwargs), Tensor)

        # Keep the storage of a new tensor if its layout is the recorded one and no other memory shares it;
        # else copy the values into a memory of the recorded layout, which later aliases of it index.
        shared = {storage.data_ptr() for storage in self.held.values()}
        for place, alias in call.makes.items():
            storage = results[place].untyped_storage()
            if (
                _get_layout(results[place]) != _get_layout(alias)
                or storage.data_ptr() in shared
                or storage.nbytes() < alias.untyped_storage().nbytes()
            ):
                self.show(alias).copy_(results[place])
            else:
                self.held[storage_id(alias)] = storage
            if call.is_blank:  # nobody has set it: zeros are the same in every run
                self.show(alias).zero_()


def run_call(call: RecordedCall, args: Any, kwargs: Any) -> Any:
    """Run a call's operator on other tensors than it was recorded with."""
    if call.constant is not None:
        return call.constant.clone()
    # Factories without a dtype take the default, which the constructor may have changed for a while.
    before = torch.get_default_dtype()
    torch.set_default_dtype(call.default_dtype)
    try:
        return call.op(*args, **kwargs)
    finally:
        torch.set_default_dtype(before)


def _get_layout(value: Tensor) -> tuple[Any, ...]:
    return value.dtype, value.shape, value.stride(), value.storage_offset(), value.is_conj()
