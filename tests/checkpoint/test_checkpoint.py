"""Checkpoints: any layout to any other, whole or absent, in the background; what is kept and what refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import saved
import torch
from safetensors.torch import load_file

import fnshard as fs
from fnshard import LayoutSpec, P, checkpoint
from fnshard.errors import CheckpointError, CheckpointWarning, StateError
from fnshard.runtime.files import folder as folders
from fnshard.runtime.files import tensorfile

WORLDS = (1, 2, 4)
PRESETS = list(saved.MESHES)


def one(preset: str = "full_shard", stored: str = "fp32", **more: Any) -> Any:
    return saved.step_of(preset, stored, fs.make_mesh(shard=1), **more)


# ------------------------------------------------------------------ any mesh to any mesh


def on(ranks: Any, world: int, work: Any, *args: Any) -> list[Any]:
    if world == 1:
        return [work(0, world, *args)]
    return ranks(world).run(work, world, *args)


def test_every_mesh_and_preset_restores_every_other(ranks: Any, tmp_path: Path) -> None:
    """Parameters, masters, moments, buffers and frozen leaves, to the bit."""
    for world in WORLDS:
        on(ranks, world, saved.save_all, str(tmp_path), ["fp32"], PRESETS)
    names = [f"{world}-{preset}-fp32" for world in WORLDS for preset in PRESETS]
    for world in WORLDS:
        for wrong in on(ranks, world, saved.restore_all, str(tmp_path), names, ["fp32"], PRESETS):
            assert wrong == []


def test_every_dtype_and_tier_restores_every_other(ranks: Any, tmp_path: Path) -> None:
    presets, stored = ["full_shard", "zero1"], list(saved.STORED)
    for world in (1, 2):
        on(ranks, world, saved.save_all, str(tmp_path), stored, presets)
    names = [f"{world}-{preset}-{kind}" for world in (1, 2) for preset in presets for kind in stored]
    for world in (1, 2):
        for wrong in on(ranks, world, saved.restore_all, str(tmp_path), names, stored, presets):
            assert wrong == []


def test_replicas_are_written_once(ranks: Any, tmp_path: Path) -> None:
    """By DDP too: four ranks write one state, about a quarter each."""
    ranks(4).run(saved.save_all, 4, str(tmp_path), ["fp32"], ["no_shard"])
    folder = tmp_path / "4-no_shard-fp32"
    one_rank = checkpoint.save(tmp_path / "one", saved.known(one()))
    size = sum(f.stat().st_size for f in one_rank.glob("*.safetensors"))
    data = [sum(t.nbytes for t in load_file(f).values()) for f in sorted(folder.glob("*.safetensors"))]
    total = sum(t.nbytes for f in one_rank.glob("*.safetensors") for t in load_file(f).values())
    assert sum(data) == total < size
    assert len(data) == 4
    assert max(data) <= total / 4 + 140 * 3  # the largest leaf is 140 bytes


def test_any_reader_of_safetensors_opens_it(tmp_path: Path) -> None:
    state = saved.known(one())
    tensors = load_file(checkpoint.save(tmp_path / "7", state) / "rank-00000.safetensors")
    assert torch.equal(tensors["params/embed.w"], state.params["embed.w"])
    assert torch.equal(tensors["optimizer/embed.w/mu"], state.opt_state["embed.w"]["mu"])


def test_training_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    """Restored by a step that has not seen its leaves' shapes: bitwise the same parameters and losses."""
    rules = {"w": LayoutSpec(optimizer_dtype=torch.float64), "b": LayoutSpec()}

    def step() -> Any:
        return fs.shard_step(
            lambda p, x: (torch.dropout(torch.tanh(x @ p["w"]), 0.3, True) @ p["b"]).square().mean(),
            rules,
            optimizer=fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(0.05)),
            backend="eager",
        )

    def batch(n: int) -> torch.Tensor:
        return torch.randn(4, 3, generator=torch.Generator().manual_seed(n))

    first = step()
    state = first.init({"w": saved.number("w", (3, 5)).float(), "b": saved.number("b", (5,)).float()}, seed=5)
    losses = []
    for n in range(6):
        if n == 3:
            checkpoint.save(tmp_path / "3", state)
        state, metrics = first(state, batch(n))
        losses.append(metrics["loss"].item())
    second = step()
    again = checkpoint.restore(tmp_path, second)
    repeated = []
    for n in range(3, 6):
        again, metrics = second(again, batch(n))
        repeated.append(metrics["loss"].item())
    assert repeated == losses[3:]
    assert all(torch.equal(again.params[k], state.params[k]) for k in rules)


