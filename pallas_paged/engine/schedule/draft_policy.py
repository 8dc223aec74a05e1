"""Whether a call verifies drafts: only if the tokens that they bring are worth the longer step."""

from __future__ import annotations

_MEMORY = 0.98  # of the average of tokens a step, for each step of a row; ...
_MOST_ROWS = 32  # ... of a call as many count
_MARGIN = 1.05  # by which drafts must be better: a step that verifies them has more small kernels
# Calls without drafts after which one with drafts is tried where only their acceptance was too
# small. It takes at most half as long again as another below the card's limits: 1% of the time.
_TRIAL = 64


class DraftPolicy:
    """Decides call by call, from the number of rows and the drafts that were right lately.

    A step of T tokens reads the weights once, and computes T times as much as one of a single
    token. Below `free_tokens` the reads take longer, so more tokens cost nothing. Above, the time
    grows with T. Drafts are verified if the tokens that a row has of a step are more than the times
    that the step takes longer, on average.

    Attributes:
        num_drafts: of a row.
    """

    def __init__(self, num_drafts: int, free_tokens: float):
        """Start with the hope that half of the drafts are right.

        Args:
            num_drafts: of a row.
            free_tokens: tokens of a step whose computation takes as long as the read of the
                weights; infinite where only the acceptance is to decide.
        """
        self.num_drafts = num_drafts
        self._free_tokens = free_tokens
        self._tokens_of_step = 1 + num_drafts / 2
        self._calls_without = 0

    def num_for(self, num_rows: int) -> int:
        """Return the drafts of each row in the next call: all or none."""
        longer = self._cost(num_rows * (1 + self.num_drafts)) / self._cost(num_rows) * _MARGIN
        if self._tokens_of_step > longer:
            self._calls_without = 0
            return self.num_drafts
        self._calls_without += 1
        if 1 + self.num_drafts > longer and self._calls_without > _TRIAL:
            self._calls_without = 0
            return self.num_drafts
        return 0

    def observe(self, num_rows: int, num_accepted: int) -> None:
        """Note what a call with drafts has brought.

        Args:
            num_rows: one for each step of each sequence.
            num_accepted: drafts that were right.
        """
        if num_rows:
            kept = _MEMORY ** min(num_rows, _MOST_ROWS)
            self._tokens_of_step *= kept
            self._tokens_of_step += (1 - kept) * (1 + num_accepted / num_rows)

    def _cost(self, num_tokens: int) -> float:
        """Time of a step of this many tokens, in that of reading the weights."""
        return max(1.0, num_tokens / self._free_tokens)
