"""The command `python -m models.server` in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from models.server import command
from tests.support.commands import CONFIG, save_tiny_model

ROOT = Path(__file__).parents[2]
SIZES = ["--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--implementation", "xla"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def start(checkpoint):
    """Start the command; wait for its line, and return the process, its address and the line."""
    processes = []

    def start(*args):
        given = ["--checkpoint", str(checkpoint), "--port", "0", *SIZES, *args]
        env = os.environ | {"JAX_PLATFORMS": "cpu", "PALLAS_PAGED_API_KEY": "secret"}
        process = subprocess.Popen(
            [sys.executable, "-m", "models.server", *given],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        line = process.stdout.readline()
        assert line, process.stderr.read()
        return process, line.split()[0], line

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def stream_of(url, **fields):
    body = {"prompt": "x", "max_tokens": 60, "temperature": 0, "stream": True} | fields
    headers = {"authorization": "Bearer secret"}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response:
        yield response.status_code
        yield from response.iter_lines()


def test_it_serves_until_a_signal_and_then_what_it_has_accepted(start, checkpoint):
    process, url, line = start("--warmup", "default")
    assert re.fullmatch(
        rf"http://127\.0\.0\.1:\d+ serves {checkpoint.name}: {CONFIG.max_position_embeddings}"
        r" tokens of context, 2 sequences at a time, \d+ pages of 16 tokens \(\d+ MiB\)\n",
        line,
    )
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{url}/v1/models").status_code == 401
    lines = stream_of(url)
    assert next(lines) == 200
    process.send_signal(signal.SIGTERM)
    assert [line for line in lines if line][-1] == "data: [DONE]"
    assert process.wait(60) == 0
    progress = process.stderr.read()
    for word in ("importing JAX", "loading", "compiling", "compiled", "shutting down"):
        assert word in progress
    assert "Traceback" not in progress and "rror" not in progress


def test_a_second_signal_ends_it_at_once(start):
    process, url, _ = start("--warmup", "none")
    host, port = url.removeprefix("http://").split(":")
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\r\n"
    head += b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    with socket.create_connection((host, int(port))) as unfinished:
        unfinished.sendall(head)
        assert httpx.get(f"{url}/health").status_code == 200  # it has read the head
        process.send_signal(signal.SIGINT)
        while "shutting down" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM


def test_a_signal_before_it_serves_ends_it_at_once(checkpoint):
    command = [
        sys.executable,
        "-m",
        "models.server",
        "--checkpoint",
        str(checkpoint),
        "--port",
        "0",
    ]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stderr.readline() == "importing JAX ...\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
        assert process.stderr.read() == ""


def run(capsys, *args):
    status = command.main(["--port", "0", *args])
    return status, capsys.readouterr().err


def test_errors_of_the_user_are_one_line(capsys, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "Signals", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status = command.main(["--port", str(port)])
        err = capsys.readouterr().err
    assert status == 2 and err.startswith("error: ") and str(port) in err
    given = ["--checkpoint", str(checkpoint)]
    for args, words in (
        (["--checkpoint", str(tmp_path / "none")], "none"),
        (["--port", "70000"], "port=70000 must be in 0..65535"),
        ([*given, "--max-queue", "-1"], "max_queue=-1"),
        ([*given, "--max-num-seqs", "0"], "max_num_seqs=0"),
        ([*given, "--request-timeout", "-1"], "request_timeout=-1"),
        ([*given, "--api-key", ""], "API key"),
        ([*given, "--chat-template", str(tmp_path / "none.jinja")], "none.jinja"),
        ([*given, "--host", "256.256.256.256"], "256.256.256.256"),
    ):
        status, err = run(capsys, *args)
        assert status == 2 and words in err and "Traceback" not in err, err
        assert err.splitlines()[-1].startswith("error: ")
    monkeypatch.setattr(command, "_PACKAGES", ("no_such_package",))
    status, err = run(capsys)
    assert status == 2 and "install the extra [server]" in err
