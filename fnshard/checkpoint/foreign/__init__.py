"""Foreign: training states that others have saved, as states here; and states here as others load them.

`dialects` says where a saved tree has parameters and optimizer state. `dcp`, `deepspeed` and `torch_files`
find tensors in files without reading them. `placing` matches these with leaves, and each rank reads its own
blocks. `dcp_writing` is the way back. Nothing in a file is ever run (`runtime.files.torchfile`).
None of these formats has checksums: a missing or truncated file is found, a flipped bit of a value is not.
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
    """Return a checkpoint of `torch.distributed.checkpoint` as a state here, on any mesh. A collective.

    FSDP2, torchtitan, Lightning and Accelerate save such folders. Each rank reads what overlaps its blocks.
    AdamW's state and SGD's momentum are found by the parameter's name, or by its number where one group has
    all parameters in the module's order. Rates and decays are those of the step here. A master copy is filled
    from the parameter.

    Args:
        path: of the folder with `.metadata`, or with Accelerate's two folders.
        step_or_specs: a step with an optimizer; or a spec tree, with the mesh: then optimizer state is what
            the checkpoint has.
        model: the module that the leaves are of, as for `fs.hf.load`: it says which names are tied, and has
            or makes the buffers that are not saved.
        names: a dict or a function from paths to names there, or `fs.hf.Transposed(name)`; default the path.
        missing: full values, by path, of leaves that are not there.
        ignore: globs of parameters that no leaf takes.
        disk_dir: for specs of leaves that rest on disk (a step knows its own).
        timeout: seconds after which a silent peer is an error.

    Raises:
        StateError: leaves without a tensor, tensors without a leaf, and such as do not fit; all of them, with
            the nearest names.
        CheckpointError: no such checkpoint, a missing or truncated file, objects that would have to be made
            to read it; a step's optimizer keeps what is not there.

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
    """Return a checkpoint of DeepSpeed's ZeRO 1, 2 or 3 as a state here, on any mesh. A collective.

    Parameters are the fp32 copies that ZeRO trains. Each rank reads its own rows of the ranks' vectors. The
    file that zero_to_fp32.py makes is a state dict, for `load_torch`.

    Args:
        path: of a folder with `*_optim_states.pt`, or of a run's folder, whose newest is taken.
        step_or_specs, mesh, model, names, missing, ignore, disk_dir, timeout: as for `load_dcp`.

    Raises:
        StateError, CheckpointError: as for `load_dcp`; or a model that was split over tensor or pipeline
            ranks as well.
    """
    return load_state(read_deepspeed, "load_deepspeed", path, step_or_specs, mesh, options)


def load_torch(
    path: str | Path, step_or_specs: Any, mesh: Mesh | None = None, **options: Unpack[LoadOptions]
) -> TrainState:
    """Return what `torch.save` wrote, a state dict or a training state, as a state here. A collective.

    Each rank reads its own rows. A training state is `{"model": ..., "optimizer": ...}` or whatever Lightning
    and others call the two.

    Args:
        path: of a .pt, .pth, .bin or .ckpt file; or of a folder with pytorch_model.bin, or its index.
        step_or_specs, mesh, model, names, missing, ignore, disk_dir, timeout: as for `load_dcp`.

    Raises:
        StateError, CheckpointError: as for `load_dcp`.

    >>> import tempfile, torch, fnshard as fs
    >>> file = tempfile.mkdtemp() + "/model.pt"
    >>> torch.save({"w": torch.arange(3.0)}, file)
    >>> mesh = fs.make_mesh(shard=1)
    >>> specs = fs.presets.full_shard({"w": torch.zeros(3)}, mesh)
    >>> fs.checkpoint.load_torch(file, specs, mesh).params
    {'w': tensor([0., 1., 2.])}
    """
    return load_state(read_torch_files, "load_torch", path, step_or_specs, mesh, options)
