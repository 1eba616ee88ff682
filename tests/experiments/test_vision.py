"""Models that see: gradients next to plain autograd, images in records, tuning, exports, mistakes."""

from __future__ import annotations

import importlib
import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from errors import raises
from families import Wide
from runs import run_in
from torch import Tensor
from tuning import config_of

import fnshard as fs
from experiments import bases, finetune
from experiments.bases import SEEING, write_model
from experiments.data.builtin import write_image_files
from experiments.data.images import open_image
from experiments.data.tokenizer import open_directory
from experiments.lib.checks import ConfigError
from experiments.tuning.lm import from_directory, from_model
from experiments.tuning.model_directory import ADAPTERS, EXPORTED
from fnshard.launcher.rank import Stop

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.vision_utils")
Image = pytest.importorskip("PIL.Image")

COUNTS = (2, 1, 0, 1)  # images in the rows of a batch


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make a directory of each family, with fewer blocks of text."""
    made = {name: tmp_path_factory.mktemp(name) for name in SEEING}
    few = {**bases._TEXT, "num_hidden_layers": 2}
    with torch.random.fork_rng(), mock.patch.object(bases, "_TEXT", few):
        for name, folder in made.items():
            torch.manual_seed(0)
            write_model(name, folder)
    return made


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Make images of noise, of different sizes."""
    folder, random = tmp_path_factory.mktemp("pictures"), torch.Generator().manual_seed(0)
    paths = []
    for width, height in ((40, 24), (24, 56), (64, 30), (33, 47)):
        values = torch.randint(0, 255, (height, width, 3), generator=random, dtype=torch.uint8)
        paths.append(str(folder / f"{len(paths)}.png"))
        Image.fromarray(values.numpy()).save(paths[-1])
    return paths


def rows_of_images(images: Any, hf: Any, pictures: list[str]) -> list[tuple[list[int], list[str]]]:
    """Return the token ids of each row, and its images."""
    rows, left = [], list(pictures)
    for count in COUNTS:
        paths = [left.pop() for _ in range(count)]
        text = f"{images.token}ab".join(["of ", *[""] * count])
        expanded, _ = images.expand(text, [], paths) if paths else (text, [])
        rows.append((hf(expanded, add_special_tokens=False).input_ids, paths))
    return rows


def logits_of_transformers(model: Any, images: Any, ids: list[int], paths: list[str]) -> Tensor:
    """Compute the logits of one row alone, as the model itself makes them."""
    seen = {}
    if paths:
        each = [open_image(path) for path in paths]
        nested = hasattr(model.config, "scale_factor")
        seen = dict(images.hf(images=[each] if nested else each, return_tensors="pt"))
        seen["pixel_values"] = seen["pixel_values"].to(model.dtype)
        if "image_grid_thw" in seen:
            seen["mm_token_type_ids"] = (torch.tensor([ids]) == model.config.image_token_id).int()
    return model(input_ids=torch.tensor([ids]), **seen).logits[0]


MESHES = [{"shard": 1}, {"shard": 2}, {"tensor": 2}]
FEW = {("tiny-llava", 1)}


