"""An environment for `experiments.finetune`: a wrong answer is sent back once.

    python -m experiments.finetune objective=grpo objective.updates=4 data.context=64 data.tokens=2048 \\
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
        What was said, and the reward: 1 for a right answer, 0.5 for one at the second try, and else 0. There
        is nothing for answers that are nearly right: within a group of wrong ones that would weigh as much as
        the difference between right and wrong does elsewhere.
    """
    right = prompt["response"].strip()
    messages = [*prompt["messages"]]
    messages.append(ask(messages))
    if messages[-1]["content"].strip() == right:
        return messages, 1.0
    messages.append({"role": "user", "content": "wrong"})
    messages.append(ask(messages))
    return messages, 0.5 * (messages[-1]["content"].strip() == right)
