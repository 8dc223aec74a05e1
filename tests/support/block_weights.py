"""Random weights of what a decoder does between two attentions, and plain experts."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_paged.decoder.between_attentions import BlockWeights, Routing
from pallas_paged.experts import fused_experts


def shapes_of(attended: int, size: int, hidden: int, out: int) -> dict[str, tuple[int, ...]]:
    shapes = {"o": (size, attended), "gate_up": (hidden, 2, size), "down": (size, hidden)}
    shapes |= {"qkv": (out, size), "mlp_norm": (size,), "out_norm": (size,)}
    return {name: shape for name, shape in shapes.items() if out or name != "qkv"}


def weights_of(*sizes: int, dtype=jnp.bfloat16) -> dict[str, np.ndarray]:
    """The weights of a block; those of norms are near 1."""
    found = {
        name: draw(i, *s, dtype=dtype) for i, (name, s) in enumerate(shapes_of(*sizes).items())
    }
    return {name: x if x.ndim > 1 else 1 + x / 8 for name, x in found.items()}


def draw(seed: int, *shape: int, scale: float | None = None, dtype=jnp.bfloat16) -> np.ndarray:
    """Normal numbers; by default the rows of a matrix have about the norm 1."""
    if scale is None:
        scale = shape[-1] ** -0.5 if len(shape) > 1 and shape[0] > 1 else 1.0
    x = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return (x * np.float32(scale)).astype(jnp.dtype(dtype))


def routed_weights(
    attended: int, size: int, hidden: int, out: int, experts: int, *, biases: bool = False
) -> BlockWeights:
    """The weights of a block with experts, and biases that change which are chosen."""
    w = weights_of(attended, size, hidden, out)
    w["gate_up"] = draw(50, experts, hidden, 2, size, scale=size**-0.5)
    w["down"] = draw(51, experts, size, hidden, scale=hidden**-0.5)
    w["router"] = draw(52, experts, size, scale=1.0)
    if biases:
        w |= dict(o_bias=draw(53, size), qkv_bias=draw(54, out))
        w |= dict(router_bias=draw(55, experts, scale=20.0), down_bias=draw(56, experts, size))
        w["gate_up_bias"] = draw(57, experts, hidden, 2)
    return BlockWeights(**w)


def routed_mlp(normed: jax.Array, w: BlockWeights, routing: Routing) -> tuple[jax.Array, jax.Array]:
    """What experts add to the residual, and the chosen ones, by XLA."""
    logits = normed.astype(jnp.float32) @ w.router.astype(jnp.float32).T
    if w.router_bias is not None:
        logits += w.router_bias
    scores, experts = jax.lax.top_k(jax.nn.softmax(logits), routing.num_experts_per_tok)
    if routing.norm_topk_prob:
        scores /= scores.sum(axis=-1, keepdims=True)
    scores *= routing.scaling
    branch = fused_experts(
        normed,
        w.gate_up,
        w.down,
        experts,
        scores,
        gate_up_bias=w.gate_up_bias,
        down_bias=w.down_bias,
        swiglu_limit=routing.swiglu_limit,
        implementation="xla",
    )
    return branch, experts
