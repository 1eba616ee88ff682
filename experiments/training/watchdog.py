"""Watchdog: what goes wrong while nobody looks: NaN and where it arose, spikes of the loss, slow ranks.

Loss and gradient norm are sums over all ranks, so every rank sees a NaN in the same step and none acts alone.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

import fnshard as fs
from fnshard import tree
from fnshard.compiler.schedule.instructions import COMMUNICATION, Action, Env, Instruction, Wait
from fnshard.errors import CheckpointError, FnshardError

WATCHED = ("loss", "grad_norm")


class DivergedError(RuntimeError):
    """Loss, gradients or state of a run are not finite; the message says where that began."""


# ------------------------------------------------------------------ spikes of the loss


@dataclass(frozen=True)
class Spike:
    """A loss far above those before it. `is_first`: no spike was reported shortly before."""

    step: int
    loss: float
    median: float
    deviations: float
    window: int
    is_first: bool

    def __str__(self) -> str:
        return (
            f"step {self.step}: loss {self.loss:.4g} is a spike, {self.deviations:.1f} deviations above "
            f"{self.median:.4g}, the median of {self.window} steps"
        )


@dataclass
class Spikes:
    """A robust z-score: how far a loss is above the median of those before it, in deviations.

    A deviation is 1.4826 times the median distance from the median, which is a Gaussian's standard deviation,
    and not less than `least` of the median: losses that hardly change have no spikes.

    Args:
        threshold: deviations above which a loss is a spike.
        window: losses that it is compared with.
        few: with fewer of them nothing is a spike.
    """

    threshold: float = 8.0
    window: int = 64
    few: int = 16
    least: float = 0.01
    _losses: deque[float] = field(default_factory=deque)
    _quiet_until: int = 0

    def remember(self, losses: Iterable[float]) -> None:
        """What was there before this process."""
        self._losses = deque(filter(math.isfinite, losses), maxlen=self.window)

    def look(self, step: int, loss: float) -> Spike | None:
        """The next loss; NaN is no spike, and inf none."""
        before, found = list(self._losses), None
        if not math.isfinite(loss):
            return None
        if self._losses.maxlen is None:
            self.remember([])
        self._losses.append(loss)
        if len(before) >= self.few:
            middle = statistics.median(before)
            if loss > middle:  # most are not: the rest is for those
                spread = 1.4826 * statistics.median(abs(x - middle) for x in before)
                far = (loss - middle) / max(spread, self.least * abs(middle), 1e-12)
                if far > self.threshold:
                    is_first = step >= self._quiet_until
                    self._quiet_until = step + self.window // 2
                    found = Spike(step, loss, middle, round(far, 2), len(before), is_first)
        return found


# ------------------------------------------------------------------ slow ranks


class Stalls:
    """How long a step's instructions took that others have a part in: collectives, and waiting for them."""

    def __init__(self, device_type: str):
        self._on_gpu = device_type == "cuda"
        self._seconds, self._events = 0.0, []

    def watch(self, number: int, line: Instruction, action: Action) -> Action:
        """An `Observer`: only those lines are timed, on the device's clock where there is one."""
        if line.lane != COMMUNICATION and not isinstance(line, Wait):
            return action
        return self._on_stream(action) if self._on_gpu else self._on_thread(action)

    def _on_thread(self, action: Action) -> Action:
        def timed(env: Env) -> None:
            began = time.perf_counter()
            action(env)
            self._seconds += time.perf_counter() - began

        return timed

    def _on_stream(self, action: Action) -> Action:
        def timed(env: Env) -> None:
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            action(env)
            pair[1].record()
            self._events.append(pair)

        return timed

    def take(self) -> float:
        """Seconds since the last call; the device has to be through with them."""
        events, self._events = self._events, []
        seconds, self._seconds = self._seconds, 0.0
        if events:
            events[-1][1].synchronize()
        return seconds + sum(a.elapsed_time(b) for a, b in events) * 1e-3


