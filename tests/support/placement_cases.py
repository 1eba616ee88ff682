"""Calls of ops that have placement rules: one or more of each, small enough for every placement."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

aten, own = torch.ops.aten, torch.ops.fnshard
f64 = torch.float64


@dataclass(frozen=True)
class Case:
    """A call; tensors among its arguments are `Draw`s."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Draw:
    """A tensor: `kind` float, positive, unit (below 1), complex, definite, bool, or integers below a number.

    "tied": few distinct numbers. "fixed": positive numbers that no gradient is asked of; "ends": 2, 5, ...
    `distinct`: of integers.
    """

    kind: str | int
    shape: tuple[int, ...]
    distinct: bool = False

    def value(self, seed: int) -> Tensor:
        value = self._drawn(seed)
        return value.requires_grad_(
            self.kind not in ("bool", "fixed", "ends") and not isinstance(self.kind, int)
        )

    def _drawn(self, seed: int) -> Tensor:
        made = torch.Generator().manual_seed(seed)
        if isinstance(self.kind, int):
            if self.distinct:
                return torch.randperm(self.kind, generator=made)[: self.shape[0]]
            return torch.randint(self.kind, self.shape, generator=made)
        if self.kind == "ends":
            return torch.arange(2, 5 * self.shape[0], 3, dtype=torch.int32)[: self.shape[0]]
        if self.kind == "bool":
            return torch.rand(self.shape, generator=made) < 0.6
        if self.kind == "complex":
            return torch.randn(self.shape, generator=made, dtype=torch.complex128)
        value = torch.randn(self.shape, generator=made, dtype=f64)
        if self.kind == "fixed":
            return value.abs() + 0.5
        if self.kind == "definite":
            return value @ value.mT + 3 * torch.eye(self.shape[-1], dtype=f64)
        if self.kind == "tied":
            return value.round().clamp(-1, 1)
        if self.kind == "unit":
            return value.sigmoid()
        return value.abs() + 0.5 if self.kind == "positive" else value


def f(*shape: int) -> Draw:
    return Draw("float", shape)


def t(*shape: int) -> Draw:
    return Draw("tied", shape)


def u(*shape: int) -> Draw:
    return Draw("unit", shape)


def n(*shape: int) -> Draw:
    return Draw("fixed", shape)


def pos(*shape: int) -> Draw:
    return Draw("positive", shape)


def c(*shape: int) -> Draw:
    return Draw("complex", shape)


def b(*shape: int) -> Draw:
    return Draw("bool", shape)


def i(high: int, *shape: int) -> Draw:
    return Draw(high, shape)


def p(high: int, count: int) -> Draw:
    """Draw different integers."""
    return Draw(high, (count,), True)


KEY = i(1 << 40)

