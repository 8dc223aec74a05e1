"""Packing a call: its shapes and padding."""

from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_paged.engine import EngineConfig
from pallas_paged.engine.device.batch import BatchBuckets
from pallas_paged.engine.sampling_params import SamplingMode
from pallas_paged.engine.schedule.calls import Chunk, Decode


def make_buckets(max_num_seqs, most):
    sizes = dict(max_num_seqs=max_num_seqs, max_num_batched_tokens=most)
    return BatchBuckets(EngineConfig(**sizes, num_scheduler_steps=4))


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "decode_slots", "chunk_tokens"),
    [
        (4, 16, [4], [16]),
        (7, 128, [7], [128]),
        (8, 128, [1, 8], [128]),
        (9, 129, [1, 8, 9], [128, 129]),
        (100, 1000, [1, 8, 16, 32, 64, 100], [128, 256, 512, 1000]),
    ],
)
def test_buckets_are_few(max_num_seqs, max_num_batched_tokens, decode_slots, chunk_tokens):
    buckets = make_buckets(max_num_seqs, max_num_batched_tokens)
    assert buckets.decode_slots == decode_slots and buckets.chunk_tokens == chunk_tokens
    wanted = [(slots, 0) for slots in decode_slots]
    wanted += [(max_num_seqs, tokens) for tokens in chunk_tokens]
    assert sorted(buckets.all()) == sorted(wanted)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(st.integers(1, 80), st.integers(1, 700), st.data())
def test_every_batch_gets_the_smallest_bucket_that_fits(max_num_seqs, more, data):
    most = max_num_seqs + more
    buckets = make_buckets(max_num_seqs, most)
    num_decodes = data.draw(st.integers(0, max_num_seqs))
    num_tokens = data.draw(st.integers(not num_decodes, most - num_decodes))
    assert buckets.fit(num_decodes, num_tokens) == min(
        (slots, tokens)
        for slots, tokens in buckets.all()
        if slots >= num_decodes and tokens >= num_tokens and bool(tokens) == bool(num_tokens)
    )


def decode(slot, num_tokens=1):
    return Decode(sequence=SimpleNamespace(running_slot=slot), num_tokens=num_tokens)


def chunk(slot, token_ids, *, targets=None):
    """A last chunk of a prompt; targets are the tokens after those of the chunk."""
    start, limit = (None, None) if targets is None else (1, 0)
    tokens = [0, *(targets or [])]
    request = SimpleNamespace(prompt_token_ids=tokens, score_start=start, given_experts=None)
    one = SimpleNamespace(running_slot=slot, request=request, max_cached_tokens=limit)
    return Chunk(sequence=one, start=0, token_ids=token_ids, is_last=True)


def packed(decodes, chunks, shape, **mode):
    """A batch of at most 10 sequences and 32 tokens; slot 10 is padding."""
    return make_buckets(10, 32).pack(decodes, chunks, shape, SamplingMode(**mode))


def test_decoding_slots_have_the_places_that_chunks_leave_which_are_packed_in_order():
    """The largest batch has no more tokens than may be scheduled, smaller ones room for all."""
    batch = packed([decode(3, 3), decode(1, 2)], [], (8, 0))
    assert batch.decode_slots.tolist() == [3, 1] + [10] * 6
    assert batch.num_steps.tolist() == [3, 2] + [0] * 6 and batch.max_num_steps == 4
    batch = packed([decode(4), decode(7)], [chunk(0, [*range(1, 31)])], (10, 32))
    assert batch.chunks.token_ids.tolist() == [*range(1, 31), 0, 0] and batch.max_num_steps == 1
    assert batch.decode_slots.tolist() == [10] * 8 + [4, 7]
    empty = packed([], [], (10, 16))
    assert empty.chunks.token_ids.tolist() == [0] * (16 + 10) and empty.chunks.targets is None
    assert set(empty.decode_slots) == set(empty.chunks.slots) == {10}
    assert not empty.chunks.cu_q_lens.any() and not empty.chunks.is_last.any()
    chunks = [chunk(0, [5]), chunk(2, [7, 8, 9], targets=[8, 9])]
    batch = packed([], chunks, (10, 32), prompt_logprobs=0).chunks
    assert batch.token_ids.tolist() == [5, 7, 8, 9] + [0] * 28
    assert batch.targets.tolist() == [-1, 8, 9, -1] + [-1] * 28
    assert batch.slots.tolist() == [0, 2] + [10] * 8
    assert batch.cu_q_lens.tolist() == [0, 1] + [4] * 9
    assert batch.is_last.tolist() == [True] * 2 + [False] * 8
    assert batch.routed_experts is None
