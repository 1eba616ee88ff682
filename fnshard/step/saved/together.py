"""Together: the ranks of one host compile a kernel once, each a share of them, and load each other's."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fnshard.compiler.kernels.inductor import graphs_of, share_of
from fnshard.errors import StateError
from fnshard.runtime.collectives.base import Collectives
from fnshard.step.lowered import Lowered
from fnshard.step.saved.file import Refused
from fnshard.step.saved.store import read_kernels, write_kernels


def compile_together(lowered: Lowered, comm: Collectives, neighbours: Sequence[int]) -> None:
    """Compile the kernels of a step that is the same on all ranks of a host. A collective.

    What none of them has compiled is shared out. Kernels travel in files of a folder that is gone
    afterwards; what cannot be written is compiled by each rank.
    """
    place, known = neighbours.index(comm.mesh.rank), lowered.known()
    with tempfile.TemporaryDirectory(prefix="fnshard-kernels-") as own:
        texts = comm.gather_object(json.dumps([own, sorted(known)]))
        every = [json.loads(texts[rank]) for rank in neighbours]
        folder, compiled = Path(every[0][0]), [{*map(tuple, keys)} for _, keys in every]
        graphs = graphs_of(lowered.kernels.values())
        left = {key: graph for key, graph in graphs.items() if not any(key in keys for keys in compiled)}
        known |= lowered.compile_graphs(share_of(left, place, len(neighbours)))
        sent = {key: kernel for key, kernel in known.items() if not all(key in keys for keys in compiled)}
        with suppress(StateError, OSError):  # a full disk, or a $TMPDIR that others may write to
            write_kernels(folder / str(place), sent, lowered.options)
        comm.barrier()
        for other in set(range(len(neighbours))) - {place}:
            with suppress(Refused, StateError, OSError):
                known = read_kernels(folder / str(other)) | known
        comm.barrier()  # before the folder goes
    lowered.compile(known)
