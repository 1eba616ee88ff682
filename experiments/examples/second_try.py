"""An environment for `experiments.finetune`: a wrong answer is sent back once.

    python -m experiments.finetune objective=grpo data.context=64 data.tokens=2048 \\
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
        What was said, and the reward: 1 for a right answer, 0.7 for one at the second try, and otherwise up
        to 0.3 by the characters that are in place.
    """
    right = prompt["response"].strip()
    messages = [*prompt["messages"]]
    messages.append(ask(messages))
    if messages[-1]["content"].strip() == right:
        return messages, 1.0
    messages.append({"role": "user", "content": "wrong"})
    messages.append(ask(messages))
    answer = messages[-1]["content"].strip()
    if answer == right:
        return messages, 0.7
    in_place = sum(mine == theirs for mine, theirs in zip(answer, right, strict=False))
    return messages, 0.3 * in_place / max(len(answer), len(right))
