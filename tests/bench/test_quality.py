"""The bench of quality: paged forwards against dense ones, its tables and a tiny run."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bench import quality
from bench.serving.models import random_model
from models.checkpoint import load_checkpoint, save_checkpoint
from models.decoder import Decoder, dense_attend
from models.tokenizer import save_byte_tokenizer
from tests.bench.fakes import META

pytestmark = pytest.mark.usefixtures("exact_products")

TEXT = "x" * 360 + "The lowest tower glows; größere sinks."  # 400 bytes; the last tenth counts


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A byte-level checkpoint of random weights, of the shape `tiny` reduced to one layer."""
    folder = tmp_path_factory.mktemp("quality") / "checkpoint"
    tiny = quality.SHAPES["tiny"]
    config = dataclasses.replace(tiny.config, num_layers=1)
    shape = dataclasses.replace(tiny, config=config)
    graphdef, params = nnx.split(random_model(shape))
    params = jax.tree.map(lambda x: np.asarray(x) * (20 if x.ndim > 1 else 1), params)
    save_checkpoint(folder, nnx.merge(graphdef, params), config)  # logits are far apart
    save_byte_tokenizer(folder, max_length=config.max_position_embeddings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(quality.SHAPES, "tiny", shape)
        yield folder


@pytest.fixture(scope="module")
def files(checkpoint):
    """The numbers and the tables of a run."""
    text = checkpoint.with_name("text")
    text.write_text(TEXT)
    found = {name: checkpoint.with_name(f"bench.{name}") for name in ("json", "markdown")}
    args = ["--checkpoint", str(checkpoint), "--text", str(text), "--shape", "tiny"]
    args += ["--window", "8", "--batch", "2", "--implementation", "xla"]
    run = quality.main([*args, *(x for name in found for x in (f"--{name}", str(found[name])))])
    assert json.loads(found["json"].read_text()) == run
    return run, found["markdown"].read_text()


@pytest.fixture(scope="module")
def decoder(checkpoint) -> Decoder:
    return load_checkpoint(checkpoint)[0]


@nnx.jit
def _dense(model: Decoder, tokens: jax.Array) -> jax.Array:
    """Log-probabilities `f32[B, T, V]` without pages."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return jax.nn.log_softmax(model.logits(model(tokens, positions, dense_attend())[0]))


def test_nats_are_those_of_the_model_without_a_cache(decoder, files) -> None:
    found, random = files[0]["checkpoint"], files[0]["random"]
    tokens = np.frombuffer(TEXT.encode()[-40:], np.uint8).astype(np.int32)
    assert found["num_tokens"] == 39 and found["num_bytes"] == 39 and random["num_tokens"] == 16
    rows = np.append(tokens, 0)[8 * np.arange(5)[:, None] + np.arange(9)]
    logprobs = np.asarray(_dense(decoder, rows[:, :-1]), np.float64)
    nats = -np.take_along_axis(logprobs, rows[:, 1:, None], axis=2)[..., 0]
    wanted = nats.ravel()[:39].mean()  # the last row is not full
    assert found["kv"]["fp32"]["nats"] == pytest.approx(wanted, rel=1e-5)
    assert random["kv"]["fp32"]["nats"] == pytest.approx(np.log(256), rel=0.02)  # nearly flat


def test_distances_from_bf16_differ_by_dtype(files) -> None:
    measured = files[0]["checkpoint"]["kv"]
    assert list(measured) == list(quality.NAMES)
    assert measured["bf16"]["top1"] == 1.0 and measured["bf16"]["kl"] == 0.0
    distances = [measured[name]["kl"] for name in ("int8", "fp8")]
    assert 0 < distances[0] < distances[1] < 0.1  # fp8 has 3 bits of mantissa
    assert len({sums["nats"] for sums in measured.values()}) == 4
    assert all(0.8 < sums["top1"] <= 1 for sums in measured.values())


def test_tables_of_a_run(files) -> None:
    run, text = files
    assert "Random weights" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| fp32 ")]
    kv = run["checkpoint"]["kv"]
    nats = kv["fp32"]["nats"]
    assert [len(row) for row in rows] == [6, 3]
    assert rows[0][2] == f"{np.exp(nats):.4f}"
    assert float(rows[0][3]) == pytest.approx(np.exp(nats - kv["bf16"]["nats"]), abs=1e-5)


def test_compare_counts_only_positions_with_weight(decoder) -> None:
    graphdef, params = nnx.split(decoder)
    hidden, other = np.random.default_rng(0).normal(size=(2, 2, 3, 64)).astype(np.float32)
    targets = np.int32([[1, 2, 3], [4, 5, 6]])
    counts = np.float32([[1, 0, 1], [0, 0, 1]])
    got = quality.compare(graphdef, params, hidden, other, targets, counts)
    chosen = np.asarray(counts, bool)
    logprobs = nnx.jit(lambda model, x: jax.nn.log_softmax(model.logits(x)))
    ours, theirs = (np.asarray(logprobs(decoder, x), np.float64)[chosen] for x in (hidden, other))
    nats = -ours[np.arange(3), targets[chosen]].sum()
    assert got["nats"] == pytest.approx(nats, rel=1e-5)
    assert got["top1"] == (ours.argmax(1) == theirs.argmax(1)).sum()
    assert got["kl"] == pytest.approx((np.exp(theirs) * (theirs - ours)).sum(), rel=1e-4)


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
