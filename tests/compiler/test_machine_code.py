"""Compiled graphs in files: they run without Inductor as they ran with it; a damaged one is compiled anew."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config
from torch.fx.experimental.proxy_tensor import make_fx

from fnshard.analysis.footprint import make_fake_wrapper
from fnshard.analysis.storages import StorageTracker
from fnshard.compiler.kernels import inductor, machine_code, store


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    """A store of this test's own; a machine with one processor compiles as others do."""
    caches = {"FNSHARD_CACHE": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    with mock.patch.dict(os.environ, caches), config.patch(compile_threads=2):
        yield tmp_path / "kernels"


def loss(x: Tensor, w: Tensor, bias: Tensor) -> list[Tensor]:
    """Products, loops around them, views, and sums."""
    y = torch.tanh(x @ w) + 0.2718
    z = torch.addmm(bias, y, w.permute(1, 0)).exp()
    return [z.sum(0), y[1:, ::2], ((y + x) * y).mean()]


def inputs() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=draw) for shape in ((6, 6), (6, 6), (6,))]


def graph_of(fn: Callable[..., Any] = loss, values: list[Tensor] | None = None) -> fx.GraphModule:
    return make_fx(fn, tracing_mode="fake")(*(inputs() if values is None else values))


def compile_graph(graph: fx.GraphModule, **how: Any) -> inductor.Boxed:
    how = {"options": {}, "is_backward": False, **how}
    return inductor.compile_graph(graph, backend="inductor", **how)


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("Inductor compiles")


def files(folder: Path) -> dict[str, list[Path]]:
    found = sorted(folder.iterdir()) if folder.exists() else []
    kinds = {"code": lambda path: path.name.startswith("code-"), "so": lambda path: path.suffix == ".so"}
    return {kind: list(filter(is_of, found)) for kind, is_of in kinds.items()}


def test_what_is_read_computes_what_was_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = compile_graph(graph_of())
    assert {kind: len(found) for kind, found in files(folder).items()} == {"code": 1, "so": 1}
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", refuse)
    read = compile_graph(graph_of())
    given = inputs()
    assert all(torch.equal(a, b) for a, b in zip(read(given), fresh(inputs()), strict=True))
    assert given == []  # it is boxed
    for ours, plain in zip(read(inputs()), loss(*inputs()), strict=True):
        assert torch.allclose(ours, plain, rtol=1e-5) and ours.stride() == plain.stride()
    # The memory ledger runs the wrapper of either on fake tensors.
    assert make_fake_wrapper(read, StorageTracker("cpu")) and make_fake_wrapper(fresh, StorageTracker("cpu"))
    with pytest.raises(AssertionError, match=r"size|stride"):  # shapes are checked
        read([torch.ones(5, 6), *inputs()[1:]])