@pytest.mark.parametrize(
    ("name", "axes"),
    [pytest.param(name, axes, id=f"{name}-{axes}", marks=[] if (name, n) in FEW else pytest.mark.long)
     for name in SEEING for n, axes in enumerate(MESHES)],
)  # fmt: skip
def test_gradients_are_those_of_plain_autograd(folders, pictures, monkeypatch, name, axes):
    """Rows of several images and of none, of many sizes; ranks whose rows have other shapes."""
    for each in ("llama", "smolvlm", "qwen2_vl", "qwen2_5_vl"):
        module = f"transformers.models.{each}.modeling_{each}"
        monkeypatch.setattr(importlib.import_module(module), "torch", Wide())
    model = transformers.AutoModelForImageTextToText.from_pretrained(folders[name]).double().eval()
    plain, tokenizer = deepcopy(model), open_directory(folders[name])
    rows = rows_of_images(tokenizer.images, tokenizer.hf, pictures)
    known = [logits_of_transformers(plain, tokenizer.images, *row) for row in rows]
    whole = sum(each.logsumexp(-1).sum() for each in known)
    whole.backward()

    lm, width = from_model(model), max(len(ids) for ids, _ in rows)
    tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    real = torch.tensor([[1.0] * len(ids) + [0.0] * (width - len(ids)) for ids, _ in rows]).double()

    def loss(params: Any, tokens: Tensor, images: Any, real: Tensor) -> fs.Mean:
        logits = lm.logits(params, tokens, images=images)
        return fs.Mean((logits.logsumexp(-1) * real).sum(), real.sum())

    mesh = fs.make_mesh(**axes, simulated=True)
    tensor = {"tensor": "tensor"} if "tensor" in axes else {}
    specs = fs.presets.full_shard(lm.params, mesh, **tensor)
    step = fs.shard_step(loss, specs, mesh=mesh, backend="eager")

    def on_rank(rank: int) -> Any:
        part = len(rows) // mesh.data_size
        mine = slice(rank * part, (rank + 1) * part) if mesh.data_size > 1 else slice(None)
        images = lm.vision.rows(tokenizer.images, [paths for _, paths in rows[mine]], tokens[mine])
        blocks = fs.shard(lm.params, specs, mesh)
        total, gradients = step(blocks, tokens[mine], images, real[mine])
        logits = lm.logits(dict(lm.params), tokens[mine], images=images)
        for row, each in zip(logits, known[mine], strict=True):
            torch.testing.assert_close(row[: len(each)], each, atol=1e-10, rtol=0)
        there = {path: g for path, g in gradients.items() if g is not None}
        layouts = {p: fs.LayoutSpec(specs[p].gradient).resolve(lm.params[p], "u") for p in there}
        return total, fs.unshard(there, layouts, mesh)

    leaves = dict(plain.named_parameters())
    for total, gradients in fs.simulate(mesh, on_rank):
        torch.testing.assert_close(total, whole.detach() / real.sum(), atol=1e-10, rtol=0)
        assert gradients.keys() >= {path for path, leaf in leaves.items() if leaf.grad is not None}
        for path, gradient in gradients.items():
            expected = leaves[path].grad
            expected = torch.zeros_like(gradient) if expected is None else expected / real.sum()
            torch.testing.assert_close(gradient, expected, atol=1e-10, rtol=0)


def test_few_shapes_are_made_of_many(folders, pictures):
    """Powers of two of what a row has; a row without images has padding alone."""
    for name, sizes in {"tiny-llava": (4, 4, 1), "tiny-qwen2-vl": (128, 128, 64)}.items():
        lm, tokenizer = from_directory(folders[name]), open_directory(folders[name])
        images = tokenizer.images
        for paths, size in zip((pictures, pictures[:3], []), sizes, strict=True):
            text = images.expand(f" {images.token}" * len(paths), [], paths)[0]
            tokens = torch.tensor([tokenizer.hf(f"{text} ").input_ids])
            assert lm.vision.rows(images, [paths], tokens)["pixels"].shape[:2] == (1, size)


@pytest.mark.parametrize("name", ["tiny-llava", "tiny-smolvlm"])
def test_image_tokens_are_those_of_the_processor(folders, pictures, name):
    """The processor is transformers', if it opens without torchvision."""
    tokenizer = open_directory(folders[name])
    images, text = tokenizer.images, f"a{tokenizer.images.token}b{tokenizer.images.token}c"
    if name == "tiny-llava":
        processor = transformers.LlavaProcessor(
            images.hf, tokenizer.hf, patch_size=8, vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )  # fmt: skip
    else:
        processor = transformers.Idefics3Processor(images.hf, tokenizer.hf, image_seq_len=4)
    expected = processor(text=[text], images=[open_image(path) for path in pictures[:2]]).input_ids[0]
    expanded, spans = images.expand(text, [(0, 1), (len(text) - 1, len(text))], pictures[:2])
    assert tokenizer.hf(expanded).input_ids == expected
    assert [expanded[start:end] for start, end in spans] == ["a", "c"]


# ------------------------------------------------------------------ records


