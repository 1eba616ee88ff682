"""DeepSpeed: read folders of ZeRO 1, 2 and 3, by the rules of its own zero_to_fp32.py.

Every rank has written its part of one long vector for each group, in which the parameters that train follow
one another, in fp32; stage 3 splits each parameter by itself. Moments have the same layout.
`*_model_states.pt` has the names and shapes of parameters, in this order, and those that do not train.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fnshard.checkpoint.foreign.boxes import Piece, Pieces, boxes_of_run, check_pieces
from fnshard.checkpoint.foreign.dialects import SLOTS, SavedState
from fnshard.checkpoint.foreign.torch_files import read_object
from fnshard.hf.reading import FileTensor
from fnshard.runtime.files.tensorfile import Corrupt
from fnshard.runtime.files.torchfile import Inert, PlacedTensor

LATEST = "latest"  # a file beside the folders of a run, which names the newest
OPTIMIZER, MODEL = "*_optim_states.pt", "*_model_states.pt"
UNIVERSAL = "zero"  # a folder that ds_to_universal.py makes
# The names of a rank's parts of the vectors in its file, by stage.
VECTORS = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}
STAGES = {"optimizer_states": 1, "gradients": 2, "weights": 3}  # as its enum of stages names them
_RANK = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(?:optim|model)_states\.pt")

Run = tuple[PlacedTensor, int, int]  # a vector, the first of its elements, and how many follow


def find_deepspeed(path: Path) -> Path | None:
    """Return the folder with a checkpoint's parts: itself, or the newest in a run's folder; or None."""
    if any(path.glob(OPTIMIZER)):
        return path
    try:
        newest = path / (path / LATEST).read_text().strip()
    except (OSError, ValueError):
        return None
    return newest if newest.parent == path and any(newest.glob(OPTIMIZER)) else None


def read_deepspeed(path: Path) -> SavedState:
    """Return what a ZeRO checkpoint holds: parameters in fp32, and moments; values are read when asked for.

    Raises:
        Corrupt: no such checkpoint; the part of a rank is missing; vectors of other sizes than the parameters
            need; a model that is split over a tensor or pipeline axis as well.
        Refused: a file names what may not run.
    """
    folder = find_deepspeed(path)
    if folder is None and (path / UNIVERSAL).is_dir():
        raise Corrupt("is a universal checkpoint of DeepSpeed", "name the ZeRO folder that it was made of.")
    if folder is None:
        what = f"has no {OPTIMIZER}, and no file {LATEST!r} that names a folder which has"
        raise Corrupt(what, "name the folder that DeepSpeed's save_checkpoint wrote.")
    stage, parts, count = _read_optimizer_parts(folder)
    models = _read_model_files(folder, stage, count)

    # Cut the ranks' vectors into parameters by the shapes in the model's file.
    shapes = models[0]["param_shapes"]
    groups = [dict(group) for group in (shapes if isinstance(shapes, list) else [shapes])]
    params = cut_vectors(groups, [list(part[VECTORS[stage]]) for part in parts], stage)

    # The number of updates, by whatever field has it, and the moments, which the same shapes cut.
    slots: dict[str, dict[str, FileTensor]] = {}
    states = [_read_states(part) for part in parts]
    counts = [state["step"] for of_rank in states for state in of_rank if "step" in state]
    counts += [part["base_optimizer_state_step"] for part in parts if "base_optimizer_state_step" in part]
    steps = {int(count[...] if isinstance(count, PlacedTensor) else count) for count in counts}
    for slot in states[0][0] if states[0] else ():
        if isinstance(states[0][0][slot], PlacedTensor) and states[0][0][slot].shape:
            moments = cut_vectors(groups, [[state[slot] for state in of_rank] for of_rank in states], stage)
            for name, tensor in moments.items():
                slots.setdefault(name, {})[SLOTS.get(slot, slot)] = tensor
    if slots and len(steps) != 1:
        raise Corrupt(f"has moments after {sorted(steps) or 'nobody knows how many'} steps")
    params |= _read_frozen(models, stage)

    # Buffers are in the module's own state dict. Tied weights are saved under one of their names.
    values = models[0].get("module") or {}
    buffers = {name: values.get(name) for name in models[0].get("buffer_names") or []}
    params |= {
        name: FileTensor(value.path.name, value, value.dtype, value.shape)
        for name, value in buffers.items() if isinstance(value, PlacedTensor)
    }  # fmt: skip
    for other, owner in dict(models[0].get("shared_params") or {}).items():
        if owner in params:
            params[other] = params[owner]
    return SavedState(f"DeepSpeed ZeRO {stage}", params, slots, steps.pop() if steps else 0)


def _read_optimizer_parts(folder: Path) -> tuple[int, list[Mapping[str, Any]], int]:
    """Return the stage of ZeRO, the ranks' parts of the optimizer in their order, and the number of ranks."""
    # Files by rank, all of which must be there.
    files = sorted(folder.glob(OPTIMIZER))
    ranks = {int(m[1]): file for file in files if (m := _RANK.fullmatch(file.name)) and int(m[2]) == 0}
    if len(ranks) != len(files):
        odd = [file.name for file in files if file not in ranks.values()]
        what = f"is split over a tensor or pipeline axis as well, which is not read here: {odd[0]}"
        raise Corrupt(what, "gather its parameters where it was trained, and save them by torch.save.")
    parts = [read_object(ranks[rank])["optimizer_state_dict"] for rank in sorted(ranks)]
    counts = parts[0].get("partition_count", len(parts))
    count = max(counts) if isinstance(counts, list) else counts
    if missing := sorted({*range(count)} - ranks.keys()):
        raise Corrupt(f"was saved by {count} ranks; missing are the files of {', '.join(map(str, missing))}")

    stage = parts[0].get("zero_stage")
    if isinstance(stage, Inert) and stage.args:  # a `ZeroStageEnum`, pickled by its value or by its name
        stage = STAGES.get(stage.args[0], stage.args[0])
    if stage not in VECTORS:
        what = f"is of ZeRO stage {stage!r}; 1, 2 and 3 are read here"
        raise Corrupt(what, "load its mp_rank_00_model_states.pt by load_torch.")
    return stage, parts, count


