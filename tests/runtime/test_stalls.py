"""A step never waits for its device: run on fake CUDA tensors, streams and events, which note every wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fnshard as fs
from fnshard.compiler import lower
from fnshard.runtime.readback import Reading

aten = torch.ops.aten
MESH = fs.Mesh(("shard",), (1,), ("shard",), "cuda", "local")


class Device(TorchDispatchMode):
    """A mode that notes where the host would wait, under a FakeTensorMode of a torch without CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.pinned: list[Tensor] = []  # kept: an address is of what lives

    def _is_pinned(self, value: Tensor) -> bool:
        return any(p.untyped_storage()._cdata == value.untyped_storage()._cdata for p in self.pinned)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._pin_memory.default or kwargs.get("pin_memory"):
            self.pinned.append(
                torch.empty_like(args[0]) if func is aten._pin_memory.default else func(*args, **kwargs)
            )
            return self.pinned[-1]
        if func is aten.is_pinned.default:
            return self._is_pinned(args[0])
        if func is aten._local_scalar_dense.default and args[0].is_cuda:
            self.waits.append("a number is read")
        if func is aten._local_scalar_dense.default:
            constant = getattr(args[0], "constant", None)
            return 1.0 if constant is None else constant.item()
        if func is aten._to_copy.default:
            out = torch.empty_like(args[0], device=kwargs.get("device"), dtype=kwargs.get("dtype"))
            if out.device == args[0].device:
                return func(*args, **kwargs)
            if out.device.type == "cpu" and kwargs.get("non_blocking"):
                self.pinned.append(out)  # as torch makes it
            self.copied(args[0], out, kwargs.get("non_blocking", False))
            return out
        return func(*args, **kwargs)

    def copied(self, source: Tensor, target: Tensor, non_blocking: bool) -> None:
        if source.device == target.device:
            return
        host = source if source.device.type == "cpu" else target
        if not non_blocking or not self._is_pinned(host):
            how = "pageable" if non_blocking else "blocking"
            self.waits.append(f"a {how} copy of {list(source.shape)} to {target.device.type}")


class Bindings(TorchFunctionMode):
    """A mode that copies and slices without C++ that asks for a driver."""

    def __init__(self, device: Device):
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            self.device.copied(args[1], args[0], (kwargs or {}).get("non_blocking", False))
            return args[0]
        if func is not Tensor.__getitem__ or not isinstance(args[1], tuple):
            return func(*args, **kwargs or {})
        out = args[0]
        for dim, part in enumerate(args[1]):
            start, stop, _ = part.indices(out.shape[dim])
            out = out.narrow(dim, start, stop - start)
        return out


class Event:
    """An event of the device, which notes that it is waited for."""

    device: Device

    def __init__(self, *_: Any):
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.device.waits.append("an event")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    stream = lambda *_: SimpleNamespace(  # noqa: E731
        wait_stream=lambda other: None,
        wait_event=lambda event: None,
        synchronize=lambda: found.waits.append("a stream is waited for"),
    )
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: None)  # so torch pins
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    for module in (torch, torch.cuda):
        monkeypatch.setattr(module, "Event", type("Noted", (Event,), {"device": found}))
    monkeypatch.setattr(lower, "trace_device", lambda mesh: torch.device("cpu"))
    monkeypatch.setattr(fs.Mesh, "device", property(lambda mesh: torch.device("cuda:0")))
    return found


def loss(params: Any, x: Tensor, y: Tensor) -> Any:
    hidden = F.dropout(torch.tanh(x @ params["a"]), 0.1, training=True)
    return fs.Mean((hidden @ params["b"] - y).square().sum(), (y > 0).sum()), {"mean": hidden.detach().mean()}


RATE = fs.schedules.warmup_cosine(1e-3, 2, 9)
CLIPPED = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(RATE))
SCALE = {"scale": 65536.0, "good_steps": 0, "skipped_steps": 0}
POLICY = ("compute_dtype", "memory", "optimizer_memory")


