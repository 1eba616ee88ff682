"""Saving: a checkpoint is complete or absent, whatever fails; in the background; which ones stay."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import saved
import torch
from errors import raises

import fnshard as fs
from fnshard import checkpoint
from fnshard.checkpoint import saving as saves
from fnshard.errors import CheckpointError, CheckpointWarning, StateError
from fnshard.runtime.files import folder as folders
from fnshard.runtime.files import tensorfile


def one(preset: str = "full_shard", stored: str = "fp32", **more: Any) -> Any:
    return saved.step_of(preset, stored, fs.make_mesh(shard=1), **more)


# ------------------------------------------------------------------ whole or absent
def test_leftovers_are_cleared_away_by_the_next_save_and_nothing_else_is(tmp_path: Path) -> None:
    state = saved.make_known(one())
    for name in (".5.saving", ".6.old", ".mine.saving", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / ".5.saving" / "rank-00000.safetensors").write_bytes(b"torn")
    (tmp_path / ".mine.saving" / "thesis.tex").write_text("not ours")
    whole = checkpoint.save(tmp_path / "aside" / "6", state)
    shutil.rmtree(tmp_path / ".6.old")
    shutil.move(whole, tmp_path / ".6.old")  # as if a save over 6 had been killed between its two renames
    shutil.rmtree(tmp_path / "aside")
    assert checkpoint.latest(tmp_path) == tmp_path / ".6.old"
    assert int(checkpoint.restore(tmp_path, one()).step) == 7
    checkpoint.save(tmp_path / "7", state)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".mine.saving", "6", "7", "notes"]
    assert saved.differences(checkpoint.restore(tmp_path / "6", one())) == []


def test_what_a_living_process_writes_is_not_cleared_away(tmp_path: Path) -> None:
    place = folders.AtomicDirectory(tmp_path / "5")
    place.begin()
    checkpoint.save(tmp_path / "6", saved.make_known(one()))
    assert place.saving.is_dir()
    with raises(CheckpointError, leaves=str(tmp_path / "5"), says="another process"):
        checkpoint.save(tmp_path / "5", saved.make_known(one()))
    assert place.saving.is_dir()
    place.end()
    checkpoint.save(tmp_path / "5", saved.make_known(one()))
    assert checkpoint.all_steps(tmp_path) == [5, 6]


def test_what_another_process_has_begun_since_a_commit_is_left_alone(tmp_path: Path) -> None:
    first, second = (folders.AtomicDirectory(tmp_path / "5") for _ in range(2))
    first.begin()
    first.commit()
    second.begin()
    first.end()
    assert second.saving.is_dir()
    second.end()
    assert not second.saving.exists()


def test_a_save_replaces_its_own_kind_alone(tmp_path: Path) -> None:
    step = one()
    checkpoint.save(tmp_path / "7", saved.make_known(step, 3))
    checkpoint.save(tmp_path / "7", saved.make_known(step, 4))
    assert checkpoint.verify(tmp_path / "7").step == 4
    (tmp_path / "8").mkdir()
    (tmp_path / "8" / "thesis.tex").write_text("not ours")
    with raises(CheckpointError, leaves=str(tmp_path / "8"), says="something else"):
        checkpoint.save(tmp_path / "8", saved.make_known(step))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["7", "8"]


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every write, at every flush, at every rename of it, one after the other."""
    step = one()
    before = saved.make_known(step, 3)
    checkpoint.save(tmp_path / "7", before)
    after, count = saved.make_known(step, 4), 0
    while True:
        calls = []

        def breaks(real: Any, at: int = count, calls: list[Any] = calls) -> Any:
            def call(*args: Any, **how: Any) -> Any:
                calls.append(args)
                if len(calls) == at + 1:
                    raise OSError(28, "No space left on device")
                return real(*args, **how)

            return call

        with monkeypatch.context() as patch:
            for name in ("write", "fsync", "rename"):
                patch.setattr(os, name, breaks(getattr(os, name)))
            try:
                checkpoint.save(tmp_path / "7", after)
            except CheckpointError as error:
                assert "No space left on device" in str(error)
            else:
                break
        count += 1
        left = checkpoint.restore(tmp_path, step)
        assert int(left.step) in (3, 4)
        assert saved.differences(left) == []
        checkpoint.save(tmp_path / "7", before)
    assert count > 8
    assert sorted(p.name for p in tmp_path.iterdir()) == ["7"]


