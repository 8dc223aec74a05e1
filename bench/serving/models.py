"""Models of the benches: sizes of published ones, random weights made on the device."""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from models.decoder import Decoder, EngineModel, ModelConfig
from models.decoder.decoder import DecoderLayer
from models.decoder.experts import SparseMLP
from models.decoder.experts_config import ExpertsConfig
from models.decoder.rope_scaling import Llama3RopeScaling
from models.decoder.sharding import config_on, param_specs
from pallas_paged.engine import KVCacheSpec
from pallas_paged.engine.device.pool import page_bytes, pool_dtype


@dataclass(frozen=True, kw_only=True)
class ServingShape:
    """A model and the defaults of its runs.

    Attributes:
        config, dtype: of the model.
        kv_gib: memory for K/V, enough for 32 rows of max_model_len (tiny: 4).
        max_model_len: most tokens of a prompt and its output.
    """

    config: ModelConfig
    dtype: DTypeLike
    kv_gib: float
    max_model_len: int = 2048

    def token_bytes(self, kv_cache_dtype: str | None = None) -> int:
        """Bytes of K, V and their scales per token, over all layers.

        Args:
            kv_cache_dtype: as in `EngineConfig`.
        """
        structure: Any = None  # which does not matter here
        model = EngineModel(config=self.config, dtype=self.dtype, graphdef=structure)
        return token_bytes(model.kv_cache_spec, kv_cache_dtype)


def add_shape(parser: argparse.ArgumentParser, default: str | None, more: str = "") -> None:
    """Add `--shape`, with more help, and how attention runs."""
    add, text = parser.add_argument, f"model sizes; its weights are random{more}"
    add("--shape", choices=SHAPES, default=default, help=text)
    add("--implementation", help="of attention; default: the best for the platform")


def _llama3(*, rope_factor: float, kv_gib: float, **sizes: Any) -> ServingShape:
    """A Llama 3 shape; `sizes` are the fields of the config that differ between models."""
    scaling = Llama3RopeScaling(
        factor=rope_factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    config = ModelConfig(
        vocab_size=128256,
        num_q_heads=32,
        num_kv_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=scaling,
        max_position_embeddings=131072,
        **sizes,
    )
    return ServingShape(config=config, dtype=jnp.bfloat16, kv_gib=kv_gib)


def _qwen3(*, kv_gib: float, **sizes: Any) -> ServingShape:
    """A Qwen3 shape; `sizes` are the fields of the config that differ between models."""
    config = ModelConfig(
        vocab_size=151936,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=1e6,
        max_position_embeddings=40960,
        qk_norm=True,
        **sizes,
    )
    return ServingShape(config=config, dtype=jnp.bfloat16, kv_gib=kv_gib)


def _tiny(**config: Any) -> ServingShape:
    """A shape for a dry run without a GPU."""
    sizes = ModelConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=16,
        **config,
    )
    return ServingShape(config=sizes, dtype=jnp.float32, kv_gib=0.5 / 1024, max_model_len=256)


def _published(kv_gib: float, **config: Any) -> ServingShape:
    """A shape from what matters in the `config.json` of a model."""
    return ServingShape(
        config=ModelConfig.from_hugging_face(config), dtype=jnp.bfloat16, kv_gib=kv_gib
    )


