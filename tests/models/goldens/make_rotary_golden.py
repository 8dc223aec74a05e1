"""Make rotary.npz and rotary.json beside this file: rotary embeddings of transformers.

    python -m venv hf && hf/bin/pip install torch==2.13.0 transformers==5.17.0
    hf/bin/python tests/models/goldens/make_rotary_golden.py

rotary.json has by name what a `config.json` says of rotary embeddings. rotary.npz has for each

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
# D = 16, a base and contexts small enough for all bands of the scalings to matter.
SHORT, LONG = 24, 96
TINY = {"max_position_embeddings": 32, "rope_theta": 500.0}
DIVISORS = {
    "short_factor": [1.0, 1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0],
    "long_factor": [1.0, 1.1, 1.5, 2.0, 4.0, 6.0, 7.5, 8.0],
}
TINY_CASES = {
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.3}},
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    "yarn_of_transformers_5": {
        "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 800.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 4,
            "beta_slow": 0.5,
            "mscale": 0.8,
            "mscale_all_dim": 0.4,
            "truncate": False,
        },
    },
    "yarn_with_attention_factor": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 3.0,
            "original_max_position_embeddings": 16,
            "attention_factor": 1.3,
            "mscale": 0.8,
            "mscale_all_dim": 0.4,
        },
    },
    "longrope": {
        "max_position_embeddings": 128,
        "rope_scaling": {
            "rope_type": "longrope",
            "factor": 3.0,
            "original_max_position_embeddings": 32,
            **DIVISORS,
        },
    },
    "longrope_beside": {  # the original context is beside the scaling, and gives the factor
        "max_position_embeddings": 128,
        "original_max_position_embeddings": 32,
        "rope_scaling": {"type": "longrope", **DIVISORS},
    },
    "llama3": {
        "max_position_embeddings": 256,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 6.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
}
# As in published models, whose heads have 128 dimensions.
LARGE_CASES = {
    "large_plain": {"max_position_embeddings": 131072, "rope_theta": 1e6},
    "large_yarn": {  # Qwen 2.5 with 128k positions
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    },
    "large_llama3": {
        "max_position_embeddings": 131072,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}
NUM_POSITIONS, NUM_LOGITS = 4, 4


@torch.no_grad()
def main() -> None:
    tokens = torch.randint(64, (2, LONG), generator=torch.Generator().manual_seed(2))
    arrays = {"tokens": tokens.numpy()}
    cases = {name: TINY | case for name, case in TINY_CASES.items()} | LARGE_CASES
    del cases["yarn_of_transformers_5"]["rope_theta"]  # it is in the parameters
    for name, case in cases.items():
        config = LlamaConfig(head_dim=16 if name in TINY_CASES else 128, **case)
        for length in (SHORT, LONG) if name in TINY_CASES else (131072,):
            rotary = LlamaRotaryEmbedding(config)
            cos, sin = rotary(torch.zeros(1), torch.arange(length)[None])
            half = rotary.inv_freq.shape[0]
            arrays[f"{name}.inv_freq.{length}"] = rotary.inv_freq.numpy()
            arrays[f"{name}.cos.{length}"] = cos[0, -NUM_POSITIONS:, :half].numpy()
            arrays[f"{name}.sin.{length}"] = sin[0, -NUM_POSITIONS:, :half].numpy()
            if name in TINY_CASES:
                saved = AutoConfig.from_pretrained(GOLDENS / "llama").to_dict()
                saved = {key: x for key, x in saved.items() if not key.startswith("rope_")}
                merged = LlamaConfig(**saved | case)
                model = AutoModelForCausalLM.from_pretrained(
                    GOLDENS / "llama", config=merged, dtype=torch.float32
                )
                logits = model(tokens[:, :length]).logits
                arrays[f"{name}.logits.{length}"] = logits[:, -NUM_LOGITS:].numpy()
    np.savez_compressed(GOLDENS / "rotary.npz", **arrays)
    text = json.dumps(cases, indent=1) + "\n"
    (GOLDENS / "rotary.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
