"""fnshard: a small sharding compiler for PyTorch.

nn.Module ─make_functional→ fn, params ─match_specs→ specs
   fn, specs ─shard_step→  trace → split → differentiate → schedule → passes → compile
                           Program  Segments   Kernels      Schedule             Step
state, batch ─Step→ state', metrics          state ─checkpoint→ any mesh          hf ⇄ params

The map; a module imports only from lines above its own (`tests/test_house.py` holds it):

ground        errors, tree (pytrees), arguments (a batch as passed), process_group (joining, leaving), mesh
              (ranks on named axes), reachable (what `fn` can read and write), guard (what it has read)
what you say  deferred_init (with recorder, tape, host_random), functional, spec (LayoutSpec, P), rules
              (match_specs), units, presets, codecs, lora, losses (with fused), optim, transform (the
              optimizer's contract), scaling, schedules, state
runtime/      how bytes move: collectives (gloo, NCCL, shared memory, simulated), tiers, checkpoints' files
on paper      compiler/: trace, split, remat, differentiate, schedule, passes/, verify, lower; hardware and
              measure, cost and timeline; footprint, walk, ledger: bytes of a step before it runs
in earnest    compiler/: kernels (the only one that calls Inductor), movement, fused_update, update,
              execute, cudagraph
the step      shards, blank, init, batches, programs (those kept), agree, runner, step, make_step
              (shard_step), forward, options, lowered, lowering, lockstep; fit with choice; checkpoint with
              held and saving; reshard; hf; adapters
around it     rank, launcher and nodes (processes, machines), post_mortem (why ranks died), compiles and
              debug (check, bisect, nan_hunt), profile (what a trace says of the schedule's lines), plot
              (pictures, in a terminal too)

A change to what a step does is a pass over `compiler.schedule`; a new strategy is a function in `presets`; a
new optimizer a `transform.Optimizer`; a new storage format a codec: none of them touches the rest.
"""

from fnshard import (
    adapters,
    checkpoint,
    codecs,
    debug,
    errors,
    hf,
    losses,
    optim,
    plot,
    presets,
    profile,
    schedules,
    tree,
    units,
)
from fnshard.deferred_init import deferred
from fnshard.errors import (
    AgreementError,
    BudgetError,
    CheckpointError,
    CollectiveError,
    FnshardError,
    LaunchError,
    OptimizerError,
    ScheduleError,
    SpecError,
    StateError,
    TraceError,
)
from fnshard.fit import fit
from fnshard.forward import shard_forward
from fnshard.functional import make_functional
from fnshard.hardware import Hardware
from fnshard.launcher import launch
from fnshard.lockstep import lockstep
from fnshard.lora import lora
from fnshard.losses import Mean, Whole
from fnshard.lowered import diff
from fnshard.make_step import shard_step
from fnshard.mesh import Mesh, make_mesh
from fnshard.rank import run_rank
from fnshard.reshard import reshard, reshard_cost
from fnshard.rules import match_specs
from fnshard.runtime.simulated import simulate
from fnshard.shards import shard, unshard
from fnshard.spec import LayoutSpec, P
from fnshard.state import TrainState

__version__ = "0.1.0"

__all__ = [
    "AgreementError",
    "BudgetError",
    "CheckpointError",
    "CollectiveError",
    "FnshardError",
    "Hardware",
    "LaunchError",
    "LayoutSpec",
    "Mean",
    "Mesh",
    "OptimizerError",
    "P",
    "ScheduleError",
    "SpecError",
    "StateError",
    "TraceError",
    "TrainState",
    "Whole",
    "adapters",
    "checkpoint",
    "codecs",
    "debug",
    "deferred",
    "diff",
    "errors",
    "fit",
    "hf",
    "launch",
    "lockstep",
    "lora",
    "losses",
    "make_functional",
    "make_mesh",
    "match_specs",
    "optim",
    "plot",
    "presets",
    "profile",
    "reshard",
    "reshard_cost",
    "run_rank",
    "schedules",
    "shard",
    "shard_forward",
    "shard_step",
    "simulate",
    "tree",
    "units",
    "unshard",
]


def __dir__() -> list[str]:
    """The public names: what a REPL completes."""
    return sorted([*__all__, "__version__"])
