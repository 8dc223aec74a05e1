"""The engine on a mesh: token for token what it gives on one device."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_paged.engine import Engine, EngineConfig
from pallas_paged.engine.sampler import SamplingMode
from tests.support.devices import mesh
from tests.support.engine_calls import (
    MANY_PAGES,
    PROMPTS,
    WIDE,
    assert_every_page_is_free,
    greedy,
    make_engine,
    reasons_of,
    run,
    sample_as,
    sampling,
    serve,
    step,
    steps_of,
    submit,
    tokens_of,
    weights,
)
from tests.support.marks import slow

pytestmark = pytest.mark.usefixtures("exact_products")
# What requests may ask for: samples are forks, beams are forks too, filters sort.
LOADS = [
    greedy(),
    sampling(n=2, seed=3),
    greedy(beam_width=2, max_tokens=6),
    sampling(top_k=5, logprobs=2, seed=4),
    greedy(presence_penalty=1.0, repetition_penalty=1.2),
]
NEW = weights(WIDE, seed=2)


def mesh_engine(num_devices: int, model: Any = WIDE, **sizes) -> Engine:
    mesh(num_devices)  # skips where there are fewer
    return make_engine(model, weights(model), **dict(tensor_parallel=num_devices) | sizes)


@pytest.fixture(scope="module")
def alone() -> list[list[list[int]]]:
    """What PROMPTS get on one device for each of LOADS."""
    return [
        tokens_of(serve(sample_as(make_engine(WIDE, weights(WIDE)), LOADS), [prompt], load)[0:1])
        for prompt, load in zip(PROMPTS, LOADS, strict=True)
    ]


@pytest.fixture(scope="module")
def new_tokens() -> list[list[int]]:
    return tokens_of(serve(make_engine(WIDE, NEW), PROMPTS, greedy()))


@pytest.mark.parametrize("num_devices", [8, *slow([2, 4])])
def test_every_kind_of_request_gets_the_tokens_of_one_device(alone, num_devices):
    """On 8 devices each of the 4 KV heads is in the pool twice."""
    engine = mesh_engine(num_devices, num_pages=13, watermark=0.0)
    steps_of(sample_as(engine, LOADS), 4)
    requests = serve(engine, PROMPTS, LOADS)
    assert [tokens_of([request]) for request in requests] == alone
    assert engine.stats().num_preemptions > 0
    for _ in range(2):
        (request,) = serve(engine, PROMPTS[4:], LOADS[4])
        assert tokens_of([request]) == alone[4]
    assert request.num_cached_tokens > 0
    assert_every_page_is_free(engine)


@pytest.mark.parametrize("num_devices", [8, *slow([2])])
def test_weights_and_pools_are_replaced_on_a_mesh(new_tokens, num_devices):
    engine = mesh_engine(num_devices)
    requests = submit(engine, PROMPTS, greedy())
    for _ in range(3):
        step(engine)
    pool = jax.tree.leaves(engine.replicas[0].runner.executor.state.pool)
    engine.sleep()
    assert all(leaf.is_deleted() for leaf in pool)
    engine.update_params(jax.tree.map(np.asarray, NEW), restart_running=True)
    engine.wake()
    run(engine)
    assert tokens_of(requests) == new_tokens
    scores = engine.score(PROMPTS, new_tokens)
    wanted = make_engine(WIDE, NEW).score(PROMPTS, new_tokens)
    np.testing.assert_allclose(scores, wanted, atol=1e-4)
    assert_every_page_is_free(engine)


@pytest.mark.parametrize("num_devices", [8, *slow([2])])
def test_kernels_partition_themselves_in_the_step(alone, implementation, num_devices):
    engine = mesh_engine(num_devices, implementation=implementation)
    assert tokens_of(serve(engine, PROMPTS[:1], greedy(max_tokens=4)))[0] == alone[0][0][:4]
    assert_every_page_is_free(engine)


def test_weights_that_are_where_they_belong_are_not_copied():
    engine = mesh_engine(2)
    params = {
        name: jax.device_put(leaf, NamedSharding(mesh(2), WIDE.param_specs(NEW)[name]))
        for name, leaf in NEW.items()
    }
    engine.update_params(params)
    mine = dict(zip(sorted(params), engine.replicas[0].weights.leaves, strict=True))
    for name, leaf in params.items():
        ours, theirs = (
            [shard.data.unsafe_buffer_pointer() for shard in one.addressable_shards]
            for one in (mine[name], leaf)
        )
        assert ours == theirs, name


def test_weights_on_other_devices_are_sent_to_those_of_the_engine(new_tokens):
    engine = mesh_engine(2)
    theirs = jax.sharding.Mesh(mesh(8).devices[2:].reshape(2, 3), ("fsdp", "x"))
    sharding = NamedSharding(theirs, P("fsdp"))
    engine.update_params({name: jax.device_put(leaf, sharding) for name, leaf in NEW.items()})
    assert tokens_of(serve(engine, PROMPTS, greedy())) == new_tokens


@pytest.mark.parametrize("cut", [False, True])
def test_a_model_without_specs_keeps_the_shardings_of_its_weights(cut, alone):
    two = mesh(2).devices

    class NoSpecs(type(WIDE)):
        param_specs = None

    params = weights(WIDE)
    if cut:  # on the axis of a mesh of the caller
        theirs = jax.sharding.Mesh(two, ("model",))
        head = NamedSharding(theirs, P(None, "model"))
        params = {name: jax.device_put(x, NamedSharding(theirs, P())) for name, x in params.items()}
        params["head"] = jax.device_put(params["head"], head)
    model = NoSpecs(**vars(WIDE))
    engine = make_engine(model, params, tensor_parallel=2)
    assert tokens_of(serve(engine, PROMPTS[:1], greedy())) == alone[0]
    leaves = dict(zip(sorted(params), engine.replicas[0].weights.leaves, strict=True))
    assert leaves["head"].sharding.is_fully_replicated != cut


def test_nothing_compiles_after_the_warm_up_on_a_mesh(compilations):
    engine = mesh_engine(2)
    engine.warmup([greedy(), sampling(presence_penalty=1.0)])
    del compilations[:]
    serve(engine, PROMPTS, [greedy(), sampling(n=2, presence_penalty=1.0), *[greedy()] * 3])
    assert not compilations


@pytest.mark.parametrize("num_devices", [2, 8])
@pytest.mark.parametrize("shape", [(4, 0), (4, 16)], ids=["decode", "mixed"])
def test_a_step_gathers_neither_a_pool_nor_weights(num_devices, shape):
    """Sums over the devices and what greedy sampling needs are all that it sends."""
    engine = mesh_engine(num_devices, num_pages=MANY_PAGES // 4)
    runner = engine.replicas[0].runner
    batch = runner._pack([], [], shape, SamplingMode())
    compiled = runner.executor.lower(batch).compile()
    sent = r"= \(?(\w+)\[([\d,]*)\]\S* (?:all-gather|all-to-all|collective-permute)(?:-start)?\("
    sizes = [
        np.prod([int(size) for size in sizes.split(",") if size])
        for _, sizes in re.findall(sent, compiled.as_text())
    ]
    num_tokens = shape[0] + shape[1]
    weight = (WIDE.num_heads * WIDE.head_dim) ** 2  # of a layer's output projection, the smallest
    assert max(sizes, default=0) <= num_tokens * (WIDE.num_heads + 8) * WIDE.head_dim < weight
    memory = compiled.memory_analysis()
    pages = runner.executor.pool_shape.layers[0].k_pages
    assert memory.temp_size_in_bytes < pages.size * pages.dtype.itemsize / num_devices / 2
    assert memory.alias_size_in_bytes * num_devices > 2 * WIDE.num_layers * pages.size * 4


@pytest.mark.parametrize("kv_cache_dtype", ["int8", *slow([None])])
def test_each_device_has_its_heads_of_the_pool_only(kv_cache_dtype):
    engine = mesh_engine(4, kv_cache_dtype=kv_cache_dtype)
    for leaf in jax.tree.leaves(engine.replicas[0].runner.executor.state.pool):
        for shard in leaf.addressable_shards:
            assert shard.data.shape == (1, *leaf.shape[1:])
    serve(engine, PROMPTS, greedy())
    assert_every_page_is_free(engine)


def test_the_open_number_of_pages_counts_the_heads_of_one_device():
    sizes = dict(num_pages=None, max_num_seqs=2**17, max_num_batched_tokens=2**18)
    config = EngineConfig(page_size=16, **sizes)
    if jax.default_backend() != "cpu":
        pytest.skip("GPUs report their memory, which changes")
    from pallas_paged.engine.placement import placements

    one, _ = config.sizes(WIDE)
    for num_devices, ratio in [(2, 2), (4, 4), (8, 4)]:
        many = replace(config, tensor_parallel=num_devices)
        found, _ = many.sizes(WIDE, placements(num_devices, 1, jax.devices()))
        assert found == ratio * one


def test_sizes_that_do_not_fit_the_model_or_the_machine_are_refused():
    mesh(3)

    def build(**sizes):
        return make_engine(WIDE, weights(WIDE), **sizes)

    with pytest.raises(
        ValueError, match="tensor_parallel=3 must divide the model's num_kv_heads=4"
    ):
        build(tensor_parallel=3)
    with pytest.raises(ValueError, match="tensor_parallel=16 \\* data_parallel=1 must be at most"):
        build(tensor_parallel=16)
    with pytest.raises(ValueError, match="must be at most 1, the number of devices"):
        Engine(WIDE, weights(WIDE), EngineConfig(tensor_parallel=2), devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="data_parallel=0 must be an integer"):
        EngineConfig(data_parallel=0)
    with pytest.raises(ValueError, match=r"devices=.* must all be different"):
        twice = jax.devices()[:1] * 2
        Engine(WIDE, weights(WIDE), EngineConfig(tensor_parallel=2), devices=twice)

    for spec, reason in [
        (P("tensor", "data"), "must name no other axis"),
        (P(None, None, "tensor"), "has more entries than an array of shape"),
    ]:

        class Odd(type(WIDE)):
            def param_specs(self, params, spec=spec):
                return super().param_specs(params) | dict(head=spec)

        with pytest.raises(ValueError, match=rf"param_specs\['head'\]=.* {reason}"):
            make_engine(Odd(**vars(WIDE)), weights(WIDE), tensor_parallel=2)
    odd = replace(WIDE, vocab_size=41)
    with pytest.raises(ValueError, match="cuts an axis of 41 elements into 2 parts"):
        make_engine(odd, weights(odd), tensor_parallel=2)


def test_an_engine_uses_the_devices_that_it_is_given(alone):
    mesh(4)
    devices = jax.devices()[2:4]
    config = EngineConfig(**dict(num_pages=16, page_size=4, max_num_seqs=4, tensor_parallel=2))
    config = replace(config, max_num_batched_tokens=16, implementation="xla")
    engine = Engine(WIDE, weights(WIDE), config, devices=devices)
    (output,) = engine.generate(PROMPTS[:1], greedy(), progress=False)
    assert [output.outputs[0].token_ids] == alone[0]
    leaves = jax.tree.leaves((engine.replicas[0].weights.leaves, engine.table))
    assert all(leaf.sharding.device_set == set(devices) for leaf in leaves)


def test_an_engine_of_one_device_takes_weights_from_any(alone):
    """Those of a trainer may be on a mesh; the engine stays on JAX's default device."""
    engine = make_engine(WIDE, jax.device_put(weights(WIDE), mesh(2).devices[1]))
    cut = NamedSharding(mesh(2), P(None, "tensor"))
    for form in (lambda x: jax.device_put(x, cut), np.asarray):
        engine.update_params(jax.tree.map(form, weights(WIDE)))
        assert tokens_of(serve(engine, PROMPTS[:1], greedy())) == alone[0]
    leaves = jax.tree.leaves((engine.replicas[0].weights.leaves, engine.table))
    assert all(leaf.devices() == {jax.devices()[0]} for leaf in leaves)


def test_a_closed_engine_frees_its_pools_and_ends_its_requests():
    engine = make_engine()
    requests = submit(engine, PROMPTS, greedy())
    step(engine)
    pool = jax.tree.leaves(engine.replicas[0].runner.executor.state.pool)
    engine.close()
    engine.close()
    assert set(reasons_of(requests)) == {"abort"} and all(leaf.is_deleted() for leaf in pool)
    with pytest.raises(RuntimeError, match="the engine is dead: it has been closed"):
        engine.step()
