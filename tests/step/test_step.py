"""What a step does besides the gradient: names it must carry, randomness, batches, failures, dtypes."""

import collections
import copy
import pickle
import weakref

import optree
import pytest
import torch
from errors import raises
from torch.utils._python_dispatch import TorchDispatchMode
from toys import chain, lower, rows, run_chain, step_of

import fnshard as fs
from fnshard import LayoutSpec, P
from fnshard.compiler.schedule.instructions import ReduceScalars, ReduceScatter, Run, Update, Wait

X, T = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)


def grads_on(world, loss, params, specs_of, *batch, **options):
    mesh = fs.make_mesh(shard=world, simulated=True)
    specs = specs_of(params, mesh)
    step = fs.shard_step(loss, specs, mesh=mesh, backend="eager", **options)

    def run(rank):
        rows = [b[rank * (len(b) // world) : (rank + 1) * (len(b) // world)] for b in batch]
        _, grads = step(fs.shard(params, specs, mesh), *rows)
        return fs.unshard(grads, specs, mesh)

    return fs.simulate(mesh, run)[0]


@pytest.mark.parametrize(
    ("world", "mode"),
    [(1, "local"), (2, "reduce"), (2, "local"), (1, "breadth"), (2, "breadth")],
)
def test_any_leaf_name_works(world, mode):
    names = ["w#1", "w", "a+b", "l.0.w@3", "l.0.w@3+", "g:x", "l.1.a#0@2"]
    params = {n: torch.randn(3, 3, dtype=torch.float64) for n in names}

    def loss(p, x, t):
        for w in p.values():
            x = torch.tanh(x @ w)
        return (x - t).pow(2).mean()

    expected = torch.func.grad(loss)(params, X, T)
    how = {"micro_order": mode} if mode == "breadth" else {"accumulate_mode": mode}
    got = grads_on(world, loss, params, fs.presets.full_shard, X, T, accumulate=2, **how)
    assert all((got[n] - expected[n]).abs().max() < 1e-12 for n in names)


def in_order(p, x):
    """Compute what depends on the order of the tree's leaves alone."""
    for w in p.values():
        x = torch.tanh(x @ w)
    return x.sum()


def test_names_decide_which_spec_is_whose_and_fn_sees_the_parameters_own_order():
    draw = torch.Generator().manual_seed(0)
    params, x = {n: torch.randn(3, 3, generator=draw) for n in "abc"}, X.float()
    coded = LayoutSpec(P("shard"), codec="int8", trainable=False)
    turned = {"c": LayoutSpec(P("shard")), "b": coded, "a": LayoutSpec()}
    mesh = fs.make_mesh(shard=2, simulated=True)

    def make(**options):
        return fs.shard_step(in_order, turned, mesh=mesh, backend="eager", **options)

    def run(rank):
        one, other, plain = make(optimizer=fs.optim.adamw(1e-3)), make(optimizer=fs.optim.adamw(1e-3)), make()
        state, specs = one.init(params), {k: one.specs[k] for k in turned}
        blocks = fs.shard(params, specs, mesh)
        full = fs.unshard(blocks, specs, mesh)
        other.resolve(params)
        plain.lower(params, x)
        loss, grads = plain(blocks, x)
        forward = fs.shard_forward(in_order, specs, mesh=mesh, backend="eager")(blocks, x)
        adopted = other.adopt(fs.shard(params, specs, mesh))
        losses = [one(state, x)[1]["loss"], other(adopted, x)[1]["loss"], loss, forward]
        return losses, in_order(full, x), [blocks, full, grads]

    for losses, expected, trees in fs.simulate(mesh, run):
        assert [list(tree) for tree in trees] == [["a", "b", "c"]] * 3
        torch.testing.assert_close(torch.stack(losses).float(), expected.expand(len(losses)))


def test_batches_of_one_shape_and_two_structures_are_two_programs():
    Pair = collections.namedtuple("Pair", "x")
    params = {"w": torch.ones(2)}

    def loss(p, batch, extra=None):
        value = batch["x"] if isinstance(batch, dict) else 2 * batch.x
        return (p["w"] * value).sum() * (1 if extra is None else 3)

    step = step_of(loss, params)
    x = torch.ones(2)
    assert step(params, {"x": x})[0] == 2
    with pytest.warns(UserWarning, match="compiling again"):
        assert step(params, Pair(x))[0] == 4
    with pytest.warns(UserWarning, match="compiling again"):
        assert step(params, {"x": x}, [])[0] == 6


@pytest.mark.parametrize("mode", ["reduce", "local"])
def test_micro_batches_are_summed_no_narrower_than_the_wire(mode):
    params = {"w": torch.full((16,), 1.0, dtype=torch.bfloat16)}
    specs = fs.match_specs(params, [("*", LayoutSpec(reduce_dtype=torch.float32))])
    loss = lambda p, x: (p["w"].float() * x).sum(1).mean()  # noqa: E731
    x = torch.rand(256, 16, generator=torch.Generator().manual_seed(0))
    errors = []
    for parts in (1, 64):
        step = fs.shard_step(loss, specs, backend="eager", accumulate=parts, accumulate_mode=mode)
        errors.append(((step(params, x)[1]["w"].float() - x.mean(0)).abs() / x.mean(0)).max())
    assert errors[1] < 1.5 * errors[0] + 1e-3


def test_the_mean_of_nothing_in_aux_is_zero():
    params = {"w": torch.ones(2)}
    loss = lambda p, x: (p["w"].sum(), {"m": fs.Mean(x.sum() * 0, torch.tensor(0))})  # noqa: E731
    step = step_of(loss, params)
    assert step(params, torch.ones(2))[0][1]["m"] == 0


def test_a_step_that_fails_half_way_leaves_no_state_that_looks_whole():
    params = {"a": torch.ones(2), "b": torch.ones(2)}

    def rate(count):
        raise RuntimeError("the optimizer broke")

    def update(path, grad, slots, param, step):
        return -(step.host(rate) if path == "a" else 0.1) * grad, {}

    broken = fs.optim.Optimizer("broken()", lambda path, param: {}, update)
    step = step_of(lambda p, x: (p["a"] * p["b"] * x).sum(), params, optimizer=broken)
    state = step.init(params)
    with pytest.raises(RuntimeError, match="the optimizer broke"):
        step(state, torch.ones(2))
    with raises(fs.StateError, leaves="TrainState", fix="state.copy()"):
        state.params  # noqa: B018


def test_a_mean_may_say_how_many_items_it_counts_at_most():
    """Gradients are divided by that before they are summed, which fp16 needs; the result is the same."""
    params = {"w": torch.ones(4, dtype=torch.float16)}
    mean = lambda p, x, bound: fs.Mean((p["w"] * x).float().sum(), torch.tensor(8), bound)  # noqa: E731
    for bound in (8.0, 1024.0):
        step = step_of(lambda p, x, b=bound: mean(p, x, b), params)
        assert torch.equal(step(params, torch.ones(8, 4).sum(0).half())[1]["w"], torch.ones(4).half())


class _Counted(TorchDispatchMode):
    """A mode that counts how often each operator is called."""

    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def test_norms_and_casts_are_one_call_a_unit_however_many_leaves():
    def calls_of(count):
        params = {f"unit.{i}": torch.randn(3) for i in range(count)}
        mesh = fs.make_mesh(shard=1, simulated=True)
        units = lambda tree: dict.fromkeys(tree, "u")  # noqa: E731
        narrow, wide = torch.bfloat16, torch.float32
        specs = fs.presets.full_shard(params, mesh, compute_dtype=narrow, reduce_dtype=wide, units=units)
        optimizer = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.sgd(0.1))
        # One kernel, whose calls are not counted: `sum` is the same for all leaves.
        step = fs.shard_step(
            lambda p, x: sum((w * x).sum() for w in p.values()), specs, mesh=mesh, optimizer=optimizer,
            backend="eager",
        )  # fmt: skip

        def run(rank):
            state, _ = step(step.init(params), torch.ones(3, dtype=torch.bfloat16))
            with _Counted() as calls:
                step(state, torch.ones(3, dtype=torch.bfloat16))
            return calls.seen

        return fs.simulate(mesh, run)[0]

    few, many = calls_of(2), calls_of(20)
    for name in ("_foreach_norm", "_foreach_copy_", "linalg_vector_norm", "_to_copy"):
        assert few[name] == many[name], name
    assert few["_foreach_norm"] == 1  # of gradients
    assert few["_foreach_copy_"] == 2  # leaves to their kernel, gradients from it


def _counted(p, x):
    y = run_chain(p, x)
    return fs.Mean(y.sum(), (x > 0).sum())


@pytest.mark.parametrize(
    "how",
    [{}, {"accumulate": 2}, {"accumulate": 2, "accumulate_mode": "local"},
     {"accumulate": 2, "micro_order": "breadth"}],
)  # fmt: skip
def test_the_sum_of_counts_leaves_before_the_last_backward_and_arrives_before_the_updates(how):
    """Counts are known after the forward. Updates divide by their sum, and yet run in the backward."""
    accumulate = how.get("accumulate", 1)
    mean = lambda p, x: run_chain(p, x).mean()  # noqa: E731
    plain, counted = (list(lower(f, chain(6), rows(), **how).schedule.instructions) for f in (mean, _counted))

    def order(found):
        return [(i.unit, i.verb) for i in found if isinstance(i, Run | Update)]

    def numbers(kind, **fields):
        return [
            n for n, i in enumerate(counted)
            if isinstance(i, kind) and all(getattr(i, f) == v for f, v in fields.items())
        ]  # fmt: skip

    assert order(counted) == order(plain)
    last = f"backward{f'.{accumulate - 1}' * (accumulate > 1)}"
    (issued,), (arrived,) = numbers(ReduceScalars), numbers(Wait, of=ReduceScalars)
    updates = numbers(Update)
    assert issued < min(numbers(Run, phase=last))
    assert min(numbers(ReduceScatter, phase=last)) < arrived < min(updates)  # what can leave has left
    assert all("scalars" in counted[n].reads for n in updates)


def test_a_group_of_one_casts_once_where_leaves_are_kept():
    """reshard=False keeps the copies. Else a backward casts again, but for the last unit, whose copy is still
    there, and the first, which reads none."""
    params = {p: v.float() for p, v in chain(4).items()}
    for world, verb in ((1, "cast"), (2, "gather")):
        kept, freed = (
            lower(lambda p, x: run_chain(p, x).mean(), params, rows().bfloat16(), ranks=world, preset=preset,
                  policy={"compute_dtype": torch.bfloat16}).schedule.counts()[verb]
            for preset in ("shard_grad_op", "full_shard")
        )  # fmt: skip
        assert (kept, freed) == (4, 6)  # the first unit's backward does not read its leaf


def test_a_state_may_be_changed_copied_and_pickled_between_steps():
    params = {"w": torch.ones(2, 2), "scale": 2.0}
    step = step_of(lambda p, x: (x @ p["w"]).sum() * p["scale"], params, optimizer=fs.optim.sgd(0.0))
    state, _ = step(step.init(params), torch.ones(1, 2))
    twin = pickle.loads(pickle.dumps(copy.deepcopy(state)))
    assert torch.equal(twin.params["w"], params["w"]) and twin.params["scale"] == 2.0
    assert int(twin.step) == 1
    state.params["w"].data = torch.zeros(2, 2)
    state, metrics = step(state, torch.ones(1, 2))
    assert metrics["loss"] == 0 == state.params["w"].sum()
    state.params["scale"] = 3.0
    with raises(fs.SpecError, leaves="params['scale']"):
        step(state, torch.ones(1, 2))
    kept = weakref.ref(state.params["w"])
    state.consume("nobody")  # the state that takes the tensors is dropped at once
    assert kept() is None


def test_the_second_step_flattens_state_and_batch_once_and_checks_every_leaf(monkeypatch):
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    step = step_of(
        lambda p, x, y: (p["a"] * p["b"] * x).sum() + y["c"].sum(), params, optimizer=fs.optim.adamw(0.1)
    )
    batch = torch.ones(2), {"c": torch.ones(1)}
    state, _ = step(step.init(params), *batch)
    flattened = []
    kept = optree.tree_flatten
    monkeypatch.setattr(
        optree, "tree_flatten", lambda tree, *a, **k: flattened.append(tree) or kept(tree, *a, **k)
    )
    state, _ = step(state, *batch)
    assert len(flattened) == 2 and flattened.count(state.params) == 1
    monkeypatch.undo()
    slots = state.opt_state["a"].pop("mu")
    state.opt_state["b"] = {"mu": slots, **state.opt_state["b"]}
    with raises(fs.StateError, leaves="'a'", says=["has slots nu", "wanted are mu, nu"]):
        step(state, *batch)
    state.opt_state["a"]["mu"] = slots
    state.params["b"].data = torch.ones(3)
    with raises(fs.StateError, leaves="params['b'] is [3]", says="block [2]"):
        step(state, *batch)
    state.params["b"].data = torch.ones(2)
    state.params["a"] = torch.ones(2, requires_grad=True)
    step(state, *batch)


def test_a_replay_is_a_second_step():
    params = {"w": torch.ones(3)}
    step = step_of(lambda p, x: (p["w"] * x).sum(), params)
    step(params, torch.ones(3))
    again, slower = step.replay(), step.replay(sources=True)
    for replay in (again, slower):
        loss, _ = replay(params, torch.ones(3))
        assert float(loss) == 3.0
        assert replay.resolved.stored == step.resolved.stored and replay.fn is step.fn
    # With the same options it runs the very kernels of the first step; with others it has its own.
    assert again._cache.programs is step._cache.programs is not slower._cache.programs
    assert not step.options.sources and slower.options.sources


def test_front_is_the_program_cut_into_segments():
    params = {"w": torch.ones(3)}
    step = step_of(lambda p, x: (p["w"] * x).sum(), params)
    step(params, torch.ones(3))
    assert len(step.front(torch.ones(3)).segments.segments) == 1
