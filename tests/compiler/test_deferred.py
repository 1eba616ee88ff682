"""Deferred initialisation: values by seed and path, on every mesh, of the constructors' distributions."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from errors import raises
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fnshard as fs
from fnshard import LayoutSpec, P, StateError
from fnshard.compiler.deferred.deferred_init import Values
from fnshard.compiler.deferred.draws import fill, normal, truncated_normal, uniform
from fnshard.compiler.ir.bits import GOLDEN, mix, to_int64

transformers = pytest.importorskip("transformers")

# ------------------------------------------------------------------ modules: constructors of each kind


class Gpt(nn.Module):
    """A model like nanoGPT: `apply(_init)`, a tied head, projections scaled by depth; it prints its size."""

    def __init__(self, layers: int = 3, width: int = 20, *, tied: bool = True):
        super().__init__()
        self.wte = nn.Embedding(33, width)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, 2 * width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 33, bias=False)
        if tied:
            self.head.weight = self.wte.weight
        self.apply(self._init)
        for name, leaf in self.named_parameters():
            if name.endswith("linear2.weight"):
                nn.init.normal_(leaf, std=0.02 / math.sqrt(2 * layers))

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class Scaled(Gpt):
    """A GPT that is scaled by depth in place, at the very end, when each leaf has long been drawn."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        with torch.no_grad():
            for depth, block in enumerate(self.blocks):
                block.linear1.weight *= 1 / math.sqrt(depth + 1)
                block.linear2.weight.div_(depth + 2)
                block.self_attn.in_proj_weight.data = block.self_attn.in_proj_weight.data * 0.5


class Vit(nn.Module):
    """A ViT like timm's: truncated normals, a class token, a rate by depth that Python reads."""

    def __init__(self, depth: int = 2, width: int = 16):
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, depth)]
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(width, 2, 32, rate) for rate in self.rates))
        nn.init.trunc_normal_(self.position, std=0.02)
        nn.init.normal_(self.token, std=1e-6)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02, a=-0.03, b=0.5)
        weight = self.patch.weight.data
        nn.init.xavier_uniform_(weight.view([weight.shape[0], -1]))


class Tables(nn.Module):
    """A module of buffers computed from others: tables, a mask, relative positions; and a plain one."""

    def __init__(self, length: int = 11, width: int = 8):
        super().__init__()
        self.register_buffer("inverse", 1 / 10000 ** (torch.arange(0, width, 2).float() / width))
        angles = torch.outer(torch.arange(length), self.inverse)  # [T, D / 2]
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos(), persistent=False)
        self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool).tril())
        self.turns = torch.polar(torch.ones_like(angles), angles)
        table = torch.zeros(length, width)
        position = torch.arange(length).unsqueeze(1)
        table[:, 0::2] = torch.sin(position * self.inverse)
        table[:, 1::2] = torch.cos(position * self.inverse)
        table[0] = 1.0
        self.register_buffer("table", table[None])
        places = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij")).flatten(1)
        relative = (places[:, :, None] - places[:, None, :]).permute(1, 2, 0).contiguous()
        relative[:, :, 0] += 2
        relative[:, :, 0] *= 5
        self.register_buffer("relative", relative.sum(-1))
        self.bias = nn.Parameter(torch.tensor([1.0, 2.0]) + self.bias_of(torch.randn(2)))
        self.logits = nn.Parameter(self.table[0, :3].clone().softmax(-1))

    def bias_of(self, noise: Tensor) -> Tensor:
        return torch.where(noise > 0, noise, 0.5)


