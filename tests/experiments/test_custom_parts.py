"""Models, data, losses and trackers of one's own, by `_target_`, and specs from a configuration."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import run_command
from errors import raises
from runs import rows_of, run_in, validate
from torch import Tensor

import fnshard as fs
from experiments import ROOT, train
from experiments.generate import make_training_parts
from experiments.lib import launch as jobs
from experiments.lib.checks import ConfigError
from experiments.lib.config import TrainConfig
from experiments.lib.folder import read_result, write_result
from experiments.lib.launch import fit_to_machine, main
from experiments.lib.plan import specs_of
from experiments.lib.run import Run
from experiments.lib.task import Items, make_data, make_optimizer, make_target, make_task
from experiments.train import COMMAND, JOB
from fnshard.launcher.rank import Stop

EXAMPLE = ROOT / "experiments" / "examples" / "own_research"
SMALL = ("run.steps=4", "run.held_out_every=2", "run.save_every=2", "run.backend=eager", "mesh.shard=1")


def linear(width: int) -> tuple[Any, dict[str, Tensor]]:
    """Return a function and its parameters, in the place of a module."""
    return lambda params, x: x @ params["w"] + params["b"], {"w": torch.zeros(width, 1), "b": torch.zeros(1)}


def points(count: int, width: int = 3) -> tuple[Any, Any]:
    x = torch.randn(2 * count, width, generator=torch.Generator().manual_seed(0))
    items = list(zip(x, x.sum(1, keepdim=True), strict=True))
    return items[:count], items[count:]


def squares(model: Any, x: Tensor, y: Tensor, weight: float = 1.0) -> Any:
    errors = (model(x) - y).square()
    return fs.Mean(weight * errors.sum(), float(errors.numel())), {"worst": errors.amax()}


def lamb(lr: Any, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-6, decay: float = 0.01) -> Any:
    """Make the guide's LAMB as a user who gives no `values` for the metrics."""

    def init(path: str, param: Tensor) -> dict[str, Tensor]:
        return {"mean": torch.zeros_like(param), "square": torch.zeros_like(param)}

    def update(path: str, grad: Tensor, slots: Any, param: Tensor, step: fs.optim.Step) -> Any:
        mean = slots["mean"].lerp(grad, 1 - b1)
        square = slots["square"].lerp(grad.square(), 1 - b2)
        first, second = (step.host(lambda count, b=b: 1 - b ** (int(count) + 1)) for b in (b1, b2))
        change = mean / first / ((square / second).sqrt() + eps) + decay * param
        ratio = param.norm() / change.norm()
        ratio = torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0)
        return -step.host(lr) * ratio * change, {"mean": mean, "square": square}

    return fs.optim.Optimizer(f"lamb(lr={lr})", init, update, rules=())


class Memory:
    rows: list[Any] = []  # noqa: RUF012  # one list for the test to read

    def start(self, run: Any) -> str:
        return ""

    def log(self, rows: Any) -> None:
        self.rows.extend(rows)

    def artifact(self, path: Path) -> None:
        pass

    def finish(self, status: str, summary: Any) -> None:
        pass


