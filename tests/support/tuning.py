"""A tuning job in small: a model directory, data of two kinds, a placed configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import compose, run_in

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


def write_llama(folder: Path, **more: Any) -> Path:
    """A model directory, of bytes."""
    tokenizer = ByteTokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 1, "max_position_embeddings": 64}  # fmt: skip
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab, eos_token_id=tokenizer.eos, **{**sizes, **more}
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory, random and very small."""
    return write_llama(tmp_path_factory.mktemp("model"))


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
    chosen = next((o.partition("=")[2] for o in overrides if o.startswith("objective=")), "sft")
    train = data[OBJECTIVE_KINDS[chosen].records]
    named = (f"model={model}", f"data.train={train}")
    config = fit_to_machine(compose(*SMALL, *named, *overrides, spec=finetune.COMMAND), accelerators={})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        return dataset.prepare_data(config)


def tuned(rank: int, config: FinetuneConfig, folder: str | Path) -> None:
    """On this rank, from what the folder holds."""
    finetune.finetune(config, run_in(Path(folder)), [], Stop())
