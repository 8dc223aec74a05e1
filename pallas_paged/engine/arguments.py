"""Checks of what an engine is made of."""

from __future__ import annotations

from typing import Any

import jax

from pallas_paged.checks import check_has, check_integer
from pallas_paged.engine.config import EngineConfig
from pallas_paged.engine.device.kv_cache import KVCacheSpec
from pallas_paged.engine.requests.input_processor import check_lists

_OF_MODEL = "vocab_size", "max_model_len", "eos_token_ids", "kv_cache_spec", "logits", "__call__"


def check_arguments(
    model: object, config: EngineConfig | None, tokenizer: object, devices: Any
) -> None:
    """Raise ValueError if an argument of `Engine` has a wrong type."""
    check_model(model)
    if not isinstance(config, EngineConfig | None):
        raise ValueError(f"{config=} must be an EngineConfig")
    if tokenizer is not None:
        check_has("tokenizer", tokenizer, "encode", "decode")
    if devices is not None:
        check_lists(devices=devices)
        for device in devices:
            if not isinstance(device, jax.Device):
                raise ValueError(f"devices has {device!r:.80}, which must be a jax.Device")


def check_model(model: Any) -> None:
    """Raise ValueError if an object is not what `Model` describes."""
    check_has("model", model, *_OF_MODEL)
    if type(model).__hash__ is None:
        raise ValueError(f"{model=} must be hashable")
    if not isinstance(model.kv_cache_spec, KVCacheSpec):
        raise ValueError(f"{model.kv_cache_spec=} must be a KVCacheSpec")
    check_integer("model.vocab_size", model.vocab_size, 1)
    check_integer("model.max_model_len", model.max_model_len, 1)
    if not isinstance(model.eos_token_ids, tuple):
        raise ValueError(f"{model.eos_token_ids=} must be a tuple")
    for token_id in model.eos_token_ids:
        check_integer("token id of model.eos_token_ids", token_id, 0)
