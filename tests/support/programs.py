"""Random programs, written line by line from the table of `grammar` and run as they are written.

A program is the text of a Python function of parameters and a batch. While it is drawn each line is run on
the first part of the batch, so that the next line knows what every value is. A line that raises, whose
result is not finite and of modest size, or past which autograd cannot go back, is left out.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import custom_functions
import grammar
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

import fnshard as fs

BATCH = ("x", "ids", "m", "y")
SPACE = {"torch": torch, "F": F, "math": math, "fs": fs, "custom": custom_functions}
f64 = torch.float64


@dataclass(frozen=True)
class Program:
    """`source`: the lines of `program(p, x, ids, m, y)`; `shapes`: of its leaves, by path.

    Leaves are f64 and train, but for `buffers`, which the program may write to: their dtypes by path.

    One part of the batch is x f64 [B, T, D], ids i64 [B, T] below `vocab`, m bool [B, T] with a true one
    in it, y f32 [B, D]; `sizes` are B, T, D.
    """

    source: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    sizes: tuple[int, int, int] = (2, 3, 4)
    vocab: int = 5
    buffers: Mapping[str, torch.dtype] = field(default_factory=dict)
    rows: tuple[str, ...] = field(default=(), compare=False, repr=False)  # of the grammar, that wrote it

    @property
    def text(self) -> str:
        """Return the function, to be pasted into a test."""
        return "\n".join([f"def program(p, {', '.join(BATCH)}):", *(f"    {line}" for line in self.source)])

    def __call__(self, p: Mapping[str, Tensor], *batch: Tensor) -> Any:
        return _compiled(self.text)(p, *batch)

    @property
    def params(self) -> dict[str, Tensor]:
        """Return values of the leaves: each depends on its own path, shape and dtype alone."""
        return {p: leaf_value(p, shape, self.buffers.get(p, f64)) for p, shape in self.shapes.items()}

    def leaves(self, frozen: Sequence[str] = ()) -> dict[str, Tensor]:
        """Return `params`, of which those that train require gradients."""
        fixed = {*frozen, *self.buffers}
        return {p: v.requires_grad_(p not in fixed) for p, v in self.params.items()}

    def part(self, seed: int) -> tuple[Tensor, ...]:
        """Draw one rank's micro-batch."""
        b, t, d = self.sizes
        made = torch.Generator().manual_seed(seed + 1)
        x = torch.randn(b, t, d, generator=made, dtype=f64)
        ids = torch.randint(self.vocab, (b, t), generator=made)
        mask = torch.rand(b, t, generator=made) < 0.6
        mask[0, 0] = True
        return x, ids, mask, torch.randn(b, d, generator=made)


@cache
def _compiled(text: str) -> Callable[..., Any]:
    space = dict(SPACE)
    exec(compile(text, "<program>", "exec"), space)
    return space["program"]


def leaf_value(path: str, shape: Sequence[int], dtype: torch.dtype = f64) -> Tensor:
    """Draw a leaf from a normal distribution of width 0.5 (integers: of 5), always the same."""
    made = torch.Generator().manual_seed(zlib.crc32(path.encode()))
    return (torch.randn(tuple(shape), generator=made, dtype=f64) * (0.5 if dtype == f64 else 5)).to(dtype)


LARGEST, MOST_ELEMENTS, MOST_LINES = 1e3, 600, 9
MISTAKES = (RuntimeError, IndexError, ValueError, TypeError, AttributeError, KeyError, NotImplementedError)
WRITES = re.compile(r"\w_\(|\] [*+-]?= |^\w+ [*+-]= |inplace=True")
MODES = {
    "": nullcontext,
    "with torch.no_grad(): ": torch.no_grad,
    'with torch.autocast("cpu", torch.bfloat16): ': partial(torch.autocast, "cpu", torch.bfloat16),
}


class Dropped(Exception):
    """A row finds nothing to work on here, or is not tame here."""


class Value(str):
    """The source text of a tensor, with its shape as drawn."""

    shape: tuple[int, ...]
    numel: int

    @classmethod
    def of(cls, text: str, value: Tensor) -> Value:
        made = cls(text)
        made.shape, made.numel = tuple(value.shape), value.numel()
        return made