def test_a_loss_scale_comes_back_or_begins_anew(tmp_path: Path) -> None:
    def step(loss_scale: Any) -> Any:
        return fs.shard_step(
            lambda p, x: (p["w"] * x).sum(),
            {"w": LayoutSpec()},
            optimizer=fs.optim.sgd(0.1),
            backend="eager",
            loss_scale=loss_scale,
        )

    dynamic, plain = step("dynamic"), step(None)
    state = dynamic.init({"w": torch.ones(2)})
    state.loss_scale["scale"].fill_(32.0)
    checkpoint.save(tmp_path / "dynamic", state)
    checkpoint.save(tmp_path / "plain", plain.init({"w": torch.ones(2)}))
    assert checkpoint.restore(tmp_path / "dynamic", step("dynamic")).loss_scale["scale"] == 32.0
    assert checkpoint.restore(tmp_path / "dynamic", plain).loss_scale == {}
    fresh = dynamic.init({"w": torch.ones(2)}).loss_scale["scale"]
    assert checkpoint.restore(tmp_path / "plain", dynamic).loss_scale["scale"] == fresh


# ------------------------------------------------------------------ parts of it


def test_specs_alone_restore_what_was_saved(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "7", saved.known(one(stored="bf16")))
    mesh = fs.make_mesh(shard=1)
    specs = fs.presets.full_shard(saved.params(), mesh)
    state = checkpoint.restore(tmp_path / "7", specs, mesh)
    assert saved.differences(state) == []
    assert set(state.opt_state) == {p for p in saved.SHAPES if p != "frozen"}


def test_parameters_alone_and_a_subtree(tmp_path: Path) -> None:
    mesh = fs.make_mesh(shard=1)
    checkpoint.save(tmp_path / "7", saved.known(one()))
    other = fs.shard_step(
        saved.loss_fn, fs.presets.full_shard(saved.params(), mesh), mesh=mesh, optimizer=fs.optim.sgd(0.1)
    )
    params = checkpoint.restore_params(tmp_path, other)
    assert list(params) == [*saved.SHAPES, "steps"]
    assert torch.equal(params["embed.w"], saved.number("embed.w", (7, 5)).float())
    part = checkpoint.restore_params(tmp_path, other, only=["layers.0.*", "scale"])
    assert list(part) == ["layers.0.w", "layers.0.b", "scale"]
    with pytest.raises(CheckpointError, match=r"only='head\.\*' matches no leaf"):
        checkpoint.restore_params(tmp_path, other, only="head.*")


def test_parameters_are_saved_alone(tmp_path: Path) -> None:
    step = one()
    blocks = saved.known(step).params
    with pytest.raises(CheckpointError, match=r"(?s)nobody has said.*specs=step\.specs"):
        checkpoint.save(tmp_path / "params", blocks)
    checkpoint.save(tmp_path / "params", blocks, specs=step.specs)
    again = checkpoint.restore_params(tmp_path / "params", step)
    assert all(torch.equal(again[p], blocks[p]) for p in blocks)
    with pytest.raises(CheckpointError, match=r"(?s)optimizer/embed\.w/mu \[7, 5\] is not in the checkpoint"):
        checkpoint.restore(tmp_path / "params", step)


def test_everything_that_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "7", saved.known(one()))
    mesh = fs.make_mesh(shard=1)
    full = saved.params()
    full["embed.w"] = torch.nn.Parameter(torch.zeros(8, 5))
    full["new"] = torch.nn.Parameter(torch.zeros(2))
    del full["scale"]
    specs = fs.presets.full_shard(full, mesh)
    step = fs.shard_step(lambda p: p["new"].sum(), specs, mesh=mesh, optimizer=fs.optim.adamw(0.1))
    with pytest.raises(
        CheckpointError,
        match=r"(?s)embed\.w is \[8, 5\] here and \[7, 5\] there.*params/new \[2\] is not in the checkpoint.*"
        r"params/scale \[\] is in the checkpoint alone.*restore_params",
    ):
        checkpoint.restore(tmp_path, step)
    with pytest.raises(
        CheckpointError, match=r"(?s)optimizer/embed\.w/mu \[7, 5\] is in the checkpoint alone"
    ):
        checkpoint.restore(tmp_path, one(optimizer=fs.optim.sgd(0.1)))


