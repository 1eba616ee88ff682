"""A mixture of experts on two ranks: `python -m experiments.examples.moe`.

Each token goes to two of eight experts, which see their own tokens alone: as many as chose them, and at most
`CAPACITY`. The loss has a term that keeps the load even (Switch Transformer). The task: which half of the
alphabet each letter is in, once it is shifted by the one before it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fnshard as fs

VOCAB, WIDTH, EXPERTS, CHOSEN, LENGTH, ROWS = 64, 32, 8, 2, 16, 8
CAPACITY = LENGTH * ROWS  # of one expert on one rank: all tokens, as no token chooses an expert twice


class Mixture(nn.Module):
    """A layer of top-k experts, which returns [tokens, WIDTH] and the load-balancing loss."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / (2 * WIDTH) ** 0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.router(x).softmax(-1)
        weights, chosen = shares.topk(CHOSEN)
        weights = weights / weights.sum(-1, keepdim=True)
        # Each expert computes the tokens that chose it, and adds its weighted results to the output.
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, place = torch.where(chosen == expert)
            token = fs.bounded(token, CAPACITY)  # a step that needs more is an error, not a dropped token
            rows = F.gelu(x[token] @ self.up[expert]) @ self.down[expert]
            out = out.index_add(0, token, rows * weights[token, place, None])
        # The loss is least when all experts have the same load.
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        return out, EXPERTS * (counts / counts.sum() * shares.mean(0)).sum()


class Model(nn.Module):
    """A model from tokens [batch, LENGTH] to logits [batch, LENGTH, 2] and the load-balancing loss."""

    def __init__(self, layers: int = 2):
        super().__init__()
        self.token = nn.Embedding(VOCAB, WIDTH)
        parts = [{"norm": nn.LayerNorm(WIDTH), "mixture": Mixture()} for _ in range(layers)]
        self.layers = nn.ModuleList(map(nn.ModuleDict, parts))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.token(tokens)
        x = x + x.roll(1, dims=1).flip(-1)  # each position sees the one before it
        balance = x.new_zeros(())
        for layer in self.layers:
            update, uneven = layer["mixture"](layer["norm"](x).flatten(0, 1))
            x, balance = x + update.view_as(x), balance + uneven
        return self.head(x), balance


def batch(step: int, part: int) -> tuple[Tensor, Tensor]:
    """Draw tokens and labels [ROWS, LENGTH] of one of the two parts of a batch."""
    generator = torch.Generator().manual_seed(1000 * part + step)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    return tokens, (tokens + tokens.roll(1, dims=1)) % VOCAB // (VOCAB // 2)


def train(steps: int = 300, backend: str = "inductor") -> list[float]:
    """Train on this rank, and return the loss of every step. A single process takes both parts of a batch."""
    mesh = fs.make_mesh(shard=-1)  # joins the ranks that were started together
    with fs.deferred():
        model = Model()
    apply, params = fs.make_functional(model)
    specs = fs.presets.full_shard(params, mesh)
    parts = [mesh.rank] if mesh.size == 2 else [0, 1]

    def loss_fn(params: dict, tokens: Tensor, labels: Tensor) -> tuple[Tensor, dict]:
        logits, balance = apply(params, tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss + 0.01 * balance, {"cross_entropy": loss, "balance": balance}

    options = {"optimizer": fs.optim.adamw(3e-3), "accumulate": len(parts), "remat": "unit"}
    step = fs.shard_step(loss_fn, specs, mesh=mesh, backend=backend, **options)
    state, losses = step.init(model, seed=0), []
    for number in range(steps):
        state, metrics = step(state, *map(torch.cat, zip(*(batch(number, p) for p in parts), strict=True)))
        losses.append(metrics.numbers()["loss"])
        if mesh.rank == 0 and (number % 50 == 0 or number == steps - 1):
            print(f"step {number}: {metrics}")
    return losses


if __name__ == "__main__":
    fs.launch(train, ranks=2)
