"""An editable install: scripts and editors in a folder that holds the clone find the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCRIPT, _ = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.mark.long  # one trains, and a type checker reads all of torch
@pytest.mark.parametrize("command", [(sys.executable,), ("basedpyright", "--level", "error")])
def test_the_script_of_the_readme_runs_next_to_the_clone(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "fnshard").symlink_to(ROOT)  # a folder without __init__.py, as the clone is
    (tmp_path / "train.py").write_text(SCRIPT.replace("epochs=5", "epochs=1"))
    program = shutil.which(command[0])
    assert program is not None
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    python = ("--pythonpath", sys.executable) if "pyright" in command[0] else ()
    done = subprocess.run(
        [program, *command[1:], *python, "train.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "error" not in done.stdout.replace("0 errors", "")
