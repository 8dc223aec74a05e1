"""The Mosaic kernel between two attentions: interpreted on a CPU, and lowered for a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernels need JAX 0.11", allow_module_level=True)

from pallas_paged.kernels.decode_plan import DecodePlan
from pallas_paged.kernels.decode_states import DecodeStates
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.mosaic.board import BLANK
from pallas_paged.kernels.mosaic.config import DecoderBlockConfig, decoder_block_config
from pallas_paged.kernels.mosaic.decoder_block import between_attentions, new_boards
from tests.support.block_weights import draw, shapes_of
from tests.support.devices import lower_for_cuda
from tests.support.marks import slow


def oracle(attended, x, w, dtype):
    """The steps in NumPy, in f32, rounded where separate operations round."""

    def rounded(x):
        return x.astype(dtype).astype(np.float32)

    def norm(x, weight):
        return rounded(x / np.sqrt((x * x).mean() + 1e-5) * weight)

    attended, x = (np.asarray(a, np.float32)[0] for a in (attended, x))
    w = {name: np.asarray(weight, np.float32) for name, weight in w.items()}
    x = rounded(x + rounded(w["o"] @ attended))
    normed = norm(x, w["mlp_norm"])
    gate, up = (rounded(w["gate_up"][:, i] @ normed) for i in range(2))
    x = rounded(x + rounded(w["down"] @ rounded(gate / (1 + np.exp(-gate)) * up)))
    return x, w["qkv"] @ norm(x, w["out_norm"])


@pytest.mark.parametrize(
    ("splits", "stages", "dtype"),
    [
        ((2, 4), (3, 2), jnp.bfloat16),
        *slow([((4, 2), (2, 2), jnp.float16), ((1, 1), (6, 6), jnp.bfloat16)]),
    ],
)
def test_it_is_the_steps_in_numpy(splits, stages, dtype):
    sizes = 1024, 512, 1024, 192
    w = {name: draw(i, *s, dtype=dtype) for i, (name, s) in enumerate(shapes_of(*sizes).items())}
    attended, x = draw(20, 1, sizes[0], dtype=dtype), draw(21, 1, sizes[1], dtype=dtype)
    config = DecoderBlockConfig(
        num_programs=1,
        o_splits=splits[0],
        down_splits=splits[1],
        num_stages=stages[0],
        num_in_flight=stages[1],
    )
    boards = new_boards(config, size=sizes[1], attended_size=sizes[0], hidden_size=sizes[2])
    got_x, got, boards = between_attentions(
        attended, x, boards, **w, eps=1e-5, config=config, interpret=True
    )
    want_x, want = oracle(attended, x, w, dtype)
    for a, b in ((got_x, want_x), (got, want)):
        assert np.abs(np.asarray(a[0], np.float32) - b).max() < 0.03 * b.std()
    # The next call has a clear board, and clears that of this one.
    posted = np.asarray(boards[1] != BLANK)
    assert (boards[0] == BLANK).all()
    assert posted[: -sizes[0]].all() and not posted[-sizes[0] :].any()


def states_of(rng, lens, *, by_kv_head, sinks):
    """States of 4 heads of 128 of one row, `lens` blocks of 6 programs; and the merged row."""
    num_programs, num_heads, head_dim = 6, 4, 128
    shape = (2, num_programs + 1, 8) if by_kv_head else (num_programs + 1, num_heads)
    out, lse = (rng.standard_normal(s).astype(np.float32) for s in ((*shape, head_dim), shape))
    plan = DecodePlan(
        options=LogitOptions(sm_scale=1.0),
        block_k=64,
        fixed_split_size=None,
        num_seqs=1,
        num_programs=num_programs,
        num_partials=num_programs + 1,
    )
    count = min(lens, -(-lens // max(1, -(-lens // num_programs))))
    heads = [(slice(count), h) for h in range(num_heads)]
    if by_kv_head:
        heads = [(h // 2, slice(count), h % 2) for h in range(num_heads)]
    want = []
    written = np.zeros(shape, bool)
    for h, place in enumerate(heads):
        written[place] = True
        logits = np.append(lse[place], sinks[h] if sinks is not None else -np.inf)
        weights = np.exp(logits - logits.max()) if count else np.zeros(1)
        want.append(weights[:-1] @ out[place] / (weights.sum() or 1.0))
    out[~written] = lse[~written] = np.nan
    states = DecodeStates(
        out=jnp.asarray(out),
        lse=jnp.asarray(lse),
        unit_ends=jnp.array([lens], jnp.int32),
        sinks=None if sinks is None else jnp.asarray(sinks),
        plan=plan,
        num_q_heads=num_heads,
    )
    return states, np.concatenate(want)


@pytest.mark.parametrize(
    ("lens", "with_sinks", "by_kv_head"),
    [
        (5, True, True),
        *slow(
            [
                (0, True, False),
                (50, False, False),
                (0, True, True),
                (1, False, True),
                (1, False, False),
                (5, True, False),
                (50, False, True),
            ]
        ),
    ],
)
def test_it_unites_the_states_of_attention(lens, with_sinks, by_kv_head):
    sizes = 512, 512, 256, 64
    rng = np.random.default_rng(lens)
    sinks = rng.standard_normal(4).astype(np.float32) if with_sinks else None
    states, row = states_of(rng, lens, by_kv_head=by_kv_head, sinks=sinks)
    w = {name: draw(i, *s) for i, (name, s) in enumerate(shapes_of(*sizes).items())}
    x = draw(21, 1, sizes[1])
    config = DecoderBlockConfig(num_programs=1, o_splits=2)

    def run(attended):
        boards = new_boards(config, size=512, attended_size=512, hidden_size=256)
        return between_attentions(attended, x, boards, **w, eps=1e-5, config=config, interpret=True)

    got, want = run(states), run(jnp.asarray(row[None], jnp.bfloat16))
    for a, b in zip(got[:2], want[:2], strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.abs(a - b).max() <= 0.01 * b.std()
    assert (got[2][1] != BLANK).all()


def test_the_first_call_has_boards_without_a_post():
    config = DecoderBlockConfig(num_programs=1)
    assert all(
        (board == BLANK).all()
        for board in new_boards(config, size=512, attended_size=256, hidden_size=256)
    )


@pytest.mark.parametrize(
    ("sizes", "splits", "stages"),
    [
        ((2048, 2048, 8192, 3072), (4, 4), 6),  # Llama 3.2 1B
        ((4096, 4096, 14336, 6144), (2, 2), 6),  # Llama 3.1 8B
        ((2048, 1024, 3072, 0), (8, 4), 6),  # Qwen3 0.6B, after the last layer
    ],
)
def test_the_blocks_of_decoders_lower_for_a_gpu(sizes, splits, stages):
    attended, size, hidden, out = sizes
    config = decoder_block_config(
        size=size, attended_size=attended, hidden_size=hidden, out_size=out, num_programs=132
    )
    assert (config.o_splits, config.down_splits, config.num_stages) == (*splits, stages)
    shapes = shapes_of(*sizes)
    weights = {name: jax.ShapeDtypeStruct(s, jnp.bfloat16) for name, s in shapes.items()}
    rows = [jax.ShapeDtypeStruct((1, n), jnp.bfloat16) for n in (attended, size)]
    boards = jax.eval_shape(
        functools.partial(new_boards, config, size=size, attended_size=attended, hidden_size=hidden)
    )

    def run(attended, x, boards, weights):
        weights = {"qkv": None} | weights
        return between_attentions(attended, x, boards, **weights, eps=1e-5, config=config)

    text = lower_for_cuda(run, *rows, boards, weights).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "stablehlo.pad" not in text and "stablehlo.transpose" not in text


@pytest.mark.parametrize(
    "change",
    [dict(size=768), dict(hidden_size=8200), dict(out_size=100), dict(attended_size=65536)],
)
def test_sizes_that_do_not_fit_have_no_config(change):
    sizes = dict(size=2048, attended_size=2048, hidden_size=8192, out_size=3072) | change
    assert decoder_block_config(**sizes, num_programs=132) is None
