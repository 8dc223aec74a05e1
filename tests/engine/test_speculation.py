"""Requests served with drafts have the tokens that they have without."""

import itertools
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from pallas_paged.engine import EngineConfig
from pallas_paged.engine.device import runner
from pallas_paged.engine.device.lookup import find_drafts
from pallas_paged.engine.device.state import History
from pallas_paged.engine.sampling_params import SamplingMode
from pallas_paged.engine.speculative_config import SpeculativeConfig
from tests.support.draft_calls import (
    ALL,
    DRAFTS,
    GREEDY,
    MODES,
    NGRAM,
    SIZES,
    assert_ends_at_stop_texts,
    assert_equal_results,
    interrupted,
    mixed,
    plain,
)
from tests.support.engine_calls import (
    MANY_PAGES,
    MODEL,
    PROMPTS,
    assert_copies_no_pool,
    assert_every_page_is_free,
    greedy,
    make_engine,
    sampling,
    serve,
    step,
    submit,
    tokens_of,
    weights,
)
from tests.support.marks import needs_triton, slow
from tests.support.mixed_model import MixedModel
from tests.support.plain_model import PlainModel, dense_logits, greedy_tokens

K = 3
SUFFIX = dict(DRAFTS, method="suffix")
PENALTIES = [SamplingMode(penalties=True)]
own_programs = pytest.mark.cpu_budget(14)
PERIODIC = [[1, 2, 3, 4, 5] * 3, [7, 8] * 5, [*range(9, 20)] * 2]


def speculating(model=MODEL, num_steps=4, params=None, config=NGRAM, modes=MODES, **options):
    """An engine that verifies drafts whenever it can."""
    options = SIZES | dict(speculative_config=config) | options
    engine = make_engine(model, params, modes=modes, num_steps=num_steps, **options)
    return engine


@own_programs
@pytest.mark.parametrize(
    ("config", "num_steps", "modes", "filters"),
    [
        (NGRAM, 4, MODES, {}),
        *slow((NGRAM, n, ALL, dict(top_k=3, top_p=0.9)) for n in (1, 2, 4, 8)),
        *slow([(SUFFIX, 4, MODES, {})]),
    ],
)
def test_tokens_and_logprobs_equal_those_without_drafts(config, num_steps, modes, filters):
    """The pool is too small for all requests at once, so some are preempted."""
    prompts, params = PERIODIC + PROMPTS[:2], mixed(2 if filters else 0, **filters)
    engine = speculating(config=config, num_steps=num_steps, modes=modes)
    requests = serve(engine, prompts, params)
    assert_equal_results(requests, serve(plain(), prompts, params))
    stats = engine.stats()
    assert stats.num_preemptions > 0 and stats.spec_decode_num_accepted_tokens > 10
    assert stats.num_steps < stats.generated_tokens
    assert_every_page_is_free(engine)


def test_a_stop_text_ends_a_request_within_accepted_drafts():
    assert_ends_at_stop_texts(PERIODIC, speculating, 5)


def test_drafts_are_found_in_tokens_that_the_prefix_cache_had():
    """The model is made to say 9, which only the cached prompt has."""
    engine = speculating()
    prompt = [9, *range(10, 30)]
    serve(engine, [prompt], greedy(max_tokens=1))
    serve(engine, [prompt], greedy(max_tokens=3, logit_bias={9: 100.0}))
    stats = engine.stats()
    assert stats.prefix_cache_hits == 20
    assert stats.spec_decode_num_drafts == stats.spec_decode_num_draft_tokens == 1


def test_drafts_are_looked_for_in_the_prompts_of_all_that_begin_together(monkeypatch):
    """Two in a call."""
    engine = speculating(max_num_batched_tokens=64, num_pages=32)
    executor = engine.replicas[0].runner.executor
    length = executor.state.history.token_ids.shape[1]
    monkeypatch.setattr(runner, "_MAX_HISTORY", 2 * length)
    submit(engine, PERIODIC, greedy(max_tokens=8))
    step(engine)
    rows = np.asarray(executor.state.history.token_ids)
    for prompt in PERIODIC:
        assert any((row[: len(prompt)] == prompt).all() for row in rows)


def test_requests_that_end_or_begin_again_in_between_have_the_same_tokens():
    prompts = PERIODIC + PROMPTS[:1]
    wanted, _ = interrupted(plain(), prompts)
    found, (accepted, _) = interrupted(speculating(), prompts)
    assert found == wanted and accepted > 10


