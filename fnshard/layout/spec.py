"""`LayoutSpec`, which says what one leaf's layout *means*.

Four tensors per leaf
---------------------
Every trainable leaf has four tensors in a step; each has a shape, a dtype, a place and a lifetime:

- The *stored shard* has the layout `storage` and `storage_dtype`, and is kept in `memory`. It lives between
  steps. Where it is kept on the host or on disk, a copy of it is on the device from its ToDevice to the
  packing of its bucket.
- The *gathered parameter* has the layout `compute` (full), `compute_dtype`, and is on the device. It lives
  from its unit's Gather to its Free, in forward and again in backward.
- The *full gradient* has the shape and the dtype of the gathered parameter. It lives from the backward kernel
  to the packing of its bucket.
- The *gradient shard* has the layout `gradient`, and `reduce_dtype` on the wire. It lives from the reduction
  to the update (through all micro-batches, where gradients are accumulated), and is kept with the optimizer
  state.

Optimizer state has the layout `optimizer`, and holds a master copy of the leaf where `optimizer_dtype`
differs from storage, or where the host updates what the device stores. ZeRO 1, 2 and 3 differ in nothing but
these fields.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from fnshard.errors import SpecError, leaves, misfits, one_of
from fnshard.layout.partition import P, block_shape, every_rank_has_some
from fnshard.mesh import COMPUTE_AXES, PIPELINE, Mesh, check_mesh

__all__ = ["LayoutSpec"]

Memory = Literal["device", "host", "disk"]
Scaling = Literal["tensorwise", "rowwise"]
Aggregation = Literal["mean", "sum", "rank0", "local"]
PARTITION_FIELDS = ("storage", "compute", "gradient", "optimizer")
DTYPE_FIELDS = ("storage_dtype", "compute_dtype", "reduce_dtype", "optimizer_dtype")
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class LayoutSpec:
    """A description of how one leaf is stored, cast, gathered, reduced and updated.

    Fields left None take their default from the leaf or from `storage` when `match_specs` (or
    `resolve`) sees the leaf. A list stands for a `P` and a name for a dtype, as configurations have them:
    `LayoutSpec(storage=["shard"], compute_dtype="bfloat16")`.

    Of the dtypes, `storage_dtype` is by default the leaf's own; `compute_dtype` is that of storage;
    `reduce_dtype` that of compute; `optimizer_dtype` that of storage; and `wire_dtype`, in which a gather
    carries the leaf, is the narrower of storage's and compute's. `compute_dtype=torch.float8_e4m3fn` of a
    matrix that trains means `wire_dtype=torch.float8_e4m3fn` and bf16: `fn` sees numbers that are rounded to
    fp8, by a scale for the whole leaf or for each row (`scaling`), and its linear layers multiply in fp8
    (`compiler.rewrites.fp8`).

    Args:
        storage: the layout between steps.
        compute: the axes that split what `fn` computes with the leaf: a rank gathers its part over the other
            axes of storage alone. Storage names the axes of `compute` first, dim by dim:
            `LayoutSpec(P(("tensor", "shard")), compute=P("tensor"))`; storage=P() takes them by itself.
            Where matrices lie side by side (a fused query, key and value), `P(Fused("tensor", 3))` splits
            each of them. A data axis splits stacks of experts [E, M, N] along dim 0: rows go to the ranks
            that have their experts, and for all other leaves it is a data axis.
        gradient: the layout of the reduced gradient; by default that of `storage`. ZeRO 2 shards gradients of
            leaves that are stored whole.
        optimizer: the layout of optimizer state and update.
        memory: where the stored shard is kept: "device", "host" (pinned where there is CUDA) or "disk"
            (mapped files in the directory given to the step).
        optimizer_memory: where optimizer state is kept, and gradient shards with it.
        update_on: where the optimizer runs, "host" or "device"; by default, where its state is. With
            update_on="device", state that is kept on the host is streamed through the device.
        scaling: what has a scale in fp8: with "tensorwise" the whole leaf, the whole input and the whole
            gradient of a product; with "rowwise" each of their rows. Gradients of leaves are then products
            in bf16.
        codec: how a frozen leaf is coded, "int8", "nf4" or one of your own; see `fnshard.codecs`.
        trainable: whether the leaf trains. None takes an `nn.Parameter`'s `requires_grad`; other float
            tensors train.
        unit: the name of the leaves that are gathered, freed and reduced together; None asks the unit policy.
        reshard: free the gathered leaf after forward and gather it again for backward. False keeps it
            between, in a pipeline for the whole step.
        buffers: (in a rule) whether the rule holds for buffers and non-float leaves too.
        aggregation: what becomes of a leaf that `fn` writes to (a running average, a queue, a counter), whose
            new values differ by rank. "mean" averages over ranks, weighted by their rows; "sum" adds all
            ranks' changes; "rank0" takes the first rank's; "local" leaves each rank its own, and a checkpoint
            holds the first rank's. None is "mean" for floats and "rank0" for others. The words follow
            tf.VariableAggregation.
        chunk: the chunk of a pipelined program that has the leaf, counted in the program's order: only stage
            `chunk % mesh.stages` stores it. With "all" every stage stores it, and its gradient is summed over
            them. None is the chunk of the leaf's unit in a preset, else "all". No layout names the axis
            "pipeline".
        shape: the full shape, filled in by `resolve`.

    >>> LayoutSpec(P("shard"), compute_dtype=torch.bfloat16).storage
    P('shard')
    """

    storage: P = P()
    compute: P = P()
    gradient: P | None = None
    optimizer: P | None = None
    storage_dtype: torch.dtype | None = None
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    optimizer_dtype: torch.dtype | None = None
    wire_dtype: torch.dtype | None = None
    memory: Memory = "device"
    optimizer_memory: Memory = "device"
    update_on: Literal["host", "device"] | None = None
    scaling: Scaling = "tensorwise"
    codec: str | None = None
    trainable: bool | None = None
    unit: str | None = None
    reshard: bool = True
    buffers: bool = False
    aggregation: Aggregation | None = None
    chunk: int | Literal["all"] | None = None
    shape: tuple[int, ...] | None = None

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        """Refuse unknown options by an error that names the known ones, before Python raises a TypeError."""
        check_fields("LayoutSpec", fields, ("shape",))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in PARTITION_FIELDS:
            object.__setattr__(self, name, _parse_partition(name, getattr(self, name)))
        for name in (*DTYPE_FIELDS, "wire_dtype"):
            object.__setattr__(self, name, _parse_dtype(name, getattr(self, name)))
        # Name the first field whose value is not allowed, and what is.
        if wrong := misfits(vars(self), _EXPECTED):
            value, _, expected = wrong[0].rpartition(": ")
            raise SpecError(f"LayoutSpec({value}): {expected}.")
        if self.update_on == "host" and self.optimizer_memory == "device":
            raise SpecError(
                "LayoutSpec(update_on='host', optimizer_memory='device'): the host has no state.",
                fix="optimizer_memory='host' (or 'disk'), or update_on=None.",
            )

    @property
    def resolved(self) -> bool:
        """Whether every default has been filled in from a leaf."""
        return None not in (self.shape, self.unit, self.trainable, self.chunk)

    @property
    def aggregated(self) -> Aggregation:
        """The aggregation over ranks of what `fn` writes to the leaf."""
        return self.aggregation or ("mean" if self.compute_dtype.is_floating_point else "rank0")

    @property
    def updated_on(self) -> str:
        """The place where the optimizer runs: "device" or "host"."""
        return self.update_on or ("device" if self.optimizer_memory == "device" else "host")

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which micro-batches are summed: as wide as the wire's and the optimizer's."""
        return torch.promote_types(self.reduce_dtype, self.optimizer_dtype)

    @property
    def has_master(self) -> bool:
        """Whether the optimizer has its own copy of the leaf: its dtype differs, or the host updates it."""
        is_elsewhere = self.updated_on == "host" and self.memory == "device"
        return bool(self.trainable) and (is_elsewhere or self.optimizer_dtype != self.storage_dtype)

    def resolve(self, leaf: Tensor, unit: str, chunk: int | Literal["all"] = "all") -> LayoutSpec:
        """Return a copy with all defaults filled in.

        Args:
            leaf: the leaf, of which the full shape, the dtype and `requires_grad` are read.
            unit: the leaf's unit by the unit policy.
            chunk: the chunk that a preset gives the unit.
        """
        storage_dtype = self.storage_dtype or leaf.dtype
        compute_dtype, wire_dtype = self.compute_dtype or storage_dtype, self.wire_dtype

        # By default a parameter trains if it requires grad, and any other leaf of floats if it is no buffer.
        # Integers train only if the spec says so, which `check_specs` then refuses.
        if self.trainable is not None:
            trainable = self.trainable
        elif not (storage_dtype.is_floating_point or storage_dtype.is_complex):
            trainable = False
        elif isinstance(leaf, nn.Parameter):
            trainable = leaf.requires_grad
        else:
            trainable = (leaf.dtype.is_floating_point or leaf.dtype.is_complex) and not is_buffer(leaf)

        # To `fn` and autograd the leaf is bf16: it travels in fp8 alone, and is multiplied in it.
        if trainable and compute_dtype == FP8:
            compute_dtype, wire_dtype = torch.bfloat16, FP8

        # A layout without axes follows `compute`: what is computed in parts is stored in them.
        storage, gradient, optimizer = (
            p if p is None or p.axes else self.compute for p in (self.storage, self.gradient, self.optimizer)
        )
        return replace(
            self,
            storage=storage,
            gradient=storage if gradient is None else gradient,
            optimizer=storage if optimizer is None else optimizer,
            storage_dtype=storage_dtype,
            compute_dtype=compute_dtype,
            reduce_dtype=self.reduce_dtype or compute_dtype,
            optimizer_dtype=self.optimizer_dtype or storage_dtype,
            wire_dtype=wire_dtype,
            trainable=trainable,
            unit=self.unit or unit,
            chunk=chunk if self.chunk is None else self.chunk,
            shape=tuple(leaf.shape),
        )

    def local(self, mesh: Mesh) -> LayoutSpec:
        """Return the spec of the part that a rank computes with, as if that were a leaf.

        Its layouts are without the axes of `compute`; a spec that has no such axes is returned unchanged.

        >>> from fnshard.mesh import make_mesh
        >>> spec = LayoutSpec(P(("tensor", "shard")), compute=P("tensor")).resolve(torch.empty(8, 2), "unit")
        >>> local = spec.local(make_mesh(shard=2, tensor=2, abstract=True))
        >>> local.shape, local.storage
        ((4, 2), P('shard'))
        """
        if not set(self.compute.axes) & set(self.storage.axes):
            return self
        shape = block_shape(self.shape, self.compute, mesh)
        names = ("storage", "gradient", "optimizer")
        layouts = {name: getattr(self, name).without(self.compute.axes) for name in names}
        return replace(self, shape=shape, **layouts)


