"""Bytes as tokens: needs no file and no library, and writes one that serving systems open."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.data.pieces import NOTHING, Spelled, TextPiece

BEGIN, END, PAD = 256, 257, 258
ROLES = {"system": 259, "user": 260, "assistant": 261}
CONTROL = {"<|begin|>": BEGIN, "<|end|>": END, "<|pad|>": PAD, **{f"<|{r}|>": i for r, i in ROLES.items()}}
TEMPLATE = (
    "{{ '<|begin|>' }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes are ids 0 to 255; then come begin, end, padding and a marker for each role.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("hé"), tokenizer.decode([256, 104, 195, 169, 257])
    ([104, 195, 169], 'hé')
    """

    vocab: int = 264  # 262 ids, and two that mean nothing: rows of a matrix like multiples of 8
    bos: int | None = BEGIN
    eos: int = END
    stops: tuple[int, ...] = (END,)
    pad: int = PAD

    @property
    def key(self) -> str:
        return hashlib.sha256(tokenizer_json().encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_many(
        self, texts: Sequence[str], control: bool = False, behind: str = NOTHING
    ) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]

    def spelled(self, text: str, start: int, stop: int) -> Iterable[Spelled]:
        return ()

    def decode(self, ids: Sequence[int], control: bool = False) -> str:
        """Text of token ids; broken UTF-8 shows as a replacement sign."""
        spelled = {i: name.encode() for name, i in CONTROL.items()} if control else {}
        return b"".join(bytes([i]) if i < 256 else spelled.get(i, b"") for i in ids).decode(errors="replace")

    def conversation(self, messages: Sequence[Mapping[str, str]], first: int = 0) -> list[TextPiece]:
        """Each message is its role's marker, its text and the end token."""
        pieces = [TextPiece(BEGIN, False)]
        for number, message in enumerate(messages):
            learned = message["role"] == "assistant" and number >= first
            pieces.append(TextPiece(_marker(message["role"]), False))
            pieces += [TextPiece(message["content"], learned), TextPiece(END, learned)]
        return pieces

    def opening(self, messages: Sequence[Mapping[str, str]]) -> list[TextPiece]:
        return [*self.conversation(messages, first=len(messages)), TextPiece(ROLES["assistant"], False)]

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, which `transformers.AutoTokenizer` opens.

        In a directory of a model of type qwen2 it takes a class of its own, which composes characters first.
        """
        (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin|>",
            "eos_token": "<|end|>",
            "pad_token": "<|pad|>",
            "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def tokenizer_json() -> str:
    """The byte tokenizer as the `tokenizers` library writes it: byte-level BPE that merges nothing."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    begin = {"SpecialToken": {"id": "<|begin|>", "type_id": 0}}
    a, b = ({"Sequence": {"id": i, "type_id": t}} for i, t in (("A", 0), ("B", 1)))
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": name, **flags, "special": True} for name, i in CONTROL.items()],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, a],
            "pair": [begin, a, b],
            "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [BEGIN], "tokens": ["<|begin|>"]}},
        },
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {sign: byte for byte, sign in enumerate(_signs())},
            "merges": [],
        },
    }
    return json.dumps(content, indent=1)


def _signs() -> list[str]:
    """GPT-2's printable sign of every byte: its own where it has one, else one from 256 on."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def _marker(role: str) -> int:
    if role not in ROLES:
        raise ValueError(f"role {role!r}: the byte tokenizer knows {', '.join(ROLES)}")
    return ROLES[role]
