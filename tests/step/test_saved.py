"""Saved steps: a second process traces and compiles nothing, and never runs what is stale."""

from __future__ import annotations

import glob
import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial, partialmethod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from saved_steps import BATCH, MASK, PARAMS, Settings, loss_of, on_ranks
from torch import Tensor

import fnshard as fs
from fnshard import LayoutSpec, P
from fnshard.errors import StateError
from fnshard.step.saved import file, store
from fnshard.step.saved.encoding import digest_of
from fnshard.step.saved.file import Refused


def step_of(fn: Any, folder: Path | None, backend: str = "eager", mesh: Any = None, **options: Any) -> Any:
    mesh = mesh or fs.make_mesh()
    preset = options.pop("preset", fs.presets.full_shard)
    how = {"mesh": mesh, "optimizer": fs.optim.adamw(1e-2), "backend": backend, **options}
    return fs.shard_step(fn, preset(PARAMS, mesh), cache_dir=None if folder is None else str(folder), **how)


def run(step: Any, steps: int = 2) -> tuple[dict[str, Tensor], Any]:
    state = step.init(PARAMS, seed=0)
    for _ in range(steps):
        state, metrics = step(state, *BATCH)
    return state.params, metrics.numbers()


def saved_in(folder: Path) -> Path:
    (path,) = folder.glob(f"*{file.SUFFIX}")
    return path


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "inductor"},
        {"preset": fs.presets.zero2, "accumulate": 2},
        {"remat": "unit", "grad_norm": True},
        {"optimizer": None},
    ],
    ids=["inductor", "zero2 accumulated", "remat", "gradients"],
)
def test_a_second_step_is_loaded_and_is_the_same_to_the_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    fn, folder = loss_of(Settings()), tmp_path / "cache"
    first, second = (step_of(fn, folder, **options) for _ in range(2))
    found = []
    for step in (first, second):
        if options.get("optimizer", True) is None:
            (loss, _), grads = step(PARAMS, *BATCH)
            found.append((grads, float(loss)))
        else:
            found.append(run(step))
    assert (first.made.traces, first.made.loads, first.made.notes) == (1, 0, [])
    assert vars(second.made) == {"traces": 0, "compiles": 0, "loads": 1, "notes": []}
    assert all(torch.equal(found[0][0][p], found[1][0][p]) for p in PARAMS)
    assert found[0][1] == found[1][1]
    lowered = [step.lower(PARAMS, *BATCH) for step in (first, second)]
    for text in (str, lambda x: x.program, lambda x: x.memory_analysis(), lambda x: x.timeline("h100")):
        assert str(text(lowered[0])) == str(text(lowered[1]))
    assert lowered[0].digest == lowered[1].digest
    assert (folder.stat().st_mode & 0o777, saved_in(folder).stat().st_mode & 0o777) == (0o700, 0o600)


def test_simulated_ranks_on_a_tensor_axis_load_one_file(tmp_path: Path) -> None:
    mesh = fs.make_mesh(shard=2, tensor=2, simulated=True)
    split = {"compute_dtype": torch.bfloat16, "storage_dtype": torch.float32}
    rules = [
        ("up", LayoutSpec(P(("tensor", "shard")), compute=P("tensor"), **split)),
        ("down", LayoutSpec(P(None, ("tensor", "shard")), compute=P(None, "tensor"), **split)),
    ]
    found = []
    for _ in range(2):
        step = fs.shard_step(
            lambda p, x: ((x.bfloat16() @ p["up"].T).relu() @ p["down"].T).float().square().mean(),
            fs.match_specs(PARAMS, rules), mesh=mesh, optimizer=fs.optim.adamw(1e-2), backend="eager",
            cache_dir=str(tmp_path / "cache"),
        )  # fmt: skip
        ran = fs.simulate(mesh, lambda rank, step=step: step(step.init(PARAMS), *BATCH)[1].numbers())
        found.append((ran, step.made.traces, step.made.loads))
    assert found[0] == (found[1][0], 1, 0) and found[1][1:] == (0, 1)