_EXPECTED = {
    "trainable": one_of(None, True, False), "reshard": one_of(True, False), "buffers": one_of(True, False),
    "unit": (lambda v: v is None or (isinstance(v, str) and v), "a name"),
    "scaling": one_of(*get_args(Scaling)),
    "memory": one_of(*get_args(Memory)), "optimizer_memory": one_of(*get_args(Memory)),
    "aggregation": one_of(*get_args(Aggregation), None), "update_on": one_of("host", "device", None),
    "chunk": (lambda v: v in (None, "all") or (type(v) is int and v >= 0), 'a chunk from 0 on, or "all"'),
}  # fmt: skip
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def from_plain(spec: Any) -> Any:
    """Make a `LayoutSpec` of a mapping of fields, as a configuration has it; return anything else unchanged.

    Raises:
        SpecError: there is no such field.
    """
    if not isinstance(spec, Mapping):
        return spec
    check_fields("LayoutSpec", [str(name) for name in spec])
    return LayoutSpec(**spec)


def check_fields(of: str, names: Iterable[str], more: Sequence[str] = ()) -> None:
    """Refuse names that are not fields of a `LayoutSpec`.

    Args:
        of: what the names were given to, as the error calls it.
        more: other names that it takes.

    Raises:
        SpecError: some name is unknown; it suggests the nearest.
    """
    known = [*(f.name for f in fields(LayoutSpec) if f.name != "shape"), *more]  # the shape is the leaf's own
    if unknown := [name for name in names if name not in known]:
        nearest = difflib.get_close_matches(unknown[0], known, n=len(known), cutoff=0)
        raise SpecError(
            f"{of} has no field {', '.join(map(repr, unknown))}.",
            fix=f"one of {nearest[0]} (the nearest), {', '.join(nearest[1:])}.",
        )


