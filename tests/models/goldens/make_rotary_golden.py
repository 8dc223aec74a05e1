"""Make rotary.npz beside this file: rotary embeddings of transformers.

    python -m venv hf && hf/bin/pip install torch==2.13.0 transformers==5.17.0
    hf/bin/python tests/models/goldens/make_rotary_golden.py

rotary.json has by name what a `config.json` says of rotary embeddings. "large" ones are as in
published models, whose heads have 128 dimensions; the others have 16, and contexts small enough for
all bands of the scalings to matter. rotary.npz has for each

- NAME.inv_freq.LENGTH `f32[D / 2]`, the angles per position in a sequence of LENGTH tokens,
- NAME.cos.LENGTH, NAME.sin.LENGTH `f32[P, D / 2]` of the last of these positions before LENGTH,
- NAME.logits.LENGTH `f32[2, 4, V]` of the last tokens of LENGTH, by the model in the folder llama
  with these rotary embeddings, for the sizes of that model only,

and tokens `i64[2, 96]`.
"""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

GOLDENS = Path(__file__).parent
SHORT, LONG = 24, 96
NUM_POSITIONS, NUM_LOGITS = 4, 4


@torch.no_grad()
def main() -> None:
    tokens = torch.randint(64, (2, LONG), generator=torch.Generator().manual_seed(2))
    arrays = {"tokens": tokens.numpy()}
    cases = json.loads((GOLDENS / "rotary.json").read_text(encoding="utf-8"))
    for name, case in cases.items():
        large = name.startswith("large")
        config = LlamaConfig(head_dim=128 if large else 16, **case)
        for length in (131072,) if large else (SHORT, LONG):
            rotary = LlamaRotaryEmbedding(config)
            cos, sin = rotary(torch.zeros(1), torch.arange(length)[None])
            half = rotary.inv_freq.shape[0]
            arrays[f"{name}.inv_freq.{length}"] = rotary.inv_freq.numpy()
            arrays[f"{name}.cos.{length}"] = cos[0, -NUM_POSITIONS:, :half].numpy()
            arrays[f"{name}.sin.{length}"] = sin[0, -NUM_POSITIONS:, :half].numpy()
            if not large:
                saved = AutoConfig.from_pretrained(GOLDENS / "llama").to_dict()
                saved = {key: x for key, x in saved.items() if not key.startswith("rope_")}
                merged = LlamaConfig(**saved | case)
                model = AutoModelForCausalLM.from_pretrained(
                    GOLDENS / "llama", config=merged, dtype=torch.float32
                )
                logits = model(tokens[:, :length]).logits
                arrays[f"{name}.logits.{length}"] = logits[:, -NUM_LOGITS:].numpy()
    np.savez_compressed(GOLDENS / "rotary.npz", **arrays)


if __name__ == "__main__":
    main()
