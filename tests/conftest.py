"""What all tests share: one thread a process, and warm pools of real ranks."""

import torch
from ranks import ranks  # noqa: F401  (a fixture)

torch.set_num_threads(1)