_POINTWISE = [
    (aten.add.Tensor, f(4, 6), f(4, 6)),
    (aten.add.Tensor, f(5, 6), f(6)),
    (aten.add.Tensor, f(4, 6), 2.0),
    (aten.sub.Tensor, f(6), f(6)),
    (aten.subtract.Tensor, f(6), f(6)),
    (aten.mul.Tensor, f(4, 1, 6), f(5, 1)),
    (aten.mul.Tensor, f(4, 6), -2.0),
    (aten.multiply.Tensor, f(6), f(6)),
    (aten.mul.Scalar, f(6), 3),
    (aten.div.Tensor, f(4, 6), pos(6)),
    (aten.div.Tensor, i(9, 6), 2),
    (aten.divide.Tensor, f(6), pos(6)),
    (aten.div.Scalar, f(6), 3),
    (aten.div.Tensor_mode, i(20, 6), 3, {"rounding_mode": "floor"}),
    (aten.rsub.Tensor, f(6), f(6)),
    (aten.rsub.Scalar, f(6), 1),
    (aten.exp.default, f(4, 6)),
    (aten.gelu.default, f(4, 6)),
    (aten.pow.Tensor_Scalar, f(4, 6), 3),
    (aten.silu.default, f(4, 6)),
    (aten.neg.default, f(6)),
    (aten.relu.default, f(5, 4)),
    (aten.lerp.Scalar, f(6), f(6), 0.3),
    (own.with_values.default, f(4, 6), n(4, 6)),
    (aten.lerp.Tensor, f(6), f(6), u(6)),
    (aten.addcmul.default, f(6), f(4, 6), f(4, 1)),
    (aten.logical_and.default, b(4, 6), b(6)),
    (aten.bitwise_not.default, b(4, 6)),
    (aten.eq.Tensor, i(2, 4, 6), i(2, 6)),
    (aten.square.default, f(6)),
    (aten.clamp.default, f(6), -0.5, 0.5),
    (aten.float_power.Tensor_Scalar, pos(6), 0.5),
    (aten.log_sigmoid.default, f(6)),
    (aten.positive.default, f(6)),
    (aten.clone.default, f(4, 6)),
    (aten.contiguous.default, f(4, 6)),
    (aten.detach.default, f(4, 6)),
    (aten.alias.default, f(4, 6)),
    (aten.fill.Scalar, f(4, 6), 2.0),
    (aten.fill.Tensor, f(4, 6), f()),
    (aten.to.dtype, f(6), f64),
    (aten.to.dtype, i(5, 6), f64),
    (aten.to.device, f(6), torch.device("cpu"), f64),
    (aten.to.dtype_layout, f(6)),
    (aten._to_copy.default, f(6)),
    (aten.masked_fill.Scalar, f(4, 6), b(6), 2.0),
    (aten.masked_fill.Tensor, f(4, 6), b(4, 1), f()),
    (aten.where.self, b(4, 6), f(6), f(4, 1)),
    (aten.where.ScalarOther, b(6), f(4, 6), 1.0),
    (aten.where.ScalarSelf, b(6), 1.0, f(4, 6)),
    (aten.where.Scalar, b(6), 1.0, 2.0),
    (aten._conj.default, c(4, 6)),
    (aten.conj.default, c(6)),
    (aten.resolve_conj.default, c(6)),
    (aten.complex.default, f(4, 6), f(6)),
    (aten.polar.default, f(4, 6), f(4, 6)),
    (aten.mul.Tensor, c(4, 6), c(6)),
    (aten.abs.default, c(4, 6)),
    (own.rounded.default, f(4, 6)),
    (aten.zeros_like.default, f(4, 6)),
    (aten.ones_like.default, f(4, 6)),
    (aten.full_like.default, f(4, 6), 2.0),
    (aten.new_zeros.default, f(4, 6), [3]),
    (aten.new_ones.default, f(4, 6), [3]),
    (aten.new_full.default, f(4, 6), [3], 2.0),
    (aten.bucketize.Tensor, f(4, 6), f(3)),
    (aten.searchsorted.Tensor, f(3), f(4, 6)),
]

GQA = {"enable_gqa": True}
CARRY = [f(2, 12, 4, 2), Draw("positive", (2, 12, 4)), f(2, 12, 4)]

