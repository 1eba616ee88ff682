"""The page without a browser: its form, its command lines, its runs, what it refuses, who may speak to it."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import hydra
import pytest
from errors import raises
from runs import compose, leave_run

from experiments import finetune, train
from experiments.compare.outcome import read_outcome
from experiments.explain import config as explain_config
from experiments.lib.checks import ConfigError, flatten_keys
from experiments.lib.compose import defaults, open_hydra
from experiments.lib.files import LOCK, lock_folder, write_json
from experiments.web import charts, prediction, server
from experiments.web.config import WebConfig
from experiments.web.form import Draft, draft_of, hydra_text, quote, read_form
from experiments.web.prediction import Prediction, Predictor, explain_arguments, precision_of
from experiments.web.runs import Runs, find_runs, log_of

COMMANDS = {"train": train.COMMAND, "finetune": finetune.COMMAND}


# ------------------------------------------------------------------ the form


@pytest.fixture(scope="module", params=COMMANDS)
def job(request) -> str:
    return request.param


def test_every_key_of_a_command_is_in_its_form(job):
    """Keys come from the dataclasses, files from the folders of `conf`: neither is written down again."""
    form = read_form(Draft(job))
    shown = {each.key for group in form.groups for each in group.fields}
    every = {key for key, _ in flatten_keys(defaults(COMMANDS[job].config))}
    chosen = {f"{group.name}.name" for group in form.groups if group.choices}
    assert form.problems == () and shown == every - chosen
    of = {group.name: group for group in form.groups}
    assert "muon" in of["optimizer"].choices and of["optimizer"].chosen == "adamw"
    assert "Ranks by axis" in of["mesh"].about
    watch = next(each for each in of["run"].fields if each.name == "watch")
    assert watch.choices == ("hunt", "stop", "off") and watch.value == "hunt"


def test_a_draft_is_the_configuration_that_its_command_line_means():
    draft = Draft().choose("model", "5m").choose("optimizer", "muon").put("run.steps", "7")
    draft = draft.put("run.prompt", quote("it's \\ 'x' = [1]\\"))
    assert draft.arguments[:3] == ["model=5m", "optimizer=muon", "run.steps=7"]
    found = read_form(draft)
    assert found.config == compose(*draft.arguments)
    assert found.config.run.prompt == "it's \\ 'x' = [1]\\" and found.config.model.width != 128
    lr = [each for group in found.groups for each in group.fields if each.key == "optimizer.lr"]
    assert [each.value for each in lr] == ["0.012"]  # of a `_target_`, what it is called with
    assert draft.choose("optimizer", "").put("run.steps", "").arguments[:1] == ["model=5m"]
    assert draft.put("optimizer.lr", "1").choose("optimizer", "sgd").values.keys() == {
        "run.steps",
        "run.prompt",
    }


def test_text_that_is_typed_arrives_as_it_is():
    (prompt,) = (each for g in read_form(Draft()).groups for each in g.fields if each.key == "run.prompt")
    texts = [
        "",
        "def ",
        "null",
        "7",
        "a b",
        "it's",
        "\\",
        "a\\'",
        "[x]",
        "{a: b}",
        "\u00fc",
    ]
    with open_hydra(train.COMMAND):
        for text in texts:
            typed = prompt.as_hydra(text) if text not in ("", "null") else quote(text)
            composed = hydra.compose("train", [f"run.prompt={typed}"])
            assert typed == hydra_text(text) and composed.run.prompt == text


def test_all_that_is_wrong_is_said_at_once():
    found = read_form(Draft("train", {}, {"run.steps": "many", "model.heads": "3"}, "run.stpes=3"))
    assert found.config is None
    assert {each.partition("=")[0] for each in found.problems} >= {"run.steps", "run.stpes"}


@pytest.mark.parametrize(
    "more", ["hydra.run.dir=/", "--multirun", "-m", "+hydra.x=1", "~hydra", "hydra/launcher=slurm"]
)
def test_what_leads_a_run_elsewhere_is_refused(more):
    with raises(ConfigError, leaves=more, fix="leave them out"):
        read_form(Draft(more=more))
    with raises(ConfigError, leaves=more, fix="leave them out"):
        draft_of("train", [more])


def test_quotes_without_an_end_are_one_error():
    with raises(ConfigError, leaves="run.prompt='a", fix="close the quotes"):
        read_form(Draft(more="run.prompt='a"))


def test_settings_of_a_run_become_a_draft_again():
    arguments = ["model=5m", "run.steps=7", "specs=[['*', shard]]", "+optimizer.x=1"]
    draft = draft_of("train", arguments)
    assert draft.choices == {"model": "5m"} and draft.values.keys() == {"run.steps", "specs"}
    assert sorted(draft.arguments) == sorted(arguments)


# ------------------------------------------------------------------ predictions


@pytest.mark.parametrize(
    ("draft", "hardware"),
    [
        (Draft("train", {}, {"run.steps": "50"}), "auto"),
        (Draft("train", {"experiment": "laptop"}), "auto"),
        (Draft("train", {"model": "7b", "precision": "bf16"}, {"mesh.shard": "8"}), "h100"),
        (Draft("train", {"experiment": "zero2_offload"}), "a100"),
    ],
)  # fmt: skip
def test_the_step_that_is_explained_is_the_one_that_would_run(draft, hardware):
    """The groups of both configurations are equal, but for what a job finds out by itself."""
    form = read_form(draft)
    arguments = explain_arguments(draft, form.config, precision_of(form), hardware)
    found = compose(*arguments, spec=explain_config.COMMAND)
    for name in ("model", "strategy", "precision", "optimizer", "schedule", "run", "specs"):
        assert getattr(found, name) == getattr(form.config, name), name
    assert found.batch_rows == form.config.data.rows and found.hardware.name != "auto"
    asked = form.config.mesh.shard
    assert dataclasses.replace(found.mesh, shard=asked) == form.config.mesh
    assert found.mesh.shard is not None and asked in (None, found.mesh.shard)


def test_a_prediction_is_what_explain_says():
    from experiments.explain.step_on_paper import explain

    draft = Draft("train", {}, {"model.layers": "1", "run.steps": "50"})
    found = prediction.predict(draft, "cpu")
    arguments = found.command.split()[3:]
    paper = explain(compose(*arguments, spec=explain_config.COMMAND))
    assert found.error == "" and found.peak == paper.memory.peak and found.fits == paper.fits
    assert found.peak_bytes == paper.memory.peak_bytes
    assert found.hours == pytest.approx(50 * paper.timeline.step_seconds / 3600)
    assert sum(bar["value"] for bar in charts.chart_peak(found.peak)["series"][0]["data"]) == found.peak_bytes


def test_what_cannot_be_predicted_says_why():
    assert "experiments.train" in prediction.predict(Draft("finetune"), "auto").error
    wrong = prediction.predict(Draft("train", {}, {"run.steps": "0"}), "auto")
    assert "run.steps=0" in wrong.error
    uneven = prediction.predict(Draft("train", {}, {"data.rows": "3", "mesh.shard": "2"}), "h100")
    assert "Fix: data.rows=4" in uneven.error and "experiments.explain" in uneven.command


@pytest.mark.parametrize("target", ["os.mkdir", "fnshard.launcher.rank.os.mkdir"])
def test_code_of_ones_own_does_not_run_before_it_is_started(target, tmp_path):
    """The settings may come from the folder of somebody else's run; a module of ours may import another."""
    made = tmp_path / "made"
    found = prediction.predict(Draft(more=f"optimizer._target_={target} optimizer.path={made}"), "cpu")
    assert not made.exists()
    assert f"optimizer._target_={target}" in found.error and "Fix: the command below" in found.error
    assert "experiments.explain" in found.command


