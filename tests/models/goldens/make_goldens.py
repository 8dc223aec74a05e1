"""Make the golden checkpoints beside this file with Hugging Face transformers.

    python -m venv hf && hf/bin/pip install torch==2.13.0 transformers==5.23.0
    hf/bin/python tests/models/goldens/make_goldens.py

The committed ones were made with these commands on the CPU in float32, those of DeepSeek and of all
families after it with transformers 5.24.0, since earlier ones lack a factor of YaRN; MXFP4 needs
accelerate, too. Each folder has config.json;
it gets a random model and golden.npz: input_ids `i64[B, T]`, logits `f32[B, T, V]`, and
greedy_tokens `i64[B, 16]`, which follow the input_ids. `make_goldens.py FOLDER...` writes only
NAME/golden.npz here, for byte-level checkpoints that exist already
(`models/checkpoints/shakespeare`).
"""

import itertools
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

GOLDENS = Path(__file__).parent
NUM_GREEDY = 16
# llama: grouped heads wider than hidden_size, an untied head, two files, and a context short enough
# for all three bands of the scaling to matter. qwen2: biases on q, k and v; one key/value head.
# qwen3: norms on q and k, and a tied head.
# deepseek_v2: one projection of q, a dense layer before one of experts, and another eps than
# inside of attention. deepseek_v3: two projections of q, groups of experts with a bias, and YaRN.
# qwen3_moe: a dense layer between those of experts. mixtral: windows. phi3: three quarters of each
# head rotated, by the long factors of LongRoPE. olmo3, gemma2, gemma3, gpt_oss: windows of 9 tokens
# in some layers, scaled rotation in the others, caps that bend, a clamp that clamps.
# gemma4: other heads in layers that see all tokens, whose V is K, a cap, and the published tied
# head. gemma4_untied: other sizes, V apart, biases, divided frequencies.
# gpt_oss_mxfp4: the experts of gpt_oss as random blocks, which transformers dequantizes.
NAMES = ("llama", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3", "qwen3_moe", "mixtral")
NAMES += ("phi3", "olmo2", "olmo3", "gemma2", "gemma3", "gpt_oss", "gpt_oss_mxfp4")
NAMES += ("gemma4", "gemma4_untied")


class NearTie(ValueError):
    """Two tokens are as likely within rounding: another program may take the other."""


def randomize(model: PreTrainedModel) -> None:
    """Weights so large that every part of the model moves the logits."""
    generator = torch.Generator().manual_seed(0)
    for name, param in model.named_parameters():
        noise = torch.randn(param.shape, generator=generator)
        param.data = 1 + 0.3 * noise if "norm" in name else 0.2 * noise
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "layer_scalar")):
            buffer += 0.2 * torch.randn(buffer.shape, generator=generator)


def write_blocks(folder: Path) -> None:
    """Write the tensors of gpt_oss with other experts, in MXFP4."""
    generator, tensors = torch.Generator().manual_seed(7), {}
    for name, tensor in load_file(GOLDENS / "gpt_oss" / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        num_experts, columns, rows = tensor.shape
        shape, dtype = (num_experts, rows, columns // 32), torch.uint8
        blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=dtype)
        scales = torch.randint(122, 127, shape, generator=generator, dtype=dtype)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def write_golden(folder: Path, input_ids: torch.Tensor) -> None:
    """Run the model in `folder` over input_ids [B, T], and on from there greedily."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits = model(input_ids).logits
    tokens = input_ids
    for _ in range(NUM_GREEDY):
        last = model(tokens).logits[:, -1]
        best, second = last.topk(2).values.unbind(-1)
        if (best - second).min() < 1e-3:
            raise NearTie(f"{folder}: {best=} {second=}: choose other input_ids")
        tokens = torch.cat([tokens, last.argmax(-1, keepdim=True)], 1)
    golden = GOLDENS / folder.name / "golden.npz"
    golden.parent.mkdir(exist_ok=True)
    np.savez_compressed(
        golden,
        input_ids=input_ids.numpy(),
        logits=logits.numpy(),
        greedy_tokens=tokens[:, input_ids.shape[1] :].numpy(),
    )


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        write_golden(folder, torch.tensor([list(b"ROMEO:\nWhat light through yonder window")]))
    if len(sys.argv) > 1:
        return
    for name in NAMES:
        folder = GOLDENS / name
        if name.endswith("mxfp4"):
            write_blocks(folder)
        else:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
            randomize(model)
            model.save_pretrained(folder, max_shard_size="60KB" if name == "llama" else "1MB")
        for seed in itertools.count(1):
            generator = torch.Generator().manual_seed(seed)
            try:
                write_golden(folder, torch.randint(64, (2, 40), generator=generator))
                break
            except NearTie:
                continue


if __name__ == "__main__":
    main()
