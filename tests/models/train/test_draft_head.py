"""Training of a draft head for a tiny decoder, its folder, and its drafts in the engine."""

import json
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from models.command.options import DEFAULT_CHECKPOINT
from models.decoder import CheckpointError, dense_attend, load_checkpoint, load_draft_head
from models.decoder.draft_head import DraftHead, head_config, save_draft_head
from models.generate import generate
from models.train import draft_head
from models.train.draft_head import HeadTrainConfig, head_loss, main, train_draft_head
from pallas_paged.engine import SamplingParams
from tests.support.checkpoints import edit
from tests.support.dense_oracle import CONFIG, DenseOracle, tiny_model

pytestmark = pytest.mark.usefixtures("exact_products")
RUN = HeadTrainConfig(num_texts=8, seq_len=12, steps=30, batch_size=4, depth=2, warmup=3)
RUN = replace(RUN, learning_rate=1e-2)
TEXTS = np.random.default_rng(0).integers(64, size=(8, 12)).astype(np.int32)

DEMO = ["--checkpoint", str(DEFAULT_CHECKPOINT)]


@pytest.fixture(scope="module")
def decoder():
    return tiny_model(replace(CONFIG, vocab_size=64))


@pytest.fixture(scope="module")
def trained(decoder):
    return train_draft_head(decoder, TEXTS, RUN)


@pytest.fixture
def folder(trained, tmp_path):
    save_draft_head(tmp_path / "head", trained[0])
    return tmp_path / "head"