def test_optimizers_of_the_library_are_predicted():
    assert prediction.predict(Draft("train", {"optimizer": "muon"}), "h100").error == ""


def answer_in_time(draft: Draft, _: str) -> Prediction:
    if draft.more == "ends":
        sys.exit(1)
    time.sleep(60 if draft.more == "slow" else 0)
    return Prediction("answered")


def test_a_prediction_that_takes_too_long_is_given_up_and_the_next_is_made(monkeypatch):
    import multiprocessing

    monkeypatch.setattr(prediction, "predict", answer_in_time)
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(prediction.multiprocessing, "get_context", lambda _: fork)
    predictor = Predictor(0.3)
    try:
        assert "patience_s=" in predictor.ask(Draft(more="slow"), "auto").error
        predictor.patience_s = 60
        assert "has ended" in predictor.ask(Draft(more="ends"), "auto").error
        assert predictor.ask(Draft(), "auto").command == "answered"
    finally:
        predictor.close()


class Asked:
    """A predictor whose first answer takes so long that something happens meanwhile."""

    def __init__(self, answers: list[Prediction], meanwhile: Any):
        self.answers, self.meanwhile, self.asked = answers, meanwhile, []

    def ask(self, draft: Draft, machine: str) -> Prediction:
        self.asked.append((draft, machine))
        if len(self.asked) == 1:
            self.meanwhile()
        return self.answers[len(self.asked) - 1]


