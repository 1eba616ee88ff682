"""Weights out of and into safetensors files: slices, pieces, memory, dtypes, names; what does not fit; and
failures, of all ranks together."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from errors import raises
from torch import Tensor, nn
from weights import MESHES, PARAMS, same, shard_weights, tensors_of, tree_of

import fnshard as fs
from fnshard import LayoutSpec, P
from fnshard.errors import CheckpointError, StateError
from fnshard.hf import reading, writing
from fnshard.runtime import coordination
from fnshard.runtime.collectives.connect import connection
from fnshard.runtime.collectives.simulated import Simulated

safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.usefixtures("nothing_is_left_open")


# ------------------------------------------------------------------ slices and pieces


@pytest.mark.parametrize("layout", [P("shard"), P(None, "shard")])
def test_a_rank_reads_its_own_slices_alone(tmp_path: Path, layout: P) -> None:
    """An eighth of the file, as views of its map; no block is made but the rank's own."""
    params = {f"layers.{i}.w": torch.randn(16, 24) for i in range(3)}
    safetensors.save_file(params, tmp_path / "model.safetensors")
    mesh = fs.make_mesh(shard=8, abstract=True)
    specs = fs.match_specs(params, [("*", LayoutSpec(layout))])
    viewed = []
    plain = reading.LeafSource.read

    def counted(self: reading.LeafSource, slices: Any) -> Tensor:
        viewed.append(plain(self, slices))
        return viewed[-1]

    with mock.patch.object(reading.LeafSource, "read", counted):
        blocks = fs.hf.load(tmp_path, specs, mesh)
    same(blocks, fs.shard(params, specs, mesh))
    assert sum(view.nbytes for view in viewed) == sum(v.nbytes for v in params.values()) // 8
    assert not any(block.data_ptr() == view.data_ptr() for block in blocks.values() for view in viewed)


@pytest.mark.parametrize("layout", [P("shard"), P(None, "shard"), P()])
def test_a_leaf_is_gathered_a_piece_at_a_time(layout: P) -> None:
    """No rank sends more than 128 bytes of a leaf of 4 KiB at once; it is cast on arrival."""
    params = {"w": torch.randn(64, 16)}
    mesh = fs.make_mesh(shard=2, simulated=True)
    specs = fs.match_specs(params, [("*", LayoutSpec(layout))])
    sent = []
    plain = Simulated.send_buffer

    def counted(self: Any, numel: int, dtype: torch.dtype, axes: Any, rows: int = 1) -> Tensor:
        sent.append(rows * numel * dtype.itemsize)
        return plain(self, numel, dtype, axes, rows)

    def run(rank: int) -> Tensor | None:
        whole = torch.full((64, 16), float("nan"), dtype=torch.bfloat16) if rank else None
        block = fs.shard(params, specs, mesh)["w"]
        writing.gather_leaf(block, specs["w"], mesh, connection(mesh), whole)
        return whole

    with mock.patch.object(writing, "PIECE_BYTES", 256), mock.patch.object(Simulated, "send_buffer", counted):
        _, whole = fs.simulate(mesh, run)
    assert torch.equal(whole, params["w"].bfloat16())
    assert sent == ([] if layout == P() else [128] * 32)


# ------------------------------------------------------------------ in and out


