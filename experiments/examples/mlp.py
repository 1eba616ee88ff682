"""A hand-written MLP over a nested dict, with einops: `python -m experiments.examples.mlp`.

There is no `nn.Module`: the parameters are plain tensors in a tree, and the model is a function of them.
The images are 8 x 8, with horizontal, vertical or diagonal stripes in noise; the classes are the directions.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor

import fnshard as fs
from fnshard import LayoutSpec, P

SIZE, HIDDEN, CLASSES = 8, 64, 3


def initial(generator: torch.Generator) -> dict:
    """Draw the parameter tree: `{"layers": [{"w", "b"}, {"w", "b"}], "head": {"w"}}`."""

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * rows**-0.5

    sizes = pairwise([SIZE * SIZE, HIDDEN, HIDDEN])
    layers = [{"w": matrix(rows, columns), "b": torch.zeros(columns)} for rows, columns in sizes]
    return {"layers": layers, "head": {"w": matrix(HIDDEN, CLASSES)}}


def loss_fn(params: dict, images: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of images [batch, height, width], as on one device with full shapes."""
    x = rearrange(images, "batch height width -> batch (height width)")
    for layer in params["layers"]:
        x = F.gelu(einsum(x, layer["w"], "batch inputs, inputs outputs -> batch outputs") + layer["b"])
    logits = einsum(x, params["head"]["w"], "batch inputs, inputs classes -> batch classes")
    return F.cross_entropy(logits, labels)


def batch(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw striped images [count, SIZE, SIZE] in noise, and their classes [count]."""
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    phase = torch.rand(count, 1, 1, generator=generator) * 6.28
    down, across = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    along = torch.stack([down, across, down + across])[labels]  # [count, SIZE, SIZE]
    noise = torch.randn(count, SIZE, SIZE, generator=generator)
    return torch.sin(along + phase) + 0.3 * noise, labels


def main(steps: int = 300, backend: str = "inductor") -> list[float]:
    """Train, print the loss now and then, and return it for every step."""
    mesh = fs.make_mesh(shard=-1)
    generator = torch.Generator().manual_seed(0)  # all ranks draw the same rows, each takes its share
    params = initial(generator)
    rules = [("*.b", LayoutSpec(P())), ("*", LayoutSpec(P("shard")))]  # biases whole, matrices sharded
    specs = fs.match_specs(params, rules)
    optimizer = fs.optim.adamw(3e-3, weight_decay=[("*.b", 0.0), ("*", 0.01)])
    step = fs.shard_step(loss_fn, specs, mesh=mesh, optimizer=optimizer, backend=backend)
    state, losses = step.init(params), []
    rows = 64 // mesh.size * mesh.size  # the same number for each rank
    for number in range(steps):
        state, metrics = step(state, *(part.chunk(mesh.size)[mesh.rank] for part in batch(rows, generator)))
        losses.append(metrics.numbers()["loss"])
        if mesh.rank == 0 and (number % 50 == 0 or number == steps - 1):
            print(f"step {number}: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
