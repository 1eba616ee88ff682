"""README and the guide say what is true: their code runs, as printed, and so do the tables "coming from"."""

from __future__ import annotations

import multiprocessing
import re
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import OUTPUT, ROOT, documents, start_command
from runs import validate
from torch import distributed as dist
from transformers import PreTrainedModel

import fnshard as fs
from experiments import finetune, train
from experiments.bench import parity

README, LOG = (ROOT / name for name in ("README.md", "experiments/LOG.md"))
GUIDE = ROOT / "experiments" / "guide"
PAGES = sorted(GUIDE.glob("*.md"))
JOBS = {"experiments.train": train.JOB, "experiments.finetune": finetune.JOB}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

# What users asked of the documents, a page that has to answer it, and a word of the answer.
QUESTIONS = {
    "freeze a part of the model": ("layouts", "trainable=False"),
    "my own DataLoader with workers": ("data", "num_workers=2"),
    "wandb from my own loop": ("data", "wandb.init"),
    "gradient accumulation": ("micro-batches", "accumulate=4"),
    "mixed precision": ("numerics", "compute_dtype=torch.bfloat16"),
    "an average of the parameters": ("optimizers", "fs.averaged"),
    "variable lengths": ("variable-lengths", "fs.Buckets"),
    "several optimizers": ("optimizers", "by_path"),
    "LoRA alone": ("adapters", "fs.lora"),
    "out of memory": ("memory", "PYTORCH_ALLOC_CONF"),
    "profile a step": ("profiling", "fs.profile.traced"),
    "SLURM": ("sweeps", "launcher=slurm"),
}


def blocks(page: Path, language: str = "python") -> list[str]:
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [block for each, block in found if each == language]


def run(page: Path, namespace: dict[str, Any]) -> None:
    """Run the blocks of a page in order; a traceback names the page and its line."""
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        if found[1] == "python":
            before = text.count("\n", 0, found.start(2))
            exec(compile("\n" * before + found[2], str(page), "exec"), namespace)


# ------------------------------------------------------------------ the README


def test_the_readme_and_the_log_are_short() -> None:
    assert len(README.read_text(encoding="utf-8").split()) <= 1000
    assert len(LOG.read_text(encoding="utf-8").splitlines()) <= 400


def run_script(folder: Path) -> str:
    process = start_command([str(folder / "train.py")], folder)
    code, printed = process.wait(), "".join((folder / name).read_text() for name in OUTPUT.values())
    assert code == 0, printed
    return printed


def write_script(folder: Path, epochs: int) -> None:
    """Write the script of the README for so many epochs, whose kernels are not compiled."""
    script, _ = blocks(README)
    eager = script.replace("adamw(3e-3))", 'adamw(3e-3), backend="eager")')
    quick = eager.replace("epochs=5", f"epochs={epochs}")
    assert script != eager != quick
    (folder / "train.py").write_text(quick)


@pytest.mark.timeout(600)  # two ranks and four readers, on two cores that may be busy
def test_the_script_of_the_readme_trains_and_saves(tmp_path: Path) -> None:
    """Both ranks read with workers."""
    write_script(tmp_path, epochs=1)
    assert re.findall(r"^(\d+) \S+$", run_script(tmp_path), re.M) == ["10", "16"]
    assert fs.checkpoint.all_steps(tmp_path / "checkpoints") == [10, 16]


@pytest.mark.long  # two starts; test_resume goes on in one process
@pytest.mark.timeout(600)
def test_the_script_of_the_readme_goes_on_where_it_has_saved(tmp_path: Path) -> None:
    write_script(tmp_path, epochs=1)
    first = [float(loss) for loss in re.findall(r"^10 (\S+)$", run_script(tmp_path), re.M)]
    write_script(tmp_path, epochs=2)
    printed = re.findall(r"^(\d+) (\S+)$", run_script(tmp_path), re.M)
    assert [int(done) for done, _ in printed] == [20, 30, 32]
    assert float(printed[-1][1]) < first[0]
    assert fs.checkpoint.all_steps(tmp_path / "checkpoints") == [30, 32]


