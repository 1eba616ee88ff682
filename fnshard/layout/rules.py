"""Rules: globs on paths give every leaf a spec. An unused rule, or a leaf without a rule, is an error."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fnshard import tree
from fnshard.errors import SpecError, leaves, nearest
from fnshard.layout.spec import LayoutSpec, from_plain, is_buffer, is_spec
from fnshard.layout.units import numeric

__all__ = ["match_specs"]

Rule = tuple[str, LayoutSpec]


def match_specs(
    params: Any, rules: Sequence[Rule], *, units: Callable[[Any], Mapping[str, str]] | None = None
) -> Any:
    """A spec tree for `params`: for each leaf the first rule whose glob matches its path.

    What is an `nn.Parameter`, a buffer or tied is read off the leaves that `make_functional` gives. Making
    them anew (`{k: v.to(...)}`) loses that: cast the module beforehand, or say `compute_dtype`.

    Buffers and non-float leaves are replicated and keep their dtype unless the rule says
    `buffers=True`; `aggregation` is theirs in any case. `units`: a policy of `fnshard.units` (default: by
    numeric path part).

    Args:
        params: pytree of real, meta or fake tensors, full shapes.
        rules: `(glob, LayoutSpec)`, `fnmatch` on paths such as "layers.0.attn.wq.weight". Plain data will do:
            `[["*norm*", {}], ["*", {"storage": ["shard"]}]]`.

    Raises:
        SpecError: a rule that matches no leaf, a leaf that no rule covers, rules that differ on the
            names of one tied weight.

    >>> import torch
    >>> from fnshard.layout.spec import P
    >>> specs = match_specs({"w": torch.zeros(4, 2)}, [("*", LayoutSpec(P("shard")))])
    >>> specs["w"].storage, specs["w"].shape
    (P('shard'), (4, 2))
    """
    named, _ = tree.flatten_with_paths(params)
    check_params(named)
    return apply_rules(params, check_rules(rules), find_units(units or numeric, params, named))


def apply_rules(
    params: Any, rules: Sequence[Rule], unit_of: Mapping[str, str], chunk_of: Mapping[str, int] = {}
) -> Any:
    """`match_specs`, of parameters and rules that were checked.

    Args:
        unit_of: by path.
        chunk_of: by path, the chunk of a leaf whose rule names none; leaves that are missing are of all
            stages.
    """
    named, structure = tree.flatten_with_paths(params)
    tied = tied_names(named)
    used = _tied_hits(tied, rules)
    uncovered: list[str] = []
    specs: list[LayoutSpec] = []
    for path, leaf in named.items():
        hit = find_rule(path, rules)
        if hit is None:
            uncovered.append(f"params[{path!r}] {list(leaf.shape)} {leaf.dtype}")
            continue
        used.add(hit)
        spec = _apply_rule(rules[hit][1], leaf)
        specs.append(spec.resolve(leaf, unit_of[path], chunk_of.get(path, "all")))
    unused = [_unused(i, rules, named, tied) for i in range(len(rules)) if i not in used]
    if uncovered:
        raise SpecError(
            f"{leaves(len(uncovered))} of {len(named)} matched by no rule:",
            uncovered,
            'add a rule for them; a last rule ("*", LayoutSpec(P())) replicates the rest.',
        )
    if unused:
        raise SpecError(
            f"{len(unused)} rule(s) match no leaf (or only leaves an earlier rule took):",
            unused,
            "put the narrower rule first, mend or delete it.",
        )
    return tree.unflatten(specs, structure)


def find_units(policy: Any, params: Any, named: Mapping[str, Tensor]) -> Mapping[str, str]:
    """Return the unit of each leaf, as a unit policy says.

    Raises:
        SpecError: the policy is none, or names no unit for a leaf.
    """
    fix = "see fnshard.units, or units=lambda params: {path: unit name, for every leaf}."
    if not callable(policy):
        raise SpecError(f"units is a function from the parameter tree, not {type(policy).__name__}.", fix=fix)
    unit_of = policy(params)
    if not isinstance(unit_of, Mapping):
        raise SpecError(f"units returned {type(unit_of).__name__}, not a dict from paths to units.", fix=fix)
    wrong = [
        f"params[{path!r}] " + (f"is of unit {unit_of[path]!r}" if path in unit_of else "has none")
        for path in named
        if not isinstance(unit_of.get(path), str) or not unit_of[path]
    ]
    if wrong:
        raise SpecError(f"units gives {leaves(len(wrong))} no name of a unit:", wrong, fix)
    # An adapter is gathered with the leaf it belongs to.
    return {path: unit_of.get(getattr(leaf, "adapts", path), unit_of[path]) for path, leaf in named.items()}


def check_tree(named: Mapping[str, Any]) -> None:
    """Raise for what is often passed for a parameter tree: a module, `model.parameters()`, a state.

    Raises:
        SpecError: says what makes a tree of it.
    """
    alone = None if "value" not in named or isinstance(named["value"], Tensor) else named["value"]
    wrong = next((v for v in named.values() if isinstance(v, nn.Module | Iterator)), alone)
    if wrong is not None:
        article = "the module" if isinstance(wrong, nn.Module) else "a"
        kind = "an iterator" if isinstance(wrong, Iterator) else f"{article} {type(wrong).__name__}"
        raise SpecError(
            f"the parameters are a tree of tensors, not {kind}.",
            fix="apply, params = fs.make_functional(model): params is {path: tensor}, and "
            "apply(params, *inputs) the module's forward; of a TrainState, state.params.",
        )


def check_rules(rules: Any) -> list[Rule]:
    """Return the rules, which may be given as plain data (lists and dicts of a configuration).

    Raises:
        SpecError: something that is no list of such pairs.
    """
    listed = isinstance(rules, Sequence) and not isinstance(rules, str)
    pairs = [r for r in rules if isinstance(r, Sequence) and len(r) == 2] if listed else []
    out = [(glob, from_plain(spec)) for glob, spec in pairs]
    if not listed or len(out) != len(rules) or not all(isinstance(g, str) and is_spec(s) for g, s in out):
        raise SpecError(
            "rules are a list of (glob, LayoutSpec) pairs, in the order they are tried; a P goes into a "
            f"LayoutSpec; these are {type(rules).__name__} {str(rules)[:80]}.",
            fix='[("*norm*", LayoutSpec()), ("*", LayoutSpec(P("shard")))].',
        )
    return out


def tied_names(named: Mapping[str, Tensor]) -> dict[str, str]:
    """`{other name: the path it is stored under}` of the weights that `make_functional` found tied."""
    return {other: path for path, leaf in named.items() for other in getattr(leaf, "tied_names", ())}


def find_rule(path: str, rules: Sequence[Rule]) -> int | None:
    """Return the number of the rule that a path takes; None: it takes none."""
    return next((i for i, (glob, _) in enumerate(rules) if fnmatch.fnmatchcase(path, glob)), None)


def _tied_hits(tied: Mapping[str, str], rules: Sequence[Rule]) -> set[int]:
    """Rules that a tied weight takes by another of its names; they must say what its path's rule says."""
    hits = {name: i for name in (*tied, *tied.values()) if (i := find_rule(name, rules)) is not None}
    shown = {name: f"rule {rules[i][0]!r}" for name, i in hits.items()}
    differ = [
        f"params[{path!r}] takes {shown.get(path, 'no rule')}, its other name {other!r} takes {shown[other]}"
        for other, path in tied.items()
        if other in hits and (path not in hits or rules[hits[other]][1] != rules[hits[path]][1])
    ]
    if differ:
        raise SpecError(
            f"{leaves(len(differ))} tied under several names whose rules differ:",
            differ,
            "a tied weight is stored once, under the first of its names: give all names one rule.",
        )
    return {hits[other] for other in tied if other in hits}