def test_ranks_compile_a_share_each_and_load_what_one_of_them_saved(tmp_path: Path, ranks: Any) -> None:
    first, second = (ranks(2).run(on_ranks, str(tmp_path / "cache")) for _ in range(2))
    made = [each[3] for each in first]
    assert [each["traces"] for each in made] == [1, 1]
    assert sum(each["compiles"] for each in made) == first[0][0] > 1  # each by one of them
    assert all(each["compiles"] for each in made)
    same, other = zip(*(each[4] for each in first), strict=True)  # shapes as the step's or not
    assert [(made["traces"], made["compiles"]) for made in (*same, *other)] == [(1, 0)] * 2 + [(1, 1)] * 2
    again = [made for each in second for made in (each[3], *each[4])]
    assert [(made["traces"], made["compiles"], made["loads"]) for made in again] == [(0, 0, 1)] * 6
    assert all(a[1] == b[1] and torch.equal(a[2], b[2]) for a, b in zip(first, second, strict=True))
    for *_, losses, expected in (*first, *second):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_a_digest_is_the_same_while_a_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks share kernels only where their digests are equal, and one may be in the middle of it."""
    lowered = step_of(loss_of(Settings()), None).lower(PARAMS, *BATCH)
    before = digest_of(lowered.stages)
    monkeypatch.setattr(lowered.program.fake_mode, "in_kernel_invocation", True)  # as its thread sets it
    assert digest_of(lowered.stages) == before


# ------------------------------------------------------------------ what is stale


def _set(name: str, value: Any) -> Callable[[Settings], None]:
    return lambda settings: setattr(settings, name, value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_set("scale", 3.0), "settings.scale"),
        (_set("scale", 2), "settings.scale"),
        (_set("table", {"power": 4}), "settings.table['power']"),
        (_set("mask", torch.zeros(4)), "settings.mask"),
        (_set("mask", MASK.double()), "settings.mask"),
        (_set("mask", object()), "which cannot be compared"),
    ],
)
def test_values_that_fn_reads_are_compared(tmp_path: Path, change: Any, named: str) -> None:
    run(step_of(loss_of(Settings()), tmp_path), 1)
    saved_in(tmp_path)
    settings = Settings()
    change(settings)
    step = step_of(loss_of(settings), tmp_path)
    try:
        step.lower(PARAMS, *BATCH)
    except (TypeError, fs.TraceError):  # `object()` is no mask
        assert "cannot be compared" in named
    (note,) = step.made.notes
    assert named in note and (step.made.loads, step.made.traces) == (0, 1)


def _scaled(factor: Any, p: Any, x: Tensor) -> Tensor:
    return (x @ p["up"].T).sum() * factor


def _in_a_default(held: Any) -> Any:
    def scaled(y: Tensor, s: Any = held) -> Tensor:
        return y * s

    return lambda p, x: scaled(x @ p["up"].T).sum()


def _functions(factors: Any) -> Any:
    scaled = [lambda y, factor=factor: y * factor for factor in factors]
    wrapped = [(lambda f: lambda y: f(y))(each) for each in scaled]
    return lambda p, x: wrapped[0](x @ p["up"].T).sum()


def _gradient(factor: Any) -> Any:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            return y * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * factor

    return lambda p, x: Scaled.apply(x @ p["up"].T).sum()


class _Pair(tuple):
    beta: float


class _Name(str):
    beta: float


def _with_beta(make: Callable[[], Any]) -> Callable[[float], Any]:
    def made(beta: float) -> Any:
        value = make()
        value.beta = beta
        return lambda p, x: (x @ p["up"].T).sum() * value.beta

    return made


def _inherited(factor: float) -> Any:
    base = type("Base", (), {"factor": factor})
    settings = type("Derived", (base,), {})
    return lambda p, x: (x @ p["up"].T).sum() * settings.factor


def _of_a_metaclass(factor: float) -> Any:
    settings = type("Meta", (type,), {"factor": factor})("Plain", (), {})
    return lambda p, x: (x @ p["up"].T).sum() * settings.factor


def _partial_method(factor: float) -> Any:
    class Scaled:
        def scaled(self, by: float, y: Tensor) -> Tensor:
            return y * by

        method = partialmethod(scaled, factor)

    return lambda p, x: Scaled().method((x @ p["up"].T).sum())


def _attribute_of_a_function(factor: float) -> Any:
    def settings() -> None: ...

    settings.factor = factor
    return lambda p, x: (x @ p["up"].T).sum() * settings.factor


def _weighted(factor: float) -> Any:
    teacher = torch.nn.Linear(8, 2).requires_grad_(False)
    torch.nn.init.constant_(teacher.weight, factor), torch.nn.init.zeros_(teacher.bias)
    return lambda p, x: teacher(x @ p["up"].T).sum()


@pytest.mark.parametrize(
    ("make", "before", "after"),
    [
        (lambda v: partial(_scaled, v), 2.0, 3.0),
        (lambda v: partial(_scaled, v), torch.tensor(2.0), torch.tensor(3.0)),
        (lambda v: lambda p, x: (x @ p["up"].T).sum() * v[0], (2.0, [1]), (3.0, [1])),
        (lambda v: lambda p, x: (x @ p["up"].T).sum() * v[0], (torch.tensor(2.0),), (torch.tensor(3.0),)),
        (lambda v: lambda p, x: v[0]((x @ p["up"].T).sum()), (torch.sin, torch.exp), (torch.exp, torch.sin)),
        (lambda v: lambda p, x: (x @ p["up"].T).sum() * next(iter(v)), {2: 0, 3: 0}, {3: 0, 2: 0}),
        (_with_beta(lambda: _Pair((1, 2))), 2.0, 3.0),
        (_with_beta(lambda: _Name("a")), 2.0, 3.0),
        (_with_beta(lambda: torch.ones(2)), 2.0, 3.0),
        (_weighted, 2.0, 3.0),
        (_in_a_default, torch.tensor(2.0), torch.tensor(3.0)),
        (_functions, (2.0, 3.0), (3.0, 2.0)),
        (_gradient, 2.0, 3.0),
        (_inherited, 2.0, 3.0),
        (_of_a_metaclass, 2.0, 3.0),
        (_partial_method, 2.0, 3.0),
        (_attribute_of_a_function, 2.0, 3.0),
        (lambda v: partial(lambda get, p, x: (x @ p["up"].T).sum() * get("a"), {"a": v}.get), 2.0, 3.0),
        (lambda v: lambda p, x: v((x @ p["up"].T).sum()), torch.tensor(2.0).mul, torch.tensor(3.0).mul),
    ],
    ids=["partial", "partial tensor", "tuple", "tuple of tensors", "order of functions", "order of keys",
         "attribute of a tuple", "of a string", "of a tensor", "weights of a module", "default",
         "closures of one name", "backward", "base class", "metaclass", "partialmethod",
         "attribute of a function", "method of a dict", "method of a tensor"],
)  # fmt: skip
def test_what_cannot_change_in_one_process_is_compared(
    tmp_path: Path, make: Any, before: Any, after: Any
) -> None:
    steps = [step_of(make(v), tmp_path, optimizer=None) for v in (before, before, after)]
    for step in steps:
        step(PARAMS, *BATCH)
    assert [(step.made.traces, step.made.loads) for step in steps] == [(1, 0), (0, 1), (1, 0)]


@pytest.mark.parametrize("change", [_set("scale", 5.0), lambda settings: settings.mask.zero_()])
def test_a_loaded_step_traces_anew_when_what_fn_reads_changes(tmp_path: Path, change: Any) -> None:
    settings = Settings()
    run(step_of(loss_of(settings), tmp_path), 1)
    step, plain = step_of(loss_of(settings), tmp_path), step_of(loss_of(settings), None)
    run(step, 1)
    assert (step.made.traces, step.made.loads) == (0, 1)
    change(settings)
    assert run(step, 1)[1] == run(plain, 1)[1]
    assert (step.made.traces, step.made.loads) == (1, 1)


@pytest.mark.parametrize(
    "other",
    [
        {"batch": (torch.randn(7, 4),)},
        {"options": {"remat": "unit"}},
        {"options": {"grad_norm": True}},
        {"options": {"preset": fs.presets.no_shard, "mesh": fs.make_mesh(replicate=1)}},
        {"options": {"optimizer": fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.sgd(0.1))}},
    ],
)
def test_other_requests_have_files_of_their_own(tmp_path: Path, other: dict[str, Any]) -> None:
    fn = loss_of(Settings())
    run(step_of(fn, tmp_path), 1)
    step = step_of(fn, tmp_path, **other.get("options", {}))
    step.lower(PARAMS, *other.get("batch", BATCH))
    assert (step.made.loads, step.made.traces, step.made.notes) == (0, 1, [])


@pytest.mark.parametrize("name", ["torch", "Python", "processor", "threads"])
def test_another_machine_is_refused_by_name(tmp_path: Path, monkeypatch: Any, name: str) -> None:
    fn, path = loss_of(Settings()), tmp_path / "step"
    step_of(fn, None).lower(PARAMS, *BATCH).save(path)
    mesh = fs.make_mesh()
    how = {"mesh": mesh, "optimizer": fs.optim.adamw(1e-2), "backend": "eager", "batch": BATCH}
    assert fs.load_step(path, fn, fs.presets.full_shard(PARAMS, mesh), **how).made.loads == 1
    here = store.environment(mesh.device)
    monkeypatch.setattr(store, "environment", lambda device: here | {name: "another"})
    with pytest.raises(StateError, match=f"made by another {name}"):
        fs.load_step(path, fn, fs.presets.full_shard(PARAMS, mesh), **how)


PROGRAM = """
import sys, torch, fnshard as fs
from {module} import loss_fn
params = {{"w": torch.ones(4)}}
specs = fs.match_specs(params, [("*", fs.LayoutSpec())])
step = fs.shard_step(loss_fn, specs, backend="eager", cache_dir=sys.argv[1])
print(step(params, torch.arange(4.0))[0].item(), step.made)
"""


def test_source_files_and_variables_of_the_environment_are_compared(tmp_path: Path) -> None:
    source, folder = tmp_path / "losses_of_mine.py", tmp_path / "cache"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(module=source.stem))

    def out(text: str, **variables: str) -> str:
        source.write_text(text)
        time.sleep(0.05)  # a process knows to 10 ms when it began
        path = os.pathsep.join([str(tmp_path), str(Path(fs.__file__).parents[1])])
        environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **variables}
        command = [sys.executable, str(program), str(folder)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    plain = "def loss_fn(params, x):\n    return (params['w'] * x).sum() * 2\n"
    assert out(plain).startswith("12.0 0 loaded, 1 traced")
    assert out(plain).startswith("12.0 1 loaded, 0 traced")
    reads = "import os\n" + plain.replace("* 2", "* float(os.environ.get('SCALE', 1))")
    changed = out(reads)
    assert changed.startswith("6.0 0 loaded, 1 traced") and "source files have changed" in changed
    other = out(reads, SCALE="2")
    assert other.startswith("12.0 0 loaded, 1 traced") and "reads other values: os.environ['SCALE']" in other


there = os.path.exists
table = dict.fromkeys(range(20_000), 2.0)


@pytest.mark.parametrize(
    ("read", "named"),
    [
        (lambda path: os.path.exists(path), "calls exists"),
        (lambda path: there(path), "calls exists"),
        (lambda path: partial(there, path)(), "calls exists"),
        (lambda path: Path(path).is_file(), "calls is_file"),
        (lambda path: os.stat(path).st_size, "calls stat"),
        (lambda path: len(os.listdir(os.path.dirname(path))), "calls listdir"),
        (lambda path: len(glob.glob(path)), "calls glob"),
        (lambda path: np.load(path), "calls load"),
        (lambda path: {**os.environ}.get("SCALE", 1), "lists the variables of the environment"),
        (lambda path: table[15_000], "len(table) of 20000 values"),
    ],
    ids=[
        "exists",
        "another name",
        "a partial",
        "a path",
        "stat",
        "listdir",
        "glob",
        "load",
        "variables",
        "long",
    ],
)
def test_a_function_that_reads_what_is_not_compared_is_never_saved(
    tmp_path: Path, read: Callable[[str], Any], named: str
) -> None:
    np.save(tmp_path / "numbers.npy", 4.0)
    path, folder = str(tmp_path / "numbers.npy"), tmp_path / "cache"
    step = step_of(lambda p, x: (x @ p["up"].T).sum() * float(read(path)), folder, optimizer=None)
    step(PARAMS, *BATCH)
    (note,) = step.made.notes
    assert named in note and not list(folder.iterdir())


def test_a_module_that_fn_imports_is_compared(tmp_path: Path, monkeypatch: Any) -> None:
    def fn(p: Any, x: Tensor) -> Tensor:
        import settings_of_mine

        return (x @ p["up"].T).sum() * settings_of_mine.factor

    module = ModuleType("settings_of_mine")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found = []
    for module.factor in (2.0, 2.0, 3.0):
        step = step_of(fn, tmp_path, optimizer=None)
        step(PARAMS, *BATCH)
        found.append(step.made.loads)
    assert found == [0, 1, 0]


class _Attributes(dict):
    __getattr__ = dict.__getitem__  # a KeyError for any other name


def test_an_object_with_its_own_attribute_errors_is_saved(tmp_path: Path) -> None:
    settings = _Attributes(scale=2.0)
    steps = [
        step_of(lambda p, x: (x @ p["up"].T).sum() * settings.scale, tmp_path, optimizer=None)
        for _ in range(2)
    ]
    for step in steps:
        step(PARAMS, *BATCH)
    assert [step.made.loads for step in steps] == [0, 1]


@pytest.mark.parametrize(
    ("read", "named"),
    [
        (lambda: globals()["MASK"].sum(), "calls globals"),
        (lambda: eval("MASK").sum(), "calls eval"),
        (lambda: sys._getframe().f_globals["MASK"].sum(), "calls _getframe"),
        (lambda: torch.linalg.norm(MASK), "is not found from what it names"),
    ],
    ids=["globals", "eval", "frame", "patch"],
)
def test_a_function_that_runs_or_reads_what_it_does_not_name_is_never_saved(
    tmp_path: Path, monkeypatch: Any, read: Callable[[], Any], named: str
) -> None:
    monkeypatch.setattr(torch.linalg, "norm", lambda x: x.sum() * 2)
    step = step_of(lambda p, x: (x @ p["up"].T).sum() * read(), tmp_path, optimizer=None)
    step(PARAMS, *BATCH)
    (note,) = step.made.notes
    assert named in note and not list(tmp_path.iterdir())


def test_torch_itself_is_compared(tmp_path: Path, monkeypatch: Any) -> None:
    fn = loss_of(Settings())
    run(step_of(fn, tmp_path), 1)
    monkeypatch.setattr(torch, "relu", lambda x: x * 0.5)
    step = step_of(fn, tmp_path)
    step.lower(PARAMS, *BATCH)
    assert (step.made.loads, step.made.traces) == (0, 1)


# ------------------------------------------------------------------ what is damaged, planted, open to others


def test_no_damaged_file_is_looked_at(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "step"
    step_of(loss_of(Settings()), None).lower(PARAMS, *BATCH).save(path)
    data, draw = path.read_bytes(), random.Random(0)
    regions = [range(0, 100), range(100, 4096), range(len(data))]
    flipped = [draw.choice(region) for region in regions for _ in range(170)]
    monkeypatch.setattr(file.safetensors.torch, "load", lambda body: pytest.fail("read"))
    for place in flipped:
        bad = bytearray(data)
        bad[place] ^= 1 << draw.randrange(8)
        path.write_bytes(bad)
        with pytest.raises(Refused, match="damaged"):
            file.read(path)
    for size in (0, 10, 79, 80, 81, *(draw.randrange(len(data)) for _ in range(40))):
        path.write_bytes(data[:size])
        with pytest.raises(Refused, match="damaged"):
            file.read(path)


class Planted:
    def __reduce__(self) -> Any:
        return os.mkdir, ("planted",)


def test_a_pickle_is_never_loaded(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    fn, folder = loss_of(Settings()), tmp_path / "cache"
    run(step_of(fn, folder), 1)
    path, bad = saved_in(folder), pickle.dumps(Planted())
    head = file._MAGIC + store.digest(bad).encode() + b"\n"
    for planted in (bad, head + bad):
        path.write_bytes(planted)
        step = step_of(fn, folder)
        run(step, 1)
        assert step.made.loads == 0 and step.made.traces == 1 and len(step.made.notes) == 1
    assert not (tmp_path / "planted").exists()
    assert fs.debug.assert_max_compiles and step_of(fn, folder).lower(PARAMS, *BATCH).loaded  # made anew


@pytest.mark.parametrize("what", ["folder", "file", "above"])
def test_what_others_may_write_is_refused(tmp_path: Path, what: str) -> None:
    fn, folder = loss_of(Settings()), tmp_path / "above" / "cache"
    run(step_of(fn, folder), 1)
    {"folder": folder, "file": saved_in(folder), "above": folder.parent}[what].chmod(0o777)
    with pytest.raises(
        StateError, match=r"(?s)others than this user may write to the (file|folder).*chmod 700"
    ):
        step_of(fn, folder).lower(PARAMS, *BATCH)


def test_links_are_not_followed(tmp_path: Path) -> None:
    fn, folder = loss_of(Settings()), tmp_path / "cache"
    run(step_of(fn, folder), 1)
    path = saved_in(folder)
    path.rename(folder / "elsewhere")
    path.symlink_to(folder / "elsewhere")
    step = step_of(fn, folder)
    run(step, 1)
    assert step.made.loads == 0 and not path.is_symlink()


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    for number in range(4):
        path = tmp_path / f"{number}{file.SUFFIX}"
        path.write_bytes(bytes(100))
        os.utime(path, (number, number))
    file.touch(tmp_path / f"0{file.SUFFIX}")
    left, written = (tmp_path / f".0{file.SUFFIX}.{name}" for name in ("left", "written"))
    left.touch(), written.touch(), os.utime(left, (0, 0))
    assert [p.name[0] for p in file.prune(tmp_path, 250)] == ["1", "2"]
    assert written.exists() and not left.exists()


def test_a_step_that_has_no_file(tmp_path: Path) -> None:
    abstract = fs.make_mesh(shard=2, abstract=True)
    lowered = step_of(loss_of(Settings()), tmp_path, mesh=abstract).lower(PARAMS, *BATCH)
    with pytest.raises(StateError, match="abstract mesh"):
        lowered.save(tmp_path / "step")
    with pytest.raises(StateError, match="is not loaded"):
        fs.load_step(
            tmp_path / "none", loss_of(Settings()), fs.presets.full_shard(PARAMS, fs.make_mesh()), batch=BATCH
        )
    assert list(tmp_path.iterdir()) == []
