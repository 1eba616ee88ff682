"""Runner: a batch's program, agreed on by all ranks, compiled, bound to this rank and fed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fnshard import tree
from fnshard.analysis.memory import made_of
from fnshard.compiler.frontend.contexts import check_autocast, deterministic
from fnshard.compiler.frontend.limits import check_limits
from fnshard.compiler.frontend.random import derive_keys
from fnshard.compiler.ir.arguments import Arguments
from fnshard.compiler.ir.custom_gradient import counting
from fnshard.compiler.ir.program import Limit, replay
from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.schedule.instructions import COMMUNICATION, Send
from fnshard.layout.resolved import compare_paths
from fnshard.layout.spec import averaged_axes
from fnshard.mesh import Mesh, make_mesh
from fnshard.runtime.collectives.base import Collectives
from fnshard.runtime.collectives.connect import connection
from fnshard.runtime.executor.compiled_update import CompiledUpdates, is_compiled
from fnshard.runtime.executor.context import ExecutorContext, Watch
from fnshard.runtime.executor.execute import bind, cut_batch
from fnshard.runtime.executor.scalars import Scalars
from fnshard.runtime.executor.update import Updater
from fnshard.runtime.readback import Reading
from fnshard.runtime.tiers import Transfers, send
from fnshard.step.agreement import (
    Agreement,
    check_agreement,
    checksum,
    compare_micros,
    compare_rows,
    compare_values,
)
from fnshard.step.batches import check_leaves, texts_of
from fnshard.step.cache import ProgramCache
from fnshard.step.lowered import Lowered
from fnshard.step.plan import items_of, scalars_of, settings_of
from fnshard.step.shards import check_blocks, full_checksums
from fnshard.step.state import TrainState


def find_layout(params: Any, specs: Any = None, mesh: Mesh | None = None) -> tuple[Any, Any, Mesh]:
    """The parameter tree of a state (or itself), its specs and mesh: as given, or as the state knows them.

    The specs are None where nobody knows them.
    """
    training = isinstance(params, TrainState)
    known = params.where if training and params.where is not None else (None, None)
    blocks = params.params if training else params
    return blocks, known[0] if specs is None else specs, mesh or known[1] or make_mesh()


@dataclass(frozen=True)
class Bound:
    """A lowered step, compiled and bound to one rank."""

    lowered: Lowered
    run: Callable[[dict[str, Any]], dict[str, Any]]
    scalars: Scalars | None  # none of a forward
    counting: fx.Graph | None  # what counts a Mean's items ahead of the step, if that has to be


_NO_COUNT = -(2.0**40)  # makes a sum of rows negative
_ROWS = (
    "a batch of {} rows, where ranks have {:.4g} on average, and the loss is no fs.Mean: each rank's counts "
    "alike, a mean of means. return fs.Mean(losses.sum(), count), which is exact over all rows; or leave "
    "short batches out (drop_last=True)."
)


@dataclass
class RankState:
    """What one rank holds besides the state: its collectives, its bound steps, its flags.

    Args:
        agreement: None before the first step.
        bound: by the identity of a lowered step, and who watches it.
        raised: the flags that this rank raises with its next step.
        before, last: the numbers of the last two steps, the flags of all ranks among them.
        calls: how many steps were begun.
        rows: of the batch that is at work, where all its leaves have one count and each rank's loss counts
            alike.
        was_finite: whether the loss of the last step was.
    """

    comm: Collectives
    transfers: Transfers
    agreement: Agreement | None = None
    bound: dict[tuple[int, Watch | None], Bound] = field(default_factory=dict)
    observer: Watch | None = None
    raised: set[str] = field(default_factory=set)
    before: Reading = Reading()
    last: Reading = Reading()
    calls: int = 0
    rows: int | None = None
    warned_of_rows: bool = False
    was_finite: bool = False

    @property
    def reports(self) -> dict[str, float]:
        """What the next step tells the other ranks: flags, and rows where there is one count of them."""
        return {**dict.fromkeys(self.raised, 1.0), "rows": _NO_COUNT if self.rows is None else self.rows}

    def finish_step(
        self, scalars: Mapping[Any, Tensor], flags: Mapping[str, Tensor], excesses: Mapping[Limit, Tensor]
    ) -> Reading:
        """A step has been launched: its scalars, flags and excesses begin to be copied to the host.

        On the CPU, where nothing is waited for, a rank that has other rows than the mean of all says so once:
        a short last batch, of a loss that is no `Mean`.

        Raises:
            StateError: it, or the one before it where a device is still at work on it, exceeds a limit.
        """
        self.raised.clear()
        named = {**scalars, **{("flag", f): v for f, v in flags.items()}, **excesses}
        self.before, self.last = self.last, Reading.of(named, self.transfers.device)
        if self.rows is not None and self.last.event is None and not self.warned_of_rows:
            total = float(flags["rows"])
            if total >= 0 and total != self.rows * self.comm.mesh.size:
                self.warned_of_rows = True
                warnings.warn(_ROWS.format(self.rows, total / self.comm.mesh.size), stacklevel=5)
        if excesses:
            check_limits((self.last if self.last.event is None else self.before).numbers())
        return self.last


class Runner:
    """Runs a cache's programs on ranks. On a simulated mesh the ranks are threads that share it."""

    def __init__(self, cache: ProgramCache):
        self.cache, self.mesh = cache, cache.mesh
        self.options, self.optimizer = cache.options, cache.optimizer
        self.compares_replicas = True
        # The axes whose ranks compute parts of the same rows.
        self._parts = self.mesh.ordered(set(self.mesh.names) - set(self.mesh.data_axes))
        self._ranks: dict[int, RankState] = {}
        self._checked: tuple[Any, list[Any]] = None, []  # specs, and what blocks were that fitted them
        compiled = is_compiled(self.options.update, self.options.backend, self.mesh.device_type)
        self._compiled = CompiledUpdates(self.options.inductor) if compiled else None

    @property
    def rank(self) -> RankState:
        """This rank's; connecting is a collective."""
        if self.mesh.rank not in self._ranks:
            comm = connection(self.mesh, timeout=self.options.timeout)
            self._ranks[self.mesh.rank] = RankState(comm, Transfers(self.mesh.device))
        return self._ranks[self.mesh.rank]

    def prepare(self, params: Any, batch: Arguments, seed: int, step: int) -> tuple[Bound, dict[str, Any]]:
        """This rank's binding of the program for a batch, made if there is none, and what it starts from."""
        if self._parts:
            self._compare_rows(batch)
        lowered, rank = self.cache.get(batch), self.rank
        if self.options.micro_rows is not None and self.mesh.size > 1:
            compare_micros(rank.comm, lowered.options.accumulate)
        blocks = self._blocks(params)
        tensors, whole = self.cache.tensors(lowered, batch)
        counts = {v.shape[0] for n, v in tensors.items() if n not in whole and v.dim()}
        plain = self.cache.trains and lowered.program.outputs.count is None
        rank.rows = counts.pop() if plain and len(counts) == 1 else None
        bound = rank.bound.get((id(lowered), rank.observer))
        if bound is None:
            if rank.agreement is None:
                self._agree(lowered, blocks, full_checksums(params), seed, step, rank.rows)
            lowered.compile()
            bound = self._bind(lowered)
        return bound, self._inputs(lowered, blocks, tensors, whole, seed, step)

    def count(self, bound: Bound, env: Mapping[Any, Tensor]) -> float | None:
        """What a Mean counts on all ranks, if a hook or a backward of `fn`'s has to know. A collective."""
        if bound.counting is None:
            return None
        program, parts, mine = bound.lowered.program, bound.lowered.options.accumulate, 0.0
        names = [i.value_name for i in (program.traced or program).inputs]
        for micro in range(parts) if parts > 1 else [None]:
            with torch.no_grad():
                values = [env.get(n.of(micro), env.get(n)) for n in names]
                mine += float(replay(bound.counting, values)[0])
        every = self.rank.comm.gather_object(repr(mine))
        ranks = self.mesh.group_ranks(averaged_axes(self.cache.specs.stored.values(), self.mesh))
        return sum(float(every[rank]) for rank in ranks)

    def _compare_rows(self, batch: Arguments) -> None:
        """Of ranks that compute parts of the same, at their first, second, fourth, eighth, ... step.

        Of a forward at the first: ranks along a data axis may call it as often as they have batches.
        """
        rank = self.rank
        rank.calls += 1
        if rank.calls == 1 or (self.cache.trains and rank.calls & (rank.calls - 1) == 0):
            check_leaves(batch, values=True)
            compare_rows(rank.comm, self._parts, texts_of(batch))

    def _agree(
        self, lowered: Lowered, blocks: Mapping[str, Tensor], given: Mapping[str, int], seed: int, step: int,
        rows: int | None,
    ) -> None:  # fmt: skip
        """Compare, at the first step, what ranks run and hold; ranks of a host compile a share each.

        A collective.

        Args:
            rows: of this rank's batch, where all ranks must have as many.
        """
        rank, specs = self.rank, self.cache.specs
        settings = {"accumulate": str(lowered.options.accumulate)}
        if self.cache.trains and self.mesh.size > 1:
            settings |= settings_of(self.optimizer, specs, self.options, seed, step)
        items, compiled = items_of(lowered.program), lowered.compiled is not None
        rank.agreement = check_agreement(rank.comm, lowered.communication(), settings, items, compiled, rows)
        if self.mesh.stages > 1:  # whose ranks come to their collectives in different orders
            groups, pairs = set(), set()
            for stage, schedule in enumerate(lowered.schedules):
                issued = [line for line in schedule.instructions if line.lane == COMMUNICATION]
                groups |= {line.axes_of(schedule) for line in issued}
                pairs |= {(stage, line.stage) for line in issued if isinstance(line, Send)}
            rank.comm.open_groups(groups, pairs)
        if self.compares_replicas:
            compare_values(rank.comm, blocks, specs.stored, given)
        constants = lowered.program.constants
        if self._parts and constants:
            read = {f"a tensor {list(v.shape)} that `fn` closes over, {n},": v for n, v in constants.items()}
            compare_rows(rank.comm, self._parts, {n: str(checksum(v)) for n, v in read.items()})
        # Ranks that are processes of hosts share a disk cache. Not accelerators: it knows each device apart.
        shared = (self.mesh.kind, self.mesh.device_type) == ("group", "cpu")
        if shared and self.options.backend != "eager" and not rank.agreement.compiled:
            lowered.compile_share()
            rank.comm.gather_object("")

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

    def _bind(self, lowered: Lowered) -> Bound:
        """Bind a compiled step to this rank; bindings of programs that are no longer kept go."""
        mesh, rank, specs = self.mesh, self.rank, self.cache.specs
        scalars = updater = None
        if self.cache.trains:
            scalars = scalars_of(
                lowered.program, lowered.segments, self.optimizer, specs, mesh, lowered.options
            )
        if self.optimizer is not None:
            updater = Updater(lowered.schedule.families, specs.stored, mesh, mesh.rank, self._compiled)
        context = ExecutorContext(
            lowered.schedule, lowered.compiled, rank.comm, mesh.rank, scalars, updater,
            transfers=rank.transfers, watch=rank.observer,
        )  # fmt: skip
        run = bind(context)

        def in_own_modes(env: dict[str, Any]) -> dict[str, Any]:
            try:
                check_autocast()
                with deterministic(lowered.options.deterministic):
                    return run(env)
            except torch.OutOfMemoryError as error:  # besides the prediction: the batch, and others' tensors
                error.add_note(made_of(lowered.memory_analysis(), ", by the plan"))
                raise

        bound = Bound(lowered, in_own_modes, scalars, counting(lowered.program))
        known = {id(each) for each in self.cache.programs.values()}
        bindings = {k: v for k, v in rank.bound.items() if k[0] in known}
        rank.bound = bindings | {(id(lowered), rank.observer): bound}
        return bound

    def _blocks(self, params: Any) -> dict[str, Tensor]:
        """This rank's stored blocks by path, in the order of the specs."""
        resolved, before = self.cache.specs, self._checked
        specs, structure = resolved.stored, resolved.structure
        blocks, form = tree.flatten(params)
        # At every step, and not by identity: a tensor's `.data` may have been assigned.
        found = [(v.shape, v.dtype, v.device) if isinstance(v, Tensor) else type(v) for v in blocks]
        changed = form != structure or before[0] is not specs or before[1] != found
        if changed or resolved.complex:
            named = resolved.blocks_of(params)
            if changed:
                compare_paths(specs, named)
                resolved.check_constants(params)
                check_blocks(specs, named, self.mesh)
                if form == structure:
                    self._checked = specs, found
            blocks = [named[p] for p in specs]
        # A schedule writes in place, which torch refuses for what requires grad.
        return dict(zip(specs, [v.detach() if v.requires_grad else v for v in blocks], strict=True))

    def _inputs(
        self,
        lowered: Lowered,
        blocks: Mapping[str, Tensor],
        tensors: Mapping[str, Tensor],
        whole: set[str],
        seed: int,
        step: int,
    ) -> dict[str, Any]:
        """The environment a schedule starts from: stored blocks, batch, constants and random keys."""
        mesh, parts, program = self.mesh, lowered.options.accumulate, lowered.program
        names = lowered.names
        values = {n: send(v, mesh.device).contiguous() for n, v in tensors.items()}
        env: dict[str, Any] = {}
        for micro, part in enumerate(cut_batch(values, whole, parts)):
            index = micro if parts > 1 else None
            env |= {ValueName(Kind.BATCH, n, micro=index): v for n, v in part.items()}
        env |= {n: blocks[n.path] for n in lowered.schedule.inputs if n.kind is Kind.STORED}
        env |= {ValueName(Kind.CONSTANT, n): v for n, v in program.constants.items()}
        for axis in names["axis"]:
            index = torch.full((), mesh.coordinate()[axis], dtype=torch.int64, device=mesh.device)
            env[ValueName(Kind.AXIS, axis)] = index
        for micro in range(parts if names["key"] else 0):
            index = micro if parts > 1 else None
            keys = derive_keys(seed, step, mesh.data_rank, micro, len(names["key"]))
            keys = send(keys, mesh.device).unbind(0)
            env |= {ValueName(Kind.KEY, n, micro=index): k for n, k in zip(names["key"], keys, strict=True)}
        return env
