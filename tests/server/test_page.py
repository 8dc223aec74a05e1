"""The page of the server in a headless Chromium."""

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


def test_texts_are_never_html(page):
    text = "<img src=x onerror=\"document.title='bad'\"><b>bold</b>"
    event = '{"choices":[{"delta":{"content":"<script>document.title=1</script><i>x</i>"}}]}'
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


def test_the_pool_is_shown_while_it_changes(page):
    number = page.locator("#free")
    sync_api.expect(number).to_contain_text("of 64")
    send(page, "x" * 100, max_tokens=100)
    sync_api.expect(page.locator("#cached")).not_to_have_text("0", timeout=60_000)
    answers(page)
    sync_api.expect(page.locator("#rate")).not_to_have_text("-")
    assert page.locator("#line").get_attribute("points")


def test_every_field_has_a_label_and_the_page_works_by_keyboard(page):
    for field in page.locator("input, textarea").all():
        name = field.get_attribute("id")
        assert page.locator(f"label[for={name}]").count() == 1, name
    page.get_by_label("Message").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "send"


def test_a_server_with_a_key_asks_for_it(browser, tmp_path):
    with RunningServer(tmp_path, api_keys=("secret",)) as server:
        page = browser.new_page()
        page.goto(server.url)
        sync_api.expect(page.locator("#model")).to_contain_text("Authorization")
        page.get_by_label("API key").fill("secret")
        sync_api.expect(page.locator("#model")).to_contain_text("small, 256 tokens")
        page.close()
