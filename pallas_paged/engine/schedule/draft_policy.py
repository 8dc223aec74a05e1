"""Whether a call verifies drafts: only if the tokens that they bring are worth the longer step."""

from __future__ import annotations

_MEMORY = 0.98  # of the average of tokens a step, for each step of a row; ...
_MOST_ROWS = 32  # ... of a call as many count
_GUESS = 1.1  # times that a step with drafts takes longer where more tokens cost nothing
_NOISE = 1.02  # of measured times
_SLOWER = 1.1  # by which a measured time may grow from one call to the next
# One call in as many is made the other way, so that both times and the drafts that are right stay
# known. Drafts of 4 tokens that bring 2, or cost half a step, make that 1% of the time.
_TRIAL = 64


class DraftPolicy:
    """Decides call by call, from the drafts that were right lately and what a step takes.

    Drafts are verified if the tokens that a row has of a step are more than the times that the step
    takes longer, on average. Both kinds of steps are timed, for each power of two of rows. Until
    both are known, the card decides: a step reads the weights once, and computes as much for each
    of its tokens. Below `free_tokens` the reads take longer, so more tokens cost little; above, the
    time grows with them.

    Attributes:
        num_drafts: of a row.
    """

    def __init__(self, num_drafts: int, free_tokens: float):
        """Start with the hope that half of the drafts are right.

        Args:
            num_drafts: of a row.
            free_tokens: tokens of a step whose computation takes as long as the read of the
                weights; infinite where that is not known.
        """
        self.num_drafts = num_drafts
        self._free_tokens = free_tokens
        self._tokens_of_step = 1 + num_drafts / 2
        self._seconds: dict[tuple[int, bool], float] = {}  # by the bits of rows, and with drafts
        self._num_calls = 0

    def num_for(self, num_rows: int) -> int:
        """Return the drafts of each row in the next call: all or none."""
        longer = self._times_longer(num_rows)
        pays = self._tokens_of_step > longer
        self._num_calls += 1
        if self._num_calls % _TRIAL == 0 and 1 + self.num_drafts > longer:
            pays = not pays
        return self.num_drafts if pays else 0

    def observe_drafts(self, num_rows: int, num_accepted: int) -> None:
        """Note what a call with drafts has brought.

        Args:
            num_rows: one for each step of each sequence.
            num_accepted: drafts that were right.
        """
        if num_rows:
            kept = _MEMORY ** min(num_rows, _MOST_ROWS)
            self._tokens_of_step *= kept
            self._tokens_of_step += (1 - kept) * (1 + num_accepted / num_rows)

    def observe_step(self, num_rows: int, has_drafts: bool, seconds: float) -> None:
        """Note what a step took; a pause such as a compilation is forgotten with the next one."""
        key = num_rows.bit_length(), has_drafts
        self._seconds[key] = min(seconds, _SLOWER * self._seconds.get(key, seconds))

    def _times_longer(self, num_rows: int) -> float:
        """Return how many times longer a step with drafts takes."""
        without, longer = (self._seconds.get((num_rows.bit_length(), x)) for x in (False, True))
        if without and longer:
            return _NOISE * longer / without
        tokens = num_rows, num_rows * (1 + self.num_drafts)
        few, many = (max(1.0, num_tokens / self._free_tokens) for num_tokens in tokens)
        return _GUESS * many / few
