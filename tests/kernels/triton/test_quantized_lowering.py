"""The Triton kernels on int8 and fp8 pages lower for CUDA, with offsets that reach every page."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax._src.lib import triton
from jax._src.lib.mlir import ir

import pallas_paged as pp
from pallas_paged import dispatch
from pallas_paged.dispatch import BACKENDS
from pallas_paged.kernels.mosaic import support as mosaic_support
from pallas_paged.kernels.triton.config import decode_config, ragged_config
from tests.support.devices import A100, lower_for_cuda
from tests.support.lowered_options import LOOP, lowered_options
from tests.support.marks import slow
from tests.support.static_calls import DECODE, PREFILL

KV_DTYPES = [jnp.int8, jnp.float8_e4m3fn]
DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32]


def lower(heads, kv_dtype, dtype, *, num_tokens=None, num_pages=1000, per_tensor=False, **call):
    """A decode call, or with num_tokens a ragged one, lowered for CUDA."""
    num_q_heads, num_kv_heads, head_dim = heads
    pages = jax.ShapeDtypeStruct((num_kv_heads, num_pages, 16, head_dim), kv_dtype)
    scales = jax.ShapeDtypeStruct(() if per_tensor else pages.shape[:3], jnp.float32)
    shapes = [
        jax.ShapeDtypeStruct((num_tokens or 4, num_q_heads, head_dim), dtype),
        pages,
        pages,
        jax.ShapeDtypeStruct((4, 32), jnp.int32),
        jax.ShapeDtypeStruct((4,), jnp.int32),
    ]
    function = pp.paged_attention
    if num_tokens is not None:
        function = pp.ragged_paged_attention
        shapes.append(jax.ShapeDtypeStruct((5,), jnp.int32))

    def attend(k_scales, v_scales, *arrays):
        return function(*arrays, k_scales=k_scales, v_scales=v_scales, **call)

    return lower_for_cuda(attend, scales, scales, *shapes)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=lambda x: x.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: x.__name__)
class TestLowersForCuda:
    @pytest.mark.parametrize(
        "heads", [(6, 2, 80), *slow([((32, 8, 128),), ((7, 1, 16),)])], ids=str
    )
    def test_decode(self, heads, kv_dtype, dtype):
        text = lower(heads, kv_dtype, dtype).as_text()
        assert "paged_decode" in text and "paged_decode_merge" in text

    @pytest.mark.parametrize("num_tokens", [600, *slow([6])])
    def test_ragged(self, num_tokens, kv_dtype, dtype):
        text = lower((6, 2, 80), kv_dtype, dtype, num_tokens=num_tokens).as_text()
        assert "ragged_paged_attention" in text

    @pytest.mark.parametrize("per_tensor", [False, *slow([True])])
    def test_with_every_option(self, kv_dtype, dtype, per_tensor):
        call = lowered_options(6, 4)[-1] | dict(per_tensor=per_tensor)
        config = pp.RaggedConfig(**LOOP, block_q=64, fixed_split_size=128)
        text = lower((6, 2, 80), kv_dtype, dtype, num_tokens=50, config=config, **call).as_text()
        assert "ragged_paged_attention" in text
        call.pop("tree_mask")
        config = pp.DecodeConfig(**LOOP, fixed_split_size=128)
        assert "paged_decode" in lower((6, 2, 80), kv_dtype, dtype, config=config, **call).as_text()


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
        triton.dialect.register_dialect(context)
        module = ir.Module.parse(ir.StringAttr(kernels[0]).value_bytes)
        return module.operation.get_asm(enable_debug_info=False)


@pytest.mark.parametrize("num_tokens", [None, 40], ids=["decode", "ragged"])
@pytest.mark.parametrize(
    ("num_pages", "wide"),
    [
        (2**17 + 1, False),  # more than 2^31 elements: out of reach for a 32-bit element offset
        (2**18, False),  # 2^32 bytes, the most for which Pallas computes offsets with 32 bits
        (2**18 + 1, True),
    ],
)
def test_offsets_reach_all_elements_of_a_large_pool(num_pages, wide, num_tokens):
    heads = (32, 8, 128)
    lowered = lower(heads, jnp.int8, jnp.bfloat16, num_pages=num_pages, num_tokens=num_tokens)
    text = attention_kernel(lowered)
    assert "!tt.ptr<i16>" in text and "!tt.ptr<i8>" not in text  # offsets count 16-bit words
    assert ("i64" in text) == wide
    assert wide or 8 * num_pages * 16 * 128 // 2 <= 2**31


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=lambda x: x.__name__)
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


def test_quantized_blocks_have_as_many_tokens_and_more_stages():
    sizes = dict(num_q_heads=32, num_kv_heads=8, max_kv_len=4096, num_seqs=64, num_sms=132)
    for head_dim in (64, 128, 256):
        one, two = (
            decode_config(**sizes, head_dim=head_dim, page_size=16, itemsize=n) for n in (1, 2)
        )
        assert one == dataclasses.replace(two, num_stages=3, num_warps=one.num_warps)
        assert one.num_warps <= two.num_warps
        one, two = (
            ragged_config(**sizes, head_dim=head_dim, num_tokens=4096, itemsize=n) for n in (1, 2)
        )
        assert one == two
