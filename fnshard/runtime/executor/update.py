"""Update: one bucket's reduced gradients -> the optimizer, in place on stored shards and slots."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fnshard.compiler.ir.values import CONTROL, CONTROL_ON_HOST, MASTER
from fnshard.compiler.schedule.buckets import Bucket
from fnshard.compiler.schedule.instructions import OwnerWork, SumShapes
from fnshard.errors import OptimizerError
from fnshard.layout.partition import block_shape, block_slices, boxes, slot_layout
from fnshard.layout.spec import LayoutSpec
from fnshard.mesh import Mesh
from fnshard.optim.contract import Changed, Optimizer, Slots, StepInfo, Tensors
from fnshard.runtime.executor.control import StepControl
from fnshard.runtime.executor.fused_update import FusedUpdates
from fnshard.runtime.packing import Parts, padded
from fnshard.runtime.tiers import rest

# gradients, slots, parameters, and the step's control
UpdateOf = Callable[[Tensors, Slots, Tensors, StepControl], None]
BeginOf = Callable[[Tensors, Slots, Tensors, StepControl], Parts]


@dataclass(frozen=True)
class Place:
    """How one leaf's optimizer block lies in its stored and its gradient block; padding cut off.

    `stored`, `gradient`: slices of the local tensors, or None for the whole. `valid`: extent of the
    part of the optimizer block that is not padding, or None where nothing is padded; `slots`: likewise of the
    slots that are not of the leaf's shape.
    """

    stored: tuple[slice, ...] | None
    gradient: tuple[slice, ...] | None
    valid: tuple[slice, ...] | None
    slots: Mapping[str, tuple[slice, ...]] = field(default_factory=dict)


def place(
    spec: LayoutSpec, mesh: Mesh, rank: int, slots: Mapping[str, tuple[int, ...]] | None = None
) -> Place:
    """Where a rank's optimizer block lies in what it stores and reduces.

    Args:
        slots: shapes of whole slots that are not of the leaf's shape.
    """
    here = mesh.coordinate(rank)
    extents = {}
    for name, shape in (slots or {}).items():
        layout = slot_layout(shape, spec.shape, spec.optimizer, mesh)
        extents[name] = _extent(block_slices(shape, layout.contiguous, mesh, here))
    spec = spec.local(mesh)
    mine = block_slices(spec.shape, spec.optimizer, mesh, here)
    block, extent = block_shape(spec.shape, spec.optimizer, mesh), _extent(mine)
    whole = all(s.stop == b for s, b in zip(extent, block, strict=True))
    sliced = None if whole else extent
    return Place(
        stored=sliced if spec.storage == spec.optimizer else mine,
        gradient=sliced if spec.gradient == spec.optimizer else mine,
        valid=sliced,
        slots=extents,
    )


def _extent(mine: Sequence[slice]) -> tuple[slice, ...]:
    """The part of a rank's block that is not padding, of where that lies in the whole."""
    return tuple(slice(0, s.stop - s.start) for s in mine)


