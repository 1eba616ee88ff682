"""Tasks: files of public benchmarks as questions, in the words in which lm-eval asks them.

MMLU (Hendrycks et al. 2021), ARC (Clark et al. 2018), HellaSwag (Zellers et al. 2019), GSM8K (Cobbe et al.
2021) and C-Eval (Huang et al. 2023); Gao et al. 2023 (lm-evaluation-harness) for the prompts.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.configs.train import ConfigError
from experiments.data.files import first_few
from fnshard.errors import report

LETTERS = "ABCD"
STOPS = ("Question:", "</s>", "<|im_end|>")  # what ends a generated answer


@dataclass(frozen=True)
class Question:
    """What is asked.

    Args:
        prompt: what an answer follows.
        choices: what is chosen from by likelihood, each after a space; none: the answer is generated.
        answer: which choice is right; or the text of a right answer.
    """

    prompt: str
    choices: tuple[str, ...]
    answer: int | str

    @property
    def solution(self) -> str:
        """As a shot shows it."""
        return f" {self.choices[self.answer] if self.choices else self.answer}"


@dataclass(frozen=True)
class Task:
    """`name`: of the file. `metrics`: of a question's result, the main one first."""

    name: str
    questions: tuple[Question, ...]
    metrics: tuple[str, ...]


def task_of(text: str, shots: int = 0, limit: int | None = None) -> Task:
    """The task that `FORMAT:FILE` or `FORMAT:FILE:FILE` names.

    Raises:
        ConfigError: a file is not there, is not of the format (by line), or has too few shots.
    """
    kind, *files = text.split(":")
    if kind not in FORMATS:
        raise ConfigError(f"{text}: only experiments.evaluate runs such tasks.")
    read, opening = FORMATS[kind]
    path = Path(files[0])
    asked = [read(record) for record in _records(path, read)]
    begin = opening(path)
    if shots:
        known = [read(record) for record in _records(Path(files[1]), read)][:shots]
        if len(known) < shots:
            raise ConfigError(f"{files[1]}: {len(known)} records, and shots={shots}.")
        begin += "".join(f"{q.prompt}{q.solution}\n\n" for q in known)
    questions = (Question(begin + q.prompt, q.choices, q.answer) for q in asked[:limit])
    metrics = ("acc", "acc_norm") if asked[0].choices else ("exact_match", "strict_match")
    return Task(path.stem, tuple(questions), metrics)


def graded(question: Question, generated: str) -> dict[str, float]:
    """1 or 0 by metric, for a generated answer: its last number, and the one after "####", is the right one.

    >>> graded(Question("", (), "2 + 2 = 4 #### 4"), "It is 5 - 1 = 4.")
    {'exact_match': 1.0, 'strict_match': 0.0}
    """
    right = _number(question.answer.rpartition("####")[2])
    found = re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", generated)
    marked = re.search(r"#### (-?[0-9.,]+)", generated)
    said = {"exact_match": found[-1] if found else "", "strict_match": marked[1] if marked else ""}
    return {metric: float(_number(text) == right) for metric, text in said.items()}


def _number(text: str) -> str:
    return re.sub(r"[,$]|\.$", "", text.strip()).lower()


# ------------------------------------------------------------------ files


