"""The defaults that Hydra composes from, and pydantic's check of what it composed; both from one dataclass.

Hydra gets plain mappings of the defaults: OmegaConf's typed nodes stop at the first wrong value, and pydantic
reports all of them.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from pydantic import TypeAdapter, ValidationError

from experiments import ROOT
from experiments.configs.checks import TARGET, refusal
from experiments.configs.train import TrainConfig

SHARED = ROOT / "conf" / "shared"
MISSING = "???"  # OmegaConf's mark of a value that has to be set


class SharedGroups(SearchPathPlugin):
    """Add `conf/shared` to Hydra's search path: the groups that several commands have."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="fnshard", path=f"file://{SHARED}")


# ------------------------------------------------------------------ defaults


def register(kind: type = TrainConfig, name: str = "train_schema") -> None:
    """Store the defaults of a configuration's dataclass in Hydra's `ConfigStore`.

    Files of groups that choose among dataclasses, or give what has no default, begin with
    `defaults: [/schema/NAME@_here_]`.
    """
    Plugins.instance().register(SharedGroups)
    store, top = ConfigStore.instance(), defaults(kind)
    for group, kinds in _groups_of(kind).items():
        has_alternatives = len(_options_of(kind)[group]) > 1
        if has_alternatives:
            top.pop(group)
        for each in kinds:
            node = defaults(each)
            if has_alternatives or MISSING in node.values():
                store.store(group="schema", name=getattr(each, "name", group), node=node)
    store.store(name=name, node=top)


def defaults(kind: type) -> dict[str, Any]:
    """The defaults of a dataclass as nested plain values, `???` where there is none."""
    groups, out = _groups_of(kind), {}
    for field in dataclasses.fields(kind):
        value = MISSING if field.default is dataclasses.MISSING else field.default
        plain = list(value) if type(value) is tuple else value
        out[field.name] = defaults(groups[field.name][0]) if field.name in groups else plain
    return out


@cache
def _options_of(kind: type) -> dict[str, tuple[Any, ...]]:
    """The members of each field's union, or its type alone."""
    unions = (typing.Union, types.UnionType)
    hints = typing.get_type_hints(kind).items()
    return {n: typing.get_args(h) if typing.get_origin(h) in unions else (h,) for n, h in hints}


@cache
def _groups_of(kind: type) -> dict[str, list[type]]:
    """The fields that are dataclasses, or one of several of them."""
    groups = {name: list(filter(dataclasses.is_dataclass, o)) for name, o in _options_of(kind).items()}
    return {name: kinds for name, kinds in groups.items() if kinds}


def _chosen(kind: type, group: str, value: Any) -> type | None:
    """The dataclass that a group's value is of, by `name`; None where it may be, and is, a `_target_`."""
    kinds, values = _groups_of(kind)[group], value if isinstance(value, Mapping) else {}
    if TARGET in values and len(_options_of(kind)[group]) > len(kinds):
        return None
    return next((each for each in kinds if getattr(each, "name", None) == values.get("name")), kinds[0])


def _known(kind: type, values: Mapping[str, Any]) -> list[str]:
    """The dotted keys that there are; of alternatives, those of the dataclass that `values` choose."""
    known = defaults(kind)
    chosen = {group: _chosen(kind, group, values.get(group)) for group in _groups_of(kind)}
    known |= {group: defaults(each) for group, each in chosen.items() if each is not None}
    return [key for key, _ in flat(known)]


# ------------------------------------------------------------------ the check


class Problem(NamedTuple):
    """What is wrong with a key; or (`is_rule`) with several of them together."""

    text: str
    is_rule: bool = False


def build(values: Mapping[str, Any], kind: type = TrainConfig) -> Any:
    """Make the dataclasses from nested mappings.

    Raises:
        ConfigError: unknown or missing keys, wrong types, values out of range; all of them at once.
    """
    config, problems = check(values, kind)
    if problems:
        raise refusal([problem.text for problem in problems])
    return config


def check(values: Mapping[str, Any], kind: type) -> tuple[Any, list[Problem]]:
    """The dataclasses, None if something is wrong, and every problem."""
    try:
        return _adapter(kind).validate_python(_without_missing(values)), []
    except ValidationError as error:
        return None, list(_problems(error, kind, values))


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _without_missing(values: Any) -> Any:
    if isinstance(values, Mapping):
        return {k: _without_missing(v) for k, v in values.items() if not isinstance(v, str) or v != MISSING}
    return values


def _problems(error: ValidationError, kind: type, values: Mapping[str, Any]) -> Iterator[Problem]:
    known, seen = _known(kind, values), set()
    for each in error.errors(include_url=False):
        parts = [str(part) for part in each["loc"]]
        group = parts[0] if len(parts) > 1 else ""
        if group in _groups_of(kind) and len(_options_of(kind)[group]) > 1:  # of alternatives
            branch, chosen = parts.pop(1), _chosen(kind, group, values.get(group))
            others = [k.__name__ for k in _groups_of(kind)[group] if k is not chosen]
            if branch in others or (chosen and branch != chosen.__name__):
                continue
        key = ".".join(part for part in parts if part.isidentifier() and part != "str")  # not of a tuple
        if each["type"] == "value_error":
            yield from (Problem(text, is_rule=True) for text in str(each["ctx"]["error"]).split("\n  "))
        elif each["type"] == "unexpected_keyword_argument":
            found = flat(each["input"], key)
            yield from (Problem(f"{at}={_shown(v)}: {_no_such_key(at, known)}") for at, v in found)
        elif key not in seen:
            seen.add(key)
            value = MISSING if each["type"] == "missing" else _shown(each["input"])
            yield Problem(f"{key}={value}: {_message(each)}")


def _shown(value: Any) -> Any:
    return "null" if value is None else value


def _no_such_key(key: str, known: list[str]) -> str:
    """The message about a key that does not exist: which is meant (the same name elsewhere, or what looks
    most alike), and which there are."""
    at, _, last = key.rpartition(".")
    while at and not any(k.startswith(f"{at}.") for k in known):
        at = at.rpartition(".")[0]
    below = [k.removeprefix(f"{at}.").partition(".")[0] for k in known if not at or k.startswith(f"{at}.")]
    same = [k for k in known if k.rpartition(".")[2] == last]
    meant = same or difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    hint = f"Did you mean {meant[0]}? " if meant else ""
    return f"no such key. {hint}{at or 'The top'} has {', '.join(dict.fromkeys(below))}."


def _message(error: Mapping[str, Any]) -> str:
    """Pydantic's own, with the choice that was probably meant."""
    if error["type"] == "dataclass_type":
        return "expected keys below it."
    choices = re.findall("'([^']*)'", error["ctx"]["expected"]) if error["type"] == "literal_error" else []
    meant = difflib.get_close_matches(str(error["input"]), choices, n=1)
    return f"{error['msg']}." + (f" Did you mean {meant[0]}?" if meant else "")


def flat(values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings, by dotted keys."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from flat(value, f"{key}.{name}".removeprefix("."))
    else:
        yield key, values
