"""Learning from rewards: the leaves that train answer prompts, and their answers make a step's batch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fnshard as fs
from experiments.data.loader import order
from experiments.data.prepared import Prepared
from experiments.data.tokenizer import DirectoryTokenizer
from experiments.lib.checks import ConfigError
from experiments.lib.task import make_target
from experiments.tuning.config import FinetuneConfig
from experiments.tuning.dataset import DOCUMENTS, Example, FinetuneData, pack
from experiments.tuning.environment import Answer, Environment, Play, Turn
from experiments.tuning.lm import LanguageModel
from experiments.tuning.method import Tuning
from experiments.tuning.objectives import make_values
from experiments.tuning.rewards import Weighted, make_rewards, run_reward
from experiments.tuning.rollout import TOGETHER, Answers, Rollouts, make_first_draw, make_next_draws
from fnshard.losses import IGNORE
from fnshard.losses.policy import gae, group_advantages

AT_ONCE = 256  # the most answers that a rank draws at once


@dataclass(frozen=True)
class RewardedData:
    """Prompts of both sides of the data, and the shape of a batch.

    Args:
        ranks: the number of ranks along the data axes.
        multiple: the number that divides a batch's width.
        device: the device of a reward model.
    """

    config: FinetuneConfig
    data: FinetuneData
    ranks: int
    multiple: int
    device: torch.device

    @property
    def answers(self) -> int:
        """Count this rank's answers in a step."""
        return self.config.data.rows // self.ranks * self.config.objective.group

    @property
    def reward_names(self) -> list[str]:
        """Return the names of rewards if there are several."""
        return [each.name for each in self.rewards] if len(self.rewards) > 1 else []

    @cached_property
    def rewards(self) -> tuple[Weighted, ...]:
        """Return the configuration's rewards. There are none if a teacher or an environment says what is
        better."""
        if self.config.objective.kind.teacher or self.environment is not None:
            return ()
        return make_rewards(self.config.objective.reward, self.device)

    @cached_property
    def environment(self) -> Environment | None:
        """Return the function that talks with the model, if there is one."""
        chosen = self.config.objective.environment
        return None if chosen is None else make_target("objective.environment", chosen, partly=True)

    @cached_property
    def longest(self) -> int:
        """Count the tokens of the longest prompt. In a talk an answer leaves so many of the context."""
        if self.environment is not None:
            return self.config.data.context + 1 - self.config.objective.tokens
        return max(map(self.data.longest_prompt, (self.data.train, self.data.held_out)))

    @property
    def width(self) -> int:
        """Count the positions of a row, which hold the prompt and the answer but for its last token."""
        wide = self.longest + self.config.objective.tokens - 1
        return -(-wide // self.multiple) * self.multiple

    def check(self, lm: LanguageModel) -> None:
        """Check that prompts leave room for an answer."""
        most = self.config.objective.tokens
        if lm.context is not None and self.longest + most > lm.context:
            raise ConfigError(
                f"a prompt has {self.longest} tokens, an answer may have objective.tokens={most}, and "
                f"{lm.context} is what the model was made for. Fix: fewer tokens, or leave such prompts out."
            )

    @property
    def micro_rows(self) -> int | None:
        """Return the rows of a micro-batch if there is a budget of tokens."""
        return None if self.config.data.tokens is None else 1

    def blank(self) -> Mapping[str, Tensor]:
        """Make an empty batch of the usual shape. With packed answers it has two micro-batches."""
        rows = self.blank_rows()
        return rows if self.micro_rows is None else self.pack_answers(rows, [], [[], []])

    def rows_of(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the answers that share each row of the budget, by the positions that they take."""
        return pack(np.array(lengths, np.int64), self.config.data.tokens, self.most)

    @property
    def most(self) -> int:
        """Count the answers, or turns, that may share a row of the budget."""
        return min(self.answers * (1 if self.environment is None else self.config.objective.turns), DOCUMENTS)

    def pack_answers(
        self, batch: Mapping[str, Any], lengths: Sequence[int], rows: Sequence[Sequence[int]]
    ) -> Mapping[str, Any]:
        """Pack a padded batch of answers as `objectives.policy_gradient` takes them.

        Args:
            batch: a padded batch. Its `answers`, if it has any, mark those that count in the means of
                rewards and lengths; otherwise all do.
            lengths: the positions of each answer, with its prompt.
            rows: a result of `rows_of`, perhaps with some empty rows.
        """
        shape, most = (len(rows), self.config.data.tokens), self.most
        names = ("tokens", "targets", "sampler", "entropy", "advantages", "positions", "documents")
        floats = ("sampler", "entropy", "advantages")
        made = {n: torch.zeros(shape, dtype=torch.float32 if n in floats else torch.int64) for n in names}
        made["targets"].fill_(IGNORE)
        every = torch.ones(len(batch["rewards"]), dtype=torch.bool)
        of_answers = {"rewards": batch["rewards"], "answers": batch.get("answers", every)}
        each = {name: torch.zeros(len(rows), most) for name in batch["each"]}
        kept = {name: torch.zeros(len(rows), most, dtype=of_answers[name].dtype) for name in of_answers}
        for row, numbers in enumerate(rows):
            start = 0
            for place, number in enumerate(numbers):
                here, length = slice(start, start + lengths[number]), lengths[number]
                for name in ("tokens", "targets", "sampler", "entropy"):
                    made[name][row, here] = batch[name][number, :length]
                made["advantages"][row, here] = batch["advantages"][number]
                made["positions"][row, here] = torch.arange(length)
                made["documents"][row, here] = place + 1
                for name, values in of_answers.items():
                    kept[name][row, place] = values[number]
                for name, values in batch["each"].items():
                    each[name][row, place] = values[number]
                start += length
            made["positions"][row, start:] = torch.arange(shape[1] - start)
        return {**made, **kept, "each": each}

    def blank_rows(self) -> Mapping[str, Tensor]:
        """Make an empty padded batch, with a row for each answer."""
        shape, values = (self.answers, self.width), self.config.objective.kind.values
        floats = ["sampler", "entropy", *(["values", "returns"] if values else [])]
        return {
            **{name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "targets")},
            **{name: torch.zeros(shape) for name in floats},
            "advantages": torch.zeros(shape if values else (self.answers, 1)),
            "rewards": torch.zeros(self.answers),
            "each": {f"reward_{name}": torch.zeros(self.answers) for name in self.reward_names},
        }


@dataclass(frozen=True)
class RewardedBatches:
    """A maker of a step's batches, which also measures the held-out data. All ranks call its methods
    together.

    Args:
        prompts: the prompts, the rewards and the shape of a batch.
        exchange: sends one string of each rank to all.
        gather: makes the leaves that answers are drawn from of those of a step.
        gathered: the bytes of the former on a rank, all at once; None if a layer is gathered at a time.
        values: gives the values of a batch's tokens, if the objective has a value head.
        kept: the batch that was drawn last, and the step that it was drawn for.
    """

    prompts: RewardedData
    rollouts: Rollouts
    rewards: tuple[Weighted, ...]
    mesh: fs.Mesh
    exchange: Callable[[str], list[str]]
    gather: Callable[[Any], Any]
    gathered: int | None = None
    values: Any = None
    kept: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        how = "gathering the model a layer at a time"
        if self.gathered is not None:
            how = f"holding the whole model meanwhile, {self.gathered / 1e6:.1f} MB"
        return f"answers: each rank draws {self.rollouts.rows} at a time, {how}"

    def batch(self, state: fs.TrainState, numbers: Tensor) -> Mapping[str, Tensor]:
        """Draw answers to prompts, reward them, and lay them out as `objectives.policy_gradient` takes them.

        `objective.updates` steps learn from the same answers. A run that was stopped between two of these
        draws answers anew for the rest of them, from what it has learned.
        """
        updates, step = self.prompts.config.objective.updates, int(state.step)
        first = step - step % updates
        if updates == 1 or self.kept.get("step") != first:
            self.kept.update(
                step=first, batch=self._draw(state.params, first, numbers, self.prompts.data.train)
            )
        return self.kept["batch"]

    def held_out_batches(self, params: Any) -> Iterator[Mapping[str, Tensor]]:
        """Yield batches of answers to held-out prompts, equally many on every rank."""
        data, rows = self.prompts.config.data, self.prompts.config.data.rows
        held_out, part = self.prompts.data.held_out, rows // self.mesh.data_size
        for low in range(0, max(1, min(data.held_out_rows, held_out.records) // rows) * rows, rows):
            start = low + self.mesh.data_rank * part
            mine = order(held_out.records, 0, start, start + part)
            yield self._draw(params, 0, torch.from_numpy(mine), held_out)

    def _draw(self, params: Any, step: int, numbers: Tensor, source: Prepared) -> Mapping[str, Tensor]:
        """Make a batch of answers to the prompts of these numbers.

        Random numbers depend on the run's seed, the step and the prompt. So they are the same on any mesh,
        and after a restart.

        Args:
            source: the side of the data that has the prompts.
        """
        config, data, blocks = self.prompts.config, self.prompts.data, params
        group = config.objective.group
        if self.prompts.environment is not None:
            return self._lay_out_turns(
                *self._play(self.gather(blocks), step, numbers.tolist(), group, source)
            )

        # The model answers each prompt several times; what it was gathered into is freed before the update.
        examples = [data.example(source, n) for n in numbers.tolist() for _ in range(group)]
        drawn = [self._draw_numbers(step, n, group) for n in numbers.tolist()]
        params = self.gather(blocks)
        answers = self.rollouts(params, [e.prompt for e in examples], torch.cat(drawn))
        del params

        # Each reward gives each answer a number, and their weighted sum counts.
        each = self._reward_answers(examples, answers, [example.row for example in examples])
        rewards = torch.zeros(len(examples))
        for own in self.rewards:
            rewards = rewards + torch.tensor(each[own.name]) * own.weight
        shown = {f"reward_{name}": torch.tensor(values) for name, values in each.items()}
        rows = self._lay_out_answers(examples, answers)
        batch = {**rows, "rewards": rewards, "each": shown if len(each) > 1 else {}}

        # Advantages: from a value head, or by comparison within the group.
        if self.values is not None:
            return {**batch, **self._estimate_advantages(blocks, batch)}
        advantages = group_advantages(rewards, group, scale=config.objective.name != "dr_grpo")
        batch = {**batch, "advantages": advantages[:, None]}
        if self.prompts.micro_rows is None:
            return batch
        both = zip(examples, answers.lengths.tolist(), strict=True)
        return self._pack(batch, [len(example.prompt) + drawn - 1 for example, drawn in both])

    def _pack(self, batch: Mapping[str, Any], lengths: Sequence[int]) -> Mapping[str, Any]:
        """Pack answers into as many micro-batches as the rank that needs most of them."""
        rows = self.prompts.rows_of(lengths)
        # Each micro-batch has collectives, so that all ranks need as many; empty rows make up for the rest.
        most = max(map(int, self.exchange(str(len(rows)))))
        return self.prompts.pack_answers(batch, lengths, [*rows, *[[]] * (most - len(rows))])

    def _play(
        self, params: Any, step: int, numbers: Sequence[int], group: int, source: Prepared
    ) -> tuple[list[Turn], list[float]]:
        """Play `group` rollouts of each prompt. All ranks call it together."""
        config, data = self.prompts.config, self.prompts.data
        draws = {n: self._draw_numbers(step, n, group) for n in numbers}

        def draw(turns: Sequence[Turn]) -> list[Answer]:
            given = torch.zeros(len(turns), self.rollouts.length, dtype=torch.float64)
            for row, turn in enumerate(turns):
                n, place = numbers[turn.rollout // group], turn.rollout % group
                own = draws[n] if turn.number == 0 else self._draw_numbers(step, n, group, turn.number)
                given[row] = own[place]
            found = self.rollouts(params, [turn.prompt for turn in turns], given)
            texts = found.texts()
            return [
                (ids, found.logprobs[row, : len(ids)], found.entropy[row, : len(ids)])
                for row, ids in enumerate(texts)
            ]

        play = Play(
            self.prompts.environment, data.tokenizer, config.objective.turns, config.data.context,
            config.objective.tokens, config.run.timeout_s / 2,  # other ranks wait for this one meanwhile
        )  # fmt: skip
        examples = [data.example(source, n) for n in numbers for _ in range(group)]
        rows = [{**each.row, "prompt": _prompt_text(data.tokenizer, each.prompt)[0]} for each in examples]
        return play(rows, draw, lambda waits: "1" in self.exchange(str(int(waits))))

    def _lay_out_turns(self, turns: Sequence[Turn], rewards: Sequence[float]) -> Mapping[str, Any]:
        """Lay turns out as answers, each after what the model was shown.

        All turns of a rollout have its advantage, and its last one has its reward.
        """
        config, ends = self.prompts.config.objective, {turn.rollout: n for n, turn in enumerate(turns)}
        scale, each = config.name != "dr_grpo", torch.tensor(rewards, dtype=torch.float32)
        gains = group_advantages(each, config.group, scale=scale)
        shape = (len(turns), self.prompts.config.data.context)
        batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "targets")}
        batch["targets"].fill_(IGNORE)
        batch |= {name: torch.zeros(shape) for name in ("sampler", "entropy")}
        lengths = []
        for row, turn in enumerate(turns):
            ids, *floats = turn.answer
            whole, first = torch.tensor([*turn.prompt, *ids]), len(turn.prompt) - 1
            here = slice(first, len(whole) - 1)
            batch["tokens"][row, : len(whole) - 1] = whole[:-1]
            batch["targets"][row, here] = whole[first + 1 :]
            for name, values in zip(("sampler", "entropy"), floats, strict=True):
                batch[name][row, here] = values
            lengths.append(len(whole) - 1)
        of = torch.tensor([turn.rollout for turn in turns])
        last = torch.tensor([ends[turn.rollout] == n for n, turn in enumerate(turns)])
        batch |= {
            "advantages": gains[of][:, None], "rewards": torch.where(last, each[of], 0.0), "answers": last,
            "each": {},
        }  # fmt: skip
        return self._pack(batch, lengths)

    def _estimate_advantages(self, params: Any, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Compute the values before the step, and advantages and returns from them (GAE)."""
        values, mask = self.values(params, batch["tokens"]).cpu().float(), batch["targets"] != IGNORE
        # The reward comes with the last token of an answer.
        last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
        rewards = torch.where(last, batch["rewards"][:, None], 0.0)
        advantages, returns = gae(rewards, values, mask, lam=self.prompts.config.objective.lam)
        return {"values": values, "advantages": advantages, "returns": returns}

    def mean_rewards(self, params: Any) -> dict[str, float]:
        """Return the mean `reward` of answers to held-out prompts over all ranks.

        Answers are drawn as in training, and the reward is the weighted sum that training counts. If that has
        several parts, each is returned as `reward_NAME`.
        """
        data, most = self.prompts.data, self.prompts.config.data.held_out_rows
        numbers = order(data.held_out.records, 0, 0, min(most, data.held_out.records))
        mine = numbers[self.mesh.data_rank :: self.mesh.data_size]
        if self.prompts.environment is not None:
            _, rewards = self._play(self.gather(params), 0, mine.tolist(), 1, data.held_out)
            every = list(map(float, self.exchange(str(math.fsum(rewards)))))
            return {"reward": math.fsum(every) * self.mesh.data_size / self.mesh.size / len(numbers)}
        examples = [data.example(data.held_out, int(n)) for n in mine]
        drawn = torch.cat([self._draw_numbers(0, int(n), 1) for n in mine] or [torch.zeros(0, 0)])
        answers = self.rollouts(self.gather(params), [e.prompt for e in examples], drawn)
        found = self._reward_answers(examples, answers, [example.row for example in examples])
        sums = {name: math.fsum(values) for name, values in found.items()}
        every = list(map(json.loads, self.exchange(json.dumps(sums))))
        ranks = self.mesh.size // self.mesh.data_size  # the number of ranks that hold the same rows
        means = {name: math.fsum(each[name] for each in every) / ranks / len(numbers) for name in sums}
        whole = math.fsum(own.weight * means[own.name] for own in self.rewards)
        parts = {f"reward_{name}": value for name, value in means.items()} if len(means) > 1 else {}
        return {"reward": whole, **parts}

    def _draw_numbers(self, step: int, prompt: int, group: int, turn: int = 0) -> Tensor:
        """Return the numbers by which answers to a prompt are drawn, fp64 [group, tokens of an answer]."""
        draw = np.random.default_rng([self.prompts.config.run.seed, step, prompt, *([turn] if turn else [])])
        return torch.from_numpy(draw.random((group, self.rollouts.length)))

    def _reward_answers(
        self, examples: Sequence[Example], answers: Answers, records: Sequence[Mapping[str, Any]]
    ) -> dict[str, list[float]]:
        """Reward answers, and return the numbers by name of the reward.

        Args:
            records: the records of the prompts, as `Prepared.row_of` returns them.
        """
        if not examples:
            return {own.name: [] for own in self.rewards}
        tokenizer, ends = self.prompts.data.tokenizer, self.rollouts.stops
        plain = lambda ids: tokenizer.decode([t for t in ids if t not in ends])  # noqa: E731
        drawn = answers.texts()
        prompts, rows = [], []
        for example, ids, record in zip(examples, drawn, records, strict=True):
            prompt, is_rendered = _prompt_text(tokenizer, example.prompt)
            row = {"response": plain(example.answer), **record, "prompt": prompt}
            if is_rendered:
                row.setdefault("messages", None)
            if row.get("messages"):
                said = tokenizer.decode([t for t in ids if t not in ends], control=True)
                row["conversation"] = [*row["messages"], {"role": "assistant", "content": said}]
            elif is_rendered:
                row["conversation"] = prompt + tokenizer.decode(ids, control=True)
            prompts.append(prompt)
            rows.append(row)
        texts = {False: list(map(plain, drawn)), True: [tokenizer.decode(ids, control=True) for ids in drawn]}
        return {own.name: run_reward(own.reward, prompts, texts[own.control], rows) for own in self.rewards}

    def _lay_out_answers(self, examples: Sequence[Example], answers: Answers) -> Mapping[str, Tensor]:
        """Lay answers out in padded rows, each behind its prompt, with its own tokens as targets."""
        batch = self.prompts.blank_rows()
        batch["targets"].fill_(IGNORE)
        for row, (example, tokens) in enumerate(zip(examples, answers.texts(), strict=True)):
            whole, first = torch.tensor([*example.prompt, *tokens]), len(example.prompt) - 1
            batch["tokens"][row, : len(whole) - 1] = whole[:-1]
            batch["targets"][row, first : len(whole) - 1] = whole[first + 1 :]
            for name, values in (("sampler", answers.logprobs), ("entropy", answers.entropy)):
                batch[name][row, first : len(whole) - 1] = values[row, : len(tokens)]
        return batch


def make_rewarded_batches(
    of: RewardedData, tuning: Tuning, step: Any, specs: Any, mesh: fs.Mesh, how: Mapping[str, Any]
) -> RewardedBatches:
    """Make batches with compiled forwards of the step's own leaves.

    Args:
        how: options of `fs.shard_forward`.
    """
    config, stops = of.config.objective, frozenset(of.data.tokenizer.stops)
    slots, exchange = of.longest + config.tokens, step.gather_strings
    size = sum(leaf.nbytes for leaf in fs.tree.flatten_with_paths(tuning.params)[0].values())
    once = _may_hold_whole(size, mesh) if config.gather_once is None else config.gather_once
    once = exchange(str(once)) == ["True"] * mesh.size
    whole = tuning.specs(mesh, of.config.precision, fs.presets.no_shard) if once else specs
    drawing, count = (config.temperature, config.top_p), min(TOGETHER, config.tokens)
    prefill = fs.shard_forward(tuning.policy(make_first_draw(tuning.lm, slots, *drawing)), whole, **how)
    decode = fs.shard_forward(tuning.policy(make_next_draws(tuning.lm, count, *drawing)), whole, **how)
    rollouts = Rollouts(
        prefill, decode, count, min(of.answers, AT_ONCE), of.longest, config.tokens, stops,
        (lambda text: [text]) if once else exchange, mesh.device,
    )  # fmt: skip
    values = fs.shard_forward(make_values(tuning), specs, **how) if config.kind.values else None
    gather = (lambda blocks: fs.reshard(blocks, specs, whole, mesh)) if once else (lambda blocks: blocks)
    return RewardedBatches(of, rollouts, of.rewards, mesh, exchange, gather, size if once else None, values)


def _prompt_text(tokenizer: DirectoryTokenizer, ids: Sequence[int]) -> tuple[str, bool]:
    """Return a prompt's text, and whether a chat template has rendered it.

    If so, its control tokens are spelled, since they say who speaks.
    """
    begin = len(tokenizer.begin) if tuple(ids[: len(tokenizer.begin)]) == tokenizer.begin else 0
    text = tokenizer.decode(ids[begin:])
    is_rendered = tokenizer.decode(ids[begin:], control=True) != text
    return (tokenizer.decode(ids, control=True), True) if is_rendered else (text, False)


def _may_hold_whole(size: int, mesh: fs.Mesh) -> bool:
    """Return whether a rank may hold the whole model, as that takes a quarter of its device at most."""
    if mesh.device_type == "cuda":
        return 4 * size <= torch.cuda.mem_get_info()[1]
    return 4 * size * mesh.size <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
