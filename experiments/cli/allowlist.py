"""What a configuration may say of Hydra's own part of it, and which classes Hydra may make of that.

A configuration is data that people copy from each other, and Hydra's part of it can run code: environment
variables for the job (`LD_PRELOAD`), folders of more files, loggers and callbacks by name. So only the keys
listed here may be written, in a file or on the command line, and of launchers and sweepers only the classes
listed here are made. Our own groups have no `_target_` at all; there it is an unknown key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from omegaconf import DictConfig, ListConfig
from omegaconf.errors import OmegaConfBaseException

CORE, PLUGINS = "hydra._internal.core_plugins", "hydra_plugins"
SAMPLERS = ("TPESampler", "RandomSampler", "GridSampler", "CmaEsSampler", "NSGAIISampler", "MOTPESampler")
TARGETS = frozenset(
    {
        "experiments.cli.sweep.SweepTable",
        f"{CORE}.basic_launcher.BasicLauncher",
        f"{CORE}.basic_sweeper.BasicSweeper",
        f"{PLUGINS}.hydra_joblib_launcher.joblib_launcher.JoblibLauncher",
        f"{PLUGINS}.hydra_submitit_launcher.submitit_launcher.LocalLauncher",
        f"{PLUGINS}.hydra_submitit_launcher.submitit_launcher.SlurmLauncher",
        f"{PLUGINS}.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper",
        *(f"optuna.samplers.{name}" for name in SAMPLERS),
    }
)
KEYS = {
    "": "run.dir sweep.dir sweep.subdir output_subdir mode verbose job.name job.chdir callbacks.table.metric"
    " callbacks.table._target_",
    "launcher.": "_target_ n_jobs backend prefer require verbose timeout pre_dispatch batch_size nodes"
    " tasks_per_node gpus_per_node gpus_per_task cpus_per_task cpus_per_gpu mem_gb mem_per_cpu mem_per_gpu"
    " timeout_min max_num_timeout array_parallelism signal_delay_s partition account qos gres constraint"
    " exclude comment name stderr_to_stdout additional_parameters setup",
    "sweeper.": "_target_ max_batch_size params search_space n_trials n_jobs max_failure_rate direction"
    " study_name storage sampler",
}
ALLOWED = frozenset(f"hydra.{part}{name}" for part, names in KEYS.items() for name in names.split())
PARTS = ("launcher.additional_parameters.", "sweeper.params.", "sweeper.search_space.", "sweeper.sampler.")
OPEN_PREFIXES = tuple(f"hydra.{part}" for part in PARTS)
NOT_ALLOWED = (
    "Hydra's own, which could run code. A configuration may set of Hydra's keys "
    f"{', '.join(f'hydra.{name}' for name in KEYS[''].split())}, "
    "and options of hydra.launcher and hydra.sweeper."
)
SQLITE = "sqlite:///"
SEARCHED = ("params", "search_space")  # of the sweeper: keys of the configuration, as overrides for its jobs


def is_allowed(key: str) -> bool:
    """Whether a key of Hydra's own may be set.

    >>> is_allowed("hydra.run.dir"), is_allowed("hydra.job.env_set.LD_PRELOAD"), is_allowed("hydra.job")
    (True, False, False)
    """
    return key in ALLOWED or key.startswith(OPEN_PREFIXES)


def refused(hydra: DictConfig, keys: Collection[str]) -> Iterator[tuple[str, str]]:
    """What must not be made, of Hydra's composed part: its dotted key, and why.

    Args:
        keys: what a search may vary.

    >>> node = DictConfig({"launcher": {"setup": {"_target_": "os.system", "command": "ls"}}})
    >>> [key for key, _ in refused(node, [])]
    ['hydra.launcher.setup._target_']
    """
    for part in ("callbacks", "launcher", "sweeper"):
        yield from _below(hydra, part, f"hydra.{part}")
    for part in SEARCHED:
        searched = (hydra.get("sweeper") or {}).get(part) or ()
        yield from ((f"hydra.sweeper.{part}.{key}", "no key of the configuration.") for key in searched
                    if key not in keys)  # fmt: skip


def _below(parent: DictConfig | ListConfig, key: Any, path: str) -> Iterator[tuple[str, str]]:
    """Classes by name; and lines where SLURM reads one, of which a second would be shell."""
    try:
        value = parent[key]
    except OmegaConfBaseException:  # missing, or of a run that there is not yet
        return
    if key == "_target_":
        if value not in TARGETS:
            made = ", ".join(sorted(TARGETS))
            yield path, f"{value!r} is not made of a configuration; there may only be {made}."
    elif isinstance(value, DictConfig | ListConfig):
        for each in value if isinstance(value, DictConfig) else range(len(value)):
            yield from _below(value, each, f"{path}.{each}")
    elif path == "hydra.sweeper.storage" and not f"{value or SQLITE}".startswith(SQLITE):
        yield path, f"{value!r}: a search is kept in a file, {SQLITE}PATH; servers are not called."
    elif path.startswith("hydra.launcher.setup."):
        return  # lines of shell, whatever they are
    elif path.startswith("hydra.launcher.") and not f"{key}{value}".isprintable():
        yield path, f"{value!r}: SLURM reads one line, and this is more."
