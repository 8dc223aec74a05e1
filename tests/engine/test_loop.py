"""Several decode steps in one call: equal to single steps, token for token."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from pallas_paged.engine.runner import modes_for
from pallas_paged.engine.sampler import SamplingMode
from pallas_paged.engine.scheduler_output import Decode
from pallas_paged.engine.step import NOT_SAMPLED
from tests.support.engine_calls import (
    MANY_PAGES,
    MODEL,
    PROMPTS,
    NumberTokenizer,
    assert_copies_no_pool,
    assert_deltas_add_up,
    greedy,
    make_engine,
    run,
    sample_as,
    sampling,
    serve,
    step,
    steps_of,
    submit,
    weights,
)
from tests.support.marks import slow

pytestmark = pytest.mark.usefixtures("exact_products")
EOS = 37
MODES = modes_for(None)[:-1]  # the last one is for steps with prompts
LOAD = [
    greedy(),
    greedy(max_tokens=1),
    greedy(max_tokens=33),
    greedy(ignore_eos=True, max_tokens=20),
    greedy(stop=" 1", max_tokens=20),
    greedy(stop_token_ids=range(6), min_tokens=4, max_tokens=20),
    greedy(presence_penalty=1.2, repetition_penalty=1.3, logprobs=0),
    sampling(n=3),
    sampling(top_k=7, top_p=0.9, logprobs=3),
    sampling(min_p=0.1, temperature=2.0),
    sampling(n=2, frequency_penalty=0.7, logprobs=0),
    sampling(best_of=3, n=2, stop_token_ids=range(4)),
    greedy(beam_width=2, max_tokens=6),
    sampling(logit_bias={5: 3}, max_tokens=40, ignore_eos=True),
]


def results(num_steps, *, num_pages, gap=0):
    """All completions of the load, one request of each parameters, and the engine."""
    model = replace(MODEL, eos_token_ids=(EOS,))
    engine = make_engine(
        model, weights(), NumberTokenizer(), num_pages=num_pages, num_scheduler_steps=32
    )
    steps_of(sample_as(engine, LOAD), num_steps)
    requests, deltas = [], []
    for index, params in enumerate(LOAD):
        requests.append(engine.submit(PROMPTS[index % 5], params))
        for _ in range(gap):
            deltas += step(engine)
    deltas += run(engine)
    assert_deltas_add_up(deltas, requests)
    return [
        [
            (x.token_ids, x.text, x.finish_reason, x.stop_reason, top_tokens(x))
            for x in request.outputs
        ]
        for request in requests
    ], engine


def top_tokens(output):
    return [list(entry) for entry in output.logprobs or ()]


@pytest.fixture(scope="module")
def single(exact_products):
    return results(1, num_pages=64)[0]


@pytest.mark.parametrize(("num_steps", "num_pages"), [(2, 64), (7, 11), (32, 64)])
def test_several_steps_equal_single_steps(single, num_steps, num_pages):
    found, engine = results(num_steps, num_pages=num_pages)
    assert found == single
    stats = engine.stats()
    assert (stats.num_preemptions > 0) == (num_pages == 11)
    assert stats.num_calls < stats.num_steps


@pytest.mark.parametrize("seed", range(2))
def test_calls_of_random_sizes_equal_single_steps(single, seed):
    """Requests arrive while calls of several steps are in flight."""
    rng = np.random.default_rng(seed)
    num_steps = lambda: int(rng.choice([1, 2, 5, 32]))  # noqa: E731
    assert results(num_steps, num_pages=14, gap=1 + seed)[0] == single


def test_the_number_of_steps_follows_the_time_of_a_step():
    engine = make_engine(num_scheduler_steps=32)
    assert engine.replicas[0].core.step_policy() == 1  # nothing is known
    for seconds, num_steps in [(1.0, 1), (0.004, 2), (0.001, 10), (1e-9, 32), (0.0, 32)]:
        engine.replicas[0].core._step_seconds = seconds
        assert engine.replicas[0].core.step_policy() == num_steps
    assert make_engine(num_scheduler_steps=1).replicas[0].core.step_policy() == 1


@pytest.mark.parametrize(("is_late", "most"), [(False, 1), (True, 8)])
def test_calls_grow_while_the_device_waits_for_the_host(is_late, most, monkeypatch):
    seconds = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(seconds)))
    monkeypatch.setattr("pallas_paged.engine.core.time", clock)
    monkeypatch.setattr(type(jax.numpy.zeros(1)), "is_ready", lambda self: is_late)
    engine = make_engine()
    submit(engine, PROMPTS[:1], greedy(max_tokens=40))
    sizes = set()
    while not engine.idle:
        step(engine, check=False)
        sizes |= {x.in_flight.scheduled.num_steps for x in engine.replicas[0].core._calls}
    assert max(sizes) == most


def test_rows_that_end_do_not_shorten_calls():
    engine = make_engine(num_pages=64)
    steps_of(engine, 8)
    serve(engine, PROMPTS[:4], [greedy(max_tokens=n, ignore_eos=True) for n in (6, 8, 11, 18)])
    stats = engine.stats()
    assert stats.num_calls <= 2 + 3  # of the prompts, and of 17 steps


def test_a_call_takes_one_step_while_a_request_waits_for_a_slot():
    engine = make_engine(max_num_seqs=1)
    steps_of(engine, 8)
    first, _ = submit(engine, PROMPTS[:2], greedy())
    while not first.finished:
        step(engine)
        assert all(
            call.in_flight.scheduled.num_steps == 1 for call in engine.replicas[0].core._calls
        )
    run(engine)


@pytest.mark.parametrize("num_steps", [1, 8])
def test_the_host_never_counts_on_more_pages_than_are_free(num_steps, monkeypatch):
    """At every read, with requests that end by surprise."""
    engine = make_engine(replace(MODEL, eos_token_ids=(EOS, 1, 36)), weights())
    steps_of(engine, num_steps)
    read, num_reads = engine.replicas[0].core._read, []

    def checked():
        read()
        pending = len(engine.replicas[0].scheduler.pages.update.released)
        num_reads.append(1)
        assert engine.replicas[0].scheduler.pages.num_free <= int(engine.table.num_free) + pending

    monkeypatch.setattr(engine.replicas[0].core, "_read", checked)
    serve(engine, PROMPTS * 3, [sampling(max_tokens=5 + i, seed=i) for i in range(15)])
    assert len(num_reads) > 10


def test_a_sequence_near_its_end_goes_on_beside_one_that_stops():
    """The call in flight ends early, so the second has more left than the host thought."""
    engine = make_engine(num_pages=64, num_scheduler_steps=9)
    steps_of(engine, 9)
    wanted = serve(make_engine(), [PROMPTS[1]], greedy(max_tokens=6))[0].outputs[0].token_ids
    stop = wanted[2]
    count = wanted.index(stop) + 1
    load = [greedy(max_tokens=40), greedy(max_tokens=12), greedy(stop_token_ids=[stop])]
    requests = submit(engine, [PROMPTS[0], PROMPTS[3], PROMPTS[1]], load)
    while not engine.idle:
        step(engine)
        for one in engine.replicas[0].scheduler.running:
            held = int(engine.table.seq_lens[one.slot])
            assert held <= one.num_computed
    assert [len(x.outputs[0].token_ids) for x in requests] == [40, 12, count]


def started(num_pages: int, max_tokens: list[int]):
    """An engine whose requests are prefilled, with nothing in flight."""
    engine = make_engine(num_pages=num_pages)
    steps_of(engine, 1)
    requests = submit(
        engine, [[1, 2, 3, 4], [5, 6, 7, 8]], [greedy(max_tokens=n) for n in max_tokens]
    )
    engine.step()
    engine.replicas[0].core.drain()
    return engine, requests


def call(engine, num_steps, mode=SamplingMode()):  # noqa: B008
    """Run decode steps on the device without the scheduler; return the tokens [K, R]."""
    running = engine.replicas[0].scheduler.running
    decodes = [Decode(sequence=one, num_tokens=num_steps) for one in running]
    output = engine.replicas[0].runner._run(decodes, [], (4, 0), mode)
    return np.asarray(output.token_ids), output


def test_the_loop_runs_as_many_steps_as_asked(oracle):
    engine, requests = started(16, [20, 20])
    tokens, output = call(engine, 5)
    assert tokens.shape == (8, 4) and bool(output.valid)
    for row, request in enumerate(requests):
        wanted = oracle.continue_(request.prompt_token_ids, 6)
        assert request.outputs[0].token_ids == wanted[:1]
        assert tokens[:5, row].tolist() == wanted[1:]
    assert (tokens[5:] == NOT_SAMPLED).all() and (tokens[:, 2:] == NOT_SAMPLED).all()
    assert int(output.num_free) == 16 - 2 * 3


def test_the_loop_goes_on_without_a_row_that_has_ended(oracle):
    engine, _ = started(16, [20, 4])
    tokens, _ = call(engine, 8)
    assert (tokens[:3, 1] >= 0).all() and (tokens[3:, 1] == NOT_SAMPLED).all()
    more, _ = call(engine, 8)
    assert (more[:, 1] == NOT_SAMPLED).all()
    assert [*tokens[:, 0], *more[:, 0]] == oracle.continue_([1, 2, 3, 4], 17)[1:]


def test_the_loop_ends_with_the_last_row():
    engine, _ = started(16, [5, 4])
    tokens, output = call(engine, 8)
    assert (tokens[:, :2] >= 0).sum(axis=0).tolist() == [4, 3]
    assert (np.asarray(output.slot_mapping)[4:] == 0).all()  # as before the loop


def test_the_loop_ends_when_the_pages_do(oracle):
    """Each row holds one page; one of two has a page for its next token, for four steps."""
    engine, _ = started(3, [8, 8])
    tokens, output = call(engine, 8)
    served = tokens[0] >= 0
    assert served.sum() == 1 and (tokens[1:] == NOT_SAMPLED).all()
    assert bool(output.valid) and int(output.num_free) == 0
    row = int(np.argmax(served))
    prompt = [[1, 2, 3, 4], [5, 6, 7, 8]][row]
    assert tokens[0, row] == oracle.continue_(prompt, 2)[1]
    engine.check()


def test_any_number_of_steps_runs_in_one_compiled_call(compilations):
    engine, _ = started(16, [20, 20])
    call(engine, 2)
    del compilations[:]
    for num_steps in (3, 0, 1, 8):
        call(engine, num_steps)
    assert not compilations


def test_outputs_outlive_the_donated_state():
    engine, _ = started(16, [20, 20])
    state = engine.replicas[0].runner.executor.state
    _, output = call(engine, 1)
    call(engine, 1)
    assert state.table.num_free.is_deleted() and not output.num_free.is_deleted()
    assert bool(output.valid)


@pytest.mark.parametrize("shape", [(4, 0), (4, 16)], ids=["decode", "mixed"])
def test_a_compiled_step_copies_no_pool(shape):
    runner = make_engine(num_pages=MANY_PAGES).replicas[0].runner
    batch = runner.empty_batch(shape, SamplingMode())
    compiled = runner.executor.lower(batch).compile()
    assert_copies_no_pool(compiled, runner.executor.pool_shape)
    assert shape[1] or re.search(r"\bwhile\(", compiled.as_text())


@pytest.mark.parametrize("mode", [MODES[0], MODES[-1], *slow(MODES[1:-1])], ids=str)
def test_a_compiled_loop_holds_no_sort_no_branch_and_no_other_loop(mode):
    """A CUDA graph can't hold a sort, and a loop or branch in its loop would give wrong tokens."""
    model = replace(MODEL, vocab_size=640)
    runner = make_engine(model, max_num_seqs=16, max_num_batched_tokens=32).replicas[0].runner
    batch = runner.empty_batch((16, 0), mode)
    lines = runner.executor.lower(batch).compile().as_text().lower().splitlines()
    breaks_graphs = re.compile(r"sort\(|topk|top_k\(|callback|conditional\(")
    assert not [line for line in lines if breaks_graphs.search(line)]
    loops = [line for line in lines if re.search(r"\bwhile\(", line)]
    if jax.default_backend() == "cpu":  # where, before JAX 0.11, scatters are loops
        loops = [line for line in loops if "scatter" not in line]
    assert len(loops) == 1


def test_the_condition_of_a_compiled_loop_computes_something():
    """In a CUDA graph a loop waits for what its condition waits for, and for nothing without it."""
    runner = make_engine(max_num_seqs=16, max_num_batched_tokens=32).replicas[0].runner
    batch = runner.empty_batch((16, 0), SamplingMode())
    text = runner.executor.lower(batch).compile().as_text()
    loops = re.findall(r"\bwhile\(.*condition=%?([\w.\-]+).*step", text)
    assert loops
    for name in loops:
        (condition,) = re.findall(rf"\n%?{re.escape(name)} \(.*?\n}}", text, re.DOTALL)
        (root,) = re.findall(r"ROOT .*", condition)
        assert "get-tuple-element(" not in root
