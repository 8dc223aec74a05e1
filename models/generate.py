"""Generation of text for a batch of prompts: `generate`; as a program, the command of `cli.py`."""

from __future__ import annotations

if __name__ == "__main__":
    import runpy

    # Before JAX is imported, so that `--help` and typing errors answer at once.
    runpy.run_module("models.cli", run_name="__main__")

from collections.abc import Sequence

import numpy as np

from models.decoder import Decoder
from models.generate_state import create_generate_state
from models.generation import Generation
from models.kv_cache import pool_dtype
from models.prefill import bucket
from models.sampling import RowSampling


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    num_samples: int = 1,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] | None = None,
    top_p: float | Sequence[float] | None = None,
    min_p: float | Sequence[float] | None = None,
    seed: int = 0,
    stop_tokens: Sequence[int] | None = None,
    page_size: int = 16,
    num_pages: int | None = None,
    max_seqs: int = 64,
    chunk: int | None = None,
    prefill_chunk: int | None = None,
    kv_dtype: str | None = None,
    implementation: str | None = None,
) -> Generation:
    """Continues every prompt num_samples times; iterate over the result to stream.

    The text of a sample depends on the seed, its prompt and its number only, up to the rounding of
    other batch sizes, which in bf16 and f16 can tip a token between near-equals. In a small pool,
    samples without a page wait for others to end; when all wait, the shortest gives its pages back
    and is computed again later. Only a sample that has the whole pool and still lacks a page ends
    as "out_of_pages", with the tokens it has.

    Args:
        model: its config has the end-of-sequence tokens and, if any, the scales of a float8 cache.
        prompts: token ids of each prompt, at least one.
        max_new_tokens: tokens after which a sample ends.
        num_samples: samples of each prompt; they share the pages of the prompt.
        temperature, top_k, top_p, min_p: one value, or one for each prompt; see `RowSampling`.
        seed: of all samples.
        stop_tokens: end a sample and are not part of it; None takes the model's end of sequence.
        page_size: tokens of a page, a power of two.
        num_pages: pages of the pool; None takes enough for max_seqs samples of full length.
        max_seqs: samples computed at a time, rounded up to a power of two; more wait.
        chunk: tokens of each sample between two looks of the host; None looks about 20 times a
            second, whatever a token takes.
        prefill_chunk: most tokens of prompts, all together, in one step on the device; None takes
            2048.
        kv_dtype: of the pool: None takes the dtype of the model, "int8" and "fp8" (float8_e4m3fn)
            have half the bytes of bf16. Other names of `KV_DTYPES` must be the model's own.
        implementation: of the attention of `pallas_paged`.

    Returns:
        A Generation.

    Raises:
        ValueError: a value is out of range, a prompt is empty, too long or not of the vocabulary.
    """
    config = model.config
    counts = {
        "max_new_tokens": max_new_tokens,
        "num_samples": num_samples,
        "max_seqs": max_seqs,
        "chunk": 1 if chunk is None else chunk,
        "prefill_chunk": 1 if prefill_chunk is None else prefill_chunk,
        "page_size": page_size,
        "num_pages": 1 if num_pages is None else num_pages,
    }
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name}={count} must be at least 1")
    if not 0 <= seed < 2**32:
        raise ValueError(f"{seed=} must be in 0..{2**32 - 1}")
    if not prompts:
        raise ValueError("there is no prompt")
    max_positions = config.max_position_embeddings
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {index} is empty")
        if len(prompt) + max_new_tokens > max_positions:
            raise ValueError(
                f"prompt {index} of {len(prompt)} tokens and {max_new_tokens=} are more than the "
                f"{max_positions} positions of the model"
            )
        if min(prompt) < 0 or max(prompt) >= config.vocab_size:
            raise ValueError(f"prompt {index} has a token outside 0..{config.vocab_size - 1}")
    ends = config.eos_token_ids if stop_tokens is None else tuple(stop_tokens)
    for token in ends:
        if not 0 <= token < 2**31:
            raise ValueError(f"stop token {token} must be in 0..{2**31 - 1}")
    values = RowSampling.create(
        len(prompts), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    sampling = values if np.any(np.asarray(values.temperature)) else None
    longest = max(len(prompt) for prompt in prompts) + max_new_tokens - 1
    pages_per_seq = bucket(-(-longest // page_size))
    num_rows = bucket(min(len(prompts) * num_samples, max_seqs))
    state = create_generate_state(
        config,
        num_pages=num_pages or num_rows * pages_per_seq,
        page_size=page_size,
        max_seqs=num_rows,
        pages_per_seq=pages_per_seq,
        max_new_tokens=bucket(max_new_tokens),
        num_stop_tokens=len(ends),
        sampling=sampling,
        dtype=pool_dtype(kv_dtype, model.embed_tokens.weight[...].dtype),
    )
    return Generation(
        model,
        state,
        prompts,
        max_new_tokens=max_new_tokens,
        num_samples=num_samples,
        sampling=sampling,
        seed=seed,
        stop_tokens=ends,
        chunk=chunk,
        prefill_chunk=prefill_chunk,
        implementation=implementation,
    )
