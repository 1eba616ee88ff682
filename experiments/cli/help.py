"""Help: what `--help` prints: the groups and their choices, the keys that matter most, examples."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from experiments.cli.command_spec import CommandSpec
from experiments.cli.validation import groups_of, loader_of

WIDTH, NAME_WIDTH = 100, 40
FLAGS = {
    "--multirun, -m": "a run for every combination of values: KEY=A,B",
    "--cfg job": "show the whole configuration, with every key, and run nothing",
    "--info defaults": "show which files it is made of",
    "--config-dir DIR": "take files of groups from there, too",
    "--hydra-help": "Hydra's own flags, and completion for the shell",
}


def help_of(spec: CommandSpec) -> str:
    spec.register()
    with loader_of(spec) as loader:
        chosen = loader.compute_defaults_list(spec.name, [], RunMode.RUN).overrides.known_choices
        choices = {
            g: loader.get_group_options(g) for g in groups_of(spec, loader) if not g.startswith("hydra/")
        }
        composed = loader.load_configuration(spec.name, [], RunMode.RUN)
    groups = {
        group: "  ".join(f"*{name}" if name == chosen.get(group) else name for name in names)
        for group, names in choices.items()
    }
    options = {f"{key}={_shown(_raw(composed, key))}": text for key, text in spec.help.options.items()}
    parts = [
        textwrap.fill(spec.help.about, WIDTH),
        f"    python -m {spec.module} [GROUP=CHOICE] [KEY=VALUE] ...",
        _table("Groups (GROUP=CHOICE; * is the default)", groups),
        _table("Keys with their defaults (KEY=VALUE)", options),
        "Examples",
        *(f"  {text}\n    {command}" for command, text in spec.help.examples.items()),
        _table("Flags", FLAGS),
    ]
    return "\n\n".join(part for part in parts if part)


def _table(title: str, rows: Mapping[str, str]) -> str:
    if not rows:
        return ""
    wide = min(max(map(len, rows)), NAME_WIDTH)
    indent = " " * (wide + 4)
    lines = []
    for name, text in rows.items():
        first = f"  {name:<{wide}}  "
        if len(name) > wide:  # its text begins on the next line
            lines.append(f"  {name}")
            first = indent
        lines.append(textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=indent))
    return "\n".join([title, *lines])


def _raw(composed: DictConfig, key: str) -> Any:
    """As it is written: a folder that the clock names has no name yet."""
    node, _, last = key.rpartition(".")
    value = OmegaConf.to_container(OmegaConf.select(composed, node) if node else composed, resolve=False)[
        last
    ]
    return re.sub(r"\$\{now:[^}]*\}", "NOW", value) if isinstance(value, str) else value


def _shown(value: Any) -> str:
    """As a command line would say it.

    >>> [_shown(value) for value in (None, True, 600, 4e-3, "def ")]
    ['null', 'true', '600', '0.004', '"def "']
    """
    if isinstance(value, str) and value.strip() == value and value:
        return value
    return json.dumps(value)
