"""Trains a draft head for a checkpoint: `python -m models.train.draft_head --help`.

The head learns the probabilities of its decoder (distillation) on texts that the decoder writes
itself, so it needs no others. It learns to go on behind its own hidden states too, as in drafting:
one more of them in each of `depth` passes over a text, as in EAGLE-3 (Li et al., 2025).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from models.decoder import (
    Decoder,
    dense_attend,
    engine_config,
    engine_draft,
    engine_model,
    load_checkpoint,
)
from models.decoder.draft_head import DraftHead, head_config, is_own, save_draft_head
from models.text import Tokenizer
from models.train.state import add_options, as_options, check, clipped_adamw, option
from pallas_paged.engine import Engine, EngineConfig, SamplingParams

_LATER = 0.8  # weight of the loss of a pass, by that of the pass before
_HELD_OUT = 0.1  # of the texts
_PROMPT = 32  # tokens of a text that is held out, of the prompt that measures acceptance
_NUM_DRAFTS = 4  # and its drafts


@dataclass(frozen=True, kw_only=True)
class HeadTrainConfig:
    """Everything that, with the decoder and the prompts, decides the result of a run.

    Raises:
        ValueError: a value is out of its range.
    """

    num_texts: int = option(512, "texts that the decoder writes, at temperature 1")
    seq_len: int = option(256, "tokens of a text, prompt included")
    steps: int = option(1000, "optimizer steps")
    batch_size: int = option(4, "texts in a step")
    depth: int = option(3, "passes over a text, each behind one more hidden state of its own")
    learning_rate: float = option(1e-3, "peak, after the warm-up; decays to a tenth of it")
    warmup: int = option(50, "steps of linear warm-up")
    intermediate_size: int = option(0, "width of the MLP; 0: the decoder's")
    seed: int = option(0, "of texts, weights and batches")
    dtype: str = option("float32", "of the computation; the trained weights are float32")

    def __post_init__(self) -> None:
        check(self, "steps", "batch_size", "depth")
        if self.num_texts < 2:
            raise ValueError(f"num_texts={self.num_texts} must be at least 2: one is held out")
        if self.seq_len < 2 + self.depth:
            raise ValueError(f"seq_len={self.seq_len} must be at least depth + 2")


def write_texts(
    decoder: Decoder, prompts: Sequence[Sequence[int]], config: HeadTrainConfig
) -> np.ndarray:
    """Let the decoder write texts at temperature 1, `i32[num_texts, seq_len]`.

    Raises:
        ValueError: a prompt is longer than the texts, or a text would not fit the context.
    """
    each = [list(prompts[index % len(prompts)]) for index in range(config.num_texts)]
    if (longest := max(map(len, each))) >= config.seq_len:
        raise ValueError(f"a prompt of {longest} tokens must be below seq_len={config.seq_len}")
    params = [
        SamplingParams(
            temperature=1.0,
            max_tokens=config.seq_len - len(prompt),
            ignore_eos=True,
            seed=config.seed * config.num_texts + index,
        )
        for index, prompt in enumerate(each)
    ]
    model, weights = engine_model(decoder)
    sizes = engine_config(model, [(len(x), one) for x, one in zip(each, params, strict=True)])
    with closing(Engine(model, weights, sizes)) as engine:  # or its pool would stay for a while
        outputs = engine.generate(each, params)
    return np.array([[*x.prompt_token_ids, *x.outputs[0].token_ids] for x in outputs], np.int32)


def train_draft_head(
    decoder: Decoder, texts: np.ndarray, config: HeadTrainConfig
) -> tuple[DraftHead, list[float], float]:
    """Train a head on texts of its decoder, `i32[N, T]`; the last tenth of them is held out.

    Returns:
        The head, its weights in the dtype of the decoder's embeddings; the loss of each step, and
        that of the texts held out: divergences from the decoder in nats, of each pass with its
        weight.

    Raises:
        ValueError: there are fewer than two texts, or the run diverged, so that the loss is NaN or
            infinite.
    """
    if len(texts) < 2:
        raise ValueError(f"len(texts)={len(texts)} must be at least 2: one is held out")
    num_train = len(texts) - max(1, int(_HELD_OUT * len(texts)))
    tokens, hidden = jnp.asarray(texts), _hidden_of(decoder, texts)
    sizes = {}
    if config.intermediate_size:
        sizes["intermediate_size"] = config.intermediate_size
    head = DraftHead(
        head_config(decoder.config, **sizes), dtype=jnp.float32, rngs=nnx.Rngs(config.seed)
    )
    head.shares(decoder)
    head.norm.weight[...] = jnp.array(decoder.norm.weight[...], jnp.float32)  # a head start
    split: Any = nnx.split(head, is_own, ...)
    graphdef, own, shared = split
    optimizer = clipped_adamw(config)

    def loss_of(own: nnx.State, shared: nnx.State, tokens: Any, hidden: Any) -> jax.Array:
        parts = jax.tree.map(lambda x: x.astype(config.dtype), (own, shared, hidden))
        return head_loss(nnx.merge(graphdef, *parts[:2]), tokens, parts[2], config.depth)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(own: Any, state: Any, shared: Any, tokens: Any, hidden: Any) -> tuple[Any, Any, Any]:
        loss, grads = jax.value_and_grad(loss_of)(own, shared, tokens, hidden)
        updates, state = optimizer.update(grads, state, own)
        return optax.apply_updates(own, updates), state, loss

    state, losses = optimizer.init(own), []
    rng = np.random.default_rng(config.seed)
    with tqdm(range(config.steps), unit="step", dynamic_ncols=True) as bar:
        for _ in bar:
            index = rng.integers(num_train, size=config.batch_size)
            own, state, loss = step(own, state, shared, tokens[index], hidden[index])
            losses.append(float(loss))
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    batches = [
        jax.jit(loss_of)(own, shared, tokens[i : i + 1], hidden[i : i + 1])
        for i in range(num_train, len(texts))
    ]
    held_out = float(np.mean(batches))
    if not np.isfinite(held_out):
        raise ValueError(f"the run diverged: lower {config.learning_rate=}")
    dtype = decoder.embed_tokens.weight[...].dtype
    own = jax.tree.map(lambda x: x.astype(dtype), own)
    return nnx.merge(graphdef, own, shared), losses, held_out


def head_loss(head: DraftHead, tokens: jax.Array, hidden: jax.Array, depth: int) -> jax.Array:
    """Mean divergence of a head from its decoder, in nats, summed over passes by their weights.

    Args:
        head: with its weights.
        tokens: `i32[B, T]`.
        hidden: `[B, T, E]`, of the decoder.
        depth: passes. In the first the head has the decoder's hidden states before each token; in
            the others its own of the pass before, and the decoder's before those.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    target = jax.nn.log_softmax(head.logits(hidden))
    total, before = jnp.float32(0), hidden
    cache: Any = ((),)  # of its one layer: K and V of each pass
    for index in range(depth):
        before = jnp.pad(before, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        before, cache = head.draft(tokens, positions, before, _attend_as_drafts, cache)
        logprobs = jax.nn.log_softmax(head.logits(before))
        divergence = jnp.sum(jnp.exp(target) * (target - logprobs), axis=-1)
        total += _LATER**index * jnp.mean(divergence[:, index:])
    return total


def _attend_as_drafts(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: Any, **options: Any
) -> tuple[jax.Array, Any]:
    """Attend as token t of each row `[B, T, H, D]` does where it is a draft.

    Before it are as many drafts as `cache` has K and V of earlier passes. It sees the K of pass 0
    up to t less these, and one of each later pass: of pass 1 at the next token, and so on.
    """
    stored = (*cache, (k, v))
    (first_k, first_v), later = stored[0], stored[:0:-1]
    shape = *q.shape[:2], k.shape[2], -1, q.shape[3]
    heads = q.reshape(shape) * q.shape[3] ** -0.5
    how: Any = dict(preferred_element_type=jnp.float32)
    logits = jnp.einsum("bthgd,bshd->bthgs", heads, first_k, **how)
    place = jnp.arange(q.shape[1])
    is_seen = place[:, None] - place >= len(later)
    logits = jnp.where(is_seen[:, None, None], logits, -jnp.inf)
    own = [(jnp.roll(x, i, axis=1), jnp.roll(y, i, axis=1)) for i, (x, y) in enumerate(later)]
    drafts = [jnp.einsum("bthgd,bthd->bthg", heads, x, **how)[..., None] for x, _ in own]
    weights = jax.nn.softmax(jnp.concatenate([logits, *drafts], axis=-1)).astype(v.dtype)
    out = jnp.einsum("bthgs,bshd->bthgd", weights[..., : q.shape[1]], first_v)
    for index, (_, y) in enumerate(own, q.shape[1]):
        out += weights[..., index, None] * y[:, :, :, None]
    return out.reshape(q.shape), stored


def acceptance(
    decoder: Decoder, head: DraftHead, prompts: Sequence[Sequence[int]], **params: Any
) -> tuple[list[float], float]:
    """Measure a head in the engine, with drafts in each step.

    Args:
        decoder, head: with their weights.
        prompts: token ids.
        params: of `SamplingParams`.

    Returns:
        The share of drafts that were right, by place, and the tokens of a step and row.
    """
    (model, weights), (drafting, draft_weights) = engine_model(decoder), engine_draft(head)
    method = dict(
        method="eagle", model=drafting, num_speculative_tokens=_NUM_DRAFTS, adaptive=False
    )
    config = EngineConfig(max_num_seqs=min(16, len(prompts)), speculative_config=method)
    with closing(Engine(model, weights, config, draft_params=draft_weights)) as engine:
        engine.generate(prompts, SamplingParams(**params), progress=False)
        stats = engine.stats()
    num_drafts = max(1, stats.spec_decode_num_drafts)
    each = [x / num_drafts for x in stats.spec_decode_num_accepted_tokens_per_pos]
    return each, 1 + sum(each)


def _hidden_of(decoder: Decoder, texts: np.ndarray) -> jax.Array:
    """The decoder's hidden states of texts, `[N, T, E]`."""
    graphdef, params = nnx.split(decoder)

    @jax.jit
    def run(params: nnx.State, tokens: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return nnx.merge(graphdef, params)(tokens, positions, dense_attend())[0]

    return jnp.concatenate([run(params, jnp.asarray(row[None])) for row in texts])


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m models.train.draft_head",
        description="Train a draft head for a checkpoint, on texts that it writes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="folder of the decoder")
    add("--out", type=Path, required=True, help="folder of the head")
    add("--prompts", type=Path, help="file with a prompt a line; none: texts begin a new line")
    add_options(parser, HeadTrainConfig)
    args = vars(parser.parse_args(argv))
    checkpoint, out, prompts = (args.pop(name) for name in ("checkpoint", "out", "prompts"))
    try:
        config = HeadTrainConfig(**args)
        if out.resolve() == checkpoint.resolve():
            raise ValueError(f"--out {out} must not be --checkpoint, which the head would replace")
        lines = ["\n"] if prompts is None else prompts.read_text(encoding="utf-8").splitlines()
        decoder, tokenizer = load_checkpoint(checkpoint)[0], Tokenizer(checkpoint)
        encoded = [x for line in lines if (x := tokenizer.encode(line))]
        if not encoded:
            raise ValueError(f"{prompts} has no prompt: every line is blank")
        out.mkdir(parents=True, exist_ok=True)  # an error before the training
        texts = write_texts(decoder, encoded, config)
        head, _, loss = train_draft_head(decoder, texts, config)
        save_draft_head(out, head)
        held_out = texts[-max(1, int(_HELD_OUT * len(texts))) :]
        starts = held_out[:, : min(_PROMPT, config.seq_len // 2)].tolist()
        lines = [f"divergence on texts held out: {loss:.4f} nats, over {config.depth} passes"]
        for temperature in (0.0, 0.8):
            how: dict[str, Any] = dict(temperature=temperature, ignore_eos=True, seed=1)
            each, per_step = acceptance(
                decoder, head, starts, max_tokens=config.seq_len // 2, **how
            )
            shares = ", ".join(f"{x:.0%}" for x in each)
            lines.append(f"temperature {temperature}: right {shares}; {per_step:.2f} tokens a step")
        _write_card(out, checkpoint, config, lines)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(*lines, f"saved in {out}", sep="\n")
    return 0


def _write_card(out: Path, checkpoint: Path, config: HeadTrainConfig, lines: list[str]) -> None:
    facts = "\n".join(f"- {line}" for line in lines)
    card = f"""# A draft head for the checkpoint `{checkpoint.name}`

For `--speculative-config '{{"method": "eagle", "model": FOLDER, "num_speculative_tokens": 4}}'`.
Trained on texts of the checkpoint itself. Drafts that were right, by their place in a step:

{facts}

```sh
python -m models.train.draft_head --checkpoint CHECKPOINT --out FOLDER {as_options(config)}
```
"""
    (out / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
