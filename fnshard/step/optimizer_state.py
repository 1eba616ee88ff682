"""Optimizer state: make an optimizer's state for this rank's blocks, and check state that a caller passes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fnshard.compiler.ir.values import MASTER
from fnshard.compiler.update.slot_shapes import Slots, slots_of_leaf
from fnshard.errors import StateError, leaves
from fnshard.layout.spec import LayoutSpec, is_here
from fnshard.mesh import Mesh
from fnshard.optim.optimizer import Optimizer
from fnshard.runtime.executor.update import cut, place_block
from fnshard.runtime.packing import local_block
from fnshard.runtime.tiers import to_tier


@torch.no_grad()
def init_slots(
    optimizer: Optimizer,
    params: Mapping[str, Tensor],
    specs: Mapping[str, LayoutSpec],
    mesh: Mesh,
    rank: int,
    disk_dir: str | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Make the optimizer's state of this rank's blocks, in its tier, with the specs' master copies.

    At most one leaf's state at a time is outside its tier.

    Args:
        params: the stored blocks of all leaves. Leaves that do not train, or that another stage has, get no
            state.
    """
    trained = {path: spec for path, spec in specs.items() if spec.trainable}
    optimizer.check({path: tuple(spec.shape) for path, spec in trained.items()})
    out = {}
    for path, spec in trained.items():
        if not is_here(spec, mesh, rank):
            continue
        block = optimizer_block(params[path], spec, mesh, rank).to(spec.optimizer_dtype)
        slots = init_block(optimizer, path, block, spec, mesh, rank)
        if spec.has_master:
            # The block may be the stored one itself; the other tiers make a copy of it in any case.
            slots[MASTER] = block.clone() if spec.optimizer_memory == "device" else block
        out[path] = {k: to_tier(v, spec.optimizer_memory, mesh.device, disk_dir) for k, v in slots.items()}
    return out


def init_block(
    optimizer: Optimizer, path: str, block: Tensor, spec: LayoutSpec, mesh: Mesh, rank: int
) -> dict[str, Tensor]:
    """Make the state of a rank's block of a leaf."""
    rule, shape = optimizer.of(path, spec.shape), tuple(spec.shape)
    out, wholes = {}, None
    for name, slot in slots_of_leaf(rule, path, shape, block.dtype).items():
        if slot.copied:
            out[name] = block.to(slot.dtype, copy=True)
        elif slot.fill is not None:
            sizes = slot.block(spec, mesh)
            out[name] = torch.full(sizes, slot.fill, dtype=slot.dtype, device=block.device)
        else:
            # The slot is neither a constant nor a copy, but an identity or a ramp, say. It is made for the
            # whole leaf, whose numbers it does not read, and cut.
            wholes = wholes or rule.init(path, torch.zeros((), dtype=block.dtype).expand(shape))
            out[name] = local_block(wholes[name], slot.layout(spec, mesh), mesh, rank).to(block.device)
    return out


def optimizer_block(stored: Tensor, spec: LayoutSpec, mesh: Mesh, rank: int) -> Tensor:
    """Return the optimizer's padded block of a stored leaf, which may be the stored block itself."""
    if spec.storage == spec.optimizer:
        return stored
    where = place_block(spec, mesh, rank, {})
    block = torch.zeros(where.block, dtype=stored.dtype, device=stored.device)
    cut(block, where.valid).copy_(stored[where.stored])
    return block


def check_slots(
    state: Mapping[str, Mapping[str, Tensor]],
    expected: Slots,
    specs: Mapping[str, LayoutSpec],
    mesh: Mesh,
) -> None:
    """Refuse optimizer state that this optimizer and these specs would not have made.

    Raises:
        StateError: slots are missing, or of other shapes, dtypes or devices; it names them all.
    """
    # Leaves with state that should have none, then leaves with other slots, then slots of other forms.
    wrong = [f"{p!r}: has state and none is wanted" for p in state if p not in expected]
    for path, slots in expected.items():
        given_slots = state.get(path, {})
        if given_slots.keys() != slots.keys():
            has, wants = (", ".join(sorted(s)) or "none" for s in (given_slots, slots))
            wrong.append(f"{path!r}: has slots {has}; wanted are {wants}")
            continue
        where = mesh.device_type if specs[path].optimizer_memory == "device" else "cpu"
        for name, (shape, dtype) in slots.items():
            value = given_slots[name]
            if value.shape != shape or value.dtype != dtype or value.device.type != where:
                given = f"{list(value.shape)} {value.dtype} on {value.device.type}"
                wrong.append(f"{path!r}: {name} is {given}; wanted is {list(shape)} {dtype} on {where}")

    if wrong:
        raise StateError(
            f"the optimizer state was made by another optimizer or other specs, {leaves(len(wrong))}:",
            wrong[:12],
            "use the step that made the state, or begin anew from its parameters: "
            "step.init(fs.unshard(state.params, specs_they_have, mesh)). A master copy is kept where "
            "optimizer_dtype is not storage_dtype, or where the host updates what the device stores.",
        )
