"""Pairs of real numbers: complex leaves are real tensors [..., 2] to all but `fn` and the user.

The specs of stored tensors (`ResolvedSpecs.stored`) describe the pairs, so that gathers, reductions, updates
and checkpoints need no rule for complex numbers. `fn`, and the trees that a user gives and gets, have complex
views of the same memory (`ResolvedSpecs.blocks_of` and `tree_of`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fnshard.errors import SpecError, leaves
from fnshard.layout.spec import DTYPE_FIELDS, LayoutSpec


def is_complex(spec: LayoutSpec) -> bool:
    """Return whether `fn` sees a leaf, whose shape is known, as complex numbers."""
    return spec.shape is not None and spec.storage_dtype is not None and spec.storage_dtype.is_complex


def pairs_of(spec: LayoutSpec) -> LayoutSpec:
    """Return the spec of a complex leaf as real numbers: the two parts lie along a last dim, which is whole.

    >>> spec = LayoutSpec().resolve(torch.ones(3, dtype=torch.complex64), "unit")
    >>> pairs_of(spec).shape, pairs_of(spec).storage_dtype
    ((3, 2), torch.float32)
    """
    dtypes = {name: getattr(spec, name).to_real() for name in DTYPE_FIELDS}
    return replace(spec, shape=(*spec.shape, 2), **dtypes)


def check_complex(specs: Mapping[str, LayoutSpec]) -> None:
    """Refuse leaves that are complex in some of their dtypes and real in others.

    Raises:
        SpecError: there are such leaves; it names them all.
    """
    wrong: list[str] = []
    fixes: dict[str, None] = {}  # in order, each once
    for path, spec in specs.items():
        dtypes = {name: getattr(spec, name) for name in DTYPE_FIELDS if spec.resolved}
        odd = [name for name, d in dtypes.items() if d is not None and d.is_complex != is_complex(spec)]
        if odd:
            name = odd[0]
            wrong.append(f"params[{path!r}] {spec.storage_dtype} with {name}={dtypes[name]}")
            fix = f"{name}=torch.complex64 for it, or None" if is_complex(spec) else f"a real {name}"
            fixes[fix] = None
    if wrong:
        raise SpecError(
            f"{leaves(len(wrong))} would change between complex and real numbers:",
            wrong,
            f"{'; '.join(fixes)}; rules=[(glob, LayoutSpec(...))] of a preset come before its policy.",
        )


def as_pairs(block: Tensor) -> Tensor:
    """Return a real view [..., 2] of a complex block; return a real block unchanged."""
    return torch.view_as_real(block.resolve_conj()) if block.is_complex() else block