def test_another_process_runs_it_without_dynamo_and_inductor(folder: Path) -> None:
    program = """
import sys
from fnshard.compiler.ir import deferred_imports
deferred_imports.defer()
from fnshard.compiler.kernels import machine_code
from test_machine_code import inputs
run = machine_code.recall(sys.argv[1])
print([value.double().sum().item() for value in run(inputs())])
print([name for name in ("torch._dynamo", "torch._inductor") if not deferred_imports.is_deferred(name)])
"""
    expected = [value.double().sum().item() for value in compile_graph(graph_of())(inputs())]
    (code,) = files(folder)["code"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", program, code.name], env=env, capture_output=True, text=True)
    assert done.stdout.splitlines() == [str(expected), "[]"], done.stderr


def test_keys_differ_where_anything_that_matters_differs() -> None:
    plain = graph_of()
    keys = {
        "plain": machine_code.key_of(plain, {}, False),
        "backward": machine_code.key_of(plain, {}, True),
        "options": machine_code.key_of(plain, {"epilogue_fusion": False}, False),
        "number": machine_code.key_of(graph_of(lambda x, w, b: [(x @ w) + 0.2717]), {}, False),
        "shape": machine_code.key_of(graph_of(values=[torch.ones(7, 6), *inputs()[1:]]), {}, False),
    }
    for name, place, value in (
        ("threads", "torch.get_num_threads", lambda: 7),
        ("processor", "fnshard.compiler.kernels.machine_code._describe_processor", lambda: "another"),
        ("torch", "torch.__version__", "3.0"),
        ("sources", "fnshard.compiler.kernels.store.SOURCES", "another"),
    ):
        with mock.patch(place, value):
            keys[name] = machine_code.key_of(plain, {}, False)
    with mock.patch.dict(os.environ, CXX="another"):
        keys["compiler"] = machine_code.key_of(plain, {}, False)
    with config.patch(emulate_precision_casts=True):
        keys["setting"] = machine_code.key_of(plain, {}, False)
    assert None not in keys.values() and len(set(keys.values())) == len(keys)
    assert machine_code.key_of(graph_of(), {}, False) == keys["plain"]
    assert machine_code.key_of(plain, {"post_grad_custom_post_pass": refuse}, False) is None
    with mock.patch.dict(os.environ, FNSHARD_CACHE="off"):
        assert machine_code.key_of(plain, {}, False) is None


@pytest.mark.parametrize("damage", [
    lambda code, library: library.unlink(),
    lambda code, library: library.write_bytes(library.read_bytes()[:-1]),
    lambda code, library: library.write_bytes(b""),
    lambda code, library: code.write_bytes(code.read_bytes()[:-1]),
    lambda code, library: code.write_bytes(store.seal(b"import os; os._exit(1)")),
], ids=["no library", "torn", "empty", "cut short", "sealed, but a program"])  # fmt: skip
def test_what_is_damaged_is_compiled_anew(folder: Path, damage: Callable[[Path, Path], Any]) -> None:
    expected = compile_graph(graph_of())(inputs())
    ((code,), (library,)) = files(folder).values()
    damage(code, library)
    with mock.patch.object(inductor.machine_code, "keep", wraps=machine_code.keep) as keep:
        found = compile_graph(graph_of())(inputs())
    assert keep.call_count == 1 and all(map(torch.equal, found, expected))
    assert machine_code.recall(code.name) is not None  # both are whole again


@torch.library.custom_op("fnshard_test_code::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)


def test_what_does_not_run_by_itself_is_left_to_inductor(folder: Path) -> None:
    constant = torch.arange(6.0) ** 1.5

    def with_constant(x: Tensor) -> list[Tensor]:
        return [x + constant]

    for fn in (with_constant, lambda x: [doubled(x) + 1]):
        graph = make_fx(fn, tracing_mode="fake", _allow_non_fake_inputs=True)(inputs()[2])
        (found,) = compile_graph(graph)(inputs()[2:])
        assert torch.allclose(found, fn(inputs()[2])[0]) and files(folder)["code"] == []


@pytest.mark.parametrize("line, used, runs", [
    ("from torch._inductor.hooks import run_intermediate_hooks", "", True),
    ("from torch._inductor.hooks import hook", "hook", False),
    ("other = async_compile.triton('other', '...')", "other", False),
    ("kernel = async_compile.cpp_pybinding([], '')", "kernel", True),
    ("seeds = torch._inductor.seeds", "seeds", False),
])  # fmt: skip
def test_a_module_is_kept_without_what_imports_inductor(line: str, used: str, runs: bool) -> None:
    source = f"""
import torch
from torch._inductor.async_compile import AsyncCompile
async_compile = AsyncCompile()
{line}
async_compile.wait(globals())
del async_compile
def call(args):
    if len(args) > 9:
        {used or "pass"}
    return kernel(*args)
def get_args():
    from torch._dynamo.testing import rand_strided
if __name__ == "__main__":
    from torch._inductor.wrapper_benchmark import compiled_module_main
"""
    text = machine_code._strip_inductor(source, {"kernel"})
    assert (text is not None) == runs
    if runs:
        made = {"kernel": max}
        exec(text, made)
        assert made["call"]([1, 2]) == 2 and "get_args" not in made


def test_a_module_that_lacks_what_it_calls_is_not_kept() -> None:
    whole = "import torch\ndef call(args):\n    return [kernel(torch.abs(x), len(args)) for x in args]\n"
    assert machine_code._strip_inductor(whole, {"kernel"})
    assert machine_code._strip_inductor(whole, set()) is None
