"""Count and time compilations."""

from __future__ import annotations

import collections
import re
from typing import Any

import jax.monitoring

_PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace_s",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower_s",
    "/jax/core/compile/backend_compile_duration": "compile_s",
}
_RETRIEVAL = "/jax/compilation_cache/cache_retrieval_time_sec"


class Compilations:
    """Count the programs that XLA compiles inside a `with` block, and time their phases.

    Attributes:
        count: number of programs, those of the persistent cache included.
        num_cached: how many of them came from the persistent cache.
    """

    def __init__(self) -> None:
        self.count = self.num_cached = 0
        self._seconds: dict[str, collections.Counter[str]] = {}

    def __enter__(self) -> Compilations:
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def functions(self) -> list[dict[str, Any]]:
        """Return the functions that were compiled, the slowest first.

        Returns:
            Of each the name, the `count` of its programs, and the seconds that tracing, lowering
            and compiling took, summed over its programs and over threads: `trace_s` (in which that
            of functions inside it counts too), `lower_s`, `compile_s`.
        """
        phases = {"count": 0, **dict.fromkeys(_PHASES.values(), 0.0)}
        found = [
            {"name": name, **phases, **seconds}
            for name, seconds in self._seconds.items()
            if seconds["count"]
        ]
        return sorted(found, key=lambda one: -sum(one[phase] for phase in _PHASES.values()))

    def _listen(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        self.num_cached += event == _RETRIEVAL
        if event not in _PHASES:
            return
        # "jit(f)" or "jit_f" where it is lowered and compiled, "f" where it is traced
        name = re.sub(r"^jit[(_](.*?)\)?$", r"\1", str(kwargs.get("fun_name")))
        seconds = self._seconds.setdefault(name, collections.Counter())
        seconds[_PHASES[event]] += duration_secs  # type: ignore[assignment]
        if _PHASES[event] == "compile_s":
            self.count += 1
            seconds["count"] += 1
