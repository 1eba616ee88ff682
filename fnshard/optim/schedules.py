"""Hyperparameters that vary: with the step (`RateSchedule`) and with the path (`PathRules`)."""

from __future__ import annotations

import fnmatch
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from fnshard.errors import OptimizerError, leaves, nearest, stable_repr

__all__ = ["SCHEDULES", "constant", "linear", "register", "warmup_cosine", "wsd"]

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")
Rate = float | Callable[[Tensor], Tensor | float]
ByPath = float | Sequence[tuple[str, float]]


def call_text(name: str, **arguments: object) -> str:
    """Return the text of a call, which evaluates to the same object.

    >>> call_text("constant", value=0.1)
    'constant(value=0.1)'
    """
    return f"{name}({', '.join(f'{key}={stable_repr(value)}' for key, value in arguments.items())})"


@dataclass(frozen=True, eq=False)
class RateSchedule:
    """A pure function from the step (0-d int64, 0 at the first update) to a 0-d fp64 tensor.

    The step counts updates, without those that dynamic loss scaling skipped. It is on the host, and so is the
    value. A user's own function may return a Python number.

    Args:
        text: the text of the call that makes it.
        function: the function.
        most: the largest value, if it is known.

    >>> warmup_cosine(peak=1.0, warmup=10, total=100)(torch.tensor(5)).item()
    0.5
    """

    text: str
    function: Callable[[Tensor], Tensor | float]
    most: float | None = None

    def __call__(self, step: Tensor) -> Tensor:
        rate = self.function(step)
        if isinstance(rate, Real) and not isinstance(rate, bool):
            return torch.tensor(float(rate), dtype=torch.float64)
        if not isinstance(rate, Tensor) or rate.dim() != 0:
            raise OptimizerError(
                f"the schedule {self.text} returned {_kind(rate)}, not a number or a 0-d tensor.",
                fix="compute one rate from the step, as lambda step: 0.1 * 0.99**step.",
            )
        return rate

    def __repr__(self) -> str:
        return self.text


def _kind(value: object) -> str:
    return (
        f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__} {value!r}"
    )


def constant(value: float) -> RateSchedule:
    """Make a schedule of the same value at every step."""
    text = call_text("constant", value=value)
    return RateSchedule(text, lambda step: torch.tensor(value, dtype=torch.float64), most=value)


def warmup_cosine(peak: float, warmup: int, total: int, floor: float = 0.0) -> RateSchedule:
    """Make a schedule that rises from 0 to `peak` in `warmup` updates, and falls to `floor` by half a cosine.

    As in Optax and Hugging Face, the first update has rate 0 (if `warmup` > 0), and update number `warmup` is
    the first at `peak`. `floor` is a rate, not a fraction; it is reached at update `total`, and holds after
    it.
    """
    text = call_text("warmup_cosine", peak=peak, warmup=warmup, total=total, floor=floor)
    _check_phases(text, warmup, total)
    return RateSchedule(
        text,
        _ramp(peak, warmup, total, floor, lambda x: 0.5 * (1 + torch.cos(math.pi * x))),
        most=max(peak, floor),
    )


def linear(peak: float, warmup: int, total: int, floor: float = 0.0) -> RateSchedule:
    """Make a schedule from 0 to `peak` in `warmup` updates, then straight to `floor` at update `total`."""
    text = call_text("linear", peak=peak, warmup=warmup, total=total, floor=floor)
    _check_phases(text, warmup, total)
    return RateSchedule(text, _ramp(peak, warmup, total, floor, lambda x: 1 - x), most=max(peak, floor))


def wsd(peak: float, warmup: int, total: int, decay: int, floor: float = 0.0) -> RateSchedule:
    """Make a warmup-stable-decay schedule: 0 to `peak`, held, and to `floor` in the last `decay` updates."""
    text = call_text("wsd", peak=peak, warmup=warmup, total=total, decay=decay, floor=floor)
    _check_phases(text, warmup, total, decay)
    fall = _ramp(peak, total - decay, total, floor, lambda x: 1 - x)
    rise = _ramp(peak, warmup, total, peak, lambda x: 1 - x)
    function = lambda step: torch.where(step < total - decay, rise(step), fall(step))  # noqa: E731
    return RateSchedule(text, function, most=max(peak, floor))


SCHEDULES: dict[str, Callable[..., Rate]] = {
    "constant": constant,
    "warmup_cosine": warmup_cosine,
    "linear": linear,
    "wsd": wsd,
}


def register(name: str, make: Callable[..., Rate]) -> None:
    """Add a function that makes a rate schedule to `SCHEDULES`, where programs look one up by its name.

    Raises:
        OptimizerError: another schedule has the name.
    """
    if SCHEDULES.setdefault(name, make) is not make:
        raise OptimizerError(f"a schedule is called {name!r} already.", fix="give yours another name.")


