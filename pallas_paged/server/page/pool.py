"""The pool as the page draws it: who holds which page, as JSON of a bounded size."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from pallas_paged.engine import AsyncEngine, PoolMap

MAX_CELLS = 4096
_SECONDS = 0.2  # for which an answer holds: many who look cost the engine no more than one
_NAMES = {PoolMap.FREE: "free", PoolMap.CACHED: "cached", PoolMap.SHARED: "shared"}


class PoolView:
    """Asks the engine for its pool while somebody looks, a few times a second at most."""

    def __init__(self, engine: AsyncEngine, page_size: int):
        """Ask an engine whose pages have `page_size` tokens."""
        self._engine, self._page_size = engine, page_size
        self._task: asyncio.Task[bytes] | None = None
        self._time = -math.inf

    async def read(self) -> bytes:
        """Return the JSON of `pool_json`; wait until the engine is between two steps.

        Raises:
            EngineDeadError: the engine is dead.
            RuntimeError: it has shut down.
        """
        is_old = time.monotonic() - self._time >= _SECONDS
        if self._task is None or (is_old and self._task.done()):
            self._time = time.monotonic()
            self._task = asyncio.create_task(self._ask())
        return await asyncio.shield(self._task)  # others may wait for it too

    async def _ask(self) -> bytes:
        fields = pool_json(await self._engine.pool_map(), self._page_size)
        return json.dumps(fields, separators=(",", ":")).encode()


def pool_json(maps: Sequence[PoolMap], page_size: int) -> dict[str, Any]:
    """Return what the page draws of the pools of all replicas, at most `MAX_CELLS` cells in all.

    A cell is one page or, of larger pools, several: it then shows shared pages before those of the
    newest request, cached ones and free ones.
    """
    pages_per_cell = max(-(-one.owners.size // (MAX_CELLS // len(maps))) for one in maps)
    replicas = []
    for one in maps:
        padding = -one.owners.size % pages_per_cell
        pages = np.pad(one.owners, (0, padding), constant_values=PoolMap.FREE)
        cells = pages.reshape(-1, pages_per_cell).max(axis=1)
        replicas.append(
            {
                "num_pages": one.owners.size,
                "counts": one.counts,
                "runs": _runs(cells),
                "num_tokens": one.num_tokens if pages_per_cell == 1 else {},
            }
        )
    return {"page_size": page_size, "pages_per_cell": pages_per_cell, "replicas": replicas}


def _runs(cells: np.ndarray) -> list[tuple[str | int, int]]:
    """Return cells by runs: a name or the number of a request, and how many follow one another."""
    ends = [*(np.flatnonzero(cells[1:] != cells[:-1]) + 1).tolist(), cells.size]
    starts = [0, *ends[:-1]]
    owners = cells[starts].tolist()
    return [
        (_NAMES.get(owner, owner), end - start)
        for owner, start, end in zip(owners, starts, ends, strict=True)
    ]
