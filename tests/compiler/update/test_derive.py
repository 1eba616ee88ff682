"""Derived updates: all ranks' blocks in lock step, in one process, against the whole leaf."""

import math

import pytest
import torch

from fnshard.compiler.update.derive import Compute, Reduce, Stack, derive
from fnshard.compiler.update.trace import trace_update
from fnshard.layout.partition import Fused, P, block_shape, boxes, slot_layout
from fnshard.mesh import make_mesh
from fnshard.optim.compact import decode, encode
from fnshard.optim.optimizer import Optimizer, Step, apply_updates, init_slots

F64 = torch.float64
RATE = lambda count: 0.1 / (1 + int(count))  # noqa: E731


# ------------------------------------------------------------------ optimizers, by the contract alone
def moments(slots, grad, step, b1=0.9, b2=0.99):
    mu, nu = slots["mu"].lerp(grad, 1 - b1), slots["nu"].lerp(grad.square(), 1 - b2)
    t = step.count + 1
    return mu, nu, (mu / (1 - b1**t)) / ((nu / (1 - b2**t)).sqrt() + 1e-8)


def two(path, param):
    return {"mu": torch.zeros_like(param), "nu": torch.zeros_like(param)}


def adamw():
    def update(path, grad, slots, param, step):
        mu, nu, made = moments(slots, grad, step)
        return -step.host(RATE).to(param.dtype) * (made + 0.01 * param), {"mu": mu, "nu": nu}

    return Optimizer("adamw", two, update)


def lamb():
    def update(path, grad, slots, param, step):
        mu, nu, made = moments(slots, grad, step)
        made = made + 0.01 * param
        ratio = param.norm() / made.norm().clamp(min=1e-6)
        return -0.1 * ratio * made, {"mu": mu, "nu": nu}

    return Optimizer("lamb", two, update)


def adafactor():
    def init(path, param):
        if param.dim() < 2:
            return {"moment": torch.zeros_like(param)}
        one = [*param.shape[:-2], 1, 1]
        return {
            "rows": param.new_zeros([*param.shape[:-1], 1]),
            "columns": param.new_zeros([*param.shape[:-2], 1, param.shape[-1]]), "mean": param.new_zeros(one),
        }  # fmt: skip

    def update(path, grad, slots, param, step):
        weight = ((step.count + 1).double() ** -0.8).to(param.dtype)
        square = grad.square()
        if param.dim() < 2:
            new = {"moment": slots["moment"].lerp(square, weight)}
            moment = new["moment"]
        else:
            new = {
                "rows": slots["rows"].lerp(square.mean(-1, keepdim=True), weight),
                "columns": slots["columns"].lerp(square.mean(-2, keepdim=True), weight),
                "mean": slots["mean"].lerp(square.mean((-2, -1), keepdim=True), weight),
            }
            moment = new["rows"] * new["columns"] / new["mean"].clamp(min=1e-16)
        made = grad * moment.clamp(min=1e-14).rsqrt()
        size = param.square().mean().sqrt().clamp(min=1e-3)
        most = made.square().mean().sqrt().clamp(min=1.0)
        return -0.01 * size / most * made, new

    return Optimizer("adafactor", init, update)


def rows():
    def update(path, grad, slots, param, step):
        mean = slots["mean"].lerp(grad, 0.1)
        norm = param.norm(dim=-1, keepdim=True) if param.dim() > 1 else param.abs()
        return -0.01 * mean.sign() * norm, {"mean": mean}

    return Optimizer("rows", lambda path, param: {"mean": torch.zeros_like(param)}, update)


def spread():
    def update(path, grad, slots, param, step):
        top = torch.maximum(slots["top"] * 0.9, grad.abs().amax())
        low, least = grad.amin(), int(grad.numel() > 1)
        return -0.1 * (grad - low) / (top + grad.std(correction=least) + grad.var(correction=least)), {
            "top": top
        }

    return Optimizer("spread", lambda path, param: {"top": param.new_zeros(())}, update)


