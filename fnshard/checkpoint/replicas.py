"""Replicas: copies of a training state in host memory, so that a run goes on where it was when ranks die.

A replica is a checkpoint whose files are in memory that outlives a rank, in a folder of this node's /dev/shm.
Ranks find it when they are started again, by `fs.launch` or by `torchrun`. Each save has its own folder, and
the last complete one stays while the next is written. A rank copies its blocks to the host; its file, the
checksums and the copy on a partner's node are made in the background while the next step runs. Each file has
a manifest of its own, a part, which is written when the files of all ranks are, so that no incomplete state
is taken for a complete one. Gemini (Wang et al., SOSP 2023) has the same placement.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import threading
import uuid
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fnshard.checkpoint.blocks import assign_leaves, chunk_reads, write_blocks
from fnshard.checkpoint.loader_state import encode
from fnshard.checkpoint.manifest_file import Manifest, merge_leaves
from fnshard.checkpoint.restoring import Targets, state_filler
from fnshard.checkpoint.saving import copy_to_host
from fnshard.checkpoint.state_leaves import make_host_copies, state_leaves
from fnshard.errors import CheckpointError
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.mesh import Mesh
from fnshard.mesh.host import control_groups
from fnshard.mesh.process_group import attempt, launcher
from fnshard.runtime.collectives.base import translate_errors
from fnshard.runtime.coordination import Failed, gather_texts, group_of, run_together
from fnshard.runtime.files.folder import data_file, memory_directory
from fnshard.runtime.files.json_reader import from_json
from fnshard.step.state import TrainState
from fnshard.step.step import Step

PART = ".json"  # the ending of the manifest next to a data file
_SAVE = re.compile(r"[0-9a-f]{32}-\d+")  # a save's folder: the token of the run's start, and a number
_Part = tuple[str, list[int]]  # the manifest of one data file, and the nodes that have that file
ROOM = 3  # a rank needs room for three times its file: the last copy, the next one, and the blocks themselves


def most_copies(nodes: int) -> int:
    """Return how many copies nodes can hold: one on a single node, where it outlives the node's ranks."""
    return max(1, nodes - 1)


