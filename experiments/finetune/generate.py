"""Text from a language model, sharded: one program for prompts, one for each further token.

Keys and values are kept in places of a fixed number, so that both are compiled once (the first one again for
prompts of twice the length, and so on).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fnshard as fs
from experiments.configs.train import ConfigError
from experiments.finetune.cache import DecodeCache, KeyValues, PromptCache
from experiments.finetune.lm import LanguageModel
from fnshard import tree
from fnshard.errors import report
from fnshard.runtime.collectives.base import Collectives
from fnshard.runtime.collectives.connect import connection
from fnshard.step.forward import Forward

SHORTEST = 16  # tokens of a prompt are padded to this, or to the next power of two
PROGRAMS = 32  # that are kept compiled: prompts of other lengths, other numbers of rows

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def prefill(lm: LanguageModel, size: int) -> Callable[..., tuple[Tensor, KeyValues]]:
    """`fn(params, tokens [B, T], last [B]) -> logits [B, V], kept`: what follows each row's last token.

    Rows are padded at the end: attention is causal, so nothing attends to it.

    Args:
        size: places for keys and values.
    """

    def fn(params: Any, tokens: Tensor, last: Tensor) -> tuple[Tensor, KeyValues]:
        cache = PromptCache(size)
        hidden = lm.run(params, tokens, None, None, cache)  # [B, T, D]
        index = last[:, None, None].expand(-1, 1, hidden.shape[2])
        return lm.unembed(params, hidden.gather(1, index))[:, 0].float(), cache.kept

    return fn


def decode(lm: LanguageModel) -> Callable[..., tuple[Tensor, KeyValues]]:
    """`fn(params, tokens [B, 1], positions [B, 1], kept) -> logits [B, V], kept`: one more token a row."""

    def fn(params: Any, tokens: Tensor, positions: Tensor, kept: KeyValues) -> tuple[Tensor, KeyValues]:
        cache = DecodeCache(kept, positions)
        size = cache.get_mask_sizes(1, int(next(iter(kept))))[0]
        distance = positions[:, None, :, None] - torch.arange(size, device=tokens.device)  # [B, 1, 1, S]
        mask = lm.by_kind(params, distance >= 0, distance, size)
        hidden = lm.run(params, tokens, positions, mask, cache)  # [B, 1, D]
        return lm.unembed(params, hidden)[:, 0].float(), cache.kept

    return fn


@dataclass(frozen=True)
class Generator:
    """Makes text of prompts; made by `Generator.of`. All ranks call it together."""

    mesh: fs.Mesh
    size: int
    vocab: int
    prefill: Forward
    decode: Forward

    @classmethod
    def of(
        cls,
        lm: LanguageModel,
        specs: Any,
        mesh: fs.Mesh,
        *,
        size: int,
        backend: str = "inductor",
        wrap: Wrap = lambda fn: fn,
        **options: Any,
    ) -> Generator:
        """For a language model.

        Args:
            specs: of the tree that it is called with.
            size: tokens of a prompt and what follows it, together, at most.
            wrap: turns `fn(the model's leaves, ...)` into one of that tree:
                `lambda fn: with_adapters(fn, lora)`.
            options: further ones of `fs.shard_forward`.

        Raises:
            ConfigError: a size that is none, or more than the model was made for.
        """
        if size < 2 or (lm.context is not None and size > lm.context):
            limit = "" if lm.context is None else f", and the model was made for {lm.context}"
            raise ConfigError(f"size={size}: a prompt and what follows it are 2 tokens or more{limit}.")
        made = [
            fs.shard_forward(wrap(fn), specs, mesh=mesh, backend=backend, **{"cache": PROGRAMS, **options})
            for fn in (prefill(lm, size), decode(lm))
        ]
        return cls(mesh, size, lm.vocab, *made)

    def __call__(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        eos: int | Collection[int] | None = None,
    ) -> list[list[int]]:
        """What follows each prompt: at most `new_tokens` tokens, up to an `eos`, which is the last of them.

        Each rank has its own prompts (those along a tensor or context axis equal ones), best equally many
        every time: another number is compiled anew. What a row becomes does not depend on other rows.

        Args:
            params: this rank's stored blocks, or a TrainState.
            temperature: logits are divided by it; 0 takes the likeliest token.
            top_k: draw from so many of the likeliest alone; 0: from all.
            top_p: draw from the fewest that are this likely together.
            seed: of the draws; equal on all ranks. Rows draw apart.
            eos: the token, or tokens, that end a row.

        Raises:
            ConfigError: on all ranks, if a prompt on any is empty or too long, or what is asked differs.
            FloatingPointError: on all ranks, if logits on any are not finite.
        """
        ends = {eos} if isinstance(eos, int) else set(eos or ())
        draw = Draw(temperature, top_k, top_p)
        request = f"new_tokens={new_tokens}, {draw}, seed={seed}, eos={sorted(ends)}"
        counts = self._agree(request, self._problems(prompts, new_tokens, draw), len(prompts))
        first = sum(counts[r] for r in self.mesh.group_ranks(self.mesh.data_axes)[: self.mesh.data_rank])
        # By the number of a row among those of all ranks: the same text, however rows are dealt out.
        seeds = [(seed * 1_000_003 + first + i) % 2**63 for i in range(len(prompts))]
        chances = [torch.Generator().manual_seed(each) for each in seeds]
        rows: list[list[int]] = [[] for _ in prompts]
        logits, kept = self.prefill(params, *_unsplit(self._padded(prompts)))
        while True:
            finite = bool(logits.isfinite().all())
            picked = draw(logits.cpu(), chances) if finite else [0] * len(rows)
            for row, token in zip(rows, picked, strict=True):
                if not _ended(row, ends):
                    row.append(token)
            going = len(max(rows, key=len)) < new_tokens and not all(_ended(row, ends) for row in rows)
            if not self._anyone(going, finite):
                return rows
            # A row that has ended goes on with the others, at the place of its end; what it says is not read.
            place = [len(p) + len(r) - 1 for p, r in zip(prompts, rows, strict=True)]
            last = [row[-1] for row in rows]
            columns = self._column(last), self._column(place)
            logits, kept = self.decode(params, *_unsplit((*columns, kept)))

    def _problems(self, prompts: Sequence[Sequence[int]], new_tokens: int, draw: Draw) -> list[str]:
        wrong = draw.problems()
        if new_tokens < 1:
            wrong.append(f"new_tokens={new_tokens}: 1 or more")
        if not prompts:
            wrong.append("no prompts: every rank needs one")
        for i, prompt in enumerate(prompts):
            if not prompt:
                wrong.append(f"prompt {i} is empty")
            elif len(prompt) + new_tokens > self.size:
                wrong.append(
                    f"prompt {i}: {len(prompt)} tokens and {new_tokens} new ones are more than {self.size}"
                )
            elif not 0 <= min(prompt) <= max(prompt) < self.vocab:
                wrong.append(f"prompt {i}: tokens are from 0 to {self.vocab - 1}")
        return wrong

    def _agree(self, request: str, problems: list[str], rows: int) -> list[int]:
        """How many rows each rank has. All ranks refuse what one of them must: none waits for another."""
        text = json.dumps({"request": request, "problems": problems, "rows": rows})
        answers = [json.loads(each) for each in self._comm.gather_object(text)]
        wrong = [f"rank {rank}: {p}" for rank, each in enumerate(answers) for p in each["problems"]]
        wrong += [
            f"rank {rank}: {each['request']}; rank 0: {answers[0]['request']}"
            for rank, each in enumerate(answers)
            if each["request"] != answers[0]["request"]
        ]
        if wrong:
            raise ConfigError(report("no text can be made of this:", wrong, "mend it on the ranks named."))
        return [each["rows"] for each in answers]

    @property
    def _comm(self) -> Collectives:
        return connection(self.mesh, timeout=self.prefill.options.timeout)

    def _anyone(self, going: bool, finite: bool) -> bool:
        """Whether a row of any rank goes on."""
        flags = torch.tensor([float(going), float(not finite)], device=self.mesh.device)
        axes = self.mesh.ordered(self.mesh.names)
        if axes:
            flags = self._comm.all_reduce(flags, axes).wait()
        more, broken = flags.tolist()
        if broken:
            raise FloatingPointError(
                f"logits on {int(broken)} rank(s) are not finite: the weights are broken."
            )
        return more > 0

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Tokens [B, T], and where each row's last one is."""
        longest = max(map(len, prompts))
        length = min(max(SHORTEST, 1 << (longest - 1).bit_length()), self.size)
        tokens = torch.zeros(len(prompts), length, dtype=torch.int64)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(list(prompt))
        last = torch.tensor([len(p) - 1 for p in prompts])
        return tokens.to(self.mesh.device), last.to(self.mesh.device)

    def _column(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self.mesh.device)[:, None]


