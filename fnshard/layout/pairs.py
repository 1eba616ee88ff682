"""Pairs: complex leaves, which a step gathers, reduces and updates as real tensors [..., 2].

At rest, in a parameter tree, in optimizer state and in checkpoints, such a leaf is complex. Between, a step
works on real views of the same memory, as torch's optimizers do (`torch.view_as_real`): collectives, norms
and elementwise updates need no rule for complex numbers, and |z|^2 is the sum over both parts. `fn` is given
the complex view of what was gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fnshard.errors import SpecError, leaves
from fnshard.layout.spec import DTYPE_FIELDS, LayoutSpec


def is_complex(spec: LayoutSpec) -> bool:
    """Whether a leaf is stored as complex numbers."""
    return spec.storage_dtype is not None and spec.storage_dtype.is_complex


def pairs_of(spec: LayoutSpec) -> LayoutSpec:
    """The spec of a complex leaf's real and imaginary parts, along a last dim that nothing splits.

    >>> spec = LayoutSpec().resolve(torch.ones(3, dtype=torch.complex64), "unit")
    >>> pairs_of(spec).shape, pairs_of(spec).storage_dtype
    ((3, 2), torch.float32)
    """
    dtypes = {name: getattr(spec, name).to_real() for name in DTYPE_FIELDS}
    return replace(spec, shape=(*spec.shape, 2), **dtypes)


def paired_specs(specs: Mapping[str, LayoutSpec]) -> Mapping[str, LayoutSpec]:
    """`specs` with the pairs of complex leaves in their place; the same mapping where there are none.

    Raises:
        SpecError: leaves that are complex in some of their dtypes and real in others.
    """
    wrong, fixes = [], {}
    for path, spec in specs.items():
        dtypes = {name: dtype for name in DTYPE_FIELDS if (dtype := getattr(spec, name)) is not None}
        kinds = {name: dtype.is_complex for name, dtype in dtypes.items()}
        if len(set(kinds.values())) > 1:
            odd = next(name for name in kinds if kinds[name] != kinds["storage_dtype"])
            wrong.append(f"params[{path!r}] {dtypes['storage_dtype']} with {odd}={dtypes[odd]}")
            fixes[f"{odd}=torch.complex64 for it, or None" if is_complex(spec) else f"a real {odd}"] = None
    if wrong:
        raise SpecError(
            f"{leaves(len(wrong))} would change between complex and real numbers:",
            wrong,
            f"{'; '.join(fixes)}; rules=[(glob, LayoutSpec(...))] of a preset come before its policy.",
        )
    if not any(map(is_complex, specs.values())):
        return specs
    return {path: pairs_of(s) if is_complex(s) else s for path, s in specs.items()}


def as_pairs(block: Tensor) -> Tensor:
    """A real view [..., 2] of a complex block; a real one as it is."""
    return torch.view_as_real(block.resolve_conj()) if block.is_complex() else block


def as_complex(pairs: Tensor | None) -> Tensor | None:
    """The inverse of `as_pairs`; None, which stands for no gradient, stays None."""
    return None if pairs is None else torch.view_as_complex(pairs)


def slots_at_rest(slots: Mapping[str, Tensor], spec: LayoutSpec) -> dict[str, Tensor]:
    """One leaf's optimizer state, made of its pairs, as it rests: where the leaf is complex, so is what has
    pairs; numbers and counts are as they are. `as_pairs` of each is the inverse."""

    def at_rest(value: Tensor) -> Tensor:
        paired = value.dim() > 0 and value.shape[-1] == 2 and value.dtype in (torch.float32, torch.float64)
        return as_complex(value) if paired else value

    return {name: at_rest(value) if is_complex(spec) else value for name, value in slots.items()}
