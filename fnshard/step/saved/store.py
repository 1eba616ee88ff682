"""Store: lowered and compiled steps in files, found again by what they were lowered for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx

from fnshard.compiler.frontend.trace import with_functions
from fnshard.compiler.ir.program import Outputs, Program
from fnshard.compiler.kernels.artifact import Artifact, artifact_of, load_artifact
from fnshard.compiler.kernels.inductor import Boxed, compile_graphs, graphs_of
from fnshard.compiler.lower import PlanOf, Stages
from fnshard.errors import stable_repr
from fnshard.layout.codecs import CODECS
from fnshard.layout.resolved import ResolvedSpecs
from fnshard.mesh import Mesh
from fnshard.runtime.files.json_reader import JsonError, from_json
from fnshard.step.batches import BatchKey, Constant
from fnshard.step.options import Options
from fnshard.step.saved import file
from fnshard.step.saved.dependencies import (
    Reading,
    changed_sources,
    digest,
    environment,
    guard_for,
    reading_of,
    sources,
    text_of,
)
from fnshard.step.saved.encoding import NotSaved, decode, encode
from fnshard.step.saved.file import Refused

Kernels = dict[str, tuple[Boxed, Boxed | None]]


_CODECS = frozenset(CODECS)  # before anybody has registered one


@dataclass(frozen=True)
class Request:
    """What a step is lowered for: the arguments of `shard_step`, a batch's shapes, and this process."""

    runs: Callable[..., Any]
    specs: ResolvedSpecs
    mesh: Mesh
    options: Options
    texts: Mapping[str, str]
    environment: Mapping[str, str]

    @staticmethod
    def of(
        fn: Callable[..., Any], specs: ResolvedSpecs, mesh: Mesh, options: Options, plan: PlanOf | None,
        key: BatchKey,
    ) -> Request:  # fmt: skip
        """Before anything is traced.

        Raises:
            NotSaved: an argument has no text that another process could compare.
        """
        if options.shapes is not None:
            raise NotSaved("kernels that several lengths share (`shapes`)")
        own = {s.codec for s in specs.leaves.values()} - _CODECS
        if own - {None}:
            raise NotSaved(f"the codec {', '.join(map(str, own - {None}))}, which is not fnshard's own")
        constants = {str(i): v for i, v in specs.structure.constants}
        plain = replace(options, cache=1, timeout=1.0, disk_dir=None, cache_dir=None, inductor={})
        texts = {
            "fn": _named(fn),
            "specs": repr((specs.leaves, specs.paired)),
            "the parameter tree": f"{stable_repr(specs.structure)} {_all(constants, 'a leaf of the tree')}",
            "mesh": repr((mesh.names, mesh.sizes, mesh.data_axes, mesh.kind, str(mesh.device))),
            "options": f"{plain} {_all(options.inductor, 'an option of Inductor')}",
            "optimizer": _plans(plan),
            "batch": repr([(n, _leaf(d)) for n, d in key[1:]]) + stable_repr(key[0][1]),
        }
        runs = with_functions(fn, specs.structure)
        return Request(runs, specs, mesh, options, texts, environment(mesh.device))

    @cached_property
    def key(self) -> str:
        """The name of its file."""
        return digest(json.dumps([dict(self.texts), dict(self.environment)]))[:32]


def _named(fn: Callable[..., Any]) -> str:
    """A name: what `fn` is made of is compared behind the trace's own record of it."""
    while hasattr(fn, "func"):
        fn = fn.func
    code = getattr(fn, "__code__", None)
    return f"{getattr(fn, '__qualname__', type(fn).__qualname__)} {code and code.co_filename}"


def _all(values: Mapping[str, Any], what: str) -> str:
    return repr({n: text_of(v, f"{what}, {n}") for n, v in values.items()})


def _leaf(described: Any) -> str:
    if isinstance(described, Constant):
        return f"{described.kind.__qualname__} {described.value}"
    return repr(tuple(described))


def _plans(plan: PlanOf | None) -> str:
    """What the optimizer asks of a schedule, whatever `fn` returns."""
    if plan is None:
        return "a forward"
    made = [Program(fx.Graph(), (), {}, Outputs(0, count, None)) for count in (None, 0)]
    return repr([plan(each) for each in made])


@dataclass(frozen=True)
class Saved:
    """A lowered step out of a file."""

    stages: Stages
    kernels: Kernels
    batch_bytes: Mapping[str, int]


@dataclass(frozen=True)
class _Kernel:
    """How a kernel's artifact lies in a file: members by the names of its libraries and constants."""

    source: str
    libraries: Mapping[str, str]
    entries: Mapping[str, tuple[str, str]]
    constants: Mapping[str, str]
    results: int | None = None


@dataclass(frozen=True)
class _Content:
    """The JSON of a file. `kernels`: forward and backward by name; None where the eager backend runs it."""

    format: int
    texts: Mapping[str, str]
    environment: Mapping[str, str]
    sources: Mapping[str, str]
    reading: Reading
    stages: Any
    batch_bytes: Mapping[str, int]
    kernels: Mapping[str, tuple[_Kernel | None, ...]]


_FORMAT = 3
_JSON = "step.json"


