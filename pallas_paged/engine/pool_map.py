"""Which request holds which page of a pool, for people who look at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pallas_paged.checks import INT32_MAX


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolMap:
    """Which request holds which page of a replica's pool, as the host knows it.

    It is as of the newest call of the device that was read: a page that a call in flight takes is
    still free here. Where layers with a window have a pool of their own, it is of the other one.

    Attributes:
        owners: `i32[num_pages]`; for each page `FREE`; `CACHED`, if only the prefix cache holds it;
            `Request.number`, if one sequence holds it; or `SHARED`, if several sequences do, of one
            request or of several. In this order the values rise, so the largest of some pages
            is what happens there.
        num_tokens: of the pages that a sequence has begun and not filled, by page.
    """

    FREE: ClassVar[int] = -2
    CACHED: ClassVar[int] = -1
    SHARED: ClassVar[int] = INT32_MAX

    owners: np.ndarray
    num_tokens: dict[int, int]

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of pages: "free", "cached", "shared", and "used" by one sequence."""
        owners = {"free": self.FREE, "cached": self.CACHED, "shared": self.SHARED}
        counts = {k: int(np.count_nonzero(self.owners == owner)) for k, owner in owners.items()}
        return counts | {"used": self.owners.size - sum(counts.values())}
