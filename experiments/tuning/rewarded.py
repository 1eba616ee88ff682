"""Learning from rewards: the model that is trained answers prompts, and its rewarded answers are the batch of
a step."""

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
        """Count the tokens of the longest prompt. In a talk that is all of the context but one answer."""
        if self.environment is not None:
            return self.config.data.context + 1 - self.config.objective.tokens
        return max(map(self.data.longest_prompt, (self.data.train, self.data.held_out)))

    @property
    def positions(self) -> int:
        """Count the positions of the longest prompt and answer. The model never reads an answer's last token,
        so it takes none."""
        return self.longest + self.config.objective.tokens - 1

    @property
    def width(self) -> int:
        """Count the positions of a row, which hold a prompt and its answer."""
        return -(-self.positions // self.multiple) * self.multiple

    def check(self, lm: LanguageModel) -> None:
        """Check that prompts leave room for an answer. In a talk they do wherever the context fits the
        model, since that is checked before each turn."""
        if lm.context is not None and self.positions > lm.context:
            raise ConfigError(
                f"a prompt has {self.longest} tokens and an answer may have "
                f"objective.tokens={self.config.objective.tokens}: {self.positions} positions without its "
                f"last token, and {lm.context} is what the model was made for. Fix: fewer tokens, or leave "
                "such prompts out."
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
        # The values of positions, [rows, tokens].
        shape = (len(rows), self.config.data.tokens)
        names = ("tokens", "targets", "sampler", "entropy", "advantages", "positions", "documents")
        floats = ("sampler", "entropy", "advantages")
        packed = {n: torch.zeros(shape, dtype=torch.float32 if n in floats else torch.int64) for n in names}
        packed["targets"].fill_(IGNORE)

        # The values of answers, [rows, most].
        all_count = torch.ones(len(batch["rewards"]), dtype=torch.bool)
        of_answers = {"rewards": batch["rewards"], "answers": batch.get("answers", all_count)}
        shape_of_answers = (len(rows), self.most)
        by_answer = {n: torch.zeros(shape_of_answers, dtype=v.dtype) for n, v in of_answers.items()}
        each = {name: torch.zeros(shape_of_answers) for name in batch["each"]}

        # The answers of a row follow one another, without their padding.
        for row, numbers in enumerate(rows):
            start = 0
            for document, number in enumerate(numbers, 1):
                length = lengths[number]
                here = slice(start, start + length)
                for name in ("tokens", "targets", "sampler", "entropy"):
                    packed[name][row, here] = batch[name][number, :length]
                packed["advantages"][row, here] = batch["advantages"][number]
                packed["positions"][row, here] = torch.arange(length)
                packed["documents"][row, here] = document
                for name, values in of_answers.items():
                    by_answer[name][row, document - 1] = values[number]
                for name, values in batch["each"].items():
                    each[name][row, document - 1] = values[number]
                start += length
            packed["positions"][row, start:] = torch.arange(shape[1] - start)
        return {**packed, **by_answer, "each": each}

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
    """A maker of a step's batches, which also measures the held-out data.

    All ranks call its methods together.

    Args:
        prompts: the prompts, the rewards and the shape of a batch.
        exchange: sends one string of each rank to all.
        gather: turns the blocks of a step into the leaves that answers are drawn from.
        gathered: the bytes of the whole model if a rank holds it meanwhile; None if a layer is gathered at a
            time.
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
        steps draws new answers for the remaining ones, from the leaves of its checkpoint.

        Args:
            numbers: this rank's prompts, by their numbers in `data.train`. The loader gives all
                `objective.updates` steps the same ones.
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
        data, held_out = self.prompts.config.data, self.prompts.data.held_out
        rows = data.rows
        rows_per_rank = rows // self.mesh.data_size
        batches = max(1, min(data.held_out_rows, held_out.records) // rows)
        for low in range(0, batches * rows, rows):
            start = low + self.mesh.data_rank * rows_per_rank
            mine = order(held_out.records, 0, start, start + rows_per_rank)
            yield self._draw(params, 0, torch.from_numpy(mine), held_out)

    def _draw(self, params: Any, step: int, numbers: Tensor, source: Prepared) -> Mapping[str, Tensor]:
        """Make a batch of answers to the prompts of these numbers.

        The random numbers of an answer depend on the run's seed, the step and the prompt. So they are the
        same on any mesh, and after a restart.

        Args:
            source: the side of the data that has the prompts.
        """
        config, data = self.prompts.config, self.prompts.data
        group = config.objective.group
        if self.prompts.environment is not None:
            turns, rewards = self._play(self.gather(params), step, numbers.tolist(), group, source)
            return self._lay_out_turns(turns, rewards)

        # The model answers each prompt several times. The gathered leaves are freed before the update, which
        # needs their memory.
        examples = [data.example(source, n) for n in numbers.tolist() for _ in range(group)]
        uniform = [self._draw_numbers(step, n, group) for n in numbers.tolist()]
        gathered = self.gather(params)
        answers = self.rollouts(gathered, [each.prompt for each in examples], torch.cat(uniform))
        del gathered

        # Each reward gives each answer a number, and their weighted sum counts.
        each = self._reward_answers(examples, answers, [example.row for example in examples])
        rewards = torch.zeros(len(examples))
        for weighted in self.rewards:
            rewards = rewards + torch.tensor(each[weighted.name]) * weighted.weight
        shown = {f"reward_{name}": torch.tensor(values) for name, values in each.items()}
        rows = self._lay_out_answers(examples, answers)
        batch = {**rows, "rewards": rewards, "each": shown if len(each) > 1 else {}}

        # Advantages: from a value head, or by comparison within the group.
        if self.values is not None:
            return {**batch, **self._estimate_advantages(params, batch)}
        advantages = group_advantages(rewards, group, scale=config.objective.name != "dr_grpo")
        batch = {**batch, "advantages": advantages[:, None]}
        if self.prompts.micro_rows is None:
            return batch
        pairs = zip(examples, answers.lengths.tolist(), strict=True)
        return self._pack(batch, [len(example.prompt) + length - 1 for example, length in pairs])

    def _pack(self, batch: Mapping[str, Any], lengths: Sequence[int]) -> Mapping[str, Any]:
        """Pack answers into as many micro-batches as the rank that needs most of them."""
        rows = self.prompts.rows_of(lengths)
        # Each micro-batch has collectives, so all ranks need equally many. Ranks with fewer add empty rows.
        most = max(map(int, self.exchange(str(len(rows)))))
        rows = rows + [[] for _ in range(most - len(rows))]
        return self.prompts.pack_answers(batch, lengths, rows)

    def _play(
        self, params: Any, step: int, numbers: Sequence[int], group: int, source: Prepared
    ) -> tuple[list[Turn], list[float]]:
        """Play `group` rollouts of each prompt. All ranks call it together."""
        config, data = self.prompts.config, self.prompts.data
        first_numbers = {n: self._draw_numbers(step, n, group) for n in numbers}

        def draw(turns: Sequence[Turn]) -> list[Answer]:
            uniform = torch.zeros(len(turns), self.rollouts.length, dtype=torch.float64)
            for row, turn in enumerate(turns):
                n = numbers[turn.rollout // group]
                of_group = first_numbers[n]
                if turn.number > 0:
                    of_group = self._draw_numbers(step, n, group, turn.number)
                uniform[row] = of_group[turn.rollout % group]
            answers = self.rollouts(params, [turn.prompt for turn in turns], uniform)
            return [
                (ids, answers.logprobs[row, : len(ids)], answers.entropy[row, : len(ids)])
                for row, ids in enumerate(answers.texts())
            ]

        play = Play(
            self.prompts.environment, data.tokenizer, config.objective.turns, config.data.context,
            config.objective.tokens, config.run.timeout_s / 2,  # other ranks wait for this one meanwhile
        )  # fmt: skip
        examples = [data.example(source, n) for n in numbers for _ in range(group)]
        rows = [{**each.row, "prompt": _decode_prompt(data.tokenizer, each.prompt)[0]} for each in examples]
        return play(rows, draw, lambda waits: "1" in self.exchange(str(int(waits))))

    def _lay_out_turns(self, turns: Sequence[Turn], rewards: Sequence[float]) -> Mapping[str, Any]:
        """Lay turns out as answers, each after what the model was shown.

        All turns of a rollout have its advantage, and its last one has its reward.
        """
        config = self.prompts.config.objective
        by_rollout = torch.tensor(rewards, dtype=torch.float32)
        advantages = group_advantages(by_rollout, config.group, scale=config.name != "dr_grpo")

        # A row for each turn, with its answer as targets.
        shape = (len(turns), self.prompts.config.data.context)
        batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "targets")}
        batch["targets"].fill_(IGNORE)
        batch |= {name: torch.zeros(shape) for name in ("sampler", "entropy")}
        lengths = []
        for row, turn in enumerate(turns):
            ids, *floats = turn.answer
            whole, first = torch.tensor([*turn.prompt, *ids]), len(turn.prompt) - 1
            here = slice(first, len(whole) - 1)  # the positions that predict the answer
            batch["tokens"][row, : len(whole) - 1] = whole[:-1]
            batch["targets"][row, here] = whole[first + 1 :]
            for name, values in zip(("sampler", "entropy"), floats, strict=True):
                batch[name][row, here] = values
            lengths.append(len(whole) - 1)

        # Only the last turn of a rollout counts in the means of rewards and lengths.
        last_turns = {turn.rollout: n for n, turn in enumerate(turns)}
        rollout = torch.tensor([turn.rollout for turn in turns])
        is_last = torch.tensor([last_turns[turn.rollout] == n for n, turn in enumerate(turns)])
        batch |= {
            "advantages": advantages[rollout][:, None],
            "rewards": torch.where(is_last, by_rollout[rollout], 0.0), "answers": is_last, "each": {},
        }  # fmt: skip
        return self._pack(batch, lengths)

    def _estimate_advantages(self, params: Any, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Compute values by the leaves before the step, and advantages and returns from them (GAE)."""
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

        # Answer and reward this rank's prompts. A rank without any still takes part in the collectives.
        examples = [data.example(data.held_out, int(n)) for n in mine]
        uniform = torch.cat([self._draw_numbers(0, int(n), 1) for n in mine] or [torch.zeros(0, 0)])
        answers = self.rollouts(self.gather(params), [each.prompt for each in examples], uniform)
        by_reward = self._reward_answers(examples, answers, [example.row for example in examples])

        # Average each reward over the answers of all ranks.
        sums = {name: math.fsum(values) for name, values in by_reward.items()}
        every = list(map(json.loads, self.exchange(json.dumps(sums))))
        ranks = self.mesh.size // self.mesh.data_size  # the number of ranks that hold the same rows
        means = {name: math.fsum(each[name] for each in every) / ranks / len(numbers) for name in sums}
        whole = math.fsum(weighted.weight * means[weighted.name] for weighted in self.rewards)
        parts = {f"reward_{name}": value for name, value in means.items()} if len(means) > 1 else {}
        return {"reward": whole, **parts}

    def _draw_numbers(self, step: int, prompt: int, group: int, turn: int = 0) -> Tensor:
        """Return the numbers by which answers to a prompt are drawn, fp64 [group, tokens of an answer]."""
        seeds = [self.prompts.config.run.seed, step, prompt]
        if turn:
            seeds.append(turn)
        return torch.from_numpy(np.random.default_rng(seeds).random((group, self.rollouts.length)))

    def _reward_answers(
        self, examples: Sequence[Example], answers: Answers, records: Sequence[Mapping[str, Any]]
    ) -> dict[str, list[float]]:
        """Reward answers, and return the numbers by name of the reward.

        Args:
            records: the records of the prompts, as `Prepared.row_of` returns them.
        """
        if not examples:
            return {weighted.name: [] for weighted in self.rewards}
        tokenizer, stops = self.prompts.data.tokenizer, self.rollouts.stops
        drawn = answers.texts()

        def decode(ids: Sequence[int], *, control: bool = False) -> str:
            return tokenizer.decode([token for token in ids if token not in stops], control=control)

        # A reward is given the record, the texts of its prompt and response, and the conversation.
        prompts, rows = [], []
        for example, ids, record in zip(examples, drawn, records, strict=True):
            prompt, is_rendered = _decode_prompt(tokenizer, example.prompt)
            row = {"response": decode(example.answer), **record, "prompt": prompt}
            if is_rendered:
                row.setdefault("messages", None)
            if row.get("messages"):
                answer = {"role": "assistant", "content": decode(ids, control=True)}
                row["conversation"] = [*row["messages"], answer]
            elif is_rendered:
                row["conversation"] = prompt + tokenizer.decode(ids, control=True)
            prompts.append(prompt)
            rows.append(row)

        # A reward that reads control tokens gets the one that ends the answer, too.
        plain = [decode(ids) for ids in drawn]
        with_control = [tokenizer.decode(ids, control=True) for ids in drawn]
        numbers = {}
        for weighted in self.rewards:
            texts = with_control if weighted.control else plain
            numbers[weighted.name] = run_reward(weighted.reward, prompts, texts, rows)
        return numbers

    def _lay_out_answers(self, examples: Sequence[Example], answers: Answers) -> Mapping[str, Tensor]:
        """Lay answers out in padded rows, each after its prompt, with the answer's tokens as targets."""
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
    prompts: RewardedData, tuning: Tuning, step: Any, specs: Any, mesh: fs.Mesh, options: Mapping[str, Any]
) -> RewardedBatches:
    """Make batches with compiled forwards of the step's own leaves.

    Args:
        options: options of `fs.shard_forward`.
    """
    config, stops = prompts.config.objective, frozenset(prompts.data.tokenizer.stops)
    exchange = step.gather_strings

    # Ranks hold the whole model only if all of them can, since forwards of gathered leaves have no
    # collectives, and other ones do.
    size = sum(leaf.nbytes for leaf in fs.tree.flatten_with_paths(tuning.params)[0].values())
    is_whole = _can_hold_whole(size, mesh) if config.gather_once is None else config.gather_once
    is_whole = exchange(str(is_whole)) == ["True"] * mesh.size
    if is_whole:
        drawn_specs = tuning.specs(mesh, prompts.config.precision, fs.presets.no_shard)
        gather = lambda blocks: fs.reshard(blocks, specs, drawn_specs, mesh)  # noqa: E731
        agree = lambda text: [text]  # noqa: E731
    else:
        drawn_specs, gather, agree = specs, lambda blocks: blocks, exchange

    # One program reads prompts and draws the first tokens; another draws several tokens that follow.
    sampling, count = (config.temperature, config.top_p), min(TOGETHER, config.tokens)
    first = make_first_draw(tuning.lm, prompts.positions, *sampling)
    following = make_next_draws(tuning.lm, count, *sampling)
    rollouts = Rollouts(
        fs.shard_forward(tuning.policy(first), drawn_specs, **options),
        fs.shard_forward(tuning.policy(following), drawn_specs, **options),
        count, min(prompts.answers, AT_ONCE), prompts.longest, config.tokens, stops, agree, mesh.device,
    )  # fmt: skip
    values = fs.shard_forward(make_values(tuning), specs, **options) if config.kind.values else None
    return RewardedBatches(
        prompts, rollouts, prompts.rewards, mesh, exchange, gather, size if is_whole else None, values
    )


def _decode_prompt(tokenizer: DirectoryTokenizer, ids: Sequence[int]) -> tuple[str, bool]:
    """Return a prompt's text, and whether a chat template has rendered it.

    If so, its control tokens are spelled, since they say who speaks.
    """
    begin = len(tokenizer.begin) if tuple(ids[: len(tokenizer.begin)]) == tokenizer.begin else 0
    text = tokenizer.decode(ids[begin:])
    is_rendered = tokenizer.decode(ids[begin:], control=True) != text
    return (tokenizer.decode(ids, control=True), True) if is_rendered else (text, False)


def _can_hold_whole(size: int, mesh: fs.Mesh) -> bool:
    """Return whether the whole model takes a quarter of a rank's device at most."""
    if mesh.device_type == "cuda":
        return 4 * size <= torch.cuda.mem_get_info()[1]
    # On CPUs all ranks are taken to share one machine's memory.
    return 4 * size * mesh.size <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
