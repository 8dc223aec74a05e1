"""A small decode state, and the host code that starts prompts on it and reads it."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np

from models.generate_state import Status, create_generate_state, decode
from models.prefill import Requests, pack, prefill, reserve
from models.sampling import RowSampling
from tests.support.dense_oracle import CONFIG

# One set of shapes for most tests: 3 full rows need 12 pages, the pool has 8.
PAGE_SIZE, PAGES_PER_SEQ, NUM_PAGES, MAX_SEQS = 4, 4, 8, 4
CAPACITY = PAGE_SIZE * PAGES_PER_SEQ
CHUNK = 8
MANY_PAGES = 2**20


def empty_state(**changes):
    sizes = dict(
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        max_seqs=MAX_SEQS,
        pages_per_seq=PAGES_PER_SEQ,
        max_new_tokens=16,
        num_stop_tokens=2,
        sampling=RowSampling.create(1),
    )
    return create_generate_state(CONFIG, **(sizes | changes))


def requests(prompts, rows, *, keys=None, limit=16, stops=(), temperature=0.0):
    rows = np.asarray(rows, np.int32).reshape(len(prompts), -1)
    stop_tokens = np.full((len(prompts), 2), -1, np.int32)
    stop_tokens[:, : len(stops)] = stops
    return Requests(
        lens=jnp.asarray([len(prompt) for prompt in prompts], jnp.int32),
        rows=jnp.asarray(rows),
        keys=jax.random.split(jax.random.key(7), rows.shape) if keys is None else keys,
        max_new_tokens=jnp.asarray(np.broadcast_to(limit, len(prompts)), jnp.int32),
        stop_tokens=jnp.asarray(stop_tokens),
        sampling=RowSampling.create(len(prompts), temperature=temperature),
    )


def reserve_chunks(state, prompts, rows, *, size=CHUNK, **options):
    """Reserves rows; returns the state, the reserved rows and the chunks of the prompts."""
    state, reserved = reserve(state, requests(prompts, rows, **options))
    reserved = np.asarray(reserved)
    started = np.flatnonzero(reserved[:, 0] < MAX_SEQS)
    mine = [prompts[index] for index in started]
    return state, reserved, pack(mine, reserved[started], size=size, max_prompts=MAX_SEQS)


def start(split, state, prompts, rows, *, implementation="xla", **options):
    """Runs prompts; returns the state and `bool[P, S]`: whether each row holds its prompt."""
    state, reserved, chunks = reserve_chunks(state, prompts, rows, **options)
    for chunk in chunks:
        state = prefill(*split, state, chunk, implementation=implementation)
    return state, (np.append(state.table.seq_lens, 0) > 0)[reserved]


def step(split, state, num_steps, *, implementation="xla"):
    return decode(*split, state, num_steps, implementation=implementation)


def texts(state):
    return [
        row[:count].tolist()
        for row, count in zip(np.asarray(state.tokens), np.asarray(state.num_tokens), strict=True)
    ]


def statuses(state):
    return [Status(int(status)) for status in state.status]


def assert_copies_no_pool(compiled, state):
    """A compiled step on a state of very many pages updates the pool in place."""
    memory = compiled.memory_analysis()
    pages = state.pool.layers[0].k_pages
    layer_bytes = pages.size * pages.dtype.itemsize
    assert (
        memory.temp_size_in_bytes < layer_bytes / 8
    )  # the layer has half a GiB; the rest is workspace
    # The output pool aliases the input pool.
    pool_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.pool))
    assert memory.alias_size_in_bytes > pool_bytes
    element = {"float32": "f32", "int8": "s8", "float8_e4m3fn": "f8e4m3fn"}[pages.dtype.name]
    _, num_pages, page_size, _ = pages.shape
    shape = rf"{element}\[2,(?:{num_pages},{page_size}|{num_pages * page_size}),16\]"
    assert re.search(shape, compiled.as_text())
    assert not re.search(rf"= \S*{shape}\S* copy\(", compiled.as_text())
