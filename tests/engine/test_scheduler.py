"""The scheduler alone, against a page allocator of dicts and lists: no device, no model."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from pallas_paged.engine.scheduler_output import SchedulerOutput
from pallas_paged.engine.sequence import Sequence
from tests.support.marks import slow
from tests.support.scheduler_host import (
    Host,
    make_scheduler,
    make_sequence,
    start,
    token_at,
    with_followers,
)

NOTHING = dict(attachments=[], forks=[], decodes=[], resumed=[], chunks=[], num_steps=1)


def test_an_idle_scheduler_schedules_nothing():
    assert make_scheduler().schedule(in_flight=False) == SchedulerOutput(**NOTHING)


def test_prompts_share_the_batched_tokens_in_the_order_of_arrival():
    scheduler = make_scheduler(max_num_batched_tokens=10)
    host = Host.of(scheduler)
    one, two, three = make_sequence(0, 7), make_sequence(1, 8), make_sequence(2, 3)
    start(scheduler, one, two, three)
    chunks = host.step().chunks
    assert [(x.sequence, len(x.token_ids), x.is_last) for x in chunks] == [
        (one, 7, True),
        (two, 3, False),
    ]
    scheduled = host.step()  # the first decodes before its first token is read
    assert [decode.sequence for decode in scheduled.decodes] == [one]
    assert [(x.sequence, x.start, len(x.token_ids), x.is_last) for x in scheduled.chunks] == [
        (two, 3, 5, True),
        (three, 0, 3, True),
    ]
    assert scheduled.chunks[0].token_ids == two.token_ids[3:8]


def test_calls_stay_within_the_batched_tokens():
    scheduler = make_scheduler(max_num_batched_tokens=6, num_pages=64)
    host = Host.of(scheduler, num_pages=64)
    start(scheduler, *(make_sequence(number, 1 + number % 7) for number in range(12)))
    sizes = [len(x.decodes) + sum(len(y.token_ids) for y in x.chunks) for x in host.run()]
    assert max(sizes) == 6


def test_a_sequence_stops_decoding_after_its_last_token():
    scheduler = make_scheduler()
    host = Host.of(scheduler)
    one = make_sequence(0, 3, new=2)
    start(scheduler, one)
    assert [len(x.decodes) for x in host.run()] == [0, 1, 0]  # the last call only reads results
    assert one.token_ids[3:] == [1003, 1004] and one.output.finish_reason == "length"


def test_no_request_overtakes_the_head_of_the_queue():
    """A large prompt waits for pages; later small prompts would fit but wait behind it."""
    scheduler = make_scheduler(num_pages=8)
    host = Host.of(scheduler, num_pages=8)
    first, large = make_sequence(0, 8, new=12), make_sequence(1, 28, new=4)
    small = make_sequence(2, 1, new=2)
    start(scheduler, first, large, small)
    while not first.finished:
        host.step()
        assert large.num_starts == small.num_starts == 0 or first.finished
    host.run()
    assert large.finished and small.finished


def test_a_request_with_a_smaller_priority_goes_before_the_head_of_the_queue():
    scheduler = make_scheduler(num_pages=8)
    host = Host.of(scheduler, num_pages=8)
    first, large = make_sequence(0, 8, new=12), make_sequence(1, 28, new=4)
    urgent = make_sequence(2, 1, new=2, priority=-1)
    start(scheduler, first, large, urgent)
    host.step()
    assert urgent.num_starts == 1 and large.num_starts == 0
    host.run()


def test_a_stream_of_small_requests_does_not_starve_a_large_one():
    scheduler = make_scheduler(num_pages=8)
    host = Host.of(scheduler, num_pages=8)
    large = make_sequence(2, 24, new=8)
    start(scheduler, make_sequence(0, 4), make_sequence(1, 4), large)
    for number in range(3, 60):
        start(scheduler, make_sequence(number, 2, new=4))
        host.step()
    assert large.finished


@pytest.mark.parametrize(("watermark", "num_starts"), [(0, 1), (1, 1), (2, 0)])
def test_the_watermark_stays_free_when_requests_are_running(watermark, num_starts):
    scheduler = make_scheduler(num_pages=5, watermark=watermark)
    host = Host.of(scheduler, num_pages=5)
    first, second = make_sequence(0, 8), make_sequence(1, 8)
    start(scheduler, first, second)  # two pages each; one stays free
    host.step()
    assert (first.num_starts, second.num_starts) == (1, num_starts)


def test_the_watermark_does_not_apply_to_a_request_alone():
    scheduler = make_scheduler(num_pages=4, watermark=3)
    one = make_sequence(0, 9, new=7)
    start(scheduler, one)
    Host.of(scheduler, num_pages=4).run()
    assert one.finished


def test_the_newest_is_preempted_and_recomputed():
    scheduler = make_scheduler(num_pages=6)
    host = Host.of(scheduler, num_pages=6)
    each = [make_sequence(number, 4, new=14) for number in range(3)]
    start(scheduler, *each)
    while not scheduler.num_preemptions:
        host.step()
    assert [one.num_starts for one in each] == [1, 1, 1] and [*scheduler.waiting] == each[2:]
    last = each[2]
    assert last.slot is None and last.pages == [] and len(last.token_ids) > 4
    length = len(last.token_ids)
    schedules = host.run()
    assert each[0].request.num_preemptions == 0 and last.request.num_preemptions >= 1
    again = [x for scheduled in schedules for x in scheduled.chunks if x.sequence is last]
    assert again[0].token_ids == last.token_ids[:length]
    assert [one.token_ids[4:] for one in each] == [[1004 + i for i in range(14)]] * 3


def test_a_preempted_request_is_served_before_later_ones():
    scheduler = make_scheduler(num_pages=6)
    host = Host.of(scheduler, num_pages=6)
    each = [*(make_sequence(number, 4, new=14) for number in range(3)), make_sequence(3, 20, new=1)]
    start(scheduler, *each)
    while not scheduler.num_preemptions:
        host.step()
    assert [*scheduler.waiting] == each[2:]
    host.run()


def test_the_next_request_is_considered_when_the_head_leaves():
    scheduler = make_scheduler(num_pages=8)
    host = Host.of(scheduler, num_pages=8)
    first, large = make_sequence(0, 8, new=12), make_sequence(1, 28, new=4)
    small = make_sequence(2, 1, new=2)
    start(scheduler, first, large, small)
    host.step()
    host.end(large, "abort")
    host.step()
    assert (large.num_starts, small.num_starts) == (0, 1)
    host.run()


def test_cached_pages_are_evicted_before_any_preemption():
    scheduler = make_scheduler(num_pages=6, caching=True)
    host = Host.of(scheduler, num_pages=6)
    start(scheduler, make_sequence(0, 12, new=1))
    host.run()
    assert scheduler.pages.num_evictable == 3
    each = [make_sequence(1, 8, new=4), make_sequence(2, 8, new=4)]
    start(scheduler, *each)
    host.run()
    assert scheduler.num_preemptions == 0 and all(one.finished for one in each)


def test_a_cached_prefix_is_attached_and_not_computed():
    scheduler = make_scheduler(caching=True)
    host = Host.of(scheduler)
    prompt = list(range(12))
    start(scheduler, make_sequence(0, 0, new=1, prompt=prompt))
    host.run()
    prompts = [prompt, [*prompt, 50], [*prompt[:4], 99, *prompt[5:]]]
    each = [make_sequence(1 + i, 0, prompt=one) for i, one in enumerate(prompts)]
    start(scheduler, *each)
    scheduled = host.step()
    assert [len(pages) for _, pages in scheduled.attachments] == [2, 3, 1]
    # The last page of a fully cached prompt is computed again, for its last query.
    assert [len(chunk.token_ids) for chunk in scheduled.chunks] == [4, 1, 8]
    assert [one.request.num_cached_tokens for one in each] == [8, 12, 4]


def test_a_request_starts_when_its_prefix_is_cached_meanwhile():
    """It was too large for the free pages while the pages of its prefix were not known."""
    scheduler = make_scheduler(num_pages=13, caching=True)
    host = Host.of(scheduler, num_pages=13)
    prompt = list(range(30))
    first = make_sequence(0, 0, new=20, prompt=prompt)
    second = make_sequence(1, 0, new=3, prompt=[*prompt[:28], 33, 34, 35])
    start(scheduler, first, second)
    schedules = 0
    while not second.num_starts:
        host.step()
        schedules += 1
    assert schedules <= 4
    host.run()


@pytest.mark.parametrize("length", [1, 2, 4, 5, 7])
@pytest.mark.parametrize("caching", [False, True])
def test_followers_are_forked_and_the_prompt_is_computed_once(length, caching):
    scheduler = make_scheduler(caching=caching)
    host = Host.of(scheduler)
    leader = make_sequence(0, length)
    others = with_followers(leader, 3)
    start(scheduler, leader)
    schedules = host.run()
    assert [pair for x in schedules for pair in x.forks] == [(0, 1), (0, 2), (0, 3)]
    chunks = [chunk for x in schedules for chunk in x.chunks]
    assert sum(len(chunk.token_ids) for chunk in chunks) == length - 1
    resumed = [one for x in schedules for one in x.resumed]  # each decodes from its last token
    assert sorted(one.order for one in resumed) == [one.order for one in (leader, *others)]
    for one in (leader, *others):
        assert one.token_ids[length:] == [token_at(one, length + i) for i in range(8)]


def test_followers_without_a_page_for_their_copy_wait_and_attach():
    """Each follower needs a copy of the prompt's partial page, and no page is free."""
    scheduler = make_scheduler(num_pages=3, caching=True)
    host = Host.of(scheduler, num_pages=3)
    leader = make_sequence(0, 10, new=2)
    (other,) = with_followers(leader, 1)
    start(scheduler, leader)
    schedules = host.run()
    assert not any(x.forks for x in schedules)
    assert [len(pages) for x in schedules for _, pages in x.attachments] == [2]
    assert leader.finished and other.finished and scheduler.num_preemptions == 0


