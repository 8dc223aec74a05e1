"""Hides the Triton lowering of Pallas, as in a JAX that has none. Import before JAX is used."""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

HIDDEN = ("jax.experimental.pallas.triton", "jax._src.pallas.triton")
# Hides Triton from a run of the tests, see conftest.py.
VARIABLE = "TESTS_WITHOUT_TRITON"


class _Hide(MetaPathFinder):
    """Refuses to import what is hidden, from anywhere."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if name in HIDDEN or name.startswith(tuple(f"{hidden}." for hidden in HIDDEN)):
            raise ModuleNotFoundError(f"{name} is hidden from this process", name=name)


def hide_triton() -> None:
    """Make every import of the Triton lowering raise ImportError from here on.

    Raises:
        RuntimeError: something has imported it already.
    """
    imported = [name for name in HIDDEN if name in sys.modules]
    if imported:
        raise RuntimeError(f"{imported} were imported before they could be hidden")
    sys.meta_path.insert(0, _Hide())


def is_hidden() -> bool:
    """Return whether this process hides Triton."""
    return any(isinstance(finder, _Hide) for finder in sys.meta_path)


if os.environ.get(VARIABLE):
    hide_triton()
