"""Checkpoints whose bytes were ruined: an error names the file; nothing else is touched, read or run.

`verify_and_restore` gives what `verify` and `restore` return, or the messages of their errors.
"""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import corrupt
import pytest
from saved import CONFIG, MANIFEST, STEPS, is_known, verify_and_restore

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("short_blocks")]


def test_both_are_whole_to_begin_with(roots: dict[str, Path], restoring: Any) -> None:
    for root in roots.values():
        for number in STEPS:
            seen, got = verify_and_restore(root / str(number), restoring)
            assert seen.step == number and seen.metrics == {"loss": 1 / (number + 1)}
            assert seen.config == CONFIG
            assert is_known(got, number)
    assert len(json.loads((roots["two"] / "100" / MANIFEST).read_bytes())["files"]) == 2


# ------------------------------------------------------------------ bits and bytes
def check_flips(folder: Path, bits: list[tuple[str, int]], restoring: Any) -> None:
    """Assert that each flipped bit makes an error which names its file."""
    for name, bit in bits:
        corrupt.flip(folder, name, bit)
        for message in verify_and_restore(folder, restoring):
            assert isinstance(message, str) and name in message, (name, bit, message)
        corrupt.flip(folder, name, bit)
    assert is_known(verify_and_restore(folder, restoring)[1], 300)


@pytest.mark.suite({
    "one": "any byte of any file",
})  # fmt: skip
@pytest.mark.parametrize("by", ["one", "two"])
def test_a_flipped_bit_is_found_and_its_file_named(
    by: str, roots: Any, restoring: Any, tmp_path: Path
) -> None:
    """Flip 250 of them, half spread over the files, half over the bytes."""
    folder = corrupt.copy_pristine(roots[by] / "300", tmp_path / "300")
    check_flips(folder, corrupt.some_bits(folder, 250, seed=1), restoring)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_bit(roots: Any, restoring: Any, tmp_path: Path) -> None:
    folder = corrupt.copy_pristine(roots["two"] / "300", tmp_path / "300")
    check_flips(
        folder, [(p.name, b) for p in folder.iterdir() for b in range(8 * p.stat().st_size)], restoring
    )


def check_ruin(how: str, times: int, pristine: Path, folder: Path, restoring: Any) -> None:
    """Assert that each file, ruined `times` times, makes an error which names it."""
    for seed in range(times):
        rng = random.Random(f"{how} {seed}")
        for name in sorted(p.name for p in pristine.iterdir()):
            corrupt.copy_pristine(pristine, folder)
            changed = corrupt.BYTES[how](folder, name, rng) or [name]
            for message in verify_and_restore(folder, restoring):
                assert isinstance(message, str) and any(n in message for n in changed), (
                    how,
                    seed,
                    name,
                    message,
                )


@pytest.mark.suite({
    "a run flipped": "bytes that change",
    "a run moved": "bytes that change places",
    "longer by zeros": "a length",
    "a byte less": "a length",
    "empty": "nothing",
    "gone": "no file",
    "no text": "no JSON",
    "nested": "JSON too deep",
    "a link outside": "a link",
    "noise": "anything",
})  # fmt: skip
@pytest.mark.parametrize("how", corrupt.BYTES)
def test_a_ruined_file_is_found_and_named(how: str, roots: Any, restoring: Any, tmp_path: Path) -> None:
    """Ruin each file in turn, in each way of `corrupt.BYTES`, 6 times."""
    check_ruin(how, 6, roots["two"] / "300", tmp_path / "300", restoring)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("by", ["one", "two"])
@pytest.mark.parametrize("how", corrupt.BYTES)
def test_a_ruined_file_many_times(how: str, by: str, roots: Any, restoring: Any, tmp_path: Path) -> None:
    check_ruin(how, 200, roots[by] / "300", tmp_path / "300", restoring)


