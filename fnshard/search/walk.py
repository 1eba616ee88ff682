"""Walk: go through the plans of a space to the fastest that fits into a budget of bytes.

A space says which plans there are, how one becomes another, and what each of them costs. Its moves are coarse
decisions: an axis, the number of rows at a time, or the place of the optimizer's state.

A plan may also save memory by working more, with units that are computed or gathered again. That is not a
move but a dial. The more it saves, the slower the step is and the less memory it takes. So the best setting
is about the first that fits, and is found by interpolation for every plan that is looked at. The setting that
saves nothing bounds all others from below, and a plan that is slower even then is passed by after a single
price.
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
    """The plans that there are. They are hashable, and have what `Candidate.choice` says.

    A plan becomes another by a move, which changes a decision such as an axis, or by a dial, which says how
    much it saves. Its neighbours are priced last.
    """

    def starts(self) -> Iterable[Any]:
        """Return the plans at which a walk may begin. It goes on from the best two."""

    def moves(self) -> Mapping[str, Sequence[Move]]:
        """Return the moves by the decision that they change.

        A move may give a plan that is not valid, since two together may give a valid one.
        """

    def is_valid(self, choice: Any) -> bool:
        """Return whether there is such a plan."""

    def dials(self, choice: Any) -> Sequence[Dial]:
        """Return the ways in which a plan can save memory, at least one. All begin at the same plan."""

    def returning_dials(self, choice: Any) -> Sequence[Dial]:
        """Return dials by which a plan whose own dial is set gets back what it has saved too much."""

    def neighbours(self, choice: Any) -> Sequence[Any]:
        """Return the plans that differ from one in one decision. They are priced without turning a dial."""

    def frugal(self) -> Iterable[Any]:
        """Return the plans that save as much as possible, for a budget into which nothing else fits."""

    def price(self, choice: Any) -> Candidate:
        """Return a plan with its price."""


@dataclass
class SearchEffort:
    """The work that a search has done, and its reports of that.

    Work is counted in lines of programs and schedules, not in seconds, so that all ranks, and busy machines,
    find the same plan.

    Args:
        say: shows a line of text.
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
        """Return whether a share of the work is done, as one more schedule may be as long as the longest."""
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
        """Report what the search is at, if it was silent for long."""
        if time.monotonic() - self.told > self.silence_s:
            self.tell(text)


