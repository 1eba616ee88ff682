"""Rules of convolutions, pools and norms of images, and of ops that work along the last dims of a tensor."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fnshard.compiler.place.placement import PARTIAL, REPLICATED, Split, divides
from fnshard.compiler.place.strategies import Call, OpStrategy, move_dims, rule

aten = torch.ops.aten


CONVOLUTIONS = (
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.conv1d.padding, aten.conv2d.padding,
    aten.conv3d.padding, aten.convolution.default, aten.conv_transpose1d.default,
    aten.conv_transpose2d.input, aten.conv_transpose3d.input,
)  # fmt: skip


@rule(*CONVOLUTIONS)
def _conv(call: Call) -> Iterator[OpStrategy]:
    """Split along the batch, output channels or input channels; or along groups."""
    x, weight = call["input"], call["weight"]
    if x.dim() != weight.dim():
        return
    transposed = "conv_transpose" in str(call.target) or call.arguments.get("transposed", False)
    in_dim, out_dim = (0, 1) if transposed else (1, 0)  # of the weight
    has_bias, ranks = call["bias"] is not None, call.ranks

    # The batch.
    for split in call.splits(x.shape, [0]):
        yield OpStrategy((split, REPLICATED, *[REPLICATED] * has_bias), split)

    # Groups: each rank has whole ones, with their channels.
    if call["groups"] % ranks == 0:
        groups = {"groups": call["groups"] // ranks}
        yield OpStrategy((Split(1), Split(0), *[Split(0)] * has_bias), Split(1), groups)
    if call["groups"] > 1:
        return

    # Output channels, or input channels into parts of a sum, to which every rank would add a bias.
    for split in call.splits(weight.shape, [out_dim]):
        yield OpStrategy((REPLICATED, split, *[Split(0, split.outer)] * has_bias), Split(1, split.outer))
    if not has_bias:
        for split in call.splits(x.shape, [1], even=True):
            yield OpStrategy((split, Split(in_dim, split.outer)), PARTIAL)


@rule(aten.group_norm.default)
def _group_norm(call: Call) -> Iterator[OpStrategy]:
    """Split along the batch, or along channels if each rank gets whole groups."""
    yield from move_dims(call, [0], linear=False)
    if call["num_groups"] % call.ranks == 0:
        groups = {"num_groups": call["num_groups"] // call.ranks}
        yield OpStrategy((Split(1), *[Split(0)] * (len(call.tensors) - 1)), Split(1), groups)


@rule(aten.batch_norm.default)
def _batch_norm(call: Call) -> Iterator[OpStrategy]:
    """Split channels, or the batch if nothing is averaged over it. Running statistics stay whole."""
    if call["training"] and call["running_mean"] is not None:  # it writes to them
        return
    if not call["training"]:
        yield from move_dims(call, [None if d == 1 else d for d in range(len(call.shape))], linear=False)
    for split in call.splits(call.shape, [1]):
        yield OpStrategy((split, *[Split(0, split.outer)] * (len(call.tensors) - 1)), split)


@rule(aten.layer_norm.default, aten.rms_norm.default, aten.native_layer_norm.default)
def _norm(call: Call) -> Iterator[OpStrategy]:
    """Split along dims that are not normalised over."""
    yield from move_dims(call, range(call.tensors[0].dim() - len(call["normalized_shape"])), linear=False)


def _register_last_dims(count: int, *names: str) -> None:
    """Register a rule of ops that work along the last `count` dims of their first tensor, all overloads."""

    def along(call: Call) -> Iterator[OpStrategy]:
        yield from move_dims(call, range(call.tensors[0].dim() - count), linear=False)

    for name in names:
        packet = getattr(aten, name)
        rule(*(getattr(packet, o) for o in packet.overloads() if "out" not in o))(along)


_register_last_dims(1, "max_pool1d", "avg_pool1d", "adaptive_avg_pool1d", "adaptive_max_pool1d")
_register_last_dims(
    2, "tril", "triu", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "max_pool2d",
    "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "reflection_pad2d", "replication_pad2d",
)  # fmt: skip
_register_last_dims(
    3, "max_pool3d", "avg_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool3d", "pixel_shuffle",
    "pixel_unshuffle",
)  # fmt: skip


@rule(
    aten.linalg_cholesky.default, aten.linalg_inv.default, aten.linalg_qr.default, aten.linalg_eigh.default,
    aten.linalg_svd.default, aten.linalg_slogdet.default, aten.linalg_det.default,
    aten.linalg_matrix_exp.default,
    # The forms that an update has, whose composite ops are taken apart.
    aten.linalg_cholesky_ex.default, aten.linalg_inv_ex.default, aten._linalg_eigh.default,
    aten._linalg_svd.default, aten._linalg_slogdet.default, aten._linalg_det.default,
)  # fmt: skip
def _decomposition(call: Call) -> Iterator[OpStrategy]:
    """Place each matrix of a stack by itself. In an update only even splits: padding may be singular."""
    (matrices,) = call.tensors
    for strategy in move_dims(call, range(matrices.dim() - 2), linear=False):
        if not call.axis.update or divides(matrices.shape, strategy.inputs[0], call.ranks):
            yield strategy
