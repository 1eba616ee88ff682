"""Learning from rewards: decoding with a cache, rollouts, rewards, and the job on top of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from errors import raises
from families import FAMILIES
from runs import DOUBLE, KilledError, timeless
from torch import Tensor
from tuning import STEPS, assert_alike, config_of, tune_on_rank

import fnshard as fs
from experiments import finetune
from experiments.data.builtin import write_task_files, write_warming_files
from experiments.data.prepared import RecordPolicy, prepare
from experiments.data.tokenizer import ByteTokenizer, open_directory
from experiments.lib.checks import ConfigError
from experiments.lib.folder import read_result
from experiments.lib.run import Run
from experiments.tuning import lm
from experiments.tuning.dataset import FinetuneData
from experiments.tuning.rewarded import RewardedBatches
from experiments.tuning.rewards import REWARDS, Weighted, make_rewards, run_reward, solved
from experiments.tuning.rollout import (
    Rollouts,
    draw,
    make_decode,
    make_first_draw,
    make_next_draws,
    make_prefill,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
DECODERS = ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "gpt2"]
SLOTS = 14


@pytest.mark.parametrize("name", DECODERS)
def test_a_token_at_a_time_is_what_all_at_once_are(name: str) -> None:
    """Prompts of three lengths in one batch; windows, caps and positions are the model's own."""
    family = FAMILIES[name]
    model = lm.from_model(family.build())
    tokens = torch.randint(1, 61, (3, SLOTS), generator=torch.Generator().manual_seed(0))
    expected = model.logits(model.params, tokens)
    lengths = torch.tensor([2, 7, 4])
    prompts = torch.where(torch.arange(7) < lengths[:, None], tokens[:, :7], 0)
    rows = torch.arange(3)
    logits, cache = make_prefill(model, SLOTS)(model.params, prompts, lengths - 1)
    for ahead in range(SLOTS - 7):
        at = lengths + ahead
        torch.testing.assert_close(logits, expected[rows, at - 1], rtol=0, atol=max(family.atol, 1e-10))
        logits, cache = make_decode(model)(model.params, tokens[rows, at], at, cache)


# ------------------------------------------------------------------ rollouts

PROMPTS = [[5, 9, 2], [7], [3, 3, 3, 3, 8], [11, 4], [6, 2, 9], [1, 12], [30, 31, 32]]
LENGTH, STOP = 6, 17


def rollouts(
    mesh: fs.Mesh, rows: int, count: int = 1, temperature: float = 1.0, **how: Any
) -> tuple[Rollouts, Any, lm.LanguageModel]:
    model = lm.from_model(FAMILIES["llama"].build())
    specs = fs.presets.full_shard(model.params, mesh)
    forwards = [
        fs.shard_forward(fn, specs, mesh=mesh, backend="eager")
        for fn in (
            make_first_draw(model, 5 + LENGTH - 1, temperature, 1.0),
            make_next_draws(model, count, temperature, 1.0),
        )
    ]
    agree = (lambda text: [text]) if mesh.size == 1 else fs.shard_step(
        lambda p: 0, specs, mesh=mesh).gather_strings  # fmt: skip
    stops = frozenset(how.pop("stops", {STOP}))
    made = Rollouts(*forwards, count, rows, 5, LENGTH, stops, agree, torch.device("cpu"), **how)
    return made, fs.shard({p: v.detach() for p, v in model.params.items()}, specs, mesh), model


