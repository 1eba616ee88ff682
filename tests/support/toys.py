"""Small programs for tests of structure: a chain of weights, a Llama-like decoder; lowering them on paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fnshard as fs
from fnshard.step.lowered import Lowered

WIDTH = 8
ROWS = 4


def chain(blocks: int = 4, width: int = WIDTH) -> dict[str, Tensor]:
    """Make `{layers.i.w: [width, width]}`, each a unit."""
    draw = torch.Generator().manual_seed(0)
    return {f"layers.{i}.w": torch.randn(width, width, generator=draw) / width**0.5 for i in range(blocks)}


def rows(width: int = WIDTH) -> Tensor:
    """Draw a batch [ROWS, width]."""
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(1))


def run_chain(
    params: Mapping[str, Tensor], x: Tensor, between: Callable[..., Tensor] | None = None
) -> Tensor:
    """Compute tanh(x @ w) through all blocks, in the dtype of each leaf, with `between(x, i)` after each."""
    for i, weight in enumerate(params.values()):
        x = torch.tanh(x.to(weight.dtype) @ weight)
        x = between(x, i) if between else x
    return x


def plain_grads(
    fn: Callable[..., Any], params: Mapping[str, Tensor], *batch: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss and gradients by torch's own autograd."""
    leaves = {p: v.detach().clone().requires_grad_(v.is_floating_point()) for p, v in params.items()}
    result = fn(dict(leaves), *batch)
    loss = result[0] if isinstance(result, tuple) else result
    trained = {p: v for p, v in leaves.items() if v.requires_grad}
    grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    zeros = {p: torch.zeros_like(v) for p, v in trained.items()}
    return loss.detach(), {p: zeros[p] if g is None else g for p, g in zip(trained, grads, strict=True)}


def step_of(fn: Callable[..., Any], params: Any, **options: Any) -> Any:
    """Make a step on a mesh of one, eager unless `options` say otherwise; every parameter is a unit."""
    specs = fs.match_specs(params, [("*", fs.LayoutSpec())])
    return fs.shard_step(fn, specs, **{"backend": "eager", **options})


@contextmanager
def traces(step: Any, times: int) -> Iterator[None]:
    """Assert that in the block the step traces `fn` so many times."""
    before = step.compile_stats.traces
    yield
    assert step.compile_stats.traces - before == times


def our_grads(
    fn: Callable[..., Any], params: Mapping[str, Tensor], *batch: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss and gradients by `shard_step` on a mesh of one."""
    result, grads = step_of(fn, params)(dict(params), *batch)
    return (result[0] if isinstance(result, tuple) else result), grads


def assert_same_grads(
    fn: Callable[..., Any], params: Mapping[str, Tensor], *batch: Any, **tolerance: Any
) -> None:
    """Assert that `our_grads` equals `plain_grads`; `tolerance` is that of `assert_close`."""
    expected = plain_grads(fn, params, *batch)
    torch.testing.assert_close(our_grads(fn, params, *batch), expected, **tolerance)


def lower(
    fn: Callable[..., Any],
    params: Mapping[str, Tensor],
    *batch: Any,
    ranks: int | dict[str, int] = 8,
    preset: str = "full_shard",
    policy: Mapping[str, Any] | None = None,
    device: str = "cpu",
    **options: Any,
) -> Lowered:
    """Lower a step on an abstract mesh."""
    axes = {"shard": ranks} if isinstance(ranks, int) else ranks
    mesh = fs.make_mesh(**axes, abstract=True, device=device)
    specs = fs.presets.PRESETS[preset](params, mesh, **(policy or {}))
    options = {"optimizer": fs.optim.adamw(1e-3), "backend": "eager", **options}
    return fs.shard_step(fn, specs, mesh=mesh, **options).lower(params, *batch)


class RMSNorm(nn.Module):
    """An RMS norm, written by hand in fp32, as Llama's is, or by `F.rms_norm`."""

    def __init__(self, width: int, by_hand: bool):
        super().__init__()
        self.weight, self.by_hand = nn.Parameter(torch.ones(width)), by_hand

    def forward(self, x: Tensor) -> Tensor:
        if not self.by_hand:
            return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Block(nn.Module):
    """A block of pre-norm attention (grouped queries, rotary) and SwiGLU."""

    def __init__(self, width: int, hidden: int, heads: int, kv_heads: int, by_hand: bool):
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, width // heads
        self.norm1, self.norm2 = RMSNorm(width, by_hand), RMSNorm(width, by_hand)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.head, bias=False)
        self.v = nn.Linear(width, kv_heads * self.head, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        b, t, d = x.shape
        y = self.norm1(x)
        q, k, v = (
            p(y).view(b, t, n, self.head).transpose(1, 2)
            for p, n in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )  # [B, H, T, D/H]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, d))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate by position (rotary embedding), [B, H, T, D/H]."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Llama(nn.Module):
    """A decoder. `masked`: an explicit sliding-window mask, built once at the top."""

    def __init__(
        self,
        blocks: int = 4,
        width: int = 16,
        hidden: int = 32,
        heads: int = 4,
        kv_heads: int = 2,
        vocab: int = 64,
        *,
        by_hand: bool = True,
        masked: bool = False,
    ):
        super().__init__()
        self.masked, head = masked, width // heads
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width, hidden, heads, kv_heads, by_hand) for _ in range(blocks))
        self.norm = RMSNorm(width, by_hand)
        self.head = nn.Linear(width, vocab, bias=False)
        self.register_buffer("frequencies", 10000.0 ** (-torch.arange(0, head, 2).float() / head))

    def forward(self, tokens: Tensor) -> Tensor:
        t = tokens.shape[1]
        position = torch.arange(t, device=tokens.device)
        angle = torch.outer(position.float(), self.frequencies).repeat(1, 2)  # [T, D/H]
        x = self.embed(tokens)  # [B, T, D]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        mask = None
        if self.masked:
            gap = position[:, None] - position[None]
            mask = (gap >= 0) & (gap < 3)
        for block in self.blocks():
            x = self.call(block, x, cos, sin, mask)
        return self.head(self.norm(x))  # [B, T, V]

    def blocks(self) -> list[nn.Module]:
        """Return the blocks in the order in which they are called."""
        return [*self.layers]

    def call(self, block: nn.Module, *args: Tensor | None) -> Tensor:
        return block(*args)


def llama(
    blocks: int = 4, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Callable[..., Any], Any, Tensor]:
    """Return `loss(params, tokens)`, parameters and tokens [2, 6] of a small Llama."""
    torch.manual_seed(0)
    model = Llama(blocks, **options)
    apply, params = fs.make_functional(model)
    tokens = torch.randint(0, 64, (2, 6), generator=torch.Generator().manual_seed(2))

    def loss(params: Any, tokens: Tensor) -> Tensor:
        logits = apply(params, tokens)[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    cast = {p: nn.Parameter(v.to(dtype)) if isinstance(v, nn.Parameter) else v for p, v in params.items()}
    return loss, cast, tokens
