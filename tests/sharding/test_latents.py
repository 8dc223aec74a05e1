"""Latents on a mesh: query heads are sharded, and each device has all pages."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_paged as pp
from pallas_paged.attention import context_parallel
from tests.support import raw
from tests.support.attention_calls import assert_close
from tests.support.attention_cases import LatentCase, of_latents
from tests.support.devices import latent_implementations_here, mesh
from tests.support.kv_pools import copies_of
from tests.support.marks import slow
from tests.support.page_layouts import call_in_layout
from tests.support.placement import collectives, mesh_2d, place

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
LATENT, ROPE = 32, 4
DECODE = LatentCase(head_dim=LATENT + ROPE, seq_lens=(13, 0, 5, 16), pages_per_seq=2)
RAGGED = LatentCase(
    head_dim=LATENT + ROPE, seq_lens=(13, 0, 5, 16), pages_per_seq=2, q_lens=(3, 0, 5, 1),
    num_tokens=10,
)  # fmt: skip
SINKS = np.float32([1.0, -3.0, 0.0, 8.0])
SPECS = dict(q=P(None, "tensor"), sinks=P("tensor"))


@pytest.mark.parametrize("implementation", latent_implementations_here())
@pytest.mark.parametrize(
    ("case", "kind", "kv_layout"),
    [(DECODE, AUTO, "NHD"), (RAGGED, EXPLICIT, "HND"),
     *slow([(DECODE, EXPLICIT, "HPND"), (RAGGED, AUTO, "NHD")])],
    ids=str,
)  # fmt: skip
def test_each_device_attends_with_its_own_heads(case, kind, kv_layout, implementation):
    case = case.on(implementation)
    arrays = of_latents(case.make(), case.v_head_dim)
    on = mesh_2d(2, names=("tensor",), kind=kind)
    call = place(call_in_layout(kv_layout, arrays) | dict(sinks=SINKS), on, SPECS)
    options = dict(sm_scale=0.2, soft_cap=1.5, sliding_window=9)
    how = dict(implementation=implementation, kv_layout=kv_layout, return_lse=True)
    attend = jax.jit(partial(raw.mla_attention, **options, **how))
    compiled = attend.lower(**call).compile()
    assert collectives(compiled) == []
    results = compiled(**call)
    assert [tuple(x.sharding.spec)[:2] for x in results] == [(None, "tensor")] * 2
    assert_close(jax.tree.map(np.asarray, results), arrays, case.tolerance, sinks=SINKS, **options)


SIZES = dict(
    num_layers=1, num_pages=7, num_kv_heads=1, page_size=4, head_dim=24, v_head_dim=16,
    dtype="int8",
)  # fmt: skip


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
def test_each_device_writes_and_copies_all_pages(kind):
    on = mesh_2d(2, names=("tensor",), kind=kind)
    everywhere = NamedSharding(on, P())
    pool = pp.create_kv_pool(**SIZES, sharding=everywhere)
    tokens = np.random.default_rng(0).standard_normal((3, 1, 24), np.float32)
    slots = np.int32([0, 9, -1])
    copies = copies_of(np.int32([2, 99]), np.int32([5, 0]))

    def step(pool, tokens, slots, copies):
        layers = tuple(pp.write_kv(layer, tokens, None, slots) for layer in pool.layers)
        return pp.copy_pages(pp.KVPool(layers=layers), copies)

    expected = jax.jit(step)(pp.create_kv_pool(**SIZES), tokens, slots, copies)
    given = jax.device_put((tokens, slots, copies), everywhere)
    compiled = jax.jit(step).lower(pool, *given).compile()
    assert collectives(compiled) == []
    for found, wanted in zip(
        *map(jax.tree.leaves, (compiled(pool, *given), expected)), strict=True
    ):
        assert found.sharding.is_fully_replicated and len(found.addressable_shards) == 2
        for shard in found.addressable_shards:
            np.testing.assert_array_equal(shard.data, wanted)


def test_one_latent_can_not_be_sharded():
    sharding = NamedSharding(mesh(2), P(None, None, "tensor"))
    with pytest.raises(ValueError, match="num_kv_heads=1 must be a multiple of the 2 devices"):
        pp.create_kv_pool(**SIZES, sharding=sharding)


def test_a_cache_of_latents_has_a_copy_on_each_device():
    on = mesh(2)
    sizes = SIZES | dict(max_seqs=2, pages_per_seq=3, dtype="float32")
    cache = pp.PagedKVCache.create(**sizes, sharding=NamedSharding(on, P()))
    q, k = np.ones((2, 4, 24), np.float32), np.ones((2, 1, 24), np.float32)
    q = jax.device_put(q, NamedSharding(on, P(None, "tensor")))

    @jax.jit
    def step(cache, q, k):
        cache, _ = cache.extend(np.ones(2, np.int32))
        cache = cache.write(0, k, None)
        return cache, cache.attend_latents(0, q[..., :16], q[..., 16:], sm_scale=1.0)

    cache, out = step(cache, q, k)
    assert cache.pool.layers[0].k_pages.sharding.is_fully_replicated
    assert tuple(out.sharding.spec)[:2] == (None, "tensor")
    np.testing.assert_allclose(out, np.ones((2, 4, 16)), rtol=1e-6)


def test_context_parallelism_refuses_latents():
    on = mesh_2d(2, 1, names=(context_parallel.CONTEXT_AXIS, "tensor"))
    arrays = of_latents(DECODE.make(poison=False), LATENT)
    layer = pp.LayerKV(arrays[1], v_head_dim=LATENT, kv_layout="HPND")

    def call():
        pages = context_parallel.local_pages(*arrays[3:], page_size=DECODE.page_size, mesh=on)
        return context_parallel.paged_attention(arrays[0], layer, pages, mesh=on)

    with pytest.raises(ValueError, match="of latents, v_head_dim=32, is read by mla_attention"):
        jax.eval_shape(call)
