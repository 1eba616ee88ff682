"""What a command is: its configuration and help, and of a job of ranks what they do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.cli import schema

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"


@dataclass(frozen=True)
class Help:
    """What `--help` says beside the groups: what the command does (`about`), the keys that matter most and
    their meaning, and command lines and their purpose."""

    about: str
    options: Mapping[str, str] = field(default_factory=dict)
    examples: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CommandSpec:
    """A command of `experiments/`.

    Args:
        name: of its configuration, `NAME.yaml`.
        config: the dataclass of the configuration.
        help: for `--help`.
        conf: the folder of its configuration; groups of `conf/shared` are found from any.
        build: checks plain values of the right types further, and gives the configuration.
    """

    name: str
    config: type
    help: Help
    conf: Path = CONF
    build: Callable[[Mapping[str, Any]], Any] | None = None

    @property
    def module(self) -> str:
        """What is run: `python -m MODULE`."""
        return f"experiments.{self.name}"

    def register(self) -> None:
        """Store the defaults where Hydra finds them, as `NAME_schema`."""
        schema.register(self.config, f"{self.name}_schema")


@dataclass(frozen=True)
class Job:
    """A command whose work ranks do together.

    Args:
        spec: of its command line; the configuration has `run`, `mesh` and `data`, as `TrainConfig` does.
        module: where it is, as `JOB`.
        work: what a rank does: (placed config, `Run`, overrides, `Stop`).
        prepare: what is done before ranks start, with the placed configuration; gives the one for the ranks.
            Mistakes in what the configuration names (files, directories) are found here.
    """

    spec: CommandSpec
    module: str
    work: Callable[..., None]
    prepare: Callable[[Any], Any]

    @property
    def name(self) -> str:
        """Of its configuration."""
        return self.spec.name

    @property
    def config(self) -> type:
        """The configuration's dataclass."""
        return self.spec.config
