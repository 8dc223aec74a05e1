"""The command `python -m models.generate` on a tiny checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from flax import nnx

from models import cli
from models.checkpoint import save_checkpoint
from models.config import ModelConfig
from models.decoder import Decoder
from models.tokenizer import save_byte_tokenizer

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
# Lines on stderr before the work and during it; others are the library's log and the summary.
PHASES = ("importing JAX ...", "loading ", "compiling ")


def save_tiny_model(folder):
    save_checkpoint(folder, Decoder(CONFIG, rngs=nnx.Rngs(0)), CONFIG)
    save_byte_tokenizer(folder, max_length=CONFIG.max_position_embeddings)
    return folder


def run_command(checkpoint, capsys, *args):
    """Run the command in this process; return exit status, stdout, and stderr without phases."""
    status = cli.main(["--checkpoint", str(checkpoint), "--implementation", "xla", *args])
    out, err = capsys.readouterr()
    return status, out, without_phases(err)


def without_phases(err):
    """Return the lines of stderr that do not report what starts now."""
    lines = err.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith((*PHASES, "pallas_paged: ")))


def start_command(*args, stdout=subprocess.PIPE, checkpoint=None):
    """Start the command in a process of its own, with a pipe for stderr."""
    command = [sys.executable, "-m", "models.generate", *map(str, args)]
    if checkpoint is not None:
        command += ["--checkpoint", str(checkpoint)]
    # On the CPU: this process may hold the GPU's memory.
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=stdout, stderr=subprocess.PIPE, text=True
    )
