"""The bench: its configuration, its arithmetic, and every case once in its smallest form."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_command
from errors import raises

import fnshard as fs
from experiments import ROOT
from experiments.bench import micro, plans, published
from experiments.bench.checkpoint import compare
from experiments.bench.command import COMMAND
from experiments.bench.config import CASES, FNSHARD, MICRO, MUON, NARROW, TORCH, BenchConfig, read
from experiments.bench.contenders import CONTENDERS
from experiments.bench.measure import Heap, interleave, log_live_bytes, ratio, time_work
from experiments.bench.sizes import read_decoder, size_names
from experiments.lib.checks import ConfigError
from experiments.lib.decoder import DecoderConfig
from fnshard.analysis.calibrate import vary

MB = 2**20

# ------------------------------------------------------------------ configuration


def test_null_depends_on_the_case_and_the_device():
    config = COMMAND.read({})
    assert (config.case, config.ranks, config.size, config.dtype) == ("peers", 2, "25m", "fp32")
    assert (config.reduce_dtype, COMMAND.read({"dtype": "bf16"}).reduce_dtype) == (
        torch.float32,
        torch.bfloat16,
    )
    assert [COMMAND.read({"case": c}).rows for c in ("peers", "memory")] == [1, 4]
    assert COMMAND.read({"case": "memory", "rows": 3}).rows == 3


def test_all_mistakes_in_one_error():
    wrong = {"size": "9b", "dtype": "fp8", "contenders": ["ddp", "horovod"], "rounds": 0}
    with raises(ConfigError, says="4 problems") as caught:
        COMMAND.read(wrong)
    for key in ("size=9b", "dtype=fp8", "contenders=horovod", "rounds=0"):
        assert key in str(caught.value)
    with raises(ConfigError, leaves="case=speed", says=", ".join(CASES)):
        COMMAND.read({"case": "speed"})
    with raises(ConfigError, leaves=["plans=zero4", "'zero4'"], says="not ddp"):
        plans.choose_plans(COMMAND.read({"case": "memory", "plans": ["zero4"]}))
    if not torch.cuda.is_available():
        with raises(ConfigError, leaves="device=cuda", fix="device=cpu"):
            COMMAND.read({"device": "cuda"})
    assert {*TORCH, *FNSHARD, *MUON, *MICRO, *NARROW} == {*CONTENDERS}


@pytest.mark.parametrize("ranks", [0, 1, 3, 4])
def test_a_case_of_two_processes_takes_no_other_number(ranks):
    """`parity` restores checkpoints on two, and would show every such layout as one that fails."""
    assert COMMAND.read({"case": "parity"}).ranks == COMMAND.read({"case": "parity", "ranks": 2}).ranks == 2
    wrong = {"case": "parity", "ranks": ranks}
    with raises(ConfigError, leaves=[f"ranks={ranks}", "parity"], fix="ranks=2") as caught:
        COMMAND.read(wrong | {"tensor": 2})
    assert len(str(caught.value).splitlines()) == 1
    with raises(ConfigError, leaves=[f"ranks={ranks}", "rounds=0"], fix="ranks=2", says="2 problems"):
        COMMAND.read(wrong | {"rounds": 0})
    with raises(ConfigError, leaves=["device=cuda", "parity"], fix="device=cpu"):  # which has one rank
        COMMAND.read({"case": "parity", "device": "cuda"})
    assert COMMAND.read({"case": "peers", "ranks": 4}).ranks == 4


def test_every_option_has_a_sentence():
    lines = re.findall(r"^        (\w+(?:, \w+)*): ", BenchConfig.__doc__, re.MULTILINE)
    assert {name for line in lines for name in line.split(", ")} == {*BenchConfig.__dataclass_fields__}


def test_a_rank_reads_the_configuration_that_was_composed():
    config = COMMAND.read({"case": "executor", "parts": ["tiny"], "overrides": "a=1 'b=2'"})
    assert read(config.words()) == config


def test_the_readme_says_what_every_case_answers():
    text = (ROOT / "experiments" / "bench" / "README.md").read_text(encoding="utf-8")
    for name, case in CASES.items():
        answers = case.run.__doc__.splitlines()[0]
        assert re.search(rf"\| .*`{name}`.* \| {re.escape(answers)} \|", text), name


# ------------------------------------------------------------------ arithmetic


def test_every_round_makes_one_sample_of_each_in_a_new_order_and_ratios_cancel_drift():
    taken: list[str] = []
    works = {name: lambda name=name: taken.append(name) for name in "abc"}
    assert {name: len(s) for name, s in interleave(works, 9).items()} == {"a": 9, "b": 9, "c": 9}
    rounds = [tuple(taken[i : i + 3]) for i in range(0, 27, 3)]
    assert all(set(each) == {"a", "b", "c"} for each in rounds) and len(set(rounds)) > 2
    drift = [1.0, 3.0, 10.0, 2.0, 1.0]
    assert ratio([2 * d for d in drift], drift) == pytest.approx(2.0)
    clock = iter([0.0, 6.0])  # a sample is the mean of several steps
    assert time_work(lambda: taken.append("d"), steps=3, clock=lambda: next(clock)) == 2.0
    assert taken.count("d") == 3


def test_what_was_not_restored_right_is_no_measurement():
    saved = {"a": torch.ones(2), "b": torch.zeros(2)}
    compare(saved, dict(saved))
    with pytest.raises(AssertionError, match="b is not what was saved"):
        compare(saved, {**saved, "b": torch.ones(2)})


def test_sizes_are_read_as_yaml_reads_them():
    """And those of the GPU's cases are in shapes that tensor cores take: multiples of 64."""
    yaml = pytest.importorskip("yaml")
    for path in (ROOT / "conf" / "model").glob("*.yaml"):
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert values.pop("defaults") == ["/schema/model@_here_"]
        assert read_decoder(path.stem) == DecoderConfig(**values)
    assert size_names() == sorted(p.stem for p in (ROOT / "conf" / "model").glob("*.yaml"))
    for name in ("1b", "8b"):
        model = read_decoder(name)
        sizes = (model.width, model.head, model.kv_heads * model.head, model.hidden, model.vocab)
        assert not model.tied and all(size % 64 == 0 for size in sizes)


