"""Slots: an optimizer's state and what its update takes, found by running its own code on fakes."""

from __future__ import annotations

import itertools
import math
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from fnshard.analysis.storages import INPUTS, StorageTracker, tensors_of
from fnshard.compiler.schedule.buckets import Bucket
from fnshard.compiler.schedule.instructions import OwnerWork, UpdateSums
from fnshard.compiler.schedule.ir import Schedule
from fnshard.errors import OptimizerError, StateError, leaves
from fnshard.layout.partition import block_shape, like_leaf, slot_layout
from fnshard.layout.spec import LayoutSpec
from fnshard.mesh import Mesh
from fnshard.optim.contract import Optimizer, StepInfo, setting_key, wire_dtype
from fnshard.runtime.executor.control import StepControl
from fnshard.runtime.executor.update import Updater, made_slots

Slots = Mapping[str, Mapping[str, tuple[tuple[int, ...], torch.dtype]]]


def slots_of(optimizer: Optimizer, specs: Mapping[str, LayoutSpec], mesh: Mesh) -> Slots:
    """Shapes and dtypes of the optimizer's state on this rank, by path and slot, master copies included."""
    out, wrong = {}, []
    known: dict[Any, tuple[dict[str, tuple[tuple[int, ...], torch.dtype]], list[str]]] = {}
    for path, spec in specs.items():
        if not spec.trainable:
            continue
        key = spec.shape, spec.optimizer, spec.optimizer_dtype, spec.has_master, setting_key(optimizer, path)
        if key not in known:
            own, whole = made_slots(optimizer, path, spec, mesh), made_slots(optimizer, path, spec)
            known[key] = own, _misplaced(own, whole, spec, mesh, optimizer.whole_shapes(path, spec.shape))
        out[path], odd = known[key]
        wrong += [f"params[{path!r}] {list(spec.shape)} by {spec.optimizer!r}: {what}" for what in odd]
    if wrong:
        raise OptimizerError(
            f"{optimizer} keeps state that the layout of its leaves cuts in two:", wrong[:12],
            "state of fewer numbers each (a smaller `block` of adamw_8bit), another dim to split "
            "(LayoutSpec.optimizer), or another optimizer for these: fs.optim.by_path(...).",
        )  # fmt: skip
    return out


def _misplaced(own: Any, whole: Any, spec: LayoutSpec, mesh: Mesh, whole_slots: Collection[str]) -> list[str]:
    """What of a block's state is no block of the whole leaf's; but for slots that are not made of blocks."""
    out = []
    for name in (own.keys() | whole.keys()) - set(whole_slots):
        (shape, dtype), mine = whole.get(name, ((), None)), own.get(name, ((), None))
        layout = like_leaf(shape, spec.shape, spec.optimizer, mesh)
        if layout is None or mine != (block_shape(shape, layout, mesh), dtype):
            out.append(f"{name} is {list(shape)} of the leaf, {list(mine[0])} of a block")
    return sorted(out)


def check_slots(
    state: Mapping[str, Mapping[str, torch.Tensor]],
    expected: Slots,
    specs: Mapping[str, LayoutSpec],
    mesh: Mesh,
) -> None:
    """Refuse optimizer state that this optimizer and these specs would not have made, all at once."""
    wrong = [f"{p!r}: has state and none is wanted" for p in state if p not in expected]
    for path, slots in expected.items():
        found = state.get(path, {})
        if found.keys() != slots.keys():
            has, wants = (", ".join(sorted(s)) or "none" for s in (found, slots))
            wrong.append(f"{path!r}: has slots {has}; wanted are {wants}")
            continue
        where = mesh.device_type if specs[path].optimizer_memory == "device" else "cpu"
        for name, (shape, dtype) in slots.items():
            value = found[name]
            if value.shape != shape or value.dtype != dtype or value.device.type != where:
                given = f"{list(value.shape)} {value.dtype} on {value.device.type}"
                wrong.append(f"{path!r}: {name} is {given}; wanted is {list(shape)} {dtype} on {where}")
    if wrong:
        raise StateError(
            f"the optimizer state was made by another optimizer or other specs, {leaves(len(wrong))}:",
            wrong[:12],
            "use the step that made the state, or begin anew from its parameters: "
            "step.init(fs.unshard(state.params, specs_they_have, mesh)). A master copy is kept where "
            "optimizer_dtype is not storage_dtype, or where the host updates what the device stores.",
        )


