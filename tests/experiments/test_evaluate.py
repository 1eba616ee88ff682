"""Evaluation: questions from public formats, likelihoods and answers, ranks, resume, lm-eval's numbers."""

from __future__ import annotations

import csv
import json
import math
import random
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import run_command
from runs import rows_of, run_in
from tuning import config_of, write_llama

from experiments.cli.command_spec import MISTAKES
from experiments.configs.train import ConfigError
from experiments.data.tokenizer import ByteTokenizer
from experiments.evaluate import run, tasks
from experiments.evaluate.config import FORMATS, HARNESS, EvaluateConfig, check_tasks
from experiments.evaluate.tasks import Question, graded, task_of
from experiments.finetune import job, loop
from experiments.training.result import read_result
from fnshard.launcher.rank import Stop

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("forked")
LETTERS = "ABCD"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of bytes whose weights are large, so that it has opinions."""
    ids = {"bos_token_id": ByteTokenizer().bos, "pad_token_id": ByteTokenizer().pad}
    folder = tmp_path_factory.mktemp("model")
    return write_llama(folder, max_position_embeddings=256, initializer_range=0.5, **ids)


def word(draw: random.Random, most: int = 9) -> str:
    return "".join(draw.choice("abcdefgh ") for _ in range(draw.randrange(1, most))).strip() or "a"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of each format, made here."""
    folder, draw = tmp_path_factory.mktemp("tasks"), random.Random(0)
    count = range(10)
    rows: dict[str, list[dict[str, Any]]] = {
        "arc": [
            {"question": {"stem": word(draw, 20), "choices": [
                {"text": word(draw), "label": label} for label in "1234"[: draw.randrange(2, 5)]]},
             "answerKey": draw.choice("12")} for _ in count
        ],
        "hellaswag": [
            {"activity_label": word(draw), "ctx_a": word(draw), "ctx_b": word(draw),
             "endings": [f"{word(draw)} [title] {word(draw)} [step] x" for _ in range(4)],
             "label": draw.randrange(4)} for _ in count
        ],
        "gsm8k": [{"question": word(draw, 20), "answer": f"so #### {n}"} for n in range(6)],
    }  # fmt: skip
    made = {name: folder / f"{name}.jsonl" for name in rows}
    for name, path in made.items():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
    lettered = [[word(draw, 20), *(word(draw) for _ in LETTERS), draw.choice(LETTERS)] for _ in count]
    for name in ("mmlu", "ceval"):
        made[name] = folder / f"{name}_test.csv"
        with made[name].open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if name == "ceval":
                writer.writerow(["id", "question", *LETTERS, "answer"])
            writer.writerows([i, *row] if name == "ceval" else row for i, row in enumerate(lettered))
    return made


def measured(
    model: Path, folder: Path, *tasks: str, launch: Any = None, **how: Any
) -> dict[str, dict[str, float]]:
    """One rank is this process; several are forked, but where `launch` says otherwise."""
    defaults = {"ranks": 1, "backend": "eager", "device": "cpu", "tokens": 2, "rows": 8}
    config = EvaluateConfig(**{"model": str(model), "tasks": tasks, "folder": str(folder), **defaults, **how})
    with pytest.MonkeyPatch.context() as patch:
        if launch or config.ranks == 1:
            patch.setattr(run.fs, "launch", launch or (lambda fn, *, args, **_: fn(*args)))
        run.evaluate(config, folder)
    return json.loads((folder / "results.json").read_text())["results"]


def test_questions_are_in_the_harness_s_words(files):
    first = {kind: task_of(f"{kind}:{path}").questions[0] for kind, path in files.items()}
    row = next(csv.reader(files["mmlu"].open()))
    assert first["mmlu"].prompt == (
        "The following are multiple choice questions (with answers) about mmlu.\n\n"
        f"{row[0]}\nA. {row[1]}\nB. {row[2]}\nC. {row[3]}\nD. {row[4]}\nAnswer:"
    )
    assert first["mmlu"].solution == f" {row[5]}" and first["ceval"].prompt.endswith("\n答案：")
    assert "[title]" not in str(first["hellaswag"]) and "[step]" not in str(first["hellaswag"])
    shots = task_of(f"gsm8k:{files['gsm8k']}:{files['gsm8k']}", shots=2, limit=3).questions
    assert len(shots) == 3 and shots[2].prompt.count("####") == 2 and shots[2].prompt.count("Question:") == 3
    assert graded(Question("", (), "#### 1,200"), "x #### 1200.") == {"exact_match": 1.0, "strict_match": 1.0}


