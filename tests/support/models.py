"""Tiny models with awkward sizes, each a trap for some stage of the compiler: `MODELS[name]()`.

All in fp64 unless `dtype` says otherwise; a batch has ROWS rows, which 1, 2, 4 ranks times 1, 3
micro-batches divide; losses are means over rows, so any such cut of a batch gives the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from toys import Llama

from fnshard import Mean, make_functional

ROWS, TIME, WIDTH, HEADS, VOCAB, HIDDEN = 12, 5, 12, 2, 53, 19


@dataclass(frozen=True)
class Model:
    """A model: parameters (a flat dict), a loss over them, and `batch(seed) -> tuple` of tensors."""

    params: dict[str, Tensor]
    loss: Callable[..., Any]
    batch: Callable[[int], tuple[Tensor, ...]]
    frozen: tuple[str, ...] = ()

    def batches(self, steps: int) -> list[tuple[Tensor, ...]]:
        """Return the global batches of the first `steps` steps."""
        return [self.batch(seed) for seed in range(steps)]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(seed: int) -> tuple[Tensor, Tensor]:
    """Draw inputs and targets [ROWS, TIME]."""
    drawn = torch.randint(0, VOCAB, (ROWS, TIME + 1), generator=generator(seed))
    return drawn[:, :-1], drawn[:, 1:]


def vectors(seed: int) -> tuple[Tensor, Tensor]:
    """Draw inputs and targets [ROWS, WIDTH]."""
    made = generator(seed)
    return tuple(torch.randn(ROWS, WIDTH, generator=made, dtype=torch.float64) for _ in range(2))


def noise(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    made = generator(seed)
    return {p: torch.randn(s, generator=made, dtype=torch.float64) * 0.3 for p, s in shapes.items()}


def seeded(make: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make(*args, **kwargs).double()


# ------------------------------------------------------------------ decoders


class GPT(Llama):
    """A GPT; `loops` passes over the same blocks, `remat` wraps each in non-reentrant checkpointing."""

    def __init__(
        self, layers: int = 2, tied: bool = False, loops: int = 1, remat: bool = False, dropout: float = 0.0
    ):
        super().__init__(layers, WIDTH, HIDDEN, HEADS, 1, VOCAB, by_hand=False)
        if tied:
            self.head.weight = self.embed.weight
        self.loops, self.remat, self.dropout = loops, remat, nn.Dropout(dropout)

    def blocks(self) -> list[nn.Module]:
        return [*self.layers] * self.loops

    def call(self, block: nn.Module, *args: Tensor | None) -> Tensor:
        return self.dropout(checkpoint(block, *args, use_reentrant=False) if self.remat else block(*args))


def next_token(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def language_model(module: nn.Module, frozen: tuple[str, ...] = ()) -> Model:
    apply, params = make_functional(module)
    buffers = tuple(p for p, v in params.items() if isinstance(v, nn.Buffer))
    return Model(
        params,
        lambda params, ids, targets: next_token(apply(params, ids), targets),
        tokens,
        (*frozen, *buffers),
    )


def gpt(**kwargs: Any) -> Model:
    return language_model(seeded(GPT, **kwargs))


def frozen_gpt() -> Model:
    """Make a GPT in which the embedding, and all of one block but its norms, is frozen."""
    module = seeded(GPT)
    names = [
        p
        for p, _ in module.named_parameters()
        if p == "embed.weight" or (p[:9] == "layers.0." and "norm" not in p)
    ]
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return language_model(module, tuple(names))


# ------------------------------------------------------------------ other shapes of program


class UNet(nn.Module):
    """A UNet: strided convolutions down, and skips that are kept until the way up."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([nn.Conv1d(1, 5, 3, padding=1), nn.Conv1d(5, 7, 3, 2, padding=1)])
        self.middle = nn.Sequential(nn.GroupNorm(1, 7), nn.Conv1d(7, 7, 1), nn.SiLU())
        self.up = nn.ModuleList([nn.ConvTranspose1d(14, 5, 2, 2), nn.Conv1d(10, 1, 3, padding=1)])

    def forward(self, x: Tensor) -> Tensor:  # [B, WIDTH]
        first = F.gelu(self.down[0](x[:, None]))
        second = F.gelu(self.down[1](first))
        x = torch.cat([self.middle(second), second], 1)
        x = torch.cat([self.up[0](x), first], 1)
        return self.up[1](x)[:, 0]


def unet() -> Model:
    apply, params = make_functional(seeded(UNet))
    return Model(params, lambda p, x, y: F.mse_loss(apply(p, x), y), vectors)


