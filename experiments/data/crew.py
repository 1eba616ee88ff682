"""Processes that do numbered tasks, handed out one by one; a task of a process that dies is an error."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

T, R = TypeVar("T"), TypeVar("R")
Advance = Callable[[int], None]
Do = Callable[[T, Advance], R]


class CrewError(RuntimeError):
    """A process of the crew died."""


def work(tasks: Sequence[T], do: Do[T, R], processes: int, advance: Advance) -> Iterator[tuple[T, R]]:
    """Each task and its result, in the order in which they are done.

    The processes are forked: call it while there are no threads. They end when this process does, however
    that ends.

    Args:
        do: the work; it may call its second argument with a count.
        processes: at most; one is this process itself.
        advance: is called here with these counts.

    Raises:
        CrewError: a process died.
        OSError: `do` raised it.
    """
    if min(processes, len(tasks)) <= 1:
        yield from ((task, do(task, advance)) for task in tasks)
        return
    members = _start(tasks, do, min(processes, len(tasks)))
    try:
        left = iter(range(len(tasks)))
        busy = {pipe: next(left) for pipe in members}
        for pipe, number in busy.items():
            _hand(pipe, members[pipe], number)
        while busy:
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                kind, value = _heard(pipe, members[pipe])
                if kind == "advance":
                    advance(value)
                    continue
                number = busy.pop(pipe)
                following = next(left, None)
                if following is not None:
                    busy[pipe] = following
                    _hand(pipe, members[pipe], following)
                yield tasks[number], value
    finally:
        for pipe, process in members.items():
            pipe.close()
            process.terminate()
            process.join()


def _start(tasks: Sequence[T], do: Do[T, R], count: int) -> dict[Connection, Any]:
    context = multiprocessing.get_context("fork")
    members: dict[Connection, Any] = {}
    for _ in range(count):
        here, there = context.Pipe()
        # An end of a pipe that is left open anywhere would keep the others from hearing of a death.
        inherited = [*members, here]
        members[here] = context.Process(target=_member, args=(there, inherited, tasks, do), daemon=True)
        members[here].start()
        there.close()
    return members


def _hand(pipe: Connection, process: Any, number: int) -> None:
    try:
        pipe.send(number)
    except (BrokenPipeError, ConnectionResetError):
        raise _dead(process) from None


def _heard(pipe: Connection, process: Any) -> tuple[str, Any]:
    try:
        kind, value = pipe.recv()
    except (EOFError, ConnectionResetError):
        raise _dead(process) from None
    if kind == "error":
        raise value
    return kind, value


def _dead(process: Any) -> CrewError:
    process.join()
    return CrewError(f"a process died ({_how(process.exitcode)}).")


def _how(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name}, which a machine out of memory sends" if -code == signal.SIGKILL else name


def _member(pipe: Connection, inherited: Sequence[Connection], tasks: Sequence[T], do: Do[T, R]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, to all; the first process ends the others
    for other in inherited:
        other.close()
    try:
        while True:
            number = pipe.recv()
            try:
                answer = ("done", do(tasks[number], lambda count: pipe.send(("advance", count))))
            except (BrokenPipeError, ConnectionResetError):
                return
            except OSError as error:
                answer = ("error", error)
            except Exception:
                answer = ("error", RuntimeError(f"in a process of its own:\n{traceback.format_exc()}"))
            pipe.send(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the one that hands out is gone
        return
