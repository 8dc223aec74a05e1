"""The replicas of an engine as one, in one process or several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from pallas_paged.engine.config import EngineConfig
from pallas_paged.engine.device.placement import placements
from pallas_paged.engine.device.runner_output import RunnerOutput
from pallas_paged.engine.device.weights import Weights, shapes_of
from pallas_paged.engine.model import Model
from pallas_paged.engine.replica.processes import Followers, Leader, connect
from pallas_paged.engine.replica.replica import Replica
from pallas_paged.engine.replica.router import Router
from pallas_paged.engine.requests.sequence import Sequence as TokenSequence
from pallas_paged.engine.sampling.sampler import SamplingMode
from pallas_paged.engine.stats import EngineStats


class Replicas:
    """What an engine does with all of its replicas; iterate over them, or index one.

    Attributes:
        followers: the other processes; None if there are none, or this is one of them.
        leader: process 0, if this is another one of several.
        num_processes: of the engine.
        num_pages, max_model_len: of each replica.
    """

    def __init__(
        self,
        model: Model,
        params: Any,
        config: EngineConfig,
        devices: Sequence[jax.Device] | None,
        process_outputs: Callable[[RunnerOutput, float], None],
    ):
        """Put the parameters on the devices of each replica, and create the pools in what is left.

        Args:
            model, params, config, devices: as in `Engine`.
            process_outputs: gets the output of each call, and the time of its read.

        Raises:
            ValueError: a size is out of range for this model, or for the devices.
        """
        places = placements(config.tensor_parallel, config.data_parallel, devices)
        model.kv_cache_spec.on_devices(config.tensor_parallel)
        self.followers: Followers | None = None
        self.leader: Leader | None = None
        self.num_processes = places[0].num_processes
        if self.num_processes > 1:
            sizes = model.vocab_size, model.max_model_len, model.eos_token_ids, model.kv_cache_spec
            self.followers, self.leader = connect(repr((config, sizes, shapes_of(params))))
        weights = [Weights(model, params, place) for place in places]
        if places[0].mesh is not None:
            jax.block_until_ready([one.leaves for one in weights])
        self.num_pages, self.max_model_len = config.sizes(model, places)
        self._all = [
            Replica(
                model,
                one,
                config,
                place,
                process_outputs,
                num_pages=self.num_pages,
                max_len=self.max_model_len,
                followers=self.followers,
            )
            for one, place in zip(weights, places, strict=True)
        ]
        self._router = Router(self._all, config.page_size)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> Replica:
        return self._all[index]

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._all)

    @property
    def in_flight(self) -> bool:
        """Whether a call has been dispatched and not read."""
        return any(replica.core.in_flight for replica in self._all)

    def choose(self, leader: TokenSequence) -> Replica:
        """Return the replica for the request of a new sequence."""
        return self._router.choose(leader)

    def step(self) -> None:
        """Dispatch the next call of each replica, and read the one before."""
        # All devices have work before the host waits for any.
        dispatched = [replica.core.dispatch() for replica in self._all]
        for replica, num_calls in zip(self._all, dispatched, strict=True):
            replica.core.finish_step(num_calls)

    def drain(self) -> None:
        """Read all calls in flight."""
        for replica in self._all:
            replica.core.drain()

    def check_params(self, params: Any) -> None:
        """Raise ValueError if other parameters differ in structure, shapes or dtypes."""
        self._all[0].weights.check(params)

    def update_params(self, params: Any) -> None:
        """Use other parameters from the next call on. Arrays on the devices are not copied.

        Raises:
            ValueError: structure, shapes or dtypes differ; nothing has changed.
        """
        self.check_params(params)
        if self.followers is not None:
            self.followers.send("release")
        leaves = [replica.weights.put(params) for replica in self._all]
        for replica, new in zip(self._all, leaves, strict=True):
            replica.weights.leaves = new
        if self.followers is not None:
            self.followers.rejoin()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        for replica in self._all:
            replica.scheduler.reset_prefix_cache()
        self._router.reset()

    def sleep(self) -> None:
        """Free the pools, with nothing in flight."""
        for replica in self._all:
            replica.sleep()
        self._router.reset()

    def wake(self) -> None:
        """Allocate the pools again."""
        for replica in self._all:
            replica.runner.executor.wake()

    def warmup(
        self,
        modes: list[SamplingMode],
        progress: Callable[[Iterable[Any], int], Iterable[Any]],
    ) -> None:
        """Compile for each replica, one after another: later ones find more in JAX's caches."""
        for replica in self._all:
            replica.runner.warmup(modes, progress)

    def update_tables(self) -> None:
        """Let the page tables do what has been decided."""
        for replica in self._all:
            replica.update_table()

    def check(self) -> None:
        """Wait for the devices; raise ValueError if an invariant of a page table is broken."""
        for replica in self._all:
            replica.check()

    def stats(self) -> EngineStats:
        """Return the counters of all replicas together."""
        return self._all[0].stats_with(self._all[1:])

    def release(self) -> None:
        """Let the other processes return from `follow`."""
        if self.followers is not None:
            self.followers.send("release")

    def follow(self) -> bool:
        """Make the calls of process 0; return False when it has closed the engine.

        Raises:
            RuntimeError: this is process 0 or the only one; or process 0 has failed or ended.
        """
        if self.leader is None:
            raise RuntimeError("follow() is for the other processes than process 0 of an engine")
        return self.leader.follow(self._all[0].runner.executor)

    def fail(self, error: BaseException) -> None:
        """Forget the calls in flight, because their state is lost, also in other processes."""
        for replica in self._all:
            replica.core.discard()
        if self.followers is not None:
            self.followers.close(error)
        if self.leader is not None:
            self.leader.fail(error)

    def close(self) -> None:
        """End the connections to other processes; `follow` returns False there."""
        if self.followers is not None:
            self.followers.close()
        if self.leader is not None:
            self.leader.close()