@pytest.mark.parametrize("name", ["manifest.json", "manifest.json.sha256", "rank-00001.safetensors"])
def test_a_file_of_another_checkpoint_is_found(name: str, roots: Any, restoring: Any, tmp_path: Path) -> None:
    folder = corrupt.copy_pristine(roots["two"] / "300", tmp_path / "300")
    shutil.copy(roots["two"] / "200" / name, folder / name)
    for message in verify_and_restore(folder, restoring):
        assert isinstance(message, str) and name in message


# ------------------------------------------------------------------ pickles
def test_a_pickle_in_any_place_is_never_run(roots: Any, restoring: Any, tmp_path: Path) -> None:
    marker, folder = tmp_path / "ran", tmp_path / "300"
    for kind, payload in corrupt.payloads(marker).items():
        if kind != "torch":
            pickle.loads(payload).close()
            assert marker.exists(), "the payload is none"
            marker.unlink()
        for name in sorted(p.name for p in (roots["two"] / "300").iterdir()):
            corrupt.copy_pristine(roots["two"] / "300", folder)
            (folder / name).write_bytes(payload)
            for message in verify_and_restore(folder, restoring):
                assert isinstance(message, str) and name in message
            if name == MANIFEST:  # sealed, too
                corrupt.reseal(folder, payload)
                assert isinstance(verify_and_restore(folder, restoring)[1], str)
        assert not marker.exists()


def test_files_that_do_not_belong_there_are_not_looked_at(roots: Any, restoring: Any, tmp_path: Path) -> None:
    marker, folder = tmp_path / "ran", corrupt.copy_pristine(roots["two"] / "300", tmp_path / "300")
    payload = corrupt.payloads(marker)["torch"]
    for name in (".metadata", "__0_0.distcp", "rank-00002.safetensors", "model.pt", "manifest.json.bak"):
        (folder / name).write_bytes(payload)
    (folder / "sub").symlink_to("/")
    seen, got = verify_and_restore(folder, restoring)
    assert is_known(got, 300) and seen.step == 300 and not marker.exists()


# ------------------------------------------------------------------ manifests whose seal fits
def restore_edited(edit: Callable[[Any], Any], root: Path, folder: Path, restoring: Any) -> tuple[Any, Any]:
    """Return what `verify_and_restore` gives of a checkpoint whose manifest `edit` has changed."""
    manifest = json.loads((corrupt.copy_pristine(root / "300", folder) / MANIFEST).read_bytes())
    new = edit(manifest)
    corrupt.reseal(folder, manifest if new is None else new)
    return verify_and_restore(folder, restoring)


def lacks_a_chunk(manifest: Any) -> None:
    manifest["leaves"]["params/layers.0.b"]["chunks"].pop()


def twice_the_same_chunk(manifest: Any) -> None:
    chunks = manifest["leaves"]["params/embed.w"]["chunks"]
    chunks[1] = {**chunks[0]}


def a_chunk_in_no_file(manifest: Any) -> None:
    manifest["files"].pop("rank-00001.safetensors")


def chunks_of_other_dims(manifest: Any) -> None:
    manifest["leaves"]["params/embed.w"]["chunks"][0]["offset"].append(0)


def a_chunk_outside(manifest: Any) -> None:
    manifest["leaves"]["params/embed.w"]["chunks"][1]["offset"][0] += 1


def a_chunk_over_another(manifest: Any) -> None:
    """Move rows over others, so that there are as many numbers as before, and a row in no chunk."""
    manifest["leaves"]["params/embed.w"]["chunks"][1]["offset"][0] -= 1


def a_checksum_less(manifest: Any) -> None:
    manifest["leaves"]["params/embed.w"]["chunks"][0]["crc32"].pop()


def no_shape_of_a_tensor(manifest: Any) -> None:
    manifest["leaves"]["params/embed.w"].update(shape=[0, 1 << 62, 1 << 62], chunks=[])


def of_another_format(manifest: Any) -> None:
    manifest.update(format="fnshard checkpoint 4")