# ------------------------------------------------------------------ what comes with it


class Shuffled:
    """A loader of somebody else's: its state has tuples, bytes and a tensor."""

    def state_dict(self) -> dict[str, Any]:
        return {"random": (3, b"\x00\xff"), "order": torch.tensor([2, 0, 1]), 4: None}


def test_position_config_and_metrics_come_back(tmp_path: Path) -> None:
    checkpoint.save(
        tmp_path / "7",
        saved.known(one()),
        data=Shuffled(),
        config={"lr": 0.1, "layers": [1, 2]},
        metrics={"held_out": 1.5},
    )
    found = checkpoint.manifest(tmp_path)
    assert (found.step, found.seed, found.config) == (7, 11, {"lr": 0.1, "layers": [1, 2]})
    assert found.metrics == {"held_out": 1.5}
    leaf = found.leaves["params/embed.w"]
    assert (leaf.shape, leaf.dtype, leaf.spec) == ((7, 5), "F32", "P('shard')")
    data = checkpoint.restore(tmp_path, one()).data
    assert data["random"] == (3, b"\x00\xff")
    assert data[4] is None
    assert torch.equal(data["order"], torch.tensor([2, 0, 1]))


def test_what_json_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"data\['order'\]\[0\] is object, .*never pickles"):
        checkpoint.save(tmp_path / "7", saved.known(one()), data={"order": [object()]})
    assert list(tmp_path.iterdir()) == []


def positions(rank: int, root: str) -> Any:
    step = saved.step_of("full_shard", "fp32", saved.mesh_of("full_shard", 2))
    checkpoint.save(f"{root}/7", saved.known(step), data={"rank": rank})
    return checkpoint.restore(root, step).data


