"""The options of attention, written once: their names, their meanings and the checks of them."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, Literal, SupportsFloat, TypedDict, cast, get_args

from jax.typing import ArrayLike

from pallas_paged.checks import (
    check_flag,
    check_implementation,
    check_interpret,
    static_integer,
    static_number,
)
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.mosaic_sm80.config import MosaicSm80DecodeConfig, MosaicSm80RaggedConfig
from pallas_paged.kernels.mosaic_sm90.config import MosaicSm90RaggedConfig
from pallas_paged.kernels.triton.config import DecodeConfig, RaggedConfig

Implementation = Literal["triton", "mosaic_sm90", "mosaic_sm80", "xla"]
"""Families of kernels; `AttentionOptions.implementation` has what they are."""

_CAPS = (1e-30, 1e36)  # logits are divided by it, and the quotients must be normal float32
_SPLIT_MULTIPLE = 64  # every kernel has a block size that divides it
_LARGEST_SPLIT = 2**30
# What other libraries call the arguments.
_OUR_NAMES = {
    "softmax_scale": "sm_scale",
    "scale": "sm_scale",
    "softcap": "soft_cap",
    "logits_soft_cap": "soft_cap",
    "attn_logits_soft_cap": "soft_cap",
    "window_size": "sliding_window",
    "window_left": "sliding_window",
    "page_indices": "block_tables",
    "block_table": "block_tables",
    "lengths": "seq_lens",
    "kv_lens": "seq_lens",
    "context_lens": "seq_lens",
    "cu_seqlens_q": "cu_q_lens",
}
_OF_LAYER = ("k_pages", "v_pages", "k_scales", "v_scales", "kv_layout", "v_head_dim")


class AttentionOptions(TypedDict, total=False):
    """Options of attention. None means that an option is not used.

    Attributes:
        num_seqs: i32`[]`: sequences from this one on count as empty, whatever `seq_lens`,
            `block_tables` and `cu_q_lens` hold for them. None means all sequences.
        sm_scale: factor of q.k; None means `head_dim ** -0.5`. Static.
        soft_cap: c of `c * tanh(x / c)`, from 1e-30 to 1e36. Static.
        sliding_window: a query at p sees the keys j with `p - sliding_window < j <= p`. Blocks left
            of the window are not read. Static.
        alibi_slopes: f32`[num_q_heads]` (Press et al. 2022).
        sinks: f32`[num_q_heads]`, one more logit per head in the denominator, without a value, as
            in gpt-oss (after Xiao et al. 2024). `lse` includes it.
        implementation: `"triton"`, `"mosaic_sm90"` and `"mosaic_sm80"`, families of GPU kernels;
            `"xla"`, for any device; or None for the fastest that can do the call on the device,
            which is `"xla"` without a GPU. A named implementation never falls back. What each can
            do is a table in docs/attention.md. Static.
        interpret: run the kernels of the named family interpreted, on any device, slowly. Static.
        config: of the kernel: `DecodeConfig` and `RaggedConfig` of Triton, `MosaicSm90RaggedConfig`
            of `"mosaic_sm90"`, `MosaicSm80DecodeConfig` and `MosaicSm80RaggedConfig` of
            `"mosaic_sm80"`. On a GPU its type also chooses the implementation, unless one is named.
            `"xla"` ignores it. None means the heuristic's choice. Static.
        fixed_split_size: tokens after which every sequence is split, a multiple of 64. The bits of
            a sequence then do not depend on the other sequences of the batch nor on their number
            (batch invariance), at the cost of memory for an f32 partial result for every
            `fixed_split_size` tokens that the table has room for. Excludes `config`. Static.
    """

    num_seqs: ArrayLike | None
    sm_scale: SupportsFloat | None
    soft_cap: SupportsFloat | None
    sliding_window: int | None
    alibi_slopes: ArrayLike | None
    sinks: ArrayLike | None
    implementation: Implementation | None
    interpret: bool
    config: (
        DecodeConfig
        | RaggedConfig
        | MosaicSm90RaggedConfig
        | MosaicSm80DecodeConfig
        | MosaicSm80RaggedConfig
        | None
    )
    fixed_split_size: int | None


class RaggedAttentionOptions(AttentionOptions, total=False):
    """Options of ragged attention.

    Attributes:
        causal: False lets every query see all keys of its sequence, as in encoders, and in
            attention to the keys of another text, which may be fewer than the queries. A window
            then still hides the keys left of it, and none to the right. ALiBi takes distances as
            `-abs(key position - query position)`, as FlashAttention does. Default True. Static.
        tree_mask: bool`[B, max_q, max_q]`: query i of sequence b sees the key of its newest token j
            (of q_len) where `tree_mask[b, i, j]`, in place of causality; it sees all older keys.
            Positions, for the window and for ALiBi, stay those of the slots. Queries past max_q see
            only the older keys.
        expected_seqs: sequences that are likely to have queries, where most of the B are empty. The
            kernel and its config are chosen for that number. None means all. Static.
    """

    causal: bool
    tree_mask: ArrayLike | None
    expected_seqs: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticOptions:
    """The options of a call that are known while tracing, checked, as in `AttentionOptions`."""

    logits: LogitOptions
    implementation: Implementation | None = None
    interpret: bool = False
    config: Any = None
    fixed_split_size: int | None = None
    expected_seqs: int | None = None


def check_names(function: str, options: Mapping[str, Any], allowed: Any, *refused: str) -> None:
    """Raise TypeError unless all options have names that a function takes.

    Args:
        function: its name, for messages.
        options: as the caller gave them.
        allowed: a `TypedDict` of options.
        refused: those of them that the function does not take.
    """
    names = [name for name in allowed.__annotations__ if name not in refused]
    for name in options:
        if name in names:
            continue
        message = f"{function}() got an unexpected keyword argument {name!r}"
        near = _OUR_NAMES.get(name) or next(iter(difflib.get_close_matches(name, names)), None)
        if name in _OF_LAYER:
            message += f": it belongs to the layer, LayerKV(k_pages, v_pages, {name}=...)"
        elif name in refused:
            message += ", which it does not support"
        elif near is not None:
            message += f"; did you mean {near!r}?"
        raise TypeError(message)


def static_options(head_dim: int, options: Mapping[str, Any]) -> StaticOptions:
    """Return the static options among those of a call, checked.

    Raises:
        ValueError: a value breaks a rule of `AttentionOptions`.
    """
    implementation: Any = options.get("implementation")
    interpret = options.get("interpret", False)
    check_implementation(implementation, get_args(Implementation))
    check_interpret(interpret, implementation)
    expected_seqs = options.get("expected_seqs")
    if expected_seqs is not None:
        expected_seqs = static_integer("expected_seqs", expected_seqs)
    return StaticOptions(
        logits=_logit_options(head_dim, options),
        implementation=cast(Implementation | None, implementation),
        interpret=interpret,
        config=options.get("config"),
        fixed_split_size=_checked_split(options.get("fixed_split_size")),
        expected_seqs=expected_seqs,
    )


def _logit_options(head_dim: int, options: Mapping[str, Any]) -> LogitOptions:
    sm_scale, soft_cap = options.get("sm_scale"), options.get("soft_cap")
    window, causal = options.get("sliding_window"), options.get("causal", True)
    scale = head_dim**-0.5 if sm_scale is None else static_number("sm_scale", sm_scale)
    cap = None if soft_cap is None else static_number("soft_cap", soft_cap)
    if cap is not None and not _CAPS[0] <= cap <= _CAPS[1]:
        raise ValueError(f"{soft_cap=} must be from {_CAPS[0]:g} to {_CAPS[1]:g}")
    if window is not None:
        window = static_integer("sliding_window", window)
    check_flag("causal", causal)
    if not causal and options.get("tree_mask") is not None:
        raise ValueError(f"{causal=} excludes a tree_mask, which replaces causality")
    return LogitOptions(sm_scale=scale, soft_cap=cap, sliding_window=window, causal=causal)


def _checked_split(value: Any) -> int | None:
    if value is None:
        return None
    size = static_integer("fixed_split_size", value)
    if size % _SPLIT_MULTIPLE or size > _LARGEST_SPLIT:
        raise ValueError(
            f"fixed_split_size={value!r} must be a multiple of {_SPLIT_MULTIPLE}, at most 2**30"
        )
    return size
