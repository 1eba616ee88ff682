"""`python -m experiments.bench`: compose, check, start the ranks, wait for them."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.bench.config import BenchConfig, build
from experiments.bench.form import SPEC
from experiments.cli.command_spec import ROOT
from experiments.cli.main import answer
from fnshard.launcher.local import launch


def main() -> None:
    """Run the command line; a user's mistake is one message and exit code 2."""
    answer(SPEC, _command_line)


def _command_line(composed: DictConfig) -> None:
    folder = Path(HydraConfig.get().runtime.output_dir).resolve()
    start(build(OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)), folder)


def start(config: BenchConfig, folder: Path) -> None:
    """Start the ranks and wait for them; results go to `folder`.

    Raises:
        LaunchError: a rank failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job = folder / "job.json"
    told = {"config": dataclasses.asdict(config), "folder": str(folder)}
    job.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    env = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    if config.device == "cpu":
        env["OMP_NUM_THREADS"] = "1"
    launch(
        [sys.executable, "-u", "-m", "experiments.bench.rank", str(job)],
        ranks=config.ranks,
        logs=folder / "ranks",
        env=env,
    )


if __name__ == "__main__":
    main()
