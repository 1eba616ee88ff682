"""The house: public names, floors, private torch APIs, docstrings."""

from __future__ import annotations

import ast
import graphlib
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import fnshard
from fnshard.compiler.ir.values import Kind

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "fnshard").rglob("*.py"))

# Folders (and modules that stand alone), each above those that it may import.
FLOORS = [
    "errors",
    "tree",
    "mesh",
    "layout",
    "losses",
    "optim",
    "compiler.ir",
    "compiler.deferred",
    "functional",
    "compiler.rewrites",
    "compiler.frontend",
    "compiler.kernels",
    "compiler.place",
    "compiler.update",
    "compiler.schedule",
    "compiler",
    "runtime.files",
    "runtime.collectives",
    "runtime",
    "runtime.executor",
    "analysis",
    "step",
    "search",
    "hf",
    "checkpoint",
    "adapters",
    "debug",
    "plot",
    "launcher",
]

# Private torch APIs: which module may use which. Anything else has a public way.
PRIVATE = {
    "fnshard.tree": {"torch.utils._pytree"},
    "fnshard.adapters.norms": {"torch.nn.modules.batchnorm._BatchNorm"},
    "fnshard.compiler.deferred.recorder": {
        "torch.nn.init._no_grad_trunc_normal_",
        "torch.utils._python_dispatch",
    },
    "fnshard.compiler.schedule.instructions.leaves": {"torch._foreach_copy_", "torch._foreach_div_"},
    "fnshard.compiler.rewrites.fp8": {"torch._scaled_mm"},
    "fnshard.compiler.schedule.instructions.updates": {"torch._foreach_copy_"},
    "fnshard.compiler.update.slot_shapes": {"torch._subclasses"},
    "fnshard.compiler.update.trace": {"torch._subclasses"},
    "fnshard.optim.fused": {
        "torch._foreach_copy_",
        "torch._foreach_mul_",
        "torch._fused_adamw_",
        "torch._fused_sgd_",
    },
    "fnshard.optim.sums": {"torch._foreach_norm"},
    "fnshard.runtime.packing": {"torch._foreach_copy_"},
    "fnshard.runtime.tiers": {"torch._foreach_copy_"},
    "fnshard.runtime.collectives.simulated": {"torch._subclasses"},
    "fnshard.mesh.deadlock": {"torch.distributed.distributed_c10d._get_default_store"},
    "fnshard.compiler.ir.program": {
        "torch._ops",  # OpOverload; others import it from there
        "torch.ops.aten._unsafe_view",
    },
    "fnshard.compiler.frontend.functions": {"torch._C", "torch.autograd.function._SingleLevelFunction"},
    "fnshard.compiler.frontend.unsupported": {
        "torch._C",
        "torch._dynamo",
        "torch._ops",
        "torch._vmap_internals",
    },
    "fnshard.compiler.frontend.decompositions": {
        "torch._ctc_loss",
        "torch._grouped_mm",
        "torch._higher_order_ops",
        "torch.ops.aten._ctc_loss_backward",
        "torch.ops.aten._linalg_check_errors",
    },
    "fnshard.compiler.ir.failures": {"torch._subclasses"},
    "fnshard.compiler.frontend.normalize": {
        "torch._C",  # _set_grad_enabled, a node of every traced graph
        "torch.amp.autocast_mode._enter_autocast",
        "torch.amp.autocast_mode._exit_autocast",
    },
    "fnshard.compiler.frontend.contexts": {"torch._subclasses"},
    "fnshard.compiler.frontend.trace": {"torch._subclasses"},
    "fnshard.compiler.frontend.ragged.run": {"torch._subclasses"},
    "fnshard.compiler.frontend.control_flow": {"torch._higher_order_ops"},
    "fnshard.compiler.frontend.size_bounds": {"torch._check"},  # public, but for its name
    "fnshard.compiler.frontend.transforms": {
        "torch._C",
        "torch._functorch",
        "torch._guards",
        "torch.autograd.function._SingleLevelFunction",
        "torch.fx.experimental.proxy_tensor._temp_remove_pre_dispatch_torch_function_mode",
        "torch.ops.aten._efficientzerotensor",
        "torch.utils._python_dispatch",
    },
    "fnshard.compiler.kernels.differentiate": {
        "torch._functorch",
        "torch._guards",
        "torch._inductor",
        "torch._subclasses",
        "torch.fx._lazy_graph_module",
        "torch.ops.aten._assert_tensor_metadata",  # an op of every cast beneath autograd
        "torch.ops.aten._efficientzerotensor",
    },
    "fnshard.compiler.kernels.store": {
        "torch._functorch",  # its settings decide what a kernel becomes, and Inductor's
        "torch._inductor",
        "torch._subclasses",
        "torch.fx._lazy_graph_module",
    },
    "fnshard.compiler.ir.deferred_imports": {"torch._dynamo", "torch._guards"},  # what it puts off
    "fnshard.compiler.kernels.machine_code": {"torch._C", "torch._inductor"},
    "fnshard.compiler.kernels.weight_grads": {
        "torch._functorch"
    },  # which ops its partitioner holds for cheap
    "fnshard.compiler.kernels.inductor": {"torch._dynamo", "torch._guards", "torch._inductor"},
    "fnshard.runtime.executor.compiled_update": {
        "torch._inductor",  # its decompositions
        "torch._subclasses",
    },
    "fnshard.runtime.executor.fused_update": {"torch._foreach_copy_"},
    "fnshard.checkpoint.foreign.dcp_writing": {"torch.distributed.checkpoint.filesystem._StorageInfo"},
    "fnshard.checkpoint.foreign.formats": {"torch._subclasses"},
    "fnshard.analysis.footprint": {"torch._subclasses"},
    "fnshard.analysis.updates": {"torch._subclasses"},
    "fnshard.analysis.storages": {"torch.utils._python_dispatch"},
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in SOURCES}


@cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield every module and every name imported, at the top or inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


# ------------------------------------------------------------------ names and floors


def test_public_modules_name_their_api() -> None:
    assert [n for n in fnshard.__all__ if not hasattr(fnshard, n)] == []
    assert dir(fnshard) == sorted([*fnshard.__all__, "__version__"])
    modules = {n: m for n in fnshard.__all__ if isinstance(m := getattr(fnshard, n), ModuleType)}
    for node in trees()["fnshard"].body:  # and where the other names come from
        if isinstance(node, ast.ImportFrom) and all(a.name not in modules for a in node.names):
            modules[node.module] = sys.modules[node.module]
            assert {alias.name for alias in node.names} <= set(modules[node.module].__all__), node.module
    assert [
        n for n in fnshard.__all__ if n in modules and dir(modules[n]) != sorted(modules[n].__all__)
    ] == []
    missing = {n: [a for a in m.__all__ if not hasattr(m, a)] for n, m in modules.items()}
    assert len(modules) > 25 and not any(missing.values())


def floor_of(module: str) -> int:
    """Return the index in FLOORS of the longest name that the module lies under."""
    name = module.removeprefix("fnshard").removeprefix(".")
    found = [f for f in FLOORS if name == f or name.startswith(f + ".")]
    if found:
        return FLOORS.index(max(found, key=len))
    return len(FLOORS) if name == "" else -1  # the root is above all floors; -1: on none


