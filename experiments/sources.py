"""Sources: where a value of the configuration comes from: an argument as typed, or a line of a file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.default_element import ResultDefault
from hydra.plugins.config_source import ConfigSource
from omegaconf import OmegaConf

from experiments.checks import ConfigError
from experiments.form import ROOT

TYPED = "command line"
NAMED = re.compile(  # `run.steps=0`, and values with blanks in them
    r"(?<![\w.])([a-z_][\w.]*)=('[^']*'|\"[^\"]*\"|\{.*?\}|\[.*?\]|[^\s:,;]*[^\s:,;.])"
)


@dataclass(frozen=True)
class Line:
    """A value in a file: its dotted key, what is written there, and where that is."""

    key: str
    value: Any
    source: str


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
    root = yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
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