def test_numbers_are_those_of_plain_likelihoods(model, files, tmp_path):
    """By transformers itself, a choice at a time."""
    found = measured(model, tmp_path, *(f"{kind}:{files[kind]}" for kind in ("arc", "hellaswag", "mmlu")))
    plain, tokenizer = transformers.AutoModelForCausalLM.from_pretrained(model), ByteTokenizer()
    for kind in ("arc", "hellaswag", "mmlu"):
        right = {"acc": [], "acc_norm": []}
        for question in task_of(f"{kind}:{files[kind]}").questions:
            sums = []
            for choice in question.choices:
                prompt = [tokenizer.bos, *tokenizer.encode(question.prompt)]
                ids = torch.tensor([[*prompt, *tokenizer.encode(f" {choice}")]])[:, -257:]
                after = len(choice) + 1
                with torch.no_grad():
                    logprobs = plain(ids[:, :-1]).logits.log_softmax(-1)[0, -after:]
                sums.append(logprobs.gather(1, ids[0, -after:, None]).sum().item())
            norms = [s / len(choice) for s, choice in zip(sums, question.choices, strict=True)]
            for metric, numbers in (("acc", sums), ("acc_norm", norms)):
                right[metric].append(float(numbers.index(max(numbers)) == question.answer))
        for metric, values in right.items():
            of = found[f"{files[kind].stem}/{metric}"]
            assert of["value"] == pytest.approx(sum(values) / len(values)) and of["questions"] == len(values)
            deviation = torch.tensor(values).std().item()
            assert of["stderr"] == pytest.approx(deviation / math.sqrt(len(values)))


