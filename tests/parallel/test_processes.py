"""Two processes with a device of a CPU each: a checkpoint, an engine, and the death of one."""

import json
import os
import signal
import socket
import subprocess
import sys

import jax
import pytest
from flax import nnx

from models.decoder import Decoder, ModelConfig, save_checkpoint
from tests.support import engine_calls, process_pair
from tests.support.commands import ROOT
from tests.support.marks import slow

pytestmark = pytest.mark.usefixtures("exact_products")
CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=1, num_q_heads=4,
    num_kv_heads=2, head_dim=8,
)  # fmt: skip


def next_json(process):
    """The next object that a process prints, or None; JAX prints other lines."""
    return next((json.loads(line) for line in process.stdout if line.startswith("{")), None)


@pytest.fixture(scope="module", params=[(1, False), *slow([((0, True),)])], ids=str)
def pair(request, tmp_path_factory):
    """Which process was killed, and whether requests asked for everything.

    And what both have printed: their JSON, and the errors of the one that was left.
    """
    if jax.default_backend() != "cpu":
        pytest.skip("the processes share the devices of this machine")
    dead, every = request.param
    folder = tmp_path_factory.mktemp("pair")
    save_checkpoint(folder, Decoder(CONFIG, rngs=nnx.Rngs(0)), CONFIG)
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port = one.getsockname()[1]
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.support.process_pair", str(port)]
    started = [
        subprocess.Popen(
            [*command, str(index), str(folder), *["every"] * every],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=(folder / f"errors{index}").open("w"),
            text=True,
        )
        for index in range(2)
    ]
    try:
        printed = [next_json(one) for one in (*started, started[0])]
        errors = [(folder / f"errors{index}").read_text() for index in range(2)]
        assert None not in printed, errors
        started[dead].send_signal(signal.SIGKILL)
        # JAX's own limit, and as much again for a busy machine.
        code = started[1 - dead].wait(timeout=10 * process_pair.SECONDS)
        errors = (folder / f"errors{1 - dead}").read_text()
        yield dead, every, printed[:2], (code, errors)
    finally:
        for one in started:
            one.kill()
            one.communicate()


@pytest.mark.cpu_budget(12)  # two processes start and compile
def test_each_process_reads_the_part_of_a_checkpoint_that_its_device_holds(pair):
    assert [found["share"] for found in pair[2]] == [0.5, 0.5]  # of each weight but the norms


@pytest.mark.cpu_budget(9)  # compiles the steps of one device
def test_an_engine_over_two_processes_gives_the_tokens_of_one_device_and_compiles_no_more(pair):
    _, every, (found, followed), _ = pair
    engine, compiled = engine_calls.make_engine(), []
    wanted = process_pair.serve(engine, engine_calls, engine_calls.weights(seed=2), every, compiled)
    for name in ("tokens", "after sleep", "of new weights"):
        assert found[name] == wanted[name], name
    assert found["after sleep"] == found["tokens"][1] != found["of new weights"]
    assert followed["updates"] == 2
    assert pair[2][0]["compiled"] == 0


@pytest.mark.cpu_budget(9)  # two processes end
def test_when_a_process_dies_the_other_ends_with_an_error(pair):
    dead, _, _, (code, errors) = pair
    assert code != 0
    if dead == 1:
        assert "EngineDeadError: a step failed: " in errors
    else:  # JAX ends the other processes at once, or the engine does
        assert "process 0 has ended" in errors or "JAX distributed service" in errors
