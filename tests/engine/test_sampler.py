"""The sampler against NumPy: draws, processors, penalties, log-probabilities."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_paged.engine.sampling.logprobs import gather_logprobs, top_tokens
from pallas_paged.engine.sampling.passes import find_limits, num_blocks
from pallas_paged.engine.sampling.sampler import (
    TokenCounts,
    add_output_tokens,
    create_token_counts,
    hash_prompt,
    process_logits,
    sample,
    set_token_counts,
)
from pallas_paged.engine.sampling_params import MAX_LOGPROBS, SamplingMode
from tests.support import raw
from tests.support.marks import by_implementation, slow, slow_if_interpreted
from tests.support.oracle import log_softmax
from tests.support.promotion import strict_promotion
from tests.support.sampling_rows import (
    VOCAB,
    deepest_kept,
    filtered_weights,
    metadata,
    race,
    sampling_implementations,
    take_rows,
)

WIDE = 4120  # three blocks of 2048 tokens, the last one short
GREEDY = SamplingMode()
PLAIN = SamplingMode(draws=True)
FILTERS = SamplingMode(draws=True, filters=2)
jit_sample = jax.jit(sample, static_argnames=("mode", "implementation", "interpret"))


@pytest.fixture(autouse=True)
def _strict():
    with strict_promotion():
        yield


# Draws


def random_logits(rng):
    """Rows of several kinds, and one whose filters leave each block a token."""
    x = rng.normal(size=(24, WIDE)) * np.repeat([1e-6, 0.1, 2, 8], 6)[:, None]
    x[::4] = np.round(x[::4])  # ties
    x[1::4] = x[1::4].astype(ml_dtypes.bfloat16)
    x[2::4] *= 10 ** rng.uniform(-9, 9, (6, WIDE))
    few = np.full((12, WIDE), -np.inf)
    few[:, rng.choice(WIDE, VOCAB, replace=False)] = rng.normal(0, 2, (12, VOCAB))
    even = np.full((4, WIDE), -3.0)
    even[:, [700, 3000, 4100]] = rng.uniform(-1, 0, (4, 3))
    return np.concatenate([x, few, even]).astype(np.float32)


def random_rows(rng, num_rows):
    """Every filter alone and together with the others, among greedy rows."""
    choices = dict(
        temperature=[0, 0.3, 1, 1, 2.5, 2e-38, 1e38],
        top_k=[0, 0, 1, 2, 5, 900, WIDE, 2**31 - 1],
        top_p=[1, 1, 0.05, 0.6, 0.95, 1 - 2**-24],
        min_p=[0, 0, 0.02, 0.3, 0.99],
    )
    drawn = {name: rng.choice(some, num_rows) for name, some in choices.items()}
    drawn["min_p"][-4:], drawn["temperature"][-4:] = 0.2, 1  # rows of even blocks
    seeds = rng.choice([0, 1, 5, 2**31 + 5], (num_rows, 3))
    return metadata(num_rows, **drawn, seeds=seeds)


def wanted_tokens(logits, rows, lens, mode):
    """What each row draws, and whether rounding may change that."""
    found = []
    for row, x in enumerate(logits):
        temperature, margin = rows.temperature[row], 1.0
        if not np.isfinite(x.max()):
            token = -1
        elif temperature == 0 or not mode.draws:
            token = int(np.argmax(x))
        else:
            filters = {"top_k": rows.top_k[row], "top_p": rows.top_p[row]} if mode.filters else {}
            weights, by_top_p = filtered_weights(x, temperature, min_p=rows.min_p[row], **filters)
            token, lead = race(rows.seeds[row], lens[row], weights)
            margin = min(10 * by_top_p, lead)
        found.append((token, margin < 1e-5))
    return found


MODES = dict(greedy=GREEDY, plain=PLAIN, one_filter=replace(PLAIN, filters=1), filters=FILTERS)
WAYS = [("greedy", "xla"), ("one_filter", "xla")]  # kernels have two modes
WAYS += by_implementation([("plain",), ("filters",)], sampling_implementations())


@pytest.mark.parametrize(("mode", "implementation"), WAYS)
@pytest.mark.parametrize("seed", [0, *slow(range(1, 8))])
def test_every_row_draws_the_token_that_arrives_first(mode, implementation, seed):
    """Exactly, of those that its own filters keep and by its own key, wherever it stands."""
    rng, mode = np.random.default_rng(seed), MODES[mode]
    logits = random_logits(rng)
    rows = random_rows(rng, len(logits))
    if mode.filters == 1:
        rows = replace(rows, top_p=np.where(rows.top_k > 0, 1, rows.top_p))
    lens = rng.integers(0, 3, len(logits)).astype(np.int32)
    logits[2:9, 4] = [np.nan, np.nan, np.inf, np.inf, -np.inf, -np.inf, np.nan]
    logits[6:8] = -np.inf
    wanted = wanted_tokens(logits, rows, lens, mode)
    assert len(set(wanted)) > 20 and sum(token == -1 for token, _ in wanted) == 7
    tokens = np.asarray(jit_sample(logits, rows, lens, mode, **raw.by(implementation)))
    assert tokens.dtype == np.int32
    assert sum(is_close for _, is_close in wanted) <= len(wanted) // 6  # of a top_p near 1
    for row, (token, (one, is_close)) in enumerate(zip(tokens, wanted, strict=True)):
        assert is_close or token == one, f"row {row}: {take_rows([row], rows)}"
    back = np.arange(len(logits))[::-1]
    turned = logits[back], take_rows(back, rows), lens[back]
    turned = jit_sample(*turned, mode, **raw.by(implementation))
    np.testing.assert_array_equal(turned[::-1], tokens)


@pytest.mark.parametrize(("mode", "implementation"), [WAYS[0], *WAYS[-2:]])
def test_tokens_without_their_bit_are_as_those_of_minus_infinity(mode, implementation):
    rng, mode = np.random.default_rng(0), MODES[mode]
    logits = random_logits(rng)
    rows, lens = random_rows(rng, len(logits)), np.arange(len(logits), dtype=np.int32)
    masks = rng.integers(0, 2**32, (len(logits), WIDE // 32 + 2), np.uint32).view(np.int32)
    masks[:8], masks[8] = -1, 0  # some allow all, one nothing
    masks[9:14] &= np.int32(1 << 5)  # few, also NaN where it is not allowed
    logits[9, 4] = np.nan
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :WIDE]
    how = raw.by(implementation)
    tokens = np.asarray(jit_sample(logits, rows, lens, mode, **how, masks=masks))
    allowed = np.where(bits == 1, logits, np.float32(-np.inf))
    np.testing.assert_array_equal(tokens, jit_sample(allowed, rows, lens, mode, **how))
    assert tokens[8] == -1 and (tokens[9:14] % 32 == 5).all()


@partial(jax.jit, static_argnames="implementation")
def limits(logits, rows, implementation):
    """The gap to the best token from which on tokens are dropped."""
    best = jnp.max(logits, axis=1, keepdims=True)
    if implementation == "xla":
        return find_limits(best - logits, rows.top_k, rows.top_p, rows.temperature, 2)
    from pallas_paged.engine.sampling.search_kernel import search

    interpret = implementation == "triton_interpret"
    sizes = dict(num_warps=2, num_loads=2) if interpret else {}
    filters = rows.temperature, rows.top_k, rows.top_p
    return search(logits, None, best, *filters, interpret=interpret, **sizes)


@pytest.mark.parametrize("implementation", sampling_implementations())
@pytest.mark.parametrize("seed", [0, *slow(range(1, 5))])
def test_exactly_the_tokens_that_sorting_keeps_are_kept(implementation, seed):
    """But for rows where rounding decides whether a token's predecessors sum to top_p."""
    rng = np.random.default_rng(seed)
    logits = np.concatenate([random_logits(rng) for _ in range(3)])[:, -1536:]
    rows = random_rows(rng, len(logits))
    rows = replace(rows, temperature=np.clip(rows.temperature, 0.5, 3))
    found = np.asarray(limits(logits, rows, implementation))
    num_close = 0
    for row, gap in enumerate(logits.max(axis=1, keepdims=True) - logits):
        options = rows.temperature[row], rows.top_k[row], rows.top_p[row]
        deepest, margin = deepest_kept(gap, *options)
        num_close += margin < 1e-5
        if margin >= 1e-5:
            gap = gap[np.isfinite(gap)]  # others are never drawn
            message = f"row {row}, {options}"
            np.testing.assert_array_equal(gap < found[row], gap <= deepest, message)
    assert num_close <= len(logits) // 6


