"""Images of records: the words of a text that stand for them, and their pixels."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.data.model_files import LOCAL
from experiments.lib.checks import ConfigError
from experiments.lib.files import LineError, read_json
from fnshard.errors import MissingExtraError

Picture = str | bytes  # the path of an image file, or its content


@dataclass(frozen=True)
class ImageKind:
    """A way in which a family of models takes its images.

    Args:
        layout: "tiles" of one size, or "patches", of which each image has its own number.
        text: `fn(images, image)`, which makes the text that replaces a chat template's image token.
    """

    layout: str
    text: Callable[[Images, Any], str]


@dataclass(frozen=True)
class Images:
    """A model directory's image processor; made by `open_images`.

    Args:
        hf: the image processor of transformers.
        config: the model's configuration, of transformers.
        token: the token that a chat template writes for an image.
    """

    hf: Any
    config: Any
    token: str
    kind: ImageKind

    def expand(
        self, text: str, spans: Sequence[tuple[int, int]], pictures: Sequence[Picture]
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return a text with as many image tokens as its images have features, and the spans in it.

        Raises:
            LineError: an image that cannot be opened, a template that does not show all images.
        """
        # The template writes one token for each image.
        parts = text.split(self.token)
        if len(parts) != len(pictures) + 1:
            raise LineError(f"has {len(pictures)} images, of which the chat template shows {len(parts) - 1}")

        # Replace it by as many as the image has features, and keep where the text grows.
        out, at = parts[0], len(parts[0])
        ends = []  # the end of each token in `text`, and how much longer `out` is there
        for picture, part in zip(pictures, parts[1:], strict=True):
            out, at = out + self.kind.text(self, open_image(picture)), at + len(self.token)
            ends.append((at, len(out) - at))
            out, at = out + part, at + len(part)

        def move(place: int) -> int:
            return place + next((more for end, more in reversed(ends) if end <= place), 0)

        return out, [(move(start), move(end)) for start, end in spans]

    def pixels(self, pictures: Sequence[Picture]) -> dict[str, Tensor]:
        """Return a row's images as its model takes them; an empty dict if it has none.

        Raises:
            ConfigError: an image that cannot be opened.
        """
        try:
            images = [open_image(picture) for picture in pictures]
        except LineError as error:
            raise ConfigError(f"{error}.") from None
        return self._pixels(images) if images else {}

    def blank(self) -> dict[str, Tensor]:
        """Return empty tensors for a row without images, so that its tower runs along with those of
        others."""
        from PIL import Image

        tensors = self._pixels([Image.new("RGB", (64, 64))])
        return {
            name: part if name == "grid" else torch.zeros_like(part[:0]) for name, part in tensors.items()
        }

    def features(self, tensors: Mapping[str, Tensor]) -> int:
        """Return how many features a row's images have."""
        count = len(tensors["pixels"])
        if self.kind.layout == "tiles":
            return count * self.features_of_tile
        return count // self.patches_per_feature

    @property
    def patches_per_feature(self) -> int:
        """Count the patches that become one feature."""
        return self.config.vision_config.spatial_merge_size**2

    @property
    def features_of_tile(self) -> int:
        """Count the features of a tile."""
        vision = self.config.vision_config
        side = vision.image_size // vision.patch_size // getattr(self.config, "scale_factor", 1)
        features = side * side
        is_full = getattr(self.config, "vision_feature_select_strategy", "") == "full"
        if is_full and "clip" in vision.model_type:  # CLIP has one more, for the whole tile
            features += 1
        return features

    def _pixels(self, images: list[Any]) -> dict[str, Tensor]:
        """Return opened images as the model takes them."""
        if self.kind.layout == "tiles":
            nested = hasattr(self.config, "scale_factor")
            values = self.hf(images=[images] if nested else images, return_tensors="pt")["pixel_values"]
            return {"pixels": values.flatten(0, 1) if nested else values}
        from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

        patches, vision = self.hf(images=images, return_tensors="pt"), self.config.vision_config
        grid, merge = patches["image_grid_thw"], vision.spatial_merge_size
        # Patches of one image attend to each other alone, as tokens of one document do.
        number = torch.arange(1, len(grid) + 1)
        tensors = {
            "pixels": patches["pixel_values"], "places": get_vision_position_ids(grid, merge), "grid": grid,
            "documents": number.repeat_interleave(grid.prod(-1)),
        }  # fmt: skip
        # Some layers of Qwen2.5-VL attend within windows, whose patches are put next to each other.
        if hasattr(vision, "window_size"):
            order, bounds = get_vision_window_index(grid, merge, vision.window_size, vision.patch_size)
            windows = torch.arange(1, len(bounds)).repeat_interleave(bounds.diff())
            tensors |= {"order": order, "windows": windows}
        return tensors


