"""The command `python -m models.server`: in this process, and in one where signals end it."""

import gc
import importlib.util
import json
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
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import httpx
import prometheus_client
import pytest

from models import server as command
from models.command import serve
from pallas_paged.engine import PoolingParams, SamplingParams
from pallas_paged.engine.device.program import modes_for
from pallas_paged.engine.sampling_params import SamplingMode
from pallas_paged.server import server
from pallas_paged.server.server import listen
from pallas_paged.server.service import ServerConfig
from tests.support.commands import CONFIG

ROOT = Path(__file__).parents[2]
PIPES = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
SIZES = ["--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--implementation", "xla"]


@pytest.fixture
def signals(monkeypatch):
    """In place of those of the process: `stop` is what a signal would call."""
    made = SimpleNamespace()
    made.call = lambda stop: setattr(made, "stop", stop)
    monkeypatch.setattr(command, "Signals", lambda *_: made)
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
    found, ended = {}, threading.Event()

    def use():
        """Make requests as soon as the command has printed its line."""
        out = ""
        while not out.endswith("\n") and not ended.wait(0.01):
            out += capsys.readouterr().out
        url, key = out.split()[0], {"authorization": "Bearer secret"}
        try:
            found["line"], found["switch"] = out, sys.getswitchinterval()
            found["files"] = resource.getrlimit(resource.RLIMIT_NOFILE)
            found["status"] = httpx.get(f"{url}/v1/models").status_code
            body = {"prompt": "x", "max_tokens": 1, "temperature": 0}
            answer = httpx.post(f"{url}/v1/completions", json=body, headers=key, timeout=60)
            found["tokens"] = answer.json()["usage"]["completion_tokens"]
            found["model"] = httpx.get(f"{url}/v1/models", headers=key).json()["data"][0]
            found["metrics"] = httpx.get(f"{url}/metrics", headers=key).text
        finally:
            signals.stop(signal.SIGTERM)

    monkeypatch.setenv("PALLAS_PAGED_API_KEY", "secret")
    (user := threading.Thread(target=use)).start()
    given = ["--checkpoint", str(checkpoint), "--port", "0", "--access-log", "--warmup", "none"]
    try:
        with caplog.at_level("INFO"):
            assert command.main([*given, *SIZES]) == 0
    finally:
        ended.set()
        user.join()
    assert re.fullmatch(
        rf"http://127\.0\.0\.1:\d+ serves {checkpoint.name}: {CONFIG.max_position_embeddings}"
        r" tokens of context, 2 sequences at a time, 8 pages of 16 tokens \(0 MiB\)\n",
        found["line"],
    )
    assert (found["status"], found["tokens"]) == (401, 1)
    assert found["model"]["id"] == checkpoint.name and not found["model"]["has_chat_template"]
    assert found["switch"] == 0.0005 and gc.get_freeze_count()
    assert found["files"][0] == found["files"][1]
    assert "request_success_total" in found["metrics"] and "_created" not in found["metrics"]
    assert sum("HTTP/1.1" in record.getMessage() for record in caplog.records) >= 3


def run(capsys, *args):
    status = command.main(["--port", "0", *args])
    return status, capsys.readouterr().err


def test_errors_of_the_user_are_one_line(capsys, checkpoint, tmp_path, monkeypatch, signals):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, err = run(capsys, "--port", str(port))
    assert status == 2 and f"127.0.0.1:{port}" in err.splitlines()[-1]
    with listen("127.0.0.1", 0) as bound:  # at once again after an end
        assert bound.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
    given = ["--checkpoint", str(checkpoint)]
    for args, words in (
        (["--checkpoint", str(tmp_path / "none")], "none"),
        (["--port", "70000"], "port=70000 must be an integer in 0..65535"),
        ([*given, "--max-queue", "-1"], "max_queue=-1"),
        ([*given, "--max-num-seqs", "0"], "max_num_seqs=0"),
        ([*given, "--api-key", ""], "api_keys must"),
        ([*given, "--chat-template", str(tmp_path / "none.jinja")], "none.jinja"),
        ([*given, "--host", "256.256.256.256"], "256.256.256.256"),
    ):
        status, err = run(capsys, *args)
        assert status == 2 and words in err and "Traceback" not in err, err
        assert err.splitlines()[-1].startswith("error: ")
    monkeypatch.setattr(command, "PACKAGES", ("no_such_package",))
    status, err = run(capsys)
    assert status == 2 and err == "error: no_such_package not found: install the extra [models]\n"


