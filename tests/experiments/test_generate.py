"""`finetune.generate`: text with a static cache, as transformers makes it and as no cache would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from families import FAMILIES
from torch import Tensor

import fnshard as fs
from experiments.configs.train import ConfigError
from experiments.finetune import lm
from experiments.finetune.generate import Draw, Generator
from fnshard.adapters.lora import Lora, init_adapters, with_adapters

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:compiling again"
)

PROMPTS = [[5, 6, 7], [*range(1, 15)], [11], [9, 9, 4, 2]]
SIZE, NEW = 28, 10
Rows = list[list[int]]


@cache
def model_of(name: str) -> lm.LanguageModel:
    """Random enough for every token to be another one."""
    module = FAMILIES[name].build()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(2)
        for path, leaf in module.named_parameters():
            # Layers that say more than the tied embedding of the token itself, which would be repeated.
            small = any(part in path for part in ("norm", "embed", "ln_", "wte", "wpe"))
            leaf.add_(torch.randn_like(leaf) * (0.3 if small else 1.0) + 4 * ("post_" in path))
    return lm.of(module)


@cache
def generator_of(name: str, ranks: int, tensor: int, context: int) -> tuple[Generator, dict[str, Any]]:
    """Over simulated ranks, and its specs."""
    mesh = fs.make_mesh(shard=ranks, tensor=tensor, context=context, simulated=True)
    specs = fs.presets.full_shard(model_of(name).params, mesh, tensor="tensor")
    return Generator.of(model_of(name), specs, mesh, size=SIZE, backend="eager"), specs


def text(
    name: str,
    ranks: int,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    new: int = NEW,
    split: tuple[int, int] = (1, 1),
    **how: Any,
) -> Rows:
    """What all ranks make of prompts dealt out to them, in order.

    Args:
        split: ranks along "tensor" and "context", which get equal prompts.
    """
    generator, specs = generator_of(name, ranks, *split)
    each = len(prompts) // ranks

    def run(rank: int) -> Rows:
        first = generator.mesh.data_rank * each
        mine = prompts[first : first + each]
        return generator(fs.shard(model_of(name).params, specs, generator.mesh), mine, new, **how)

    made, alike = fs.simulate(generator.mesh, run), split[0] * split[1]
    assert all(made[i] == made[i // alike * alike] for i in range(len(made)))
    return [row for rows in made[::alike] for row in rows]


def without_cache(
    logits: Callable[[Tensor], Tensor], prompts: Sequence[Sequence[int]], new: int = NEW
) -> Rows:
    """The likeliest tokens, all computed anew for each: `logits` of [1, T] is [1, T, V]."""
    out = []
    for prompt in prompts:
        row = list(prompt)
        for _ in range(new):
            row.append(int(logits(torch.tensor([row]))[0, -1].argmax()))
        out.append(row[len(prompt) :])
    return out


@cache
def transformers_text(name: str) -> Rows:
    """Greedy, one prompt at a time."""
    module, out = model_of(name).model, []
    for prompt in PROMPTS:
        given = torch.tensor([prompt])
        got = module.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=NEW,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        out.append(got[0, len(prompt) :].tolist())
    return out


MORE_DECODERS = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma"]  # one on two ranks: below


@pytest.mark.parametrize(
    "name", ["gemma3", "gpt2", *(pytest.param(name, marks=pytest.mark.long) for name in MORE_DECODERS)]
)
def test_greedy_is_transformers_greedy(name: str) -> None:
    """Prompts of different lengths beside each other on two ranks. Mistral's window is 4 tokens, and every
    other layer's of Gemma 2 and 3."""
    assert any(len(set(row)) > NEW // 2 for row in transformers_text(name)), "a text that says something"
    assert text(name, 2) == transformers_text(name)


def test_two_programs_serve_all() -> None:
    """Other prompts, more tokens, other draws, one rank: nothing is compiled anew but for longer prompts."""
    assert text("llama", 1) == transformers_text("llama")
    generator, _ = generator_of("llama", 1, 1, 1)
    text("llama", 1, [PROMPTS[0]] * 4, 3)
    text("llama", 1, temperature=1.0, top_k=3, seed=4)
    lowerings = [len(f._cache.programs) for f in (generator.prefill, generator.decode)]
    assert lowerings == [1, 1]
    long = [[*range(1, 19)]] * 4
    model = model_of("llama")
    text("llama", 1, [[*range(1, 18)]] * 4, 3)
    assert text("llama", 1, long) == without_cache(lambda t: model.logits(model.params, t), long[:1]) * 4
    assert [len(f._cache.programs) for f in (generator.prefill, generator.decode)] == [2, 1]


# ------------------------------------------------------------------ adapters and codes


def wrapped(prompts: Rows, specs: Any, mesh: fs.Mesh, tree: Any, asked: Lora, new: int) -> list[Any]:
    """On each simulated rank: (text, what the codes are decoded to)."""
    generator = Generator.of(
        model_of("llama"), specs, mesh, size=SIZE, backend="eager", wrap=lambda fn: with_adapters(fn, asked)
    )
    each = len(prompts) // mesh.size

    def run(rank: int) -> Any:
        blocks = fs.shard(tree, specs, mesh)
        return generator(blocks, prompts[rank * each : rank * each + each], new), fs.unshard(
            blocks, specs, mesh
        )

    return fs.simulate(mesh, run)


@pytest.mark.parametrize("codec", [pytest.param("", marks=pytest.mark.long), "nf4"])
def test_with_adapters_and_with_codes(codec: str) -> None:
    """What the tuned tree says without a cache, of the same codes."""
    model = model_of("llama")
    asked = Lora(4, 8.0, tuple(p for p in model.matrices() if "q_proj" in p or "down_proj" in p))
    adapters = init_adapters(asked, model.params)
    for number, parts in enumerate(adapters.values()):
        parts["b"].data = torch.randn(
            parts["b"].shape, generator=torch.Generator().manual_seed(number)
        ).double()
    tree = {"base": dict(model.params), "adapters": adapters}
    mesh = fs.make_mesh(shard=2, simulated=True)
    coded = {"codec": codec} if codec else {}
    specs = fs.match_specs(
        tree,
        [
            ("base.*_proj.weight", fs.LayoutSpec(fs.P("shard"), trainable=False, **coded)),
            ("*", fs.LayoutSpec(fs.P("shard"))),
        ],
    )
    results = wrapped(PROMPTS[:2], specs, mesh, tree, asked, 6)
    whole = results[0][1]
    tuned = with_adapters(model.logits, asked)
    wanted = without_cache(lambda tokens: tuned(whole, tokens), PROMPTS[:2], 6)
    assert results[0][0] + results[1][0] == wanted
    plain = without_cache(lambda tokens: model.logits(model.params, tokens), PROMPTS[:2], 6)
    assert wanted != plain, "neither adapters nor codes make a difference"


# ------------------------------------------------------------------ draws


def test_drawn_text_is_a_function_of_its_seed() -> None:
    """And of its prompt and number among all ranks' rows: not of the rank, nor of the rows beside it."""

    def drawn(ranks: int = 1, prompts: Rows = PROMPTS, **how: Any) -> Rows:
        return text("llama", ranks, prompts, 5, **{"temperature": 1.5, **how})

    first = drawn(seed=0)
    likeliest = [row[:5] for row in transformers_text("llama")]
    assert drawn(seed=0) == first == drawn(2, seed=0)
    assert first == drawn(2, seed=0, split=(2, 1)) == drawn(1, seed=0, split=(1, 2))
    assert drawn(seed=1) != first != likeliest
    assert drawn(top_k=1) == likeliest == drawn(top_p=1e-9)
    twice = drawn(prompts=[PROMPTS[0]] * 4)
    assert len({tuple(row) for row in twice}) == 4, "rows draw apart"
    assert twice[0] == first[0]


def test_draws_keep_to_the_likeliest() -> None:
    logits = torch.tensor([0.5, 0.1, 0.15, 0.25]).log().expand(2000, 4)
    chances = [torch.Generator().manual_seed(seed) for seed in range(2000)]

    def shares(**how: Any) -> list[float]:
        drawn = torch.tensor(Draw(**{"temperature": 1.0, **how})(logits, chances))
        return (torch.bincount(drawn, minlength=4) / 2000).tolist()

    def near(got: list[float], wanted: list[float]) -> None:
        torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted).float(), rtol=0, atol=0.04)
        assert [g == 0 for g in got] == [w == 0 for w in wanted]

    near(shares(), [0.5, 0.1, 0.15, 0.25])
    near(shares(top_k=2), [2 / 3, 0, 0, 1 / 3])
    near(shares(top_p=0.8), [0.5 / 0.9, 0, 0.15 / 0.9, 0.25 / 0.9])
    near(shares(top_p=0.75), [2 / 3, 0, 0, 1 / 3])
    near(shares(top_k=3, top_p=0.52), [1, 0, 0, 0])  # 0.5 / 0.9 is more than that already
    near(shares(temperature=0.5), [0.25 / 0.345, 0.01 / 0.345, 0.0225 / 0.345, 0.0625 / 0.345])