def _parse_partition(name: str, value: Any) -> P | None:
    """Return a field as a `P`, which may be given as the list of its parts."""
    if value is None or isinstance(value, P):
        return value
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise SpecError(
            f"LayoutSpec({name}={value!r}): expected P(...) or a list, got {type(value).__name__}.",
            fix=f"{name}=P({value if isinstance(value, str) else 'shard'!r}) splits dim 0.",
        )
    return P(*value)


def _parse_dtype(name: str, value: Any) -> torch.dtype | None:
    """Return a field as a dtype, which may be given by its name."""
    if value is None or isinstance(value, torch.dtype):
        return value
    meant = getattr(torch, _DTYPES.get(str(value), str(value).removeprefix("torch.")), None)
    if not isinstance(value, str) or not isinstance(meant, torch.dtype):
        raise SpecError(
            f"LayoutSpec({name}={value!r}): expected a torch.dtype or its name.",
            fix=f"{name}=torch.bfloat16.",
        )
    return meant


def is_buffer(leaf: Any) -> bool:
    """Return whether `make_functional` marked this leaf as a module's buffer."""
    return isinstance(leaf, nn.Buffer)


def is_spec(value: Any) -> bool:
    """Return whether a value is a LayoutSpec, which is what counts as a leaf of a spec tree."""
    return isinstance(value, LayoutSpec)


