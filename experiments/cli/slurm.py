"""SLURM: a job on several nodes, which `launcher=slurm hydra.launcher.nodes=` starts as one task a node.

Each task runs torchrun's agent; the agents meet on the first node.
"""

from __future__ import annotations

import os

from experiments.configs.train import ConfigError

FIRST_PORT, PORTS = 20_000, 10_000  # of the rendezvous: one of these by the job's number


def nodes() -> int:
    """The nodes of the job step that this process is a task of; 1 outside of `srun`."""
    return int(os.environ.get("SLURM_STEP_NUM_NODES", "1")) if "SLURM_STEP_ID" in os.environ else 1


def check_one_node() -> None:
    """Refuse a command that `srun` starts on several nodes: its processes do not know each other."""
    if nodes() > 1:
        raise ConfigError(
            f"srun starts this command on {nodes()} nodes. Fix: launcher=slurm hydra.launcher.nodes= with "
            "--multirun, outside of srun; or, inside of an allocation, torchrun: srun --ntasks-per-node 1 "
            "torchrun --nnodes $SLURM_NNODES --nproc-per-node 8 --rdzv-backend c10d --rdzv-id $SLURM_JOB_ID "
            "--rdzv-endpoint FIRST_NODE:29400 -m experiments.train."
        )


def torchrun(ranks: int, max_restarts: int) -> list[str]:
    """What Python runs on each node of a job of submitit's, before the ranks' own arguments.

    Args:
        ranks: of a node.

    Raises:
        ConfigError: not one task a node.
    """
    from submitit import JobEnvironment  # the extra `slurm`, which has started this job

    job = JobEnvironment()
    if job.num_tasks != job.num_nodes:
        raise ConfigError(
            f"SLURM started {job.num_tasks} tasks on {job.num_nodes} nodes; each starts all ranks of its "
            "node. Fix: hydra.launcher.tasks_per_node=1."
        )
    number = job.raw_job_id
    return [
        "-m", "torch.distributed.run", "--nnodes", str(job.num_nodes), "--nproc-per-node", str(ranks),
        "--max-restarts", str(max_restarts), "--rdzv-backend", "c10d", "--rdzv-id", number,
        "--rdzv-endpoint", f"{job.hostnames[0]}:{FIRST_PORT + int(number) % PORTS}",
    ]  # fmt: skip
