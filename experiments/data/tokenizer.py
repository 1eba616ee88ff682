"""Tokenizers: the built-in one of bytes, which needs no library, and those that transformers opens."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lib.checks import ConfigError
from experiments.lib.files import first_few, read_json, write_json
from fnshard.errors import MissingExtraError, report

FILE, CONFIG, TEMPLATE_FILE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
OLD_TEMPLATE = "chat_template.json"  # that of a processor, in models that see
COPIED = (FILE, CONFIG, "special_tokens_map.json", "added_tokens.json", TEMPLATE_FILE, OLD_TEMPLATE)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
STOP_FILES = ("generation_config.json", "config.json")  # files that name tokens which end a generation
BUILT_IN = "fnshard_tokenizer"  # a key of `CONFIG` that marks the files of the byte tokenizer

# ------------------------------------------------------------------ bytes

BEGIN, END, PAD = 256, 257, 258
ROLES = {"system": 259, "user": 260, "assistant": 261}
CONTROL = {"<|begin|>": BEGIN, "<|end|>": END, "<|pad|>": PAD, **{f"<|{r}|>": i for r, i in ROLES.items()}}
TEMPLATE = (
    "{{ '<|begin|>' }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('role ' + message['role'] + ': expected system, user or assistant') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class ByteTokenizer:
    """A tokenizer of UTF-8 bytes, ids 0 to 255, after which come begin, end, padding and a marker for each
    role.

    Args:
        vocab: the rows of an embedding. All ids are below it.
        eos: the token that ends a document.
        key: a text that is equal for equal tokenizers.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("hé"), tokenizer.decode([256, 104, 195, 169, 257])
    ([104, 195, 169], 'hé')
    """

    vocab: int = 264  # 262 ids, and two that mean nothing: rows of a matrix like multiples of 8
    bos: int = BEGIN
    eos: int = END
    pad: int = PAD
    key: str = "bytes-1"  # its number changes when ids mean something else

    def encode(self, text: str) -> list[int]:
        """Return token ids. Neither begin nor end is added, and no control token is read from the text."""
        return list(text.encode())

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the uint32 ids of each text."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Sequence[int], control: bool = False) -> str:
        """Return the text of ids. Broken UTF-8 becomes replacement characters.

        Args:
            control: whether to spell control tokens, which are otherwise left out.
        """
        spelled = {i: name.encode() for name, i in CONTROL.items()} if control else {}
        return b"".join(bytes([i]) if i < 256 else spelled.get(i, b"") for i in ids).decode(errors="replace")

    def save(self, folder: Path, more: Sequence[str] = (), template: str = TEMPLATE) -> None:
        """Write the files that `transformers.AutoTokenizer` opens.

        They are `tokenizer.json`, byte-level BPE that merges nothing, and `tokenizer_config.json`. In the
        directory of a model of type qwen2, transformers takes a class of its own, which first normalises text
        to NFC.

        Args:
            more: control tokens with ids from `vocab` on. Only transformers reads such files.
            template: the chat template.
        """
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

        # Bytes are spelled as in GPT-2: by their own character if it is printable, else by one from 256 on.
        printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
        others = iter(range(256, 512))
        vocabulary = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
        file = Tokenizer(models.BPE(vocabulary, []))
        file.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        file.decoder = decoders.ByteLevel()
        # Ids are given in order, so spare tokens fill those between the built-in ones and `more`.
        spare = [f"<|spare_{number}|>" for number in range(self.vocab - len(CONTROL) - 256)] if more else []
        names = [*CONTROL, *spare, *more]
        file.add_special_tokens([AddedToken(name, normalized=False) for name in names])
        file.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", BEGIN)]
        )
        file.save(str(folder / FILE))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin|>",
            "eos_token": "<|end|>",
            "pad_token": "<|pad|>",
            "clean_up_tokenization_spaces": False,
            "chat_template": template,
        }
        if not more:  # `load_tokenizer` may then read the files without transformers
            config[BUILT_IN] = self.key
        write_json(folder / CONFIG, config)


# ------------------------------------------------------------------ model directories


@dataclass(frozen=True)
class DirectoryTokenizer:
    """A tokenizer of transformers, which `open_directory` makes.

    Args:
        hf: the object of transformers, which has a chat template.
        begin: the ids with which texts of this model begin, one or none.
        stops: every id that ends a generation. The first is the end of a text.
        pad: the id that fills rows, which is never a target.
        plain: whether the directory has no chat template, so that `PLAIN` stands in for it.
        images: the `Images` of a model that sees.
    """

    folder: Path
    hf: Any = field(repr=False, compare=False)
    vocab: int
    begin: tuple[int, ...]
    stops: tuple[int, ...]
    pad: int
    key: str
    plain: bool
    images: Any = field(default=None, repr=False, compare=False)

    @property
    def eos(self) -> int:
        return self.stops[0]

    def encode(self, text: str) -> list[int]:
        return self.encode_many([text])[0].tolist()

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self.hf(list(texts), add_special_tokens=False, split_special_tokens=True)
        return [np.array(ids, np.uint32) for ids in encoded.input_ids]

    def encode_after(self, text: str) -> list[int]:
        """Return the token ids of a text that follows another one.

        They lack the space that some tokenizers put in front of every text.
        """
        # Behind a line break the text has no such space, unless a token joins the two.
        line_break, both = self.encode("\n"), self.encode(f"\n{text}")
        follows = both[: len(line_break)] == line_break
        return both[len(line_break) :] if follows else self.encode(text)

    def decode(self, ids: Sequence[int], control: bool = False) -> str:
        # A model may have more rows than the tokenizer has tokens.
        known = [i for i in ids if i < self.vocab]
        return self.hf.decode(known, skip_special_tokens=not control, clean_up_tokenization_spaces=False)

    def save(self, folder: Path) -> None:
        """Copy its files, and write the chat template and the ends of a generation if the files lack them."""
        for name in COPIED + PROCESSOR_FILES:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, folder / name)
        if self.plain:
            (folder / TEMPLATE_FILE).write_text(self.hf.chat_template, encoding="utf-8")
        if not (folder / STOP_FILES[0]).exists():
            write_json(folder / STOP_FILES[0], {"eos_token_id": list(self.stops)})


Tokenizer = ByteTokenizer | DirectoryTokenizer  # those of shards
PLAIN = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ 'assistant:' }}{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['role'] + ': ' + message['content'] + '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Open the tokenizer of a local directory. If the built-in one wrote its files, that needs no library.

    Raises:
        ConfigError, MissingExtraError: see `open_directory`.
    """
    if read_json(Path(directory) / CONFIG).get(BUILT_IN) == ByteTokenizer.key:
        return ByteTokenizer()
    return open_directory(directory)


