"""Latent attention and experts on several devices: tokens, shares of checkpoints, sizes."""

from dataclasses import replace
from pathlib import Path

import pytest
from jax.sharding import PartitionSpec

from models.decoder import load_checkpoint, repeat_kv_heads
from models.decoder.sharding import config_on
from tests.support.checkpoints import assert_is_placed, recorded_reads
from tests.support.devices import mesh
from tests.support.engine_calls import MODES, PROMPTS, greedy, make_engine, serve, tokens_of
from tests.support.latent_model import LatentModel, greedy_tokens

pytestmark = pytest.mark.usefixtures("exact_products")
GOLDENS = Path(__file__).parents[1] / "models" / "goldens"


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


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
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