@pytest.mark.parametrize(
    ("axes", "policy"),
    [*((axes, {}) for axes in MESHES), *((MESHES[3], {"memory": tier}) for tier in ("host", "disk"))],
    ids=str,
)
def test_loaded_and_saved_again_is_bitwise_the_same(tmp_path: Path, axes: Any, policy: Any) -> None:
    """Several files in, several others out; pieces of a few rows."""
    parts = [dict(list(PARAMS.items())[:4]), dict(list(PARAMS.items())[4:])]
    (tmp_path / "in").mkdir()
    for number, part in enumerate(parts):
        safetensors.save_file(part, tmp_path / f"in/part-{number}.safetensors", {"format": "pt"})
    weight_map = {n: f"part-{number}.safetensors" for number, part in enumerate(parts) for n in part}
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    mesh = fs.make_mesh(**axes, simulated=True)
    specs = shard_weights(mesh, **policy)

    def run(rank: int) -> Any:
        blocks = fs.hf.load(tmp_path / "in", specs, mesh, disk_dir=str(tmp_path))
        same(blocks, fs.shard(PARAMS, specs, mesh, disk_dir=str(tmp_path)))
        fs.hf.save(blocks, tmp_path / "out", specs, mesh, max_file_bytes=300)

    with mock.patch.object(writing, "PIECE_BYTES", 64):
        fs.simulate(mesh, run)
    same(tensors_of(tmp_path / "out"), PARAMS)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = {f: safetensors.load_file(tmp_path / "out" / f) for f in set(index["weight_map"].values())}
    assert all(name in files[file] for name, file in index["weight_map"].items())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in PARAMS.values())
    count = len(files)
    assert sorted(files) == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert count > 2
    for tensors in files.values():
        assert len(tensors) == 1 or sum(v.nbytes for v in tensors.values()) <= 300
    assert not list(tmp_path.glob(".*"))


def test_a_directory_is_needed_where_parameters_rest_on_disk(tmp_path: Path) -> None:
    params = {"w": torch.ones(4)}
    safetensors.save_file(params, tmp_path / "model.safetensors")
    on_disk = fs.match_specs(params, [("*", LayoutSpec(memory="disk"))])
    with raises(StateError, leaves="params['w']", fix=["disk_dir=", "memory='host'"], says="1 leaf"):
        fs.hf.load(tmp_path, on_disk)
    same(fs.hf.load(tmp_path, on_disk, disk_dir=str(tmp_path)), params)
    same(fs.hf.load(tmp_path, fs.match_specs(params, [("*", LayoutSpec(optimizer_memory="disk"))])), params)


def test_one_file_if_it_fits_and_floats_cast(tmp_path: Path) -> None:
    mesh = fs.make_mesh(shard=2, simulated=True)
    specs = shard_weights(mesh)

    def run(rank: int) -> Any:
        blocks = fs.shard(PARAMS, specs, mesh)
        fs.hf.save(blocks, tmp_path / "m", specs, mesh, dtype=torch.float16, config={"model_type": "none"})
        wide = fs.match_specs(PARAMS, [("*", LayoutSpec(P(), storage_dtype=torch.float64))])
        return fs.hf.load(tmp_path / "m", wide, mesh)

    wanted = {n: v.half() if v.is_floating_point() else v for n, v in PARAMS.items()}
    for got in fs.simulate(mesh, run):
        same(got, {n: v.double() if v.is_floating_point() else v for n, v in wanted.items()})
    same(tensors_of(tmp_path / "m"), wanted)
    assert sorted(os.listdir(tmp_path / "m")) == ["config.json", "model.safetensors"]
    with safetensors.safe_open(tmp_path / "m/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert json.loads((tmp_path / "m/config.json").read_text()) == {"model_type": "none"}


def test_all_files_of_a_directory_but_weights_and_what_is_no_models_are_copied(tmp_path: Path) -> None:
    """Code is copied where a configuration names it; nothing runs it here."""
    mesh = fs.make_mesh(shard=1)
    specs = fs.match_specs(PARAMS, [("*", LayoutSpec())])
    blocks = fs.shard(PARAMS, specs, mesh)
    tokenizers = {
        "tokenizer.json", "tokenizer.model", "vocab.txt", "merges.txt", "spiece.model", "spm.model",
        "source.spm", "target.spm", "sentencepiece.bpe.model", "tekken.json", "bpe.codes",
    }  # fmt: skip
    left = {"pytorch_model.bin", "model.safetensors", "README.md", "notes.json"}
    code = {"modeling_own.py", "configuration_own.py"}
    (tmp_path / "from").mkdir()
    for name in tokenizers | left | code:
        (tmp_path / "from" / name).write_text(name)

    own = {"auto_map": {"AutoModel": "modeling_own.Own"}}
    for number, (config, tokenizer) in enumerate([({}, {}), (own, {}), ({}, own)]):
        (tmp_path / "from" / "config.json").write_text(json.dumps(config))
        (tmp_path / "from" / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=1))
        out = tmp_path / str(number)
        fs.hf.save(blocks, out, specs, mesh, config=tmp_path / "from")
        names = {path.name for path in out.iterdir()} - {"config.json", "tokenizer_config.json"}
        assert names == tokenizers | {"model.safetensors"} | (code if number else set())
        assert all((out / name).read_text() == name for name in names - {"model.safetensors"})