class Replicas:
    """The replicas of one run, as one rank keeps them; all ranks call its methods together.

    Call `restore`, then `start` with the state to go on from, `save` after steps, and `close` at the end.

    Args:
        step: a compiled step on a mesh of processes.
        memory: a name, the same on all ranks and at each start of this run, for a folder in `/dev/shm` (or
            in the folder that `FNSHARD_MEMORY` names; agents that share a machine need one each). It stays
            when ranks die, until `close`, or until their launcher ends: `fs.launch` removes it; after another
            launcher, the next run with replicas on this machine does. A `Path` names a folder of the user's,
            the same for all ranks of the node, in which only replicas are removed.
        copies: the number of nodes that hold a block besides the one whose rank has it; on a single node 1,
            which is the node's own memory.
        timeout: the seconds after which a silent peer is an error.

    Attributes:
        lost: whether `restore` found parts of states, or ranks that were started again, and no complete
            state.
        node_bytes: the bytes that the replicas of this node's ranks take.

    Raises:
        CheckpointError: there is no such memory, it belongs to another job, or nodes cannot hold so many
            copies.
    """

    def __init__(self, step: Step, memory: str | Path, *, copies: int = 1, timeout: float | None = None):
        self.step, self.mesh = step, step.mesh
        self._group = group_of(self.mesh, timeout, "replicas")
        self.memory = run_together(self._group, "replicas", lambda: _find_memory(memory))
        self._is_users = isinstance(memory, Path)

        # Ranks of one host and folder are a node. Several nodes copy to each other over a group of their own.
        hosts = gather_texts(self._group, f"{socket.gethostname()}:{self.memory.resolve()}")
        names = list(dict.fromkeys(hosts))
        if len(names) > 1:
            seconds = timedelta(seconds=self._group.keywords["timeout"])  # `group_of` returns a partial
            self._between = dist.new_group(backend="gloo", timeout=seconds)
        self._nodes = [names.index(host) for host in hosts]  # by rank
        self._node = self._nodes[self.mesh.rank]
        self._is_first = self._nodes.index(self._node) == self.mesh.rank  # the first rank of its node

        # On a single node the memory itself is the copy, and nothing is sent.
        self._copies = copies if len(names) > 1 else 0
        if not 1 <= copies <= most_copies(len(names)):
            nodes = "1 node" if len(names) == 1 else f"{len(names)} nodes"
            raise CheckpointError(
                f"replicas={copies}: {nodes} can hold 1 to {most_copies(len(names))}.",
                fix="one copy needs the node alone, n copies need n + 1 nodes.",
            )

        # The token keeps the folders of two starts apart.
        self._token = gather_texts(self._group, uuid.uuid4().hex)[0]

        self.lost, self.node_bytes = False, 0
        self._count, self._last = 0, ""  # the number of saves, and the folder of the last complete one
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def restore(self, newer_than: int = -1) -> TrainState | None:
        """Return the newest state that is complete in the memory of all nodes together.

        Args:
            newer_than: states of this step or before are not wanted; None is returned if there is no newer
                one.
        """
        # The first rank of each node lists what is there, and all ranks learn it.
        found: dict[str, dict[str, _Part]] = {}  # by folder and data file
        here = _list_parts(self.memory) if self._is_first else []
        for rank, listed in enumerate(gather_texts(self._group, json.dumps(here))):
            for folder, name, text in json.loads(listed):
                part = found.setdefault(folder, {}).setdefault(name, (text, []))
                part[1].append(self._nodes[rank])

        # Take the newest of those that are complete and not corrupt.
        replicas = [_join_parts(folder, parts) for folder, parts in found.items()]
        complete = [replica for replica in replicas if replica is not None]
        _, fill = state_filler(self.step, None)
        self.lost = bool(found) or attempt() > 0
        for replica in sorted(complete, key=lambda replica: -replica.manifest.step):
            if replica.manifest.step <= newer_than:
                self.lost = False
                break
            folder = self.memory / replica.folder
            try:
                state = fill(folder, replica.manifest, self._group, partial(self._fetch, folder, replica))
            except Failed as error:
                # If a replica is corrupt on one rank, all ranks go on with the one before it.
                if not error.corrupt:
                    raise CheckpointError(f"cannot restore from {folder}:", error.lines()) from error
                continue
            self._last, self.lost = replica.folder, False
            return state
        return None

    def start(self, state: TrainState) -> None:
        """Make room on the host for this rank's blocks, and set `node_bytes`.

        Raises:
            CheckpointError: the replicas do not fit into the memory that is free.
        """
        mesh = self.mesh
        self._specs = ResolvedSpecs.of(state.where[0])
        leaves = state_leaves(state, self._specs, mesh)
        mine = assign_leaves(leaves, mesh)

        # Each rank sends its file to the rank of its place on the next nodes, and receives those of the nodes
        # before.
        own_bytes = sum(leaf.block.nbytes for leaf in mine.values())
        sizes = [int(text) for text in gather_texts(self._group, str(own_bytes))]
        shifts = range(1, self._copies + 1)
        self._targets = [self._find_partner(mesh.rank, shift) for shift in shifts]
        self._sources = []
        for shift in shifts:
            sources = [rank for rank in range(mesh.size) if self._find_partner(rank, shift) == mesh.rank]
            self._sources.append(sources)

        # A node holds its ranks' own blocks, and those of the ranks that copy to it.
        taken = own_bytes + sum(sizes[r] for sources in self._sources for r in sources)
        by_rank = zip(self._nodes, gather_texts(self._group, str(taken)), strict=True)
        self.node_bytes = ROOM * sum(int(text) for node, text in by_rank if node == self._node)
        run_together(self._group, "replicas", self._check_room)

        # Allocate the buffers, and make what the manifests of all saves have in common.
        self._staged = make_host_copies(mine)
        axes = dict(zip(mesh.names, mesh.sizes, strict=True))
        self._plan = Manifest(
            step=0, seed=0, mesh={"axes": axes, "data_axes": list(mesh.data_axes)},
            leaves={name: leaf.to_saved() for name, leaf in leaves.items()},
            files={}, specs={}, data=(), config=None, metrics={},
            versions={"torch": str(torch.__version__)}, complex=tuple(sorted(self._specs.complex)),
        )  # fmt: skip

    def _check_room(self) -> None:
        """Refuse replicas that do not fit into this node's memory, in place of those that are there."""
        # Both the file system and the control groups of this process may be limits.
        volume = os.statvfs(self.memory)
        free = [volume.f_bavail * volume.f_frsize]
        free += [max(0, limit - used) for limit, used in control_groups()]
        taken = sum(path.stat().st_size for path in self.memory.glob("*/*"))
        if self.node_bytes > min(free) + taken:
            raise CheckpointError(
                f"replicas take {self.node_bytes / 1e9:.3g} GB of this node's memory, in {self.memory} "
                f"{(min(free) + taken) / 1e9:.3g} GB are free.",
                fix="fewer copies, more nodes, or a larger /dev/shm.",
            )

    def _find_partner(self, rank: int, shift: int) -> int:
        """Return the rank that holds copies of a rank's blocks: that of its place, `shift` nodes further."""
        count = max(self._nodes) + 1
        by_node = [[r for r, n in enumerate(self._nodes) if n == node] for node in range(count)]
        place = by_node[self._nodes[rank]].index(rank)
        partners = by_node[(self._nodes[rank] + shift) % count]
        return partners[place % len(partners)]  # nodes may have different numbers of ranks

    def _fetch(self, folder: Path, replica: _Replica, targets: Targets) -> None:
        """Fetch the files that this node's ranks read, and that only other nodes have."""
        # All ranks learn which node lacks which file, and so compute the same list of transfers.
        needed = {read.chunk.file for read in chunk_reads(targets, replica.manifest, self.mesh)}
        missing = set()
        for rank, text in enumerate(gather_texts(self._group, json.dumps(sorted(needed)))):
            node = self._nodes[rank]
            missing |= {(node, name) for name in json.loads(text) if node not in replica.nodes[name]}

        # Transfer one file after the other, in the same order on all ranks, between first ranks of two nodes.
        received = {}
        for node, name in sorted(missing):
            source, target = self._nodes.index(replica.nodes[name][0]), self._nodes.index(node)
            with translate_errors(lambda: "fetching a replica"):
                if self.mesh.rank == source:
                    dist.send(_read_file(folder / name), target, group=self._between)
                elif self.mesh.rank == target:
                    content = torch.empty(replica.manifest.files[name].bytes, dtype=torch.uint8)
                    dist.recv(content, source, group=self._between)
                    received[name] = content
        run_together(self._group, "fetching a replica", lambda: _write_files(folder, received))

    def save(self, state: TrainState, data: Any = None) -> None:
        """Copy a state, and return when the copy is on the host, so that the next step may consume the state.

        Raises:
            CheckpointError: the save before failed.
        """
        self.wait()
        leaves = state_leaves(state, self._specs, self.mesh)
        # The buffers are those of the save before, whose files are written by the time that `wait` returns.
        copy_to_host([(staged.block, leaves[name].block) for name, staged in self._staged.items()])
        position = encode(data.state_dict() if hasattr(data, "state_dict") else data)
        part = replace(self._plan, step=int(state.step), seed=int(state.seed), data=(position,))
        self._count += 1
        folder = self.memory / f"{self._token}-{self._count}"
        self._thread = threading.Thread(target=self._write_and_exchange, args=(folder, part), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the save in the background.

        Raises:
            CheckpointError: it failed. All ranks raise it.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for all ranks and give the memory back. Call it after the run's last state is saved elsewhere.

        Raises:
            CheckpointError: the save before failed.
        """
        self.wait()
        gather_texts(self._group, "")
        self._staged = {}
        if self._is_first:
            # A folder of the user's stays, with all else that is in it.
            for old in _list_saves(self.memory) if self._is_users else [self.memory]:
                shutil.rmtree(old, ignore_errors=True)

    def _write_and_exchange(self, folder: Path, part: Manifest) -> None:
        """Write and exchange the files of one save, in the background.

        Parts are written last: a save without those of all ranks is not taken for complete.
        """
        try:
            what = f"writing a replica of step {part.step}"
            text = run_together(self._group, what, lambda: self._write_file(folder, part))
            files = self._exchange(text, folder / data_file(self.mesh.rank))
            run_together(self._group, what, lambda: _write_files(folder, files))
            self._last = folder.name
        except Exception as error:  # `wait` raises it
            self._error = error

    def _write_file(self, folder: Path, part: Manifest) -> str:
        """Write this rank's file, and return the text of its part.

        All folders but the last complete one are removed first.
        """
        if self._is_first:
            for old in _list_saves(self.memory):
                if old.name not in (self._last, folder.name):
                    shutil.rmtree(old, ignore_errors=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        file, chunks = write_blocks(folder, self._staged, self.mesh)
        leaves = {n: replace(leaf, chunks=tuple(chunks.get(n, ()))) for n, leaf in part.leaves.items()}
        part = replace(part, leaves=leaves, files={data_file(self.mesh.rank): file})
        text = json.dumps(vars(part), default=vars, separators=(",", ":"))
        return f"{zlib.crc32(text.encode()):08x} {text}"

    def _exchange(self, text: str, path: Path) -> dict[str, Tensor]:
        """Send this rank's file and part to its partners, and return the files to write here, by name."""
        content, part = _read_file(path), torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        files = {f"{path.name}{PART}": part}
        # The head tells a receiver the sizes of the two that follow. Each of the three has its own tag.
        head = torch.tensor([len(content), len(part)])

        with translate_errors(lambda: "copying a replica"):
            for target, sources in zip(self._targets, self._sources, strict=True):
                # All ranks send before they receive, without blocking: sends that block would deadlock.
                sends = [
                    dist.isend(tensor, target, group=self._between, tag=tag)
                    for tag, tensor in enumerate((head, content, part))
                ]
                for source in sources:
                    sizes = torch.zeros(2, dtype=torch.int64)
                    dist.recv(sizes, source, group=self._between, tag=0)
                    for number, ending in enumerate(("", PART)):
                        received = torch.empty(int(sizes[number]), dtype=torch.uint8)
                        dist.recv(received, source, group=self._between, tag=number + 1)
                        files[f"{data_file(source)}{ending}"] = received
                for send in sends:
                    send.wait()
        return files


def _find_memory(memory: str | Path) -> Path:
    """Return the folder of replicas that a name means, which is made if there is none."""
    if isinstance(memory, Path):
        try:
            memory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"replicas in {str(memory)!r}: {error.strerror}."
            raise CheckpointError(message, fix="a folder in memory that may be written to.") from None
        return memory
    try:
        return memory_directory(memory, launcher())
    except OSError as error:
        raise CheckpointError(
            f"replicas in memory, {memory!r}: {error.filename}: {error.strerror}.",
            fix="a Linux machine with /dev/shm, and a name that no other job has; of several agents on one "
            "machine each needs FNSHARD_MEMORY, a folder of its own.",
        ) from None


def _read_file(path: Path) -> Tensor:
    """Map a file as a tensor of uint8, without a copy."""
    return torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)


