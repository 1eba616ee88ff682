"""Checkpoints that were ruined: told clearly, or restored exactly; nothing else is touched, read or run."""

from __future__ import annotations

import functools
import json
import os
import pickle
import random
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import wreck

import fnshard as fs
from fnshard import LayoutSpec
from fnshard.errors import CheckpointError, CheckpointWarning
from fnshard.runtime import dcp, manifest, tensorfile

ROOM_MB = 256  # what restoring a few hundred bytes may take
STEPS = (100, 200, 300)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that leaves of 60 bytes have several checksums, as leaves of gigabytes do."""
    small_blocks(monkeypatch.setattr)


def small_blocks(put: Callable[..., Any] = setattr) -> None:
    for module in (tensorfile, manifest, dcp):
        put(module, "BLOCK_bytes", 32)


def save_on_two(rank: int, folder: str) -> None:
    small_blocks()
    mesh = fs.make_mesh(shard=2, device="cpu")
    for step in STEPS:
        wreck.save(Path(folder), step, mesh)


@pytest.fixture(scope="module")
def roots(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Roots of three checkpoints each, by how many ranks had saved them."""
    out = {name: tmp_path_factory.mktemp(name) for name in ("one", "two")}
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch.setattr)
        for step in STEPS:
            wreck.save(out["one"], step, fs.make_mesh(shard=1, device="cpu"))
        ranks(2).run(save_on_two, str(out["two"]))
    return out


@pytest.fixture(scope="module")
def step() -> Any:
    return wreck.step_on(fs.make_mesh(shard=1, device="cpu"))[0]


@functools.cache
def expected(step: int) -> dict[str, Any]:
    """What was saved."""
    state = wreck.state_on(fs.make_mesh(shard=1, device="cpu"), step)[1]
    state.data = wreck.DATA
    return wreck.values(state)


def told_by(work: Callable[..., Any], *args: Any) -> str | Any:
    """The message of the error, or what came of it; any other error is a failure of the test."""
    try:
        return work(*args)
    except CheckpointError as error:
        assert str(error).strip()
        return str(error)


def look(folder: Path, step: Any) -> tuple[Any, Any]:
    """What `verify` and `restore` make of a checkpoint, in little memory and in its directory alone."""
    with wreck.little_memory(ROOM_MB), wreck.confined(folder):
        seen = told_by(fs.checkpoint.verify, folder)
        got = told_by(fs.checkpoint.restore, folder, step)
    return seen, got if isinstance(got, str) else wreck.values(got)


def test_both_are_whole_to_begin_with(roots: dict[str, Path], step: Any) -> None:
    for root in roots.values():
        for number in STEPS:
            seen, got = look(root / str(number), step)
            assert seen.step == number and seen.metrics == {"loss": 1 / (number + 1)}
            assert seen.config == wreck.CONFIG
            assert got == expected(number)
    assert len(json.loads((roots["two"] / "100" / wreck.MANIFEST).read_bytes())["files"]) == 2


# ------------------------------------------------------------------ bits and bytes


def flipped(folder: Path, bits: list[tuple[str, int]], step: Any) -> None:
    for name, bit in bits:
        wreck.flip(folder, name, bit)
        for told in look(folder, step):
            assert isinstance(told, str) and name in told, (name, bit, told)
        wreck.flip(folder, name, bit)
    assert look(folder, step)[1] == expected(300)


@pytest.mark.parametrize("by", ["one", "two"])
def test_a_flipped_bit_is_found_and_its_file_named(by: str, roots: Any, step: Any, tmp_path: Path) -> None:
    """A thousand of them, in any byte of any file."""
    folder = wreck.copied(roots[by] / "300", tmp_path / "300")
    flipped(folder, wreck.some_bits(folder, 500, seed=1), step)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("by", ["one", "two"])
def test_every_bit(by: str, roots: Any, step: Any, tmp_path: Path) -> None:
    folder = wreck.copied(roots[by] / "300", tmp_path / "300")
    flipped(folder, [(p.name, b) for p in folder.iterdir() for b in range(8 * p.stat().st_size)], step)


def ruined(how: str, times: int, pristine: Path, folder: Path, step: Any) -> None:
    for seed in range(times):
        rng = random.Random(f"{how} {seed}")
        for name in sorted(p.name for p in pristine.iterdir()):
            wreck.copied(pristine, folder)
            hurt = wreck.BYTES[how](folder, name, rng) or [name]
            for told in look(folder, step):
                assert isinstance(told, str) and any(n in told for n in hurt), (how, seed, name, told)


