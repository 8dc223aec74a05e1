"""Jitted calls of the attention functions, and checks of their results."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tests.support import raw
from tests.support.attention_oracle import attend, relative_error

STATIC = (
    "sm_scale", "soft_cap", "sliding_window", "implementation", "config", "fixed_split_size",
    "causal", "kv_layout",
)  # fmt: skip
NUM_ARRAYS = {raw.paged_attention: 5, raw.ragged_paged_attention: 6, raw.cascade_attention: 7}


def with_lse(attention, *arrays, **options):
    """(out, lse) of an entry; scales may follow the arrays."""
    count = NUM_ARRAYS.get(attention, 5 + (len(arrays) - 5) % 2)  # mla_attention's cu_q_lens
    scales = dict(zip(("k_scales", "v_scales"), arrays[count:], strict=False))
    return attention(*arrays[:count], return_lse=True, **scales, **options)


def jitted(attention, compiler_options=None):
    """An attention function that returns (out, lse), jitted with its static arguments."""
    function = partial(with_lse, attention)
    return jax.jit(function, static_argnames=STATIC, compiler_options=compiler_options)


decode = jitted(raw.paged_attention)
ragged = jitted(raw.ragged_paged_attention)
cascade = jitted(raw.cascade_attention)
mla = jitted(raw.mla_attention)


def assert_close(actual, arrays, tolerance, *, name="", **options):
    """(out, lse) of a call are near the oracle's, and exact for queries without keys.

    The tolerance is that of out, relative to its norm; the name is for messages.
    """
    out, lse = actual
    assert out.dtype == arrays[0].dtype and lse.dtype == jnp.float32
    assert_near(actual, attend(*arrays, **options), tolerance, name)


def assert_near(actual, expected, tolerance, name=""):
    """As `assert_close`, of expected (out, lse)."""
    (out, lse), (expected_out, expected_lse) = (map(np.asarray, x) for x in (actual, expected))
    empty = np.isneginf(expected_lse)
    np.testing.assert_array_equal(np.isneginf(lse), empty, err_msg=name)
    np.testing.assert_array_equal(out[empty], 0, err_msg=name)
    if not empty.all():
        assert relative_error(out, expected_out) <= tolerance, name
    lse, expected_lse = lse[~empty], expected_lse[~empty]
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-4, err_msg=name)


def assert_same_bits(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def options_with_every_mask(num_q_heads, **others):
    """Options of a call, among them slopes and sinks of these heads."""
    ranges = dict(alibi_slopes=(0.01, 0.3), sinks=(-1, 2))
    per_head = {k: np.linspace(*x, num_q_heads, dtype=np.float32) for k, x in ranges.items()}
    return dict(soft_cap=3.0, **per_head) | others


def name_of(value):
    """The id of a parameter: a case, or options."""
    if not isinstance(value, dict):
        return str(value)
    return "-".join(k if np.ndim(x) else f"{k}={x}" for k, x in value.items()) or "plain"
