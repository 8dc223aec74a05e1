"""The Triton kernels lower for CUDA on a machine without a GPU, also over int8 and fp8 pages."""

from __future__ import annotations

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.lib import triton as triton_dialect
from jax._src.lib.mlir import ir

import pallas_paged as pp
from pallas_paged import dispatch
from pallas_paged.dispatch import BACKENDS
from pallas_paged.kernels.mosaic import support as mosaic_support
from pallas_paged.kernels.triton import implementation as triton
from pallas_paged.kernels.triton.config import (
    decode_config,
    decode_merge_config,
    ragged_config,
    writing_decode_config,
)
from tests.support.devices import A100
from tests.support.lowering import few_with_every_level, named, options_of, pairwise
from tests.support.marks import slow
from tests.support.programs import Program
from tests.support.static_calls import DECODE, PREFILL

KV_DTYPES = ["int8", "float8_e4m3fn"]
LEVELS = dict(
    group=(1, 3, 4, 7, 40, 128),
    num_kv_heads=(1, 2, 8),
    head_dim=(16, 64, 80, 128, 192, 256, 320, 512),
    page_size=(1, 2, 16, 32, 256),
    dtype=("bfloat16", "float16", "float32"),
    kv_dtype=(None, *KV_DTYPES),
    one_scale=(False, True),
    soft_cap=(None, 30.0),
    sliding_window=(None, 100),
    alibi_slopes=(False, True),
    sinks=(False, True),
    return_lse=(False, True),
    sm_scale=(None, -0.1),
    fixed_split_size=(None, 256),
)
MERGE = {"decode": "paged_decode_merge", "ragged": "ragged_paged_attention_merge"}


def lowered(function, row):
    """The text of a call with the levels of a row."""
    num_q_heads = row["group"] * row["num_kv_heads"]
    options = options_of(row, num_q_heads) | dict(sm_scale=row["sm_scale"])
    if function == "cascade":
        loop = dict(block_k=32, num_programs=200, num_warps=4, num_stages=2)
        loop["fixed_split_size"] = row["fixed_split_size"]
        options["config"] = pp.DecodeConfig(**loop)
        options["prefix_config"] = pp.RaggedConfig(**loop, block_q=64)
    else:
        options["fixed_split_size"] = row["fixed_split_size"]
    if "mask" in row:
        tree = np.ones((4, 8, 8), bool) if row["mask"] == "tree" else None
        options |= dict(tree_mask=tree, causal=row["mask"] is not None)
    names = ("num_kv_heads", "head_dim", "page_size", "dtype", "kv_dtype", "one_scale")
    sizes = {name: row[name] for name in names} | dict(num_q_heads=num_q_heads, max_kv_len=512)
    how = dict(function=function, implementation="triton", num_tokens=row.get("num_tokens", 0))
    return Program(**how, **sizes, options=options).text()


@pytest.mark.parametrize("row", few_with_every_level(pairwise(**LEVELS)), ids=named)
def test_decode_lowers_for_cuda(row):
    text = lowered("decode", row)
    assert "paged_decode" in text and "paged_decode_merge" in text


RAGGED = pairwise(num_tokens=(6, 50, 600), mask=("causal", "tree", None), **LEVELS)


@pytest.mark.parametrize("row", few_with_every_level(RAGGED), ids=named)
def test_ragged_lowers_for_cuda(row):
    text = lowered("ragged", row)
    assert "ragged_paged_attention" in text and "ragged_paged_attention_merge" in text


# Cascade runs the kernels of the other two; its own code depends on shapes little.
CASCADE = pairwise(**LEVELS)[::8]


@pytest.mark.parametrize("row", [CASCADE[0], *slow(CASCADE[1:])], ids=named)
def test_cascade_lowers_for_cuda(row):
    text = lowered("cascade", row)
    assert "ragged_paged_attention" in text and "paged_decode" in text


@pytest.mark.parametrize(
    ("function", "num_seqs", "num_tokens"),
    [("decode", 1, 0), ("decode", 300, 0), ("ragged", 1, 1), ("ragged", 300, 5000)],
)
def test_lowers_for_any_number_of_rows(function, num_seqs, num_tokens):
    sizes = dict(num_seqs=num_seqs, num_tokens=num_tokens, max_kv_len=2048)
    text = Program(function=function, implementation="triton", **sizes).text()
    assert MERGE[function] in text