# ------------------------------------------------------------------ the end


def test_rows_end_by_themselves_and_ranks_together() -> None:
    whole = transformers_text("llama")
    ends = {whole[0][2], whole[3][6]}
    wanted = [row[: next((i + 1 for i, t in enumerate(row) if t in ends), NEW)] for row in whole]
    assert len({len(row) for row in wanted}) > 1 and min(map(len, wanted)) < NEW
    assert text("llama", 2, eos=ends) == wanted
    generator, _ = generator_of("llama", 2, 1, 1)
    mine = mock.Mock(side_effect=generator.decode.__call__)
    object.__setattr__(generator, "decode", mine)
    try:
        assert text("llama", 2, [PROMPTS[0]] * 2, eos=whole[0][2]) == [whole[0][:3]] * 2
    finally:
        object.__setattr__(generator, "decode", mine.side_effect.__self__)
    assert mine.call_count == 2 * 2, "all had ended"


def on_rank(rank: int, prompts: Rows) -> Rows:
    """A process of a pool."""
    model = model_of("llama")
    mesh = fs.make_mesh(shard=2, device="cpu")
    specs = fs.presets.full_shard(model.params, mesh)
    generator = Generator.of(model, specs, mesh, size=SIZE, backend="eager")
    blocks = fs.shard(model.params, specs, mesh)
    with pytest.raises(ConfigError, match="rank 1: prompt 0 is empty"):
        generator(blocks, [[1]] if rank == 0 else [[]], 2)
    ends = {transformers_text("llama")[2][1]}
    return generator(blocks, prompts[rank * 2 : rank * 2 + 2], NEW, eos=ends)


