"""Results, shared memory and mailboxes of the kernel between two attentions of one row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.checks import pytree
from pallas_paged.decoder.kernels.one_row_mailbox import EMPTY
from pallas_paged.decoder.kernels.one_row_product import HALF
from pallas_paged.decoder.kernels.one_row_router import SLOTS, ChoiceScratch
from pallas_paged.decoder.kernels.operands import BlockWeights
from pallas_paged.kernels.call import result_shape
from pallas_paged.kernels.mosaic_sm90.config import (
    EXPERTS_UNIT,
    HIDDEN_UNIT,
    ROW_UNIT,
    DecoderBlockConfig,
    padded,
)
from pallas_paged.kernels.mosaic_sm90.config import LINEAR_TILE as TILE
from pallas_paged.kernels.mosaic_sm90.ring import wgmma_transforms

CLEARED = 256  # elements of a mailbox that a program clears at once
_PADDING = 64  # elements that are read behind a row


@pytree
class OneRowOutputs:
    """Refs to device memory, or their types."""

    residual: Any  # [1, E]
    out: Any  # [1, N], or the norm [1, E]
    experts: Any = None  # i32[SLOTS]


@pytree
class OneRowScratch:
    """Refs in shared memory, or their types."""

    weights: Any  # [num_stages, 2 * TILE, HALF], one half below the other
    x: Any  # [columns of the longest part of a row + _PADDING]
    residual: Any  # [E]
    full: Any  # barriers [num_stages], complete when both halves have arrived
    free: Any  # barriers [num_stages], complete when they were used
    choice: Any = None  # `ChoiceScratch`


def padded_features(weights: BlockWeights) -> dict[str, int]:
    """Return the features of each weight, in the order of use, as they are padded in mailboxes."""
    size = padded(weights.mlp_norm.shape[0], ROW_UNIT)
    found = {"o": size}
    if weights.router is not None:
        found["router"] = padded(len(weights.router), EXPERTS_UNIT)
    found |= {"gate_up": padded(weights.gate_up.shape[-3], HIDDEN_UNIT), "down": size}
    return found if weights.qkv is None else {**found, "qkv": len(weights.qkv)}


def output_types(weights: BlockWeights, dtype: Any) -> OneRowOutputs:
    """Return the types of the results, in device memory."""
    size, qkv = weights.mlp_norm.shape[0], weights.qkv
    return OneRowOutputs(
        residual=result_shape((1, size), dtype),
        out=result_shape((1, size if qkv is None else qkv.shape[0]), dtype),
        experts=None if weights.router is None else result_shape((SLOTS,), jnp.int32),
    )


def scratch_types(weights: BlockWeights, config: DecoderBlockConfig, dtype: Any) -> OneRowScratch:
    """Return the types of the refs in shared memory."""
    num_features = padded_features(weights)
    size, hidden_size = num_features["o"], num_features["gate_up"]
    if weights.router is None:
        hidden_size //= config.down_splits
    hidden_size *= config.experts_per_split
    columns = max(size, weights.o.shape[1] // config.o_splits, hidden_size)
    return OneRowScratch(
        weights=plgpu.SMEM(
            (config.num_stages, 2 * TILE, HALF), dtype, transforms=wgmma_transforms(dtype)
        ),
        x=plgpu.SMEM((columns + _PADDING,), dtype),
        residual=plgpu.SMEM((size,), dtype),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=config.num_stages),
        free=plgpu.Barrier(num_barriers=config.num_stages),
        choice=None if weights.router is None else ChoiceScratch.types(len(weights.router)),
    )


def new_mailboxes(config: DecoderBlockConfig, weights: BlockWeights) -> tuple[jax.Array, jax.Array]:
    """Return two cleared mailboxes, for the first of several calls with weights of these sizes."""
    num_features = padded_features(weights)
    num_elements = (config.o_splits + config.down_splits) * num_features["o"] + weights.o.shape[1]
    if weights.router is None:
        num_elements += num_features["gate_up"]
    else:
        num_logits = config.router_splits * num_features["router"]
        num_elements += config.experts_per_token * num_features["gate_up"]
        num_elements += padded(num_logits, CLEARED)
    empty = jnp.full(num_elements, EMPTY, jnp.int32)
    return empty, empty
