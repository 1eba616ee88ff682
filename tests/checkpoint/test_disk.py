"""The disk tier for real: a process that may not hold its optimizer state, a file system that is full."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import OUTPUT, start_command

ROOT = Path(__file__).resolve().parents[2]
LAYERS, WIDTH, STEPS = 12, 2048, 3
PROGRAM = """
import json, resource, sys
import torch
import fnshard as fs

torch.set_num_threads(1)
layers, width, steps = map(int, sys.argv[1:4])
tier, folder = sys.argv[4:]

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        made = lambda: torch.nn.ParameterDict({n: torch.randn(width, width) * 0.02 for n in "ab"})
        self.layers = torch.nn.ModuleList(made() for _ in range(layers))

with fs.deferred():
    model = Net()
params = fs.make_functional(model)[1]

def loss(p, x):
    for i in range(layers):
        x = x + torch.tanh(x @ p[f"layers.{i}.a"]) @ p[f"layers.{i}.b"]
    return x.square().mean()

mesh = fs.make_mesh(shard=1)
specs = fs.presets.full_shard(params, mesh, memory=tier, optimizer_memory=tier)
step = fs.shard_step(
    loss, specs, mesh=mesh, optimizer=fs.optim.adamw(1e-3), backend="eager", disk_dir=folder, prefetch=0,
    overlap=0,
)
x = torch.randn(4, width, generator=torch.Generator().manual_seed(0))
step.lower(params, x).compile()  # what compiling holds is no matter here
room = 256 << 20  # on top of what torch and the program take, which grows with torch
if tier == "disk":
    with open("/proc/self/status") as status:
        used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + room, used + room))
state = step.init(model)
losses = []
for _ in range(steps):
    state, metrics = step(state, x)
    losses.append(metrics["loss"].item())
size = sum(v.nbytes for slots in state.opt_state.values() for v in slots.values())
print(json.dumps({"losses": losses, "room": room, "optimizer_bytes": size}))
"""


def run(tier: str, folder: Path) -> dict:
    command = [sys.executable, "-c", PROGRAM, str(LAYERS), str(WIDTH), str(STEPS), tier, str(folder)]
    # glibc's heap keeps freed pieces of up to 32 MB, and aligned requests do not fit them again: it may grow
    # to a multiple of what is in use. A fixed threshold maps pieces this large, and gives them back.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(4 << 20)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long  # gigabytes through a disk
def test_optimizer_state_larger_than_the_process_may_be(tmp_path: Path) -> None:
    on_disk, in_memory = run("disk", tmp_path), run("device", tmp_path)
    assert on_disk["optimizer_bytes"] == in_memory["optimizer_bytes"] > on_disk["room"]
    assert len(on_disk["losses"]) == STEPS
    for a, b in zip(on_disk["losses"], in_memory["losses"], strict=True):
        assert abs(a - b) <= 1e-6 * abs(b)
    assert list(tmp_path.iterdir()) == []


FULL = """
import sys, torch
import fnshard as fs
from fnshard.errors import StateError

params = {f"layers.{i}.w": torch.ones(256, 256) for i in range(32)}
specs = fs.match_specs(params, [("*", fs.LayoutSpec(optimizer_memory="disk"))])
step = fs.shard_step(
    lambda p, x: sum((x @ w).sum() for w in p.values()), specs, optimizer=fs.optim.adamw(1e-3),
    backend="eager", disk_dir=sys.argv[1],
)
try:
    step.init(params)
except StateError as error:
    print(error)
    print(all(bool((w == 1).all()) for w in params.values()))
"""


MOUNTS = """
import ctypes, os, subprocess, sys
from pathlib import Path
from commands import popen_here

disk, size, *programs = sys.argv[1:]
here = {"uid_map": os.getuid(), "gid_map": os.getgid()}
NEW_USER, NEW_MOUNTS = 0x10000000, 0x20000
if ctypes.CDLL(None).unshare(NEW_USER | NEW_MOUNTS):
    sys.exit(77)
try:
    Path("/proc/self/setgroups").write_text("deny")
    for file, number in here.items():
        Path("/proc/self", file).write_text(f"0 {number} 1")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", disk], check=True)
except (OSError, subprocess.CalledProcessError):
    sys.exit(77)
for program in programs:
    if code := popen_here([sys.executable, *program.split()], os.environ).wait():
        sys.exit(code)
print(*sorted(os.listdir(disk)))
"""


def run_on_small_disk(tmp_path: Path, size: str, *programs: str) -> list[str]:
    """Run programs whose "DISK" is a real file system of that size, in a namespace of its own.

    All of them are forks of a process that has imported torch.

    Returns:
        The lines that they print, and one of the names that they leave there.
    """
    disk, mounts = tmp_path / "disk", tmp_path / "mounts.py"
    disk.mkdir()
    mounts.write_text(MOUNTS)
    programs = tuple(program.replace("DISK", str(disk)) for program in programs)
    code = start_command([str(mounts), str(disk), size, *programs], tmp_path).wait()
    printed, errors = ((tmp_path / OUTPUT[name]).read_text() for name in ("stdout", "stderr"))
    if code == 77:
        pytest.skip("no namespaces here")
    assert code == 0, errors[-2000:]
    return printed.splitlines()


def test_a_file_system_that_is_full(tmp_path: Path) -> None:
    """An error, no SIGBUS, and nothing left on it."""
    script = tmp_path / "full.py"
    script.write_text(FULL)
    *lines, intact, left = run_on_small_disk(tmp_path, "1m", f"{script} DISK")
    assert "is full, with" in "\n".join(lines)
    assert (intact, left) == ("True", "")


SAVES = """
import subprocess, sys, torch
import fnshard as fs, saved

folder, which = sys.argv[1:]
step = saved.step_of("full_shard", "fp32", fs.make_mesh(shard=1))
if which == "first":  # the interpreter's end waits for the file
    fs.checkpoint.save_async(folder + "/1", saved.make_known(step, 1))
    sys.exit()
large = fs.shard_step(
    lambda p: p["w"].sum(), {"w": fs.LayoutSpec()}, optimizer=fs.optim.sgd(0.1), backend="eager"
)
for remount in ("size=200k", "ro"):
    subprocess.run(["mount", "-o", "remount," + remount, folder], check=True)
    for save in (fs.checkpoint.save, lambda *a: fs.checkpoint.save_async(*a).wait()):
        try:
            save(folder + "/2", large.init({"w": torch.ones(1 << 18)}))
        except fs.CheckpointError as error:
            print(error)
assert saved.differences(fs.checkpoint.restore(folder, step)) == []
assert fs.checkpoint.all_steps(folder) == [1]
"""


def test_saving_to_a_full_and_to_a_read_only_disk(tmp_path: Path) -> None:
    script = tmp_path / "saves.py"
    script.write_text(SAVES)
    lines = run_on_small_disk(tmp_path, "9m", f"{script} DISK first", f"{script} DISK second")
    printed = "\n".join(lines)
    assert printed.count("cannot save") == 4
    assert printed.count("No space left") == printed.count("Read-only") == 2
    assert lines[-1] == "1"  # and no leftovers
