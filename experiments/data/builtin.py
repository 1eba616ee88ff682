"""Examples that every machine has.

They are functions of the standard library with their authors' words for what they do, images of shapes, and
tasks whose answers are rewarded. A prompt is a signature and an opened docstring; the response is the
docstring's summary of one line:

    def basename(p):
        \"\"\"Returns the final component of a pathname

Files are held out by their names, as in the main job. A function that both sides have is not held out.
"""

from __future__ import annotations

import ast
import itertools
import random
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from experiments.data.text import is_held_out, source_files, standard_library
from experiments.lib.files import write_lines

HELD_OUT_PERCENT = 10
SIDES = (False, True)  # whether a side is held out
MOST = {False: 2000, True: 200}  # functions of each side
LONGEST = 240  # bytes of prompt and response
LONGEST_TWIN = 60  # characters of a signature
MOST_TEXTS = {False: 8_000, True: 400}  # functions of each side as plain text
SHORTEST = 12  # characters of a response, since "Run." teaches nothing
IMAGES, IMAGES_HELD_OUT = 1200, 64
COLOURS = {"red": (214, 40, 40), "green": (40, 160, 60), "blue": (40, 80, 210), "black": (20, 20, 20)}
SHAPES = ("circle", "square", "triangle")
ONE_IN, DRAWN = 12, 8000  # one problem in `ONE_IN` is held out, and of the others `DRAWN` are drawn
OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
MAKE = re.compile(r"make (\d+): (\d)(\d)=")  # in a prompt of the built-in tasks


@dataclass(frozen=True)
class Function:
    """A documented function.

    Args:
        prompt: its signature, with the docstring opened.
        summary: the docstring's summary.
        code: the first line of its code.
    """

    prompt: str
    summary: str
    code: str


def write_sft_files(folder: str | Path) -> tuple[Path, Path]:
    """Write `train.jsonl` and `held_out.jsonl`: prompts and responses."""
    train, held_out = (
        [{"prompt": f.prompt, "response": f.summary} for f in _list_functions(side)] for side in SIDES
    )
    folder = Path(folder)
    return write_lines(folder / "train.jsonl", train), write_lines(folder / "held_out.jsonl", held_out)


def write_pair_files(folder: str | Path) -> tuple[Path, Path]:
    """Write `train_pairs.jsonl` and `held_out_pairs.jsonl`.

    The chosen answer is the docstring. The rejected one is the first line of the function's code, which a
    model that knows nothing of docstrings writes next.
    """
    train, held_out = (
        [
            {"prompt": f.prompt, "chosen": f.summary, "rejected": f.code}
            for f in _list_functions(side)
            if f.code
        ]
        for side in SIDES
    )
    folder = Path(folder)
    return (
        write_lines(folder / "train_pairs.jsonl", train),
        write_lines(folder / "held_out_pairs.jsonl", held_out),
    )


def write_label_files(folder: str | Path) -> tuple[Path, Path]:
    """Write `train_labels.jsonl` and `held_out_labels.jsonl`: summaries, lines of code and signatures."""
    sides = []
    for side in SIDES:
        lines = []
        for f in _list_functions(side):
            texts = {"summary": f.summary, "code": f.code, "signature": f.prompt.split("\n")[0]}
            # The code is empty where a function has none besides its docstring, or where it is too long.
            lines += [{"text": text.strip(), "label": label} for label, text in texts.items() if text.strip()]
        sides.append(lines)
    names = ("train_labels.jsonl", "held_out_labels.jsonl")
    return tuple(write_lines(Path(folder, name), lines) for name, lines in zip(names, sides, strict=True))


def write_word_files(folder: str | Path) -> tuple[Path, Path]:
    """Write `train_words.jsonl` and `held_out_words.jsonl`, whose tags say which words of a summary are
    long."""
    sides = []
    for side in SIDES:
        lines = []
        for f in _list_functions(side):
            words = f.summary.split()
            lines.append({"tokens": words, "tags": ["long" if len(word) > 4 else "short" for word in words]})
        sides.append(lines)
    names = ("train_words.jsonl", "held_out_words.jsonl")
    return tuple(write_lines(Path(folder, name), lines) for name, lines in zip(names, sides, strict=True))


