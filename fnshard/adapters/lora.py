"""LoRA: low-rank adapters for frozen weights, as a rewrite of what `fn` computes (Hu et al. 2021).

Wherever `fn` multiplies by a targeted leaf W, x Wᵀ becomes x Wᵀ + s (x Aᵀ) Bᵀ. The operator is changed, not a
module, so that `fn` may be any pure function. The merged weight is never formed, and W, which is frozen, has
no gradient.
W may be coded (`LayoutSpec(codec="nf4")`: QLoRA, Dettmers et al. 2023).
"""

from __future__ import annotations

import fnmatch
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fnshard import tree
from fnshard.compiler.frontend.decompositions import GROUPED
from fnshard.errors import SpecError, TraceError, counts, is_number, leaves, misfits, nearest
from fnshard.layout.rules import check_tree
from fnshard.layout.spec import is_buffer

__all__ = ["lora"]


@dataclass(frozen=True)
class Lora:
    """The settings by which adapters are made and applied.

    Args:
        rank: the rank of A and B.
        alpha: the update is multiplied by alpha / rank, or by alpha / sqrt(rank) where `rank_stabilised`
            (rsLoRA, Kalajdzievski 2023).
        targets: the paths of the leaves that have an adapter.
        transposed: the targets that are [in, out], as GPT-2's are: `fn` multiplies by them as they are.
        dropout: the share of the adapters' input that is dropped.
        dora: scale each row of W + s B A to the norm that the row had in W, times a number that trains and
            starts at 1 (DoRA, Liu et al. 2024; there the product of the two trains).
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    transposed: tuple[str, ...] = ()
    dropout: float = 0.0
    rank_stabilised: bool = False
    dora: bool = False

    @property
    def scale(self) -> float:
        """The factor s, by which the update is multiplied."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the tensors that PEFT's files have for each target."""
        return ("a", "b", "magnitude") if self.dora else ("a", "b")


