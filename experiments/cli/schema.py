"""Schema: what a job's configuration may hold, for Hydra to compose, and from plain values to dataclasses.

`register` tells Hydra; `build` checks what came out once more, all problems in one error.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from experiments.configs.checks import refusal, too_large
from experiments.configs.train import TrainConfig

SHARED = Path(__file__).resolve().parents[2] / "conf" / "shared"


def build(values: Mapping[str, Any], kind: type = TrainConfig) -> Any:
    """Make the dataclasses from nested dicts.

    Raises:
        ConfigError: unknown or missing keys, wrong types, values out of range; all of them at once.
    """
    config, problems = built(values, kind)
    if problems:
        raise refusal(problems)
    return config


def built(
    values: Mapping[str, Any], kind: type = TrainConfig, unsure: frozenset[str] = frozenset()
) -> tuple[Any, list[str]]:
    """The dataclasses, or None, and every problem.

    Args:
        unsure: groups of which something is known to be wrong already: they are not looked at as a whole, and
            neither is the top.
    """
    problems = list(too_large(values))
    if problems:
        return None, problems
    config = _build(kind, values, "", problems, unsure)
    return config, problems


def _build(kind: type, values: Any, path: str, problems: list[str], unsure: frozenset[str]) -> Any:
    """`kind(**values)`, or None with something added to `problems`, or where it is of no use."""
    if not isinstance(values, Mapping):
        problems.append(f"{path or 'the configuration'}={values!r}: expected keys below it.")
        return None
    before = len(problems)
    hints = typing.get_type_hints(kind)
    known = [field.name for field in dataclasses.fields(kind)]
    at = f"{path}." if path else ""
    for key in values:
        if key not in known:
            problems.append(f"{at}{key}: no such key; {path or 'the top'} has {', '.join(known)}.")
    made = {}
    for name in known:
        if name not in values:
            problems.append(f"{at}{name}: is missing.")
            continue
        made[name] = _value(hints[name], values[name], f"{at}{name}", problems, unsure)
    if len(problems) > before or path in unsure or (unsure and not path):
        return None
    try:
        return kind(**made)
    except ValueError as error:
        problems.extend(str(error).split("\n  "))
        return None


def _value(hint: Any, value: Any, path: str, problems: list[str], unsure: frozenset[str]) -> Any:
    if hint is Any:  # the dataclass looks at it
        return value
    options = options_of(hint)
    groups = [option for option in options if dataclasses.is_dataclass(option)]
    if groups:
        name = value.get("name") if isinstance(value, Mapping) else None
        named = [g for g in groups if getattr(g, "name", None) == name]
        return _build((named or groups)[0], value, path, problems, unsure)
    if value is None and types.NoneType in options:
        return None
    wanted = next(option for option in options if option is not types.NoneType)
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        problems.append(f"{path}={value!r}: expected {wanted.__name__}, got {type(value).__name__}.")
    elif wanted is float and not math.isfinite(value):
        problems.append(f"{path}={value!r}: expected a finite number.")
    return value


def options_of(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the hint alone.

    >>> options_of(int | None)
    (<class 'int'>, <class 'NoneType'>)
    """
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


# ------------------------------------------------------------------ what there is


def leaves(kind: type, chosen: Mapping[str, type] | None = None, path: str = "") -> dict[str, Any]:
    """The type of every value, by its dotted key; of a group with several schemas, those of the `chosen` one
    (by the group's name), or of all.

    >>> [key for key in leaves(TrainConfig) if key.startswith("mesh")]
    ['mesh.replicate', 'mesh.shard']
    """
    out: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(kind).items():
        key = f"{path}{name}"
        groups = [option for option in options_of(hint) if dataclasses.is_dataclass(option)]
        if not groups:
            out[key] = hint
        for group in [chosen[key]] if chosen and key in chosen else groups:
            out |= leaves(group, chosen, f"{key}.")
    return out


def alternatives(kind: type) -> dict[str, dict[str, type]]:
    """Groups with several schemas: group -> name of the schema in `ConfigStore` -> dataclass.

    >>> sorted(alternatives(TrainConfig)["optimizer"])
    ['schema_adamw', 'schema_sgd']
    """
    return {
        name: {f"schema_{each.name}": each for each in options_of(hint) if dataclasses.is_dataclass(each)}
        for name, hint in typing.get_type_hints(kind).items()
        if len(options_of(hint)) > 1 and dataclasses.is_dataclass(options_of(hint)[0])
    }


# ------------------------------------------------------------------ what Hydra is told


class SharedGroups(SearchPathPlugin):
    """Add `conf/shared` to Hydra's search path: the groups that several commands have."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="fnshard", path=f"file://{SHARED}")


def register(
    kind: type = TrainConfig, name: str = "train_schema", without_files: tuple[str, ...] = ("mesh",)
) -> None:
    """Tell Hydra's `ConfigStore` the schemas, so that it converts values, and refuses others by itself.

    Args:
        kind: a job's configuration.
        name: of its schema.
        without_files: groups that have no files to choose from, and start from their defaults.
    """
    Plugins.instance().register(SharedGroups)
    store = ConfigStore.instance()
    several = alternatives(kind)
    fields: list[Any] = []
    for group, hint in typing.get_type_hints(kind).items():
        if group in several:
            fields.append((group, Any))
        elif dataclasses.is_dataclass(hint):
            schema = _schema(hint)
            default = (dataclasses.field(default_factory=schema),) if group in without_files else ()
            fields.append((group, schema, *default))
    schema = _schema(kind, fields)
    store.store(name=name, node=schema)
    for group, kinds in several.items():
        for each, node in kinds.items():
            store.store(group=group, name=each, node=_schema(node))


def _schema(kind: type, groups: list[Any] | None = None) -> type:
    """The same fields, not frozen, with lists for tuples: OmegaConf would make frozen ones read-only, to
    overrides too."""
    fields = list(groups or [])
    taken = {field[0] for field in fields}
    hints = typing.get_type_hints(kind)
    fields += [(f.name, _plain(hints[f.name]), *_default(f)) for f in dataclasses.fields(kind)
               if f.name not in taken]  # fmt: skip
    return dataclasses.make_dataclass(kind.__name__, sorted(fields, key=len))


def _plain(hint: Any) -> Any:
    """A hint that OmegaConf knows."""
    tuples = [option for option in options_of(hint) if typing.get_origin(option) is tuple]
    if not tuples:
        return hint
    return list[typing.get_args(tuples[0])[0]] if len(options_of(hint)) == 1 else Any


def _default(field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    """What `make_dataclass` wants behind name and type: nothing where a value has to be given."""
    if isinstance(field.default, tuple):
        return (dataclasses.field(default_factory=lambda: list(field.default)),)
    if field.default is dataclasses.MISSING:
        return ()
    return (dataclasses.field(default=field.default),)
