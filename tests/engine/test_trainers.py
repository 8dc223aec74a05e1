"""What trainers use: new weights, scores, log-probabilities of prompts, memory given back."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_paged.engine import EngineDeadError
from tests.support.engine_calls import (
    MODEL,
    PROMPTS,
    NumberTokenizer,
    assert_deltas_add_up,
    assert_every_page_is_free,
    assert_logprobs,
    greedy,
    make_engine,
    reasons_of,
    run,
    sampling,
    serve,
    step,
    submit,
    tokens_of,
    weights,
)
from tests.support.oracle import Oracle
from tests.support.placement import buffers
from tests.support.soak import result

NEW = weights(seed=2)


@pytest.fixture(scope="module")
def new_tokens():
    oracle = Oracle(MODEL, NEW)
    return [oracle.continue_(prompt, 14) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "form",
    [lambda x: x, np.asarray, lambda x: jax.device_put(x, jax.devices()[0])],
    ids=["device", "host", "committed"],
)
def test_requests_after_an_update_use_the_new_weights(
    greedy_tokens, new_tokens, compilations, form
):
    """A trainer commits its arrays to a device; those of a checkpoint are of the host."""
    engine = make_engine()
    assert tokens_of(serve(engine, PROMPTS, greedy())) == greedy_tokens
    stats = engine.stats()
    del compilations[:]
    engine.update_params(jax.tree.map(form, NEW))
    assert tokens_of(serve(engine, PROMPTS, greedy())) == new_tokens
    assert all(isinstance(leaf, jax.Array) for leaf in engine.replicas[0].weights.leaves)
    assert not compilations and engine.stats().compilations == stats.compilations
    assert engine.stats().computed_tokens >= 1.9 * stats.computed_tokens
    assert_every_page_is_free(engine)


SETTINGS = {
    "mesh": lambda: jax.set_mesh(jax.make_mesh((jax.device_count(),), ("x",))),
    "transfers": lambda: jax.transfer_guard("disallow"),
    "x64": lambda: jax.enable_x64(True),
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "no_jit": jax.disable_jit,
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_settings_of_a_trainer_do_not_reach_the_engine(settings, greedy_tokens, compilations):
    engine, params = make_engine(), jax.tree.map(np.asarray, weights())
    serve(engine, PROMPTS, greedy())
    del compilations[:]
    with settings():
        assert tokens_of(serve(engine, PROMPTS, greedy())) == greedy_tokens
        assert not compilations
        engine.sleep()
        engine.wake_up()
        engine.update_params(params)
        assert engine.score([[1, 2, 3]], [[4]]).shape == (1, 1)
        other = make_engine(params=params)
        assert tokens_of(serve(other, PROMPTS, greedy())) == greedy_tokens


@pytest.mark.parametrize("reset", [True, False])
def test_the_prefix_cache_is_kept_on_request(reset, new_tokens):
    engine = make_engine()
    serve(engine, [PROMPTS[4]], greedy(max_tokens=1))
    engine.update_params(NEW, reset_prefix_cache=reset)
    assert buffers(engine.replicas[0].weights.leaves) == buffers(NEW)  # not copied
    (request,) = serve(engine, [PROMPTS[4]], greedy())
    assert request.num_cached_tokens == (0 if reset else 16)
    assert (tokens_of([request]) == new_tokens[4:5]) == reset


@pytest.mark.parametrize("num_steps", [1, 4])
def test_running_requests_go_on_with_the_new_weights(greedy_tokens, num_steps):
    engine = make_engine(num_steps=num_steps)
    requests = submit(engine, PROMPTS[:2], greedy())
    deltas = []
    while len(requests[0].outputs[0].token_ids) < 4:
        deltas += step(engine)
    engine.update_params(NEW)
    counts = [len(tokens) for tokens in tokens_of(requests)]
    deltas += run(engine)
    assert not any(delta.restarted for delta in deltas)
    for tokens, before, count in zip(tokens_of(requests), greedy_tokens, counts, strict=False):
        assert tokens[:count] == before[:count] and tokens != before and len(tokens) == 14
    # What they computed with the old weights is not found by others.
    (again,) = serve(engine, PROMPTS[1:2], greedy())
    assert again.num_cached_tokens == 0


RESTARTS = [({}, 0), ({}, 1), ({"n": 3}, 2), ({"best_of": 2}, 5)]
RESTARTS += [({"temperature": 0.0, "beam_width": 2}, 2), ({"logprobs": 2, "prompt_logprobs": 1}, 1)]


@pytest.mark.parametrize(("kind", "num_steps"), RESTARTS, ids=str)
def test_running_requests_restart_on_request(kind, num_steps):
    engine = make_engine(tokenizer=NumberTokenizer(), num_steps=2)
    params = [sampling(**kind), sampling(**kind | {"temperature": 0.0})]
    requests = submit(engine, PROMPTS[1:2] * 2, params)
    before = [delta for _ in range(num_steps) for delta in step(engine)]
    assert not any(request.finished for request in requests)
    engine.update_params(NEW, restart_running=True)
    deltas = run(engine)
    assert not any(delta.restarted for delta in before)
    assert_deltas_add_up(deltas, requests)
    other = make_engine(params=NEW, tokenizer=NumberTokenizer())
    for request, wanted in zip(requests, serve(other, PROMPTS[1:2] * 2, params), strict=True):
        mine = [delta.restarted for delta in deltas if delta.request_id == request.request_id]
        assert mine == [num_steps > 0] + [False] * (len(mine) - 1)
        assert result(request) == result(wanted)
        entries = (x.prompt_logprobs or () for x in (request, wanted))
        for one, two in zip(*entries, strict=True):
            for token in one or ():
                assert one[token].logprob == pytest.approx(two[token].logprob, abs=1e-5)


def test_nothing_is_left_of_the_old_weights_in_a_request_that_ends_before_it_begins_again():
    engine = make_engine()
    request = engine.submit(PROMPTS[4], greedy(prompt_logprobs=0))
    step(engine, 2)
    assert request.prompt_logprobs[1] is not None
    engine.update_params(NEW, restart_running=True)
    engine.abort(request)
    (last,) = run(engine)
    assert last.restarted and last.prompt_logprobs == [None] * len(PROMPTS[4])


def test_a_restart_is_reported_once_and_its_cached_tokens_are_counted_once():
    engine = make_engine()
    serve(engine, [PROMPTS[4]], greedy(), check=False)
    request = engine.submit(PROMPTS[4], greedy())
    stream = engine.stream(request)
    assert not next(stream).restarted and request.num_cached_tokens == 16
    engine.update_params(NEW, reset_prefix_cache=False, restart_running=True)
    deltas = [next(stream), *stream]  # takes what a step would have reported
    assert [delta.restarted for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert_deltas_add_up(deltas, [request])
    assert run(engine) == [] and request.num_cached_tokens == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": np.asarray(NEW["qkv"])[:, :, :-1]}, r"params\['qkv'\] is float32\(2, 64, 127\)"),
        ({"up": np.asarray(NEW["up"]).astype(ml_dtypes.bfloat16)}, r"params\['up'\] is bfloat16"),
        ({"up": "x"}, r"params\['up'\]='x' must be an array of numbers"),
        ({"more": NEW["up"]}, r"params have the structure .*: with \['more'\]$"),
        ({"up": None}, r"params have the structure .*: without \['up'\]$"),
        (
            {"up": {f"x{i}": 1.0 for i in range(999)}},
            r"have the structure .{,450}: without \['up'\]$",
        ),
        (None, "params have the structure"),  # a list
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_weights_that_do_not_fit_are_refused_and_nothing_changes(greedy_tokens, change, message):
    engine = make_engine()
    requests = submit(engine, PROMPTS[:2], greedy())
    step(engine)
    params = [*NEW.values()] if change is None else NEW | change
    with pytest.raises(ValueError, match=message):
        engine.update_params(params, restart_running=True)
    run(engine)
    assert tokens_of(requests) == greedy_tokens[:2]
    assert serve(engine, PROMPTS[1:2], greedy())[0].num_cached_tokens == 8


def test_params_that_were_donated_are_refused_or_named_as_what_ended_the_engine(greedy_tokens):
    new, donated = (jax.tree.map(jnp.copy, NEW) for _ in range(2))
    donated["up"].delete()
    engine = make_engine()
    with pytest.raises(ValueError, match=r"params\['up'\] has been deleted, or donated"):
        engine.update_params(donated)
    assert tokens_of(serve(engine, PROMPTS, greedy())) == greedy_tokens
    engine.update_params(new)
    request = engine.submit(PROMPTS[0], greedy())
    new["up"].delete()
    with pytest.raises(EngineDeadError, match="a step failed: params have been deleted, or don"):
        engine.step()
    assert "params have been deleted" in request.error
    with pytest.raises(EngineDeadError, match="dead: params have been deleted, or donated"):
        engine.step()


COMPLETIONS = [[5, 6, 7], [], [9] * 20, [1], [*range(12)]]


@pytest.fixture(scope="module")
def scores(oracle):
    wanted = np.zeros((5, 20))
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        logprobs = oracle.logprobs([*prompt, *completion])[len(prompt) - 1 :]
        for column, token in enumerate(completion):
            wanted[row, column] = logprobs[column, token]
    return wanted


def test_scores_equal_the_dense_model(scores):
    engine = make_engine()
    others = submit(engine, PROMPTS, sampling(max_tokens=8))
    step(engine)
    found = engine.score(PROMPTS, COMPLETIONS)
    assert found.dtype == np.float32 and found.shape == (5, 20)
    np.testing.assert_allclose(found, scores, atol=1e-4)
    run(engine)
    assert all(request.finished for request in others)
    np.testing.assert_allclose(engine.score(PROMPTS, COMPLETIONS), scores, atol=1e-4)
    assert_every_page_is_free(engine)


def test_scores_share_the_prompt_and_fit_a_pool_of_one_sequence():
    """All but its last token; that one's logits are those of the first of the completion."""
    engine = make_engine()
    prompt = PROMPTS[4]  # 18 tokens, 16 of them in full pages
    engine.score([prompt], [[1]])
    computed = engine.stats().computed_tokens
    engine.score([prompt] * 3, [[2, 3], [4], [5, 6, 7]])
    assert engine.stats().computed_tokens - computed == 3 * 2 + 6
    # A scored sequence holds no cached pages beside its own copies of them.
    engine = make_engine()
    (output,) = engine.generate([[1, 2, 3]], greedy(max_tokens=61), progress=False)
    assert engine.score([[1, 2, 3]], [output.outputs[0].token_ids]).shape == (1, 61)
    small = make_engine(num_pages=4, max_model_len=64)
    with pytest.raises(ValueError, match="17 tokens and max_tokens=0 are more than the 16 tokens"):
        small.score([[1] * 3], [[2] * 14])


