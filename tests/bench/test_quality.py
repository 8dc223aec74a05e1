"""The bench of quality: paged forwards against dense ones, its tables and a tiny run."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from bench import quality
from models.checkpoint import save_checkpoint
from models.decoder import Decoder, dense_attend
from models.tokenizer import save_byte_tokenizer
from models.train import split_windows
from tests.bench.fakes import META
from tests.support.dense_oracle import CONFIG, tiny_model

pytestmark = pytest.mark.usefixtures("exact_products")

PAGES = {"page_size": 4, "implementation": "xla"}


@pytest.fixture(scope="module")
def windows() -> tuple[jax.Array, jax.Array]:
    """Two batches of three rows of ten tokens; the last row is not full."""
    tokens = np.random.default_rng(0).integers(CONFIG.vocab_size, size=56)
    return split_windows(tokens, 10, 3)


@pytest.fixture(scope="module")
def measured(model, windows, exact_products) -> dict[str, dict[str, float]]:
    return quality.measure(model, *windows, **PAGES)


@nnx.jit
def _dense(model: Decoder, tokens: jax.Array) -> jax.Array:
    """Log-probabilities `f32[B, T, V]` without pages."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return jax.nn.log_softmax(model.logits(model(tokens, positions, dense_attend())[0]))


def test_nats_are_those_of_the_model_without_a_cache(model, windows, measured) -> None:
    tokens, counts = (x.reshape(-1, x.shape[-1]) for x in windows)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        _dense(model, tokens[:, :-1]), tokens[:, 1:]
    )
    assert counts.sum() == 55
    assert measured["fp32"]["nats"] == pytest.approx(float((losses * counts).sum() / 55), rel=1e-5)


def test_distances_from_bf16_differ_by_dtype(measured) -> None:
    assert list(measured) == list(quality.NAMES)
    assert measured["bf16"]["top1"] == 1.0 and measured["bf16"]["kl"] == 0.0
    distances = [measured[name]["kl"] for name in ("int8", "fp8")]
    assert 0 < distances[0] < distances[1] < 0.1  # fp8 has 3 bits of mantissa
    assert len({sums["nats"] for sums in measured.values()}) == 4
    assert all(0.8 < sums["top1"] <= 1 for sums in measured.values())


def test_compare_counts_only_positions_with_weight(model) -> None:
    graphdef, params = nnx.split(model)
    hidden, other = (jax.random.normal(jax.random.key(i), (2, 3, 32)) for i in (0, 1))
    targets = jnp.array([[1, 2, 3], [4, 5, 6]])
    counts = jnp.array([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    got = quality.compare(graphdef, params, hidden, other, targets, counts)
    chosen = np.asarray(counts, bool)
    ours, theirs = (
        np.asarray(jax.nn.log_softmax(model.logits(x)), np.float64)[chosen] for x in (hidden, other)
    )
    nats = -ours[np.arange(3), np.asarray(targets)[chosen]].sum()
    assert got["nats"] == pytest.approx(nats, rel=1e-5)
    assert got["top1"] == (ours.argmax(1) == theirs.argmax(1)).sum()
    assert got["kl"] == pytest.approx((np.exp(theirs) * (theirs - ours)).sum(), rel=1e-4)


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A byte-level checkpoint of random weights, of the shape `tiny` reduced to one layer."""
    folder = tmp_path / "checkpoint"
    tiny = quality.SHAPES["tiny"]
    config = dataclasses.replace(tiny.config, num_layers=1)
    monkeypatch.setitem(quality.SHAPES, "tiny", dataclasses.replace(tiny, config=config))
    save_checkpoint(folder, tiny_model(config), config)
    save_byte_tokenizer(folder, max_length=config.max_position_embeddings)
    return folder


def test_tiny_run(checkpoint, tmp_path, capsys) -> None:
    text = tmp_path / "text"
    text.write_text("x" * 360 + "é" * 20)  # bytes of UTF-8: 40 of 400 are the last tenth
    files = {name: tmp_path / f"bench.{name}" for name in ("json", "markdown")}
    args = ["--checkpoint", str(checkpoint), "--text", str(text), "--shape", "tiny"]
    args += ["--window", "8", "--batch", "2", "--implementation", "xla"]
    run = quality.main([*args, *(x for name in files for x in (f"--{name}", str(files[name])))])
    assert json.loads(files["json"].read_text()) == run
    found, random = run["checkpoint"], run["random"]
    assert found["num_tokens"] == 39 and random["num_tokens"] == 16
    assert random["kv"]["fp32"]["nats"] == pytest.approx(np.log(256), rel=0.02)  # nearly flat
    out = capsys.readouterr().out
    assert files["markdown"].read_text() in out and "Random weights" in out
    rows = [line.split(" | ") for line in out.splitlines() if line.startswith("| fp32 ")]
    nats = found["kv"]["fp32"]["nats"]
    assert [len(row) for row in rows] == [6, 3]
    assert rows[0][2] == f"{np.exp(nats):.4f}"
    assert float(rows[0][3]) == pytest.approx(np.exp(nats - found["kv"]["bf16"]["nats"]), abs=1e-5)


def test_nats_are_per_byte_and_perplexity_per_token() -> None:
    kv = {name: {"nats": 2.0, "top1": 1.0, "kl": 0.0} for name in quality.NAMES}
    found = {"checkpoint": "c", "dtype": "bfloat16", "window": 8, "kv": kv}
    found |= {"num_tokens": 10, "num_bytes": 40}
    text = quality.markdown({"meta": META, "checkpoint": found, "random": None})
    assert "| int8 | 0.50000 | 7.3891 | 1.00000 | 100.000% | 0.00e+00 |" in text
    assert "| bf16 | 0.50000 | 7.3891 | 1.00000 | - | - |" in text


def test_unusable_inputs_are_one_line(checkpoint, tmp_path) -> None:
    text = tmp_path / "text"
    text.write_text("short")
    args = ["--checkpoint", str(checkpoint), "--text", str(text)]
    with pytest.raises(SystemExit, match=r"^error: .*at least 2"):
        quality.main(args)
    with pytest.raises(SystemExit, match=r"^error: --window 9999999"):
        quality.main([*args, "--window", "9999999"])
    with pytest.raises(SystemExit, match=r"^error: .*none"):
        quality.main([*args[:2], "--text", str(tmp_path / "none")])
