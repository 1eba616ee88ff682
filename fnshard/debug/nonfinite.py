"""Nonfinite: a step replayed from its state and batch, pure values, to where NaN or inf arose."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import SequenceMatcher
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fnshard import tree
from fnshard.compiler.ir.arguments import Arguments
from fnshard.compiler.ir.program import describe, replay
from fnshard.compiler.ir.values import CONTROL, SCALARS, Kind, ValueName
from fnshard.compiler.kernels.differentiate import Kernel
from fnshard.compiler.schedule.instructions import (
    Action,
    Env,
    Instruction,
    Run,
)
from fnshard.compiler.schedule.ir import Schedule
from fnshard.debug.batch import as_arguments
from fnshard.debug.values import Health, count_nonfinite, describe_value, health, tensors, worst_health
from fnshard.errors import DebugError, FnshardError, StateError, report
from fnshard.runtime.files.json_reader import from_json
from fnshard.step.state import TrainState
from fnshard.step.step import Step

_WORD = {"nan": "NaN", "inf": "inf"}


@dataclass(frozen=True)
class NonFinite:
    """NaN or inf that nothing before brought in.

    `number`: the line of the schedule, -1 for what was there before the step. `what`: the first leaf or value
    that holds it, `count` how much of it. `op`, `node`: of the kernel; `of`: the forward's op, where `op` is
    part of a derivative; `gives` its result's dtype and shape; `source`: the line of the user's code.
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

    def __str__(self) -> str:
        where = f"at line {self.number}: {self.instruction}" if self.number >= 0 else "before the step"
        lines = [f"{_WORD[self.kind]} arose {where}, rank {self.rank}", f"  in {self.what}: {self.count}"]
        if self.op:
            of = f", the derivative of {self.of}" if self.of else ""
            lines.append(f"  by {self.op} (node {self.node}{of}) from {self.inputs} to {self.gives}")
        return "\n".join(lines + ([f"  at {self.source}"] if self.source else []))


@dataclass(frozen=True)
class NanReport:
    """What `fs.debug.nan_hunt` found; false where all is finite.

    `first`: where it began.
    """

    first: NonFinite | None
    step: int
    loss: float

    def __bool__(self) -> bool:
        return self.first is not None

    def __str__(self) -> str:
        if not self:
            return f"step {self.step}: loss {self.loss:g}; loss, gradients and state are finite"
        return f"step {self.step}: loss {self.loss:g}; {self.first}"