def numbers(count: int) -> Tensor:
    return torch.rand(count, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.long
def test_rows_that_are_free_take_the_next_prompt() -> None:
    """Two rows serve seven prompts, and each prompt has the answer that it has alone."""
    mesh = fs.make_mesh(shard=1, device="cpu")
    every, params, model = rollouts(mesh, 7, stops=set(range(17, 40)))
    one = every(params, PROMPTS, numbers(7))
    # Four tokens a call: the sixth is the first of the second call, which draws three too many.
    other = rollouts(mesh, 2, 4, stops=set(range(17, 40)))[0](params, PROMPTS, numbers(7))
    assert torch.equal(one.tokens, other.tokens) and torch.equal(one.lengths, other.lengths)
    torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=1e-6)
    torch.testing.assert_close(one.entropy, other.entropy, rtol=0, atol=1e-6)
    assert len(set(one.lengths.tolist())) > 1 and one.lengths.max() == LENGTH
    for prompt, answer, logprobs in zip(PROMPTS, one.texts(), one.logprobs, strict=True):
        assert not set(answer[:-1]) & every.stops  # a stop is the last token, if there is one
        whole = torch.tensor([[*prompt, *answer]])
        full = model.logits(model.params, whole[:, :-1])[0, len(prompt) - 1 :].log_softmax(-1)
        expected = full.gather(1, torch.tensor(answer)[:, None])[:, 0]  # by the forward that trains
        torch.testing.assert_close(logprobs[: len(answer)], expected.float(), rtol=0, atol=1e-5)


@pytest.mark.long
def test_without_temperature_it_is_the_likeliest_token() -> None:
    mesh = fs.make_mesh(shard=1, device="cpu")
    greedy, params, model = rollouts(mesh, 3, temperature=0.0)
    for prompt, answer in zip(PROMPTS, greedy(params, PROMPTS, numbers(7)).texts(), strict=True):
        for count, token in enumerate(answer):
            seen = torch.tensor([[*prompt, *answer[:count]]])
            assert model.logits(model.params, seen)[0, -1].argmax() == token


def shared(rank: int) -> list[list[int]]:
    mesh = fs.make_mesh(shard=2, device="cpu")
    made, params, _ = rollouts(mesh, 2)
    mine = slice(0, 5) if rank == 0 else slice(5, 7)  # unequally many
    return made(params, PROMPTS[mine], numbers(7)[mine]).texts()


def test_ranks_with_unequal_prompts_end_together(ranks: Any) -> None:
    made, params, _ = rollouts(fs.make_mesh(shard=1, device="cpu"), 7)
    first, second = ranks(2).run(shared)
    assert first + second == made(params, PROMPTS, numbers(7)).texts()


def test_tokens_are_drawn_by_their_probabilities() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(4000, 4)
    uniform = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    tokens, logprobs, entropy = draw(logits, uniform)
    assert torch.bincount(tokens).tolist() == [400, 800, 1200, 1600]
    torch.testing.assert_close(logprobs, logits[0][tokens])
    assert entropy[0].item() == pytest.approx(-sum(p * math.log(p) for p in (0.1, 0.2, 0.3, 0.4)), rel=1e-5)
    assert torch.bincount(draw(logits, uniform, top_p=0.6)[0], minlength=4)[:2].tolist() == [0, 0]
    hot = draw(logits, uniform, temperature=0.5)[0]
    assert torch.bincount(hot)[3].item() == pytest.approx(4000 * 16 / 30, abs=1)
    assert set(draw(logits, uniform, temperature=0.0)[0].tolist()) == {3}


# ------------------------------------------------------------------ rewards


def row(response: str) -> list[dict[str, str]]:
    return [{"prompt": "", "response": response}]