class Trained:
    """A step on the device, which makes there what its kernels make."""

    def __init__(self, device: Device, **how: Any):
        params = {name: torch.ones(8, 8) for name in "ab"}
        self.on_host = how.get("memory") == "host"
        policy = {name: how.pop(name) for name in POLICY if name in how}
        specs = fs.presets.full_shard(params, MESH, **policy)
        how = {"optimizer": CLIPPED, "backend": "eager"} | how
        self.step = fs.shard_step(loss, specs, mesh=MESH, **how)
        lowered = self.step.lower(params, torch.ones(4, 8), torch.ones(4, 8))
        for kernel in lowered.kernels.values():
            for module in kernel.modules.values():
                for node in module.graph.nodes:
                    if "device" in node.kwargs:
                        node.kwargs = {**node.kwargs, "device": MESH.device}
                module.recompile()
        self.device = device

    @contextmanager
    def steps(self) -> Iterator[fs.TrainState]:
        """Enter the modes in which steps are made, and yield the first state."""
        with FakeTensorMode(allow_non_fake_inputs=True), self.device, Bindings(self.device):
            params = {name: torch.ones(8, 8, device="cpu" if self.on_host else "cuda") for name in "ab"}
            params = {name: v.pin_memory() if self.on_host else v for name, v in params.items()}
            state = self.step.adopt(params)
            state = state.replace(step=torch.tensor(0), seed=torch.tensor(0))
            self.device.waits.clear()
            yield state

    def __call__(self, state: fs.TrainState) -> tuple[fs.TrainState, Any]:
        return self.step(state, torch.ones(4, 8), torch.ones(4, 8))


@pytest.mark.parametrize("how", [{}, {"grad_norm": True}, {"prefetch": 0}, {"accumulate": 2}])
def test_a_step_with_clipping_dropout_a_mean_and_metrics_waits_for_nothing(device, how):
    trained = Trained(device, **how)
    with trained.steps() as state:
        for _ in range(3):
            state, _ = trained(state)
            assert device.waits == []


class Deferred:
    """A worker that begins when somebody waits for it: what the launching thread does is done before."""

    def __init__(self, device: Device):
        self.device, self.calls, self.before = device, [], []

    def submit(self, call: Any, *, heavy: bool = False) -> None:
        self.calls.append(call)

    def wait(self) -> None:
        self.before.append((len(self.calls), [*self.device.waits]))
        calls, self.calls = self.calls, []
        for call in calls:
            call()


@pytest.mark.parametrize("where", ["optimizer_memory", "memory"])
def test_updates_on_the_host_do_not_stop_the_launching_thread(device, where):
    how = {"optimizer_memory": "host"} | ({"memory": "host"} if where == "memory" else {})
    trained = Trained(device, optimizer=fs.optim.adamw(RATE), **how)
    trained.step._runner.rank.transfers.worker = worker = Deferred(device)
    with trained.steps() as state:
        trained(state)
    (count, waits), *rest = worker.before
    assert count >= 4 and waits == [] and all(n == 0 for n, _ in rest)
    assert "an event" in device.waits and device.waits[-2:] == ["a stream is waited for"] * 2


def test_numbers_and_flags_are_read_a_step_late_and_a_read_waits_for_one_event(device):
    trained = Trained(device)
    with trained.steps() as state:
        state, metrics = trained(state)
        assert trained.step.flag_raised("stop") is False and device.waits == []  # no step came before
        state, _ = trained(state)
        trained.step.flag_raised("stop")
        metrics.numbers()
        assert device.waits == ["an event", "an event"]


def test_a_dynamic_loss_scale_waits_once_a_step(device):
    trained = Trained(device, loss_scale="dynamic")
    with trained.steps() as state:
        state = state.replace(loss_scale={k: torch.tensor(v) for k, v in SCALE.items()})
        trained(state)
        assert device.waits == ["a number is read"]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_numbers_are_those_of_the_step_whatever_comes_after(device, device_type):
    """Integers stay integers, and what is on the host stays there."""
    if device_type == "cpu":
        lost, rate = torch.tensor(0.1), torch.tensor(3e-4, dtype=torch.float64)
        found = Reading.of({"loss": lost, "rate": rate, "skipped": torch.tensor(3)}, torch.device("cpu"))
        lost.fill_(9.0)
        assert (
            found.numbers() == {"loss": torch.tensor(0.1).item(), "rate": 3e-4, "skipped": 3} and found.ready
        )
        assert isinstance(found.numbers()["skipped"], int)
        assert found.without("loss").numbers() == {"rate": 3e-4, "skipped": 3}
        return
    with FakeTensorMode(allow_non_fake_inputs=True), device, Bindings(device):
        found = Reading.of({"rate": torch.tensor(3e-4), "loss": torch.ones((), device="cuda")}, MESH.device)
    assert found.known == {"rate": torch.tensor(3e-4).item()} and list(found.sent) == ["loss"]
    assert device.waits == []
