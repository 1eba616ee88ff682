"""Length buckets: batches of many lengths, padded to a few named ones, each of which is compiled once."""

from __future__ import annotations

import fnmatch
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnshard import losses, tree
from fnshard.compiler.ir.arguments import Arguments, sequence_dims
from fnshard.errors import SpecError, StateError, counts
from fnshard.losses import unwrap_leaf

__all__ = ["Buckets"]

Fill = float | int | bool | None


@dataclass(frozen=True)
class Buckets:
    """The lengths that batches are padded to, and what fills them.

    Each sequence of a batch grows to the smallest length that holds it. A step compiles once for each length
    that occurs, as a function of static shapes does in JAX.

    `fn` sees the padded batch; the values must count for nothing there: a loss leaves them out by its targets
    (`fs.losses.IGNORE`) or a mask, and is a `Mean`, or a mean over what is counted. The sequence of a leaf
    with two dims is the second; of one with more, `fs.Sequence(tensor, dim)` names it, and `(1, 2)` those of
    a mask [B, T, T].

    Args:
        lengths: the lengths that there are. A longer sequence is an error. Where a "context" axis splits
            sequences, each length grows to the next one that its ranks divide.
        pad: from globs of batch leaves to what fills them; the first that matches. None leaves them as they
            are. A leaf is named by its position or parameter, then by its path: "0", "batch.labels". A
            pattern that names no leaf is an error.
        parameters: the names of `fn`'s, after the first; `shard_step` fills them in.

    Raises:
        SpecError: `lengths` are no counts, or values are no numbers.

    >>> import torch
    >>> buckets = Buckets([4, 8], pad={"labels": -100, "*": 0})
    >>> buckets.padded(Arguments((torch.ones(1, 3),), {"labels": torch.ones(1, 3)})).positional
    (tensor([[1., 1., 1., 0.]]),)
    """

    lengths: Sequence[int]
    pad: Mapping[str, Fill] = field(default_factory=dict)
    parameters: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        # Collect all that is wrong, for one error.
        is_length, what = counts(1)
        is_sequence = isinstance(self.lengths, Sequence) and not isinstance(self.lengths, str)
        wrong = []
        if not is_sequence or not self.lengths or not all(map(is_length, self.lengths)):
            wrong.append(f"lengths={self.lengths!r}: a list of lengths, each {what}")
        if not isinstance(self.pad, Mapping):
            wrong.append(f"pad={self.pad!r}: a dict from globs of batch leaves to numbers")
        else:
            wrong += [
                f"pad[{glob!r}]={value!r}: a number, or None"
                for glob, value in self.pad.items()
                if not isinstance(glob, str) or not isinstance(value, Fill)
            ]

        if wrong:
            raise SpecError(
                "invalid buckets:", wrong, "fs.Buckets([256, 512, 1024], pad={'labels': -100, '*': 0})."
            )

        object.__setattr__(self, "lengths", tuple(sorted(set(self.lengths))))

    def of_function(self, signature: inspect.Signature | None, context: int = 1) -> Buckets:
        """Return buckets that know the names of a function's parameters.

        Args:
            context: how many ranks split sequences. They divide all lengths: another length would be computed
                in another way, by other collectives.
        """
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [] if signature is None else signature.parameters.values()
        names = tuple(p.name for p in parameters if p.kind in kinds)[1:]  # the first is that of the leaves
        return replace(self, parameters=names, lengths=[n + -n % context for n in self.lengths])

    def padded(self, batch: Arguments) -> Arguments:
        """Return a batch whose sequences have lengths of the list.

        Raises:
            StateError: a pattern names no leaf, a leaf has no pattern or cannot hold its value, or a sequence
                is longer than all lengths.
        """
        named, structure = batch.leaves
        globs = {n: self._find_glob(n) for n in named}

        # Sequences are padded, but for leaves whose pattern says that they stay; those that no pattern names
        # are refused below.
        kept = {glob for glob, value in self.pad.items() if value is None}
        dims = {n: each for n, each in sequence_dims(batch).items() if globs[n] not in kept}

        # Refuse patterns without a leaf, and leaves that cannot be padded, in one error.
        wrong = [
            f"pad[{glob!r}]={value!r} names no leaf, or only leaves of a pattern before"
            for glob, value in self.pad.items()
            if glob not in globs.values()
        ]
        for name in dims:
            leaf, value = unwrap_leaf(named[name]), self.pad.get(globs[name] or "")
            text = f"batch[{name!r}] {list(leaf.shape)} {leaf.dtype}"
            if globs[name] is None:
                wrong.append(f"{text} has a sequence, dim {dims[name][0]}, and no pattern names it")
            elif isinstance(named[name], Tensor) and leaf.dim() > 2:
                wrong.append(f"{text} has more than two dims, and does not say which are sequences")
            elif not _can_hold(leaf.dtype, value):
                wrong.append(f"{text} cannot hold {value!r}")
            elif (size := max(leaf.shape[dim] for dim in dims[name])) > self.lengths[-1]:
                wrong.append(f"{text} is {size} long, and the longest of lengths {self.lengths[-1]}")
        if wrong:
            raise StateError(
                "fs.Buckets does not fit the batch:",
                wrong,
                "cut what is too long, or add its length; pad={'labels': -100, '*': 0}, the narrower pattern "
                "first, values that count for nothing; "
                "None for a leaf that stays as it is. fs.Sequence(tensor, dim) names a sequence, "
                "fs.Sequence(mask, (1, 2)) those of a mask [B, T, T], None that there is none. The leaves: "
                f"{', '.join(' or '.join(self._list_names(n)) for n in named)}.",
            )

        leaves = [self._pad_leaf(n, leaf, dims[n]) if n in dims else leaf for n, leaf in named.items()]
        return tree.unflatten(leaves, structure)

    def _find_glob(self, name: str) -> str | None:
        """Return the first pattern that names a leaf, or None."""
        names = self._list_names(name)
        return next((glob for glob in self.pad if any(fnmatch.fnmatchcase(n, glob) for n in names)), None)

    def _list_names(self, name: str) -> tuple[str, ...]:
        """Return the names of a leaf: by position, and by the parameter of `fn`."""
        place, dot, path = name.partition(".")
        if not place.isdigit() or int(place) >= len(self.parameters):
            return (name,)
        return name, f"{self.parameters[int(place)]}{dot}{path}"

    def _pad_leaf(self, name: str, leaf: Any, dims: Sequence[int]) -> Any:
        """Fill a leaf's sequences up to the next length."""
        value: Tensor = unwrap_leaf(leaf)
        missing = [
            min(n for n in self.lengths if n >= size) - size if dim in dims else 0
            for dim, size in enumerate(value.shape)
        ]
        if not any(missing):
            return leaf
        # `F.pad` takes pairs (before, after), the last dim first.
        after = [each for count in reversed(missing) for each in (0, count)]
        padded = F.pad(value, after, value=self.pad[self._find_glob(name) or ""])
        return replace(leaf, value=padded) if isinstance(leaf, losses.Sequence) else padded


def _can_hold(dtype: torch.dtype, value: Fill) -> bool:
    """Return whether a tensor of a dtype can hold a value, but for the rounding of floats."""
    number = float(value or 0)
    if dtype.is_floating_point or dtype.is_complex:
        return not math.isfinite(number) or abs(number) <= torch.finfo(dtype).max
    least, most = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return number.is_integer() and least <= number <= most
