"""Explain failures of `fn` on tensors without values to the person who wrote `fn`.

A torch function that fails becomes one TraceError: the function, its operands by leaf and batch argument, the
line of the user's code, and the way out. An error that the user's own code raises stays the same.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from fnshard.compiler.ir.arguments import NumberList, fold_lists
from fnshard.compiler.ir.program import describe, tensors_in
from fnshard.compiler.ir.source_lines import call_into, place_of
from fnshard.errors import FnshardError, TraceError, report
from fnshard.tree import DENSE, unusual

# Ways out, and COMMUNICATES, a headline. Those without an underscore are used where other modules refuse.
MIXED = (
    "a leaf computes in its spec's compute_dtype, and the batch comes as it is: cast what comes with the "
    "batch, or what was computed in another dtype, as in x.to(weight.dtype)."
)
_VALUE = (
    "choose with torch.where or torch.cond, or by a mask; lengths such as x[mask].shape[0] are known, and "
    "fs.bounded says how large one is at most. Pass numbers that are known before the step as plain Python "
    "arguments; what you want to see goes out in aux."
)
_READ = (
    "keep it a tensor: torch functions take one in the place of a number, and torch.as_tensor(array) one of "
    'NumPy\'s. What you want to see or save goes out in aux, `return loss, {"accuracy": accuracy}`, and is '
    "in the metrics. Numbers that are known before the step are plain Python arguments; lengths such as "
    "x[mask].shape[0] are known."
)
TRAINED = (
    "the optimizer alone changes a leaf that trains: compute another tensor, w = params['w'] * scale, and "
    "use that. What `fn` itself keeps from step to step (a buffer, an average) has trainable=False in its "
    "spec: a step stores what is written to it."
)
_LENGTH = (
    "this operation takes no length that depends on data: mask instead of selecting (torch.where, weights of "
    "0 and 1), or put the rows back before it, out.index_add(0, index, rows)."
)
_TWO_LENGTHS = "select both with one mask that is computed once: two masks may have different lengths."
_BY_INDEX = (
    "from a position that depends on data, index instead of slicing: x[start + torch.arange(n)], and for a "
    "queue x[(start + torch.arange(n)) % len(x)] = rows."
)
COMMUNICATES = "`fn` communicates by itself"
ONE_DEVICE = (
    "write `fn` for one device and full shapes: what ranks exchange follows from the specs. What else it "
    "needs of all ranks is fs.psum(x) and fs.all_gather(x)."
)
# A failure inside one of torch's packages: (package, headline, way out).
_INTO = (
    ("distributed", COMMUNICATES, ONE_DEVICE),
    ("nested", "`fn` makes a nested tensor, which cannot be cut and differentiated", DENSE),
)
# The way out by the name of the function that failed, and then by words of torch's message; the first fits.
_BY_FUNCTION = {
    **dict.fromkeys(("item", "tolist", "numpy", "__array__", "__dlpack__", "__reduce_ex__"), _READ),
    **dict.fromkeys(("__float__", "__int__", "__complex__"), _READ),
    "__format__": "a value is there when the step has run: return it in aux, as in `return loss, "
    '{"accuracy": accuracy}`, and print it from the metrics.',
    **dict.fromkeys(
        ("__iter__", "unbind"),
        "loop over a fixed number, as in range(experts), and select inside. A mixture of transformers: "
        "model.set_experts_implementation('grouped_mm').",
    ),
    "one_hot": "say how many classes there are: F.one_hot(labels, num_classes=n).",
    "bincount": "say how many there will be: minlength=n.",
    "ctc_loss": "pass the lengths as tensors: F.ctc_loss(log_probs, targets, input_lengths, target_lengths).",
    "linalg_lstsq": "torch.linalg.pinv(A) @ B is its solution.",
    "repeat_interleave": "say how many rows there will be: output_size=n, or at most "
    "fs.bounded(torch.repeat_interleave(x, counts), n).",
    "_pack_padded_sequence": "run the recurrent module on the padded rows and mask what lies after each "
    "length: losses by arange(T) < lengths[:, None]; the last state of a row is its output at lengths - 1.",
}
_BY_MESSAGE = {
    r"_C\.Generator": "the state of a torch.Generator is lost in a trace: leave generator= out, the "
    "state's seed replaces it (step.init(..., seed=)).",
    r"NoneType": "None in a batch is a constant that `fn` sees as it is: pass a tensor in its place, or "
    "write `if x is None` in `fn`.",
    r"must be Tensor, not|got an invalid combination|unsupported operand": "make it a tensor where the batch "
    "is made, as in torch.as_tensor(labels); a list in the batch is so many Python numbers.",
    r"Autograd not support dtype": MIXED,
    r"not differentiable with respect to": "detach it, or give its leaf trainable=False; for weights of "
    "classes that train: F.cross_entropy(..., reduction='none') * weight[labels].",
    r"[Ll]ong|integer|Int\b": "indices and labels are integers, such as torch.long: are the arguments of the "
    "batch in the order of `fn`'s?",
    r"and meta!": "a tensor that `fn` closes over has no numbers: make it outside of fs.deferred(), or "
    "register it as a buffer of the module, which step.init fills.",
    r"Could not infer dtype|meta tensor": _VALUE,
    r"Pending unbacked symbols|got SymInt": _BY_INDEX,
    r"leaf Variable that requires grad": TRAINED,
    r"returns multiple views": "what chunk, split and unbind return cannot be written to, not even by .data: "
    "write to slices, as in x[..., :n], or to copies.",
    r"running_mean or running_var|mutate a captured Tensor|vmap: inplace": "what a torch.func transform "
    "calls writes to nothing outside of it: return the new value and write it after the transform; a "
    "BatchNorm in eval mode, or with track_running_stats=False, writes nothing.",
}
_HIGHER_ORDER = report(
    "`fn` calls {name}, which is not an ATen operator the compiler can cut and differentiate.",
    fix="write it with plain torch ops (torch.where for a choice, a Python loop for a fixed number of "
    "turns), or wrap it as a torch.library.custom_op with register_autograd.",
)
_ALIKE = "fn(params, *batch) alone, on full tensors, fails alike."
_SHAPES = (
    "shapes are those of this rank's micro-batch and of whole leaves: are the arguments of the batch in the "
    f"order of `fn`'s? {_ALIKE}"
)


def higher_order(name: str) -> TraceError:
    """Make the error for an operator that takes graphs, or is no ATen operator at all."""
    return TraceError(_HIGHER_ORDER.format(name=name))


def error_at(headline: str, found: Sequence[tuple[fx.Node, str]], fix: str) -> TraceError:
    """Make an error that names nodes of a program, what is wrong with each, and its line of the user's code.

    Its attribute `placed` says whether any of the nodes knows its line.
    """
    places = [node.meta.get("stack_trace", "") for node, _ in found]
    texts = [text for _, text in found]
    lines = [f"{t}, at {p}" if p else t for t, p in zip(texts, places, strict=True)]
    if len(lines) > 8:
        lines = [*lines[:8], f"and {len(lines) - 8} more"]
    error = TraceError(headline, lines, fix)
    error.placed = any(places)
    return error


def way_out(name: str, otherwise: str = _VALUE) -> str:
    """Return the way out for a torch function that needs values; `otherwise` if its name is not known."""
    return _BY_FUNCTION.get(name, otherwise)


@dataclass(frozen=True)
class Call:
    """A call of a torch function that failed."""

    error: Exception
    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", str(self.function))

    def tensors(self) -> list[Tensor]:
        return [t for argument in self.arguments for t in tensors_in(argument)]


def explain(
    error: Exception,
    failed: Call | None,
    names: Mapping[int, str],
    fn: Callable[..., Any],
    batch: Mapping[str, Any],
) -> Exception:
    """Turn an error that left `fn` into the one to raise; an error of the user's own code stays itself.

    Args:
        failed: the torch function that failed last, if any did.
        names: the names of leaves and of the batch's tensors, by their `id`.
        batch: the batch's leaves by path.
    """
    # Where did it fail, and in which call? The last call that failed may be one that `fn` has caught.
    place, message = place_of(error), (str(error).splitlines() or [""])[0].replace("FakeTensor", "Tensor")
    call = failed if failed is not None and failed.error is error else None
    shown = f"{call.name}({', '.join(_show_argument(a, names) for a in call.arguments)})" if call else ""

    # From the most specific cause to the least: each case knows its headline and its way out.
    for package, headline, fix in _INTO:
        if name := call_into(package, error):
            return _make_failure(f"{headline} ({name}).", place, [], fix)

    # An error of our own is complete but for the line.
    if isinstance(error, FnshardError):
        is_placed = not isinstance(error, TraceError) or getattr(error, "placed", False)
        return error if is_placed else TraceError(_add_place(str(error), place))

    # A value is asked for, which a fake tensor does not have.
    if _depends_on_values(error):
        symbolic = r".*data-dependent expression (.*?) \(unhinted.*|(\S+) \(<class 'torch.SymInt'>.*"
        message = re.sub(symbolic, r"\1\2, of lengths of data", message)
        headline = f"control flow or a shape in `fn` depends on a tensor's value ({message})."
        if "lengths of data" not in message:
            headline = "`fn` depends on a tensor's value, and tensors have none while it is traced:"
        return _make_failure(headline, place, [shown], _find_fix_for_values(error, call))

    # An operator has no rule for fakes.
    if isinstance(error, UnsupportedOperatorException) or "no fake impl" in str(error):
        headline = f"`fn` calls an operator that cannot run on tensors without values: {message}"
        fix = "write it with plain torch ops; for a torch.library.custom_op add register_fake."
        return _make_failure(headline, place, [], fix)

    # A torch function refuses its operands, or Python does; anything else is the user's own error.
    if call is not None:
        lines = [shown, _describe_call(fn, batch)]
        return _make_failure(f"`fn` fails in {call.name}: {message}", place, lines, _find_fix(call, message))
    if isinstance(error, TypeError) and "FakeTensor" in str(error):
        lines = [_describe_call(fn, batch)]
        return _make_failure(f"`fn` fails: {message}", place, lines, _find_fix(None, message))
    line = f", at {place}" if place else ""
    error.add_note(f"while `fn` was traced{line}; {_describe_call(fn, batch)}")
    return error


def _make_failure(headline: str, place: str, lines: list[str], fix: str) -> TraceError:
    """Make the error of a failure: its place, what failed, and the way out."""
    return TraceError(headline, [*([f"at {place}"] if place else []), *filter(None, lines)], fix)


def _add_place(text: str, place: str) -> str:
    """Add the user's line to a report that has none."""
    if not place or f"at {place}" in text:
        return text
    head, separator, fix = text.partition("\nFix: ")
    return f"{head}\n  at {place}{separator}{fix}"


