"""When calls verify drafts: the policy and the scheduler alone, without a device."""

import math

import pytest

from pallas_paged.engine.sampling_params import SamplingMode
from pallas_paged.engine.schedule.calls import DraftPolicy
from tests.support.scheduler_host import Host, make_sequence, with_forks

K = 4


def always():
    return DraftPolicy(K, math.inf, adaptive=False)


def decisions(policy, num_calls, num_rows=1, num_accepted=0.0):
    """Whether calls verify drafts, if this many are right in each step of a row."""
    found = []
    for _ in range(num_calls):
        found.append(policy.num_for(num_rows) > 0)
        if found[-1]:
            policy.observe_drafts(100, round(100 * num_accepted))
    return found


@pytest.mark.parametrize(
    ("num_rows", "num_accepted", "pays"),
    [
        (1, 0.5, True),
        (1, 0.0, False),
        (32, 0.5, True),  # 160 tokens of 200 that cost nothing
        (64, 0.5, False),  # 320 tokens: 1.6 times as long, for 1.5 tokens
        (64, 1.0, True),  # 1.6 times as long, for 2
        (200, 3.0, False),  # 5 times as long, for 4 tokens
        (400, 4.0, False),
    ],
)
def test_drafts_are_verified_if_they_are_worth_the_longer_step(num_rows, num_accepted, pays):
    found = decisions(DraftPolicy(K, 200.0), 60, num_rows, num_accepted)
    assert found[-10:] == [pays] * 10


def test_without_a_card_whose_rates_are_known_acceptance_decides_alone():
    assert all(decisions(DraftPolicy(K, math.inf), 50, num_rows=10_000, num_accepted=0.5))
    assert not decisions(DraftPolicy(K, math.inf), 50, num_rows=1, num_accepted=0.0)[-1]


def test_one_call_in_64_is_made_the_other_way_so_that_drafts_return_when_they_are_right():
    policy = DraftPolicy(K, 200.0)
    decisions(policy, 64)
    assert sum(decisions(policy, 640)) == 10
    assert sum(decisions(policy, 640, num_accepted=3.0)[-320:]) == 315


def test_the_times_of_steps_count_more_than_the_rates_of_the_card():
    """A mixture of experts, for example, reads more with more tokens."""
    policy = DraftPolicy(K, 200.0)
    policy.observe_step(8, False, 0.010)
    assert all(decisions(policy, 10, num_rows=8, num_accepted=1.0))
    policy.observe_step(8, True, 0.030)
    assert not any(decisions(policy, 10, num_rows=8, num_accepted=1.0))
    assert not any(decisions(policy, 10, num_rows=15, num_accepted=1.0))  # as many bits
    assert all(decisions(policy, 10, num_rows=4, num_accepted=1.0))
    policy.observe_step(8, True, 0.015)
    assert all(decisions(policy, 10, num_rows=8, num_accepted=1.0)[1:])


def test_steps_of_a_draft_model_count_until_they_are_measured():
    """Drafts bring 2 tokens; a draft model of half the size takes as long as two steps."""
    for share, pays in ((0.0, True), (0.1, True), (0.5, False)):
        policy = DraftPolicy(K, 200.0, draft_share=share)
        assert decisions(policy, 60, num_accepted=1.0)[-5:] == [pays] * 5
    policy.observe_step(1, False, 0.010)
    policy.observe_step(1, True, 0.015)
    assert all(decisions(policy, 3, num_accepted=1.0))


def test_a_pause_within_a_step_is_forgotten_with_the_next():
    policy = DraftPolicy(K, 200.0)
    for seconds in (0.010, 30.0):
        policy.observe_step(1, False, seconds)
    for seconds in (30.0, 0.012):
        policy.observe_step(1, True, seconds)
    assert all(decisions(policy, 20, num_accepted=0.5))


def test_no_trial_is_made_where_even_right_drafts_would_not_pay():
    assert not any(decisions(DraftPolicy(K, 200.0), 500, num_rows=400))


def test_a_policy_that_does_not_adapt_drafts_in_each_call():
    policy = DraftPolicy(K, 200.0, adaptive=False)
    policy.observe_step(400, False, 0.010)
    policy.observe_step(400, True, 0.030)
    assert all(decisions(policy, 200, num_rows=400))


def schedules(*sequences, **options):
    host = Host(*sequences, drafting=always(), max_tokens_of_call=10, **options)
    return host, host.run()


def test_calls_with_chunks_penalties_grammars_or_routed_experts_have_no_drafts():
    for name in ("penalties", "masks", "routed_experts"):
        one = make_sequence(0, 5, new=20)
        one.mode = SamplingMode(**{name: True})
        found = schedules(make_sequence(1, 4, new=20), one)[1]
        assert not any(call.num_drafts for call in found)
    found = schedules(make_sequence(0, 40, new=4), make_sequence(1, 4, new=20), num_pages=64)[1]
    assert any(call.num_drafts for call in found)
    assert not any(call.num_drafts and (call.chunks or call.resumed) for call in found)


def test_a_call_with_drafts_asks_for_all_tokens_that_its_steps_may_give():
    one = make_sequence(0, 4, new=13)
    host = Host(one, drafting=always(), max_tokens_of_call=10)
    steps = [host.step() for _ in range(2)]
    assert (steps[1].num_steps, steps[1].num_verifications) == (K + 1, 1)
    host = Host(make_sequence(0, 4, new=30), drafting=always(), max_tokens_of_call=10, num_steps=8)
    steps = [host.step() for _ in range(2)]
    assert (steps[1].num_steps, steps[1].num_verifications) == (10, 8)
    assert steps[1].decodes[0].num_tokens == 10


def test_where_pages_are_too_few_for_drafts_a_token_is_computed_without():
    """Of five pages the prompts take four, which have room for a token each."""
    each = make_sequence(0, 7, new=9), make_sequence(1, 7, new=9)
    host = Host(*each, drafting=always(), max_tokens_of_call=10, num_pages=5)
    calls = [host.step() for _ in range(2)]
    assert [(len(call.decodes), call.num_drafts) for call in calls] == [(0, 0), (2, 0)]
    assert not host.scheduler.num_preemptions
    host.run()


@pytest.mark.parametrize("caching", [False, True])
def test_pages_are_counted_right_whatever_number_of_drafts_is_right(caching):
    """The allocator of the host's test refuses a schedule that needs more than are free."""
    for seed in range(40):
        each = [make_sequence(i, 3 + 5 * i, new=17 + i) for i in range(6)]
        with_forks(each[1], 2)
        sizes = dict(max_tokens_of_call=10, num_pages=14 + seed % 5, num_steps=1 + seed % 4)
        host = Host(*each, drafting=always(), caching=caching, **sizes)
        host.rng.seed(seed)
        calls = host.run()
        assert any(call.num_drafts for call in calls)
        assert all(len(one.token_ids) == one.max_len for one in each)
