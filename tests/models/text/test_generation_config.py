"""Sampling defaults that a checkpoint folder sets."""

import json
from dataclasses import replace

import pytest

from models.text import Tokenizer, chat_defaults, read_chat_template, sampling_defaults
from tests.support.chat_folders import save_chat_folder
from tests.support.commands import CONFIG

QWEN = dict(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05)
OTHERS = dict(do_sample=True, eos_token_id=[1, 2], max_length=99, stop_strings="x", min_p=None)


def write(folder, contents):
    text = contents if isinstance(contents, str) else json.dumps(contents)
    (folder / "generation_config.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ({}, {}),
        (QWEN | OTHERS, QWEN),
        (QWEN | {"do_sample": False}, QWEN | {"temperature": 0.0}),
        ({"temperature": 0.5, "min_p": 0.1}, {"temperature": 0.5, "min_p": 0.1}),
    ],
)
def test_sampling_defaults_are_those_of_the_file(tmp_path, contents, expected):
    assert sampling_defaults(tmp_path) == {}
    assert sampling_defaults(write(tmp_path, contents)) == expected


@pytest.mark.parametrize("name", ["", "stop_strings", "chat_stop_strings"])
def test_answers_end_at_stop_texts_and_at_the_end_of_the_tokenizer(tmp_path, name):
    save_chat_folder(tmp_path, "turns")
    write(tmp_path, {"top_p": 0.5} | ({name: ["x", "y"]} if name else {}))
    stop = {"stop": ["x", "y"]} if name else {}
    tokenizer, config = Tokenizer(tmp_path), replace(CONFIG, vocab_size=300)

    def defaults(**values):
        values = replace(config, **values)
        return chat_defaults(tmp_path, values, tokenizer, read_chat_template(tmp_path))

    assert tokenizer.token_id("</s>") == 257
    assert defaults() == {"top_p": 0.5, "stop_token_ids": [257]} | stop
    # A token that the model ends at anyway, or does not have.
    assert defaults(eos_token_ids=(1, 257)) == defaults(vocab_size=257) == {"top_p": 0.5} | stop
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "unknown"}')
    assert defaults() == {"top_p": 0.5} | stop


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("{", "generation_config.json: not JSON: "),
        ("[]", "generation_config.json: expected a JSON object"),
        ({"temperature": "hot"}, "generation_config.json: temperature='hot' must be a finite"),
        ({"top_p": 1.5}, r"generation_config.json: top_p=1\.5 must be above 0 and at most 1"),
    ],
)
def test_damaged_files_are_named(tmp_path, contents, message):
    with pytest.raises(ValueError, match=message):
        sampling_defaults(write(tmp_path, contents))
