"""Codecs: store, shard, gather and offload frozen leaves as codes, and decode them where they are used.

A coded leaf "w" is stored as several leaves, its parts ("w.codes", "w.scales"), and `fn` gets what they
decode to. Decoding is an expression of leaves alone, so the compiler decodes inside the kernel that uses the
weight and never keeps the result. Every row of a leaf (dim 0) is coded by itself: on any mesh, the codes of a
shard of rows are a shard of the codes.
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


BLOCK, GROUP = 64, 256  # weights per scale, scales per scale of scales (Dettmers et al. 2023)
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


def _count_blocks(shape: Shape) -> tuple[int, int]:
    """Return the number of blocks and of groups in a row."""
    blocks = -(-math.prod(shape[1:]) // BLOCK)
    return blocks, -(-blocks // GROUP)


def _cut_blocks(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Cut rows into fp32 blocks [n, blocks, BLOCK], zero-padded; return them and their largest magnitudes."""
    flat = rows.reshape(rows.shape[0], -1).float()
    flat = F.pad(flat, (0, -flat.shape[1] % BLOCK))
    blocks = flat.view(flat.shape[0], -1, BLOCK)
    return blocks, blocks.abs().amax(2)


def _join_blocks(blocks: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Join blocks to rows of the leaf's shape, and drop the padding."""
    flat = blocks.reshape(blocks.shape[0], -1)
    return flat[:, : math.prod(shape[1:])].reshape(shape).to(dtype)


def _int8_parts(shape: Shape) -> Parts:
    """Return the parts' shapes and dtypes: a code of eight bits per number, a scale per block."""
    blocks, _ = _count_blocks(shape)
    return {"codes": ((shape[0], blocks * BLOCK), torch.int8), "scales": ((shape[0], blocks), torch.float32)}


def _int8_encode(rows: Tensor) -> Mapping[str, Tensor]:
    """Code rows so that the largest number of a block is 127."""
    blocks, magnitudes = _cut_blocks(rows)
    # A block of zeros has the scale 0, and is divided by 1.
    scales = magnitudes / 127
    codes = blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(2)
    return {"codes": _round_to_int8(codes).flatten(1), "scales": scales}


def _round_to_int8(values: Tensor) -> Tensor:
    """Round to int8, and clamp: the scale of denormals is so coarse that quotients may exceed 127."""
    return values.round().clamp(-127, 127).to(torch.int8)


def _int8_decode(parts: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype) -> Tensor:
    """Multiply codes by the scale of their block."""
    scales = parts["scales"]
    codes = parts["codes"].view(*scales.shape, BLOCK)
    return _join_blocks(codes.float() * scales.unsqueeze(2), shape, dtype)


def _nf4_parts(shape: Shape) -> Parts:
    """Return the parts' shapes and dtypes: half a byte per number, a byte per block, two floats per group."""
    blocks, groups = _count_blocks(shape)
    return {
        "codes": ((shape[0], blocks * BLOCK // 2), torch.uint8),
        "scales": ((shape[0], groups * GROUP if groups > 1 else blocks), torch.int8),
        "scale_scales": ((shape[0], groups, 2), torch.float32),
    }


def _nf4_encode(rows: Tensor) -> Mapping[str, Tensor]:
    """Code rows in 16 levels of their block's scale, and the scales in eight bits."""
    blocks, scales = _cut_blocks(rows)
    count = scales.shape[1]
    # Scales are coded in turn: 8 bits around the mean of their group. A last group that is shorter is padded,
    # with zeros that neither its mean nor its spread counts.
    groups = -(-count // GROUP)
    padding = -count % GROUP if groups > 1 else 0
    grouped = F.pad(scales, (0, padding)).view(scales.shape[0], groups, -1)
    counted = F.pad(torch.ones_like(scales), (0, padding)).view(scales.shape[0], groups, -1)
    mean = (grouped * counted).sum(2) / counted.sum(2)
    spread = ((grouped - mean.unsqueeze(2)) * counted).abs().amax(2) / 127
    step = torch.where(spread > 0, spread, 1.0).unsqueeze(2)
    codes_of_scales = _round_to_int8((grouped - mean.unsqueeze(2)) * counted / step)
    coded_scales = {"scales": codes_of_scales.flatten(1), "scale_scales": torch.stack([spread, mean], 2)}

    # Numbers are divided by the scales as they will be decoded, which makes up for the rounding of scales.
    decoded = _nf4_decode_scales(coded_scales, count)
    unit = blocks / torch.where(decoded != 0, decoded, 1.0).unsqueeze(2)
    levels = torch.tensor(NF4, device=rows.device)
    # A number's nearest level is the number of middles between levels that it exceeds.
    middles = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(unit, middles, out_int32=True).to(torch.uint8).flatten(1)
    return {"codes": (codes[:, ::2] << 4) | codes[:, 1::2], **coded_scales}


def _nf4_decode_scales(parts: Mapping[str, Tensor], blocks: int) -> Tensor:
    """Decode the scale of each block, [n, blocks] in fp32."""
    spread, mean = parts["scale_scales"].unbind(2)
    grouped = parts["scales"].view(*spread.shape, -1).float()
    return (grouped * spread.unsqueeze(2) + mean.unsqueeze(2)).flatten(1)[:, :blocks]


def _nf4_decode(parts: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype) -> Tensor:
    """Look codes up, and multiply their levels by the scale of their block."""
    codes = parts["codes"]
    blocks = codes.shape[1] * 2 // BLOCK
    # Both codes of a byte are looked up at once: unfused, this takes 8 bytes per weight instead of 16. The
    # levels have no name, so that they are freed before `_join_blocks` copies the product.
    pairs = torch.tensor(PAIRS, device=codes.device)
    values = (
        pairs.index_select(0, codes.flatten().int()).view(codes.shape[0], blocks, BLOCK)
        * _nf4_decode_scales(parts, blocks).unsqueeze(2)
    )  # fmt: skip
    return _join_blocks(values, shape, dtype)


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

    # A checkpoint knows a codec by the names of its parts.
    names = codec.parts((4, 3)).keys()
    for other in CODECS.values():
        if other is not codec and other.parts((4, 3)).keys() == names:
            raise SpecError(
                f"codec {codec.name!r} has parts {', '.join(names)}, as codec {other.name!r} has. A "
                "checkpoint tells codecs by these names.",
                fix="give one of the parts another name.",
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
    problems = {path: _explain_misfit(spec) for path, spec in specs.items() if is_coded(spec)}
    wrong = {path: problem for path, problem in problems.items() if problem is not None}
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
        finite = (int(values[run].detach().float().isfinite().sum()) for run in _cut_runs(values))
        count = values.numel() - sum(finite)
        if count:
            leaf = f"params[{path!r}] {list(spec.shape)} with codec={spec.codec!r}"
            self.lines.append(f"{leaf}: {count} of {values.numel()} values")

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
    codec = CODECS[spec.codec]
    block = block.detach()
    runs = _cut_runs(block)
    if len(runs) == 1:
        return codec.encode(block)
    shape = (block.shape[0], *spec.shape[1:])
    # Rows are coded one by one, so that a run gives what all rows at once would.
    parts = {n: torch.empty(s, dtype=d, device=block.device) for n, (s, d) in codec.parts(shape).items()}
    for run in runs:
        for name, part in codec.encode(block[run]).items():
            parts[name][run] = part
    return parts


def _cut_runs(rows: Tensor) -> list[Any]:
    """Return indices that cut rows into runs of about `RUN` weights, and of one row at least.

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