class Nested(nn.Module):
    """A module of copied layers, one used twice, and leaves that are views, drawn by parts, of any dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
        self.shared = nn.ModuleList([nn.Linear(4, 4)] * 2)
        self.copied = copy.deepcopy(self.shared[0])
        self.recurrent = nn.LSTM(3, 4)
        self.fused = nn.Parameter(torch.empty(12, 5))
        with torch.no_grad():
            for i, part in enumerate(self.fused.chunk(3)):
                part.normal_(std=i + 1)
            self.copied.weight[1:3].fill_(0.5)
        self.window = nn.Parameter(torch.randn(6)[1:5])
        self.turned = nn.Parameter(torch.randn(16, 3).t())
        self.low = nn.Linear(3, 3).to(torch.bfloat16)
        self.double = nn.Linear(3, 3, dtype=torch.float64)
        self.padded = nn.Embedding(5, 3, padding_idx=1)
        self.scale = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
        self.small = nn.ParameterList(torch.randn(size) for size in (1, 2, 15, 16, 17, 31))


class Orthogonal(nn.Module):
    """A module of leaves by QR, sparse, identity, Dirac and spectrally normed."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.tall, self.sparse = nn.Linear(7, 4), nn.Linear(4, 9), nn.Linear(6, 6)
        self.conv, self.same = nn.Conv1d(4, 4, 3), nn.Linear(5, 5)
        nn.init.orthogonal_(self.wide.weight, gain=2.0)
        nn.init.orthogonal_(self.tall.weight)
        nn.init.sparse_(self.sparse.weight, 0.5)
        nn.init.dirac_(self.conv.weight)
        nn.init.eye_(self.same.weight)
        self.product = nn.Parameter(torch.linalg.matrix_exp(torch.randn(3, 3)) @ torch.randn(3, 3))
        self.unit = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))


class Drawn(nn.Module):
    """A model of draws that no window makes: complex ones, other distributions, columns, single numbers."""

    def __init__(self) -> None:
        super().__init__()
        noise = torch.randn(5)
        self.number, self.one = nn.Parameter(noise[2].clone()), nn.Parameter(torch.randn(1))
        self.last = nn.Parameter(noise[4], requires_grad=False)
        self.empty, self.turned = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.randn(16, 3).t())
        self.complex = nn.Parameter(torch.randn(40, 3, dtype=torch.complex64))
        self.rare = nn.Parameter(torch.empty(40, 30).bernoulli_(0.3))
        self.dropped = nn.Parameter(nn.functional.dropout(torch.ones(40, 30)))
        self.choice = nn.Buffer(torch.randint(0, 9, (40, 30)))
        self.columns, self.scaled = (
            nn.Parameter(torch.zeros(6, 4)),
            nn.Parameter(torch.randn(20, 3) * noise[:3]),
        )
        nn.init.normal_(self.columns.data[:, 1:3])
        self.last_channels = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "tied": Gpt,
    "depth": Scaled,
    "vit": Vit,
    "buffers": Tables,
    "nested": Nested,
    "orthogonal": Orthogonal,
    "drawn": Drawn,
}
SIZES = {"vocab_size": 37, "hidden_size": 12, "intermediate_size": 20}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2}
CAUSAL = transformers.AutoModelForCausalLM.from_config
HUGGING_FACE: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: CAUSAL(
        transformers.LlamaConfig(**SIZES, **LAYERS, tie_word_embeddings=True), dtype=torch.bfloat16
    ),
    "gpt2": lambda: CAUSAL(
        transformers.GPT2Config(vocab_size=37, n_embd=12, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    ),
    "opt": lambda: CAUSAL(
        transformers.OPTConfig(vocab_size=37, hidden_size=12, ffn_dim=20, word_embed_proj_dim=12, **LAYERS)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration._from_config(
        transformers.T5Config(vocab_size=37, d_model=12, d_kv=6, d_ff=20, num_layers=2, num_heads=2)
    ),
}


EVERY = {**MODULES, **HUGGING_FACE}


def make_deferred(make: Callable[[], nn.Module]) -> nn.Module:
    with fs.deferred():
        return make()


def built(make: Callable[[], nn.Module], seed: int) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return {p: leaf.detach().clone() for p, leaf in fs.make_functional(make())[1].items()}


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(got) == list(expected)
    assert [p for p in got if got[p].dtype != expected[p].dtype or not torch.equal(got[p], expected[p])] == []


def whole(model: nn.Module, world: int, seed: int) -> list[dict[str, Tensor]]:
    """Return what `step.init` makes on each of `world` simulated ranks, put together again."""
    mesh = fs.make_mesh(shard=world, simulated=True)
    specs = fs.presets.full_shard(fs.make_functional(model)[1], mesh)
    step = fs.shard_step(lambda p: 0, specs, mesh=mesh, backend="eager")
    return fs.simulate(mesh, lambda rank: fs.unshard(step.init(model, seed=seed), specs, mesh))


def alone(make: Callable[[], nn.Module], seed: int = 7) -> dict[str, Tensor]:
    """Draw whole leaves, on one rank."""
    return whole(make_deferred(make), 1, seed)[0]


# ------------------------------------------------------------------ draws


def test_bits_are_those_of_splitmix64() -> None:
    """Published numbers for the seed 1234567."""
    states = torch.tensor([to_int64(1234567 + i * GOLDEN) for i in (1, 2, 3)])
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [int(bits) % 2**64 for bits in mix(states)] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("draw", "distribution"),
    [
        (normal(0.5, 2.0), lambda x: 0.5 * torch.erfc((0.5 - x) / 8**0.5)),
        (uniform(-1.0, 3.0), lambda x: (x + 1) / 4),
        (
            truncated_normal(0.0, 1.0, -1.0, 3.0),
            lambda x: (_below(x) - _below(-1)) / (_below(3) - _below(-1)),
        ),
        (
            truncated_normal(0.0, 1.0, 8.0, 9.0),
            lambda x: (_below(-8) - _below(-x)) / (_below(-8) - _below(-9)),
        ),
    ],
)
def test_draws_have_their_distribution(draw: Any, distribution: Any, dtype: torch.dtype) -> None:
    """Kolmogorov and Smirnov's distance is below 2 / sqrt(n) but once in 1500; a part is drawn as it lies."""
    whole = torch.empty(100_000, dtype=dtype)
    fill(whole, 0, 3, draw)
    shares = distribution(whole.double().sort().values)
    even = (torch.arange(len(whole)) + 0.5) / len(whole)
    assert (shares - even).abs().max() < 2 / len(whole) ** 0.5
    neighbours = torch.corrcoef(torch.stack([whole[:-1], whole[1:]]).double())[0, 1]
    assert abs(neighbours) < 4 / len(whole) ** 0.5
    part = torch.empty(40_000, dtype=dtype)
    fill(part, 33_333, 3, draw)
    assert torch.equal(part, whole[33_333:73_333])


