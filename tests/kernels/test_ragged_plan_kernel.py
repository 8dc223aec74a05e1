"""The kernel that makes the plan of ragged work gives the integers of its definition."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.ragged_plan import PlanShape, make_plan
from pallas_paged.kernels.ragged_plan_kernel import (
    can_plan,
    packed_types,
    plan_by_kernel,
    plan_types,
)
from tests.support.marks import slow

SIZES = dict(num_seqs=11, num_tokens=120, max_kv_len=900, block_q=32, block_k=64, has_tree=False)
PLAIN = LogitOptions(sm_scale=1.0)
SHAPES = {
    "heads in a tile": dict(group=4, num_programs=40, fixed_split_size=None),
    "a tree": dict(group=1, num_programs=40, fixed_split_size=None, has_tree=True),
    "few programs": dict(group=2, num_programs=3, fixed_split_size=None, num_tokens=9),
    "one sequence": dict(group=2, num_programs=30, fixed_split_size=None, num_seqs=1),
    "a fixed split": dict(group=1, num_programs=40, fixed_split_size=128, align=8),
    "aligned tiles": dict(group=1, num_programs=7, fixed_split_size=None, align=8),
}
WINDOW = LogitOptions(sm_scale=1.0, sliding_window=150)
FEW = [("heads in a tile", PLAIN), ("a tree", WINDOW), ("a fixed split", PLAIN)]


def shape_of(name, **more):
    return PlanShape(**SIZES | dict(options=PLAIN) | SHAPES[name] | more)


def random_lens(shape, seed):
    """Lengths, with empty rows, rows without queries or with one, and tokens of no row."""
    rng = np.random.default_rng(seed)
    q_lens = rng.choice([0, 1, 1, 2, 8, 31, 70], shape.num_seqs)
    while q_lens.sum() > shape.num_tokens:
        q_lens[rng.integers(shape.num_seqs)] = 0
    older = rng.integers(0, rng.choice([2, 100, shape.max_kv_len]), shape.num_seqs)
    seq_lens = np.where(rng.random(shape.num_seqs) < 0.8, np.minimum(q_lens + older, 900), 0)
    return np.int32(seq_lens), np.int32(np.cumsum([0, *q_lens]))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *FEW,
        *slow((name, o) for name in SHAPES for o in (PLAIN, WINDOW) if (name, o) not in FEW),
    ],
    ids=lambda x: x if isinstance(x, str) else f"window {x.sliding_window}",
)
def test_plan_of_the_kernel_is_that_of_its_definition(name, options):
    shape = shape_of(name, options=options)
    assert can_plan(shape)

    @jax.jit
    def both(*lens):
        kernel = plan_by_kernel(*lens, plan_types(shape), shape, interpret=True)
        return make_plan(*lens, None, shape), kernel

    for seed in range(4):
        expected, plan = jax.device_get(both(*random_lens(shape, seed)))
        exists = expected.items.q_len > 0
        for field, values in vars(expected.items).items():
            actual = getattr(plan.items, field)
            np.testing.assert_array_equal(actual[exists], values[exists], field)
        assert not plan.items.q_len[~exists].any()  # and a program has no blocks to read there
        np.testing.assert_array_equal(plan.items.lo[~exists], plan.items.hi[~exists])
        for field in ("partial", "first_item", "num_items"):
            np.testing.assert_array_equal(getattr(plan, field), getattr(expected, field), field)


def test_packed_plan_of_the_kernel_is_that_of_its_definition():
    pack = pytest.importorskip("pallas_paged.kernels.mosaic.ragged_work").pack
    shape = shape_of("aligned tiles")

    @jax.jit
    def both(*lens):
        types = packed_types(shape, 32)
        kernel = plan_by_kernel(*lens, types, shape, count_factor=3, interpret=True)
        return pack(make_plan(*lens, None, shape), 3), kernel

    for seed in range(6):
        expected, plan = jax.device_get(both(*random_lens(shape, seed)))
        (count,) = expected.count
        assert plan.count == count
        words = np.s_[: count // 3, :11]
        np.testing.assert_array_equal(plan.items[words], expected.items[words])
        np.testing.assert_array_equal(plan.merges[:, 0], expected.merges[:, 0])
        is_split = expected.merges[:, 0] > 0
        np.testing.assert_array_equal(plan.merges[is_split], expected.merges[is_split])


def test_large_plans_are_left_to_xla():
    assert not can_plan(shape_of("a tree", num_seqs=2000, num_tokens=2000))
    assert not can_plan(shape_of("a tree", num_tokens=1 << 19))
    assert not can_plan(shape_of("a tree", max_kv_len=1 << 28))
