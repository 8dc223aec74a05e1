"""Random traces of table and pool together, against the allocator oracle."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_paged as pp
from tests.support import page_tables
from tests.support.allocator_oracle import AllocatorOracle
from tests.support.marks import slow
from tests.support.page_tables import INT32_MAX, INT32_MIN, i32

# Few pages, so that traces often run out of them; and the sizes of other tests, for their programs.
SIZES = dict(num_pages=8, max_seqs=4, pages_per_seq=4)
NUM_FORKS, NUM_PAGES, NUM_ATTACHED = 3, 4, 4  # entries of a call
MAX_NEW, MAX_ATTACHED = 9, 5

odd = st.sampled_from([INT32_MIN, -1, INT32_MAX])
row_or_not = st.sampled_from([0, 1, 2, 3] * 2 + [-1, 4, INT32_MIN, INT32_MAX])
pairs = st.lists(st.tuples(row_or_not, row_or_not), min_size=NUM_FORKS, max_size=NUM_FORKS)
# A page of one of the rows that hold any, one that is retained, a free one, or none.
row, block = st.integers(0, SIZES["max_seqs"] - 1), st.integers(0, SIZES["pages_per_seq"] - 1)
retained = st.tuples(st.just("retained"), st.integers(0, 3))
odd_pages = st.sampled_from([("free", 0), ("none", -1), ("none", INT32_MAX), ("none", INT32_MIN)])
some_page = st.tuples(row, block) | retained | odd_pages
prefix = st.builds(lambda row, last: [(row, b) for b in range(last + 1)], row, block)
held_pages = st.lists(retained, max_size=3, unique=True)
page_lists = st.lists(some_page, max_size=MAX_ATTACHED) | held_pages | prefix
attachment = st.tuples(row_or_not | st.just("empty"), page_lists)
few_pages = st.sampled_from([None, 1, 2])


def per_row(values):
    return st.lists(values, min_size=SIZES["max_seqs"], max_size=SIZES["max_seqs"])


steps = st.one_of(
    st.tuples(st.just("extend"), per_row(st.integers(0, MAX_NEW))),
    st.tuples(st.just("extend"), per_row(st.integers(0, 5) | st.integers(0, MAX_NEW + 1) | odd)),
    st.tuples(st.just("fork"), pairs),
    st.tuples(st.just("truncate"), per_row(st.integers(-1, 6) | odd)),
    st.tuples(st.just("free"), per_row(st.sampled_from([False, False, True]))),
    st.tuples(st.just("free_before"), per_row(st.integers(0, 17) | odd), few_pages),
    st.tuples(st.just("retain"), prefix | st.lists(some_page, max_size=NUM_PAGES)),
    st.tuples(st.just("release"), st.lists(st.integers(0, 6), max_size=NUM_PAGES, unique=True)),
    st.tuples(st.just("attach"), st.lists(attachment, max_size=NUM_ATTACHED)),
)


class Simulation:
    """A table, a pool in which every token has its own value, and the oracle."""

    def __init__(self, page_size):
        sizes = dict(**SIZES, page_size=page_size)
        self.table = page_tables.make_table(**sizes)
        pages = np.zeros((1, SIZES["num_pages"], page_size, 1), np.float32)
        self.pool = pp.KVPool(layers=(pp.LayerKV(pages, pages, kv_layout="HPND"),))
        self.oracle = AllocatorOracle(**sizes)
        self.retained = []  # pages, in the order of the oracle's names
        self.num_written = 0

    def extend(self, counts):
        lens = [len(tokens) for tokens in self.oracle.tokens]
        new = []
        for count in counts:
            if 0 <= count <= MAX_NEW + 1:
                new.append(list(range(self.num_written, self.num_written + count)))
                self.num_written += count
            else:
                new.append(count)
        expected = self.oracle.extend(new, MAX_NEW)
        self.table, ok = page_tables.extend(self.table, i32(*counts), max_new_tokens=MAX_NEW)
        # Rows that failed write too; they do not hold these positions, so nothing may change.
        tokens = [
            (row, lens[row] + offset, value)
            for row, values in enumerate(new)
            if isinstance(values, list)
            for offset, value in enumerate(values)
        ]
        tokens += [(-1, 0, 0)] * (SIZES["max_seqs"] * (MAX_NEW + 1) - len(tokens))
        rows, positions, values = i32(*tokens).T
        slots = page_tables.slot_mapping(self.table, rows, positions)
        kv = np.float32(values)[:, None, None]
        self.pool = pp.KVPool(layers=(page_tables.write_kv(self.pool.layers[0], kv, -kv, slots),))
        return ok, expected

    def fork(self, entries):
        src, dst = zip(*entries, strict=True)
        self.table, copies, ok = page_tables.fork(self.table, i32(*src), i32(*dst))
        self.pool = page_tables.copy_pages(self.pool, copies)
        return ok, self.oracle.fork(list(src), list(dst))

    def truncate(self, deltas):
        lens = [len(tokens) for tokens in self.oracle.tokens]
        new_lens = [n - d if -1 <= d <= 6 else d for n, d in zip(lens, deltas, strict=True)]
        self.table, copies, ok = page_tables.truncate(self.table, i32(*new_lens))
        self.pool = page_tables.copy_pages(self.pool, copies)
        return ok, self.oracle.truncate(new_lens)

    def free(self, rows):
        self.oracle.free(rows)
        self.table = page_tables.free(self.table, np.array(rows))
        return np.array(rows), rows

    def free_before(self, positions, max_pages):
        self.oracle.free_before(positions, max_pages)
        self.table = page_tables.free_before(self.table, i32(*positions), max_pages=max_pages)
        return np.ones(0, bool), []

    def retain(self, choices):
        choices = choices + [("none", -1)] * (NUM_PAGES - len(choices))
        pages, names = zip(*map(self.page_and_name, choices), strict=True)
        self.table, ok = page_tables.retain(self.table, i32(*pages))
        expected = self.oracle.retain(list(names))
        self.retained += [page for page, is_ok in zip(pages, expected, strict=True) if is_ok]
        return ok, expected

    def release(self, indices):
        chosen = [self.page_and_name(("retained", i)) for i in indices if i < len(self.retained)]
        pages = [self.page_and_name(("free", 0))[0], -1, INT32_MIN, INT32_MAX]
        pages += [SIZES["num_pages"]] * (NUM_PAGES - len(chosen))
        for page, _ in chosen:
            pages.append(page)
            self.retained.remove(page)
        self.table = page_tables.release(self.table, i32(*pages))
        self.oracle.release([name for _, name in chosen])
        return np.ones(0, bool), []

    def attach(self, entries):
        entries = entries + [(-1, [])] * (NUM_ATTACHED - len(entries))
        empty = next((i for i, tokens in enumerate(self.oracle.tokens) if not tokens), -1)
        rows = [empty if row == "empty" else row for row, _ in entries]
        pages = np.full((len(entries), MAX_ATTACHED), SIZES["num_pages"], np.int32)
        names = []
        for entry, (_, choices) in enumerate(entries):
            chosen = [self.page_and_name(choice) for choice in choices]
            pages[entry, : len(chosen)] = [page for page, _ in chosen]
            names.append([name for _, name in chosen])
        self.table, ok = page_tables.attach(self.table, i32(*rows), pages)
        return ok, self.oracle.attach(rows, names)

    def page_and_name(self, choice):
        kind, index = choice
        if kind == "retained" and index < len(self.retained):
            return self.retained[index], self.oracle.retained[index]
        if kind == "free" and int(self.table.num_free) > 0:
            return int(self.table.free_pages[0]), 0
        if kind == "none":
            return index, None
        holders = [row for row, pages in enumerate(self.oracle.pages) if pages]
        if isinstance(kind, int) and holders:
            row = holders[kind % len(holders)]
            if index < len(self.oracle.pages[row]):
                return int(self.table.block_tables[row, index]), self.oracle.pages[row][index]
        return SIZES["num_pages"], None

    def compare(self):
        pp.check_page_table(self.table, retained=self.retained)
        lens, blocks = self.table.seq_lens, self.table.block_tables
        layer = self.pool.layers[0]
        k, v = layer.k_pages[0], layer.v_pages[0]
        for row, tokens in enumerate(self.oracle.tokens):
            assert lens[row] == len(tokens)
            dropped = self.oracle.pages[row].count(None)
            held = blocks[row, dropped : len(self.oracle.pages[row])]
            tokens = tokens[dropped * self.oracle.page_size :]
            np.testing.assert_array_equal(k[held].ravel()[: len(tokens)], tokens)
            np.testing.assert_array_equal(v[held].ravel()[: len(tokens)], [-t for t in tokens])
        for page, name in zip(self.retained, self.oracle.retained, strict=True):
            content = self.oracle.prefixes[name][-self.oracle.page_size :]
            np.testing.assert_array_equal(k[page].ravel(), content)
        refs = self.table.ref_counts
        assert sorted(refs[refs > 0]) == sorted(self.oracle.refs.values())
        assert int(self.table.num_free) == self.oracle.num_free


def run(page_size, trace):
    simulation = Simulation(page_size)
    for name, *arguments in trace:
        ok, expected = getattr(simulation, name)(*arguments)
        assert ok.tolist() == expected, name
        simulation.compare()
    return simulation


SCENARIOS = {
    "rows after one that does not fit": [("extend", [8, 8, 4, 1]), ("extend", [4, 5, 1, 3])],
    "pages released by the same call": [
        ("extend", [8, 0, 8, 4]),
        ("extend", [0, 0, 8, 0]),
        ("fork", [(0, 1), (-1, 0), (-1, 0)]),
        ("truncate", [2, 2, 16, 2]),  # one page is left for the tails of rows 0 and 1
    ],
    "forks of rows with one token in the last page, or none": [
        ("extend", [5, 4, 0, 0]),
        ("fork", [(0, 2), (1, 3), (-1, 0)]),
        ("extend", [2, 1, 1, 1]),
    ],
    "attached pages that are named twice or after padding": [
        ("extend", [9, 0, 0, 0]),
        ("extend", [3, 0, 0, 0]),
        ("attach", [(1, [(0, 1), (0, 0), (0, 1)]), (1, [(0, 0)]), (4, []), (2, [])]),
        ("attach", [(1, [(0, 0), ("none", -1), (0, 1)]), (2, [(0, 1), (0, 0)])]),
    ],
}


@pytest.mark.parametrize("trace", SCENARIOS.values(), ids=SCENARIOS)
def test_scenarios_agree_with_the_oracle(trace):
    run(4, trace)


@pytest.mark.parametrize("page_size", [4, *slow([1])])
@settings(max_examples=75, deadline=None, derandomize=True)
@given(trace=st.lists(steps, min_size=12, max_size=25))
def test_random_traces_agree_with_the_oracle(page_size, trace):
    simulation = run(page_size, trace)
    simulation.free([True] * SIZES["max_seqs"])
    while simulation.retained:
        simulation.release(range(NUM_PAGES))
    simulation.compare()
    assert int(simulation.table.num_free) == SIZES["num_pages"]
