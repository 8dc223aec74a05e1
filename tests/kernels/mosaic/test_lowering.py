"""The Mosaic GPU kernels lower for a Hopper GPU on a machine without one."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged.kernels.mosaic import config as mosaic_tuning
from pallas_paged.kernels.mosaic import converted_rows
from tests.support.devices import lower_for_cuda
from tests.support.lowering import CUSTOM_CALL, few_with_every_level, named, options_of, pairwise
from tests.support.marks import slow

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernels need JAX 0.11", allow_module_level=True)

NUM_PAGES = 1009  # no other size is 1009, so it marks the pool in the lowered text


def cache_shapes(num_seqs, num_kv_heads, head_dim, page_size, pages_per_seq, dtype):
    """Shapes of k_pages, v_pages, block_tables, seq_lens."""
    pages = jax.ShapeDtypeStruct((num_kv_heads, NUM_PAGES, page_size, head_dim), dtype)
    table = jax.ShapeDtypeStruct((num_seqs, pages_per_seq), jnp.int32)
    return pages, pages, table, jax.ShapeDtypeStruct((num_seqs,), jnp.int32)


def check_kernels(text: str, *names: str) -> None:
    """The text calls kernels of these names only, and no operation of it makes or copies a pool."""
    calls = CUSTOM_CALL.findall(text)
    assert len(calls) == len(names)
    assert all(name in text for name in names)
    pool = [line for line in text.splitlines() if f"x{NUM_PAGES}x" in line]
    # The kernels' entry is a function of its own.
    main, call, entry, *rest = pool
    kernels = [line for line in rest if CUSTOM_CALL.search(line)]
    constraints = [line for line in rest if line not in kernels]
    assert "func.func public @main" in main and "func.func private" in entry
    assert "%arg0, %arg1, %arg2, %arg3" in call.split(" call ")[1]  # as they came
    assert all(" = sdy.sharding_constraint " in line for line in constraints)  # of one device
    # The first kernel and, behind one that converts rows, the second.
    assert [CUSTOM_CALL.search(line)[1] for line in kernels] == calls[: len(calls) - 1]
    for operands in calls[: len(kernels)]:
        assert "%arg1, %arg2" in unconstrained(operands, constraints)


def unconstrained(operands: str, lines: Sequence[str]) -> str:
    """Operands with those in place of which sharding constraints stand."""
    found = (re.search(r"(%\w+) = sdy.sharding_constraint (%\w+) ", line) for line in lines)
    constrained = dict(one.groups() for one in found if one)
    return ", ".join(constrained.get(name, name) for name in operands.split(", "))


def with_scales(q, k_pages, v_pages, tables, lens, cu_q_lens, *scales, **options):
    named = dict(zip(("k_scales", "v_scales"), scales, strict=False))
    return pp.ragged_paged_attention(
        q, k_pages, v_pages, tables, lens, cu_q_lens, **named, **options
    )


OPTIONS = dict(
    dtype=("bfloat16", "float16"),
    head_dim=(64, 128, 256),
    soft_cap=(None, 30.0),
    sliding_window=(None, 100),
    alibi_slopes=(False, True),
    sinks=(False, True),
    return_lse=(False, True),
    fixed_split_size=(None, 256),
)
RAGGED = pairwise(
    group=(1, 3, 5, 8, 32),
    page_size=(8, 16, 64, 256),
    num_tokens=(7, 203, 1024),
    num_consumers=(1, 2),
    mask=("causal", "tree", None),
    kv_dtype=(None, "int8", "float8_e4m3fn"),
    **OPTIONS,
)
DECODE = pairwise(
    group=(1, 5, 8, 64),
    page_size=(8, 16, 256),
    num_seqs=(1, 5, 300),
    **OPTIONS,
)


def test_pairwise_has_every_pair_of_levels():
    rows = pairwise(a=(1, 2, 3), b=(1, 2, 3), c="xy")
    for names in itertools.combinations("abc", 2):
        met = {tuple(row[name] for name in names) for row in rows}
        assert len(met) == (9 if names == ("a", "b") else 6)
    assert len(rows) < 18 and len(RAGGED) + len(DECODE) <= 45


@pytest.mark.parametrize("row", few_with_every_level(RAGGED), ids=named)
def test_ragged(row):
    num_seqs, num_q_heads = 5, 2 * row["group"]
    page_size, kv_dtype = row["page_size"], row["kv_dtype"]
    config = mosaic_tuning.ragged_config(
        num_tokens=row["num_tokens"],
        num_q_heads=num_q_heads,
        num_kv_heads=2,
        head_dim=row["head_dim"],
        max_kv_len=4096,
        expected_seqs=num_seqs,
        itemsize=1 if kv_dtype else 2,
        num_sms=132,
    )
    num_consumers = 1 if kv_dtype and row["head_dim"] == 256 else row["num_consumers"]
    config = dataclasses.replace(
        config, num_consumers=num_consumers, fixed_split_size=row["fixed_split_size"]
    )
    call = partial(
        with_scales,
        implementation="mosaic_gpu",
        config=config,
        tree_mask=np.ones((num_seqs, 40, 40), bool) if row["mask"] == "tree" else None,
        causal=row["mask"] is not None,
        **options_of(row, num_q_heads),
    )
    q = jax.ShapeDtypeStruct((row["num_tokens"], num_q_heads, row["head_dim"]), row["dtype"])
    sizes = num_seqs, 2, row["head_dim"], page_size, 4096 // page_size
    cache = cache_shapes(*sizes, kv_dtype or row["dtype"])
    scale = jax.ShapeDtypeStruct(cache[0].shape[:-1] if row["sinks"] else (), jnp.float32)
    cu_q_lens = jax.ShapeDtypeStruct((num_seqs + 1,), jnp.int32)
    scales = [scale, scale] if kv_dtype else []
    text = lower_for_cuda(call, q, *cache, cu_q_lens, *scales).as_text()
    converted = kv_dtype and row["num_tokens"] * num_q_heads >= converted_rows.MIN_LOGITS // 4096
    names = ["ragged_convert_rows"] if converted else []
    check_kernels(text, *names, "ragged_paged_attention", "ragged_paged_attention_merge")
    # The merge writes into the kernel's output in place, and into lse only if the call returns it.
    merge = [line for line in text.splitlines() if CUSTOM_CALL.search(line)][-1]
    assert merge.count("output_operand_alias<") == 1 + row["return_lse"]


@pytest.mark.parametrize("row", few_with_every_level(DECODE), ids=named)
def test_decode(row):
    num_seqs, num_q_heads = row["num_seqs"], 2 * row["group"]
    config = mosaic_tuning.decode_config(
        num_q_heads=num_q_heads,
        num_kv_heads=2,
        head_dim=row["head_dim"],
        page_size=row["page_size"],
        max_kv_len=4096,
        num_seqs=num_seqs,
        itemsize=2,
        num_sms=132,
    )
    call = partial(
        pp.paged_attention,
        implementation="mosaic_gpu",
        config=dataclasses.replace(config, fixed_split_size=row["fixed_split_size"]),
        **options_of(row, num_q_heads),
    )
    q = jax.ShapeDtypeStruct((num_seqs, num_q_heads, row["head_dim"]), row["dtype"])
    page_size = row["page_size"]
    cache = cache_shapes(num_seqs, 2, row["head_dim"], page_size, 4096 // page_size, row["dtype"])
    check_kernels(lower_for_cuda(call, q, *cache).as_text(), "paged_decode", "paged_decode_merge")


@pytest.mark.parametrize("num_tokens", [None, 40], ids=["decode", "ragged"])
def test_a_step_writes_into_the_pool_that_was_donated(num_tokens):
    count = num_tokens or 4

    def step(q, k_pages, v_pages, tables, lens, new, slots, cu_q_lens):
        layer = pp.write_kv(pp.LayerKV(k_pages=k_pages, v_pages=v_pages), new, new, slots)
        k_pages, v_pages = layer.k_pages, layer.v_pages
        cache = k_pages, v_pages, tables, lens
        if num_tokens is None:
            out = pp.paged_attention(q, *cache, implementation="mosaic_gpu")
        else:
            out = pp.ragged_paged_attention(q, *cache, cu_q_lens, implementation="mosaic_gpu")
        return out, k_pages, v_pages

    text = lower_for_cuda(
        step,
        jax.ShapeDtypeStruct((count, 8, 128), jnp.bfloat16),
        *cache_shapes(4, 2, 128, 16, 64, jnp.bfloat16),
        jax.ShapeDtypeStruct((count, 2, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((count,), jnp.int32),
        jax.ShapeDtypeStruct((5,), jnp.int32),
        donate_argnums=(1, 2),
        keep_unused=True,
    ).as_text()
    assert len(re.findall(r"tf.aliasing_output|jax.buffer_donor", text)) == 2
    kernel, _ = CUSTOM_CALL.findall(text)
    k_pages, v_pages = re.search(r"return \S+, (%\w+), (%\w+) :", text).groups()
    (entry,) = (x for x in text.splitlines() if " call @" in x and f"x{NUM_PAGES}x" in x)
    # The kernel reads the very arrays that are returned.
    pool = [line for line in text.splitlines() if f"x{NUM_PAGES}x" in line]
    assert f" {k_pages}, {v_pages}, " in entry and "%arg1, %arg2" in unconstrained(kernel, pool)
    # Beside views of the pool there is one scatter for K and one for V.
    sizes = f"2x{NUM_PAGES}x16x128xbf16", f"2x{NUM_PAGES * 16}x128xbf16"
    lines = [line for line in text.splitlines() if any(size in line for size in sizes)]
    views = r"func.func| call @|stablehlo.reshape|sdy.sharding_constraint|custom_call|^ *return "
    others = [line for line in lines if not re.search(views, line)]
    assert len(others) == 2 and all(line.lstrip().startswith("}) : ") for line in others)


@pytest.mark.parametrize(("window", "alibi"), [(100, False), *slow([(None, False), (None, True)])])
def test_cascade(window, alibi):
    text = lower_for_cuda(
        partial(
            pp.cascade_attention,
            implementation="mosaic_gpu",
            alibi_slopes=np.ones(8, np.float32) if alibi else None,
            sliding_window=window,
        ),
        jax.ShapeDtypeStruct((5, 8, 64), jnp.float16),
        *cache_shapes(5, 2, 64, 16, 64, jnp.float16),
        jax.ShapeDtypeStruct((2,), jnp.int32),
        jax.ShapeDtypeStruct((3,), jnp.int32),
    ).as_text()
    assert len(CUSTOM_CALL.findall(text)) == 4
    for name in ("ragged_paged_attention_merge", "paged_decode_merge"):
        assert name in text
