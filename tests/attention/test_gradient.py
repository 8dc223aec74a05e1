"""Gradients of attention: right, the same bits in every run, or refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from tests.support.attention_calls import assert_same_bits
from tests.support.attention_cases import Case, SharedPrefixes, cumulated, mosaic_case
from tests.support.attention_oracle import attend
from tests.support.devices import implementations_here
from tests.support.marks import slow
from tests.support.page_layouts import OTHERS, in_layout
from tests.support.quantized_cases import Quantized

CALLS = {
    "decode": (pp.paged_attention, Case(head_dim=8, seq_lens=(9, 0, 5, 1))),
    "ragged": (
        pp.ragged_paged_attention,
        Case(head_dim=8, seq_lens=(9, 0, 5, 1), q_lens=(4, 1, 7, 0), num_tokens=14),
    ),
    "cascade": (
        pp.cascade_attention,
        SharedPrefixes(
            case=Case(head_dim=8), seq_lens=(19, 0, 17, 1), prefix_lens=(16,), cu_group_sizes=(0, 3)
        ),
    ),
}
OPTIONS = dict(soft_cap=2.0, sliding_window=6)
PER_HEAD = (np.float32([0.5, 0.25, 0.1, 0.0]), np.float32([1.0, -1.0, 0.0, 2.0]))
TREE = np.random.default_rng(7).random((4, 5, 5)) < 0.5
RAGGED = Case(head_dim=8, seq_lens=(9, 0, 37, 30), q_lens=(4, 1, 37, 7), pages_per_seq=6)


@pytest.fixture
def kernels():
    """The kernels of Triton, interpreted without a GPU."""
    found = [name for name in implementations_here() if name.startswith("triton")]
    return found[0] if found else pytest.skip("Triton is hidden")


@pytest.fixture(params=["triton", "mosaic_gpu"])
def family(request):
    """The kernels of each family that runs here."""
    names = [name for name in implementations_here() if name.startswith(request.param)]
    if not names:
        pytest.skip(f"{request.param} is not interpreted here")
    return names[0]


def total(out, lse, xp):
    """A loss of both results."""
    finite = xp.isfinite(lse)
    return xp.sin(out).sum() + xp.where(finite, xp.sin(xp.where(finite, lse, 0.0)), 0.0).sum()


def gradients_of_two_runs(function, arrays, per_head=None, implementation="xla", **options):
    """Gradients in q, the pages and, if they are given, the slopes and sinks, of two runs."""
    q, k_pages, v_pages, *rest = (x if x is None else jnp.asarray(x) for x in arrays)

    @jax.jit
    def loss(differentiated):
        of_heads = dict(zip(("alibi_slopes", "sinks"), differentiated[3:], strict=False))
        out, lse = function(
            *differentiated[:3], *rest, **of_heads, **options, return_lse=True,
            implementation=implementation,
        )  # fmt: skip
        return total(out.astype(jnp.float32), lse, jnp)

    at = (q, k_pages, v_pages, *(per_head or ()))
    compiled = jax.jit(jax.grad(loss)).lower(at).compile()
    return compiled(at), compiled(at)


def gradient_of(*args, **kwargs):
    """Gradients of one run."""
    return gradients_of_two_runs(*args, **kwargs)[0]


def assert_near(actual, expected, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max(), rtol=tolerance)


def seen(pages):
    """The slots of the pages that rows own: the others hold NaN or infinities."""
    return np.isfinite(pages).all(axis=-1, keepdims=True)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("options", [OPTIONS, *slow([{}])], ids=["options", "plain"])
def test_equals_finite_differences_in_float64(implementation, name, options):
    """The pool is poisoned: data that no row owns has a gradient of 0 and changes no other."""
    function, case = CALLS[name]
    q, k_pages, v_pages, *rest = (np.asarray(x) for x in case.make())
    per_head = PER_HEAD if options else ()
    gradients = gradient_of(
        function, (q, k_pages, v_pages, *rest), per_head, implementation, **options
    )

    def oracle(q, k_pages, v_pages, *per_head):
        extra = dict(zip(("alibi_slopes", "sinks"), per_head, strict=False))
        tables, lens, *offsets = rest[:3] if name == "ragged" else rest[:2]
        out, lse = attend(q, k_pages, v_pages, tables, lens, *offsets, **options, **extra)
        return total(out, lse, np)

    at = [np.asarray(x, np.float64) for x in (q, k_pages, v_pages, *per_head)]
    rng = np.random.default_rng(0)
    for i, gradient in enumerate(gradients):
        gradient = np.asarray(gradient, np.float64)
        if i in (1, 2):
            np.testing.assert_array_equal(gradient[~np.broadcast_to(seen(at[i]), at[i].shape)], 0)
        step = 1e-5 * rng.standard_normal(gradient.shape)
        ahead, behind = (oracle(*at[:i], at[i] + s * step, *at[i + 1 :]) for s in (1, -1))
        expected = (ahead - behind) / 2
        np.testing.assert_allclose(np.vdot(gradient, step), expected, rtol=1e-3, atol=1e-9)


def test_a_prompt_in_bf16_has_the_gradient_of_xla(family):
    case = mosaic_case(
        num_q_heads=2, num_kv_heads=1, seq_lens=(150,), q_lens=(140,), num_tokens=144,
        pages_per_seq=10,
    )  # fmt: skip
    arrays = [jnp.asarray(x) for x in case.make()]
    exact = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in arrays]
    call = partial(pp.ragged_paged_attention, sliding_window=70)
    first, second = gradients_of_two_runs(call, arrays, implementation=family)
    assert_same_bits(first, second)
    assert_near(first, gradient_of(call, exact), 2e-2)


def of_pages_that_rows_share():
    """The first row owns some of the tokens of a page of the third, at another place of its own."""
    q, k_pages, v_pages, tables, lens, offsets = RAGGED.make()
    tables = tables.copy()
    tables[0, :2] = tables[2, [1, 0]]
    return q, k_pages, v_pages, tables, lens, offsets


VARIANTS = {
    "window": (RAGGED.make(), dict(sliding_window=6)),
    "cap": (RAGGED.make(), dict(soft_cap=1.5, sm_scale=-0.7)),
    "tree, head_dim 24": (
        replace(RAGGED, head_dim=24).make(),
        dict(tree_mask=TREE, sliding_window=9),
    ),
    "shared pages, not causal": (
        of_pages_that_rows_share(),
        dict(causal=False, sliding_window=5),
    ),
    "pages of 2": (replace(RAGGED, page_size=2, pages_per_seq=20, num_q_heads=6).make(), {}),
    "pages of 64": (replace(RAGGED, page_size=64, pages_per_seq=2, num_kv_heads=4).make(), {}),
}


QUICK = ("tree, head_dim 24", "shared pages, not causal")


@pytest.mark.parametrize("variant", [*QUICK, *slow(x for x in VARIANTS if x not in QUICK)])
def test_kernels_agree_with_xla_and_repeat_their_bits(kernels, variant):
    arrays, options = VARIANTS[variant]
    call = partial(gradients_of_two_runs, pp.ragged_paged_attention, arrays, **options)
    got, again = call(implementation=kernels)
    assert_same_bits(got, again)
    assert_near(got, call(implementation="xla")[0])


@pytest.mark.parametrize("dtype", ["bfloat16", *slow(["float16"])])
def test_kernels_agree_with_xla_in_16_bits(kernels, dtype):
    arrays = replace(RAGGED, dtype=dtype).make()
    got = gradient_of(pp.ragged_paged_attention, arrays, implementation=kernels)
    assert [x.dtype for x in got] == [dtype] * 3
    arrays = [x.astype(np.float32) for x in arrays[:3]] + list(arrays[3:])
    assert_near(got, gradient_of(pp.ragged_paged_attention, arrays), 2e-2)


@pytest.mark.parametrize("kv_layout", ["NH2D", *slow(x for x in OTHERS if x != "NH2D")])
def test_pages_of_any_layout(kernels, kv_layout):
    q, k_pages, v_pages, *rest = RAGGED.make()
    wanted = gradient_of(pp.ragged_paged_attention, (q, k_pages, v_pages, *rest))
    d_q, *d_pages = gradient_of(
        pp.ragged_paged_attention,
        (q, *in_layout(kv_layout, k_pages, v_pages), *rest),
        implementation=kernels,
        kv_layout=kv_layout,
    )
    assert_near(d_q, wanted[0])
    assert_near(d_pages, in_layout(kv_layout, *wanted[1:]))


@pytest.mark.parametrize("name", ["decode", "ragged"])
def test_the_forward_pass_has_the_same_bits(family, name):
    function, case = CALLS[name]
    q, *rest = (jnp.asarray(x) for x in case.on(family).make())
    call = partial(function, implementation=family, fixed_split_size=64)
    alone = jax.jit(call)(q, *rest)
    trained = jax.jit(lambda q, *rest: jax.vjp(lambda q: call(q, *rest), q)[0])(q, *rest)
    assert_same_bits([alone], [trained])


def test_log_probabilities_of_a_rollout_have_the_bits_of_training(family):
    """A token's query comes alone beside another row, or with all others under a gradient."""
    length, fixed_split_size = 70, 128  # several tiles of queries; no row is split
    case = Case(
        head_dim=16, seq_lens=(length, 30), q_lens=(length, 3), pages_per_seq=16, num_tokens=80
    ).on(family)
    q, k_pages, v_pages, tables, _, _ = (jnp.asarray(x) for x in case.make())
    size = q.shape[1] * q.shape[2]
    to_logits = np.random.default_rng(0).standard_normal((size, 7)).astype(np.float32)

    @jax.jit
    def log_probabilities(out):  # of one token: products of several may be rounded in another way
        return jax.nn.log_softmax(out.reshape(-1).astype(jnp.float32) @ to_logits)

    call = partial(
        pp.ragged_paged_attention, implementation=family, fixed_split_size=fixed_split_size
    )

    @jax.jit
    def train(q):
        lens, offsets = jnp.array([length]), jnp.array([0, length])
        return jax.vjp(lambda q: call(q, k_pages, v_pages, tables[:1], lens, offsets), q)[0]

    trained, rollout = train(q[:length]), jax.jit(call)
    for token in (0, 1, 31, 33, 64, 69):
        queries = jnp.concatenate([q[token : token + 1], q[length : length + 3]])
        lens = np.int32([token + 1, 30])
        out = rollout(queries, k_pages, v_pages, tables, lens, cumulated((1, 3)))
        assert_same_bits([out[0]], [trained[token]])
        assert_same_bits([log_probabilities(out[0])], [log_probabilities(trained[token])])


