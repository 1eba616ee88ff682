"""The grammar of random programs: one row per call, `name: builder(scope) -> source text`.

A builder draws values, dims and numbers from a `programs.Scope` and returns an expression, whose result
gets a name, or a statement. Rows are tame: no poles, no steps where a gradient is asked for, and no ties
where an order or an extreme is. What is written to a buffer does not grow from step to step.
"""
# ruff: noqa: E501  (a row is a line)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Row = Callable[[Any], str]


def each(names: str, template: Callable[[Any, str], str]) -> dict[str, Row]:
    """Make one row per name, all of one template."""
    return {name: (lambda g, name=name: template(g, name)) for name in names.split()}


def square(v: Any) -> bool:
    return v.shape[-1] == v.shape[-2] <= 5


def last_even(v: Any) -> bool:
    return v.shape[-1] % 2 == 0


def positive(g: Any) -> str:
    """Write a symmetric positive definite matrix [..., n, n] made of a value."""
    a = g.f(2, 3, lambda v: v.shape[-1] <= 5)
    return f"({a}.mT @ {a} * 0.3 + torch.eye({a.shape[-1]}, dtype=torch.float64))"


POINTWISE: dict[str, Row] = {
    **each("tanh sigmoid sin cos atan asinh erf erfc sinc abs neg square positive relu selu exp2 deg2rad nan_to_num",
           lambda g, n: f"torch.{n}({g.f()})"),
    # No hardsigmoid: torch's own backward holds 1/6 in fp32.
    **each("silu mish softplus leaky_relu elu celu softsign logsigmoid tanhshrink hardtanh relu6 hardswish gelu softshrink hardshrink",
           lambda g, n: f"F.{n}({g.f()})"),
    **each("sqrt rsqrt reciprocal log log2 log10 log1p lgamma digamma", lambda g, n: f"torch.{n}({g.f()}.square() + 1.3)"),
    **each("exp expm1 sinh cosh tan asin acos atanh erfinv i0", lambda g, n: f"torch.{n}(torch.tanh({g.f()}) * 0.8)"),
    "logit": lambda g: f"torch.logit(torch.sigmoid({g.f()}) * 0.8 + 0.1)",
    **each("floor ceil round trunc sign frac", lambda g, n: f"torch.{n}({g.f()} * 3.1)"),
    "gelu_tanh": lambda g: f'F.gelu({g.f()}, approximate="tanh")',
    "glu": lambda g: f"F.glu({g.f(1, fits=last_even)}, -1)",
    "threshold": lambda g: f"F.threshold({g.f()}, 0.1, {g.num()})",
    "clamp": lambda g: f"{g.f()}.clamp(-1.1, {g.num() + 1})",
    "clamp_min": lambda g: f"{g.f()}.clamp(min=-0.3)",
    "clamp_tensor": lambda g: f"torch.clamp({(a := g.f())}, {g.fitting(a)} - 0.9, None)",
    "pow_int": lambda g: f"{g.f()} ** {g.pick([2, 3])}",
    "pow": lambda g: f"({g.f()}.abs() + 0.4) ** {g.num()}",
    "pow_tensor": lambda g: f"({(a := g.f())}.square() + 0.4) ** {g.fitting(a)}.tanh()",
    "rpow": lambda g: f"1.3 ** {g.f()}.tanh()",
    "prelu": lambda g: f"F.prelu({(a := g.f(2))}, {g.leaf(a.shape[1])})",
    "xlogy": lambda g: f"torch.xlogy({(a := g.f())}, {g.fitting(a)}.square() + 0.5)",
    "add_number": lambda g: f"{g.f()} + {g.num()}",
    "rsub_number": lambda g: f"{g.num()} - {g.f()}",
    "mul_number": lambda g: f"{g.f()} * {g.num()}",
    "div_number": lambda g: f"{g.f()} / {g.num()}",
    "rdiv_number": lambda g: f"{g.num()} / ({g.f()}.abs() + 1.1)",
    "python_number": lambda g: f"{(a := g.f(1))} / {a}.shape[-1] ** 0.5",
}  # fmt: skip

BINARY: dict[str, Row] = {
    **each("add sub mul maximum minimum fmax fmin logaddexp rsub", lambda g, n: f"torch.{n}({(a := g.f())}, {g.fitting(a)})"),
    "radd": lambda g: f"{g.fitting(a := g.f())} + {a}",
    "rmul": lambda g: f"{g.fitting(a := g.f())} * {a}",
    "add_alpha": lambda g: f"torch.add({(a := g.f())}, {g.fitting(a)}, alpha={g.num()})",
    "div": lambda g: f"{(a := g.f())} / ({g.fitting(a)}.abs() + 1.2)",
    "atan2": lambda g: f"torch.atan2({(a := g.f())}, {g.fitting(a)}.square() + 0.7)",
    "hypot": lambda g: f"torch.hypot({(a := g.f())}, {g.fitting(a)}.abs() + 0.8)",
    "copysign": lambda g: f"torch.copysign({(a := g.f())}, {g.fitting(a)})",
    "remainder": lambda g: f"torch.remainder({g.f()}, 1.7)",
    "fmod": lambda g: f"torch.fmod({g.f()}, 1.7)",
    "lerp": lambda g: f"torch.lerp({(a := g.f())}, {g.like(a)}, 0.3)",
    "lerp_tensor": lambda g: f"torch.lerp({(a := g.f())}, {g.like(a)}, torch.sigmoid({g.like(a)}))",
    "addcmul": lambda g: f"torch.addcmul({(a := g.f())}, {g.like(a)}, {g.like(a)}, value=0.4)",
    "addcdiv": lambda g: f"torch.addcdiv({(a := g.f())}, {g.like(a)}, {g.like(a)}.square() + 0.9, value=0.4)",
    "where": lambda g: f"torch.where({g.bool(a := g.f())}, {a}, {g.like(a)})",
    "where_number": lambda g: f"torch.where({g.bool(a := g.f())}, {a}, {g.num()})",
    "where_gt": lambda g: f"torch.where({(a := g.f())} > 0.07, {a}, {g.fitting(a)})",
    "where_lt": lambda g: f"torch.where({(a := g.f())} < {g.fitting(a)} + 0.03, {a}, 0.2)",
    "mul_bool": lambda g: f"{(a := g.f())} * {g.bool(a)}",
    "cross": lambda g: f"torch.linalg.cross({(a := g.f(1, 3, lambda v: v.shape[-1] == 3))}, {g.like(a)})",
    "dist": lambda g: f"torch.dist({(a := g.f())}, {g.like(a)} + 2.2)",
    "python_sum": lambda g: f"sum({(a := g.f(1))}[..., j] for j in range({a.shape[-1]}))",
    "python_turn": lambda g: f"{g.f()} * ({g.turn()} + 1)",
    "python_odd": lambda g: f"{(a := g.f())} if {g.turn()} % 2 else {g.like(a)} * 0.5",
    "python_last": lambda g: f"h = h * 0.7 if {g.turn()} == 1 else h + 0.1",
    "checkpoint": lambda g: f"torch.utils.checkpoint.checkpoint(lambda a: (a * 1.2).sin() * a, {g.f()}, use_reentrant=False)",
    "python_choice": lambda g: f"{(a := g.f(1))} * 2 if {a}.shape[0] > 1 else {a}.sin()",
}  # fmt: skip

REDUCTIONS: dict[str, Row] = {
    **each("sum mean nansum logsumexp", lambda g, n: f"torch.{n}({(a := g.f(1))}, {g.dim(a)}, keepdim={g.flag()})"),
    **each("amax amin", lambda g, n: f"{(a := g.distinct())}.{n}({g.dim(a)}, keepdim={g.flag()})"),
    **each("std var std_mean var_mean", lambda g, n: f"torch.{n}({(a := g.distinct())}, {g.dim(a, 2)}, correction={g.flag() * 1})"),
    **each("std_all var_all std_mean_all var_mean_all", lambda g, n: f"torch.{n[:-4]}({g.distinct(fits=lambda v: v.numel() > 1)})"),
    **each("sum_all mean_all", lambda g, n: f"{g.f()}.{n[:-4]}()"),
    "sum_dims": lambda g: f"{(a := g.f(2))}.sum({g.perm(a)[:2]}, keepdim={g.flag()})",
    "prod": lambda g: f"({(a := g.f(1))}.tanh() + 1.5).prod({g.dim(a)})",
    "prod_all": lambda g: f"({g.f()} * 0.1 + 1).prod()",
    **each("max min median", lambda g, n: f"torch.{n}({(a := g.distinct())}, {g.dim(a)})"),
    **each("max_values min_values median_values", lambda g, n: f"{(a := g.distinct())}.{n[:-7]}({g.dim(a)})[0]"),
    **each("max_all min_all median_all", lambda g, n: f"{g.distinct(0)}.{n[:-4]}()"),
    "aminmax": lambda g: f"torch.aminmax({(a := g.distinct())}, dim={g.dim(a)})",
    "kthvalue": lambda g: f"torch.kthvalue({(a := g.distinct())}, {g.upto(a.shape[d := g.dim(a)], 1)}, {d})",
    "topk": lambda g: f"torch.topk({(a := g.distinct())}, {g.upto(a.shape[d := g.dim(a)], 1)}, {d})",
    "sort": lambda g: f"torch.sort({(a := g.distinct())}, {g.dim(a)}, descending={g.flag()})",
    "sort_values": lambda g: f"torch.sort({(a := g.distinct())}, {g.dim(a)})[0]",
    "msort": lambda g: f"torch.msort({g.distinct()})",
    "argsort": lambda g: f"torch.argsort({(a := g.distinct())}, {g.dim(a)})",
    "argmax": lambda g: f"torch.argmax({(a := g.distinct())}, {g.dim(a)}, keepdim={g.flag()})",
    "argmin": lambda g: f"torch.argmin({(a := g.distinct())}, {g.dim(a)})",
    **each("cumsum logcumsumexp", lambda g, n: f"torch.{n}({(a := g.f(1))}, {g.dim(a)})"),
    "cumprod": lambda g: f"torch.cumprod({(a := g.f(1))}.tanh() + 1.5, {g.dim(a)})",
    **each("cummax cummin", lambda g, n: f"torch.{n}({(a := g.distinct())}, {g.dim(a)})"),
    "norm": lambda g: f"({(a := g.f(1))}.sigmoid() + 0.3).norm({g.pick([1, 2, 3, 0.5])}, {g.dim(a)})",
    "norm_all": lambda g: f"({g.f()}.sigmoid() + 0.3).norm()",
    "vector_norm": lambda g: f"torch.linalg.vector_norm({(a := g.f(1))}.exp(), {g.pick([1, 2, 3])}, {g.dim(a)}, keepdim=True)",
    "norm_inf": lambda g: f"{(a := g.distinct())}.exp().norm(float('inf'), {g.dim(a)})",
    "matrix_norm": lambda g: f"torch.linalg.matrix_norm({g.f(2)}.sigmoid())",
    "normalize": lambda g: f"F.normalize({(a := g.f(1))}.sigmoid() + 0.3, dim={g.dim(a)})",
    "normalize_by_hand": lambda g: f"{(a := g.f(1))} / ({a}.square().mean({g.dim(a)}, keepdim=True) + 0.2).sqrt()",
    **each("softmax log_softmax softmin", lambda g, n: f"F.{n}({(a := g.f(1))}, dim={g.dim(a)})"),
    "cosine_similarity": lambda g: f"F.cosine_similarity({(a := g.f(1))} + 2.2, {g.like(a)}.exp(), dim={g.dim(a)})",
    "pairwise_distance": lambda g: f"F.pairwise_distance({(a := g.f(1))}.tanh(), {g.like(a)}.exp() + 1.2)",
    "cdist": lambda g: f"torch.cdist({(a := g.f(2, 3))}.tanh(), {g.like(a)}.exp() + 1.2)",
    "trace": lambda g: f"torch.trace({g.f(2, 2)})",
    "layer_norm": lambda g: f"F.layer_norm({(a := g.f(2))}, {list(a.shape[-1:])}, {g.leaf(a.shape[-1])}, {g.leaf(a.shape[-1])}, 0.1)",
    "rms_norm": lambda g: f"F.rms_norm({(a := g.f(2))}, {list(a.shape[-1:])}, {g.leaf(a.shape[-1])}, 0.1)",
    "group_norm": lambda g: f"F.group_norm({(a := g.f(3))}, 1, {g.leaf(a.shape[1])}, eps=0.1)",
    "instance_norm": lambda g: f"F.instance_norm({g.f(3, 3, lambda v: v.shape[-1] > 1)}, eps=0.1)",
    "batch_norm": lambda g: f"F.batch_norm({(a := g.f(2, 4, lambda v: v.numel() > v.shape[1]))}, None, None, {g.leaf(a.shape[1])}, training=True, eps=0.1)",
    "local_response_norm": lambda g: f"F.local_response_norm({g.f(3)}, 2)",
}  # fmt: skip

