"""Tokenizers: the built-in one, and those of local model directories."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from experiments.configs.train import ConfigError
from experiments.data.bytelevel import TEMPLATE, ByteTokenizer, tokenizer_json
from experiments.data.files import first_few, size_of
from experiments.data.pieces import (
    CONTROL,
    NOTHING,
    TEXT,
    Controls,
    Messages,
    Spelled,
    TextPiece,
    Tokenizer,
    behind_others,
    controls_of,
)
from experiments.data.template import Plain, Template
from fnshard.errors import MissingExtraError, report

FILE = "tokenizer.json"
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json")
LARGEST_bytes = 2**28  # of a file: vocabularies take some tens of MB
TEMPLATES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True)
class FileTokenizer:
    """A `tokenizer.json` and what the files beside it say; made by `load_tokenizer`."""

    folder: Path
    vocab: int
    bos: int | None
    eos: int
    stops: tuple[int, ...]
    pad: int
    key: str
    chat: Template | Plain
    file: Any = field(repr=False, compare=False)
    behind: Mapping[str, Any] = field(repr=False, compare=False)  # what takes texts behind something
    controls: Controls = field(repr=False, compare=False)

    def encode(self, text: str) -> list[int]:
        return self.encode_many([text])[0].tolist()

    def encode_many(
        self, texts: Sequence[str], control: bool = False, behind: str = NOTHING
    ) -> list[np.ndarray]:
        file = self.behind[behind]
        file.encode_special_tokens = not control  # the library's name for: as text
        encoded = file.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(e.ids, np.uint32) for e in encoded]

    def spelled(self, text: str, start: int, stop: int) -> Iterable[Spelled]:
        return self.controls.find(text, start, stop)

    def decode(self, ids: Sequence[int], control: bool = False) -> str:
        return self.file.decode([i for i in ids if i < self.vocab], skip_special_tokens=not control)

    def conversation(self, messages: Messages, first: int = 0) -> list[TextPiece]:
        return self.chat.conversation(messages, first)

    def opening(self, messages: Messages) -> list[TextPiece]:
        return self.chat.opening(messages)

    def save(self, folder: Path) -> None:
        """Copy its files; a chat template is among them, whether or not the model came with one."""
        for name in (FILE, *SETTINGS[:2], *TEMPLATES):
            if (self.folder / name).exists():
                shutil.copyfile(self.folder / name, folder / name)
        if isinstance(self.chat, Plain):
            (folder / TEMPLATES[0]).write_text(self.chat.source(self.file.id_to_token), encoding="utf-8")


def byte_tokenizer() -> Tokenizer:
    """The built-in tokenizer: bytes, and six control tokens.

    >>> byte_tokenizer().vocab
    264
    """
    return ByteTokenizer()


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer of a local model directory.

    Args:
        directory: with a `tokenizer.json`; special tokens and a chat template are looked for in the files
            that usually stand beside it. A directory without a template gets plain "role: text" turns.

    Raises:
        ConfigError: no such file, one that is not what its name says, or no end token in any of them.
        MissingExtraError: the `tokenizers` library is not installed.
    """
    folder = Path(directory)
    if not (folder / FILE).is_file():
        there = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else None
        raise ConfigError(
            report(
                f"{folder} holds no {FILE}; " + ("it is no folder." if there is None else "it holds:"),
                first_few(there or [], 8),
                "name a model directory that has one (AutoTokenizer.from_pretrained(...).save_pretrained "
                "writes it), or use the byte tokenizer.",
            )
        )
    text = _read(folder / FILE)
    settings = _settings(folder)
    source, stands_in = _template(folder, settings)
    if text == tokenizer_json() and source in (None, TEMPLATE):
        return ByteTokenizer()
    file = _open(folder / FILE, text)
    names = _special_names(settings)
    bos = _bos(file, names.get("bos_token"), settings)
    stops = _stops(file, names.get("eos_token"), settings, folder)
    pad = names.get("pad_token")
    controls = controls_of(file, stops)
    plain = Plain(bos, stops[0])
    if source == plain.source(file.id_to_token):  # as `save` left it
        source = None
    identity = json.dumps([text, bos, stops, source, sorted(names.items())])
    return FileTokenizer(
        folder=folder,
        vocab=max(file.get_vocab(with_added_tokens=True).values()) + 1,
        bos=bos,
        eos=stops[0],
        stops=stops,
        pad=stops[0] if pad is None or file.token_to_id(pad) is None else file.token_to_id(pad),
        key=hashlib.sha256(identity.encode()).hexdigest(),
        chat=_chat(source, stands_in, names, stops, controls) if source else plain,
        file=file,
        behind=dict(zip((NOTHING, CONTROL, TEXT), (file, *behind_others(file)), strict=True)),
        controls=controls,
    )


