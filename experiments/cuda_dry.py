"""A step's CUDA code without a GPU: `python -m experiments.cuda_dry`.

    python -m experiments.cuda_dry --model 1b --rows 2 --ranks 8 --torch 2.11.0

In an environment of its own, which holds a build of torch for CUDA (5 GB), the step is lowered on paper for
CUDA, its kernels' graphs are put on a fake CUDA device, Inductor writes their code, and Triton compiles that
for sm_90. Printed are launches, the bytes that updates move for a parameter, and what should not be there:
tensors on the host, `.item()`.

What stands in the way of more: autograd asks the driver for a context where a fake CUDA tensor is
differentiated, so that kernels are differentiated on the CPU and put on CUDA then; nothing is loaded or run,
and products that Inductor would choose by trying them are cuBLAS's.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
INTO = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fnshard" / "versions"
NEEDED = ["numpy", "optree", "safetensors", "einops", "pyyaml"]
TRITON = re.compile(r"(?ms)^(\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str")
CALLS = {
    "triton": r"\b(triton_\w+)\.run\(",
    "products": r"\b(extern_kernels\.\w+)\(",
    "other ops": r"= (torch\.ops\.\w+\.\w+)",
}
HOST = re.compile(r"\.item\(\)|\.cpu\(\)|empty_strided_cpu\(|device='cpu'|device=cpu")


@contextmanager
def h100() -> Iterator[None]:
    """As far as Inductor and Triton can tell, there is one."""
    import torch
    import triton
    from torch._inductor import config as inductor
    from torch._inductor.runtime import triton_helpers
    from torch._subclasses import fake_tensor
    from triton.backends.compiler import GPUTarget

    props = SimpleNamespace(
        name="NVIDIA H100", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132, warp_size=32,
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=232448, shared_memory_per_block=49152, L2_cache_size=50 << 20,
        gcnArchName="", uuid="", is_integrated=False,
    )  # fmt: skip
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": (9, 0),
        "get_device_properties": props, "_get_device_properties": props, "_lazy_init": None,
        "set_device": None, "_exchange_device": 0, "_maybe_exchange_device": 0, "synchronize": None,
        "set_rng_state": None, "get_rng_state": torch.zeros(8, dtype=torch.uint8),
    }  # fmt: skip
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda *_: 0,
        get_device_capability=lambda *_: (9, 0),
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    with ExitStack() as stack:
        for name, answer in answers.items():
            made = mock.patch.object(torch.cuda, name, lambda *_, answer=answer: answer, create=True)
            stack.enter_context(made)
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", lambda *_: None))
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        stack.enter_context(inductor.patch(use_static_cuda_launcher=False))  # it hides binaries
        triton.runtime.driver.set_active(driver)
        yield


def on_cuda(module: Any) -> Any:
    """A kernel's graph with its inputs, and what it makes, on a fake CUDA device."""
    import torch
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

    from fnshard.compiler.kernels.inductor import compile_graph

    written: list[str] = []

    def stop(graph: Any) -> Any:
        code = graph.codegen()[0]
        written.append(getattr(code, "value", code))
        raise InterruptedError  # before it is loaded, which takes a driver

    with mock.patch.object(GraphLowering, "compile_to_module", stop):
        try:
            compile_graph(on_cuda(module), backend="inductor", options=OPTIONS, is_backward=is_backward)
        except Exception:
            if not written:
                raise
    return "".join(written)


OPTIONS = {"compile_threads": 1, "force_disable_caches": True}


def bytes_of(code: str, body: str) -> int:
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


def lowered(model: str, rows: int, ranks: int) -> Any:
    import torch
    import yaml

    import fnshard as fs
    from experiments.configs.decoders import DecoderConfig
    from experiments.training.decoder import Decoder, next_token_loss

    config = DecoderConfig(**yaml.safe_load((ROOT / "conf" / "model" / f"{model}.yaml").read_text()))
    with torch.device("meta"):
        apply, params = fs.make_functional(Decoder(config))
        tokens = torch.zeros(rows, config.context, dtype=torch.int64)
    mesh = fs.make_mesh(shard=ranks, abstract=True, device="cuda")
    dtypes = {"storage_dtype": torch.bfloat16, "optimizer_dtype": torch.float32}
    specs = fs.presets.full_shard(params, mesh, compute_dtype=torch.bfloat16, **dtypes)
    optimizer = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(3e-4))
    step = fs.shard_step(
        lambda p, x, y: next_token_loss(apply(p, x), y), specs, mesh=mesh, optimizer=optimizer
    )
    return step.lower(params, tokens, tokens)


