"""Incremental detokenizer: its pieces join to the whole text, cut before the first stop text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from pallas_paged.engine.detokenizer import IncrementalDetokenizer

FEW = settings(deadline=None, max_examples=80, derandomize=True)
CORPUS = [
    "the lower tower glows, and the towers' lowest glow isn't low",
    "Ein größerer Bär läuft über die Brücke, größer als üblich",
    "子曰學而時習之不亦說乎 子曰 🎭 🎭 über €5 €50",
]
SPECIAL = "<special>"
REPLACEMENT = "\ufffd"


class LibraryTokenizer:
    """Meets the engine's Protocol with a tokenizer of the `tokenizers` library."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self.inner = inner

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.inner.decode(list(token_ids))


class ByteTokenizer:
    """The id of each token is its byte; other ids have no text."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        known = (token_id for token_id in token_ids if token_id < 256)
        return bytes(known).decode(errors="replace")


def trained(kind: str) -> LibraryTokenizer:
    """Return a small tokenizer of a style; `SPECIAL` has no text."""
    options = {"vocab_size": 400, "special_tokens": [SPECIAL, "[UNK]"], "show_progress": False}
    if kind == "byte-level":
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(**options, initial_alphabet=alphabet)
    elif kind == "metaspace":
        inner = tokenizers.Tokenizer(models.Unigram())
        inner.pre_tokenizer = pre_tokenizers.Metaspace()
        inner.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(**options, unk_token="[UNK]")
    else:
        inner = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        inner.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(**options)
    inner.train_from_iterator(CORPUS, trainer)
    return LibraryTokenizer(inner)


@pytest.fixture(scope="module", params=["byte-level", "metaspace", "wordpiece"])
def tokenizer(request):
    return trained(request.param)


@pytest.fixture(scope="module")
def byte_fallback():
    """Like Llama 2's: an underscore marks words, unknown characters are bytes."""
    words = ["<unk>", SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "a", "b", "▁a", "▁b", "ab", "▁ab"]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    vocab = {word: index for index, word in enumerate(words)}
    inner = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    inner.add_special_tokens(["<unk>", SPECIAL])
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return LibraryTokenizer(inner)