def imported_modules(module: str, trees: dict[str, ast.AST]) -> set[str]:
    """Return the modules that one imports, inside functions and under TYPE_CHECKING too.

    A package is among them only if a name of its own is meant.
    """
    found: set[str] = set()
    for node in ast.walk(trees[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & trees.keys()
            found |= inner or {node.module}
    return (found & trees.keys()) - {module}


@pytest.mark.parametrize("module", MODULES)
def test_modules_import_only_from_beneath(module: str) -> None:
    assert floor_of(module) >= 0, "a folder without a floor"
    above = {m for m in imported_modules(module, trees()) if floor_of(m) > floor_of(module)}
    assert sorted(above) == []


def test_no_modules_import_each_other() -> None:
    experiments = {name_of(p): ast.parse(p.read_text()) for p in (ROOT / "experiments").rglob("*.py")}
    every = trees() | experiments
    graph = {module: imported_modules(module, every) for module in every}
    list(graphlib.TopologicalSorter(graph).static_order())


# Packages that take long to import: DTensor comes with the first, and SymPy with most.
LATE = ("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor",
        "torch._dynamo", "torch._inductor", "matplotlib", "transformers", "triton")  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_what_is_slow_to_import_is_imported_where_it_is_used(module: str) -> None:
    """`import fnshard` is in every start, a rank's too."""
    tops = [node for node in trees()[module].body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {name for node in tops for name in imports(node)}
    assert sorted(n for n in names if any(n == late or n.startswith(f"{late}.") for late in LATE)) == []


def test_the_front_room_is_small() -> None:
    entries = [
        p for p in (ROOT / "fnshard").iterdir() if p.name not in ("__pycache__", "LICENSE", "py.typed")
    ]
    assert len(entries) <= 19, sorted(p.name for p in entries)


def test_the_library_knows_no_configuration_and_no_experiments() -> None:
    banned = {"hydra", "omegaconf", "transformers", "experiments", "tests", "einops", "tqdm", "matplotlib"}
    found = {
        (module, name)
        for module, tree in trees().items()
        for name in imports(tree)
        if (top := name.split(".")[0]) in banned
        and not (top == "matplotlib" and module.startswith("fnshard.plot."))
        and not (top == "transformers" and module == "fnshard.hf.attention_registry")
    }
    assert found == set()


def test_the_library_depends_on_what_it_imports_alone() -> None:
    """Extras too: their packages are imported where they are used, and may be absent."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {re.match(r"\w+", each).group() for each in project["dependencies"]}
    extras = {"matplotlib", "peft", "transformers", "bitsandbytes"}
    found = {name.split(".")[0] for tree in trees().values() for name in imports(tree)}
    assert found - sys.stdlib_module_names - {"fnshard", "typing_extensions"} - extras == named


# ------------------------------------------------------------------ private APIs of torch


def private_uses(tree: ast.AST) -> set[str]:
    """Return dotted torch names with a leading underscore in some part, cut after that part.

    They are names as written from "torch" on: `aten._x`, by an alias, is not seen.
    """
    found = set()
    for name in [*imports(tree), *_chains(tree)]:
        parts = name.split(".")
        if parts[0] != "torch":
            continue
        hidden = next((i for i, p in enumerate(parts) if p.startswith("_") and not p.startswith("__")), None)
        if hidden is not None:
            found.add(".".join(parts[: hidden + 1]))
    return found


def _chains(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name):
            yield ".".join([node.id, *reversed(parts)])


def test_private_torch_apis_are_used_where_they_are_listed() -> None:
    found = {module: uses for module, tree in trees().items() if (uses := private_uses(tree))}
    assert found == PRIVATE


# ------------------------------------------------------------------ docstrings, paths


@pytest.mark.parametrize("module", MODULES)
def test_public_functions_and_classes_are_documented(module: str) -> None:
    """Modules, and all that has a public name at the top of one; methods of classes that users meet."""
    tree = trees()[module]
    bare = [] if ast.get_docstring(tree) or not tree.body else [module]
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            bare.append(node.name)
        elif isinstance(node, ast.ClassDef) and _named_by_users(module):
            bare += [
                f"{node.name}.{m.name}"
                for m in node.body
                if isinstance(m, ast.FunctionDef)
                and not m.name.startswith("_")
                and not ast.get_docstring(m)
                and "overload" not in map(ast.unparse, m.decorator_list)
            ]
    assert bare == []


def _named_by_users(module: str) -> bool:
    """Return whether a module lies in a folder whose classes users meet."""
    folders = ("layout", "losses", "optim", "adapters", "step", "checkpoint", "hf", "mesh", "tree", "errors")
    return module.partition("fnshard.")[2].split(".")[0] in (*folders, "functional")


def test_no_machine_paths() -> None:
    path = re.compile(r"(?<![\w.])/(work|opt|root|home|mnt|data|Users)/\w")
    texts = [*SOURCES, *(ROOT / "experiments").rglob("*.py"), *(ROOT / "conf").rglob("*.yaml"),
             *(ROOT / "tests").rglob("*.py"), ROOT / "pyproject.toml", *ROOT.glob("*.md")]  # fmt: skip
    found = [f"{f.relative_to(ROOT)}: {m.group()}" for f in texts for m in path.finditer(f.read_text())]
    assert found == []


def test_what_is_above_a_step_uses_its_public_names() -> None:
    above = [
        m for m in trees() if m.split(".")[1:2] in (["debug"], ["checkpoint"], ["hf"], ["plot"], ["adapters"])
    ]
    found = [
        f"{module}:{node.lineno} {node.attr}"
        for module in [*above, *(m for m in trees() if m.startswith("fnshard.search."))]
        for node in ast.walk(trees()[module])
        if isinstance(node, ast.Attribute) and node.attr in ("_cache", "_runner")
    ]
    assert len(above) > 25 and found == []


def test_no_confessions() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", line)
    ]
    assert found == []


def test_the_map_names_every_module() -> None:
    """`fnshard/__init__` is the map: a module that it leaves out is one that nobody finds."""
    named = set(re.findall(r"`([a-z_]+)/?`", fnshard.__doc__))
    modules = {m.name[: -len(".py")] for m in (ROOT / "fnshard").glob("*.py") if m.name != "__init__.py"}
    packages = {m.parent.name for m in (ROOT / "fnshard").glob("*/__init__.py")}
    assert modules | packages <= named


def test_kinds_of_values_have_no_second_grammar() -> None:
    """Whoever needs the kind of a value's name asks it; a prefix in another module takes its text apart."""
    kinds = "|".join(k for k in map(str, Kind) if len(k) > 1)
    prefix = re.compile(rf"""(?:\bf|(?<!\w))["'](t:|h:)?({kinds})(\{{|["'])""")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in SOURCES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if prefix.search(line) and path.name != "values.py"
    ]
    assert found == []
