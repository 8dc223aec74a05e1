"""Continue prompts with a decoder: `generate`; run as a program, the command."""

from __future__ import annotations

if __name__ == "__main__":
    from models.command.main import run  # imports JAX later, so that typing errors answer at once

    run()

from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import cache
from types import SimpleNamespace
from typing import Any

from models.decoder import Decoder, engine_config, engine_draft, engine_model, repeat_kv_heads
from pallas_paged.checks import check_has
from pallas_paged.engine import Engine, RequestOutput, SamplingParams, Tokenizer


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
            the memory does. KV heads are repeated as `tensor_parallel_size` needs. The "model" of a
            `speculative_config` is a decoder or a `DraftHead` with its weights.

    Returns:
        The outputs, in the order of the prompts.

    Raises:
        ValueError: a prompt or a value is out of range.
    """
    num_devices = config.get("tensor_parallel_size")
    if not isinstance(num_devices, int) or num_devices < 1:  # EngineConfig refuses these
        num_devices = 1
    decoder = repeat_kv_heads(decoder, num_devices)
    speculation, draft_params = config.get("speculative_config"), None
    if isinstance(speculation, Mapping) and isinstance(draft := speculation.get("model"), Decoder):
        drafting, draft_params = engine_draft(repeat_kv_heads(draft, num_devices))
        config["speculative_config"] = {**speculation, "model": drafting}
    model, _ = engine_model(decoder, max_model_len=config.get("max_model_len"))
    tokens: Any = tokenizer
    if tokenizer is not None:
        check_has("tokenizer", tokenizer, "encode", "decode")
        # The engine encodes the prompts again.
        tokens = SimpleNamespace(encode=cache(tokenizer.encode), decode=tokenizer.decode)
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    requests = [
        (len(tokens.encode(x)) if tokens is not None and isinstance(x, str) else len(x), one)
        for x, one in zip(prompts, each, strict=False)
        if hasattr(x, "__len__") and isinstance(one, SamplingParams)  # the engine refuses others
    ]
    sizes = engine_config(model, requests, **config)
    model, weights = engine_model(decoder, max_model_len=sizes.max_model_len)
    # An engine that is dropped keeps its pool until Python looks for cycles.
    with closing(Engine(model, weights, sizes, tokens, draft_params=draft_params)) as engine:
        return engine.generate(prompts, params, progress=progress)
