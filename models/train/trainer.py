"""Trains the byte-level demo model.

The first 90% of the text is trained on, the last 10% validates. Batches depend on (seed, step)
alone, so an interrupted run continues with `--resume` as if it had never stopped: bit for bit
where kernels are deterministic (on a GPU: XLA_FLAGS=--xla_gpu_deterministic_ops=true).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from tqdm import tqdm

from models.decoder import dense_attend, load_checkpoint, save_checkpoint
from models.decoder.modules import Dropout, identity
from models.text import save_byte_tokenizer
from models.train.state import (
    TrainConfig,
    TrainState,
    as_options,
    create_train_state,
    load_state,
    save_state,
)

STATE_FILE = "train_state.safetensors"
_STEPS_PER_CALL = 25  # between two updates of the progress bar


@partial(jax.jit, static_argnames=("graphdef", "config"), donate_argnames="state")
def train_steps(
    state: TrainState,
    text: jax.Array,
    stop: jax.Array,
    *,
    graphdef: nnx.GraphDef,
    config: TrainConfig,
) -> tuple[TrainState, jax.Array]:
    """Train on text u8[num_bytes] up to step `stop` i32[]; the state is donated.

    `stop` is traced, so that one compilation serves calls of any number of steps.

    Returns:
        The state at `stop`, and f32[], the mean loss of these steps.
    """
    optimizer = config.optimizer()

    def loss_of(params: nnx.State, tokens: jax.Array, key: jax.Array) -> jax.Array:
        losses = _losses(graphdef, params, tokens, config.dtype, _dropout(key, config.dropout))
        return losses.mean()

    def step(index: jax.Array, carry: tuple[TrainState, jax.Array]) -> tuple[Any, jax.Array]:
        state, total = carry
        batch_key, dropout_key = jax.random.split(
            jax.random.fold_in(jax.random.key(config.seed), index)
        )
        starts = jax.random.randint(
            batch_key, (config.batch_size, 1), 0, text.size - config.seq_len
        )
        tokens = text[starts + jnp.arange(config.seq_len + 1)].astype(jnp.int32)  # [B, T + 1]
        loss, grads = jax.value_and_grad(loss_of)(state.params, tokens, dropout_key)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        # A young average forgets faster, or it would remember the random start.
        decay = jnp.minimum(config.ema, (1.0 + index) / (10.0 + index))
        average = optax.incremental_update(params, state.average, 1.0 - decay)
        state = dataclasses.replace(
            state, step=index + 1, params=params, average=average, opt_state=opt_state
        )
        return state, total + loss

    start = state.step
    state, total = lax.fori_loop(start, stop, step, (state, jnp.float32(0)))
    return state, total / (stop - start)


@partial(jax.jit, static_argnames=("graphdef", "dtype"))
def validation_loss(
    params: nnx.State, windows: jax.Array, counts: jax.Array, *, graphdef: nnx.GraphDef, dtype: str
) -> jax.Array:
    """Mean loss over all bytes of a split, in nats per byte.

    Args:
        params: weights of any float dtype, rounded to bf16 as a saved checkpoint has them.
        windows, counts: from `split_windows`.
        graphdef: of the model.
        dtype: of the computation.
    """
    params = _cast(params, jnp.bfloat16)

    def batch(args: tuple[jax.Array, jax.Array]) -> jax.Array:
        tokens, count = args
        return jnp.sum(_losses(graphdef, params, tokens, dtype, identity) * count)

    return jnp.sum(lax.map(batch, (windows, counts))) / jnp.sum(counts)


def split_windows(text: np.ndarray, seq_len: int, batch_size: int) -> tuple[jax.Array, jax.Array]:
    """Cut a split into windows that do not overlap, so that each byte is predicted once.

    Args:
        text: u8[num_bytes]; all but the first byte are predicted.
        seq_len: bytes predicted in a window.
        batch_size: windows in a batch.

    Returns:
        windows i32[N, B, T + 1], each starting with the last byte of the one before, padded
        with 0; counts f32[N, B, T], 1 where a byte is to be predicted.
    """
    num_targets = text.size - 1
    num_windows = -(-num_targets // seq_len)
    num_batches = -(-num_windows // batch_size)
    size = num_batches * batch_size * seq_len
    padded = np.zeros(size + 1, np.int32)
    padded[: text.size] = text
    starts = np.arange(0, size, seq_len)[:, None]
    windows = padded[starts + np.arange(seq_len + 1)]
    counts = (np.arange(size) < num_targets).astype(np.float32)
    shape = (num_batches, batch_size)
    return jnp.asarray(windows.reshape(*shape, -1)), jnp.asarray(counts.reshape(*shape, -1))


def train(
    config: TrainConfig, text: bytes, out: Path, *, resume: bool = False, about: str = ""
) -> float:
    """Train, keeping the best weights by validation loss in `out`.

    Args:
        config: of the run.
        text: what to learn.
        out: folder for the checkpoint in Hugging Face format and, while training, the state.
        resume: go on from the state in `out`.
        about: where the text comes from, for the model card.

    Returns:
        Validation loss of the saved bf16 weights, read back, in nats per byte.

    Raises:
        ValueError: for a text too short for the windows, or nothing to resume.
    """
    data = np.frombuffer(text, np.uint8)
    num_train = data.size * 9 // 10
    num_validation, seq_len = data.size - num_train, config.seq_len
    if num_train <= seq_len or num_validation < 2:
        raise ValueError(f"a text of {data.size} bytes is too short for {seq_len=}")
    train_text = jnp.asarray(data[:num_train])
    windows, counts = split_windows(data[num_train:], seq_len, config.batch_size)

    graphdef, state = create_train_state(config)
    run = dataclasses.asdict(config) | {"sha256": hashlib.sha256(text).hexdigest()}
    state_path = out / STATE_FILE
    if resume:
        state = load_state(state_path, state, run)
    out.mkdir(parents=True, exist_ok=True)
    save_byte_tokenizer(out, max_length=config.model_config().max_position_embeddings)

    step = int(state.step)
    with tqdm(total=config.steps, initial=step, unit="step", dynamic_ncols=True) as bar:
        while step < config.steps:
            next_eval = min((step // config.eval_every + 1) * config.eval_every, config.steps)
            stop = min(step + _STEPS_PER_CALL, next_eval)
            state, loss = train_steps(
                state, train_text, jnp.int32(stop), graphdef=graphdef, config=config
            )
            bar.set_postfix(loss=f"{loss:.3f}", best=f"{state.best_loss:.4f}", refresh=False)
            bar.update(stop - step)
            step = stop
            if step == next_eval:
                loss = validation_loss(
                    state.average, windows, counts, graphdef=graphdef, dtype=config.dtype
                )
                if loss < state.best_loss:
                    state = dataclasses.replace(state, best_loss=loss)
                    model = nnx.merge(graphdef, _cast(state.average, jnp.bfloat16))
                    save_checkpoint(out, model, config.model_config())
                bar.write(f"step {step}: validation loss {loss:.4f} nats per byte", sys.stderr)
                save_state(state_path, state, run)

    if not jnp.isfinite(state.best_loss):
        raise ValueError(f"the run diverged: lower {config.learning_rate=}")
    params = nnx.state(load_checkpoint(out)[0])
    loss = float(validation_loss(params, windows, counts, graphdef=graphdef, dtype=config.dtype))
    num_params = sum(x.size for x in jax.tree.leaves(params))
    _write_card(out, config, data, num_params, loss, about)
    state_path.unlink()
    return loss


def _losses(
    graphdef: nnx.GraphDef, params: nnx.State, tokens: jax.Array, dtype: str, dropout: Dropout
) -> jax.Array:
    """Cross entropy of each next token: tokens i32[B, T + 1] to f32[B, T]."""
    model = nnx.merge(graphdef, _cast(params, dtype))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
    hidden, _ = model(inputs, positions, dense_attend(), dropout=dropout)
    return optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), targets)


def _dropout(key: jax.Array, rate: float) -> Dropout:
    if rate == 0.0:
        return identity
    places = itertools.count()

    def dropout(x: jax.Array) -> jax.Array:
        keep = jax.random.bernoulli(jax.random.fold_in(key, next(places)), 1.0 - rate, x.shape)
        return jnp.where(keep, x / (1.0 - rate), 0.0).astype(x.dtype)

    return dropout


def _cast(params: nnx.State, dtype: Any) -> nnx.State:
    return jax.tree.map(lambda x: x.astype(dtype), params)


def _write_card(
    out: Path, config: TrainConfig, text: np.ndarray, num_params: int, loss: float, about: str
) -> None:
    sha256 = hashlib.sha256(text.tobytes()).hexdigest()
    card = f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# A byte-level Llama of {num_params:,} parameters

Each token is one byte of UTF-8, its id the value of the byte. The folder loads as a
`LlamaForCausalLM`. The weights are bf16 and licensed under Apache-2.0.

Validation loss: **{loss:.4f} nats per byte**, of these bf16 weights as saved and read back, over
the whole validation split in windows of {config.seq_len} bytes that do not overlap.

Text: {about or "unnamed"}, {text.size:,} bytes, sha256 `{sha256}`;
the first 90% trained, the last 10% validated.

Command (computing in {config.dtype}):

```sh
python -m models.train --text FILE --out DIR {as_options(config)}
```
"""
    (out / "README.md").write_text(card, encoding="utf-8")
