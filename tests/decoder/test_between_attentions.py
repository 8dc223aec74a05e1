"""`between_attentions`: products, norms and sums between two attentions, on any device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_paged.decoder.between_attentions import BlockWeights, Residual, between_attentions
from pallas_paged.decoder.rms_norm import rms_norm
from pallas_paged.decoder.unmerged_attention import unmerged_attention
from pallas_paged.pages.layer import LayerKV
from tests.support import raw
from tests.support.block_weights import draw, weights_of
from tests.support.devices import implementations_here, lower_for_cuda, mesh
from tests.support.kernel_calls import kernel_calls
from tests.support.marks import needs_mosaic, needs_triton, slow
from tests.support.promotion import strict_promotion

A, E, F, N = 512, 512, 512, 128
KERNEL = "mosaic_sm90_interpret"


def block_weights(dtype=jnp.bfloat16) -> BlockWeights:
    return BlockWeights(**weights_of(A, E, F, N, dtype=dtype))


def inputs(*rows: int, dtype=jnp.bfloat16) -> tuple[jax.Array, Residual]:
    x = (draw(20 + i, *rows, size, scale=1.0, dtype=dtype) for i, size in enumerate((A, E)))
    return next(x), Residual(x=next(x))


def largest_difference(a, b, of=np.std):
    """The largest difference of two arrays, relative to the spread of the second."""
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    return np.abs(a - b).max() / of(b)


def twice(attended, residual, w, implementation):
    """Two calls in a row: the second has the mailboxes of the first one, swapped."""
    for _ in range(2):
        residual, out, _ = between_attentions(
            attended, residual, w, eps=1e-5, **raw.by(implementation)
        )
    return residual.x, out


STATIC = ("eps", "implementation", "interpret", "dropout")
jitted_block = jax.jit(between_attentions, static_argnames=STATIC)


def test_without_a_gpu_it_is_the_separate_steps_bit_for_bit():
    (attended, residual), w = inputs(2, 3), block_weights()
    w = dataclasses.replace(w, o_bias=draw(30, E), qkv_bias=draw(31, N))

    def steps(attended, residual, w):
        x = residual.x + (attended @ w.o.T + w.o_bias)
        gate_up = rms_norm(x, w.mlp_norm, 1e-5) @ w.gate_up.reshape(-1, E).T
        x += (jax.nn.silu(gate_up[..., ::2]) * gate_up[..., 1::2]) @ w.down.T
        normed = rms_norm(x, w.out_norm, 1e-5)
        return x, normed if w.qkv is None else normed @ w.qkv.T + w.qkv_bias

    for weights in (w, dataclasses.replace(w, qkv=None, qkv_bias=None)):
        got, out, _ = jitted_block(attended, residual, weights, eps=1e-5)
        for a, b in zip((got.x, out), jax.jit(steps)(attended, residual, weights), strict=True):
            np.testing.assert_array_equal(np.float32(a), np.float32(b))


def test_dropout_is_of_both_branches():
    (attended, residual), w = inputs(3, dtype=jnp.float32), block_weights(jnp.float32)
    got, *_ = jitted_block(attended, residual, w, eps=1e-5, dropout=jnp.zeros_like)
    np.testing.assert_array_equal(got.x, residual.x)


@needs_mosaic
@pytest.mark.parametrize("kernel", [KERNEL, *({"mosaic_sm90"} & {*implementations_here()})])
@pytest.mark.parametrize(
    ("rows", "last"), [((1,), True), ((2, 5), False), *slow([((1,), False), ((9,), True)])]
)
def test_the_kernel_gives_what_xla_gives_and_its_gradients(kernel, rows, last):
    (attended, residual), w = inputs(*rows), block_weights()
    if rows == (1,):
        w = dataclasses.replace(w, o_bias=draw(30, E), qkv_bias=draw(31, N))
    if last:
        w = dataclasses.replace(w, qkv=None, qkv_bias=None)

    def loss(attended, x, w, implementation):
        x, out = twice(attended, dataclasses.replace(residual, x=x), w, implementation)
        assert out.shape == (*rows, E if last else N) and out.dtype == jnp.bfloat16
        return (out.astype(jnp.float32) ** 2).mean(), (x, out)

    gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True), static_argnums=3)
    both = [gradients(attended, residual.x, w, name) for name in (kernel, "xla")]
    ((_, got), got_grads), ((_, want), want_grads) = both
    assert max(map(largest_difference, got, want)) < 0.06
    for a, b in zip(*map(jax.tree.leaves, (got_grads, want_grads)), strict=True):
        assert largest_difference(a, b, of=lambda x: np.abs(x).max()) < 0.1


@needs_mosaic
def test_a_caller_may_forbid_promotion_also_of_gradients():
    (attended, residual), w = inputs(2), block_weights()

    @jax.jit  # so that the rule of the kernel is called behind the entry
    def loss(x):
        x, out = twice(attended, dataclasses.replace(residual, x=x), w, KERNEL)
        return out.sum()

    with strict_promotion():
        jax.eval_shape(jax.grad(loss), residual.x)


@needs_mosaic
def test_under_vmap_it_is_the_separate_steps():
    (attended, residual), w = inputs(3, 2), block_weights()

    def results(implementation):
        def run(attended, x, out_norm):
            weights = dataclasses.replace(w, out_norm=out_norm)
            return twice(attended, Residual(x=x), weights, implementation)

        norms = np.stack([w.out_norm, w.mlp_norm, w.out_norm])
        return jax.jit(jax.vmap(run))(attended, residual.x, norms)

    for got, want in zip(results(KERNEL), results("xla"), strict=True):
        np.testing.assert_array_equal(np.float32(got), np.float32(want))


@needs_triton
@pytest.mark.parametrize(
    ("kernel", "attention", "seq_len", "with_sinks"),
    [
        (None, "triton_interpret", 100, False),
        pytest.param(KERNEL, "triton_interpret", 100, False, marks=needs_mosaic),
        pytest.param(KERNEL, "mosaic_sm90_interpret", 300, True, marks=needs_mosaic),
        *(
            pytest.param(KERNEL, attention, *row, marks=[needs_mosaic, pytest.mark.slow])
            for attention in ("triton_interpret", "mosaic_sm90_interpret")
            for row in ((0, True), (1, False), (500, False), (500, True))
        ),
    ],
)
def test_partial_states_are_as_good_as_their_merge(kernel, attention, seq_len, with_sinks):
    (_, residual), w = inputs(1), block_weights()
    pages = draw(40, 2, 32, 16, 64, scale=1.0), draw(41, 2, 32, 16, 64, scale=1.0)

    def attend():
        return unmerged_attention(
            draw(42, 1, A // 64, 64),
            LayerKV(pages[0], pages[1], kv_layout="HPND"),
            np.arange(32, dtype=np.int32)[None],
            np.array([seq_len], np.int32),
            sinks=np.linspace(-1, 3, A // 64, dtype=np.float32) if with_sinks else None,
            **raw.by(attention),
        )

    def run(x, attended):
        how = dict(eps=1e-5, **raw.by(kernel))
        stream, out, _ = between_attentions(attended, Residual(x=x), w, **how)
        return stream.x, out

    @jax.jit
    def both():
        attended = attend()
        return [run(residual.x, x) for x in (attended, attended.merged())]

    for a, b in zip(*map(jax.tree.leaves, both()), strict=True):
        assert largest_difference(a, b) <= (0.01 if kernel else 0.0)
    if kernel:
        error = "partial states of attention have no gradient"
        with pytest.raises(NotImplementedError, match=error):
            jax.eval_shape(jax.grad(lambda x: run(x, attend())[1].sum()), residual.x)


def test_weights_on_several_devices_are_refused():
    (attended, residual), w = inputs(1), block_weights()
    w = jax.device_put(w, NamedSharding(mesh(2), P()))
    with pytest.raises(NotImplementedError, match="needs arrays on one device"):
        jitted_block(attended, residual, w, eps=1e-5, **raw.by(KERNEL))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (dict(down=np.ones((E, F + 1))), ValueError, r"weights.down.shape=\(512, 513\) must be"),
        (dict(down_bias=np.ones(E)), ValueError, "weights.down_bias.shape=.* must be None"),
        (dict(qkv_bias=np.ones(N)), NotImplementedError, "one dtype for all arrays"),
        (dict(rows=2, o_bias=draw(0, E)), NotImplementedError, "biases for one row only"),
        (dict(qkv=draw(0, 65, E)), NotImplementedError, "multiples of"),
        (dict(rows=257), NotImplementedError, "needs 1 to 256 rows, not 257"),
        (dict(rows=2, dtype=jnp.float16), NotImplementedError, "needs bfloat16 for 2 rows"),
        (dict(implementation="cuda"), ValueError, "implementation='cuda' must be"),
        (dict(attended=draw(0, 2, A)), ValueError, "must have the rows of the residual"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else None,
)
def test_bad_arguments_are_named(change, error, match):
    def call(*, rows=1, dtype=jnp.bfloat16, attended=None, implementation=KERNEL, **weights):
        usual, residual = inputs(rows, dtype=dtype)
        attended = usual if attended is None else attended
        w = dataclasses.replace(block_weights(dtype), **weights)
        between_attentions(attended, residual, w, eps=1e-5, **raw.by(implementation))

    with pytest.raises(error, match=match):
        call(**change)


@needs_mosaic
@pytest.mark.parametrize("in_loop", [False, True])
def test_it_lowers_for_cuda_inside_a_program(in_loop):
    (call,) = (x for x in kernel_calls() if x.name == "between attentions")
    attended, x, weights = call.shapes()

    def run(attended, x, weights):
        def layer(_, x):
            return call.run(attended, x, weights)[0]

        return lax.fori_loop(0, 2, layer, x) if in_loop else layer(0, x)

    text = lower_for_cuda(run, attended, x, weights).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
