"""Rank agreement: compare over all ranks what they are about to run, once, before the first step.

A rank never acts alone: one that issues other collectives than its peers hangs them all (pytorch
PRs 155558, 193043). So the sequence of collectives is compared first, as text.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fnshard.errors import AgreementError, leaves, stable_repr
from fnshard.layout.spec import LayoutSpec, is_here
from fnshard.optim.optimizer import Optimizer, Step, update_leaf
from fnshard.runtime.collectives.base import Collectives


class Agreement(NamedTuple):
    """A record of what ranks know of each other after they have compared their first step.

    Args:
        items: the largest guess of how many items a Mean counts, which its gradients are divided by before
            they are summed.
        compiled: whether all ranks have their kernels.
    """

    items: float
    compiled: bool


def check_agreement(
    comm: Collectives, lines: Sequence[str], settings: Mapping[str, str], items: float,
    compiled: bool = False, rows: int | None = None,
) -> Agreement:  # fmt: skip
    """Compare schedules, and whatever else must be alike, over all ranks. A collective.

    Args:
        lines: the communication of a step, in a pipeline that of all stages: each rank runs one stage, and
            has lowered them all.
        settings: `{name: text}` of what else must be alike: optimizer, loss scale, seed.
        items, compiled: the fields of `Agreement`, as this rank alone has them.
        rows: the number of rows of this rank's batch, where each rank's loss counts alike; None where a
            `Mean` counts items, or where the leaves of the batch have several counts and nobody knows which
            of them the loss is a mean of.

    Raises:
        AgreementError: something differs. Every rank raises it, naming the ranks that differ and in what.
    """
    # Compare by a hash first: the texts travel only if hashes differ.
    program = {f"collective {i}": line for i, line in enumerate(lines)}
    program |= {"mesh": str(comm.mesh), **settings}
    text = json.dumps(program)
    mine = hashlib.sha256(text.encode()).hexdigest(), items, compiled, rows
    every = [json.loads(t) for t in comm.gather_object(json.dumps(mine))]
    programs, counts, ready, rows_of = zip(*every, strict=True)
    differing = [rank for rank, each in enumerate(programs) if each != programs[0]]
    if differing:
        _raise_difference(comm, text, differing)

    # Ranks' losses are averaged, which is a mean over all rows only if ranks have equally many.
    if None not in rows_of and len(set(rows_of)) > 1:
        ranks = {count: [str(r) for r, each in enumerate(rows_of) if each == count] for count in rows_of}
        raise AgreementError(
            "ranks have batches of different numbers of rows, and the loss is no fs.Mean: each rank's would "
            "count alike, a mean of means.",
            [f"rank {', '.join(members)}: {count} rows" for count, members in ranks.items()],
            "return fs.Mean(losses.sum(), count), which is exact over all rows of all ranks; or give all "
            "ranks equally many.",
        )
    return Agreement(max(counts), all(ready))


def compare_micros(comm: Collectives, count: int) -> None:
    """Refuse a step of which ranks have different numbers of micro-batches: their collectives would not meet.
    A collective.

    Raises:
        AgreementError: the numbers differ; every rank raises it.
    """
    every = comm.gather_object(str(count))
    if len(set(every)) > 1:
        raise AgreementError(
            "ranks have different numbers of micro-batches in a step:",
            [f"rank {rank}: {text}" for rank, text in enumerate(every)],
            "add micro-batches that count for nothing, up to the most that any rank has.",
        )


_PROBED = (0, 1, 10, 100, 1000, 10_000, 100_000)  # numbers of updates that were made before the one compared


def optimizer_text(optimizer: Optimizer | None, specs: Mapping[str, LayoutSpec]) -> str:
    """Describe an optimizer by its name and by what it computes for a small leaf at several steps.

    Functions (a user's learning rate, or a rule for leaves) have no text that two processes share: two of
    them count as alike if they compute the same.
    """
    path = next((p for p, s in specs.items() if s.trainable), None)
    if optimizer is None or path is None:
        return str(optimizer)

    # The leaf has the path, and as many dims, as the first one that trains, since rules may look at both.
    shape = (2,) * len(specs[path].shape)
    param = torch.arange(1, 1 + 2 ** len(shape), dtype=torch.float64).view(shape) / 8
    grad = param * 3 - 1

    # Update it at several steps, since rates may depend on the step.
    out = stable_repr(optimizer)
    for count in _PROBED:
        step = Step(torch.tensor(count), grad.norm())
        try:
            rule = optimizer.of(path, shape)
            update, _ = update_leaf(rule, path, grad, rule.init(path, param), param, step)
            numbers = {**optimizer.values(step), "update": update.sum()}
            text = ", ".join(f"{name} {float(value):.9e}" for name, value in numbers.items())
        except Exception as error:  # a function of the user's may not run on such a leaf, or so late
            text = type(error).__name__
        out += f"; after {count} updates: {text}"
    return out


def compare_values(
    comm: Collectives, blocks: Mapping[str, Tensor], specs: Mapping[str, LayoutSpec], given: Mapping[str, int]
) -> None:
    """Refuse replicas that start out different, and shards of different leaves: both would stay so.

    A collective. Ranks compare sums of the blocks that they should store alike; no values are moved (DDP
    broadcasts rank 0's instead). Leaves with aggregation="local" may differ.

    Args:
        given: checksums of the full leaves that this rank's blocks were cut out of, where it has had these.

    Raises:
        AgreementError: some leaves differ; every rank raises it.
    """
    mesh, here = comm.mesh, comm.mesh.coordinate()
    if mesh.size == 1:
        return

    # For each leaf that several ranks store alike, this rank reports the sum of its block, by its place along
    # the axes that split the leaf; for a leaf that it was given whole, it reports the checksum of all of it.
    alike = {p: s for p, s in specs.items() if s.trainable or s.aggregation != "local"}
    split_axes = {p: mesh.ordered(s.storage.axes) for p, s in alike.items()}
    shared = {p: axes for p, axes in split_axes.items() if mesh.axes_size(axes) < mesh.size}
    stored = {p: axes for p, axes in shared.items() if is_here(specs[p], mesh)}
    sums = zip(stored.items(), _summarize_blocks([blocks[p] for p in stored]), strict=True)
    mine = {p: {str([here[a] for a in axes]): value} for (p, axes), value in sums}
    for path in alike.keys() & given.keys():
        mine.setdefault(path, {})["whole"] = str(given[path])

    # Values at the same place must be the same on all ranks.
    every = [json.loads(text) for text in comm.gather_object(json.dumps(mine))]
    wrong = []
    for path in alike:
        values: dict[str, str] = {}
        for rank, each in enumerate(every):
            # The first rank at a place sets the value, with which the others are compared.
            reported = each.get(path, {})
            if any(values.setdefault(place, value) != value for place, value in reported.items()):
                wrong.append(f"params[{path!r}] on rank {rank}")
                break
    if wrong:
        raise AgreementError(
            f"{leaves(len(wrong))} that ranks hold, or were given, different values of:",
            wrong[:12],
            "make the initial values alike: a module built in fs.deferred(), the same "
            "torch.manual_seed on every rank, or the same checkpoint.",
        )


def compare_rows(comm: Collectives, axes: Sequence[str], mine: Mapping[str, str]) -> None:
    """Refuse rows that differ along axes whose ranks compute parts of the same rows. A collective.

    Args:
        mine: texts by name, which are equal for equal tensors.

    Raises:
        AgreementError: some rows differ; every rank raises it.
    """
    every = [json.loads(text) for text in comm.gather_object(json.dumps(mine))]
    wrong = []
    for rank, each in enumerate(every):
        # Each rank is compared with the first of its group: equal rows need no other comparison.
        first = min(comm.mesh.group_ranks(axes, rank))
        unlike = [n for n in {**every[first], **each} if every[first].get(n) != each.get(n)]
        wrong += [f"{n} on ranks {first} and {rank}" for n in unlike]
    if wrong:
        raise AgreementError(
            f"ranks along {' and '.join(map(repr, axes))} compute parts of the same, and got different rows:",
            wrong[:12],
            "cut data by mesh.data_rank of mesh.data_size, not by the rank: DistributedSampler(data, "
            "num_replicas=mesh.data_size, rank=mesh.data_rank); draw and augment with a seed of data_rank.",
        )


_COLUMNS = 4093  # words; a prime, so that a batch's rows in another order have another sum


def checksum(value: Tensor) -> int:
    """Return the checksum of a tensor's bytes, at the speed of memory, on the device where it lies.

    The bytes are summed by columns, and the checksum is that of the sums.
    """
    flat = value.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)
    rows = len(flat) // (8 * _COLUMNS)
    table = flat[: rows * 8 * _COLUMNS]
    # torch views bytes as words only where they begin at a whole word.
    if table.storage_offset() % 8 != 0:
        table = table.clone()
    words = table.view(torch.int64)
    sums = words.view(rows, _COLUMNS).sum(0).cpu().numpy()
    # The CRC of the sums goes on over the bytes beyond the last full row.
    return zlib.crc32(flat[len(words) * 8 :].cpu().numpy(), zlib.crc32(sums))


def _summarize_blocks(blocks: Sequence[Tensor]) -> list[str]:
    """Return the sum and the norm of each block, to nine digits.

    Equal tensors agree in so many digits, although sums are rounded differently on another number of threads.
    """
    if not blocks:
        return []
    with torch.no_grad():
        sums = torch.stack([b.sum(dtype=torch.float64) for b in blocks])
        floats = (b if b.is_floating_point() else b.double() for b in blocks)  # one at a time
        norms = torch.stack([torch.linalg.vector_norm(b, dtype=torch.float64) for b in floats])
    return [f"{x:.9e} {y:.9e}" for x, y in zip(sums.tolist(), norms.tolist(), strict=True)]


def _raise_difference(comm: Collectives, program: str, differing: list[int]) -> None:
    """Raise an error that shows where programs differ.

    A collective: all ranks know that some differ, so all come here, and one more exchange shows how.
    """
    # Compare rank 0 with the first rank that differs from it.
    every = [json.loads(text) for text in comm.gather_object(program)]
    first, rank = every[0], differing[0]
    unlike = [n for n in {**first, **every[rank]} if first.get(n) != every[rank].get(n)]
    collectives = [n for n in unlike if n.startswith("collective ")]
    options = [n for n in unlike if n not in collectives]

    # Show the first collective that differs, and all else that does.
    shown: list[str] = []
    for name in [*collectives[:1], *options]:
        here, there = first.get(name, "(none)"), every[rank].get(name, "(none)")
        same = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), 0)
        shown += [f"{name} on rank {r}: {_cut_around(text, same)}" for r, text in ((0, here), (rank, there))]
    if collectives:
        what = ["collectives", *options]
        fix = (
            "build model and specs the same way on every rank (no branch on the rank, no unordered set); "
            "lower(...).as_text() shows the whole schedule."
        )
    else:
        what = options
        fix = "give the step the same on every rank; a function may depend on its arguments alone."
    ranks = ", ".join(map(str, differing))
    message = f"rank(s) {ranks} hold another program than rank 0: unlike {', '.join(what)}."
    raise AgreementError(message, shown, fix)


def _cut_around(text: str, same: int, length: int = 160) -> str:
    """Cut a long text around the place where two begin to differ, after `same` characters."""
    start = max(0, same - length // 2) if len(text) > length else 0
    before = "..." if start > 0 else ""
    after = "..." if len(text) > start + length else ""
    return f"{before}{text[start : start + length]}{after}"