class Scope:
    """A program under construction: what its lines have made, and the draws of those to come.

    The rows of the grammar call its draws. `values` holds every name, as after the lines so far.
    """

    vocab = Program.vocab

    def __init__(
        self, draw: Callable[[st.SearchStrategy], Any], sizes: tuple[int, int, int], families: Sequence[str]
    ):
        self.draw, self.families = draw, families
        self.empty = Program((), {}, sizes)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.buffers: dict[str, torch.dtype] = {}  # of these shapes, those that do not train
        self.closed: list[str] = ["h = x"]  # blocks that are complete
        self.open: list[str] = []  # the block under construction, without its loop
        self.unit, self.loops = "", 1
        self.leaves: list[str] = []  # source text of leaves that may be read here
        self.read: set[str] = set()
        self.rows: list[str] = []  # of the grammar, that have written a line
        self.restart()

    # -------------------------------------------------------------- running

    def restart(self) -> None:
        """Run all lines again on fresh values."""
        self.values: dict[str, Any] = {
            **SPACE,
            **dict(zip(BATCH, self.empty.part(0), strict=True)),
            "p": replace(self.empty, shapes=self.shapes, buffers=self.buffers).leaves(),
        }
        self._run("\n".join(self.closed))
        self.values["i"] = 0
        try:
            self._run("\n".join(self.open))
        except MISTAKES:  # a line ran on what one that was dropped had written
            self.open = []
            self.restart()

    def _run(self, text: str, mode: str = "exec") -> Any:
        return eval(compile(text, "<program>", mode), self.values)

    def value(self, text: str) -> Tensor:
        return eval(text, self.values)

    def add(self, text: str, mode: str = "") -> None:
        """Append a statement, or an expression, whose result gets a name; in one of MODES.

        Raises:
            Dropped: it does not run, or what it makes is not tame; nothing has changed then.
        """
        try:
            with MODES[mode]():
                line = self._named(text)
            params = self.values["p"]
            fine = all(tame(v) for v in (*self.values.values(), *params.values()))
            fine = fine and not any(params[p].requires_grad for p in self.buffers)
            if WRITES.search(line):
                self._go_back()
        except MISTAKES as error:
            self.restart()
            raise Dropped(str(error)) from error
        if not fine:
            self.restart()
            raise Dropped("not tame")
        self.open.append(mode + line)

    def _named(self, text: str) -> str:
        """Run it, and give what it makes a name, or several."""
        try:
            value = self._run(text, "eval")
        except SyntaxError:
            self._run(text)
            return text
        number = sum(bool(re.fullmatch(r"v\d+", n)) for n in self.values)
        if not isinstance(value, tuple | list):
            self.values[f"v{number}"] = value
            return f"v{number} = {text}"
        names = [f"v{number + i}" for i in range(len(value))]
        self.values |= dict(zip(names, value, strict=True))
        return f"{', '.join(names)}{',' * (len(names) == 1)} = {text}"

    def _go_back(self) -> None:
        """Raise where what was written to is wanted by a backward."""
        roots = [v for v in self.values.values() if isinstance(v, Tensor) and v.requires_grad]
        total = sum((torch.view_as_real(v) if v.is_complex() else v).sum() for v in roots)
        if roots:
            total.backward(retain_graph=True)

    # -------------------------------------------------------------- draws: values

    def pick(self, options: Iterable[Any]) -> Any:
        options = list(options)
        if not options:
            raise Dropped
        return options[self.draw(st.integers(0, len(options) - 1))]

    def those(self, fits: Callable[[Tensor], bool], *dtypes: torch.dtype) -> list[Value]:
        """Return values that fit, the latest first, and some leaves after them."""
        dtypes = dtypes or (f64,)
        named = [(n, v) for n, v in self.values.items() if isinstance(v, Tensor)]
        leaves = [(text, self.value(text)) for text in self.leaves[-6:]]
        found = [
            Value.of(n, v)
            for n, v in [*named[::-1], *leaves[::-1]]
            if v.dtype in dtypes and v.numel() and fits(v)
        ]
        return found[:12]

    def _use(self, found: Iterable[Value]) -> Value:
        value = self.pick(found)
        self.read.add(value)
        return value

    def f(self, least: int = 0, most: int = 4, fits: Callable[[Tensor], bool] = lambda v: True) -> Value:
        """Pick a float64 value of so many dims."""
        return self._use(self.those(lambda v: least <= v.dim() <= most and fits(v)))

    def distinct(
        self, least: int = 1, most: int = 4, fits: Callable[[Tensor], bool] = lambda v: True
    ) -> Value:
        """Pick a value no two elements of which are close: orders and extremes are smooth there."""
        return self.f(least, most, lambda v: _distinct(v) and fits(v))

    def like(self, a: Value) -> Value:
        """Pick another value of this one's shape; itself if there is none."""
        return self._use([n for n in self.those(lambda v: v.shape == a.shape) if n != a] or [a])

    def fitting(self, a: Value) -> Value:
        """Pick a value that broadcasts to this one's shape, or a leaf that does."""
        if self.upto(3) == 3:
            return self.leaf(*a.shape[self.upto(len(a.shape)) :])
        return self._use([n for n in self.those(lambda v: _broadcasts(v.shape, a.shape)) if n != a] or [a])

    def act(self, least: int = 0, most: int = 4) -> Value:
        """Pick a float64 value that may be written to: no leaf, and not in a leaf's memory."""
        leaves = {v.untyped_storage()._cdata for v in self.values["p"].values()}
        return self.f(least, most, lambda v: v.untyped_storage()._cdata not in leaves)

    def complex(self, least: int = 0, most: int = 4) -> Value:
        return self._use(self.those(lambda v: least <= v.dim() <= most, torch.complex128))

    complex_act = complex

    def int(self, least: int = 1, most: int = 4) -> Value:
        return self._use(self.those(lambda v: least <= v.dim() <= most, torch.int64))

    def ids(self) -> str:
        """Pick integers below `vocab`."""
        found = self.those(
            lambda v: v.dim() > 0 and int(v.min()) >= 0 and int(v.max()) < self.vocab, torch.int64
        )  # a number that is computed is refused as an index
        return f"({self.pick(found)} % {self.vocab})" if self.flag() else "ids"

    def bool(self, a: Value | None = None) -> Value:
        """Pick a bool value that broadcasts to `a`, if that is given; at need a comparison of `a`."""
        found = self.those(lambda v: a is None or _broadcasts(v.shape, a.shape), torch.bool)
        return self.pick([*found, *([] if a is None else [f"({a} > 0.13)"])])

    def low(self) -> Value:
        """Pick a value of a smaller float dtype."""
        return self._use(self.those(lambda v: True, torch.float32, torch.bfloat16, torch.float16))

    def is_sequence(self, v: Tensor) -> bool:
        """Return whether a value is [B, T, ...]."""
        return tuple(v.shape[:2]) == self.empty.sizes[:2]

    # -------------------------------------------------------------- draws: leaves

    def leaf(self, *shape: int, buffer: torch.dtype | None = None) -> Value:
        """Pick a leaf of this shape: a new one of the unit at hand, or one there is, which is then tied.

        `buffer`: the dtype of one that does not train, and may be written to.
        """
        there = [t for t in self.leaves if self._is_leaf(self.value(t), shape, buffer)]
        if there and self.upto(2) >= (2 if buffer is None else 1):
            return Value.of(text := self.pick(there[::-1]), self.value(text))
        if math.prod(shape) > MOST_ELEMENTS // 4:
            raise Dropped
        name = f"{'w' if buffer is None else 'b'}{len(self.shapes)}"
        looped = self.loops > 1
        paths = [f"{self.unit}.{i}.{name}" for i in range(self.loops)] if looped else [f"{self.unit}.{name}"]
        self.shapes |= dict.fromkeys(paths, shape)
        if buffer is not None:
            self.buffers |= dict.fromkeys(paths, buffer)
        made = replace(self.empty, shapes=dict.fromkeys(paths, shape), buffers=self.buffers)
        self.values["p"] |= made.leaves()
        self.leaves.append(f'p[f"{self.unit}.{{i}}.{name}"]' if looped else f'p["{paths[0]}"]')
        return Value.of(self.leaves[-1], self.value(self.leaves[-1]))

    def _is_leaf(self, value: Tensor, shape: Sequence[int], buffer: torch.dtype | None) -> bool:
        fits = value.dtype == (buffer or f64) and tuple(value.shape) == tuple(shape)
        return fits and not (buffer and value.requires_grad)

    def buffer(self, *shape: int) -> Value:
        """Pick a float leaf that may be written to."""
        return self.leaf(*shape, buffer=f64)

    def counter(self, *shape: int) -> Value:
        """Pick an integer leaf that may be written to."""
        return self.leaf(*shape, buffer=torch.int64)

    def fixed(self, a: Value) -> str:
        """Write a value for a leaf that does not train: mostly detached, else under no_grad or dropped."""
        return f"{a}.detach()" if self.upto(3) else a

    def any_leaf(self, least: int = 1) -> Value:
        """Pick a leaf that is distinct, of this unit if it is new."""
        floats = [t for t in self.leaves if self.value(t).dtype == f64]
        there = [t for t in floats if self.value(t).dim() >= least]
        if there and self.flag():
            return Value.of(text := self.pick(there[::-1]), self.value(text))
        d = self.empty.sizes[2]
        return self.leaf(*self.pick([(d, 3), (d,), (4, 8), (2, d, 3)]))

    # -------------------------------------------------------------- draws: numbers

    def flag(self) -> bool:
        return self.draw(st.booleans())

    def upto(self, most: int, least: int = 0) -> int:
        return self.draw(st.integers(least, max(least, most)))

    def num(self) -> float:
        return self.pick([0.5, 1.5, -0.7, 2, 0.1])

    def dim(self, a: Value, size: int = 1) -> int:
        """Pick a dim of at least this size, counted from either end."""
        dim = self.pick([d for d in range(len(a.shape)) if a.shape[d] >= size])
        return dim - len(a.shape) if self.flag() else dim

    def perm(self, a: Value) -> list[int]:
        return list(self.draw(st.permutations(range(len(a.shape)))))

    def slice(self) -> str:
        return self.pick([":1", "1:", ":-1", "::2", "1::2", ":"])

    def reshaped(self, a: Value) -> str:
        """Write a shape of as many elements."""
        n = a.numel
        ways = [(-1,), (n, 1), (1, n), *((k, -1) for k in (2, 3, 4) if n % k == 0), a.shape[::-1]]
        return ", ".join(map(str, self.pick(ways))) or "1"

    def turn(self) -> str:
        """Write the number of this turn of the block's loop."""
        return self.pick(["i"] if self.loops > 1 else [])

    def list(self, size: int, count: int | None = None, unique: bool = False) -> list[int]:
        """Draw a list of indices below `size`."""
        count = min(size, self.upto(3, 1)) if count is None else count
        return self.draw(st.lists(st.integers(0, size - 1), min_size=count, max_size=count, unique=unique))

    def indices(self, shape: Sequence[int], size: int, rows: int | None = None) -> str:
        """Write a constant index tensor of as many dims as `shape`, and of at most its sizes.

        `rows`: 1 makes one row of zeros, so that no element is written to twice.
        """
        sizes = [min(s, 2) for s in shape]
        if rows == 1:
            return f"torch.full({tuple(1 for _ in shape)}, {self.upto(size - 1)})"
        return f"(torch.arange({math.prod(sizes)}).reshape({sizes}) * {self.upto(3, 1)} % {size})"

    def attention_mask(self, keys: int, one: bool = False) -> str:
        """Write a bool mask of queries and keys that lets every query see a key."""
        ways = [
            f"torch.arange({keys}) < {self.upto(keys, 1)}",
            f"(torch.arange({keys}) < 1)[None, :]",
            f"torch.ones({1 if one else keys}, {keys}, dtype=torch.bool).tril()",
            f"torch.ones({1 if one else keys}, {keys}, dtype=torch.bool)",
        ]
        more = [f"torch.eye({keys}, dtype=torch.bool)", f"torch.ones({keys}, {keys}).tril().log().double()"]
        return self.pick(ways if one else ways + more)


