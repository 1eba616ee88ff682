"""Learning to learn, by second derivatives: `python -m experiments.examples.maml`.

MAML (Finn et al. 2017) on its sinusoids: a task is a sine of its own amplitude and phase, seen at ten points.
What trains is the starting point of two gradient steps, which are a part of `fn`: one `vmap` over all tasks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

import fnshard as fs

WIDTH, SHOTS, TASKS, INNER_STEPS, INNER_RATE = 40, 10, 32, 2, 0.05


def tasks(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw x and y [TASKS, 2 * SHOTS, 1] of sines: the first half to learn from, the second to test."""
    amplitude = 0.5 + 2.5 * torch.rand(TASKS, 1, 1, generator=generator)
    phase = 3.14 * torch.rand(TASKS, 1, 1, generator=generator)
    x = 10 * torch.rand(TASKS, 2 * SHOTS, 1, generator=generator) - 5
    return x, amplitude * torch.sin(x + phase)


def train(steps: int = 2000, backend: str = "inductor") -> list[float]:
    """Train on this rank, and return the loss of every step: the mean error after the inner steps."""
    mesh = fs.make_mesh(shard=-1)  # joins the ranks that were started together
    with fs.deferred():  # allocates nothing; each rank then fills its own shards
        model = nn.Sequential(
            nn.Linear(1, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
        )
    apply, params = fs.make_functional(model)

    def error(params: dict, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(apply(params, x), y)

    def task_errors(params: dict, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the errors before and after the inner steps, at points that these do not see."""
        before = error(params, x[SHOTS:], y[SHOTS:])
        for _ in range(INNER_STEPS):
            slopes = grad(error)(params, x[:SHOTS], y[:SHOTS])
            params = {path: value - INNER_RATE * slopes[path] for path, value in params.items()}
        return before, error(params, x[SHOTS:], y[SHOTS:])

    def loss_fn(params: dict, x: Tensor, y: Tensor) -> tuple[Tensor, dict]:
        before, after = vmap(task_errors, in_dims=(None, 0, 0))(params, x, y)
        return after.mean(), {"before": before.mean()}

    specs = fs.presets.full_shard(params, mesh)
    step = fs.shard_step(loss_fn, specs, mesh=mesh, optimizer=fs.optim.adamw(3e-3), backend=backend)
    state, losses = step.init(model, seed=0), []
    generator = torch.Generator().manual_seed(0)  # all ranks draw the same tasks, each takes its share
    for number in range(steps):
        state, metrics = step(state, *(part.chunk(mesh.size)[mesh.rank] for part in tasks(generator)))
        numbers = metrics.numbers()
        losses.append(numbers["loss"])
        if mesh.rank == 0 and (number % 200 == 0 or number == steps - 1):
            before, after = numbers["before"], numbers["loss"]
            print(f"step {number}: error {before:.3f}, {after:.3f} after {INNER_STEPS} inner steps")
    return losses


if __name__ == "__main__":
    fs.launch(train, ranks=2)  # two processes here; under `torchrun` each process is a rank
