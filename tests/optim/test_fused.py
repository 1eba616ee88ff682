"""AdamW and SGD as one operator: what it computes, and torch's fused kernels in its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from fnshard.optim import fused
from fnshard.optim.fused import ADAMW, DECOMPOSITIONS, IN_PLACE, SGD, SGD_MOMENTUM, prepare_gradients

# How many slots each has, its numbers of a step, and its constants.
COUNT = 3
BIASES = (1 - 0.8 ** (COUNT + 1), (1 - 0.95 ** (COUNT + 1)) ** 0.5)
CASES: dict[str, tuple[Any, int, tuple[float, ...], tuple[Any, ...]]] = {
    "adamw": (ADAMW, 2, (0.1 / 3, COUNT, *BIASES), (0.1, 0.8, 0.95, 1e-6)),
    "adamw, no decay": (ADAMW, 2, (0.1 / 3, COUNT, *BIASES), (0.0, 0.8, 0.95, 1e-6)),
    "sgd": (SGD, 0, (0.1 / 3,), (0.1,)),
    "momentum": (SGD_MOMENTUM, 1, (0.1 / 3,), (0.1, 0.9, False)),
    "nesterov": (SGD_MOMENTUM, 1, (0.1 / 3,), (0.0, 0.9, True)),
}
SHAPES = [(7, 3), (5,), (4, 6), (), (0, 3), (100, 3)]


def leaves_of(count: int, dtype: torch.dtype, shapes: list[tuple[int, ...]] = SHAPES) -> list[list[Tensor]]:
    """Return parameters, gradients and slots, a list of leaves of each; second moments are positive."""
    draw = torch.Generator().manual_seed(0)
    make = lambda shape: torch.randn(shape, generator=draw, dtype=torch.float64)  # noqa: E731
    lists = [[make(shape).to(dtype) for shape in shapes] for _ in range(2 + count)]
    return [*lists[:-1], [leaf.abs() for leaf in lists[-1]]] if count == 2 else lists


def update_by_leaf(case: str, lists: list[list[Tensor]]) -> list[list[Tensor]]:
    """Return new parameters and slots, leaf by leaf, by the operator itself."""
    operator, _, numbers, constants = CASES[case]
    out = []
    for leaf in zip(*lists, strict=True):
        wide = [t.to(torch.promote_types(t.dtype, torch.float32)) for t in leaf]
        made = operator(*wide, *(torch.tensor(n, dtype=torch.float64) for n in numbers), *constants)
        update, *slots = (made,) if isinstance(made, Tensor) else made
        out.append([leaf[0] + update.to(leaf[0].dtype), *(slot.to(leaf[0].dtype) for slot in slots)])
    return [list(each) for each in zip(*out, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_in_place_is_the_operator(case: str, dtype: torch.dtype) -> None:
    operator, count, numbers, constants = CASES[case]
    lists = leaves_of(count, dtype)
    expected = update_by_leaf(case, lists)
    IN_PLACE[operator](*lists, *numbers, *constants)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close([lists[0], *lists[2:]], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("odd", ["parameters", "gradients", "slots", "gradients of another dtype"])
@pytest.mark.parametrize("case", ["adamw", "momentum"])
def test_in_place_minds_strides(case: str, odd: str) -> None:
    """torch's fused kernels walk memory; transposed and sliced tensors must still be right."""
    operator, count, numbers, constants = CASES[case]
    lists = leaves_of(count, torch.float64, [(7, 3), (4, 6)])
    if odd == "gradients of another dtype":
        lists[1] = [leaf.float() for leaf in lists[1]]
    expected = update_by_leaf(case, [lists[0], [g.double() for g in lists[1]], *lists[2:]])
    around = torch.zeros(4, 12, dtype=torch.float64)
    index = {"parameters": 0, "gradients": 1, "slots": 2}.get(odd)
    if index is not None:
        first, second = lists[index]
        lists[index] = [first.t().contiguous().t(), around[:, 3:9].copy_(second)]
    before = [leaf.data_ptr() for leaf in (*lists[0], *lists[2])]
    IN_PLACE[operator](*lists, *numbers, *constants)
    assert before == [leaf.data_ptr() for leaf in (*lists[0], *lists[2])]
    torch.testing.assert_close([lists[0], *lists[2:]], expected, rtol=1e-12, atol=1e-12)
    assert around[:, :3].abs().max() == 0 == around[:, 9:].abs().max()


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_fused_kernels_take_exact_rates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's CUDA kernels read a tensor's rate as fp32."""
    rates: list[float] = []
    monkeypatch.setattr(torch, f"_fused_{name}_", lambda *_, lr, **__: rates.append(lr))
    operator, count, numbers, constants = CASES[name]
    IN_PLACE[operator](*leaves_of(count, torch.float32), *numbers, *constants)
    assert rates == [0.1 / 3]


def test_the_fused_sgd_kernel_gets_no_short_dtypes_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_fused_sgd_", lambda *_, **__: pytest.fail("it skips numbers"))
    operator, count, numbers, constants = CASES["momentum"]
    lists = leaves_of(count, torch.bfloat16)
    expected = update_by_leaf("momentum", lists)
    IN_PLACE[operator](*lists, *numbers, *constants)
    torch.testing.assert_close([lists[0], *lists[2:]], expected, rtol=0, atol=0)


class Calls(TorchDispatchMode):
    """A mode that counts operators, the bytes that they make, and the dtypes of what scales many tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.bytes, self.factors = 0, set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[op._schema.name] += 1
        if op._schema.name == "aten::_foreach_mul_":
            self.factors.add((args[0][0].dtype, args[1].dtype))
        out = op(*args, **(kwargs or {}))
        inputs = {t.data_ptr() for a in args for t in (a if isinstance(a, list | tuple) else [a])
                  if isinstance(t, Tensor)}  # fmt: skip
        made = out if isinstance(out, list | tuple) else [out]
        self.bytes += sum(t.nbytes for t in made if isinstance(t, Tensor) and t.data_ptr() not in inputs)
        return out


