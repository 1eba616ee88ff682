"""Samples: what the model says to held-out prompts, before and after it is tuned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.configs.train import RunConfig
from experiments.data.pieces import TextPiece, encode_all
from experiments.data.tokenizer import Tokenizer
from experiments.finetune.dataset import Example
from experiments.finetune.generate import Generator
from experiments.training.sample import safe

SHOWN = 4  # held-out prompts


@dataclass(frozen=True)
class Shown:
    """Prompts whose answers people see; greedy, so that two answers differ by the model alone."""

    generator: Generator
    tokenizer: Tokenizer
    examples: Sequence[Example]
    tokens: int

    def answers(self, params: object) -> list[str]:
        """The model's answers, on every rank; all ranks call it together, each with the same prompts."""
        if not self.examples:
            return []
        made = self.generator(
            params, [e.prompt for e in self.examples], self.tokens, eos=self.tokenizer.stops
        )
        return [self.tokenizer.decode(row) for row in made]

    def table(self, before: Sequence[str], after: Sequence[str]) -> str:
        """Prompts with both answers and their authors' own, as people read it."""
        lines = []
        for example, old, new in zip(self.examples, before, after, strict=True):
            prompt = self.tokenizer.decode(example.prompt)
            own = self.tokenizer.decode(example.answer) or "-"
            lines.append(f"{safe(prompt)}")
            lines += [f"  {name:<7} {_line(text)}" for name, text in
                      (("before:", old), ("after:", new), ("author:", own))]  # fmt: skip
            lines.append("")
        return "\n".join(lines)


def _line(text: str) -> str:
    return safe(text).replace("\n", "\\n")


def examples_of(
    run: RunConfig, tokenizer: Tokenizer, held_out: Sequence[Example], limit: int | None, chat: bool = False
) -> list[Example]:
    """The held-out prompts, and behind them the one that `run.prompt` names; none if no token is asked for.

    Args:
        chat: the model learns conversations: `run.prompt` is a user's message, in the chat template.
        limit: tokens that the model was made for; of longer prompts the end is shown.
    """
    if not run.sample_tokens:
        return []
    extra = []
    if run.prompt is not None:
        begin = [] if tokenizer.bos is None else [TextPiece(tokenizer.bos, False)]
        plain = [*begin, TextPiece(run.prompt, False)]
        pieces = tokenizer.opening([{"role": "user", "content": run.prompt}]) if chat else plain
        ((tokens, _),) = encode_all(tokenizer, [pieces])
        extra = [Example(tokens.tolist(), [])]
    most = None if limit is None else max(1, limit - run.sample_tokens)
    return [replace(e, prompt=e.prompt if most is None else e.prompt[-most:]) for e in (*held_out, *extra)]


def generator_size(examples: Sequence[Example], tokens: int) -> int:
    """Places for keys and values that these prompts and their answers take."""
    return max([len(e.prompt) for e in examples], default=2) + tokens
