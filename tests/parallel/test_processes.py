"""One engine over two processes, each with two devices of a CPU."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import pytest

from tests.support import engine_process
from tests.support.engine_calls import WIDE, make_engine, weights

pytestmark = pytest.mark.usefixtures("exact_products")
ROOT = Path(__file__).parents[2]
SECONDS = 300  # for a process to compile and serve


@contextmanager
def processes(scenario: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Start both processes, and end those that are left."""
    if jax.default_backend() != "cpu":
        pytest.skip("the processes share the devices of this machine")
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port = one.getsockname()[1]
    devices = f"--xla_force_host_platform_device_count={engine_process.DEVICES_EACH}"
    env = os.environ | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {devices}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.support.engine_process", str(port)]
    started = [
        subprocess.Popen(
            [*command, str(index), scenario],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(engine_process.NUM_PROCESSES)
    ]
    try:
        yield started
    finally:
        for one in started:
            one.kill()
            one.communicate()


def test_an_engine_over_two_processes_gives_the_tokens_of_one_device():
    with processes("serve") as started:
        outputs = [one.communicate(timeout=SECONDS) for one in started]
        assert [one.returncode for one in started] == [0, 0], outputs
    assert "closed" in outputs[1][0]
    found = json.loads(next(x for x in outputs[0][0].splitlines() if x.startswith("[[")))
    from tests.support import engine_calls

    engine = make_engine(WIDE, weights(WIDE))
    assert found == engine_process.serve(engine, engine_calls, weights(WIDE, seed=2))


@pytest.mark.parametrize("dead", [0, 1])
def test_when_a_process_dies_the_other_ends_with_an_error(dead):
    with processes("die") as started:
        for line in started[0].stdout:
            if line == "serving\n":
                break
        started[dead].send_signal(signal.SIGKILL)
        # JAX's own limit, and as much again for a busy machine.
        _, errors = started[1 - dead].communicate(timeout=10 * engine_process.SECONDS)
    assert started[1 - dead].returncode != 0
    if dead == 1:
        assert "EngineDeadError: a step failed: " in errors
    else:  # JAX ends the other processes at once, or the engine does
        assert "process 0 has ended" in errors or "JAX distributed service" in errors
