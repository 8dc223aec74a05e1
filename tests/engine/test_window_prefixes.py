"""Which cached prefixes have the pages of their window."""

import pytest

from pallas_paged.engine.schedule.windows import WindowPrefixes


def prefixes(sliding_window=6, num_pages=9, kept_tokens=12):
    return WindowPrefixes(
        sliding_window=sliding_window, kept_tokens=kept_tokens, page_size=4, num_pages=num_pages
    )


@pytest.mark.parametrize(
    ("window", "first"), [(1, 3), (2, 2), (5, 2), (6, 1), (9, 1), (10, 0), (99, 0)]
)
def test_a_query_behind_three_pages_sees_the_pages_of_its_window(window, first):
    """It is at position 12, and sees positions 13 - window to 12."""
    assert prefixes(window).first_block(3) == first


def test_a_prefix_is_usable_to_where_all_pages_of_its_window_are():
    cached, pages = prefixes(), [10, 11, 12, 13, 14, 15]
    assert cached.num_usable(pages) == 0
    assert cached.insert([12], [2]) == ([2], [])
    assert cached.num_usable(pages) == 0  # the window of 6 tokens behind block 2 needs two
    assert cached.insert([13], [3]) == ([3], [])
    assert cached.num_usable(pages) == 4
    assert cached.num_usable(pages[:3]) == 0
    assert cached.insert([10, 15], [0, 5]) == ([0, 5], [])
    assert cached.num_usable(pages) == 4
    assert cached.num_usable(pages[:1]) == 1
    assert cached.attach(pages[:4]) == [-1, -1, 2, 3]
    assert cached.num_inserted == 4 and sorted(cached.pages) == [0, 2, 3, 5]


def test_pages_that_were_used_the_longest_ago_go_first():
    cached = prefixes(num_pages=3)
    cached.insert([10, 11, 12], [0, 1, 2])
    cached.attach([10])
    assert cached.insert([11, 13, 14], [7, 3, -1]) == ([3], [2])  # 11 has one, and 14 has none
    assert cached.insert([15], [4]) == ([4], [0])
    assert cached.drop([11, 99, 15]) == [1, 4] and cached.pages == [3]


def test_the_first_blocks_of_a_sequence_may_be_free():
    assert [prefixes().first_kept(n) for n in (0, 11, 14, 15, 19)] == [0, 0, 0, 1, 2]
