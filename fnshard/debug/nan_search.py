"""The search for NaN: replay a step from its state and batch, and find where NaN or inf arose."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from difflib import SequenceMatcher
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, fx

from fnshard import tree
from fnshard.compiler.ir.arguments import Arguments, arguments_for
from fnshard.compiler.ir.program import describe, replay
from fnshard.compiler.ir.values import CONTROL, LOSS_TANGENT, SCALARS, Kind, ValueName
from fnshard.compiler.kernels.kernel import Kernel
from fnshard.compiler.kernels.segments import Way
from fnshard.compiler.schedule.instructions import Action, Env, Instruction, Reduced, Run
from fnshard.compiler.schedule.ir import Schedule
from fnshard.errors import DebugError, FnshardError, StateError
from fnshard.step.state import TrainState
from fnshard.step.step import Step

Health = Literal["", "inf", "nan"]  # the worst that a value holds; "" is finite
HEALTH_ORDER: tuple[Health, ...] = ("", "inf", "nan")


@dataclass(frozen=True)
class NonFinite:
    """The place where NaN or inf arose: nothing that ran before held it.

    Args:
        kind: "nan" or "inf".
        number: the line of the schedule, -1 for a value from before the step.
        instruction: that line as text.
        what: the first leaf or value that holds NaN or inf.
        count: how many of its numbers are NaN or inf.
        op, node: the op that made it, and its node in the kernel's graph.
        of: the forward's op, where `op` is part of a derivative.
        inputs: whether the op's inputs are finite.
        gives: the dtype and shape of its result.
        source: the line of the user's code.
        only: the backend that compiled the kernel, where the step is finite without it.
        kernel: the kernel that ran.
    """

    kind: Health
    number: int
    instruction: str
    what: str
    count: str
    rank: int = 0
    op: str = ""
    node: str = ""
    of: str = ""
    inputs: str = ""
    gives: str = ""
    source: str = ""
    only: str = ""
    kernel: str = ""

    def __str__(self) -> str:
        where = f"at line {self.number}: {self.instruction}" if self.number >= 0 else "before the step"
        kind = "NaN" if self.kind == "nan" else self.kind
        lines = [f"{kind} arose {where}, rank {self.rank}", f"  in {self.what}: {self.count}"]
        if self.op:
            of = f", the derivative of {self.of}" if self.of else ""
            lines.append(f"  by {self.op} (node {self.node}{of}) from {self.inputs} to {self.gives}")
        if self.source:
            lines.append(f"  at {self.source}")
        if self.only:
            culprit = f"the {self.only} kernel {self.kernel}" if self.kernel else f"what {self.only} compiles"
            lines += [
                f"  only by {culprit}: on the eager backend the step is finite",
                '  Way out: backend="eager" (run.backend=eager), or compute that part of `fn` in fp32.',
            ]
        return "\n".join(lines)


@dataclass(frozen=True)
class NanReport:
    """The answer of `fs.debug.nan_hunt`: the first place in the schedule, or false where all is finite."""

    first: NonFinite | None
    step: int
    loss: float

    def __bool__(self) -> bool:
        return self.first is not None

    def __str__(self) -> str:
        found = self.first or "loss, gradients and state are finite"
        return f"step {self.step}: loss {self.loss:g}; {found}"


def nan_hunt(
    step: Step,
    state: Any,
    batch: Any,
    *,
    keywords: Mapping[str, Any] | None = None,
    rng: tuple[int, int] = (0, 0),
) -> NanReport:
    """Replay a step and name the first instruction, leaf and op that gave NaN or inf.

    The replay runs what the step runs. If it fails, a second one on the eager backend names the op and its
    line in the user's code; where that one is finite, the fault is a compiled kernel's, which is named.

    On several ranks all call it together, each with its state and its slice of the batch, as they call the
    step; all get the same answer. The state is copied, and takes twice the memory meanwhile; keep one from
    before the step that went wrong: `kept = state.copy()`, or a checkpoint.

    -inf in a batch leaf, a constant, or a leaf that does not train (a buffer), and infinities among an op's
    own constants, are masks and are not reported. Nothing is reported where loss, gradients and the rest of
    the updated state are finite.

    Args:
        step: the step that `shard_step` made, which is not changed.
        state: a TrainState from before the step; without an optimizer this rank's blocks.
        batch: a tuple of what `fn` takes after the parameters, or the one argument.
        keywords: what it takes by name.
        rng: without an optimizer, the random state, as for the step.

    Raises:
        StateError: the state was consumed, or state or batch are not this step's.
        DebugError: the replay itself broke off; the error says at which line.

    >>> import torch
    >>> from fnshard import LayoutSpec, match_specs, shard_step
    >>> params = {"w": torch.tensor([1.0, 0.0])}
    >>> specs = match_specs(params, [("*", LayoutSpec())])
    >>> step = shard_step(lambda p, x: (p["w"] * x).sqrt().sum(), specs, backend="eager")
    >>> found = nan_hunt(step, params, torch.ones(2))
    >>> found.first.kind, found.first.of
    ('inf', 'aten.sqrt')
    """
    if not isinstance(step, Step):
        raise StateError(
            f"nan_hunt replays what shard_step made, not {type(step).__name__}.",
            fix="step = fs.shard_step(...).",
        )
    batch = arguments_for(step.fn, batch, keywords)
    replay_eagerly = partial(_replay, step.replay(backend="eager", sources=True), state, batch, rng)
    if step.options.backend == "eager":
        first, loss = replay_eagerly()
    else:
        first, loss = _replay(step.replay(), state, batch, rng)
        if first is not None:
            # The eager backend names the op. If it finds nothing, a compiled kernel is at fault.
            first_op, _ = replay_eagerly()
            first = first_op or replace(first, only=step.options.backend)
    return NanReport(first, int(state.step) if isinstance(state, TrainState) else rng[1], loss)


def _replay(
    again: Step, state: Any, batch: Arguments, rng: tuple[int, int]
) -> tuple[NonFinite | None, float]:
    """Replay a step, and return where NaN or inf arose first on any rank, and the loss."""
    training = isinstance(state, TrainState)
    schedule = batch.call(again.lower, state).schedule
    tracker = NonFiniteTracker(schedule, again.mesh.rank, again.options.backend == "eager")
    # A step consumes its state, and writes to it: the replay runs on a copy.
    copy = state.copy() if training else tree.map(Tensor.clone, state)
    with again.watching(tracker.watch):
        result = batch.call(again if training else partial(again, rng=rng), copy)
    loss = result[1]["loss"] if training else result[0]
    if isinstance(loss, tuple):
        loss = loss[0]  # `fn` returns aux, too

    # All ranks make the second exchange, or none, whichever of them has seen something.
    if not any(json.loads(text) for text in again.gather_strings(json.dumps(tracker.is_ill))):
        return None, float(loss)
    text = json.dumps(None if tracker.first is None else asdict(tracker.first))
    of_ranks = [json.loads(text) for text in again.gather_strings(text)]
    # Of all ranks the earliest line is the cause: a rank that receives NaN waits for it on a later line than
    # the one on which another sent it.
    places = [NonFinite(**fields) for fields in of_ranks if fields is not None]
    return min(places, key=lambda place: (place.number, place.rank), default=None), float(loss)


@dataclass
class NonFiniteTracker:
    """A watcher of a replay on one rank, which records where a value first got worse than those before.

    Args:
        eager: whether kernels run op by op; compiled ones may give what their ops do not.
        first: where NaN or inf first arose, once that is known.
        kinds: the health of every value so far.
        is_ill: whether the loss, a gradient or the state is not finite, or the state was not before the step.
    """

    schedule: Schedule
    rank: int
    eager: bool
    first: NonFinite | None = None
    kinds: dict[str, Health] = field(default_factory=dict)
    is_ill: bool = False

    def watch(self, number: int, line: Instruction, action: Action) -> Action:
        """Return an action that runs the given one, and then inspects what it wrote."""

        def run(env: Env) -> None:
            if number == 0:
                self.begin(env)
            try:
                # Keep a kernel's inputs, which the kernel's line may drop from `env`.
                args = [env[n] for n in line.reads] if isinstance(line, Run) else None
                action(env)
            except FnshardError:  # of a peer
                raise
            except Exception as error:
                raise DebugError(
                    f"the run broke off at line {number}: {describe_line(line)}",
                    [f"{type(error).__name__}: {error}".splitlines()[0]],
                ) from error
            self.inspect(number, line, args, env)

        return run

    def begin(self, env: Env) -> None:
        """Inspect the values from before the step; -inf alone is a mask, except in what the step trains."""
        for name, value in env.items():
            if name == CONTROL:
                continue
            for part, tensor, kind in self._find_nonfinite(name, value):
                # A leaf that does not train may hold a mask: a module's buffer.
                spec = self.schedule.specs.get(name.path) if name.is_state else None
                has_minus_alone = kind == "inf" and not bool((tensor == float("inf")).any())
                if has_minus_alone and (spec is None or not spec.trainable):
                    continue
                self.is_ill |= name.is_state
                if self.first is None:
                    what, count = describe_value(name, part), count_nonfinite(tensor)
                    self.first = NonFinite(kind, -1, "", what, count, self.rank)

    def inspect(self, number: int, line: Instruction, args: list[Tensor] | None, env: Env) -> None:
        """Compare what an instruction wrote with what it read."""
        before = worst_health([self.kinds.get(n, "") for n in line.reads])
        worse = []
        for name in line.writes:
            value = env.get(name)
            if value is None or name.kind is Kind.FLIGHT:  # it has not arrived: as healthy as what was sent
                self.kinds[name] = before
                continue
            parts = self._find_nonfinite(name, value)
            self.is_ill |= bool(parts) and _is_result(name)
            # A kernel that reads an infinity and writes one may have passed on a mask's: `note` asks its ops.
            is_suspect = args is not None and before == "inf"
            for part, tensor, kind in parts:
                # NaN where nothing read was NaN, or inf where all was finite, is the instruction's doing.
                got_worse = before != "nan" if kind == "nan" else before == ""
                if is_suspect or got_worse:
                    worse.append((name, part, tensor, kind))
        if worse and self.first is None:
            self.note(number, line, args, worse)

    def _find_nonfinite(self, name: ValueName, value: Any) -> list[tuple[str, Tensor, Health]]:
        """Record how healthy a value is, and return its parts that are not finite."""
        parts = [(part, tensor, health(tensor)) for part, tensor in tensors(value)]
        self.kinds[name] = worst_health([kind for _, _, kind in parts])
        return [each for each in parts if each[2]]

    def note(self, number: int, line: Instruction, args: list[Tensor] | None, worse: list[Any]) -> None:
        """Record the first value that got worse, NaN before inf, and the op of a kernel that made it so."""
        name, part, tensor, kind = max(worse, key=lambda each: each[3] == "nan")
        what, count = describe_value(name, part), count_nonfinite(tensor)
        place = NonFinite(kind, number, describe_line(line), what, count, self.rank)
        if args is not None:
            kernel = self.schedule.kernels[line.kernel]
            origin = first_nonfinite_op(kernel, args, line.way)
            if origin is None and kind == "inf" and (self.eager or gives_inf(kernel, args, line.way)):
                return  # an infinity that the program wrote on purpose
            place = replace(place, **(origin or {}), kernel=f"{line.kernel}.{line.way}")
        self.first = place


def _is_result(name: ValueName) -> bool:
    """Return whether a value is among a step's results: the loss and norms, a gradient, or the state."""
    plain = name.original
    return plain == SCALARS or plain.is_state or plain.kind in (Kind.REDUCED, Kind.ACCUMULATED)


