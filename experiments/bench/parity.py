"""The case `parity`: compare every layout that there is with plain PyTorch, in fp64.

The worst errors of a sharded training are silent: a mean over ranks that counts rows wrongly, a gradient
that one rank forgot, a norm that counts a leaf twice. Here each layout trains the same small model on the
same rows, each with its own number of labels, and its losses and gradients are compared with those of one
process.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fnshard as fs
from experiments.bench.config import BenchConfig
from experiments.bench.measure import Result, make_shared_folder, rank, say
from experiments.lib.decoder import Decoder, DecoderConfig
from fnshard import tree

STEPS, SAVED_AT = 5, 3
ROWS, LENGTH, VOCAB = 16, 16, 64
LR, DECAY, CLIP, BETA = 1e-2, 0.1, 0.5, 0.9  # AdamW's; BETA is that of its mean of gradients
TOLERANCE = 1e-10  # beyond which a layout of fnshard has failed
IGNORED = -100  # a label that does not count
DECODER = DecoderConfig(width=32, layers=4, heads=4, kv_heads=2, context=LENGTH, vocab=VOCAB, mlp=64)
EXPERTS, CHOSEN = 8, 2

Batch = tuple[Tensor, Tensor]  # tokens and labels, int64 [ROWS, LENGTH]
Params = dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """A way in which fnshard trains.

    Args:
        name: the name of its row.
        axes: the sizes of the mesh's axes.
        model: a name of `MODELS`.
        preset_options: keywords of the preset.
        options: keywords of `shard_step`.
        then: the layout in which the training continues after `SAVED_AT` steps, from a checkpoint.
    """

    name: str
    axes: Mapping[str, int]
    preset: str = "full_shard"
    model: str = "decoder"
    preset_options: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    then: Layout | None = None


SHARD4, SHARD2, HYBRID = {"shard": 4}, {"shard": 2}, {"replicate": 2, "shard": 2}
TENSOR, EXPERT = {"tensor": "tensor"}, {"expert": "expert"}
BOTH = {**EXPERT, **TENSOR}
HOST_OPTIMIZER = {"optimizer_memory": "host", "update_on": "host"}
FROZEN, ADAPTERS = fs.LayoutSpec(fs.P("shard"), trainable=False), fs.LayoutSpec(fs.P("shard"))
PIPED = {"pipeline": 2, "shard": 2}
FOUR = {"accumulate": 4}
WHOLE_RESIDUAL = {"residual": "whole"}
LAYOUTS = (
    # Presets, and memory of the host.
    *(Layout(name, SHARD4, name) for name in ("no_shard", "zero1", "zero2", "zero3", "shard_grad_op")),
    Layout("full_shard", SHARD4),
    Layout("hybrid_shard", HYBRID, "hybrid_shard"),
    Layout("optimizer on the host", SHARD4, preset_options=HOST_OPTIMIZER),
    Layout("all on the host", SHARD4, preset_options={"memory": "host", **HOST_OPTIMIZER}),
    # Axes of the mesh, alone and in pairs.
    Layout("tensor", {"tensor": 4}, preset_options=TENSOR),
    Layout("tensor, shard", {**SHARD2, "tensor": 2}, preset_options=TENSOR),
    Layout("tensor, residual whole", {**SHARD2, "tensor": 2}, preset_options=TENSOR, options=WHOLE_RESIDUAL),
    Layout("context, Ulysses", {**SHARD2, "context": 2}, options={"context_attention": "ulysses"}),
    Layout("context, gather", {**SHARD2, "context": 2}, options={"context_attention": "gather"}),
    Layout("context, ring", {"context": 4}, options={"context_attention": "ring"}),
    Layout("context, tensor", {"context": 2, "tensor": 2}, preset_options=TENSOR),
    Layout("replicate, tensor", {"replicate": 2, "tensor": 2}, "hybrid_shard", preset_options=TENSOR),
    Layout("expert", {"expert": 4}, model="experts", preset_options=EXPERT),
    Layout("expert, shard", {**SHARD2, "expert": 2}, model="experts", preset_options=EXPERT),
    Layout("expert, tensor", {"expert": 2, "tensor": 2}, model="experts", preset_options=BOTH),
    Layout("pipeline", {"pipeline": 4}, options=FOUR),
    Layout("pipeline, shard", PIPED, options=FOUR),
    Layout("pipeline, two chunks a stage", {"pipeline": 2}, preset_options={"chunks": 2}, options=FOUR),
    Layout("pipeline, tensor", {"pipeline": 2, "tensor": 2}, preset_options=TENSOR, options=FOUR),
    # Orders of micro-batches, and what the backward keeps.
    Layout("accumulate", SHARD4, options={"accumulate": 4}),
    Layout("accumulate, summed locally", SHARD4, options={"accumulate": 4, "accumulate_mode": "local"}),
    Layout("accumulate, breadth first", SHARD4, options={"accumulate": 4, "micro_order": "breadth"}),
    Layout("pipeline, GPipe", PIPED, options={**FOUR, "micro_order": "breadth"}),
    Layout("remat", SHARD4, options={"remat": "unit"}),
    Layout("remat of a half", SHARD4, options={"remat": 0.5}),
    Layout("remat, inputs on the host", SHARD4, options={"remat": "unit+offload"}),
    Layout("prefetch and overlap", SHARD4, options={"prefetch": 2, "overlap": 2}),
    # Adapters on frozen leaves that are codes.
    *(Layout(f"LoRA on {codec}", SHARD4, model="lora", preset_options={"rules": [
        ("adapters.*", ADAPTERS), ("base.*norm.*", FROZEN),
        ("base.layers.*", replace(FROZEN, codec=codec)), ("base.*", FROZEN),
    ]}) for codec in ("nf4", "int8")),
)  # fmt: skip
# The ranks of these are the two processes themselves, since simulated ranks write no checkpoints.
RESUMED = (
    Layout("resumed", SHARD2, then=Layout("", SHARD2)),
    Layout("resumed over tensor", SHARD2, then=Layout("", {"tensor": 2}, preset_options=TENSOR)),
    Layout("resumed as a pipeline", SHARD2, then=Layout("", {"pipeline": 2}, options=FOUR)),
    Layout("resumed from a pipeline", {"pipeline": 2}, options=FOUR, then=Layout("", SHARD2)),
)


@dataclass(frozen=True)
class Training:
    """A record of a training.

    Args:
        start: the whole parameters before its first step, by path.
        losses: the loss of each step, before its update.
        moments: AdamW's running mean of gradients after each step's update, by path.
    """

    start: Mapping[str, Tensor]
    losses: list[float]
    moments: list[Mapping[str, Tensor]]

    def gradients(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Compute the gradients of the first and of the last step from the running means.

        The mean begins as 0, and becomes `BETA` times itself plus `1 - BETA` times the gradient.
        """
        first, before, last = self.moments[0], self.moments[-2], self.moments[-1]
        return (
            {path: value / (1 - BETA) for path, value in first.items()},
            {path: (value - BETA * before[path]) / (1 - BETA) for path, value in last.items()},
        )


