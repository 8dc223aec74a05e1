"""Checkpoint folders: round trips, scales of a float8 cache, and folders that are wrong."""

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from models.decoder import (
    CheckpointError,
    Decoder,
    ModelConfig,
    load_checkpoint,
    save_checkpoint,
    tensor_file,
)
from models.decoder.rope_scaling import LinearRopeScaling
from models.decoder.stored_tensors import tensors_of
from tests.support.checkpoints import edit
from tests.support.dense_oracle import CONFIG as TINY
from tests.support.dense_oracle import tiny_model
from tests.support.devices import mesh

GOLDENS = Path(__file__).parents[1] / "goldens"
SHAKESPEARE = Path(__file__).parents[3] / "models" / "checkpoints" / "shakespeare"
LINEAR = LinearRopeScaling(factor=2.0)
CONFIG = replace(TINY, rope_scaling=LINEAR, tie_word_embeddings=True, eos_token_ids=(3, 5))
LAYER = "model.layers.1."
UP_PROJ = LAYER + "mlp.up_proj.weight"
V_PROJ, Q_NORM = (f"{LAYER}self_attn.{name}.weight" for name in ("v_proj", "q_norm"))
FLOAT8 = ml_dtypes.float8_e4m3fn
SCALES = {"k_scales": (0.25, 0.75), "v_scales": (0.125, 0.5)}
SCALE_NAMES = {  # of the tools that write them
    "compressed-tensors": "model.layers.{0}.self_attn.{1}_scale",
    "ModelOpt": "model.layers.{0}.self_attn.{1}_proj.{1}_scale",
    "Quark": "model.layers.{0}.self_attn.{1}_proj.output_scale",
}


def scale_tensors(tool, dtype=np.float32, shape=()):
    return {
        SCALE_NAMES[tool].format(layer, kind): np.full(shape, scale, dtype)
        for kind, scales in zip("kv", SCALES.values(), strict=True)
        for layer, scale in enumerate(scales)
    }


SCALED = scale_tensors("compressed-tensors")
K_SCALE = LAYER + "self_attn.k_scale"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("saved"), tiny_model(CONFIG)
    save_checkpoint(folder, model, CONFIG)
    return folder, model


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)


def assert_same_weights(model, other):
    (graphdef, params), (other_graphdef, other_params) = nnx.split(model), nnx.split(other)
    assert graphdef == other_graphdef
    equal = partial(np.testing.assert_array_equal, strict=True)  # of one dtype, too
    jax.tree.map(equal, params, other_params)


@pytest.mark.parametrize(
    ("dtype", "tied", "bias"),
    [(jnp.float32, True, True), (jnp.bfloat16, False, True), (jnp.float16, True, False)],
)
def test_round_trip_keeps_every_bit(tmp_path, dtype, tied, bias):
    config = replace(CONFIG, tie_word_embeddings=tied, qkv_bias=bias, o_bias=bias)
    model = tiny_model(config)
    nnx.update(model, jax.tree.map(lambda x: x.astype(dtype), nnx.state(model)))
    save_checkpoint(tmp_path, model, config)
    loaded, loaded_config = load_checkpoint(tmp_path)
    assert loaded_config == loaded.config == config
    assert_same_weights(model, loaded)
    assert not list(tmp_path.glob("*.partial"))
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == dtype.dtype.name


def test_parameters_go_to_the_default_device_of_the_caller():
    device = mesh(2).devices[1]
    with jax.default_device(device):  # of this thread; others read the files
        decoder, _ = load_checkpoint(GOLDEN)
    assert {x.device for x in jax.tree.leaves(nnx.state(decoder))} == {device}


def test_a_file_is_opened_once_and_not_for_each_tensor(monkeypatch):
    """Its header has thousands of experts, and took 11 ms to parse."""
    opened, open_file = [], tensor_file.safe_open
    record = lambda *args, **options: opened.append(args) or open_file(*args, **options)  # noqa: E731
    monkeypatch.setattr(tensor_file, "safe_open", record)
    load_checkpoint(GOLDENS / "llama")
    assert len(opened) == 2


def test_what_llama_can_express_is_saved_as_llama_whatever_its_files_were(saved, folder):
    save_checkpoint(folder, saved[1], replace(CONFIG, stored_as="phi3"))
    model, config = load_checkpoint(folder)
    assert config == CONFIG
    assert_same_weights(model, saved[1])


@pytest.mark.parametrize("mode", [0o644, 0o660])
def test_saved_files_have_the_mode_of_the_umask(saved, tmp_path, mode):
    umask = os.umask(0o666 & ~mode)
    try:
        for _ in range(2):  # the second time over existing files
            save_checkpoint(tmp_path, saved[1], CONFIG)
    finally:
        os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {mode}