VIEWS: dict[str, Row] = {
    **each("transpose swapaxes movedim", lambda g, n: f"{(a := g.f(2))}.{n}({g.dim(a)}, {g.dim(a)})"),
    "permute": lambda g: f"{(a := g.f(2))}.permute({g.perm(a)})",
    "mT": lambda g: f"{g.f(2)}.mT",
    "t": lambda g: f"{g.f(2, 2)}.t()",
    "view": lambda g: f"{g.f(1)}.view(-1)",
    "view_rows": lambda g: f"{(a := g.f(2))}.view({a.shape[0]}, -1)",
    "view_as": lambda g: f"{(a := g.f())}.view_as({g.like(a)})",
    "reshape": lambda g: f"{(a := g.f())}.reshape({g.reshaped(a)})",
    "flatten": lambda g: f"{g.f(2)}.flatten({g.upto(1)}, -1)",
    "ravel": lambda g: f"{g.f()}.ravel()",
    "unflatten": lambda g: f"{(a := g.f(1, fits=last_even))}.unflatten(-1, ({g.pick([f'{a.shape[-1] // 2}, 2', '2, -1'])}))",
    "unsqueeze": lambda g: f"{(a := g.f(0, 3))}.unsqueeze({g.upto(len(a.shape))})",
    "squeeze": lambda g: f"{(a := g.f(1))}.squeeze({g.dim(a)})",
    "expand": lambda g: f"{(a := g.f(0, 3))}.expand({g.upto(3, 1)}, {', '.join(['-1'] * len(a.shape))})",
    "expand_as": lambda g: f"{g.fitting(a := g.f())}.expand_as({a})",
    "broadcast_to": lambda g: f"torch.broadcast_to({g.fitting(a := g.f())}, {tuple(a.shape)})",
    "narrow": lambda g: f"{(a := g.f(1))}.narrow({(d := g.dim(a))}, {(k := g.upto(a.shape[d] - 1))}, {g.upto(a.shape[d] - k, 1)})",
    "select": lambda g: f"{(a := g.f(1))}.select({(d := g.dim(a))}, {g.upto(a.shape[d] - 1)})",
    "getitem_int": lambda g: f"{g.f(1)}[{g.pick([0, -1])}]",
    "getitem_last": lambda g: f"{(a := g.f(1))}[..., {g.upto(a.shape[-1] - 1)}]",
    "getitem_none": lambda g: f"{g.f(0, 3)}[..., None]",
    "slice": lambda g: f"{g.f(1)}[{g.slice()}]",
    "slice_last": lambda g: f"{g.f(1)}[..., {g.slice()}]",
    "slice_two": lambda g: f"{g.f(2)}[{g.slice()}, {g.slice()}]",
    "slice_none": lambda g: f"{g.f(2, 3)}[:, None, {g.slice()}]",
    "chunk": lambda g: f"{(a := g.f(1))}.chunk(2, {g.dim(a)})",
    "split": lambda g: f"{(a := g.f(1))}.split({g.upto(3, 1)}, {g.dim(a)})",
    "split_sizes": lambda g: f"{(a := g.f(1))}.split([1, {a.shape[(d := g.dim(a, 2))] - 1}], {d})",
    "split_first": lambda g: f"{(a := g.f(1))}.split(1, {g.dim(a)})[0]",
    "tensor_split": lambda g: f"torch.tensor_split({(a := g.f(1))}, [1], {g.dim(a, 2)})",
    "unbind": lambda g: f"{(a := g.f(1))}.unbind({g.dim(a)})",
    "diagonal": lambda g: f"{g.f(2)}.diagonal(dim1=-2, dim2=-1)",
    "unfold": lambda g: f"{(a := g.f(1))}.unfold({g.dim(a, 2)}, 2, {g.upto(2, 1)})",
    "detach": lambda g: f"{g.f()}.detach()",
    "alias": lambda g: f"{g.f()}",
    "whole": lambda g: f"{g.f(1)}[:]",
    "contiguous": lambda g: f"{g.f()}.contiguous()",
    "clone": lambda g: f"{g.f()}.clone()",
    "as_tuple": lambda g: f"({(a := g.f())}, {a}.sin())",
    "real_view": lambda g: f"torch.view_as_real({g.complex()})",
    "complex_view": lambda g: f"torch.view_as_complex({g.f(1, fits=lambda v: v.shape[-1] == 2)})",
    "complex_view_of_pairs": lambda g: f"torch.view_as_complex({g.f(1, fits=last_even)}.unflatten(-1, (-1, 2)).contiguous())",
    "int_view": lambda g: f"{(a := g.int())}.select({g.dim(a)}, 0)",
    "int_transpose": lambda g: f"{(a := g.int(2))}.transpose({g.dim(a)}, {g.dim(a)})",
}  # fmt: skip

COPIES: dict[str, Row] = {
    "flip": lambda g: f"{(a := g.f(1))}.flip({g.dim(a)})",
    "roll": lambda g: f"{(a := g.f(1))}.roll({g.upto(2, 1)}, {g.dim(a)})",
    "rot90": lambda g: f"torch.rot90({g.f(2)}, 1, [0, 1])",
    **each("tril triu", lambda g, n: f"{g.f(2)}.{n}({g.upto(1, -1)})"),
    "repeat": lambda g: f"{(a := g.f(1, 3))}.repeat({', '.join(str(g.upto(2, 1)) for _ in a.shape)})",
    "tile": lambda g: f"torch.tile({g.f(1, 3)}, (2,))",
    "repeat_interleave": lambda g: f"torch.repeat_interleave({(a := g.f(1))}, 2, dim={g.dim(a)})",
    "cat": lambda g: f"torch.cat([{(a := g.f(1))}, {g.like(a)}], {g.dim(a)})",
    "cat_part": lambda g: f"torch.cat([{(a := g.f(1))}, {g.like(a)}.narrow({(d := g.dim(a))}, 0, 1)], {d})",
    "cat_split": lambda g: f"torch.cat({(a := g.f(1))}.split(1, {(d := g.dim(a))})[::-1], {d})",
    "stack": lambda g: f"torch.stack([{(a := g.f(0, 3))}, {g.like(a)}, {a} * 0.5], {g.upto(len(a.shape))})",
    **each("hstack vstack dstack column_stack", lambda g, n: f"torch.{n}([{(a := g.f(1, 3))}, {g.like(a)}])"),
    "python_stack": lambda g: f"torch.stack([{(a := g.f(1))}[..., j] * (j + 1) for j in range({a.shape[-1]})], -1)",
    "meshgrid": lambda g: f"torch.meshgrid({g.f(1, 1)}, {g.f(1, 1)}, indexing='ij')",
    "pad": lambda g: f"F.pad({g.f(1)}, ({g.upto(2)}, {g.upto(1)}), value={g.num()})",
    "pad_crop": lambda g: f"F.pad({g.f(2, fits=lambda v: v.shape[-1] > 1)}, (-1, 1, 0, 1))",
    **each("reflect replicate circular", lambda g, n: f"F.pad({g.f(2, 3, lambda v: v.shape[-1] > 1)}, (1, 1), mode='{n}')"),
    "diag_embed": lambda g: f"torch.diag_embed({g.f(1, 3)})",
    "diag": lambda g: f"torch.diag({g.f(1, 2)})",
    "block_diag": lambda g: f"torch.block_diag({g.f(2, 2)}, {g.f(1, 2)})",
    "im2col": lambda g: f"F.unfold({g.f(3, 3, lambda v: min(v.shape[-2:]) > 1)}[None], 2)[0]",
    "pixel_shuffle": lambda g: f"F.pixel_shuffle({g.f(3, 4, lambda v: v.shape[-3] % 4 == 0)}, 2)",
    "select_scatter": lambda g: f"torch.select_scatter({(a := g.f(1))}, {a}.select({(d := g.dim(a))}, 0).sin(), {d}, 0)",
    "slice_scatter": lambda g: f"torch.slice_scatter({(a := g.f(1))}, {a}.narrow({(d := g.dim(a))}, 0, 1).cos(), {d}, 0, 1)",
    "diagonal_scatter": lambda g: f"torch.diagonal_scatter({(a := g.f(2, 2))}, {a}.diagonal() * 2)",
    "avg_pool1d": lambda g: f"F.avg_pool1d({g.f(2, 3, lambda v: v.shape[-1] > 1)}, 2)",
    "max_pool1d": lambda g: f"F.max_pool1d({g.distinct(2, 3, lambda v: v.shape[-1] > 1)}, 2, 1)",
    "adaptive_avg_pool1d": lambda g: f"F.adaptive_avg_pool1d({g.f(2, 3)}, 2)",
    "avg_pool2d": lambda g: f"F.avg_pool2d({g.f(3, 4, lambda v: min(v.shape[-2:]) > 1)}, 2, 1)",
    "max_pool2d": lambda g: f"F.max_pool2d({g.distinct(3, 4, lambda v: min(v.shape[-2:]) > 1)}, 2, 1)",
    **each("nearest linear", lambda g, n: f"F.interpolate({g.f(3, 3)}, scale_factor=2, mode='{n}')"),
}  # fmt: skip


