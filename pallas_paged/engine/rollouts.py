"""Finished completions as padded arrays, for the loss of a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pallas_paged.checks import check_integer
from pallas_paged.engine.outputs import CompletionOutput, FinishReason, RequestOutput


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """B completions with their prompts, a pytree of NumPy arrays.

    `concatenate([prompt_token_ids, token_ids], axis=1)` has each completion directly after its
    prompt.

    Attributes:
        prompt_token_ids: `i32[B, P]`, padded on the left.
        prompt_lens: `i32[B]` tokens of each prompt.
        token_ids: `i32[B, T]`, padded on the right.
        lens: `i32[B]` tokens of each completion.
        logprobs: `f32[B, T]` log-probability of each token, 0 in the padding; None if the
            requests did not ask for them.
        routed_experts: `i16[B, P + T - 1, layers with experts, k]`, the experts of the tokens of
            `concatenate([prompt_token_ids, token_ids], axis=1)[:, :-1]`; -1 in the padding and for
            the last token of a completion. None if the requests did not ask for them.
        finish_reasons: `i32[B]`, values of `FinishReason`.
        request_index: `i32[B]`, which of the outputs each completion is from.
    """

    prompt_token_ids: np.ndarray
    prompt_lens: np.ndarray
    token_ids: np.ndarray
    lens: np.ndarray
    logprobs: np.ndarray | None
    routed_experts: np.ndarray | None
    finish_reasons: np.ndarray
    request_index: np.ndarray

    @property
    def prompt_mask(self) -> np.ndarray:
        """`bool[B, P]`: where `prompt_token_ids` has tokens of the prompt."""
        size = self.prompt_token_ids.shape[1]
        return np.arange(size, dtype=np.int32)[None] >= size - self.prompt_lens[:, None]

    @property
    def mask(self) -> np.ndarray:
        """`bool[B, T]`: where `token_ids` has tokens of the completion."""
        size = self.token_ids.shape[1]
        return np.arange(size, dtype=np.int32)[None] < self.lens[:, None]

    @classmethod
    def from_outputs(
        cls,
        outputs: Sequence[RequestOutput],
        *,
        pad_token_id: int = 0,
        max_prompt_len: int | None = None,
        max_tokens: int | None = None,
    ) -> Rollouts:
        """Collect the completions of all outputs, in order.

        Args:
            outputs: complete outputs, as `Engine.generate` returns them.
            pad_token_id: fills the padding.
            max_prompt_len: P; None takes the longest prompt.
            max_tokens: T; None takes the longest completion. Set both for equal shapes, and so a
                single compilation, in all rounds.

        Raises:
            ValueError: a completion has not finished, a prompt or a completion is too long, or
                only some completions have log-probabilities or routed experts.
        """
        check_integer("pad_token_id", pad_token_id, -(2**31))
        rows = [
            (index, output.prompt_token_ids, completion)
            for index, output in enumerate(outputs)
            for completion in output.outputs
        ]
        completions = [completion for _, _, completion in rows]
        for index, _, completion in rows:
            if completion.finish_reason is None:
                request_id = outputs[index].request_id
                raise ValueError(
                    f"completion {completion.index} of request {request_id!r} has not finished"
                )
        prompts = [prompt for _, prompt, _ in rows]
        prompt_lens = _lens("max_prompt_len", prompts, max_prompt_len)
        prompt_token_ids = _padded(prompts, max_prompt_len, pad_token_id, np.int32, left=True)
        tokens = [completion.token_ids for completion in completions]
        lens = _lens("max_tokens", tokens, max_tokens)
        padded_tokens = _padded(tokens, max_tokens, pad_token_id, np.int32)
        sequences = _in_all("logprobs", completions)
        logprobs = None
        if sequences is not None:
            logprobs = _padded([x.logprobs for x in sequences], max_tokens, 0, np.float32)
        reasons = [FinishReason[str(one.finish_reason).upper()] for one in completions]
        return cls(
            prompt_token_ids=prompt_token_ids,
            prompt_lens=prompt_lens,
            token_ids=padded_tokens,
            lens=lens,
            logprobs=logprobs,
            routed_experts=_routed_experts(
                completions, prompt_lens, prompt_token_ids.shape[1], padded_tokens.shape[1]
            ),
            finish_reasons=np.array(reasons, np.int32),
            request_index=np.array([index for index, _, _ in rows], np.int32),
        )


def _lens(name: str, rows: Sequence[Sequence[int]], size: int | None) -> np.ndarray:
    """Return the lengths `i32[B]` of rows that must fit in `size`."""
    lens = np.array([len(row) for row in rows], np.int32)
    if size is not None:
        check_integer(name, size, 0)
        if max(lens, default=0) > size:
            raise ValueError(f"{name}={size} must be at least {max(lens)}, the longest length")
    return lens


def _padded(
    rows: Sequence[Sequence[float]],
    size: int | None,
    pad: float,
    dtype: type[np.generic],
    *,
    left: bool = False,
) -> np.ndarray:
    """Return rows as an array `[B, size]`; None takes the longest row."""
    size = max(map(len, rows), default=0) if size is None else size
    array = np.full((len(rows), size), pad, dtype)
    for padded, row in zip(array, rows, strict=True):
        padded[size - len(row) if left else 0 :][: len(row)] = row
    return array


def _in_all(name: str, completions: Sequence[CompletionOutput]) -> list[Any] | None:
    """Return what all completions have by this name, or None if none has."""
    given = [x for one in completions if (x := getattr(one, name)) is not None]
    if 0 < len(given) < len(completions):
        raise ValueError(f"{name} must be in all completions or in none")
    return given or None


def _routed_experts(
    completions: Sequence[CompletionOutput], prompt_lens: np.ndarray, most: int, most_new: int
) -> np.ndarray | None:
    """Return the experts of all tokens, or None if no completion has any.

    P and T are `most` and `most_new`, to which prompts and completions are padded.
    """
    # One that was aborted before its prompt was computed has none, whatever it asked for.
    begun = [one for one in completions if one.token_ids or one.routed_experts is not None]
    if (given := _in_all("routed_experts", begun)) is None:
        return None
    size = max(most + most_new - 1, 0)
    array = np.full((len(completions), size, *given[0].shape[1:]), -1, np.int16)
    for padded, one, length in zip(array, completions, prompt_lens, strict=True):
        if (experts := one.routed_experts) is not None:
            first = most - length
            padded[first : first + len(experts)] = experts
    return array
