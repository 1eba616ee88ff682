"""Model directories are data: transformers opens them so that nothing in them runs, and numbers are checked.

A directory may name code (`auto_map`), kernels of the hub (`attn_implementation: owner/name`), pickles and
other directories. So everything that decides which code runs is passed by us, always.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.lib.checks import ConfigError
from experiments.lib.files import first_few, read_json
from fnshard.errors import report

MEND = "take the config.json that the model was saved with."
LOCAL: Mapping[str, Any] = {"local_files_only": True, "trust_remote_code": False}
# Arguments of `from_pretrained` for weights: pickles are refused. Pass `config=read_model_config()`, too.
WEIGHTS: Mapping[str, Any] = {**LOCAL, "use_safetensors": True}

# Whole numbers of config.json that make modules or lists, and the most that they may be. A number far beyond
# any model's would take hours to build, or would not fit. The first kind that matches a name counts.
MOST = 1 << 24
MOST_BY_NAME: tuple[tuple[re.Pattern[str], float], ...] = (
    (re.compile(r"(^|_)(ids?|index|seed|theta|freq|base|parameters|params|flops)$"), math.inf),
    (re.compile(r"layers?$|(^|_)depths?$"), 1024),
    (re.compile(r"experts$"), 1 << 13),
    (re.compile(r"labels$"), 1 << 15),
    (re.compile(r""), MOST),
)
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
SIZES = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size", "head_dim", "embed_dim",
    "num_attention_heads", "num_key_value_heads", "num_heads", "n_embd", "n_head", "n_inner", "n_positions",
    "n_ctx", "max_position_embeddings", "d_model", "ffn_dim", "num_experts", "num_local_experts",
    "num_experts_per_tok", "sliding_window",
)  # fmt: skip
EXPERTS = ("num_experts", "num_local_experts")
OFF = (*EXPERTS, "num_experts_per_tok", "sliding_window")  # those that may be 0, where there are none
BOUNDS: Mapping[str, float] = {  # what numbers above 0 have to be below
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"), 1.0),
    "rope_theta": math.inf,
}


def read_model_config(folder: Path) -> Any:
    """Read the config.json of a model directory as transformers has it.

    No code of the directory runs, and attention is torch's own or eager, whatever the file says.

    Raises:
        ConfigError: it is damaged, or of no kind that transformers knows.
    """
    # Numbers are checked first, since transformers may build lists of as many elements as they say.
    wrong = wrong_numbers(folder / "config.json")
    if wrong:
        raise ConfigError(report(f"{folder / 'config.json'} cannot be used:", first_few(wrong, 10), MEND))
    from transformers import AutoConfig

    # What the file says about kernels is overwritten, since a name of the hub would be fetched and run.
    try:
        config = AutoConfig.from_pretrained(folder, **LOCAL)
        config._attn_implementation = attention_of(config)
        config._experts_implementation = None
    except Exception as error:  # the file may hold anything, so errors are of every kind
        # The second line of an error says what is wrong with the field that the first one names.
        lines = str(error).strip().splitlines()[:2]
        what = ": ".join([type(error).__name__, *(said for line in lines if (said := line.strip(" :")))])
        raise ConfigError(
            report(f"{folder / 'config.json'} cannot be used:", [f"{what:.400}"], MEND)
        ) from error
    return config


def check_reward_model(folder: Path) -> None:
    """Check that transformers reads a directory's weights from its own safetensors files, and by torch alone.

    Raises:
        ConfigError: it holds adapters, whose base is somewhere else, codes that other libraries decode, or
            pickles.
    """
    values = read_json(folder / "config.json")
    wrong = wrong_numbers(folder / "config.json")
    if (folder / "adapter_config.json").exists():
        wrong.append("it holds adapters, which name a base somewhere else: merge them, merge_and_unload")
    if values.get("quantization_config") is not None:
        wrong.append("its weights are codes (quantization_config): save it in bfloat16")
    if values.get("transformers_weights") is not None:
        wrong.append("transformers_weights names a file of weights: leave it out")
    if not any(folder.glob("*.safetensors")):
        wrong.append(
            "there are no *.safetensors files, and pickles are not read: save_pretrained writes them"
        )
    if wrong:
        raise ConfigError(report(f"objective.reward={folder}:", wrong))


def attention_of(config: Any) -> str | None:
    """Return the attention of a configuration's model: eager if it says so, else None for transformers'
    choice.

    transformers chooses among torch's own implementations, while a name of the hub in the file would be
    fetched and run.
    """
    return "eager" if getattr(config, "_attn_implementation", None) == "eager" else None


def wrong_numbers(path: Path) -> list[str]:
    """Return what is wrong with a config.json: sizes, layers and heads out of bounds, or dtypes that torch
    lacks."""
    try:
        values = json.loads(path.read_bytes())
        fields = dict(_flatten_fields(values)) if isinstance(values, dict) else {}
    except RecursionError:
        return ["it is nested too deeply"]
    except (OSError, ValueError) as error:
        return [f"it is no JSON ({error})"]
    if not isinstance(values, dict):
        return [f"expected an object, got {type(values).__name__}"]
    import torch

    wrong: list[str] = []
    for key, value in fields.items():
        name = key.rpartition(".")[2]
        if value is None:
            continue
        # Every number has an upper bound, by its name; those of sizes and layers have a lower one, too. A
        # number in a list has the bound of the list's name.
        most = next(most for kind, most in MOST_BY_NAME if kind.search(re.sub(r"(\[\d+\])+$", "", name)))
        if name in LAYERS + SIZES:
            least = int(name not in OFF)
            if type(value) is not int or not least <= value <= most:
                wrong.append(f"{key}={_shorten(value)}: a whole number from {least} to {most}")
        elif name not in BOUNDS and type(value) is int and abs(value) > most:
            wrong.append(f"{key}={_shorten(value)}: a whole number up to {most}")
        elif name in BOUNDS and not (type(value) in (int, float) and 0 < value < BOUNDS[name]):
            wrong.append(f"{key}={_shorten(value)}: a number between 0 and {BOUNDS[name]:g}")
        elif name in ("dtype", "torch_dtype") and value != "auto":
            known = isinstance(value, str) and getattr(torch, value.removeprefix("torch."), None)
            if not isinstance(known, torch.dtype):
                wrong.append(f"{key}={_shorten(value)}: a dtype of torch's, as bfloat16")
        # No token can go to more experts than there are.
        if name == "num_experts_per_tok" and not wrong:
            experts = [fields.get(key.removesuffix(name) + each) for each in EXPERTS]
            if any(type(count) is int and (count < value or value == 0 < count) for count in experts):
                wrong.append(f"{key}={value}: there are {max(filter(None, experts), default=0)} experts")
    return wrong


def _flatten_fields(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of a configuration, and of the objects and lists in it, by dotted names."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flatten_fields(value, f"{prefix}{name:.40}.")
            continue
        if isinstance(value, list):
            yield from _flatten_fields({f"{name:.40}[{n}]": each for n, each in enumerate(value)}, prefix)
        yield f"{prefix}{name:.40}", value


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers while the block runs: it prints errors alone, and no progress bars."""
    from transformers.utils import logging

    level, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
