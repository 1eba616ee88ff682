"""Runner: binds lowered steps to ranks: agreed on, compiled, and fed with what this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnshard import tree
from fnshard.analysis.memory import made_of
from fnshard.compiler.frontend.limits import check_limits
from fnshard.compiler.frontend.random import derive_keys
from fnshard.compiler.frontend.trace import deterministic, flatten_batch, without_autocast
from fnshard.compiler.ir.arguments import Arguments
from fnshard.compiler.ir.program import Limit, Program
from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.schedule.passes.graph import graph_length
from fnshard.layout.pairs import as_pairs
from fnshard.layout.resolved import compare_paths
from fnshard.losses import Whole
from fnshard.mesh import Mesh, make_mesh
from fnshard.runtime.collectives.base import Collectives
from fnshard.runtime.collectives.connect import connection
from fnshard.runtime.executor.context import ExecutorContext, Watch
from fnshard.runtime.executor.cuda_graph import Graphed, returned_tensors
from fnshard.runtime.executor.execute import bind, cut_batch
from fnshard.runtime.executor.fused_update import FusedUpdates
from fnshard.runtime.executor.scalars import Scalars
from fnshard.runtime.executor.update import Updater
from fnshard.runtime.readback import Reading
from fnshard.runtime.tiers import Transfers, send
from fnshard.step.agreement import Agreement, check_agreement, compare_replicas
from fnshard.step.batches import Batch
from fnshard.step.lowered import Lowered
from fnshard.step.lowering import Lowering
from fnshard.step.shards import check_blocks
from fnshard.step.state import TrainState

FLAGS = ("out_of_data", "stop")  # what a rank may tell the others with a step


def default_mesh() -> Mesh:
    """One axis "shard" over the process group's ranks, or a mesh of one."""
    return make_mesh()


def laid_out(params: Any, specs: Any = None, mesh: Mesh | None = None) -> tuple[Any, Any, Mesh]:
    """The parameter tree of a state (or itself), its specs and mesh: as given, or as the state knows them.

    The specs are None where nobody knows them.
    """
    training = isinstance(params, TrainState)
    known = params.where if training and params.where is not None else (None, None)
    blocks = params.params if training else params
    return blocks, known[0] if specs is None else specs, mesh or known[1] or default_mesh()


@dataclass(frozen=True)
class Bound:
    """A lowered step, compiled and bound to one rank."""

    lowered: Lowered
    run: Callable[[dict[str, Any]], dict[str, Any]]
    scalars: Scalars | None
    updater: Updater | None


@dataclass
class RankState:
    """What one rank holds beside the state: its collectives, its bound steps, its flags.

    `raised`: what this rank says with its next step; `before`, `last`: the numbers of the last two steps, the
    flags of all ranks among them. `agreement`: None before the first step.
    `bound`: by the identity of a lowered step, and who watches it.
    """

    comm: Collectives
    transfers: Transfers
    agreement: Agreement | None = None
    bound: dict[tuple[int, Watch | None], Bound] = field(default_factory=dict)
    observer: Watch | None = None
    raised: set[str] = field(default_factory=set)
    before: Reading = Reading()
    last: Reading = Reading()
    steps: int = 0

    def finished(
        self,
        scalars: Mapping[Any, Tensor],
        flags: Mapping[str, Tensor],
        excesses: Mapping[Limit, Tensor],
    ) -> Reading:
        """A step has been launched: its scalars, flags and excesses begin to be copied to the host.

        Raises:
            StateError: it, or the one before it where a device is still at work on it, exceeds a limit.
        """
        self.raised.clear()
        self.steps += 1
        named = {**scalars, **{("flag", f): v for f, v in flags.items()}, **excesses}
        self.before, self.last = self.last, Reading.of(named, self.transfers.device)
        if excesses:
            check_limits((self.last if self.last.event is None else self.before).numbers())
        return self.last

    def heard(self, flag: str) -> bool:
        """Whether any rank had raised the flag with the step before the last one, on which nobody waits."""
        return self.before.numbers().get(("flag", flag), 0.0) > 0

    def forget(self, flag: str) -> None:
        """Withdraw a flag, and forget what was heard of it."""
        self.raised.discard(flag)
        self.before, self.last = (r.without(("flag", flag)) for r in (self.before, self.last))


