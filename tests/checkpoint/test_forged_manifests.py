"""Checkpoints with a forged manifest and a seal that fits: an error, or harmless; memory stays small."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import corrupt
import forged
import pytest
from forged import EDITS
from saved_states import MANIFEST, expected, outcome, restored

import fnshard as fs
from fnshard import LayoutSpec

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("short_blocks")]

Change = tuple[forged.Where, Any, bool]  # where, what stands there now, whether that must be an error
SIGNS = (MANIFEST, "rank-0000", "of another model")
STRICT = ("step", "leaves", "files", "format", "mesh", "specs", "versions")


def resealed(changes: list[Change], pristine: Path, folder: Path, restoring: Any) -> None:
    """Each is an error, or, where it need not be, all tensors are as they were saved.

    What `verify` cannot know is that a checkpoint is of another model.
    """
    corrupt.copied(pristine, folder)
    plain = json.loads((folder / MANIFEST).read_bytes())
    for at, value, must in changes:
        forged.reseal(folder, forged.replaced(plain, at, value))
        seen, got = restored(folder, restoring)
        if must or isinstance(got, str):
            assert isinstance(got, str) and any(sign in got for sign in SIGNS), (at, value, got)
        else:
            same = {**expected(300), "data": got["data"], "seed": got["seed"]}
            assert got == same, (at, value)
        assert isinstance(seen, str) == (isinstance(got, str) and SIGNS[2] not in got), (at, value, seen, got)


def mistyped(manifest: Any) -> list[Change]:
    out = []
    for at, value in forged.nodes(manifest):
        must = at[0] in STRICT or (at[0] == "metrics" and type(value) is not float) or at == ("data",)
        out += [(at, wrong, must) for wrong in forged.wrong_for(value)]
    return out


def off_by_some(manifest: Any) -> list[Change]:
    """Numbers of leaves and files that are numbers, but others."""
    numbers = [(a, v) for a, v in forged.nodes(manifest) if type(v) is int and a[0] in ("leaves", "files")]
    return [(a, v + by, True) for a, v in numbers for by in (-1, 1, 8, 1 << 40)]


def bereft(manifest: Any) -> list[Change]:
    """Without one of its values; a master copy that is missing is made of the parameter, as is meant."""
    needed = ("step", "seed", "leaves", "files", "format")
    places = [at for at, _ in forged.nodes(manifest) if not str(at[-1]).endswith("/master")]
    return [(at, forged.NOTHING, at[0] in needed or len(at) == 1) for at in places]


def one_of_each(changes: list[Change]) -> list[Change]:
    """Of all leaves, files and places in lists one, for each field and each value that stands in it."""
    chosen: dict[Any, list[Change]] = {}
    for at, value, must in changes:
        alike = tuple("*" if type(k) is int or (i == 1 and at[0] != "mesh") else k for i, k in enumerate(at))
        shown = "number" if type(value) is int and value > 3 and value < 1 << 62 else repr(value)
        chosen.setdefault((alike, shown), []).append((at, value, must))
    rng = random.Random(0)
    return [rng.choice(each) for each in chosen.values()]


@pytest.mark.parametrize("kind", [mistyped, off_by_some, bereft])
def test_a_manifest_that_cannot_be_is_told(kind: Any, roots: Any, restoring: Any, tmp_path: Path) -> None:
    changes = kind(json.loads((roots["two"] / "300" / MANIFEST).read_bytes()))
    some = one_of_each(changes) if kind is mistyped else random.Random(1).sample(changes, 300)
    resealed(some, roots["two"] / "300", tmp_path / "300", restoring)


def edited(
    edit: Callable[[dict[str, Any]], Any], root: Path, folder: Path, restoring: Any
) -> tuple[Any, Any]:
    """What comes of a checkpoint whose manifest `edit` has changed."""
    corrupt.copied(root / "300", folder)
    manifest = json.loads((folder / MANIFEST).read_bytes())
    new = edit(manifest)
    forged.reseal(folder, manifest if new is None else new)
    return restored(folder, restoring)


@pytest.mark.parametrize("what", EDITS)
def test_a_manifest_that_lies_is_told(what: str, roots: Any, restoring: Any, tmp_path: Path) -> None:
    """By `verify`, by `restore` for a step, and for specs that take shapes from the checkpoint."""
    loose = {path: LayoutSpec() for path in restoring.specs}
    here = fs.make_mesh(shard=1, device="cpu")
    edit = EDITS[what]
    for message in (
        *edited(edit, roots["two"], tmp_path / "300", restoring),
        outcome(fs.checkpoint.restore, tmp_path / "300", loose, here),
    ):
        assert isinstance(message, str) and any(sign in message for sign in SIGNS), message


@pytest.mark.parametrize("leaf", ["params/gain", "optimizer/bias/mu", "optimizer/wide.weight/nu"])
def test_a_leaf_that_is_missing_or_not_asked_for_is_named(
    leaf: str, roots: Any, restoring: Any, tmp_path: Path
) -> None:
    """Nothing in the checkpoint itself is wrong then, so `verify` has nothing to say."""
    _, got = edited(
        lambda manifest: manifest["leaves"].pop(leaf) and None, roots["two"], tmp_path / "300", restoring
    )
    assert f"{leaf} [" in got and "is not in the checkpoint" in got

    def renamed(manifest: Any) -> None:
        manifest["leaves"][f"{leaf}.more" if leaf[0] == "p" else f"{leaf}more"] = manifest["leaves"].pop(leaf)

    _, got = edited(renamed, roots["two"], tmp_path / "300", restoring)
    assert f"{leaf} [" in got and "is in the checkpoint alone" in got


@pytest.mark.parametrize("dtype", ["I32", "U32", "I8", "BOOL"])
def test_numbers_of_another_kind_are_not_cast(dtype: str, roots: Any, restoring: Any, tmp_path: Path) -> None:
    def edit(manifest: Any) -> None:
        assert manifest["leaves"]["params/gain"]["dtype"] == "F32"
        manifest["leaves"]["params/gain"]["dtype"] = dtype

    _, got = edited(edit, roots["two"], tmp_path / "300", restoring)
    assert f"params/gain is torch.float32 here and {dtype} there" in got


def test_a_header_as_long_as_a_large_file_is_not_held(roots: Any, restoring: Any, tmp_path: Path) -> None:
    folder, name = corrupt.copied(roots["two"] / "300", tmp_path / "300"), "rank-00002.safetensors"
    (folder / name).touch()
    os.truncate(folder / name, 1 << 30)
    manifest = json.loads((folder / MANIFEST).read_bytes())
    manifest["files"][name] = {"bytes": 1 << 30, "header_bytes": 1 << 30, "header_crc32": 0}
    forged.reseal(folder, manifest)
    for message in restored(folder, restoring):
        assert isinstance(message, str) and name in message