def _unsplit(values: Any) -> Any:
    """Tensors that a context axis does not split: prompts are of any length, later tokens come one by one."""
    return tree.map(lambda value: fs.Sequence(value, None), values)


def _ended(row: list[int], ends: Collection[int]) -> bool:
    return bool(row) and row[-1] in ends


@dataclass(frozen=True)
class Draw:
    """How a token is taken from logits; see `Generator`.

    >>> Draw(temperature=0.0)(torch.tensor([[0.0, 2.0, 1.0]]), [torch.Generator()])
    [1]
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def problems(self) -> list[str]:
        wrong = []
        if not 0 <= self.temperature < float("inf"):
            wrong.append(f"temperature={self.temperature}: 0 or more")
        if self.top_k < 0:
            wrong.append(f"top_k={self.top_k}: 1 or more, or 0 for all")
        if not 0 < self.top_p <= 1:
            wrong.append(f"top_p={self.top_p}: above 0, and 1 at most")
        return wrong

    def __call__(self, logits: Tensor, chances: Sequence[torch.Generator]) -> list[int]:
        """A token for each row of [B, V], drawn by its own generator."""
        if self.temperature == 0:
            return logits.argmax(-1).tolist()
        ordered, tokens = (logits / self.temperature).sort(dim=-1, descending=True, stable=True)
        weights = torch.softmax(ordered, -1)
        if self.top_k:
            weights[:, self.top_k :] = 0
        # As transformers: k first, then p of what is left; a token stays while those before it are not p.
        weights /= weights.sum(-1, keepdim=True)
        weights = weights.masked_fill(weights.cumsum(-1) - weights >= self.top_p, 0)
        drawn = [torch.multinomial(w, 1, generator=c) for w, c in zip(weights, chances, strict=True)]
        return tokens.gather(1, torch.stack(drawn)).flatten().tolist()
