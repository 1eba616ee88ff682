"""The case `cuda`: a step's CUDA code without a GPU.

In an environment with a build of torch for CUDA, the step is lowered on paper for CUDA, its kernels' graphs
are put on a fake CUDA device, Inductor writes their code, and Triton compiles that for sm_90.

What stands in the way of more: autograd asks the driver for a context where a fake CUDA tensor is
differentiated, so kernels are differentiated on the CPU and put on CUDA then; nothing is loaded or run, and
products that Inductor would choose by trying them are cuBLAS's.
"""

from __future__ import annotations

import importlib.util
import math
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

import fnshard as fs
from experiments.bench.config import BenchConfig
from experiments.bench.measure import Result, say
from experiments.configs.checks import ConfigError
from experiments.training.decoder import Decoder, loss_function
from fnshard.compiler.kernels.inductor import compile_graph
from fnshard.compiler.schedule.instructions import Run, Update
from fnshard.layout.partition import block_shape
from fnshard.runtime.executor.fused_update import Leaf, form_of, update_graph

TRITON = re.compile(r"(?ms)^(\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str")
CALLS = {
    "triton": r"\b(triton_\w+)\.run\(",
    "products": r"\b(extern_kernels\.\w+)\(",
    "other ops": r"= (torch\.ops\.\w+\.\w+)",
    # What a reduction along both dims leaves to PyTorch: the sum of its parts, and a cast of that.
    "sums": r"\]\.view\([^=]*?\)\.\w+\(dim=0\)|(?<=\(dim=0\))(?:\.view\([^=]*?\))?\.to\(",
}
HOST = re.compile(r"\.item\(\)|\.cpu\(\)|empty_strided_cpu\(|device='cpu'|device=cpu")
OPTIONS = {"compile_threads": 1, "force_disable_caches": True}


def run(config: BenchConfig, folder: Path) -> Result:
    """What CUDA code has a step: launches, bytes of updates, and anything on the host?"""
    if torch.version.cuda is None:
        raise ConfigError("case=cuda: needs a build of torch for CUDA, with Triton; a GPU it needs not.")
    found = lowered(config)
    runs = Counter((i.kernel, i.backward) for i in found.schedule.instructions if isinstance(i, Run))
    graphs = []
    for (name, backward), times in runs.items():
        kernel = found.schedule.kernels[name]
        graphs.append((f"{name}.{'bwd' if backward else 'fwd'}", times, backward, 0,
                       kernel.backward if backward else kernel.forward))  # fmt: skip
    for leaves, (paths, times) in updates(found).items():
        graph = update_graph(found.optimizer, paths, leaves, torch.device("cpu"))
        parameters = sum(math.prod(leaf.tensors_like[0][0]) for leaf in leaves)
        graphs.append((f"update of {len(leaves)} leaves", times, False, parameters, graph))
    rows, host, binaries, totals = [["", "times", *CALLS]], [], {}, Counter()
    with h100(), tempfile.TemporaryDirectory() as place:
        for label, times, backward, parameters, graph in graphs:
            code = code_of(graph, backward)
            body = code[code.find("def call(") :].split("def get_args")[0]
            counts = {kind: len(re.findall(pattern, body)) for kind, pattern in CALLS.items()}
            rows.append([label, f"{times}", *map(str, counts.values())])
            say(", ".join(rows[-1]))
            totals.update({kind: times * count for kind, count in counts.items()})
            totals.update(parameters=times * parameters)
            totals.update(bytes=times * bytes_of(code, body) if parameters else 0)
            host += [
                f"on the host: {label}: {line.strip()}" for line in body.splitlines() if HOST.search(line)
            ]
            if config.triton:
                binaries |= {n: assemble(n, text, Path(place)) for n, text in TRITON.findall(code)}
    rows.append(["a step", "", *(f"{totals[kind]}" for kind in CALLS)])
    notes = ["", f"attention: {found.attention}", f"assembled for sm_90: {len(binaries)} kernels"]
    notes += [f"bytes of updates for a parameter: {totals['bytes'] / totals['parameters']:.2f}", *host]
    return Result(rows, notes, {"bytes_of_binaries": sum(binaries.values())}, failed=bool(host))


def lowered(config: BenchConfig) -> Any:
    """The step on paper: bf16 with fp32 masters, clipped, AdamW."""
    with torch.device("meta"):
        loss_fn, params = loss_function(Decoder(config.model))
        tokens = torch.zeros(config.rows, config.length, dtype=torch.int64)
    mesh = fs.make_mesh(shard=config.ranks, abstract=True, device="cuda")
    dtypes = {"storage_dtype": torch.bfloat16, "optimizer_dtype": torch.float32}
    specs = fs.presets.full_shard(params, mesh, compute_dtype=torch.bfloat16, **dtypes)
    optimizer = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(3e-4))
    return fs.shard_step(loss_fn, specs, mesh=mesh, optimizer=optimizer).lower(params, tokens, tokens)


def updates(found: Any) -> dict[tuple[Leaf, ...], tuple[tuple[str, ...], int]]:
    """The distinct compiled updates of a step: paths of the first unit that has one, and how many have it."""
    schedule, optimizer, out = found.schedule, found.optimizer, {}
    for line in schedule.instructions:
        if not isinstance(line, Update):
            continue
        bucket, leaves = schedule.buckets[line.bucket], []
        for path in bucket.paths:
            spec = schedule.specs[path]
            dtypes = [bucket.dtype, spec.optimizer_dtype, spec.storage_dtype]
            dtypes += [spec.optimizer_dtype] * len(optimizer.slots)
            block = block_shape(spec.shape, spec.optimizer, schedule.mesh)
            forms = tuple(form_of(torch.empty(block, dtype=dtype, device="meta")) for dtype in dtypes)
            leaves.append(Leaf(tuple(optimizer.slots), optimizer.settings(path), 0, True, forms))
        paths, times = out.get(tuple(leaves), (bucket.paths, 0))
        out[tuple(leaves)] = paths, times + 1
    return out


# ------------------------------------------------------------------ Inductor and Triton without a device


@contextmanager
def h100() -> Iterator[None]:
    """As far as Inductor and Triton can tell, there is one."""
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
    """A kernel's graph with its inputs, and what it makes, on a fake CUDA device."""
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
    """What Inductor writes for a graph; "" where there is nothing to compile."""
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


def bytes_of(code: str, body: str) -> int:
    """What the pointwise kernels of an update load and store."""
    total = 0
    for name, source in TRITON.findall(code):
        dtypes = dict(re.findall(r"'(\w+_ptr\d+)': '\*(\w+)'", source))
        used = re.findall(r"tl\.(?:load|store)\((\w+_ptr\d+) \+ \(x\d+\)", source)
        each = sum({"bf16": 2, "fp32": 4}[dtypes[pointer]] for pointer in used)
        total += each * int(re.search(r"xnumel = (\d+)", source)[1]) * body.count(f"{name}.run(")
    return total


def assemble(name: str, source: str, folder: Path) -> int:
    """Have Triton compile a kernel for sm_90: bytes of its binary."""
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel = getattr(module, name)
    return len(kernel._precompile_config(kernel.configs[0]).kernel.asm["cubin"])
