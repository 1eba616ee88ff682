"""Control flow: `torch.cond` and `flex_attention` inside `fn`, as plain operators.

Both branches of a `cond` are computed, and a `torch.where` chooses. Values of the other branch, NaN for
instance, reach neither results nor gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch._higher_order_ops.utils as utils
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from fnshard import tree
from fnshard.compiler.deferred.tape import leaves_of
from fnshard.compiler.frontend.transforms import Patch, is_of_a_level, while_tracing
from fnshard.compiler.ir.program import describe, storage_id
from fnshard.errors import TraceError

Function = Callable[..., Any]


def patches() -> Iterator[tuple[Any, str, Patch]]:
    """Yield the patches by which these operators are traced directly, without Dynamo."""
    yield dynamo_patch()
    import torch.nn.attention.flex_attention as flex_attention  # here: 15 ms that few need

    # torch differentiates flex_attention on a GPU alone; plain operators are differentiated anywhere.
    yield flex_attention, "_validate_device", while_tracing(lambda *_: None)
    yield flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", lambda *_: True


def dynamo_patch() -> tuple[Any, str, Patch]:
    """Return the patch by which `torch.cond` and similar operators are called without Dynamo.

    A mode cannot do it: torch asks Dynamo to compile such a call before any mode of the thread sees it.
    """
    if hasattr(utils, "_hop_compile_and_call"):
        return utils, "_hop_compile_and_call", _call_directly
    return torch, "compile", _skip_compile  # before torch 2.12


@contextmanager
def without_dynamo() -> Iterator[None]:
    """Let this thread, and no other, call `torch.cond` and similar operators without Dynamo."""
    tracer, (owner, name, patch) = threading.get_ident(), dynamo_patch()
    patched = patch(getattr(owner, name), lambda: threading.get_ident() == tracer)
    with mock.patch.object(owner, name, patched):
        yield


@while_tracing
def _call_directly(
    _: Function, fn: Function, args: Sequence[Any], kwargs: dict[str, Any] | None = None
) -> Any:
    """Call the operator itself, where torch would compile the call."""
    return fn(*args, **(kwargs or {}))


@while_tracing
def _skip_compile(original: Function, fn: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Return the function itself where torch compiles an operator's call."""
    is_operator = getattr(fn, "__module__", "").startswith("torch._higher_order_ops")
    return fn if is_operator else original(fn, *args, **kwargs)