@pytest.mark.parametrize("older", [Prediction("older"), Prediction(error="older")], ids=["found", "error"])
@pytest.mark.parametrize("changed", ["draft", "machine", "nothing"])
def test_a_prediction_is_shown_only_of_what_is_on_the_page(changed, older):
    pytest.importorskip("nicegui")
    from experiments.web.draft_panel import DraftPanel

    def change() -> None:
        if changed == "draft":
            panel._set_more("run.steps=7")
        elif changed == "machine":
            panel._change_machine("h100")

    def set_classes(add: str = "", *, remove: str = "") -> None:
        classes.update(add.split())
        classes.difference_update(remove.split())

    # A panel that shows a prediction, of a draft that is right.
    classes: set[str] = set()
    newer = Prediction("newer")
    predictor = Asked([older, newer], change)
    panel = DraftPanel(None, predictor, None)
    panel.button, panel.waiting, panel.prediction = Mock(), Mock(), Mock(classes=set_classes)
    panel.is_right, panel.composed, shown = True, panel.changes, []
    panel._show_prediction = shown.append
    first = (panel.draft, panel.machine)

    # What was shown before is greyed out until what is on the page now has been predicted.
    asyncio.run(panel.predict())
    if changed == "nothing":
        assert shown == [older] and classes == set()
        return
    assert shown == [] and classes == {"old"}
    panel.waiting.set_visibility.assert_called_with(False)
    asyncio.run(panel.predict())
    assert len(predictor.asked) == (1 if changed == "draft" else 2)  # a changed draft is composed first
    panel.composed = panel.changes
    asyncio.run(panel.predict())
    assert shown == [newer] and classes == set()
    assert predictor.asked == [first, (panel.draft, panel.machine)] and first != predictor.asked[1]


@pytest.mark.parametrize("changed", ["draft", "machine"])
def test_what_is_changed_greys_out_the_prediction_at_once(changed):
    """A draft that is wrong gets no prediction, and that of an older one would stand there as its own."""
    pytest.importorskip("nicegui")
    from experiments.web.draft_panel import DraftPanel

    panel = DraftPanel(None, None, None)
    panel.button, panel.prediction = Mock(), Mock()
    panel._set_more("run.steps=many") if changed == "draft" else panel._change_machine("h100")
    panel.prediction.classes.assert_called_once_with("old")


# ------------------------------------------------------------------ runs


@pytest.fixture
def runs(tmp_path) -> Runs:
    return Runs(tmp_path.resolve())


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/x", "a//b", ".hidden", "a b", "a=1", "x/"])
def test_a_name_that_leads_elsewhere_is_refused(runs, name):
    with raises(ConfigError, leaves=repr(name), fix="letters"):
        runs.start("train", [], name)
    assert list(runs.root.iterdir()) == []


