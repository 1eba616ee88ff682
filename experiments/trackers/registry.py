"""Registry: the trackers by name; a new one is a file and a row here, and a field of `TrackerConfig`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from hydra.utils import instantiate

from experiments.configs.checks import TARGET
from experiments.configs.train import ConfigError, TrackerConfig
from experiments.trackers.base import Tracker
from experiments.trackers.mlflow import MLflow
from experiments.trackers.tensorboard import TensorBoard
from experiments.trackers.wandb import WandB
from fnshard.errors import report

# By the package's name, which is also the extra's and the field's of TrackerConfig.
TRACKERS: dict[str, Callable[[TrackerConfig], Tracker]] = {
    "tensorboard": lambda config: TensorBoard(),
    "wandb": lambda config: WandB(config.project),
    "mlflow": lambda config: MLflow(config.project, config.store),
}


def chosen(config: TrackerConfig) -> dict[str, Tracker]:
    """The trackers that a configuration names, by name."""
    own = {each[TARGET]: instantiate(each) for each in config.own}
    return {name: make(config) for name, make in TRACKERS.items() if getattr(config, name)} | own


def check_installed(config: TrackerConfig) -> None:
    """Refuse trackers whose packages are not installed, before a rank starts."""
    missing = [n for n in TRACKERS if getattr(config, n) and importlib.util.find_spec(n) is None]
    if missing:
        problems = [f"tracker={name}: the package {name} is not installed." for name in missing]
        fix = f"pip install 'fnshard[{','.join(missing)}]'; metrics.jsonl is written in any case."
        raise ConfigError(report("packages of these trackers are missing:", problems, fix))