@pytest.mark.parametrize(
    ("prompts", "completions", "message"),
    [
        ([[1]], [], "1 prompts must have as many completions, not 0"),
        ([[1], []], [[2], [3]], "sequence 1: the prompt is empty"),
        ([[1], [1]], [[2], [40]], "sequence 1: token id of the prompt=40"),
        ([[1], [1] * 40], [[2], [3] * 30], "sequence 1: a prompt of 70 tokens"),
        ([[1], "a"], [[2], [3]], "sequence 1: .* must be token ids, not texts"),
    ],
)
def test_sequences_that_cannot_be_scored_are_refused(prompts, completions, message):
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.score(prompts, completions)
    assert engine.idle and engine.score([], []).shape == (0, 0)
    assert engine.score([[1]], [[]]).shape == (1, 0)


@pytest.mark.parametrize("top", [0, 2, 20])
def test_prompt_logprobs_equal_the_dense_model(oracle, greedy_tokens, top):
    """In chunks of less than 16 tokens, with a cold and a warm cache, and preempted."""
    engine = make_engine()
    for _ in range(2):
        requests = submit(engine, PROMPTS[::-1], greedy(prompt_logprobs=top, n=2))
        serve(engine, PROMPTS, greedy())
        assert tokens_of(requests) == [one for one in greedy_tokens[::-1] for _ in range(2)]
        for prompt, request in zip(PROMPTS[::-1], requests, strict=True):
            first, *entries = request.output().prompt_logprobs
            assert first is None and len(entries) == len(prompt) - 1
            for entry, each, token in zip(
                entries, oracle.logprobs(prompt), prompt[1:], strict=False
            ):
                assert_logprobs(entry, each, token, top)
    assert engine.stats().num_preemptions > 0