def test_rewards_by_name(tmp_path: Path) -> None:
    assert REWARDS["exact"]([""], [" 12\n"], row("12")) == [1.0]
    assert REWARDS["number"]([""], ["so it is 1,204."], row("#### 1204")) == [1.0]
    assert REWARDS["number"]([""], ["none"], row("3")) == [0.0]
    (form,) = make_rewards({"name": "format", "pattern": r"<a>.*</a>"})
    assert form.reward([""], ["<a>x</a>"], row("")) == [1.0]
    both = make_rewards(["exact", {"name": "length", "most": 2, "weight": 0.25}])
    assert [(each.name, each.weight) for each in both] == [("exact", 1.0), ("length", 0.25)]
    assert both[1].reward([""], ["1234"], row("")) == [0.5]
    assert REWARDS["places"](["", ""], ["12x", ""], row("1234") * 2) == [0.5, 0.0]
    assert solved(["make 12: 34="], ["4*3"], row("3*4")) == [1.0]
    for wrong in ("12", "3*4*1", "3**4", "4*3)", "__import__('os')", "3+4", ""):
        assert solved(["make 12: 34="], [wrong], row("3*4")) == [0.0]
    train, held_out = ([*map(json.loads, p.read_text().splitlines())] for p in write_task_files(tmp_path))
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in held_out} and len(held_out) == 203
    for each in (train, held_out):
        given = [r["prompt"] for r in each], [r["response"] for r in each]
        assert sum(solved(*given, each)) == len(each)
    careless = [json.loads(line) for line in write_warming_files(tmp_path)[0].read_text().splitlines()]
    whole = {r["prompt"]: r["response"] for r in train}
    assert 0.1 < sum(r["response"] == whole[r["prompt"]] for r in careless) / len(careless) < 0.25
    assert len(careless) > 7000 and {r["prompt"] for r in careless} <= {r["prompt"] for r in train}


