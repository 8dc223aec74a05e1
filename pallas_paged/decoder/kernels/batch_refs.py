"""Results and shared memory of the kernel between two attentions of several rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.checks import pytree
from pallas_paged.decoder.kernels.batch_config import (
    BLOCKS_PER_STAGE,
    COLUMNS_PER_BLOCK,
    COPIES_PER_STAGE,
    GROUP_ROWS,
    DecoderBatchConfig,
)
from pallas_paged.decoder.kernels.operands import BlockInputs
from pallas_paged.kernels.call import result_shape
from pallas_paged.kernels.mosaic_sm90.ring import wgmma_transforms

COUNTERS = 128  # elements: 4 counters, each in its own cache line
SUMS = 4 * GROUP_ROWS  # of squares, in shared memory


@pytree
class BatchOutputs:
    """Refs to device memory, or their types. The kernel alone uses all but the first two."""

    residual: Any  # [R, E]
    out: Any  # [R, N], or the norm [R, E]
    x: Any  # [R, E], the residual times the weight of a norm
    hidden: Any  # [R, F]
    squares: Any  # f32[num_parts * num_consumers, num_programs / 4, SUMS], sums of each row


@pytree
class BatchScratch:
    """Refs in shared memory, or their types."""

    weights: Any  # [num_stages, stage_features, BLOCKS_PER_STAGE * COLUMNS_PER_BLOCK]
    x: Any  # [num_x_stages, num_consumers, 64, COLUMNS_PER_BLOCK]
    sums: Any  # f32[num_consumers, SUMS]
    full: Any  # barriers [num_stages], complete when all copies have arrived
    free: Any  # barriers [num_stages], complete when they were used
    x_full: Any  # barriers [num_x_stages]
    x_free: Any
    ready: Any  # barrier, complete when this program has stored its part of the next activations
    summed: Any  # barrier, complete when the sums of squares are there
    may_send: Any  # barriers of the cluster
    sent: Any


def output_types(inputs: BlockInputs, config: DecoderBatchConfig) -> BatchOutputs:
    """Return the types of the results, in device memory."""
    (num_rows, size), dtype = inputs.residual.shape, inputs.residual.dtype
    num_groups = config.num_parts * config.num_consumers
    out_size = size if inputs.weights.qkv is None else inputs.weights.qkv.shape[0]
    return BatchOutputs(
        residual=result_shape((num_rows, size), dtype),
        out=result_shape((num_rows, out_size), dtype),
        x=result_shape((num_rows, size), dtype),
        hidden=result_shape((num_rows, inputs.weights.gate_up.shape[0]), dtype),
        squares=result_shape((num_groups, -(-config.num_programs // 4), SUMS), jnp.float32),
    )


def scratch_types(config: DecoderBatchConfig, dtype: Any) -> BatchScratch:
    """Return the types of the refs in shared memory."""
    transforms = wgmma_transforms(dtype)
    num_stages, num_x_stages = config.num_stages, config.num_x_stages
    consumers = config.num_consumers
    x_barrier = plgpu.Barrier(num_arrivals=consumers, num_barriers=num_x_stages)
    in_cluster: Any = plgpu.Barrier()
    if config.cluster_size > 1:
        in_cluster = plgpu.ClusterBarrier(collective_axes=("rank",), num_arrivals=consumers)
    return BatchScratch(
        weights=plgpu.SMEM(
            (num_stages, config.stage_features, BLOCKS_PER_STAGE * COLUMNS_PER_BLOCK),
            dtype,
            transforms=transforms,
        ),
        x=plgpu.SMEM(
            (num_x_stages, consumers, GROUP_ROWS, COLUMNS_PER_BLOCK), dtype, transforms=transforms
        ),
        sums=plgpu.SMEM((consumers, SUMS), jnp.float32),
        full=plgpu.Barrier(num_arrivals=COPIES_PER_STAGE, num_barriers=num_stages),
        free=plgpu.Barrier(num_arrivals=consumers, num_barriers=num_stages),
        x_full=x_barrier,
        x_free=x_barrier,
        ready=plgpu.Barrier(num_arrivals=consumers),
        summed=plgpu.Barrier(),
        may_send=in_cluster,
        sent=in_cluster,
    )


def new_counters() -> tuple[jax.Array, jax.Array]:
    """Return two sets of cleared counters, for the first of several calls."""
    clear = jnp.zeros(COUNTERS, jnp.int32)
    return clear, clear
