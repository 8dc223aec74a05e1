"""Training of a tiny model on generated text."""

from dataclasses import asdict, replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import SafetensorError

from models.decoder import Decoder, load_checkpoint
from models.text import Tokenizer
from models.train import trainer
from models.train.__main__ import main
from models.train.state import TrainConfig
from models.train.trainer import split_windows, train, validation_loss
from tests.support.dense_oracle import dense_logits
from tests.support.oracle import log_softmax

SIZES = dict(hidden_size=16, num_layers=1, intermediate_size=32)
SIZES |= dict(num_q_heads=2, num_kv_heads=1, head_dim=8, seq_len=16, batch_size=4)
RATES = dict(learning_rate=1e-2, warmup=5, dropout=0.1, ema=0.9)
CONFIG = TrainConfig(**SIZES, **RATES, steps=45, eval_every=15, dtype="float32")
TEXT = b" ".join(b"%d men and %d more;" % (n, n * n % 7) for n in range(120))


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu():
    """Skips on GPUs, which add embedding gradients in any order, so sums differ between runs."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "model"
    return out, train(CONFIG, TEXT, out, about="numbers of men")


def test_the_loss_falls_far_below_chance_and_the_folder_is_complete(trained):
    out, loss = trained
    assert loss < 0.65 * np.log(256)
    names = {"config", "generation_config", "tokenizer", "tokenizer_config"}
    names = {"README.md", "model.safetensors"} | {f"{name}.json" for name in names}
    assert {path.name for path in out.iterdir()} == names
    model, config = load_checkpoint(out)
    assert config == CONFIG.model_config()
    assert model.embed_tokens.weight[...].dtype == jnp.bfloat16
    assert Tokenizer(out).encode("men") == list(b"men")
    card = (out / "README.md").read_text()
    num_params = sum(x.size for x in jax.tree.leaves(nnx.state(model)))
    for fact in (f"{loss:.4f} nats", f"{num_params:,}", "numbers of men", "apache-2.0", "--seed 0"):
        assert fact in card


def test_the_reported_loss_is_that_of_the_saved_weights(trained):
    out, loss = trained
    validation = np.frombuffer(TEXT, np.uint8)[len(TEXT) * 9 // 10 :].astype(np.int32)
    model, _ = load_checkpoint(out, dtype=jnp.float32)
    total = 0.0
    for start in range(0, validation.size - 1, CONFIG.seq_len):
        window = validation[start : start + CONFIG.seq_len + 1]
        log_probs = log_softmax(dense_logits(model, window[None, :-1])[0])
        total -= float(log_probs[np.arange(window.size - 1), window[1:]].sum())
    assert loss == pytest.approx(total / (validation.size - 1), rel=1e-5)


def test_an_interrupted_run_resumes_bit_for_bit(trained, tmp_path, monkeypatch):
    out, loss = trained
    save_state = trainer.save_state

    def save_and_stop(path, state, run):
        save_state(path, state, run)
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "save_state", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        train(CONFIG, TEXT, tmp_path)
    first = (tmp_path / "model.safetensors").read_bytes()
    monkeypatch.undo()

    with pytest.raises(ValueError, match="of another run: seed=0 there, 1 here"):
        train(replace(CONFIG, seed=1), TEXT, tmp_path, resume=True)
    with pytest.raises(ValueError, match="of another run: sha256="):
        train(CONFIG, TEXT + b"!", tmp_path, resume=True)

    state = tmp_path / trainer.STATE_FILE
    saved = state.read_bytes()
    for damaged, message in ((saved[:-1], "is damaged: "), (first, "of another run: steps=None")):
        state.write_bytes(damaged)
        with pytest.raises(ValueError, match=message):
            train(CONFIG, TEXT, tmp_path, resume=True)
    state.write_bytes(saved)

    assert train(CONFIG, TEXT, tmp_path, resume=True) == loss
    weights = (tmp_path / "model.safetensors").read_bytes()
    assert weights == (out / "model.safetensors").read_bytes()
    assert weights != first
    with pytest.raises(ValueError, match="nothing to resume"):
        train(CONFIG, TEXT, tmp_path, resume=True)


@pytest.mark.parametrize("num_bytes", [2, 5, 24, 25, 26, 100])
def test_windows_predict_each_byte_once(num_bytes):
    text = np.arange(num_bytes, dtype=np.uint8)
    windows, counts = map(np.asarray, split_windows(text, 4, 3))
    assert windows.shape[1:] == (3, 5)
    assert counts.shape == (*windows.shape[:2], 4)
    np.testing.assert_array_equal(windows[..., 1:][counts == 1], text[1:])
    np.testing.assert_array_equal(windows[..., :-1][counts == 1], text[:-1])
    assert counts.shape[0] == -(-(num_bytes - 1) // 12)


def test_padding_does_not_count():
    graphdef, state = trainer.create_train_state(CONFIG)
    text = np.frombuffer(TEXT[:49], np.uint8)  # 3 windows
    how = dict(graphdef=graphdef, dtype="float32")
    few, many = (validation_loss(state.params, *split_windows(text, 16, n), **how) for n in (3, 8))
    np.testing.assert_allclose(few, many, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps=0 must be positive"),
        ({"warmup": 45}, r"warmup=45 must be in \[0, steps=45\)"),
        ({"dropout": 1.0}, r"dropout=1.0 must be in \[0, 1\)"),
        ({"learning_rate": -0.1}, "learning_rate=-0.1 must be positive and finite"),
        ({"weight_decay": np.nan}, "weight_decay=nan must be finite, and at least 0"),
        ({"dtype": "int8"}, "dtype='int8' must be float32 or bfloat16"),
    ],
)
def test_impossible_options_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--text missing", "No such file"),
        ("", "20 bytes is too short for seq_len=1024"),
        ("--seq-len 2 --num-kv-heads 3", "num_q_heads=4 must be a multiple of"),
        ("--seq-len 2 --resume", "nothing to resume"),
    ],
)
def test_bad_input_of_the_command_is_one_line(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_bytes(b"twenty bytes of text")
    sizes = "--hidden-size 16 --intermediate-size 16 --num-layers 1"
    assert main(f"--text text --out out {sizes} {options}".split()) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert out == "" and not (tmp_path / "out").exists()


@pytest.mark.parametrize("saved", [True, False])
def test_an_interrupted_command_says_whether_there_is_a_state(tmp_path, monkeypatch, capsys, saved):
    def interrupted(*args, **options):
        if saved:
            (tmp_path / trainer.STATE_FILE).touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("models.train.__main__.train", interrupted)
    assert main(["--text", __file__, "--out", str(tmp_path)]) == 130
    rest = f"continue with --resume from {tmp_path / trainer.STATE_FILE}"
    assert capsys.readouterr().err == f"interrupted: {rest if saved else 'no state was saved'}\n"


def test_a_full_disk_is_one_line(tmp_path, monkeypatch, capsys):
    save = mock.Mock(side_effect=SafetensorError("I/O error: No space left on device"))
    monkeypatch.setattr("models.decoder.tensor_file.save_file", save)
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_bytes(TEXT)
    options = [f"--{k.replace('_', '-')}={v}" for k, v in asdict(CONFIG).items()]
    assert main(["--text", str(text), "--out", str(out), *options]) == 2
    message = f"error: {out / 'model.safetensors'}: I/O error: No space left on device\n"
    assert capsys.readouterr().err.endswith(message)


def test_the_demo_has_four_million_parameters():
    shapes = nnx.eval_shape(lambda: Decoder(TrainConfig().model_config(), rngs=nnx.Rngs(0)))
    assert sum(x.size for x in jax.tree.leaves(nnx.state(shapes))) == 4_000_000
