"""Gradients of attention: right, the same bits in every run, or refused with the reason."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from tests.support import raw
from tests.support.attention_calls import assert_same_bits
from tests.support.attention_cases import (
    Case,
    NarrowCase,
    SharedPrefixes,
    cumulated,
    mosaic_case,
    without_tokens_left_of,
)
from tests.support.attention_oracle import attend
from tests.support.devices import implementations_here
from tests.support.marks import slow, slow_if_interpreted
from tests.support.page_layouts import OTHERS, call_in_layout, in_layout
from tests.support.quantized_cases import Quantized

DECODE = Case(head_dim=8, seq_lens=(9, 0, 25, 1))
RAGGED = Case(head_dim=8, seq_lens=(9, 0, 37, 30), q_lens=(4, 1, 37, 7), pages_per_seq=6)
SHARED = SharedPrefixes(
    Case(head_dim=8), seq_lens=(19, 0, 17, 1), prefix_lens=(16,), cu_group_sizes=(0, 3)
)
WINDOW = 6
SLOPES, SINKS = np.float32([0.5, 0.25, 0.1, 0.0]), np.float32([1.0, -1.0, 0.0, 2.0])
TREE = np.random.default_rng(7).random((4, 5, 5)) < 0.5
OPTIONS = dict(soft_cap=2.0, sliding_window=WINDOW, alibi_slopes=SLOPES, sinks=SINKS)
ALL = ("q", "k_pages", "v_pages", "alibi_slopes", "sinks")

KERNELS = [name for name in implementations_here() if name != "xla"]
TRITON = pytest.mark.parametrize("triton", [x for x in KERNELS if x.startswith("triton")])
FAMILIES = pytest.mark.parametrize("family", [x for x in KERNELS if "mosaic_sm80" not in x])


def loss_of_lse(out, lse, xp):
    """A loss of the log-sum-exps alone."""
    finite = xp.isfinite(lse)
    return xp.where(finite, xp.sin(xp.where(finite, lse, 0.0)), 0.0).sum()


def total(out, lse, xp):
    """A loss of both results."""
    return xp.sin(out).sum() + loss_of_lse(out, lse, xp)


def total_with_nan_cotangents(out, lse, xp):
    """The same, with cotangents of NaN for the results of a query that sees no key."""
    if xp is np:
        return total(out, lse, xp)
    nan = xp.where(xp.isneginf(lse), xp.nan, 1.0)[..., None]
    return xp.sin(out * nan).sum() + xp.sin(lse).sum()


def gradients_of(function, given, wanted, loss=total, **options):
    """Gradients in the `wanted` arguments of a call, by name; they have the same bits twice."""
    static = {k: v for k, v in options.items() if not isinstance(v, np.ndarray)}
    given = given | {k: v for k, v in options.items() if isinstance(v, np.ndarray)}

    @jax.jit
    @jax.grad
    def gradient(at, rest):
        out, lse = function(**at, **rest, **static, return_lse=True)
        return loss(out.astype(jnp.float32), lse, jnp)

    at = {name: given[name] for name in wanted}
    rest = {name: x for name, x in given.items() if name not in wanted}
    found, again = (jax.tree.map(np.asarray, gradient(at, rest)) for _ in range(2))
    assert_same_bits(found.values(), again.values())
    return found


def assert_near(actual, expected, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max(), rtol=tolerance)


def assert_is_gradient(gradients, at, oracle):
    """The gradients, by name, are those of a function of the arguments `at`, also by name.

    By differences in float64 along random directions. Data that no query sees has a gradient of 0,
    and may be NaN.
    """
    rng = np.random.default_rng(0)
    for name, gradient in gradients.items():
        gradient, x = np.asarray(gradient, np.float64), np.asarray(at[name], np.float64)
        np.testing.assert_array_equal(gradient[~np.isfinite(x)], 0, err_msg=name)
        for _ in range(3):
            step = 1e-5 * rng.standard_normal(x.shape)
            ahead, behind = (oracle(**at | {name: x + s * step}) for s in (1, -1))
            actual, expected = np.vdot(gradient, step), (ahead - behind) / 2
            np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-9, err_msg=name)


def assert_is_gradient_of_attention(gradients, arrays, loss=total, **options):
    """As above, of the loss of attention; `arrays` and `options` are those of the oracle."""

    def oracle(q, k_pages, v_pages, **options):
        return loss(*attend(q, k_pages, v_pages, *arrays[3:], **options), np)

    at = dict(zip(ALL, arrays[:3], strict=False)) | options
    assert_is_gradient(gradients, at, oracle)


def with_shared_pages(arrays):
    """The first row owns some of the tokens of a page of the third, at another place of its own."""
    arrays[3][0, :2] = arrays[3][2, [1, 0]]
    return arrays


def call_of(arrays):
    return call_in_layout("HPND", arrays)


class TestEqualsFiniteDifferences:
    """In float64, over a poisoned pool."""

    def test_of_a_decoding_call(self, implementation):
        """Tokens left of the windows are dropped: no data there changes the gradient."""
        arrays = DECODE.make()
        dropped = without_tokens_left_of(WINDOW, arrays, DECODE.page_size, -(2**31))
        assert np.isnan(dropped[1]).sum() > np.isnan(arrays[1]).sum()
        function = partial(raw.paged_attention, implementation=implementation)
        wanted = "q", "alibi_slopes", "sinks"
        found = gradients_of(function, call_of(dropped), wanted, **OPTIONS)
        assert_is_gradient_of_attention(found, arrays, **OPTIONS)

    def test_of_a_ragged_call(self, implementation):
        """With a tree mask, pages that rows share and a head_dim that is no power of two."""
        arrays = with_shared_pages(replace(RAGGED, head_dim=24).make())
        options = OPTIONS | dict(tree_mask=TREE, sliding_window=9)
        function = partial(raw.ragged_paged_attention, implementation=implementation)
        loss = total_with_nan_cotangents
        found = gradients_of(function, call_of(arrays), ALL, loss, **options)
        assert_is_gradient_of_attention(found, arrays, **options)

    @pytest.mark.parametrize(
        ("wanted", "options"),
        [(("q", "sinks"), dict(sliding_window=WINDOW, sinks=SINKS)), *slow([(ALL, OPTIONS)])],
        ids=["queries and sinks", "all"],
    )
    @pytest.mark.parametrize("implementation", slow_if_interpreted(implementations_here()))
    def test_of_a_cascade(self, wanted, options, implementation):
        *arrays, prefix_lens, cu_group_sizes = SHARED.make()
        groups = dict(prefix_lens=prefix_lens, cu_group_sizes=cu_group_sizes)
        function = partial(raw.cascade_attention, implementation=implementation)
        found = gradients_of(function, call_of(arrays) | groups, wanted, **options)
        assert_is_gradient_of_attention(found, arrays, **options)

    def test_of_a_cascade_where_the_query_of_an_empty_row_is_nan(self):
        *arrays, prefix_lens, cu_group_sizes = SHARED.make()
        arrays[0][1] = np.nan
        groups = dict(prefix_lens=prefix_lens, cu_group_sizes=cu_group_sizes)
        function = partial(raw.cascade_attention, implementation="xla")
        found = gradients_of(function, call_of(arrays) | groups, ("q", "v_pages"))
        assert_is_gradient_of_attention(found, arrays)

    @TRITON
    @pytest.mark.slow
    def test_of_a_cascade_without_the_pages_left_of_its_window(self, triton):
        """Their entries, past the pool, take nothing from the last page, which is seen."""
        *arrays, prefix_lens, cu_group_sizes = SHARED.make()
        tables, last = arrays[3], arrays[1].shape[1] - 1
        for pages in arrays[1:3]:
            pages[:, last] = pages[:, tables[0, 1]]
        tables[[0, 2], 1] = last
        call = call_of(arrays) | dict(prefix_lens=prefix_lens, cu_group_sizes=cu_group_sizes)
        call["block_tables"] = tables.copy()
        call["block_tables"][[0, 2], 0] = 2**31 - 1
        options = dict(sliding_window=9)
        function = partial(raw.cascade_attention, implementation=triton)
        found = gradients_of(function, call, ("v_pages",), **options)
        assert_is_gradient_of_attention(found, arrays, **options)

    @pytest.mark.parametrize("kv_layout", ["NH2D", *slow(x for x in OTHERS if x != "NH2D")])
    def test_of_pages_in_other_layouts_that_all_queries_see(self, kv_layout, implementation):
        """The gradients of pages have their layout."""
        arrays = with_shared_pages(RAGGED.make())
        call = call_in_layout(kv_layout, arrays)
        wanted = ("k_pages",) if call["v_pages"] is None else ("k_pages", "v_pages")
        options = dict(implementation=implementation, causal=False, kv_layout=kv_layout)
        found = gradients_of(partial(raw.ragged_paged_attention, **options), call, wanted)
        places = in_layout(kv_layout, *np.arange(2 * arrays[1].size).reshape(2, *arrays[1].shape))
        both = np.zeros((2, *arrays[1].shape))
        for name, place in zip(wanted, places, strict=False):
            both.reshape(-1)[place] = found[name]
        found = dict(zip(ALL[1:3], both, strict=True))
        assert_is_gradient_of_attention(found, arrays, causal=False)

    @pytest.mark.parametrize(
        ("case", "wanted", "loss", "options"),
        [
            (DECODE, ("q",), loss_of_lse, {}),
            *slow(
                (case, ALL[:3], total, options)
                for case, options in (
                    (RAGGED, dict(sliding_window=6, soft_cap=1.5, sm_scale=-0.7)),
                    (replace(RAGGED, page_size=2, pages_per_seq=20, num_q_heads=6), {}),
                    (replace(RAGGED, page_size=64, pages_per_seq=2, num_kv_heads=4), {}),
                    (DECODE, {}),
                )
            ),
        ],
        ids=["the log-sum-exps", "window and cap", "pages of 2", "pages of 64", "plain decode"],
    )
    def test_of_few_options(self, case, wanted, loss, options, implementation):
        function = raw.ragged_paged_attention if case.q_lens else raw.paged_attention
        function, arrays = partial(function, implementation=implementation), case.make()
        found = gradients_of(function, call_of(arrays), wanted, loss, **options)
        assert_is_gradient_of_attention(found, arrays, loss, **options)

    @pytest.mark.parametrize("q_lens", [None, (9, 1, 0, 3)], ids=["decode", "ragged"])
    def test_of_v_with_fewer_elements_than_k(self, q_lens):
        case = NarrowCase(seq_lens=(13, 5, 0, 9), q_lens=q_lens, v_head_dim=24)
        function = raw.ragged_paged_attention if q_lens else raw.paged_attention
        function, arrays = partial(function, implementation="xla"), case.make(poison=False)
        found = gradients_of(function, call_of(arrays), ALL[:3])
        assert_is_gradient_of_attention(found, arrays)


PROMPT = mosaic_case(
    num_q_heads=2, num_kv_heads=1, seq_lens=(150,), q_lens=(140,), num_tokens=144, pages_per_seq=10
)


@pytest.mark.parametrize("case", [PROMPT, *slow([replace(PROMPT, dtype="float16")])], ids=str)
@pytest.mark.parametrize("family", slow_if_interpreted(x for x in KERNELS if x != "mosaic_sm80"))
def test_a_prompt_in_16_bits_has_the_gradient_of_xla(family, case):
    *floats, tables, lens, offsets = case.make()
    exact = [x.astype(np.float32) for x in floats]
    call = partial(raw.ragged_paged_attention, sliding_window=70)
    run = partial(gradients_of, wanted=ALL[:3])
    found = run(partial(call, implementation=family), call_of((*floats, tables, lens, offsets)))
    assert [x.dtype for x in found.values()] == [case.dtype] * 3
    expected = run(partial(call, implementation="xla"), call_of((*exact, tables, lens, offsets)))
    assert_near(found, expected, 2e-2)


@FAMILIES
def test_log_probabilities_of_a_rollout_have_the_bits_of_training(family):
    """A token's query comes alone beside another row, or with all others under a gradient."""
    length = 70  # several tiles of queries
    case = Case(
        head_dim=16, seq_lens=(length, 30), q_lens=(length, 3), pages_per_seq=16, num_tokens=80
    ).on(family)
    q, k_pages, v_pages, tables, _, _ = case.make()
    to_logits = np.random.default_rng(0).standard_normal((q[0].size, 7)).astype(np.float32)

    @jax.jit
    def log_probabilities(out):  # of one token: products of several may be rounded in another way
        return jax.nn.log_softmax(out.reshape(-1).astype(jnp.float32) @ to_logits)

    how = dict(implementation=family, fixed_split_size=128)  # no row is split
    call = partial(raw.ragged_paged_attention, **how)

    @jax.jit
    def train(q):
        lens, offsets = np.int32([length]), np.int32([0, length])
        return jax.vjp(lambda q: call(q, k_pages, v_pages, tables[:1], lens, offsets), q)[0]

    trained, rollout = np.asarray(train(q[:length])), jax.jit(call)
    for token in (0, 1, 31, 33, 64, 69):
        queries = np.concatenate([q[token : token + 1], q[length : length + 3]])
        lens = np.int32([token + 1, 30])
        out = np.asarray(rollout(queries, k_pages, v_pages, tables, lens, cumulated((1, 3))))
        assert_same_bits([out[0]], [trained[token]])
        assert_same_bits([log_probabilities(out[0])], [log_probabilities(trained[token])])


