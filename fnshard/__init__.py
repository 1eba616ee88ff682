"""A sharding compiler for PyTorch: a pure function and one layout per leaf become a compiled training step.

    mesh = fs.make_mesh(shard=-1)                          # ranks on named axes; -1: all there are
    apply, params = fs.make_functional(model)              # apply(params, *args), {path: tensor}
    specs = fs.presets.full_shard(params, mesh)            # or match_specs(params, [(glob, LayoutSpec), ...])
    step = fs.shard_step(loss_fn, specs, mesh=mesh, optimizer=fs.optim.adamw(3e-4))
    state = step.init(model, seed=0)                       # loss_fn(params, *batch) -> loss
    state, metrics = step(state, *batch)

Before it runs, `step.lower(params, *batch)` has its schedule (`as_text`), memory, traffic and time.
Several ranks are started by `fs.launch(main, ranks=2)`, or by `torchrun`. README.md and the pages of
`experiments/guide` are the way in, and `dir(fs)` lists all public names.

# The map

A folder imports only from those above it (`tests/test_house.py` holds it).

- `errors`, `tree`, `mesh/`: errors with a way out; pytrees; ranks on named axes, and how they join and
  leave.
- `layout/`: the meaning of a leaf's layout: `P`, `LayoutSpec`, rules, presets, units, codecs.
- `losses/`, `optim/`: means, and losses of language models; optimizers, rates, loss scaling.
- `compiler/`: `options` (`StepOptions`), `deferred` (modules without memory), `frontend` (`fn` to a
  Program), `rewrites` of its graph, `place` (what each value is over tensor and context axes), `kernels`
  (the Program cut into segments, which are differentiated and compiled), `schedule` (instructions, their
  order, passes, checks; in a pipeline one schedule for each stage, merged by `together`). `lower` lists
  these stages. `functional`, above most of them, turns an `nn.Module` into a function.
- `runtime/`: collectives (gloo, NCCL, shared memory, simulated), files, tiers of memory, and the
  executor, a loop over the instructions of a schedule.
- `analysis/`: memory, time, traffic and FLOPs of a step before it runs.
- `step/`: `shard_step` and `Step`, whose module follows a call to the wire; states, lengths. `search/`:
  one walk through plans by their price, which `fit` and `experiments.plan` use.
- `hf/`, `checkpoint/`, `adapters/`: Hugging Face's format; saving and restoring onto any mesh, and the
  checkpoints of others; LoRA.
- `debug/`, `plot/`, `launcher/`: comparing with plain autograd, hunting NaN, profiling; pictures; ranks
  of one machine.

To change what a step does, write a pass over its schedule (`fs.passes`); for a new kind of line, a class
of `compiler.schedule.instructions`. A new layout is a function that makes specs, a new storage format a
codec, a new optimizer an `fs.optim.Optimizer`. A rewrite of the traced graph is a function of
`compiler.rewrites`, and what an operator does over tensor and context axes is a rule in `compiler.place`.
None of these touches the rest, and `tests/test_extending.py` adds most of them from outside. One schedule
serves all ranks, or in a pipeline all ranks of a stage (`compiler.schedule.stages`).
"""

from fnshard import adapters, checkpoint, debug, errors, hf, losses, optim, plot, tree
from fnshard.adapters.lora import lora
from fnshard.adapters.norms import sync_batch_norm
from fnshard.analysis.hardware import Hardware
from fnshard.checkpoint.reshard import averaged, reshard
from fnshard.compiler.deferred.deferred_init import deferred
from fnshard.compiler.frontend.exchange import all_gather, constrain, psum
from fnshard.compiler.frontend.size_bounds import bounded
from fnshard.compiler.kernels.document_attention import attention
from fnshard.compiler.length_buckets import Buckets
from fnshard.compiler.options import StepOptions
from fnshard.compiler.schedule import passes
from fnshard.debug import profile
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
from fnshard.functional import make_functional
from fnshard.launcher.local import launch
from fnshard.launcher.rank import run_rank
from fnshard.layout import codecs, presets, units
from fnshard.layout.partition import Fused, P
from fnshard.layout.rules import match_specs
from fnshard.layout.spec import LayoutSpec
from fnshard.losses import Mean, Sequence, Whole
from fnshard.mesh import Mesh, make_mesh
from fnshard.optim import schedules
from fnshard.runtime.collectives.simulated import simulate
from fnshard.search.fit import fit
from fnshard.step.shards import shard, unshard
from fnshard.step.state import TrainState
from fnshard.step.step import lockstep, shard_forward, shard_step

__docformat__ = "google"  # how pdoc reads the docstrings
__version__ = "0.1.0"

__all__ = [
    "AgreementError", "Buckets", "BudgetError", "CheckpointError", "CollectiveError", "FnshardError",
    "Fused", "Hardware", "LaunchError", "LayoutSpec", "Mean", "Mesh", "OptimizerError", "P",
    "ScheduleError", "Sequence", "SpecError", "StateError", "StepOptions", "TraceError", "TrainState",
    "Whole",
    "adapters", "all_gather", "attention", "averaged", "bounded", "checkpoint", "codecs", "constrain",
    "debug", "deferred", "errors", "fit", "hf", "launch", "lockstep", "lora", "losses", "make_functional",
    "make_mesh", "match_specs", "optim", "passes", "plot", "presets", "profile", "psum", "reshard",
    "run_rank", "schedules", "shard", "shard_forward", "shard_step", "simulate", "sync_batch_norm", "tree",
    "units", "unshard",
]  # fmt: skip

for _module in [m for m in map(globals().get, __all__) if type(m) is type(tree)]:
    _module.__dir__ = _module.__all__.copy  # what a REPL completes: the public names alone
__dir__ = [*__all__, "__version__"].copy
