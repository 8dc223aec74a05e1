"""Outputs: finish reasons and defaults."""

from __future__ import annotations

from typing import get_args

from pallas_paged.engine.outputs import CompletionOutput, FinishReason, FinishReasonName


def test_finish_reasons_are_numbers_with_the_words_of_outputs():
    assert tuple(map(str, FinishReason)) == get_args(FinishReasonName)
    assert [*FinishReason] == [0, 1, 2, 3]
    assert f"{FinishReason['STOP']}" == "stop"


def test_completions_do_not_share_lists_and_compare_by_identity():
    one, other = CompletionOutput(index=0), CompletionOutput(index=0)
    one.token_ids.append(3)
    assert other.token_ids == [] and other.finish_reason is None and one != other
    assert CompletionOutput(index=1) != CompletionOutput(index=1)
