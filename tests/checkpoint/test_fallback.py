"""Of several checkpoints the newest whole one is taken; all ranks take the same."""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import corrupt
import pytest
from errors import raises
from saved import MANIFEST, SEAL, STEPS, is_known, make_known, outcome, small_blocks, step_on

import fnshard as fs
from fnshard.checkpoint import blocks, manifest_file
from fnshard.errors import CheckpointError, CheckpointWarning
from fnshard.runtime.files.tensorfile import Corrupt, open_regular

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("short_blocks")]


def root_of(pristine: Path, folder: Path) -> Path:
    shutil.copytree(pristine, folder)
    return folder


def test_the_newest_whole_one_is_taken_and_the_others_are_told_of(
    roots: Any, restoring: Any, tmp_path: Path
) -> None:
    root = root_of(roots["two"], tmp_path / "root")
    corrupt.flip(root / "300", "rank-00001.safetensors", 8 * 1500)
    with pytest.warns(
        CheckpointWarning, match=r"300 is not what was written:\n.*rank-00001[\s\S]*Taking .*200"
    ):
        assert is_known(fs.checkpoint.restore(root, restoring), 200)
    (root / "200" / SEAL).unlink()
    with pytest.warns(CheckpointWarning) as caught:
        assert is_known(fs.checkpoint.restore(root, restoring), 100)
    messages = [str(w.message) for w in caught if w.category is CheckpointWarning]
    assert (
        len(messages) == 2 and "rank-00001" in messages[0] and SEAL in messages[1] and "Taking" in messages[1]
    )
    assert fs.checkpoint.all_steps(root) == [100, 300]  # whole to look at: bytes are compared when read
    os.truncate(root / "100" / "rank-00000.safetensors", 5)
    assert fs.checkpoint.latest(root) == root / "300"
    with (
        pytest.warns(CheckpointWarning),
        raises(CheckpointError, leaves=[str(root / step) for step in ("300", "200", "100")]),
    ):
        fs.checkpoint.restore(root, restoring)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", MANIFEST, SEAL])
@pytest.mark.parametrize("how", ["gone", "truncated", "longer", "a link outside", "a pipe"])
def test_latest_sees_what_is_not_whole_without_reading_it(
    how: str, name: str, roots: Any, tmp_path: Path
) -> None:
    root = root_of(roots["two"], tmp_path / "root")
    corrupt.BYTES[how](root / "300", name, random.Random(1))
    assert fs.checkpoint.latest(root) == root / "200"
    assert fs.checkpoint.all_steps(root) == [100, 200]
    assert fs.checkpoint.manifest(root).step == 200


def test_a_checkpoint_that_was_given_another_number_is_not_that_step(
    roots: Any, restoring: Any, tmp_path: Path
) -> None:
    root = root_of(roots["two"], tmp_path / "root")
    (root / "300").rename(root / "400")
    assert fs.checkpoint.all_steps(root) == [100, 200] and fs.checkpoint.latest(root) == root / "200"
    with pytest.warns(
        CheckpointWarning, match=r"400 is not what was written:[\s\S]*rename it[\s\S]*Taking .*200"
    ):
        assert is_known(fs.checkpoint.restore(root, restoring), 200)
    for look_at in (fs.checkpoint.verify, lambda path: fs.checkpoint.restore(path, restoring)):
        with raises(CheckpointError, leaves=str(root / "400"), says=["the name 300", "rename it"]):
            look_at(root / "400")
    (root / "400").rename(root / "best")  # no number says nothing else
    assert is_known(fs.checkpoint.restore(root / "best", restoring), 300)


def delete_meanwhile(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let another process save step 300 and delete the others, when this one has listed them."""
    (root / "300").rename(root.parent / "new")
    read = manifest_file.Manifest.read

    def read_later(folder: Path) -> Any:
        if (new := root.parent / "new").exists():
            new.rename(root / "300")
            for number in (100, 200):
                shutil.rmtree(root / str(number))
        return read(folder)

    monkeypatch.setattr(manifest_file.Manifest, "read", staticmethod(read_later))


@pytest.mark.parametrize("reader", ["restore", "latest", "all_steps", "manifest"])
def test_who_reads_while_others_save_and_delete_lists_anew(
    reader: str, roots: Any, restoring: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = root_of(roots["two"], tmp_path / "root")
    delete_meanwhile(root, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if reader == "restore":
            assert is_known(fs.checkpoint.restore(root, restoring), 300)
        else:
            expected = {"latest": root / "300", "all_steps": [300]}
            found = getattr(fs.checkpoint, reader)(root)
            assert found.step == 300 if reader == "manifest" else found == expected[reader]


def test_a_checkpoint_is_deleted_in_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill in the middle of it leaves nothing that is listed; the next save clears it away."""
    step, keep = step_on(fs.make_mesh()), fs.checkpoint.Keep(last=1)
    fs.checkpoint.save(tmp_path / "1", make_known(step, 1))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, **_: None)
        fs.checkpoint.save(tmp_path / "2", make_known(step, 2), keep=keep)
    assert {p.name for p in tmp_path.iterdir()} == {"2", ".1.gone"}
    assert fs.checkpoint.all_steps(tmp_path) == [2]
    fs.checkpoint.save(tmp_path / "3", make_known(step, 3), keep=keep)
    assert {p.name for p in tmp_path.iterdir()} == {"3"}


