"""Rules: globs on paths give every leaf a spec. An unused rule, or a leaf without one, is an error."""

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
    """Make a spec tree for `params`: each leaf takes the first rule whose glob matches its path.

    The leaves that `make_functional` gives know whether they are an `nn.Parameter`, a buffer, or tied. Making
    them anew (`{k: v.to(...)}`) loses that: cast the module beforehand, or give a `compute_dtype`.

    Buffers and non-float leaves are replicated and keep their dtype, unless the rule has `buffers=True`; the
    rule's `aggregation` holds for them in any case.

    Args:
        params: a pytree of real, meta or fake tensors, full shapes.
        rules: pairs `(glob, LayoutSpec)`, where the glob is matched by `fnmatch` with paths such as
            "layers.0.attn.wq.weight". Plain data will do: `[["*norm*", {}], ["*", {"storage": ["shard"]}]]`.
        units: a unit policy, see `fnshard.units`; by default, units are the numeric parts of paths.

    Raises:
        SpecError: a rule matches no leaf, no rule covers a leaf, or rules differ on the names of one tied
            weight.

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
    """Make a spec tree as `match_specs` does, from parameters and rules that were checked.

    Args:
        unit_of: the unit of each leaf, by path.
        chunk_of: the chunk of each leaf whose rule names none, by path; leaves that are missing belong to all
            stages.
    """
    named, structure = tree.flatten_with_paths(params)
    tied = tied_names(named)
    used = _find_tied_hits(tied, rules)
    uncovered: list[str] = []
    specs: list[LayoutSpec] = []

    for path, leaf in named.items():
        hit = find_rule(path, rules)
        if hit is None:
            uncovered.append(f"params[{path!r}] {list(leaf.shape)} {leaf.dtype}")
            continue
        used.add(hit)
        spec = rules[hit][1]
        is_float = leaf.dtype.is_floating_point or leaf.dtype.is_complex
        if not spec.buffers and (is_buffer(leaf) or not is_float):
            # Such a leaf is replicated in its own dtype, and takes few of the rule's fields.
            spec = LayoutSpec(
                unit=spec.unit,
                trainable=False,
                reshard=spec.reshard,
                aggregation=spec.aggregation,
                chunk=spec.chunk,
            )
        specs.append(spec.resolve(leaf, unit_of[path], chunk_of.get(path, "all")))

    # An unused rule has a typo, comes after a wider one, or names a tied weight by another of its names.
    unused = [_explain_unused(i, rules, named, tied) for i in range(len(rules)) if i not in used]
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
        SpecError: the policy is not a function that returns a dict, or it names no unit for a leaf.
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
    """Refuse what is often passed in place of a parameter tree: a module, `model.parameters()`, a state.

    Raises:
        SpecError: it is one of these; the error says how to get a tree from it.
    """
    wrong = next((v for v in named.values() if isinstance(v, nn.Module | Iterator)), None)
    if wrong is None and not isinstance(named.get("value"), Tensor):
        wrong = named.get("value")  # the path that a single leaf has
    if wrong is not None:
        if isinstance(wrong, Iterator):
            kind = "an iterator"
        elif isinstance(wrong, nn.Module):
            kind = f"the module {type(wrong).__name__}"
        else:
            kind = f"a {type(wrong).__name__}"
        raise SpecError(
            f"the parameters are a tree of tensors, not {kind}.",
            fix="apply, params = fs.make_functional(model): params is {path: tensor}, and "
            "apply(params, *inputs) the module's forward; of a TrainState, state.params.",
        )


def check_rules(rules: Any) -> list[Rule]:
    """Return the rules, which may be given as plain data (lists and dicts of a configuration).

    Raises:
        SpecError: this is not a list of pairs of a glob and a spec.
    """
    is_list = isinstance(rules, Sequence) and not isinstance(rules, str)
    pairs = [r for r in rules if isinstance(r, Sequence) and len(r) == 2] if is_list else []
    checked = [(glob, from_plain(spec)) for glob, spec in pairs]
    are_rules = all(isinstance(glob, str) and is_spec(spec) for glob, spec in checked)
    if not is_list or len(checked) != len(rules) or not are_rules:
        raise SpecError(
            "rules are a list of (glob, LayoutSpec) pairs, in the order they are tried; a P goes into a "
            f"LayoutSpec; these are {type(rules).__name__} {str(rules)[:80]}.",
            fix='[("*norm*", LayoutSpec()), ("*", LayoutSpec(P("shard")))].',
        )
    return checked


def tied_names(named: Mapping[str, Tensor]) -> dict[str, str]:
    """Return `{other name: the path it is stored under}` of the weights that `make_functional` found tied."""
    return {other: path for path, leaf in named.items() for other in getattr(leaf, "tied_names", ())}


def find_rule(path: str, rules: Sequence[Rule]) -> int | None:
    """Return the index of the first rule whose glob matches a path, or None."""
    return next((i for i, (glob, _) in enumerate(rules) if fnmatch.fnmatchcase(path, glob)), None)


def _find_tied_hits(tied: Mapping[str, str], rules: Sequence[Rule]) -> set[int]:
    """Return the rules that a tied weight takes by another of its names.

    Raises:
        SpecError: such a rule differs from the rule that the weight's path takes.
    """
    # Every name must lead to the same spec, though perhaps by different rules.
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


def _explain_unused(
    index: int, rules: Sequence[Rule], named: Mapping[str, Any], tied: Mapping[str, str]
) -> str:
    """Say why no leaf takes a rule: an earlier one takes them, it names a tied weight, or nothing matches."""
    glob = rules[index][0]
    path = next((p for p in named if fnmatch.fnmatchcase(p, glob)), None)
    if path is not None:
        earlier = rules[find_rule(path, rules)][0]
        return f"rule {glob!r}: rule {earlier!r} before it takes {path!r}"
    other = next((o for o in tied if fnmatch.fnmatchcase(o, glob)), None)
    if other is not None:
        return f"rule {glob!r}: {other!r} is tied and stored as {tied[other]!r}"
    return f"rule {glob!r} matches no leaf{nearest(glob, named)}"


def check_params(named: Mapping[str, Any]) -> None:
    """Refuse a tree with leaves that no layout fits.

    Raises:
        SpecError: leaves are not tensors, or tensors without plain numbers (`tree.unusual`); it names them.
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
