"""The jitted program of the engine's calls: its modes, and a cache of what it compiled to."""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from operator import or_
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.experimental import serialize_executable

from pallas_paged.attention.partition import sources_key
from pallas_paged.attention.tuning import tuning_key
from pallas_paged.decoder.peers import Peers
from pallas_paged.engine.device.attend import AttentionKernels
from pallas_paged.engine.device.batch import Batch, Shape, Undrawn
from pallas_paged.engine.device.call import Call
from pallas_paged.engine.device.lookup import add_sampled
from pallas_paged.engine.device.placement import Shardings
from pallas_paged.engine.device.speculation import speculate
from pallas_paged.engine.device.state import EngineState
from pallas_paged.engine.device.step import Result, decode, draw_later, prefill_and_decode
from pallas_paged.engine.model import Model
from pallas_paged.engine.requests.grammar import empty_masks
from pallas_paged.engine.requests.input_processor import check_lists
from pallas_paged.engine.sampling_params import (
    MAX_LOGPROBS,
    PoolingParams,
    SamplingMode,
    SamplingParams,
    WarmupParams,
)
from pallas_paged.kernels.mosaic import support as mosaic_support

logger = logging.getLogger("pallas_paged")

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
Step = Callable[..., Result]  # of the leaves of the parameters, state, batch, peers, and a draft's


@lru_cache(maxsize=16)
def make_step(
    model: Model,
    structure: jax.tree_util.PyTreeDef,
    kernels: AttentionKernels,
    shardings: Shardings | None = None,
    draft: tuple[Model, jax.tree_util.PyTreeDef] | None = None,
) -> Step:
    """Return the jitted step of a model; engines of equal models share it, and what it compiled.

    Args:
        model: the model.
        structure: of its parameters, whose leaves the step takes: to flatten modules in every call
            would take longer than a small model's step.
        kernels: of the attention.
        shardings: of the state, on a mesh. What is not of the state, nor a parameter, is
            replicated.
        draft: the draft model, and the structure of its parameters; None without one.

    Returns:
        The step. The state is donated. It has counts if the batch's mode has penalties.
    """

    def step(
        leaves: tuple[jax.Array, ...],
        state: EngineState,
        batch: Batch,
        peers: Peers | None = None,
        draft_leaves: tuple[jax.Array, ...] = (),
    ) -> Result:
        params = jax.tree.unflatten(structure, leaves)
        call = Call(model=model, params=params, batch=batch, kernels=kernels, peers=peers)
        if draft is not None:
            only_draws = replace(batch.mode, logprobs=-1, prompt_logprobs=-1, routed_experts=False)
            of_draft = Call(
                model=draft[0],
                params=jax.tree.unflatten(draft[1], draft_leaves),
                batch=replace(batch, mode=only_draws),
                kernels=kernels,
                peers=peers,
                first_layer=model.kv_cache_spec.num_layers,
            )
            call = replace(call, draft=of_draft)
        if batch.speculation is not None:
            return speculate(call, state)
        run = decode if batch.chunks is None else prefill_and_decode
        state, output = run(call, state)
        return add_sampled(state, batch, output.token_ids), output

    options: dict[str, Any] = {}
    if shardings is not None:
        replicated = shardings.replicated
        of_state = replace(shardings.tree, counts=replicated)  # if the state has counts
        options["in_shardings"] = (None, of_state, replicated, None, None)
        options["out_shardings"] = (of_state, replicated)
    if jax.default_backend() == "gpu":
        is_alone = shardings is None or shardings.replicated.mesh.size == 1
        options["compiler_options"] = GPU_OPTIONS if is_alone else _MESH_OPTIONS
    return jax.jit(step, donate_argnames="state", **options)


@lru_cache(maxsize=1)
def make_draw() -> Callable[..., Any]:
    """Return `draw_later`, jitted for one device; the state is donated."""
    options = GPU_OPTIONS if jax.default_backend() == "gpu" else None
    return jax.jit(draw_later, donate_argnums=0, compiler_options=options)


