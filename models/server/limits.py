"""How much the server takes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from models.server.errors import APIError, bad_request

_RETRY_SECONDS = 1


class Admission:
    """Counts the sequences that the engine runs or queues, and refuses those beyond a limit.

    Attributes:
        num_seqs: sequences of admitted requests.
        num_requests: admitted requests.
    """

    def __init__(self, max_seqs: int):
        """Admit up to `max_seqs` sequences at a time."""
        self.num_seqs = self.num_requests = 0
        self._max_seqs = max_seqs

    @contextmanager
    def admit(self, num_seqs: int) -> Iterator[None]:
        """Count sequences until the block ends.

        Raises:
            APIError: the queue is full, or can never hold them.
        """
        if num_seqs > self._max_seqs:
            raise bad_request(
                f"a request for {num_seqs} sequences is more than the {self._max_seqs} that fit"
                " the queue"
            )
        if self.num_seqs + num_seqs > self._max_seqs:
            raise APIError(
                429,
                f"the queue is full: {self.num_seqs} sequences are running or waiting",
                headers={"retry-after": str(_RETRY_SECONDS)},
            )
        self.num_seqs += num_seqs
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_seqs -= num_seqs
            self.num_requests -= 1
