"""Data for tests: conversations and tokenizers, lines of records, files of text and their shards, streams."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.data.prepared import RecordPolicy, prepare
from experiments.data.shards import open_shards
from experiments.data.tokenizer import FILE, ByteTokenizer, open_directory
from experiments.tokenize.config import TokenizeConfig
from experiments.tokenize.job import tokenize

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": " Yes.\n"},
    {"role": "user", "content": "Thanks."},
]
CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
MARKED = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}
{%- generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}
{%- endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


EVERY_BYTE = "".join(
    map(chr, [*range(0x801), *range(0x1000, 0xD000, 0x1000), *range(0x10000, 0x110000, 0x4000)])
)


def learned_text(tokenizer, sample):
    """Return every learned stretch of a sample, with its control tokens, and all ids."""
    ids, learned = sample
    return tokenizer.decode(ids[learned.astype(bool)].tolist(), control=True), ids.tolist()


@pytest.fixture(scope="session")
def bpe_folder(tmp_path_factory):
    """Make a model directory with a small BPE, as `transformers` would save it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    folder = tmp_path_factory.mktemp("made")
    file = Tokenizer(models.BPE())
    file.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    file.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    file.train_from_iterator(["the assistant and the user say yes to the other"] * 9, trainer)
    file.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    file.enable_truncation(5)  # some directories come with this
    file.save(str(folder / FILE))
    return folder


@pytest.fixture
def directory(bpe_folder, tmp_path):
    """Return `directory(**files)`, which copies it, with files next to `tokenizer.json`."""

    def make(**files):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / FILE).write_bytes((bpe_folder / FILE).read_bytes())
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / f"{name}.json").write_text(text)
        return folder

    return make


BYTES = ByteTokenizer()
USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="session")
def byte_directory(tmp_path_factory):
    """Return the byte tokenizer, as transformers opens it in a model directory."""
    folder = tmp_path_factory.mktemp("bytes")
    BYTES.save(folder)
    return open_directory(folder)


@pytest.fixture
def prepared_from(tmp_path, byte_directory):
    """Return `prepared_from(lines, **how)`, which prepares a file of lines: objects, or bytes as they are.

    With `split=True` it returns both sides.
    """

    def make(content, name="data.jsonl", *, split=False, tokenizer=byte_directory, **how):
        lines = [x if isinstance(x, bytes) else json.dumps(x).encode() for x in content]
        (tmp_path / name).write_bytes(b"".join(line + b"\n" for line in lines))
        policy = RecordPolicy(**{"kind": "samples", "context": 64, **how})
        found = prepare(tmp_path / name, tokenizer, policy, cache=tmp_path / "cache", split=split)
        return found if split else found[0]

    return make


def show_sample(data, number=0):
    """Return a sample as (what is not learned, what is learned), without control tokens; and its ids."""
    ids, learned = data.sample(number)
    mask = learned.astype(bool)
    return BYTES.decode(ids[~mask].tolist()), BYTES.decode(ids[mask].tolist()), ids.tolist()


EOS = ByteTokenizer().eos
PERCENT = 30


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """Make files of every kind and length, some 200 kB."""
    folder, draw = tmp_path_factory.mktemp("texts"), np.random.default_rng(0)
    words = ["the", "größer", "日本語", "𝄞", "x = 1", "\r\n", "\n", "\t", "\n\n", "\nä\n語"]
    for number in range(24):
        text = " ".join(words[i] for i in draw.integers(0, len(words), size=int(draw.integers(0, 3000))))
        path = folder / ("sub" if number % 3 else "") / f"{number:02d}{('.txt', '.md', '.py')[number % 3]}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode())
    (folder / "empty.txt").write_bytes(b"")
    (folder / "endless.txt").write_text("日本" * 5000)
    (folder / "marked.txt").write_bytes(b"\xef\xbb\xbfmarked")
    for number in range(6):
        lines = [{"text": "z" * int(size), "id": size} for size in draw.integers(0, 900, size=40).tolist()]
        (folder / f"lines{number}.jsonl").write_text("\n\n".join(json.dumps(line) for line in lines))
    (folder / "ignored.csv").write_text("a,b")
    return folder


@pytest.fixture(scope="session")
def shard_folder(texts, tmp_path_factory):
    """Make the shards of `texts`, many small ones, in one folder."""
    out = tmp_path_factory.mktemp("shards")
    tokenize(tokenize_config(out, texts))
    return out


def tokenize_config(out: Path, *files: Path | str, **options) -> TokenizeConfig:
    return TokenizeConfig(
        out=str(out),
        files=tuple(map(str, files)),
        **{"shard_mb": 0.01, "processes": 1, "held_out_percent": PERCENT, **options},
    )


def stream_of(shards) -> np.ndarray:
    return shards.windows(np.zeros(1, np.int64), shards.tokens)[0]


CONTEXT = 50
COUNT = 67


def stream(size: int = 5000, symbols: int = 256, seed: int = 0) -> torch.Tensor:
    return torch.randint(symbols, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def numbered(tmp_path_factory):
    """Return `numbered(tokens, parts)`, which makes shards whose tokens are their places."""
    folder = tmp_path_factory.mktemp("numbered")

    def make(tokens: int, parts: int):
        path = folder / f"{tokens}-{parts}"
        if not path.exists():
            path.mkdir()
            cuts = np.sort(
                np.random.default_rng(parts).choice(np.arange(1, tokens), parts - 1, replace=False)
            )
            for number, part in enumerate(np.split(np.arange(tokens, dtype=np.uint32), cuts)):
                np.save(path / f"{number}.npy", part)
        return open_shards(path)

    return make


@pytest.fixture(scope="session")
def samples(tmp_path_factory, byte_directory):
    """Return `samples(kind, ...)`, which prepares data of many lengths; each sample has its own text."""
    folder = tmp_path_factory.mktemp("data")

    def make(kind="samples", context=CONTEXT, count=COUNT, longest=40):
        draw = np.random.default_rng(0)
        sizes = draw.integers(1, longest - 10, size=count)
        lines = [{"prompt": f"{i:04d}", "response": "r" * size} for i, size in enumerate(sizes.tolist())]
        if kind == "pairs":
            lines = [{"prompt": x["prompt"], "chosen": x["response"], "rejected": "no"} for x in lines]
        file = folder / f"{kind}{count}{longest}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return prepare(file, byte_directory, RecordPolicy(kind, context), cache=folder / "cache")[0]

    return make


def join_batches(parts):
    """Join ranks' batches into the global one."""
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts)
    if isinstance(parts[0], tuple):
        return tuple(map(join_batches, zip(*parts, strict=True)))
    return {name: join_batches([part[name] for part in parts]) for name in parts[0]}


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
