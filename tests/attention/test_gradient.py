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
from tests.support.attention_cases import (
    Case,
    SharedPrefixes,
    cumulated,
    mosaic_case,
    without_pages_left_of,
)
from tests.support.attention_oracle import attend
from tests.support.devices import implementations_here
from tests.support.marks import slow
from tests.support.page_layouts import OTHERS, in_layout
from tests.support.quantized_cases import Quantized

DECODE = Case(head_dim=8, seq_lens=(9, 0, 25, 1))
RAGGED = Case(head_dim=8, seq_lens=(9, 0, 37, 30), q_lens=(4, 1, 37, 7), pages_per_seq=6)
SHARED = SharedPrefixes(
    case=Case(head_dim=8), seq_lens=(19, 0, 17, 1), prefix_lens=(16,), cu_group_sizes=(0, 3)
)
WINDOW = 6
SLOPES, SINKS = np.float32([0.5, 0.25, 0.1, 0.0]), np.float32([1.0, -1.0, 0.0, 2.0])
TREE = np.random.default_rng(7).random((4, 5, 5)) < 0.5
OPTIONS = dict(soft_cap=2.0, sliding_window=WINDOW, alibi_slopes=SLOPES, sinks=SINKS)
ALL = ("q", "k_pages", "v_pages", "alibi_slopes", "sinks")

KERNELS = [name for name in implementations_here() if name != "xla"]
# XLA makes the gradient of a cascade from those of its parts.
KERNELS_AND_SLOW_XLA = [*KERNELS, *slow(["xla"])]


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


def total_with_nan_cotangents(out, lse, xp):
    """The same, with a cotangent of NaN for the log-sum-exp of a query that sees no key."""
    return total(out, lse, xp) if xp is np else xp.sin(out).sum() + xp.sin(lse).sum()


def loss_of_lse(out, lse, xp):
    """A loss of the log-sum-exps alone."""
    return xp.where(xp.isfinite(lse), xp.where(xp.isfinite(lse), lse, 0.0), 0.0).sum()


def call_by_name(arrays):
    """The arrays of a call by the names of an entry's arguments."""
    names = ["q", "k_pages", "v_pages", "block_tables", "seq_lens", "cu_q_lens"]
    if len(arrays) == 7:
        names[5:] = "prefix_lens", "cu_group_sizes"
    return dict(zip(names, arrays, strict=False))


def gradients_of_two_runs(function, given, wanted, loss=total, **options):
    """Gradients in the `wanted` arguments of a call, by name, of two runs."""
    static = {k: v for k, v in options.items() if not isinstance(v, np.ndarray)}
    given = given | {k: v for k, v in options.items() if isinstance(v, np.ndarray)}

    @jax.jit
    @jax.grad
    def gradient(at, rest):
        out, lse = function(**at, **rest, **static, return_lse=True)
        return loss(out.astype(jnp.float32), lse, jnp)

    at = {name: given[name] for name in wanted}
    rest = {name: x for name, x in given.items() if name not in wanted}
    return [jax.tree.map(np.asarray, gradient(at, rest)) for _ in range(2)]


def assert_near(actual, expected, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max(), rtol=tolerance)