@pytest.mark.parametrize("caching", [False, True])
def test_a_preempted_leader_keeps_its_followers(caching):
    """The prompt is computed in two chunks; between them its pages go to another sequence."""
    scheduler = make_scheduler(caching=caching, max_num_batched_tokens=6)
    host = Host.of(scheduler)
    first, leader = make_sequence(0, 2, new=14), make_sequence(1, 13, new=2)
    others = with_followers(leader, 2)
    start(scheduler, first, leader)
    host.step()
    host.step()
    assert leader.slot is not None and leader.num_to_prefill > 0
    while host.calls:
        host.read()
    scheduler.preempt_all()
    assert leader.followers == others and leader.num_starts == 1
    schedules = host.run()
    assert len([pair for x in schedules for pair in x.forks]) == 2
    computed = [x for y in schedules for x in y.chunks if x.sequence.request is leader.request]
    assert sum(len(x.token_ids) for x in computed) <= 12


def test_a_fork_is_kept_when_its_next_token_has_no_page():
    """At a page border the fork itself needs no page, but the next token does."""
    scheduler = make_scheduler(num_pages=3)
    host = Host.of(scheduler, num_pages=3)
    leader, blocker = make_sequence(0, 5, new=2), make_sequence(1, 8, new=2)
    (other,) = with_followers(leader, 1)
    blocker.is_beam = True
    start(scheduler, leader, blocker)
    schedules = [host.step() for _ in range(3)]
    assert schedules[2] == SchedulerOutput(**NOTHING | {"forks": [(0, 1)]})
    while not (leader.finished and other.finished):
        host.step()
    assert blocker.awaiting_choice and blocker.slot is None  # preempted, its token not chosen
    blocker.is_beam = False
    scheduler.resume(blocker)
    host.run()


