"""Evaluation: questions from public formats, likelihoods and answers, ranks, resume, lm-eval's numbers."""

from __future__ import annotations

import csv
import json
import math
import random
import re
import shutil
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from commands import run_command
from errors import raises
from runs import rows_of, run_in
from tuning import config_of, write_llama

from experiments import bases, finetune
from experiments.data.images import open_image
from experiments.data.tokenizer import ByteTokenizer, open_directory
from experiments.evaluate import harness, run
from experiments.evaluate.config import EvaluateConfig
from experiments.evaluate.scorer import Scorer
from experiments.evaluate.tasks import (
    CEVAL_SUBJECTS,
    STOPS,
    Question,
    check_tasks,
    grade_answer,
    read_tasks,
    task_of,
)
from experiments.lib.checks import ConfigError
from experiments.lib.compose import MISTAKES
from experiments.lib.files import checksum
from experiments.lib.folder import read_result
from fnshard.errors import MissingExtraError
from fnshard.launcher.rank import Stop

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("forked")
LETTERS = "ABCD"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a random model of bytes whose weights are large, so that it has opinions."""
    ids = {"bos_token_id": ByteTokenizer().bos, "pad_token_id": ByteTokenizer().pad}
    folder = tmp_path_factory.mktemp("model")
    return write_llama(folder, max_position_embeddings=256, initializer_range=0.5, **ids)


def word(draw: random.Random, most: int = 9) -> str:
    return "".join(draw.choice("abcdefgh ") for _ in range(draw.randrange(1, most))).strip() or "a"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make a file of each format, made here."""
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


def evaluate_model(
    model: Path, folder: Path, *tasks: str, launch: Any = None, **how: Any
) -> dict[str, dict[str, float]]:
    """Evaluate on this process, or on several forked ranks unless `launch` says otherwise."""
    defaults = {"ranks": 1, "backend": "eager", "device": "cpu", "tokens": 2, "rows": 8}
    config = EvaluateConfig(**{"model": str(model), "tasks": tasks, "folder": str(folder), **defaults, **how})
    with pytest.MonkeyPatch.context() as patch:
        if launch or config.ranks == 1:
            patch.setattr(run.fs, "launch", launch or (lambda fn, *, args, **_: fn(*args)))
        run.evaluate(config, folder)
    return json.loads((folder / "results.json").read_text())["results"]


def test_every_key_is_named():
    assert {*EvaluateConfig.__dataclass_fields__} <= {*re.findall(r"`(\w+)`", EvaluateConfig.__doc__)}


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
    assert grade_answer(Question("", (), "#### 1,200"), "x #### 1200.") == {
        "exact_match": 1.0,
        "strict_match": 1.0,
    }


def test_numbers_are_those_of_plain_likelihoods(model, files, tmp_path):
    """transformers itself scores one choice at a time."""
    found = evaluate_model(
        model, tmp_path, *(f"{kind}:{files[kind]}" for kind in ("arc", "hellaswag", "mmlu"))
    )
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


def test_answers_are_those_that_transformers_generates(model, files, tmp_path):
    task = f"gsm8k:{files['gsm8k']}"
    evaluate_model(model, tmp_path / "out", task, tokens=4)
    plain, tokenizer = transformers.AutoModelForCausalLM.from_pretrained(model), open_directory(model)
    (answers,) = (tmp_path / "out").glob("*/0.jsonl")
    rows = [json.loads(line) for line in answers.read_bytes().splitlines() if line]
    assert sorted(row["question"] for row in rows) == [*range(6)]
    for row in rows:
        prompt = task_of(task).questions[row["question"]].prompt
        ids = torch.tensor([[*tokenizer.begin, *tokenizer.encode(prompt)]])
        drawn = plain.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :].tolist()
        text = tokenizer.decode([token for token in drawn if token not in tokenizer.stops])
        assert row["answer"] == re.split("|".join(map(re.escape, STOPS)), text)[0]


