"""Ops under slopes of slopes, slopes by vmap and tangents: gradients are those of plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from toys import assert_same_grads

D = torch.float64
LABELS = torch.tensor([0, 2, 1, 3, 0, 1])
ZEROS, ONES = torch.zeros(4, dtype=D), torch.ones(4, dtype=D)

# z: [6, 4], a batch; w: [4, 4], a leaf
OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "attention": lambda z, w: F.scaled_dot_product_attention(*[z.view(1, 2, 3, 4) @ w] * 3, is_causal=True),
    "layer_norm": lambda z, w: F.layer_norm(z @ w, (4,), w[0], w[1]),
    "rms_norm": lambda z, w: F.rms_norm(z @ w, (4,), w[0]),
    "group_norm": lambda z, w: F.group_norm((z @ w).view(1, 4, 6), 2, w[0], w[1]),
    "batch_norm": lambda z, w: F.batch_norm(z @ w, None, None, w[0], w[1], training=True),
    "batch_norm_eval": lambda z, w: F.batch_norm(z @ w, ZEROS, ONES, w[0], w[1]),
    "conv": lambda z, w: F.conv2d(z.view(1, 1, 4, 6), w.view(1, 1, 4, 4), padding=1),
    "conv_transpose": lambda z, w: F.conv_transpose2d(z.view(1, 1, 4, 6), w.view(1, 1, 4, 4), stride=2),
    "max_pool": lambda z, w: F.max_pool2d((z @ w).view(1, 1, 4, 6), 2),
    "interpolate": lambda z, w: F.interpolate((z @ w).view(1, 1, 4, 6), scale_factor=2, mode="bilinear"),
    "pad": lambda z, w: F.pad((z @ w).view(1, 4, 6), (1, 1), mode="reflect"),
    "embedding": lambda z, w: F.embedding(LABELS, w) * z,
    "cross_entropy": lambda z, w: F.cross_entropy(z @ w, LABELS, label_smoothing=0.1),
    "einsum": lambda z, w: torch.einsum("ij,jk,lk->il", z, w, z),
    "cumsum": lambda z, w: (z @ w).cumsum(0),
    "logsumexp": lambda z, w: (z @ w).logsumexp(-1),
    "silu": lambda z, w: F.silu(z @ w),
    "gelu": lambda z, w: F.gelu(z @ w),
    "softplus": lambda z, w: F.softplus(z @ w),
    "prelu": lambda z, w: F.prelu(z @ w, w[0]) * z,
    "norm": lambda z, w: (z @ w).norm(dim=-1),
    "sort": lambda z, w: (z @ w).sort(-1)[0] ** 3,
    "index_add": lambda z, w: torch.zeros_like(z).index_add(0, LABELS, (z @ w).tanh()),
    "solve": lambda z, w: torch.linalg.solve(w + 3 * torch.eye(4, dtype=D), z.T),
    "rfft": lambda z, w: torch.fft.rfft(z @ w).abs(),
}


LIKE_ANOTHER = {  # differentiated by formulas of the same kind as one that is run
    "rms_norm", "batch_norm_eval", "conv_transpose", "pad", "einsum", "cumsum", "logsumexp", "silu",
    "softplus", "norm",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n in LIKE_ANOTHER)) for n in OPS]
)
def test_gradients_of_derivatives_are_those_of_plain_torch(name: str) -> None:
    numbers = torch.Generator().manual_seed(0)
    params = {"layers.0.w": torch.randn(4, 4, dtype=D, generator=numbers) / 2}

    def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        def f(z: Tensor) -> Tensor:
            return OPS[name](z, p["layers.0.w"]).sin().sum()

        twice = grad(lambda z: grad(f)(z).square().sum())(x)
        each = vmap(grad(f))(torch.stack([x, x.cos()]))
        return twice.square().mean() + each.square().mean() + jvp(f, (x,), (x.cos(),))[1]

    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        assert_same_grads(fn, params, torch.randn(6, 4, dtype=D, generator=numbers), rtol=1e-10, atol=1e-10)