SLEEPERS = [greedy(), sampling(n=3), greedy(beam_width=2), sampling(presence_penalty=1), greedy()]


@pytest.fixture(scope="module")
def served_alone():
    return [serve(make_engine(), [p], one)[0] for p, one in zip(PROMPTS, SLEEPERS, strict=True)]


@pytest.mark.parametrize("num_steps", range(6))
def test_sleep_frees_the_pool_and_requests_go_on_after_wake(greedy_tokens, served_alone, num_steps):
    engine = make_engine(num_steps=2)
    requests = submit(engine, PROMPTS[::-1], SLEEPERS[::-1])[::-1]
    step(engine, num_steps)
    pool = jax.tree.leaves(engine.replicas[0].runner.executor.state.pool)
    engine.sleep()
    engine.sleep()
    assert all(leaf.is_deleted() for leaf in pool)
    engine.check()
    late = engine.submit(PROMPTS[1], greedy())
    with pytest.raises(RuntimeError, match="the engine sleeps: call wake_up"):
        engine.step()
    assert engine.stats().pool_bytes > 0
    engine.wake_up()
    engine.wake_up()
    run(engine)
    assert tokens_of(requests) == tokens_of(served_alone)
    assert reasons_of(requests) == reasons_of(served_alone)
    assert tokens_of([late]) == greedy_tokens[1:2]


def test_a_request_whose_tokenizer_fails_after_a_restart_ends_and_others_go_on(new_tokens):
    tokenizer = NumberTokenizer()
    engine = make_engine(tokenizer=tokenizer)
    failing, other = submit(engine, PROMPTS[:2], [greedy(), greedy(detokenize=False)])
    step(engine)
    engine.replicas.drain()
    tokenizer.broken = True
    engine.update_params(NEW, restart_running=True)
    deltas = run(engine)
    assert failing.error == "OSError: the tables are lost" and reasons_of([failing]) == ["error"]
    mine = [x for x in deltas if x.request_id == failing.request_id]
    assert [x.finished for x in mine] == [False, True] and mine[0].restarted
    assert tokens_of([other]) == new_tokens[1:2] and engine.stats().num_failed == 1


def test_an_error_of_the_old_weights_is_forgotten_when_a_request_begins_again():
    """Those of the first four; the fifth waits, so that the request goes on."""
    engine = make_engine(params=jax.tree.map(lambda x: x * jnp.nan, NEW))
    request = engine.submit(PROMPTS[0], sampling(n=5))
    while request.error is None:
        step(engine)
    assert not request.finished
    engine.update_params(NEW, restart_running=True)
    run(engine)
    assert reasons_of([request]) == ["length"] * 5 and request.error is None
