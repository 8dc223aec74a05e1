"""The page of the server in a headless Chromium."""

import itertools
import json
import math
import re
import shutil

import pytest

from tests.support.servers import RunningServer, expected_text

sync_api = pytest.importorskip("playwright.sync_api")
FOUND = filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
CHROMIUM = next(FOUND, None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, server):
    """The page, without an error or a message in its console."""
    problems = []
    page = browser.new_page()
    page.on("pageerror", lambda error: problems.append(error.message))
    page.on("console", lambda message: problems.append(message.text))
    page.goto(server.url)
    sync_api.expect(page.locator("#model")).to_contain_text("small, 256 tokens")
    yield page
    page.close()
    assert not problems


def send(page, text, **settings):
    for name, value in settings.items():
        page.locator(f"#{name}").fill(str(value))
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def answers(page):
    sync_api.expect(page.locator("#send")).to_be_visible(timeout=60_000)
    return page.locator(".message.assistant").all_text_contents()


def test_a_conversation(page):
    prompt = "[system] Rhyme.\n[user] Hi\n[assistant] "
    send(page, "Hi", temperature=0, max_tokens=8, system="Rhyme.")
    (first,) = answers(page)
    assert first == expected_text(prompt, 8)
    sync_api.expect(page.locator(".note")).to_contain_text("8 tokens")
    send(page, "More")
    _, second = answers(page)
    prompt += f"{first}\n[user] More\n[assistant] "
    if "\ufffd" not in first:
        assert second == expected_text(prompt, 8)
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".message").count() == 0


def test_stop_ends_the_answer_and_the_request(page, server):
    before = server.metrics()['request_success_total{finished_reason="abort"}']
    send(page, "Talk on", max_tokens=220)
    page.get_by_role("button", name="Stop").click()
    assert len(answers(page)) <= 1
    server.wait_until_idle()
    after = server.metrics()
    ended = (
        after['request_success_total{finished_reason="abort"}']
        + after['request_success_total{finished_reason="length"}']
    )
    assert ended > before


def test_reasoning_and_calls_are_shown_and_the_next_messages_are_their_results(page):
    calls = [
        {"id": x, "type": "function", "function": {"name": "add", "arguments": f'{{"x": {x}}}'}}
        for x in "12"
    ]
    deltas = [
        {"role": "assistant", "content": "", "reasoning_content": "H"},
        {"reasoning_content": "m."},
        {"content": "Wait"},
        {"tool_calls": [{"index": i} | call for i, call in enumerate(calls)]},
    ]
    events = "".join(
        f"data: {json.dumps({'choices': [{'index': 0, 'delta': one}]})}\n\n" for one in deltas
    )
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=events))
    tools = [{"type": "function", "function": {"name": "add"}}]
    page.get_by_label("Tools").fill(json.dumps(tools))
    with page.expect_request("**/v1/chat/completions") as request:
        send(page, "Hi")
    assert request.value.post_data_json["tools"] == tools
    assert answers(page) == ['Hm.Waitadd({"x": 1})add({"x": 2})']
    assert page.locator(".reasoning").all_text_contents() == ["Hm."]
    assert page.locator(".call").count() == 2
    send(page, "3")
    with page.expect_request("**/v1/chat/completions") as request:
        send(page, "4")
    assert request.value.post_data_json["messages"] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Wait", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "tool", "tool_call_id": "2", "content": "4"},
    ]
    answers(page)


@pytest.mark.parametrize("key", ["Escape", "Enter"])
def test_keys_stop_an_answer(page, key):
    """Enter by the button Stop, which has the focus."""
    held: list = []
    page.route("**/v1/chat/completions", lambda route: held.append(route))  # no answer
    with page.expect_event("requestfailed") as failed:
        send(page, "Hi")
        sync_api.expect(page.get_by_role("button", name="Stop")).to_be_focused()
        page.keyboard.press(key)
    assert failed.value.failure == "net::ERR_ABORTED"
    assert answers(page) == [] and page.locator(".error").count() == 0
    assert page.evaluate("document.activeElement.id") == "message"
    held.pop().abort()


