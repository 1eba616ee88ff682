"""Targets: what Hydra may make of its own part of a configuration.

Hydra calls whatever `_target_` names below `hydra.callbacks`, `hydra.launcher` and `hydra.sweeper`, and the
standard library whatever the logging parts name. A configuration is data that people copy from each other:
only what is listed here is made of it. Our own groups have no `_target_` at all; there it is an unknown key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

CORE, PLUGINS = "hydra._internal.core_plugins", "hydra_plugins"
SAMPLERS = ("TPESampler", "RandomSampler", "GridSampler", "CmaEsSampler", "NSGAIISampler", "MOTPESampler")
TARGETS = frozenset(
    {
        "experiments.sweep.SweepTable",
        f"{CORE}.basic_launcher.BasicLauncher",
        f"{CORE}.basic_sweeper.BasicSweeper",
        f"{PLUGINS}.hydra_joblib_launcher.joblib_launcher.JoblibLauncher",
        f"{PLUGINS}.hydra_submitit_launcher.submitit_launcher.LocalLauncher",
        f"{PLUGINS}.hydra_submitit_launcher.submitit_launcher.SlurmLauncher",
        f"{PLUGINS}.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper",
        *(f"optuna.samplers.{name}" for name in SAMPLERS),
    }
)
MADE = ("callbacks", "launcher", "sweeper", "job_logging", "hydra_logging")  # the parts that Hydra makes
LOGGERS = frozenset(
    {"logging.StreamHandler", "logging.FileHandler", "logging.NullHandler", "logging.Formatter"}
)
STREAMS = frozenset({"ext://sys.stdout", "ext://sys.stderr"})
# What is called by name, by the key that names it. "()" is any callable at all, to `logging.config`.
CALLED: dict[str, frozenset[str]] = {
    "_target_": TARGETS,
    "class": LOGGERS,
    "()": frozenset(),
    "custom_search_space": frozenset(),  # of Optuna's sweeper
}


def refused(hydra: DictConfig) -> Iterator[tuple[str, str]]:
    """What must not be made, of Hydra's composed part: its dotted key, and why.

    >>> node = OmegaConf.create({"callbacks": {"x": {"_target_": "os.system", "command": "ls"}}})
    >>> [key for key, _ in refused(node)]
    ['hydra.callbacks.x._target_']
    """
    plain = OmegaConf.to_container(hydra, resolve=False)
    for part in MADE:
        yield from _below(hydra, plain, part, f"hydra.{part}")


def _below(parent: DictConfig | ListConfig, plain: Any, key: Any, path: str) -> Iterator[tuple[str, str]]:
    raw = plain[key] if isinstance(plain, list) else plain.get(key)
    if raw is None:
        return
    if key in CALLED:
        if raw not in ("???", *CALLED[key]):
            yield path, _why(raw, CALLED[key])
        return
    if isinstance(raw, str):
        yield from _text(parent, raw, key, path)
    elif isinstance(raw, Mapping | list):
        inside = parent[key]
        for each in raw if isinstance(raw, Mapping) else range(len(raw)):
            yield from _below(inside, raw, each, f"{path}.{each}")


def _text(parent: DictConfig | ListConfig, raw: str, key: Any, path: str) -> Iterator[tuple[str, str]]:
    """Text may stand for whole keys from elsewhere, or for an object of a module's."""
    value: Any = raw
    if OmegaConf.is_interpolation(parent, key):
        try:
            value = parent[key]
        except OmegaConfBaseException:  # this run has not got it yet; within other text it stays text
            value = parent if raw.startswith("${") and raw.endswith("}") else raw
    if isinstance(value, DictConfig | ListConfig):
        yield path, f"{raw} stands for other keys; write them out."
    elif isinstance(value, str) and value.startswith("ext://") and value not in STREAMS:
        yield path, _why(value, STREAMS)


def _why(value: object, allowed: frozenset[str]) -> str:
    these = f"there may only be {', '.join(sorted(allowed))}" if allowed else "nothing may be called by it"
    return f"{value!r} is not made of a configuration; {these}."