def test_ranks_with_positions_of_their_own_get_them_back(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(positions, str(tmp_path)) == [{"rank": 0}, {"rank": 1}]
    with pytest.warns(CheckpointWarning, match="for each of 2 ranks, here are 1"):
        assert checkpoint.restore(tmp_path, one()).data is None


def test_a_position_is_of_its_step_alone(tmp_path: Path) -> None:
    """A step moves on in the data: the restored position does not linger to be saved again."""
    step = one()
    checkpoint.save(tmp_path / "7", saved.known(step), data={"position": 1})
    state = checkpoint.restore(tmp_path, step)
    assert state.data == {"position": 1}
    assert step(state, torch.ones(2))[0].data is None


# ------------------------------------------------------------------ whole or absent


def test_the_newest_whole_one_is_taken_and_the_other_named(tmp_path: Path) -> None:
    step = one()
    for number in (9, 10, 11):
        checkpoint.save(tmp_path / str(number), saved.known(step, number))
    assert checkpoint.all_steps(tmp_path) == [9, 10, 11]
    (tmp_path / "11" / "manifest.json.sha256").unlink()
    assert checkpoint.latest(tmp_path) == tmp_path / "10"
    assert checkpoint.all_steps(tmp_path) == [9, 10]
    data = tmp_path / "10" / "rank-00000.safetensors"
    flipped = bytearray(data.read_bytes())
    flipped[-3] ^= 4
    data.write_bytes(flipped)
    with pytest.warns(CheckpointWarning) as told:
        assert int(checkpoint.restore(tmp_path, step).step) == 9
    texts = [str(w.message) for w in told if w.category is CheckpointWarning]
    assert [text.splitlines()[0] for text in texts] == [
        f"{tmp_path / name} is not what was written:" for name in ("11", "10")
    ]
    assert "rank 0: rank-00000.safetensors, params/" in texts[1]
    assert texts[1].endswith(f"Taking {tmp_path / '9'} instead.")
    with pytest.raises(CheckpointError, match=r"(?s)10 is not what was written.*checksum differs"):
        checkpoint.restore(tmp_path / "10", step)
    with pytest.raises(CheckpointError, match=r"(?s)rank-00000\.safetensors, .*checksum differs"):
        checkpoint.verify(tmp_path / "10")
    assert checkpoint.verify(tmp_path / "9").step == 9


def test_nothing_there(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "no") is None
    assert checkpoint.all_steps(tmp_path) == []
    for path in (tmp_path, tmp_path / "no"):
        with pytest.raises(CheckpointError, match="there is no checkpoint at"):
            checkpoint.restore(path, one())
        with pytest.raises(CheckpointError, match="there is no checkpoint at"):
            checkpoint.manifest(path)


def test_leftovers_are_cleared_away_by_the_next_save_and_nothing_else_is(tmp_path: Path) -> None:
    state = saved.known(one())
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
    checkpoint.save(tmp_path / "6", saved.known(one()))
    assert place.saving.is_dir()
    with pytest.raises(CheckpointError, match=r"(?s)cannot save .*5:.*another process is saving there"):
        checkpoint.save(tmp_path / "5", saved.known(one()))
    assert place.saving.is_dir()
    place.end()
    checkpoint.save(tmp_path / "5", saved.known(one()))
    assert checkpoint.all_steps(tmp_path) == [5, 6]


def test_a_save_replaces_its_own_kind_alone(tmp_path: Path) -> None:
    step = one()
    checkpoint.save(tmp_path / "7", saved.known(step, 3))
    checkpoint.save(tmp_path / "7", saved.known(step, 4))
    assert checkpoint.verify(tmp_path / "7").step == 4
    (tmp_path / "8").mkdir()
    (tmp_path / "8" / "thesis.tex").write_text("not ours")
    with pytest.raises(CheckpointError, match=r"(?s)cannot save .*8:.*something else by that name"):
        checkpoint.save(tmp_path / "8", saved.known(step))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["7", "8"]


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every write, at every flush, at every rename of it, one after the other."""
    step = one()
    before = saved.known(step, 3)
    checkpoint.save(tmp_path / "7", before)
    after, count = saved.known(step, 4), 0
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


FULL = """
import sys, torch
sys.path.insert(0, sys.argv[2])
import fnshard as fs, saved
step = saved.step_of("full_shard", "fp32", fs.make_mesh(shard=1))
fs.checkpoint.save(sys.argv[1] + "/1", saved.known(step, 1))
big = {"w": torch.ones(1 << 18)}
specs = {"w": fs.LayoutSpec()}
large = fs.shard_step(lambda p: p["w"].sum(), specs, optimizer=fs.optim.sgd(0.1), backend="eager")
for save in (fs.checkpoint.save, lambda *a: fs.checkpoint.save_async(*a).wait()):
    try:
        save(sys.argv[1] + "/2", large.init(big))
    except fs.CheckpointError as error:
        print(error)
assert saved.differences(fs.checkpoint.restore(sys.argv[1], step)) == []
assert fs.checkpoint.all_steps(sys.argv[1]) == [1]
"""


@pytest.mark.parametrize(("mount", "why"), [("size=200k", "No space left"), ("ro", "Read-only")])
def test_a_full_or_read_only_disk(tmp_path: Path, mount: str, why: str) -> None:
    """A real one, mounted in a namespace of its own."""
    disk, here = tmp_path / "disk", Path(__file__).parents[1] / "support"
    disk.mkdir()
    head, tail = FULL.split('fs.checkpoint.save(sys.argv[1] + "/1", saved.known(step, 1))\n')
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    first.write_text(FULL.split("big = ")[0])
    second.write_text(head + tail)
    options = mount if mount != "ro" else "size=9m"
    steps = [
        f"mount -t tmpfs -o {options} none {disk}",
        f"{sys.executable} {first} {disk} {here}",
        f"mount -o remount,{mount} {disk}",
        f"{sys.executable} {second} {disk} {here}",
        f"ls -A {disk}",
    ]
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", " && ".join(steps)],
        capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if "unshare" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("cannot save") == done.stdout.count(why) == 2
    assert done.stdout.splitlines()[-1] == "1"  # and no leftovers


# ------------------------------------------------------------------ in the background


def test_a_step_does_not_tear_what_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is donated to the next steps while its bytes are held back from the disk."""
    step = one(stored="bf16")
    state, gate = saved.known(step), threading.Event()
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
    checkpoint.save_async(tmp_path / "8", saved.known(step))
    with pytest.raises(CheckpointError, match=r"(?s)cannot save .*8:.*something else"):
        checkpoint.save(tmp_path / "9", saved.known(step))
    assert checkpoint.verify(tmp_path / "9").step == 7  # which is whole all the same
    checkpoint.wait()  # it was told once
    checkpoint.save_async(tmp_path / "9", saved.known(step, 9))
    checkpoint.save_async(tmp_path / "10", saved.known(step, 10))
    assert checkpoint.all_steps(tmp_path)[0] == 9
    checkpoint.wait()
    assert checkpoint.all_steps(tmp_path) == [9, 10]


def test_the_end_of_a_process_waits(tmp_path: Path) -> None:
    program = FULL.split("big = ", 1)[0].replace("checkpoint.save(", "checkpoint.save_async(")
    command = [
        sys.executable,
        "-c",
        program + "sys.exit(3)",
        str(tmp_path),
        str(Path(__file__).parents[1] / "support"),
    ]
    assert subprocess.run(command, check=False, timeout=120).returncode == 3
    assert checkpoint.verify(tmp_path / "1").step == 1


def background(rank: int, root: str) -> list[str]:
    step = saved.step_of("zero1", "bf16", saved.mesh_of("zero1", 2))
    state = saved.known(step)
    for number in range(3):
        checkpoint.save_async(f"{root}/{number}", state, keep=checkpoint.Keep(last=2))
        if number < 2:
            state, _ = step(state, torch.ones(2))
    checkpoint.wait()
    return [str(checkpoint.latest(root)), *map(str, checkpoint.all_steps(root))]


def test_ranks_save_in_the_background_together(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(background, str(tmp_path)) == [[str(tmp_path / "2"), "1", "2"]] * 2
    assert int(checkpoint.restore(tmp_path, one()).step) == 9


def breaking(rank: int, root: str) -> str:
    """Only rank 1 meets an error; both hear of it."""
    step = saved.step_of("full_shard", "fp32", saved.mesh_of("full_shard", 2))
    state = saved.known(step)
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
    told = ranks(2).run(breaking, str(tmp_path))
    assert told[0] == told[1]
    assert "rank 1: [Errno 5] Input/output error" in told[0]
    assert [p.name for p in tmp_path.iterdir()] == ["1"]


# ------------------------------------------------------------------ what is kept, what is refused


def test_kept_are_the_last_the_rounds_and_the_best(tmp_path: Path) -> None:
    step = one()
    keep = checkpoint.Keep(last=1, every=10, best=1, metric="held_out")
    for number, held_out in ((5, 3.0), (10, 2.0), (15, 1.0), (20, 4.0), (25, 5.0)):
        checkpoint.save(
            tmp_path / str(number), saved.known(step, number), keep=keep, metrics={"held_out": held_out}
        )
    (tmp_path / "notes").mkdir()
    assert checkpoint.all_steps(tmp_path) == [10, 15, 20, 25]
    checkpoint.save(tmp_path / "30", saved.known(step, 30), keep=checkpoint.Keep(last=1, best=1, mode="max"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["30", "notes"]
    with pytest.raises(CheckpointError, match=r"(?s)last=0.*mode='least'"):
        checkpoint.Keep(last=0, mode="least")  # type: ignore[arg-type]


def test_what_was_gone_back_behind_does_not_count_among_the_last(tmp_path: Path) -> None:
    """A newer one that is corrupt must not push out the new one, or the last that is whole."""
    step = one()
    for number in (80, 90, 100):
        checkpoint.save(tmp_path / str(number), saved.known(step, number))
    data = tmp_path / "100" / "rank-00000.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + bytes([data.read_bytes()[-1] ^ 4]))
    with pytest.warns(CheckpointWarning):
        assert int(checkpoint.restore(tmp_path, step).step) == 90
    checkpoint.save(tmp_path / "95", saved.known(step, 95), keep=checkpoint.Keep(last=1))
    assert checkpoint.all_steps(tmp_path) == [95, 100]
    with pytest.warns(CheckpointWarning):
        assert int(checkpoint.restore(tmp_path, step).step) == 95


def test_a_keep_that_cannot_work_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    state = saved.known(one())
    with pytest.raises(CheckpointError, match=r"keep=3: a fs\.checkpoint\.Keep"):
        checkpoint.save(tmp_path / "1", state, keep=3)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"(?s)goes by numbers, and this is named 'best'"):
        checkpoint.save(tmp_path / "best", state, keep=checkpoint.Keep())
    with pytest.raises(CheckpointError, match="goes by 'los', and this save comes with loss alone"):
        checkpoint.save(
            tmp_path / "1", state, keep=checkpoint.Keep(best=1, metric="los"), metrics={"loss": 1.0}
        )
    with pytest.raises(CheckpointError, match="numbers by name"):
        checkpoint.save(tmp_path / "1", state, metrics={"loss": "low"})  # type: ignore[dict-item]
    assert list(tmp_path.iterdir()) == []


def test_one_that_stepped_aside_is_found_by_its_own_name(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "best", saved.known(one()))
    (tmp_path / "best").rename(tmp_path / ".best.old")  # a save over it was killed between its two renames
    assert int(checkpoint.restore(tmp_path / "best", one()).step) == 7


def test_an_error_of_the_system_is_no_reason_for_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        checkpoint.save(tmp_path / str(number), saved.known(one(), number))

    def fails(*args: Any) -> Any:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fails)
        with pytest.raises(CheckpointError, match=r"(?s)restoring .*2.*Too many open files"):
            checkpoint.restore(tmp_path, one())
    assert int(checkpoint.restore(tmp_path, one()).step) == 2


def test_ctrl_c_is_no_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path / "1", saved.known(one()))
    assert list(tmp_path.iterdir()) == []


def saves_another_layout(rank: int, root: str) -> str:
    """Rank 1 believes that the leaf is replicated."""
    mesh = fs.make_mesh(shard=2, device="cpu")
    layout = fs.P("shard") if rank == 0 else fs.P()
    params = {"w": torch.ones(4)}
    specs = fs.match_specs(params, [("*", fs.LayoutSpec(layout))])
    try:
        checkpoint.save(f"{root}/1", fs.shard(params, specs, mesh), specs=specs, mesh=mesh)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_ranks_that_hold_different_states_save_nothing(ranks: Any, tmp_path: Path) -> None:
    told = ranks(2).run(saves_another_layout, str(tmp_path))
    assert told[0] == told[1] and "ranks hold different states: params/w" in told[0]
    assert list(tmp_path.iterdir()) == []


def alone_in_it(rank: int, root: str) -> list[str]:
    """Rank 1 cannot even say what it would save, or make room for what it would restore."""
    step = saved.step_of("full_shard", "fp32", saved.mesh_of("full_shard", 2))
    state, told = saved.known(step), []
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
            told.append(type(error).__name__)
    return told


def test_ranks_fail_together_before_and_after_the_files(ranks: Any, tmp_path: Path) -> None:
    told = ranks(2).run(alone_in_it, str(tmp_path), timeout=40.0)
    assert told == [["CheckpointError", "CheckpointError"], ["CheckpointError", "StateError"]]


def test_simulated_ranks_do_not_save(tmp_path: Path) -> None:
    mesh = fs.make_mesh(shard=2, simulated=True)

    def save(rank: int) -> None:
        checkpoint.save(tmp_path / "1", saved.known(saved.step_of("full_shard", "fp32", mesh)))

    with pytest.raises(CheckpointError, match="is simulated: its ranks are no processes"):
        fs.simulate(mesh, save)


def test_a_consumed_state_is_not_saved(tmp_path: Path) -> None:
    step = one()
    state = saved.known(step)
    step(state, torch.ones(2))
    with pytest.raises(StateError, match="was consumed"):
        checkpoint.save(tmp_path / "1", state)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ in memory


@pytest.mark.parametrize("stored", [("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "fp64"), ("bf16", "host")])
def test_resharding_in_memory(stored: tuple[str, str]) -> None:
    """Every preset to every other on four ranks, their axes changed too."""
    flat, nested = {"shard": 4}, {"replicate": 2, "shard": 2}
    for before in PRESETS:
        for after in PRESETS:
            one_mesh = fs.make_mesh(**(nested if before == "hybrid_shard" else flat), simulated=True)
            other = fs.make_mesh(**(nested if after == "hybrid_shard" else flat), simulated=True)
            if (one_mesh.names, one_mesh.sizes) == (other.names, other.sizes):
                other = one_mesh

            def work(rank: int, a: Any = before, b: Any = after, x: Any = one_mesh, y: Any = other) -> Any:
                old, new = saved.step_of(a, stored[0], x), saved.step_of(b, stored[1], y)
                state = saved.known(old)
                cost = fs.reshard_cost(state, old.specs, new.specs, x, to=y)
                moved = fs.reshard(state, old.specs, new.specs, x, to=y)
                with pytest.raises(StateError, match="was consumed"):
                    _ = state.params
                return saved.differences(moved), int(moved.step), cost.sent_bytes

            found = fs.simulate(one_mesh, work)
            assert [each[:2] for each in found] == [([], 7)] * 4
            if stored[0] == "fp32" and before in (after, "no_shard"):
                assert found[0][2] == 0  # else parameters come from masters, which ZeRO 1 has split
            elif before == "full_shard" != after:
                assert found[0][2] > 0


@pytest.mark.parametrize("how", ["reshard", "restore"])
def test_a_state_without_optimizer_slots_goes_on(how: str, tmp_path: Path) -> None:
    """Plain SGD holds nothing for a leaf, which is an entry without slots all the same."""
    mesh = fs.make_mesh(shard=2, simulated=True) if how == "reshard" else fs.make_mesh(shard=1)
    params = {"w": torch.randn(4, 3), "b": torch.randn(3)}
    sgd = {"optimizer": fs.optim.sgd(0.1), "mesh": mesh, "backend": "eager"}
    old, new = (
        fs.shard_step(lambda p, x: (x @ p["w"] + p["b"]).square().mean(), specs, **sgd)
        for specs in (fs.presets.full_shard(params, mesh), fs.presets.no_shard(params, mesh))
    )

    def work(rank: int) -> Any:
        state, _ = old(old.init(params), torch.ones(2, 4))
        kept = state.copy()
        if how == "reshard":
            moved = fs.reshard(state, old.specs, new.specs, mesh)
        else:
            checkpoint.save(str(tmp_path / "1"), state)
            moved = checkpoint.restore(str(tmp_path / "1"), new.specs, mesh)
        same, other = old(kept, torch.ones(2, 4))[0], new(moved, torch.ones(2, 4))[0]
        return fs.unshard(same.params, old.specs, mesh), other.params

    for same, other in fs.simulate(mesh, work) if how == "reshard" else [work(0)]:
        torch.testing.assert_close(other, same)


def test_what_resharding_sends_is_counted() -> None:
    """One rank's block of every leaf that does not stay, to each of the three others."""
    mesh = fs.make_mesh(shard=4, abstract=True)
    full = {"w": torch.zeros(8, 6), "b": torch.zeros(4)}
    a, b = fs.presets.full_shard(full, mesh), fs.presets.zero1(full, mesh)
    step = fs.shard_step(lambda p: p["w"].sum() + p["b"].sum(), a, mesh=mesh, optimizer=fs.optim.adamw(0.1))
    cost = fs.reshard_cost(step.init(full), a, b, mesh)
    assert cost.leaves == {
        "params/w": 3 * 48, "params/b": 3 * 4, "optimizer/w/mu": 0, "optimizer/w/nu": 0,
        "optimizer/b/mu": 0, "optimizer/b/nu": 0,
    }  # fmt: skip
    assert "sent by each rank, for 2 of 6 leaves" in str(cost)
    with pytest.raises(fs.SpecError, match="have not the same ranks"):
        fs.reshard_cost(step.init(full), a, b, mesh, to=fs.make_mesh(shard=8, abstract=True))


def test_tuple_axes_lie_as_the_mesh_says() -> None:
    """A dim split over two axes, five rows on six ranks: boxes DTensor would cut otherwise."""
    mesh = fs.make_mesh(a=2, b=3, abstract=True)
    full = {"w": torch.arange(10.0).view(5, 2)}
    specs = fs.match_specs(full, [("*", LayoutSpec(P(("a", "b"))))])
    step = fs.shard_step(lambda p: p["w"].sum(), specs, mesh=mesh, optimizer=fs.optim.sgd(0.1))
    assert fs.reshard_cost(step.init(full), specs, fs.presets.no_shard(full, mesh), mesh).sent_bytes == 5 * 8


def test_saving_and_restoring_say_nothing(tmp_path: Path, recwarn: Any) -> None:
    step = one()
    checkpoint.save(tmp_path / "7", saved.known(step))
    checkpoint.restore(tmp_path, step)
    assert [str(w.message) for w in recwarn if "distributed is disabled" not in str(w.message)] == []
