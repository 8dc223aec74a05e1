"""Tunix: a rollout worker on the engine of this library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.rollout import base_rollout

from pallas_paged.engine import Engine, EngineConfig, Model, Rollouts, SamplingParams

__all__ = ["EngineRollout", "parameters"]


def parameters(actor: nnx.Module) -> Any:
    """Return the parameters of a module, as `nnx.state(actor, nnx.Param)`."""
    return nnx.state(actor, nnx.Param)


class EngineRollout(base_rollout.BaseRollout):
    """Generates and scores completions with an `Engine`, for Tunix's trainers.

    Give Tunix a partial of the class: `ClusterConfig(rollout_engine=functools.partial(
    EngineRollout, model=model), ...)`.
    """

    def __init__(
        self,
        *,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: jax.sharding.Mesh | None = None,
        rollout_config: base_rollout.RolloutConfig | None = None,
        model: Model,
        params_of: Callable[[nnx.Module], Any] = parameters,
        engine_config: EngineConfig | None = None,
    ):
        """Create the engine.

        Args:
            rollout_actor: Tunix's model, which holds the weights.
            tokenizer: as Tunix takes it.
            mesh: the devices of the rollout; None or an empty one means JAX's default device.
            rollout_config: not used here: `generate` gets one.
            model: computes the same as `rollout_actor`, by the engine's protocol.
            params_of: returns the parameters of `model` from `rollout_actor`, as a pytree of
                arrays, without computation.
            engine_config: sizes; `tensor_parallel_size` and `data_parallel_size` say how the
                devices are used. None takes the defaults.
        """
        del rollout_config
        adapted = isinstance(tokenizer, TokenizerAdapter)
        self._tokenizer = tokenizer if adapted else TokenizerAdapter(tokenizer)
        self._actor, self._params_of = rollout_actor, params_of
        params = params_of(rollout_actor)
        self._leaves = jax.tree.leaves(params)
        devices = None if mesh is None or mesh.empty else list(mesh.devices.flat)
        self.engine = Engine(model, params, config=engine_config, devices=devices)

    def generate(
        self, prompts: list[str], rollout_config: base_rollout.RolloutConfig, **kwargs: Any
    ) -> base_rollout.RolloutOutput:
        """Return a completion for each prompt, with the stop token that ended it.

        Args:
            prompts: texts. Those longer than `rollout_config.max_prompt_length` are kept in full.
            rollout_config: lengths and sampling. `logits` are not returned.
            **kwargs: not used.
        """
        del kwargs
        self._use_current_weights()
        config = rollout_config
        token_ids = [self._tokenize(prompt) for prompt in prompts]
        seeds = [None] * len(prompts) if config.seed is None else _seeds(config.seed, len(prompts))
        params = [
            SamplingParams(
                max_tokens=config.max_tokens_to_generate,
                temperature=config.temperature,
                top_p=1.0 if config.top_p is None else config.top_p,
                top_k=0 if config.top_k is None else config.top_k,
                stop_token_ids=config.eos_tokens or [self.eos_id()],
                logprobs=0 if config.return_logprobs else None,
                seed=seed,
                detokenize=False,
            )
            for seed in seeds
        ]
        outputs = self.engine.generate(token_ids, params, progress=False)
        longest = max(map(len, token_ids), default=0)
        rollouts = Rollouts.from_outputs(
            outputs,
            pad_token_id=self.pad_id(),
            max_prompt_len=max(longest, config.max_prompt_length),
        )
        tokens = [row[:n] for row, n in zip(rollouts.token_ids, rollouts.lens, strict=True)]
        logprobs = None
        if rollouts.logprobs is not None:
            logprobs = [row[:n] for row, n in zip(rollouts.logprobs, rollouts.lens, strict=True)]
        return base_rollout.RolloutOutput(
            text=[self._tokenizer.decode(row.tolist()) for row in tokens],
            logits=[],
            tokens=tokens,
            left_padded_prompt_tokens=rollouts.prompt_token_ids,
            logprobs=logprobs,
        )

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array
    ) -> jax.Array:
        """Return f32`[B, T]`, log-probabilities of completions under the current weights.

        Args:
            prompt_tokens: i32`[B, P]`, padded on the left with `pad_id`.
            completion_tokens: i32`[B, T]`, padded on the right, where the result is 0.
        """
        self._use_current_weights()
        pad = self.pad_id()
        prompts = [_trimmed(row, pad, "f") for row in np.asarray(prompt_tokens)]
        completions = [_trimmed(row, pad, "b") for row in np.asarray(completion_tokens)]
        scores = self.engine.score(prompts, completions)
        logps = np.zeros(completion_tokens.shape, np.float32)
        logps[:, : scores.shape[1]] = scores
        return jnp.asarray(logps)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Take new weights, from the next call of another method on.

        Args:
            params: an `nnx.State` of the actor's parameters, or of those of `filter_types`.
            filter_types: types of the variables in `params`, which are then cast and moved to where
                the actor's are. None takes the arrays as they are.
        """
        if filter_types is not None:
            old = nnx.state(self._actor, filter_types)
            params = jax.tree.map(
                lambda new, old: jax.device_put(new.astype(old.dtype), old.sharding), params, old
            )
        nnx.update(self._actor, params)

    def pad_id(self) -> int:
        """Return the token that pads."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Return the token that ends a text."""
        return self._tokenizer.eos_id()

    def model(self) -> nnx.Module:
        """Return the model whose weights are used."""
        return self._actor

    def close(self) -> None:
        """End the engine."""
        self.engine.close()

    def _use_current_weights(self) -> None:
        """Give the engine the actor's weights, where a trainer that shares it has changed them."""
        params = self._params_of(self._actor)
        leaves = jax.tree.leaves(params)
        if any(new is not old for new, old in zip(leaves, self._leaves, strict=True)):
            self.engine.update_params(params)
            self._leaves = leaves

    def _tokenize(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt after Tunix's rules: with one token that begins texts."""
        bos = self._tokenizer.bos_id()
        tokens = list(self._tokenizer.encode(prompt))
        return [int(x) for x in self._tokenizer.dedup_bos_ids(([bos] if bos else []) + tokens)]


def _seeds(key: jax.Array, count: int) -> list[int]:
    """Return a seed for each of `count` requests."""
    return [int(x) for x in jax.random.randint(key, (count,), 0, 2**31 - 1)]


def _trimmed(row: np.ndarray, pad: int, side: Literal["f", "b"]) -> list[int]:
    """Return the tokens of a row without the padding at its front or its back."""
    return (np.trim_zeros(row - pad, side) + pad).tolist()