@pytest.mark.parametrize("put", ["nothing", "empty", "file", "link"])
def test_what_is_no_checkpoint_at_all(put: str, restoring: Any, tmp_path: Path) -> None:
    path = tmp_path / "300"
    if put == "empty":
        path.mkdir()
    elif put == "file":
        path.write_text("a")
    elif put == "link":
        path.symlink_to("300")
    for look_at in (fs.checkpoint.restore, fs.checkpoint.restore_params):
        with raises(CheckpointError, leaves=str(path)):
            look_at(path, restoring)
    with raises(CheckpointError, leaves="300"):
        fs.checkpoint.verify(path)
    with raises(CheckpointError, leaves=str(path)):
        fs.checkpoint.manifest(path)
    assert fs.checkpoint.all_steps(path) == [] and fs.checkpoint.latest(path) is None


def test_metrics_of_a_ruined_manifest_do_not_end_a_save(roots: Any, tmp_path: Path) -> None:
    """Pruning looks into all of a root; what is not whole is none of its business, and stays."""
    root = root_of(roots["one"], tmp_path / "root")
    for number, value in ((100, "low"), (200, None)):
        manifest = json.loads((root / str(number) / MANIFEST).read_bytes())
        manifest["metrics"] = {"loss": value}
        corrupt.reseal(root / str(number), manifest)
    state = make_known(step_on(fs.make_mesh(shard=1, device="cpu")), 400)
    keep = fs.checkpoint.Keep(last=1, best=1)
    fs.checkpoint.save(root / "400", state, metrics={"loss": 5.0}, keep=keep)
    assert sorted(p.name for p in root.iterdir()) == ["100", "200", "300", "400"]
    assert fs.checkpoint.all_steps(root) == [300, 400]


# ------------------------------------------------------------------ two ranks
def both_look(rank: int, root: str, cases: list[str]) -> list[tuple[Any, ...]]:
    """Restore from each root; return the step or the error, and the warnings."""
    mesh = fs.make_mesh(shard=2, device="cpu")
    step = step_on(mesh)
    out = []
    for case in cases:
        with small_blocks(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = outcome(fs.checkpoint.restore, Path(root) / case, step)
        messages = [str(w.message) for w in caught if w.category is CheckpointWarning]
        out.append((got if isinstance(got, str) else int(got.step), messages))
    return out


def test_two_ranks_fall_back_together(ranks: Any, roots: Any, tmp_path: Path) -> None:
    """Whatever the file, and whichever rank alone reads it."""
    cases = []
    for how in ("a run flipped", "truncated", "gone", "a pipe", "a link to zeros", "empty", "nested"):
        for name in sorted(p.name for p in (roots["two"] / "300").iterdir()):
            cases.append(f"{how} {name}")
            root = root_of(roots["two"], tmp_path / cases[-1])
            corrupt.BYTES[how](root / "300", name, random.Random(1))
    for rank, found in enumerate(ranks(2).run(both_look, str(tmp_path), cases)):
        for case, (got, messages) in zip(cases, found, strict=True):
            name = case.split()[-1]
            assert got == 200, (case, got)
            # Rank 0 alone warns, for both ranks.
            assert len(messages) == (rank == 0) and all(
                name in line and "Taking" in line for line in messages
            ), messages


def test_two_ranks_fail_together(ranks: Any, roots: Any, tmp_path: Path) -> None:
    for number in STEPS:
        root_of(roots["two"] / str(number), tmp_path / "root" / str(number))
        corrupt.flip(tmp_path / "root" / str(number), "rank-00001.safetensors", 8 * 1500)
    found = ranks(2).run(both_look, str(tmp_path), ["root", "root/300", "nothing"])
    assert found[0][0][0] == found[1][0][0] and found[0][1] == found[1][1] and found[0][2] == found[1][2]
    assert "100 is not" in found[0][0][0] and "rank-00001" in found[0][1][0]
    assert "there is no checkpoint" in found[0][2][0]


def one_sees_less(rank: int, root: str, where: str) -> tuple[int, list[str]]:
    """Let rank 1 be unable to read something of the newest checkpoint that rank 0 can."""
    mesh = fs.make_mesh(shard=2, device="cpu")

    def blind(folder: Path | str, name: str, size: int | None = None) -> int:
        if rank == 1 and Path(folder).name == "300" and name.startswith(where):
            raise Corrupt(f"{name}: Input/output error")
        return open_regular(folder, name, size)

    with (
        small_blocks(),
        warnings.catch_warnings(record=True) as caught,
        pytest.MonkeyPatch.context() as patch,
    ):
        warnings.simplefilter("always")
        patch.setattr(manifest_file if where == MANIFEST else blocks, "open_regular", blind)
        state = fs.checkpoint.restore(root, step_on(mesh), timeout=20.0)
    return int(state.step), [str(w.message) for w in caught if w.category is CheckpointWarning]


@pytest.mark.parametrize("where", [MANIFEST, "rank-"])
def test_what_one_rank_cannot_read_nobody_takes(where: str, ranks: Any, roots: Any) -> None:
    (first, messages), (second, _) = ranks(2).run(one_sees_less, str(roots["two"]), where)
    assert first == second == 200
    assert len(messages) == 1 and f"rank 1: {where}" in messages[0] and "rank 0:" not in messages[0]