def test_two_ranks_of_the_command_answer_what_one_does_and_go_on_where_they_were_cut_off(
    model, files, tmp_path
):
    tasks = [f"arc:{files['arc']}", f"gsm8k:{files['gsm8k']}"]
    one = measured(model, tmp_path / "one", *tasks)
    command = ["experiments.evaluate", f"model={model}", f"tasks=[{','.join(tasks)}]", "rows=8", "tokens=2",
               "backend=eager", "device=cpu", "ranks=2"]  # fmt: skip
    done = run_command(command, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "arc/acc " in done.stdout and "arc: 10 questions\n" in done.stdout
    (results,) = tmp_path.glob("outputs/**/results.json")
    two = results.parent  # by model, tasks and settings
    assert json.loads((two / "of.json").read_text())["key"] == two.name
    assert json.loads(results.read_text())["results"] == one
    answers = sorted(two.glob("*/*.jsonl"))
    kept = {path: path.read_text() for path in answers}
    for path in answers:  # as a kill leaves them
        path.write_text(kept[path][: len(kept[path]) // 2])
    assert measured(model, two, *tasks, ranks=1) == one
    assert all(path.read_text().startswith(kept[path][: len(kept[path]) // 2]) for path in answers)
    with pytest.raises(ConfigError, match="its answers are of another model, task or setting"):
        measured(model, two, *tasks, tokens=3)
    wrong = run_command([*command, "rows=none"], tmp_path)
    assert wrong.returncode == 2 and "rows=none" in wrong.stderr


def of_files(rank: int, fn: Any, *args: Any, **how: Any) -> Any:
    """Call it where the harness knows the tasks of files alone: to read its own takes ten seconds."""
    from lm_eval.tasks import TaskManager

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskManager, "__init__", partialmethod(TaskManager.__init__, include_defaults=False))
        return fn(*args, **how)


def test_numbers_are_those_of_lm_eval(model, files, tmp_path, ranks):
    """The same questions, asked by the harness of its own model, and of ours as one of its models."""
    lm_eval = pytest.importorskip("lm_eval")
    docs = tmp_path / "docs.jsonl"
    questions = task_of(f"arc:{files['arc']}").questions
    asked = [{"prompt": q.prompt, "choices": q.choices, "gold": q.answer} for q in questions]
    docs.write_text("".join(json.dumps(each) + "\n" for each in asked))
    sums = tmp_path / "sums.jsonl"
    sums.write_text(files["gsm8k"].read_text())
    common = {"dataset_path": "json", "test_split": "test", "num_fewshot": 0}
    metric = {"aggregation": "mean", "higher_is_better": True}
    choose = {
        "task": "own_arc", **common, "dataset_kwargs": {"data_files": {"test": str(docs)}},
        "output_type": "multiple_choice", "doc_to_text": "{{prompt}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold", "metric_list": [{"metric": m, **metric} for m in ("acc", "acc_norm")],
    }  # fmt: skip
    generate = {
        "task": "own_sums", **common, "dataset_kwargs": {"data_files": {"test": str(sums)}},
        "output_type": "generate_until", "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}", "metric_list": [{"metric": "exact_match", **metric}],
        "generation_kwargs": {"until": ["Question:"], "do_sample": False, "max_gen_toks": 2},
    }  # fmt: skip
    paths = []
    for task in (choose, generate):
        paths.append(tmp_path / f"{task['task']}.yaml")
        paths[-1].write_text(yaml.safe_dump(task))
    theirs = of_files(
        0, lm_eval.simple_evaluate, "hf", model_args=f"pretrained={model},dtype=float32",
        tasks=list(map(str, paths)), batch_size=4, device="cpu", bootstrap_iters=10,
    )  # fmt: skip
    ours = measured(
        model, tmp_path / "ours", *(f"lm-eval:{path}" for path in paths), ranks=2,
        launch=lambda fn, *, args, **_: ranks(2).run(of_files, fn, *args),
    )  # fmt: skip
    direct = measured(model, tmp_path / "direct", f"arc:{files['arc']}")
    for name in ("acc", "acc_norm"):
        value, spread = (theirs["results"]["own_arc"][f"{name}{of},none"] for of in ("", "_stderr"))
        assert ours[f"own_arc/{name}"]["value"] == pytest.approx(value, abs=5e-4)
        assert direct[f"arc/{name}"]["value"] == pytest.approx(value, abs=5e-4)
        assert direct[f"arc/{name}"]["stderr"] == pytest.approx(spread, abs=5e-4)
    assert ours["own_sums/exact_match"]["value"] == theirs["results"]["own_sums"]["exact_match,none"]


BROKEN = {
    "nothing": ("arc", "", "nothing is in it"),
    "no JSON": ("arc", '{"question": \n', "line 1: Expecting value"),
    "a list": ("gsm8k", "[1]\n", "line 1: expected an object, got list"),
    "no key": ("gsm8k", '{"question": "x"}\n', "line 1: no 'answer'"),
    "no number": ("gsm8k", '{"question": "x", "answer": "4"}\n', "line 1: answer: expected #### before"),
    "another letter": ("mmlu", "q,a,b,c,d,E\n", "line 1: answer 'E': one of A, B, C, D"),
    "five columns": ("mmlu", "q,a,b,c,A\n", "line 1: expected 6 columns, got 5"),
    "no such label": (
        "arc", '{"question": "x", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "3"}\n',
        "line 1: answer '3': one of 1, 2"),
    "one choice": (
        "hellaswag", '{"activity_label": "", "ctx_a": "", "ctx_b": "", "endings": ["x"], "label": 0}\n',
        "line 1: expected two choices or more"),
    "no text": ("gsm8k", '{"question": 5, "answer": "#### 1"}\n', "line 1: question: expected text, got 5"),
    "bytes": ("ceval", b"\xff\xfe\n", "can't decode byte"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_one_error(tmp_path, case):
    kind, text, message = BROKEN[case]
    path = tmp_path / f"broken.{'csv' if kind in ('mmlu', 'ceval') else 'jsonl'}"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as error:
        task_of(f"{kind}:{path}")
    assert str(path) in str(error.value) and message in str(error.value)


def test_tasks_that_name_nothing_are_one_error(tmp_path):
    with pytest.raises(ConfigError, match=r"tasks=arc: expected.*\n.*tasks=quiz:x: expected FORMAT:FILE"):
        check_tasks(("arc", "quiz:x"))
    with pytest.raises(ConfigError, match=r"shots=2: arc:a\.jsonl names no file of shots"):
        check_tasks(("arc:a.jsonl",), 2)
    assert set(FORMATS) == {*tasks.FORMATS, HARNESS}
    with pytest.raises(ConfigError, match="there is no such file"):
        task_of(f"arc:{tmp_path / 'none'}")
    assert ConfigError in MISTAKES or issubclass(ConfigError, MISTAKES)


def test_a_fine_tuned_model_is_evaluated_before_during_and_after(model, data, files, tmp_path):
    task = f"arc:{files['arc']}"
    config = config_of(model, data, tmp_path, f"run.evaluate=[{task}]", "data.context=48")
    loop.finetune(config, run_in(tmp_path / "run"), [], Stop())
    alone = measured(model, tmp_path / "alone", task)["arc/acc"]["value"]
    before = json.loads((tmp_path / "run" / "before.json").read_text())
    assert before["held_out_arc/acc"] == pytest.approx(alone)
    rows = [row for row in rows_of(tmp_path / "run") if "held_out_loss" in row]
    assert [row["step"] for row in rows] == [3, 6] and all("held_out_arc/acc_norm" in row for row in rows)
    assert read_result(tmp_path / "run")["held_out_arc/acc"] == rows[-1]["held_out_arc/acc"]
    wrong = replace(config, run=replace(config.run, evaluate=("arc:none.jsonl", "lm-eval:arc_easy")))
    with pytest.raises(ConfigError, match=r"run\.evaluate: none\.jsonl: there is no such file"):
        job.prepare(wrong)
