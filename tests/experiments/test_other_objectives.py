"""Distillation, reward models, classifiers and embeddings: losses, exports, two ranks, refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors import raises
from runs import DOUBLE, compose, rows_of
from tuning import SMALL, assert_alike, config_of, tune_on_rank, write_llama

import fnshard as fs
from experiments import finetune
from experiments.data.prepared import RecordPolicy, prepare
from experiments.data.tokenizer import open_directory
from experiments.lib.checks import ConfigError
from experiments.lib.folder import read_result
from experiments.tuning import dataset
from experiments.tuning.lm import from_directory
from experiments.tuning.method import make_tuning
from experiments.tuning.model_directory import EXPORTED, check_teacher
from experiments.tuning.rewards import make_rewards
from experiments.tuning.table import OBJECTIVES

transformers = pytest.importorskip("transformers")
QUICK = ("optimizer.lr=0.02", "schedule=constant", "schedule.warmup=0", "run.sample_tokens=0",
         "run.held_out_every=6")  # fmt: skip


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def files(data: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write files of all kinds, of digits."""
    folder, digits = tmp_path_factory.mktemp("files"), range(48)
    labels = [{"text": f"{n:03d}", "label": "even" if n % 2 == 0 else "odd"} for n in digits]
    words = [{"tokens": [str(n), "x" * (n % 3 + 1)], "tags": ["number", "word"]} for n in digits]
    twins = [{"query": f"{n:02d} q", "positive": f"{n:02d} p"} for n in range(96)]
    return {
        **data,
        "labels": write(folder / "labels", labels), "words": write(folder / "words", words),
        "twins": write(folder / "twins", twins),
    }  # fmt: skip


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a wider model than the student, of the same bytes."""
    return write_llama(tmp_path_factory.mktemp("teacher"), hidden_size=24, num_attention_heads=3)


def load_tuning(config: Any, **beside: Any) -> tuple[Any, Any, Any]:
    """Return the tuning of a configuration, values of its tree, and the first batch of its data."""
    mesh, lm = fs.make_mesh(shard=1, device="cpu"), from_directory(config.model)
    tuning = make_tuning(config, lm)
    values = lambda path, of: fs.hf.load(path, fs.presets.full_shard(of.params, mesh), mesh, model=of.model)  # noqa: E731
    params = {"policy": values(config.model, lm), **beside}
    if tuning.teacher is not None:
        params["teacher"] = values(config.objective.teacher, tuning.teacher)
    given = dataset.open_data(config)
    return tuning, params, next(given.loader(config, mesh))[0]


# ------------------------------------------------------------------ losses, by hand


def test_a_student_is_as_far_from_its_teacher_as_their_tokens_are(model, files, teacher, tmp_path):
    config = config_of(
        model, files, tmp_path, "objective=distill", f"objective.teacher={teacher}", "method=full"
    )
    tuning, params, batch = load_tuning(config)
    loss, aux = OBJECTIVES["distill"](tuning, config.objective, training=True)(params, batch)
    total, count = 0.0, 0
    for name, lm in (("policy", tuning.lm), ("teacher", tuning.teacher)):
        logits = lm.logits(params[name], *(batch[n] for n in ("tokens", "positions", "documents")))
        if name == "policy":
            ours = logits.double().log_softmax(-1)
        else:
            theirs = logits.double().log_softmax(-1)
    for row, column in (batch["targets"] != -100).nonzero().tolist():
        p, q = ours[row, column], theirs[row, column]
        total, count = total + float((p.exp() * (p - q)).sum()), count + 1
    assert int(loss.count) == count and float(loss.total) == pytest.approx(total, rel=1e-4) and total > 0
    assert set(aux) == {"agreement"}
    own = OBJECTIVES["distill"](
        replace(tuning, teacher=tuning.lm), config.objective, training=True
    )({"policy": params["policy"], "teacher": params["policy"]}, batch)  # fmt: skip
    assert float(own[0].total) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("tokens", ["null", "96"])
def test_a_better_answer_has_a_higher_score(model, files, tmp_path, tokens):
    config = config_of(model, files, tmp_path, "objective=reward", "method=full", f"data.tokens={tokens}")
    score = {"weight": torch.linspace(-0.1, 0.1, 16)[None]}
    tuning, params, batch = load_tuning(config, score=score)
    loss, _ = OBJECTIVES["reward"](tuning, config.objective, training=False)(params, batch)
    given = dataset.open_data(config)
    rows, total, count = given.rows, 0.0, 0
    first = dataset.order(rows.count, 0, 0, 4 * (rows.at_once if rows.packed else 1)).tolist()
    for pair in [pair for row in first for pair in (rows._rows[row] if rows.packed else [row])]:
        ends = []
        for side in (0, 1):
            ids = torch.tensor(given.train.sample(2 * pair + side)[0][:-1].astype("int64"))[None]
            ends.append(float(tuning.lm.hidden(params["policy"], ids)[0, -1] @ score["weight"][0]))
        total -= float(F.logsigmoid(torch.tensor(ends[0] - ends[1])))
        count += 1
    assert int(loss.count) == count and float(loss.total) == pytest.approx(total, rel=1e-4)


def test_an_embedding_is_nearest_to_its_twin_of_all_rows(model, files, tmp_path):
    config = config_of(model, files, tmp_path, "objective=embed", "method=full", "objective.dims=[8,16]",
                       "objective.scale=1")  # fmt: skip
    tuning, params, batch = load_tuning(config)
    params = params["policy"]
    mesh = fs.make_mesh(shard=1, device="cpu")
    objective = OBJECTIVES["embed"](tuning, config.objective, training=False)
    specs = fs.presets.full_shard(params, mesh)
    found, aux = fs.shard_forward(objective, specs, mesh=mesh, backend="eager")(params, batch)
    sides = []
    for name in ("query", "positive"):
        hidden = tuning.lm.hidden(params, batch[name]["tokens"])
        ends = (batch[name]["targets"] == 0).nonzero()[:, 1]
        sides.append(hidden[torch.arange(len(ends)), ends])
    by_dim = []
    for dim in (8, 16):
        queries, positives = (F.normalize(side[:, :dim], dim=-1) for side in sides)
        by_dim.append(F.cross_entropy(queries @ positives.T, torch.arange(len(queries)), reduction="sum"))
    assert float(found.total) == pytest.approx(float(sum(by_dim)) / 2, rel=1e-4)
    assert int(found.count) == 4 and set(aux) == {"accuracy_8", "accuracy"}


# ------------------------------------------------------------------ runs, and what they leave


def open_and_run(folder: Path, kind: str, text: str) -> tuple[Any, Any]:
    model = getattr(transformers, kind).from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return model, model(input_ids=tokenizer(text, return_tensors="pt")["input_ids"])


@pytest.mark.long  # a whole story of three commands
def test_a_reward_model_is_tuned_opened_and_rewards(model, files, tmp_path, monkeypatch):
    config = config_of(model, files, tmp_path, "objective=reward", "method=full", "run.steps=12", *QUICK)
    folder = tmp_path / "run"
    tune_on_rank(0, config, folder)
    result, before = read_result(folder), json.loads((folder / finetune.BEFORE).read_text())
    assert result["held_out_loss"] < before["held_out_loss"] and result["held_out_accuracy"] > 0.9
    (own,) = make_rewards(str(folder / EXPORTED))
    rows = [{"prompt": "3+4=", "response": ""}] * 2
    good, bad = own.reward(["3+4="] * 2, ["7", "x"], rows)
    assert good > bad
    _, out = open_and_run(folder / EXPORTED, "AutoModelForSequenceClassification", "3+4=7")
    assert float(out.logits) == pytest.approx(good, abs=1e-6)
    # Answers are rewarded by it.
    more = (f"objective.reward={folder / EXPORTED}", "objective.group=2", "objective.tokens=2", "run.steps=1",
            "schedule.floor=0")  # fmt: skip
    judged = config_of(model, files, tmp_path, "objective=grpo", *QUICK, *more, "data.held_out_rows=4")
    tune_on_rank(0, judged, tmp_path / "judged")
    assert math.isfinite(read_result(tmp_path / "judged")["held_out_reward"])


@pytest.mark.long
@pytest.mark.parametrize(("level", "method"), [("sequence", "full"), ("token", "lora")])
def test_a_classifier_is_tuned_and_opened(model, files, tmp_path, level, method):
    mine = {**files, "labels": files["words"] if level == "token" else files["labels"]}
    config = config_of(model, mine, tmp_path, "objective=classify", f"objective.level={level}",
                       f"method={method}", "run.steps=20", "data.rows=8", *QUICK,
                       "optimizer.lr=0.005")  # fmt: skip
    folder = tmp_path / "run"
    tune_on_rank(0, config, folder)
    result, before = read_result(folder), json.loads((folder / finetune.BEFORE).read_text())
    assert result["held_out_loss"] < before["held_out_loss"] and result["held_out_accuracy"] > 0.6
    kind = "AutoModelForSequenceClassification" if level == "sequence" else "AutoModelForTokenClassification"
    opened, out = open_and_run(folder / EXPORTED, kind, "012" if level == "sequence" else "12 xx")
    names = ["even", "odd"] if level == "sequence" else ["number", "word"]
    assert opened.config.id2label == dict(enumerate(names))
    if level == "token":
        assert out.logits[0, -1].argmax() == 1  # the end of a word


@pytest.mark.long
def test_embeddings_are_tuned_and_opened(model, files, tmp_path):
    config = config_of(model, files, tmp_path, "objective=embed", "method=full", "objective.dims=[8,16]",
                       "run.steps=20", "data.rows=16", *QUICK)  # fmt: skip
    folder = tmp_path / "run"
    tune_on_rank(0, config, folder)
    result, before = read_result(folder), json.loads((folder / finetune.BEFORE).read_text())
    assert result["held_out_loss"] < before["held_out_loss"]
    opened, out = open_and_run(folder / EXPORTED, "AutoModel", "03 q")
    assert type(opened).__name__ == "LlamaModel" and out.last_hidden_state.shape[-1] == 16


@pytest.mark.parametrize(
    ("objective", "more"),
    [
        ("embed", ("method=full", "data.rows=8")),  # whose loss is of all ranks' rows
        ("classify", ()),
        ("reward", ("data.tokens=96", "data.rows=2")),
        ("distill", ()),
        ("distill", ("objective.on_policy=true", "objective.tokens=3", "objective.group=2")),
    ],
)
@pytest.mark.long
def test_on_two_ranks_it_is_the_same(ranks, model, files, teacher, tmp_path, objective, more):
    taught = (f"objective.teacher={teacher}",) if objective == "distill" else ()
    config = config_of(model, files, tmp_path, f"objective={objective}", "export=none", "run.steps=2",
                       *taught, *more, *QUICK, *DOUBLE)  # fmt: skip
    one, two = tmp_path / "one", tmp_path / "two"
    tune_on_rank(0, config, one)
    ranks(2).run(tune_on_rank, replace(config, mesh=replace(config.mesh, shard=2)), str(two))
    assert_alike(two, one)


ON_POLICY = ("objective.on_policy=true", "objective.tokens=3", "objective.group=2")


@pytest.mark.long  # a whole command
@pytest.mark.parametrize("more", [(), ON_POLICY])
def test_a_student_comes_nearer_to_its_teacher(model, files, teacher, tmp_path, more):
    config = config_of(model, files, tmp_path, "objective=distill", f"objective.teacher={teacher}",
                       "method=full", *QUICK, *more)  # fmt: skip
    folder = tmp_path / "run"
    tune_on_rank(0, config, folder)
    result, before = read_result(folder), json.loads((folder / finetune.BEFORE).read_text())
    assert result["held_out_loss"] < before["held_out_loss"] and not result["goal"]["is_maximised"]
    assert "reward" not in rows_of(folder)[-1]
    transformers.AutoModelForCausalLM.from_pretrained(folder / EXPORTED)


# ------------------------------------------------------------------ what is refused


def test_a_teacher_of_other_tokens_is_one_error(model, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for file in Path(model).iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    values = json.loads((other / "tokenizer.json").read_text())
    vocab = values["model"]["vocab"]
    (a, i), (b, j) = list(vocab.items())[10:12]
    vocab[a], vocab[b] = j, i
    (other / "tokenizer.json").write_text(json.dumps(values))
    with raises(ConfigError, leaves=f"objective.teacher={other}", fix="a teacher with the model's tokenizer"):
        check_teacher(str(model), str(other), 48)
    check_teacher(str(model), str(model), 48)


def test_classes_that_do_not_occur_are_refused(model, files, tmp_path):
    how = ("objective=classify",)
    with raises(ConfigError, leaves=["objective.classes", "prime"], fix="leave them out"):
        config_of(model, files, tmp_path, *how, "objective.classes=[even,odd,prime]")
    with raises(ConfigError, leaves=["labels:2", "'odd'"], says="even, prime"):
        config_of(model, files, tmp_path, *how, "objective.classes=[even,prime]")
    one = {"labels": write(tmp_path / "one", [{"text": "a", "label": "x"}, {"text": "b", "label": "x"}])}
    with raises(ConfigError, leaves=str(one["labels"]), fix="'text' and 'label'", says="1 classes: x"):
        config_of(model, one, tmp_path, *how)
    with raises(ConfigError, leaves="labels:1", says="objective.level=sequence"):
        config_of(model, files, tmp_path, *how, "objective.level=token")
    with raises(ConfigError, leaves="conversations", says="objective=classify"):
        config_of(model, {"labels": files["samples"]}, tmp_path, *how, "objective.classes=[a,b]")


@pytest.mark.parametrize(
    ("overrides", "leaves"),
    [
        (("objective=distill",), "objective=distill"),
        (("objective=sft", "objective.teacher=x"), ["objective.teacher", "objective=distill"]),
        (("objective=sft", "objective.dims=[2]"), ["objective.dims", "objective=embed"]),
        (("objective=embed", "objective.dims=[4,2]"), ["objective.dims=[4, 2]", "smallest first"]),
        (("objective=reward", "export=adapters"), ["export=adapters", "objective=reward"]),
    ],
)
def test_options_of_other_objectives_are_refused(overrides, leaves):
    with raises(ConfigError, leaves=leaves):
        compose(*SMALL, *overrides, spec=finetune.COMMAND)


def test_a_teacher_that_is_not_there_is_named_by_its_key(model, files, tmp_path):
    config = config_of(model, files, tmp_path, "objective=distill", "objective.teacher=nowhere")
    with raises(ConfigError, leaves="objective.teacher=nowhere"):
        finetune.prepare(config)


def test_more_dims_than_there_are(model, files, tmp_path):
    config = config_of(model, files, tmp_path, "objective=embed", "objective.dims=[8,64]")
    with raises(ConfigError, leaves="objective.dims=[8, 64]", fix="16"):
        finetune.build(config)


def test_tags_stand_at_the_ends_of_words(model):
    from experiments.data.labelled import encode_labels

    tokenizer = open_directory(model)
    record = {"tokens": ["ab", "c"], "tags": ["x", "y"]}
    ((ids, marks),) = encode_labels(record, tokenizer, ["x", "y"], True)
    assert tokenizer.decode(ids[1:-1].tolist()) == "ab c"
    assert marks.tolist() == [0, 0, 1, 0, 2, 0]  # begin, a, b, a blank, c, the end


@pytest.mark.parametrize(
    "more",
    [{"label": 0}, {"score": 0.2}, {"similarity": 3}, {"negative": "b"}, {"neg": ["b"]}, {"weight": 0.5}],
    ids=lambda more: next(iter(more)),
)
def test_twins_that_may_not_belong_together_are_refused(model, tmp_path, more):
    path = write(tmp_path / "twins", [{"query": "a", "positive": "a b", **more}])
    with raises(ConfigError, leaves=["twins:1", next(iter(more))], fix="leave"):
        prepare(path, open_directory(model), RecordPolicy("twins", 32), cache=tmp_path / "cache")


def test_fields_that_labelled_records_do_not_read_are_counted(model, tmp_path):
    tokenizer = open_directory(model)
    twins = [{"query": "a", "positive": "a b", "label": 1, "title": "b", "note": ""}]
    texts = [{"text": "a", "label": "x", "title": "b"}]
    for kind, records in (("twins", twins), ("labels", texts)):
        policy = RecordPolicy(kind, 32, classes=("x",) if kind == "labels" else ())
        (data,) = prepare(write(tmp_path / kind, records), tokenizer, policy, cache=tmp_path / "cache")
        assert data.unread == {"title": 1}
    with raises(ConfigError, leaves=["weighed:1", "weight", "repeat"]):
        path = write(tmp_path / "weighed", [{**texts[0], "weight": 2}])
        prepare(path, tokenizer, RecordPolicy("labels", 32, classes=("x",)), cache=tmp_path / "cache")


def test_classes_that_are_whole_numbers_are_in_their_order():
    """Whoever compares the likeliest class with a dataset's numbers would be wrong from 2 on."""
    from experiments.data.labelled import classes_in

    records = [{"text": "a", "label": n} for n in (11, 2, 0, 10, 1)]
    assert classes_in(iter(records)) == ["0", "1", "2", "10", "11"]
    assert classes_in(iter([*records, {"text": "a", "label": "b"}])) == ["0", "1", "10", "11", "2", "b"]


def test_a_class_of_the_first_token_is_learned(model, tmp_path):
    """A first token is no target of a language model, but it has a class like any other."""
    tokenizer = replace(open_directory(model), begin=())
    path = write(tmp_path / "words", [{"tokens": ["a", "b"], "tags": ["x", "y"]}])
    policy = RecordPolicy("labels", 9, classes=("x", "y"), words=True)
    (data,) = prepare(path, tokenizer, policy, cache=tmp_path / "cache")
    assert data.learned == 2