_PRODUCTS = [
    (aten.linear.default, f(4, 6, 12), f(6, 12), f(6)),
    (aten.linear.default, f(5, 12), f(4, 12)),
    (aten.linear.default, f(12), f(6, 12)),
    (own.fp8_linear.default, f(4, 6, 12), f(6, 12)),
    (aten.mm.default, f(4, 6), f(6, 12)),
    (aten.bmm.default, f(6, 4, 5), f(6, 5, 4)),
    (aten.matmul.default, f(4, 1, 5, 6), f(6, 6, 4)),
    (aten.matmul.default, f(6, 4, 5), f(5)),
    (aten.matmul.default, f(6), f(4, 6, 5)),
    (aten.matmul.default, f(6, 4), f(4, 12)),
    (aten.mv.default, f(4, 6), f(6)),
    (aten.dot.default, f(6), f(6)),
    (own.grouped_mm.default, f(5, 6), f(2, 6, 4), Draw("ends", (2,))),
    (own.grouped_mm.default, f(2, 4, 6), f(6, 5), Draw("ends", (2,))),
    (own.grouped_mm.default, f(4, 5), f(5, 6), Draw("ends", (2,))),
    (aten.outer.default, f(6), f(4)),
    (aten.ger.default, f(6), f(5)),
    (aten.addmm.default, f(6), f(4, 12), f(12, 6)),
    (aten.addmm.default, f(4, 6), f(4, 5), f(5, 6)),
    (aten.addmm.default, f(), f(4, 6), f(6, 4)),
    (aten.baddbmm.default, f(4, 1, 6), f(4, 5, 6), f(4, 6, 6)),
    (aten.addmv.default, f(4), f(4, 6), f(6)),
    (aten.einsum.default, "bhqd,bhkd->bhqk", [f(4, 2, 3, 6), f(4, 2, 5, 6)]),
    (aten.einsum.default, "...ij,jk->...ik", [f(4, 6, 5), f(5, 6)]),
    (aten.einsum.default, "ij->i", [f(4, 6)]),
    (aten.einsum.default, "...i,...i->...", [f(6, 4), f(4)]),
    (aten.einsum.default, "ii->i", [f(6, 6)]),
    (aten.scaled_dot_product_attention.default, f(4, 6, 5, 2), f(4, 6, 3, 2), f(4, 6, 3, 2)),
    (aten.scaled_dot_product_attention.default, f(2, 12, 4, 2), f(2, 4, 4, 2), f(2, 4, 4, 2), None, 0.0,
     True, {"enable_gqa": True}),
    (aten.scaled_dot_product_attention.default, f(2, 6, 4, 2), f(2, 2, 4, 2), f(2, 2, 4, 2), None, 0.0,
     True, {"enable_gqa": True}),
    (aten.scaled_dot_product_attention.default, f(4, 6, 4, 2), f(4, 6, 4, 2), f(4, 6, 4, 2), b(4, 1, 1, 4)),
    (own.attention.default, f(4, 6, 4, 2), f(4, 6, 3, 2), f(4, 6, 3, 2), b(4, 1, 1, 3), KEY, 0.3, False,
     None, False),
    (own.attention.default, f(2, 12, 4, 2), f(2, 4, 4, 2), f(2, 4, 4, 2), None, KEY, 0.3, True, None, True),
    (own.attention.default, f(2, 6, 4, 2), f(2, 2, 4, 2), f(2, 2, 4, 2), None, KEY, 0.3, True, None, True),
    (own.document_attention.default, f(2, 12, 4, 2), f(2, 4, 4, 2), f(2, 4, 4, 3), i(2, 2, 4), None, True, 2,
     0.7),
    (own.attention_turn.default, f(2, 6, 4, 2), f(2, 6, 3, 5), [], Draw(1, ()), b(2, 1, 4, 6), 2, False, 0.7),
    (own.attention_turn.default, f(2, 12, 4, 2), f(2, 4, 4, 4), CARRY, Draw(2, ()), None, 2, True, 0.7),
    (own.attention_turn.default, f(6, 4, 2), f(2, 4, 4), [], Draw(1, ()), None, 2, True, 0.7),
    (own.attention_merged.default, f(4, 6, 2), Draw("positive", (4, 6)), f64),
]  # fmt: skip

# Attention over a sequence that an axis splits: whole queries, keys and values, which the test cuts.
SPLIT_ATTENTION = {
    "plain": (f(2, 3, 12, 2), f(2, 3, 12, 2), f(2, 3, 12, 2)),
    "other keys, wide values": (f(2, 3, 12, 2), f(2, 3, 24, 2), f(2, 3, 24, 5)),
    "causal, shared heads": (f(2, 12, 12, 2), f(2, 6, 12, 2), f(2, 6, 12, 2), None, 0.0, True, GQA),
    "causal, scaled, narrow values": (
        f(2, 12, 12, 4), f(2, 12, 12, 4), f(2, 12, 12, 3), None, 0.0, True, {"scale": 0.9},
    ),
    "uneven, causal": (f(2, 12, 11, 2), f(2, 6, 11, 2), f(2, 6, 11, 2), None, 0.0, True, GQA),
    "uneven": (f(2, 12, 11, 2), f(2, 12, 17, 2), f(2, 12, 17, 2)),
    "uneven, documents": (f(2, 12, 11, 2), f(2, 12, 11, 2), f(2, 12, 11, 2), b(2, 1, 11, 11)),
    "uneven, three dims, added": (f(6, 11, 2), f(6, 11, 2), f(6, 11, 2), Draw("fixed", (11, 1))),
    "three dims, causal": (f(12, 12, 2), f(12, 12, 2), f(12, 12, 2), None, 0.0, True),
    "padding": (f(2, 12, 12, 2), f(2, 6, 12, 2), f(2, 6, 12, 2), b(2, 1, 1, 12), GQA),
    "documents": (f(2, 12, 12, 2), f(2, 12, 12, 2), f(2, 12, 12, 2), b(1, 1, 12, 12)),
    "added": (f(2, 12, 12, 2), f(2, 12, 12, 2), f(2, 12, 12, 2), Draw("fixed", (12, 12, 12))),
}  # fmt: skip

