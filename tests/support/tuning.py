"""A tuning job in small: a model directory, data of two kinds, a placed configuration."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import KilledError, compose, kill_at, run_in, timeless

from experiments import finetune
from experiments.data.tokenizer import ByteTokenizer
from experiments.lib.launch import fit_to_machine
from experiments.tuning import dataset
from experiments.tuning.config import OBJECTIVE_KINDS, FinetuneConfig
from fnshard.launcher.rank import Stop

transformers = pytest.importorskip("transformers")
STEPS = 6
SMALL = ("method.rank=2", "data.context=48", "data.rows=4", "data.held_out_rows=4", f"run.steps={STEPS}",
         "run.save_every=2", "run.held_out_every=3", "run.sample_tokens=3", "run.backend=eager",
         "run.device=cpu", "run.timeout_s=60", "mesh.shard=1")  # fmt: skip


def write_llama(folder: Path, *, kind: str = "LlamaForCausalLM", **more: Any) -> Path:
    """Write a model directory whose tokens are bytes."""
    tokenizer = ByteTokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 1, "max_position_embeddings": 64}  # fmt: skip
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab, eos_token_id=tokenizer.eos, **{**sizes, **more}
    )
    torch.manual_seed(0)
    getattr(transformers, kind)(config).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random, very small model directory."""
    return write_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write files of samples and of pairs."""
    folder = tmp_path_factory.mktemp("data")
    sums = [(a, b) for a in range(8) for b in range(8)]
    lines = {
        "samples": [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a, b in sums],
        "pairs": [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": "x"} for a, b in sums],
    }
    for name, each in lines.items():
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in each))
    return {name: folder / name for name in lines}


def config_of(model: Path, data: dict[str, Path], where: Path, *overrides: str) -> FinetuneConfig:
    """Compose a configuration for one machine, with its data tokenised below `where`."""
    chosen = next((o.partition("=")[2] for o in overrides if o.startswith("objective=")), "sft")
    train = data[OBJECTIVE_KINDS[chosen].records]
    named = (f"model={model}", f"data.train={train}")
    config = fit_to_machine(compose(*SMALL, *named, *overrides, spec=finetune.COMMAND), accelerators={})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        return dataset.prepare_data(config)


def tune_on_rank(rank: int, config: FinetuneConfig, folder: str | Path) -> None:
    """Fine-tune on this rank, from what the folder holds."""
    finetune.finetune(config, run_in(Path(folder)), [], Stop())


def tune_until(config: FinetuneConfig, folder: Path, number: int) -> None:
    """Fine-tune on this rank, which is killed in step `number`."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
        kill_at(patch, number)
        tune_on_rank(0, config, folder)


def assert_alike(folder: Path, other: Path, rel: float = 1e-6) -> None:
    """Assert that two runs have the same rows, up to rounding, and some."""
    rows, others = timeless(folder), timeless(other)
    assert others
    assert [pytest.approx(row, rel=rel, abs=1e-9) for row in rows] == others


def assert_same_on_every_mesh(config: FinetuneConfig, where: Path, ranks: Any, killed: int = 3) -> Path:
    """Assert that four runs have the same rows, and return the folder of the first.

    They are one on one rank, one that is killed and goes on there, one on two ranks, and one that is killed
    on one rank and goes on on two.
    """
    one, two, broken, moved = (where / name for name in ("one", "two", "broken", "moved"))
    on_two = replace(config, mesh=replace(config.mesh, shard=2))
    tune_on_rank(0, config, one)
    tune_until(config, broken, killed)
    shutil.copytree(broken, moved)
    tune_on_rank(0, config, broken)
    assert timeless(broken) == timeless(one)
    for folder in (two, moved):
        ranks(2).run(tune_on_rank, on_two, str(folder))
        assert_alike(folder, one)
    return one
