"""An explicit causal mask becomes `is_causal`; any other mask stays as it is."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from toys import step_of

from fnshard.compiler.ir.program import propagate, replay
from fnshard.compiler.rewrites.causal_mask import recognise_causal


@pytest.mark.suite({
    "3-3-shape0-True": "one row",
    "3-3-shape1-False": "one row of a batch",
    "3-3-shape2-True": "a column",
    "1-3-shape3-False": "one query",
    "3-1-shape4-True": "one key",
    "2-3-shape5-False": "fewer queries than keys",
    "3-2-shape6-False": "fewer keys than queries",
    "2-2-shape7-True": "square",
    "2-2-shape8-False": "of two samples",
    "2-3-shape9-True": "one row, fewer queries",
})  # fmt: skip
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


@pytest.mark.parametrize(("mask", "kept"), [(lambda x: x.tril(), 0), (lambda x: x.triu().tril(), 1)])
def test_a_step_recognises_it(mask, kept):
    def loss(p, x):
        q = (x @ p["q"])[:, None]
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask(torch.ones(3, 3) > 0)).square().mean()

    lowered = step_of(loss, {"q": torch.ones(4, 4)}).lower({"q": torch.ones(4, 4)}, torch.ones(2, 3, 4))
    (node,) = [n for n in lowered.program.graph.nodes if "scaled_dot_product" in str(n.target)]
    assert sum(each is not None for each in node.args[3:4]) == kept
