"""Ranks compare what they are about to run before the first collective that would hang."""

import functools
import warnings
from contextlib import nullcontext

import pytest
import torch
from errors import raises

import fnshard as fs

PARAMS = {"a": torch.ones(4, 2), "b": torch.ones(4, 2)}


def run_with(loss_of, optimizer_of=lambda rank: fs.optim.sgd(0.1), specs_of=fs.presets.full_shard, **options):
    mesh = fs.make_mesh(shard=2, simulated=True)

    def run(rank):
        step = fs.shard_step(
            loss_of(rank), specs_of(PARAMS, mesh), mesh=mesh, optimizer=optimizer_of(rank),
            backend="eager", **options,
        )  # fmt: skip
        _, metrics = step(step.init(PARAMS), torch.ones(2))
        return metrics["loss"].item()

    return fs.simulate(mesh, run)


def plain(rank):
    return lambda p, x: ((p["a"] + p["b"]) @ x).sum()


def test_a_program_that_branches_on_the_rank_is_refused_on_every_rank():
    def branching(rank):
        return plain(rank) if rank == 0 else (lambda p, x: (p["a"] @ x).sum())

    with raises(fs.AgreementError, leaves="rank(s) 1", says=["program", "rank 0"]) as error:
        run_with(branching)
    assert "collective 0 on rank 0" in str(error.value) or "collective 1 on rank 0" in str(error.value)


def test_different_optimizers_are_refused():
    with raises(fs.AgreementError, leaves="optimizer on rank 0", says=["sgd(lr=0.1", "sgd(lr=0.2"]):
        run_with(plain, lambda rank: fs.optim.sgd(0.1 * (rank + 1)))


def test_another_batch_shape_needs_no_agreement_but_the_same_collectives():
    mesh = fs.make_mesh(shard=2, simulated=True)
    loss = lambda p, x: ((p["a"] + p["b"]).sum() * x).sum()  # noqa: E731
    step = fs.shard_step(
        loss, fs.presets.full_shard(PARAMS, mesh), mesh=mesh, optimizer=fs.optim.sgd(0.0), backend="eager"
    )

    def run(rank):
        state, losses = step.init(PARAMS), []
        for rows in (2, 3 + rank, 2):
            state, metrics = step(state, torch.ones(rows))
            losses.append(metrics["loss"].item())
        return losses

    with pytest.warns(UserWarning, match=r"compiling again for a new batch .*batch\['0'\] from \[2\]"):
        results = fs.simulate(mesh, run)
    assert results == [[32.0, 56.0, 32.0]] * 2


def test_a_batch_that_changes_the_collectives_is_refused():
    params = {"a": torch.ones(4), "b": torch.ones(4)}
    specs = fs.presets.full_shard(params, fs.make_mesh(shard=2, simulated=True))
    mesh = fs.make_mesh(shard=2, simulated=True)

    def loss(p, x):
        return (p["a"] * x).sum() if x.shape[0] == 1 else ((p["a"] + p["b"]) * x[0]).sum()

    step = fs.shard_step(loss, specs, mesh=mesh, optimizer=fs.optim.sgd(0.1), backend="eager")

    def run(rank):
        state = step.init(params)
        for rows in (1, 2):
            state, _ = step(state, torch.ones(rows, 4))

    with raises(fs.StateError, leaves="collectives", fix="same parameters"):
        fs.simulate(mesh, run)


@pytest.mark.parametrize("preset", ["no_shard", "zero2", "hybrid_shard", "full_shard", "loaded"])
def test_ranks_that_start_out_different_are_refused_by_name(preset):
    """Replicas, and shards that were cut out of different leaves, unless these were filled later."""
    loaded, preset = preset == "loaded", preset.replace("loaded", "full_shard")
    axes = {"replicate": 2, "shard": 2} if preset == "hybrid_shard" else {"shard": 2}
    mesh = fs.make_mesh(**axes, simulated=True)
    specs = fs.presets.PRESETS[preset](PARAMS, mesh)

    def run(rank):
        step = fs.shard_step(plain(0), specs, mesh=mesh, optimizer=fs.optim.sgd(0.1), backend="eager")
        params = {"a": PARAMS["a"], "b": PARAMS["b"] + (rank == mesh.size - 1)}
        state = step.init(params)
        if loaded:
            state.params["b"].fill_(1)
        step(state, torch.ones(2))

    refused = raises(fs.AgreementError, leaves="params['b'] on rank", says="1 leaf")
    with nullcontext() if loaded else refused:
        fs.simulate(mesh, run)


ROWS = {  # what differs among ranks at which step, of (rows, constant), and the leaf
    "rows": (1, lambda x, end, odd: (x + odd, end), "batch['0']"),
    "their order": (2, lambda x, end, odd: (x.flip(0) if odd else x, end), "batch['0']"),
    "their number, later": (4, lambda x, end, odd: (x[: 4 - odd], end), "batch['0']"),
    "a constant": (1, lambda x, end, odd: (x, end + odd), "batch['1']"),
    "nothing at that step": (3, lambda x, end, odd: (x + odd, end), ""),
}