def _depends_on_values(error: Exception) -> bool:
    """Return whether an error says that control flow or a shape needs a tensor's value."""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return True
    # torch raises these as plain RuntimeErrors, or as a class whose module would import sympy.
    words = r"data-dependent|\.\w+\(\) is not supported|SymInt.*is not tracked with proxy"
    says_so = re.search(words, str(error)) is not None
    return isinstance(error, RuntimeError) and (says_so or "GuardOnDataDependent" in type(error).__name__)


def _find_fix_for_values(error: Exception, call: Call | None) -> str:
    """Return the way out of an error that asks for values, by the function that asked."""
    if call is None or "GuardOnDataDependent" not in type(error).__name__:
        return way_out(call.name if call else "")
    if call.name in ("__getitem__", "__setitem__", "narrow"):
        return _BY_INDEX
    equal = re.search(r"(Eq|Ne)\(u\d+, u\d+\)", str(error))
    return way_out(call.name, _TWO_LENGTHS if equal else _LENGTH)


def _find_fix(call: Call | None, message: str) -> str:
    """Return the way out of any other failure, by the function, its operands and torch's message."""
    if call is not None and call.name in _BY_FUNCTION:
        return _BY_FUNCTION[call.name]
    if call is not None and any(map(unusual, call.tensors())):
        return DENSE
    dtypes = {t.dtype for t in call.tensors() if t.dtype.is_floating_point} if call is not None else set()
    if len(dtypes) > 1 and re.search(r"dtype|type|Float", message):
        return MIXED
    otherwise = _SHAPES if re.search(r"(?i)shape|size|dim|expand|broadcast|length", message) else _ALIKE
    return next((fix for words, fix in _BY_MESSAGE.items() if re.search(words, message)), otherwise)