@pytest.mark.parametrize("how", wreck.BYTES)
def test_a_ruined_file_is_found_and_named(how: str, roots: Any, step: Any, tmp_path: Path) -> None:
    """Each file in turn: 20 ways, 4 files, 6 times."""
    ruined(how, 6, roots["two"] / "300", tmp_path / "300", step)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("by", ["one", "two"])
@pytest.mark.parametrize("how", wreck.BYTES)
def test_a_ruined_file_many_times(how: str, by: str, roots: Any, step: Any, tmp_path: Path) -> None:
    ruined(how, 200, roots[by] / "300", tmp_path / "300", step)


def test_a_large_manifest_of_nothing_is_not_held(roots: Any, step: Any, tmp_path: Path) -> None:
    folder = wreck.copied(roots["two"] / "300", tmp_path / "300")
    os.truncate(folder / wreck.MANIFEST, 300 << 20)
    for told in look(folder, step):
        assert isinstance(told, str) and wreck.MANIFEST in told


@pytest.mark.parametrize("name", ["manifest.json", "manifest.json.sha256", "rank-00001.safetensors"])
def test_a_file_of_another_checkpoint_is_found(name: str, roots: Any, step: Any, tmp_path: Path) -> None:
    folder = wreck.copied(roots["two"] / "300", tmp_path / "300")
    shutil.copy(roots["two"] / "200" / name, folder / name)
    for told in look(folder, step):
        assert isinstance(told, str) and name in told


# ------------------------------------------------------------------ headers


@pytest.mark.parametrize("how", wreck.HEADERS)
def test_another_header_is_found_or_harmless(how: str, roots: Any, step: Any, tmp_path: Path) -> None:
    """As it is; and where the manifest was made to agree with it, what was saved or an error."""
    name = "rank-00000.safetensors"
    for seed in range(5):
        folder, rng = wreck.copied(roots["one"] / "300", tmp_path / "300"), random.Random(seed)
        content = bytearray((folder / name).read_bytes())
        (folder / name).write_bytes(wreck.HEADERS[how](content, rng))
        for told in look(folder, step):
            assert isinstance(told, str) and name in told, (how, seed, told)
        wreck.adopt(folder)
        got = look(folder, step)[1]
        assert isinstance(got, str) or got == expected(300), (how, seed)


# ------------------------------------------------------------------ manifests whose seal fits

Change = tuple[wreck.Where, Any, bool]  # where, what stands there now, whether that must be an error
SIGNS = (wreck.MANIFEST, "rank-0000", "of another model")
STRICT = ("step", "leaves", "files", "format", "mesh", "specs", "versions")


def resealed(changes: list[Change], pristine: Path, folder: Path, step: Any) -> None:
    """Each is an error, or, where it need not be, all tensors are as they were saved.

    What `verify` cannot know is that a checkpoint is of another model.
    """
    wreck.copied(pristine, folder)
    plain = json.loads((folder / wreck.MANIFEST).read_bytes())
    for at, value, must in changes:
        wreck.reseal(folder, wreck.replaced(plain, at, value))
        seen, got = look(folder, step)
        if must or isinstance(got, str):
            assert isinstance(got, str) and any(sign in got for sign in SIGNS), (at, value, got)
        else:
            same = {**expected(300), "data": got["data"], "seed": got["seed"]}
            assert got == same, (at, value)
        assert isinstance(seen, str) == (isinstance(got, str) and SIGNS[2] not in got), (at, value, seen, got)


def mistyped(said: Any) -> list[Change]:
    out = []
    for at, value in wreck.nodes(said):
        must = at[0] in STRICT or (at[0] == "metrics" and type(value) is not float) or at == ("data",)
        out += [(at, wrong, must) for wrong in wreck.wrong_for(value)]
    return out


def off_by_some(said: Any) -> list[Change]:
    """Numbers of leaves and files that are numbers, but others."""
    numbers = [(a, v) for a, v in wreck.nodes(said) if type(v) is int and a[0] in ("leaves", "files")]
    return [(a, v + by, True) for a, v in numbers for by in (-1, 1, 8, 1 << 40)]


