"""An editable install: scripts and editors in a folder that holds the clone find the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = """import fnshard as fs

mesh = fs.make_mesh(shard=1)
print(fs.__file__, mesh.size, fs.presets.full_shard)
"""


@pytest.mark.parametrize("command", [(sys.executable,), ("basedpyright", "--level", "error")])
def test_a_script_next_to_the_clone_finds_the_package(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "fnshard").symlink_to(ROOT)  # a folder without __init__.py, as the clone is
    (tmp_path / "train.py").write_text(SCRIPT)
    program = shutil.which(command[0])
    assert program is not None
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    python = ("--pythonpath", sys.executable) if "pyright" in command[0] else ()
    done = subprocess.run(
        [program, *command[1:], *python, "train.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
