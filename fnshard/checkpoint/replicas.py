"""Replicas: copies of a training state in host memory, so that a run goes on where it was when ranks die.

A replica is a checkpoint whose files lie in memory that outlives a rank, in a folder of this node's /dev/shm.
Ranks find it again whoever started them anew, `fs.launch` or `torchrun`.
Each rank copies the blocks that are its own to a mapped file there, in two slots in turn; checksums, and the
copy on a partner's node, are made in the background while the next step runs. Next to each file its part is
written last, so no step is taken for complete that is not. Gemini (Wang et al., SOSP 2023) has the same
placement.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fnshard.analysis.measure import control_groups
from fnshard.checkpoint.blocks import assigned, chunk_reads
from fnshard.checkpoint.coordination import Failed, agreed, group_of, texts
from fnshard.checkpoint.loader_state import encode
from fnshard.checkpoint.replica_files import (
    PART,
    SLOTS,
    Replica,
    ReplicaFile,
    mapped_file,
    parts_in,
    replicas_of,
    write_part,
)
from fnshard.checkpoint.restoring import Targets, state_filler
from fnshard.checkpoint.saving import copy_to_host
from fnshard.checkpoint.state_leaves import state_leaves
from fnshard.errors import CheckpointError
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.mesh.process_group import attempt, launcher
from fnshard.runtime.collectives.base import failing
from fnshard.runtime.files.folder import data_file, memory_directory
from fnshard.step.state import TrainState
from fnshard.step.step import Step


def most_copies(nodes: int) -> int:
    """How many copies nodes hold: one node's memory outlives its ranks, not the node."""
    return max(1, nodes - 1)


def _folder_of(memory: str | Path) -> Path:
    if isinstance(memory, Path):
        return memory
    try:
        return memory_directory(memory, launcher())
    except OSError as error:
        raise CheckpointError(
            f"replicas in memory, {memory!r}: {error.filename}: {error.strerror}.",
            fix="a Linux machine with /dev/shm, and a name that no other job has; of several agents on one "
            "machine each needs FNSHARD_MEMORY, a folder of its own.",
        ) from None


