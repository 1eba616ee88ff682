"""Form: what the command line of a job may say, and a job as command lines and ranks know it."""

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
    """What `--help` says beside the groups.

    Args:
        about: what the job does.
        options: the keys that matter most, and what they mean.
        examples: command lines, and what they are for.
    """

    about: str
    options: Mapping[str, str] = field(default_factory=dict)
    examples: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Form:
    """What a command line may say.

    Args:
        name: of the job's configuration, `NAME.yaml`.
        config: its dataclass.
        help: for `--help`.
        conf: the folder of its configuration.
        without_files: groups with no files to choose from.
        build: the configuration from plain values; None: `schema.build`, which tells more of what it finds.
    """

    name: str
    config: type
    help: Help
    conf: Path = CONF
    without_files: tuple[str, ...] = ("mesh",)
    build: Callable[[Mapping[str, Any]], Any] | None = None

    @property
    def module(self) -> str:
        """What is run: `python -m MODULE`."""
        return f"experiments.{self.name}"

    @property
    def schema(self) -> str:
        """What `ConfigStore` calls the configuration's schema."""
        return f"{self.name}_schema"

    def register(self) -> None:
        """Tell Hydra the schema."""
        schema.register(self.config, self.schema, self.without_files)


@dataclass(frozen=True)
class Job:
    """One kind of job that ranks do together.

    Args:
        form: of its command line; the configuration has `run`, `mesh` and `data`, as `TrainConfig` does.
        module: where it is, as `JOB`.
        work: what a rank does: (placed config, `Run`, overrides, `Stop`).
        prepare: what is done before ranks start, with the placed configuration; gives the one for the ranks.
            Mistakes in what the configuration names (files, directories) are found here.
    """

    form: Form
    module: str
    work: Callable[..., None]
    prepare: Callable[[Any], Any]

    @property
    def name(self) -> str:
        """Of its configuration."""
        return self.form.name

    @property
    def config(self) -> type:
        """The configuration's dataclass."""
        return self.form.config