def written(folder: Path, *records: Any) -> Path:
    path = folder / "images.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def test_records_say_their_images_in_three_ways(folders, pictures, tmp_path):
    """A list next to texts, marked or not, and parts of messages: one sample, learned alike."""
    picture = Path(pictures[0]).name
    parts = [{"type": "image", "path": picture}, {"type": "text", "text": "What?"}]
    user = {"role": "user", "content": parts}
    said = {"role": "assistant", "content": "noise"}
    path = written(
        Path(pictures[0]).parent,
        {"images": [picture], "prompt": "<image>What?", "response": "noise"},
        {"image": picture, "messages": [{"role": "user", "content": "What?"}, said]},
        {"messages": [user, said]},
    )
    config = config_of(folders["tiny-qwen2-vl"], {"samples": path}, tmp_path, "data.context=128",
                       f"data.held_out={path}")  # fmt: skip
    data = finetune.open_data(config, from_directory(config.model).vision)
    tokens, learned = data.train.sample(0)
    assert data.tokenizer.decode(tokens[learned == 1], control=True) == "noise<|end|>"
    for number in range(3):
        assert data.train.images_of(number) == [pictures[0]]
        assert data.train.sample(number)[0].tolist() == tokens.tolist()
        assert data.train.sample(number)[1].tolist() == learned.tolist()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "not there": ({"images": ["no.png"], "prompt": "a", "response": "b"}, r"no\.png is not there"),
    "no image": ({"images": ["images.jsonl"], "prompt": "a", "response": "b"}, "is no image that can"),
    "a web address": ({"images": ["https://x/y.png"], "prompt": "a", "response": "b"}, "expected the path"),
    "two of one": ({"images": ["0.png"], "prompt": "<image><image>", "response": "b"}, "has 1, and <image>"),
    "a number": ({"images": [3], "prompt": "a", "response": "b"}, "expected the path of a file, got '3'"),
    "no texts": ({"images": ["0.png"], "text": "a"}, "are of messages, or of a prompt and its response"),
    "a part of sound": (
        {"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "of the types 'text' and 'image'",
    ),
}  # fmt: skip


def test_mistakes_are_one_error_with_their_lines(folders, pictures, tmp_path):
    path = written(Path(pictures[0]).parent, *(record for record, _ in WRONG.values()))
    with pytest.raises(ConfigError) as caught:
        config_of(folders["tiny-llava"], {"samples": path}, tmp_path, "data.context=128")
    assert f"{len(WRONG)} lines cannot be used" in str(caught.value)
    for line, (_, why) in enumerate(WRONG.values(), 1):
        assert re.search(rf"images\.jsonl:{line}: .*{why}", str(caught.value)), why


def test_images_that_nothing_looks_at_are_refused(folders, model, pictures, tmp_path):
    picture = Path(pictures[0]).name
    record = {"images": [picture], "prompt": "a", "response": "b"}
    path = written(Path(pictures[0]).parent, record, record)
    with raises(ConfigError, leaves="image processor"):
        config_of(model, {"samples": path}, tmp_path)
    for override in ("objective=grpo", "mesh.context=2"):
        config = config_of(
            folders["tiny-llava"], {"samples": path}, tmp_path, "data.context=64", "data.rows=16", override
        )
        with raises(ConfigError, leaves=override):
            finetune.open_data(config, from_directory(config.model).vision)


def test_images_that_changed_after_they_were_prepared_are_named(folders, pictures, tmp_path):
    """A row has room for the features of the image that was there."""
    picture = tmp_path / "a.png"
    open_image(pictures[2]).save(picture)
    path = written(tmp_path, *[{"images": ["a.png"], "prompt": "a", "response": "b"}] * 2)
    config = config_of(folders["tiny-qwen2-vl"], {"samples": path}, tmp_path, "data.context=64")
    data = finetune.open_data(config, from_directory(config.model).vision)
    data.rows.batch(torch.arange(1).numpy())
    Image.new("RGB", (16, 16)).save(picture)
    with raises(ConfigError, leaves="a.png", fix="prepare them anew", says="1 features"):
        data.rows.batch(torch.arange(1).numpy())
    picture.unlink()
    with raises(ConfigError, leaves="a.png"):
        data.rows.batch(torch.arange(1).numpy())


