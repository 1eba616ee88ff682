"""A random program in a random layout: run, and compared with plain autograd over the same parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grammar
import reference
import torch
from hypothesis import assume
from hypothesis import strategies as st
from programs import Program, programs, valid
from ranks import RankError
from torch import Tensor

import fnshard as fs
from fnshard import LayoutSpec, P
from fnshard.errors import TraceError

ATOL, STEPS = 1e-10, 2
AXES: tuple[dict[str, int], ...] = (
    {"shard": 2}, {"shard": 4}, {"replicate": 2, "shard": 2}, {"shard": 3}, {"replicate": 2, "shard": 1},
    {"shard": 1},
)  # fmt: skip
PLACED: tuple[dict[str, int], ...] = (
    {"shard": 1, "context": 2}, {"shard": 1, "tensor": 2}, {"shard": 2, "tensor": 2},
    {"shard": 1, "context": 2, "tensor": 2}, {"shard": 2, "context": 2}, {"shard": 1, "expert": 2},
)  # fmt: skip
_CLIPPED = fs.optim.chain(fs.optim.clip_by_global_norm(0.2), fs.optim.sgd(0.1))
OPTIMIZERS: dict[str, tuple[Any, Any, float | None]] = {  # by name: ours, torch's, what it clips to
    "sgd": (fs.optim.sgd(0.05, momentum=0.9), reference.sgd(0.05, 0.9), None),
    "adamw": (fs.optim.adamw(3e-3, eps=1e-3, weight_decay=0.1), reference.adamw(3e-3, eps=1e-3), None),
    "clipped": (_CLIPPED, reference.sgd(0.1), 0.2),
    "lambda": (fs.optim.sgd(lambda step: 0.125 * 0.5**step), reference.sgd(0.125), None),
}
RATES: dict[str, Callable[[int], float]] = {"lambda": lambda step: 0.125 * 0.5**step}
RUNS = ("gradients", "gradients", "forward", *OPTIMIZERS)
_RULES = {
    torch.float64: (None, "mean", "sum", "rank0", "local"),
    torch.int64: (None, "sum", "rank0", "local"),
}
DEFAULTS = {
    "accumulate": 1, "accumulate_mode": "reduce", "micro_order": "depth", "prefetch": (1, 1),
    "overlap": 1, "remat": "none", "grad_norm": False,
}  # fmt: skip


@st.composite
def layouts(draw: Any, shape: tuple[int, ...], names: tuple[str, ...]) -> LayoutSpec:
    """Draw a layout that `check_specs` allows: which axes split which dims, and what of the leaf is split."""
    chosen = draw(st.lists(st.sampled_from(names), unique=True, max_size=len(names))) if shape else []
    parts: list[Any] = [()] * len(shape)
    for axis in chosen:
        dim = draw(st.integers(0, len(shape) - 1))
        parts[dim] = (*parts[dim], axis)
    split = P(*parts)
    fields = draw(st.sampled_from([
        {"storage": split}, {"gradient": split, "optimizer": split}, {"optimizer": split}, {},
    ]))  # fmt: skip
    return LayoutSpec(
        **fields, trainable=draw(st.sampled_from([True, True, True, False])), reshard=draw(st.booleans())
    )


@dataclass(frozen=True)
class Case:
    """A program in a layout.

    Args:
        layouts: specs by path, instead of a preset's.
        aggregation: how buffers are aggregated, by path.
        run: what is compared: "gradients", what `shard_forward` gives ("forward"), or what some steps of one
            of OPTIMIZERS leave.
        splits: what splits a leaf while it computes.
    """

    program: Program
    axes: Mapping[str, int] = field(default_factory=lambda: {"shard": 1})
    preset: str = "full_shard"
    layouts: Mapping[str, LayoutSpec] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    aggregation: Mapping[str, str] = field(default_factory=dict)
    run: str = "gradients"
    options: Mapping[str, Any] = field(default_factory=dict)
    splits: Mapping[str, P] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Return the number of ranks that have rows of their own."""
        return self.axes.get("replicate", 1) * self.axes["shard"] * self.axes.get("expert", 1)

    @property
    def atol(self) -> float:
        """Return the tolerance: splits of values change the order of sums, which narrow dtypes show."""
        if not set(self.axes) - {"replicate", "shard"}:
            return ATOL
        text = "\n".join(self.program.source)
        if re.search("float16|half", text):
            return 0.05
        return 1e-5 if re.search(r"\by\b|float\b|float32", text) else ATOL

    @property
    def rows(self) -> list[int]:
        """Return, for each rank of the mesh, whose rows it has."""
        mesh = fs.make_mesh(**self.axes, simulated=True)
        return fs.simulate(mesh, lambda rank: mesh.data_rank)

    def specs(self, mesh: fs.Mesh) -> Any:
        params = self.program.params
        if self.layouts:
            specs = fs.match_specs(params, [(p, replace(s, buffers=True)) for p, s in self.layouts.items()])
        else:
            specs = fs.presets.PRESETS[self.preset](params, mesh)
        for path in (*self.frozen, *self.program.buffers):
            specs[path] = replace(specs[path], trainable=False, aggregation=self.aggregation.get(path))
            if specs[path].aggregation == "local":
                specs[path] = replace(specs[path], storage=P(), gradient=P(), optimizer=P())
        for path, split in self.splits.items():
            fields = dict.fromkeys(("storage", "gradient", "optimizer", "compute"), split)
            specs[path] = replace(specs[path], **fields)
        return specs

    def parts(self, step: int, rank: int) -> list[tuple[Tensor, ...]]:
        """Return a rank's micro-batches."""
        micros = 1 if self.run == "forward" else self.options.get("accumulate", 1)
        return [self.program.part(100 * step + 10 * rank + k) for k in range(micros)]

    def all_parts(self, step: int) -> list[tuple[Tensor, ...]]:
        """Return the micro-batches of all ranks, rank by rank."""
        return [part for rank in range(self.ranks) for part in self.parts(step, rank)]

    def batch(self, step: int, rank: int) -> tuple[Tensor, ...]:
        """Return what one rank hands to a step."""
        return tuple(torch.cat(leaves) for leaves in zip(*self.parts(step, rank), strict=True))


