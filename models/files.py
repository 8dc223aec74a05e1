"""JSON files of a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class CheckpointError(ValueError):
    """The folder is not a checkpoint that can be run."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file.

    Raises:
        CheckpointError: there is no such file, or it holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (ValueError, RecursionError) as error:  # brackets may be nested too deep
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return value
