"""Models that see, random and tiny, with images that they can be tuned on: nothing is fetched."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.data.tokenizer import TEMPLATE, ByteTokenizer
from experiments.lib.files import write_json, write_lines

SIDE = 32  # of tiles
IMAGES, HELD_OUT = 1200, 64
COLOURS = {"red": (214, 40, 40), "green": (40, 160, 60), "blue": (40, 80, 210), "black": (20, 20, 20)}
SHAPES = ("circle", "square", "triangle")

_TEXT = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 1024}  # fmt: skip
_ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4}}
_TILES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
          "image_size": SIDE, "patch_size": 8}  # fmt: skip
_PATCHES = {"depth": 3, "num_heads": 4, "patch_size": 8}
_PIXELS = {"min_pixels": 16 * 16, "max_pixels": 64 * 64, "patch_size": 8, "merge_size": 2}
_QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_IDEFICS = ("<fake_token_around_image>", "<global-img>", "<image>")

# By name: the model's type and its configuration's parts, its image processor, and its control tokens, of
# which the template writes those that are `shown` for an image.
TINY: Mapping[str, Mapping[str, Any]] = {
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


def write_model(name: str, folder: Path) -> None:
    """A model of `TINY` as a model directory, of torch's random numbers."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    made, tokenizer = TINY[name], ByteTokenizer()
    ids = {token: tokenizer.vocab + number for number, token in enumerate(made["tokens"])}
    special = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos, "pad_token_id": tokenizer.pad}
    config = dict(made["config"])
    vocab = -(-(tokenizer.vocab + len(ids)) // 8) * 8
    text = {**_TEXT, **config.pop("text_config"), **special, "vocab_size": vocab}
    named = {"image_token_id": ids[made["token"]], "image_token_index": ids[made["token"]]}
    if "<|video_pad|>" in ids:
        named |= {"video_token_id": ids["<|video_pad|>"], "vision_start_token_id": ids["<|vision_start|>"],
                  "vision_end_token_id": ids["<|vision_end|>"]}  # fmt: skip
    whole = AutoConfig.for_model(config.pop("model_type"), text_config=text, **config, **named, **special)
    AutoModelForImageTextToText.from_config(whole).save_pretrained(folder)
    role = "{{ '<|' + message['role']"
    said = _SAID.replace("SHOWN", made["shown"]) + role
    tokenizer.save(folder, tuple(ids), TEMPLATE.replace("message['content']", "said").replace(role, said))
    write_json(folder / "preprocessor_config.json", dict(made["processor"]))


# What a message says: a text, or its parts.
_SAID = (
    "{% if message['content'] is string %}{% set said = message['content'] %}{% else %}{% set said %}"
    "{% for part in message['content'] %}{{ 'SHOWN' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endset %}{% endif %}"
)


def image_files(folder: str | Path) -> tuple[Path, Path]:
    """Write images of shapes, one or two to a question, and `train_images.jsonl`, `held_out_images.jsonl`."""
    from PIL import Image, ImageDraw

    folder, draw, records = Path(folder), random.Random(0), []
    (folder / "images").mkdir(parents=True, exist_ok=True)
    kinds = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    paths = []
    for number in range(IMAGES):
        colour, shape = draw.choice(kinds)
        width, height = draw.randrange(24, 65, 8), draw.randrange(24, 65, 8)
        image = Image.new("RGB", (width, height), (draw.randrange(200, 256),) * 3)
        size = draw.randrange(14, min(width, height) - 4)
        left, top = draw.randrange(width - size), draw.randrange(height - size)
        box, pen = (left, top, left + size, top + size), ImageDraw.Draw(image)
        corners = [(left, top + size), (left + size, top + size), (left + size // 2, top)]
        {
            "circle": lambda: pen.ellipse(box, COLOURS[colour]),  # noqa: B023
            "square": lambda: pen.rectangle(box, COLOURS[colour]),  # noqa: B023
            "triangle": lambda: pen.polygon(corners, COLOURS[colour]),  # noqa: B023
        }[shape]()
        path = Path("images") / f"{number}.png"
        image.save(folder / path)
        paths.append((str(path), f"{colour} {shape}"))
    for number, (path, said) in enumerate(paths):
        if number % 4:
            records.append({"images": [path], "prompt": "<image>What is it?", "response": said})
        else:
            own_side = paths[:HELD_OUT] if number < HELD_OUT else paths[HELD_OUT:]
            other, second = draw.choice(own_side)
            asked = "<image><image>What are they?"
            records.append({"images": [path, other], "prompt": asked, "response": f"{said}, {second}"})
    train = write_lines(folder / "train_images.jsonl", records[HELD_OUT:])
    return train, write_lines(folder / "held_out_images.jsonl", records[:HELD_OUT])
