"""fnshard: a small sharding compiler for PyTorch.

    mesh = fs.make_mesh(shard=-1)                          # ranks on named axes; -1: all there are
    apply, params = fs.make_functional(model)              # apply(params, *args), {path: tensor}
    specs = fs.presets.full_shard(params, mesh)            # or match_specs(params, [(glob, LayoutSpec), ...])
    step = fs.shard_step(loss_fn, specs, mesh=mesh, optimizer=fs.optim.adamw(3e-4))
    state = step.init(model, seed=0)                       # loss_fn(params, *batch) -> loss
    state, metrics = step(state, *batch)

Before it runs, `step.lower(params, *batch)` has its schedule (`as_text`), memory, traffic and time. Several
ranks: `fs.launch(main, ranks=2)`, or `torchrun`. README.md is the way in, `dir(fs)` all there is.
"""

# The map; a folder imports only from those above it (`tests/test_house.py` holds it):
#
#   front        errors, tree (pytrees), mesh (ranks on named axes, joining and leaving them); functional
#                (make_functional, an nn.Module as a function)
#   layout/      partition (P, blocks), spec (LayoutSpec), rules (match_specs), resolved (specs by path),
#                presets, tensor, units, codecs
#   losses/      Mean, Whole, losses of language models    optim/  contract, optimizers, schedules, scaling
#   compiler/    ir (Program, guard), deferred (modules without memory), frontend (fn to Program),
#                rewrites (of a Program's graph), place (over tensor and context axes), kernels (split, remat,
#                differentiate, Inductor), schedule (instructions, build, passes, verify), options
#                (StepOptions, of shard_step, lower and fit), buckets (of lengths), lower (the list)
#   runtime/     collectives (gloo, NCCL, shared memory, simulated), packing, tiers, files; executor: a loop
#                over a schedule's instructions
#   analysis/    memory (the ledger: a dry run of the instructions' own bindings), timeline, traffic,
#                flops, hardware: before a step runs
#   step/        shard_step, Step (`fnshard/step/__init__.py` follows a call to the wire); plan (of specs and
#                options), cache and programs (by batch, and by what `fn` reads: the guard), runner, lowered
#                (stages, compiled); state, shards, agreement, fit
#   checkpoint/  save, restore (onto any mesh: restoring, blocks), reshard (in memory), replicas
#   hf/          Hugging Face's format    adapters/  LoRA, PEFT
#   debug/       check, nan_hunt, check_stale, profile    plot/  pictures
#   launcher/    ranks of one machine, their restarts, post-mortems
#
# A change to what a step does is a pass over its schedule (`compiler.schedule.passes`, listed in its
# `default`; `shard_step(passes=)` takes one from outside), a new kind of line a class of
# `compiler.schedule.instructions`; a new way to store leaves a function in `layout.presets`; a new
# optimizer an `optim.Optimizer` (`whole=` if it sees whole matrices, `sums=` if it sums over leaves); a
# new storage format a codec; a rewrite of the traced graph a function of `compiler.rewrites`, named in
# `rewrite` of `compiler.frontend.trace`, or, where it reads specs (fp8), a call in `trace_and_split` of
# `compiler.lower`; an operator's rule over tensor and context axes one of `compiler.place`: none of them
# touches the rest. `tests/test_extending.py` adds most of these from outside. Objectives of fine-tuning
# are outside: a row of `OBJECTIVE_KINDS` in `experiments/finetune/config.py`, and of rewards a function of
# that name in `losses.policy`. One schedule serves all ranks (verify, transports and
# `Schedule.communication`, which they agree on): that is what a pipeline axis has to change.

from fnshard import adapters, checkpoint, debug, errors, hf, losses, optim, plot, tree
from fnshard.adapters.lora import lora
from fnshard.adapters.norms import sync_batch_norm
from fnshard.analysis.hardware import Hardware
from fnshard.checkpoint.reshard import averaged, reshard
from fnshard.compiler.buckets import Buckets
from fnshard.compiler.deferred.deferred_init import deferred
from fnshard.compiler.frontend.exchange import all_gather, constrain, psum
from fnshard.compiler.frontend.limits import bounded
from fnshard.compiler.kernels.document_attention import attention
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
from fnshard.step.fit import fit
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
