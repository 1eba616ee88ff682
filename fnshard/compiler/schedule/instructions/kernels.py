"""Kernels: the lines that call them, and those that sum, zero and free values of the program between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fnshard.compiler.ir.values import Kind, ValueName
from fnshard.compiler.kernels.segment_source import Argument
from fnshard.compiler.kernels.segments import Way
from fnshard.compiler.schedule.ir import Action, Context, Env, Instruction, Names, Price, Pricer, Schedule


@dataclass(frozen=True)
class Run(Instruction):
    """A call of a kernel, one way.

    Args:
        segment: the number of its segment in the program.
        units: the units whose leaves the segment reads.
        again: whether it is a forward that runs again for its backward.
    """

    kernel: str = ""
    way: Way = Way.FORWARD
    segment: int = 0
    units: tuple[str, ...] = ()
    again: bool = False

    @property
    def backward(self) -> bool:
        """Whether the kernel makes gradients."""
        return self.way is not Way.FORWARD

    @property
    def of_backward(self) -> bool:
        """Whether it is a part of the backward: it makes gradients, or runs again for these."""
        return self.backward or self.again

    @property
    def detail(self) -> str:
        def describe(names: Names) -> str:
            leaves = [n for n in names if n.kind in (Kind.GATHERED, Kind.STORED, Kind.GRADIENT)]
            values = [n for n in names if n not in leaves]
            kinds = sorted({n.kind for n in leaves})
            return ", ".join(values + [f"{sum(n.kind is k for n in leaves)} {k}" for k in kinds])

        return f"{self.kernel}.{self.way}({describe(self.reads)}) -> {describe(self.writes)}"

    def bind(self, context: Context) -> Action:
        fn = context.kernels[self.kernel, self.way]
        half = context.schedule.kernels[self.kernel].halves.get(self.way)
        reads, writes, drops, freed = self.reads, self.writes, self.drops, context.freed
        strides = half.tangent_strides if half else ()
        # Gradients that share memory with another result are copied: reductions may write to them.
        copied = [i for i in half.shared if writes[i].kind is Kind.GRADIENT] if half else []

        def run(env: Env) -> None:
            args = [env[n] for n in reads]
            # A kernel was compiled for these strides of its tangents, and reads others wrongly.
            for index, stride in strides:
                if args[index].stride() != stride:
                    args[index] = torch.empty_strided(
                        args[index].shape, stride, dtype=args[index].dtype, device=args[index].device
                    ).copy_(args[index])
            # Dropped values leave the environment before the call, so that the kernel may free them inside.
            dead = [env.pop(n) for n in drops] if freed else None
            if not freed:
                for n in drops:
                    del env[n]
            outs = fn(args)
            for n, value in zip(writes, outs, strict=True):
                env[n] = value
            for i in copied:
                env[writes[i]] = outs[i].clone()
            if freed:
                for n, value in zip(drops, dead, strict=True):
                    freed(n, value)

        return run

    def price(self, pricer: Pricer) -> Price:
        return pricer.kernel(self)


def end_rounds(schedule: Schedule) -> frozenset[Run]:
    """Return the kernels that are the last of their round; where each micro-batch runs alone, all are."""
    runs = [line for line in schedule.instructions if isinstance(line, Run)]
    rounds = [schedule.rounds.get((run.segment, run.of_backward), -1 - n) for n, run in enumerate(runs)]
    following = [*rounds[1:], None]
    return frozenset(run for run, now, then in zip(runs, rounds, following, strict=True) if now != then)


def of_one_micro_batch(names: Names) -> bool:
    """Return whether all of these are values of the program, or copies of them: not leaves, not gradients."""
    return all(n.original.kind in (Kind.VALUE, Kind.TANGENT) for n in names)


@dataclass(frozen=True)
class Free(Instruction):
    """A line that drops values, which nothing reads any more."""

    @property
    def detail(self) -> str:
        words = {
            (Kind.GATHERED, Kind.GATHERED): "gathered leaves",
            (Kind.GRADIENT, Kind.GRADIENT): "full gradients",
            (Kind.LOADED, Kind.STORED): "loaded shards",
            (Kind.LOADED, Kind.SLOTS): "loaded slots",
        }
        kinds = [(n.kind, n.original.kind) for n in self.drops]
        others = [n for n, kind in zip(self.drops, kinds, strict=True) if kind not in words]
        return ", ".join(others + [f"{kinds.count(k)} {word}" for k, word in words.items() if k in kinds])

    def bind(self, context: Context) -> Action:
        freed, transfers, later = context.freed, context.transfers, context.later(self)
        pooled = {n for n in self.drops if n.is_pooled}
        read_on_host = [n for n in self.drops if is_dropped_by_worker(n)]
        others = [n for n in self.drops if n not in read_on_host]

        def drop(env: Env, names: Sequence[ValueName]) -> None:
            for n in names:
                value = env.pop(n)
                if freed:
                    freed(n, value)
                if n in pooled:
                    transfers.give(value)

        def run(env: Env) -> None:
            drop(env, others)
            # The worker itself drops what lines that it has yet to run may read.
            if read_on_host:
                later(lambda: drop(env, read_on_host))

        return run

    def price(self, pricer: Pricer) -> Price:
        return pricer.compute(0.0, 0.0)


def is_dropped_by_worker(name: ValueName) -> bool:
    """Return whether the host's worker drops a value itself, as it does gradients and masters on the host."""
    return name.is_copy(Kind.HOST, Kind.REDUCED, Kind.STORED)


