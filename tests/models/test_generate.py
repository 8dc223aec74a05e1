"""`generate` against generation without a cache: batches, small pools, samples, stops, events."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flax import nnx

import pallas_paged as pp
from models.generate import generate as generate_with_defaults
from tests.support.dense_oracle import CONFIG, DenseOracle, tiny_model
from tests.support.marks import slow

pytestmark = pytest.mark.usefixtures("exact_products")
# Lengths on both sides of the borders of 4-token pages.
PROMPTS = [[1, 2, 3], list(range(4, 13)), [14, 15, 16, 17], [18], list(range(20, 28))]
NEW = 14


@pytest.fixture(scope="module")
def greedy(oracle):
    return [oracle.continue_(prompt, NEW) for prompt in PROMPTS]


def generate(model, prompts, **options):
    # Small chunks of prompts, so that few shapes compile.
    defaults = dict(
        max_new_tokens=NEW, page_size=4, chunk=4, prefill_chunk=16, implementation="xla"
    )
    return generate_with_defaults(model, prompts, **(defaults | options))


def tokens_of(result):
    return [completion.tokens for completion in result.completions]


def reasons_of(result):
    return [completion.finish_reason for completion in result.completions]


@pytest.mark.parametrize("chunk", [4, 100, *slow([1])])
def test_paged_equals_dense(model, greedy, chunk):
    result = generate(model, PROMPTS, chunk=chunk).result()
    assert tokens_of(result) == greedy
    assert reasons_of(result) == ["max_tokens"] * len(PROMPTS)


@pytest.mark.parametrize("prefill_chunk", [7, *slow([1, None])])
def test_chunks_of_prompts_change_no_token(model, greedy, prefill_chunk):
    result = generate(model, PROMPTS, prefill_chunk=prefill_chunk).result()
    assert tokens_of(result) == greedy
    assert result.stats.prompt_tokens == sum(map(len, PROMPTS))


def test_a_model_with_windows_equals_its_dense_self(greedy):
    model = tiny_model(replace(CONFIG, sliding_windows=(3, None)))
    dense = DenseOracle(model)
    wanted = [dense.continue_(prompt, NEW) for prompt in PROMPTS[:2]]
    assert wanted != greedy[:2]
    assert tokens_of(generate(model, PROMPTS[:2], prefill_chunk=5).result()) == wanted


def test_events_are_the_result_in_pieces(model, greedy):
    generation = generate(model, PROMPTS)
    events = list(generation)
    for prompt, wanted in enumerate(greedy):
        mine = [event for event in events if event.prompt == prompt]
        assert [len(event.tokens) for event in mine] == [1, 4, 4, 4, 1]
        assert [token for event in mine for token in event.tokens] == wanted
        assert [event.finish_reason for event in mine] == [None] * 4 + ["max_tokens"]
    assert tokens_of(generation.result()) == greedy


def test_stats_count_what_was_done(model):
    stats = generate(model, PROMPTS).result().stats
    assert stats.prompt_tokens == sum(map(len, PROMPTS))
    assert stats.prefill_tokens == len(PROMPTS)
    assert stats.decode_tokens == len(PROMPTS) * (NEW - 1)
    held = [len(prompt) + NEW - 1 for prompt in PROMPTS]  # the last token is never written
    assert stats.pages_used == sum(-(-length // 4) for length in held)
    assert stats.pool_utilization == pytest.approx(sum(held) / (4 * stats.pages_used))
    assert stats.num_pages == 8 * 8 and stats.page_size == 4  # 8 rows, at most 22 -> 32 tokens
    assert min(stats.compile_seconds, stats.prefill_seconds, stats.decode_seconds) > 0
    assert stats.decode_tokens_per_second == stats.decode_tokens / stats.decode_seconds
    assert stats.prefill_tokens_per_second == stats.prompt_tokens / stats.prefill_seconds


def test_a_small_pool_changes_no_token(model, greedy):
    """The pool has 8 of the 25 pages that the rows need: rows wait, are preempted and resume."""
    generation = generate(model, PROMPTS, num_pages=8)
    for _ in generation:
        pp.check_page_table(generation.state.table)
    result = generation.result()
    assert tokens_of(result) == greedy
    assert reasons_of(result) == ["max_tokens"] * len(PROMPTS)
    assert result.stats.pages_used == 8


def test_only_a_row_too_long_for_the_pool_ends_out_of_pages(model, greedy):
    result = generate(model, PROMPTS, num_pages=4).result()  # 16 tokens in all
    for prompt, wanted, completion in zip(PROMPTS, greedy, result.completions, strict=True):
        count = min(NEW, 16 - len(prompt) + 1)
        assert completion.tokens == wanted[:count]
        assert completion.finish_reason == ("max_tokens" if count == NEW else "out_of_pages")


def test_a_prompt_larger_than_the_pool_ends_without_tokens(model, greedy):
    result = generate(model, PROMPTS[:2], num_pages=2).result()
    assert result.completions[1].tokens == []
    assert result.completions[1].finish_reason == "out_of_pages"
    assert tokens_of(result)[0] == greedy[0][:6]


def test_more_samples_than_rows_take_turns(model, greedy):
    result = generate(model, PROMPTS, max_seqs=2).result()
    assert tokens_of(result) == greedy
    assert result.stats.num_pages == 2 * 8


@pytest.fixture(scope="module")
def drawn(model):
    return tokens_of(generate(model, PROMPTS[:2], num_samples=3, temperature=1.0, seed=5).result())


def test_samples_differ_and_repeat(model, drawn):
    assert len(set(map(tuple, drawn))) == 6
    again = generate(model, PROMPTS[:2], num_samples=3, temperature=1.0, seed=5)
    assert tokens_of(again.result()) == drawn
    other = generate(model, PROMPTS[:2], num_samples=3, temperature=1.0, seed=6)
    assert tokens_of(other.result()) != drawn


def test_samples_share_the_pages_of_their_prompt(model):
    prompt = list(range(1, 18))  # 4 full pages and a tail
    stats = (
        generate(model, [prompt], num_samples=4, temperature=1.0, max_new_tokens=3).result().stats
    )
    assert stats.pages_used == 4 + 4
    assert stats.prompt_tokens == 17
    assert stats.pool_utilization == (16 + 4 * (1 + 2)) / (8 * 4)


@pytest.mark.parametrize(
    "options",
    [{"chunk": 3}, {"num_pages": 8}, *slow([{"num_pages": 7}, {"max_seqs": 2}])],
    ids=["chunk", "small pool", "smaller pool", "few rows"],
)
def test_samples_do_not_depend_on_how_they_are_run(model, drawn, options):
    result = generate(
        model, PROMPTS[:2], num_samples=3, temperature=1.0, seed=5, **options
    ).result()
    assert tokens_of(result) == drawn


def test_a_sample_does_not_depend_on_its_batch(model, drawn):
    alone = generate(model, [PROMPTS[1]], num_samples=2, temperature=1.0, seed=5).result()
    assert tokens_of(alone) == drawn[3:5]


def test_each_prompt_has_its_own_sampling_values(model, greedy):
    result = generate(model, PROMPTS[:2], temperature=[0.0, 1.0], top_k=[0, 1]).result()
    assert tokens_of(result) == greedy[:2]  # top_k=1 is greedy too


def test_stop_tokens_end_a_sample_and_are_left_out(model, greedy):
    stop = greedy[1][5]
    wanted = [text[: text.index(stop)] if stop in text else text for text in greedy]
    result = generate(model, PROMPTS, stop_tokens=[stop]).result()
    assert tokens_of(result) == wanted
    assert reasons_of(result)[1] == "stopped"

    graphdef, params = nnx.split(model)
    with_end = nnx.merge(graphdef, params)
    with_end.config = replace(CONFIG, eos_token_ids=(stop,))
    assert tokens_of(generate(with_end, PROMPTS).result()) == wanted
    assert tokens_of(generate(with_end, PROMPTS, stop_tokens=()).result()) == greedy


def test_the_caller_can_stop_a_sample(model, greedy):
    generation = generate(model, PROMPTS, num_pages=8)
    lengths = {}
    for event in generation:
        if event.prompt == 1:
            generation.stop(1, 0)
            generation.stop(2, 0)  # it is still queued, so it never starts
            lengths[1] = len(event.tokens)
    result = generation.result()
    assert reasons_of(result) == ["max_tokens", "stopped", "stopped", "max_tokens", "max_tokens"]
    assert len(result.completions[1].tokens) == lengths[1] and result.completions[2].tokens == []
    assert [tokens_of(result)[i] for i in (0, 3, 4)] == [greedy[i] for i in (0, 3, 4)]


def test_a_second_call_of_the_same_bucket_traces_nothing(model, monkeypatch):
    options = dict(num_samples=2, temperature=1.0, top_p=0.9, stop_tokens=[0], prefill_chunk=None)
    generate(model, PROMPTS[:2], **options).result()
    traces, merge = [], nnx.merge
    monkeypatch.setattr(nnx, "merge", lambda *args: traces.append(1) or merge(*args))
    options |= dict(temperature=0.5, top_p=0.8, seed=9, stop_tokens=[3], chunk=7)
    generate(model, [[5] * 6, [6] * 8], max_new_tokens=11, **options).result()
    assert not traces
    generate(model, [[5] * 6, [6] * 17], max_new_tokens=11, **options).result()
    assert traces, "the test must notice a trace of another bucket"


def test_random_prompts_in_a_tiny_pool(model, oracle):
    rng = np.random.default_rng(0)
    for _ in range(2):
        prompts = [rng.integers(1, 40, rng.integers(1, 15)).tolist() for _ in range(7)]
        generation = generate(model, prompts, num_pages=8, max_seqs=4)
        for _ in generation:
            pp.check_page_table(generation.state.table)
        assert tokens_of(generation.result()) == [oracle.continue_(p, NEW) for p in prompts]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "there is no prompt"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1] * 51], {}, "prompt 0 of 51 tokens and max_new_tokens=14 are more than the 64"),
        ([[40]], {}, r"prompt 0 has a token outside 0..39"),
        ([[-1]], {}, r"prompt 0 has a token outside 0..39"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ([[1]], {"num_samples": 0}, "num_samples=0 must be at least 1"),
        ([[1]], {"num_pages": 0}, "num_pages=0 must be at least 1"),
        ([[1]], {"chunk": 0}, "chunk=0 must be at least 1"),
        ([[1]], {"prefill_chunk": 0}, "prefill_chunk=0 must be at least 1"),
        ([[1]], {"stop_tokens": [2**31]}, "stop token 2147483648 must be in 0..2147483647"),
        ([[1]], {"max_seqs": 0}, "max_seqs=0 must be at least 1"),
        ([[1]], {"page_size": 3}, "page_size=3 must be a power of two"),
        ([[1]], {"seed": -1}, "seed=-1 must be in 0.."),
        ([[1]], {"temperature": -1.0}, "temperature=-1.0"),
        ([[1]], {"top_p": [0.5, 0.5]}, "must be one value or 1 values"),
    ],
)
def test_bad_arguments_are_refused(model, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, prompts, **options)


def test_an_unknown_implementation_is_refused_before_the_first_token(model):
    with pytest.raises(ValueError, match="implementation='nonsense'"):
        next(iter(generate(model, PROMPTS, implementation="nonsense")))