def first_nonfinite_op(kernel: Kernel, args: Sequence[Tensor], way: Way) -> dict[str, str] | None:
    """Return the op at which a kernel's results for `args` began not to be finite, or None.

    An infinity among an op's own constants (a mask) does not count, nor does one that an input holds; the NaN
    that an op makes of it does.

    Returns:
        Fields of a `NonFinite`: `kind`, `op` and `node` in the graph that ran, `inputs`, `gives`, `of` and
        `source`, which is "" if it is not known. None where no op is to blame.
    """
    of = source = ""
    with torch.no_grad():
        if way is not Way.FORWARD:
            module = kernel.modules[way]
            culprit = _find_culprit(module.graph, partial(_interpret, module, args))
            if culprit:
                of, source = _find_forward(kernel, culprit["node"])
        else:
            culprit = _find_culprit(kernel.source.graph, partial(replay, kernel.source.graph, args))
            if culprit:
                source = _read_source(culprit["node"])
            else:
                # The graph that is compiled decomposes some ops, and its ops may leave the range of a dtype
                # where the op itself does not.
                culprit = _find_culprit(kernel.forward.graph, partial(_interpret, kernel.forward, args))
    if not culprit:
        return None
    node = culprit["node"]
    return {**culprit, "op": _name_op(node), "node": node.name, "of": of, "source": source}


