"""What the host sends to a slot when a sequence starts to sample in it."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_paged.checks import INT32_MAX
from pallas_paged.engine.device.state import SlotStates
from pallas_paged.engine.requests.sequence import Sequence
from pallas_paged.engine.sampling.sampler import SamplingMetadata, hash_prompt
from pallas_paged.engine.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams

# Fields of `SamplingParams` that the device has as they are.
_FIELDS = {
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "presence_penalty": np.float32,
    "frequency_penalty": np.float32,
    "repetition_penalty": np.float32,
}


def slot_states(num_slots: int, num_eos: int) -> SlotStates:
    """States of slots with greedy default parameters, all finished, as NumPy arrays."""

    def full(value: Any, dtype: Any, *shape: int) -> np.ndarray:
        return np.full((num_slots, *shape), value, dtype)

    return SlotStates(
        last_token_ids=full(0, np.int32),
        finished=full(True, bool),
        max_lens=full(0, np.int32),
        sampling=SamplingMetadata(
            seeds=full(0, np.uint32, 3),
            temperature=full(0, np.float32),
            min_lens=full(0, np.int32),
            stop_token_ids=full(-1, np.int32, MAX_STOP_TOKEN_IDS + num_eos),
            bias_token_ids=full(-1, np.int32, MAX_LOGIT_BIAS),
            bias=full(0, np.float32, MAX_LOGIT_BIAS),
            **{name: full(getattr(SamplingParams, name), x) for name, x in _FIELDS.items()},
        ),
    )


def set_slot(values: SlotStates, entry: int, one: Sequence, last_token_id: int) -> None:
    """Write a sequence's values into an entry of NumPy arrays."""
    request, params, sampling = one.request, one.request.params, values.sampling
    values.last_token_ids[entry] = last_token_id
    values.finished[entry] = False
    values.max_lens[entry] = INT32_MAX if one.is_beam else one.max_len
    if not params.greedy:
        prompt = hash_prompt(request.prompt_token_ids)
        sampling.seeds[entry] = request.seed, prompt, one.output.index
        sampling.temperature[entry] = params.temperature
    for name in _FIELDS:
        getattr(sampling, name)[entry] = getattr(params, name)
    sampling.min_lens[entry] = len(request.prompt_token_ids) + params.min_tokens
    if not one.is_beam:
        stops = list(one.stop_token_ids)
        sampling.stop_token_ids[entry, : len(stops)] = stops
    if bias := dict(params.logit_bias or ()):
        sampling.bias_token_ids[entry, : len(bias)] = [*bias]
        sampling.bias[entry, : len(bias)] = [*bias.values()]