def dense_skips() -> Model:
    """Make layers each of which reads the outputs of all before it, so that values cross several cuts."""
    params = noise({f"layers.{i}.w": (WIDTH * (i + 1), WIDTH) for i in range(4)})

    def loss(params, x, y):
        seen = [x]
        for w in params.values():
            seen.append(torch.tanh(torch.cat(seen, -1) @ w))
        return F.mse_loss(sum(seen), y)

    return Model(params, loss, vectors)


def odd_leaves() -> Model:
    """Make frozen, unused, int, bool, scalar and empty leaves, and some smaller than any mesh."""
    shapes = {"layers.0.w": (WIDTH, 3), "layers.0.unused": (5, 2), "layers.0.scale": (), "never": (7,),
              "layers.1.w": (3, WIDTH), "layers.1.bias": (1,), "layers.1.frozen": (WIDTH,),
              "layers.1.empty": (0, 4)}  # fmt: skip
    params = noise(shapes)
    params["layers.0.order"] = torch.randperm(WIDTH, generator=generator(3))
    params["layers.1.mask"] = torch.arange(3) != 1
    params["count"] = torch.tensor(3)

    def loss(params, x, y):
        h = x[:, params["layers.0.order"]] @ params["layers.0.w"] * params["layers.0.scale"]
        h = torch.where(params["layers.1.mask"], h, h.square())
        out = h @ params["layers.1.w"] * params["layers.1.frozen"] + params["layers.1.bias"] * params["count"]
        return F.mse_loss(out, y) + params["layers.1.empty"].sum()

    return Model(params, loss, vectors, ("layers.1.frozen",))


def early_and_late() -> Model:
    """Read leaves of one unit at both ends of the program, and another unit between."""
    params = noise(
        {"ends.0.first": (WIDTH, 7), "ends.0.last": (7, WIDTH), "mid.0.w": (7, 7), "mid.1.w": (7, 7)}
    )

    def loss(params, x, y):
        x = torch.tanh(x @ params["ends.0.first"])
        x = torch.tanh(x @ params["mid.0.w"])
        x = x + torch.tanh(x @ params["mid.1.w"])
        return F.mse_loss(x @ params["ends.0.last"] + x @ params["ends.0.first"].T, y)

    return Model(params, loss, vectors)


def penalty() -> Model:
    """Add an L2 penalty over all leaves, and the product of two units' norms."""
    base = gpt()

    def loss(params, ids, targets):
        floats = [v for v in params.values() if v.is_floating_point()]
        norms = params["layers.0.up.weight"].norm() * params["layers.1.up.weight"].norm()
        return base.loss(params, ids, targets) + 0.01 * sum(v.square().sum() for v in floats) + 0.01 * norms

    return Model(base.params, loss, tokens, base.frozen)


def islands() -> Model:
    """Make no_grad regions that span units, with detach, and gradients switched on again inside."""
    params = noise({f"layers.{i}.w": (WIDTH, WIDTH) for i in range(4)})

    def loss(params, x, y):
        w = list(params.values())
        with torch.no_grad():
            target = torch.tanh(torch.tanh(x @ w[0]) @ w[1]) + y
            with torch.enable_grad():
                x = x + torch.tanh(x @ w[1])
            target = target + torch.tanh(x @ w[2])
        h = torch.tanh(x @ w[0])
        h = h + torch.tanh(h.detach() @ w[2]) * torch.tanh(h @ w[1].detach())
        return F.mse_loss(h @ w[3], target)

    return Model(params, loss, vectors)


def detached_early() -> Model:
    """Complete a leaf's gradient long before its last use, where an early update would be seen."""
    params = noise({f"layers.{i}.w": (WIDTH, WIDTH) for i in range(3)})

    def loss(params, x, y):
        w = list(params.values())
        x = torch.tanh(x @ w[0])
        x = torch.tanh(x @ w[1].detach())
        x = torch.tanh(x @ w[2])
        return F.mse_loss(x @ w[1], y)

    return Model(params, loss, vectors)


def derived_weights() -> Model:
    """Make weights from leaves alone: casts at the top, weight norm, a sum and a cat over two units."""
    first = {"layers.0.v": (7, WIDTH), "layers.0.g": (7, 1)}
    params = noise({**first, "layers.1.w": (7, 7), "layers.2.w": (7, 7), "head.w": (WIDTH, 7)})

    def loss(params, x, y):
        params = {p: v.to(torch.float64) * 1.0 for p, v in params.items()}
        v = params["layers.0.v"]
        x = torch.tanh(x @ (params["layers.0.g"] * v / v.norm(dim=1, keepdim=True)).T)
        x = torch.tanh(x @ (params["layers.1.w"] + params["layers.2.w"].T))
        x = x @ torch.cat([params["layers.1.w"][:3], params["layers.2.w"][3:]])
        return F.mse_loss(F.linear(x, params["head.w"]), y)

    return Model(params, loss, vectors)