def gives_inf(kernel: Kernel, args: Sequence[Tensor], way: Way) -> bool:
    """Return whether a kernel's ops, run one by one, give infinities for `args`."""
    with torch.no_grad():
        results = fx.Interpreter(kernel.modules[way]).run(*args)
    return any(health(t) == "inf" for _, t in tensors(results))


Seen = Callable[[fx.Node, Any], None]


def _interpret(module: fx.GraphModule, args: Sequence[Any], seen: Seen) -> None:
    """Run a graph, and call `seen` with each node and its value."""

    class Watched(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            seen(n, value)
            return value

    Watched(module).run(*args)


def _find_culprit(graph: fx.Graph, run: Callable[[Seen], Any]) -> dict[str, Any]:
    """Run a graph, and return the first op to blame: its node, kind and inputs; nothing where there is none.

    An op is to blame that makes NaN or inf of finite inputs, or, if there is none, NaN of infinite ones.
    """
    kinds: dict[fx.Node, Health] = {}

    def look(node: fx.Node, value: Any) -> None:
        if node.op != "output":
            kinds[node] = worst_health([health(t) for _, t in tensors(value)])

    run(look)

    # Only what leads to a result counts: an infinity that was masked away again does no harm.
    harmful: set[fx.Node] = set()
    stack = [n for n in graph.output_node().all_input_nodes if kinds[n]]
    while stack:
        node = stack.pop()
        if node not in harmful:
            harmful.add(node)
            stack += [n for n in node.all_input_nodes if kinds[n]]

    # List them in the order of the graph, so that the first is where it began. An infinity among an op's own
    # constants is a mask's.
    ops = [n for n in graph.nodes if n in harmful and n.op != "placeholder"]
    from_finite = [
        n for n in ops if not _judge_inputs(n, kinds) and (kinds[n] == "nan" or not _has_infinity(n))
    ]
    from_infinite = [n for n in ops if kinds[n] == "nan" and _judge_inputs(n, kinds) == "inf"]
    node = next(iter([*from_finite, *from_infinite]), None)
    if node is None:
        return {}
    inputs = "an input that holds inf" if _judge_inputs(node, kinds) else "finite inputs"
    return {"node": node, "kind": kinds[node], "inputs": inputs, "gives": describe(node.meta.get("val"))}


def _judge_inputs(node: fx.Node, kinds: Mapping[fx.Node, Health]) -> Health:
    """Return the worst health of a node's inputs."""
    return worst_health([kinds[n] for n in node.all_input_nodes])


def _has_infinity(node: fx.Node) -> bool:
    """Return whether an infinity is among an op's own constants, as a mask's is."""
    constants: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), constants.append)
    return any(isinstance(v, float) and math.isinf(v) for v in constants)


