"""A replica: the devices that compute together, with their pool and the schedule of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from pallas_paged.engine.config import EngineConfig
from pallas_paged.engine.device.kv_cache import pool_bytes
from pallas_paged.engine.device.placement import Placement
from pallas_paged.engine.device.runner import ModelRunner
from pallas_paged.engine.device.runner_output import RunnerOutput
from pallas_paged.engine.device.weights import Weights
from pallas_paged.engine.model import Model
from pallas_paged.engine.replica.core import EngineCore
from pallas_paged.engine.replica.processes import Followers
from pallas_paged.engine.schedule.scheduler import Scheduler
from pallas_paged.engine.stats import Counters, EngineStats
from pallas_paged.pages.check import check_page_table
from pallas_paged.pages.prefix_cache import PrefixCache


class Replica:
    """Serves some of an engine's requests on devices, a pool and a prefix cache of its own.

    Attributes:
        scheduler, runner, core: what runs on the devices, how, and the loop of both.
        cache: None computes every prompt in full.
        counters: of its requests and calls.
        load: tokens that its unfinished requests may have in all.
        num_pages: of its pool.
    """

    def __init__(
        self,
        model: Model,
        weights: Weights,
        config: EngineConfig,
        placement: Placement,
        process_outputs: Callable[[RunnerOutput, float], None],
        *,
        num_pages: int,
        max_len: int,
        followers: Followers | None = None,
    ):
        """Create the pool.

        Args:
            model, config: of the engine.
            weights: on the devices of `placement`.
            placement: the devices.
            process_outputs: gets the output of each call, and the time of its read.
            num_pages, max_len: sizes that the config may leave open.
            followers: the other processes of this replica.
        """
        self.weights = weights
        self.runner = ModelRunner(
            model,
            weights,
            config,
            placement,
            num_pages=num_pages,
            max_len=max_len,
            followers=followers,
        )
        page_size, caching = config.page_size, config.enable_prefix_caching
        self.cache = PrefixCache(page_size=page_size) if caching else None
        self.scheduler = Scheduler(
            num_pages=num_pages,
            page_size=page_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            watermark=int(config.watermark * num_pages),
            cache=self.cache,
            sliding_window=model.kv_cache_spec.sliding_window,
        )
        self.counters = Counters(num_free_pages=num_pages)
        self.core = EngineCore(
            self.scheduler,
            self.runner,
            self.counters,
            process_outputs,
            config.num_scheduler_steps,
        )
        self.num_pages, self.load = num_pages, 0

    def sleep(self) -> None:
        """Free the pool's memory, with nothing in flight; sequences wait to be recomputed."""
        self.scheduler.preempt_all()
        self.scheduler.reset_prefix_cache()
        self.update_table()
        self.scheduler.resync(self.num_pages)
        self.runner.executor.sleep()

    def check(self) -> None:
        """Wait for the devices; raise ValueError if an invariant of the page table is broken."""
        cached = self.cache.pages if self.cache is not None else ()
        self.runner.executor.wait()
        check_page_table(self.runner.table, retained=np.asarray(cached, np.int32))

    def update_table(self) -> None:
        """Let the page table do what has been decided."""
        self.runner.update_table(self.scheduler.pages.take_update(), [])

    def stats(self) -> EngineStats:
        """Return the counters so far."""
        return self.stats_with(())

    def stats_with(self, others: Iterable[Replica]) -> EngineStats:
        """Return the counters of this replica and others together."""
        replicas = [self, *others]
        for replica in replicas:
            replica._count_idle_pages()
        pools = [replica.runner.executor.pool_shape for replica in replicas]
        return Counters.sum([replica.counters for replica in replicas]).snapshot(
            num_waiting=sum(len(replica.scheduler.waiting) for replica in replicas),
            num_running=sum(len(replica.scheduler.running) for replica in replicas),
            num_preemptions=sum(replica.scheduler.num_preemptions for replica in replicas),
            compilations=sum(replica.runner.num_compiled for replica in replicas),
            num_pages=sum(replica.num_pages for replica in replicas),
            num_shared_pages=sum(
                replica.cache.num_shared for replica in replicas if replica.cache is not None
            ),
            kv_cache_dtype=pools[0].layers[0].k_pages.dtype.name,
            pool_bytes=sum(map(pool_bytes, pools)),
        )

    def _count_idle_pages(self) -> None:
        """Count the pages anew where nothing runs: the newest report may be older than an abort."""
        if not self.scheduler.running:
            self.counters.num_cached_pages = num_cached = self.scheduler.pages.num_evictable
            self.counters.num_free_pages = self.num_pages - num_cached