def test_errors_of_the_device_are_one_line_and_bugs_are_not(capsys, monkeypatch, signals):
    for error, words in (
        (RuntimeError("RESOURCE_EXHAUSTED:\n 5 GiB"), "error: RESOURCE_EXHAUSTED: 5 GiB"),
        (NotImplementedError("no GPU"), "error: no GPU"),
        (MemoryError(), "error: MemoryError"),
    ):
        monkeypatch.setattr(serve, "serve", lambda *_, error=error: (_ for _ in ()).throw(error))
        status, err = run(capsys)
        assert status == 2 and err.splitlines()[-1] == words
    monkeypatch.setattr(serve, "serve", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(capsys)


@pytest.mark.parametrize(
    ("used", "pooling"),
    [(["lasttoken"], "last"), (["mean_tokens"], "mean"), (["cls_token"], None), ([], None)],
)
def test_a_folder_says_how_it_makes_vectors(tmp_path, used, pooling):
    assert serve._pooling_of(tmp_path) == "last"
    (tmp_path / "1_Pooling").mkdir()
    modes = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    contents = {f"pooling_mode_{mode}": mode in used for mode in modes}
    contents |= {"word_embedding_dimension": 64, "include_prompt": True}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(contents))
    if pooling is None:
        with pytest.raises(ValueError, match=r"config\.json: \[.*\] must be one of .*--pooling"):
            serve._pooling_of(tmp_path)
    else:
        assert serve._pooling_of(tmp_path) == pooling


def test_options_and_files_become_a_service(checkpoint, tmp_path, monkeypatch, signals, capsys):
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.5}')
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }}")
    addresses, served, warmed = [], [], []
    bound = SimpleNamespace(getsockname=lambda: ("::1", 80, 0, 0))
    monkeypatch.setattr(serve, "listen", lambda *address: addresses.append(address) or bound)
    monkeypatch.setattr(serve, "run", lambda *args, **options: served.append((args, options)))
    done: Future[None] = Future()
    for name in ("warmup", "start_warmup"):
        record = lambda _, params, progress, name=name: warmed.append((name, params)) or done  # noqa: E731
        monkeypatch.setattr(serve.Engine, name, record)
    limits = dict(max_body_bytes=5, max_total_body_bytes=4, max_queue=6, max_connections=7)
    limits |= dict(request_timeout=8.5, drain_timeout=9.5)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in limits.items()]
    options += ["--api-key", "a", "--api-key", "b", "--host", "::1", "--port", "5", "--access-log"]
    options += ["--allowed-host", "x", "--allowed-host", "y", "--allow-priority"]
    options += ["--pooling", "last", "--served-model-name", "m", "--chat-template", str(template)]
    options += ["--max-model-len", "32", "--memory-fraction", "0.5", "--warmup"]
    monkeypatch.setenv("PALLAS_PAGED_API_KEY", "of the environment")
    for more in ([], [*options, "all", "--wait-for-warmup"], [*options, "none"]):
        assert command.main(["--checkpoint", str(folder), *SIZES, *more]) == 0
    assert addresses == [("127.0.0.1", 8000), ("::1", 5), ("::1", 5)]
    (first, default), (second, every) = warmed
    assert (first, second) == ("start_warmup", "warmup")
    plain, greedy = SamplingParams(temperature=0.5), SamplingParams(temperature=0.0)
    assert default[:2] == [plain, greedy] and every[:2] == [None, PoolingParams()]
    has_grammars = importlib.util.find_spec("llguidance") is not None
    structure, any_other = {"structured_outputs": serve._GRAMMAR}, dict(logprobs=5, top_k=3)
    any_other |= dict(frequency_penalty=1.0, logit_bias={1: 2.0}, top_p=0.9, min_p=0.1)
    for params, options in ((default, dict(temperature=0.5)), (every, any_other)):
        modes = modes_for(params)
        for one in {**options, **structure}, {"temperature": 0.0, **structure}:
            wanted = SamplingMode.of(SamplingParams(**one))
            assert any(mode.covers(wanted) for mode in modes) == has_grammars
    log = capsys.readouterr().err
    assert log.count("compiled 0 programs in 0 s") == 2
    assert log.count("compiling others beside the requests") == 1
    done.set_result(None)
    assert "compiled all programs in " in capsys.readouterr().err
    plain, own, _ = (args[0] for args, _ in served)
    named = dict(served_model_name="copy", api_keys=("of the environment",))
    assert plain.config == ServerConfig(**named, pooling="mean")
    keys = dict(api_keys=("a", "b"), allowed_hosts=("x", "y"), allow_priority=True)
    assert own.config == ServerConfig(served_model_name="m", pooling="last", **keys, **limits)
    assert (plain.max_model_len, own.max_model_len, own.vocab_size) == (64, 32, CONFIG.vocab_size)
    assert [one.engine.engine.config.memory_fraction for one in (plain, own)] == [0.8, 0.5]
    assert plain.chat_template is None and plain.has_tokenizer
    assert own.chat_template.render([{"role": "user", "content": "x"}]) == "x"
    for service in (plain, own):
        assert service.sampling_defaults == service.chat_defaults == {"temperature": 0.5}
    for (args, rest), name in zip(served, ("copy: 64", "m: 32", "m: 32"), strict=True):
        assert args[1] == bound
        assert rest == {"access_log": name[0] == "m", "on_signal": signals.call}
        line = server.ready_line(*args)
        assert line.startswith(f"http://[::1]:80 serves {name} tokens of context, 2 sequences")


