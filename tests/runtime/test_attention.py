"""Attention on CUDA: the kernel that a step names, and masks that cuDNN must not see."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import fnshard as fs
from experiments.lib import record
from fnshard.analysis.workspace import workspace_bytes
from fnshard.step import lowered

CUDA = fs.make_mesh(shard=2, device="cuda", abstract=True)


# ------------------------------------------------------------------ attention
def attending(dtype: torch.dtype, *, length: int, head: int, mask: bool) -> lowered.Lowered:
    """Lower two layers of attention for CUDA."""
    shown = torch.rand(length, length) > 0.1 if mask else None
    params = {f"l.{n}.w": torch.ones(2 * head, 2 * head) for n in range(2)}

    def loss(p, x):
        for weight in p.values():
            q = (x @ weight).unflatten(-1, (2, head)).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, q, q, None if shown is None else shown.to(x.device))
            x = x + y.transpose(1, 2).flatten(2)
        return x.sum()

    specs = fs.presets.full_shard(params, CUDA, compute_dtype=dtype, storage_dtype=dtype)
    step = fs.shard_step(loss, specs, mesh=CUDA)
    return step.lower(params, torch.ones(4, length, 2 * head, dtype=dtype))


@pytest.mark.parametrize(
    ("dtype", "length", "head", "mask", "kernel"),
    [
        (torch.bfloat16, 128, 64, False, "cudnn"),
        (torch.bfloat16, 128, 64, True, "cudnn"),
        (torch.bfloat16, 64, 64, True, "efficient"),  # of cuDNN the query's gradient would be NaN
        (torch.bfloat16, 64, 64, False, "cudnn"),
        (torch.bfloat16, 128, 132, False, "flash"),
        (torch.float32, 128, 64, False, "efficient"),
        (torch.float64, 128, 64, False, "math"),
    ],
)
def test_steps_for_cuda_attend_as_cuda_does(dtype, length, head, mask, kernel):
    found = attending(dtype, length=length, head=head, mask=mask)
    assert found.attention == {kernel: 2} == record.StepWork.of(found, None).attention
    assert f"2 {kernel} attentions" in repr(found)
    graphs = [k.backward.graph for k in found.kernels.values()]
    backward = [n for graph in graphs for n in graph.nodes if "attention" in str(n.target)]
    assert bool(backward) == (kernel != "math")
    for node in backward:
        args = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        assert workspace_bytes(node.target, *args, None, "cuda") >= 4 * 4 * 2 * length
    assert found.memory_analysis().peak_bytes > 0 and found.timeline("h100").step_seconds > 0