def _name_op(node: fx.Node) -> str:
    """Return an op's name as reports show it."""
    return str(node.target).removesuffix(".default")


def _find_forward(kernel: Kernel, node: fx.Node) -> tuple[str, str]:
    """Return the forward's op whose derivative or recomputation a backward's node is part of, and its line.

    Autograd numbers its functions, and the export keeps the number on the nodes of forward and backward; a
    node that is recomputed keeps its name.
    """
    # Find the node in the forward: by its name where it is recomputed, else by autograd's number.
    number = node.meta.get("seq_nr")
    forward = [n for n in kernel.forward.graph.nodes if n.op == "call_function"]
    candidates = [n for n in forward if n.name == node.name and n.target == node.target]
    if not candidates and number is not None:
        candidates = [n for n in forward if n.meta.get("seq_nr") == number]

    # Find its line in the source, the graph that knows lines. The export may fold or split ops of the source,
    # so the two are aligned.
    sources = [n for n in kernel.source.graph.nodes if n.op == "call_function"]
    targets = [[str(n.target) for n in nodes] for nodes in (forward, sources)]
    blocks = SequenceMatcher(None, *targets, autojunk=False).get_matching_blocks()
    for candidate in reversed(candidates):
        index = forward.index(candidate)
        block = next((b for b in blocks if b.a <= index < b.a + b.size), None)
        if block is not None:
            return _name_op(candidate), _read_source(sources[block.b + index - block.a])

    # Without a line, return the name of an op that the source has, too.
    known = {n.target for n in sources}
    return next((_name_op(n) for n in reversed(candidates) if n.target in known), ""), ""