@own_programs
@pytest.mark.parametrize("num_full_layers", [0, *slow([1])])
def test_layers_with_a_window_keep_what_drafts_see(num_full_layers):
    """All layers, or some, which then have a pool of their own."""
    model = PlainModel(vocab_size=40, max_model_len=128, sliding_window=6)
    if num_full_layers:
        sizes = vars(model) | dict(num_full_layers=num_full_layers)
        model = MixedModel(**sizes)
    engine = speculating(model, modes=GREEDY, num_pages=64)
    requests = serve(engine, PERIODIC, [greedy(max_tokens=50, n=n) for n in (1, 1, 2)])
    wanted = [greedy_tokens(model, weights(model), prompt, 50) for prompt in PERIODIC]
    assert tokens_of(requests) == [*wanted, wanted[-1]]
    assert engine.stats().spec_decode_num_accepted_tokens > 5
    assert_every_page_is_free(engine)


@needs_triton
@pytest.mark.slow  # interpreted
def test_kernels_verify_drafts_as_the_plain_path_does():
    options = dict(modes=GREEDY, implementation="triton", interpret=True)
    engine = speculating(**options)
    requests = serve(engine, PERIODIC[:2], greedy(max_tokens=16), check=False)
    wanted = serve(plain(), PERIODIC[:2], greedy(max_tokens=16))
    assert tokens_of(requests) == tokens_of(wanted)
    assert engine.stats().spec_decode_num_accepted_tokens > 5


@own_programs
def test_a_step_with_drafts_copies_no_pool():
    assert_copies_no_pool(speculating(modes=GREEDY, num_pages=MANY_PAGES), (4, 0, K))


@pytest.mark.slow
def test_batches_with_penalties_run_without_drafts():
    engine = speculating(modes=PENALTIES)
    params = [greedy(max_tokens=20, repetition_penalty=1.2), greedy(max_tokens=8), greedy()]
    requests = serve(engine, PERIODIC, params)
    assert tokens_of(requests) == tokens_of(serve(plain(), PERIODIC, params))
    assert engine.stats().spec_decode_num_drafts == 0
    serve(engine, PERIODIC, greedy())
    assert engine.stats().spec_decode_num_drafts > 0


def test_warmup_compiles_the_steps_with_drafts():
    engine = speculating(modes=None)
    engine.warmup([sampling(min_tokens=1, logprobs=0)])
    compiled = engine.stats().compilations
    serve(engine, PERIODIC, greedy(logprobs=0))
    assert engine.stats().compilations == compiled
    assert engine.stats().spec_decode_num_drafts > 0


# The drafts alone.


def drafted(texts, num_drafts, most, least):
    """What followed the latest of the longest matches, those in the first text before others.

    Those of the first text go on with what was drafted.
    """
    tokens = texts[0]
    for size in range(min(most, len(tokens)), least - 1, -1):
        for text in texts:
            for end in range(len(text) - 2, size - 2, -1):
                if text[end + 1 - size : end + 1] == tokens[len(tokens) - size :]:
                    period = len(text) - 1 - end
                    if text is tokens:
                        return size, [text[end + 1 + i % period] for i in range(num_drafts)]
                    return size, text[end + 1 :][:num_drafts]
    return 0, []


jitted_drafts = jax.jit(find_drafts, static_argnums=3)


def random_history(seed, num_rows, groups):
    rng = np.random.default_rng(seed)
    lens = rng.integers(1, 25, num_rows).astype(np.int32)
    token_ids = np.where(np.arange(24) < lens[:, None], rng.integers(0, 3, (num_rows, 24)), -1)
    history = History(token_ids=token_ids.astype(np.int32), groups=groups)
    texts = [row[:size].tolist() for row, size in zip(token_ids, lens, strict=True)]
    return history, np.arange(num_rows, dtype=np.int32), lens, texts


# The last may be longer than a context, which has 24 tokens.
@pytest.mark.parametrize(("most", "least"), [(1, 1), (3, 1), (4, 2), (40, 1)])
def test_drafts_follow_the_latest_of_the_longest_matches(most, least):
    *arrays, texts = random_history(most, 200, np.zeros(200, np.int32))
    config = SpeculativeConfig(
        num_speculative_tokens=5, prompt_lookup_max=most, prompt_lookup_min=least
    )
    drafts, counts = map(np.asarray, jitted_drafts(*arrays, config))
    for row, text in enumerate(texts):
        assert drafts[row, : counts[row]].tolist() == drafted([text], 5, most, least)[1]
    assert {*counts.tolist()} == {0, 5}


