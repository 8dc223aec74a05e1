"""Rotary scalings in the engine and long prompts in chunks, against a forward without a cache."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from models.decoder import engine_model
from models.decoder.rope_scaling import (
    DynamicRopeScaling,
    LinearRopeScaling,
    LongRopeScaling,
    YarnRopeScaling,
)
from models.generate import generate
from pallas_paged.engine import SamplingParams
from tests.support.dense_oracle import CONFIG, dense_logits, tiny_model
from tests.support.marks import slow
from tests.support.oracle import log_softmax

pytestmark = pytest.mark.usefixtures("exact_products")
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
