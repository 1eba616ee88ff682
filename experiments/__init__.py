"""The commands, `python -m experiments.NAME`, and below them what they are made of."""

import gc
import logging
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AS_RANK = "--as-rank"  # what a rank of a job is started with
# Imports and traces free little: to look for what they might have freed takes a sixth of the start of a job.
# `lib.launch` and `lib.run` turn that on again.
if not {"experiments.train", "experiments.finetune"}.isdisjoint(sys.orig_argv):
    gc.disable()
# What other packages log at every start, and nobody who runs a command can use: by logger, a part of it.
NOISE = {
    "torch.utils.cpp_extension": "No CUDA runtime is found",
    "torch.utils._pytree": "is an Enum subclass",
}
for _name, _part in NOISE.items():
    logging.getLogger(_name).addFilter(lambda record, part=_part: part not in record.getMessage())


def python_path() -> str:
    """`PYTHONPATH` for a process that imports `experiments`, wherever it is started."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
