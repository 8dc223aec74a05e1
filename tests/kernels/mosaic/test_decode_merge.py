"""The merge of the Mosaic decode kernels and the search for a work unit's row, interpreted."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernels need JAX 0.11", allow_module_level=True)

from pallas_paged.kernels.decode_plan import DecodePlan
from pallas_paged.kernels.decode_states import DecodeStates
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.mosaic import decode_merge
from pallas_paged.kernels.mosaic.decode_items import row_of_unit
from pallas_paged.kernels.mosaic.decode_merge import MAX_STATES_PER_STEP, block_sizes, merge_decode
from tests.support.marks import slow


@pytest.mark.parametrize("num_seqs", [1, 2, 15, 16, 17, 64, 255, 257, 300])
def test_the_row_of_a_unit(num_seqs):
    ends = np.cumsum(np.random.default_rng(num_seqs).integers(0, 3, num_seqs)).astype(np.int32)
    ends[-1] += 1
    units = np.arange(ends[-1], dtype=np.int32)
    rows = jax.jit(jax.vmap(row_of_unit, in_axes=(0, None)))(units, ends)
    np.testing.assert_array_equal(rows, np.searchsorted(ends, units, side="right"))


def plan_of(num_programs, fixed_split_size=None):
    sizes = dict(num_seqs=1, num_programs=num_programs, num_partials=0)
    options = LogitOptions(sm_scale=1.0)
    return DecodePlan(options=options, block_k=64, fixed_split_size=fixed_split_size, **sizes)


MANY = 2 * MAX_STATES_PER_STEP + 4  # states of a row, which take several steps
ROWS = [4, 4, 9]  # where the units of three rows end; one row has none


@pytest.mark.parametrize(
    ("group", "head_dim", "block_h", "num_programs", "ends"),
    [
        (3, 192, None, MANY, [MANY]),
        # A program has several heads.
        (4, 32, 8, 3, ROWS),
        (3, 32, 6, 3, ROWS),
        *slow([(3, head_dim, None, MANY, [MANY]) for head_dim in (64, 256)]),
        *slow([(8, 32, 4, 3, ROWS), (6, 32, 4, 3, ROWS)]),
    ],
)
def test_states_of_each_row_are_merged(monkeypatch, group, head_dim, block_h, num_programs, ends):
    if block_h is not None:
        monkeypatch.setattr(decode_merge, "block_sizes", lambda *_, **__: (2, block_h))
    rng = np.random.default_rng(group)
    plan, num_kv_heads = plan_of(num_programs), 2
    num_q_heads, ends = num_kv_heads * group, jnp.int32(ends)
    shape = num_kv_heads, num_programs + len(ends), 16
    lses = 2 * rng.standard_normal(shape).astype(np.float32)
    outs = rng.standard_normal((*shape, head_dim + 32)).astype(np.float32)
    sinks = rng.standard_normal(num_q_heads).astype(np.float32)
    ranges = [map(int, plan.partials_of_row(jnp.int32(row), ends)) for row in range(len(ends))]
    states = [np.arange(first, first + count) for first, count in ranges]
    # What no program writes, and rows and columns beyond the heads and their elements.
    lses[:, ~np.isin(np.arange(shape[1]), np.concatenate(states))] = np.nan
    lses[:, :, group:] = np.nan
    outs[np.isnan(lses)] = np.nan
    outs[..., head_dim:] = np.nan
    sizes = dict(plan=plan, num_q_heads=num_q_heads, head_dim=head_dim)
    given = DecodeStates(out=outs, lse=lses, unit_ends=ends, sinks=sinks, **sizes)
    call = functools.partial(merge_decode, dtype=jnp.float32, interpret=True)
    out, lse = jax.jit(call)(given)
    # By query head.
    lses, outs = (
        np.moveaxis(x[:, :, :group], 2, 1).reshape(num_q_heads, shape[1], *x.shape[3:])
        for x in (lses.astype(np.float64), outs[..., :head_dim])
    )
    for row, of_row in enumerate(states):
        if not of_row.size:
            assert not out[row].any() and np.isneginf(lse[row]).all()
            continue
        weights = np.exp(lses[:, of_row])
        total = weights.sum(axis=1) + np.exp(sinks)
        expected = np.einsum("hs,hsd->hd", weights, outs[:, of_row]) / total[:, None]
        np.testing.assert_allclose(out[row], expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(lse[row], np.log(total), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_q_heads", [1, 7, 32])
@pytest.mark.parametrize("num_seqs", [1, 8, 64, 4096])
def test_block_sizes_of_the_merge(num_seqs, num_q_heads):
    sizes = dict(num_seqs=num_seqs, num_q_heads=num_q_heads)
    for num_programs, split_size in itertools.product((1, 33, 264), (None, 128)):
        span = num_programs // num_seqs + 1
        block_s, block_h = block_sizes(plan_of(num_programs, split_size), span=span, **sizes)
        assert num_q_heads % block_h == 0
        assert block_s * block_h <= MAX_STATES_PER_STEP
        assert split_size is None or block_s == 8
