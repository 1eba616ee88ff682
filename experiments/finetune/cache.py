"""Caches: what attention layers of transformers take for a cache, without a write in place.

Keys and values come with the batch, [B, heads, S, width] a layer, and go out again as outputs: a compiled
program has no memory of its own, and each of its segments takes its own layer's alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

KeyValues = dict[str, tuple[Tensor, Tensor]]  # {layer: (keys, values)}, each [B, heads, S, width]


class StatelessCache:
    """Keeps nothing. With it, models know that a row is one sequence, and ask for plain causal attention.

    Without a cache they look for packed documents in the positions, and build a T x T mask when traced.
    """

    is_compileable = False

    def update(self, keys: Tensor, values: Tensor, layer: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """What the layer is to attend to."""
        return keys, values

    def get_seq_length(self, layer: int = 0) -> int:
        return 0

    def get_query_offset(self, layer: int = 0) -> int:
        return 0

    def get_mask_sizes(self, queries: int, layer: int = 0) -> tuple[int, int]:
        """How many keys there are, and the position of the first."""
        return queries, 0


class PromptCache(StatelessCache):
    """Keeps the keys and values of a prompt, with room for `size` tokens in all."""

    def __init__(self, size: int):
        self.size = size
        self.kept: KeyValues = {}

    def update(self, keys: Tensor, values: Tensor, layer: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """What the layer is to attend to: the prompt alone."""
        room = (0, 0, 0, self.size - keys.shape[2])
        self.kept[str(layer)] = (F.pad(keys, room).contiguous(), F.pad(values, room).contiguous())
        return keys, values


class DecodeCache(StatelessCache):
    """Takes one more token a row, each at its own position."""

    def __init__(self, kept: Mapping[str, tuple[Tensor, Tensor]], positions: Tensor):
        self.before = kept
        self.positions = positions
        self.kept: KeyValues = {}

    def update(self, keys: Tensor, values: Tensor, layer: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """What the layer is to attend to: all S places; a mask says which of them are filled."""
        old_keys, old_values = self.before[str(layer)]
        places = torch.arange(old_keys.shape[2], device=keys.device)
        here = (places == self.positions)[:, None, :, None]  # [B, 1, S, 1]
        self.kept[str(layer)] = (torch.where(here, keys, old_keys), torch.where(here, values, old_values))
        return self.kept[str(layer)]

    def get_mask_sizes(self, queries: int, layer: int = 0) -> tuple[int, int]:
        """How many keys there are, and the position of the first."""
        return self.before[str(layer)][0].shape[2], 0