@dataclass
class Updater:
    """Runs the optimizer of one step on whatever buckets the schedule says, in its order.

    `fused`: where updates are compiled; those on the host never are.
    """

    optimizer: Optimizer
    specs: Mapping[str, LayoutSpec]
    mesh: Mesh
    rank: int
    fused: FusedUpdates | None = None
    places: dict[str, Place] = field(default_factory=dict)

    def bind(self, paths: tuple[str, ...]) -> UpdateOf:
        """A function that updates leaves of one bucket from their reduced blocks, where these lie."""
        self._locate(paths)
        compiled = self.fused is not None and self.specs[paths[0]].updated_on == "device"
        fused = tuple(p for p in paths if compiled and self._rule(p).compilable)
        plain = tuple(p for p in paths if p not in fused)
        parts = ((self._bind_fused, fused), (self._bind_plain, plain))
        updates = [bind(some) for bind, some in parts if some]

        def update(*args: Any) -> None:
            for each in updates:
                each(*args)

        return update

    def _bind_plain(self, paths: tuple[str, ...]) -> UpdateOf:
        """The same, not compiled."""
        shapes = {p: tuple(self.specs[p].shape) for p in paths}
        if all(self._plain(p) for p in paths):

            def update_plain(blocks: Tensors, slots: Slots, params: Tensors, control: StepControl) -> None:
                if not control.skip:
                    info = control.info.of_shapes(shapes)
                    self.optimizer.apply({p: blocks[p] for p in paths}, slots, params, info)

            return update_plain

        def update(blocks: Tensors, slots: Slots, params: Tensors, control: StepControl) -> None:
            if control.skip:
                return
            grads = {p: _cut(blocks[p], self.places[p].gradient) for p in paths}
            own_slots, targets = self._state(paths, slots, params)
            self.optimizer.apply(grads, own_slots, targets, control.info.of_shapes(shapes))
            self._store(paths, slots, params, targets)

        return update

    def bind_begin(self, paths: tuple[str, ...]) -> BeginOf:
        """A function that runs an update up to what is sent to the owners of leaves: padded blocks, and slots
        as they are."""
        self._locate(paths)
        specs = {p: self.specs[p] for p in paths}
        shapes = {p: block_shape(s.shape, s.optimizer, self.mesh) for p, s in specs.items()}

        def begin(blocks: Tensors, slots: Slots, params: Tensors, control: StepControl) -> Parts:
            own_slots, targets = self._state(paths, slots, params)
            out = {}
            for path in paths:
                rule, info = self._rule(path), control.info
                grad, own = _cut(blocks[path], self.places[path].gradient), own_slots[path]
                given = rule.given(path, info)
                sent, new = rule.begin_leaf(path, grad, own, targets[path], given, info.grad_scale)
                state = {name: slots[path][name] for name in rule.whole_slots if name in slots[path]}
                out[path] = {"": padded(sent, shapes[path]), **state}
                if not control.skip:
                    _write(own, new)
            return out

        return begin

    def bind_end(self, paths: tuple[str, ...]) -> UpdateOf:
        """A function that updates leaves, and slots, from what their owners have made: padded blocks."""

        def end(
            path: str, parts: Mapping[str, Tensor], own: Tensors, target: Tensor, info: StepInfo
        ) -> Changed:
            rule, made = self._rule(path), {n: self._slot(path, n, value) for n, value in parts.items()}
            update = made.pop("").to(target.device)
            change, new = rule.end_leaf(path, update, own, target, rule.given(path, info))
            return change, new | made

        return self._bind_by_leaf(paths, end)

    def turn(self, path: str, work: OwnerWork, control: StepControl) -> str:
        """Which of a leaf's graphs its owner runs in this step."""
        rule = self._rule(path)
        return rule.turn_of(rule.given(path, control.info))

    def bind_sums(self, paths: tuple[str, ...], number: int = 0) -> Callable[..., Iterator[Any]]:
        """A function that makes one round of sums over this rank's blocks of leaves: (path, sums by name)."""
        self._locate(paths)
        shapes = {p: tuple(self.specs[p].shape) for p in paths}

        def sums(
            blocks: Tensors, slots: Slots, params: Tensors, control: StepControl, earlier: Slots
        ) -> Iterator[tuple[str, dict[str, Tensor]]]:
            own_slots, targets = self._state(paths, slots, params)
            info = replace(control.info, shapes=shapes)
            for path in paths:
                rule, grad = self._rule(path), _cut(blocks[path], self.places[path].gradient)
                own, given = {**own_slots[path], **earlier.get(path, {})}, rule.given(path, info)
                yield path, rule.sum_leaf(number, path, grad, own, targets[path], given, info.grad_scale)

        return sums

    def pack_sums(self, parts: Iterable[Any], shapes: SumShapes, dtype: torch.dtype) -> Tensor:
        """This rank's parts of whole sums, flat, zero elsewhere."""
        size = sum(math.prod(s) for own in shapes.values() for s in own.values())
        flat = torch.zeros(size, dtype=dtype, device=self.mesh.device)
        views = _views(flat, shapes)
        for path, made in parts:
            for name, part in made.items():
                for full, mine in self._boxes(path, shapes[path][name]):
                    views[path][name][full] = part[mine]
        return flat

    def unpack_sums(self, flat: Tensor, shapes: SumShapes) -> dict[str, dict[str, Tensor]]:
        """What this rank's block of each leaf needs of whole sums, by path and name."""
        out: dict[str, dict[str, Tensor]] = {}
        for path, own in _views(flat, shapes).items():
            out[path] = {}
            for name, full in own.items():
                layout = slot_layout(
                    full.shape, self.specs[path].shape, self.specs[path].optimizer, self.mesh
                )
                where = self._boxes(path, tuple(full.shape))
                part = full.new_empty(block_shape(full.shape, layout, self.mesh))
                for theirs, mine in where:
                    part[mine] = full[theirs]
                extent = tuple(slice(0, max(m[d].stop for _, m in where)) for d in range(full.dim()))
                out[path][name] = part[extent]
        return out

    def bind_summed(self, paths: tuple[str, ...]) -> Callable[..., None]:
        """As `bind`, of leaves over which all ranks have summed what their updates need: by path, last."""

        def update(
            path: str, block: Tensor, own: Tensors, target: Tensor, info: StepInfo, sums: Slots
        ) -> Changed:
            rule, grad = self._rule(path), _cut(block, self.places[path].gradient)
            totals, given = {n: v.to(target.device) for n, v in sums[path].items()}, rule.given(path, info)
            return rule.update_leaf(path, grad, own, target, given, info.grad_scale, totals)

        return self._bind_by_leaf(paths, update)

    def _bind_by_leaf(self, paths: tuple[str, ...], change_of: Callable[..., Changed]) -> Callable[..., None]:
        """A function that updates leaves one by one.

        Args:
            change_of: of a path, what came for it, its slots, parameter, StepInfo and what follows the
                step's control: the update and the slots that change.
        """
        self._locate(paths)
        shapes = {p: tuple(self.specs[p].shape) for p in paths}

        def update(
            blocks: Mapping[str, Any], slots: Slots, params: Tensors, control: StepControl, *more: Any
        ) -> None:
            if control.skip:
                return
            info = replace(control.info, shapes=shapes)
            own_slots, targets = self._state(paths, slots, params)
            for path in paths:
                change, new = change_of(path, blocks[path], own_slots[path], targets[path], info, *more)
                targets[path].add_(change)
                _write(own_slots[path], new)
            self._store(paths, slots, params, targets)

        return update

    def _boxes(self, path: str, shape: tuple[int, ...]) -> list[tuple[Any, Any]]:
        """Where this rank's part of a sum over a leaf lies in the whole sum, box by box."""
        spec = self.specs[path]
        layout = slot_layout(shape, spec.shape, spec.optimizer, self.mesh)
        return boxes(shape, layout, self.mesh, self.mesh.coordinate(self.rank))

    def _rule(self, path: str) -> Optimizer:
        return self.optimizer.of(path, len(self.specs[path].shape))

    def _locate(self, paths: Sequence[str]) -> None:
        shapes = slot_shapes(self.optimizer, {p: self.specs[p] for p in paths})
        for path in paths:
            self.places[path] = place(self.specs[path], self.mesh, self.rank, shapes.get(path))

    def _state(
        self, paths: Sequence[str], slots: Slots, params: Tensors
    ) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
        """Slots and what is updated (parameters or their masters), padding cut off."""
        own_slots, targets = {}, {}
        for path in paths:
            where = self.places[path]
            own_slots[path] = {k: self._slot(path, k, v) for k, v in slots[path].items()}
            master = own_slots[path].pop(MASTER, None)
            targets[path] = _cut(params[path], where.stored) if master is None else master
        return own_slots, targets

    def _slot(self, path: str, name: str, value: Tensor) -> Tensor:
        """Without its padding."""
        where = self.places[path]
        return _cut(value, where.slots.get(name, where.valid))

    def _store(self, paths: Sequence[str], slots: Slots, params: Tensors, targets: Tensors) -> None:
        """Masters to what is stored, where that is here."""
        for path in paths:
            if MASTER in slots[path] and path in params:
                _cut(params[path], self.places[path].stored).copy_(targets[path])

    def control(self, env: dict[str, Any], bucket: Bucket) -> tuple[StepControl, Any]:
        """What the bucket's update reads of the step, and the event after which it is there, if any.

        For an update on the host it is sent there, once before the scalars are known and once after.
        """
        control = env[CONTROL]
        if self.specs[bucket.paths[0]].updated_on != "host" or self.mesh.device_type == "cpu":
            return control, None
        sent = env.get(CONTROL_ON_HOST)
        if sent is None or sent[0] is not control:
            on_host, event = control.on_host(), torch.Event(self.mesh.device_type)
            event.record()
            sent = env[CONTROL_ON_HOST] = control, on_host, event
        return sent[1:]

    def _bind_fused(self, paths: tuple[str, ...]) -> UpdateOf:
        """The same, compiled. A bucket's leaves are of one dtype on the wire, and may differ in all else."""
        places, names = self.places, {}
        for path in paths:
            made = made_slots(self.optimizer, path, self.specs[path], self.mesh)
            names[path] = tuple(n for n in made if n != MASTER)
        empty = {
            p for p in paths
            if 0 in self.specs[p].shape or any(s.start == s.stop for s in places[p].valid or ())
        }  # fmt: skip
        parts: list[tuple[list[str], Callable[..., None]]] = []
        for copied in (False, True):
            mine = [p for p in paths if self.specs[p].has_master is copied and p not in empty]
            if mine:
                parts.append((mine, self.fused.bind({p: names[p] for p in mine}, copied)))

        def tensors(path: str, blocks: Tensors, slots: Slots, params: Tensors) -> list[Tensor]:
            where, own_slots = places[path], slots[path]
            own = [_cut(params[path], where.stored)]
            if MASTER in own_slots:
                own.insert(0, _cut(own_slots[MASTER], where.valid))
            return [
                _cut(blocks[path], where.gradient),
                *own,
                *(self._slot(path, n, own_slots[n]) for n in names[path]),
            ]

        def update(blocks: Tensors, slots: Slots, params: Tensors, control: StepControl) -> None:
            if control.skip:
                return
            for mine, run in parts:
                run({p: tensors(p, blocks, slots, params) for p in mine}, control.info)

        return update

    def stored_part(self, path: str, stored: Tensor) -> Tensor:
        """The part of a stored leaf that its optimizer block holds, padding cut off."""
        return _cut(stored, self.places[path].stored)

    def valid_part(self, path: str, block: Tensor) -> Tensor:
        """An optimizer block without its padding."""
        return _cut(block, self.places[path].valid)

    def _plain(self, path: str) -> bool:
        """Whether gradient, slots and stored block are the optimizer's as they are."""
        spec = self.specs[path]
        one_dtype = spec.storage_dtype == spec.optimizer_dtype == spec.reduce_dtype
        return one_dtype and not spec.has_master and self.places[path] == Place(None, None, None)


