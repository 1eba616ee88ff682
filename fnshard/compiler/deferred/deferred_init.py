"""`deferred`: build a module without its memory; `step.init` makes its values, leaf by leaf.

The idea is that of `deferred_init` in torchdistX. A `Recorder` notes what the constructors do. After the
block the leaves of their modules are placeholders that carry their recipes.
"""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.overrides import resolve_name

from fnshard.compiler.deferred.draws import key_of
from fnshard.compiler.deferred.recorder import MARK, META, FunctionRecorder, Recorder
from fnshard.compiler.deferred.tape import Memories, RecordedCall, Tape, leaves_of
from fnshard.compiler.deferred.window import can_be_cut, cut, describe
from fnshard.compiler.ir.containers import Contents
from fnshard.compiler.ir.program import WRITES, storage_id
from fnshard.errors import StateError, leaves

__all__ = ["deferred"]

_generator_lock = threading.Lock()  # torch's default generator belongs to all threads, simulated ranks too
_here = threading.local()  # `recorder`: that of the block that this thread is in


@contextmanager
def deferred() -> Iterator[None]:
    """Build modules in this block without memory; `step.init(model, seed=s)` fills them in.

    The operators that the constructors run on parameters and buffers are recorded. `step.init` (or
    `fs.shard`) runs them, one leaf at a time. A random operator draws from the seed, the path of the leaf
    that it is for, and its number among those of that leaf: the values have the distribution that the
    constructors ask for, are the same on every mesh, and depend on no other leaf. Copies of a leaf that the
    constructors make are equal. The numbers differ from those of `torch.manual_seed(s)` and the same
    constructors: to have these, build the module with values.

    If a leaf is made by elementwise operators and by normal, uniform or constant fills of the leaf or of
    parts of it (`torch.nn.init.normal_`, `trunc_normal_`, `kaiming_uniform_`, ...), a rank makes only its own
    block. It makes other leaves (`orthogonal_`, `sparse_`) whole, one at a time, and keeps its block.

    Change the module inside the block only, also by `model.apply(init)` and `model.to(dtype)`: a write to a
    leaf after the block is refused. Blocks nest. An operator whose result depends on the number of threads
    (QR) needs the same number.

    Raises:
        StateError: the block does something that cannot be recorded: it reads a value that depends on random
            numbers, seeds or restores a generator, draws from one of its own, uses another device than the
            CPU, or calls an operator without a shape rule for meta tensors.

    >>> import fnshard as fs
    >>> with fs.deferred():
    ...     model = torch.nn.Linear(3, 2)
    >>> apply, params = fs.make_functional(model)
    >>> params["weight"].device
    device(type='meta')
    >>> specs = fs.match_specs(params, [("*", fs.LayoutSpec())])
    >>> shards = fs.shard(params, specs, fs.make_mesh(shard=1), seed=7)
    >>> bool(shards["weight"].abs().max() <= 3**-0.5)  # as Linear says
    True
    """
    if getattr(_here, "recorder", None) is not None:
        yield
        return

    recorder = Recorder()
    # The default generator belongs to all threads, so that only one block at a time may mark it.
    with _generator_lock, mock.patch.object(_here, "recorder", recorder, create=True):
        with ExitStack() as stack:
            # Note the modules of the block, whose leaves get their recipes at its end.
            for register in _REGISTRATIONS:
                stack.callback(register(recorder.note_module).remove)
            stack.enter_context(recorder.record_truncations())

            # Mark the generator, whose former state comes back at the end. A constructor that seeds it
            # removes the mark, and the next draw is refused.
            stack.enter_context(torch.random.fork_rng(devices=[]))
            torch.default_generator.manual_seed(MARK)

            # Record operators, and answer what constructors ask of recorded tensors.
            stack.enter_context(recorder)
            stack.enter_context(FunctionRecorder(recorder))
            yield
        _attach_recipes(recorder)


_REGISTRATIONS = (
    hooks.register_module_parameter_registration_hook,
    hooks.register_module_buffer_registration_hook,
    hooks.register_module_module_registration_hook,
)


