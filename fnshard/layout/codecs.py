"""Codecs: frozen leaves stored, sharded, gathered and offloaded as codes, decoded where they are used.

A coded leaf "w" is stored as several leaves, its parts ("w.codes", "w.scales"), and `fn` is given what they
decode to. That is an expression of leaves alone, so the compiler decodes inside the kernel that uses the
weight and never keeps it. Every row of a leaf (dim 0) is coded by itself: on any mesh, the codes of a shard
of rows are a shard of the codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnshard.errors import SpecError, StateError, leaves
from fnshard.layout.spec import DTYPE_FIELDS, LayoutSpec, P, is_spec

__all__ = ["Codec", "decode", "encode", "register"]

Shape = tuple[int, ...]
Parts = Mapping[str, tuple[Shape, torch.dtype]]


@dataclass(frozen=True)
class Codec:
    """A pair of functions that encode and decode a frozen leaf.

    `register` adds a codec, and `LayoutSpec(codec=name)` chooses it.

    Args:
        name: what specs call it.
        parts: a function from a leaf's shape, of two dims or more, to `{part: (shape, dtype)}`; dim 0 of each
            part is the leaf's.
        encode: a function from float rows [n, ...] to `{part: tensor}`, which codes each row by itself.
        decode: a function from parts, their leaf's shape and a dtype to rows. It is made of plain torch
            operators, so that it can be compiled.

    >>> half = Codec(
    ...     "half",
    ...     lambda shape: {"halves": (shape, torch.float16)},
    ...     lambda rows: {"halves": rows.half()},
    ...     lambda parts, shape, dtype: parts["halves"].to(dtype),
    ... )
    >>> half.decode(half.encode(torch.tensor([[0.1]])), (1, 1), torch.float32)
    tensor([[0.1000]])
    """

    name: str
    parts: Callable[[Shape], Parts]
    encode: Callable[[Tensor], Mapping[str, Tensor]]
    decode: Callable[[Mapping[str, Tensor], Shape, torch.dtype], Tensor]


BLOCK, GROUP = 64, 256  # weights to a scale, scales to a scale of scales (Dettmers et al. 2023)
RUN = 1 << 20  # weights that are coded at once

# The 16 quantiles of a normal distribution, scaled to [-1, 1], with an exact zero (QLoRA, appendix E).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip
# Two codes share a byte, the first in its high half.
PAIRS = [(NF4[byte >> 4], NF4[byte & 15]) for byte in range(256)]


def _columns(shape: Shape) -> tuple[int, int]:
    """Return the number of blocks and of groups in a row."""
    blocks = -(-math.prod(shape[1:]) // BLOCK)
    return blocks, -(-blocks // GROUP)


def _blocks(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Cut rows into fp32 blocks [n, blocks, BLOCK], zero-padded; return them and their largest magnitudes."""
    flat = rows.reshape(rows.shape[0], -1).float()
    flat = F.pad(flat, (0, -flat.shape[1] % BLOCK))
    blocks = flat.view(flat.shape[0], -1, BLOCK)
    return blocks, blocks.abs().amax(2)


