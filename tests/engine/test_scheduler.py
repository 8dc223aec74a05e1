"""The scheduler alone, against a page allocator of dicts and lists: no device, no model."""

import pytest

from pallas_paged.engine.requests.sequence import Sequence
from pallas_paged.engine.schedule.calls import SchedulerOutput
from pallas_paged.pages.prefix_cache import PrefixCache, chained_hash
from tests.support.marks import slow
from tests.support.scheduler_host import FIRST, Host, make_sequence, token_at, with_forks
from tests.support.scheduler_storm import Storm

NOTHING = dict(attachments=[], forks=[], decodes=[], resumed=[], chunks=[], num_steps=1)


def has_started(sequence: Sequence) -> bool:
    return sequence.request.start_time is not None


def test_prompts_share_the_batched_tokens_in_order_and_an_idle_scheduler_has_none():
    one, two, three, four = each = [make_sequence(i, n) for i, n in enumerate((7, 8, 4, 3))]
    host = Host(*each, max_num_batched_tokens=10)
    for parts in ([(one, 7, True), (two, 3, False)], [(two, 5, True), (three, 4, True)]):
        scheduled = host.step()
        assert [(x.sequence, len(x.token_ids), x.is_last) for x in scheduled.chunks] == parts
    # The first decodes before its first token is read.
    assert [decode.sequence for decode in scheduled.decodes] == [one]
    assert not has_started(four)
    host.run()
    assert Host().schedule() == SchedulerOutput(**NOTHING)


def test_requests_wait_behind_one_without_pages_unless_their_priority_is_smaller():
    first, large = make_sequence(0, 8, new=12), make_sequence(1, 28, new=4)
    host = Host(first, large, num_pages=8, caching=True)
    host.step()
    num_asked = host.cache.num_query_tokens
    host.step()
    assert host.cache.num_query_tokens == num_asked  # nothing new is cached
    urgent, small = make_sequence(2, 1, new=2, priority=-1), make_sequence(3, 1, new=2)
    host.add(small, urgent)
    for _ in range(4):
        host.step()
    assert [has_started(one) for one in (urgent, large, small)] == [True, False, False]
    host.end(large, "abort")
    host.step()
    assert has_started(small) and not first.finished
    host.run()


def test_a_request_starts_when_a_window_has_left_enough_pages():
    """Only the report of a call says so: no sequence ends, and nothing is cached."""
    first, second = make_sequence(0, 28, new=30), make_sequence(1, 16, new=2)
    host = Host(first, second, num_pages=9, sliding_window=6)
    starts = [(host.step(), has_started(second))[1] for _ in range(6)]
    assert starts[:2] == [False, False] and starts[-1] and not first.finished
    host.run()


def test_a_new_scheduler_refuses_a_sequence_for_which_it_has_too_few_pages():
    """It knows that all of its pages are free, and asks for no count."""
    message = "4 pages are free and 0 evictable, too few for a sequence of 28 tokens"
    with pytest.raises(RuntimeError, match=message):
        Host(make_sequence(0, 28), num_pages=4).schedule()


@pytest.mark.parametrize("window", [None, 6])
def test_a_sequence_holds_the_pages_of_its_tokens_or_of_a_chunk_and_its_window(window):
    pages = Host(sliding_window=window).scheduler.pages
    wanted = [0, 1, 2, 3, 7, 25 if window is None else 7]  # 6 + 16 tokens, on a page more
    assert [pages.max_pages_held(num_tokens) for num_tokens in (0, 1, 8, 9, 28, 99)] == wanted


@pytest.mark.parametrize(("watermark", "starts"), [(0, True), (1, True), (2, False), (4, False)])
def test_the_watermark_stays_free_when_requests_are_running(watermark, starts):
    """Two pages each of five; one stays free. The first starts in any case."""
    each = first, second = make_sequence(0, 8), make_sequence(1, 8)
    host = Host(*each, num_pages=5, watermark=watermark)
    host.step()
    assert has_started(first) and has_started(second) == starts


