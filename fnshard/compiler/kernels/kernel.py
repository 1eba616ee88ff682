"""Kernels as data: a distinct segment's forward and backward, as graphs, and what passes between the two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from fnshard.compiler.kernels.segment_source import Argument, SegmentSource
from fnshard.compiler.kernels.segments import Way


@dataclass(frozen=True)
class Ref:
    """A reference to a value that a backward kernel reads.

    Args:
        kind: "input", "output", "saved", "tangent" or "between".
        index: the number of the value among those of its kind.
    """

    kind: str
    index: int


Refs = tuple[Ref, ...]


@dataclass(frozen=True, eq=False)
class Backward:
    """A backward kernel, or a half of one: `module(*inputs) -> (*gradients, *between)`.

    Args:
        inputs: the values that it reads.
        grads: for each gradient, the number of the source's input that it belongs to.
        shared: gradients (positions in `grads`) that may be one tensor with another result or with an input,
            so that no reader may write to them.
    """

    module: fx.GraphModule
    inputs: Refs
    grads: tuple[int, ...]
    shared: tuple[int, ...] = ()

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @cached_property
    def tangent_strides(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The tangents that it reads, each by its index among the inputs, with the strides of its trace."""
        nodes = self.graph.find_nodes(op="placeholder")
        return tuple(
            (i, tuple(node.meta["val"].stride()))
            for i, (ref, node) in enumerate(zip(self.inputs, nodes, strict=True))
            if ref.kind == "tangent"
        )


@dataclass(frozen=True, eq=False)
class Kernel:
    """A distinct segment's forward and backward, as graphs of core ATen ops.

    Args:
        forward: the graph `(*inputs) -> (*outputs, *saved)`.
        backward: the backward, or, where another kernel makes the gradients of leaves, the half of it that
            makes cotangents and gradients that take no products. It is None where there is nothing to make.
        saved: descriptions of what is kept for the backward besides inputs and outputs.
        weights: the half of the backward that makes gradients of leaves that take products, if it is divided.
        between: descriptions of what `backward` hands on to `weights`.
        kept: the ops of the remat policy's `save` that the kernel has.
    """

    name: str
    source: SegmentSource
    forward: fx.GraphModule
    backward: Backward | None
    saved: tuple[Argument, ...] = ()
    weights: Backward | None = None
    between: tuple[Argument, ...] = ()
    kept: tuple[str, ...] = ()

    @cached_property
    def halves(self) -> Mapping[Way, Backward]:
        """The backward kernels by way, without those that have nothing to make."""
        both = {Way.BACKWARD: self.backward, Way.WEIGHTS: self.weights}
        return {way: half for way, half in both.items() if half is not None}

    @cached_property
    def modules(self) -> Mapping[Way, fx.GraphModule]:
        """The graphs by way: the forward, and those of `halves`."""
        return {Way.FORWARD: self.forward, **{way: half.module for way, half in self.halves.items()}}

    @property
    def grads(self) -> tuple[int, ...]:
        """The indices of the inputs that get a gradient."""
        return tuple(index for half in self.halves.values() for index in half.grads)

    @property
    def tangents(self) -> tuple[int, ...]:
        """The indices of the outputs that take a tangent."""
        return tuple(i for i, a in enumerate(self.source.outputs) if a.requires_grad)

    def as_text(self) -> str:
        """Return the name, what is saved, and the code of all graphs."""
        saved = ", ".join(map(str, self.saved))
        codes = [module.code.strip() for module in self.modules.values()]
        return "\n".join([f"{self.name}: saves [{saved}]", *codes])

    __str__ = as_text
