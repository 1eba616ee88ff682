"""Learning from rewards, GRPO on two ranks: `python -m experiments.examples.grpo`.

A GPT that knows nothing sees four digits and is to say them sorted. It is told how many it has right, and
nothing else: of sixteen tries at one prompt those that are better than the rest become likelier (Shao et al.
2024). Rollouts read the sharded leaves that train: there is no second copy of the weights.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fnshard as fs
from fnshard.losses.policy import PolicyInputs, dapo, group_advantages

DIGITS, LENGTH, WIDTH, HEADS, DEPTH = 10, 4, 64, 4, 2
PROMPTS, TRIES = 16, 16  # of a rank's batch
ROWS = PROMPTS * TRIES


class Sorter(nn.Module):
    """Digits [rows, T] to logits [rows, T, DIGITS] of what comes next."""

    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(DIGITS, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        block = {"dropout": 0.0, "activation": F.gelu, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **block) for _ in range(DEPTH)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, DIGITS, bias=False)

    def forward(self, digits: Tensor) -> Tensor:
        length = digits.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=digits.device)
        x = self.token(digits) + self.place.weight[:length]
        for block in self.layers:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def train(steps: int = 300, backend: str = "inductor") -> list[float]:
    """What each rank runs; gives the share of digits that are right, over all ranks."""
    mesh = fs.make_mesh(shard=-1)
    with fs.deferred():
        model = Sorter()
    apply, params = fs.make_functional(model)
    specs = fs.presets.full_shard(params, mesh)

    def loss_fn(params: dict, rows: Tensor, batch: dict) -> tuple:
        logits = apply(params, rows[:, :-1])[:, LENGTH - 1 :].log_softmax(-1)
        logprobs = logits.gather(-1, rows[:, LENGTH:, None]).squeeze(-1)
        entropy = -(logits.exp() * logits).sum(-1)
        mask = torch.ones_like(logprobs, dtype=torch.bool)
        loss, aux = dapo(PolicyInputs(logprobs, batch["sampler"], batch["advantages"], mask, entropy=entropy))
        return loss, aux | {"right": fs.Mean(batch["rewards"].sum(), batch["rewards"].numel())}

    optimizer = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(1e-3))
    step = fs.shard_step(loss_fn, specs, mesh=mesh, optimizer=optimizer, backend=backend)
    sample = fs.shard_forward(apply, specs, mesh=mesh, backend=backend)
    state, shares = step.init(model, seed=0), []
    generator = torch.Generator().manual_seed(mesh.rank)
    for number in range(steps):
        prompts = torch.randint(DIGITS, (PROMPTS, LENGTH), generator=generator).repeat_interleave(TRIES, 0)
        rows = torch.cat([prompts, torch.zeros_like(prompts)], 1)
        sampler = torch.zeros(ROWS, LENGTH)
        for place in range(LENGTH, 2 * LENGTH):
            logprobs = sample(state.params, rows[:, :-1])[:, place - 1].log_softmax(-1)
            drawn = torch.multinomial(logprobs.exp(), 1, generator=generator)
            rows[:, place], sampler[:, place - LENGTH] = drawn[:, 0], logprobs.gather(1, drawn)[:, 0]
        rewards = (rows[:, LENGTH:] == prompts.sort(1).values).float().mean(1)
        advantages = group_advantages(rewards, TRIES)[:, None]
        batch = {"sampler": sampler, "advantages": advantages, "rewards": rewards}
        state, metrics = step(state, rows, batch)
        found = metrics.numbers()
        shares.append(found["right"])
        if mesh.rank == 0 and (number % 50 == 0 or number == steps - 1):
            print(f"step {number}: {found['right']:.0%} right, entropy {found['entropy']:.2f}")
    return shares


if __name__ == "__main__":
    fs.launch(train, ranks=2)
