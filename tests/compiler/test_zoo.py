"""Every model that transformers builds small from a configuration: the gradients of plain autograd.

By hand: `pytest -m long tests/compiler/test_zoo.py -n 0 -rs`. A skip is a model that plain torch does not run
at these sizes; the reason says why. `REFUSED` names all models that fnshard refuses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import sharded
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fnshard as fs

transformers = pytest.importorskip("transformers")
auto = pytest.importorskip("transformers.models.auto.modeling_auto")
configurations = pytest.importorskip("transformers.models.auto.configuration_auto")
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

ROWS, TIME, WORDS, PARAMETERS = 4, 7, 61, 4_000_000
TOLERANCE, NARROW_TOLERANCE = 1e-9, 1e-6  # of models that cast to fp32 inside
# Every configuration takes those of these that it knows.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim"), 16),
    "embed_dim": 16,
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "hidden_dim", "d_inner"), 24),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_key_value_heads", "type_vocab_size"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("d_kv", "d_head", "rotary_dim"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 32),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "sliding_window"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "head_dim"), 8),
    "vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 0,
    "num_experts_per_tok": 2, "image_size": 16, "patch_size": 4, "num_channels": 3, "num_labels": 5,
    "state_size": 4, "conv_kernel": 4, "window_size": 2,
    "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
}  # fmt: skip
HEADS = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}
MODELS = [f"{head}-{name}" for head, names in HEADS.items() for name in names]
# Models that read numbers of tensors while they are traced, and the line of theirs that does. A model that is
# refused and not among them fails its test, and so does one of them that is not refused.
REFUSED = {
    "causal-jetmoe": "expert_size.tolist()",
    "causal-xlm": "lengths.max().item()",
    "masked-flaubert": "lengths.max().item()",
    "masked-longformer": "is_index_global_attn.flatten().any().item()",
    "masked-xlm": "lengths.max().item()",
    "seq2seq-led": "is_index_global_attn.flatten().any().item()",
    "seq2seq-prophetnet": "torch.all(shifted_input_ids >= 0).item()",
}


def build(model: str) -> nn.Module:
    """Build the module in fp64, without dropout.

    Raises:
        Exception: whatever a configuration says of sizes that do not suit it.
    """
    head, name = model.split("-", 1)
    config_class = configurations.CONFIG_MAPPING[name]
    known = {
        *getattr(config_class, "__dataclass_fields__", {}),
        *inspect.signature(config_class.__init__).parameters,
        *getattr(config_class, "attribute_map", {}),
    }
    config = config_class(**{k: v for k, v in SMALL.items() if k in known})
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "batched_mm"  # torch's grouped product takes no fp64
    class_name = HEADS[head][name]
    module_class = getattr(transformers, class_name if isinstance(class_name, str) else class_name[0])
    with torch.device("meta"):
        count = sum(p.numel() for p in module_class(config).parameters())
    if count > PARAMETERS:
        raise ValueError(f"{count} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return module_class(config).double().eval()


def batch_of(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Return what the module reads, and labels for those that shift them into a decoder."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(3, WORDS, (2, ROWS, TIME), generator=generator)
    if module.main_input_name == "pixel_values":
        return torch.randn(ROWS, 3, 16, 16, dtype=torch.float64, generator=generator), words[1]
    return words[0], words[1]


def loss_of(call: Callable[..., Any], module: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Compute a mean over this slice's logits, which every output reaches."""
    known = inspect.signature(module.forward).parameters
    more: dict[str, Any] = {"labels": labels} if module.config.is_encoder_decoder else {}
    more |= {"use_cache": False} if "use_cache" in known else {}
    logits = call(**{module.main_input_name: inputs}, **more, return_dict=True).logits.double()
    return torch.tanh(logits * torch.linspace(-2, 2, logits.shape[-1], dtype=torch.float64)).mean()


def truth(module: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the mean loss of both slices and its gradients, by plain autograd."""
    batch = batch_of(module)
    total = sum(loss_of(module, module, *sharded.part(batch, i, 2)) / 2 for i in range(2))
    total.backward()
    grads = {p: v.grad.clone() for p, v in module.named_parameters() if v.grad is not None}
    module.zero_grad()
    return total.detach(), grads


class Narrowed(TorchDispatchMode):
    """A mode that notes whether anything is cast to less than fp64."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64:
            self.seen |= out.is_floating_point() and out.dtype != torch.float64
        return out


def tolerance(module: nn.Module) -> float:
    """Return how far gradients may be off: where modules round to narrow dtypes, graphs round otherwise."""
    with torch.no_grad(), Narrowed() as mode:
        loss_of(module, module, *batch_of(module))
    return NARROW_TOLERANCE if mode.seen else TOLERANCE


def prepare(model: str, mesh: fs.Mesh) -> Callable[[int], dict[str, float]]:
    """Return a function of a rank: how far its loss and gradients lie from autograd's.

    Gradients are measured relative to the largest.
    """
    module = build(model)
    value, expected = truth(module)
    apply, params = fs.make_functional(module)
    specs = fs.presets.full_shard(params, mesh)

    def loss_fn(params: Any, *batch: Tensor) -> Tensor:
        return loss_of(lambda **inputs: apply(params, **inputs), module, *batch)

    step = fs.shard_step(loss_fn, specs, mesh=mesh, backend="eager")
    scale = max(map(_largest, expected.values()), default=1.0)

    def run(rank: int) -> dict[str, float]:
        loss, grads = step(fs.shard(params, specs, mesh), *sharded.part(batch_of(module), rank, 2))
        trained = {p: g for p, g in grads.items() if g is not None}
        full = fs.unshard(trained, {p: specs[p] for p in trained}, mesh)
        out = {p: _largest(g - expected.get(p, torch.zeros_like(g))) / scale for p, g in full.items()}
        return {"loss": float((loss - value).abs())} | dict.fromkeys(expected, float("nan")) | out

    return run


def _largest(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def on_rank(rank: int, model: str) -> dict[str, float] | str:
    """Prepare and run a real rank; or return why the model is refused."""
    try:
        return prepare(model, fs.make_mesh(shard=2, device="cpu"))(rank)
    except fs.TraceError as error:
        return str(error)


def on_simulated_ranks(model: str) -> list[dict[str, float] | str]:
    """Do what `on_rank` does for both ranks, in this process."""
    mesh = fs.make_mesh(shard=2, simulated=True)
    try:
        return fs.simulate(mesh, prepare(model, mesh))
    except fs.TraceError as error:
        return [str(error)] * 2


@pytest.mark.parametrize("kind", ["simulated", "real"])
@pytest.mark.parametrize("model", MODELS)
def test_gradients(model: str, kind: str, ranks: Callable[[int], Any]) -> None:
    try:
        truth(build(model))
        atol = tolerance(build(model))
    except Exception as error:
        pytest.skip(f"plain torch: {type(error).__name__}: {(str(error) or '-').splitlines()[0][:100]}")
    got = on_simulated_ranks(model) if kind == "simulated" else ranks(2).run(on_rank, model, timeout=250)
    refusals = [result for result in got if isinstance(result, str)]
    if model in REFUSED:
        assert len(refusals) == 2 and all(REFUSED[model] in text for text in refusals)
        return
    assert not refusals
    wrong = {path: far for rank in got for path, far in rank.items() if not far <= atol}
    assert not wrong, dict(list(wrong.items())[:5])
