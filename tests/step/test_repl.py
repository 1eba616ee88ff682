"""What a REPL shows of a step, its state and its metrics: short, and in the field's words."""

import copy
import pickle

import torch
from toys import step_of

import fnshard as fs


def loss_fn(params, x):
    return (params["w"] * x).sum()


def test_reprs_are_short():
    params = {"w": torch.ones(3)}
    step = step_of(loss_fn, params, optimizer=fs.optim.sgd(0.5))
    assert repr(step).startswith("Step(loss_fn, 1 leaf on mesh (shard=1), sgd(lr=0.5")
    assert repr(step).endswith("eager, 0 batch shapes lowered)")
    state = step.init(params)
    assert {"step", "params", "opt_state", "seed"} <= set(dir(state))
    state, metrics = step(state, torch.arange(3.0))
    assert repr(metrics) == "{'loss': 3, 'lr': 0.5}" and isinstance(metrics["loss"], torch.Tensor)
    lowered = step.lower(params, torch.arange(3.0))
    count = len(lowered.schedule.instructions)
    assert repr(lowered) == f"Lowered(Schedule({count} instructions, 1 kernels, mesh (shard=1)), compiled)"
    assert repr(step).endswith("1 batch shape lowered)")


def test_the_numbers_of_metrics() -> None:
    step = fs.shard_step(
        lambda p, x: ((p["w"] * x).sum(), {"loss": x.sum(), "rate": x[0], "rows": x}),
        {"w": fs.LayoutSpec()}, optimizer=fs.optim.sgd(0.5), backend="eager",
    )  # fmt: skip
    _, metrics = step(step.init({"w": torch.ones(2)}), torch.tensor([1.0, 3.0]))
    assert metrics.numbers() == {"loss": 4.0, "lr": 0.5, "rate": 1.0, "aux.loss": 4.0}
    assert repr(metrics) == "{'loss': 4, 'lr': 0.5, 'aux.loss': 4, 'rate': 1}"
    metrics["loss"] = metrics["loss"] * 2
    assert metrics.numbers()["loss"] == 8.0 and repr(metrics).startswith("{'loss': 8,")
    assert pickle.loads(pickle.dumps(copy.deepcopy(metrics))).numbers()["loss"] == 8.0