# ------------------------------------------------------------------ tuning


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make questions about one image of one size: one shape, one program."""
    path = write_image_files(tmp_path_factory.mktemp("shapes"))[0]
    rows = [(line, json.loads(line)["images"]) for line in path.read_text().splitlines(keepends=True)]
    small = [line for line, (first, *more) in rows
             if not more and Image.open(path.parent / first).size == (32, 32)]  # fmt: skip
    path.write_text("".join(small))
    assert len(small) > 20
    return path


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("tiny-qwen2.5-vl", ("method=lora", "method.targets=all-linear|vision-linear", "export=both")),
        ("tiny-llava", ("method=full", "method.freeze=*vision_tower*", "export=merged")),
        ("tiny-smolvlm", ("method=qlora4", "export=both")),
        ("tiny-qwen2-vl", ("method=full", "export=merged")),
    ],
)  # fmt: skip
def test_what_is_tuned_is_exported_and_opened(folders, shapes, pictures, tmp_path, capfd, name, chosen):
    """Losses fall; the tower is tuned or frozen as said; transformers has the same logits."""
    config = config_of(folders[name], {"samples": shapes}, tmp_path, "data.context=128", "run.steps=2",
                       "run.held_out_every=2", *chosen)  # fmt: skip
    folder = tmp_path / "run"
    finetune.finetune(config, run_in(folder), [], Stop())
    shown = capfd.readouterr().out
    assert "<image>*" in shown or "<|image_pad|>*" in shown
    result = json.loads((folder / "result.json").read_text())
    assert result["held_out_loss"] < json.loads((folder / finetune.BEFORE).read_text())["held_out_loss"]

    tuned, kept = folder / EXPORTED, open_directory(folders[name])
    after = transformers.AutoModelForImageTextToText.from_pretrained(tuned).eval()
    before = dict(transformers.AutoModelForImageTextToText.from_pretrained(folders[name]).named_parameters())
    changed = {path for path, leaf in after.named_parameters() if not torch.equal(leaf, before[path])}
    seeing = {path for path in before if "vis" in path}
    assert changed - seeing
    assert bool(changed & seeing) == (name in ("tiny-qwen2-vl", "tiny-qwen2.5-vl"))
    tokenizer = open_directory(tuned)
    assert tokenizer.key == kept.key and tokenizer.images is not None
    ids, paths = rows_of_images(tokenizer.images, tokenizer.hf, pictures)[0]
    tokens, lm = torch.tensor([ids]), from_model(deepcopy(after))
    images = lm.vision.rows(tokenizer.images, [paths], tokens)
    ours = lm.logits(dict(lm.params), tokens, images=images)
    torch.testing.assert_close(ours[0], logits_of_transformers(after, tokenizer.images, ids, paths))
    if "method=lora" in chosen:
        peft = pytest.importorskip("peft")
        base = transformers.AutoModelForImageTextToText.from_pretrained(folders[name])
        adapted = peft.PeftModel.from_pretrained(base, folder / ADAPTERS).eval()
        logits = logits_of_transformers(adapted.base_model.model, tokenizer.images, ids, paths)
        torch.testing.assert_close(logits, ours[0], atol=1e-4, rtol=1e-4)


def test_globs_that_match_nothing_are_refused(folders, shapes, tmp_path):
    wrong = ("method=full", "method.freeze=*nothing*")
    config = config_of(folders["tiny-llava"], {"samples": shapes}, tmp_path, "data.context=192", *wrong)
    with raises(ConfigError, leaves="method.freeze=*nothing*"):
        finetune.build(config)
    config = config_of(folders["tiny-llava"], {"samples": shapes}, tmp_path, "data.context=192",
                       "method.targets=all-linear|experts")  # fmt: skip
    with raises(ConfigError, leaves="method.targets=all-linear|experts"):
        finetune.build(config)
    with raises(ValueError, leaves="freeze"):
        config_of(folders["tiny-llava"], {"samples": shapes}, tmp_path, "method.freeze=*")
