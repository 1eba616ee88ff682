"""Norms: modules whose batch norm is of all ranks' rows."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from torch import nn

from fnshard.compiler.frontend.statistics import WholeBatch

__all__ = ["sync_batch_norm"]

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def sync_batch_norm(model: AnyModule) -> AnyModule:
    """Make every BatchNorm of a model normalise by the whole batch; in place, and returned.

    As `torch.nn.SyncBatchNorm.convert_sync_batchnorm`, whose modules do the same in a step. They stay the
    modules that they are (a norm with an activation in it keeps that, which torch's loses), with the same
    parameters and buffers; in eval mode they compute as before. The gradient and the running statistics are
    those of one process with all rows. A model that was converted cannot be pickled whole.

    >>> import fnshard as fs
    >>> model = fs.sync_batch_norm(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)))
    >>> apply, params = fs.make_functional(model)
    >>> type(model[1]).__name__, isinstance(model[1], nn.BatchNorm1d)
    ('SyncBatchNorm1d', True)
    """
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            module.__class__ = _synchronised(type(module))
    return model


@cache
def _synchronised(kind: type[nn.Module]) -> type[nn.Module]:
    if hasattr(kind, "synchronised"):
        return kind

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with WholeBatch():
            return kind.forward(self, *args, **kwargs)

    return type(f"Sync{kind.__name__}", (kind,), {"forward": forward, "synchronised": True})