def test_links_lead_nowhere(runs, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    leave_run(elsewhere / "run")
    leave_run(runs.root / "outputs" / "own")
    (runs.root / "outputs" / "link").symlink_to(elsewhere)
    assert [view.name for view in runs.views()] == ["outputs/own"]
    with raises(ConfigError, leaves="link/x", fix="another name"):
        runs.start("train", [], "link/x")


def test_a_name_that_is_taken_is_refused(runs):
    leave_run(runs.root / "outputs" / "own")
    with raises(ConfigError, leaves="own", fix=["resume it", "another name"]):
        runs.start("train", [], "own")


def write_command(folder: Path, command: str = "python -m experiments.train") -> None:
    write_json(folder / "run.json", {"command": command})


def test_every_state_of_a_run_is_told_apart(runs):
    outputs = runs.root / "outputs"
    for status in ("ok", "stopped", "failed", "unfinished"):
        leave_run(outputs / status, "run.seed=1", status=status)
        write_command(outputs / status)
    leave_run(outputs / "foreign", status="stopped")
    write_command(outputs / "foreign", "rm -r outputs")
    found = {view.folder.name: (view.status, view.can_resume) for view in runs.views()}
    assert found == {
        "ok": ("ok", False), "stopped": ("stopped", True), "failed": ("failed", True),
        "unfinished": ("killed", True), "foreign": ("stopped", False),
    }  # fmt: skip
    view = next(each for each in runs.views() if each.status == "ok")
    for act, fix in ((runs.resume, "resume one"), (runs.stop, ())):
        with raises(ConfigError, leaves="ok", fix=fix):
            act(view)


HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(100)
"""


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="a system without /proc/locks")
@pytest.mark.parametrize("words", [("experiments.train",), ("other",)])
def test_a_run_of_another_process_is_seen_and_stopped_if_it_is_a_command(runs, words):
    folder = runs.root / "outputs" / "run"
    leave_run(folder, "run.seed=1", status="unfinished")
    write_command(folder)
    process = subprocess.Popen([sys.executable, "-c", HOLD, folder / LOCK, *words], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"held\n"
        (view,) = runs.views()
        assert view.status == "running" and not view.can_resume
        if words == ("other",):
            with raises(ConfigError, leaves=view.name):
                runs.stop(view)
            return
        runs.stop(view)
        assert process.wait(30) == -signal.SIGTERM
        (view,) = runs.views()
        assert view.status == "killed" and view.can_resume
    finally:
        process.kill()
        process.wait()


class FakeCommand:
    """A process that a page has started, and how."""

    def __init__(self, command, how):
        self.command, self.how, self.code, self.signals = command, how, None, 0

    def poll(self):
        return self.code

    def terminate(self):
        self.signals += 1


@pytest.fixture
def commands(monkeypatch) -> list[FakeCommand]:
    """Return the list of commands that are started."""
    found: list[FakeCommand] = []

    def start(command: list[str], **how: Any) -> FakeCommand:
        found.append(FakeCommand(command, how))
        return found[-1]

    monkeypatch.setattr("experiments.web.runs.subprocess.Popen", start)
    return found


def test_what_is_started_is_the_command_that_was_shown(runs, commands):
    folder = runs.start("train", ["run.steps=3", "run.prompt='a b'"], "mine")
    (started,) = commands
    shown = runs.command(["run.steps=3", "run.prompt='a b'"], folder)
    assert started.command[1:] == ["-u", "-m", "experiments.train", *shown]
    assert shown[-1] == "hydra.run.dir=outputs/mine" and started.how["cwd"] == runs.root
    assert started.how["start_new_session"]  # it outlives the page
    (view,) = runs.views()
    assert view.status == "starting" and view.folder == folder
    with raises(ConfigError, leaves="mine", fix="another name"):
        runs.start("train", [], "mine")
    runs.stop(view)
    assert started.signals == 1 and [each.status for each in runs.views()] == ["stopping"]
    started.code = 143
    (view,) = runs.views()
    assert view.status == "failed" and not view.can_resume  # it was refused
    assert view.arguments == ("run.steps=3", "run.prompt='a b'")
    assert "hydra.run.dir=outputs/mine" in log_of(folder).read_text()

    # A run that a command has stopped goes on by the same command, in its own folder.
    leave_run(folder, "run.steps=3", status="stopped")
    write_command(folder)
    (view,) = runs.views()
    runs.resume(view)
    assert commands.pop().command[3:] == ["experiments.train", "run.steps=3", shown[-1]]


def test_a_folder_whose_arguments_lead_elsewhere_is_not_resumed(runs, commands):
    folder = runs.root / "outputs" / "run"
    leave_run(folder, "hydra.job.env_set.PYTHONPATH=/there", status="stopped")
    write_command(folder)
    (view,) = runs.views()
    with raises(ConfigError, fix="leave them out"):
        runs.resume(view)
    assert commands == []


def test_files_of_a_run_are_read_again_when_they_change(runs):
    folder = runs.root / "outputs" / "run"
    leave_run(folder, status="unfinished")
    (first,) = runs.views()
    (again,) = runs.views()
    assert again.outcome is first.outcome
    leave_run(folder, status="ok", loss=1.0)
    runs.outcomes[folder].took = 0.0
    assert [view.status for view in runs.views()] == ["ok"]
    assert list(find_runs(runs.root)) == [folder]


def test_curves_are_those_of_the_rows(tmp_path):
    for name, seed in (("a", "run.seed=1"), ("b", "run.seed=2")):
        leave_run(tmp_path / name, seed, status="unfinished")
    outcomes = [read_outcome(tmp_path / name, name) for name in "ab"]
    one, two = charts.chart_curves(outcomes[:1]), charts.chart_curves(outcomes)
    training = one["series"][0]["data"]
    rows = [[row["step"], row["loss"]] for row in outcomes[0].rows if "loss" in row]
    assert training == rows and [each["name"] for each in one["series"]] == ["training", "held-out"]
    assert [each["name"] for each in two["series"]] == ["seed 1", "seed 1", "seed 2", "seed 2"]


# ------------------------------------------------------------------ who may speak to it


def ask(path: str, *, host: str = "127.0.0.1:5", origin: str | None = None, kind: str = "http") -> Any:
    """Return what `Guard` answers: its first message."""
    headers = [(b"host", host.encode())] + ([(b"origin", origin.encode())] if origin else [])
    answers: list[dict[str, Any]] = []

    async def page(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        answers.append(message)

    async def receive():
        return {"type": "websocket.connect"}

    guard = server.Guard(page, "token", 5)
    asyncio.run(guard({"type": kind, "path": path, "headers": headers}, receive, send))
    return answers[0]


def test_only_who_knows_the_token_and_calls_this_machine_by_name_is_answered():
    passed = ask("/token/")
    assert passed["status"] == 200
    assert dict(passed["headers"])[b"content-security-policy"].startswith(b"default-src 'self'")
    assert ask("/token/x", host="localhost:5", origin="http://127.0.0.1:5")["status"] == 200
    for path in ("/", "/toke/", "/token2/", "/x/token/", "//token/", "/t\u00f6ken/"):
        assert ask(path)["status"] == 404, path
    assert ask("/token/", host="evil.example:5")["status"] == 404
    assert ask("/token/", origin="http://evil.example")["status"] == 404
    # A browser opens websockets across origins, too.
    refused = {"type": "websocket.close", "code": 1008}
    assert ask("/", kind="websocket") == refused
    for wrong in ({"origin": "http://evil.example"}, {"host": "evil.example:5"}):
        assert ask("/token/", kind="websocket", **wrong) == refused
    assert ask("/token/", kind="websocket")["type"] == "http.response.start"  # of the page behind it


def test_a_port_that_is_taken_and_a_second_page_are_one_error_each(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with raises(ConfigError, leaves=f"port={port}", fix="port=0"):
            server.serve(WebConfig(folder=str(tmp_path), port=port))
    with lock_folder(tmp_path, server.LOCK), raises(ConfigError, leaves=str(tmp_path), fix="another folder="):
        server.serve(WebConfig(folder=str(tmp_path)))
    with raises(ConfigError, leaves="folder=", fix="make it"):
        server.serve(WebConfig(folder=str(tmp_path / "none")))
    with server.listen(0) as found:
        assert found.getsockname()[0] == "127.0.0.1"