class TestOneBytePages:
    @pytest.mark.parametrize("kv_dtype", ["int8", *slow(["float8_e4m3fn"])])
    def test_have_a_gradient_in_queries_and_sinks(self, kv_dtype, implementation):
        case = replace(RAGGED, q_lens=(4, 1, 5, 7))
        stored, meant = Quantized(case=case, kv_dtype=kv_dtype, v_size=1.0).make()
        function = partial(raw.ragged_paged_attention, implementation=implementation)
        found = gradients_of(function, call_of(stored), ("q", "sinks"), sinks=SINKS)
        assert_is_gradient_of_attention(found, meant, sinks=SINKS)

    @TRITON
    @pytest.mark.parametrize(
        ("kv_dtype", "name"),  # JAX has no gradient in integers
        [("int8", "k_scales"), *slow(("float8_e4m3fn", x) for x in ("k_scales", "k_pages"))],
    )
    def test_have_none_of_their_own(self, triton, kv_dtype, name):
        given = call_of(Quantized(case=RAGGED, kv_dtype=kv_dtype).make()[0])

        def loss(x):
            return raw.ragged_paged_attention(**given | {name: x}, implementation=triton).sum()

        with pytest.raises(NotImplementedError, match="is not that of"):
            jax.eval_shape(jax.grad(loss), given[name])


