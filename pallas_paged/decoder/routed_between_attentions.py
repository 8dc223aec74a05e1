"""A layer with experts between two attentions, one row in one kernel."""

from __future__ import annotations

import dataclasses
import math

import jax

from pallas_paged.checks import default_promotion
from pallas_paged.decoder.between_attentions import BlockWeights, Residual
from pallas_paged.decoder.kernels.operands import Routing
from pallas_paged.decoder.unmerged_attention import UnmergedAttention
from pallas_paged.kernels.device import Device
from pallas_paged.kernels.mosaic import support as mosaic_support
from pallas_paged.kernels.mosaic_sm90 import support
from pallas_paged.kernels.mosaic_sm90.config import (
    LINEAR_TILE,
    DecoderBlockConfig,
    decoder_block_config,
)

__all__ = ["Routing", "routed_between_attentions"]

_SIZES = range(2048, 4097)  # of a residual, for which the kernel is chosen


@default_promotion()
def routed_between_attentions(
    attended: UnmergedAttention,
    residual: Residual,
    weights: BlockWeights,
    routing: Routing,
    *,
    eps: float,
    interpret: bool = False,
) -> tuple[Residual, jax.Array, jax.Array] | None:
    """Run `between_attentions` of one row whose MLP is one of experts, without gradients.

        residual += attended @ o.T
        normed = rms_norm(residual)
        experts, scores = choice(softmax(normed @ router.T))
        residual += fused_experts(normed, gate_up, down, experts, scores)
        out = rms_norm(residual) @ qkv.T

    Args:
        attended: partial states, bf16 or f16 `[1, A]`.
        residual: the residual stream of the row.
        weights: of the dtype of the residual, with a router and without biases.
        routing: how the router chooses.
        eps: epsilon of the norms.
        interpret: run the kernel interpreted, on any device and with any size of the residual.

    Returns:
        The residual, out `[..., N]`, or without `qkv` the norm `[..., E]`, and the experts
        i32`[..., k]`; None where the kernel can't do the call or other kernels are faster.
    """
    config = _config(attended, residual.x, weights, routing, interpret=interpret)
    if config is None:
        return None
    from pallas_paged.decoder.kernels import one_row

    assert weights.router is not None
    num_experts, hidden_size, _, size = weights.gate_up.shape
    mailboxes = residual.routed_mailboxes or one_row.new_mailboxes(
        config,
        size=size,
        attended_size=attended.shape[-1],
        hidden_size=routing.num_experts_per_tok * hidden_size,
        num_experts=num_experts,
    )
    with jax.enable_x64(False):
        x, out, experts, mailboxes = one_row.between_attentions(
            attended.states,
            residual.x.reshape(1, -1),
            mailboxes,
            weights,
            eps=eps,
            config=config,
            routing=routing,
            interpret=interpret,
        )
    rows = residual.x.shape[:-1]
    experts = experts[: routing.num_experts_per_tok].reshape(*rows, -1)
    residual = dataclasses.replace(residual, x=x.reshape(*rows, -1), routed_mailboxes=mailboxes)
    return residual, out.reshape(*rows, -1), experts


def _config(
    attended: UnmergedAttention,
    x: jax.Array,
    weights: BlockWeights,
    routing: Routing,
    *,
    interpret: bool,
) -> DecoderBlockConfig | None:
    """Return the config of the kernel, or None where it can't do the call or is not chosen."""
    arrays = x, *jax.tree.leaves(weights)
    dtypes = {array.dtype.name for array in (attended, *arrays)}
    if dtypes not in ({"bfloat16"}, {"float16"}) or math.prod(x.shape[:-1]) != 1:
        return None
    if weights.router is None or weights.o_bias is not None or weights.qkv_bias is not None:
        return None
    if any(jax.typeof(array).sharding.mesh.size > 1 for array in arrays):
        return None
    if attended.states.head_dim % LINEAR_TILE:  # the kernel merges tiles of one head
        return None
    device = Device.here()
    if mosaic_support.why_not_jax() is not None:
        return None
    if not interpret and (x.shape[-1] not in _SIZES or support.why_not_device(device) is not None):
        return None
    return decoder_block_config(
        size=x.shape[-1],
        attended_size=attended.shape[-1],
        hidden_size=weights.gate_up.shape[1],
        out_size=0 if weights.qkv is None else weights.qkv.shape[0],
        num_programs=1 if interpret else device.num_sms,
        num_experts=len(weights.router),
        experts_per_token=routing.num_experts_per_tok,
    )