def stage_of(spec: LayoutSpec, mesh: Mesh) -> int | None:
    """Return the stage that stores a leaf, or None if all do.

    >>> from fnshard.mesh import make_mesh
    >>> stage_of(LayoutSpec(chunk=3), make_mesh(pipeline=2, abstract=True))
    1
    """
    return None if spec.chunk in (None, "all") else spec.chunk % mesh.stages


def is_here(spec: LayoutSpec, mesh: Mesh, rank: int | None = None) -> bool:
    """Return whether a rank (default: this one) stores a leaf; on a mesh without a pipeline all ranks do."""
    return stage_of(spec, mesh) in (None, mesh.stage if rank is None else mesh.stage_of(rank))


def stored_shape(spec: LayoutSpec, mesh: Mesh) -> tuple[int, ...]:
    """Return the padded shape of this rank's stored block; a leaf of another stage is a stack of no blocks.

    >>> from fnshard.mesh import make_mesh
    >>> mesh = make_mesh(pipeline=2, shard=2, abstract=True)
    >>> specs = [LayoutSpec(P("shard"), chunk=c).resolve(torch.empty(5, 3), "unit") for c in (0, 1)]
    >>> [stored_shape(spec, mesh) for spec in specs]
    [(3, 3), (0, 5, 3)]
    """
    return block_shape(spec.shape, spec.storage, mesh) if is_here(spec, mesh) else (0, *spec.shape)