@pytest.mark.parametrize("implementation", sampling_implementations())
def test_a_limit_is_the_next_float_above_the_last_kept_gap(implementation):
    last = np.float32(10 ** np.random.default_rng(3).uniform(-30, 30, 120))
    above = np.nextafter(last, np.float32(np.inf))
    logits = np.repeat(-above[:, None], 1536, axis=1)
    logits[:, 700], logits[:, 1400] = 0, -last
    found = limits(logits, metadata(120, top_k=2), implementation)
    np.testing.assert_array_equal(found, above)


LAST = np.float32(np.log(2))  # has half of the best probability
TIED = [1, 2047, 2048, 4119]
FEW = {
    "ties": (dict.fromkeys(TIED, 5), -1),
    "below": ({5: 0, 2100: -LAST, 4000: -np.nextafter(LAST, np.float32(1))}, -np.inf),
}


@pytest.mark.parametrize("implementation", slow_if_interpreted(sampling_implementations()))
@pytest.mark.parametrize(
    ("name", "values", "kept"),
    [
        ("ties", {"top_k": 1}, TIED),
        ("ties", {"top_p": 0.1}, TIED),
        ("ties", {"min_p": 0.99}, TIED),
        ("ties", {"temperature": 0.0}, [1]),  # of equal logits the lowest token is greedy
        ("below", {"top_k": 2}, [5, 2100]),
        ("below", {"top_p": 0.7}, [5, 2100]),
        ("below", {"min_p": 0.5}, [5, 2100]),
    ],
    ids=str,
)
def test_filters_keep_ties_with_the_last_kept_and_drop_the_next_float(
    implementation, name, values, kept
):
    few, others = FEW[name]
    logits = np.full((40, WIDE), others, np.float32)
    logits[:, [*few]] = [*few.values()]
    rows, lens = metadata(40, **values), np.zeros(40, np.int32)
    tokens = jit_sample(logits, rows, lens, FILTERS, **raw.by(implementation))
    np.testing.assert_array_equal(np.unique(tokens), kept)


