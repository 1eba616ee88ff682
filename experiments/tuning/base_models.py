"""The model directory that `model=` names, made where it does not exist yet."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from experiments.data.builtin import text_files
from experiments.data.model_files import read_model_config
from experiments.data.tokenizer import ByteTokenizer, DirectoryTokenizer, open_directory
from experiments.lib.checks import ConfigError, attempt
from experiments.lib.config import (
    AdamWConfig,
    HardwareConfig,
    MeshConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
    StrategyConfig,
)
from experiments.lib.files import (
    DamagedError,
    commit_folder,
    differences,
    digests_of,
    read_record,
    write_record,
)
from experiments.lib.folder import STOPPED, identity_of
from experiments.lib.launch import CPU_RANKS, Job, start
from experiments.tuning import tasks
from experiments.tuning.config import FinetuneConfig, FinetuneDataConfig, MethodConfig, ObjectiveConfig
from experiments.tuning.lm import LanguageModel, check_weights, from_config, from_directory
from experiments.tuning.tasks import warming_files
from experiments.tuning.tuning import check_method
from experiments.tuning.vision_models import TINY, write_model
from fnshard.errors import report
from fnshard.launcher.local import under_launcher

BASES = Path("outputs", "bases")
PRETRAINED = "stdlib"  # the tiny one, after PRETRAINING
PRETRAINING: Mapping[str, Any] = {  # settings of its run
    "steps": 300, "held_out_every": 150, "save_every": 100, "sample_tokens": 64, "prompt": "def ",
}  # fmt: skip
WARMING: Mapping[str, Any] = {"steps": 200, "held_out_every": 100, "save_every": 100, "sample_tokens": 8}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")  # of a model on the hub: organisation and name
EXPORTED = "model"  # in a run's folder: the whole model, exported
RANDOM: Mapping[str, Mapping[str, int]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2},
    "100m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
             "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 16384},
    "tiny-moe": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8,
                 "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}  # fmt: skip


def directory_of(config: FinetuneConfig) -> str:
    """The directory of the configuration's model.

    Raises:
        ConfigError: a package that fine-tuning needs is not installed; as `open_model`; a method that the
            model cannot have.
    """
    if config.model in RANDOM or config.model in TINY:
        check_installed()
        path = _random(config.model, config.run.seed)
    else:
        path = directory_of_model(config.model)
    _check_fit(config, open_model(path)[0])
    return str(path.resolve())


def check_pretrained(config: FinetuneConfig) -> None:
    """Refuse what the base that a run makes first cannot have, before that run.

    Raises:
        ConfigError: as `directory_of`.
    """
    check_installed()
    _check_fit(config, from_config(_decoder_config(RANDOM["tiny"])))


def _check_fit(config: FinetuneConfig, lm: LanguageModel) -> None:
    check_method(config, lm)
    if lm.context is not None and config.data.context > lm.context:
        raise ConfigError(
            f"model={config.model}: data.context={config.data.context}, and it was made for {lm.context} "
            f"positions. Fix: data.context={lm.context}."
        )


def open_model(path: str | Path) -> tuple[LanguageModel, DirectoryTokenizer]:
    """Open a model directory before any rank does: all that does not fit together shows here.

    Raises:
        ConfigError: it holds no model that can be used here, no tokenizer, weights of another model, or a
            tokenizer with more ids than the model has rows.
    """
    wrong: list[str] = []
    lm = attempt(partial(from_directory, path), wrong)
    tokenizer, config = None, Path(path) / "config.json"
    # A tokenizer is opened by config.json, too: what is wrong with it is said once.
    if lm is not None or not config.is_file() or attempt(partial(read_model_config, config.parent), []):
        tokenizer = attempt(partial(open_directory, path), wrong)
    if lm is not None:
        attempt(partial(check_weights, path, lm), wrong)
    if lm is not None and tokenizer is not None and tokenizer.vocab > lm.vocab:
        ids, fix = tokenizer.vocab - 1, "the tokenizer that the model was made with."
        line = f"its tokenizer has ids up to {ids}, its embedding {lm.vocab} rows"
        wrong.append(report(f"model={path}:", [line], fix))
    if wrong:
        raise ConfigError("\n".join(wrong))
    return lm, tokenizer


def check_installed() -> None:
    """Refuse to go on without the packages that language models need."""
    if missing := [name for name in ("transformers", "datasets", "jinja2") if find_spec(name) is None]:
        raise ConfigError(report("not installed:", missing, "pip install 'fnshard[finetune]'."))


def directory_of_model(model: str) -> Path:
    """A directory, or that of a model of the hub that was downloaded before."""
    check_installed()
    return Path(model) if Path(model).is_dir() else downloaded(model)


def downloaded(name: str) -> Path:
    """The directory of a model of the hub in the local Hugging Face cache; nothing is fetched."""
    known = f"a model directory, or {', '.join([PRETRAINED, *RANDOM, *TINY])}"
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


def _random(name: str, seed: int) -> Path:
    """A random model of bytes, in a directory; made once."""
    sizes = RANDOM.get(name) or TINY[name]
    final = (BASES / f"{name}-{seed}-{_digest(dict(sizes))}").resolve()
    if _is_whole(final):
        return final
    from transformers.utils import logging

    logging.disable_progress_bar()
    final.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{name}-"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        write_model(name, aside) if name in TINY else _write_decoder(sizes, aside)
    aside.chmod(0o755)  # not for us alone
    write_record(_digests(final), digests_of(aside), durable=True)
    commit_folder(aside, final)
    shutil.rmtree(aside, ignore_errors=True)  # where somebody else was quicker
    return final


def _digests(folder: Path) -> Path:
    """Return the file that says what was written into a folder of a base, next to it."""
    return folder.with_name(f"{folder.name}.digests.json")


def _is_whole(folder: Path) -> bool:
    """Return whether a base is there; one that is not what was written is deleted, and made anew."""
    if not folder.is_dir():
        return False
    try:
        known = read_record(_digests(folder))
        wrong = [] if known is None else differences(folder, known, read_all=True)  # None: an older version's
    except DamagedError as error:
        wrong = [str(error)]
    if not wrong:
        return True
    print(
        f"{folder} is not what was written ({'; '.join(wrong)}): it is made anew.",
        file=sys.stderr,
        flush=True,
    )
    # Another process may read it, or be faster: it keeps what it has opened, and finds all of it or none.
    aside = folder.with_name(f"{folder.name}.{uuid4().hex[:8]}.partial")
    with suppress(FileNotFoundError):
        folder.rename(aside)
    _digests(folder).unlink(missing_ok=True)
    shutil.rmtree(aside, ignore_errors=True)
    return False


def _write_decoder(sizes: Mapping[str, int], folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(_decoder_config(sizes)).save_pretrained(folder)
    ByteTokenizer().save(folder)


def _decoder_config(sizes: Mapping[str, int]) -> Any:
    """A Llama; of experts a Qwen3-MoE."""
    from transformers import AutoConfig

    tokenizer = ByteTokenizer()
    special = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos, "pad_token_id": tokenizer.pad}
    sizes = {"vocab_size": tokenizer.vocab, "max_position_embeddings": 2048, **sizes}
    kind = "qwen3_moe" if "num_experts" in sizes else "llama"
    return AutoConfig.for_model(kind, **sizes, tie_word_embeddings=False, **special)


def pretrained(config: FinetuneConfig, job: Job) -> str:
    """The directory of the tiny model after a short run on functions of the standard library."""
    of = [dict(RANDOM["tiny"]), sys.version]  # another Python's text is another base
    return _tuned_once(config, job, PRETRAINED, "tiny", PRETRAINING, text_files, of)


def warmed(config: FinetuneConfig, base: str, job: Job) -> str:
    """The directory of a base that a short run has shown the built-in tasks, and a careless way to answer
    them: some 15% are right."""
    of = [Path(tasks.__file__).read_text()]
    return _tuned_once(config, job, "tasks", base, WARMING, warming_files, of)


def _tuned_once(
    config: FinetuneConfig, job: Job, name: str, model: str, settings: Mapping[str, Any],
    files: Callable[[Path], tuple[Path, Path]], of: list[Any],
) -> str:  # fmt: skip
    """The directory of what a run of its own makes of a model; made once, and resumed where it was cut off.

    It runs on two ranks of a CPU or on one device, whatever the mesh of `config`.

    Args:
        files: writes what it learns from, and what is held out.
        of: what it depends on besides its configuration.
    """
    shard = CPU_RANKS if config.run.device == "cpu" else 1
    like = {name: getattr(config.run, name) for name in ("seed", "backend", "device")}
    first = FinetuneConfig(
        method=MethodConfig(name="full"), objective=ObjectiveConfig(), strategy=StrategyConfig(),
        precision=PrecisionConfig(), optimizer=AdamWConfig(),
        schedule=ScheduleConfig(warmup=0.06, floor=0.05), run=RunConfig(**settings, **like),
        hardware=HardwareConfig(), mesh=MeshConfig(shard=shard), model=model, export="merged",
        data=FinetuneDataConfig(rows=16, too_long="truncate"),
    )  # fmt: skip
    folder = (BASES / f"{name}-{_digest([identity_of(first), *of])}").resolve()
    if _is_whole(folder / EXPORTED):
        return str(folder / EXPORTED)
    if under_launcher():
        raise ConfigError(
            f"the base {name!r} is made by a job of its own, which torchrun's ranks cannot start. Fix: run "
            "`python -m experiments.finetune` without it once, or name a model directory."
        )
    print(f"no model is named: a run of some minutes first makes a small one, once, in {folder}", flush=True)
    train, held_out = map(str, files(folder))
    first = replace(first, data=replace(first.data, train=train, held_out=held_out))
    if start(job, first, folder, [], chosen=True, makes=f"the base {name!r}") == STOPPED:
        raise SystemExit(0)
    write_record(_digests(folder / EXPORTED), digests_of(folder / EXPORTED), durable=True)
    return str(folder / EXPORTED)


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
