"""Int8 and fp8 K/V as the Mosaic decode kernel reads them: bytes in memory, f16 in registers.

wgmma takes operand A from registers, and there K and V^T become f16, which holds every int8 and
every float8_e4m3fn exactly. The scales of tokens multiply logits and probabilities, which are fewer
than the elements of K and V. Their powers of two go to the exponent of the softmax, because f16 has
a small range.

A thread reads words of 2 or 4 neighbours along head_dim. For S^T = K Q^T their order does not
matter, as long as the queries have the same. For V^T a thread needs pairs of tokens, of 2 or 4 rows
of V^T: element d of a word is a row of its own, and `unpermuted` puts the rows of the output in
order.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic_sm90.config import MosaicDecodeConfig
from pallas_paged.kernels.mosaic_sm90.ring import Pool, Ring

# Pallas would surround every store with barriers. The kernel has the barriers that it needs: P is
# written after all warps met in `reduce_columns`, and read after `commit_smem`.
COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
)
# Of a thread that copies and of one that attends, where pairs of warpgroups share a block.
REGISTERS = {2: (56, 200), 3: (48, 112), 4: (40, 88)}


def pool_of(arrays: Arrays) -> Pool:
    """Return the pages of a call as int8, whose bits the kernel converts; nothing is copied."""
    kv_pages = arrays.kv_pages
    pages = [x if x.dtype == jnp.int8 else lax.bitcast_convert_type(x, jnp.int8) for x in kv_pages]
    return dataclasses.replace(Pool.of(arrays), k=pages[0], v=pages[-1])


def ring_types(
    config: MosaicDecodeConfig, *, head_dim: int, page_size: int, scales_of_tokens: bool
) -> Ring:
    """Return the types of a ring of bytes and, if tokens have their own, of their scales."""
    shape = (config.num_pairs * config.num_stages, config.block_k, head_dim)
    block = plgpu.SMEM(shape, jnp.int8, transforms=swizzled(head_dim))
    ring = Ring.types(
        dataclasses.replace(config, num_pairs=1),
        head_dim=head_dim,
        page_size=page_size,
        dtype=jnp.int8,
        num_consumers=1,
    )
    barriers = {
        name: dataclasses.replace(getattr(ring, name), num_barriers=shape[0])
        for name in ("k_full", "v_full", "k_free", "v_free")
    }
    ring = dataclasses.replace(ring, k=block, v=block, num_pairs=config.num_pairs, **barriers)
    if not scales_of_tokens:
        return ring
    full = dataclasses.replace(ring.k_full, num_arrivals=ring.k_full.num_arrivals + 1)
    return dataclasses.replace(ring, k_full=full, scales=plgpu.SMEM((2, *shape[:2]), jnp.float32))


def swizzle_bytes(head_dim: int) -> int:
    """Return the bytes of the swizzled rows in shared memory that hold rows of bytes."""
    return next(size for size in (128, 64, 32) if head_dim % size == 0)


def swizzled(head_dim: int) -> tuple[Any, ...]:
    """Return the layout of rows of bytes in shared memory."""
    size = swizzle_bytes(head_dim)
    return plgpu.TilingTransform((8, size)), plgpu.SwizzleTransform(size)


def _word_bytes(head_dim: int) -> int:
    return 4 if head_dim % 128 == 0 else 2


def _words_layout(head_dim: int) -> Any:
    """Return the layout of V `[T, D]` in registers: words of neighbours along head_dim."""
    size = _word_bytes(head_dim)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((16, 32 * size), (8, 8 * size), (2, size))),
        warp_dims=(-5,),
        lane_dims=(-3, -4),
        vector_dim=-1,
    )


def _out_layout(head_dim: int) -> Any:
    """Return the layout of the output `[D, N]` in registers, in the order of `_words_layout`."""
    size = _word_bytes(head_dim)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((32 * size, 8), (8 * size, 8), (size, 2), (size, 1))),
        warp_dims=(-8,),
        lane_dims=(-6, -5),
        vector_dim=-2,
    )


def to_f16(x: jax.Array, kv_dtype: Any) -> jax.Array:
    """Return the elements of bytes as f16, for interpreted kernels."""
    if kv_dtype != jnp.int8:
        x = lax.bitcast_convert_type(x, kv_dtype)
    return x.astype(jnp.float16)


def keys(ref: Any, kv_dtype: Any, *, interpret: bool) -> jax.Array:
    """Return K `[T, D]` of bytes in shared memory as operand A, f16.

    Its columns are permuted as the rows of `queries`, except in interpreted kernels.
    """
    if interpret:
        return to_f16(ref[...], kv_dtype)
    load: Any = plgpu.load  # its signature differs between versions of JAX
    x = load(ref, layout=plgpu.Layout.WGMMA_8BIT)
    convert = _KEYS_TO_F16[jnp.dtype(kv_dtype).name]
    out = plgpu.ShapeDtypeStruct(x.shape, jnp.float16, layout=ops.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA_8BIT,), return_type=out)
    def converted(_, x):
        from jax.experimental.mosaic.gpu import utils

        _, i32, pair = _types()
        num_tokens, head_dim = x.shape
        words = x.registers.reshape(num_tokens // 64, head_dim // 16, 2)
        registers = np.empty((*words.shape[:2], 2, 2), dtype=object)
        for t, d, row in np.ndindex(*words.shape):
            word = utils.bitcast(words[t, d, row], i32)
            found = utils.inline_ptx(convert, word, result_types=(i32, i32))
            for half, register in enumerate(found):
                registers[t, d, half, row] = utils.bitcast(register, pair)
        wgmma = ops.WGMMA.to_mgpu()
        registers = registers.reshape(wgmma.registers_shape(x.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=wgmma, _is_signed=None)

    return converted(x)


def queries(ref: Any, kv_dtype: Any, *, interpret: bool) -> jax.Array:
    """Return Q^T `[D, N]` from plain rows `[N, D]` in shared memory, permuted as `keys`."""
    ref = ref.transpose((1, 0))
    if interpret:
        return ref[...]
    # Of 16 elements a thread has 4 neighbours of K, which are columns 2c, 2c + 1, 2c + 8 and
    # 2c + 9 of operand A. Of int8, the first and the third make a pair.
    by_columns = kv_dtype == jnp.int8
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((64, 8), (16, 8), (4, 2), (2, 1))),
        warp_dims=(-8,),
        lane_dims=(-6, -4 if by_columns else -2, -5),
        vector_dim=-1,
    )
    x = ops.load(ref, layout)
    out = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=ops.WGMMA)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=out)
    def relabelled(_, x):
        from jax.experimental.mosaic.gpu import utils

        head_dim, num_columns = x.shape
        old = x.registers.reshape(head_dim // 64, num_columns // 8, 2, 2)
        old = old.swapaxes(2, 3) if by_columns else old  # [.., half of 16 rows, column]
        new = np.empty(old.shape[:3], dtype=object)
        for i in np.ndindex(*new.shape):
            new[i] = utils.vector_concat(list(old[i]))
        wgmma = ops.WGMMA.to_mgpu()
        new = new.reshape(wgmma.registers_shape(x.shape))
        return mgpu.FragmentedArray(_registers=new, _layout=wgmma, _is_signed=x.is_signed)

    return relabelled(x)


def values(ref: Any, kv_dtype: Any, *, interpret: bool) -> jax.Array:
    """Return V^T `[D, T]` of the bytes `[T, D]` in shared memory as operand A, f16.

    Its rows are permuted, see `unpermuted`, except in interpreted kernels.
    """
    num_tokens, head_dim = ref.shape
    if interpret:
        return to_f16(ref[...], kv_dtype).T
    layout, size = _words_layout(head_dim), _word_bytes(head_dim)
    load: Any = plgpu.load
    x = load(ref, layout=layout)
    convert = _VALUES_TO_F16[jnp.dtype(kv_dtype).name]
    out = plgpu.ShapeDtypeStruct((head_dim, num_tokens), jnp.float16, layout=ops.WGMMA)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=out)
    def converted(_, x):
        from jax.experimental.mosaic.gpu import utils

        i16, i32, pair = _types()
        blocks = head_dim // (32 * size)
        words = x.registers.reshape(num_tokens // 16, blocks, 2, 2)
        registers = np.empty((blocks, size // 2, num_tokens // 16, 2, 2), dtype=object)
        for k, b, half in np.ndindex(num_tokens // 16, blocks, 2):
            tokens = [_word(w, size, i16, i32) for w in words[k, b, half]]
            for m in range(size // 2):
                found = utils.inline_ptx(convert[m], *tokens, result_types=(i32, i32))
                for row, register in enumerate(found):
                    registers[b, m, k, half, row] = utils.bitcast(register, pair)
        wgmma = ops.WGMMA.to_mgpu()
        registers = registers.reshape(wgmma.registers_shape((head_dim, num_tokens)))
        return mgpu.FragmentedArray(_registers=registers, _layout=wgmma, _is_signed=None)

    return converted(x)


def unpermuted(acc: jax.Array, *, interpret: bool) -> jax.Array:
    """Return the output f32`[D, N]` of a product with `values`, its rows in their order."""
    if interpret:
        return acc
    head_dim, num_columns = acc.shape
    size, layout = _word_bytes(head_dim), _out_layout(head_dim)
    out = plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(ops.WGMMA,), return_type=out)
    def relabelled(_, acc):
        from jax.experimental.mosaic.gpu import utils

        blocks, tiles = head_dim // (32 * size), num_columns // 8
        old = acc.registers.reshape(blocks, size // 2, tiles, 2)  # pairs of columns
        new = np.empty((blocks, tiles, 2), dtype=object)
        for b, n, column in np.ndindex(*new.shape):
            parts = [
                utils.vector_slice(old[b, m, n, row], slice(column, column + 1))
                for m in range(size // 2)
                for row in range(2)
            ]
            new[b, n, column] = utils.vector_concat(parts)
        target = layout.to_mgpu()
        new = new.reshape(target.registers_shape((head_dim, num_columns)))
        return mgpu.FragmentedArray(_registers=new, _layout=target, _is_signed=None)

    return relabelled(acc)


def _types() -> tuple[Any, Any, Any]:
    from jaxlib.mlir import ir

    i16, i32 = ir.IntegerType.get_signless(16), ir.IntegerType.get_signless(32)
    return i16, i32, ir.VectorType.get((2,), ir.F16Type.get())


def _word(register: Any, size: int, i16: Any, i32: Any) -> Any:
    """Return the bytes of a register as i32."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir.dialects import arith

    if size == 4:
        return utils.bitcast(register, i32)
    return arith.extui(i32, utils.bitcast(register, i16))


