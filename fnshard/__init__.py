"""fnshard: a small sharding compiler for PyTorch.

nn.Module ─make_functional→ fn, params ─match_specs→ specs
   fn, specs ─shard_step→  trace → split → differentiate → schedule → passes → compile
                           Program  Segments   Kernels      Schedule             Step
state, batch ─Step→ state', metrics          state ─checkpoint→ any mesh          hf ⇄ params
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
