"""Cases of one mechanism each: `executor`, `decode`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import fnshard as fs
from experiments.bench.config import BenchConfig
from experiments.bench.measure import Result, interleaved, ratio
from experiments.training.decoder import Decoder, DecoderConfig, loss_function
from fnshard.compiler.ir.values import CONTROL, LOSS_TANGENT
from fnshard.compiler.schedule.instructions import Run
from fnshard.runtime.collectives.base import Done
from fnshard.runtime.executor.context import ExecutorContext
from fnshard.runtime.executor.control import StepControl
from fnshard.runtime.executor.execute import bind
from fnshard.step.plan import scalars_of

# ------------------------------------------------------------------ executor


def executor(config: BenchConfig, folder: Path) -> Result:
    """What does the executor itself cost, for each unit and phase, and for each leaf of a step?

    Kernels and collectives do nothing: what is left is packing, unpacking, bookkeeping and the loop. The last
    row is a whole step of 200 tiny leaves in one unit, its checks, inputs and metrics included.
    """
    torch.set_num_threads(1)
    works = {f"{preset}, a unit and phase": schedule_alone(preset) for preset in ("full_shard", "no_shard")}
    params = {f"layers.{i}": torch.ones(4) for i in range(200)}
    specs = fs.match_specs(params, [("*", fs.LayoutSpec(unit="all"))])
    loss = lambda p, x: (torch.stack(list(p.values())) * x).sum()  # noqa: E731
    step = fs.shard_step(loss, specs, optimizer=fs.optim.sgd(0.1), backend="eager")
    state, batch = step.init(params), torch.ones(4)

    def one() -> None:
        nonlocal state
        state, _ = step(state, batch)

    rows = [["", "CPU us"]]
    for name, (work, parts) in (works | {"a step of 200 leaves": (one, 1)}).items():
        work()
        (seconds,) = interleaved({name: work}, config.rounds, clock=time.thread_time).values()
        rows.append([name, f"{1e6 * median(seconds) / parts:.0f}"])
    return Result(rows)


def schedule_alone(preset: str) -> tuple[Callable[[], None], int]:
    """The schedule of a tiny decoder on two ranks with kernels and collectives that do nothing, but give what
    has the right shape; how many units and phases it has."""
    mesh = fs.make_mesh(shard=2, abstract=True)
    loss, params = loss_function(
        Decoder(DecoderConfig(width=8, layers=12, heads=2, kv_heads=1, context=8, vocab=16))
    )
    specs, tokens = fs.presets.PRESETS[preset](params, mesh), torch.zeros(1, 8, dtype=torch.long)
    step = fs.shard_step(loss, specs, mesh=mesh, backend="eager")
    lowered = step.lower(params, tokens, tokens)

    def nothing(graph: Any) -> Callable[[Any], list[Tensor]]:
        outs = [torch.zeros(node.meta["val"].shape) for node in graph.graph.output_node().args[0]]
        return lambda args: outs

    kernels = {k.name: (nothing(k.forward), nothing(k.backward)) for k in lowered.kernels.values()}
    scalars = scalars_of(lowered.program, lowered.segments, None, step.resolved, mesh, step.options)
    done = SimpleNamespace(
        mesh=mesh,
        send_buffer=lambda numel, dtype, axes, rows=1: torch.empty(rows * numel, dtype=dtype),
        all_gather=lambda flat, axes: Done([flat, flat]),
        reduce_scatter=lambda rows, axes: Done(rows[: rows.numel() // 2]),
        all_reduce=lambda flat, axes: Done(flat),
    )
    run = bind(ExecutorContext(lowered.schedule, kernels, done, 0, scalars))
    shards = fs.shard(params, specs, mesh)

    def work() -> None:
        env = {f"s:{path}": block for path, block in shards.items()}
        env |= {"batch:0": tokens, "batch:1": tokens, LOSS_TANGENT: torch.ones(()), CONTROL: StepControl()}
        run(env)

    return work, sum(isinstance(line, Run) for line in lowered.schedule.instructions)


# ------------------------------------------------------------------ decode

NEW, PROMPT = 64, 16  # tokens of an answer, and of the longest prompt


def decode(config: BenchConfig, folder: Path) -> Result:
    """How fast are answers drawn from the leaves that train, next to `transformers.generate`? The same?"""
    from transformers import LlamaConfig, LlamaForCausalLM

    from experiments.finetune import lm
    from experiments.finetune.decode import first_of, next_of
    from experiments.finetune.rollout import TOGETHER, Rollouts

    torch.manual_seed(config.seed)
    sizes, mesh = config.model, fs.make_mesh(shard=1, device="cpu")
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=sizes.vocab, hidden_size=sizes.width, num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads, eos_token_id=None,
        intermediate_size=8 * sizes.width // 3, max_position_embeddings=PROMPT + NEW,
    )).eval()  # fmt: skip
    ours = lm.of(model)
    specs = fs.presets.full_shard(ours.params, mesh)
    forwards = [
        fs.shard_forward(fn, specs, mesh=mesh, backend=config.backend)
        for fn in (first_of(ours, PROMPT + NEW, 0.0, 1.0), next_of(ours, TOGETHER, 0.0, 1.0))
    ]
    rollouts = Rollouts(
        *forwards, TOGETHER, config.rows, PROMPT, NEW, frozenset(), lambda text: [text], mesh.device
    )  # fmt: skip
    blocks = fs.shard({path: leaf.detach() for path, leaf in ours.params.items()}, specs, mesh)
    lengths = torch.randint(1, PROMPT + 1, (config.rows,)).tolist()
    prompts = [torch.randint(1, sizes.vocab, (length,)).tolist() for length in lengths]
    numbers = torch.zeros(config.rows, NEW, dtype=torch.float64)
    left = torch.tensor([[0] * (PROMPT - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (PROMPT - n) + [1] * n for n in lengths])
    how = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}
    works = {
        "fnshard": lambda: rollouts(blocks, prompts, numbers).tokens,
        "generate": lambda: model.generate(left, attention_mask=mask, **how)[:, PROMPT:],
        "generate, static cache": lambda: model.generate(
            left, attention_mask=mask, cache_implementation="static", **how
        )[:, PROMPT:],
    }
    tokens = [work() for work in works.values() for _ in range(2)][::2]  # which compiles, the second call too
    same = [(tokens[0] == other).float().mean().item() for other in tokens]
    seconds = interleaved(works, config.rounds, seed=config.seed)
    rows = [["", "tokens/s", "fnshard / it", "the same tokens"]]
    for (name, taken), share in zip(seconds.items(), same, strict=True):
        speed = config.rows * NEW / median(taken)
        rows.append([name, f"{speed:,.0f}", f"{ratio(taken, seconds['fnshard']):.2f}", f"{share:.1%}"])
    return Result(rows, values={"seconds": seconds})