def _views(flat: Tensor, shapes: SumShapes) -> dict[str, dict[str, Tensor]]:
    sizes = [math.prod(s) for own in shapes.values() for s in own.values()]
    parts = iter(flat.split_with_sizes(sizes))
    return {p: {n: next(parts).view(s) for n, s in own.items()} for p, own in shapes.items()}


def _write(slots: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    for name, value in new.items():
        slots[name].copy_(value)


def _cut(tensor: Tensor, slices: tuple[slice, ...] | None) -> Tensor:
    return tensor if slices is None else tensor[slices]


def slot_shapes(
    optimizer: Optimizer, specs: Mapping[str, LayoutSpec]
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes of whole slots, by path, of those that are not of their leaves' shape."""
    out: dict[str, dict[str, tuple[int, ...]]] = {}
    known: dict[Any, dict[str, tuple[int, ...]]] = {}
    for path, spec in specs.items():
        key = spec.shape, spec.optimizer_dtype, optimizer.settings(path)
        if spec.trainable and key not in known:
            made = {n: shape for n, (shape, _) in made_slots(optimizer, path, spec).items()}
            known[key] = {n: shape for n, shape in made.items() if shape != spec.shape}
        if spec.trainable and known[key]:
            out[path] = known[key]
    return out


def made_slots(
    optimizer: Optimizer, path: str, spec: LayoutSpec, mesh: Mesh | None = None
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of the state of a leaf, or of a rank's block of it."""
    shape = spec.shape if mesh is None else block_shape(spec.shape, spec.optimizer, mesh)
    block = torch.empty(shape, dtype=spec.optimizer_dtype, device="meta")
    made = init_block(optimizer, path, block, spec, mesh) | ({MASTER: block} if spec.has_master else {})
    return {n: (tuple(v.shape), v.dtype) for n, v in made.items()}


def init_block(
    optimizer: Optimizer, path: str, block: Tensor, spec: LayoutSpec, mesh: Mesh | None
) -> dict[str, Tensor]:
    """The state of a block of a leaf; of what owners alone read, this rank's share. No mesh: of the leaf."""
    if mesh is None:
        return optimizer.init_leaf(path, block)
    wholes = {}
    for name, whole in optimizer.whole_shapes(path, spec.shape).items():
        layout = slot_layout(whole, spec.shape, spec.optimizer, mesh)
        if layout is None or mesh.ordered(layout.axes) != mesh.ordered(spec.optimizer.axes):
            raise OptimizerError(
                f"{optimizer}: {name} {list(whole)} is no state of matrices of params[{path!r}] "
                f"{list(spec.shape)}.", fix="as many dims as the leaf's, all but the last two equal to "
                "these, the last two above 1.",
            )  # fmt: skip
        wholes[name] = block_shape(whole, layout, mesh)
    return optimizer.init_leaf(path, block, wholes)


def init_slots(
    optimizer: Optimizer,
    params: Mapping[str, Tensor],
    specs: Mapping[str, LayoutSpec],
    mesh: Mesh,
    rank: int,
    disk_dir: str | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Optimizer state for this rank's blocks, where it rests, and master copies where there are any.

    `params`: stored blocks of all leaves; leaves that do not train get none. One leaf's state at a time is
    outside its tier.
    """
    trained = {p: s for p, s in specs.items() if s.trainable}
    optimizer.check({path: len(spec.shape) for path, spec in trained.items()})
    out = {}
    for path, spec in trained.items():
        block = optimizer_block(params[path], spec, mesh, rank).to(spec.optimizer_dtype)
        slots = init_block(optimizer, path, block, spec, mesh)
        if spec.has_master:
            slots[MASTER] = block.clone() if spec.optimizer_memory == "device" else block
        out[path] = {k: rest(v, spec.optimizer_memory, mesh.device, disk_dir) for k, v in slots.items()}
    return out


def optimizer_block(stored: Tensor, spec: LayoutSpec, mesh: Mesh, rank: int) -> Tensor:
    """The optimizer's padded block of a stored leaf."""
    if spec.storage == spec.optimizer:
        return stored
    where = place(spec, mesh, rank)
    block = torch.zeros(
        block_shape(spec.shape, spec.optimizer, mesh), dtype=stored.dtype, device=stored.device
    )
    _cut(block, where.valid).copy_(stored[where.stored])
    return block