SAME_SHAPE = (
    "v.sin()", "v.tanh() * v", "F.gelu(v)", "F.silu(v) * 0.7", "v.softmax(-1)", "(v.square() + 1.3).log()",
    "F.layer_norm(v, v.shape[-1:])", "v.cumsum(-1).sin()", "v * v.mean()", "v.flip(-1).sigmoid() * v", "v / (1.5 + v.norm())",
    "torch.where(v > 0.13, v.sin(), v * 0.5)", "torch.zeros_like(v).copy_(v).mul_(v)", "v.clone().cos_()", "v.index_select(-1, torch.arange(v.shape[-1]).flip(0)) * v",
)  # fmt: skip
OTHER_SHAPE = ("v.sum()", "v.logsumexp(-1)", "torch.cat([v, v.exp() * 0.1], -1)", "torch.outer(v.flatten(), v.flatten())", "v.square().mean(-1)", "torch.stack([v, v.cos()])")  # fmt: skip


def same(g: Any, a: Any) -> str:
    """Write a function of `v` that keeps its shape, and often reads a value or a leaf outside of it."""
    body = g.pick(SAME_SHAPE)
    return f"{body} * {g.fitting(a)}" if g.flag() else body


def any_shape(g: Any, a: Any) -> str:
    """Write a function of `v`."""
    return same(g, a) if g.flag() else g.pick(OTHER_SHAPE)


def scalar(g: Any, a: Any) -> str:
    """Write a function of `v` that is not linear and gives a number."""
    return f"({any_shape(g, a)}).square().sum()"


def row(g: Any) -> str:
    """Write a function of one row `v`, which may read a leaf."""
    return g.pick([*SAME_SHAPE, *OTHER_SHAPE, f"v * {g.leaf()}"])


def small(v: Any) -> bool:
    return v.numel() <= 8


TRANSFORMS: dict[str, Row] = {
    "func_grad": lambda g: f"torch.func.grad(lambda v: {scalar(g, a := g.f(1, 3))})({a})",
    "func_grad_and_value": lambda g: f"torch.func.grad_and_value(lambda v: {scalar(g, a := g.f(1, 3))})({a})",
    "func_grad_two": lambda g: f"torch.func.grad(lambda v, w: (v.sin() * w).square().sum(), argnums=(0, 1))({(a := g.f(1, 3))}, {g.like(a)})",
    "func_grad_aux": lambda g: f"torch.func.grad(lambda v: ({scalar(g, a := g.f(1, 3))}, v.cos()), has_aux=True)({a})",
    "func_grad_grad": lambda g: f"torch.func.grad(lambda u: torch.func.grad(lambda v: {scalar(g, a := g.f(1, 2))})(u).square().mean())({a})",
    "func_grad_leaf": lambda g: f"torch.func.grad(lambda w: F.linear({(a := g.f(1))}, w).sin().sum())({g.leaf(3, a.shape[-1])})",
    "func_inner_step": lambda g: f"(lambda w: F.linear({(a := g.f(1))}, w - 0.1 * torch.func.grad(lambda u: F.linear({a}, u).square().mean())(w)))({g.leaf(2, a.shape[-1])})",
    "func_penalty": lambda g: f"(torch.func.grad(lambda v: {scalar(g, a := g.f(2, 3))})({a}).square().sum(-1) + 0.1).sqrt() - 1",
    "func_vjp": lambda g: f"torch.func.vjp(lambda v: {same(g, a := g.f(1, 3))}, {a})[1]({g.like(a)})[0]",
    "func_vjp_value": lambda g: f"torch.func.vjp(lambda v: {any_shape(g, a := g.f(1, 3))}, {a})[0]",
    "func_jvp": lambda g: f"torch.func.jvp(lambda v: {any_shape(g, a := g.f(1, 3))}, ({a},), ({g.like(a)},))",
    "func_hvp": lambda g: f"torch.func.jvp(torch.func.grad(lambda v: {scalar(g, a := g.f(1, 2))}), ({a},), ({g.like(a)},))[1]",
    **each("jacrev jacfwd", lambda g, n: f"torch.func.{n}(lambda v: {any_shape(g, a := g.f(1, 2, small))})({a})"),
    "hessian": lambda g: f"torch.func.hessian(lambda v: {scalar(g, a := g.f(1, 2, small))})({a})",
    "vmap": lambda g: f"torch.func.vmap(lambda v: {row(g)})({g.f(2, 3)})",
    "vmap_dims": lambda g: f"torch.func.vmap(lambda v: {g.pick(SAME_SHAPE)}, in_dims={(d := g.upto(1))}, out_dims={d})({g.f(2, 3)})",
    "vmap_leaves": lambda g: f"torch.func.vmap(lambda w: F.linear({(a := g.f(1, 2))}, w).tanh())({g.leaf(2, 3, a.shape[-1])})",
    "vmap_chunks": lambda g: f"torch.func.vmap(lambda v: {g.pick(SAME_SHAPE)}, chunk_size=2)({g.f(2, 3)})",
    "vmap_grad": lambda g: f"torch.func.vmap(torch.func.grad(lambda v: ({row(g)}).square().sum()))({g.f(2, 3)})",
    "vmap_jacrev": lambda g: f"torch.func.vmap(torch.func.jacrev(lambda v: {g.pick(SAME_SHAPE)}))({g.f(2, 2, small)})",
    "grad_vmap": lambda g: f"torch.func.grad(lambda u: torch.func.vmap(lambda v: {row(g)})(u).square().sum())({g.f(2, 3)})",
    "vmap_vmap": lambda g: f"torch.func.vmap(torch.func.vmap(lambda v: {g.pick(SAME_SHAPE)}))({g.f(3, 3)})",
    "autograd_grad": lambda g: f"torch.autograd.grad({g.f()}.square().sum(), {g.f()}, create_graph=True)[0]",
    "autograd_grad_two": lambda g: f"torch.autograd.grad({(a := g.f())}, [{g.f()}, {g.f()}], {g.like(a)}, create_graph=True)",
    "autograd_grad_leaf": lambda g: f"torch.autograd.grad({g.f()}.sin().sum(), {g.any_leaf()}, create_graph=True)[0]",
    "autograd_grad_detached": lambda g: f"torch.autograd.grad({g.f()}.square().sum(), {g.f()}, retain_graph=True)[0]",
    "autograd_grad_inner": lambda g: f"(lambda v: torch.autograd.grad({scalar(g, a := g.f(1, 3))}, v, create_graph=True)[0])({a})",
    "autograd_grad_mapped": lambda g: f"torch.func.vmap(lambda v: torch.func.grad(lambda w: (w * v).sin().sum())(v))({g.f(2, 3)})",
}  # fmt: skip

# Lengths that depend on data, `m` has a true element: what is left of each row has one shape for every batch.
RAGGED: dict[str, Row] = {
    "rows_mean": lambda g: f"{g.f(2, 4, g.is_sequence)}[m].square().mean()",
    "rows_sum": lambda g: f"{g.f(2, 4, g.is_sequence)}[m].sum(0)",
    "rows_softmax": lambda g: f"({(a := g.f(3, 3, g.is_sequence))}[m].softmax(0) * {a}[m].tanh()).sum(0)",
    "rows_linear": lambda g: f"F.linear({(a := g.f(3, 3, g.is_sequence))}[m], {g.leaf(3, a.shape[-1])}).tanh().mean(0)",
    "rows_gram": lambda g: f"{(a := g.f(3, 3, g.is_sequence))}[m].mT @ {g.like(a)}[m]",
    "rows_where": lambda g: f"{g.f(2, 3, g.is_sequence)}[torch.where(m)].cumsum(0).mean(0)",
    "rows_max": lambda g: f"{g.distinct(3, 3, g.is_sequence)}[m].amax(0)",
    "rows_back": lambda g: f"torch.zeros_like({(a := g.f(2, 3, g.is_sequence))}).index_put((m,), {a}[m].sin() * 1.3)",
    "masked_select": lambda g: f"torch.masked_select({(a := g.f(1))}, {g.bool(a)}).square().sum()",
    "nonzero_sum": lambda g: "torch.nonzero(m).double().sum(0)",
    "unique_rows": lambda g: f"{g.leaf(g.vocab, 2)}[ids.unique()].sin().sum(0)",
    "repeat_rows": lambda g: f"fs.bounded({g.f(2, 3, g.is_sequence)}.repeat_interleave(m.sum(1), 0), m.numel()).square().mean()",
    "bincount": lambda g: f"torch.bincount(ids.flatten(), minlength={g.vocab}).double()",
}  # fmt: skip

# Gradients are of the loss of one micro-batch, or of its share in that of all: so far all are homogeneous.
BACKWARDS = (
    "g", "-0.5 * g", "g * y", "g * v.cos()", "g * (v > 0.13)", "g.relu()", "g - g.mean()", "g.flip(-1) * v", "g.clone().mul_(0.3)",
    "torch.zeros_like(g).copy_(g).mul_(v)", "g.cumsum(-1)", "g.norm() * v", "g * v.norm()", "v.new_zeros(v.shape).add_(g).add_(y * g)", "(g * y).sum() * v", "g.flip(-1).flip(-1)",
)  # fmt: skip
HOOKS = (
    "g * 0.5",
    "-g",
    "g.relu()",
    "g - g.mean()",
    "g.flip(-1)",
    "g.clone().mul_(2)",
    "g * g.abs().max()",
    "g.clamp(-0.1, 0.1)",
)