# ------------------------------------------------------------------ what is expected


def compute_expected(case: Case, disturbance: float = 0.0) -> list[dict[str, Tensor]]:
    """Compute by plain autograd in one process what each rank is to have: whole tensors by name.

    Args:
        disturbance: the size of a random number that is added to each element of the leaves.
    """
    leaves = case.program.leaves(case.frozen)
    if disturbance:
        made = torch.Generator().manual_seed(0)
        for leaf in [v.data for v in leaves.values() if v.is_floating_point()]:
            leaf += disturbance * torch.randn(leaf.shape, generator=made).to(leaf)
    plain = Plain(case, leaves)
    run = {"gradients": _gradients, "forward": _forward}.get(case.run, _train_case)
    found = run(case, plain, leaves)
    return [{**each, **own} for each, own in zip(found, plain.buffers, strict=True)]


class Plain:
    """A program that runs on the parts of every rank in turn, and may write to batch and buffers.

    Each part has leaves of its own, so that a hook of a leaf sees the gradient of one part.
    """

    def __init__(self, case: Case, leaves: Mapping[str, Tensor]):
        self.case, self.calls = case, 0
        self.buffers = [{p: leaves[p].clone() for p in case.program.buffers} for _ in range(case.ranks)]
        self.before = dict(self.buffers[0])

    def __call__(self, p: Mapping[str, Tensor], *batch: Tensor) -> Any:
        micros = len(self.case.parts(0, 0))
        rank = self.calls // micros % self.case.ranks
        own = {k: v.clone() for k, v in self.buffers[rank].items()}
        result = self.case.program(
            {**{k: v.view_as(v) for k, v in p.items()}, **own}, *(v.clone() for v in batch)
        )
        self.buffers[rank] = {k: v.detach() for k, v in own.items()}  # one backward does not reach another
        self.calls += 1
        if self.calls % (micros * self.case.ranks) == 0:
            self.aggregate()
        return result

    def aggregate(self) -> None:
        """Aggregate the ranks' buffers, as a step does at its end."""
        for path, old in self.before.items():
            each = [own[path] for own in self.buffers]
            rule = self.case.aggregation.get(path) or ("mean" if old.is_floating_point() else "rank0")
            if rule == "local":
                continue
            joined = sum(each) / len(each) if rule == "mean" else each[0]
            joined = old + sum(new - old for new in each) if rule == "sum" else joined
            self.buffers = [{**own, path: joined} for own in self.buffers]
        self.before = dict(self.buffers[0])


