"""Norms: convert a model's batch norms, so that they normalise by the rows of all ranks."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fnshard.compiler.frontend.statistics import WholeBatch

__all__ = ["sync_batch_norm"]

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def sync_batch_norm(model: AnyModule) -> AnyModule:
    """Make every BatchNorm of a model normalise by the whole batch; change it in place and return it.

    The modules of `torch.nn.SyncBatchNorm.convert_sync_batchnorm` do the same in a step. Here the modules
    stay as they are, with the same parameters and buffers, and a norm with an activation in it keeps that,
    which torch's conversion loses; in eval mode they compute as before. A lazy norm becomes a converted one
    at its first batch. The gradient and the running statistics are those of one process with all rows. A
    model that was converted cannot be pickled whole.

    >>> import fnshard as fs
    >>> model = fs.sync_batch_norm(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)))
    >>> apply, params = fs.make_functional(model)
    >>> type(model[1]).__name__, isinstance(model[1], nn.BatchNorm1d)
    ('SyncBatchNorm1d', True)
    """
    for module in model.modules():
        # A step gives torch's SyncBatchNorm the rows of all ranks anyway.
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            module.__class__ = _make_synchronised(type(module))
    return model


@cache
def _make_synchronised(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass whose forward normalises by the whole batch, always the same one for a class."""
    if hasattr(kind, "synchronised"):
        return kind

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with WholeBatch():
            return kind.forward(self, *args, **kwargs)

    content: dict[str, Any] = {"forward": forward, "synchronised": True}
    becomes = getattr(kind, "cls_to_become", None)  # the class of a lazy norm after its first batch
    if becomes is not None:
        content["cls_to_become"] = _make_synchronised(becomes)
    return type(f"Sync{kind.__name__}", (kind,), content)
