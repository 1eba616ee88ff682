"""Decompositions give the values and gradients of torch's own functions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from emulated import OnGpu, Waits, on_gpu
from errors import raises
from torch import Tensor
from toys import assert_same_grads, our_grads, plain_grads, step_of

import fnshard as fs
from fnshard.compiler.frontend.decompositions import grouped_by_blocks, skip_checks

DOUBLE = torch.float64


def leaves(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {p: torch.randn(s, dtype=DOUBLE, generator=draw) for p, s in shapes.items()}


# ------------------------------------------------------------------ products of groups

GROUPED = {
    "rows": (leaves(a=(7, 3), b=(4, 3, 5)), [2, 2, 6, 7]),
    "columns": (leaves(a=(4, 3, 5), b=(5, 7)), [0, 3, 4, 7]),
    "middle": (leaves(a=(3, 7), b=(7, 5)), [1, 4, 4, 7]),
}


def by_group(a: Tensor, b: Tensor, ends: list[int]) -> Tensor:
    parts = [slice(*part) for part in zip([0, *ends], ends, strict=False)]
    if a.dim() == b.dim():
        return torch.stack([a[:, part] @ b[part] for part in parts])
    if a.dim() == 2:
        return torch.cat([a[part] @ b[g] for g, part in enumerate(parts)])
    return torch.cat([a[g] @ b[:, part] for g, part in enumerate(parts)], 1)


@pytest.mark.parametrize(("form", "backend"), [*((form, "eager") for form in GROUPED), ("rows", "inductor")])
def test_a_product_of_groups(form: str, backend: str) -> None:
    params, ends = GROUPED[form]
    offsets = torch.tensor(ends, dtype=torch.int32)
    expected = plain_grads(lambda p, _: by_group(p["a"], p["b"], ends).sin().sum(), params, offsets)
    step = step_of(
        lambda p, offs: F.grouped_mm(p["a"], p["b"], offs=offs).sin().sum(), params, backend=backend
    )
    torch.testing.assert_close(step(params, offsets), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ends", [[0, 0, 300], [129, 129, 257, 300], [128, 256, 290], [0], [300] * 20])
@pytest.mark.parametrize("form", GROUPED)
def test_a_product_of_groups_on_a_device_reads_no_value(form: str, ends: list[int]) -> None:
    """Rows after the last group are 0."""
    sizes = {"rows": ((300, 3), (len(ends), 3, 5)), "columns": ((len(ends), 3, 5), (5, 300)),
             "middle": ((3, 300), (300, 5))}[form]  # fmt: skip
    a, b = leaves(a=sizes[0], b=sizes[1]).values()
    waits, offsets = Waits(), torch.tensor(ends, dtype=torch.int32)
    expected = torch.ops.fnshard.grouped_mm(a, b, offsets)
    with on_gpu(waits), waits.watching():
        found = grouped_by_blocks(*(OnGpu(t, waits) for t in (a, b, offsets)))
    assert not waits.errors and found.stride() == expected.stride()
    torch.testing.assert_close(found.inside, expected, rtol=0, atol=1e-12)


# ------------------------------------------------------------------ losses


assert_equal_to_torch = partial(assert_same_grads, rtol=0, atol=1e-10)
TARGETS = torch.tensor([[1, 2, 2], [3, 1, 0], [2, 0, 0]])
LENGTHS = torch.tensor([3, 2, 1])
JOINED = torch.cat([row[:n] for row, n in zip(TARGETS, LENGTHS, strict=True)])


@pytest.mark.suite({
    "padded-mean": "targets in rows",
    "joined-none": "targets behind each other",
})  # fmt: skip
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(("targets", "numbers"), [(TARGETS, True), (JOINED, False)], ids=["padded", "joined"])
def test_ctc_loss(reduction: str, targets: Tensor, numbers: bool) -> None:
    """The second row is too short for its target: its loss is infinite, or left out."""

    def loss(p: Any, targets: Tensor, lengths: Tensor, counts: Tensor, zero: bool) -> Tensor:
        inputs = ((7, 1, 5), (3, 2, 1)) if numbers else (lengths, counts)
        log_probs = F.log_softmax(p["w"], -1)
        return F.ctc_loss(log_probs, targets, *inputs, reduction=reduction, zero_infinity=zero).sum()

    params = leaves(w=(7, 3, 4))
    lengths = torch.tensor([7, 1, 5])
    assert_equal_to_torch(loss, params, targets, lengths, LENGTHS, True)
    ours, grads = our_grads(loss, params, targets, lengths, LENGTHS, False)
    truth, expected = plain_grads(loss, params, targets, lengths, LENGTHS, False)
    assert ours == truth == float("inf")
    torch.testing.assert_close(grads, expected, rtol=0, atol=1e-10, equal_nan=True)


@pytest.mark.long
def test_ctc_loss_in_a_compiled_kernel() -> None:
    params = leaves(w=(7, 3, 4))

    def loss(p: Any, targets: Tensor, counts: Tensor) -> Tensor:
        return F.ctc_loss(F.log_softmax(p["w"], -1), targets, counts + 4, counts)

    got = step_of(loss, params, backend="inductor")(params, TARGETS, LENGTHS)
    torch.testing.assert_close(got, plain_grads(loss, params, TARGETS, LENGTHS), rtol=0, atol=1e-10)


@pytest.mark.suite({
    "(5, 1)": "a variance of each row",
    "()": "a number",
})  # fmt: skip
@pytest.mark.parametrize("shape", [(5, 3), (5, 1), (5,), ()], ids=str)
def test_gaussian_nll_loss(shape: tuple[int, ...]) -> None:
    """A variance may be a number. One below `eps` counts as `eps`, and its gradient is passed on anyway."""

    def loss(p: Any, x: Tensor) -> Tensor:
        variance = p["v"].square() if shape else 0.3
        parts = [F.gaussian_nll_loss(p["w"], x, variance, full, 0.05, how)
                 for full, how in ((False, "none"), (True, "mean"), (True, "sum"))]  # fmt: skip
        return sum(part.sum() for part in parts)

    params = leaves(w=(5, 3), v=shape)
    if shape:
        params["v"].view(-1)[0] = 0.1
    assert_equal_to_torch(loss, params, torch.ones(5, 3, dtype=DOUBLE))


def test_gaussian_nll_loss_of_a_variance_that_does_not_fit() -> None:
    with raises(fs.TraceError, leaves=["gaussian_nll_loss", "var"], says="size"):
        our_grads(lambda p: F.gaussian_nll_loss(p["w"], p["w"], p["v"]), leaves(w=(5, 3), v=(2, 3)))


# ------------------------------------------------------------------ distributions


def spd(w: Tensor) -> Tensor:
    return w @ w.T + torch.eye(len(w), dtype=w.dtype)


LOG_PROBS = {
    "normal": lambda p, x: D.Normal(p["w"], p["v"].exp()).log_prob(x),
    "categorical": lambda p, x: D.Categorical(logits=p["w"]).log_prob(torch.tensor([0, 2, 1, 1])),
    "bernoulli": lambda p, x: D.Bernoulli(logits=p["w"]).log_prob((x > 0).double()),
    "multivariate": lambda p, x: D.MultivariateNormal(p["v"][0], spd(p["w"])).log_prob(x),
    "beta": lambda p, x: D.Beta(p["w"].exp(), p["v"].exp()).log_prob(x.sigmoid()),
    "mixture": lambda p, x: D.MixtureSameFamily(
        D.Categorical(logits=p["v"]), D.Normal(p["w"], 1.0)).log_prob(x[0]),
    "kl": lambda p, x: D.kl_divergence(D.Normal(p["w"], 1.0), D.Normal(x, p["v"].exp())),
    "from outside": lambda p, x: OUTSIDE.log_prob(p["w"]),
}  # fmt: skip
OUTSIDE = D.Normal(torch.zeros(4, dtype=DOUBLE), 2.0)


@pytest.mark.parametrize("name", LOG_PROBS)
def test_distributions_validate_nothing_while_they_are_traced(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(D.Distribution, "_validate_args", True)  # Dynamo's first compilation makes it False
    x = leaves(x=(4, 4))["x"].flip(0)
    assert_equal_to_torch(lambda p, x: LOG_PROBS[name](p, x).sum(), leaves(w=(4, 4), v=(4, 4)), x)
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        D.Normal(0.0, -1.0)


# ------------------------------------------------------------------ factors and inverses

LINALG = {
    "inv": lambda a, b: torch.linalg.inv(a),
    "solve": torch.linalg.solve,
    "cholesky": lambda a, b: torch.linalg.cholesky(a),
    "matrix_power": lambda a, b: torch.linalg.matrix_power(a, -2),
    "lu_factor": lambda a, b: torch.linalg.lu_factor(a)[0],
    "eig": lambda a, b: torch.linalg.eigvals(a).real.square(),
}


@pytest.mark.parametrize("name", LINALG)
def test_factors_and_inverses_are_not_checked_for_errors(name: str) -> None:
    assert_equal_to_torch(lambda p: LINALG[name](spd(p["w"]), p["v"]).sin().sum(), leaves(w=(4, 4), v=(4, 4)))


def test_an_inverse_of_a_singular_matrix_is_not_finite() -> None:
    loss, _ = our_grads(lambda p: torch.linalg.inv(p["w"]).sum(), {"w": torch.zeros(3, 3)})
    assert not loss.isfinite()


def test_least_squares_are_refused_with_a_way_out() -> None:
    with raises(fs.TraceError, leaves="linalg_lstsq(", fix="torch.linalg.pinv(A) @ B"):
        our_grads(lambda p: torch.linalg.lstsq(p["w"], p["w"])[0].sum(), leaves(w=(4, 4)))


def test_other_threads_keep_their_checks_while_one_takes_operators_apart() -> None:
    import torch._higher_order_ops.effects as effects

    check = torch.ops.aten._linalg_check_errors.default
    with ThreadPoolExecutor(1) as other, skip_checks():
        assert not effects.has_effects(check)
        assert other.submit(effects.has_effects, check).result()
    assert effects.has_effects(check)


# ------------------------------------------------------------------ draws

COUNT = 1 << 15


def drawn(draw: Any, *batch: Any, backend: str = "eager") -> Any:
    """Return what `draw(*batch)` gives inside a step."""
    params = {"w": torch.ones(())}
    step = step_of(lambda p, *batch: (p["w"] * 1.0, draw(*batch)), params, backend=backend)
    return step(params, *batch)[0][1]


def test_a_permutation() -> None:
    first, second, narrow, none = drawn(
        lambda: (torch.randperm(COUNT), torch.randperm(COUNT), torch.randperm(9, dtype=torch.int32),
                 torch.randperm(0))
    )  # fmt: skip
    for order in (first, second):
        assert torch.equal(order.sort().values, torch.arange(COUNT))
        assert abs(torch.corrcoef(torch.stack([order.double(), torch.arange(COUNT).double()]))[0, 1]) < 0.03
    assert not torch.equal(first, second)
    assert narrow.dtype == torch.int32 and sorted(narrow.tolist()) == list(range(9)) and none.numel() == 0


def test_draws_with_replacement_follow_the_weights() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 3.0, 0.0], [2.0, 0.0, 0.0, 0.0, 2.0]])
    value = drawn(lambda w: w.multinomial(COUNT, replacement=True), weights)
    shares = F.one_hot(value, 5).double().mean(1)
    torch.testing.assert_close(shares, (weights / 4).double(), rtol=0, atol=0.015)
    assert not shares[weights == 0].any()
    one = drawn(lambda w: torch.multinomial(w, 3, True), weights[0])
    assert one.shape == (3,) and one.dtype == torch.int64


def test_draws_without_replacement_are_distinct_and_follow_the_weights() -> None:
    weights = torch.tensor([0.5, 0.25, 0.125, 0.125, 0.0])
    value = drawn(lambda w: torch.multinomial(w.expand(COUNT, 5), 3), weights)
    assert (value.sort(1).values.diff(dim=1) > 0).all() and value.max() == 3
    first = F.one_hot(value[:, 0], 5).double().mean(0)
    torch.testing.assert_close(first, weights.double(), rtol=0, atol=0.015)
    second = F.one_hot(value[value[:, 0] == 0, 1], 5).double().mean(0)  # of what the first has left
    torch.testing.assert_close(
        second, torch.tensor([0.0, 0.5, 0.25, 0.25, 0.0], dtype=DOUBLE), rtol=0, atol=0.02
    )


def test_normal_numbers_around_tensors() -> None:
    mean, std = torch.tensor([[-3.0], [5.0]]), torch.tensor([0.5, 2.0, 0.0])
    values = drawn(
        lambda m, s: [
            torch.normal(m.expand(2, COUNT), 0.5),
            torch.normal(2.0, s[:, None].expand(3, COUNT)),
            torch.normal(m.expand(2, COUNT)[:, None], s[:, None]),
            torch.normal(1.0, 2.0, (COUNT,)),
        ],
        mean,
        std,
    )
    for value, m, s in zip(values, (mean[:, 0], 2.0, mean, 1.0), (0.5, std, std, 2.0), strict=True):
        assert value.dtype == torch.float32
        zeros = torch.zeros(value.shape[:-1])
        torch.testing.assert_close(value.mean(-1), zeros + m, rtol=0, atol=0.05)
        torch.testing.assert_close(value.std(-1), zeros + s, rtol=0, atol=0.05)


def draw_all(x: Tensor) -> dict[str, Tensor]:
    return {
        "permutation": torch.randperm(50),
        "with": torch.multinomial(x.exp(), 4, True),
        "without": torch.multinomial(x.exp(), 4),
        "normal": torch.normal(x, 1.0),
        "dropout": F.dropout(x, 0.25),
        "second dropout": F.dropout(x, 0.25),
        "rand": torch.rand(50),
        "randn": torch.randn_like(x),
        "randint": torch.randint(3, 9, (50,)),
        "bernoulli": torch.bernoulli(x.sigmoid()),
        "attention": F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0],
    }


def test_draws_depend_on_seed_step_and_rank_and_not_on_layouts() -> None:
    params, x = {"layers.0.w": torch.ones(6, 6, dtype=DOUBLE)}, -torch.rand(6, 6, dtype=DOUBLE)

    def draws(preset: str, world: int, seed: int = 0, depth: int = 1) -> list[list[dict[str, Tensor]]]:
        mesh = fs.make_mesh(shard=world, simulated=True)
        step = fs.shard_step(
            lambda p, x: ((p["layers.0.w"] * x).sum(), draw_all(x)),
            fs.presets.PRESETS[preset](params, mesh),
            mesh=mesh,
            optimizer=fs.optim.sgd(0.1),
            backend="eager",
            prefetch=depth,
            overlap=depth,
        )

        def run(rank: int) -> list[dict[str, Tensor]]:
            state, seen = step.init(params, seed=seed), []
            for _ in range(2):
                state, metrics = step(state, x)
                seen.append(metrics["aux"])
            return seen

        return fs.simulate(mesh, run)

    expected = draws("full_shard", 2)
    for depth, preset in enumerate(("full_shard", "zero1", "no_shard")):
        torch.testing.assert_close(draws(preset, 2, depth=depth), expected, rtol=0, atol=0)
    alone = draws("full_shard", 1)
    # The first of two ranks draws as one alone.
    torch.testing.assert_close(alone[0], expected[0], rtol=0, atol=0)
    distinct = [*expected[0], *expected[1], draws("full_shard", 1, seed=1)[0][0]]
    assert not any(torch.equal(a["dropout"], a["second dropout"]) for a in distinct)
    for i, a in enumerate(distinct):
        for b in distinct[i + 1 :]:
            assert not any(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.long
def test_compiled_draws_are_those_of_eager_kernels() -> None:
    x = -torch.rand(6, 6, dtype=DOUBLE)
    torch.testing.assert_close(drawn(draw_all, x, backend="inductor"), drawn(draw_all, x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "draw",
    [
        lambda g: torch.randperm(5, generator=g),
        lambda g: torch.multinomial(torch.ones(5), 2, generator=g),
        lambda g: torch.normal(torch.ones(5), 2.0, generator=g),
        lambda g: torch.rand(5, generator=g),
    ],
)
def test_draws_from_a_generator_are_refused_and_from_none_are_not(draw: Any) -> None:
    assert drawn(lambda: draw(None)).numel() in (2, 5)
    with raises(fs.TraceError, leaves="torch.Generator", fix="leave generator= out"):
        drawn(lambda: draw(torch.Generator().manual_seed(0)))
