"""Environments: functions of one's own that talk with the model over several turns, and reward the talk.

    def rollout(prompt, ask):
        messages = [*prompt["messages"]]
        for _ in range(3):
            answer = ask(messages)                       # {"role": "assistant", "content": "..."}
            messages += [answer, {"role": "tool", "content": run(answer["content"])}]
        return messages, reward

`prompt` is the record, as rewards are given it (`tuning.rewards`). Each rollout has a thread, and waits in
`ask` until all others wait there too, have ended or failed, so that the model answers all of them at once.
Each turn is a row of its own to learn from: the tokens that the model was shown, and those that it drew. Only
the next prompt tokenises the talk again.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from experiments.data.chat import encode_chat_prompt
from experiments.data.tokenizer import DirectoryTokenizer
from experiments.lib.checks import ConfigError, describe
from experiments.lib.files import LineError

Environment = Callable[[Mapping[str, Any], Callable[..., Mapping[str, Any]]], tuple[Sequence[Any], float]]
# An answer to a turn has tokens, their log-probabilities and entropies.
Answer = tuple[list[int], Tensor, Tensor]
Draw = Callable[[Sequence["Turn"]], Sequence[Answer]]


class Limit(Exception):
    """An error that `ask` raises in a rollout that has had all its turns."""


@dataclass
class Turn:
    """An answer of the model in a rollout.

    Args:
        rollout: the number of the rollout.
        number: the number, from 0, of the turn in it.
        prompt: the tokens that the model was shown.
        answer: the model's answer; None before there is one.
    """

    rollout: int
    number: int
    prompt: list[int]
    answer: Answer | None = None


@dataclass(frozen=True)
class Play:
    """A function that plays rollouts, each on a thread of its own.

    Args:
        environment: the user's function.
        turns: the most turns of a rollout.
        context: the most positions of a prompt with its answer.
        answer_tokens: the most tokens of an answer.
        timeout: the seconds that a rollout may think between two turns.
    """

    environment: Environment
    tokenizer: DirectoryTokenizer
    turns: int
    context: int
    answer_tokens: int
    timeout: float

    def __call__(
        self, prompts: Sequence[Mapping[str, Any]], draw: Draw, goes_on: Callable[[bool], bool]
    ) -> tuple[list[Turn], list[float]]:
        """Play a rollout of each prompt to its end.

        Args:
            draw: draws answers to turns. All ranks call it together.
            goes_on: `goes_on(waits)` exchanges over ranks whether one has a turn to answer; the loop ends
                where none has.

        Returns:
            All turns, one rollout after the other, and each rollout's reward.

        Raises:
            ConfigError: the environment raises, returns something else, asks for more turns than there may
                be, thinks for too long, or leaves no room for an answer in the context.
        """
        talks = [_Talk(self, number, prompt) for number, prompt in enumerate(prompts)]
        for talk in talks:
            talk.thread.start()
        try:
            while True:
                # Every rollout runs until it asks for an answer or is over.
                waiting = []
                for talk in talks:
                    if talk.wait_for_turn():
                        waiting.append(talk)
                    if talk.error:  # it is raised at once, since each of the others may take as long
                        raise talk.error
                if not goes_on(bool(waiting)):
                    break

                # The model answers all that ask in one batch. A rank without any takes part in the forwards.
                turns = [talk.asked for talk in waiting]
                for talk, answer in zip(waiting, draw(turns), strict=True):
                    talk.hand_over(answer)
        finally:
            for talk in talks:
                talk.close()
        return [turn for talk in talks for turn in talk.said], [talk.reward for talk in talks]


class _Talk:
    """A rollout on a thread. Its state is the turns that are answered, and the one that it asks for."""

    def __init__(self, play: Play, number: int, prompt: Mapping[str, Any]):
        self.play, self.number, self.prompt = play, number, prompt
        self.said: list[Turn] = []
        self.asked: Turn | None = None
        self.reward, self.error = math.nan, None
        # The rollout's thread and the trainer's take turns. The former releases `_ready` when it asks for an
        # answer or has ended, and the latter `_answered` when the answer is there.
        self._ready, self._answered = threading.Semaphore(0), threading.Semaphore(0)
        self._is_over = self._is_closed = False
        self.thread = threading.Thread(target=self._run, daemon=True, name=f"rollout-{number}")

    def _run(self) -> None:
        try:
            result = self.play.environment(dict(self.prompt), self.ask)
            self.reward = self._read_reward(result)
        except ConfigError as error:
            self.error = self.error or error
        except BaseException as error:  # the user's own code, or the SystemExit of `ask` once closed
            if not self._is_closed:
                self.error = self.error or self._make_error(describe(error))
        self._is_over = True
        self._ready.release()

    def ask(self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None = None) -> dict[str, Any]:
        """Return the model's answer to messages, as an assistant's message. The rollout's thread calls it."""
        play, number = self.play, len(self.said)
        if number >= play.turns:
            self.error = self._make_error(
                f"it asks for more than objective.turns={play.turns} answers. Fix: end sooner, or a larger "
                "objective.turns"
            )
            self._ready.release()
            raise Limit
        try:
            ids = encode_chat_prompt(play.tokenizer, list(messages), tools)
        except LineError as error:
            raise self._make_error(str(error)) from error
        # The last token of an answer takes no position, since nothing is predicted from it.
        if len(ids) - 1 + play.answer_tokens > play.context:
            raise self._make_error(
                f"turn {number + 1} takes {len(ids) - 1} positions, and an answer may have "
                f"{play.answer_tokens}; the context has {play.context}. Fix: a larger data.context, or fewer "
                "and shorter messages"
            )

        # Hand the question to the trainer's thread, and wait until `hand_over` or `close` is called there.
        self.asked = Turn(self.number, number, ids)
        self._ready.release()
        self._answered.acquire()
        if self._is_closed:
            raise SystemExit  # ends this thread
        drawn, ends = self.said[-1].answer[0], set(play.tokenizer.stops)
        text = play.tokenizer.decode([token for token in drawn if token not in ends])
        return {"role": "assistant", "content": text}

    def wait_for_turn(self) -> bool:
        """Wait until the rollout asks for an answer or is over, and return whether it asks."""
        if self._is_over:
            return False
        began = time.monotonic()
        if not self._ready.acquire(timeout=self.play.timeout):
            self.error = self._make_error(
                f"after turn {len(self.said)} it has neither asked nor ended for "
                f"{time.monotonic() - began:.0f} s (half of run.timeout_s)"
            )
        return self.error is None and not self._is_over

    def hand_over(self, answer: Answer) -> None:
        """Hand the model's answer to the rollout."""
        self.asked.answer = answer
        self.said.append(self.asked)
        self._answered.release()

    def close(self) -> None:
        """Let a thread that still waits end."""
        self._is_closed = True
        self._answered.release()

    def _read_reward(self, result: Any) -> float:
        """Return the reward of the environment's result, after checking the whole of it."""
        try:
            messages, reward = result
            number = float(reward)
        except (TypeError, ValueError):
            raise self._make_error(f"expected (messages, reward), got {result!r:.80}") from None
        if not isinstance(messages, list | tuple) or not math.isfinite(number):
            raise self._make_error(f"expected messages and a finite number, got {result!r:.80}")
        if not self.said:
            raise self._make_error("it has ended without an answer of the model")
        return number

    def _make_error(self, what: str) -> ConfigError:
        return ConfigError(f"objective.environment: the rollout of {self._name}: {what}.")

    @property
    def _name(self) -> str:
        text = repr(self.prompt.get("prompt", ""))
        return text if len(text) <= 80 else f"{text[:20]}...{text[-57:]}"
