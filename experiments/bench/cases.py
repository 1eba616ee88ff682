"""The registry of cases. A case is a function `run(config, folder) -> Result`; its docstring says what it
answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """`function`: "module:name" in this package. `on_ranks`: whether `config.ranks` processes run it,
    or the process of the command does."""

    function: str
    on_ranks: bool = False

    @property
    def run(self) -> Callable[[Any, Path], Any]:
        """Imported when it is asked for: one case does not need what another does."""
        module, _, name = self.function.partition(":")
        return getattr(import_module(f"experiments.bench.{module}"), name)

    @property
    def answers(self) -> str:
        return self.run.__doc__.splitlines()[0]


CASES = {
    "peers": Case("peers:run", on_ranks=True),
    "memory": Case("plans:memory", on_ranks=True),
    "predict": Case("plans:predict", on_ranks=True),
    "checkpoint": Case("checkpoint:run", on_ranks=True),
    "collectives": Case("micro:collectives", on_ranks=True),
    "executor": Case("micro:executor"),
    "loss": Case("micro:loss"),
    "lengths": Case("micro:lengths"),
    "starts": Case("jobs:starts"),
    "watch": Case("jobs:watch"),
    "loader": Case("jobs:loader"),
    "long_run": Case("jobs:long_run"),
    "gpu": Case("gpu:run"),
    "cuda": Case("cuda:run"),
}
