"""A prefix cache over a page table: requests that share prefixes, in a pool of a few pages."""

from __future__ import annotations

import numpy as np
import pytest

import pallas_paged as pp
from tests.support.page_tables import attach, extend, free, i32, make_table, release, retain

PAGE_SIZE, NUM_PAGES, NUM_ROWS, PAGES_PER_SEQ = 2, 12, 4, 8


class Server:
    """The table and the cache as an engine uses them, one request at a time, without K/V.

    In place of K/V a slot holds its token and all tokens before it, which determine K/V.
    """

    def __init__(self, hash_page):
        self.table = make_table(NUM_PAGES, PAGE_SIZE, NUM_ROWS, PAGES_PER_SEQ)
        self.cache = pp.PrefixCache(page_size=PAGE_SIZE, hash_page=hash_page)
        self.slots = {}
        self.requests = {}  # row to (lease, tokens)

    def check(self):
        pp.check_page_table(self.table, retained=self.cache.pages)

    def admit(self, tokens):
        """Give a prompt a row; return False without a row or pages for it."""
        row = next((row for row in range(NUM_ROWS) if row not in self.requests), None)
        if row is None:
            return False
        lease = self.cache.lookup(tokens)
        self.table, ok = attach(self.table, i32(row), padded(lease.pages)[None])
        assert np.all(ok)
        self.check()
        self.requests[row] = lease, []
        if not self.append(row, tokens):
            self.end(row)
            return False
        return True

    def append(self, row, new_tokens):
        """Reserve the row's missing tokens, evicting if necessary, and write them."""
        lease, tokens = self.requests[row]
        held = int(self.table.seq_lens[row])
        counts = np.zeros(NUM_ROWS, np.int32)
        counts[row] = len(tokens) + len(new_tokens) - held
        table, ok = extend(self.table, counts)
        while not ok[row] and self.cache.num_evictable > 0:
            self.give_back(self.cache.evict(1))
            table, ok = extend(self.table, counts)
        if not ok[row]:
            return False
        self.table = table
        tokens += new_tokens
        for position in range(held, len(tokens)):
            self.slots[self.slot(row, position)] = tuple(tokens[: position + 1])
        for position in range(len(tokens)):
            assert self.slots[self.slot(row, position)] == tuple(tokens[: position + 1])
        pages = np.asarray(self.table.block_tables[row])
        new = self.cache.insert(lease, tokens, pages[: -(-len(tokens) // PAGE_SIZE)])
        self.table, ok = retain(self.table, padded(new))
        assert int(np.sum(ok)) == len(new)
        self.check()
        return True

    def slot(self, row, position):
        page = int(self.table.block_tables[row, position // PAGE_SIZE])
        return page * PAGE_SIZE + position % PAGE_SIZE

    def end(self, row):
        lease, _ = self.requests.pop(row)
        self.cache.release(lease)
        self.table = free(self.table, np.arange(NUM_ROWS) == row)
        self.check()

    def give_back(self, pages):
        for start in range(0, len(pages), PAGES_PER_SEQ):
            part = pages[start : start + PAGES_PER_SEQ]
            self.table = release(self.table, padded(part))
        self.check()


def padded(pages):
    return i32(*pages, *[NUM_PAGES] * (PAGES_PER_SEQ - len(pages)))


@pytest.mark.parametrize(
    "hash_page", [pp.prefix_cache.chained_hash, lambda parent, tokens: (parent + sum(tokens)) % 5]
)
def test_every_page_is_free_in_the_end_and_no_token_reads_another_prefix(hash_page):
    server = Server(hash_page)
    rng = np.random.default_rng(0)
    num_admitted = num_refused = 0
    for _ in range(150):
        rows = sorted(server.requests)
        action = rng.choice(["admit", "append", "end", "evict"], p=[0.4, 0.35, 0.2, 0.05])
        if action == "admit":
            tokens = [1, 1, 2, *rng.integers(0, 2, rng.integers(0, 8)).tolist()]
            admitted = server.admit(tokens[rng.integers(0, 2) :])
            num_admitted, num_refused = num_admitted + admitted, num_refused + (not admitted)
        elif action == "evict":
            server.give_back(server.cache.evict(2))
        elif rows:
            row = int(rng.choice(rows))
            tokens = server.requests[row][1]
            if action == "end" or len(tokens) == PAGES_PER_SEQ * PAGE_SIZE:
                server.end(row)
            else:
                server.append(row, rng.integers(0, 2, 1).tolist())
    assert num_admitted > 20 and num_refused > 10 and server.cache.num_hit_tokens > 40
    for row in list(server.requests):
        server.end(row)
    assert int(server.table.num_free) + len(server.cache) == NUM_PAGES
    server.give_back(server.cache.clear())
    assert int(server.table.num_free) == NUM_PAGES
    assert len(server.cache) == 0
