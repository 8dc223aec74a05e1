"""Static descriptions of attention calls, for tests of the choice of an implementation."""

import dataclasses

import jax.numpy as jnp

from pallas_paged.kernels.call import Call
from tests.support.devices import HOPPER

PREFILL = Call(
    kernel="ragged",
    device=HOPPER,
    dtype=jnp.dtype(jnp.bfloat16),
    kv_dtype=jnp.dtype(jnp.bfloat16),
    num_tokens=4096,
    num_seqs=4,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    page_size=16,
    max_kv_len=4096,
    with_lse=False,
    config=None,
)
DECODE = dataclasses.replace(PREFILL, kernel="decode", num_tokens=4)
