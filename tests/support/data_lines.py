"""Lines of data: prepared, and shown as what is not learned and what is."""

from __future__ import annotations

import json

import pytest

from experiments.data.prepared import prepare
from experiments.data.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture
def prepared_from(tmp_path):
    """`prepared_from(lines, **how)`: prepared from a file of these lines; objects, or bytes as they are."""

    def make(content, name="data.jsonl", **how):
        told = [x if isinstance(x, bytes) else json.dumps(x).encode() for x in content]
        (tmp_path / name).write_bytes(b"".join(line + b"\n" for line in told))
        how = {"context": 64, "cache": tmp_path / "cache", "tokenizer": TOKENIZER} | how
        return prepare([tmp_path / name], how.pop("tokenizer"), **how)

    return make


def shown(data, number=0):
    """A sample as (what is not learned, what is learned), control tokens left out; and its ids."""
    ids, learned = data.sample(number)
    told = learned.astype(bool)
    return TOKENIZER.decode(ids[~told].tolist()), TOKENIZER.decode(ids[told].tolist()), ids.tolist()


GOOD = {
    "samples": {"text": "good"},
    "pairs": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "choices": {"prompt": "a", "choices": ["b", "c"], "answer": 0},
}
