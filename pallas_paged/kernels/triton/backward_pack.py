"""Rows of queries in another order, a Pallas-Triton kernel that only copies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_paged.kernels.call import result_shape
from pallas_paged.kernels.triton.specs import whole

_ROWS = 32  # of a program


def pack_kernel(q_ref, d_out_ref, token_ref, head_ref, packed_q_ref, packed_d_out_ref):
    """One program: some rows of the queries of one KV head, and of their gradients."""
    num_tokens, num_q_heads, head_dim = q_ref.shape
    kv_head = pl.program_id(1)
    group = num_q_heads // packed_q_ref.shape[0]
    rows = pl.program_id(0) * _ROWS + jnp.arange(_ROWS)
    token, head = plgpu.load(token_ref.at[rows]), plgpu.load(head_ref.at[rows])
    dims = jnp.arange(head_dim)[None, :]
    mask = jnp.broadcast_to((token < num_tokens)[:, None], (_ROWS, head_dim))
    source = token[:, None], (kv_head * group + head)[:, None], dims
    for x_ref, packed_ref in ((q_ref, packed_q_ref), (d_out_ref, packed_d_out_ref)):
        x = plgpu.load(x_ref.at[source], mask=mask, other=0.0)
        plgpu.store(packed_ref.at[kv_head[None, None], rows[:, None], dims], x)


def pack(
    q: jax.Array,  # [T, Hq, D]
    d_out: jax.Array,  # [T, Hq, D]
    token: jax.Array,  # i32[R], the token of each row; T where there is none
    head: jax.Array,  # i32[R], the head of each row within its group
    *,
    num_kv_heads: int,
    interpret: bool,
) -> list[jax.Array]:
    """Return q and d_out as rows `[Hkv, R, D]`, 0 without a token. head_dim is a power of two."""
    shape = (num_kv_heads, token.size, q.shape[2])
    inputs = (q, d_out, token, head)
    out_shape = [result_shape(shape, q.dtype)] * 2
    return pl.pallas_call(
        pack_kernel,
        grid=(token.size // _ROWS, num_kv_heads),
        in_specs=whole(inputs),
        out_specs=whole(out_shape),
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="attention_gradient_pack",
    )(*inputs)