@pytest.mark.parametrize("axis", ["tensor", "context"])
@pytest.mark.parametrize("kind", ROWS)
def test_ranks_that_compute_parts_of_the_same_rows_are_given_the_same(kind, axis):
    mesh = fs.make_mesh(shard=2, **{axis: 2}, simulated=True)
    number, change, leaf = ROWS[kind]
    specs = fs.presets.full_shard(PARAMS, mesh)
    loss = lambda p, x, end: (x @ (p["a"] + p["b"])).mean() + end  # noqa: E731
    step = fs.shard_step(loss, specs, mesh=mesh, optimizer=fs.optim.sgd(0.1), backend="eager")

    def run(rank):
        state, x = step.init(PARAMS), torch.arange(16.0).view(4, 4) + mesh.data_rank
        for i in range(1, 5):
            odd = i == number and rank == 3
            state, _ = step(state, *change(x, 1, odd))

    fix = ["mesh.data_rank", "mesh.data_size"]
    refused = raises(fs.AgreementError, leaves=[f"ranks along '{axis}'", f"{leaf} on ranks 2 and 3"], fix=fix)
    with refused if leaf else nullcontext():
        fs.simulate(mesh, run)


def test_a_forward_is_called_as_often_as_ranks_along_a_data_axis_have_batches():
    mesh = fs.make_mesh(shard=2, tensor=2, simulated=True)
    whole = fs.LayoutSpec(fs.P(None, "tensor"), compute=fs.P(None, "tensor"))
    specs = fs.match_specs(PARAMS, [("*", whole)])
    forward = fs.shard_forward(lambda p, x: x @ (p["a"] + p["b"]), specs, mesh=mesh, backend="eager")

    def run(rank):
        blocks, x = fs.shard(PARAMS, specs, mesh), torch.ones(1, 4)
        return [forward(blocks, x).sum().item() for _ in range(3 + mesh.data_rank)]

    assert fs.simulate(mesh, run) == [[16.0] * 3] * 2 + [[16.0] * 4] * 2


class _Decaying:
    """A learning rate that is an object: its `repr` is an address."""

    def __init__(self, rate):
        self.rate = rate

    def __call__(self, step):
        return self.rate / (1 + step)


def scale_by(rate):
    update = lambda path, grad, slots, param, step: (-rate * grad, {})  # noqa: E731
    return fs.optim.Optimizer(f"mine({object()})", lambda path, param: {}, update)


CLIP = fs.optim.clip_by_global_norm(1.0)
OWN_FUNCTIONS = {
    "a lambda": lambda rate: fs.optim.sgd(lambda step: rate * 0.9**step),
    "a partial": lambda rate: fs.optim.adamw(functools.partial(lambda rate, step: rate, rate)),
    "an object": lambda rate: fs.optim.chain(CLIP, fs.optim.sgd(_Decaying(rate))),
    "from step 1000 on": lambda rate: fs.optim.sgd(lambda step: 0.1 if step < 1000 else rate),
    "an optimizer": scale_by,
}


@pytest.mark.suite({
    "an optimizer": "an update",
    "a partial": "values that it closes over",
    "an object": "attributes",
})  # fmt: skip
@pytest.mark.parametrize("kind", OWN_FUNCTIONS)
def test_functions_of_ones_own_are_compared_by_what_they_compute(kind):
    make = OWN_FUNCTIONS[kind]
    assert run_with(plain, lambda rank: make(0.1)) == [16.0, 16.0]
    with raises(fs.AgreementError, leaves="optimizer", fix="give the", says="updates"):
        run_with(plain, lambda rank: make(0.1 * (rank + 1)))


MEANS = {  # losses of [rows, 2], and whether each rank's counts alike
    "a plain mean": (lambda p, x: (x @ p["a"].T).square().mean(), True),
    "a plain sum": (lambda p, x: (x @ p["a"].T).square().sum(), True),
    "with metrics": (lambda p, x: ((x @ p["a"].T).mean(), {"rows": fs.Mean(x.sum(), x.shape[0])}), True),
    "fs.Mean": (lambda p, x: fs.Mean((x @ p["a"].T).square().sum(), 4 * x.shape[0]), False),
}