def keyed():
    """Make an optimizer with noise by the element's place and a key, by integer arithmetic."""

    def update(path, grad, slots, param, step):
        place = torch.arange(param.numel(), device=param.device).view(param.shape)
        bits = (place * 2654435761 + slots["key"] * 40503) % 65536
        noise = bits.to(param.dtype) / 65536 - 0.5
        return -0.01 * (grad + 0.1 * noise), {"key": slots["key"] + 1}

    return Optimizer("keyed", lambda path, param: {"key": torch.zeros((), dtype=torch.int64)}, update)


def eightbit(block=4):
    def fits(param):
        return param.dim() > 1 and param.shape[-1] % block == 0

    def init(path, param):
        if not fits(param):
            return two(path, param)
        scales = (*param.shape[:-1], param.shape[-1] // block)
        out = {n: torch.zeros_like(param, dtype=torch.uint8) for n in ("mu", "nu")}
        return out | {f"{n}_scales": param.new_zeros(scales) for n in ("mu", "nu")}

    def update(path, grad, slots, param, step):
        coded_ = "mu_scales" in slots
        if coded_:
            given = {n: decode(slots[n], slots[f"{n}_scales"], n == "mu") for n in ("mu", "nu")}
        else:
            given = slots
        mu, nu, made = moments(given, grad, step)
        new = {"mu": mu, "nu": nu}
        if coded_:
            for n in ("mu", "nu"):
                new[n], new[f"{n}_scales"] = encode(new[n], block, n == "mu")
        return -0.01 * made, new

    return Optimizer("eightbit", init, update)


def newton_schulz(x, steps=5):
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x.mT if tall else x


def muon(dtype=None):
    def update(path, grad, slots, param, step):
        mu = slots["mu"].lerp(grad, 0.05)
        if param.dim() < 2:
            return -0.1 * mu, {"mu": mu}
        made = grad.lerp(mu, 0.95)
        made = newton_schulz(made if dtype is None else made.to(dtype))
        factor = 0.2 * max(param.shape[-2:]) ** 0.5
        return -step.host(RATE).to(param.dtype) * (made * factor + 0.1 * param), {"mu": mu}

    return Optimizer("muon", lambda path, param: {"mu": torch.zeros_like(param)}, update)


def shampoo(root="eigh"):
    """Make an optimizer with preconditioners of both sides, by eigenvectors, or a basis by QR."""

    def init(path, param):
        if param.dim() < 2:
            return {}
        sides = {"left": param.shape[-2], "right": param.shape[-1]}
        return {
            n: torch.eye(s, dtype=param.dtype).expand(*param.shape[:-2], s, s).clone()
            for n, s in sides.items()
        }

    def inverse_root(matrix):
        if root == "qr":
            return torch.linalg.qr(matrix).Q
        values, vectors = torch.linalg.eigh(matrix)
        return vectors @ (values.clamp(min=1e-6) ** -0.25).unsqueeze(-1).mul(vectors.mT)

    def update(path, grad, slots, param, step):
        if param.dim() < 2:
            return -0.1 * grad, {}
        left, right = slots["left"] + grad @ grad.mT, slots["right"] + grad.mT @ grad
        made = inverse_root(left) @ grad @ inverse_root(right)
        return -0.1 * made / made.norm(), {"left": left, "right": right}

    return Optimizer("shampoo", init, update)


def soap(every=2):
    """Make Adam in a basis of one side, made anew every second step by a `torch.cond`."""

    def init(path, param):
        if param.dim() < 2:
            return two(path, param)
        square = [*param.shape[:-1], param.shape[-2]]
        eye = torch.eye(param.shape[-2], dtype=param.dtype).expand(square).clone()
        return {**two(path, param), "left": param.new_zeros(square), "basis": eye}

    def update(path, grad, slots, param, step):
        if param.dim() < 2:
            mu, nu, made = moments(slots, grad, step)
            return -0.01 * made, {"mu": mu, "nu": nu}
        left, basis = slots["left"].lerp(grad @ grad.mT, 0.1), slots["basis"]
        rotated = basis.mT @ grad
        mu, nu = slots["mu"].lerp(rotated, 0.1), slots["nu"].lerp(rotated.square(), 0.01)
        made = basis @ (mu / (nu.sqrt() + 1e-8))
        basis = torch.cond(
            step.count % every == 0,
            lambda left, basis: torch.linalg.qr(left @ basis + basis).Q.contiguous(),
            lambda left, basis: basis.clone(), (left, basis),
        )  # fmt: skip
        return -0.01 * (made + 0.1 * param), {"mu": mu, "nu": nu, "left": left, "basis": basis}

    return Optimizer("soap", init, update)


def median():
    """Make an optimizer that needs the whole leaf in order, and no matrix."""

    def update(path, grad, slots, param, step):
        middle = grad.flatten().sort().values[grad.numel() // 2]
        return -0.1 * (grad - middle), {}

    return Optimizer("median", lambda path, param: {}, update)


WHOLE = {
    "muon": muon, "shampoo": shampoo, "shampoo_qr": lambda: shampoo("qr"), "soap": soap, "median": median,
}  # fmt: skip
LOCAL = {
    "adamw": adamw, "lamb": lamb, "adafactor": adafactor, "rows": rows, "spread": spread, "keyed": keyed,
    "eightbit": eightbit,
}  # fmt: skip


# ------------------------------------------------------------------ ranks in lock step
def cut(full, layout, mesh, at):
    """Return a rank's block, whose padding is NaN (or the largest integer)."""
    bad = math.nan if full.is_floating_point() else torch.iinfo(full.dtype).max
    block = torch.full(block_shape(full.shape, layout, mesh), bad, dtype=full.dtype)
    for of_full, of_block in boxes(full.shape, layout, mesh, at):
        block[of_block] = full[of_full]
    return block


def put(full, block, layout, mesh, at):
    for of_full, of_block in boxes(full.shape, layout, mesh, at):
        full[of_full] = block[of_block]


class Ranks:
    """The ranks of a mesh, each with its values by name."""

    def __init__(self, mesh, derived, layouts, numbers):
        self.mesh, self.derived, self.layouts, self.numbers = mesh, derived, layouts, numbers
        self.places = [mesh.coordinate(rank) for rank in range(mesh.size)]

    def index(self, rank, axes):
        out = 0
        for axis in axes.split(","):
            out = out * self.mesh.axis_size(axis) + self.places[rank][axis]
        return torch.tensor(out)

    def groups(self, axes):
        found = {}
        for rank, place in enumerate(self.places):
            found.setdefault(tuple(v for a, v in place.items() if a not in axes), []).append(rank)
        return list(found.values())

    def run(self, inputs):
        """Run all ranks from whole inputs to whole results."""
        env = [dict(self.numbers) for _ in self.places]
        for name, full in inputs.items():
            for rank, place in enumerate(self.places):
                env[rank][name] = cut(full, self.layouts[name], self.mesh, place)
        owners = {}
        for step in self.derived.steps:
            if isinstance(step, Compute):
                for rank in [*owners] if step.whole else range(len(env)):
                    given = env[rank] | owners[rank] if step.whole else env[rank]
                    given |= {r: self.index(rank, r[6:]) for r in step.reads if r.startswith("index.")}
                    made = step.run(*(given[r] for r in step.reads))
                    for name, value in zip(step.writes, made, strict=True):
                        shape, dtype = self.shape_and_dtype(name)
                        assert (tuple(value.shape), value.dtype) == (shape, dtype), name
                        (owners if step.whole else env)[rank][name] = value
            elif isinstance(step, Reduce):
                for group in self.groups(step.axes):
                    for sent, received in zip(step.sends, step.receives, strict=True):
                        every = torch.stack([env[rank][sent] for rank in group])
                        made = every.sum(0, dtype=every.dtype) if step.how == "sum" else every.amax(0)
                        for rank in group:
                            env[rank][received] = made
            elif isinstance(step, Stack):
                for number, group in enumerate(self.groups(step.axes)):
                    owner = group[(number + 1) % len(group)]
                    rows = zip(step.sends, step.receives, step.layouts, step.shapes, step.dtypes, strict=True)
                    for sent, received, layout, shape, dtype in rows:
                        if step.back:
                            whole = owners[owner][sent]
                            assert (tuple(whole.shape), whole.dtype) == (shape, dtype)
                            for rank in group:
                                env[rank][received] = cut(whole, layout, self.mesh, self.places[rank])
                        else:
                            whole = torch.full(shape, 77, dtype=dtype)
                            for rank in group:
                                put(whole, env[rank][sent], layout, self.mesh, self.places[rank])
                            owners.setdefault(owner, {})[received] = whole
        return env

    def shape_and_dtype(self, name):
        if name in self.derived.values:
            return self.derived.values[name]
        shape, dtype = self.wholes[name]
        return block_shape(shape, self.layouts[name], self.mesh), dtype


def check_order(derived):
    """Check that nothing reads an input whose result is written."""
    written = set()
    for step in derived.steps:
        assert not written & {*(step.reads if isinstance(step, Compute) else step.sends)}
        made = step.writes if isinstance(step, Compute) else step.receives
        written |= {"param" if name == "update" else name for name in made if not name.startswith("v")}


def layouts_of(shape, layout, slots, mesh):
    out = dict.fromkeys(("grad", "param", "update"), layout)
    return out | {f"slots.{n}": slot_layout(s, shape, layout, mesh) for n, (s, _) in slots.items()}


def derive_for(optimizer, shape, layout, mesh, dtype=F64):
    slots = optimizer.init("w", torch.zeros(shape, dtype=dtype))
    described = {n: (tuple(v.shape), v.dtype) for n, v in slots.items()}
    traced = trace_update(optimizer, "w", shape, dtype, dtype, described)
    layouts = layouts_of(shape, layout, described, mesh)
    return traced, layouts, derive(traced, shape, layouts, mesh)


def check(optimizer, shape, layout, mesh, steps=3, tolerance=1e-12):
    """Compare three steps of all ranks with three of the whole leaf."""
    torch.manual_seed(0)
    traced, layouts, derived = derive_for(optimizer, shape, layout, mesh)
    params = {"w": torch.randn(shape, dtype=F64)}
    slots = init_slots(optimizer, params)
    mine = {"param": params["w"].clone(), **{f"slots.{n}": v.clone() for n, v in slots["w"].items()}}
    for number in range(steps):
        step = Step(torch.tensor(number), torch.tensor(1.0, dtype=F64))
        grads = {"w": torch.randn(shape, dtype=F64)}
        numbers = {f"number.{i}": v for i, v in enumerate(traced.prologue.numbers(step))}
        ranks = Ranks(mesh, derived, layouts, numbers | dict(traced.constants))
        wholes = {"grad": grads["w"], **mine}
        ranks.wholes = {n: (tuple(v.shape), v.dtype) for n, v in wholes.items()}
        ranks.wholes["update"] = ranks.wholes["param"]
        check_order(derived)
        env = ranks.run(wholes)
        params, slots = apply_updates(optimizer, grads, slots, params, step)
        for name in traced.outputs:
            like = mine["param" if name == "update" else name]
            made = torch.full_like(like, 55)
            for rank in reversed(range(mesh.size)):
                put(made, env[rank][name], layouts[name], mesh, ranks.places[rank])
            for rank in range(mesh.size):  # ranks with the same block have the same
                for _, of_block in boxes(like.shape, layouts[name], mesh, ranks.places[rank]):
                    own = cut(made, layouts[name], mesh, ranks.places[rank])
                    torch.testing.assert_close(env[rank][name][of_block], own[of_block], rtol=0, atol=0)
            mine["param" if name == "update" else name] = like + made if name == "update" else made
        due = {"param": params["w"], **{f"slots.{n}": v for n, v in slots["w"].items()}}
        torch.testing.assert_close(mine, due, rtol=tolerance, atol=tolerance)
    return derived


def mesh_of(**axes):
    return make_mesh(**axes, abstract=True)


ONE, TWO = {"shard": 4}, {"tensor": 2, "shard": 2}
LEAVES = {
    "even": ((8, 12), P("shard"), ONE),
    "uneven": ((10, 12), P("shard"), ONE),
    "a rank has nothing": ((3, 8), P("shard"), ONE),
    "columns": ((8, 16), P(None, "shard"), ONE),
    "uneven columns": ((6, 10), P(None, "shard"), ONE),
    "vector": ((6,), P("shard"), ONE),
    "short vector": ((3,), P("shard"), ONE),
    "number": ((), P(), ONE),
    "stack": ((3, 6, 4), P("shard"), ONE),
    "stack by rows": ((3, 7, 8), P(None, "shard"), ONE),
    "two axes on one dim": ((10, 4), P(("tensor", "shard")), TWO),
    "two dims": ((10, 12), P("tensor", "shard"), TWO),
    "two uneven dims": ((5, 16), P("shard", "tensor"), TWO),
    "fused": ((12, 8), P((Fused("tensor", 3), "shard")), TWO),
    "fused, two dims": ((12, 6), P(Fused("tensor", 3), "shard"), TWO),
    "fused, uneven": ((18, 4), P((Fused("tensor", 3), "shard")), TWO),
    "replicated": ((5, 4), P("shard"), {"replicate": 2, "shard": 2}),
    "whole": ((5, 4), P(), ONE),
}
ALIKE = {"even", "columns", "number", "vector", "two axes on one dim", "fused, two dims", "whole"}
CASES = [(n, leaf) for n in LOCAL for leaf in LEAVES]
CASES += [(n, leaf) for n in WHOLE for leaf in LEAVES if n in ("muon", "soap") or leaf not in ALIKE]


# In the suite each optimizer has every third layout, and each layout every third optimizer.
NUMBERS = {name: number for number, name in enumerate([*LOCAL, *WHOLE, *LEAVES])}
ROWS = [
    pytest.param(name, leaf, marks=[pytest.mark.long] * ((NUMBERS[name] + NUMBERS[leaf]) % 3 > 0))
    for name, leaf in CASES
]


@pytest.mark.parametrize(("name", "leaf"), ROWS)
def test_an_update_is_that_of_the_whole_leaf(name, leaf):
    shape, layout, mesh = LEAVES[leaf]
    check((LOCAL | WHOLE)[name](), shape, layout, mesh_of(**mesh))


# ------------------------------------------------------------------ what it costs
def kinds(derived):
    """Return the kinds of the steps, in order."""
    return [
        ("whole" if step.whole else "local") if isinstance(step, Compute)
        else step.how if isinstance(step, Reduce) else "back" if step.back else "stack"
        for step in derived.steps
    ]  # fmt: skip


@pytest.mark.parametrize("leaf", [leaf for leaf in LEAVES if leaf != "fused, uneven"])
def test_an_elementwise_update_exchanges_nothing(leaf):
    shape, layout, mesh = LEAVES[leaf]
    derived = derive_for(adamw(), shape, layout, mesh_of(**mesh))[2]
    assert kinds(derived) == ["local"] and derived.sent_bytes == 0 and not derived.values


def test_reductions_of_one_depth_stand_together():
    mesh = mesh_of(**TWO)
    derived = derive_for(lamb(), (10, 12), P("tensor", "shard"), mesh)[2]
    assert kinds(derived) == ["local", "sum", "local"]
    assert len(derived.steps[1].sends) == 2 and derived.steps[1].axes == ("tensor", "shard")
    derived = derive_for(adafactor(), (10, 12), P("shard"), mesh_of(**ONE))[2]
    assert kinds(derived) == ["local", "sum", "local", "sum", "local"]
    assert derived.sent_bytes == 2 * 3 / 4 * 8 * (12 + 3)  # columns, and three numbers


@pytest.mark.suite({
    "shape0-layout0": "wide, by rows",
    "shape1-layout1": "high, by columns",
    "shape0-layout2": "two dims",
    "shape1-layout3": "two axes on one dim",
})  # fmt: skip
@pytest.mark.parametrize(
    "layout", [P("shard"), P(None, "shard"), P("tensor", "shard"), P(("tensor", "shard"))]
)
@pytest.mark.parametrize("shape", [(16, 32), (32, 16)])
def test_a_matrix_is_sent_once_and_comes_back_in_the_dtype_of_its_products(shape, layout):
    """Also the norm right before the products, which needs no sum of its own, and the transposes."""
    mesh = mesh_of(**TWO)
    derived = derive_for(muon(torch.bfloat16), shape, layout, mesh, torch.float32)[2]
    assert kinds(derived) == ["local", "stack", "whole", "back", "local"]
    there, back = derived.steps[1], derived.steps[3]
    assert there.dtypes == back.dtypes == (torch.bfloat16,) and there.layouts == back.layouts == (layout,)
    ranks = mesh.axes_size(mesh.ordered(layout.axes))
    assert derived.sent_bytes == pytest.approx(2 * 2 * 16 * 32 * (ranks - 1) / ranks**2)
    assert derived.flops == pytest.approx(derive_for(muon(), shape, P(), mesh)[2].flops / ranks)


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (muon, ["local"]),
        (shampoo, ["local", "sum", "local"]),
        (soap, ["local", "stack", "whole", "back"]),  # a torch.cond takes whole leaves
    ],
)
def test_matrices_that_are_whole_anyway_are_sent_for_a_cond_alone(make, steps):
    assert kinds(derive_for(make(), (8, 6, 4), P("shard"), mesh_of(**ONE))[2]) == steps