def test_saved_folder_has_the_names_and_shapes_of_llama(saved):
    folder, model = saved
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
    tensors = load_file(folder / "model.safetensors")
    shapes = {name: x.shape for name, x in tensors.items() if "layers.0" not in name}
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (32,))
    heads = dict(q_proj=(64, 32), k_proj=(32, 32), v_proj=(32, 32), o_proj=(32, 64))
    mlp = dict(gate_proj=(48, 32), up_proj=(48, 32), down_proj=(32, 48))
    layer = norms | {f"self_attn.{k}": x for k, x in heads.items()}
    layer |= {f"mlp.{k}": x for k, x in mlp.items()}
    assert shapes == {"model.embed_tokens.weight": (40, 32), "model.norm.weight": (32,)} | {
        f"{LAYER}{name}.weight": shape for name, shape in layer.items()
    }
    q, k, v = (tensors[f"{LAYER}self_attn.{x}_proj.weight"] for x in "qkv")
    qkv = model.layers[1].self_attn.qkv_proj.weight[...]  # [Hkv, groups + 2, D, E]
    parts = [x.reshape(2, -1, 16, 32) for x in (q, k, v)]
    np.testing.assert_array_equal(qkv, np.concatenate(parts, axis=1))
    gate_up = np.stack([tensors[f"{LAYER}mlp.{x}_proj.weight"] for x in ("gate", "up")], axis=1)
    np.testing.assert_array_equal(model.layers[1].mlp.gate_up_proj.weight[...], gate_up)


def test_the_dtype_is_that_of_the_embeddings_and_generation_config_says_where_text_ends(
    folder,
):
    name = "model.embed_tokens.weight"
    embeddings = load_file(folder / "model.safetensors")[name]
    edit(folder, {name: embeddings.astype(ml_dtypes.bfloat16)})
    for dtype, expected in ((None, jnp.bfloat16), (jnp.float32, jnp.float32)):
        model, _ = load_checkpoint(folder, dtype=dtype)
        assert {x.dtype for x in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(expected)}
    for token in (7, 0):
        (folder / "generation_config.json").write_text(f'{{"eos_token_id": {token}}}')
        assert load_checkpoint(folder)[1].eos_token_ids == (token,)
    (folder / "generation_config.json").unlink()
    assert load_checkpoint(folder)[1].eos_token_ids == (3, 5)


def test_harmless_extras_are_ignored(saved, folder):
    tied = np.asarray(saved[1].embed_tokens.weight[...])
    inv_freq = np.ones(2, np.float32)
    edit(folder, {"lm_head.weight": tied, LAYER + "self_attn.rotary_emb.inv_freq": inv_freq})
    assert_same_weights(saved[1], load_checkpoint(folder)[0])


@pytest.mark.parametrize(
    ("tool", "dtype", "shape"),
    [
        *[("compressed-tensors", np.float32, (1,)), ("ModelOpt", ml_dtypes.bfloat16, ())],
        ("Quark", np.float16, ()),
    ],
)
def test_scales_of_a_float8_cache_are_read_and_saved_again(folder, tool, dtype, shape):
    edit(folder, scale_tensors(tool, dtype, shape))
    model, config = load_checkpoint(folder)
    assert model.config == config == replace(CONFIG, **SCALES)
    save_checkpoint(folder, model, config)
    assert load_checkpoint(folder)[1] == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({V_PROJ: None}, rf"missing tensor {V_PROJ}, .* shape \(32, 32\)"),
        ({UP_PROJ: np.zeros((32, 48))}, rf"{UP_PROJ}: expected shape \(48, 32\), found=\(32, 48\)"),
        ({Q_NORM: np.zeros(4)}, rf"unexpected tensor {Q_NORM} of shape \(4,\)"),
        ({"model.norm.weight": np.zeros(32, np.int8)}, r"tensor model\.norm\.weight: expected one"),
        (SCALED | {UP_PROJ: np.zeros((48, 32), FLOAT8)}, f"{UP_PROJ}: .* found='F8_E4M3'"),
        (SCALED | {UP_PROJ + "_scale": np.ones(1)}, f"unexpected tensor {UP_PROJ}_scale"),
        (SCALED | {K_SCALE: None}, f"missing tensor {K_SCALE}: other scales of the KV cache are"),
        (SCALED | {K_SCALE: np.float32(0)}, r"cache: k_scales\[1\]=0.0 must be a positive number"),
        (SCALED | {K_SCALE: np.float32(np.nan)}, r"k_scales\[1\]=nan must be a positive number"),
        (SCALED | {K_SCALE: np.ones(2, np.float32)}, r"one number .* found='F32' of shape \(2,\)"),
        (SCALED | {K_SCALE: np.int8(1)}, r"expected one number of .* found='I8' of shape \(\)"),
        (SCALED | {K_SCALE.replace("1", "2"): 1.0}, r"unexpected tensor model\.layers\.2\.self"),
        (SCALED | {LAYER + "self_attn.k_proj.k_scale": 1.0}, "unexpected tensor .*k_proj.k_scale"),
    ],
)
def test_wrong_tensors_are_refused_by_name(folder, changes, message):
    edit(folder, changes)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