@pytest.mark.parametrize("layout", [P("shard"), P(None, "shard"), P(None, None, "shard")])
def test_a_rank_without_an_expert_or_a_row_of_one(tmp_path: Path, layout: P) -> None:
    """Of three experts of two rows and three columns, the last of four ranks has nothing."""
    prefix = "model.layers.0.mlp.experts"
    params = tree_of(gate_up_proj=(3, 2, 3), down_proj=(3, 3, 1))
    files = {}
    for number in range(3):
        gate, up = params["gate_up_proj"][number].chunk(2)
        down = params["down_proj"][number]
        for name, part in {"gate_proj": gate, "up_proj": up, "down_proj": down}.items():
            files[f"{prefix}.{number}.{name}.weight"] = part.contiguous()
    safetensors.save_file(files, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    params = {f"{prefix}.{name}": leaf for name, leaf in params.items()}
    mesh = fs.make_mesh(shard=4, simulated=True)
    specs = fs.match_specs(params, [("*", LayoutSpec(layout))])
    fs.simulate(mesh, lambda rank: same(fs.hf.load(tmp_path, specs, mesh), fs.shard(params, specs, mesh)))


def test_names_and_transposes_both_ways(tmp_path: Path) -> None:
    """A dict, or a function, from paths to names; what it leaves out is called by its path."""
    mesh = fs.make_mesh(shard=2, simulated=True)
    params = {n: PARAMS[n] for n in ("embed", "layers.0.w", "layers.0.b", "layers.1.w")}
    specs = shard_weights(mesh, params)
    names = {"layers.0.w": fs.hf.Transposed("h.0.c.weight"), "embed": "wte"}

    def numbered(path: str) -> Any:
        return names.get(path)

    def run(rank: int) -> Any:
        blocks = fs.shard(params, specs, mesh)
        fs.hf.save(blocks, tmp_path / "m", specs, mesh, names=names)
        got = fs.hf.load(tmp_path / "m", specs, mesh, names=numbered)
        same(got, blocks)

    fs.simulate(mesh, run)
    wanted = {"h.0.c.weight": params["layers.0.w"].t(), "wte": params["embed"]}
    same(tensors_of(tmp_path / "m"), wanted | {n: params[n] for n in ("layers.0.b", "layers.1.w")})


def test_what_a_step_does_not_adopt() -> None:
    params = {"w": torch.randn(5, 3)}
    mesh = fs.make_mesh(shard=2, abstract=True)
    specs = fs.presets.full_shard(params, mesh)
    step = fs.shard_step(lambda p: p["w"].sum(), specs, mesh=mesh, optimizer=fs.optim.sgd(0.1))
    with raises(StateError, leaves="params['w'] is [5, 3]", says="block [3, 3]"):
        step.adopt(params)
    with raises(fs.SpecError, leaves="params['v']"):
        step.adopt({"v": params["w"]})
    with raises(StateError, leaves="seed=True"):
        step.adopt(fs.shard(params, specs, mesh), seed=True)


def processes(rank: int, folder: str, world: int) -> int:
    """Load and save on a group; return the bytes that a save of blocks of 96 MiB took besides them."""
    into, mesh = Path(folder), fs.make_mesh(shard=world, device="cpu")
    specs = shard_weights(mesh)
    blocks = fs.hf.load(into / "in", specs, mesh)
    same(blocks, fs.shard(PARAMS, specs, mesh))
    fs.hf.save(blocks, into / "out", specs, mesh, max_file_bytes=400)
    shapes = {f"{i}.w": (2048, 4096) if i % 2 else (1024, 8192) for i in range(6)}  # 32 MiB each
    meta = {n: torch.empty(shape, device="meta") for n, shape in shapes.items()}
    specs = fs.match_specs(meta, [("[135].*", LayoutSpec(P("shard"))), ("*", LayoutSpec(P(None, "shard")))])
    big = {n: torch.full((1024, 4096), float(rank)) for n in shapes}
    with mock.patch.object(writing, "PIECE_BYTES", 1 << 20):
        before = peak(reset=True)
        fs.hf.save(big, into / "big", specs, mesh)
        saving = peak() - before
    same(fs.hf.load(into / "big", specs, mesh), big)
    return saving


def peak(*, reset: bool = False) -> int:
    """Return the most memory that this process has had, in bytes; with `reset` count anew from here."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))


def test_processes_write_what_simulated_ranks_do_a_leaf_at_a_time(ranks: Any, tmp_path: Path) -> None:
    """Leaves are of 32 MiB: rank 0 has less than two besides its own blocks."""
    (tmp_path / "in").mkdir()
    safetensors.save_file(PARAMS, tmp_path / "in/model.safetensors")
    for saving in ranks(2).run(processes, str(tmp_path), 2):
        assert saving < 64 << 20, f"{saving >> 20} MiB"
    same(tensors_of(tmp_path / "out"), PARAMS)
    for name, value in tensors_of(tmp_path / "big").items():
        zeros, ones = value.chunk(2, dim=0 if int(name[0]) % 2 else 1)
        assert bool((zeros == 0).all() and (ones == 1).all()), name


# ------------------------------------------------------------------ what does not fit


def test_all_that_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    given = tree_of(a=(2, 3), b=(4, 3), c=((3,), torch.float8_e4m3fn), d=(3,), extra=(1,), other=(2,))
    safetensors.save_file(given, tmp_path / "model.safetensors")
    params = tree_of(a=(2, 3), b=(3, 4), c=(3,), d=((3,), torch.int64), gone=(5,), buffer=(2,))
    specs = fs.match_specs(params, [("*", LayoutSpec())])
    with pytest.raises(StateError) as raised:
        fs.hf.load(tmp_path, specs, missing={"buffer": torch.ones(3), "a": given["a"], "zzz": given["a"]},
                   ignore=["other", "nothing*"])  # fmt: skip
    message = str(raised.value)
    for line in (
        "files and specs do not fit each other, 9 problems:",
        "params['gone'] [5]: no tensor 'gone'",
        "'extra' [1] torch.float32 in model.safetensors: no leaf takes it",
        "params['b'] [3, 4]: 'b' is [4, 3] torch.float32 in model.safetensors (its transpose would fit)",
        "params['c'] is stored as torch.float32: 'c' is [3] torch.float8_e4m3fn",
        "params['d'] is stored as torch.int64: 'd' is [3] torch.float32",
        "params['buffer'] [2]: the value given is [3]",
        "missing['a']: the files have it, as 'a'",
        "missing['zzz']: no such leaf",
        "ignore='nothing*' matches no tensor",
        "Fix: a leaf that is called otherwise: names=",
        "ignore=[globs of names]",
        "fs.hf.Transposed(name)",
    ):
        assert line in message, (line, message)
    assert "'other'" not in message
    with raises(StateError, leaves=["names=", "'nope'"], fix="paths of the parameter tree"):
        fs.hf.load(tmp_path, specs, names={"nope": "a"})
    with raises(StateError, leaves="params['a']", fix="fs.hf.Transposed", says="int"):
        fs.hf.load(tmp_path, specs, names=lambda path: 3)
    with raises(StateError, fix="match_specs", says="1 leaf"):
        fs.hf.load(tmp_path, {"a": LayoutSpec()})


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch $BOMB",)


def header(**entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def index(**where: Any) -> str:
    return json.dumps({"weight_map": where})


MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
GOOD = header(w=F32) + bytes(8)
MALFORMED: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "nothing": ({}, ["model.safetensors", "model.safetensors.index.json"], "snapshot_download"),
    "pickles": ({"pytorch_model.bin": pickle.dumps(Bomb())}, ["pytorch_model.bin"], "load_torch"),
    "pickled_safetensors": ({MODEL: pickle.dumps(Bomb())}, ["'model.safetensors'", "header"], "copy them"),
    "another_file": ({"adapter.safetensors": GOOD}, ["adapter.safetensors"], "one of these files"),
    "truncated": ({MODEL: GOOD[:-1]}, ["'model.safetensors'"], "copy them"),
    "negative": ({MODEL: header(w={**F32, "shape": [-2]}) + bytes(8)}, ["'model.safetensors'"], "copy them"),
    "unknown_dtype": ({MODEL: header(w={**F32, "dtype": "X9"}) + bytes(8)}, ["'model.safetensors'", "X9"],
        "copy them"),
    "dtype_not_of_torch": (
        {MODEL: header(w={**F32, "dtype": "F8_E8M0", "data_offsets": [0, 2]}) + bytes(2)},
        ["'w'", "F8_E8M0"], "copy them",
    ),
    "a_directory": ({MODEL: None}, ["'model.safetensors'", "no such file"], "copy them"),
    "index_no_json": ({INDEX: "{"}, ["index.json"], "copy it"),
    "index_a_list": ({INDEX: "[]"}, ["index.json", "JSON object"], "copy it"),
    "index_of_numbers": ({INDEX: index(w=3)}, ["index.json", "weight_map"], "copy it"),
    "index_outside": ({INDEX: index(w="../x.safetensors")}, ["'../x.safetensors'", "no name"], "copy them"),
    "index_absolute": ({INDEX: index(w="/x.safetensors")}, ["'/x.safetensors'", "no name"], "copy them"),
    "index_gone": ({INDEX: index(w="a.safetensors")}, ["'a.safetensors'", "no such file"], "copy them"),
    "index_wrong": (
        {INDEX: index(w="a.safetensors", v="a.safetensors"), "a.safetensors": GOOD},
        ["the index", "'v'"], "copy them",
    ),
    "twice": (
        {INDEX: index(w="a.safetensors", v="b.safetensors"), "a.safetensors": GOOD,
         "b.safetensors": GOOD},
        ["'w'", "a.safetensors", "b.safetensors"], "copy them",
    ),
    "broken_config": ({MODEL: GOOD, "config.json": "{"}, ["config.json"], "copy it"),
}  # fmt: skip


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_directory_is_told(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOMB", str(tmp_path / "ran"))
    files, leaves, fix = MALFORMED[what]
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "x.safetensors").write_bytes(GOOD)
    for name, content in files.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    specs = fs.match_specs({"w": torch.zeros(2)}, [("*", LayoutSpec())])
    with raises(StateError, leaves=leaves, fix=fix):
        fs.hf.load(folder, specs)
    assert not (tmp_path / "ran").exists()


def test_links_of_a_cache_and_single_files_are_read_and_names_on_a_hub_are_not(tmp_path: Path) -> None:
    specs = fs.match_specs({"w": torch.zeros(2)}, [("*", LayoutSpec())])
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "blobs/1").write_bytes(GOOD)
    (tmp_path / "snapshot/model.safetensors").symlink_to("../blobs/1")
    assert torch.equal(fs.hf.load(tmp_path / "snapshot", specs)["w"], torch.zeros(2))
    assert torch.equal(fs.hf.load(tmp_path / "snapshot/model.safetensors", specs)["w"], torch.zeros(2))
    with raises(StateError, leaves="someone/a-model", fix="snapshot_download"):
        fs.hf.load("someone/a-model", specs)


# ------------------------------------------------------------------ what cannot be written


class Full:
    """A file system that takes so many calls, and then no more."""

    def __init__(self, calls: int, plain: Callable[..., Any]):
        self.left, self.plain = calls, plain

    def __call__(self, *args: Any, **how: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.plain(*args, **how)


@pytest.mark.parametrize(("call", "after"), [("pwrite", 0), ("pwrite", 8), ("fsync", 0), ("replace", 0)])
def test_a_full_disk_fails_all_ranks_and_leaves_nothing(tmp_path: Path, call: str, after: int) -> None:
    mesh = fs.make_mesh(shard=2, simulated=True)
    messages: list[tuple[int, str]] = []

    def run(rank: int) -> None:
        try:
            specs = shard_weights(mesh)
            blocks = fs.shard(PARAMS, specs, mesh)
            fs.hf.save(blocks, tmp_path / "out", specs, mesh, max_file_bytes=400, config={"model_type": "x"})
        except (CheckpointError, StateError) as error:
            messages.append((rank, str(error)))

    with mock.patch.object(os, call, Full(after, getattr(os, call))):
        fs.simulate(mesh, run)
    assert sorted(rank for rank, _ in messages) == [0, 1]
    for _, text in messages:
        assert "No space left on device" in text or "is full" in text, text
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").write_text("")
    messages, tmp_path = [], tmp_path / "file"  # where no folder can be made
    fs.simulate(mesh, run)
    assert sorted(rank for rank, _ in messages) == [0, 1]
    for _, text in messages:
        assert "rank 0: " in text and ("Not a directory" in text or "File exists" in text)


def naming(rank: int, folder: str) -> str:
    """Save with other names on one rank of a process group; return the error's message."""
    mesh = fs.make_mesh(shard=2, device="cpu")
    specs, names = shard_weights(mesh), {"embed": "other"} if rank == 1 else None
    with pytest.raises(fs.AgreementError) as raised:
        fs.hf.save(fs.shard(PARAMS, specs, mesh), Path(folder) / "out", specs, mesh, names=names)
    return str(raised.value)


def test_ranks_that_name_leaves_otherwise_save_nothing(ranks: Any, tmp_path: Path) -> None:
    for text in ranks(2).run(naming, str(tmp_path), timeout=60.0):
        assert "rank(s) 1 mean another file or other leaves" in text
    assert os.listdir(tmp_path) == []


def loading(rank: int, folder: str, how: str) -> str:
    """Load with one rank at odds; return the error's message, after a collective of both ranks."""
    mesh = fs.make_mesh(shard=2, device="cpu")
    shapes = {"w": torch.empty(6, 70, device="meta"), "b": torch.empty(4, device="meta")}
    coded = LayoutSpec(P("shard"), codec="nf4", trainable=False)
    specs = fs.match_specs(shapes, [("w", coded), ("b", LayoutSpec(P("shard")))])
    alone = rank == 1
    path = Path(folder) / ("nowhere" if how == "files" and alone else "bad" if how == "values" else "good")
    more: dict[str, Any] = {"names": {"other": "x"}} if how == "names" and alone else {}
    if how == "specs" and alone:
        specs = {"w": coded, "b": LayoutSpec()}  # of unknown shapes
    message = "no error"
    try:
        fs.hf.load(path, specs, mesh, **more)
    except fs.FnshardError as error:
        message = f"{type(error).__name__}: {error}"
    connection(mesh).gather_object("")
    return message


def test_ranks_refuse_what_is_loaded_together(ranks: Any, tmp_path: Path) -> None:
    """Each sees its own slices alone: a rank that went on would wait for the other."""
    values = {"w": torch.ones(6, 70), "b": torch.ones(4)}
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
        safetensors.save_file(values, tmp_path / name / "model.safetensors")
        values["w"][5, 69] = math.nan  # in the slice of rank 1
    for how, says in {
        "values": "StateError: 1 leaf cannot be coded: inf, nan or too large for fp32 are",
        "files": "StateError: no weights in",
        "names": "StateError: names= has paths of no leaf",
        "specs": "StateError: the specs do not know the full shapes of 2 leaves",
    }.items():
        zero, one = ranks(2).run(loading, str(tmp_path), how, timeout=60.0)
        assert one.startswith(says), one
        assert zero.startswith("CheckpointError: loading '") and f"rank 1: {says}" in zero, zero
    assert ranks(2).run(loading, str(tmp_path), "", timeout=60.0) == ["no error"] * 2


def test_a_peer_that_is_lost_is_told_at_once() -> None:
    """Nobody waits for it once more to say so."""

    class Lost:
        def gather_object(self, text: str) -> list[str]:
            raise AssertionError("there is no peer")

    def work() -> None:
        raise fs.CollectiveError("rank 1 is gone")

    with raises(fs.CollectiveError, leaves="rank 1"):
        coordination.all_or_none(Lost().gather_object, "saving", work)


def test_what_is_there_is_not_touched_and_leftovers_are(tmp_path: Path) -> None:
    mesh = fs.make_mesh(shard=1)
    params = {"w": torch.ones(2)}
    specs = fs.match_specs(params, [("*", LayoutSpec())])
    (tmp_path / "out").mkdir()
    (tmp_path / "out/precious").write_text("")
    with raises(StateError, leaves=str(tmp_path / "out"), fix=["elsewhere", "remove it"]):
        fs.hf.save(params, tmp_path / "out", specs, mesh)
    assert os.listdir(tmp_path / "out") == ["precious"]
    (tmp_path / "hollow").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "hollow")
    with raises(StateError, leaves=str(tmp_path / "link"), fix=["elsewhere", "remove it"]):
        fs.hf.save(params, tmp_path / "link", specs, mesh)
    (tmp_path / "empty").mkdir()
    left = tmp_path / ".empty.writing"
    left.mkdir()
    (left / "model.safetensors").write_text("of a save that was killed")
    fs.hf.save(params, tmp_path / "empty", specs, mesh)
    same(tensors_of(tmp_path / "empty"), params)
    assert not left.exists()


