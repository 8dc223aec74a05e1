"""The kernels of expert products on Hopper, interpreted, beside float64 NumPy."""

import jax
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernels need JAX 0.11", allow_module_level=True)

from pallas_paged.experts import fused_experts, grouped_matmul
from tests.support import experts_oracle as oracle
from tests.support.attention_oracle import relative_error
from tests.support.experts_oracle import draw, routes
from tests.support.marks import slow

INTERPRETED = dict(implementation="mosaic_sm90", interpret=True)


@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_grouped_rows(transpose_rhs):
    """Groups that begin and end in the same eight rows, one of several tiles, and rows of none."""
    sizes = np.array([3, 0, 2, 250], np.int32)
    x, w = draw(1, 265, 64, dtype="bfloat16"), draw(2, 4, 64, 128, dtype="bfloat16")
    x[sizes.sum() :] = np.nan
    w[1] = np.nan  # of no row
    given = w.swapaxes(1, 2) if transpose_rhs else w
    how = INTERPRETED | {"transpose_rhs": transpose_rhs}
    out = jax.jit(lambda *args: grouped_matmul(*args, **how))(x, given, sizes)
    assert not np.asarray(out)[sizes.sum() :].any()
    w[1] = 0
    assert relative_error(out, oracle.grouped_matmul(np.nan_to_num(x), w, sizes)) < 5e-3


def test_gradients_of_grouped_rows():
    """A group within eight rows, an empty one, and rows of none, which hold NaN."""
    sizes = np.array([3, 0, 70], np.int32)
    x, w = draw(1, 80, 64, dtype="bfloat16"), draw(2, 3, 64, 64, dtype="bfloat16")
    d_out = draw(3, 80, 64, dtype="bfloat16")
    x[sizes.sum() :] = d_out[sizes.sum() :] = np.nan

    @jax.jit
    def gradients(x, w, d_out):
        return jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, **INTERPRETED), x, w)[1](d_out)

    d_x, d_w = gradients(x, w, d_out)
    wanted = oracle.grouped_matmul(np.nan_to_num(d_out), w, sizes, transpose_rhs=True)
    assert relative_error(d_x, wanted) < 5e-3
    starts = np.cumsum(sizes) - sizes
    rows = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    wanted = np.stack([oracle.exact(x)[r].T @ oracle.exact(d_out)[r] for r in rows])
    assert relative_error(d_w, wanted) < 5e-3 and not np.asarray(d_w)[1].any()


OPTIONS = dict(gate_up_bias=draw(7, 6, 64, 2, dtype="bfloat16"), swiglu_limit=1.5)
OPTIONS |= dict(down_bias=draw(8, 6, 64, dtype="bfloat16"))


@pytest.mark.parametrize(
    ("num_tokens", "options"),
    [(5, {}), (5, OPTIONS), (70, OPTIONS), *slow([(200, {})])],
    ids=["5 silu", "5 gpt-oss", "70 gpt-oss", "200 silu"],
)
def test_fused_experts(num_tokens, options):
    """Few tokens, all through each active expert, and more, sorted; some are padding."""
    indices, scales = routes(4, num_tokens, 5, 3)
    x = draw(1, num_tokens, 64, dtype="bfloat16")
    gate_up = draw(2, 6, 64, 2, 64, dtype="bfloat16", scale=0.125)
    down = draw(3, 6, 64, 64, dtype="bfloat16", scale=0.125)
    x[-2:], indices[-2:], scales[-2:] = np.nan, (6, -1, 9), np.nan
    gate_up[5], down[5] = np.nan, np.nan  # that no token chose
    run = jax.jit(lambda *args: fused_experts(*args, **options, **INTERPRETED))
    out = np.asarray(run(x, gate_up, down, indices, scales))
    assert not out[-2:].any()
    args = (x[:-2], gate_up, down, indices[:-2], scales[:-2])
    assert relative_error(out[:-2], oracle.fused_experts(*args, **options)) < 1e-2


def test_one_token_reads_its_experts_only():
    """Its experts are the tiles; of three indices one is none."""
    x, scales = draw(1, 1, 64, dtype="bfloat16"), np.float32([[0.5, np.nan, 0.25]])
    gate_up = draw(2, 6, 64, 2, 64, dtype="bfloat16", scale=0.125)
    down = draw(3, 6, 64, 64, dtype="bfloat16", scale=0.125)
    gate_up[:3], down[:3] = np.nan, np.nan
    indices = np.int32([[5, 6, 3]])
    out = jax.jit(lambda *args: fused_experts(*args, **INTERPRETED))
    args = (x, gate_up, down, indices, scales)
    assert relative_error(out(*args), oracle.fused_experts(*args)) < 1e-2
