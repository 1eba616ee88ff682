"""The report in a real browser: no console error, no request to anywhere, every picture there, no sideways
scrolling on a phone."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_explain import config_of

from experiments.explain.page import page
from experiments.explain.paper import explain

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)  # fmt: skip
SECONDS = 30.0

pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(NAMES)} is here")


class Tab:
    """One page of a browser that is spoken to over its debugging pipe: JSON, a NUL after each message."""

    def __init__(self, profile: Path):
        commands, answers = os.pipe(), os.pipe()
        # The browser reads from 3 and writes to 4; none of ours may be one of these.
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (commands[0], answers[1])]

        def become() -> None:
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self.process = subprocess.Popen(
            [BROWSER, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=become, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for fd in (*ends, commands[0], answers[1]):
            os.close(fd)
        self.write, self.read = commands[1], answers[0]
        os.set_blocking(self.read, False)
        self.rest, self.number, self.session = b"", 0, None
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events on the way are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda message: message.get("id") == self.number)
        assert "error" not in answer, answer
        return answer["result"]

    def wait_for(self, event: str) -> None:
        """Wait until that event came."""
        if not any(message["method"] == event for message in self.events):
            self._until(lambda message: message.get("method") == event)

    def value(self, script: str) -> Any:
        """Of an expression."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def _until(self, wanted: Any) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            message, nul, rest = self.rest.partition(b"\0")
            if not nul:
                self._more()
                continue
            self.rest, message = rest, json.loads(message)
            if "method" in message:
                self.events.append(message)
            if wanted(message):
                return message
        raise AssertionError(f"the browser said nothing for {SECONDS:g} s (exit code {self.process.poll()})")

    def _more(self) -> None:
        if select.select([self.read], [], [], 0.2)[0]:
            more = os.read(self.read, 1 << 20)
            assert more, f"the browser closed its pipe (exit code {self.process.poll()})"
            self.rest += more

    def close(self) -> None:
        """End the browser."""
        os.close(self.write)  # which ends it
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.read)

    def show(self, path: Path, width: int) -> None:
        """Open a file in a window of that width."""
        self.events.clear()
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.ask("Emulation.setDeviceMetricsOverride", **metrics)
        self.ask("Page.navigate", url=path.as_uri())
        self.wait_for("Page.loadEventFired")
        self.value("Promise.all([...document.images].map(i => i.decode())).then(() => 1)")

    def photograph(self, path: Path) -> None:
        """The whole page, as a PNG."""
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[Any]:
        """Errors and warnings of the console, exceptions, entries of the log."""
        named = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [event["params"] for event in self.events if event["method"] in named]

    def requests(self) -> list[str]:
        """Addresses that were requested, but for what stands in the page itself."""
        urls = [
            e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in urls if not url.startswith("data:")]


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    made = Tab(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    text = page(explain(config_of("mesh.shard=64")), "tiny full_shard", "model: tiny\n")
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("width", [1280, 400])
def test_the_report_opens(tab: Tab, report: Path, width: int) -> None:
    tab.show(report, width)
    assert tab.complaints() == []
    assert tab.requests() == [report.as_uri()]
    assert tab.value("document.querySelector('h1').textContent") == "tiny full_shard on 64 × h100"
    wanted = ["Summary", "Plan", "Layout", "Memory", "Timeline", "Traffic", "Schedule", "Configuration"]
    heads = tab.value("[...document.querySelectorAll('h2')].map(h => h.textContent)")
    assert heads == wanted
    sizes = tab.value("[...document.images].map(i => [i.naturalWidth, i.clientWidth])")
    assert len(sizes) == 2 and all(natural > 100 and shown > 100 for natural, shown in sizes)
    assert tab.value("document.documentElement.scrollWidth") <= width
    assert tab.value("document.querySelector('details').open") is False
    tab.photograph(report.with_name(f"{width}.png"))
    assert report.with_name(f"{width}.png").stat().st_size > 20_000


def test_the_test_sees_what_goes_wrong(tab: Tab, tmp_path: Path) -> None:
    """A page that complains and asks: or the test above could not fail."""
    bad = tmp_path / "bad.html"
    bad.write_text('<h1>x</h1><img src="not_there.png"><script>console.error("no"); nothing.there</script>')
    tab.events.clear()
    tab.ask("Page.navigate", url=bad.as_uri())
    tab.wait_for("Page.loadEventFired")
    assert any(url.endswith("not_there.png") for url in tab.requests())
    complaints = json.dumps(tab.complaints())
    assert (
        "nothing is not defined" in complaints
        and '"value": "no"' in complaints
        and "ERR_FILE_NOT_FOUND" in complaints
    )
