"""The KV cache of a model: of which dtype, with whose scales, in how many bytes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import pallas_paged as pp
from models.config import ModelConfig

KV_DTYPES = {
    "int8": "int8",
    "fp8": "float8_e4m3fn",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
}


def check_kv_dtype(kv_dtype: str | None) -> None:
    """Refuses what is neither None, for the dtype of the model, nor a name of `KV_DTYPES`."""
    if kv_dtype is not None and kv_dtype not in KV_DTYPES:
        raise ValueError(f"{kv_dtype=} must be one of {', '.join(KV_DTYPES)}, or None")


def pool_dtype(kv_dtype: str | None, model_dtype: DTypeLike) -> jnp.dtype:
    """The dtype of the pages.

    Args:
        kv_dtype: a name of `KV_DTYPES`; None takes the dtype of the model.
        model_dtype: of the parameters, and with them of queries, keys and values.

    Raises:
        ValueError: another name, or neither the dtype of the model nor one byte an element.
    """
    check_kv_dtype(kv_dtype)
    own = jnp.dtype(model_dtype)
    dtype = own if kv_dtype is None else jnp.dtype(KV_DTYPES[kv_dtype])
    if dtype != own and dtype.itemsize > 1:
        raise ValueError(f"{kv_dtype=} must be int8, fp8 or the dtype of the model, {own.name}")
    return dtype


def create_pool(
    config: ModelConfig, *, num_pages: int, page_size: int, dtype: DTypeLike
) -> pp.KVPool:
    """A pool of zeros for a model; a float8 one takes the scales that the model brings, if any.

    Args:
        config: of the model.
        num_pages, page_size, dtype: as in `create_kv_pool`.
    """
    # They were calibrated for the range of float8; in int8 tokens have scales of their own.
    calibrated = jnp.dtype(dtype) == jnp.float8_e4m3fn and config.k_scales
    return pp.create_kv_pool(
        num_layers=config.num_layers,
        num_pages=num_pages,
        num_kv_heads=config.num_kv_heads,
        page_size=page_size,
        head_dim=config.head_dim,
        dtype=dtype,
        k_scales=config.k_scales if calibrated else None,
        v_scales=config.v_scales if calibrated else None,
    )


def pool_bytes(pool: pp.KVPool) -> int:
    """The size of a pool, of arrays or of their shapes: K, V and their scales in all layers."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pool))


def page_bytes(config: ModelConfig, *, page_size: int, dtype: DTypeLike) -> int:
    """What a page more takes in all layers, sizes as in `create_pool`."""
    make = partial(create_pool, config, num_pages=1, page_size=page_size, dtype=dtype)
    return pool_bytes(jax.eval_shape(make))