def assert_is_gradient(gradients, at, oracle):
    """The gradients are those of an oracle, by differences in float64 along random directions.

    Data that no query sees has a gradient of 0, and may be NaN.

    Args:
        gradients: some arguments' gradients, by name.
        at: the arguments, by name.
        oracle: function of the arguments.
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


def of_pages_that_rows_share():
    """The first row owns some of the tokens of a page of the third, at another place of its own."""
    q, k_pages, v_pages, tables, lens, offsets = RAGGED.make()
    tables[0, :2] = tables[2, [1, 0]]
    return q, k_pages, v_pages, tables, lens, offsets


class TestEqualsFiniteDifferences:
    """In float64, over a poisoned pool."""

    def test_of_a_decoding_call(self, implementation):
        """Pages left of the windows are dropped: no data there changes a bit of the gradient."""
        arrays = DECODE.make()
        dropped = without_pages_left_of(WINDOW, arrays, DECODE.page_size, -(2**31))
        assert np.isnan(dropped[1]).sum() > np.isnan(arrays[1]).sum()
        wanted, call = ("q", "alibi_slopes", "sinks"), partial(gradients_of_two_runs, **OPTIONS)
        function = partial(pp.paged_attention, implementation=implementation)
        got, again = call(function, call_by_name(dropped), wanted)
        assert_same_bits(jax.tree.leaves(got), jax.tree.leaves(again))
        assert_is_gradient_of_attention(got, arrays, **OPTIONS)

    def test_of_a_ragged_call(self, implementation):
        """With a tree mask, pages that rows share and a head_dim that is no power of two."""
        case = replace(RAGGED, head_dim=24)
        arrays = list(case.make())
        arrays[3][0, :2] = arrays[3][2, [1, 0]]
        options = OPTIONS | dict(tree_mask=TREE, sliding_window=9)
        function = partial(pp.ragged_paged_attention, implementation=implementation)
        got, again = gradients_of_two_runs(
            function, call_by_name(arrays), ALL, total_with_nan_cotangents, **options
        )
        assert_same_bits(jax.tree.leaves(got), jax.tree.leaves(again))
        assert_is_gradient_of_attention(got, arrays, **options)

    @pytest.mark.parametrize(
        ("wanted", "options"),
        [(("q", "sinks"), dict(sliding_window=WINDOW, sinks=SINKS)), *slow([(ALL, OPTIONS)])],
        ids=["queries and sinks", "all"],
    )
    @pytest.mark.parametrize("implementation", KERNELS_AND_SLOW_XLA)
    def test_of_a_cascade(self, wanted, options, implementation):
        arrays = SHARED.make()
        function = partial(pp.cascade_attention, implementation=implementation)
        got, _ = gradients_of_two_runs(function, call_by_name(arrays), wanted, **options)
        assert_is_gradient_of_attention(got, arrays[:5], **options)

    @pytest.mark.parametrize("kv_layout", ["NH2D", *slow(x for x in OTHERS if x != "NH2D")])
    def test_of_pages_in_other_layouts_that_all_queries_see(self, kv_layout, implementation):
        """The gradients of pages have their layout."""
        arrays = of_pages_that_rows_share()
        call = call_by_name(arrays)
        call["k_pages"], call["v_pages"] = in_layout(kv_layout, *arrays[1:3])
        wanted = ("k_pages",) if call["v_pages"] is None else ("k_pages", "v_pages")
        function = partial(
            pp.ragged_paged_attention, implementation=implementation, causal=False,
            kv_layout=kv_layout,
        )  # fmt: skip
        got, _ = gradients_of_two_runs(function, call, wanted)
        places = in_layout(kv_layout, *np.arange(2 * arrays[1].size).reshape(2, *arrays[1].shape))
        both = np.zeros((2, *arrays[1].shape))
        for name, place in zip(wanted, places, strict=False):
            both.reshape(-1)[place] = got[name]
        assert_is_gradient_of_attention(
            dict(zip(ALL[1:3], both, strict=True)), arrays, causal=False
        )

    def test_of_the_log_sum_exps_alone(self, implementation):
        arrays = DECODE.make()
        function = partial(pp.paged_attention, implementation=implementation)
        got, _ = gradients_of_two_runs(function, call_by_name(arrays), ("q",), loss_of_lse)
        assert_is_gradient_of_attention(got, arrays, loss_of_lse)


def test_a_prompt_in_bf16_has_the_gradient_of_xla(family):
    case = mosaic_case(
        num_q_heads=2, num_kv_heads=1, seq_lens=(150,), q_lens=(140,), num_tokens=144,
        pages_per_seq=10,
    )  # fmt: skip
    arrays = case.make()
    exact = [x.astype(np.float32) if x.dtype == jnp.bfloat16 else x for x in arrays]
    call = partial(pp.ragged_paged_attention, sliding_window=70)
    run = partial(gradients_of_two_runs, wanted=ALL[:3])
    first, second = run(partial(call, implementation=family), call_by_name(arrays))
    assert [x.dtype for x in first.values()] == [jnp.bfloat16] * 3
    assert_same_bits(first.values(), second.values())
    expected, _ = run(partial(call, implementation="xla"), call_by_name(exact))
    assert_near(first, expected, 2e-2)


VARIANTS = {
    "window": (RAGGED, dict(sliding_window=6)),
    "cap": (RAGGED, dict(soft_cap=1.5, sm_scale=-0.7)),
    "pages of 2": (replace(RAGGED, page_size=2, pages_per_seq=20, num_q_heads=6), {}),
    "pages of 64": (replace(RAGGED, page_size=64, pages_per_seq=2, num_kv_heads=4), {}),
    "plain decode": (DECODE, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_option_alone_and_other_pages_agree_with_differences(variant, implementation):
    case, options = VARIANTS[variant]
    function = pp.ragged_paged_attention if case.q_lens else pp.paged_attention
    function = partial(function, implementation=implementation)
    arrays = case.make()
    got, again = gradients_of_two_runs(function, call_by_name(arrays), ALL[:3], **options)
    assert_same_bits(jax.tree.leaves(got), jax.tree.leaves(again))
    assert_is_gradient_of_attention(got, arrays, **options)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kernels_agree_with_xla_in_16_bits(kernels, dtype):
    arrays = replace(RAGGED, dtype=dtype).make()
    function = pp.ragged_paged_attention
    run = partial(gradients_of_two_runs, wanted=ALL[:3])
    got, _ = run(partial(function, implementation=kernels), call_by_name(arrays))
    assert [x.dtype for x in got.values()] == [dtype] * 3
    exact = call_by_name([x.astype(np.float32) for x in arrays[:3]] + list(arrays[3:]))
    assert_near(got, run(partial(function, implementation="xla"), exact)[0], 2e-2)


@pytest.mark.parametrize("name", ["decode", *slow(["ragged"])])
def test_the_forward_pass_has_the_same_bits(family, name):
    function, case = {
        "decode": (pp.paged_attention, DECODE),
        "ragged": (pp.ragged_paged_attention, RAGGED),
    }[name]
    q, *rest = case.on(family).make()
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
    q, k_pages, v_pages, tables, _, _ = case.make()
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
        lens, offsets = np.int32([length]), np.int32([0, length])
        return jax.vjp(lambda q: call(q, k_pages, v_pages, tables[:1], lens, offsets), q)[0]

    trained, rollout = np.asarray(train(q[:length])), jax.jit(call)
    for token in (0, 1, 31, 33, 64, 69):
        queries = np.concatenate([q[token : token + 1], q[length : length + 3]])
        lens = np.int32([token + 1, 30])
        out = np.asarray(rollout(queries, k_pages, v_pages, tables, lens, cumulated((1, 3))))
        assert_same_bits([out[0]], [trained[token]])
        assert_same_bits([log_probabilities(out[0])], [log_probabilities(trained[token])])


@pytest.mark.parametrize("kv_dtype", ["int8", *slow(["float8_e4m3fn"])])
class TestOneBytePages:
    def test_have_a_gradient_in_queries_and_sinks(self, kv_dtype, implementation):
        case = replace(RAGGED, q_lens=(4, 1, 5, 7))
        stored, meant = Quantized(case=case, kv_dtype=kv_dtype, v_size=1.0).make()
        call = call_by_name(stored[:6]) | dict(
            zip(("k_scales", "v_scales"), stored[6:], strict=True)
        )
        function = partial(pp.ragged_paged_attention, implementation=implementation)
        got, _ = gradients_of_two_runs(function, call, ("q", "sinks"), sinks=SINKS)
        assert_is_gradient_of_attention(got, meant, sinks=SINKS)

    @pytest.mark.parametrize("name", ["k_scales", "k_pages"])
    def test_have_none_of_their_own(self, kernels, kv_dtype, name):
        if (kv_dtype, name) == ("int8", "k_pages"):
            pytest.skip("JAX has no gradient in integers")
        stored, _ = Quantized(case=RAGGED, kv_dtype=kv_dtype).make()
        given = call_by_name(stored[:6]) | dict(
            zip(("k_scales", "v_scales"), stored[6:], strict=True)
        )

        def loss(x):
            return pp.ragged_paged_attention(**given | {name: x}, implementation=kernels).sum()

        with pytest.raises(NotImplementedError, match="is not that of"):
            jax.eval_shape(jax.grad(loss), given[name])


@pytest.mark.slow
def test_under_vmap(kernels):
    q, k_pages, v_pages, *rest = RAGGED.make()

    def gradient(q):
        call = partial(pp.ragged_paged_attention, implementation=kernels)
        return jax.grad(lambda q, k: jnp.sin(call(q, k, v_pages, *rest)).sum(), argnums=(0, 1))(
            q, k_pages
        )

    several = np.stack([q, 2 * q])
    mapped = jax.jit(jax.vmap(gradient))(several)
    for i in range(2):
        assert_near(jax.tree.map(lambda x, i=i: x[i], mapped), jax.jit(gradient)(several[i]))


def test_kernels_have_no_gradient_of_the_gradient(kernels):
    q, *rest = DECODE.make()

    def loss(q):
        return pp.paged_attention(q, *rest, implementation=kernels).sum()

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
        layer = pp.LayerKV(k_pages=at["k_pages"], v_pages=v_pages)
        layer = pp.write_kv(layer, at["new_k"], at["new_v"], slots)
        out = pp.ragged_paged_attention(
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