@TRITON
@pytest.mark.slow
def test_under_vmap(triton):
    q, k_pages, v_pages, *rest = RAGGED.make()

    def loss(q, k_pages):
        out = raw.ragged_paged_attention(q, k_pages, v_pages, *rest, implementation=triton)
        return jnp.sin(out).sum()

    gradient, several = jax.grad(loss, argnums=(0, 1)), np.stack([q, 2 * q])
    mapped = jax.jit(jax.vmap(gradient, in_axes=(0, None)))(several, k_pages)
    for i, q in enumerate(several):
        assert_near([x[i] for x in mapped], jax.jit(gradient)(q, k_pages))


@TRITON
def test_kernels_have_no_gradient_of_the_gradient(triton):
    q, *rest = DECODE.make()

    def loss(q):
        return raw.paged_attention(q, *rest, implementation=triton).sum()

    with pytest.raises(NotImplementedError, match="no gradient itself; implementation='xla'"):
        jax.eval_shape(jax.grad(lambda q: jax.grad(loss)(q).sum()), q)


@pytest.mark.parametrize("implementation", ["xla", *slow(KERNELS)])
@pytest.mark.smoke
def test_in_tokens_that_are_written_to_the_pages(implementation):
    """The gradient of new tokens goes through `write_kv`; that of older ones is in the pages."""
    q, k_pages, v_pages, tables, lens, offsets = RAGGED.make()
    row = np.repeat(np.arange(4, dtype=np.int32), np.diff(offsets))
    positions = lens[row] - offsets[row + 1] + np.arange(q.shape[0], dtype=np.int32)
    slots = tables[row, positions // 8] * 8 + positions % 8
    slots = np.where(positions < 0, k_pages.shape[1] * 8, slots)  # a query without a token
    shape = (q.shape[0], 2, 8)
    new_k, new_v = np.random.default_rng(1).standard_normal((2, *shape)).astype(np.float32)
    rest = tables, lens, offsets

    @jax.jit
    @jax.grad
    def gradient(at):
        layer = pp.LayerKV(at["k_pages"], v_pages, kv_layout="HPND")
        layer = pp.write_kv(layer, at["new_k"], at["new_v"], slots)
        out = raw.ragged_paged_attention(
            q, layer.k_pages, layer.v_pages, *rest, implementation=implementation
        )
        return jnp.sin(out).sum()

    def oracle(k_pages, new_k, new_v):
        pages = []
        for old, new in ((k_pages, new_k), (v_pages, new_v)):
            flat = np.array(old, np.float64).reshape(2, -1, 8)
            flat[:, slots[positions >= 0]] = new[positions >= 0].swapaxes(0, 1)
            pages.append(flat.reshape(old.shape))
        return np.sin(attend(q, *pages, *rest)[0]).sum()

    at = dict(k_pages=k_pages, new_k=new_k, new_v=new_v)
    assert_is_gradient(gradient(at), at, oracle)