def test_tokens_are_drawn_by_their_probabilities():
    weights = np.zeros(2100, np.float32)
    weights[[0, 3, 1023, 1024, 2047, 2048, 2099]] = probs = np.array([1, 2, 4, 3, 1, 3, 6]) / 20
    rows = metadata(1500, seeds=np.random.default_rng(0).integers(0, 2**32, (1500, 3)))
    with np.errstate(divide="ignore"):
        logits = np.tile(np.log(weights), (1500, 1))
    tokens = jit_sample(logits, rows, np.zeros(1500, np.int32), PLAIN, implementation="xla")
    wanted = 1500 * probs
    found = np.bincount(tokens, minlength=2100)[weights > 0]
    assert sum(found) == 1500 and np.sum((found - wanted) ** 2 / wanted) < 6 + 5 * np.sqrt(12)


def test_the_hash_of_a_prompt_depends_on_its_tokens_and_their_order():
    prompts = [[1, 2], [2, 1], [1, 2, 0], [258]]
    assert len(set(map(hash_prompt, prompts))) == 4
    assert hash_prompt((1, 2)) == hash_prompt(np.int64([1, 2])) == hash_prompt([1, 2])
    assert all(0 <= hash_prompt(prompt) < 2**32 for prompt in prompts)


# Processors and penalties


PENALTIES = dict(presence_penalty=1, frequency_penalty=1, repetition_penalty=2)
PADDING = dict(min_lens=9, bias=np.ones((6, 2)), bias_token_ids=np.tile([-1, VOCAB], (6, 1)))
PROCESSORS = PADDING | dict(bias_token_ids=np.tile([1, 2], (6, 1)), stop_token_ids=np.zeros((6, 1)))


