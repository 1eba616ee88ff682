"""Make a model to try fine-tuning on, without fetching anything.

    python -m experiments.bases stdlib      # what `experiments.finetune` tunes where no model is named
    python -m experiments.bases tiny        # random weights

A base is made once and kept as a Hugging Face model directory, `outputs/bases/NAME`; `model=NAME` names it.
"stdlib" and "tasks" are trained by runs of `experiments.finetune`, which take further arguments, such as
`run.backend=eager`; a run that was cut off goes on.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from experiments import finetune
from experiments.data.builtin import write_text_files, write_warming_files
from experiments.data.tokenizer import TEMPLATE, ByteTokenizer
from experiments.lib.checks import ConfigError
from experiments.lib.compose import compose, exit_with
from experiments.lib.files import commit_folder, lock_folder, write_json
from experiments.lib.folder import STOPPED
from experiments.lib.launch import CPU_RANKS, device_of, find_accelerators, start
from experiments.tuning.model_directory import BASES, EXPORTED, KEPT

# {base: what it is trained from, what writes its text, the run's settings}. "tasks" has seen the built-in
# tasks and a careless way to answer them: some 15% are right, and rewards have something to choose from.
TRAINED = {
    "stdlib": ("tiny", write_text_files, ("run.steps=300", "run.held_out_every=150", "run.prompt='def '")),
    "tasks": (
        "stdlib",
        write_warming_files,
        ("run.steps=200", "run.held_out_every=100", "run.sample_tokens=8"),
    ),
}
RUN = (
    "method=full", "export=merged", "optimizer.lr=4e-3", "optimizer.weight_decay=0.1", "schedule.warmup=0.06",
    "schedule.floor=0.05", "data.rows=16", "data.too_long=truncate",
)  # fmt: skip


def main() -> None:
    """Answer a command line: a name, and arguments of the run that trains it."""
    names = [each for each in sys.argv[1:] if "=" not in each]
    if {"-h", "--help"} & {*names}:
        print(f"{__doc__}\nNames: {', '.join(BASES)}")
        return
    exit_with(lambda: make_base(names, [each for each in sys.argv[1:] if "=" in each]))


def make_base(names: Sequence[str], settings: Sequence[str]) -> None:
    """Make a base, and before it the one that it is trained from.

    Raises:
        ConfigError: there is none of this name.
    """
    if len(names) != 1 or names[0] not in BASES:
        raise ConfigError(f"{' '.join(names) or 'no name'}: one of {', '.join(BASES)}.")
    # Another process may be making a base, perhaps the same.
    KEPT.mkdir(parents=True, exist_ok=True)
    with wait_for_lock(KEPT):
        needed = [names[0]]
        while needed[0] in TRAINED:
            needed.insert(0, TRAINED[needed[0]][0])
        for name in needed:
            folder = (KEPT / name).resolve()
            if folder.is_dir():
                continue
            if name in TRAINED:
                train_base(name, folder, settings)
            else:
                write_base(name, folder)
            print(f"the base {name} is in {folder}", flush=True)


@contextmanager
def wait_for_lock(folder: Path) -> Iterator[None]:
    """Lock a folder while the block runs, after waiting for other processes that have the lock."""
    has_told = False
    while True:
        with lock_folder(folder) as has_lock:
            if has_lock:
                yield
                return
        if not has_told:
            print(f"another process makes a base in {folder}: waiting for it", flush=True)
        has_told = True
        time.sleep(1.0)


def train_base(name: str, folder: Path, settings: Sequence[str]) -> None:
    """Train a base by a run of `experiments.finetune`, on two ranks of a CPU or on one device."""
    base, write_files, recipe = TRAINED[name]
    composed = compose(finetune.COMMAND, [*RUN, *recipe, *settings])
    config, run = composed.config, folder.parent / "runs" / name
    device = device_of("run.device", config.run.device, find_accelerators())
    train, held_out = map(str, write_files(run))
    config = replace(
        config,
        model=str(folder.parent / base),
        mesh=replace(config.mesh, shard=CPU_RANKS if device == "cpu" else 1),
        data=replace(config.data, train=train, held_out=held_out),
    )
    # A run that was stopped goes on with the next command, and has exported nothing.
    if start(finetune.JOB, config, run, composed.overrides, chosen=True) == STOPPED:
        raise SystemExit(0)
    (run / EXPORTED).rename(folder)


# ------------------------------------------------------------------ random ones


RANDOM: Mapping[str, Mapping[str, int]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2},
    "100m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
             "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 16384},
    "tiny-moe": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8,
                 "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}  # fmt: skip

SIDE = 32  # pixels of a tile's side
_TEXT = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 1024}  # fmt: skip
_ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4}}
_TILES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
          "image_size": SIDE, "patch_size": 8}  # fmt: skip
_PATCHES = {"depth": 3, "num_heads": 4, "patch_size": 8}
_PIXELS = {"min_pixels": 16 * 16, "max_pixels": 64 * 64, "patch_size": 8, "merge_size": 2}
_QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_IDEFICS = ("<fake_token_around_image>", "<global-img>", "<image>")

# Models that see. By name: the model's type and its configuration's parts, its image processor, and its
# control tokens, of which the template writes those that are `shown` for an image.
SEEING: Mapping[str, Mapping[str, Any]] = {
    "tiny-llava": {
        "config": {"model_type": "llava", "text_config": {"model_type": "llama"},
                   "vision_config": {"model_type": "clip_vision_model", **_TILES}},
        "processor": {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": SIDE},
                      "crop_size": {"height": SIDE, "width": SIDE}},
        "tokens": ("<image>",), "shown": "<image>", "token": "<image>",
    },
    "tiny-smolvlm": {
        "config": {"model_type": "smolvlm", "text_config": {"model_type": "llama"}, "vision_config": _TILES,
                   "scale_factor": 2},
        "processor": {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 2 * SIDE},
                      "max_image_size": {"longest_edge": SIDE}},
        "tokens": (*_IDEFICS, *(f"<row_{r}_col_{c}>" for r in (1, 2) for c in (1, 2))), "shown": "<image>",
        "token": "<image>",
    },
    "tiny-qwen2-vl": {
        "config": {"model_type": "qwen2_vl", "text_config": _ROPE,
                   "vision_config": {**_PATCHES, "embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2}},
        "processor": {"image_processor_type": "Qwen2VLImageProcessor", **_PIXELS},
        "tokens": _QWEN, "shown": "<|vision_start|><|image_pad|><|vision_end|>", "token": "<|image_pad|>",
    },
    "tiny-qwen2.5-vl": {
        "config": {"model_type": "qwen2_5_vl", "text_config": _ROPE,
                   "vision_config": {**_PATCHES, "hidden_size": 64, "intermediate_size": 128,
                                     "out_hidden_size": 128, "window_size": 32,
                                     "fullatt_block_indexes": [2]}},
        "processor": {"image_processor_type": "Qwen2VLImageProcessor", **_PIXELS},
        "tokens": _QWEN, "shown": "<|vision_start|><|image_pad|><|vision_end|>", "token": "<|image_pad|>",
    },
}  # fmt: skip


def write_base(name: str, folder: Path) -> None:
    """Write a model with random weights, always the same, whose tokens are bytes.

    The directory is complete or absent.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{name}-"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        write = write_model if name in SEEING else write_decoder
        write(name, aside)
    aside.chmod(0o755)  # a folder of mkdtemp is readable by its owner alone
    commit_folder(aside, folder)
    shutil.rmtree(aside, ignore_errors=True)