def _read_source(node: fx.Node) -> str:
    """Return the line of the user's code that a node comes from, or ""."""
    return node.meta.get("stack_trace", "")


def tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield a value's tensors by leaf, slot or field, or "" for a tensor itself; skip one in flight."""
    if isinstance(value, Tensor):
        yield "", value
    elif isinstance(value, Reduced):
        yield from value.blocks.items()
    elif isinstance(value, Mapping):
        for key, part in value.items():
            for name, tensor in tensors(part):
                yield "/".join(filter(None, (str(key), name))), tensor
    elif is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "wait"):
        yield from tensors({f.name: getattr(value, f.name) for f in fields(value)})
    elif isinstance(value, list | tuple):
        yield from tensors(dict(enumerate(value)))


def health(tensor: Tensor) -> Health:
    """Return "nan" or "inf" if a tensor holds such, and "" if it is finite."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return ""
    tensor = widen_float8(tensor)
    # Most tensors are finite, for which one pass is enough.
    if bool(torch.isfinite(tensor).all()):
        return ""
    return "nan" if bool(torch.isnan(tensor).any()) else "inf"


def widen_float8(tensor: Tensor) -> Tensor:
    """Return 8-bit floats in fp32, since few ops take them; return other tensors unchanged."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def worst_health(kinds: Iterable[Health]) -> Health:
    """Return the worst of several: NaN is worse than inf, and inf than finite."""
    return max(kinds, key=HEALTH_ORDER.index, default="")


def count_nonfinite(tensor: Tensor) -> str:
    """Return how many of a tensor's numbers are not finite, as text: `3 NaN and 1 inf of 64`."""
    tensor = widen_float8(tensor)
    nan, inf = int(torch.isnan(tensor).sum()), int(torch.isinf(tensor).sum())
    parts = [f"{n} {word}" for n, word in ((nan, "NaN"), (inf, "inf")) if n]
    return f"{' and '.join(parts) or 'none'} of {tensor.numel()}"


def describe_value(name: ValueName, part: str = "") -> str:
    """Return a value's name, and which part of it, as text: `gathered 'layers.0.w'`."""
    plain = name.original
    if plain == SCALARS:
        return f"the step's {part}"
    if plain == LOSS_TANGENT:
        return "the loss scale"
    kind = plain.kind.name.lower()
    return f"{kind} {plain.leaf or plain.removeprefix(plain.kind)!r}" + (f", {part!r}" if part else "")


def describe_line(line: Instruction) -> str:
    """Return an instruction as text: `forward layers.0 run k0.fwd(...)`."""
    return f"{line.phase} {line.unit} {line.verb} {line.detail}"