@dataclass(frozen=True)
class Add(Instruction):
    """A sum of two values.

    Args:
        owned: write it into the first value, to which no other name refers.
    """

    owned: bool = False

    def bind(self, context: Context) -> Action:
        (a, b), (out,), owned = self.reads, self.writes, self.owned

        def run(env: Env) -> None:
            env[out] = env[a].add_(env[b]) if owned else env[a] + env[b]

        return run

    def price(self, pricer: Pricer) -> Price:
        return pricer.copy(3 * pricer.bytes_of(self.reads[:1]))


def add_part(known: dict[Any, ValueName], key: Any, fresh: ValueName, unit: str, phase: str) -> list[Add]:
    """Note one more part of the gradient of `key`; return the line that adds it to earlier ones, if any."""
    # A version that ends with "+" is a sum, whose memory nothing else refers to.
    before = known.get(key)
    known[key] = fresh if before is None else fresh.of(fresh.micro, f"{fresh.version}+")
    if before is None:
        return []
    owned = before.version.endswith("+")
    return [Add(unit, phase, (before, fresh), (known[key],), owned=owned)]


@dataclass(frozen=True)
class Zeros(Instruction):
    """A tangent of zeros, to which nothing contributes."""

    like: Argument | None = None

    def bind(self, context: Context) -> Action:
        like, (out,), device = self.like, self.writes, context.device

        def run(env: Env) -> None:
            zeros = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=device)
            env[out] = zeros.zero_()

        return run

    def price(self, pricer: Pricer) -> Price:
        return pricer.copy(pricer.bytes_of(self.writes))


TINY = 64  # a tiny kernel's gathered leaves are at least so many times smaller than the largest kernel's


def tiny_runs(schedule: Schedule) -> frozenset[Run]:
    """Return the kernels that read gathered leaves, but far smaller ones than the largest kernel does."""
    sizes = {}
    for line in schedule.instructions:
        if isinstance(line, Run):
            read = [schedule.specs[n.path] for n in line.reads if n.kind is Kind.GATHERED]
            sizes[line] = sum(math.prod(s.shape) * s.compute_dtype.itemsize for s in read)
    return frozenset(line for line, size in sizes.items() if 0 < size * TINY <= max(sizes.values()))
