"""The layers of a decoder between two attentions: products, norms, SwiGLU and residual sums."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
from jax.custom_batching import custom_vmap

from pallas_paged.checks import check_implementation, check_interpret, default_promotion, pytree
from pallas_paged.decoder.block_call import (
    Config,
    find_config,
    mailboxes_of,
    run,
    run_on_devices,
)
from pallas_paged.decoder.kernels.batch_config import DecoderBatchConfig
from pallas_paged.decoder.kernels.operands import BlockWeights, Routing
from pallas_paged.decoder.peers import Peers, row_linear_norm
from pallas_paged.decoder.rms_norm import rms_norm
from pallas_paged.decoder.unmerged_attention import UnmergedAttention
from pallas_paged.kernels.decode_states import DecodeStates
from pallas_paged.kernels.mosaic_sm90.config import LINEAR_TILE

__all__ = ["BlockWeights", "Residual", "Routing", "between_attentions"]

BlockImplementation = Literal["mosaic_sm90", "xla"]
RoutedMLP = Callable[[jax.Array], tuple[jax.Array, jax.Array]]

# Sizes of the residual, and numbers of rows for which a kernel is chosen there. It was faster in
# what was measured on an H200: Llamas of 1B, 3B and 8B, Qwen3 of 0.6B, 1.7B, 4B, 14B and 32B,
# Qwen2.5-7B, Phi-4, and, with experts, Qwen3-30B-A3B and gpt-oss-20b. bench/notes/decoder.md has
# the times. Steps with a chunk of 128 tokens compile sooner without it.
_FASTER = (
    (range(2048, 5121), range(1, 2)),
    (range(1024, 4097), range(2, 129)),
    (range(4097, 5121), range(32, 65)),
    (range(1024, 1025), range(160, 257)),
)


@pytree
class Residual:
    """The residual stream of a decoder, from layer to layer.

    Attributes:
        x: floating `[..., E]`.
        mailboxes: memory for the partial results that the programs of the kernel exchange, for
            this call and for the next; None before the first call. A call with other sizes makes
            new ones.
    """

    x: jax.Array
    mailboxes: tuple[jax.Array, jax.Array] | None = None


@default_promotion()
def between_attentions(
    attended: jax.Array | UnmergedAttention,
    residual: Residual,
    weights: BlockWeights,
    *,
    eps: float,
    dropout: Callable[[jax.Array], jax.Array] | None = None,
    peers: Peers | None = None,
    mlp: RoutedMLP | None = None,
    routing: Routing | None = None,
    implementation: BlockImplementation | None = None,
    interpret: bool = False,
) -> tuple[Residual, jax.Array, jax.Array | None]:
    """Run the output projection, the MLP and the next layer's QKV projection.

        residual += attended @ o.T + o_bias
        residual += swiglu(rms_norm(residual) @ gate_up.T) @ down.T
        out = rms_norm(residual) @ qkv.T + qkv_bias

    On a Hopper GPU it is one persistent kernel that streams all weights, for one row of 2048 to
    5120 elements, and in bf16 for 2 to 128 rows of 1024 to 4096, for 32 to 64 rows up to 5120, and
    for 160 to 256 rows of 1024. With other sizes, and up to 256 rows, it runs if `implementation`
    names it.
    Otherwise, for gradients and under `vmap`, XLA runs the steps one by one. Results differ by
    rounding: sums are in f32, in another order. The bits of the kernels are the same each time.

    A layer with experts has a router in its weights, and `mlp`. With `routing`, partial states of
    one row go through one kernel as well, which chooses the experts itself.

    Args:
        attended: floating `[..., A]`, the output of attention; or its partial states, which the
            kernel merges itself, without gradients.
        residual: the residual stream of these rows.
        weights: the weights of the two layers.
        eps: epsilon of the norms.
        dropout: applied to each branch before its sum, for training; None: nothing.
        peers: devices that share the columns of `attended`, `o` and `down` and the rows of
            `gate_up` and `qkv`, as the engine's `Attend` has them; the kernel adds up over them,
            without gradients. Not used with dropout.
        mlp: function of the norm `[..., E]`, in place of SwiGLU and `down`, that returns what its
            experts add to the residual and their indices i32`[..., k]`.
        routing: how `mlp` chooses experts, where it is
            `fused_experts(normed, gate_up, down, *choice(softmax(normed @ router.T)))`, for a
            kernel; None where there is more to it.
        implementation: `"mosaic_sm90"`, on a Hopper GPU; `"xla"`, separate steps; or None for the
            fastest of those measured.
        interpret: run the kernel of `"mosaic_sm90"` interpreted, on any device.

    Returns:
        The residual; out `[..., N]`, or without `qkv` the norm `[..., E]`; and the experts of
        `mlp` or None.

    Raises:
        ValueError: shapes do not fit, or there is no such implementation.
        NotImplementedError: the implementation can't do this call; the message says why.
    """
    _check_shapes(attended, residual.x, weights)
    has_experts = weights.router is not None
    if has_experts != (mlp is not None) or (routing is not None and not has_experts):
        raise ValueError("weights.router needs mlp, and each of mlp and routing weights.router")
    check_implementation(implementation, get_args(BlockImplementation))
    check_interpret(interpret, implementation)
    if _is_faster(residual.x.shape) if implementation is None else implementation != "xla":
        config, reason = find_config(
            attended, residual.x, weights, dropout, routing, peers, interpret=interpret
        )
        if config is not None:
            given: jax.Array | DecodeStates
            if not isinstance(attended, UnmergedAttention):
                given = attended
            elif (
                peers is not None
                or isinstance(config, DecoderBatchConfig)
                or (
                    attended.states.head_dim % LINEAR_TILE  # the kernel merges tiles of one head
                )
            ):
                given = attended.merged()
            else:
                given = attended.states
            num_devices = 1 if peers is None else peers.mesh.size
            mailboxes = mailboxes_of(residual.mailboxes, config, weights, num_devices)
            arrays = given, residual.x, weights, mailboxes
            if peers is None:
                x, out, experts, mailboxes = _kernel(config, eps, routing, interpret, *arrays)
            else:
                x, out, experts, mailboxes = run_on_devices(peers, config, eps, *arrays)
            return dataclasses.replace(residual, x=x, mailboxes=mailboxes), out, experts
        if implementation is not None:
            raise NotImplementedError(f"{implementation=} {reason}")
    if isinstance(attended, UnmergedAttention):
        attended = attended.merged()
    x, out, experts = _steps(eps, dropout, peers, mlp, attended, residual.x, weights)
    return dataclasses.replace(residual, x=x), out, experts


def _steps(
    eps: float,
    dropout: Callable[[jax.Array], jax.Array] | None,
    peers: Peers | None,
    mlp: RoutedMLP | None,
    attended: jax.Array,
    x: jax.Array,
    weights: BlockWeights,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    def add(branch: jax.Array, x: jax.Array, norm: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x + (branch if dropout is None else dropout(branch))
        return x, rms_norm(x, norm, eps)

    def multiply_and_add(
        x: jax.Array, weight: jax.Array, bias: Any, residual: jax.Array, norm: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        if peers is not None and dropout is None:
            return row_linear_norm(x, weight, _add_bias(residual, bias), norm, eps, peers)
        return add(_add_bias(x @ weight.T, bias), residual, norm)

    x, normed = multiply_and_add(attended, weights.o, weights.o_bias, x, weights.mlp_norm)
    experts = None
    if mlp is None:
        hidden = _swiglu(normed, weights.gate_up)
        x, out = multiply_and_add(hidden, weights.down, None, x, weights.out_norm)
    else:
        branch, experts = mlp(normed)
        x, out = add(branch, x, weights.out_norm)
    if weights.qkv is None:
        return x, out, experts
    return x, _add_bias(out @ weights.qkv.T, weights.qkv_bias), experts


def _swiglu(x: jax.Array, gate_up: jax.Array) -> jax.Array:
    # As one matrix: XLA would transpose, hence copy, a weight that has several output axes.
    out = x @ gate_up.reshape(-1, gate_up.shape[-1]).T
    out = out.reshape(*out.shape[:-1], -1, 2)
    return jax.nn.silu(out[..., 0]) * out[..., 1]


def _add_bias(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x if bias is None else x + bias


def _check_shapes(
    attended: jax.Array | UnmergedAttention, x: jax.Array, weights: BlockWeights
) -> None:
    size, hidden_size = x.shape[-1], weights.gate_up.shape[-3]
    num_out = None if weights.qkv is None else weights.qkv.shape[0]
    experts = () if weights.router is None else weights.router.shape[:1]
    want = {
        "o": (size, attended.shape[-1]),
        "o_bias": (size,),
        "mlp_norm": (size,),
        "router": (*experts, size),
        "router_bias": experts or None,
        "gate_up_bias": (*experts, hidden_size, 2) if experts else None,
        "down_bias": (*experts, size) if experts else None,
        "gate_up": (*experts, hidden_size, 2, size),
        "down": (*experts, size, hidden_size),
        "out_norm": (size,),
        "qkv": (num_out, size),
        "qkv_bias": (num_out,),
    }
    for name, shape in want.items():
        weight = getattr(weights, name)
        if weight is not None and weight.shape != shape:
            raise ValueError(
                f"weights.{name}.shape={weight.shape} must be {shape}, with {attended.shape=}, "
                f"a residual of {x.shape} and {hidden_size} features of gate and up"
            )
    if attended.shape[:-1] != x.shape[:-1]:
        raise ValueError(f"{attended.shape=} must have the rows of the residual {x.shape}")


def _is_faster(shape: tuple[int, ...]) -> bool:
    num_rows, size = math.prod(shape[:-1]), shape[-1]
    return any(size in sizes and num_rows in rows for sizes, rows in _FASTER)


# JAX takes the references out of a custom VJP, but not out of a custom JVP.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _kernel(
    config: Config,
    eps: float,
    routing: Routing | None,
    interpret: bool,
    attended: jax.Array | DecodeStates,
    x: jax.Array,
    weights: BlockWeights,
    mailboxes: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array | None, tuple[jax.Array, jax.Array]]:
    @custom_vmap
    def call(attended: Any, x: jax.Array, weights: BlockWeights, mailboxes: Any) -> Any:
        return run(config, eps, routing, interpret, attended, x, weights, mailboxes)

    @call.def_vmap
    def _(size: int, batched: Any, *args: Any) -> Any:
        # The kernel would run once for each, one after another.
        if isinstance(args[0], DecodeStates) or routing is not None:
            raise NotImplementedError("partial states of attention can't be under vmap")
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, batched[:3])
        steps = jax.vmap(functools.partial(_steps, eps, None, None, None), axes, axis_size=size)
        return (*steps(*args[:3]), args[3]), (True, True, None, batched[3])

    return call(attended, x, weights, mailboxes)


@default_promotion()  # JAX also calls it after the entry has returned
def _kernel_fwd(
    config: Config, eps: float, routing: Any, interpret: bool, attended: Any, *others: Any
) -> Any:
    del config, interpret
    if isinstance(attended, DecodeStates) or routing is not None:
        raise NotImplementedError("partial states of attention have no gradient")
    steps = functools.partial(_steps, eps, None, None, None)
    *arrays, mailboxes = others
    (x, out, _), vjp = jax.vjp(steps, attended, *arrays)
    return (x, out, None, mailboxes), vjp


def _kernel_bwd(
    config: Config, eps: float, routing: Any, interpret: bool, vjp: Any, cotangents: Any
) -> Any:
    del config, eps, routing, interpret
    return *vjp(cotangents[:3]), (None, None)


_kernel.defvjp(_kernel_fwd, _kernel_bwd)
