"""Losses of language models: the textbook's numbers, without the textbook's logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors import raises
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from toys import step_of

import fnshard as fs
from experiments.bench.measure import log_live_bytes
from fnshard import LayoutSpec, P, losses
from fnshard.analysis.storages import StorageTracker
from fnshard.losses import Mean
from fnshard.losses import linear as fused

V, D = 50, 16


def numbers(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 7, D, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(V, (3, 7), generator=generator)
    targets[0, :4] = losses.IGNORE
    return hidden, weight, targets


@pytest.mark.parametrize("chunk", [0, 1, 4, 21, 1000])
@pytest.mark.parametrize("trains", [True, False])
def test_it_is_torchs_cross_entropy(chunk: int, trains: bool) -> None:
    hidden, weight, targets = numbers()
    hidden.requires_grad_()
    weight.requires_grad_(trains)
    mean = losses.linear_cross_entropy(hidden, weight, targets, chunk=chunk)
    plain = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), targets.flatten())
    expected = [hidden, weight] if trains else [hidden]
    torch.testing.assert_close(mean.total / mean.count, plain, atol=1e-13, rtol=0)
    for got, known in zip(
        torch.autograd.grad(mean.total / mean.count, expected),
        torch.autograd.grad(plain, expected),
        strict=True,
    ):
        torch.testing.assert_close(got, known, atol=1e-14, rtol=0)


def test_the_operator_holds_to_torchs_contract() -> None:
    hidden, weight, targets = numbers()
    flat = (hidden.flatten(0, 1).requires_grad_(), weight.requires_grad_(), targets.flatten(), 4)
    for parts in (1, 5):
        torch.library.opcheck(torch.ops.fnshard.token_parts.default, (*flat, parts))


def test_half_types_are_normalised_in_fp32() -> None:
    hidden, weight, targets = numbers(torch.bfloat16)
    mean = losses.linear_cross_entropy(hidden, weight, targets, chunk=4)
    logits = F.linear(hidden, weight).float()
    plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert mean.total.dtype == torch.float32
    torch.testing.assert_close(mean.total / mean.count, plain, atol=1e-4, rtol=0)


def test_logits_and_labels() -> None:
    logits, tokens = torch.randn(2, 5, V), torch.randint(V, (2, 5))
    mean = losses.next_token(logits, tokens)
    plain = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(mean.total / mean.count, plain)
    with raises(ValueError, leaves=["hidden [2, 3, 4]", "weight [7, 5]"], says="[..., D], [V, D] and [...]"):
        losses.linear_cross_entropy(torch.zeros(2, 3, 4), torch.zeros(7, 5), tokens)
    for target in (7, -1):  # no word
        one = losses.linear_cross_entropy(torch.zeros(2, 4), torch.zeros(7, 4), torch.tensor([0, target]))
        assert one.total.isinf()


def test_a_count_that_trains_is_refused_and_a_detached_one_is_a_number() -> None:
    params = {"w": torch.ones(3), "gate": torch.full((3,), 0.5), "b": torch.ones(3)}

    def weighted(p: Any, x: Tensor, detached: bool) -> Mean:
        count = (p["gate"] * 2).sum()
        return Mean((p["w"] * x + p["b"]).sum(), count.detach() if detached else count)

    step = step_of(weighted, params)
    with raises(fs.TraceError, leaves="count", fix="count.detach()"):
        step(params, torch.ones(3), False)
    _, grads = step(params, torch.arange(3.0), True)
    torch.testing.assert_close(grads["w"], torch.arange(3.0) / 3)


def test_a_large_vocabulary_is_never_there_for_all_tokens() -> None:
    """128k words, 4096 tokens: their logits in fp32 would be 2.1 GB; the peak is less than a third of it."""
    vocabulary, tokens = 128_256, 4096
    params = {
        "head": torch.empty(vocabulary, 64, device="meta"),
        "layers.0.w": torch.empty(64, 64, device="meta"),
    }

    def lowered(chunk: int | None) -> Any:
        def fn(p: Any, x: Tensor, targets: Tensor) -> Any:
            hidden = torch.tanh(F.linear(x, p["layers.0.w"]))
            if chunk is None:
                return F.cross_entropy(F.linear(hidden, p["head"]).flatten(0, 1).float(), targets.flatten())
            return losses.linear_cross_entropy(hidden, p["head"], targets, chunk=chunk)

        mesh = fs.make_mesh(shard=8, abstract=True)
        frozen = [("head", LayoutSpec(P("shard"), trainable=False)), ("*", LayoutSpec(P("shard")))]
        x = torch.empty(1, tokens, 64, device="meta")
        targets = torch.empty(1, tokens, dtype=torch.int64, device="meta")
        return fs.shard_step(fn, fs.match_specs(params, frozen), mesh=mesh).lower(params, x, targets)

    plain, fused = lowered(None), lowered(256)
    logits = 4 * vocabulary * tokens
    assert plain.memory_analysis().peak_bytes > 2 * logits
    assert fused.memory_analysis().peak_bytes < logits / 3
    flops = [low.timeline("h100").hardware_flops for low in (plain, fused)]
    assert flops[1] == pytest.approx(flops[0] * 3 / 2, rel=0.02)  # the backward makes the logits again


@pytest.mark.parametrize(
    ("frozen", "dtype"),
    [
        (False, torch.float32),
        *(
            pytest.param(f, d, marks=pytest.mark.long)
            for f, d in ((True, torch.float32), (True, torch.bfloat16))
        ),
    ],
)
def test_its_peak_is_a_seventh_of_all_logits_at_once(
    frozen: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator's numbers count, for fewer tokens and words, with chunks of the same share."""
    tokens, width, vocabulary = 2048 // 4, 512 // 4, 128_256 // 8
    monkeypatch.setitem(fused.CHUNK_BYTES, "cpu", fused.CHUNK_BYTES["cpu"] // 32)
    monkeypatch.setattr(fused, "RUN_NUMBERS", fused.RUN_NUMBERS // 32)
    draw = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, width, generator=draw) for n in (tokens, vocabulary))
    hidden, head = hidden.to(dtype).requires_grad_(), (head / width**0.5).to(dtype).requires_grad_(not frozen)
    targets = torch.randint(vocabulary, (tokens,), generator=draw)
    trained = [leaf for leaf in (hidden, head) if leaf.requires_grad]

    def plain() -> tuple[Tensor, ...]:
        return torch.autograd.grad(F.cross_entropy(F.linear(hidden, head).float(), targets), trained)

    def chunked() -> tuple[Tensor, ...]:
        mean = losses.linear_cross_entropy(hidden, head, targets)
        return torch.autograd.grad(mean.total / mean.count, trained)

    peaks = []
    for work in (plain, chunked):
        seen = log_live_bytes(lambda work=work: work, hidden.device, steps=1)
        peaks.append(seen.peak - seen.between)
    assert peaks[1] < 0.15 * peaks[0] and peaks[0] > 2 * 4 * tokens * vocabulary
    for one, other in zip(plain(), chunked(), strict=True):
        assert (one - other).abs().max() < {4: 1e-6, 2: 2e-2}[dtype.itemsize] * one.abs().max()


