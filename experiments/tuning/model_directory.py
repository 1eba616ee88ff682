"""Model directories in the Hugging Face format: the one that `model=` names, and the one that a run writes.

The first is a local directory, one of the Hugging Face cache, or a base that `experiments.bases` has made.
The second has adapters or the whole model.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import fnshard as fs
from experiments import python_path
from experiments.data.model_files import attention_of, read_model_config
from experiments.data.prepared import open_prepared
from experiments.data.tokenizer import CONFIG as TOKENIZER_CONFIG
from experiments.data.tokenizer import TEMPLATE_FILE, DirectoryTokenizer, open_directory
from experiments.lib.checks import ConfigError, attempt
from experiments.lib.config import AUTO
from experiments.lib.files import read_json, write_json
from experiments.tuning.config import FinetuneConfig
from experiments.tuning.lm import LanguageModel, check_weights, from_directory
from experiments.tuning.method import MethodPlan, check_method
from fnshard.errors import LaunchError, report
from fnshard.hf.reading import read_config
from fnshard.launcher.local import under_launcher
from fnshard.launcher.rank import end_with_parent

EXPORTED, ADAPTERS = "model", "adapters"  # folders in a run's folder
KEPT = Path("outputs", "bases")  # the bases that `experiments.bases` makes
BASES = (
    "stdlib", "tasks", "tiny", "100m", "tiny-moe", "tiny-llava", "tiny-smolvlm", "tiny-qwen2-vl",
    "tiny-qwen2.5-vl",
)  # fmt: skip
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")  # the organisation and the name of a model on the hub


def directory_of(config: FinetuneConfig) -> str:
    """Return the directory of the configuration's model.

    Raises:
        ConfigError: `find_directory` or `open_model` refuses it, the model cannot have the method, or the
            context is longer than it was made for.
    """
    path = find_directory(config.model)
    lm, _ = open_model(path)
    check_method(config, lm)
    if lm.context is not None and config.data.context > lm.context:
        raise ConfigError(
            f"model={config.model}: data.context={config.data.context}, and it was made for {lm.context} "
            f"positions. Fix: data.context={lm.context}."
        )
    return str(path.resolve())


def check_teacher(model: str, teacher: str, context: int) -> None:
    """Check that a teacher has the same tokens as its student.

    Raises:
        ConfigError: its model cannot be used, or has another vocabulary or a shorter context.
    """
    lm, teacher_tokenizer = open_model(teacher)
    vocab, other = open_directory(model).hf.get_vocab(), teacher_tokenizer.hf.get_vocab()
    if vocab != other:
        # Words that only one of them has, or else those of different ids.
        words = sorted(vocab.keys() ^ other.keys())
        if not words:
            words = [word for word, number in vocab.items() if other[word] != number]
        differ = [f"{word!r:.40}" for word in words[:5]]
        raise ConfigError(
            report(
                f"objective.teacher={teacher}: its vocabulary is another one than that of model={model} "
                f"({len(other)} and {len(vocab)} tokens), so that its probabilities are of other tokens:",
                differ,
                "a teacher with the model's tokenizer; or objective=sft on texts that the teacher wrote.",
            )
        )
    if lm.context is not None and context > lm.context:
        raise ConfigError(
            f"objective.teacher={teacher}: data.context={context}, and it was made for {lm.context} "
            f"positions. Fix: data.context={lm.context}."
        )


def keep_base(name: str, *settings: str) -> str:
    """Return the directory of a base. If there is none yet, `python -m experiments.bases` makes it.

    Args:
        settings: settings of the run that trains it, KEY=VALUE.

    Raises:
        ConfigError: this process is a rank of torchrun's, which starts no run, or a package that language
            models need is not installed.
        LaunchError: the command failed, and has said why.
    """
    check_packages()
    folder = (KEPT / name).resolve()
    if not folder.is_dir():
        command = ["-m", "experiments.bases", name, *settings]
        if under_launcher():
            raise ConfigError(
                f"the base {name!r} is made by a command that torchrun's ranks cannot start. Fix: "
                f"`python {' '.join(command)}` once, or name a model directory."
            )
        print(f"model={name}: `python {' '.join(command)}` makes it, once, in {folder}", flush=True)
        finished = subprocess.run(
            [sys.executable, *command], env={**os.environ, "PYTHONPATH": python_path()},
            preexec_fn=partial(end_with_parent, signal.SIGTERM, os.getpid()),
        )  # fmt: skip
        if finished.returncode or not folder.is_dir():
            raise LaunchError(f"the base {name!r} was not made. Fix: the same command goes on with it.")
    return str(folder)


def check_packages() -> None:
    """Check that the packages which language models need are installed."""
    if missing := [name for name in ("transformers", "datasets", "jinja2") if find_spec(name) is None]:
        raise ConfigError(report("not installed:", missing, "pip install 'fnshard[finetune]'."))


def find_directory(model: str, key: str = "model") -> Path:
    """Return a model's directory: the one of this name, that of a base, or that of a model of the hub.

    Nothing is fetched, so a base has to be made before, and a model of the hub downloaded.

    Args:
        key: the key of the configuration that names it, for errors.

    Raises:
        ConfigError: there is none, or a package that language models need is not installed.
    """
    check_packages()
    for folder in (Path(model), KEPT / model):
        if folder.is_dir():
            return folder
    known = f"a model directory, or {', '.join(BASES)}, which `python -m experiments.bases NAME` makes"
    if not HUB_ID.fullmatch(model):
        raise ConfigError(f"{key}={model}: no directory is there. Fix: {known}.")
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise ConfigError(
            report(
                f"{key}={model}: no directory is there, and no model of this name in the Hugging Face cache "
                f"({constants.HF_HUB_CACHE}); a run fetches nothing.",
                fix=f"download it first with `hf download {model}`; or {known}.",
            )
        ) from error


def open_model(path: str | Path) -> tuple[LanguageModel, DirectoryTokenizer]:
    """Open a model directory before any rank does, so that all its mistakes are found here, in one error.

    Raises:
        ConfigError: it holds no model that can be used here, no tokenizer, weights of another model, or a
            tokenizer with more ids than the model has rows.
    """
    wrong: list[str] = []
    lm = attempt(partial(from_directory, path), wrong)
    tokenizer, config = None, Path(path) / "config.json"
    # Transformers opens a tokenizer by config.json, too, and what is wrong with that file is said once.
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


# ------------------------------------------------------------------ the directory that a run writes


def export(
    config: FinetuneConfig,
    planned: MethodPlan,
    tokenizer: DirectoryTokenizer,
    state: fs.TrainState,
    step: Any,
    folder: Path,
) -> list[str]:
    """Write what the configuration asks for, in the Hugging Face format. All ranks call it together.

    Returns:
        A line for each thing that was written.
    """
    tuning, mesh = planned.tuning, step.mesh
    lines, kinds = [], config.export
    if kinds == AUTO:
        has_no_peft_format = tuning.has_expert_adapters or config.objective.kind.exported is not None
        kinds = "merged" if tuning.lora is None or has_no_peft_format else "adapters"
    if kinds in ("adapters", "both") and tuning.lora is not None:
        fs.adapters.save(state, folder / ADAPTERS, tuning.lora, base=config.model)
        if mesh.rank == 0:
            tokenizer.save(folder / ADAPTERS)
        lines.append(f"adapters, as PEFT reads them: {folder / ADAPTERS}")
    if kinds in ("merged", "both"):
        blocks, specs = _merge_adapters(planned, state)

        # The model is written to a folder that is renamed once it is complete. An attempt that was cut off
        # may have left the folder, and no rank writes before it is removed.
        final = folder / EXPORTED
        aside = folder / f".{EXPORTED}.writing"
        if mesh.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        step.gather_strings("")
        dtype = read_stored_dtype(config.model)
        if config.objective.kind.exported is None:
            fs.hf.save(blocks, aside, specs, mesh, model=tuning.lm.model, config=config.model, dtype=dtype)
        else:
            score = None
            if config.objective.kind.score:
                score = [tree["score"]["weight"] for tree in (state.params, planned.plan.specs)]
            save_as_class(config, tuning.lm, blocks, specs, score, aside, mesh, dtype)
        if mesh.rank == 0:
            tokenizer.save(aside)  # with the chat template of the training data
            if config.objective.name == "reward" and not open_prepared(config.data.train).chats:
                write_joined_template(aside, tokenizer)
            _replace_folder(aside, final)
        lines.append(f"the tuned model, as transformers reads it: {final}")
    return lines


def save_as_class(
    config: FinetuneConfig, lm: LanguageModel, blocks: Any, specs: Any, score: list[Any] | None,
    folder: Path, mesh: fs.Mesh, dtype: torch.dtype | None,
) -> None:  # fmt: skip
    """Write a tuned trunk, and the head beside it, as a class of transformers that has such a head.

    Args:
        score: the head's block and its spec; None if there is no head.

    Raises:
        ConfigError: transformers has no such class of this architecture.
    """
    import transformers

    kind, classes = config.objective.kind.exported, config.objective.classes
    auto = getattr(transformers, f"Auto{'' if kind == 'Model' else 'Model'}{kind}")
    values = read_model_config(Path(config.model))
    if score is not None:
        names = list(classes or ("score",))
        values.id2label, values.label2id = dict(enumerate(names)), {n: i for i, n in enumerate(names)}
    with fs.deferred():
        model = auto.from_config(values, attn_implementation=attention_of(values), trust_remote_code=False)

    # Each leaf of that class is one of the tuned model, the head's weights, or zeros.
    trunk = f"{lm.model.base_model_prefix}."
    tree, layouts, zeros = {}, {}, {}
    for name, leaf in fs.make_functional(model)[1].items():
        source = name if name in blocks else trunk + name
        if source in blocks:
            tree[name], layouts[name] = blocks[source], specs[source]
        elif score is not None and name.endswith(".weight"):
            tree[name], layouts[name] = score
        else:  # a bias, which the head here lacks
            zeros[name] = torch.zeros(leaf.shape)
    if zeros:
        layouts |= fs.match_specs(zeros, [("*", fs.LayoutSpec())])
    tree |= {name: zero.to(mesh.device) for name, zero in zeros.items()}
    written = {**values.to_dict(), "architectures": [type(model).__name__]}
    fs.hf.save(tree, folder, layouts, mesh, model=model, config=written, dtype=dtype)


def write_joined_template(folder: Path, tokenizer: DirectoryTokenizer) -> None:
    """Write a chat template that joins texts as they are, as a reward model of texts has learned them."""
    joined = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    text = ("{{ bos_token }}" if tokenizer.begin else "") + joined
    (folder / TEMPLATE_FILE).write_text(text, encoding="utf-8")
    values = read_json(folder / TOKENIZER_CONFIG)
    write_json(folder / TOKENIZER_CONFIG, {n: v for n, v in values.items() if n != "chat_template"})


def _replace_folder(written: Path, final: Path) -> None:
    """Rename a folder. What has the name already is renamed itself, as it may be the only copy."""
    if os.path.lexists(final):
        others = (final.with_name(f"{final.name}.{n}") for n in itertools.count(1))
        os.rename(final, next(path for path in others if not os.path.lexists(path)))
    os.rename(written, final)


def read_stored_dtype(directory: str) -> torch.dtype | None:
    """Return the dtype of weights that a model directory's configuration names; None if it names none."""
    config = read_config(Path(directory))
    named = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."), None)
    return named if isinstance(named, torch.dtype) else None


def _merge_adapters(planned: MethodPlan, state: fs.TrainState) -> tuple[Any, Any]:
    """Return the model with its adapters merged into it, and its specs."""
    tuning, specs = planned.tuning, planned.plan.specs
    if tuning.lora is not None:
        return fs.adapters.merge(state, tuning.lora)
    part = tuning.models[0]
    return (state.params[part], specs[part]) if part else (state.params, specs)
