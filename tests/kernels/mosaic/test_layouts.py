"""The Mosaic GPU kernels, interpreted on a CPU, over pages of every layout."""

from __future__ import annotations

from functools import partial

import jax
import pytest

import pallas_paged as pp
from pallas_paged.kernels.mosaic import support as mosaic_support
from tests.support.attention_calls import assert_close
from tests.support.attention_cases import mosaic_case
from tests.support.marks import slow
from tests.support.page_layouts import call_in_layout

if reason := mosaic_support.why_not_jax():
    pytest.skip(reason, allow_module_level=True)

# The interpreter multiplies the poisoned values too.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")

SMALL = mosaic_case(num_q_heads=8, seq_lens=(70, 0, 17), pages_per_seq=5)
RAGGED = mosaic_case(num_q_heads=8, seq_lens=(70, 9, 17), pages_per_seq=5, q_lens=(5, 3, 17))
LARGE_PAGES = mosaic_case(num_q_heads=8, page_size=128, seq_lens=(200, 60), pages_per_seq=2)
LOOP = dict(block_k=64, num_stages=2, num_programs=3)


@pytest.mark.parametrize(
    ("kv_layout", "case"),
    [
        ("N2HD", SMALL),
        ("HND", RAGGED),
        ("NH2D", LARGE_PAGES),
        *slow((layout, SMALL) for layout in ("NHD", "HND", "2NHD", "NH2D")),
        *slow((layout, RAGGED) for layout in ("NHD", "2NHD", "NH2D", "N2HD")),
        *slow((layout, LARGE_PAGES) for layout in ("NHD", "HND", "2NHD", "N2HD")),
    ],
    ids=lambda x: str(x),
)
def test_matches_the_oracle(kv_layout, case):
    config = pp.MosaicDecodeConfig(**LOOP)
    entry = pp.paged_attention
    if case.q_lens is not None:
        config = pp.MosaicRaggedConfig(**LOOP, num_consumers=1)
        entry = pp.ragged_paged_attention
    arrays = case.make()
    call = partial(
        entry, kv_layout=kv_layout, implementation="mosaic_gpu_interpret", config=config,
        return_lse=True,
    )  # fmt: skip
    actual = jax.jit(call)(**call_in_layout(kv_layout, arrays))
    assert_close(actual, arrays, case.tolerance)