def summed_axes(specs: Iterable[LayoutSpec], mesh: Mesh) -> tuple[str, ...]:
    """Return the axes over whose ranks losses and gradients are summed.

    These are the axes that split the batch by rows or along its sequence, the program by depth, or leaves in
    any layout. Along any other axis all ranks do the same.
    """
    named: set[str] = set()
    for spec in specs:
        for layout in (spec.compute, spec.storage, spec.gradient, spec.optimizer):
            named.update(layout.axes)
    return mesh.ordered({*mesh.data_axes, *COMPUTE_AXES, *named})


def averaged_axes(specs: Iterable[LayoutSpec], mesh: Mesh) -> tuple[str, ...]:
    """Return those of `summed_axes` whose ranks each have a part of the loss.

    The axis of a pipeline is not among them: one of its stages has all of the loss.
    """
    return tuple(axis for axis in summed_axes(specs, mesh) if axis != PIPELINE)


def check_specs(specs: Mapping[str, LayoutSpec], mesh: Mesh) -> None:
    """Check that all specs fit the mesh; one error lists all that do not.

    Raises:
        SpecError: a layout names an unknown axis or "pipeline", or is longer than the tensor; `compute` is
            not major in storage or does not divide; no collective joins the layouts of storage, gradient and
            optimizer; a leaf of a dtype that cannot train is to train; a unit has leaves of several stages.
    """
    check_mesh(mesh)
    if not specs:
        raise SpecError("the spec tree has no leaves.", fix="make it by match_specs or a preset.")
    wrong: list[str] = []
    fixes: dict[str, None] = {}
    for path, spec in specs.items():
        # The other checks read layouts whose axes and dims are known to exist.
        problems = _find_unfit_layouts(spec, mesh)
        if not problems:
            problems = [*_find_unfit_policy(spec), *_find_unjoined_layouts(spec)]
        for problem, fix in problems:
            wrong.append(f"params[{path!r}] {list(spec.shape or ())} with {problem}.")
            fixes[fix] = None

    if wrong:
        count = len({line.split("]")[0] for line in wrong})
        raise SpecError(
            f"{leaves(count)} cannot take {'its' if count == 1 else 'their'} spec on mesh {mesh}:",
            wrong,
            " ".join(fixes),
        )
    _check_units(specs, mesh)


def _check_units(specs: Mapping[str, LayoutSpec], mesh: Mesh) -> None:
    """Refuse units whose leaves belong to several stages, since one kernel may read all of a unit."""
    by_unit: dict[str, dict[int, str]] = {}  # for each unit and stage, a leaf as the error names it
    for path, spec in specs.items():
        stage = stage_of(spec, mesh)
        if stage is not None:
            by_unit.setdefault(spec.unit, {}).setdefault(stage, f"params[{path!r}] of chunk {spec.chunk}")
    wrong = {unit: by_stage for unit, by_stage in by_unit.items() if len(by_stage) > 1}
    if wrong:
        raise SpecError(
            f"{len(wrong)} of {len(by_unit)} units have leaves of several stages:",
            [f"unit {unit!r}: {', '.join(by_stage.values())}" for unit, by_stage in wrong.items()],
            'give a unit\'s leaves one chunk, rules=[("layers.3.*", LayoutSpec(chunk=1))], or some of them '
            "another unit: LayoutSpec(unit=...).",
        )


