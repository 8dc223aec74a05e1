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


def save_tiny_model(folder):
    save_checkpoint(folder, Decoder(CONFIG, rngs=nnx.Rngs(0)), CONFIG)
    save_byte_tokenizer(folder, max_length=CONFIG.max_position_embeddings)
    return folder


def run_command(checkpoint, capsys, *args):
    """Runs the command in this process: exit status, standard output, standard error."""
    status = cli.main(["--checkpoint", str(checkpoint), "--implementation", "xla", *args])
    return status, *capsys.readouterr()


def start_command(checkpoint, *args):
    """Starts the command in a process of its own."""
    command = [sys.executable, "-m", "models.generate", "--checkpoint", str(checkpoint), *args]
    # On the CPU: this process may hold the GPU's memory.
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
