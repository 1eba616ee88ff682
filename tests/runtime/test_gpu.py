"""On one GPU, a mesh of one over NCCL: the same step as single-process torch. Skipped without CUDA."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from models import MODELS, gpt
from reference import adamw, train
from sharded import assert_floats, assert_same, make_step, specs_of
from sharded import train as shard_train
from torch import Tensor

import fnshard as fs
from experiments.lib.decoder import Decoder, DecoderConfig, next_token_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RATE = 1e-3
CONFIG = DecoderConfig(width=128, layers=4, heads=4, kv_heads=2, context=64)


@pytest.fixture(scope="module")
def mesh():
    """Yield a mesh of one over a real NCCL group."""
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield fs.make_mesh(shard=1, device="cuda")
    finally:
        dist.destroy_process_group()


def on_gpu(model):
    """Return a model with its parameters and batches on the GPU."""

    def batch(seed: int) -> tuple[Tensor, ...]:
        return tuple(part.cuda() for part in model.batch(seed))

    return replace(model, params={p: v.detach().cuda() for p, v in model.params.items()}, batch=batch)


def train_plainly(model, steps: int):
    parts = [[batch] for batch in model.batches(steps)]
    return train(model.loss, model.params, parts, adamw(RATE), frozen=model.frozen)


# ------------------------------------------------------------------ fp64: exact
@pytest.mark.parametrize("preset", sorted(fs.presets.PRESETS))
def test_presets_equal_torch(mesh, preset):
    model = on_gpu(gpt())
    specs = specs_of(model, preset, mesh)
    got = shard_train(0, mesh, model, specs, fs.optim.adamw(RATE, weight_decay=0.1))
    assert_same(got, train_plainly(model, len(got.losses)))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_equal_torch(mesh, name):
    model = on_gpu(MODELS[name]())
    specs = specs_of(model, "full_shard", mesh)
    got = shard_train(0, mesh, model, specs, fs.optim.adamw(RATE, weight_decay=0.1), steps=3)
    # Torch recomputes a checkpointed module with the values that functional_call has put back by then.
    truth = on_gpu(MODELS["gpt"]()) if name == "checkpoint" else model
    assert_same(got, train_plainly(truth, 3))


TIERS = {
    "optimizer on the host": {"optimizer_memory": "host"},
    "all on the host": {"memory": "host", "optimizer_memory": "host"},
    "streamed": {"memory": "host", "optimizer_memory": "host", "update_on": "device"},
    "disk": {"memory": "disk", "optimizer_memory": "disk"},
}


@pytest.mark.parametrize("remat", ["none", "unit", "offload", "unit+offload"])
@pytest.mark.parametrize("tier", TIERS)
def test_tiers_and_remat_equal_torch(mesh, tier, remat, tmp_path):
    model = on_gpu(gpt())
    specs = specs_of(model, "full_shard", mesh, **TIERS[tier])
    optimizer = fs.optim.adamw(RATE, weight_decay=0.1)
    how = {"remat": remat, "disk_dir": str(tmp_path), "accumulate": 3}
    got = shard_train(0, mesh, model, specs, optimizer, **how)
    assert_same(got, train_plainly(model, len(got.losses)))


def test_what_rests_on_the_host_is_pinned_and_off_the_device(mesh):
    model = on_gpu(gpt())
    specs = specs_of(model, "full_shard", mesh, **TIERS["all on the host"])
    state = make_step(mesh, model, specs, fs.optim.adamw(RATE)).init(model.params)
    slots = [v for kept in state.opt_state.values() for v in kept.values()]
    assert all(v.device.type == "cpu" and v.is_pinned() for v in [*slots, *state.params.values()])


@pytest.mark.parametrize("remat", ["none", "unit", 0.5])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_predicted_peak_is_what_the_allocator_saw(mesh, tier, remat):
    """Within 5%, from the generated kernels."""
    config = replace(CONFIG, width=512, layers=6, heads=8, context=256)
    torch.manual_seed(0)
    apply, params = fs.make_functional(Decoder(config).cuda())
    policy = {"memory": tier, "optimizer_memory": tier, "compute_dtype": torch.bfloat16}
    specs = fs.presets.full_shard(params, mesh, **policy)
    fn = lambda p, x, y: next_token_loss(apply(p, x), y)  # noqa: E731
    step = fs.shard_step(fn, specs, mesh=mesh, optimizer=fs.optim.adamw(RATE), remat=remat)
    batch = tuple(torch.randint(0, config.vocab, (8, 256), device="cuda") for _ in range(2))
    torch.ones(8, 8, dtype=torch.bfloat16, device="cuda").mm(batch[0][:, :8].bfloat16())  # cuBLAS's workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated() - sum(part.nbytes for part in batch)
    state = step.init(params)
    for _ in range(2):
        state, _ = step(state, *batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    state, _ = step(state, *batch)
    torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated() - before
    predicted = step.lower(state, *batch).memory_analysis().peak_bytes
    assert abs(predicted / measured - 1) <= 0.05, (predicted, measured)


# ------------------------------------------------------------------ Inductor, and shorter dtypes
def decoder() -> tuple[Decoder, list[tuple[Tensor, Tensor]]]:
    """Make a seeded decoder in fp32 on the GPU, and batches."""
    torch.manual_seed(0)
    model = Decoder(CONFIG).cuda()
    drawn = torch.randint(CONFIG.vocab, (10, 4, CONFIG.context + 1), device="cuda")
    return model, [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in drawn]


def torch_losses(dtype: torch.dtype | None) -> list[float]:
    """Train in plain torch: fused AdamW, autocast if a dtype is given."""
    model, batches = decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1, fused=True)
    losses = []
    for tokens, targets in batches:
        with torch.autocast("cuda", dtype or torch.float32, enabled=dtype is not None):
            logits = model(tokens)
        loss = next_token_loss(logits, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compute_losses(mesh, metrics_of=lambda metrics: None, **how):
    """Return losses, and what `metrics_of` makes of each step's metrics."""
    policy = {name: how.pop(name) for name in ("compute_dtype", "reduce_dtype") if name in how}
    model, batches = decoder()
    apply, params = fs.make_functional(model)
    step = fs.shard_step(
        lambda p, tokens, targets: next_token_loss(apply(p, tokens), targets),
        fs.presets.full_shard(params, mesh, **policy),
        mesh=mesh,
        optimizer=fs.optim.adamw(RATE, weight_decay=0.1),
        **how,
    )
    state = step.init({p: v.detach() for p, v in params.items()})
    losses, seen = [], []
    for tokens, targets in batches:
        state, metrics = step(state, tokens, targets)
        losses.append(metrics["loss"].item())
        seen.append(metrics_of(metrics))
    return losses, seen


