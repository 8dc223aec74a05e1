"""Sampling where devices share a vocabulary: the same tokens, and few bytes sent."""

import math
import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_paged.decoder.peers import create_peers
from pallas_paged.engine.sampling.logprobs import gather_logprobs
from pallas_paged.engine.sampling.sampler import TokenCounts, process_logits, sample
from pallas_paged.engine.sampling_params import MAX_LOGPROBS, SamplingMode
from tests.support.devices import mesh
from tests.support.marks import slow
from tests.support.sampling_rows import metadata

ROWS, VOCAB = 12, 6144
MODES = {
    "greedy": SamplingMode(),
    "draws": SamplingMode(draws=True),
    "filters": SamplingMode(draws=True, filters=2),
    "logprobs": SamplingMode(logprobs=MAX_LOGPROBS),
    "processors": SamplingMode(draws=True, penalties=True, processors=True, logprobs=0),
}
MODES["all"] = replace(MODES["processors"], filters=2, logprobs=MAX_LOGPROBS)


def inputs():
    rng = np.random.default_rng(0)
    logits = np.round(16 * rng.normal(size=(ROWS, VOCAB))).astype(np.float32) / 8  # with ties
    prompt = rng.random((ROWS, VOCAB)) < 0.1
    counts = TokenCounts(prompt=prompt, output=rng.poisson(0.1, (ROWS, VOCAB)).astype(np.int32))
    rows = metadata(
        ROWS,
        temperature=np.resize([0, 0.5, 1, 1], ROWS),
        top_k=rng.choice([0, 5, 100], ROWS),
        top_p=rng.choice([0.5, 0.9, 1], ROWS),
        frequency_penalty=rng.uniform(-1, 1, ROWS),
        min_lens=rng.integers(0, 9, ROWS),
        stop_token_ids=rng.integers(0, VOCAB, (ROWS, 3)),
        bias_token_ids=np.stack([rng.permutation(VOCAB)[:4] for _ in range(ROWS)]),
        bias=rng.normal(size=(ROWS, 4)),
    )
    return logits, counts, rows, np.full(ROWS, 5, np.int32)


def step_of(mode, num_devices):
    peers = create_peers(mesh(num_devices)) if num_devices > 1 else None

    def step(logits, counts, rows, lens):
        logits = process_logits(logits, rows, counts, lens, mode)
        tokens = sample(logits, rows, lens, mode, implementation="xla", peers=peers)
        if mode.logprobs < 0:
            return tokens, None
        return tokens, gather_logprobs(logits, tokens, mode.logprobs, peers)

    return jax.jit(step)


@pytest.mark.parametrize("num_devices", [2, *slow([4, 8])])
@pytest.mark.parametrize("name", ["all", *slow(list(MODES)[:-1])])
@pytest.mark.cpu_budget(6)  # all samplers in one program
def test_devices_that_share_a_vocabulary_draw_the_same_and_send_few_bytes(name, num_devices):
    devices, arrays = mesh(num_devices), inputs()
    of_logits, of_rows = (NamedSharding(devices, P(*spec)) for spec in ((None, "tensor"), ()))
    sharded = jax.device_put(arrays, (of_logits, of_logits, of_rows, of_rows))
    step = step_of(MODES[name], num_devices)
    compiled = step.lower(*sharded).compile()
    found, wanted = compiled(*sharded), step_of(MODES[name], 1)(*arrays)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, wanted)
    sends = r"= (\S+|\(.*?\)) (?:all-\w+|collective-\w+|reduce-scatter)(?:-start)?\("
    sent = re.findall(sends, compiled.as_text())
    sizes = [
        math.prod(map(int, filter(None, shape.split(","))))
        for shapes in sent
        for shape in re.findall(r"\w+\[([\d,]*)\]", shapes)
    ]
    most = ROWS * num_devices * (3 + 2 * MAX_LOGPROBS)  # the best tokens of each device
    assert sizes and max(sizes) <= most < ROWS * VOCAB / 8
