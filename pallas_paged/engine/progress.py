"""A bar on stderr for long work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def progress_bar(steps: Iterable[Any], total: int, unit: str, show: bool) -> Iterable[Any]:
    """Show a bar on stderr as the steps are taken, where that is a terminal and tqdm is there."""
    if not show:
        return steps
    try:
        from tqdm import tqdm
    except ImportError:
        return steps
    return tqdm(steps, total=total, unit=unit, disable=None)