def _broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(a in (1, b) for a, b in pairs)


def _distinct(value: Tensor) -> bool:
    flat = value.detach().flatten().sort().values
    return flat.numel() < 2 or float(flat.diff().min()) > 1e-5


def tame(value: Any) -> bool:
    """Return whether a value is finite and of modest size; what is no float tensor is."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return True
    if value.numel() > MOST_ELEMENTS:
        return False
    return value.numel() == 0 or float(value.detach().abs().max()) < LARGEST  # false for NaN, too


# ------------------------------------------------------------------ drawing


@st.composite
def programs(draw: Any, most_units: int = 3, families: Sequence[str] = tuple(grammar.FAMILIES)) -> Program:
    """Draw a program of blocks, each of a unit of its own, or of several equal ones in a loop."""
    scope = Scope(draw, draw(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(2, 6))), families)
    for number in range(draw(st.integers(1, 4))):
        _block(scope, f"u{number}", draw(st.sampled_from([1, 1, 1, 2, most_units])))
    program = _finish(scope)
    assume(valid(program))
    return program


def _block(scope: Scope, unit: str, loops: int) -> None:
    scope.unit, scope.loops, outer = unit, loops, list(scope.leaves)
    for _ in range(MOST_LINES):
        if not _line(scope):
            break
    shape = scope.values["h"].shape
    found = [n for n in scope.those(lambda v: _broadcasts(v.shape, shape)) if n not in ("h", "x")]
    if found:
        other = scope._use(found)
        with suppress(Dropped):
            scope.add(f"h = h + 0.3 * torch.tanh({other})")
    looped, before = loops > 1 and scope.open, list(scope.closed)
    scope.closed += (
        [f"for i in range({loops}):", *(f"    {line}" for line in scope.open)] if looped else scope.open
    )
    scope.open = []
    if looped:
        scope.leaves = outer  # the loop's number is not known after it
        try:
            scope.restart()
        except MISTAKES:  # it runs once and not again, on what it wrote
            scope.closed = before
            scope.restart()


def _line(scope: Scope) -> bool:
    """Draw one line and add it if it is any good; False ends the block."""
    family = scope.pick(["end", *scope.families])
    if family == "end":
        return False
    row = scope.pick(grammar.FAMILIES[family])
    kept = dict(scope.shapes), dict(scope.buffers), list(scope.leaves), set(scope.read)
    try:
        scope.add(grammar.FAMILIES[family][row](scope), scope.pick([""] * 11 + list(MODES)))
        scope.rows.append(row)
    except Dropped:
        scope.shapes, scope.buffers, scope.leaves, scope.read = kept
        scope.values["p"] = {p: v for p, v in scope.values["p"].items() if p in scope.shapes}
    return True


def _finish(scope: Scope) -> Program:
    """End a program with a loss of all values that no line has read."""
    tensors = {n: v for n, v in scope.values.items() if isinstance(v, Tensor)}
    unread = {n: v for n, v in tensors.items() if n not in (*BATCH, *scope.read)}
    losses = []
    for name, value in unread.items():
        if not value.numel() or value.dtype not in (f64, torch.complex128):
            continue
        text = f"torch.view_as_real({name})" if value.is_complex() else name
        ways = f"{text}.square().mean()", f"torch.sin({text}).sum() * 0.1", f"{text}.mean() * 0.3"
        losses.append(scope.pick(ways))
    assume(losses)
    lines = [f"loss = {losses[0]}", *(f"loss = loss + {text}" for text in losses[1:])]
    result = scope.pick([
        "loss",
        'loss, {"loss": loss.detach(), "h": h}',
        f'loss, {{"view": {scope.pick(tensors)}, "x": x, "h": h.detach()[:1], "sum": h.sum()}}',
        "fs.Mean(loss * m.sum(), m.sum())",
        'fs.Mean(loss * m.sum(), m.sum(), bound=m.numel()), {"mean": fs.Mean(loss.detach(), 2)}',
    ])  # fmt: skip
    source = (*scope.closed, *lines, f"return {result}")
    fields = {"shapes": scope.shapes, "buffers": scope.buffers, "rows": tuple(scope.rows)}
    return replace(scope.empty, source=source, **fields)


def valid(program: Program, frozen: Sequence[str] = ()) -> bool:
    """Return whether plain autograd takes a program, and its gradients are tame."""
    leaves = program.leaves(frozen)
    try:
        result = program(dict(leaves), *program.part(0))
        head = result[0] if isinstance(result, tuple) else result
        total = head.total if isinstance(head, fs.Mean) else head
        if not total.requires_grad or not tame(total):
            return False
        total.backward()
    except MISTAKES:
        return False
    grads = [v.grad for v in leaves.values() if v.grad is not None]
    return bool(grads) and all(map(tame, grads))
