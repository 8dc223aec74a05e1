"""Sizes of an engine, and the requests that they rule out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from models.kv_cache import check_kv_dtype
from models.request import SamplingParams, check_integer, check_number


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of an engine.

    Attributes:
        num_pages: pages of the pool.
        page_size: tokens of a page, a power of two.
        max_seqs: sequences that run at a time.
        max_len: most tokens of a sequence; None takes what the model has positions for, if the pool
            does.
        token_budget: tokens of a step, more than max_seqs: one for each sequence that decodes, the
            rest for prompts.
        watermark: share of the pool that must be left over when a sequence starts beside others.
        prefix_caching: whether pages of what was computed before are used again.
        kv_dtype: of the pool, as in `generate`.
        implementation: of the attention of `pallas_paged`.
    """

    num_pages: int
    page_size: int = 16
    max_seqs: int = 64
    max_len: int | None = None
    token_budget: int = 2048
    watermark: float = 0.03
    prefix_caching: bool = True
    kv_dtype: str | None = None
    implementation: str | None = None

    def __post_init__(self) -> None:
        for name in ("num_pages", "page_size", "max_seqs", "token_budget"):
            check_integer(name, getattr(self, name), 1)
        if self.max_len is not None:
            check_integer("max_len", self.max_len, 1)
        if self.token_budget <= self.max_seqs:
            raise ValueError(
                f"token_budget={self.token_budget} must be more than max_seqs={self.max_seqs}"
            )
        check_number("watermark", self.watermark)
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark={self.watermark} must be at least 0 and below 1")
        check_kv_dtype(self.kv_dtype)


def check_request(
    tokens: Sequence[int],
    params: SamplingParams,
    *,
    config: EngineConfig,
    max_len: int,
    vocab_size: int,
    has_tokenizer: bool,
) -> None:
    """Refuses what could never be served.

    Args:
        tokens: the prompt.
        params: of the request.
        config: of the engine.
        max_len: most tokens of a sequence.
        vocab_size: of the model.
        has_tokenizer: whether there will be texts.

    Raises:
        ValueError: says what is too much, with the values.
    """
    if not isinstance(params, SamplingParams):
        raise ValueError(f"{params=} must be SamplingParams")
    if not tokens:
        raise ValueError("the prompt is empty")
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise ValueError(f"the prompt has a token outside 0..{vocab_size - 1}")
    if params.stop and not has_tokenizer:
        raise ValueError(f"stop={params.stop!r} needs a tokenizer; stop_tokens does not")
    if params.beam_width and 2 * params.beam_width > vocab_size:
        raise ValueError(f"beam_width={params.beam_width} is more than half of {vocab_size=}")
    length, max_tokens = len(tokens), params.max_tokens
    if length + max_tokens > max_len:
        raise ValueError(
            f"a prompt of {length} tokens and {max_tokens=} are more than the {max_len} tokens of a"
            " sequence"
        )
    if params.num_rows > config.max_seqs:
        raise ValueError(
            f"{params.num_rows} sequences at a time are more than max_seqs={config.max_seqs}"
        )
    # The last token has no K/V.
    pages = -(-(length + max_tokens - 1) // config.page_size) * (params.beam_width or 1)
    if pages > config.num_pages:
        raise ValueError(
            f"a prompt of {length} tokens and {max_tokens=} may need {pages} pages, of"
            f" num_pages={config.num_pages}"
        )