def _below(x: Any) -> Tensor:
    return 0.5 * torch.erfc(-torch.as_tensor(x, dtype=torch.float64) / 2**0.5)


# ------------------------------------------------------------------ values


@pytest.mark.suite({
    "nested": "modules in modules",
    "tied": "one leaf of two",
    "orthogonal": "a whole matrix",
    "depth": "by depth",
    "drawn": "draws",
    "buffers": "buffers",
    "gpt2": "transformers, by its own rules",
})  # fmt: skip
@pytest.mark.parametrize("name", EVERY)
def test_leaves_are_what_their_constructors_say_on_every_mesh(name: str) -> None:
    """Equal where no random number is drawn, and else in mean, deviation and bounds."""
    model, real, other = make_deferred(EVERY[name]), built(EVERY[name], 7), built(EVERY[name], 8)
    first, *more = (got for world in (1, 2, 4) for got in whole(model, world, seed=7))
    for got in more:
        same(got, first)
    for path, leaf in first.items():
        assert leaf.shape == real[path].shape and leaf.dtype == real[path].dtype
        if torch.equal(real[path], other[path]):
            assert torch.equal(leaf, real[path]), path
            continue
        a, b = leaf.to(torch.complex128).real, real[path].to(torch.complex128).real
        assert torch.equal(a == 0, b == 0) or name in ("orthogonal", "drawn"), path  # what is set to zero
        if leaf.numel() >= 64:
            assert abs(a.std() / b.std() - 1) < 4 / leaf.numel() ** 0.5, path
            assert abs(a.mean() - b.mean()) < 6 * b.std() / leaf.numel() ** 0.5, path
            assert 0.5 < a.abs().max() / b.abs().max() < 2, path


def test_boxes_are_parts_of_the_whole() -> None:
    """All leaves can be cut in any layout, unless they are drawn or computed as a whole."""
    for name, make in EVERY.items():
        params = fs.make_functional(make_deferred(make))[1]
        values = Values(params, seed=3)
        large = [p for p, leaf in params.items() if leaf.numel() > 100]
        cut = [p for p in large if values.can_be_cut(p)]
        assert name in ("buffers", "orthogonal", "drawn") or cut == large
        for path in cut[:12]:
            leaf = values.of(path)
            for low, high in ((0, 1), (0.2, 0.7), (0.5, 0.5)):
                for dims in range(leaf.dim()):
                    box = [slice(int(low * n), math.ceil(high * n)) for n in leaf.shape[dims:]]
                    box = [slice(None)] * dims + box
                    assert torch.equal(values.part(path, box), leaf[tuple(box)]), (path, box)


