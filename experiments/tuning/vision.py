"""Vision: the tower of a model that sees, as a pure function of pixels in rows of one shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fnshard as fs
from experiments.data.images import KINDS, Images, Picture
from experiments.lib.checks import ConfigError

FLASH = "fnshard_flash"  # towers pass the bounds of images to an attention with "flash" in its name
LEAST = {"patches": 64, "tiles": 1}  # the least sizes of a row, which grow by powers of two


@dataclass(frozen=True)
class Vision:
    """A model's way to see: its tower's features take the place of image tokens in a text.

    Args:
        layout: the layout of the model's images, see `ImageKind`.
        token: the image token. A text has one for each feature.
        tower: `fn(the model's leaves, pixels) -> [B, F, D]`.
        model: the module with the tower and the trunk, and no head.
    """

    layout: str
    token: int
    tower: Callable[[Any, Mapping[str, Tensor]], Tensor]
    model: nn.Module

    def merge(self, params: Any, embedded: Tensor, tokens: Tensor, pixels: Mapping[str, Tensor]) -> Tensor:
        """Return embeddings [B, T, D] with the features of a row's images, in order, at its image tokens."""
        features = self.tower(params, pixels).to(embedded.dtype)
        here = tokens == self.token
        # The n-th image token of a row takes the row's n-th feature.
        index = (here.cumsum(1) - 1).clamp(0, features.shape[1] - 1)
        index = index[..., None].expand(-1, -1, features.shape[-1])
        return torch.where(here[..., None], features.gather(1, index), embedded)

    def rows(
        self, images: Images, pictures: Sequence[Sequence[Picture]], tokens: Tensor
    ) -> dict[str, Tensor]:
        """Make the images of rows as `tower` takes them.

        They are padded to a power of two that holds the longest, so that there are few shapes. A row without
        images has padding alone.

        Args:
            pictures: the images of each row.
            tokens: int64 [B, T], which give the images' positions.

        Raises:
            ConfigError: an image is missing, or is not what it was when the data were prepared.
        """
        loaded = [images.pixels(each) for each in pictures]
        sizes = [len(each["pixels"]) for each in loaded if each]
        size = LEAST[self.layout]
        while size < max(sizes, default=1):
            size *= 2
        blank = images.blank() if not all(loaded) else {}

        # A file may have changed since its text was given as many image tokens as it had features.
        for row, row_images, row_pictures in zip(tokens, loaded, pictures, strict=True):
            count = images.features(row_images) if row_images else 0
            needed = int((row == self.token).sum())
            if count != needed:
                names = ", ".join(f"{picture!s:.200}" for picture in row_pictures)
                raise ConfigError(
                    f"{names}: {count} features for {needed} image tokens. "
                    "Fix: the images are not those that the data were prepared of; prepare them anew (remove "
                    "outputs/data/prepared)."
                )
        rows = [self._pad_row(each or blank, row, size) for each, row in zip(loaded, tokens, strict=True)]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def _pad_row(self, images: Mapping[str, Tensor], tokens: Tensor, size: int) -> dict[str, Tensor]:
        """Pad the images of a row to `size`, and add the positions of its tokens if the trunk has three."""
        pad = lambda x: F.pad(x, (0, 0) * (x.dim() - 1) + (0, size - len(x)))  # noqa: E731
        row = {name: pad(part) for name, part in images.items() if name not in ("grid", "order")}
        if "order" in images:  # a permutation, so padding keeps its own places
            every = torch.arange(size // (self.model.visual.spatial_merge_size**2))
            row["order"] = torch.cat([images["order"], every[len(images["order"]) :]])
        if "grid" in images:
            here = (tokens == self.token)[None].int()
            grid = images["grid"] if here.any() else None
            row["positions"] = self.model.get_rope_index(tokens[None], here, image_grid_thw=grid)[0][:, 0]
        return row


def vision_of(model: nn.Module, tied: Mapping[str, str], part: Callable[..., Any]) -> Vision | None:
    """Return the vision of a model of transformers; None if it takes no images.

    Args:
        tied: the paths of tied leaves, by their other names.
        part: makes a pure function of the model's leaves from a module, a prefix and `tied`.

    Raises:
        ConfigError: its images are of a kind that is not known here.
    """
    config = model.config
    if getattr(config, "vision_config", None) is None:
        return None
    kind = KINDS.get(config.model_type)
    if kind is None:
        raise ConfigError(
            f"{type(model).__name__}: images of the kind {config.model_type!r} are not known here. "
            f"Fix: a model of {', '.join(KINDS)}."
        )
    prefix = model.base_model_prefix
    inner = getattr(model, prefix)
    if kind.layout == "patches":
        from transformers import AttentionInterface

        AttentionInterface.register(FLASH, _attend)
        inner.visual.config._attn_implementation = FLASH
    tower = part(_Tower(prefix, inner, RUN[kind.layout]), "", tied)
    return Vision(kind.layout, config.image_token_id, tower, inner)


class _Tower(nn.Module):
    """A module that computes the features of images and nothing else."""

    def __init__(self, prefix: str, inner: nn.Module, run: Callable[..., Tensor]):
        super().__init__()
        self.add_module(prefix, inner)
        self.run = lambda images: run(inner, images)

    def forward(self, images: Mapping[str, Tensor]) -> Tensor:
        return self.run(images)


def _run_on_tiles(model: nn.Module, images: Mapping[str, Tensor]) -> Tensor:
    """Run a tower on tiles of one size, [B, N, C, H, W]."""
    pixels = images["pixels"]
    tiles = pixels.flatten(0, 1).to(next(model.parameters()).dtype)
    if hasattr(model, "connector"):  # the model's own function would look for padding, which is known here
        features = model.connector(model.vision_model(pixel_values=tiles).last_hidden_state)
    else:
        features = torch.stack(list(model.get_image_features(pixel_values=tiles).pooler_output))
    return features.reshape(len(pixels), -1, features.shape[-1])


def _run_on_patches(model: nn.Module, images: Mapping[str, Tensor]) -> Tensor:
    """Run a tower on the patches of all rows at once, [B, P, K]. Each image is a document of its own."""
    pixels = images["pixels"]
    rows, size = pixels.shape[:2]
    merged = model.visual.spatial_merge_size**2  # the patches that make one feature
    # Numbers of documents and windows count within a row, and have to differ between rows.
    start = torch.arange(rows, device=pixels.device)[:, None] * size
    bounds = {"cu_seqlens": (images["documents"] + start).flatten(), "max_seqlen": 0}
    if "order" in images:
        bounds |= {
            "window_index": (images["order"] + start // merged).flatten(),
            "cu_window_seqlens": (images["windows"] + start).flatten(), "max_window_seqlen": 0,
        }  # fmt: skip
    patches = pixels.flatten(0, 1).to(next(model.parameters()).dtype)
    seen = model.visual(patches, grid_thw=None, position_ids=images["places"].flatten(0, 1), **bounds)
    return seen.pooler_output.view(rows, size // merged, -1)


RUN = {"patches": _run_on_patches, "tiles": _run_on_tiles}


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *,
    cu_seq_lens_q: Tensor, scaling: float, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend within each image. `cu_seq_lens_q` has the image of each patch in the place of images' bounds.

    Its shape does not depend on the number of images.
    """
    attended = fs.attention(query, key, value, causal=False, documents=cu_seq_lens_q[None], scale=scaling)
    return attended.transpose(1, 2).contiguous(), None
