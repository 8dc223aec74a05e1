"""The host side of serving without a device: plans run on an allocator of dicts and lists."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from models.request import Completion, Request, SamplingParams
from models.scheduler import Plan, Scheduler
from models.seq import Seq
from pallas_paged import PrefixCache
from tests.support.allocator_oracle import AllocatorOracle

PAGE_SIZE = 4


def make_scheduler(**sizes) -> Scheduler:
    defaults = dict(
        num_pages=16, page_size=PAGE_SIZE, max_seqs=4, token_budget=16, max_chunks=8, watermark=0
    )
    caching = sizes.pop("caching", False)
    cache = PrefixCache(page_size=PAGE_SIZE) if caching else None
    return Scheduler(**(defaults | sizes), cache=cache)


def make_seq(number: int, length: int, *, new: int = 8, index: int = 0, prompt=None) -> Seq:
    tokens = list(prompt) if prompt else [100 * number + i for i in range(length)]
    request = Request(number=number, prompt=tokens, params=SamplingParams(), seed=0)
    completion = Completion(index=index)
    return Seq(request=request, completion=completion, tokens=tokens[:], limit=len(tokens) + new)


def with_followers(leader: Seq, count: int) -> list[Seq]:
    others = [
        Seq(
            request=leader.request,
            completion=Completion(index=index),
            tokens=leader.tokens[:],
            limit=leader.limit,
        )
        for index in range(1, count + 1)
    ]
    for other in others:
        other.leader = leader
        leader.followers.append(other)
    return others


@dataclass
class Host:
    """Runs plans on an allocator that refuses wrong ones, and reads results one step late."""

    scheduler: Scheduler
    table: AllocatorOracle
    flights: deque = field(default_factory=deque)

    @classmethod
    def of(cls, scheduler: Scheduler, *, num_pages: int = 16, max_seqs: int = 4) -> Host:
        table = AllocatorOracle(
            num_pages=num_pages, page_size=PAGE_SIZE, max_seqs=max_seqs, pages_per_seq=64
        )
        return cls(scheduler, table)

    def settle(self) -> None:
        settlement = self.scheduler.take_settlement()
        assert all(self.table.retain(settlement.retained))
        rows = range(len(self.table.pages))
        self.table.free([row in settlement.freed for row in rows])
        self.table.release(settlement.released)

    def step(self) -> Plan:
        """Plans and runs a step, then reads the steps before it."""
        while (plan := self.scheduler.plan(in_flight=bool(self.flights))) is None:
            while self.flights:
                self.read()
            self.settle()
            self.scheduler.resync(self.table.num_free)
        self.settle()
        rows, pages = zip(*plan.adoptions, strict=True) if plan.adoptions else ((), ())
        assert all(self.table.attach(list(rows), [list(entry) for entry in pages]))
        assert all(self.table.fork([src for src, _ in plan.forks], [dst for _, dst in plan.forks]))
        new = [[] for _ in self.table.tokens]
        for seq in plan.decodes:
            given = seq in plan.given
            new[seq.seat] = [seq.tokens[-1] if given else token_at(seq, seq.num_computed - 1)]
        for chunk in plan.chunks:
            new[chunk.seq.seat] = chunk.tokens
        assert all(self.table.extend(new, 10**6)), "the plan needs more pages than are free"
        dispatched = bool(plan.decodes or plan.chunks)
        if dispatched:
            written = [
                (seq, seq.lives, self.table.pages[seq.seat][:], len(self.table.tokens[seq.seat]))
                for seq in [*plan.decodes, *(chunk.seq for chunk in plan.chunks)]
            ]
            sizes = [1] * len(plan.decodes) + [len(chunk.tokens) for chunk in plan.chunks]
            sampled = [*plan.decodes, *(chunk.seq for chunk in plan.chunks if chunk.ends)]
            report = written, sizes, sampled, self.table.num_free, self.scheduler.ledger
            self.flights.append(report)
        while len(self.flights) > dispatched:
            self.read()
        self.check()
        return plan

    def read(self) -> None:
        written, sizes, sampled, num_free, ledger = self.flights.popleft()
        self.scheduler.observe(num_free, ledger)
        for (seq, lives, pages, length), size in zip(written, sizes, strict=True):
            if seq.lives == lives and seq.row is not None:
                positions = range(length - size, length)
                seq.store([pages[position // PAGE_SIZE] for position in positions], PAGE_SIZE)
                self.scheduler.index(seq)
        for seq in sampled:
            seq.num_pending -= 1
            seq.parked = seq.steered
            if not (seq.finished or seq.steered):
                reason = seq.accept(token_at(seq, len(seq.tokens)), None)
                if reason is not None:
                    self.end(seq, reason)

    def end(self, seq: Seq, reason: str) -> None:
        seq.finish(reason)
        self.scheduler.remove(seq)

    def check(self) -> None:
        """Rows hold the tokens and the pages that the scheduler expects."""
        settled = set(range(len(self.table.pages))).difference(self.scheduler._settlement.freed)
        for seq in self.scheduler.running:
            if seq.row in settled:
                length = len(seq.tokens)
                pending = [token_at(seq, length + i) for i in range(seq.num_pending)]
                assert self.table.tokens[seq.seat] == [*seq.tokens, *pending][: seq.num_computed]
                num_full = seq.num_stored // PAGE_SIZE
                assert seq.pages[:num_full] == self.table.pages[seq.seat][:num_full]
        rows = [seq.row for seq in self.scheduler.running]
        assert sorted([*rows, *self.scheduler._rows]) == list(range(len(self.table.tokens)))
        orders = [seq.order for seq in self.scheduler.running]
        assert orders == sorted(orders)
        assert all(seq.row is None for seq in self.scheduler.queue)

    def run(self, max_steps: int = 2000) -> list[Plan]:
        plans = []
        while self.scheduler.queue or self.scheduler.running or self.flights:
            plans.append(self.step())
            assert len(plans) < max_steps
        return plans


def token_at(seq: Seq, position: int) -> int:
    """The token of a sequence at a position, the same under every plan."""
    return 1000 + position + 100_000 * seq.completion.index


def start(scheduler: Scheduler, *seqs: Seq) -> None:
    for seq in seqs:
        scheduler.add(seq)
