"""The options of an attention call that the benches switch on."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import pallas_paged as pp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Which options a call has; the arrays among them follow from the number of heads.

    Attributes:
      soft_cap, sliding_window: as in `paged_attention`.
      alibi: with the slopes of Press et al. for a power of two of heads.
      sinks: with logits about as large as the log-sum-exp of thousands of keys, so that a result
        without them is told to be wrong.
      return_lse: also the log-sum-exp, which is then checked too.
      fixed_split_size: None, or the fixed split of a batch-invariant config.
    """

    soft_cap: float | None = None
    sliding_window: int | None = None
    alibi: bool = False
    sinks: bool = False
    return_lse: bool = False
    fixed_split_size: int | None = None

    @property
    def name(self) -> str:
        """What is on, in words."""
        fields = dataclasses.asdict(self).items()
        return " ".join(k if v is True else f"{k}={v:g}" for k, v in fields if v)

    def slopes(self, num_q_heads: int) -> jax.Array | None:
        """f32`[num_q_heads]`, or None."""
        return jnp.exp2(-8.0 * jnp.arange(1, num_q_heads + 1) / num_q_heads) if self.alibi else None

    def sink_logits(self, num_q_heads: int) -> jax.Array | None:
        """f32`[num_q_heads]`, or None."""
        return jnp.linspace(4.0, 10.0, num_q_heads) if self.sinks else None

    def config(
        self, implementation: str | None, *, num_kv_heads: int, head_dim: int
    ) -> pp.DecodeConfig | pp.MosaicDecodeConfig | None:
        """None, or a decode config with the fixed split, of the implementation's kind."""
        if self.fixed_split_size is None:
            return None
        num_sms = getattr(jax.devices()[0], "core_count", None) or 1
        if implementation and implementation.startswith("mosaic"):
            return pp.MosaicDecodeConfig(
                block_k=64,
                num_programs=max(1, 2 * num_sms // num_kv_heads),
                num_stages=3,
                fixed_split_size=self.fixed_split_size,
            )
        return pp.DecodeConfig(  # tiles of 16 KB of bf16, four programs to an SM
            block_k=max(16, min(8192 // head_dim, 128)),
            num_programs=max(1, 4 * num_sms // num_kv_heads),
            num_warps=2,
            num_stages=2,
            fixed_split_size=self.fixed_split_size,
        )

    def arguments(self, num_q_heads: int) -> dict[str, Any]:
        """Keyword arguments of both attention functions."""
        return {
            "soft_cap": self.soft_cap,
            "sliding_window": self.sliding_window,
            "alibi_slopes": self.slopes(num_q_heads),
            "sinks": self.sink_logits(num_q_heads),
            "return_lse": self.return_lse,
        }


PLAIN = Options()