@pytest.mark.parametrize(
    ("parts", "values"),
    [
        (dict(processors=True, penalties=True), PADDING),
        (dict(processors=True), PENALTIES),
        (dict(penalties=True), PROCESSORS),
        (dict(), PROCESSORS | PENALTIES),
    ],
    ids=["padding", "no penalties", "no processors", "neither"],
)
def test_padding_and_parts_that_a_mode_leaves_out_change_no_logits(parts, values):
    """The formulas of the parts are tested in the engine, against a loop (test_sampling.py)."""
    logits = np.random.default_rng(4).normal(0, 2, (6, VOCAB)).astype(np.float32)
    logits[:3, 3], logits[3] = [np.nan, -np.inf, np.inf], np.nan
    counts = TokenCounts(prompt=np.ones((6, VOCAB), bool), output=np.ones((6, VOCAB), np.int32))
    rows, lens = metadata(6, **values), np.zeros(6, np.int32)
    process = jax.jit(process_logits, static_argnames="mode")
    got = process(logits, rows, counts, lens, mode=SamplingMode(**parts))
    np.testing.assert_array_equal(got, logits)
    assert got.dtype == np.float32


def test_rows_that_are_shorter_than_their_least_length_cannot_draw_a_stop_token():
    logits = np.random.default_rng(9).normal(size=(3, VOCAB)).astype(np.float32)
    rows = metadata(3, min_lens=9, stop_token_ids=np.tile([2, 5, -1], (3, 1)))
    process = jax.jit(process_logits, static_argnames="mode")
    lens, mode = np.int32([8, 9, 10]), SamplingMode(processors=True)
    got = process(logits, rows, None, lens, mode=mode)
    wanted = logits.copy()
    wanted[0, [2, 5]] = -np.inf
    np.testing.assert_array_equal(got, wanted)


def test_added_output_tokens_are_counted_and_bad_ones_dropped():
    counts = jax.jit(create_token_counts, static_argnums=(0, 1))(3, VOCAB)
    rows, tokens = np.int32([0, 2, 2, 3, -1, 1, 1, 0]), np.int32([5, 1, 1, 1, 1, -1, VOCAB, 0])
    for _ in range(2):
        counts = jax.jit(add_output_tokens)(counts, rows, tokens)
    wanted = np.zeros((3, VOCAB), np.int32)
    wanted[0, [0, 5]], wanted[2, 1] = 2, 4
    np.testing.assert_array_equal(counts.output, wanted)
    np.testing.assert_array_equal(counts.prompt, np.zeros((3, VOCAB), bool))


@pytest.mark.parametrize("row", [1, 3, -1])
@pytest.mark.parametrize("sizes", [(1, 0), (11, 6), (3, 9)], ids=str)
def test_token_counts_of_a_row_are_set_piece_by_piece(row, sizes):
    """Rows out of range change nothing."""
    rng = np.random.default_rng(5)
    prompt, output = (rng.integers(0, VOCAB, size) for size in sizes)
    pieces = np.full((2, 12), -1, np.int32)
    pieces[0, : len(prompt)], pieces[1, : len(output)] = prompt, output
    dirty = TokenCounts(prompt=np.ones((3, VOCAB), bool), output=np.full((3, VOCAB), 7, np.int32))
    counts = dirty
    for start in (0, 4, 8):
        piece = pieces[:, start : start + 4]
        counts = jax.jit(set_token_counts)(counts, np.int32(row), *piece, np.bool_(start == 0))
    wanted = jax.tree.map(np.array, dirty)
    if row == 1:
        wanted.prompt[1] = np.isin(np.arange(VOCAB), prompt)
        wanted.output[1] = np.bincount(output, minlength=VOCAB)
    jax.tree.map(np.testing.assert_array_equal, counts, wanted)


def test_blocks_of_a_vocabulary_are_equal_and_can_be_shared_by_devices():
    wanted = {128256: 256, 151936: 128, 50257: 29, 37: 37, 8: 8, 100003: 1, 50264: 8}
    assert {size: num_blocks(size) for size in wanted} == wanted
    for size, blocks in wanted.items():
        assert size % blocks == 0
        assert all(size % n or blocks % n == 0 for n in (2, 4, 8, 16))