@pytest.mark.parametrize("kind", [mistyped, off_by_some])
def test_a_manifest_that_cannot_be_is_told(kind: Any, roots: Any, step: Any, tmp_path: Path) -> None:
    changes = kind(json.loads((roots["two"] / "300" / wreck.MANIFEST).read_bytes()))
    resealed(wreck.taken(changes, 500, seed=2), roots["two"] / "300", tmp_path / "300", step)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", [mistyped, off_by_some])
@pytest.mark.parametrize("by", ["one", "two"])
def test_every_manifest_that_cannot_be(by: str, kind: Any, roots: Any, step: Any, tmp_path: Path) -> None:
    changes = kind(json.loads((roots[by] / "300" / wreck.MANIFEST).read_bytes()))
    resealed(changes, roots[by] / "300", tmp_path / "300", step)


def edited(edit: Callable[[dict[str, Any]], Any], root: Path, folder: Path, step: Any) -> tuple[Any, Any]:
    """What comes of a checkpoint whose manifest `edit` has changed."""
    wreck.copied(root / "300", folder)
    said = json.loads((folder / wreck.MANIFEST).read_bytes())
    new = edit(said)
    wreck.reseal(folder, said if new is None else new)
    return look(folder, step)


def twice(said: Any) -> None:
    """Both chunks are the first: as many elements as there should be, but not all of them."""
    chunks = said["leaves"]["params/wide.weight"]["chunks"]
    chunks[1] = {**chunks[0]}


def shifted(said: Any) -> None:
    """Chunks [5, 3, 2] and [5, 2, 2] that overlap: the second begins earlier than the first ends."""
    chunks = said["leaves"]["params/cube"]["chunks"]
    chunks[1]["offset"][1] -= 1


def shared(said: Any) -> None:
    """Two leaves are the same bytes."""
    leaves = said["leaves"]
    leaves["optimizer/wide.weight/nu"] = {**leaves["optimizer/wide.weight/mu"]}


def from_the_header(said: Any) -> None:
    said["leaves"]["params/gain"]["chunks"][0]["at"] = 0


def many_times(said: Any) -> None:
    """A leaf of a terabyte: a thousand and more times the same bytes."""
    leaf = said["leaves"]["params/bias"]
    chunk = {**leaf["chunks"][0], "shape": [4]}
    leaf["chunks"] = [{**chunk, "offset": [4 * n]} for n in range(5000)]
    leaf["shape"] = [20000]


def leaf_of(shape: list[int], name: str = "params/bias", **more: Any) -> Callable[[Any], None]:
    def edit(said: Any) -> None:
        chunk = {**said["leaves"][name]["chunks"][0], "offset": [0] * len(shape), "shape": shape}
        said["leaves"][name].update(shape=shape, chunks=[chunk], **more)

    return edit


def without_chunks(shape: list[int]) -> Callable[[Any], None]:
    return lambda said: said["leaves"]["params/empty"].update(shape=shape)


def file_named(name: str) -> Callable[[Any], Any]:
    """A data file elsewhere; what it would read there is what was saved."""
    return lambda said: json.loads(json.dumps(said).replace("rank-00000.safetensors", name))


def header_of(count: int) -> Callable[[Any], None]:
    return lambda said: said["files"]["rank-00000.safetensors"].update(header_bytes=count, bytes=count)