def test_a_request_with_more_samples_than_free_slots_blocks_no_other():
    scheduler = make_scheduler(num_pages=64)
    host = Host.of(scheduler, num_pages=64)
    first, leader, last = (make_sequence(number, 2, new=20) for number in range(3))
    others = with_followers(leader, 5)
    last.max_len = 5
    start(scheduler, first)
    host.step()
    start(scheduler, leader, last)
    host.step()
    assert leader.slot is not None and len(scheduler.running) == 4
    host.run()
    assert all(one.finished for one in (first, leader, last, *others))


@pytest.mark.parametrize("num_running", [1, 4])
@pytest.mark.parametrize("num_steps", [1, 7, 32])
def test_calls_that_only_decode_take_several_steps(num_running, num_steps):
    scheduler = make_scheduler(num_pages=64)
    host = Host.of(scheduler, num_pages=64, num_steps=lambda: num_steps)
    start(scheduler, *(make_sequence(number, 4, new=20) for number in range(num_running)))
    schedules = host.run()
    decoding = [x for x in schedules if x.decodes]
    assert max(x.num_steps for x in decoding) == num_steps
    assert len(decoding) <= -(-19 // num_steps) + num_running


def test_calls_take_one_step_while_a_request_waits():
    scheduler = make_scheduler(num_pages=64, max_num_seqs=1)
    host = Host.of(scheduler, num_pages=64, max_seqs=1, num_steps=lambda: 8)
    one, two = make_sequence(0, 4, new=9), make_sequence(1, 4, new=9)
    start(scheduler, one, two)
    while not one.finished:
        assert host.step().num_steps == 1
    host.run()


def test_calls_take_fewer_steps_where_the_pages_do_not_suffice():
    scheduler = make_scheduler(num_pages=5)
    host = Host.of(scheduler, num_pages=5, num_steps=lambda: 32)
    start(scheduler, make_sequence(0, 4, new=14), make_sequence(1, 4, new=6))
    steps = {x.num_steps for x in host.run() if x.decodes}
    assert len(steps) > 1 and scheduler.num_preemptions <= 1


def test_a_call_that_ends_early_returns_the_pages_of_its_other_steps():
    scheduler = make_scheduler(num_pages=16)
    host = Host.of(scheduler, num_steps=lambda: 32)
    long, short = make_sequence(0, 4, new=40), make_sequence(1, 4, new=40)
    short.stop_token_ids = {token_at(short, 9)}
    start(scheduler, long, short)
    while not short.finished:
        host.step()
    while host.calls:
        host.read()
    host.update()
    held = len(host.table.tokens[long.running_slot])
    assert long.num_computed == long.num_stored == held < 44
    assert scheduler.pages.num_free <= host.table.num_free == 16 - -(-held // 4)
    host.run()
    assert len(long.token_ids) == 44 and len(short.token_ids) == 10


def test_no_sequence_computes_more_tokens_than_were_scheduled():
    """The call in flight ends early, so the second sequence has more left than the host thinks."""
    scheduler = make_scheduler(num_pages=64)
    host = Host.of(scheduler, num_pages=64, num_steps=lambda: 9)
    one, two, three = (make_sequence(i, 4, new=new) for i, new in enumerate((40, 12, 40)))
    three.stop_token_ids = {token_at(three, 6)}
    start(scheduler, one, two, three)
    host.run()


@pytest.mark.parametrize("num_stops", [1, 2])
def test_free_pages_are_never_overcounted_after_calls_that_end_early(num_stops):
    """Long sequences go on beside some that stop early, at all distances from a page border."""
    for stop, num_steps, length in product(range(1, 9), range(2, 10), range(4, 8)):
        sizes = dict(num_pages=256, max_num_seqs=8)
        scheduler = make_scheduler(**sizes, max_num_batched_tokens=60)
        host = Host.of(scheduler, num_pages=256, max_seqs=8, num_steps=lambda n=num_steps: n)
        start(scheduler, *(make_sequence(number, length, new=60) for number in range(3)))
        for number in range(num_stops):
            one = make_sequence(10 + number, 4, new=60)
            one.stop_token_ids = {token_at(one, 4 + stop + number)}
            start(scheduler, one)
        host.run()


def test_an_ended_sequence_leaves_no_trace():
    scheduler = make_scheduler(caching=True)
    host = Host.of(scheduler)
    waiting, running, leader = make_sequence(9, 4), make_sequence(0, 9), make_sequence(1, 9)
    others = with_followers(leader, 2)
    start(scheduler, running, leader, waiting)
    host.step()
    for one in (waiting, leader, running, *others):
        host.end(one, "abort")
    host.run()
    host.update()
    assert not scheduler.waiting and not scheduler.running
    assert host.table.num_free + scheduler.pages.num_evictable == 16


@pytest.mark.parametrize(
    ("num_pages", "caching", "num_steps", "num_requests"),
    [
        *((pages, caching, 1, 60) for pages in (6, 9, 20) for caching in (False, True)),
        *((pages, caching, 9, 60) for pages in (6, 9, 20) for caching in (False, True)),
        *slow((pages, caching, 40, 750) for pages in (6, 9, 20) for caching in (False, True)),
    ],
)
def test_random_requests(num_pages, caching, num_steps, num_requests):
    """Arrivals, lengths, shared prefixes, samples, stops, priorities, aborts, emptied caches."""
    rng = np.random.default_rng([num_pages, num_steps])
    scheduler = make_scheduler(
        num_pages=num_pages, caching=caching, max_num_batched_tokens=7, watermark=1
    )
    steps = lambda: int(rng.integers(1, num_steps + 1))  # noqa: E731
    host = Host.of(scheduler, num_pages=num_pages, num_steps=steps)
    each: list[Sequence] = []
    num_long = 0
    for number in range(num_requests):
        length, new = int(rng.integers(1, 13)), int(rng.integers(1, 12))
        stem = [7] * int(rng.integers(0, length + 1))
        prompt = stem + rng.integers(0, 3, length - len(stem)).tolist()
        leader = make_sequence(
            number, 0, new=new, prompt=prompt, priority=int(rng.integers(0, 2)) * 2
        )
        group = [leader, *with_followers(leader, int(rng.choice([0, 0, 1, 3, 6])))]
        for one in group:
            if rng.random() < 0.3:
                one.stop_token_ids = {token_at(one, length + int(rng.integers(0, 11)))}
        each += group
        start(scheduler, leader)
        for _ in range(int(rng.integers(0, 20))):
            num_long += host.step().num_steps > 1
        live = [one for one in each if not one.finished]
        if live and rng.random() < 0.2:
            host.end(live[rng.integers(len(live))], "abort")
        if rng.random() < 0.05:
            scheduler.reset_prefix_cache()
        if rng.random() < 0.03:
            while host.calls:
                host.read()
            scheduler.preempt_all()
    host.run()
    host.update()
    assert all(one.finished for one in each)
    assert host.table.num_free + scheduler.pages.num_evictable == num_pages
    for one in each:
        length = len(one.request.prompt_token_ids)
        new = one.token_ids[length:]
        assert new == [token_at(one, length + i) for i in range(len(new))]
        assert one.request.num_cached_tokens < length
        ended = new and new[-1] in one.stop_token_ids
        if one.output.finish_reason != "abort":
            assert (one.output.finish_reason == "stop") == bool(ended)
            assert ended or len(one.token_ids) == one.max_len
    assert num_pages > 9 or scheduler.num_preemptions > 5
    assert num_long > 5 or num_steps == 1