def _records(path: Path, read: Callable[[Any], Question]) -> list[Any]:
    """The records of a file, each of which can be read.

    Raises:
        ConfigError: there is no such file, nothing is in it, or lines are broken.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file.")
    good, wrong = [], []
    try:
        for line, parse in _lines(path):
            try:
                record = parse()
                read(record)
                good.append(record)
            except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
                what = f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
                wrong.append(f"line {line}: {what}")
    except (UnicodeDecodeError, csv.Error) as error:
        wrong.append(str(error))
    if wrong or not good:
        raise ConfigError(report(f"{path} cannot be read:", first_few(wrong, 10) or ["nothing is in it"]))
    return good


def _lines(path: Path) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Numbers of lines, and what makes a record of each: JSON of an object, or a row of CSV."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        if path.suffix != ".csv":
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, lambda line=line: _object(line)
            return
        rows, header = csv.reader(file, strict=True), None
        for row in rows:
            if header is None and "question" in row:
                header = row
            elif row:
                yield (
                    rows.line_num,
                    lambda row=row, names=header: dict(zip(names, row, strict=True)) if names else row,
                )


def _object(line: str) -> Mapping[str, Any]:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {type(value).__name__}")
    return value


# ------------------------------------------------------------------ formats


def _text(record: Any, name: str) -> str:
    if not isinstance(record[name], str):
        raise ValueError(f"{name}: expected text, got {record[name]!r}")
    return record[name]


def _one_of(choices: Sequence[str], answer: Any, labels: Sequence[Any]) -> int:
    if len(choices) < 2 or not all(isinstance(choice, str) for choice in choices):
        raise ValueError(f"expected two choices or more, got {choices!r}")
    if answer not in labels[: len(choices)]:
        raise ValueError(f"answer {answer!r}: one of {', '.join(map(str, labels[: len(choices)]))}")
    return list(labels).index(answer)


def _lettered(question: str, choices: Sequence[str], answer: Any, ask: str) -> Question:
    labels = LETTERS if isinstance(answer, str) else range(len(LETTERS))
    right = _one_of(choices, answer, list(labels))
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True)]
    return Question("\n".join([question.strip(), *lines, ask]), tuple(LETTERS), right)


def _mmlu(record: Any) -> Question:
    """A row `question, A, B, C, D, letter` without a header; or `question`, `choices`, `answer`, a number."""
    if isinstance(record, list):
        if len(record) != 6:
            raise ValueError(f"expected 6 columns, got {len(record)}")
        return _lettered(record[0], record[1:5], record[5], "Answer:")
    return _lettered(_text(record, "question"), record["choices"], record["answer"], "Answer:")


def _ceval(record: Any) -> Question:
    """`question`, `A` to `D`, and the letter `answer`, in CSV with a header or in JSON."""
    choices = [_text(record, letter) for letter in LETTERS]
    return _lettered(_text(record, "question"), choices, record["answer"], "答案：")


def _arc(record: Any) -> Question:
    """`question` with `stem` and `choices`, or a text and `choices`; `answerKey`."""
    asked = record["question"]
    if isinstance(asked, dict):
        stem, pairs = _text(asked, "stem"), [(c["text"], c["label"]) for c in asked["choices"]]
    else:
        stem, both = _text(record, "question"), record["choices"]
        pairs = list(zip(both["text"], both["label"], strict=True))
    choices, labels = [text for text, _ in pairs], [label for _, label in pairs]
    right = _one_of(choices, record["answerKey"], labels)
    return Question(f"Question: {stem}\nAnswer:", tuple(choices), right)


def _hellaswag(record: Any) -> Question:
    """`activity_label`, `ctx_a`, `ctx_b`, `endings`, `label`."""
    context = f"{_text(record, 'ctx_a')} {_text(record, 'ctx_b').capitalize()}"
    right = _one_of(record["endings"], int(record["label"]), range(len(record["endings"])))
    prompt = _plain(f"{_text(record, 'activity_label')}: {context}")
    return Question(prompt, tuple(map(_plain, record["endings"])), right)


def _plain(text: str) -> str:
    """Without the marks of WikiHow's articles."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _gsm8k(record: Any) -> Question:
    """`question`, `answer` that ends in "#### NUMBER"."""
    if "####" not in _text(record, "answer"):
        raise ValueError("answer: expected #### before the number")
    return Question(f"Question: {_text(record, 'question')}\nAnswer:", (), record["answer"])


def _opening(words: str) -> Callable[[Path], str]:
    """What all questions of a file begin with; its name says the subject."""
    return lambda path: words.format(re.sub(r"_(test|val|dev)$", "", path.stem).replace("_", " ")) + "\n\n"


MMLU = "The following are multiple choice questions (with answers) about {}."
CEVAL = "以下是中国关于{}的单项选择题，请选出其中的正确答案。"
# {format: (a record's question, what all questions begin with)}
FORMATS: Mapping[str, tuple[Callable[[Any], Question], Callable[[Path], str]]] = {
    "mmlu": (_mmlu, _opening(MMLU)),
    "ceval": (_ceval, _opening(CEVAL)),
    "arc": (_arc, lambda path: ""),
    "hellaswag": (_hellaswag, lambda path: ""),
    "gsm8k": (_gsm8k, lambda path: ""),
}
