"""The search for the thresholds of top_k and top_p against sorting in NumPy."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_paged.engine.sampling_filters import find_limits, num_blocks
from pallas_paged.kernels.triton.sampling_search import search
from tests.support.marks import slow
from tests.support.promotion import strict_promotion
from tests.support.sampling_rows import deepest_kept, sampling_implementations

VOCAB, ROWS = 1536, 24  # of each kind


@partial(jax.jit, static_argnames="implementation")
def limits(logits, temperature, top_k, top_p, implementation):
    """The gap from which on tokens are dropped."""
    best = jnp.max(logits, axis=1, keepdims=True)
    if implementation == "xla":
        return find_limits(best - logits, top_k, top_p, temperature, 2)
    interpret = implementation == "triton_interpret"
    sizes = dict(num_warps=2, num_loads=2) if interpret else {}
    return search(logits, best, temperature, top_k, top_p, interpret=interpret, **sizes)


def logits_by_kind(rng):
    x = rng.normal(size=(ROWS, VOCAB))
    kinds = {"flat": 0.1 * x, "normal": 2 * x, "peaked": 8 * x, "tiny": 1e-6 * x}
    kinds |= {"tied": np.round(2 * x), "bf16": (3 * x).astype(ml_dtypes.bfloat16)}
    kinds["huge range"] = x * 10 ** rng.uniform(-30, 30, x.shape)
    kinds["masked"] = np.where(rng.random(x.shape) < 0.7, -np.inf, x)
    kinds["equal"] = np.full(x.shape, 3.0)
    return {name: some.astype(np.float32) for name, some in kinds.items()}


@pytest.mark.parametrize("implementation", sampling_implementations())
@pytest.mark.parametrize("seed", [0, *slow(range(1, 5))])
def test_exactly_the_tokens_that_sorting_keeps_are_kept(implementation, seed):
    """But for rows where rounding decides whether a token's predecessors sum to top_p."""
    rng = np.random.default_rng(seed)
    kinds = logits_by_kind(rng)
    logits = np.concatenate([*kinds.values()])
    count = len(logits)
    gap = logits.max(axis=1, keepdims=True) - logits
    temperature = rng.choice([0.5, 1, 1, 3], count).astype(np.float32)
    top_k = rng.choice([0, 0, 1, 2, 20, 50, 700, VOCAB, VOCAB + 9], count).astype(np.int32)
    top_p = rng.choice([1, 0.01, 0.3, 0.9, 0.95, 0.999, 1 - 2**-24], count).astype(np.float32)
    with strict_promotion():
        found = np.asarray(limits(logits, temperature, top_k, top_p, implementation))
    tolerance = 1e-6 if jax.default_backend() == "cpu" else 1e-5  # of f32 sums and exponentials
    num_close = 0
    for row in range(count):
        options = temperature[row], top_k[row], top_p[row]
        deepest, margin = deepest_kept(gap[row], *options)
        if margin < tolerance:
            num_close += 1
            continue
        one = gap[row][np.isfinite(gap[row])]  # others are never drawn
        message = f"{[*kinds][row // ROWS]} logits, row {row}, {options}"
        np.testing.assert_array_equal(one < found[row], one <= deepest, message)
    assert num_close <= count // 8


@pytest.mark.parametrize(
    ("vocab_size", "wanted"),
    [(128256, 256), (151936, 128), (50257, 29), (37, 37), (8, 8), (100003, 1), (50264, 8)],
)
def test_blocks_of_a_vocabulary_are_equal_and_can_be_shared_out(vocab_size, wanted):
    blocks = num_blocks(vocab_size)
    assert blocks == wanted and vocab_size % blocks == 0
    for num_devices in (2, 4, 8, 16):
        assert vocab_size % num_devices or blocks % num_devices == 0
