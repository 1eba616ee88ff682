"""Form: the options of a command, read off its dataclasses and the files of its groups.

A `Draft` is what a person has chosen of them, as a command line.
"""

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
RESERVED = ("hydra.", "hydra/", "-", "~hydra", "+hydra")  # the beginnings of arguments that the page gives
PLAIN = re.compile(r"(?!(?:null|true|false|nan|inf)$)[A-Za-z_./][\w./-]*", re.IGNORECASE)  # needs no quotes


# ------------------------------------------------------------------ what a person has chosen


@dataclass(frozen=True)
class Draft:
    """A draft of a command line.

    Args:
        job: a name of `JOBS`.
        choices: the file that is chosen for a group, where it is not the command's default.
        values: values by key, as Hydra reads them.
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
            ConfigError: `more` has quotes without an end, flags, or keys that the page gives itself.
        """
        try:
            more = shlex.split(self.more)
        except ValueError as error:
            raise ConfigError(f"{self.more}: {error}. Fix: close the quotes.") from None
        refuse_reserved(more)
        pairs = [*self.choices.items(), *self.values.items()]
        return [*(f"{key}={value}" for key, value in pairs), *more]

    def choose(self, group: str, choice: str) -> Draft:
        """Return a draft with another file of a group; an empty choice is the command's default.

        Values of the group's keys are dropped, since they were meant for the former file.
        """
        choices = {name: file for name, file in self.choices.items() if name != group}
        values = {key: value for key, value in self.values.items() if not key.startswith(f"{group}.")}
        if choice:
            choices[group] = choice
        return replace(self, choices=choices, values=values)

    def put(self, key: str, value: str) -> Draft:
        """Return a draft with another value of a key; an empty one stands for the value of the files."""
        values = {name: old for name, old in self.values.items() if name != key}
        if value:
            values[key] = value
        return replace(self, values=values)


def refuse_reserved(arguments: Sequence[str]) -> None:
    """Refuse arguments that would lead a run out of the page's folder, or that are no keys.

    Raises:
        ConfigError: there are such arguments. The error names all of them.
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
        key: the dotted key, as on a command line.
        value: its value, as Hydra reads it.
        choices: all values that its type allows; empty if these are not a few.
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
        """Return what a person has typed, as Hydra reads it. Quotes and null mean the same as there."""
        is_quoted = bool(typed) and typed[0] in "'\"" and typed[0] == typed[-1]
        if not self.is_text or not typed.strip() or typed == "null" or is_quoted:
            return typed.strip()
        return quote(typed)


@dataclass(frozen=True)
class Group:
    """A group of keys that belong together.

    Args:
        name: the name of the group; empty for the keys of the command itself.
        about: the docstring of its dataclass.
        choices: the files of the group.
        chosen: the file that counts.
    """

    name: str
    about: str
    fields: tuple[Field, ...]
    choices: tuple[str, ...] = ()
    chosen: str = ""


@dataclass(frozen=True)
class Form:
    """A form: all options of a command, with the configuration that a draft makes.

    Args:
        config: the configuration; None if something is wrong with it.
        problems: what is wrong, a text each.
    """

    groups: tuple[Group, ...]
    config: Any
    problems: tuple[str, ...] = ()


def read_form(draft: Draft) -> Form:
    """Compose and check a draft as its command does.

    Only one thread may call it at a time, since Hydra's state belongs to the process.

    Raises:
        ConfigError: it cannot be composed.
    """
    # Compose the draft's values, and list the files of each group.
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

    # Check them as the command does.
    config, problems = check(values, command.config)
    texts = [problem.text for problem in problems]
    if config is not None:
        try:
            config = command.complete(config)
        except ConfigError as error:
            config, texts = None, [str(error)]

    # The groups, each with the fields of its dataclass.
    kinds = kinds_of(command.config, values)
    names = [each.name for each in fields(command.config)]
    groups = []
    for name in dict.fromkeys(["experiment", *names, *options]):
        if name in kinds or name in options:
            kind, group_values, files = kinds.get(name), values.get(name), options.get(name, ())
            if not isinstance(group_values, Mapping):
                group_values = {}
            group_fields = tuple(fields_of(name, kind, group_values, bool(files)))
            about = "" if kind is None else " ".join((kind.__doc__ or "").split())
            groups.append(Group(name, about, group_fields, files, chosen.get(name) or ""))

    # The fields that are in no group come last.
    hints = typing.get_type_hints(command.config)
    single = [name for name in names if name not in kinds and name not in options]
    groups.append(Group("", "", tuple(make_field(name, values.get(name), hints[name]) for name in single)))
    return Form(tuple(groups), config, tuple(texts))


def fields_of(group: str, kind: type | None, values: Mapping[str, Any], has_files: bool) -> Iterator[Field]:
    """Yield the fields of a group's dataclass, or the keys that its `_target_` is called with.

    Args:
        has_files: whether a file of the group sets its `name`, which is no field then.
    """
    hints = dict.fromkeys(values, Any) if kind is None else typing.get_type_hints(kind)
    for name, value in values.items():
        if name in hints and name != TARGET and not (name == "name" and has_files):
            yield make_field(f"{group}.{name}", value, hints[name])


def make_field(key: str, value: Any, hint: Any) -> Field:
    """Make the field of a key from its value and its type."""
    members = set(typing.get_args(hint) if is_union(hint) else (hint,)) - {types.NoneType}
    return Field(key, hydra_text(value), choices_of(hint), members == {str})


def choices_of(hint: Any) -> tuple[str, ...]:
    """Return all values that a type has, as Hydra reads them; nothing if these are not a few.

    >>> choices_of(typing.Literal["a", "b"] | None), choices_of(bool), choices_of(int)
    (('a', 'b', 'null'), ('true', 'false'), ())
    """
    if hint is bool:
        return "true", "false"
    if hint is types.NoneType:
        return ("null",)
    if typing.get_origin(hint) is typing.Literal:
        return tuple(map(hydra_text, typing.get_args(hint)))
    if not is_union(hint):
        return ()
    members = [choices_of(each) for each in typing.get_args(hint)]
    return tuple(choice for member in members for choice in member) if all(members) else ()


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
    """Return text as Hydra reads it, which is in quotes unless it is a plain word.

    >>> quote("it's"), quote("a/b.jsonl"), quote("null"), quote("end\\\\")
    ("'it\\\\'s'", 'a/b.jsonl', "'null'", "'end\\\\\\\\'")
    """
    if PLAIN.fullmatch(text):
        return text

    # Backslashes are escapes only before a quote, so these are doubled and others are not.
    def escape(found: re.Match[str]) -> str:
        backslashes, quote_or_end = found.groups()
        return backslashes * 2 + (f"\\{quote_or_end}" if quote_or_end else "")

    inner = re.sub(r"(\\*)('|$)", escape, text)
    return f"'{inner}'"