@dataclass
class Stragglers:
    """Looks for a rank that the others wait for, every `every` steps, by what each does on its own.

    All ranks take equally long for a step, as each waits for the slowest. So the last `sampled` steps of
    `every` are run with their collectives timed; what is left of a step, and the wait for its batch, is a
    rank's own. Ranks tell each other the medians in one small exchange behind the last of these steps.

    Args:
        step: of `shard_step`.
        ratio: how many times the others' median is slow.
        least_s: and by how much at least.
        skip: steps of this process that are never timed: something else is looked at in them.
    """

    step: Any
    every: int = 50
    sampled: int = 5
    ratio: float = 1.25
    least_s: float = 2e-3
    skip: range = range(0)
    _own: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        mesh = self.step.mesh
        self._alone = mesh.size == 1
        self._stalls = Stalls(mesh.device_type)

    def samples(self, here: int) -> bool:
        """Whether the `here`th step of this process is timed; never the first two, of which one compiles.

        The same on all ranks.
        """
        due = here > 2 and here % self.every >= self.every - self.sampled
        return due and not self._alone and here not in self.skip

    def on(self, here: int) -> Any:
        return self.step.watching(self._stalls.watch) if self.samples(here) else nullcontext()

    def after(self, here: int, step_s: float, data_s: float) -> str:
        """What to report after that step; the same on all ranks, which call it together."""
        if not self.samples(here):
            return ""
        self._own.append((step_s - self._stalls.take() + data_s, data_s))
        if (here + 1) % self.every:
            return ""
        mine = [statistics.median(each) for each in zip(*self._own, strict=True)]
        self._own.clear()
        medians = [json.loads(text) for text in self.step.gather_strings(json.dumps(mine))]
        return slowest([(own, data) for own, data in medians], self.ratio, self.least_s)


def slowest(own: Sequence[tuple[float, float]], ratio: float, least_s: float) -> str:
    """The slowest rank in words, where the others are much faster; else nothing.

    Args:
        own: by rank, seconds of a step that are its own, and of these the wait for its batch.

    >>> slowest([(0.100, 0.0), (0.180, 0.07), (0.106, 0.0)], 1.25, 2e-3)
    'rank 1 is slow: 180 ms of a step are its own, the others have 103 (1.7x); 70 ms of it wait for its batch'
    >>> slowest([(0.100, 0.0), (0.106, 0.0)], 1.25, 2e-3)
    ''
    """
    rank = max(range(len(own)), key=lambda r: own[r][0])
    mine, data = own[rank]
    others = statistics.median(own[r][0] for r in range(len(own)) if r != rank)
    if mine < others * ratio or mine - others < least_s:
        return ""
    why = f"; {data * 1e3:.0f} ms of it wait for its batch" if data > 0.1 * (mine - others) else ""
    return (
        f"rank {rank} is slow: {mine * 1e3:.0f} ms of a step are its own, the others have "
        f"{others * 1e3:.0f} ({mine / max(others, 1e-9):.1f}x){why}"
    )


# ------------------------------------------------------------------ NaN


def ill(values: Mapping[str, float]) -> str:
    """What is wrong with a step's values, or nothing.

    With a dynamic loss scale an overflow is skipped; it is a fault where the scale cannot go lower.
    """
    wrong = [f"{name} is {values[name]}" for name in WATCHED if not math.isfinite(values.get(name, 0.0))]
    return "" if values.get("loss_scale", 0.0) > 1.0 else " and ".join(wrong)


def sound(step: Any, state: fs.TrainState) -> bool:
    """Whether parameters and optimizer state are finite on all ranks, which call it together."""
    leaves = [t for part in (state.params, state.opt_state) for t in tree.flatten(part)[0]]
    worst: dict[torch.device, list[torch.Tensor]] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel():
            wide = leaf.float() if leaf.element_size() == 1 else leaf
            # The largest magnitude: NaN and inf come through, and nothing is allocated.
            worst.setdefault(leaf.device, []).append(
                torch.linalg.vector_norm(wide, float("inf")).to(torch.float64)
            )
    fine = all(bool(torch.isfinite(torch.stack(each)).all()) for each in worst.values())
    return not any(step.gather_strings("" if fine else "not finite"))


