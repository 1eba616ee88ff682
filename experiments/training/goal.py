"""Goal: the number that a run is judged by, its unit, and which of two such numbers is the better one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

HELD_OUT = "held_out_"  # stands before the name of what is measured on held-out data
# Words in the names of numbers of which more is better, and less. Of others nobody knows.
GROWING = ("accuracy", "acc", "match", "reward", "rewards", "margin", "margins", "mfu", "per_s", "f1", "auc",
           "bleu", "rouge", "recall", "iou")  # fmt: skip
SHRINKING = ("loss", "perplexity", "bigram", "trigram", "nll", "error", "mae", "mse", "rmse", "wer", "kl",
             "seconds", "s", "bytes")  # fmt: skip


@dataclass(frozen=True)
class Goal:
    """What a run is after.

    Args:
        name: of the number in the rows of training steps; on held-out data it is `held_out_NAME`.
        unit: what the number counts, as "nats per byte"; empty where nobody has said it.
        is_maximised: whether more is better.
    """

    name: str = "loss"
    unit: str = ""
    is_maximised: bool = False

    @property
    def held_out(self) -> str:
        """The name of the number on held-out data."""
        return HELD_OUT + self.name

    @property
    def label(self) -> str:
        """The number with its unit, as an axis has it.

        >>> Goal(unit="nats per byte").label, Goal("reward", is_maximised=True).label
        ('loss, nats per byte', 'reward')
        """
        return ", ".join(filter(None, [self.name, self.unit]))

    @property
    def aim(self) -> str:
        """What the run does about the number.

        >>> Goal(unit="nats per byte").aim, Goal("reward", is_maximised=True).aim
        ('minimises the loss, in nats per byte', 'maximises the reward')
        """
        verb = "maximises" if self.is_maximised else "minimises"
        return f"{verb} the {self.name}" + (f", in {self.unit}" if self.unit else "")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(values: Any) -> Goal | None:
        """Read what `as_dict` gave; None where it is something else, as of a run of an earlier version."""
        try:
            goal = Goal(**values)
        except TypeError:
            return None
        kinds = isinstance(goal.name, str), isinstance(goal.unit, str), isinstance(goal.is_maximised, bool)
        return goal if all(kinds) else None


def grows(name: str, goal: Goal | None = None) -> bool | None:
    """Return whether more of a number is better: the goal says it of its own, words say it of others. None
    where nobody has said it.

    >>> grows("held_out_accuracy"), grows("held_out_arc/acc_norm"), grows("loss"), grows("held_out_loss")
    (True, True, False, False)
    >>> grows("held_out_worst")
    >>> grows("held_out_yield", Goal("yield", is_maximised=True))
    True
    """
    if goal is not None and name.removeprefix(HELD_OUT) == goal.name:
        return goal.is_maximised
    words = name.removeprefix(HELD_OUT).replace("/", "_").lower().split("_")
    known = [any(f"_{word}_" in f"_{'_'.join(words)}_" for word in side) for side in (GROWING, SHRINKING)]
    return None if not any(known) else known[0]


def is_held_out(row: Mapping[str, Any]) -> bool:
    """Return whether a row of metrics was measured on held-out data."""
    return any(name.startswith(HELD_OUT) for name in row)
