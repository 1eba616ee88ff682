"""Init: each rank makes only its own shards, and the numbers do not depend on the mesh."""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fnshard import tree
from fnshard.errors import StateError, report
from fnshard.functional import aliases, make_functional
from fnshard.mesh import Mesh
from fnshard.runtime.buckets import local_block
from fnshard.shards import compare_paths, shard
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
) -> Any:
    """This rank's stored blocks, from one of three sources.

    Args:
        source: a full tree; or a meta (fake) tree with `init(path, leaf)`, which fills a full leaf in
            place; or an `nn.Module`, on meta (its modules' own reset) or not (its values).
        seed: random numbers are seeded by (seed, path), leaf by leaf or module by module.

    Raises:
        StateError: a meta tree without `init`; modules that cannot reset what they own.
    """
    if isinstance(source, nn.Module):
        leaves = make_functional(source)[1]
        if init is None and any(leaf.is_meta for leaf in leaves.values()):
            compare_paths(specs, leaves)
            return tree.unflatten(_from_module(source, specs, mesh, seed).values(), structure)
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
        return shard(source, tree.unflatten(specs.values(), structure), mesh)
    if not abstract:
        raise StateError(
            report("init= was given, and no leaf is on the meta device to be filled.", fix="leave init= out.")
        )
    return tree.unflatten(_from_function(named, specs, mesh, init, seed), structure)


def _from_function(
    named: dict[str, Tensor], specs: dict[str, LayoutSpec], mesh: Mesh, init: InitFn, seed: int
) -> list[Tensor]:
    """Blocks of the leaves as they are, those on meta filled by `init`."""
    blocks, unset = [], []
    for path, spec in specs.items():
        full = named[path].detach()
        if full.is_meta:
            full = _sentinel(full, mesh).to(spec.storage_dtype)
            with torch.no_grad(), _seeded(seed, path, mesh):
                init(path, full)
            if _untouched(full):
                unset.append(f"params[{path!r}] {list(full.shape)}")
        blocks.append(local_block(full, spec.storage, mesh).to(mesh.device, spec.storage_dtype))
    if unset:
        raise StateError(
            report(
                f"init left {len(unset)} leaves unset, in whole or in part:",
                unset,
                "fill the leaf it is given in place, as leaf.normal_() does: what it returns is not read.",
            )
        )
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


def _from_module(model: nn.Module, specs: dict[str, LayoutSpec], mesh: Mesh, seed: int) -> dict[str, Tensor]:
    tied = aliases(model)
    blocks: dict[str, Tensor] = {}
    problems: list[str] = []
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        paths = {k: prefix + k for k, _ in own if prefix + k not in tied}
        for key in [k for k in paths if not getattr(module, k).is_meta]:
            path = paths.pop(key)  # it has a value: keep it
            block = local_block(getattr(module, key).detach(), specs[path].storage, mesh)
            blocks[path] = block.to(mesh.device, specs[path].storage_dtype)
        if not paths:
            continue
        reset = next((r for r in _RESETS if hasattr(module, r)), None)
        if reset is None:
            problems.append(
                f"{prefix}{type(module).__name__} has no reset_parameters (owns {', '.join(paths)})"
            )
            continue
        copied = _after_reset(module, reset, name, mesh, seed, fill=True)
        other = None
        if any(getattr(module, k).dtype == torch.bool for k in paths):
            # No bool can mark what is unset: what follows the filling was never set.
            other = _after_reset(module, reset, name, mesh, seed, fill=False)
        for key, path in paths.items():
            leaf = getattr(copied, key)
            if _untouched(leaf, None if other is None else getattr(other, key)):
                problems.append(
                    f"{prefix}{type(module).__name__}.{reset} left {key} {list(leaf.shape)} unset"
                )
            else:
                spec = specs[path]
                block = local_block(leaf.detach(), spec.storage, mesh)
                blocks[path] = block.to(mesh.device, spec.storage_dtype)
    if problems:
        raise StateError(
            report(
                f"{len(problems)} modules cannot make their own values from the meta device:",
                problems,
                "give each a reset_parameters() that sets all it owns (buffers too), or pass a full tree, or "
                "step.init(params, init=lambda path, leaf: ...).",
            )
        )
    return {p: blocks[p] for p in specs}


def _after_reset(module: nn.Module, reset: str, name: str, mesh: Mesh, seed: int, *, fill: bool) -> nn.Module:
    copied = _materialised(module, mesh, fill)
    with torch.no_grad(), _seeded(seed, name, mesh):
        getattr(copied, reset)()
    return copied


def _materialised(module: nn.Module, mesh: Mesh, fill: bool) -> nn.Module:
    """A shallow copy whose own leaves are real and filled with a sentinel (`fill` is that of bools)."""
    copied = copy.copy(module)
    copied.__dict__ = dict(module.__dict__)
    copied._parameters = {
        k: None
        if p is None
        else nn.Parameter(_sentinel(p, mesh, fill), requires_grad=p.requires_grad and p.is_floating_point())
        for k, p in module._parameters.items()
    }
    copied._buffers = {k: None if b is None else _sentinel(b, mesh, fill) for k, b in module._buffers.items()}
    return copied


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