def test_settings_are_fields_of_the_request(page):
    event = {"choices": [{"index": 0, "delta": {"content": "x"}}]}
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(body=f"data: {json.dumps(event)}\n\n")
    )
    settings = {
        "Max tokens": ("max_tokens", 5),
        "Temperature": ("temperature", 0.5),
        "Top p": ("top_p", 0.25),
        "Seed": ("seed", 7),
        "Stop": ("stop", "end"),
        "Completions (n)": ("n", 3),
        "System prompt": ("messages", "Rhyme."),
    }
    for label, (_, value) in settings.items():
        page.get_by_label(label, exact=True).fill(str(value))
    page.get_by_label("Message").fill("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    with page.expect_request("**/v1/chat/completions") as request:
        page.keyboard.press("Enter")
    body = request.value.post_data_json
    messages = [{"role": "system", "content": "Rhyme."}, {"role": "user", "content": "one\ntwo"}]
    wanted = dict(settings.values()) | {"messages": messages, "model": "small", "stream": True}
    assert body == wanted | {"stream_options": {"include_usage": True}}
    assert answers(page) == ["x"]


@pytest.mark.parametrize("kind", ["chat", "continuation"])
def test_an_empty_conversation_offers_prompts_that_any_model_answers(page, server, kind):
    if kind == "continuation":
        (model,) = server.client.get("/v1/models").json()["data"]
        body = json.dumps({"data": [model | {"has_chat_template": False}]})
        page.route("**/v1/models", lambda route: route.fulfill(body=body))
        page.reload()
    starters = page.locator("#starters button")
    sync_api.expect(starters).to_have_count(3)
    texts = starters.all_text_contents()
    for index, (count, max_tokens) in enumerate(((1, "8"), (1, "8"), (2, ""))):
        page.get_by_label("Max tokens").fill(max_tokens)
        starters.nth(index).click()
        assert len(answers(page)) == count and page.locator(".error").count() == 0
        assert page.locator(".message.user").all_text_contents() == [texts[index]]
        assert starters.count() == 0
        page.get_by_role("button", name="New chat").click()
    server.wait_until_idle()


def test_a_model_without_a_tokenizer_is_offered_none(page):
    model = {"id": "x", "max_model_len": 8, "has_chat_template": False, "has_tokenizer": False}
    page.route("**/v1/models", lambda route: route.fulfill(body=json.dumps({"data": [model]})))
    page.reload()
    sync_api.expect(page.locator("#model")).to_contain_text("without a tokenizer")
    assert page.locator("#starters button").count() == 0


def test_texts_are_never_html(page):
    text = "<img src=x onerror=\"document.title='bad'\"><b>bold</b>"
    event = (
        '{"choices":[{"index":0,"delta":{"content":"<script>document.title=1</script><i>x</i>"}}]}'
    )
    body = f"data: {event}\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body))
    send(page, text)
    assert answers(page) == ["<script>document.title=1</script><i>x</i>"]
    assert page.locator(".message.user").text_content() == text
    assert page.title() == "pallas_paged"
    assert page.locator("#log img, #log b, #log i, #log script").count() == 0


def test_errors_are_shown(page):
    body = 'data: {"error": {"message": "too late"}}\n\n'
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body))
    send(page, "Hi")
    sync_api.expect(page.get_by_role("alert")).to_have_text("too late")
    assert answers(page) == []


# The colours of the cells of the map by rows, each as [r, g, b, alpha] at its top and its bottom.
CELLS = """() => {
  const map = document.getElementById("map");
  const { width, height } = map;
  const context = new OffscreenCanvas(width, height).getContext("2d");
  context.drawImage(map, 0, 0);
  const { data } = context.getImageData(0, 0, width, height);
  const pixel = (x, y) => [...data.slice(4 * (y * width + x), 4 * (y * width + x) + 4)];
  const runs = (length, at) => {
    const found = [];
    for (let i = 0; i < length; i += 1) {
      if (at(i)[3] && !(i && at(i - 1)[3])) found.push([i, i]);
      if (at(i)[3]) found.at(-1)[1] = i;
    }
    return found;
  };
  return runs(height, (y) => pixel(0, y)).map(([top, bottom]) =>
    runs(width, (x) => pixel(x, bottom)).map(([x]) => [pixel(x, top), pixel(x, bottom)]));
}"""


def cells_of(page):
    """The colours of all cells, which are the same all over."""
    cells = [cell for row in page.evaluate(CELLS) for cell in row]
    assert all(top == bottom and bottom[3] == 255 for top, bottom in cells)
    return [tuple(bottom[:3]) for _, bottom in cells]


def swatch(page, selector):
    style = f"getComputedStyle(document.querySelector({selector!r}), '::before').backgroundColor"
    return tuple(map(int, re.findall(r"\d+", page.evaluate(style))))


def are_apart(colours):
    return all(math.dist(a, b) > 50 for a, b in itertools.combinations(colours, 2))


