"""Lines of data: prepared, and shown as what is not learned and what is."""

from __future__ import annotations

import json

import pytest

from experiments.data.prepared import RecordPolicy, prepare
from experiments.data.tokenizer import byte_tokenizer, open_directory

BYTES = byte_tokenizer()
USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="session")
def byte_directory(tmp_path_factory):
    """The byte tokenizer, as transformers opens it in a model directory."""
    folder = tmp_path_factory.mktemp("bytes")
    BYTES.save(folder)
    return open_directory(folder)


@pytest.fixture
def prepared_from(tmp_path, byte_directory):
    """`prepared_from(lines, **how)`: prepared from a file of these lines; objects, or bytes as they are. With
    `split=True` both sides."""

    def make(content, name="data.jsonl", *, split=False, tokenizer=byte_directory, **how):
        lines = [x if isinstance(x, bytes) else json.dumps(x).encode() for x in content]
        (tmp_path / name).write_bytes(b"".join(line + b"\n" for line in lines))
        policy = RecordPolicy(**{"kind": "samples", "context": 64, **how})
        found = prepare(tmp_path / name, tokenizer, policy, cache=tmp_path / "cache", split=split)
        return found if split else found[0]

    return make


def shown(data, number=0):
    """A sample as (what is not learned, what is learned), control tokens left out; and its ids."""
    ids, learned = data.sample(number)
    mask = learned.astype(bool)
    return BYTES.decode(ids[~mask].tolist()), BYTES.decode(ids[mask].tolist()), ids.tolist()
