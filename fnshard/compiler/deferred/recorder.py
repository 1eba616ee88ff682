"""Run operators inside a `deferred` block on meta tensors, and write them down.

A recorded tensor says that it is on the CPU, as constructors expect. Python can read values that depend on no
random number; reading another is refused.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from fnshard.compiler.deferred.tape import CPU, RecordedCall, Tape, leaves_of, map_leaves
from fnshard.compiler.ir.program import arguments_of, storage_id
from fnshard.errors import StateError

META = torch.device("meta")
MARK = 0x7F5A_0000_0000_0000  # the generator's seed when a block begins
_SEEDED = "leave it out: step.init(model, seed=) seeds what the constructors draw."
_DECIDE = "decide by the configuration or by shapes; step.init draws the numbers later, from its seed."
_WAY_OUT = "Or build the module with values, outside of the block."

# Operators that set the tensor they are called on without reading it.
_FILLS = frozenset({
    "bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_",
    "random_", "uniform_", "zero_",
})  # fmt: skip
_UNKNOWN_SHAPE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Recorder(TorchDispatchMode):
    """A mode that records operators in a log, and notes the modules of the block.

    Attributes:
        tape: the log.
        modules: the modules that have registered something, by id.
        paused: whether operators run without being recorded.
        draw_count: how many random operators were recorded. The generator's seed is MARK plus this count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tape = Tape()
        self.modules: dict[int, nn.Module] = {}
        self.paused = False
        self.draw_count = 0

    def note_module(self, module: nn.Module, name: str, value: Any) -> None:
        """Note a module that registers a parameter, a buffer or a module."""
        self.modules[id(module)] = module

    def knows(self, value: Tensor) -> bool:
        """Return whether a tensor is recorded: a call of the log makes or writes its memory."""
        return value.layout == torch.strided and storage_id(value) in self.tape.writers

    def value(self, tensor: Tensor) -> Tensor | None:
        """Return the current values of a recorded tensor; None if they depend on random numbers."""
        with self.pause():
            return self.tape.value(tensor.detach())

    def pause(self) -> AbstractContextManager[Any]:
        """Run operators in a block without recording them."""
        return mock.patch.object(self, "paused", True)

    def add_constant(self, value: Tensor) -> Tensor:
        """Record a tensor with these values, and return it."""
        kept = value.detach().clone()
        made = torch.empty_strided(kept.shape, kept.stride(), dtype=kept.dtype, device=META)
        memory = storage_id(made)
        call = RecordedCall(
            torch.clone, (), {}, overwrites=(memory,), makes={0: made.detach()}, constant=kept
        )  # fmt: skip
        self.tape.add(call, [memory])
        return made

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on meta tensors and record it; run it plainly if it concerns no recorded tensor."""
        kwargs = kwargs or {}
        inputs = leaves_of((args, kwargs), Tensor)
        known = [v for v in inputs if self.knows(v)]
        # `torch.tensor(...)` and its like end in this operator, with their values.
        if op is torch.ops.aten.lift_fresh.default and not known:
            return self.add_constant(args[0]) if not args[0].is_meta else args[0]

        # Besides operators of recorded tensors, those count that make tensors from nothing, or draw.
        takes_device = any(a.name == "device" for a in op._schema.arguments)
        device = kwargs.get("device") if takes_device else None
        is_random = torch.Tag.nondeterministic_seeded in op.tags
        is_factory = not inputs and (takes_device or is_random)
        draws_on_host = is_random and not any(v.is_meta for v in inputs)
        if self.paused or not (known or is_factory or draws_on_host):
            return op(*args, **kwargs)

        # Refuse what cannot be recorded; tensors from outside become constants of the log.
        if device is not None and device.type not in ("cpu", "meta"):
            raise self.make_refusal(
                f"{op} on {device}", "build on the CPU: step.init puts the values where they go."
            )
        self._check_tensors(op, inputs, _written_tensors(op, args, kwargs))
        record_foreign = lambda v: v if self.knows(v) else self.add_constant(v)  # noqa: E731
        args, kwargs = map_leaves((args, kwargs), Tensor, record_foreign)
        if any(tag in op.tags for tag in _UNKNOWN_SHAPE):
            return self._run_at_once(op, args, kwargs, is_random)
        if kwargs.get("generator") is not None:
            raise self.make_refusal(f"{op} draws from a generator of its own", _SEEDED, inputs)
        if is_random:
            self._check_seed(op, inputs)

        # Run it on the meta device, for the shapes of its results.
        on_meta = dict(kwargs)
        if takes_device and (device is not None or not inputs):
            on_meta["device"] = META
        try:
            result = op(*args, **on_meta)
        except NotImplementedError as error:
            raise self.make_refusal(
                f"{op} has no rule for meta tensors", "use another operator there.", inputs
            ) from error
        return self._record(op, args, on_meta, result, is_random)

    def record_truncations(self) -> AbstractContextManager[Any]:
        """Record `torch.nn.init.trunc_normal_` as one operator: torch's own draws until all are in range."""
        original = torch.nn.init._no_grad_trunc_normal_
        return mock.patch.object(torch.nn.init, original.__name__, partial(self._record_truncated, original))

    def _record_truncated(
        self, original: Any, tensor: Tensor, *args: Any, generator: torch.Generator | None = None
    ) -> Tensor:
        """Record a truncated normal fill of a recorded tensor; fill any other tensor by torch."""
        if not self.knows(tensor):
            return original(tensor, *args, generator=generator)
        if generator is not None:
            raise self.make_refusal("trunc_normal_ draws from a generator of its own", _SEEDED, [tensor])
        whole = (storage_id(tensor),) if _is_whole(tensor) else ()
        self._check_seed("trunc_normal_", [tensor])
        with self.pause():
            alias = tensor.detach()
        given = dict(zip(("mean", "std", "a", "b"), args, strict=True))
        call = RecordedCall(torch.nn.init.trunc_normal_, (alias,), given, overwrites=whole, is_random=True)
        self.tape.add(call, [storage_id(tensor)])
        return tensor

    def _check_tensors(self, op: Any, inputs: list[Tensor], written: list[Tensor]) -> None:
        """Refuse to read tensors that have no values, and to write to tensors that were made elsewhere."""
        foreign = [v for v in inputs if not self.knows(v)]
        if any(v.is_meta for v in foreign):
            fix = "make it without device='meta'; the block makes everything there anyhow."
            headline = f"{op} reads a tensor on the meta device that holds no values"
            raise self.make_refusal(headline, fix, inputs)
        if any(v is w for v in foreign for w in written):
            fix = "make that tensor inside the block, as torch.tensor(array) does, or write to a clone."
            headline = f"{op} writes to a tensor with values, made outside or by numpy,"
            raise self.make_refusal(headline, fix, inputs)

    def _run_at_once(self, op: Any, args: Any, kwargs: Any, is_random: bool) -> Any:
        """Run an operator on known values, on which its result's shape or a decision in Python depends."""
        tensors = leaves_of((args, kwargs), Tensor)
        values = {id(v): self.value(v) for v in tensors}
        if is_random or any(v is None for v in values.values()) or _written_tensors(op, args, kwargs):
            raise self.make_refusal(f"{op} reads a value that depends on random numbers", _DECIDE, tensors)
        args, kwargs = map_leaves((args, kwargs), Tensor, lambda v: values[id(v)])
        return map_leaves(op(*args, **kwargs), Tensor, self.add_constant)

    def _record(self, op: Any, args: Any, kwargs: Any, result: Any, is_random: bool) -> Any:
        """Note the memories that an operator has made and written to, and return its result."""
        inputs, results = leaves_of((args, kwargs), Tensor), leaves_of(result, Tensor)
        written = _written_tensors(op, args, kwargs)
        made = {i: v.detach() for i, v in enumerate(results) if not self.knows(v)}
        if torch.Tag.inplace_view in op.tags or not (written or made):
            return result  # a view is no call: later calls have it as their argument
        name = op._schema.name.removeprefix("aten::")

        # Which memories does it read, and which does it overwrite as a whole?
        outs = [kwargs.get(a.name) for a in op._schema.arguments if a.is_out]
        filled = [v for v in written if name in _FILLS or any(v is out for out in outs)]
        # Operators of these names read nothing but the shape of their input.
        reads_shape_only = name.endswith("_like") or name.startswith("new_")
        read = set()
        if not reads_shape_only:
            read = {storage_id(v) for v in inputs if not any(v is f for f in filled)}
        whole = {storage_id(v) for v in filled if _is_whole(v)}

        # The call is run later on the CPU, in the dtype that it has here.
        kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
        if not inputs:
            kwargs["device"] = CPU
            if any(a.name == "dtype" for a in op._schema.arguments):
                kwargs["dtype"] = results[0].dtype
        args, kwargs = map_leaves((args, kwargs), Tensor, Tensor.detach)
        new = set(map(storage_id, made.values()))
        call = RecordedCall(
            op, args, kwargs, reads=tuple(read), overwrites=tuple(new | (whole - read)), makes=made,
            is_random=is_random, is_blank="empty" in name, default_dtype=torch.get_default_dtype(),
        )  # fmt: skip
        self.tape.add(call, [*map(storage_id, written), *new])
        return result

    def make_refusal(self, headline: str, fix: str, tensors: Sequence[Tensor] = ()) -> StateError:
        """Make an error with the line of the constructor, and the leaves that depend on these tensors."""
        ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
        frames = [f for f in traceback.extract_stack() if not f.filename.startswith(ours)]
        lines = [f"{frames[-1].filename}:{frames[-1].lineno}  {frames[-1].line}"]

        # Name the leaves that share memory with these tensors, or with a call that they depend on.
        memories = {storage_id(t) for t in tensors if self.knows(t)}
        calls = [self.tape.calls[n] for memory in memories for n in self.tape.slice(memory)]
        memories = memories.union(*(call.memories for call in calls))
        paths: dict[int, str] = {}  # the longest path of a leaf is that in the outermost module
        for module in self.modules.values():
            for path, leaf in (*module.named_parameters(), *module.named_buffers()):
                if not nn.parameter.is_lazy(leaf) and self.knows(leaf) and storage_id(leaf) in memories:
                    paths[id(leaf)] = max(path, paths.get(id(leaf), ""), key=len)
        lines += [f"of the leaf {path!r}" for path in paths.values()]
        return StateError(f"{headline}, which fs.deferred() cannot record:", lines, f"{fix} {_WAY_OUT}")

    def _check_seed(self, op: Any, tensors: Sequence[Tensor]) -> None:
        """Refuse to draw from a state that the constructor has set.

        Each draw leaves a mark in the generator, by which the next one sees that nobody has seeded it since.
        """
        if torch.default_generator.initial_seed() != MARK + self.draw_count:
            headline = f"a constructor sets torch's random state, and {op} draws"
            raise self.make_refusal(headline, _SEEDED, tensors)
        self.draw_count += 1
        torch.default_generator.manual_seed(MARK + self.draw_count)


