"""A tuning job in small: a model directory, data of two kinds, a placed configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from omegaconf import OmegaConf

from experiments.cli import schema
from experiments.configs.machine import place
from experiments.data.tokenizer import byte_tokenizer
from experiments.finetune import dataset, job
from experiments.finetune.config import FinetuneConfig
from experiments.training.metrics_file import METRICS
from experiments.training.resume import RunFolder

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[2]
STEPS = 6
SMALL = ("method.rank=2", "data.context=48", "data.rows=4", "data.held_out_rows=4", f"run.steps={STEPS}",
         "run.save_every=2", "run.held_out_every=3", "run.sample_tokens=3", "run.backend=eager",
         "run.device=cpu", "run.timeout_s=60", "mesh.shard=1")  # fmt: skip


def compose(*overrides: str) -> FinetuneConfig:
    job.SPEC.register()
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(job.SPEC.conf)):
        composed = hydra.compose("finetune", overrides=list(overrides))
    return schema.build(OmegaConf.to_container(composed, resolve=True, throw_on_missing=True), FinetuneConfig)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory, random and very small."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        eos_token_id=tokenizer.eos,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of the two kinds."""
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
    """Placed, with its data tokenised below `where`."""
    train = data["pairs" if "objective=dpo" in overrides else "samples"]
    named = (f"model={model}", f"data.train={train}")
    config = place(compose(*SMALL, *named, *overrides), accelerators={})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        return dataset.prepared(config)


def run_in(folder: Path) -> RunFolder:
    folder.mkdir(parents=True, exist_ok=True)
    return RunFolder(str(folder))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
