"""What a command is: its configuration and help, and of a job of ranks what they do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments import ROOT
from experiments.cli import schema
from experiments.configs.checks import ConfigError

CONF = ROOT / "conf"


@dataclass(frozen=True)
class CommandSpec:
    """A command of `experiments/`.

    Args:
        name: of its configuration, `NAME.yaml`.
        config: the dataclass of the configuration.
        about: what it does, for `--help`.
        examples: command lines and their purpose, for `--help`.
        conf: the folder of its configuration; groups of `conf/shared` are found from any.
        complete: checks a configuration of the right keys and types further, and fills in what depends on
            its other values.
    """

    name: str
    config: type
    about: str
    examples: Mapping[str, str] = field(default_factory=dict)
    conf: Path = CONF
    complete: Callable[[Any], Any] = lambda config: config

    @property
    def module(self) -> str:
        return f"experiments.{self.name}"

    def read(self, values: Mapping[str, Any]) -> Any:
        """The configuration from plain values.

        Raises:
            ConfigError: unknown keys, wrong types; or values that cannot be.
        """
        return self.complete(schema.build(values, self.config))

    def read_composed(self, composed: DictConfig) -> Any:
        """The configuration that Hydra composed, without Hydra's own part.

        Raises:
            ConfigError: as `read`; or a value refers to one that is missing.
        """
        try:
            values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise ConfigError(str(error)) from None
        return self.read(values)

    def register(self) -> None:
        """Store the defaults where Hydra finds them, as `NAME_schema`."""
        schema.register(self.config, f"{self.name}_schema")


@dataclass(frozen=True)
class Job:
    """A command whose work ranks do together.

    Args:
        spec: of its command line; the configuration has `run`, `mesh` and `data`, as `TrainConfig` does.
        module: where it is, as `JOB`.
        work: what a rank does, as "module:function" of (placed config, `RunFolder`, overrides, `Stop`): the
            process that starts ranks does not import it.
        prepare: what is done before ranks start, with the placed configuration; gives the one for the ranks.
            Mistakes in what the configuration names (files, directories) are found here.
    """

    spec: CommandSpec
    module: str
    work: str
    prepare: Callable[[Any], Any]

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def config(self) -> type:
        return self.spec.config
