"""The kernel that plans few rows, interpreted, beside plain Python."""

import functools

import jax
import numpy as np
import pytest

from tests.support.marks import needs_triton, slow

SHAPES = [(1, 4, 6), (5, 3, 7), (8, 8, 128), *slow([(2, 1, 3), (64, 8, 128), (64, 1, 32)])]


def plan_of(indices, num_experts, copied):
    """The fields of the tiles that count, and the row of each pair, `num_tiles` past the last."""
    experts = sorted({x for x in indices.flat if 0 <= x < num_experts})
    fields = np.zeros((len(experts), 5), np.int64)
    for tile, expert in enumerate(experts):
        bits = sum(1 << int(token) for token in np.flatnonzero((indices == expert).any(axis=1)))
        row = tile * copied
        fields[tile] = expert, row, row, bits & 0xFFFFFFFF, bits >> 32
    rows = np.full(indices.shape, min(num_experts, indices.size) * copied)
    for pair in np.ndindex(*indices.shape):
        if indices[pair] in experts:
            rows[pair] = experts.index(indices[pair]) * copied + pair[0]
    return fields.astype(np.int32), rows


@needs_triton
@pytest.mark.parametrize(("num_tokens", "k", "num_experts"), SHAPES)
def test_plan(num_tokens, k, num_experts):
    """Of pairs some have no expert or the one of their neighbour, or few do, or none has any."""
    from pallas_paged.experts.kernels.few_rows_plan import few_rows_plan

    copied = -(-num_tokens // 8) * 8
    how = dict(num_experts=num_experts, copied=copied, interpret=True)
    plan = jax.jit(functools.partial(few_rows_plan, **how))
    rng = np.random.default_rng(0)
    for lo, hi in ((-2, num_experts + 3), (num_experts // 2, num_experts), (-1, 0)):
        indices = rng.integers(lo, hi, (num_tokens, k), dtype=np.int32)
        fields, count, rows = map(np.asarray, plan(indices))
        wanted, wanted_rows = plan_of(indices, num_experts, copied)
        assert count == [len(wanted)]
        np.testing.assert_array_equal(fields[: len(wanted)], wanted)
        assert (
            all(0 <= x < num_experts for x in fields[:, 0]) and not fields[len(wanted) :, 3:].any()
        )
        np.testing.assert_array_equal(rows, wanted_rows)
