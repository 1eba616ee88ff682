"""Rows of the grammar that write to leaves which do not train; see `grammar`.

What is written does not grow from step to step. Buffers are read by the rows of all families: they are leaves.
"""
# ruff: noqa: E501  (a row is a line)

from __future__ import annotations

from typing import Any

from grammar_pointwise import Row, each


def mean(g: Any) -> tuple[Any, str]:
    """The last dim of a value, and its mean over the others."""
    a = g.f(1)
    return a.shape[-1], f"{g.fixed(a)}.reshape(-1, {a.shape[-1]}).mean(0)"


def running(template: str) -> Row:
    """A write of a mean `{m}` to a buffer `{b}` of as many elements."""

    def row(g: Any) -> str:
        size, m = mean(g)
        return template.format(b=g.buffer(size), m=m)

    return row


def statistics(g: Any, a: Any) -> str:
    """A running mean, and a variance elsewhere: torch reads one while it writes the other."""
    first, second = g.buffer(a.shape[1]), g.buffer(a.shape[1])
    return f"{first}, {g.pick([second] if first != second else [])}.abs_()"


def part(g: Any) -> str:
    """A view of a buffer [4, 3]."""
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
    """A buffer, or a view of one."""
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