def test_inductor_equals_torch_in_fp32(mesh):
    losses, _ = compute_losses(mesh)
    assert_floats(losses, torch_losses(None), atol=1e-4)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_bf16_stays_near_autocast(mesh, backend):
    short = {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    losses, _ = compute_losses(mesh, backend=backend, **short)
    exact, autocast = torch_losses(None), torch_losses(torch.bfloat16)
    worst = max(abs(a - b) for a, b in zip(autocast, exact, strict=True))
    assert_floats(losses, exact, atol=max(3 * worst, 2e-2))


def test_fp16_scales_its_loss(mesh):
    short = {"compute_dtype": torch.float16, "reduce_dtype": torch.float32}
    losses, scales = compute_losses(mesh, lambda metrics: metrics["loss_scale"].item(), **short)
    assert all(scale >= 1 for scale in scales)
    assert_floats(losses, torch_losses(None), atol=5e-2)


def test_overflow_skips_the_update_and_halves_the_scale(mesh):
    model = on_gpu(gpt())

    def loss(params, ids, targets, factor):
        return model.loss(params, ids, targets) * factor

    specs = specs_of(model, "full_shard", mesh)
    step = make_step(mesh, model, specs, fs.optim.adamw(RATE), loss=loss, loss_scale="dynamic")
    state = step.init(model.params)
    batch = model.batch(0)
    state, before = step(state, *batch, torch.ones((), device="cuda", dtype=torch.float64))
    kept = {p: v.clone() for p, v in state.params.items()}
    state, after = step(state, *batch, torch.full((), float("inf"), device="cuda", dtype=torch.float64))
    assert after["loss_scale"].item() == before["loss_scale"].item() / 2
    assert after["skipped_steps"].item() == 1
    for path, value in kept.items():
        assert torch.equal(value, state.params[path]), path


def test_the_chunked_cross_entropy_is_torchs(mesh):
    """bf16 products, whose sums are fp32 on both sides; four chunks."""
    hidden, weight = (torch.randn(n, 64, device="cuda").bfloat16().requires_grad_() for n in (96, 160))
    targets = torch.randint(160, (96,), device="cuda")
    truth = torch.nn.functional.cross_entropy(hidden.float() @ weight.float().t(), targets)
    mean = fs.losses.linear_cross_entropy(hidden, weight, targets, chunk=24)
    got = mean.total / mean.count
    torch.testing.assert_close(got, truth, rtol=1e-3, atol=1e-3)
    expected = torch.autograd.grad(truth, (hidden, weight))
    for a, b in zip(torch.autograd.grad(got, (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=3e-2, atol=1e-3)


def test_a_deterministic_run_is_the_same_again(mesh):
    runs = []
    for _ in range(2):
        model = on_gpu(gpt())
        specs = specs_of(model, "full_shard", mesh)
        runs.append(
            shard_train(0, mesh, model, specs, fs.optim.adamw(RATE), deterministic=True, backend="inductor")
        )
    assert_same(runs[1], runs[0], atol=0.0)


def test_tensors_on_the_host_are_moved_before_a_trace(mesh):
    number, table = torch.tensor(2.0), torch.arange(8.0)
    params, x = {"w": torch.ones(8, 8, device="cuda")}, torch.ones(2, 8, device="cuda")
    specs = fs.presets.full_shard(params, mesh)
    loss = lambda p, x: (x @ p["w"] + table + torch.arange(8)).sum() * number  # noqa: E731
    step = fs.shard_step(loss, specs, mesh=mesh)
    value, _ = step(step.init(params), x)
    assert value.item() == 2 * (2 * 8 * 8 + 2 * 2 * 28)
    assert all(v.is_cuda for v in step.lower(params, x).program.constants.values())


def test_nothing_is_left_behind(mesh):
    """As many bytes are held after two steps as after eight."""
    model = on_gpu(gpt())
    specs = specs_of(model, "full_shard", mesh)
    step = make_step(mesh, model, specs, fs.optim.adamw(RATE))
    state, kept = step.init(model.params), []
    for batch in model.batches(8):
        state, metrics = step(state, *batch)
        del metrics
        torch.cuda.synchronize()
        kept.append(torch.cuda.memory_allocated())
    assert kept[-1] <= kept[1]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_triton_op_is_one_op_of_the_program(mesh, backend):
    triton = pytest.importorskip("triton")
    tl = pytest.importorskip("triton.language")

    @triton.jit
    def kernel(x, out, count, block: tl.constexpr):
        at = tl.program_id(0) * block + tl.arange(0, block)
        value = tl.load(x + at, mask=at < count)
        tl.store(out + at, value * value, mask=at < count)

    @torch.library.triton_op(f"fnshard_gpu::square_{backend}", mutates_args={})
    def square(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.library.wrap_triton(kernel)[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), 64)
        return out

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    square.register_autograd(lambda ctx, grad: 2 * ctx.saved_tensors[0] * grad, setup_context=save)
    params, x = {"w": torch.randn(8, 8, device="cuda")}, torch.randn(4, 8, device="cuda")
    step = fs.shard_step(
        lambda p, x: square(x @ p["w"]).sum(), fs.presets.full_shard(params, mesh), mesh=mesh, backend=backend
    )
    loss, grads = step(step.init(params), x)
    torch.testing.assert_close(loss, (x @ params["w"]).square().sum())
    torch.testing.assert_close(grads["w"].view(8, 8), 2 * x.T @ (x @ params["w"]))
