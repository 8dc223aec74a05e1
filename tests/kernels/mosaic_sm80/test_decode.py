"""The decode kernel for Ampere and later, interpreted on a CPU."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernels need JAX 0.11", allow_module_level=True)

from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.mosaic_sm80.config import MosaicSm80DecodeConfig
from pallas_paged.kernels.mosaic_sm80.decode import paged_decode
from tests.support.attention_calls import assert_close, assert_same_bits
from tests.support.attention_cases import mosaic_case

# Programs that have several rows, and rows that several programs share.
CONFIG = MosaicSm80DecodeConfig(block_k=64, num_stages=2, num_programs=6)
SPLIT = MosaicSm80DecodeConfig(block_k=32, num_stages=3, num_programs=4, fixed_split_size=128)
BORDERS = (0, 1, 63, 64, 65, 128, 200)
rows_of_256 = functools.partial(mosaic_case, seq_lens=BORDERS, pages_per_seq=16)

# The interpreter multiplies the poisoned values too.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")


@functools.partial(jax.jit, static_argnames=("options", "config"))
def interpreted(arrays, slopes, sinks, options, config):
    names = ("q", "k_pages", "v_pages", "block_tables", "seq_lens")
    arrays = dict(zip(names, arrays, strict=True), alibi_slopes=slopes, sinks=sinks)
    return paged_decode(Arrays(**arrays), options=options, config=config, interpret=True)


def decode(
    arrays, config=CONFIG, *, sm_scale=None, alibi_slopes=None, sinks=None, **options
) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of the interpreted kernels on the arrays of a case."""
    sm_scale = arrays[0].shape[-1] ** -0.5 if sm_scale is None else sm_scale
    options = LogitOptions(sm_scale=sm_scale, **options)
    return interpreted(arrays, alibi_slopes, sinks, options, config)


def check(case, config=CONFIG, **options):
    arrays = case.make()
    assert_close(decode(arrays, config, **options), arrays, case.tolerance, **options)


@pytest.mark.parametrize("group", [1, 3, 16, 40])
def test_groups(group):
    check(mosaic_case(num_q_heads=2 * group, seq_lens=(130, 0, 64), pages_per_seq=9))