@pytest.mark.parametrize("kv_dtype", ["int8", *slow(["float8_e4m3fn"])])
class TestOneBytePages:
    def test_have_a_gradient_in_q_and_sinks(self, kernels, kv_dtype):
        stored, meant = Quantized(case=RAGGED, kv_dtype=kv_dtype).make()

        def gradient(implementation, arrays):
            q, k_pages, v_pages, *rest = (jnp.asarray(x) for x in arrays)
            scales = dict(zip(("k_scales", "v_scales"), rest[3:], strict=False))

            def loss(q, sinks):
                out, lse = pp.ragged_paged_attention(
                    q, k_pages, v_pages, *rest[:3], **scales, sinks=sinks, return_lse=True,
                    implementation=implementation,
                )  # fmt: skip
                return total(out, lse, jnp)

            return jax.jit(jax.grad(loss, argnums=(0, 1)))(q, PER_HEAD[1])

        assert_near(gradient(kernels, stored), gradient("xla", meant), 1e-4)

    def test_have_none_of_their_own(self, kernels, kv_dtype):
        stored, _ = Quantized(case=RAGGED, kv_dtype=kv_dtype).make()
        q, k_pages, v_pages, tables, lens, offsets, *scales = stored
        name = "k_pages" if kv_dtype == "float8_e4m3fn" else "k_scales"

        def loss(x):
            given = dict(k_pages=k_pages, k_scales=scales[0]) | {name: x}
            return pp.ragged_paged_attention(
                q, v_pages=v_pages, block_tables=tables, seq_lens=lens, cu_q_lens=offsets,
                v_scales=scales[1], implementation=kernels, **given,
            ).sum()  # fmt: skip

        at = jnp.asarray(k_pages if name == "k_pages" else scales[0])
        with pytest.raises(NotImplementedError, match="is not that of"):
            jax.eval_shape(jax.grad(loss), at)


