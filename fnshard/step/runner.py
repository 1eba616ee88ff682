"""Runner: let ranks agree on a batch's program, compile it, bind it to this rank and feed it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fnshard import tree
from fnshard.analysis.memory import describe_peak
from fnshard.compiler.frontend.contexts import check_autocast, deterministic
from fnshard.compiler.frontend.random import derive_keys
from fnshard.compiler.frontend.size_bounds import check_limits
from fnshard.compiler.ir.arguments import Arguments
from fnshard.compiler.ir.custom_gradient import make_count_graph
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
from fnshard.runtime.tiers import Transfers, copy_to_device
from fnshard.step.batches import check_leaves, texts_of
from fnshard.step.cache import ProgramCache
from fnshard.step.lowered import Lowered
from fnshard.step.rank_agreement import (
    Agreement,
    check_agreement,
    checksum,
    compare_micros,
    compare_rows,
    compare_values,
)
from fnshard.step.settings import items_of, scalars_of, texts_to_compare
from fnshard.step.shards import check_blocks, full_checksums
from fnshard.step.state import TrainState


def find_layout(params: Any, specs: Any = None, mesh: Mesh | None = None) -> tuple[Any, Any, Mesh]:
    """Return the parameter tree of a state, its specs and its mesh: as given, or as the state knows them.

    Args:
        params: a state, or a parameter tree, which is returned unchanged.
        specs, mesh: what is known besides the state. Specs that nobody knows are returned as None.
    """
    blocks, known_specs, known_mesh = params, None, None
    if isinstance(params, TrainState):
        blocks = params.params
        known_specs, known_mesh = params.where or (None, None)
    return blocks, known_specs if specs is None else specs, mesh or known_mesh or make_mesh()


@dataclass(frozen=True)
class Bound:
    """A lowered step, compiled and bound to one rank.

    Args:
        run: a function that executes the schedule on an environment of values by name, and returns it.
        scalars: the numbers that ranks sum; a forward has none.
        counting: the graph that counts a Mean's items ahead of the step, where that is necessary.
    """

    lowered: Lowered
    run: Callable[[dict[str, Any]], dict[str, Any]]
    scalars: Scalars | None
    counting: fx.Graph | None


_NO_COUNT = -(2.0**40)  # the rows of a rank that has no count: it makes the sum over ranks negative
_ROWS = (
    "a batch of {} rows, where ranks have {:.4g} on average, and the loss is no fs.Mean: each rank's counts "
    "alike, a mean of means. return fs.Mean(losses.sum(), count), which is exact over all rows; or leave "
    "short batches out (drop_last=True)."
)


@dataclass
class RankState:
    """A rank's own state beside the training state: its collectives, its bound steps, its flags.

    Args:
        agreement: what ranks agreed on at the first step; None before it.
        bound: the bound steps by the identity of the lowered step, and by who watches it.
        observer: who watches the steps that run now.
        raised: the flags that this rank raises with its next step.
        before, last: the numbers of the last two steps, including the flags of all ranks.
        calls: the number of steps that were begun.
        rows: the number of rows of the batch of this step, if all its leaves have the same number and each
            rank's loss counts alike; else None.
        warned_of_rows: whether this rank has warned of a short batch.
        was_finite: whether the loss of the last step was finite.
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
        """Return the flags and, if known, the number of rows, which the next step tells other ranks."""
        return {**dict.fromkeys(self.raised, 1.0), "rows": _NO_COUNT if self.rows is None else self.rows}

    def finish_step(
        self, scalars: Mapping[Any, Tensor], flags: Mapping[str, Tensor], excesses: Mapping[Limit, Tensor]
    ) -> Reading:
        """Begin to copy the scalars, flags and excesses of a step that was launched to the host.

        On the CPU, where they are there already, a rank whose batch has other rows than the mean of all ranks
        warns once: it is a short last batch, and the loss is no `Mean`.

        Raises:
            StateError: the step exceeds a limit; on a device that is still at work, the step before it does.
        """
        self.raised.clear()
        named = {**scalars, **{("flag", f): v for f, v in flags.items()}, **excesses}
        self.before, self.last = self.last, Reading.of(named, self.transfers.device)

        # The sum of rows is negative if some rank has no count.
        if self.rows is not None and self.last.event is None and not self.warned_of_rows:
            total = float(flags["rows"])
            if total >= 0 and total != self.rows * self.comm.mesh.size:
                self.warned_of_rows = True
                warnings.warn(_ROWS.format(self.rows, total / self.comm.mesh.size), stacklevel=5)

        # Do not wait for numbers that a device has not computed yet: those of the step before are there.
        if excesses:
            check_limits((self.last if self.last.event is None else self.before).numbers())
        return self.last


