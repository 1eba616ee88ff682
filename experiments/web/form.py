"""Form: what a command can be told, read off its dataclasses and the files of its groups; and what a person
has chosen of it, as a command line."""

from __future__ import annotations

import re
import shlex
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hydra.core.global_hydra import GlobalHydra

from experiments import finetune, train
from experiments.lib.checks import TARGET, ConfigError
from experiments.lib.compose import Command, check, compose_values, kinds_of, open_hydra, plain_values

JOBS: dict[str, Command] = {"train": train.COMMAND, "finetune": finetune.COMMAND}
RUN_DIR = "hydra.run.dir"
OF_A_SWEEP = ("launcher",)  # groups that do nothing in a single run
RESERVED = ("hydra.", "hydra/", "-", "~hydra", "+hydra")  # how arguments begin that the page says itself
PLAIN = re.compile(r"(?!(?:null|true|false|nan|inf)$)[A-Za-z_./][\w./-]*", re.IGNORECASE)  # needs no quotes


# ------------------------------------------------------------------ what a person has chosen


@dataclass(frozen=True)
class Draft:
    """A command line in the making.

    Args:
        job: a name of `JOBS`.
        choices: a file by group, where it is not the command's own.
        values: by key, as Hydra reads them.
        more: further arguments, as a shell reads them.
    """

    job: str = "train"
    choices: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    more: str = ""

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of the command.

        Raises:
            ConfigError: `more` has quotes without an end, flags, or keys that the page says itself.
        """
        try:
            more = shlex.split(self.more)
        except ValueError as error:
            raise ConfigError(f"{self.more}: {error}. Fix: close the quotes.") from None
        refuse_reserved(more)
        pairs = [*self.choices.items(), *self.values.items()]
        return [*(f"{key}={value}" for key, value in pairs), *more]

    def choose(self, group: str, choice: str) -> Draft:
        """Return a draft with another file of a group: values of the group's keys were another file's. An
        empty choice is the command's own."""
        choices = {name: each for name, each in self.choices.items() if name != group}
        values = {key: each for key, each in self.values.items() if not key.startswith(f"{group}.")}
        return replace(self, choices=choices | ({group: choice} if choice else {}), values=values)

    def put(self, key: str, value: str) -> Draft:
        """Return a draft with another value of a key; an empty one is what the files say."""
        values = {name: each for name, each in self.values.items() if name != key}
        return replace(self, values=values | ({key: value} if value else {}))


def refuse_reserved(arguments: Sequence[str]) -> None:
    """Refuse arguments that would lead a run out of the page's folder, or that are no keys.

    Raises:
        ConfigError: with all of them.
    """
    wrong = [each for each in arguments if each.startswith(RESERVED)]
    if wrong:
        raise ConfigError(
            f"{' '.join(wrong)}: flags and keys of Hydra are the page's own: runs stay in its folder. "
            "Fix: leave them out, or start the command in a shell."
        )


def draft_of(job: str, arguments: Sequence[str]) -> Draft:
    """Return the draft of a command line that was given before."""
    refuse_reserved(arguments)
    choices, values, more = {}, {}, []
    groups = {group.name for group in read_form(Draft(job)).groups if group.choices}
    for argument in arguments:
        key, is_value, value = argument.partition("=")
        if key in groups and is_value:
            choices[key] = value
        elif is_value and re.fullmatch(r"\w+(\.\w+)*", key) and not key.endswith(TARGET):
            values[key] = value
        else:
            more.append(argument)
    return Draft(job, choices, values, shlex.join(more))


def command_line(job: str, arguments: Sequence[str]) -> str:
    """Return a command as a person types it in a shell.

    >>> command_line("train", ["run.steps=3", "run.prompt='a b'"])
    'python -m experiments.train run.steps=3 \\'run.prompt=\\'"\\'"\\'a b\\'"\\'"\\'\\''
    """
    return shlex.join(["python", "-m", f"experiments.{job}", *arguments])


# ------------------------------------------------------------------ what can be chosen


@dataclass(frozen=True)
class Field:
    """A key of a configuration.

    Args:
        key: dotted, as a command line has it.
        value: what it is, as Hydra reads it.
        choices: all that it may be, as far as its type says so; empty: anything.
        is_text: whether what a person types is text, and has to be quoted.
    """

    key: str
    value: str
    choices: tuple[str, ...] = ()
    is_text: bool = False

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]

    def as_hydra(self, typed: str) -> str:
        """Return what a person has typed, as Hydra reads it; quotes and null mean what they mean there."""
        is_said = not typed.strip() or typed == "null" or (typed[0] in "'\"" and typed[0] == typed[-1])
        return typed.strip() if is_said or not self.is_text else quote(typed)


