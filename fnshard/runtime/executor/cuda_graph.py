"""CUDA graph: forward, backward and reductions of a step captured once and replayed, by one launch.

The first steps run line by line, which loads kernels and fills caches. Then the schedule's lines up to the
first that reads a number of Python (`passes.order`) are captured. A later step copies batch, keys, the
loss's tangent and flags to where the graph reads them, replays it, and runs the updates line by line after
it: rates stay exact floats of the host, and any optimizer will do. What is returned is a copy.

Stored shards are read where they lie. A state whose tensors lie elsewhere (a restored one) is captured anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fnshard.compiler.ir.program import Outputs
from fnshard.compiler.ir.values import CONTROL, LOSS_TANGENT, Kind
from fnshard.compiler.schedule.instructions import TRANSFER, Env
from fnshard.compiler.schedule.ir import Schedule
from fnshard.errors import SpecError, leaves

MODE = "reduce-overhead"  # of `shard_step`
WARM_steps = 2
STATIC = (Kind.BATCH, Kind.KEY)  # and the loss's tangent: copied to the graph's own tensors
IN_PLACE = (Kind.STORED, Kind.CONSTANT)  # read where they lie
Run = Callable[[Env], Env]


def check(schedule: Schedule, updates: bool) -> None:
    """Refuse a step that cannot be captured.

    Args:
        updates: whether there is an optimizer.

    Raises:
        SpecError: all that stands in the way.
    """
    mesh, found = schedule.mesh, []
    if mesh.device_type != "cuda":
        found.append(f"the mesh {mesh} is of {mesh.device_type} devices")
    if mesh.size > 1:
        found.append(f"{mesh.size} ranks: collectives are not captured")
    away = [p for p, s in schedule.specs.items() if {s.memory, s.optimizer_memory} != {"device"}]
    if away:
        shown = ", ".join(f"params[{p!r}]" for p in away[:3]) + (", ..." if len(away) > 3 else "")
        found.append(f"{leaves(len(away))} rest on the host or on disk: {shown}")
    elif any(line.lane == TRANSFER for line in schedule.instructions):
        found.append("remat='offload': activations travel to the host")
    if not updates:
        found.append("there is no optimizer: what is returned would be written over by the next call")
    if found:
        fix = "leave `mode` out; mode='max-autotune-no-cudagraphs' tunes kernels without a graph."
        raise SpecError(f"mode={MODE!r}: this step cannot be captured as a CUDA graph:", found, fix)


class CudaGraph:
    """`torch.cuda.CUDAGraph`, with a memory pool of its own."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, run: Callable[[], Any]) -> Any:
        """What `run` returns: tensors that every replay writes to. Nothing has run yet."""
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):  # loaders may pin meanwhile
            return run()

    def replay(self) -> None:
        """Launch it on the current stream."""
        self._graph.replay()


@dataclass
class Graphed:
    """A step in two parts, the first of them replayed from the third call on.

    Args:
        first, last: run lines of a schedule on an environment, and return it.
        returned: names of values that the step hands to its caller as they are.
        flag_names: of the numbers that this rank may report with a step.
    """

    first: Run
    last: Run
    returned: Sequence[str] = ()
    flag_names: Sequence[str] = ()
    graph: CudaGraph | None = None
    read: tuple[Any, ...] = ()  # where the captured state lies
    static: dict[str, Tensor] = field(default_factory=dict)
    flags: dict[str, Tensor] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)
    calls: int = 0

    def __call__(self, env: Env) -> Env:
        """One step."""
        self.calls += 1
        if self.calls <= WARM_steps:
            return self.last(self.first(env))
        read = tuple((v.data_ptr(), v.stride()) for n, v in env.items() if n.kind in IN_PLACE)
        if self.graph is None or read != self.read:
            self._capture(env)
            self.read = read
        for name, tensor in self.static.items():
            tensor.copy_(env[name], non_blocking=True)
        for name, flag in self.flags.items():
            flag.fill_(env[CONTROL].flags.get(name, 0.0))
        self.graph.replay()
        out = env | self.made
        return self.last(out | {n: out[n].clone() for n in self.returned})

    def _capture(self, env: Env) -> None:
        self.graph, self.made = None, {}  # its memory is wanted
        self.static = {n: v.clone() for n, v in env.items() if n.kind in STATIC or n == LOSS_TANGENT}
        flag = torch.zeros((), dtype=torch.float64, device=self.static[LOSS_TANGENT].device)
        self.flags = {name: flag.clone() for name in self.flag_names}
        inside = env | self.static | {CONTROL: replace(env[CONTROL], flags=self.flags)}
        graph = CudaGraph()
        made = graph.capture(lambda: self.first({**inside}))
        self.made = {n: v for n, v in made.items() if n not in env}
        self.graph = graph


def returned_tensors(outputs: Outputs, results: Sequence[str], accumulate: int) -> list[str]:
    """Names of aux tensors, which a step returns of its last micro-batch."""
    last = f"#{accumulate - 1}" if accumulate > 1 else ""
    return [results[index] + last for kind, index, *_ in outputs.aux if kind == "tensor"]
