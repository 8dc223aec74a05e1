"""`PagedKVCache` against the functions beneath it, and against the oracle."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged.pages.sharding import kv_pool_sharding
from tests.support.attention_cases import cumulated
from tests.support.attention_oracle import attend, relative_error
from tests.support.devices import mesh

B, H, G, D, LAYERS = 3, 2, 2, 16, 2
SIZES = dict(
    num_layers=LAYERS, num_pages=12, page_size=4, max_seqs=B, pages_per_seq=6, num_kv_heads=H,
    head_dim=D, dtype="float32",
)  # fmt: skip
create = partial(pp.PagedKVCache.create, **SIZES)
extend, fork = jax.jit(pp.PagedKVCache.extend), jax.jit(pp.PagedKVCache.fork)
write = jax.jit(pp.PagedKVCache.write, static_argnums=1)


class Texts:
    """Random K/V of each token of sequences, kept apart, and attention over them."""

    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.kv = [np.zeros((2, LAYERS, 0, H, D)) for _ in range(B)]

    def grow(self, q_lens):
        """Draw q, k and v of new tokens, one sequence after another."""
        new = [self.rng.standard_normal((2, LAYERS, n, H, D)) for n in q_lens]
        self.kv = [np.concatenate(x, axis=2) for x in zip(self.kv, new, strict=True)]
        k, v = np.concatenate(new, axis=2).astype(np.float32)
        return self.rng.standard_normal((sum(q_lens), H * G, D)).astype(np.float32), k, v

    def attend(self, layer, q, q_lens):
        lens = [kv.shape[2] for kv in self.kv]
        pages = np.zeros((2, H, B, max(lens), D))  # the oracle has one page for each sequence
        for i, kv in enumerate(self.kv):
            pages[:, :, i, : lens[i]] = kv[:, layer].swapaxes(1, 2)
        return attend(q, *pages, np.arange(B)[:, None], lens, cumulated(q_lens))[0]


@jax.jit(donate_argnums=0)
def step(cache, q, k, v, cu_q_lens=None):
    """All layers of a step: the cache, and the outputs."""
    outs = []
    for layer in range(LAYERS):
        cache = cache.write(layer, k[layer], v[layer], cu_q_lens)
        outs.append(cache.attend(layer, q, cu_q_lens))
    return cache, outs


def feed(cache, texts, q_lens):
    """Give sequences new tokens, and check attention in every layer."""
    cache, ok = extend(cache, np.int32(q_lens))
    assert ok.all()
    ragged = q_lens != (1,) * B
    q, k, v = texts.grow(q_lens)
    cache, outs = step(cache, q, k, v, cumulated(q_lens) if ragged else None)
    for layer, out in enumerate(outs):
        assert relative_error(out, texts.attend(layer, q, q_lens)) <= 1e-5
    return cache


@pytest.mark.parametrize("kv_layout", ["NHD", "2NHD"])
def test_prompts_tokens_forks_and_truncations_equal_numpy(kv_layout):
    cache, texts = create(kv_layout=kv_layout), Texts()
    cache = feed(cache, texts, (6, 0, 3))
    cache, ok = fork(cache, np.int32([0]), np.int32([1]))
    assert ok.all()
    texts.kv[1] = texts.kv[0]
    for q_lens in ((1, 1, 1), (1, 1, 1), (3, 5, 1)):
        cache = feed(cache, texts, q_lens)
    cache, ok = jax.jit(pp.PagedKVCache.truncate)(cache, np.int32([5, 11, 2]))
    assert ok.all()
    texts.kv = [x[:, :, :n] for x, n in zip(texts.kv, (5, 11, 2), strict=True)]
    cache = jax.jit(pp.PagedKVCache.free)(cache, np.array([False, False, True]))
    texts.kv[2] = texts.kv[2][:, :, :0]
    cache = feed(cache, texts, (1, 1, 1))
    np.testing.assert_array_equal(cache.seq_lens, [6, 12, 1])
    pp.check_page_table(cache.table)


def test_a_cache_of_latents_equals_numpy():
    """One array a layer; prompts, then a fork, then a token each."""
    dims = dict(head_dim=D + 4, v_head_dim=D, num_kv_heads=1)
    cache = create(**dims)
    rng, kv = np.random.default_rng(0), [np.zeros((LAYERS, 0, D + 4))] * B

    @jax.jit(donate_argnums=0)
    def step(cache, q, k, cu_q_lens=None):
        outs = []
        for layer in range(LAYERS):
            cache = cache.write(layer, k[layer], None, cu_q_lens)
            q_nope, q_pe = q[..., :D], q[..., D:]
            outs.append(cache.attend_latents(layer, q_nope, q_pe, cu_q_lens, sm_scale=0.3))
        return cache, outs

    for q_lens in ((6, 0, 3), (1, 1, 1)):
        cache, ok = extend(cache, np.int32(q_lens))
        assert ok.all()
        new = [rng.standard_normal((LAYERS, n, D + 4)) for n in q_lens]
        kv = [np.concatenate(x, axis=1) for x in zip(kv, new, strict=True)]
        q = rng.standard_normal((sum(q_lens), H * G, D + 4)).astype(np.float32)
        k = np.concatenate(new, axis=1).astype(np.float32)[:, :, None]
        cache, outs = step(cache, q, k, cumulated(q_lens) if 0 in q_lens else None)
        for layer, out in enumerate(outs):
            pages = np.zeros((1, B, max(x.shape[1] for x in kv), D + 4))
            for i, x in enumerate(kv):
                pages[0, i, : x.shape[1]] = x[layer]
            at = np.arange(B)[:, None], [x.shape[1] for x in kv], cumulated(q_lens)
            expected, _ = attend(q, pages, pages[..., :D], *at, sm_scale=0.3)
            assert relative_error(out, expected) <= 1e-5
        if 0 in q_lens:
            cache, ok = jax.jit(lambda cache: cache.fork([0], [1]))(cache)
            assert ok.all()
            kv[1] = kv[0]
    with pytest.raises(ValueError, match="of latents, v_head_dim=16, is read by mla_attention"):
        cache.attend(0, q)


def test_a_sequence_without_new_tokens_keeps_what_it_has():
    cache, ok = extend(create(), np.array([True, False, True]))
    assert ok.all()
    ones = np.ones((B, H, D), np.float32)
    cache = write(cache, 0, ones, ones)
    cache, ok = extend(cache, np.int32([1, 1, 30]))  # more than pages_per_seq
    np.testing.assert_array_equal(ok, [True, True, False])
    np.testing.assert_array_equal(cache.num_new_tokens, [1, 1, 0])
    written = write(cache, 0, 7 * ones, 7 * ones).pool.layers[0].k_pages
    where = cache.table.block_tables[:, 0]
    np.testing.assert_array_equal(np.asarray(written)[where, :2, 0, 0], [[1, 7], [7, 0], [1, 0]])
    # After another verb there is nothing to write.
    assert not cache.free(np.zeros(B, bool)).num_new_tokens.any()


def test_more_tokens_than_the_last_extend_added_write_over_no_older_one():
    cache, _ = extend(create(), np.int32([2, 0, 0]))
    ones = np.ones((2, H, D), np.float32)
    cache = write(cache, 0, ones, ones, np.int32([0, 2, 2, 2]))
    cache, _ = extend(cache, np.int32([1, 0, 0]))
    written = write(cache, 0, 7 * ones, 7 * ones, np.int32([0, 2, 2, 2])).pool.layers[0].k_pages
    page = cache.table.block_tables[0, 0]
    np.testing.assert_array_equal(np.asarray(written)[page, :, 0, 0], [1, 1, 7, 0])


@pytest.mark.parametrize("cu_q_lens", [(0, 2, 4, 90), (0, 3, 2, 5), (7, 2, -9, 2**31 - 1)])
def test_offsets_that_do_not_rise_to_the_last_token_are_those_of_attention(cu_q_lens):
    rising = np.clip(np.maximum.accumulate(np.int32([0, *cu_q_lens[1:]])), 0, 5)
    cache, _ = extend(create(), np.diff(rising))
    x = np.arange(1, 6, dtype=np.float32)[:, None, None] * np.ones((5, H, D), np.float32)
    written, meant = (write(cache, 0, x, x, np.int32(offsets)) for offsets in (cu_q_lens, rising))
    assert (meant.pool.layers[0].k_pages != 0).any(axis=(2, 3)).sum() == 5
    np.testing.assert_array_equal(written.pool.layers[0].k_pages, meant.pool.layers[0].k_pages)


def test_it_is_a_carry_of_loops():
    def body(cache, x):
        cache, ok = cache.extend(jnp.ones(B, jnp.int32))
        cache = cache.write(0, x, x)
        return cache, (cache.attend(0, jnp.concatenate([x, x], axis=1), sm_scale=0.5), ok)

    xs = np.random.default_rng(0).standard_normal((5, B, H, D)).astype(np.float32)
    cache, (outs, ok) = jax.jit(lambda cache: jax.lax.scan(body, cache, xs))(create())
    assert ok.all() and (cache.seq_lens == 5).all() and outs.shape == (5, B, H * G, D)

    def until(cache):
        return jax.lax.while_loop(lambda c: c.seq_lens[0] < 5, lambda c: body(c, xs[0])[0], cache)

    assert (jax.jit(until)(create()).seq_lens == 5).all()


def test_weakly_typed_counts_leave_the_types_of_the_cache_alone():
    cache = create()
    extended, _ = extend(cache, jnp.full(B, 2))
    assert jax.typeof(extended.num_new_tokens) == jax.typeof(cache.num_new_tokens)


def test_a_cache_of_numpy_arrays_goes_on_as_one_restored_from_a_file_does():
    x = np.ones((B, H, D), np.float32)
    cache, _ = extend(create(), np.int32([1, 2, 0]))
    results = []
    for one in (cache, jax.device_get(cache)):
        one = one.write(0, x, x)
        out = one.attend(0, x)
        one, ok = jax.device_get(one).fork([1], [2])
        one, _ = jax.device_get(one).truncate([1, 0, 2])
        results.append((out, ok, jax.device_get(one).extend([1, 1, 0])[0], one.free([True] * B)))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_on_a_mesh_heads_are_sharded_and_the_table_is_replicated():
    sharding = kv_pool_sharding(mesh(2))
    cache, texts = create(sharding=sharding), Texts()
    assert cache.table.seq_lens.sharding.is_fully_replicated
    cache = feed(cache, texts, (3, 1, 2))
    pages = cache.pool.layers[0].k_pages
    assert pages.addressable_shards[0].data.shape[2] == H // 2


def test_bad_arguments_are_refused():
    cache, x = create(), np.zeros((B, H, D), np.float32)
    with pytest.raises(ValueError, match=r"cu_q_lens must be int32\[4\]"):
        cache.write(0, x, x, np.zeros(2, np.int32))
    with pytest.raises(ValueError, match=r"k.shape=\(2, 2, 16\) must begin with max_seqs=3"):
        cache.write(0, x[:2], x[:2])
    with pytest.raises(ValueError, match="k and v must be"):
        cache.write(0, x[:, :1], x)
    with pytest.raises(TypeError, match="did you mean 'sm_scale'"):
        cache.attend(0, x, scale=1.0)
    with pytest.raises(ValueError, match="num_new_tokens must be int32"):
        cache.extend(np.zeros(B))
    for layer in (2, -1, True, 0.0, None):
        for call in (cache.attend, lambda layer, x: cache.write(layer, x, x)):
            with pytest.raises(ValueError, match=rf"layer={layer} must be an integer in 0\.\.1"):
                call(layer, x)
