"""Tasks: files of public benchmarks as questions, in the words in which lm-eval asks them.

The benchmarks are MMLU (Hendrycks et al. 2021), ARC (Clark et al. 2018), HellaSwag (Zellers et al. 2019),
GSM8K (Cobbe et al. 2021), C-Eval (Huang et al. 2023) and MMMU (Yue et al. 2024), whose questions have images.
The prompts are those of lm-evaluation-harness (Gao et al. 2023).
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import merge
from itertools import chain, islice
from pathlib import Path
from typing import Any

from experiments.data.records import MARK as IMAGE
from experiments.data.records import last_number
from experiments.evaluate.records import LETTERS, Record, RecordError, read_records
from experiments.lib.checks import ConfigError, attempt
from experiments.lib.files import first_few
from fnshard.errors import report

STOPS = ("Question:", "</s>", "<|im_end|>")  # these end a generated answer
MARK = "####"  # this stands before the number of a right answer
HARNESS = "lm-eval"  # the format of that package's own tasks
SHOWN = 10  # the most records of a file in an error


@dataclass(frozen=True)
class Question:
    """A question of a task.

    Args:
        prompt: the text that an answer follows.
        choices: the texts of which the likeliest is chosen, each after a space. If there are none, the answer
            is generated.
        answer: the number of the right choice, or the text of a right answer.
        subject: its subject, if its record names one. Its shots have the same.
        asked: the words of the question and its choices, which are equal for equal questions in whatever
            order their choices stand.
        images: the bytes of the image files that stand where the prompt says `IMAGE`, in order. A question
            with images is asked as a chat, and each choice follows without a space.
    """

    prompt: str
    choices: tuple[str, ...]
    answer: int | str
    subject: str | None = None
    asked: tuple[str, ...] = ()
    images: tuple[bytes, ...] = field(default=(), repr=False)

    @property
    def solution(self) -> str:
        """Return the right answer as a shot shows it."""
        return f" {self.choices[self.answer] if self.choices else self.answer}"


@dataclass(frozen=True)
class Task:
    """A file's questions.

    Args:
        name: the shortest that differs for all tasks: the name or the path of the file, both without suffix,
            or FORMAT:FILE as it was given.
        metrics: the metrics of a question's result, the main one first.
        left_out: the number of records that ask for something which is not measured here.
    """

    name: str
    questions: tuple[Question, ...]
    metrics: tuple[str, ...]
    left_out: int = 0

    @property
    def digest(self) -> str:
        """Return a digest of everything that its questions ask."""
        digest = hashlib.sha256(repr(self.questions).encode())
        for image in chain.from_iterable(question.images for question in self.questions):  # not in the repr
            digest.update(hashlib.sha256(image).digest())
        return digest.hexdigest()


def check_tasks(tasks: Sequence[str], shots: int = 0) -> None:
    """Check that tasks name a format, and a file for their shots.

    Raises:
        ConfigError: some do not. The error names all of them.
    """
    wrong = [] if tasks else ["tasks: name some, as tasks=[arc:FILE,gsm8k:FILE]."]
    for task in tasks:
        kind, *files = task.split(":")
        if kind not in (*FORMATS, HARNESS) or not files or not files[0] or len(files) > 2:
            formats = ", ".join((*FORMATS, HARNESS))
            wrong.append(f"tasks={task}: expected FORMAT:FILE, with a format of {formats}.")
        elif shots and kind == "mmmu":
            wrong.append(f"shots={shots}: questions with images have none. Fix: shots=0 for {task}.")
        elif shots and kind != HARNESS and len(files) == 1:
            wrong.append(f"shots={shots}: {task} names no file of shots. Fix: {task}:FILE.")
    if wrong:
        raise ConfigError("\n  ".join(wrong))


def read_tasks(texts: Sequence[str], shots: int = 0, limit: int | None = None) -> list[Task]:
    """Read the tasks that texts name, each as in `task_of`.

    Raises:
        ConfigError: something is wrong with their files. The error names all of it.
    """
    wrong: list[str] = []
    found = [attempt(partial(task_of, text, shots, limit), wrong) for text in texts]
    wrong += [f"{text}: is named {count} times." for text, count in Counter(texts).items() if count > 1]
    if wrong:
        raise ConfigError("\n".join(wrong))
    # Take the shortest names that tell all tasks apart.
    paths = [Path(text.split(":")[1]).with_suffix("") for text in texts]
    choices = [path.name for path in paths], [str(path) for path in paths], list(texts)
    names = next(each for each in choices if len(set(each)) == len(each))
    return [replace(task, name=name) for task, name in zip(found, names, strict=True)]


def task_of(text: str, shots: int = 0, limit: int | None = None) -> Task:
    """Read the task that `FORMAT:FILE` or `FORMAT:FILE:FILE` names.

    A question is asked after the first `shots` records of the second file that are not that question itself,
    and that have its subject if records name one.

    Raises:
        ConfigError: files are missing, lines are not of the format, or there are too few shots.
    """
    kind, *files = text.split(":")
    if kind not in FORMATS:
        raise ConfigError(f"{text}: only experiments.evaluate runs such tasks.")
    # Read the questions, and the shots if there are any.
    read, opening = FORMATS[kind]
    paths = [Path(file) for file in files[: 1 + bool(shots)]]
    wrong: list[str] = []
    every = {path: attempt(partial(read_questions, path, read), wrong) for path in paths}
    if wrong:
        raise ConfigError("\n".join(wrong))
    (asked, left_out), (known, _) = every[paths[0]], every[paths[-1]]

    # Records are listed by the subject that they name. A question that names none is asked after any.
    by_subject: dict[str | None, list[int]] = {}
    for number, shot in enumerate(known):
        by_subject.setdefault(shot.subject, []).append(number)

    # Each question begins with the format's words and its shots.
    asked, questions = asked[:limit], []
    for question in asked:
        words = opening(question.subject or re.sub(r"_(test|val|dev)$", "", paths[0].stem))
        numbers = range(len(known))
        if question.subject is not None:
            numbers = merge(by_subject.get(None, []), by_subject.get(question.subject, []))
        others = (known[n] for n in numbers if known[n].asked != question.asked)
        before = list(islice(others, shots))
        if len(before) < shots:
            about = f" about {question.subject!r}" if question.subject else ""
            raise ConfigError(
                f"{paths[-1]}: {len(before)} records{about} can be shots of the question "
                f"{question.asked[0]!r:.60}, which is none of its own, and shots={shots}."
            )
        words += "".join(f"{q.prompt}{q.solution}\n\n" for q in before)
        questions.append(replace(question, prompt=words + question.prompt))
    metrics = ("acc", "acc_norm") if asked[0].choices else ("exact_match", "strict_match")
    return Task(paths[0].stem, tuple(questions), metrics, left_out)


def grade_answer(question: Question, generated: str) -> dict[str, float]:
    """Grade a generated answer with 1 or 0 for each metric.

    The right number has to be the last one in `exact_match`, and the one after "####" in `strict_match`.

    >>> grade_answer(Question("", (), "2 + 2 = 4 #### 4"), "It is 5 - 1 = 4.")
    {'exact_match': 1.0, 'strict_match': 0.0}
    """
    right = _normalise_number(question.answer.rpartition(MARK)[2])
    found = re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", generated)
    marked = re.search(rf"{MARK} (-?[0-9.,]+)", generated)
    said = {"exact_match": found[-1] if found else "", "strict_match": marked[1] if marked else ""}
    return {metric: float(_normalise_number(text) == right and right != "") for metric, text in said.items()}


def _normalise_number(text: str) -> str:
    """Return a number as it is compared: without separators, currency and a final dot."""
    return re.sub(r"[,$]|\.$", "", text.strip()).lower()


def read_questions(path: Path, read: Callable[[Record], Question | None]) -> tuple[list[Question], int]:
    """Read the questions of a file, and count the records that are left out.

    Raises:
        ConfigError: there is no such file, it is empty, or records are no questions.
    """
    good, wrong, left_out = [], [], 0
    for place, record in read_records(path):
        try:
            if isinstance(record, RecordError):
                raise record
            question = read(record)
            if question is None:
                left_out += 1
                continue
            images = tuple(_read_image(image, path.parent) for image in question.images)
            good.append(replace(question, images=images))
        except RecordError as error:
            wrong.append(f"{place}: {error}")
    if wrong or not good:
        nothing = "nothing is in it"
        if left_out:
            nothing += f" but {left_out} open questions"
        raise ConfigError(report(f"{path} cannot be read:", first_few(wrong, SHOWN) or [nothing]))
    return good, left_out


# ------------------------------------------------------------------ fields of a record


def _require(record: Record, *names: str) -> Any:
    """Return the first of these fields that a record has."""
    for name in names:
        if record.get(name) is not None:
            return record[name]
    raise RecordError(f"no {names[0]!r}; it has {', '.join(map(repr, record)) or 'nothing'}")


def _require_text(record: Record, *names: str, blank: bool = False) -> str:
    """Return a text, which is not blank unless it may be."""
    return _check_text(names[0], _require(record, *names), blank=blank)


def _check_text(name: str, value: Any, *, blank: bool = False) -> str:
    """Check that a value is a text, which is not blank unless it may be, and return it."""
    if not isinstance(value, str):
        raise RecordError(f"{name}: expected text, got {value!r:.80}")
    if not blank and not value.strip():
        raise RecordError(f"{name}: is empty")
    if any("\ud800" <= sign <= "\udfff" for sign in value):
        raise RecordError(f"{name}: holds half of a surrogate pair, which is no character: {value!r:.80}")
    return value


def _check_choices(name: str, value: Any) -> list[str]:
    """Check that a value is two texts or more, none of them blank, and return them."""
    if not isinstance(value, list) or len(value) < 2:
        raise RecordError(f"{name}: expected two choices or more, got {value!r:.80}")
    return [_check_text(f"{name}[{number}]", each) for number, each in enumerate(value)]


def _find_label(name: str, answer: Any, labels: Sequence[Any]) -> int:
    """Return the number of the label that an answer is."""
    if isinstance(answer, bool) or answer not in labels:
        raise RecordError(f"{name} {answer!r:.80}: one of {', '.join(map(str, labels))}")
    return list(labels).index(answer)


def _normalise_words(question: str, choices: Sequence[str] = ()) -> tuple[str, ...]:
    """Make `Question.asked`, in which blanks, capitals and the order of choices make no difference."""
    words = [" ".join(text.casefold().split()) for text in (question, *choices)]
    return (words[0], *sorted(words[1:]))


def _read_image(image: Any, root: Path) -> bytes:
    """Return the bytes of an image, which a column of Parquet holds, or a file that is named."""
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes):
        return image
    if not isinstance(image, str) or not image:
        raise RecordError(f"image: expected the path of a file, got {image!r:.80}")
    try:
        return (root / image).read_bytes()
    except (OSError, ValueError) as error:
        why = "there is no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise RecordError(f"image {image!r:.200}: {why}") from None


# ------------------------------------------------------------------ formats


def _read_lettered(record: Record, ask: str) -> Question:
    """Read a question whose answer is a letter (MMLU, C-Eval).

    Its fields are `question`; `choices` or `options`, or `A`, `B` and so on; `answer`, a letter, or the
    number of a choice in a list from 0; and `subject` or `category`.
    """
    # The choices are a list, the text of one, or columns.
    listed = next((record[name] for name in ("choices", "options") if record.get(name) is not None), None)
    if isinstance(listed, str):  # a cell of CSV
        try:
            listed = ast.literal_eval(listed)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise RecordError(f"choices: expected a list, got {listed!r:.80}") from None
    columns = listed
    if listed is None:
        columns = [record[letter] for letter in LETTERS if letter in record]
        while len(columns) > 2 and columns[-1] in ("", None):  # the question has fewer choices than others
            columns.pop()
    choices, answer = _check_choices("choices", columns), _require(record, "answer")
    if len(choices) > len(LETTERS):
        raise RecordError(f"choices: expected {len(LETTERS)} at most, got {len(choices)}")

    # The answer is a letter, or in a list the number of a choice.
    letters = list(LETTERS[: len(choices)])
    if isinstance(answer, str) and listed is not None and answer.strip().isdecimal():
        answer = int(answer)
    is_letter = isinstance(answer, str)
    answer = answer.strip() if is_letter else answer
    right = _find_label("answer", answer, letters if is_letter else range(len(choices)))

    # Ask for the letter, of which the likeliest is chosen.
    question = _require_text(record, "question")
    lines = [f"{letter}. {choice}" for letter, choice in zip(letters, choices, strict=True)]
    subject = record.get("subject") or record.get("category")
    return Question(
        "\n".join([question.strip(), *lines, ask]),
        tuple(letters),
        right,
        subject if isinstance(subject, str) else None,
        _normalise_words(question, choices),
    )


def _read_arc(record: Record) -> Question:
    """Read `question` with `stem` and `choices`, or as a text beside `choices`, and `answerKey`."""
    asked = _require(record, "question")
    nested = isinstance(asked, dict)
    stem = _require_text(asked, "stem") if nested else _require_text(record, "question")
    given = _require(asked if nested else record, "choices")
    if isinstance(given, dict):  # two lists, as in Parquet
        texts, labels = given.get("text"), given.get("label")
    elif isinstance(given, list) and all(isinstance(each, dict) for each in given):
        texts, labels = [each.get("text") for each in given], [each.get("label") for each in given]
    else:
        raise RecordError(f"choices: expected text and label of each, got {given!r:.80}")
    choices = _check_choices("choices", texts)
    labels = list(map(str, labels)) if isinstance(labels, list) else []
    if not len(choices) == len(labels) == len(set(labels)):
        raise RecordError(f"choices: expected a label of its own for each, got {labels!r:.80}")
    right = _find_label("answerKey", str(_require(record, "answerKey")).strip(), labels)
    return Question(
        f"Question: {stem}\nAnswer:", tuple(choices), right, None, _normalise_words(stem, choices)
    )


def _read_hellaswag(record: Record) -> Question:
    """Read `activity_label`, `ctx_a`, `ctx_b`, `endings` and `label`."""
    endings = _require(record, "endings")
    if isinstance(endings, list):
        endings = [_strip_marks(each) if isinstance(each, str) else each for each in endings]
    choices, label = _check_choices("endings", endings), _require(record, "label")
    if isinstance(label, str) and label.strip().isdecimal():
        label = int(label)
    right = _find_label("label", label, range(len(choices)))
    context = f"{_require_text(record, 'ctx_a')} {_require_text(record, 'ctx_b', blank=True).capitalize()}"
    prompt = _strip_marks(f"{_require_text(record, 'activity_label')}: {context}")
    return Question(prompt, tuple(choices), right, None, _normalise_words(prompt, choices))


def _strip_marks(text: str) -> str:
    """Return a text without the marks of WikiHow's articles."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _read_gsm8k(record: Record) -> Question:
    """Read `question`, and `answer`, which ends in "#### NUMBER"."""
    question, answer = _require_text(record, "question"), _require_text(record, "answer")
    _, mark, right = answer.rpartition(MARK)
    if not mark:
        raise RecordError(f"answer: expected {MARK} before the number")
    if last_number(answer, whole=True) is None:
        raise RecordError(f"answer: expected one number after {MARK}, got {right.strip()!r:.80}")
    return Question(f"Question: {question}\nAnswer:", (), answer, None, _normalise_words(question))