def owner_work_of(optimizer: Optimizer, specs: Mapping[str, LayoutSpec], mesh: Mesh) -> dict[str, OwnerWork]:
    """By path, what is computed of whole leaves, or, where no matrix is cut, of this rank's blocks."""
    out: dict[str, OwnerWork] = {}
    known: dict[Any, OwnerWork] = {}
    for path, spec in specs.items():
        dims = len(spec.shape)
        if not spec.trainable or 0 in spec.shape or optimizer.of(path, dims).whole is None:
            continue
        key = spec.shape, spec.optimizer, spec.optimizer_dtype, optimizer.settings(path)
        if key not in known:
            with _on_fakes(optimizer, f"needs all of params[{path!r}]", "`before` and `whole`"):
                split = [d for d in range(dims) if mesh.ordered(spec.optimizer.of(d))]
                sent = optimizer.wholes(path, dims, split)
                known[key] = _owner_work(optimizer.of(path, dims), path, spec, mesh, sent)
        out[path] = known[key]
    return out


def sums_of(
    optimizer: Optimizer, specs: Mapping[str, LayoutSpec], mesh: Mesh
) -> dict[str, tuple[Mapping[str, tuple[int, ...]], ...]]:
    """By path, of leaves that are split, shapes of what an optimizer sums over them, by round and name."""
    out, known, odd = {}, dict[Any, Any](), []
    for path, spec in specs.items():
        rule = optimizer.of(path, len(spec.shape))
        if not (spec.trainable and rule.sums and mesh.ordered(spec.optimizer.axes)):
            continue
        key = spec.shape, spec.optimizer_dtype, optimizer.settings(path)
        if key not in known:
            with _on_fakes(optimizer, f"sums over params[{path!r}]", "`sums`"):
                known[key] = _sums(rule, path, spec)
        out[path] = known[key]
        odd += [
            f"{name} {list(shape)} of params[{path!r}] {list(spec.shape)}"
            for own in out[path] for name, shape in own.items()
            if len(shape) != len(spec.shape)
            or any(n not in (1, m) for n, m in zip(shape, spec.shape, strict=True))
        ]  # fmt: skip
    if odd:
        raise OptimizerError(
            f"{optimizer} sums over leaves to other shapes than theirs:", odd[:12],
            "a sum has its leaf's dims, those that it was summed over of size 1: sum(dim, keepdim=True).",
        )  # fmt: skip
    return out


@contextmanager
def _on_fakes(optimizer: Optimizer, does: str, what: str) -> Iterator[None]:
    """An error of the optimizer's own code, which is run to see what ranks send, says what to mend."""
    try:
        yield
    except Exception as error:  # an optimizer of the user's: any may come
        raise OptimizerError(
            f"{optimizer} {does}, and does not run on fake tensors, which show what ranks send "
            f"({type(error).__name__}: {error})",
            fix=f"write its {what} without float(), .item() and branches on values.",
        ) from error


def _sums(rule: Optimizer, path: str, spec: LayoutSpec) -> tuple[dict[str, tuple[int, ...]], ...]:
    info, rounds = _numbers(torch.device("cpu")), []
    with fakes():
        param = torch.empty(spec.shape, dtype=spec.optimizer_dtype)
        slots, given = dict(rule.init_leaf(path, param)), rule.given(path, info)
        for number in range(len(rule.sums)):
            made = rule.sum_leaf(number, path, param, slots, param, given, info.grad_scale)
            rounds.append({n: tuple(v.shape) for n, v in made.items()})
            slots |= made
    return tuple(rounds)