@pytest.mark.parametrize(
    ("how", "leaves"),
    [
        ({"names": {"a": "b"}}, ["'b'", "params['a']", "params['b']"]),
        (
            {"names": {"v": fs.hf.Transposed("x")}},
            "params['v'] [2]",
        ),
        ({"dtype": torch.int8}, ["dtype=torch.int8", "float dtype"]),
        ({"max_file_bytes": 0}, "max_file_bytes=0"),
        ({"config": "nowhere"}, "config='nowhere'"),
    ],
)
def test_what_save_refuses(tmp_path: Path, how: Any, leaves: Any) -> None:
    params = tree_of(a=(2, 2), b=(2, 2), v=(2,))
    specs = fs.match_specs(params, [("*", LayoutSpec())])
    with raises(StateError, leaves=leaves):
        fs.hf.save(params, tmp_path / "out", specs, **how)
    with raises(StateError, leaves="layout", fix=["specs", "mesh"]):
        fs.hf.save(params, tmp_path / "out")
    odd = {"z": torch.zeros(2, dtype=torch.complex128)}
    with raises(StateError, leaves=["params['z']", "torch.complex128"], fix="another dtype", says="1 leaf"):
        fs.hf.save(odd, tmp_path / "out", fs.match_specs(odd, [("*", LayoutSpec(trainable=False))]))
    assert os.listdir(tmp_path) == []


