"""Pictures are written, without a display; a clear error without matplotlib; what is drawn in characters."""

from __future__ import annotations

import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import raises
from toys import llama, lower

import fnshard as fs
from fnshard import Hardware, LayoutSpec, P
from fnshard.analysis.timeline import Span, Timeline
from fnshard.errors import MissingExtraError, SpecError
from fnshard.layout.partition import Fused
from fnshard.plot import text
from fnshard.plot.pictures import memory_series, phase_runs
from fnshard.plot.scales import time_unit
from fnshard.plot.text import blocks_of, join_alike, leaves_of


def size_of(path: Path) -> tuple[int, int]:
    """Return the size of a PNG, in pixels."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def coloured_share(path: Path) -> float:
    """Return which part of a picture is not grey, as text and axes are."""
    from matplotlib.image import imread

    pixels = imread(path)[..., :3]
    return float((pixels.max(-1) - pixels.min(-1) > 0.2).mean())


@pytest.fixture(scope="module")
def low() -> Any:
    return lower(*llama(3), ranks=4, remat="unit", policy={"optimizer_memory": "host"})


def slow_down(line: Timeline, times: float) -> Timeline:
    """Return the timeline of a step that takes so many times as long."""
    spans = [replace(s, start=s.start * times, end=s.end * times) for s in line.spans]
    busy = {lane: seconds * times for lane, seconds in line.busy_seconds.items()}
    return replace(line, spans=tuple(spans), step_seconds=line.step_seconds * times, busy_seconds=busy)


def by_hand() -> Timeline:
    """Write a timeline of 8 ms: a forward of four, a gather meanwhile, a backward of three after a gap."""
    spans = (
        Span(0, "communication", 0.0, 0.002, "gather", "a", "forward"),
        Span(1, "compute", 0.0, 0.004, "run", "a", "forward"),
        Span(2, "compute", 0.005, 0.008, "run", "a", "backward"),
    )
    busy = {"compute": 0.007, "communication": 0.002, "transfer": 0.0}
    return Timeline("h100", 0.008, spans, busy, 0.001, 0.0, 1e12, 1e12, 3.125e14, 4)


DRAW = {
    "memory": lambda low, path: fs.plot.memory(low, path),
    "memory_timeline": lambda low, path: fs.plot.memory(low.memory_timeline(), path),
    "timeline": lambda low, path: fs.plot.timeline(low.timeline(Hardware.named("h100")), path),
    "one_clock": lambda low, path: fs.plot.timeline(low.timeline(Hardware.named("cpu")), path),
    "predicted_and_measured": lambda low, path: fs.plot.timeline(
        line := low.timeline(Hardware.named("h100")), path, measured=slow_down(line, 1.5)
    ),
    "memory_limit": lambda low, path: fs.plot.memory(low, path, limit=2 * low.memory_analysis().peak_bytes),
}


@pytest.mark.parametrize("name", DRAW)
def test_a_picture_is_written(name: str, low: Any, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / f"{name}.png"
    assert DRAW[name](low, path) == path
    width, height = size_of(path)
    assert width > 600 and height > 150
    assert coloured_share(path) > 0.01  # a legend alone has less than half of that


def test_a_picture_is_a_vector_graphic_if_its_name_says_so(low: Any, tmp_path: Path) -> None:
    first, second = (fs.plot.memory(low, tmp_path / name) for name in ("a.svg", "b.svg"))
    assert "<svg" in first.read_text()[:2000] and first.read_bytes() == second.read_bytes()
    with raises(SpecError, leaves="'memory.pdf'", fix=".png or .svg"):
        fs.plot.memory(low, tmp_path / "memory.pdf")


def test_a_step_in_letters() -> None:
    shown = text.timeline(by_hand(), width=16).splitlines()
    assert shown == [
        "4 × h100, 8 ms a step, MFU 40%, compute waits 1 ms for communication",
        "compute       |FFFFFFFF··BBBBBB|",
        "communication |GGGG············|",
        "               0           8 ms",
        "F forward, B backward, G gather; small: less than half of the time, ·: nothing",
    ]


def test_a_lane_says_what_takes_most_of_each_part() -> None:
    spans = [("run", "forward", 0.0, 0.3), ("run", "backward", 0.3, 1.0), ("update", "update", 1.0, 1.2)]
    made = tuple(Span(0, "compute", a, b, verb, "u", phase) for verb, phase, a, b in spans)
    line = replace(by_hand(), spans=made, step_seconds=3.0, busy_seconds={"compute": 1.2})
    assert text.timeline(line, width=3).splitlines()[1] == "compute |Bu·|"


def test_memory_in_letters(low: Any) -> None:
    shown, analysis = text.memory(low, width=60, height=4).splitlines(), low.memory_analysis()
    assert shown[-1].endswith(f"line {analysis.at}: {analysis.line}")
    assert "forward" in shown[-2] and "backward" in shown[-2]
    chart = [line.partition("|")[2] for line in shown[:4]]
    assert "█" in chart[0] and max(map(len, chart)) <= 60  # the peak reaches the top
    assert text.memory({"lines": []}) == "nothing runs"


def test_phases_in_a_row() -> None:
    assert phase_runs(["forward", "backward", "update", "backward", "update"]) == [
        ("forward", 0, 1), ("backward", 1, 4), ("update", 4, 5)]  # fmt: skip
    assert phase_runs([]) == []


@pytest.mark.parametrize(("seconds", "unit"), [(30.0, "s"), (3.0, "ms"), (2e-5, "µs"), (0.0, "µs")])
def test_times_have_a_unit_that_shows_digits(seconds: float, unit: str) -> None:
    assert time_unit(seconds)[1] == unit


def test_what_is_on_the_host_is_not_drawn_as_device_memory(low: Any) -> None:
    lines, series = memory_series(low)
    got = low.memory_timeline()
    assert len(lines) == len(got.moments) and {line.split()[0] for line in lines} == {
        "forward",
        "backward",
        "update",
    }
    assert "host" not in series
    totals = [sum(values) for values in zip(*series.values(), strict=True)]
    assert totals == [m.bytes for m in got.moments]


def test_what_cannot_be_drawn_says_what_can(low: Any, tmp_path: Path) -> None:
    with raises(SpecError, leaves="Lowered", fix="lowered.timeline(hardware)"):
        fs.plot.timeline(low, tmp_path / "no.png")


def test_without_matplotlib_the_error_names_the_extra(
    low: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with raises(MissingExtraError, leaves="matplotlib", fix="pip install fnshard[plot]"):
        fs.plot.memory(low, tmp_path / "no.png")


def paper(**axes: int) -> fs.Mesh:
    return fs.make_mesh(**axes, abstract=True, device="cpu")


EIGHT, TWO = paper(shard=8), paper(a=2, b=3)
LAYOUTS = {
    "padding alone": (P("shard"), (3, 4), EIGHT, {"[0:1, 0:4]": [0], "padding": [3, 4, 5, 6, 7]}),
    "a scalar": (P(), (), EIGHT, {"[]": [*range(8)]}),
    "both axes on one dim": (P(("b", "a")), (13, 2), TWO, {"[0:3, 0:2]": [0], "[12:13, 0:2]": [2]}),
    "fused": (P(Fused("shard", 2)), (16, 1), EIGHT, {"[0:1, 0:1]": [0], "[8:9, 0:1]": [0]}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_and_the_ranks_that_hold_them(name: str) -> None:
    layout, shape, mesh, expected = LAYOUTS[name]
    assert expected.items() <= blocks_of(layout, shape, mesh).items()
    shown = text.leaf(layout, mesh, shape=shape)
    assert shown.splitlines()[0] == f"{list(shape)} on {mesh}" and max(map(len, shown.splitlines())) < 100


def test_a_large_mesh_is_written_in_short() -> None:
    shown = text.leaf(P("shard"), paper(shard=1024), shape=(128256, 8192)).splitlines()
    assert len(shown) < 50 and "1023" in shown[-1] and any("⋮" in line for line in shown)


def test_layouts_that_differ_have_lines_of_their_own() -> None:
    spec = fs.presets.zero1({"w": torch.ones(8, 4)}, EIGHT)["w"]
    assert "storage, gradient: P()\n" in text.leaf(spec, EIGHT)
    assert "optimizer: P('shard')\n" in text.leaf(spec, EIGHT)


def tree_of(layers: int) -> tuple[dict[str, Any], Any]:
    params = {"embed.weight": torch.empty(257, 8, device="meta")}
    for i in range(layers):
        params |= {
            f"layers.{i}.{n}": torch.empty(s, device="meta") for n, s in (("w", (8, 8)), ("norm", (8,)))
        }
    rules = [("*norm", LayoutSpec(P(), compute_dtype=torch.bfloat16)), ("*", LayoutSpec(P("shard")))]
    return params, rules


def test_bytes_of_a_tree_are_those_of_its_blocks() -> None:
    params, rules = tree_of(3)
    specs = fs.match_specs(params, rules)
    leaves = leaves_of(specs, EIGHT)
    assert sum(x.bytes for x in leaves) == 4 * sum(p.numel() for p in params.values())
    assert sum(x.mine for x in leaves) == 4 * (33 * 8 + 3 * (8 + 8))  # 257 rows on 8 ranks: 33
    rows = join_alike(leaves)
    assert [(x.path, x.count) for x in rows] == [
        ("embed.weight", 1), ("layers.*.w", 3), ("layers.*.norm", 3)]  # fmt: skip
    assert sum(x.bytes for x in rows) == sum(x.bytes for x in leaves)


def test_specs_by_hand_need_their_leaves() -> None:
    bare = {"w": LayoutSpec(P("shard"))}
    assert "1 leaf, 64 B" in text.tree(bare, EIGHT, params={"w": torch.ones(8, 2)})
    with raises(SpecError, leaves="P('shard')", fix="shape="):
        text.leaf(bare["w"], EIGHT)
    with raises(SpecError, leaves="specs['w']", fix="params="):
        text.tree(bare, EIGHT)


def test_a_leaf_that_a_tensor_axis_splits_shows_what_is_computed() -> None:
    spec = LayoutSpec(P("shard", "tensor"), compute=P(None, "tensor"))
    stored, computed = text.leaf(spec, paper(shard=2, tensor=2), shape=(4, 4)).split("compute: ")
    assert "[0:2, 0:2]  ranks 0\n" in stored
    assert "P(None, 'tensor')" in computed and "[0:4, 0:2]  ranks 0, 2\n" in computed


@pytest.mark.parametrize("layers", [0, 1, 60])
def test_a_tree_in_characters(layers: int) -> None:
    params, rules = tree_of(layers)
    shown = text.tree(fs.match_specs(params, rules[1:] if not layers else rules), EIGHT).splitlines()
    assert len(shown) == 1 + (1 if not layers else 3)
    assert shown[0].startswith(f"{1 + 2 * layers} lea")
    assert not layers or any("P() f32 → bf16" in line for line in shown)


@pytest.mark.parametrize(
    ("layout", "shape", "leaves", "fix"),
    [
        ({}, None, "dict", "one leaf of the spec tree"),
        (P("tensor"), (4,), "'tensor'", ()),
        (P(None, "shard"), (4,), ["2 dims", "the leaf [4] has 1"], ()),
    ],
)
def test_what_is_no_layout_is_refused(layout: Any, shape: Any, leaves: Any, fix: Any) -> None:
    with raises(SpecError, leaves=leaves, fix=fix):
        text.leaf(layout, EIGHT, shape=shape)
