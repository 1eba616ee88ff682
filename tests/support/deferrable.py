"""Modules for `fs.deferred`: each does to its leaves what constructors of a kind do."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Gpt(nn.Module):
    """As nanoGPT: `apply(_init)`, a tied head, residual projections scaled by depth; it prints its size."""

    def __init__(self, layers: int = 3, width: int = 20, *, by_data: bool = False, tied: bool = True):
        super().__init__()
        self.by_data = by_data
        self.wte = nn.Embedding(33, width)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, 2 * width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 33, bias=False)
        if tied:
            self.head.weight = self.wte.weight
        self.apply(self._init)
        for name, leaf in self.named_parameters():
            if name.endswith("linear2.weight"):
                nn.init.normal_(leaf, std=0.02 / math.sqrt(2 * layers))

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            if self.by_data:
                module.weight.data.normal_(mean=0.0, std=0.02)
            else:
                nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class Scaled(Gpt):
    """Depth-scaled in place, at the very end, when each leaf has long been drawn."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        with torch.no_grad():
            for depth, block in enumerate(self.blocks):
                block.linear1.weight *= 1 / math.sqrt(depth + 1)
                block.linear2.weight.div_(depth + 2)
                block.self_attn.in_proj_weight.data = block.self_attn.in_proj_weight.data * 0.5


class Vit(nn.Module):
    """As timm's: truncated normals, a class token, a rate by depth that Python reads."""

    def __init__(self, depth: int = 2, width: int = 16):
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, depth)]
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(width, 2, 32, rate) for rate in self.rates))
        nn.init.trunc_normal_(self.position, std=0.02)
        nn.init.normal_(self.token, std=1e-6)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02, a=-0.03, b=0.5)
        weight = self.patch.weight.data
        nn.init.xavier_uniform_(weight.view([weight.shape[0], -1]))


class Tables(nn.Module):
    """Buffers computed from others: rotary and sinusoidal tables, a mask, relative positions; a plain one."""

    def __init__(self, length: int = 11, width: int = 8):
        super().__init__()
        self.register_buffer("inverse", 1 / 10000 ** (torch.arange(0, width, 2).float() / width))
        angles = torch.outer(torch.arange(length), self.inverse)  # [T, D / 2]
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos(), persistent=False)
        self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool).tril())
        self.turns = torch.polar(torch.ones_like(angles), angles)
        table = torch.zeros(length, width)
        position = torch.arange(length).unsqueeze(1)
        table[:, 0::2] = torch.sin(position * self.inverse)
        table[:, 1::2] = torch.cos(position * self.inverse)
        table[0] = 1.0
        self.register_buffer("table", table[None])
        places = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij")).flatten(1)
        relative = (places[:, :, None] - places[:, None, :]).permute(1, 2, 0).contiguous()
        relative[:, :, 0] += 2
        relative[:, :, 0] *= 5
        self.register_buffer("relative", relative.sum(-1))
        self.bias = nn.Parameter(torch.tensor([1.0, 2.0]) + self.bias_of(torch.randn(2)))
        self.logits = nn.Parameter(self.table[0, :3].clone().softmax(-1))

    def bias_of(self, noise: Tensor) -> Tensor:
        return torch.where(noise > 0, noise, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * self.turns).flatten(-2)
        return (turned + self.table + self.cos).sum(-1) * self.bias.sum() * self.logits.sum()


class Nested(nn.Module):
    """Layers copied from one, a module used twice, leaves that are views, drawn by parts, of other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
        self.shared = nn.ModuleList([nn.Linear(4, 4)] * 2)
        self.copied = copy.deepcopy(self.shared[0])
        self.recurrent = nn.LSTM(3, 4)
        self.fused = nn.Parameter(torch.empty(12, 5))
        with torch.no_grad():
            for i, part in enumerate(self.fused.chunk(3)):
                part.normal_(std=i + 1)
            self.copied.weight[1:3].fill_(0.5)
        self.window = nn.Parameter(torch.randn(6)[1:5])
        self.turned = nn.Parameter(self.recurrent.weight_ih_l0.detach().t())
        self.low = nn.Linear(3, 3).to(torch.bfloat16)
        self.double = nn.Linear(3, 3, dtype=torch.float64)
        self.padded = nn.Embedding(5, 3, padding_idx=1)
        self.scale = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
        self.small = nn.ParameterList(torch.randn(size) for size in (1, 2, 15, 16, 17, 31))


class Orthogonal(nn.Module):
    """QR, sparse, identity, Dirac and spectrally normed."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.tall, self.sparse = nn.Linear(7, 4), nn.Linear(4, 9), nn.Linear(6, 6)
        self.conv, self.same = nn.Conv1d(4, 4, 3), nn.Linear(5, 5)
        nn.init.orthogonal_(self.wide.weight, gain=2.0)
        nn.init.orthogonal_(self.tall.weight)
        nn.init.sparse_(self.sparse.weight, 0.5)
        nn.init.dirac_(self.conv.weight)
        nn.init.eye_(self.same.weight)
        self.product = nn.Parameter(torch.linalg.matrix_exp(torch.randn(3, 3)) @ torch.randn(3, 3))
        self.unit = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))


class Streams(nn.Module):
    """Generators of its own, seeds, and states saved and restored."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(5)
        self.own = nn.Parameter(torch.randn(20, generator=own))
        self.first = nn.Parameter(torch.randn(5))
        self.own_again = nn.Parameter(torch.empty(7).normal_(generator=own))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            self.aside = nn.Parameter(torch.rand(3))
        state = torch.get_rng_state()
        self.before = nn.Parameter(torch.randn(18))
        torch.set_rng_state(state)
        self.equal = nn.Parameter(torch.randn(18))
        coins = torch.bernoulli(torch.rand(4))
        self.drawn = nn.Parameter(torch.normal(torch.randn(4), torch.rand(4)) + coins)
        torch.manual_seed(9)
        self.last = nn.Parameter(torch.randn(20))


class Talks(nn.Module):
    """It prints: shapes, numbers that no seed changes, a whole leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        print(f"{self.layer.weight.shape} on {self.layer.weight.device}, {self.layer.weight.is_meta}")
        print(f"{sum(p.numel() for p in self.parameters())} parameters, {self.layer}")
        steps = torch.linspace(0, 1, 3)
        print(steps, f"{steps.mean():.2f}", steps.tolist(), steps.numpy()[1], bool((steps > 0).any()))
        self.scales = nn.ParameterList(nn.Parameter(torch.full((2,), float(step))) for step in steps)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "apply": lambda: Gpt(tied=False),
    "data": lambda: Gpt(tied=False, by_data=True),
    "tied": Gpt,
    "depth": Scaled,
    "vit": Vit,
    "buffers": Tables,
    "nested": Nested,
    "orthogonal": Orthogonal,
    "streams": Streams,
    "prints": Talks,
}