def show_pool(page, runs, *, pages_per_cell=1, num_tokens=None, replicas=1, **counts):
    """Let the page draw a pool; these are its runs and counts in each replica."""
    counts = dict(used=0, shared=0, cached=0, free=0) | counts
    replica = {"runs": runs, "num_tokens": num_tokens or {}, "counts": counts}
    replica["num_pages"] = sum(counts.values())
    body = {"page_size": 16, "pages_per_cell": pages_per_cell, "replicas": [replica] * replicas}
    page.route("**/pool", lambda route: route.fulfill(body=json.dumps(body)))
    text = f"{replica['num_pages'] * replicas} pages"
    sync_api.expect(page.locator("#scale")).to_contain_text(text)


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


def test_nothing_is_asked_while_the_view_is_closed_or_the_tab_hidden(browser, server):
    page = browser.new_page()
    page.clock.install()
    paths = []
    page.on("request", lambda request: paths.append(request.url.removeprefix(server.url)))
    page.goto(server.url)

    def polls():
        """What is asked in some seconds."""
        paths.clear()
        for _ in range(8):
            page.clock.run_for(1000)
            page.evaluate("fetch('health').then((answer) => answer.text())")
        return {*paths} - {"/health"}

    def hide(is_hidden):
        page.evaluate(
            """(hidden) => {
              Object.defineProperty(document, "hidden", { get: () => hidden, configurable: true });
              document.dispatchEvent(new Event("visibilitychange"));
            }""",
            is_hidden,
        )

    summary = page.locator("summary")
    all_paths = {"/pool", "/metrics"}
    assert polls() >= all_paths
    for leave, come_back in (
        (summary.click, summary.click),
        (lambda: hide(True), lambda: hide(False)),
    ):
        leave()
        polls()  # what has begun ends
        assert polls() == set()
        come_back()
        assert polls() == all_paths
    page.close()


def test_a_phone_has_everything_and_never_scrolls_sideways(page):
    page.set_viewport_size({"width": 400, "height": 800})
    page.reload()
    sync_api.expect(page.locator("#starters button")).to_have_count(3)
    assert not page.evaluate("document.getElementById('pool').open")  # the chat comes first
    for _ in range(2):
        assert page.evaluate("document.documentElement.scrollWidth") == 400
        assert page.evaluate("document.querySelector('main').scrollWidth") == 400
        for control in page.locator("button:visible, input, textarea, summary").all():
            control.scroll_into_view_if_needed()
            box = control.bounding_box()
            assert 0 <= box["x"] <= box["x"] + box["width"] <= 400 and box["height"] >= 20
        page.locator("summary").click()


def test_texts_can_be_read_in_both_schemes(page):
    """As WCAG has it, a text has 4.5 times the luminance of what is behind it, or the inverse."""

    def luminance(selector, name):
        style = f"getComputedStyle(document.querySelector({selector!r}))[{name!r}]"
        values = [int(x) / 255 for x in re.findall(r"\d+", page.evaluate(style))]
        linear = [x / 12.92 if x <= 0.04 else ((x + 0.055) / 1.055) ** 2.4 for x in values]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    show_pool(page, [["free", 8]], free=8)
    pairs = [("#model", "header"), ("dt", "aside"), ("#starters button", "#starters button")]
    pairs += [("#send", "#send"), ("#scale", "aside"), ("#message", "#message"), ("h2", "body")]
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert (luminance("body", "backgroundColor") < 0.2) == (scheme == "dark")
        for text, behind in pairs:
            both = sorted([luminance(text, "color"), luminance(behind, "backgroundColor")])
            assert (both[1] + 0.05) / (both[0] + 0.05) >= 4.5, (scheme, text)


def test_every_field_has_a_label_and_the_page_works_by_keyboard(page):
    for field in page.locator("input, textarea").all():
        name = field.get_attribute("id")
        assert page.locator(f"label[for={name}]").count() == 1, name
    page.get_by_label("Message").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "send"


@pytest.mark.cpu_budget(12)  # that of the browser is counted when it ends
def test_a_server_with_a_key_asks_for_it(browser, tmp_path):
    with RunningServer(tmp_path, api_keys=("secret",)) as server:
        page, problems = browser.new_page(), []
        page.on("pageerror", lambda error: problems.append(error.message))
        page.goto(server.url)
        sync_api.expect(page.locator("#model")).to_contain_text("Authorization")
        send(page, "Hi")
        sync_api.expect(page.get_by_role("alert")).to_contain_text("Authorization")
        page.get_by_label("API key").fill("secret")
        page.keyboard.press("Tab")
        sync_api.expect(page.locator("#model")).to_contain_text("small, 256 tokens")
        sync_api.expect(page.locator("#free")).to_have_text("64")
        page.get_by_role("button", name="New chat").click()
        sync_api.expect(page.locator("#starters button")).to_have_count(3)
        page.close()
        assert not problems
