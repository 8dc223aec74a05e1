"""The steps that are compiled, which of them a batch runs in, and which come first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue
from typing import Any

from pallas_paged.engine.device.batch import BatchBuckets, Shape, kind_of
from pallas_paged.engine.device.compilation import BackgroundCompilation, Compilation
from pallas_paged.engine.device.program import fit_mode
from pallas_paged.engine.sampling_params import SamplingMode

Step = tuple[Shape, SamplingMode]


class CompiledSteps:
    """The steps that batches can run in.

    Attributes:
        buckets: shapes of the batches.
        compiled: the sampling modes of the steps of each shape so far, (shape, True) with given
            experts.
    """

    def __init__(self, buckets: BatchBuckets, compilation: Callable[[Step], Compilation]):
        """Begin without any, given their shapes and what compiles one."""
        self.buckets, self._compilation = buckets, compilation
        self.compiled: dict[Shape | tuple[Shape, bool], set[SamplingMode]] = {}
        self._pending: dict[Shape, set[SamplingMode]] = {}  # other threads compile them
        self._arrived: SimpleQueue[Step] = SimpleQueue()  # those have compiled them
        self._next: tuple[Step, BackgroundCompilation] | None = None

    def __len__(self) -> int:
        """Number of steps compiled: shapes times sampling modes."""
        self._take_arrived()
        return sum(map(len, self.compiled.values()))

    def all(self, modes: Iterable[SamplingMode]) -> list[Step]:
        """Return the steps of every shape in these modes, the largest first."""
        shapes = self.buckets.all()
        return list(dict.fromkeys((x, fit_mode(mode, x)) for x in shapes for mode in modes))

    def first(self, modes: Iterable[SamplingMode]) -> tuple[list[Step], list[Step]]:
        """Return the fewest steps that serve any batch of these modes, and the others in order."""
        steps = self.all(modes)
        found: dict[Any, Step] = {}
        for shape, mode in steps:
            largest, covering = found.setdefault(kind_of(shape), (shape, mode))
            found[kind_of(shape)] = largest, covering | fit_mode(mode, largest)
        first = [*found.values()]

        def order(step: Step) -> Any:
            """Small batches lose most in a large step, and the mode that covers all serves most."""
            shape, mode = step
            return mode != found[kind_of(shape)][1], shape[1] or shape[0], len(shape)

        return first, sorted((step for step in steps if step not in first), key=order)

    def expect(self, step: Step) -> partial[None]:
        """Let batches of a step run in a larger one until the result is called, in any thread."""
        shape, mode = step
        self._pending.setdefault(shape, set()).add(mode)
        return partial(self._arrived.put, step)

    def choose(self, shape: Shape, mode: SamplingMode, has_experts: bool) -> Step:
        """Return the step that a batch runs in: its own, or a larger one that is compiled.

        The mode may be larger wherever such a step is compiled, the shape only while the batch's
        own step is expected.
        """
        self._take_arrived()
        shapes = [shape]
        if not has_experts and any(one.covers(mode) for one in self._pending.get(shape, ())):
            shapes = self.buckets.from_(shape)
        for larger in shapes:
            compiled = self.compiled.get((larger, True) if has_experts else larger, set())
            if covering := [one for one in compiled if one.covers(mode)]:
                return larger, mode if mode in compiled else min(covering)
        if self._next is not None and self._next[0] == (shape, mode):
            self._next[1].join()  # if it has failed, the call raises the error
            self._next = None
        self.compiled.setdefault((shape, True) if has_experts else shape, set()).add(mode)
        return shape, mode

    def compile(self, step: Step, following: Step | None) -> None:
        """Compile a step whose batch comes now, and at the same time the one that follows.

        The first token need not wait for both. Nothing happens if the first one is compiled.
        """
        if not self._lacks(step):
            return
        one = self._compilation(step)
        lowered = None if one.load() else one.lower()
        if following is not None and self._lacks(following):
            work = [(self._compilation(following), lambda: None)]
            self._next = following, BackgroundCompilation(work)
        if lowered is not None:
            one.finish(lowered)

    @property
    def awaits_next(self) -> bool:
        """Whether the step that follows is being compiled."""
        return self._next is not None and not self._next[1].done.done()

    def _lacks(self, step: Step) -> bool:
        shape, mode = step
        known = self.compiled.get(shape, set()) | self._pending.get(shape, set())
        return not any(one.covers(mode) for one in known)

    def add(self, step: Step) -> None:
        """Note that a step is compiled."""
        shape, mode = step
        self._pending.get(shape, set()).discard(mode)
        self.compiled.setdefault(shape, set()).add(mode)

    def _take_arrived(self) -> None:
        while not self._arrived.empty():
            self.add(self._arrived.get())
