"""The options of the memory experiments."""

from __future__ import annotations

from typing import Any

from experiments.cli.command_spec import CommandSpec, Help
from experiments.configs.checks import ConfigError, configuration, out_of_range, refusal, with_defaults
from experiments.configs.decoders import DecoderConfig, decoder, names
from experiments.memory.plans import LLAMA

TARGETS = ("remat", "offload", "resident", "fit")
# What `null` means, by part: of what is measured on this machine.
DEFAULTS: dict[str, dict[str, Any]] = {
    "zero": {"size": "5m", "rows": 1, "length": 256, "rounds": 0},
    "recipe": {"size": "25m", "rows": 4, "length": 256, "rounds": 3},
    "targets": {"size": "25m", "rows": 8, "length": 512, "rounds": 4},
    "sizes": {"size": "tiny", "rows": 1, "length": 256, "rounds": 0},
}


@configuration
class MemoryConfig:
    """All options; those that are None depend on the part (`DEFAULTS`).

    Args:
        part: "zero" (ZeRO 1, 2, 3 against DDP), "recipe" (LitGPT's, ingredient by ingredient), "sizes" (what
            fits where, on paper), "targets" (what fnshard has promised itself).
        size: a file of `conf/model`, for what runs here; `rows`, `length`: of a rank's batch of tokens.
        rounds: timed steps; 0 times nothing.
        backend: of fnshard, for what runs here.
        worlds: numbers of ranks that "zero" lowers for; `measured_worlds`: that it starts here.
        large: the model that "zero" and "recipe" lower, and that nothing runs; one of `plans.LLAMA`.
        models, ranks, large_rows, large_length: what "sizes" lowers, at which numbers of ranks, and a rank's
            batch there.
        targets: which of "remat", "offload", "resident", "fit".
    """

    part: str = "zero"
    size: str | None = None
    rows: int | None = None
    length: int | None = None
    rounds: int | None = None
    backend: str = "inductor"
    worlds: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    measured_worlds: tuple[int, ...] = (2, 4)
    large: str = "1b"
    models: tuple[str, ...] = ("1b", "8b", "70b")
    ranks: tuple[int, ...] = (1, 8, 64, 1024)
    large_rows: int = 2
    large_length: int = 4096
    targets: tuple[str, ...] = TARGETS
    timeout_s: float = 600.0

    @property
    def model(self) -> DecoderConfig:
        return decoder(self.size)


def complete(config: MemoryConfig) -> MemoryConfig:
    """Fill in what depends on the part."""
    if config.part not in DEFAULTS:
        raise ConfigError(f"part={config.part}: one of {', '.join(DEFAULTS)}.")
    config = with_defaults(config, DEFAULTS[config.part])
    choices = {
        "size": names(), "backend": ("inductor", "eager"), "large": LLAMA, "models": LLAMA,
        "targets": TARGETS,
    }  # fmt: skip
    least = {"rows": 1, "length": 1, "rounds": 0, "large_rows": 1, "large_length": 1, "worlds": 2,
             "measured_worlds": 2, "ranks": 1}  # fmt: skip
    if problems := out_of_range(config, choices, least):
        raise refusal(problems)
    return config


HELP = Help(
    about="What saves memory: predicted by lowering, and measured where it runs here.",
    options={
        "part": "zero: ZeRO 1, 2, 3 beside DDP; recipe; sizes: what fits where; targets",
        "size": "a file of conf/model, for what runs here",
        "rows": "of a rank's batch",
        "length": "of a row, in tokens",
        "backend": "inductor compiles, eager does not",
    },
    examples={
        "python -m experiments.memory part=zero": "ZeRO 1, 2 and 3 beside DDP",
        "python -m experiments.memory part=sizes models=[8b] ranks=[8,64]": "what an 8B model takes",
        "python -m experiments.memory --multirun part=zero,recipe,sizes,targets": "all of it",
    },
)
SPEC = CommandSpec("memory", MemoryConfig, HELP, complete=complete)