def _find_unfit_layouts(spec: LayoutSpec, mesh: Mesh) -> list[tuple[str, str]]:
    """Return what is wrong with a spec's layouts on a mesh, each with its fix."""
    for field in ("storage", "gradient", "optimizer", "compute"):
        layout = getattr(spec, field)
        problems: list[tuple[str, str]] = []
        for axis in layout.axes:
            if axis == PIPELINE:
                fix = (
                    f"leave {PIPELINE!r} out: chunk says which stage stores a leaf, chunk='all' that all do."
                )
                problems.append((f"{field}={layout!r}: {axis!r} splits the program, and no leaf", fix))
            elif axis not in mesh.names:
                what = f"{layout!r}: the mesh has no axis {axis!r} (it has: {', '.join(mesh.names)})"
                close = difflib.get_close_matches(axis, mesh.names, n=1)
                meant = f" ({close[0]!r}?)" if close else ""
                fix = f"name one of the mesh's axes{meant}, or make the mesh with an axis {axis!r}."
                problems.append((what, fix))

        # Every dim that the layout names must exist, too.
        named, dims = len(layout.parts), len(spec.shape)
        if named > dims:
            what = f"{field}={layout!r}: {named} dims named, the tensor has {dims}"
            problems.append((what, "name at most as many dims as the tensor has; a scalar takes P()."))
        if problems:
            return problems

    # Dims and axes exist: what remains is whether they fit each other, and the axes of `compute`.
    return [*_find_unfit_fused(spec, mesh), *_find_unfit_compute(spec, mesh)]


def _find_unfit_fused(spec: LayoutSpec, mesh: Mesh) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with `Fused` axes: `compute` must name them, and each matrix be split evenly."""
    for field in ("storage", "gradient", "optimizer", "compute"):
        layout = getattr(spec, field)
        for dim, size in enumerate(spec.shape):
            count, axes = layout.fused(dim), layout.of(dim)
            if count > 1 and spec.compute.fused(dim) != count:
                yield (
                    f"{field}={layout!r}, compute={spec.compute!r}",
                    f"name {layout.entries(dim)[0]!r} in compute, too, or {axes[0]!r} alone in {field}.",
                )
            elif count > 1 and size % (count * mesh.axis_size(axes[0])):
                ranks = mesh.axis_size(axes[0])
                yield (
                    f"{field}={layout!r}: dim {dim} is not {count} matrices for {ranks} ranks",
                    "pad each of the matrices to a multiple of the ranks, or compute=P().",
                )


def _find_unfit_compute(spec: LayoutSpec, mesh: Mesh) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with `compute`.

    A rank computes with what it stores and nothing else, so axes of `compute` are major and parts are even.
    """
    if not spec.compute.axes:
        return
    data = [a for a in spec.compute.axes if a in mesh.data_axes]
    if data and (len(data) > 1 or spec.compute.of(0) != (data[0],) or len(spec.shape) < 3):
        yield (
            f"compute={spec.compute!r}: {data[0]!r} is a data axis, whose ranks see other rows",
            "such an axis splits stacks of experts, along dim 0 alone: compute=P('expert'). For other leaves "
            "name an axis that is none, as 'tensor' in make_mesh(shard=4, tensor=2).",
        )
    elif data and spec.shape[0] % mesh.axis_size(data[0]):
        ranks = mesh.axis_size(data[0])
        yield (
            f"compute={spec.compute!r}: {ranks} ranks do not divide {spec.shape[0]} experts",
            f"as many ranks along {data[0]!r} as divide them.",
        )
        return

    # Axes that split sequences have no part of a leaf to compute with.
    if "context" in spec.compute.axes:
        yield (
            f"compute={spec.compute!r}: the context axis splits sequences, and no leaf",
            "name another axis, as 'tensor'; storage may name 'context'.",
        )

    # What a rank stores must contain what it computes with.
    for field in ("storage", "gradient", "optimizer"):
        layout = getattr(spec, field)
        dims = range(len(spec.shape))
        if any(layout.entries(d)[: len(spec.compute.of(d))] != spec.compute.entries(d) for d in dims):
            yield (
                f"compute={spec.compute!r}, {field}={layout!r}",
                "name compute's axes first, dim by dim: P(('tensor', 'shard')), compute=P('tensor').",
            )
        for dim, size in enumerate(spec.shape):
            ranks = mesh.axes_size(layout.of(dim))
            # A dim that `compute` alone splits may be padded, if no rank is left without numbers.
            may_pad = layout.of(dim) == spec.compute.of(dim) and every_rank_has_some(size, ranks)
            if spec.compute.of(dim) and size % ranks and not may_pad:
                yield (
                    f"compute={spec.compute!r}, {field}={layout!r}: {ranks} ranks do not divide dim {dim}",
                    "split another dim over the data axes, or pad the dim to a multiple.",
                )


