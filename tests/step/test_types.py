"""Types reach a user: the README's quickstart is clean to pyright, and the usual slips are not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("basedpyright", reason="pyright is not installed: pip install -e '.[test]'")

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICKSTART, PAPER = re.findall(r"```python\n(.*?)```", README, re.S)[:2]
RIGHT = """
from typing import assert_type
from fnshard.step.state import Metrics

assert_type(state, fs.TrainState)
gradients = fs.shard_step(loss_fn, specs, remat={"layers.*": "unit"}, backend="eager")
loss, grads = gradients(gradients.init(params), rows[:, :-1], rows[:, 1:], rng=(0, 1))
assert_type(loss, torch.Tensor)
assert_type(step(state, tokens=rows[:, :-1], targets=rows[:, 1:]), tuple[fs.TrainState, Metrics])


def mean(params, tokens):
    return fs.Mean(apply(params, tokens).sum(), 1)


def with_aux(params, tokens):
    total = apply(params, tokens).sum()
    return torch.zeros(()), {"total": total}


assert_type(fs.shard_step(mean, specs)(params, rows)[0], torch.Tensor)
(loss, aux), grads = fs.shard_step(with_aux, specs)(params, rows)
print(aux["total"], grads["norm"])
"""
# A line each, and the rule that finds it.
WRONG = {
    'fs.shard_step(loss_fn, specs, remat="unitt")': "reportArgumentType",
    'fs.shard_step(loss_fn, specs, remat={"layers.*": "unitt"})': "reportArgumentType",
    'fs.shard_step(loss_fn, specs, backend="inductr")': "reportArgumentType",
    'fs.shard_step(loss_fn, specs, accumulate_mode="locally")': "reportArgumentType",
    'fs.shard_step(loss_fn, specs, loss_scale="dynamical")': "reportArgumentType",
    'LayoutSpec(P("shard"), memory="hots")': "reportArgumentType",
    "fs.shard_step(loss_fn, specs, optimizer=torch.optim.AdamW)": "reportArgumentType",
    "loss, grads, more = gradients(params, rows)": "reportAssignmentType",
    "state, metrics, more = step(state, rows, rows)": "reportAssignmentType",
    "step(params, rows)": "reportArgumentType",
    'fs.unshard(params, specs, mesh, layout="gradients")': "reportArgumentType",
}


def errors(code: str, folder: Path) -> dict[str, str]:
    """What pyright, at its own default strictness, finds: `{source line: rule}`."""
    source = folder / "quickstart.py"
    source.write_text(code)
    settings = {
        "typeCheckingMode": "standard",
        "reportPossiblyUnboundVariable": False,  # what a loop binds; a warning of pyright's own
        "extraPaths": [str(ROOT)],
        "include": [source.name],
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run([*command, "-p", str(folder)], capture_output=True, text=True, timeout=250)
    found = json.loads(done.stdout)["generalDiagnostics"]
    lines = code.splitlines()
    return {
        lines[one["range"]["start"]["line"]].strip(): f"{one.get('rule')}: {one['message']}"
        for one in found
        if one["severity"] == "error"
    }


def test_the_quickstart_has_no_type_errors_and_slips_have(tmp_path: Path) -> None:
    right = "\n".join((QUICKSTART, PAPER, RIGHT))
    found = errors("\n".join((right, *WRONG)), tmp_path)
    assert {line: why for line, why in found.items() if line not in WRONG} == {}
    assert {line: why.split(":")[0] for line, why in found.items()} == WRONG