class Broken:
    """A data set of which one item raises, and one is of another shape."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, number: int) -> Tensor:
        return torch.zeros([3, 2][number == 5]) if number != 7 else {}["label"]


HERE = (
    f"model._target_={__name__}.linear data._target_={__name__}.points objective._target_={__name__}.squares"
)
OWN = (*HERE.split(), "model.width=3", "data.count=32", "data.rows=32", "data.held_out_rows=32", *SMALL,
       "optimizer.lr=0.1")  # fmt: skip


def config_of(*words: str) -> TrainConfig:
    return JOB.prepare(fit_to_machine(validate(COMMAND, [*OWN, *words]), accelerators={}))


def test_an_error_of_ones_own_data_has_its_file_and_line():
    items = Items(Broken(), {})
    with raises(ConfigError, leaves=["item 7", f"({__file__}:"], says="KeyError: 'label'"):
        items.batch(np.array([1, 7]))
    with raises(ConfigError, leaves="items 1, 5", fix="equal shapes"):
        items.batch(np.array([1, 5]))
    target = {"_target_": f"{__name__}.points", "count": "many"}
    with raises(ConfigError, leaves=["points", f"({__file__}:"], says="TypeError"):
        make_target("data", target)


def test_functions_of_ones_own_train_and_resume(tmp_path, monkeypatch):
    """A function in the place of a module, a weighted `Mean`, more numbers, a tracker, rules of specs."""
    specs = "specs=[[w,shard],[b,null]]"
    config = config_of(specs, "objective.weight=2", f"tracker.own=[{{_target_: {__name__}.Memory}}]")
    specs, fields = specs_of(config.specs, linear(3)[1], {}), ("w", "b")
    assert [specs[name].storage for name in fields] == [fs.P("shard"), fs.P()]
    Memory.rows.clear()
    train.train(config, run_in(tmp_path / "whole"), [], Stop())
    result, rows = read_result(tmp_path / "whole"), rows_of(tmp_path / "whole")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 4 and losses[-1] < losses[0] and result["held_out_worst"] > 0
    assert result["rows_per_s"] > 0 and "tokens_per_s" not in result
    assert result["goal"] == {"name": "loss", "unit": "", "is_maximised": False}
    assert not (tmp_path / "whole" / "sample.txt").exists()
    assert [row["step"] for row in Memory.rows if "loss" in row] == [1, 2, 3, 4]
    params = {"w": torch.zeros(3, 1), "b": torch.zeros(1)}
    x, y = next(train.open_data(config).loader(fs.make_mesh(shard=1, device="cpu")))
    assert losses[0] == pytest.approx(2 * ((linear(3)[0](params, x) - y) ** 2).mean().item(), rel=1e-5)

    real, made = Run.make_step, []

    def dies(self: Run, number: int, *args: Any) -> Any:
        made.append(number)
        if len(made) == 4:
            raise KeyboardInterrupt
        return real(self, number, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "make_step", dies)
        with pytest.raises(KeyboardInterrupt):
            train.train(config, run_in(tmp_path / "broken"), [], Stop())
        train.train(config, run_in(tmp_path / "broken"), [], Stop())
    assert made == [1, 2, 3, 4, 3, 4]
    assert losses == [row["loss"] for row in rows_of(tmp_path / "broken") if "loss" in row]


@pytest.mark.long
def test_an_optimizer_of_ones_own_that_reports_no_rate_trains(tmp_path, capfd):
    words = [f"optimizer={{_target_: {__name__}.lamb, lr: 0.1}}", "schedule.warmup=0.5", "run.steps=2"]
    own = [word for word in OWN if not word.startswith(("optimizer", "run.steps"))]
    config = fit_to_machine(validate(COMMAND, [*own, *words]), accelerators={})
    train.train(config, run_in(tmp_path), [], Stop())
    rows = [row for row in rows_of(tmp_path) if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2] and rows[1]["loss"] < rows[0]["loss"]
    assert "lr" not in rows[0] and "step 2/2, loss" in capfd.readouterr().err


def apply_two_updates(chosen: str, *words: str) -> dict[str, Tensor]:
    """Return what two updates of a configured optimizer, by a large and a small gradient, add to leaves."""
    config = validate(COMMAND, [f"optimizer={chosen}", "schedule=constant", *words])
    optimizer = make_optimizer(config.optimizer, config.schedule, 2, ("*norm*",))
    start = {"w": torch.full((4, 64), 2.0), "norm.weight": torch.full((64,), 2.0)}
    params, slots = start, fs.optim.init_slots(optimizer, start)
    for count, size in enumerate((100.0, 0.5)):
        grads = {"w": torch.full((4, 64), size), "norm.weight": torch.zeros(64)}
        step = fs.optim.Step(torch.tensor(count), norm=grads["w"].norm())
        params, slots = fs.optim.apply_updates(optimizer, grads, slots, params, step)
    return {path: params[path] - leaf for path, leaf in start.items()}


@pytest.mark.long
def test_adamw_in_eight_bits_is_clipped_and_spares_norms_as_adamw_does():
    eight, wide = (
        apply_two_updates("adamw_8bit", "optimizer.lr=0.01"),
        apply_two_updates("adamw", "optimizer.lr=0.01"),
    )
    assert not eight["norm.weight"].any() and not wide["norm.weight"].any()
    torch.testing.assert_close(eight["w"], wide["w"], rtol=2e-2, atol=0)
    unclipped = apply_two_updates("adamw_8bit", "optimizer.lr=0.01", "optimizer.clip=null")
    assert (unclipped["w"] - eight["w"]).abs().min() > 0.1 * eight["w"].abs().max()
    undecayed = apply_two_updates("adamw_8bit", "optimizer.lr=0.01", "optimizer.weight_decay=0")
    assert (undecayed["w"] > eight["w"]).all()


def measure_held_out(rank: int, config: TrainConfig) -> float:
    parts = make_training_parts(config)
    return parts.evaluate(parts.step.init(make_task(config).init).params)[0]


def test_held_out_rows_fewer_than_a_batch_are_measured_and_fewer_than_ranks_refused():
    config = config_of("data.held_out_rows=3")
    data = make_data(config.data, 0)
    two = fs.make_mesh(shard=2, simulated=True)
    assert [len(batch[0]) for batch in data.held_out(two, 16)] == [1]
    with raises(ConfigError, fix="data.held_out_rows=8"):
        next(data.held_out(fs.make_mesh(shard=8, simulated=True), 16))


def test_two_ranks_measure_what_one_does(ranks):
    alone = measure_held_out(0, config_of())
    assert ranks(2).run(measure_held_out, config_of("mesh.shard=2")) == [pytest.approx(alone)] * 2


@pytest.mark.parametrize(
    ("words", "leaves", "says"),
    [
        (["model._target_=nowhere.Model"], "model._target_=nowhere.Model", ()),
        (["data.colour=red"], ["data._target_=", "points"], "'colour'"),
        (["model.depth=3"], ["model._target_=", "linear"], "'depth'"),
        (["tracker.own=[{_target_: no.tracker}]"], "tracker.own._target_=no.tracker", ()),
        (["objective._target_=no.loss"], "objective._target_=no.loss", "'no.loss'"),
        (["data._target_=builtins.dict"], "data._target_=builtins.dict", "(train, held_out)"),
        (["data.rows=64"], "data.rows=64", "32 items"),
    ],
)
def test_what_does_not_import_or_fit_is_one_error_before_a_rank_starts(words, leaves, says):
    keys = {word.partition("=")[0] for word in words}
    given = [word for word in OWN if word.partition("=")[0] not in keys]
    if "data._target_=builtins.dict" in words:
        given = [word for word in given if not word.startswith("data.count")]
    with raises(ConfigError, leaves=leaves, says=says):
        JOB.prepare(fit_to_machine(validate(COMMAND, [*given, *words]), accelerators={}))


@pytest.mark.parametrize(
    ("words", "leaves"),
    [
        ([word for word in OWN if not word.startswith("objective")], ["data", "objective", "_target_"]),
        ([*OWN, "data.rows=0"], ["data.rows=0", "above 0"]),
        ([*OWN, "specs=[[w,shard]]", "strategy=auto", "run.device_gb=1"], ["specs", "strategy=auto"]),
    ],
)
def test_what_does_not_go_together_is_refused(words, leaves):
    with raises(ConfigError, leaves=leaves):
        validate(COMMAND, words)


RECIPE = """# @package _global_
model: {_target_: custom_task.linear, width: 64}
data: {_target_: custom_task.points, count: 8}
objective: {_target_: custom_task.squares}
"""


@pytest.fixture
def recipe(tmp_path) -> str:
    """Write a folder with a recipe that names its own model and data, and nothing of the groups' files."""
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(RECIPE)
    return f"--config-dir={tmp_path / 'conf'}"


