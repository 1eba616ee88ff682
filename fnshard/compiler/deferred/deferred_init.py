"""`deferred`: build a module without its memory; `step.init` makes its values, leaf by leaf.

The idea is torchdistX's `deferred_init`. A `Recorder` notes what the constructors do; after the block the
leaves of their modules are placeholders that carry their recipes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.overrides import resolve_name

from fnshard.compiler.deferred.recorder import META, Functions, Recorder
from fnshard.compiler.deferred.tape import START, Take, Tape, generator_lock, leaves_of
from fnshard.compiler.ir.containers import Contents
from fnshard.compiler.ir.program import WRITES
from fnshard.errors import StateError, leaves

__all__ = ["deferred"]

_here = threading.local()  # `recorder`: the one of the block that this thread is in


@contextmanager
def deferred() -> Iterator[None]:
    """Modules built in this block take no memory, and `step.init(model, seed=s)` fills them in.

    What the constructors do to parameters and buffers is recorded and done at `step.init` (or `fs.shard`),
    one leaf at a time, of which a rank keeps its own block. The values are bit for bit those of
    `torch.manual_seed(s)` and the same constructors on a CPU. A rank draws the random numbers of the whole
    model, as building it does.

    All that is to be done to the module belongs into the block, `model.apply(init)` and `model.to(dtype)`
    too; after it a write to a leaf is refused. Blocks nest. An operator whose result depends on the number of
    threads (QR) needs the same number.

    Raises:
        StateError: in the block, what cannot be recorded: to read a value that depends on random numbers, to
            seed or restore a generator or draw from one's own, another device than the CPU, an operator
            without a shape rule for meta tensors.

    >>> import fnshard as fs
    >>> with fs.deferred():
    ...     model = torch.nn.Linear(3, 2)
    >>> apply, params = fs.make_functional(model)
    >>> params["weight"].device
    device(type='meta')
    >>> specs = fs.match_specs(params, [("*", fs.LayoutSpec())])
    >>> shards = fs.shard(params, specs, fs.make_mesh(shard=1), seed=7)
    >>> _ = torch.manual_seed(7)
    >>> torch.equal(shards["weight"], torch.nn.Linear(3, 2).weight)
    True
    """
    if getattr(_here, "recorder", None) is not None:
        yield
        return
    recorder = Recorder()
    # A block marks the default generator, which belongs to all threads.
    with generator_lock, mock.patch.object(_here, "recorder", recorder, create=True):
        with ExitStack() as stack:
            for register in _REGISTRATIONS:
                stack.callback(register(recorder.meet).remove)
            stack.enter_context(recorder.one_truncation())
            stack.enter_context(torch.random.fork_rng(devices=[]))
            recorder.mark(START)
            stack.enter_context(recorder)
            stack.enter_context(Functions(recorder))
            yield
        _close(recorder)


_REGISTRATIONS = (
    hooks.register_module_parameter_registration_hook,
    hooks.register_module_buffer_registration_hook,
    hooks.register_module_module_registration_hook,
)


@dataclass(frozen=True, eq=False)
class LeafRecipe:
    """How to make a leaf: the log, and what the leaf shows of its memory."""

    tape: Tape
    alias: Tensor

    def value(self) -> Tensor | None:
        check_closed()
        return self.tape.value(self.alias)

    def __deepcopy__(self, memo: Any) -> LeafRecipe:
        return self


def recipe_of(leaf: Any) -> LeafRecipe | None:
    """The recipe that a leaf of a deferred module, or of its parameter tree, carries."""
    return vars(leaf).get("recipe") if isinstance(leaf, Tensor) else None


def on_meta(leaf: Tensor) -> Tensor:
    """A leaf of a deferred module as a parameter tree holds it: on meta, marked, with its recipe."""
    recipe = recipe_of(leaf)
    alias = recipe.alias
    plain = torch.empty_strided(alias.shape, alias.stride(), dtype=alias.dtype, device=META)
    if isinstance(leaf, nn.Parameter):
        plain = nn.Parameter(plain, requires_grad=leaf.requires_grad)
    else:
        plain = nn.Buffer(plain)
    plain.recipe = recipe
    return plain


def values_of(named: Mapping[str, Tensor], seed: int, take: Take) -> None:
    """Hand each leaf to `take` with its values: its own, or those of its recipe; one of these at a time.

    Raises:
        StateError: leaves on the meta device that carry no recipe; leaves that their module's constructor
            leaves unset.
    """
    check_closed()
    bare = [p for p, leaf in named.items() if leaf.is_meta and recipe_of(leaf) is None]
    if bare:
        raise StateError(
            f"{leaves(len(bare))} on the meta device without values, or a record of how to make them:",
            [f"params[{p!r}] {list(named[p].shape)}" for p in bare[:8]] + ["..."] * (len(bare) > 8),
            "build the module in `with fs.deferred():` instead of torch.device('meta'), which loses what "
            "its constructor does, and pass the module or the tree of make_functional as it is.",
        )
    recorded: dict[int, tuple[Tape, dict[str, Tensor]]] = {}
    for path, leaf in named.items():
        recipe = recipe_of(leaf)
        if recipe is None:
            take(path, leaf.detach())
        else:
            recorded.setdefault(id(recipe.tape), (recipe.tape, {}))[1][path] = recipe.alias
    unset = [p for tape, aliases in recorded.values() for p in tape.replay(aliases, seed, take)]
    if unset:
        raise StateError(
            f"the constructor leaves {leaves(len(unset))} unset:",
            [f"params[{p!r}] {list(named[p].shape)}" for p in unset],
            "set what torch.empty makes, in the fs.deferred() block; buffers too.",
        )


def check_closed() -> None:
    """Refuse to make values inside the block.

    Raises:
        StateError: this thread is in one.
    """
    if getattr(_here, "recorder", None) is not None:
        raise StateError("values are read inside fs.deferred(), which records.", fix="leave the block first.")


def _close(recorder: Recorder) -> None:
    """Put recipes on the leaves, and values in place of other tensors that the modules keep."""
    contents = Contents(*recorder.modules.values())
    parts = [m for root in recorder.modules.values() for m in root.modules()]
    owned = {id(leaf): leaf for m in parts for leaf in [*m._parameters.values(), *m._buffers.values()]}
    for leaf in owned.values():
        if leaf is None or isinstance(leaf, _Placeholder) or nn.parameter.is_lazy(leaf):
            continue
        if recorder.knows(leaf):
            _make_placeholder(leaf, LeafRecipe(recorder.tape, leaf.detach()))
    others = [t for t in contents.tensors if id(t) not in owned and recorder.knows(t)]
    values = {id(t): value for t in others if (value := recorder.value(t)) is not None}
    for container in contents.containers:
        container.replace(values)
    for tensor in others:
        _make_placeholder(tensor, None)


_READS = frozenset(["item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__"])


class _Placeholder(Tensor):
    """A tensor of a deferred module after the block: its shape, and errors for what would be lost."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = leaves_of((args, kwargs), Tensor)
        name = resolve_name(func) or str(func)
        problem, last = None, name.rpartition(".")[2]
        writes = WRITES.fullmatch(last) and last != "requires_grad_"
        if isinstance(inputs[0], _Placeholder) and (writes or name == "torch.Tensor.data.__set__"):
            problem = (
                "changes a deferred module after its fs.deferred() block, where it is lost.",
                "do it inside the block, below the constructor: model.apply(init), model.to(dtype).",
            )
        elif last in _READS or any(not isinstance(v, _Placeholder) and not v.is_meta for v in inputs):
            problem = (
                "needs the values of a deferred module, which has none yet.",
                "step.init(model) makes them. What forward uses is a parameter or a buffer "
                "(register_buffer), unless it depends on no random numbers.",
            )
        if problem is not None:
            raise StateError(f"{name} {problem[0]}", fix=problem[1])
        return super().__torch_function__(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made = on_meta(self) if recipe_of(self) else torch.empty_like(self).as_subclass(Tensor)
        memo[id(self)] = _make_placeholder(made, recipe_of(self))
        return made


def _make_placeholder(value: Tensor, recipe: LeafRecipe | None) -> Tensor:
    """Make a placeholder of a tensor, in place: whoever refers to it refers to that."""
    if isinstance(value, nn.Parameter):
        value._is_param = True
    value.recipe = recipe
    value.__class__ = _Placeholder
    return value
