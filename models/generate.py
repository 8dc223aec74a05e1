"""Continue prompts with a decoder: `generate`; as a program, the command of `cli.py`."""

from __future__ import annotations

if __name__ == "__main__":
    from models.cli import run  # imports JAX later, so that typing errors answer at once

    run()

from collections.abc import Iterable, Sequence
from typing import Any

from models.decoder import Decoder
from models.engine_model import EngineModel, engine_model
from pallas_paged.engine import Engine, EngineConfig, RequestOutput, SamplingParams, Tokenizer


def generate(
    decoder: Decoder,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    tokenizer: Tokenizer | None = None,
    progress: bool = False,
    **config: Any,
) -> list[RequestOutput]:
    """Continue prompts in an engine that is made for them.

    Args:
        decoder: with its weights.
        prompts: texts, which need a tokenizer, or token ids.
        params: for all prompts, or one for each.
        tokenizer: of the decoder; None: completions have no text.
        progress: show a progress bar.
        config: fields of `EngineConfig`. By default the pool holds all prompts and completions, if
            the memory does.

    Returns:
        The outputs, in the order of the prompts.

    Raises:
        ValueError: a prompt or a value is out of range.
    """
    model, weights = engine_model(decoder)
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    requests = [
        (len(tokenizer.encode(x)) if tokenizer is not None and isinstance(x, str) else len(x), one)
        for x, one in zip(prompts, each, strict=False)
        if hasattr(x, "__len__") and isinstance(one, SamplingParams)  # the engine refuses others
    ]
    sizes = engine_config(model, requests, **config)
    engine = Engine(model, weights, config=sizes, tokenizer=tokenizer)
    return engine.generate(prompts, params, progress=progress)


def engine_config(
    model: EngineModel, requests: Iterable[tuple[int, SamplingParams]], **given: Any
) -> EngineConfig:
    """Return an engine's sizes for these requests only: tokens of each prompt, and its parameters.

    Sizes are rounded up to powers of two, so that similar requests run in the same compiled steps;
    `given` ones stay as they are.
    """
    limit, num_seqs, longest = model.max_model_len, 0, 1
    if given.get("num_pages"):
        limit = min(limit, given["num_pages"] * given.get("page_size", EngineConfig.page_size))
    for length, params in requests:
        num_seqs += params.num_seqs
        longest = max(longest, limit if params.max_tokens is None else length + params.max_tokens)
    sizes = {
        "max_num_seqs": min(EngineConfig.max_num_seqs, _power_of_two(num_seqs)),
        "max_model_len": min(limit, _power_of_two(longest)),
    }
    return EngineConfig(**sizes | given)


def _power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size` and 1."""
    return 1 << max(size - 1, 0).bit_length()