# ------------------------------------------------------------------ published rows


def test_every_published_row_is_predicted_or_left_out_with_a_reason():
    rows, reasons = published.read_published()
    with published.ROWS.open(encoding="utf-8") as file:
        assert len(rows) + sum(reasons.values()) == len(list(csv.DictReader(file)))
    assert len(rows) > 200 and all(row.rate > 0 for row in rows)
    small = min(rows, key=lambda row: row.model.parameters)
    found = published.compare(replace(small, model=replace(small.model, layers=2), micro_batches=1))
    seconds = found.step.predicted
    assert all(0 < seconds[name] <= seconds[""] for name in published.CONSTANTS)
    assert seconds["matmul"] < seconds[""] and found.error() == abs(found.rate() / small.rate - 1)
    fit, held = published.split_sources(rows)
    assert len(fit) == 4 and len(held) == 5  # one source has pipelines alone, and is held out
    assert set(fit) | set(held) == {row.source for row in rows}
    assert {row.compute_dtype for row in rows} == {"bfloat16", "float8_e4m3fn"} and any(
        "context" in row.axes for row in rows
    )


@pytest.mark.long
def test_a_published_row_with_a_pipeline_is_held_out_and_predicted():
    rows, _ = published.read_published()
    piped = [row for row in rows if "pipeline" in row.axes]
    assert len(piped) == 2 and {row.preset for row in piped} == {"shard_grad_op"}
    assert {(row.chunks, row.recompute) for row in piped} == {(8, "none")}
    assert {row.source for row in piped} <= set(published.split_sources(rows)[1])
    sizes = {"width": 64, "layers": 3, "heads": 4, "kv_heads": 2, "mlp": 128, "vocab": 128, "context": 64}
    few = replace(
        piped[0], model=replace(piped[0].model, **sizes), axes={"pipeline": 2, "shard": 2}, chunks=2
    )
    many, fewer = (published.compare(replace(few, micro_batches=count)) for count in (4, 2))
    assert many.tokens == 2 * fewer.tokens
    assert fewer.step.seconds({}) < many.step.seconds({}) < 2 * fewer.step.seconds({})  # less of it is idle


@pytest.mark.long
def test_published_rows_that_share_a_trace_of_few_layers_are_priced_as_steps_lowered_in_full():
    rows, _ = published.read_published()
    sizes = {"width": 64, "layers": 7, "heads": 4, "kv_heads": 2, "mlp": 128, "vocab": 128, "context": 64}
    small = replace(rows[0], model=replace(rows[0].model, **sizes), axes={"shard": 4}, rows=2)
    same = [
        replace(small, recompute="selective", micro_batches=2, axes={"replicate": 2, "shard": 2}),
        replace(small, recompute="none", axes={"pipeline": 2, "shard": 2}, chunks=2, micro_batches=4),
    ]
    other = [replace(small, rows=1), replace(small, compute_dtype="float32")]
    assert published.find_alike([*same, *other]) == [same, *([row] for row in other)]
    for row, found in zip(same, published.compare_alike(same), strict=True):
        step, params, batch = published.make_step(row, row.micro_batches)
        for name, hardware in vary(fs.Hardware.named(row.hardware), published.CONSTANTS).items():
            exact = step.lower(params, *batch).timeline(hardware).step_seconds
            assert found.step.predicted[name] == pytest.approx(exact, rel=1e-12)


# ------------------------------------------------------------------ memory