def _unused(index: int, rules: Sequence[Rule], named: Mapping[str, Any], tied: Mapping[str, str]) -> str:
    """Why a rule has no leaf: an earlier rule takes them, a tied weight has another name, none matches."""
    glob = rules[index][0]
    path = next((p for p in named if fnmatch.fnmatchcase(p, glob)), None)
    if path is not None:
        earlier = rules[find_rule(path, rules)][0]
        return f"rule {glob!r}: rule {earlier!r} before it takes {path!r}"
    other = next((o for o in tied if fnmatch.fnmatchcase(o, glob)), None)
    if other is not None:
        return f"rule {glob!r}: {other!r} is tied and stored as {tied[other]!r}"
    return f"rule {glob!r} matches no leaf{nearest(glob, named)}"


def _apply_rule(spec: LayoutSpec, leaf: Tensor) -> LayoutSpec:
    floating = leaf.dtype.is_floating_point or leaf.dtype.is_complex
    if spec.buffers or (floating and not is_buffer(leaf)):
        return spec
    return LayoutSpec(
        unit=spec.unit, trainable=False, reshard=spec.reshard, aggregation=spec.aggregation, chunk=spec.chunk
    )


def check_params(named: Mapping[str, Any]) -> None:
    """Refuse what no layout is for.

    Raises:
        SpecError: names leaves that are no tensors, or such as have no plain numbers (`tree.unusual`).
    """
    check_tree(named)
    if not named:
        raise SpecError("the parameter tree has no leaves.", fix="pass a tree of tensors, as a dict.")
    wrong = {p: v for p, v in named.items() if not isinstance(v, Tensor)}
    if wrong:
        raise SpecError(
            f"{leaves(len(wrong))} of the parameter tree {'is' if len(wrong) == 1 else 'are'} no tensor:",
            [f"params[{p!r}] is {type(v).__name__}" for p, v in wrong.items()],
            f"{tree.how_to_register(wrong.values())}keep tensors, plain constants and functions "
            "in the tree; close over the rest.",
        )
    if odd := [f"params[{p!r}] is {kind}" for p, v in named.items() if (kind := tree.unusual(v))]:
        raise SpecError(f"{leaves(len(odd))} that no layout is for:", odd, tree.DENSE)