@pytest.mark.slow
def test_under_vmap(kernels):
    arrays = CALLS["ragged"][1].make()
    q, k_pages, v_pages, *rest = arrays
    several = np.stack([q, 2 * q])

    def gradient(q):
        call = partial(pp.ragged_paged_attention, implementation=kernels)
        return jax.grad(lambda q, k: jnp.sin(call(q, k, v_pages, *rest)).sum(), argnums=(0, 1))(
            q, k_pages
        )

    mapped = jax.jit(jax.vmap(gradient))(several)
    for i in range(2):
        assert_near(jax.tree.map(lambda x, i=i: x[i], mapped), jax.jit(gradient)(several[i]))


def test_of_the_log_sum_exp_alone(kernels):
    q, *rest = CALLS["ragged"][1].make()

    def gradient(implementation):
        def loss(q):
            lse = pp.ragged_paged_attention(
                q, *rest, return_lse=True, implementation=implementation
            )[1]
            return jnp.where(jnp.isneginf(lse), 0.0, lse).sum()

        return jax.jit(jax.grad(loss))(q)

    assert_near(gradient(kernels), gradient("xla"))


def test_kernels_have_no_gradient_of_the_gradient(kernels):
    q, *rest = CALLS["decode"][1].make()

    def loss(q):
        return pp.paged_attention(q, *rest, implementation=kernels).sum()

    with pytest.raises(NotImplementedError, match="no gradient itself; implementation='xla'"):
        jax.eval_shape(jax.grad(lambda q: jax.grad(loss)(q).sum()), q)