def several_outputs() -> Model:
    """Use ops with several results, views and in-place changes of activations around the cuts."""
    params = noise({f"layers.{i}.w": (WIDTH, WIDTH) for i in range(3)})

    def loss(params, x, y):
        w = list(params.values())
        x = x @ w[0]
        x[:, :5].relu_()
        left, right = x.split([5, WIDTH - 5], -1)
        x = torch.cat([right, left], -1) @ w[1]
        best, where = x.max(-1, keepdim=True)
        x = x - best * (where > 3)
        x[:, 0] = 0.0
        x.mul_(1.5)
        top = x.topk(3, -1).values.sum(-1, keepdim=True)
        return F.mse_loss(x.T.reshape(WIDTH, -1).T @ w[2] + top, y)

    return Model(params, loss, vectors)


def in_place() -> Model:
    """Write residuals and activations in place, under views and across units."""
    params = noise({f"layers.{i}.w": (WIDTH, WIDTH) for i in range(4)})

    def loss(params, x, y):
        w = list(params.values())
        h = x @ w[0]
        h += x
        h = F.relu(h, inplace=True)
        g = h @ w[1]
        g.mul_(1.5).add_(h).clamp_(-2.0, 2.0)
        x = torch.sin(g @ w[2]) @ w[3]
        x += g
        view = x[:, 3:7]
        view *= 2.0
        return F.mse_loss(x, y) + view.square().mean()

    return Model(params, loss, vectors)


def masked_mean() -> Model:
    """Return a Mean over unpadded items: row i of a batch counts i % TIME of its TIME items."""
    base = gpt()
    apply = make_functional(seeded(GPT))[0]

    def loss(params, ids, targets, mask):
        each = F.cross_entropy(apply(params, ids).flatten(0, 1), targets.flatten(), reduction="none")
        return Mean((each * mask.flatten()).sum(), mask.sum())

    def batch(seed: int):
        lengths = torch.randint(0, TIME, (ROWS,), generator=generator(seed + 100))
        lengths[: ROWS // 4] = 0  # the first of four ranks counts nothing
        return *tokens(seed), torch.arange(TIME) < lengths[:, None]

    return Model(base.params, loss, batch, base.frozen)


def complex_leaves() -> Model:
    """Use filters in the frequency domain (FNet, S4), of odd sizes, next to real leaves in one unit."""
    real = noise({f"layers.{i}.{n}": s for i in range(3) for n, s in {"bias": (WIDTH,), "gain": ()}.items()})
    shapes = {"filter": (7,), "mix": (7, 7), "phase": ()}
    made = noise({f"layers.{i}.{n}": (*s, 2) for i in range(3) for n, s in shapes.items()}, seed=1)
    params = {**real, **{p: torch.view_as_complex(v) for p, v in made.items()}}

    def loss(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        for i in range(3):
            bias, gain, filtered, mix, phase = (
                p[f"layers.{i}.{n}"] for n in ("bias", "gain", "filter", "mix", "phase")
            )
            x = x.to(bias.dtype)
            z = torch.fft.rfft(x) * filtered * torch.exp(1j * phase.real) + phase  # [B, 7]
            x = x + torch.tanh(torch.fft.irfft(z @ mix.mH, n=WIDTH) * gain + bias)
        return F.mse_loss(x, y.to(x.dtype))

    return Model(dict(sorted(params.items())), loss, vectors)


MODELS: dict[str, Callable[[], Model]] = {
    "gpt": gpt,
    "tied": lambda: gpt(tied=True),
    "frozen": frozen_gpt,
    "shared_blocks": lambda: gpt(loops=2),
    "checkpoint": lambda: gpt(remat=True),
    "unet": unet,
    "dense_skips": dense_skips,
    "odd_leaves": odd_leaves,
    "early_and_late": early_and_late,
    "penalty": penalty,
    "islands": islands,
    "detached_early": detached_early,
    "derived_weights": derived_weights,
    "several_outputs": several_outputs,
    "in_place": in_place,
    "masked_mean": masked_mean,
    "complex_leaves": complex_leaves,
}


@cache
def model_of(name: str) -> Model:
    """Return a model, one object in a process: what is traced of it is remembered (`kernels`)."""
    return MODELS[name]()
