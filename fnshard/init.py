"""Init: each rank makes only its own shards, and the numbers do not depend on the mesh."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fnshard import tree
from fnshard.codecs import Unfit
from fnshard.errors import StateError, report
from fnshard.functional import aliases, make_functional
from fnshard.mesh import Mesh
from fnshard.runtime.buckets import local_block
from fnshard.shards import compare_paths, shard, stored_at_rest
from fnshard.spec import LayoutSpec

InitFn = Callable[[str, Tensor], Any]
_RESETS = ("reset_parameters", "_reset_parameters")


def init_params(
    source: Any,
    specs: dict[str, LayoutSpec],
    structure: tree.TreeDef,
    mesh: Mesh,
    *,
    init: InitFn | None,
    seed: int,
    disk_dir: str | None = None,
) -> Any:
    """This rank's stored blocks, from one of three sources.

    Args:
        source: a full tree; or a meta (fake) tree with `init(path, leaf)`, which fills a full leaf in
            place; or an `nn.Module`, on meta (its modules' own reset) or not (its values).
        seed: random numbers are seeded by (seed, path), leaf by leaf or module by module.
        disk_dir: for leaves that rest on disk.

    Raises:
        StateError: a meta tree without `init`, or of other shapes than the specs'; modules that cannot
            reset what they own; a seed that is no int64.
    """
    check_seed(seed)
    if isinstance(source, nn.Module):
        leaves = make_functional(source)[1]
        if init is None and any(leaf.is_meta for leaf in leaves.values()):
            compare_paths(specs, leaves)
            return tree.unflatten(_from_module(source, specs, mesh, seed, disk_dir).values(), structure)
        source = leaves
    named = tree.flatten_with_paths(source)[0]
    compare_paths(specs, named)
    abstract = [p for p, leaf in named.items() if leaf.is_meta]
    if abstract and init is None:
        raise StateError(
            report(
                f"{len(abstract)} leaves are on the meta device and hold no values:",
                [f"params[{p!r}]" for p in abstract[:8]] + (["..."] if len(abstract) > 8 else []),
                "step.init(params, init=lambda path, leaf: ...), which fills a leaf in place; or "
                "step.init(module), which calls each module's reset_parameters.",
            )
        )
    if init is None:
        return shard(source, tree.unflatten(specs.values(), structure), mesh, disk_dir=disk_dir)
    if not abstract:
        raise StateError(
            report("init= was given, and no leaf is on the meta device to be filled.", fix="leave init= out.")
        )
    wrong = [
        f"params[{p!r}] {list(named[p].shape)}, its spec says {list(spec.shape)}"
        for p, spec in specs.items()
        if spec.shape is not None and tuple(named[p].shape) != spec.shape
    ]
    if wrong:
        raise StateError(
            report(f"{len(wrong)} leaves have not the shape of their spec:", wrong, "init from full leaves.")
        )
    return tree.unflatten(_from_function(named, specs, mesh, init, seed, disk_dir), structure)


def check_seed(seed: Any) -> None:
    """Refuse a seed that a state cannot hold.

    Raises:
        StateError: it is no int64.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(1 << 63) <= seed < 1 << 63:
        raise StateError(f"seed={seed!r}: an int that fits 64 bits with sign.")


def _from_function(
    named: dict[str, Tensor],
    specs: dict[str, LayoutSpec],
    mesh: Mesh,
    init: InitFn,
    seed: int,
    disk_dir: str | None,
) -> list[Tensor]:
    """Blocks of the leaves as they are, those on meta filled by `init`."""
    blocks, unset, unfit = [], [], Unfit()
    for path, spec in specs.items():
        full = named[path].detach()
        if full.is_meta:
            full = _sentinel(full, mesh).to(spec.storage_dtype)
            with torch.no_grad(), _seeded(seed, path, mesh):
                init(path, full)
            if _untouched(full):
                unset.append(f"params[{path!r}] {list(full.shape)}")
            else:
                unfit.look(path, spec, full)
        blocks.append(stored_at_rest(local_block(full, spec.storage, mesh), spec, mesh, disk_dir))
    if unset:
        raise StateError(
            report(
                f"init left {len(unset)} leaves unset, in whole or in part:",
                unset,
                "fill the leaf it is given in place, as leaf.normal_() does: what it returns is not read.",
            )
        )
    unfit.refuse()
    return blocks


_generator = threading.Lock()  # torch's default one belongs to all threads, simulated ranks among them


@contextmanager
def _seeded(seed: int, path: str, mesh: Mesh) -> Iterator[None]:
    """Torch's generators seeded by (seed, path), and restored behind it."""
    devices = [mesh.device] if mesh.device_type != "cpu" else []
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
    with (
        _generator,
        torch.random.fork_rng(devices=devices, device_type=mesh.device_type if devices else "cuda"),
    ):
        torch.manual_seed(int.from_bytes(digest[:7], "big"))
        yield


def _from_module(
    model: nn.Module, specs: dict[str, LayoutSpec], mesh: Mesh, seed: int, disk_dir: str | None
) -> dict[str, Tensor]:
    """Module by module; a subtree at a time where a module's reset writes to its children's leaves."""
    tied = aliases(model)
    blocks: dict[str, Tensor] = {}
    problems, unfit = list[str](), Unfit()
    done: set[str] = set()
    for name, module in model.named_modules():
        if name in done:
            continue
        deep = _reaches_down(module, mesh, seed)
        group = dict(module.named_modules(prefix=name)) if deep else {name: module}
        done |= set(group)
        owned = {
            f"{sub}.{key}".lstrip("."): (sub, key, leaf)
            for sub, owner in group.items()
            for key, leaf in _own(owner)
            if f"{sub}.{key}".lstrip(".") not in tied
        }
        unset = {path: entry for path, entry in owned.items() if entry[2].is_meta}
        values = {path: leaf.detach() for path, (_, _, leaf) in owned.items()}
        if unset:
            made, missing = _reset_values(module, name, deep, unset, mesh, seed)
            values |= made
            problems += missing
        for path, value in values.items():
            unfit.look(path, specs[path], value)
            block = local_block(value, specs[path].storage, mesh)
            blocks[path] = stored_at_rest(block, specs[path], mesh, disk_dir)
    if problems:
        raise StateError(
            report(
                f"{len(problems)} modules cannot make their own values from the meta device:",
                problems,
                "give each a reset_parameters() that sets all it owns (buffers too), or pass a full tree, or "
                "step.init(params, init=lambda path, leaf: ...).",
            )
        )
    unfit.refuse()
    return {p: blocks[p] for p in specs}


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def _reset_of(module: nn.Module) -> str | None:
    return next((r for r in _RESETS if hasattr(module, r)), None)


def _reset_values(
    module: nn.Module,
    name: str,
    deep: bool,
    unset: dict[str, tuple[str, str, Tensor]],
    mesh: Mesh,
    seed: int,
) -> tuple[dict[str, Tensor], list[str]]:
    """Full values by path of the leaves that were on meta, and which of them nobody set."""
    made = _after_resets(module, name, deep, mesh, seed, fill=True)
    other = None
    if any(leaf.dtype == torch.bool for _, _, leaf in unset.values()):
        # No bool can mark what is unset: what follows the filling was never set.
        other = _after_resets(module, name, deep, mesh, seed, fill=False)
    values: dict[str, Tensor] = {}
    problems: list[str] = []
    bare: dict[str, list[str]] = {}
    for path, (sub, key, leaf) in unset.items():
        value = getattr(made[sub], key).detach()
        values[path] = value
        if not _untouched(value, None if other is None else getattr(other[sub], key)):
            continue
        owner = f"{sub}.{type(made[sub]).__name__}".lstrip(".")
        reset = _reset_of(made[sub])
        if reset is None:
            bare.setdefault(owner, []).append(path)
        else:
            problems.append(f"{owner}.{reset} left {key} {list(leaf.shape)} unset")
    problems += [
        f"{owner} has no reset_parameters (owns {', '.join(paths)})" for owner, paths in bare.items()
    ]
    return values, problems


def _after_resets(
    module: nn.Module, name: str, deep: bool, mesh: Mesh, seed: int, *, fill: bool
) -> dict[str, nn.Module]:
    """Real copies by name of the module, or of its subtree, each reset: children first, as constructed."""
    copied = _copied(module, lambda leaf: _sentinel(leaf, mesh, fill), deep)
    named = dict(copied.named_modules(prefix=name)) if deep else {name: copied}
    for path, part in reversed(named.items()):
        reset = _reset_of(part)
        if reset is not None:
            with torch.no_grad(), _seeded(seed, path, mesh):
                getattr(part, reset)()
    return named


def _reaches_down(module: nn.Module, mesh: Mesh, seed: int) -> bool:
    """Whether the module's reset writes to leaves of its children: a dry run on meta tells."""
    reset = _reset_of(module)
    below = [leaf for sub in module.modules() if sub is not module for _, leaf in _own(sub)]
    if reset is None or not any(leaf.is_meta for leaf in below):
        return False
    dry = _copied(module, lambda leaf: torch.empty_like(leaf, device="meta"), deep=True)
    watched = [leaf for sub in dry.modules() if sub is not dry for _, leaf in _own(sub)]
    before = [leaf._version for leaf in watched]
    try:
        with torch.no_grad(), _seeded(seed, "", mesh), _DataReads() as reads:
            getattr(dry, reset)()
    except Exception:  # it wants values: then it gets those of the whole subtree
        return True
    written = any(leaf._version != v for leaf, v in zip(watched, before, strict=True))
    return written or any(leaf is read for leaf in watched for read in reads.seen)


class _DataReads(TorchFunctionMode):
    """Notes whose `.data` is read: writes to it raise no version."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.data.__get__:
            self.seen.append(args[0])
        return func(*args, **(kwargs or {}))


def _copied(module: nn.Module, make: Callable[[Tensor], Tensor], deep: bool) -> nn.Module:
    """A copy with leaves of its own, `make(leaf)` (tied ones once); `deep`: its submodules' too."""
    made: dict[int, Any] = {}

    def leaf(value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        if id(value) not in made:
            new = make(value)
            if isinstance(value, nn.Parameter):
                new = nn.Parameter(new, requires_grad=value.requires_grad and value.is_floating_point())
            made[id(value)] = new
        return made[id(value)]

    def copy(part: nn.Module) -> nn.Module:
        if id(part) not in made:
            new = made[id(part)] = object.__new__(type(part))  # copy.copy refuses parametrised modules
            vars(new).update(vars(part))
            vars(new)["_parameters"] = {k: leaf(v) for k, v in part._parameters.items()}
            vars(new)["_buffers"] = {k: leaf(v) for k, v in part._buffers.items()}
            if deep:
                children = part._modules.items()
                vars(new)["_modules"] = {k: None if v is None else copy(v) for k, v in children}
        return made[id(part)]

    return copy(module)


def _sentinel(like: Tensor, mesh: Mesh, fill: bool = True) -> Tensor:
    value = torch.empty(like.shape, dtype=like.dtype, device=mesh.device)
    if like.dtype.is_floating_point or like.dtype.is_complex:
        return value.fill_(float("nan"))
    return value.fill_(fill if like.dtype == torch.bool else torch.iinfo(like.dtype).max)


def _untouched(leaf: Tensor, other: Tensor | None = None) -> bool:
    if leaf.numel() == 0:
        return False
    if leaf.dtype == torch.bool:
        return other is not None and bool((leaf != other).any())
    if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
        return bool(leaf.detach().isnan().any())
    return bool((leaf == torch.iinfo(leaf.dtype).max).any())