def save_tokenizer(tokenizer: Tokenizer, directory: str | Path) -> None:
    """Put a tokenizer's files into a model directory, so that serving systems find it complete."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)


# ------------------------------------------------------------------ what the files say


def _read(path: Path) -> str:
    try:
        size_of(path, LARGEST_bytes)
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error


def _settings(folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for name in SETTINGS:
        if (folder / name).is_file():
            try:
                found[name] = json.loads(_read(folder / name))
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{folder / name} is no JSON: {error}.") from error
            if not isinstance(found[name], dict):
                raise ConfigError(f"{folder / name} holds a {type(found[name]).__name__}, not an object.")
    return {name: found.get(name, {}) for name in SETTINGS}


def _open(path: Path, text: str) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError(
            f"{path} needs the tokenizers library. Fix: pip install fnshard[finetune], or use the byte "
            "tokenizer."
        ) from error
    try:
        file = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path} is no tokenizer: {error}.") from error
    file.no_truncation()
    file.no_padding()
    return file


def _special_names(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """`bos_token`, `eos_token`, ... as text; the first file that names one wins."""
    names: dict[str, str] = {}
    for name in reversed(SETTINGS[:2]):
        for key, value in settings[name].items():
            content = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(content, str):
                names[key] = content
    return names


def _bos(file: Any, name: str | None, settings: Mapping[str, Mapping[str, Any]]) -> int | None:
    """The begin token, where this model's texts have one: some only define it."""
    token = file.token_to_id(name) if name else None
    flag = settings[SETTINGS[0]].get("add_bos_token")
    added = file.encode("", add_special_tokens=True).ids[:1] == [token]
    return token if (added if flag is None else flag) else None


def _stops(
    file: Any, name: str | None, settings: Mapping[str, Mapping[str, Any]], folder: Path
) -> tuple[int, ...]:
    """The end token first, then every other that the configurations name."""
    named = [] if name is None or file.token_to_id(name) is None else [file.token_to_id(name)]
    for config in SETTINGS[2:]:
        ids = settings[config].get("eos_token_id")
        named += ids if isinstance(ids, list) else [ids]
    stops = tuple(dict.fromkeys(i for i in named if isinstance(i, int) and file.id_to_token(i) is not None))
    if not stops:
        raise ConfigError(
            f"{folder}: no end token in {', '.join(SETTINGS)} that {FILE} knows"
            + (f" (eos_token={name!r} is none of its tokens)" if name else "")
            + '. Fix: write "eos_token": "..." into tokenizer_config.json.'
        )
    return stops


def _template(folder: Path, settings: Mapping[str, Mapping[str, Any]]) -> tuple[str | None, Path]:
    jinja, wrapped = (folder / name for name in TEMPLATES)
    if jinja.is_file():
        return _read(jinja), jinja
    file = folder / SETTINGS[0]
    template = settings[SETTINGS[0]].get("chat_template")
    if template is None and wrapped.is_file():
        file = wrapped
        try:
            template = json.loads(_read(wrapped)).get("chat_template")
        except (ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{wrapped} holds no template: {error}.") from error
    if isinstance(template, list):  # several, by name
        template = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}.get("default")
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"{file}: chat_template is a {type(template).__name__}, not a text.")
    return template or None, file


def _chat(
    source: str, file: Path, names: Mapping[str, str], stops: tuple[int, ...], controls: Controls
) -> Template:
    # Every token that generation stops at may end a turn: a chat model's often is not its text's.
    ends = tuple(text for stop in stops for text, i in controls.ids.items() if i == stop)
    template = Template(source, tuple(sorted(names.items())), ends, tuple(controls.ids), str(file))
    template.check()
    return template
