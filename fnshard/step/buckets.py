"""Buckets: batches of many lengths, padded to few, so that few are traced and fewer compiled."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnshard import losses, tree
from fnshard.compiler.ir.arguments import Arguments, sequence_dims
from fnshard.errors import SpecError, StateError
from fnshard.losses import unwrapped

__all__ = ["Buckets"]

Fill = float | int | bool | None


@dataclass(frozen=True)
class Buckets:
    """How batches are padded: the sequences of leaves grow to the next multiple, filled with a value.

    `fn` sees the padded batch; the values must count for nothing there: a loss leaves them out by its targets
    (`fs.losses.IGNORE`) or a mask, and is a `Mean`, or a mean over what is counted. A leaf's sequence is its
    second dim, or the one that `fs.Sequence(tensor, dim)` names.

    Args:
        multiple: lengths are rounded up to multiples of it.
        pad: from globs of batch leaves to what fills them; the first that matches. None leaves them as they
            are. A leaf is named by its position or keyword, then by its path: "0", "batch.labels".

    Raises:
        SpecError: `multiple` is no count, or values are no numbers.

    >>> import torch
    >>> buckets = Buckets(4, pad={"labels": -100, "*": 0})
    >>> buckets.padded(Arguments((torch.ones(1, 3),), {"labels": torch.ones(1, 3)})).positional
    (tensor([[1., 1., 1., 0.]]),)
    """

    multiple: int = 64
    pad: Mapping[str, Fill] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wrong = []
        if not isinstance(self.multiple, int) or isinstance(self.multiple, bool) or self.multiple < 1:
            wrong.append(f"multiple={self.multiple!r}: a whole number, at least 1")
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
                "invalid buckets:", wrong, "fs.Buckets(multiple=64, pad={'labels': -100, '*': 0})."
            )

    def padded(self, batch: Arguments) -> Arguments:
        """A batch whose sequences have lengths that are multiples.

        Raises:
            StateError: leaves with a sequence that nothing says how to pad, or whose dtype lacks the value.
        """
        named, structure = batch.leaves
        dims = self._dims(batch)
        fills = {n: (self.pad[self._glob(n) or ""], unwrapped(named[n]).dtype) for n in dims}
        if wrong := [f"batch[{n!r}] {dtype}: {v!r}" for n, (v, dtype) in fills.items() if not _has(dtype, v)]:
            raise StateError(
                "fs.Buckets pads batch leaves with values that their dtypes lack:",
                wrong,
                "a pattern of its own for such a leaf in pad={}, with a value of its dtype.",
            )
        leaves = [self._filled(n, leaf, dims[n]) if n in dims else leaf for n, leaf in named.items()]
        return tree.unflatten(leaves, structure)

    def length(self, batch: Arguments) -> int | None:
        """Of a padded batch, in multiples; None where its sequences have several, or it has none."""
        named = batch.leaves[0]
        found = {unwrapped(named[n]).shape[dim] for n, dim in self._dims(batch).items()}
        return found.pop() // self.multiple if len(found) == 1 else None

    def _dims(self, batch: Arguments) -> dict[str, int]:
        """Of the leaves to pad."""
        dims = sequence_dims(batch)
        missing = [n for n in dims if self._glob(n) is None]
        if missing:
            named = batch.leaves[0]
            raise StateError(
                f"{len(missing)} batch leaves have a sequence, and fs.Buckets does not say what pads it:",
                [f"batch[{n!r}] {list(unwrapped(named[n]).shape)}, dim {dims[n]}" for n in missing],
                "pad={'labels': -100, '*': 0}, values that count for nothing; None for a leaf that stays as "
                "it is; fs.Sequence(tensor, None) for one whose second dim is no sequence.",
            )
        return {n: dim for n, dim in dims.items() if self.pad[self._glob(n) or ""] is not None}

    def _glob(self, name: str) -> str | None:
        return next((glob for glob in self.pad if fnmatch.fnmatchcase(name, glob)), None)

    def _filled(self, name: str, leaf: Any, dim: int) -> Any:
        value: Tensor = unwrapped(leaf)
        missing = -value.shape[dim] % self.multiple
        if not missing:
            return leaf
        after = [0, 0] * (value.dim() - dim - 1) + [0, missing]
        padded = F.pad(value, after, value=self.pad[self._glob(name) or ""])
        return replace(leaf, value=padded) if isinstance(leaf, losses.Sequence) else padded


def _has(dtype: torch.dtype, value: Fill) -> bool:
    """Whether a tensor can hold it, but for rounding of floats."""
    number = float(value or 0)
    if dtype.is_floating_point or dtype.is_complex:
        return not math.isfinite(number) or abs(number) <= torch.finfo(dtype).max
    least, most = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return number.is_integer() and least <= number <= most