def _is_whole(value: Tensor) -> bool:
    """Return whether a tensor is all of its memory."""
    return value.storage_offset() == 0 and value.nbytes == value.untyped_storage().nbytes()


def _written_tensors(op: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operator writes to."""
    given = arguments_of(op, args, kwargs)
    writes = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return leaves_of([given[name] for name in writes], Tensor)


class FunctionRecorder(TorchFunctionMode):
    """A mode in which recorded tensors say that they are on the CPU, and give Python values if known."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device")) == "meta":  # the constructor itself asks for it
            with self.recorder.pause():
                return func(*args, **kwargs)
        rule = _RULES.get(func)
        if rule is not None and any(map(self.recorder.knows, leaves_of(args, Tensor))):
            return rule(self.recorder, func, *args, **kwargs)
        return func(*args, **kwargs)


def _call_with_values(recorder: Recorder, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call a function that reads values with the tensor's values, which must be known."""
    value = recorder.value(tensor)
    if value is None:
        raise recorder.make_refusal(
            f"{resolve_name(func)} reads a value that depends on random numbers", _DECIDE, [tensor]
        )
    return func(value, *args, **kwargs)


def _to(recorder: Recorder, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run `.to`, for which a recorded tensor is on the CPU already."""
    device_for_cpu = META if recorder.knows(tensor) else CPU

    def translate(value: Any) -> Any:
        if isinstance(value, Tensor):  # here everything is on the CPU: only its dtype counts
            return value.dtype
        is_device = isinstance(value, str | torch.device)
        return device_for_cpu if is_device and torch.device(value).type == "cpu" else value

    named = {"dtype" if k == "other" else k: translate(v) for k, v in kwargs.items()}
    return tensor.to(*map(translate, args), **named)


def _set_item(recorder: Recorder, func: Any, tensor: Tensor, index: Any, value: Any) -> None:
    """Set an item to a recorded tensor; torch would put a number on the meta device, where it is lost."""
    func(tensor, index, value if isinstance(value, Tensor) else torch.tensor(value, dtype=tensor.dtype))


_RULES: dict[Any, Callable[..., Any]] = {
    Tensor.device.__get__: lambda recorder, func, *_: CPU,
    Tensor.is_meta.__get__: lambda recorder, func, *_: False,
    Tensor.is_cpu.__get__: lambda recorder, func, *_: True,
    Tensor.get_device: lambda recorder, func, *_: -1,
    **dict.fromkeys(
        (Tensor.cpu, Tensor.share_memory_, Tensor.pin_memory), lambda recorder, func, tensor, *_, **__: tensor
    ),
    **dict.fromkeys((Tensor.to, Tensor.type_as), _to),
    **dict.fromkeys((Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.__format__), _call_with_values),
    Tensor.new_tensor: lambda _, func, x, *args, **k: torch.tensor(*args, **{"dtype": x.dtype, **k}),
    Tensor.__setitem__: _set_item,
}
