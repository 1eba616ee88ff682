"""The model directory that `model=` names, made where it does not exist yet."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from experiments.configs.train import ConfigError
from experiments.data.tokenizer import Tokenizer, byte_tokenizer, open_directory
from experiments.finetune.config import FinetuneConfig
from experiments.finetune.lm import LanguageModel, from_directory
from fnshard.errors import report

BASES = Path("outputs", "bases")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")  # of a model on the hub: organisation and name
EXPORTED = "model"  # in a run's folder: the whole model, exported
RANDOM: Mapping[str, Mapping[str, int]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2},
    "100m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
             "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 16384},
}  # fmt: skip


def directory_of(config: FinetuneConfig) -> str:
    """The directory of the configuration's model.

    Raises:
        ConfigError: a package that fine-tuning needs is not installed.
    """
    if missing := [name for name in ("transformers", "datasets", "jinja2") if find_spec(name) is None]:
        raise ConfigError(report("not installed:", missing, "pip install 'fnshard[finetune]'."))
    if config.model in RANDOM:
        return str(_random(config.model, config.run.seed))
    path = Path(config.model)
    if not path.is_dir():
        path = downloaded(config.model)
    _check_fit(config, from_directory(path), open_directory(path))
    return str(path.resolve())


def downloaded(name: str) -> Path:
    """The directory of a model of the hub in the local Hugging Face cache; nothing is fetched."""
    known = f"a model directory, or {', '.join(RANDOM)}"
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


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
