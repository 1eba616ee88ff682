"""`Lowered`: a step that was lowered but has not run, each stage of which can be printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, get_args

import torch

from fnshard.analysis.hardware import Hardware
from fnshard.analysis.memory import (
    Ledger,
    MemoryAnalysis,
    MemoryTimeline,
    SizesOfMore,
    describe_peak,
    measure,
)
from fnshard.analysis.tables import megabytes
from fnshard.analysis.timeline import HardwarePricer, Timeline, simulate, simulate_stages
from fnshard.analysis.traffic import Traffic, analyse
from fnshard.analysis.transport import TransportKind, transport_of
from fnshard.compiler.frontend.contexts import deterministic
from fnshard.compiler.frontend.indices import Indices
from fnshard.compiler.ir.program import Program
from fnshard.compiler.ir.values import ValueName
from fnshard.compiler.kernels.attention_backends import count_backends
from fnshard.compiler.kernels.inductor import Compiled, Graphs, compile_graphs, graphs_of, share_of
from fnshard.compiler.kernels.segments import Segments
from fnshard.compiler.lower import Stages
from fnshard.compiler.options import StepOptions
from fnshard.compiler.schedule.instructions import COMMUNICATION, TRANSFER, Run
from fnshard.compiler.schedule.ir import Schedule
from fnshard.compiler.schedule.together import StageLine, together
from fnshard.errors import BudgetError, SpecError, is_number
from fnshard.mesh.process_group import place_on_host
from fnshard.optim.optimizer import Optimizer
from fnshard.runtime.executor.compiled_update import is_compiled


@dataclass(eq=False)
class CompileStats:
    """A count of a step's traced programs, and of kernels that were compiled or found in PyTorch's cache."""

    traces: int = 0
    compiles: int = 0

    def __str__(self) -> str:
        return f"{self.traces} traced, {self.compiles} kernels compiled"


@dataclass(repr=False)
class Lowered:
    """A step for one batch shape, on paper: `program`, `segments`, `kernels`, `schedule`.

    Nothing has run, and nothing is compiled until `compile`. Printing it prints the schedule.

    Args:
        batch_bytes: the bytes of this rank's batch, by leaf.
        stats: the counter of what is compiled.
        first: whether no other batch was lowered before it; ranks then compile a share each.
        ledgers: the ledgers that were made, by transport, by whether the kernels were compiled, and by stage.
        ahead: the kernels that a thread compiles.
        fewer: a step of fewer of the same micro-batches, whose ledger says how large values are.
    """

    stages: Stages
    options: StepOptions
    compiled: Compiled | None = None
    optimizer: Optimizer | None = None
    batch_bytes: Mapping[str, int] = field(default_factory=dict)
    stats: CompileStats = field(default_factory=CompileStats)
    first: bool = True
    ledgers: dict[Any, Ledger] = field(default_factory=dict, init=False, repr=False)
    ahead: Future[Compiled] | None = field(default=None, init=False, repr=False)
    fewer: Lowered | None = field(default=None, repr=False)

    @property
    def program(self) -> Program:
        """The forward of `fn` as composite ATen ops."""
        return self.stages.program

    @cached_property
    def indices(self) -> Indices:
        """The tables that the program reads at integers of the batch."""
        return Indices.of(self.program)

    @cached_property
    def names(self) -> dict[str, list[str]]:
        """The names of the program's inputs by kind: "batch" leaves, random keys ("key"), and the axes along
        which ranks read their index ("axis")."""
        inputs = self.program.inputs
        return {kind: [i.name for i in inputs if i.kind == kind] for kind in ("batch", "key", "axis")}

    @property
    def segments(self) -> Segments:
        """The program, cut into segments."""
        return self.stages.segments

    @property
    def kernels(self) -> Mapping[str, Any]:
        """The distinct segments, differentiated."""
        return self.stages.kernels

    @property
    def schedule(self) -> Schedule:
        """The ordered instructions; in a pipeline, those of the stage that this rank runs."""
        return self.stages.schedule

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """The schedules of all stages; without a pipeline there is one."""
        return self.stages.schedules

    @cached_property
    def merged(self) -> list[StageLine]:
        """The lines of all stages, as (stage, line), in an order in which they can be executed."""
        return together(self.schedules)

    def communication(self) -> list[str]:
        """Return the sequence of collectives and messages with their shapes, which all ranks must agree on.

        In a pipeline it is the sequence of all stages, in the order of `merged`.
        """
        if len(self.schedules) == 1:
            return list(self.schedule.communication(shapes=True))
        # Take each stage's texts in order, at the places that its lines have among those of all stages.
        lines = [schedule.instructions for schedule in self.schedules]
        places = [(s, n) for s, n in self.merged if lines[s][n].lane == COMMUNICATION]
        texts = [iter(schedule.communication(shapes=True)) for schedule in self.schedules]
        return [f"stage {stage}: {next(texts[stage])}" for stage, _ in places]

    @property
    def attention(self) -> dict[str, int]:
        """The number of attentions of one forward by the torch kernel that they are frozen to, such as
        `{"cudnn": 12}`."""
        lines = [line for schedule in self.schedules for line in schedule.instructions]
        runs = [line for line in lines if isinstance(line, Run) and not line.of_backward]
        each = {k.name: count_backends(k.source.graph, k.forward.graph) for k in self.kernels.values()}
        return dict(sum((each[run.kernel] for run in runs), Counter()))

    def as_text(self) -> str:
        """Return the schedule, a line per instruction; in a pipeline, the schedule of each stage."""
        return "\n\n".join(schedule.as_text() for schedule in self.schedules)

    def memory_analysis(
        self, *, transport: TransportKind | None = None, stage: int | None = None
    ) -> MemoryAnalysis:
        """Return the bytes of one rank: its peak and the parts, between steps, on host and disk, by leaf.

        After `compile` with Inductor they are counted in its generated code, which includes fusion; before
        that, or with the eager backend, from the lifetimes of values in the kernels' graphs.

        Args:
            transport: "shared" (CPU ranks of one host), "p2p" or "native"; None takes the mesh's own.
            stage: the stage of a pipeline whose ranks are counted; None is the stage with the highest peak.

        Raises:
            SpecError: there is no such transport, or no such stage.
        """
        return self._find_ledger(transport, stage).analysis

    def memory_timeline(
        self, *, transport: TransportKind | None = None, stage: int | None = None
    ) -> MemoryTimeline:
        """Return the bytes by category at every instruction of the schedule, each at its worst moment."""
        return self._find_ledger(transport, stage).timeline

    def _find_ledger(self, transport: TransportKind | None = None, stage: int | None = None) -> Ledger:
        """Return the ledger of a stage; for None, that of the fullest stage."""
        kinds, stages = get_args(TransportKind), len(self.schedules)
        if transport is not None and transport not in kinds:
            raise SpecError(f"transport={transport!r}: one of {', '.join(map(repr, kinds))}, or None.")
        if stage is not None and stage not in range(stages):
            raise SpecError(f"stage={stage!r}: a number from 0 to {stages - 1}, or None for the fullest.")
        if stage is None:
            ledgers = [self._find_ledger(transport, each) for each in range(stages)]
            return max(ledgers, key=lambda ledger: ledger.analysis.peak_bytes)

        # A ledger is made once for each transport and stage, and again when the kernels are compiled.
        kind = transport or transport_of(self.schedule.mesh)
        key = kind, self.compiled is None, stage
        if key not in self.ledgers:
            self.ledgers[key] = measure(
                self.schedules[stage], self.program, self.batch_bytes, self.compiled, kind,
                self._is_update_compiled,
            )  # fmt: skip
        return self.ledgers[key]

    def sizes_of(self, stage: int) -> Mapping[ValueName, int]:
        """Return the bytes of all values of a stage, by name."""
        # They depend neither on the transport nor on the compiler, so that any ledger has them.
        known = next((ledger for key, ledger in self.ledgers.items() if key[2] == stage), None)
        if known is None and self.fewer is not None:
            return SizesOfMore(self.fewer.sizes_of(stage))
        return (known or self._find_ledger(stage=stage)).sizes

    @property
    def sizes(self) -> Mapping[ValueName, int]:
        """The bytes of all values of the step, by name; in a pipeline, those of this rank's stage."""
        return self.sizes_of(self.schedule.stage)

    def assert_fits(self, bytes: float) -> None:
        """Refuse a step whose peak on the device is above `bytes`; made for a user's own tests.

        Raises:
            BudgetError: the peak is higher; the error names the line of the peak, its biggest parts and the
                ways out.
            SpecError: `bytes` is no number above 0.
        """
        if not is_number(bytes) or bytes <= 0:
            raise SpecError(f"assert_fits({bytes!r}): a number of bytes above 0, such as 24e9.")
        analysis = self.memory_analysis()
        peak = analysis.peak_bytes
        if peak > bytes:
            detail = f", {megabytes(bytes)} MB are allowed ({megabytes(peak - bytes)} MB too many)"
            raise BudgetError(describe_peak(analysis, detail))

    def comm_analysis(self, *, stage: int | None = None) -> Traffic:
        """Return the bytes on the wire of one step by collective, axes, unit and phase, and transfers.

        `analysis["gather"]["bytes"]` counts whole buffers; see `analysis.traffic`.

        Args:
            stage: the stage of a pipeline whose ranks are counted; None is the one whose ranks send most.
        """
        analyses = []
        for each in range(len(self.schedules)) if stage is None else (stage,):
            schedule = self.schedules[each]
            # The sizes of values need a ledger, and are asked for only where something travels to the host.
            has_transfers = any(line.lane == TRANSFER for line in schedule.instructions)
            analyses.append(analyse(schedule, self.sizes_of(each) if has_transfers else {}))
        return max(analyses, key=lambda traffic: traffic.sent_bytes)

    def timeline(self, hardware: Hardware | str) -> Timeline:
        """Simulate a step on `hardware`: its time, what is exposed, MFU; see `analysis.timeline`.

        In a pipeline all stages run side by side: `Timeline.stages` has each, and `bubble` says how idle they
        are.

        Args:
            hardware: a `Hardware`, or the name of one ("h100").

        Raises:
            SpecError: it is neither.
        """
        fused, machine = self.options.backend == "inductor", Hardware.of(hardware)
        pricers = [
            HardwarePricer(schedule, machine, self.sizes_of(stage), fused, self._is_update_compiled)
            for stage, schedule in enumerate(self.schedules)
        ]
        if len(pricers) == 1:
            return simulate(pricers[0], self._count_tokens())
        return simulate_stages(pricers, self.merged, self._count_tokens())

    @property
    def _is_update_compiled(self) -> bool:
        """Whether Inductor compiles the optimizer's updates too."""
        options, device_type = self.options, self.schedule.mesh.device_type
        return self.optimizer is not None and is_compiled(options.update, options.backend, device_type)

    def _count_tokens(self) -> int | None:
        """Count the tokens of one step on all ranks; return None where that is not known.

        They are the numbers of an int64 leaf of the batch with two dims, of all micro-batches together. Where
        such leaves differ in size, it is not known which of them has the tokens.
        """
        program = self.stages.program
        named = zip(program.inputs, program.placeholders, strict=True)
        values = {each.name: node.meta["val"] for each, node in named if each.kind == "batch"}
        token_leaves = {n for n, v in values.items() if v.dim() == 2 and v.dtype == torch.int64}
        # The program has the shapes of one micro-batch, and `batch_bytes` counts all of them.
        counts = {self.batch_bytes[n] // 8 for n in token_leaves & set(self.batch_bytes)}
        return counts.pop() * self.schedule.mesh.data_size if len(counts) == 1 else None

    def compile(self) -> Lowered:
        """Compile the kernels on the options' backend, once; return this object."""
        if self.compiled is not None:
            return self
        kernels = self.kernels.values()
        # A thread may have compiled some of them, or all.
        compiled = {} if self.ahead is None else dict(self.ahead.result())
        compiled |= self.compile_graphs({k: g for k, g in graphs_of(kernels).items() if k not in compiled})
        self.compiled = compiled
        return self

    def compile_async(self) -> Lowered:
        """Compile in a thread, while steps run; return this object.

        `compile`, and the first step, wait for it, and so does a lowering that begins meanwhile: lower first
        what is compiled together. For a step's first batch, ranks of one host compile a share each, and find
        the others' kernels in PyTorch's cache when it first runs. The process ends after its threads.
        """
        if self.compiled is None and self.ahead is None:
            mesh = self.schedule.mesh
            # Ranks of a host share the entries of PyTorch's cache, unless each has a device of its own.
            is_shared = self.first and mesh.kind == "group" and mesh.device_type == "cpu"
            place, count = place_on_host() if is_shared else (0, 1)
            share = share_of(graphs_of(self.kernels.values()), place, count)
            # A new thread begins on device 0, whichever this rank's is.
            set_device = partial(torch.cuda.set_device, mesh.device) if mesh.device_type == "cuda" else None
            pool = ThreadPoolExecutor(1, "fnshard-compile", set_device)
            self.ahead = pool.submit(self.compile_graphs, share)
            pool.shutdown(wait=False)
        return self

    def compile_share(self) -> None:
        """Compile this rank's share of the kernels; the others find it in PyTorch's cache."""
        if self.compiled is None:
            self.compile_async().ahead.result()

    def compile_graphs(self, graphs: Graphs) -> Compiled:
        """Compile some of this step's graphs, and count them."""
        options = self.options
        with deterministic(options.deterministic):
            compiled = compile_graphs(graphs, backend=options.backend, options=options.inductor)
        if options.backend != "eager":
            self.stats.compiles += len(compiled)
        return compiled

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        attention = "".join(f"{n} {name} attentions, " for name, n in self.attention.items())
        state = "not compiled" if self.compiled is None else "compiled"
        return f"Lowered({self.schedule!r}, {attention}{state})"
