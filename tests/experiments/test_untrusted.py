"""Folders of models and of runs are data: nothing in them runs, whatever they hold; and what is damaged in
them is one error before a rank starts."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import run_command
from errors import raises
from runs import compose, leave_run, validate
from tuning import SMALL, write_llama

import fnshard as fs
from experiments import finetune
from experiments.bases import write_model
from experiments.data import chat, shards
from experiments.data.model_files import wrong_numbers
from experiments.data.prepared import open_prepared
from experiments.data.tokenizer import load_tokenizer, open_directory
from experiments.evaluate import run as evaluation
from experiments.evaluate.config import EvaluateConfig
from experiments.explain.time_report import report_time
from experiments.generate import GenerateConfig, generate
from experiments.lib.checks import ConfigError, targets_in
from experiments.lib.compose import is_mistake, text_of
from experiments.lib.files import read_json
from experiments.lib.folder import read_result
from experiments.lib.metrics import read_rows
from experiments.train import COMMAND
from experiments.tuning.model_directory import KEPT, open_model
from experiments.tuning.rewards import make_model_reward, make_rewards
from fnshard.errors import FnshardError

transformers = pytest.importorskip("transformers")

RAN = "somebody's code ran"
REPOSITORY = "somebody/kernels"


def payload() -> None:
    """Do what must not happen; `EVIL` names this function."""
    raise SystemExit(RAN)  # which no `except Exception` hides


class Bomb:
    """A pickle that runs `payload` when it is read."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return payload, ()


EVIL = f"{__name__}.payload"
CODE = f"raise SystemExit({RAN!r})\n"  # of a module in a folder


def change(file: Path, **values: Any) -> None:
    """Write values into a file of JSON, which need not be there."""
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**known, **values}))


# ------------------------------------------------------------------ models


def pickled_weights(folder: Path) -> None:
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        (folder / name).write_bytes(pickle.dumps(Bomb()))


def leave_pickles(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    pickled_weights(folder)


def own_code(folder: Path) -> None:
    """Give a folder code of its own for everything that transformers has a class for."""
    (folder / "evil.py").write_text(CODE)
    classes = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification",
               "AutoModelForImageTextToText", "AutoProcessor", "AutoImageProcessor")  # fmt: skip
    change(folder / "config.json", auto_map=dict.fromkeys(classes, "evil.Evil"))
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]})
    for name in ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"):
        if (folder / name).exists():
            change(folder / name, auto_map=dict.fromkeys(classes, "evil.Evil"))


def own_type(folder: Path) -> None:
    own_code(folder)
    change(folder / "config.json", model_type="evil")
    change(folder / "tokenizer_config.json", tokenizer_class="Evil")


def kernels(*keys: str) -> Callable[[Path], None]:
    def leave(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        parts = [config, *(v for k, v in config.items() if k.endswith("_config") and isinstance(v, dict))]
        for part in parts:
            part |= dict.fromkeys(keys, REPOSITORY)
        (folder / "config.json").write_text(json.dumps(config))

    return leave


def template(folder: Path) -> None:
    text = "{{ cycler.__init__.__globals__.os.system('touch ran') }}{{ ''.__class__.__mro__[1] }}"
    change(folder / "tokenizer_config.json", chat_template=text)
    (folder / "chat_template.jinja").write_text(text)


def adapter(folder: Path) -> None:
    values = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "base_model_name_or_path": "somebody/base",
              "auto_mapping": {"parent_library": "evil", "base_model_class": "Evil"}, "megatron_core": "evil",
              "megatron_config": {"a": 1}}  # fmt: skip
    (folder / "evil.py").write_text(CODE)
    (folder / "adapter_config.json").write_text(json.dumps(values))
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Bomb()))


MODELS: dict[str, Callable[[Path], None]] = {
    "pickles beside": pickled_weights,
    "pickles alone": leave_pickles,
    "classes of its own": own_code,
    "a type of its own": own_type,
    "attn_implementation": kernels("attn_implementation"),
    "_attn_implementation": kernels("_attn_implementation", "_attn_implementation_internal"),
    "experts_implementation": kernels("experts_implementation", "_experts_implementation"),
    "a chat template": template,
    "adapters": adapter,
    "a generation of its own": lambda folder: change(
        folder / "generation_config.json", custom_generate=str(folder), eos_token_id=257
    ),
}


