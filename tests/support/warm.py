"""Make Inductor's patterns once, before ranks are forked: otherwise each rank traces them anew."""

import torch
import tqdm
from torch._inductor.fx_passes import joint_graph, post_grad

tqdm.tqdm.monitor_interval = 0  # the patterns' progress bar starts no thread: a fork would leave it behind
joint_graph.lazy_init(torch.device("cpu"))
post_grad.lazy_init()
