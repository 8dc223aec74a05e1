"""The Mosaic GPU kernels of the backward pass, interpreted where no Hopper GPU is."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_paged.kernels import xla
from pallas_paged.kernels.backward import attention_gradient
from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.device import Device
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.mosaic import support as mosaic_support
from pallas_paged.kernels.mosaic_sm90 import support as sm90_support
from pallas_paged.kernels.triton.family import TRITON
from pallas_paged.pages.layout import LAYOUTS
from tests.support.attention_calls import assert_same_bits
from tests.support.attention_cases import mosaic_case, without_tokens_left_of
from tests.support.attention_oracle import relative_error
from tests.support.marks import needs_triton, slow

if reason := mosaic_support.why_not_jax():
    pytest.skip(reason, allow_module_level=True)

from pallas_paged.kernels.mosaic_sm90 import backward, backward_keys

# The interpreter multiplies the poisoned values too.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")

# Compiled where a Hopper GPU is, else interpreted.
INTERPRET = sm90_support.why_not_device(Device.here()) is not None
NAMES = ("q", "k_pages", "v_pages")
FIELDS = (*NAMES, "block_tables", "seq_lens", "cu_q_lens")
CASE = mosaic_case(
    num_q_heads=2, num_kv_heads=1, seq_lens=(150, 0, 200, 1), q_lens=(100, 1, 70, 0),
    num_tokens=175, pages_per_seq=16,
)  # fmt: skip
SHARED = dataclasses.replace(CASE, page_size=128, pages_per_seq=2, num_q_heads=3)


def arrays_of(made):
    return Arrays(**dict(zip(FIELDS, map(jnp.asarray, made), strict=True)))


@pytest.mark.parametrize(
    ("case", "options", "shared"),
    [
        (CASE, dict(sliding_window=40, soft_cap=2.0), False),
        *slow(
            [
                (SHARED, dict(causal=False), True),
                (dataclasses.replace(CASE, head_dim=128, num_kv_heads=2, num_q_heads=8), {}, False),
                (dataclasses.replace(CASE, page_size=256, pages_per_seq=1), {}, False),
            ]
        ),
    ],
    ids=["window, cap", "shared pages, not causal", "head_dim 128", "pages of 256"],
)
def test_equals_the_gradient_of_xla(case, options, shared):
    made = case.make()
    if shared:  # with a row that owns some of its tokens
        made[3][0, :2] = made[3][2, :2]
    arrays = hidden = arrays_of(made)
    if window := options.get("sliding_window"):  # pages left of it are not read
        hidden = arrays_of(without_tokens_left_of(window, made, case.page_size, entry=2**31 - 1))
    options = LogitOptions(sm_scale=0.125, **options)
    exact = {name: getattr(arrays, name).astype(jnp.float32) for name in NAMES}

    @jax.jit
    def forward(given):
        call = dataclasses.replace(arrays, **given)
        return xla.ragged_paged_attention(call, options=options)

    (out, lse), of_xla = jax.vjp(forward, exact)
    rng = np.random.default_rng(1)
    d_out = jnp.asarray(rng.standard_normal(out.shape), arrays.q.dtype)
    d_lse = jnp.where(jnp.isneginf(lse), 0.0, rng.standard_normal(lse.shape).astype(np.float32))
    (wanted,) = of_xla((d_out.astype(jnp.float32), d_lse))

    def gradient(*given):
        kernels = partial(backward.gradients, options=options, interpret=INTERPRET)
        return attention_gradient(hidden, *given, names=NAMES, kernels=kernels)

    compiled = jax.jit(gradient)
    found = compiled(out, lse, d_out, d_lse)
    if not INTERPRET:  # which takes long
        assert_same_bits(found.values(), compiled(out, lse, d_out, d_lse).values())
    for name in NAMES:
        assert relative_error(found[name], np.asarray(wanted[name], np.float64)) < 5e-3, name
    unread = np.asarray(wanted["k_pages"]) == 0
    np.testing.assert_array_equal(np.asarray(found["k_pages"], np.float32)[unread], 0)


@needs_triton
@pytest.mark.parametrize("kv_layout", ["HPND", "NH2D"])
def test_xla_sums_the_readers_of_a_page_as_the_triton_kernel_does(kv_layout, monkeypatch):
    layout, longest = LAYOUTS[kv_layout], 256
    rng = np.random.default_rng(2)
    shape = layout.full_shape(layout.shape(H=2, P=9, N=16, D=64))
    pages = jnp.zeros(shape, jnp.bfloat16)
    arrays = Arrays(
        q=jnp.zeros((40, 4, 64), jnp.bfloat16),
        k_pages=pages,
        v_pages=None if layout.one_array else pages,
        block_tables=jnp.asarray(rng.integers(0, 9, (3, longest // 16)), jnp.int32),
        seq_lens=jnp.int32([100, 0, longest]),
        cu_q_lens=jnp.int32([0, 20, 20, 40]),
        kv_layout=kv_layout,
    )
    of_keys = tuple(jnp.float32(rng.standard_normal((2, 2, 3 * longest, 64))))
    monkeypatch.setattr(backward_keys, "keys_gradient", lambda *_, **__: of_keys)
    options = LogitOptions(sm_scale=1.0)

    def sums():
        of_rows = jnp.zeros(arrays.q.shape[:2])
        given = arrays, arrays.q, of_rows, of_rows, ("k_pages", "v_pages")
        kernels = partial(backward.gradients, options=options, interpret=INTERPRET)
        return jax.jit(lambda: kernels(*given))().values()

    by_triton = sums()
    monkeypatch.setattr(TRITON, "why_not_jax", lambda: "there is no Triton")
    assert_same_bits(sums(), by_triton)
