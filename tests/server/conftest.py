"""The server that most tests share."""

import importlib.util
import logging

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


@pytest.fixture(autouse=True)
def no_errors_in_the_log(caplog):
    """Fails a test during which a library logs an error or a traceback."""
    yield
    bad = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not bad, [record.getMessage() for record in bad]