@dataclass(frozen=True)
class Group:
    """Keys that belong together.

    Args:
        name: of the group; empty: of the command itself.
        about: the docstring of its dataclass.
        choices: the files that there are of it; `chosen`, the one that counts.
    """

    name: str
    about: str
    fields: tuple[Field, ...]
    choices: tuple[str, ...] = ()
    chosen: str = ""


@dataclass(frozen=True)
class Form:
    """All that a command can be told, and what it makes of a draft.

    Args:
        config: None where something is wrong.
        problems: all of them.
    """

    groups: tuple[Group, ...]
    config: Any
    problems: tuple[str, ...] = ()


def read_form(draft: Draft) -> Form:
    """Compose and check a draft as its command does. One thread at a time: Hydra's state is the process's.

    Raises:
        ConfigError: it cannot be composed.
    """
    command, arguments = JOBS[draft.job], draft.arguments
    with open_hydra(command):
        composed = compose_values(command, arguments)
        values = plain_values(command, composed)
        loader = GlobalHydra.instance().config_loader()
        chosen = {
            name: choice for name, choice in composed.hydra.runtime.choices.items()
            if not name.startswith("hydra") and name not in OF_A_SWEEP
        }  # fmt: skip
        options = {name: tuple(loader.get_group_options(name)) for name in chosen}
    config, problems = check(values, command.config)
    texts = [each.text for each in problems]
    if config is not None:
        try:
            config = command.complete(config)
        except ConfigError as error:
            config, texts = None, [str(error)]

    kinds = kinds_of(command.config, values)
    single = [each for each in fields(command.config) if each.name not in {*kinds, *options}]
    hints = typing.get_type_hints(command.config)
    top = [make_field(each.name, values.get(each.name), hints[each.name]) for each in single]
    groups = []
    for name in dict.fromkeys(["experiment", *(each.name for each in fields(command.config)), *options]):
        if name in kinds or name in options:
            kind, of_group = kinds.get(name), values.get(name)
            has_files = bool(options.get(name))
            made = fields_of(name, kind, of_group if isinstance(of_group, Mapping) else {}, has_files)
            about = "" if kind is None else " ".join((kind.__doc__ or "").split())
            groups.append(Group(name, about, tuple(made), options.get(name, ()), chosen.get(name) or ""))
    groups.append(Group("", "", tuple(top)))
    return Form(tuple(groups), config, tuple(texts))


def fields_of(group: str, kind: type | None, values: Mapping[str, Any], has_files: bool) -> Iterator[Field]:
    """Yield the fields of a group: of its dataclass, or the keys that a `_target_` is called with.

    Args:
        has_files: whether its `name` is chosen by a file.
    """
    hints = dict.fromkeys(values, Any) if kind is None else typing.get_type_hints(kind)
    for name, value in values.items():
        if name in hints and name != TARGET and not (name == "name" and has_files):
            yield make_field(f"{group}.{name}", value, hints[name])


def make_field(key: str, value: Any, hint: Any) -> Field:
    """Return the field of a key, by its type."""
    members = set(typing.get_args(hint) if is_union(hint) else (hint,)) - {types.NoneType}
    return Field(key, hydra_text(value), choices_of(hint), members == {str})


def choices_of(hint: Any) -> tuple[str, ...]:
    """Return all values that a type has, as Hydra reads them; nothing where they are not a few.

    >>> choices_of(typing.Literal["a", "b"] | None), choices_of(bool), choices_of(int)
    (('a', 'b', 'null'), ('true', 'false'), ())
    """
    if hint is bool:
        return "true", "false"
    if hint is types.NoneType:
        return ("null",)
    if typing.get_origin(hint) is typing.Literal:
        return tuple(map(hydra_text, typing.get_args(hint)))
    parts = [choices_of(each) for each in typing.get_args(hint)] if is_union(hint) else [()]
    return tuple(choice for part in parts for choice in part) if all(parts) else ()


def is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


# ------------------------------------------------------------------ values as Hydra reads them


def hydra_text(value: Any) -> str:
    """Return a value as Hydra reads it.

    >>> hydra_text({"a": [1, None, True]}), hydra_text("def "), hydra_text("full_shard"), hydra_text("7")
    ('{a: [1, null, true]}', "'def '", 'full_shard', "'7'")
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {hydra_text(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(hydra_text, value))}]"
    return quote(value) if isinstance(value, str) else str(value)


def quote(text: str) -> str:
    """Return text as Hydra reads it: in quotes, unless it is a plain word.

    >>> quote("it's"), quote("a/b.jsonl"), quote("null"), quote("end\\\\")
    ("'it\\\\'s'", 'a/b.jsonl', "'null'", "'end\\\\\\\\'")
    """
    if PLAIN.fullmatch(text):
        return text
    # Backslashes count where a quote follows them, there alone.
    inner = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + (f"\\{found[2]}" if found[2] else ""), text)
    return f"'{inner}'"