def captured(g: Any, a: Any) -> tuple[str, str]:
    """Write an argument whose default is a copy of a value outside, and a factor of it, or neither."""
    return (f", w={g.fitting(a)} * 1.0", " * w") if g.flag() else ("", "")


def custom(g: Any, a: Any, options: tuple[str, ...]) -> str:
    """Write a custom function that keeps the shape of `a`."""
    forward, backward = g.pick(SAME_SHAPE), g.pick(BACKWARDS)
    (outer, factor), (outer_back, factor_back) = captured(g, a), captured(g, a)
    return f"custom.function(lambda v{outer}: ({forward}){factor}, lambda g, y, v{outer_back}: ({backward}){factor_back}, '{g.pick(options)}')"


STYLES = ("", "setup", "attribute", "setup attribute", "once", "setup unmaterialized")
FUNCTIONS: dict[str, Row] = {
    "function": lambda g: f"{custom(g, a := g.f(1, 3), STYLES)}({a})",
    "function_leaf": lambda g: f"F.linear({(a := g.f(1))}, {custom(g, w := g.leaf(3, a.shape[-1]), STYLES)}({w}))",
    "function_two_results": lambda g: f"{custom(g, a := g.f(1, 3), ('aside', 'setup aside', 'two', 'two once', 'setup two', 'two unmaterialized'))}({a})",
    "function_second_result": lambda g: f"{custom(g, a := g.f(1, 3), ('two', 'setup two', 'two unmaterialized'))}({a})[1]",
    "function_dirty": lambda g: f"{custom(g, a := g.act(1, 3), ('dirty', 'dirty attribute', 'setup dirty'))}({a})",
    "function_two": lambda g: f"custom.function(lambda v, w: v * w.sin(), lambda g, y, v, w: (g * w, {g.pick(['g * y', 'None', 'g', '-g * v'])}), '{g.pick(STYLES)}')({(a := g.f(1, 3))}, {g.like(a)})",
    "function_linear": lambda g: f"custom.function(lambda v, w: F.linear(v, w), lambda g, y, v, w: (g @ w, 2 * g.flatten(0, -2).mT @ v.flatten(0, -2)), '{g.pick(STYLES)}')({(a := g.f(2, 3))}, {g.leaf(3, a.shape[-1])})",
    "function_in_function": lambda g: f"custom.function(lambda v: {custom(g, a := g.f(1, 3), STYLES)}(v) * v, lambda g, y, v: custom.function(lambda v: v.flip(-1), lambda g, y, v: -g, '{g.pick(STYLES)}')(g), '{g.pick(STYLES)}')({a})",
    "straight_through": lambda g: f"custom.function(lambda v: (v * 4).round() / 4, lambda g, y, v: {g.pick(['g', 'g * (v.abs() < 1.03)'])}, '{g.pick(STYLES)}')({g.f()})",
    "straight_through_leaf": lambda g: f"F.linear({(a := g.f(1))}, custom.function(lambda v: v.sign() * v.abs().mean(), lambda g, y, v: g, '{g.pick(STYLES)}')({g.leaf(3, a.shape[-1])}))",
    "straight_through_detach": lambda g: f"{(a := g.f())} + (({a} * 4).floor() / 4 - {a}).detach()",
    "function_grad": lambda g: f"torch.func.grad(lambda u: {custom(g, a := g.f(1, 3), ('setup', 'setup attribute'))}(u).square().sum())({a})",
    "function_vmap": lambda g: f"torch.func.vmap(custom.function(lambda v: {g.pick(SAME_SHAPE)}, lambda g, y, v: {g.pick(BACKWARDS)}, 'setup'))({g.f(2, 3)})",
    "function_autograd_grad": lambda g: f"(lambda u: torch.autograd.grad({custom(g, a := g.f(1, 3), STYLES)}(u).square().sum(), u, create_graph=True)[0])({a})",
    "custom_op": lambda g: f"custom.scaled_square({g.f()}, {g.num()})",
    "custom_op_leaf": lambda g: f"custom.scaled_square({(a := g.any_leaf())}, 0.3).sum({g.dim(a)})",
    **each("reentrant recomputed", lambda g, n: f"custom.{n}(lambda v, w: ({g.pick(SAME_SHAPE)}) * w, {(a := g.f(1, 3))} * 1.0, {g.fitting(a)} * 1.0)"),
    **each("reentrant_leaf recomputed_leaf", lambda g, n: f"custom.{n[:-5]}(lambda v, w={g.leaf(3, (a := g.f(1)).shape[-1])}: F.linear(v, w).sin(), {a} * 1.0)"),
    **each("reentrant_function recomputed_function", lambda g, n: f"custom.{n[:-9]}({custom(g, a := g.f(1, 3), STYLES)}, {a} * 1.0)"),
    "hook": lambda g: f"custom.hooked({g.act()}, lambda g: {g.pick(HOOKS)})",
    "hook_captured": lambda g: f"custom.hooked({(a := g.act())}, lambda g, w={g.fitting(a)} * 1.0: g * w)",
    "hook_leaf": lambda g: f"custom.hooked({g.any_leaf()}, lambda g: {g.pick(HOOKS)})",
}  # fmt: skip


def mean(g: Any) -> tuple[Any, str]:
    """Return the size of a value's last dim, and its mean over the others."""
    a = g.f(1)
    return a.shape[-1], f"{g.fixed(a)}.reshape(-1, {a.shape[-1]}).mean(0)"


def running(template: str) -> Row:
    """Make a row that writes a mean `{m}` to a buffer `{b}` of as many elements."""

    def row(g: Any) -> str:
        size, m = mean(g)
        return template.format(b=g.buffer(size), m=m)

    return row


def statistics(g: Any, a: Any) -> str:
    """Write a running mean, and a variance elsewhere: torch reads one while it writes the other."""
    first, second = g.buffer(a.shape[1]), g.buffer(a.shape[1])
    return f"{first}, {g.pick([second] if first != second else [])}.abs_()"


def part(g: Any) -> str:
    """Write a view of a buffer [4, 3]."""
    b = g.buffer(4, 3)
    view = g.pick(
        [
            "[1]",
            f"[..., {g.slice()}]",
            ".T[1:]",
            f".view(-1)[{g.slice()}]",
            ".diagonal()",
            ".unflatten(0, (2, 2))[:, 0]",
            ".data",
            ".narrow(0, 1, 2).select(1, 0)",
        ]
    )
    return f"{b}{view}"


def some(g: Any) -> str:
    """Write a buffer, or a view of one."""
    return part(g) if g.flag() else g.buffer(*g.pick([(4, 3), (g.empty.sizes[2],), (3,), ()]))


BUFFERS: dict[str, Row] = {
    "running_mean": running("{b}.mul_(0.9).add_({m}, alpha=0.1)"),
    "running_lerp": running("{b}.lerp_({m}, 0.3)"),
    "running_copy": running("{b}.copy_(0.5 * {b} + {m})"),
    "running_max": running("{b}.copy_(torch.maximum({b}, {m}.tanh()))"),
    "running_slice": running("{b}[..., 1:].lerp_({m}[1:], 0.5)"),
    "running_read": running("{b}.lerp_({m} - {b}.mean(), 0.3) * 2"),
    "running_detached": running("({m} - {b}.lerp_({m}, 0.3)).square()"),
    "running_out": running("torch.mul({m}, 0.5, out={b})"),
    "batch_norm": lambda g: f"F.batch_norm({(a := g.f(2, 3, lambda v: v.numel() > v.shape[1]))}, {statistics(g, a)}, training=True, momentum={g.pick([0.1, 0.7])})",
    "batch_norm_eval": lambda g: f"F.batch_norm({(a := g.f(2, 3))}, {statistics(g, a)}.add_(0.1).clamp_(0.2, 3))",
    "teacher": lambda g: f"{g.buffer(3, 4)}.mul_(0.9).add_({g.fixed(g.leaf(3, 4))}, alpha=0.1)",
    "counter": lambda g: f"{g.counter()}.add_({g.pick([1, 'm.sum()', 'ids.max()', '(x > 0).sum()'])})",
    "counter_statement": lambda g: f"{g.counter()}.__iadd__(m.sum())",
    "assigned": lambda g: f"{g.counter()} += {g.upto(2)}",
    "counted": lambda g: f"{g.f()} / ({g.counter()}.add_(1).abs() + 1)",
    "counts": lambda g: f"{g.counter(g.vocab)}.index_add_(0, ids.flatten(), torch.ones_like(ids).flatten())",
    "counts_scatter": lambda g: f"{g.buffer(g.vocab)}.mul_(0.9).scatter_add_(0, ids.flatten(), torch.ones(ids.numel(), dtype=torch.float64))",
    "codes": lambda g: f"{g.buffer(g.vocab, (a := g.f(3, 3, g.is_sequence)).shape[-1])}.mul_(0.9).index_add_(0, ids.flatten(), {g.fixed(a)}.flatten(0, 1), alpha=0.1)",
    "queue": lambda g: f"{g.buffer(4, (a := g.f(2, 2)).shape[1])}.index_copy_(0, ({(n := g.counter())} + torch.arange(1)) % 4, {g.fixed(a)}[:1]), {n}.add_(1)",
    "rows_written": lambda g: f"{g.buffer(g.vocab, (a := g.f(2, 2)).shape[1])}[ids[:1, :1].flatten()] = {g.fixed(a)}[:1]",
    "masked_rows": lambda g: f"{(b := g.buffer(4, 3))}.masked_fill_({b} > 0.3, {g.num()})",
    "where_written": lambda g: f"{(b := g.buffer(4, 3))}.copy_(torch.where({b} > {b}.mean(), {b} * 0.5, {b} + 0.1))",
    "exchanged": lambda g: f"{(b := g.buffer(4, 3))}.copy_({b}.flip(0)), {(c := g.buffer(4, 3))}.copy_({b} * 0.5), {b}.add_({c})",
    "one_reads_the_other": lambda g: f"{g.buffer(3)}.copy_({g.buffer(4, 3)}.mul_(0.9).sum(0).tanh())",
    **each("tanh_ sin_ neg_ zero_ abs_ sigmoid_", lambda g, n: f"{some(g)}.{n}()"),
    "mul_by_number": lambda g: f"{some(g)}.mul_({g.pick([0.5, -0.7, 0.9])})",
    "add_mean": lambda g: f"{some(g)}.mul_(0.5).add_({g.fixed(g.f())}.mean())",
    "fill_mean": lambda g: f"{some(g)}.fill_({g.fixed(g.f())}.mean())",
    "no_write": lambda g: f"{g.f()} + {g.buffer()}",
    "read_after": lambda g: f"{g.f()} * {some(g)}.mul_(0.5).sum()",
    "seen": lambda g: f"{some(g)}.clamp_(-0.5, 0.5).clone()",
}  # fmt: skip


