"""Requests that are served with drafts and without, and what both must give."""

import numpy as np

from pallas_paged.engine import Engine, Request, SamplingParams
from pallas_paged.engine.sampling_params import SamplingMode
from tests.support.engine_calls import (
    NumberTokenizer,
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

# Each mode has programs of its own, which take some seconds to compile: most tests have the first.
MODES = [SamplingMode(processors=True, draws=True, logprobs=0)]
ALL = [SamplingMode(filters=2, processors=True, draws=True, logprobs=20)]
GREEDY = [SamplingMode()]
SIZES = dict(num_pages=24)
DRAFTS = dict(num_speculative_tokens=3, adaptive=False)
NGRAM = dict(DRAFTS, method="ngram", prompt_lookup_max=3, prompt_lookup_min=1)


def plain(**options) -> Engine:
    """An engine without drafts, whose programs other tests have."""
    engine = make_engine(num_steps=4, **options)
    return engine


def mixed(logprobs: int = 0, **filters) -> list[SamplingParams]:
    """Parameters of requests that share batches; some of their tokens are drafts that are right."""
    return [
        greedy(max_tokens=30, logprobs=logprobs),
        sampling(n=2, temperature=0.7, min_p=0.05, max_tokens=25, **filters),
        greedy(max_tokens=None),
        sampling(temperature=0.3, logit_bias={3: 2.0, 5: -100.0}, min_tokens=9, stop_token_ids=[3]),
        greedy(max_tokens=20, min_tokens=4, stop_token_ids=[*range(0, 40, 5)], logprobs=0),
    ]


def _results_of(requests: list[Request]) -> tuple[list, list, list]:
    each = [output for request in requests for output in request.outputs]
    tokens = [(x.token_ids, x.text, x.finish_reason, x.stop_reason) for x in each]
    entries = [entry for x in each for entry in x.logprobs or ()]
    tops = [sorted((token, one.rank) for token, one in entry.items()) for entry in entries]
    return tokens, tops, [one.logprob for entry in entries for one in entry.values()]


def assert_equal_results(requests: list[Request], wanted: list[Request]) -> None:
    """The same tokens, texts, reasons and ranks, and the log-probabilities within rounding."""
    tokens, tops, logprobs = _results_of(requests)
    wanted_tokens, wanted_tops, wanted_logprobs = _results_of(wanted)
    assert tokens == wanted_tokens and tops == wanted_tops
    np.testing.assert_allclose(logprobs, wanted_logprobs, atol=1e-4)


def assert_ends_at_stop_texts(prompts: list[list[int]], make, first: int) -> None:
    """Requests with a stop text at this token end there, also within accepted drafts."""
    wanted = serve(plain(), prompts, greedy(max_tokens=24))
    stops = [" {} {}".format(*x[first : first + 2]) for x in tokens_of(wanted)]
    params = [greedy(max_tokens=24, stop=stop) for stop in stops]
    tokenizer = NumberTokenizer()
    wanted, engine = serve(plain(tokenizer=tokenizer), prompts, params), make(tokenizer=tokenizer)
    assert_equal_results(serve(engine, prompts, params), wanted)
    assert reasons_of(wanted) == ["stop"] * 3 and engine.stats().spec_decode_num_drafts > 0


def accepted_and_drafted(engine: Engine) -> tuple[int, int]:
    stats = engine.stats()
    return stats.spec_decode_num_accepted_tokens, stats.spec_decode_num_draft_tokens


def interrupted(engine: Engine, prompts: list[list[int]], **drafts) -> tuple[list, list[int]]:
    """The tokens of requests through an abort of another, new weights, and a pool that was away.

    And what `accepted_and_drafted` counts from the new weights on.
    """
    first, *others = submit(engine, prompts, greedy(max_tokens=24))
    step(engine, 4)
    engine.abort(first)
    step(engine)
    engine.update_params(weights(seed=2), restart_running=True, **drafts)
    before = accepted_and_drafted(engine)
    step(engine, 4)
    engine.sleep()
    engine.wake_up()
    run(engine)
    return tokens_of(others), np.subtract(accepted_and_drafted(engine), before).tolist()