@dataclass(frozen=True, eq=False)
class LeafRecipe:
    """A recipe for a leaf: the log, and an alias that says which part of its memory the leaf shows."""

    tape: Tape
    alias: Tensor

    def value(self) -> Tensor | None:
        """Return the leaf's values; None if they depend on random numbers."""
        check_closed()
        return self.tape.value(self.alias)

    def __deepcopy__(self, memo: Any) -> LeafRecipe:
        return self  # a copy of a leaf has the same values: it shares the log


def recipe_of(leaf: Any) -> LeafRecipe | None:
    """Return the recipe that a leaf of a deferred module or of its parameter tree carries, or None."""
    return vars(leaf).get("recipe") if isinstance(leaf, Tensor) else None


def on_meta(leaf: Tensor) -> Tensor:
    """Return a leaf of a deferred module as a parameter tree holds it: on meta, with its recipe."""
    recipe = recipe_of(leaf)
    alias = recipe.alias
    plain = torch.empty_strided(alias.shape, alias.stride(), dtype=alias.dtype, device=META)
    if isinstance(leaf, nn.Parameter):
        plain = nn.Parameter(plain, requires_grad=leaf.requires_grad)
    else:
        plain = nn.Buffer(plain)
    plain.recipe = recipe
    return plain


class Values:
    """A source of the values of a tree's leaves: their own, or those of their recipes under a seed.

    Raises:
        StateError: leaves on the meta device carry no recipe, or their constructor leaves them unset.
    """

    def __init__(self, named: Mapping[str, Tensor], seed: int):
        check_closed()
        bare = [p for p, leaf in named.items() if leaf.is_meta and recipe_of(leaf) is None]
        if bare:
            raise StateError(
                f"{leaves(len(bare))} on the meta device without values, or a record of how to make them:",
                [f"params[{p!r}] {list(named[p].shape)}" for p in bare[:8]] + ["..."] * (len(bare) > 8),
                "build the module in `with fs.deferred():` instead of torch.device('meta'), which loses what "
                "its constructor does, and pass the module or the tree of make_functional as it is.",
            )

        # Find how each leaf is made; one that nothing fills would have no value.
        self._named = named
        recipes = {p: recipe_of(leaf) for p, leaf in named.items()}
        self._recipes = {p: recipe for p, recipe in recipes.items() if recipe is not None}
        self._slices = {p: r.tape.slice(storage_id(r.alias)) for p, r in self._recipes.items()}
        unset = [p for p in self._recipes if all(call.is_blank for call in self._find_calls(p))]
        if unset:
            raise StateError(
                f"the constructor leaves {leaves(len(unset))} unset:",
                [f"params[{p!r}] {list(named[p].shape)}" for p in unset],
                "set what torch.empty makes, in the fs.deferred() block; buffers too.",
            )
        self._keys = self._derive_keys(seed)

    def _derive_keys(self, seed: int) -> dict[int, dict[int, int]]:
        """Return the keys of random calls, by tape and call.

        A call belongs to the leaf that it draws, or else to the first leaf that depends on it. Its key
        follows from the leaf's path and from its number among the calls of that leaf.
        """
        # Offer each call first to the leaf that it draws into, so that no leaf which only reads it takes it.
        owners: dict[tuple[int, int], str] = {}
        for is_drawn in (True, False):
            for path, recipe in self._recipes.items():
                for number in self._slices[path]:
                    call = recipe.tape.calls[number]
                    if call.is_random and (not is_drawn or storage_id(recipe.alias) in call.memories):
                        owners.setdefault((id(recipe.tape), number), path)

        # Number the calls of each leaf in program order.
        keys: dict[int, dict[int, int]] = {id(r.tape): {} for r in self._recipes.values()}
        counts: Counter[str] = Counter()
        for (tape, number), path in sorted(owners.items()):
            keys[tape][number] = key_of(seed, path, counts[path])
            counts[path] += 1
        return keys

    def of(self, path: str) -> Tensor:
        """Make a whole leaf."""
        if path not in self._recipes:
            return self._named[path].detach()
        return self._run(path, Memories())

    def can_be_cut(self, path: str) -> bool:
        """Return whether a part of a leaf can be made without the other parts."""
        return path in self._recipes and can_be_cut(self._recipes[path].alias, self._find_calls(path))

    def part(self, path: str, box: Sequence[slice]) -> Tensor:
        """Make a part of a leaf that can be cut."""
        return cut(self._recipes[path].alias, box, lambda window: self._run(path, window))

    def checksum(self, path: str) -> int:
        """Return a checksum of the calls that make a leaf which can be cut."""
        keys = [self._keys[id(self._recipes[path].tape)].get(n) for n in self._slices[path]]
        return zlib.crc32(str([keys, *map(describe, self._find_calls(path))]).encode())

    def _find_calls(self, path: str) -> list[RecordedCall]:
        """Return the calls of the log that make a leaf."""
        return [self._recipes[path].tape.calls[n] for n in self._slices[path]]

    def _run(self, path: str, space: Memories) -> Tensor:
        """Run the calls that make a leaf, in a space of memories."""
        recipe = self._recipes[path]
        with _generator_lock:
            return recipe.tape.run(recipe.alias, self._slices[path], space, self._keys[id(recipe.tape)])


