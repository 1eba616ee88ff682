"""The defaults that Hydra composes from, and the check of what it composed: both come from one dataclass.

Hydra gets plain mappings of defaults rather than structured configurations: OmegaConf's typed nodes stop at
the first wrong value, and are read-only where a dataclass is frozen. Pydantic checks keys and types of the
whole result; what a dataclass says of its own values is in its `__post_init__`.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from pydantic import TypeAdapter, ValidationError

from experiments import ROOT
from experiments.cli.suggest import no_such_key
from experiments.configs.checks import refusal, too_large
from experiments.configs.train import TrainConfig

SHARED = ROOT / "conf" / "shared"
MISSING = "???"  # OmegaConf's mark of a value that has to be set
EXPECTED = {
    "int": "a whole number", "float": "a number", "finite": "a finite number", "bool": "true or false",
    "string": "text", "tuple": "a list, as in [a,b]", "dataclass": "keys below it",
}  # fmt: skip


class SharedGroups(SearchPathPlugin):
    """Add `conf/shared` to Hydra's search path: the groups that several commands have."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="fnshard", path=f"file://{SHARED}")


def register(kind: type = TrainConfig, name: str = "train_schema") -> None:
    """Store the defaults of a configuration's dataclass in Hydra's `ConfigStore`.

    A field that is one of several dataclasses has a node `schema_NAME` for each in the group of its name; the
    files of that group choose one.
    """
    Plugins.instance().register(SharedGroups)
    store, top = ConfigStore.instance(), defaults(kind)
    for group, kinds in alternatives(kind).items():
        top.pop(group)
        for each in kinds:
            store.store(group=group, name=f"schema_{each.name}", node=defaults(each))
    store.store(name=name, node=top)


def defaults(kind: type) -> dict[str, Any]:
    """The defaults of a dataclass as nested plain values, `???` where there is none."""
    hints, out = typing.get_type_hints(kind), {}
    for field in dataclasses.fields(kind):
        groups = _groups(hints[field.name])
        value = MISSING if field.default is dataclasses.MISSING else field.default
        out[field.name] = defaults(groups[0]) if groups else list(value) if type(value) is tuple else value
    return out


def alternatives(kind: type) -> dict[str, list[type]]:
    """Fields that are one of several dataclasses, and these.

    >>> [each.name for each in alternatives(TrainConfig)["optimizer"]]
    ['adamw', 'sgd']
    """
    groups = {name: _groups(hint) for name, hint in typing.get_type_hints(kind).items()}
    return {name: kinds for name, kinds in groups.items() if len(kinds) > 1}


def leaves(kind: type, values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The type of every value by its dotted key; of alternatives, those that `values` choose by `name`.

    >>> [key for key in leaves(TrainConfig, {}) if key.startswith("model.h")]
    ['model.heads']
    """
    out: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(kind).items():
        group = _chosen(hint, values.get(name))
        if group is None:
            out[f"{path}{name}"] = hint
        else:
            below = values.get(name)
            out |= leaves(group, below if isinstance(below, Mapping) else {}, f"{path}{name}.")
    return out


def options_of(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the hint alone.

    >>> options_of(int | None)
    (<class 'int'>, <class 'NoneType'>)
    """
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _groups(hint: Any) -> list[type]:
    return [option for option in options_of(hint) if dataclasses.is_dataclass(option)]


def _chosen(hint: Any, value: Any) -> type | None:
    groups = _groups(hint)
    name = value.get("name") if isinstance(value, Mapping) else None
    return next((g for g in groups if getattr(g, "name", None) == name), groups[0] if groups else None)


@dataclass(frozen=True)
class Problem:
    """What is wrong with the value of a key; of a rule that a dataclass has for several values, `key` is the
    dataclass's and `message` names them itself (`is_rule`)."""

    key: str
    message: str
    value: Any = None
    is_rule: bool = False

    def __str__(self) -> str:
        return self.message if self.is_rule else f"{self.key}={self.value}: {self.message}"


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def build(values: Mapping[str, Any], kind: type = TrainConfig) -> Any:
    """Make the dataclasses from nested mappings.

    Raises:
        ConfigError: unknown or missing keys, wrong types, values out of range; all of them at once.
    """
    config, problems = check(values, kind)
    if problems:
        raise refusal([str(problem) for problem in problems])
    return config


def check(values: Mapping[str, Any], kind: type) -> tuple[Any, list[Problem]]:
    """The dataclasses, None if something is wrong, and every problem."""
    if wrong := [re.split("=|: ", each, maxsplit=2) for each in too_large(values)]:
        return None, [Problem(key, message, value) for key, value, message in wrong]
    known, entries = leaves(kind, values), dict(flat(values))
    problems = [
        Problem(key, "has to be given.", MISSING) for key, value in entries.items() if value == MISSING
    ] + [
        Problem(key, f"expected {EXPECTED['int']}, not {value!r}.", value)
        for key, value in entries.items()
        if isinstance(value, bool) and known.get(key, bool) in (int, float, int | None, float | None)
    ]
    try:
        config = _adapter(kind).validate_python(values)
    except ValidationError as error:
        config, taken = None, {problem.key for problem in problems}
        problems += [
            each for each in _of_pydantic(error, kind, values, known) if each.is_rule or each.key not in taken
        ]
    return (None if problems else config), problems


def _of_pydantic(
    error: ValidationError, kind: type, values: Mapping[str, Any], known: Mapping[str, Any]
) -> Iterator[Problem]:
    hints, seen = typing.get_type_hints(kind), set()
    groups = [name for name, hint in hints.items() if _groups(hint)]
    for each in error.errors(include_url=False):
        parts = [str(part) for part in each["loc"]]
        branch = parts.pop(1) if len(parts) > 1 and len(_groups(hints.get(parts[0]))) > 1 else ""
        if branch and branch != _chosen(hints[parts[0]], values[parts[0]]).__name__:
            continue
        parts = [part for part in parts if part.isidentifier() and part != "str"]  # not `tuple[str, ...]`
        key, what, value = ".".join(parts), each["type"], each["input"]
        if what == "value_error":
            yield from (Problem(key, text, is_rule=True) for text in str(each["ctx"]["error"]).split("\n  "))
        elif what == "unexpected_keyword_argument":
            yield from (
                Problem(at, no_such_key(at, known, [] if "." in at else groups), v)
                for at, v in flat(value, key)
            )
        elif what == "missing":
            yield Problem(key, "has to be given.", MISSING)
        elif key not in seen:
            seen.add(key)
            expected = EXPECTED.get(what.partition("_")[0], each["msg"])
            null = " or null" * (types.NoneType in typing.get_args(known.get(key)))
            yield Problem(
                key, f"expected {expected}{null}, not {'null' if value is None else repr(value)}.", value
            )


def flat(values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings, by dotted keys."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from flat(value, f"{key}.{name}".removeprefix("."))
    else:
        yield key, values
