"""Pictures: written, not empty, without a display; a clear error without matplotlib."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from toys import llama, lower

import fnshard as fs
from fnshard import Hardware
from fnshard.errors import MissingExtraError, SpecError
from fnshard.plot import memory_series, traffic_rows


def size_of(path: Path) -> tuple[int, int]:
    """Of a PNG, in pixels."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def colours_of(path: Path) -> int:
    from matplotlib.image import imread

    return len({tuple(pixel) for row in imread(path)[::3, ::3] for pixel in row})


@pytest.fixture(scope="module")
def low() -> Any:
    return lower(*llama(3), ranks=4, remat="unit", policy={"optimizer_memory": "host"})


DRAW = {
    "memory": lambda low, path: fs.plot.memory(low, path),
    "memory_timeline": lambda low, path: fs.plot.memory(low.memory_timeline(), path),
    "timeline": lambda low, path: fs.plot.timeline(low.timeline(Hardware.named("h100")), path),
    "one_clock": lambda low, path: fs.plot.timeline(low.timeline(Hardware.named("cpu")), path),
    "traffic": lambda low, path: fs.plot.traffic(low.comm_analysis(), path),
    "traffic_lowered": lambda low, path: fs.plot.traffic(low, path),
    "traffic_dict": lambda low, path: fs.plot.traffic({"gather": {"sent_bytes": 5, "count": 2}}, path),
}


@pytest.mark.parametrize("name", DRAW)
def test_a_picture_is_written(name: str, low: Any, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / f"{name}.png"
    assert DRAW[name](low, path) == path
    width, height = size_of(path)
    assert width > 600 and height > 150
    assert colours_of(path) > 3  # more than axes on white


def test_nothing_is_drawn_on_the_device_that_is_not_there(low: Any) -> None:
    phases, series = memory_series(low)
    got = low.memory_timeline()
    assert len(phases) == len(got.moments) and set(phases) == {"forward", "backward", "update"}
    assert "host" not in series
    totals = [sum(values) for values in zip(*series.values(), strict=True)]
    assert totals == [m.bytes for m in got.moments]


def test_traffic_is_what_a_rank_sends_and_transfers_are_apart(low: Any) -> None:
    comm, rows = low.comm_analysis(), traffic_rows(low)
    assert [name for name, _, _ in rows][-2:] in (["to_device", "to_host"], ["to_host", "to_device"])
    sizes = {name: size for name, size, _ in rows}
    assert (
        sum(size for name, size in sizes.items() if name in comm)
        == comm.sent_bytes
        < sum(comm[verb]["bytes"] for verb in comm)
    )
    assert (sizes["to_device"], sizes["to_host"]) == (comm.to_device_bytes, comm.to_host_bytes)
    assert {name: count for name, _, count in rows if name in comm} == {v: comm[v]["count"] for v in comm}


def test_what_cannot_be_drawn_says_what_can(low: Any, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"not Lowered(.|\n)*lowered.timeline\(hardware\)"):
        fs.plot.timeline(low, tmp_path / "no.png")
    with pytest.raises(SpecError, match=r"not int(.|\n)*lowered.comm_analysis\(\)"):
        fs.plot.traffic(3, tmp_path / "no.png")


def test_without_matplotlib_the_error_names_the_extra(
    low: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install fnshard\[plot\]"):
        fs.plot.traffic(low.comm_analysis(), tmp_path / "no.png")