_LAYERS = [
    (aten.conv1d.default, f(4, 6, 5), f(6, 6, 3), f(6)),
    (aten.conv1d.default, f(4, 6, 5), f(12, 6, 3)),
    (aten.conv2d.default, f(4, 6, 3, 4), f(6, 1, 2, 2), f(6), [1, 1], [0, 0], [1, 1], 6),
    (aten.conv3d.default, f(2, 6, 2, 2, 2), f(4, 6, 1, 2, 2)),
    (aten.conv1d.padding, f(4, 6, 5), f(6, 6, 3), None, [1], "same"),
    (aten.conv2d.padding, f(4, 4, 3, 3), f(6, 4, 2, 2), f(6)),
    (aten.conv3d.padding, f(4, 4, 2, 2, 2), f(6, 4, 1, 1, 1)),
    (aten.convolution.default, f(4, 6, 5), f(4, 6, 3), None, [1], [0], [1], False, [0], 1),
    (aten.conv_transpose1d.default, f(4, 6, 5), f(6, 4, 3), f(4)),
    (aten.conv_transpose2d.input, f(4, 6, 2, 3), f(6, 4, 2, 2)),
    (aten.conv_transpose3d.input, f(4, 6, 1, 2, 2), f(6, 2, 1, 2, 2), None, [1, 1, 1], [0, 0, 0], [0, 0, 0],
     6),
    (aten.group_norm.default, f(4, 12, 3), 6, f(12), f(12)),
    (aten.batch_norm.default, f(4, 6, 3), f(6), f(6), n(6), n(6), False, 0.1, 1e-5, False),
    (aten.batch_norm.default, f(4, 6, 3), f(6), f(6), None, None, True, 0.1, 1e-5, False),
    (aten.layer_norm.default, f(4, 5, 6), [6], f(6), f(6)),
    (aten.rms_norm.default, f(4, 5, 6), [6], f(6)),
    (aten.rms_norm.default, f(4, 6), [6]),
    (aten.native_layer_norm.default, f(4, 6), [6], f(6), f(6), 1e-5),
    (aten.max_pool1d.default, f(4, 6, 4), [2]),
    (aten.avg_pool1d.default, f(4, 6, 4), [2]),
    (aten.adaptive_avg_pool1d.default, f(4, 6, 4), [2]),
    (aten.adaptive_max_pool1d.default, f(4, 6, 4), [2]),
    (aten.max_pool2d.default, f(4, 6, 4, 4), [2, 2]),
    (aten.avg_pool2d.default, f(4, 6, 4, 4), [2, 2]),
    (aten.adaptive_avg_pool2d.default, f(4, 6, 4, 4), [1, 2]),
    (aten.adaptive_max_pool2d.default, f(4, 6, 4, 4), [1, 2]),
    (aten.max_pool3d.default, f(4, 6, 2, 2, 2), [2, 2, 2]),
    (aten.avg_pool3d.default, f(4, 6, 2, 2, 2), [2, 2, 2]),
    (aten.adaptive_avg_pool3d.default, f(4, 6, 2, 2, 2), [1, 1, 1]),
    (aten.adaptive_max_pool3d.default, f(4, 6, 2, 2, 2), [1, 1, 1]),
    (aten.upsample_nearest2d.vec, f(4, 6, 2, 2), None, [2.0, 2.0]),
    (aten.upsample_bilinear2d.vec, f(4, 6, 2, 2), None, False, [2.0, 2.0]),
    (aten.upsample_bicubic2d.vec, f(4, 6, 2, 2), None, False, [2.0, 2.0]),
    (aten.reflection_pad2d.default, f(4, 6, 3, 3), [1, 1, 1, 1]),
    (aten.replication_pad2d.default, f(4, 6, 3, 3), [1, 1, 1, 1]),
    (aten.pixel_shuffle.default, f(6, 4, 2, 2), 2),
    (aten.pixel_unshuffle.default, f(6, 1, 4, 4), 2),
    (aten.tril.default, f(6, 4, 4)),
    (aten.triu.default, f(6, 4, 4), 1),
    (aten.linalg_cholesky.default, Draw("definite", (6, 3, 3))),
    (aten.linalg_inv.default, Draw("definite", (6, 3, 3))),
    (aten.linalg_qr.default, f(6, 3, 3)),
    (aten.linalg_eigh.default, Draw("definite", (6, 3, 3))),
    (aten.linalg_slogdet.default, f(6, 3, 3)),
    (aten.linalg_det.default, f(6, 3, 3)),
    (aten.linalg_matrix_exp.default, f(6, 3, 3)),
    (aten.linalg_cholesky_ex.default, Draw("definite", (6, 3, 3))),
    (aten.linalg_inv_ex.default, Draw("definite", (6, 3, 3))),
    (aten._linalg_eigh.default, Draw("definite", (6, 3, 3))),
    (aten._linalg_slogdet.default, f(6, 3, 3)),
    (aten._linalg_det.default, f(6, 3, 3)),
]  # fmt: skip

