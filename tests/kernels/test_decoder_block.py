"""`between_attentions`: products, norms and sums between two attentions, on any device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_paged.decoder_block import BlockWeights, Residual, between_attentions
from pallas_paged.kv_pool import LayerKV
from pallas_paged.linear import linear
from pallas_paged.rms_norm import rms_norm
from pallas_paged.unmerged_attention import unmerged_attention
from tests.support.block_weights import draw
from tests.support.devices import implementations_here, lower_for_cuda, mesh
from tests.support.kernel_calls import kernel_calls
from tests.support.marks import needs_triton, slow

A, E, F, N = 512, 512, 512, 128
KERNEL = "mosaic_gpu_interpret"
needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the Mosaic GPU kernels need JAX 0.11"
)


def block_weights(dtype=jnp.bfloat16) -> BlockWeights:
    shapes = dict(o=(E, A), gate_up=(F, 2, E), down=(E, F), qkv=(N, E))
    weights = {
        name: draw(i, *shape, scale=shape[-1] ** -0.5, dtype=dtype)
        for i, (name, shape) in enumerate(shapes.items())
    }
    norms = (draw(9 + i, E, scale=0.1, dtype=dtype) + np.ones((), dtype) for i in range(2))
    return BlockWeights(**weights, **dict(zip(("mlp_norm", "out_norm"), norms, strict=True)))


def inputs(*rows: int, dtype=jnp.bfloat16) -> tuple[jax.Array, Residual]:
    x = (draw(20 + i, *rows, size, scale=1.0, dtype=dtype) for i, size in enumerate((A, E)))
    return next(x), Residual(x=next(x))


jitted_block = jax.jit(between_attentions, static_argnames=("eps", "implementation", "dropout"))


def test_without_a_gpu_it_is_the_separate_steps_bit_for_bit():
    (attended, residual), w = inputs(2, 3), block_weights()
    w = dataclasses.replace(w, o_bias=draw(30, E), qkv_bias=draw(31, N))

    def steps(attended, residual, w):
        x = residual.x + (linear(attended, w.o) + w.o_bias)
        x += linear(linear(rms_norm(x, w.mlp_norm, 1e-5), w.gate_up), w.down)
        normed = rms_norm(x, w.out_norm, 1e-5)
        return x, normed if w.qkv is None else linear(normed, w.qkv) + w.qkv_bias

    for weights in (w, dataclasses.replace(w, qkv=None, qkv_bias=None)):
        got, out = jitted_block(attended, residual, weights, eps=1e-5)
        for a, b in zip((got.x, out), jax.jit(steps)(attended, residual, weights), strict=True):
            np.testing.assert_array_equal(np.float32(a), np.float32(b))


def test_dropout_is_of_both_branches():
    (attended, residual), w = inputs(3, dtype=jnp.float32), block_weights(jnp.float32)
    got, _ = jitted_block(attended, residual, w, eps=1e-5, dropout=jnp.zeros_like)
    np.testing.assert_array_equal(got.x, residual.x)


@needs_mosaic
@pytest.mark.parametrize("kernel", [KERNEL, *({"mosaic_gpu"} & {*implementations_here()})])
@pytest.mark.parametrize(
    ("rows", "last"), [((1,), True), ((2, 5), False), *slow([((1,), False), ((9,), True)])]
)
def test_the_kernel_gives_what_xla_gives_and_its_gradients(kernel, rows, last):
    (attended, residual), w = inputs(*rows), block_weights()
    if last:
        w = dataclasses.replace(w, qkv=None)

    def loss(attended, x, w, implementation):
        stream = dataclasses.replace(residual, x=x)
        for _ in range(2):  # the second call has the boards of the first one, swapped
            stream, out = between_attentions(
                attended, stream, w, eps=1e-5, implementation=implementation
            )
        assert out.shape == (*rows, E if last else N) and out.dtype == jnp.bfloat16
        return (out.astype(jnp.float32) ** 2).mean(), (stream.x, out)

    gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True), static_argnums=3)
    both = [gradients(attended, residual.x, w, name) for name in (kernel, "xla")]
    ((_, got), got_grads), ((_, want), want_grads) = both
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.abs(a - b).max() < 0.06 * b.std()
    for a, b in zip(*map(jax.tree.leaves, (got_grads, want_grads)), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.abs(a - b).max() < 0.1 * np.abs(b).max()


@needs_mosaic
def test_under_vmap_it_is_the_separate_steps():
    (attended, residual), w = inputs(3, 2), block_weights()

    def results(implementation):
        def run(attended, x, out_norm):
            weights = dataclasses.replace(w, out_norm=out_norm)
            stream = Residual(x=x)
            for _ in range(2):
                stream, out = between_attentions(
                    attended, stream, weights, eps=1e-5, implementation=implementation
                )
            return stream.x, out

        norms = np.stack([w.out_norm, w.mlp_norm, w.out_norm])
        return jax.jit(jax.vmap(run))(attended, residual.x, norms)

    for got, want in zip(results(KERNEL), results("xla"), strict=True):
        np.testing.assert_array_equal(np.float32(got), np.float32(want))


@needs_triton
@pytest.mark.parametrize("kernel", [None, pytest.param(KERNEL, marks=needs_mosaic)])
def test_partial_states_are_as_good_as_their_merge(kernel):
    (_, residual), w = inputs(1), block_weights()
    pages = draw(40, 2, 8, 16, 64, scale=1.0), draw(41, 2, 8, 16, 64, scale=1.0)

    def attend():
        return unmerged_attention(
            LayerKV(k_pages=pages[0], v_pages=pages[1]),
            draw(42, 1, A // 64, 64),
            np.arange(8, dtype=np.int32)[None],
            np.array([100], np.int32),
            implementation="triton_interpret",
        )

    @jax.jit
    def both():
        attention, how = attend(), dict(eps=1e-5, implementation=kernel)
        return [between_attentions(x, residual, w, **how) for x in (attention, attention.merged())]

    got, want = both()
    for a, b in zip((got[0].x, got[1]), (want[0].x, want[1]), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.abs(a - b).max() <= (0.01 * b.std() if kernel else 0.0)
    if kernel:
        with pytest.raises(
            NotImplementedError, match="partial states of attention have no gradient"
        ):
            jax.eval_shape(
                jax.grad(
                    lambda x: between_attentions(
                        attend(), Residual(x=x), w, eps=1e-5, implementation=kernel
                    )[1].sum()
                ),
                residual.x,
            )


def test_weights_cut_over_devices_are_not_gathered():
    (attended, residual), w = inputs(1), block_weights()
    w = jax.device_put(w, NamedSharding(mesh(2), P()))
    with pytest.raises(NotImplementedError, match="needs arrays on one device"):
        jitted_block(attended, residual, w, eps=1e-5, implementation=KERNEL)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (dict(down=np.ones((E, F + 1))), ValueError, r"weights.down.shape=\(512, 513\) must be"),
        (dict(qkv_bias=np.ones(N)), NotImplementedError, "all in bfloat16 or all in float16"),
        (dict(o_bias=draw(0, E)), NotImplementedError, "has no biases"),
        (dict(qkv=draw(0, 65, E)), NotImplementedError, "multiples of"),
    ],
)
def test_bad_arguments_are_named(change, error, match):
    (attended, residual), w = inputs(1), dataclasses.replace(block_weights(), **change)
    with pytest.raises(error, match=match):
        between_attentions(attended, residual, w, eps=1e-5, implementation=KERNEL)


def test_rows_and_names_are_checked():
    (attended, residual), w = inputs(257), block_weights()
    how = dict(eps=1e-5, implementation=KERNEL)
    with pytest.raises(NotImplementedError, match="needs 1 to 256 rows, not 257"):
        between_attentions(attended, residual, w, **how)
    (attended, residual) = inputs(2, dtype=jnp.float16)
    with pytest.raises(NotImplementedError, match="needs bfloat16 for 2 rows"):
        between_attentions(attended, residual, block_weights(jnp.float16), **how)
    with pytest.raises(ValueError, match="implementation='cuda' must be"):
        between_attentions(attended, residual, w, eps=1e-5, implementation="cuda")
    with pytest.raises(ValueError, match="must have the rows of the residual"):
        between_attentions(attended[:1], residual, w, eps=1e-5)


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
