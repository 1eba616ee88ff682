"""Dialects: find parameters and optimizer state in saved trees, whoever saved them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fnshard.hf.reading import FileTensor
from fnshard.runtime.files.tensorfile import Corrupt

# Keys under which a saved tree has a module's state dict, and an optimizer's:
# FSDP2 and DCP's tutorials  model.<name>       optim.state.<name>.exp_avg
# torchtitan                 <name>             optimizer.state.<name>.exp_avg
# Accelerate                 model.<name>       optimizer.state.<name>.exp_avg, in a folder of its own
# Lightning                  state_dict.<name>  optimizer_0.state.<name>..., optimizer_states.0.state.<n>...
# DDP by hand                model.<name>       optimizer.state.<number>.exp_avg
MODELS = frozenset({"model", "state_dict", "model_state_dict", "module", "model_state"})
OPTIMIZERS = re.compile(r"optim|optimizers?(_\d+)?|optim(izer)?_states?|optim(izer)?_state_dict")
BY_NAME = "save it by name, with torch.distributed.checkpoint.state_dict.get_state_dict"
SLOTS = {"exp_avg": "mu", "exp_avg_sq": "nu", "momentum_buffer": "momentum"}  # torch's name: the one here
# What wrappers add to the names of a module's leaves.
WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})

Leaf = FileTensor | Callable[[], Any]  # a tensor, or a function that reads another value
Tree = Mapping[tuple[str, ...], Leaf]


@dataclass(frozen=True)
class SavedState:
    """A training state in files of another library.

    Args:
        kind: the kind of files, for messages.
        params: the parameters by name.
        slots: optimizer state by the parameter's name and the slot's, as slots are called here.
        step: the number of updates that were made.
        groups: the numbers of each group's parameters, if the optimizer numbers them. The names in `slots`
            are then such numbers.
    """

    kind: str
    params: Mapping[str, FileTensor]
    slots: Mapping[str, Mapping[str, FileTensor]] = field(default_factory=dict)
    step: int = 0
    groups: Sequence[Sequence[str]] = ()


def walk(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the leaves of nested dicts, and of lists that hold dicts, by path."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from walk(value, (*path, str(key)))
    elif isinstance(tree, list | tuple) and any(isinstance(each, Mapping) for each in tree):
        for key, value in enumerate(tree):
            yield from walk(value, (*path, str(key)))
    else:
        yield path, tree


def recognise(tree: Tree, kind: str) -> SavedState:
    """Tell parameters and optimizer state of a saved tree apart.

    Raises:
        Corrupt: there are no tensors; two models whose parameters have the same names; several optimizers;
            parameters that have made different numbers of updates.
    """
    starts: dict[tuple[str, ...], int] = {}  # by path, where a tensor's name begins: after the model's key
    slots: dict[str, dict[str, FileTensor]] = {}
    steps: dict[str, int] = {}
    groups: dict[str, list[str]] = {}
    optimizers: dict[str, None] = {}

    # The path of an optimizer's state has the optimizer's key. That of a parameter may have the model's.
    for path, leaf in tree.items():
        parts = path[:-1]
        where = next((i for i, part in enumerate(parts) if OPTIMIZERS.fullmatch(part)), None)
        if where is not None:
            # Either the slot of a parameter, perhaps after the optimizer's number, or a group's list.
            inner = ".".join(path[where + 1 :])
            if match := re.fullmatch(r"(\d+\.(?=state\.))?state\.(.+)\.(\w+)", inner):
                number, name, slot = match.groups()
                optimizers[f"{path[where]}.{number or ''}"] = None
                name = strip_wrappers(name)
                if slot == "step":
                    steps[name] = int(leaf() if callable(leaf) else leaf.data[...])
                elif isinstance(leaf, FileTensor):
                    slots.setdefault(name, {})[SLOTS.get(slot, slot)] = leaf
            elif match := re.fullmatch(r"(?:\d+\.)?param_groups\.(\d+)\.(params|param_names)", inner):
                names = leaf() if callable(leaf) else []
                groups.setdefault(match[1] + match[2], [str(each) for each in names])
        elif isinstance(leaf, FileTensor):
            starts[path] = max((i + 1 for i, part in enumerate(parts) if part in MODELS), default=0)

    # Where a tensor is under a model's key, the others are no parameters.
    params: dict[str, FileTensor] = {}
    places: dict[str, tuple[str, ...]] = {}
    has_key = any(starts.values())
    for path, start in starts.items():
        if start or not has_key:
            name = strip_wrappers(".".join(path[start:]))
            first = places.setdefault(name, path)
            if tree[first] != tree[path]:  # a second model: an average, a teacher
                what = f"has two parameters {name!r}, {'.'.join(first)!r} and {'.'.join(path)!r}"
                raise Corrupt(what, "save the one to load by itself: {'model': model.state_dict()}.")
            params[name] = tree[path]

    # DDP puts "module." before all names, which users may have taken off or not.
    if params and all(name.startswith("module.") for name in params):
        params = {name.removeprefix("module."): leaf for name, leaf in params.items()}
        slots = {name.removeprefix("module."): own for name, own in slots.items()}
    if not params and not slots:
        raise Corrupt("holds no tensors of a model", "name a checkpoint of a model's parameters.")

    # A state here has one optimizer, and one count of updates.
    if len(optimizers) > 1:
        what = f"holds the state of {len(optimizers)} optimizers, {', '.join(optimizers)}"
        raise Corrupt(what, "save the state of one, or none.")
    if timeless := [name for name, own in slots.items() if "nu" in own and name not in steps]:
        what = f"has moments of {timeless[0]!r} and does not say after how many steps"
        raise Corrupt(what, "save the whole state of AdamW, with its step, or parameters alone.")
    counts = sorted(set(steps.values()))
    if len(counts) > 1:
        odd = next(name for name, count in steps.items() if count != counts[-1])
        raise Corrupt(
            f"has optimizer state after {counts[0]} to {counts[-1]} updates, by parameter ({odd!r} after "
            f"{steps[odd]}), and a state here counts the updates of all",
            "save it without optimizer state, and begin anew with the parameters.",
        )

    # torch's optimizers number their parameters. If they were given names, they save these with the numbers.
    numbered_groups: list[list[str]] = []
    if slots and all(name.isdecimal() for name in slots):
        numbers = {key: each for key, each in groups.items() if key.endswith("params")}
        names_by_number: dict[str, str] = {}
        for key, each in numbers.items():
            names = groups.get(f"{key.removesuffix('params')}param_names", [])
            names_by_number |= dict(zip(each, names, strict=False))
        if slots.keys() <= names_by_number.keys():
            slots = {strip_wrappers(names_by_number[number]): own for number, own in slots.items()}
        else:
            numbered_groups = [each for _, each in sorted(numbers.items())]
    return SavedState(kind, params, slots, counts[0] if counts else 0, numbered_groups)


def strip_wrappers(name: str) -> str:
    """Return the name of a leaf without the modules that wrappers add.

    >>> strip_wrappers("layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def name_numbers(saved: SavedState, trained: Sequence[str]) -> Mapping[str, Mapping[str, FileTensor]]:
    """Return optimizer state by name. Numbers count the trained parameters in the order of the file.

    Raises:
        Corrupt: there are several groups, whose order is not the module's; or another number of parameters,
            or parameters of other shapes.
    """
    if not saved.groups:
        return saved.slots

    (numbers, *others) = saved.groups
    if others or len(numbers) != len(trained):
        raise Corrupt(
            f"numbers the optimizer state of {sum(map(len, saved.groups))} parameters in {len(saved.groups)} "
            f"groups, and {len(trained)} train here: which is which it does not say",
            f"{BY_NAME}, or torch.optim.AdamW(named_parameters).",
        )

    named = {name: saved.slots.get(number, {}) for number, name in zip(numbers, trained, strict=True)}
    odd = [n for n, own in named.items() for s in own.values() if s.shape not in ((), saved.params[n].shape)]
    if odd:
        raise Corrupt(
            f"numbers its optimizer state, and that of {odd[0]!r} by its number is of another shape",
            f"{BY_NAME}.",
        )
    return named
