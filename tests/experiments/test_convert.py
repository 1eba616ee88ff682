"""`python -m experiments.convert FROM TO`: what is read and written, each format into each other."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from corrupt import payloads
from errors import raises
from torch import Tensor
from zero_folders import write_zero

import fnshard as fs
from experiments.convert import convert, parse
from experiments.lib.checks import ConfigError
from fnshard.checkpoint.foreign.boxes import Pieces
from fnshard.checkpoint.foreign.dcp import read_dcp
from fnshard.checkpoint.foreign.formats import FORMATS, recognise_format
from fnshard.errors import CheckpointError, OptimizerError, StateError

STEP = 7


def params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"up.w": (5, 3), "up.b": (5,), "down.w": (2, 5), "scale": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def moments() -> dict[str, dict[str, Tensor]]:
    return {n: {"exp_avg": p * 0.1, "exp_avg_sq": p.square()} for n, p in params().items()}


def run(*arguments: Any) -> None:
    convert(parse([str(each) for each in arguments]))


def specs_here() -> tuple[Any, fs.Mesh]:
    mesh = fs.make_mesh(shard=1)
    return fs.presets.full_shard(params(), mesh), mesh


def check(state: Any, optimizer: bool = True) -> None:
    """Assert that a state has all parameters and moments, bit for bit."""
    for name, value in params().items():
        assert torch.equal(state.params[name], value), name
        if optimizer:
            assert torch.equal(state.opt_state[name]["mu"], moments()[name]["exp_avg"])
            assert torch.equal(state.opt_state[name]["nu"], moments()[name]["exp_avg_sq"])
    assert int(state.step) == (STEP if optimizer else 0)


def open_any(path: Path, format: str) -> Any:
    specs, mesh = specs_here()
    if format == "hf":
        zero = torch.zeros((), dtype=torch.int64)
        return fs.TrainState(zero, fs.hf.load(path, specs, mesh), {}, {}, zero)
    opens = {
        "fnshard": fs.checkpoint.restore,
        "dcp": fs.checkpoint.load_dcp,
        "torch": fs.checkpoint.load_torch,
    }
    return opens[format](path, specs, mesh)


WRITTEN = {"fnshard": "out/7", "dcp": "dcp", "torch": "state.pt", "hf": "weights"}


def test_every_format_into_every_other(tmp_path: Path, capsys: Any) -> None:
    write_zero(tmp_path / "zero", 3, 3, [params()], moments(), STEP)
    sources = {"deepspeed": tmp_path / "zero"}
    for to, name in WRITTEN.items():
        run(tmp_path / "zero", tmp_path / name, f"to={to}")
        sources[to] = tmp_path / name
        check(open_any(tmp_path / name, to), optimizer=FORMATS[to].keeps_optimizer)
    for known, source in sources.items():
        assert recognise_format(source) == known
        for to in WRITTEN if known != "deepspeed" else ():
            target = tmp_path / f"{known} to {to}" / WRITTEN[to]
            run(source, target, f"to={to}")
            check(open_any(target, to), optimizer=known != "hf" and FORMATS[to].keeps_optimizer)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 4 + 16 and "optimizer state is left out" in said[3]
    assert "DeepSpeed folder" in said[0] and "4 parameters, optimizer state of step 7" in said[0]


def test_the_format_follows_from_the_two(tmp_path: Path) -> None:
    torch.save(params(), tmp_path / "pytorch_model.bin")
    run(tmp_path, tmp_path / "here")  # a folder with a .bin, into a checkpoint
    run(tmp_path / "here", tmp_path / "there")  # which becomes a DCP folder
    run(tmp_path / "there", tmp_path / "again.pt")
    assert recognise_format(tmp_path / "there") == "dcp"
    assert torch.load(tmp_path / "again.pt", weights_only=True).keys() == params().keys()
    run(tmp_path / "here", tmp_path / "titan", "layout=torchtitan")
    assert read_dcp(tmp_path / "titan").params.keys() == params().keys()
    written = dcp.FileSystemReader(tmp_path / "titan").read_metadata().state_dict_metadata
    assert written.keys() == params().keys()  # not "model.up.w", as FSDP2 has them


def test_a_dcp_folder_gets_the_group_that_its_readers_ask_for(tmp_path: Path, capsys: Any) -> None:
    """FSDP2's optimizer asks for rates, too, and `dcp.load` fails where one is not there."""
    write_zero(tmp_path / "zero", 1, 2, [params()], moments(), STEP)
    run(tmp_path / "zero", tmp_path / "without", "to=dcp")
    assert "no group of AdamW (optimizer='{lr: 3e-3}' writes one" in capsys.readouterr().out
    run(tmp_path / "zero", tmp_path / "with", "to=dcp", "optimizer={lr: 3e-3, betas: [0.9, 0.95]}")
    assert "group" not in capsys.readouterr().out
    (group,) = torch.optim.AdamW([torch.zeros(1)]).param_groups
    asked = {"optim": {"param_groups": [{k: v for k, v in group.items() if k != "params"}]}}
    with pytest.raises(dcp.api.CheckpointException, match=r"Missing key .*param_groups"):
        dcp.load(asked, checkpoint_id=tmp_path / "without", no_dist=True)
    dcp.load(asked, checkpoint_id=tmp_path / "with", no_dist=True)
    (found,) = asked["optim"]["param_groups"]
    assert found["lr"] == 3e-3 and list(found["betas"]) == [0.9, 0.95]
    check(open_any(tmp_path / "with", "dcp"))


