"""Wrong command lines: what each prints, and that it starts and leaves nothing."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.cli import job, validation
from experiments.cli.command_spec import Job
from experiments.cli.main import main

CL = r"(?: \(command line\))?"


def split(line: str) -> list[str]:
    """As a shell does, with quotes around braces, brackets and calls."""
    return re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^\s{\[])+", line)


@pytest.fixture(scope="module")
def groups_looked_up_once() -> Iterator[None]:
    """The files of conf/ do not change here; folders of a test are looked up anew."""
    known, look_up = {}, validation.groups_of

    def groups_of(form, loader):
        key = (form.name, str(loader.get_search_path().get_path()))
        if key not in known:
            known[key] = look_up(form, loader)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "groups_of", groups_of)
        yield


@pytest.fixture
def error_of(groups_looked_up_once, tmp_path, monkeypatch, capfd):
    """`error_of(job, *arguments)`: what a wrong command line prints; it starts and leaves nothing."""

    def run(command: Job, *arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
        monkeypatch.setattr(sys, "argv", [command.name, *arguments])
        monkeypatch.setattr(job, "launch", lambda *_, **__: pytest.fail("ranks were started"))
        with pytest.raises(SystemExit, match=r"^2$"):
            main(command)
        shown = capfd.readouterr()
        assert shown.out == "" and list(tmp_path.iterdir()) == []
        return shown.err

    return run


def is_one_error(shown: str, message: str) -> None:
    assert re.search(message, shown, re.M), shown
    assert shown.startswith("error: ") and shown.count("error: ") == 1
    assert "Traceback" not in shown and "Error executing" not in shown and "HYDRA" not in shown


def recipe_of(folder: Path, text: str) -> str:
    """Write the recipe `experiment=mine`; the value of --config-dir that finds it."""
    path = folder / "more" / "experiment" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(f"# @package _global_\n{text}")
    return str(path.parent.parent)