def test_logprobs_and_ranks_equal_those_of_numpy():
    """Beside a row of NaN too; a small vocabulary has fewer than are asked for."""
    rng = np.random.default_rng(6)
    logits = rng.integers(-4, 5, (31, VOCAB)).astype(np.float32)  # with ties
    tokens = rng.integers(0, VOCAB, 31).astype(np.int32)
    logits[0, 3], tokens[0], logits[30], tokens[30] = -np.inf, 3, np.nan, -1
    each = (0, 5, MAX_LOGPROBS)
    found = jax.jit(lambda *x: [gather_logprobs(*x, num_logprobs) for num_logprobs in each])
    found = jax.tree.map(lambda x: np.asarray(x)[:30], found(logits, tokens))
    logits, tokens = logits[:30], tokens[:30]
    exact = log_softmax(logits)
    chosen = np.take_along_axis(exact, tokens[:, None], axis=1)
    rank = 1 + np.sum(logits > logits[np.arange(30), tokens][:, None], axis=1)
    for num_logprobs, got in zip(each, found, strict=True):
        best = np.argsort(-exact, axis=1, kind="stable")[:, :num_logprobs]
        np.testing.assert_allclose(got.logprob, chosen[:, 0], atol=1e-5)
        np.testing.assert_array_equal(got.rank, rank)
        np.testing.assert_array_equal(got.top_token_ids, best)
        np.testing.assert_allclose(got.top_logprobs, np.take_along_axis(exact, best, 1), atol=1e-5)
        assert got.rank[0] == VOCAB and got.rank.dtype == got.top_token_ids.dtype == np.int32


@pytest.mark.parametrize(
    ("num_rows", "size", "k"),  # many rows are divided into blocks, and these again
    [(6, 40, 20), (2700, 400, 20), *slow([(6, 1, 1), (6, 4096, 20), (2700, 1000, 5)])],
)
def test_the_best_tokens_are_those_of_a_stable_sort(num_rows, size, k):
    rng = np.random.default_rng(size)
    values = rng.normal(size=(num_rows, size)).astype(np.float32)
    values[1:3] = np.round(3 * values[1:3])
    values[3, rng.random(size) < 0.9] = -np.inf
    values[4] = 7.0
    values[5] = np.sort(values[5])
    wanted = np.argsort(-values, axis=1, kind="stable")[:, :k]
    best, tokens = jax.jit(top_tokens, static_argnums=1)(values, k)
    np.testing.assert_array_equal(tokens, wanted)
    np.testing.assert_array_equal(best, np.take_along_axis(values, wanted, 1))


# Modes


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        (GREEDY, set()),
        (SamplingMode(processors=True), {"processors"}),
        (SamplingMode(penalties=True), {"penalties"}),
        (PLAIN, {"draws", "penalties"}),  # draws divide too
        (FILTERS, {"draws", "filters", "penalties"}),
    ],
    ids=["greedy", "processors", "penalties", "plain", "filters"],
)
def test_a_mode_compiles_only_what_it_names(mode, wanted):
    words = dict(draws=" log1p ", filters=" exp ", processors=" scatter", penalties=" div ")
    logits, lens = np.zeros((2, VOCAB), np.float32), np.zeros(2, np.int32)
    counts = TokenCounts(prompt=np.zeros((2, VOCAB), bool), output=np.zeros((2, VOCAB), np.int32))

    def step(logits, rows, counts):
        logits = process_logits(logits, rows, counts, lens, mode)
        return sample(logits, rows, lens, mode, implementation="xla")

    program = str(jax.make_jaxpr(step)(logits, metadata(2), counts))
    assert {name for name, word in words.items() if word in program} == wanted


def test_bad_logits_and_penalties_without_counts_are_refused():
    rows, lens = metadata(2), np.zeros(2, np.int32)
    for call in (
        lambda logits: sample(logits, rows, lens, GREEDY),
        lambda logits: process_logits(logits, rows, None, lens, GREEDY),
        lambda logits: gather_logprobs(logits, lens, 0),
    ):
        for logits in (np.zeros(VOCAB, np.float32), np.zeros((2, VOCAB), np.float16)):
            with pytest.raises(ValueError, match=r"must be f32\[S, V\]"):
                call(logits)
    with pytest.raises(ValueError, match="counts=None"):
        process_logits(np.float32([[0], [0]]), rows, None, lens, SamplingMode(penalties=True))
