"""Families of checkpoints, also of latents, on several devices: tokens, shares of the weights."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import PartitionSpec

from models.decoder import engine_model, load_checkpoint, repeat_kv_heads
from models.decoder.sharding import config_on
from pallas_paged.engine import Engine, EngineConfig, SamplingParams
from tests.support.checkpoints import assert_is_placed, recorded_reads
from tests.support.devices import mesh
from tests.support.engine_calls import MODES, PROMPTS, greedy, make_engine, serve, tokens_of
from tests.support.latent_model import LatentModel, greedy_tokens
from tests.support.marks import slow

pytestmark = pytest.mark.usefixtures("exact_products")
GOLDENS = Path(__file__).parents[1] / "models" / "goldens"
NAMES = ["olmo3", "gemma4"]
OTHERS = ["gpt_oss", "qwen3_moe", "mixtral", "phi3", "olmo2", "gemma2", "gemma3", "gpt_oss_mxfp4"]
OTHERS += ["gemma4_untied"]
LATENT = ["deepseek_v2", "deepseek_v3"]


@pytest.mark.cpu_budget(8)  # compiles on a mesh
@pytest.mark.parametrize("name", ["gemma4", *slow(["olmo3", *LATENT, *OTHERS])])
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


@pytest.mark.slow  # its shorter form is the checkpoint below
@pytest.mark.parametrize("num_devices", [2, 4])
def test_heads_are_sharded_and_latents_replicated_with_the_tokens_of_one_device(num_devices):
    mesh(num_devices)  # skips where there are fewer
    model = LatentModel()
    params = model.init(0)
    engine = make_engine(model, params, modes=MODES[:1], tensor_parallel_size=num_devices)
    pool = engine.replicas[0].runner.executor.state.pool
    assert pool.layers[0].k_pages.shape == (16, 4, 1, 24)
    assert pool.layers[0].k_pages.sharding.is_fully_replicated
    expected = [greedy_tokens(params, prompt, 6) for prompt in PROMPTS]
    assert tokens_of(serve(engine, PROMPTS, greedy(max_tokens=6))) == expected
    requests = serve(engine, PROMPTS[4:], greedy(max_tokens=6))
    assert requests[0].num_cached_tokens == 16 and tokens_of(requests) == expected[4:]


@pytest.mark.parametrize("name", LATENT)
def test_a_device_reads_its_heads_and_experts_with_the_same_bits(name):
    there = mesh(2)
    with recorded_reads() as shares:
        decoder, config = load_checkpoint(GOLDENS / name, mesh=there)
    alone, config_alone = load_checkpoint(GOLDENS / name)
    assert repeat_kv_heads(alone, 2) is alone
    assert config == decoder.config == config_alone
    for key, parts in shares.items():
        replicated = "norm" in key or "_a_proj" in key or ".gate." in key
        if replicated or ".experts." in key:  # or on one of the devices
            assert parts == [1]
        else:  # K and V of kv_b_proj are two parameters
            assert parts == [0.5] * (4 if "kv_b_proj" in key else 2)
    assert_is_placed(decoder, alone, there)
    experts = decoder.layers[1].mlp.experts
    assert experts.gate_up_proj.weight[...].sharding.spec == PartitionSpec("tensor")
    assert experts.down_proj.weight[...].sharding.spec == PartitionSpec("tensor")


def test_devices_that_cannot_share_heads_or_experts_are_refused():
    _, config = load_checkpoint(GOLDENS / "deepseek_v3")
    with pytest.raises(ValueError, match="num_q_heads=4 must be a multiple of num_devices=3"):
        config_on(config, 3)
    experts = replace(config.experts, n_routed_experts=15, n_group=1, topk_group=1)
    with pytest.raises(ValueError, match="n_routed_experts=15 and the 8 features of shared"):
        config_on(replace(config, experts=experts), 2)
