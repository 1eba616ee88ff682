"""Units that send rows to experts and keep their inputs alone: they run forward again for their backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import reference
from errors import raises
from mixtures import CHOSEN, ROWS, WIDTH, T, mixture
from models import Model
from sharded import assert_same, by_steps, make_step, simulate
from torch import Tensor

import fnshard as fs
from fnshard import LayoutSpec, P
from fnshard.compiler.schedule.instructions import Exchange, Run, Wait
from fnshard.compiler.schedule.verify import verify
from fnshard.errors import ScheduleError

ADAMW = fs.optim.adamw(1e-2, weight_decay=0.1)
SENT = [2 * (ROWS // 2) * T * CHOSEN, WIDTH]  # the rows that a rank of two has room for
Lines = list[Any]
LONG = pytest.mark.long


@cache
def model_of(dense: bool = False) -> Model:
    """Return a mixture whose leaves stand in the order in which it reads them."""
    made = mixture(dense=dense)
    params = {path: leaf for path, leaf in made.params.items() if path != "norm"}
    return replace(made, params=params | {"norm": made.params["norm"]})


@cache
def truth() -> reference.Trained:
    model = model_of(True)
    return reference.train(model.loss, model.params, by_steps(model), reference.adamw(1e-2))


@cache
def lower_model(
    remat: Any = "unit", axes: tuple[tuple[str, int], ...] = (("expert", 2),), **options: Any
) -> Any:
    model, mesh = model_of(), fs.make_mesh(**dict(axes), abstract=True)
    specs = fs.presets.full_shard(model.params, mesh, expert="expert")
    step = make_step(mesh, model, specs, ADAMW, remat=remat, **options)
    return step.lower(model.params, model.batch(0)[0][: ROWS // mesh.data_size])


def exchanges(schedule: Any, phase: str) -> list[Exchange]:
    return [i for i in schedule.instructions if isinstance(i, Exchange) and i.phase.startswith(phase)]


def rows_sent(schedule: Any, phase: str) -> int:
    return sum(list(line.like.shape) == SENT for line in exchanges(schedule, phase))


def test_rows_travel_again_and_are_not_kept() -> None:
    """Each of two layers sends rows there and back, both again for the backward, and their cotangents."""
    kept, again = lower_model(0.001).schedule, lower_model().schedule
    assert rows_sent(kept, "forward") == rows_sent(again, "forward") == 4
    assert rows_sent(kept, "backward") == 4 and rows_sent(again, "backward") == 8
    assert len(exchanges(again, "backward")) == 10  # and how many rows each expert gets
    received = {
        line.writes[0] for line in again.instructions
        if isinstance(line, Wait) and line.is_for(Exchange) and line.phase == "forward"
    }  # fmt: skip
    backward = [i for i in again.instructions if isinstance(i, Run) and i.of_backward]
    assert len(received) == 6  # each layer's rows there and back, and how many each expert gets
    assert not received & {name for run in backward for name in run.reads}


def test_a_layer_keeps_its_input_alone() -> None:
    """At the end of the forward."""

    def bytes_kept(low: Any) -> int:
        moments = low.memory_timeline().moments
        last = max(n for n, i in enumerate(low.schedule.instructions) if i.phase == "forward")
        return moments[last].device["saved activations"]

    kept, again = bytes_kept(lower_model(0.001)), bytes_kept(lower_model())
    rows = SENT[0] * WIDTH * 8
    assert kept - again >= 2 * 2 * rows, "rows there and back, of two layers"


@pytest.mark.parametrize(
    "options",
    [{}, *(pytest.param(o, marks=LONG) for o in ({"prefetch": 2}, {"prefetch": 0}, {"accumulate": 2}))],
)
def test_a_unit_is_gathered_once_for_both(options: dict[str, Any]) -> None:
    """Its leaves stay from its second forward to its backward, and reductions are those of any step."""
    plain, again = (lower_model(remat, **options).schedule.counts() for remat in ("none", "unit"))
    for verb in ("gather", "reduce_scatter"):
        assert plain[verb] == again[verb] > 0, verb


def test_a_forward_that_runs_again_is_no_model_flop() -> None:
    plain, again = (lower_model(remat).timeline("h100") for remat in ("none", "unit"))
    assert again.model_flops == plain.model_flops and again.hardware_flops > plain.hardware_flops


CASES: list[tuple[dict[str, int], str, dict[str, Any], dict[str, Any]]] = [
    ({"expert": 2}, "shard_grad_op", {}, {"accumulate": 2, "micro_order": "breadth", "remat": "unit"}),
]
MORE: list[tuple[dict[str, int], str, dict[str, Any], dict[str, Any]]] = [
    ({"shard": 2, "expert": 2}, "full_shard", {}, {"remat": {"layers.1": "unit"}}),
    ({"expert": 2}, "full_shard", {}, {"accumulate": 2, "remat": "unit+offload"}),
    ({"expert": 4}, "full_shard", {}, {"remat": "unit", "prefetch": 2, "overlap": 2}),
    ({"expert": 2, "tensor": 2}, "full_shard", {"tensor": "tensor"}, {"remat": "unit"}),
    ({"expert": 2, "context": 2}, "full_shard", {}, {"remat": "unit"}),
    ({"expert": 2}, "zero1", {}, {"remat": "unit", "accumulate": 2, "accumulate_mode": "local"}),
    ({"expert": 2}, "full_shard", {}, {"remat": "unit", "backend": "inductor"}),
]


def train_model(axes: Mapping[str, int], preset: str, policy: Any, options: Any, **more: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a tensor axis has no rule for some of the routing
        policy = {"expert": "expert", **policy}
        return simulate(model_of(), preset, axes, ADAMW, policy=policy, **options, **more)


@pytest.mark.parametrize(
    ("axes", "preset", "policy", "options"),
    [*CASES, *[pytest.param(*case, marks=LONG) for case in MORE]],
    ids=str,
)
def test_training_equals_the_naive_loop(axes, preset, policy, options) -> None:
    for got in train_model(axes, preset, policy, options):
        assert_same(got, truth())


@LONG
@pytest.mark.parametrize("order", ["depth", "zero_bubble"])
def test_stages_run_their_units_again_and_send_no_rows_of_experts(order: str) -> None:
    axes = {"pipeline": 2, "expert": 2}
    options = {"accumulate": 2, "micro_order": order, "remat": "unit"}
    rules = [("embed.weight", LayoutSpec(P("expert"), chunk="all"))]
    for got in train_model(axes, "full_shard", {"rules": rules}, options):
        assert_same(got, truth())


@LONG
@pytest.mark.parametrize("adversary", ["late", "early"])
def test_ranks_that_read_early_or_late_do_the_same(adversary: str) -> None:
    how = ({"expert": 2}, "full_shard", {}, {"remat": "unit", "accumulate": 2})
    for got in train_model(*how, adversary=adversary):
        assert_same(got, truth())


@LONG
def test_what_fn_itself_has_summed_over_rows_is_kept() -> None:
    """`fs.psum` is one exchange of a step, whatever runs again."""
    model, dense = model_of(), model_of(True)

    def with_mean(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def both(p: dict[str, Tensor], tokens: Tensor) -> Tensor:
            scale = p["layers.1.norm1"] * 1.0
            mean = fs.psum((tokens[:, :, None] * scale).sum((0, 1))) / fs.psum(tokens.numel())
            return loss({**p, "layers.1.norm1": p["layers.1.norm1"] + mean.tanh()}, tokens)

        return both

    expected = reference.train(with_mean(dense.loss), model.params, by_steps(model), reference.adamw(1e-2))
    summing = replace(model, loss=with_mean(model.loss))
    policy = {"expert": "expert"}
    for got in simulate(summing, "full_shard", {"expert": 2}, ADAMW, policy=policy, remat="unit"):
        assert_same(got, expected)


# ------------------------------------------------------------------ planted faults


def forget_a_kernel(lines: Lines) -> None:
    del lines[next(n for n, i in enumerate(lines) if isinstance(i, Run) and i.again)]


def forget_an_exchange(lines: Lines) -> None:
    at = next(n for n, i in enumerate(lines) if isinstance(i, Exchange) and i.phase == "backward")
    flight = lines.pop(at).writes[0]
    del lines[next(n for n, i in enumerate(lines) if flight in i.reads)]


def read_what_came_first(lines: Lines) -> None:
    """Let a backward read the rows of the forward, which are gone."""
    came = next(i for i in lines if isinstance(i, Wait) and i.is_for(Exchange)).writes[0]
    at, again = next(
        (n, name) for n, i in enumerate(lines) if isinstance(i, Run) and i.of_backward
        for name in i.reads if name.path == came.path and name != came
    )  # fmt: skip
    reads = tuple(came if name == again else name for name in lines[at].reads)
    lines[at] = replace(lines[at], reads=reads, drops=tuple(n for n in lines[at].drops if n != again))


@pytest.mark.parametrize("plant", [forget_a_kernel, forget_an_exchange, read_what_came_first])
def test_faults_are_found(plant: Callable[[Lines], None]) -> None:
    schedule = lower_model().schedule
    lines = list(schedule.instructions)
    plant(lines)
    with raises(ScheduleError, says="not alive"):
        verify(schedule.with_instructions(lines))
    assert verify(schedule)


@LONG
def test_saving_chosen_ops_keeps_what_has_come() -> None:
    """`save=` keeps results of a recomputed unit, which then does not run again."""
    low = lower_model(save=("matmul",))
    assert rows_sent(low.schedule, "backward") == 4
