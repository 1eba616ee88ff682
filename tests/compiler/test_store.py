"""Kernels in files: what is read equals what is made, what differs is made anew, and no file is an error."""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from test_weight_grads import conv_block, expert_block, transformer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from toys import WIDTH, chain, lower, rows, run_chain

import fnshard as fs
from fnshard.compiler.kernels import store
from fnshard.compiler.kernels.differentiate import _make_from_recipe as make
from fnshard.compiler.kernels.kernel import Kernel
from fnshard.compiler.kernels.remat import NAMED, Policy
from fnshard.compiler.kernels.segment_source import SegmentSource
from fnshard.compiler.kernels.store import Recipe


def by_dropout() -> tuple[Any, ...]:
    """Random numbers, indices and integers, numbers that are infinite, an autocast."""

    def fn(p: Any, x: Tensor) -> Tensor:
        x = F.dropout(torch.tanh(x @ p["layers.0.w"]), 0.3, training=True)
        with torch.autocast("cpu", torch.bfloat16):
            x = (x @ p["layers.1.w"]).float()
        mask = torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril()
        scores = (x.T @ x @ p["layers.2.w"]).masked_fill(~mask, -math.inf)
        return scores.softmax(-1)[torch.arange(WIDTH).flip(0)[::2]].std()

    return fn, chain(3), rows()


def by_narrow_sums() -> tuple[Any, ...]:
    fn = lambda p, x: run_chain(p, x.bfloat16(), lambda x, i: F.layer_norm(x, [WIDTH])).float().sum()  # noqa: E731
    return fn, {path: leaf.bfloat16() for path, leaf in chain(3).items()}, rows()


ZOO = {
    "transformer": transformer,
    "convolutions": conv_block,
    "experts": expert_block,
    "dropout": by_dropout,
    "bf16": by_narrow_sums,
}
POLICIES = {
    "all": Policy(),
    "none": NAMED["unit"],
    "half": Policy(0.5),
    "matmul": Policy(0.0, save=("matmul",)),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    """A store of this test's own."""
    with (
        mock.patch.dict(os.environ, FNSHARD_CACHE=str(tmp_path)),
        mock.patch.dict(store._memory, clear=True),
    ):
        yield tmp_path / "kernels"


@cache
def sources(name: str) -> tuple[SegmentSource, ...]:
    fn, params, *batch = ZOO[name]()
    return tuple(lower(fn, params, *batch, ranks=1).segments.sources.values())


def recipe_of(name: str = "bf16", policy: Policy = NAMED["unit"], apart: bool = False) -> Recipe:
    source = max(sources(name), key=lambda each: len(each.code))
    return Recipe(source, policy, True, "cpu", apart)


def refuse(_: Recipe) -> Kernel:
    raise AssertionError("a kernel is made")


def recall(recipe: Recipe) -> Kernel:
    """The kernel as another process reads it."""
    store._memory.clear()
    return store.make_all({"k": recipe}, refuse)["k"]


def keep(recipe: Recipe) -> Kernel:
    return store.make_all({"k": recipe}, make)["k"]


def files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name != "locks"]


def run(kernel: Kernel) -> list[Tensor]:
    """All results of all graphs, on the same random numbers each time."""
    draw, results = torch.Generator().manual_seed(0), []
    for module in kernel.modules.values():
        fakes = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
        inputs = []
        for fake in fakes:
            real = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
            numbers = torch.randint(0, 2, fake.shape, generator=draw)
            inputs.append(real.copy_(numbers if not fake.is_floating_point() else numbers + 0.5))
        results += module(*inputs)
    return results


def described(kernel: Kernel) -> list[Any]:
    """All that a compiler, a schedule and a ledger read of a kernel."""
    seen: list[Any] = [
        kernel.as_text(),
        kernel.saved,
        kernel.between,
        kernel.kept,
        kernel.grads,
        kernel.tangents,
    ]
    for way, half in kernel.halves.items():
        seen.append((way, half.inputs, half.grads, half.shared, half.tangent_strides))
    for way, module in kernel.modules.items():
        for node in module.graph.nodes:
            meta = {key: node.meta[key] for key in store.METAS if node.meta.get(key) is not None}
            meta |= {"original_aten": str(meta.get("original_aten"))}  # torch has several objects of a name
            value = meta.pop("val", None)
            parts = [v for v in (value if isinstance(value, list | tuple) else [value]) if v is not None]
            seen.append((way, node.name, node.op, node.target, meta, [_memory_of(part) for part in parts]))
    return seen


