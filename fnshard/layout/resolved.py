"""`ResolvedSpecs`: the internal form of a spec tree, with its specs by path."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fnshard import tree
from fnshard.errors import SpecError, TraceError, leaves
from fnshard.layout.codecs import check_codecs, decode, is_coded, parts_of
from fnshard.layout.pairs import as_pairs, check_complex, is_complex, pairs_of
from fnshard.layout.rules import check_tree
from fnshard.layout.spec import LayoutSpec, P, is_spec
from fnshard.layout.units import numeric

_ABSENT = object()


@dataclass(frozen=True, eq=False)
class ResolvedSpecs:
    """A spec tree and its specs by path.

    `stored` and `structure` describe the stored tensors, among which a coded leaf is replaced by its parts,
    and a complex one by pairs of real numbers.

    Args:
        tree: the spec tree.
        leaves: `{path: spec}` of the leaves that `fn` sees.
        leaf_structure: the structure of a tree of these leaves.
    """

    tree: Any
    leaves: dict[str, LayoutSpec]
    leaf_structure: tree.TreeDef

    @staticmethod
    def of(specs: Any) -> ResolvedSpecs:
        """Flatten a spec tree.

        Raises:
            SpecError: this is not a tree of LayoutSpecs.
        """
        named, structure = tree.flatten_with_paths(specs, is_leaf=is_spec)
        wrong = {p: s for p, s in named.items() if not is_spec(s)}
        if not named:
            # A tree without leaves may have constants, which are no specs either.
            wrong |= tree.constants_of(specs)
        if wrong:
            lines = [f"specs[{path!r}] is {type(value).__name__}" for path, value in wrong.items()]
            layout = next((value for value in wrong.values() if isinstance(value, P)), None)
            fix = (
                "make it with match_specs(params, rules) or a preset, as fs.presets.full_shard(params, mesh)"
            )
            if layout is not None:
                fix += f"; a P goes into a LayoutSpec: LayoutSpec({layout!r})"
            fix += "."
            raise SpecError("a spec tree holds LayoutSpecs alone:", lines, fix)
        return ResolvedSpecs(specs, named, structure)

    def with_leaves(self, specs: Iterable[LayoutSpec]) -> ResolvedSpecs:
        """Return a tree of this structure with other specs, given in the order of `leaves`."""
        return ResolvedSpecs.of(tree.unflatten(specs, self.leaf_structure))

    @property
    def stored(self) -> dict[str, LayoutSpec]:
        """`{path: spec}` of the stored tensors.

        Raises:
            SpecError: some leaves cannot be coded, or are complex in some of their dtypes alone.
        """
        return self._stored[0]

    @property
    def structure(self) -> tree.TreeDef:
        """The structure of a tree of the stored tensors."""
        return self._stored[1]

    @cached_property
    def _stored(self) -> tuple[dict[str, LayoutSpec], tree.TreeDef]:
        """The specs of stored tensors, and their structure: parts of coded leaves, pairs for complex ones."""
        check_codecs(self.leaves)
        check_complex(self.leaves)
        if not (self.complex or any(map(is_coded, self.leaves.values()))):
            return self.leaves, self.leaf_structure
        # A coded leaf is replaced by a dict of parts, so that its tree has a level more.
        stored: list[LayoutSpec | dict[str, LayoutSpec]] = []
        for spec in self.leaves.values():
            if is_coded(spec):
                stored.append(parts_of(spec))
            else:
                stored.append(pairs_of(spec) if is_complex(spec) else spec)
        return tree.flatten_with_paths(tree.unflatten(stored, self.leaf_structure), is_leaf=is_spec)

    @cached_property
    def complex(self) -> frozenset[str]:
        """Paths of the leaves that `fn` and the user see as complex numbers."""
        return frozenset(p for p, s in self.leaves.items() if is_complex(s))

    @property
    def seen(self) -> dict[str, LayoutSpec]:
        """`stored`, with complex leaves as `fn` and the user see them.

        A leaf of codes stays the several tensors that store it.
        """
        return self.stored | {p: self.leaves[p] for p in self.complex}

    def blocks_of(self, params: Any) -> dict[str, Any]:
        """Return the stored tensors of a user's tree, by path."""
        named, pairs = tree.flatten_with_paths(params)[0], self.complex
        return {p: as_pairs(v) if p in pairs and isinstance(v, Tensor) else v for p, v in named.items()}

    def as_seen(self, blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return stored tensors by path with complex leaves as the user sees them."""
        return {p: torch.view_as_complex(v) if p in self.complex else v for p, v in blocks.items()}

    def tree_of(self, blocks: Mapping[str, Tensor]) -> Any:
        """Return the user's tree of stored tensors: the inverse of `blocks_of`."""
        return tree.unflatten(map(self.as_seen(blocks).__getitem__, self.stored), self.structure)

    @property
    def incomplete(self) -> list[str]:
        """The leaves whose shape, unit or trainability is not known yet, as messages name them."""
        return [f"specs[{p!r}]" for p, s in self.leaves.items() if not s.resolved]

    @cached_property
    def complete(self) -> bool:
        """Whether every spec knows its leaf."""
        return not self.incomplete

    @property
    def trainable(self) -> list[str]:
        """Paths of the stored leaves that train."""
        return [p for p, s in self.stored.items() if s.trainable]

    def resolve(self, params: Any) -> ResolvedSpecs:
        """Return the specs in the form of `params`, with all defaults filled in.

        Args:
            params: a tree of full shapes; real, meta or fake tensors.

        Raises:
            SpecError: the tree has other leaves.
        """
        aligned = self.align(params)
        if aligned.complete:
            return aligned
        full, unit_of = tree.flatten_with_paths(params)[0], numeric(params)
        return aligned.with_leaves(
            s if s.resolved else s.resolve(full[p], unit_of[p]) for p, s in aligned.leaves.items()
        )

    def align(self, like: Any) -> ResolvedSpecs:
        """Return the specs in the form of another tree of the same leaves, matched by name, never by order.

        Specs without any constants (handwritten ones) take those of the other tree.

        Args:
            like: a tree of full leaves, stored blocks, or specs.

        Raises:
            SpecError: the tree has other leaves or constants.
        """
        given, form = tree.flatten_with_paths(like, is_leaf=is_spec)
        # A tree of stored blocks has a dict of parts where `leaves` has one coded leaf. It is flattened
        # again, with each such dict as one leaf.
        coded = {p: s for p, s in self.leaves.items() if is_coded(s)}
        check_codecs(coded)
        parts = {f"{p}.{n}": p for p, s in coded.items() for n in parts_of(s)}
        if not parts.keys().isdisjoint(given):

            def is_one_leaf(node: Any) -> bool:
                children = node.values() if isinstance(node, dict) else ()
                return bool(children) and all(isinstance(v, PathLeaf) and v.path in parts for v in children)

            nodes, form = tree.flatten(tree.unflatten(map(PathLeaf, given), form), is_one_leaf)
            given = dict.fromkeys(
                n.path if isinstance(n, PathLeaf) else parts[next(iter(n.values())).path] for n in nodes
            )

        compare_paths(self.leaves, given)
        if self.leaf_structure.constants:
            self.check_constants(like)
        if form == self.leaf_structure:
            return self
        # The other tree may have its leaves in another order, or in other containers.
        return ResolvedSpecs.of(tree.unflatten([self.leaves[p] for p in given], form))

    def check_constants(self, params: Any) -> None:
        """Refuse a tree whose constants and functions are not those that the specs were made with.

        Raises:
            SpecError: some differ; it names them all, with both values.
        """
        expected, given = tree.constants_of(self.tree, is_spec), tree.constants_of(params, is_spec)
        wrong: list[str] = []
        for path in expected | given:
            before, now = expected.get(path, _ABSENT), given.get(path, _ABSENT)
            if not tree.is_same(before, now):
                wrong.append(
                    f"params[{path!r}] is {_describe(now)}, the specs were made with {_describe(before)}"
                )
        if wrong:
            raise SpecError(
                f"the tree's constants, which are part of the program, differ in {leaves(len(wrong))}:",
                wrong,
                "make specs and step anew from this tree; what changes between steps is a tensor, in the "
                "batch or in the tree (trainable=False).",
            )

    def decode_tree(self, blocks: Mapping[str, Tensor]) -> Any:
        """Return the tree that `fn` sees, from full stored tensors; decode codes in `compute_dtype`."""
        full = self.as_seen(blocks)
        values = [
            decode(full, p, s, s.compute_dtype) if is_coded(s) else full[p] for p, s in self.leaves.items()
        ]
        return tree.unflatten(values, self.leaf_structure)

    def decode_before(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `fn` as a function of full stored tensors, which decodes them first."""
        if self.stored is self.leaves:
            return fn

        @functools.wraps(fn)
        def decode_and_call(params: Any, *batch: Any, **keywords: Any) -> Any:
            seen = self.decode_tree(tree.flatten_with_paths(params)[0])
            values = tree.flatten_with_paths(seen)[0]
            # A write to decoded values would be lost with them: torch counts the writes to each tensor.
            versions = {p: values[p]._version for p, s in self.leaves.items() if is_coded(s)}
            result = fn(seen, *batch, **keywords)
            written = [f"params[{p!r}]" for p, version in versions.items() if values[p]._version != version]
            if written:
                raise TraceError(
                    f"`fn` changes {leaves(len(written))} in place, whose codes are what is stored:",
                    written,
                    "codec=None in the spec of a leaf that `fn` writes to.",
                )
            return result

        return decode_and_call


@dataclass(frozen=True)
class PathLeaf:
    """A stand-in for a leaf, known by its path; a plain string in a tree would be a constant."""

    path: str


def _describe(value: Any) -> str:
    """Return a constant as an error shows it, "nothing" for one that a tree lacks."""
    return "nothing" if value is _ABSENT else repr(value)


def compare_paths(specs: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    """Refuse trees whose leaves differ.

    Raises:
        SpecError: some leaves are in one tree alone, and it names them all; or `params` is a module or an
            iterator.
    """
    check_tree(params)
    missing = [f"params[{p!r}] has no spec" for p in params if p not in specs]
    surplus = [f"specs[{p!r}] has no leaf" for p in specs if p not in params]
    if missing or surplus:
        raise SpecError(
            f"the spec tree and the parameter tree differ in {leaves(len(missing) + len(surplus))}:",
            missing + surplus,
            "make the specs from this tree with match_specs(params, rules).",
        )
