"""Where a value of the configuration comes from: an argument or a line of a file; and the bounds of files."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.default_element import ResultDefault
from hydra.plugins.config_source import ConfigResult, ConfigSource

from experiments.cli.command_spec import ROOT
from experiments.configs.checks import ConfigError
from experiments.data.files import size_of

COMMAND_LINE = "command line"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
LARGEST_bytes, DEEPEST, MOST_REFERENCES = 2**16, 32, 16
KEY = re.compile(r"(?<![\w./-])[a-z_]+(?:(?:\.\w+)+|(?==))")


class BoundedFiles(FileConfigSource):
    """A folder of a user's files, each of which is checked before Hydra makes anything of it."""

    @staticmethod
    def scheme() -> str:
        return "bounded"

    def load_config(self, config_path: str) -> ConfigResult:
        """As Hydra does."""
        path = Path(self.path, self._normalize_file_name(config_path))
        if path.exists():
            check_file(path)
        return super().load_config(config_path)


def check_file(path: Path) -> None:
    """Refuse a YAML file that is large, deep, or has aliases: a few lines of them can mean 10^9 values."""
    try:
        size_of(path, LARGEST_bytes)
    except OSError as error:
        raise ConfigError(f"{shown(path)}: {error.strerror}.") from None
    depth = 0
    with path.open(encoding="utf-8") as file:
        for event in yaml.parse(file, Loader=LOADER):
            here = f"{shown(path)}:{event.start_mark.line + 1}"
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent):
                raise ConfigError(f"{here}: aliases are not read. Fix: write out what *{event.anchor} means.")
            if depth > DEEPEST:
                raise ConfigError(f"{here}: more than {DEEPEST} levels of values.")


def shown(path: Path) -> str:
    """A path of the repository is relative to it."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def lines_of(defaults: Sequence[ResultDefault], sources: Sequence[ConfigSource]) -> Iterator[tuple[str, str]]:
    """The key of every value in the files of a defaults list, and its `file:line`, in the order of merging.

    Raises:
        ConfigError: a file that is no mapping, or is placed where Hydra's own part of the configuration is.
        yaml.YAMLError: a file cannot be read.
    """
    for default in defaults:
        package, path = default.package or "", default.config_path or ""
        if package.partition(".")[0] == "hydra" != posixpath.dirname(path).partition("/")[0]:
            yield package, path
        for source in sources:
            file = Path(source.path, f"{path}.yaml")
            if source.scheme() in ("file", "bounded") and file.is_file():
                yield from _lines(file, f"{package}.".lstrip("."))
                break


def _lines(path: Path, prefix: str) -> Iterator[tuple[str, str]]:
    root = yaml.compose(path.read_text(encoding="utf-8"), Loader=LOADER)
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{shown(path)}: expected lines of `key: value`.")
    stack = [(prefix, pair) for pair in reversed(root.value) if pair[0].value != "defaults"]
    while stack:
        at, (name, value) = stack.pop()
        if isinstance(value, yaml.MappingNode) and value.value:
            stack += [(f"{at}{name.value}.", pair) for pair in reversed(value.value)]
        else:
            yield f"{at}{name.value}", f"{shown(path)}:{name.start_mark.line + 1}"


def source_of(key: str, sources: Mapping[str, str]) -> str:
    """Where a key, or what holds it, or something below it is set last.

    >>> sources = {"model.width": "conf/model/tiny.yaml:2", "strategy": "command line"}
    >>> [source_of(key, sources) for key in ("strategy.memory", "model", "run.steps")]
    ['command line', 'conf/model/tiny.yaml:2', 'default']
    """
    at = (
        each for each in reversed(sources) if f"{key}.".startswith(f"{each}.") or each.startswith(f"{key}.")
    )
    return sources.get(next(at, ""), "default")


def cite(text: str, sources: Mapping[str, str]) -> str:
    """Add to each line of a message where the keys that it names are set, if they are.

    >>> sources = {"model.heads": "command line", "model.width": "tiny.yaml:2"}
    >>> cite("model.width=128 and model.heads=3: no fit. Fix: model.heads=4.", sources)
    'model.width=128 and model.heads=3: no fit (model.width: tiny.yaml:2; model.heads: command line). Fix: model.heads=4.'
    >>> cite("model.heads=0: must be 1 or more.", sources)
    'model.heads=0: must be 1 or more (command line).'
    """  # noqa: E501
    return "\n".join(_cited(line, sources) for line in text.split("\n"))


def _cited(line: str, sources: Mapping[str, str]) -> str:
    head, fix, rest = line.partition(" Fix:")
    found = {key: sources.get(key) or sources.get(f"{key}.name") for key in KEY.findall(head)}
    named = [f"{key}: {source}" for key, source in found.items() if source]
    if not named or line.startswith("Fix:"):
        return line
    places = "; ".join(named) if len(named) > 1 else named[0].partition(": ")[2]
    return f"{head.rstrip('.;')} ({places}){head[len(head.rstrip('.;')) :]}{fix}{rest}"
