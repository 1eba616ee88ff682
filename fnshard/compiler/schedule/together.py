"""Together: the schedules of a pipeline's stages, merged line by line. It is the proof that no run deadlocks.

A stage has no choices: it does its lines one after another. A line can be done when the lines of other stages
that it needs are done: the Wait of a message needs the other end to be issued, and a collective over the
pipeline needs all stages to have come to it. Whatever else a line reads, its own stage has made before
(`verify`). If the merge comes to the end of all schedules, so does every run, however fast its stages are; if
it does not, it shows the circle in which stages wait for one another. The timeline walks through lines in the
merged order, and ranks agree on its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fnshard.compiler.schedule.instructions import COMMUNICATION, Recv, Send, Wait
from fnshard.compiler.schedule.instructions.messages import Message, pair_of
from fnshard.compiler.schedule.ir import Instruction, Schedule
from fnshard.errors import ScheduleError
from fnshard.mesh import PIPELINE

StageLine = tuple[int, int]  # a stage and the number of one of its lines


def together(schedules: Sequence[Schedule]) -> list[StageLine]:
    """Merge the schedules of all stages; return (stage, line) in an order in which they can be done.

    Raises:
        ScheduleError: stages wait for one another, and the error shows the lines at which they do; the two
            ends of a message differ; or stages come to collectives over the pipeline in different orders.
    """
    merge = _Merge(schedules)
    while not merge.is_done():
        # A line of each stage at a time, so that the text shows what stages do side by side.
        advanced = [merge.advance(stage) for stage in range(len(schedules))]
        if not any(advanced) and not merge.meet():
            raise ScheduleError(
                "the stages of the pipeline wait for one another for ever:",
                merge.describe_circle(),
                "this is a bug of ours, or of a pass that moves Sends, Recvs or their Waits.",
            )
    if merge.problems:
        raise ScheduleError(f"{len(merge.problems)} faults between stages:", merge.problems[:20])
    return merge.order


@dataclass
class _Merge:
    """The state of a merge: how far each stage has come.

    Args:
        order: the lines that were merged.
        problems: the faults so far.
        issued: messages that were issued, in order, by the stages that they go from and to, and by their end.
        numbers: by stage and flight, the number of a message among these.
    """

    schedules: Sequence[Schedule]
    order: list[StageLine] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    issued: dict[tuple[int, int, type], list[Message]] = field(default_factory=dict)
    numbers: dict[tuple[int, str], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.at = [0] * len(self.schedules)  # by stage, the number of the line that it is at

    def find_line(self, stage: int) -> Instruction | None:
        """Return the line that a stage is at, or None behind its last."""
        lines = self.schedules[stage].instructions
        return lines[self.at[stage]] if self.at[stage] < len(lines) else None

    def is_done(self) -> bool:
        """Return whether all stages are at their end; if so, note messages that nobody takes."""
        if any(self.find_line(stage) is not None for stage in range(len(self.schedules))):
            return False
        for (source, target, kind), sent in self.issued.items():
            other = self.issued.get((source, target, Recv if kind is Send else Send), [])
            for line in sent[len(other) :]:
                self.problems.append(
                    f"{line.verb} {line.detail}, from stage {source} to {target}, has no other end"
                )
        return True

    def advance(self, stage: int) -> bool:
        """Do the line that a stage is at, if no other stage has to come first; return whether that was so."""
        line = self.find_line(stage)
        if line is None or self.is_meeting(line, stage) or self.find_awaited(line, stage) is not None:
            return False
        self.merge_line(stage)
        return True

    def merge_line(self, stage: int) -> None:
        """Merge the line that a stage is at."""
        line = self.find_line(stage)
        self.order.append((stage, self.at[stage]))
        self.at[stage] += 1
        if isinstance(line, Message):
            self.issue(line, stage)

    def issue(self, line: Message, stage: int) -> None:
        """Note a message, and compare it with its other end if that has been issued."""
        source, target = pair_of(line, stage)
        if not 0 <= line.stage < len(self.schedules) or line.stage == stage:
            self.problems.append(f"{line.verb} {line.detail}: stage {stage} has no such other stage")
        # The n-th Send of a pair of stages and the n-th Recv are the two ends of a message.
        issued = self.issued.setdefault((source, target, type(line)), [])
        number = self.numbers[stage, line.writes[0]] = len(issued)
        issued.append(line)
        other = self.issued.get((source, target, Recv if isinstance(line, Send) else Send), [])
        if number < len(other) and other[number].shown != line.shown:
            sent, got = (line, other[number]) if isinstance(line, Send) else (other[number], line)
            self.problems.append(
                f"stage {source} sends {sent.shown}, where stage {target} receives {got.shown}"
            )

    def is_meeting(self, line: Instruction, stage: int) -> bool:
        """Return whether ranks of all stages meet in a line."""
        schedule = self.schedules[stage]
        is_collective = line.lane == COMMUNICATION and not isinstance(line, Message)
        return is_collective and PIPELINE in line.axes_of(schedule)

    def meet(self) -> bool:
        """Do the collective over the pipeline that all stages are at; return False if they are not."""
        stages = range(len(self.schedules))
        lines = [self.find_line(stage) for stage in stages]
        if not all(line is not None and self.is_meeting(line, s) for s, line in enumerate(lines)):
            return False
        texts = [self.describe_collective(line, s) for s, line in enumerate(lines)]
        for stage, text in zip(stages, texts, strict=True):
            if text != texts[0]:
                self.problems.append(f"stage {stage} comes to {text}, where stage 0 comes to {texts[0]}")
        for stage in stages:
            self.merge_line(stage)
        return True

    def describe_collective(self, line: Instruction, stage: int) -> str:
        """Return the text of a collective that must be alike on all stages."""
        schedule, bucket = self.schedules[stage], getattr(line, "bucket", "")
        what = line.wire_text(schedule) if bucket else f"{schedule.scalars} numbers"
        return f"{line.verb} over {', '.join(line.axes_of(schedule))} of {what}"

    def find_awaited(self, line: Instruction, stage: int) -> int | None:
        """Return the stage whose end of a message a line waits for, or None."""
        if not (isinstance(line, Wait) and line.is_for(Message)):
            return None
        # The other end is issued if its list is longer than the number of this end.
        issue = self.schedules[stage].issues[line.reads[0]]
        source, target = pair_of(issue, stage)
        other = self.issued.get((source, target, Recv if isinstance(issue, Send) else Send), [])
        return issue.stage if self.numbers[stage, line.reads[0]] >= len(other) else None

    def describe_circle(self) -> list[str]:
        """Describe which line each stage is at, and for whom it waits."""
        out = []
        for stage in range(len(self.schedules)):
            line = self.find_line(stage)
            if line is None:
                out.append(f"stage {stage} is at its end")
                continue
            where = (
                f"stage {stage}, line {self.at[stage]}: {line.phase} {line.unit} {line.verb} {line.detail}"
            )
            other = self.find_awaited(line, stage)
            whom = "all stages" if other is None else f"stage {other}"
            out.append(f"{where} waits for {whom}")
        return out
