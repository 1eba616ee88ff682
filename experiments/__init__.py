"""The commands, `python -m experiments.NAME`, and below them what they are made of."""

import logging
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AS_RANK = "--as-rank"  # what a rank of a job is started with
# Messages that other packages log at every start, and that are of no use to whoever runs a command: by
# logger, a part of the message.
NOISE = {
    "torch.utils.cpp_extension": "No CUDA runtime is found",
    "torch.utils._pytree": "is an Enum subclass",
}
for _name, _part in NOISE.items():
    logging.getLogger(_name).addFilter(lambda record, part=_part: part not in record.getMessage())


def python_path() -> str:
    """Return the `PYTHONPATH` of a process that imports `experiments`, wherever it is started."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
