"""Values at the edges of their types, where sums and positions could wrap, underflow or be NaN."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from tests.support.attention_calls import assert_close, assert_same_bits, decode, ragged
from tests.support.attention_cases import Case
from tests.support.marks import slow

CASE = Case(head_dim=16)


@pytest.mark.parametrize("window", [2**40, *slow([2**31 - 1, 2**31])])
def test_a_window_of_any_size_sees_all_keys(window, implementation):
    case = dataclasses.replace(CASE, seq_lens=(3, 9), q_lens=(8, 9), pages_per_seq=2)
    case = case.on(implementation)
    arrays = case.make()
    plain = ragged(*arrays, implementation=implementation)
    actual = ragged(*arrays, sliding_window=window, implementation=implementation)
    assert_close(actual, arrays, case.tolerance)
    np.testing.assert_array_equal(np.isneginf(actual[1]), np.isneginf(plain[1]))


@pytest.mark.parametrize("sink", [0.0, 14.0])
def test_a_sink_far_above_the_logits_leaves_f16_its_precision(sink, implementation):
    case = dataclasses.replace(CASE, seq_lens=(64, 60), dtype="float16").on(implementation)
    q, k_pages, v_pages, *rest = case.make()
    # Large values, so that the output itself is not too small for f16.
    arrays = (q * np.float16(0.1), k_pages, v_pages * np.float16(256), *rest)
    sinks = np.full(case.num_q_heads, sink, np.float32)
    actual = decode(*arrays, sinks=sinks, implementation=implementation)
    assert_close(actual, arrays, case.tolerance, sinks=sinks)


@pytest.mark.parametrize("attention", [decode, ragged], ids=["decode", "ragged"])
@pytest.mark.parametrize("sinks", [-np.inf, -1e30, 1e30])
def test_extreme_sinks(sinks, attention, implementation):
    q_lens = None if attention is decode else (2, 1, 3)
    case = dataclasses.replace(CASE, seq_lens=(37, 0, 64), q_lens=q_lens).on(implementation)
    arrays = case.make()
    out, lse = attention(
        *arrays,
        sinks=np.full(case.num_q_heads, sinks, np.float32),
        implementation=implementation,
    )
    plain = attention(*arrays, implementation=implementation)
    by_xla = implementation == "xla" or implementation.endswith("_interpret")
    if sinks < 0 and by_xla:  # it may fuse the two programs differently
        np.testing.assert_allclose(out, plain[0], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(lse, plain[1], rtol=1e-6)
    elif sinks < 0:
        assert_same_bits((out, lse), plain)
    else:
        np.testing.assert_array_equal(out, 0)
        is_empty = np.isneginf(plain[1])
        assert is_empty.any() and not is_empty.all()
        np.testing.assert_allclose(lse, np.where(is_empty, -np.inf, sinks), rtol=1e-6)


def test_gradients_of_rows_without_keys_are_finite():
    q, *rest = dataclasses.replace(CASE, seq_lens=(5, 0, 9)).make(poison=False)

    def loss(q, sinks):
        out, lse = pp.paged_attention(q, *rest, sinks=sinks, return_lse=True, implementation="xla")
        return out.sum() + jnp.where(jnp.isneginf(lse), 0.0, lse).sum()

    grads = jax.jit(jax.grad(loss, argnums=(0, 1)))(q, jnp.float32([100.0, -100.0, 0.0, 1.0]))
    assert all(jnp.isfinite(g).all() for g in grads)

    def merged(lses):
        _, lse = pp.merge_attention_states(jnp.ones((2, 3, 4)), lses)
        return jnp.where(jnp.isneginf(lse), 0.0, lse).sum()

    lses = jnp.array([[0.0, -jnp.inf, -jnp.inf], [1.0, 2.0, -jnp.inf]])
    assert jnp.isfinite(jax.jit(jax.grad(merged))(lses)).all()


@pytest.mark.parametrize("name", ["sm_scale", "soft_cap"])
@pytest.mark.parametrize("value", [1e39, 10**400, np.complex64(1)])
def test_numbers_beyond_f32_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}=.* must be"):
        pp.paged_attention(*CASE.make(), **{name: value})