class _CuBLAS(TorchDispatchMode):
    """A mode with `mm` and `addmm` of half types to fp32, which torch has on CUDA alone."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.narrow = 0  # the largest result of a half type

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op is torch.ops.aten.mm.dtype:
            self.seen.append("mm")
            return args[0].float() @ args[1].float()
        if op is torch.ops.aten.addmm.dtype_out:
            self.seen.append("addmm")
            total, one, other, dtype = args
            assert (
                kwargs["out"] is total and total.dtype == dtype == torch.float32 and one.dtype == other.dtype
            )
            return total.add_(one.float() @ other.float())
        out = op(*args, **kwargs)
        if isinstance(out, Tensor) and out.dtype == torch.bfloat16:
            self.narrow = max(self.narrow, out.numel())
        return out


def test_on_a_gpu_half_types_are_summed_in_fp32_with_no_copy_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits come in fp32, and the weight's gradient is added in place; the CPU's results are expected."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(24, 16).bfloat16(), torch.randn(40, 16).bfloat16()
    targets, gradient = torch.randint(40, (24,)), torch.rand(24)

    def both() -> tuple[Tensor, ...]:
        sums, chosen = fused.token_parts._init_fn(hidden, weight, targets, 8, 1)
        slopes = gradient[None], -gradient[None]
        back = fused.token_parts_backward._init_fn(*slopes, sums, hidden, weight, targets, 8, True)
        return sums, chosen, *back

    expected = both()
    monkeypatch.setattr(fused, "sums_wide", lambda dtype, device: dtype == torch.bfloat16)
    with _CuBLAS() as cublas:
        got = both()
    assert cublas.seen == ["mm"] * 3 + ["mm", "addmm"] * 3
    assert cublas.narrow == weight.numel()  # the gradient that is handed out; no wider than a chunk's slopes
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_on_a_gpu_its_workspace_is_a_gigabyte_of_logits_and_one_sum() -> None:
    def workspace(device: str) -> int:
        with FakeTensorMode(), torch.no_grad():
            hidden, weight = (torch.empty(n, 64, dtype=torch.bfloat16) for n in (65_536, 32_768))
            numbers, targets = torch.empty(1, 65_536), torch.empty(65_536).long()
            with StorageTracker(device) as tracker:
                fused.token_parts_backward(numbers, numbers, numbers, hidden, weight, targets, 0, True)
        return tracker.peak.bytes

    results = 65_536 * 64 * 2 + 32_768 * 64 * 4  # the latter a sum in fp32
    assert 0.99 * 2**30 < workspace("cuda") - results < 1.02 * 2**30
    assert 0.99 * 2**27 < workspace("cpu") - results < 1.15 * 2**27


def test_log_probabilities_of_sequences() -> None:
    hidden, weight, targets = numbers()
    got = losses.sequence_logprobs(hidden, weight, targets, chunk=3)
    each = F.linear(hidden, weight).log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(got, (each * (targets != losses.IGNORE)).sum(-1), atol=1e-12, rtol=0)
