"""Eight networks trained as one by `vmap`: `python -m experiments.examples.ensemble_vmap`.

A deep ensemble (Lakshminarayanan et al. 2017): where its members disagree, it does not know. The leaves of
all members are stacked, and their first dim, the member, is the one that is split over the ranks.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

import fnshard as fs

MEMBERS, WIDTH, POINTS = 8, 32, 64


def observations(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw places x, 1 < |x| < 3, and noisy values of a sine there, [POINTS, 1] each.

    In the gap around 0 there is nothing to learn from.
    """
    x = 1 + 2 * torch.rand(POINTS, 1, generator=generator)
    x = torch.where(torch.rand(POINTS, 1, generator=generator) < 0.5, x, -x)
    return x, torch.sin(2 * x) + 0.1 * torch.randn(POINTS, 1, generator=generator)


def make_member() -> nn.Module:
    """Make one member of the ensemble."""
    return nn.Sequential(
        nn.Linear(1, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
    )


def train(steps: int = 1000, backend: str = "inductor") -> list[float]:
    """Train on this rank, and return the loss of every step, which is the mean over all members."""
    mesh = fs.make_mesh(shard=-1)  # joins the ranks that were started together
    torch.manual_seed(0)
    # {"0.weight": [MEMBERS, WIDTH, 1], ...}
    stacked, _ = stack_module_state([make_member() for _ in range(MEMBERS)])
    params = {path: value.detach() for path, value in stacked.items()}
    member = copy.deepcopy(make_member()).to("meta")  # the code without values

    def outputs(params: dict, x: Tensor) -> Tensor:
        """Return each member's value at each point, [MEMBERS, points, 1]."""
        return vmap(lambda own, x: functional_call(member, own, (x,)), in_dims=(0, None))(params, x)

    def loss_fn(params: dict, x: Tensor, y: Tensor) -> Tensor:
        predicted = outputs(params, x)
        return F.mse_loss(predicted, y.expand_as(predicted))

    specs = fs.presets.full_shard(params, mesh)
    step = fs.shard_step(loss_fn, specs, mesh=mesh, optimizer=fs.optim.adamw(3e-3), backend=backend)
    state, losses = step.init(params), []
    generator = torch.Generator().manual_seed(0)  # all ranks draw the same points, each takes its share
    for number in range(steps):
        state, metrics = step(state, *(part.chunk(mesh.size)[mesh.rank] for part in observations(generator)))
        losses.append(metrics.numbers()["loss"])
        if mesh.rank == 0 and (number % 200 == 0 or number == steps - 1):
            print(f"step {number}: loss {losses[-1]:.4f}")

    # The members agree where there was data, and disagree in the gap.
    spread = fs.shard_forward(lambda params, x: outputs(params, x).std(0), specs, mesh=mesh, backend=backend)
    points = spread(state, torch.tensor([[-2.0], [0.0], [2.0]]).to(params["0.weight"])).flatten()
    if mesh.rank == 0:
        print("spread of the members at x = -2, 0, 2:", ", ".join(f"{v:.3f}" for v in points.tolist()))
    return losses


if __name__ == "__main__":
    fs.launch(train, ranks=2)  # two processes here; under `torchrun` each process is a rank
