"""An environment for `experiments.finetune`: a wrong answer is sent back once.

    python -m experiments.finetune objective=grpo objective.updates=4 data.rows=8 \\
        data.context=64 data.tokens=2048 \\
        objective.environment._target_=experiments.examples.second_try.rollout

The prompts are the built-in problems, or records of your own with a prompt and a response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Message = Mapping[str, Any]
Ask = Callable[[list[Message]], Message]


def rollout(prompt: Mapping[str, Any], ask: Ask) -> tuple[list[Message], float]:
    """Let the model answer a prompt, and once more if it was wrong.

    Args:
        prompt: the record, with its `messages` and its `response`.
        ask: the model.

    Returns:
        The conversation, and the reward: 1 for a right answer, and otherwise 0.4 times the sum of both
        answers' shares of characters in place, so that a right second try is worth 0.4 at least.
    """
    right = prompt["response"].strip()
    messages = [*prompt["messages"]]
    messages.append(ask(messages))
    first = share_in_place(messages[-1]["content"].strip(), right)
    if first == 1:
        return messages, 1.0
    messages.append({"role": "user", "content": "wrong"})
    messages.append(ask(messages))
    return messages, 0.4 * (first + share_in_place(messages[-1]["content"].strip(), right))


def share_in_place(answer: str, right: str) -> float:
    """Return the share of the characters of the longer text that are the same in both.

    >>> share_in_place("32", "321"), share_in_place("321", "321")
    (0.6666666666666666, 1.0)
    """
    return sum(map(str.__eq__, answer, right)) / max(len(answer), len(right))
