"""The command `python -m models.server`: in this process, and in one where signals end it."""

from __future__ import annotations

import gc
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import prometheus_client
import pytest

from models.server import command, start
from models.server.config import ServerConfig
from models.server.process import listen
from pallas_paged.engine import SamplingParams
from tests.support.commands import CONFIG, save_tiny_model
from tests.support.servers import http_request

ROOT = Path(__file__).parents[2]
SIZES = ["--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--implementation", "xla"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("checkpoint"))


class FakeSignals:
    """In place of those of the process: `call` keeps what a signal would call."""

    def call(self, stop):
        self.stop = stop


@pytest.fixture
def signals(monkeypatch):
    made = FakeSignals()
    monkeypatch.setattr(command, "Signals", lambda: made)
    return made


@pytest.fixture
def process_settings():
    """Puts back what the command sets for its whole process."""
    interval, limits = sys.getswitchinterval(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1] - 1, limits[1]))
    yield
    prometheus_client.enable_created_metrics()
    sys.setswitchinterval(interval)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("process_settings")
def test_the_command_serves_until_a_signal(checkpoint, capsys, signals, monkeypatch, caplog):
    found = {}

    def use():
        """Make requests as soon as the command has printed its line."""
        out = ""
        while not out.endswith("\n"):
            time.sleep(0.01)
            out += capsys.readouterr().out
        found["line"], found["settings"] = out, sys.getswitchinterval()
        found["files"] = resource.getrlimit(resource.RLIMIT_NOFILE)
        url, key = out.split()[0], {"authorization": "Bearer secret"}
        found["status"] = httpx.get(f"{url}/v1/models").status_code
        body = {"prompt": "x", "max_tokens": 3, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=key, timeout=60)
        found["tokens"] = answer.json()["usage"]["completion_tokens"]
        found["model"] = httpx.get(f"{url}/v1/models", headers=key).json()["data"][0]
        found["metrics"] = httpx.get(f"{url}/metrics", headers=key).text
        signals.stop()

    monkeypatch.setenv("PALLAS_PAGED_API_KEY", "secret")
    user = threading.Thread(target=use)
    user.start()
    given = ["--checkpoint", str(checkpoint), "--port", "0", "--access-log", "--warmup", "none"]
    with caplog.at_level("INFO"):
        assert command.main([*given, *SIZES]) == 0
    user.join()
    assert re.fullmatch(
        rf"http://127\.0\.0\.1:\d+ serves {checkpoint.name}: {CONFIG.max_position_embeddings}"
        r" tokens of context, 2 sequences at a time, 8 pages of 16 tokens \(0 MiB\)\n",
        found["line"],
    )
    assert (found["status"], found["tokens"]) == (401, 3)
    assert found["model"]["id"] == checkpoint.name and not found["model"]["has_chat_template"]
    assert found["settings"] == 0.0005 and gc.get_freeze_count()
    assert found["files"][0] == found["files"][1]
    assert "requests_total" in found["metrics"] and "_created" not in found["metrics"]
    assert sum("HTTP/1.1" in record.getMessage() for record in caplog.records) >= 3


def run(capsys, *args):
    status = command.main(["--port", "0", *args])
    return status, capsys.readouterr().err


