"""The choice of experts for one row, which every program of a kernel makes for itself."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_paged.checks import pytree
from pallas_paged.decoder.kernels.operands import Routing
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.indexed import gather
from pallas_paged.kernels.mosaic_sm90.config import EXPERTS_UNIT, padded

SLOTS = 64  # rows of wgmma's layout: more than a row has experts
_LANES = 32  # of a warp, each with one chosen expert


@pytree
class ChoiceScratch:
    """Refs in shared memory, or their types. X is padded to a multiple of 128."""

    logits: Any  # f32[X]
    experts: Any  # i32[SLOTS], the chosen ones, and zeros behind them
    weights: Any  # f32[SLOTS]
    chosen: Any  # barrier, complete when `experts` and `weights` are there

    @classmethod
    def types(cls, num_experts: int) -> ChoiceScratch:
        """Return the types for this number of experts."""
        return cls(
            logits=plgpu.SMEM((padded(num_experts, EXPERTS_UNIT),), jnp.float32),
            experts=plgpu.SMEM((SLOTS,), jnp.int32),
            weights=plgpu.SMEM((SLOTS,), jnp.float32),
            chosen=plgpu.Barrier(),
        )


def logits_layout(num_experts: int) -> Any:
    """Return the layout of the logits of all experts."""
    return plgpu.Layout.WG_STRIDED((num_experts,), vec_size=1)


def load_bias(bias: Any, num_experts: int, *, interpret: bool) -> jax.Array:
    """Return f32`[X]`, the bias of the logits, from a ref to device memory; zeros for None."""
    layout = logits_layout(num_experts)
    if bias is None:
        return ops.full((num_experts,), 0.0, layout)
    place = jnp.minimum(ops.iota((num_experts,), 0, layout), bias.shape[0] - 1)
    return gather(bias, place, layout, interpret=interpret).astype(jnp.float32)


def choose(
    logits: jax.Array,
    scratch: ChoiceScratch,
    routing: Routing,
    *,
    real_experts: int,
    interpret: bool,
) -> None:
    """Choose experts by logits f32`[X]`, into shared memory.

    X is padded: the first `real_experts` can be chosen, also by logits that are NaN. Each warp
    finds the largest logit, and of equal ones the first, as often as a row has experts. So warps
    need not wait for one another.
    """
    is_real = ops.iota(logits.shape, 0, logits_layout(*logits.shape)) < real_experts
    logits = jnp.where(is_real, logits, -jnp.inf)
    k = routing.num_experts_per_tok
    scratch.logits[...] = logits
    plgpu.commit_smem()
    if interpret:
        values, experts = lax.top_k(scratch.logits[...], k)
        of_sum = values if routing.norm_topk_prob else scratch.logits[...]
        weights = jnp.exp(values - values[0]) / jnp.sum(jnp.exp(of_sum - values[0]))
        scratch.experts[...] = jnp.zeros(SLOTS, jnp.int32).at[:k].set(experts)
        scratch.weights[...] = jnp.zeros(SLOTS).at[:k].set(weights * routing.scaling)
    else:
        _choose(scratch.logits, scratch.experts, scratch.weights, routing)
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch.chosen)


def _choose(logits: Any, experts: Any, weights: Any, routing: Routing) -> None:
    num_keys = logits.shape[0] // _LANES  # of a lane

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)
    def run(_, logits, experts, weights):
        i32 = ir.IntegerType.get_signless(32)
        lane = arith.remui(utils.thread_idx(), utils.c(_LANES, i32))
        places = []
        for ref in (logits, experts, weights):
            address = llvm.ptrtoint(i32, utils.memref_ptr(ref))
            places.append(arith.addi(address, arith.muli(lane, utils.c(4, i32))))
        utils.inline_ptx(_program(num_keys, routing), *places, lane, has_side_effects=True)

    run(logits, experts, weights)


def _program(num_keys: int, routing: Routing) -> str:
    """Return PTX of a warp: addresses of the lane in logits, experts and weights, and the lane."""
    keys, k = range(num_keys), routing.num_experts_per_tok
    lines = [
        f".reg .b32 best, found, at, expert, key<{num_keys}>;",
        f".reg .f32 largest, value, sum, other, logit<{num_keys}>;",
        ".reg .pred p;",
    ]
    for i in keys:
        lines += [
            f"ld.shared.f32 logit{i}, [$0+{4 * _LANES * i}];",
            f"add.f32 logit{i}, logit{i}, 0f00000000;",  # no -0
            # As unsigned integers, of the same order.
            f"mov.b32 key{i}, logit{i};",
            f"shr.s32 at, key{i}, 31; or.b32 at, at, 0x80000000; xor.b32 key{i}, key{i}, at;",
        ]
    lines += ["mov.b32 expert, 0;", "mov.f32 value, 0fFF800000;"]
    for slot in range(k):
        lines.append("mov.b32 best, key0;")
        lines += [f"max.u32 best, best, key{i};" for i in keys[1:]]
        lines += ["redux.sync.max.u32 best, best, 0xffffffff;", "mov.b32 found, 0x7fffffff;"]
        for i in reversed(keys):
            lines.append(f"setp.eq.u32 p, key{i}, best; @p add.u32 found, $3, {_LANES * i};")
        lines.append("redux.sync.min.u32 found, found, 0xffffffff;")
        for i in keys:
            lines.append(f"add.u32 at, $3, {_LANES * i}; setp.eq.u32 p, at, found;")
            lines.append(f"@p mov.b32 key{i}, 0;")
        lines += [
            "shr.s32 at, best, 31; not.b32 at, at; or.b32 at, at, 0x80000000;",
            "xor.b32 best, best, at;",
            *(["mov.b32 largest, best;"] if slot == 0 else []),
            f"setp.eq.u32 p, $3, {slot}; @p mov.b32 expert, found; @p mov.b32 value, best;",
        ]

    def exponentiate(to: str, what: str) -> list[str]:
        log2_e = f"0f{_bits(math.log2(math.e)):08X}"
        return [
            f"sub.f32 {to}, {what}, largest; mul.f32 {to}, {to}, {log2_e};",
            f"ex2.approx.f32 {to}, {to};",
        ]

    if routing.norm_topk_prob:
        lines += [*exponentiate("value", "value"), "mov.f32 sum, value;"]
    else:
        lines.append("mov.f32 sum, 0f00000000;")
        for i in keys:
            lines += [*exponentiate("other", f"logit{i}"), "add.f32 sum, sum, other;"]
        lines += exponentiate("value", "value")
    for distance in (16, 8, 4, 2, 1):
        lines.append(f"shfl.sync.bfly.b32 other, sum, {distance}, 31, 0xffffffff;")
        lines.append("add.f32 sum, sum, other;")
    lines += [
        f"mul.f32 value, value, 0f{_bits(routing.scaling):08X}; div.full.f32 value, value, sum;",
        "st.shared.b32 [$1], expert; st.shared.f32 [$2], value;",
        f"mov.b32 expert, 0; st.shared.b32 [$1+{4 * _LANES}], expert;",
    ]
    return "\n".join(["{", *lines, "}"])


def _bits(number: float) -> int:
    return int(np.float32(number).view(np.uint32))