def test_the_newest_is_preempted_and_recomputed_before_later_requests():
    each = [*(make_sequence(number, 4, new=14) for number in range(3)), make_sequence(3, 20, new=1)]
    host = Host(*each, num_pages=6)
    while not host.scheduler.num_preemptions:
        host.step()
    assert [has_started(one) for one in each] == [True, True, True, False]
    assert [*host.scheduler.waiting] == each[2:]
    last = each[2]
    assert last.slot is None and last.pages == [] and len(last.token_ids) > 4
    assert host.scheduler.num_preemptions == last.request.num_preemptions == 1
    tokens = last.token_ids[:]
    chunks = [x for scheduled in host.run() for x in scheduled.chunks if x.sequence is last]
    assert chunks[0].token_ids == tokens
    assert each[0].request.num_preemptions == 0 and last.request.num_preemptions >= 1
    assert [one.token_ids[4:] for one in each[:3]] == [[FIRST + i for i in range(14)]] * 3


def test_cached_pages_are_evicted_before_any_preemption_with_some_spare():
    host = Host(make_sequence(0, 32, new=1), caching=True, num_pages=8, max_num_seqs=8)
    host.run()
    assert host.scheduler.pages.num_evictable == 8
    host.add(make_sequence(1, 4, new=1))
    host.run()
    assert host.scheduler.pages.num_evictable == 8 - 3 + 1  # one is missing, two are spare
    each = [make_sequence(i, 8, new=4) for i in (2, 3)]
    host.add(*each)
    host.run()
    assert host.scheduler.num_preemptions == 0 and all(one.finished for one in each)


def test_a_cached_prefix_is_attached_and_not_computed_also_one_that_is_cached_meanwhile():
    prompt = list(range(12))
    host = Host(make_sequence(0, new=1, prompt=prompt), caching=True)
    host.run()
    prompts = [prompt, [*prompt, 50], [*prompt[:4], 99, *prompt[5:]]]
    each = [make_sequence(1 + i, prompt=one) for i, one in enumerate(prompts)]
    host.add(*each)
    scheduled = host.step()
    assert [len(pages) for _, pages in scheduled.attachments] == [2, 3, 1]
    # The last page of a fully cached prompt is computed again, for its last query.
    assert [len(chunk.token_ids) for chunk in scheduled.chunks] == [4, 1, 8]
    assert [one.request.num_cached_tokens for one in each] == [8, 12, 4]
    # It was too large for the free pages while the pages of its prefix were not known.
    first = make_sequence(0, new=20, prompt=range(30))
    second = make_sequence(1, new=3, prompt=[*range(28), 33, 34, 35])
    host = Host(first, second, num_pages=13, caching=True)
    for _ in range(4):
        host.step()
    assert has_started(second)
    host.run()


@pytest.mark.parametrize("length", [1, 2, 4, 5, 7])
@pytest.mark.parametrize("caching", [False, True])
def test_samples_are_forked_and_the_prompt_is_computed_once(length, caching):
    source = make_sequence(0, length)
    each = [source, *with_forks(source, 3)]
    schedules = Host(source, caching=caching).run()
    assert [pair for x in schedules for pair in x.forks] == [(0, 1), (0, 2), (0, 3)]
    assert sum(len(y.token_ids) for x in schedules for y in x.chunks) == length - 1
    resumed = [one for x in schedules for one in x.resumed]  # each decodes from its last token
    assert sorted(one.order for one in resumed) == [one.order for one in each]
    for one in each:
        assert one.token_ids[length:] == [token_at(one, length + i) for i in range(8)]


def test_a_sequence_that_waits_within_its_prompt_is_forked_behind_it():
    """Four samples of another request decode meanwhile, and leave no token for its next chunk."""
    other, source = make_sequence(0, 3, new=6), make_sequence(1, 24, new=2)
    group = [source, *with_forks(source, 1)]
    with_forks(other, 3)
    schedules = Host(other, source, max_num_batched_tokens=4, max_num_seqs=6).run()
    sizes = [sum(len(y.token_ids) for y in x.chunks if y.sequence in group) for x in schedules]
    assert sizes[:3] == [2, 4, 4] and not any(sizes[3:9]) and sum(sizes) == 23
    assert [place for place, x in enumerate(schedules) if (4, 5) in x.forks] == [14]


