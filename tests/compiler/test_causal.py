"""An explicit causal mask becomes `is_causal`; any other mask stays as it is."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from toys import step_of

from fnshard.compiler.ir.program import propagate, replay
from fnshard.compiler.rewrites.causal_mask import recognise_causal

T = 6


def causal():
    return torch.ones(T, T, dtype=torch.bool).tril()


def causal_by_positions():
    at = torch.arange(T)
    return (at[None, :] <= at[:, None])[None, None]


def additive():
    return torch.zeros(T, T).masked_fill(~causal(), float("-inf"))


def diagonal_closed():
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    mask[1:].diagonal(1).fill_(False)
    return mask


def window():
    return causal() & ~torch.ones(T, T, dtype=torch.bool).tril(-3)


def loss_with(mask_of):
    def loss(p, x):
        q = (x @ p["q"])[:, None]
        return F.scaled_dot_product_attention(q, q, (x @ p["v"])[:, None], attn_mask=mask_of()).pow(2).mean()

    return loss


def explicit(lowered):
    """Attention nodes that still have a mask."""
    nodes = [n for n in lowered.program.graph.nodes if "scaled_dot_product" in str(n.target)]
    assert nodes
    return sum(n.args[3] is not None for n in nodes if len(n.args) > 3)


MASKS = {causal: 0, causal_by_positions: 0, additive: 0, diagonal_closed: 1, window: 1}


@pytest.mark.parametrize("mask_of", MASKS, ids=lambda m: m.__name__)
def test_the_gradient_is_torchs_and_only_causal_masks_go(mask_of):
    generator = torch.Generator().manual_seed(0)
    params = {n: torch.randn(4, 4, generator=generator, dtype=torch.float64) for n in "qv"}
    x = torch.randn(2, T, 4, generator=generator, dtype=torch.float64)
    loss = loss_with(lambda: mask_of().to(torch.float64) if mask_of().is_floating_point() else mask_of())
    step = step_of(loss, params)
    assert explicit(step.lower(params, x)) == MASKS[mask_of]
    value, grads = step(params, x)
    expected, truth = torch.func.grad_and_value(loss)(params, x)[::-1]
    assert abs(value - expected) < 1e-12
    assert all((grads[n] - truth[n]).abs().max() < 1e-12 for n in params)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize(
    ("t", "s", "shape"),
    [
        (3, 3, (1, 3)), (3, 3, (1, 1, 1, 3)), (3, 3, (3, 1)), (1, 3, (1, 3)), (3, 1, (3, 1)), (2, 3, (2, 3)),
        (3, 2, (1, 1, 3, 2)), (2, 2, (2, 2)), (2, 2, (2, 1, 1, 2)), (2, 3, (1, 3)),
    ],
)  # fmt: skip
def test_every_mask_of_a_shape_gives_what_it_gave(additive, t, s, shape):
    """Constant masks that broadcast, one program for all of them: as rewritten, and as written."""
    size = torch.Size(shape).numel()

    def attend(q, k, v):
        outs = []
        for bits in range(2**size):
            mask = ((bits >> torch.arange(size)) & 1).bool().view(shape)
            if additive:
                mask = torch.zeros(shape, dtype=q.dtype).masked_fill(~mask, float("-inf"))
            outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        return outs

    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 1, n, 4, generator=draw, dtype=torch.float64) for n in (t, s, s))
    graph = make_fx(attend, pre_dispatch=True)(q, k, v).graph
    propagate(graph, [q, k, v])
    expected = replay(graph, [q, k, v])
    found = recognise_causal(graph)
    # The mask that lets all through; and the causal one, where the shape can say it and it is another.
    assert found == (2 if shape[-2:] == (t, s) and s > 1 else 1)
    torch.testing.assert_close(replay(graph, [q, k, v]), expected, rtol=0, atol=1e-12, equal_nan=True)
