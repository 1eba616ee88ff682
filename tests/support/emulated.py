"""A GPU's tensors stood in on a CPU: they say that they are on `cuda:3`, and each is a CPU tensor inside.

What would make the host wait for a real one is noted: a value that is read (`.item()`), a copy from or to
memory that is not pinned, and a CPU tensor among an operator's operands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from streams import Log
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fnshard.compiler.kernels.inductor import compile_graph, graphs_of
from fnshard.mesh import Mesh
from fnshard.runtime import tiers
from fnshard.runtime.tiers import copy_to_device
from fnshard.step.lowered import Lowered

GPU, CPU = torch.device("cuda", 3), torch.device("cpu")
READ = {f"aten::{name}" for name in (
    "_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "repeat_interleave"
)}  # fmt: skip
COPIES = {"aten::copy_", "aten::_to_copy", "aten::_foreach_copy_"}


class OnGpu(Tensor):
    """A CPU tensor inside, of which nothing but its device differs."""

    inside: Tensor
    waits: Waits

    @staticmethod
    def __new__(cls, inside: Tensor, waits: Waits) -> OnGpu:
        out = Tensor._make_wrapper_subclass(
            cls, inside.size(), strides=inside.stride(), storage_offset=inside.storage_offset(),
            dtype=inside.dtype, device=GPU,
        )  # fmt: skip
        out.inside, out.waits = inside, waits
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = next(v.waits for v in tree_leaves((args, kwargs)) if isinstance(v, OnGpu))
        return waits.call(func, args, kwargs or {})

    def tolist(self) -> Any:
        self.waits.errors.append("tolist reads values")
        return self.inside.tolist()

    # torch's own forms of these ask for a driver
    def __getitem__(self, index: Any) -> OnGpu:
        return OnGpu(self.inside[_inside(index)], self.waits)

    def contiguous(self) -> OnGpu:
        return self if self.is_contiguous() else self.clone(memory_format=torch.contiguous_format)

    def copy_(self, source: Tensor, non_blocking: bool = False) -> OnGpu:
        return self.waits.call(torch.ops.aten.copy_.default, (self, source, non_blocking), {})


def _inside(values: Any) -> Any:
    return tree_map(lambda v: v.inside if isinstance(v, OnGpu) else v, values)


class Waits(Log):
    """A log of what the host waits for while a step runs. It notes nothing else of streams."""

    def __init__(self) -> None:
        super().__init__()
        self._pinned: dict[int, Any] = {}  # storages by name, which are kept: a name is not used again

    # ------------------------------------------------------------------ as a log of streams
    def watching(self) -> AbstractContextManager[Any]:
        return _Factories(self)

    def launch(self, stream: int, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor],
               made: Sequence[Tensor] = ()) -> None:  # fmt: skip
        """Do nothing, since memory is not looked at."""

    def send(self, value: Tensor, device: torch.device) -> Tensor:
        return copy_to_device(value, device)

    def wait(self, stream: int, event: int, by: str = "") -> None:
        if by and stream == self.host == -1:
            self.errors.append(f"{by} waits")
        super().wait(stream, event, by)

    # ------------------------------------------------------------------ ops
    def call(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        name, kwargs = func._schema.name, dict(kwargs)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        ours = {id(t.inside): t for t in given if isinstance(t, OnGpu)}
        host = [t for t in given if not isinstance(t, OnGpu)]
        device, pins = kwargs.get("device"), kwargs.pop("pin_memory", None)
        to_gpu = bool(ours) if device is None else device.type == "cuda"
        if device is not None:
            kwargs["device"] = CPU
        if name in COPIES:
            blocking = not (kwargs.get("non_blocking") or args[2:3] == (True,))
            if (ours and host) or to_gpu != bool(ours):
                pageable = not all(map(self.is_pinned, host))
                self.errors += [f"{name} is blocking"] * blocking + [f"{name} of pageable memory"] * pageable
        elif ours and host:
            self.errors.append(f"{name} has an operand on the CPU")
            assert all(t.dim() == 0 for t in host), f"{name} of tensors on two devices"
        if ours and name in READ:
            self.errors.append(f"{name} reads a value")
        out = func(*_inside(args), **_inside(kwargs))
        if pins:
            self.pin(out)

        def outside(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return ours[id(value)] if id(value) in ours else OnGpu(value, self) if to_gpu else value

        return tree_map(outside, out)

    def pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = storage
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned


class _Factories(TorchDispatchMode):
    """A mode that takes note of tensors that are made on the device."""

    def __init__(self, waits: Waits):
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.waits.call(func, args, kwargs or {})


@contextmanager
def on_gpu(waits: Waits) -> Iterator[None]:
    """Let this rank's device be `cuda:3`, inside of `streams.gpu`."""
    patches = [
        mock.patch.object(Mesh, "device", GPU),
        mock.patch.object(torch.cuda, "_lazy_init", lambda: None),
        mock.patch.object(Tensor, "pin_memory", lambda tensor: waits.pin(tensor.clone())),
        mock.patch.object(Tensor, "is_pinned", lambda tensor: waits.is_pinned(tensor)),
        mock.patch.object(
            tiers, "allocate_pinned", lambda n, _: waits.pin(torch.empty(n, dtype=torch.uint8))
        ),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def put_on_gpu(lowered: Lowered) -> None:
    """Let kernels that were traced on the CPU make their tensors on the device."""

    def there(module: fx.GraphModule) -> Any:
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        for node in graph.nodes:
            node.args, node.kwargs = map_aggregate(
                (node.args, node.kwargs), lambda value: GPU if isinstance(value, torch.device) else value
            )
        return compile_graph(fx.GraphModule(module, graph), backend="eager", options={}, is_backward=False)

    lowered.compiled = {key: there(module) for key, module in graphs_of(lowered.kernels.values()).items()}