def test_tensors_that_config_json_asks_for_must_be_there(folder, monkeypatch):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"tie_word_embeddings": False}
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"missing tensor lm_head\.weight.*\(40, 32\)"):
        load_checkpoint(folder)
    path.write_text(json.dumps(config | {"num_hidden_layers": 1024}))
    monkeypatch.setattr(nnx, "eval_shape", None)  # tracing them would take minutes
    with pytest.raises(CheckpointError, match=r"missing tensor model\.layers\.1023\."):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", None, r"config\.json: no such file"),
        ("config.json", "{", r"config\.json: not JSON"),
        ("config.json", "[]", r"config\.json: expected a JSON object"),
        ("config.json", '{"architectures": ["GPT2LMHeadModel"]}', "'GPT2LMHeadModel' is not"),
        ("generation_config.json", "{", r"generation_config\.json: not JSON"),
        ("generation_config.json", '{"eos_token_id": "x"}', r"n_config\.json: eos_token_id='x' "),
        ("model.safetensors.index.json", None, r"neither model\.safetensors nor model\.saf"),
        ("model.safetensors.index.json", "{}", r"index\.json: expected .*weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 1}}', "expected weight_map"),
        *(
            (
                "model.safetensors.index.json",
                f'{{"weight_map": {{"a": "x", "b": "{file}"}}}}',
                f"index.json: file='{file}' must be inside the folder",
            )
            for file in ("../other/x", "sub/../../x", "/etc/passwd")
        ),
        ("model-00002-of-00002.safetensors", None, r"missing, though .* for tensor lm_head\.w"),
        ("model-00001-of-00002.safetensors", "short", r"00001-of-00002\.safetensors: "),
    ],
)
def test_wrong_files_are_refused_by_name(tmp_path, name, text, message):
    shutil.copytree(GOLDENS / "llama", tmp_path, dirs_exist_ok=True)
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


def test_a_missing_folder_is_refused_and_none_is_made_for_a_model_to_refuse(saved, tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: no such checkpoint folder"):
        load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="cannot be saved as LlamaForCausalLM"):
        save_checkpoint(tmp_path / "nowhere", saved[1], replace(CONFIG, qk_norm=True))
    assert not (tmp_path / "nowhere").exists()


def test_shakespeare_runs_in_transformers_with_the_same_greedy_tokens():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    golden = np.load(GOLDENS / "shakespeare" / "golden.npz")
    prompt, greedy = golden["input_ids"], golden["greedy_tokens"]
    model = transformers.AutoModelForCausalLM.from_pretrained(SHAKESPEARE, dtype=torch.float32)
    theirs = model.generate(torch.tensor(prompt), do_sample=False, max_new_tokens=greedy.shape[1])
    np.testing.assert_array_equal(theirs[:, prompt.shape[1] :], greedy)
    tokenizer = transformers.AutoTokenizer.from_pretrained(SHAKESPEARE)
    assert tokenizer("ROMEO: é").input_ids == list("ROMEO: é".encode())


# The memory that loading many small tensors takes.

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "models" / "goldens" / "qwen3_moe"
NUM_FILES = 3
# It loads a small checkpoint first, which imports and compiles, and then the one to measure from
# a new peak.
PROGRAM = """
import re, sys
from pathlib import Path
import jax
from flax import nnx
from models.decoder import load_checkpoint

def memory(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

load_checkpoint(sys.argv[1])
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
decoder, _ = load_checkpoint(sys.argv[2])
held = sum(x.nbytes for x in jax.tree.leaves(nnx.state(decoder)))
print(held, memory("VmHWM") - before)
"""


def save_experts(folder: Path) -> tuple[int, int]:
    """Save 64 experts in each of 8 layers; return the most bytes of a file and a parameter."""
    contents = json.loads((GOLDEN / "config.json").read_text())
    contents |= dict(num_local_experts=64, hidden_size=128, moe_intermediate_size=128)
    contents |= dict(num_hidden_layers=8, mlp_only_layers=[])
    (folder / "config.json").write_text(json.dumps(contents))
    config = ModelConfig.from_hugging_face(contents)
    state = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    params = [(path, param.shape) for path, param in nnx.to_flat_state(state)]
    shapes = [x for path, shape in params for x in tensors_of(path, shape, config)]
    where, sizes = {}, []
    for number in range(NUM_FILES):
        own = shapes[len(shapes) * number // NUM_FILES : len(shapes) * (number + 1) // NUM_FILES]
        file = folder / f"model-{number}.safetensors"
        save_file({name: np.full(shape, 0.5, np.float32) for name, shape in own}, file)
        where |= dict.fromkeys((name for name, _ in own), file.name)
        sizes.append(file.stat().st_size)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return max(sizes), max(4 * math.prod(shape) for _, shape in params)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's peaks")
@pytest.mark.slow  # a process that imports JAX, and 100 MB of files
def test_the_peak_is_less_than_a_file_and_a_parameter_above_the_parameters(tmp_path):
    file_bytes, param_bytes = save_experts(tmp_path)
    # glibc keeps what is freed unless it is mapped.
    env = os.environ | {"JAX_PLATFORMS": "cpu", "MALLOC_MMAP_THRESHOLD_": "131072"}
    command = [sys.executable, "-c", PROGRAM, str(GOLDEN), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, check=True)
    held, grown = map(int, done.stdout.split())
    assert held > 2.5 * file_bytes
    assert held <= grown < held + file_bytes + param_bytes, (held, grown)