MATRICES: dict[str, Row] = {
    "linear": lambda g: f"F.linear({(a := g.f(1))}, {g.leaf(g.upto(5, 1), a.shape[-1])})",
    "linear_bias": lambda g: f"F.linear({(a := g.f(1))}, {g.leaf((n := g.upto(5, 1)), a.shape[-1])}, {g.leaf(n)})",
    "linear_same": lambda g: f"F.linear({(a := g.f(1))}, {g.leaf(a.shape[-1], a.shape[-1])})",
    "matmul": lambda g: f"{(a := g.f(1))} @ {g.leaf(a.shape[-1], g.upto(4, 1))}",
    "rmatmul": lambda g: f"{g.leaf(3, (a := g.f(1)).shape[-2 if len(a.shape) > 1 else 0])} @ {a}",
    "mm": lambda g: f"torch.mm({(a := g.f(2, 2))}, {g.leaf(a.shape[1], g.upto(4, 1))})",
    "gram": lambda g: f"{(a := g.f(2))} @ {g.like(a)}.mT",
    # Composite ops whose results meet in one op.
    "masks_or": lambda g: f"{(a := g.f(1))} * ((({a} < -0.1) & ({(b := g.like(a))} < 0)) | (({a} > 0.1) & ({b} > 0)))",
    "composites": lambda g: f"F.{(n := g.pick(['hardtanh', 'tanhshrink', 'softsign', 'silu', 'mish']))}({(a := g.f(1))}) - F.{n}({g.like(a)})",
    "bmm": lambda g: f"torch.bmm({(a := g.f(3, 3))}, {g.like(a)}.transpose(1, 2))",
    "addmm": lambda g: f"torch.addmm({g.leaf(n := g.upto(4, 1))}, {(a := g.f(2, 2))}, {g.leaf(a.shape[1], n)}, beta=0.7)",
    "baddbmm": lambda g: f"torch.baddbmm({g.leaf()}, {(a := g.f(3, 3))}, {g.like(a)}.mT, alpha=0.5)",
    "mv": lambda g: f"torch.mv({(a := g.f(2, 2))}, {g.leaf(a.shape[1])})",
    "dot": lambda g: f"torch.dot({(a := g.f(1, 1))}, {g.like(a)})",
    "inner": lambda g: f"torch.inner({(a := g.f(1, 2))}, {g.like(a)})",
    "outer": lambda g: f"torch.outer({g.f(1, 1)}, {g.f(1, 1)})",
    "kron": lambda g: f"torch.kron({g.f(1, 2)} * 1.0, {g.leaf(2)})",  # eager backward reads an input as it is later
    "tensordot": lambda g: f"torch.tensordot({(a := g.f(1))}, {g.leaf(a.shape[-1], 2)}, dims=1)",
    "multi_dot": lambda g: f"torch.linalg.multi_dot([{(a := g.f(2, 2))}, {g.leaf(a.shape[1], 2)}, {g.leaf(2, 3)}])",
    "bilinear": lambda g: f"F.bilinear({(a := g.f(1, 3))}, {g.like(a)}, {g.leaf(2, a.shape[-1], a.shape[-1])})",
    "einsum_outer": lambda g: f"torch.einsum('...i,...j->...ij', {(a := g.f(1, 3))}, {g.like(a)})",
    "einsum_linear": lambda g: f"torch.einsum('...i,ij->...j', {(a := g.f(1))}, {g.leaf(a.shape[-1], 3)})",
    "einsum_heads": lambda g: f"torch.einsum('btd,hde->bhte', {(a := g.f(3, 3))}, {g.leaf(2, a.shape[-1], 2)})",
    "einsum_diagonal": lambda g: f"torch.einsum('...ii->...i', {g.f(2, 4, square)})",
    "einsum_sum": lambda g: f"torch.einsum('...i,...i->...', {(a := g.f(1))}, {g.like(a)})",
    "conv1d": lambda g: f"F.conv1d({(a := g.f(3, 3, lambda v: v.shape[-1] > 1))}, {g.leaf(3, a.shape[1], 2)}, {g.leaf(3)}, stride={g.upto(2, 1)}, padding={g.upto(1)})",
    "conv1d_depthwise": lambda g: f"F.conv1d({(a := g.f(3, 3))}, {g.leaf(a.shape[1], 1, 3)}, padding=1, groups={a.shape[1]})",
    "conv2d": lambda g: f"F.conv2d({(a := g.f(4, 4))}, {g.leaf(2, a.shape[1], 3, 3)}, padding=1)",
    "conv_transpose1d": lambda g: f"F.conv_transpose1d({(a := g.f(3, 3))}, {g.leaf(a.shape[1], 2, 2)}, stride=2)",
    "attention": lambda g: f"F.scaled_dot_product_attention({(a := g.f(3))}, {g.like(a)}, {g.like(a)})",
    "attention_causal": lambda g: f"F.scaled_dot_product_attention({(a := g.f(3))}, {g.like(a)}, {g.like(a)}, is_causal=True)",
    "attention_heads": lambda g: f"F.scaled_dot_product_attention(*({g.f(3, 3, last_even)}.unflatten(-1, (2, -1)).transpose(1, 2) for _ in range(3)), scale=0.7)",
    "attention_bias": lambda g: f"F.scaled_dot_product_attention({(a := g.f(3))}, {g.like(a)}, {g.like(a)}, {g.leaf(a.shape[-2], a.shape[-2])})",
    "attention_mask": lambda g: f"F.scaled_dot_product_attention({(a := g.f(3))}, {g.like(a)}, {g.like(a)}, {g.attention_mask(a.shape[-2])})",
    "attention_one_query": lambda g: f"F.scaled_dot_product_attention({(a := g.f(3))}[..., :1, :], {a}, {a}, {g.attention_mask(a.shape[-2], True)})",
    "attention_gqa": lambda g: f"F.scaled_dot_product_attention({(a := g.f(4, 4, lambda v: v.shape[1] % 2 == 0))}, {a}[:, :1], {a}[:, :1], enable_gqa=True)",
    "attention_by_hand": lambda g: f"({(a := g.f(3))} @ {a}.mT).masked_fill(torch.ones({a.shape[-2]}, {a.shape[-2]}).tril() == 0, float('-inf')).softmax(-1) @ {g.like(a)}",
    "det": lambda g: f"torch.linalg.det({positive(g)})",
    "slogdet": lambda g: f"torch.linalg.slogdet({positive(g)})",
    "slogdet_value": lambda g: f"torch.slogdet({positive(g)})[1]",
    "logdet": lambda g: f"torch.logdet({positive(g)})",
    "inv_ex": lambda g: f"torch.linalg.inv_ex({positive(g)})[0]",
    "inv": lambda g: f"torch.linalg.inv({positive(g)})",
    "solve_ex": lambda g: f"torch.linalg.solve_ex({(a := positive(g))}, {a} + 0.3)[0]",
    "solve": lambda g: f"torch.linalg.solve({(a := positive(g))}, {a} + 0.3)",
    "cholesky_ex": lambda g: f"torch.linalg.cholesky_ex({positive(g)})[0]",
    "cholesky": lambda g: f"torch.linalg.cholesky({positive(g)})",
    "solve_triangular": lambda g: f"torch.linalg.solve_triangular({(a := positive(g))}.tril(), {a}, upper=False)",
    "matrix_exp": lambda g: f"torch.linalg.matrix_exp({g.f(2, 3, square)} * 0.2)",
    "matrix_power": lambda g: f"torch.linalg.matrix_power({g.f(2, 3, square)} * 0.4, 3)",
}  # fmt: skip