@pytest.mark.suite({
    "False-fs.Mean-{'replicate': 2, 'shard': 2}": "exact, over both data axes",
    "True-with metrics-{'shard': 2}": "of a loss beside means",
    "True-a plain sum-{'shard': 2, 'tensor': 2}": "rows that ranks of a compute axis share",
    "False-a plain mean-{'shard': 2}": "a forward",
    "True-fs.Mean-{'shard': 2, 'tensor': 2}": "exact, beside a compute axis",
    "True-a plain mean-{'replicate': 2, 'shard': 2}": "a step",
})  # fmt: skip
@pytest.mark.parametrize(
    "axes", [{"shard": 2}, {"replicate": 2, "shard": 2}, {"shard": 2, "tensor": 2}], ids=str
)
@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("trains", [True, False])
def test_ranks_with_different_numbers_of_rows_need_an_exact_mean(trains, name, axes):
    """Else each rank's mean would count alike, in silence; rows that all ranks have are no matter."""
    mesh, (loss, refused) = fs.make_mesh(**axes, simulated=True), MEANS[name]
    params = {"a": torch.ones(4, 2)}
    optimizer = fs.optim.sgd(0.1) if trains else None

    def run(rank, some):
        specs = fs.presets.full_shard(params, mesh)
        step = fs.shard_step(loss, specs, mesh=mesh, optimizer=optimizer, backend="eager")
        state = step.init(params) if trains else fs.shard(params, specs, mesh)
        return step(state, torch.arange(2.0 * some[mesh.data_rank % 2]).view(-1, 2))

    fs.simulate(mesh, run, (4, 4))
    with raises(fs.AgreementError, fix="fs.Mean") if refused else nullcontext() as error:
        fs.simulate(mesh, run, (4, 2))
    assert not refused or ("4 rows" in str(error.value) and "2 rows" in str(error.value))


def step_ranks(loss, batches):
    """Step two ranks, each with its own batches, one after another."""
    mesh, params = fs.make_mesh(shard=2, simulated=True), {"a": torch.ones(4, 2)}
    specs, optimizer = fs.presets.full_shard(params, mesh), fs.optim.sgd(0.01)

    def run(rank):
        step = fs.shard_step(loss, specs, mesh=mesh, optimizer=optimizer, backend="eager")
        state = step.init(params)
        for batch in batches[rank]:
            state, _ = step(state, *(torch.ones(rows, 2) for rows in batch))

    fs.simulate(mesh, run)


def test_leaves_of_several_counts_are_left_alone():
    """Nobody knows which of them the loss is a mean of: nodes of graphs, and as many labels on each rank."""
    loss = lambda p, x, y: (x @ p["a"].T).sum() * y.mean()  # noqa: E731
    step_ranks(loss, [[(5, 3)] * 2, [(7, 3)] * 2])
    step_ranks(loss, [[(3, 3)] * 2, [(7, 3)] * 2])


LATER = {  # rows of the batches of two ranks, and whether that is said
    "short batches at the end": ([[4] * 6, [4, 4, 4, 3, 3, 3]], True),
    "both are short": ([[4, 4, 3], [4, 4, 3]], False),
    "it is exact": ([[4, 4, 4], [4, 4, 3]], False),
}


@pytest.mark.parametrize("kind", LATER)
def test_other_rows_at_a_later_step_are_said_once(kind):
    rows, said = LATER[kind]
    total = lambda p, x: (x @ p["a"].T).square().sum()  # noqa: E731
    exact = lambda p, x: fs.Mean(total(p, x), 4 * len(x))  # noqa: E731
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step_ranks(exact if kind == "it is exact" else total, [[(n,) for n in own] for own in rows])
    texts = [str(each.message) for each in found if "mean of means" in str(each.message)]
    assert bool(texts) is said and len(texts) <= 2 and all("fs.Mean" in text for text in texts)


def test_whole_leaves_are_no_rows():
    mesh = fs.make_mesh(shard=2, simulated=True)

    def run(rank):
        loss = lambda p, ends, x: (x @ p["a"].T).mean() + ends.sum() * 0.0  # noqa: E731
        step = fs.shard_step(loss, fs.presets.full_shard(PARAMS, mesh), mesh=mesh, backend="eager")
        return step(fs.shard(PARAMS, step.specs, mesh), fs.Whole(torch.ones(rank + 1)), torch.ones(2, 2))

    fs.simulate(mesh, run)


def test_ranks_of_the_same_rows_close_over_the_same_tensors():
    mesh = fs.make_mesh(shard=2, tensor=2, simulated=True)

    def run(rank, last):
        table = torch.ones(4, 2) * (last if rank == 3 else 1.0)
        loss = lambda p, x: (x @ (p["a"] + p["b"]) * table).mean()  # noqa: E731
        specs, optimizer = fs.presets.full_shard(PARAMS, mesh), fs.optim.sgd(0.1)
        step = fs.shard_step(loss, specs, mesh=mesh, optimizer=optimizer, backend="eager")
        step(step.init(PARAMS), torch.ones(4, 4))

    fs.simulate(mesh, run, 1.0)
    with raises(fs.AgreementError, leaves=["ranks along 'tensor'", "closes over", "on ranks 2 and 3"]):
        fs.simulate(mesh, run, 2.0)