def lora(
    fn: Callable[..., Any],
    params: Any,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    targets: str | Sequence[str] = "*.q_proj|*.v_proj",
    transposed: str = "",
    dropout: float = 0.0,
    rank_stabilised: bool = False,
    dora: bool = False,
    train: str = "",
    seed: int = 0,
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Add adapters to `fn`: return the new function and the tree of parameters that it takes.

    The tree is `{"base": params, "adapters": {path: {"a", "b"}}}`, with `{"a", "b", "g"}` where `dora`. The
    base is frozen.

    Args:
        fn: a pure function of (params, *batch).
        params: its tree of full leaves, which may be on meta. The adapters are real tensors: A is uniform and
            B zero, so that the new function computes at first what `fn` does.
        rank, alpha, dropout, rank_stabilised, dora: see `Lora`; the returned function has it as `.lora`.
        targets: globs of leaves, with or without ".weight", joined by "|", or a list of them.
        transposed: globs of those among them that are [in, out].
        train: globs of base leaves that train, too ("*norm*|lm_head*").
        seed: the seed of A.

    Raises:
        SpecError: a number is out of range, a glob matches nothing, or a leaf is not a matrix (or a stack of
            matrices, one for each expert) or is smaller than the rank.
        TraceError: (when the new function is called) `fn` does not multiply by a target.

    >>> fn = lambda p, x: F.linear(x, p["w"]).sum()
    >>> tuned, params = lora(fn, {"w": torch.ones(4, 3)}, rank=2, targets="w")
    >>> [list(params["adapters"]["w"][n].shape) for n in "ab"], tuned(params, torch.ones(1, 3)).item()
    ([[2, 3], [4, 2]], 12.0)
    """
    named, structure = tree.flatten_with_paths(params)
    check_tree(named)
    trained = match_leaves("train", train, named) if train else []
    settings = settings_of(
        named, rank=rank, alpha=alpha, targets=targets, transposed=transposed, dropout=dropout,
        rank_stabilised=rank_stabilised, dora=dora, trained=trained,
    )  # fmt: skip

    # The base is frozen, but for leaves that `train` names. Buffers and integers are left as they are.
    base: list[Tensor] = []
    for path, leaf in named.items():
        kept = leaf
        if not is_buffer(leaf) and (leaf.is_floating_point() or leaf.is_complex()):
            kept = nn.Parameter(leaf.detach(), requires_grad=path in trained)
        elif hasattr(leaf, "tied_names"):  # an alias takes the new names; the leaf that was given has the old
            kept = nn.Buffer(leaf.detach()) if is_buffer(leaf) else leaf.detach()
            vars(kept).update(vars(leaf))
        if hasattr(leaf, "tied_names"):
            kept.tied_names = tuple(f"base.{name}" for name in leaf.tied_names)
        base.append(kept)

    tuned = with_adapters(fn, settings)
    return tuned, {"base": tree.unflatten(base, structure), "adapters": init_adapters(settings, named, seed)}


def settings_of(
    named: Mapping[str, Tensor], *, rank: int, alpha: float, targets: str | Sequence[str], transposed: str,
    dropout: float, rank_stabilised: bool, dora: bool, trained: Sequence[str] = (),
) -> Lora:  # fmt: skip
    """Return the settings that the arguments of `lora` mean, without making an adapter.

    Args:
        named: leaves by path, which may be on meta.
        trained: the paths of the leaves that train.

    Raises:
        SpecError: as in `lora`.
    """
    if wrong := misfits({"rank": rank, "alpha": alpha, "dropout": dropout}, _EXPECTED):
        raise SpecError("no such adapters:", wrong)
    target_paths = match_leaves("targets", targets, named)
    transposed_paths = match_leaves("transposed", transposed, target_paths) if transposed else []
    problems = [_explain_misfit(p, named[p], rank, p in trained, dora) for p in target_paths]
    wrong = [problem for problem in problems if problem is not None]
    if wrong:
        fix = f"name matrices that are frozen and at least {rank} both ways, or take a smaller rank."
        raise SpecError(f"{leaves(len(wrong))} cannot have an adapter:", wrong, fix)
    return Lora(
        rank, float(alpha), tuple(target_paths), tuple(transposed_paths), dropout, rank_stabilised, dora
    )


_EXPECTED = {
    "rank": counts(1),
    "alpha": (lambda v: is_number(v) and v > 0, "a number above 0"),
    "dropout": (lambda v: is_number(v) and 0 <= v < 1, "a share from 0, below 1"),
}


def _explain_misfit(path: str, leaf: Tensor, rank: int, trains: bool, dora: bool) -> str | None:
    """Return why a leaf cannot have an adapter; None if it can."""
    name = f"params[{path!r}] {list(leaf.shape)}"
    if trains:
        return f"{name} trains and has an adapter"
    if leaf.dim() not in (2, 3) or not leaf.is_floating_point():
        return f"{name} {leaf.dtype} is no matrix of floats"
    if leaf.dim() == 3 and dora:
        return f"{name} is a matrix of each expert, and dora is for one"
    shorter = min(leaf.shape[-2:])
    if rank > shorter:
        return f"{name}: rank={rank} is more than {shorter}"
    return None


def match_leaves(
    what: str, globs: str | Sequence[str], paths: Mapping[str, Any] | Sequence[str]
) -> list[str]:
    """Return the paths that one of the globs matches, with or without ".weight".

    Args:
        what: the argument that the globs came from, for the error.

    Raises:
        SpecError: a glob matches nothing, or `globs` is not globs.
    """
    if isinstance(globs, list | tuple) and all(isinstance(each, str) for each in globs):
        globs = "|".join(globs)
    if not isinstance(globs, str):
        raise SpecError(f"{what}={globs!r}: globs of leaves, joined by '|', or a list of them.")
    matches: dict[str, set[str]] = {pattern: set() for pattern in globs.split("|")}
    for path in paths:
        for pattern, matched in matches.items():
            if any(fnmatch.fnmatchcase(n, pattern) for n in (path, path.removesuffix(".weight"))):
                matched.add(path)

    unused = [f"{pattern!r}{nearest(pattern, paths)}" for pattern, matched in matches.items() if not matched]
    if unused:
        raise SpecError(f"{what}={globs!r} matches no leaf by:", unused, "globs of the leaves' paths.")
    matched = set().union(*matches.values())
    return [path for path in paths if path in matched]


def init_adapters(
    settings: Lora, shapes: Mapping[str, Tensor], seed: int = 0
) -> dict[str, dict[str, Tensor]]:
    """Return new adapters: A as `nn.Linear` would initialise it, B zero; the same on every rank."""
    out = {}
    for number, path in enumerate(settings.targets):
        leaf = shapes[path]
        *experts, rows, columns = leaf.mT.shape if path in settings.transposed else leaf.shape
        # Adapters of weights in short dtypes train in fp32.
        dtype = leaf.dtype if leaf.dtype.itemsize > 2 else torch.float32
        # The generator is seeded by the target's number, so that A is the same on every rank.
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        bound = 1 / math.sqrt(columns)
        a = torch.empty(*experts, settings.rank, columns, dtype=dtype)
        a.uniform_(-bound, bound, generator=generator)
        b = torch.zeros(*experts, rows, settings.rank, dtype=dtype)
        out[path] = {"a": nn.Parameter(a), "b": nn.Parameter(b)}
        if settings.dora:
            out[path]["g"] = nn.Parameter(torch.ones(rows, dtype=dtype))
        for part in out[path].values():
            part.adapts = f"base.{path}"  # `find_units` puts it in the unit of that leaf
    return out


def with_adapters(fn: Callable[..., Any], settings: Lora) -> Callable[..., Any]:
    """Return `fn` as a function of `{"base": ..., "adapters": ...}`.

    Its `.lora` holds the settings; its `.eval` is the same function without dropout.
    """

    @functools.wraps(fn)
    def run_adapted(params: Any, *batch: Any, **keywords: Any) -> Any:
        named = tree.flatten_with_paths(params["base"])[0]
        targets = {id(named[path]): path for path in settings.targets}
        mode = _AdapterMode(settings, params["adapters"], targets)
        with mode:
            result = fn(params["base"], *batch, **keywords)
        _check_uses(settings, mode)
        return result

    run_adapted.lora = settings
    run_adapted.eval = with_adapters(fn, replace(settings, dropout=0.0)) if settings.dropout else run_adapted
    return run_adapted


def _check_uses(settings: Lora, mode: _AdapterMode) -> None:
    """Refuse targets that `fn` does not multiply by, or also uses otherwise, which merging would change."""
    wrong = [f"params[{p!r}]: `fn` multiplies by it nowhere" for p in settings.targets if p not in mode.used]
    wrong += [f"params[{p!r}]: `fn` also gives it to {', '.join(n)}" for p, n in mode.other_uses.items()]
    if wrong:
        raise TraceError(
            f"{leaves(len(wrong))} cannot have an adapter:",
            wrong,
            "an adapter goes with F.linear(x, w), or with x @ w and addmm if the leaf is in transposed=, and "
            "of experts with F.grouped_mm(x, w.mT, offs=), of the leaf itself: say its dtype by "
            "compute_dtype= rather than cast it in `fn`; leave out others, such as a head that is tied to "
            "the embedding.",
        )


class _AdapterMode(TorchFunctionMode):
    """A mode that adds an adapter's update to each product with a target.

    A target is known by its `id`, and so is a transpose of it that `fn` makes.
    """

    def __init__(self, settings: Lora, adapters: Mapping[str, Any], targets: Mapping[int, str]):
        super().__init__()
        self.settings, self.adapters, self.targets = settings, adapters, dict(targets)
        # Transposes of targets by id, and whether they are the other way round (one of a transpose is not).
        # They are kept alive, so that no other tensor gets the same id.
        self.transposes: dict[int, tuple[Tensor, bool]] = {}
        self.used: set[str] = set()
        self.other_uses: dict[str, dict[str, None]] = {}  # for each target, the names of other functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not any(isinstance(o, Tensor) for o in tree.flatten(out)[0]):  # a shape, a dtype
            return out

        # A transpose of a target is known as that target from here on.
        if func in _TRANSPOSES and id(args[0]) in self.targets and {*args[1:]} in ({-2, -1}, {1, 2}, set()):
            _, was_transposed = self.transposes.get(id(args[0]), (None, False))
            self.transposes[id(out)] = out, not was_transposed
            self.targets[id(out)] = self.targets[id(args[0])]
            return out

        # Find the target that the function multiplies by, if there is one.
        product = _PRODUCTS.get(func)
        arguments, path = {}, None
        if product is not None and len(args) <= len(product.names):
            arguments = dict(zip(product.names, args, strict=False)) | kwargs
            matrix = arguments.get(product.matrix)
            path = self.targets.get(id(matrix))

        # Any use but as the matrix of a product, the right way round, is noted as another one.
        if path is not None:
            _, is_transposed = self.transposes.get(id(matrix), (None, False))
            is_in_out = product.takes_in_out != is_transposed
            fits = is_in_out == (path in self.settings.transposed)
            fits = fits and (matrix.dim() == 3) == (func in GROUPED) and not arguments.keys() & _UNLIKE
        if path is None or not fits:
            self._note_other_use(func, (args, kwargs))
            return out

        # Add the update; DoRA scales the rows of W + s B A, of which a bias is no part.
        self._note_other_use(func, {k: v for k, v in arguments.items() if k != product.matrix})
        self.used.add(path)
        x = arguments[product.x]
        update = self._compute_update(x, self.adapters[path], arguments.get("offs")).to(out.dtype)
        if not self.settings.dora:
            return out + update
        scale = row_scale(matrix, self.adapters[path], self.settings, product.takes_in_out).to(out.dtype)
        scaled = (out + update) * scale
        bias = arguments.get(product.bias)
        # `out` has the bias in it. Where the scale is 1, as at first, this adds exactly 0.
        return scaled if bias is None else scaled + bias.to(out.dtype) * (1 - scale)

    def _note_other_use(self, func: Any, arguments: Any) -> None:
        """Note that a function is given targets, in whatever containers, which it does not multiply by."""
        for leaf in tree.flatten(arguments)[0]:
            path = self.targets.get(id(leaf))
            if path is not None:
                self.other_uses.setdefault(path, {})[getattr(func, "__name__", str(func))] = None

    def _compute_update(self, x: Tensor, adapter: Mapping[str, Tensor], ends: Tensor | None) -> Tensor:
        """Return s (x Aᵀ) Bᵀ; for stacks of experts, `ends` has the row at which each expert's rows end."""
        a, b = adapter["a"].to(x.dtype), adapter["b"].to(x.dtype)
        if self.settings.dropout:
            x = F.dropout(x, self.settings.dropout, training=True)
        if ends is not None:
            inner = F.grouped_mm(x, a.mT, offs=ends)
            return F.grouped_mm(inner, b.mT, offs=ends) * self.settings.scale
        return F.linear(F.linear(x, a), b) * self.settings.scale


def row_scale(weight: Tensor, adapter: Mapping[str, Tensor], settings: Lora, transposed: bool) -> Tensor:
    """Return what DoRA multiplies each row of W + s B A by, [rows].

    The norms have no gradient, as in the paper.

    Args:
        weight: W, or Wᵀ where `transposed`.
    """
    with torch.no_grad():
        wide = torch.promote_types(weight.dtype, torch.float32)
        weight = (weight.t() if transposed else weight).to(wide)
        update = settings.scale * (adapter["b"].to(wide) @ adapter["a"].to(wide))
        new_norms = (weight + update).norm(dim=1)
        ratios = weight.norm(dim=1) / new_norms.clamp_min(torch.finfo(wide).tiny)  # rows of 0 stay 0
    return adapter["g"].to(wide) * ratios


class _Product(NamedTuple):
    """A function that multiplies by a matrix.

    Args:
        names: its arguments, in order. Of a call with more of them by position, nothing is known.
        takes_in_out: whether it takes the matrix as [in, out].
        x, matrix, bias: which argument is which.
    """

    names: tuple[str, ...]
    takes_in_out: bool
    x: str
    matrix: str
    bias: str = "bias"


_LINEAR = _Product(("input", "weight", "bias"), False, "input", "weight")
_MATMUL = _Product(("input", "other"), True, "input", "other")
_MM = _Product(("input", "mat2"), True, "input", "mat2")
_PRODUCTS: Mapping[Any, _Product] = {
    F.linear: _LINEAR,
    torch.ops.aten.linear: _LINEAR,
    torch.matmul: _MATMUL,
    Tensor.matmul: _MATMUL,
    Tensor.__matmul__: _MATMUL,
    torch.mm: _MM,
    Tensor.mm: _MM,
    torch.addmm: _Product(("input", "mat1", "mat2"), True, "mat1", "mat2", bias="input"),
    **dict.fromkeys(
        GROUPED, _Product(("mat_a", "mat_b", "offs", "bias", "out_dtype"), True, "mat_a", "mat_b")
    ),
}
_TRANSPOSES = (Tensor.transpose, torch.transpose, Tensor.mT.__get__)
_UNLIKE = {"alpha", "beta", "out"}  # arguments that change a product in ways that the update would not follow