INDEX: dict[str, Row] = {
    "embedding": lambda g: f"F.embedding({g.ids()}, {g.leaf(g.vocab, g.upto(4, 1))})",
    "embedding_padding": lambda g: f"F.embedding({g.ids()}, {g.leaf(g.vocab, 3)}, padding_idx=0)",
    "embedding_by_index": lambda g: f"{g.leaf(g.vocab, 2)}[{g.ids()}]",
    "one_hot": lambda g: f"F.one_hot({g.ids()}, {g.vocab}).double()",
    "gather": lambda g: f"{(a := g.f(1))}.gather({(d := g.dim(a))}, {g.indices(a.shape, a.shape[d])})",
    "take_along_dim": lambda g: f"torch.take_along_dim({(a := g.distinct())}, {a}.argsort({(d := g.dim(a))}), {d})",
    "index_select": lambda g: f"{(a := g.f(1))}.index_select({(d := g.dim(a))}, torch.tensor({g.list(a.shape[d])}))",
    "take": lambda g: f"torch.take({(a := g.f(1))}, torch.tensor({g.list(a.numel)}))",
    "index_list": lambda g: f"{(a := g.f(1))}[{g.list(a.shape[0])}]",
    "index_list_last": lambda g: f"{(a := g.f(1))}[..., {g.list(a.shape[-1])}]",
    "index_list_second": lambda g: f"{(a := g.f(2))}[:, {g.list(a.shape[1])}]",
    "index_two_lists": lambda g: f"{(a := g.f(2))}[{g.list(a.shape[0], 2)}, {g.list(a.shape[1], 2)}]",
    "index_apart": lambda g: f"{(a := g.f(3))}[{g.list(a.shape[0], 2)}, :, {g.list(a.shape[2], 2)}]",
    "index_none": lambda g: f"{(a := g.f(2, 3))}[None, {g.list(a.shape[0])}]",
    "index_tensor": lambda g: f"{(a := g.f(1))}[torch.arange({a.shape[0]}).flip(0)]",
    "index_bool_list": lambda g: f"{(a := g.f(1))}[{[True] + [g.flag() for _ in range(a.shape[0] - 1)]}]",
    "index_drawn": lambda g: f"{(a := g.f(1))}[{g.ids()} % {a.shape[0]}]",
    "index_computed": lambda g: f"{(a := g.distinct())}.gather({(d := g.dim(a))}, {a}.argmax({d}, keepdim=True))",
    "masked_fill": lambda g: f"{(a := g.f())}.masked_fill({g.bool(a)}, {g.num()})",
    "masked_fill_tensor": lambda g: f"{(a := g.f())}.masked_fill({g.bool(a)}, {g.leaf()})",
    "masked_scatter": lambda g: f"{(a := g.f(1))}.masked_scatter({g.bool(a)}, {g.like(a)}.sin())",
    "index_add": lambda g: f"{(a := g.f(1))}.index_add({(d := g.dim(a))}, torch.tensor({(k := g.list(a.shape[d]))}), {g.like(a)}.narrow({d}, 0, {len(k)}))",
    "index_copy": lambda g: f"{(a := g.f(1))}.index_copy({(d := g.dim(a))}, torch.tensor({(k := g.list(a.shape[d], unique=True))}), {g.like(a)}.narrow({d}, 0, {len(k)}))",
    "index_fill": lambda g: f"{(a := g.f(1))}.index_fill({(d := g.dim(a))}, torch.tensor({g.list(a.shape[d])}), {g.num()})",
    "index_put": lambda g: f"{(a := g.f(1))}.index_put((torch.tensor({g.list(a.shape[0], 2)}),), {a}[:1].cos(), accumulate=True)",
    "scatter": lambda g: f"{(a := g.f(1))}.scatter({(d := g.dim(a))}, {g.indices(a.shape, a.shape[d], 1)}, {g.like(a)}.cos())",
    "scatter_number": lambda g: f"{(a := g.f(1))}.scatter({(d := g.dim(a))}, {g.indices(a.shape, a.shape[d], 1)}, {g.num()})",
    "scatter_add": lambda g: f"{(a := g.f(1))}.scatter_add({(d := g.dim(a))}, {g.indices(a.shape, a.shape[d])}, {g.like(a)}.cos())",
    "scatter_mean": lambda g: f"{(a := g.f(1))}.scatter_reduce({(d := g.dim(a))}, {g.indices(a.shape, a.shape[d])}, {g.like(a)}.cos(), '{g.pick(['sum', 'mean'])}')",
    "bucketize": lambda g: f"torch.bucketize({g.f(1)}, torch.tensor([-0.4, 0.1, 0.8], dtype=torch.float64))",
    "cumsum_int": lambda g: f"torch.cumsum({(a := g.int())}, {g.dim(a)})",
    "int_arithmetic": lambda g: f"({g.int(0)} * 2 + 1) % {g.vocab}",
    "int_eq": lambda g: f"{g.int(0)} == {g.upto(2)}",
    "int_sum": lambda g: f"{g.int(0)}.sum()",
}  # fmt: skip

# What is written to is an activation, or a view of one; the write itself is often read by its new name.
IN_PLACE: dict[str, Row] = {
    **each("tanh_ sigmoid_ sin_ cos_ relu_ neg_ abs_ square_ erf_ atan_ floor_", lambda g, n: f"{g.act()}.{n}()"),
    **each("mul_ add_ sub_", lambda g, n: f"{(a := g.act())}.{n}({g.fitting(a)})"),
    **each("absolute_ negative_ arctan_ arcsinh_ fix_ selu_ sinc_ sgn_ logical_not_", lambda g, n: f"torch.{n}({g.act()})" if n == "selu_" else f"{g.act()}.{n}()"),
    **each("multiply_ subtract_ clamp_min_ clamp_max_", lambda g, n: f"{(a := g.act())}.{n}({g.fitting(a)})"),
    "divide_": lambda g: f"{(a := g.act())}.{g.pick(['divide_', 'true_divide_'])}({g.fitting(a)}.square() + 1.1)",
    "clip_": lambda g: f"{g.act()}.clip_(-0.9, {g.num()} + 1)",
    "xlogy_": lambda g: f"{(a := g.act())}.xlogy_({g.fitting(a)}.square() + 0.5)",
    "float_power_": lambda g: f"{g.act()}.float_power_(2)",
    **each("celu threshold", lambda g, n: f"F.{n}({g.act()}, {'0.3, 0.1, ' if n == 'threshold' else '1.1, '}inplace=True)"),
    **each("SELU ReLU", lambda g, n: f"torch.nn.{n}(True)({g.act()})"),
    "mul_number_": lambda g: f"{g.act()}.mul_({g.num()})",
    "div_": lambda g: f"{(a := g.act())}.div_({g.fitting(a)}.square() + 1.1)",
    "pow_": lambda g: f"{g.act()}.pow_(2)",
    "clamp_": lambda g: f"{g.act()}.clamp_(-0.9, 1.2)",
    "leaky_relu_": lambda g: f"F.leaky_relu({g.act()}, 0.2, inplace=True)",
    **each("silu elu hardtanh relu6 hardswish", lambda g, n: f"F.{n}({g.act()}, inplace=True)"),
    "copy_": lambda g: f"{(a := g.act())}.copy_({g.fitting(a)})",
    "zero_": lambda g: f"{g.act()}.zero_()",
    "fill_": lambda g: f"{g.act()}.fill_({g.num()})",
    "masked_fill_": lambda g: f"{(a := g.act())}.masked_fill_({g.bool(a)}, {g.num()})",
    "masked_fill_all_": lambda g: f"{(a := g.act())}.masked_fill_({a} > 0.3, {g.num()})",
    "lerp_": lambda g: f"{(a := g.act())}.lerp_({g.like(a)}, 0.3)",
    "addcmul_": lambda g: f"{(a := g.act())}.addcmul_({g.like(a)}, {g.like(a)}, value=0.4)",
    "addcdiv_": lambda g: f"{(a := g.act())}.addcdiv_({g.like(a)}, {g.like(a)}.square() + 0.8, value=0.4)",
    "addmm_": lambda g: f"{(a := g.act(2, 2))}.addmm_({g.leaf(a.shape[0], 2)}, {g.leaf(2, a.shape[1])})",
    # Of leaves: where a factor shares the result's memory, torch's own kernel reads what it has written already.
    "baddbmm_": lambda g: (
        f"{(a := g.act(3, 3))}.baddbmm_({g.leaf(a.shape[0], a.shape[1], 2)}, {g.leaf(a.shape[0], 2, a.shape[2])})"
    ),
    "addbmm_": lambda g: f"{(a := g.act(2, 2))}.addbmm_({g.leaf(2, a.shape[0], 1)}, {g.leaf(2, 1, a.shape[1])})",
    "addmv_": lambda g: f"{(a := g.act(1, 1))}.addmv_({g.leaf(a.shape[0], 2)}, {g.leaf(2)})",
    "addr_": lambda g: f"{(a := g.act(2, 2))}.addr_({g.leaf(a.shape[0])}, {g.leaf(a.shape[1])})",
    "cumsum_": lambda g: f"{(a := g.act(1))}.cumsum_({g.dim(a)})",
    **each("tril_ triu_", lambda g, n: f"{g.act(2)}.{n}({g.upto(1, -1)})"),
    "fill_diagonal_": lambda g: f"{g.act(2, 2)}.fill_diagonal_({g.num()})",
    "index_add_": lambda g: f"{(a := g.act(1))}.index_add_({(d := g.dim(a))}, torch.tensor({(k := g.list(a.shape[d]))}), {g.like(a)}.narrow({d}, 0, {len(k)}).sin())",
    "index_copy_": lambda g: f"{(a := g.act(1))}.index_copy_({(d := g.dim(a))}, torch.tensor({(k := g.list(a.shape[d], unique=True))}), {g.like(a)}.narrow({d}, 0, {len(k)}).sin())",
    "index_fill_": lambda g: f"{(a := g.act(1))}.index_fill_({(d := g.dim(a))}, torch.tensor({g.list(a.shape[d])}), {g.num()})",
    "index_put_": lambda g: f"{(a := g.act(1))}.index_put_((torch.tensor({g.list(a.shape[0], 2)}),), {g.like(a)}[:1].cos(), accumulate=True)",
    "scatter_": lambda g: f"{(a := g.act(1))}.scatter_({(d := g.dim(a))}, {g.indices(a.shape, a.shape[d], 1)}, {g.like(a)}.cos())",
    "scatter_number_": lambda g: f"{(a := g.act(1))}.scatter_({(d := g.dim(a))}, {g.indices(a.shape, a.shape[d], 1)}, {g.num()})",
    "scatter_add_": lambda g: f"{(a := g.act(1))}.scatter_add_({(d := g.dim(a))}, {g.indices(a.shape, a.shape[d])}, {g.like(a)}.cos())",
    "scatter_reduce_": lambda g: f"{(a := g.act(1))}.scatter_reduce_({(d := g.dim(a))}, {g.indices(a.shape, a.shape[d])}, {g.like(a)}.cos(), 'sum')",
    "put_": lambda g: f"{(a := g.act(1))}.put_(torch.tensor({(k := g.list(a.numel, unique=True))}), torch.tensor({[0.5 * i for i in range(len(k))]}, dtype=torch.float64))",
    "masked_scatter_": lambda g: f"{(a := g.act(1))}.masked_scatter_({g.bool(a)}, {g.like(a)}.sin())",
    "add_view_": lambda g: f"{g.act(1)}[..., {g.slice()}].mul_({g.num()})",
    "add_select_": lambda g: f"{g.act(1)}[0].add_({g.num()})",
    "transpose_write_": lambda g: f"{g.act(2)}.mT.mul_({g.num()})",
    "iadd": lambda g: f"{(a := g.act())} += {g.fitting(a)}",
    "imul": lambda g: f"{(a := g.act())} *= {g.fitting(a)}",
    "setitem": lambda g: f"{(a := g.act(1))}[{g.pick([0, -1])}] = {g.like(a)}[0].sin()",
    "setitem_number": lambda g: f"{g.act(1)}[{g.pick(['0', '..., 0', '1:', '..., ::2'])}] = {g.num()}",
    "setitem_all": lambda g: f"{(a := g.act(1))}[:] = {g.fitting(a)}.sin()",
    "setitem_slice": lambda g: f"{(a := g.act(1))}[..., {(s := g.slice())}] = {g.like(a)}[..., {s}].sin()",
    "setitem_slice_mul": lambda g: f"{g.act(1)}[{g.slice()}] *= {g.num()}",
    "setitem_list": lambda g: f"{(a := g.act(2))}[:, {(k := g.list(a.shape[1], unique=True))}] = {g.like(a)}[:, {k}].sin()",
    "setitem_list_number": lambda g: f"{(a := g.act(1))}[{g.list(a.shape[0])}] = {g.num()}",
    "setitem_mask": lambda g: f"{(a := g.act(1))}[{a} > 0.2] = {g.num()}",
    "setitem_bool_list": lambda g: f"{(a := g.act(1))}[{[True] + [g.flag() for _ in range(a.shape[0] - 1)]}] = {g.num()}",
    "buffer_of_parts": lambda g: f"torch.zeros({(a := g.f(1, 3)).shape[0] * 2}, *{tuple(a.shape[1:])}, dtype=torch.float64)",
    "zeros_written": lambda g: f"torch.zeros_like({(a := g.f())}).copy_({g.like(a)})",
    "zeros_index_add_": lambda g: f"torch.zeros(3, *{tuple((a := g.f(1, 3)).shape[1:])}, dtype=torch.float64).index_add_(0, torch.arange({a.shape[0]}) % 3, {a})",
    "copy_low_": lambda g: f"torch.zeros({tuple((a := g.f()).shape)}).copy_({a}).copy_({g.fitting(a)})",
    "copy_int_": lambda g: f"torch.zeros({tuple((a := g.f()).shape)}, dtype=torch.int64).copy_({a} * 3)",
    "out": lambda g: f"torch.sin({(a := g.f())}.detach(), out=torch.empty_like({a}))",
    "out_view": lambda g: f"torch.mul({(a := g.f(1))}.detach(), {g.num()}, out=torch.zeros(2, *{tuple(a.shape)}, dtype=torch.float64)[1])",
    "strided_": lambda g: f"{(a := g.act(1))}.as_strided(({a.shape[-1] // 2},), (2,), {a}.storage_offset()).mul_({g.num()})",
    "stacked": lambda g: f"torch.zeros(3, *{tuple(g.f(0, 3).shape)}, dtype=torch.float64)",
    "setitem_turn": lambda g: f"{g.act(2)}[{g.turn()} % {g.pick([1, 2])}] = {g.num()}",
    "setitem_leaf_add": lambda g: f"{(a := g.act(2))}[{g.upto(a.shape[0] - 1)}] += {g.leaf(*a.shape[1:])}",
    "setitem_none": lambda g: f"{(a := g.act(2))}[:, None, {g.list(a.shape[1], unique=True)}] = {g.num()}",
    "masked_fill_leaf_": lambda g: f"{(a := g.act(1))}.masked_fill_({a} > 0.2, {g.leaf()})",
    "setitem_accumulate": lambda g: f"{(a := g.act(2))}.index_put_((torch.arange({a.shape[0]})[:, None], torch.tensor({g.list(a.shape[1], 2)})), {g.leaf()}, accumulate=True)",
    "index_reduce_": lambda g: f"{(a := g.act(1))}.index_reduce_({(d := g.dim(a))}, torch.tensor({(k := g.list(a.shape[d], unique=True))}), {g.like(a)}.narrow({d}, 0, {len(k)}).sin(), 'mean')",
    "diagonal_": lambda g: f"{g.act(2)}.diagonal(dim1=-2, dim2=-1).mul_({g.num()})",
    "mT_": lambda g: f"{g.act(2)}.mT[..., 0].add_({g.num()})",
    "flatten_": lambda g: f"{g.act(1)}.flatten()[::2].sub_({g.num()})",
    "unfold_": lambda g: f"{(a := g.act(1))}.unfold({g.dim(a, 2)}, 2, 2)[..., 0].mul_({g.num()})",
    "foreach_": lambda g: f"torch._foreach_mul_([{g.act()}, {g.act()}.clone()], {g.num()})",
    "constant_": lambda g: f"torch.tensor({[g.num() for _ in range(g.f(1).shape[-1])]}, dtype=torch.float64).mul_({g.leaf()})",
    "transpose_": lambda g: f"{(a := g.act(2))}.transpose_({g.dim(a)}, {g.dim(a)})",
    "unsqueeze_self_": lambda g: f"{g.act(0, 3)}.unsqueeze_(-1)",
    "unsqueeze_": lambda g: f"{g.act(0, 3)}.clone().unsqueeze_(0)",
    "t_": lambda g: f"{g.act(2, 2)}.clone().t_()",
}  # fmt: skip

