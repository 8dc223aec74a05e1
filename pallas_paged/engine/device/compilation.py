"""Compilation of an engine's programs in threads, before its calls or beside them."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax

from pallas_paged.checks import default_promotion
from pallas_paged.engine.device.program import ProgramCache

logger = logging.getLogger("pallas_paged")

_MAX_THREADS = 6
# Threads that trace a function of two programs at once get a copy each, so a program's text, its
# key in JAX's compilation cache, would depend on the timing.
_LOWERING = threading.RLock()


class Compilation:
    """A program to compile, in any thread: it reads the types of its arguments only.

    Attributes:
        kind: what the engine calls the program by.
    """

    def __init__(
        self,
        function: Any,
        arguments: tuple[Any, ...],
        kind: Any = None,
        programs: dict[Any, jax.stages.Compiled] | None = None,
        cache: ProgramCache | None = None,
        then: Compilation | None = None,
    ):
        """Take what to compile.

        Args:
            function: jitted.
            arguments: of its calls. Arrays may be donated or deleted meanwhile.
            kind: of the program in `programs`.
            programs: where a program of the cache is put; others are found by the call itself.
            cache: of programs in files.
            then: of the program that runs behind this one, which JAX's own cache has if `cache` has
                this one.
        """
        self.kind, self._then = kind, then
        self._function, self._programs, self._cache = function, programs, cache
        self._arguments = jax.tree.map(_type_of, arguments)

    def load(self) -> bool:
        """Load the program; return whether it was in the cache."""
        if self._cache is None or (program := self._cache.load(self._arguments)) is None:
            return False
        assert self._programs is not None
        self._programs[self.kind] = program
        return True

    def lower(self) -> jax.stages.Lowered:
        with _LOWERING, own_settings():
            return self._function.lower(*self._arguments)

    def finish(self, lowered: jax.stages.Lowered) -> None:
        """Compile the program, and keep it for later processes."""
        program = lowered.compile()
        if self._cache is not None:
            assert self._programs is not None
            self._cache.save(self._arguments, program)
            self._programs[self.kind] = program
        if self._then is not None:
            self._then.finish(self._then.lower())


@contextmanager
def own_settings() -> Iterator[None]:
    """Leave the caller's mesh, and settings with which the engine's programs can't run or differ.

    Also a decorator.
    """
    with (
        jax.set_mesh(None),
        jax.transfer_guard("allow"),
        jax.disable_jit(False),
        jax.enable_x64(False),
        default_promotion(),
    ):
        yield


def progress_bar(steps: Iterable[Any], total: int, unit: str, show: bool) -> Iterable[Any]:
    """Show a bar on stderr as the steps are taken, where that is a terminal and tqdm is there."""
    if not show:
        return steps
    try:
        from tqdm import tqdm
    except ImportError:
        return steps
    return tqdm(steps, total=total, unit=unit, disable=None)


def compile_all(
    compilations: Sequence[Compilation],
    *,
    in_order: bool,
    shown: Callable[[Iterable[Any], int], Iterable[Any]],
) -> None:
    """Compile programs in threads, and wait for them.

    Programs that the cache lacks are lowered in order, one after another.

    Args:
        compilations: of the programs.
        in_order: whether they compile one after another too.
        shown: returns an iterable as it is, and may show how far it has come, given its length.
    """

    def compile_next(_: Compilation) -> None:
        with _LOWERING:
            one = next(remaining)
            lowered = one.lower()
        one.finish(lowered)

    with _no_collections(), ThreadPoolExecutor(1 if in_order else num_threads()) as pool:
        loaded = pool.map(Compilation.load, compilations)
        missing = [one for one, found in zip(compilations, loaded, strict=True) if not found]
        remaining = iter(missing)
        for _ in shown(pool.map(compile_next, missing), len(missing)):
            pass


@contextmanager
def _no_collections() -> Iterator[None]:
    """Let Python collect no garbage: that takes 7 to 9% of the time in which programs are lowered.

    They leave few cycles, but many objects for the collector to look at (bench/notes/server.md).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def num_threads() -> int:
    return min(_MAX_THREADS, os.cpu_count() or 1)


class BackgroundCompilation:
    """Compiles programs in threads of its own while their engine makes calls.

    Attributes:
        done: its result is None once all are compiled; else it has the first error, or
            CancelledError if it was stopped.
    """

    def __init__(self, compilations: Sequence[tuple[Compilation, Callable[[], object]]]) -> None:
        """Start.

        Args:
            compilations: in their order, each with a function to call when it is compiled.
        """
        self.done: Future[None] = Future()
        self.done.set_running_or_notify_cancel()  # its users can't cancel it
        self._remaining, self._stopping = deque(compilations), False
        self._error: Exception | None = None
        # Daemons, which `atexit` stops: the interpreter would wait for others to compile all. All
        # start here, as a thread can't start others once the interpreter ends.
        count = min(num_threads(), len(self._remaining))
        self._workers = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        self._thread = threading.Thread(target=self._run, name="compilation", daemon=True)
        atexit.register(self.stop)
        for one in (*self._workers, self._thread):
            one.start()

    def stop(self) -> None:
        """Start no more, and wait for what compiles: nothing can interrupt the compiler."""
        self._stopping = True
        self.join()

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join()

    def _run(self) -> None:
        """Wait for the threads that compile, and say how it ended."""
        for one in self._workers:
            one.join()
        atexit.unregister(self.stop)
        error = self._error or (CancelledError() if self._remaining else None)
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)

    def _work(self) -> None:
        """Compile one after another."""
        while True:
            with _LOWERING:
                if self._stopping or not self._remaining:
                    return
                one, when_done = self._remaining.popleft()
                try:
                    lowered = None if one.load() else one.lower()
                except Exception as error:  # of many kinds: JAX and the model raise them
                    self._report(one, error)
                    continue
            try:
                if lowered is not None:
                    one.finish(lowered)
            except Exception as error:  # XLA's
                self._report(one, error)
            else:
                when_done()

    def _report(self, one: Compilation, error: Exception) -> None:
        logger.error("a step can't be compiled: %s", one.kind, exc_info=error)
        self._error = self._error or error


def _type_of(x: Any) -> Any:
    """Return what a program depends on of an argument: of arrays of a device not the contents."""
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding, weak_type=x.aval.weak_type)
