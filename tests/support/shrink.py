"""Shrink a failing case line by line, so that what is left is short enough to be read, and kept as a test."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from cases import Case, check
from programs import WRITES


def failure(case: Case, run: Callable[[Case], str] = check) -> str:
    """What `run` says of a case; where it raises "! ...", in words that do not depend on its numbers."""
    try:
        return run(case)
    except Exception as error:
        text = str(error).strip().splitlines()
        line = re.sub(r"[\w. ]+: off by.*|\d+|'.*?'|\(near.*", "#", text[0] if text else "")
        return f"! {type(error).__name__}: {line[:60]}"


def shrink(case: Case, what: Callable[[Case], str] = failure) -> Case:
    """A smaller case that fails in the same way: fewer lines, shorter ones, fewer options."""
    expected = what(case)

    def fails(less: Case) -> bool:
        try:
            return what(less) == expected
        except Exception:
            return False

    before = None
    while expected.startswith("!") and case != before:
        before = case
        for less in _fewer_options(case):
            case = less(case) if fails(less(case)) else case
        case = _one_term(case, fails)
        case = _fewer_lines(case, fails)
        case = _shorter_lines(case, fails)
        b, t, d = case.program.sizes
        for sizes in ((1, t, d), (b, 1, d), (b, t, 2)):
            less = replace(case, program=replace(case.program, sizes=sizes))
            case = less if less != case and fails(less) else case
    return case


def _fewer_options(case: Case) -> Iterator[Callable[[Case], Case]]:
    plain = Case(case.program)
    for name in ("options", "layouts", "run", "frozen", "aggregation", "axes", "preset"):
        if getattr(case, name) != getattr(plain, name):
            yield lambda c, name=name: replace(c, **{name: getattr(plain, name)})
    for name in case.options:
        yield lambda c, name=name: replace(c, options={k: v for k, v in c.options.items() if k != name})
    for path in case.frozen:
        yield lambda c, path=path: replace(c, frozen=tuple(p for p in c.frozen if p != path))


def _one_term(case: Case, fails: Callable[[Case], bool]) -> Case:
    """One term of the loss, and what it reads."""
    lines = case.program.source
    terms = [line for line in lines if line.startswith("loss = ")]
    for term in terms if len(terms) > 1 else ():
        first = term.replace("loss = loss + ", "loss = ")
        rest = [line for line in lines if line not in terms]
        less = _with_source(case, _live((*rest[:-1], first, rest[-1])))
        if fails(less):
            return less
    less = _with_source(case, _live(lines))
    return less if fails(less) else case


def _live(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Without lines whose names nobody reads after them; what writes in place stays."""
    read, kept = set(), []
    for line in reversed(lines):
        made, _, text = line.partition(" = ") if re.match(r"[\s\w,]+ = ", line) else ("", "", line)
        names = set(re.findall(r"\w+", made))
        if made and not names & read and not WRITES.search(line):
            continue
        read |= set(re.findall(r"[a-zA-Z_]\w*", text)) | names
        kept.append(line)
    return tuple(reversed(kept))


def _fewer_lines(case: Case, fails: Callable[[Case], bool]) -> Case:
    size = len(case.program.source) // 2
    while size:
        start = len(case.program.source) - 1 - size
        while start >= 0:
            source = case.program.source
            less = _with_source(case, (*source[:start], *source[start + size :]))
            case = less if fails(less) else case
            start -= size
        size //= 2
    return case


def _shorter_lines(case: Case, fails: Callable[[Case], bool]) -> Case:
    for number in range(len(case.program.source) - 1, -1, -1):
        line = case.program.source[number]
        for shorter in [other for other in _shorter(line) if other != line]:
            source = case.program.source
            less = _with_source(case, (*source[:number], shorter, *source[number + 1 :]))
            if fails(less):
                case = less
                break
    return case


def _shorter(line: str) -> Iterator[str]:
    """The same line with a simpler loop, result or call."""
    if line.startswith("for "):
        yield "for i in range(1):"
        yield "for i in range(2):"
    yield line.replace("with torch.no_grad(): ", "")
    yield line.replace("loss = loss + ", "loss = ")
    if line.startswith("return"):
        yield "return loss"
    for found in re.finditer(
        r"\.(square|mean|sin|tanh|cos|sigmoid|abs)\(\)| [+*] -?[\d.]+|-?\d+\.\d+ \* ", line
    ):
        yield line[: found.start()] + line[found.end() :]


def _with_source(case: Case, source: tuple[str, ...]) -> Case:
    """With other lines, and the leaves that these read."""
    read = {p.replace("{i}", "*") for p in re.findall(r'p\[f?"(.*?)"\]', "\n".join(source))}
    shapes = {
        p: s for p, s in case.program.shapes.items() if p in read or re.sub(r"\.\d+\.", ".*.", p) in read
    }
    layouts = {p: s for p, s in case.layouts.items() if p in shapes}
    frozen = tuple(p for p in case.frozen if p in shapes)
    buffers, aggregation = (
        {p: v for p, v in of.items() if p in shapes} for of in (case.program.buffers, case.aggregation)
    )
    program = replace(case.program, source=source, shapes=shapes, buffers=buffers)
    return replace(case, program=program, layouts=layouts, frozen=frozen, aggregation=aggregation)
