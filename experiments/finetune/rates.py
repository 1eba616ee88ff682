"""Rates: what `optimizer.lr=null` means, by objective, by what trains, and by the size of the base."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

# `{(objective, what trains): ((parameters of the base below, peak rate of AdamW), ...)}`. Adapters, as codes
# or not: QLoRA's (Dettmers et al. 2023, table 9). All of a model: Alpaca's and Llama 2's. DPO: Zephyr's
# (Tunstall et al. 2023). Below 50M parameters, the tiny bases here: 5e-3 was tried, the rest are guesses.
TINY, LARGE = 5e7, 2e10
RATES: Mapping[tuple[str, str], Sequence[tuple[float, float]]] = {
    ("sft", "full"): ((TINY, 1e-3), (3e9, 2e-5), (LARGE, 1e-5), (math.inf, 5e-6)),
    ("sft", "adapters"): ((TINY, 5e-3), (LARGE, 2e-4), (math.inf, 1e-4)),
    ("dpo", "full"): ((TINY, 1e-4), (math.inf, 5e-7)),
    ("dpo", "adapters"): ((TINY, 5e-4), (math.inf, 5e-6)),
}


def default_rate(objective: str, method: str, parameters: int) -> float:
    """The peak rate where none is named.

    Args:
        objective: "sft" or "dpo".
        method: "full", or one with adapters.
        parameters: of the base.

    >>> default_rate("sft", "qlora4", 8_000_000_000), default_rate("dpo", "full", 8_000_000_000)
    (0.0002, 5e-07)
    """
    rows = RATES[objective, "full" if method == "full" else "adapters"]
    return next(rate for below, rate in rows if parameters < below)
