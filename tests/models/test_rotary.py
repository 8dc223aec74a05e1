"""Rotary embeddings equal those of transformers, for every scaling and both spellings."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from models.checkpoint import load_checkpoint, save_checkpoint
from models.config import ModelConfig
from models.rotary import inverse_frequencies, rotation
from tests.support.dense_oracle import dense_logits
from tests.support.marks import slow

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 10,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
pytestmark = pytest.mark.usefixtures("exact_products")
GOLDENS = Path(__file__).parent / "goldens"
CASES = json.loads((GOLDENS / "rotary.json").read_text())
TINY = [name for name in CASES if not name.startswith("large")]
LENGTHS = {name: (24, 96) if name in TINY else (131072,) for name in CASES}


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDENS / "rotary.npz") as file:
        return dict(file)


def config_of(name, **more):
    contents = LLAMA | CASES[name] | {"head_dim": 16 if name in TINY else 128} | more
    return ModelConfig.from_hugging_face(contents)


@pytest.mark.parametrize("name", CASES)
def test_frequencies_and_angles_equal_transformers(name, golden):
    config = config_of(name)
    for length in LENGTHS[name]:
        inverse = inverse_frequencies(config, length)
        assert inverse.dtype == np.float32
        # The last bits of powers of float32. transformers rounds a base that grows to float32, too.
        rtol = 5e-7 if name == "dynamic" else 1.3e-7
        np.testing.assert_allclose(inverse, golden[f"{name}.inv_freq.{length}"], rtol=rtol)
        positions = np.arange(length, dtype=np.int32)
        cos, sin = (np.asarray(x) for x in rotation(positions, config, whole_rows=True))
        assert cos.shape == sin.shape == (length, 1, config.head_dim // 2)
        # The last bit of a low frequency, times the position. GPUs round cosines more coarsely.
        tolerance = (2e-6 if jax.default_backend() == "gpu" else 1e-6) + 5e-11 * length
        for found, kind in ((cos, "cos"), (sin, "sin")):
            expected = golden[f"{name}.{kind}.{length}"]
            found = found[-len(expected) :, 0]
            np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


# The decoder takes what `rotation` returns, and its rows may have frequencies of their own.
OWN = ("dynamic", "longrope")


@pytest.mark.parametrize("name", [*OWN, "llama3", *slow(sorted({*TINY} - {*OWN, "llama3"}))])
def test_logits_equal_transformers(name, golden, tmp_path):
    config = json.loads((GOLDENS / "llama" / "config.json").read_text())
    del config["rope_parameters"]
    shutil.copytree(GOLDENS / "llama", tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(config | CASES[name]))
    model, _ = load_checkpoint(tmp_path)
    for length in LENGTHS[name]:
        tokens = np.int32(golden["tokens"][:, :length])
        logits, expected = dense_logits(model, tokens)[:, -4:], golden[f"{name}.logits.{length}"]
        assert np.abs(logits - expected).max() <= 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", CASES)
def test_saved_config_is_read_back(name):
    config = config_of(name)
    written = json.loads(json.dumps(config.to_hugging_face()))
    assert ModelConfig.from_hugging_face(written) == config


def test_saved_checkpoint_keeps_its_scaling(tmp_path):
    model, config = load_checkpoint(GOLDENS / "llama")
    scaling = config_of("longrope").rope_scaling
    config = dataclasses.replace(config, rope_scaling=scaling, max_position_embeddings=128)
    save_checkpoint(tmp_path, model, config)
    assert load_checkpoint(tmp_path)[1] == config


def test_scaling_that_was_added_to_a_file_of_transformers_5_wins():
    contents = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    config = ModelConfig.from_hugging_face(LLAMA | contents)
    assert config.rope_theta == 1e6 and config.rope_scaling.factor == 2.0


@pytest.mark.parametrize(
    ("max_positions", "original", "expected"),
    [(40960, 32768, 131072), (131072, 32768, 131072), (200000, 32768, 200000), (4096, None, 16384)],
)
def test_yarn_extends_the_context(max_positions, original, expected):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": original}
    contents = {"max_position_embeddings": max_positions, "rope_scaling": scaling}
    config = ModelConfig.from_hugging_face(LLAMA | contents)
    assert config.max_position_embeddings == expected


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_with_a_cache_frequencies_depend_on_the_context_only(name):
    config = config_of(name)
    for context in (32, 96):
        config = dataclasses.replace(config, max_position_embeddings=context)
        cos, sin = (np.asarray(x)[:, 0] for x in rotation(np.arange(24, dtype=np.int32), config))
        expected = np.arange(24, dtype=np.float32)[:, None] * inverse_frequencies(config, context)
        factor = getattr(config.rope_scaling, "attention_factor", 1.0)
        np.testing.assert_allclose(cos, factor * np.cos(expected), atol=1e-6)
        np.testing.assert_allclose(sin, factor * np.sin(expected), atol=1e-6)
    # Rows that are whole sequences have the frequencies of their own lengths.
    original = config.rope_scaling.original_max_position_embeddings
    for length in (original, original + 1):
        positions = np.arange(length, dtype=np.int32)
        cached = rotation(positions, dataclasses.replace(config, max_position_embeddings=length))
        whole = rotation(positions, config, whole_rows=True)
        np.testing.assert_allclose(np.stack(whole), np.stack(cached), atol=2e-6)
    positions = np.stack([np.arange(40), np.arange(40) // 2]).astype(np.int32)
    cos, sin = (np.asarray(x) for x in rotation(positions, config, whole_rows=True))
    for row in (0, 1):
        alone = rotation(positions[row], config, whole_rows=True)
        np.testing.assert_array_equal((cos[row], sin[row]), alone)
    assert np.abs(cos[0, 10] - cos[1, 20]).max() > 1e-3


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "mrope"}, "rope_type='mrope' is not supported; supported: default, linear,"),
        ({"type": "linear"}, "rope_type='linear' needs factor"),
        ({"type": "linear", "factor": 0}, "factor=0 must be a positive number"),
        ({"type": "dynamic", "factor": "2"}, "factor='2' must be a positive number"),
        ({"type": "yarn", "factor": 2.0, "beta_fast": 0.5}, r"beta_fast=0\.5 must be at least"),
        ({"type": "yarn", "factor": 2.0, "attention_factor": -1}, "attention_factor=-1 must be a"),
        ({"type": "yarn", "factor": 2.0, "mscale": "x", "mscale_all_dim": 1}, "mscale='x' must be"),
        ({"type": "yarn", "factor": True}, "factor=True must be a positive number"),
        ({"type": "longrope", "factor": 2.0}, "rope_type='longrope' needs short_factor"),
        (
            {"type": "longrope", "factor": 2.0, "short_factor": 1, "long_factor": [1]},
            "short_factor=1 must be a list",
        ),
        (
            {"type": "longrope", "factor": 2.0, "short_factor": [1, 1], "long_factor": [1]},
            "long_factor has 1 numbers, must have 2",
        ),
        (
            {"type": "longrope", "factor": 2.0, "short_factor": [1, 0], "long_factor": [1, 1]},
            r"short_factor\[1\]=0 must be a positive number",
        ),
        (
            {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0},
            "original_max_position_embeddings=0 must be an integer in 1..",
        ),
        ({"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_scalings_that_are_incomplete_or_out_of_range_are_refused(scaling, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hugging_face(LLAMA | {"head_dim": 4, "rope_scaling": scaling})


def test_bases_and_heads_that_a_scaling_cannot_have_are_refused():
    yarn, dynamic = ({"type": name, "factor": 2.0} for name in ("yarn", "dynamic"))
    with pytest.raises(ValueError, match=r"rope_theta=1\.0 must be above 1 for YaRN"):
        ModelConfig.from_hugging_face(LLAMA | {"rope_theta": 1.0, "rope_scaling": yarn})
    with pytest.raises(ValueError, match="head_dim=2 must be above 2 for a dynamic"):
        ModelConfig.from_hugging_face(LLAMA | {"head_dim": 2, "rope_scaling": dynamic})