def ones(prompts: Any, answers: Any, rows: Any, *, value: float = 1.0) -> list[float]:
    return [value] * len(prompts)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda p, a, r: [1.0], "1 numbers for 2 answers, the first of them to 'one'"),
        (lambda p, a, r: [1.0, math.nan], "not finite:\n  'two' -> 'b': nan"),
        (lambda p, a, r: [1.0, "x"], "expected numbers, got:\n  'two' -> 'b': 'x'"),
        (lambda p, a, r: [None, 1.0], "expected numbers, got:\n  'one' -> 'a': None"),
        (lambda p, a, r: 1.0, "TypeError"),
        (lambda p, a, r: r[9], "IndexError"),
    ],
)
def test_a_reward_that_gives_something_else_is_one_error(reward: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        run_reward(reward, ["one", "two"], ["a", "b"], row("") * 2)
    assert message in str(error.value) and "float()" not in str(error.value)


def test_an_error_of_ones_own_reward_has_its_file_and_line(tmp_path: Path, monkeypatch: Any) -> None:
    """Not those of the library that it called."""
    (tmp_path / "of_mine.py").write_text("import json\n\ndef reward(p, a, r):\n    return json.loads('{')\n")
    (tmp_path / "of_yours.py").write_text("x = 1\ndef reward(:\n")
    (tmp_path / "of_theirs.py").write_text("import of_yours\n")
    monkeypatch.syspath_prepend(tmp_path)
    (made,) = make_rewards({"_target_": "of_mine.reward"})
    with raises(ConfigError, leaves=f"({tmp_path / 'of_mine.py'}:4)"):
        run_reward(made.reward, ["one"], ["a"], row(""))
    with raises(ConfigError, leaves=f"({tmp_path / 'of_yours.py'}:2)"):
        make_rewards({"_target_": "of_theirs.reward"})


def test_a_reward_of_ones_own_is_named_by_its_path() -> None:
    (made,) = make_rewards({"_target_": "test_rewarded.ones", "value": 0.25})
    assert made.name == "ones" and run_reward(made.reward, ["p"], ["a"], row("")) == [0.25]
    for wrong, leaves in {
        "exakt": ["objective.reward=exakt", "exact"],
        "a" * 300: ["objective.reward=", "exact"],
        ("exact", "exact"): ["objective.reward", "exact, exact"],
        (): ["objective.reward", "none"],
    }.items():
        with raises(ConfigError, leaves=leaves):
            make_rewards(wrong)
    with raises(ConfigError, leaves="nowhere.at_all"):
        make_rewards({"_target_": "nowhere.at_all"})
    with raises(ConfigError, leaves=["objective.reward", "weight=heavy"], says="a number"):
        make_rewards({"name": "exact", "weight": "heavy"})


@pytest.mark.parametrize(
    ("wrong", "keys"),
    [
        ({"name": "length", "most": "x"}, ["length", "most"]),
        ({"name": "length", "most": -5}, ["length", "most"]),
        ({"name": "length", "most": True}, ["length", "most"]),
        ({"name": "FOLDER", "wieght": 2}, ["wieght"]),
        ({"name": "FOLDER", "control": True}, ["control"]),
        ({"name": "FOLDER", "most": 2}, ["most"]),
    ],
)
def test_no_word_of_a_reward_is_passed_over(tmp_path, wrong, keys):
    with pytest.raises(ConfigError) as error:
        make_rewards({**wrong, "name": wrong["name"].replace("FOLDER", str(tmp_path))})
    assert all(key in str(error.value) for key in keys) and "config.json" not in str(error.value)


def test_errors_of_a_reward_show_the_ends_of_long_prompts():
    for reward in (lambda *_: ["x"], lambda *_: [float("nan")], lambda *_: []):
        with pytest.raises(ConfigError) as error:
            run_reward(reward, ["long " * 9999 + "asked?"], ["said " * 9999], row(""))
        assert len(str(error.value)) < 600 and "asked?" in str(error.value)


def test_a_reward_model_is_a_directory(model, tmp_path):
    """It gives the number that transformers gives for prompt and answer together."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(model, num_labels=1, pad_token_id=0)
    torch.manual_seed(1)
    theirs = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    theirs.save_pretrained(tmp_path)
    ByteTokenizer().save(tmp_path)
    (made,) = make_rewards(str(tmp_path))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    numbers = run_reward(made.reward, ["1+1=", "longer, 1+1="], ["2", "3"], row("") * 2)
    for number, prompt, answer in zip(numbers, ("1+1=", "longer, 1+1="), "23", strict=True):
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)
        assert number == pytest.approx(theirs(ids["input_ids"]).logits.item(), rel=1e-5)
    assert numbers[0] != numbers[1]
    # Those of one length are read at once; one by one if no token is there to pad with.
    many = ["1+1=", "longer, 1+1=", "2+2=", "3+3="], ["2", "3", "4", "6"], row("") * 4
    together = run_reward(made.reward, *many)
    config.pad_token_id = None
    config.save_pretrained(tmp_path)
    (alone,) = make_rewards(str(tmp_path))
    assert together == pytest.approx(run_reward(alone.reward, *many), rel=1e-5)
    assert together[:2] == pytest.approx(numbers, rel=1e-5) and len(set(together)) == 4
    with raises(ConfigError, leaves="objective.reward=", says=["2 labels", "1"]):
        two = transformers.AutoConfig.from_pretrained(model, num_labels=2, pad_token_id=0)
        transformers.AutoModelForSequenceClassification.from_config(two).save_pretrained(tmp_path / "two")
        ByteTokenizer().save(tmp_path / "two")
        make_rewards(str(tmp_path / "two"))


def test_a_language_model_is_no_reward_model(model, tmp_path, capfd):
    """Its head would be random numbers, since transformers makes what the files lack."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(model, num_labels=1, pad_token_id=0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ByteTokenizer().save(tmp_path)
    capfd.readouterr()
    with raises(ConfigError, leaves=[f"objective.reward={tmp_path}", "score.weight"], fix="objective=reward"):
        make_rewards(str(tmp_path))
    assert "LOAD REPORT" not in "".join(capfd.readouterr())


TURNS = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OTHER = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


def test_rewards_see_the_conversation_and_the_record(directory, tmp_path):
    """All columns, messages, answers with their control tokens where a reward asks for these; a reward model
    reads the conversation in its own template, and a rendered text as it is."""
    transformers = pytest.importorskip("transformers")
    names = {"eos_token": "<|im_end|>", "bos_token": "<s>"}
    policy = open_directory(directory(tokenizer_config={**names, "chat_template": TURNS}))
    config = transformers.LlamaConfig(
        vocab_size=400, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, pad_token_id=1,
    )  # fmt: skip
    judges = {}
    for name, template in (("same", TURNS), ("other", OTHER), ("none", None)):
        folder = tmp_path / name
        judge = transformers.LlamaForSequenceClassification(config).eval()
        judge.save_pretrained(folder)
        policy.hf.save_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        if template is None:
            (folder / "chat_template.jinja").unlink(missing_ok=True)
        judges[name] = (folder, judge, tokenizer)
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    records = [
        {"prompt": asked, "solution": "3", "level": 2},
        {"prompt": "1+1=", "response": "2"},
        {"prompt": "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"},
        {"messages": asked[1:]},
    ]
    file = tmp_path / "x.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = prepare(file, policy, RecordPolicy("prompts", 99), cache=tmp_path / "cache")[0]
    examples = [FinetuneData(policy, data, data, None, None).example(data, n) for n in range(4)]
    end = policy.hf.convert_tokens_to_ids("<|im_end|>")
    drawn = [[*policy.encode("yes "), policy.hf.convert_tokens_to_ids("</s>"), end] for _ in examples]
    seen: dict[str, Any] = {}

    def look(name: str) -> Any:
        return lambda *given: seen.setdefault(name, given) and [0.0] * 4

    read = SimpleNamespace(data=SimpleNamespace(tokenizer=policy))
    rewards = [Weighted("plain", look("plain")), Weighted("spelled", look("spelled"), control=True)]
    rewards += [Weighted(n, make_rewards(str(judges[n][0]))[0].reward) for n in ("same", "none", "other")]
    stops = SimpleNamespace(stops=frozenset(policy.stops))

    def numbers(*which: int, judge: str) -> list[float]:
        job = SimpleNamespace(prompts=read, rollouts=stops, rewards=[r for r in rewards if r.name == judge])
        found = [examples[n] for n in which]
        answers = SimpleNamespace(texts=lambda: [drawn[n] for n in which])
        return RewardedBatches._reward_answers(job, found, answers, [each.row for each in found])[judge]

    for judge in ("plain", "spelled"):
        numbers(0, 1, 2, 3, judge=judge)
    prompts, answers, rows = seen["plain"]
    assert answers == ["yes "] * 4 and seen["spelled"][1] == ["yes </s><|im_end|>"] * 4
    assert prompts[1] == "1+1=" and prompts[0].startswith("<s><|im_start|>system\nBe brief.<|im_end|>")
    assert prompts[2] == records[2]["prompt"] and [each["prompt"] for each in rows] == prompts
    assert (rows[0]["messages"], rows[0]["solution"], rows[0]["level"]) == (asked, "3", 2)
    assert rows[1]["messages"] == [{"role": "user", "content": "1+1="}] and rows[2]["messages"] is None
    assert [each["response"] for each in rows] == ["3", "2", "", ""]
    answer = {"role": "assistant", "content": "yes </s>"}
    assert rows[0]["conversation"] == [*asked, answer]

    def expected(judge: str, turns: Any) -> float:
        _, model, tokenizer = judges[judge]
        if isinstance(turns, list):
            turns = tokenizer.apply_chat_template(turns, tokenize=False)
        ids = tokenizer(turns, add_special_tokens=False, return_tensors="pt")["input_ids"]
        return pytest.approx(model(ids).logits.item(), abs=1e-6)

    for judge in ("same", "other"):
        assert numbers(0, 1, judge=judge) == [
            expected(judge, [*asked, answer]),
            expected(judge, [{"role": "user", "content": "1+1="}, answer]),
        ]
    assert numbers(2, judge="same") == [expected("same", f"{prompts[2]}yes </s><|im_end|>")]
    assert numbers(1, judge="none") == [expected("none", "<s>1+1=yes </s>")]
    with raises(ConfigError, leaves=["objective.reward=", "chat template"], fix="tokenizer_config.json"):
        numbers(0, judge="none")


def test_a_reward_is_credited_to_the_tokens_of_its_answer():
    """If nothing is discounted and the value head says 0, each token's advantage is the whole reward."""
    of = SimpleNamespace(config=SimpleNamespace(objective=SimpleNamespace(lam=1.0)))
    zeros = lambda params, tokens: torch.zeros(tokens.shape)  # noqa: E731
    batches = RewardedBatches(of, None, (), None, None, None, values=zeros)
    targets = torch.tensor([[-100, 4, 5, -100], [-100, -100, 6, -100]])
    batch = {"tokens": torch.zeros(2, 4), "targets": targets, "rewards": torch.tensor([1.0, 0.5])}
    found = batches._estimate_advantages(None, batch)
    assert found["advantages"].tolist() == [[0, 1, 1, 0], [0, 0, 0.5, 0]]
    assert torch.equal(found["returns"], found["advantages"])


# ------------------------------------------------------------------ the job

SMALL = ("objective.group=4", "data.held_out_rows=4", "objective.tokens=3", "optimizer.lr=0.02")


@pytest.mark.long
@pytest.mark.parametrize(
    ("objective", "more"),
    [
        ("grpo", ("objective.beta=0.1",)),
        ("gspo", ("method=full",)),
        ("ppo", ("method=full", "objective.beta=0.1", "objective.fp32_head=true")),
        *((name, ()) for name in ("ppo", "dr_grpo", "bnpo", "dapo")),
    ],
)
def test_a_run_is_rewarded_and_resumes_bit_for_bit(model, data, tmp_path, monkeypatch, objective, more):
    """Killed while answers are drawn, and again between two steps."""
    config = config_of(model, data, tmp_path, f"objective={objective}", *SMALL, *more)
    config = replace(
        config, objective=replace(config.objective, reward=[{"name": "length", "most": 1}, "exact"])
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    setup = finetune.build(config)
    monkeypatch.setattr(finetune, "build", lambda *_, **__: setup)
    tune_on_rank(0, config, whole)
    result = read_result(whole)
    assert result["status"] == "ok" and "held_out_loss" not in result
    parts = result["held_out_reward_length"] + result["held_out_reward_exact"]
    assert result["held_out_reward"] == pytest.approx(parts) and result["goal"]["is_maximised"]
    assert (whole / "reward.png").exists() and not (whole / "loss.png").exists()
    assert result["rollouts_s"] > 0
    rows = [each for each in timeless(whole) if "loss" in each]
    assert len(rows) == STEPS and all(each["mismatch"] < 1e-9 and each["entropy"] > 0 for each in rows)
    assert ("kl" in rows[0]) == any("beta" in each for each in more) and any(
        each["grad_norm"] > 0 for each in rows
    )

    def killed(of: Any, name: str, call: int) -> None:
        calls, real = iter(range(1, 1000)), getattr(of, name)

        def dies(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == call:
                raise KilledError
            return real(*args, **kwargs)

        with monkeypatch.context() as patch, pytest.raises(KilledError):
            patch.setattr(of, name, dies)
            tune_on_rank(0, config, broken)

    killed(Rollouts, "_keep", 6)
    killed(Run, "make_step", 2)
    tune_on_rank(0, config, broken)
    assert timeless(whole) == timeless(broken)


@pytest.mark.parametrize(
    ("objective", "axes"),
    [
        ("grpo", {"shard": 2}),
        ("grpo", {"tensor": 2}),
        ("ppo", {"shard": 2}),
    ],
    ids=str,
)
@pytest.mark.long  # test_ranks_with_unequal_prompts has two that draw, test_token_budget two that are tuned
def test_two_ranks_draw_what_one_does(ranks, model, data, tmp_path, objective, axes):
    config = config_of(model, data, tmp_path, f"objective={objective}", "run.steps=1", *SMALL,
                       "objective.tokens=2", *DOUBLE)  # fmt: skip
    config = replace(config, objective=replace(config.objective, reward={"name": "length", "most": 1}))
    one, two = tmp_path / "one", tmp_path / "two"
    tune_on_rank(0, config, one)
    ranks(2).run(tune_on_rank, replace(config, mesh=replace(config.mesh, **axes)), str(two))
    assert_alike(two, one)


def test_a_prompt_that_leaves_no_room_is_refused(model, data, tmp_path):
    config = config_of(model, data, tmp_path, "objective=grpo", "objective.tokens=61")
    with raises(ConfigError, leaves="objective.tokens=61", says="64"):
        finetune.build(config)