@dataclass(frozen=True)
class Errors:
    """The errors of a training next to the truth, in the first step and in the last.

    They are the relative error of the loss, and that of the worst leaf's gradient by its largest number.
    """

    loss: float
    gradient: float
    last_loss: float
    last_gradient: float

    @classmethod
    def between(cls, found: Training, truth: Training) -> Errors:
        """Compare a training with the truth."""
        losses = [abs(a - b) / abs(b) for a, b in zip(found.losses, truth.losses, strict=True)]
        gradients = []
        for ours, theirs in zip(found.gradients(), truth.gradients(), strict=True):
            errors = [(ours[path] - value).abs().max() / value.abs().max() for path, value in theirs.items()]
            gradients.append(max(error.item() for error in errors))
        return cls(losses[0], gradients[0], losses[-1], gradients[1])

    @property
    def worst(self) -> float:
        return max(vars(self).values())


def run(config: BenchConfig, folder: Path) -> Result:
    """Does every layout train as one process of plain PyTorch does, and do DDP and FSDP2?

    Each of two processes simulates the ranks of every other layout. Then they are the ranks of layouts that
    restore a checkpoint, and of DDP and FSDP2, whose losses are written as their users write them: the mean
    over the tokens of a rank's micro-batch.
    """
    torch.set_default_dtype(torch.float64)
    try:
        # Each process takes every other layout, and all of them get the errors of all.
        shares: list[Any] = [None] * config.ranks
        dist.all_gather_object(shares, [_try_layout(each) for each in LAYOUTS[rank() :: config.ranks]])
        found = {layout.name: shares[i % config.ranks][i // config.ranks] for i, layout in enumerate(LAYOUTS)}

        # The processes train together.
        found |= {layout.name: _try_layout(layout) for layout in RESUMED}
        peers: dict[str, Errors] = {}
        model = MODELS["decoder"]()
        for equal, words in ((True, "equal counts"), (False, "unequal counts")):
            truth = train_plainly(model, model.params, equal_counts=equal)
            for name, (kind, parts) in PEERS.items():
                peers[f"{name}, {words}"] = Errors.between(train_with_torch(kind, parts, equal), truth)
    finally:
        torch.set_default_dtype(torch.float32)

    # An error may be NaN, which is no success either.
    wrong = [n for n, e in found.items() if isinstance(e, str) or not e.worst <= TOLERANCE]
    notes = (
        "",
        f"relative errors next to plain PyTorch in fp64, in the first step and in step {STEPS}; gradient: of",
        'the worst leaf, by its largest number. Rows have unequal numbers of labels, but for "equal counts".',
        f"beyond {TOLERANCE:g}: {', '.join(wrong) or 'no layout of fnshard'}",
    )
    values = {n: e if isinstance(e, str) else vars(e) for n, e in {**found, **peers}.items()}
    if rank() == 0:
        draw({**found, **peers}, len(found), folder / "parity.png")
    return Result(_make_table(found, peers), notes, {"errors": values}, failed=bool(wrong))


def _try_layout(layout: Layout) -> Errors | str:
    """Return the errors of a layout, or a sentence that says why it does not train."""
    try:
        errors = compare(layout)
    except Exception as error:  # one layout that fails leaves the others their rows
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    say(f"{layout.name}: {errors.worst:.1e}")
    return errors


# ------------------------------------------------------------------ the task


@dataclass(frozen=True)
class Model:
    """A model with its loss.

    Args:
        loss: a function of (params, tokens, labels) that returns an `fs.Mean`.
        plain: the same function in operations that plain PyTorch has in fp64.
    """

    params: Any
    loss: Callable[..., fs.Mean]
    plain: Callable[..., fs.Mean]


class ExpertBlock(nn.Module):
    """A block that adds to x the outputs of each position's two best experts, weighted by the router."""

    def __init__(self, width: int = DECODER.width, hidden: int = DECODER.mlp):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.ParameterDict(
            {
                "up": torch.randn(EXPERTS, width, hidden) / width**0.5,
                "down": torch.randn(EXPERTS, hidden, width) / hidden**0.5,
            }
        )
        self.dense = False

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D]
        rows = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(CHOSEN)  # [B T, CHOSEN]
        up, down = self.experts["up"], self.experts["down"]
        if self.dense:  # every expert sees every row
            share = torch.zeros(len(rows), EXPERTS).scatter(1, chosen, weights)
            hidden = F.silu(torch.einsum("nd,edm->nem", rows, up))
            out = (torch.einsum("nem,emd->ned", hidden, down) * share[..., None]).sum(1)
        else:  # rows in the order of their experts
            order = chosen.flatten().argsort(stable=True)
            ends = F.one_hot(chosen.flatten(), EXPERTS).sum(0).cumsum(0).to(torch.int32)
            hidden = F.silu(F.grouped_mm(rows[order // CHOSEN], up, offs=ends))
            parts = F.grouped_mm(hidden, down, offs=ends) * weights.flatten()[order][:, None]
            out = torch.zeros_like(parts).index_copy(0, order, parts).view(-1, CHOSEN, rows.shape[-1]).sum(1)
        return x + out.view_as(x)


class ExpertDecoder(nn.Module):
    """A decoder with two blocks of experts between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DECODER.width)
        self.layers = nn.ModuleList(ExpertBlock() for _ in range(2))
        self.head = nn.Linear(DECODER.width, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _make_module(make: Callable[[], nn.Module]) -> nn.Module:
    """Make a module in fp64, with the same parameters at every call."""
    torch.manual_seed(0)
    return make().double()


def _compute_mean_loss(logits: Tensor, labels: Tensor) -> fs.Mean:
    loss_sum = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return fs.Mean(loss_sum, (labels != IGNORED).sum())


def _make_loss(module: nn.Module) -> tuple[Callable[..., fs.Mean], Params]:
    """Make the loss of a module as a function of its parameters, and return both."""
    apply, params = fs.make_functional(module)
    return lambda p, tokens, labels: _compute_mean_loss(apply(p, tokens), labels), params


def _decoder() -> Model:
    loss, params = _make_loss(_make_module(lambda: Decoder(DECODER)))
    return Model(params, loss, loss)


def _experts() -> Model:
    module = _make_module(ExpertDecoder)
    loss, params = _make_loss(module)
    dense = copy.deepcopy(module)
    for block in dense.layers:
        block.dense = True
    return Model(params, loss, _make_loss(dense)[0])


def _lora() -> Model:
    loss, params = _make_loss(_make_module(lambda: Decoder(DECODER)))
    tuned, tuned_params = fs.lora(loss, params, rank=4, targets="*.wq|*.wv|*.up")
    generator = torch.Generator().manual_seed(1)
    for pair in tuned_params["adapters"].values():  # B starts as zeros, which would hide the gradient of A
        pair["b"] = torch.randn(pair["b"].shape, generator=generator) * 0.02
    tuned_params = tree.map(lambda leaf: leaf.detach().double(), tuned_params)
    return Model(tuned_params, tuned, tuned)


MODELS: dict[str, Callable[[], Model]] = {
    "decoder": cache(_decoder), "experts": cache(_experts), "lora": cache(_lora),
}  # fmt: skip


def batches(equal_counts: bool = False) -> Iterator[Batch]:
    """Yield rows of noisy counting. The first labels of each do not count, unless counts are equal."""
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        start = torch.randint(VOCAB, (ROWS, 1), generator=generator)
        noise = torch.randint(3, (ROWS, LENGTH + 1), generator=generator)
        text = (start + torch.arange(LENGTH + 1) + noise) % VOCAB
        tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        ignored = torch.randint(LENGTH - 2, (ROWS, 1), generator=generator)
        if not equal_counts:
            labels = labels.masked_fill(torch.arange(LENGTH) < ignored, IGNORED)
        yield tokens, labels


# ------------------------------------------------------------------ trainings


def train_plainly(
    model: Model, start: Mapping[str, Tensor], frozen: Collection[str] = (), **batch: Any
) -> Training:
    """Train in one process with whole tensors, whole batches, autograd and `torch.optim.AdamW`.

    Args:
        start: parameters by path.
        batch: keywords of `batches`.
    """
    structure = tree.flatten_with_paths(model.params)[1]
    leaves = {
        path: value.detach().clone().requires_grad_(path not in frozen) for path, value in start.items()
    }
    trained = {path: leaf for path, leaf in leaves.items() if leaf.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=LR, weight_decay=DECAY)
    losses, moments = [], []
    for tokens, labels in batches(**batch):
        mean = model.plain(tree.unflatten(list(leaves.values()), structure), tokens, labels)
        value = mean.total / mean.count
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)
        optimizer.step()
        losses.append(value.item())
        moments.append({path: optimizer.state[leaf]["exp_avg"].clone() for path, leaf in trained.items()})
    return Training(start, losses, moments)


def compare(layout: Layout) -> Errors:
    """Train in a layout on simulated ranks, and plainly from the same parameters."""
    model = MODELS[layout.model]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of leaves and operations that an axis does not split
        if layout.then:
            with make_shared_folder() as folder:
                first = train_in(layout, model, range(SAVED_AT), save=folder / "middle")
                second = train_in(layout.then, model, range(SAVED_AT, STEPS), restore=folder / "middle")
            losses, moments = first.losses + second.losses, first.moments + second.moments
            training = replace(first, losses=losses, moments=moments)
        else:
            training = train_in(layout, model, range(STEPS))
    frozen = training.start.keys() - training.moments[0].keys()
    return Errors.between(training, train_plainly(model, training.start, frozen))


def train_in(
    layout: Layout, model: Model, numbers: range, save: Path | None = None, restore: Path | None = None
) -> Training:
    """Train for the steps of some numbers, on simulated ranks unless there is a checkpoint to write or read.

    The parameters that it starts from are those that `fn` sees, so codes are decoded.
    """
    mesh = fs.make_mesh(**layout.axes, simulated=not (save or restore))
    specs = fs.presets.PRESETS[layout.preset](model.params, mesh, **layout.preset_options)
    optimizer = fs.optim.chain(fs.optim.clip_by_global_norm(CLIP), fs.optim.adamw(LR, weight_decay=DECAY))
    options = {"optimizer": optimizer, "backend": "eager", **layout.options}
    step = fs.shard_step(model.loss, specs, mesh=mesh, **options)

    def work(rank: int) -> Training:
        state = fs.checkpoint.restore(restore, step) if restore else step.init(model.params)
        start = tree.flatten_with_paths(fs.unshard(state.params, step.specs, mesh))[0]
        losses, moments = [], []
        for batch in itertools.islice(batches(), numbers.start, numbers.stop):
            rows = len(batch[0]) // mesh.data_size
            state, metrics = step(state, *(x[rows * mesh.data_rank :][:rows] for x in batch))
            # Gather AdamW's means of gradients from all ranks.
            means = {path: slots["mu"] for path, slots in state.opt_state.items()}
            whole, _ = tree.flatten_with_paths(fs.unshard(means, step.specs, mesh, layout="optimizer"))
            losses.append(metrics["loss"].item())
            moments.append({path: leaf for path, leaf in whole.items() if leaf is not None})
        if save:
            fs.checkpoint.save(save, state)
        return Training(start, losses, moments)

    return work(mesh.rank) if save or restore else fs.simulate(mesh, work)[0]


# ------------------------------------------------------------------ torch's own

PEERS = {
    "DDP": ("ddp", 1), "DDP, accumulate": ("ddp", 4),
    "FSDP2": ("fsdp2", 1), "FSDP2, accumulate": ("fsdp2", 4),
}  # fmt: skip


def train_with_torch(kind: str, parts: int, equal_counts: bool) -> Training:
    """Train with DDP or FSDP2 on these processes, with micro-batches as their documents show them."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model = _make_module(lambda: Decoder(DECODER))
    start = {path: leaf.detach().clone() for path, leaf in model.named_parameters()}
    if kind == "ddp":
        trained: nn.Module = DistributedDataParallel(model)
    else:
        for block in model.layers:
            fully_shard(block)
        trained = fully_shard(model)
    leaves = dict(model.named_parameters())  # FSDP2 has put DTensors in their place
    optimizer = torch.optim.AdamW(trained.parameters(), lr=LR, weight_decay=DECAY)
    losses, moments = [], []
    for batch in batches(equal_counts):
        tokens, labels = (x.chunk(dist.get_world_size())[dist.get_rank()] for x in batch)
        optimizer.zero_grad()
        total = torch.zeros(())
        for number, micro_batch in enumerate(zip(tokens.chunk(parts), labels.chunk(parts), strict=True), 1):
            # DDP reduces gradients at the last micro-batch, FSDP2 at each.
            with trained.no_sync() if kind == "ddp" and number < parts else nullcontext():
                mean = _compute_mean_loss(trained(micro_batch[0]), micro_batch[1])
                loss = mean.total / mean.count / parts
                loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        torch.nn.utils.clip_grad_norm_(trained.parameters(), CLIP)
        optimizer.step()
        losses.append(total.item() / dist.get_world_size())
        means = {path: optimizer.state[leaf]["exp_avg"] for path, leaf in leaves.items()}
        moments.append(
            {p: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for p, v in means.items()}
        )
    return Training(start, losses, moments)


# ------------------------------------------------------------------ table and picture


def _make_table(found: Mapping[str, Errors | str], peers: Mapping[str, Errors]) -> list[list[str]]:
    table = [["", "loss 1", "gradient 1", f"loss {STEPS}", f"gradient {STEPS}"]]
    for name, errors in {**found, **peers}.items():
        if isinstance(errors, str):
            table.append([name, errors, "", "", ""])
        else:
            table.append([name, *(f"{error:.0e}" for error in vars(errors).values())])
    return table


def draw(found: Mapping[str, Errors | str], ours: int, path: Path) -> None:
    """Draw the worst error of each row as a bar. The first `ours` are fnshard's, and have another colour."""
    from fnshard.plot.pictures import figure_of, save

    shown = {name: errors.worst for name, errors in found.items() if isinstance(errors, Errors)}
    figure, [[axes]] = figure_of(9, 0.22 * len(shown) + 1)
    names_of_ours = set(list(found)[:ours])
    axes.barh(
        list(shown), [max(error, 1e-17) for error in shown.values()], left=1e-17,
        color=["#0072B2" if name in names_of_ours else "#D55E00" for name in shown],
    )  # fmt: skip
    axes.axvline(TOLERANCE, color="black", linewidth=0.8, linestyle="--")
    axes.set_xscale("log")
    axes.set_xlim(1e-17, 10)
    axes.invert_yaxis()
    axes.tick_params(labelsize=7)
    axes.set_xlabel(f"worst relative error of losses and gradients over {STEPS} steps, fp64")
    axes.set_title(
        "fnshard (blue), DDP and FSDP2 (red), next to one process of plain PyTorch", fontsize=10, loc="left"
    )
    save(figure, path)
