"""The sequences of a request: their tokens, and how far they are computed and read."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from pallas_paged.engine.outputs import CompletionOutput, FinishReasonName, TokenLogprobs
from pallas_paged.engine.requests.detokenizer import IncrementalDetokenizer, Tokenizer
from pallas_paged.engine.requests.grammar import GrammarState
from pallas_paged.engine.requests.request import Request
from pallas_paged.engine.sampling_params import SamplingMode
from pallas_paged.pages.prefix_cache import Block, PrefixLease


@dataclass(kw_only=True, eq=False)
class Sequence:
    """One completion of a request, at most one slot of the batch.

    A field is written by its owner only. Counts of tokens are upper bounds while a call of several
    steps is in flight: a row may end, or the pages run out, before the last of them.
    `Scheduler.update` corrects them.

    Attributes, of `requests/`:
        request: the request that it belongs to.
        output: the part that the user sees.
        token_ids: prompt and new tokens that the host has read.
        max_len: tokens at which it ends.
        mode: what its sampling needs.
        stop_token_ids: tokens that end it, as the last of its tokens, without text.
        detokenizer: None if no text is wanted.
        grammar: how far its text is within its grammar; None if it has none.
        is_forced: whether that leaves no choice of the tokens behind the one in flight.
        num_unforced: newest tokens behind which it left a choice.
        routed_experts: of each new token that was computed, `i16[L, k]`; those of the prompt are in
            the request, which forks share.
    Attributes, of `Scheduler`:
        slot: row of the page table, while it is running.
        num_computed: tokens whose K/V are in the pages once all dispatched steps have run.
        num_pending: tokens that dispatched steps sample and the host has not read.
        decoding: whether its last token is on the device, so that it decodes without the host.
        fork_source: the sequence from which it will be forked; until then it holds only its slot.
        forks: sequences that are forked from this one when all of its tokens but the last are
            computed. Those without a slot then go to the waiting queue.
    Attributes, of `KVCacheManager`:
        num_stored: tokens of steps that the host has read, so that their pages are known.
        pages: of its first `num_stored` tokens.
        window_pages: likewise, of layers with a window, if they have a pool of their own; those
            left of the window are no longer its own, or -1.
        lease: of the prefix cache, while it is running.
        caches: whether the prefix cache may take its pages.
        block_hashes: of its full pages, kept for the prefix cache.
    """

    request: Request
    output: CompletionOutput
    token_ids: list[int]
    max_len: int
    mode: SamplingMode
    stop_token_ids: Collection[int] = ()
    detokenizer: IncrementalDetokenizer | None = None
    grammar: GrammarState | None = None
    is_forced: bool = False
    num_unforced: int = 0
    routed_experts: list[np.ndarray] = field(default_factory=list)
    slot: int | None = None
    num_computed: int = 0
    num_pending: int = 0
    decoding: bool = False
    fork_source: Sequence | None = None
    forks: list[Sequence] = field(default_factory=list)
    num_stored: int = 0
    pages: list[int] = field(default_factory=list)
    window_pages: list[int] = field(default_factory=list)
    lease: PrefixLease | None = None
    caches: bool = True
    block_hashes: list[Block] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, int, int]:
        """By priority, then by arrival; the smallest is served first and preempted last."""
        return self.request.priority, self.request.number, self.output.index

    @property
    def running_slot(self) -> int:
        """Its slot, which it must have."""
        if self.slot is None:
            raise RuntimeError(f"sequence {self.order} has no slot")
        return self.slot

    @property
    def finished(self) -> bool:
        return self.output.finish_reason is not None

    @property
    def mean_logprob(self) -> float:
        """Of its new tokens; -inf if there are none."""
        count = len(self.output.token_ids)
        return (self.output.cumulative_logprob or 0.0) / count if count else -math.inf

    @property
    def max_cached_tokens(self) -> int | None:
        """Most tokens to take from the prefix cache; None is all.

        Log-probabilities, experts and the mean of the prompt are known by computing its tokens, so
        those are not taken. K and V of given experts are other ones.
        """
        request = self.request
        if request.given_experts is not None:
            return 0
        if request.pooling is not None and request.pooling.pooling == "mean":
            return 0
        if self.output.index > 0 or self.output.token_ids:
            return None
        if request.params.return_routed_experts:
            return 0
        return None if request.score_start is None else request.score_start - 1

    @property
    def num_to_decode(self) -> int:
        """Tokens that it may still sample, beside those that are pending."""
        return self.max_len - len(self.token_ids) - self.num_pending

    def can_decode(self, ahead: bool = False) -> bool:
        """Whether it can be in the next decode step.

        What a grammar allows next depends on the token before, which the host must have read; if
        the step goes ahead, by the time that it draws. Forced tokens are computed as a chunk.
        """
        if not self.decoding or self.num_to_decode <= 0:
            return False
        most = 1 if ahead and not self.is_forced else 0
        return self.grammar is None or self.num_pending <= most

    @property
    def has_forced_tokens(self) -> bool:
        """Whether its grammar has added tokens behind the one with which it would decode."""
        if self.grammar is None or self.num_pending or not self.decoding:
            return False
        return len(self.token_ids) - self.num_computed > 1

    @property
    def takes_drafts(self) -> bool:
        """Whether several of its tokens can be drawn at once.

        Penalties and grammars look at all tokens before the one that is drawn. Experts are not
        reported by calls with drafts.
        """
        return not (self.mode.penalties or self.mode.masks or self.mode.routed_experts)

    @property
    def needs_last_token(self) -> bool:
        """Whether only the last token is left to compute, and the host must send it."""
        if self.decoding or self.fork_source is not None or self.forks:
            return False
        # The hidden state of a prompt's last token is read of a chunk.
        is_of_chunk = self.request.pooling is not None
        return not is_of_chunk and len(self.token_ids) - self.num_computed == 1

    @property
    def num_to_prefill(self) -> int:
        """Known tokens to compute in chunks; a source stops where it is to be forked."""
        if self.decoding or self.fork_source is not None:
            return 0
        return len(self.token_ids) - bool(self.forks) - self.num_computed

    def add_routed_experts(self, start: int, experts: np.ndarray) -> None:
        """Take the experts `i16[N, L, k]` of tokens from index `start` on.

        Those that are computed again, after a preemption, keep the experts with which the tokens
        behind them were sampled.
        """
        request, num_prompt = self.request, len(self.request.prompt_token_ids)
        if start < num_prompt and not self.output.token_ids:
            if request.routed_experts is None:
                shape = num_prompt, *experts.shape[1:]
                request.routed_experts = np.full(shape, -1, np.int16)
            request.routed_experts[start : start + len(experts)] = experts
        known = num_prompt + len(self.routed_experts)
        self.routed_experts += [*experts[max(known - start, 0) :]]

    def all_routed_experts(self) -> np.ndarray | None:
        """Return the experts of all its tokens but the last."""
        prompt = self.request.routed_experts
        if prompt is None:
            return None
        new = np.array(self.routed_experts, np.int16).reshape(-1, *prompt.shape[1:])
        return np.concatenate([prompt, new])[: len(self.token_ids) - 1]

    def end_of_prompt(self) -> FinishReasonName:
        """Return the finish reason of a request for its prompt alone."""
        pooled = self.request.pooled
        if pooled is not None and not np.isfinite(pooled).all():
            return self.request.fail(ValueError("the model's hidden states are NaN or infinite"))
        return "length"

    def append(
        self, token_id: int, logprobs: TokenLogprobs | None = None
    ) -> FinishReasonName | None:
        """Take the next token; return the finish reason if it ends the sequence.

        Args:
            token_id: -1 if the model's logits were NaN or infinite.
            logprobs: of the token, and of as many of the most probable as the request asks for.
        """
        request, output = self.request, self.output
        if token_id < 0:
            request.error = "the model returned NaN or infinite logits"
            if self.grammar is not None:
                request.error += ", or no token of the vocabulary goes on in the grammar"
            return "error"
        self.token_ids.append(token_id)
        output.token_ids.append(token_id)
        if logprobs is not None:
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + logprobs.logprob
            if output.logprobs is not None:
                output.logprobs.append(logprobs)
        try:
            return self._end(token_id)
        except Exception as error:  # of the tokenizer or the grammar: other requests go on
            return request.fail(error)

    def append_forced(self) -> FinishReasonName | None:
        """Take the next tokens without steps of the model if the grammar leaves no choice of them.

        Where log-probabilities or experts of each token are needed, steps draw them.

        Returns:
            The finish reason, if one of them ends the sequence.
        """
        if self.grammar is None or self.mode.logprobs >= 0 or self.mode.routed_experts:
            self.num_unforced += 1
            return None
        try:
            forced = self.grammar.forced_tokens()
        except Exception as error:
            return self.request.fail(error)
        self.num_unforced = 0 if forced else self.num_unforced + 1
        # A step in flight draws the first of them.
        self.is_forced = self.num_pending > 0 and len(forced) > 1
        if self.num_pending:
            return None
        for token_id in forced:
            if (reason := self.append(token_id)) is not None:
                return reason
        return None

    def _end(self, token_id: int) -> FinishReasonName | None:
        """Add the text of the newest token; return the finish reason if it ends the sequence."""
        output, grammar = self.output, self.grammar
        if grammar is not None:
            grammar.check()
        if token_id in self.stop_token_ids:
            if token_id in (self.request.params.stop_token_ids or ()):
                output.stop_reason = token_id
            return "stop"
        if self.detokenizer is not None:
            output.text += self.detokenizer.push([token_id])
            if self.detokenizer.stop_reason is not None:
                output.stop_reason = self.detokenizer.stop_reason
                return "stop"
        if grammar is not None:
            grammar.accept(token_id)
            if grammar.is_complete:
                return "stop"
        return "length" if len(self.token_ids) >= self.max_len else None


_MODES: dict[SamplingMode, SamplingMode] = {}  # equal ones are one object, as each step unites them


class SequenceGroup:
    """The sequences of a request: how they begin and end, and which are returned.

    Attributes:
        request: its outputs are filled as they grow or, where they are ranked, at the end.
        live: sequences that have not ended.
    """

    def __init__(
        self, request: Request, tokenizer: Tokenizer | None, eos_token_ids: tuple[int, ...]
    ):
        """Take a new request; without a tokenizer there is no text."""
        self.request = request
        self.live: list[Sequence] = []
        params = request.params
        self._tokenizer = tokenizer if params.detokenize else None
        self._stop_token_ids = frozenset(
            (*(() if params.ignore_eos else eos_token_ids), *(params.stop_token_ids or ()))
        )
        mode = SamplingMode.of(params)
        if request.pooling is not None:
            mode |= SamplingMode.of(request.pooling)
        self._mode = _MODES.setdefault(mode, mode)

    def start(self) -> list[list[Sequence]]:
        """Return sequences to schedule at the beginning; those of a list have the same tokens."""
        request, grammar = self.request, self.request.grammar
        self._drawn = [
            Sequence(
                request=request,
                output=output,
                token_ids=list(request.prompt_token_ids),
                block_hashes=list(request.block_hashes),
                max_len=request.max_len,
                mode=self._mode,
                stop_token_ids=self._stop_token_ids,
                detokenizer=self._detokenizer(),
                grammar=None if grammar is None else grammar.start(self._stop_token_ids),
            )
            for output in request.outputs or request.new_completions()
        ]
        self.live = [*self._drawn]
        return [[*self._drawn]]

    def finish(self, sequence: Sequence, reason: FinishReasonName) -> list[list[Sequence]]:
        """End a live sequence; return those that begin now, as `start` does."""
        self.live.remove(sequence)
        try:
            if sequence.detokenizer is not None:
                sequence.output.text += sequence.detokenizer.finish()
        except Exception as error:
            reason = self.request.fail(error)
        sequence.output.finish_reason = reason
        sequence.output.routed_experts = sequence.all_routed_experts()
        return []

    def finish_request(self) -> None:
        """End the request, none of whose sequences is live, and choose what it returns."""
        if self.request.params.ranks:
            self.request.outputs = self._ranked()[: self.request.params.n]
            for index, output in enumerate(self.request.outputs):
                output.index = index
        self.request.finish_time = time.perf_counter()

    def fail(self, error: BaseException) -> None:
        """End all sequences as they stand, with an error."""
        self.request.error = str(error) or type(error).__name__
        for sequence in [*self.live]:
            sequence.detokenizer = None  # text that it holds back is lost
            self.finish(sequence, "error")

    def _ranked(self) -> list[CompletionOutput]:
        """Return all completions, the best first."""
        ranked = sorted(self._drawn, key=lambda one: one.mean_logprob, reverse=True)
        return [one.output for one in ranked]

    def _detokenizer(self) -> IncrementalDetokenizer | None:
        if self._tokenizer is None:
            return None
        prompt, params = self.request.prompt_token_ids, self.request.params
        return IncrementalDetokenizer(
            self._tokenizer, prompt, params.stop or (), min_tokens=params.min_tokens
        )