def _show_argument(value: Any, names: Mapping[int, str]) -> str:
    """Return an argument as errors show it: tensors by name and shape, other values cut to one line."""
    if isinstance(value, Tensor):
        return f"{names.get(id(value), '')} {describe(value)}".strip()
    if isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value):
        more = ", ..." if len(value) > 4 else ""
        return f"[{', '.join(_show_argument(v, names) for v in value[:4])}{more}]"
    text = str(value) if isinstance(value, NumberList) else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _describe_call(fn: Callable[..., Any], batch: Mapping[str, Any]) -> str:
    """Describe the call of `fn`: `called with x = batch['0'] f32[4, 8], y = batch['1'] i64[4]`."""
    try:
        arguments = list(inspect.signature(fn).parameters.values())[1:]
    except (TypeError, ValueError):
        arguments = []
    named = [a.name for a in arguments if a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD)]

    def name(path: str) -> str:
        position, _, inner_path = path.partition(".")
        is_argument = position.isdigit() and int(position) < len(named) and not inner_path
        return f"{named[int(position)]} = " if is_argument else ""

    folded = fold_lists(batch, lambda leaf: isinstance(leaf, int | float))
    shown = [f"{name(p)}batch[{p!r}] {_show_argument(v, {})}" for p, v in list(folded.items())[:8]]
    more = ", ..." if len(folded) > 8 else ""
    return f"called with {', '.join(shown)}{more}" if shown else ""