def read_model_folder(folder: Path) -> None:
    """Read all that commands read of a model's folder."""
    lm, tokenizer = open_model(folder)
    assert lm.model.config._attn_implementation in ("fnshard", "sdpa", "eager")
    chat.encode_chat_prompt(tokenizer, [{"role": "user", "content": "x"}])


def save_with(folder: Path) -> None:
    """Save a model with the configuration of a folder."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(folder / "own"))
    _, params = fs.make_functional(model)
    specs = fs.presets.no_shard(params, fs.make_mesh(shard=1))
    fs.hf.save(dict(params), folder / "saved", specs, fs.make_mesh(shard=1), model=model, config=folder)


def load_weights(folder: Path) -> None:
    specs = fs.match_specs({"w": torch.ones(2)}, [("*", fs.LayoutSpec())])
    fs.hf.load(folder, specs, fs.make_mesh(shard=1))


READERS: dict[str, Callable[[Path], Any]] = {
    "a command": read_model_folder,
    "a reward": lambda folder: make_model_reward(str(folder), "cpu"),
    "fs.hf.save": save_with,
    "fs.adapters.load": lambda folder: fs.adapters.load(folder, {"w": torch.ones(2, 2)}),
    "load_tokenizer": load_tokenizer,
}


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return an empty folder; a kernel that is fetched, or a shell, leaves `ran` in it and ends the test."""
    import transformers.modeling_utils as modeling

    def ran(*args: Any, **kwargs: Any) -> None:
        (tmp_path / "ran").touch()
        payload()

    monkeypatch.setattr(modeling, "lazy_import_flash_attention", ran)
    monkeypatch.setattr(os, "system", ran)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def harmless(read: Callable[[], Any]) -> None:
    """Check that something is read, or refused in words."""
    try:
        read()
    except (ConfigError, FnshardError, chat.LineError) as error:
        assert RAN not in str(error)


@pytest.mark.parametrize("what", MODELS)
@pytest.mark.parametrize("reader", READERS)
def test_nothing_in_the_folder_of_a_model_runs(guarded: Path, reader: str, what: str) -> None:
    folder = guarded / "model"
    write_llama(folder)
    write_llama(folder / "own")
    if reader == "fs.adapters.load" and what != "adapters":  # else it ends at a file that is missing
        adapter(folder)
    if reader == "a reward":
        config = transformers.LlamaConfig.from_pretrained(folder, num_labels=1)
        transformers.LlamaForSequenceClassification(config).save_pretrained(folder)
    MODELS[what](folder)
    harmless(lambda: READERS[reader](folder))
    assert not (guarded / "ran").exists() and not any("evil" in name.split(".") for name in sys.modules)


@pytest.mark.parametrize("what", ["classes of its own", "attn_implementation", "pickles beside"])
def test_nothing_in_the_folder_of_a_model_that_sees_runs(guarded: Path, what: str) -> None:
    folder = guarded / "model"
    folder.mkdir()
    write_model("tiny-llava", folder)
    MODELS[what](folder)
    harmless(lambda: read_model_folder(folder))
    assert not (guarded / "ran").exists() and not any("evil" in name.split(".") for name in sys.modules)


def test_eager_attention_stays_eager(tmp_path: Path) -> None:
    change(write_llama(tmp_path) / "config.json", attn_implementation="eager")
    assert open_model(tmp_path)[0].model.config._attn_implementation == "eager"


# ------------------------------------------------------------------ runs


def config_yaml(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.yaml").write_text(text) and None


def targets(*groups: str) -> Callable[[Path], None]:
    """Write the whole configuration of a run, with code in it."""

    def leave(folder: Path) -> None:
        from omegaconf import OmegaConf

        values = asdict(compose("run.device=cpu", "mesh.shard=1"))
        for group in groups:
            at, _, last = f"x.{group}".rpartition(".")
            place = values
            for name in at.split(".")[1:]:
                place = place[name]
            place[last] = {"_target_": EVIL} if last != "own" else [{"_target_": EVIL}]
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(values)))
        record = {
            "totals": {"seconds": 1.0},
            "status": "ok",
            "config": values,
            "hardware": {},
            "prediction": None,
        }
        (folder / "run.json").write_text(json.dumps(record))

    return leave