def _owner_work(optimizer: Optimizer, path: str, spec: LayoutSpec, mesh: Mesh, is_sent: bool) -> OwnerWork:
    info = _numbers(torch.device("cpu"))
    shape = spec.shape if is_sent else block_shape(spec.shape, spec.optimizer, mesh)
    with fakes():
        param = torch.empty(shape, dtype=spec.optimizer_dtype)
        slots, given = optimizer.init_leaf(path, param), optimizer.given(path, info)
        sent, _ = optimizer.begin_leaf(path, param, slots, param, given, info.grad_scale)
        state = {n: slots[n] for n in optimizer.whole_slots if n in slots}
        dtype, graphs = wire_dtype(sent, state), {}
        for turn, (share, _) in optimizer.turns.items():

            def whole(leaf: torch.Tensor, *values: torch.Tensor, turn: str = turn) -> list[torch.Tensor]:
                own = dict(zip(state, values, strict=True))
                made, new = optimizer.whole(path, leaf, own, turn)
                return [made, *((own | new)[name] for name in own)]

            parts = [torch.empty_like(each, dtype=dtype) for each in (sent, *state.values())]
            graphs[turn] = make_fx(whole)(*parts), share
    if not is_sent:
        return OwnerWork(dtype, (), graphs)
    layouts = {n: slot_layout(tuple(v.shape), spec.shape, spec.optimizer, mesh) for n, v in state.items()}
    parts = (("", spec.shape, spec.optimizer), *((n, tuple(v.shape), layouts[n]) for n, v in state.items()))
    return OwnerWork(dtype, parts, graphs)


class Numbers(TorchDispatchMode):
    """Among fakes, what is made of real tensors alone (a step's number, a table of rates) is computed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = tensors_of([args, kwargs or {}])
        fake = not tensors or any(isinstance(t, FakeTensor) for t in tensors)
        with nullcontext() if fake else unset_fake_temporarily():
            return func(*args, **(kwargs or {}))

    def has_data(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is computed, and is no fake."""
        return not isinstance(tensor, FakeTensor)


@contextmanager
def fakes(numbers: Numbers | None = None, without_data: FakeTensorMode | None = None) -> Iterator[None]:
    """Tensors that are made have no data; real ones may be read.

    Args:
        numbers: the mode that computes these.
        without_data: the mode of the fakes, of `fake_mode`; one for many uses saves its making.
    """
    with without_data or fake_mode(), numbers or Numbers(), torch.no_grad():
        yield


def fake_mode() -> FakeTensorMode:
    """Make a mode for `fakes`. It takes some 10 ms."""
    return FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)


def _numbers(device: torch.device) -> StepInfo:
    return StepInfo(torch.tensor(0), global_norm=torch.zeros((), dtype=torch.float64, device=device))