def fits_fp8(shape: Sequence[int]) -> bool:
    """Return whether a leaf of this shape is a matrix whose products the hardware has in fp8."""
    return len(shape) == 2 and not any(size % 16 for size in shape)


def _find_unfit_policy(spec: LayoutSpec) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a spec's dtypes, tiers and aggregation, whatever the mesh is."""
    # Numbers travel in fp8 where products are computed in it, with scales of whole leaves.
    if spec.wire_dtype is not None:
        problems = {
            f"wire_dtype={spec.wire_dtype}": spec.wire_dtype != FP8,
            "fp8 of what does not train": not spec.trainable,
            "fp8 of what is no matrix of multiples of 16": not fits_fp8(spec.shape),
            f"fp8 and compute={spec.compute!r}": bool(spec.compute.axes),
            f"fp8 and memory={spec.memory!r}": spec.memory != "device",
        }
        fix = (
            "compute_dtype=torch.bfloat16 for the leaf; fp8 is for matrices that train, rest on the "
            "device and are whole while they compute."
        )
        for problem, is_wrong in problems.items():
            if is_wrong:
                yield problem, fix
    if not spec.trainable and spec.aggregation == "local" and spec.storage.axes:
        yield (
            f"aggregation='local' and storage={spec.storage!r}",
            "each rank keeps a whole leaf of its own: storage=P(), or another aggregation.",
        )
    if not spec.trainable:
        return

    # A leaf that trains is in floats everywhere, and is neither computed nor reduced in floats of eight bits.
    if not spec.compute_dtype.is_floating_point and not spec.compute_dtype.is_complex:
        yield f"trainable=True and {spec.compute_dtype}", "only floats train: trainable=False."
    for name in ("compute_dtype", "reduce_dtype"):
        dtype = getattr(spec, name)
        if dtype.is_floating_point and dtype.itemsize == 1:
            yield (
                f"trainable=True and {name}={dtype}",
                "torch does not compute in float8 as it is: compute in torch.bfloat16, and quantise in "
                "`fn` by a torch.library.custom_op.",
            )
    for name in ("reduce_dtype", "optimizer_dtype", "storage_dtype"):
        dtype = getattr(spec, name)
        if spec.compute_dtype.is_floating_point and not dtype.is_floating_point:
            yield (
                f"trainable=True and {name}={dtype}",
                f"a trainable leaf is reduced, updated and kept in floats: {name}=torch.float32 or None.",
            )


def _find_unjoined_layouts(spec: LayoutSpec) -> Iterator[tuple[str, str]]:
    """Yield pairs of layouts between which no collective leads."""
    # Axes of `compute` are in all layouts alike, so that nothing has to be joined over them.
    split = set(spec.compute.axes)
    if spec.optimizer != spec.gradient and set(spec.gradient.axes) - split:
        yield (
            f"gradient={spec.gradient!r}, optimizer={spec.optimizer!r}",
            "the optimizer takes the gradient as it lies, or slices a whole one: "
            "optimizer=gradient, or gradient=P().",
        )
    if spec.storage != spec.optimizer and set(spec.storage.axes) - split:
        yield (
            f"storage={spec.storage!r}, optimizer={spec.optimizer!r}",
            "storage takes the updated shard as it lies, or gathers it whole: "
            "storage=optimizer, or storage=P().",
        )
