"""Two networks and a gradient penalty in one step: `python -m experiments.examples.gradient_penalty_gan`.

WGAN-GP (Gulrajani et al. 2017) on eight Gaussians in a ring: the slope of the critic along its input is kept
near 1 by `torch.func.grad` inside `fn`. Both networks are in one tree and learn in one step; each sees the
other's values detached.
"""

import math

import torch
from torch import Tensor, nn
from torch.func import grad

import fnshard as fs

WIDTH, NOISE, ROWS, MODES, PENALTY = 64, 8, 128, 8, 1.0


class Pair(nn.Module):
    """A generator, from noise to points of the plane, and a critic, from points to scores."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NOISE, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 2)
        )
        self.critic = nn.Sequential(
            nn.Linear(2, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1)
        )

    def forward(self, part: str, x: Tensor) -> Tensor:
        return getattr(self, part)(x)


def ring() -> Tensor:
    """Return the centres of the Gaussians, [MODES, 2]."""
    angle = torch.arange(MODES) * (2 * math.pi / MODES)
    return 2 * torch.stack([angle.cos(), angle.sin()], dim=1)


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draw points of the ring [ROWS, 2], noise [ROWS, NOISE], and how far from made to real points the slope
    is taken [ROWS, 1]."""
    centres = ring()[torch.randint(0, MODES, (ROWS,), generator=generator)]
    real = centres + 0.05 * torch.randn(ROWS, 2, generator=generator)
    return real, torch.randn(ROWS, NOISE, generator=generator), torch.rand(ROWS, 1, generator=generator)


def train(steps: int = 4000, backend: str = "inductor") -> list[float]:
    """Train on this rank. Return for every step how far generated points are from the nearest centre."""
    mesh = fs.make_mesh(shard=-1)  # joins the ranks that were started together
    with fs.deferred():  # allocates nothing; each rank then fills its own shards
        model = Pair()
    apply, params = fs.make_functional(model)
    centres = ring()

    def loss_fn(params: dict, real: Tensor, noise: Tensor, between: Tensor) -> tuple[Tensor, dict]:
        fixed = {path: value.detach() for path, value in params.items()}
        made = apply(params, "generator", noise)
        # The critic is to have a slope of 1 at points between real and generated ones.
        mixed = (between * real + (1 - between) * made).detach()
        slope = grad(lambda points: apply(params, "critic", points).sum())(mixed)
        # The critic sees detached points, and the generator a detached critic, so each gradient is its own.
        gap = apply(params, "critic", real).mean() - apply(params, "critic", made.detach()).mean()
        critic_loss = PENALTY * (slope.norm(dim=1) - 1).square().mean() - gap
        generator_loss = -apply(fixed, "critic", made).mean()
        away = (made[:, None] - centres).norm(dim=-1).amin(1)
        return critic_loss + generator_loss, {"gap": gap, "away": away.mean()}

    specs = fs.presets.full_shard(params, mesh)
    optimizer = fs.optim.adamw(1e-3, betas=(0.5, 0.9), weight_decay=0.0)
    step = fs.shard_step(loss_fn, specs, mesh=mesh, optimizer=optimizer, backend=backend)
    state, distances = step.init(model, seed=0), []
    generator = torch.Generator().manual_seed(0)  # all ranks draw the same rows, each takes its share
    for number in range(steps):
        state, metrics = step(state, *(part.chunk(mesh.size)[mesh.rank] for part in batch(generator)))
        numbers = metrics.numbers()
        distances.append(numbers["away"])
        if mesh.rank == 0 and (number % 500 == 0 or number == steps - 1):
            print(f"step {number}: critic's gap {numbers['gap']:.3f}, {distances[-1]:.3f} from the ring")
    return distances


if __name__ == "__main__":
    fs.launch(train, ranks=2)  # two processes here; under `torchrun` each process is a rank