EDITS: dict[str, Callable[[Any], Any]] = {
    "a chunk twice": twice,
    "chunks overlap": shifted,
    "no chunks": lambda said: said["leaves"]["params/bias"].update(chunks=[]),
    "one chunk of two": lambda said: said["leaves"]["params/bias"]["chunks"].pop(),
    "a chunk too many": lambda said: said["leaves"]["params/gain"]["chunks"].append(
        said["leaves"]["params/gain"]["chunks"][0]
    ),
    "a chunk of an empty leaf": lambda said: said["leaves"]["params/empty"].update(
        chunks=[{**said["leaves"]["params/bias"]["chunks"][0], "offset": [0, 0], "shape": [0, 4], "crc32": []}]
    ),
    "bytes of two leaves": shared,
    "bytes of the header": from_the_header,
    "a small file is a large leaf": many_times,
    "a tensor of 2^60": leaf_of([1 << 60]),
    "of 2^40 x 2^40": leaf_of([1 << 40, 1 << 40]),
    "of 10,000 dims": leaf_of([1] * 10_000),
    "of 0 x 2^62": without_chunks([0, 1 << 62]),
    "of 0 x 2^62 x 8": without_chunks([0, 1 << 62, 8]),
    "of 0 in 1,000 dims": without_chunks([0] * 1000),
    "a header of 2^50": header_of(1 << 50),
    "..": file_named("../rank-00000.safetensors"),
    "../300": file_named("../300/rank-00000.safetensors"),
    "from the root": file_named("/etc/passwd"),
    "this directory": file_named("."),
    "the one above": file_named(".."),
    "no name": file_named(""),
    "a nul": file_named("rank-00000.safetensors\\u0000"),
    "half a letter": file_named("rank-\\ud800.safetensors"),
    "the manifest": file_named(wreck.MANIFEST),
    "a tilde": file_named("~/rank-00000.safetensors"),
    "no format": lambda said: said.pop("format") and None,
    "a later format": lambda said: said.update(format="fnshard checkpoint 2"),
    "a list": lambda said: [said],
    "nothing": lambda said: b"",
    "null": lambda said: b"null",
    "no text": lambda said: b"\xff\xfe\xff",
    "deep": lambda said: b"[" * 1_000_000,
    "deep objects": lambda said: b'{"leaves":' * 100_000,
    "a deep position": lambda said: said.update(data=[functools.reduce(lambda a, _: [a], range(900), 1)]),
    "a number of 10^6 digits": lambda said: b'{"step":' + b"9" * 1_000_000 + b"}",
    "a tensor that multiplies lists": lambda said: said.update(
        data=[{"__is__": "tensor", "of": ["F32", [1 << 30, [0]], ""]}]
    ),
    "a tensor of 2^62 nothings": lambda said: said.update(
        data=[{"__is__": "tensor", "of": ["F32", [1 << 62, 1 << 62, 0], ""]}]
    ),
    "a key that is a list": lambda said: said.update(data=[{"__is__": "items", "of": [[[1], 2]]}]),
}


@pytest.mark.parametrize("what", EDITS)
def test_a_manifest_that_lies_is_told(what: str, roots: Any, step: Any, tmp_path: Path) -> None:
    """By `verify`, by `restore` for a step, and for specs that take shapes from the checkpoint."""
    loose = {path: LayoutSpec() for path in step.specs}
    here = fs.make_mesh(shard=1, device="cpu")
    for told in (
        *edited(EDITS[what], roots["two"], tmp_path / "300", step),
        told_by(fs.checkpoint.restore, tmp_path / "300", loose, here),
    ):
        assert isinstance(told, str) and any(sign in told for sign in SIGNS), told


@pytest.mark.parametrize("leaf", ["params/gain", "optimizer/bias/mu", "optimizer/wide.weight/nu"])
def test_a_leaf_that_is_missing_or_not_asked_for_is_named(
    leaf: str, roots: Any, step: Any, tmp_path: Path
) -> None:
    """Nothing in the checkpoint itself is wrong then, so `verify` has nothing to say."""
    _, got = edited(lambda said: said["leaves"].pop(leaf) and None, roots["two"], tmp_path / "300", step)
    assert f"{leaf} [" in got and "is not in the checkpoint" in got

    def renamed(said: Any) -> None:
        said["leaves"][f"{leaf}.more" if leaf[0] == "p" else f"{leaf}more"] = said["leaves"].pop(leaf)

    _, got = edited(renamed, roots["two"], tmp_path / "300", step)
    assert f"{leaf} [" in got and "is in the checkpoint alone" in got


@pytest.mark.parametrize("dtype", ["I32", "U32", "I8", "BOOL"])
def test_numbers_of_another_kind_are_not_cast(dtype: str, roots: Any, step: Any, tmp_path: Path) -> None:
    def edit(said: Any) -> None:
        assert said["leaves"]["params/gain"]["dtype"] == "F32"
        said["leaves"]["params/gain"]["dtype"] = dtype

    _, got = edited(edit, roots["two"], tmp_path / "300", step)
    assert f"params/gain is torch.float32 here and {dtype} there" in got


# ------------------------------------------------------------------ pickles


