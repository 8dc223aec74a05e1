"""Rows for tests of the sampler: their parameters, and how long their tokens take to arrive."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32

from pallas_paged.engine.sampler import SamplingMetadata
from tests.support.devices import implementations_here

VOCAB = 12


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
        leaves[name] = jnp.asarray(
            np.broadcast_to(array, (num_rows,)) if array.ndim == 0 else array
        )
    return SamplingMetadata(**leaves)


def take_rows(rows, tree):
    """Rows of a metadata or of counts."""
    taken = jax.tree.map(lambda x: x[rows], tree)
    if isinstance(tree, SamplingMetadata):
        taken = replace(taken, seeds=tree.seeds[rows])
    return taken


def sampling_implementations():
    """The implementations of sampling that tests run on this machine."""
    return [name for name in implementations_here() if not name.startswith("mosaic")]


def compiled_implementations():
    """Those of them that are fast enough for many rows of many tokens."""
    return [name for name in sampling_implementations() if not name.endswith("_interpret")]


def race(seeds, length, weights):
    """The token that the key of a row draws of tokens with these weights, in f64."""
    seed, prompt, index = seeds

    def words(key, first, second):
        """The two words of each count."""
        count = np.concatenate([first, np.full(len(first), second)])
        found = threefry_2x32(jnp.asarray(key), jnp.asarray(count, jnp.uint32))
        return np.asarray(found).reshape(2, -1)

    def waits(words):
        return -np.log1p(-(words.astype(np.float64) + 0.5) / 2**32)

    key = words(np.array([seed, prompt], np.uint32), [index], length).ravel()
    blocks = np.zeros((-(-len(weights) // 2048), 2048))
    blocks.ravel()[: len(weights)] = weights
    with np.errstate(divide="ignore"):
        # Of a block's two words the first counts. Those of a pair are for tokens 1024 apart.
        block = np.argmin(waits(words(key, np.arange(len(blocks)), 1)[0]) / blocks.sum(axis=1))
        pairs = words(key, block * 2048 + np.arange(1024), 0)
        return block * 2048 + np.argmin(waits(pairs).ravel() / blocks[block])