def updates(found: Any) -> collections.Counter:
    """The distinct compiled updates of a step, (paths, leaves), and how many units have each."""
    import torch

    from fnshard.compiler.schedule.instructions import Update
    from fnshard.layout.partition import block_shape
    from fnshard.runtime.executor.fused_update import Leaf, form_of

    schedule, optimizer, out, names = found.schedule, found.optimizer, collections.Counter(), {}
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
            leaves.append(Leaf(optimizer.settings(path), 0, True, forms))
        paths = names.setdefault(tuple(leaves), bucket.paths)
        out[paths, tuple(leaves)] += 1
    return out


def inspect(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from fnshard.runtime.executor.fused_update import update_graph

    found = lowered(args.model, args.rows, args.ranks)
    runs = collections.Counter(
        (line.kernel, line.backward) for line in found.schedule.instructions if hasattr(line, "kernel")
    )
    launches, host, binaries = collections.Counter(), [], {}
    with h100(), tempfile.TemporaryDirectory() as folder:
        for (name, backward), times in runs.items():
            kernel = found.schedule.kernels[name]
            code = code_of(kernel.backward if backward else kernel.forward, backward)
            label = f"{name}.{'bwd' if backward else 'fwd'}"
            body = code[code.find("def call(") :].split("def get_args")[0]
            each = {kind: len(re.findall(pattern, body)) for kind, pattern in CALLS.items()}
            print(f"{label}: {times} times, {each}", file=sys.stderr, flush=True)
            launches.update({kind: times * count for kind, count in each.items()})
            host += [f"{label}: {line.strip()}" for line in body.splitlines() if HOST.search(line)]
            if args.triton:
                binaries |= {n: assemble(n, source, Path(folder)) for n, source in TRITON.findall(code)}
        moved, parameters = 0, 0
        for (paths, leaves), times in updates(found).items():
            graph = update_graph(found.optimizer, paths, leaves, torch.device("cpu"))
            code = code_of(graph, is_backward=False)
            body = code[code.find("def call(") :].split("def get_args")[0]
            each = len(re.findall(CALLS["triton"], body))
            print(
                f"update of {len(leaves)} leaves: {times} times, {each} launches", file=sys.stderr, flush=True
            )
            launches["updates"] += times * each
            host += [f"update: {line.strip()}" for line in body.splitlines() if HOST.search(line)]
            moved += times * bytes_of(code, body)
            parameters += times * sum(math.prod(leaf.tensors_like[0][0]) for leaf in leaves)
            if args.triton:
                binaries |= {n: assemble(n, source, Path(folder)) for n, source in TRITON.findall(code)}
    return {
        "step": repr(found),
        "attention": found.attention,
        "launches": dict(launches),
        "bytes of updates for a parameter": round(moved / parameters, 2),
        "on the host": host,
        "assembled for sm_90": len(binaries),
        "bytes of binaries": sum(binaries.values()),
    }


def environment(into: Path, version: str) -> Path:
    """The Python of an environment with this build of torch; made where there is none."""
    python = into / version / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", into / version], check=True)
    found = subprocess.run([python, "-c", "import torch, triton, einops, optree, yaml"], capture_output=True)
    if found.returncode:
        command = [python, "-m", "pip", "install", "--quiet", f"torch=={version}", *NEEDED]
        subprocess.run(command, check=True)
    return python


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="1b")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--torch", default="2.11.0", help="the build of torch, from PyPI")
    parser.add_argument("--into", type=Path, default=INTO, help="where the environment lies")
    parser.add_argument("--no-triton", dest="triton", action="store_false", help="do not assemble kernels")
    parser.add_argument("--here", action="store_true", help="in this environment")
    args = parser.parse_args()
    if args.here:
        found = inspect(args)
        print(json.dumps(found, indent=1))
        return 1 if found["on the host"] else 0
    python = environment(args.into.resolve(), args.torch)
    with suppress(KeyboardInterrupt):
        return subprocess.run(
            [python, "-m", "experiments.cuda_dry", *sys.argv[1:], "--here"], cwd=ROOT
        ).returncode
    return 130


if __name__ == "__main__":
    sys.exit(main())
