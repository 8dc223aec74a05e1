"""The state of a training run: its options, weights and optimizer, kept in one file."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors import SafetensorError, safe_open

from models.decoder import Decoder, ModelConfig
from models.decoder.tensor_file import save_tensors


def option(default: Any, text: str) -> Any:
    """Return a field that is an option of a command, with its help."""
    return field(default=default, metadata={"help": text})


def add_options(parser: argparse.ArgumentParser, config: type[Any]) -> None:
    """Add the options that are fields of a dataclass."""
    for one in fields(config):
        name, default = f"--{one.name.replace('_', '-')}", one.default
        parser.add_argument(name, type=type(default), default=default, help=one.metadata["help"])


def as_options(config: Any) -> str:
    """Return the options of a command that give this config."""
    return " ".join(f"--{k.replace('_', '-')} {v}" for k, v in asdict(config).items())


def check(config: Any, *positive: str) -> None:
    """Raise ValueError unless these fields are positive, and rate, warm-up and dtype possible."""
    for name in positive:
        if getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)} must be positive")
    if not 0.0 < config.learning_rate < np.inf:
        raise ValueError(f"learning_rate={config.learning_rate} must be positive and finite")
    if not 0 <= config.warmup < config.steps:
        raise ValueError(f"warmup={config.warmup} must be in [0, steps={config.steps})")
    if config.dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype={config.dtype!r} must be float32 or bfloat16")


def clipped_adamw(config: Any, **options: Any) -> optax.GradientTransformation:
    """AdamW under the cosine schedule of a run, gradients clipped to norm 1."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, config.warmup, config.steps, config.learning_rate / 10
    )
    adamw = optax.adamw(schedule, b2=0.99, **options)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that, with the text, decides the result of a run."""

    steps: int = option(2000, "optimizer steps")
    batch_size: int = option(32, "windows of the text in a step")
    seq_len: int = option(1024, "bytes in a window")
    hidden_size: int = option(256, "width of the model")
    num_layers: int = option(4, "decoder layers")
    intermediate_size: int = option(1024, "width of the MLP")
    num_q_heads: int = option(4, "query heads")
    num_kv_heads: int = option(2, "key/value heads")
    head_dim: int = option(64, "width of a head")
    learning_rate: float = option(1e-3, "peak, after the warm-up; decays to a tenth of it")
    warmup: int = option(100, "steps of linear warm-up")
    weight_decay: float = option(0.3, "of matrices; norms have none")
    dropout: float = option(0.3, "on the embeddings and each residual branch")
    ema: float = option(0.995, "decay of the averaged weights, which are the ones saved")
    seed: int = option(0, "of weights, batches and dropout")
    eval_every: int = option(100, "steps between validations, each of which may save")
    dtype: str = option("bfloat16", "of the computation; the trained weights are float32")

    def __post_init__(self) -> None:
        check(self, "steps", "batch_size", "seq_len", "eval_every")
        for name in ("dropout", "ema"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1)")
        if not 0.0 <= self.weight_decay < np.inf:
            raise ValueError(f"weight_decay={self.weight_decay} must be finite, and at least 0")

    def model_config(self) -> ModelConfig:
        """The byte-level Llama to train."""
        return ModelConfig(
            vocab_size=256,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=1e-5,
            max_position_embeddings=self.seq_len,
            tie_word_embeddings=True,
        )

    def optimizer(self) -> optax.GradientTransformation:
        """`clipped_adamw`, with weight decay of matrices."""

        def is_matrix(params: nnx.State) -> Any:
            return jax.tree.map(lambda x: x.ndim > 1, params)

        return clipped_adamw(self, weight_decay=self.weight_decay, mask=is_matrix)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class TrainState:
    """All that a run carries from one step to the next."""

    step: jax.Array  # i32[]
    params: nnx.State  # f32
    average: nnx.State  # f32, the exponential moving average of params
    opt_state: optax.OptState
    best_loss: jax.Array  # f32[], lowest validation loss so far


def create_train_state(config: TrainConfig) -> tuple[nnx.GraphDef, TrainState]:
    """Random weights and empty optimizer state."""
    model = Decoder(config.model_config(), rngs=nnx.Rngs(config.seed))
    graphdef, params = nnx.split(model)
    state = TrainState(
        step=jnp.int32(0),
        params=params,
        average=jax.tree.map(jnp.copy, params),
        opt_state=config.optimizer().init(params),
        best_loss=jnp.float32(jnp.inf),
    )
    return graphdef, state


def save_state(path: Path, state: TrainState, run: dict[str, Any]) -> None:
    """Write the state of a run in one move, together with what identifies the run."""
    leaves = {
        jax.tree_util.keystr(key): np.asarray(leaf)
        for key, leaf in jax.tree_util.tree_flatten_with_path(state)[0]
    }
    save_tensors(path, leaves, {"run": json.dumps(run)})


def load_state(path: Path, like: TrainState, run: dict[str, Any]) -> TrainState:
    """Read the state of the same run back.

    Raises:
        ValueError: if there is none, it is damaged, or it belongs to a run with other options or
            text.
    """
    if not path.is_file():
        raise ValueError(f"nothing to resume: {path} does not exist")
    try:
        with safe_open(path, framework="numpy") as saved:
            found = json.loads((saved.metadata() or {}).get("run", "{}"))
            changed = [
                f"{key}={found.get(key)} there, {run[key]} here"
                for key in run
                if found.get(key) != run[key]
            ]
            if changed:
                raise ValueError(f"{path} is of another run: {'; '.join(changed)}")
            leaves, structure = jax.tree_util.tree_flatten_with_path(like)
            keys = [jax.tree_util.keystr(key) for key, _ in leaves]
            values = [jnp.asarray(saved.get_tensor(key)) for key in keys]
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return jax.tree.unflatten(structure, values)
