"""Aggregate: the lines that bring what `fn` writes to leaves into the state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from fnshard.compiler.ir.values import Kind, ValueName, stored_names
from fnshard.compiler.schedule.buckets import Bucket, make_buckets
from fnshard.compiler.schedule.instructions import AggregateBuffers, Instruction, StoreBuffers
from fnshard.compiler.schedule.ir import with_wait
from fnshard.errors import SpecError, leaves
from fnshard.layout.spec import LayoutSpec, P
from fnshard.mesh import Mesh


def aggregate(
    written: Mapping[str, ValueName],
    alike: frozenset[str],
    specs: Mapping[str, LayoutSpec],
    mesh: Mesh,
    rows: int,
) -> tuple[tuple[Bucket, ...], list[Instruction], list[Instruction]]:
    """Aggregate all written leaves, in at most three sums over ranks: of float32, float64 and integers.

    Args:
        written: this rank's new values, by path.
        alike: the leaves whose new value all ranks compute alike: they are not sent, unless they are summed.
        rows: the number of rows of this rank's batch.

    Returns:
        Buckets, issues and stores. Issues belong after the last forward; stores after the last backward,
        which reads old values.

    Raises:
        SpecError: a leaf's dtype has no such aggregation.
    """
    ranks = mesh.data_size
    if not written:
        return (), [], []

    # What all ranks compute alike is not sent, but a sum is: it counts every rank's value.
    sent = {
        p: specs[p]
        for p in written
        if ranks > 1 and specs[p].aggregated != "local" and (p not in alike or specs[p].aggregated == "sum")
    }

    _refuse_dtypes(sent)

    # Buckets are made by unit. Here all leaves are of one, so that nothing but their dtypes divides them.
    one_unit = {p: replace(s, unit="-") for p, s in sent.items()}
    buckets = make_buckets(one_unit, mesh, lambda spec: P(), _choose_wire_dtype, "buffers")
    buckets = tuple(replace(b, name=b.name.replace("/-", "", 1)) for b in buckets)

    # One sum over ranks for each bucket.
    lines, new = [], dict(written)
    for bucket in buckets:
        flight = ValueName(Kind.FLIGHT, bucket.name)
        reads = tuple(written[p] for p in bucket.paths)
        new |= {p: ValueName(Kind.WRITTEN, p, ".all") for p in bucket.paths}
        rules = tuple(specs[p].aggregated for p in bucket.paths)
        results = [new[p] for p in bucket.paths]
        issue = AggregateBuffers(
            "-", "update", reads, (flight,), bucket=bucket.name, paths=bucket.paths, rules=rules, rows=rows
        )
        lines.append(with_wait(issue, *results))

    # New values, sent or not, are stored by one line.
    shards = stored_names(new)
    summed = tuple(p for p, s in sent.items() if s.aggregated == "sum")
    store = StoreBuffers("-", "update", (*new.values(), *shards), shards, summed=summed, ranks=ranks)
    return buckets, [issue for issue, _ in lines], [*(wait for _, wait in lines), store]


def _choose_wire_dtype(spec: LayoutSpec) -> torch.dtype:
    """Return a dtype that is wide enough for the sum, and for any single value."""
    dtype = spec.compute_dtype
    if not dtype.is_floating_point:
        return torch.int64
    return torch.float64 if spec.aggregated == "sum" else torch.promote_types(dtype, torch.float32)


def _refuse_dtypes(sent: Mapping[str, LayoutSpec]) -> None:
    """Refuse leaves whose dtype has no such aggregation: a mean of integers, a sum of booleans."""
    wrong = [
        f"params[{p!r}], {s.aggregated!r} of {s.compute_dtype}"
        for p, s in sent.items()
        if (s.aggregated == "mean" and not s.compute_dtype.is_floating_point)
        or (s.aggregated == "sum" and s.compute_dtype == torch.bool)
    ]
    if wrong:
        raise SpecError(
            f"`fn` writes to {leaves(len(wrong))} whose dtype cannot be aggregated so:",
            wrong,
            'LayoutSpec(aggregation="rank0" or "local"); of integers also "sum".',
        )
