"""Random calls of attention, options in combination, on every implementation; a pool of 3 GiB."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from tests.support.attention_calls import assert_close
from tests.support.attention_cases import Case
from tests.support.page_layouts import call_in_layout
from tests.support.quantized_cases import Quantized
from tests.support.random_calls import RandomCall, run

ON_GPU = jax.default_backend() == "gpu"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100 if ON_GPU else 3))
def test_random_calls_agree_with_xla_and_repeat_their_bits(seed, implementation):
    call = RandomCall.draw(seed, max_len=1500 if ON_GPU else 60)
    found = run(call, [implementation])[implementation]
    if found.startswith("refused"):
        pytest.skip(found)
    assert not found, call


@pytest.mark.slow
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU with 20 GB free")
@pytest.mark.parametrize("kv_layout", ["HPND", "2NHD"])
@pytest.mark.parametrize("function", [pp.paged_attention, pp.ragged_paged_attention])
def test_int8_pools_of_3_gib(function, kv_layout, implementation):
    """The pages of the case are the last ones, beyond the reach of offsets of 32 bits."""
    case = Case(head_dim=128, page_size=16, seq_lens=(300, 17, 0), pages_per_seq=20)
    case = dataclasses.replace(case, dtype="bfloat16", q_lens=(5, 17, 0))
    if function is pp.paged_attention:
        case = dataclasses.replace(case, q_lens=None)
    arrays, meant = Quantized(case=case, kv_dtype="int8").make()
    call = call_in_layout(kv_layout, arrays)
    num_pages = 3 * 2**30 // (2 * 16 * 128)
    axis = {"HPND": 1, "2NHD": 0}[kv_layout]
    first = num_pages - call["k_scales"].shape[axis]

    @jax.jit
    def enlarge(x):
        shape = list(x.shape)
        shape[axis] = num_pages
        return jax.lax.dynamic_update_slice_in_dim(jnp.zeros(shape, x.dtype), x, first, axis)

    for name in ("k_pages", "v_pages", "k_scales", "v_scales"):
        if call[name] is not None:
            call[name] = enlarge(call[name])
    assert call["k_pages"].size >= 3 * 2**30
    call["block_tables"] = call["block_tables"] + np.int32(first)
    attend = partial(function, kv_layout=kv_layout, implementation=implementation, return_lse=True)
    assert_close(jax.jit(attend)(**call), meant, case.tolerance)