def _rows(blocks: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Put blocks together to rows of the leaf's shape, without their padding."""
    flat = blocks.reshape(blocks.shape[0], -1)
    return flat[:, : math.prod(shape[1:])].reshape(shape).to(dtype)


def _int8_parts(shape: Shape) -> Parts:
    """Return shapes and dtypes of the parts: a code of eight bits per number, a scale per block."""
    blocks, _ = _columns(shape)
    return {"codes": ((shape[0], blocks * BLOCK), torch.int8), "scales": ((shape[0], blocks), torch.float32)}


def _int8_encode(rows: Tensor) -> Mapping[str, Tensor]:
    """Code rows so that the largest number of a block is 127."""
    blocks, most = _blocks(rows)
    # A block of zeros has the scale 0, and is divided by 1.
    scales = most / 127
    codes = blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(2)
    return {"codes": _int8(codes).flatten(1), "scales": scales}


def _int8(values: Tensor) -> Tensor:
    """Round to int8. The scale of denormals is so coarse that quotients may exceed 127."""
    return values.round().clamp(-127, 127).to(torch.int8)


def _int8_decode(parts: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype) -> Tensor:
    scales = parts["scales"]
    codes = parts["codes"].view(*scales.shape, BLOCK)
    return _rows(codes.float() * scales.unsqueeze(2), shape, dtype)


def _nf4_parts(shape: Shape) -> Parts:
    blocks, groups = _columns(shape)
    return {
        "codes": ((shape[0], blocks * BLOCK // 2), torch.uint8),
        "scales": ((shape[0], groups * GROUP if groups > 1 else blocks), torch.int8),
        "scale_scales": ((shape[0], groups, 2), torch.float32),
    }


def _nf4_encode(rows: Tensor) -> Mapping[str, Tensor]:
    """Code rows in 16 levels of their block's scale, and the scales in eight bits."""
    blocks, most = _blocks(rows)
    # Scales are coded in turn: 8 bits around the mean of their group.
    groups = -(-most.shape[1] // GROUP)
    missing = -most.shape[1] % GROUP if groups > 1 else 0
    both = most, torch.ones_like(most)
    # The last group may be padded, with zeros that neither its mean nor its spread counts.
    grouped, counted = (F.pad(each, (0, missing)).view(most.shape[0], groups, -1) for each in both)
    mean = (grouped * counted).sum(2) / counted.sum(2)
    spread = ((grouped - mean.unsqueeze(2)) * counted).abs().amax(2) / 127
    step = torch.where(spread > 0, spread, 1.0).unsqueeze(2)
    scales = _int8((grouped - mean.unsqueeze(2)) * counted / step)
    kept = {"scales": scales.flatten(1), "scale_scales": torch.stack([spread, mean], 2)}

    # Codes are the nearest to what the scales, as coded, will make of them.
    size = _nf4_scales(kept, most.shape[1])
    unit = blocks / torch.where(size != 0, size, 1.0).unsqueeze(2)
    levels = torch.tensor(NF4, device=rows.device)
    # The nearest level is told by the middles between levels: how many of them a number exceeds.
    middles = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(unit, middles, out_int32=True).to(torch.uint8).flatten(1)
    return {"codes": (codes[:, ::2] << 4) | codes[:, 1::2], **kept}


def _nf4_scales(parts: Mapping[str, Tensor], blocks: int) -> Tensor:
    """Decode the scale of each block, [n, blocks] in fp32."""
    spread, mean = parts["scale_scales"].unbind(2)
    grouped = parts["scales"].view(*spread.shape, -1).float()
    return (grouped * spread.unsqueeze(2) + mean.unsqueeze(2)).flatten(1)[:, :blocks]


def _nf4_decode(parts: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype) -> Tensor:
    rows, size = parts["codes"].shape
    blocks = size * 2 // BLOCK
    values = _nf4_levels(parts["codes"]).view(rows, blocks, BLOCK) * _nf4_scales(parts, blocks).unsqueeze(2)
    return _rows(values, shape, dtype)


def _nf4_levels(codes: Tensor) -> Tensor:
    """Decode both codes of a byte at once: unfused, decoding takes 8 bytes per weight instead of 16."""
    return torch.tensor(PAIRS, device=codes.device).index_select(0, codes.flatten().int())


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("int8", _int8_parts, _int8_encode, _int8_decode),
        Codec("nf4", _nf4_parts, _nf4_encode, _nf4_decode),
    )
}


def register(codec: Codec) -> None:
    """Add a codec by its name. Call it on every rank before specs that name the codec are used.

    Raises:
        SpecError: this is not a `Codec`, another codec has the name or parts of the same names, by which a
            checkpoint tells codecs apart, or its functions do not agree with each other.
    """
    if not isinstance(codec, Codec):
        raise SpecError(f"fs.codecs.register takes a Codec, not {type(codec).__name__}.")
    if CODECS.get(codec.name, codec) is not codec:
        raise SpecError(f"a codec is called {codec.name!r} already.", fix="give yours another name.")

    names = codec.parts((4, 3)).keys()
    for other in CODECS.values():
        if other is not codec and other.parts((4, 3)).keys() == names:
            raise SpecError(
                f"codec {codec.name!r} has parts {', '.join(names)}, as codec {other.name!r} has. A "
                "checkpoint tells codecs by these names. Fix: give one of the parts another name."
            )

    # One shape is smaller than a block, the other has several dims and no whole number of blocks.
    wrong = [text for shape in ((4, 3), (2, 5, 70)) for text in _find_disagreements(codec, shape)]
    if wrong:
        fix = (
            "parts(shape) announces what encode gives; every row is coded by itself; decode gives the shape."
        )
        raise SpecError(f"codec {codec.name!r} does not hold to its contract:", wrong, fix)
    CODECS[codec.name] = codec


def _find_disagreements(codec: Codec, shape: Shape) -> list[str]:
    """Code a leaf of this shape and say, a line each, where the codec's functions do not fit together."""
    rows = torch.linspace(-1, 1, math.prod(shape)).view(shape)
    announced, codes = codec.parts(shape), codec.encode(rows)
    wrong = []
    if announced.keys() != codes.keys():
        return [f"{list(shape)}: parts are {', '.join(announced)}, encode gives {', '.join(codes)}"]
    for name, (part, dtype) in announced.items():
        if tuple(codes[name].shape) != tuple(part) or codes[name].dtype != dtype:
            found = f"{list(codes[name].shape)} {codes[name].dtype}"
            wrong.append(f"{list(shape)}: {name} is {found}, announced as {list(part)} {dtype}")

    values = codec.decode(codes, shape, torch.float32)
    if tuple(values.shape) != shape or values.dtype != torch.float32:
        return [*wrong, f"{list(shape)}: decode gives {list(values.shape)} {values.dtype}"]

    # A rank codes its own rows alone, and must get the same codes.
    alone = codec.encode(rows[:1])
    if not wrong and any(not torch.equal(alone[n], codes[n][:1]) for n in codes):
        wrong.append(f"{list(shape)}: the first row alone is coded otherwise than among others")
    return wrong


def check_codecs(specs: Mapping[str, LayoutSpec]) -> None:
    """Check that all leaves can take their codecs.

    Raises:
        SpecError: a codec is unknown; a leaf trains, is no float or has less than two dims; a layout cuts
            rows.
    """
    found = {path: _explain_misfit(spec) for path, spec in specs.items() if is_coded(spec)}
    wrong = {path: problem for path, problem in found.items() if problem is not None}
    if wrong:
        lines = [f"params[{p!r}] {list(specs[p].shape)} with {what}." for p, (what, _) in wrong.items()]
        fixes = dict.fromkeys(fix for _, fix in wrong.values())
        raise SpecError(f"{leaves(len(wrong))} cannot be coded:", lines, " ".join(fixes))


def _explain_misfit(spec: LayoutSpec) -> tuple[str, str] | None:
    """Return why a leaf cannot take its codec, and the fix; None if it can."""
    if spec.codec not in CODECS:
        known = ", ".join(map(repr, CODECS))
        return f"codec={spec.codec!r}", f"one of {known}, or your own by fs.codecs.register."
    if spec.trainable:
        return (
            f"codec={spec.codec!r} and trainable=True",
            "a code has no gradient: trainable=False, or train an adapter for it (fs.lora).",
        )
    if len(spec.shape) < 2 or not spec.compute_dtype.is_floating_point:
        what = f"codec={spec.codec!r} of {spec.compute_dtype}"
        return what, "codecs are for float leaves of two dims or more: leave codec=None for others."
    if any(spec.storage.of(dim) for dim in range(1, len(spec.shape))):
        return (
            f"codec={spec.codec!r} and storage={spec.storage!r}",
            "rows are coded one by one: shard dim 0, P('shard').",
        )
    return None


@dataclass
class Unfit:
    """A collection of leaves with values that no code can represent, all of which one error reports."""

    lines: list[str] = field(default_factory=list)

    def look(self, path: str, spec: LayoutSpec, values: Tensor) -> None:
        """Add a leaf that is to be encoded, or rows of it, if its values are not finite in fp32."""
        if not is_coded(spec) or values.is_meta:
            return
        finite = (int(values[run].detach().float().isfinite().sum()) for run in _runs(values))
        count = values.numel() - sum(finite)
        if count:
            of = f"params[{path!r}] {list(spec.shape)} with codec={spec.codec!r}"
            self.lines.append(f"{of}: {count} of {values.numel()} values")

    def refuse(self) -> None:
        """Raise one error for all leaves that were added.

        Raises:
            StateError: there are such leaves.
        """
        if self.lines:
            fix = "load or train them again; or keep them as they are, codec=None."
            what = f"{leaves(len(self.lines))} cannot be coded: inf, nan or too large for fp32 are"
            raise StateError(what, self.lines, fix)


def parts_of(spec: LayoutSpec) -> dict[str, LayoutSpec]:
    """Return the specs of a coded leaf's parts: the leaf's layout of dim 0, in the parts' own dtypes."""
    layouts = dict.fromkeys(("storage", "gradient", "optimizer"), P(*spec.storage.parts[:1]))
    plain = replace(spec, codec=None, buffers=True, **layouts)
    return {
        name: replace(plain, shape=tuple(shape), **dict.fromkeys(DTYPE_FIELDS, dtype))
        for name, (shape, dtype) in CODECS[spec.codec].parts(spec.shape).items()
    }


def is_coded(spec: Any) -> bool:
    """Return whether a leaf, whose shape is known, is stored as the parts of a codec."""
    return is_spec(spec) and spec.codec is not None and spec.shape is not None


def encode(block: Tensor, spec: LayoutSpec) -> Mapping[str, Tensor]:
    """Encode a block of rows, some of them at a time: the temporaries take 16 bytes for each weight."""
    codec, runs, block = CODECS[spec.codec], _runs(block), block.detach()
    if len(runs) < 2:
        return codec.encode(block)
    shape = (block.shape[0], *spec.shape[1:])
    # Rows are coded one by one, so that a run gives what all rows at once would.
    parts = {n: torch.empty(s, dtype=d, device=block.device) for n, (s, d) in codec.parts(shape).items()}
    for run in runs:
        for name, part in codec.encode(block[run]).items():
            parts[name][run] = part
    return parts


def _runs(rows: Tensor) -> list[Any]:
    """Return indices that cut rows into runs of about `RUN` weights, of a row at least.

    A tensor on meta, which takes no memory, is one run.
    """
    count = rows.shape[0] if rows.dim() else 1
    step = max(1, RUN * count // max(1, rows.numel()))
    if rows.is_meta or step >= count:
        return [...]
    return [slice(low, low + step) for low in range(0, count, step)]


def block_of(blocks: Mapping[str, Tensor], path: str, spec: LayoutSpec) -> Tensor:
    """Return a leaf's stored block by its path; a coded leaf is decoded, in its storage dtype."""
    if not is_coded(spec):
        return blocks[path].detach()
    return decode(blocks, path, spec, spec.storage_dtype).detach()


def decode(tensors: Mapping[str, Tensor], path: str, spec: LayoutSpec, dtype: torch.dtype) -> Tensor:
    """Decode the rows of a leaf, all of them or a block, from its parts."""
    codec = CODECS[spec.codec]
    parts = {name: tensors[f"{path}.{name}"] for name in codec.parts(spec.shape)}
    rows = next(iter(parts.values())).shape[0]
    return codec.decode(parts, (rows, *spec.shape[1:]), dtype)


encoded, decoded = encode, decode  # the names that these functions had before, kept for one release
