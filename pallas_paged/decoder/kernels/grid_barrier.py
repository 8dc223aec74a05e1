"""A barrier of all programs of a kernel, by counters in device memory.

Programs that have waited see all stores from before an arrival, by loads and by copies of the
tensor memory accelerator.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.mosaic import ops

_FENCE = "fence.proxy.async.global;"
_MAX_POLLS = 1 << 26  # about a minute


def arrive(counter: Any, *, interpret: bool) -> None:
    """Add 1 to a counter i32[1], after all stores of this warpgroup.

    Interpreted kernels have one program, which need not wait for itself.
    """
    if interpret:
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def add(_, counter):
        utils.inline_ptx(_FENCE, has_side_effects=True)
        utils.warpgroup_barrier()
        with utils.when(utils.single_thread_predicate(scope=utils.ThreadSubset.WARPGROUP)):
            utils.inline_ptx(
                "red.release.gpu.global.add.u32 [$0], 1;",
                utils.memref_ptr(counter),
                has_side_effects=True,
            )

    add(counter)


def wait_for_arrivals(counter: Any, count: int, *, interpret: bool) -> None:
    """Wait until a counter i32[1] is `count`; all threads of a warpgroup call this."""
    if interpret:
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def wait(_, counter):
        with utils.when(utils.single_thread_predicate(scope=utils.ThreadSubset.WARPGROUP)):
            utils.inline_ptx(
                "{ .reg .pred p; .reg .b32 found, polls; mov.u32 polls, 0; again:"
                f" add.u32 polls, polls, 1; setp.gt.u32 p, polls, {_MAX_POLLS}; @p trap;"
                " ld.acquire.gpu.global.b32 found, [$0];"
                f" setp.lt.u32 p, found, {count}; @p bra again; }}",
                utils.memref_ptr(counter),
                has_side_effects=True,
            )
        utils.warpgroup_barrier()
        utils.inline_ptx(_FENCE, has_side_effects=True)

    wait(counter)


def fence_async_copies(*, interpret: bool) -> None:
    """Fence the async proxy: later TMA copies of this warpgroup see earlier stores."""
    ops.inline_ptx(_FENCE, interpret=interpret)