@pytest.mark.parametrize(
    "layout", [P(None, fs.Fused("tensor", 3)), P("a", "b"), P(None, ("b", "a")), P("a", None, "b")]
)
def test_layouts_over_several_dims(layout: P) -> None:
    model = make_deferred(lambda: nn.Conv2d(6, 5, 3))
    expected = whole(model, 1, 2)[0]
    mesh = fs.make_mesh(a=2, b=2, tensor=2, simulated=True)
    params = fs.make_functional(model)[1]
    compute = P() if layout == layout.contiguous else layout
    specs = fs.match_specs(params, [("bias", LayoutSpec()), ("*", LayoutSpec(layout, compute=compute))])
    for got in fs.simulate(mesh, lambda _: fs.unshard(fs.shard(params, specs, mesh, seed=2), specs, mesh)):
        same(got, expected)


def test_values_depend_on_seed_and_path_alone() -> None:
    """Not on what else is built, drawn before, or drawn over."""

    class More(Gpt):
        def __init__(self) -> None:
            torch.randn(5)
            super().__init__()
            self.extra = nn.Linear(7, 7)
            nn.init.normal_(self.head.weight, std=0.02)

    got, more = alone(Gpt), alone(More)
    same({p: more[p] for p in got}, got)
    drawn = [p for p, leaf in got.items() if leaf.std() > 0 and leaf.numel() > 30]
    other = alone(Gpt, seed=8)
    assert not any(torch.equal(got[p], other[p]) for p in drawn)
    assert not torch.equal(got["blocks.0.linear1.weight"], got["blocks.1.linear1.weight"])


def test_hard_initialisers() -> None:
    """Copies are equal, matrices orthogonal or sparse, padding rows zero; torch's generator is left alone."""
    before = torch.get_rng_state()
    nested, matrices, opt = alone(MODULES["nested"]), alone(MODULES["orthogonal"]), alone(HUGGING_FACE["opt"])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(nested["encoder.layers.0.linear1.weight"], nested["encoder.layers.2.linear1.weight"])
    assert torch.equal(nested["copied.weight"][0], nested["shared.0.weight"][0])
    for padded, row in ((nested["padded.weight"], 1), (opt["model.decoder.embed_tokens.weight"], 1)):
        assert [i for i, values in enumerate(padded) if not values.any()] == [row]
    assert "lm_head.weight" not in opt  # it is tied
    for i, part in enumerate(nested["fused"].chunk(3)):
        assert 0.5 < part.std() / (i + 1) < 1.6
    tall, wide = matrices["tall.weight"], matrices["wide.weight"] / 2
    assert torch.allclose(tall.T @ tall, torch.eye(4), atol=1e-5)
    assert torch.allclose(wide @ wide.T, torch.eye(4), atol=1e-5)
    assert ((matrices["sparse.weight"] == 0).sum(0) == 3).all()


def test_ranks_that_make_other_leaves_are_told() -> None:
    """A constructor that depends on the rank, or a seed that does; each thread builds its own module."""
    mesh = fs.make_mesh(shard=2, simulated=True)

    def run(std: float, seed: int) -> None:
        model = make_deferred(lambda: Holds(lambda m: nn.init.normal_(m.layer.weight, std=std)))
        specs = fs.presets.full_shard(fs.make_functional(model)[1], mesh)
        step = fs.shard_step(lambda p, x: (p["layer.weight"] @ x).sum(), specs, mesh=mesh, backend="eager")
        step(step.init(model, seed=seed), torch.ones(2, 2))

    fs.simulate(mesh, lambda rank: run(1.0, 1))
    for other in (lambda rank: run(1.0 + rank, 1), lambda rank: run(1.0, rank)):
        with raises(fs.AgreementError, leaves="layer.weight"):
            fs.simulate(mesh, other)


def test_the_default_dtype_is_that_of_the_constructor() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.set_default_dtype(torch.bfloat16)
            self.layer = nn.Linear(3, 3)
            self.register_buffer("halved", torch.arange(5) / 2)
            self.register_buffer("root", torch.arange(5).sqrt())
            torch.set_default_dtype(torch.float32)

    got, real = alone(Halves), built(Halves, 2)
    assert [leaf.dtype for leaf in got.values()] == [torch.bfloat16] * 4
    same({p: got[p] for p in ("halved", "root")}, {p: real[p] for p in ("halved", "root")})


