"""Plan: choose specs and options of a step by the configuration; `strategy=auto` asks `fnshard.fit`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fnshard as fs
from experiments.lib.checks import ConfigError
from experiments.lib.config import AUTO, MEASURED, PrecisionConfig, RunConfig, StrategyConfig
from experiments.lib.files import write_json, write_text
from fnshard.analysis.hardware import TABLE
from fnshard.errors import report
from fnshard.search.fit import Fit
from fnshard.step.lowered import Lowered

PLAN, MEMORY = "plan.json", "memory.txt"


@dataclass(frozen=True)
class Plan:
    """The arguments of `shard_step(fn, specs, mesh=..., optimizer=..., **options)`.

    Args:
        found: the search, if there was one.
        hardware: the hardware that it planned for.
    """

    specs: Any
    options: fs.StepOptions
    found: Fit | None = None
    hardware: fs.Hardware | None = None

    @property
    def accumulate(self) -> int:
        return self.options.accumulate


def axis_of(name: str, mesh: fs.Mesh) -> str | None:
    """Return an axis as presets take it in `tensor=` and `expert=`: None if the mesh does not have it."""
    return name if name in mesh.names else None


def dtypes_of(precision: PrecisionConfig) -> dict[str, Any]:
    """Return the dtype fields of a `LayoutSpec`, with fp32 for null, and its `scaling`."""
    named = {field: name for field, name in vars(precision).items() if field != "scaling"}
    dtypes = {f"{field}_dtype": getattr(torch, name or "float32") for field, name in named.items()}
    return dtypes | {"scaling": precision.scaling}


def plan_step(
    strategy: StrategyConfig,
    run: RunConfig,
    fn: Callable[..., Any],
    params: Any,
    mesh: fs.Mesh,
    optimizer: fs.optim.Optimizer,
    *,
    batch: tuple[Any, ...],
    specs: Callable[..., Any],
    hardware: str = AUTO,
    along: Mapping[str, Any] | None = None,
) -> Plan:
    """Make specs and options of the step by a strategy. They are equal on all ranks, as the inputs are.

    Args:
        batch: this rank's batch of one step; tensors may be meta.
        specs: makes the specs of a preset: `specs(preset, **options)`, with fields of `LayoutSpec` for all
            leaves that train, and `chunks`.
        hardware: the hardware that `strategy=auto` plans for, see `hardware_of`.
        along: options of the step by `MeshConfig.options`.

    Raises:
        BudgetError: with `strategy=auto`, nothing fits.
        AgreementError: with `strategy=auto`, ranks planned differently.
    """
    options = fs.StepOptions(
        accumulate_mode=run.accumulate_mode, backend=run.backend, timeout=run.timeout_s, grad_norm=True,
        **(along or {}),
    )  # fmt: skip
    # The search chooses specs and options.
    if strategy.name == AUTO:
        planned_for = hardware_of(hardware, mesh)
        found = _fit_on_all_ranks(
            fn, params, mesh, batch=batch, device_bytes=int(run.device_gb * 1e9), hardware=planned_for,
            optimizer=optimizer, specs=specs(fs.presets.full_shard), **options,
        )  # fmt: skip
        options = replace(found.options, deterministic=run.deterministic)
        return Plan(found.specs, options, found, planned_for)
    # The strategy is a preset with these fields.
    fields = {name: getattr(strategy, name) for name in ("memory", "optimizer_memory", "update_on")}
    if strategy.chunks > 1:
        fields["chunks"] = strategy.chunks
    options = replace(
        options, accumulate=run.accumulate, micro_order=run.micro_order,
        zero_bubble_memory=run.zero_bubble_memory, remat=strategy.remat,
        disk_dir=run.disk_dir, prefetch=(strategy.prefetch_forward, strategy.prefetch_backward),
        overlap=strategy.overlap, deterministic=run.deterministic,
    )  # fmt: skip
    return Plan(specs(fs.presets.PRESETS[strategy.name], **fields), options)


def forward_options(config: Any, mesh: fs.Mesh) -> dict[str, Any]:
    """Return the options of `fs.shard_forward` in a configuration with `run` and `mesh`."""
    run = config.run
    return {
        "mesh": mesh, "backend": run.backend, "deterministic": run.deterministic, "timeout": run.timeout_s,
        **config.mesh.options,
    }  # fmt: skip


def _fit_on_all_ranks(*args: Any, **options: Any) -> Fit:
    """Run `fs.fit` on every rank and compare the plans, so that no rank acts, or gives up, alone."""
    failed: Exception | None = None
    try:
        found = fs.fit(*args, **options)
        mine = repr(found.chosen.choice)
    except Exception as error:  # it is raised later, since the others wait for this rank
        failed, mine = error, str(error) if isinstance(error, fs.BudgetError) else repr(error)
    if dist.is_initialized():
        plans: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(plans, mine)
        if len(set(plans)) > 1:
            wrong = [f"rank {rank}: {plan}" for rank, plan in enumerate(plans)]
            raise fs.AgreementError(report("ranks planned differently:", wrong)) from failed
    if failed is not None:
        raise failed
    return found


def hardware_of(name: str, mesh: fs.Mesh | None = None) -> fs.Hardware:
    """Return the hardware to plan for.

    Args:
        name: a name of the table; "measure", which all ranks measure together; "measured:FOLDER", what runs
            of a folder have measured; or "auto", the mesh's own device by its name, which needs `mesh` (an
            unknown one is planned for as an H100).

    Raises:
        ConfigError: no run below the folder of `measured:FOLDER` has measured anything.
    """
    if name == "measure":
        return fs.Hardware.measure(mesh)
    if name.startswith(MEASURED):
        from experiments.lib.measured import hardware_of_runs  # nothing else here needs it

        return hardware_of_runs(name.removeprefix(MEASURED))
    if name != AUTO:
        return fs.Hardware.named(name)
    if mesh.device_type == "cpu":
        return fs.Hardware.named("cpu")
    gpu = torch.cuda.get_device_name() if mesh.device_type == "cuda" else ""
    return fs.Hardware.of_gpu(gpu) or fs.Hardware.named("h100")


def write_search(plan: Plan, folder: Path) -> None:
    """Print what `strategy=auto` has chosen and why, and write it to `plan.json`."""
    if plan.found is None:
        return
    values = {"hardware": plan.hardware.name, **plan.found.as_dict()}
    write_json(folder / PLAN, values)
    print(f"planned for {plan.hardware.name}: {plan.found}", flush=True)


def write_memory(lowered: Lowered, folder: Path) -> None:
    """Write the ledger of a step and its kernels into `memory.txt`, and print its peak."""
    analysis = lowered.memory_analysis()
    write_text(folder / MEMORY, f"{analysis}\n")
    elsewhere = [
        f"{size / 1e6:.1f} MB on the {tier}"
        for tier, size in (("host", analysis.host_bytes), ("disk", analysis.disk_bytes))
        if size
    ]
    parts = ", ".join([f"{analysis.peak_bytes / 1e6:.1f} MB on its device", *elsewhere])
    print(f"a rank's memory in a step, by prediction: {parts} (what it goes to: {MEMORY})", flush=True)


def specs_of(rules: Any, params: Any, policy: Mapping[str, Any]) -> Any:
    """Make specs by `TrainConfig.specs`.

    Args:
        policy: fields for leaves whose rules do not have them.

    Raises:
        ConfigError: a rule matches nothing, or no rule matches a leaf.
    """
    try:
        return fs.match_specs(params, [(glob, rule_of(rule, policy)) for glob, rule in rules])
    except fs.errors.SpecError as error:
        raise ConfigError(f"specs: {error}") from None


def rule_of(how: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rule of `TrainConfig.specs` as `fs.match_specs` takes it, with `fields` for those that it
    lacks.

    >>> rule_of("shard", {"memory": "host"}), rule_of({"storage": [None, "shard"]}, {"memory": "device"})
    ({'memory': 'host', 'storage': ['shard']}, {'memory': 'device', 'storage': [None, 'shard']})
    """
    if isinstance(how, str):
        how = {"storage": [how]}
    return {**fields, **(how or {})}


def peak_of(planned: fs.Hardware | None, mesh: fs.Mesh) -> fs.Hardware | None:
    """Return the hardware whose peak an MFU is a share of: one that was measured, or a GPU that the table
    knows."""
    # Hardware that was measured has the machine's own name.
    if planned is not None and not planned.name.startswith(tuple(TABLE)):
        return planned
    if mesh.device_type != "cuda":
        return None  # the table's CPU is no real one
    return fs.Hardware.of_gpu(torch.cuda.get_device_name())
