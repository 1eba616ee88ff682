"""A physics-informed network, by `torch.autograd.grad`: `python -m experiments.examples.pinn`.

The heat equation u_t = u_xx / 10 on 0 < x, t < 1, with u = 0 at both ends and sin(pi x) at the start (Raissi
et al. 2019). Its solution is exp(-pi^2 t / 10) sin(pi x), which nothing below is trained on.
"""

import math

import torch
from torch import Tensor, nn

import fnshard as fs

WIDTH, POINTS, RATE = 32, 256, 0.1


def solution(x: Tensor, t: Tensor) -> Tensor:
    """Return the exact solution, which the network has to find."""
    return torch.exp(-RATE * math.pi**2 * t) * torch.sin(math.pi * x)


def train(steps: int = 2000, backend: str = "inductor") -> list[float]:
    """Train on this rank, and return the loss of every step. The printed error is the RMS to the solution."""
    mesh = fs.make_mesh(shard=-1)  # joins the ranks that were started together
    with fs.deferred():  # allocates nothing; each rank then fills its own shards
        model = nn.Sequential(
            nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
        )
    apply, params = fs.make_functional(model)

    def loss_fn(params: dict, x: Tensor, t: Tensor) -> tuple[Tensor, dict]:
        def u(x: Tensor, t: Tensor) -> Tensor:
            return apply(params, torch.cat([x, t], dim=1))

        def slope(value: Tensor, of: Tensor) -> Tensor:
            return torch.autograd.grad(value.sum(), of, create_graph=True)[0]

        # Inside of the domain the equation has to hold, at its borders the given values.
        x, t = x.requires_grad_(), t.requires_grad_()
        inside = u(x, t)
        residual = slope(inside, t) - RATE * slope(slope(inside, x), x)
        start = u(x, t * 0) - solution(x, t * 0)
        ends = u(x * 0, t).square() + u(x * 0 + 1, t).square()
        error = (inside - solution(x, t)).square().mean()
        return residual.square().mean() + 10 * (start.square() + ends).mean(), {"error": error}

    specs = fs.presets.full_shard(params, mesh)
    step = fs.shard_step(loss_fn, specs, mesh=mesh, optimizer=fs.optim.adamw(3e-3), backend=backend)
    state, losses = step.init(model, seed=0), []
    generator = torch.Generator().manual_seed(0)  # all ranks draw the same points, each takes its share
    for number in range(steps):
        points = torch.rand(2, POINTS, 1, generator=generator)
        state, metrics = step(state, *points.chunk(mesh.size, dim=1)[mesh.rank])
        numbers = metrics.numbers()
        losses.append(numbers["loss"])
        if mesh.rank == 0 and (number % 200 == 0 or number == steps - 1):
            print(f"step {number}: loss {losses[-1]:.4f}, error {numbers['error'] ** 0.5:.4f}")
    return losses


if __name__ == "__main__":
    fs.launch(train, ranks=2)  # two processes here; under `torchrun` each process is a rank
