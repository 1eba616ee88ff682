"""The commands, `python -m experiments.NAME`, and below them what they are made of."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def python_path() -> str:
    """`PYTHONPATH` for a process that imports `experiments`, wherever it is started."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