def as_schedule(rate: Rate) -> RateSchedule:
    """Return a float, or any `step -> number or 0-d tensor`, as a `RateSchedule` with the same text."""
    if isinstance(rate, RateSchedule):
        return rate
    if callable(rate):
        return RateSchedule(stable_repr(rate), rate)
    if not isinstance(rate, int | float) or not 0 <= rate < math.inf:
        raise OptimizerError(
                f"lr={rate!r} is no rate." if isinstance(rate, str | float | int) else
                f"lr is of type {type(rate).__name__}, and no rate.",
                fix=counterpart(rate))  # fmt: skip
    return replace(constant(float(rate)), text=repr(rate))


def counterpart(value: object) -> str:
    """Return the fix for an object of torch's that has a counterpart here, or for one of a wrong kind."""
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return (
            "a rate is a function of the step: fs.optim.adamw(fs.schedules.warmup_cosine(3e-4, warmup=100, "
            "total=1000)), or fs.optim.adamw(lambda step: 3e-4 * 0.99**step)."
        )
    if isinstance(value, str | int | float):
        return "fs.optim.adamw(3e-4): a float of at least 0, or a schedule, step -> rate."
    return (
        "fs.optim.adamw(3e-4): a rate, and no parameters; those are in the state, state = step.init(model)."
    )


def rate_first(make: Callable[Arguments, Made]) -> Callable[Arguments, Made]:
    """Decorate an optimizer's constructor: a call in torch's order, parameters first, gets a clear error."""

    @functools.wraps(make)
    def check_and_make(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Made:
        if args:
            as_schedule(args[0])
        return make(*args, **kwargs)

    return check_and_make


def _ramp(
    peak: float, warmup: int, total: int, floor: float, shape: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """Return a function that rises to `peak`, and then falls to `floor`.

    Args:
        shape: the form of the fall: it goes from 1 to 0 as its argument goes from 0 to 1.
    """

    def function(step: Tensor) -> Tensor:
        at = step.to(torch.float64)
        fallen = ((at - warmup) / max(1, total - warmup)).clamp(0, 1)
        falling = floor + (peak - floor) * shape(fallen)
        return torch.where(at < warmup, peak / max(1, warmup) * at, falling)

    return function


def _check_phases(text: str, warmup: int, total: int, decay: int = 0) -> None:
    if min(warmup, decay) < 0 or total < 1 or warmup + decay > total:
        raise OptimizerError(
            f"{text}: the phases do not fit in {total} updates.", fix="0 <= warmup (+ decay) <= total."
        )


@dataclass(frozen=True)
class PathRules:
    """A number for each leaf: that of the first `(glob, value)` rule whose glob matches the path.

    >>> PathRules.of("weight_decay", [("*norm*", 0.0), ("*", 0.1)])("layers.0.norm.weight")
    0.0
    """

    name: str
    rules: tuple[tuple[str, float], ...]
    rest: float | None = None

    @staticmethod
    def of(name: str, value: ByPath) -> PathRules:
        """Make rules from a number (for all leaves) or from pairs.

        Raises:
            OptimizerError: a value is negative or no number.
        """
        number = isinstance(value, int | float)
        rules = () if number else tuple((glob, float(x)) for glob, x in value)
        rest = float(value) if number else None
        wrong = [f"{x}" for x in (*(x for _, x in rules), rest or 0.0) if not 0 <= x < math.inf]
        if wrong:
            raise OptimizerError(f"{name}={value!r}: {', '.join(wrong)} is negative or not finite.")
        return PathRules(name, rules, rest)

    def __call__(self, path: str) -> float:
        """Return the leaf's number; `check` reports leaves without one beforehand."""
        value = self._find(path)[1]
        if value is None:
            self.check([path])
        return value

    def check(self, paths: Iterable[str]) -> None:
        """Check that every rule matches a leaf and every leaf a rule.

        Args:
            paths: the paths of *all* trained leaves.

        Raises:
            OptimizerError: a rule decides for no leaf, or a leaf has no rule.
        """
        paths = list(paths)
        found = {path: self._find(path) for path in paths}
        bare = [f"params[{path!r}]" for path, (_, value) in found.items() if value is None]
        if bare:
            raise OptimizerError(
                f"{leaves(len(bare))} of {len(paths)} matched by no rule of {self.name}:",
                bare,
                'add a last rule ("*", value) for the rest.',
            )
        used = {index for index, _ in found.values()}
        idle = [f"{r!r}{nearest(r[0], paths)}" for index, r in enumerate(self.rules) if index not in used]
        if idle:
            raise OptimizerError(
                f"rules of {self.name} that match no leaf, or only leaves an earlier rule took:",
                idle,
                "mend or delete them, narrow globs first.",
            )

    def _find(self, path: str) -> tuple[int, float | None]:
        hits = ((i, x) for i, (glob, x) in enumerate(self.rules) if fnmatch.fnmatchcase(path, glob))
        return next(hits, (-1, self.rest))