def test_errors_of_the_user_are_one_line(capsys, checkpoint, tmp_path, monkeypatch, signals):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status = command.main(["--port", str(port)])
        err = capsys.readouterr().err
    assert status == 2 and err.startswith("error: ") and f"127.0.0.1:{port}" in err
    given = ["--checkpoint", str(checkpoint)]
    for args, words in (
        (["--checkpoint", str(tmp_path / "none")], "none"),
        (["--port", "70000"], "port=70000 must be in 0..65535"),
        (["--port", "-1"], "port=-1 must be in 0..65535"),
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
    monkeypatch.setattr(command, "PACKAGES", ("no_such_package",))
    status, err = run(capsys)
    assert status == 2 and err == "error: no_such_package not found: install the extra [server]\n"


def test_errors_of_the_device_are_one_line_and_bugs_are_not(capsys, monkeypatch, signals):
    for error, words in (
        (RuntimeError("RESOURCE_EXHAUSTED:\n 5 GiB"), "error: RESOURCE_EXHAUSTED: 5 GiB"),
        (NotImplementedError("no GPU"), "error: no GPU"),
        (MemoryError(), "error: MemoryError"),
    ):
        monkeypatch.setattr(start, "start", lambda *_, error=error: (_ for _ in ()).throw(error))
        status, err = run(capsys)
        assert status == 2 and err.splitlines()[-1] == words
    monkeypatch.setattr(start, "start", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(capsys)


def test_options_have_defaults(monkeypatch, signals):
    calls = []
    monkeypatch.setattr(command, "listen", lambda *address: address)
    monkeypatch.setattr(start, "start", lambda *args: calls.append(args))
    monkeypatch.setenv("PALLAS_PAGED_API_KEY", "of the environment")
    options = ["--max-body-bytes", "5", "--max-queue", "6", "--max-connections", "7"]
    options += ["--request-timeout", "8.5", "--drain-timeout", "9.5", "--warmup", "all"]
    options += ["--api-key", "a", "--api-key", "b", "--host", "::1", "--port", "5"]
    for given in ([], [*options, "--served-model-name", "m", "--access-log"]):
        assert command.main(given) == 0
    monkeypatch.delenv("PALLAS_PAGED_API_KEY")
    assert command.main([]) == 0
    names = ("max_body_bytes", "max_queue", "max_connections", "request_timeout", "drain_timeout")
    names += ("warmup", "served_model_name", "access_log")
    found = [[*(getattr(args, name) for name in names), *rest] for args, *rest in calls]
    defaults = [8 << 20, 1024, 4096, 600, 30, "default", None, False]
    address = "127.0.0.1", 8000
    assert found == [
        [*defaults, ("of the environment",), address, signals],
        [5, 6, 7, 8.5, 9.5, "all", "m", True, ("a", "b"), ("::1", 5), signals],
        [*defaults, (), address, signals],
    ]


def test_options_and_files_become_a_service(checkpoint, tmp_path, monkeypatch, signals, capsys):
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.5}')
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }}")
    served, warmed = [], []
    bound = SimpleNamespace(getsockname=lambda: ("::1", 80, 0, 0))
    monkeypatch.setattr(command, "listen", lambda *_: bound)
    monkeypatch.setattr(start, "prepare_process", lambda: None)
    monkeypatch.setattr(start, "serve", lambda *args, **options: served.append((args, options)))
    monkeypatch.setattr(start.Engine, "warmup", lambda _, params, progress: warmed.append(params))
    options = ["--max-queue", "6", "--served-model-name", "m", "--access-log", "--api-key", "a"]
    options += ["--chat-template", str(template), "--max-model-len", "32"]
    for warmup, more in (("default", []), ("all", options), ("none", options)):
        given = ["--checkpoint", str(folder), *SIZES, "--warmup", warmup, *more]
        assert command.main(given) == 0
    greedy = SamplingParams(temperature=0.0)
    assert warmed == [[SamplingParams(temperature=0.5), greedy], None]
    assert capsys.readouterr().err.count("compiled 0 programs in 0 s") == 2
    plain, own, _ = (args[0] for args, _ in served)
    assert plain.config == ServerConfig(model_name="copy")
    assert own.config == ServerConfig(model_name="m", max_queue=6, api_keys=("a",))
    assert (plain.max_model_len, own.max_model_len, own.vocab_size) == (64, 32, CONFIG.vocab_size)
    assert plain.chat_template is None and plain.has_tokenizer
    assert own.chat_template.render([{"role": "user", "content": "x"}]) == "x"
    for service in (plain, own):
        assert service.sampling_defaults == service.chat_defaults == {"temperature": 0.5}
    for (args, rest), name in zip(served, ("copy: 64", "m: 32", "m: 32"), strict=True):
        assert (args[1:3], rest["access_log"]) == ((bound, signals), name[0] == "m")
        assert args[3].startswith(f"http://[::1]:80 serves {name} tokens of context, 2 sequences")


def test_a_bound_socket_is_of_its_host_and_port():
    with listen("127.0.0.1", 0) as bound:
        assert bound.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        with pytest.raises(OSError, match="in use"):
            bound.listen()
            listen(*bound.getsockname())


# Prints a line for each step; "serves" once `call` has been called.
WAITER = """\
import time
from models.server.process import Signals
signals = Signals()
print("starts", flush=True)
if {serves}:
    signals.call(lambda: print("stops", flush=True))
    print("serves", flush=True)
time.sleep(20)
"""


@pytest.mark.parametrize("is_ignored", [False, True])
@pytest.mark.parametrize("serves", [False, True])
def test_signals_end_a_process_unless_its_parent_ignores_them(serves, is_ignored):
    """As with `command &` in a script or with nohup, which leave SIGINT ignored."""

    shell = "trap '' INT; exec \"$@\"" if is_ignored else 'exec "$@"'
    with subprocess.Popen(
        ["sh", "-c", shell, "sh", sys.executable, "-c", WAITER.format(serves=serves)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        for line in ["starts\n"] + ["serves\n"] * serves:
            assert process.stdout.readline() == line
        signals = [signal.SIGINT, signal.SIGTERM]
        for number in signals if is_ignored or serves else signals[:1]:
            process.send_signal(number)
            if is_ignored and number == signal.SIGINT:
                time.sleep(0.2)
                assert process.poll() is None
            elif serves and number == (signal.SIGTERM if is_ignored else signal.SIGINT):
                assert process.stdout.readline() == "stops\n"
        if is_ignored and serves:
            process.send_signal(signal.SIGTERM)
        last = signal.SIGTERM if is_ignored or serves else signal.SIGINT
        assert process.wait(20) == 128 + last
        assert process.stderr.read() == "shutting down ... (again: at once)\n" * serves


def test_a_process_serves_what_it_has_accepted_and_exits_with_0(checkpoint):
    given = ["--checkpoint", str(checkpoint), "--port", "0", "--warmup", "none", *SIZES]
    process = subprocess.Popen(
        [sys.executable, "-m", "models.server", *given],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        host, port = line.split()[0].removeprefix("http://").split(":")
        request = http_request("/tokenize", {"prompt": "Hi"})
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(request[:-5])
            assert httpx.get(f"http://{host}:{port}/health").status_code == 200  # it has the head
            process.send_signal(signal.SIGTERM)
            progress = process.stderr.readline()
            while "shutting down" not in progress:
                progress += process.stderr.readline()
            connection.sendall(request[-5:])
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
        assert answer.endswith(b'"tokens":[72,105]}')
        assert process.wait(60) == 0
    finally:
        process.kill()
        progress += process.communicate()[1]
    assert progress.startswith("importing JAX ...\nloading ")
    assert "compiling" not in progress and "rror" not in progress
