"""Scorer: log-probabilities of texts, and greedy answers, from sharded leaves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

import fnshard as fs
from experiments.data.chat import encode_chat_prompt
from experiments.data.images import KINDS, Picture
from experiments.data.tokenizer import DirectoryTokenizer
from experiments.evaluate.tasks import IMAGE, STOPS, Question, Task, grade_answer
from experiments.lib.checks import ConfigError
from experiments.lib.files import LineError
from experiments.tuning.lm import LanguageModel
from experiments.tuning.rollout import TOGETHER, Rollouts, make_first_draw, make_next_draws
from fnshard.losses import IGNORE

WIDTH = 64  # rows are as wide as this times a power of two, so that there are few programs
Pair = tuple[list[int], list[int]]  # the tokens of a context, and those that follow it


@dataclass(frozen=True)
class Scorer:
    """A model that scores and answers questions.

    All ranks call its methods together, with the same arguments, and each computes a part of the questions.

    Args:
        forward: compiles a function of the model's leaves for the leaves that are sharded.
        rows: the rows that a rank computes at once.
        tokens: the most tokens of a generated answer.
    """

    lm: LanguageModel
    tokenizer: DirectoryTokenizer
    mesh: fs.Mesh
    forward: Callable[[Callable[..., Any]], Any]
    rows: int = 16
    tokens: int = 256
    _programs: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def results(self, params: Any, task: Task, done: set[int] = frozenset()) -> Iterator[tuple[int, dict]]:
        """Yield `(number, {metric: 1 or 0})` for this rank's questions, as they are answered.

        Args:
            done: the numbers of questions that are left out.
        """
        open_numbers = [n for n in range(len(task.questions)) if n not in done]
        with_choices = [n for n in open_numbers if task.questions[n].choices]
        without = [n for n in open_numbers if not task.questions[n].choices]
        yield from self._score_choices(params, task, with_choices)

        # Questions without choices are answered by greedy texts, which are graded.
        prompts = [task.questions[number].prompt for number in without]
        for place, answer in self.answers(params, prompts, self.tokens):
            for stop in STOPS:
                answer = answer.split(stop)[0]
            question = task.questions[without[place]]
            yield without[place], {**grade_answer(question, answer), "answer": answer}

    def logprobs(
        self,
        params: Any,
        groups: Sequence[Sequence[Pair]],
        pictures: Sequence[Sequence[Picture]] | None = None,
    ) -> Iterator[tuple[int, list[tuple[float, bool]]]]:
        """Yield the number of each of this rank's groups with the scores of its pairs.

        A score is the log-probability of what follows the context, and whether that is the likeliest.

        Args:
            pictures: the images of each group, whose contexts have the tokens of their features; None if no
                group has any.
        """
        rows = max([self.rows, *map(len, groups)])
        lengths = [max(len(a) + len(b) for a, b in group) - 1 for group in groups]
        for width, mine in self._make_rounds(lengths, [len(group) for group in groups], rows):
            # Each pair is a row, whose targets are the tokens that follow its context. If it is too long, the
            # end of it counts.
            tokens = torch.zeros(rows, width, dtype=torch.int64)
            targets = torch.full_like(tokens, IGNORE)
            for row, (context, after) in enumerate(pair for number in mine for pair in groups[number]):
                whole = torch.tensor([*context, *after][-width - 1 :])
                last = len(whole) - 1
                first = max(0, last - len(after))
                tokens[row, :last] = whole[:-1]
                targets[row, first:last] = whole[first + 1 :]
            # All rows of a program have images or none has, so padding gets empty ones.
            images, size = (), None
            if pictures is not None:
                seen = [pictures[number] for number in mine for _ in groups[number]]
                seen += [()] * (rows - len(seen))
                images = (self.lm.vision.rows(self.tokenizer.images, seen, tokens),)
                size = images[0]["pixels"].shape
            run = self._compile_once((width, size), _make_scores)
            logprobs, are_likeliest = run(params, tokens, targets, *images)
            # The rows of a group follow each other; those at the end are padding.
            scores = iter(zip(logprobs.tolist(), are_likeliest.tolist(), strict=True))
            for number in mine:
                yield number, list(islice(scores, len(groups[number])))

    def answers(self, params: Any, prompts: Sequence[str], tokens: int) -> Iterator[tuple[int, str]]:
        """Yield the number of each of this rank's prompts with a greedy answer."""
        most = (self.lm.context or 2**31) - tokens
        encoded = [self.encode(prompt)[-most:] for prompt in prompts]
        stops, count = frozenset(self.tokenizer.stops), min(TOGETHER, tokens)
        for wide, mine in self._make_rounds(list(map(len, encoded)), [1] * len(encoded), self.rows):
            # The answer has to fit behind the prompt. A temperature of 0 takes the likeliest token.
            width = min(wide, most)
            decode = self._compile_once(width, make_next_draws, count, 0.0, 1.0)
            first = self._compile_once(width, make_first_draw, width + tokens, 0.0, 1.0)
            rollouts = Rollouts(
                first, decode, count, self.rows, width, tokens, stops, decode.gather_strings, self.mesh.device
            )
            unused = torch.zeros(len(mine), tokens, dtype=torch.float64)
            drawn = rollouts(params, [encoded[number] for number in mine], unused)
            for number, row in zip(mine, drawn.texts(), strict=True):
                yield number, self.tokenizer.decode([t for t in row if t not in stops])

    def encode(self, text: str) -> list[int]:
        """Encode a text that begins a row, as the model's tokenizer does."""
        return [*self.tokenizer.begin, *self.tokenizer.encode(text)]

    def pair(self, context: str, after: str) -> Pair:
        """Encode a context and what follows it. Blanks at the end of the context belong to what follows.

        If a token would span the two, what follows is encoded alone, so that all of it is scored and nothing
        of the context.
        """
        kept = context.rstrip()
        whole, first = self.encode(context + after), self.encode(kept)
        if whole[: len(first)] == first and len(whole) > len(first):
            return first, whole[len(first) :]
        return first, self.tokenizer.encode_after(context[len(kept) :] + after)

    def _score_choices(self, params: Any, task: Task, numbers: Sequence[int]) -> Iterator[tuple[int, dict]]:
        """Answer questions by their likeliest choice: 1 if that is right, else 0."""
        asked = [task.questions[number] for number in numbers]
        if any(question.images for question in asked):
            if wrong := find_misfits(task, self.lm, self.tokenizer, self.tokens):
                raise ConfigError("\n".join(wrong))
            pictures = [question.images for question in asked]
            groups = [
                self._pairs_of_images(q, f"{task.name}: question {number + 1}")
                for number, q in zip(numbers, asked, strict=True)
            ]
        else:
            pictures = None
            groups = [[self.pair(q.prompt, f" {choice}") for choice in q.choices] for q in asked]
        for place, found in self.logprobs(params, groups, pictures):
            # The likeliest choice as a whole, and by its mean for a character (long choices are less likely).
            question, wholes = asked[place], [logprob for logprob, _ in found]
            means = [p / len(choice) for p, choice in zip(wholes, question.choices, strict=True)]
            best = {"acc": wholes.index(max(wholes)), "acc_norm": means.index(max(means))}
            yield numbers[place], {metric: float(n == question.answer) for metric, n in best.items()}

    def _pairs_of_images(self, question: Question, name: str) -> list[Pair]:
        """Encode a question as a user of a chat asks it, with each of its choices.

        The question has the tokens of its images' features.

        Raises:
            ConfigError: an image cannot be opened, the chat template does not show a text, or there are more
                tokens than the model was made for.
        """
        first, *texts = question.prompt.split(IMAGE)
        content = [{"type": "text", "text": first}]
        for text in texts:
            content += [{"type": "image"}, {"type": "text", "text": text}]
        content = [part for part in content if part["type"] == "image" or part["text"]]
        try:
            user = {"role": "user", "content": content}
            context = encode_chat_prompt(self.tokenizer, [user], pictures=question.images)
        except LineError as error:
            raise ConfigError(f"{name}: {error}.") from None
        pairs = [(context, self.tokenizer.encode_after(choice)) for choice in question.choices]
        longest = max(len(context) + len(after) for context, after in pairs) - 1
        if self.lm.context is not None and longest > self.lm.context:
            raise ConfigError(
                f"{name} takes {longest} tokens with its {len(question.images)} images, and the model was "
                f"made for {self.lm.context}. Fix: leave it out, or make its images smaller."
            )
        return pairs

    def _compile_once(self, shape: Any, make: Callable[..., Callable[..., Any]], *how: float) -> Any:
        """Return the program of a shape, which is compiled once, however often a model is measured.

        Each shape has its own program, since one that meets another shape warns its user, who can do nothing
        about it.
        """
        key = shape, make, how
        if key not in self._programs:
            self._programs[key] = self.forward(make(self.lm, *how))
        return self._programs[key]

    def _make_rounds(
        self, lengths: Sequence[int], sizes: Sequence[int], rows: int
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield a width, and this rank's numbers, whose sizes add up to `rows` at most.

        The longest are first, so that memory that suffices for these suffices for all.
        """
        waiting = deque(sorted(range(len(lengths)), key=lambda number: -lengths[number]))
        while waiting:
            # The width of the longest one: few widths, so few programs, and none beyond the model's context.
            width, ranks = WIDTH, []
            while width < lengths[waiting[0]]:
                width *= 2
            width = min(width, self.lm.context or width)
            # All ranks divide the numbers in the same way, and each takes its part, which may be empty.
            for _ in range(self.mesh.data_size):
                ranks.append([])
                room = rows
                while waiting and sizes[waiting[0]] <= room:
                    room -= sizes[waiting[0]]
                    ranks[-1].append(waiting.popleft())
            yield width, ranks[self.mesh.data_rank]


def find_misfits(task: Task, lm: LanguageModel, tokenizer: DirectoryTokenizer, tokens: int) -> list[str]:
    """Return why a model cannot answer a task's questions, if it cannot.

    It may not see their images, have no room for an answer, or have a tokenizer without tokens for a choice.
    """
    if (lm.vision is None or tokenizer.images is None) and any(q.images for q in task.questions):
        kinds = ", ".join(KINDS)
        return [
            f"{task.name}: its questions have images, and the model does not see. Fix: a model of {kinds}."
        ]
    chosen = [choice for question in task.questions for choice in question.choices]
    if not chosen and lm.context is not None and tokens >= lm.context:
        return [
            f"{task.name}: tokens={tokens} leaves no room for a question in the model's {lm.context} "
            f"positions. Fix: tokens={lm.context // 2}."
        ]
    texts = list(dict.fromkeys(chosen))
    if not texts:
        return []
    empty = [text for text, ids in zip(texts, tokenizer.encode_many(texts), strict=True) if not len(ids)]
    return [f"{task.name}: the tokenizer of the model has no tokens for {text!r:.60}" for text in empty[:5]]


def _make_scores(lm: LanguageModel) -> Callable[..., tuple[Tensor, Tensor]]:
    """Make `fn(params, tokens [B, T], targets [B, T], images) -> (fp32 [B], bool [B])`.

    `images` are a result of `Vision.rows`, or left out.
    """

    def fn(params: Any, tokens: Tensor, targets: Tensor, images: Any = None) -> tuple[Tensor, Tensor]:
        hidden = lm.hidden(params, tokens, images=images)
        likeliest = lm.unembed(params, hidden).argmax(-1) == targets
        return -lm.losses(params, hidden, targets).sum(1), (likeliest | (targets == IGNORE)).all(1)

    return fn