RUNS: dict[str, Callable[[Path], None]] = {
    **{name: targets(name) for name in ("model", "data", "objective", "optimizer", "tracker.own")},
    "a value": targets("model.width"),
    "YAML with an object": config_yaml('!!python/object/apply:os.system ["touch ran"]'),
    "YAML that makes code": config_yaml('model: ${oc.create:{_target_: os.system, command: "touch ran"}}\n'),
    "YAML, deep": config_yaml("[" * 5_000),
    "YAML of a list": config_yaml("- 1\n"),
    "YAML of nothing": config_yaml(""),
    "no YAML": config_yaml("a: b: c\n\t"),
    "overrides": lambda folder: (folder / ".hydra" / "overrides.yaml").write_text(
        '!!python/object/apply:os.system ["touch ran"]'
    ) and None,
    "deep JSON": lambda folder: [
        (folder / name).write_text("[" * 100_000)
        for name in ("run.json", "result.json", "metrics.jsonl", "identity.json", "lines.json")
    ] and None,
}  # fmt: skip


def test_a_run_whose_data_are_not_prepared_is_one_error(guarded: Path) -> None:
    folder = leave_run(guarded / "run")
    values = asdict(compose("run.device=cpu", "mesh.shard=1", spec=finetune.COMMAND))
    config_yaml(json.dumps({**values, "data": {**values["data"], "train": None, "held_out": None}}))(folder)
    with raises(ConfigError, leaves="data.train"):
        generate(GenerateConfig(run=str(folder)))


@pytest.mark.parametrize("what", RUNS)
def test_nothing_in_the_folder_of_a_run_runs(guarded: Path, what: str) -> None:
    from experiments.compare import outcome

    folder = leave_run(guarded / "run")
    (folder / "config.pickle").write_bytes(pickle.dumps(Bomb()))
    RUNS[what](folder)
    with pytest.raises(ConfigError) as error:
        generate(GenerateConfig(run=str(folder)))
    assert RAN not in str(error.value) and str(folder) in str(error.value)
    config = folder / "config.yaml"
    if config.exists() and EVIL in config.read_text():
        assert f"_target_={EVIL}" in str(error.value) and "own_code=true" in str(error.value)
        with pytest.raises((SystemExit, ConfigError)) as error:
            generate(GenerateConfig(run=str(folder), own_code=True))
        assert "own_code" not in str(error.value)
        # Only the code of an optimizer is reached; the others are refused for what else is wrong.
        assert (RAN in str(error.value)) == (what == "optimizer")
    harmless(lambda: report_time(folder))
    harmless(lambda: (read_result(folder), list(read_rows(folder / "metrics.jsonl", 9))))
    harmless(lambda: outcome.find_outcomes([str(folder)]))
    assert not (guarded / "ran").exists()


def test_code_is_found_however_deep_it_lies() -> None:
    values = {"a": [{"b": ({"_target_": "x.Y", "z": {"_target_": "v.W"}},)}], "_partial_": "_target_"}
    assert targets_in(values) == ["a.0.b.0._target_=x.Y", "a.0.b.0.z._target_=v.W"]


def test_a_pickled_configuration_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "config.pickle").write_bytes(pickle.dumps(Bomb()))
    with raises(ConfigError, leaves="config.pickle", says="overrides.yaml"):
        validate(COMMAND, ["--experimental-rerun", str(tmp_path / "config.pickle")])


def test_nothing_in_prepared_data_shards_and_checkpoints_is_unpickled(guarded: Path) -> None:
    bomb = pickle.dumps(Bomb())
    names = (
        "prepared.json", "tokens.bin", "manifest.json", "manifest.json.sha256", "pytorch_model.bin",
        "adapter_model.bin", shards.HEADER,
    )  # fmt: skip
    for name in names:
        (guarded / name).write_bytes(bomb)
    np.save(guarded / "tokens.npy", np.array([Bomb()], object), allow_pickle=True)
    with pytest.raises(ConfigError):
        open_prepared(guarded)
    with raises(ConfigError, leaves="shards.json"):
        shards.open_shards(guarded)
    (guarded / shards.HEADER).unlink()
    with raises(ConfigError, leaves="tokens.npy", says="Python objects"):
        shards.open_shards(guarded)
    assert read_json(guarded / "prepared.json") == {}
    with pytest.raises(FnshardError):
        fs.checkpoint.verify(guarded)
    with raises(FnshardError, leaves="pytorch_model.bin"):
        load_weights(guarded)
    adapter(guarded)
    with raises(FnshardError, leaves="adapter_model.bin"):
        fs.adapters.load(guarded, {})


