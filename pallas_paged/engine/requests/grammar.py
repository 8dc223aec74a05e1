"""Compiled grammars of structured outputs, and where a sequence is in its own."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np

from pallas_paged.engine.requests.detokenizer import Tokenizer
from pallas_paged.engine.requests.structured_outputs import (
    GrammarError,
    StructuredOutputsParams,
    grammar_source,
)

_MAX_GRAMMARS = 64  # that the cache keeps, the newest ones
_COMPILE_SECONDS = 20.0  # intersections of many patterns would take minutes
_STACK_BYTES = 1 << 29  # of addresses; the longest chain of rules takes some 100 MiB of them
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
T = TypeVar("T")


class GrammarCompiler:
    """Compiles grammars for a tokenizer, and keeps the newest; any thread may call it."""

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Collection[int]
    ):
        """Prepare; the tokenizer's vocabulary is read by the first `compile`.

        Args:
            tokenizer: None where the engine has none.
            vocab_size: of the model; ids that the tokenizer lacks are never sampled.
            eos_token_ids: of the model. They are no text, whatever the tokenizer says.
        """
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._grammars: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()
        self._vocabulary: Any = None
        self._cache_lock, self._compiling = threading.Lock(), threading.Lock()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Return the compiled grammar, in microseconds if it is among the newest.

        Raises:
            ValueError: it can't be compiled, there is no tokenizer, or llguidance is missing.
        """
        if (grammar := self._cached(params)) is not None:
            return grammar
        with self._compiling:  # one at a time, so that large grammars do not add up
            if (grammar := self._cached(params)) is None:
                grammar = _on_large_stack(partial(self._compile, params))
        with self._cache_lock:
            self._grammars[params] = grammar
            while len(self._grammars) > _MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        return grammar

    def _cached(self, params: StructuredOutputsParams) -> Grammar | None:
        with self._cache_lock:
            if (grammar := self._grammars.get(params)) is not None:
                self._grammars.move_to_end(params)
            return grammar

    def _compile(self, params: StructuredOutputsParams) -> Grammar:
        if self._tokenizer is None:
            raise ValueError("structured_outputs needs a tokenizer")
        try:
            import llguidance
        except ImportError:
            raise ValueError(
                "structured_outputs needs the package llguidance: "
                "pip install 'pallas-paged[structured]'"
            ) from None
        if self._vocabulary is None:
            tokens: Any = _Tokens(self._tokenizer, self._vocab_size, self._eos_token_ids)
            self._vocabulary = llguidance.LLTokenizer(tokens)
        # The compiler's own limits bound what it does, now and for each token.
        limits = llguidance.LLParserLimits(precompute_large_lexemes=False, verbose_errors=False)
        matcher = llguidance.LLMatcher(
            self._vocabulary,
            grammar_source(params, llguidance.LLMatcher),
            log_level=0,
            limits=limits,
        )
        if matcher.is_error():
            raise GrammarError(f"structured_outputs: {matcher.get_error()}")
        trial, first = matcher.deep_copy(), empty_masks(1, self._vocab_size)
        fill_masks([(0, GrammarState(trial, self._vocab_size, ()))], first)
        if not first.any():
            raise GrammarError("structured_outputs: no token of the vocabulary begins such a text")
        for token_id in trial.compute_ff_tokens()[:1]:
            trial.consume_token(token_id)  # fails where the text that is forced has no end
        if trial.is_error():
            raise GrammarError(f"structured_outputs: {trial.get_error()}")
        return Grammar(matcher, self._vocab_size)


