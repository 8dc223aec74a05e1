"""The attention that the engine passes to models, from q, k and v or from the fused product."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged.decoder.rotary_write import split_qkv
from pallas_paged.decoder.unmerged_attention import UnmergedAttention
from pallas_paged.engine.device.attend import AttentionKernels, PagedAttend
from pallas_paged.engine.device.batch import ChunkBatch
from pallas_paged.engine.device.program import make_step
from pallas_paged.engine.sampling_params import SamplingMode
from tests.support import raw
from tests.support.devices import lower_for_cuda
from tests.support.engine_calls import make_engine
from tests.support.marks import needs_triton, slow
from tests.support.page_tables import extended, i32, slot_mapping

NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE = 2, 4, 16, 4
CHUNK = 5  # tokens


def attend_of(lens, rows, positions, decoding, chunks=None, implementation=None):
    sizes = dict(num_pages=16, page_size=PAGE_SIZE, max_seqs=len(lens), pages_per_seq=8)
    table = jax.tree.map(jnp.asarray, extended(lens, **sizes))
    slots = slot_mapping(table, rows, positions)
    how = dict(num_kv_heads=[NUM_KV_HEADS], kernels=AttentionKernels(**raw.by(implementation)))
    return PagedAttend(table, slots, decoding, chunks, **how)


def a_call(repeats=1, implementation=None, *, is_alone=False):
    """Attention and a layer's pages: of two rows and a chunk, or of one row; and a product."""
    lens, rows, positions = (6, 3, CHUNK), (*[2] * CHUNK, 0, 1), (*range(CHUNK), 5, 2)
    of_slots = dict(cu_q_lens=i32(0, CHUNK, CHUNK, CHUNK), slots=i32(2, 3, 3))
    tokens = dict(token_ids=np.zeros(CHUNK, np.int32), is_last=np.zeros(3, bool))
    chunks = ChunkBatch(**tokens, **of_slots, targets=None)
    if is_alone:
        lens, rows, positions, chunks = (30,), (0,), (29,), None
    first = i32(0) if is_alone else i32(0, 1)
    attend = attend_of(lens, rows, positions, first, chunks, implementation)
    pages = np.full((NUM_KV_HEADS * repeats, 16, PAGE_SIZE, HEAD_DIM), 0.5, np.float32)
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((len(rows), NUM_KV_HEADS, GROUP + 2, HEAD_DIM), np.float32)
    angles = rng.uniform(0, 6, (len(rows), 1, HEAD_DIM // 2)).astype(np.float32)
    return attend, pp.LayerKV(pages, pages, kv_layout="HPND"), qkv, (np.cos(angles), np.sin(angles))


def assert_close(got, want):
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", [None, *slow(["xla", "triton_interpret"])])
@pytest.mark.parametrize("repeats", [1, 2])
def test_the_fused_product_gives_what_its_parts_give(repeats, implementation):
    attend, layer, qkv, rotation = a_call(repeats, implementation)
    how = dict(rotation=rotation, q_norm=np.full(HEAD_DIM, 1.5, np.float32), eps=0.1)
    got = jax.jit(lambda: attend.fused(qkv, layer, **how, sliding_window=4))()
    want = jax.jit(lambda: attend(*split_qkv(qkv, **how), layer, sliding_window=4))()
    assert got[0].shape == (len(qkv), NUM_KV_HEADS * GROUP, HEAD_DIM)
    assert_close(got, want)


@needs_triton
@pytest.mark.parametrize(
    "norms", [{}, dict(q_norm=np.full(16, 1.5, "f4"), k_norm=np.ones(16, "f4"))]
)
def test_one_row_has_partial_states_for_a_model_that_takes_them(norms):
    attend, layer, qkv, rotation = a_call(1, "triton_interpret", is_alone=True)

    @jax.jit
    def both():
        want, want_layer = attend.fused(qkv, layer, rotation=rotation, **norms)
        got, got_layer = attend.fused(qkv, layer, unmerged=True, rotation=rotation, **norms)
        assert isinstance(got, UnmergedAttention)
        return (got.merged(), got_layer), (want.reshape(1, -1), want_layer)

    assert_close(*both())


def test_kv_heads_on_more_devices_than_have_queries_are_refused():
    attend, layer, qkv, _ = a_call(repeats=8)
    with pytest.raises(ValueError, match="a multiple of 8 query heads to be on as many devices"):
        attend.fused(qkv, layer)


@pytest.mark.parametrize("num_tokens", [0, 16], ids=["decode", "mixed"])
def test_a_step_for_cuda_writes_k_and_v_by_the_kernel_and_fits_a_graph(model, num_tokens):
    engine_model = pytest.importorskip("models.decoder").engine_model
    model, params = engine_model(model)
    engine = make_engine(model, params, num_pages=8, num_scheduler_steps=1, modes=None)
    runner = engine.replicas[0].runner
    batch = runner.empty_batch((4, num_tokens), SamplingMode(draws=True))
    weights, state = runner.executor.weights, runner.executor.state
    shapes = jax.eval_shape(lambda: (weights.leaves, state, batch))
    # Without its compile options, which only the outermost function may have.
    step = make_step(model, weights.structure, AttentionKernels()).__wrapped__
    text = lower_for_cuda(step, *shapes).as_text()
    assert "rotate_and_write_kv" in text
    spec = model.kv_cache_spec
    pages = f"tensor<{8 * PAGE_SIZE}x{spec.num_kv_heads}x{spec.head_dim}xf32>"
    assert f"}}) : ({pages}, " not in text  # as a scatter into them would end
    # What no CUDA graph can hold, or what would wait for the host in one.
    assert not re.findall(r"stablehlo\.(?:sort|while|case|if)\b|chlo.top_k|callback", text)


def test_padding_is_no_token():
    rows = i32(2, 0, 3, 3)  # 3 is the row of padding
    attend = attend_of((1, 0, 5), rows, i32(4, 0, 0, 0), rows)
    np.testing.assert_array_equal(attend.is_token, [True, True, False, False])