Begin = Callable[[], tuple[fs.TrainState, Iterator[tuple[Any, ...]]]]


def hunt(step: Any, begin: Begin, number: int, say: Callable[[str], None]) -> str:
    """Where NaN or inf of step `number` arose, in words; all ranks call it together.

    States are donated: the one before the step is gone. A resumed run is the same bit for bit, so the run's
    newest checkpoint (or its first state) is taken, the steps up to the fault are made again, and that one is
    replayed on the eager backend by `fs.debug.nan_hunt`.

    Args:
        begin: the state to go on from, and a loader that stands there.
        say: takes lines on what is done, and how long it took.
    """
    began = time.perf_counter()
    with suppress(CheckpointError):  # a failed save was reported; older ones are there
        fs.checkpoint.wait()
    try:
        state, loader = begin()
        at = int(state.step)
        again = number - at - 1
        some = "1 step is" if again == 1 else f"{again} steps are"
        say(f"looking for where it arose: from step {at}, {some} made again")
        where = _replay(step, state, loader, number)
    except FnshardError as error:
        where = f"where it arose could not be found: {error}"
    return f"{where}\n(looked for in {time.perf_counter() - began:.1f} s)"


def _replay(step: Any, state: fs.TrainState, loader: Iterator[tuple[Any, ...]], number: int) -> str:
    batch: Any = None
    while True:
        batch = tree.map(lambda part: part.to(step.mesh.device), next(loader))
        here = int(state.step) + 1
        if here == number:
            found = fs.debug.nan_hunt(step, state, batch)
            break
        kept = state.copy()
        state, _ = step(state, *batch)
        if not sound(step, state):  # an update made it, and the next step's loss showed it
            del state
            found = fs.debug.nan_hunt(step, kept, batch)
            break
    if found:
        return f"In step {here}: {found.first}"
    return (
        f"Made again on the eager backend, step {here} is finite: {found}. It is in the compiled kernels "
        "(try run.backend=eager), or the machine's (try another)."
    )


@dataclass
class Watchdog:
    """What one rank looks at behind every step.

    Args:
        how: "hunt": a NaN ends the run, with where it arose; "stop": it ends the run; "off": nothing is done.
        begin: see `hunt`.
        say: rank 0's lines.
        skip: see `Stragglers`.
    """

    step: Any
    how: str
    begin: Begin
    say: Callable[[str], None]
    skip: range = range(0)

    def __post_init__(self) -> None:
        self.fault, self._number = "", 0
        self._stragglers = None if self.how == "off" else Stragglers(self.step, skip=self.skip)

    @contextmanager
    def on(self, here: int) -> Iterator[None]:
        with nullcontext() if self._stragglers is None else self._stragglers.on(here):
            yield

    def samples(self, here: int) -> bool:
        return self._stragglers is not None and self._stragglers.samples(here)

    def look(self, number: int, values: Mapping[str, float]) -> None:
        """What step `number` reports, which may be read when the next one has been launched."""
        if self._stragglers is not None and not self.fault:
            self.fault, self._number = ill(values), number

    def after(self, here: int, step_s: float, data_s: float) -> None:
        slow = "" if self._stragglers is None else self._stragglers.after(here, step_s, data_s)
        if slow:
            self.say(slow)

    def before_save(self, state: fs.TrainState, number: int) -> None:
        """A state that is not finite is not saved over good ones."""
        if self._stragglers is not None and not sound(self.step, state):
            self.fault, self._number = "parameters or optimizer state are not finite", number

    def diverged(self) -> DivergedError:
        """What ends the run, on all ranks; nobody holds the bad state any more."""
        number = self._number
        head = f"step {number}: {self.fault}; nothing of it is saved."
        self.say(head)
        where = hunt(self.step, self.begin, number, self.say) if self.how == "hunt" else ""
        fix = (
            "Fix: a lower optimizer.lr, optimizer.clip=1, a longer schedule.warmup, or precision=fp32; with "
            "run.resume=FOLDER a new run starts from this one's newest checkpoint. run.watch=off goes on in "
            "spite of it."
        )
        return DivergedError("\n".join(filter(None, [head, where, fix])))
