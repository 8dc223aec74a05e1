"""`mla_prefill`: prompts among themselves, by K and V of each head, wherever sequences begin."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pallas_paged as pp
from tests.support import raw
from tests.support.attention_calls import assert_same_bits
from tests.support.attention_oracle import attend, relative_error
from tests.support.devices import implementations_here
from tests.support.placement import collectives, mesh_2d, place

HEADS, NOPE, ROPE, VALUE = 4, 12, 4, 10
TOKENS = 70  # of each call, so that calls of as many sequences share a program
IMPLEMENTATIONS = pytest.mark.parametrize(
    "implementation", [x for x in implementations_here() if x == "xla" or x.startswith("mosaic")]
)
ROWS = [
    (0, 70, 70, 70, 70),
    (0, 33, 33, 52, 61),  # unaligned, an empty one, and padding
    (0, 16, 48, 49, 65),
    (0, 0, 0, 0, 0),
]
OPTIONS = dict(sliding_window=9, soft_cap=2.0, sinks=np.linspace(-1, 2, HEADS, dtype=np.float32))


def arrays_of(implementation="xla", padding=0, num_tokens=TOKENS):
    """q, k_nope, k_pe and v; the last `padding` tokens are NaN."""
    rng = np.random.default_rng(0)
    nope, rope, value, dtype = NOPE, ROPE, VALUE, jnp.float32
    if implementation != "xla":
        nope, rope, value, dtype = 128, 64, 128, jnp.bfloat16
    shapes = (HEADS, nope + rope), (HEADS, nope), (rope,), (HEADS, value)
    arrays = [rng.standard_normal((num_tokens, *shape)).astype(dtype) for shape in shapes]
    for x in arrays:
        x[num_tokens - padding :] = np.nan
    return arrays


def expected_of(q, k_nope, k_pe, v, offsets, **options):
    """The oracle's result, on pages of one token."""
    offsets, num_tokens = np.int32(offsets), len(q)
    k_pe = np.broadcast_to(k_pe[:, None], (num_tokens, HEADS, k_pe.shape[-1]))
    k = np.concatenate([k_nope, k_pe], axis=-1)
    pages = (x.swapaxes(0, 1)[:, :, None] for x in (k, v))
    tables = offsets[:-1, None] + np.arange(num_tokens)
    return attend(q, *pages, tables, np.diff(offsets), offsets, **options)


STATIC = ("implementation", "sliding_window", "soft_cap", "causal", "sm_scale")
prefill = jax.jit(partial(pp.mla_prefill, return_lse=True), static_argnames=STATIC)


def assert_matches(actual, arrays, offsets, **options):
    out, lse = expected_of(*arrays, offsets, **options)
    seen = np.isfinite(lse)
    np.testing.assert_array_equal(np.isneginf(actual[1]), ~seen)
    np.testing.assert_array_equal(np.asarray(actual[0])[~seen], 0)
    if seen.any():
        assert relative_error(actual[0], out) <= (5e-3 if out.shape[-1] == 128 else 1e-5)
        np.testing.assert_allclose(actual[1][seen], lse[seen], rtol=1e-4, atol=1e-3)


@IMPLEMENTATIONS
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
def test_matches_the_oracle_wherever_sequences_begin(implementation, options):
    for offsets in ROWS:
        arrays = arrays_of(implementation, padding=TOKENS - offsets[-1])
        call = partial(prefill, *arrays, np.int32(offsets), implementation=implementation)
        actual = call(**options)
        assert actual[0].shape == arrays[3].shape and actual[0].dtype == arrays[0].dtype
        assert_matches(actual, arrays, offsets, **options)
        assert_same_bits(call(**options), actual)


@IMPLEMENTATIONS
@pytest.mark.parametrize("length", [64, 1, 70])
def test_one_sequence_is_as_several(implementation, length):
    arrays = arrays_of(implementation, padding=TOKENS - length)
    actual = prefill(*arrays, np.int32([0, length]), implementation=implementation)
    assert_matches(actual, arrays, (0, length))


@pytest.mark.parametrize("num_seqs", [1, 2])
def test_long_sequences_have_larger_pages(num_seqs):
    arrays = arrays_of(num_tokens=512)
    offsets = np.int32([0, 301, 512] if num_seqs == 2 else [0, 512])
    assert_matches(prefill(*arrays, offsets), arrays, offsets)


@pytest.mark.parametrize(("num_tokens", "copies"), [(64, 0), (70, 3)])
def test_one_sequence_of_full_pages_is_not_copied(num_tokens, copies):
    arrays = arrays_of(num_tokens=num_tokens)
    lowered = jax.jit(pp.mla_prefill).lower(*arrays, np.int32([0, num_tokens]))
    assert len(re.findall(r"= f32\S* pad\(", lowered.compile().as_text())) == copies


