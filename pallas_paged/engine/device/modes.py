"""Which sampling modes steps are compiled for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from operator import or_

from pallas_paged.engine.device.state import Shape
from pallas_paged.engine.requests.input_processor import check_lists
from pallas_paged.engine.sampling_params import MAX_LOGPROBS, SamplingMode, SamplingParams


def modes_for(params: Iterable[SamplingParams] | None) -> list[SamplingMode]:
    """Return the sampling modes to compile for requests with these parameters.

    Steps that are greedy, that only draw, or that filter have modes of their own, because filters,
    penalties and log-probabilities cost time in every row. None is for any request without
    structured outputs and routed experts.
    """
    if params is None:
        full = SamplingMode(
            draws=True,
            filters=2,
            processors=True,
            penalties=True,
            logprobs=MAX_LOGPROBS,
        )
        return [
            SamplingMode(),
            SamplingMode(draws=True),
            SamplingMode(draws=True, filters=2),
            full,
            replace(full, prompt_logprobs=MAX_LOGPROBS),
        ]
    check_lists(params=params)
    for one in params:
        if not isinstance(one, SamplingParams):
            raise ValueError(f"params has {one!r}, which must be SamplingParams")
    modes = {SamplingMode.of(one) for one in params}
    modes.add(reduce(or_, modes, SamplingMode()))
    return sorted(modes | {replace(max(modes), prompt_logprobs=-1)})


def fit_mode(mode: SamplingMode, shape: Shape) -> SamplingMode:
    """Return the part of a mode that a batch of this shape can need."""
    if len(shape) > 2:  # with drafts
        mode = replace(mode, penalties=False, masks=False, routed_experts=False)
    return mode if shape[1] else replace(mode, prompt_logprobs=-1)
