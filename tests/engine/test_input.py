"""Requests and sizes that the engine refuses."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_paged.engine import AsyncEngine, Engine, EngineConfig
from tests.support.engine_calls import (
    MODEL,
    PROMPTS,
    NumberTokenizer,
    greedy,
    make_engine,
    run,
    tokens_of,
    weights,
)
from tests.support.plain_model import PlainModel

NO_PROMPT = "a prompt must be a text or a list of token ids, not "


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(prompt=[]), "the prompt is empty"),
        (dict(prompt=[40]), r"=40 must be an integer in 0\.\.39"),
        (dict(prompt=[-1]), r"=-1 must be an integer in 0\.\.39"),
        (dict(prompt=[True]), "=True must be an integer"),
        (dict(prompt=["1"]), "='1' must be an integer"),
        (dict(prompt=[[1]]), r"=\[1\] must be an integer"),
        (dict(prompt="text"), "a prompt that is a text needs a tokenizer"),
        *((dict(prompt=prompt), NO_PROMPT) for prompt in (b"1", 3, None, {1, 2}, {1: 2})),
        (dict(prompt=np.ones((2, 2), np.int32)), NO_PROMPT),
        (dict(prompt=[1] * 51), "51 tokens and max_tokens=14 are more than the 64 tokens"),
        (dict(prompt=[1] * 64, params=greedy(max_tokens=None)), "64 tokens leaves no room for mo"),
        (dict(prompt=[1] * 30, params=greedy(beam_width=2)), "are more than the 33 tokens"),
        (dict(params=greedy(stop=["a"])), r"stop=\('a',\) needs a tokenizer"),
        (dict(params=greedy(stop_token_ids=[40])), "stop_token_ids=40 must be an integer in 0.."),
        (dict(params=greedy(logit_bias={40: 1.0})), "logit_bias=40 must be an integer in 0.."),
        (dict(request_id="mine"), "request_id='mine' is that of another request"),
        (dict(request_id=7), "request_id=7"),
        (dict(request_id=""), "request_id=''"),
        (dict(priority=1.5), "priority=1.5"),
        (dict(priority=None), "priority=None"),
        (dict(params={"n": 1}), r"params=\{'n': 1\} must be SamplingParams"),
    ],
)
def test_bad_requests_are_refused_without_effect(greedy_tokens, options, message):
    engine = make_engine()
    other = engine.submit(PROMPTS[0], greedy(), request_id="mine")
    before = engine.stats()
    with pytest.raises(ValueError, match=message):
        engine.submit(**dict(prompt=[1], params=greedy()) | options)
    assert engine.stats() == before
    after = engine.submit(PROMPTS[1], greedy())
    assert after.number == other.number + 1
    run(engine)
    assert tokens_of([other, after]) == greedy_tokens[:2]
    engine.submit([1], greedy(max_tokens=1), request_id="mine")  # free again
    run(engine)


def test_a_prompt_is_a_text_a_list_or_an_array():
    engine, prompts = make_engine(tokenizer=NumberTokenizer()), ["1 2", (1, 2), range(1, 3)]
    prompts.append(np.array([1, 2]))
    outputs = engine.generate(prompts, greedy(max_tokens=1), progress=False)
    assert [output.prompt_token_ids for output in outputs] == [[1, 2]] * 4
    assert {type(token_id) for output in outputs for token_id in output.prompt_token_ids} == {int}
    assert [output.prompt for output in outputs] == ["1 2", None, None, None]
    with pytest.raises(ValueError, match="the prompt must be valid UTF-8"):
        engine.submit("\ud800")


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("abc", greedy(), "prompts='abc' must be a list"),
        ([[1], []], greedy(), "prompt 1: the prompt is empty"),
        ([[1], [2]], [greedy()], "1 params must be one, or one for each of 2"),
        ([[1]], [None, greedy()], "2 params must be one, or one for each of 1"),
        ([[1]], ["greedy"], "prompt 0: params='greedy' must be SamplingParams"),
    ],
    ids=str,
)
def test_generate_refuses_all_prompts_if_one_is_wrong(prompts, params, message):
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.generate(prompts, params, progress=False)
    assert engine.idle


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_pages": 0}, "num_pages=0 must be an integer in 1.."),
        ({"max_num_seqs": 1.5}, "max_num_seqs=1.5 must be an integer in 1.."),
        ({"max_model_len": -1}, "max_model_len=-1 must be an integer in 1.."),
        ({"max_model_len": 65}, "max_model_len=65 must be at most the model's 64"),
        ({"max_num_batched_tokens": 4}, "tokens=4 must be more than max_num_seqs=4"),
        ({"num_scheduler_steps": 0}, "num_scheduler_steps=0 must be an integer in 1.."),
        ({"watermark": 1.0}, "watermark=1.0 must be at least 0 and below 1"),
        ({"interpret": True}, "interpret=True needs a family of kernels"),
        ({"memory_fraction": 0}, "memory_fraction=0 must be above 0"),
        ({"page_size": 3}, "page_size=3 must be a power of two"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype='int4' must be"),
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype='bfloat16' must be int8, fp8 or"),
        ({"implementation": "none"}, "implementation='none'"),
    ],
)
def test_bad_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_engine(**sizes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": None}, "model=None must have vocab_size, max_model_len"),
        ({"model": replace(MODEL, vocab_size="40")}, "model.vocab_size='40' must be an integer"),
        ({"model": replace(MODEL, eos_token_ids=3)}, "model.eos_token_ids=3 must be a tuple"),
        ({"model": replace(MODEL, num_kv_heads=0)}, "kv_cache_spec.num_kv_heads=0 must be"),
        ({"model": replace(MODEL, sliding_window=0)}, "kv_cache_spec.sliding_windows=0 must be"),
        ({"model": replace(MODEL, num_heads=[4])}, "must be hashable: unhashable type: 'list'"),
        ({"tokenizer": 5}, "tokenizer=5 must have encode, decode"),
        ({"config": {}}, r"config=\{\} must be an EngineConfig"),
        ({"devices": 3}, "devices=3 must be a list"),
        ({"devices": ["cpu"]}, "devices has 'cpu', which must be a jax.Device"),
        ({"params": None}, "params=None must be a pytree of arrays"),
        ({"params": {"a": "x"}}, r"params\['a'\]='x' must be an array of numbers"),
        ({"params": [np.array("x")]}, r"params\[0\]=array\('x'.* must be an array of numbers"),
    ],
    ids=lambda x: None if isinstance(x, str) else next(iter(x)),
)
def test_an_engine_refuses_arguments_of_wrong_types(arguments, message):
    with pytest.raises(ValueError, match=message):
        Engine(**dict(model=MODEL, params=weights()) | arguments)
    with pytest.raises(ValueError, match="engine=None must be an Engine"):
        AsyncEngine(None)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="GPUs have the kernels")
def test_an_implementation_that_cannot_run_here_is_refused_at_creation():
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        make_engine(implementation="triton")


def test_requests_of_other_engines_unknown_ids_and_too_many_beams_are_refused():
    engine, other = make_engine(), make_engine()
    request = other.submit([1, 2], greedy(max_tokens=1))
    for use in (engine.abort, lambda x: next(engine.stream(x))):
        for one, message in (
            (request, "of another engine"),
            (None, "request=None must be a Request or its id"),
            ("x", "request='x' is not the id of a request"),
        ):
            with pytest.raises(ValueError, match=message):
                use(one)
    run(other)
    engine = make_engine(replace(MODEL, vocab_size=7))
    with pytest.raises(ValueError, match="beam_width=4 is more than half of vocab_size=7"):
        engine.submit([1], greedy(max_tokens=1, beam_width=4))


def test_the_default_engine_takes_the_sizes_of_its_model():
    engine = Engine(MODEL, weights(), EngineConfig())
    assert engine.max_model_len == 64
    assert engine.num_pages == 64 * 64 // 16


@dataclass(frozen=True, kw_only=True)
class WrongModel(PlainModel):
    """Does one thing otherwise than `Model` says."""

    fault: str = ""

    def __call__(self, params, tokens, positions, attend, cache):
        def attend_twice(q, k, v, layer, **options):
            _, new = attend(q, k, v, layer, **options)
            return attend(q, k, v, layer if self.fault == "attend twice" else new, **options)

        twice = attend_twice if "twice" in self.fault else attend
        hidden, layers = super().__call__(params, tokens, positions, twice, cache)
        layers = {"old layer": (layers[0], cache[1]), "few layers": layers[:1]}.get(
            self.fault, layers
        )
        return hidden[:1] if self.fault == "few tokens" else hidden, layers

    def logits(self, params, hidden):
        logits = super().logits(params, hidden)
        if self.fault == "padded vocabulary":
            return jnp.pad(logits, ((0, 0), (0, 8)))
        return logits.astype(jnp.bfloat16) if self.fault == "bf16" else logits


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("few tokens", r"hidden states must be \[T=16, E\]: hidden.shape=\(1, 64\)"),
        ("old layer", "layer 1 of the model's cache must be what `attend` returned"),
        ("few layers", "must have 2 layers, not 1"),
        ("attend twice", "call `attend` once for each layer"),
        ("attend twice, one after the other", "call `attend` once for each layer"),
        ("padded vocabulary", r"must be f32\[4, 40\].* not float32\[4, 48\]"),
        ("bf16", r"must be f32\[4, 40\].* not bfloat16\[4, 40\]"),
    ],
)
def test_a_model_that_breaks_the_protocol_is_refused(fault, message):
    model = WrongModel(vocab_size=40, max_model_len=64, fault=fault)
    with pytest.raises(ValueError, match=message):
        make_engine(model, weights())
