"""A JAX model of your own behind OpenAI's endpoints: run `python examples/serve_own_model.py`.

The model has random weights and speaks bytes. docs/tutorials/serving.md has it step by step. It
prints its address when it accepts requests, and serves until Ctrl-C. Ask it from another shell:

    curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \
      -d '{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}'

Needs the extra `pallas-paged[server]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_paged.engine import AsyncEngine, Engine, EngineConfig, KVCacheSpec
from pallas_paged.server import ServerConfig, serve

LAYERS, HQ, HKV, D = 2, 4, 2, 16


@dataclass(frozen=True)
class Model:
    """Attention alone, with residual connections: functions of the weights."""

    vocab_size: int = 256
    max_model_len: int = 256
    eos_token_ids: tuple[int, ...] = (0,)
    kv_cache_spec = KVCacheSpec(num_layers=LAYERS, num_kv_heads=HKV, head_dim=D, dtype="float32")

    def init(self):
        rng, size = np.random.default_rng(0), HQ * D
        shapes = dict(embed=(self.vocab_size, size), qkv=(LAYERS, size, (HQ + 2 * HKV) * D))
        shapes |= dict(out=(LAYERS, size, size), head=(size, self.vocab_size))
        drawn = {name: rng.standard_normal(x) / x[-2] ** 0.5 for name, x in shapes.items()}
        return jax.tree.map(jnp.float32, drawn)

    def __call__(self, params, tokens, positions, attend, cache):
        x, layers = params["embed"][tokens], []
        for index, layer in enumerate(cache):
            heads = (x @ params["qkv"][index]).reshape(len(tokens), -1, D)
            out, layer = attend(*jnp.split(heads, (HQ, HQ + HKV), axis=1), layer)
            x += out.reshape(x.shape) @ params["out"][index]
            layers.append(layer)
        return x, tuple(layers)

    def logits(self, params, hidden):
        return hidden @ params["head"]


class Bytes:
    """A tokenizer: the id of a byte is its value."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids) -> str:
        return bytes(token_ids).decode(errors="replace")


def chat_template(messages, **options) -> str:
    return "".join(f"{one['role']}: {one['content']}\n" for one in messages) + "assistant: "


def main(port: int = 8000) -> None:
    model = Model()
    config = EngineConfig(num_pages=64, max_num_seqs=8, max_num_batched_tokens=128)
    engine = Engine(model, model.init(), config, tokenizer=Bytes())
    name = ServerConfig(served_model_name="own")
    serve(AsyncEngine(engine), chat_template=chat_template, config=name, port=port)


if __name__ == "__main__":
    main()
