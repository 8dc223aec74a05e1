"""The command `python -m models.generate` on a tiny checkpoint."""

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from flax import nnx

from models.command import main
from models.decoder import Decoder, ModelConfig, save_checkpoint
from models.text import save_byte_tokenizer
from pallas_paged.engine.sampling_params import MAX_LOGPROBS, SamplingMode
from tests.support.engine_calls import make_engine

ROOT = Path(__file__).parents[2]
CONFIG = ModelConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_q_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
# Every number of slots, tokens or pages has programs of its own. 4 full contexts have 16 pages.
SIZES = ["--max-num-seqs=4", "--max-num-batched-tokens=32", "--num-pages=12", "--max-model-len=64"]
# Lines on stderr before the work and during it; others are the library's log and the summary.
PHASES = ("importing JAX ...", "loading ", "compiling ")


def save_tiny_model(folder):
    save_checkpoint(folder, Decoder(CONFIG, rngs=nnx.Rngs(0)), CONFIG)
    save_byte_tokenizer(folder, max_length=CONFIG.max_position_embeddings)
    return folder


def engine_for_any_request(model, weights, *, config, tokenizer=None, draft_params=None):
    """An engine whose steps serve what the tests ask for: those of equal sizes share two programs.

    Filters and penalties are in `tests/engine`.
    """
    sizes = {field.name: getattr(config, field.name) for field in fields(config)}
    mode = SamplingMode(draws=True, processors=True, logprobs=MAX_LOGPROBS)
    options = dict(modes=[mode], draft_params=draft_params)
    return make_engine(model, weights, tokenizer, **options, **sizes)


def run_command(checkpoint, capsys, *args):
    """Run the command in this process; return exit status, stdout, and stderr without phases."""
    status = main.main(["--checkpoint", str(checkpoint), "--implementation", "xla", *args])
    out, err = capsys.readouterr()
    lines = err.splitlines(keepends=True)
    kept = (line for line in lines if not line.startswith((*PHASES, "pallas_paged: ")))
    return status, out, "".join(kept)


def start_command(*args, **streams):
    """Start the command in a process of its own, with a pipe for stderr and, if not given, stdout.

    It runs on the CPU: this process may hold the GPU's memory.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "models.generate", *map(str, args)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "TERM": "dumb"},
        **dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) | streams,
    )
