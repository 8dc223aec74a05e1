"""The merge of one row's partial states of attention, each program a part of the row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_paged.kernels.decode_states import DecodeStates
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.decode_merge import block_sizes, merge_partials
from pallas_paged.kernels.mosaic.softmax_state import finish
from pallas_paged.kernels.mosaic_sm90.config import LINEAR_TILE as TILE


def merge_row(
    states: DecodeStates,  # of refs to device memory
    *,
    program: Any,
    num_programs: int,
    publish: Callable[[Any, jax.Array], None],  # the first element of a piece, its values f32[64]
    interpret: bool,
) -> None:
    """Wait for the states of attention and merge this program's part of the row.

    A piece is 64 elements of one head, one for each row of wgmma.
    """
    plan, head_dim = states.plan, states.head_dim
    # Known before the states are: the kernel that makes them reads it, too.
    first, count = plan.partials_of_row(jnp.int32(0), states.unit_ends)
    block_s, _ = block_sizes(
        plan, num_seqs=1, num_q_heads=states.num_q_heads, span=plan.num_programs
    )
    num_pieces = states.num_q_heads * head_dim // TILE
    ops.wait_for_previous_kernel(interpret=interpret)

    @pl.loop(0, lax.div(num_pieces - 1 - program + num_programs, num_programs))
    def _merge(i):
        start = (program + i * num_programs) * TILE
        head = lax.div(start, head_dim)
        elements = pl.ds(lax.rem(start, head_dim), TILE)
        places = [states.place_of(head)]
        (state,) = merge_partials(states, first, count, places, block_s, elements, ops.WGMMA_ROW)
        sink = None if states.sinks is None else states.sinks[head]
        publish(start, finish(state, sink)[0])