@pytest.mark.suite({
    "*model.width=8*": "with a key of its own",
})  # fmt: skip
@pytest.mark.parametrize("more", [(), ("model.width=8",), ("optimizer=soap",)], ids=str)
def test_a_target_of_a_recipe_stands_in_the_place_of_the_groups_file(recipe, more):
    config = validate(COMMAND, [recipe, "experiment=mine", *more])
    width = 8 if "model.width=8" in more else 64
    assert config.model == {"_target_": "custom_task.linear", "width": width}
    assert config.data == {"_target_": "custom_task.points", "count": 8}
    assert isinstance(config.optimizer, dict) == ("optimizer=soap" in more)


def test_a_recipe_with_its_own_model_and_a_choice_of_another_are_refused(recipe):
    with raises(ConfigError, leaves="model=tiny", fix="leave out model=tiny"):
        validate(COMMAND, [recipe, "experiment=mine", "model=tiny"])


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["experiment=mine"], None),
        (["experiment=mine", "+model.colour=red"], 2),
        (["experiment=mine", "model.colour=red"], 2),
        (["data=shards", "data.root=nowhere"], 2),
        (["hydra.run.dir=there/is/none", "data.root=nowhere"], 2),
    ],
    ids=str,
)
def test_the_job_gets_what_the_recipe_says_and_a_mistake_leaves_no_folder(
    recipe, words, code, tmp_path, monkeypatch, capfd
):
    got = []
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "argv", ["train", recipe, *words, *SMALL])

    def launch(command: list[str], **_: Any) -> None:
        got.append(json.loads(Path(command[-1]).read_text())["config"])
        said = (Path(command[-1]).parent / ".hydra" / "overrides.yaml").read_text()
        assert said == "".join(f"- {word}\n" for word in (*words, *SMALL))  # which a comparison shows
        write_result(Path(command[-1]).parent, status="ok")

    monkeypatch.setattr(jobs, "launch", launch)
    if code is None:
        main(JOB)
        assert got[0]["model"] == {"_target_": "custom_task.linear", "width": 64} and len(got[0]["data"]) == 2
        return
    with pytest.raises(SystemExit, match=f"^{code}$"):
        main(JOB)
    assert not got and list(Path.cwd().iterdir()) == []
    assert capfd.readouterr().err.startswith("error: ")


def test_a_rule_that_matches_nothing_is_named():
    with raises(ConfigError, leaves=["specs", "'*norm*'"], says="1 rule(s)"):
        make_training_parts(config_of('specs=[["*norm*",null],["*",shard]]'))


@pytest.mark.long  # test_train sweeps the main job
def test_the_worked_example_is_swept_from_its_own_folder(tmp_path):
    """The command is that of its docstring, on two ranks, with one job and one step."""
    text = (EXAMPLE / "shapes.py").read_text()
    (line,) = [line.strip() for line in text.splitlines() if "--multirun" in line]
    assert len(text.splitlines()) < 100
    words = [*shlex.split(line)[1:-1], "model.width=4", "run.steps=1", "run.held_out_every=2"]
    words += ["run.backend=eager", "data.train=256", f"hydra.sweep.dir={tmp_path}"]
    own = shutil.copytree(EXAMPLE, tmp_path / "own_research")
    done = run_command(words[1:], own, patches={"sys.path": [str(own), *sys.path]})
    assert done.returncode == 0, done.stdout + done.stderr
    result = read_result(tmp_path / "0")
    assert math.isfinite(result["held_out_loss"]) and 0 <= result["held_out_accuracy"] <= 1