class Runner:
    """Binds lowered steps to ranks. On a simulated mesh the ranks are threads that share it.

    Args:
        replayed: of a step that this one replays: what its ranks have agreed on holds here too.
    """

    def __init__(self, lowering: Lowering, replayed: Runner | None = None):
        self.lowering, self.replayed = lowering, replayed
        self._ranks: dict[int, RankState] = {}
        self._checked: tuple[Any, list[Any]] = None, []  # specs, and what blocks were that fitted them
        compiled = lowering.options.compiles_update(lowering.optimizer, lowering.mesh.device_type)
        self._fused = FusedUpdates(lowering.optimizer, lowering.options.inductor) if compiled else None

    @property
    def rank(self) -> RankState:
        """This rank's; connecting is a collective."""
        mesh = self.lowering.mesh
        if mesh.rank not in self._ranks:
            comm = connection(mesh, timeout=self.lowering.options.timeout)
            self._ranks[mesh.rank] = RankState(comm, Transfers(mesh.device))
        return self._ranks[mesh.rank]

    def bind(
        self,
        batch: Batch,
        params: Any,
        scalars: Callable[[Lowered], Scalars | None],
        settings: Callable[[], Mapping[str, str]] = dict,
    ) -> Bound:
        """The step for this batch, lowered, agreed on, compiled and bound.

        Args:
            params: this rank's stored blocks; at the first step replicas are compared.
            settings: makes `{name: text}` of what must be alike on all ranks, beside the schedule.

        Raises:
            AgreementError: at the first step, where ranks hold different programs or values.
        """
        lowered = self.lowering.of(batch)
        rank = self.rank
        key = id(lowered), rank.observer
        if key in rank.bound:
            return rank.bound[key]
        first = rank.agreement is None
        if first:
            rank.agreement = self._agreement(rank, lowered, params, settings)
        self._compile(rank, lowered, batch, first)
        bound = self._bind(lowered, rank, scalars(lowered))
        kept = {id(v) for v in self.lowering.programs.values()}
        rank.bound = {k: v for k, v in rank.bound.items() if k[0] in kept} | {key: bound}
        return bound

    def _agreement(
        self, rank: RankState, lowered: Lowered, params: Any, settings: Callable[[], Mapping[str, str]]
    ) -> Agreement:
        """What the ranks know of each other, once they agree on the program. A collective."""
        known = None if self.replayed is None else self.replayed.rank.agreement
        if known is not None:
            return known
        items, compiled = items_of(lowered.program), lowered.compiled is not None
        found = check_agreement(rank.comm, lowered.schedule, settings, items, compiled)
        if self.replayed is None:  # of a replay, one may hold the NaN that is looked for
            compare_replicas(rank.comm, self.blocks(params), self.lowering.specs.paired)
        return found

    def _compile(self, rank: RankState, lowered: Lowered, batch: Batch, first: bool) -> None:
        """Compile what is not compiled. At the first step a collective: ranks of a host share the work."""
        agreement = rank.agreement
        if first and self._in_processes and not agreement.compiled:
            lowered.compile_share()
            rank.comm.barrier()
        self.lowering.compile(lowered, batch)

    @property
    def _in_processes(self) -> bool:
        """Whether ranks are processes of hosts, and share a disk cache. Accelerators do not: it knows each
        device apart."""
        mesh, backend = self.lowering.mesh, self.lowering.options.backend
        return mesh.kind == "group" and mesh.device_type == "cpu" and backend != "eager"

    @contextmanager
    def watching(self, observer: Watch) -> Iterator[None]:
        """This rank's steps in here are bound with an observer; the latest one's binding is kept."""
        rank = self.rank
        rank.bound = {k: v for k, v in rank.bound.items() if k[1] in (None, observer)}
        before, rank.observer = rank.observer, observer
        try:
            yield
        finally:
            rank.observer = before

    def _bind(self, lowered: Lowered, rank: RankState, scalars: Scalars | None) -> Bound:
        mesh = self.lowering.mesh
        updater = None
        if (optimizer := self.lowering.optimizer) is not None:
            updater = Updater(optimizer, self.lowering.specs.paired, mesh, mesh.rank, self._fused)
        context = ExecutorContext(
            lowered.schedule,
            lowered.compiled,
            rank.comm,
            mesh.rank,
            scalars,
            updater,
            transfers=rank.transfers,
            watch=rank.observer,
        )
        graphed = lowered.options.passes.graph and context.watch is None
        run = self._graphed(lowered, context) if graphed else bind(context)

        def alone(env: dict[str, Any]) -> dict[str, Any]:
            try:
                # The caller's modes are not the program's.
                with without_autocast(), deterministic(lowered.options.deterministic):
                    return run(env)
            except torch.OutOfMemoryError as error:  # beside the prediction: the batch, and others' tensors
                error.add_note(made_of(lowered.memory_analysis(), ", by the plan"))
                raise

        return Bound(lowered, alone, scalars, updater)

    def _graphed(self, lowered: Lowered, context: ExecutorContext) -> Graphed:
        length, outputs = graph_length(lowered.schedule), lowered.program.outputs
        returned = returned_tensors(outputs, lowered.segments.results, lowered.options.accumulate)
        first, last = (bind(context, part) for part in (slice(length), slice(length, None)))
        return Graphed(first, last, returned, FLAGS)

    def blocks(self, params: Any) -> dict[str, Tensor]:
        """This rank's stored blocks by path, in the order of the specs; complex ones as pairs.

        Raises:
            StateError: blocks of another mesh or spec.
        """
        specs, structure, before = self.lowering.specs.stored, self.lowering.specs.structure, self._checked
        blocks, form = tree.flatten(params)
        # At every step, and not by identity: a tensor's `.data` may have been assigned.
        found = [(v.shape, v.dtype, v.device) if isinstance(v, Tensor) else type(v) for v in blocks]
        if form != structure or before[0] is not specs or before[1] != found:
            given = tree.flatten_with_paths(params)[0]
            compare_paths(specs, given)
            self.lowering.specs.check_constants(params)
            check_blocks(specs, given, self.lowering.mesh)
            if form == structure:
                self._checked = specs, found
            blocks = [given[p] for p in specs]
        if self.lowering.specs.paired is not specs:
            blocks = list(map(as_pairs, blocks))
        # A schedule writes in place, which torch refuses for what requires grad.
        return dict(zip(specs, [v.detach() if v.requires_grad else v for v in blocks], strict=True))

    def inputs(self, lowered: Lowered, params: Any, batch: Batch, seed: int, step: int) -> dict[str, Any]:
        """The environment a schedule starts from: stored blocks, batch, constants and random keys.

        Raises:
            StateError: blocks of another mesh or spec.
        """
        mesh, parts, program = self.lowering.mesh, lowered.options.accumulate, lowered.program
        blocks = self.blocks(params)
        batch, names = Arguments.of(batch), lowered.names
        whole = {n for n, v in batch.leaves[0].items() if isinstance(v, Whole)}
        given = flatten_batch(batch)[0]
        named = {n: given[n].detach() for n in names["batch"]}
        self.lowering.check_indices(lowered, batch, cut_batch(named, whole, parts))
        values = {n: send(v, mesh.device).contiguous() for n, v in named.items()}
        env: dict[str, Any] = {}
        for micro, part in enumerate(cut_batch(values, whole, parts)):
            version = f"#{micro}" if parts > 1 else ""
            env |= {ValueName(Kind.BATCH, n, version): v for n, v in part.items()}
        env |= {n: blocks[n.path] for n in lowered.schedule.inputs if n.kind is Kind.STORED}
        env |= {ValueName(Kind.CONSTANT, n): v for n, v in program.constants.items()}
        here = mesh.coordinate()
        for axis in names["axis"]:
            env[ValueName(Kind.AXIS, axis)] = torch.full(
                (), here[axis], dtype=torch.int64, device=mesh.device
            )
        for micro in range(parts if names["key"] else 0):
            version = f"#{micro}" if parts > 1 else ""
            keys = send(
                derive_keys(seed, step, mesh.data_rank, micro, len(names["key"])), mesh.device
            ).unbind(0)
            env |= {ValueName(Kind.KEY, n, version): k for n, k in zip(names["key"], keys, strict=True)}
        return env


def items_of(program: Program) -> float:
    """How many items a Mean of this rank may count at most: its declared bound, or an estimate (targets and
    masks are integers).

    Gradients travel divided by it: too large a guess costs digits in fp16, never correctness.
    """
    if program.outputs.bound is not None:
        return program.outputs.bound
    nodes = zip(program.placeholders, program.inputs, strict=True)
    values = [n.meta["val"] for n, i in nodes if i.kind == "batch"]
    whole = [v.numel() for v in values if not v.is_floating_point()]
    rows = [v.shape[0] for v in values if v.dim()]
    return max([1, *(whole or rows)])
