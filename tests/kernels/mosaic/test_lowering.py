"""The Mosaic GPU kernels lower for a Hopper GPU on a machine without one."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence

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
from tests.support.programs import Program

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernels need JAX 0.11", allow_module_level=True)

MARK = "x1009x"  # the pages of a pool


def check_kernels(text: str, *names: str) -> None:
    """The text calls kernels of these names only, and no operation of it makes or copies a pool."""
    calls = CUSTOM_CALL.findall(text)
    assert len(calls) == len(names)
    assert all(name in text for name in names)
    pool = [line for line in text.splitlines() if MARK in line]
    # The kernels' entry is a function of its own.
    main, call, entry, *rest = pool
    kernels = [line for line in rest if CUSTOM_CALL.search(line)]
    constraints = [line for line in rest if line not in kernels]
    assert "func.func public @main" in main and "func.func private" in entry
    assert re.match(r"@\w+\(%arg\d+(, %arg\d+){3}", call.split(" call ")[1])  # as they came
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


def lowered(function, row, config, **more):
    """The text of a call with the levels of a row, on 2 KV heads."""
    num_q_heads = 2 * row["group"]
    names = ("head_dim", "page_size", "dtype")
    options = dict(config=config, **options_of(row, num_q_heads)) | more.pop("options", {})
    heads = dict(num_q_heads=num_q_heads, num_kv_heads=2)
    sizes = {name: row[name] for name in names} | heads | more
    return Program(function=function, implementation="mosaic_gpu", **sizes, options=options).text()


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
    num_q_heads, kv_dtype, num_tokens = 2 * row["group"], row["kv_dtype"], row["num_tokens"]
    config = mosaic_tuning.ragged_config(
        num_tokens=num_tokens,
        num_q_heads=num_q_heads,
        num_kv_heads=2,
        head_dim=row["head_dim"],
        max_kv_len=4096,
        expected_seqs=4,
        itemsize=1 if kv_dtype else 2,
        num_sms=132,
    )
    num_consumers = 1 if kv_dtype and row["head_dim"] == 256 else row["num_consumers"]
    config = dataclasses.replace(
        config, num_consumers=num_consumers, fixed_split_size=row["fixed_split_size"]
    )
    tree = np.ones((4, 40, 40), bool) if row["mask"] == "tree" else None
    options = dict(tree_mask=tree, causal=row["mask"] is not None)
    sizes = dict(num_tokens=num_tokens, kv_dtype=kv_dtype, one_scale=not row["sinks"])
    text = lowered("ragged", row, config, options=options, **sizes)
    converted = kv_dtype and num_tokens * num_q_heads >= converted_rows.MIN_LOGITS // 4096
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
    config = dataclasses.replace(config, fixed_split_size=row["fixed_split_size"])
    text = lowered("decode", row, config, num_seqs=num_seqs)
    check_kernels(text, "paged_decode", "paged_decode_merge")


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

    pages = jax.ShapeDtypeStruct((2, 1009, 16, 128), jnp.bfloat16)
    text = lower_for_cuda(
        step,
        jax.ShapeDtypeStruct((count, 8, 128), jnp.bfloat16),
        pages,
        pages,
        jax.ShapeDtypeStruct((4, 64), jnp.int32),
        jax.ShapeDtypeStruct((4,), jnp.int32),
        jax.ShapeDtypeStruct((count, 2, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((count,), jnp.int32),
        jax.ShapeDtypeStruct((5,), jnp.int32),
        donate_argnums=(1, 2),
        keep_unused=True,
    ).as_text()
    assert len(re.findall(r"tf.aliasing_output|jax.buffer_donor", text)) == 2
    kernel, _ = CUSTOM_CALL.findall(text)
    k_pages, v_pages = re.search(r"return \S+, (%\w+), (%\w+) :", text).groups()
    (entry,) = (x for x in text.splitlines() if " call @" in x and MARK in x)
    # The kernel reads the very arrays that are returned.
    pool = [line for line in text.splitlines() if MARK in line]
    assert f" {k_pages}, {v_pages}, " in entry and "%arg1, %arg2" in unconstrained(kernel, pool)
    # Beside views of the pool there is one scatter for K and one for V.
    sizes = "2x1009x16x128xbf16", f"2x{1009 * 16}x128xbf16"
    lines = [line for line in text.splitlines() if any(size in line for size in sizes)]
    views = r"func.func| call @|stablehlo.reshape|sdy.sharding_constraint|custom_call|^ *return "
    others = [line for line in lines if not re.search(views, line)]
    assert len(others) == 2 and all(line.lstrip().startswith("}) : ") for line in others)


@pytest.mark.parametrize(("window", "alibi"), [(100, False), *slow([(None, False), (None, True)])])
def test_cascade(window, alibi):
    options = dict(alibi_slopes=np.ones(8, np.float32) if alibi else None, sliding_window=window)
    sizes = dict(num_seqs=5, num_q_heads=8, num_kv_heads=2, head_dim=64, dtype="float16")
    how = dict(function="cascade", implementation="mosaic_gpu", options=options)
    text = Program(**how, **sizes, max_kv_len=1024).text()
    assert len(CUSTOM_CALL.findall(text)) == 4
    for name in ("ragged_paged_attention_merge", "paged_decode_merge"):
        assert name in text