def test_a_pickle_in_any_place_is_never_run(roots: Any, step: Any, tmp_path: Path) -> None:
    marker, folder = tmp_path / "ran", tmp_path / "300"
    for kind, payload in wreck.payloads(marker).items():
        if kind != "torch":
            pickle.loads(payload).close()
            assert marker.exists(), "the payload is none"
            marker.unlink()
        for name in sorted(p.name for p in (roots["two"] / "300").iterdir()):
            wreck.copied(roots["two"] / "300", folder)
            (folder / name).write_bytes(payload)
            for told in look(folder, step):
                assert isinstance(told, str) and name in told
            if name != wreck.SEAL:  # sealed, too
                text = payload if name == wreck.MANIFEST else (folder / wreck.MANIFEST).read_bytes()
                wreck.reseal(folder, text)
                if name != wreck.MANIFEST:
                    wreck.adopt(folder)
                assert isinstance(look(folder, step)[1], str)
        assert not marker.exists()


def test_files_that_do_not_belong_there_are_not_looked_at(roots: Any, step: Any, tmp_path: Path) -> None:
    marker, folder = tmp_path / "ran", wreck.copied(roots["two"] / "300", tmp_path / "300")
    payload = wreck.payloads(marker)["torch"]
    for name in (".metadata", "__0_0.distcp", "rank-00002.safetensors", "model.pt", "manifest.json.bak"):
        (folder / name).write_bytes(payload)
    (folder / "sub").symlink_to("/")
    seen, got = look(folder, step)
    assert got == expected(300) and seen.step == 300 and not marker.exists()
    marker.touch()


# ------------------------------------------------------------------ a root of several


def root_of(pristine: Path, folder: Path) -> Path:
    shutil.copytree(pristine, folder)
    return folder


def test_the_newest_whole_one_is_taken_and_the_others_are_told_of(
    roots: Any, step: Any, tmp_path: Path
) -> None:
    root = root_of(roots["two"], tmp_path / "root")
    wreck.flip(root / "300", "rank-00001.safetensors", 8 * 1500)
    with pytest.warns(CheckpointWarning, match=r"300 is not what was written:\n.*rank-00001[\s\S]*Taking .*200"):
        assert wreck.values(fs.checkpoint.restore(root, step)) == expected(200)
    (root / "200" / wreck.SEAL).unlink()
    with pytest.warns(CheckpointWarning) as caught:
        assert wreck.values(fs.checkpoint.restore(root, step)) == expected(100)
    told = [str(w.message) for w in caught if w.category is CheckpointWarning]
    assert len(told) == 2 and "rank-00001" in told[0] and wreck.SEAL in told[1] and "Taking" in told[1]
    assert fs.checkpoint.all_steps(root) == [100, 300]  # whole to look at: bytes are compared when read
    os.truncate(root / "100" / "rank-00000.safetensors", 5)
    assert fs.checkpoint.latest(root) == root / "300"
    with (
        pytest.warns(CheckpointWarning),
        pytest.raises(CheckpointError, match=r"300 is not[\s\S]*200 is not[\s\S]*100 is not"),
    ):
        fs.checkpoint.restore(root, step)


@pytest.mark.parametrize("how", wreck.BYTES)
def test_any_ruin_of_the_newest_is_passed_over(how: str, roots: Any, step: Any, tmp_path: Path) -> None:
    rng = random.Random(how)
    for name in sorted(p.name for p in (roots["two"] / "300").iterdir()):
        root = root_of(roots["two"], tmp_path / f"root {name}")
        wreck.BYTES[how](root / "300", name, rng)
        with pytest.warns(CheckpointWarning, match="300 is not what was written"):
            assert wreck.values(fs.checkpoint.restore(root, step)) == expected(200)


def test_the_only_one_of_a_root_says_what_is_wrong_with_it(roots: Any, step: Any, tmp_path: Path) -> None:
    wreck.copied(roots["one"] / "300", tmp_path / "300")
    os.truncate(tmp_path / "300" / "rank-00000.safetensors", 5)
    with pytest.raises(CheckpointError, match=r"300 is not what was written:\n.*rank-00000"):
        fs.checkpoint.restore(tmp_path, step)


