"""Numbers: Python numbers of a batch that change become inputs of the program, where `fn` takes tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fnshard import tree
from fnshard.compiler.ir.arguments import Arguments, fold_lists
from fnshard.losses import Whole


@dataclass(frozen=True)
class Numbers:
    """Which are inputs, by the path of the leaf, in which dtype; the others are constants of the program.

    A number is a constant until it changes: `fn` may take it for a shape, or branch on it. `constants` are
    those of which it is known that it does.
    """

    inputs: Mapping[str, torch.dtype] = field(default_factory=dict)
    constants: frozenset[str] = frozenset()

    def with_inputs(self, names: Collection[str], batch: Arguments, dtype: torch.dtype) -> Numbers:
        """With more inputs; those of whole numbers are int64."""
        values = batch.leaves[0]
        more = {n: torch.int64 if isinstance(values[n], int) else dtype for n in names}
        return replace(self, inputs={**self.inputs, **more})

    def with_constants(self, names: Collection[str]) -> Numbers:
        """With more numbers that stay what they are."""
        return replace(self, constants=self.constants | {*names})

    def free(self, batch: Arguments) -> dict[str, int | float]:
        """The numbers of a batch that may become inputs; not those in lists of numbers."""
        named = batch.leaves[0]
        if not any(map(is_number, named.values())):
            return {}
        known = self.inputs.keys() | self.constants
        alone = fold_lists(named, is_number).keys() - known
        return {n: leaf for n, leaf in named.items() if n in alone and is_number(leaf)}

    def applied(self, batch: Arguments) -> Arguments:
        """A batch in which they are tensors, the same for all micro-batches."""
        named, structure = batch.leaves
        if self.inputs.keys().isdisjoint(named):
            return batch
        leaves = [
            Whole(torch.tensor(leaf, dtype=self.inputs[n])) if n in self.inputs and is_number(leaf) else leaf
            for n, leaf in named.items()
        ]
        return tree.unflatten(leaves, structure)


def is_number(leaf: Any) -> bool:
    """Whether a leaf is an int or a float, and no flag."""
    return isinstance(leaf, int | float) and not isinstance(leaf, bool)
