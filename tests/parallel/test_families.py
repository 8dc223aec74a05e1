"""Families of checkpoints on several devices: tokens, and shares of the weights."""

from pathlib import Path

import numpy as np
import pytest

from models.decoder import engine_model, load_checkpoint, repeat_kv_heads
from pallas_paged.engine import Engine, EngineConfig, SamplingParams
from tests.support.checkpoints import assert_is_placed, recorded_reads
from tests.support.devices import mesh
from tests.support.marks import slow

pytestmark = pytest.mark.usefixtures("exact_products")
GOLDENS = Path(__file__).parents[1] / "models" / "goldens"
NAMES = ["olmo3", "gemma4"]
OTHERS = ["gpt_oss", "qwen3_moe", "mixtral", "phi3", "olmo2", "gemma2", "gemma3", "gpt_oss_mxfp4"]
OTHERS += ["gemma4_untied"]


@pytest.mark.cpu_budget(8)  # compiles on a mesh
@pytest.mark.parametrize(
    "name",  # test_latents.py has latents on a mesh
    ["gemma4", *slow(["olmo3", "deepseek_v2", "deepseek_v3", *OTHERS])],
)
def test_a_checkpoint_on_two_devices_gives_the_tokens_of_transformers(name):
    decoder, _ = load_checkpoint(GOLDENS / name, mesh=mesh(2))
    with np.load(GOLDENS / name / "golden.npz") as golden:
        prompts, expected = golden["input_ids"].tolist(), golden["greedy_tokens"].tolist()
    sizes = dict(num_pages=40, page_size=4, max_num_seqs=2, max_num_batched_tokens=8)
    config = EngineConfig(**sizes, tensor_parallel_size=2, num_scheduler_steps=1)
    engine = Engine(*engine_model(decoder), config)
    params = SamplingParams(max_tokens=len(expected[0]), temperature=0)
    outputs = engine.generate(prompts, params, progress=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_devices_read_their_shares_with_the_bits_of_one_device(name):
    """On four devices each of the two KV heads is there twice."""
    there = mesh(4)
    decoder, config = load_checkpoint(GOLDENS / name, mesh=there)
    alone = repeat_kv_heads(load_checkpoint(GOLDENS / name)[0], 4)
    assert config == decoder.config == alone.config and config.num_kv_heads == 4
    assert_is_placed(decoder, alone, there)


def test_a_device_reads_its_rows_of_fused_tensors():
    with recorded_reads() as shares:
        load_checkpoint(GOLDENS / "phi3", mesh=mesh(2))
    qkv = shares["model.layers.0.self_attn.qkv_proj.weight"]
    assert qkv == [0.5] * 6  # of each of q, k and v
    assert shares["model.layers.0.mlp.gate_up_proj.weight"] == [0.5] * 4
