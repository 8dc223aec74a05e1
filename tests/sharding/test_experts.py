"""Routed experts on a mesh: the weights stay where they are, and a sum over devices follows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_paged.experts import fused_experts
from tests.support.devices import mesh
from tests.support.marks import slow
from tests.support.placement import collectives

TOKENS, EXPERTS, FEATURES, SIZE, K = 12, 4, 8, 16, 2
SHAPES = dict(
    x=(TOKENS, SIZE),
    gate_up=(EXPERTS, FEATURES, 2, SIZE),
    down=(EXPERTS, SIZE, FEATURES),
    expert_weights=(TOKENS, K),
    gate_up_bias=(EXPERTS, FEATURES, 2),
    down_bias=(EXPERTS, SIZE),
)
OF_WEIGHTS = ("gate_up", "down", "gate_up_bias", "down_bias")
SPECS = {
    "experts": dict.fromkeys(OF_WEIGHTS, P("tensor")),
    "features": dict(
        gate_up=P(None, "tensor"), down=P(None, None, "tensor"), gate_up_bias=P(None, "tensor")
    ),
    "tokens": dict(x=P("tensor"), expert_weights=P("tensor")),
}
RNG = np.random.default_rng(0)
ARRAYS = {name: np.float32(RNG.standard_normal(shape) / 2) for name, shape in SHAPES.items()}
INDICES = np.int32(RNG.integers(0, EXPERTS + 1, (TOKENS, K)))  # some pairs have no expert


def routed(arrays):
    return fused_experts(**arrays, expert_indices=INDICES, swiglu_limit=1.5)


def both(arrays):
    """The result, and the gradients of all arrays."""

    def loss(arrays):
        out = routed(arrays)
        return jnp.sum(out * out), out

    (_, out), gradients = jax.value_and_grad(loss, has_aux=True)(arrays)
    return out, gradients


@pytest.mark.cpu_budget(6)  # compiles on a mesh
@pytest.mark.parametrize(
    ("sharded", "kind"),
    [("experts", AxisType.Auto), ("features", AxisType.Explicit),
     *slow([("features", AxisType.Auto), ("experts", AxisType.Explicit),
            ("tokens", AxisType.Auto), ("tokens", AxisType.Explicit)])],
    ids=str,
)  # fmt: skip
def test_equals_one_device_and_moves_no_weight(sharded, kind):
    where = Mesh(mesh(2).devices, ("tensor",), axis_types=(kind,))
    specs = SPECS[sharded]
    arrays = {
        k: jax.device_put(x, NamedSharding(where, specs.get(k, P()))) for k, x in ARRAYS.items()
    }
    out, gradients = jax.jit(both)(arrays)
    expected_out, expected = jax.jit(both)(ARRAYS)
    np.testing.assert_allclose(out, expected_out, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-4, atol=1e-4, err_msg=name)
    found = collectives(jax.jit(routed).lower(arrays).compile())
    assert len(found) == (0 if sharded == "tokens" else 1), found
    assert all("all-reduce" in line for line in found)


def test_vmap_has_the_same_results():
    xs = np.stack([ARRAYS["x"], -ARRAYS["x"]])
    found = jax.jit(jax.vmap(lambda x: routed(ARRAYS | {"x": x})))(xs)
    expected = [routed(ARRAYS | {"x": x}) for x in xs]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