def check_closed() -> None:
    """Refuse to make values inside the block.

    Raises:
        StateError: this thread is in a block.
    """
    if getattr(_here, "recorder", None) is not None:
        raise StateError("values are read inside fs.deferred(), which records.", fix="leave the block first.")


def _attach_recipes(recorder: Recorder) -> None:
    """Put recipes on the leaves, and values in place of other tensors that the modules keep."""
    contents = Contents(*recorder.modules.values())
    modules = [m for root in recorder.modules.values() for m in root.modules()]
    registered = [v for m in modules for v in [*m._parameters.values(), *m._buffers.values()]]
    named_leaves = {id(leaf): leaf for leaf in registered}
    for leaf in named_leaves.values():
        # A placeholder has its recipe from an earlier block; a lazy leaf has no shape yet.
        if leaf is None or isinstance(leaf, _Placeholder) or nn.parameter.is_lazy(leaf):
            continue
        if recorder.knows(leaf):
            _make_placeholder(leaf, LeafRecipe(recorder.tape, leaf.detach()))

    # Tensors that modules keep in attributes and lists get their values, unless these depend on random
    # numbers. All become placeholders without a recipe, which refuse to be read where a reference stays.
    others = [t for t in contents.tensors if id(t) not in named_leaves and recorder.knows(t)]
    values: dict[int, Tensor] = {}
    for tensor in others:
        value = recorder.value(tensor)
        if value is not None:
            values[id(tensor)] = value
    for container in contents.containers:
        container.replace(values)
    for tensor in others:
        _make_placeholder(tensor, None)


_READS = frozenset(["item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__"])


class _Placeholder(Tensor):
    """A tensor of a deferred module after the block: it has a shape, and refuses calls that would be lost."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = leaves_of((args, kwargs), Tensor)
        name = resolve_name(func) or str(func)
        problem, short_name = None, name.rpartition(".")[2]
        writes = WRITES.fullmatch(short_name) and short_name != "requires_grad_"

        # After the block a write would be lost, and a value has not been made yet.
        if isinstance(inputs[0], _Placeholder) and (writes or name == "torch.Tensor.data.__set__"):
            problem = (
                "changes a deferred module after its fs.deferred() block, where it is lost.",
                "do it inside the block, below the constructor: model.apply(init), model.to(dtype).",
            )
        elif short_name in _READS or any(not isinstance(v, _Placeholder) and not v.is_meta for v in inputs):
            problem = (
                "needs the values of a deferred module, which has none yet.",
                "step.init(model) makes them. What forward uses is a parameter or a buffer "
                "(register_buffer), unless it depends on no random numbers.",
            )
        if problem is not None:
            raise StateError(f"{name} {problem[0]}", fix=problem[1])
        return super().__torch_function__(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy = on_meta(self) if recipe_of(self) else torch.empty_like(self).as_subclass(Tensor)
        memo[id(self)] = _make_placeholder(copy, recipe_of(self))
        return copy


def _make_placeholder(value: Tensor, recipe: LeafRecipe | None) -> Tensor:
    """Turn a tensor into a placeholder in place, so that all references to it see that."""
    if isinstance(value, nn.Parameter):
        # torch knows a parameter of another class by this mark.
        value._is_param = True
    value.recipe = recipe
    value.__class__ = _Placeholder
    return value
