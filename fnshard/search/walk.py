"""Walk: go through the plans of a space to the fastest that fits into a budget of bytes.

A space says which plans there are, how one becomes another, and what each of them costs. Its moves are coarse
decisions: an axis, the number of rows at a time, or the place of the optimizer's state.

A plan may also trade time for memory, with units that are computed or gathered again. That is not a move but
a dial. The further it is turned, the slower the step is and the less memory it takes. So the best setting is
about the first that fits, and is found by interpolation for every plan that is looked at. The setting that
saves nothing is a lower bound on the time of all others, and a plan that is too slow even then is dropped
after a single price.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fnshard.search.price import Candidate

CLOSE = 5e-4  # plans whose times differ by a smaller share are as fast
# The search descends from the second start, too, if that is at most this much slower and some faster plan
# does not fit, or if the best does not fit.
RIVALRY = 1.15
SILENCE_S = 5.0  # seconds between two lines of a search that takes long

Move = Callable[[Any], Any]  # makes another plan of one, or None if there is none


@dataclass(frozen=True)
class Dial:
    """A way to save more with each level, from nothing at `at(0)` to as much as possible at `at(levels)`."""

    levels: int
    at: Callable[[int], Any]


class Space(Protocol):
    """A set of plans, which are hashable and have the `effort` that `Candidate.choice` asks for.

    A plan becomes another by a move, which changes a decision such as an axis, or by a dial, which says how
    much it saves. Its neighbours are priced last.
    """

    def starts(self) -> Iterable[Any]:
        """Return the plans at which a walk may begin. It continues from the best two."""

    def moves(self) -> Mapping[str, Sequence[Move]]:
        """Return the moves by the decision that they change.

        A move may give a plan that is not valid, since two together may give a valid one.
        """

    def is_valid(self, choice: Any) -> bool:
        """Return whether there is such a plan."""

    def dials(self, choice: Any) -> Sequence[Dial]:
        """Return the ways in which a plan can save memory, at least one. All begin at the same plan."""

    def returning_dials(self, choice: Any) -> Sequence[Dial]:
        """Return dials that undo savings which a plan, once its own dial is set, does not need."""

    def neighbours(self, choice: Any) -> Sequence[Any]:
        """Return the plans that differ from one in one decision. They are priced without turning a dial."""

    def frugal(self) -> Iterable[Any]:
        """Return the plans that save as much as possible, for a budget into which nothing else fits."""

    def price(self, choice: Any) -> Candidate:
        """Return a plan with its price."""


@dataclass
class SearchEffort:
    """A counter of the work that a search has done, which also reports its progress.

    Work is counted in lines of programs and schedules, not in seconds, so that all ranks, and busy machines,
    find the same plan.

    Args:
        say: a function that shows a line of text.
        limit: the number of lines after which the search is content with the best plan so far.
        silence_s: the seconds between two reports if nothing of note is found.
        made: the number of lines so far.
        longest: the number of lines of the longest schedule.
        told: the time of the last report.
    """

    say: Callable[[str], None] = lambda text: None
    limit: float = math.inf
    silence_s: float = SILENCE_S
    made: int = 0
    longest: int = 0
    told: float = field(default_factory=time.monotonic)

    def is_spent(self, share: float = 1.0) -> bool:
        """Return whether one more schedule, as long as the longest, would exceed a share of the limit."""
        return self.made + self.longest > share * self.limit

    def count_program(self, lines: int) -> None:
        """Add the lines of a program that was traced."""
        self.made += lines

    def count_schedule(self, lines: int) -> None:
        """Add the lines of the schedules of a plan."""
        self.made += lines
        self.longest = max(self.longest, lines)

    def tell(self, text: str) -> None:
        """Report at once what was found."""
        self.say(text)
        self.told = time.monotonic()

    def murmur(self, text: str) -> None:
        """Report progress, if the last report was long ago."""
        if time.monotonic() - self.told > self.silence_s:
            self.tell(text)


@dataclass
class Walk:
    """A search for the best plan of a space within a budget.

    Args:
        seen: the plans with their prices, which searches for other budgets may share.
        describe: a function that puts a candidate in a few words, for reports.
    """

    space: Space
    budget: float
    work: SearchEffort = field(default_factory=SearchEffort)
    seen: dict[Any, Candidate] = field(default_factory=dict)
    describe: Callable[[Candidate], str] = str

    def run(self) -> Candidate | None:
        """Return the fastest plan found that fits.

        No plan one move away is faster and fits, and none two moves away, as far as `descend` tries these. A
        search whose effort is spent returns the best plan so far. If nothing fits, the result is the plan
        that lacks least, and None if there is no plan at all.
        """
        # Price the plans to start from, with half of the effort: the other half is for the descents.
        starts: list[Candidate] = []
        for choice in self.space.starts():
            rival = min(starts, key=self.cost, default=None)
            if rival is not None and self.is_content_with(rival, share=0.5):
                break
            starts.append(self.within_budget(choice, rival))
            self.work.murmur(self.describe(starts[-1]))
        if not starts:
            return None

        # Descend from the best, and from the second only if it is nearly as good and memory decides.
        first, *others = sorted(starts, key=self.cost)
        self.work.tell(self.describe(first))
        best = self.descend(first)
        for second in others[:1]:
            is_rival = self.is_pressed(best) and second.seconds < RIVALRY * first.seconds
            if is_rival or not best.fits(self.budget):
                best = min(best, self.descend(second), key=self.cost)

        # A descent may end in a local minimum. The most frugal plans, or any that were seen, may be better.
        if not best.fits(self.budget):
            for choice in self.space.frugal():
                self.price_once(choice)
        while self.cost(known := min(self.seen.values(), key=self.cost)) < self.cost(best):
            best = self.descend(known)
        return best

    def cost(self, candidate: Candidate) -> tuple[float, ...]:
        """Return what the search minimises."""
        return candidate.cost(self.budget)

    def is_pressed(self, best: Candidate) -> bool:
        """Return whether a faster plan takes too much memory: a larger budget has another best plan."""
        return any(not c.fits(self.budget) and c.seconds < best.seconds for c in self.seen.values())

    def is_content_with(self, best: Candidate, share: float = 1.0) -> bool:
        """Return whether a share of the work is done, and there is a plan to be content with."""
        return self.work.is_spent(share) and best.fits(self.budget)

    def price_once(self, choice: Any) -> Candidate:
        """Return a plan with its price, which is computed once."""
        if choice not in self.seen:
            self.seen[choice] = self.space.price(choice)
        return self.seen[choice]

    # -------------------------------------------------------------- one plan, and how much it saves
    def within_budget(self, choice: Any, rival: Candidate | None = None) -> Candidate:
        """Return the plan with a setting that saves as little as fits, or that lacks least if none fits.

        Args:
            rival: another plan. If it fits, settings that can be no faster are not looked for.
        """
        # Savings cost time, so a plan that saves nothing is the fastest setting: it fits, or is a bound.
        dials = self.space.dials(choice)
        fastest = self.price_once(dials[0].at(0))
        limit = rival.seconds if rival is not None and rival.fits(self.budget) else math.inf
        if fastest.fits(self.budget) or fastest.seconds >= limit:
            return fastest

        # Turn each dial as far as needed, and then give back what the best setting saves in excess.
        best = fastest
        for dial in dials:
            if dial.levels:
                best = min(best, self.least_that_fits(dial, limit), key=self.cost)
                limit = min(limit, best.seconds) if best.fits(self.budget) else limit
        for dial in self.space.returning_dials(best.choice) if best.fits(self.budget) else ():
            best = min(best, self.least_that_fits(dial, math.inf), key=self.cost)
        return best

    def least_that_fits(self, dial: Dial, limit: float) -> Candidate:
        """Return the first setting of a dial that fits, or the smallest of those tried if none does.

        Bytes fall nearly linearly with the level, so interpolation finds it. Every other guess halves the
        interval instead, in case they do not. A setting that saves too little is a lower bound on the time of
        all that save more, so the search ends when these can be no faster than `limit`, or than what fits.
        Where the last setting takes more bytes than the first, as in models of one layer, three in between
        are tried.
        """
        # Setting `low`, whose price is `short`, does not fit. `high` is to be the lowest one known to fit.
        low, high = 0, dial.levels
        short = self.price_once(dial.at(low))
        if short.fits(self.budget):
            return short
        best = self.price_once(dial.at(high))

        # If bytes do not fall at all, there is nothing to interpolate: look for any setting that fits.
        if not best.fits(self.budget) and best.peak_bytes >= short.peak_bytes:
            tried = [short, best]
            for level in sorted({part * dial.levels // 4 for part in (1, 2, 3)} - {low}):
                if short.seconds >= limit:
                    return min(tried, key=self.cost)
                priced = self.price_once(dial.at(level))
                if priced.fits(self.budget):
                    high, best = level, priced
                    break
                low, short = level, priced
                tried.append(priced)
            else:
                return min(tried, key=self.cost)
        if not best.fits(self.budget):
            return best

        # Narrow the interval, by interpolation and bisection in turns.
        enough, bisects = best, False
        while high - low > 1 and short.seconds < min(limit, best.seconds) * (1 - CLOSE):
            share = (short.peak_bytes - self.budget) / max(short.peak_bytes - enough.peak_bytes, 1)
            guess = (low + high) // 2 if bisects else low + math.ceil(share * (high - low))
            level, bisects = min(max(guess, low + 1), high - 1), not bisects
            priced = self.price_once(dial.at(level))
            if priced.fits(self.budget):
                high, enough, best = level, priced, min(best, priced, key=self.cost)
            else:
                low, short = level, priced
        return best

    # -------------------------------------------------------------- from plan to plan
    def descend(self, best: Candidate) -> Candidate:
        """Go from a plan to one from which no move leads to a better one, or stop once the effort is spent.

        One decision after another takes its best value. Two are changed together only when no single one
        helps, and, if no faster plan is too large, only if one of the two alone gives no plan. The neighbours
        of a plan are priced last.
        """
        while not self.is_content_with(best):
            begun = best
            for moves in self.space.moves().values():
                while True:  # repeat the moves of one decision as long as that pays
                    better = self.improve(best, self.one_move_away(best.choice, moves))
                    if better is best:
                        break
                    best = better
                    self.work.murmur(self.describe(best))

            # No single move helped: try pairs of moves, then neighbours. Stop if these do not help either.
            if best is begun:
                best = self.improve(best, self.two_moves_away(best.choice, self.is_pressed(best)))
            if best is begun:
                best = self.price_neighbours(best)
            if best is begun:
                break
        return best

    def improve(self, best: Candidate, others: Iterable[Any]) -> Candidate:
        """Return the best of a plan and of others, whose dials are turned as far as they need."""
        for choice in others:
            if self.is_content_with(best):
                break
            best = min(best, self.within_budget(choice, best), key=self.cost)
            self.work.murmur(f"{len(self.seen)} plans priced, the best {self.describe(best)}")
        return best

    def price_neighbours(self, best: Candidate) -> Candidate:
        """Return the best of a plan and of its neighbours."""
        for choice in self.space.neighbours(best.choice):
            # A price that is known costs no effort.
            if choice in self.seen or not self.is_content_with(best):
                best = min(best, self.price_once(choice), key=self.cost)
        return best

    def one_move_away(self, choice: Any, moves: Iterable[Move]) -> list[Any]:
        """Return the valid plans that are one of these moves away."""
        others = dict.fromkeys(move(choice) for move in moves)
        return [c for c in others if c is not None and c != choice and self.space.is_valid(c)]

    def two_moves_away(self, choice: Any, through_valid: bool = True) -> list[Any]:
        """Return the valid plans that are two moves away. Those whose moves alone lose least time come first.

        Args:
            through_valid: whether pairs are tried whose first move alone gives a valid plan.
        """
        # The plans one move away, and the time that each move alone loses.
        moves = [move for each in self.space.moves().values() for move in each]
        results = {move: move(choice) for move in moves}
        alone = {move: c for move, c in results.items() if c is not None and c != choice}
        near = {choice, *(c for c in alone.values() if self.space.is_valid(c))}
        lost = {move: self.seconds_lost(c, choice) for move, c in alone.items()}

        # The plans two moves away, each with the least sum of losses of the pairs that lead to it.
        losses: dict[Any, float] = {}
        for first, between in alone.items():
            if between in near and not through_valid:
                continue
            for second in moves:
                plan = second(between)
                if plan is not None:
                    loss = lost[first] + lost.get(second, 0.0)
                    losses[plan] = min(losses.get(plan, math.inf), loss)
        far = [c for c in losses if c not in near and self.space.is_valid(c)]
        return sorted(far, key=losses.__getitem__)

    def seconds_lost(self, choice: Any, other: Any) -> float:
        """Return the seconds by which a plan is slower than another if both save nothing.

        The result is 0 if the first is not valid, or if either has not been priced.
        """
        if not self.space.is_valid(choice):
            return 0.0
        priced, other_priced = (self.seen.get(self.space.dials(c)[0].at(0)) for c in (choice, other))
        if priced is None or other_priced is None:
            return 0.0
        return priced.seconds - other_priced.seconds
