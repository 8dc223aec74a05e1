"""Rounds of reinforcement learning with your own loss: run `python examples/rl_round.py`.

Each round samples completions with the engine, rewards them, makes one step of a policy gradient in
plain JAX, and gives the engine the new weights. The loss runs the model of the engine, with dense
attention. docs/tutorials/rl.md has GRPO with an optimizer, for prompts of several lengths.

Prints the mean reward of each round, which rises.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_paged.engine import Engine, EngineConfig, KVCacheSpec, Rollouts, SamplingParams

VOCAB, LAYERS, HQ, HKV, D = 32, 1, 4, 2, 16


@dataclass(frozen=True)
class Policy:
    """Attention alone, with residual connections: functions of the weights, for the engine."""

    vocab_size: int = VOCAB
    max_model_len: int = 64
    eos_token_ids: tuple[int, ...] = ()
    kv_cache_spec = KVCacheSpec(num_layers=LAYERS, num_kv_heads=HKV, head_dim=D, dtype="float32")

    def init(self):
        rng, size = np.random.default_rng(0), HQ * D
        shapes = dict(embed=(VOCAB, size), qkv=(LAYERS, size, (HQ + 2 * HKV) * D))
        shapes |= dict(out=(LAYERS, size, size), head=(size, VOCAB))
        return {name: jnp.float32(rng.normal(0, 0.3, shape)) for name, shape in shapes.items()}

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


def logprobs_of(params, rollouts: Rollouts) -> jax.Array:
    """Return the log-probabilities of the completions' tokens, f32[B, T], with a gradient."""
    policy = Policy()

    def attend(q, k, v, cache):
        return jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True)[0], cache

    def one(prompt, completion):
        tokens = jnp.concatenate([prompt, completion])
        hidden, _ = policy(params, tokens, jnp.arange(len(tokens)), attend, (None,) * LAYERS)
        logprobs = jax.nn.log_softmax(policy.logits(params, hidden[len(prompt) - 1 : -1]))
        return jnp.take_along_axis(logprobs, completion[:, None], axis=1)[:, 0]

    return jax.vmap(one)(rollouts.prompt_token_ids, rollouts.token_ids)


@jax.jit
def train_step(params, rollouts: Rollouts, advantages):
    """Return new weights, and the largest difference of the loss's and the engine's numbers."""

    def loss(params):
        logprobs = logprobs_of(params, rollouts)
        ratio = jnp.exp(logprobs - rollouts.logprobs)  # to the policy that sampled
        gain = jnp.mean(ratio * advantages[:, None])  # no mask: all completions are of one length
        return -gain, jnp.max(jnp.abs(logprobs - rollouts.logprobs))

    gradients, difference = jax.grad(loss, has_aux=True)(params)
    return jax.tree.map(lambda x, g: x - 0.5 * g, params, gradients), difference


def main(num_rounds: int = 8) -> list[float]:
    params = Policy().init()
    config = EngineConfig(num_pages=64, max_num_seqs=8, max_num_batched_tokens=64)
    engine, prompts, means = Engine(Policy(), params, config), [[1, 2, 3], [4, 5, 6]], []
    for seed in range(num_rounds):
        sampling = SamplingParams(n=8, max_tokens=8, logprobs=0, seed=seed)
        rollouts = Rollouts.from_outputs(engine.generate(prompts, sampling, progress=False))
        is_even = (rollouts.token_ids % 2 == 0).reshape(len(prompts), 8, 8)
        rewards = is_even.mean(axis=2, dtype=np.float32)  # a toy: the share of even tokens
        advantages = (rewards - rewards.mean(axis=1, keepdims=True)).ravel()
        params, difference = train_step(params, rollouts, advantages)
        assert difference < 0.05  # of the loss and the engine: TF32 on GPUs
        engine.update_params(params)
        means.append(float(rewards.mean()))
        print(f"round {seed}: mean reward {means[-1]:.2f}")
    return means


if __name__ == "__main__":
    main()