# ------------------------------------------------------------------ what is damaged is one error


DAMAGES: dict[str, Any] = {
    "dtype": ["float99", 5, [], "nn", "x" * 5000],
    "hidden_size": ["16", -16, 0, 10**9, 10**30, 1.5, True, [16], 17],
    "num_hidden_layers": ["1", -1, 0, 10**9, 2, 1.0],
    "num_attention_heads": ["2", -2, 0, 3, 10**9],
    "num_key_value_heads": ["1", -1, 0, 3],
    "vocab_size": ["264", -1, 0, 10**12, 263],
    "head_dim": ["8", -8, 0, 7],
    "intermediate_size": [-24, 0, 25],
    "max_position_embeddings": ["64", 0, -1],
    "rms_norm_eps": ["1e-6", -1.0, 0, float("nan"), float("inf")],
    "model_type": ["", 5, None, "x" * 5000, "bert", {}, []],
    "hidden_act": ["nothing", 5, {}],
    "rope_parameters": [5, {"rope_type": "none"}, {"rope_theta": -1.0, "rope_type": "default"}],
    "get_text_config": [5],
    "to_dict": ["x"],
}


@pytest.mark.parametrize("key", DAMAGES)
def test_a_damaged_configuration_of_a_model_is_one_error(tmp_path: Path, key: str) -> None:
    good = json.loads((write_llama(tmp_path) / "config.json").read_text())
    for value in DAMAGES[key]:
        (tmp_path / "config.json").write_text(json.dumps({**good, key: value}))
        with pytest.raises(ConfigError) as error:
            open_model(tmp_path)
        assert str(tmp_path) in str(error.value) and len(str(error.value)) < 4000
        assert str(error.value).count("Fix: ") == 1 and "fast tokenizer" not in str(error.value)
        assert key != "hidden_act" or "Error: " in str(error.value)


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({"num_labels": 3_000_000}, ["num_labels"]),
        ({"n_routed_experts": 10**9}, ["n_routed_experts"]),
        ({"num_experts": 10**6}, ["num_experts"]),
        ({"encoder_layers": 10**5}, ["encoder_layers"]),
        ({"text_config": {"moe_num_experts": 10**9}}, ["text_config.moe_num_experts"]),
        ({"hidden_sizes": [8, 10**9], "unknown": -(10**12)}, ["hidden_sizes[1]", "unknown"]),
        ({"parts": [{"depths": [2, 10**5]}]}, ["parts[0].depths[1]"]),
        # What a base's own file has is no number that makes anything, or says that there are none.
        ({"eos_token_ids": [[10**9]]}, []),
        ({"eos_token_id": [10**9], "bos_token_id": 10**9, "image_token_index": 10**9, "seed": 10**12}, []),
        ({"rope_theta": 10**9, "rope_parameters": {"rope_theta": 10**9}, "use_cache": True}, []),
        ({"num_local_experts": 0, "num_experts_per_tok": 0, "sliding_window": 0}, []),
        ({"num_local_experts": 8, "num_experts_per_tok": 0}, ["num_experts_per_tok"]),
        ({"num_local_experts": 2, "num_experts_per_tok": 3}, ["num_experts_per_tok"]),
    ],
)
def test_numbers_that_would_be_built_for_hours_are_refused(tmp_path: Path, values: Any, wrong: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    found = wrong_numbers(tmp_path / "config.json")
    assert [line.partition("=")[0] for line in found] == wrong


DEEP = '{"a":' * 100_000
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("text", ["", "{", "[]", "5", "null", DEEP, "[" * 100_000, "\xff\xfe"])
def test_a_damaged_file_of_a_model_is_one_error(tmp_path: Path, file: str, text: str) -> None:
    write_llama(tmp_path)
    (tmp_path / file).write_bytes(text.encode("latin-1"))
    try:
        open_model(tmp_path)
    except ConfigError as error:
        assert str(tmp_path) in str(error)
    else:
        assert file == "tokenizer_config.json"  # which a tokenizer can do without


@pytest.mark.parametrize("value", [{}, {"a": 1}, ["x", {}], [[257]], "257", DEEP])
def test_ends_of_a_generation_that_are_none_are_passed_over(tmp_path: Path, value: Any) -> None:
    write_llama(tmp_path)
    text = value if value == DEEP else json.dumps({"eos_token_id": value})
    (tmp_path / "generation_config.json").write_text(text)
    assert open_directory(tmp_path).stops == (257,)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder in which bases are kept from test to test."""
    return tmp_path_factory.mktemp("place")


@pytest.mark.suite({
    "own-*": "a folder",
    "stdlib-wrong0-*": "a base that is to be trained",
})  # fmt: skip
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["method=lora", "method.targets=*.nothing"], r"method\.targets=\*\.nothing.*matches no leaf"),
        (["method=lora", "method.rank=999"], "method.rank=999.*rank=999 is more than"),
        (["method=full", "method.freeze=*.nothing"], r"method\.freeze=\*\.nothing.*matches no leaf"),
        (["mesh.expert=2"], "mesh.expert=2: the model has no experts"),
        (["data.context=4096"], r"data\.context=4096.*positions"),
        (["objective=grpo", "objective.reward={name: format, pattern: '('}"], "=format: .*pattern='[(]'"),
        (["objective=grpo", "objective.reward={name: format}"], "objective.reward=format: missing .*pattern"),
        (["objective=grpo", "objective.reward={name: format, pattern: 5}"], "objective.reward=format"),
        (["objective=grpo", "objective.reward={name: length, mots: 5}"], "objective.reward=length: .*m"),
        (["objective=grpo", f"objective.reward={'x' * 5000}"], "is no name|characters|one of"),
        (["run.evaluate=[gsm8k:none.jsonl,arc:other.jsonl]"], "none.jsonl.*other.jsonl"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("model", ["own", "stdlib"])
def test_what_a_model_cannot_have_is_one_error_before_ranks(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, model: str, wrong: list[str], says: str
) -> None:
    """And before a base is trained: the random one that this begins with is made, once."""
    monkeypatch.chdir(place)
    chosen = str(write_llama(tmp_path / "own")) if model == "own" else model
    config = compose(*SMALL, f"model={chosen}", *wrong, spec=finetune.COMMAND)
    with pytest.raises((ConfigError, OSError)) as error:
        finetune.prepare(replace(config, run=replace(config.run, device="cpu")))
    assert is_mistake(error.value)
    text = text_of(error.value)
    assert re.search(rf"(?s){says}", text) and len(text) < 3000
    made = place / KEPT
    assert not (made / "stdlib").exists() and not (made / "runs").exists()


LONG = "x" * 5000
COMMANDS = [
    ["experiments.finetune", f"model={LONG}"],
    ["experiments.finetune", f"data.train={LONG}"],
    ["experiments.evaluate", f"model={LONG}", "tasks=[arc:x]"],
    ["experiments.evaluate", "model=own", f"tasks=[arc:{LONG}]"],
    ["experiments.evaluate", "model=own", "tasks=[arc:x]", f"folder={LONG}"],
    ["experiments.generate", f"run={LONG}"],
    ["experiments.train", f"hydra.run.dir={LONG}"],
    ["experiments.train", f"data.root={LONG}"],
    ["experiments.train", f"model={'{a:' * 3000}1{'}' * 3000}"],
    ["experiments.explain", f"run={LONG}"],
]


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: f"{c[0]} {c[-1][:12]}")
def test_a_long_name_is_one_error(tmp_path: Path, command: list[str]) -> None:
    write_llama(tmp_path / "own")
    done = run_command(command, tmp_path)
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr
    assert done.stderr.count("error:") == 1


def test_a_device_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    write_llama(tmp_path)
    with raises(ConfigError, leaves="device=tpu", says="cpu"):
        evaluation.evaluate(EvaluateConfig(model=str(tmp_path), tasks=("arc:x",), device="tpu"), tmp_path)


@pytest.mark.parametrize(
    "chosen", ["", {"name": "format", "pattern": "(" * 500}, {"name": "exact", "weight": "x"}]
)
def test_rewards_that_are_none(chosen: Any) -> None:
    with raises(ConfigError, leaves="objective.reward"):
        make_rewards(chosen)
