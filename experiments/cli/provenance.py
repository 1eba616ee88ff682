"""Sources: where a value of the configuration comes from: an argument as typed, or a line of a file; and what
keeps files small, whatever their aliases make of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.default_element import ResultDefault
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

from experiments.cli.command_spec import ROOT
from experiments.configs.checks import ConfigError
from experiments.data.files import size_of

TYPED = "command line"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
INSIDE, NESTED = re.compile(r"\$\{([^{}]*)\}"), re.compile(r"\$\{[^{}]*\$\{")
REPEATED = ("hydra.overrides.", "hydra.job.")  # the command line, once more
WORD = re.compile(r"[A-Za-z_][\w.]*")
LARGEST_bytes, MOST_VALUES, DEEPEST = 2**20, 10_000, 32  # of a file
NAMED = re.compile(  # `run.steps=0`, and values with blanks in them
    r"(?<![\w.])([a-z_][\w.]*)=('[^']*'|\"[^\"]*\"|\{.*?\}|\[.*?\]|[^\s:,;]*[^\s:,;.])"
)


@dataclass(frozen=True)
class Line:
    """A value in a file: its dotted key, what is written there, and where that is."""

    key: str
    value: Any
    source: str


class BoundedSource(FileConfigSource):
    """Files of a folder, each looked at before Hydra makes anything of it."""

    def load_config(self, config_path: str) -> ConfigResult:
        """As Hydra does.

        Raises:
            ConfigError: see `check_size`.
        """
        path = Path(self.path, self._normalize_file_name(config_path))
        if path.exists():
            check_size(path)
        return super().load_config(config_path)


@contextmanager
def bounded_files() -> Iterator[None]:
    """Hydra's files are `BoundedSource`s."""
    types = SourcesRegistry.instance().types
    before = types[FileConfigSource.scheme()]
    types[FileConfigSource.scheme()] = BoundedSource
    try:
        yield
    finally:
        types[FileConfigSource.scheme()] = before


def check_size(path: Path) -> None:
    """Refuse a YAML file that is large, deep, or made so by its aliases: a few lines can mean 10^9 values.

    Only its events are looked at: nothing is built, and an alias counts as what it stands for.

    Raises:
        ConfigError: it is, or an alias stands for what holds it.
        yaml.YAMLError: it is no YAML.
    """
    shown = shown_path(path)
    try:
        size_of(path, LARGEST_bytes)
    except OSError as error:
        raise ConfigError(f"{shown}: {error.strerror}.") from None
    values: Counter[str] = Counter()  # that an anchor stands for
    above: list[tuple[str | None, int]] = [(None, 0)]  # what is not closed yet: its anchor, and its values
    with path.open(encoding="utf-8") as file:
        for event in yaml.parse(file, Loader=LOADER):
            here = f"{shown}:{event.start_mark.line + 1}"
            count = 0
            if isinstance(event, yaml.CollectionStartEvent):
                above.append((event.anchor, 1))
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, count = above.pop()
                values[anchor or ""] = count
            elif isinstance(event, yaml.ScalarEvent):
                count = values[event.anchor or ""] = 1
            elif isinstance(event, yaml.AliasEvent):
                if any(anchor == event.anchor for anchor, _ in above):
                    raise ConfigError(f"{here}: the alias *{event.anchor} stands for what holds it.")
                count = values[event.anchor]
            above[-1] = (above[-1][0], above[-1][1] + count)
            if sum(count for _, count in above) > MOST_VALUES or len(above) > DEEPEST:
                raise ConfigError(
                    f"{here}: more than {MOST_VALUES} values, aliases written out, or more than {DEEPEST} "
                    "levels of them: no configuration has that many."
                )


def written_out(values: Mapping[str, Any]) -> Iterator[str]:
    """Values that are long once the values that they refer to are written out: ten references to ten each are
    a hundred, and so on.

    >>> chain = {f"x{i}": f"${{x{i + 1}}}" * 10 for i in range(8)}
    >>> list(written_out({"run": {**chain, "x8": "ten"}}))[0]
    'run.x0: 855555550 characters, all references written out; the most is 1048576.'
    """
    texts = dict(_texts(values, ""))
    lengths: dict[str, int] = {}

    def length(key: str) -> int:
        if key not in lengths:
            lengths[key] = 0  # of what refers to itself OmegaConf tells
            words = Counter(WORD.findall(" ".join(INSIDE.findall(texts[key]))))
            lengths[key] = len(texts[key]) + sum(
                times * sum(map(length, _meant(word, texts))) for word, times in words.items()
            )
        return lengths[key]

    for key, text in texts.items():
        if key.startswith(REPEATED):
            continue
        if NESTED.search(text):
            yield f"{key}={text[:80]}: a reference inside of another."
        elif length(key) > LARGEST_bytes:
            yield (
                f"{key}: {length(key)} characters, all references written out; the most is {LARGEST_bytes}."
            )