def attention_kernel(lowered):
    """The Triton module of attention in a call, which may have a plan before it, as text."""
    kernels = []

    def visit(op):
        if op.name == "stablehlo.custom_call" and "triton" in str(
            op.attributes["call_target_name"]
        ):
            config = ir.DictAttr(op.attributes["mhlo.backend_config"])
            if "plan" not in str(config["name"]):
                kernels.append(config["ir"])
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir().operation.walk(visit)
    with ir.Context() as context:
        triton_dialect.dialect.register_dialect(context)
        module = ir.Module.parse(ir.StringAttr(kernels[0]).value_bytes)
        return module.operation.get_asm(enable_debug_info=False)


@pytest.mark.parametrize("function", ["decode", "ragged"])
@pytest.mark.parametrize(
    ("num_pages", "kv_dtype", "wide"),
    [
        (2**17, None, False),
        (2**17 + 1, None, True),  # more than 2^32 bytes, of 16-bit elements
        (2**17 + 1, "int8", False),  # more than 2^31: out of reach for a 32-bit element offset
        (2**18, "int8", False),  # 2^32 bytes, the most for which Pallas computes with 32 bits
        (2**18 + 1, "int8", True),
    ],
)
def test_offsets_reach_all_elements_of_a_large_pool(num_pages, kv_dtype, wide, function):
    sizes = dict(num_pages=num_pages, kv_dtype=kv_dtype, max_kv_len=512)
    num_tokens = 40 if function == "ragged" else 0
    program = Program(function=function, implementation="triton", num_tokens=num_tokens, **sizes)
    text = attention_kernel(program.lower())
    if kv_dtype:
        assert "!tt.ptr<i16>" in text and "!tt.ptr<i8>" not in text  # offsets count 16-bit words
    assert ("i64" in text) == wide
    assert wide or 8 * num_pages * 16 * 128 // 2 <= 2**31


SIZES = dict(
    num_q_heads=32, num_kv_heads=8, head_dim=128, max_kv_len=4096, num_seqs=64, itemsize=2,
    num_sms=132,
)  # fmt: skip


def decode_of(**sizes):
    return decode_config(**dict(page_size=16) | SIZES | sizes)


