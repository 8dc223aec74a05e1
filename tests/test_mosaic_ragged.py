"""The Mosaic GPU kernel of ragged queries and its merge, interpreted on a CPU."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged.kernels import mosaic_support
from tests.attention_oracle import attend, relative_error
from tests.test_mosaic_gpu import make

if reason := mosaic_support.why_not_jax():
    pytest.skip(reason, allow_module_level=True)

CONFIG = dict(block_k=64, num_consumers=2, num_stages=2, num_programs=3)
HEADS = dict(num_q_heads=8, num_kv_heads=2, head_dim=64, page_size=16)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(
    ("seq_lens", "q_lens", "heads", "config", "options"),
    [
        ([40, 100, 5, 17], [40, 3, 0, 17], {}, {}, {}),
        ([400], [9], {}, {"num_programs": 8}, {}),
        ([400, 100], [9, 3], {}, {"split_size": 128}, {}),
        ([100, 180], [40, 20], {}, {"num_consumers": 1}, {"sliding_window": 30}),
        ([100, 20], [30, 9], {"num_q_heads": 5, "num_kv_heads": 1, "page_size": 8}, {}, {}),
    ],
    ids=["mixed", "split", "split size", "window", "group of 5"],
)
def test_matches_the_oracle(seq_lens, q_lens, heads, config, options):
    arrays = make(seq_lens, q_lens, **{**HEADS, **heads})
    out, lse = jax.jit(
        lambda *arrays: pp.ragged_paged_attention(
            *arrays,
            return_lse=True,
            implementation="mosaic_gpu_interpret",
            config=pp.MosaicRaggedConfig(**{**CONFIG, **config}),
            **options,
        )
    )(*arrays)
    expected_out, expected_lse = attend(*map(np.asarray, arrays), **options)
    assert relative_error(out, expected_out) <= 5e-3
    empty = np.isneginf(expected_lse)
    np.testing.assert_array_equal(np.isneginf(lse), empty)
    np.testing.assert_allclose(np.asarray(lse)[~empty], expected_lse[~empty], rtol=1e-5, atol=1e-4)
