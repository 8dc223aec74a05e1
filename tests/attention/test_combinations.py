"""Entries, dtypes, kinds of pages, shapes and options in combination, against float64 NumPy."""

import itertools
import os
from functools import partial

import jax
import numpy as np
import pytest

from pallas_paged.kernels.call import Arrays, Call
from pallas_paged.kernels.device import Device
from pallas_paged.kernels.families import FAMILIES
from tests.support import raw
from tests.support.attention_calls import assert_close, assert_same_bits
from tests.support.attention_cases import (
    Case,
    LatentCase,
    of_first_rows,
    of_latents,
    with_dead_rows,
    without_tokens_left_of,
)
from tests.support.attention_configs import config_of
from tests.support.devices import implementations_here, latent_implementations_here
from tests.support.lowering import named
from tests.support.marks import needs_mosaic, slow
from tests.support.page_layouts import LAYOUTS, call_in_layout
from tests.support.quantized_cases import Quantized

LEVELS = dict(
    dtype=["float32", "bfloat16", "float16"],
    pages=[None, "int8", "float8_e4m3fn", "int8 per layer", "float8_e4m3fn per layer"],
    kv_layout=LAYOUTS,
    # Groups of 1, 2, 3 and 7 heads, and of more than the 16 rows of a matrix unit.
    heads=[(4, 2), (7, 1), (40, 1), (3, 3), (6, 2)],
    head_dim=[16, 80, 128, 8, 160],
    page_size=[8, 1, 16, 256],
    sliding_window=[None, 1, 11, 2**40],
    soft_cap=[None, 1.5, 1e3],
    alibi=[False, True],
    sinks=[False, True],
    sm_scale=[None, -0.3],
    small_blocks=[True, False],
    split=[False, True],
    dead_rows=[False, True],
)
ENTRIES = {
    "decode": (raw.paged_attention, LEVELS),
    # The masks of two sizes: less than some row's queries, and more than all.
    "ragged": (raw.ragged_paged_attention, LEVELS | {"mask": ["causal", "none", 6, 30]}),
    "cascade": (raw.cascade_attention, {k: v for k, v in LEVELS.items() if k != "split"}),
}
LATENTS = {name: levels for name, levels in LEVELS.items() if name != "small_blocks"} | dict(
    kv_layout=["NHD", "HND", "HPND"],
    heads=[(16, 1), (1, 1), (40, 1), (6, 2), (128, 1)],
    head_dim=[72, 27, 144, 10],  # of K
    sm_scale=[0.2, -0.3],
)
LATENT_ENTRIES = {
    "latent decode": (raw.mla_attention, LATENTS),
    "latent ragged": (raw.mla_attention, LATENTS | {"mask": ["causal", "none", 6, 30]}),
}
# Lengths and queries of rows that share a program: prompts, chunks, a few tokens, one, none, and
# more queries than keys.
BATCHES = [dict(seq_lens=(137, 5, 0, 61, 64, 1), q_lens=(11, 5, 3, 2, 1, 0))]
BATCHES.append(dict(seq_lens=(40, 3, 150, 16, 9, 33), q_lens=(1, 7, 1, 16, 1, 4)))
PREFIX_LENS, GROUP_ENDS = (32, 0, 16), (0, 2, 3, 5)
NUM_SEQS = 4  # beside dead rows
EXTREME_SINKS = np.float32([-np.inf, 1e30, -1e30, 14.0, 1e4])
ON_GPU = jax.default_backend() == "gpu"
TABLE_ENTRIES = [-1, 2**31 - 1, -(2**31), 10**6]
# Rows of the default run, and seeds with which these have many pairs of levels and of options, and
# are quick: a ragged row in float16 with heads of 160 and large blocks took 76 CPU seconds.
QUICK = {"decode": (6, 1684), "ragged": (5, 2073), "cascade": (1, 2495)}
# Rows of these that a kernel runs interpreted by default: XLA takes a fourth of the time.
INTERPRETED = {"decode": (0, 1, 2, 3), "ragged": (1, 2, 4)}
QUICK |= {"latent decode": (3, 0), "latent ragged": (3, 0)}
# The other rows have more levels and random batches. `COMBINATIONS=1000 python -m pytest
# tests/attention/test_combinations.py` looks for errors on a GPU.
NUM_ROWS = int(os.environ.get("COMBINATIONS", 16))
MORE_LEVELS = dict(
    heads=[*LEVELS["heads"], (1, 1), (70, 1), (64, 8)],
    head_dim=[*LEVELS["head_dim"], 36, 64, 112, 192, 256, 320, 384, 510, 512],
    page_size=[*LEVELS["page_size"], 2, 64],
    sliding_window=[*LEVELS["sliding_window"], 100],
    split=[False, True],
)
MORE_LATENTS = {
    name: MORE_LEVELS[name] for name in ("page_size", "sliding_window", "split")
} | dict(
    heads=[*LATENTS["heads"], *((n, 1) for n in (2, 3, 8, 20, 32, 64, 100, 127))],
    head_dim=[*LATENTS["head_dim"], 320, 576],
)


