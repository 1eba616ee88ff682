"""A vision transformer on images, in bf16, recomputed, with ZeRO 2: `python -m experiments.examples.vit`."""

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor, nn

import fnshard as fs

SIZE, PATCH, WIDTH, HEADS, DEPTH, CLASSES = 32, 8, 64, 4, 2, 3


class Block(nn.Module):
    """A block that adds attention to x [batch, patches, WIDTH], and then an MLP, each after its norm."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(self.norm1(x)), "b n (three h d) -> three b h n d", three=3, h=HEADS)
        x = x + self.out(rearrange(F.scaled_dot_product_attention(q, k, v), "b h n d -> b n (h d)"))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A transformer from images [batch, 3, SIZE, SIZE] to logits [batch, CLASSES]."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3 * PATCH * PATCH, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn((SIZE // PATCH) ** 2, WIDTH))
        self.layers = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        patches = rearrange(images, "b c (h p) (w q) -> b (h w) (c p q)", p=PATCH, q=PATCH)
        x = self.layers(self.embed(patches) + self.position)
        return self.head(self.norm(reduce(x, "b n d -> b d", "mean")))


def batch(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw coloured images [count, 3, SIZE, SIZE] of |x|^p + |y|^p < radius^p, and the classes of p."""
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    p = torch.tensor([1.0, 2.0, 8.0])[labels].view(-1, 1, 1)
    radius, x, y = torch.rand(3, count, 1, 1, generator=generator) * 6 + 6
    axis = torch.arange(SIZE) - 7
    inside = (axis - x).abs() ** p + (axis[:, None] - y).abs() ** p < radius**p
    colours = 0.5 + torch.rand(count, 3, 1, 1, generator=generator)
    return inside[:, None] * colours + 0.1 * torch.randn(count, 3, SIZE, SIZE, generator=generator), labels


def main(steps: int = 300, backend: str = "inductor") -> list[float]:
    """Train, print the loss now and then, and return it for every step."""
    mesh = fs.make_mesh(shard=-1)
    generator = torch.Generator().manual_seed(0)  # all ranks draw the same rows, each takes its share
    with fs.deferred():  # allocates nothing; step.init does what the constructor would have done
        model = ViT()
    apply, params = fs.make_functional(model)
    specs = fs.presets.zero2(params, mesh, compute_dtype=torch.bfloat16)

    def loss_fn(params: dict, images: Tensor, labels: Tensor) -> Tensor:  # the step casts no float inputs
        return F.cross_entropy(apply(params, images.bfloat16()).float(), labels)

    options = {"optimizer": fs.optim.adamw(1e-3), "remat": "unit", "backend": backend}
    step = fs.shard_step(loss_fn, specs, mesh=mesh, **options)
    state, losses = step.init(model, seed=0), []
    rows = 32 // mesh.size * mesh.size  # the same number for each rank
    for number in range(steps):
        state, metrics = step(state, *(part.chunk(mesh.size)[mesh.rank] for part in batch(rows, generator)))
        losses.append(metrics.numbers()["loss"])
        if mesh.rank == 0 and (number % 50 == 0 or number == steps - 1):
            print(f"step {number}: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
