"""Lowering a 70B model for 1024 ranks, and a 405B model for 16,384, on paper: CPU seconds and memory, in
a process of its own."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

BLOCKS, WIDTH, VOCAB = 80, 8192, 128256
MODELS = {  # blocks, width, hidden, heads, kv heads, vocabulary; tokens of a row; axes of the mesh
    **{f"70b, {n} blocks": ((n, WIDTH, 28672, 64, 8, VOCAB), 2048, {"shard": 1024}) for n in (16, BLOCKS)},
    **{
        f"405b, {blocks} blocks": (
            (blocks, 16384, 53248, 128, 8, VOCAB),
            131072,
            {"replicate": 8, "shard": 16, "tensor": 8, "context": 16},
        )
        for blocks in (4, 126)
    },
}
LIMIT_SECONDS, LIMIT_BYTES = 60.0, 4e9


def measure_apart(name: str) -> dict[str, float]:
    """Run `measure` in a process of its own, so that its peak of memory is that of the lowering."""
    command = [sys.executable, __file__, name]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert run.returncode == 0, run.stderr[-2000:]
    got = json.loads(run.stdout.splitlines()[-1])
    print(got)
    return got


@pytest.mark.long
def test_405b_on_16384_ranks_with_tensor_and_context_axes() -> None:
    got, few = measure_apart("405b, 126 blocks"), measure_apart("405b, 4 blocks")
    assert got["parameters"] > 405e9
    assert got["kernels"] == few["kernels"]
    assert got["seconds"] < 120
    assert got["grown_bytes"] < 6e9


@pytest.mark.long  # in the suite, `test_split` shows that any depth makes the same kernels
@pytest.mark.parametrize("blocks", [16, BLOCKS])
def test_70b_on_1024_ranks_from_a_meta_tree(blocks: int) -> None:
    """Lower a fifth of its blocks, and all of them."""
    got = measure_apart(f"70b, {blocks} blocks")
    assert got["parameters"] > 69e9 * blocks / BLOCKS
    assert got["process_group"] is False
    # The embedding, the first block, its successors, the last one's end, the final norm and the head.
    assert got["kernels"] <= 6
    assert got["segments"] == blocks + 3
    # Forward and backward; the head is still there, and the backward of an embedding reads no weight.
    assert got["gathers"] == 2 * (blocks + 3) - 2
    assert got["reduces"] == blocks + 3
    # Every parameter travels twice in bf16, those two once; up to 1% of padding.
    expected = 2 * 2 * got["parameters"] - 2 * 2 * VOCAB * WIDTH
    assert expected <= got["gathered_bytes"] <= 1.01 * expected
    assert got["seconds"] < LIMIT_SECONDS * blocks / BLOCKS
    assert got["grown_bytes"] < LIMIT_BYTES * blocks / BLOCKS


def measure(name: str) -> dict[str, float]:
    """Lower a model, and return what that took."""
    sizes, length, axes = MODELS[name]
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from toys import Llama

    import fnshard as fs

    torch.set_num_threads(1)
    with torch.device("meta"):
        model = Llama(*sizes).to(torch.bfloat16)
        tokens = torch.zeros(1, length, dtype=torch.int64)
    apply, params = fs.make_functional(model)

    def loss(params, tokens):
        logits = apply(params, tokens).float()  # [B, T, V]
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    before = _peak_bytes()
    start = time.process_time()
    mesh = fs.make_mesh(**axes, abstract=True, device="cpu")
    policy = {"reduce_dtype": torch.float32, "optimizer_dtype": torch.float32}
    specs = fs.presets.full_shard(params, mesh, tensor="tensor" if "tensor" in axes else None, **policy)
    lowered = fs.shard_step(loss, specs, mesh=mesh, optimizer=fs.optim.adamw(3e-4)).lower(params, tokens)
    lowered.as_text()
    seconds = time.process_time() - start
    counts, moved = lowered.schedule.counts(), lowered.comm_analysis()
    return {
        "seconds": seconds,
        "grown_bytes": _peak_bytes() - before,
        "parameters": sum(math.prod(v.shape) for v in params.values() if isinstance(v, nn.Parameter)),
        "kernels": len(lowered.kernels),
        "segments": len(lowered.segments.segments),
        "gathers": counts["gather"],
        "reduces": counts["reduce_scatter"],
        "gathered_bytes": moved["gather"]["bytes"],
        "process_group": dist.is_initialized(),
    }


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
    print(json.dumps(measure(sys.argv[1])))