@pytest.mark.cpu_budget(10)  # trains
def test_the_loss_falls_and_the_decoder_stays_as_it_is(decoder, trained):
    head, losses, held_out = trained
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5])
    assert np.isfinite(held_out)
    assert head.embed_tokens.weight[...] is decoder.embed_tokens.weight[...]
    again = tiny_model(replace(CONFIG, vocab_size=64))
    for x, y in zip(*(jax.tree.leaves(nnx.state(x)) for x in (decoder, again)), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.cpu_budget(10)  # trains
def test_a_run_that_diverges_makes_no_head(decoder):
    run = replace(RUN, steps=3, warmup=0, depth=1, learning_rate=1e38)
    with pytest.raises(ValueError, match=r"the run diverged: lower config\.learning_rate=1e\+38"):
        train_draft_head(decoder, TEXTS, run)
    with pytest.raises(ValueError, match=r"len\(texts\)=1 must be at least 2"):
        train_draft_head(decoder, TEXTS[:1], run)


@pytest.mark.cpu_budget(10)  # programs of its own
def test_each_pass_is_what_a_draft_computes_behind_drafts(decoder, monkeypatch):
    """The oracle computes one text up to one token, by plain causal attention."""
    head = DraftHead(head_config(decoder.config), dtype=jnp.float32, rngs=nnx.Rngs(1))
    head.shares(decoder)
    tokens, positions = TEXTS[:1], np.arange(12)[None]
    hidden, _ = jax.jit(lambda: decoder(tokens, positions, dense_attend()))()
    passes, draft = [], DraftHead.draft

    def record(self, *args):
        passes.append(draft(self, *args))
        return passes[-1]

    def outputs():
        head_loss(head, tokens, hidden, 3)
        return [out for out, _ in passes]

    with monkeypatch.context() as patch:
        patch.setattr(DraftHead, "draft", record)
        found = jax.jit(outputs)()
    place = 7
    args = tokens[:, : place + 1], positions[:, : place + 1]
    plain = jax.jit(lambda before: head.draft(*args, before, dense_attend())[0])
    for depth in range(3):
        before = np.pad(hidden, ((0, 0), (1, 0), (0, 0)))[:, : place + 1]
        for at in range(place - depth, place):
            before[:, at + 1] = plain(before)[:, at]
        wanted = plain(before)[:, place]
        np.testing.assert_allclose(found[depth][:, place], wanted, atol=1e-5)


@pytest.mark.cpu_budget(30)  # programs of its own
def test_tokens_with_a_loaded_head_are_those_without(decoder, folder):
    head = load_draft_head(folder, decoder)
    assert head.embed_tokens.weight[...] is decoder.embed_tokens.weight[...]
    prompts = [[1, 2, 3], [*range(4, 13)], [18]]
    greedy = SamplingParams(max_tokens=14, temperature=0.0)
    sizes = dict(num_pages=24, page_size=4, max_num_seqs=4, max_num_batched_tokens=16)
    drafts = dict(method="eagle", model=head, num_speculative_tokens=2)
    sizes |= dict(max_model_len=48, speculative_config=drafts)
    oracle, outputs = DenseOracle(decoder), generate(decoder, prompts, greedy, **sizes)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == oracle.continue_(prompt, 14)


def test_a_head_is_saved_without_what_it_shares_and_read_as_it_was(decoder, trained, folder):
    loaded = load_draft_head(folder, decoder)
    assert loaded.config == trained[0].config
    for x, y in zip(*(jax.tree.leaves(nnx.state(x)) for x in (trained[0], loaded)), strict=True):
        np.testing.assert_array_equal(x, y)
    assert not any("embed" in name for name in load_file(folder / "model.safetensors"))


def test_a_folder_that_is_no_head_of_the_decoder_is_refused(decoder, folder, tmp_path):
    for config, message in [
        (dict(hidden_size=64), "hidden_size=64 must be the decoder's, 32"),
        (dict(hidden_size=32, vocab_size=65), "vocab_size=65 must be the decoder's, 64"),
        (dict(architectures=["LlamaForCausalLM"]), "must be .'PallasPagedDraftHead'"),
    ]:
        edit(folder, {}, **config)
        with pytest.raises(CheckpointError, match=message):
            load_draft_head(folder, decoder)
    with pytest.raises(CheckpointError, match="nowhere: no such checkpoint folder"):
        load_draft_head(tmp_path / "nowhere", decoder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        load_draft_head(tmp_path / "empty", decoder)
    with pytest.raises(CheckpointError, match=r"missing tensor model\.fc\.weight"):
        edit(folder, {"model.fc.weight": None}, architectures=["PallasPagedDraftHead"])
        edit(folder, {}, vocab_size=64)
        load_draft_head(folder, decoder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--steps 0", "steps=0 must be positive"),
        ("--num-texts 1", "num_texts=1 must be at least 2"),
        ("--seq-len 4", "seq_len=4 must be at least depth + 2"),
        ("--warmup 1000", r"warmup=1000 must be in [0, steps=1000)"),
        ("--learning-rate nan", "learning_rate=nan must be positive and finite"),
        ("--dtype int8", "dtype='int8' must be float32 or bfloat16"),
        ("--checkpoint missing", "missing: no such checkpoint folder"),
        ("--prompts missing", "No such file"),
        ("--checkpoint one --out two/../one", "must not be --checkpoint, which the head would"),
    ],
)
def test_bad_input_of_the_command_is_one_line(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    assert main([*DEMO, "--out", "out", *options.split()]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert out == "" and not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_is_an_error_before_the_texts_and_ctrl_c_ends_them(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "file").touch()
    write_texts = mock.Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(draft_head, "write_texts", write_texts)
    assert main([*DEMO, "--out", str(tmp_path / "file")]) == 2
    assert "File exists" in capsys.readouterr().err and not write_texts.called
    assert main([*DEMO, "--out", str(tmp_path / "head")]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.cpu_budget(10)  # programs of its own
def test_the_command_saves_a_head_with_a_card(tmp_path, monkeypatch, capsys):
    """With texts and acceptance from elsewhere: they compile engines."""
    given = []
    monkeypatch.setattr(draft_head, "write_texts", lambda *args: TEXTS)
    monkeypatch.setattr(
        draft_head, "acceptance", lambda *args, **how: given.append(how) or ([0.5, 0.25], 1.75)
    )
    options = "--num-texts 8 --seq-len 12 --steps 2 --warmup 0 --depth 1 --intermediate-size 8"
    assert main([*DEMO, "--out", str(tmp_path / "head"), *options.split()]) == 0
    out = capsys.readouterr().out
    assert "temperature 0.8: right 50%, 25%; 1.75 tokens a step" in out
    assert [x["temperature"] for x in given] == [0.0, 0.8]
    card = (tmp_path / "head" / "README.md").read_text()
    assert out.splitlines()[0] in card and "--intermediate-size 8" in card
    contents = json.loads((tmp_path / "head" / "config.json").read_text())
    assert contents["intermediate_size"] == 8
    decoder, _ = load_checkpoint(DEFAULT_CHECKPOINT)
    assert load_draft_head(tmp_path / "head", decoder).fc.weight[...].dtype == jnp.bfloat16
