"""`shard_forward`: `shard_step` without the backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fnshard import tree
from fnshard.compiler.kernels.inductor import inductor_options
from fnshard.compiler.lower import LowerOptions, Passes
from fnshard.compiler.place.strategies import ContextAttention
from fnshard.losses import Mean
from fnshard.mesh import Mesh
from fnshard.runtime.collectives.base import DEFAULT_TIMEOUT
from fnshard.runtime.executor.cuda_graph import MODE
from fnshard.step.buckets import Buckets
from fnshard.step.cache import ProgramCache
from fnshard.step.lowered import CompileStats, Lowered
from fnshard.step.options import Backend, Options
from fnshard.step.runner import Runner, default_mesh
from fnshard.step.state import TrainState

__all__ = ["Forward", "shard_forward"]


def shard_forward(
    fn: Callable[..., Any],
    specs: Any,
    *,
    mesh: Mesh | None = None,
    prefetch: int = 1,
    backend: Backend = "inductor",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    deterministic: bool = False,
    context_attention: ContextAttention = "auto",
    expert_capacity: float | None = None,
    shapes: Buckets | None = None,
    cache: int = 8,
    timeout: float = DEFAULT_TIMEOUT,
) -> Forward:
    """Compile `fn(params, *batch) -> outputs` for sharded parameters.

    `forward(params, *batch)` takes this rank's stored blocks (or a TrainState) and its slice of the
    batch, and returns `fn`'s outputs for that slice: any pytree of tensors.

    Args: as `shard_step`'s.

    `forward.lower(params, *batch).compile_async()` compiles while steps run.

    >>> import torch
    >>> from fnshard import LayoutSpec, match_specs
    >>> params = {"w": torch.ones(3)}
    >>> specs = match_specs(params, [("*", LayoutSpec())])
    >>> shard_forward(lambda p, x: p["w"] * x, specs, backend="eager")(params, torch.arange(3.0))
    tensor([0., 1., 2.])
    """
    chosen = Options(
        lowering=LowerOptions(
            Passes((prefetch, prefetch), 1, mode == MODE),
            context_attention=context_attention,
            expert_capacity=expert_capacity,
        ),
        backend=backend, inductor=inductor_options(mode, options), deterministic=deterministic, cache=cache,
        timeout=timeout, shapes=shapes,
    )  # fmt: skip
    return Forward(fn, specs, mesh or default_mesh(), chosen)


class Forward:
    """A compiled forward; made by `shard_forward`."""

    def __init__(self, fn: Callable[..., Any], specs: Any, mesh: Mesh, options: Options):
        self.mesh, self.options = mesh, options
        self._cache = ProgramCache(fn, specs, mesh, options, trains=False)
        self._runner = Runner(self._cache)

    @property
    def compile_stats(self) -> CompileStats:
        """How many programs were traced, and kernels compiled."""
        return self._cache.stats

    def gather_strings(self, text: str) -> list[str]:
        """As `Step.gather_strings`."""
        return self._runner.rank.comm.gather_object(text)

    def lower(self, params: Any, /, *batch: Any, **keywords: Any) -> Lowered:
        """The forward for this batch, on paper; see `Step.lower`."""
        if isinstance(params, TrainState):
            self._cache.follow(params.params)
        else:
            self._cache.resolve(params)
        return self._cache.lower(self._cache.arguments(batch, keywords))

    def __call__(self, params: Any, /, *batch: Any, **keywords: Any) -> Any:
        """`fn`'s outputs for this rank's slice of the batch.

        Raises: as `Step.__call__`.
        """
        training = isinstance(params, TrainState)
        seed, number = (int(params.seed), int(params.step)) if training else (0, 0)
        blocks = params.params if training else params
        self._cache.follow(blocks)
        bound, inputs = self._runner.prepare(blocks, self._cache.arguments(batch, keywords), seed, number)
        env, lowered = bound.run(inputs), bound.lowered
        outputs, results = lowered.program.outputs, lowered.segments.results
        self._runner.rank.finished({}, {}, {limit: env[results[limit.result]] for limit in outputs.limits})
        made = {"python": lambda value: value, "tensor": lambda i: env[results[i]],
                "mean": lambda i, j: Mean(env[results[i]], env[results[j]])}  # fmt: skip
        return tree.unflatten([made[kind](*rest) for kind, *rest in outputs.aux], outputs.aux_structure)
