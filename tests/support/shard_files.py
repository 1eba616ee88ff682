"""Files of text of every kind, and the shards that they are tokenised to."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.data.tokenizer import byte_tokenizer
from experiments.tokenize.config import TokenizeConfig
from experiments.tokenize.job import tokenize

EOS = byte_tokenizer().eos
PERCENT = 30


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """Files of every kind and length, some 200 kB."""
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
    """The shards of `texts`, many small ones, in one folder."""
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