def _memory_of(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (value.shape, value.stride(), value.dtype, value.device, value.requires_grad,
            value.storage_offset(), value.untyped_storage().nbytes())  # fmt: skip


# ------------------------------------------------------------------ what is read equals what is made


@pytest.mark.suite(
    {"convolutions-none-apart": "references of all kinds", "dropout-half-whole": "random numbers, autocast",
     "bf16-matmul-whole": "ops that are saved"}
)  # fmt: skip
@pytest.mark.parametrize("apart", [False, True], ids=["whole", "apart"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ZOO)
def test_a_kernel_from_its_file_is_the_one_that_was_made(name: str, policy: str, apart: bool) -> None:
    for source in sources(name):
        recipe = Recipe(source, POLICIES[policy], True, "cpu", apart)
        fresh = keep(recipe)
        read = recall(recipe)
        assert read is not fresh and read.source is source
        assert described(read) == described(fresh)
        for ours, theirs in zip(run(read), run(fresh), strict=True):
            assert torch.equal(ours.nan_to_num(), theirs.nan_to_num()) and ours.stride() == theirs.stride()


def test_values_without_data_keep_all_that_describes_them() -> None:
    mode = FakeTensorMode()
    with mode:
        whole = torch.empty(4, 6, dtype=torch.bfloat16)
        values = [whole, whole[1:, 2:5], whole[0].expand(3, 6), torch.empty(3, requires_grad=True),
                  torch.empty(0, 2), torch.tensor(1), torch.empty_strided((2, 3), (1, 2))]  # fmt: skip
    read = [store._decode(store._encode(value, {}), [], mode) for value in values]
    assert [_memory_of(value) for value in read] == [_memory_of(value) for value in values]
    assert all(value.fake_mode is mode for value in read)


@pytest.mark.long  # test_inductor.py: a second start compiles nothing
def test_inductor_finds_what_it_compiled_of_the_fresh_kernel(tmp_path: Path) -> None:
    """Otherwise a second start would compile everything again."""
    from torch._dynamo.utils import counters

    from fnshard.compiler.kernels.inductor import compile_graphs, graphs_of

    recipe = recipe_of("bf16")
    fresh = replace(keep(recipe), name="k0")
    read = replace(recall(recipe), name="k0")
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "FNSHARD_CACHE": "off"}
    with mock.patch.dict(os.environ, caches):
        compile_graphs(graphs_of([fresh]), backend="inductor", options={})
        counters["inductor"].clear()
        compile_graphs(graphs_of([read]), backend="inductor", options={})
    assert counters["inductor"]["fxgraph_cache_hit"] == 2 and not counters["inductor"]["fxgraph_cache_miss"]


def test_a_step_of_another_process_makes_no_kernel(folder: Path) -> None:
    fn, params, x = (lambda p, x: run_chain(p, x, lambda x, i: torch.tanh(x)).sum()), chain(3), rows()
    mesh = fs.make_mesh(shard=1, device="cpu")
    make_step = partial(fs.shard_step, fn, fs.presets.full_shard(params, mesh), mesh=mesh, backend="eager")
    expected = make_step()(dict(params), x)
    assert len(files(folder)) > 1
    store._memory.clear()
    with mock.patch("fnshard.compiler.kernels.differentiate.trace_joint", refuse):
        found = make_step()(dict(params), x)
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[1][path], expected[1][path]) for path in params)


# ------------------------------------------------------------------ keys


def _source(
    change: Callable[[Tensor], Tensor] = torch.tanh, dtype: Any = torch.float64, width: int = WIDTH
) -> SegmentSource:
    weight = torch.ones(width, width, dtype=dtype)
    program = lower(lambda p, x: change(x @ p["w"]).sum(), {"w": weight}, weight, ranks=1)
    return max(program.segments.sources.values(), key=lambda each: len(each.code))