@pytest.mark.parametrize("given", ["{lr: ", "3", "{rate: 3e-3}", "[1]"])
def test_what_is_no_argument_of_adamw_is_refused(tmp_path: Path, given: str) -> None:
    write_zero(tmp_path / "zero", 1, 2, [params()], moments(), STEP)
    with raises((ConfigError, OptimizerError), leaves="optimizer"):
        run(tmp_path / "zero", tmp_path / "out", "to=dcp", f"optimizer={given}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", [to for to in WRITTEN if to != "dcp"])
def test_keys_of_a_dcp_folder_are_refused_where_none_is_written(tmp_path: Path, to: str) -> None:
    """Whether `to=` says so, or TO and FROM do."""
    write_zero(tmp_path / "zero", 1, 2, [params()], moments(), STEP)
    target = tmp_path / WRITTEN[to]
    for given in ("layout=torchtitan", "layout=fsdp", "optimizer={lr: 3e-3}"):
        key, _, value = given.partition("=")
        with raises(ConfigError, leaves=[key, value.strip("{}").partition(":")[0]], fix="to=dcp"):
            run(tmp_path / "zero", target, f"to={to}", given)
        if to != "hf":  # nothing but to= asks for such a folder
            with raises(ConfigError, leaves=key, fix="to=dcp"):
                run(tmp_path / "zero", target, given)
        assert not target.exists()
    with raises(ConfigError, leaves=["layout", "optimizer"], fix="to=dcp"):
        run(tmp_path / "zero", target, f"to={to}", "layout=fsdp", "optimizer={lr: 3e-3}")


def test_torch_reads_the_file_that_is_written(tmp_path: Path) -> None:
    write_zero(tmp_path / "zero", 1, 2, [params()], moments(), STEP)
    run(tmp_path / "zero", tmp_path / "state.pt")
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    assert all(torch.equal(found["model"][n], p) for n, p in params().items())
    own = found["optim"]["state"]["up.w"]
    assert own["step"] == STEP and torch.equal(own["exp_avg"], moments()["up.w"]["exp_avg"])


