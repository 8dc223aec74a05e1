"""What `--prompt` and `--prompts-file` share: defaults, a check of texts, the size of a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.engine_stats import EngineStats
    from models.generation import Stats

DEFAULT_MAX_NEW_TOKENS = 400
DEFAULT_TEMPERATURE = 0.8


def is_utf8(text: str) -> bool:
    """Whether a text has no surrogates, with which Python spells bytes that are not UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def pool_size(stats: Stats | EngineStats) -> str:
    """The bytes of a pool, and what they are, for a summary."""
    unit, size = ("MiB", 2**20) if stats.pool_bytes >= 2**20 else ("KiB", 2**10)
    return f"{stats.pool_bytes / size:,.1f} {unit} of {stats.kv_dtype}"
