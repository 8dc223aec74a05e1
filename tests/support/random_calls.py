"""Calls of attention at random: sizes, dtypes, layouts, options and configs drawn together.

`python -m tests.support.random_calls --seconds 600` runs call after call on every implementation of
this machine, prints those that are wrong, and how many each implementation ran. A call is known by
its number: `--seeds 17 23` runs these two.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import numpy as np

import pallas_paged as pp
from tests.support.attention_cases import Case
from tests.support.devices import implementations_here
from tests.support.page_layouts import LAYOUTS, call_in_layout
from tests.support.quantized_cases import Quantized

FUNCTIONS: dict[str, Any] = {
    "decode": pp.paged_attention,
    "ragged": pp.ragged_paged_attention,
    "cascade": pp.cascade_attention,
}
HEAD_DIMS = (64, 128, 256, 128, 64, 80, 96, 112, 192, 320, 512, 16, 72, 36)
# Of a row of the result, relative to its length.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
_MAX_ELEMENTS = 2_000_000  # of K
_MAX_PAIRS = 4_000_000  # of queries and keys, for XLA


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomCall:
    """A call of attention.

    Attributes:
        seed: its number, of which all else follows.
        kind: of `FUNCTIONS`.
        case: sizes, lengths and the dtype of the queries.
        kv_dtype: of one-byte pages, or None.
        per_tensor: whether one-byte pages have one scale for all tokens.
        kv_layout: of the pages.
        options: static options and arrays of options.
        group_sizes: rows of each group of a cascade.
    """

    seed: int
    kind: str
    case: Case
    kv_dtype: str | None
    per_tensor: bool
    kv_layout: str
    options: dict[str, Any]
    group_sizes: tuple[int, ...]

    def __str__(self) -> str:
        words = [f"{self.seed}: {self.kind}", self.case, self.kv_layout]
        if self.kv_dtype:
            words.append(f"{self.kv_dtype}{' per tensor' * self.per_tensor}")
        given = {k: v if np.ndim(v) == 0 else "..." for k, v in self.options.items()}
        return " ".join(map(str, [*words, given or ""])).rstrip()

    @classmethod
    def draw(cls, seed: int, *, max_len: int = 1500) -> RandomCall:
        """Return the call of this number, with rows of up to `max_len` tokens."""
        rng = np.random.default_rng(seed)

        def one_of(*values: Any) -> Any:
            return values[rng.integers(len(values))]

        kind = one_of("decode", "decode", "ragged", "ragged", "ragged", "cascade")
        head_dim = one_of(*HEAD_DIMS)
        num_kv_heads, group = one_of(1, 2, 3, 8), one_of(1, 2, 4, 4, 5, 8, 16, 40, 70)
        num_seqs = int(rng.integers(1, 8))
        longest = min(one_of(40, 300, max_len), _MAX_ELEMENTS // (num_kv_heads * head_dim))
        page_size = 1 << int(rng.integers(0, 8))
        lens = [
            min(one_of(0, 1, page_size, 64, 128, *rng.integers(0, longest + 1, 9)), longest)
            for _ in range(num_seqs)
        ]
        q_lens = None
        if kind == "ragged":
            most = max(1, min(300, _MAX_PAIRS // (longest * num_kv_heads * group)))
            q_lens = [min(n, one_of(0, 1, 4, n, int(rng.integers(most + 1))), most) for n in lens]
        case = Case(
            num_q_heads=num_kv_heads * group,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            seq_lens=tuple(map(int, lens)),
            pages_per_seq=max(1, -(-max(lens) // page_size)) + int(rng.integers(0, 4)),
            dtype=one_of("bfloat16", "bfloat16", "bfloat16", "float16", "float32"),
            q_lens=None if q_lens is None else tuple(map(int, q_lens)),
            num_tokens=0 if q_lens is None else int(sum(q_lens) + rng.integers(1, 20)),
        )
        first = int(rng.integers(1, num_seqs + 1))
        return cls(
            seed=seed,
            kind=kind,
            case=case,
            kv_dtype=one_of(None, None, "int8", "float8_e4m3fn"),
            per_tensor=bool(rng.random() < 0.2),
            kv_layout=one_of(*LAYOUTS, "HPND", "HPND", "HPND"),
            options=_options(rng, one_of, kind, case),
            group_sizes=(first, num_seqs - first),
        )

    def make(self, *, poison: bool) -> dict[str, Any]:
        """Return the arrays of the call by name; `poison` as in `Case.make`."""
        if self.kv_dtype is None:
            arrays = self.case.make(seed=self.seed, poison=poison)
        else:
            case = Quantized(case=self.case, kv_dtype=self.kv_dtype, per_tensor=self.per_tensor)
            arrays, _ = case.make(seed=self.seed, poison=poison)
        found = call_in_layout(self.kv_layout, arrays)
        if self.kind == "cascade":
            offsets = np.cumsum([0, *self.group_sizes]).astype(np.int32)
            tables, lens = found["block_tables"].copy(), found["seq_lens"]
            shared: list[int] = []
            for begin, end in itertools.pairwise(offsets):
                blocks = min(lens[begin:end], default=0) // self.case.page_size
                tables[begin:end, :blocks] = tables[begin, :blocks] if blocks else 0
                shared.append(blocks * self.case.page_size)
            found |= dict(
                block_tables=tables, prefix_lens=np.array(shared, np.int32), cu_group_sizes=offsets
            )
        return found

    def function(self, implementation: str) -> Callable[..., Any]:
        """Return the call as a function of its arrays."""
        options = dict(self.options, kv_layout=self.kv_layout, implementation=implementation)
        return partial(FUNCTIONS[self.kind], return_lse=True, **options)

    def reference(self, arrays: dict[str, Any]) -> Any:
        """Return the results of XLA in f32."""
        exact = {
            name: x.astype(np.float32)
            if name == "q" or (self.kv_dtype is None and name.endswith("_pages") and x is not None)
            else x
            for name, x in arrays.items()
        }
        return jax.jit(self.function("xla"))(**exact)


def _options(rng: Any, one_of: Any, kind: str, case: Case) -> dict[str, Any]:
    num_q_heads, longest = case.num_q_heads, max(case.seq_lens) + 1
    slopes = np.where(rng.random(num_q_heads) < 0.2, 0.0, rng.random(num_q_heads))
    possible = {
        "sm_scale": one_of(-0.1, 0.3),
        "soft_cap": one_of(0.7, 30.0, 500.0),
        "sliding_window": int(rng.integers(1, longest + 1)),
        "alibi_slopes": slopes.astype(np.float32),
        "sinks": (3 * rng.standard_normal(num_q_heads)).astype(np.float32),
    }
    if kind != "cascade":
        possible["fixed_split_size"] = one_of(64, 128, 192, 1024)
    if kind == "ragged":
        size = int(rng.integers(1, 24))
        tree = rng.random((len(case.seq_lens), size, size)) < 0.5
        possible |= one_of({"causal": False}, {"tree_mask": tree})
    return {name: value for name, value in possible.items() if rng.random() < 0.3}


def wrong(actual: Any, expected: Any, tolerance: float) -> str:
    """Return how `(out, lse)` differs from what is expected, or nothing."""
    out, lse, right, right_lse = (np.asarray(x).astype(np.float64) for x in (*actual, *expected))
    empty = np.isneginf(right_lse)
    if not np.array_equal(np.isneginf(lse), empty) or out[empty].any():
        return "queries without keys"
    out, lse, right, right_lse = (x[~empty] for x in (out, lse, right, right_lse))
    error = np.linalg.norm(out - right, axis=-1) / np.maximum(np.linalg.norm(right, axis=-1), 1e-9)
    error, lse_error = (x.max(initial=0) for x in (error, np.abs(lse - right_lse)))
    if error <= tolerance and lse_error <= 2e-3:
        return ""
    return f"error {error:.1e} of a row, {lse_error:.1e} of a log-sum-exp"


def run(call: RandomCall, implementations: Iterable[str]) -> dict[str, str]:
    """Return for each implementation "" where it is right, what is wrong, or why it refuses.

    It is right if it agrees with XLA, gives the same bits twice, and the same bits where the memory
    outside the rows is clean.
    """
    poisoned, clean = call.make(poison=True), call.make(poison=False)
    expected = call.reference(poisoned)

    def run_one(name: str) -> str:
        compiled = jax.jit(call.function(name)).lower(**poisoned).compile()
        first, *others = (compiled(**arrays) for arrays in (poisoned, poisoned, clean))
        found = [wrong(first, expected, TOLERANCE[call.case.dtype])]
        for what, other in zip(("a second time", "beside clean memory"), others, strict=True):
            pairs = zip(first, other, strict=True)
            if any(np.asarray(x).tobytes() != np.asarray(y).tobytes() for x, y in pairs):
                found.append(f"other bits {what}")
        return ", ".join(filter(None, found))

    results = {}
    for name in implementations:
        try:
            results[name] = run_one(name)
        except NotImplementedError as e:
            results[name] = f"refused: {e}"
        except Exception as e:  # a compiler or a GPU may fail in any way
            results[name] = f"failed: {type(e).__name__}: {str(e).strip()[-300:]}"
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program, and return its status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="limit of time")
    parser.add_argument("--first", type=int, default=0, help="the first number")
    parser.add_argument("--seeds", type=int, nargs="*", help="these numbers")
    parser.add_argument("--max-len", type=int, default=1500, help="tokens of the longest rows")
    parser.add_argument("--implementations", nargs="*", help="instead of those of this machine")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.seconds
    names = options.implementations or [x for x in implementations_here() if x != "xla"]
    counts: Counter[tuple[str, str]] = Counter()

    def one(seed: int) -> tuple[RandomCall, dict[str, str]] | None:
        if time.monotonic() > deadline:
            return None
        call = RandomCall.draw(seed, max_len=options.max_len)
        return call, run(call, names)

    one_by_one = any(name.endswith("_interpret") for name in names)  # Mosaic's interpreter
    with ThreadPoolExecutor(max_workers=1 if one_by_one else os.cpu_count()) as pool:
        seeds = options.seeds or range(options.first, options.first + 10_000)
        for call, found in filter(None, pool.map(one, seeds)):
            for name, text in found.items():
                kind = "refused" if text.startswith("refused") else "wrong" if text else "right"
                counts[name, kind] += 1
                if kind == "wrong":
                    print(f"{name} {text}: call {call}", flush=True)
    for name in names:
        numbers = [f"{counts[name, kind]} {kind}" for kind in ("right", "wrong", "refused")]
        print(f"{name}: {', '.join(numbers)}")
    return 1 if any(counts[name, "wrong"] for name in names) else 0


if __name__ == "__main__":
    sys.exit(main())
