"""The Triton kernels of the backward pass lower for CUDA on a machine without a GPU."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged.kernels.triton.backward_config import keys_config, queries_config
from tests.support.devices import lower_for_cuda
from tests.support.marks import slow


def lower(heads, page_size, dtype, num_tokens=300, kv_dtype=None, **call):
    """The gradient of a ragged call in q, the pages, slopes and sinks, lowered for CUDA."""
    num_q_heads, num_kv_heads, head_dim = heads
    pages = jax.ShapeDtypeStruct((num_kv_heads, 99, page_size, head_dim), kv_dtype or dtype)
    q = jax.ShapeDtypeStruct((num_tokens, num_q_heads, head_dim), dtype)
    table = jax.ShapeDtypeStruct((4, 32), jnp.int32)
    lens = jax.ShapeDtypeStruct((4,), jnp.int32)
    offsets = jax.ShapeDtypeStruct((5,), jnp.int32)
    if kv_dtype is not None:
        scales = np.ones((num_kv_heads, 99, page_size), np.float32)
        call |= dict(k_scales=scales, v_scales=scales)
    of_heads = {name: call.pop(name) for name in ("alibi_slopes", "sinks") if name in call}
    with_lse = call.pop("return_lse", False)

    def loss(differentiated, pages, *rest):
        q, pages, of_heads = differentiated if kv_dtype is None else (*differentiated, pages, {})
        found = pp.ragged_paged_attention(
            q, pages, pages, *rest, **of_heads, **call, return_lse=with_lse, implementation="triton"
        )
        return sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(found))

    differentiated = (q, pages, of_heads) if kv_dtype is None else (q,)
    return lower_for_cuda(jax.grad(loss), differentiated, pages, table, lens, offsets).as_text()


KERNELS = ("attention_gradient_of_queries", "attention_gradient_of_keys")


@pytest.mark.parametrize(
    ("heads", "page_size", "dtype"),
    [
        ((7, 1, 64), 256, jnp.float16),
        ((8, 8, 80), 1, jnp.float32),
        *slow([((32, 8, d), 16, jnp.bfloat16) for d in (16, 128, 192, 256, 512)]),
    ],
    ids=str,
)
def test_sizes(heads, page_size, dtype):
    text = lower(heads, page_size, dtype)
    assert all(name in text for name in KERNELS)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, *slow([jnp.float32])])
def test_options(dtype):
    per_head = np.ones(6, np.float32)
    options = dict(
        sliding_window=100, soft_cap=30.0, alibi_slopes=per_head, sinks=per_head, sm_scale=-0.1,
        return_lse=True, tree_mask=np.ones((4, 8, 8), bool),
    )  # fmt: skip
    text = lower((6, 2, 80), 16, dtype, **options)
    assert all(name in text for name in KERNELS)


@pytest.mark.parametrize("kv_dtype", [jnp.int8, *slow([jnp.float8_e4m3fn])])
def test_one_byte_pages(kv_dtype):
    text = lower((8, 2, 64), 16, jnp.bfloat16, kv_dtype=kv_dtype)
    assert KERNELS[0] in text and KERNELS[1] not in text


@pytest.mark.parametrize(
    ("head_dim", "rows"), [*itertools.product((16, 64, 80, 128, 256, 512), (1, 4, 4096))]
)
def test_configs_fit_in_shared_memory(head_dim, rows):
    padded = 1 << (head_dim - 1).bit_length()
    for itemsize in (2, 4):
        sizes = dict(head_dim=head_dim, itemsize=itemsize, rows=rows)
        queries, keys = queries_config(**sizes), keys_config(**sizes)
        # Two tiles stay, and two more are in every stage.
        of_queries = queries.block_q + queries.num_stages * queries.block_k
        of_keys = keys.block_k + keys.num_stages * keys.block_q
        assert 2 * max(of_queries, of_keys) * padded * itemsize <= 227 * 1024
