"""The scheduler alone, against a page allocator of dicts and lists: no device, no model."""

from __future__ import annotations

import numpy as np
import pytest

from models.scheduler import Plan
from models.seq import Seq
from tests.support.scheduler_host import (
    Host,
    make_scheduler,
    make_seq,
    start,
    token_at,
    with_followers,
)


def test_an_idle_scheduler_plans_nothing():
    plan = make_scheduler().plan(in_flight=False)
    assert plan == Plan(adoptions=[], forks=[], decodes=[], given=[], chunks=[])


def test_prompts_share_the_budget_in_the_order_of_arrival():
    scheduler = make_scheduler(token_budget=10)
    host = Host.of(scheduler)
    seqs = [make_seq(0, 7), make_seq(1, 8), make_seq(2, 3)]
    start(scheduler, *seqs)
    plan = host.step()
    assert [(chunk.seq, len(chunk.tokens), chunk.ends) for chunk in plan.chunks] == [
        (seqs[0], 7, True),
        (seqs[1], 3, False),
    ]
    plan = host.step()  # the first decodes before its first token is read
    assert plan.decodes == [seqs[0]]
    assert [(chunk.seq, len(chunk.tokens), chunk.ends) for chunk in plan.chunks] == [
        (seqs[1], 5, True),
        (seqs[2], 3, True),
    ]
    assert plan.chunks[0].tokens == seqs[1].tokens[3:8]


def test_steps_stay_within_the_budget_and_the_number_of_chunks():
    scheduler = make_scheduler(token_budget=6, max_chunks=2, num_pages=64)
    host = Host.of(scheduler, num_pages=64)
    start(scheduler, *(make_seq(number, 1 + number % 7) for number in range(12)))
    plans = host.run()
    for plan in plans:
        size = len(plan.decodes) + sum(len(chunk.tokens) for chunk in plan.chunks)
        assert size <= 6 and len(plan.chunks) <= 2
    assert any(len(plan.chunks) == 2 and plan.decodes for plan in plans)


def test_a_sequence_stops_decoding_after_its_last_token():
    scheduler = make_scheduler()
    host = Host.of(scheduler)
    seq = make_seq(0, 3, new=2)
    start(scheduler, seq)
    plans = host.run()
    assert [len(plan.decodes) for plan in plans] == [0, 1, 0]  # the last step only reads results
    assert seq.tokens[3:] == [1003, 1004] and seq.completion.finish_reason == "max_tokens"


def test_no_request_overtakes_the_head_of_the_queue():
    """A large prompt waits for pages; later small prompts would fit but wait behind it."""
    scheduler = make_scheduler(num_pages=8)
    host = Host.of(scheduler, num_pages=8)
    first, large, small = make_seq(0, 8, new=12), make_seq(1, 28, new=4), make_seq(2, 1, new=2)
    start(scheduler, first, large, small)
    while not first.finished:
        host.step()
        assert large.lives == small.lives == 0 or first.finished
    host.run()
    assert large.finished and small.finished


def test_a_stream_of_small_requests_does_not_starve_a_large_one():
    scheduler = make_scheduler(num_pages=8)
    host = Host.of(scheduler, num_pages=8)
    start(scheduler, make_seq(0, 4), make_seq(1, 4))
    large = make_seq(2, 24, new=8)
    start(scheduler, large)
    for number in range(3, 60):
        start(scheduler, make_seq(number, 2, new=4))
        host.step()
    assert large.finished


@pytest.mark.parametrize(("watermark", "lives"), [(0, 1), (1, 1), (2, 0)])
def test_the_watermark_stays_free_when_requests_are_running(watermark, lives):
    scheduler = make_scheduler(num_pages=5, watermark=watermark)
    host = Host.of(scheduler, num_pages=5)
    first, second = make_seq(0, 8), make_seq(1, 8)
    start(scheduler, first, second)  # two pages each; one stays free
    host.step()
    assert (first.lives, second.lives) == (1, lives)


def test_the_watermark_does_not_apply_to_a_request_alone():
    scheduler = make_scheduler(num_pages=4, watermark=3)
    seq = make_seq(0, 9, new=7)
    start(scheduler, seq)
    Host.of(scheduler, num_pages=4).run()
    assert seq.finished


