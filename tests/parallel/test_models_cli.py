"""`python -m models.generate` and `generate` on several devices."""

from __future__ import annotations

import jax
import pytest
from flax import nnx

from models.decoder import Decoder
from models.generate import generate
from pallas_paged.engine import SamplingParams
from tests.support.commands import CONFIG, run_command, save_tiny_model
from tests.support.devices import mesh
from tests.support.marks import slow

pytestmark = pytest.mark.usefixtures("exact_products")
PROMPTS = ("--prompt", "ROMEO:", "--prompt", "O", "--max-tokens", "9", "--temperature", "3")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def run(checkpoint, capsys):
    return lambda *args: run_command(checkpoint, capsys, *PROMPTS, *args)


@pytest.fixture(scope="module")
def texts():
    return {}


@pytest.mark.parametrize(
    ("args", "num_devices"),
    [
        (["--tensor-parallel", "2", "--data-parallel", "2"], 4),  # its one KV head is repeated
        *slow([(["--tensor-parallel", "2"], 2), (["--data-parallel", "2"], 2)]),
    ],
)
def test_the_command_prints_the_same_texts_on_several_devices(run, args, num_devices, texts):
    mesh(num_devices)
    if not texts:
        texts["one device"] = run("--seed", "3")[1]
    status, out, err = run("--seed", "3", *args)
    assert status == 0
    assert sorted(out.split("===")) == sorted(texts["one device"].split("==="))  # as they end
    assert f"; {num_devices} x {jax.devices()[0].device_kind}" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--tensor-parallel", "4096"], "tensor_parallel=4096 * data_parallel=1 must be at most"),
        (["--data-parallel", "4096"], "tensor_parallel=1 * data_parallel=4096 must be at most"),
        (["--tensor-parallel", "0"], "tensor_parallel=0 must be an integer"),
    ],
)
def test_too_few_devices_are_an_error_in_one_line(run, args, message):
    status, out, err = run(*args)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {message}") and err.count("\n") == 1


def test_devices_that_do_not_divide_the_heads_are_an_error_in_one_line(run):
    mesh(3)
    status, out, err = run("--tensor-parallel", "3")
    assert (status, out) == (2, "")
    assert err == "error: num_q_heads=2 must be a multiple of num_devices=3\n"


def test_generate_repeats_kv_heads_for_the_devices():
    mesh(2)
    decoder = Decoder(CONFIG, rngs=nnx.Rngs(0))
    params = SamplingParams(max_tokens=6, temperature=0)
    expected, outputs = (
        generate(decoder, [[1, 2, 3]], params, implementation="xla", **config)
        for config in ({}, {"tensor_parallel": 2})
    )
    assert outputs[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