def _texts(values: Any, key: str) -> Iterator[tuple[str, str]]:
    """Every value that is not a mapping or a list, by its dotted key."""
    inside = values.items() if isinstance(values, Mapping) else enumerate(values)
    for name, value in inside:
        if isinstance(value, Mapping | list):
            yield from _texts(value, f"{key}{name}.")
        else:
            yield f"{key}{name}", str(value)


def _meant(word: str, keys: Iterable[str]) -> list[str]:
    """Keys that a reference may mean: one, what is below it, or one relative to where it stands."""
    word = word.strip(".")
    return [k for k in keys if k == word or k.startswith(f"{word}.") or k.endswith(f".{word}")]


def shown_path(path: Path) -> Path:
    """Of our own files without the machine's part."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def lines_of(defaults: Sequence[ResultDefault], sources: Sequence[ConfigSource]) -> Iterator[Line]:
    """Every value of the files of a defaults list, in the order in which they are merged.

    Raises:
        yaml.YAMLError, OmegaConfBaseException: a file cannot be read.
    """
    for default in defaults:
        path = _file_of(default.config_path, sources)
        if path is not None:
            prefix = f"{default.package}." if default.package else ""
            yield from _values(path, prefix)


def _file_of(config_path: str | None, sources: Sequence[ConfigSource]) -> Path | None:
    """None for what Hydra or the `ConfigStore` has itself."""
    for source in sources:
        path = Path(source.path, f"{config_path}.yaml")
        if source.scheme() == "file" and path.is_file():
            return path
    return None


def _values(path: Path, prefix: str) -> Iterator[Line]:
    text = path.read_text(encoding="utf-8")
    plain = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    root = yaml.compose(text, Loader=LOADER)
    shown = shown_path(path)
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{shown}: expected lines of `key: value`, not {text.strip()[:40]!r}.")
    for node, _ in root.value:
        if node.value != "defaults":
            yield from _below(root, plain, node.value, prefix, str(shown))


def _below(parent: yaml.MappingNode, values: Any, name: str, prefix: str, file: str) -> Iterator[Line]:
    at, inside = next((k, v) for k, v in parent.value if k.value == name)
    value = values.get(name, values.get(yaml.safe_load(name)))
    if isinstance(inside, yaml.MappingNode) and inside.value:
        for each, _ in inside.value:
            yield from _below(inside, value, each.value, f"{prefix}{name}.", file)
    else:
        yield Line(f"{prefix}{name}", value, f"{file}:{at.start_mark.line + 1}")


def with_sources(text: str, sources: Mapping[str, str]) -> str:
    """Problems, a line each, and where the values come from that a line names before its colon.

    >>> sources = {"model.heads": "command line", "model.width": "conf/model/tiny.yaml:2"}
    >>> with_sources("model.heads=0: must be at least 1. Fix: model.heads=4.", sources)
    'model.heads=0 (command line): must be at least 1. Fix: model.heads=4.'
    >>> with_sources("model.width=128 and model.heads=3 do not fit.", sources)
    'model.width=128 (conf/model/tiny.yaml:2) and model.heads=3 (command line) do not fit.'
    """
    return "\n".join(_with_sources(line, sources) for line in text.split("\n"))


def _with_sources(line: str, sources: Mapping[str, str]) -> str:
    said, fix, rest = line.partition("Fix:")
    out, end = "", 0
    for match in NAMED.finditer(said):
        if re.search(r":(\s|$)", said[end : match.start()]):
            break
        source = sources.get(match[1]) or sources.get(f"{match[1]}.name")  # `strategy=auto`
        out += said[end : match.end()] + (f" ({source})" if source else "")
        end = match.end()
    return out + said[end:] + fix + rest