# ------------------------------------------------------------------ in the background
def test_a_step_does_not_tear_what_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is donated to the next steps while its bytes do not reach the disk yet."""
    step = one(stored="bf16")
    state, gate = saved.make_known(step), threading.Event()
    real = tensorfile.bytes_of
    monkeypatch.setattr(tensorfile, "bytes_of", lambda t: (gate.wait(30), real(t))[1])
    saving = checkpoint.save_async(tmp_path / "7", state)
    for _ in range(3):
        state, _ = step(state, torch.ones(2))
    assert not saving.done
    assert checkpoint.latest(tmp_path) is None
    gate.set()
    assert saving.wait() == tmp_path / "7"
    assert saving.done
    assert saved.differences(checkpoint.restore(tmp_path, step)) == []


def test_the_next_save_waits_and_tells_what_went_wrong(tmp_path: Path) -> None:
    step = one()
    (tmp_path / "8").mkdir()
    (tmp_path / "8" / "thesis.tex").write_text("not ours")
    checkpoint.save_async(tmp_path / "8", saved.make_known(step))
    with raises(CheckpointError, leaves=str(tmp_path / "8"), says="something else"):
        checkpoint.save(tmp_path / "9", saved.make_known(step))
    assert checkpoint.verify(tmp_path / "9").step == 7  # which is whole all the same
    checkpoint.wait()  # it is raised once
    checkpoint.save_async(tmp_path / "9", saved.make_known(step, 9))
    checkpoint.save_async(tmp_path / "10", saved.make_known(step, 10))
    assert checkpoint.all_steps(tmp_path)[0] == 9
    checkpoint.wait()
    assert checkpoint.all_steps(tmp_path) == [9, 10]


def test_a_folder_for_torch_waits_and_tells_what_went_wrong(tmp_path: Path) -> None:
    step = one()
    (tmp_path / "8").mkdir()
    (tmp_path / "8" / "thesis.tex").write_text("not ours")
    checkpoint.save_async(tmp_path / "8", saved.make_known(step))
    with raises(CheckpointError, leaves=str(tmp_path / "8")):
        checkpoint.save_dcp(tmp_path / "dcp", saved.make_known(step))
    checkpoint.save_async(tmp_path / "8", saved.make_known(step))
    with pytest.warns(CheckpointWarning, match=re.escape(str(tmp_path / "8"))):
        state = checkpoint.load_dcp(tmp_path / "dcp", step)
    assert int(state.step) == 7  # it was whole all the same
    checkpoint.wait()  # it is told once


@pytest.mark.parametrize("call", ["wait", "save", "restore"])
def test_an_interruption_while_a_save_is_awaited_is_no_error_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    step = one()
    checkpoint.save(tmp_path / "6", saved.make_known(step, 6))
    saving = checkpoint.save_async(tmp_path / "7", saved.make_known(step, 7))
    state = saved.make_known(step, 8)
    arguments = {"wait": (), "save": (tmp_path / "8", state), "restore": (tmp_path, step)}[call]
    with monkeypatch.context() as patch:
        patch.setattr(saves, "wait_all", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            getattr(checkpoint, call)(*arguments)
        assert saving in saves._in_flight  # it is waited for later
    assert not (tmp_path / "8").exists()  # a second one is not written beside the first
    checkpoint.wait()
    assert saving.done and checkpoint.all_steps(tmp_path) == [6, 7]


def background(rank: int, root: str) -> list[str]:
    step = saved.step_of("zero1", "bf16", saved.mesh_of("zero1", 2))
    state = saved.make_known(step)
    for number in range(3):
        checkpoint.save_async(f"{root}/{number}", state, keep=checkpoint.Keep(last=2))
        if number < 2:
            state, _ = step(state, torch.ones(2))
    checkpoint.wait()
    return [str(checkpoint.latest(root)), *map(str, checkpoint.all_steps(root))]


def test_ranks_save_in_the_background_together(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(background, str(tmp_path)) == [[str(tmp_path / "2"), "1", "2"]] * 2
    assert int(checkpoint.restore(tmp_path, one()).step) == 9


def mixing(rank: int, root: str) -> list[int]:
    """Save in the background, and meanwhile write a folder for torch, and read it."""
    step = saved.step_of("full_shard", "fp32", saved.mesh_of("full_shard", 2))
    state, real = saved.make_known(step), tensorfile.bytes_of
    # Rank 0 comes to the messages of the background first, and rank 1 to those of the call.
    if rank == 1:
        tensorfile.bytes_of = lambda t: (time.sleep(0.1), real(t))[1]  # a slow disk
    pause = 0.1 if rank == 0 else 0.0
    try:
        checkpoint.save_async(f"{root}/1", state, timeout=20)
        time.sleep(pause)
        checkpoint.save_dcp(f"{root}/dcp", state, timeout=20)
        checkpoint.save_async(f"{root}/2", state, timeout=20)
        time.sleep(pause)
        checkpoint.load_dcp(f"{root}/dcp", step, timeout=20)
        checkpoint.wait()
    finally:
        tensorfile.bytes_of = real
    return checkpoint.all_steps(root)


def test_a_save_in_the_background_is_alone_with_its_messages(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(mixing, str(tmp_path)) == [[1, 2]] * 2


def breaking(rank: int, root: str) -> str:
    """Let only rank 1 meet an error, and return what this rank gets."""
    step = saved.step_of("full_shard", "fp32", saved.mesh_of("full_shard", 2))
    state = saved.make_known(step)
    checkpoint.save(f"{root}/1", state)
    real = os.fsync
    if rank == 1:
        os.fsync = lambda fd: (_ for _ in ()).throw(OSError(5, "Input/output error"))
    try:
        checkpoint.save(f"{root}/2", state)
    except CheckpointError as error:
        return str(error)
    finally:
        os.fsync = real
    return "saved"


def test_all_ranks_hear_of_the_one_that_could_not_write(ranks: Any, tmp_path: Path) -> None:
    messages = ranks(2).run(breaking, str(tmp_path))
    assert messages[0] == messages[1]
    assert "rank 1: [Errno 5] Input/output error" in messages[0]
    assert [p.name for p in tmp_path.iterdir()] == ["1"]


# ------------------------------------------------------------------ what is kept, what is refused


def test_a_best_one_that_is_damaged_later_is_replaced(tmp_path: Path) -> None:
    step, keep = one(), checkpoint.Keep(last=1, best=1)
    for number in (1, 2, 3):
        checkpoint.save(
            tmp_path / str(number), saved.make_known(step, number), keep=keep, metrics={"loss": 1.0 * number}
        )
    assert checkpoint.all_steps(tmp_path) == [1, 3]
    (tmp_path / "1" / "rank-00000.safetensors").write_bytes(b"short")
    checkpoint.save(tmp_path / "4", saved.make_known(step, 4), keep=keep, metrics={"loss": 4.0})
    assert checkpoint.all_steps(tmp_path) == [3, 4] and (tmp_path / "1").exists()


def test_what_was_gone_back_behind_does_not_count_among_the_last(tmp_path: Path) -> None:
    """A newer one that is corrupt must not push out the new one, or the last that is whole."""
    step = one()
    for number in (80, 90, 100):
        checkpoint.save(tmp_path / str(number), saved.make_known(step, number))
    data = tmp_path / "100" / "rank-00000.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + bytes([data.read_bytes()[-1] ^ 4]))
    with pytest.warns(CheckpointWarning):
        assert int(checkpoint.restore(tmp_path, step).step) == 90
    checkpoint.save(tmp_path / "95", saved.make_known(step, 95), keep=checkpoint.Keep(last=1))
    assert checkpoint.all_steps(tmp_path) == [95, 100]
    with pytest.warns(CheckpointWarning):
        assert int(checkpoint.restore(tmp_path, step).step) == 95


def test_a_keep_that_cannot_work_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    state = saved.make_known(one())
    with raises(CheckpointError, leaves="keep=3", says="fs.checkpoint.Keep"):
        checkpoint.save(tmp_path / "1", state, keep=3)  # type: ignore[arg-type]
    with raises(CheckpointError, leaves=["keep=", "'best'"]):
        checkpoint.save(tmp_path / "best", state, keep=checkpoint.Keep())
    with raises(CheckpointError, leaves=["keep=", "'los'"], says="loss"):
        checkpoint.save(
            tmp_path / "1", state, keep=checkpoint.Keep(best=1, metric="los"), metrics={"loss": 1.0}
        )
    with raises(CheckpointError, leaves="metrics=", says="numbers by name"):
        checkpoint.save(tmp_path / "1", state, metrics={"loss": "low"})  # type: ignore[dict-item]
    assert list(tmp_path.iterdir()) == []


def test_one_that_stepped_aside_is_found_by_its_own_name(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "best", saved.make_known(one()))
    (tmp_path / "best").rename(tmp_path / ".best.old")  # a save over it was killed between its two renames
    assert int(checkpoint.restore(tmp_path / "best", one()).step) == 7


def test_an_error_of_the_system_is_no_reason_for_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        checkpoint.save(tmp_path / str(number), saved.make_known(one(), number))

    def fails(*args: Any) -> Any:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fails)
        with raises(CheckpointError, leaves=str(tmp_path / "2"), says="Too many open files"):
            checkpoint.restore(tmp_path, one())
    assert int(checkpoint.restore(tmp_path, one()).step) == 2


def test_ctrl_c_is_no_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path / "1", saved.make_known(one()))
    assert list(tmp_path.iterdir()) == []


def alone_in_it(rank: int, root: str) -> list[str]:
    """Let rank 1 fail before it can say what it would save, or make room for what it would restore."""
    step = saved.step_of("full_shard", "fp32", saved.mesh_of("full_shard", 2))
    state, messages = saved.make_known(step), []
    checkpoint.save(f"{root}/1", state)
    disk = saved.step_of(
        "full_shard",
        "disk",
        saved.mesh_of("full_shard", 2),
        folder=Path(root if rank == 0 else f"{root}/gone"),
    )
    for work in (
        lambda: checkpoint.save(f"{root}/2", state, data=object() if rank else None),
        lambda: checkpoint.restore(root, disk),
    ):
        try:
            work()
        except (CheckpointError, StateError) as error:
            messages.append(type(error).__name__)
    return messages


def test_ranks_fail_together_before_and_after_the_files(ranks: Any, tmp_path: Path) -> None:
    messages = ranks(2).run(alone_in_it, str(tmp_path), timeout=40.0)
    assert messages == [["CheckpointError", "CheckpointError"], ["CheckpointError", "StateError"]]


def at_another_step(rank: int, root: str) -> str:
    """Let each rank save a step of its own, and return what this rank gets."""
    step = saved.step_of("full_shard", "fp32", saved.mesh_of("full_shard", 2))
    try:
        checkpoint.save(f"{root}/1", saved.make_known(step, 7 + rank))
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_ranks_that_save_different_steps_are_refused(ranks: Any, tmp_path: Path) -> None:
    for message in ranks(2).run(at_another_step, str(tmp_path), timeout=40.0):
        assert "states of different steps: [7, 8]" in message
    assert list(tmp_path.iterdir()) == []


def test_simulated_ranks_do_not_save(tmp_path: Path) -> None:
    mesh = fs.make_mesh(shard=2, simulated=True)

    def save(rank: int) -> None:
        checkpoint.save(tmp_path / "1", saved.make_known(saved.step_of("full_shard", "fp32", mesh)))

    with raises(CheckpointError, leaves="simulated", fix="fs.launch"):
        fs.simulate(mesh, save)


def test_a_consumed_state_is_not_saved(tmp_path: Path) -> None:
    step = one()
    state = saved.make_known(step)
    step(state, torch.ones(2))
    with raises(StateError, leaves="TrainState", fix="state.copy()"):
        checkpoint.save(tmp_path / "1", state)
    assert list(tmp_path.iterdir()) == []