_ALONG_DIMS = [
    (aten.sum.default, f(4, 6)),
    (aten.sum.dim_IntList, f(4, 5, 6), [1]),
    (aten.sum.dim_IntList, f(4, 5, 6), [0, -1], True),
    (aten.sum.dim_IntList, i(9, 5, 4), [0]),
    (aten.mean.default, f(5, 6)),
    (aten.mean.dim, f(4, 5, 6), [-1], True),
    (aten.mean.dim, f(4, 5, 6), [0, 1]),
    (aten.amax.default, f(4, 5, 6), [1]),
    (aten.amax.default, f(4, 6), [0, 1], True),
    (aten.amax.default, i(9, 5, 6), [0]),
    (aten.amax.default, t(4, 6), [1]),
    (aten.amin.default, t(4, 6), [1]),
    (aten.max.default, t(4, 6)),
    (aten.min.default, t(4, 6)),
    (aten.linalg_vector_norm.default, t(4, 6), float("inf"), [1]),
    (aten.max.default, f(4, 6)),
    (aten.any.default, b(4, 6)),
    (aten.any.dim, b(5, 6), 0),
    (aten.any.dim, i(1, 5, 6), 0),  # all zeros: padding that is not zero would make it true
    (aten.any.default, i(1, 5, 6)),
    (aten.all.default, b(4, 6)),
    (aten.all.dim, b(4, 6), 1, True),
    (aten.logsumexp.default, f(4, 5, 6), [1]),
    (aten.logsumexp.default, f(4, 6), [1], True),
    (aten.amin.default, f(4, 5), [0]),
    (aten.min.default, f(4, 6)),
    (aten.prod.default, f(4, 6)),
    (aten.prod.dim_int, f(4, 6), 1),
    (aten.argmax.default, f(4, 5, 6), 1),
    (aten.argmax.default, f(4, 5)),
    (aten.argmin.default, f(4, 6), -1, True),
    (aten.var.correction, f(4, 5, 6), [1]),
    (aten.std.correction, f(4, 6), [0, 1], {"correction": 0}),
    (aten.var.dim, f(4, 6), [1], False),
    (aten.std.dim, f(4, 6), [0]),
    (aten.var_mean.correction, f(4, 6), [1]),
    (aten.max.dim, f(4, 5, 6), 1),
    (aten.min.dim, f(4, 6), -1, True),
    (aten.median.dim, f(4, 5), 1),
    (aten.linalg_vector_norm.default, f(4, 6), 2, [1], True),
    (aten.linalg_vector_norm.default, f(4, 6), 1),
    (aten.linalg_vector_norm.default, f(4, 6), float("inf"), [0]),
    (aten.count_nonzero.dim_IntList, i(2, 4, 6), [1]),
    (aten.softmax.int, f(4, 5, 6), 1),
    (aten.log_softmax.int, f(4, 5, 6), -1),
    (aten._softmax.default, f(4, 6), 1, False),
    (aten._log_softmax.default, f(4, 6), 0, False),
    (aten.cumsum.default, f(4, 6), 1),
    (aten.cumsum.default, i(4, 5, 4), 0),
    (aten.cumprod.default, f(4, 6), 1),
    (aten.cummax.default, f(4, 6), 1),
    (aten.logcumsumexp.default, f(4, 6), 1),
    (aten.flip.default, f(4, 5, 6), [0, 2]),
    (aten.roll.default, f(4, 6), [1], [1]),
    (aten.roll.default, f(4, 6), [1]),
    (aten.sort.default, f(4, 6)),
    (aten.sort.stable, f(4, 6), {"stable": True, "dim": 0}),
    (aten.argsort.default, f(4, 6)),
    (aten.topk.default, f(4, 6), 2),
    (aten.kthvalue.default, f(4, 5, 6), 2, 1),
    (aten.glu.default, f(4, 6), 1),
]