def streamed(tokenizer, prompt: Sequence[int], token_ids: Sequence[int]) -> str:
    """Return the text of a completion that arrives token by token."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    pieces = [detokenizer.push([token_id]) for token_id in token_ids]
    pieces.append(detokenizer.finish())
    assert detokenizer.text == "".join(pieces)
    assert detokenizer.num_tokens == len(token_ids) and detokenizer.stop_reason is None
    return detokenizer.text


@FEW
@given(data=st.data())
def test_tokens_after_any_prompt_join_to_the_whole(tokenizer, data):
    """Random tokens, and those of words, cut anywhere."""
    tokens = st.integers(0, tokenizer.inner.get_vocab_size() - 1) | st.just(0)  # 0 is special
    words = st.lists(st.sampled_from(" ".join(CORPUS).split()), max_size=30)
    texts = words.map(lambda some: tokenizer.encode(" ".join(some)))
    token_ids = data.draw(st.lists(tokens, max_size=60) | texts)
    cut = data.draw(st.integers(0, len(token_ids)))
    prompt = token_ids[:cut]
    text = streamed(tokenizer, prompt, token_ids[cut:])
    assert text == tokenizer.decode(token_ids)[len(tokenizer.decode(prompt)) :]


@FEW
@given(
    text=st.text(alphabet="ab é子🎭", max_size=30),
    specials=st.lists(st.integers(0, 90), max_size=3),
    cut=st.integers(0, 90),
)
def test_bytes_of_unknown_characters_join_to_the_whole(byte_fallback, text, specials, cut):
    """A character that the prompt began belongs to the prompt."""
    token_ids = byte_fallback.encode(text)
    for place in specials:  # special tokens, between characters
        if place == len(token_ids) or (place < len(token_ids) and token_ids[place] >= 258):
            token_ids.insert(place, 1)
    cut = end = min(cut, len(token_ids))
    while byte_fallback.decode(token_ids[:end]).endswith(REPLACEMENT):
        end += 1
    whole, prompt = byte_fallback.decode(token_ids), byte_fallback.decode(token_ids[:end])
    assert streamed(byte_fallback, token_ids[:cut], token_ids[cut:]) == whole[len(prompt) :]


@FEW
@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(0, 40), min_size=1, max_size=4))
def test_pieces_of_any_bytes_join_to_the_whole(data, cuts):
    tokenizer = ByteTokenizer()
    first, *edges = [*sorted(min(cut, len(data)) for cut in cuts), len(data)]
    detokenizer = IncrementalDetokenizer(tokenizer, data[:first])
    pieces = [detokenizer.push(data[a:b]) for a, b in itertools.pairwise([first, *edges])]
    whole, prompt = tokenizer.decode(data), tokenizer.decode(data[:first])
    assert "".join(pieces) + detokenizer.finish() == whole[len(prompt) :]


@FEW
@given(
    ids=st.lists(st.sampled_from([0x80, 0xE2, 0x82, 0xF0, 0x9F, 0x41, 999_999]), max_size=80),
    prompt=st.text(alphabet="a€\ufffd", max_size=30),
)
def test_broken_bytes_and_tokens_without_text_join_to_the_whole(ids, prompt):
    tokenizer = ByteTokenizer()
    start = tokenizer.encode(prompt)
    assert prompt + streamed(tokenizer, start, ids) == tokenizer.decode(start + ids)


def test_incomplete_characters_are_held_back():
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), ())
    euro = "€".encode()
    assert detokenizer.push(b"a" + euro[:2]) == "a"
    assert detokenizer.push([]) == ""
    assert detokenizer.push(euro[2:] + b"b") == "€b"
    assert detokenizer.push(euro[:1]) == ""
    assert detokenizer.finish() == REPLACEMENT
    assert detokenizer.finish() == "" and detokenizer.text == "a€b\ufffd"


@FEW
@given(text=st.text(alphabet="a\n\0é߿子\uffff🎭\U0010ffff", max_size=12))
def test_complete_characters_are_never_late(text):
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), ())
    for character in text:
        *first, last = character.encode()
        assert detokenizer.push(first) == ""
        assert detokenizer.push([last]) == character


def test_broken_bytes_are_not_held_back_forever():
    assert len(IncrementalDetokenizer(ByteTokenizer(), ()).push([0x80] * 50)) >= 46


@pytest.mark.parametrize(
    "ids",
    [b"text ", [0x80], [0xE2], [0xE2, 0x82], [999_999]],
    ids=["text", "stray", "lead", "two", "textless"],
)
@pytest.mark.parametrize(
    "prompt",
    [b"context \xe2\x82\xac", b"context " * 1000, b"a" + b"\x80" * 999, [7] + [999_999] * 999],
    ids=["short", "long", "broken", "textless"],
)
def test_decoding_takes_linear_time_and_a_short_context(monkeypatch, prompt, ids):
    tokenizer, lengths = ByteTokenizer(), []
    decode, prompt, ids = tokenizer.decode, list(prompt), [0xF0, *list(ids) * 1000]
    monkeypatch.setattr(tokenizer, "decode", lambda x: lengths.append(len(x)) or decode(x))
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    assert sum(lengths) <= 400 + len(prompt) * (999_999 in prompt)
    text = detokenizer.push(ids) + detokenizer.finish()
    assert text == decode(prompt + ids)[len(decode(prompt)) :]
    assert max(lengths) < 40 and sum(lengths) < 40 * len(ids) + 1000


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@FEW
@given(text=st.text("ab", max_size=12), stop=STOPS, min_tokens=st.just(0) | st.integers(0, 13))
def test_text_ends_before_the_first_stop_text_and_is_never_late(text, stop, min_tokens):
    """A stop text that is complete within the first tokens ends nothing."""
    detokenizer, shown = IncrementalDetokenizer(ByteTokenizer(), (), stop, min_tokens), ""
    for end in range(1, len(text) + 1):
        shown += detokenizer.push(text[end - 1].encode())
        found = [(end - len(one), len(one), one) for one in stop if text[:end].endswith(one)]
        if found and end > min_tokens:
            at, _, reason = min(found)
            assert detokenizer.stop_reason == reason and detokenizer.num_tokens == end
            assert shown == text[:at] and detokenizer.finish() == ""
            return
        assert detokenizer.stop_reason is None
        begun = [n for one in stop for n in range(len(one)) if text[:end].endswith(one[:n])]
        assert shown == text[: end - max(begun, default=0)]
    assert shown + detokenizer.finish() == text


@FEW
@given(text=st.text("ab", max_size=12), stop=STOPS, cuts=st.lists(st.integers(0, 12), max_size=3))
def test_stop_texts_do_not_depend_on_how_tokens_are_grouped(text, stop, cuts):
    alone = IncrementalDetokenizer(ByteTokenizer(), (), stop)
    single = "".join(alone.push([byte]) for byte in text.encode())
    grouped = IncrementalDetokenizer(ByteTokenizer(), (), stop)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = "".join(grouped.push(text[a:b].encode()) for a, b in itertools.pairwise(edges))
    assert pieces == single and grouped.stop_reason == alone.stop_reason
    assert grouped.num_tokens == alone.num_tokens
    assert grouped.finish() == alone.finish() and grouped.text == alone.text


def test_the_beginning_of_a_stop_text_is_held_back():
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), b"say: ", ["END", "\n\n"])
    assert detokenizer.push(b"hello E") == "hello "
    assert detokenizer.push(b"N") == ""
    assert detokenizer.push(b"JOY \n") == "ENJOY "
    assert detokenizer.push("é".encode()[:1]) == ""
    assert detokenizer.push("é".encode()[1:]) == "\né"
    assert detokenizer.push(b"xEND of it") == "x"
    assert detokenizer.stop_reason == "END" and detokenizer.finish() == ""
    assert detokenizer.text == "hello ENJOY \néx"
    assert detokenizer.num_tokens == len("hello ENJOY \néxEND".encode())
    assert detokenizer.push(b"more") == ""

    unfinished = IncrementalDetokenizer(ByteTokenizer(), (), ["END"])
    assert unfinished.push(b"an E") == "an "
    assert unfinished.finish() == "E" and unfinished.text == "an E"


def test_a_stop_text_may_begin_within_the_first_tokens():
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), (), ["abc", "b"], min_tokens=2)
    assert detokenizer.push(b"ab") == "" and detokenizer.stop_reason is None
    assert detokenizer.push(b"c") == "" and detokenizer.stop_reason == "abc"


def test_one_token_may_complete_several_stop_texts():
    class Words:
        def decode(self, token_ids):
            return "".join(["xabcd", "y"][token_id] for token_id in token_ids)

    detokenizer = IncrementalDetokenizer(Words(), (), ["cd", "bcd", "bc"])
    assert detokenizer.push([1, 0, 1]) == "yxa"
    assert detokenizer.stop_reason == "bc" and detokenizer.num_tokens == 2


def test_a_completion_continues_the_prompt(byte_fallback):
    prompt, (token_id,) = byte_fallback.encode("a"), byte_fallback.encode("b")
    assert byte_fallback.decode([token_id]) == "b"  # without the space, at the start of a text
    assert IncrementalDetokenizer(byte_fallback, prompt).push([token_id]) == " b"


def test_a_replacement_character_in_the_prompt_is_not_repeated(byte_fallback):
    for tokenizer in (ByteTokenizer(), byte_fallback):
        prompt, completion = tokenizer.encode("what\ufffd"), tokenizer.encode("what\ufffd子a")
        assert streamed(tokenizer, prompt, completion[len(prompt) :]) == "子a"


def test_an_exception_of_the_tokenizer_passes_through():
    class Broken(ByteTokenizer):
        broken = False

        def decode(self, token_ids):
            if self.broken:
                raise OSError("no tables")
            return super().decode(token_ids)

    tokenizer = Broken()
    detokenizer = IncrementalDetokenizer(tokenizer, b"prompt", ["END"])
    assert detokenizer.push(b"abE") == "ab"
    tokenizer.broken = True
    for use in (lambda: detokenizer.push(b"c"), detokenizer.finish):
        with pytest.raises(OSError, match="no tables"):
            use()
    with pytest.raises(OSError, match="no tables"):
        IncrementalDetokenizer(tokenizer, b"prompt")
    assert detokenizer.text == "ab" and detokenizer.num_tokens == 3