class Runner:
    """A runner of a cache's programs on ranks. On a simulated mesh the ranks are threads that share it."""

    def __init__(self, cache: ProgramCache):
        self.cache, self.mesh = cache, cache.mesh
        self.options, self.optimizer = cache.options, cache.optimizer
        self.compares_replicas = True
        # The axes whose ranks compute parts of the same rows.
        self._part_axes = self.mesh.ordered(set(self.mesh.names) - set(self.mesh.data_axes))
        self._ranks: dict[int, RankState] = {}
        # The specs, and the shapes, dtypes and devices of the last blocks that were checked against them.
        self._checked: tuple[Any, list[Any]] = None, []
        compiled = is_compiled(self.options.update, self.options.backend, self.mesh.device_type)
        self._compiled = CompiledUpdates(self.options.inductor) if compiled else None

    @property
    def rank(self) -> RankState:
        """The state of this rank. The first use of it connects to the other ranks, which is a collective."""
        if self.mesh.rank not in self._ranks:
            comm = connection(self.mesh, timeout=self.options.timeout)
            self._ranks[self.mesh.rank] = RankState(comm, Transfers(self.mesh.device))
        return self._ranks[self.mesh.rank]

    def prepare(self, params: Any, batch: Arguments, seed: int, step: int) -> tuple[Bound, dict[str, Any]]:
        """Return this rank's binding of the program of a batch, and the environment that it starts from.

        The first time, ranks agree on the step, and the program is compiled and bound.
        """
        # Compare what ranks were given, before a difference becomes a deadlock or a wrong number.
        if self._part_axes:
            self._compare_rows(batch)

        # Find the program.
        lowered, rank = self.cache.get(batch), self.rank
        if self.options.micro_rows is not None and self.mesh.size > 1:
            compare_micros(rank.comm, lowered.options.accumulate)

        # Check what it is to run on.
        blocks = self._check_blocks(params)
        tensors, whole = self.cache.tensors(lowered, batch)
        # Rows are compared over ranks where the loss is a mean over them, and all leaves have the same
        # number.
        counts = {v.shape[0] for n, v in tensors.items() if n not in whole and v.dim()}
        is_mean_of_rows = self.cache.trains and lowered.program.outputs.count is None
        rank.rows = counts.pop() if is_mean_of_rows and len(counts) == 1 else None

        # The first time: agree on the program, compile it and bind it.
        bound = rank.bound.get((id(lowered), rank.observer))
        if bound is None:
            if rank.agreement is None:
                self._agree(lowered, blocks, full_checksums(params), seed, step, rank.rows)
            lowered.compile()
            bound = self._bind(lowered)
        return bound, self._make_inputs(lowered, blocks, tensors, whole, seed, step)

    def count(self, bound: Bound, env: Mapping[Any, Tensor]) -> float | None:
        """Count a Mean's items on all ranks, if a hook or a backward of `fn`'s has to know. A collective."""
        if bound.counting is None:
            return None
        program, parts = bound.lowered.program, bound.lowered.options.accumulate

        # Run the graph that counts on each micro-batch; leaves have one name for all of them.
        mine = 0.0
        names = [i.value_name for i in (program.traced or program).inputs]
        for micro in range(parts) if parts > 1 else [None]:
            with torch.no_grad():
                values = [env.get(n.of(micro), env.get(n)) for n in names]
                mine += float(replay(bound.counting, values)[0])
        every = self.rank.comm.gather_object(repr(mine))

        # Ranks along the other axes count the same items, and are left out.
        ranks = self.mesh.group_ranks(averaged_axes(self.cache.specs.stored.values(), self.mesh))
        return sum(float(every[rank]) for rank in ranks)

    def _compare_rows(self, batch: Arguments) -> None:
        """Compare the rows of ranks that compute parts of the same, at steps 1, 2, 4, 8, ...

        A forward compares at its first call alone: ranks along a data axis may call it as often as they have
        batches, and would otherwise come to different collectives.
        """
        rank = self.rank
        rank.calls += 1
        if rank.calls == 1 or (self.cache.trains and rank.calls & (rank.calls - 1) == 0):
            check_leaves(batch, values=True)
            compare_rows(rank.comm, self._part_axes, texts_of(batch))

    def _agree(
        self, lowered: Lowered, blocks: Mapping[str, Tensor], given: Mapping[str, int], seed: int, step: int,
        rows: int | None,
    ) -> None:  # fmt: skip
        """Compare, at the first step, what ranks run and hold; ranks of a host compile a share each.

        A collective.

        Args:
            given: checksums of the full leaves that blocks were cut out of, by path.
            rows: the number of rows of this rank's batch, where all ranks must have as many; else None.
        """
        # Compare the programs, and all that must be alike besides.
        rank, specs = self.rank, self.cache.specs
        settings = {"accumulate": str(lowered.options.accumulate)}
        if self.cache.trains and self.mesh.size > 1:
            settings |= texts_to_compare(self.optimizer, specs, self.options, seed, step)
        items, compiled = items_of(lowered.program), lowered.compiled is not None
        rank.agreement = check_agreement(rank.comm, lowered.communication(), settings, items, compiled, rows)

        # Making a group is a collective of all ranks, and stages come to their collectives in different
        # orders: all groups are made here.
        if self.mesh.stages > 1:
            groups, pairs = set(), set()
            for stage, schedule in enumerate(lowered.schedules):
                issued = [line for line in schedule.instructions if line.lane == COMMUNICATION]
                groups |= {line.axes_of(schedule) for line in issued}
                pairs |= {(stage, line.stage) for line in issued if isinstance(line, Send)}
            rank.comm.open_groups(groups, pairs)
        if self.compares_replicas:
            compare_values(rank.comm, blocks, specs.stored, given)

        # Ranks that compute parts of the same rows must close over the same tensors.
        constants = lowered.program.constants
        if self._part_axes and constants:
            closed_over = {}
            for name, value in constants.items():
                text = f"a tensor {list(value.shape)} that `fn` closes over, {name},"
                closed_over[text] = str(checksum(value))
            compare_rows(rank.comm, self._part_axes, closed_over)

        # Processes of one host share Inductor's cache on disk, so that each compiles a share. Accelerators do
        # not: the cache has entries of its own for each device.
        is_shared = (self.mesh.kind, self.mesh.device_type) == ("group", "cpu")
        if is_shared and self.options.backend != "eager" and not rank.agreement.compiled:
            lowered.compile_share()
            rank.comm.gather_object("")  # wait until all shares are in the cache

    @contextmanager
    def watching(self, observer: Watch) -> Iterator[None]:
        """Bind the steps that this rank runs in here with an observer; keep the latest observer's binding."""
        rank = self.rank
        rank.bound = {k: v for k, v in rank.bound.items() if k[1] in (None, observer)}
        before, rank.observer = rank.observer, observer
        try:
            yield
        finally:
            rank.observer = before

    def _bind(self, lowered: Lowered) -> Bound:
        """Bind a compiled step to this rank, and drop the bindings of programs that are no longer kept."""
        # Give the schedule all that it runs with.
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

        def run_in_modes(env: dict[str, Any]) -> dict[str, Any]:
            try:
                check_autocast()
                with deterministic(lowered.options.deterministic):
                    return run(env)
            except torch.OutOfMemoryError as error:  # the prediction knows nothing of others' tensors
                error.add_note(describe_peak(lowered.memory_analysis(), ", by the plan"))
                raise

        # Keep the binding with those of the programs that the cache still has.
        bound = Bound(lowered, run_in_modes, scalars, make_count_graph(lowered.program))
        known = {id(each) for each in self.cache.programs.values()}
        bindings = {k: v for k, v in rank.bound.items() if k[0] in known}
        rank.bound = bindings | {(id(lowered), rank.observer): bound}
        return bound

    def _check_blocks(self, params: Any) -> dict[str, Tensor]:
        """Check this rank's stored blocks, and return them by path, in the order of the specs."""
        resolved, (checked_specs, checked_forms) = self.cache.specs, self._checked
        specs, structure = resolved.stored, resolved.structure
        blocks, tree_form = tree.flatten(params)
        # Compare their forms at every step, and not identities: a tensor's `.data` may have been assigned.
        forms = [(v.shape, v.dtype, v.device) if isinstance(v, Tensor) else type(v) for v in blocks]
        is_checked = tree_form == structure and checked_specs is specs and checked_forms == forms
        if not is_checked or resolved.complex:
            named = resolved.blocks_of(params)
            if not is_checked:
                compare_paths(specs, named)
                resolved.check_constants(params)
                check_blocks(specs, named, self.mesh)
                if tree_form == structure:
                    self._checked = specs, forms
            blocks = [named[p] for p in specs]

        # A schedule writes in place, which torch refuses for what requires grad.
        return dict(zip(specs, [v.detach() if v.requires_grad else v for v in blocks], strict=True))

    def _make_inputs(
        self,
        lowered: Lowered,
        blocks: Mapping[str, Tensor],
        tensors: Mapping[str, Tensor],
        whole: set[str],
        seed: int,
        step: int,
    ) -> dict[str, Any]:
        """Make the environment that a schedule starts from: stored blocks, batch, constants and keys."""
        mesh, parts, program = self.mesh, lowered.options.accumulate, lowered.program
        names = lowered.names

        # The batch, cut into micro-batches.
        values = {n: copy_to_device(v, mesh.device).contiguous() for n, v in tensors.items()}
        env: dict[str, Any] = {}
        for micro, part in enumerate(cut_batch(values, whole, parts)):
            index = micro if parts > 1 else None
            env |= {ValueName(Kind.BATCH, n, micro=index): v for n, v in part.items()}

        # Leaves, constants, this rank's places along axes, and a key for each random op.
        env |= {n: blocks[n.path] for n in lowered.schedule.inputs if n.kind is Kind.STORED}
        env |= {ValueName(Kind.CONSTANT, n): v for n, v in program.constants.items()}
        for axis in names["axis"]:
            index = torch.full((), mesh.coordinate()[axis], dtype=torch.int64, device=mesh.device)
            env[ValueName(Kind.AXIS, axis)] = index
        if names["key"]:
            for micro in range(parts):
                index = micro if parts > 1 else None
                keys = derive_keys(seed, step, mesh.data_rank, micro, len(names["key"]))
                keys = copy_to_device(keys, mesh.device).unbind(0)
                for name, key in zip(names["key"], keys, strict=True):
                    env[ValueName(Kind.KEY, name, micro=index)] = key
        return env
