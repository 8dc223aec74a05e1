"""The state of a replica on its devices, and the jitted calls that change it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pallas_paged.decoder.peers import create_peers
from pallas_paged.engine.config import EngineConfig
from pallas_paged.engine.device import program
from pallas_paged.engine.device.attend import AttentionKernels
from pallas_paged.engine.device.batch import Batch, StepOutput
from pallas_paged.engine.device.compilation import (
    Compilation,
    compile_all,
    own_settings,
    progress_bar,
)
from pallas_paged.engine.device.placement import Placement, Shardings, Weights
from pallas_paged.engine.device.pool import create_pool, pool_dtype
from pallas_paged.engine.device.processes import Followers, interrupts_held
from pallas_paged.engine.device.state import (
    CHANGES,
    EngineState,
    History,
    SlotStates,
    TableArrays,
    create_history,
    fork,
    jit_change,
    set_history,
    set_slots,
    slot_states,
    update_tables,
)
from pallas_paged.engine.model import Model
from pallas_paged.engine.sampling.sampler import TokenCounts, create_token_counts, set_token_counts
from pallas_paged.engine.schedule.windows import WindowPool
from pallas_paged.kernels.device import Device
from pallas_paged.pages.pool import KVPool
from pallas_paged.pages.table import create_page_table

# One program; apart, each array of a table has one or two.
_create_table = jax.jit(
    create_page_table, static_argnames=("num_pages", "page_size", "max_seqs", "pages_per_seq")
)


class EngineDeadError(RuntimeError):
    """A step failed and took the engine's state with it; the cause is what failed."""

    def __init__(self, what: str, cause: BaseException):
        super().__init__(f"{what}: {str(cause) or type(cause).__name__}")
        self.__cause__ = cause


P = ParamSpec("P")
R = TypeVar("R")


def _followed(
    method: Callable[Concatenate[Executor, P], R],
) -> Callable[Concatenate[Executor, P], R]:
    """Let the other processes make the same call; positional arguments are sent to them."""

    @wraps(method)
    def call(self: Executor, *args: P.args, **options: P.kwargs) -> R:
        if self.followers is None:
            return method(self, *args, **options)
        with interrupts_held():  # all make the call, or none
            self.followers.send(method.__name__, args)
            return method(self, *args, **options)

    return call


