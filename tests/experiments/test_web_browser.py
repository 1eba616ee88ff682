"""The page in a real browser: a run is started, watched, left alone, stopped, resumed and compared.

Needs NiceGUI (extra `web`), playwright, and Chromium as `chromium` on the path.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from runs import SMALL, leave_run

from experiments import python_path
from experiments.web.runs import Runs

pytest.importorskip("nicegui")
playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WAIT_S = 600  # for what takes seconds on a quiet machine
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]
TINY = " ".join([*SMALL, "mesh.shard=1", "run.save_every=0", "run.held_out_every=5"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """Yield the page's folder, with a run that has ended."""
    folder = tmp_path_factory.mktemp("page").resolve()
    leave_run(folder / "outputs" / "before", "run.seed=1", held_out_loss=2.5, loss=4.6)
    yield folder
    runs = Runs(folder)
    for view in runs.views():  # left at work by a test that failed
        if view.is_at_work:
            runs.stop(view)


@pytest.fixture(scope="module")
def address(folder) -> Iterator[str]:
    """Yield a page that is served by a process of its own, as a user starts it."""
    process = start_page(folder)
    try:
        yield read_address(process)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def start_page(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.web", "port=0", *arguments], cwd=folder, text=True,
        env={**os.environ, "PYTHONPATH": python_path()}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def read_address(process: subprocess.Popen[str]) -> str:
    """Return the address that the first line prints."""
    line = process.stdout.readline()
    (found,) = re.findall(r"http://127\.0\.0\.1:\d+/\S+/", line)
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser, address) -> Iterator[playwright.Page]:
    """Yield the page, opened by a browser that may ask nobody else."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    context.set_default_timeout(WAIT_S * 1000)
    playwright.expect.set_options(timeout=WAIT_S * 1000)
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("websocket", lambda opened: asked.append(opened.url))
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(address)
    yield page
    context.close()
    assert errors == []
    port = urlsplit(address).netloc
    assert len(asked) > 10 and {urlsplit(url).netloc for url in asked if url[:5] != "data:"} == {port}


def expect_text(page, mark: str, text: str) -> None:
    playwright.expect(page.get_by_test_id(mark)).to_contain_text(text)


def choose_run(page, name: str) -> None:
    """Choose a run in the table, by its tick."""
    page.get_by_role("tab", name="runs").click()
    page.locator("tr", has_text=name).get_by_role("checkbox").click()


def read_newest_step(folder: Path) -> int:
    """Return the newest step of a run's metrics."""
    try:
        return max(json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines())
    except (OSError, ValueError):
        return 0


def wait_for_step(folder: Path, step: int) -> None:
    until = time.monotonic() + WAIT_S
    while read_newest_step(folder) < step:
        assert time.monotonic() < until, f"step {read_newest_step(folder)} of {step}"
        time.sleep(0.1)


# The tests below go on with each other's runs, in this order.


def test_a_form_says_what_is_wrong_and_what_is_predicted(page):
    expect_text(page, "verdict", "fits")
    expect_text(page, "time", "600 steps")
    page.get_by_test_id("run.steps").fill("many")
    playwright.expect(page.locator(".wrong").first).to_contain_text("run.steps=many")
    playwright.expect(page.get_by_test_id("start")).to_be_disabled()
    page.get_by_test_id("run.steps").fill("1000")
    expect_text(page, "time", "1,000 steps")
    playwright.expect(page.get_by_test_id("start")).to_be_enabled()
    # One layer that needs more than there is.
    page.get_by_test_id("more").fill("model.layers=1 model.width=16384 model.heads=128 model.kv_heads=128")
    expect_text(page, "verdict", "does not fit")


def test_a_run_is_started_and_goes_on_without_its_browser(page, folder):
    page.get_by_test_id("more").fill(TINY)
    page.get_by_test_id("run.steps").fill("100000")
    page.get_by_test_id("name").fill("mine")
    command = page.locator(".command").first
    for part in ("run.steps=100000", "hydra.run.dir=outputs/mine", "run.backend=eager"):
        playwright.expect(command).to_contain_text(part)
    page.get_by_test_id("start").click()
    expect_text(page, "status", "outputs/mine: running")
    playwright.expect(page.get_by_test_id("curve").locator("canvas")).to_be_visible()
    page.context.close()  # the browser goes away
    wait_for_step(folder / "outputs" / "mine", read_newest_step(folder / "outputs" / "mine") + 5)


def test_it_is_found_again_stopped_and_resumed(page, folder):
    run = folder / "outputs" / "mine"
    choose_run(page, "outputs/mine")
    expect_text(page, "status", "running")
    page.get_by_test_id("stop").click()
    expect_text(page, "status", "stopped")
    saved = json.loads((run / "result.json").read_text())
    assert saved["status"] == "stopped" and (run / "checkpoints" / str(saved["step"])).is_dir()
    page.get_by_test_id("resume").click()
    expect_text(page, "status", "running")
    wait_for_step(run, saved["step"] + 3)
    page.get_by_test_id("stop").click()
    expect_text(page, "status", "stopped")
    assert json.loads((run / "result.json").read_text())["step"] > saved["step"]


def test_runs_are_compared_and_settings_are_used_again(page):
    choose_run(page, "outputs/mine")
    page.get_by_test_id("reuse").click()
    playwright.expect(page.get_by_test_id("run.steps")).to_have_value("100000")
    choose_run(page, "outputs/before")
    for text in ("mine", "before", "stopped", "run.steps=100000"):
        expect_text(page, "ranking", text)
    playwright.expect(page.get_by_test_id("comparison").locator("canvas")).to_be_visible()
    playwright.expect(page.locator(".command", has_text="experiments.compare")).to_be_visible()


def test_other_paths_are_not_found_and_a_folder_has_one_page(folder, address):
    parts = urlsplit(address)
    for path in ("/", "/x/", parts.path[:-2] + "/"):  # the last one lacks a letter of the token
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"http://{parts.netloc}{path}")
    second = start_page(folder)
    out, error = second.communicate(timeout=WAIT_S)
    assert second.returncode == 2 and out == ""
    assert error.startswith("error: another page is at work") and "Traceback" not in error


def test_a_command_that_is_refused_is_shown_with_its_error(page, folder):
    """The form knows nothing of files: what the command finds is on the page."""
    page.get_by_test_id("more").fill("data.root=nowhere mesh.shard=1")
    page.get_by_test_id("name").fill("refused")
    playwright.expect(page.locator(".command").first).to_contain_text("data.root=nowhere")
    page.get_by_test_id("start").click()
    expect_text(page, "status", "outputs/refused: failed")
    expect_text(page, "log", "nowhere")
    assert not (folder / "outputs" / "refused").exists()
