"""Tokenizers of both styles, whole and streamed."""

import itertools

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, processors

from models.text_stream import TextStream
from models.tokenizer import StreamDecoder, Tokenizer, save_byte_tokenizer

TEXT = "ROMEO:\n\tÀ bientôt, 子曰: “¿qué?” 🎭\x00  twice"


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    save_byte_tokenizer(folder, max_length=64)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    """Like Llama 2's: an underscore marks words, unknown characters are bytes, a BOS is first."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "a", "b", "▁a", "▁b", "ab", "▁ab"]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    vocab = {word: index for index, word in enumerate(words)}
    inner = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
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
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    folder = tmp_path_factory.mktemp("sentencepiece")
    inner.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def test_byte_ids_are_the_bytes(byte_level):
    assert byte_level.vocab_size == 256
    assert byte_level.encode(TEXT) == list(TEXT.encode())
    assert byte_level.decode(list(TEXT.encode())) == TEXT
    assert byte_level.encode("") == []
    for byte in range(256):
        assert byte_level.decode([byte]) == bytes([byte]).decode(errors="replace")


def test_bos_is_added_and_left_out_of_the_text(sentencepiece):
    ids = sentencepiece.encode("ab b")
    assert ids[0] == 1
    assert sentencepiece.decode(ids) == "ab b"


def test_stream_holds_back_incomplete_characters_only(byte_level):
    stream = StreamDecoder(byte_level)
    euro = "€".encode()
    assert stream.push(b"a" + euro[:2]) == "a"
    assert stream.push([]) == ""
    assert stream.push(euro[2:] + b"b") == "€b"
    assert stream.push(euro[:1]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.push(b"c") == "c"
    assert stream.finish() == ""


@settings(deadline=None, max_examples=60, derandomize=True)
@given(data=st.binary(max_size=24), cuts=st.lists(st.integers(0, 24), max_size=4))
def test_stream_of_any_bytes_joins_to_the_whole(byte_level, data, cuts):
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    stream = StreamDecoder(byte_level)
    pieces = [stream.push(data[start:end]) for start, end in itertools.pairwise(edges)]
    assert "".join(pieces) + stream.finish() == byte_level.decode(list(data))


@settings(deadline=None, max_examples=60, derandomize=True)
@given(text=st.text(max_size=12))
def test_stream_of_valid_text_is_never_late(byte_level, text):
    stream = StreamDecoder(byte_level)
    shown = ""
    for character in text.replace("\ufffd", ""):
        *first, last = character.encode()
        assert stream.push(first) == ""
        shown += stream.push([last])
        assert shown.endswith(character)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    text=st.text(alphabet="ab é子🎭", max_size=16),
    specials=st.lists(st.integers(0, 16), max_size=3),
)
def test_sentencepiece_stream_joins_to_the_whole(sentencepiece, text, specials):
    ids = sentencepiece.encode(text)
    whole = sentencepiece.decode(ids)
    for place in specials:  # special tokens have no text at any place between characters
        if place == len(ids) or (place < len(ids) and ids[place] >= 259):
            ids.insert(place, 2)
    stream = StreamDecoder(sentencepiece)
    assert "".join(stream.push([token]) for token in ids) + stream.finish() == whole


def test_stream_of_broken_bytes_does_not_wait_forever(byte_level):
    stream = StreamDecoder(byte_level)
    assert len(stream.push([0x80] * 50)) >= 46


@pytest.mark.parametrize(
    "ids", [[0x80], [0xE2], [0xE2, 0x82], [999_999]], ids=["stray", "lead", "two", "textless"]
)
def test_long_stream_of_invalid_bytes_takes_linear_time(byte_level, monkeypatch, ids):
    decoded = []
    decode = byte_level.decode
    stream = StreamDecoder(byte_level, b"context \xe2\x82\xac")
    monkeypatch.setattr(byte_level, "decode", lambda ids: decoded.append(len(ids)) or decode(ids))
    ids = [0xF0, *ids * 1000]
    text = stream.push(ids) + stream.finish()
    assert text == decode(ids)
    assert max(decoded) < 40 and sum(decoded) < 40 * len(ids)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(
    ids=st.lists(st.sampled_from([0x80, 0xE2, 0x82, 0xF0, 0x9F, 0x41, 999_999]), max_size=80),
    prompt=st.text(alphabet="a€\ufffd", max_size=3),
)
def test_stream_with_bounded_memory_joins_to_the_whole(byte_level, ids, prompt):
    start = byte_level.encode(prompt)
    stream = StreamDecoder(byte_level, start)
    text = "".join(stream.push([token]) for token in ids) + stream.finish()
    assert prompt + text == byte_level.decode(start + ids)


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@given(text=st.text("ab", max_size=12), stops=STOPS)
def test_a_text_ends_before_its_first_stop_text_and_is_never_late(byte_level, text, stops):
    stream, shown = TextStream(byte_level, (), stops), ""
    for end, character in enumerate(text, 1):
        shown += stream.push([ord(character)])
        found = [text.index(stop) for stop in stops if stop in text[:end]]
        assert stream.stopped == bool(found)
        if found:
            assert shown == text[: min(found)] and stream.finish() == ""
            return
        begun = [n for stop in stops for n in range(len(stop)) if text[:end].endswith(stop[:n])]
        assert shown == text[: end - max(begun, default=0)]
    assert shown + stream.finish() == text


def test_a_text_continues_its_prompt(sentencepiece):
    prompt, (token,) = sentencepiece.encode("a"), sentencepiece.encode("b")[1:]
    assert sentencepiece.decode([token]) == "b"  # without the space, at the beginning of a text
    assert TextStream(sentencepiece, prompt, ()).push([token]) == " b"


def test_settings_of_a_training_run_do_not_change_a_prompt(byte_level, tmp_path):
    inner = tokenizers.Tokenizer.from_str(byte_level._tokenizer.to_str())
    inner.enable_truncation(4)
    inner.enable_padding(length=8)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    for text in ("ab", TEXT):
        assert tokenizer.encode(text) == list(text.encode())


def test_a_missing_or_broken_file_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json: no such file"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: "):
        Tokenizer(tmp_path)