@dataclass
class Walk:
    """A search for the best plan of a space within a budget.

    Args:
        seen: the plans with their prices, which searches for other budgets may share.
        describe: puts a candidate in a few words, for reports.
    """

    space: Space
    budget: float
    work: SearchEffort = field(default_factory=SearchEffort)
    seen: dict[Any, Candidate] = field(default_factory=dict)
    describe: Callable[[Candidate], str] = str

    def run(self) -> Candidate | None:
        """Return the fastest plan found that fits.

        No plan one move away is faster and fits, and none two moves away, as far as `descend` tries these. A
        search whose effort is spent returns the best so far. If nothing fits, that is the plan that lacks
        least, and None if there is no plan at all.
        """
        # Begin at the best two starts, at the second only if it is nearly as good and memory decides.
        begun: list[Candidate] = []
        for choice in self.space.starts():
            rival = min(begun, key=self.cost, default=None)
            # Half of the effort is for going on from these.
            if rival is not None and self.is_content_with(rival, share=0.5):
                break
            begun.append(self.within_budget(choice, rival))
            self.work.murmur(self.describe(begun[-1]))
        if not begun:
            return None
        first, *others = sorted(begun, key=self.cost)
        self.work.tell(self.describe(first))
        best = self.descend(first)
        for other in others[:1]:
            rivals = self.is_pressed(best) and other.seconds < RIVALRY * first.seconds
            if rivals or not best.fits(self.budget):
                best = min(best, self.descend(other), key=self.cost)

        # A descent may end in a hollow. Plans that save as much as possible, or were seen, may be better.
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
        """Return whether a faster plan takes too much, so that with more room the best would be another."""
        return any(not c.fits(self.budget) and c.seconds < best.seconds for c in self.seen.values())

    def is_content_with(self, best: Candidate, share: float = 1.0) -> bool:
        """Return whether a share of the work is done, and there is a plan to be content with."""
        return self.work.is_spent(share) and best.fits(self.budget)

    def price_once(self, choice: Any) -> Candidate:
        """Return a plan's price, which is made once."""
        if choice not in self.seen:
            self.seen[choice] = self.space.price(choice)
        return self.seen[choice]

    # -------------------------------------------------------------- one plan, and how much it saves
    def within_budget(self, choice: Any, rival: Candidate | None = None) -> Candidate:
        """Return the plan with a setting that saves as little as fits, or that lacks least if none fits.

        Args:
            rival: another plan. If it fits, settings that can be no faster are not looked for.
        """
        dials = self.space.dials(choice)
        free = self.price_once(dials[0].at(0))
        limit = rival.seconds if rival is not None and rival.fits(self.budget) else math.inf
        if free.fits(self.budget) or free.seconds >= limit:
            return free
        best = free
        for dial in dials:
            if dial.levels:
                best = min(best, self.least_that_fits(dial, limit), key=self.cost)
                limit = min(limit, best.seconds) if best.fits(self.budget) else limit
        for dial in self.space.returning_dials(best.choice) if best.fits(self.budget) else ():
            best = min(best, self.least_that_fits(dial, math.inf), key=self.cost)
        return best

    def least_that_fits(self, dial: Dial, limit: float) -> Candidate:
        """Return the first setting of a dial that fits, or the smallest of those tried if none does.

        Bytes fall with the level, nearly in a line, so that interpolation finds it. Every other guess halves
        what is left, in case they do not. A setting that saves too little bounds all that save more, so the
        search ends when these can be no faster than `limit`, or than what fits. Where the last setting takes
        more bytes than the first, as in models of one layer, three in between are tried.
        """
        low, high = 0, dial.levels
        short = self.price_once(dial.at(low))
        if short.fits(self.budget):
            return short
        best = self.price_once(dial.at(high))
        if not best.fits(self.budget) and best.peak_bytes >= short.peak_bytes:
            tried = [short, best]
            for level in sorted({part * dial.levels // 4 for part in (1, 2, 3)} - {low}):
                if short.seconds >= limit:
                    return min(tried, key=self.cost)
                found = self.price_once(dial.at(level))
                if found.fits(self.budget):
                    high, best = level, found
                    break
                low, short = level, found
                tried.append(found)
            else:
                return min(tried, key=self.cost)
        if not best.fits(self.budget):
            return best
        enough, halves = best, False
        while high - low > 1 and short.seconds < min(limit, best.seconds) * (1 - CLOSE):
            share = (short.peak_bytes - self.budget) / max(short.peak_bytes - enough.peak_bytes, 1)
            guess = (low + high) // 2 if halves else low + math.ceil(share * (high - low))
            level, halves = min(max(guess, low + 1), high - 1), not halves
            found = self.price_once(dial.at(level))
            if found.fits(self.budget):
                high, enough, best = level, found, min(best, found, key=self.cost)
            else:
                low, short = level, found
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
                while True:  # a decision goes on in a direction as long as that pays
                    better = self.improve(best, self.one_move_away(best.choice, moves))
                    if better is best:
                        break
                    best = better
                    self.work.murmur(self.describe(best))
            if best is begun:
                best = self.improve(best, self.two_moves_away(best.choice, self.is_pressed(best)))
            if best is begun:
                best = self.price_neighbours(best)
            if best is begun:
                break
        return best

    def improve(self, best: Candidate, others: Iterable[Any]) -> Candidate:
        """Return the best of a plan and of others, each with as much saved as it needs."""
        for choice in others:
            if self.is_content_with(best):
                break
            best = min(best, self.within_budget(choice, best), key=self.cost)
            self.work.murmur(f"{len(self.seen)} plans priced, the best {self.describe(best)}")
        return best

    def price_neighbours(self, best: Candidate) -> Candidate:
        """Return the best of a plan and of its neighbours."""
        for choice in self.space.neighbours(best.choice):
            if choice in self.seen or not self.is_content_with(best):
                best = min(best, self.price_once(choice), key=self.cost)
        return best

    def one_move_away(self, choice: Any, moves: Iterable[Move]) -> list[Any]:
        """Return the valid plans that are one of these moves away."""
        found = dict.fromkeys(move(choice) for move in moves)
        return [c for c in found if c is not None and c != choice and self.space.is_valid(c)]

    def two_moves_away(self, choice: Any, through_valid: bool = True) -> list[Any]:
        """Return the valid plans that are two moves away, those first whose moves alone lose least time.

        Args:
            through_valid: whether pairs are tried of which either move alone is valid.
        """
        moves = [move for each in self.space.moves().values() for move in each]
        alone = {move: c for move in moves if (c := move(choice)) is not None and c != choice}
        near = {choice, *(c for c in alone.values() if self.space.is_valid(c))}
        lost = {move: self.seconds_lost(c, choice) for move, c in alone.items()}
        both: dict[Any, float] = {}
        for first, between in alone.items():
            for second in moves if through_valid or between not in near else ():
                if (pair := second(between)) is not None:
                    loses = lost[first] + lost.get(second, 0.0)
                    both[pair] = min(both.get(pair, math.inf), loses)
        return sorted((c for c in both if c not in near and self.space.is_valid(c)), key=both.__getitem__)

    def seconds_lost(self, choice: Any, other: Any) -> float:
        """Return the seconds by which a plan is slower than another if both save nothing; 0 without a
        price."""
        if not self.space.is_valid(choice):
            return 0.0
        found, known = (self.seen.get(self.space.dials(c)[0].at(0)) for c in (choice, other))
        return 0.0 if found is None or known is None else found.seconds - known.seconds
