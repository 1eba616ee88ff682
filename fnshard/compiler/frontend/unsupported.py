"""Refuse calls that the tracer would lose in silence, each with the way out.

A few of torch's entry points are patched while a trace runs, for the tracing thread alone: a loader or a
checkpoint writer on another thread is not affected.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.modules.module as module_calls
from torch import _vmap_internals
from torch._ops import HigherOrderOperator
from torch.autograd.graph import saved_tensors_hooks
from torch.distributions import Distribution
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

from fnshard.compiler.deferred.tape import leaves_of, map_leaves
from fnshard.compiler.frontend import control_flow, functions, statistics, transforms
from fnshard.compiler.frontend.decompositions import DECOMPOSITIONS, mask_positions
from fnshard.compiler.frontend.transforms import Patch, while_tracing
from fnshard.compiler.ir.failures import Call, higher_order
from fnshard.errors import TraceError, report

_BACKWARD = report(
    "`fn` calls backward(), which leaves gradients in .grad: a trace loses them.",
    fix="use torch.autograd.grad or torch.func.grad, which return them; shard_step differentiates the loss "
    "by itself.",
)
_BATCHED_GRADS = report(
    "`fn` calls torch.autograd.grad with is_grads_batched=True, whose vmap is not torch.func's.",
    fix="use torch.func.vmap of a pullback of torch.func.vjp, or torch.func.jacrev.",
)
_SCRIPT = report(
    "`fn` calls a torch.jit {name}, whose executor hides from a trace what is differentiated.",
    fix="call the Python function or module it was scripted from: kernels are compiled anyway.",
)
_INFERENCE = report("`fn` enters {name}, whose tensors autograd refuses.", fix="use torch.no_grad().")
_SAVED = report(
    "`fn` enters {name}, which changes what the backward reads; a trace loses it.",
    fix="leave it out: what is saved and what is recomputed is the compiler's. To quantise what is saved, "
    "write a torch.library.custom_op with register_autograd.",
)
_SEED = report(
    "`fn` sets torch's random state ({name}), which a trace loses.",
    fix="leave it out: random ops draw from the state's seed, the step, the rank and the micro-batch "
    "(step.init(..., seed=)).",
)
_SET_DATA = report(
    "`fn` assigns to Tensor.{name}, which a trace loses.",
    fix="write to a buffer in place, buffer.copy_(value): it is state of the step; else make a new tensor.",
)
_LAUNCH = report(
    "`fn` launches a Triton kernel: a trace does not see what it writes.",
    fix="launch it in a torch.library.triton_op, by torch.library.wrap_triton(kernel)[grid](...); "
    "register_autograd says its gradient.",
)
_KERNELS = report(
    "`fn` chooses attention's kernels itself (torch.nn.attention.sdpa_kernel), which a trace loses.",
    fix="choose around all calls of the step, as in `with sdpa_kernel(...): state, metrics = step(...)`.",
)
_DEVICE = report(
    "`fn` puts a tensor on {requested} by {name}; this step is traced on {device}.",
    fix="take the device of a tensor there is: torch.zeros(n, device=x.device), x.new_zeros(n).",
)

_NEWEST = (2, 15)  # the newest torch that tests/versions.py has tried


def check_version(version: str) -> None:
    """Warn of a torch that is newer than any that was tried: names that are patched here may have changed."""
    if tuple(map(int, version.split(".")[:2])) > _NEWEST:
        newest = ".".join(map(str, _NEWEST))
        warnings.warn(f"fnshard was tried with torch 2.11 to {newest}, and this is {version}.", stacklevel=2)


check_version(torch.__version__)

_LOG = logging.getLogger("torch._subclasses.fake_tensor")  # it logs tracebacks through torch's internals


@contextmanager
def refusals(device: torch.device) -> Iterator[Calls]:
    """Have calls of this thread raise a TraceError if a trace would lose them in silence.

    Args:
        device: the trace's own device. Any other but the host is refused: torch may know it by name alone,
            and aborts the process where such a fake tensor meets autograd.
    """
    tracer: int | None = threading.get_ident()

    def is_tracer() -> bool:
        return threading.get_ident() == tracer

    # A function that somebody imported by name while tracing stays patched, and must do no harm afterwards.
    def forget_tracer() -> None:
        nonlocal tracer
        tracer = None

    with ExitStack() as stack:
        stack.callback(forget_tracer)
        # A compiled submodule is traced as the function that it was made from.
        import torch._dynamo.config as dynamo_config  # here: where nothing is deferred, it imports Dynamo

        stack.enter_context(dynamo_config.patch(error_on_nested_fx_trace=False))
        stack.enter_context(mock.patch.object(_LOG, "disabled", True))
        calls = Calls(device)
        for owner, name, patch in _collect_patches(calls.hooks):
            original = inspect.getattr_static(owner, name, None)
            stack.enter_context(mock.patch.object(owner, name, patch(original, is_tracer), create=True))
        yield stack.enter_context(calls)


class Calls(TorchFunctionMode):
    """A mode that sees every torch function which `fn` calls: it refuses, decomposes or runs it.

    Args:
        device: the trace's device.

    Attributes:
        failed: the call that failed last.
        hooks: values of gradient hooks, see `functions.patches`.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.failed: Call | None = None
        self.kernels = transforms.attention_kernels()
        self.hooks: OrderedDict[int, torch.Tensor] = OrderedDict()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # Refuse a device other than the step's own, the host and meta.
        requested = kwargs.get("device")
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], str | torch.device):
            requested = args[1]
        elif name in ("cuda", "xpu") and func is getattr(torch.Tensor, name):
            requested = name
        if requested is not None:
            kind = torch.device(requested).type
            if kind not in (self.device.type, "cpu", "meta"):
                raise TraceError(_DEVICE.format(requested=kind, name=name, device=self.device.type))

        # Refuse a choice of attention kernels other than that around the step.
        kernels = transforms.get_chosen_kernels() or self.kernels
        if "attention" in name and transforms.attention_kernels() != kernels:
            raise TraceError(_KERNELS)

        # Run the function, or its decomposition.
        if self.device.type != "cpu":
            args, kwargs = self._move_to_device(name, args, kwargs)
        if name in _READS:
            args = (args[0].detach(), *args[1:])  # otherwise torch warns of a gradient that nobody asks for
        try:
            if name in _MEMORY:
                raise RuntimeError(f".{name}() is not supported on tensors without values.")
            if name in _INDEXED:
                args = (args[0], mask_positions(args[1], args[0].shape), *args[2:])
            return DECOMPOSITIONS.get(func, func)(*args, **kwargs)
        except Exception as error:
            self.failed = Call(error, func, (*args, *kwargs.values()))
            raise

    def _move_to_device(self, name: str, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Move arguments on the host to the trace's device, and make new tensors there.

        A tensor that `fn` closes over, or makes without naming a device, would be copied from the host in
        every step.
        """
        if name in _FACTORIES and "device" not in kwargs:
            return args, kwargs | {"device": self.device}
        kinds = {t.device.type for t in leaves_of((args, kwargs), torch.Tensor)}
        if name == "copy_" or not kinds >= {"cpu", self.device.type}:
            return args, kwargs

        def move(value: torch.Tensor) -> torch.Tensor:
            return value.to(self.device) if value.device.type == "cpu" and value.dim() else value

        return map_leaves((args, kwargs), torch.Tensor, move)


_FACTORIES = {
    "arange", "empty", "eye", "full", "linspace", "logspace", "ones", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip
_INDEXED = {"__getitem__", "__setitem__"}
_MEMORY = {"__dlpack__", "__reduce_ex__"}  # functions that read memory, which a fake tensor lacks
_READS = {"item", "tolist", "__float__", "__int__", "__index__", "__complex__"}


def _collect_patches(hooks: OrderedDict[int, torch.Tensor]) -> Iterator[tuple[Any, str, Patch]]:
    """Yield (owner, name of an attribute, patch) for all that is replaced while a trace runs."""
    yield from functions.patches(hooks)
    name = "register_post_accumulate_grad_hook"
    yield torch.Tensor, name, _refuse(functions.HOOK, name)
    yield module_calls, "BackwardHook", _refuse(functions.HOOK, "a full backward hook of a module")

    # Transforms are traced by themselves; operators that take functions are traced directly, without Dynamo.
    yield from transforms.patches()
    yield from control_flow.patches()

    # backward() leaves gradients in .grad, where a trace loses them; torch.autograd.grad is another matter.
    accumulates = lambda *_, accumulate_grad=False, **__: accumulate_grad  # noqa: E731
    yield torch.autograd, "_engine_run_backward", _refuse(_BACKWARD, "", accumulates)
    yield _vmap_internals, "_vmap", _refuse(_BATCHED_GRADS, "")

    # State of the process or the thread that a trace does not keep.
    for owner in (torch, torch.random):
        for name in ("manual_seed", "set_rng_state"):
            yield owner, name, _refuse(_SEED, f"torch.{name}")
    yield torch.inference_mode, "__enter__", _refuse(_INFERENCE, "torch.inference_mode", lambda m, *_: m.mode)
    yield saved_tensors_hooks, "__enter__", _refuse(_SAVED, "saved_tensors_hooks", _is_users_hook)

    # Code that the tracer does not see.
    for compiled in (torch.jit.ScriptFunction, torch._C.ScriptMethod):
        yield compiled, "__call__", _refuse(_SCRIPT, compiled.__name__)
    yield HigherOrderOperator, "__call__", _call_higher_order
    triton = sys.modules.get("triton.runtime.jit")
    if triton is not None:  # without the module nobody launches a kernel
        yield triton.KernelInterface, "__getitem__", _refuse(_LAUNCH, "")
    # A distribution's check of its arguments is control flow on values.
    yield Distribution, "_validate_args", lambda original, is_tracer: False
    # The statistics of a SyncBatchNorm are those of all ranks, by exchanges of the program.
    yield torch.nn.SyncBatchNorm, "forward", statistics.forward_with_exchanges

    yield torch.Tensor, "data", _make_data
    yield torch.Tensor, "grad_fn", _make_grad_fn


def _refuse(message: str, name: str, when: Callable[..., bool] = lambda *_, **__: True) -> Patch:
    """Return a patch that raises `message` for a call if `when` is true of its arguments."""

    def run(original: Any, *args: Any, **kwargs: Any) -> Any:
        if when(*args, **kwargs):
            raise TraceError(message.format(name=name))
        return original(*args, **kwargs)

    return while_tracing(run)


def _is_users_hook(context: Any) -> bool:
    """Return whether hooks on saved tensors may change values; torch's (checkpoint, save_on_cpu) do not."""
    return type(context) is saved_tensors_hooks or not type(context).__module__.startswith("torch.")


@while_tracing
def _call_higher_order(original: Any, op: HigherOrderOperator, *args: Any, **kwargs: Any) -> Any:
    """Run a higher-order operator that is known here, and refuse all others."""
    name = op.name()
    if name in control_flow.OPERATORS:
        return control_flow.OPERATORS[name](*args, **kwargs)
    is_launch = name == "triton_kernel_wrapper_mutation"
    is_in_op = is_launch and get_proxy_mode() is None  # in a `triton_op`, which is one op of the program
    if is_in_op or (transforms.is_inside() and name == "custom_function_call"):  # functorch's own
        return original(op, *args, **kwargs)
    raise TraceError(_LAUNCH) if is_launch else higher_order(name)


def _make_data(original: Any, is_tracer: Callable[[], bool]) -> property:
    """Let `.data` be `.detach()` for the tracer, and refuse to assign to it."""

    def read(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach() if is_tracer() else original.__get__(tensor)

    def write(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if is_tracer():
            raise TraceError(_SET_DATA.format(name="data"))
        original.__set__(tensor, value)

    return property(read, write)


class _Node:
    """An autograd node that takes no hooks."""

    def __init__(self, node: Any):
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            raise TraceError(functions.HOOK.format(name=f"grad_fn.{name}"))
        return getattr(self._node, name)


def _make_grad_fn(original: Any, is_tracer: Callable[[], bool]) -> property:
    """Let `.grad_fn` be a node whose hooks are refused."""

    def read(tensor: torch.Tensor) -> Any:
        node = original.__get__(tensor)
        return _Node(node) if is_tracer() and node is not None else node

    return property(read)
