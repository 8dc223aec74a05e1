"""The shapes of `bench.prefill`: prompts, chunks of prompts, speculation and mixed batches."""

from __future__ import annotations

from typing import Any

from bench.measuring.options import PLAIN, Options
from bench.measuring.shapes import Shape, ragged_lens, uniform


def _prompts(num_seqs: int, length: int, *, options: Options = PLAIN, **sizes: Any) -> Shape:
    return uniform(num_seqs, length, q_len=length, options=options, **sizes)


def _newest(num_seqs: int, q_len: int, older: int) -> Shape:
    name = f"{num_seqs}x{q_len} after {older}"
    return uniform(num_seqs, older + q_len, q_len=q_len, name=name)


_RAGGED = ragged_lens(8192)
_LONG, _SHORT, _CHUNKS = _prompts(1, 8192), _prompts(16, 1024), _newest(8, 512, 8192)
_MIXED = Shape(
    name="56x1 after 4095 and 8x512 after 2048 32/8/128/16",
    seq_lens=(4096,) * 56 + (2560,) * 8,
    q_lens=(1,) * 56 + (512,) * 8,
)

SHAPES = (
    _prompts(1, 1024),
    _prompts(4, 4096),
    _LONG,
    _prompts(1, 16384),
    _SHORT,
    Shape(name="64 ragged 32/8/128/16", seq_lens=_RAGGED, q_lens=_RAGGED),
    _prompts(4, 4096, num_kv_heads=32),
    _prompts(4, 4096, head_dim=64),
    _prompts(4, 4096, num_q_heads=16, head_dim=256),
    _prompts(4, 4096, page_size=64),
    _newest(1, 512, 16384),
    _CHUNKS,
    _newest(8, 16, 32768),
    _newest(64, 4, 4096),
    _MIXED,
    _prompts(4, 4096, options=Options(sliding_window=1024)),
    _prompts(4, 4096, options=Options(soft_cap=50.0)),
    _prompts(4, 4096, options=Options(alibi=True)),
    _prompts(4, 4096, options=Options(sinks=True)),
)
ONE_BYTE = (_LONG, _SHORT, _CHUNKS, _MIXED)  # also measured with int8 and fp8 K/V
# Small enough for a CPU; runs only when named.
TINY = Shape(
    name="tiny",
    seq_lens=(5, 32, 17),
    q_lens=(5, 3, 1),
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    page_size=4,
)