def _gradients(case: Case, plain: Plain, leaves: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    results = [plain(leaves, *part) for part in case.all_parts(0)]
    loss = reference.total_loss(results)
    loss.backward()
    named = {p: v for p, v in leaves.items() if v.requires_grad}
    grads = {p: torch.zeros_like(v) if v.grad is None else v.grad for p, v in named.items()}
    same = {"loss": loss.detach(), **grads}
    micros = len(results) // case.ranks
    aux = [r[1] if isinstance(r, tuple) else {} for r in results]
    by_rank = []
    for rank in range(case.ranks):
        mine = {f"aux {k}": v for k, v in aux[(rank + 1) * micros - 1].items()}
        for name in mine:
            if isinstance(mine[name], fs.Mean) or mine[name].dim() == 0:  # of all ranks and micro-batches
                values = [each[name.removeprefix("aux ")] for each in aux]
                counts = isinstance(values[0], torch.Tensor) and values[0].dtype in (torch.int64, torch.bool)
                mine[name] = reference.total_loss([v.double() for v in values] if counts else values)
        by_rank.append(same | {k: v.detach() for k, v in mine.items()})
    return by_rank


def _forward(case: Case, plain: Plain, leaves: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    with torch.no_grad():
        fixed = {p: v.detach() for p, v in leaves.items()}
        results = [plain(fixed, *part) for part in case.all_parts(0)]
    return [_flat(result) for result in results]


def _train_case(case: Case, plain: Plain, leaves: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    _, optimizers, clip = OPTIMIZERS[case.run]
    steps = [case.all_parts(step) for step in range(STEPS)]
    fixed = (*case.frozen, *case.program.buffers)
    how = {"frozen": fixed, "clip": clip, "rate": RATES.get(case.run)}
    got = reference.train(plain, leaves, steps, optimizers, **how)
    losses = torch.tensor(got.losses, dtype=torch.float64)
    return [{**got.params, **{f"loss {number}": loss for number, loss in enumerate(losses)}}] * case.ranks


def _flat(result: Any, name: str = "result") -> dict[str, Tensor]:
    """Return the tensors of what a program returns, by name."""
    if isinstance(result, tuple):
        return {
            **_flat(result[0]),
            **{k: v for n, leaf in result[1].items() for k, v in _flat(leaf, n).items()},
        }
    if isinstance(result, fs.Mean):
        return {f"{name} total": result.total, f"{name} count": torch.as_tensor(result.count)}
    return {name: result}


# ------------------------------------------------------------------ the same by fnshard


def make_step(case: Case, mesh: fs.Mesh) -> Any:
    """Make a step, or a forward, of the case."""
    specs, options = case.specs(mesh), {"backend": "eager", **case.options}
    if case.run == "forward":
        prefetch = options.get("prefetch", (1, 1))[0]
        return fs.shard_forward(case.program, specs, mesh=mesh, prefetch=prefetch, backend=options["backend"])
    optimizer = OPTIMIZERS[case.run][0] if case.run in OPTIMIZERS else None
    return fs.shard_step(case.program, specs, mesh=mesh, optimizer=optimizer, **options)


def on_mesh(rank: int, case: Case, mesh: fs.Mesh, step: Any) -> dict[str, Tensor]:
    """Run a case on one rank of a mesh, and return whole tensors by name."""
    rank = mesh.data_rank
    specs, params = case.specs(mesh), case.program.params
    if case.run == "forward":
        return _flat(step(fs.shard(params, specs, mesh), *case.batch(0, rank)))
    if case.run == "gradients":
        stored = fs.shard(params, specs, mesh)
        value, grads = step(stored, *case.batch(0, rank))
        whole = fs.unshard(stored, specs, mesh)
        loss, aux = value if isinstance(value, tuple) else (value, {})
        grads = {p: g for p, g in grads.items() if g is not None}
        layouts = {p: LayoutSpec(specs[p].gradient).resolve(params[p], "u") for p in grads}
        named = {f"aux {k}": v for k, v in aux.items()} | {p: whole[p] for p in case.program.buffers}
        return {"loss": loss, **named, **fs.unshard(grads, layouts, mesh)}
    state, losses = step.init(params), {}
    for number in range(STEPS):
        state, metrics = step(state, *case.batch(number, rank))
        losses[f"loss {number}"] = metrics["loss"]
    return {**losses, **fs.unshard(state.params, specs, mesh)}


def simulate_case(case: Case) -> list[dict[str, Tensor]]:
    """Run a case on every rank of a simulated mesh."""
    mesh = fs.make_mesh(**case.axes, simulated=True)
    step = make_step(case, mesh)
    return fs.simulate(mesh, lambda rank: on_mesh(rank, case, mesh, step))


def on_rank(rank: int, case: Case) -> dict[str, Tensor]:
    """Run a case in a process of a pool."""
    mesh = fs.make_mesh(**case.axes, device="cpu")
    return on_mesh(rank, case, mesh, make_step(case, mesh))


# ------------------------------------------------------------------ comparing

# What the front end may refuse: words of its errors.
REFUSED = (
    "writes in place",  # to a value while it reads the leaves of several units
    "writes values that need a gradient in place",  # through detach
    "whose forward takes a context",  # next to torch.autograd.grad or vjp, as in torch.func
    "whose backward is once_differentiable",  # there, too
    "registers a gradient hook",  # next to torch.autograd.grad, or where lengths depend on data
    "whose strides are not those of a copy",  # an input that is written to by as_strided
    "changes requires_grad of",  # a buffer, by what is written in a later turn
    "writes past autograd",  # to what its backward reads
)


class Wrong(AssertionError):
    """An error: a case came out otherwise than in plain autograd."""


def difference(got: Mapping[str, Tensor], expected_values: Mapping[str, Tensor], atol: float = ATOL) -> str:
    """Return the names in which two results differ by more than `atol` (of values above 1: in proportion)."""
    lines = [f"{name} is missing" for name in expected_values.keys() ^ got.keys()]
    for name in expected_values.keys() & got.keys():
        a, b = torch.as_tensor(got[name]).to(torch.complex128), expected_values[name].to(torch.complex128)
        if a.shape != b.shape:
            lines.append(f"{name} is {list(a.shape)} and not {list(b.shape)}")
            continue
        far = (a - b)[a != b].abs()  # infinities that are equal have no difference
        size = max([1.0, *b[b.isfinite()].abs().tolist()])
        if not (far <= atol * size).all():
            lines.append(f"{name}: off by {float(far.max()):.3g} of {size:.3g}")
    return "\n".join(sorted(lines))


def check(case: Case, runner: Callable[[Case], list[dict[str, Tensor]]] = simulate_case) -> str:
    """Run and compare; "" if all is well, "refused: ..." or "unstable" if nothing can be said.

    Raises:
        Wrong: it differs, though plain autograd itself gives the same for leaves that differ by 1e-9.
    """
    truth = compute_expected(case)
    try:
        results = runner(case)
    except (TraceError, RankError) as error:
        if any(words in str(error) for words in REFUSED):
            return f"refused: {str(error).splitlines()[0]}"
        raise
    truth = [truth[row] for row in case.rows]
    pairs = list(zip(results, truth, strict=True))
    wrong = [f"rank {r}: {text}" for r, pair in enumerate(pairs) if (text := difference(*pair, case.atol))]
    if not wrong:
        return ""
    if any(
        difference(*pair, 1e-5) for d in (1e-9, -1e-9) for pair in zip(_by_rows(case, d), truth, strict=True)
    ):
        return "unstable"  # the truth jumps here: a tie, a step, a pole
    raise Wrong("\n".join(wrong))


def _by_rows(case: Case, disturbance: float) -> list[dict[str, Tensor]]:
    each = compute_expected(case, disturbance)
    return [each[row] for row in case.rows]


# ------------------------------------------------------------------ half types on both backends


def check_halves(program: Program, dtype: torch.dtype = torch.bfloat16) -> str:
    """Run a program in a half type on both backends next to fp64; "" if all is well, else why none is told.

    Raises:
        Wrong: compiled numbers are not finite where eager ones are, or are far further from the truth than
            eager ones are, though eager ones do not jump when the leaves move by a rounding.
    """
    half = replace(program, source=tuple(_narrow(line, dtype) for line in program.source))
    batch = program.part(0)
    truth = _halves(program, torch.float64, batch)
    try:
        eager = _halves(half, dtype, batch)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        return f"refused: {str(error).splitlines()[0]}"  # an operator without half types
    compiled = _halves(half, dtype, batch, backend="inductor")
    ill = [n for n, v in eager.items() if bool((v.isfinite() & ~compiled[n].isfinite()).any())]
    if ill:
        raise Wrong(f"not finite where eager is: {', '.join(ill)}")
    eps, finite = torch.finfo(dtype).eps, {n: v.isfinite() & truth[n].isfinite() for n, v in eager.items()}
    eager, compiled, truth = (
        {n: torch.where(finite[n], v, 0.0) for n, v in each.items()} for each in (eager, compiled, truth)
    )
    far = [n for n, v in eager.items() if _far(compiled[n], truth[n]) > 4 * _far(v, truth[n]) + 8 * eps]
    if not far:
        return ""
    moved = [_halves(half, dtype, batch, move=move, backend="eager") for move in (eps, -eps)]
    moved = [{n: torch.where(finite[n], each[n], 0.0) for n in far} for each in moved]
    if any(_far(each[n], truth[n]) > 2 * _far(eager[n], truth[n]) + 4 * eps for each in moved for n in far):
        return "unstable"
    raise Wrong(f"further from the truth than eager: {', '.join(far)}")


def _narrow(line: str, dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return line.replace("float64", name).replace(".double()", f".to({dtype})")


def _far(value: Tensor, truth: Tensor) -> float:
    """Return the largest error, of values above 1 in proportion; infinite if it is not finite."""
    error = float((value.double() - truth.double()).abs().max()) if value.numel() else 0.0
    return error / max(1.0, float(truth.abs().max())) if error == error else float("inf")


def _halves(
    program: Program,
    dtype: torch.dtype,
    batch: Sequence[Tensor],
    *,
    move: float = 0.0,
    backend: str = "eager",
) -> dict[str, Tensor]:
    """Compute the loss and gradients by a step on one rank, every float in `dtype`."""
    params = {p: (v * (1 + move)).to(dtype) for p, v in program.params.items()}
    step = fs.shard_step(program, fs.match_specs(params, [("*", LayoutSpec())]), backend=backend)
    value, grads = step(params, *(v.to(dtype) if v.is_floating_point() else v for v in batch))
    return {"loss": value[0] if isinstance(value, tuple) else value, **grads}


# ------------------------------------------------------------------ drawing


@st.composite
def cases(
    draw: Any,
    most_units: int = 3,
    axes: tuple[dict[str, int], ...] = AXES,
    families: Sequence[str] = tuple(grammar.FAMILIES),
) -> Case:
    """Draw a program in a layout."""
    program = draw(programs(most_units, families))
    chosen, paths = draw(st.sampled_from(axes)), sorted(program.shapes)
    options: dict[str, Any] = {
        "accumulate": draw(st.sampled_from([1, 1, 2, 3])),
        "accumulate_mode": draw(st.sampled_from(["reduce", "local"])),
        "micro_order": draw(st.sampled_from(["depth", "breadth"])),
        "prefetch": (draw(st.integers(0, 3)), draw(st.integers(0, 3))),
        "overlap": draw(st.integers(0, 5)),
        "remat": draw(st.sampled_from(["none", "none", "unit", "offload", "unit+offload", 0.5])),
        "grad_norm": draw(st.booleans()),
    }
    options = {k: v for k, v in options.items() if v != DEFAULTS[k]}
    placed = set(chosen) - {"replicate", "shard"}
    layouts, frozen, preset = {}, (), draw(st.sampled_from(sorted(set(fs.presets.PRESETS) - {"zero3"})))
    if not placed and draw(st.integers(0, 3)) == 3:
        layouts = {p: draw(any_layout(program.shapes[p], tuple(chosen))) for p in paths}
        frozen = tuple(p for p in paths if not layouts[p].trainable)
    elif draw(st.integers(0, 3)) == 3:
        frozen = tuple(p for p in paths if draw(st.integers(0, 3)) == 3)
    rules = {p: draw(st.sampled_from(_RULES[t])) for p, t in program.buffers.items()}
    aggregation = {p: rule for p, rule in rules.items() if rule}
    assume(valid(program, frozen))
    run = draw(st.sampled_from([r for r in RUNS if r != "forward" or not program.buffers]))
    assume(run != "forward" or not any("autograd_grad" in row for row in program.rows))  # nothing needs one
    splits = {}
    for path in paths:
        ways = _compute_splits(program.shapes[path], chosen, path in program.buffers)
        if path not in layouts and ways and draw(st.integers(0, 3)):
            splits[path] = draw(st.sampled_from(ways))
    aggregation = {p: rule for p, rule in aggregation.items() if rule != "local" or p not in splits}
    return Case(program, chosen, preset, layouts, frozen, aggregation, run, options, splits)


def _compute_splits(shape: tuple[int, ...], axes: Mapping[str, int], is_buffer: bool) -> list[P]:
    """Return what may split a leaf while it computes: the tensor axis a dim, the expert axis a stack."""
    ways = [
        P(*[None] * d, "tensor") for d, size in enumerate(shape) if size % axes.get("tensor", size + 1) == 0
    ]
    stack = len(shape) > 2 and not is_buffer and shape[0] % axes.get("expert", shape[0] + 1) == 0
    return [*ways, P("expert")] if stack else ways


@st.composite
def any_layout(draw: Any, shape: tuple[int, ...], names: tuple[str, ...]) -> LayoutSpec:
    """Draw one of `layouts`, and where parameters and optimizer state rest."""
    tiers = st.sampled_from(["device", "device", "host"])
    return replace(draw(layouts(shape, names)), memory=draw(tiers), optimizer_memory=draw(tiers))