def open_directory(directory: str | Path) -> DirectoryTokenizer:
    """Open the tokenizer of a local model directory. Nothing is fetched, and no code of the directory is run.

    Args:
        directory: a folder with a `tokenizer.json`. If it has no chat template, `PLAIN` writes turns as
            "role: text".

    Raises:
        ConfigError: the file is missing, transformers does not open it, or no file names an end token.
        MissingExtraError: transformers is not installed.
    """
    # Nothing is fetched: the tokenizer's file has to be here.
    folder = Path(directory)
    if not (folder / FILE).is_file():
        there = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
        fix = (
            "name a model directory that has one (AutoTokenizer.from_pretrained(...).save_pretrained writes "
            "it), or use the byte tokenizer."
        )
        state = "it holds:" if folder.is_dir() else "it is no folder."
        raise ConfigError(report(f"{folder} holds no {FILE}; {state}", first_few(there, 8), fix))
    # Bytes do not need the modules that open a model's directory, so they are imported here.
    from experiments.data.images import open_images
    from experiments.data.model_files import LOCAL

    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError(
            f"{folder} is opened by transformers, which is not installed. Fix: pip install "
            "fnshard[finetune], or use the byte tokenizer."
        ) from error
    try:
        # So large a length keeps transformers from warning of long texts, which we check ourselves.
        hf = AutoTokenizer.from_pretrained(folder, **LOCAL, model_max_length=10**9)
        hf.backend_tokenizer.no_truncation()
        hf.backend_tokenizer.no_padding()
    except Exception as error:  # the libraries raise errors of every kind, plain Exception too
        raise ConfigError(f"{folder}: transformers opens no fast tokenizer there: {error!s:.300}.") from error

    # Every end token becomes a control token, so that a text which spells one is not encoded as it.
    stops = _find_stops(hf, folder)
    hf.add_tokens([hf.convert_ids_to_tokens(stop) for stop in stops], special_tokens=True)
    begin = (hf.bos_token_id,) if hf("").input_ids[:1] == [hf.bos_token_id] else ()

    # Find the chat template; without one, `PLAIN` is used.
    hf.chat_template = hf.chat_template or read_json(folder / OLD_TEMPLATE).get("chat_template")
    templates = hf.chat_template.values() if isinstance(hf.chat_template, dict) else [hf.chat_template]
    if odd := [each for each in templates if each is not None and not isinstance(each, str)]:
        raise ConfigError(f"{folder}: chat_template: expected text, got {odd[0]!r:.60}.")
    if isinstance(hf.chat_template, dict) and "default" not in hf.chat_template:
        names = ", ".join(sorted(hf.chat_template)) or "none"
        raise ConfigError(
            f"{folder}: its chat templates are {names}, and none is the default. "
            f"Fix: write one of them as chat_template into {CONFIG}, or name it default."
        )
    is_plain = hf.chat_template is None
    if is_plain:
        hf.eos_token = hf.convert_ids_to_tokens(stops[0])
        hf.chat_template = ("{{ bos_token }}" if begin else "") + PLAIN

    # The key depends on all that decides which ids a text gets.
    images = None
    if any((folder / name).is_file() for name in PROCESSOR_FILES):
        images = open_images(folder, hf)
    identity = [hf.backend_tokenizer.to_str(), begin, stops, hf.chat_template]
    identity = json.dumps(identity if images is None else [*identity, images.hf.to_json_string()])
    return DirectoryTokenizer(
        folder=folder,
        hf=hf,
        vocab=max(hf.get_vocab().values()) + 1,
        begin=begin,
        stops=stops,
        pad=stops[0] if hf.pad_token_id is None else hf.pad_token_id,
        key=hashlib.sha256(identity.encode()).hexdigest(),
        plain=is_plain,
        images=images,
    )


def _find_stops(hf: Any, folder: Path) -> tuple[int, ...]:
    """Return the tokenizer's end token, and after it every other that the model's configurations name."""
    found = [hf.eos_token_id]
    for name in STOP_FILES:
        ids = read_json(folder / name).get("eos_token_id")
        found += ids if isinstance(ids, list) else [ids]
    known = set(hf.get_vocab().values())
    stops = tuple(dict.fromkeys(i for i in found if type(i) is int and i in known))
    if not stops:
        raise ConfigError(
            f"{folder}: no end token in {CONFIG} or {', '.join(STOP_FILES)} that {FILE} knows. "
            f'Fix: write "eos_token": "..." into {CONFIG}.'
        )
    return stops
