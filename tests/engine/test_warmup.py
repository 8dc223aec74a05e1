"""Warm-up that ends before all steps are compiled: the rest compiles beside the requests."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pallas_paged.engine import AsyncEngine, EngineConfig
from pallas_paged.engine.device import compilation
from pallas_paged.engine.device.batch import BatchBuckets
from pallas_paged.engine.device.compilation import BackgroundCompilation, Compilation
from pallas_paged.engine.device.compiled_steps import CompiledSteps
from pallas_paged.engine.sampling_params import SamplingMode
from tests.support.engine_calls import MODEL, PROMPTS, greedy, make_engine, weights
from tests.support.event_loops import SECONDS
from tests.support.oracle import Oracle

SIZES = dict(max_num_seqs=8)  # decoding slots 1 and 8, and one shape with chunks
GREEDY, DRAWS = SamplingMode(), SamplingMode(draws=True)
PENALTIES = SamplingMode(draws=True, penalties=True)


@pytest.fixture
def gate(monkeypatch):
    """Opens for the threads that compile beside the requests; a stop opens it too."""
    gate, work = threading.Event(), BackgroundCompilation._work

    def wait(self):
        while not (gate.is_set() or self._stopping):
            time.sleep(0.001)
        work(self)

    monkeypatch.setattr(BackgroundCompilation, "_work", wait)
    return gate


def serve(engine):
    return [one.outputs[0].token_ids for one in engine.generate(PROMPTS, greedy(), progress=False)]


def test_batches_run_in_a_larger_step_until_theirs_is_compiled(gate, greedy_tokens, compilations):
    engine = make_engine(modes=None, **SIZES)
    done = engine.start_warmup([greedy()])
    assert engine.stats().compilations == 2 and not done.done()
    del compilations[:]
    assert serve(engine) == greedy_tokens
    assert engine.stats().compilations == 2 and not compilations
    gate.set()
    assert done.result(SECONDS) is None
    assert engine.stats().compilations == 3
    del compilations[:]
    assert serve(engine) == greedy_tokens
    assert engine.stats().compilations == 3 and not compilations


def test_failed_compiles_are_logged_and_larger_steps_serve(
    gate, greedy_tokens, monkeypatch, caplog
):
    engine = make_engine(modes=None, **SIZES)
    done = engine.start_warmup([greedy()])

    def fail(*_):
        raise RuntimeError("no registers are left")

    with monkeypatch.context() as patch:
        patch.setattr(Compilation, "finish", fail)
        gate.set()
        with pytest.raises(RuntimeError, match="no registers are left"):
            done.result(SECONDS)
    assert "a step can't be compiled: (1," in caplog.text
    assert serve(engine) == greedy_tokens
    assert engine.stats().compilations == 2
    engine.warmup([greedy()])
    assert engine.stats().compilations == 3


def test_the_first_token_does_not_wait_for_the_steps_after_it(gate, exact_products):
    engine = make_engine(replace(MODEL, vocab_size=42), modes=None)  # that no other test compiles
    oracle = Oracle(engine.model, weights(engine.model))
    request = engine.submit(PROMPTS[0], greedy())
    outputs = [engine.step(), engine.step()]
    assert [len(one) for one in outputs] == [0, 1] and not gate.is_set()
    gate.set()
    while not request.finished:
        engine.step()
    assert request.outputs[0].token_ids == oracle.continue_(PROMPTS[0], 14)
    assert engine.stats().compilations == 2


def test_a_following_step_that_fails_to_compile_is_compiled_again_by_its_call(monkeypatch, caplog):
    engine = make_engine(replace(MODEL, vocab_size=42), modes=None)
    finish = Compilation.finish

    def fail(self, lowered):
        if self.kind[1] is None:
            raise RuntimeError("no registers are left")
        finish(self, lowered)

    monkeypatch.setattr(Compilation, "finish", fail)
    engine.generate([PROMPTS[0]], greedy(), progress=False)  # the call compiles it again
    assert "a step can't be compiled: (4," in caplog.text


def test_close_ends_the_compilation(gate):
    engine = make_engine(modes=None, **SIZES)
    done = engine.start_warmup([greedy()])
    engine.close()
    assert isinstance(done.exception(0), CancelledError)


def test_the_thread_of_an_async_engine_starts_the_compilation(gate, greedy_tokens):
    async def run():
        async with AsyncEngine(make_engine(modes=None, **SIZES)) as engine:
            done = await engine.start_warmup([greedy()])
            streams = [engine.submit(prompt, greedy()) for prompt in PROMPTS]
            gate.set()
            tokens = [(await one.complete()).outputs[0].token_ids for one in streams]
            await asyncio.wrap_future(done)
            return tokens

    assert asyncio.run(run()) == greedy_tokens


@pytest.mark.cpu_budget(5)  # a process of its own
def test_a_program_that_ends_before_all_is_compiled_ends():
    program = """