class Executor:
    """Holds the state of a replica on its devices, and makes the calls on it.

    Arguments are NumPy arrays of few fixed shapes. In a program of several processes the executor
    of process 0 sends each call to the others, so that all make the same calls in the same order.

    Attributes:
        model, config, placement, weights, draft_weights: of the replica.
        num_pages: of the pool.
        windows: sizes of the pool of layers with a window, if they have one of their own.
        state: after all dispatched calls; the next one takes its buffers.
        pool_shape: shapes and dtypes of the pool.
        followers: the other processes; None if this is the only one, or follows itself.
    """

    def __init__(
        self,
        model: Model,
        weights: Weights,
        config: EngineConfig,
        placement: Placement,
        *,
        num_pages: int,
        max_len: int,
        windows: WindowPool | None = None,
        followers: Followers | None = None,
        draft_weights: Weights | None = None,
    ):
        """Create the state on the devices; the config may leave `num_pages` and `max_len` open."""
        self.weights, self.draft_weights, self.followers = weights, draft_weights, followers
        self.model, self.config, self.placement = model, config, placement
        self.num_pages, self.windows = num_pages, windows

        create_table = partial(
            _create_table,
            page_size=config.page_size,
            max_seqs=config.max_num_seqs,
            pages_per_seq=-(-max_len // config.page_size),
        )
        last_hidden, speculation = None, config.speculation
        if speculation is not None and (size := speculation.hidden_size) is not None:
            dtype = jnp.dtype(config.draft_model.kv_cache_spec.dtype)
            last_hidden = np.zeros((config.max_num_seqs, size), dtype)
        state = EngineState(
            last_hidden=last_hidden,
            table=create_table(num_pages=num_pages),
            window_table=None if windows is None else create_table(num_pages=windows.num_pages),
            kept_tokens=0 if windows is None else windows.kept_tokens,
            pool=KVPool(layers=()),
            slots=slot_states(config.max_num_seqs, len(model.eos_token_ids)),
            valid=np.bool_(True),
            history=None
            if speculation is None or config.draft_model is not None
            else create_history(config.max_num_seqs, max_len),
        )
        self.state = replace(placement.put(state), pool=self._create_pool())
        self.pool_shape = jax.eval_shape(lambda: self.state.pool)
        shardings = None if placement.mesh is None else Shardings.of(self.state)
        kernels = AttentionKernels(config.implementation, config.interpret)
        draft = config.draft_model
        of_draft = None if draft_weights is None else (draft, draft_weights.structure)
        self._step = program.make_step(model, weights.structure, kernels, shardings, of_draft)
        mesh = placement.mesh
        self._programs: dict[Any, jax.stages.Compiled] = {}  # of the batches of a kind
        self._program_cache = None
        if mesh is None and followers is None:
            self._program_cache = program.ProgramCache.of(
                model, [*kernels], placement.devices[0], draft
            )
        self._peers = None if mesh is None or mesh.size == 1 else create_peers(mesh)
        self._decoding: tuple[Any, Any] | None = None  # rows of the newest batch, and on the device
        self._changes: dict[Any, Callable[..., EngineState]] = {}  # jitted, from their first use on
        self._change_compilations: list[Compilation] = []
        self._is_collecting = False

    @property
    def free_tokens(self) -> float:
        """Tokens of a step that take no longer than one, because it reads all weights."""
        leaves = self.weights.leaves
        num_bytes = sum(leaf.nbytes for leaf in leaves) / max(1, sum(leaf.size for leaf in leaves))
        with jax.default_device(self.placement.local_devices[0]):
            return Device.here().free_tokens(num_bytes)

    @property
    def draft_share(self) -> float:
        """Bytes of the draft model's weights, in those of the model; 0 without one."""
        if self.draft_weights is None:
            return 0.0
        own, other = (
            sum(leaf.nbytes for leaf in one.leaves) for one in (self.weights, self.draft_weights)
        )
        return other / max(1, own)

    @property
    def num_free(self) -> int:
        """Free pages after all dispatched calls, for which it waits."""
        return int(self.read(self.state.table.num_free))

    @_followed
    def step(self, batch: Batch) -> StepOutput:
        """Dispatch a batch."""
        kind = program.kind_of(batch)
        if self._program_cache is not None and kind not in self._programs:
            one = self.compilation(batch)
            if not one.load():
                one.finish(one.lower())
        step = self._programs.get(kind, self._step)
        counts = self.state.counts
        self.state, output = step(*self._arguments(batch))
        if not batch.mode.penalties:
            self.state = replace(self.state, counts=counts)
        return output

    @property
    def draws_apart(self) -> bool:
        """Whether a decode step with masks leaves that to `draw`: on one device, without drafts.

        The device computes logits while the host fills the masks.
        """
        return self.placement.mesh is None and self.config.speculation is None

    def draw(self, batch: Batch, output: StepOutput) -> StepOutput:
        """Dispatch the draw of a step's `Undrawn` output; the batch has masks."""
        arguments = self._drawing(batch), self._placed(batch), output.undrawn
        new, token_ids, logprobs = program.make_draw()(*arguments)
        changed = {"counts": new.counts} if batch.mode.penalties else {}
        self.state = replace(self.state, slots=new.slots, **changed)
        return replace(output, token_ids=token_ids, logprobs=logprobs, undrawn=None)

    @_followed
    def update_table(self, *updates: TableArrays) -> None:
        """Change the page tables, as `update_tables`."""
        self._change(update_tables, updates)

    @_followed
    def fork(self, src: np.ndarray, dst: np.ndarray) -> None:
        """Fork slots, as `state.fork`."""
        self._change(fork, src, dst)

    @_followed
    def set_slots(self, indices: np.ndarray, values: SlotStates) -> None:
        """Set slots, as `state.set_slots`."""
        self._change(set_slots, indices, values)

    @_followed
    def set_history(self, slots: np.ndarray, values: History) -> None:
        """Set the tokens in which drafts for slots are looked for, as `state.set_history`."""
        self._change(set_history, slots, values)

    @_followed
    def count_tokens(
        self,
        slot: np.int32,
        prompt_token_ids: np.ndarray,
        output_token_ids: np.ndarray,
        first: np.bool_,
    ) -> None:
        """Count tokens for penalties, as `sampler.set_token_counts`."""
        counts = self._make_counts()
        shardings = None if self.placement.mesh is None else Shardings.of(counts)
        count = jit_change(set_token_counts, shardings)
        counts = count(counts, slot, prompt_token_ids, output_token_ids, first)
        self.state = replace(self.state, counts=counts)

    @_followed
    def sleep(self) -> None:
        """Free the memory of the pool."""
        for leaf in jax.tree.leaves((self.state.pool, self.state.counts)):
            leaf.delete()
        self.state = replace(self.state, counts=None)

    @_followed
    def wake_up(self) -> None:
        """Allocate the pool again."""
        self.state = replace(self.state, pool=self._create_pool())

    @_followed
    def compile(self, batches: Sequence[Batch], progress: bool = False) -> None:
        """Compile the steps of batches, in threads; show a bar on stderr if `progress`."""

        def shown(steps: Iterable[Any], total: int) -> Iterator[Any]:
            for one in progress_bar(steps, total, "compilation", progress):
                yield one
                if self.followers is not None:
                    self.followers.check()

        # Compilers of several processes may wait for one another, so they go in the same order.
        in_order = self.placement.num_processes > 1
        compilations = [*map(self.compilation, batches), *self._change_compilations]
        self._change_compilations.clear()
        compile_all(compilations, in_order=in_order, shown=shown)

    def compilation(self, batch: Batch) -> Compilation:
        """Return the compilation of a batch's step, which other threads may run."""
        arguments, programs, then = self._arguments(batch), self._programs, None
        if batch.mode.masks and batch.masks is None:
            sharding, placed = self.state.valid.sharding, self._placed(batch)
            undrawn = program.draw_types(placed, self.model.vocab_size, sharding)
            then = Compilation(program.make_draw(), (self._drawing(batch), *undrawn))
        cache = self._program_cache
        return Compilation(self._step, arguments, program.kind_of(batch), programs, cache, then)

    @contextmanager
    def collecting_changes(self) -> Iterator[None]:
        """Let the next `compile` compile the changes of the state that this block would make.

        With other processes they are made as ever.
        """
        self._is_collecting = self.followers is None
        try:
            yield
        finally:
            self._is_collecting = False

    def _arguments(self, batch: Batch) -> tuple[Any, ...]:
        counts = self._make_counts() if batch.mode.penalties else None
        state = replace(self.state, counts=counts)
        draft_leaves = () if self.draft_weights is None else self.draft_weights.leaves
        return self.weights.leaves, state, self._placed(batch), self._peers, draft_leaves

    def _placed(self, batch: Batch) -> Batch:
        """Return a batch that only decodes with its rows on the device, as they were if equal.

        Each copy takes the host its time, and XLA updates a CUDA graph whose arguments have moved.
        """
        if batch.chunks is not None or self.placement.mesh is not None:
            return batch
        rows = batch.decode_slots, batch.num_steps
        key = tuple(one.tobytes() for one in rows)
        if self._decoding is None or self._decoding[0] != key:
            self._decoding = key, self.placement.put(rows)
        decode_slots, num_steps = self._decoding[1]
        return replace(batch, decode_slots=decode_slots, num_steps=num_steps)

    def _drawing(self, batch: Batch) -> EngineState:
        """Return what of the state the draw of a batch takes."""
        taken = ("slots", "counts") if batch.mode.penalties else ("slots",)
        return replace(self.state, **_without(taken))

    def _change(self, change: Callable[..., EngineState], *args: Any) -> None:
        """Change the state by a function of `CHANGES`."""
        given = replace(self.state, **_without(CHANGES[change]))
        if change not in self._changes:
            shardings = None if self.placement.mesh is None else Shardings.of(given)
            self._changes[change] = jit_change(change, shardings)
        if self._is_collecting:
            self._change_compilations.append(Compilation(self._changes[change], (given, *args)))
            return
        new = self._changes[change](given, *args)
        self.state = replace(self.state, **{x: getattr(new, x) for x in CHANGES[change]})

    @own_settings()
    def trace(self, batch: Batch) -> StepOutput:
        """Trace the step of a batch, so that a model that it can't run fails now.

        Returns:
            Shapes and dtypes of the output.
        """
        return jax.eval_shape(self._step, *self._arguments(batch))[1]

    def read(self, arrays: Any) -> Any:
        """Wait for arrays of the device, and return them as NumPy arrays."""
        if self.followers is not None:
            self.followers.wait(arrays)
        return jax.device_get(arrays)

    def wait(self) -> None:
        """Wait for all dispatched calls; also asleep, without the pool."""
        arrays = self.state.table, self.state.window_table, self.state.slots
        if self.followers is not None:
            self.followers.wait(arrays)
        jax.block_until_ready(arrays)

    def _create_pool(self) -> KVPool:
        config, placement = self.config, self.placement

        def create(model: Model, dtype: str | None, window_pages: int | None) -> KVPool:
            return create_pool(
                model.kv_cache_spec.on_devices(placement.num_devices),
                num_pages=self.num_pages,
                num_window_pages=window_pages,
                page_size=config.page_size,
                dtype=pool_dtype(model.kv_cache_spec, dtype),
                sharding=placement.pool,
            )

        windows = None if self.windows is None else self.windows.num_pages
        pool = create(self.model, config.kv_cache_dtype, windows)
        if (draft := config.draft_model) is not None:  # in the same pages
            of_draft = create(draft, config.draft_cache_dtype, None)
            pool = KVPool(layers=(*pool.layers, *of_draft.layers))
        return placement.put(pool) if placement.mesh is None else pool

    def _make_counts(self) -> TokenCounts:
        """Return the counts of the state, which has them from the first use on."""
        if (counts := self.state.counts) is None:
            shardings = self.placement.replicated
            make = jax.jit(create_token_counts, static_argnums=(0, 1), out_shardings=shardings)
            counts = make(self.config.max_num_seqs, self.model.vocab_size)
            self.state = replace(self.state, counts=counts)
        return counts


def _without(names: Iterable[str]) -> dict[str, Any]:
    """Return None for each field of a state's arrays but these."""
    arrays = (one.name for one in fields(EngineState) if one.name != "kept_tokens")
    return dict.fromkeys(set(arrays).difference(names))
