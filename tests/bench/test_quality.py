"""The bench of quality: paged forwards against dense ones in a tiny run."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from bench.serving import quality
from bench.serving.models import random_model
from models.decoder import Decoder, load_checkpoint, save_checkpoint
from models.text import save_byte_tokenizer
from tests.support.dense_oracle import dense_logits
from tests.support.oracle import log_softmax

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
def decoder(checkpoint) -> Decoder:
    return load_checkpoint(checkpoint)[0]


def test_nats_are_those_of_the_model_without_a_cache(checkpoint, decoder, tmp_path, dry_run):
    text = tmp_path / "text"
    text.write_text(TEXT)
    args = ["--checkpoint", str(checkpoint), "--text", str(text), "--shape", "tiny"]
    args += ["--window", "8", "--batch", "2", "--implementation", "xla"]
    run, tables = dry_run(quality, *args)
    found, random, kv = run["checkpoint"], run["random"], run["checkpoint"]["kv"]
    tokens = np.frombuffer(TEXT.encode()[-40:], np.uint8).astype(np.int32)
    assert found["num_tokens"] == 39 and found["num_bytes"] == 39 and random["num_tokens"] == 16
    rows = np.append(tokens, 0)[8 * np.arange(5)[:, None] + np.arange(9)]
    logprobs = log_softmax(dense_logits(decoder, rows[:, :-1]))
    nats = -np.take_along_axis(logprobs, rows[:, 1:, None], axis=2)[..., 0]
    wanted = nats.ravel()[:39].mean()  # the last row is not full
    assert kv["fp32"]["nats"] == pytest.approx(wanted, rel=1e-5)
    assert random["kv"]["fp32"]["nats"] == pytest.approx(np.log(256), rel=0.02)  # nearly flat
    assert f" {np.exp(kv['fp32']['nats']):.4f} " in tables and "Random weights" in tables
    assert list(kv) == list(quality.NAMES) and kv["bf16"]["top1"] == 1 and kv["bf16"]["kl"] == 0
    assert 0 < kv["int8"]["kl"] < kv["fp8"]["kl"] < 0.1  # fp8 has 3 bits of mantissa
    assert len({sums["nats"] for sums in kv.values()}) == 4
    assert all(0.8 < sums["top1"] <= 1 for sums in kv.values())


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


@pytest.mark.parametrize(
    ("text", "window", "error"),
    [("short", 8, "at least 2"), ("x" * 99, 9999999, "--window 9999999"), (None, 8, "text")],
)
def test_unusable_text_and_window_are_one_line(text, window, error, checkpoint, tmp_path) -> None:
    path = tmp_path / "text"
    if text:
        path.write_text(text)
    args = ["--checkpoint", str(checkpoint), "--text", str(path), "--window", str(window)]
    with pytest.raises(SystemExit, match=f"^error: .*{error}"):
        quality.main(args)