# Prints a line for each step; "serves" once `call` has been called.
WAITER = """\
import signal
import time
from models.command.signals import Signals
signals = Signals(signal.SIGINT, signal.SIGTERM)
print("starts", flush=True)
if {serves}:
    signals.call(lambda number: print("stops", number, flush=True))
    print("serves", flush=True)
time.sleep(20)
"""


@pytest.mark.parametrize("is_ignored", [False, True])
@pytest.mark.parametrize("serves", [False, True])
def test_signals_end_a_process_unless_its_parent_ignores_them(serves, is_ignored):
    """As with `command &` in a script or with nohup, which leave SIGINT ignored."""
    shell = "trap '' INT; exec \"$@\"" if is_ignored else 'exec "$@"'
    command = ["sh", "-c", shell, "sh", sys.executable, "-c", WAITER.format(serves=serves)]
    with subprocess.Popen(command, cwd=ROOT, **PIPES) as process:
        for line in ["starts\n"] + ["serves\n"] * serves:
            assert process.stdout.readline() == line
        if is_ignored:
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
            assert process.poll() is None
        first, second = (signal.SIGTERM,) * 2 if is_ignored else (signal.SIGINT, signal.SIGTERM)
        process.send_signal(first)
        if serves:
            assert process.stdout.readline() == f"stops {first:d}\n"
            process.send_signal(second)
        assert process.wait(20) == 128 + (second if serves else first)
        assert process.stderr.read() == ""


@pytest.mark.slow  # a process of its own; in this one the command serves above
def test_a_process_serves_until_a_signal_and_exits_with_0(checkpoint):
    given = ["--checkpoint", str(checkpoint), "--port", "0", "--warmup", "none", *SIZES]
    command, env = [sys.executable, "-m", "models.server", *given], {"JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | env, **PIPES)
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        answer = httpx.post(f"{line.split()[0]}/tokenize", json={"prompt": "Hi"})
        assert answer.json()["tokens"] == [72, 105]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        progress = process.communicate()[1]
    assert progress.startswith("importing JAX ...\nloading ") and "shutting down" in progress
    assert "compiling" not in progress and "rror" not in progress
