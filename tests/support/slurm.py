"""A stand-in for SLURM on one machine: `sbatch`, `srun`, `sacct`, `scancel`, as submitit calls them.

Jobs start at once in the background; each task of `srun` is a process here, with SLURM's variables.
"""

from __future__ import annotations

import sys
from pathlib import Path

PROGRAM = r"""
import os, re, shlex, subprocess, sys, time
from pathlib import Path

HERE = Path(__file__).resolve().parent
STATE = HERE / "jobs"


def options_of(script):
    found = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", script, re.MULTILINE)
    return {name: shlex.split(value)[0] if value else "" for name, value in found}


def sbatch(path):
    options = options_of(Path(path).read_text())
    STATE.mkdir(exist_ok=True)
    number = 100 * (1 + len(list(STATE.glob("*.sbatch"))))  # room for the tasks of an array
    (STATE / f"{number}.sbatch").write_text(Path(path).read_text())
    last = options.get("array", "").partition("%")[0].rpartition("-")[2]
    for task in range(int(last) + 1) if last else [None]:
        nodes = options.get("nodes", "1")
        env = {**os.environ, "SLURM_JOB_ID": str(number + (task or 0)), "SLURM_JOB_NUM_NODES": nodes,
               "SLURM_JOB_NODELIST": ",".join(["127.0.0.1"] * int(nodes))}
        name = str(number)
        if task is not None:
            env |= {"SLURM_ARRAY_JOB_ID": name, "SLURM_ARRAY_TASK_ID": str(task)}
            name = f"{number}_{task}"
        run = f"bash {shlex.quote(os.path.abspath(path))}; echo $? >{STATE / name}.ended"
        subprocess.Popen(["bash", "-c", run], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                         start_new_session=True)
    print(f"Submitted batch job {number}")


def srun(*arguments):
    arguments, options = list(arguments), {}
    while arguments[0].startswith("--"):
        name, _, value = arguments.pop(0)[2:].partition("=")
        options[name] = value or ("" if name == "unbuffered" else arguments.pop(0))
    nodes = int(options.get("nodes") or os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    tasks = []
    for node in range(nodes):
        env = {**os.environ, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": str(nodes),
               "SLURM_STEP_NUM_TASKS": str(nodes), "SLURM_NTASKS": str(nodes), "SLURM_NODEID": str(node),
               "SLURM_PROCID": str(node), "SLURM_LOCALID": "0", "SLURMD_NODENAME": "127.0.0.1"}
        streams = {}
        for stream, option in (("stdout", "output"), ("stderr", "error")):
            if option in options:
                named = options[option].replace("%t", str(node)).replace("%j", env["SLURM_JOB_ID"])
                for mark, variable in (("%A", "SLURM_ARRAY_JOB_ID"), ("%a", "SLURM_ARRAY_TASK_ID")):
                    named = named.replace(mark, env.get(variable, ""))
                Path(named).parent.mkdir(parents=True, exist_ok=True)
                streams[stream] = open(named, "a")
        tasks.append(subprocess.Popen(arguments, env=env, **streams))
    sys.exit(max(abs(task.wait()) for task in tasks))


def sacct(*arguments):
    print("JobID|State|NodeList")
    for ended in STATE.glob("*.ended"):
        state = "COMPLETED" if ended.read_text().strip() == "0" else "FAILED"
        print(f"{ended.stem}|{state}|127.0.0.1")


def scancel(*arguments):
    pass


name, *arguments = sys.argv[1:]
globals()[name](*arguments)
"""


def install(folder: Path) -> Path:
    """Write the programs to a folder, and return it, to be put first in PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "slurm.py"
    program.write_text(PROGRAM)
    for name in ("sbatch", "srun", "sacct", "scancel"):
        file = folder / name
        file.write_text(f'#!/bin/sh\nexec {sys.executable} {program} {name} "$@"\n')
        file.chmod(0o755)
    return folder