def test_the_newest_is_preempted_and_recomputed():
    scheduler = make_scheduler(num_pages=6)
    host = Host.of(scheduler, num_pages=6)
    seqs = [make_seq(number, 4, new=14) for number in range(3)]
    start(scheduler, *seqs)
    while not scheduler.num_preemptions:
        host.step()
    assert [seq.lives for seq in seqs] == [1, 1, 1] and [*scheduler.queue] == [seqs[2]]
    assert seqs[2].row is None and seqs[2].pages == [] and len(seqs[2].tokens) > 4
    length = len(seqs[2].tokens)
    plans = host.run()
    assert seqs[0].request.num_preemptions == 0 and seqs[2].request.num_preemptions >= 1
    again = [chunk for plan in plans for chunk in plan.chunks if chunk.seq is seqs[2]]
    assert again[0].tokens == seqs[2].tokens[:length]
    assert [seq.tokens[4:] for seq in seqs] == [[1004 + i for i in range(14)]] * 3


def test_a_preempted_request_is_served_before_later_ones():
    scheduler = make_scheduler(num_pages=6)
    host = Host.of(scheduler, num_pages=6)
    seqs = [*(make_seq(number, 4, new=14) for number in range(3)), make_seq(3, 20, new=1)]
    start(scheduler, *seqs)
    while not scheduler.num_preemptions:
        host.step()
    assert [*scheduler.queue] == seqs[2:]
    host.run()


def test_the_next_request_is_considered_when_the_head_leaves():
    scheduler = make_scheduler(num_pages=8)
    host = Host.of(scheduler, num_pages=8)
    first, large, small = make_seq(0, 8, new=12), make_seq(1, 28, new=4), make_seq(2, 1, new=2)
    start(scheduler, first, large, small)
    host.step()
    host.end(large, "aborted")
    host.step()
    assert (large.lives, small.lives) == (0, 1)
    host.run()


def test_cached_pages_are_evicted_before_any_preemption():
    scheduler = make_scheduler(num_pages=6, caching=True)
    host = Host.of(scheduler, num_pages=6)
    start(scheduler, make_seq(0, 12, new=1))
    host.run()
    assert scheduler.num_evictable == 3
    seqs = [make_seq(1, 8, new=4), make_seq(2, 8, new=4)]
    start(scheduler, *seqs)
    host.run()
    assert scheduler.num_preemptions == 0 and all(seq.finished for seq in seqs)


def test_a_cached_prefix_is_attached_and_not_computed():
    scheduler = make_scheduler(caching=True)
    host = Host.of(scheduler)
    prompt = list(range(12))
    start(scheduler, make_seq(0, 0, new=1, prompt=prompt))
    host.run()
    same, longer, other = (
        make_seq(1, 0, prompt=prompt),
        make_seq(2, 0, prompt=[*prompt, 50]),
        make_seq(3, 0, prompt=[*prompt[:4], 99, *prompt[5:]]),
    )
    start(scheduler, same, longer, other)
    plan = host.step()
    assert [len(pages) for _, pages in plan.adoptions] == [2, 3, 1]
    # The last page of a fully cached prompt is computed again, for its last query.
    assert [len(chunk.tokens) for chunk in plan.chunks] == [4, 1, 8]
    assert [seq.request.num_cached_tokens for seq in (same, longer, other)] == [8, 12, 4]


@pytest.mark.parametrize("length", [1, 2, 4, 5, 7])
@pytest.mark.parametrize("caching", [False, True])
def test_followers_are_forked_and_the_prompt_is_computed_once(length, caching):
    scheduler = make_scheduler(caching=caching)
    host = Host.of(scheduler)
    leader = make_seq(0, length)
    others = with_followers(leader, 3)
    start(scheduler, leader)
    plans = host.run()
    assert [(src, dst) for plan in plans for src, dst in plan.forks] == [(0, 1), (0, 2), (0, 3)]
    chunks = [chunk for plan in plans for chunk in plan.chunks]
    assert sum(len(chunk.tokens) for chunk in chunks) == length - 1
    given = [seq for plan in plans for seq in plan.given]  # each decodes from its last token
    assert sorted(seq.order for seq in given) == [seq.order for seq in (leader, *others)]
    for seq in (leader, *others):
        assert seq.tokens[length:] == [token_at(seq, length + i) for i in range(8)]


