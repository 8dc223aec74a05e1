"""The decoder and its command on several devices: values, exchanges, weights."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import server
from models.decoder import (
    Decoder,
    ModelConfig,
    engine_model,
    load_checkpoint,
    repeat_kv_heads,
    save_checkpoint,
)
from models.decoder.draft_head import DraftHead, head_config
from models.decoder.sharding import config_on
from models.generate import generate
from pallas_paged.engine import SamplingParams
from tests.support.checkpoints import assert_is_placed, recorded_reads
from tests.support.commands import SIZES, run_command
from tests.support.dense_oracle import CONFIG as TINY
from tests.support.dense_oracle import DenseOracle, tiny_model
from tests.support.devices import mesh
from tests.support.marks import slow

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
COLLECTIVE = r"= (\S+) (all-\w+|reduce-scatter|collective-\w+)(?:-start)?\("


def random_decoder(config=CONFIG, dtype=np.float32):
    """A decoder without zeros or ones, so that no weight may be lost."""
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(1)
    draw = lambda x: (rng.standard_normal(x.shape) / 8 + (x.ndim == 1)).astype(dtype)  # noqa: E731
    return nnx.merge(graphdef, jax.tree.map(draw, params))


def causal_attend(q, k, v, cache, *, sliding_window):
    window = None if sliding_window is None else (min(sliding_window, len(q)) - 1, 0)
    how = dict(is_causal=True, local_window_size=window)
    return jax.nn.dot_product_attention(q[None], k[None], v[None], **how)[0], cache


def step_of(model):
    def step(params):
        no_cache = (None,) * model.config.num_layers
        hidden, _ = model(params, TOKENS, np.arange(len(TOKENS)), causal_attend, no_cache)
        return model.logits(params, hidden[np.array([3, 11, 22])])

    return jax.jit(step)


def put(model, params, num_devices):
    specs = model.param_specs(params)
    assert jax.tree.structure(specs) == jax.tree.structure(params)
    there = mesh(num_devices)
    return jax.device_put(params, jax.tree.map(lambda spec: NamedSharding(there, spec), specs))


@pytest.mark.parametrize(
    ("num_devices", "num_kv_heads", "tied"),
    [
        (2, 1, True),  # the KV head is on both
        (2, 2, False),
        *slow([(2, 2, True), (4, 2, True), (4, 2, False), (8, 2, True), (8, 2, False)]),
    ],
)
def test_logits_and_what_devices_exchange(num_devices, num_kv_heads, tied):
    """Two sums of activations in a layer and one of embeddings; logits stay where they are."""
    config = replace(CONFIG, num_kv_heads=num_kv_heads, tie_word_embeddings=tied)
    decoder = random_decoder(config)
    model, params = engine_model(decoder)
    alone = step_of(model).lower(params).compile()
    sizes = {x.size for x in jax.tree.leaves(params) if x.ndim > 1 and x.size > 1000}
    copied = re.findall(r"= f32\[([\d,]+)\]\S* (?:copy|transpose)\(", alone.as_text())
    assert not sizes & {np.prod([int(n) for n in shape.split(",")]) for shape in copied}
    expected = alone(params)
    model, params = engine_model(repeat_kv_heads(decoder, num_devices))
    placed = put(model, params, num_devices)
    compiled = step_of(model).lower(placed).compile()
    found = re.findall(COLLECTIVE, compiled.as_text())
    assert {kind for _, kind in found} == {"all-reduce"}
    shapes = [re.sub(r"\{.*", "", shape) for shape, _ in found]
    assert shapes == [f"f32[{len(TOKENS)},{CONFIG.hidden_size}]"] * (2 * CONFIG.num_layers + 1)
    logits = compiled(placed)
    assert logits.sharding.spec == PartitionSpec(None, "tensor")
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("vocab_size", "sharded"), [(64, True), (63, False), (96, False)])
def test_specs_of_the_weights(vocab_size, sharded):
    """A vocabulary that 64 does not divide is replicated."""
    model, params = engine_model(random_decoder(replace(CONFIG, vocab_size=vocab_size)))
    vocabulary = PartitionSpec("tensor") if sharded else PartitionSpec()
    rows, columns = PartitionSpec("tensor"), PartitionSpec(None, "tensor")
    specs = nnx.to_flat_state(model.param_specs(params))
    found = {".".join(map(str, path[-2:])): spec.get_value() for path, spec in specs}
    norms = {key: PartitionSpec() for key in found if "norm" in key}
    assert len(norms) == 5
    assert found == norms | {
        "embed_tokens.weight": vocabulary,
        "lm_head.weight": vocabulary,
        "qkv_proj.weight": rows,
        "qkv_proj.bias": rows,
        "o_proj.weight": columns,
        "o_proj.bias": PartitionSpec(),
        "gate_up_proj.weight": rows,
        "down_proj.weight": columns,
    }


@pytest.mark.parametrize("num_devices", [4, *slow([8])])
def test_repeated_kv_heads_are_the_same_model_and_an_mlp_must_be_divisible(num_devices):
    decoder = random_decoder()
    assert repeat_kv_heads(decoder, 1) is repeat_kv_heads(decoder, 2) is decoder
    repeated = repeat_kv_heads(decoder, num_devices)
    assert repeated.config == replace(CONFIG, num_kv_heads=num_devices)
    (model, params), (other, other_params) = map(engine_model, (decoder, repeated))
    logits = step_of(other)(other_params)
    np.testing.assert_allclose(logits, step_of(model)(params), rtol=1e-5, atol=1e-5)
    assert other == engine_model(random_decoder(repeated.config))[0]  # the structure is as usual

    @jax.jit
    def repeat(params):  # as a trainer does for each update
        return engine_model(repeat_kv_heads(nnx.merge(model.graphdef, params), num_devices))[1]

    jax.tree.map(np.testing.assert_array_equal, repeat(params), other_params)
    with pytest.raises(ValueError, match="intermediate_size=30 must be a multiple of num_devices"):
        repeat_kv_heads(random_decoder(replace(CONFIG, intermediate_size=30)), 4)


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [("random", 4), ("qwen2", 2), ("qwen3", 2), *slow([("random", 2), ("random", 8)])],
)
def test_a_checkpoint_read_onto_a_mesh_has_the_same_bits(tmp_path, name, num_devices):
    if name == "random":
        save_checkpoint(tmp_path, random_decoder(LLAMA, ml_dtypes.bfloat16), LLAMA)
    folder = tmp_path if name == "random" else GOLDENS / name
    there = mesh(num_devices)
    with recorded_reads() as shares:
        decoder, config = load_checkpoint(folder, mesh=there)
    alone, config_alone = load_checkpoint(folder)
    repeated = repeat_kv_heads(alone, num_devices)
    for key, parts in shares.items():  # a device reads its own
        if "norm" in key or key.endswith("o_proj.bias"):
            assert parts == [1]
        else:  # devices may have the same KV head
            kv = "k_proj" in key or "v_proj" in key
            count = min(num_devices, config_alone.num_kv_heads) if kv else num_devices
            assert parts == [1 / count] * num_devices
    assert config == decoder.config == repeated.config == config_on(config_alone, num_devices)
    assert_is_placed(decoder, repeated, there)
    if name == "random":  # which is a Llama
        save_checkpoint(tmp_path / "again", decoder, config)
        again, _ = load_checkpoint(tmp_path / "again")
        jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(repeated))


def test_other_axes_of_a_mesh_have_copies(tmp_path):
    save_checkpoint(tmp_path, random_decoder(LLAMA), LLAMA)
    devices = mesh(4).devices.reshape(2, 2)
    decoder, _ = load_checkpoint(tmp_path, mesh=Mesh(devices, ("data", "tensor")))
    expected = nnx.state(load_checkpoint(tmp_path)[0])
    jax.tree.map(np.testing.assert_array_equal, nnx.state(decoder), expected)
    with pytest.raises(ValueError, match=r"axis_names=.*'data', 'x'.* must have 'tensor'"):
        load_checkpoint(tmp_path, mesh=Mesh(devices, ("data", "x")))


@pytest.fixture
def command(checkpoint, capsys):
    prompts = ("--prompt", "ROMEO:", "--prompt", "O", "--max-tokens", "9", "--temperature", "3")
    return lambda *args, prompts=prompts: run_command(checkpoint, capsys, *SIZES, *prompts, *args)


@pytest.mark.parametrize("name", ["batch", "chat", "serve"])
def test_commands_load_the_weights_onto_the_devices_of_their_engine(
    name, command, checkpoint, tmp_path, monkeypatch
):
    there = mesh(2)
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }}")

    def engine(model, weights, *, config, tokenizer, draft_params):
        assert draft_params is None
        assert (config.tensor_parallel_size, config.data_parallel_size) == (2, 3)
        assert model.config.num_kv_heads == 2
        for x in jax.tree.leaves(weights):
            assert x.sharding.mesh == there
        raise KeyError("made")

    monkeypatch.setattr(f"models.command.{name}.Engine", engine)
    monkeypatch.setattr(server, "Signals", lambda *_: SimpleNamespace(call=None))
    mesh(6)
    sizes = ["--tensor-parallel-size", "2", "--data-parallel-size", "3"]
    with pytest.raises(KeyError, match="made"):
        if name == "serve":
            server.main(["--checkpoint", str(checkpoint), "--port", "0", *SIZES, *sizes])
        elif name == "chat":
            command(*sizes, "--chat", "--chat-template", str(template), prompts=())
        else:
            command(*sizes)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--tensor-parallel-size", "4096"], "size=4096 * data_parallel_size=1 must be at most"),
        (["--tensor-parallel-size", "0"], "tensor_parallel_size=0 must be an integer"),
        (["--tensor-parallel-size", "3"], "num_q_heads=2 must be a multiple of num_devices=3"),
    ],
)
def test_devices_that_do_not_fit_are_an_error_in_one_line(command, args, message):
    mesh(3)
    status, out, err = command(*args)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_generate_repeats_kv_heads_for_the_devices():
    mesh(2)
    decoder = tiny_model(replace(TINY, num_kv_heads=1, num_layers=1))
    prompts, oracle = [[1, 2, 3], [*range(4, 13)]], DenseOracle(decoder)
    sizes = dict(num_pages=16, max_num_seqs=2, max_num_batched_tokens=16, tensor_parallel_size=2)
    params = SamplingParams(max_tokens=6, temperature=0)
    outputs = generate(decoder, prompts, params, implementation="xla", **sizes)
    found = [output.outputs[0].token_ids for output in outputs]
    assert found == [oracle.continue_(prompt, 6) for prompt in prompts]


def test_a_draft_head_with_repeated_kv_heads_computes_the_same():
    target = tiny_model(replace(TINY, num_kv_heads=1, num_layers=1))
    head = DraftHead(head_config(target.config), dtype=np.float32, rngs=nnx.Rngs(1))
    head.shares(target)
    repeated = repeat_kv_heads(head, 2)
    assert isinstance(repeated, DraftHead) and repeated.config.num_kv_heads == 2
    tokens, cache = np.arange(5), (None,)
    before = np.random.default_rng(0).standard_normal((5, head.config.hidden_size), np.float32)
    found, expected = (
        one.draft(tokens, tokens, before, causal_attend, cache)[0] for one in (repeated, head)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