def nan_hunt(
    step: Step,
    state: Any,
    batch: Any,
    *,
    keywords: Mapping[str, Any] | None = None,
    rng: tuple[int, int] = (0, 0),
) -> NanReport:
    """Replay a step on the eager backend and name the first instruction, leaf and op that gave NaN or inf.

    On several ranks all call it together, each with its state and its slice of the batch, as they call the
    step; all get the same answer. The state is copied (it takes twice the memory meanwhile); keep one from
    before the step that went wrong: `kept = state.copy()`, or a checkpoint.

    -inf in a batch leaf or a constant, and infinities among an op's own constants (masks), are no finding.
    Where loss, gradients and the updated state are finite, nothing is.

    Args:
        step: what `shard_step` made; it is not changed, its counts and flags stay as they are.
        state: a TrainState from before the step; without an optimizer this rank's blocks.
        batch: a tuple of what `fn` takes behind the parameters, or the one argument.
        keywords: what it takes by name.
        rng: without an optimizer, as for the step.

    Raises:
        StateError: a consumed state; no state or batch of this step's.
        DebugError: the replay itself broke off, and at which line.

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
    batch = as_arguments(step.fn, batch, keywords)
    again, training = step.replay(backend="eager"), isinstance(state, TrainState)
    tracker = NonFiniteTracker(batch.call(again.lower, state).schedule, step.mesh.rank)
    copy = state.copy() if training else tree.map(Tensor.clone, state)
    with again.watching(tracker.watch):
        result = batch.call(again if training else partial(again, rng=rng), copy)
    loss = result[1]["loss"] if training else result[0][0] if isinstance(result[0], tuple) else result[0]
    first = None
    if any(json.loads(text) for text in again.gather_text(json.dumps(tracker.ill))):
        mine = _with_source(again, batch, tracker)
        texts = again.gather_text(json.dumps(mine and asdict(mine)))
        found = [from_json(NonFinite, each) for text in texts if (each := json.loads(text))]
        # The order of the schedule is that of causes on all ranks: who receives NaN waits on a later line.
        first = min(found, key=lambda each: (each.number, each.rank), default=None)
    return NanReport(first, int(state.step) if training else rng[1], float(loss))


@dataclass
class NonFiniteTracker:
    """What one rank sees of a replay: how well each value is, and where it got worse.

    `ill`: whether the loss, a gradient or the state is not finite in the end, or was not to begin with.
    """

    schedule: Schedule
    rank: int
    found: list[NonFinite] = field(default_factory=list)
    kinds: dict[str, Health] = field(default_factory=dict)
    ill: bool = False

    def watch(self, number: int, line: Instruction, action: Action) -> Action:
        """An instruction, watched."""

        def watched(env: Env) -> None:
            if number == 0:
                self.begin(env)
            try:
                args = [env[n] for n in line.reads] if isinstance(line, Run) else None
                action(env)
            except FnshardError:
                raise
            except Exception as error:  # a schedule or a kernel that cannot run: say where, on this rank
                raise DebugError(_broken(number, line, error)) from error
            self.look(number, line, args, env)

        return watched

    def begin(self, env: Env) -> None:
        """What was there before the step. A float batch may hold -inf: that is a mask."""
        for name, value in env.items():
            if name == CONTROL:
                continue
            parts = {part: (tensor, health(tensor)) for part, tensor in tensors(value)}
            self.kinds[name] = worst_health([kind for _, kind in parts.values()])
            state = name.is_state
            for part, (tensor, kind) in parts.items():
                if kind and not (_is_mask(tensor, kind) and not state):
                    self.found.append(
                        NonFinite(
                            kind, -1, "", describe_value(name, part), count_nonfinite(tensor), self.rank
                        )
                    )
                    self.ill |= state

    def look(self, number: int, line: Instruction, args: list[Tensor] | None, env: Env) -> None:
        """What an instruction wrote, against what it read."""
        before = worst_health([self.kinds.get(n, "") for n in line.reads])
        news = []
        for name in line.writes:
            value = env.get(name)
            if value is None or name.kind is Kind.FLIGHT:  # in flight: as what was sent
                self.kinds[name] = before
                continue
            parts = {part: (tensor, health(tensor)) for part, tensor in tensors(value)}
            self.kinds[name] = worst_health([kind for _, kind in parts.values()])
            self.ill |= bool(self.kinds[name]) and _counts(name)
            # An infinity from a kernel that reads one may be the same one, a mask's: its ops tell.
            suspect = args is not None and before == "inf"
            news += [(name, p, t, k) for p, (t, k) in parts.items() if k and (suspect or _worse(k, before))]
        if news:
            self.note(number, line, args, news)

    def note(self, number: int, line: Instruction, args: list[Tensor] | None, news: list[Any]) -> None:
        """The first value that got worse; of a kernel, the op."""
        name, part, tensor, kind = max(news, key=lambda n: n[3] == "nan")
        text = f"{line.phase} {line.unit} {line.verb} {line.detail}"
        arose = NonFinite(kind, number, text, describe_value(name, part), count_nonfinite(tensor), self.rank)
        if args is not None:
            origin = first_nonfinite_op(self.schedule.kernels[line.kernel], args, line.backward)
            if origin is None:
                if all(n[3] == "inf" for n in news):
                    return  # an infinity that the program wrote on purpose
            else:
                arose = replace(
                    arose, kind=origin.kind, op=origin.op, node=origin.node, of=origin.of,
                    inputs=origin.inputs, gives=origin.gives, source=origin.source_node,
                )  # fmt: skip
        self.found.append(arose)


def _broken(number: int, line: Instruction, error: Exception) -> str:
    return report(
        f"the replay broke off at line {number}: {line.phase} {line.unit} {line.verb} {line.detail}",
        [f"{type(error).__name__}: {error}".splitlines()[0]],
        "fs.debug.bisect with the specs of fs.presets.no_shard shows whether the layout is to blame.",
    )


def _is_mask(tensor: Tensor, kind: Health) -> bool:
    return kind == "inf" and not bool((tensor == float("inf")).any())


def _counts(name: ValueName) -> bool:
    """Whether a value is of what the step is for: the loss and norms, gradients, the state."""
    plain = name.original
    return plain == SCALARS or plain.is_state or plain.kind in (Kind.REDUCED, Kind.ACCUMULATED)


def _worse(kind: Health, before: Health) -> bool:
    """Whether an instruction made it: NaN of a value without NaN, inf of a finite one."""
    return before != "nan" if kind == "nan" else not before


def _with_source(step: Step, batch: Arguments, tracker: NonFiniteTracker) -> NonFinite | None:
    """This rank's first finding, with the line of the user's code: `fn` is traced again, its stacks kept."""
    arose = next(iter(tracker.found), None)
    if arose is None or not arose.source:
        return arose
    segments = batch.call(partial(step.front, sources=True)).segments
    segment = segments.segments[tracker.schedule.instructions[arose.number].segment]
    nodes: Mapping[str, Any] = {n.name: n for n in segments.sources[segment.source].graph.nodes}
    node = nodes.get(arose.source)
    return replace(arose, source=node.meta.get("stack_trace", "") if node is not None else "")


# ------------------------------------------------------------------ the op of a kernel


@dataclass(frozen=True)
class NonFiniteOp:
    """An op of a kernel; `of`: the op of the forward that it belongs to, where it is one of a backward.

    `gives`: its result's dtype and shape. `source_node`: its node in the segment's source, if that is known.
    """

    op: str
    node: str
    kind: Health
    inputs: str
    gives: str
    of: str = ""
    source_node: str = ""


def first_nonfinite_op(kernel: Kernel, args: Sequence[Tensor], backward: bool) -> NonFiniteOp | None:
    """The op of a kernel where NaN or inf arose, found by running its graph node by node; None: no op.

    An infinity among an op's own constants (a mask) is none; one that an input holds is none either, but the
    NaN that an op makes of it.
    """
    with torch.no_grad():
        if backward:
            found = _first_bad_node(kernel.backward.graph, args, _interpret(kernel.backward))
            if found is None:
                return None
            source = _forward_of(kernel, found[0])
            of = {} if source is None else {"of": _op(source), "source_node": source.name}
            return _described(*found, **of)
        found = _first_bad_node(kernel.source.graph, args, partial(replay, kernel.source.graph))
        if found is not None:
            return _described(*found, source_node=found[0].name)
        found = _first_bad_node(kernel.forward.graph, args, _interpret(kernel.forward))  # its ops may differ
        return found and _described(*found)


Interpret = Callable[[Sequence[Any], Callable[[fx.Node, Any], None]], Any]


def _interpret(module: fx.GraphModule) -> Interpret:
    def run(args: Sequence[Any], seen: Callable[[fx.Node, Any], None]) -> Any:
        class Watched(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                value = super().run_node(n)
                seen(n, value)
                return value

        return Watched(module).run(*args)

    return run


def _first_bad_node(
    graph: fx.Graph, args: Sequence[Any], run: Interpret
) -> tuple[fx.Node, Mapping[fx.Node, Health]] | None:
    kinds: dict[fx.Node, Health] = {}

    def seen(node: fx.Node, value: Any) -> None:
        if node.op != "output":
            kinds[node] = worst_health([health(t) for _, t in tensors(value)])

    run(args, seen)
    order = [n for n in graph.nodes if n.op != "output"]
    ill = set()
    stack = [n for n in graph.output_node().all_input_nodes if kinds[n]]
    while stack:  # only what leads to a result: an infinity that was masked away again is no trouble
        node = stack.pop()
        if node not in ill:
            ill.add(node)
            stack += [n for n in node.all_input_nodes if kinds[n]]
    born = [n for n in order if n in ill and n.op != "placeholder" and not _inputs(n, kinds)]
    born = [n for n in born if kinds[n] == "nan" or not _deliberate(n)]
    turned = [n for n in order if n in ill and n.op != "placeholder" and kinds[n] == "nan"]
    turned = [n for n in turned if _inputs(n, kinds) == "inf"]
    return next(((node, kinds) for node in (*born, *turned)), None)


def _inputs(node: fx.Node, kinds: Mapping[fx.Node, Health]) -> Health:
    return worst_health([kinds[n] for n in node.all_input_nodes])


def _deliberate(node: fx.Node) -> bool:
    """Whether an infinity is among the op's own constants."""
    return any(isinstance(v, float) and math.isinf(v) for v in _constants((node.args, node.kwargs)))


