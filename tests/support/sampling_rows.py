"""Sampling parameters of rows, for tests of the sampler."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from pallas_paged.engine.sampler import SamplingMetadata

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