def test_keys_differ_where_anything_that_matters_differs() -> None:
    plain = Recipe(_source(), Policy(), True, "cpu", False)
    others = {
        "op": plain._replace(source=_source(torch.sin)),
        "dtype": plain._replace(source=_source(dtype=torch.float32)),
        "shape": plain._replace(source=_source(width=WIDTH + 1)),
        "number": plain._replace(source=_source(lambda x: x * 2.0)),
        "another number": plain._replace(source=_source(lambda x: x * math.nextafter(2.0, 3.0))),
        "an integer": plain._replace(source=_source(lambda x: x * 2)),
        "infinity": plain._replace(source=_source(lambda x: x.clamp(max=math.inf))),
        "minus infinity": plain._replace(source=_source(lambda x: x.clamp(max=-math.inf))),
        "autocast": plain._replace(source=_source(torch.autocast("cpu", torch.bfloat16)(lambda x: x @ x))),
        "no autocast": plain._replace(source=_source(lambda x: x @ x)),
        "budget": plain._replace(policy=Policy(0.5)),
        "nearly the same budget": plain._replace(policy=Policy(math.nextafter(0.5, 1))),
        "saved ops": plain._replace(policy=Policy(0.0, save=("matmul",))),
        "nothing saved": plain._replace(policy=Policy(0.0)),
        "forward": plain._replace(trainable=False),
        "target": plain._replace(target="cuda"),
        "apart": plain._replace(apart=True),
    }
    keys = {name: store.key_of(recipe) for name, recipe in {"plain": plain, **others}.items()}
    assert None not in keys.values() and len(set(keys.values())) == len(keys), keys
    assert store.key_of(Recipe(_source(), Policy(), True, "cpu", False)) == keys["plain"]

    # Settings of torch, and another fnshard.
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    torch.set_float32_matmul_precision("high")
    settings = [store.key_of(plain)]
    torch.set_float32_matmul_precision("highest")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        settings.append(store.key_of(plain))
    with inductor_config.patch(emulate_precision_casts=True):
        settings.append(store.key_of(plain))
    with functorch_config.patch(ban_recompute_used_far_apart=False):
        settings.append(store.key_of(plain))
    with mock.patch.object(torch, "__version__", "3.0"):
        settings.append(store.key_of(plain))
    with mock.patch.object(store, "SOURCES", "another fnshard"):
        settings.append(store.key_of(plain))
    assert len({keys["plain"], *settings}) == 1 + len(settings)
    assert store.key_of(plain) == keys["plain"]


