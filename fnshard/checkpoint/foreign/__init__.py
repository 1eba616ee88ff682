"""Foreign: read training states that other libraries have saved, and write states that they can load.

`dialects` says where a saved tree has parameters and optimizer state. `dcp`, `deepspeed` and `torch_files`
find tensors in files without reading them. `placing` matches these with leaves, and each rank reads its own
blocks. `dcp_writing` writes DCP folders, and `formats` converts files in one process. Nothing in a file is
ever run (`runtime.files.torchfile`). None of these formats has checksums: a missing or truncated file is
found, a flipped bit of a value is not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

from fnshard.checkpoint.foreign.dcp import read_dcp
from fnshard.checkpoint.foreign.dcp_writing import save_dcp
from fnshard.checkpoint.foreign.deepspeed import read_deepspeed
from fnshard.checkpoint.foreign.placing import LoadOptions, load_state
from fnshard.checkpoint.foreign.torch_files import read_torch_files
from fnshard.mesh import Mesh
from fnshard.step.state import TrainState

__all__ = ["load_dcp", "load_deepspeed", "load_torch", "save_dcp"]


def load_dcp(
    path: str | Path, step_or_specs: Any, mesh: Mesh | None = None, **options: Unpack[LoadOptions]
) -> TrainState:
    """Load a checkpoint of `torch.distributed.checkpoint` as a state, on any mesh. A collective.

    FSDP2, torchtitan, Lightning and Accelerate save such folders. Each rank reads what overlaps its blocks.
    AdamW's state and SGD's momentum are found by the parameter's name, or by its number if one group has all
    parameters in the module's order. Rates and decays are those of the step here. A master copy is filled
    from the parameter.

    Args:
        path: the folder with `.metadata`, or with Accelerate's two folders.
        step_or_specs: a step with an optimizer; or a spec tree, with the mesh: optimizer state is then what
            the checkpoint has.
        model: the module that the leaves belong to, as for `fs.hf.load`. It says which names are tied, and
            has or makes the buffers that are not saved.
        names: a dict or a function from paths to names there, or `fs.hf.Transposed(name)`; by default a leaf
            is called by its path.
        missing: full values, by path, of leaves that the checkpoint lacks.
        ignore: globs of parameters there that no leaf takes.
        disk_dir: the directory for leaves that specs keep on disk (a step knows its directory).
        timeout: the seconds after which a silent peer is an error.

    Raises:
        StateError: there are leaves without a tensor, tensors without a leaf, or shapes that do not fit; the
            error has all of them, with the nearest names.
        CheckpointError: there is no such checkpoint, a file is missing or truncated, reading it would make
            objects of unknown classes, or the step's optimizer keeps what the checkpoint lacks.

    >>> import tempfile, torch, fnshard as fs
    >>> import torch.distributed.checkpoint as dcp
    >>> folder = tempfile.mkdtemp()
    >>> _ = dcp.save({"model": {"w": torch.arange(3.0)}}, checkpoint_id=folder, no_dist=True)
    >>> mesh = fs.make_mesh(shard=1)
    >>> specs = fs.presets.full_shard({"w": torch.zeros(3)}, mesh)
    >>> fs.checkpoint.load_dcp(folder, specs, mesh).params
    {'w': tensor([0., 1., 2.])}
    """
    return load_state(read_dcp, "load_dcp", path, step_or_specs, mesh, options)


def load_deepspeed(
    path: str | Path, step_or_specs: Any, mesh: Mesh | None = None, **options: Unpack[LoadOptions]
) -> TrainState:
    """Load a checkpoint of DeepSpeed's ZeRO 1, 2 or 3 as a state, on any mesh. A collective.

    Parameters are the fp32 copies that ZeRO trains. Each rank reads its own rows of the ranks' vectors. The
    file that zero_to_fp32.py makes is a state dict, for `load_torch`.

    Args:
        path: a folder with `*_optim_states.pt`, or a run's folder, whose newest checkpoint is taken.
        step_or_specs, mesh, model, names, missing, ignore, disk_dir, timeout: the arguments of `load_dcp`.

    Raises:
        StateError, CheckpointError: the errors of `load_dcp`; or the model was split over tensor or pipeline
            ranks as well.
    """
    return load_state(read_deepspeed, "load_deepspeed", path, step_or_specs, mesh, options)


def load_torch(
    path: str | Path, step_or_specs: Any, mesh: Mesh | None = None, **options: Unpack[LoadOptions]
) -> TrainState:
    """Load what `torch.save` wrote, a state dict or a training state, as a state. A collective.

    Each rank reads its own rows. A training state is `{"model": ..., "optimizer": ...}`, with the two under
    any of the names that Lightning and others use.

    Args:
        path: a .pt, .pth, .bin or .ckpt file; or a folder with pytorch_model.bin, or its index.
        step_or_specs, mesh, model, names, missing, ignore, disk_dir, timeout: the arguments of `load_dcp`.

    Raises:
        StateError, CheckpointError: the errors of `load_dcp`.

    >>> import tempfile, torch, fnshard as fs
    >>> file = tempfile.mkdtemp() + "/model.pt"
    >>> torch.save({"w": torch.arange(3.0)}, file)
    >>> mesh = fs.make_mesh(shard=1)
    >>> specs = fs.presets.full_shard({"w": torch.zeros(3)}, mesh)
    >>> fs.checkpoint.load_torch(file, specs, mesh).params
    {'w': tensor([0., 1., 2.])}
    """
    return load_state(read_torch_files, "load_torch", path, step_or_specs, mesh, options)