def test_in_tokens_that_are_written_to_the_pages(kernels):
    """The gradient of new tokens goes through `write_kv`; that of older ones is in the pages."""
    q, k_pages, v_pages, tables, lens, offsets = (jnp.asarray(x) for x in RAGGED.make())
    row = jnp.repeat(jnp.arange(4), jnp.diff(offsets), total_repeat_length=q.shape[0])
    positions = lens[row] - offsets[row + 1] + jnp.arange(q.shape[0])
    slots = tables[row, positions // 8] * 8 + positions % 8
    slots = jnp.where(positions < 0, k_pages.shape[1] * 8, slots)  # a query without a token
    new = np.random.default_rng(1).standard_normal((2, q.shape[0], 2, 8)).astype(np.float32)

    def gradient(implementation):
        def loss(new, k_pages):
            layer = pp.write_kv(pp.LayerKV(k_pages=k_pages, v_pages=v_pages), *new, slots)
            out = pp.ragged_paged_attention(
                q,
                layer.k_pages,
                layer.v_pages,
                tables,
                lens,
                offsets,
                implementation=implementation,
            )
            return jnp.sin(out).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(jnp.asarray(new), k_pages)

    of_tokens, of_pages = gradient(kernels)
    assert_near([of_tokens, of_pages], gradient("xla"))
    assert np.abs(of_tokens).max() > 0
