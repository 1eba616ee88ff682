"""Make a `Step`, a compiled, sharded training step, from a pure function and its specs (`shard_step`).

`shard_forward` makes a forward without a backward, and `lockstep` is for ranks whose data end at different
steps.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fnshard import tree
from fnshard.compiler.ir.values import CONTROL, LOSS_TANGENT, SCALARS, Kind, slots
from fnshard.compiler.lower import Front
from fnshard.compiler.options import StepOptions, read_options, takes_options
from fnshard.compiler.update.family import families_of
from fnshard.compiler.update.slot_shapes import Slots, slot_blocks, slot_shapes
from fnshard.errors import OptimizerError, SpecError, StateError, leaves
from fnshard.functional import make_functional
from fnshard.layout.resolved import ResolvedSpecs, compare_paths
from fnshard.layout.spec import averaged_axes, is_here
from fnshard.losses import Mean
from fnshard.mesh import Mesh, make_mesh
from fnshard.optim.loss_scale import LossScale, exact_seed
from fnshard.optim.optimizer import Optimizer
from fnshard.optim.optimizers import check_kind
from fnshard.runtime.executor.context import Watch
from fnshard.runtime.executor.control import StepControl
from fnshard.runtime.executor.scalars import gradient_factor
from fnshard.runtime.readback import Reading
from fnshard.runtime.tiers import check_directory
from fnshard.step.cache import ProgramCache
from fnshard.step.lowered import CompileStats, Lowered
from fnshard.step.optimizer_state import check_slots, init_slots
from fnshard.step.programs import name_of
from fnshard.step.rounding import warn_of_lost_updates
from fnshard.step.runner import Bound, Runner
from fnshard.step.settings import FLAGS, loss_scale_of
from fnshard.step.shards import (
    blank_params,
    blank_slots,
    check_blocks,
    check_seed,
    foreign_block,
    init_params,
    narrow_to_storage,
)
from fnshard.step.state import Metrics, TrainState, check_state, read_rng

__all__ = ["Forward", "Step", "lockstep", "shard_forward", "shard_step"]

T = TypeVar("T")


class Compiled:
    """A base of steps and forwards, which keeps their programs by batch and runs them on ranks."""

    def __init__(self, cache: ProgramCache):
        self.mesh, self.options = cache.mesh, cache.options
        self._cache, self._runner = cache, Runner(cache)

    @property
    def compile_stats(self) -> CompileStats:
        """The number of programs that were traced, and of kernels that were compiled."""
        return self._cache.stats

    def gather_strings(self, text: str) -> list[str]:
        """Return one small string of every rank, by rank. A collective, for what no step can carry."""
        return self._runner.rank.comm.gather_object(text)


class Step(Compiled):
    """A compiled training step; made by `shard_step`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        specs: Any,
        mesh: Mesh,
        optimizer: Optimizer | None,
        options: StepOptions,
    ):
        check_kind(optimizer)
        super().__init__(ProgramCache(fn, specs, mesh, options, optimizer))
        self.optimizer = optimizer
        self._chosen_scale: LossScale | None = None
        self._checked_slots: Any = None
        self._warned_of_nan = self._checked_optimizer = False
        self._check_optimizer()

    def __repr__(self) -> str:
        name, shapes = name_of(self.fn), len(self._cache.programs)
        return (
            f"Step({name}, {leaves(len(self.resolved.stored))} on mesh {self.mesh}, {self.optimizer!r}, "
            f"{self.options.backend}, {shapes} batch {'shape' if shapes == 1 else 'shapes'} lowered)"
        )

    @property
    def fn(self) -> Callable[..., Any]:
        """The function that `shard_step` was given."""
        return self._cache.fn

    @property
    def specs(self) -> Any:
        """The spec tree, resolved as soon as a tree of full leaves was seen."""
        return self._cache.specs.tree

    @property
    def resolved(self) -> ResolvedSpecs:
        """The specs of leaves and of stored tensors, by path."""
        return self._cache.specs

    def resolve(self, params: Any) -> None:
        """Complete handwritten specs from a tree of full leaves.

        Raises:
            SpecError: the tree has other leaves, or the specs do not fit the mesh.
        """
        self._cache.resolve(params)

    def init(self, source: Any, *, seed: int | None = None) -> Any:
        """Make the state before the first step; each rank makes only its own shards.

        The values do not depend on the mesh; if a rank has others, the first step raises an error. Without an
        optimizer, there is no state but the parameter shards.

        Args:
            source: an `nn.Module` built under `fs.deferred()`, whose leaves are made as its constructor says:
                random numbers are functions of the seed, the leaf's path and the element's place; or a
                module with values; or a full tree of values.
            seed: the seed of these values, and of the random ops of all steps to come; default 0. With a
                module that has values, which it would not change, it is an error; with a tree, it is the seed
                of the steps.

        Raises:
            StateError: leaves have no values, or nothing uses the seed.
        """
        self.resolve(make_functional(source)[1] if isinstance(source, nn.Module) else source)
        specs, disk_dir = self.resolved.leaves, self.options.disk_dir
        check_directory(disk_dir, [p for p, s in specs.items() if "disk" in (s.memory, s.optimizer_memory)])
        trains = self.optimizer is not None
        shards = init_params(source, self.resolved, self.mesh, seed=seed, disk_dir=disk_dir, trains=trains)
        return self._begin(shards, seed or 0)

    def adopt(self, blocks: Any, *, seed: int = 0) -> Any:
        """Make the state before the first step from parameters that are sharded already; it takes them over.

        Without an optimizer the blocks are returned unchanged.

        Args:
            blocks: a tree of this rank's stored blocks, as `fs.hf.load` and `fs.shard` give.
            seed: the seed of the random ops of all steps to come.

        Raises:
            StateError: the blocks are of another mesh or spec, or the seed is no int64.
        """
        check_seed(seed)
        self._cache.follow(blocks)
        named, specs = self.resolved.blocks_of(blocks), self.resolved.stored
        compare_paths(specs, named)
        check_blocks(specs, named, self.mesh)
        check_directory(self.options.disk_dir, [p for p, s in specs.items() if s.optimizer_memory == "disk"])
        return self._begin(blocks, seed)

    def _begin(self, shards: Any, seed: int) -> Any:
        """Make the first state from parameter shards."""
        if self.optimizer is None:
            return shards
        self._check_optimizer()
        resolved, mesh, disk_dir = self.resolved, self.mesh, self.options.disk_dir
        blocks = resolved.blocks_of(shards)
        # Master copies are taken before the stored blocks lose their digits.
        slots = init_slots(self.optimizer, blocks, resolved.stored, mesh, mesh.rank, disk_dir)
        shards = narrow_to_storage(shards, resolved, mesh, disk_dir)
        step, number = torch.zeros((), dtype=torch.int64), torch.tensor(seed, dtype=torch.int64)
        return self._make_state(step, shards, slots, number)

    def blank(self, specs: Any) -> TrainState:
        """Make a state of zeros for a restore to fill in, laid out and stored as this step's states are.

        Args:
            specs: the step's specs with the shapes of their leaves, if the step has not seen these yet.

        Raises:
            StateError: there is no optimizer, so there is no state; or there is no room on disk.
        """
        if self.optimizer is None:
            raise StateError(
                "this step has no optimizer, so it has no TrainState.", fix="ask for parameters alone."
            )
        self._cache.adopt(specs)
        self._check_optimizer()
        specs, mesh = self.resolved.stored, self.mesh
        params = blank_params(specs, mesh, self.options.disk_dir)
        slots = blank_slots(self._slots, specs, mesh, self.options.disk_dir)
        step, seed = (torch.zeros((), dtype=torch.int64) for _ in range(2))
        return self._make_state(step, self.resolved.tree_of(params), slots, seed)

    def _make_state(self, step: Tensor, blocks: Any, slots: Any, seed: Tensor) -> TrainState:
        """Make a state with a fresh loss scale, which knows its specs, its mesh and its slots' shapes."""
        shapes = slot_shapes(self.optimizer, self.resolved.stored)
        where = (self.specs, self.mesh)
        return TrainState(step, blocks, slots, self._scale.init(), seed, where=where, slot_shapes=shapes)

    def lower(self, params: Any, /, *batch: Any, **keywords: Any) -> Lowered:
        """Lower the step for this batch, on paper; `params` and `batch` may be real, meta or fake.

        This needs neither devices nor a process group.

        Args:
            params: a tree of full leaves, or a state.
            batch, keywords: this rank's slice, passed as `fn` takes it.
        """
        if not isinstance(params, TrainState):
            self.resolve(params)
            self._check_optimizer()
        return self._cache.lower(self._cache.arguments(batch, keywords))

    def __call__(self, state: Any, /, *batch: Any, rng: Any = None, **keywords: Any) -> Any:
        """Run one step; see `shard_step` for what comes in and goes out.

        Args:
            batch, keywords: this rank's slice, by position or by keyword, as `fn` takes it. Ranks along a
                tensor or context axis take the same whole rows, bit for bit: they compare checksums of these
                at calls 1, 2, 4, 8, ...
            rng: without an optimizer, the (seed, step) that random ops draw from, (0, 0) by default.
                With one, the state holds them, and `rng` is an argument of `fn`.

        Raises:
            StateError: the state is consumed, blocks are of another mesh or spec, or `fn` does not take the
                batch, or micro-batching cannot cut it.
            AgreementError: at the first step, ranks hold different programs, or were given different
                parameters; or ranks that split the same rows got different ones.
            CollectiveError: a peer died or stayed silent.
        """
        # Check the state, and take the numbers that it holds.
        training = check_state(state, self.optimizer is not None, self._cache.specs.stored)
        params = state.params if training else state
        self._cache.follow(params)
        seed, number = (int(state.seed), int(state.step)) if training else read_rng(rng)
        if training:
            if rng is not None:
                keywords["rng"] = rng
            self._check_slots(state.opt_state)
            self._scale.check(state.loss_scale)

        # Find the program of this batch, and the values that it starts from, except the scale of gradients.
        passed = self._cache.arguments(batch, keywords)
        bound, env = self._runner.prepare(params, passed, seed, number)

        # The backward starts from the loss scale over the number of parts. A short dtype would round that, so
        # it starts from a power of two there, and norm and updates are scaled by the remaining factor.
        scale, program = self._scale.scale(state.loss_scale if training else {}), bound.lowered.program
        loss = program.results[program.outputs.loss].meta["val"]
        divisor = self._find_divisor(bound, env)
        start, remainder = exact_seed(float(scale) / divisor, loss.dtype)
        env[LOSS_TANGENT] = torch.full((), start, dtype=loss.dtype, device=self.mesh.device)

        # The factor is complete when the step's scalars are known, on which skipping depends too.
        control = StepControl(
            gradient_factor=lambda summary: gradient_factor(
                summary, remainder / float(scale), divisor, self.mesh.device
            ),
            skip_if=(lambda s: not bool(torch.isfinite(s.norm))) if self._scale.dynamic else None,
            flags=self._runner.rank.reports,
        )
        if not training:
            return self._collect_gradients(bound, bound.run(env | {CONTROL: control}))

        # From here on the tensors of the state are written to.
        state = state.consume()
        env |= zip(slots(state.opt_state), state.opt_state.values(), strict=True)
        env[CONTROL] = control.with_count(torch.tensor(self._scale.updates(number, state.loss_scale)))
        names = [n for n in bound.lowered.schedule.inputs if n.kind is Kind.STORED]
        before = {n.path: env[n] for n in names}
        env = bound.run(env)

        # Ranks that share memory move their blocks to where all of them read the leaves.
        stored = {n.path: env[n] for n in names}
        moved = self.resolved.as_seen({p: v for p, v in stored.items() if v is not before[p]})
        if moved:
            named, form = tree.flatten_with_paths(state.params)
            state = state.replace(params=tree.unflatten([moved.get(p, v) for p, v in named.items()], form))
        return self._advance(state, bound, env, stored)

    def watching(self, observer: Watch) -> AbstractContextManager[None]:
        """Let an observer see the steps that this rank runs in here, instruction by instruction.

        The step is bound a second time for this, with the same kernels; outside of the context it runs as
        before. Inside, the caller's thread runs the updates on the host.

        Args:
            observer: a function that is called once for each instruction, with its line number, the
                instruction and the action that executes it on an environment of values by name. What it
                returns is run in the action's place. Entered again with the same observer, the step is not
                bound again.

        >>> def observer(number, line, action):
        ...     def run(env):
        ...         print(number, line.verb)
        ...         action(env)
        ...     return run
        """
        return self._runner.watching(observer)

    def front(self, *batch: Any, **keywords: Any) -> Front:
        """Return the program of this rank's slice of a batch, cut into segments.

        This is the part of a lowering that no layout or option changes.
        """
        return self._cache.front(self._cache.arguments(batch, keywords))

    def replay(self, **options: Any) -> Step:
        """Make a second step of the same function, to run a state through again; this one stays as it is.

        Args:
            options: fields of `StepOptions` to change.
        """
        other = Step(self.fn, self.specs, self.mesh, self.optimizer, replace(self.options, **options))
        if other.options == self.options:  # it runs the very kernels of this one
            other._cache.share(self._cache)
        other._runner.rank.agreement = self._runner.rank.agreement
        other._runner.compares_replicas = False  # a replica may hold the NaN that is looked for
        other._warned_of_nan = True  # whoever replays the step reports the NaN
        return other

    def raise_flag(self, flag: str) -> None:
        """Raise a flag ("out_of_data", "stop"), which all ranks see after the step after the next one.

        Raises:
            StateError: there is no such flag.
        """
        if flag not in FLAGS:
            raise StateError(f"flag {flag!r} is not one of {', '.join(FLAGS)}.")
        self._runner.rank.raised.add(flag)

    def clear_flag(self, flag: str) -> None:
        """Lower a flag on this rank, and forget what is known of it on others."""
        rank = self._runner.rank
        rank.raised.discard(flag)
        rank.before, rank.last = (r.without(("flag", flag)) for r in (rank.before, rank.last))

    def flag_raised(self, flag: str) -> bool:
        """Return whether any rank had raised the flag when the step before the last one began.

        The answer is the same on all ranks. It comes a step late, since the last step may be under way on a
        device, and nothing here waits for it.
        """
        return self._runner.rank.before.numbers().get(("flag", flag), 0.0) > 0

    @property
    def latest(self) -> Reading:
        """The numbers of this rank's latest step; each step has a new object."""
        return self._runner.rank.last

    @cached_property
    def _slots_of_all(self) -> Slots:
        """The shapes and dtypes of the optimizer state of all stages' leaves."""
        return slot_blocks(self.optimizer, self.resolved.stored, self.mesh)

    @property
    def _slots(self) -> Slots:
        """The slots of the leaves that this rank's stage has; simulated ranks share a step, which has all."""
        specs = self.resolved.stored
        return {p: own for p, own in self._slots_of_all.items() if is_here(specs[p], self.mesh)}

    def _check_optimizer(self) -> None:
        """Refuse an optimizer that may not update these leaves; warn where its updates are lost.

        This is done once, as soon as the leaves are known.
        """
        if self.optimizer is None or not self.resolved.complete or self._checked_optimizer:
            return
        specs = self.resolved.stored
        for path in filter(self.resolved.complex.__contains__, self.resolved.trainable):
            # A rule that looks at shapes would see pairs, [..., 2], where its author sees complex numbers.
            *shape, pair = specs[path].shape
            if self.optimizer.of(path, (*shape, pair)) is not self.optimizer.of(path, shape):
                raise OptimizerError(
                    f"{self.optimizer} chooses by shapes of real leaves, and params[{path!r}] is complex.",
                    fix=f"({path!r}, fs.optim.adamw(3e-4)) as a rule of fs.optim.by_path(...).",
                )
        families_of(self.optimizer, specs, self.mesh)  # it refuses an optimizer that cannot be traced
        if self.mesh.rank == 0:
            warn_of_lost_updates(self.optimizer, specs)
        self._checked_optimizer = True

    @property
    def _scale(self) -> LossScale:
        """The loss scale, which depends on the dtypes of leaves, and is fixed once all leaves are known."""
        if self._chosen_scale is None or not self.resolved.complete:
            self._chosen_scale = loss_scale_of(self.optimizer, self.resolved, self.options)
        return self._chosen_scale

    def _find_divisor(self, bound: Bound, env: dict[str, Any]) -> float:
        """Return what gradients are divided by on the way: the number of parts, a Mean's count or bound."""
        if bound.lowered.program.outputs.count is None:
            ranks = self.mesh.axes_size(averaged_axes(self.resolved.stored.values(), self.mesh))
            return float(ranks * bound.lowered.options.accumulate)
        return self._runner.count(bound, env) or float(self._runner.rank.agreement.items)

    def _check_slots(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Refuse an optimizer state of another step, leaf by leaf where it is not the one seen before."""
        forms = [(p, n, v.shape, v.dtype, v.device) for p, own in state.items() for n, v in own.items()]
        if self._checked_slots != (list(state), forms):  # it has another form than was checked leaf by leaf
            check_slots(state, self._slots, self.resolved.stored, self.mesh)
            self._checked_slots = list(state), forms

    def _collect_gradients(self, bound: Bound, env: dict[str, Any]) -> Any:
        """Collect the loss, any `aux`, and the gradients of a step without an optimizer."""
        summary, control = env[SCALARS], env[CONTROL]
        self._runner.rank.finish_step({}, summary.flags, summary.excesses)
        factor = control.gradient_factor(summary)

        # Collect the gradients of this rank's leaves, and empty ones for leaves of other stages.
        blocks: dict[str, Tensor] = {}
        for name in bound.lowered.schedule.reduced.values():
            blocks |= env[name].blocks
        grads: dict[str, Tensor] = {}
        for path, block in blocks.items():
            scaled = block if factor is None else block * factor.to(block.device)
            grads[path] = scaled.to(self.resolved.stored[path].storage_dtype)
        for path in self.resolved.trainable:
            spec = self.resolved.stored[path]
            if not is_here(spec, self.mesh):
                grads[path] = foreign_block(replace(spec, memory="device"), self.mesh)

        # The loss has the dtype in which `fn` returned it.
        loss = summary.loss.to(env[LOSS_TANGENT].dtype)
        self._warn_if_not_finite("without an optimizer", loss, list(grads.items()), "gradients")

        # Give them the tree that `fn` sees.
        aux = bound.scalars.aux_tree(summary, env)
        grads, structure = self.resolved.as_seen(grads), self.resolved.structure.of_gradients
        ordered = map(grads.get, self.resolved.stored)
        value = loss if aux is None else (loss, aux)
        return value, tree.unflatten(ordered, structure)

    def _advance(
        self, state: TrainState, bound: Bound, env: dict[str, Any], stored: Mapping[str, Tensor]
    ) -> tuple[TrainState, Metrics]:
        """Return the state after a step, and its metrics.

        Args:
            state: the state that the step has consumed.
            env: the values that the schedule has left.
            stored: the blocks of parameters by path, for a look at whether they are finite.
        """
        summary, control = env[SCALARS], env[CONTROL]
        loss_scale = self._scale.after(state.loss_scale, control.skip)

        # Collect the metrics, which are still on the device.
        metrics = Metrics(loss=summary.loss)
        if summary.norm is not None:
            factor = control.gradient_factor(summary)
            metrics["grad_norm"] = summary.norm if factor is None else summary.norm * factor
        metrics.update(self.optimizer.values(control.step), **self._scale.metrics(loss_scale))
        aux = bound.scalars.aux_tree(summary, env)
        if aux is not None:
            metrics["aux"] = aux

        # A norm shows gradients that are not finite. Where there is none, the parameters show them.
        number = int(state.step)
        if summary.norm is not None:
            norm = [("grad_norm", metrics["grad_norm"])] if self.mesh.rank == 0 else []
            self._warn_if_not_finite(f"step {number}", summary.loss, norm, "gradients")
        else:
            blocks = self._select_blocks(stored, whole=number & (number - 1) == 0)
            self._warn_if_not_finite(f"step {number}", summary.loss, blocks, "parameters after its update")

        rank = self._runner.rank
        metrics.with_reading(rank.finish_step(metrics.scalars(), summary.flags, summary.excesses))
        # A skipped step is a step (its batch and its random numbers are used up) and no update.
        return state.replace(step=state.step + 1, loss_scale=loss_scale), metrics

    def _select_blocks(self, stored: Mapping[str, Tensor], whole: bool) -> Sequence[tuple[str, Tensor]]:
        """Select the parts of this rank's blocks that a step checks, of leaves that train and are in memory.

        Reading all of the blocks takes a hundredth of a step, so steps 0, 1, 2, 4, 8, ... do it. The other
        steps read small blocks, and the first row and column of large ones: numbers that are not finite in an
        activation's gradient make whole rows or columns of a weight so. What these steps miss, the next loss
        shows.

        Args:
            whole: whether all of each block is read.
        """
        if self.mesh.device_type != "cpu":
            return ()
        specs = self.resolved.stored
        trained = [p for p in self.resolved.trainable if p in stored]
        blocks = [(p, stored[p]) for p in trained if specs[p].memory != "disk"]
        if whole:
            return blocks
        return [(path, line) for path, block in blocks for line in _sample_lines(block)]

    def _warn_if_not_finite(
        self, where: str, loss: Tensor, values: Sequence[tuple[str, Tensor]], what: str
    ) -> None:
        """Warn, once, of a finite loss beside values that are not finite, or of the loss that follows these.

        Values are read on the CPU alone, where nothing has to wait for that. A dynamic loss scale skips such
        a step, so that there is no warning of it.
        """
        if self.mesh.device_type != "cpu" or self._warned_of_nan or self._scale.dynamic:
            return

        # A loss that is not finite shows what an earlier step missed.
        rank = self._runner.rank
        before, rank.was_finite = rank.was_finite, math.isfinite(loss)
        if not rank.was_finite:
            if before and self.mesh.rank == 0:
                self._warn_of_nan(f"{where}: the loss is {float(loss):.6g}, and the one before was finite.")
            return

        # The loss is finite: check the values by a sum of each large block, and one of all small blocks, for
        # which a call each would take longer.
        floats = [(n, v) for n, v in values if v.is_floating_point() and v.element_size() > 1]
        sums = [v.detach().sum(dtype=torch.float32) for _, v in floats if v.numel() > SMALL]
        small = [v.detach().flatten() for _, v in floats if v.numel() <= SMALL]
        if small:
            sums.append(torch.cat(small).sum(dtype=torch.float32))
        if not sums or bool(torch.isfinite(torch.stack(sums)).all()):
            return

        # A sum shows NaN and inf in one read. It may also overflow by itself, so the values are read again.
        ill = list(dict.fromkeys(n for n, v in floats if not bool(torch.isfinite(v).all())))
        if ill:
            named = ", ".join(ill[:3])
            if len(ill) > 3:
                named += " and others"
            self._warn_of_nan(
                f"{where}: the loss is {float(loss):.6g}, and its {what} are not finite: {named}."
            )

    def _warn_of_nan(self, found: str) -> None:
        """Warn, with the call that finds where the first NaN came from."""
        self._warned_of_nan = True
        if self.optimizer is None:
            remedy = "fs.debug.nan_hunt(step, params, batch) after it names where that began."
        else:
            remedy = "kept = state.copy() before the step, and "
            remedy += "fs.debug.nan_hunt(step, kept, batch) after it names where that began."
        warnings.warn(f"{found} {remedy}", stacklevel=5)


SMALL = 4096  # a block of so many numbers is read whole


def _sample_lines(block: Tensor) -> Sequence[Tensor]:
    """Return a small block whole; of a large one, the first row and column, of each matrix of a stack."""
    if block.numel() <= SMALL or block.dim() < 2:
        return (block,)
    if block.dim() > 3:  # a convolution's weight
        return block[0], block[(slice(None), *[0] * (block.dim() - 1))]
    return block.select(-1, 0), block.select(-2, 0)


@takes_options
def shard_step(
    fn: Callable[..., Any],
    specs: Any,
    *,
    mesh: Mesh | None = None,
    optimizer: Optimizer | None = None,
    **options: Any,
) -> Step:
    """Compile `fn(params, *batch) -> loss` and its specs into a sharded step.

    Without an optimizer `step(params, *batch) -> (loss, grads)`, where `grads` are laid out as
    `LayoutSpec.gradient` says: it is a sharded `torch.func.grad_and_value` (with aux, it returns
    `((loss, aux), grads)`). With one, `step(state, *batch) -> (state, metrics)`; see `Step.init`.

    Args:
        fn: a function written for one device and full shapes, which returns a 0-d loss or `Mean`, or
            `(loss, aux)`. It may read numbers, flags and tensors that are no arguments; for other values it
            is traced again. What it writes to leaves that do not train is state: micro-batches hand it on,
            and the step stores it (without an optimizer, in `params`); `LayoutSpec.aggregation` joins what
            ranks have written.
        specs: a tree of `LayoutSpec`, from `match_specs` or a preset.
        mesh: the mesh; by default, one axis "shard" over all ranks that there are.
        optimizer: an optimizer of `fnshard.optim`.
        options: the fields of `StepOptions`, which says what each of them does: `accumulate`, `remat`,
            `prefetch`, `backend`, `passes`, ... An instance is passed whole as `**options`.

    >>> import torch
    >>> from fnshard import LayoutSpec, match_specs
    >>> params = {"w": torch.ones(3)}
    >>> specs = match_specs(params, [("*", LayoutSpec())])
    >>> step = shard_step(lambda p, x: (p["w"] * x).sum(), specs, backend="eager")
    >>> step(params, torch.arange(3.0))
    (tensor(3.), {'w': tensor([0., 1., 2.])})

    Gradients have `storage_dtype`; leaves that do not train have None. To get whole gradients, call
    `fs.unshard(grads, specs, mesh, layout="gradient")`.
    """
    return Step(fn, specs, mesh or make_mesh(), optimizer, read_options("shard_step", options))


class Forward(Compiled):
    """A compiled forward; made by `shard_forward`."""

    def __init__(self, fn: Callable[..., Any], specs: Any, mesh: Mesh, options: StepOptions):
        super().__init__(ProgramCache(fn, specs, mesh, options, trains=False))

    def lower(self, params: Any, /, *batch: Any, **keywords: Any) -> Lowered:
        """Lower the forward for this batch, on paper; see `Step.lower`."""
        if isinstance(params, TrainState):
            self._cache.follow(params.params)
        else:
            self._cache.resolve(params)
        return self._cache.lower(self._cache.arguments(batch, keywords))

    def __call__(self, params: Any, /, *batch: Any, **keywords: Any) -> Any:
        """Return `fn`'s outputs for this rank's slice of the batch.

        Raises:
            FnshardError: the errors of `Step.__call__`.
        """
        # Find the program of this batch, and run it.
        blocks, seed, number = params, 0, 0
        if isinstance(params, TrainState):
            blocks, seed, number = params.params, int(params.seed), int(params.step)
        self._cache.follow(blocks)
        bound, inputs = self._runner.prepare(blocks, self._cache.arguments(batch, keywords), seed, number)
        env, lowered = bound.run(inputs), bound.lowered

        # Refuse a result beyond a limit of `fn`'s.
        outputs, results = lowered.program.outputs, lowered.segments.results
        self._runner.rank.finish_step({}, {}, {limit: env[results[limit.result]] for limit in outputs.limits})

        # Put the outputs together as `fn` returns them.
        values: list[Any] = []
        for kind, *details in outputs.aux:
            if kind == "python":  # a constant of the program
                values += details
            else:  # a tensor, or the sum and the count of a Mean
                tensors = [env[results[i]] for i in details]
                values.append(Mean(*tensors) if kind == "mean" else tensors[0])
        return tree.unflatten(values, outputs.aux_structure)


# Options of a backward and an update, which a forward refuses.
OF_TRAINING = (
    "accumulate", "micro_rows", "accumulate_mode", "micro_order", "zero_bubble_memory",
    "overlap",
    "loss_scale", "grad_norm", "remat", "save", "disk_dir",
    "update",
)  # fmt: skip


@takes_options
def shard_forward(fn: Callable[..., Any], specs: Any, *, mesh: Mesh | None = None, **options: Any) -> Forward:
    """Compile `fn(params, *batch) -> outputs` for sharded parameters.

    `forward(params, *batch)` takes this rank's stored blocks (or a TrainState) and its slice of the
    batch, and returns `fn`'s outputs for that slice: any pytree of tensors.

    Args:
        fn, specs, mesh: the arguments of `shard_step`.
        options: the fields of `StepOptions`, except those of a backward and an update.

    `forward.lower(params, *batch).compile_async()` compiles while steps run.

    >>> import torch
    >>> from fnshard import LayoutSpec, match_specs
    >>> params = {"w": torch.ones(3)}
    >>> specs = match_specs(params, [("*", LayoutSpec())])
    >>> shard_forward(lambda p, x: p["w"] * x, specs, backend="eager")(params, torch.arange(3.0))
    tensor([0., 1., 2.])
    """
    chosen, defaults = read_options("shard_forward", options), StepOptions()
    unused = [f"{name}={chosen[name]!r}" for name in OF_TRAINING if chosen[name] != defaults[name]]
    if unused:
        raise SpecError(
            "a forward has no backward and no update, and so no use for:", unused, "leave them out."
        )
    return Forward(fn, specs, mesh or make_mesh(), chosen)


def lockstep(loader: Iterable[T], step: Step) -> Iterator[T]:
    """Yield `loader`'s batches while *all* ranks have one; call `step` once for each.

    Each rank takes two batches ahead. A rank whose next batch is its last raises a flag, which travels with
    the loss of the step before, and the others see it a step later. So nobody waits for a device, and no
    collective is added, except one before the first batch. Batches that other ranks have left are not used.

        for tokens, targets in fs.lockstep(loader, step):
            state, metrics = step(state, tokens, targets)
    """
    # Take two batches ahead, and compare how many the ranks have.
    source = iter(loader)
    ahead = deque(islice(source, 2))
    fewest = min(int(text) for text in step.gather_strings(str(len(ahead))))
    step.clear_flag("out_of_data")
    try:
        while fewest:
            batch = ahead.popleft()
            ahead.extend(islice(source, 1))
            if len(ahead) < 2:
                step.raise_flag("out_of_data")
            before = step.latest
            yield batch
            if step.latest is before:
                raise StateError(
                    "the loop over lockstep went on to the next batch without a step.",
                    fix="call the step once for each batch; filter batches before lockstep sees them.",
                )
            # A rank that began with a single batch could not have told the others by a flag in time.
            if fewest == 1 or step.flag_raised("out_of_data"):
                return
    finally:
        step.clear_flag("out_of_data")  # where the loop was left early, its flag is void
