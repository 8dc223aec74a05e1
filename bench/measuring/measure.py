"""Measure one call in several variants: check each, time the right ones, pick the fastest."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.measuring import profiler, timing
from bench.measuring.shapes import Case, Shape
from pallas_paged.pages.layout import KVLayout

MAX_RELATIVE_ERROR = 1e-2
_LARGE_READ = 1 << 30, 2, 4  # bytes, sets and calls
_BRIEF = ("variant", "status", "reason", "kernel_us", "wall_us")

# attend(q [T, Hq, D] scaled already, k, v, block_table i32[B, N], *Case.lens, **Case.scales)
# -> out [T, Hq, D], or (out, lse)
Attend = Callable[..., Any]
# prepare(k_pages, v_pages, block_table, set index) -> (k, v, block_table) in the peer's layout
Prepare = Callable[[jax.Array, jax.Array, jax.Array, int], tuple[jax.Array, jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to call an implementation, whose result is that of its fastest right variant.

    Attributes:
        label: name of the variant within its implementation.
        attend: the call.
        kv_layout: of the pages.
        prepare: converts the K/V of a set before the clock starts, or None.
        sees_all: whether each query sees all tokens of its sequence, newer ones included.
    """

    label: str
    attend: Attend
    kv_layout: KVLayout = "HPND"
    prepare: Prepare | None = None
    sees_all: bool = False


