"""The options of an attention call that the benches switch on."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a call; arrays among them are made for the call's number of heads.

    Attributes:
        soft_cap: as in `paged_attention`.
        sliding_window: as in `paged_attention`.
        alibi: with the slopes of Press et al. for a power of two of heads.
        sinks: with logits about as large as the log-sum-exp of thousands of keys, so that a result
            without sinks counts as wrong.
        return_lse: also return the log-sum-exp, which is then checked too.
        fixed_split_size: as in `paged_attention`.
    """

    soft_cap: float | None = None
    sliding_window: int | None = None
    alibi: bool = False
    sinks: bool = False
    return_lse: bool = False
    fixed_split_size: int | None = None

    @property
    def name(self) -> str:
        """The options that are on, as text."""
        fields = dataclasses.asdict(self).items()
        return " ".join(k if v is True else f"{k}={v:g}" for k, v in fields if v)

    def slopes(self, num_q_heads: int) -> jax.Array | None:
        """`f32[num_q_heads]`, or None."""
        return jnp.exp2(-8.0 * jnp.arange(1, num_q_heads + 1) / num_q_heads) if self.alibi else None

    def sink_logits(self, num_q_heads: int) -> jax.Array | None:
        """`f32[num_q_heads]`, or None."""
        return jnp.linspace(4.0, 10.0, num_q_heads) if self.sinks else None

    def arguments(self, num_q_heads: int) -> dict[str, Any]:
        """Keyword arguments of an attention function, without the options that are off."""
        arguments = {
            "soft_cap": self.soft_cap,
            "sliding_window": self.sliding_window,
            "alibi_slopes": self.slopes(num_q_heads),
            "sinks": self.sink_logits(num_q_heads),
            "return_lse": self.return_lse or None,
            "fixed_split_size": self.fixed_split_size,
        }
        return {name: value for name, value in arguments.items() if value is not None}


PLAIN = Options()
