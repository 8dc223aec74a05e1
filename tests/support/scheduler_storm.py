"""A storm of requests on the host side of the engine: no device, no model.

`python -m tests.support.scheduler_storm 1000000` runs a million requests, and prints what they did.
"""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pallas_paged.engine import Request, SamplingParams
from pallas_paged.engine.requests.output_processor import OutputProcessor
from pallas_paged.engine.schedule.calls import RunnerOutput, SchedulerOutput
from pallas_paged.engine.stats import Counters
from tests.support.scheduler_host import FIRST, STRIDE, Host, make_request

_STEMS = [[1000 * stem + i for i in range(40)] for stem in range(2, 26)]
_PARAMS = [
    SamplingParams(max_tokens=most, n=n, best_of=best_of, stop_token_ids=stop)
    for most in (1, 3, 8, 20)
    for n, best_of in ((1, None), (1, None), (1, None), (2, None), (5, None), (1, 3))
    for stop in ((), *(range(FIRST + i, FIRST + 5 * STRIDE, STRIDE) for i in (2, 9)))
] + [SamplingParams(max_tokens=0), SamplingParams(max_tokens=8, n=3, prompt_logprobs=0)]


class Storm(Host):
    """Requests that come, end, are aborted and preempted at random; `counts` has how many."""

    def __init__(
        self,
        seed: int,
        *,
        checks: int,
        window: int | None = None,
        steps: Sequence[int] = (1, 2, 8),
        most_live: int = 64,
        longest: int = 40,
        **options: Any,
    ):
        """Prepare; invariants of all pages are checked in every step that `checks` divides.

        Args:
            steps: numbers of steps of calls that only decode.
            most_live: requests at a time, more or less.
            longest: tokens of a shared prefix, and new tokens, at most.
        """
        self.checks, self.most_live, self.longest = checks, most_live, longest
        self.outputs = OutputProcessor(None, (), Counters())
        self.live: dict[str, Request] = {}
        self.counts: Counter[str] = Counter()
        sizes = dict(num_pages=110 if window is None else 90, max_num_seqs=32, watermark=1)
        sizes |= dict(max_num_batched_tokens=96, ends_early=False, sliding_window=window)
        super().__init__(num_steps=lambda: self.rng.choice(steps), **sizes | options)
        self.rng.seed(seed)

    def serve(self, num_requests: int) -> None:
        """Serve all requests to their ends."""
        scheduler, rng, left = self.scheduler, self.rng, num_requests
        while left or self.live or self.calls:
            has_room = len(self.live) < self.most_live
            for _ in range(rng.randrange(max(2, self.most_live * 3 // 8)) if has_room else 0):
                if left:
                    self._submit(num_requests - left)
                    left -= 1
            event = rng.random() - 0.3 * self.most_live / 64
            if self.live and event < 0:
                self.outputs.abort(self.live[rng.choice([*self.live])])
                self._reschedule()
            elif event < 0.002:
                self.reset_prefix_cache()
            elif event < 0.004:
                self.drain()
                scheduler.preempt_all()
            self.counts["long calls"] += self.step().num_steps > 1
            self.counts["steps"] += 1
            assert self.counts["steps"] < 100 * num_requests, "requests hang"
        self.update()
        super().check()
        assert not (scheduler.waiting or scheduler.running or self.outputs.load)
        assert self.table.num_free + scheduler.pages.num_evictable == self.sizes["num_pages"]
        assert self.counts["ended"] == num_requests
        self.counts["preemptions"] = scheduler.num_preemptions
        self.counts["prefix_cache_hits"] = scheduler.num_hit_tokens
        self.reset_prefix_cache()
        self.update()
        assert self.table.num_free == self.sizes["num_pages"]

    def schedule(self) -> SchedulerOutput | None:
        """Begin requests as `Replica` does, and schedule a call."""
        queue, waiting = self.outputs.queue, self.scheduler.waiting
        most = self.sizes["max_num_seqs"]
        while queue and (len(waiting) < most or queue[0].order < waiting[most - 1].order):
            self.outputs.begin()
            self._reschedule()
        return super().schedule()

    def process(self, output: RunnerOutput) -> None:
        self.outputs.process(output, time.perf_counter())
        self._reschedule()

    def check(self) -> None:
        if self.counts["steps"] % self.checks == 0:
            super().check()
            orders = [one.order for one in self.outputs.queue]
            assert orders == sorted(orders)

    def _submit(self, number: int) -> None:
        rng = self.rng
        stem = rng.choice(_STEMS[: self.most_live // 2])
        params = rng.choice([x for x in _PARAMS if (x.max_tokens or 0) <= self.longest])
        prompt = stem[: rng.randrange(self.longest + 1)]
        prompt += [100_000 + number] * rng.randrange(0 if prompt else 1, self.longest // 5 + 1)
        values: dict[str, Any] = dict(params=params, priority=rng.choice((0, 0, 0, 0, -1, 3)))
        if params.prompt_logprobs is not None:
            values |= dict(score_start=1, prompt_logprobs=[None] * len(prompt))
        request = make_request(number, prompt, new=params.max_tokens or 0, **values)
        self.live[request.request_id] = request
        self.outputs.add(request)

    def _reschedule(self) -> None:
        ended, started = self.outputs.take_changes()
        for one in ended:
            if one.slot is not None and one.slot not in self.scheduler.pages.update.freed:
                self.check_tokens(one)
            self.scheduler.remove(one)
        for sequences in started:
            self.scheduler.add(sequences)
        for output in self.outputs.take_outputs():
            if output.finished:
                self._end(self.live.pop(output.request_id))

    def _end(self, request: Request) -> None:
        """A request ends once, with the tokens that it gets alone."""
        params = request.params
        self.counts["ended"] += 1
        assert len(request.outputs) == params.n
        for one in request.outputs:
            new = one.token_ids
            first = new[0] if new else FIRST
            assert first % STRIDE == FIRST and new == [*range(first, first + len(new))]
            stops = bool(new) and new[-1] in (params.stop_token_ids or ())
            assert one.finish_reason == "abort" or stops or len(new) == params.max_tokens
            self.counts[str(one.finish_reason)] += 1
        assert request.num_cached_tokens < len(request.prompt_token_ids)


def main(num_requests: int) -> None:
    kinds = [dict(caching=x, window=window) for window in (None, 9) for x in (True, False)]
    total: Counter[str] = Counter()
    start = time.perf_counter()
    for seed, kind in enumerate(kinds):
        storm = Storm(seed, checks=50, **kind)
        storm.serve(num_requests // len(kinds))
        total += storm.counts
        print(kind, dict(storm.counts), flush=True)
    print(f"{dict(total)} in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]))
