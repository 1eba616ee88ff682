"""Wrong command lines: what each prints, and that it starts and leaves nothing."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from experiments.lib import launch
from experiments.lib.launch import Job, main


def split(line: str) -> list[str]:
    """Split a line as a shell does, with quotes around braces, brackets and calls."""
    return re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^\s{\[])+", line)


@pytest.fixture
def error_of(tmp_path, monkeypatch, capfd):
    """Return `error_of(job, *arguments)`, what a wrong command line prints; it starts and leaves nothing."""

    def run(command: Job, *arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
        monkeypatch.setattr(sys, "argv", [command.name, *arguments])
        monkeypatch.setattr(launch, "launch", lambda *_, **__: pytest.fail("ranks were started"))
        with pytest.raises(SystemExit, match=r"^2$"):
            main(command)
        shown = capfd.readouterr()
        assert shown.out == "" and list(tmp_path.iterdir()) == []
        assert shown.err.startswith("error: ") and shown.err.count("error: ") == 1
        assert not re.search("Traceback|Error executing|HYDRA", shown.err)
        return shown.err

    return run


def recipe_of(folder: Path, text: str) -> str:
    """Write the recipe `experiment=mine`, and return the value of --config-dir that finds it."""
    path = folder / "more" / "experiment" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(f"# @package _global_\n{text}")
    return str(path.parent.parent)
