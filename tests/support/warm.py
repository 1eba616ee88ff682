"""Make Inductor's patterns once, before ranks are forked: otherwise each rank traces them anew."""

import os
from pathlib import Path

import torch
import tqdm
from torch._inductor.fx_passes import joint_graph, post_grad

# The server that imports this has found it by PYTHONPATH. Its ranks and commands are to have that of users.
first, *rest = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if first == str(Path(__file__).parent):
    os.environ.pop("PYTHONPATH")
    os.environ |= {"PYTHONPATH": os.pathsep.join(rest)} if rest else {}

tqdm.tqdm.monitor_interval = 0  # the patterns' progress bar starts no thread: a fork would leave it behind
joint_graph.lazy_init(torch.device("cpu"))
post_grad.lazy_init()