def open_image(picture: Picture) -> Any:
    """Open an image, upright and in RGB.

    Raises:
        LineError: there is no such file, or it is no image.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(picture if isinstance(picture, str) else io.BytesIO(picture)) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except FileNotFoundError:
        raise LineError(f"the image {picture} is not there") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        named = picture if isinstance(picture, str) else f"an image of {len(picture)} bytes"
        raise LineError(f"{named} is no image that can be read ({error})") from None


def _write_tiles(images: Images, image: Any) -> str:
    """Write the tokens of one tile. Llava takes every image as one tile."""
    return images.token * images.features_of_tile


def _write_split_tiles(images: Images, image: Any) -> str:
    """Write rows of tiles with their places, and the whole image, as Idefics3 does (Laurençon et al.
    2024)."""
    counts = images.hf(images=[[image]], return_row_col_info=True)
    (rows,), (columns,) = counts["rows"][0], counts["cols"][0]
    fake, tile = "<fake_token_around_image>", images.token * images.features_of_tile
    text = ""
    for row in range(1, rows + 1):
        text += "".join(f"{fake}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1)) + "\n"
    # A small image is not split, and has no rows.
    if rows:
        text += "\n"
    return text + f"{fake}<global-img>{tile}{fake}"


def _write_patches(images: Images, image: Any) -> str:
    """Write one token for each group of patches that becomes one feature, as Qwen2-VL does."""
    grid = images.hf(images=[image])["image_grid_thw"][0]
    return images.token * (int(np.prod(grid)) // images.patches_per_feature)


KINDS: Mapping[str, ImageKind] = {  # by the model_type of config.json
    "llava": ImageKind("tiles", _write_tiles),
    **dict.fromkeys(("idefics3", "smolvlm"), ImageKind("tiles", _write_split_tiles)),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), ImageKind("patches", _write_patches)),
}


def open_images(folder: Path, tokenizer: Any) -> Images | None:
    """Open the image processor of a model directory; return None if the model is of no kind in `KINDS`.

    Raises:
        ConfigError: transformers does not open it.
        MissingExtraError: pillow, or a transformers that knows its processors, is not installed.
    """
    named = read_json(folder / "config.json").get("model_type")
    kind = KINDS.get(named) if isinstance(named, str) else None
    if kind is None:
        return None
    try:
        import PIL  # noqa: F401
        import transformers.vision_utils
    except ImportError as error:
        raise MissingExtraError(
            f"{folder}: its images need pillow, and a transformers with vision_utils. "
            "Fix: pip install 'fnshard[vision]'."
        ) from error
    try:
        hf = transformers.AutoImageProcessor.from_pretrained(folder, **LOCAL)
        whole = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
    except Exception as error:  # the libraries raise errors of every kind
        raise ConfigError(
            f"{folder}: transformers opens no image processor there: {error!s:.300}."
        ) from error
    return Images(hf, whole, tokenizer.convert_ids_to_tokens(whole.image_token_id), kind)