@IMPLEMENTATIONS
def test_sequences_from_num_seqs_on_may_hold_anything(implementation):
    arrays = arrays_of(implementation, padding=TOKENS - 33)
    call = partial(prefill, num_seqs=np.int32(2), implementation=implementation)
    actual = call(*arrays, np.int32([0, 16, 33, 2_000_000, -7]))
    assert_matches(actual, arrays, (0, 16, 33, 33, 33))


def test_queries_may_see_all_tokens_of_their_sequence():
    arrays = arrays_of()
    actual = prefill(*arrays, np.int32(ROWS[2]), causal=False, sm_scale=0.3)
    assert_matches(actual, arrays, ROWS[2], causal=False, sm_scale=0.3)


def test_gradient_is_that_of_dense_attention():
    arrays = arrays_of(num_tokens=40)
    offsets = (0, 23, 40)

    def dense(q, k_nope, k_pe, v):
        k_pe = jnp.broadcast_to(k_pe[:, None], (len(q), HEADS, ROPE))
        k = jnp.concatenate([k_nope, k_pe], axis=-1)
        logits = jnp.einsum("qhd,khd->hqk", q, k, precision="highest") * (NOPE + ROPE) ** -0.5
        row = jnp.searchsorted(jnp.int32(offsets[1:]), jnp.arange(40), side="right")
        seen = jnp.tri(40, dtype=bool) & (row[:, None] == row[None])
        weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
        return jnp.sin(jnp.einsum("hqk,khd->qhd", weights, v, precision="highest")).sum()

    def paged(*arrays):
        return jnp.sin(pp.mla_prefill(*arrays, np.int32(offsets))).sum()

    found, wanted = (jax.jit(jax.grad(f, (0, 1, 2, 3)))(*arrays) for f in (paged, dense))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_each_device_attends_with_its_own_heads(kind):
    names = ("q", "k_nope", "k_pe", "v")
    arrays, on = arrays_of(), mesh_2d(2, names=("tensor",), kind=kind)
    call = dict(zip(names, arrays, strict=True), cu_q_lens=np.int32(ROWS[2]))
    call = place(call, on, {name: P(None, "tensor") for name in ("q", "k_nope", "v")})
    compiled = jax.jit(partial(pp.mla_prefill, return_lse=True)).lower(**call).compile()
    assert collectives(compiled) == []
    results = compiled(**call)
    assert [tuple(x.sharding.spec)[:2] for x in results] == [(None, "tensor")] * 2
    assert_matches(jax.tree.map(np.asarray, results), arrays, ROWS[2])


GOOD = dict(
    zip(("q", "k_nope", "k_pe", "v"), arrays_of(), strict=True), cu_q_lens=np.int32([0, 70])
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": GOOD["q"][0]}, r"q float32\[4, 16\] must be \[T, num_heads, head_dim\]"),
        ({"k_nope": GOOD["q"]}, r"one dtype and without a 0, got k_nope float32\[70, 4, 16\]"),
        ({"k_pe": GOOD["q"]}, r"k_pe \[T, rope_dim\].* k_pe float32\[70, 4, 16\]"),
        ({"k_pe": GOOD["k_pe"][:5]}, r"k_pe float32\[5, 4\]"),
        ({"v": GOOD["v"][:, :2]}, r"v float32\[70, 2, 10\]"),
        ({"v": GOOD["v"].astype(np.float16)}, r"of one dtype .* v float16\[70, 4, 10\]"),
        ({"v": np.zeros((TOKENS, HEADS, 17), np.float32)}, "head_dim=17 of v_pages must be from 1"),
        ({"v": None}, "^v=None must be an array"),
        ({"v": np.float64(GOOD["v"])}, r"of one dtype .* v float64\[70, 4, 10\]"),
        ({x: np.float64(GOOD[x]) for x in ("q", "k_nope", "k_pe", "v")}, "q.dtype=float64 must be"),
        ({"cu_q_lens": np.int32(70)}, r"cu_q_lens.shape=\(\) must be \(2,\)"),
        ({"cu_q_lens": np.int64([0, 70])}, "cu_q_lens.dtype=int64 must be int32"),
        ({"return_lse": 1}, "return_lse"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        pp.mla_prefill(**GOOD | changes)


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match=r"mla_prefill.* did you mean 'sm_scale'"):
        pp.mla_prefill(**GOOD, softmax_scale=1.0)


def test_a_family_without_two_head_dims_is_refused_by_name(any_jax):
    with pytest.raises(NotImplementedError, match="'triton' needs K and V of one head_dim, not"):
        pp.mla_prefill(**GOOD, **raw.by("triton_interpret"))
