"""SLURM: a job on several nodes, which `launcher=slurm hydra.launcher.nodes=` starts as one task a node.

Each task runs torchrun's agent; the agents meet on the first node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from experiments.configs.train import ConfigError

FIRST_PORT, PORTS = 20_000, 20_000  # of the rendezvous: one of these by the job's number


def nodes_of(environ: Mapping[str, str]) -> int:
    """The nodes of the job step that this process is a task of; 1 outside of `srun`."""
    return int(environ.get("SLURM_STEP_NUM_NODES", "1")) if "SLURM_STEP_ID" in environ else 1


def check_one_node(environ: Mapping[str, str]) -> None:
    """Refuse a command that `srun` starts on several nodes: its processes do not know each other."""
    if nodes_of(environ) > 1:
        raise ConfigError(
            f"srun starts this command on {nodes_of(environ)} nodes. Fix: launcher=slurm "
            "hydra.launcher.nodes= with --multirun, outside of srun; or, inside of an allocation, torchrun: "
            "srun --ntasks-per-node 1 torchrun --nnodes $SLURM_NNODES --nproc-per-node 8 --rdzv-backend c10d "
            "--rdzv-id $SLURM_JOB_ID --rdzv-endpoint FIRST_NODE:29400 -m experiments.train."
        )


def torchrun(environ: Mapping[str, str], ranks: int, max_restarts: int) -> list[str]:
    """What Python runs on each node, before the ranks' own arguments.

    Args:
        ranks: of a node.

    Raises:
        ConfigError: not one task a node.

    >>> step = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7"}
    >>> step |= {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[07-08]"}
    >>> torchrun(step, ranks=8, max_restarts=3)[2:6]
    ['--nnodes', '2', '--nproc-per-node', '8']
    >>> torchrun(step, ranks=8, max_restarts=3)[-1]
    'gpu07:20007'
    """
    nodes, tasks = environ["SLURM_STEP_NUM_NODES"], environ["SLURM_STEP_NUM_TASKS"]
    if nodes != tasks:
        raise ConfigError(
            f"SLURM started {tasks} tasks on {nodes} nodes; each starts all ranks of its node. "
            "Fix: hydra.launcher.tasks_per_node=1."
        )
    number = environ["SLURM_JOB_ID"]
    port = FIRST_PORT + int(number) % PORTS
    return [
        "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", str(ranks),
        "--max-restarts", str(max_restarts), "--rdzv-backend", "c10d", "--rdzv-id", number,
        "--rdzv-endpoint", f"{first_host(environ['SLURM_STEP_NODELIST'])}:{port}",
    ]  # fmt: skip


def first_host(listed: str) -> str:
    """The first of SLURM's list of hosts.

    >>> first_host("rack[2-3]node[07,09-11],login"), first_host("alone,two")
    ('rack2node07', 'alone')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", listed)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else listed)
