"""Walk: from the plans of a space to the fastest that fits into a budget of bytes.

A space says which plans there are, how one becomes another, and what each of them takes. Its moves are coarse
decisions: an axis, how many rows at a time, where the optimizer's state rests. How much of a plan's memory is
saved by working more (units that are computed or gathered again) is no move but a dial: the more is saved,
the slower the step is and the less it takes, so the best setting is about the first that fits, and is found
by interpolation for every plan that is looked at. A plan whose dial stands at nothing saved bounds all
settings from below: one that is slower even then is passed by after a single price.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fnshard.search.price import Candidate

CLOSE = 5e-4  # plans whose times differ by less are as fast
# Descend from the second start only if it is at most this much slower and some faster plan does not fit, or
# if the best does not fit.
RIVALRY = 1.15
SILENCE_S = 5.0  # between two lines of a search that takes long

Move = Callable[[Any], Any]  # from a plan to another; None where there is none


@dataclass(frozen=True)
class Dial:
    """A way to save more and more: `at(0)` saves nothing, `at(levels)` all that can be, each level more."""

    levels: int
    at: Callable[[int], Any]


class Space(Protocol):
    """The plans that there are. They are hashable; `Candidate.choice` says what else they have.

    A plan becomes another by a move (a decision, such as an axis), or by turning a dial (how much it saves);
    its neighbours are priced last.
    """

    def starts(self) -> Iterable[Any]:
        """Return the plans that a walk may begin at; it goes on from the best two."""

    def moves(self) -> Mapping[str, Sequence[Move]]:
        """Return the moves by the decision that they change. A move may give a plan that is not valid: two
        together may be."""

    def is_valid(self, choice: Any) -> bool:
        """Return whether there is such a plan."""

    def dials(self, choice: Any) -> Sequence[Dial]:
        """Return the ways in which a plan can save memory, at least one; all begin at the same plan."""

    def returning_dials(self, choice: Any) -> Sequence[Dial]:
        """Return dials of a plan whose own dial is set, by which it gets back what it saved too much."""

    def neighbours(self, choice: Any) -> Sequence[Any]:
        """Return the plans that differ from one in one decision; they are priced as they are, no dial is
        turned."""

    def frugal(self) -> Iterable[Any]:
        """Return the plans that save all they can, for a budget into which nothing fits otherwise."""

    def price(self, choice: Any) -> Candidate:
        """Return what a plan takes."""


@dataclass
class SearchEffort:
    """The work that a search has done, and what it says of that.

    It is counted in lines of programs and schedules, not in seconds: all ranks, and a machine that is busy,
    find the same plan.

    Args:
        say: shows a line.
        limit: of the lines that are made before the search is content with the best plan so far.
        silence_s: between two lines, where nothing of note is found.
        made: lines so far.
        longest: the longest schedule, in lines.
    """

    say: Callable[[str], None] = lambda text: None
    limit: float = math.inf
    silence_s: float = SILENCE_S
    made: int = 0
    longest: int = 0
    told: float = field(default_factory=time.monotonic)

    def is_spent(self, share: float = 1.0) -> bool:
        """Return whether a share of the work is done: one more schedule may be as long as the longest was."""
        return self.made + self.longest > share * self.limit

    def count_program(self, lines: int) -> None:
        """Add the lines of a program that was traced."""
        self.made += lines

    def count_schedule(self, lines: int) -> None:
        """Add the lines of the schedules of a plan."""
        self.made += lines
        self.longest = max(self.longest, lines)

    def tell(self, text: str) -> None:
        """Say at once what was found."""
        self.say(text)
        self.told = time.monotonic()

    def murmur(self, text: str) -> None:
        """Say what the search is at, if it was silent for long."""
        if time.monotonic() - self.told > self.silence_s:
            self.tell(text)


@dataclass
class Walk:
    """A search for the best plan of a space within a budget.

    Args:
        seen: the plans with their prices; searches for other budgets may share them.
        describe: a candidate in a few words, for what the work says.
    """

    space: Space
    budget: float
    work: SearchEffort = field(default_factory=SearchEffort)
    seen: dict[Any, Candidate] = field(default_factory=dict)
    describe: Callable[[Candidate], str] = str

    def run(self) -> Candidate | None:
        """Return the fastest plan found that fits.

        No plan one move away is faster and fits; none two moves away, as far as `descend` tries these. A
        search whose effort is spent returns the best so far. Where nothing fits it is the plan that lacks
        least; None where there is no plan at all.
        """
        # Begin at the best two starts, the second only where it is nearly as good and memory decides.
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

        # A descent may end in a hollow: what saves all that can be, or was seen on the way, may be better.
        if not best.fits(self.budget):
            for choice in self.space.frugal():
                self.price_once(choice)
        while self.cost(known := min(self.seen.values(), key=self.cost)) < self.cost(best):
            best = self.descend(known)
        return best

    def cost(self, candidate: Candidate) -> tuple[float, ...]:
        """Return what the search makes small."""
        return candidate.cost(self.budget)

    def is_pressed(self, best: Candidate) -> bool:
        """Return whether a plan that is faster takes too much: with more room the best would be another."""
        return any(not c.fits(self.budget) and c.seconds < best.seconds for c in self.seen.values())

    def is_content_with(self, best: Candidate, share: float = 1.0) -> bool:
        """Return whether a share of the work is done, and there is a plan to be content with."""
        return self.work.is_spent(share) and best.fits(self.budget)

    def price_once(self, choice: Any) -> Candidate:
        """Return a plan's price; each is made once."""
        if choice not in self.seen:
            self.seen[choice] = self.space.price(choice)
        return self.seen[choice]

    # -------------------------------------------------------------- one plan, and how much it saves
    def within_budget(self, choice: Any, rival: Candidate | None = None) -> Candidate:
        """Return a plan that saves as little as fits, or the setting that lacks least if none does.

        Args:
            rival: another plan; where it fits, settings that can be no faster are not looked for.
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
        """Return the first setting of a dial that fits, or the last if none does.

        Bytes fall with the level, nearly in a line, so that interpolation finds it; every other guess halves
        what is left, where they do not. A setting that saves too little bounds all that save more: the
        search ends where these can be no faster than `limit`, or than what fits.
        """
        low, high = 0, dial.levels
        short = self.price_once(dial.at(low))
        if short.fits(self.budget):
            return short
        best = self.price_once(dial.at(high))
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
        """Return a plan from which neither one move nor, as far as they are tried, two of them lead to a
        better one; or the best so far, once the effort is spent.

        One decision after another takes its best value. Two are changed together only when no single one
        helps; where no faster plan is too large, only if one of the two alone gives no plan. Last its
        neighbours are priced.
        """
        while not self.is_content_with(best):
            begun = best
            for moves in self.space.moves().values():
                while True:  # a decision goes on in a direction that pays
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
            through_valid: also those of which either move alone is valid.
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
        """Return how much longer a plan takes than another where both save nothing; 0 where one has no price
        yet."""
        if not self.space.is_valid(choice):
            return 0.0
        found, known = (self.seen.get(self.space.dials(c)[0].at(0)) for c in (choice, other))
        return 0.0 if found is None or known is None else found.seconds - known.seconds
