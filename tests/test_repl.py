"""What a REPL shows of a step, its state and its metrics: short, and in the field's words."""

import torch

import fnshard as fs


def loss_fn(params, x):
    return (params["w"] * x).sum()


def test_reprs_are_short():
    params = {"w": torch.ones(3)}
    specs = fs.match_specs(params, [("*", fs.LayoutSpec())])
    step = fs.shard_step(loss_fn, specs, backend="eager", optimizer=fs.optim.sgd(0.5))
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
