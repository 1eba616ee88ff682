"""`P`, `LayoutSpec`, rules and blocks."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from errors import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import Tensor, nn

import fnshard as fs
from fnshard import LayoutSpec, P, SpecError
from fnshard.layout.partition import Fused, block_shape, block_slices
from fnshard.layout.spec import check_specs, is_here, stage_of

MESH = fs.make_mesh(replicate=2, shard=4, abstract=True)


WHOLE = P()
SHARD = P("shard")


def resolve(
    storage: P = WHOLE, shape: tuple[int, ...] = (8, 8), dtype: torch.dtype = torch.float32, **fields: Any
) -> LayoutSpec:
    """Return a spec that has seen its leaf."""
    return LayoutSpec(storage, **fields).resolve(torch.zeros(shape, dtype=dtype), "unit")


# ------------------------------------------------------------------ P


def test_trailing_nones_may_be_left_out() -> None:
    assert P("shard") == P("shard", None, None) and P(None) == P() and P(()) == P()
    assert P(("shard",)) == P("shard") and hash(P("shard")) == hash(P(("shard",), None))
    assert P(None, "shard") != P("shard")


def test_axes_and_dims() -> None:
    layout = P(None, ("replicate", "shard"))
    assert layout.axes == ("replicate", "shard")
    assert (layout.of(0), layout.of(1), layout.of(7)) == ((), ("replicate", "shard"), ())


def test_reprs_read_back_and_values_can_be_pickled() -> None:
    spec = resolve(P("shard"), compute_dtype=torch.bfloat16)
    for value in (P(), P("a"), P(None, ("a", "b")), spec):
        assert eval(repr(value), {"P": P, "LayoutSpec": LayoutSpec, "torch": torch}) == value
        assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value


def test_placements_are_per_mesh_dim() -> None:
    from torch.distributed.tensor import Replicate, Shard

    assert P(None, "shard").to_placements(MESH) == (Replicate(), Shard(1))
    assert P(("replicate", "shard")).to_placements(MESH) == (Shard(0), Shard(0))


def test_p_and_specs_are_leaves_of_a_tree() -> None:
    tree = {"a": [P("x"), LayoutSpec()], "b": None}
    assert fs.tree.flatten(tree, constants=True)[0] == [P("x"), LayoutSpec(), None]
    assert fs.tree.flatten(tree)[0] == [P("x"), LayoutSpec()]


@pytest.mark.parametrize("parts", [(1,), ("",), (("a", 2),), (3.5,)])
def test_what_is_no_axis_is_refused(parts: tuple[Any, ...]) -> None:
    with raises(SpecError, leaves=f"P{parts!r}", fix="P('shard')"):
        P(*parts)


def test_an_axis_splits_one_dim() -> None:
    with raises(SpecError, leaves="P('a', ('b', 'a'))", says="twice"):
        P("a", ("b", "a"))


# ------------------------------------------------------------------ LayoutSpec


def test_defaults_follow_the_leaf_and_the_storage() -> None:
    spec = resolve(P("shard"), compute_dtype=torch.bfloat16)
    assert (spec.gradient, spec.optimizer, spec.shape, spec.unit) == (P("shard"), P("shard"), (8, 8), "unit")
    assert (spec.storage_dtype, spec.compute_dtype) == (torch.float32, torch.bfloat16)
    assert (spec.reduce_dtype, spec.optimizer_dtype) == (torch.bfloat16, torch.float32)
    assert spec.trainable and spec.resolved and not LayoutSpec().resolved


@pytest.mark.parametrize(
    ("fields", "leaves", "says", "fix"),
    [
        ({"storage": "shard"}, "storage='shard'", ["P(...)", "a list", "str"], "storage=P('shard')"),
        ({"memory": "gpu"}, "memory='gpu'", ["'device'", "'host'", "'disk'"], ()),
        ({"compute_dtype": "bf17"}, "compute_dtype='bf17'", "torch.dtype", "compute_dtype=torch.bfloat16"),
    ],
)
def test_specs_are_checked_when_made(fields: dict[str, Any], leaves: str, says: Any, fix: Any) -> None:
    with raises(SpecError, leaves=leaves, fix=fix, says=says):
        LayoutSpec(**fields)


@pytest.mark.parametrize("wrap", [lambda x: x, OmegaConf.create])
def test_specs_and_rules_are_made_of_plain_data(wrap: Callable[[Any], Any]) -> None:
    rules = [["*norm*", {}], ["*", {"storage": [["tensor", "shard"], None], "compute": ["tensor"],
                                    "compute_dtype": "bf16", "reduce_dtype": "float32"}]]  # fmt: skip
    spec = LayoutSpec(
        P(("tensor", "shard")), P("tensor"), compute_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    expected = fs.match_specs(leaves(), [("*norm*", LayoutSpec()), ("*", spec)])
    assert fs.match_specs(leaves(), wrap(rules)) == expected
    with raises(SpecError, leaves=["LayoutSpec", "'storag'"], fix="storage (the nearest)"):
        fs.match_specs(leaves(), wrap([["*", {"storag": ["shard"]}]]))


def test_specs_are_frozen() -> None:
    with pytest.raises(AttributeError, match="cannot assign"):
        LayoutSpec().storage = P("shard")


@pytest.mark.parametrize(
    ("spec", "leaves", "fix"),
    [
        (resolve(P("model")), ["[8, 8]", "P('model')", "no axis 'model'", "replicate, shard"],
         ["the mesh's axes", "axis 'model'"]),
        (resolve(P("shrad")), ["P('shrad')"], "'shard'"),
        (resolve(P("shard", None, "replicate")), ["3 dims", "has 2"], "P()"),
        (resolve(P("shard"), (), torch.float32), ["1 dims", "has 0"], "P()"),
        (resolve(dtype=torch.int64, trainable=True), ["trainable=True", "torch.int64"], "trainable=False"),
        (resolve(SHARD, gradient=SHARD, optimizer=WHOLE), ["gradient=P('shard')", "optimizer=P()"],
         ["optimizer=gradient", "gradient=P()"]),
        (resolve(SHARD, gradient=WHOLE, optimizer=P("replicate")), ["optimizer=P('replicate')"],
         ["storage=optimizer", "storage=P()"]),
    ],
)  # fmt: skip
def test_specs_that_do_not_fit_are_refused_with_the_way_out(spec: LayoutSpec, leaves: Any, fix: Any) -> None:
    with raises(SpecError, leaves=["params['x']", *leaves], fix=fix):
        check_specs({"x": spec}, MESH)


def test_all_failing_leaves_are_named_at_once() -> None:
    specs = {
        "a": resolve(P("model")),
        "b": resolve(P("shard")),
        "c": resolve(P("shard", "replicate", "shard2")),
    }
    with raises(SpecError, leaves=["(replicate=2", "params['a']", "params['c']"], says="2 leaves"):
        check_specs(specs, MESH)


@pytest.mark.parametrize(
    ("spec", "leaves", "fix"),
    [
        (
            LayoutSpec(P(("shard", "tensor")), compute=P("tensor")),
            ["compute=P('tensor')", "storage="],
            "P(('tensor', 'shard'))",
        ),
        (LayoutSpec(P("shard"), compute=P(None, "tensor")), ["compute=P(None, 'tensor')"], "compute's axes"),
        (LayoutSpec(P(Fused("shard", 2))), ["storage=P(Fused"], ["Fused", "compute", "'shard'"]),
        (
            LayoutSpec(compute=P(Fused("tensor", 5))),
            ["dim 0", "5 matrices", "2 ranks"],
            ["pad", "compute=P()"],
        ),
        (
            LayoutSpec(P(("tensor", "shard")), gradient=SHARD, compute=P("tensor")),
            ["gradient=P"],
            "P(('tensor'",
        ),
        (LayoutSpec(P(("tensor", "shard")), compute=P("tensor")), ["8 ranks", "dim 0"], "another dim"),
        (LayoutSpec(P("tensor"), compute=P("tonsor")), ["'tonsor'"], "'tensor'"),
        (LayoutSpec(SHARD, compute=SHARD), ["'shard' is a data axis"], "make_mesh"),
        (LayoutSpec(compute=P(None, None, "tensor")), ["3 dims", "has 2"], "P()"),
    ],
)
def test_compute_is_major_and_divides(spec: LayoutSpec, leaves: Any, fix: Any) -> None:
    mesh = fs.make_mesh(shard=4, tensor=2, abstract=True)
    with raises(SpecError, leaves=["params['x']", *leaves], fix=fix):
        check_specs({"x": spec.resolve(torch.ones(12, 8), "x")}, mesh)


# ------------------------------------------------------------------ rules


def leaves() -> dict[str, Tensor]:
    return {"a.w": torch.zeros(4), "a.norm.w": torch.zeros(4), "b.w": torch.zeros(4)}


def test_the_first_match_wins() -> None:
    specs = fs.match_specs(
        leaves(), [("*norm*", LayoutSpec()), ("a.*", LayoutSpec(P("shard"))), ("*", LayoutSpec())]
    )
    assert [s.storage for s in specs.values()] == [P("shard"), P(), P()]


def test_a_rule_that_nothing_uses_is_refused() -> None:
    with raises(
        SpecError,
        leaves=["'c.*'", "nearest: 'b.w', 'a.w'", "rule 'b.w'", "rule '*' before it takes 'b.w'"],
        fix=["narrower", "first"],
        says="2 rule(s)",
    ):
        fs.match_specs(leaves(), [("c.*", LayoutSpec()), ("*", LayoutSpec()), ("b.w", LayoutSpec())])


def test_leaves_that_no_rule_covers_are_refused() -> None:
    with raises(
        SpecError,
        leaves=["params['a.norm.w'] [4]", "params['b.w']"],
        fix='("*", LayoutSpec(P()))',
        says="2 leaves of 3",
    ):
        fs.match_specs(leaves(), [("a.w", LayoutSpec())])


@pytest.mark.parametrize("rules", [{"*": LayoutSpec()}, [("*", P())], ["*"], [(0, LayoutSpec())], "*", None])
def test_what_is_no_list_of_rules_is_refused(rules: Any) -> None:
    given = f"these are {type(rules).__name__}"
    with raises(SpecError, leaves=given, fix='("*", LayoutSpec(', says="(glob, LayoutSpec)"):
        fs.match_specs(leaves(), rules)


@pytest.mark.parametrize("tree", [{"a": 1.0}, {"a": None}])
def test_what_is_no_tree_of_tensors_is_refused(tree: Any) -> None:
    with raises(SpecError, leaves="parameter tree", fix="tree of tensors"):
        fs.match_specs(tree, [("*", LayoutSpec())])


def test_buffers_take_a_rule_only_if_it_says_so() -> None:
    params = {"w": torch.zeros(8), "b": nn.Buffer(torch.zeros(8)), "n": torch.zeros(8, dtype=torch.int32)}
    half = LayoutSpec(P("shard"), compute_dtype=torch.bfloat16)
    specs = fs.match_specs(params, [("*", half)])
    assert [s.storage for s in specs.values()] == [P("shard"), P(), P()]
    assert [s.compute_dtype for s in specs.values()] == [torch.bfloat16, torch.float32, torch.int32]
    wide = fs.match_specs(params, [("b", LayoutSpec(P("shard"), buffers=True)), ("*", half)])
    assert wide["b"].storage == P("shard") and not wide["b"].trainable


# ------------------------------------------------------------------ tied weights


def tied() -> dict[str, Tensor]:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8)})
    model["head"].weight = model["embed"].weight
    return fs.make_functional(model)[1]


def test_a_rule_for_another_name_of_a_tied_weight_says_where_it_is_stored() -> None:
    rules = [("embed.*", LayoutSpec(P("shard"))), ("head.weight", LayoutSpec()), ("*", LayoutSpec())]
    with raises(
        SpecError,
        leaves=["params['embed.weight'] takes rule 'embed.*'", "'head.weight' takes rule 'head.weight'"],
        fix=["first of its names", "one rule"],
        says="1 leaf",
    ):
        fs.match_specs(tied(), rules)


def test_a_glob_that_takes_another_name_of_a_tied_weight_may_not_differ() -> None:
    with raises(SpecError, leaves="'head.weight' takes rule 'head*'", fix="one rule"):
        fs.match_specs(tied(), [("head*", LayoutSpec()), ("*", LayoutSpec(P("shard")))])


def test_equal_rules_on_a_tied_weight_are_fine_and_used() -> None:
    rules = [
        ("head.weight", LayoutSpec(P("shard"))),
        ("embed.*", LayoutSpec(P("shard"))),
        ("*", LayoutSpec()),
    ]
    specs = fs.match_specs(tied(), rules)
    assert list(specs) == ["embed.weight", "head.bias"]
    assert specs["embed.weight"].storage == P("shard")


# ------------------------------------------------------------------ blocks


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 5)),
    where=st.permutations(["a", "b", None]),
    both=st.booleans(),
)
def test_blocks_tile_the_leaf(
    shape: tuple[int, ...], sizes: tuple[int, int], where: list[Any], both: bool
) -> None:
    """Every element lies in exactly one block of each replica group, and all blocks fit."""
    mesh = fs.make_mesh(a=sizes[0], b=sizes[1], abstract=True)
    layout = P(("a", "b")) if both else P(*where[: len(shape)])
    kept = torch.zeros(shape, dtype=torch.int64)
    block = block_shape(shape, layout, mesh)
    for rank in range(mesh.size):
        slices = block_slices(shape, layout, mesh, mesh.coordinate(rank))
        assert all(0 <= s.stop - s.start <= b for s, b in zip(slices, block, strict=True))
        kept[slices] += 1
    assert (kept == mesh.size // mesh.axes_size(layout.axes)).all()


@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.integers(1, 7), max_size=3).map(tuple),
    ranks=st.integers(1, 5),
    preset=st.sampled_from(list(fs.presets.PRESETS)),
)
def test_shard_and_unshard_are_inverse(shape: tuple[int, ...], ranks: int, preset: str) -> None:
    mesh = fs.make_mesh(shard=ranks, simulated=True)
    params = {"w": torch.randn(shape), "n": torch.arange(3), "h": torch.randn(shape).bfloat16()}
    specs = fs.presets.PRESETS[preset](params, mesh)
    back = fs.simulate(mesh, lambda rank: fs.unshard(fs.shard(params, specs, mesh), specs, mesh))
    for tree in back:
        assert all(torch.equal(tree[p], params[p]) and tree[p].dtype == params[p].dtype for p in params)


@pytest.mark.parametrize("make", [*fs.presets.PRESETS, "LayoutSpec", "plain data"])
def test_an_option_that_there_is_not_is_named_with_the_nearest(make):
    params, mesh = {"w": torch.ones(4, 2)}, fs.make_mesh(shard=2, abstract=True)
    calls = {
        "LayoutSpec": lambda **given: LayoutSpec(P("shard"), **given),
        "plain data": lambda **given: fs.match_specs(params, [["*", given]]),
    }
    call = calls.get(make) or (lambda **given: fs.presets.PRESETS[make](params, mesh, **given))
    for name, nearest in {"computedtype": "compute_dtype", "optimizer_mem": "optimizer_memory"}.items():
        with raises(SpecError, leaves=repr(name), fix=f"{nearest} (the nearest)"):
            call(**{name: torch.bfloat16})
    if make in fs.presets.PRESETS:
        with raises(SpecError, leaves="'tensors'", fix="tensor (the nearest)"):
            call(tensors="tensor")


def test_specs_are_copied_and_pickled_as_ever():
    spec = LayoutSpec(P("shard"), compute_dtype=torch.bfloat16)
    for again in (pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec), dataclasses.replace(spec)):
        assert again == spec


# ------------------------------------------------------------------ chunks of a pipeline


def test_a_chunk_is_of_one_stage_and_all_of_every() -> None:
    mesh = fs.make_mesh(pipeline=2, shard=2, abstract=True)
    assert (mesh.stages, MESH.stages, mesh.data_axes) == (2, 1, ("shard",))
    assert [mesh.stage_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [mesh.partner(1, rank) for rank in range(4)] == [2, 3, 2, 3]
    assert [stage_of(LayoutSpec(chunk=c), mesh) for c in (0, 1, 2, "all")] == [0, 1, 0, None]
    assert [is_here(resolve(chunk=3), mesh, rank) for rank in range(4)] == [False, False, True, True]
    assert is_here(LayoutSpec(chunk=3), MESH, 5) and is_here(LayoutSpec(), mesh, 3)


@pytest.mark.parametrize("chunk", [-1, True, 1.0, "first"])
def test_what_is_no_chunk_is_refused(chunk: Any) -> None:
    with raises(SpecError, leaves=f"chunk={chunk!r}", says=["from 0", '"all"']):
        LayoutSpec(chunk=chunk)


def test_the_pipeline_axis_splits_neither_leaves_nor_rows() -> None:
    mesh = fs.make_mesh(pipeline=2, shard=2, abstract=True)
    specs = {
        "a": resolve(P("pipeline")),
        "b": resolve(SHARD, optimizer=P(None, "pipeline")),
        "c": resolve(),
    }
    with pytest.raises(SpecError) as error:
        check_specs(specs, mesh)
    assert "params['a']" in str(error.value) and "params['b']" in str(error.value)
    assert "params['c']" not in str(error.value) and "chunk" in str(error.value)
    with raises(SpecError, leaves=["data_axes", "'pipeline'"], fix=["leave it out", "'replicate'"]):
        fs.make_mesh(pipeline=2, data_axes="pipeline", abstract=True)
