"""The kernels between two attentions: which can do a call, its memory, and the call itself."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pallas_paged.decoder.kernels.batch_config import (
    BLOCKS_PER_STAGE,
    COLUMNS_PER_BLOCK,
    GROUP_ROWS,
    MAX_ROWS,
    DecoderBatchConfig,
    clusters_at_once,
    decoder_batch_config,
)
from pallas_paged.decoder.kernels.operands import BlockWeights, Routing
from pallas_paged.decoder.kernels.peer_memory import ROW_BYTES, PeerMemory
from pallas_paged.decoder.peers import DevicePeers, Peers
from pallas_paged.decoder.unmerged_attention import UnmergedAttention
from pallas_paged.kernels.decode_states import DecodeStates
from pallas_paged.kernels.device import Device
from pallas_paged.kernels.mosaic import support as mosaic_support
from pallas_paged.kernels.mosaic_sm90 import support
from pallas_paged.kernels.mosaic_sm90.config import (
    ROW_UNIT,
    DecoderBlockConfig,
    decoder_block_config,
    padded,
)

Config = DecoderBlockConfig | DecoderBatchConfig


def find_config(
    attended: jax.Array | UnmergedAttention,
    x: jax.Array,
    weights: BlockWeights,
    dropout: Any,
    routing: Routing | None,
    peers: Peers | None,
    *,
    interpret: bool,
) -> tuple[Config | None, str | None]:
    """Return the config of the kernel, or None and the reason why it can't do a call."""
    arrays = x, *jax.tree.leaves(weights)
    dtypes = sorted({array.dtype.name for array in (attended, *arrays)})
    if dtypes not in (["bfloat16"], ["float16"]):
        return None, f"needs one dtype for all arrays, bfloat16 or float16, not {', '.join(dtypes)}"
    if not 1 <= (num_rows := math.prod(x.shape[:-1])) <= MAX_ROWS:
        return None, f"needs 1 to {MAX_ROWS} rows, not {num_rows}"
    if num_rows > 1 and dtypes != ["bfloat16"]:
        # The norm divides the row after its product, which could overflow in f16.
        return None, f"needs bfloat16 for {num_rows} rows, not float16"
    if dropout is not None or (num_rows > 1 and weights.has_bias):
        return None, "has no dropout, and biases for one row only"
    if weights.router is not None and (
        routing is None or num_rows > 1 or not isinstance(attended, UnmergedAttention)
    ):
        return None, "has experts for partial states of one row and with a routing only"
    if not isinstance(attended, UnmergedAttention):
        arrays += (attended,)
    sizes: Any = weights.sizes
    if peers is not None:
        if weights.o_bias is not None or weights.router is not None or interpret:
            return None, "adds up over devices without a bias of o and without experts"
        for name in ("attended_size", "hidden_size", "out_size"):
            sizes[name] //= peers.mesh.size
    elif any(jax.typeof(array).sharding.mesh.size > 1 for array in arrays):
        return None, "needs arrays on one device, or peers"
    device = Device.here()
    config: Config | None
    if num_rows == 1:
        if weights.router is not None and routing is not None:
            k = routing.num_experts_per_tok
            sizes |= dict(num_experts=len(weights.router), experts_per_token=k)
        num_programs = 1 if interpret else device.num_sms
        config = decoder_block_config(**sizes, num_programs=num_programs)
        multiples = "64 (E, F and N), 256 (A) and 8 (experts)"
    else:
        clusters = (1, 1) if interpret else clusters_at_once(device.num_sms, num_rows)
        sizes |= dict(zip(("num_clusters", "cluster_size"), clusters, strict=True))
        config = decoder_batch_config(**sizes, num_rows=_padded(num_rows))
        multiples = f"{BLOCKS_PER_STAGE * COLUMNS_PER_BLOCK * clusters[1]} (A, E and F) and 8 (N)"
    if config is None:
        return None, f"needs sizes that are multiples of {multiples}, and fit"
    if peers is not None and not _fits(config, peers, sizes["size"]):
        return None, f"adds up over {peers.mesh.size} devices what fits their memory"
    reason = mosaic_support.why_not_jax() or (None if interpret else support.why_not_device(device))
    if reason is not None:
        return None, reason
    return config, None