@pytest.mark.parametrize("put", ["nothing", "empty", "file", "link"])
def test_what_is_no_checkpoint_at_all(put: str, step: Any, tmp_path: Path) -> None:
    path = tmp_path / "300"
    if put == "empty":
        path.mkdir()
    elif put == "file":
        path.write_text("a")
    elif put == "link":
        path.symlink_to("300")
    for look_at in (fs.checkpoint.restore, fs.checkpoint.restore_params):
        with pytest.raises(CheckpointError, match="there is no checkpoint at"):
            look_at(path, step)
    with pytest.raises(CheckpointError, match="300"):
        fs.checkpoint.verify(path)
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        fs.checkpoint.manifest(path)
    assert fs.checkpoint.all_steps(path) == [] and fs.checkpoint.latest(path) is None


def test_metrics_of_a_ruined_manifest_do_not_end_a_save(roots: Any, tmp_path: Path) -> None:
    """Pruning looks into all of a root; what is not whole is none of its business, and stays."""
    root = root_of(roots["one"], tmp_path / "root")
    for number, value in ((100, "low"), (200, None)):
        said = json.loads((root / str(number) / wreck.MANIFEST).read_bytes())
        said["metrics"] = {"loss": value}
        wreck.reseal(root / str(number), said)
    _, state = wreck.state_on(fs.make_mesh(shard=1, device="cpu"), 400)
    keep = fs.checkpoint.Keep(last=1, best=1)
    fs.checkpoint.save(root / "400", state, metrics={"loss": 5.0}, keep=keep)
    assert sorted(p.name for p in root.iterdir()) == ["100", "200", "300", "400"]
    assert fs.checkpoint.all_steps(root) == [300, 400]


# ------------------------------------------------------------------ two ranks


def both_look(rank: int, root: str, cases: list[str]) -> list[tuple[Any, ...]]:
    """Of each root: what came of it, and what was warned of."""
    small_blocks()
    mesh = fs.make_mesh(shard=2, device="cpu")
    made = wreck.step_on(mesh)[0]
    out = []
    for case in cases:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = told_by(fs.checkpoint.restore, Path(root) / case, made)
        told = [str(w.message) for w in caught if w.category is CheckpointWarning]
        out.append((got if isinstance(got, str) else _whole(got, made, mesh), told))
    return out


def _whole(state: Any, step: Any, mesh: fs.Mesh) -> dict[str, Any]:
    """The values of a sharded state."""
    params = fs.unshard(state.params, step.specs, mesh)
    slots: dict[str, dict[str, Any]] = {}
    for path, of_leaf in state.opt_state.items():
        spec, slots[path] = step.specs[path], {}
        for name, slot in of_leaf.items():
            by = {path: replace(spec, storage=spec.optimizer, storage_dtype=slot.dtype, optimizer_dtype=slot.dtype)}
            slots[path][name] = fs.unshard({path: slot}, by, mesh)[path]
    whole = fs.TrainState(state.step, params, slots, state.loss_scale, state.seed, data=state.data)
    return wreck.values(whole)


def test_two_ranks_fall_back_together(ranks: Any, roots: Any, tmp_path: Path) -> None:
    """Whatever the file, and whichever rank alone reads it."""
    cases = []
    for how in ("a run flipped", "truncated", "gone", "a pipe", "a link to zeros", "empty", "nested"):
        for name in sorted(p.name for p in (roots["two"] / "300").iterdir()):
            cases.append(f"{how} {name}")
            root = root_of(roots["two"], tmp_path / cases[-1])
            wreck.BYTES[how](root / "300", name, random.Random(1))
    for rank, found in enumerate(ranks(2).run(both_look, str(tmp_path), cases)):
        for case, (got, told) in zip(cases, found, strict=True):
            name = case.split()[-1]
            assert got == expected(200), case
            # Rank 0 alone tells it, and of both ranks.
            assert len(told) == (rank == 0) and all(name in line and "Taking" in line for line in told), told


def test_two_ranks_fail_together(ranks: Any, roots: Any, tmp_path: Path) -> None:
    for number in STEPS:
        root_of(roots["two"] / str(number), tmp_path / "root" / str(number))
        wreck.flip(tmp_path / "root" / str(number), "rank-00001.safetensors", 8 * 1500)
    found = ranks(2).run(both_look, str(tmp_path), ["root", "root/300", "nothing"])
    assert found[0][0][0] == found[1][0][0] and found[0][1] == found[1][1] and found[0][2] == found[1][2]
    assert "100 is not" in found[0][0][0] and "rank-00001" in found[0][1][0]
    assert "there is no checkpoint" in found[0][2][0]