def count_calls(case: str, lists: list[list[Tensor]]) -> Calls:
    operator, _, numbers, constants = CASES[case]
    with Calls() as calls:
        IN_PLACE[operator](*lists, *numbers, *constants)
    return calls


@pytest.mark.parametrize("case", CASES)
def test_many_leaves_are_one_call_that_allocates_nothing(case: str) -> None:
    few, many = (leaves_of(CASES[case][1], torch.float32, [(30, 10)] * n) for n in (2, 20))
    calls = count_calls(case, few), count_calls(case, many)
    assert calls[0].seen == calls[1].seen and sum(calls[1].seen.values()) <= 3
    assert calls[1].bytes <= 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_cast_by_one_call_and_scaled_by_one(dtype: torch.dtype) -> None:
    """Gradients that have the parameters' dtype already are scaled where they lie."""
    params = [torch.ones(3, 4, dtype=dtype) for _ in range(20)]
    grads = [torch.full((3, 4), float(n), dtype=torch.bfloat16) for n in range(20)]
    with Calls() as calls:
        ready = prepare_gradients(grads, params, torch.tensor(0.5, dtype=torch.float64))
    assert calls.seen["aten::_foreach_copy_"] == calls.seen["aten::_foreach_mul_"] == 1
    assert calls.seen["aten::copy_"] == calls.seen["aten::mul_"] == 0 and calls.factors == {(dtype, dtype)}
    assert [leaf[0, 0].item() for leaf in ready] == [n / 2 for n in range(20)]
    assert prepare_gradients(ready, params) == ready
    again = prepare_gradients(ready, params, torch.tensor(2.0, dtype=torch.float64))
    assert again == ready and [leaf[0, 0].item() for leaf in again] == [*range(20)]


@pytest.mark.parametrize("case", CASES)
def test_an_operator_is_one_node_that_can_be_taken_apart(case: str) -> None:
    operator, count, numbers, constants = CASES[case]
    lists = leaves_of(count, torch.float32, [(4, 3)])
    tensors = [leaf for (leaf,) in lists] + [torch.tensor(n, dtype=torch.float64) for n in numbers]
    apply: Callable[..., Any] = lambda *given: operator(*given, *constants)  # noqa: E731
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in tensors]
        whole, parts = make_fx(apply)(*fakes), make_fx(apply, decomposition_table=DECOMPOSITIONS)(*fakes)
    assert [n.target for n in whole.graph.nodes if "fnshard" in str(n.target)] == [operator]
    assert not [n.target for n in parts.graph.nodes if "fnshard" in str(n.target)]
    torch.testing.assert_close(parts(*tensors), apply(*tensors), rtol=0, atol=0)
    torch.library.opcheck(operator, (*tensors, *constants), test_utils=("test_schema", "test_faketensor"))


def test_what_an_operator_returns_lies_on_the_leaves_device() -> None:
    """The numbers of a step are on the host, the leaves need not be."""
    for operator, count, numbers, constants in CASES.values():
        leaf = [torch.empty(4, 3, device="meta")] * (2 + count)
        made = operator(*leaf, *(torch.tensor(n, dtype=torch.float64) for n in numbers), *constants)
        assert {t.device.type for t in ([made] if isinstance(made, Tensor) else made)} == {"meta"}
    assert fused.is_fusable(torch.empty(2, device="meta"), []) is False
