"""A GPT from a plain `nn.Module` on two ranks: `python -m experiments.examples.gpt`.

The text is the source of Python's standard library, as bytes. Parameters, gradients and optimizer state are
sharded over the ranks (FSDP's FULL_SHARD, ZeRO 3); each rank draws its own slice of the global batch.
"""

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fnshard as fs

VOCAB, CONTEXT, WIDTH, HEADS, DEPTH = 256, 64, 64, 4, 2


class GPT(nn.Module):
    """A transformer from tokens [batch, T] to logits [batch, T, VOCAB]."""

    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        block = {"dropout": 0.0, "activation": F.gelu, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **block) for _ in range(DEPTH)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.token(tokens) + self.place.weight[:length]
        for block in self.layers:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def train(steps: int = 200, backend: str = "inductor") -> list[float]:
    """Train on this rank, and return the loss of every step, which is the mean over all ranks."""
    mesh = fs.make_mesh(shard=-1)  # joins the ranks that were started together
    with fs.deferred():  # allocates nothing; each rank then fills its own shards
        model = GPT()
    apply, params = fs.make_functional(model)
    specs = fs.presets.full_shard(params, mesh)

    def loss_fn(params: dict, rows: Tensor) -> Tensor:
        return F.cross_entropy(apply(params, rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    rate = fs.schedules.warmup_cosine(3e-3, warmup=10, total=max(steps, 11))
    step = fs.shard_step(loss_fn, specs, mesh=mesh, optimizer=fs.optim.adamw(rate), backend=backend)
    state, losses = step.init(model, seed=0), []

    # Each rank draws rows of its own from the text.
    sources = sorted(Path(os.__file__).parent.glob("*.py"))[:40]
    text = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in sources)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(mesh.rank)

    for number in range(steps):
        starts = torch.randint(0, len(text) - CONTEXT - 1, (8, 1), generator=generator)
        state, metrics = step(state, text[starts + torch.arange(CONTEXT + 1)].long())
        losses.append(metrics.numbers()["loss"])
        if mesh.rank == 0 and (number % 50 == 0 or number == steps - 1):
            print(f"step {number}: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    fs.launch(train, ranks=2)  # two processes here; under `torchrun` each process is a rank
