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

from fnshard.errors import OptimizerError, is_number, leaves, misfits, nearest, stable_repr

__all__ = ["SCHEDULES", "constant", "linear", "register", "warmup_cosine", "wsd"]

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")
Rate = float | Callable[[Tensor], Tensor | float]
ByPath = float | Sequence[tuple[str, float]]


def call_text(name: str, **arguments: object) -> str:
    """Return the text of a call that makes the same object.

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
                f"the schedule {self.text} returned {_describe(rate)}, not a number or a 0-d tensor.",
                fix="compute one rate from the step, as lambda step: 0.1 * 0.99**step.",
            )
        return rate

    def __repr__(self) -> str:
        return self.text


def _describe(value: object) -> str:
    """Return what a schedule returned, as its error names it."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    return f"{type(value).__name__} {value!r}"


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
    _check_arguments(text, peak=peak, floor=floor, warmup=warmup, total=total)
    return RateSchedule(
        text,
        _ramp(peak, warmup, total, floor, lambda x: 0.5 * (1 + torch.cos(math.pi * x))),
        most=max(peak, floor),
    )


def linear(peak: float, warmup: int, total: int, floor: float = 0.0) -> RateSchedule:
    """Make a schedule from 0 to `peak` in `warmup` updates, then straight to `floor` at update `total`."""
    text = call_text("linear", peak=peak, warmup=warmup, total=total, floor=floor)
    _check_arguments(text, peak=peak, floor=floor, warmup=warmup, total=total)
    return RateSchedule(text, _ramp(peak, warmup, total, floor, lambda x: 1 - x), most=max(peak, floor))


def wsd(peak: float, warmup: int, total: int, decay: int, floor: float = 0.0) -> RateSchedule:
    """Make a warmup-stable-decay schedule: 0 to `peak`, held, and to `floor` in the last `decay` updates."""
    text = call_text("wsd", peak=peak, warmup=warmup, total=total, decay=decay, floor=floor)
    _check_arguments(text, peak=peak, floor=floor, warmup=warmup, total=total, decay=decay)
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
        # The text of an object, such as a model's parameters, may be long: name its type alone.
        if isinstance(rate, str | float | int):
            message = f"lr={rate!r} is no rate."
        else:
            message = f"lr is of type {type(rate).__name__}, and no rate."
        raise OptimizerError(message, fix=counterpart(rate))
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
    """Decorate an optimizer's constructor so that a call in torch's order, parameters first, is refused."""

    @functools.wraps(make)
    def check_and_make(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Made:
        if args:
            as_schedule(args[0])
        return make(*args, **kwargs)

    return check_and_make


def _ramp(
    peak: float, warmup: int, total: int, floor: float, shape: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """Return a function of the step that rises from 0 to `peak`, and then falls to `floor`.

    Args:
        shape: the form of the fall: it goes from 1 to 0 as its argument goes from 0 to 1.
    """

    def compute_rate(step: Tensor) -> Tensor:
        step = step.to(torch.float64)
        fallen = ((step - warmup) / max(1, total - warmup)).clamp(0, 1)
        falling = floor + (peak - floor) * shape(fallen)
        return torch.where(step < warmup, peak / max(1, warmup) * step, falling)

    return compute_rate


def _check_arguments(text: str, **values: float) -> None:
    """Refuse rates that are none, and phases that are no counts of updates, or longer than all updates."""
    expected = {name: _RATE if name in ("peak", "floor") else _UPDATES for name in values}
    if wrong := misfits(values, expected):
        fix = "phases are numbers of updates: of a fraction, warmup=int(0.1 * total)."
        raise OptimizerError(f"{text} is no schedule:", wrong, fix)
    total, phases = values["total"], values["warmup"] + values.get("decay", 0)
    if total < 1 or phases > total:
        raise OptimizerError(
            f"{text}: the phases do not fit in {total} updates.", fix="0 <= warmup (+ decay) <= total."
        )


_RATE = (lambda v: is_number(v) and v >= 0, "a finite number, at least 0")
_UPDATES = (
    lambda v: isinstance(v, Real) and not isinstance(v, bool) and v >= 0 and v % 1 == 0,  # NumPy's, too
    "a whole number of updates, at least 0",
)


@dataclass(frozen=True)
class PathRules:
    """A number for each leaf: that of the first `(glob, value)` rule whose glob matches the path.

    Args:
        name: what the numbers are, "weight_decay" say, as errors call them.
        rules: pairs of a glob and a number.
        rest: the number of leaves that no glob matches, if there is one.

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
        rules: tuple[tuple[str, float], ...] = ()
        rest = None
        if isinstance(value, int | float):
            rest = float(value)
            numbers = [rest]
        else:
            rules = tuple((glob, float(number)) for glob, number in value)
            numbers = [number for _, number in rules]
        wrong = [f"{number}" for number in numbers if not 0 <= number < math.inf]
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
        uncovered = [f"params[{path!r}]" for path, (_, value) in found.items() if value is None]
        if uncovered:
            raise OptimizerError(
                f"{leaves(len(uncovered))} of {len(paths)} matched by no rule of {self.name}:",
                uncovered,
                'add a last rule ("*", value) for the rest.',
            )
        used = {index for index, _ in found.values()}
        unused = [f"{r!r}{nearest(r[0], paths)}" for index, r in enumerate(self.rules) if index not in used]
        if unused:
            raise OptimizerError(
                f"rules of {self.name} that match no leaf, or only leaves an earlier rule took:",
                unused,
                "mend or delete them, narrow globs first.",
            )

    def _find(self, path: str) -> tuple[int, float | None]:
        """Return the index and the number of the first rule that matches; -1 and `rest` if none does."""
        for index, (glob, number) in enumerate(self.rules):
            if fnmatch.fnmatchcase(path, glob):
                return index, number
        return -1, self.rest
