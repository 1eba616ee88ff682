"""A configuration on fewer nodes: the same global batch, no more rows at once."""

from __future__ import annotations

import pytest
from main_job import SMALL, compose

from experiments.configs.machine import counts_of, resized
from experiments.configs.train import ConfigError

ELASTIC = (*SMALL, "mesh.shard=4", "data.held_out_rows=12", "run.replicas=1", "run.elastic=true")


@pytest.mark.parametrize(
    ("rows", "accumulate", "world", "expected"),
    [(12, 1, 4, 1), (12, 1, 3, 2), (12, 1, 2, 2), (12, 1, 1, 4), (24, 2, 3, 4), (24, 3, 1, 12)],
)
def test_accumulation_keeps_the_batch(rows: int, accumulate: int, world: int, expected: int) -> None:
    config = compose(*ELASTIC, f"data.rows={rows}", f"run.accumulate={accumulate}")
    smaller = resized(config, world)
    assert (smaller.mesh.shard, smaller.run.accumulate, smaller.data.rows) == (world, expected, rows)
    assert rows / world / expected <= rows / 4 / accumulate


def test_numbers_of_nodes_that_the_batch_divides_over() -> None:
    assert counts_of(compose(*ELASTIC, "data.rows=12"), 4) == {1, 2, 3, 4}
    assert counts_of(compose(*ELASTIC, "data.rows=8"), 4) == {1, 2, 4}
    assert counts_of(compose(*ELASTIC, "data.rows=8", "run.elastic=false"), 4) == {4}
    split = compose(*ELASTIC, "data.rows=8", "mesh.shard=1", "mesh.tensor=2", "model.kv_heads=2")
    with pytest.raises(
        ConfigError, match=r"no smaller number than 2 nodes can go on:\s+1 node: .*divide 1 ran"
    ):
        counts_of(split, 2)
