"""fnshard: a small sharding compiler for PyTorch.

nn.Module ─make_functional→ fn, params ─match_specs→ specs
   fn, specs ─shard_step→  trace → split → differentiate → schedule → passes → compile
                           Program  Segments   Kernels      Schedule             Step
state, batch ─Step→ state', metrics          state ─checkpoint→ any mesh          hf ⇄ params

The map; a module imports only from lines above its own (`tests/test_house.py` holds it):

ground        errors, tree (pytrees), mesh (ranks on named axes)
what you say  functional, spec (LayoutSpec, P), rules (match_specs), units, presets, codecs, lora,
              losses (with fused), optim, transform (the optimizer's contract), scaling, schedules, state
runtime/      how bytes move: collectives (gloo, NCCL, shared memory, simulated), tiers, checkpoints' files
on paper      compiler/: trace, split, remat, differentiate, schedule, passes/, verify, lower; hardware and
              measure, cost and timeline; footprint, walk, ledger: bytes of a step before it runs
in earnest    compiler/: kernels (the only one that calls Inductor), movement, update, execute
the step      shards, init, batches, agree, runner, step (shard_step), forward, lowered, lockstep; fit with
              choice; checkpoint with held and saving; reshard; hf; adapters
around it     rank, launch and nodes (processes, machines), compiles and debug (check, bisect, nan_hunt),
              profile (what a trace says of the schedule's lines), plot (pictures, in a terminal too)

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
    units,
)
from fnshard.errors import (
    AgreementError,
    BudgetError,
    CheckpointError,
    CollectiveError,
    FnshardError,
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
from fnshard.lockstep import lockstep
from fnshard.lora import lora
from fnshard.losses import Mean, Whole
from fnshard.lowered import diff
from fnshard.mesh import Mesh, make_mesh
from fnshard.reshard import reshard, reshard_cost
from fnshard.rules import match_specs
from fnshard.runtime.simulated import simulate
from fnshard.shards import shard, unshard
from fnshard.spec import LayoutSpec, P
from fnshard.state import TrainState
from fnshard.step import shard_step

__all__ = [
    "AgreementError",
    "BudgetError",
    "CheckpointError",
    "CollectiveError",
    "FnshardError",
    "Hardware",
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
    "diff",
    "errors",
    "fit",
    "hf",
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
    "schedules",
    "shard",
    "shard_forward",
    "shard_step",
    "simulate",
    "units",
    "unshard",
]
