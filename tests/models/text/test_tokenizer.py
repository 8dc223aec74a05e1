"""Tokenizers of checkpoint folders, byte-level and SentencePiece style."""

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from models.text import Tokenizer, save_byte_tokenizer
from pallas_paged.server import HFTokenizer
from tests.support.word_tokenizers import sentencepiece

TEXT = "ROMEO:\n\tÀ bientôt, 子曰: “¿qué?” 🎭\x00  twice"


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    save_byte_tokenizer(folder, max_length=64)
    return folder


@pytest.fixture(scope="module")
def byte_level(byte_folder):
    return Tokenizer(byte_folder)


@pytest.fixture(scope="module")
def llama2(tmp_path_factory):
    """A BOS is first."""
    inner, bos = sentencepiece("<s>", "</s>"), [("<s>", 1)]
    inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=bos)
    folder = tmp_path_factory.mktemp("llama2")
    inner.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def test_byte_ids_are_the_bytes_and_single_tokens_have_bytes(byte_level, llama2):
    assert byte_level.vocab_size == 256
    assert byte_level.encode(TEXT) == list(TEXT.encode())
    assert byte_level.decode(list(TEXT.encode())) == TEXT
    assert byte_level.encode("") == []
    for byte in range(256):
        assert byte_level.decode([byte]) == bytes([byte]).decode(errors="replace")
    assert b"".join(byte_level.token_bytes(byte) for byte in range(256)) == bytes(range(256))
    assert byte_level.token_bytes(256) == b""
    tokens = llama2.encode("ab \u00c0")
    assert b"".join(map(llama2.token_bytes, tokens)) == "<s> ab \u00c0".encode()


def test_bos_is_added_and_left_out_of_the_text(llama2):
    ids = llama2.encode("ab b")
    assert [token_id for token_id in ids if llama2.is_special(token_id)] == [1] == ids[:1]
    assert llama2.decode(ids) == "ab b"
    assert llama2.encode("ab b", add_special_tokens=False) == ids[1:]
    # Names of special tokens in a text are those tokens.
    assert llama2.encode("<s>ab b", add_special_tokens=False).count(1) == 1
    assert llama2.encode("<s>ab b").count(1) == 2


def test_settings_of_a_training_run_do_not_change_a_prompt(byte_folder, tmp_path):
    inner = tokenizers.Tokenizer.from_file(str(byte_folder / "tokenizer.json"))
    inner.enable_truncation(4)
    inner.enable_padding(length=8)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    for text in ("ab", TEXT):
        assert tokenizer.encode(text) == list(text.encode())


def test_a_missing_or_broken_file_is_named_in_the_error(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json: no such file"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: "):
        Tokenizer(tmp_path)


def test_markers_of_calls_stay_in_the_text_and_other_special_tokens_do_not(byte_folder):
    inner = tokenizers.Tokenizer.from_file(str(byte_folder / "tokenizer.json"))
    inner.add_special_tokens(["[TOOL_CALLS]", "<s>"])
    tokenizer = HFTokenizer(inner)
    token_ids = tokenizer.encode("<s>a[TOOL_CALLS]b")
    assert token_ids == [257, 97, 256, 98]
    assert tokenizer.decode(token_ids) == "a[TOOL_CALLS]b"
    assert tokenizer.token_bytes(256) == b"[TOOL_CALLS]"
    assert [tokenizer.is_special(x) for x in (256, 257)] == [False, True]
