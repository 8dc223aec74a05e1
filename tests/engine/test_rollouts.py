"""Rollouts: completions of several requests as padded arrays."""

import jax
import numpy as np
import pytest

from pallas_paged.engine.outputs import (
    CompletionOutput,
    FinishReason,
    LogprobSequence,
    RequestOutput,
    TokenLogprobs,
)
from pallas_paged.engine.rollouts import Rollouts
from tests.support.promotion import strict_promotion


def request_output(prompt, *completions):
    return RequestOutput(
        request_id="a",
        prompt=None,
        prompt_token_ids=prompt,
        prompt_logprobs=None,
        outputs=[*completions],
        finished=True,
        num_cached_tokens=0,
        seed=0,
    )


def completion(token_ids, reason="stop", *, logprobs=True):
    entries = LogprobSequence()
    for token_id in token_ids:
        entries.append(TokenLogprobs(token_id, -token_id / 10, 2, [99], [0.0]))
    entries = entries if logprobs else None
    return CompletionOutput(index=0, token_ids=token_ids, finish_reason=reason, logprobs=entries)


OUTPUTS = [
    request_output([1, 2, 3], completion([4, 5], "length"), completion([6])),
    request_output([7], completion([], "abort"), completion([8, 9, 10], "error")),
]


def test_prompts_are_padded_left_and_completions_right_to_sizes_that_may_be_given():
    rollouts = Rollouts.from_outputs(OUTPUTS, pad_token_id=-1)
    assert rollouts.prompt_token_ids.tolist() == [[1, 2, 3], [1, 2, 3], [-1, -1, 7], [-1, -1, 7]]
    assert rollouts.token_ids.tolist() == [[4, 5, -1], [6, -1, -1], [-1, -1, -1], [8, 9, 10]]
    assert rollouts.prompt_lens.tolist() == [3, 3, 1, 1]
    assert rollouts.lens.tolist() == [2, 1, 0, 3]
    assert rollouts.request_index.tolist() == [0, 0, 1, 1]
    reasons = [FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT, FinishReason.ERROR]
    assert rollouts.finish_reasons.tolist() == reasons
    wanted = [[-0.4, -0.5, 0], [-0.6, 0, 0], [0, 0, 0], [-0.8, -0.9, -1]]
    np.testing.assert_allclose(rollouts.logprobs, wanted, rtol=1e-6)
    assert {x.dtype.name for x in jax.tree.leaves(rollouts)} == {"int32", "float32"}
    np.testing.assert_array_equal(rollouts.mask, rollouts.token_ids != -1)
    np.testing.assert_array_equal(rollouts.prompt_mask, rollouts.prompt_token_ids != -1)
    rollouts = Rollouts.from_outputs(OUTPUTS, max_prompt_len=4, max_tokens=5)
    assert rollouts.prompt_token_ids[3].tolist() == [0, 0, 0, 7]
    assert rollouts.token_ids[3].tolist() == [8, 9, 10, 0, 0]
    assert rollouts.logprobs.shape == rollouts.mask.shape == (4, 5)


@pytest.mark.parametrize("sizes", [(0, 0), (3, 2)])
@pytest.mark.parametrize("outputs", [[], [request_output([1])]])
def test_outputs_without_completions_give_empty_arrays(outputs, sizes):
    names = ("max_prompt_len", "max_tokens")
    rollouts = Rollouts.from_outputs(outputs, **dict(zip(names, sizes, strict=True)))
    assert rollouts.prompt_token_ids.shape == (0, sizes[0]) and rollouts.mask.shape == (0, sizes[1])
    assert rollouts.finish_reasons.shape == rollouts.request_index.shape == (0,)
    assert Rollouts.from_outputs(outputs).mask.shape == (0, 0)


@pytest.mark.parametrize("logprobs", [False, True])
def test_rollouts_are_a_pytree_with_or_without_logprobs(logprobs):
    outputs = [request_output([1], completion([2, 3], logprobs=logprobs))]
    rollouts = Rollouts.from_outputs(outputs, max_tokens=3)
    assert (rollouts.logprobs is not None) == logprobs
    assert len(jax.tree.leaves(rollouts)) == 6 + logprobs
    with strict_promotion():
        count = jax.jit(lambda rollouts: (rollouts.mask.sum(), rollouts.prompt_mask.sum()))
        assert count(rollouts) == (2, 1)


UNFINISHED = request_output([1], completion([2], None))
PARTLY = request_output([1], completion([2]), completion([3], logprobs=False))


@pytest.mark.parametrize(
    ("outputs", "sizes", "message"),
    [
        (OUTPUTS, {"max_prompt_len": 2}, "max_prompt_len=2 must be at least 3"),
        (OUTPUTS, {"max_tokens": 2}, "max_tokens=2 must be at least 3"),
        (OUTPUTS, {"max_tokens": -1}, "max_tokens=-1 must be an integer"),
        (OUTPUTS, {"pad_token_id": 1.5}, "pad_token_id=1.5 must be an integer"),
        ([UNFINISHED], {}, "completion 0 of request 'a' has not finished"),
        ([PARTLY], {}, "logprobs must be in all completions or in none"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(outputs, sizes, message):
    with pytest.raises(ValueError, match=message):
        Rollouts.from_outputs(outputs, **sizes)


def test_experts_of_some_completions_only_are_refused():
    some = completion([2])
    some.routed_experts = np.zeros((1, 2, 2), np.int16)
    with pytest.raises(ValueError, match="routed_experts must be in all completions or in none"):
        Rollouts.from_outputs([request_output([1], some, completion([3]))])


def test_a_completion_that_was_aborted_in_the_queue_has_no_experts():
    some = completion([2])
    some.routed_experts = np.ones((2, 2, 2), np.int16)
    outputs = [request_output([1, 3], completion([], "abort")), request_output([1], some)]
    rollouts = Rollouts.from_outputs(outputs, max_tokens=2)
    assert (rollouts.routed_experts[:, :, 0, 0] == [[-1, -1, -1], [-1, 1, 1]]).all()
