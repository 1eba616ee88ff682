"""Make a window of a leaf, a run of its elements, without the other elements.

That is possible if the leaf is contiguous, and every call that it depends on is elementwise, over one run of
memory each (such as a padding row that is set to zero). The same element of another memory is then at the
same place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fnshard.compiler.deferred.draws import fill
from fnshard.compiler.deferred.tape import Memories, RecordedCall, map_leaves, run_call
from fnshard.compiler.ir.program import storage_id

_CONSTANTS = {"empty": 0, "zeros": 0, "ones": 1, "full": None}  # `full` has its number as an argument
_ELEMENTWISE = {"copy_", "_to_copy", "fill_", "zero_", "masked_fill_", "masked_fill"}
_SHORT = 1 << 12  # runs of fewer elements are made together with the elements between them


class Window(Memories):
    """A window on memories, from element `first` to `last`; a memory of a single number is held whole."""

    def __init__(self, first: int, last: int):
        super().__init__()
        self.first, self.last = first, last

    def show(self, alias: Tensor) -> Tensor:
        """Return the part of an alias in the window, flat."""
        memory = storage_id(alias)
        if _is_number(alias):
            number = self.held.setdefault(memory, torch.zeros((), dtype=alias.dtype))
            return number.view([1] if alias.dim() else [])
        if memory not in self.held:
            self.held[memory] = torch.zeros(self.last - self.first, dtype=alias.dtype)
        start, end = (min(max(place, self.first), self.last) for place in _get_run(alias))
        return self.held[memory][start - self.first : end - self.first]

    def execute(self, call: RecordedCall, key: int | None) -> None:
        """Run a call on the window's elements; `torch.zeros` and its like fill the window alone."""
        if call.is_random:
            alias, draw = call.draw()
            fill(self.show(alias), max(alias.storage_offset(), self.first), key, draw)
        elif (constant := _find_constant(call)) is not None:
            self.show(call.makes[0]).fill_(constant)
        else:
            args, kwargs = map_leaves((call.args, call.kwargs), Tensor, self.show)
            made = run_call(call, args, kwargs)
            self.held.update({storage_id(alias): made for alias in call.makes.values()})


def can_be_cut(leaf: Tensor, calls: Sequence[RecordedCall]) -> bool:
    """Return whether windows of a leaf can be made, given the calls that make it."""
    # Places count elements, so that no memory may be seen in two widths, or out of order.
    widths: dict[int, int] = {}
    for alias in [leaf, *(a for call in calls for a in call.aliases)]:
        width = widths.setdefault(storage_id(alias), alias.element_size())
        if alias.is_complex() or alias.element_size() != width or not alias.is_contiguous():
            return False
    return not _is_number(leaf) and all(_is_elementwise(call, *_get_run(leaf)) for call in calls)


def _is_elementwise(call: RecordedCall, first: int, last: int) -> bool:
    """Return whether a call makes each element of a run without reading other places."""
    large = [a for a in call.aliases if not _is_number(a)]
    if call.is_random:
        return bool(large) and call.draw() is not None

    # A memory that it makes has to contain the whole run of the leaf.
    made = [_get_run(a) for a in call.makes.values() if not _is_number(a)]
    if not all(start <= first and last <= end for start, end in made):
        return False

    # Recorded values are made whole, which fits a single number alone; a fill fits any run.
    if call.constant is not None or _find_constant(call) is not None:
        return call.constant is None or not large
    is_elementwise = call.name in _ELEMENTWISE or torch.Tag.pointwise in call.op.tags
    return is_elementwise and len({_get_run(a) for a in large}) < 2


def _find_constant(call: RecordedCall) -> Any:
    """Return the number that fills a new memory; None if the call does something else."""
    if not call.makes:
        return None
    name = call.name.removeprefix("new_").removesuffix("_like")
    name = "empty" if name == "empty_strided" else name
    return call.given["fill_value"] if name == "full" else _CONSTANTS.get(name)


def _is_number(alias: Tensor) -> bool:
    """Return whether an alias is a single number, and all of its memory."""
    return alias.numel() == 1 and alias.untyped_storage().nbytes() == alias.element_size()


def _get_run(alias: Tensor) -> tuple[int, int]:
    """Return the first place of an alias in its memory, and the one after its last."""
    return alias.storage_offset(), alias.storage_offset() + alias.numel()


def describe(call: RecordedCall) -> str:
    """Describe the call that makes a leaf which can be cut, in text that is equal in all processes."""
    args, kwargs = map_leaves((call.args, call.kwargs), Tensor, _get_run)
    return f"{call.name} {args} {kwargs} {None if call.constant is None else call.constant.tolist()}"


def cut(leaf: Tensor, box: Sequence[slice], make: Callable[[Window], Tensor]) -> Tensor:
    """Make a box of a leaf from as few runs as possible, which contain little else.

    Args:
        make: makes the elements of a window.
    """
    ranges = [range(*s.indices(size)) for s, size in zip(box, leaf.shape, strict=True)]
    if not all(ranges):
        return torch.empty([len(r) for r in ranges], dtype=leaf.dtype)
    if not ranges:
        return make(Window(*_get_run(leaf)))[0]

    # From the last dim that is cut on, elements lie in one run. Short runs are joined along an outer dim,
    # with the elements between them.
    dim = max((d for d, r in enumerate(ranges) if len(r) < leaf.shape[d]), default=0)
    while dim and len(ranges[dim]) * math.prod(leaf.shape[dim + 1 :]) < _SHORT:
        dim -= 1
    run = [len(ranges[dim]), *leaf.shape[dim + 1 :]]

    # Make one run for each index of the dims before it, and cut off the elements between short ones.
    parts = []
    for outer in itertools.product(*ranges[:dim]):
        first = leaf[(*outer, ranges[dim].start)].storage_offset()
        parts.append(make(Window(first, first + math.prod(run))).view(run))
    joined = parts[0] if len(parts) == 1 else torch.stack(parts)
    return joined.view([*(len(r) for r in ranges[:dim]), *run])[(..., *box[dim + 1 :])]
