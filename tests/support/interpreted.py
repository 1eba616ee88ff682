"""Inductor's CUDA code, run on CPU tensors by Triton's interpreter, against the graphs that it was made of.

Kernels, their configurations and their grids are Inductor's; what it calls of libraries runs on the CPU.
The step is lowered on paper for CUDA, and its kernels' graphs are put on a fake CUDA device, after they are
differentiated: autograd asks the driver for a context where a fake CUDA tensor is differentiated.
`python tests/support/interpreted.py float32` prints a line of JSON for each graph of a step.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

if __name__ == "__main__":  # before Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fnshard as fs
from fnshard.compiler.kernels import attention_backends
from fnshard.compiler.kernels.inductor import compile_graph
from fnshard.compiler.kernels.segments import Way
from fnshard.compiler.schedule.instructions import Update
from fnshard.compiler.schedule.ir import Schedule
from fnshard.layout.partition import block_shape
from fnshard.runtime.executor.compiled_update import LeafForm, form_of, trace_kernel

OPTIONS = {"compile_threads": 1, "force_disable_caches": True}

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
    """A kernel of Inductor's, in the first of its configurations."""

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


# ------------------------------------------------------------------ Inductor without a device


@contextmanager
def h100() -> Iterator[None]:
    """Let Inductor and Triton believe that there is an H100."""
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config as inductor
    from torch._inductor.runtime import triton_helpers
    from torch._subclasses import fake_tensor
    from triton.backends.compiler import GPUTarget

    props = SimpleNamespace(
        name="NVIDIA H100", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132, warp_size=32,
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=232448, shared_memory_per_block=49152, L2_cache_size=50 << 20,
    )  # fmt: skip
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": (9, 0),
        "get_device_properties": props, "_lazy_init": None,
        "set_device": None, "_exchange_device": 0, "_maybe_exchange_device": 0,
        "get_rng_state": torch.empty(0), "set_rng_state": None,
    }  # fmt: skip
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
        get_current_stream=lambda *_: 0, get_device_capability=lambda *_: (9, 0),
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )  # fmt: skip
    with ExitStack() as stack:
        for name, answer in answers.items():
            says = lambda *_, answer=answer: answer  # noqa: E731
            for place in (torch.cuda, CudaInterface, CudaInterface.Worker):  # some took their own copies
                if hasattr(place, name):
                    stack.enter_context(mock.patch.object(place, name, staticmethod(says)))
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", lambda *_: None))
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        stack.enter_context(inductor.patch(use_static_cuda_launcher=False))  # it hides binaries
        triton.runtime.driver.set_active(driver)
        yield


def on_cuda(module: Any) -> Any:
    """Put a kernel's graph, its inputs and what it makes on a fake CUDA device."""
    from torch.fx.node import map_aggregate
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    device, mode = torch.device("cuda", 0), torch._subclasses.FakeTensorMode()
    for node in module.graph.nodes:
        node.args, node.kwargs = map_aggregate(
            (node.args, node.kwargs), lambda value: device if isinstance(value, torch.device) else value
        )
    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with mode:
        fakes = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=device) for v in values]
    FakeTensorProp(module, mode).propagate_dont_convert_inputs(*fakes)
    module.recompile()
    return module


def code_of(module: Any, is_backward: bool) -> str:
    """Return the code that Inductor writes for a graph; "" if there is nothing to compile."""
    from torch._inductor.graph import GraphLowering

    written: list[str] = []

    def stop(graph: Any) -> Any:
        written.append(graph.codegen()[0].value)
        raise InterruptedError  # before it is loaded, which takes a driver

    with mock.patch.object(GraphLowering, "compile_to_module", stop):
        try:
            compile_graph(on_cuda(module), backend="inductor", options=OPTIONS, is_backward=is_backward)
        except Exception:
            if not written:
                raise
    return "".join(written)


def written(module: fx.GraphModule, is_backward: bool = False) -> Callable[[Sequence[Tensor]], Any]:
    """Return a kernel's graph as Inductor writes it for CUDA, as a function of CPU tensors."""
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
    """A model of all that transformers are made of; no width is a power of two."""

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


def updates(schedule: Schedule) -> dict[tuple[LeafForm, ...], tuple[str, ...]]:
    """Return the distinct compiled updates of a step, and the paths of the first unit that has each."""
    out: dict[tuple[LeafForm, ...], tuple[str, ...]] = {}
    for line in schedule.instructions:
        if not isinstance(line, Update):
            continue
        leaves = []
        for path in line.paths:
            spec, family = schedule.specs[path], schedule.families[path]
            block = block_shape(spec.shape, spec.optimizer, schedule.mesh)
            dtypes = schedule.buckets[line.bucket].dtype, spec.optimizer_dtype, spec.storage_dtype
            kinds = [*((block, dtype) for dtype in dtypes), *family.blocks.values()]
            forms = tuple(form_of(torch.empty(shape, dtype=d, device="meta")) for shape, d in kinds)
            leaves.append(LeafForm(family, True, forms))
        out.setdefault(tuple(leaves), line.paths)
    return out


def graphs(dtype: torch.dtype) -> Iterator[tuple[str, bool, fx.GraphModule]]:
    """Yield every kernel of a step forwards and backwards, and its distinct updates."""
    mesh = fs.make_mesh(shard=2, abstract=True, device="cuda")
    apply, params = fs.make_functional(Model())
    policy = {"storage_dtype": dtype, "compute_dtype": dtype, "optimizer_dtype": torch.float32}
    specs = fs.presets.full_shard(params, mesh, **policy)
    optimizer = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(3e-4))
    tokens = torch.zeros(2, 11, dtype=torch.int64)
    step = fs.shard_step(lambda p, x, y: apply(p, x, y), specs, mesh=mesh, optimizer=optimizer)
    with mock.patch.object(
        attention_backends, "choose_hopper_kernel", lambda *_: "math"
    ):  # flash attention is a library's
        found = step.lower(params, tokens, tokens)
    yield from graphs_of(found.schedule)


def graphs_of(schedule: Schedule) -> Iterator[tuple[str, bool, fx.GraphModule]]:
    """Yield every kernel of a schedule forwards and backwards, and its distinct updates."""
    for kernel in schedule.kernels.values():
        for way, module in kernel.modules.items():
            yield f"{kernel.name} {way}", way is not Way.FORWARD, module
    for leaves, paths in updates(schedule).items():
        yield f"update of {paths}", False, trace_kernel(leaves, torch.device("cpu"))


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
                worst = max(worst, float(off.nan_to_num(nan=torch.inf)))
        print(json.dumps({"graph": name, "off": worst, "calls": calls}), flush=True)


if __name__ == "__main__":
    main(getattr(torch, sys.argv[1]))
