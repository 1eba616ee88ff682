"""Budget: find the most tokens of a micro-batch whose step fits into a device, by the ledger."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist

import fnshard as fs
from experiments.lib.checks import ConfigError
from experiments.lib.config import MULTIPLE
from experiments.lib.folder import RunFolder
from experiments.tuning.config import FinetuneConfig
from fnshard.errors import CheckpointError, report

SHARE = 0.9  # the share of a GPU that counts as the budget, where none is named
GUESSES = 8  # the most steps that are lowered to find the budget of tokens, besides the smallest


def budget_bytes(config: FinetuneConfig, mesh: fs.Mesh) -> float:
    """Return the bytes that a rank may take of its device, which are the least of all ranks'.

    Raises:
        ConfigError: the configuration does not say, and the device is no GPU.
    """
    if config.run.device_gb is None and mesh.device_type != "cuda":
        raise ConfigError(
            "data.tokens=auto: needs a budget on a CPU. Fix: run.device_gb=4, or data.tokens=N."
        )
    if config.run.device_gb is not None:
        mine = config.run.device_gb * 1e9
    else:
        mine = SHARE * torch.cuda.get_device_properties(mesh.device).total_memory
    every = [mine]
    if dist.is_initialized():
        every = [0.0] * dist.get_world_size()
        dist.all_gather_object(every, mine)
    return min(every)


def read_saved_tokens(folder: RunFolder) -> int | None:
    """Return `data.tokens` of the run that is resumed, by its newest checkpoint or the one that it starts
    from; None if there is no checkpoint."""
    for root in filter(None, (folder.checkpoints, folder.source)):
        with suppress(CheckpointError):
            config = fs.checkpoint.manifest(root).config or {}
            return config.get("data", {}).get("tokens")
    return None


def check_fits(tokens: int, peak_bytes: int, budget: float) -> None:
    """Check that the micro-batches of a run that goes on here fit.

    Raises:
        ConfigError: they do not. The error says how much is missing, and the ways out.
    """
    if peak_bytes > budget:
        raise ConfigError(
            f"data.tokens=auto: the run goes on with data.tokens={tokens}, so that its batches stay, "
            f"and a step takes {peak_bytes / 1e6:.1f} MB here; {budget / 1e6:.1f} are there. Fix: more "
            "ranks, strategy.remat=unit, a larger run.device_gb, or begin anew with run.resume=never."
        )


def find_most_tokens(peak_of: Callable[[int], int], budget: float, least: int, most: int) -> int:
    """Return the most tokens whose step fits, or nearly so many, as a multiple of `MULTIPLE`.

    The peak of a step is nearly a line in the tokens of a micro-batch. So each guess is where the line
    through the least and the largest that were tried meets the budget.

    Args:
        peak_of: gives the bytes of a step by the tokens of a micro-batch.
        budget: the bytes that there are.
        least: the tokens of the longest record.
        most: the tokens beyond which more are of no use.

    Raises:
        ConfigError: not even the longest record fits.

    >>> find_most_tokens(lambda tokens: 1000 + 10 * tokens, 9000, least=20, most=10_000)
    800
    """
    low = -(-least // MULTIPLE) * MULTIPLE
    most = max(low, most // MULTIPLE * MULTIPLE)
    known = {low: peak_of(low)}
    if known[low] > budget:
        raise ConfigError(
            report(
                f"data.tokens=auto: the longest record takes {least} positions, and a step of micro-batches "
                f"of {low} takes {known[low] / 1e6:.1f} MB; {budget / 1e6:.1f} are there.",
                fix="strategy.remat=unit, a larger run.device_gb, or data.too_long=skip with a smaller "
                "data.context.",
            )
        )
    # `fits` is the most that is known to fit. `over` is the least that does not, or is of no use.
    fits, over, guess = low, most + MULTIPLE, min(2 * low, most)
    for _ in range(GUESSES):
        if guess <= fits:
            break
        known[guess] = peak_of(guess)
        if known[guess] <= budget:
            fits = guess
        else:
            over = guess
        largest = max(known)
        slope = max((known[largest] - known[low]) / (largest - low), 1.0)
        meets = low + int((budget - known[low]) / slope)
        guess = min(meets, over - MULTIPLE) // MULTIPLE * MULTIPLE
    return fits