def test_followers_without_a_page_for_their_copy_wait_and_attach():
    """Each follower needs a copy of the prompt's partial page, and no page is free."""
    scheduler = make_scheduler(num_pages=3, caching=True)
    host = Host.of(scheduler, num_pages=3)
    leader = make_seq(0, 10, new=2)
    (other,) = with_followers(leader, 1)
    start(scheduler, leader)
    plans = host.run()
    assert not any(plan.forks for plan in plans)
    assert [len(pages) for plan in plans for _, pages in plan.adoptions] == [2]
    assert leader.finished and other.finished and scheduler.num_preemptions == 0


def test_a_fork_is_kept_when_its_next_token_has_no_page():
    """At a page border the fork itself needs no page, but the next token does."""
    scheduler = make_scheduler(num_pages=3)
    host = Host.of(scheduler, num_pages=3)
    leader, blocker = make_seq(0, 5, new=2), make_seq(1, 8, new=2)
    (other,) = with_followers(leader, 1)
    blocker.steered = True
    start(scheduler, leader, blocker)
    plans = [host.step() for _ in range(3)]
    assert plans[2] == Plan(adoptions=[], forks=[(0, 1)], decodes=[], given=[], chunks=[])
    while not (leader.finished and other.finished):
        host.step()
    assert blocker.parked and blocker.row is None  # preempted, and waiting for its token to be read
    blocker.steered = False
    scheduler.unpark(blocker)
    host.run()


def test_a_request_of_many_rows_waits_for_all_and_is_not_overtaken():
    scheduler = make_scheduler(num_pages=64)
    host = Host.of(scheduler, num_pages=64)
    first, leader, last = make_seq(0, 2, new=3), make_seq(1, 2, new=3), make_seq(2, 2, new=3)
    with_followers(leader, 3)
    start(scheduler, first, leader, last)
    while not first.finished:
        assert leader.lives == last.lives == 0
        host.step()
    host.step()
    assert leader.row is not None and last.row is None
    host.run()


def test_spare_rows_stay_reserved_for_branches():
    scheduler = make_scheduler()
    host = Host.of(scheduler)
    parent, other = make_seq(0, 4), make_seq(1, 4)
    parent.num_spare_rows = 3
    start(scheduler, parent, other)
    host.step()
    assert parent.row is not None and other.row is None
    parent.num_spare_rows = 0
    host.step()
    assert other.row is not None


def test_an_ended_sequence_leaves_no_trace():
    scheduler = make_scheduler(caching=True)
    host = Host.of(scheduler)
    queued, running = make_seq(9, 4), make_seq(0, 9)
    leader = make_seq(1, 9)
    others = with_followers(leader, 2)
    start(scheduler, running, leader, queued)
    host.step()
    for seq in (queued, leader, running, *others):
        host.end(seq, "aborted")
    host.run()
    host.settle()
    assert not scheduler.queue and not scheduler.running
    assert host.table.num_free + scheduler.num_evictable == 16


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("num_pages", [6, 9, 20])
def test_random_requests(caching, num_pages):
    """Random arrivals, lengths, shared prefixes, followers and aborts in a pool of a few pages."""
    rng = np.random.default_rng(num_pages)
    scheduler = make_scheduler(num_pages=num_pages, caching=caching, token_budget=7, watermark=1)
    host = Host.of(scheduler, num_pages=num_pages)
    seqs: list[Seq] = []
    for number in range(150):
        length, new = int(rng.integers(1, 13)), int(rng.integers(1, 12))
        stem = [7] * int(rng.integers(0, length + 1))
        prompt = stem + rng.integers(0, 3, length - len(stem)).tolist()
        leader = make_seq(number, 0, new=new, prompt=prompt)
        seqs += [leader, *with_followers(leader, int(rng.integers(0, 4)))]
        start(scheduler, leader)
        for _ in range(int(rng.integers(0, 12))):
            host.step()
        live = [seq for seq in seqs if not seq.finished]
        if live and rng.random() < 0.2:
            host.end(live[rng.integers(len(live))], "aborted")
    host.run()
    host.settle()
    assert all(seq.finished for seq in seqs)
    assert host.table.num_free + scheduler.num_evictable == num_pages
    for seq in seqs:
        length = len(seq.request.prompt)
        wanted = [token_at(seq, position) for position in range(length, len(seq.tokens))]
        assert seq.tokens[length:] == wanted
        assert seq.request.num_cached_tokens < length
        if seq.completion.finish_reason == "max_tokens":
            assert len(seq.tokens) == seq.limit
    assert num_pages > 9 or scheduler.num_preemptions > 5
