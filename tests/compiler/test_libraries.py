"""C++ kernels of many graphs in few shared objects."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppCodeCache
from torch._inductor.cpu_vec_isa import VecAVX2, VecISA
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InductorError, InvalidCxxCompiler
from torch.fx.experimental.proxy_tensor import make_fx

from fnshard.compiler.kernels import inductor, libraries
from fnshard.compiler.kernels.artifact import artifact_of, load_artifact
from fnshard.compiler.kernels.inductor import compile_graph, compile_graphs
from fnshard.errors import MissingExtraError

X = torch.linspace(-1, 1, 96, dtype=torch.float64).reshape(8, 12)


def graph_of(fn: Callable[[Tensor], Tensor]) -> fx.GraphModule:
    return make_fx(lambda x: [fn(x)], select_decomp_table(), tracing_mode="fake")(X)


FNS = {  # each another kernel; a gather, a reduction behind a product, a scan of two outputs
    "sin": lambda x: x.sin() + 1,
    "softmax": lambda x: (x @ x.T).softmax(1),
    "rows": lambda x: x[torch.arange(8, device=x.device) % 3].exp(),
    "norm": lambda x: torch.nn.functional.layer_norm(x, (12,)) * x.cumsum(0),
}


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The translation units that the compiler is given."""
    units, load = [], CppCodeCache.load_async.__func__

    def load_async(cls: Any, code: str, *args: Any, **options: Any) -> Any:
        units.append(code)
        return load(cls, code, *args, **options)

    monkeypatch.setattr(CppCodeCache, "load_async", classmethod(load_async))
    return units


@pytest.mark.parametrize(("threads", "ranks", "most"), [(1, 1, 1), (2, 1, 2), (8, 4, 2)])
def test_kernels_of_many_graphs_share_a_library_for_each_thread(
    built: list[str], monkeypatch: pytest.MonkeyPatch, threads: int, ranks: int, most: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    graphs = {(name, False): graph_of(lambda x, f=fn: f(x) * most) for name, fn in FNS.items()}
    with config.patch(compile_threads=threads):
        made = compile_graphs(graphs, backend="inductor", options={})
    assert len(built) == most
    for (name, _), kernel in made.items():
        artifact = artifact_of(kernel)
        assert 1 <= len(artifact.libraries) <= most
        for run in (kernel, load_artifact(artifact)):
            torch.testing.assert_close(run([X.clone()])[0], FNS[name](X) * most, rtol=0, atol=1e-12)


def test_vector_instructions_that_torch_runs_with_are_not_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known = libraries.vector_settings.__wrapped__()
    assert bool(known) == (torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"))
    monkeypatch.setattr(VecISA, "check_build", lambda *_: pytest.fail("it was tried"))
    with config.patch(known):
        assert VecAVX2()
    old = tmp_path / "g++"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o700)
    for other in ({"cpp.cxx": (str(old),)}, {"cpp.vec_isa_ok": False}):  # a user's own choice
        with config.patch(other):
            assert libraries.vector_settings.__wrapped__() == {}


def test_what_another_thread_compiles_meanwhile_is_inductors_own(built: list[str]) -> None:
    found: list[Any] = []

    def other() -> None:
        found.append(torch.compile(lambda x: (x * 3).cos())(X))

    with libraries.compiled_together({}):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    torch.testing.assert_close(found[0], (X * 3).cos())
    assert not any("fnshard" in unit for unit in built)


def test_options_hold_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, build = [], libraries._built

    def built(groups: Any) -> Any:
        seen.append(config.cpp.max_horizontal_fusion_size)
        return build(groups)

    monkeypatch.setattr(libraries, "_built", built)
    graphs = {("k", False): graph_of(lambda x: x.tan() + 5)}
    compile_graphs(graphs, backend="inductor", options={"cpp.max_horizontal_fusion_size": 7})
    assert seen == [7] and config.cpp.max_horizontal_fusion_size != 7


def test_threads_that_wait_for_each_other_leave_inductor_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, lock, before = threading.Event(), threading.RLock(), AsyncCompile.cpp_pybinding

    class Lock:
        def __enter__(self) -> None:
            waits.set()
            lock.acquire()

        def __exit__(self, *_: Any) -> None:
            lock.release()

    def other() -> None:
        with libraries.compiled_together({}):
            pass

    monkeypatch.setattr(libraries, "TRACING", Lock())
    thread = threading.Thread(target=other)
    with libraries.compiled_together({}):
        waits.clear()
        thread.start()
        assert waits.wait(60)
    thread.join()
    assert AsyncCompile.cpp_pybinding is before


def test_what_was_generated_before_an_error_is_compiled_where_it_is_used() -> None:
    graph = graph_of(lambda x: (x + 17).sin())
    with pytest.raises(ZeroDivisionError), libraries.compiled_together({}):
        compiled = inductor._generated(graph, {}, False)
        raise ZeroDivisionError
    for run in (compiled, compile_graph(graph, backend="inductor", options={}, is_backward=False)):
        torch.testing.assert_close(run([X.clone()])[0], (X + 17).sin())


def test_no_compiler_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **how: Any) -> None:
        raise InductorError(InvalidCxxCompiler(), None)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", fails)
    with pytest.raises(MissingExtraError, match="a C\\+\\+ compiler, and none works here"):
        compile_graph(graph_of(FNS["sin"]), backend="inductor", options={}, is_backward=False)