def test_a_rank_makes_nothing_larger_than_its_block() -> None:
    """Leaves of a million numbers, drawn twice, scaled when all are drawn, cast, over 16 ranks."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(2))
            self.apply(lambda m: nn.init.normal_(m.weight) if isinstance(m, nn.Linear) else None)
            with torch.no_grad():
                for layer in self.layers:
                    layer.weight *= 0.5
            self.to(torch.bfloat16)

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = op(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and not out.is_meta:
                self.numel = max(self.numel, out.untyped_storage().nbytes() // out.element_size())
            return out

    mesh = fs.make_mesh(shard=16, abstract=True)
    params = fs.make_functional(make_deferred(Deep))[1]
    with Largest() as largest:
        fs.shard(params, fs.presets.full_shard(params, mesh), mesh)
    assert largest.numel == 1024 * 1024 // 16


# ------------------------------------------------------------------ the module after the block


def test_a_plain_tensor_that_no_seed_changes_has_its_values() -> None:
    assert torch.equal(make_deferred(Tables).turns, Tables().turns)


def test_leaves_are_marked_as_those_of_the_real_module() -> None:
    def make() -> nn.Module:
        model = Gpt()
        model.norm.requires_grad_(False)
        return model

    params, real = fs.make_functional(make_deferred(make))[1], fs.make_functional(make())[1]
    assert all(leaf.is_meta and type(leaf) is type(real[p]) for p, leaf in params.items())
    for mark in (lambda leaf: leaf.requires_grad, lambda leaf: getattr(leaf, "tied_names", ())):
        assert {p: mark(leaf) for p, leaf in params.items()} == {p: mark(leaf) for p, leaf in real.items()}


def test_leaves_that_have_values_keep_them() -> None:
    model = make_deferred(Tables)
    model.table = torch.full((1, 11, 8), 7.0)
    assert torch.equal(whole(model, 2, 0)[0]["table"], model.table)


def test_a_copy_has_its_recipes_too() -> None:
    model = copy.deepcopy(make_deferred(Gpt))
    assert model.head.weight is model.wte.weight
    same(whole(model, 1, 3)[0], alone(Gpt, 3))


def test_blocks_nest_and_models_of_two_make_one_tree() -> None:
    with fs.deferred():
        first, second = nn.Linear(3, 3), make_deferred(lambda: nn.Linear(3, 3))
    for model in (first, second):
        same(whole(model, 1, 5)[0], alone(lambda: nn.Linear(3, 3), 5))
    params = {f"{n}.{p}": v for n in "ab" for p, v in fs.make_functional(make_deferred(Gpt))[1].items()}
    mesh = fs.make_mesh(shard=1)
    got = fs.shard(params, fs.presets.no_shard(params, mesh), mesh, seed=2)
    assert not torch.equal(got["a.wte.weight"], got["b.wte.weight"])


# ------------------------------------------------------------------ what is refused


class Holds(nn.Module):
    """A module that runs a function of itself when it is built."""

    def __init__(self, act: Callable[[Any], Any]):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        act(self)


def forked(module: Any) -> None:
    with torch.random.fork_rng(devices=[]):
        module.layer.weight.data.normal_()
    module.layer.weight.data.normal_()


OUTSIDE = torch.zeros(2, 2)
LEAF = ["fs.deferred()", "test_deferred.py:", "'layer.weight'"]
READS = ["reads a value", *LEAF], "with values"
OWN = ["a generator of its own", *LEAF], "with values"
SEED = ["state", "aten.normal_", *LEAF], "with values"


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda m: m.layer.weight.abs().max() > 0.5 and None, READS),
        (lambda m: m.layer.weight.tolist(), READS),
        (lambda m: m.layer.weight.detach().numpy(), READS),
        (lambda m: m.layer.weight.nonzero(), READS),
        (
            lambda m: torch.manual_seed(0) and m.layer.weight.data.normal_(),
            SEED,
        ),
        (forked, SEED),
        (lambda m: m.layer.weight.data.normal_(generator=torch.Generator()), OWN),
        (lambda m: nn.init.trunc_normal_(m.layer.weight, generator=torch.Generator()), OWN),
        (lambda m: OUTSIDE.copy_(m.layer.weight), (["copy_.default", "a tensor with values"], "clone")),
        (lambda m: OUTSIDE.normal_(), (["aten.normal_.default", "a tensor with values"], "clone")),
    ],
)
def test_what_a_constructor_must_not_do(act: Callable[[Any], Any], words: tuple[list[str], str]) -> None:
    before = torch.get_rng_state()
    leaves, fix = words
    with raises(StateError, leaves=leaves, fix=fix):
        make_deferred(lambda: Holds(act))
    assert torch.equal(torch.zeros(2) + 1, torch.ones(2))
    assert torch.equal(torch.get_rng_state(), before)


CHANGES = ["changes", "deferred module"]


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda m: nn.init.zeros_(m.layer.weight), CHANGES),
        (lambda m: m.layer.weight.data.normal_(), CHANGES),
        (lambda m: m.layer.weight.detach()[0].fill_(1.0), CHANGES),
        (lambda m: m.to(torch.bfloat16), CHANGES),
        (lambda m: m.layer.load_state_dict(nn.Linear(2, 2).state_dict()), CHANGES),
        (lambda m: m.layer(torch.ones(2)), ["linear", "deferred module"]),
        (lambda m: m.layer.weight.sum().item(), ["Tensor.item", "deferred module"]),
    ],
)
def test_what_needs_or_changes_values_after_the_block(
    act: Callable[[nn.Module], Any], words: list[str]
) -> None:
    model = make_deferred(lambda: Holds(lambda module: None))
    with torch.no_grad(), raises((StateError, RuntimeError), says=words):
        act(model)


def test_a_plain_tensor_that_depends_on_the_seed_is_refused_where_it_is_used() -> None:
    class Plain(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.noise = torch.randn(2)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.noise

    model = make_deferred(Plain)
    apply, params = fs.make_functional(model)
    specs = fs.presets.no_shard(params, fs.make_mesh(shard=1))
    step = fs.shard_step(lambda p, x: apply(p, x).sum(), specs, backend="eager")
    with raises(StateError, leaves="deferred module", fix="register_buffer"):
        step(step.init(model), torch.ones(1, 2))


def test_what_the_constructor_puts_on_meta_or_leaves_unset_is_named() -> None:
    def put(module: Any) -> None:
        module.lost = nn.Parameter(torch.ones(3, device="meta"))

    with raises(StateError, leaves="params['lost']", fix="fs.deferred", says="1 leaf"):
        whole(make_deferred(lambda: Holds(put)), 1, 0)

    def leave_unset(module: Any) -> None:
        module.weight = nn.Parameter(torch.empty(3))
        module.register_buffer("count", torch.empty(2, dtype=torch.int64))
        module.register_buffer("mask", torch.empty(2, dtype=torch.bool))

    with raises(StateError, leaves=["weight']", "count']", "mask']"], fix="torch.empty", says="3 leaves"):
        fs.shard(*_tree(make_deferred(lambda: Holds(leave_unset))))


def _tree(model: nn.Module) -> tuple[Any, Any, fs.Mesh]:
    mesh, params = fs.make_mesh(shard=1), fs.make_functional(model)[1]
    return params, fs.presets.no_shard(params, mesh), mesh


def test_a_tree_of_other_shapes_is_refused() -> None:
    step = fs.shard_step(lambda p, x: x.sum(), _tree(nn.Linear(2, 2))[1], backend="eager")
    with raises(StateError, leaves="params['weight'] is [3, 3]", says="[2, 2]"):
        step.init({"weight": torch.zeros(3, 3), "bias": torch.zeros(2)})


def test_values_are_not_made_inside_the_block() -> None:
    with fs.deferred():
        tree = _tree(nn.Linear(2, 2))
        with raises(StateError, leaves="fs.deferred()", fix="leave the block"):
            fs.shard(*tree)


def test_a_seed_that_changes_nothing_is_refused() -> None:
    model = nn.Linear(2, 2)
    params, specs, mesh = _tree(model)
    for optimizer, source in ((None, model), (fs.optim.sgd(0.1), model), (None, params)):
        step = fs.shard_step(lambda p, x: x.sum(), specs, mesh=mesh, optimizer=optimizer, backend="eager")
        with raises(StateError, leaves="seed=0", fix=["leave seed= out", "fs.deferred", "rng="]):
            step.init(source, seed=0)
    with raises(StateError, leaves="seed=1", fix="leave seed= out"):
        fs.shard(params, specs, mesh, seed=1)
    step = fs.shard_step(lambda p, x: x.sum(), specs, mesh=mesh, optimizer=fs.optim.sgd(0.1), backend="eager")
    assert int(step.init(params, seed=3).seed) == 3  # of the random ops to come
