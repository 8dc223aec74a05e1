"""Which replica serves a request: the one that has most of its prefix, unless it has much to do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as List

from pallas_paged.engine.replica.replica import Replica
from pallas_paged.engine.requests.sequence import Sequence
from pallas_paged.pages.prefix_cache import Block, chained_hash

_MIN_PAGES = 2  # a shorter prefix is computed sooner than it is worth a longer queue
_MAX_RATIO = 1.25  # of a replica's load to the smallest one, ...
_MAX_REQUESTS = 4  # ... or how many requests like this one it may have beyond that


class Router:
    """Chooses replicas.

    The load of a replica is the tokens that its unfinished requests may have in all. A request
    goes to the replica with the longest prefix of it: in its prefix cache, or in a prompt that it
    was sent before, which may not be computed yet. Replicas that are both a quarter and four such
    requests ahead of the least loaded one do not count. If no other has a prefix of two pages, the
    request goes to the least loaded one, which then computes the prefix as well.
    """

    def __init__(self, replicas: List[Replica], page_size: int):
        self._replicas, self._page_size = replicas, page_size
        # Of each replica, the keys of full pages of prompts that it was sent, the newest last.
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in replicas]

    def choose(self, leader: Sequence) -> Replica:
        """Return the replica for the request of a new sequence, and count on its being sent."""
        if len(self._replicas) == 1:
            return self._replicas[0]
        loads = [replica.load for replica in self._replicas]
        least = min(loads)
        chosen = loads.index(least)
        if self._replicas[0].cache is not None:
            blocks = _blocks(leader, self._page_size)
            most = max(_MAX_RATIO * least, least + _MAX_REQUESTS * leader.request.load)
            found = [
                self._num_pages(index, blocks) if load <= most else 0
                for index, load in enumerate(loads)
            ]
            longest = max(found)
            if longest >= _MIN_PAGES:
                chosen = min(range(len(loads)), key=lambda i: (-found[i], loads[i]))
            self._note(chosen, blocks)
        return self._replicas[chosen]

    def reset(self) -> None:
        """Forget what was sent, with the prefix caches."""
        for sent in self._sent:
            sent.clear()

    def _num_pages(self, index: int, blocks: List[Block]) -> int:
        """Pages of a prefix that a replica has, or is about to compute."""
        cache, sent = self._replicas[index].cache, self._sent[index]
        assert cache is not None
        count = cache.num_cached_pages(blocks)
        while count < len(blocks) and blocks[count][0] in sent:
            count += 1
        return count

    def _note(self, index: int, blocks: List[Block]) -> None:
        sent = self._sent[index]
        for key, _ in blocks:
            sent.pop(key, None)
            sent[key] = None
        while len(sent) > self._replicas[index].num_pages:
            sent.popitem(last=False)


def _blocks(sequence: Sequence, page_size: int) -> list[Block]:
    """Return the full pages of a sequence, which keeps them for the prefix cache."""
    blocks, tokens = sequence.block_hashes, sequence.token_ids
    for start in range(len(blocks) * page_size, len(tokens) - page_size + 1, page_size):
        content = tuple(tokens[start : start + page_size])
        blocks.append((chained_hash(blocks[-1][0] if blocks else 0, content), content))
    return blocks