_LOSSES = [
    *(
        (getattr(aten, n).default, f(4, 6), f(4, 6), reduction)
        for n in ("mse_loss", "l1_loss", "smooth_l1_loss")
        for reduction in range(3)
    ),
    (aten.huber_loss.default, f(4, 6), f(4, 6), 1, 0.5),
    (aten.kl_div.default, f(4, 6), pos(4, 6), 2),
    (aten.soft_margin_loss.default, f(4, 6), n(4, 6)),
    (aten.poisson_nll_loss.default, f(4, 6), pos(4, 6), True, False, 1e-8, 1),
    (aten.binary_cross_entropy.default, u(4, 6), u(4, 6), n(6)),
    (aten.binary_cross_entropy_with_logits.default, f(4, 6), u(4, 6), None, n(6)),
    *(
        (aten.cross_entropy_loss.default, f(6, 12), i(12, 6), None, r, 3, s)
        for r in range(3)
        for s in (0.0, 0.1)
    ),
    (aten.cross_entropy_loss.default, f(4, 6, 5), i(6, 4, 5)),
    (aten.cross_entropy_loss.default, f(6), i(6)),
    (aten.cross_entropy_loss.default, f(4, 6), i(6, 4), n(6)),
    (aten.cross_entropy_loss.default, f(4, 6), u(4, 6), None, 0),
    (aten.nll_loss.default, f(4, 6), i(6, 4), None, 1, -100),
    (aten.nll_loss_nd.default, f(4, 6, 5), i(6, 4, 5), None, 0, 2),
    (own.token_parts.default, f(6, 4), f(12, 4), i(12, 6), 2, 1),
    (own.token_parts.default, f(6, 4), f(5, 4), i(5, 6), 0, 1),
    (own.token_parts.default, f(6, 4), f(12, 4), i(12, 6), 4, 6),
]  # fmt: skip

