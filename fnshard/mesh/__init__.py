"""A mesh: ranks on named axes, over torch's `DeviceMesh`, as one rank, simulated, or abstract."""

from __future__ import annotations

import math
import reprlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

import torch
import torch.distributed as dist

from fnshard.errors import SpecError
from fnshard.mesh.deadlock import peers
from fnshard.mesh.process_group import accelerator, join_group, world_size

__all__ = ["Mesh", "make_mesh"]

Kind = Literal["local", "group", "simulated", "abstract"]

PIPELINE = "pipeline"
COMPUTE_AXES = ("tensor", "context", PIPELINE)

_simulated = threading.local()


@dataclass(frozen=True)
class Mesh:
    """Named axes over ranks, row-major: the last axis varies fastest.

    Args:
        names, sizes: the axes.
        data_axes: the axes whose ranks take different rows of the batch.
        device_type: "cpu", "cuda", ...
        kind: "local" (one rank, no process group), "group" (a `torch.distributed` process group), "simulated"
            (threads of one process, see `fnshard.simulate`) or "abstract" (no ranks at all, for lowering).
        device_mesh: torch's own mesh of a group.
        connections: collectives that steps on this mesh share, by timeout.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    data_axes: tuple[str, ...]
    device_type: str = "cpu"
    kind: Kind = "local"
    device_mesh: Any = field(default=None, compare=False, repr=False)
    connections: dict[float, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def size(self) -> int:
        """The number of ranks in the mesh."""
        return math.prod(self.sizes)

    @property
    def data_size(self) -> int:
        """The number of ranks that take different slices of the batch."""
        return self.axes_size(self.data_axes)

    @property
    def rank(self) -> int:
        """The number of this rank; 0 on a local or abstract mesh."""
        if self.kind == "group":
            return dist.get_rank()
        if self.kind == "simulated":
            return getattr(_simulated, "rank", 0)
        return 0

    @property
    def data_rank(self) -> int:
        """The number of the slice of the batch that this rank takes, of `data_size`."""
        return self.group_ranks(self.data_axes).index(self.rank)

    @property
    def stages(self) -> int:
        """The number of ranks along the axis "pipeline", each of which runs some chunks; 1 without it."""
        return self.axis_size(PIPELINE) if PIPELINE in self.names else 1

    @property
    def stage(self) -> int:
        """The number of the stage that this rank runs, of `stages`."""
        return self.stage_of(self.rank)

    def stage_of(self, rank: int) -> int:
        """Return the stage that a rank runs.

        >>> mesh = make_mesh(pipeline=2, shard=4, abstract=True)
        >>> mesh.stages, mesh.stage_of(5)
        (2, 1)
        """
        return self.coordinate(rank).get(PIPELINE, 0)

    def partner(self, stage: int, rank: int | None = None) -> int:
        """Return the rank of another stage whose other coordinates are those of `rank` (default: this one).

        >>> make_mesh(pipeline=2, shard=4, abstract=True).partner(1, rank=3)
        7
        """
        here = self.coordinate(rank)
        return self.rank_of({**here, PIPELINE: stage} if PIPELINE in self.names else here)

    @property
    def device(self) -> torch.device:
        """The device of this rank's tensors."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        if self.kind == "abstract":
            return torch.device(self.device_type)
        return torch.device(self.device_type, torch.accelerator.current_device_index())

    def axis_size(self, name: str) -> int:
        """Return the number of ranks along one axis."""
        if name not in self.names:
            raise SpecError(f"the mesh has no axis {name!r} (it has: {', '.join(self.names)}).")
        return self.sizes[self.names.index(name)]

    def axes_size(self, axes: Sequence[str]) -> int:
        """Return the number of ranks in a group that spans `axes`; 1 for none."""
        return math.prod(self.axis_size(a) for a in axes)

    def coordinate(self, rank: int | None = None) -> dict[str, int]:
        """Return `{axis: index}` of a rank (default: this one)."""
        rank = self.rank if rank is None else rank
        # Peel off the axes from the last one, which varies fastest.
        out: dict[str, int] = {}
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            out[name] = rank % size
            rank //= size
        return {name: out[name] for name in self.names}

    def rank_of(self, coordinate: Mapping[str, int]) -> int:
        """Return the rank at a coordinate; the inverse of `coordinate`."""
        rank = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            rank = rank * size + coordinate[name]
        return rank

    def group_ranks(self, axes: Sequence[str], rank: int | None = None) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` along `axes` only, row-major in the order of `axes`."""
        rank = self.rank if rank is None else rank
        here = self.coordinate(rank)
        # Neighbours along an axis are as many ranks apart as the axes behind it have.
        strides = {n: math.prod(self.sizes[i + 1 :]) for i, n in enumerate(self.names)}
        steps = [range(0, self.axis_size(a) * strides[a], strides[a]) for a in axes]
        # The group's first rank has the index 0 along each of its axes.
        first = rank - sum(here[a] * strides[a] for a in axes)
        return tuple(first + sum(each) for each in product(*steps))

    def ordered(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Return `axes` in the mesh's own order, without those of size one."""
        return tuple(n for n in self.names if n in axes and self.axis_size(n) > 1)

    def __str__(self) -> str:
        return "(" + ", ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True)) + ")"


def make_mesh(
    *,
    data_axes: str | Sequence[str] | None = None,
    device: str | None = None,
    abstract: bool = False,
    simulated: bool = False,
    **axes: int,
) -> Mesh:
    """Make a mesh with named axes, `make_mesh(replicate=2, shard=4)`.

    If a launcher (`torchrun`, `fs.launch`) has started several ranks and there is no process group yet, this
    makes one, which is taken down when the process ends: gloo for CPU tensors and, on an accelerator, its own
    backend for the others. `LOCAL_RANK` says which device is this rank's.

    Args:
        data_axes: the axes (or the one axis) whose ranks take different rows of the batch. By default all but
            "tensor" and "context", which split the computation on the same rows (`LayoutSpec.compute`), and
            "pipeline", which splits the program by depth (`LayoutSpec.chunk`).
        device: "cpu", "cuda", ...; by default the accelerator if there is one, and "cpu" if simulated.
        abstract: make a mesh of any size without process group and devices, for `lower` alone.
        simulated: make the ranks threads of this process (tests, debugging).
        axes: sizes by name; one may be -1, which takes all remaining ranks. Without axes it is `shard=-1`,
            all ranks, or a single rank if abstract or simulated.

    Raises:
        SpecError: the product of the sizes is not the number of ranks, a size, device or data axis is
            invalid, the mesh is both abstract and simulated, or the ranks cannot meet.

    >>> make_mesh(replicate=2, shard=4, abstract=True).group_ranks(["shard"], rank=5)
    (4, 5, 6, 7)
    """
    axes = axes or {"shard": 1 if abstract or simulated else -1}
    names = tuple(axes)
    if abstract and simulated:
        raise SpecError("a mesh is abstract (no ranks) or simulated (ranks are threads), not both.")

    # Find the device and the sizes. Only a mesh of processes has a world, of which -1 takes what is left.
    if device is not None:
        device_type = _check_device(device, abstract)
    else:
        device_type = "cpu" if simulated else accelerator()
    has_group = dist.is_available() and dist.is_initialized()
    world = None
    if not (abstract or simulated):
        world = dist.get_world_size() if has_group else world_size()
    sizes = _resolve_sizes(axes, world)

    # Choose the axes that split the batch by rows.
    if data_axes is None:
        data_axes = [n for n in names if n not in COMPUTE_AXES]
    chosen = tuple(data_axes) if isinstance(data_axes, list | tuple) else (data_axes,)
    unknown = [a for a in chosen if a not in names]
    if unknown:
        raise SpecError(
            f"data_axes names {', '.join(map(repr, unknown))}, which the mesh does not have.",
            fix=f"name some of: {', '.join(names)}.",
        )
    if PIPELINE in chosen:
        raise SpecError(
            f"data_axes names {PIPELINE!r}, whose ranks take the same rows of the batch.",
            fix="leave it out, or call an axis that splits rows by another name, as 'replicate'.",
        )

    # Make the mesh. Several ranks meet first.
    if abstract or simulated:
        return Mesh(names, sizes, chosen, device_type, "abstract" if abstract else "simulated")
    if world == 1 and not has_group:
        return Mesh(names, sizes, chosen, device_type, "local")
    join_group(device_type)
    # This exchange names a missing rank. The collectives by which torch makes a mesh's groups do not.
    peers().exchange("meshes", b"", peers().timeout)
    from torch.distributed.device_mesh import init_device_mesh

    device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
    return Mesh(names, sizes, chosen, device_type, "group", device_mesh)


def _resolve_sizes(axes: Mapping[str, int], world: int | None) -> tuple[int, ...]:
    """Return the sizes of axes, in which -1 is replaced by what the others leave of the world."""
    # Refuse sizes that are no sizes; at most one may be free, and only in a world of known size.
    is_bad = any(type(s) is not int or (s < 1 and s != -1) for s in axes.values())
    free = [n for n, s in axes.items() if s == -1]
    shown = ", ".join(f"{n}={s!r}" for n, s in axes.items())
    if is_bad or len(free) > 1 or (free and world is None):
        raise SpecError(
            f"mesh ({shown}) has a size that is not a positive integer.",
            fix="give each axis a size of at least 1; one axis may be -1 where a world is known.",
        )

    # Fill in the free size; their product must then be the world's.
    fixed = math.prod(s for s in axes.values() if s != -1)
    sizes = tuple(s if s != -1 else (world or 1) // fixed for s in axes.values())
    if world is not None and math.prod(sizes) != world:
        ranks = math.prod(sizes)
        raise SpecError(
            f"mesh ({shown}) needs {ranks} ranks; this world has {world}.",
            fix=f"start them, fs.launch(main, ranks={ranks}) or torchrun --nproc-per-node={ranks}; or change "
            "a size. make_mesh(..., simulated=True) tries it in one process, abstract=True lowers only.",
        )
    return sizes


def _check_device(device: str, abstract: bool) -> str:
    """Return the type of a device that this machine has, or of any device for an abstract mesh."""
    try:
        device_type = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise SpecError(
            f"device={device!r} is no kind of device.", fix='"cpu", "cuda" or another that torch knows.'
        ) from error
    if device_type not in ("cpu", accelerator()) and not abstract:
        raise SpecError(
            f"device={device!r}: torch {torch.__version__} finds none on this machine.",
            fix=f"leave it out for {accelerator()!r}; abstract=True lowers for others.",
        )
    return device_type


def check_mesh(mesh: Any) -> None:
    """Refuse a value that is no mesh.

    Raises:
        SpecError: the value is no mesh; the error says how to make one.
    """
    if not isinstance(mesh, Mesh):
        raise SpecError(f"mesh={reprlib.repr(mesh)} is no mesh.", fix="make one with fs.make_mesh(shard=8).")


@contextmanager
def simulated_rank(rank: int) -> Iterator[None]:
    """Make this thread the given rank of every simulated mesh in the block."""
    before = getattr(_simulated, "rank", 0)
    _simulated.rank = rank
    try:
        yield
    finally:
        _simulated.rank = before