def test_one_tensor_at_a_time_is_read(tmp_path: Path, monkeypatch: Any) -> None:
    """Whatever is written, two tensors at most are in memory: the one at hand and the one before it."""
    many = {f"layers.{n}.w": torch.randn(64, 64) for n in range(8)}
    alive, most, read = [0], [0], Pieces.__getitem__

    def drop() -> None:
        alive[0] -= 1

    def counting(self: Any, slices: Any) -> Tensor:
        alive[0] += 1
        most[0] = max(most[0], alive[0])
        tensor = read(self, slices)
        weakref.finalize(tensor, drop)
        return tensor

    zero = {n: {"exp_avg": t, "exp_avg_sq": t} for n, t in many.items()}
    write_zero(tmp_path / "zero", 2, 2, [many], zero, STEP)
    monkeypatch.setattr(Pieces, "__getitem__", counting)
    for to in WRITTEN:
        most[0] = 0
        run(tmp_path / "zero", tmp_path / to / WRITTEN[to], f"to={to}")
        assert 1 <= most[0] <= 2, to


def test_names_by_a_model(tmp_path: Path) -> None:
    """A DCP folder becomes a model that transformers opens, and a state here with its buffers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=20, intermediate_size=27, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path / "llama")
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    run(tmp_path / "dcp", tmp_path / "hf", "to=hf", f"model={tmp_path / 'llama'}")
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.arange(12).view(2, 6)
    assert torch.equal(opened(ids).logits, model(ids).logits)
    run(tmp_path / "dcp", tmp_path / "5", f"model={tmp_path / 'llama'}")
    full = fs.make_functional(model)[1]
    state = fs.checkpoint.restore(
        tmp_path / "5", fs.presets.no_shard(full, mesh := fs.make_mesh(shard=1)), mesh
    )
    assert all(torch.equal(state.params[p], leaf) for p, leaf in full.items())
    config.num_hidden_layers = 3
    config.save_pretrained(tmp_path / "other")
    with raises(StateError, leaves=["other", "layers.2."], fix="leave model= out", says="no tensor"):
        run(tmp_path / "dcp", tmp_path / "x", f"model={tmp_path / 'other'}")
    assert not (tmp_path / "x").exists()


def test_mistakes(tmp_path: Path) -> None:
    torch.save(params(), tmp_path / "a.pt")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    for arguments, said in {
        ("a.pt",): {"leaves": "a.pt", "fix": "FROM TO"},
        ("a.pt", "b", "layuot=fsdp"): {"leaves": "layuot=fsdp", "fix": "layout"},
        ("a.pt", "b", "source=c.pt"): {"leaves": "source=c.pt", "fix": "layout"},
        ("a.pt", "taken"): {"leaves": "taken"},
        ("a.pt", "b", "to=deepspeed"): {"leaves": "to=deepspeed", "says": "fnshard, dcp, hf, torch"},
        ("a.pt", "b", "to=dcp", "layout=mine"): {
            "leaves": "layout=mine",
            "says": "fsdp, accelerate, torchtitan",
        },
    }.items():
        with raises(ConfigError, **said):
            run(*(tmp_path / a if "=" not in a else a for a in arguments))
    with raises(CheckpointError, leaves=["taken", "notes.txt"]):
        run(tmp_path / "taken", tmp_path / "b")
    with raises(CheckpointError, leaves="none"):
        run(tmp_path / "none", tmp_path / "b")
    marker = tmp_path / "marker"
    (tmp_path / "evil.pt").write_bytes(payloads(marker)["torch"])
    for to, target in WRITTEN.items():
        with raises(CheckpointError, leaves="evil.pt", says="pickle"):
            run(tmp_path / "evil.pt", tmp_path / "b" / target, f"to={to}")
        assert not (tmp_path / "b" / target).exists() and not marker.exists()


def test_a_file_that_is_cut_short_leaves_nothing(tmp_path: Path) -> None:
    write_zero(tmp_path / "zero", 3, 2, [params()], moments(), STEP)
    run(tmp_path / "zero", tmp_path / "dcp", "to=dcp")
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    for to, target in WRITTEN.items():
        with raises(CheckpointError, leaves=file.name, says="ends at byte"):
            run(tmp_path / "dcp", tmp_path / "out" / target, f"to={to}")
        left = [each for each in (tmp_path / "out").rglob("*") if each.is_file()]
        assert left == []
