"""`fused_experts` beside float64 NumPy, by XLA, and in `shard_map`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_paged.experts import fused_experts
from tests.support import experts_oracle as oracle
from tests.support.attention_oracle import relative_error
from tests.support.devices import mesh
from tests.support.experts_oracle import draw, routes
from tests.support.promotion import strict_promotion

EXPERTS, FEATURES, SIZE, TOKENS, K = 6, 24, 16, 45, 3
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
BIASES = dict(gate_up_bias=(EXPERTS, FEATURES, 2), down_bias=(EXPERTS, SIZE))


def arrays(dtype="float32"):
    """x, gate_up, down, indices, scales; one expert has no token."""
    gate_up = draw(2, EXPERTS, FEATURES, 2, SIZE, dtype=dtype, scale=SIZE**-0.5)
    down = draw(3, EXPERTS, SIZE, FEATURES, dtype=dtype, scale=FEATURES**-0.5)
    return draw(1, TOKENS, SIZE, dtype=dtype), gate_up, down, *routes(4, TOKENS, EXPERTS - 1, K)


@pytest.mark.parametrize("options", [{}, BIASES | {"swiglu_limit": 0.8}], ids=["silu", "gpt-oss"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_tokens_get_the_weighted_sum_of_their_experts(dtype, options):
    options = {
        k: draw(7, *x, dtype=dtype) if isinstance(x, tuple) else x for k, x in options.items()
    }
    run = jax.jit(lambda *args: fused_experts(*args, **options, implementation="xla"))
    args = arrays(dtype)
    out = run(*args)
    assert out.dtype == dtype
    assert relative_error(out, oracle.fused_experts(*args, **options)) < TOLERANCE[dtype]


@jax.jit
def run(*args):
    return fused_experts(*args, implementation="xla")


def test_pairs_without_an_expert_add_nothing_whatever_they_hold():
    x, gate_up, down, indices, scales = arrays()
    outs = []
    for junk in (0.5, np.nan):
        x[-5:], indices[-5:], scales[-5:] = junk, EXPERTS, junk
        indices[0, 1], scales[0, 1] = -1, junk
        gate_up[EXPERTS - 1], down[EXPERTS - 1] = junk, junk  # that no token chose
        outs.append(np.asarray(run(x, gate_up, down, indices, scales)))
    assert not outs[0][-5:].any()
    np.testing.assert_array_equal(*outs)
    x[-5:], scales[-5:], scales[0, 1] = 0, 0, 0
    assert relative_error(outs[0], oracle.fused_experts(x, gate_up, down, indices, scales)) < 1e-5


def test_a_token_has_the_same_bits_beside_others():
    x, gate_up, down, indices, scales = arrays()
    full = np.asarray(run(x, gate_up, down, indices, scales))
    order = np.random.default_rng(1).permutation(TOKENS)
    moved = run(x[order], gate_up, down, indices[order], scales[order])
    np.testing.assert_array_equal(np.asarray(moved), full[order])


def test_gradients_are_those_of_dense_experts():
    """All experts compute all tokens, and JAX differentiates that."""
    x, gate_up, down, indices, scales = (jnp.asarray(a) for a in arrays())
    options = {name: jnp.asarray(draw(7, *shape)) for name, shape in BIASES.items()}
    d_out = draw(9, TOKENS, SIZE)

    def dense(x, gate_up, down, scales, gate_up_bias, down_bias):
        of_expert = (
            jnp.zeros((TOKENS, EXPERTS)).at[jnp.arange(TOKENS)[:, None], indices].add(scales)
        )
        features = jnp.einsum("te,xfie->txfi", x, gate_up) + gate_up_bias
        hidden = jax.nn.silu(features[..., 0]) * features[..., 1]
        return jnp.einsum("txf,xef,tx->te", hidden, down, of_expert) + of_expert @ down_bias

    def ours(x, gate_up, down, scales, gate_up_bias, down_bias):
        biases = dict(gate_up_bias=gate_up_bias, down_bias=down_bias)
        return fused_experts(x, gate_up, down, indices, scales, **biases, implementation="xla")

    args = x, gate_up, down, scales, *options.values()
    for found, wanted in zip(
        *(jax.jit(lambda d, *a, f=f: jax.vjp(f, *a)[1](d))(d_out, *args) for f in (ours, dense)),
        strict=True,
    ):
        assert relative_error(found, oracle.exact(wanted)) < 1e-5


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_caller_may_forbid_promotion(num_devices):
    x, gate_up, down, indices, scales = arrays("bfloat16")
    auto = mesh(num_devices)
    gate_up = jax.device_put(gate_up, NamedSharding(auto, P(None, "tensor")))
    down = jax.device_put(down, NamedSharding(auto, P(None, None, "tensor")))

    def loss(x, gate_up, down, scales):
        def layer(x, gate_up):  # in a loop the rules of gradients are called behind the entry
            return fused_experts(x, gate_up, down, indices, scales, implementation="xla"), None

        return jax.lax.scan(layer, x, gate_up[None])[0].sum()

    with strict_promotion():
        grads = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(x, gate_up, down, scales)
    assert all(np.isfinite(oracle.exact(grad)).all() for grad in grads)


def sharded(axis):
    """Runs on two devices: features or experts of each."""
    by_features = axis == "features"
    specs = (P(None, "tensor"), P(None, None, "tensor")) if by_features else (P("tensor"),) * 2

    def local(x, gate_up, down, indices, scales):
        first = 0 if by_features else jax.lax.axis_index("tensor") * len(gate_up)
        part = fused_experts(x, gate_up, down, indices - first, scales, implementation="xla")
        return jax.lax.psum(part, "tensor")

    args = P(), *specs, P(), P()
    return jax.jit(
        jax.shard_map(local, mesh=mesh(2), in_specs=args, out_specs=P(), check_vma=False)
    )


@pytest.mark.parametrize("axis", ["features", "experts"])
def test_devices_add_up_their_features_or_experts(axis):
    args = arrays()
    assert relative_error(sharded(axis)(*args), oracle.fused_experts(*args)) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=jnp.zeros(SIZE)), r"x.shape=\(16,\) must be \[T, E\]"),
        (dict(down=jnp.zeros((EXPERTS, FEATURES, SIZE))), r"down.shape=\(6, 24, 16\) must be"),
        (dict(gate_up=jnp.zeros((EXPERTS, FEATURES, 3, SIZE))), "gate_up.shape=.* must be"),
        (dict(down_bias=jnp.zeros(SIZE)), r"down_bias.shape=\(16,\) must be \(6, 16\)"),
        (dict(expert_indices=jnp.zeros((TOKENS, 2), int)), r"expert_indices must be int32\[45"),
        (dict(expert_weights=jnp.zeros((TOKENS, K), int)), "must be floating"),
        (dict(expert_weights=jnp.zeros((1, K))), r"must be \[T, k\] with 45 tokens"),
        (dict(down=jnp.zeros((EXPERTS, SIZE, FEATURES), "float16")), "down.dtype=float16"),
        (dict(swiglu_limit=float("nan")), "swiglu_limit"),
        (dict(swiglu_limit=-7.0), "swiglu_limit=-7.0 must be None or more than 0"),
        *(
            (dict([(name, None)]), f"{name}=None must be an array")
            for name in ("x", "gate_up", "down", "expert_indices", "expert_weights")
        ),
        (dict(down_bias="abc"), "down_bias='abc' must be an array"),
        (dict(x=np.zeros((TOKENS, SIZE))), "x.dtype=float64 must be"),
        (dict(implementation=np.array(["xla"])), "implementation=.* must be None or one of"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    names = "x", "gate_up", "down", "expert_indices", "expert_weights"
    with pytest.raises(ValueError, match=message):
        fused_experts(**dict(zip(names, arrays(), strict=True)) | change)