_VIEWS = [
    (aten.view.default, f(4, 6, 5), [24, 5]),
    (aten.view.default, f(4, 12), [4, 6, 2]),
    (aten.view.default, f(4, 6), [2, 2, 2, 3]),
    (aten.view.default, f(5, 4), [20]),
    (aten.reshape.default, f(4, 6), [6, 4]),
    (aten._unsafe_view.default, f(4, 6), [24]),
    (aten.flatten.using_ints, f(4, 5, 6), 0, 1),
    (aten.unflatten.int, f(4, 12), 1, [6, 2]),
    (aten.squeeze.default, f(4, 2, 1, 6)),
    (aten.squeeze.dim, f(2, 6), 0),
    (aten.squeeze.dim, f(1, 6), 0),
    (aten.squeeze.dims, f(2, 1, 6), [0, 1]),
    (aten.unsqueeze.default, f(4, 6), -1),
    (aten.transpose.int, f(4, 5, 6), 0, -1),
    (aten.swapaxes.default, f(4, 6), 0, 1),
    (aten.swapdims.default, f(4, 6), 0, 1),
    (aten.t.default, f(4, 6)),
    (aten.numpy_T.default, f(4, 5, 6)),
    (aten.mT.default, f(4, 5, 6)),
    (aten.mH.default, c(4, 5, 6)),
    (aten.permute.default, f(4, 5, 6), [2, 0, -2]),
    (aten.view_as_real.default, c(4, 6)),
    (aten.view_as_complex.default, f(4, 6, 2)),
    (aten.diagonal.default, f(4, 5, 6), 0, 0, 2),
    (aten.unfold.default, f(4, 6), 1, 3, 2),
    (aten.expand.default, f(4, 1, 6), [2, 4, 5, -1]),
    (aten.broadcast_to.default, f(6), [4, 6]),
    (aten.repeat.default, f(4, 6), [2, 3, 1]),
    (aten.repeat_interleave.self_int, f(4, 6), 2, 1),
    (aten.repeat_interleave.self_int, f(5), 2),
    (aten.repeat_interleave.self_int, f(4, 6), 2),
    (aten.slice.Tensor, f(4, 12), 1, 0, 6),
    (aten.slice.Tensor, f(4, 12), 1, 6, 12),
    (aten.slice.Tensor, f(4, 6), 1, 0, 5),
    (aten.slice.Tensor, f(4, 6), 1, 1),
    (aten.slice.Tensor, f(4, 6), 0, 0, 4),
    (aten.slice.Tensor, f(4, 6), 1, -4, -1),
    (aten.slice.Tensor, f(4, 6), 1, 1, 6, 2),
    (aten.narrow.default, f(4, 12), 1, 6, 6),
    (aten.select.int, f(4, 6), 1, -1),
    (aten.select.int, f(5, 12), 0, 2),
    (aten.select.int, b(4, 6), 0, 1),
    (aten.split.Tensor, f(4, 12), 6, 1),
    (aten.split_with_sizes.default, f(4, 12), [6, 3, 3], 1),
    (aten.split.sizes, f(6, 4), [2, 4]),
    (aten.chunk.default, f(4, 12), 2, 1),
    (aten.chunk.default, f(4, 12), 3, -1),
    (aten.unbind.int, f(2, 6, 4)),
    (aten.cat.default, [f(4, 6), f(4, 6)], 1),
    (aten.cat.default, [f(4, 6), f(2, 6)]),
    (aten.cat.default, [f(0), f(4, 6)], 1),
    (aten.stack.default, [f(4, 6), f(4, 6)], 1),
    (aten.constant_pad_nd.default, f(4, 5, 6), [1, 2]),
    (aten.pad.default, f(4, 6, 5), [1, 1], "reflect"),
    (aten.pad.default, f(4, 6), [0, 0, 1, 0], "constant", 2.0),
    (aten.slice_scatter.default, f(4, 6), f(4, 3), 1, 0, 3),
    (aten.select_scatter.default, f(4, 6), f(6), 0, 1),
]

