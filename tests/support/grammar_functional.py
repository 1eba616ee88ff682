"""Rows of the grammar that transform functions inside the program, or make lengths of data; see `grammar`."""
# ruff: noqa: E501  (a row is a line)

from __future__ import annotations

from typing import Any

from grammar_pointwise import Row, each

SAME_SHAPE = (
    "v.sin()", "v.tanh() * v", "F.gelu(v)", "F.silu(v) * 0.7", "v.softmax(-1)", "(v.square() + 1.3).log()",
    "F.layer_norm(v, v.shape[-1:])", "v.cumsum(-1).sin()", "v * v.mean()", "v.flip(-1).sigmoid() * v", "v / (1.5 + v.norm())",
    "torch.where(v > 0.13, v.sin(), v * 0.5)", "torch.zeros_like(v).copy_(v).mul_(v)", "v.clone().cos_()", "v.index_select(-1, torch.arange(v.shape[-1]).flip(0)) * v",
)  # fmt: skip
OTHER_SHAPE = ("v.sum()", "v.logsumexp(-1)", "torch.cat([v, v.exp() * 0.1], -1)", "torch.outer(v.flatten(), v.flatten())", "v.square().mean(-1)", "torch.stack([v, v.cos()])")  # fmt: skip


def same(g: Any, a: Any) -> str:
    """A function of `v` that keeps its shape, and often reads a value or a leaf outside of it."""
    body = g.pick(SAME_SHAPE)
    return f"{body} * {g.fitting(a)}" if g.flag() else body


def any_shape(g: Any, a: Any) -> str:
    """A function of `v`."""
    return same(g, a) if g.flag() else g.pick(OTHER_SHAPE)


def scalar(g: Any, a: Any) -> str:
    """A function of `v` that is not linear, to a number."""
    return f"({any_shape(g, a)}).square().sum()"


def row(g: Any) -> str:
    """A function of one row `v`, which may read a leaf."""
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
    "torch.zeros_like(g).copy_(g).mul_(v)", "g.cumsum(-1)", "g.norm() * v", "g * v.norm()", "v.new_zeros(v.shape).add_(g).add_(y * g)", "(g * y).sum() * v", "g.mT.mT.contiguous()",
)  # fmt: skip
HOOKS = ("g * 0.5", "-g", "g.relu()", "g - g.mean()", "g.flip(-1)", "g.clone().mul_(2)", "g * g.abs().max()")


def captured(g: Any, a: Any) -> tuple[str, str]:
    """An argument with a default, and a factor of it: a copy of what is outside, as it is when it is read."""
    return (f", w={g.fitting(a)} * 1.0", " * w") if g.flag() else ("", "")


def custom(g: Any, a: Any, options: tuple[str, ...]) -> str:
    """A function that keeps the shape of `a`."""
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
