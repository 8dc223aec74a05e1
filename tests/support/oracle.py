"""Generation without a cache: the model runs on the text so far for every token."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tests.support.plain_model import PlainModel, dense_logits


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In float64."""
    logits = np.asarray(logits, np.float64)
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


class Oracle:
    """Logits and greedy tokens of a model of the engine, one sequence at a time."""

    def __init__(self, model: Any, params: Any):
        self._logits = jax.jit(lambda params, tokens: dense_logits(model, params, tokens))
        self._params, self._max_len = params, model.max_model_len

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits `f64[T, V]` after each token."""
        padded = np.zeros(self._max_len, np.int32)
        padded[: len(token_ids)] = token_ids
        return np.asarray(self._logits(self._params, padded), np.float64)[: len(token_ids)]

    def logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """Log-probabilities `f64[T, V]` of the token after each token."""
        return log_softmax(self.logits(token_ids))

    def continue_(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The next num_tokens greedy tokens."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + num_tokens:
            tokens.append(int(np.argmax(self.logits(tokens)[-1])))
        return tokens[len(prompt) :]


class _Headless(PlainModel):
    """Its logits are the hidden states."""

    def logits(self, params, hidden):
        return hidden


def hidden_states_of(model: PlainModel, params: Any) -> Callable[[Sequence[int]], np.ndarray]:
    """A function from tokens to the hidden states `f64[T, E]` behind them."""
    return Oracle(_Headless(**vars(model)), params).logits
