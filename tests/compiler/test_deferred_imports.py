"""Dynamo and Inductor are imported at their first use, wherever that is, and then they are as always."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

START = """
import sys, torch, fnshard as fs
from fnshard.compiler.ir import deferred_imports
deferred_imports.defer()
both = ["torch._dynamo", "torch._inductor"]
def deferred():
    return [name for name in both if deferred_imports.is_deferred(name)]
def lower(fn):
    specs = fs.presets.full_shard({"w": torch.ones(3, 3)}, fs.make_mesh(shard=1))
    return fs.shard_forward(fn, specs, backend="eager").lower({"w": torch.ones(3, 3)}, torch.ones(2, 3))
"""
USES = {
    # A trace and settings import neither, and what is disabled before Dynamo is there stays so.
    "disabled": """
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
with FakeTensorMode():
    x = torch.ones(3, 3)
trace = make_fx(lambda x: torch.tanh(x @ x).sum(), tracing_mode="fake", pre_dispatch=True)
assert "matmul" in str(deferred_imports.trace_again(lambda: trace(x)).graph) and deferred() == both
with torch._dynamo.config.patch(cache_size_limit=3), torch._inductor.config.patch(max_autotune=True):
    assert torch._dynamo.config.cache_size_limit == 3 and torch._inductor.config.max_autotune
def plain(x): return x + 1
disabled = torch._dynamo.disable(plain)
assert disabled(1) == 2 and deferred() == both
assert disabled.__name__ == "plain"
def refused(): raise fs.SpecError("wrong")
try: deferred_imports.trace_again(refused)
except fs.SpecError: assert deferred() == both
else: assert False
frames = []
def backend(graph, inputs):
    frames.append(graph)
    return graph
assert torch.compile(plain, backend=backend)(torch.ones(1)).item() == 2 and len(frames) == 1
assert torch.compile(disabled, backend=backend)(torch.ones(1)).item() == 2 and len(frames) == 1
assert type(torch._dynamo) is type(sys) and torch._dynamo.config.cache_size_limit != 3
""",
    # What is no function goes to Dynamo: decorators with arguments, and modules.
    "decorators": """
@torch.compiler.disable(recursive=False)
def plain(x): return x + 1
module = torch.compiler.disable(torch.nn.Linear(2, 2))
assert plain(1) == 2 and module.weight.shape == (2, 2) and "torch._dynamo" not in deferred()
@torch.compiler.disable()
def other(x): return x
assert other(3) == 3
""",
    "a mistake": """
calls = []
def fail():
    calls.append(0)
    raise ValueError(f"call {len(calls)}")
try: deferred_imports.trace_again(fail)
except ValueError as error: assert str(error) == "call 2" and "call 1" in error.__notes__[0]
else: assert False
assert deferred() == [] and len(calls) == 2
""",
    "names": """
assert torch._dynamo.utils.counters is not None and torch._dynamo.is_compiling() is False
import torch._inductor.fx_passes.joint_graph
assert deferred() == [] and type(torch._inductor) is type(sys)
for package in (torch._dynamo, torch._inductor):
    assert package.__path__ and package.config is sys.modules[package.__name__ + ".config"]
    try: package.nothing
    except AttributeError: pass
    else: assert False
""",
    "in a trace": """
def fn(p, x):
    import torch._dynamo.eval_frame
    return torch.cond(x.sum() > 0, lambda x: x @ p["w"], lambda x: x * 2, (x,)).sum()
text = str(lower(fn).program.graph)
assert "torch._dynamo" not in deferred() and "matmul" in text, text
""",
}


@pytest.mark.suite({
    "disabled": "nothing is imported",
    "decorators": "what needs Dynamo imports it",
    "in a trace": "which begins again",
})  # fmt: skip
@pytest.mark.parametrize("use", USES)
def test_a_package_is_imported_when_it_is_used(use: str) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", START + USES[use]], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
