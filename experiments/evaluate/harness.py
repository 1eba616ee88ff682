"""A scorer as a model of lm-eval (Gao et al. 2023), which has its own tasks, prompts and metrics."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from experiments.evaluate.config import EvaluateConfig
from experiments.evaluate.scorer import Scorer
from experiments.lib.checks import ConfigError
from fnshard.errors import MissingExtraError

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance


class HarnessModel:
    """A model with the methods that the harness calls. All ranks run the harness, and share the questions."""

    def __init__(self, scorer: Scorer, params: Any):
        super().__init__()  # of lm-eval's `LM`, see `harness_results`
        self.scorer, self.params = scorer, params
        self.gather = scorer.forward(lambda params: 0).gather_strings

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each (context, continuation), and whether it is the likeliest."""
        pairs = [self.scorer.pair(*request.args) for request in requests]
        # The first token needs a context, so an empty one becomes the token that begins or ends texts.
        begin = list(self.scorer.tokenizer.begin or self.scorer.tokenizer.stops[:1])
        groups = [[(context or begin, after)] for context, after in pairs]
        mine = {number: found[0] for number, found in self.scorer.logprobs(self.params, groups)}
        return [tuple(each) for each in self._gather_all(mine, len(requests))]

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Return the log-likelihood of whole texts.

        Only the end of one that is too long for the context counts.
        """
        begin = list(self.scorer.tokenizer.begin or self.scorer.tokenizer.stops[:1])
        groups = [[(begin, self.scorer.tokenizer.encode(*request.args))] for request in requests]
        mine = {number: found[0][0] for number, found in self.scorer.logprobs(self.params, groups)}
        return self._gather_all(mine, len(requests))

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Return greedy answers to (context, options), each up to one of the options' `until`."""
        # Answer requests with the same limit of tokens together, as they share a program.
        asked: list[tuple[str, dict[str, Any]]] = [request.args for request in requests]
        limits = [options.get("max_gen_toks", self.scorer.tokens) for _, options in asked]
        texts: dict[int, str] = {}
        for limit in sorted(set(limits)):
            numbers = [number for number, each in enumerate(limits) if each == limit]
            prompts = [asked[number][0] for number in numbers]
            mine = dict(self.scorer.answers(self.params, prompts, limit))
            texts |= dict(zip(numbers, self._gather_all(mine, len(numbers)), strict=True))

        # Cut each answer at the first of its stops.
        answers = []
        for number, (_, options) in enumerate(asked):
            stops, text = options.get("until") or [], texts[number]
            for stop in [stops] if isinstance(stops, str) else stops:
                text = text.split(stop)[0] if stop else text
            answers.append(text)
        return answers

    def _gather_all(self, mine: dict[int, Any], count: int) -> list[Any]:
        """Return the results of all ranks in the order of requests; `mine` has this rank's, by number."""
        results: dict[int, Any] = {}
        for part in self.gather(json.dumps(mine)):  # JSON makes texts of the numbers
            results |= {int(number): result for number, result in json.loads(part).items()}
        return [results[number] for number in range(count)]


def check_harness() -> None:
    """Check that the package is installed.

    Raises:
        MissingExtraError: lm-eval is not installed.
    """
    if find_spec("lm_eval") is None:
        raise MissingExtraError("lm-eval is not installed. Fix: pip install 'fnshard[lm-eval]'.")


@cache
def _open_task_manager() -> Any:
    """Open the tasks of the harness, whose thousands of files take ten seconds to read."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def harness_results(
    task: str, scorer: Scorer, params: Any, config: EvaluateConfig
) -> dict[str, dict[str, float]]:
    """Measure a task of the harness, by its name or its YAML file.

    Returns:
        `{task/metric: {value, stderr, questions}}`.

    Raises:
        ConfigError: it knows no such task.
    """
    import lm_eval
    from lm_eval.api.model import LM

    # lm-eval is imported here alone, so its class of models becomes a base here.
    model = type("Model", (HarnessModel, LM), {})(scorer, params)
    try:
        found = lm_eval.simple_evaluate(
            model, tasks=[task], num_fewshot=config.shots or None, limit=config.limit,
            bootstrap_iters=1000, log_samples=False, task_manager=_open_task_manager(),
        )  # fmt: skip
    except (KeyError, ValueError, FileNotFoundError) as error:
        raise ConfigError(f"tasks=lm-eval:{task}: {error}") from error

    # Its metrics are named "METRIC,FILTER", and each has a standard error.
    out: dict[str, dict[str, float]] = {}
    if found is None:  # only the first rank of a machine has results
        return out
    for name, metrics in found["results"].items():
        # A group of tasks has no questions of its own.
        count = found["n-samples"].get(name, {}).get("effective", 0)
        for metric, value in metrics.items():
            kind, _, how = metric.partition(",")
            if not how or kind.endswith("_stderr") or not isinstance(value, float):
                continue
            label = f"{name}/{kind}" if how == "none" else f"{name}/{kind} ({how})"
            stderr = metrics.get(f"{kind}_stderr,{how}")
            if not isinstance(stderr, float):
                stderr = float("nan")
            out[label] = {"value": value, "stderr": stderr, "questions": count}
    return out