@torch.library.custom_op("fnshard_test_store::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, grad: grad * 2)


def test_kernels_with_operators_of_ones_own_are_not_kept(folder: Path) -> None:
    """Their formulas may change without a trace of it in the graph."""
    source = _source(doubled)
    assert store.key_of(Recipe(source, Policy(), True, "cpu", False)) is None
    keep(Recipe(source, Policy(), True, "cpu", False))
    assert files(folder) == []


def test_lines_of_code_are_those_of_the_program_at_hand() -> None:
    """A kernel of another program would name that one's lines."""
    first, second = _source(), _source()
    for source, line in ((first, "a.py:1"), (second, "b.py:2")):
        next(n for n in source.graph.nodes if n.op == "call_function").meta["stack_trace"] = line
    keys = [store.key_of(Recipe(source, Policy(), True, "cpu", False)) for source in (first, second)]
    assert None not in keys and len(set(keys)) == 2


# ------------------------------------------------------------------ faults of files


@pytest.mark.parametrize("damage", [
    lambda path: path.write_bytes(path.read_bytes()[:-1]),
    lambda path: path.write_bytes(path.read_bytes()[: len(store.HEADER) + 5]),
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(path.read_bytes()[:200] + b"?" + path.read_bytes()[201:]),
    lambda path: path.write_bytes(store.HEADER + hashlib.sha256(b"").hexdigest().encode() + b"\n"),
    lambda path: path.write_bytes(b"cposix\nsystem\n(S'exit'\ntR."),
    lambda path: (path.unlink(), path.mkdir()),
], ids=["one byte short", "torn", "empty", "one byte", "no body", "a pickle", "a folder"])  # fmt: skip
def test_what_is_damaged_is_made_anew(folder: Path, damage: Callable[[Path], Any]) -> None:
    recipe = recipe_of("bf16")
    expected = described(keep(recipe))
    (path,) = files(folder)
    damage(path)
    store._memory.clear()
    makes = mock.Mock(side_effect=make)
    assert described(store.make_all({"k": recipe}, makes)["k"]) == expected and makes.call_count == 1
    if path.is_file():
        assert described(recall(recipe)) == expected  # the file is whole again


def test_a_file_cannot_name_what_is_not_an_operator() -> None:
    for word in (["op", "os::system", ""], ["op", "mylib::op", ""], ["dtype", "load"], ["eval", "1"]):
        with pytest.raises((ValueError, KeyError)):
            store._decode(word, [], None)


def test_without_files_kernels_are_made(folder: Path, tmp_path: Path) -> None:
    recipe = recipe_of("bf16")
    expected = described(make(recipe))
    store._memory.clear()  # of what the recipe was taken from
    (tmp_path / "a file").write_text("")
    loose = tmp_path / "loose" / "kernels"
    loose.mkdir(parents=True)
    loose.chmod(0o777)  # anybody may write here
    for place in ("off", str(tmp_path / "a file"), str(tmp_path / "loose"), "/proc/nowhere"):
        with mock.patch.dict(os.environ, FNSHARD_CACHE=place):
            assert store.find_folder() is None
            assert described(store.make_all({"k": recipe}, make)["k"]) == expected
    assert list(loose.iterdir()) == [] and not store._memory

    # A folder to read from, and a full disk.
    with mock.patch("tempfile.NamedTemporaryFile", side_effect=OSError(30, "Read-only file system")):
        assert described(keep(recipe)) == expected
    store._memory.clear()
    with mock.patch("os.replace", side_effect=OSError(28, "No space left on device")):
        assert described(keep(recipe)) == expected
    assert files(folder) == []


def test_files_are_the_users_alone_and_bounded(folder: Path) -> None:
    keep(recipe_of("bf16"))
    (first,) = files(folder)
    assert folder.stat().st_mode & 0o777 == 0o700 and first.stat().st_mode & 0o777 == 0o600
    os.utime(first, (1, 1))
    recall(recipe_of("bf16"))
    assert first.stat().st_mtime > 1  # it was read
    os.utime(first, (1, 1))
    with mock.patch.object(store, "MOST_BYTES", first.stat().st_size):
        keep(recipe_of("dropout"))
    assert first not in files(folder)


# ------------------------------------------------------------------ several processes


def test_two_processes_share_the_work(folder: Path) -> None:
    """Each makes what the other is not making, and reads the rest."""
    recipes = {str(budget): recipe_of("bf16", Policy(budget)) for budget in (1.0, 0.0, 0.5)}
    with mock.patch.dict(os.environ, FNSHARD_CACHE="off"):
        ready = store.make_all(recipes, make)
    store.find_folder()
    context = multiprocessing.get_context("fork")
    both, answers = context.Barrier(2), context.Queue()

    def work() -> None:
        made = []

        def make_slowly(recipe: Recipe) -> Kernel:
            made.append(str(recipe.policy.budget))
            if len(made) == 1:
                both.wait(60)  # both are at work
            return ready[made[-1]]

        answers.put(
            (made, {name: described(k)[0] for name, k in store.make_all(recipes, make_slowly).items()})
        )

    processes = [context.Process(target=work) for _ in range(2)]
    for process in processes:
        process.start()
    (first, ours), (second, theirs) = (answers.get(timeout=100) for _ in processes)
    for process in processes:
        process.join(100)
    assert first and second and sorted(first + second) == sorted(recipes)
    assert ours == theirs == {name: kernel.as_text() for name, kernel in ready.items()}
    assert len(files(folder)) == 3


def test_who_waits_in_vain_makes_the_kernel_itself(folder: Path) -> None:
    recipe = recipe_of("bf16")
    folder.parent.mkdir(exist_ok=True)
    store.find_folder()
    place = int(store.key_of(recipe)[:15], 16)
    lock = (
        "import fcntl, sys; f = open(sys.argv[1], 'ab'); fcntl.lockf(f, fcntl.LOCK_EX, 1, int(sys.argv[2]));"
    )
    command = [sys.executable, "-c", lock + "print(flush=True); input()", str(folder / "locks"), str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with mock.patch.object(store, "WAIT_S", 0.05):
            assert described(keep(recipe)) == described(make(recipe))
        assert files(folder) == []
        holder.stdin.close()
    keep(recipe)
    assert len(files(folder)) == 1


def test_a_folder_that_cannot_be_written_is_read(tmp_path: Path) -> None:
    store.write_file(tmp_path, "kept", store.seal(b"all of it"))
    with mock.patch.object(os, "utime", side_effect=PermissionError):
        assert store.read_file(tmp_path, "kept") == b"all of it"
    assert store.read_file(tmp_path, "another") is None
