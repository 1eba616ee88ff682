"""Inductor's CUDA code, run on CPU tensors by Triton's interpreter, against the graphs that it was made of.

Kernels, their configurations and their grids are Inductor's; what it calls of libraries runs on the CPU.
`python tests/support/interpreted.py float32` prints a line of JSON for each graph of a step.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

if __name__ == "__main__":  # before Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fnshard as fs
from experiments.bench.cuda import code_of, h100, updates
from fnshard.compiler.kernels import attention
from fnshard.runtime.executor.fused_update import update_graph

# Of CUDA's device library, which the interpreter does not know.
LIBDEVICE: Mapping[str, Callable[..., Any]] = {
    "rsqrt": lambda x: 1 / np.sqrt(x), "sqrt": np.sqrt, "tanh": np.tanh, "exp": np.exp, "exp2": np.exp2,
    "log": np.log, "log1p": np.log1p, "expm1": np.expm1, "pow": np.power, "isnan": np.isnan,
    "isinf": np.isinf, "mul_rn": np.multiply, "add_rn": np.add, "floor": np.floor, "nearbyint": np.rint,
    "abs": np.abs, "sin": np.sin, "cos": np.cos,
}  # fmt: skip


class _Libdevice:
    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*values: Any, **_: Any) -> Any:
            import triton.language as tl
            from triton.runtime.interpreter import TensorHandle

            out = LIBDEVICE[name](*[v.handle.data if isinstance(v, tl.tensor) else v for v in values])
            first = next(v for v in values if isinstance(v, tl.tensor))
            dtype = tl.int1 if out.dtype == np.bool_ else first.dtype
            return tl.tensor(TensorHandle(out, dtype), tl.block_type(dtype, first.shape))

        return call


class _Kernel:
    """One of Inductor's, in the first of its configurations."""

    def __init__(self, source: str):
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        scope = {"__file__": "kernel", "__name__": "kernel"}
        exec(source, scope)
        (self.tuned,) = [v for v in scope.values() if isinstance(v, CachingAutotuner)]
        scope["libdevice"] = _Libdevice()

    def run(self, *args: Any, **_: Any) -> None:
        from torch._inductor.runtime.triton_heuristics import GridExpr

        config = self.tuned.configs[0]
        names = [n for n in self.tuned.fn.arg_names if n not in config.kwargs]
        values = dict(zip(names, args, strict=False))
        grid = GridExpr.from_meta(self.tuned.inductor_meta, config).eval_slow({**values, **config.kwargs})
        self.tuned.fn[grid](**values, **config.kwargs)


def written(module: fx.GraphModule, is_backward: bool = False) -> Callable[[Sequence[Tensor]], Any]:
    """A kernel's graph as Inductor writes it for CUDA, for CPU tensors."""
    from torch._inductor.async_compile import AsyncCompile

    kernel = lambda _, name, source, device_str="": _Kernel(source)  # noqa: E731
    with h100(), mock.patch.object(AsyncCompile, "triton", kernel):
        scope: dict[str, Any] = {"__name__": "written"}
        exec(code_of(module, is_backward), scope)
    scope["get_raw_stream"] = lambda _: 0
    scope["empty_strided_cuda"] = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)

    def call(inputs: Sequence[Tensor]) -> Any:
        guard = mock.patch.multiple(torch.cuda, _DeviceGuard=lambda _: nullcontext(), set_device=mock.Mock())
        with guard:
            return scope["call"](list(inputs))

    return call


# ------------------------------------------------------------------ a step


class Model(nn.Module):
    """Of what transformers are made of; no width is a power of two."""

    def __init__(self, vocabulary: int = 37, width: int = 24):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.before, self.after = nn.RMSNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 5 * width), nn.Linear(5 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.after(x)), approximate="tanh"))


def graphs(dtype: torch.dtype) -> Iterator[tuple[str, bool, Callable[[], fx.GraphModule]]]:
    """Every kernel of a step forwards and backwards, and its distinct updates."""
    mesh = fs.make_mesh(shard=2, abstract=True, device="cuda")
    apply, params = fs.make_functional(Model())
    policy = {"storage_dtype": dtype, "compute_dtype": dtype, "optimizer_dtype": torch.float32}
    specs = fs.presets.full_shard(params, mesh, **policy)
    optimizer = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(3e-4))
    tokens = torch.zeros(2, 11, dtype=torch.int64)
    step = fs.shard_step(lambda p, x, y: apply(p, x, y), specs, mesh=mesh, optimizer=optimizer)
    with mock.patch.object(attention, "chosen", lambda *_: "math"):  # flash attention is a library's
        found = step.lower(params, tokens, tokens)
    for kernel in found.schedule.kernels.values():
        yield f"{kernel.name} forwards", False, kernel.forward
        if kernel.backward is not None:
            yield f"{kernel.name} backwards", True, kernel.backward
    for leaves, (paths, _) in updates(found).items():
        yield f"update of {paths}", False, update_graph(optimizer, paths, leaves, torch.device("cpu"))


def drawn(like: Tensor, draw: torch.Generator) -> Tensor:
    out = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    if like.is_floating_point():
        return out.copy_(torch.rand(like.shape, generator=draw) / 8 + 0.01)  # second moments are above 0
    return out.random_(0, 2 if like.dtype == torch.bool else 11, generator=draw)


def main(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    for name, is_backward, module in graphs(dtype):
        inputs = [drawn(n.meta["val"], draw) for n in module.graph.find_nodes(op="placeholder")]
        copies = [t.clone() for t in inputs]
        expected = [*module(*inputs), *inputs]  # an update writes to its inputs
        calls = sum(n.op == "call_function" for n in module.graph.nodes)
        found = [*written(module, is_backward)(copies), *copies]
        worst = 0.0
        for one, other in zip(expected, found, strict=True):
            if isinstance(one, Tensor) and one.numel():
                assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
                off = (one.double() - other.double()).abs().max() / one.double().abs().max().clamp(min=1e-6)
                worst = max(worst, float(off))
        print(json.dumps({"graph": name, "off": worst, "calls": calls}), flush=True)


if __name__ == "__main__":
    main(getattr(torch, sys.argv[1]))