def _constants(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _constants(each)
    else:
        yield value


def _described(node: fx.Node, kinds: Mapping[fx.Node, Health], **more: str) -> NonFiniteOp:
    inputs = "finite inputs" if not _inputs(node, kinds) else "an input that holds inf"
    return NonFiniteOp(_op(node), node.name, kinds[node], inputs, describe(node.meta.get("val")), **more)


def _op(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default")


def _forward_of(kernel: Kernel, node: fx.Node) -> fx.Node | None:
    """The source's op whose derivative (or recomputation) a backward's node is part of.

    Autograd numbers its functions, and the export keeps the number on the nodes of both ways; what is
    recomputed keeps its name. The n-th op of a kind in the forward is the n-th of that kind in the source;
    where the export has folded or split some, the longest runs of equal ops tell.
    """
    number = node.meta.get("seq_nr")
    ahead = [n for n in kernel.forward.graph.nodes if n.op == "call_function"]
    sources = [n for n in kernel.source.graph.nodes if n.op == "call_function"]
    again = [n for n in ahead if n.name == node.name and n.target == node.target]  # recomputed
    own = again or [n for n in ahead if number is not None and n.meta.get("seq_nr") == number]
    for candidate in reversed(own):
        alike = sorted((n for n in ahead if n.target == candidate.target), key=_place)
        matching = [n for n in sources if n.target == candidate.target]
        if len(alike) == len(matching):
            return matching[alike.index(candidate)]
        names, place = [[str(n.target) for n in nodes] for nodes in (ahead, sources)], ahead.index(candidate)
        for block in SequenceMatcher(None, *names, autojunk=False).get_matching_blocks():
            if matching and block.a <= place < block.a + block.size:
                return sources[block.b + place - block.a]
    return None


def _place(node: fx.Node) -> int:
    """Names of the same op are numbered in the order of the trace: log, log_1, log_2."""
    number = re.search(r"_(\d+)$", node.name)
    return int(number.group(1)) if number else 0
