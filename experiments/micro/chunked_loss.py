"""What the loss of a large vocabulary takes: torch's cross-entropy on fp32 logits, and by chunks of tokens.

    python -m experiments.micro.chunked_loss --tokens 2048 --width 512 --vocabulary 128256

Prints peak bytes of the loss and its backward, beyond weights and activations that are there before, as the
allocator saw them; the median time of both; and how far their gradients are apart. With `--frozen` the head
has no gradient, as under LoRA.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import fnshard as fs
from experiments.bench.memory import live_bytes
from experiments.configs.checks import count

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def naive(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, head).float(), targets)


def chunked(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """As many tokens at once as the library chooses."""
    mean = fs.losses.linear_cross_entropy(hidden, head, targets)
    return mean.total / mean.count


@dataclass(frozen=True)
class HeadCost:
    """Of one loss and its backward."""

    peak_bytes: int
    seconds: float
    gradients: tuple[Tensor, ...]


def cost(loss: Loss, inputs: tuple[Tensor, ...], repeats: int) -> HeadCost:
    """Peak bytes beyond `inputs`, and the median time of `repeats` runs after one."""
    trained = [t for t in inputs if t.requires_grad]

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss(*inputs), trained)

    memory = live_bytes(lambda: step, inputs[0].device, steps=1)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        gradients = step()
        times.append(time.perf_counter() - start)
    return HeadCost(memory.peak - memory.between, statistics.median(times), gradients)


def measure(
    tokens: int, width: int, vocabulary: int, *, dtype: torch.dtype, frozen: bool, repeats: int
) -> Mapping[str, HeadCost]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    head = (torch.randn(vocabulary, width, generator=generator) / width**0.5).to(dtype)
    head.requires_grad_(not frozen)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    inputs = (hidden, head, targets)
    return {loss.__name__: cost(loss, inputs, repeats) for loss in (naive, chunked)}


def apart(one: HeadCost, other: HeadCost) -> float:
    """The largest difference of gradients, as a share of the largest gradient."""
    pairs = zip(one.gradients, other.gradients, strict=True)
    return max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=count, default=2048)
    parser.add_argument("--width", type=count, default=512)
    parser.add_argument("--vocabulary", type=count, default=128_256)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--frozen", action="store_true", help="the head does not train")
    parser.add_argument("--repeats", type=count, default=3)
    args = parser.parse_args()
    costs = measure(
        args.tokens, args.width, args.vocabulary,
        dtype=DTYPES[args.dtype], frozen=args.frozen, repeats=args.repeats,
    )  # fmt: skip
    base = costs["naive"]
    print(f"{args.tokens} tokens x {args.width}, {args.vocabulary} words, {args.dtype}, "
          f"head {'frozen' if args.frozen else 'trained'}")  # fmt: skip
    for name, found in costs.items():
        print(f"{name:8} {found.peak_bytes / 1e6:9.1f} MB ({found.peak_bytes / base.peak_bytes:.3f})"
              f"  {found.seconds * 1e3:8.0f} ms ({found.seconds / base.seconds:.2f})")  # fmt: skip
    print(f"gradients differ by {apart(*costs.values()):.1e} of the largest")


if __name__ == "__main__":
    main()
