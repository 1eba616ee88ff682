"""Bases: the model directory that `model=` means, made where it is not there yet."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from experiments.config import AdamWConfig, ConfigError, ScheduleConfig, StrategyConfig
from experiments.data.tokenizer import byte_tokenizer, load_tokenizer
from experiments.finetune.config import FinetuneConfig, FinetuneDataConfig, MethodConfig, ObjectiveConfig
from experiments.finetune.lm import from_directory
from experiments.finetune.stdlib import text_files

BASES = Path("outputs", "bases")
PRETRAINED = "stdlib"  # the tiny one, after PRETRAINING
WHOLE = "model"  # of a run's folder: what it exports of a whole model
RANDOM: Mapping[str, Mapping[str, int]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2},
    "100m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
             "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 16384},
}  # fmt: skip


def directory_of(config: FinetuneConfig, pretrain: Callable[[FinetuneConfig, Path], None]) -> str:
    """The directory of the configuration's model.

    Args:
        config: placed on this machine.
        pretrain: runs a job with its results in a folder.

    Raises:
        ConfigError: no model directory, or one that is not whole.
    """
    if config.model == PRETRAINED:
        return str(_pretrained(config, pretrain))
    if config.model in RANDOM:
        return str(_random(config.model, config.run.seed))
    path = Path(config.model)
    if not path.is_dir():
        known = ", ".join([PRETRAINED, *RANDOM])
        raise ConfigError(f"model={config.model}: no directory is there. Fix: a model directory, or {known}.")
    from_directory(path)
    load_tokenizer(path)
    return str(path.resolve())


def _random(name: str, seed: int) -> Path:
    """A random Llama of bytes, in a directory; made once."""
    final = (BASES / f"{name}-{seed}-{_digest(dict(RANDOM[name]))}").resolve()
    if final.is_dir():
        return final
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    tokenizer = byte_tokenizer()
    sizes = {"vocab_size": tokenizer.vocab, **RANDOM[name]}
    told = LlamaConfig(
        **sizes, max_position_embeddings=2048, tie_word_embeddings=False, bos_token_id=tokenizer.bos,
        eos_token_id=tokenizer.eos, pad_token_id=tokenizer.pad,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(told)
    final.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{name}-"))
    model.save_pretrained(aside)
    tokenizer.save(aside)
    try:
        os.replace(aside, final)
    except OSError:  # somebody else was quicker
        shutil.rmtree(aside, ignore_errors=True)
    return final


def _pretrained(config: FinetuneConfig, pretrain: Callable[[FinetuneConfig, Path], None]) -> Path:
    """The tiny model, trained on the functions of the standard library; made once, and gone on with if it
    was cut off."""
    asked = pretraining(config)
    values = dataclasses.asdict(asked)
    kept = {n: values["run"][n] for n in ("steps", "seed")}
    text = hashlib.sha256(Path(asked.data.train).read_bytes()).hexdigest()  # another Python's is another base
    told = _digest({**values, "run": kept, "mesh": {}, "data": text})
    folder = (BASES / f"{PRETRAINED}-{told}").resolve()
    if not (folder / WHOLE).is_dir():
        print(f"model={PRETRAINED}: pre-training a tiny base first, once, in {folder}", flush=True)
        pretrain(asked, folder)
    return folder / WHOLE


def pretraining(config: FinetuneConfig) -> FinetuneConfig:
    """The job that makes the base of this one: on the same ranks, on plain text."""
    run = dataclasses.replace(
        config.run, steps=PRETRAINING_STEPS, accumulate=1, held_out_every=PRETRAINING_STEPS // 2,
        device_gb=None, hardware="auto", disk_dir=None, resume="auto", prompt="def ", save_every=100,
    )  # fmt: skip
    train, held_out = text_files((Path("outputs") / "data").resolve())
    data = FinetuneDataConfig(str(train), str(held_out), context=256, rows=16, too_long="truncate")
    return dataclasses.replace(
        config, model="tiny", method=MethodConfig("full"), objective=ObjectiveConfig(),
        strategy=StrategyConfig("full_shard"), optimizer=AdamWConfig(lr=4e-3),
        schedule=ScheduleConfig(warmup=0.06, floor=0.05), data=data, run=run, export="merged",
    )  # fmt: skip


PRETRAINING_STEPS = 300


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