def polar():
    """Make an optimizer that takes the orthogonal factor of each matrix."""

    def update(path, grad, slots, param, step):
        left, _, right = torch.linalg.svd(grad, full_matrices=False)
        return -0.1 * left @ right, {}

    return Optimizer("polar", lambda path, param: {}, update)


@pytest.mark.parametrize("make", [shampoo, lambda: shampoo("qr"), polar], ids=["eigh", "qr", "svd"])
def test_matrices_of_a_stack_are_decomposed_where_they_lie(make):
    """That holds if the stack is split in equal parts: padding may have no decomposition."""
    assert "stack" not in kinds(check(make(), (8, 3, 4), P("shard"), mesh_of(**ONE)))
    assert "stack" in kinds(check(make(), (3, 3, 4), P("shard"), mesh_of(**ONE)))


def test_only_what_products_read_is_sent():
    derived = derive_for(soap(), (16, 32), P("shard"), mesh_of(**ONE))[2]
    there = next(step for step in derived.steps if isinstance(step, Stack))
    assert sorted(there.sends) == ["grad", "slots.basis", "slots.left", "slots.mu", "slots.nu"]


def test_what_all_ranks_have_is_read_where_a_leaf_is_whole():
    """A norm of what is not sent is summed over ranks before."""

    def update(path, grad, slots, param, step):
        made = newton_schulz(grad) * param.norm()
        return -0.1 * made / made.norm() * slots["scale"], {"scale": slots["scale"] * 0.5}

    trusted = Optimizer("trusted", lambda path, param: {"scale": param.new_ones(())}, update)
    derived = check(trusted, (10, 12), P("shard"), mesh_of(**ONE))
    assert kinds(derived) == ["local", "sum", "local", "stack", "whole", "back", "local"]