def save(
    path: Path, request: Request, stages: Stages, kernels: Mapping[str, tuple[Any, ...]],
    batch_bytes: Mapping[str, int],
) -> None:  # fmt: skip
    """Write a lowered and compiled step.

    Raises:
        NotSaved: it, or what it depends on, has no form in a file.
        StateError: others may write to the folder.
    """
    guard, constants = stages.program.guard, stages.program.constants.values()
    if not guard.holds():
        raise NotSaved("what `fn` reads has changed since its trace")
    encoded, members = encode(stages)
    members = dict(members)
    written: dict[str, tuple[_Kernel | None, ...]] = {}
    for name, pair in kernels.items():
        written[name] = tuple(_write_kernel(each, request.options, members) for each in pair)
    content = {
        "format": _FORMAT, "texts": dict(request.texts), "environment": dict(request.environment),
        "sources": sources(), "reading": vars(reading_of(request.runs, guard, constants)), "stages": encoded,
        "batch_bytes": dict(batch_bytes),
        "kernels": {n: [k and vars(k) for k in pair] for n, pair in written.items()},
    }  # fmt: skip
    text = json.dumps(content)
    again = decode(json.loads(text)["stages"], members, request.mesh, request.specs.paired, guard)
    if _texts(again) != _texts(stages):
        raise NotSaved("the step reads back as another one")
    members[_JSON] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    file.write(path, members)


def load(path: Path, request: Request) -> Saved:
    """A step that was saved for the same request, ready to run.

    Raises:
        FileNotFoundError: there is none.
        Refused: it is damaged, or something that it depends on has changed; the message names what.
        StateError: others may write to the file or to its folder.
    """
    members = file.read(path)
    try:
        content = from_json(_Content, json.loads(members.pop(_JSON).numpy().tobytes()))
    except (KeyError, ValueError, JsonError) as error:
        raise Refused(f"its description cannot be read ({error})") from error
    if content.format != _FORMAT:
        raise Refused(f"it has format {content.format}, and this fnshard reads {_FORMAT}")
    for kind, then, now in (
        ("made by another", content.environment, request.environment),
        ("made for another", content.texts, request.texts),
    ):
        unlike = [n for n in {**then, **now} if then.get(n) != now.get(n)]
        if unlike:
            raise Refused(f"it was {kind} {_cut(unlike)}")
    changed = changed_sources(content.sources)
    if changed:
        raise Refused(f"source files have changed: {_cut(changed)}")
    constants = [t for n, t in members.items() if n.startswith("constant/")]
    guard, unlike = guard_for(request.runs, content.reading, constants)
    if unlike:
        raise Refused(f"`fn` reads other values: {_cut(unlike)}")
    try:
        stages = decode(content.stages, members, request.mesh, request.specs.paired, guard)
        return Saved(stages, _load_kernels(content, stages, members, request.options), content.batch_bytes)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OSError, ImportError) as error:
        raise Refused(f"it cannot be read ({type(error).__name__}: {error})") from error


def write_kernels(path: Path, kernels: Mapping[tuple[str, bool], Boxed], options: Options) -> None:
    """Write compiled kernels for another process of this job; what has no form in a file is left out."""
    members: dict[str, Tensor] = {}
    written = []
    for (name, is_backward), each in kernels.items():
        with suppress(NotSaved):
            kernel = _write_kernel(each, options, members)
            written += [] if kernel is None else [[name, is_backward, vars(kernel)]]
    members[_JSON] = torch.frombuffer(bytearray(json.dumps(written).encode()), dtype=torch.uint8)
    file.write(path, members)


def read_kernels(path: Path) -> dict[tuple[str, bool], Boxed]:
    """What `write_kernels` wrote."""
    members = file.read(path)
    written = json.loads(members.pop(_JSON).numpy().tobytes())
    return {(name, back): _read_kernel(from_json(_Kernel, kernel), members) for name, back, kernel in written}


def _load_kernels(
    content: _Content, stages: Stages, members: Mapping[str, Tensor], options: Options
) -> Kernels:
    eager = compile_graphs(graphs_of(stages.kernels.values()), backend="eager", options={})
    loaded: Kernels = {}
    for name, pair in content.kernels.items():
        made = [_read_kernel(k, members) if k else eager.get((name, b)) for b, k in enumerate(pair)]
        loaded[name] = made[0], made[1]
    return loaded


def _write_kernel(each: Any, options: Options, members: dict[str, Tensor]) -> _Kernel | None:
    """A kernel's entry; its bytes become members, once for equal ones."""
    if each is None or options.backend == "eager" or isinstance(each, FunctionType):
        return None  # the graph itself runs
    artifact = artifact_of(each)
    if artifact is None:
        raise NotSaved("kernels that are more than C++ for the CPU")
    libraries = {}
    for name, data in artifact.libraries.items():
        libraries[name] = f"library/{digest(data)[:32]}"
        members[libraries[name]] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    constants = {}
    for name, value in artifact.constants.items():
        constants[name] = f"kernel/{len(members)}"
        members[constants[name]] = value.detach().contiguous()
    return _Kernel(artifact.source, libraries, artifact.entries, constants, artifact.results)


def _read_kernel(kernel: _Kernel, members: Mapping[str, Tensor]) -> Boxed:
    libraries = {n: members[m].numpy().tobytes() for n, m in kernel.libraries.items()}
    constants = {n: members[m] for n, m in kernel.constants.items()}
    return load_artifact(Artifact(kernel.source, libraries, kernel.entries, constants, kernel.results))


def _texts(stages: Stages) -> list[str]:
    return [
        str(stages.program),
        str(stages.segments),
        str(stages.schedule),
        *map(str, stages.kernels.values()),
    ]


def _cut(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
