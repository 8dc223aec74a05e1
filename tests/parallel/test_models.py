"""The decoder on a mesh: its values, what its devices exchange, and how its weights get there."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import checkpoint
from models.checkpoint import load_checkpoint, save_checkpoint
from models.config import ModelConfig
from models.decoder import Decoder
from models.engine_model import engine_model
from models.sharding import config_on, repeat_kv_heads
from tests.support.commands import ROOT
from tests.support.devices import mesh

pytestmark = pytest.mark.usefixtures("exact_products")
GOLDENS = Path(__file__).parents[1] / "models" / "goldens"
CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_q_heads=8,
    num_kv_heads=2,
    head_dim=8,
    qkv_bias=True,
    o_bias=True,
    qk_norm=True,
)
LLAMA = replace(CONFIG, qk_norm=False)  # which can be saved
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 23).astype(np.int32)
COLLECTIVE = (
    r"= (\S+) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+)(?:-start)?\("
)


def random_decoder(config=CONFIG, dtype=jnp.float32):
    """A decoder without zeros or ones, so that no weight may be lost."""
    graphdef, params = nnx.split(Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(params))))
    noise = lambda x: (x + jax.random.normal(next(keys), x.shape) / 8).astype(dtype)  # noqa: E731
    return nnx.merge(graphdef, jax.tree.map(noise, params))


def step_of(model):
    """The logits of some tokens of a sequence, as a function of the weights."""

    def attend(q, k, v, cache, *, sliding_window):
        out = jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True)
        return out[0], cache

    def step(params):
        no_cache = (None,) * model.config.num_layers
        hidden, _ = model(params, TOKENS, np.arange(len(TOKENS)), attend, no_cache)
        return model.logits(params, hidden[np.array([3, 11, 22])])

    return jax.jit(step)


def put(model, params, num_devices):
    specs = model.param_specs(params)
    assert jax.tree.structure(specs) == jax.tree.structure(params)
    there = mesh(num_devices)
    return jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(there, spec)), params, specs
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_logits_equal_those_of_one_device_and_stay_where_they_are_computed(num_devices, tied):
    decoder = random_decoder(replace(CONFIG, tie_word_embeddings=tied))
    model, params = engine_model(decoder)
    expected = step_of(model)(params)
    decoder = repeat_kv_heads(decoder, num_devices)
    model, params = engine_model(decoder)
    logits = step_of(model)(put(model, params, num_devices))
    assert logits.sharding.spec == PartitionSpec(None, "tensor")
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_devices", [2, 8])
def test_devices_exchange_two_sums_of_activations_in_a_layer_and_one_of_embeddings(num_devices):
    decoder = repeat_kv_heads(random_decoder(), num_devices)
    model, params = engine_model(decoder)
    compiled = step_of(model).lower(put(model, params, num_devices)).compile()
    found = [match.groups() for match in re.finditer(COLLECTIVE, compiled.as_text())]
    shapes = [re.sub(r"\{.*", "", shape) for shape, _ in found]
    assert {kind for _, kind in found} == {"all-reduce"}
    assert shapes == [f"f32[{len(TOKENS)},{CONFIG.hidden_size}]"] * (2 * CONFIG.num_layers + 1)


def test_a_step_copies_no_weight():
    model, params = engine_model(random_decoder())
    text = step_of(model).lower(params).compile().as_text()
    sizes = {x.size for x in jax.tree.leaves(params) if x.ndim > 1 and x.size > 1000}
    copied = re.findall(r"= f32\[([\d,]+)\]\S* (?:copy|transpose)\(", text)
    assert not sizes & {np.prod([int(n) for n in shape.split(",")]) for shape in copied}


@pytest.mark.parametrize("vocab_size", [63, 96])
def test_a_vocabulary_that_64_does_not_divide_is_whole_on_every_device(vocab_size):
    model, params = engine_model(random_decoder(replace(CONFIG, vocab_size=vocab_size)))
    expected = step_of(model)(params)
    specs = model.param_specs(params)
    for name in ("embed_tokens", "lm_head"):
        assert specs[name]["weight"].get_value() == PartitionSpec()
    logits = step_of(model)(put(model, params, 2))
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
def test_repeated_kv_heads_are_the_same_model(num_devices):
    decoder = random_decoder()
    repeated = repeat_kv_heads(decoder, num_devices)
    assert repeated.config == replace(CONFIG, num_kv_heads=max(2, num_devices))
    assert (repeated is decoder) == (num_devices <= 2)
    (model, params), (other, other_params) = map(engine_model, (decoder, repeated))
    logits = step_of(other)(other_params)
    np.testing.assert_allclose(logits, step_of(model)(params), rtol=1e-5, atol=1e-5)
    assert other == engine_model(random_decoder(repeated.config))[0]  # the structure is as usual

    @jax.jit
    def repeat(params):  # as a trainer does for each update
        return engine_model(repeat_kv_heads(nnx.merge(model.graphdef, params), num_devices))[1]

    jax.tree.map(np.testing.assert_array_equal, repeat(params), other_params)


@pytest.mark.parametrize(
    ("changes", "num_devices", "message"),
    [
        ({}, 0, "num_devices=0 must be"),
        ({}, 3, "num_q_heads=8 must be a multiple of num_devices=3"),
        ({}, 16, "num_q_heads=8 must be a multiple of num_devices=16"),
        ({"intermediate_size": 30}, 4, "intermediate_size=30 must be a multiple of num_devices=4"),
    ],
)
def test_devices_that_can_not_share_the_model_are_refused(changes, num_devices, message):
    with pytest.raises(ValueError, match=message):
        repeat_kv_heads(random_decoder(replace(CONFIG, **changes)), num_devices)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_checkpoint_on_a_mesh_gives_the_greedy_tokens_of_transformers(name):
    with np.load(GOLDENS / name / "golden.npz") as golden:
        greedy = golden["greedy_tokens"][0]
        tokens = np.concatenate([golden["input_ids"][0], greedy]).astype(np.int32)
    decoder, config = load_checkpoint(GOLDENS / name, mesh=mesh(2))
    hidden, _ = decoder(tokens, np.arange(len(tokens)), causal_attend)
    logits = np.asarray(decoder.logits(hidden))
    np.testing.assert_array_equal(logits[-len(greedy) - 1 : -1].argmax(-1), greedy)
    assert config == decoder.config == config_on(load_checkpoint(GOLDENS / name)[1], 2)


def causal_attend(q, k, v, cache, *, sliding_window):
    window = None if sliding_window is None else (min(sliding_window, len(q)) - 1, 0)
    out = jax.nn.dot_product_attention(
        q[None], k[None], v[None], is_causal=True, local_window_size=window
    )
    return out[0], cache


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_a_checkpoint_read_onto_a_mesh_has_the_same_bits(tmp_path, num_devices):
    save_checkpoint(tmp_path, random_decoder(LLAMA, jnp.bfloat16), LLAMA)
    there = mesh(num_devices)
    decoder, config = load_checkpoint(tmp_path, mesh=there)
    whole = repeat_kv_heads(load_checkpoint(tmp_path)[0], num_devices)
    model, expected = engine_model(whole)
    assert config == decoder.config == whole.config
    assert engine_model(decoder)[0] is model
    params = nnx.state(decoder)
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    specs = jax.tree.leaves(model.param_specs(expected))
    for x, y, spec in zip(*map(jax.tree.leaves, (params, expected)), specs, strict=True):
        assert x.sharding == NamedSharding(there, spec)
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
    save_checkpoint(tmp_path / "again", decoder, config)
    again, _ = load_checkpoint(tmp_path / "again")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), expected)


def test_other_axes_of_a_mesh_have_copies(tmp_path):
    save_checkpoint(tmp_path, random_decoder(LLAMA), LLAMA)
    devices = mesh(4).devices.reshape(2, 2)
    decoder, _ = load_checkpoint(tmp_path, mesh=Mesh(devices, ("data", "tensor")))
    expected = nnx.state(load_checkpoint(tmp_path)[0])
    jax.tree.map(np.testing.assert_array_equal, nnx.state(decoder), expected)
    with pytest.raises(ValueError, match=r"axis_names=.*'data', 'x'.* must have 'tensor'"):
        load_checkpoint(tmp_path, mesh=Mesh(devices, ("data", "x")))


def test_only_the_parts_of_a_device_are_read(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, random_decoder(LLAMA), LLAMA)
    read, sizes = checkpoint._Tensor.read, {}

    def record(tensor, *index):
        part = read(tensor, *index)
        sizes.setdefault(tensor.name, []).append(part.size / np.prod(tensor.shape))
        return part

    monkeypatch.setattr(checkpoint._Tensor, "read", record)
    load_checkpoint(tmp_path, mesh=mesh(4))
    for name, shares in sizes.items():
        if "norm" in name or name.endswith("o_proj.bias"):
            assert shares == [1]
        elif "k_proj" in name or "v_proj" in name:
            assert shares == [1 / 2] * 4  # two devices have the same KV head
        else:
            assert shares == [1 / 4] * 4


def test_each_of_two_processes_reads_what_its_devices_hold(tmp_path):
    save_checkpoint(tmp_path, random_decoder(LLAMA), LLAMA)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    flags = "--xla_force_host_platform_device_count=2"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.load_process", port, number, str(tmp_path)],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in "01"
    ]
    try:
        for process in processes:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            assert 0.5 < float(out) < 0.6  # the norms are on all devices
    finally:
        for process in processes:
            process.kill()
