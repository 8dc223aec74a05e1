"""The decoder's weights on a mesh: the axis along which devices share each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from models.decoder.config import ModelConfig, is_vocab_sharded
from models.decoder.decoder import Decoder
from pallas_paged.pages.sharding import TENSOR_AXIS, kv_head_repeats

# As in Megatron: the products before attention and SwiGLU are sharded by outputs, the others by
# inputs, so that devices add up their parts once after each; routed experts, whose weights are two
# such products, by experts. A bias that has no such axis is added after the sum, and replicated, as
# are the norms.
_SHARDED_AXES = {
    "embed_tokens": 0,
    "lm_head": 0,
    "qkv_proj": 0,  # KV heads, each with its query heads
    "o_proj": 1,
    "gate_up_proj": 0,
    "down_proj": 1,
    "q_proj": 0,  # of latent attention: heads; what makes and norms latents is replicated
    "q_b_proj": 0,
    "k_up_proj": 0,
    "v_up_proj": 0,
}


def param_spec(path: tuple[Any, ...], shape: tuple[int, ...]) -> PartitionSpec:
    """Return how a parameter is sharded, by its path in the decoder."""
    module = path[-2]
    axis = 0 if "experts" in path else _SHARDED_AXES.get(module)
    if path[-1] == "sinks" or (module in ("q_norm", "k_norm") and len(shape) == 3):
        axis = 0  # heads
    if module in ("embed_tokens", "lm_head") and not is_vocab_sharded(shape[0]):
        axis = None
    if axis is None or axis >= len(shape):
        return PartitionSpec()
    return PartitionSpec(*[None] * axis, TENSOR_AXIS)


def param_specs(params: nnx.State) -> Any:
    """Return the specs of a decoder's parameters over the axis "tensor", in their structure.

    A vocabulary that is not a multiple of 64 may not be divisible: its embeddings are then
    replicated.
    """
    specs = [
        (path, param.replace(param_spec(path, param.shape)))
        for path, param in nnx.to_flat_state(params)
    ]
    return nnx.from_flat_state(specs)


def config_on(config: ModelConfig, num_devices: int) -> ModelConfig:
    """Return the sizes of the same model with at least as many KV heads as devices.

    Raises:
        ValueError: the devices can't share the heads, the MLP or the experts evenly.
    """
    heads = {}
    for name in ("num_kv_heads", "window_num_kv_heads"):
        if (num_kv_heads := getattr(config, name)) is not None:
            repeats = kv_head_repeats(
                num_q_heads=config.num_q_heads,
                num_kv_heads=num_kv_heads,
                num_devices=num_devices,
            )
            heads[name] = num_kv_heads * repeats
    intermediate_size, experts = config.intermediate_size, config.experts
    if intermediate_size % num_devices and (experts is None or experts.dense_layers):
        raise ValueError(f"{intermediate_size=} must be a multiple of {num_devices=}")
    if experts is not None:
        n_routed_experts, shared_size = experts.n_routed_experts, experts.shared_size
        if n_routed_experts % num_devices or shared_size % num_devices:
            raise ValueError(
                f"{n_routed_experts=} and the {shared_size} features of shared experts must be "
                f"multiples of {num_devices=}"
            )
    return replace(config, **heads)


def repeat_kv_heads(decoder: Decoder, num_devices: int) -> Decoder:
    """Return the same model with at least as many KV heads as devices.

    Where there are fewer, each is repeated, and its query heads are shared out among its copies, so
    that each device gets one. The K and V of a head are then computed and cached for each copy.
    Traceable and differentiable: a trainer can keep the model as it is, and repeat the heads of
    each version that it gives to an engine.

    Args:
        decoder: with its weights. The result shares all of them but q, k and v.
        num_devices: `EngineConfig.tensor_parallel_size`.

    Raises:
        ValueError: the devices can't share the heads or the MLP evenly.
    """
    config = config_on(decoder.config, num_devices)
    if config == decoder.config:
        return decoder
    params = []
    for path, param in nnx.to_flat_state(nnx.state(decoder)):
        if path[-2] == "qkv_proj":
            heads = param.get_value()  # [Hkv, Hq / Hkv + 2, D, ...], or + 1 where V is K
            num_kv_heads = config.of_layer(int(str(path[1]))).num_kv_heads
            groups = config.num_q_heads // heads.shape[0]
            q = heads[:, :groups].reshape(num_kv_heads, -1, *heads.shape[2:])
            kv = jnp.repeat(heads[:, groups:], num_kv_heads // heads.shape[0], axis=0)
            param = param.replace(jnp.concatenate([q, kv], axis=1))
        elif path[-2] in ("q_norm", "k_norm") and len(param.shape) == 3:
            norms = param.get_value()  # [Hkv, Hq / Hkv, D], or of K [Hkv, 1, D]
            num_kv_heads = config.of_layer(int(str(path[1]))).num_kv_heads
            if path[-2] == "k_norm":
                norms = jnp.repeat(norms, num_kv_heads // norms.shape[0], axis=0)
            param = param.replace(norms.reshape(num_kv_heads, -1, norms.shape[-1]))
        params.append((path, param))
    kind, dtype = type(decoder), decoder.embed_tokens.weight.get_value().dtype  # a `DraftHead` too
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: kind(config, dtype=dtype, rngs=nnx.Rngs(0))))
    return nnx.merge(graphdef, nnx.from_flat_state(params))