SHAPES = {
    "1b": _llama3(  # Llama 3.2 1B
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        head_dim=64,
        rope_factor=32.0,
        tie_word_embeddings=True,
        kv_gib=2.0,
    ),
    "8b": _llama3(  # Llama 3.1 8B
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        head_dim=128,
        rope_factor=8.0,
        kv_gib=8.0,
    ),
    "qwen3-0.6b": _qwen3(
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_q_heads=16,
        tie_word_embeddings=True,
        kv_gib=7.0,
    ),
    "qwen3-32b": _qwen3(
        hidden_size=5120, intermediate_size=25600, num_layers=64, num_q_heads=64, kv_gib=16.0
    ),
    "qwen3-30b-a3b": _published(
        kv_gib=6.0,
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        rope_theta=1e6,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
    ),
    "gpt-oss-20b": _published(
        kv_gib=3.0,
        architectures=["GptOssForCausalLM"],
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_local_experts=32,
        num_experts_per_tok=4,
        num_hidden_layers=24,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
    ),
    "deepseek-v2-lite": _published(
        kv_gib=2.0,
        architectures=["DeepseekV2ForCausalLM"],
        vocab_size=102400,
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        n_routed_experts=64,
        num_experts_per_tok=6,
        n_shared_experts=2,
        first_k_dense_replace=1,
        topk_method="greedy",
        num_hidden_layers=27,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        max_position_embeddings=163840,
        rope_scaling=dict(
            type="yarn",
            factor=40,
            beta_fast=32,
            beta_slow=1,
            mscale=0.707,
            mscale_all_dim=0.707,
            original_max_position_embeddings=4096,
        ),
    ),
    "tiny": _tiny(num_layers=2),
    "tiny-experts": _tiny(
        num_layers=3,
        sliding_windows=(None, 16, None),
        experts=ExpertsConfig(
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            dense_layers=(0,),
        ),
    ),
}


def token_bytes(spec: KVCacheSpec, kv_cache_dtype: str | None = None) -> int:
    """Bytes of K, V and their scales per token, over all layers; dtype as in `EngineConfig`."""
    return page_bytes(spec, page_size=1, dtype=pool_dtype(spec, kv_cache_dtype))


def random_model(shape: ServingShape, mesh: Mesh | None = None) -> Decoder:
    """A decoder with random weights in the dtype of the shape, made on the device or on a mesh."""
    config = shape.config if mesh is None else config_on(shape.config, mesh.size)

    def rngs(seed: Any) -> nnx.Rngs:
        # rbg is one XLA operation; threefry would be compiled again for each weight.
        return nnx.Rngs(jax.random.key(seed, impl="rbg"))

    def make() -> Decoder:
        return Decoder(config, dtype=shape.dtype, rngs=rngs(0))

    def without_layers() -> nnx.State:
        return nnx.State({name: x for name, x in nnx.state(make()).items() if name != "layers"})

    def layer(index: int, seed: jax.Array) -> nnx.State:
        return nnx.state(DecoderLayer(config, index, dtype=shape.dtype, rngs=rngs(seed)))

    graphdef, params = nnx.split(nnx.eval_shape(make))
    specs: Any = None
    of_rest = None
    if mesh is not None:
        specs = jax.tree.map(lambda spec: NamedSharding(mesh, spec), param_specs(params))
        of_rest = nnx.State({name: x for name, x in specs.items() if name != "layers"})
    weights = jax.jit(without_layers, out_shardings=of_rest)()
    # One program for layers of one kind: that of all layers would take long to compile.
    made: dict[Any, Any] = {}
    layers = {}
    for index in range(config.num_layers):
        sizes = jax.tree.map(lambda x: x.shape, params["layers"][index])
        kind = str(sizes)
        if kind not in made:
            of_layer = None if specs is None else specs["layers"][index]
            made[kind] = jax.jit(functools.partial(layer, index), out_shardings=of_layer)
        layers[index] = made[kind](index + 1)
    weights["layers"] = nnx.State(layers)
    return nnx.merge(graphdef, weights)


def weight_bytes(model: Decoder, experts_hit: float = 0.0) -> float:
    """Bytes of weights that a decode step reads: all but separate input embeddings.

    Args:
        model: with its weights.
        experts_hit: experts of a layer that some row is routed to; others are not read.
    """
    total = num_bytes(model)
    for layer in model.layers:
        if isinstance(layer.mlp, SparseMLP):
            num_experts = layer.mlp.gate.weight.shape[0]
            total -= num_bytes(layer.mlp.experts) * (1 - experts_hit / num_experts)
    return total - (0 if model.lm_head is None else num_bytes(model.embed_tokens))


def num_bytes(module: nnx.Module) -> float:
    """Bytes of the weights of a module."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(module, nnx.Param)))
