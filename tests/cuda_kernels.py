"""A step's CUDA kernels, compiled where there is no GPU: `python tests/cuda_kernels.py FOLDER`, by hand.

Triton keeps binaries by content: the kernel's text, its settings, the kind of GPU, and Triton itself. Copy
FOLDER to `KERNELS` on a machine with the same Python, PyTorch and Triton, and set TRITON_CACHE_DIR to it, as
`experiments/bench/bare.sh` does: Triton writes absolute paths into its cache. The kernels are those of
`full_shard` with AdamW at three sizes that `python -m experiments.bench case=gpu` runs: a small one, and the
races of 2 and of 8 rows. All others are compiled on that machine.

Needs Triton, and takes minutes on one core.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":  # before imports, and before Triton reads its settings
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent / "support")]
    os.environ |= {"TRITON_CACHE_DIR": "/tmp/fnshard-kernels", "TRITON_STORE_BINARY_ONLY": "1"}

import torch
from interpreted import code_of, graphs_of, h100

import fnshard as fs
from experiments.bench.config import CUDA, BenchConfig
from experiments.bench.contenders import ADAMW
from experiments.lib.decoder import Decoder, loss_function
from fnshard.compiler.schedule.ir import Schedule

KERNELS = Path("/tmp/fnshard-kernels")
# What differs from `CUDA`: in the smallest model, in the race of 2 rows, and in that of 8.
SIZES = ({"size": "tiny", "length": 256}, {}, {"rows": 8})


def lower_on_paper(config: BenchConfig) -> Schedule:
    """Lower the step of `full_shard` for a GPU that is not there."""
    mesh = fs.make_mesh(shard=1, abstract=True, device="cuda")
    with torch.device("meta"):
        model = Decoder(replace(config.model, context=max(config.length, config.model.context)))
    loss_fn, params = loss_function(model)
    dtypes = {"compute_dtype": config.compute_dtype, "reduce_dtype": config.reduce_dtype}
    specs = fs.presets.full_shard(
        params, mesh, storage_dtype=config.compute_dtype, optimizer_dtype=torch.float32, **dtypes
    )
    step = fs.shard_step(loss_fn, specs, mesh=mesh, optimizer=fs.optim.adamw(**ADAMW))
    tokens = torch.zeros(config.rows, config.length, dtype=torch.int64)
    return step.lower(params, tokens, tokens).schedule


def compile_kernels(code: str) -> Iterator[Any]:
    """Compile and yield the Triton kernels of a module that Inductor wrote, in all their configurations."""
    from torch._inductor.async_compile import AsyncCompile, _load_triton_kernel_from_source

    kernels: list[Any] = []

    def collect(self: Any, name: str, source: str, device_str: str = "cuda") -> None:
        kernels.append(_load_triton_kernel_from_source(name, source))

    with mock.patch.object(AsyncCompile, "triton", collect):
        exec(code, {"__name__": "written"})
    for kernel in kernels:
        kernel.precompile(warm_cache_only=True)  # without loading it, which takes a GPU
        yield kernel


def main(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"{folder} has something in it, which would be copied along: name a new folder.")
    shutil.rmtree(KERNELS, ignore_errors=True)
    began, count = time.monotonic(), 0
    for size in SIZES:
        config = BenchConfig(case="gpu", device="cuda", **{**CUDA, **size})
        for name, is_backward, module in graphs_of(lower_on_paper(config)):
            with h100():
                code = code_of(module, is_backward)
                count += sum(1 for _ in compile_kernels(code)) if code else 0
            print(f"{time.monotonic() - began:.0f} s, {count} kernels: {size} {name}", flush=True)
    shutil.copytree(KERNELS, folder, dirs_exist_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
