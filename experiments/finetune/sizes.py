"""Sizes: what tuning Llama-3-70B with adapters takes of a device, on paper.

    python -m experiments.finetune.sizes

Adapters of rank 64 on every matrix, sequences of 2048, units recomputed; the frozen base as bf16, int8 or
nf4, sharded over ranks, on the device or on the host.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fnshard as fs
from experiments.configs.checks import count
from experiments.configs.train import PrecisionConfig
from experiments.finetune.config import MethodConfig, ObjectiveConfig
from experiments.finetune.lm import LanguageModel, from_config
from experiments.finetune.objectives import sft
from experiments.finetune.tuning import CODECS, Tuning
from experiments.tables import markdown
from fnshard import tree
from fnshard.adapters.lora import lora

LLAMA_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
             "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
             "max_position_embeddings": 8192, "rope_theta": 500000.0}  # fmt: skip
BF16 = PrecisionConfig(storage="bfloat16", compute="bfloat16", reduce="float32", optimizer="float32")
METHODS = {"bf16": "lora", "int8": "qlora8", "nf4": "qlora4"}


@dataclass(frozen=True)
class SizeCase:
    """One row of the table."""

    kept: str
    ranks: int
    tier: str
    rows: int = 2
    length: int = 2048


def model_of(sizes: dict[str, Any]) -> LanguageModel:
    from transformers import LlamaConfig

    return from_config(LlamaConfig(**sizes, tie_word_embeddings=False), dtype=torch.bfloat16)


def tuning_of(lm: LanguageModel, kept: str, rank: int) -> Tuning:
    """Adapters on every matrix of the layers, all leaves on meta."""
    matrices = lm.matrices()
    fn, params = lora(lm.logits, lm.params, rank=rank, alpha=16, targets=matrices)
    params["adapters"] = tree.map(_on_meta, params["adapters"])
    method = MethodConfig(name=METHODS[kept], rank=rank)
    coded = tuple(f"base.{p}" for p in matrices) if method.name in CODECS else ()
    return Tuning(lm, method, params, fn.lora, coded)


def _on_meta(leaf: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(torch.empty_like(leaf, device="meta"))
    made.beside = leaf.beside
    return made


def lowered(tuning: Tuning, case: SizeCase) -> Any:
    mesh = fs.make_mesh(shard=case.ranks, abstract=True)
    specs = tuning.specs(
        mesh, BF16, fs.presets.full_shard, memory=case.tier, optimizer_memory=case.tier,
        **({"update_on": "host"} if case.tier == "host" else {}),
    )  # fmt: skip
    loss = sft(tuning, ObjectiveConfig(), training=True)
    step = fs.shard_step(loss, specs, mesh=mesh, optimizer=fs.optim.adamw(1e-4), remat="unit")
    tokens = torch.empty(case.rows, case.length, dtype=torch.int64, device="meta")
    return step.lower(tuning.params, {"tokens": tokens, "targets": tokens, "positions": tokens})


def row_of(tuning: Tuning, case: SizeCase) -> dict[str, Any]:
    began = time.perf_counter()
    memory = lowered(tuning, case).memory_analysis()
    sizes = {"device GB": memory.peak_bytes / 1e9, "host GB": memory.host_bytes / 1e9}
    return {**vars(case), **sizes, "seconds": time.perf_counter() - began}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [["base", "ranks", "rests on", "device GB", "host GB"]]
    for r in rows:
        sizes = f"{r['device GB']:.2f}", f"{r['host GB']:.1f}"
        lines.append([r["kept"], str(r["ranks"]), r["tier"], *sizes])
    return markdown(lines, left=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=count, nargs="+", default=[1, 2, 8])
    parser.add_argument("--layers", type=count, default=LLAMA_70B["num_hidden_layers"])
    parser.add_argument("--lora", type=count, default=64, help="rank of the adapters")
    parser.add_argument("--base", nargs="+", default=list(METHODS), choices=METHODS, help="how it is kept")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    args = parser.parse_args()
    lm = model_of({**LLAMA_70B, "num_hidden_layers": args.layers})
    rows = []
    for kept in args.base:
        tuning = tuning_of(lm, kept, args.lora)
        for ranks in args.ranks:
            for tier in ("device", "host"):
                rows.append(row_of(tuning, SizeCase(kept, ranks, tier)))
                print(table(rows[-1:]).splitlines()[-1], f"{rows[-1]['seconds']:.0f} s", flush=True)
    print(f"\n{table(rows)}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