def _write_files(folder: Path, contents: Mapping[str, Tensor]) -> None:
    """Write files in this order. Each is complete as soon as it has its name."""
    for name, content in contents.items():
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / f".{name}").write_bytes(memoryview(content.numpy()))
        os.rename(folder / f".{name}", folder / name)


def _list_saves(memory: Path) -> list[Path]:
    """Return the folders of saves in a node's memory, which may hold files of others, too."""
    return [folder for folder in memory.iterdir() if _SAVE.fullmatch(folder.name) and folder.is_dir()]


def _list_parts(memory: Path) -> list[tuple[str, str, str]]:
    """Return (folder, data file, manifest of that file) of every undamaged part in a node's memory."""
    parts = []
    for path in sorted(memory.glob(f"*/rank-*{PART}")):
        with suppress(OSError, ValueError):
            checksum, _, text = path.read_text().partition(" ")
            if int(checksum, 16) == zlib.crc32(text.encode()):
                parts.append((path.parent.name, path.stem, text))
    return parts


@dataclass(frozen=True)
class _Replica:
    """A complete state in memory.

    Args:
        nodes: by file, the nodes that have it.
    """

    folder: str
    manifest: Manifest
    nodes: Mapping[str, list[int]]


def _join_parts(folder: str, parts: Mapping[str, _Part]) -> _Replica | None:
    """Return the replica that the parts of one save make up; None if it is incomplete."""
    # The mesh that it was saved on says how many parts there must be, one for each rank.
    try:
        by_rank = [from_json(Manifest, json.loads(parts[name][0])) for name in sorted(parts)]
        axes = by_rank[0].mesh["axes"]
        mesh = Mesh(tuple(axes), tuple(axes.values()), (), kind="abstract")
        if len(by_rank) < mesh.size:
            return None
        stages = [mesh.stage_of(rank) for rank in range(len(by_rank))]
        leaves = merge_leaves([part.leaves for part in by_rank], stages)
    except (ValueError, RecursionError):
        return None

    files = {name: file for part in by_rank for name, file in part.files.items()}
    data = tuple(position for part in by_rank for position in part.data)
    alike = all(position == data[0] for position in data)
    manifest = replace(by_rank[0], leaves=leaves, files=files, data=data[:1] if alike else data)
    return _Replica(folder, manifest, {name: nodes for name, (_, nodes) in parts.items()})
