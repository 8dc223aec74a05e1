"""Outputs: finish reasons and defaults."""

from __future__ import annotations

from typing import get_args

import pytest

from pallas_paged.engine.outputs import (
    CompletionOutput,
    FinishReason,
    FinishReasonName,
    Logprob,
    LogprobSequence,
    TokenLogprobs,
)


def test_finish_reasons_are_numbers_with_the_words_of_outputs():
    assert tuple(map(str, FinishReason)) == get_args(FinishReasonName)
    assert [*FinishReason] == [0, 1, 2, 3]
    assert f"{FinishReason['STOP']}" == "stop"


def test_completions_do_not_share_lists_and_compare_by_identity():
    one, other = CompletionOutput(index=0), CompletionOutput(index=0)
    one.token_ids.append(3)
    assert other.token_ids == [] and other.finish_reason is None and one != other
    assert CompletionOutput(index=1) != CompletionOutput(index=1)


def test_logprobs_of_a_completion_read_as_a_list_of_dicts():
    tokens = [
        TokenLogprobs(3, -2.0, 5, [7, 1], [-0.5, -1.0]),
        TokenLogprobs(7, -0.5, 1, [7, 2], [-0.5, -1.5]),
        TokenLogprobs(2, -0.25, 1, [2, 7], [-0.25, -3.0]),
    ]
    wanted = [
        {3: Logprob(-2.0, 5), 7: Logprob(-0.5, 1), 1: Logprob(-1.0, 2)},
        {7: Logprob(-0.5, 1), 2: Logprob(-1.5, 2)},
        {2: Logprob(-0.25, 1), 7: Logprob(-3.0, 2)},
    ]
    logprobs = LogprobSequence()
    for token in tokens:
        logprobs.append(token)
    assert logprobs == wanted and [*map(list, logprobs)] == [*map(list, wanted)]
    assert repr(logprobs) == repr(wanted) and len(logprobs) == 3
    assert logprobs[-1] == wanted[2] and logprobs[1:] == wanted[1:]
    assert logprobs[::-2] == wanted[::-2]
    parts = logprobs[:1]
    parts.extend(logprobs[1:])
    assert parts == logprobs and logprobs[3:] == LogprobSequence() == []
    assert parts != wanted[:2] and parts != 3
    with pytest.raises(IndexError):
        logprobs[3]
