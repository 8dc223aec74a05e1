"""The Mosaic GPU kernels of the backward pass: interpreted, and lowered for a Hopper GPU."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_paged.kernels import xla
from pallas_paged.kernels.backward import attention_gradient
from pallas_paged.kernels.call import Arrays, Device
from pallas_paged.kernels.kv_layout import LAYOUTS
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.mosaic import support as mosaic_support
from tests.support import without_triton
from tests.support.attention_calls import assert_same_bits
from tests.support.attention_cases import mosaic_case
from tests.support.attention_oracle import relative_error
from tests.support.devices import lower_for_cuda
from tests.support.lowering import few_with_every_level, named, pairwise
from tests.support.marks import needs_triton, slow

if reason := mosaic_support.why_not_jax():
    pytest.skip(reason, allow_module_level=True)

from pallas_paged.kernels.mosaic import backward

# The interpreter multiplies the poisoned values too.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")

# Compiled where a Hopper GPU is, else interpreted.
INTERPRET = mosaic_support.why_not_device(Device.here()) is not None
NAMES = ("q", "k_pages", "v_pages")
FIELDS = (*NAMES, "block_tables", "seq_lens", "cu_q_lens")
CASE = mosaic_case(
    num_q_heads=2, num_kv_heads=1, seq_lens=(150, 0, 200, 1), q_lens=(100, 1, 70, 0),
    num_tokens=175, pages_per_seq=16,
)  # fmt: skip
SHARED = dataclasses.replace(CASE, page_size=128, pages_per_seq=2, num_q_heads=3)


def arrays_of(case, shared):
    arrays = Arrays(**dict(zip(FIELDS, map(jnp.asarray, case.make()), strict=True)))
    if shared:  # with a row that owns some of its tokens
        tables = arrays.block_tables.at[0, :2].set(arrays.block_tables[2, :2])
        arrays = dataclasses.replace(arrays, block_tables=tables)
    return arrays


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
    arrays = arrays_of(case, shared)
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
        return attention_gradient(arrays, *given, names=NAMES, kernels=kernels)

    compiled = jax.jit(gradient)
    found = compiled(out, lse, d_out, d_lse)
    if not INTERPRET:  # which takes long
        assert_same_bits(found.values(), compiled(out, lse, d_out, d_lse).values())
    for name in NAMES:
        assert relative_error(found[name], np.asarray(wanted[name], np.float64)) < 5e-3, name
    unread = np.asarray(wanted["k_pages"]) == 0
    np.testing.assert_array_equal(np.asarray(found["k_pages"], np.float32)[unread], 0)


@pytest.mark.slow
def test_keys_left_of_the_window_are_not_read():
    case = dataclasses.replace(CASE, seq_lens=(190,), q_lens=(40,), num_tokens=40)
    arrays = arrays_of(case, shared=False)
    k, v, tables = (np.array(x) for x in (arrays.k_pages, arrays.v_pages, arrays.block_tables))
    left = np.arange(190 - 40 - 30 + 1)
    pages, places = tables[0, left // 16], left % 16
    k[:, pages, places] = v[:, pages, places] = np.nan
    tables[0, : len(left) // 16] = np.iinfo(np.int32).max
    others = dict(k_pages=k, v_pages=v, block_tables=tables)
    others = dataclasses.replace(arrays, **{name: jnp.asarray(x) for name, x in others.items()})
    options = LogitOptions(sm_scale=0.125, sliding_window=30)
    q = arrays.q

    @jax.jit
    def gradient(arrays):
        out, lse = xla.ragged_paged_attention(arrays, options=options)
        kernels = partial(backward.gradients, options=options, interpret=INTERPRET)
        return attention_gradient(arrays, out, lse, q, None, names=NAMES, kernels=kernels)

    expected, found = gradient(arrays), gradient(others)
    assert_same_bits([found["q"]], [expected["q"]])
    seen = np.setdiff1d(np.asarray(arrays.block_tables)[0, :12], pages[: len(left) // 16 * 16])
    for name in ("k_pages", "v_pages"):
        assert_same_bits([found[name][:, seen]], [expected[name][:, seen]])


@needs_triton
@pytest.mark.parametrize("kv_layout", ["HPND", "NH2D"])
def test_xla_sums_the_readers_of_a_page_as_the_triton_kernel_does(kv_layout):
    from pallas_paged.kernels.triton import backward_pages as triton

    layout, head_dim, longest = LAYOUTS[kv_layout], 8, 256
    rng = np.random.default_rng(2)
    shape = layout.full_shape(layout.shape(H=2, P=9, N=16, D=head_dim))
    pages = jnp.zeros(shape, jnp.bfloat16)
    arrays = Arrays(
        q=jnp.zeros((40, 4, head_dim), jnp.bfloat16),
        k_pages=pages,
        v_pages=None if layout.one_array else pages,
        block_tables=jnp.asarray(rng.integers(0, 9, (3, longest // 16)), jnp.int32),
        seq_lens=jnp.int32([100, 0, longest]),
        cu_q_lens=jnp.int32([0, 20, 20, 40]),
        kv_layout=kv_layout,
    )
    of_keys = tuple(
        jnp.asarray(rng.standard_normal((2, 3 * longest, head_dim)), jnp.float32) for _ in range(2)
    )
    options = LogitOptions(sm_scale=1.0)
    by_triton = triton.add_readers(arrays, of_keys, options=options, interpret=INTERPRET)
    assert_same_bits(backward._add_readers(arrays, of_keys, options), by_triton)


LOWERED = pairwise(
    head_dim=(64, 128),
    group=(1, 3, 4),
    page_size=(8, 16, 256),
    dtype=("bfloat16", "float16"),
    kv_layout=("HPND", "NH2D"),
    causal=(True, False),
    sliding_window=(None, 100),
    soft_cap=(None, 30.0),
)


@pytest.mark.parametrize("row", few_with_every_level(LOWERED), ids=named)
def test_lowers_for_cuda(row):
    head_dim, layout = row["head_dim"], LAYOUTS[row["kv_layout"]]

    def shape(*sizes, dtype=row["dtype"]):
        return jax.ShapeDtypeStruct(sizes, dtype)

    q = shape(500, 2 * row["group"], head_dim)
    rows = shape(*q.shape[:2], dtype=jnp.float32)
    pages = layout.full_shape(layout.shape(H=2, P=99, N=row["page_size"], D=head_dim))
    pages = shape(*pages)
    call = Arrays(
        q=q,
        k_pages=pages,
        v_pages=None if layout.one_array else pages,
        kv_layout=row["kv_layout"],
        block_tables=shape(3, 40, dtype=jnp.int32),
        seq_lens=shape(3, dtype=jnp.int32),
        cu_q_lens=shape(4, dtype=jnp.int32),
    )

    def gradient(call, out, lse, d_out):
        names = ("causal", "sliding_window", "soft_cap")
        options = LogitOptions(sm_scale=0.1, **{name: row[name] for name in names})
        kernels = partial(backward.gradients, options=options, interpret=False)
        return attention_gradient(call, out, lse, d_out, None, names=NAMES, kernels=kernels)

    text = lower_for_cuda(gradient, call, q, rows, q).as_text()
    kernels = ["queries", "keys", *([] if without_triton.is_hidden() else ["pages"])]
    assert all(f"attention_gradient_of_{kernel}" in text for kernel in kernels)