def _read_mmmu(record: Record) -> Question | None:
    """Read `question`, `options` and `answer`, a letter. Return None for an open question.

    "<image 1>" in a text is `image_1`, or the first of `images`. Images stand before a text that names none
    of them. The question is asked as a chat, in the words of MMMU's own evaluation.
    """
    if record.get("question_type") == "open" or record.get("options") in ("[]", []):
        return None

    # Number the images: those of a list, and those of columns.
    listed = record.get("images", record.get("image")) or []
    if not isinstance(listed, list):
        listed = [listed]
    images = dict(enumerate(listed, 1))
    for name, value in record.items():
        if (column := re.fullmatch(r"image_([0-9]+)", name)) and value:
            images[int(column[1])] = value

    # Replace each mark in the text, and note which image it shows: without a number it is the next one.
    question = _read_lettered(record, ask=MMMU_ASKS)
    shown: list[int] = []

    def show(mark: re.Match[str]) -> str:
        shown.append(int(mark[1] or len(shown) + 1))
        return IMAGE

    prompt = re.sub(r"<image(?: ([0-9]+))?>", show, question.prompt)
    if not shown:
        shown, prompt = sorted(images), IMAGE * len(images) + prompt
    if missing := [number for number in shown if number not in images]:
        raise RecordError(f"image_{missing[0]}: its text names it, and it is not there")
    if not shown:
        raise RecordError("has no image (image_1, or images); the format mmlu is for texts alone")
    return replace(question, prompt=prompt, images=tuple(images[number] for number in shown))