def draw_types(batch: Batch, vocab_size: int, sharding: Any) -> tuple[Batch, Undrawn]:
    """Return what `make_draw` takes behind the state, after a step of this batch without masks."""

    def of(*shape: int, dtype: Any = np.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    num_rows = batch.decode_slots.size
    logits = of(num_rows, vocab_size, dtype=np.float32)
    masks = empty_masks(num_rows, vocab_size)
    return replace(batch, masks=masks), Undrawn(logits=logits, rows_and_lens=of(2, num_rows))


def modes_for(params: WarmupParams) -> list[SamplingMode]:
    """Return the sampling modes to compile for requests with these parameters.

    Steps that are greedy, that only draw, or that filter have modes of their own, because filters,
    penalties and log-probabilities cost time in every row. None is for any request without
    structured outputs, routed experts and pooling.
    """
    if params is None:
        return [*_WITHOUT_OTHERS]
    check_lists(params=params)
    modes: set[SamplingMode] = set()
    for one in params:
        if one is None:
            modes.update(_WITHOUT_OTHERS)
        elif isinstance(one, SamplingParams | PoolingParams):
            modes.add(SamplingMode.of(one))
        else:
            raise ValueError(f"params has {one!r}, which must be SamplingParams or PoolingParams")
    modes.add(reduce(or_, modes, SamplingMode()))
    return sorted(modes | {replace(max(modes), prompt_logprobs=-1)})


_FULL = SamplingMode(draws=True, filters=2, processors=True, penalties=True, logprobs=MAX_LOGPROBS)
_WITHOUT_OTHERS = (
    SamplingMode(),
    SamplingMode(draws=True),
    SamplingMode(draws=True, filters=2),
    _FULL,
    replace(_FULL, prompt_logprobs=MAX_LOGPROBS),
)


def fit_mode(mode: SamplingMode, shape: Shape) -> SamplingMode:
    """Return the part of a mode that a batch of this shape can need."""
    if len(shape) > 2:  # with drafts
        mode = replace(mode, penalties=False, masks=False, routed_experts=False)
    return mode if shape[1] else replace(mode, prompt_logprobs=-1, pooling=False)


def kind_of(batch: Batch) -> tuple[Any, ...]:
    """Return what batches of one program have in common."""
    num_tokens, has_experts = None, False
    if (chunks := batch.chunks) is not None:
        num_tokens, has_experts = chunks.token_ids.size, chunks.routed_experts is not None
    shape = batch.decode_slots.size, num_tokens, has_experts
    return *shape, batch.mode, batch.max_num_steps, batch.speculation


_FOLDER = "pallas_paged-steps"  # in the folder of JAX's compilation cache
# A program that a CPU has loaded from JAX's own cache can't be saved again: it lacks functions.
_PLATFORMS = ("gpu",)
# Of the environment, what compilers read. What JAX reads is in its configuration.
_VARIABLES = ("XLA_", "MOSAIC_", "TRITON_", "PALLAS_", "CUDA_", "NVIDIA_TF32")
# Of JAX's configuration, what no program depends on.
_IRRELEVANT = ("cache", "log", "debug_info", "traceback", "profiler", "dump", "explain")


class ProgramCache:
    """Loads and saves compiled steps.

    The key in JAX's own compilation cache is a program's text. To trace and lower the steps of an
    engine, only to find their text in the cache, takes most of a warm start. Here the key is what
    the text follows from: the sources of this library, the model's `cache_key`, the versions and
    settings of JAX and its compilers, the device, and the arguments' structure, shapes and dtypes.

    A file is a pickle: like JAX's compiled programs, its writer can run any code here.
    """

    def __init__(self, folder: Path, parts: Sequence[Any], device: jax.Device):
        """Make a cache in a folder, which is made when the first program is saved.

        Args:
            folder: of the files.
            parts: what the programs follow from beside the arguments, with a `repr` that is the
                same in other processes.
            device: on which the programs run.
        """
        mosaic_support.why_not_jax()  # imports Mosaic: its kernels are loaded with its library
        self._folder, self._device = folder, device
        self._parts = repr((*parts, sources_key("pallas_paged"), *_platform(device)))

    @classmethod
    def of(
        cls, model: Any, parts: Sequence[Any], device: jax.Device, draft: Any = None
    ) -> ProgramCache | None:
        """Return the cache of the steps of a model, and of its draft model if it has one.

        None without a folder for JAX's compilation cache, without the `cache_key` of each, or on
        another device than a GPU.
        """
        folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
        enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
        models = [model] if draft is None else [model, draft]
        keys = [getattr(one, "cache_key", None) for one in models]
        if None in keys or not enabled or not folder or "://" in folder:
            return None
        if device.platform not in _PLATFORMS:
            return None
        return cls(Path(folder, _FOLDER), (*keys, *parts), device)

    def load(self, arguments: tuple[Any, ...]) -> jax.stages.Compiled | None:
        """Return the program for such arguments, or None."""
        path = self._path(arguments)
        try:
            entry = path.read_bytes()
        except OSError:
            return None
        try:
            payload, in_tree, out_tree = pickle.loads(zlib.decompress(entry))
            return serialize_executable.deserialize_and_load(
                payload, in_tree, out_tree, self._device.client, [self._device]
            )
        except Exception as error:  # of many kinds: the file may hold anything
            logger.warning("%s can't be loaded, so its step is compiled again: %r", path, error)
            return None

    def save(self, arguments: tuple[Any, ...], program: jax.stages.Compiled) -> None:
        """Keep the program for such arguments, if it can be serialized."""
        try:
            entry = zlib.compress(pickle.dumps(serialize_executable.serialize(program)), 1)
        except Exception as error:  # of many kinds: what XLA or JAX can't serialize
            logger.info("a compiled step can't be serialized: %r", error)
            return
        path = self._path(arguments)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                Path(folder, path.name).write_bytes(entry)
                Path(folder, path.name).replace(path)  # a reader finds all of it, or nothing
        except OSError as error:
            logger.warning("a compiled step can't be kept in %s: %s", path.parent, error)

    def _path(self, arguments: tuple[Any, ...]) -> Path:
        leaves, structure = jax.tree.flatten(arguments)
        types = [str(jax.typeof(x)) + str(getattr(x, "sharding", None)) for x in leaves]
        key = hashlib.sha256(repr((self._parts, str(structure), types)).encode())
        return self._folder / key.hexdigest()


def _platform(device: jax.Device) -> tuple[Any, ...]:
    """Return what a compiled program depends on beside its text."""
    config: Any = jax.config
    settings = [
        (name, repr(getattr(config, name, None)))
        for name in sorted(config.values)
        if not any(word in name for word in _IRRELEVANT)
    ]
    variables = sorted(item for item in os.environ.items() if item[0].startswith(_VARIABLES))
    client = device.client
    kind = client.platform, client.platform_version, device.device_kind, device.id
    return jax.__version__, jaxlib.__version__, kind, settings, variables, tuning_key()