# A word to two pairs of f16. Of int8 the byte with its sign flipped makes a mantissa:
# 1024 + 128 + x.
_KEYS_TO_F16 = {
    "int8": """{ .reg .b32 x, y, b; mov.b32 b, 0x64806480; shr.b32 y, $2, 8;
lop3.b32 x, $2, 0x00ff00ff, b, 0x6a; lop3.b32 y, y, 0x00ff00ff, b, 0x6a;
sub.f16x2 $0, x, b; sub.f16x2 $1, y, b; }""",
    "float8_e4m3fn": """{ .reg .b16 x, y; mov.b32 {x, y}, $2;
cvt.rn.f16x2.e4m3x2 $0, x; cvt.rn.f16x2.e4m3x2 $1, y; }""",
}


# The words of two tokens to two pairs of f16, a token each, for the halves of the words.
_VALUES_TO_F16 = {
    "int8": [
        f"""{{ .reg .b32 x, y, b; mov.b32 b, 0x64806480;
prmt.b32 x, $2, $3, {0x4400 + 0x1111 * m:#06x};
prmt.b32 y, $2, $3, {0x5511 + 0x1111 * m:#06x};
lop3.b32 x, x, 0x00ff00ff, b, 0x6a; lop3.b32 y, y, 0x00ff00ff, b, 0x6a;
sub.f16x2 $0, x, b; sub.f16x2 $1, y, b; }}"""
        for m in (0, 2)
    ],
    "float8_e4m3fn": [
        f"""{{ .reg .b32 w; .reg .b16 x, y; prmt.b32 w, $2, $3, {order}; mov.b32 {{x, y}}, w;
cvt.rn.f16x2.e4m3x2 $0, x; cvt.rn.f16x2.e4m3x2 $1, y; }}"""
        for order in ("0x5140", "0x7362")
    ],
}