_LOOKUPS = [
    (aten.embedding.default, f(12, 6), i(12, 4, 5)),
    (aten.embedding.default, f(12, 6), i(12, 4), 3),
    (aten.embedding.default, f(5, 4), i(5, 6)),
    (aten.embedding.default, f(6, 4), i(6, 4), -1, True),
    (aten.gather.default, f(4, 6), 1, i(6, 4, 3)),
    (aten.gather.default, f(5, 6), 0, i(5, 4, 6)),
    (aten.gather.default, b(4, 6), 1, i(6, 4, 6)),
    (aten.take_along_dim.default, f(4, 6), i(6, 4, 2), 1),
    (aten.index_select.default, f(4, 6, 5), 1, i(6, 4)),
    (aten.index_select.default, f(5), 0, i(5, 6)),
    (aten.index.Tensor, f(4, 6, 5), [None, i(6, 4)]),
    (aten.index.Tensor, f(4, 6, 5), [i(4, 6), i(6, 6)]),
    (aten.index.Tensor, f(4, 6, 4), [i(4, 6, 1), None, i(4, 2)]),
    (aten.index.Tensor, f(5, 6), [i(5, 4, 2)]),
    (aten.scatter.src, f(4, 6), 1, i(6, 4, 1), f(4, 1)),
    (aten.scatter.src, f(4, 6), 1, i(6, 4, 6), f(4, 6)),
    (aten.scatter.value, f(4, 6), 1, i(6, 4, 2), 2.0),
    (aten.scatter_add.default, f(4, 6), 1, i(6, 4, 6), f(4, 6)),
    (aten.scatter_reduce.two, f(4, 6), 1, i(6, 4, 6), f(4, 6), "sum"),
    (aten.scatter.reduce, n(4, 6), 1, i(6, 4, 1), n(4, 1), {"reduce": "add"}),
    (aten.scatter.value_reduce, n(4, 6), 1, i(6, 4, 1), 2.0, {"reduce": "add"}),
    (aten.index_add.default, f(4, 6), 1, i(6, 3), f(4, 3)),
    (aten.index_copy.default, f(4, 6), 1, p(6, 3), f(4, 3)),
    (aten.index_fill.int_Scalar, f(4, 6), 1, i(6, 3), 2.0),
    (aten.index_put.default, f(4, 6), [p(4, 3)], f(3, 6)),
    (aten.index_put.default, f(4, 6), [p(4, 3)], f(6), True),
    (aten.index_put.default, f(4, 5, 6), [p(4, 3), p(5, 3)], f(3, 1)),
    (aten.index_put.default, f(4, 6), [b(4, 6)], f()),
    (aten.index_put.default, f(4, 5, 6), [b(4, 5)], f(1)),
    (aten.index_put.default, f(4, 5, 6), [b(4, 5)], f(1, 6)),
    (aten.index_put.default, f(4, 5, 6), [b(4)], f(5, 6), True),
    (aten.index_put.default, f(4, 5, 6), [b(4, 5)], f(6)),
]

_DRAWS = [
    (own.dropout.default, f(4, 6, 5), KEY, 0.4),
    (own.dropout.default, f(4, 6, 5), KEY, 0.4, [60, 10, 1]),
    (own.feature_dropout.default, f(4, 6, 5), KEY, 0.4),
    (own.alpha_dropout.default, f(4, 6, 5), KEY, 0.4, False),
    (own.alpha_dropout.default, f(4, 6, 5), KEY, 0.4, True),
    (own.bernoulli.default, u(6, 1), KEY, [4, 6, 5], f64),
    (own.uniform.default, KEY, [4, 6], f64),
]

# Composite ops without a rule: by torch's own definition.
_COMPOSITE = [
    (aten.movedim.int, f(4, 5, 6), 0, 2),
    (aten.tensordot.default, f(4, 6), f(6, 5), [1], [0]),
    (aten.tile.default, f(4, 6), [2, 1]),
    (aten.hsplit.int, f(4, 6), 2),
    (aten.cosine_similarity.default, f(4, 6), f(4, 6)),
    (aten.softplus.default, f(4, 6)),
    (aten.kron.default, f(4, 6), f(2, 3)),
]


@cache
def cases() -> list[Case]:
    groups = (
        _POINTWISE,
        _PRODUCTS,
        _LAYERS,
        _ALONG_DIMS,
        _LOSSES,
        _VIEWS,
        _LOOKUPS,
        _DRAWS,
        _COMPOSITE,
    )
    return [case(*row) for group in groups for row in group]


def case(op: Any, *args: Any) -> Case:
    """Make a case of a row, in which keywords come last, as a dict."""
    kwargs = args[-1] if args and isinstance(args[-1], dict) else {}
    return Case(op, args[: len(args) - bool(kwargs)], kwargs)