@pytest.mark.parametrize(
    "edit",
    [
        lacks_a_chunk,
        twice_the_same_chunk,
        a_chunk_in_no_file,
        chunks_of_other_dims,
        a_chunk_outside,
        a_chunk_over_another,
        a_checksum_less,
        no_shape_of_a_tensor,
        of_another_format,
    ],
)
def test_a_manifest_that_does_not_add_up_is_refused(
    edit: Any, roots: Any, restoring: Any, tmp_path: Path
) -> None:
    for message in restore_edited(edit, roots["two"], tmp_path / "300", restoring):
        assert isinstance(message, str) and MANIFEST in message


@pytest.mark.parametrize(
    "position",
    [
        {"__is__": "nothing", "of": 1},
        {"__is__": "tuple"},
        {"__is__": "tuple", "of": 5},
        {"__is__": []},
        {"__is__": "bytes", "of": 7},
        {"__is__": "tensor", "of": ["F32", [3], "AAAA"]},
        {"__is__": "tensor", "of": ["F32", [0, 1 << 62, 1 << 62], ""]},
        {"__is__": "tensor", "of": ["F99", [1], "AAAAAA=="]},
        {"__is__": "array", "of": {"__is__": "tensor", "of": ["BF16", [1], "AAA="]}},
        {"__is__": "array", "of": 3},
        {"__is__": "items", "of": [[[1], 2]]},
        {"deep": {"__is__": "items", "of": [1]}},
    ],
    ids=repr,
)
def test_a_position_that_cannot_be_read_is_refused(
    position: Any, roots: Any, restoring: Any, tmp_path: Path
) -> None:
    def edit(manifest: Any) -> None:
        manifest["data"] = [position]

    for message in restore_edited(edit, roots["two"], tmp_path / "300", restoring):
        assert isinstance(message, str) and MANIFEST in message and "data: no position" in message


def test_a_configuration_that_cannot_be_read_is_refused(roots: Any, restoring: Any, tmp_path: Path) -> None:
    def edit(manifest: Any) -> None:
        manifest["config"] = {"deep": {"__is__": "nothing", "of": 1}}

    for message in restore_edited(edit, roots["two"], tmp_path / "300", restoring):
        assert isinstance(message, str) and MANIFEST in message and "config:" in message


@pytest.mark.parametrize("name", ["../300/rank-00000.safetensors", "/etc/passwd", MANIFEST])
def test_no_other_file_is_opened(name: str, roots: Any, restoring: Any, tmp_path: Path) -> None:
    def named(manifest: Any) -> Any:
        return json.loads(json.dumps(manifest).replace("rank-00000.safetensors", name))

    for message in restore_edited(named, roots["two"], tmp_path / "300", restoring):
        assert isinstance(message, str) and "is no name of a data file" in message


@pytest.mark.parametrize("leaf", ["params/scale", "optimizer/layers.0.b/mu"])
def test_a_leaf_that_is_missing_or_not_asked_for_is_named(
    leaf: str, roots: Any, restoring: Any, tmp_path: Path
) -> None:
    def renamed(manifest: Any) -> None:
        manifest["leaves"][f"{leaf}.more" if leaf[0] == "p" else f"{leaf}more"] = manifest["leaves"].pop(leaf)

    _, got = restore_edited(renamed, roots["two"], tmp_path / "300", restoring)
    assert f"{leaf} [" in got and "is not in the checkpoint" in got and "is in the checkpoint alone" in got


@pytest.mark.parametrize("dtype", ["I32", "BOOL"])
def test_numbers_of_another_kind_are_not_cast(dtype: str, roots: Any, restoring: Any, tmp_path: Path) -> None:
    def edit(manifest: Any) -> None:
        manifest["leaves"]["params/frozen"]["dtype"] = dtype

    _, got = restore_edited(edit, roots["two"], tmp_path / "300", restoring)
    assert f"params/frozen is torch.bfloat16 here and {dtype} there" in got