def test_a_fork_is_kept_when_its_next_token_has_no_page():
    """At a page border the fork itself needs no page, but the next token does."""
    source, blocker = make_sequence(0, 5, new=2), make_sequence(1, 7, new=2)
    (other,) = with_forks(source, 1)
    host = Host(source, blocker, num_pages=3)
    schedules = [host.step() for _ in range(3)]
    assert schedules[2] == SchedulerOutput(**NOTHING | {"forks": [(0, 1)]})
    host.run()
    assert source.finished and other.finished and not host.scheduler.num_preemptions


def test_a_request_with_more_samples_than_free_slots_blocks_no_other():
    first, source, last = (make_sequence(i, 2, new=new) for i, new in enumerate((20, 20, 3)))
    others = with_forks(source, 5)
    host = Host(first, num_pages=64)
    host.step()
    host.add(source, last)
    host.step()
    assert source.slot == 1 and [one.slot for one in others] == [2, 3, None, None, None]
    schedules = host.run()
    assert last.finished and [pair for x in schedules for pair in x.forks] == [(1, 2), (1, 3)]
    assert all(one.finished for one in (first, source, *others))


def test_samples_go_on_without_the_first_of_them_that_waits():
    first, source = (make_sequence(i, 2) for i in range(2))
    others = with_forks(source, 2)
    host = Host(first, source, max_num_seqs=1)
    host.step()
    host.end(source, "abort")
    host.run()
    assert all(one.finished and one.token_ids[-1] == token_at(one, 9) for one in others)


def test_calls_that_only_decode_take_several_steps_or_half_of_them_until_the_pages_suffice():
    for num_running, num_steps in ((1, 1), (1, 7), (4, 7), (4, 32)):
        each = [make_sequence(number, 4, new=20) for number in range(num_running)]
        decoding = [x for x in Host(*each, num_pages=64, num_steps=num_steps).run() if x.decodes]
        assert max(x.num_steps for x in decoding) == num_steps
        assert len(decoding) <= -(-19 // num_steps) + num_running
    # 32 steps are 13 tokens of each sequence and 8 pages, 8 steps are 4 pages.
    host = Host(*(make_sequence(i, 4, new=14) for i in range(2)), num_pages=6, num_steps=32)
    assert [host.step().num_steps for _ in range(2)] == [1, 8]
    host.run()


HASHES = {"uncached": None, "hashed": chained_hash}
HASHES["colliding"] = lambda parent, tokens: (parent + sum(tokens)) % 5


@pytest.mark.parametrize("hashing", HASHES)
@pytest.mark.parametrize("num_pages", [6, 9, 20])
@pytest.mark.parametrize(
    ("num_steps", "window", "num_requests"),
    [(1, None, 200), (9, None, 200), (9, 3, 200), (9, 5, 200), *slow([(40, None, 2000)])],
)
def test_random_requests_in_small_pools(num_pages, hashing, num_steps, window, num_requests):
    hash_page = HASHES[hashing]
    cache = hash_page and PrefixCache(page_size=4, hash_page=hash_page)
    sizes = dict(num_pages=num_pages, max_num_seqs=4, max_num_batched_tokens=7, watermark=0)
    sizes |= dict(most_live=4, longest=10, window=window, ends_early=num_pages > 6, cache=cache)
    storm = Storm(num_pages + num_steps, checks=1, steps=range(1, num_steps + 1), **sizes)
    storm.serve(num_requests)
    single = window or hashing == "colliding"  # such need few pages
    assert num_pages > 9 or single or storm.counts["preemptions"] > 5
    assert storm.counts["long calls"] > 5 or num_steps == 1
    assert cache is None or window == 3 or storm.counts["prefix_cache_hits"] > 20


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize(("num_requests", "checks"), [(1000, 5), *slow([(50_000, 50)])])
def test_no_page_is_lost_and_every_request_ends_once(num_requests, checks, caching, window):
    """Thousands of requests; a million by `tests.support.scheduler_storm`."""
    storm = Storm(num_requests, caching=caching, window=window, checks=checks)
    storm.serve(num_requests)
    counts = storm.counts
    assert min(counts[x] for x in ("abort", "length", "stop", "preemptions")) > num_requests // 100
    assert (counts["prefix_cache_hits"] > num_requests // 10) == caching
