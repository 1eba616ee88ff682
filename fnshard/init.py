"""Init: each rank makes only its own shards, and the numbers do not depend on the mesh."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fnshard import tree
from fnshard.errors import StateError, report
from fnshard.functional import aliases
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
        if any(t.is_meta for t in source.state_dict(keep_vars=True).values()):
            return tree.unflatten(_from_module(source, specs, mesh, seed).values(), structure)
        from fnshard.functional import make_functional

        source = make_functional(source)[1]
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
    blocks = []
    for path, spec in specs.items():
        full = torch.empty(spec.shape, dtype=spec.storage_dtype, device=mesh.device)
        with torch.no_grad(), _seeded(seed, path, mesh):
            init(path, full)
        blocks.append(local_block(full, spec.storage, mesh))
    return tree.unflatten(blocks, structure)


def _seeded(seed: int, path: str, mesh: Mesh):
    """A context in which torch's generators are seeded by (seed, path), and restored behind it."""
    devices = [mesh.device] if mesh.device_type != "cpu" else []
    context = torch.random.fork_rng(devices=devices, device_type=mesh.device_type if devices else "cuda")

    class Seeded:
        def __enter__(self) -> None:
            context.__enter__()
            digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:7], "big"))

        def __exit__(self, *error: Any) -> None:
            context.__exit__(*error)

    return Seeded()


def _from_module(model: nn.Module, specs: dict[str, LayoutSpec], mesh: Mesh, seed: int) -> dict[str, Tensor]:
    tied = aliases(model)
    blocks: dict[str, Tensor] = {}
    problems: list[str] = []
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        paths = {k: prefix + k for k, _ in own if prefix + k not in tied}
        if not paths:
            continue
        reset = next((r for r in _RESETS if hasattr(module, r)), None)
        if reset is None:
            problems.append(
                f"{prefix}{type(module).__name__} has no reset_parameters (owns {', '.join(paths)})"
            )
            continue
        copied = _materialised(module, mesh)
        with torch.no_grad(), _seeded(seed, name, mesh):
            getattr(copied, reset)()
        for key, path in paths.items():
            leaf = getattr(copied, key)
            if _untouched(leaf):
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


def _materialised(module: nn.Module, mesh: Mesh) -> nn.Module:
    """A shallow copy whose own leaves are real and filled with a sentinel."""
    copied = copy.copy(module)
    copied.__dict__ = dict(module.__dict__)
    copied._parameters = {
        k: None
        if p is None
        else nn.Parameter(_sentinel(p, mesh), requires_grad=p.requires_grad and p.is_floating_point())
        for k, p in module._parameters.items()
    }
    copied._buffers = {k: None if b is None else _sentinel(b, mesh) for k, b in module._buffers.items()}
    return copied


def _sentinel(like: Tensor, mesh: Mesh) -> Tensor:
    value = torch.empty(like.shape, dtype=like.dtype, device=mesh.device)
    if like.dtype.is_floating_point:
        return value.fill_(float("nan"))
    return value.fill_(True if like.dtype == torch.bool else torch.iinfo(like.dtype).max)


def _untouched(leaf: Tensor) -> bool:
    if leaf.numel() == 0 or leaf.dtype == torch.bool:
        return False
    if leaf.dtype.is_floating_point:
        return bool(leaf.detach().isnan().any())
    return bool((leaf == torch.iinfo(leaf.dtype).max).any())