def _read_model_files(folder: Path, stage: int, count: int) -> list[Mapping[str, Any]]:
    """Read the model's files: in stage 3 one for each of `count` ranks, otherwise one."""
    files = sorted(folder.glob(MODEL))
    if stage == 3:
        by_rank = {int(m[1]): file for file in files if (m := _RANK.fullmatch(file.name))}
        files = [by_rank[rank] for rank in sorted(by_rank)]
    if not files or (stage == 3 and len(files) != count):
        raise Corrupt(f"has {len(files)} files {MODEL}, and {count if stage == 3 else 1} were written")
    return [read_object(file) for file in files]


def _read_states(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a rank's optimizer state by group."""
    saved = part.get("base_optimizer_state", part.get("optimizer_state_dict", {}))
    if not isinstance(saved, Mapping):
        return list(saved)
    states = [state for _, state in sorted(saved.get("state", {}).items())]

    # FusedAdam once kept its step in `param_groups`.
    steps = [group["step"] for group in saved.get("param_groups", []) if "step" in group]
    if not steps:
        return states
    return [{**state, "step": step} for state, step in zip(states, steps, strict=True)]


def cut_vectors(
    groups: Sequence[Mapping[str, Sequence[int]]], vectors: Sequence[Sequence[PlacedTensor]], stage: int
) -> dict[str, FileTensor]:
    """Cut the ranks' vectors into tensors.

    Args:
        groups: `{name: shape}` of each group of parameters, in their order.
        vectors: by rank, one for each group, or in stage 3 for each part of one.
    """
    cuts: list[tuple[str, Sequence[int], Iterator[Run]]] = []
    if stage < 3:
        if any(len(of_rank) != len(groups) for of_rank in vectors):
            raise Corrupt(f"has {len(vectors[0])} vectors of {len(groups)} groups of parameters")
        for group, *group_vectors in zip(groups, *vectors, strict=True):
            # Stages 1 and 2: the ranks' parts of a group make up one vector, in which parameters follow one
            # another.
            start = 0
            for name, shape in group.items():
                cuts.append((name, shape, find_run(group_vectors, start, math.prod(shape))))
                start += math.prod(shape)
            # The end may be padded to a multiple of `unit`.
            held, unit = sum(vector.shape[0] for vector in group_vectors), 2 * len(vectors)
            if -(-held // unit) != -(-start // unit):
                raise Corrupt(f"has vectors of {held} numbers, and parameters of {start}")

    else:
        # Stage 3: each rank has an equal part of each parameter, the last ones padded with zeros.
        start = 0
        for name, shape in itertools.chain(*(group.items() for group in groups)):
            numbers = math.prod(shape)
            size = -(-numbers // len(vectors))
            lengths = [max(0, min(size, numbers - rank * size)) for rank in range(len(vectors))]
            runs = [find_run(of_rank, start, n) for of_rank, n in zip(vectors, lengths, strict=True)]
            cuts.append((name, shape, itertools.chain(*runs)))
            start += size
        if odd := {sum(v.shape[0] for v in of_rank) for of_rank in vectors} - {start}:
            raise Corrupt(f"has vectors of {odd.pop()} numbers on a rank, and parameters of {start}")
    return {name: tensor_of_runs(name, shape, list(runs)) for name, shape, runs in cuts}


def find_run(vectors: Sequence[PlacedTensor], start: int, length: int) -> Iterator[Run]:
    """Yield the runs in which elements of concatenated vectors lie, at most one of each vector."""
    low = 0
    for vector in vectors:
        numbers = math.prod(vector.shape)
        first, last = max(start, low), min(start + length, low + numbers)
        if first < last:
            yield vector, first - low, last - first
        low += numbers


def tensor_of_runs(name: str, shape: Sequence[int], runs: Sequence[Run]) -> FileTensor:
    """Return a tensor whose elements, in the order of memory, are those of these runs one after another."""
    shape, pieces, at = tuple(shape), [], 0
    for vector, first, length in runs:
        for offset, size in boxes_of_run(shape, at, at + length):
            pieces.append(Piece(offset, size, lambda v=vector, f=first, s=size: v.part(f, s)))
            first += math.prod(size)
        at += length
    check_pieces(name, shape, pieces)
    if not runs:
        what = f"has no values of {name!r} {list(shape)}; parameters without elements are not read"
        raise Corrupt(what, "leave it out of the model.")
    vector = runs[0][0]
    return FileTensor(vector.path.name, Pieces(vector.dtype, shape, pieces), vector.dtype, shape)


def _read_frozen(models: Sequence[Mapping[str, Any]], stage: int) -> dict[str, FileTensor]:
    """Return the parameters that do not train. In stage 3 each rank has a part of them, otherwise all."""
    fragments = [model.get("frozen_param_fragments") or {} for model in models]
    out = {}
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        parts = [of_rank[name] for of_rank in fragments if isinstance(of_rank.get(name), PlacedTensor)]
        parts = parts if stage == 3 else parts[:1]
        out[name] = tensor_of_runs(name, shape, list(find_run(parts, 0, math.prod(shape))))
    return out
