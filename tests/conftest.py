"""What all tests share: one thread a process, and warm pools of real ranks."""

import os
import tempfile

import pytest
import torch
from commands import Warm
from kernels import remember_kernels
from ranks import ranks  # noqa: F401  (a fixture)
from saved_states import restoring, roots, short_blocks  # noqa: F401  (fixtures)

CACHE = tempfile.TemporaryDirectory(prefix="fnshard-tests-")
os.environ["XDG_CACHE_HOME"] = CACHE.name  # jobs find what others of this session compiled, and nothing else
torch.set_num_threads(1)
remember_kernels()


@pytest.fixture(scope="session")
def warm():
    """What starts programs without importing torch anew."""
    server = Warm()
    yield server
    server.close()
