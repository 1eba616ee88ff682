"""The bench: its configuration, its arithmetic, and one tiny run from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fnshard as fs
from experiments.bench.__main__ import SPEC
from experiments.bench.contenders import Contender
from experiments.bench.measure import Track, sample
from experiments.bench.memory import AllocationLog, Heap, follow, live_bytes
from experiments.bench.report import model_flops
from experiments.configs.decoders import DecoderConfig, decoder, names
from experiments.configs.train import ConfigError
from experiments.tables import aligned, ratio
from experiments.training.decoder import Decoder, next_token_loss
from fnshard.analysis.hardware import mfu

ROOT = Path(__file__).resolve().parents[2]
MB = 2**20
COMMAND = [sys.executable, "-m", "experiments.bench"]


def run(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, f"hydra.run.dir={folder}", *overrides]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


# ------------------------------------------------------------------ configuration


def test_null_depends_on_the_device():
    config = SPEC.read({})
    assert (config.ranks, config.size, config.dtype) == (2, "25m", "fp32")
    assert SPEC.read({"rows": 3}).rows == 3
    assert config.reduce_dtype == torch.float32
    assert SPEC.read({"dtype": "bf16"}).reduce_dtype == torch.bfloat16


def test_all_mistakes_in_one_error():
    wrong = {"size": "9b", "dtype": "fp8", "contenders": ["ddp", "horovod"], "rounds": 0}
    with pytest.raises(ConfigError, match="4 problems") as caught:
        SPEC.read(wrong)
    for key in ("size=9b", "dtype=fp8", "contenders=horovod", "rounds=0"):
        assert key in str(caught.value)
    with pytest.raises(ConfigError, match=r"2 problems:\n  .*'many'.\n  epochs=3: no such key"):
        SPEC.read({"rounds": "many", "epochs": 3})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_is_said_so():
    with pytest.raises(ConfigError, match=r"no CUDA device.*Fix: device=cpu"):
        SPEC.read({"device": "cuda"})


def test_bad_overrides_are_one_error_from_the_shell(tmp_path):
    wrong = ("+mesh.z=1", "rounds=many", "contenders=[horovod]")
    done = run(tmp_path, *wrong)
    assert done.returncode == 2 and done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr
    assert all(override.lstrip("+").split("=")[0] in done.stderr for override in wrong)
    assert not (tmp_path / "ranks").exists()


# ------------------------------------------------------------------ arithmetic


def test_ratios_cancel_drift():
    drift = [1.0, 3.0, 10.0, 2.0, 1.0]
    assert ratio([2 * d for d in drift], drift) == pytest.approx(2.0)


def test_mfu_is_the_same_by_formula_and_by_counting():
    """The bench multiplies sizes, a lowered step counts its operators: equal FLOPs, equal MFU."""
    config = SPEC.read({"size": "tiny", "rows": 2, "length": 64, "ranks": 1})
    mesh = fs.make_mesh(abstract=True)
    apply, params = fs.make_functional(Decoder(config.model))
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    loss = lambda p, x, y: next_token_loss(apply(p, x), y)  # noqa: E731
    specs = fs.presets.full_shard(params, mesh)
    step = fs.shard_step(loss, specs, mesh=mesh, optimizer=fs.optim.sgd(0.1), remat="unit")
    paper = step.lower(params, tokens, tokens).timeline("h100")
    assert paper.model_flops == model_flops(config)
    assert paper.mfu == mfu(model_flops(config), paper.step_seconds, 67e12)


def test_a_gpu_that_nobody_knows_has_no_peak():
    assert fs.Hardware.of_gpu("NVIDIA H100 80GB HBM3") is fs.Hardware.named("h100")
    assert fs.Hardware.of_gpu("NVIDIA GeForce GTX 1080") is None


def test_columns_align():
    assert aligned([["a", "1"], ["bcd", "22"]]) == ["a     1", "bcd  22"]


# ------------------------------------------------------------------ memory


def test_live_bytes_of_known_tensors():
    def make():
        kept = torch.zeros(3 * MB // 4)

        def step():
            once = torch.zeros(2 * MB // 4)
            return (once + once).sum() + kept[0]  # two temporaries of 2 MB at once

        return step

    seen = live_bytes(make, torch.device("cpu"))
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


def test_only_the_steps_themselves_count():
    before = [(0.0, 0, 100), (1.0, 1000, 900), (2.0, 1000, -900)]
    step = [(5.0, 200, 30), (6.0, 300, 40), (7.0, 200, -30)]
    assert follow([(4.0, 8.0)], before + step) == AllocationLog(peak=170, between=140)


# ------------------------------------------------------------------ the whole


@pytest.mark.long  # the whole bench; its parts are tested above
def test_every_contender_is_measured_and_agrees_with_the_reference(tmp_path):
    done = run(
        tmp_path, "size=tiny", "length=32", "rounds=2", "warmup=1", "losses=3", "memory=1", "backend=eager",
        "contenders=[limit,ddp,fsdp2,full_shard]",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "bench.json").read_text())
    contenders, parameters = written["contenders"], written["model"]["parameters"]
    columns = [
        "step ms",
        "/ ddp",
        "/ fsdp2",
        "tokens/s",
        "peak MB",
        "between MB",
        "first step s",
        "loss diff",
    ]
    for text in (*columns, *(f"\n{name} " for name in contenders), f"{parameters / 1e6:.1f}M parameters"):
        assert text in done.stdout
    assert (tmp_path / "bench.txt").read_text().strip() in done.stdout
    assert set(contenders) == {"limit", "ddp", "fsdp2", "full_shard"}
    assert len(written["reference_losses"]) == 3
    for name, row in contenders.items():
        assert len(row["seconds"]) == 2 and len(row["losses"]) == (0 if name == "limit" else 3)
        assert row["tokens_per_s"] == pytest.approx(2 * 32 / row["step_ms"] * 1e3)
        assert row["peak_bytes"] > row["between_bytes"] > 0 and row["first_step_s"] > 0
        assert set(row["ratios"]) == {"limit", "ddp", "fsdp2"} - {name}
        if name == "limit":  # it trains on one rank's batches
            assert "max_loss_difference" not in row
            continue
        assert row["max_loss_difference"] < 1e-5
        # Parameters and two moments in fp32, full or halved; DDP keeps its buckets of gradients, too.
        copies = 4 if name == "ddp" else 1.5
        resting = row["between_bytes"] - row["transport_bytes"]
        assert copies <= resting / (4 * parameters) < copies + 0.4, name  # gloo may still hold a buffer
    phases = contenders["full_shard"]["phases"]
    assert {"forward run", "backward run", "update update"} <= set(phases["lines_ms"])
    assert sum(phases["lines_ms"].values()) <= phases["step_ms"]


# ------------------------------------------------------------------ what a bare machine has


def test_sizes_are_read_as_yaml_reads_them():
    """And those of the bench's own are in shapes that tensor cores take: multiples of 64."""
    yaml = pytest.importorskip("yaml")
    for path in (ROOT / "conf" / "model").glob("*.yaml"):
        assert decoder(path.stem) == DecoderConfig(**yaml.safe_load(path.read_text(encoding="utf-8")))
    assert names() == sorted(p.stem for p in (ROOT / "conf" / "model").glob("*.yaml"))
    for name in ("1b", "8b"):
        model = decoder(name)
        sizes = (model.width, model.head, model.kv_heads * model.head, model.hidden, model.vocab)
        assert not model.tied and all(size % 64 == 0 for size in sizes)
    assert (decoder("1b").layers, decoder("1b").width) == (16, 2048)


def test_a_sample_is_several_steps_and_a_mean_of_them():
    taken = []
    contender = Contender(lambda tokens, targets: taken.append(tokens) or torch.tensor(1.0))
    track, task = Track(contender), SimpleNamespace(mesh=fs.make_mesh(abstract=True))
    feed = [(number, number) for number in range(7)]
    began = time.perf_counter()
    seconds = [sample(track, feed, task, 3) for _ in range(2)]
    assert 3 * sum(seconds) <= time.perf_counter() - began
    assert taken == [0, 1, 2, 3, 4, 5] and len(track.losses) == track.number == 6