def _fits(config: Config, peers: Peers, size: int) -> bool:
    """Return whether the memory of devices holds what a kernel sends to them."""
    if isinstance(config, DecoderBatchConfig):
        return config.sum_bytes <= peers.capacity
    num_sums = peers.mesh.size * (config.o_splits + config.down_splits)
    return peers.capacity > 0 and 4 * num_sums * padded(size, ROW_UNIT) <= ROW_BYTES


def _padded(num_rows: int) -> int:
    multiple = 8 if num_rows <= GROUP_ROWS else 16  # of two parts
    return -(-num_rows // multiple) * multiple


def mailboxes_of(
    given: tuple[jax.Array, jax.Array] | None,
    config: Config,
    weights: BlockWeights,
    num_devices: int,
) -> tuple[jax.Array, jax.Array]:
    """Return what the call before left, or new ones where it had other sizes; of all devices."""
    from pallas_paged.decoder.kernels import batch_refs, one_row_refs

    make: Callable[[], tuple[jax.Array, jax.Array]] = batch_refs.new_counters
    if isinstance(config, DecoderBlockConfig):
        make = functools.partial(one_row_refs.new_mailboxes, config, weights)
    new, _ = jax.eval_shape(make)
    if given is not None and given[0].shape == (num_devices * new.size,):
        return given
    first, second = (jnp.tile(mailbox, num_devices) for mailbox in make())
    return first, second


def run(
    config: Config,
    eps: float,
    routing: Routing | None,
    interpret: bool,
    attended: jax.Array | DecodeStates,
    x: jax.Array,
    weights: BlockWeights,
    mailboxes: tuple[jax.Array, jax.Array],
    **options: Any,
) -> tuple[jax.Array, jax.Array, jax.Array | None, tuple[jax.Array, jax.Array]]:
    """Return the residual, the output, the experts or None, and the mailboxes of the next call."""
    from pallas_paged.decoder.kernels import batch, one_row

    kernel: Any = functools.partial(one_row.between_attentions, routing=routing)
    num_rows = padded = math.prod(x.shape[:-1])
    if isinstance(config, DecoderBatchConfig):
        kernel, padded = batch.between_attentions, _padded(num_rows)

    def matrix(rows: jax.Array) -> jax.Array:
        rows = rows.reshape(num_rows, -1)
        return rows if padded == num_rows else jnp.pad(rows, ((0, padded - num_rows), (0, 0)))

    with jax.enable_x64(False):
        new_x, out, *experts, mailboxes = kernel(
            attended if isinstance(attended, DecodeStates) else matrix(attended),
            matrix(x),
            mailboxes,
            weights,
            eps=eps,
            config=config,
            interpret=interpret,
            **options,
        )
    new_x, out, *experts = (
        rows[:num_rows].reshape(*x.shape[:-1], -1) for rows in (new_x, out, *experts)
    )
    return new_x, out, *(experts or [None]), mailboxes


def run_on_devices(
    peers: Peers,
    config: Config,
    eps: float,
    attended: jax.Array | DecodeStates,
    x: jax.Array,
    weights: BlockWeights,
    mailboxes: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, None, tuple[jax.Array, jax.Array]]:
    """Run the kernel on each device of `peers`."""
    assert isinstance(attended, jax.Array)
    shape = x.shape
    rows: Any = PartitionSpec(peers.axis)
    columns: Any = PartitionSpec(None, peers.axis)
    replicated: Any = PartitionSpec()

    def local(here: DevicePeers, attended: Any, x: Any, weights: Any, mailboxes: Any) -> Any:
        memory = PeerMemory(addresses=here.addresses, memory=here.memory, capacity=here.capacity)
        x, out, _, mailboxes = run(
            config, eps, None, False, attended, x, weights, mailboxes, peers=memory
        )
        return x, out, mailboxes

    specs = BlockWeights(
        o=columns, mlp_norm=replicated, gate_up=rows, down=columns, out_norm=replicated
    )
    out_spec = replicated
    if weights.qkv is not None:
        bias = None if weights.qkv_bias is None else rows
        specs, out_spec = dataclasses.replace(specs, qkv=rows, qkv_bias=bias), columns
    x, out, mailboxes = peers.run(
        local,
        (columns, replicated, specs, rows),
        *(attended.reshape(-1, attended.shape[-1]), x.reshape(-1, x.shape[-1]), weights, mailboxes),
        out_specs=(replicated, out_spec, rows),
    )
    lead = shape[:-1]
    return x.reshape(shape), out.reshape(*lead, -1), None, mailboxes