@dataclass(frozen=True)
class Updates:
    """What the Updates of a schedule take besides what they change. `known`: found before; `fused`: those on
    the device are compiled, and take nothing.
    """

    schedule: Schedule
    optimizer: Optimizer
    slots: Slots
    known: dict[Any, int]
    fused: bool = False

    def bytes(self, bucket: Bucket, stage: str, barrier: bool, number: int = 0) -> int:
        """Of the leaves of one bucket, on the device that updates them.

        Where the optimizer's code cannot run without data, one copy of the bucket's state.

        Args:
            stage: "bind", of the whole update; of leaves that have owners "bind_begin" or "bind_end"; of
                those with sums "bind_sums", of which `number` is a round, or "bind_summed".
            barrier: whether the step's scalars are known by then (gradients may be scaled by them).
        """
        specs, mesh, settings = self.schedule.specs, self.schedule.mesh, self.optimizer.settings
        if self.fused and stage == "bind" and specs[bucket.paths[0]].updated_on == "device":
            rules = {p.path: self.optimizer.of(p.path, len(p.shape)) for p in bucket.pieces}
            plain = tuple(p for p in bucket.pieces if not rules[p.path].compilable)
            if not plain:
                return 0
            bucket = replace(bucket, pieces=plain)
        key = (
            stage, number, mesh.names, mesh.sizes, mesh.rank, mesh.device_type, barrier,
            self.schedule.accumulate > 1, bucket.dtype,
            tuple((replace(specs[p], unit="-"), settings(p)) for p in bucket.paths),
        )  # fmt: skip
        if key not in self.known:
            try:
                self.known[key] = self._run(bucket, stage, barrier, number)
            except Exception as error:  # an optimizer of the user's: any may come, and none is a mistake
                warnings.warn(
                    f"the memory of {self.optimizer.name}'s update is estimated as one copy of its state, "
                    f"as it does not run on fake tensors ({type(error).__name__}: {error})",
                    stacklevel=2,
                )
                state = (slot for p in bucket.paths for slot in self.slots[p].values())
                self.known[key] = sum(size_of(shape, dtype) for shape, dtype in state)
        return self.known[key]

    def _run(self, bucket: Bucket, stage: str, barrier: bool, number: int) -> int:
        specs, mesh = self.schedule.specs, self.schedule.mesh
        # Fakes of a device that torch was not built for cannot be written to.
        device = torch.device("cuda" if mesh.device_type == "cuda" and torch.cuda.is_available() else "cpu")
        rules = [self.optimizer.of(p.path, len(p.shape)) for p in bucket.pieces]
        heaviest = torch.tensor(max(list(rule.turns.values())[-1][1] for rule in rules))
        numbers = replace(_numbers(device), step=heaviest) if barrier else StepInfo(heaviest)
        with fakes():
            updater = Updater(self.optimizer, specs, mesh, mesh.rank)
            of_sums = {"bind_sums": number, "bind_summed": sys.maxsize}  # how many rounds are summed before
            if stage == "bind_sums":
                sums = updater.bind_sums(bucket.paths, number)
                update = lambda *given: list(sums(*given))  # noqa: E731
            else:
                update = getattr(updater, stage)(bucket.paths)
            blocks, own_slots, params = {}, {}, {}
            for path in bucket.paths:
                spec = specs[path]
                layout, dtype = spec.gradient, spec.reduce_dtype
                if stage == "bind_end":
                    layout, dtype = spec.optimizer, bucket.dtype
                elif self.schedule.accumulate > 1:
                    dtype = spec.sum_dtype
                block = block_shape(spec.shape, layout, mesh)
                blocks[path] = torch.empty(block, dtype=dtype, device=device)
                own_slots[path] = {
                    n: torch.empty(s, dtype=d, device=device) for n, (s, d) in self.slots[path].items()
                }
                if stage == "bind_end":
                    back = self.optimizer.of(path, len(spec.shape)).whole_slots.keys() & own_slots[path]
                    state = {n: torch.empty_like(own_slots[path][n], dtype=bucket.dtype) for n in back}
                    blocks[path] = {"": blocks[path], **state}
                if not (spec.updated_on == "host" and spec.memory == "device"):
                    shape = block_shape(spec.shape, spec.storage, mesh)
                    params[path] = torch.empty(shape, dtype=spec.storage_dtype, device=device)
            earlier = [self._summed(bucket.paths, of_sums[stage])] if stage in of_sums else []
            tracker = StorageTracker(mesh.device_type)
            for value in tensors_of([blocks, params, own_slots, earlier]):
                tracker.adopt(value, INPUTS, size=0)
            with tracker:
                update(blocks, own_slots, params, StepControl(info=numbers), *earlier)
        return max(tracker.peak.bytes, 0)

    def _summed(self, paths: Sequence[str], rounds: int) -> dict[str, dict[str, torch.Tensor]]:
        """What so many rounds have summed, for this rank's blocks, by path and name."""
        out: dict[str, dict[str, torch.Tensor]] = {path: {} for path in paths}
        lines = [line for line in self.schedule.instructions if isinstance(line, UpdateSums)]
        for line, path in itertools.product(lines, paths):
            if path in line.paths and line.number < rounds:
                spec = self.schedule.specs[path]
                block = block_shape(spec.shape, spec.optimizer, self.schedule.mesh)
                for name, whole in line.shapes[path].items():
                    shape = tuple(1 if w == 1 else b for w, b in zip(whole, block, strict=True))
                    out[path][name] = torch.empty(shape, dtype=line.dtype)
        return out


def size_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a dense tensor."""
    return math.prod(shape) * dtype.itemsize