@pytest.mark.parametrize("group", [1, 4, 7, 32, 128])
def test_the_heuristic_config_fits_in_shared_memory(group):
    for head_dim, itemsize in itertools.product((16, 80, 256, 512), (2, 4)):
        config = decode_of(num_q_heads=8 * group, head_dim=head_dim, itemsize=itemsize)
        # Two stages of a K and a V tile, for every program that shares the SM's 227 KB.
        padded = 1 << (head_dim - 1).bit_length()
        tiles = config.num_stages * 2 * config.block_k * padded * itemsize
        per_sm = -(-config.num_programs // 132)
        assert per_sm * tiles <= 4 * 64 * 1024
        assert config.num_programs <= 4 * 132


def test_a_block_of_one_page_gets_fewer_warps():
    assert [decode_of(page_size=n).num_warps for n in (32, 64, 128)] == [4, 2, 4]


@pytest.mark.parametrize(
    ("num_seqs", "head_dim", "block_k"),
    [(8, 64, 32), (9, 64, 128), (1, 64, 128), (8, 128, 64)],
    ids=["few", "more", "one", "wide"],
)
def test_a_few_rows_of_narrow_heads_get_small_blocks(num_seqs, head_dim, block_k):
    config = decode_of(head_dim=head_dim, num_seqs=num_seqs)
    assert config.block_k == block_k and config.num_programs <= 8 * num_seqs * 4096 // block_k


def test_few_tokens_get_few_programs():
    config = decode_of(num_q_heads=8, num_kv_heads=2, max_kv_len=128, num_seqs=1)
    assert config.num_programs == 2 * (128 // config.block_k)  # of 2 KV heads


@pytest.mark.parametrize(
    ("num_seqs", "num_tokens", "max_kv_len", "head_dim", "block_q"),
    [
        (1, 1024, 1024, 128, 64),  # fewer than 3 tiles of 128 rows for each SM
        (1, 1536, 1536, 128, 64),
        (1, 2048, 2048, 128, 128),
        (1, 512, 8192, 128, 128),  # on a long prefix
        (4, 128, 32, 128, 128),  # a sequence fits one tile
        (4, 512, 128, 256, 128),
        (4, 512, 128, 320, 64),  # more would not fit
    ],
)
def test_short_prompts_get_smaller_tiles(num_seqs, num_tokens, max_kv_len, head_dim, block_q):
    sizes = dict(num_tokens=num_tokens, head_dim=head_dim, max_kv_len=max_kv_len, num_seqs=num_seqs)
    assert ragged_config(**SIZES | sizes).block_q == block_q


@pytest.mark.parametrize(
    ("change", "block_k"),
    [
        ({}, 64),
        (dict(max_kv_len=8192), 128),
        (dict(num_seqs=2, head_dim=32), 128),
        (dict(head_dim=256), 32),
    ],
)
def test_a_short_row_that_is_written_too_has_smaller_blocks(change, block_k):
    sizes = dict(head_dim=64, page_size=64, max_kv_len=1216, num_seqs=1) | change
    config = writing_decode_config(decode_of(**sizes), **SIZES | sizes)
    assert config.block_k == block_k
    assert change or config.num_programs == 19 * 8


@pytest.mark.parametrize("num_seqs", [1, 3, 64, 1000])
def test_the_sides_of_the_merge_tile_are_powers_of_two(num_seqs):
    for num_heads, fixed_split in itertools.product((1, 7, 32, 128), (False, True)):
        sizes = dict(num_heads=num_heads, head_dim=80, num_programs=66)
        tile = decode_merge_config(num_seqs=num_seqs, **sizes, fixed_split=fixed_split)
        assert all(n > 0 and n & (n - 1) == 0 for n in dataclasses.astuple(tile))
        assert tile.block_s * tile.block_h * tile.block_d <= 2**14


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "block_q"),
    [
        ("9.0", jnp.float32, 256, 128),
        ("8.0", jnp.float32, 256, 64),
        ("8.6", jnp.float32, 256, 32),
        ("8.9", jnp.bfloat16, 256, 64),
        ("12.0", jnp.bfloat16, 128, 128),
    ],
)
def test_tiles_of_queries_fit_into_the_shared_memory_of_the_device(
    capability, dtype, head_dim, block_q
):
    device = dataclasses.replace(A100, compute_capability=capability)
    types = dict(dtype=jnp.dtype(dtype), kv_dtype=jnp.dtype(dtype))
    call = dataclasses.replace(PREFILL, device=device, head_dim=head_dim, **types)
    assert triton.bind(call, interpret=False).keywords["config"].block_q == block_q


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_triton_decodes_quantized_pages_on_hopper_although_mosaic_can(kv_dtype, any_jax):
    call = dataclasses.replace(DECODE, kv_dtype=jnp.dtype(kv_dtype))
    assert BACKENDS["mosaic_gpu"].why_not(call) is None
    assert dispatch.best_implementation(call) == "triton"


@pytest.mark.parametrize("call", [DECODE, PREFILL], ids=["decode", "ragged"])
def test_float8_needs_compute_capability_8_9(call):
    for capability, takes in (("8.0", False), ("8.6", False), ("8.9", True), ("12.0", True)):
        device = dataclasses.replace(A100, compute_capability=capability)
        call = dataclasses.replace(call, device=device, kv_dtype=jnp.dtype(jnp.float8_e4m3fn))
        otherwise = "xla" if mosaic_support.why_not_jax() else "mosaic_sm80"
        assert dispatch.best_implementation(call) == ("triton" if takes else otherwise)
        if not takes:
            with pytest.raises(NotImplementedError, match=f"8.9 .*float8_e4m3fn, not {capability}"):
                dispatch.resolve(call, "triton")
        int8 = dataclasses.replace(call, kv_dtype=jnp.dtype(jnp.int8))
        assert dispatch.best_implementation(int8) == "triton"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_quantized_blocks_have_as_many_tokens_and_more_stages(head_dim):
    one, two = (decode_of(head_dim=head_dim, itemsize=n) for n in (1, 2))
    assert one == dataclasses.replace(two, num_stages=3, num_warps=one.num_warps)
    assert one.num_warps <= two.num_warps
    sizes = SIZES | dict(head_dim=head_dim, num_tokens=4096)
    assert ragged_config(**sizes | dict(itemsize=1)) == ragged_config(**sizes)
