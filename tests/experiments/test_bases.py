"""The models that fine-tuning is tried on: random ones, and those that a run of fine-tuning trains."""

from __future__ import annotations

import ast
import runpy
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from errors import raises

from experiments import bases, finetune
from experiments.bases import TRAINED, make_base
from experiments.data.builtin import _unparse_functions
from experiments.lib.checks import ConfigError
from experiments.lib.files import lock_folder
from experiments.tuning.config import FinetuneConfig
from experiments.tuning.model_directory import BASES, EXPORTED, KEPT

pytest.importorskip("transformers")
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_help_names_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bases", "--help"])
    monkeypatch.delitem(sys.modules, "experiments.bases")
    runpy.run_module("experiments.bases", run_name="__main__")
    assert ", ".join(BASES) in capsys.readouterr().out


def test_each_name_has_a_recipe() -> None:
    assert {*BASES} == {*TRAINED, *bases.RANDOM, *bases.SEEING}
    for names in ([], ["stdlib", "tiny"], ["mine"]):
        with raises(ConfigError, says="stdlib, tasks, tiny"):
            make_base(names, [])


def test_bases_are_made_once_one_after_another(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[FinetuneConfig] = []

    def start(job: Any, config: FinetuneConfig, folder: Path, *_: Any, chosen: bool) -> str:
        assert job is finetune.JOB and chosen and Path(config.model, "config.json").exists()
        begun.append(config)
        (folder / EXPORTED).mkdir(parents=True)
        (folder / EXPORTED / "config.json").write_text("{}")
        return bases.STOPPED if len(begun) == 1 else "ok"

    monkeypatch.setattr(bases, "RANDOM", {"tiny": SIZES})
    for name, (base, _, settings) in TRAINED.items():
        write_files = lambda folder: (folder / "train", folder / "held_out")  # noqa: E731
        monkeypatch.setitem(TRAINED, name, (base, write_files, settings))
    monkeypatch.setattr(bases, "start", start)
    with pytest.raises(SystemExit, match=r"^0$"):
        make_base(["tasks"], ["run.backend=eager"])
    assert [path.name for path in KEPT.iterdir() if (path / "config.json").exists()] == ["tiny"]
    (KEPT / "runs" / "stdlib" / EXPORTED / "config.json").unlink()
    (KEPT / "runs" / "stdlib" / EXPORTED).rmdir()
    for _ in range(2):
        make_base(["tasks"], ["run.backend=eager"])
    assert [Path(config.model).name for config in begun] == ["tiny", "tiny", "stdlib"]
    assert {(config.method.name, config.export, config.run.backend) for config in begun} == {
        ("full", "merged", "eager")
    }
    assert begun[2].data.train.endswith("runs/tasks/train")


def test_a_base_sees_no_docstrings() -> None:
    """They are what it is tuned on later."""
    texts = [*islice(_unparse_functions(False), 50), *islice(_unparse_functions(True), 50)]
    assert len({*texts}) > 90 and not any(ast.get_docstring(ast.parse(text).body[0]) for text in texts)


def test_two_processes_make_one_after_another(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second finds what the first has made."""
    (KEPT / "tiny").mkdir(parents=True)
    waits: list[float] = []
    with lock_folder(KEPT):
        monkeypatch.setattr(
            bases.time, "sleep", lambda s: waits.append(s) or (_ for _ in ()).throw(TimeoutError)
        )
        with pytest.raises(TimeoutError):
            make_base(["tiny"], [])
    make_base(["tiny"], [])
    assert len(waits) == 1 and list((KEPT / "tiny").iterdir()) == []
