"""The page of the server in a headless Chromium."""

import json
import re

import pytest

from tests.support.server_page import answers, send, show_pool, sync_api
from tests.support.servers import RunningServer, expected_text

pytestmark = pytest.mark.slow  # starts a browser; CI runs them in its part `docs`


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
    ended = sum(
        after[f'request_success_total{{finished_reason="{x}"}}'] for x in ("abort", "length")
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
        {"tool_calls": [{"index": 0} | calls[0]]},
        {"tool_calls": [{"index": 1} | calls[1] | {"function": {"name": "add", "arguments": ""}}]},
        *({"tool_calls": [{"index": 1, "function": {"arguments": x}}]} for x in '{"x": 2}'),
        {"tool_calls": [{"index": 2, "function": {"name": "cut", "arguments": '{"x'}}]},
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
    assert answers(page) == ['Hm.Waitadd({"x": 1})add({"x": 2})cut({"x)']
    assert page.locator(".reasoning").all_text_contents() == ["Hm."]
    assert page.locator(".call").count() == 3  # the last was cut off, and has no result
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
    page.route("**/completions", lambda route: route.fulfill(body=f"data: {json.dumps(event)}\n\n"))
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
