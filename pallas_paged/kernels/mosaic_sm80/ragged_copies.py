"""Copies between device memory and shared memory for the ragged kernel, row by row.

The keys of a block are on pages anywhere in memory, so each thread copies chunks of 16 bytes of
rows (`cp.async`), and finds their places in shared memory. Rows of one-byte K and V become 16-bit
rows after their arrival: a thread converts the chunks that it copied, so it need not wait for
others.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.mosaic import ops as mosaic_ops
from pallas_paged.kernels.mosaic_sm80 import ops
from pallas_paged.kernels.mosaic_sm80.emitter import CHUNK, THREADS, WARPGROUP, Emitter
from pallas_paged.kernels.mosaic_sm80.ops import SCALAR


@dataclasses.dataclass(frozen=True, kw_only=True)
class Places:
    """Strides of the tokens of a sequence: multipliers of page and of place on the page."""

    page_size: int  # tokens of a page, a power of two
    page: int  # from one to the next
    token: int  # from one to the next


def find_keys(
    table: Any,  # i32[N], of one sequence
    places: list[Places],
    first: Any,  # the thread's key is `first` plus its index
    *,
    low: Any,
    high: Any,
    interpret: bool,
) -> list[jax.Array]:
    """Return i32`[128]` for each of `places`: where the keys from `first` are.

    Keys that must not be read, outside `[low, high]`, are replaced by the next one that may be.
    """
    bits = places[0].page_size.bit_length() - 1
    if interpret:
        keys = jnp.clip(first + jnp.arange(WARPGROUP), low, high)
        page = table[...][keys >> bits]
        return [page * x.page + (keys & (x.page_size - 1)) * x.token for x in places]
    result = plgpu.ShapeDtypeStruct((WARPGROUP,), jnp.dtype(jnp.int32), layout=THREADS)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR), return_type=[result] * len(places)
    )
    def find(_, table, first, low, high):
        emit = Emitter()
        first, low, high = map(emit.scalar, (first, low, high))
        key = emit.clip(emit.add(first, emit.thread()), low, high)
        offset = emit.mul(emit.wide(emit.div(key, 1 << bits)), 4)
        page = emit.ptx("ld.global.b32 $0, [$1];", emit.address(table, offset), reads=True)
        token = emit.rem(key, 1 << bits)
        found = [emit.add(emit.mul(page, x.page), emit.mul(token, x.token)) for x in places]
        return [emit.array(x) for x in found]

    return find(table, *ops.scalars(first, low, high))


def put(ref: Any, x: jax.Array, *, interpret: bool) -> None:
    """Store the first values of i32`[128]` from `find_keys` to a ref i32`[K]` to shared memory."""
    size = ref.shape[0]
    if interpret:
        ref[...] = x[:size]
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), THREADS))
    def store(_, ref, x):
        emit = Emitter()
        thread = emit.thread()
        value, address = emit.value(x), emit.address(ref, emit.mul(thread, 4))
        emit.when(thread, size, lambda: emit.store_word(address, value))

    store(ref, x)


def wait_for_own_copies(*, interpret: bool) -> None:
    """Wait for all copies that the thread has started; others see them after a barrier."""
    mosaic_ops.inline_ptx("cp.async.wait_all;", interpret=interpret)


def program_barrier(num_warpgroups: int) -> None:
    """Wait for all threads of the program."""
    # The compiler uses barriers 0 to 2.
    mosaic_ops.inline_ptx(f"bar.sync 7, {num_warpgroups * WARPGROUP};")


def init_turns(turns: Any, warpgroup: Any, *, interpret: bool) -> None:
    """Initialize the barrier i32`[2]` of `take_turns`; other threads see it after a barrier."""
    if interpret:
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))
    def init(_, turns, warpgroup):
        emit = Emitter()
        thread = emit.add(emit.mul(emit.scalar(warpgroup), WARPGROUP), emit.thread())
        at = emit.address(turns, emit.constant(0))
        num_warps = 2 * WARPGROUP // 32
        emit.when(
            thread, 1, lambda: emit.effect(f"mbarrier.init.shared.b64 [$0], {num_warps};", at)
        )

    init(turns, *ops.scalars(warpgroup))


def take_turns(turns: Any, parity: Any, *, interpret: bool) -> None:
    """Wait until both warpgroups of a program are here, or at another call.

    `bar.sync` does the same, but compute-sanitizer takes two places of the code for an error.

    Args:
        parity: 0 for the first meeting, 1 for the second one and so on, in turn.
    """
    if interpret:
        plgpu.barrier_arrive(turns)
        plgpu.barrier_wait(turns)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))
    def meet(_, turns, parity):
        emit = Emitter()
        # Since 9.0 a thread sleeps in this instruction.
        wait = "try_wait" if utils.get_arch().major >= 9 else "test_wait"
        emit.effect(
            "{ .reg .pred p, first; .reg .b64 state; .reg .b32 lane;"
            " mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; bar.warp.sync 0xffffffff;"
            " @first mbarrier.arrive.shared.b64 state, [$0];"
            f" WAIT: mbarrier.{wait}.parity.shared.b64 p, [$0], $1; @!p bra WAIT;"
            " bar.warp.sync 0xffffffff; }",
            emit.address(turns, emit.constant(0)),
            emit.scalar(parity),
        )

    meet(turns, *ops.scalars(parity))


def gather_values(to: Any, source: Any, places: Any, base: Any, *, interpret: bool) -> None:
    """Start the copy of f32 `source[base + places]`, places i32`[K]`, to a ref f32`[K]`."""
    size = to.shape[0]
    if interpret:
        to[...] = source[...].reshape(-1)[base + places[...]]
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), SCALAR))
    def gather(_, to, source, places, base):
        emit = Emitter()
        thread = emit.thread()
        offset = emit.mul(thread, 4)

        def copy():
            index = emit.add(emit.load_word(emit.address(places, offset)), emit.scalar(base))
            place = emit.address(source, emit.mul(emit.wide(index), 4))
            emit.copy(emit.address(to, offset), place, size=4)

        emit.when(thread, size, copy)

    gather(to, source, places, *ops.scalars(base))


def gather_rows(
    to: Any,  # [R, D + pad] in shared memory
    source: Any,
    rows: Any,  # i32[R] in shared memory
    base: Any,
    *,
    unit: int,
    row_bytes: int,
    interpret: bool,
) -> None:
    """Start the copies of rows that begin `(base + rows) * unit` bytes into `source`."""
    num_rows, pitch = to.shape
    size = jnp.dtype(to.dtype).itemsize
    if interpret:
        first = (base + rows[...]) * (unit // size)
        element = first[:, None] + jnp.arange(row_bytes // size)
        found = source[...].reshape(-1)[element]
        to[...] = jnp.pad(found, ((0, 0), (0, pitch - found.shape[1])))
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), SCALAR))
    def gather(_, to, source, rows, base):
        emit = Emitter()
        row, chunk, firsts, when = share_chunks(emit, num_rows, row_bytes // CHUNK)
        column = emit.mul(chunk, CHUNK)
        start = emit.mul(emit.wide(emit.scalar(base)), unit)
        start = emit.address(source, emit.add(start, emit.wide(column)))
        target = emit.address(to, emit.add(emit.mul(row, pitch * size), column))
        places = emit.address(rows, emit.mul(row, 4))

        def copy():
            # All loads come first: none goes past a copy, which writes shared memory.
            found = [emit.load_word(places, offset=4 * first) for first in firsts]
            for first, place in zip(firsts, found, strict=True):
                emit.copy_chunk(target, start, place, unit, offset=first * pitch * size)

        when(copy)

    gather(to, source, rows, *ops.scalars(base))


def share_chunks(
    emit: Emitter, num_rows: int, num_chunks: int
) -> tuple[Any, Any, range, Callable[[Callable[[], None]], None]]:
    """Divide rows of chunks among the threads; return `(row, chunk, firsts, when)`.

    The thread has `chunk` of the rows `first + row` for all `firsts`, within a body that it gives
    to `when`.
    """
    width = pl.next_power_of_2(num_chunks)
    row, chunk = emit.div(emit.thread(), width), emit.rem(emit.thread(), width)
    step = WARPGROUP // width

    def when(body):
        if num_chunks < width:
            body = functools.partial(emit.when, chunk, num_chunks, body)
        if num_rows < step:
            body = functools.partial(emit.when, row, num_rows, body)
        body()

    return row, chunk, range(0, num_rows, step), when


def convert_rows(to: Any, source: Any, *, head_dim: int, interpret: bool) -> None:
    """Convert the chunks of one-byte rows `[K, D]` that the thread copied to rows `[K, D + pad]`.

    The copies must have arrived; other threads see the rows after a barrier.
    """
    num_rows, pitch = to.shape
    if interpret:
        to[...] = jnp.pad(source[...].astype(to.dtype), ((0, 0), (0, pitch - head_dim)))
        return
    codes = _pair_codes(jnp.dtype(source.dtype), jnp.dtype(to.dtype))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def convert(_, to, source):
        emit = Emitter()

        row, chunk, firsts, when = share_chunks(emit, num_rows, head_dim // CHUNK)
        found = emit.add(emit.mul(row, head_dim), emit.mul(chunk, CHUNK))
        found = emit.address(source, found)
        target = emit.add(emit.mul(row, 2 * pitch), emit.mul(chunk, 2 * CHUNK))
        target = emit.address(to, target)

        def convert_all():
            for first in firsts:
                words = emit.load_chunk(found, offset=first * head_dim)
                pairs = [emit.ptx(code, word) for word in words for code in codes]
                for i in (0, 1):
                    offset = first * 2 * pitch + i * CHUNK
                    emit.store_chunk(target, pairs[4 * i : 4 * i + 4], offset=offset)

        when(convert_all)

    convert(to, source)


# Two of the four bytes of $1 become two 16-bit elements, by instructions that sm_80 has.
_LOW = "prmt.b32 t, $1, 0, %s;", ("0x4140", "0x4342")  # into the low bytes of 16 bits
_HIGH = "prmt.b32 t, $1, 0, %s;", ("0x1404", "0x3424")  # into the high bytes
_CONVERSIONS = {
    # 128 + the low 7 bits, minus 128 or, for negative values, 256.
    ("int8", "bfloat16"): (
        *_LOW,
        "and.b32 s, t, 0x00800080; or.b32 s, s, 0x43004300; and.b32 t, t, 0x007f007f;"
        " or.b32 t, t, 0x43004300; mov.b32 c, 0xbf80bf80; fma.rn.bf16x2 $0, s, c, t;",
    ),
    # The byte with its sign flipped is a mantissa: 1024 + 128 + x.
    ("int8", "float16"): (
        *_LOW,
        "xor.b32 t, t, 0x00800080; or.b32 t, t, 0x64006400; mov.b32 c, 0x64806480;"
        " sub.f16x2 $0, t, c;",
    ),
    # Exponent and mantissa to their places; a product accounts for the other bias.
    ("float8_e4m3fn", "bfloat16"): (
        *_HIGH,
        "and.b32 s, t, 0x80008000; and.b32 t, t, 0x7f007f00; shr.b32 t, t, 4; or.b32 t, t, s;"
        " mov.b32 c, 0x7b807b80; mov.b32 s, 0x80008000; fma.rn.bf16x2 $0, t, c, s;",
    ),
    ("float8_e4m3fn", "float16"): (
        *_HIGH,
        "and.b32 s, t, 0x80008000; and.b32 t, t, 0x7f007f00; shr.b32 t, t, 1; or.b32 t, t, s;"
        " mov.b32 c, 0x5c005c00; mul.f16x2 $0, t, c;",
    ),
}


def _pair_codes(source: Any, to: Any) -> list[str]:
    """Return the PTX that makes the first and the second pair of a word."""
    select, pairs, code = _CONVERSIONS[source.name, to.name]
    return [f"{{ .reg .b32 t, s, c; {select % pair} {code} }}" for pair in pairs]
