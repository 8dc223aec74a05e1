"""What the host sends to a slot when a sequence starts to sample in it."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_paged.checks import INT32_MAX
from pallas_paged.engine.sampler import SamplingMetadata, hash_prompt
from pallas_paged.engine.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from pallas_paged.engine.sequence import Sequence
from pallas_paged.engine.state import SlotStates


def slot_states(num_slots: int, num_eos: int) -> SlotStates:
    """States of slots with the default sampling parameters, all finished."""

    num_stops = MAX_STOP_TOKEN_IDS + num_eos

    def full(value: Any, dtype: Any, *shape: int) -> np.ndarray:
        return np.full((num_slots, *shape), value, dtype)

    return SlotStates(
        last_token_ids=full(0, np.int32),
        finished=full(True, bool),
        max_lens=full(0, np.int32),
        sampling=SamplingMetadata(
            seeds=full(0, np.uint32, 3),
            temperature=full(0, np.float32),
            top_k=full(0, np.int32),
            top_p=full(1, np.float32),
            min_p=full(0, np.float32),
            presence_penalty=full(0, np.float32),
            frequency_penalty=full(0, np.float32),
            repetition_penalty=full(1, np.float32),
            min_lens=full(0, np.int32),
            stop_token_ids=full(-1, np.int32, num_stops),
            bias_token_ids=full(-1, np.int32, MAX_LOGIT_BIAS),
            bias=full(0, np.float32, MAX_LOGIT_BIAS),
        ),
    )


def set_slot(values: SlotStates, entry: int, one: Sequence, last_token_id: int) -> None:
    """Write a sequence's values into an entry of NumPy arrays."""
    request, params, sampling = one.request, one.request.params, values.sampling
    values.last_token_ids[entry] = last_token_id
    values.finished[entry] = False
    values.max_lens[entry] = INT32_MAX if one.is_beam else one.max_len
    if not params.greedy:
        sampling.seeds[entry] = (
            request.seed,
            hash_prompt(request.prompt_token_ids),
            one.output.index,
        )
        sampling.temperature[entry] = params.temperature
    for name in ("top_k", "top_p", "min_p"):
        getattr(sampling, name)[entry] = getattr(params, name)
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        getattr(sampling, name)[entry] = getattr(params, name)
    sampling.min_lens[entry] = len(request.prompt_token_ids) + params.min_tokens
    if not one.is_beam:
        stops = list(one.stop_token_ids)
        sampling.stop_token_ids[entry, : len(stops)] = stops
    for index, (token_id, bias) in enumerate(dict(params.logit_bias or ()).items()):
        sampling.bias_token_ids[entry, index] = token_id
        sampling.bias[entry, index] = bias
