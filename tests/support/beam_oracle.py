"""Beam search by brute force, written from the contract without the engine."""

from collections.abc import Callable, Container

import numpy as np


def beam_search(
    logprobs: Callable[[list[int]], np.ndarray],
    prompt: list[int],
    *,
    width: int,
    n: int,
    length: int,
    stops: Container[int],
    penalty: float,
) -> list[tuple[list[int], float]]:
    """The n best continuations, with the sums of their log-probabilities.

    Args:
        logprobs: the log-probabilities of every next token, after the given tokens.
        stops: tokens that end a continuation, as its last token.
    """
    live = [((), 0.0)]
    finished = []

    def score(tokens, total):
        return total / max(len(tokens), 1) ** penalty

    while True:
        every = []
        for tokens, total in live:
            values = enumerate(logprobs([*prompt, *tokens]))
            every += [(total + value, tokens, token) for token, value in values]
        every.sort(key=lambda x: -x[0])
        live = []
        for rank, (total, tokens, token) in enumerate(every):
            if len(live) == width:
                break
            if token not in stops:
                live.append(((*tokens, token), total))
            elif rank < width:
                tokens = (*tokens, token)
                finished.append((score(tokens, total), tokens, total))
        if len(live[0][0]) == length:
            finished += [(score(tokens, total), tokens, total) for tokens, total in live]
            break
        if len(finished) >= width:
            longest = length if penalty > 0 else len(live[0][0])
            hope = max(total for _, total in live) / longest**penalty
            if hope <= sorted(finished, reverse=True)[width - 1][0]:
                break
    return [(list(tokens), total) for _, tokens, total in sorted(finished, reverse=True)[:n]]