def attempt(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a call, or the exception that it raises."""
    try:
        return function(*args)
    except Exception as error:  # a peer may fail in any way; the error becomes its reason
        return error


def reason(error: Exception) -> str:
    """Type and first line of an error."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]


def failed(error: Exception) -> dict[str, Any]:
    """The result of an implementation that raised an error."""
    return {"status": "failed", "reason": reason(error)}


def checked(error: float) -> dict[str, Any]:
    """The beginning of a result with this relative error: whether it is right, to be timed."""
    found = {"relative_l2": error, "status": "ok"}
    if error <= MAX_RELATIVE_ERROR:
        return found
    return found | {"status": "wrong", "reason": f"{error=:.3g} > {MAX_RELATIVE_ERROR}"}


def _distance(got: Any, want: Any) -> float:
    want, got = np.asarray(want, np.float64), np.asarray(got, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def relative_error(case: Case, outs: Sequence[Any], *, sees_all: bool = False) -> float:
    """Relative L2 error over a few queries of a run's first and last call.

    Args:
        case: the data of the run.
        outs: the results of a run, as `chain` returns them.
        sees_all: as in `Variant`.
    """
    token, row, length = np.array(case.shape.sample(), np.int32).T
    if sees_all:
        length = np.array(case.shape.seq_lens, np.int32)[row]
    first, before, last = outs
    before = before[0] if isinstance(before, tuple) else before
    errors = []
    for i, q, got in ((0, case.q, first), (case.shape.num_calls - 1, before, last)):
        table = jnp.asarray(case.tables[i % case.shape.num_sets][row])
        states = case.reference(q, token, table, jnp.asarray(length))
        parts = got if isinstance(got, tuple) else (got,)
        # A variant without a log-sum-exp is checked by its output alone.
        errors += [_distance(part[token], want) for part, want in zip(parts, states, strict=False)]
    return float(np.max(errors))


def make_steps(case: Case, k_pages: Any, v_pages: Any, prepare: Prepare | None) -> tuple:
    """(k, v, block_table) of each call.

    Every call has a table array of its own: with a shared one XLA would do common work, such as a
    gather, only once.
    """
    sets = []
    for i, table in enumerate(case.tables):
        one = (k_pages, v_pages, jnp.asarray(table))
        sets.append(prepare(*one, i) if prepare else one)
    calls = [sets[i % len(sets)] for i in range(case.shape.num_calls)]
    return tuple((k, v, jnp.array(table, copy=True)) for k, v, table in calls)


def chain(attend: Attend) -> Any:
    """A function of calls in a row; each output is the next query, so that no two calls overlap.

    The function returns the results of the first call and the last two, enough for
    `relative_error`; more would fill the memory where prompts are long.
    """
    attend = jax.jit(attend)  # traced and lowered once for all calls

    def run(q, steps, lens, scales):
        outs = []
        for k, v, block_table in steps:
            outs.append(attend(q, k, v, block_table, *lens, **scales))
            q = outs[-1][0] if isinstance(outs[-1], tuple) else outs[-1]
        return [outs[0], *outs[-2:]]

    return jax.jit(run)


def arguments(case: Case, variant: Variant) -> tuple:
    """The arguments of the function that `chain` returns."""
    k_pages, v_pages, scales = case.in_layout(variant.kv_layout)
    return case.q, make_steps(case, k_pages, v_pages, variant.prepare), case.lens, scales


def measure(case: Case, variant: Variant, compiled: Any, args: tuple, iterations: int) -> dict:
    """Result of one variant: its error and, if that is small enough, its times per call."""
    result = checked(relative_error(case, compiled(*args), sees_all=variant.sees_all))
    if variant.sees_all:
        pairs = np.dot(case.shape.q_lens, case.shape.seq_lens)
        result["num_flops"] = 4 * case.shape.num_q_heads * case.shape.head_dim * int(pairs)
    if result["status"] != "ok":
        return result
    return result | call_times(compiled, args, iterations, case.shape.num_calls)


def call_times(compiled: Any, args: tuple, iterations: int, num_calls: int) -> dict[str, Any]:
    """Times per call of a compiled function of `num_calls` calls: by the wall, and of kernels."""
    walls = timing.wall_times(compiled, args, iterations=-(-iterations // 4))
    found: dict[str, Any] = {"wall_us": timing.spread([us / num_calls for us in walls])}
    try:
        runs = timing.kernel_times(compiled, args, iterations=iterations)
    except Exception as cause:  # perhaps no CUPTI; the wall time is still valid
        return found | {"kernel_us": None, "reason": reason(cause)}
    return found | times_of_kernels(runs, num_calls)


def times_of_kernels(runs: Sequence[Sequence[profiler.Timed]], num_calls: int) -> dict[str, Any]:
    """Times per call of the kernels of runs of `num_calls` calls: in sum, and by name."""
    kernels: dict[str, float] = {}
    for name, us in (kernel for run in runs for kernel in run):
        kernels[name] = kernels.get(name, 0.0) + us / len(runs) / num_calls
    return {
        "kernel_us": timing.spread([sum(us for _, us in run) / num_calls for run in runs]),
        "kernels": {name: round(us, 3) for name, us in kernels.items()},
        "kernels_per_run": len(runs[0]),
    }


def best(results: Sequence[dict]) -> dict:
    """The fastest right result, else a wrong one, else a failed one."""
    right = [r for r in results if r["status"] == "ok"]
    if right:
        return min(right, key=lambda r: (r["kernel_us"] or r["wall_us"])["median"])
    return min(results, key=lambda r: r["status"] != "wrong")


def best_variant(results: Sequence[dict]) -> dict:
    """The best result of variants, with the times of each or why there are none."""
    variants = [{name: x for name, x in one.items() if name in _BRIEF} for one in results]
    return best(results) | {"variants": variants}


def measure_all(case: Case, find: Callable[[], list[Variant]], iterations: int) -> dict:
    """Result of one implementation, as `compare` returns it."""
    return compare(case, {"": find}, iterations)[""]


def compare(
    case: Case, finders: dict[str, Callable[[], list[Variant]]], iterations: int
) -> dict[str, dict]:
    """Results of all implementations by name: of the best variant, with `variants` for each.

    An exception becomes the reason of its result. Variants with the same program are compiled and
    measured once. `custom_calls` are the targets in a variant's program, which name the kernels
    that it runs.
    """
    found = {name: attempt(find) for name, find in finders.items()}
    prepared: dict[Any, tuple] = {}
    programs: dict[tuple, tuple[Variant, Any]] = {}  # traced; a key identifies a program
    custom_calls: dict[tuple, list[str]] = {}

    def trace(variant: Variant) -> tuple:
        pages = variant.kv_layout, variant.prepare
        if pages not in prepared:
            prepared[pages] = arguments(case, variant)
        traced = chain(variant.attend).trace(*prepared[pages])
        key = pages, variant.sees_all, str(traced.jaxpr)
        programs.setdefault(key, (variant, traced))
        return key

    def lower(key: tuple) -> Any:
        lowered = programs[key][1].lower()
        targets = re.findall(r"custom_call @([\w.$]+)", lowered.as_text())
        custom_calls[key] = sorted(set(targets))
        return lowered

    def result_of(key: tuple, compiled: Any) -> dict:
        if isinstance(compiled, Exception):
            raise compiled
        variant, _ = programs[key]
        result = measure(case, variant, compiled, prepared[key[0]], iterations)
        return result | {"custom_calls": custom_calls[key]}

    keys = {
        name: [(variant, attempt(trace, variant)) for variant in variants]
        for name, variants in found.items()
        if not isinstance(variants, Exception)
    }
    all_compiled = timing.compile_all(attempt(lower, key) for key in programs)
    measured = {
        key: attempt(result_of, key, compiled)
        for key, compiled in zip(programs, all_compiled, strict=True)
    }
    results = {}
    for name, variants in found.items():
        if isinstance(variants, Exception):
            results[name] = failed(variants)
            continue
        each = []
        for variant, key in keys[name]:
            result = key if isinstance(key, Exception) else measured[key]
            result = failed(result) if isinstance(result, Exception) else result
            each.append({"variant": variant.label} | result)
        results[name] = best_variant(each)
    return results


def measure_floor(iterations: int, shape: Shape | None = None) -> dict:
    """Time of a kernel that only reads the bytes of a shape, or the reason why there is none.

    Without a shape it reads 1 GiB, for a rate that does not depend on the shapes that are measured.
    """
    num_bytes, num_sets, num_calls = _LARGE_READ
    if shape is not None:
        num_bytes, num_sets, num_calls = shape.num_bytes, shape.num_sets, shape.num_calls
    sizes = {"num_sets": num_sets, "num_calls": num_calls}
    try:
        kernel_us = timing.floor_times(num_bytes, **sizes, iterations=iterations)
    except Exception as error:
        return failed(error) | {"num_bytes": num_bytes}
    return {"status": "ok", "num_bytes": num_bytes, "kernel_us": kernel_us}
