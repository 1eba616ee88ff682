"""Kernels: what a distinct segment's forward returns, saves and takes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from toys import ROWS, WIDTH, assert_same_grads, chain, llama, lower, rows, run_chain

import fnshard as fs
from fnshard.compiler.kernels.canonical import Source
from fnshard.compiler.kernels.differentiate import Kernel, differentiate
from fnshard.step.lowered import Lowered


def kernels(fn: Callable[..., Any], params: Any, *batch: Any) -> tuple[Lowered, list[Kernel]]:
    low = lower(fn, params, *batch)
    return low, list(low.kernels.values())


def sources(fn: Callable[..., Any], params: Any, *batch: Any) -> list[Source]:
    return list(lower(fn, params, *batch).segments.sources.values())


def values_of(source: Source) -> list[torch.Tensor]:
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
        wanted = torch.autograd.grad(taking, [args[i] for i in kernel.grads], tangents)
        plain = [a.detach() for a in args]
        flat = kernel.forward(*plain)
        given, saved = flat[: len(outputs)], flat[len(outputs) :]
        assert len(saved) == len(kernel.saved)
        torch.testing.assert_close(list(given), [o.detach() for o in outputs])
        kept = {"input": plain, "output": given, "saved": saved}
        kept["tangent"] = dict(zip(kernel.tangents, tangents, strict=True))
        grads = kernel.backward(*[kept[r.kind][r.index] for r in kernel.backward_inputs])
        torch.testing.assert_close(list(grads), list(wanted))


def test_descriptions_of_what_is_saved_are_true() -> None:
    _, found = kernels(*llama(2, dtype=torch.bfloat16))
    for kernel in found:
        shapes = [
            n.meta["val"] for n in kernel.forward.graph.output_node().args[0][len(kernel.source.outputs) :]
        ]
        assert [(tuple(v.shape), v.dtype) for v in shapes] == [(a.shape, a.dtype) for a in kernel.saved]


def test_leaves_are_named_not_saved() -> None:
    _, found = kernels(*llama(3))
    for kernel in found:
        leaves = {a.shape for a in kernel.source.inputs if a.kind == "leaf" and len(a.shape) == 2}
        transposed = {s[::-1] for s in leaves}
        assert not (leaves | transposed) & {a.shape for a in kernel.saved}
        read = [kernel.source.inputs[r.index].kind for r in kernel.backward_inputs if r.kind == "input"]
        if "embedding" not in kernel.source.code:
            assert "leaf" in read


def test_nothing_is_saved_twice_nor_beside_an_input_or_output() -> None:
    _, found = kernels(*llama(2))
    for kernel in found:
        flat = kernel.forward.graph.output_node().args[0]
        assert len({n.name for n in flat}) == len(flat)
        inputs = {n.name for n in kernel.forward.graph.nodes if n.op == "placeholder"}
        assert not inputs & {n.name for n in flat[len(kernel.source.outputs) :]}


def test_frozen_leaves_and_data_get_no_gradient() -> None:
    frozen = ("layers.0.*", fs.LayoutSpec(fs.P("shard"), trainable=False))
    low = lower(lambda p, x: run_chain(p, x).sum(), chain(2), rows(), policy={"rules": [frozen]})
    first, second = (low.kernels[s.source] for s in low.segments.segments)
    assert first.backward is None and first.saved == ()
    assert [second.source.inputs[i].kind for i in second.grads] == ["leaf"]


def test_a_forward_alone_saves_nothing() -> None:
    (source, *_) = sources(lambda p, x: run_chain(p, x).sum(), chain(2), rows())
    kernel = differentiate(source, "k", trainable=False)
    assert kernel.backward is None and kernel.saved == () and kernel.grads == ()


@pytest.mark.parametrize("budget", [1.0, 0.5, 1e-9])
def test_a_smaller_budget_saves_less_and_changes_nothing(budget: float) -> None:
    def fn(p, x):
        return run_chain(p, x, lambda x, i: torch.sin(torch.exp(torch.cos(x) * 2) - x).softmax(-1)).sum()

    source = sources(fn, chain(4), rows())[1]
    full, less = differentiate(source, "k"), differentiate(source, "k", budget=budget)

    def saved(kernel: Kernel) -> int:
        return sum(torch.Size(a.shape).numel() for a in kernel.saved)

    assert saved(less) <= saved(full)
    assert budget > 1e-6 or saved(less) < saved(full)
    args = [v.detach() for v in values_of(source)]
    tangent = torch.ones(ROWS, WIDTH)
    results = []
    for kernel in (full, less):
        flat = kernel.forward(*args)
        kept = {"input": args, "output": flat, "saved": flat[len(source.outputs) :], "tangent": {0: tangent}}
        results.append(kernel.backward(*[kept[r.kind][r.index] for r in kernel.backward_inputs]))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("budget", [1.0, 1e-9])
def test_dropout_is_the_same_mask_under_recompute(budget: float) -> None:
    """The mask is a function of a key that is an input: it may be drawn again."""

    def fn(p, x):
        return run_chain(p, x, lambda x, i: F.dropout(x, 0.5)).sum()

    low = lower(fn, chain(4), rows())
    keys = [i for s in low.segments.segments for i in s.inputs if i.startswith("key:")]
    assert keys == [f"key:key{i}" for i in range(4)]
    source = next(s for s in low.segments.sources.values() if any(a.kind == "key" for a in s.inputs))
    kernel = differentiate(source, "k", budget=budget)
    args = [
        torch.full(a.shape, 0.1, dtype=a.dtype) if a.kind != "key" else torch.tensor(7) for a in source.inputs
    ]
    args[0] = torch.linspace(0.1, 1, ROWS * WIDTH).view(ROWS, WIDTH)
    wanted = [
        a.clone().requires_grad_(like.requires_grad) for a, like in zip(args, source.inputs, strict=True)
    ]
    (out,) = source(*wanted)
    out.sum().backward()
    flat = kernel.forward(*args)
    assert torch.equal(flat[0] == 0, out == 0)
    kept = {"input": args, "output": flat, "saved": flat[1:], "tangent": {0: torch.ones_like(out)}}
    grads = kernel.backward(*[kept[r.kind][r.index] for r in kernel.backward_inputs])
    torch.testing.assert_close(list(grads), [wanted[i].grad for i in kernel.grads])


def test_gradients_that_may_be_one_tensor_are_marked() -> None:
    def fn(p, x):
        return (p["a.w"] + p["a.v"]).sum() + (x * p["a.w"]).sum()

    def alone(p, x):
        return ((p["a.w"] + p["a.v"]) * x).sum()

    params = {"a.w": torch.ones(ROWS, WIDTH), "a.v": torch.ones(ROWS, WIDTH)}
    (kernel,) = kernels(alone, params, rows())[1]
    assert kernel.shared == (0, 1)
    assert_same_grads(alone, params, rows())
    assert_same_grads(fn, params, rows())


def test_shared_gradients_do_not_corrupt_accumulation() -> None:
    params = {"a.w": torch.ones(WIDTH), "a.v": torch.ones(WIDTH)}

    def fn(p, x):
        return ((p["a.w"] + p["a.v"]) * x.sum(0)).sum()

    specs = fs.match_specs(params, [("*", fs.LayoutSpec())])
    x = torch.arange(6.0 * WIDTH).view(6, WIDTH)
    for mode in ("reduce", "local"):
        step = fs.shard_step(fn, specs, accumulate=3, accumulate_mode=mode, backend="eager")
        _, grads = step(params, x)
        torch.testing.assert_close(grads, dict.fromkeys(params, x.sum(0) / 3))


def test_kernels_as_text() -> None:
    _, (first, *_) = kernels(lambda p, x: run_chain(p, x).sum(), chain(2), rows())
    text = first.as_text()
    assert text.startswith("k0: saves [") and text.count("def forward(") == 2 and str(first) == text


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
