"""A user's mistakes: one clear error, all failing leaves by path, and the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from errors import raises
from torch import Tensor, nn
from torch.masked import masked_tensor
from toys import ROWS, WIDTH, chain, rows, run_chain

import fnshard as fs
from fnshard import (
    CheckpointError,
    LaunchError,
    LayoutSpec,
    OptimizerError,
    P,
    SpecError,
    StateError,
    TraceError,
)
from fnshard.compiler import lower

SGD = fs.optim.sgd(0.1)


def loss(p: Any, x: Tensor) -> Tensor:
    return run_chain(p, x).sum()


def step(fn: Any = loss, params: Any = None, **options: Any) -> Any:
    specs = fs.match_specs(params or chain(2), [("*", LayoutSpec())])
    return fs.shard_step(fn, specs, **{"backend": "eager", **options})


def test_the_design_s_example() -> None:
    mesh = fs.make_mesh(shard=8, tensor=2, abstract=True)
    params = {"wte.weight": torch.zeros(50257, 768, device="meta")}
    specs = fs.match_specs(params, [("*", LayoutSpec(P("model")))])
    with pytest.raises(SpecError) as error:
        fs.shard_step(loss, specs, mesh=mesh)
    assert str(error.value) == (
        "1 leaf cannot take its spec on mesh (shard=8, tensor=2):\n"
        "  params['wte.weight'] [50257, 768] with P('model'): the mesh has no axis 'model' "
        "(it has: shard, tensor).\n"
        "Fix: name one of the mesh's axes, or make the mesh with an axis 'model'."
    )


# ------------------------------------------------------------------ making a step


@pytest.mark.parametrize(
    ("options", "leaf", "says", "fix"),
    [
        ({"accumulate": 0}, "accumulate=0", "a whole number", ()),
        ({"accumulate_mode": "often"}, "accumulate_mode='often'", "'reduce', 'local'", ()),
        ({"backend": "jit"}, "backend='jit'", "'inductor', 'eager'", ()),
        ({"prefetch": (1, 2, 3)}, "prefetch=(1, 2, 3)", "(forward, backward)", ()),
        ({"overlap": 0.5}, "overlap=0.5", (), ()),
        ({"cache": 0}, "cache=0", "a whole number", ()),
        ({"timeout": 0}, "timeout=0", "seconds", ()),
        ({"loss_scale": "dynmaic"}, "loss_scale='dynmaic'", ["positive finite number", "'dynamic'", "None"],
         ()),
        ({"mode": "fastest"}, "mode='fastest'", "torch.compile", "default"),
        ({"mode": "max-autotune"}, "CUDA graphs", (), "max-autotune-no-cudagraphs"),
        ({"mode": "reduce-overhead"}, "CUDA graphs", (), "max-autotune-no-cudagraphs"),
        ({"options": {"max_autotun": True}}, "options['max_autotun']", "1 option",
         "torch._inductor.list_options()"),
        ({"mesh": 8}, "mesh=8", (), "fs.make_mesh(shard=8)"),
    ],
)  # fmt: skip
def test_options_are_checked_when_the_step_is_made(
    options: dict[str, Any], leaf: str, says: Any, fix: Any
) -> None:
    with raises(SpecError, leaves=leaf, says=says, fix=fix):
        step(**options)


TORCHS = torch.optim.AdamW([torch.zeros(1)])


@pytest.mark.parametrize(
    ("optimizer", "leaf", "fix"),
    [
        ("adamw", "'adamw'", "optimizer=fs.optim.adamw(3e-4)"),
        (TORCHS, "AdamW", "state = step.init(model)"),
        (torch.optim.lr_scheduler.StepLR(TORCHS, 2), "StepLR", "schedules.warmup_cosine"),
    ],
)
def test_what_is_no_optimizer_is_refused(optimizer: Any, leaf: str, fix: str) -> None:
    with raises(OptimizerError, leaves=leaf, fix=fix):
        step(optimizer=optimizer)
    with raises(OptimizerError, leaves="lr", fix="fs.optim.adamw("):
        fs.optim.adamw(optimizer, lr=1e-3)


# ------------------------------------------------------------------ one call, one error


SPARSE, NESTED = torch.eye(ROWS).to_sparse(), torch.nested.nested_tensor([rows()], layout=torch.jagged)
LAZY = fs.make_functional(nn.LazyLinear(2))[1]


def of_two(p: Any, x: Tensor, s: Tensor) -> Tensor:
    return loss(p, x) * s


def step_on_all_that_it_returned() -> None:
    one = step(optimizer=SGD)
    returned = one(one.init(chain(2)), rows())
    one(returned, rows())


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str | list[str], str | list[str]]] = {
    "all wrong options at once": (
        lambda: step(accumulate=0, backend="jit", cache=-1), SpecError,
        ["accumulate=0", "backend='jit'", "cache=-1"], ()),
    "no specs": (
        lambda: fs.shard_step(loss, None), SpecError, "NoneType", "match_specs"),
    "specs that are P": (
        lambda: fs.shard_step(loss, [P()]), SpecError, "is P", "LayoutSpec(P())"),
    "no function": (lambda: step(3), TraceError, ["`fn`", "(params, *batch)", "int"], ()),
    "specs of another tree": (
        lambda: step().lower({"layers.0.w": torch.zeros(8, 8), "b": torch.zeros(1)}, rows()), SpecError,
        ["2 leaves", "params['b'] has no spec", "specs['layers.1.w'] has no leaf"], "match_specs"),
    "two leaves of one path": (
        lambda: fs.match_specs({"a": {1: torch.zeros(1), "1": torch.zeros(1)}}, [("*", LayoutSpec())]),
        SpecError, "'a.1'", "rename keys"),
    "constants for leaves": (
        lambda: step()({**chain(2), "layers.0.w": None, "layers.1.w": 3}, rows()), SpecError,
        ["2 leaves", "specs['layers.0.w'] has no leaf", "specs['layers.1.w'] has no leaf"], ()),
    "no batch": (
        lambda: step()(chain(2)), StateError,
        ["'x'", "fn(p", "0 batch arguments"], ["in order", "by name"]),
    "a surplus argument": (
        lambda: step()(chain(2), rows(), rows()), StateError,
        ["too many", "2 batch arguments"], ["in order", "by name"]),
    "a batch that cannot be cut": (
        lambda: step(of_two, accumulate=3)(chain(2), rows(), torch.tensor(1.0)), StateError,
        ["2 leaves", "into 3", "batch['0'] [4, 8]", "batch['1'] []"], "fs.Whole"),
    "no such field": (
        lambda: step(optimizer=SGD).init(chain(2)).parameters, AttributeError,
        ["'parameters'", "step, params"], ()),
    "a tree for a state": (
        lambda: step(optimizer=SGD)(chain(2), rows()), StateError, ["TrainState", "dict"], "step.init"),
    "all that a step returns for a state": (
        step_on_all_that_it_returned, StateError,
        ["TrainState", "(state, metrics)"], "state, metrics = step("),
    "a state for a tree": (
        lambda: step()(step(optimizer=SGD).init(chain(2)), rows()), StateError,
        "optimizer", ["state.params", "optimizer="]),
    "a block of another shape": (
        lambda: step()({**chain(2), "layers.0.w": torch.zeros(3, 3)}, rows()), StateError,
        ["params['layers.0.w'] is [3, 3]", "block [8, 8]"], "fs.shard"),
    "a block of another dtype": (
        lambda: step()({**chain(2), "layers.1.w": torch.zeros(WIDTH, WIDTH).half()}, rows()), StateError,
        "params['layers.1.w'] is [8, 8] torch.float16", "fs.shard"),
    "full leaves of another shape": (
        lambda: fs.shard({**chain(2), "layers.0.w": torch.zeros(3, 3)}, step().specs, fs.make_mesh()),
        StateError, ["1 leaf", "params['layers.0.w'] is [3, 3]", "[8, 8]"], "full leaves"),
    "a restore in another order": (
        lambda: fs.checkpoint.restore(step(optimizer=SGD), "ckpt"), CheckpointError,
        ["restore", "Step"], "restore(path, step)"),
    "a save in another order": (
        lambda: fs.checkpoint.save_async(step(optimizer=SGD).init(chain(2)), "ckpt"), CheckpointError,
        ["save", "TrainState"], "save(path, state)"),
    "no such device": (lambda: fs.make_mesh(device="xpu"), SpecError, "device='xpu'", "abstract=True"),
    "few ranks": (lambda: fs.make_mesh(shard=8), SpecError, "has 1",
        ["fs.launch(main, ranks=8)", "torchrun"]),
    "a word for a mesh": (lambda: fs.presets.full_shard(chain(2), "cpu"), SpecError, "mesh='cpu'",
        "fs.make_mesh("),
    "no mesh": (lambda: fs.unshard(chain(2), step().specs, "cpu"), SpecError, "mesh='cpu'", "fs.make_mesh("),
    "a word for a mesh of a checkpoint": (
        lambda: fs.checkpoint.restore("ckpt", step().specs, "cpu"), SpecError, "mesh='cpu'", "fs.make_mesh("),
    "a glob without a leaf": (
        lambda: fs.match_specs({f"h.{i}.wq": rows() for i in range(9)}, [["h.*.wv", {}], ["*", {}]]),
        SpecError, ["'h.*.wv'", "nearest: 'h.0.wq'"], ()),
    "no layout": (lambda: fs.checkpoint.save("ckpt", step()), CheckpointError, "Step", ()),
    "no axis": (lambda: P(0), SpecError, "P(0,)", ["P('shard')", "P(None, 'shard')"]),
    "no layout of axes": (lambda: LayoutSpec(fs.make_mesh(shard=1)), SpecError, "storage",
        "storage=P('shard')"),
    "a masked batch": (
        lambda: step()(chain(2), masked_tensor(rows(), rows() > 0)), StateError,
        "batch['0'] is a MaskedTensor", "x.to_tensor(0.0)"),
    "a product of a sparse tensor": (
        lambda: step(lambda p, x: (SPARSE.to_sparse_csr() @ loss(p, x)).sum())(chain(2), rows()), TraceError,
        "matmul(", "to_dense"),
    "a state for parameters": (
        lambda: step().init(step(optimizer=SGD).init(chain(2))), SpecError, "TrainState", "state.params"),
    "a module for a tree": (
        lambda: fs.presets.full_shard(nn.Linear(2, 2), fs.make_mesh()), SpecError,
        "the module Linear", "fs.make_functional(model)"),
    "parameters for a tree": (
        lambda: step()(nn.Linear(2, 2).parameters(), rows()), SpecError,
        "an iterator", "fs.make_functional(model)"),
    "a module for a function": (
        lambda: fs.shard_step(nn.Linear(8, 8), {}), TraceError,
        "the module Linear", "fs.make_functional(model)"),
    "a batch without values": (
        lambda: step()(chain(2), rows().to("meta")), StateError,
        ["batch['0'] [4, 8]", "meta device"], "step.lower"),
    "no model": (lambda: fs.make_functional({}), TraceError, "a dict", "match_specs"),
    "no function to launch": (lambda: fs.launch(3, ranks=2), LaunchError,
        ["fs.launch(3, ranks=2)", "a function", "a list"], "fs.launch(["),
    "a sparse leaf": (lambda: step(params={"w": SPARSE}), SpecError, "params['w'] is sparse_coo", "to_dense"),
    "a lazy leaf": (lambda: step(params=LAZY), SpecError, ["params['weight']", "shape"], "lazy module"),
    "a sparse batch": (lambda: step()(chain(2), SPARSE.to_sparse_csr()), StateError, "is sparse_csr",
        "to_dense"),
    "a nested batch": (lambda: step()(chain(2), NESTED), StateError, "batch['0'] is nested",
        "to_padded_tensor"),
    "a sparse tensor": (
        lambda: step(lambda p, x: loss(p, SPARSE.mm(x)))(chain(2), rows()), TraceError, "sparse_coo",
        "index_add"),
    "a nested tensor": (
        lambda: step(lambda p, x: torch.nested.as_nested_tensor([x]) + loss(p, x))(chain(2), rows()),
        TraceError, "a nested tensor", "to_padded_tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_error(name: str) -> None:
    call, error, leaves, fix = MISTAKES[name]
    with raises(error, leaves=leaves, fix=fix):
        call()


# ------------------------------------------------------------------ batches


@pytest.mark.parametrize(
    ("value", "what", "fix"),
    [(None, "None", "pass a tensor"), ([[1.0] * 3] * 4, "a list of 12 numbers", "torch.as_tensor")],
)
def test_none_and_lists_in_a_batch_are_named_once(value: Any, what: str, fix: str) -> None:
    with raises(TraceError, leaves=f"x = batch['0'] {what}", fix=fix):
        step(lambda p, x: (x @ p["layers.0.w"]).sum())(chain(2), value)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (np.zeros((ROWS, WIDTH)), "ndarray"),
        ([object()], "object"),
        (fs.Whole({"x": torch.zeros(1)}), "fs.Whole of dict"),
    ],
)
def test_batch_leaves_that_would_be_baked_in_are_refused(value: Any, what: str) -> None:
    with raises(StateError, leaves=["batch['", f"is {what}"], fix="torch.as_tensor"):
        step(lambda p, x: run_chain(p, rows()).sum())(chain(2), value)


def test_indices_outside_of_their_tables_are_named_before_the_step_runs() -> None:
    """A kernel would raise without a name, or end the process."""

    def lookups(p: Any, x: Tensor, y: Tensor) -> Tensor:
        hidden = F.embedding(x, p["w"]) + p["places"][torch.arange(x.shape[1])]
        hidden = hidden + F.embedding_bag(x, p["bags"])[:, None]
        hidden = hidden + torch.take(p["flat"], x).sum() + masked(x)
        logits = hidden @ p["w"].T
        shifted = F.pad(y, (0, 1), value=-100)[:, 1:].flatten()
        return F.cross_entropy(logits.flatten(0, 1), shifted) + torch.gather(logits, 2, x[..., None]).mean()

    params = {"w": torch.randn(10, 4), "places": torch.randn(3, 4), "bags": torch.randn(10, 4)}
    params["flat"], mask = torch.randn(2, 5), torch.eye(2).bool()

    def masked(x: Tensor) -> Tensor:
        return torch.zeros(2, 2, 12).index_put((mask, x[0, :1]), torch.ones(())).sum()

    train = step(lookups, params, accumulate=2)
    good = torch.tensor([[0, 1, 9], [2, 3, 4]])
    train(params, good, good)
    low, wide = good - 1, good.repeat(1, 2)
    for x, y, lookup in [
        (good + 1, good, "embedding of leaf 'w' f32[10, 4] takes 0 to 9, and gets 1 to 10, at "),
        (good + 1, good, "embedding_bag of leaf 'bags' f32[10, 4] takes 0 to 9, and gets 1 to 10, at "),
        (good + 1, good, "take of leaf 'flat' f32[2, 5] takes -10 to 9, and gets 1 to 10, at "),
        (low, good, "gather of f32[1, 3, 10] takes 0 to 9, and gets -1 to 8, at "),
        (good, good * 3, "cross_entropy_loss of f32[3, 10] takes 0 to 9, and gets -100 to 27, at "),
        (wide, wide, "index of leaf 'places' f32[3, 4] takes -3 to 2, and gets 0 to 5, at "),
    ]:
        with raises(
            StateError, leaves=[lookup, "test_errors.py:"], fix=["vocabulary", "ignore_index"]
        ) as error:
            train(params, x, y)
        (line,) = (line for line in str(error.value).splitlines() if lookup in line)
        assert "test_errors.py:" in line
        assert f"  batch['0'] i64[2, {x.shape[1]}]: {int(x.min())} to {int(x.max())}\n" in str(error.value)


def test_only_what_integers_of_the_batch_make_is_made_beforehand(monkeypatch) -> None:
    """A code book's search or a user's own operation would run twice."""
    monkeypatch.setattr(lower, "trace_device", lambda mesh: torch.device("meta"))
    order, mesh = torch.arange(4), fs.make_mesh(shard=2, device="cuda", abstract=True)

    def lookups(p: Any, x: Tensor, y: Tensor) -> Tensor:
        ids = [x.long(), torch.cdist(x, x).argmin(1), order.to(y.device)[y], torch.ops.fnshard_test.twice(y)]
        return sum(F.embedding(i, p["w"]).sum() for i in [*ids, y + 1])

    params = {"w": torch.randn(10, 4)}
    train = fs.shard_step(lookups, fs.presets.full_shard(params, mesh), mesh=mesh)
    with torch.library._scoped_library("fnshard_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        indices = train.lower(params, torch.rand(4, 4), torch.arange(4)).indices
    assert [k.node.target.overloadpacket.__name__ for k in indices.lookups] == ["index", "embedding"]
    assert indices.names == (("batch", "1"),)  # `order[y]` itself, and `y + 1`


# ------------------------------------------------------------------ states


def test_a_state_says_what_took_it_whatever_came_before() -> None:
    one = step(optimizer=fs.optim.adamw(0.1))
    first = one.init(chain(2))
    second, _ = one(first, rows())
    third = fs.reshard(second, one.specs, one.specs)
    fourth, _ = one(third, rows())
    shown = [repr(state).partition("(")[2] for state in (first, second, third)]
    assert shown == ["consumed by step 0)", "consumed by fs.reshard)", "consumed by step 1)"]
    assert int(fourth.step) == 2
    with raises(StateError, leaves="consumed by fs.reshard", fix="state.copy()"):
        _ = second.params


def test_handwritten_specs_on_several_ranks_need_the_full_shapes() -> None:
    mesh = fs.make_mesh(shard=2, simulated=True)
    one = fs.shard_step(loss, dict.fromkeys(chain(2), LayoutSpec(P("shard"))), mesh=mesh, backend="eager")
    with raises(StateError, leaves="full shapes", fix=["match_specs", "step.init"]):
        fs.simulate(mesh, lambda rank: one(chain(2), rows()))


def test_an_abstract_mesh_can_be_lowered_on_not_run() -> None:
    mesh = fs.make_mesh(shard=4, abstract=True, device="cpu")
    one = fs.shard_step(
        loss, fs.presets.full_shard(chain(2), mesh), mesh=mesh, optimizer=SGD, backend="eager"
    )
    with raises(fs.CollectiveError, leaves="abstract", fix="simulated=True"):
        one(one.init(chain(2)), rows())


# ------------------------------------------------------------------ dtypes


def test_a_batch_of_another_dtype_than_the_leaves_compute_in() -> None:
    """Tensors without values let it pass; a kernel would fail, with torch's own words."""
    params = chain(2)
    specs = fs.match_specs(params, [("*", LayoutSpec(compute_dtype=torch.bfloat16))])

    def lowered(fn: Any) -> Any:
        step = fs.shard_step(fn, specs, optimizer=SGD, backend="eager")
        return step.lower(params, torch.ones(ROWS, WIDTH))

    leaves = ["matmul of batch['0'] f32[", "params['layers.0.w'] bf16"]
    with raises(TraceError, leaves=leaves, fix="x.to(", says="1 time"):
        lowered(lambda p, x: run_chain(p, (x @ p["layers.0.w"]).bfloat16()).float().sum())
    with raises(TraceError, leaves=["linear of batch", "f32", "params['layers.0.w']", "bf16"]):
        lowered(lambda p, x: torch.nn.functional.linear(x + 1, p["layers.0.w"]).sum())

    def autocast(p: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ p["layers.0.w"]).float().sum()

    assert lowered(autocast) and lowered(lambda p, x: run_chain(p, x.bfloat16()).float().sum())
