"""The code of the README and of the guide runs in order, as printed, and so do the tables "coming from"."""

from __future__ import annotations

import re
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import readmes

import fnshard as fs
from experiments import train
from experiments.cli.validation import validate
from experiments.finetune import job as finetune

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text(encoding="utf-8")
GUIDE = README.parent / "experiments" / "examples" / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT + GUIDE.read_text(encoding="utf-8"), re.S)
TABLES = re.findall(r"^\| (.*?)\| here \|\n\|---\|---\|\n((?:\|.*\n)+)", TEXT, re.M)
JOBS = {"experiments.train": train.JOB, "experiments.finetune": finetune.JOB}


def run(code: str, namespace: dict[str, Any]) -> None:
    exec(compile(code, str(README), "exec"), namespace)


@pytest.fixture(scope="module")
def after_quickstart(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the blocks of the quickstart leave, in a folder of their own."""
    patch = pytest.MonkeyPatch()
    patch.chdir(tmp_path_factory.mktemp("readme"))  # they save
    # Compiled, each step costs 10 s; that compiled steps do the same is for other tests.
    patch.setattr(fs, "shard_step", partial(fs.shard_step, backend="eager"))
    namespace: dict[str, Any] = {}
    for block in BLOCKS[:2]:
        run(block, namespace)
    yield namespace
    patch.undo()


def fresh(namespace: dict[str, Any]) -> dict[str, Any]:
    """The same names, and a state to consume."""
    return {**namespace, "state": namespace["state"].copy()}


def test_python_blocks_run(after_quickstart: Any, capsys: Any) -> None:
    assert len(BLOCKS) >= 8
    namespace = fresh(after_quickstart)
    for block in BLOCKS[1:]:
        run(block, namespace)
    printed = capsys.readouterr().out
    assert "reduce_scatter" in printed and "gather/layers.0" in printed


def rows() -> list[Any]:
    """A row each: what others write, and the code or command here."""
    found = []
    for theirs, body in TABLES:
        for line in body.splitlines():
            name, here = (cell.strip() for cell in line.strip("|").split(" | "))
            found.append(pytest.param(re.search(r"`(.+?)`", here).group(1), id=f"{theirs.strip()}: {name}"))
    return found


@pytest.mark.parametrize("here", rows())
def test_every_row_of_coming_from_runs(here: str, after_quickstart: Any) -> None:
    if not here.startswith("python -m "):
        run(here, fresh(after_quickstart))
        return
    _, _, module, *overrides = shlex.split(here)
    assert validate(JOBS[module].spec, overrides) is not None


def test_all_the_systems_are_there() -> None:
    names = " ".join(theirs for theirs, _ in TABLES)
    assert all(name in names for name in ("FSDP", "DDP", "DeepSpeed", "JAX", "Lightning", "ms-swift"))
    assert len(rows()) > 45


def test_the_command_for_the_suite_is_what_ci_runs() -> None:
    suite = re.search(r"run the tests \| `(.+?)`", TEXT)[1]
    assert (README.parent / ".ci" / "run").read_text().endswith(f"{suite}\n")


def test_its_numbers_stand_with_the_experiments() -> None:
    table = TEXT.split("## Why", 1)[1].split("Do not use", 1)[0]
    measured = (README.parent / "experiments" / "LOG.md").read_text(encoding="utf-8")
    numbers = re.findall(r"\*\*(.+?)\*\*", table)
    assert len(numbers) == 4
    assert [n for n in numbers if n not in re.sub(r"\s+", " ", measured)] == []


@pytest.mark.parametrize("page", readmes(), ids=lambda page: str(page.relative_to(README.parent)))
def test_links_lead_somewhere(page: Path) -> None:
    """To a file of the repository, and to a heading of it."""
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?:)(.+?)\)", re.sub(r"```.*?```", "", text, flags=re.S)):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8") if anchor else "", re.M)
        anchors = {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, link
