"""Choose the collectives that serve a mesh."""

from __future__ import annotations

from fnshard.errors import CollectiveError
from fnshard.mesh import Mesh
from fnshard.mesh.deadlock import DEFAULT_TIMEOUT
from fnshard.runtime.collectives.base import Collectives, Group, Transport
from fnshard.runtime.collectives.shared_memory import connect_shared
from fnshard.runtime.collectives.simulated import Simulated


def connect(mesh: Mesh, *, timeout: float = DEFAULT_TIMEOUT, transport: Transport = "auto") -> Collectives:
    """Return the collectives of `mesh`. On a process group this is itself a collective call.

    Args:
        timeout: seconds after which a silent peer is a `CollectiveError`.
        transport: how CPU ranks move bytes. "auto" is shared memory for groups on one host, and otherwise
            "p2p": gathers and reduce-scatters as sends from rank to rank. "native" is torch's own collectives
            throughout, which a CUDA mesh always uses.

    Raises:
        CollectiveError: the mesh is abstract.

    >>> import torch
    >>> from fnshard.mesh import make_mesh
    >>> connect(make_mesh(shard=1)).all_gather(torch.arange(3), ("shard",)).wait()
    [tensor([0, 1, 2])]
    """
    if mesh.kind == "abstract":
        raise CollectiveError(
            f"mesh {mesh} is abstract: it can be lowered on, not run.",
            fix="start the ranks and call make_mesh(...) without abstract=True, or try the program "
            "on threads with make_mesh(..., simulated=True) and simulate(mesh, fn).",
        )
    if mesh.kind == "simulated":
        return Simulated(mesh)
    on_cpu = mesh.device_type == "cpu"
    group = Group(mesh, timeout, peer_to_peer=on_cpu and transport != "native")
    if on_cpu and transport == "auto" and mesh.size > 1:
        return connect_shared(group) or group
    return group


def connection(mesh: Mesh, *, timeout: float | None = None) -> Collectives:
    """Return the collectives that all steps on this mesh share; the first call connects, and is a collective.

    They are shared because groups and shared memory are expensive: a thread, sockets and address space each.

    Args:
        timeout: the timeout of the connection to be made; None takes any that exists.
    """
    known = mesh.connections
    if timeout is None and known:
        return next(iter(known.values()))
    if timeout is None:
        timeout = DEFAULT_TIMEOUT
    if timeout not in known:
        known[timeout] = connect(mesh, timeout=timeout)
    return known[timeout]