def write_twin_files(folder: str | Path) -> tuple[Path, Path]:
    """Write `train_twins.jsonl` and `held_out_twins.jsonl`: the words of functions' names, as one searches
    for them, each with its function's signature."""
    sides: list[dict[str, str]] = []  # `{words: signature}`
    for side in SIDES:
        signatures: dict[str, str] = {}
        for function in _list_functions(side):
            signature = function.prompt.split("\n")[0]
            # The words of `def get_default_path(self):` are "get default path".
            name = signature.removeprefix("def ").partition("(")[0]
            words = " ".join(name.strip("_").split("_"))
            if len(signature) <= LONGEST_TWIN:
                signatures[words] = signature
        # One word alone, such as "close", says too little to search for.
        sides.append({words: signature for words, signature in signatures.items() if " " in words})
    train, held_out = sides
    held_out = {words: signature for words, signature in held_out.items() if words not in train}
    names = ("train_twins.jsonl", "held_out_twins.jsonl")
    paths = []
    for name, side in zip(names, (train, held_out), strict=True):
        records = [{"query": words, "positive": signature} for words, signature in side.items()]
        paths.append(write_lines(Path(folder, name), records))
    return tuple(paths)


def write_text_files(folder: Path) -> tuple[Path, Path]:
    """Write `text.jsonl` and `held_out_text.jsonl`: functions without docstrings, so that tuning shows."""
    train, held_out = (
        ({"text": text} for text in islice(_unparse_functions(side), most))
        for side, most in MOST_TEXTS.items()
    )
    return write_lines(folder / "text.jsonl", train), write_lines(folder / "held_out_text.jsonl", held_out)


def _unparse_functions(held_out: bool) -> Iterator[str]:
    """Yield the functions of one side as text, without docstrings."""
    for path in _list_files(held_out):
        for function in _find_functions(_parse(path)):
            # Functions and classes inside of it lose their docstrings, too.
            for node in ast.walk(function):
                kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
                if isinstance(node, kinds) and ast.get_docstring(node) is not None:
                    node.body = node.body[1:] or [ast.Pass()]
            yield ast.unparse(function)


def _list_files(held_out: bool) -> list[Path]:
    """Return the files of one side, in the order of a hash of their names, which mixes packages."""
    root = standard_library()
    names = [n for n in source_files(root) if is_held_out(n, HELD_OUT_PERCENT) == held_out]
    return [root / name for name in sorted(names, key=lambda n: sha256(n.encode()).digest())]


@lru_cache(maxsize=2)
def _list_functions(held_out: bool) -> tuple[Function, ...]:
    """Return the distinct functions of one side."""
    trained_on = {(f.prompt, f.summary) for f in _list_functions(False)} if held_out else set()
    by_prompt: dict[str, Function] = {}
    for path in _list_files(held_out):
        for function in _read_functions(path):
            # Two classes may have the same method, such as `close`, in files of both sides.
            if (function.prompt, function.summary) not in trained_on:
                by_prompt.setdefault(function.prompt, function)
        if len(by_prompt) >= MOST[held_out]:
            break
    return tuple(by_prompt.values())[: MOST[held_out]]


def _read_functions(path: Path) -> Iterator[Function]:
    """Yield those documented functions of a file that are short enough, and whose summary says enough."""
    for node in _find_functions(_parse(path)):
        paragraph = (ast.get_docstring(node) or "").strip().partition("\n\n")[0]
        summary = "" if "\n" in paragraph else paragraph.strip()  # a whole sentence, as a rule
        prompt = f'def {node.name}({ast.unparse(node.args)}):\n    """'
        if len(summary) >= SHORTEST and len((prompt + summary).encode()) <= LONGEST:
            code = ast.unparse(node.body[1]).partition("\n")[0] if len(node.body) > 1 else ""
            yield Function(prompt, summary, code if len((prompt + code).encode()) <= LONGEST else "")


