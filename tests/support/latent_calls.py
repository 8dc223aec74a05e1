"""Calls of a kernel on latents beside the oracle; without a GPU the kernel is interpreted."""

from functools import partial

import jax
import numpy as np

import pallas_paged as pp
from tests.support.attention_calls import STATIC
from tests.support.attention_oracle import attend, relative_error
from tests.support.page_layouts import of_heads

SCALE = 0.1


def every_option(num_q_heads, **others):
    ranges = dict(alibi_slopes=(0.01, 0.3), sinks=(-1, 2))
    per_head = {k: np.linspace(*x, num_q_heads, dtype=np.float32) for k, x in ranges.items()}
    return dict(soft_cap=3.0, sliding_window=30, **per_head) | others


@partial(jax.jit, static_argnames=(*STATIC, "interpret", "v"))
def _compiled(q, pages, *arrays, kv_layout, v, k_scales=None, **options):
    layer = pp.LayerKV(pages, k_scales=k_scales, kv_layout=kv_layout, v_head_dim=v)
    how = dict(sm_scale=SCALE, return_lse=True)
    return pp.mla_attention(q[..., :v], q[..., v:], layer, *arrays, **how, **options)


def attend_latents(arrays, *, v, kv_layout="HPND", **options):
    """(out, lse) of a call whose K pages are latents of `v` elements; with `k_scales` in HPND."""
    q, pages, _, *others = arrays
    return _compiled(q, of_heads(pages, kv_layout), *others, kv_layout=kv_layout, v=v, **options)


def expected_of(arrays, *, v, **options):
    q, pages, _, *others = arrays
    out, lse = attend(q, pages, pages, *others, sm_scale=SCALE, **options)
    return out[..., :v], lse


def assert_near(actual, expected, tolerance):
    (out, lse), (expected_out, expected_lse) = (map(np.asarray, x) for x in (actual, expected))
    empty = np.isneginf(expected_lse)
    np.testing.assert_array_equal(np.isneginf(lse), empty)
    np.testing.assert_array_equal(out[empty], 0)
    assert relative_error(out, expected_out) <= tolerance
    np.testing.assert_allclose(lse[~empty], expected_lse[~empty], rtol=1e-5, atol=1e-4)