@pytest.mark.long
def test_two_ranks_of_the_command_answer_what_one_does_and_go_on_where_they_were_cut_off(
    model, files, tmp_path
):
    tasks = [f"arc:{files['arc']}", f"gsm8k:{files['gsm8k']}"]
    one = evaluate_model(model, tmp_path / "one", *tasks)
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
    assert answers
    kept = {path: path.read_text() for path in answers}
    for path in answers:  # as a kill leaves them
        path.write_text(kept[path][: len(kept[path]) // 2])
    assert evaluate_model(model, two, *tasks, ranks=1) == one
    assert all(path.read_text().startswith(kept[path][: len(kept[path]) // 2]) for path in answers)
    with raises(ConfigError, leaves="folder=", fix="another folder"):
        evaluate_model(model, two, *tasks, tokens=3)
    wrong = run_command([*command, "rows=none"], tmp_path)
    assert wrong.returncode == 2 and "rows=none" in wrong.stderr


def test_a_folder_keeps_answers_of_one_dtype_and_one_tokenizer(model, files, tmp_path):
    def launch(fn: Any, *, args: tuple[Any, str], **_: Any) -> None:
        Path(args[1], "results.json").write_text('{"results": {}, "table": ""}')

    copied = shutil.copytree(model, tmp_path / "model")
    ask = partial(evaluate_model, copied, tmp_path / "out", f"arc:{files['arc']}", launch=launch)
    ask()
    ask(dtype="float32")  # which "auto" stands for on a CPU
    with raises(ConfigError, leaves="folder=", fix="another folder"):
        ask(dtype="bfloat16")
    (copied / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with raises(ConfigError, leaves="folder=", fix="another folder"):
        ask()


def of_files(rank: int, fn: Any, *args: Any, **how: Any) -> Any:
    """Call it where the harness knows the tasks of files alone: to read its own takes ten seconds."""
    from lm_eval.tasks import TaskManager

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskManager, "__init__", partialmethod(TaskManager.__init__, include_defaults=False))
        return fn(*args, **how)


def test_numbers_are_those_of_lm_eval(model, files, tmp_path, ranks):
    """The harness asks the same questions of its own model, and of ours as one of its models."""
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
    ours = evaluate_model(
        model, tmp_path / "ours", *(f"lm-eval:{path}" for path in paths), ranks=2,
        launch=lambda fn, *, args, **_: ranks(2).run(of_files, fn, *args),
    )  # fmt: skip
    direct = evaluate_model(model, tmp_path / "direct", f"arc:{files['arc']}")
    for name in ("acc", "acc_norm"):
        value, spread = (theirs["results"]["own_arc"][f"{name}{of},none"] for of in ("", "_stderr"))
        assert ours[f"own_arc/{name}"]["value"] == pytest.approx(value, abs=5e-4)
        assert direct[f"arc/{name}"]["value"] == pytest.approx(value, abs=5e-4)
        assert direct[f"arc/{name}"]["stderr"] == pytest.approx(spread, abs=5e-4)
    assert ours["own_sums/exact_match"]["value"] == theirs["results"]["own_sums"]["exact_match,none"]


def test_without_lm_eval_its_tasks_are_one_error_that_names_the_extra(model, tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    with raises(MissingExtraError, leaves="lm-eval", fix="pip install 'fnshard[lm-eval]'"):
        evaluate_model(model, tmp_path, "lm-eval:arc_easy")


ENDINGS = '"activity_label": "a", "ctx_a": "b", "ctx_b": "c", "endings"'
ARC = '{"question": "x", "choices": {"text": ["a", "b"], "label": '
BROKEN = {
    "nothing": ("arc", "", "nothing"),
    "no JSON": ("arc", '{"question": \n', ["line 1", "no JSON"]),
    "two of three": (
        "gsm8k",
        '{"question": "x", "answer": "#### 1"}\n{"a": 1}\n[2',
        ["line 2", "line 3"],
    ),
    "a list": ("gsm8k", "[1]\n", ["record 1", "an object", "int"]),
    "half a list": ("gsm8k", '[{"question": "x"},\n', ["the file", "list of JSON"]),
    "deep": ("gsm8k", '{"a":' * 100_000, ["line 1", "nested"]),
    "a deep list": ("gsm8k", "[" * 100_000, ["the file", "nested"]),
    "no key": ("gsm8k", '{"question": "x"}\n', ["line 1", "'answer'"]),
    "no mark": ("gsm8k", '{"question": "x", "answer": "4"}\n', ["line 1: answer", "####"]),
    "no number": (
        "gsm8k",
        '{"question": "x", "answer": "#### "}\n',
        ["line 1: answer", "one number"],
    ),
    "two numbers": ("gsm8k", '{"question": "x", "answer": "#### x then 3"}\n', ["line 1", "'x then 3'"]),
    "no question": ("gsm8k", '{"question": " ", "answer": "#### 3"}\n', ["line 1: question", "empty"]),
    "half a character": (
        "gsm8k",
        '{"question": "\\ud800", "answer": "#### 3"}\n',
        ["line 1: question", "half"],
    ),
    "another letter": ("mmlu", "q,a,b,c,d,E\n", ["line 1: answer 'E'", "A, B, C, D"]),
    "five columns": ("mmlu", "q,a,b,c,A\n", ["line 1", "expected 6", "got 5", "q | a | b | c | A", "header"]),
    "other columns": (
        "mmlu",
        "q,a,b,c,d,A\n\nq,r,a,b,c,d,A\n",
        ["line 3", "expected 6", "got 7", "q | r | a"],
    ),
    "fewer than the header": (
        "ceval",
        "id,question,A,B,C,D,answer\n1,q,a,b,c,A\n",
        ["line 2", "(id, question"],
    ),
    "a quote": ("mmlu", '"q,a,b,c,d,A\n', ["line 1", "no CSV"]),
    "an empty choice": ("mmlu", "q,a,,c,d,A\n", ["line 1: choices[1]", "empty"]),
    "an empty question": ("mmlu", ",a,b,c,d,A\n", ["line 1: question", "empty"]),
    "no such number": (
        "mmlu",
        '[{"question": "q", "choices": ["a", "b"], "answer": 2}]',
        ["record 1: answer 2", "0, 1"],
    ),
    "true": (
        "mmlu",
        '[{"question": "q", "choices": ["a", "b"], "answer": true}]',
        ["record 1: answer True"],
    ),
    "a cell of numpy's": (
        "mmlu",
        "question,choices,answer\nq,['a' 'b'],0\n",
        ["line 2: choices", "two"],
    ),
    "no such label": (
        "arc",
        f'{ARC} ["1", "2"]}}, "answerKey": "3"}}\n',
        ["line 1: answerKey '3'", "1, 2"],
    ),
    "fewer labels": (
        "arc",
        f'{ARC} ["1"]}}, "answerKey": "1"}}\n',
        ["line 1: choices", "a label of"],
    ),
    "equal labels": (
        "arc",
        f'{ARC} ["1", "1"]}}, "answerKey": "1"}}\n',
        ["line 1: choices", "a label of"],
    ),
    "no labels": (
        "arc",
        '{"question": "x", "choices": ["a", "b"], "answerKey": "A"}',
        ["line 1: choices", "text"],
    ),
    "one choice": (
        "hellaswag",
        f'{{{ENDINGS}: ["x"], "label": 0}}\n',
        ["line 1: endings", "two choices"],
    ),
    "a text of choices": (
        "hellaswag",
        f'{{{ENDINGS}: "xyz", "label": 0}}\n',
        ["line 1: endings", "two choices"],
    ),
    "a mark alone": (
        "hellaswag",
        f'{{{ENDINGS}: ["[x]", "y"], "label": 0}}\n',
        ["line 1: endings[0]", "empty"],
    ),
    "no label": ("hellaswag", f'{{{ENDINGS}: ["x", "y"], "label": ""}}\n', ["line 1: label ''", "0, 1"]),
    "no text": ("gsm8k", '{"question": 5, "answer": "#### 1"}\n', ["line 1: question", "text", "5"]),
    "bytes": ("ceval", b"q,a\n\xe9\n", ["line 2", "UTF-8"]),
    "UTF-16": ("ceval", "q,a,b,c,d,A".encode("utf-16"), ["line 1", "UTF-8"]),
    "gzip": ("gsm8k", b"\x1f\x8b\x08", ["line 1", "UTF-8"]),
    "half of Parquet": ("gsm8k", b"PAR1xxxx", "damaged"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_one_error_of_files_and_lines(tmp_path, case):
    kind, text, leaves = BROKEN[case]
    path = tmp_path / f"broken.{'jsonl' if isinstance(text, str) and text[:1] in '[{' else 'csv'}"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with raises(ConfigError, leaves=leaves) as error:
        task_of(f"{kind}:{path}")
    assert str(path) in str(error.value)
    assert not re.search(r"zip\(\)|int\(\)|NoneType|subscript|indices", str(error.value))


def test_all_files_that_are_broken_are_named_together(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    one, two, none = (tmp_path / f"{name}.jsonl" for name in ("one", "two", "none"))
    asked = [f"arc:{one}:{one}", f"gsm8k:{none}:{two}"]
    with pytest.raises(ConfigError) as error:
        evaluate_model(tmp_path, tmp_path / "out", *asked, shots=1)
    for name in ("one.jsonl", "none.jsonl", "two.jsonl", "config.json", "tokenizer.json"):
        assert name in str(error.value)


LISTED = {"question": "q?", "choices": ["w", "x", "y", "z"], "answer": 2}
SPELLED = {"question": "q?", **dict(zip("ABCD", "wxyz", strict=True)), "answer": "C"}
TEN = list("qrstuvwxyz")
FORMS = {
    "no header": ("csv", "q?,w,x,y,z,C\n"),
    "header": ("csv", "question,A,B,C,D,answer\nq?,w,x,y,z,C\n"),
    "header of capitals and blanks": ("csv", "\ufeff, Question ,A,B,C,D,Answer,Subject\n0,q?,w,x,y,z, C,\n"),
    "list in a cell": ("csv", "question,subject,choices,answer\nq?,,\"['w', 'x', 'y', 'z']\",2\n"),
    "a column too many": ("csv", "question,A,B,C,D,E,answer\nq?,w,x,y,z,,C\n"),
    "JSONL": ("jsonl", json.dumps(SPELLED)),
    "JSON list": ("json", json.dumps([LISTED], indent=1)),
    "a list in JSONL": ("jsonl", json.dumps([SPELLED])),
    "options": ("json", json.dumps([{"question": "q?", "options": list("wxyz"), "answer": "C"}])),
    "Parquet": ("parquet", [LISTED]),
}  # fmt: skip


def leave_records(path: Path, what: Any) -> Path:
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(
            pytest.importorskip("pyarrow").Table.from_pylist(what), path
        )
    else:
        path.write_text(what, encoding="utf-8")
    return path


@pytest.mark.parametrize("form", FORMS)
def test_a_question_is_the_same_in_every_kind_of_file(tmp_path, form):
    ending, what = FORMS[form]
    path = leave_records(tmp_path / f"biology_test.{ending}", what)
    (question,) = task_of(f"mmlu:{path}").questions
    assert question.prompt.endswith("about biology.\n\nq?\nA. w\nB. x\nC. y\nD. z\nAnswer:")
    assert (question.choices, question.answer) == (tuple("ABCD"), 2)


@pytest.mark.parametrize(
    ("ending", "what"),
    [
        ("csv", f"q?,{','.join(TEN)},J\n"),
        ("csv", f"question,{','.join('ABCDEFGHIJ')},answer\nq?,{','.join(TEN)},J\n"),
        ("jsonl", json.dumps({"question": "q?", "options": TEN, "answer": "J", "answer_index": 9})),
        ("parquet", [{"question": "q?", "options": TEN, "answer": "J", "category": "high_school_law"}]),
    ],
)
def test_ten_choices(tmp_path, ending, what):
    (question,) = task_of(f"mmlu:{leave_records(tmp_path / f'pro.{ending}', what)}").questions
    assert question.choices == tuple("ABCDEFGHIJ") and question.answer == 9
    assert question.prompt.endswith("J. z\nAnswer:")
    assert ("about high school law." in question.prompt) == (ending == "parquet")


def test_parquet_of_the_other_formats(tmp_path):
    """The hub has labels of ARC in two lists, and those of HellaSwag as text."""
    rows = {
        "arc": {
            "id": "1",
            "question": "q?",
            "choices": {"text": ["x", "y"], "label": ["A", "B"]},
            "answerKey": "B",
        },
        "hellaswag": {"activity_label": "a", "ctx_a": "b", "ctx_b": "", "endings": ["x", "y"], "label": "1"},
        "gsm8k": {"question": "q?", "answer": "so\n#### 1,000"},
        "ceval": {
            "question": "q?",
            **dict(zip("ABCD", "wxyz", strict=True)),
            "answer": "B",
            "explanation": None,
        },
    }
    found = {k: task_of(f"{k}:{leave_records(tmp_path / f'{k}.parquet', [row])}") for k, row in rows.items()}
    assert [found[kind].questions[0].answer for kind in rows] == [1, 1, "so\n#### 1,000", 1]


def test_subjects_of_ceval_are_called_as_its_prompts_call_them(tmp_path):
    for name in ("law_val", "middle_school_physics_dev", "physician_test"):
        path = leave_records(tmp_path / f"{name}.csv", "id,question,A,B,C,D,answer\n0,q?,w,x,y,z,C\n")
        begin = task_of(f"ceval:{path}").questions[0].prompt.splitlines()[0]
        subject = {"l": "法学", "m": "初中物理", "p": "医师资格"}[name[0]]
        assert begin == f"以下是中国关于{subject}的单项选择题，请选出其中的正确答案。"
    assert len(CEVAL_SUBJECTS) == 52


@pytest.mark.parametrize("kind", ["arc", "mmlu", "gsm8k", "hellaswag", "ceval"])
@pytest.mark.parametrize("other", [False, True])
def test_a_question_is_not_among_its_own_shots(files, tmp_path, kind, other):
    """Whether its file is the file of shots, or another one has the question, too, in other blanks."""
    path = shots = files[kind]
    if other:
        shots = tmp_path / path.name
        shots.write_text(re.sub(r"([a-h]) ([a-h])", r"\1  \2", path.read_text()))
    plain, asked = (task_of(f"{kind}:{path}:{shots}", shots=n).questions for n in (0, 3))
    begin = re.match(r"(?s)(The following|以下).*?\n\n", plain[0].prompt)
    for question, alone in zip(asked, plain, strict=True):
        own = alone.prompt.removeprefix(begin[0] if begin else "")
        before = question.prompt.removesuffix(own)
        assert own not in re.sub("  ", " ", before) and question.prompt.endswith(own)
        assert question.prompt.count("\n\n") == 3 + bool(begin)  # as many as were asked for
    count = len(plain)
    with raises(ConfigError, leaves=str(shots), says=[f"{count - 1} records", f"shots={count}"]):
        task_of(f"{kind}:{path}:{shots}", shots=count)


def test_shots_are_of_the_question_s_subject(tmp_path):
    rows = [
        {**LISTED, "question": f"{s} {n}?", "subject": f"high_{s}"} for n in range(3) for s in ("law", "art")
    ]
    path = leave_records(tmp_path / "all.json", json.dumps(rows))
    for question in task_of(f"mmlu:{path}:{path}", shots=2).questions:
        about = question.subject.removeprefix("high_")
        assert f"about high {about}." in question.prompt and question.prompt.count(f"\n{about} ") == 3


def test_a_question_of_no_subject_is_asked_after_any(tmp_path):
    path = leave_records(tmp_path / "test.csv", "q?,w,x,y,z,C\n")
    rows = [{**LISTED, "question": f"{s}?", "subject": s} for s in ("law", "art")]
    shots = leave_records(tmp_path / "shots.json", json.dumps(rows))
    (question,) = task_of(f"mmlu:{path}:{shots}", shots=2).questions
    assert "law?" in question.prompt and "art?" in question.prompt
    rows = [{**LISTED, "question": "any?"}, {**LISTED, "question": "law?", "subject": "law"}]
    shots = leave_records(tmp_path / "shots.json", json.dumps([rows[1], rows[0]]))
    asked = leave_records(
        tmp_path / "asked.json", json.dumps([{**LISTED, "question": "b?", "subject": "law"}])
    )
    (question,) = task_of(f"mmlu:{asked}:{shots}", shots=2).questions
    assert question.prompt.index("law?") < question.prompt.index("any?")  # as they stand in the file


def test_a_name_that_is_too_long_is_no_file():
    with raises(ConfigError, leaves="a" * 300, says="no such file"):
        task_of(f"gsm8k:{'a' * 300}")


def test_a_shuffled_question_is_the_same_question(tmp_path):
    rows = [{**LISTED, "choices": list(order), "answer": 1} for order in ("wxyz", "zyxw")]
    rows += [{**LISTED, "question": "another?"}]
    path = leave_records(tmp_path / "all.json", json.dumps(rows))
    first = task_of(f"mmlu:{path}:{path}", shots=1).questions[0]
    assert first.prompt.count("q?") == 1 and "another?" in first.prompt


def test_files_of_one_name_are_two_tasks(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        leave_records(tmp_path / folder / "test.csv", "q?,w,x,y,z,C\n")
    texts = [f"mmlu:{tmp_path}/{folder}/test.csv" for folder in "ab"]
    assert [task.name for task in read_tasks(texts)] == [f"{tmp_path}/{folder}/test" for folder in "ab"]
    assert [task.name for task in read_tasks(texts[:1])] == ["test"]
    assert len({task.name for task in read_tasks([texts[0], texts[0].replace("mmlu", "ceval")])}) == 2
    with raises(ConfigError, leaves=texts[0], says="2 times"):
        read_tasks([texts[0]] * 2)


@pytest.mark.parametrize("generated", ["", "none", "####", "#### .", "$", ".", ","])
def test_an_answer_without_a_number_never_scores(generated):
    for answer in ("#### ", "####", "x", "#### $", "#### .", "#### ,"):
        assert set(grade_answer(Question("", (), answer), generated).values()) == {0.0}


# ------------------------------------------------------------------ tokens


@pytest.fixture(scope="module")
def joining(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model whose tokenizer has tokens that span the end of a question and its answer."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("joining")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.decoder = tokenizers.decoders.Fuse()
    texts = [*(f"Answer: {letter}" for letter in "ABCD"), "Question: x\n."] * 50
    bpe.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=264, special_tokens=["</s>"]))
    write_llama(folder, max_position_embeddings=256)
    bpe.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("context", ["Question: x\nAnswer:", "Question: x\nAnswer: ", "Answe", ""])
@pytest.mark.parametrize("after", [" C", "r: C", "C"])
def test_all_of_a_continuation_is_scored_and_nothing_of_its_context(joining, context, after):
    tokenizer = open_directory(joining)
    scorer = Scorer(None, tokenizer, None, None)
    before, what = scorer.pair(context, after)
    assert what and tokenizer.decode(before) == context.rstrip()
    assert tokenizer.decode(what) == context[len(context.rstrip()) :] + after


def test_a_vocabulary_that_joins_is_measured_and_one_without_the_letters_is_refused(joining, tmp_path):
    path = leave_records(tmp_path / "x.json", json.dumps([{**LISTED, "question": "x"}]))
    assert evaluate_model(joining, tmp_path / "out", f"mmlu:{path}")["x/acc"]["questions"] == 1
    other = leave_records(tmp_path / "y.json", json.dumps([{**LISTED, "choices": list("vwxyz")}]))
    with raises(ConfigError, leaves="'E'"):
        evaluate_model(joining, tmp_path / "out", f"mmlu:{other}")
    with raises(ConfigError, leaves="tokens=256", fix="tokens=128"):
        sums = leave_records(tmp_path / "z.jsonl", '{"question": "x", "answer": "#### 1"}')
        evaluate_model(joining, tmp_path / "out", f"gsm8k:{sums}", tokens=256)


@pytest.mark.long  # test_numbers_are_those has several lengths
def test_texts_of_many_lengths_are_measured_without_a_warning(model, tmp_path, recwarn):
    """Programs for two widths, of which none is the user's affair."""
    rows = [{**LISTED, "question": "q" * n} for n in (10, 90)]
    path = leave_records(tmp_path / "x.json", json.dumps(rows))
    sums = [{"question": "q" * n, "answer": "#### 1"} for n in (10, 90)]
    more = leave_records(tmp_path / "y.json", json.dumps(sums))
    evaluate_model(model, tmp_path / "out", f"mmlu:{path}", f"gsm8k:{more}", rows=1)
    assert not [str(each.message) for each in recwarn if "compiling" in str(each.message)]


# ------------------------------------------------------------------ questions with images


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a random model that sees, whose weights are large."""
    pytest.importorskip("transformers.vision_utils")
    folder = tmp_path_factory.mktemp("seeing")
    few = {**bases._TEXT, "num_hidden_layers": 1, "initializer_range": 0.3}
    with torch.random.fork_rng(), mock.patch.object(bases, "_TEXT", few):
        torch.manual_seed(0)
        bases.write_model("tiny-qwen2-vl", folder)
    return folder


@pytest.fixture(scope="module")
def pictured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a file of MMMU's form, with images of noise beside it; one of its questions is open."""
    Image = pytest.importorskip("PIL.Image")
    folder, draw = tmp_path_factory.mktemp("pictured"), torch.Generator().manual_seed(0)
    for name, height, width in (("a", 24, 40), ("b", 56, 24)):
        noise = torch.randint(0, 255, (height, width, 3), generator=draw, dtype=torch.uint8)
        Image.fromarray(noise.numpy()).save(folder / f"{name}.png")
    asked = ["Is <image 1> or <image 2> it?", "<image 2> or <image 1>?", "What?", "Which of <image 1>?"]
    rows = [{"question": q, "options": "['left', 'right', '<image 1>']", "answer": "BACA"[n],
             "image_1": "a.png", "image_2": "b.png", "question_type": "multiple-choice"}
            for n, q in enumerate(asked)]  # fmt: skip
    rows[2] |= {"options": "['left', 'right']", "answer": "A", "image_2": None}
    rows.append({**rows[0], "options": "[]", "question_type": "open", "answer": "both"})
    path = folder / "mmmu.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_questions_with_images_are_asked_in_mmmu_s_words(pictured):
    task = task_of(f"mmmu:{pictured}")
    first, second, bare, _ = task.questions
    assert task.left_out == 1 and len(task.questions) == 4
    assert first.prompt == (
        "Is <image> or <image> it?\nA. left\nB. right\nC. <image>\n"
        "Answer with the option letter from the given choices directly."
    )
    a, b = ((pictured.parent / f"{name}.png").read_bytes() for name in "ab")
    assert first.images == (a, b, a) and second.images == (b, a, a)  # as the texts name them
    assert bare.prompt.startswith("<image>What?") and bare.images == (a,)  # no text names it
    assert (first.choices, first.answer, bare.choices) == (("A", "B", "C"), 1, ("A", "B"))


def test_the_same_questions_in_other_files_are_the_same_task(pictured, tmp_path):
    """A column of bytes, as Parquet has them, and a list of paths."""
    rows = [json.loads(line) for line in pictured.read_text().splitlines()]
    read = lambda name: {"bytes": (pictured.parent / name).read_bytes(), "path": None} if name else None  # noqa: E731
    columns = [{**row, **{f"image_{n}": read(row[f"image_{n}"]) for n in (1, 2)}} for row in rows]
    leave_records(tmp_path / "mmmu.parquet", columns)
    lists = [{"images": [str(pictured.parent / f"{name}.png") for name in "ab"][: 1 if n == 2 else 2],
              **{k: v for k, v in row.items() if not k.startswith("image")}}
             for n, row in enumerate(rows)]  # fmt: skip
    listed = leave_records(tmp_path / "mmmu.jsonl", "".join(json.dumps(row) + "\n" for row in lists))
    found = [task_of(f"mmmu:{path}") for path in (pictured, tmp_path / "mmmu.parquet", listed)]
    assert len({task.digest for task in found}) == 1 and {task.left_out for task in found} == {1}


@pytest.mark.long  # test_vision looks at images, test_numbers at questions
def test_numbers_of_questions_with_images_are_those_of_transformers(seeing, pictured, tmp_path, ranks):
    """Each question alone, by the model itself; on two ranks it is the same."""
    plain = transformers.AutoModelForImageTextToText.from_pretrained(seeing).eval()
    tokenizer, right = open_directory(seeing), []
    images, task = tokenizer.images, task_of(f"mmmu:{pictured}")
    for question in task.questions:
        parts: list[dict[str, str]] = []
        for number, text in enumerate(question.prompt.split("<image>")):
            parts += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": text}] * bool(text)
        said = [{"role": "user", "content": parts}]
        text = tokenizer.hf.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        expanded, _ = images.expand(text, [], question.images)
        ids = torch.tensor([tokenizer.hf(expanded, add_special_tokens=False).input_ids])
        pixels = images.hf(images=list(map(open_image, question.images)), return_tensors="pt")
        is_image = (ids == plain.config.image_token_id).int()
        with torch.no_grad():
            logits = plain(input_ids=ids, mm_token_type_ids=is_image, **pixels).logits[0, -1]
        letters = logits[[tokenizer.encode(choice)[0] for choice in question.choices]]
        right.append(float(letters.argmax() == question.answer))
    one = evaluate_model(seeing, tmp_path / "one", f"mmmu:{pictured}", rows=12)  # all choices at once
    two = evaluate_model(
        seeing, tmp_path / "two", f"mmmu:{pictured}", ranks=2, rows=6,
        launch=lambda fn, *, args, **_: ranks(2).run(of_rank, fn, *args),
    )  # fmt: skip
    assert one == two and one["mmmu/acc"]["value"] == pytest.approx(sum(right) / len(right))
    kept = sorted((tmp_path / "one").glob("*/*.jsonl"))
    by_number = {row["question"]: row["acc"] for path in kept for line in path.read_text().split("\n")
                 if line and (row := json.loads(line))}  # fmt: skip
    assert [by_number[number] for number in range(4)] == right


def of_rank(rank: int, fn: Any, *args: Any) -> Any:
    return fn(*args)


PICTURED = {"question": "<image 1>?", "options": ["a", "b"], "answer": "A", "image_1": "a.png"}
UNSEEN = {
    "no image": ({**PICTURED, "question": "?", "image_1": None}, ["line 1", "image_1"]),
    "not there": ({**PICTURED, "image_1": "no.png"}, ["line 1", "'no.png'", "no such file"]),
    "a number": ({**PICTURED, "image_1": 5}, ["line 1: image", "the path of a file", "5"]),
    "not given": (
        {**PICTURED, "question": "<image 2>?"},
        "line 1: image_2",
    ),
    "open": ({**PICTURED, "options": "[]"}, "1 open questions"),
}


@pytest.mark.parametrize("case", UNSEEN)
def test_a_question_without_its_image_is_one_error(pictured, case):
    row, leaves = UNSEEN[case]
    path = leave_records(pictured.parent / "wrong.jsonl", json.dumps(row))
    with raises(ConfigError, leaves=leaves):
        task_of(f"mmmu:{path}")


def test_images_that_cannot_be_shown_are_one_error(model, seeing, pictured, tmp_path):
    with raises(ConfigError, leaves="images", fix="a model of"):
        evaluate_model(model, tmp_path / "out", f"mmmu:{pictured}")
    with raises(ConfigError, leaves="shots=2", fix="shots=0"):
        check_tasks((f"mmmu:{pictured}",), 2)
    (pictured.parent / "half.png").write_bytes((pictured.parent / "a.png").read_bytes()[:90])
    half = leave_records(pictured.parent / "half.jsonl", json.dumps({**PICTURED, "image_1": "half.png"}))
    with raises(ConfigError, leaves="half: question 1", says="90 bytes"):
        evaluate_model(seeing, tmp_path / "half", f"mmmu:{half}")
    many = {**PICTURED, "question": "<image 1><image 1>" + 1024 * "x"}
    many = leave_records(pictured.parent / "many.jsonl", json.dumps(many))
    with raises(ConfigError, leaves="many: question 1", fix="leave it out", says="2 images"):
        evaluate_model(seeing, tmp_path / "many", f"mmmu:{many}")


# ------------------------------------------------------------------ folders of answers, devices


def test_answers_of_a_folder_are_looked_at_before_they_count(model, files, tmp_path):
    task, out = f"arc:{files['arc']}", tmp_path / "out"
    right = evaluate_model(model, out, task)
    (answers,) = out.glob("*/0.jsonl")
    good = answers.read_bytes()
    half = good[len(good) // 2 :]
    kept = {json.loads(line)["question"] for line in half.splitlines()[1:]}
    lost = {*range(10)} - kept
    number = min(lost)

    def signed(**values: Any) -> bytes:
        return json.dumps({**values, run.SUM: checksum(values)}).encode()

    wrong = [
        json.dumps({"question": number, "acc": 1, "acc_norm": 1}).encode(),  # without a checksum
        signed(question=99, acc=1, acc_norm=1),
        signed(question=str(number), acc=1, acc_norm=1),
        signed(question=number),
        signed(question=number, acc=7, acc_norm=1),
        signed(question=number, acc=1, acc_norm=math.nan),
        b"[]",
        b"5",
        b"\xff",
        b"[" * 100_000,
    ]
    left = b"\n".join(wrong) + b"\n" + half
    answers.write_bytes(left)
    assert kept and run.read_answers(answers.parent, task_of(task)).keys() == kept
    assert evaluate_model(model, out, task) == right
    lines = [line for line in answers.read_bytes()[len(left) :].splitlines() if line]
    assert sorted(json.loads(line)["question"] for line in lines) == sorted(lost)
    (out / "of.json").write_text("{")
    with raises(ConfigError, leaves="of.json", fix="another folder"):
        evaluate_model(model, out, task)


@pytest.mark.parametrize("device", ["cuda", "cuda:99", "tpu", ""])
def test_a_device_that_is_not_there_is_one_error(model, files, tmp_path, device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("it is there")
    with raises(ConfigError, leaves=f"device={device}", says=["cpu", "device=auto"]):
        evaluate_model(model, tmp_path, f"arc:{files['arc']}", device=device)


def test_tasks_that_name_nothing_are_one_error(tmp_path):
    with raises(ConfigError, leaves=["tasks=arc", "tasks=quiz:x"], says="FORMAT:FILE"):
        check_tasks(("arc", "quiz:x"))
    with raises(ConfigError, leaves=["shots=2", "arc:a.jsonl"], fix="arc:a.jsonl:FILE"):
        check_tasks(("arc:a.jsonl",), 2)
    with raises(ConfigError, leaves=str(tmp_path / "none"), says="no such file"):
        task_of(f"arc:{tmp_path / 'none'}")
    assert issubclass(ConfigError, MISTAKES)


@pytest.mark.long  # each by itself: test_finetune and here
def test_a_fine_tuned_model_is_evaluated_before_during_and_after(model, data, files, tmp_path):
    task = f"arc:{files['arc']}"
    config = config_of(model, data, tmp_path, f"run.evaluate=[{task}]", "data.context=48")
    finetune.finetune(config, run_in(tmp_path / "run"), [], Stop())
    alone = evaluate_model(model, tmp_path / "alone", task)["arc/acc"]["value"]
    before = json.loads((tmp_path / "run" / "before.json").read_text())
    assert before["held_out_arc/acc"] == pytest.approx(alone)
    rows = [row for row in rows_of(tmp_path / "run") if "held_out_loss" in row]
    assert [row["step"] for row in rows] == [3, 6] and all("held_out_arc/acc_norm" in row for row in rows)
    assert read_result(tmp_path / "run")["held_out_arc/acc"] == rows[-1]["held_out_arc/acc"]
    wrong = replace(config, run=replace(config.run, evaluate=("arc:none.jsonl", "lm-eval:arc_easy")))
    with raises(ConfigError, leaves=["run.evaluate: none.jsonl", "lm-eval:arc_easy"], says="no such file"):
        finetune.prepare(wrong)