VIEWED = (
    "", "", "[0]", "[..., {s}]", "[{s}]", "[..., -1]", ".mT", ".flatten()", ".view(-1)[{s}]", ".select(-1, 0)", ".chunk(2, -1)[0]",
    ".split(1, -1)[-1]", ".unbind(0)[-1]", ".diagonal(dim1=-2, dim2=-1)", ".unsqueeze(0)", ".movedim(0, -1)", ".unfold(-1, 1, 2)",
)  # fmt: skip
WRITTEN = (
    "mul_({n})", "add_({n})", "add_({w})", "copy_({w})", "clamp_(-0.4, 0.5)", "clip_(max=0.6)", "zero_()", "fill_({n})", "square_()",
    "tanh_()", "neg_()", "masked_fill_({m}, {n})", "fill_({w}.sum())", "relu_()", "cumsum_(0)", "div_(1.7)", "sub_({n}).mul_(0.5)",
)  # fmt: skip


def past(g: Any, template: str) -> str:
    """Write what autograd does not see: a change of a value `{a}` or a view `{v}` of it, of another `{w}` that has one element."""
    a = g.act(1)
    view = g.pick(VIEWED).format(s=g.slice())
    write = g.pick(WRITTEN).format(n=g.num(), w=f"{g.f()}.detach().mean()", m=f"{a}.detach(){view} > 0.1")
    return template.format(a=a, v=view, write=write)


# Under no_grad torch takes the gradient as if nothing was written; through `.data`, too.
SILENT: dict[str, Row] = {
    **each("silent_data silent_detach", lambda g, n: past(g, f"{{a}}.{'data' if n == 'silent_data' else 'detach()'}{{v}}.{{write}}")),
    "silent_view_data": lambda g: past(g, "{a}{v}.data.{write}"),
    **each("silent_no_grad silent_decorated", lambda g, n: past(g, "torch.no_grad()(lambda: {a}{v}.{write})()")),
    "silent_nested": lambda g: past(g, "torch.no_grad()(lambda: torch.enable_grad()(lambda: {a}.detach(){v})().{write})()"),
    "silent_set": lambda g: past(g, "torch.no_grad()(lambda: {a}.__setitem__(slice(0, 1), {a}[:1] * 0.5))()"),
    "silent_out": lambda g: past(g, "torch.no_grad()(lambda: torch.mul({a}, 0.7, out={a}))()"),
    "silent_foreach": lambda g: f"torch.no_grad()(lambda: torch._foreach_mul_([{g.act()}, {g.act()}], {g.num()}))()",
    "silent_copy": lambda g: f"torch.no_grad()(lambda: {(a := g.act())}.copy_({g.fitting(a)}))()",
    "silent_index": lambda g: f"torch.no_grad()(lambda: {(a := g.act(1))}.index_fill_({(d := g.dim(a))}, torch.tensor({g.list(a.shape[d])}), {g.num()}))()",
    "silent_loop": lambda g: f"torch.no_grad()(lambda: [r.mul_(j) for j, r in enumerate({g.act(1)}.unbind(0))][-1])()",
    "silent_alias": lambda g: f"torch.no_grad()(lambda: {(a := g.act(2))}.mT.mul_({g.num()}))(), {a}[..., 0], {a}.mul_(1.1)",
}  # fmt: skip

COMPLEX: dict[str, Row] = {
    "complex": lambda g: f"torch.complex({(a := g.f())}, {g.like(a)})",
    "polar": lambda g: f"torch.polar({(a := g.f())}.sigmoid(), {g.like(a)})",
    "rotary": lambda g: f"torch.view_as_real(torch.view_as_complex({(a := g.f(1, fits=last_even))}.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones({a.shape[-1] // 2}, dtype=torch.float64), torch.arange({a.shape[-1] // 2}).double())).flatten(-2)",
    "to_complex": lambda g: f"{g.f()}.to(torch.complex128)",
    "mul_complex_number": lambda g: f"{g.f()} * (0.5 + 0.3j)",
    **each("fft rfft ifft hfft", lambda g, n: f"torch.fft.{n}({(a := g.f(1))}, dim={g.dim(a, 2)})"),
    **each("fft_complex ifft_complex irfft_complex", lambda g, n: f"torch.fft.{n[:-8]}({(a := g.complex(1))}, dim={g.dim(a, 2)})"),
    "fft2": lambda g: f"torch.fft.fft2({g.f(2)})",
    "fftshift": lambda g: f"torch.fft.fftshift({g.complex(1)})",
    **each("real imag", lambda g, n: f"{g.complex()}.{n}"),
    "conj": lambda g: f"{g.complex()}.conj()",
    "abs_complex": lambda g: f"({g.complex()} + 3.3).abs()",
    "angle": lambda g: f"({g.complex()} + 7.3).angle()",
    **each("mul_complex add_complex", lambda g, n: f"torch.{n[:3]}({(a := g.complex())}, {g.like(a)})"),
    "mul_real": lambda g: f"{g.complex()} * {g.leaf()}",
    "exp_complex": lambda g: f"torch.exp(1j * {g.f()})",
    "square_complex": lambda g: f"{g.complex()} ** 2",
    "matmul_complex": lambda g: f"{(a := g.complex(2))} @ {g.like(a)}.mH",
    "sum_complex": lambda g: f"{(a := g.complex(1))}.sum({g.dim(a)})",
    "conj_mul": lambda g: f"({(a := g.complex())} * {g.like(a)}.conj()).real",
    "slice_complex": lambda g: f"{g.complex(1)}[..., {g.slice()}]",
    "flatten_complex": lambda g: f"torch.view_as_real({g.complex(1)}).flatten(-2)",
    "mul_complex_": lambda g: f"{g.complex_act()}.mul_(0.3 + 0.4j)",
    "real_write_": lambda g: f"{g.complex_act()}.real.mul_({g.num()})",
}  # fmt: skip

