"""Long prompts in chunks, and rotary scalings in the engine, against a forward without a cache."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.decoder import dense_attend
from models.engine_model import engine_model
from models.generate import generate
from models.rope_scaling import (
    DynamicRopeScaling,
    LinearRopeScaling,
    LongRopeScaling,
    YarnRopeScaling,
)
from pallas_paged.engine import SamplingParams
from tests.support.dense_oracle import CONFIG, tiny_model
from tests.support.marks import slow

pytestmark = pytest.mark.usefixtures("exact_products")
YARN = YarnRopeScaling(factor=4.0, original_max_position_embeddings=1024, attention_factor=1.14)
DYNAMIC = DynamicRopeScaling(factor=2.0, original_max_position_embeddings=32)
LONGROPE = LongRopeScaling(
    short_factor=(1.0,) * 8,
    long_factor=(1.0, 1.1, 1.5, 2.0, 4.0, 6.0, 7.5, 8.0),
    attention_factor=1.2,
    original_max_position_embeddings=32,
)
SIZES = dict(max_num_seqs=4, implementation="xla")


def text_of(length):
    return np.random.default_rng(0).integers(0, 40, length).tolist()


def assert_equals_dense(decoder, output):
    """Compare the log-probabilities of a completion with those of the whole text in one row."""
    (completion,) = output.outputs
    tokens = jnp.array([output.prompt_token_ids + completion.token_ids[:-1]])
    hidden, _ = decoder(tokens, jnp.arange(tokens.size)[None], dense_attend())
    first = len(output.prompt_token_ids) - 1
    expected = jax.nn.log_softmax(decoder.logits(hidden[0, first:]))
    for index, token in enumerate(completion.token_ids):
        found = completion.logprobs[index][token].logprob
        assert found == pytest.approx(float(expected[index, token]), abs=2e-3)
        assert token == int(expected[index].argmax())


def complete(decoder, length, num_tokens, **config):
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, logprobs=0)
    config = SIZES | {"max_num_batched_tokens": 64} | config
    (output,) = generate(decoder, [text_of(length)], params, **config)
    return output


def test_a_prompt_of_3000_tokens_in_chunks_of_256_equals_one_row():
    config = replace(CONFIG, num_layers=1, max_position_embeddings=4096, rope_scaling=YARN)
    decoder = tiny_model(config)
    output = complete(decoder, 3000, 3, max_num_batched_tokens=256, page_size=64)
    assert output.outputs[0].finish_reason == "length"
    assert_equals_dense(decoder, output)


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (DYNAMIC, 20),
        (LONGROPE, 50),
        *slow([(LONGROPE, 20), (LinearRopeScaling(factor=3.0), 50)]),  # 20: short sequences only
    ],
)
def test_sequences_of_the_engine_have_the_frequencies_of_their_lengths(scaling, length):
    context = 32 if scaling is DYNAMIC else 128
    config = replace(CONFIG, max_position_embeddings=context, rope_scaling=scaling)
    decoder = tiny_model(config)
    assert_equals_dense(decoder, complete(decoder, length, 5))


def test_scalings_of_files_without_the_longer_context_extend_it_where_it_is_asked_for():
    for scaling in (DYNAMIC, LinearRopeScaling(factor=2.0)):
        config = replace(CONFIG, max_position_embeddings=32, rope_scaling=scaling)
        decoder = tiny_model(config)
        with pytest.raises(ValueError, match="more than the 32 tokens of a sequence"):
            complete(decoder, 40, 4)
        assert len(complete(decoder, 40, 4, max_model_len=60).outputs[0].token_ids) == 4
        with pytest.raises(ValueError, match="max_model_len=65 must be at most the model's 64"):
            complete(decoder, 40, 4, max_model_len=65)


def test_only_scalings_that_depend_on_the_length_make_another_model():
    for scaling, changes in ((None, False), (YARN, False), (DYNAMIC, False), (LONGROPE, True)):
        config = replace(CONFIG, max_position_embeddings=64, rope_scaling=scaling)
        decoder = tiny_model(config)
        model, params = engine_model(decoder)
        shorter, same_params = engine_model(decoder, max_model_len=32)
        assert (shorter is not model) == changes
        assert shorter.max_model_len == (32 if changes else 64)
        for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(same_params), strict=True):
            assert one is other
    with pytest.raises(ValueError, match="max_model_len=0 must be an integer in 1"):
        engine_model(decoder, max_model_len=0)