def _make_opening(words: str, names: Mapping[str, str]) -> Callable[[str], str]:
    """Make a function that gives the words before a question about a subject."""
    return lambda subject: words.format(names.get(subject, subject.replace("_", " "))) + "\n\n"


# The subjects of C-Eval by the names of its files, in the words of its prompts.
CEVAL_SUBJECTS: Mapping[str, str] = {
    "computer_network": "计算机网络",
    "operating_system": "操作系统",
    "computer_architecture": "计算机组成",
    "college_programming": "大学编程",
    "college_physics": "大学物理",
    "college_chemistry": "大学化学",
    "advanced_mathematics": "高等数学",
    "probability_and_statistics": "概率统计",
    "discrete_mathematics": "离散数学",
    "electrical_engineer": "注册电气工程师",
    "metrology_engineer": "注册计量师",
    "high_school_mathematics": "高中数学",
    "high_school_physics": "高中物理",
    "high_school_chemistry": "高中化学",
    "high_school_biology": "高中生物",
    "middle_school_mathematics": "初中数学",
    "middle_school_biology": "初中生物",
    "middle_school_physics": "初中物理",
    "middle_school_chemistry": "初中化学",
    "veterinary_medicine": "兽医学",
    "college_economics": "大学经济学",
    "business_administration": "工商管理",
    "marxism": "马克思主义基本原理",
    "mao_zedong_thought": "毛泽东思想和中国特色社会主义理论体系概论",
    "education_science": "教育学",
    "teacher_qualification": "教师资格",
    "high_school_politics": "高中政治",
    "high_school_geography": "高中地理",
    "middle_school_politics": "初中政治",
    "middle_school_geography": "初中地理",
    "modern_chinese_history": "近代史纲要",
    "ideological_and_moral_cultivation": "思想道德修养与法律基础",
    "logic": "逻辑学",
    "law": "法学",
    "chinese_language_and_literature": "中国语言文学",
    "art_studies": "艺术学",
    "professional_tour_guide": "导游资格",
    "legal_professional": "法律职业资格",
    "high_school_chinese": "高中语文",
    "high_school_history": "高中历史",
    "middle_school_history": "初中历史",
    "civil_servant": "公务员",
    "sports_science": "体育学",
    "plant_protection": "植物保护",
    "basic_medicine": "基础医学",
    "clinical_medicine": "临床医学",
    "urban_and_rural_planner": "注册城乡规划师",
    "accountant": "注册会计师",
    "fire_engineer": "注册消防工程师",
    "environmental_impact_assessment_engineer": "环境影响评价工程师",
    "tax_accountant": "税务师",
    "physician": "医师资格",
}
MMLU_OPENING = "The following are multiple choice questions (with answers) about {}."
MMMU_ASKS = "Answer with the option letter from the given choices directly."
CEVAL_OPENING = "以下是中国关于{}的单项选择题，请选出其中的正确答案。"
# {format: (reads a record's question, gives the words before a question about a subject)}
FORMATS: Mapping[str, tuple[Callable[[Record], Question | None], Callable[[str], str]]] = {
    "mmlu": (partial(_read_lettered, ask="Answer:"), _make_opening(MMLU_OPENING, {})),
    "ceval": (partial(_read_lettered, ask="答案："), _make_opening(CEVAL_OPENING, CEVAL_SUBJECTS)),
    "arc": (_read_arc, lambda subject: ""),
    "hellaswag": (_read_hellaswag, lambda subject: ""),
    "gsm8k": (_read_gsm8k, lambda subject: ""),
    "mmmu": (_read_mmmu, lambda subject: ""),
}
