"""Rotary embeddings: positions to angles, for every scaling of `rope_scaling.py`.

Frequencies are computed in float32 in the order of transformers, whose results they equal but for
the last bit of some powers. At position 100,000 that bit is up to a thousandth of a turn.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.decoder.config import ModelConfig
from models.decoder.rope_scaling import (
    DynamicRopeScaling,
    LinearRopeScaling,
    LongRopeScaling,
    ProportionalRopeScaling,
    RopeScaling,
    YarnRopeScaling,
)

Rotation = tuple[jax.Array, jax.Array]  # cos, sin [..., 1, D / 2]


def rotation(positions: jax.Array, config: ModelConfig, *, whole_rows: bool = False) -> Rotation:
    """Return cosines and sines, `f32[..., 1, D / 2]`, of positions `i32[...]`.

    With the scalings "dynamic" and "longrope", frequencies depend on the length of the sequence. K
    in a cache can't change when its sequence grows, and sequences of several lengths share pages.
    So with a cache the length is that of the context, `config.max_position_embeddings`.

    Args:
        positions: of tokens in their sequences.
        config: sizes and scaling of the decoder.
        whole_rows: whether the last axis of `positions` has all tokens of one sequence, and there
            is no cache. Then its own length counts, as in transformers.
    """
    scaling = config.rope_scaling
    inverse: Any = inverse_frequencies(config, config.max_position_embeddings)
    if whole_rows and isinstance(scaling, DynamicRopeScaling | LongRopeScaling):
        original = scaling.original_max_position_embeddings
        lengths = positions.max(axis=-1, keepdims=True)[..., None, None] + 1  # [..., 1, 1, 1]
        if isinstance(scaling, DynamicRopeScaling):
            grown = lengths.clip(original)  # a base of less is no number
            base = _dynamic_base(config.rope_theta, scaling, config.rotary_dim, grown)
            longer = 1.0 / base ** _exponents(config.rotary_dim)
        else:
            longer = inverse_frequencies(config, original + 1)
        inverse = jnp.where(lengths > original, longer, inverse_frequencies(config, original))
    angles = positions[..., None, None].astype(jnp.float32) * inverse
    factor = np.float32(getattr(scaling, "attention_factor", 1.0))
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def inverse_frequencies(config: ModelConfig, length: int) -> np.ndarray:
    """Return the angles per position, `f32[D / 2]`, in a sequence of this length."""
    scaling, theta, head_dim = config.rope_scaling, config.rope_theta, config.rotary_dim
    if isinstance(scaling, DynamicRopeScaling):
        original = scaling.original_max_position_embeddings
        theta = _dynamic_base(theta, scaling, head_dim, max(length, original))
    # The power is rounded once. NumPy's of float32 is further from that of torch.
    powers = (float(np.float32(theta)) ** _exponents(head_dim).astype(np.float64)).astype(
        np.float32
    )
    return _scaled(powers, scaling, theta, length)


def _scaled(
    powers: np.ndarray, scaling: RopeScaling | None, theta: float, length: int
) -> np.ndarray:
    inverse = np.float32(1) / powers
    if scaling is None or isinstance(scaling, DynamicRopeScaling):
        return inverse
    if isinstance(scaling, LongRopeScaling):
        is_long = length > scaling.original_max_position_embeddings
        factors = np.array(scaling.long_factor if is_long else scaling.short_factor, np.float32)
        return np.float32(1) / (factors * powers)
    factor = np.float32(scaling.factor)
    if isinstance(scaling, LinearRopeScaling):
        return inverse / factor
    if isinstance(scaling, ProportionalRopeScaling):
        turning = int(scaling.partial_rotary_factor * len(powers))
        return np.where(np.arange(len(powers)) < turning, inverse / factor, np.float32(0))
    if isinstance(scaling, YarnRopeScaling):
        keep = 1 - _yarn_ramp(scaling, theta, 2 * len(powers))
        return np.float32(1) / (factor * powers) * (1 - keep) + inverse * keep
    wavelengths = np.float32(2 * math.pi) / inverse
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = np.float32(scaling.original_max_position_embeddings) / wavelengths
    keep = np.clip((turns - np.float32(low)) / np.float32(high - low), 0, 1)
    return (1 - keep) * inverse / factor + keep * inverse


def _yarn_ramp(scaling: YarnRopeScaling, theta: float, head_dim: int) -> np.ndarray:
    """Return `f32[D / 2]`: 0 where a frequency is kept, 1 where it is divided, a line between."""

    def index(turns: float) -> float:
        """Of the frequency that makes this number of turns over the original context."""
        wavelength = scaling.original_max_position_embeddings / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    first, last = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    indices = np.arange(head_dim // 2, dtype=np.float32)
    return np.clip((indices - np.float32(first)) / np.float32(last - first), 0, 1)


def _dynamic_base(theta: float, scaling: DynamicRopeScaling, head_dim: int, length: Any) -> Any:
    """Return the rotary base for `length` tokens, at least the original context."""
    factor, original = scaling.factor, scaling.original_max_position_embeddings
    growth = factor * length / original - (factor - 1)
    return theta * growth ** (head_dim / (head_dim - 2))


def _exponents(head_dim: int) -> np.ndarray:
    return np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
