"""Window: a box of a leaf, made without the rest of it.

It is made where every call that the leaf depends on is elementwise, over tensors that lie in their memories
as the leaf lies in its own; or over the same part of each (a padding row that is set to zero).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fnshard.compiler.deferred.draws import fill
from fnshard.compiler.deferred.tape import RecordedCall, Space, map_leaves, run_call
from fnshard.compiler.ir.program import storage_id

# What each element of a new memory is; of `full` it is an argument.
_FACTORIES = {
    "empty": 0, "empty_like": 0, "empty_strided": 0, "new_empty": 0, "new_empty_strided": 0,
    "zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1,
    "full": None, "full_like": None, "new_full": None,
}  # fmt: skip
_ELEMENTWISE = {"copy_", "_to_copy", "fill_", "zero_", "masked_fill_", "masked_fill"}
Place = tuple[int, tuple[int, ...], tuple[int, ...]]  # an offset, sizes and strides


class Window(Space):
    """Boxes of memories that are laid out as a leaf, and memories of a single number.

    Args:
        leaf: an alias of it.
        box: from where to where, along each of its dims.
    """

    def __init__(self, leaf: Tensor, box: Sequence[slice]):
        self.leaf = leaf
        self.ranges = [range(*s.indices(size)) for s, size in zip(box, leaf.shape, strict=True)]
        self.held: dict[int, Tensor] = {}
        self._widths: dict[int, int] = {}

    def allows(self, call: RecordedCall) -> bool:
        """Whether the call can be made of a box alone. It depends on the leaf, not on the box."""
        large = [a for a in call.aliases if not _is_number(a)]
        for alias in call.aliases:  # of which none is seen as another type
            size = alias.element_size()
            if alias.is_complex() or self._widths.setdefault(storage_id(alias), size) != size:
                return False
        if call.constant is not None:
            return not large
        if call.random:
            return call.draw() is not None and len(large) == 1 and self._part(large[0]) is not None
        if not all(_is_number(a) or self._is_like_leaf(a) for a in call.makes.values()):
            return False
        if call.name in _FACTORIES:
            return True
        if not (call.name in _ELEMENTWISE or torch.Tag.pointwise in getattr(call.op, "tags", ())):
            return False
        return len({self._place(a) for a in large}) < 2 and all(self._part(a) is not None for a in large[:1])

    def show(self, alias: Tensor) -> Tensor:
        """What the window has of a tensor: the dims are the leaf's."""
        memory = storage_id(alias)
        if _is_number(alias):
            return self.held.setdefault(memory, torch.zeros((), dtype=alias.dtype)).view([1] * alias.dim())
        if memory not in self.held:
            self.held[memory] = torch.zeros([len(r) for r in self.ranges], dtype=alias.dtype)
        return self.held[memory][tuple(within for within, _ in self._cut(alias))]

    def execute(self, call: RecordedCall, key: int | None) -> None:
        if call.random:
            alias, how = call.draw()
            parts = [part for _, part in self._cut(alias)]
            strides = self.leaf.stride()
            start = self.leaf.storage_offset() + sum(p.start * s for p, s in zip(parts, strides, strict=True))
            steps = [p.step * s for p, s in zip(parts, strides, strict=True)]
            if (target := self.show(alias)).numel():
                fill(target, start, steps, key, how)
        elif call.name in _FACTORIES:
            value = _FACTORIES[call.name]
            for alias in call.makes.values():
                self.show(alias).fill_(call.given["fill_value"] if value is None else value)
        else:
            args, kwargs = map_leaves((call.args, call.kwargs), Tensor, self.show)
            made = run_call(call, args, kwargs)
            for alias in call.makes.values():
                self.held[storage_id(alias)] = made

    def _is_like_leaf(self, alias: Tensor) -> bool:
        return self._place(alias) == _place_of(self.leaf)

    def _place(self, alias: Tensor) -> Place:
        """Where a tensor lies; one that is the whole leaf in another shape lies as that."""
        leaf, same = self.leaf, alias.storage_offset() == self.leaf.storage_offset()
        same &= alias.numel() == leaf.numel() and alias.is_contiguous() and leaf.is_contiguous()
        return _place_of(leaf if same else alias)

    def _part(self, alias: Tensor) -> list[range] | None:
        """The box of the leaf that lies where a tensor does in its memory, as the leaf's indices."""
        offset, sizes, strides = self._place(alias)
        rest, starts = offset - self.leaf.storage_offset(), {}
        outer = sorted(range(self.leaf.dim()), key=lambda dim: -self.leaf.stride(dim))
        for dim in outer:
            starts[dim], rest = divmod(rest, max(self.leaf.stride(dim), 1))
        part = {dim: range(start, start + 1) for dim, start in starts.items()}
        free = set(outer)
        for size, stride in zip(sizes, strides, strict=True):
            if size == 1:
                continue
            dim = next((d for d in outer if d in free and 0 < self.leaf.stride(d) <= stride), None)
            if dim is None or stride % self.leaf.stride(dim):
                return None
            free.remove(dim)
            step = stride // self.leaf.stride(dim)
            part[dim] = range(starts[dim], starts[dim] + size * step, step)
        inside = all(0 <= r.start and (not r or r[-1] < self.leaf.shape[dim]) for dim, r in part.items())
        return [part[dim] for dim in range(self.leaf.dim())] if inside and not rest else None

    def _cut(self, alias: Tensor) -> list[tuple[slice, range]]:
        """Of each dim the window's own slice, and the leaf's indices, that a tensor has in the window."""
        cut = []
        for own, part in zip(self.ranges, self._part(alias), strict=True):
            first = part.start + max(0, -(-(own.start - part.start) // part.step)) * part.step
            last = max(first, min(own.stop, part.stop))
            cut.append((slice(first - own.start, last - own.start, part.step), range(first, last, part.step)))
        return cut


def _is_number(alias: Tensor) -> bool:
    """It is all of its memory, and a single number."""
    return alias.numel() == 1 and alias.untyped_storage().nbytes() == alias.element_size()


def _place_of(alias: Tensor) -> Place:
    return alias.storage_offset(), tuple(alias.shape), tuple(alias.stride())


def describe(call: RecordedCall) -> Any:
    """A call that a window can make, as text that other processes have too."""
    value = None if call.constant is None else call.constant.tolist()
    args, kwargs = map_leaves((call.args, call.kwargs), Tensor, _place_of)
    return f"{call.name} {args} {kwargs} {value} {[*map(_place_of, call.makes.values())]}"
