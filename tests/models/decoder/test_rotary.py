"""Rotary embeddings equal those of transformers, for every scaling and both spellings."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from models.decoder import ModelConfig, engine_model, load_checkpoint
from models.decoder.rope_scaling import (
    DynamicRopeScaling,
    LinearRopeScaling,
    LongRopeScaling,
    YarnRopeScaling,
)
from models.decoder.rotary import inverse_frequencies, rotation
from models.generate import generate
from pallas_paged.engine import SamplingParams
from tests.support.dense_oracle import CONFIG, dense_logits, tiny_model
from tests.support.marks import slow
from tests.support.oracle import log_softmax

pytestmark = pytest.mark.usefixtures("exact_products")
GOLDENS = Path(__file__).parents[1] / "goldens"
MODEL = json.loads((GOLDENS / "llama" / "config.json").read_text())
del MODEL["rope_parameters"]
CASES = json.loads((GOLDENS / "rotary.json").read_text())
TINY = [name for name in CASES if not name.startswith("large")]
LENGTHS = {name: (24, 96) if name in TINY else (131072,) for name in CASES}
# The decoder takes what `rotation` returns, and its rows may have frequencies of their own.
OWN = ("dynamic", "longrope")


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDENS / "rotary.npz") as file:
        return dict(file)


def config_of(name):
    head_dim = 16 if name in TINY else 128
    return ModelConfig.from_hugging_face(MODEL | CASES[name] | {"head_dim": head_dim})


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
        angles = rotation(positions, config, whole_rows=True)
        # The last bit of a low frequency, times the position. GPUs round cosines more coarsely.
        tolerance = (2e-6 if jax.default_backend() == "gpu" else 1e-6) + 5e-11 * length
        for found, kind in zip(angles, ("cos", "sin"), strict=True):
            assert found.shape == (length, 1, config.head_dim // 2)
            expected = golden[f"{name}.{kind}.{length}"]
            found = np.asarray(found)[-len(expected) :, 0]
            np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", [*OWN, "llama3", *slow(sorted({*TINY} - {*OWN, "llama3"}))])
def test_logits_equal_transformers(name, golden, tmp_path):
    shutil.copytree(GOLDENS / "llama", tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(MODEL | CASES[name]))
    model, _ = load_checkpoint(tmp_path)
    for length in LENGTHS[name]:
        tokens = np.int32(golden["tokens"][:, :length])
        logits, expected = dense_logits(model, tokens)[:, -4:], golden[f"{name}.logits.{length}"]
        assert np.abs(logits - expected).max() <= 2e-5 * np.abs(expected).max()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", OWN)
def test_frequencies_depend_on_the_context_with_a_cache_and_on_the_row_without_one(name):
    config = config_of(name)
    original = config.rope_scaling.original_max_position_embeddings
    # Rows one longer than the original context, as long, and shorter.
    longer = np.arange(original + 1)
    rows = [longer, np.minimum(longer, original - 1), longer * 2 // 3, longer // 8]
    rows = np.stack(rows).astype(np.int32)
    found = np.stack(rotation(rows, config, whole_rows=True), axis=1)
    factor = getattr(config.rope_scaling, "attention_factor", 1.0)
    for row, alone in zip(rows, found, strict=True):
        length = int(row[-1]) + 1
        angles = row[:, None, None] * inverse_frequencies(config, length)
        expected = factor * np.stack([np.cos(angles), np.sin(angles)])
        np.testing.assert_allclose(alone, expected, atol=2e-6)
        cached = rotation(row, replace(config, max_position_embeddings=length))
        np.testing.assert_allclose(np.stack(cached), expected, atol=2e-6)
    assert np.abs(found[0, 0, 10] - found[2, 0, 15]).max() > 1e-3  # the same position


# In the engine, and for long prompts in chunks, against a forward without a cache.


YARN = YarnRopeScaling(factor=4.0, original_max_position_embeddings=16, attention_factor=1.14)
DYNAMIC = DynamicRopeScaling(factor=2.0, original_max_position_embeddings=32)
LINEAR = LinearRopeScaling(factor=2.0)
LONGROPE = LongRopeScaling(
    short_factor=(1.0,) * 8,
    long_factor=(1.0, 1.1, 1.5, 2.0, 4.0, 6.0, 7.5, 8.0),
    attention_factor=1.2,
    original_max_position_embeddings=32,
)
# The context of the file, and the one that is asked for.
LONGER = {"max_model_len": 60}
CONTEXTS = {LONGROPE: (128, {}), DYNAMIC: (32, LONGER), LINEAR: (32, LONGER), YARN: (64, {})}


def name_of(value) -> str:
    return str(value) if isinstance(value, int) else type(value).__name__


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (LONGROPE, 50),
        (DYNAMIC, 40),
        *slow([(YARN, 55), (LONGROPE, 20), (LINEAR, 50)]),  # 20: short sequences only
    ],
    ids=name_of,
)
def test_sequences_of_the_engine_have_the_frequencies_of_their_context(scaling, length):
    context, asked = CONTEXTS[scaling]
    decoder = tiny_model(replace(CONFIG, max_position_embeddings=context, rope_scaling=scaling))
    prompt = np.random.default_rng(0).integers(0, 40, length).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=0)
    sizes = dict(max_num_seqs=4, max_num_batched_tokens=32, implementation="xla") | asked
    (output,) = generate(decoder, [prompt], params, **sizes)
    # With a cache the length is that of the context; complete rows have their own.
    if scaling is DYNAMIC:
        decoder = tiny_model(replace(decoder.config, max_position_embeddings=60, rope_scaling=None))
        growth = (2 * 60 / 32 - 1) ** (16 / 14)
        decoder.config = replace(decoder.config, rope_theta=CONFIG.rope_theta * growth)
    (completion,) = output.outputs
    tokens = np.int32([prompt + completion.token_ids[:-1]])
    expected = log_softmax(dense_logits(decoder, tokens)[0, length - 1 :])
    assert completion.token_ids == expected.argmax(-1).tolist()
    pairs = zip(completion.logprobs, completion.token_ids, strict=True)
    found = [entry[token].logprob for entry, token in pairs]
    np.testing.assert_allclose(found, expected.max(-1), atol=2e-3)


@pytest.mark.parametrize("scaling", [YARN, DYNAMIC, LONGROPE, LINEAR, None], ids=name_of)
def test_only_scalings_that_depend_on_the_length_make_another_model(scaling):
    decoder = tiny_model(replace(CONFIG, rope_scaling=scaling))
    model, params = engine_model(decoder)
    shorter, same_params = engine_model(decoder, max_model_len=32)
    assert (shorter is not model) == (scaling is LONGROPE)
    assert shorter.max_model_len == (32 if scaling is LONGROPE else 64)
    longest = 2 * 64 if scaling in (DYNAMIC, LINEAR) else 64
    assert engine_model(decoder, max_model_len=200)[0].max_model_len == longest
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(same_params), strict=True):
        assert one is other
    with pytest.raises(ValueError, match="max_model_len=0 must be an integer in 1"):
        engine_model(decoder, max_model_len=0)
