"""Page: the report, one HTML file that loads nothing: pictures inlined, no script, no link."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from experiments.explain import words
from experiments.explain.paper import Paper
from fnshard import plot
from fnshard.plot.scales import byte_text, time_text

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>$title</title>
<style>
:root { color-scheme: light; }
body { margin: 0 auto; padding: 1rem; max-width: 70rem; color: #1a1a1a; background: #fff;
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.2; margin: .5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; border-bottom: 1px solid #999; }
p.verdict { padding: .6rem .8rem; border-left: .4rem solid #009e73; background: #eef7f3; }
p.bad { border-color: #d55e00; background: #fdf1e8; }
.wide { overflow-x: auto; margin: .5rem 0; }
.wide img { display: block; width: 100%; min-width: 44rem; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #ddd; }
td.number, th.number { text-align: right; white-space: nowrap; }
table.summary th { white-space: nowrap; font-weight: 600; }
table.summary td { overflow-wrap: anywhere; }
pre { overflow-x: auto; font-size: .8rem; line-height: 1.35; padding: .6rem; margin: .5rem 0;
  background: #f4f4f4; }
summary { cursor: pointer; padding: .4rem 0; }
figure { margin: .5rem 0 1rem; }
figcaption { color: #444; font-size: .9rem; }
@media (max-width: 40rem) {
  table.summary th, table.summary td { display: block; border: 0; padding: 0; }
  table.summary td { margin-bottom: .6rem; padding-bottom: .4rem; border-bottom: 1px solid #ddd; }
}
</style>
</head>
<body>
<h1>$title</h1>
<p class="verdict $mood">$verdict</p>
$body
</body>
</html>
""")
TYPES = {".svg": "image/svg+xml", ".png": "image/png"}


def page(paper: Paper, name: str, configuration: str) -> str:
    """The report as HTML."""
    title = f"{name} on {paper.config.ranks:,} × {paper.hardware.name}"
    with tempfile.TemporaryDirectory() as folder:
        body = "\n".join(
            f'<section id="{key}">\n<h2>{escape(head)}</h2>\n{inner}\n</section>'
            for key, (head, inner) in _sections(paper, Path(folder), configuration).items()
        )
    verdict = f"{words.fits_line(paper)}; {words.summary(paper)['step time']} (predicted, nothing was run)."
    return PAGE.substitute(
        title=escape(title),
        body=body,
        verdict=escape(f"Peak memory {verdict}"),
        mood="" if paper.fits else "bad",
    )


def _sections(paper: Paper, folder: Path, configuration: str) -> dict[str, tuple[str, str]]:
    schedule, count = paper.lowered.as_text(), len(paper.lowered.schedule.instructions)
    plan = [_table(words.units_table(paper))]
    if paper.found is not None:
        plan.append(_details("what the search looked at", _pre(str(paper.found))))
    if words.advice(paper):
        plan.append(_pre(words.advice(paper)))
    layouts = plot.text.tree(paper.specs, paper.mesh, width=16)
    memory, line = paper.memory, paper.timeline
    over = plot.memory(paper.over, folder / "memory.svg", limit=paper.device_bytes)
    peak = f"Bytes on one rank's device over the schedule, {byte_text(memory.peak_bytes)} at the peak"
    when = f"What runs when in a step of {time_text(line.step_seconds)}, lane by lane"
    pictures = {
        "memory": _picture(over, peak, f"The peak is in instruction {memory.at}: {memory.line}"),
        "timeline": _picture(
            plot.timeline(line, folder / "timeline.png"), when, f"A predicted step on {paper.hardware.name}."
        ),
    }
    return {
        "summary": ("Summary", _summary(words.summary(paper))),
        "plan": ("Plan", "\n".join(plan)),
        "layout": ("Layout", _pre(layouts)),
        "memory": ("Memory", pictures["memory"] + _table(words.memory_table(paper))),
        "timeline": ("Timeline", pictures["timeline"]),
        "traffic": ("Traffic", _table(words.traffic_table(paper))),
        "schedule": ("Schedule", _details(f"{count:,} instructions of one rank's step", _pre(schedule))),
        "config": ("Configuration", _details("as it was composed", _pre(configuration))),
    }


# ------------------------------------------------------------------ HTML; all text is escaped here


def _picture(path: Path, alt: str, caption: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    source = f"data:{TYPES[path.suffix]};base64,{data}"
    return (
        f'<figure><div class="wide" tabindex="0"><img src="{source}" alt="{escape(alt)}"></div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _summary(rows: Mapping[str, str]) -> str:
    lines = [f'<tr><th scope="row">{escape(k)}</th><td>{escape(v)}</td></tr>' for k, v in rows.items()]
    return '<table class="summary">\n' + "\n".join(lines) + "\n</table>"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Its first row is the head; a column with digits in front is one of numbers."""
    head, *rest = rows
    columns = range(len(head))
    right = [bool(rest) and all(r[i][:1].isdigit() or r[i] in ("-", "") for r in rest) for i in columns]

    def row(cells: Sequence[str], tag: str) -> str:
        kinds = [' class="number"' if number else "" for number in right]
        return "".join(f"<{tag}{kind}>{escape(c)}</{tag}>" for kind, c in zip(kinds, cells, strict=True))

    body = "\n".join(f"<tr>{row(r, 'td')}</tr>" for r in rest)
    return f'<div class="wide" tabindex="0"><table>\n<tr>{row(head, "th")}</tr>\n{body}\n</table></div>'


def _pre(text: str) -> str:
    return f'<pre tabindex="0">{escape(text)}</pre>'


def _details(summary: str, inner: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>\n{inner}\n</details>"
