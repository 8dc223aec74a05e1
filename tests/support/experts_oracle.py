"""Products of experts in float64 NumPy, pair after pair, and their inputs."""

import jax.numpy as jnp
import numpy as np


def draw(seed: int, *shape: int, dtype="float32", scale=1.0):
    """Normal values; of two calls with one seed the same."""
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return values.astype(np.float32).astype(jnp.dtype(dtype))


def exact(x):
    """An array in float64."""
    return np.asarray(x).astype(np.float64)


def grouped_matmul(x, w, group_sizes, *, transpose_rhs=False):
    x, w = exact(x), exact(w)
    if transpose_rhs:
        w = w.swapaxes(1, 2)
    out = np.zeros((len(x), w.shape[2]))
    start = 0
    for matrix, size in zip(w, group_sizes, strict=True):
        out[start : start + size] = x[start : start + size] @ matrix
        start += size
    return out


def fused_experts(
    x, gate_up, down, indices, scales, *, gate_up_bias=None, down_bias=None, swiglu_limit=None
):
    x, gate_up, down, scales = map(exact, (x, gate_up, down, scales))
    out = np.zeros_like(x)
    for token, experts in enumerate(indices):
        for expert, scale in zip(experts, scales[token], strict=True):
            if not 0 <= expert < len(down):
                continue
            gate, up = (gate_up[expert] @ x[token]).T
            if gate_up_bias is not None:
                gate, up = np.stack([gate, up]) + exact(gate_up_bias)[expert].T
            if swiglu_limit is None:
                hidden = gate / (1 + np.exp(-gate)) * up
            else:
                gate, up = np.minimum(gate, swiglu_limit), np.clip(up, -swiglu_limit, swiglu_limit)
                hidden = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
            row = down[expert] @ hidden
            if down_bias is not None:
                row += exact(down_bias)[expert]
            out[token] += scale * row
    return out


def routes(seed: int, num_tokens: int, num_experts: int, k: int):
    """Different experts of each token `i32[T, k]`, and their weights `f32[T, k]`."""
    rng = np.random.default_rng(seed)
    indices = np.stack([rng.permutation(num_experts)[:k] for _ in range(num_tokens)])
    return indices.astype(np.int32), rng.random((num_tokens, k)).astype(np.float32)