# What is small and made of leaves alone may cross units; what is not is made again where it is read.
LEAVES: dict[str, Row] = {
    **each("leaf_sum leaf_mean leaf_norm leaf_max leaf_min leaf_std leaf_var", lambda g, n: f"{g.any_leaf()}.{n[5:]}()"),
    **each("leaf_max_dim leaf_min_dim leaf_median_dim", lambda g, n: f"{(a := g.any_leaf())}.abs().{n[5:-4]}({g.dim(a)})[0]"),
    **each("leaf_std_mean leaf_var_mean", lambda g, n: f"torch.{n[5:]}({g.any_leaf()})"),
    "leaf_aminmax": lambda g: f"torch.aminmax({g.any_leaf()})",
    "leaf_slogdet": lambda g: f"torch.linalg.slogdet({g.leaf(3, 3)})[1]",
    "leaf_softmax": lambda g: f"{(a := g.any_leaf())}.softmax({g.dim(a)})",
    "leaf_transpose": lambda g: f"{g.any_leaf(2)}.mT",
    "leaf_cast": lambda g: f"{g.any_leaf()}.to(torch.float64)",
    "leaf_exp": lambda g: f"{g.any_leaf(0)}.tanh().exp()",
    "leaf_detach": lambda g: f"{g.any_leaf(0)}.detach()",
    "leaf_item_sum": lambda g: f"{g.any_leaf()}.sum().expand_as({g.f()}) * 0.1",
    "leaf_pair": lambda g: f"{g.any_leaf()}.square().sum() * {g.any_leaf()}.abs().mean()",
    "weight_norm": lambda g: f"F.linear({(a := g.f(1))}, {(w := g.leaf(3, a.shape[-1]))} / ({w}.norm(dim=1, keepdim=True) + 0.1) * {g.leaf(3, 1)})",
    "weight_standardised": lambda g: f"F.linear({(a := g.f(1))}, ({(w := g.leaf(3, a.shape[-1]))} - {w}.mean()) / ({w}.var() + 0.1).sqrt())" ,
    "quantised": lambda g: f"F.linear({(a := g.f(1))}, {(w := g.leaf(3, a.shape[-1]))} / ({w}.abs().max(1, keepdim=True)[0] + 0.1))",
    "divided_by_max": lambda g: f"{g.f()} / ({(a := g.any_leaf())}.abs().max({g.dim(a)})[0].sum() + 0.5)",
    "lora": lambda g: f"F.linear({(a := g.f(1))}, {g.leaf(3, 2)} @ {g.leaf(2, a.shape[-1])})",
    "leaf_cat": lambda g: f"torch.cat([{g.leaf(2, 3)}, {g.leaf(1, 3)}])",
    "leaf_select": lambda g: f"{g.any_leaf()}[0]",
    "leaf_slice": lambda g: f"{g.any_leaf()}[..., {g.slice()}]",
    "leaf_index": lambda g: f"{(a := g.any_leaf())}[{g.list(a.shape[0])}]",
    "leaf_split": lambda g: f"{g.any_leaf()}.split(1)",
    "leaf_sort": lambda g: f"{(a := g.any_leaf())}.sort({g.dim(a)})[0]",
    "leaf_clone_written": lambda g: f"{g.any_leaf(0)}.clone().mul_({g.num()})",
    "leaf_as_buffer": lambda g: f"{(a := g.any_leaf())}.new_zeros({a.shape[0]}).add_({a}.sum())",
}  # fmt: skip

CASTS: dict[str, Row] = {
    "low": lambda g: f"y.to(torch.{g.pick(['float32', 'bfloat16', 'float16'])})",
    "low_x": lambda g: f"x.{g.pick(['float', 'bfloat16', 'half'])}()",
    "double": lambda g: f"{g.low()}.double()",
    "to_double": lambda g: f"{g.low()}.to(torch.float64)",
    "type_as": lambda g: f"{g.low()}.type_as({g.f()})",
    "mul_mixed": lambda g: f"{g.low()} * {g.leaf()}.expand(1)",
    "add_mixed": lambda g: f"{g.f()} + {g.low()}",
    "cat_mixed": lambda g: f"torch.cat([{g.f(1)}, {g.low()}], -1)",
    "where_mixed": lambda g: f"torch.where({g.bool(a := g.f())}, {a}, {g.low()})",
    "bool_double": lambda g: f"{g.bool()}.double()",
    "bool_sum": lambda g: f"{g.bool()}.sum()",
    "bool_not": lambda g: f"~{g.bool()}",
    "bool_gt": lambda g: f"{g.f()} > 0.11",
    "bool_and": lambda g: f"{g.bool()} & ({g.f()} < 0.9)",
    "int_double": lambda g: f"{g.int(0)}.double() * 0.1",
    "int_mul": lambda g: f"{g.int(0)} * {g.leaf()}",
    "int32": lambda g: f"{g.int(0)}.int().long()",
    "int_div": lambda g: f"{g.int(0)} / {g.upto(3, 1)}",
}  # fmt: skip

CONSTANTS: dict[str, Row] = {
    **each("zeros_like ones_like", lambda g, n: f"torch.{n}({g.f()})"),
    "full": lambda g: f"torch.full({tuple(g.f().shape)}, {g.num()}, dtype=torch.float64)",
    "arange": lambda g: f"torch.arange({g.f(1).shape[-1]}, dtype=torch.float64) * 0.3",
    "arange_int": lambda g: f"torch.arange({g.f(1).shape[-1]})",
    "arange_mask": lambda g: f"torch.arange({(a := g.f(1)).shape[-1]}) < {g.upto(a.shape[-1], 1)}",
    "tril_mask": lambda g: f"torch.ones({(a := g.f(2)).shape[-2]}, {a.shape[-1]}, dtype=torch.bool).tril()",
    "linspace": lambda g: f"torch.linspace(-1, 1, {g.f(1).shape[-1]}, dtype=torch.float64)",
    "eye": lambda g: f"torch.eye({g.f(1).shape[-1]}, dtype=torch.float64)",
    "tensor": lambda g: f"torch.tensor({[g.num() for _ in range(g.f(1).shape[-1])]}, dtype=torch.float64)",
    "new_full": lambda g: f"{(a := g.f(1))}.new_full(({a.shape[-1]},), {g.num()})",
    "new_tensor": lambda g: f"{g.f()}.new_tensor([0.3])",
    "scalar_tensor": lambda g: f"torch.tensor({g.num()}, dtype=torch.float64)",
    "positions": lambda g: f"torch.outer(torch.arange({g.f(1).shape[-1]}).double(), 0.5 ** torch.arange(2).double()).sin()",
}  # fmt: skip

LOSSES: dict[str, Row] = {
    "cross_entropy": lambda g: f"F.cross_entropy({(a := g.f(2, 2))}, torch.tensor({g.list(a.shape[1], a.shape[0])}))",
    "cross_entropy_smooth": lambda g: f"F.cross_entropy({(a := g.f(2, 2))}, torch.tensor({g.list(a.shape[1], a.shape[0])}), label_smoothing=0.1, reduction='sum')",
    "cross_entropy_ignore": lambda g: f"F.cross_entropy({(a := g.f(2, 2, lambda v: v.shape[0] > 1))}, torch.tensor([{', '.join(map(str, g.list(a.shape[1], a.shape[0] - 1)))}, -100]))",
    "cross_entropy_tokens": lambda g: f"F.cross_entropy(F.linear({(a := g.f(3, 3, g.is_sequence))}, {g.leaf(g.vocab, a.shape[-1])}).flatten(0, 1), ids.flatten(), reduction='none')",
    "cross_entropy_weighted": lambda g: f"F.cross_entropy({(a := g.f(2, 2))}, torch.tensor({g.list(a.shape[1], a.shape[0])}), {a}[0].detach().sigmoid())",
    "nll_loss": lambda g: f"F.nll_loss({(a := g.f(2, 2))}.log_softmax(1), torch.tensor({g.list(a.shape[1], a.shape[0])}), reduction='none')",
    **each("mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss", lambda g, n: f"F.{n}({(a := g.f())}, {g.like(a)}.detach() + 0.13)"),
    "kl_div": lambda g: f"F.kl_div({(a := g.f(1))}.log_softmax(-1), {g.like(a)}.softmax(-1), reduction='sum')",
    "bce_with_logits": lambda g: f"F.binary_cross_entropy_with_logits({(a := g.f())}, {g.like(a)}.sigmoid(), reduction='none')",
    "bce": lambda g: f"F.binary_cross_entropy({(a := g.f())}.sigmoid() * 0.9 + 0.05, {g.like(a)}.sigmoid().detach())",
    "poisson_nll": lambda g: f"F.poisson_nll_loss({(a := g.f())}.tanh(), {g.like(a)}.sigmoid().detach())",
    "gaussian_nll": lambda g: f"F.gaussian_nll_loss({(a := g.f(1))}, {g.like(a)}, {a}.square() + 0.5)",
    "cosine_embedding": lambda g: f"F.cosine_embedding_loss({(a := g.f(2, 2))} + 1.7, {g.like(a)}.exp(), torch.ones({a.shape[0]}))",
    "margin_ranking": lambda g: f"F.margin_ranking_loss({(a := g.f(1, 1))}, {g.like(a)} + 0.17, torch.ones({a.shape[0]}), margin=0.3)",
    "triplet": lambda g: f"F.triplet_margin_loss({(a := g.f(2, 2))}, {g.like(a)} + 1.1, {g.like(a)} - 1.2)",
    "masked_mean": lambda g: f"({g.f(3, 3, g.is_sequence)} * m[..., None]).sum() / m.sum()",
    "cross_entropy_soft": lambda g: f"F.cross_entropy({(a := g.f(2, 2))}, {g.like(a)}.softmax(1))",
}  # fmt: skip

FAMILIES: dict[str, dict[str, Row]] = {
    "pointwise": POINTWISE, "binary": BINARY, "reductions": REDUCTIONS, "views": VIEWS, "copies": COPIES,
    "matrices": MATRICES, "index": INDEX, "in place": IN_PLACE, "silent": SILENT, "complex": COMPLEX, "leaves": LEAVES,
    "casts": CASTS, "constants": CONSTANTS, "losses": LOSSES, "transforms": TRANSFORMS,
    "ragged": RAGGED, "functions": FUNCTIONS, "buffers": BUFFERS,
}  # fmt: skip