def test_suffixes_are_found_in_the_group_too_and_longer_ones_have_more_drafts():
    """Rows of two groups; of matches of one length those in the row itself come first."""
    groups = np.arange(60, dtype=np.int32) // 2
    *arrays, texts = random_history(0, 60, groups)
    limits = dict(suffix_decoding_max_tree_depth=4, suffix_decoding_max_spec_factor=1.5)
    config = SpeculativeConfig(method="suffix", num_speculative_tokens=5, **limits)
    drafts, counts = map(np.asarray, jitted_drafts(*arrays, config))
    from_others = 0
    for row, text in enumerate(texts):
        size, wanted = drafted([text, texts[row ^ 1]], 5, 4, 1)
        assert drafts[row, : counts[row]].tolist() == wanted[: int(1.5 * size)]
        from_others += wanted != drafted([text], 5, 4, 1)[1]
    assert from_others > 10 and {*counts.tolist()} >= {0, 1, 3, 4, 5}


@own_programs
def test_a_completion_is_drafted_from_one_that_has_ended():
    """Three are sampled alike in two slots: the last has the other ones before it."""
    small, accepted = replace(MODEL, num_layers=1), []
    for num_prompts in (1, 3):
        engine = speculating(small, config=SUFFIX, modes=GREEDY, max_num_seqs=2)
        params = greedy(max_tokens=20, n=3 // num_prompts)
        requests = serve(engine, [PROMPTS[1]] * num_prompts, params)
        wanted = greedy_tokens(small, weights(small), PROMPTS[1], 20)
        assert tokens_of(requests) == [wanted] * 3
        accepted.append(engine.stats().spec_decode_num_accepted_tokens)
    assert accepted[0] > accepted[1] + 8


def test_texts_are_drawn_with_the_probabilities_of_the_model():
    """Of three tokens; the chi-square of 300 texts of three tokens each, beside wrong drafts."""
    prompt, num_tokens, num_texts = [1, 2, 3] * 4, 3, 300
    logits_of = jax.jit(partial(dense_logits, MODEL, weights()))

    def probability(text):
        logits = np.asarray(logits_of(np.array([*prompt, *text], np.int32)), np.float64)
        shares = np.exp(logits[len(prompt) - 1 : -1, 1:4])
        return np.prod([x[token - 1] / x.sum() for x, token in zip(shares, text, strict=True)])

    engine = speculating()
    how = dict(max_tokens=num_tokens, n=4, logit_bias=dict.fromkeys((1, 2, 3), 60.0))
    params = [sampling(seed=seed, **how) for seed in range(num_texts // 4)]
    requests = serve(engine, [prompt] * len(params), params, max_steps=5000, check=False)
    drawn = [*map(tuple, tokens_of(requests))]
    accepted = engine.stats().spec_decode_num_accepted_tokens
    assert num_texts / 4 < accepted < num_texts
    texts = [*itertools.product((1, 2, 3), repeat=num_tokens)]
    expected = num_texts * np.array([probability(text) for text in texts])
    assert expected.sum() == pytest.approx(num_texts)
    counts = np.array([drawn.count(text) for text in texts])
    degrees = len(texts) - 1
    assert abs(np.sum((counts - expected) ** 2 / expected) - degrees) < 4 * (2 * degrees) ** 0.5


# What the config takes.


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(NGRAM, method="ngrams"), "method='ngrams'.* did you mean 'ngram'"),
        (dict(NGRAM, num_speculative_token=3), "no 'num_speculative_token'; did you mean"),
        (dict(NGRAM, num_speculative_tokens=0), "num_speculative_tokens=0 must be"),
        (dict(NGRAM, num_speculative_tokens=10**9), "num_speculative_tokens=1000000000 must be"),
        (dict(NGRAM, adaptive=1), "adaptive=1 must be"),
        (dict(NGRAM, prompt_lookup_min=4), "prompt_lookup_min=4 must be"),
        (dict(NGRAM, prompt_lookup_max=65), "prompt_lookup_max=65 must be"),
        (dict(method="ngram"), "must have 'num_speculative_tokens'"),
        (dict(num_speculative_tokens=2), "must have 'method'"),
        (dict(NGRAM, method="suffix"), "prompt_lookup_max=3 is of method='ngram'"),
        (dict(NGRAM, suffix_decoding_max_tree_depth=3), "=3 is of method='suffix'"),
        (SUFFIX | dict(suffix_decoding_max_spec_factor=0), "factor=0 must be above 0"),
        ("ngram", "speculative_config='ngram' must be a dict"),
    ],
)
def test_a_config_that_can_not_be_followed_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(speculative_config=given)


def test_lookup_sizes_that_are_left_out_are_as_the_other_or_5():
    def sizes(**given):
        config = SpeculativeConfig.of(dict(method="ngram", num_speculative_tokens=2, **given))
        return config.prompt_lookup_min, config.prompt_lookup_max

    assert sizes() == (5, 5)
    assert sizes(prompt_lookup_max=3) == (3, 3)
    assert sizes(prompt_lookup_min=2) == (2, 2)
    config = EngineConfig(speculative_config=NGRAM)
    assert replace(config, page_size=8).speculation == config.speculation
