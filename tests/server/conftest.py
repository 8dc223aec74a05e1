"""The server that most tests share."""

import importlib.util
import logging
import shutil

import pytest

_PACKAGES = ("httptools", "httpx", "prometheus_client", "starlette", "uvicorn")
if not all(map(importlib.util.find_spec, _PACKAGES)):
    collect_ignore_glob = ["test_*.py"]  # they need the extra [server]


@pytest.fixture(scope="module", autouse=True)
def _exact_products(exact_products):
    """The texts of a server are compared with those of the model alone."""


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    from tests.support.servers import RunningServer

    with RunningServer(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def client(server):
    return server.client


@pytest.fixture(scope="session")
def api(server):
    """OpenAI's own client of the server."""
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api


@pytest.fixture(autouse=True)
def no_errors_in_the_log(caplog):
    """Fails a test during which a library logs an error or a traceback."""
    yield
    bad = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not bad, [record.getMessage() for record in bad]


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium."""
    sync_api = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no Chromium is installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, server):
    """The page, without an error or a message in its console."""
    from playwright import sync_api

    problems = []
    page = browser.new_page()
    page.on("pageerror", lambda error: problems.append(error.message))
    page.on("console", lambda message: problems.append(message.text))
    page.goto(server.url)
    sync_api.expect(page.locator("#model")).to_contain_text("small, 256 tokens")
    yield page
    page.close()
    assert not problems
