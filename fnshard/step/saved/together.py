"""Together: the ranks of one host compile a kernel once, each a share of them, and load each other's."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fnshard.compiler.kernels.inductor import compile_graphs, graphs_of, share_of
from fnshard.errors import StateError
from fnshard.runtime.collectives.base import Collectives
from fnshard.step.lowered import Lowered
from fnshard.step.saved.file import Refused
from fnshard.step.saved.store import read_kernels, write_kernels


def compile_together(lowered: Lowered, comm: Collectives, neighbours: Sequence[int]) -> int:
    """Compile the kernels of a step that is the same on all ranks of a host. A collective.

    Kernels travel in files of a folder that is gone afterwards. What cannot be written is compiled by each
    rank.

    Returns:
        How many this rank has compiled.
    """
    place = neighbours.index(comm.mesh.rank)
    graphs, options = graphs_of(lowered.kernels.values()), lowered.options
    made = {} if lowered.compiled is None else {
        (name, back): pair[back] for name, pair in lowered.compiled.items() for back in (False, True)
        if pair[back] is not None
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="fnshard-kernels-") as own:
        folder = Path(comm.gather_object(own if place == 0 else "")[neighbours[0]])
        mine = share_of(graphs, place, len(neighbours))
        with lowered.settings():
            fresh = {} if made else compile_graphs(mine, backend=options.backend, options=options.inductor)
        with suppress(StateError, OSError):  # a full disk, or a $TMPDIR that others may write to
            write_kernels(folder / str(place), made or fresh, options)
        comm.barrier()
        known = made or fresh
        for other in set(range(len(neighbours))) - {place}:
            with suppress(Refused, StateError, OSError):
                known = read_kernels(folder / str(other)) | known
        comm.barrier()  # before the folder goes
    before = len(known)
    lowered.compile(known)
    return len(fresh) + len(graphs) - before