class Replicas:
    """The replicas of one run, as one rank keeps them; all ranks call its methods together.

    Args:
        step: compiled, on a mesh of processes.
        memory: a name, the same on all ranks and at each start of this run, for a folder in `/dev/shm` (or
            in the folder that `FNSHARD_MEMORY` names; agents that share a machine need one each). It stays
            when ranks die, until `close`, or the end of who started them: `fs.launch` removes it, after
            another launcher the next run with replicas on this machine does. Or the path of a folder of one's
            own, the same for all ranks of the node.
        copies: nodes that hold a block besides the one whose rank has it; on a single node, its memory.
        timeout: seconds after which a silent peer is an error.

    `lost`: whether `restore` found parts of states, or ranks that were started anew, and no complete state.

    Raises:
        CheckpointError: no such memory, or it is another job's; more copies than nodes can hold.
    """

    def __init__(self, step: Step, memory: str | Path, *, copies: int = 1, timeout: float | None = None):
        self.step, self.mesh = step, step.mesh
        self._group = group_of(self.mesh, timeout, "replicas")
        self.memory = agreed(self._group, "replicas", lambda: _folder_of(memory))
        hosts = texts(self._group, f"{socket.gethostname()}:{self.memory.resolve()}")
        names = list(dict.fromkeys(hosts))
        self._nodes = [names.index(host) for host in hosts]  # by rank
        self._node = self._nodes[self.mesh.rank]
        self._copies = copies if len(names) > 1 else 0
        if not 1 <= copies <= most_copies(len(names)):
            raise CheckpointError(
                f"replicas={copies}: {len(names)} node{'s' * (len(names) > 1)} can hold "
                f"1 to {most_copies(len(names))}.",
                fix="one copy needs the node alone, n copies need n + 1 nodes.",
            )
        self._token = texts(self._group, uuid.uuid4().hex)[0]
        self.lost, self.node_bytes = False, 0
        self._next, self._slots = 0, dict[int, dict[str, Tensor]]()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    # -------------------------------------------------------------- before the first step

    def restore(self, newer_than: int = -1) -> TrainState | None:
        """The newest state that is complete in the memory of all nodes together; None if none is that new."""
        first = self._local[0] == self.mesh.rank
        mine = [[slot, text.decode()] for slot, text in (parts_in(self.memory) if first else ())]
        found = [
            (self._nodes[rank], slot, text.encode())
            for rank, listed in enumerate(texts(self._group, json.dumps(mine)))
            for slot, text in json.loads(listed)
        ]
        _, fill = state_filler(self.step, None)
        self.lost = bool(found) or attempt() > 0
        for replica in replicas_of(found):
            if replica.manifest.step <= newer_than:
                self.lost = False
                break
            folder = self.memory / replica.slot
            try:
                state = fill(folder, replica.manifest, self._group, partial(self._fetch, folder, replica))
            except Failed as error:
                if not error.corrupt:
                    raise CheckpointError(f"cannot restore from {folder}:", error.lines()) from error
                continue
            self._next, self.lost = 1 - SLOTS.index(replica.slot), False
            return state
        return None

    def start(self, state: TrainState) -> None:
        """Plan the files and see that they fit: `node_bytes` of this node's memory.

        Raises:
            CheckpointError: they do not fit into the memory that is free.
        """
        self._specs = ResolvedSpecs.of(state.where[0]).stored
        leaves = state_leaves(state, self._specs, self.mesh)
        rank, world = self.mesh.rank, self.mesh.size
        self._file = ReplicaFile(data_file(rank), leaves, assigned(leaves, self.mesh), self.mesh)
        sizes = [int(text) for text in texts(self._group, str(self._file.bytes))]
        shifts = range(1, self._copies + 1)
        self._targets = [self._partner(rank, shift) for shift in shifts]
        self._sources = [[r for r in range(world) if self._partner(r, s) == rank] for s in shifts]
        here = {rank, *(r for sources in self._sources for r in sources)}
        self._sizes = {data_file(r): sizes[r] for r in sorted(here)}
        listed = [json.loads(text) for text in texts(self._group, json.dumps(self._sizes))]
        on_node = {name: size for r in self._local for name, size in listed[r].items()}
        self._names = {name + end for name in on_node for end in ("", PART)}
        self.node_bytes = len(SLOTS) * sum(on_node.values())
        agreed(self._group, "replicas", self._check_room)

    def _check_room(self) -> None:
        for slot in SLOTS:
            (self.memory / slot).mkdir(mode=0o700, exist_ok=True)
        there = os.statvfs(self.memory)
        free = [there.f_bavail * there.f_frsize, *(max(0, limit - used) for limit, used in control_groups())]
        taken = sum(path.stat().st_size for slot in SLOTS for path in (self.memory / slot).iterdir())
        if self.node_bytes > min(free) + taken:
            raise CheckpointError(
                f"replicas take {self.node_bytes / 1e9:.3g} GB of this node's memory, in {self.memory} "
                f"{(min(free) + taken) / 1e9:.3g} GB are free.",
                fix="fewer copies, more nodes, or a larger /dev/shm.",
            )

    @property
    def _local(self) -> list[int]:
        return [rank for rank, node in enumerate(self._nodes) if node == self._node]

    def _partner(self, rank: int, shift: int) -> int:
        """Who holds this rank's blocks: the rank in its place on the node that is `shift` further."""
        count = max(self._nodes) + 1
        by_node = [[r for r, n in enumerate(self._nodes) if n == node] for node in range(count)]
        there = by_node[(self._nodes[rank] + shift) % count]
        return there[by_node[self._nodes[rank]].index(rank) % len(there)]

    def _fetch(self, folder: Path, replica: Replica, targets: Targets) -> None:
        """Bring the files that this node's ranks read and that lie on other nodes alone."""
        needed = {read.chunk.file for read in chunk_reads(targets, replica.manifest, self.mesh)}
        missing = set()
        for rank, text in enumerate(texts(self._group, json.dumps(sorted(needed)))):
            node = self._nodes[rank]
            missing |= {(node, name) for name in json.loads(text) if node not in replica.nodes[name]}
        for node, name in sorted(missing):
            source = self._nodes.index(replica.nodes[name][0])
            target, size = self._nodes.index(node), replica.manifest.files[name].bytes
            with failing(lambda: "fetching a replica"):
                if self.mesh.rank == source:
                    dist.send(mapped_file(folder / name, size), target, group=self._group)
                elif self.mesh.rank == target:
                    folder.mkdir(mode=0o700, exist_ok=True)
                    dist.recv(mapped_file(folder / name, size, new=True), source, group=self._group)
        texts(self._group, "")  # they are there for all ranks of a node

    # -------------------------------------------------------------- after a step

    def save(self, state: TrainState, data: Any = None) -> None:
        """Copy a state; returns when it is on the host, so that the next step may have it.

        Raises:
            CheckpointError: the save before failed.
        """
        self.wait()
        mapped, folder = self._mapped(), self.memory / SLOTS[self._next]
        for name in mapped:
            (folder / f"{name}{PART}").unlink(missing_ok=True)
        leaves = state_leaves(state, self._specs, self.mesh)
        blocks = {name: leaf.block for name, leaf in leaves.items()}
        copy_to_host(self._file.copies(mapped[self._file.name], blocks))
        mesh = self.mesh
        axes = dict(zip(mesh.names, mesh.sizes, strict=True))
        fields = {
            "step": int(state.step), "seed": int(state.seed), "token": self._token, "rank": mesh.rank,
            "data": encode(data.state_dict() if hasattr(data, "state_dict") else data),
            "mesh": {"axes": axes, "data_axes": list(mesh.data_axes)},
        }  # fmt: skip
        self._thread = threading.Thread(target=self._run, args=(folder, mapped, fields), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the save in the background.

        Raises:
            CheckpointError: it failed; on all ranks.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for all ranks and give the memory back; after the run's last state is saved elsewhere.

        Raises:
            CheckpointError: the save before failed.
        """
        self.wait()
        texts(self._group, "")
        self._slots.clear()
        if self.mesh.rank == self._local[0]:
            shutil.rmtree(self.memory, ignore_errors=True)

    def _mapped(self) -> dict[str, Tensor]:
        if self._next not in self._slots:
            folder = self.memory / SLOTS[self._next]
            made = {name: mapped_file(folder / name, size, new=True) for name, size in self._sizes.items()}
            self._slots[self._next] = made
            if self.mesh.rank == self._local[0]:  # what another mesh left there
                for path in folder.iterdir():
                    if path.name not in self._names and not path.name.startswith("."):
                        path.unlink(missing_ok=True)
        return self._slots[self._next]

    def _run(self, folder: Path, mapped: Mapping[str, Tensor], fields: Mapping[str, Any]) -> None:
        try:
            failed, text = None, b""
            try:
                text = self._file.part(mapped[self._file.name], fields).encode()
                write_part(folder, self._file.name, text)
            except OSError as error:
                failed = error
            self._exchange(folder, mapped, text)
            failure = agreed_failure(self._group, failed)
            if failure:
                raise CheckpointError(f"a replica of step {fields['step']} was not written: {failure}")
            self._next = 1 - self._next
        except Exception as error:
            self._error = error

    def _exchange(self, folder: Path, mapped: Mapping[str, Tensor], text: bytes) -> None:
        """Send the file and its part to the partners, and write those of whose partner this rank is."""
        mine = mapped[self._file.name]
        head = torch.tensor([len(text)])
        body = torch.frombuffer(bytearray(text or b"\0"), dtype=torch.uint8)
        for target, sources in zip(self._targets, self._sources, strict=True):
            sends = [
                dist.isend(t, target, group=self._group, tag=n) for n, t in enumerate((head, body, mine))
            ]
            for source in sources:
                name, length = data_file(source), torch.zeros(1, dtype=torch.int64)
                dist.recv(length, source, group=self._group, tag=0)
                part = torch.empty(max(1, int(length)), dtype=torch.uint8)
                dist.recv(part, source, group=self._group, tag=1)
                dist.recv(mapped[name], source, group=self._group, tag=2)
                if int(length):
                    write_part(folder, name, part.numpy().tobytes())
            for each in sends:
                each.wait()


def agreed_failure(group: Any, failed: OSError | None) -> str:
    """What failed on any rank; nothing where all is well, which costs one exchange of one number."""
    if group is None:
        return str(failed or "")
    count = torch.tensor([int(failed is not None)])
    dist.all_reduce(count, group=group)
    return "; ".join(filter(None, texts(group, str(failed or "")))) if int(count) else ""
