"""Incremental detokenizer: its pieces join to the whole text, which ends before a stop text."""

import itertools
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from pallas_paged.engine.requests.detokenizer import IncrementalDetokenizer
from tests.support.word_tokenizers import sentencepiece

FEW = settings(deadline=None, max_examples=80, derandomize=True)
CORPUS = [
    "the lower tower glows, and the towers' lowest glow isn't low",
    "Ein größerer Bär läuft über die Brücke, größer als üblich",
    "子曰學而時習之不亦說乎 子曰 🎭 🎭 über €5 €50",
]
SPECIAL = "<special>"  # has no text


class LibraryTokenizer:
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


@pytest.fixture(scope="module")
def byte_level():
    """Like those of GPT-2, Llama 3 and Qwen: a token may begin or end within a character."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[SPECIAL], show_progress=False, initial_alphabet=alphabet
    )
    inner.train_from_iterator(CORPUS, trainer)
    return LibraryTokenizer(inner)


@pytest.fixture(scope="module")
def byte_fallback():
    return LibraryTokenizer(sentencepiece(SPECIAL))


def streamed(tokenizer, prompt: Sequence[int], pieces) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    texts = [detokenizer.push(piece) for piece in pieces]
    texts.append(detokenizer.finish())
    assert detokenizer.num_tokens == sum(map(len, pieces)) and detokenizer.stop_reason is None
    assert detokenizer.finish() == ""
    return "".join(texts)


def single(token_ids: Sequence[int]) -> list[list[int]]:
    return [[token_id] for token_id in token_ids]


@FEW
@given(data=st.data())
def test_tokens_after_any_prompt_join_to_the_whole(byte_level, data):
    """Random tokens, and those of words; the prompt ends anywhere."""
    tokens = st.integers(0, byte_level.inner.get_vocab_size() - 1) | st.just(0)  # 0 is special
    words = st.lists(st.sampled_from(" ".join(CORPUS).split()), max_size=30)
    texts = words.map(lambda some: byte_level.encode(" ".join(some)))
    token_ids = data.draw(st.lists(tokens, max_size=60) | texts)
    cut = data.draw(st.integers(0, len(token_ids)))
    text = streamed(byte_level, token_ids[:cut], single(token_ids[cut:]))
    assert text == byte_level.decode(token_ids)[len(byte_level.decode(token_ids[:cut])) :]


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
    whole = byte_fallback.decode(token_ids)
    while not whole.startswith(byte_fallback.decode(token_ids[:end])):
        end += 1
    rest = whole[len(byte_fallback.decode(token_ids[:end])) :]
    assert streamed(byte_fallback, token_ids[:cut], single(token_ids[cut:])) == rest


def test_a_completion_continues_the_text_of_the_prompt_and_repeats_none_of_it(byte_fallback):
    for num_specials in (0, 40):
        prompt = [*byte_fallback.encode("a"), *[1] * num_specials]
        assert streamed(byte_fallback, prompt, [byte_fallback.encode("b")]) == " b"
    prompt, ids = byte_fallback.encode("what\ufffd"), byte_fallback.encode("what\ufffd子a")
    assert streamed(byte_fallback, prompt, single(ids[len(prompt) :])) == "子a"


def test_replacement_characters_in_a_text_of_byte_tokens_are_kept(byte_fallback):
    for text in ("a\ufffdb", "a b\ufffd子 a", "子\ufffda\ufffd\ufffd子", "\ufffd" * 5 + "a"):
        ids = byte_fallback.encode(text)
        assert streamed(byte_fallback, (), single(ids)) == text
    ids = byte_fallback.encode("a\ufffdb")
    for cut in (2, 3, 4):  # the prompt has the first bytes of the character, or all
        assert streamed(byte_fallback, ids[:cut], single(ids[cut:])) == "b"


def test_a_long_prompt_may_end_within_a_character_which_belongs_to_it(byte_fallback):
    ids = byte_fallback.encode(f"{CORPUS[0]}子a")
    for cut in (1, 2):  # bytes of the character that are left
        assert streamed(byte_fallback, ids[: -1 - cut], single(ids[-1 - cut :])) == "a"


NO_TEXT = 999_999
BROKEN = st.lists(st.sampled_from([0x80, 0xE2, 0x82, 0xF0, 0x9F, 0x41, NO_TEXT]), max_size=80)


@FEW
@given(
    prompt=st.text(alphabet="a€\ufffd", max_size=30).map(str.encode) | st.binary(max_size=20),
    ids=BROKEN | st.binary(max_size=40).map(list),
    cuts=st.lists(st.integers(0, 80), max_size=3) | st.none(),
)
def test_pieces_of_any_bytes_and_tokens_without_text_join_to_the_whole(prompt, ids, cuts):
    tokenizer = ByteTokenizer()
    cuts = range(len(ids)) if cuts is None else sorted(min(cut, len(ids)) for cut in cuts)
    pieces = [ids[start:end] for start, end in itertools.pairwise([0, *cuts, len(ids)])]
    whole = tokenizer.decode([*prompt, *ids])
    assert streamed(tokenizer, prompt, pieces) == whole[len(tokenizer.decode(prompt)) :]


@FEW
@given(text=st.text(alphabet="a\n\0é߿子\uffff🎭\U0010ffff", max_size=12))
def test_complete_characters_are_never_late(text):
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), ())
    for character in text:
        *first, last = character.encode()
        assert detokenizer.push(first) == ""
        assert detokenizer.push([last]) == character


@pytest.mark.parametrize("ids", [[0x80], [0xE2], [0xE2, 0x82], [NO_TEXT], list(b"text ")], ids=str)
@pytest.mark.parametrize(
    "prompt",
    [b"context \xe2\x82\xac", b"context " * 1000, b"a" + b"\x80" * 999, [7] + [NO_TEXT] * 999],
    ids=["short", "long", "broken", "textless"],
)
def test_decoding_takes_linear_time_and_a_short_context(monkeypatch, prompt, ids):
    tokenizer, lengths = ByteTokenizer(), []
    decode, prompt, ids = tokenizer.decode, list(prompt), [0xF0, *ids * 1000]
    monkeypatch.setattr(tokenizer, "decode", lambda x: lengths.append(len(x)) or decode(x))
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    assert sum(lengths) <= 400 + len(prompt) * (NO_TEXT in prompt)
    text, rest = detokenizer.push(ids), detokenizer.finish()
    assert text + rest == decode(prompt + ids)[len(decode(prompt)) :]
    assert len(rest) < 4  # broken bytes are not held back forever
    assert max(lengths) < 40 and sum(lengths) < 40 * len(ids) + 1000


@FEW
@given(
    text=st.text("ab", max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    min_tokens=st.just(0) | st.integers(0, 13),
)
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


def test_one_token_may_complete_several_stop_texts():
    class Words:
        def decode(self, token_ids):
            return "".join(["xabcd", "y"][token_id] for token_id in token_ids)

    detokenizer = IncrementalDetokenizer(Words(), (), ["cd", "bcd", "bc"])
    assert detokenizer.push([1, 0, 1]) == "yxa"
    assert detokenizer.stop_reason == "bc" and detokenizer.num_tokens == 2


def test_a_stop_text_is_found_in_a_token_that_ends_within_a_character():
    class Pieces:
        def decode(self, token_ids):
            return b"".join([b"ar", b"bc", b"a\xe2\x82", b"bb"][x] for x in token_ids).decode(
                errors="replace"
            )

    detokenizer = IncrementalDetokenizer(Pieces(), (), ["ca"])
    assert [detokenizer.push([x]) for x in range(4)] == ["ar", "b", "", ""]
    assert detokenizer.stop_reason == "ca" and detokenizer.num_tokens == 3