def test_a_module_with_tied_names_and_unsaved_buffers_takes_the_file(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("kept", torch.arange(3.0))
            self.register_buffer("made", torch.ones(2), persistent=False)

    model = Tied()
    compiled = torch.compile(model)
    _, params = fs.make_functional(compiled)
    mesh = fs.make_mesh(shard=2, simulated=True)
    specs = fs.presets.full_shard(params, mesh)

    def run(rank: int) -> None:
        fs.hf.save(fs.shard(params, specs, mesh), tmp_path / "out", specs, mesh, model=compiled)

    fs.simulate(mesh, run)
    file, fresh = tmp_path / "out/model.safetensors", Tied()
    assert safetensors.load_file(file).keys() == {"kept", "embed.weight"}
    safetensors.load_model(fresh, file)
    assert fresh.head.weight is fresh.embed.weight and torch.equal(fresh.embed.weight, model.embed.weight)
    # Both names in one file: they must be the same, and the module's own buffer is taken.
    wanted, paper = model.state_dict(), fs.make_mesh(shard=2, abstract=True)
    safetensors.save_file({n: v.clone() for n, v in wanted.items()}, tmp_path / "b.safetensors")
    got = fs.hf.load(tmp_path / "b.safetensors", specs, paper, model=model)
    same({p: got[p] for p in ("made", "kept")}, {"made": torch.ones(2), "kept": wanted["kept"]})
    safetensors.save_file({**wanted, "head.weight": wanted["head.weight"] + 1}, tmp_path / "c.safetensors")
    with raises(StateError, leaves=["'head.weight'", "'embed.weight'"]):
        fs.hf.load(tmp_path / "c.safetensors", specs, paper, model=model)
