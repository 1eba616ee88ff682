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
from pathlib import Path
from typing import Any

import pytest
import torch
import wreck

import fnshard as fs
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
STRICT = ("step", "leaves", "files", "format", "mesh", "specs", "versions")


def resealed(changes: list[Change], pristine: Path, folder: Path, step: Any) -> None:
    """Each is an error, or, where it need not be, all tensors are as they were saved."""
    wreck.copied(pristine, folder)
    plain = json.loads((folder / wreck.MANIFEST).read_bytes())
    for at, value, must in changes:
        wreck.reseal(folder, wreck.replaced(plain, at, value))
        seen, got = look(folder, step)
        if must or isinstance(got, str):
            assert isinstance(got, str) and (wreck.MANIFEST in got or "rank-0000" in got), (at, value, got)
        else:
            same = {**expected(300), "data": got["data"], "seed": got["seed"]}
            assert got == same, (at, value)
        assert isinstance(seen, str) == isinstance(got, str), (at, value, seen, got)


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
    resealed(wreck.taken(changes, 700, seed=2), roots["two"] / "300", tmp_path / "300", step)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", [mistyped, off_by_some])
@pytest.mark.parametrize("by", ["one", "two"])
def test_every_manifest_that_cannot_be(by: str, kind: Any, roots: Any, step: Any, tmp_path: Path) -> None:
    changes = kind(json.loads((roots[by] / "300" / wreck.MANIFEST).read_bytes()))
    resealed(changes, roots[by] / "300", tmp_path / "300", step)
