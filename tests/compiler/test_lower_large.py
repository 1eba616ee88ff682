"""Lowering a 70B model for 1024 ranks on paper: seconds and memory, measured in a process of its own."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path

BLOCKS, WIDTH, HIDDEN, HEADS, KV_HEADS, VOCAB, TOKENS = 80, 8192, 28672, 64, 8, 128256, 2048
RANKS = 1024
LIMIT_s, LIMIT_bytes = 60.0, 4e9


def test_70b_on_1024_ranks_from_a_meta_tree() -> None:
    run = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False, timeout=280)
    assert run.returncode == 0, run.stderr[-2000:]
    got = json.loads(run.stdout.splitlines()[-1])
    print(got)
    assert got["parameters"] > 69e9
    assert got["process_group"] is False
    # The embedding, the first block, its successors, the last one's end, the final norm and the head.
    assert got["kernels"] <= 6
    assert got["segments"] == BLOCKS + 3
    # Forward and backward; the head is still there, and the backward of an embedding reads no weight.
    assert got["gathers"] == 2 * (BLOCKS + 3) - 2
    assert got["reduces"] == BLOCKS + 3
    # Every parameter travels twice in bf16, those two once; up to 1% of padding.
    expected = 2 * 2 * got["parameters"] - 2 * 2 * VOCAB * WIDTH
    assert expected <= got["gathered_bytes"] <= 1.01 * expected
    assert got["seconds"] < LIMIT_s
    assert got["grown_bytes"] < LIMIT_bytes


def measure() -> dict[str, float]:
    """Lower it, and say what that took."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from toys import Llama

    import fnshard as fs

    torch.set_num_threads(1)
    with torch.device("meta"):
        model = Llama(BLOCKS, WIDTH, HIDDEN, HEADS, KV_HEADS, VOCAB).to(torch.bfloat16)
        tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    apply, params = fs.make_functional(model)

    def loss(params, tokens):
        logits = apply(params, tokens).float()  # [B, T, V]
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    before = _peak_bytes()
    start = time.perf_counter()
    mesh = fs.make_mesh(shard=RANKS, abstract=True, device="cpu")
    specs = fs.presets.full_shard(params, mesh, reduce_dtype=torch.float32, optimizer_dtype=torch.float32)
    lowered = fs.shard_step(loss, specs, mesh=mesh, optimizer=fs.optim.adamw(3e-4)).lower(params, tokens)
    lowered.as_text()
    seconds = time.perf_counter() - start
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
    print(json.dumps(measure()))
