"""Numbers: Python numbers of a batch that change become inputs of the program, where `fn` takes tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fnshard import tree
from fnshard.compiler.ir.arguments import Arguments, fold_lists
from fnshard.losses import Whole

Key = tuple[str, type]


@dataclass(frozen=True)
class Numbers:
    """Which are inputs, in which dtype; the others are constants of the program.

    A number is a constant until it changes: `fn` may take it for a shape, or branch on it. `constants` are
    those of which it is known that it does. Both by the path of the leaf and its type: where an int was, a
    float is another number.
    """

    inputs: Mapping[Key, torch.dtype] = field(default_factory=dict)
    constants: frozenset[Key] = frozenset()

    def with_inputs(self, numbers: Mapping[str, int | float], result: torch.dtype) -> Iterator[Numbers]:
        """With more inputs, in the dtypes to try, those first that lose nothing of Python's arithmetic.

        Args:
            result: the dtype of what `fn` returns.
        """
        tried: list[Numbers] = []
        for whole, real in (
            (torch.float64, torch.float64),
            (torch.int64, torch.float64),
            (torch.int64, result),
        ):
            more = {(n, type(v)): whole if isinstance(v, int) else real for n, v in numbers.items()}
            chosen = replace(self, inputs={**self.inputs, **more})
            if chosen not in tried:
                tried.append(chosen)
                yield chosen

    def with_constants(self, numbers: Mapping[str, int | float]) -> Numbers:
        """With more numbers that stay what they are."""
        return replace(self, constants=self.constants | {(n, type(v)) for n, v in numbers.items()})

    def free(self, batch: Arguments) -> dict[str, int | float]:
        """The numbers of a batch that may become inputs; not those in lists of numbers."""
        named = batch.leaves[0]
        if not any(map(is_number, named.values())):
            return {}
        alone, known = fold_lists(named, is_number), self.inputs.keys() | self.constants
        return {
            n: leaf
            for n, leaf in named.items()
            if n in alone and is_number(leaf) and (n, type(leaf)) not in known
        }

    def applied(self, batch: Arguments) -> Arguments:
        """A batch in which they are tensors, the same for all micro-batches."""
        named, structure = batch.leaves
        keys = {n: (n, type(leaf)) for n, leaf in named.items() if is_number(leaf)}
        if self.inputs.keys().isdisjoint(keys.values()):
            return batch
        leaves = [
            Whole(torch.tensor(leaf, dtype=self.inputs[keys[n]])) if keys.get(n) in self.inputs else leaf
            for n, leaf in named.items()
        ]
        return tree.unflatten(leaves, structure)


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a float, or an int that is one exactly, and no flag."""
    return isinstance(leaf, float) or (type(leaf) is int and abs(leaf) <= 1 << 53)
