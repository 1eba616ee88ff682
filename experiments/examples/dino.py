"""DINO: a student that agrees with the average of its past: `python -m experiments.examples.dino`.

Self-distillation without labels (Caron et al. 2021). The teacher's weights and the centre of its outputs are
leaves that do not train and that `fn` writes: they are state of the step, sharded, saved and restored like
all others. The centre is the mean over the rows of all ranks, and so are the statistics of every norm.
"""

import copy

import torch
from torch import Tensor, nn

import fnshard as fs

KINDS, PIXELS, WIDTH, OUT, ROWS = 6, 24, 48, 16, 64
MOMENTUM, CENTRE = 0.98, 0.9  # of the averages: the teacher's weights, and the centre
SHARP, SOFT = 0.1, 0.2  # temperatures of teacher and student


class Dino(nn.Module):
    """A pair of networks of one shape, of which the student trains."""

    def __init__(self) -> None:
        super().__init__()
        first = [nn.Linear(PIXELS, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU()]
        self.student = nn.Sequential(*first, nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, OUT))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(OUT))

    def forward(self, views: Tensor) -> Tensor:
        """Return the mean loss of this rank's rows, from views [rows, 2, PIXELS]."""
        with torch.no_grad():
            # The teacher follows the student. What it makes of one view is the target for the other view.
            for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                old.lerp_(new, 1 - MOMENTUM)  # what the last step made of the student
            seen = self.teacher(views.flatten(0, 1))  # [2 rows, OUT]
            targets = ((seen - self.centre) / SHARP).softmax(-1).view(-1, 2, OUT).flip(1)
            # The centre is an average over the rows of all ranks; without it all outputs could become one.
            mean = fs.psum(seen.sum(0)) / fs.psum(len(seen))
            self.centre.lerp_(mean, 1 - CENTRE)
        guesses = (self.student(views.flatten(0, 1)) / SOFT).log_softmax(-1).view(-1, 2, OUT)
        return -(targets * guesses).sum(-1).mean()


def batch(generator: torch.Generator) -> Tensor:
    """Draw two noisy views [ROWS, 2, PIXELS] of things of six kinds."""
    kinds = torch.randn(KINDS, PIXELS, generator=torch.Generator().manual_seed(0))
    things = kinds[torch.randint(KINDS, (ROWS,), generator=generator)]
    return things[:, None] + 0.4 * torch.randn(ROWS, 2, PIXELS, generator=generator)


def train(steps: int = 400, backend: str = "inductor") -> list[float]:
    """Train on this rank, and return the loss of every step, which is the mean over all rows."""
    mesh = fs.make_mesh(shard=-1)  # joins the ranks that were started together
    torch.manual_seed(0)
    apply, params = fs.make_functional(fs.sync_batch_norm(Dino()))
    specs = fs.presets.full_shard(params, mesh)
    step = fs.shard_step(apply, specs, mesh=mesh, optimizer=fs.optim.adamw(2e-3), backend=backend)
    state, losses = step.init(params), []
    generator = torch.Generator().manual_seed(0)  # all ranks draw the same things, each takes its share
    for number in range(steps):
        views = batch(generator).to(params["centre"])
        state, metrics = step(state, views.chunk(mesh.size)[mesh.rank])
        losses.append(metrics.numbers()["loss"])
        if mesh.rank == 0 and (number % 100 == 0 or number == steps - 1):
            print(f"step {number}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    fs.launch(train, ranks=2)  # two processes here; under `torchrun` each process is a rank