def test_live_bytes_of_known_tensors():
    def make():
        kept = torch.zeros(3 * MB // 4)

        def step():
            once = torch.zeros(2 * MB // 4)
            return (once + once).sum() + kept[0]  # two temporaries of 2 MB at once

        return step

    seen = log_live_bytes(make, torch.device("cpu"))
    assert 3 * MB <= seen.between < 3.1 * MB
    assert 7 * MB <= seen.peak < 7.1 * MB


def test_a_block_over_another_proves_it_freed():
    heap = Heap()
    heap.apply(1000, 100)
    heap.apply(1200, 50)
    heap.apply(1050, 10)  # inside the first one
    assert heap.live == 60
    heap.apply(900, 400)  # over both
    assert heap.live == 400
    heap.apply(1234, -50)  # of a block that is not known
    heap.apply(900, -400)
    assert heap.live == 0


# ------------------------------------------------------------------ every case, from the command line


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that runs `python -m experiments.bench case=...` and returns what was written."""

    def run(case: str, *overrides: str) -> dict[str, Any]:
        words = ["experiments.bench", f"hydra.run.dir={tmp_path}/out", f"case={case}", *overrides]
        done = run_command(words, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        table = (tmp_path / "out" / f"{case}.txt").read_text().strip()
        assert table and table in done.stdout
        return json.loads((tmp_path / "out" / f"{case}.json").read_text())

    return run


TINY = ("size=tiny", "length=16", "rounds=1", "backend=eager")


@pytest.mark.long
@pytest.mark.parametrize("peers", [["ddp"], ["ddp", "fsdp2"]], ids=str)
def test_contenders_are_measured_and_agree_with_the_reference(command, peers):
    few = f"contenders=[{','.join(peers)},full_shard]"
    found = command("peers", *TINY, "rounds=2", "warmup=1", "losses=3", "memory=1", few)
    contenders, parameters = found["contenders"], found["parameters"]
    assert list(contenders) == [*peers, "full_shard"] and len(found["reference_losses"]) == 3
    for name, row in contenders.items():
        assert len(row["seconds"]) == 2 and len(row["losses"]) == 3
        assert row["tokens_per_s"] == pytest.approx(2 * 16 / row["step_ms"] * 1e3)
        assert row["peak_bytes"] > row["between_bytes"] > 0 and row["first_step_s"] > 0
        assert set(row["ratios"]) == {*peers} - {name}
        assert row["max_loss_difference"] < 1e-5
        # Parameters and two moments in fp32, full or halved. DDP keeps its buckets of gradients, too, and
        # the parameters of full_shard lie in the memory that ranks share.
        copies = {"ddp": 4, "fsdp2": 1.5, "full_shard": 1}[name]
        resting = row["between_bytes"] - row["transport_bytes"]
        assert copies <= resting / (4 * parameters) < copies + 0.4, name  # gloo may still hold a buffer


RUN = " ".join(
    ["model.width=16", "model.layers=1", "model.context=16", "data.rows=4", "data.held_out_rows=4",
     "run.backend=eager", "run.sample_tokens=1", "mesh.shard=1", "run.device=cpu"]
)  # fmt: skip


@pytest.mark.long  # each measures for seconds
@pytest.mark.parametrize(
    ("case", "overrides"),
    [
        ("checkpoint", [*TINY, "steps=2"]),
        ("executor", ["rounds=2"]),
        ("budget", ["rounds=1", "backend=eager"]),
        ("memory", [*TINY, "memory=1", "plans=[full_shard,ddp,remat-bf16-host]"]),
        ("bubble", [*TINY, "memory=0", "plans=[pipeline2-accumulate2-2x16]"]),
        ("predict", ["ranks=1", "rounds=1", "backend=eager", "plans=[5m-full_shard]"]),
        ("starts", ["rounds=1", f"overrides='{RUN}'"]),  # whole runs
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_case_measures_something(case, overrides, command):
    rows = command(case, *overrides)["rows"]
    assert len(rows) > 1
    numbers = [float(cell) for row in rows[1:] for cell in row[1:] if re.fullmatch(r"[\d.]+", cell)]
    assert numbers and min(numbers) > 0


def test_starts_of_two_checkouts_take_turns(tmp_path, monkeypatch):
    made: list[tuple[str, Path]] = []

    def train(overrides, place, checkout=ROOT):
        made.append((checkout.name, place))
        return float(len(made))

    monkeypatch.setattr(micro, "time_first_row", train)
    config = COMMAND.read({"case": "starts", "rounds": 2, "checkout": str(tmp_path / "before")})
    found = micro.starts(config, tmp_path)
    assert [name for name, _ in made] == [ROOT.name, ROOT.name, "before", "before"] * 2
    assert made[0][1] == made[1][1] != made[2][1]  # the second start finds the caches of the first
    assert found.values["seconds"]["before, second start"] == [4.0, 8.0]
