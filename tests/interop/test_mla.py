"""`mla_ragged_paged_attention` against a float64 oracle, on caches as callers have them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged.interop import get_mla_kv_cache_shape, mla_ragged_paged_attention
from tests.support.attention_oracle import attend, relative_error
from tests.support.marks import slow
from tests.support.promotion import strict_promotion

L, R, H, N, P = 24, 8, 3, 8, 24  # latent, rotary key, heads, tokens of a page, pages
Q_LENS, KV_LENS, DEAD, PADDING = (1, 5, 1, 11), (17, 5, 1, 30), 2, 4
TOKENS = sum(Q_LENS)
ALL = dict(sm_scale=0.3, sliding_window=9, soft_cap=3.0, q_scale=2.0, k_scale=0.5, v_scale=3.0)
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}


def make(dtype="float32", kv_dtype=None, seed=0):
    """The arrays of a call by name, behind the rows dead ones, and padding tokens full of NaN."""
    rng = np.random.default_rng(seed)
    rows, width = len(Q_LENS), max(-(-n // N) for n in KV_LENS) + 1
    table = rng.permutation(P)[: rows * width].reshape(rows, -1)
    for row, length in enumerate(KV_LENS):
        table[row, -(-length // N) :] = (-1, 2_000_000, P)[row % 3]
    kv_dtype = kv_dtype or dtype

    def normal(*shape, dtype):
        x = rng.standard_normal(shape).astype(np.float32)
        return x.astype(jnp.dtype(dtype))

    def tokens(*shape, dtype):
        x = normal(TOKENS + PADDING, *shape, dtype=dtype)
        x[TOKENS:] = 0 if x.dtype == np.int8 else np.nan
        return x

    dead = np.full((DEAD, width), table[0, 0])  # another row's page
    return dict(
        ql_nope=tokens(H, L, dtype=dtype).swapaxes(0, 1),
        q_pe=tokens(H, R, dtype=dtype),
        new_kv_c=tokens(L, dtype=kv_dtype),
        new_k_pe=tokens(R, dtype=kv_dtype),
        cache_kv=normal(P, N, 1, L + R, dtype=kv_dtype),
        kv_lens=np.int32([*KV_LENS, *[2_000_000] * DEAD]),
        page_indices=np.int32([*table, *dead]).ravel(),
        cu_q_lens=np.int32([0, *np.cumsum(Q_LENS), *[2_000_000] * DEAD]),
        distribution=np.int32([0, 1, rows]),
    )


def expected(arrays, *, sm_scale=1.0, q_scale=1.0, k_scale=1.0, v_scale=1.0, **options):
    """Float64 (out [H, T, L], cache [P, N, L + R]), the new latents in the cache."""
    q_nope, q_pe, c, k_pe, cache = (np.array(x).astype(np.float64) for x in [*arrays.values()][:5])
    rows, cache = arrays["distribution"][2], cache.reshape(P, N, L + R)
    lens, offsets = arrays["kv_lens"][:rows], arrays["cu_q_lens"][: rows + 1]
    table = arrays["page_indices"].reshape(len(arrays["kv_lens"]), -1)[:rows]
    for row in range(rows):
        new = np.arange(offsets[row], offsets[row + 1])
        places = lens[row] - offsets[row + 1] + new
        at = table[row, places // N], places % N
        cache[at] = np.concatenate([c, k_pe], axis=-1)[new]
    q = np.concatenate([q_nope.swapaxes(0, 1), q_pe], axis=-1)
    pages = cache[None]
    scale = sm_scale * q_scale * k_scale
    call = q, pages, pages[..., :L] * v_scale, table, lens, offsets
    return attend(*call, sm_scale=scale, **options)[0].swapaxes(0, 1), cache


def assert_equal_results(actual, meant, dtype):
    out, cache = (np.asarray(x).astype(np.float64) for x in actual)
    np.testing.assert_array_equal(cache.reshape(meant[1].shape), meant[1])
    assert relative_error(out, meant[0]) < TOLERANCE[dtype]
    assert not out[:, TOKENS:].any()


@pytest.mark.parametrize(
    ("dtype", "options"),
    [("float32", ALL), *slow([("float32", {}), ("bfloat16", ALL), ("float16", {})])],
    ids=["all", "plain", "bf16", "f16"],
)
def test_equals_the_oracle(dtype, options):
    arrays = make(dtype)
    with strict_promotion():
        results = jax.jit(partial(mla_ragged_paged_attention, **options))(**arrays)
    assert results[0].dtype == dtype and results[1].shape == arrays["cache_kv"].shape
    assert_equal_results(results, expected(arrays, **options), dtype)


def test_older_callers_have_tokens_before_heads():
    arrays = make()
    by_tokens = arrays | dict(ql_nope=arrays["ql_nope"].swapaxes(0, 1))
    out, cache = jax.jit(partial(mla_ragged_paged_attention, head_major=False))(**by_tokens)
    assert_equal_results((out.swapaxes(0, 1), cache), expected(arrays), "float32")
    with pytest.raises(ValueError, match=r"must be \[num_q_heads, T, L=24\] with head_major=True"):
        mla_ragged_paged_attention(**by_tokens)
    with pytest.raises(ValueError, match=r"must be \[T, num_q_heads, L=24\] with head_major=False"):
        mla_ragged_paged_attention(**arrays, head_major=False)


def test_caches_of_tpus_have_padding_and_split_pages():
    """L and R are padded to 128 elements each, and tokens are packed into words of 32 bits."""
    arrays = make("bfloat16")
    cache = arrays["cache_kv"].reshape(P, N, L + R)
    padded = np.zeros((P, N, 256), cache.dtype)
    padded[..., :L], padded[..., 128 : 128 + R] = cache[..., :L], cache[..., L:]
    given = arrays | dict(cache_kv=padded.reshape(P, N // 2, 2, 256))
    out, found = jax.jit(mla_ragged_paged_attention)(**given)
    assert found.shape == (P, N // 2, 2, 256)
    found = np.asarray(found).reshape(P, N, 256)
    assert not found[..., L:128].any() and not found[..., 128 + R :].any()
    parts = np.concatenate([found[..., :L], found[..., 128 : 128 + R]], axis=-1)
    assert_equal_results((out, parts), expected(arrays), "bfloat16")


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", *slow(["int8"])])
def test_one_byte_latents_go_as_they_are_into_the_cache(kv_dtype):
    arrays, scales = make("bfloat16", kv_dtype), dict(k_scale=0.25, v_scale=2.0)
    results = jax.jit(partial(mla_ragged_paged_attention, **scales))(**arrays)
    assert_equal_results(results, expected(arrays, **scales), "bfloat16")


def test_latents_are_quantized_by_the_scale_and_one_byte_queries_read_as_bf16():
    arrays = make("float8_e4m3fn", "float8_e4m3fn")
    scales = dict(q_scale=0.5, k_scale=0.25, v_scale=0.25)
    wide = {name: arrays[name].astype(jnp.bfloat16) for name in ("new_kv_c", "new_k_pe")}
    for name, x in wide.items():
        arrays[name] = (x.astype(np.float32) / 0.25).astype(jnp.float8_e4m3fn)
    out, cache = jax.jit(partial(mla_ragged_paged_attention, **scales))(**arrays | wide)
    assert out.dtype == jnp.bfloat16
    assert_equal_results((out, cache), expected(arrays, **scales), "bfloat16")


def test_the_cache_is_not_copied():
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in make().items()}
    shapes["cache_kv"] = jax.ShapeDtypeStruct((8192, N, 1, L + R), np.float32)
    step = jax.jit(mla_ragged_paged_attention, donate_argnames="cache_kv")
    memory = step.lower(**shapes).compile().memory_analysis()
    size = 8192 * N * (L + R) * 4
    assert memory.alias_size_in_bytes == size and memory.temp_size_in_bytes < size // 20


def test_tuning_changes_no_program():
    arrays = make().values()
    tuning = dict(num_kv_pages_per_block=(1, 2, 3), vmem_limit_bytes=7, decode_batch_size=4)
    one, other = (
        str(jax.make_jaxpr(partial(mla_ragged_paged_attention, **x))(*arrays)) for x in ({}, tuning)
    )
    assert one == other


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(cache_kv=np.zeros((P, N, 1, L), np.float32)), r"cache_kv.shape=.* L \+ R=32\], or e"),
        (dict(cache_kv=np.zeros((P, N, L + R), np.float32)), r"cache_kv.shape=\(24, 8, 32\) must"),
        (dict(new_k_pe=np.zeros((3, R), np.float32)), r"new_k_pe.shape=\(3, 8\) \[T, R\]"),
        (dict(q_pe=np.zeros((TOKENS, R), np.float32)), "q_pe.shape=.* num_q_heads, R=8"),
        (dict(page_indices=np.zeros(31, np.int32)), "page_indices.shape=.* with S=6 rows"),
        (dict(cu_q_lens=np.zeros(4, np.int32)), "cu_q_lens must be int32"),
        (dict(distribution=np.zeros(2, np.int32)), "distribution must be int32"),
        (dict(ql_nope=np.zeros((H, 3, L), bool)), "ql_nope.dtype=bool must be floating"),
        (dict(new_kv_c=np.zeros((3, L), np.int8)), "new_kv_c.dtype=int8 must be floating"),
        (dict(k_scale="1"), "k_scale"),
        (dict(head_major=1), "head_major=1 must be True or False"),
        (dict(transpose_kv_cache=True), "transpose_kv_cache=True must be False"),
        (dict(sinks=0), "sinks"),
    ],
)
def test_wrong_input(change, message):
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        mla_ragged_paged_attention(**(make() | change))


def test_a_cache_of_flashmla_is_a_layer_without_a_copy():
    """`[num_blocks, page_size, 1, 576]`, read with the arrays of `flash_mla_with_kvcache`."""
    shape = get_mla_kv_cache_shape(6, 64, 576, jnp.bfloat16)
    assert shape == (6, 64, 1, 576)
    rng = np.random.default_rng(0)
    k_cache = rng.standard_normal(shape).astype(jnp.bfloat16)
    q = rng.standard_normal((2, 1, 4, 576)).astype(jnp.bfloat16)  # [B, queries, heads, 576]
    block_table, cache_seqlens = np.int32([[3, 1], [5, -1]]), np.int32([100, 7])
    layer = pp.LayerKV(k_cache, v_head_dim=512)
    call = jax.jit(partial(pp.mla_attention, sm_scale=192**-0.5, return_lse=True))
    out, lse = call(q[:, 0, :, :512], q[:, 0, :, 512:], layer, block_table, cache_seqlens)
    pages = k_cache.reshape(1, 6, 64, 576)
    meant = attend(q[:, 0], pages, pages[..., :512], block_table, cache_seqlens, sm_scale=192**-0.5)
    assert relative_error(out, meant[0]) < 5e-3
    np.testing.assert_allclose(lse, meant[1], atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="page_size=12 must be a power of two"):
        get_mla_kv_cache_shape(100, 12, 576, jnp.bfloat16)
