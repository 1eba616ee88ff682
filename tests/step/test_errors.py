"""A user's mistakes: one clear error, all failing leaves by path, and the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
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
    with pytest.raises(SpecError, match="1 leaf cannot take its spec") as error:
        fs.shard_step(loss, specs, mesh=mesh)
    assert str(error.value) == (
        "1 leaf cannot take its spec on mesh (shard=8, tensor=2):\n"
        "  params['wte.weight'] [50257, 768] with P('model'): the mesh has no axis 'model' "
        "(it has: shard, tensor).\n"
        "Fix: name one of the mesh's axes, or make the mesh with an axis 'model'."
    )


# ------------------------------------------------------------------ making a step


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 0}, "accumulate=0: a whole number"),
        ({"accumulate_mode": "often"}, "accumulate_mode='often': one of 'reduce', 'local'"),
        ({"backend": "jit"}, "backend='jit': one of 'inductor', 'eager'"),
        ({"prefetch": (1, 2, 3)}, r"prefetch=\(1, 2, 3\): a number of kernels, or \(forward, backward\)"),
        ({"overlap": 0.5}, "overlap=0.5"),
        ({"cache": 0}, "cache=0: a whole number"),
        ({"timeout": 0}, "timeout=0: seconds"),
        ({"loss_scale": "dynmaic"}, "loss_scale='dynmaic': a positive finite number, 'dynamic', or None"),
        ({"mode": "fastest"}, r"(?s)mode='fastest' is not a mode of torch.compile.*Fix: one of: default"),
        ({"mode": "max-autotune"}, "(?s)CUDA graphs.*Fix"),
        ({"mode": "reduce-overhead"}, "(?s)CUDA graphs.*Fix.*no-cudagraphs"),
        ({"options": {"max_autotun": True}}, r"(?s)1 option.*options\['max_autotun'\].*Fix"),
        ({"mesh": 8}, r"mesh=8 is no mesh.*make_mesh\(shard=8\)"),
    ],
)  # fmt: skip
def test_options_are_checked_when_the_step_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        step(**options)


TORCHS = torch.optim.AdamW([torch.zeros(1)])


@pytest.mark.parametrize(
    ("optimizer", "way_out"),
    [
        ("adamw", r"'adamw', and no.*Fix: optimizer=fs.optim.adamw\(3e-4\)"),
        (TORCHS, r"of type AdamW, .*state = step.init\(model\)"),
        (torch.optim.lr_scheduler.StepLR(TORCHS, 2), r"of type StepLR, .*schedules.warmup_cosine"),
    ],
)
def test_what_is_no_optimizer_is_refused(optimizer: Any, way_out: str) -> None:
    with pytest.raises(OptimizerError, match=rf"(?s){way_out}"):
        step(optimizer=optimizer)
    with pytest.raises(OptimizerError, match=r"(?s)lr.*no rate.*Fix: .*fs.optim.adamw\("):
        fs.optim.adamw(optimizer if not callable(optimizer) else TORCHS, lr=1e-3)


# ------------------------------------------------------------------ one call, one error


SPARSE, NESTED = torch.eye(ROWS).to_sparse(), torch.nested.nested_tensor([rows()], layout=torch.jagged)
LAZY = fs.make_functional(nn.LazyLinear(2))[1]


def of_two(p: Any, x: Tensor, s: Tensor) -> Tensor:
    return loss(p, x) * s


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "all wrong options at once": (
        lambda: step(accumulate=0, backend="jit", cache=-1), SpecError,
        "accumulate=0.*backend='jit'.*cache=-1"),
    "no specs": (
        lambda: fs.shard_step(loss, None), SpecError, "a spec tree holds LayoutSpecs alone.*match_specs"),
    "specs that are P": (
        lambda: fs.shard_step(loss, [P()]), SpecError, r"is P.*Fix: .*LayoutSpec\(P\(\)\)"),
    "no function": (lambda: step(3), TraceError, r"a function of \(params, \*batch\), not int"),
    "specs of another tree": (
        lambda: step().lower({"layers.0.w": torch.zeros(8, 8), "b": torch.zeros(1)}, rows()), SpecError,
        r"differ in 2 leaves.*params\['b'\] has no spec.*specs\['layers.1.w'\] has no leaf.*Fix"),
    "two leaves of one path": (
        lambda: fs.match_specs({"a": {1: torch.zeros(1), "1": torch.zeros(1)}}, [("*", LayoutSpec())]),
        SpecError, "two leaves have the same path.*'a.1'.*Fix: rename keys"),
    "constants for leaves": (
        lambda: step()({**chain(2), "layers.0.w": None, "layers.1.w": 3}, rows()), SpecError,
        r"2 leaves.*'layers.0.w'\] has no leaf.*'layers.1.w'\] has no leaf"),
    "no batch": (
        lambda: step()(chain(2)), StateError,
        r"missing a required argument: 'x'.*fn\(p.*0 batch arguments.*Fix: "),
    "a surplus argument": (
        lambda: step()(chain(2), rows(), rows()), StateError,
        "too many positional arguments.*2 batch arguments.*Fix: "),
    "a batch that cannot be cut": (
        lambda: step(of_two, accumulate=3)(chain(2), rows(), torch.tensor(1.0)), StateError,
        r"2 batch leaves cannot be cut into 3.*batch\['0'\] \[4, 8\].*batch\['1'\] \[\].*fs.Whole"),
    "no such field": (
        lambda: step(optimizer=SGD).init(chain(2)).parameters, AttributeError,
        "no 'parameters'; it has step, params"),
    "a tree for a state": (
        lambda: step(optimizer=SGD)(chain(2), rows()), StateError, "is a TrainState, not dict.*step.init"),
    "a state for a tree": (
        lambda: step()(step(optimizer=SGD).init(chain(2)), rows()), StateError,
        "has no optimizer: pass state.params"),
    "a block of another shape": (
        lambda: step()({**chain(2), "layers.0.w": torch.zeros(3, 3)}, rows()), StateError,
        r"'layers.0.w'\] is \[3, 3\] .*expected a block \[8, 8\].*Fix: pass fs.shard"),
    "a block of another dtype": (
        lambda: step()({**chain(2), "layers.1.w": torch.zeros(WIDTH, WIDTH).half()}, rows()), StateError,
        r"'layers.1.w'\] is \[8, 8\] torch.float16.*Fix: pass fs.shard"),
    "a restore in another order": (
        lambda: fs.checkpoint.restore(step(optimizer=SGD), "ckpt"), CheckpointError,
        r"restore is given a Step for a path.*restore\(path, step\)"),
    "a save in another order": (
        lambda: fs.checkpoint.save_async(step(optimizer=SGD).init(chain(2)), "ckpt"), CheckpointError,
        r"given a TrainState for a path.*save\(path, state\)"),
    "no such device": (lambda: fs.make_mesh(device="xpu"), SpecError, "'xpu': torch .* finds none.*abstract"),
    "few ranks": (lambda: fs.make_mesh(shard=8), SpecError, r"has 1.*fs.launch\(main, ranks=8\).*torchrun"),
    "a word for a mesh": (lambda: fs.presets.full_shard(chain(2), "cpu"), SpecError, "'cpu' is no mesh"),
    "no mesh": (lambda: fs.unshard(chain(2), step().specs, "cpu"), SpecError, "is no mesh"),
    "a word for a mesh of a checkpoint": (
        lambda: fs.checkpoint.restore("ckpt", step().specs, "cpu"), SpecError, "'cpu' is no mesh"),
    "a glob without a leaf": (
        lambda: fs.match_specs({f"h.{i}.wq": rows() for i in range(9)}, [["h.*.wv", {}], ["*", {}]]),
        SpecError, r"'h.\*.wv' matches no leaf; nearest: 'h.0.wq'\n"),
    "no layout": (lambda: fs.checkpoint.save("ckpt", step()), CheckpointError, "a Step does not"),
    "no axis": (lambda: P(0), SpecError, r"Fix: P\('shard'\) splits dim 0, P\(None, 'shard'\) dim 1"),
    "no layout of axes": (lambda: LayoutSpec(fs.make_mesh(shard=1)), SpecError, r"Fix: storage=P\('shard'\)"),
    "a masked batch": (
        lambda: step()(chain(2), masked_tensor(rows(), rows() > 0)), StateError, "is a MaskedTensor\nFix"),
    "a product of a sparse tensor": (
        lambda: step(lambda p, x: (SPARSE.to_sparse_csr() @ loss(p, x)).sum())(chain(2), rows()), TraceError,
        "Fix: .*to_dense"),
    "a state for parameters": (
        lambda: step().init(step(optimizer=SGD).init(chain(2))), SpecError, "not a TrainState.*state.params"),
    "a module for a tree": (
        lambda: fs.presets.full_shard(nn.Linear(2, 2), fs.make_mesh()), SpecError,
        r"tree of tensors, not the module Linear\.\nFix: .*fs.make_functional\(model\)"),
    "parameters for a tree": (
        lambda: step()(nn.Linear(2, 2).parameters(), rows()), SpecError,
        r"tree of tensors, not an iterator\.\nFix: .*fs.make_functional\(model\)"),
    "a module for a function": (
        lambda: fs.shard_step(nn.Linear(8, 8), {}), TraceError,
        r"not the module Linear\.\nFix: .*make_functional"),
    "a batch without values": (
        lambda: step()(chain(2), rows().to("meta")), StateError,
        r"batch\['0'\] \[4, 8\] is on the meta device.*Fix: .*step.lower"),
    "no model": (lambda: fs.make_functional({}), TraceError, "an nn.Module, not a dict.*match_specs"),
    "no function to launch": (lambda: fs.launch(3, ranks=2), LaunchError, "a function, or a list"),
    "a sparse leaf": (lambda: step(params={"w": SPARSE}), SpecError, r"'w'\] is sparse_coo\nFix: .*to_dense"),
    "a lazy leaf": (lambda: step(params=LAZY), SpecError, "'weight'. is without a shape.*a lazy module"),
    "a sparse batch": (lambda: step()(chain(2), SPARSE.to_sparse_csr()), StateError, "is sparse_csr.*Fix"),
    "a nested batch": (lambda: step()(chain(2), NESTED), StateError, r"'0'\] is nested.*to_padded"),
    "a sparse tensor": (
        lambda: step(lambda p, x: loss(p, SPARSE.mm(x)))(chain(2), rows()), TraceError, "coo.*index_add"),
    "a nested tensor": (
        lambda: step(lambda p, x: torch.nested.as_nested_tensor([x]) + loss(p, x))(chain(2), rows()),
        TraceError, "a nested tensor.*Fix: .*to_padded_tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_error(name: str) -> None:
    call, error, message = MISTAKES[name]
    with pytest.raises(error, match=f"(?s){message}"):
        call()


# ------------------------------------------------------------------ batches


@pytest.mark.parametrize(
    ("value", "what"),
    [(None, "None\n.*Fix: None in a batch is"), ([[1.0] * 3] * 4, "a list of 12 numbers\n.*torch.as_tensor")],
)
def test_none_and_lists_in_a_batch_are_named_once(value: Any, what: str) -> None:
    with pytest.raises(TraceError, match=rf"(?s)called with x = batch\['0'\] {what}"):
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
    with pytest.raises(StateError, match=rf"(?s)batch\['\d.*is {what}.*torch.as_tensor"):
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
        with pytest.raises(StateError, match="numbers of the batch are outside of what they are") as error:
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
    with pytest.raises(
        StateError, match=r"consumed by fs\.reshard: the state that was returned takes its place"
    ):
        _ = second.params


def test_handwritten_specs_on_several_ranks_need_the_full_shapes() -> None:
    mesh = fs.make_mesh(shard=2, simulated=True)
    one = fs.shard_step(loss, dict.fromkeys(chain(2), LayoutSpec(P("shard"))), mesh=mesh, backend="eager")
    with pytest.raises(StateError, match=r"(?s)do not know the leaves' full shapes.*match_specs.*step.init"):
        fs.simulate(mesh, lambda rank: one(chain(2), rows()))


def test_an_abstract_mesh_can_be_lowered_on_not_run() -> None:
    mesh = fs.make_mesh(shard=4, abstract=True, device="cpu")
    one = fs.shard_step(
        loss, fs.presets.full_shard(chain(2), mesh), mesh=mesh, optimizer=SGD, backend="eager"
    )
    with pytest.raises(
        fs.CollectiveError, match=r"(?s)is abstract: it can be lowered on, not run.*simulated=True"
    ):
        one(one.init(chain(2)), rows())


# ------------------------------------------------------------------ optimizers


def test_a_batch_of_another_dtype_than_the_leaves_compute_in() -> None:
    """Tensors without values let it pass; a kernel would fail, with torch's own words."""
    params = chain(2)
    specs = fs.match_specs(params, [("*", LayoutSpec(compute_dtype=torch.bfloat16))])

    def lowered(fn: Any) -> Any:
        step = fs.shard_step(fn, specs, optimizer=SGD, backend="eager")
        return step.lower(params, torch.ones(ROWS, WIDTH))

    text = r"(?s)different dtypes 1 time.*matmul of batch\['0'\] f32\[.*params\['layers.0.w'\] bf16.*x.to\("
    with pytest.raises(TraceError, match=text):
        lowered(lambda p, x: run_chain(p, (x @ p["layers.0.w"]).bfloat16()).float().sum())
    with pytest.raises(TraceError, match=r"(?s)linear of batch.* f32.* and params.* bf16"):
        lowered(lambda p, x: torch.nn.functional.linear(x + 1, p["layers.0.w"]).sum())

    def autocast(p: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ p["layers.0.w"]).float().sum()

    assert lowered(autocast) and lowered(lambda p, x: run_chain(p, x.bfloat16()).float().sum())
