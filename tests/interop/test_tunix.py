"""Tunix's GRPO learner with rollouts of the engine, on a model that both sides compute."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.plain_model import PlainModel, greedy_tokens

pytest.importorskip("tunix")

import optax
from flax import nnx
from grain import python as grain
from tunix.rl import common, rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout
from tunix.tests import test_common

from pallas_paged.engine import EngineConfig
from pallas_paged.interop.tunix import EngineRollout

VOCAB = test_common.MockVocab()
MODEL = PlainModel(vocab_size=VOCAB.GetPieceSize(), max_model_len=64)
PROMPTS = ["input string", "hello world My name", "distributed training library", "hello"]
LENGTHS = dict(max_tokens_to_generate=10, max_prompt_length=16)
CONFIG = base_rollout.RolloutConfig(**LENGTHS, temperature=0.0, kv_cache_size=64)


class Actor(nnx.Module):
    """The plain model as Tunix calls models: whole padded sequences, with positions and a mask."""

    def __init__(self, seed: int = 0):
        weights = MODEL.init(seed)
        self.weights = nnx.Dict({name: nnx.Param(jnp.asarray(x)) for name, x in weights.items()})
        self.config = types.SimpleNamespace(num_layers=2, num_kv_heads=2, head_dim=16)

    def __call__(self, tokens, positions, cache=None, attention_mask=None, **_):
        params = {name: x[...] for name, x in self.weights.items()}

        def row(tokens, positions, mask):
            def attend(q, k, v, cache, *, sliding_window=None):
                out = jax.nn.dot_product_attention(q[None], k[None], v[None], mask=mask[None, None])
                return out[0], cache

            hidden, _ = MODEL(params, tokens, positions, attend, (None,) * MODEL.num_layers)
            return MODEL.logits(params, hidden)

        return jax.vmap(row)(tokens, positions, attention_mask), cache


def weights_of(actor):
    return {name: x[...] for name, x in actor.weights.items()}


SETUP = dict(
    model=MODEL,
    params_of=weights_of,
    engine_config=EngineConfig(num_pages=64, max_num_seqs=4, max_num_batched_tokens=32),
)


def make_rollout(actor):
    return EngineRollout(rollout_actor=actor, tokenizer=VOCAB, **SETUP)


def token_ids(prompt):
    return [VOCAB.bos_id(), *VOCAB.EncodeAsIds(prompt)]


def until_the_end(tokens):
    end = VOCAB.eos_id()
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def greedy(actor):
    params = weights_of(actor)
    return [until_the_end(greedy_tokens(MODEL, params, token_ids(x), 10)) for x in PROMPTS]


def test_completions_and_scores():
    actor = Actor()
    rollout = make_rollout(actor)
    output = rollout.generate(PROMPTS, CONFIG)
    assert [x.tolist() for x in output.tokens] == greedy(actor)
    assert output.text == [VOCAB.DecodeIds(x.tolist()) for x in output.tokens]
    assert output.left_padded_prompt_tokens.shape == (4, 16)
    assert output.left_padded_prompt_tokens[3].tolist() == [0] * 14 + token_ids("hello")

    padded = np.zeros((4, 10), np.int32)
    for row, tokens in zip(padded, output.tokens, strict=True):
        row[: len(tokens)] = tokens
    arrays = jnp.asarray(output.left_padded_prompt_tokens), jnp.asarray(padded)
    scores = rollout.get_per_token_logps(*arrays)
    graph, state = nnx.split(actor)
    meant = common.compute_per_token_logps(
        graph,
        state,
        prompt_tokens=arrays[0],
        completion_tokens=arrays[1],
        pad_id=VOCAB.pad_id(),
        eos_id=VOCAB.eos_id(),
    )
    real = padded != VOCAB.pad_id()
    np.testing.assert_allclose(scores[real], np.asarray(meant)[real], atol=2e-5)
    assert scores.shape == padded.shape and not np.asarray(scores)[~real].any()


def test_sampling_repeats_with_its_seed_and_returns_logprobs():
    rollout = make_rollout(Actor())
    key = jax.random.key(3)
    config = base_rollout.RolloutConfig(**LENGTHS, seed=key, return_logprobs=True)
    first, again = (rollout.generate(PROMPTS[:1] * 2, config) for _ in range(2))
    assert [x.tolist() for x in first.tokens] == [x.tolist() for x in again.tokens]
    assert first.tokens[0].tolist() != first.tokens[1].tolist()
    assert [len(x) for x in first.logprobs] == [len(x) for x in first.tokens]


@pytest.mark.parametrize("iterations", [1, 2])
def test_the_grpo_learner_trains_on_rollouts_of_the_engine(iterations):
    """With two iterations the learner asks for log-probabilities of old weights too."""
    actor, reference = Actor(), Actor()
    before = jax.tree.map(jnp.copy, nnx.state(actor, nnx.Param))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("fsdp",))
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    cluster = rl_cluster.RLCluster(
        actor=actor,
        reference=reference,
        tokenizer=VOCAB,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={role: mesh for role in roles},
            rollout_engine=functools.partial(EngineRollout, **SETUP),
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.sgd(1e-2), eval_every_n_steps=100, max_steps=4
            ),
            rollout_config=base_rollout.RolloutConfig(**LENGTHS, kv_cache_size=64),
        ),
    )
    learner = grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        reward_fns=lambda completions, **_: np.arange(len(completions), dtype=np.float32),
        algo_config=grpo_learner.GRPOConfig(num_generations=2, num_iterations=iterations),
    )
    learner.train(
        grain.MapDataset.source(PROMPTS * 2).batch(2).map(lambda x: {"prompts": x, "answer": x})
    )
    actor, rollout = cluster.actor_trainer.model, cluster.rollout
    jax.tree.map_with_path(test_common.assert_not_equal, before, nnx.state(actor, nnx.Param))
    assert isinstance(rollout, EngineRollout)
    assert [x.tolist() for x in rollout.generate(PROMPTS, CONFIG).tokens] == greedy(actor)
