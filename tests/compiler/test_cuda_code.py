"""What Inductor writes for CUDA computes what the graphs of a step do. Needs Triton, and no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from interpreted import graphs

ROOT = Path(__file__).parents[2]


@pytest.mark.long  # 39 s of an interpreter
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("dtype", "limit"), [pytest.param("float32", 1e-5, marks=pytest.mark.long), ("bfloat16", 0.03)]
)
def test_code_for_cuda_equals_its_graph(dtype: str, limit: float) -> None:
    """Forwards, backwards and updates. Products are the CPU's, attention is spelled out."""
    pytest.importorskip("triton")
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "support")))
    run = subprocess.run(
        [sys.executable, ROOT / "tests" / "support" / "interpreted.py", dtype], check=False, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    graphs = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(graphs) >= 8 and sum(g["calls"] for g in graphs) > 500
    assert {g["graph"]: g["off"] for g in graphs if not g["off"] <= limit} == {}


def test_norms_are_taken_apart_for_cuda() -> None:
    """CUDA has kernels of its own for them, which no graph of a step calls."""
    called = {str(n.target) for _, _, graph in graphs(torch.float32) for n in graph.graph.nodes}
    assert "aten.mul.Tensor" in called and not [op for op in called if "norm" in op]
