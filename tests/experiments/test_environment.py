"""Rollouts of several turns, by a function of one's own; and several updates by the same answers."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from commands import run_command
from errors import raises
from runs import DOUBLE, compose, rows_of, timeless
from tuning import SMALL, assert_same_on_every_mesh, config_of, tune_on_rank, tune_until

import fnshard as fs
from experiments import finetune
from experiments.data.tokenizer import open_directory
from experiments.lib.checks import ConfigError
from experiments.lib.folder import read_result
from experiments.tuning.dataset import token_limits
from experiments.tuning.environment import Play, _Talk
from experiments.tuning.rewarded import RewardedBatches

QUICK = ("objective=grpo", "objective.group=2", "objective.tokens=3", "optimizer.lr=0.02",
         "run.sample_tokens=0", "data.held_out_rows=4", "data.rows=2", "export=none")  # fmt: skip


def asking_twice(prompt: Any, ask: Any) -> Any:
    """Ask twice, or once if the first answer begins with a sign below "A"; the reward is their length."""
    messages = [*prompt["messages"], ask(prompt["messages"])]
    if messages[-1]["content"][:1] >= "A":
        messages.append({"role": "user", "content": "again"})
        messages.append(ask(messages))
    return messages, float(sum(len(each["content"]) for each in messages if each["role"] == "assistant"))


def raising(prompt: Any, ask: Any) -> Any:
    ask(prompt["messages"])
    raise ValueError("no such tool")


def endless(prompt: Any, ask: Any) -> Any:
    while True:
        ask(prompt["messages"])


def stubborn(prompt: Any, ask: Any) -> Any:
    while True:
        try:
            ask(prompt["messages"])
        except Exception:
            return [], 0.0


def silent(prompt: Any, ask: Any) -> Any:
    ask(prompt["messages"])
    time.sleep(5)


def wordless(prompt: Any, ask: Any) -> Any:
    return [], 1.0


def boundless(prompt: Any, ask: Any) -> Any:
    ask(prompt["messages"])
    return [], float("nan")


def half(prompt: Any, ask: Any) -> Any:
    return ask(prompt["messages"])


def growing(prompt: Any, ask: Any) -> Any:
    ask([{"role": "user", "content": "a" * 60}])


def filling(prompt: Any, ask: Any) -> Any:
    return [ask([{"role": "user", "content": "a" * 58}])], 1.0


def of(name: str = "asking_twice") -> tuple[str, ...]:
    return (f"objective.environment._target_={__name__}.{name}", "data.tokens=96")


def playing(model: Any, data: Any, where: Any, name: str, *more: str) -> tuple[Any, RewardedBatches, Any]:
    config = config_of(model, data, where, *QUICK, *of(name), *more)
    parts = finetune.build(config)
    return parts, parts.rewarded, parts.make_state()


def test_a_budget_of_tokens_has_room_for_turns_of_any_length(model, data, tmp_path):
    config = config_of(model, data, tmp_path, *QUICK, *of("asking_twice"), "data.tokens=auto")
    assert token_limits(config)[0] == config.data.context


def assert_sampler_is_the_model(parts: Any, state: Any, turns: Any, batch: Any) -> None:
    """Assert that the log-probabilities of all drawn tokens are those of the model at the batch's tokens."""
    lm, params = parts.planned.tuning.lm, state.params["base"]
    logits = lm.logits(params, *(batch[n] for n in ("tokens", "positions", "documents")))
    mask = batch["targets"] != -100
    of_targets = logits.log_softmax(-1).gather(2, batch["targets"].clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(of_targets[mask], batch["sampler"][mask], rtol=0, atol=1e-4)
    assert int(mask.sum()) == sum(len(turn.answer[0]) for turn in turns)


# ------------------------------------------------------------------ turns


def test_what_is_learned_is_what_was_drawn_after_what_was_shown(model, data, tmp_path):
    """The sampler's log-probabilities are those of the model at the same tokens of a batch."""
    parts, rewarded, state = playing(model, data, tmp_path, "asking_twice")
    turns, rewards = rewarded._play(rewarded.gather(state.params), 0, [3, 5], 2, rewarded.prompts.data.train)
    assert len(rewards) == 4 < len(turns)
    batch = rewarded._lay_out_turns(turns, rewards)
    assert int(batch["answers"].sum()) == 4 and batch["tokens"].shape[1] == 96
    assert_sampler_is_the_model(parts, state, turns, batch)
    # A second turn was shown the first answer's words and what the tool said.
    second = next(turn for turn in turns if turn.number == 1)
    shown = rewarded.prompts.data.tokenizer.decode(second.prompt, control=True)
    assert "again" in shown and rewards[second.rollout] > 0
    # All turns of a rollout have its advantage, wherever they are packed.
    gains = fs.losses.policy.group_advantages(torch.tensor(rewards), 2)
    assert gains.any()
    lengths = [len(turn.prompt) + len(turn.answer[0]) - 1 for turn in turns]
    for row, numbers in enumerate(rewarded.prompts.rows_of(lengths)):
        for document, number in enumerate(numbers, 1):
            own = batch["advantages"][row][batch["documents"][row] == document]
            assert own.unique().tolist() == [pytest.approx(float(gains[turns[number].rollout]))]


def test_a_talk_may_take_all_positions_that_the_model_was_made_for(model, data, tmp_path):
    parts, rewarded, state = playing(model, data, tmp_path, "filling", "data.context=64")
    assert parts.planned.tuning.lm.context == 64
    gathered = rewarded.gather(state.params)
    turns, rewards = rewarded._play(gathered, 0, [3], 8, rewarded.prompts.data.train)
    assert {len(turn.prompt) for turn in turns} == {62}  # and two of the three tokens of an answer
    assert max(len(turn.answer[0]) for turn in turns) == 3
    assert_sampler_is_the_model(parts, state, turns, rewarded._lay_out_turns(turns, rewards))


@pytest.mark.long
def test_a_run_plays_resumes_and_is_the_same_on_every_mesh(ranks, model, data, tmp_path):
    config = config_of(model, data, tmp_path, *QUICK, *of("asking_twice"), "run.steps=4", *DOUBLE)
    one = assert_same_on_every_mesh(config, tmp_path, ranks)
    rows = [row for row in rows_of(one) if "loss" in row]
    assert len(rows) == 4 and all(row["mismatch"] < 1e-9 and row["length"] > 0 for row in rows)
    assert read_result(one)["held_out_reward"] > 0


@pytest.mark.parametrize(
    ("environment", "says", "fix"),
    [
        (raising, ["ValueError: no such tool", "test_environment"], ()),
        (endless, "objective.turns=3", ["end sooner", "objective.turns"]),
        (stubborn, "objective.turns=3", "objective.turns"),
        (silent, ["turn 1", "1 s"], ()),
        (wordless, "an answer", ()),
        (boundless, "a finite number", ()),
        (half, ["(messages, reward)", "{'role'"], ()),
        (growing, ["turn 1", "positions", "the context has 48"], "data.context"),
    ],
)
def test_an_environment_that_goes_wrong_is_one_error(model, environment, says, fix):
    play = Play(environment, open_directory(model), 3, 48, 3, 1.0)
    prompts = [{"prompt": "1+1=", "messages": [{"role": "user", "content": "1+1="}]}] * 8
    draw = lambda turns: [([65, 66], torch.zeros(2), torch.zeros(2))] * len(turns)  # noqa: E731
    waits = mock.patch.object(_Talk, "wait_for_turn", autospec=True, side_effect=_Talk.wait_for_turn)
    with raises(ConfigError, leaves=["objective.environment", "'1+1='"], fix=fix, says=says), waits as waited:
        play(prompts, draw, bool)
    assert waited.call_count % 8 == 1  # the first rollout's error is raised before the others are waited for


FAILING = """
import os
def rollout(prompt, ask):
    answer = ask(prompt["messages"])
    if os.environ["RANK"] == FAILS:
        raise KeyError("no such tool")
    return [answer], 1.0
"""


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_environment_that_fails_on_one_rank_is_the_error_of_the_run(model, data, tmp_path, rank):
    """The other rank waits in vain, which is not what the user has to know."""
    (tmp_path / "mine.py").write_text(f"FAILS = {rank!r}{FAILING}")
    how = (*(each for each in SMALL if each != "mesh.shard=1"), *QUICK, "data.tokens=96", "mesh.shard=2")
    command = ["experiments.finetune", f"model={model}", f"data.train={data['samples']}", *how,
               "objective.environment._target_=mine.rollout"]  # fmt: skip
    done = run_command(command, tmp_path, timeout=500, patches={"sys.path": [str(tmp_path), *sys.path]})
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert re.search(r"error: objective.environment: the rollout of .*KeyError: 'no such tool'", done.stderr)
    assert "peer" not in done.stderr and "wait for each other" not in done.stderr


@pytest.mark.parametrize(
    ("overrides", "leaves", "fix"),
    [
        (("objective=sft", *of("raising")), ["objective.environment", "objective=sft"], "objective=grpo"),
        (("objective=grpo", of("raising")[0]), "data.tokens=None", "data.tokens="),
        (("objective=grpo", *of("raising"), "objective.reward=exact"), "objective.reward", ()),
        (("objective=sft", "objective.updates=2"), "objective.updates=2", ()),
        (("objective=grpo", "objective.updates=4"), ["run.steps=6", "objective.updates=4"], "run.steps=8"),
    ],
)
def test_what_is_refused(overrides, leaves, fix):
    with raises(ConfigError, leaves=leaves, fix=fix):
        compose(*SMALL, *overrides, spec=finetune.COMMAND)


# ------------------------------------------------------------------ several updates


@pytest.mark.long
def test_answers_are_drawn_once_for_several_updates(model, data, tmp_path, monkeypatch):
    config = config_of(model, data, tmp_path, *QUICK, "objective.updates=2", "run.steps=4",
                       "objective.temperature=2.0", *DOUBLE)  # fmt: skip
    config = replace(config, objective=replace(config.objective, reward={"name": "length", "most": 1}))
    drawn, real = [], RewardedBatches._draw

    def draw(self: Any, params: Any, step: int, *rest: Any) -> Any:
        drawn.append(step)
        return real(self, params, step, *rest)

    monkeypatch.setattr(RewardedBatches, "_draw", draw)
    one, broken = tmp_path / "one", tmp_path / "broken"
    tune_on_rank(0, config, one)
    assert drawn == [0, 2]
    rows = [row for row in rows_of(one) if "loss" in row]
    assert [row["reward"] for row in rows][::2] == [row["reward"] for row in rows][1::2]
    # The second update of a batch moves away from what sampled it; the first does not.
    assert all(rows[n]["loss"] == pytest.approx(0, abs=1e-5) for n in (0, 2))
    tune_until(config, broken, 4)  # between two updates: the run goes on from step 2
    tune_on_rank(0, config, broken)
    assert drawn == [0, 2, 0, 2, 2]
    assert timeless(broken) == timeless(one)
    assert json.loads((one / "result.json").read_text())["status"] == "ok"
