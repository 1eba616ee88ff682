"""Rows of the grammar that compute element by element, reduce, view and copy; see `grammar`.

A builder draws values, dims and numbers from a `programs.Scope` and returns an expression, whose result
gets a name, or a statement. Rows are tame: no poles, no steps where a gradient is asked for, and no ties
where an order or an extreme is.
"""
# ruff: noqa: E501  (a row is a line)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Row = Callable[[Any], str]


def each(names: str, template: Callable[[Any, str], str]) -> dict[str, Row]:
    """One row per name, all of one template."""
    return {name: (lambda g, name=name: template(g, name)) for name in names.split()}


def square(v: Any) -> bool:
    return v.shape[-1] == v.shape[-2] <= 5


def last_even(v: Any) -> bool:
    return v.shape[-1] % 2 == 0


def positive(g: Any) -> str:
    """A symmetric positive definite matrix [..., n, n] made of a value."""
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
