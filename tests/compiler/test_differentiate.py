"""Kernels: what a distinct segment's forward returns, saves and takes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from kernels import no_kernels
from toys import ROWS, WIDTH, assert_same_grads, chain, llama, lower, rows, run_chain, step_of

import fnshard as fs
from fnshard.compiler.kernels.differentiate import differentiate
from fnshard.compiler.kernels.kernel import Kernel
from fnshard.compiler.kernels.remat import Policy
from fnshard.compiler.kernels.segment_source import SegmentSource
from fnshard.step.lowered import Lowered


def kernels(fn: Callable[..., Any], params: Any, *batch: Any) -> tuple[Lowered, list[Kernel]]:
    low = lower(fn, params, *batch)
    return low, list(low.kernels.values())


def sources(fn: Callable[..., Any], params: Any, *batch: Any) -> list[SegmentSource]:
    return list(lower(fn, params, *batch).segments.sources.values())


def values_of(source: SegmentSource) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [
        torch.randn(a.shape, generator=draw, dtype=a.dtype).requires_grad_(a.requires_grad)
        for a in source.inputs
    ]


def test_forward_and_backward_are_those_of_the_source() -> None:
    """Each kernel alone, against autograd on the composite graph it was made from."""
    _, found = kernels(
        lambda p, x: run_chain(p, x, lambda x, i: F.layer_norm(x, [WIDTH])).sum(), chain(), rows()
    )
    assert len(found) == 3
    for kernel in found:
        args = values_of(kernel.source)
        outputs = kernel.source(*args)
        taking = [outputs[i] for i in kernel.tangents]
        tangents = [torch.randn_like(o) for o in taking]
        expected = torch.autograd.grad(taking, [args[i] for i in kernel.grads], tangents)
        plain = [a.detach() for a in args]
        flat = kernel.forward(*plain)
        inputs, saved = flat[: len(outputs)], flat[len(outputs) :]
        assert len(saved) == len(kernel.saved)
        torch.testing.assert_close(list(inputs), [o.detach() for o in outputs])
        kept = {"input": plain, "output": inputs, "saved": saved}
        kept["tangent"] = dict(zip(kernel.tangents, tangents, strict=True))
        grads = kernel.backward.module(*[kept[r.kind][r.index] for r in kernel.backward.inputs])
        torch.testing.assert_close(list(grads), list(expected))


def test_a_kernel_does_not_depend_on_which_policies_came_before() -> None:
    """All policies part one joint graph, which is traced once for them."""
    policies = [Policy(0.5), Policy(0.0, save=("matmul",))]

    def texts(order: list[Policy]) -> dict[Policy, str]:
        source = max(sources(*llama(1)), key=lambda each: len(each.code))
        with no_kernels():
            made = {p: differentiate(source, p, trainable=True, target="cpu") for p in order}
        return {policy: kernel.as_text() for policy, kernel in made.items()}

    expected = texts(policies)
    assert len(set(expected.values())) == 2 and texts(policies[::-1]) == expected


def test_leaves_are_named_not_saved() -> None:
    _, found = kernels(*llama(3))
    for kernel in found:
        leaves = {a.shape for a in kernel.source.inputs if a.kind == "leaf" and len(a.shape) == 2}
        transposed = {s[::-1] for s in leaves}
        assert not (leaves | transposed) & {a.shape for a in kernel.saved}
        read = [kernel.source.inputs[r.index].kind for r in kernel.backward.inputs if r.kind == "input"]
        if "embedding" not in kernel.source.code:
            assert "leaf" in read


def test_frozen_leaves_and_data_get_no_gradient() -> None:
    frozen = ("layers.0.*", fs.LayoutSpec(fs.P("shard"), trainable=False))
    low = lower(lambda p, x: run_chain(p, x).sum(), chain(2), rows(), policy={"rules": [frozen]})
    first, second = (low.kernels[s.source] for s in low.segments.segments)
    assert first.backward is None and first.saved == ()
    assert [second.source.inputs[i].kind for i in second.grads] == ["leaf"]


def test_gradients_that_may_be_one_tensor_are_marked() -> None:
    def fn(p, x):
        return (p["a.w"] + p["a.v"]).sum() + (x * p["a.w"]).sum()

    def alone(p, x):
        return ((p["a.w"] + p["a.v"]) * x).sum()

    params = {"a.w": torch.ones(ROWS, WIDTH), "a.v": torch.ones(ROWS, WIDTH)}
    (kernel,) = kernels(alone, params, rows())[1]
    assert kernel.backward.shared == (0, 1)
    assert_same_grads(alone, params, rows())
    assert_same_grads(fn, params, rows())


def test_shared_gradients_do_not_corrupt_accumulation() -> None:
    params = {"a.w": torch.ones(WIDTH), "a.v": torch.ones(WIDTH)}

    def fn(p, x):
        return ((p["a.w"] + p["a.v"]) * x.sum(0)).sum()

    x = torch.arange(6.0 * WIDTH).view(6, WIDTH)
    for mode in ("reduce", "local"):
        step = step_of(fn, params, accumulate=3, accumulate_mode=mode)
        _, grads = step(params, x)
        torch.testing.assert_close(grads, dict.fromkeys(params, x.sum(0) / 3))


def test_keys_tell_code_shapes_dtypes_and_gradients_apart() -> None:
    def fn(p, x):
        return run_chain(p, x).sum()

    base = sources(fn, chain(3), rows())[1].key
    others = [
        sources(fn, chain(3, 16), rows(16))[1].key,
        sources(fn, {p: v.double() for p, v in chain(3).items()}, rows().double())[1].key,
        sources(lambda p, x: run_chain(p, x, lambda x, i: x * 2).sum(), chain(3), rows())[1].key,
        sources(lambda p, x: run_chain(p, x, lambda x, i: x * 3).sum(), chain(3), rows())[1].key,
        sources(fn, chain(3), torch.zeros(6, WIDTH))[1].key,
    ]
    assert base == sources(fn, chain(5), rows())[1].key
    assert len({base, *others}) == len(others) + 1


def test_attention_between_leaves_alone() -> None:
    """An op that torch takes for random, and that must be made again."""

    def fn(p, x):
        return (F.scaled_dot_product_attention(p["q"], p["k"], p["v"]) * x).sum()

    params = {n: torch.randn(1, 2, 4, 8, dtype=torch.float64) for n in "qkv"}
    assert_same_grads(fn, params, torch.randn(1, 2, 4, 8, dtype=torch.float64))
