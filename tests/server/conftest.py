"""The server of the tests: one for each module."""

from __future__ import annotations

import logging

import pytest

for _package in ("httptools", "starlette", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(_package, reason="needs the extra [server]")

import httpx

from tests.support.servers import RunningServer


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with RunningServer(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def no_errors_in_the_log(caplog):
    """Fails a test during which a library logs an error or a traceback."""
    yield
    bad = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not bad, [record.getMessage() for record in bad]
