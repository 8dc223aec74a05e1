"""Rows for tests of the sampler: their parameters, and what they draw, in NumPy."""

from dataclasses import fields

import numpy as np
from jax.extend.random import threefry_2x32

from pallas_paged.engine.sampling.sampler import SamplingMetadata
from tests.support.devices import implementations_here

VOCAB = 12
_BLOCK = 2048


def metadata(num_rows, **values):
    """Rows with temperature 1 and these values, the samples 0, 1, ... of one prompt."""
    defaults = dict(
        seeds=np.stack([np.full(num_rows, 7), np.full(num_rows, 99), np.arange(num_rows)], axis=1),
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        min_lens=0,
        stop_token_ids=np.full((num_rows, 3), -1),
        bias_token_ids=np.full((num_rows, 4), VOCAB),
        bias=np.zeros((num_rows, 4)),
    )
    dtypes = dict(seeds=np.uint32, top_k=np.int32, min_lens=np.int32)
    dtypes |= dict(stop_token_ids=np.int32, bias_token_ids=np.int32)
    leaves = {}
    for name, value in (defaults | values).items():
        array = np.asarray(value, dtypes.get(name, np.float32))
        leaves[name] = np.full(num_rows, array) if array.ndim == 0 else array
    return SamplingMetadata(**leaves)


def take_rows(rows, tree):
    """Rows of a metadata or of counts."""
    return type(tree)(**{one.name: getattr(tree, one.name)[rows] for one in fields(tree)})


def sampling_implementations():
    """The implementations of sampling that tests run on this machine."""
    return [name for name in implementations_here() if not name.startswith("mosaic")]


def deepest_kept(gap, temperature, top_k, top_p):
    """The largest finite gap that top_k and then top_p keep, by sorting.

    A gap is how far a logit lies below the best one. The second result is by how little top_p made
    its decision: rounding may make another.
    """
    ordered = np.sort(gap[np.isfinite(gap)])
    if 0 < top_k < len(ordered):
        ordered = ordered[ordered <= ordered[top_k - 1]]
    if top_p == 1:
        return ordered[-1], 1.0
    sums = np.cumsum(np.exp(-ordered.astype(np.float64) / temperature))
    before = np.append(0, sums)[np.searchsorted(ordered, ordered)] / sums[-1]
    return ordered[before < np.float32(top_p)][-1], np.min(abs(before - np.float32(top_p)))


def filtered_weights(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The probability of each token over that of the best one, in f64; 0 where it is filtered out.

    The filters apply in this order. The second result is that of `deepest_kept`.
    """
    gap = logits.max() - logits
    deepest, margin = deepest_kept(gap, temperature, top_k, top_p)
    weights = np.exp(-gap.astype(np.float64) / temperature)
    return np.where((gap <= deepest) & (weights >= np.float32(min_p)), weights, 0), margin


def race(seeds, length, weights):
    """The token of these weights that arrives first, and by how much it leads, relatively.

    Blocks of 2048 tokens race, then the tokens of the first one. The key of the times is made of
    a row's seed, the hash of its prompt, the index of the sample, and the length.
    """
    seed, prompt, index = np.asarray(seeds, np.uint32)
    key = _threefry((seed, prompt), index, length)[:, 0]
    blocks = np.zeros((-(-len(weights) // _BLOCK), _BLOCK))
    blocks.ravel()[: len(weights)] = weights
    # Of a block's two words the first counts. Those of a pair are for tokens 1024 apart.
    words = _threefry(key, np.arange(len(blocks)), 1)[0]
    block, lead = _first(words, blocks.sum(axis=1))
    words = _threefry(key, np.arange(_BLOCK // 2) + block * _BLOCK, 0)
    token, lead_in_block = _first(words.ravel(), blocks[block])
    return block * _BLOCK + token, min(lead, lead_in_block)


def _first(words, weights):
    """The first place, and by what share of its time the second one is later."""
    with np.errstate(divide="ignore"):
        times = -np.log1p(-(words.astype(np.float64) + 0.5) / 2**32) / weights
    first, second = np.partition(np.append(times, np.inf), 1)[:2]
    return int(np.argmin(times)), second / first - 1


def _threefry(key, *counts):
    """JAX's random bits: two words u32[2, N] of a key for these counts."""
    counts = np.broadcast_arrays(*map(np.atleast_1d, counts))
    words = threefry_2x32(tuple(key), np.concatenate(counts).astype(np.uint32))
    return np.asarray(words).reshape(2, -1)
