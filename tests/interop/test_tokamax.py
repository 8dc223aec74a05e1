"""tokamax's reference against ours, on shapes of tokamax's own test cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.attention_oracle import relative_error

api = pytest.importorskip("tokamax._src.ops.batched_rpa.api")

from pallas_paged.interop.tokamax import ragged_paged_attention  # noqa: E402

ROWS = {"chunks": ([8, 8], [0, 2, 4], 4), "decode and prefill": ([8, 4], [0, 1, 5], 5)}
ROWS["padding"] = [16, 9], [0, 3, 5], 8
OPTIONS = {
    "plain": {},
    "scale": dict(sm_scale=0.125),
    "window and cap": dict(sliding_window=3, soft_cap=2.0),
    "not causal": dict(use_causal_mask=False),
    "no update": dict(skip_kv_update=True),
    "scales of 1": dict(q_scale=1.0, k_scale=1.0, v_scale=1.0, decode_query_size=2),
}


def arguments(rows, dtype):
    lens, offsets, tokens = ROWS[rows]
    keys = jax.random.split(jax.random.key(0), 4)
    heads = zip(keys, (4, 2, 2), strict=False)
    q, k, v = (jax.random.normal(key, (tokens, n, 64), dtype) for key, n in heads)
    cache = jnp.pad(jax.random.normal(keys[3], (8, 8, 4, 64), dtype), ((0, 0),) * 3 + ((0, 64),))
    integers = (lens, [0, 1, 2, 3], offsets, [1, 2, 2])
    return q, k, v, cache, *(jnp.array(x, jnp.int32) for x in integers)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("rows", ROWS)
def test_equals_the_reference(rows, options):
    for dtype, tolerance in ((jnp.float32, 1e-6), (jnp.bfloat16, 1e-2)):
        arrays = arguments(rows, dtype)
        options = options | dict(return_lse=True)
        theirs = api.ragged_paged_attention(*arrays, **options, implementation="reference")
        ours = ragged_paged_attention(*arrays, **options)
        assert relative_error(ours[0], np.float64(theirs[0])) < tolerance
        np.testing.assert_array_equal(ours[1], theirs[1])
        finite = np.isfinite(theirs[2])
        np.testing.assert_array_equal(np.isfinite(ours[2]), finite)
        assert relative_error(ours[2][finite], np.float64(theirs[2][finite])) < tolerance


def test_keywords_are_those_of_tokamax_but_for_groups():
    """Every keyword of theirs is accepted with its default."""
    import inspect

    parameters = inspect.signature(api.ragged_paged_attention).parameters.values()
    defaults = {x.name: x.default for x in parameters if x.default is not x.empty}
    ragged_paged_attention(*arguments("chunks", jnp.float32), **defaults)
    with pytest.raises(ValueError, match="cp_group_size=2 must be None"):
        ragged_paged_attention(*arguments("chunks", jnp.float32), cp_group_size=2)
