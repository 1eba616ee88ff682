"""The model directory that `model=` names, made where it does not exist yet."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from experiments.configs.machine import ranks_of
from experiments.configs.train import (
    AdamWConfig,
    ConfigError,
    HardwareConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
    StrategyConfig,
)
from experiments.data.builtin import text_files
from experiments.data.tokenizer import Tokenizer, byte_tokenizer, open_directory
from experiments.finetune.config import FinetuneConfig, FinetuneDataConfig, MethodConfig, ObjectiveConfig
from experiments.finetune.lm import LanguageModel, from_directory
from experiments.training.resume import identity_of
from fnshard.errors import report

BASES = Path("outputs", "bases")
PRETRAINED = "stdlib"  # the tiny one, after PRETRAINING
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")  # of a model on the hub: organisation and name
PRETRAINING: Mapping[str, Any] = {  # of the tiny one; settings of its run
    "steps": 300, "held_out_every": 150, "save_every": 100, "sample_tokens": 64, "prompt": "def ",
}  # fmt: skip
EXPORTED = "model"  # in a run's folder: the whole model, exported
RANDOM: Mapping[str, Mapping[str, int]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2},
    "100m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
             "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 16384},
}  # fmt: skip


def directory_of(config: FinetuneConfig, pretrain: Callable[[FinetuneConfig, Path], None]) -> str:
    """The directory of the configuration's model.

    Raises:
        ConfigError: a package that fine-tuning needs is not installed.
    """
    if missing := [name for name in ("transformers", "datasets", "jinja2") if find_spec(name) is None]:
        raise ConfigError(report("not installed:", missing, "pip install 'fnshard[finetune]'."))
    if config.model == PRETRAINED:
        return str(_pretrained(config, pretrain))
    if config.model in RANDOM:
        return str(_random(config.model, config.run.seed))
    path = Path(config.model)
    if not path.is_dir():
        path = downloaded(config.model)
    _check_fit(config, from_directory(path), open_directory(path))
    return str(path.resolve())


def downloaded(name: str) -> Path:
    """The directory of a model of the hub in the local Hugging Face cache; nothing is fetched."""
    known = f"a model directory, or {', '.join([PRETRAINED, *RANDOM])}"
    if not HUB_ID.fullmatch(name):
        raise ConfigError(f"model={name}: no directory is there. Fix: {known}.")
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise ConfigError(
            report(
                f"model={name}: no directory is there, and no model of this name in the Hugging Face cache "
                f"({constants.HF_HUB_CACHE}); a run fetches nothing.",
                fix=f"download it first with `hf download {name}`; or {known}.",
            )
        ) from error


def _check_fit(config: FinetuneConfig, lm: LanguageModel, tokenizer: Tokenizer) -> None:
    """Refuse token ids and positions that the model has no rows for."""
    wrong, fixes = [], []
    if tokenizer.vocab > lm.vocab:
        wrong.append(f"its tokenizer has ids up to {tokenizer.vocab - 1}, its embedding {lm.vocab} rows")
        fixes.append("the tokenizer that the model was made with.")
    if lm.context is not None and config.data.context > lm.context:
        wrong.append(f"data.context={config.data.context}, and it was made for {lm.context} positions")
        fixes.append(f"data.context={lm.context}.")
    if wrong:
        raise ConfigError(report(f"model={config.model}:", wrong, " ".join(fixes)))


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
    config = LlamaConfig(
        **sizes, max_position_embeddings=2048, tie_word_embeddings=False, bos_token_id=tokenizer.bos,
        eos_token_id=tokenizer.eos, pad_token_id=tokenizer.pad,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    final.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{name}-"))
    model.save_pretrained(aside)
    tokenizer.save(aside)
    aside.chmod(0o755)  # not for us alone
    try:
        os.replace(aside, final)
    except OSError:  # somebody else was quicker
        shutil.rmtree(aside, ignore_errors=True)
    return final


def _pretrained(config: FinetuneConfig, pretrain: Callable[[FinetuneConfig, Path], None]) -> Path:
    """The tiny model, trained on the functions of the standard library; made once, on whatever mesh, and gone
    on with if it was cut off."""
    job = pretraining(config)
    text = hashlib.sha256(Path(job.data.train).read_bytes()).hexdigest()  # another Python's is another base
    known = f"{PRETRAINED}-{_digest([text, job.run.steps, job.run.seed, MADE])}"
    made = sorted(p for p in BASES.resolve().glob(f"{known}-*/{EXPORTED}") if (p / "config.json").exists())
    if made:
        return made[0]
    folder = BASES.resolve() / f"{known}-{_digest(identity_of(job))}"
    print(f"model={PRETRAINED}: pre-training a tiny base first, once, in {folder}", flush=True)
    began = time.monotonic()
    pretrain(job, folder)
    print(f"model={PRETRAINED}: made in {time.monotonic() - began:.0f} s, besides what follows", flush=True)
    return folder / EXPORTED


MADE = 1  # another number where `pretraining` makes another base


def pretraining(config: FinetuneConfig) -> FinetuneConfig:
    ranks = ranks_of(config)
    like = {n: getattr(config.run, n) for n in ("seed", "backend", "device", "timeout_s", "max_restarts")}
    run = RunConfig(**PRETRAINING, **like)
    train, held_out = text_files((Path("outputs") / "data").resolve())
    data = FinetuneDataConfig(
        train=str(train), held_out=str(held_out), context=256, rows=_multiple(16, ranks),
        held_out_rows=_multiple(32, ranks), too_long="truncate",
    )  # fmt: skip
    return FinetuneConfig(
        method=MethodConfig(name="full"), objective=ObjectiveConfig(), strategy=StrategyConfig(),
        precision=PrecisionConfig(), optimizer=AdamWConfig(),
        schedule=ScheduleConfig(warmup=0.06, floor=0.05), run=run, hardware=HardwareConfig(),
        mesh=config.mesh, data=data, model="tiny", export="merged",
    )  # fmt: skip


def _multiple(least: int, of: int) -> int:
    return -(-least // of) * of


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
