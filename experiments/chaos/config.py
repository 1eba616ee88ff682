"""The options of the kill campaign."""

from __future__ import annotations

from dataclasses import replace

from experiments.cli.command_spec import CommandSpec, Help
from experiments.configs.checks import configuration, out_of_range, refusal

MODES = ("kill_rank", "kill_all", "kill_launcher", "term_launcher", "term_rank")
MOMENTS = ("start", "step", "save")


@configuration
class ChaosConfig:
    """All options.

    Args:
        kills: how many, in as many runs as it takes.
        seed: of the choice of who is killed, and when.
        ranks: of every run.
        nodes: on loopback, that every run's ranks are on, a launcher on each; default 2 with replicas, else
            1. A launcher that is killed is then started again at once, and the job goes on.
        async_save: whether runs save in the background.
        steps, save_every, held_out_every: of every run.
        max_restarts: how many deaths of ranks a run mends by itself before it has to be started again.
        replicas: `run.replicas`: then at most one finished step may be made again.
        modes: SIGKILL one rank, all ranks, or the launcher; SIGTERM the launcher, or a rank.
        moments: before the first step, in a step, or in a save.
        patience_s: how long anything may take.
    """

    kills: int = 20
    seed: int = 0
    ranks: int = 2
    nodes: int | None = None
    async_save: bool = False
    steps: int = 400
    save_every: int = 5
    held_out_every: int = 15
    max_restarts: int = 2
    replicas: int = 0
    modes: tuple[str, ...] = MODES
    moments: tuple[str, ...] = MOMENTS
    patience_s: float = 120.0


def complete(config: ChaosConfig) -> ChaosConfig:
    """Check the values."""
    least = {"kills": 1, "ranks": 1, "steps": 2, "save_every": 1, "held_out_every": 1, "max_restarts": 0}
    least |= {"replicas": 0, "nodes": 1}
    if problems := out_of_range(config, {"modes": MODES, "moments": MOMENTS}, least):
        raise refusal(problems)
    nodes = config.nodes or (2 if config.replicas and config.ranks % 2 == 0 else 1)
    if config.ranks % nodes:
        raise refusal([f"ranks={config.ranks} does not divide over nodes={nodes}."])
    return replace(config, nodes=nodes)


HELP = Help(
    about="The kill campaign: runs are killed at random moments and started again; nothing may be lost.",
    options={
        "kills": "how many, in as many runs as it takes",
        "ranks": "of every run",
        "nodes": "a launcher on each, which agree; default 2 with replicas",
        "async_save": "whether runs save in the background",
        "replicas": "copies in memory: at most one finished step may be made again",
        "modes": "who is killed, and how",
        "moments": "when",
    },
    examples={
        "python -m experiments.chaos kills=5": "a short campaign",
        "python -m experiments.chaos kills=200 async_save=true": "a long one",
        "python -m experiments.chaos kills=200 replicas=1 max_restarts=1000": "with copies in memory",
        "python -m experiments.chaos modes=[kill_rank] moments=[save]": "one way to die",
    },
)
SPEC = CommandSpec("chaos", ChaosConfig, HELP, complete=complete)