def test_its_error_and_its_schedule_are_what_is_printed() -> None:
    namespace: dict[str, Any] = {"__name__": "readme"}
    exec(compile(blocks(README)[0], str(README), "exec"), namespace)
    text = README.read_text(encoding="utf-8")
    error, schedule = blocks(README, "")
    apply, params = fs.make_functional(namespace["Model"]())

    (call,) = re.findall(r"`(fs\.match_specs\(.*\))` raises", text)
    with pytest.raises(fs.SpecError) as caught:
        eval(call, {"fs": fs, "params": params})
    assert f"SpecError: {caught.value}".strip() == error.strip()

    def loss_fn(params: Any, rows: Any) -> Any:
        logits = apply(params, rows[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    (mesh_text,) = re.findall(r"`(fs\.make_mesh\(.*abstract=True\))`", text)
    mesh = eval(mesh_text, {"fs": fs})
    specs = fs.presets.full_shard(params, mesh)
    step = fs.shard_step(loss_fn, specs, mesh=mesh, optimizer=fs.optim.adamw(3e-3))
    lines = step.lower(params, torch.zeros(8, 33, dtype=torch.long)).as_text().splitlines()
    assert [line for line in schedule.splitlines() if line not in lines] == []


def test_the_optimizer_of_the_readme_is_the_same_on_two_ranks() -> None:
    namespace: dict[str, Any] = {"torch": torch, "fs": fs}
    exec(compile(blocks(README)[1], str(README), "exec"), namespace)
    params, x = {"w": torch.randn(3, 4, dtype=torch.float64)}, torch.randn(4, 4, dtype=torch.float64)

    def train_on(mesh: fs.Mesh, _: int = 0) -> torch.Tensor:
        specs, lamb = fs.presets.full_shard(params, mesh), namespace["lamb"](0.1)
        loss_fn = lambda p, x: (x @ p["w"].T).square().mean()  # noqa: E731
        step = fs.shard_step(loss_fn, specs, mesh=mesh, optimizer=lamb, backend="eager")
        state = step.init(params)
        for _ in range(3):
            state, _ = step(state, x)
        return fs.unshard(state.params, specs, mesh)["w"]

    two = fs.make_mesh(shard=2, simulated=True)
    one = train_on(fs.make_mesh(shard=1))
    for each in fs.simulate(two, partial(train_on, two)):
        torch.testing.assert_close(each, one, rtol=1e-12, atol=1e-12)


def test_the_command_for_the_suite_is_what_ci_runs() -> None:
    (commands,) = blocks(README, "bash")
    suite = commands.splitlines()[1].partition("  #")[0]
    assert (ROOT / ".ci" / "run").read_text().endswith(f"{suite}\n")


def test_its_bold_numbers_are_in_the_log() -> None:
    text = README.read_text(encoding="utf-8")
    numbers = re.findall(r"\*\*(.+?)\*\*", text)
    measured = re.sub(r"\s+", " ", LOG.read_text(encoding="utf-8"))
    assert numbers
    assert [n for n in numbers if not re.search(rf"(?<![\d.]){re.escape(n)}(?!\d)", measured)] == []
    assert f"{len(parity.LAYOUTS) + len(parity.RESUMED)} layouts" in text


# ------------------------------------------------------------------ the guide


def run_first(folder: str | Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names that the first page leaves, in a folder that the others may write to."""
    patch.chdir(folder)
    for name in ("shard_step", "shard_forward"):  # a compilation takes 10 s; other tests compile
        patch.setattr(fs, name, partial(getattr(fs, name), backend="eager"))
    namespace: dict[str, Any] = {}
    run(GUIDE / "first-script.md", namespace)
    return namespace


@pytest.fixture(scope="module")
def first_script(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Yield the names that the first page leaves."""
    patch = pytest.MonkeyPatch()
    yield run_first(tmp_path_factory.mktemp("guide"), patch)
    patch.undo()


def fresh(namespace: dict[str, Any]) -> dict[str, Any]:
    """Return the same names with a copy of the state, which a step may consume."""
    return {**namespace, "state": namespace["state"].copy()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short_and_its_blocks_run(page: Path, first_script: Any) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    registries = fs.presets.PRESETS, fs.codecs.CODECS, fs.schedules.SCHEDULES
    before = [dict(registry) for registry in registries]
    if page.stem != "first-script":
        run(page, fresh(first_script))
    for registry, known in zip(registries, before, strict=True):  # what a page registers is its own
        registry.clear()
        registry.update(known)


TOGETHER = ("layouts", "data", "checkpoints", "evaluation", "adapters", "hugging-face")


def run_together(rank: int, folder: str) -> None:
    """Run the pages on this rank in which ranks do more together than a step."""
    with pytest.MonkeyPatch.context() as patch:
        # A rank of a pool may not start processes, as the DataLoader of a page does.
        patch.setitem(multiprocessing.current_process()._config, "daemon", False)

        def save_once(self: PreTrainedModel, path: str) -> None:  # stands for a download
            if rank == 0:
                save(self, path)
            dist.barrier()

        save = PreTrainedModel.save_pretrained
        patch.setattr(PreTrainedModel, "save_pretrained", save_once)
        namespace = run_first(folder, patch)
        for page in TOGETHER:
            run(GUIDE / f"{page}.md", fresh(namespace))


@pytest.mark.long
def test_pages_run_on_two_ranks_of_one_folder(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(run_together, str(tmp_path), timeout=280.0)


def test_the_schedule_that_is_explained_is_what_is_printed(first_script: Any) -> None:
    (shown,) = blocks(GUIDE / "schedules.md", "")
    lines = first_script["lowered"].as_text().splitlines()
    assert [line for line in shown.splitlines() if line not in lines] == []


def test_a_file_that_is_shown_is_the_file() -> None:
    (shown,) = blocks(GUIDE / "own-parts.md", "yaml")
    recipe = ROOT / "experiments/examples/own_research/conf/experiment/shapes.yaml"
    assert shown == recipe.read_text(encoding="utf-8")


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_by_one_page_that_the_readme_links(question: str) -> None:
    page, answer = QUESTIONS[question]
    assert answer in (GUIDE / f"{page}.md").read_text(encoding="utf-8")
    assert f"(experiments/guide/{page}.md)" in README.read_text(encoding="utf-8")


def test_the_readme_links_every_page() -> None:
    text = README.read_text(encoding="utf-8")
    assert [page.name for page in PAGES if f"(experiments/guide/{page.name})" not in text] == []


# ------------------------------------------------------------------ coming from other systems

COMING_FROM = (GUIDE / "coming-from.md").read_text(encoding="utf-8")
TABLES = re.findall(r"^\| (.*?)\| here \|\n\|---\|---\|\n((?:\|.*\n)+)", COMING_FROM, re.M)


def rows() -> list[Any]:
    """Return rows of what others write, and the code or command here."""
    found = []
    for theirs, body in TABLES:
        for line in body.splitlines():
            name, here = (cell.strip() for cell in line.strip("|").split(" | "))
            # The first code of a cell, and what else is a whole call of the library.
            first, *more = re.findall(r"`(.+?)`", here)
            calls = [code for code in more if code.startswith("fs.") and "(path" not in code]
            for code in (first, *calls):
                found.append(pytest.param(code, id=f"{theirs.strip()}: {name}: {code}"))
    return found


@pytest.mark.parametrize("here", rows())
def test_every_row_of_coming_from_runs(here: str, first_script: Any) -> None:
    if not here.startswith("python -m "):
        exec(compile(here, "coming-from.md", "exec"), fresh(first_script))
        return
    _, _, module, *overrides = shlex.split(here)
    assert validate(JOBS[module].command, overrides) is not None


def test_all_the_systems_are_there() -> None:
    names = " ".join(theirs for theirs, _ in TABLES)
    systems = ("FSDP", "DDP", "DeepSpeed", "Megatron", "JAX", "Lightning", "TRL", "ms-swift")
    assert [name for name in systems if name not in names] == []


# ------------------------------------------------------------------ links


@pytest.mark.parametrize("page", documents(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Each link leads to a file of the repository, and to a heading of it."""
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?:)(.+?)\)", re.sub(r"```.*?```", "", text, flags=re.S)):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8") if anchor else "", re.M)
        anchors = {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, link