def _parse(path: Path) -> ast.Module:
    """Parse a file. The library has files that are broken on purpose, which are taken as empty."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old files have escapes that Python warns of
            return ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def _find_functions(tree: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """Yield the functions of modules and classes; those inside functions are left out."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _find_functions(node)


def write_image_files(folder: str | Path) -> tuple[Path, Path]:
    """Write images of shapes, one or two to a question, and `train_images.jsonl`, `held_out_images.jsonl`."""
    from PIL import Image, ImageDraw

    folder, draw = Path(folder), random.Random(0)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    kinds = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    images: list[tuple[str, str]] = []  # each image's path, and what it shows

    # Each image is one shape at a random place on a bright grey ground.
    for number in range(IMAGES):
        colour, shape = draw.choice(kinds)
        width, height = draw.randrange(24, 65, 8), draw.randrange(24, 65, 8)
        image = Image.new("RGB", (width, height), (draw.randrange(200, 256),) * 3)
        size = draw.randrange(14, min(width, height) - 4)
        left, top = draw.randrange(width - size), draw.randrange(height - size)
        box, pen = (left, top, left + size, top + size), ImageDraw.Draw(image)
        corners = [(left, top + size), (left + size, top + size), (left + size // 2, top)]
        if shape == "circle":
            pen.ellipse(box, COLOURS[colour])
        elif shape == "square":
            pen.rectangle(box, COLOURS[colour])
        else:
            pen.polygon(corners, COLOURS[colour])
        path = Path("images") / f"{number}.png"
        image.save(folder / path)
        images.append((str(path), f"{colour} {shape}"))

    # Three questions in four are about one image, and the fourth is about two.
    records = []
    for number, (path, answer) in enumerate(images):
        if number % 4:
            records.append({"images": [path], "prompt": "<image>What is it?", "response": answer})
        else:
            # Both images are of one side, so that no held-out image is trained on.
            same_side = images[:IMAGES_HELD_OUT] if number < IMAGES_HELD_OUT else images[IMAGES_HELD_OUT:]
            other_path, other_answer = draw.choice(same_side)
            records.append({
                "images": [path, other_path], "prompt": "<image><image>What are they?",
                "response": f"{answer}, {other_answer}",
            })  # fmt: skip
    train = write_lines(folder / "train_images.jsonl", records[IMAGES_HELD_OUT:])
    return train, write_lines(folder / "held_out_images.jsonl", records[:IMAGES_HELD_OUT])


# ------------------------------------------------------------------ tasks


def write_task_files(folder: str | Path) -> tuple[Path, Path]:
    """Write `train_tasks.jsonl` and `held_out_tasks.jsonl`, which share no problem.

    Digits are to be reversed, sorted or summed, or two numbers are to make a third one, as in countdown.
    """
    train, held_out = _draw_problems()
    return _write_problems(folder, "train_tasks", train), _write_problems(folder, "held_out_tasks", held_out)


def write_warming_files(folder: str | Path) -> tuple[Path, Path]:
    """Write problems to train on with careless answers, of which five in six lack their last character, and
    held-out ones with right answers.

    A model learns from them before it learns from rewards: they make the base `tasks`.
    """
    train, held_out = _draw_problems()
    draw = random.Random(1)
    careless = [(prompt, answer if draw.random() < 1 / 6 else answer[:-1]) for prompt, answer in train]
    careless = [(prompt, answer) for prompt, answer in careless if answer]
    train = _write_problems(folder, "train_warming", careless)
    return train, _write_problems(folder, "held_out_warming", held_out)


def write_answer_files(folder: str | Path) -> tuple[Path, Path]:
    """Write `train_answers.jsonl` and `held_out_answers.jsonl`: problems with a right and a wrong answer, for
    reward models (`objective=reward`).

    The wrong answer is a slip away, or a guess.
    """
    draw, names = random.Random(2), ("train_answers.jsonl", "held_out_answers.jsonl")
    sides = [
        [{"prompt": p, "chosen": right, "rejected": _spoil(p, right, draw)} for p, right in problems]
        for problems in _draw_problems()
    ]
    return tuple(write_lines(Path(folder, name), lines) for name, lines in zip(names, sides, strict=True))


def _spoil(prompt: str, answer: str, draw: random.Random) -> str:
    """Return a wrong answer: the right one with a character removed, added or replaced, or random characters.

    A policy finds whatever a reward model has never seen. If no wrong answer were too long, it would learn to
    give such answers.
    """
    signs = "0123456789" if answer.isdigit() else "0123456789+-*"
    while True:
        place, sign = draw.randrange(len(answer)), draw.choice(signs)
        wrong = draw.choice((
            answer[:-1], answer + sign, answer[:place] + sign + answer[place + 1 :],
            "".join(draw.choices(signs, k=draw.randint(1, 4))),
        ))  # fmt: skip
        # Another expression may make the same number.
        if wrong and not is_solution(prompt, wrong, answer):
            return wrong


def is_solution(prompt: str, answer: str, response: str) -> bool:
    """Return whether an answer to a built-in task is right.

    It is the response, or where a number is to be made any expression of the two digits that makes it.
    """
    if task := MAKE.search(prompt):
        return _evaluates_to(answer.strip(), int(task[1]), sorted(task.groups()[1:]))
    return answer.strip() == response.strip()


def _evaluates_to(text: str, target: int, numbers: list[str]) -> bool:
    """Return whether an expression of these numbers, each once, is the target. Only + - * are evaluated."""
    if not re.fullmatch(r"[\d+\-* ()]{1,40}", text) or sorted(re.findall(r"\d+", text)) != numbers:
        return False
    try:
        return _evaluate(ast.parse(text, mode="eval").body) == target
    except (SyntaxError, KeyError, AttributeError, RecursionError):
        return False


def _evaluate(node: Any) -> int:
    """Compute an expression of + - * and whole numbers. Other nodes raise a KeyError or AttributeError."""
    if isinstance(node, ast.Constant):
        return node.value
    operator = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}[type(node.op)]
    return OPERATORS[operator](_evaluate(node.left), _evaluate(node.right))


def _draw_problems() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return problems to train on, drawn with repetition, and held-out ones.

    One in `ONE_IN` problems of each kind is held out, and `DRAWN` are drawn from the others, equally many of
    each kind.
    """
    # Two digits are to make a number. Products of 18 or less are not asked for, so that a larger number is
    # always a product.
    countdowns: dict[str, str] = {}
    for small, large in itertools.combinations_with_replacement(range(1, 10), 2):
        for sign in "+-*" if small * large > 18 else "+-":
            prompt = f"make {OPERATORS[sign](large, small)}: {small}{large}="
            countdowns[prompt] = f"{large}{sign}{small}"

    # Of each kind, hold out some problems and draw from the others.
    draw, held_out, drawn_from = random.Random(0), [], []
    kinds = (
        {f"rev {text}=": text[::-1] for text in _list_digits(3, 10)},
        {f"sort {text}=": "".join(sorted(text)) for text in _list_digits(3, 10)},
        {f"sum {text}=": str(sum(map(int, text))) for text in _list_digits(3, 7)},
        countdowns,
    )
    for answers in kinds:
        problems = list(answers.items())
        draw.shuffle(problems)
        share = len(problems) // ONE_IN
        held_out += problems[:share]
        drawn_from.append(problems[share:])
    return [draw.choice(drawn_from[number % len(kinds)]) for number in range(DRAWN)], held_out


def _list_digits(count: int, base: int) -> Iterator[str]:
    return map("".join, itertools.product(map(str, range(base)), repeat=count))


def _write_problems(folder: str | Path, name: str, problems: list[tuple[str, str]]) -> Path:
    records = ({"prompt": prompt, "response": response} for prompt, response in problems)
    return write_lines(Path(folder, f"{name}.jsonl"), records)