def _on_large_stack(function: Callable[[], T]) -> T:
    """Call a function in a thread of its own: the compiler nests calls, one for each rule.

    Raises:
        GrammarError: it takes too long. It goes on, as nothing can stop it, and others begin.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    size = threading.stack_size(_STACK_BYTES)
    try:
        threading.Thread(target=run, daemon=True).start()
    finally:
        threading.stack_size(size)
    try:
        return result.result(_COMPILE_SECONDS)
    except TimeoutError:
        rule = f"must compile in {_COMPILE_SECONDS:g} s"
        raise GrammarError(f"structured_outputs: the grammar {rule}") from None


class Grammar:
    """A compiled grammar, from which each sequence gets a state of its own."""

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher, self._vocab_size = matcher, vocab_size
        self._lock = threading.Lock()  # the matcher refuses two threads at a time

    def start(self, stop_token_ids: Collection[int]) -> GrammarState:
        """Return the state at the beginning, for a sequence that these tokens end."""
        with self._lock:
            matcher = self._matcher.deep_copy()
        return GrammarState(matcher, self._vocab_size, stop_token_ids)


class GrammarState:
    """Where a sequence is within its grammar."""

    def __init__(self, matcher: Any, vocab_size: int, stop_token_ids: Collection[int]):
        self._matcher, self._vocab_size = matcher, vocab_size
        self._stop_token_ids = stop_token_ids
        self._stops = np.array(sorted(stop_token_ids), np.int32)
        self._num_ahead = 0  # tokens that the matcher has, and `accept` has not been given

    @property
    def is_complete(self) -> bool:
        """Whether no more text may follow."""
        return self._matcher.is_stopped()

    def accept(self, token_id: int) -> None:
        """Take the next token.

        Raises:
            GrammarError: the grammar does not allow it, or became too complex.
        """
        if self._num_ahead:
            self._num_ahead -= 1
        else:
            self._matcher.consume_token(token_id)
        self.check()

    def look_ahead(self, token_id: int) -> None:
        """Let `fill_masks` see the token that `accept` will be given next, which reports errors."""
        if token_id >= 0 and token_id not in self._stop_token_ids:
            self._matcher.consume_token(token_id)
            self._num_ahead += 1

    def forced_tokens(self) -> list[int]:
        """Return the next tokens as far as `fill_masks` would allow one alone in each place."""
        tokens, end = self._matcher.compute_ff_tokens(), self._vocab_size
        return tokens[: tokens.index(end)] if end in tokens else tokens

    def check(self) -> None:
        """Raise a GrammarError if the grammar became too complex for what was asked so far.

        `fill_masks` then allows only the end, at which the text may not match.
        """
        if self._matcher.is_error():
            raise GrammarError(self._matcher.get_error())


def empty_masks(num_rows: int, vocab_size: int) -> np.ndarray:
    """Return `i32[num_rows, V // 32 + 1]` with all bits set: all tokens may be next."""
    return np.full((num_rows, vocab_size // 32 + 1), -1, np.int32)


def fill_masks(states: Sequence[tuple[int, GrammarState]], masks: np.ndarray) -> None:
    """Write which tokens may be next, in threads and without Python's lock.

    Args:
        states: each with its row of the masks.
        masks: of `empty_masks`; token `32 i + j` is bit j of entry i of a row.
    """
    if not states:
        return
    matchers = [(state._matcher, row) for row, state in states]
    _executor().unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks.strides[0], len(masks))
    # The end of the text is a token behind the vocabulary, and here the tokens that end a row.
    entry, bit = divmod(states[0][1]._vocab_size, 32)
    end = np.left_shift(np.int32(1), np.int32(bit))
    ends = masks[:, entry] & end != 0
    masks[:, entry] &= ~end
    for row, state in states:
        if ends[row]:
            bits = np.left_shift(np.int32(1), state._stops % 32, dtype=np.int32)
            np.bitwise_or.at(masks[row], state._stops // 32, bits)


@lru_cache(maxsize=1)
def _executor() -> Any:
    """Return the threads that fill masks, in which rows do not wait for one another."""
    from llguidance import LLExecutor

    return LLExecutor()


class _Tokens:
    """The bytes of each token, in the form that llguidance reads.

    The end of the text is one more token: llguidance needs one, and takes token 0 where none is
    given. Special tokens have no bytes, as they would be lost in the text, and can't be chosen.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, no_text: Collection[int]):
        own: Callable[[int], bytes] | None = getattr(tokenizer, "token_bytes", None)
        is_special: Callable[[int], bool] = getattr(tokenizer, "is_special", lambda _: False)

        def token_bytes(token_id: int) -> bytes:
            if token_id in no_text or is_special(token_id):
                return b""
            if own is not None:
                return own(token_id)
            # Behind another token: some tokenizers leave out the space before the first word.
            text = tokenizer.decode([token_id] * 2)[len(tokenizer.decode([token_id])) :]
            return b"" if _REPLACEMENT in text else text.encode()  # a part of a character

        self.tokens = [*map(token_bytes, range(vocab_size)), b"<end>"]
        self._encode = tokenizer.encode
        self.eos_token_id = vocab_size
        self.special_token_ids = [vocab_size]
        self._ids = {data: token_id for token_id, data in enumerate(self.tokens[:-1]) if data}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens of a text that the grammar forces: the tokenizer's, if they spell it.

        Otherwise they are the longest from the beginning on. An exception here would be a panic of
        llguidance.
        """
        data = text.encode() if isinstance(text, str) else bytes(text)
        try:
            token_ids = [x for x in self._encode(data.decode()) if self.tokens[x]]
        except Exception:  # of any tokenizer
            token_ids = []
        is_spelt = b"".join(self.tokens[x] for x in token_ids) == data
        return token_ids if is_spelt else self._longest_of(data)

    def _longest_of(self, data: bytes) -> list[int]:
        token_ids, start = [], 0
        while start < len(data):
            pieces = (data[start : start + size] for size in range(self._longest, 0, -1))
            piece = next((one for one in pieces if one in self._ids), b"")
            if piece:
                token_ids.append(self._ids[piece])
            start += len(piece) or 1
        return token_ids