def write_decoder(name: str, folder: Path) -> None:
    """Write a model of `RANDOM`: a Llama, or with experts a Qwen3-MoE."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer, sizes = ByteTokenizer(), RANDOM[name]
    special = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos, "pad_token_id": tokenizer.pad}
    sizes = {"vocab_size": tokenizer.vocab, "max_position_embeddings": 2048, **sizes}
    kind = "qwen3_moe" if "num_experts" in sizes else "llama"
    config = AutoConfig.for_model(kind, **sizes, tie_word_embeddings=False, **special)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save(folder)


def write_model(name: str, folder: Path) -> None:
    """Write a model of `SEEING` as a model directory, with torch's random numbers."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    # Write the model. Its control tokens have ids behind those of bytes.
    parts, tokenizer = SEEING[name], ByteTokenizer()
    ids = {token: tokenizer.vocab + number for number, token in enumerate(parts["tokens"])}
    special = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos, "pad_token_id": tokenizer.pad}
    config = dict(parts["config"])
    vocab = -(-(tokenizer.vocab + len(ids)) // 8) * 8
    text = {**_TEXT, **config.pop("text_config"), **special, "vocab_size": vocab}
    named = {"image_token_id": ids[parts["token"]], "image_token_index": ids[parts["token"]]}
    if "<|video_pad|>" in ids:
        named |= {"video_token_id": ids["<|video_pad|>"], "vision_start_token_id": ids["<|vision_start|>"],
                  "vision_end_token_id": ids["<|vision_end|>"]}  # fmt: skip
    whole = AutoConfig.for_model(config.pop("model_type"), text_config=text, **config, **named, **special)
    AutoModelForImageTextToText.from_config(whole).save_pretrained(folder)

    # Write the tokenizer. Before each message the template sets `said` to its text, with the control
    # tokens of each image, and then writes `said` in place of the content.
    role = "{{ '<|' + message['role']"
    said = _SAID.replace("SHOWN", parts["shown"]) + role
    tokenizer.save(folder, tuple(ids), TEMPLATE.replace("message['content']", "said").replace(role, said))
    write_json(folder / "preprocessor_config.json", dict(parts["processor"]))


# Sets `said` to what a message says, a text or its parts; SHOWN stands for an image.
_SAID = (
    "{% if message['content'] is string %}{% set said = message['content'] %}{% else %}{% set said %}"
    "{% for part in message['content'] %}{{ 'SHOWN' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endset %}{% endif %}"
)


if __name__ == "__main__":
    main()