def test_on_processes(ranks: Any) -> None:
    end = transformers_text("llama")[2][1]
    wanted = [row[: row.index(end) + 1] if end in row else row for row in transformers_text("llama")]
    assert [row for rows in ranks(2).run(on_rank, PROMPTS) for row in rows] == wanted


# ------------------------------------------------------------------ what is refused


def test_all_ranks_refuse_what_one_cannot_do() -> None:
    generator, specs = generator_of("llama", 2, 1, 1)
    blocks = [fs.shard(model_of("llama").params, specs, generator.mesh)] * 2

    def call(mine: list[Rows], **how: Any) -> Callable[[], Any]:
        def run(rank: int) -> Any:
            return generator(
                blocks[rank], mine[rank], **{"new_tokens": NEW, **how.get(str(rank), {}), **rest}
            )

        rest = {n: v for n, v in how.items() if n not in ("0", "1")}
        return lambda: fs.simulate(generator.mesh, run)

    good = [[1, 2]]
    with pytest.raises(ConfigError, match=r"rank 1: prompt 0: 19 tokens and 10 new ones are more than 28\n"):
        call([good, [[3] * 19]])()
    with pytest.raises(
        ConfigError, match=r"(?s)rank 0: no prompts.*rank 1: prompt 0: tokens are from 0 to 60"
    ):
        call([[], [[61]]])()
    with pytest.raises(ConfigError, match=r"rank 1: new_tokens=3, .*; rank 0: new_tokens=10, "):
        call([good, good], **{"1": {"new_tokens": 3}})()
    with pytest.raises(ConfigError, match=r"(?s)temperature=-1.*top_k=-2.*top_p=0.*new_tokens=0"):
        call([good, good], temperature=-1, top_k=-2, top_p=0, new_tokens=0)()
    with pytest.raises(ConfigError, match=r"size=33: .* the model was made for 32"):
        Generator.of(model_of("llama"), specs, generator.mesh, size=33)
    broken = {p: v.detach().clone() for p, v in model_of("llama").params.items()}
    broken["model.norm.weight"].fill_(float("nan"))
    blocks = [fs.shard(broken, specs, generator.mesh)] * 2
    with pytest.raises(FloatingPointError, match=r"logits on 2 rank\(s\) are not finite"):
        call([good, good])()
