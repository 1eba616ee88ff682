"""Configurations that would run code, read other files or never end: each is refused with one error."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from wrong_configs import CL, is_one_error, recipe_of

from experiments.cli import validation
from experiments.train import JOB as TRAIN

OWN = r"Hydra's own, which could run code\. A configuration may set of Hydra's keys hydra\.run\.dir, "
SLURM = ("--multirun", "launcher=slurm")
SEARCH = ("--multirun", "hydra/sweeper=search_lr")
TEN = "${run.device}" * 10
CHAIN = ("device", "prompt", "resume", "backend", "watch", "accumulate_mode")
CHAINED = zip(CHAIN, [*(f"run.{name}" for name in CHAIN[1:]), "data.suffix"], strict=True)
TEN_OF_TEN = (*(f"run.{a}='{TEN.replace('run.device', b)}'" for a, b in CHAINED), f"data.suffix={'x' * 3000}")
# Arguments -> what the error says.
HOSTILE = {
    ("hydra.job.env_set.LD_PRELOAD=x.so",): rf"hydra\.job\.env_set\.LD_PRELOAD=x\.so{CL}: {OWN}",
    ("+hydra.job.env_set.PYTHONPATH=.",): rf"hydra\.job\.env_set\.PYTHONPATH=\.{CL}: {OWN}",
    ("hydra.job.env_set={LD_PRELOAD: x.so}",): rf"hydra\.job\.env_set=.*{CL}: {OWN}",
    ("hydra.job={env_set: {LD_PRELOAD: x.so}}",): rf"hydra\.job=.*{CL}: {OWN}",
    ("hydra={job: {env_set: {LD_PRELOAD: x.so}}}",): rf"hydra=.*{CL}: {OWN}",
    ("hydra.job.env_copy=[HOME]",): OWN,
    ("hydra.searchpath=[pkg://tests]",): OWN,
    ("hydra.overrides.task=[x]",): OWN,
    ("hydra.runtime.output_dir=/",): OWN,
    ("++hydra.env.x=1",): OWN,
    ("+hydra.callbacks.x._target_=os.mkdir", "+hydra.callbacks.x.path=canary"): OWN,
    ("+hydra.callbacks.x='${oc.create:{_target_: os.mkdir, path: canary}}'",): OWN,
    ("hydra.callbacks.table._target_=os.mkdir",): r"callbacks\.table\._target_ \(.*: 'os\.mkdir' is not made",
    ("hydra.callbacks.table._target_='${oc.env:HOME}'",): r"table\._target_ \(.*is not made",
    ("+hydra.job_logging.handlers.h.class=os.mkdir",): OWN,
    ("hydra.hydra_logging.handlers.console.stream=ext://os.mkdir",): OWN,
    ("hydra.sweeper._target_=os.mkdir", "--multirun"): r"hydra\.sweeper\._target_ \(command line\): ",
    ("hydra.launcher._target_=os.mkdir", "--multirun"): r"hydra\.launcher\._target_ \(command line\): ",
    (*SEARCH, "+hydra.sweeper.params={hydra.job.env_set.A: b}"): r"params\.hydra\.job\.env_set\.A \(",
    (*SEARCH, "+hydra.sweeper.params={run.stpes: '1,2'}"): r"hydra\.sweeper\.params\.run\.stpes \(",
    ("hydra/sweeper=optuna", "hydra.sweeper.custom_search_space=os.mkdir", "--multirun"): OWN,
    (*SLURM, "hydra.launcher.partition='a\nb'"): r"launcher\.partition .*: 'a\\nb': SLURM reads one line",
    (*SLURM, "hydra.job.name='a\nb'"): r"hydra\.launcher\.name .*: 'a\\nb': SLURM reads one line",
    (*SLURM, "+hydra.launcher.additional_parameters={a: 'b\nc'}"): r"parameters\.a .*: SLURM reads one line",
    (*SLURM, "hydra.launcher.setup=[{_target_: os.mkdir}]"): r"setup",
    (*SLURM, "+hydra.launcher.additional_parameters={_target_: os.mkdir}"): r"_target_ .* is not made",
    (*SLURM, "hydra.launcher.submitit_folder=there"): OWN,
    ("launcher=joblib", "hydra.launcher.temp_folder=there", "--multirun"): OWN,
    ("+strategy._target_=os.mkdir", "+strategy.path=canary"): r"strategy\._target_=os\.mkdir .*: no such key",
    ("strategy.remat={_target_: os.mkdir, path: canary}",): r"strategy\.remat=",
    ("--experimental-rerun", "canary.pickle"): r"--experimental-rerun",
    TEN_OF_TEN: r"run\.\w+=\$.* \(command line\): 65 references .* in the values, 16 is",
    (f"hydra.run.dir='{TEN}'", *TEN_OF_TEN): r"73 references \$\{\.\.\.\} in the values",
    ("run.prompt='${run.${run.watch}}'",): r"run\.prompt=.*: Interpolation key 'run\.hunt' not found",
    ("strategy.remat=" + "[" * 3000,): r"expected KEY=VALUE",
    (
        "launcher=joblib",
        "hydra.launcher.n_jobs=1000000000",
        "--multirun",
    ): r"n_jobs=1000000000.*: must be 10000",
    (*SEARCH, "hydra.sweeper.storage='redis://127.0.0.1:1/0'"): r"storage.*redis.*kept in a file, sqlite:///",
    (*SEARCH, "hydra.sweeper.n_trials=1000000000"): r"n_trials=1000000000.*: must be 10000 or less",
    (*SEARCH, "run.seed=range(0,10000000000)"): r"a sweep of 1e\+10 jobs",
}


HOSTILE_FILES = {
    "hydra:\n  job:\n    env_set:\n      LD_PRELOAD: x.so\n": rf"LD_PRELOAD \(.*mine\.yaml:5\): {OWN}",
    "hydra:\n  job: {env_set: {PYTHONPATH: .}}\n": rf"PYTHONPATH \(.*mine\.yaml:3\): {OWN}",
    "hydra.job.env_set:\n  LD_PRELOAD: x.so\n": rf"hydra\.job\.env_set\.LD_PRELOAD \(.*mine\.yaml:3\): {OWN}",
    "hydra: '${oc.create:{job: {env_set: {LD_PRELOAD: x.so}}}}'\n": rf"hydra \(.*mine\.yaml:2\): {OWN}",
    "hydra:\n  searchpath: [pkg://tests]\n": OWN,
    "defaults:\n  - /data@hydra.job.env_set: stdlib\n": rf"hydra\.job\.env_set \(data/stdlib\): {OWN}",
    "hydra:\n  callbacks:\n    x:\n      _target_: os.mkdir\n      path: canary\n": OWN,
    "hydra:\n  job_logging:\n    handlers:\n      h:\n        (): os.mkdir\n": OWN,
    "hydra:\n  launcher:\n    _target_: os.mkdir\n    path: canary\n": r"hydra\.launcher\.path \(.*yaml:5\)",
    "hydra:\n  sweeper:\n    params:\n      hydra.job.env_set.A: b\n": r"params\.hydra\.job\.env_set\.A",
}


@pytest.mark.parametrize(
    ("arguments", "message"), HOSTILE.items(), ids=[" ".join(each)[:90] for each in HOSTILE]
)
def test_a_hostile_command_line_is_refused(error_of, arguments, message):
    is_one_error(error_of(TRAIN, *arguments), message)


@pytest.mark.parametrize(("text", "message"), HOSTILE_FILES.items())
def test_a_hostile_file_is_refused(error_of, tmp_path_factory, text, message):
    folder = recipe_of(tmp_path_factory.mktemp("own"), text)
    mine = "experiment=mine"
    for flags in ([mine], ["--multirun", mine], ["--cfg", "job", mine], ["--multirun", f"{mine},laptop"]):
        assert re.search(message, error_of(TRAIN, "--config-dir", folder, *flags))


def test_a_hostile_folder_is_refused(error_of, tmp_path_factory, monkeypatch):
    """Twenty files, each of which names the next one twice: a million to compose."""
    folder = recipe_of(tmp_path_factory.mktemp("own"), "defaults: [f0@a, f0@b]\n")
    for i in range(20):
        next_one = f"defaults: [f{i + 1}@a, f{i + 1}@b]\n" if i < 19 else "x: 1\n"
        Path(folder, "experiment", f"f{i}.yaml").write_text(next_one)
    monkeypatch.setattr(validation, "READING_CPU_S", 2.0)
    shown = error_of(TRAIN, "--config-dir", folder, "experiment=mine")
    assert shown == "error: the files of this configuration take more than 2 s to read.\n"
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