import time
from types import SimpleNamespace
from pallas_paged.engine.device.compilation import BackgroundCompilation
one = SimpleNamespace(load=lambda: False, lower=lambda: 1, finish=lambda _: time.sleep(0.5))
done = BackgroundCompilation([(one, lambda: None)] * 10_000).done
done.add_done_callback(lambda done: print(type(done.exception()).__name__))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "CancelledError\n", "")


def test_steps_are_lowered_in_order_one_after_another(monkeypatch):
    # Else their programs would depend on the timing of threads, and miss the compilation cache.
    events: list[tuple[str, int]] = []

    def lower(number):
        events.append(("begins", number))
        time.sleep(0.01)
        events.append(("ends", number))
        return SimpleNamespace(compile=lambda: None)

    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    all_ = [Compilation(SimpleNamespace(lower=lower), (number,)) for number in range(8)]
    compilation.compile_all(all_, in_order=False, shown=lambda steps, _: steps)
    wanted = [(kind, number) for number in range(8) for kind in ("begins", "ends")]
    assert events == wanted
    del events[:]
    BackgroundCompilation([(one, lambda: None) for one in all_]).join()
    assert events == wanted


def steps(**sizes) -> CompiledSteps:
    return CompiledSteps(
        BatchBuckets(EngineConfig(max_num_seqs=32, max_num_batched_tokens=512, **sizes)),
        lambda step: pytest.fail(f"{step} is compiled"),
    )


def test_the_first_steps_are_the_largest_of_each_kind_in_the_mode_that_covers_all():
    drafts = dict(method="ngram", num_speculative_tokens=3)
    first, rest = steps(speculative_config=drafts).first([DRAWS, PENALTIES])
    assert first == [((32, 512), PENALTIES), ((32, 0, 3), DRAWS), ((32, 0), PENALTIES)]
    assert sorted([*first, *rest]) == sorted(
        steps(speculative_config=drafts).all([DRAWS, PENALTIES])
    )
    assert rest[0] == ((1, 0), PENALTIES)  # the smallest before larger ones
    assert [mode for (_, num_tokens, *_), mode in rest if num_tokens] == [PENALTIES] * 2 + [
        DRAWS
    ] * 3


def test_a_step_that_nothing_compiles_is_compiled_for_its_batch():
    all_ = steps()
    arrive = all_.expect(((8, 0), GREEDY))
    all_.compiled[32, 0] = {GREEDY}
    assert all_.choose((8, 0), GREEDY, False) == ((32, 0), GREEDY)
    assert all_.choose((16, 0), GREEDY, False) == ((16, 0), GREEDY)
    assert all_.choose((8, 0), GREEDY, False) == ((16, 0), GREEDY)
    assert all_.choose((8, 0), PENALTIES, False) == ((8, 0), PENALTIES)
    assert all_.choose((8, 0), DRAWS, False) == ((8, 0), PENALTIES)
    assert len(all_) == 3
    arrive()
    assert all_.choose((8, 0), GREEDY, False) == ((8, 0), GREEDY)
    assert len(all_) == 4
