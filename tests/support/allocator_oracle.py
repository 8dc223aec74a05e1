"""A page allocator of dicts and lists, written from the contract without the library."""


class AllocatorOracle:
    """Rows are lists of tokens and of page names; a page name is never used twice.

    Names are 1, 2, ...; as an argument, 0 is a free page and None is padding. In a row, None is a
    page that `free_before` dropped.
    """

    def __init__(self, *, num_pages: int, page_size: int, max_seqs: int, pages_per_seq: int):
        self.page_size = page_size
        self.capacity = pages_per_seq * page_size
        self.num_free = num_pages
        self.tokens: list[list[int]] = [[] for _ in range(max_seqs)]
        self.pages: list[list[int | None]] = [[] for _ in range(max_seqs)]
        self.refs: dict[int, int] = {}
        self.retained: list[int] = []
        self.prefixes: dict[int, list[int]] = {}  # of the row that filled a page, up to its end
        self.num_named = 0

    def extend(self, new_tokens: list[list[int] | int], max_new_tokens: int) -> list[bool]:
        """Appends each row's new tokens; an int is an invalid number of tokens."""
        ok = []
        total, budget = 0, self.num_free
        for row, new in enumerate(new_tokens):
            if isinstance(new, int) or len(new) > max_new_tokens:
                ok.append(False)
                continue
            length = len(self.tokens[row]) + len(new)
            if length > self.capacity:
                ok.append(False)
                continue
            need = -(-length // self.page_size) - len(self.pages[row])
            total += need
            ok.append(need == 0 or total <= budget)
            if ok[-1]:
                first = len(self.tokens[row]) // self.page_size
                self.tokens[row] += new
                self.pages[row] += [self._take() for _ in range(need)]
                for block in range(first, length // self.page_size):
                    prefix = self.tokens[row][: (block + 1) * self.page_size]
                    self.prefixes[self.pages[row][block]] = prefix
        return ok

    def free(self, rows: list[bool]) -> None:
        for row, freed in enumerate(rows):
            if freed:
                for page in self.pages[row]:
                    self._drop(page)
                self.pages[row], self.tokens[row] = [], []

    def free_before(self, positions: list[int], max_pages: int | None) -> None:
        for pages, tokens, position in zip(self.pages, self.tokens, positions, strict=True):
            end = max(min(position, len(tokens)), 0) // self.page_size
            for block in [b for b in range(end) if pages[b] is not None][:max_pages]:
                self._drop(pages[block])
                pages[block] = None

    def fork(self, src: list[int], dst: list[int]) -> list[bool]:
        max_seqs = len(self.tokens)
        real = [0 <= s < max_seqs and 0 <= d < max_seqs for s, d in zip(src, dst, strict=True)]
        targets = {d for d, is_real in zip(dst, real, strict=True) if is_real}
        tokens = [list(row) for row in self.tokens]
        pages = [list(row) for row in self.pages]
        ok: list[bool] = []
        seen: set[int] = set()
        total, budget = 0, self.num_free
        for s, d, is_real in zip(src, dst, real, strict=True):
            if not is_real:
                ok.append(False)
                continue
            allowed = not tokens[d] and d not in seen and s not in targets
            seen.add(d)
            need = int(allowed and len(tokens[s]) % self.page_size > 0)
            total += need
            ok.append(allowed and (need == 0 or total <= budget))
            if ok[-1]:
                full = pages[s][: len(tokens[s]) // self.page_size]
                for page in full:
                    if page is not None:
                        self.refs[page] += 1
                self.pages[d] = full + [self._take() for _ in range(need)]
                self.tokens[d] = list(tokens[s])
        return ok

    def truncate(self, new_lens: list[int]) -> list[bool]:
        ok = []
        total, budget = 0, self.num_free
        before = dict(self.refs)
        dropped = []
        for row, length in enumerate(new_lens):
            held = len(self.tokens[row])
            kept = self.pages[row][: -(-length // self.page_size)] if 0 <= length < held else []
            if not 0 <= length <= held or (kept and kept[-1] is None):
                ok.append(False)
                continue
            num_full, tail = divmod(length, self.page_size)
            reown = tail > 0 and before[self.pages[row][num_full]] > 1
            total += reown
            ok.append(not reown or total <= budget)
            if ok[-1]:
                kept = num_full + (tail > 0 and not reown)
                dropped += self.pages[row][kept:]
                self.pages[row] = self.pages[row][:kept] + ([self._take()] if reown else [])
                self.tokens[row] = self.tokens[row][:length]
        for page in dropped:
            self._drop(page)
        return ok

    def retain(self, names: list[int | None]) -> list[bool]:
        shareable = self._shareable()
        ok = [name in shareable for name in names]
        for name in [name for name in names if name in shareable]:
            self.refs[name] += 1
            self.retained.append(name)
        return ok

    def release(self, names: list[int]) -> None:
        for name in names:
            self.retained.remove(name)
            self._drop(name)

    def attach(self, rows: list[int], names: list[list[int | None]]) -> list[bool]:
        shareable = self._shareable()
        was_empty = [not tokens for tokens in self.tokens]
        ok = []
        seen: set[int] = set()
        for row, entry in zip(rows, names, strict=True):
            while entry and entry[-1] is None:
                entry = entry[:-1]
            ok.append(
                0 <= row < len(was_empty)
                and row not in seen
                and was_empty[row]
                and shareable.issuperset(entry)
                and len(set(entry)) == len(entry)
                and len(entry) * self.page_size <= self.capacity
            )
            seen.add(row)
            if ok[-1]:
                for name in entry:
                    self.refs[name] += 1
                    self.pages[row].append(name)
                    self.tokens[row] += self.prefixes[name][-self.page_size :]
        return ok

    def _shareable(self) -> set[int]:
        rows = zip(self.pages, self.tokens, strict=True)
        return set(self.refs) - {p[-1] for p, t in rows if len(t) % self.page_size > 0}

    def _take(self) -> int:
        self.num_named += 1
        self.num_free -= 1
        self.refs[self.num_named] = 1
        return self.num_named

    def _drop(self, page: int | None) -> None:
        if page is None:
            return
        self.refs[page] -= 1
        if self.refs[page] == 0:
            del self.refs[page]
            self.prefixes.pop(page, None)
            self.num_free += 1
