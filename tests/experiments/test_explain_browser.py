"""The report in a real browser: no error in the console, every picture there, no sideways scrolling."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from test_explain import config_of

from experiments.explain.page import page
from experiments.explain.paper import explain

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--disable-background-networking", "--allow-file-access-from-files", "--enable-logging=stderr",
    "--virtual-time-budget=20000", "--dump-dom",
)  # fmt: skip
# A page that shows the report in a frame of some width, and prints what is in it.
FRAME = """<iframe id="frame" src="{name}" style="width: {width}px; height: 900px; border: 0"></iframe>
<pre id="found"></pre>
<script>
frame.onload = () => {{
  const page = frame.contentDocument, all = (tag) => [...page.querySelectorAll(tag)];
  found.textContent = JSON.stringify({{
    title: page.querySelector("h1").textContent, heads: all("h2").map(head => head.textContent),
    images: all("img").map(image => [image.naturalWidth, image.clientWidth]),
    width: page.documentElement.scrollWidth,
    requests: frame.contentWindow.performance.getEntriesByType("resource").map(entry => entry.name),
  }});
}};
</script>"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(NAMES)} is here")


def opened(path: Path, width: int) -> tuple[dict[str, Any], list[str]]:
    """What a page holds in a frame of that width, and what the console says."""
    frame = path.with_name(f"frame-{width}.html")
    frame.write_text(FRAME.format(name=path.name, width=width), encoding="utf-8")
    profile = f"--user-data-dir={path.with_name('profile')}"
    done = subprocess.run(
        [BROWSER, *FLAGS, profile, frame.as_uri()], capture_output=True, text=True, timeout=60
    )
    found = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout + done.stderr
    return json.loads(unescape(found[1])), re.findall(r"CONSOLE.*", done.stderr)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    text = page(explain(config_of("mesh.shard=64")), "tiny full_shard", "model: tiny\n")
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("width", [1280, 400])
def test_the_report_opens(report: Path, width: int) -> None:
    found, console = opened(report, width)
    assert console == []
    assert found["title"] == "tiny full_shard on 64 × h100"
    heads = ["Summary", "Plan", "Layout", "Memory", "Timeline", "Traffic", "Schedule", "Configuration"]
    assert found["heads"] == heads
    assert len(found["images"]) == 2 and all(min(sizes) > 100 for sizes in found["images"])
    assert found["width"] <= width
    assert [url for url in found["requests"] if not url.startswith("data:")] == []


def test_the_test_sees_what_goes_wrong(tmp_path: Path) -> None:
    """A page with an error, a missing picture and a wide line: or the test above could not fail."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        '<h1>x</h1><img src="not_there.png"><div style="width: 2000px">x</div><script>nothing.there</script>'
    )
    found, console = opened(bad, 400)
    assert any("nothing is not defined" in line for line in console)
    assert found["images"][0][0] == 0 and found["width"] >= 2000