class _Branch(TorchFunctionMode):
    """A mode in which calls read outside tensors through a gate, which passes a gradient if `taken` is true.

    The branch that is not taken gets gradients of 0. Where such a 0 meets an infinite derivative it becomes
    NaN, and the gate makes it 0 again.

    The branch must not write to outside tensors, since both branches run. A write raises the version that a
    tensor shares with its views, whatever the call (a method, `out=`, `inplace=True`).
    """

    def __init__(self, taken: Tensor):
        super().__init__()
        self.taken = taken
        # Tensors that the branch has made or gated are kept alive, so that no other gets the same id.
        self.inner: dict[int, Tensor] = {}
        self.gates: dict[int, tuple[Tensor, Tensor]] = {}
        self.outside: dict[int, tuple[Tensor, int]] = {}  # with its version when the branch first read it

    def gate(self, value: Any) -> Any:
        """Return a value behind the gate, or itself if the branch has made it or it has no gradient."""
        if not isinstance(value, Tensor) or id(value) in self.inner or not value.requires_grad:
            return value
        if id(value) not in self.gates:
            gated = torch.where(self.taken, value, value.detach())
            self.gates[id(value)], self.inner[id(gated)] = (value, gated), gated
            self.outside[id(gated)] = gated, gated._version  # a write to it means the value
        return self.gates[id(value)][1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Note tensors from outside that the call reads, and run it on them behind their gates.
        kwargs = kwargs or {}
        for value in leaves_of((args, kwargs), Tensor):
            if id(value) not in self.inner:
                self.outside.setdefault(id(value), (value, value._version))
        args, kwargs = fx.node.map_aggregate((tuple(args), dict(kwargs)), self.gate)
        result = func(*args, **kwargs)
        results = leaves_of(result, Tensor)
        self.inner |= {id(v): v for v in results}

        # `.data`, `unsafe_chunk` and the like lie in the memory of their tensor, with a version of their own.
        memories = {storage_id(v) for v, _ in self.outside.values() if _has_memory(v)}
        for value in filter(_has_memory, results):
            if storage_id(value) in memories:
                self.outside.setdefault(id(value), (value, value._version))

        # Refuse a write, of whatever call and spelling.
        for value, version in self.outside.values():
            if value._version != version:
                name = getattr(func, "__name__", "")
                raise TraceError(
                    f"a branch of torch.cond writes to a tensor from outside, {describe(value)}, by {name}.",
                    fix="branches are pure: return the new value, or clone the tensor in the branch first.",
                )
        return result


def _has_memory(value: Tensor) -> bool:
    """Return whether a tensor has one memory. Sparse ones have several, wrappers of transforms none."""
    return value.layout == torch.strided and not is_of_a_level(value)


def _run_branch(fn: Function, operands: Sequence[Any], taken: Tensor) -> tuple[list[Any], Any]:
    """Run a branch on gated operands, and return its results as flat values and structure."""
    mode = _Branch(taken)
    with mode:
        leaves, structure = tree.flatten(fn(*operands), constants=True)
    # A branch may return a tensor from outside, which no call in it has gated.
    return [mode.gate(v) for v in leaves], structure


def _cond(pred: Any, true_fn: Function, false_fn: Function, operands: Sequence[Any] = ()) -> Any:
    """Compute both branches, and choose their results by a predicate that depends on values."""
    if not isinstance(pred, Tensor):
        return (true_fn if pred else false_fn)(*operands)

    # Run both branches, and compare what they return.
    pred = pred.reshape(())
    yes, structure = _run_branch(true_fn, operands, pred)
    no, other_structure = _run_branch(false_fn, operands, ~pred)
    yes_shapes, no_shapes = [describe(v) for v in yes], [describe(v) for v in no]
    if structure != other_structure or yes_shapes != no_shapes:
        raise TraceError(
            "the branches of a torch.cond return different structures, shapes or dtypes:",
            [f"true branch: {', '.join(yes_shapes)}", f"false branch: {', '.join(no_shapes)}"],
            "return tensors of the same shapes and dtypes from both.",
        )

    # Choose tensors by the predicate; constants are equal in both, as their descriptions are.
    chosen = [torch.where(pred, a, b) if isinstance(a, Tensor) else a for a, b in zip(yes, no, strict=True)]
    return tree.unflatten(chosen, structure)


FLEX_SCORES = 1 << 20  # the most scores of one head that `flex_attention` may make


def _flex_attention(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Attend as torch itself does without a compiler: with all scores of a head in memory.

    Raises:
        TraceError: a head has more than `FLEX_SCORES` scores.
    """
    from torch._higher_order_ops.flex_attention import math_attention

    queries, keys = query.shape[-2], key.shape[-2]
    are_known = isinstance(queries, int) and isinstance(keys, int)  # not lengths that depend on data
    if are_known and queries * keys > FLEX_SCORES:
        raise TraceError(
            f"flex_attention of {queries} queries and {keys} keys makes {queries * keys:,} scores a head, "
            f"all of them in memory; at most {FLEX_SCORES:,} are taken.",
            fix="fs.attention(query, key, value, documents=...) for packed documents, or "
            "F.scaled_dot_product_attention(..., is_causal=True); neither makes them.",
        )
    return math_attention(query, key, *args, **kwargs)


OPERATORS: dict[str, Function] = {"cond": _cond, "flex_attention": _flex_attention}
