"""The jitted program of the engine's calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from pallas_paged.decoder.peers import Peers
from pallas_paged.engine.device.attend import AttentionKernels
from pallas_paged.engine.device.drafts import add_sampled
from pallas_paged.engine.device.placement import Shardings
from pallas_paged.engine.device.speculation import speculate
from pallas_paged.engine.device.state import Batch, EngineState
from pallas_paged.engine.device.step import NOT_SAMPLED, Call, Result, decode, prefill_and_decode
from pallas_paged.engine.model import Model
from pallas_paged.engine.sampling.sampler import TokenCounts

# Everything that a step needs in one CUDA graph, a loop of steps included: launched one by one, its
# kernels wait for the host. Kernels that do not depend on one another run side by side, such as the
# writes of K and V and the rotation of q: 3% of a decode step.
_KERNELS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION"
GPU_OPTIONS = {
    "xla_gpu_enable_command_buffer": f"{_KERNELS},CONDITIONAL,WHILE",
    "xla_gpu_graph_min_graph_size": 1,
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
}
# On a mesh too the loop is one graph, where `Peers` adds up by its kernel. What NCCL sends can't be
# in a graph; pieces of few kernels between are faster without one. NCCL is faster than XLA's own
# kernels for sums (docs/parallel.md); JAX 0.10 has NCCL only.
_MESH_OPTIONS = {k: v for k, v in GPU_OPTIONS.items() if k != "xla_gpu_graph_min_graph_size"}
if jax.__version_info__ >= (0, 11):
    _MESH_OPTIONS["xla_gpu_experimental_use_collective_kernels"] = ""
Step = Callable[..., Result]  # of the leaves of the parameters, state, counts, batch and peers


@lru_cache(maxsize=16)
def make_step(
    model: Model,
    structure: jax.tree_util.PyTreeDef,
    kernels: AttentionKernels,
    shardings: Shardings | None = None,
) -> Step:
    """Return the jitted step of a model; engines of equal models share it, and what it compiled.

    Args:
        model: the model.
        structure: of its parameters, whose leaves the step takes: to flatten modules in every call
            would take longer than a small model's step.
        kernels: of the attention.
        shardings: of the state, on a mesh. What is not of the state, nor a parameter, is
            replicated.

    Returns:
        The step. State and counts are donated; counts are used if the batch's mode has penalties.
    """

    def step(
        leaves: tuple[jax.Array, ...],
        state: EngineState,
        counts: TokenCounts | None,
        batch: Batch,
        peers: Peers | None = None,
    ) -> Result:
        params = jax.tree.unflatten(structure, leaves)
        call = Call(model=model, params=params, batch=batch, kernels=kernels, peers=peers)
        if batch.speculation is not None:
            return speculate(call, state, counts)
        run = decode if batch.chunks is None else prefill_and_decode
        state, counts, output = run(call, state, counts)
        if state.history is not None:
            rows = batch.decode_slots
            if batch.chunks is not None:
                rows = jnp.arange(state.table.max_seqs, dtype=jnp.int32)
            lens = state.table.seq_lens.at[rows].get(mode="fill", fill_value=0)
            tokens = output.token_ids
            history = add_sampled(state.history, rows, lens, tokens, tokens != NOT_SAMPLED)
            state = replace(state, history=history)
        return state, counts, output

    options: dict[str, Any] = {}
    if shardings is not None:
        state_shardings, replicated = shardings.tree, shardings.replicated
        options["in_shardings"] = (None, state_shardings, replicated, replicated, None)
        options["out_shardings"] = (state_shardings, replicated, replicated)
    if jax.default_backend() == "gpu":
        is_alone = shardings is None or shardings.replicated.mesh.size == 1
        options["compiler_options"] = GPU_OPTIONS if is_alone else _MESH_OPTIONS
    return jax.jit(step, donate_argnames=("state", "counts"), **options)
