"""The map of the pool on the page of the server, in a headless Chromium."""

import pytest

from tests.support.server_page import (
    CELLS,
    answers,
    are_apart,
    cells_of,
    send,
    show_pool,
    swatch,
    sync_api,
)

pytestmark = pytest.mark.slow  # starts a browser; CI runs them in its part `docs`


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_map_has_a_colour_for_each_state_and_request(page, scheme):
    page.emulate_media(color_scheme=scheme)
    runs = [*([number, 2] for number in range(24)), ["shared", 3], ["cached", 5], ["free", 7]]
    show_pool(page, runs, used=48, shared=3, cached=5, free=7)
    states = [swatch(page, f"#pages .{name} dt") for name in ("shared", "cached", "free")]
    cells = cells_of(page)
    assert cells[48:] == [states[0]] * 3 + [states[1]] * 5 + [states[2]] * 7
    requests = cells[0:48:2]
    assert cells[:48] == [one for one in requests for _ in range(2)]
    assert are_apart([*requests, *states])
    assert swatch(page, "#requests li") == requests[0]
    legend = [*map(str, range(8)), "and 16 more"]
    assert page.locator("#requests li").all_text_contents() == legend
    numbers = [page.locator(f"#{x}").inner_text() for x in ("used", "shared", "cached", "free")]
    assert numbers == ["48", "3", "5", "7"]
    text = "Of 63 pages: 48 used, 3 shared, 5 cached, 7 free"
    assert page.locator("#map").get_attribute("aria-label") == text
    # The others keep their colours when some have ended, and new ones get other colours.
    show_pool(page, [*([number, 1] for number in range(20, 30)), ["free", 30]], used=10, free=30)
    cells = cells_of(page)
    assert cells[:4] == requests[20:] and are_apart([*cells[:10], *states])


def test_the_map_draws_pages_that_fill_replicas_and_large_pools(page):
    show_pool(page, [[1, 2], ["free", 2]], num_tokens={1: 8}, used=2, free=2, replicas=2)
    rows = page.evaluate(CELLS)
    assert [len(row) for row in rows] == [4, 4]
    for full, half, *_ in rows:
        assert full[0] == full[1] and half[1] == full[1] and half[0][3] < 128
    sync_api.expect(page.locator("#scale")).to_contain_text("in 2 replicas; 1 cell = 1 page")
    show_pool(page, [[1, 4000], ["free", 96]], pages_per_cell=25, used=99_000, free=1000)
    sync_api.expect(page.locator("#scale")).to_contain_text("1 cell = 25 pages")
    assert len(cells_of(page)) == 4096
    assert page.locator("#map").bounding_box()["height"] <= 300


def test_the_pool_is_shown_while_it_changes(page, server):
    server.call(server.service.engine.reset_prefix_cache())
    free, cached = page.locator("#free"), page.locator("#cached")
    sync_api.expect(free).to_have_text("64")
    send(page, "x" * 100, max_tokens=100)
    sync_api.expect(cached).not_to_have_text("0", timeout=60_000)
    answers(page)
    server.wait_until_idle()
    sync_api.expect(page.locator("#used")).to_have_text("0")
    sync_api.expect(page.locator("#running")).to_have_text("0")
    cells = cells_of(page)
    for name, number in (("free", free), ("cached", cached)):
        assert cells.count(swatch(page, f"#pages .{name} dt")) == int(number.inner_text()) > 0
    sync_api.expect(page.locator("#rate")).not_to_have_text("-")
    assert page.locator("#line").get_attribute("points")