def balanced(num_rows: int, seed: int, levels: dict) -> list[dict]:
    """Rows in which every factor takes all of its levels, one after another in random order."""
    rng = np.random.default_rng(seed)
    columns = [
        [values[i] for _ in range(num_rows) for i in rng.permutation(len(values))][:num_rows]
        for values in levels.values()
    ]
    return [dict(zip(levels, row, strict=True)) for row in zip(*columns, strict=True)]


def random_batches(seed: int, row: dict) -> list[dict]:
    """Batches for a row, within bounds of the elements of K and of the logits."""
    rng, num_seqs = np.random.default_rng(seed), seed % 8 + 1
    num_q_heads, num_kv_heads = row["heads"]
    longest = min(1500 if ON_GPU else 150, 2_000_000 // (num_kv_heads * row["head_dim"]))
    most_queries = min(300, 4_000_000 // (longest * num_q_heads))

    def lengths(largest):
        some = [0, 1, 4, 64, row["page_size"], *rng.integers(0, largest + 1, 9)]
        return tuple(int(min(x, largest)) for x in rng.choice(some, num_seqs))

    return [dict(seq_lens=lengths(longest), q_lens=lengths(most_queries)) for _ in BATCHES]


def rows_of_all(
    entries: dict, more_levels: dict, implementations: list[str]
) -> list[tuple[dict, list[dict], str]]:
    """Rows, batches and implementations: the first rows of each entry by default, on a GPU all."""
    found = []
    for name, (entry, (_, levels)) in itertools.product(implementations, entries.items()):
        count, seed = QUICK[entry]
        few = [(row | {"entry": entry}, BATCHES, name) for row in balanced(36, seed, levels)]
        rows = [row | {"entry": entry} for row in balanced(NUM_ROWS, seed, levels | more_levels)]
        others = [(row, random_batches(i, row), name) for i, row in enumerate(rows)]
        quick = INTERPRETED.get(entry, ()) if name.endswith("_interpret") else range(count)
        found += [few[i] for i in quick]
        others += [few[i] for i in range(count) if i not in quick]
        found += others if ON_GPU else slow(others)
    return found


def name_of(x: object) -> str:
    return named(x) if isinstance(x, dict) else x if isinstance(x, str) else ""


def options_of(row: dict, num_seqs: int, implementation: str) -> tuple[dict, dict, dict]:
    """(static options, arrays of options, options of the oracle) of a row."""
    entry, num_q_heads = row["entry"], row["heads"][0]
    names = ("sliding_window", "soft_cap", "sm_scale")
    static = {name: row[name] for name in names if row[name] is not None}
    arrays = {}
    if row["alibi"]:
        arrays["alibi_slopes"] = np.resize(np.float32([0.5, 0.25, 0.125, 0.0]), num_q_heads)
    if row["sinks"]:
        arrays["sinks"] = np.resize(np.float32([1.0, -3.0, 0.0, 8.0]), num_q_heads)
    mask = row.get("mask", "causal")
    if mask == "none":
        static["causal"] = False
    elif mask != "causal":
        arrays["tree_mask"] = np.random.default_rng(mask).random((num_seqs, mask, mask)) < 0.5
    oracle = static | arrays
    if row.get("small_blocks"):
        static["config"] = config_of(
            implementation, ragged=entry == "ragged", split=row.get("split", False)
        )
    elif row.get("split") and entry != "cascade":
        static["fixed_split_size"] = 64
    return static | {"implementation": implementation}, arrays, oracle


def cases_of(row: dict, batches: list[dict], implementation: str) -> list[Case | Quantized]:
    """The cases of the batches; they have the same shapes, and so share a program."""
    page_size = row["page_size"]
    sizes = {name: row[name] for name in ("head_dim", "page_size", "dtype")}
    sizes |= dict(zip(("num_q_heads", "num_kv_heads"), row["heads"], strict=True))
    sizes |= dict(
        pages_per_seq=1 + max(max(batch["seq_lens"]) for batch in batches) // page_size,
        num_pages=3 + max(sum(-(-n // page_size) for n in x["seq_lens"]) for x in batches),
    )
    if "ragged" in row["entry"]:
        sizes["num_tokens"] = 4 + max(sum(batch["q_lens"]) for batch in batches)
    else:
        batches = [dict(seq_lens=batch["seq_lens"]) for batch in batches]
    make = LatentCase if row["entry"] in LATENT_ENTRIES else Case
    cases = [make(**sizes, **batch).on(implementation) for batch in batches]
    if row["pages"] is None:
        return cases
    kv_dtype, *per_layer = row["pages"].split(" per ")
    return [Quantized(case=x, kv_dtype=kv_dtype, per_tensor=bool(per_layer)) for x in cases]


def is_refused(entry: str, arrays: tuple, implementation: str) -> bool:
    """Whether the kernels of a family say that they can't do a call, as of tiles too large."""
    if implementation not in FAMILIES:
        return False
    names = ("q", "k_pages", "v_pages", "block_tables", "seq_lens")
    kernel = "ragged" if "ragged" in entry else "decode"  # cascades have both
    fields = dict(zip(names, arrays, strict=False))
    if entry in LATENT_ENTRIES:
        q, v_head_dim = fields["q"], fields.pop("v_pages").shape[-1]
        fields |= dict(q=q[..., :v_head_dim], q_pe=q[..., v_head_dim:])
    call = Call.of(kernel, Arrays(**fields), device=Device.here())
    return FAMILIES[implementation].why_not(call) is not None


def check(row, batches, implementation):
    """Run the batches of a row, and then with extreme sinks."""
    function, _ = (ENTRIES | LATENT_ENTRIES)[row["entry"]]
    num_seqs, page_size = len(batches[0]["seq_lens"]), row["page_size"]
    static, options, oracle = options_of(row, num_seqs, implementation)
    call = jax.jit(partial(function, kv_layout=row["kv_layout"], return_lse=True, **static))
    ends, live = np.minimum(GROUP_ENDS, num_seqs).astype(np.int32), min(NUM_SEQS, num_seqs)
    for i, case in enumerate(cases_of(row, batches, implementation)):
        made = case.make()
        arrays, meant = (made, made) if row["pages"] is None else made
        case = getattr(case, "case", case)
        if row["entry"] in LATENT_ENTRIES:
            arrays, meant = (of_latents(x, case.v_head_dim) for x in (arrays, meant))
        if row["entry"] == "cascade":
            for begin, end, prefix in zip(ends, ends[1:], PREFIX_LENS, strict=False):
                shared = min([prefix, *case.seq_lens[begin:end]]) // page_size
                arrays[3][begin:end, :shared] = arrays[3][begin : begin + 1, :shared]
                meant[3][begin:end, :shared] = arrays[3][begin : begin + 1, :shared]
        elif row["sliding_window"]:
            entry = TABLE_ENTRIES[(row["head_dim"] + i) % len(TABLE_ENTRIES)]
            arrays = without_tokens_left_of(row["sliding_window"], arrays, page_size, entry)
        if row["dead_rows"]:
            arrays, meant = with_dead_rows(arrays, live), of_first_rows(meant, live)
        given = call_in_layout(row["kv_layout"], arrays) | options
        if row["dead_rows"]:
            given |= dict(block_tables=given["block_tables"].reshape(-1), num_seqs=np.int32(live))
        if row["entry"] == "cascade":
            given |= dict(prefix_lens=np.int32(PREFIX_LENS), cu_group_sizes=ends)
        if is_refused(row["entry"], arrays, implementation):
            with pytest.raises(NotImplementedError, match=f"implementation='{implementation}' "):
                call(**given)
            return
        actual = call(**given)
        assert_close(actual, meant, case.tolerance, name=f"batch {i}", **oracle)
        assert_same_bits(call(**given), actual)
    if row["sinks"]:
        sinks = np.resize(EXTREME_SINKS, len(options["sinks"]))
        actual = call(**given | {"sinks": sinks})
        name = "extreme sinks"
        assert_close(actual, meant, case.tolerance, name=name, **oracle | {"sinks": sinks})


@pytest.mark.parametrize(
    ("row", "batches", "implementation"),
    rows_of_all(ENTRIES, MORE_LEVELS, implementations_here()),
    ids=name_of,
)
def test_matches_the_oracle(row, batches, implementation):
    """Memory that no query sees is poisoned: outside of the rows, and left of their windows."""
    check(row, batches, implementation)


@pytest.mark.parametrize(
    ("row", "batches", "implementation"),
    rows_of_all(LATENT_ENTRIES, MORE_LATENTS, latent_implementations_here()),
    ids=name_of,
)
def test_latents_match_the_oracle(row, batches, implementation):
    check(row, batches, implementation)


@pytest.mark.slow
@needs_mosaic
@pytest.mark.parametrize("entry", ["decode", "ragged"])
@pytest.mark.parametrize("index", range(3))
def test_interpreted_mosaic_kernels_match_the_oracle(index, entry):
    row = balanced(36, QUICK[entry][1], ENTRIES[entry][1])[index]
    row |= dict(entry=entry, heads=(4, 2), page_size=16, pages=None, sliding_window=30)
    check(row, BATCHES, "mosaic_sm90_interpret")
