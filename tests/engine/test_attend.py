"""The attention that the engine passes to models, from q, k and v or from the fused product."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged.engine.attend import PagedAttend
from pallas_paged.engine.batch import Batch, ChunkBatch
from pallas_paged.engine.input_batch import slot_states
from pallas_paged.engine.kv_cache import create_pool
from pallas_paged.engine.sampler import SamplingMode
from pallas_paged.engine.state import EngineState
from pallas_paged.engine.step import make_step
from pallas_paged.rotary_write import split_qkv
from pallas_paged.unmerged_attention import UnmergedAttention
from tests.support.devices import lower_for_cuda
from tests.support.kv_pools import make_pool
from tests.support.marks import needs_triton, slow
from tests.support.page_tables import i32

NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE = 2, 4, 8, 4
DECODES, CHUNK = 2, 5  # tokens


def a_call(repeats, implementation=None):
    """A layer's pages with some tokens in them, and the attention of two rows and a chunk."""
    table = pp.create_page_table(num_pages=16, page_size=PAGE_SIZE, max_seqs=3, pages_per_seq=4)
    table, ok = pp.extend(table, i32(6, 3, CHUNK))
    assert ok.all()
    rows = i32(2, 2, 2, 2, 2, 0, 1)
    positions = i32(*range(CHUNK), 5, 2)
    chunks = ChunkBatch(
        token_ids=jnp.zeros(CHUNK, jnp.int32),
        cu_q_lens=i32(0, CHUNK, CHUNK, CHUNK),
        slots=i32(2, 3, 3),
        is_last=jnp.zeros(3, bool),
        targets=None,
    )
    attend = PagedAttend(
        table,
        pp.slot_mapping(table, rows, positions),
        i32(0, 1),
        chunks,
        num_kv_heads=NUM_KV_HEADS,
        implementation=implementation,
    )
    pool = make_pool(1, 16, NUM_KV_HEADS * repeats, PAGE_SIZE, HEAD_DIM)
    return attend, jax.tree.map(lambda x: x + 0.5, pool.layers[0])


@pytest.mark.parametrize("implementation", [None, *slow(["xla", "triton_interpret"])])
@pytest.mark.parametrize("repeats", [1, 2])
def test_the_fused_product_gives_what_its_parts_give(repeats, implementation):
    attend, layer = a_call(repeats, implementation)
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((DECODES + CHUNK, NUM_KV_HEADS, GROUP + 2, HEAD_DIM), np.float32)
    angles = rng.uniform(0, 6, (len(qkv), 1, HEAD_DIM // 2)).astype(np.float32)
    how = dict(rotation=(jnp.cos(angles), jnp.sin(angles)), q_norm=jnp.full(HEAD_DIM, 1.5), eps=0.1)
    got = jax.jit(lambda: attend.fused(qkv, layer, **how, sliding_window=4))()
    want = jax.jit(lambda: attend(*split_qkv(qkv, **how), layer, sliding_window=4))()
    assert got[0].shape == (len(qkv), NUM_KV_HEADS * GROUP, HEAD_DIM)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@needs_triton
@pytest.mark.parametrize("norms", [{}, dict(q_norm=jnp.full(16, 1.5), k_norm=jnp.ones(16))])
def test_one_row_has_partial_states_for_a_model_that_takes_them(norms):
    table = pp.create_page_table(num_pages=8, page_size=PAGE_SIZE, max_seqs=1, pages_per_seq=8)
    table, _ = pp.extend(table, i32(30))
    attend = PagedAttend(
        table,
        pp.slot_mapping(table, i32(0), i32(29)),
        i32(0),
        None,
        num_kv_heads=NUM_KV_HEADS,
        implementation="triton_interpret",
    )
    layer = jax.tree.map(lambda x: x + 0.5, make_pool(1, 8, NUM_KV_HEADS, PAGE_SIZE, 16).layers[0])
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((1, NUM_KV_HEADS, GROUP + 2, 16), np.float32)
    how = dict(rotation=(jnp.cos(jnp.ones((1, 1, 8))), jnp.sin(jnp.ones((1, 1, 8)))), **norms)
    want, want_layer = attend.fused(qkv, layer, **how)
    got, got_layer = attend.fused(qkv, layer, unmerged=True, **how)
    assert isinstance(got, UnmergedAttention)
    np.testing.assert_allclose(got.merged(), want.reshape(1, -1), rtol=1e-5, atol=1e-6)
    for a, b in zip(*map(jax.tree.leaves, (got_layer, want_layer)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_kv_heads_on_more_devices_than_have_queries_are_refused():
    attend, layer = a_call(repeats=8)
    with pytest.raises(ValueError, match="a multiple of 8 query heads to be on as many devices"):
        attend.fused(jnp.ones((7, NUM_KV_HEADS, GROUP + 2, HEAD_DIM)), layer)


@pytest.mark.parametrize("num_tokens", [0, 16], ids=["decode", "mixed"])
def test_a_step_for_cuda_writes_k_and_v_by_the_kernel_and_fits_a_graph(model, num_tokens):
    engine_model = pytest.importorskip("models.engine_model").engine_model
    model, params = engine_model(model)
    leaves, structure = jax.tree.flatten(params)
    spec = model.kv_cache_spec
    sizes = dict(num_pages=8, page_size=PAGE_SIZE)
    state = jax.eval_shape(
        lambda: EngineState(
            table=pp.create_page_table(**sizes, max_seqs=2, pages_per_seq=4),
            pool=create_pool(spec, **sizes, dtype=spec.dtype),
            slots=jax.tree.map(jnp.asarray, slot_states(2, len(model.eos_token_ids))),
            valid=jnp.bool_(True),
        )
    )

    def integers(size):
        return jax.ShapeDtypeStruct((size,), jnp.int32)

    chunks = ChunkBatch(
        token_ids=integers(num_tokens),
        cu_q_lens=integers(3),
        slots=integers(2),
        is_last=jax.ShapeDtypeStruct((2,), bool),
        targets=None,
    )
    batch = Batch(
        decode_slots=integers(2),
        num_steps=integers(2),
        chunks=chunks if num_tokens else None,
        mode=SamplingMode(draws=True),
        max_num_steps=1,
    )
    step = make_step(model, structure, None)
    # Without its compile options, which only the outermost function may have.
    text = lower_for_cuda(step.__wrapped__, tuple(leaves), state, None, batch).as_text()
    assert "rotate_and_write_kv" in text
    pages = f"tensor<{spec.num_kv_heads}x{8 * PAGE_SIZE}x{spec.head_dim}xf32>"
    assert f"}}) : ({pages}, " not in text  # as a scatter into them would end
    # What no CUDA graph can hold, or what would wait for the host in one.
    assert not re.findall(r"stablehlo\.(?:sort|while|case|if)\b|chlo.top_k|callback", text)
