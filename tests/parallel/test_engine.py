"""The engine on a mesh: token for token what it gives on one device."""

import re
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_paged.engine import Engine, EngineConfig, SamplingParams
from pallas_paged.engine.device.placement import placements
from pallas_paged.engine.sampling_params import SamplingMode
from tests.support import raw
from tests.support.devices import implementations_here, mesh
from tests.support.draft_calls import NGRAM
from tests.support.engine_calls import (
    MANY_PAGES,
    MODEL,
    MODES,
    PROMPTS,
    SIZES,
    WIDE,
    assert_every_page_is_free,
    greedy,
    make_engine,
    run,
    sampling,
    serve,
    step,
    submit,
    tokens_of,
    weights,
)
from tests.support.marks import slow
from tests.support.mixed_model import MixedModel, TwoSizesModel
from tests.support.placement import buffers
from tests.support.plain_model import greedy_tokens
from tests.support.soak import soak_engine, storm

pytestmark = pytest.mark.usefixtures("exact_products")
# Its KV head is in the pool of two devices twice.
NARROW = replace(MODEL, num_kv_heads=1)
# A mesh has few programs. Filters are half of one; test_sampling.py has them on a mesh.
GREEDY, UNFILTERED, ANY = MODES[:1], MODES[1:2], MODES[2:]
COMPILED = [name for name in implementations_here() if not name.endswith("_interpret")]
FEW_PAGES = dict(num_pages=13, watermark=0.0)


def mesh_engine(num_devices: int = 2, model: Any = NARROW, params: Any = None, **sizes) -> Engine:
    mesh(num_devices)  # skips where there are fewer
    sizes = FEW_PAGES | dict(tensor_parallel_size=num_devices, modes=UNFILTERED) | sizes
    return make_engine(model, weights(model) if params is None else params, **sizes)


def one_device(model: Any = NARROW, seed: int = 1) -> Engine:
    """An engine with the same weights on one device; NARROW takes the programs of MODEL."""
    params = weights(model, seed)
    if model is NARROW:
        q, k, v = np.split(np.asarray(params["qkv"]), [64, 80], axis=-1)
        model, params = MODEL, params | {"qkv": np.concatenate([q, k, k, v, v], axis=-1)}
    return make_engine(model, params)


def results_of(request: Any) -> tuple[list, list]:
    logprobs = [x for output in request.outputs for x in output.logprobs or ()]
    logprobs += [x for x in request.prompt_logprobs or () if x is not None]
    found = [sorted((token, x.rank, x.logprob) for token, x in one.items()) for one in logprobs]
    return tokens_of([request]), [x for one in found for x in one]


def loads(top_k: int) -> list[SamplingParams]:
    """What requests may ask for: samples are forks."""
    return [
        greedy(prompt_logprobs=1),
        sampling(n=3, seed=3),
        greedy(beam_width=2, max_tokens=6),
        sampling(top_k=top_k, logprobs=2, seed=4),
        greedy(presence_penalty=1.0, repetition_penalty=1.2),
    ]


@pytest.mark.parametrize(
    ("model", "num_devices", "top_k"),
    [(NARROW, 2, 0), *slow([(NARROW, 2, 5), (MODEL, 2, 0), (MODEL, 4, 5), (WIDE, 8, 5)])],
)
@pytest.mark.cpu_budget(8)  # compiles programs that later tests share
def test_every_kind_of_request_gets_the_tokens_of_one_device(model, num_devices, top_k):
    alone, each = one_device(model), loads(top_k)
    pairs = zip(PROMPTS, each, strict=True)
    wanted = [results_of(serve(alone, [prompt], load)[0]) for prompt, load in pairs]
    engine = mesh_engine(num_devices, model, modes=ANY if top_k else UNFILTERED, num_steps=4)
    requests = serve(engine, PROMPTS, each)
    assert engine.stats().num_preemptions > 0
    for _ in range(2):
        requests += serve(engine, PROMPTS[4:], each[4:])
    assert requests[-1].num_cached_tokens == 16
    for request, (tokens, logprobs) in zip(requests, [*wanted, *wanted[4:] * 2], strict=True):
        found = results_of(request)
        assert found[0] == tokens
        assert bool(logprobs) == (request in (requests[0], requests[3]))
        np.testing.assert_allclose(np.array(found[1]), np.array(logprobs), atol=1e-4)
    assert_every_page_is_free(engine)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [MixedModel, TwoSizesModel])
@pytest.mark.parametrize("num_devices", [2, 4])
def test_layers_with_a_window_free_their_pages_on_every_device(num_devices, model_type):
    """Where other layers see all tokens, with forks, preemption and the prefix cache."""
    model = model_type(vocab_size=40, max_model_len=128, sliding_window=6)
    engine = mesh_engine(num_devices, model, num_pages=64, modes=GREEDY, num_steps=8)
    prompts = [[1, 2, 3], [*range(38)], [7] * 9]
    for _ in range(2):
        requests = serve(engine, prompts, [greedy(max_tokens=80, n=n) for n in (1, 3, 2)])
        for prompt, request in zip(prompts, requests, strict=True):
            wanted = greedy_tokens(model, weights(model), prompt, 80)
            assert tokens_of([request]) == [wanted] * len(request.outputs)
    stats = engine.stats()
    assert stats.num_window_pages == 49 and stats.num_preemptions > 0 and stats.prefix_cache_hits
    assert_every_page_is_free(engine)


@pytest.mark.cpu_budget(8)  # compiles on two meshes
def test_weights_and_pools_are_replaced_where_they_are():
    """On the devices that the engine is given; running requests begin anew."""
    devices, config = mesh(4).devices[2:], EngineConfig(**SIZES, tensor_parallel_size=2)
    engine = Engine(MODEL, weights(MODEL), config, devices=list(devices))
    (replica,) = engine.replicas
    arrays = lambda: (replica.weights.leaves, replica.runner.executor.state.pool)  # noqa: E731
    for leaf in jax.tree.leaves((engine.table, replica.runner.executor.state, arrays())):
        assert leaf.sharding.device_set == set(devices)
    shardings = [leaf.sharding for leaf in jax.tree.leaves(arrays())]
    new = weights(MODEL, seed=2)
    alone = make_engine(MODEL, new)
    wanted = tokens_of(serve(alone, PROMPTS, greedy()))
    on = replica.runner.executor.state.pool.layers[0].k_pages.sharding.mesh
    specs = MODEL.param_specs(new)
    placed = {name: jax.device_put(x, NamedSharding(on, specs[name])) for name, x in new.items()}
    theirs = jax.sharding.Mesh(mesh(8).devices[2:].reshape(2, 3), ("fsdp", "x"))
    others = jax.device_put(new, NamedSharding(theirs, P("fsdp")))
    for params in (placed, others, jax.tree.map(np.asarray, new)):
        requests = submit(engine, PROMPTS, greedy())
        step(engine)
        pool = jax.tree.leaves(replica.runner.executor.state.pool)
        engine.sleep()
        assert all(leaf.is_deleted() for leaf in pool)
        engine.update_params(params, restart_running=True)
        engine.wake_up()
        for leaf, sharding in zip(jax.tree.leaves(arrays()), shardings, strict=True):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        for name, leaf in zip(sorted(new), replica.weights.leaves, strict=True):
            assert params is not placed or buffers(leaf) == buffers(placed[name])  # not copied
            np.testing.assert_array_equal(leaf, new[name])
        run(engine)
        assert tokens_of(requests) == wanted
    scores = engine.score(PROMPTS, wanted)
    np.testing.assert_allclose(scores, alone.score(PROMPTS, wanted), atol=1e-4)
    assert_every_page_is_free(engine)


@pytest.mark.parametrize("num_devices", [2, *slow([8])])
@pytest.mark.parametrize("implementation", [x for x in implementations_here() if x != "xla"])
def test_kernels_partition_themselves_in_the_step(implementation, num_devices):
    model = MODEL if num_devices == 2 else WIDE
    engine = mesh_engine(num_devices, model, **raw.by(implementation), modes=GREEDY)
    if implementation.endswith("_interpret") and num_devices == 2:  # which is slow to compile
        runner = engine.replicas[0].runner
        for shape in runner.buckets.all():
            batch = runner.empty_batch(shape, *GREEDY)
            text = runner.executor.compilation(batch).lower().as_text()
            calls = re.findall(r"call @(attention_\w+)\(", text)
            kinds = 1 + (shape[1] > 0)  # decoding rows, and chunks
            assert len(calls) == kinds * model.num_layers
            assert text.count("CustomSPMDPartitioning") == kinds
        return
    found = tokens_of(serve(engine, PROMPTS[:1], greedy(max_tokens=4)))
    assert found == tokens_of(serve(one_device(model), PROMPTS[:1], greedy(max_tokens=4)))
    assert_every_page_is_free(engine)


@pytest.mark.parametrize("where", [None, slice(0, 2), slice(2, 4)], ids=str)
def test_a_model_without_specs_keeps_the_shardings_of_its_weights(where):
    """If they are on a mesh of the engine's devices; others are replicated on these."""

    class NoSpecs(type(MODEL)):
        param_specs = None

    params, devices = weights(MODEL), mesh(4).devices
    if where is not None:  # on the axis of a mesh of the caller
        theirs = jax.sharding.Mesh(devices[where], ("model",))
        specs = {name: P(None, "model") if name == "head" else P() for name in params}
        params = jax.device_put(params, {k: NamedSharding(theirs, x) for k, x in specs.items()})
    engine = mesh_engine(model=NoSpecs(**vars(MODEL)), params=params)
    kept = where == slice(0, 2)
    for name, leaf in zip(sorted(params), engine.replicas[0].weights.leaves, strict=True):
        assert leaf.sharding.device_set == set(devices[:2])
        assert leaf.sharding.is_fully_replicated == (not kept or name != "head")
        assert not kept or buffers(leaf) == buffers(params[name])


@pytest.mark.parametrize("num_devices", [2, *slow([8])])
@pytest.mark.parametrize("shape", [(4, 0), (4, 16)], ids=["decode", "mixed"])
@pytest.mark.parametrize("implementation", COMPILED)
def test_a_step_gathers_neither_a_pool_nor_weights(num_devices, shape, implementation):
    """Sums over the devices and what greedy sampling needs are all that it sends."""
    sizes = dict(num_pages=MANY_PAGES // 4, implementation=implementation)
    engine = mesh_engine(num_devices, WIDE, **sizes)
    runner = engine.replicas[0].runner
    pool = jax.tree.leaves(runner.executor.state.pool)
    assert {x.addressable_shards[0].data.shape[2] for x in pool} == {max(4 // num_devices, 1)}
    batch = runner.empty_batch(shape, SamplingMode())
    compiled = runner.executor.compilation(batch).lower().compile()
    sent = r"= \(?(\w+)\[([\d,]*)\]\S* (?:all-gather|all-to-all|collective-permute)(?:-start)?\("
    shapes = [shape.split(",") for _, shape in re.findall(sent, compiled.as_text())]
    sizes = [np.prod([int(size) for size in shape if size]) for shape in shapes]
    num_tokens = shape[0] + shape[1]
    weight = (WIDE.num_heads * WIDE.head_dim) ** 2  # of a layer's output projection, the smallest
    assert max(sizes, default=0) <= num_tokens * (WIDE.num_heads + 8) * WIDE.head_dim < weight
    memory = compiled.memory_analysis()
    pages = runner.executor.pool_shape.layers[0].k_pages
    assert memory.temp_size_in_bytes < pages.size * pages.dtype.itemsize / num_devices / 2
    assert memory.alias_size_in_bytes * num_devices > 2 * WIDE.num_layers * pages.size * 4


@pytest.mark.parametrize("kv_cache_dtype", slow(["int8", "fp8"]))
def test_devices_serve_from_quantized_pages(kv_cache_dtype):
    engine = mesh_engine(model=MODEL, kv_cache_dtype=kv_cache_dtype, modes=GREEDY)
    for leaf in jax.tree.leaves(engine.replicas[0].runner.executor.state.pool):
        assert {x.data.shape for x in leaf.addressable_shards} == {
            (*leaf.shape[:2], 1, *leaf.shape[3:])
        }
    alone = make_engine(MODEL, kv_cache_dtype=kv_cache_dtype, modes=GREEDY)
    found, wanted = (tokens_of(serve(one, PROMPTS, greedy())) for one in (engine, alone))
    assert found == wanted


@pytest.mark.slow  # a storm on one device is in every run
@pytest.mark.parametrize(
    ("tensor", "data", "steps"), [(2, 2, [1, 2, 8]), (2, 1, [1]), (4, 2, [1, 2, 8])], ids=str
)
def test_requests_in_a_storm_get_what_they_get_alone(tensor, data, steps):
    mesh(tensor * data)
    rng = np.random.default_rng([tensor, data])
    engine = soak_engine(MODEL, tensor_parallel_size=tensor, data_parallel_size=data, watermark=0.0)
    storm(engine, MODEL, rng, num_requests=150, num_steps=lambda: int(rng.choice(steps)))


def test_the_open_number_of_pages_counts_the_heads_of_one_device():
    if jax.default_backend() != "cpu":
        pytest.skip("GPUs report their memory, which changes")
    sizes = dict(num_pages=None, max_num_seqs=2**17, max_num_batched_tokens=2**18)
    config = EngineConfig(page_size=16, **sizes)
    one, *_ = config.sizes(WIDE)
    for num_devices, ratio in [(2, 2), (4, 4), (8, 4)]:
        many = replace(config, tensor_parallel_size=num_devices)
        found, *_ = many.sizes(WIDE, placements(num_devices, 1, jax.devices()))
        assert found == ratio * one


def test_replicas_have_devices_of_their_own_in_order():
    mesh(6)
    devices = jax.devices()[1:6]
    found = placements(2, 2, devices)
    assert [one.devices for one in found] == [(*devices[:2],), (*devices[2:4],)]
    for one in found:
        assert (*one.mesh.devices.flat,) == one.devices and one.mesh.axis_names == ("tensor",)
        assert (one.num_devices, one.num_processes, one.local_devices) == (2, 1, [*one.devices])
        assert one.pool.spec == P(None, None, "tensor") and one.replicated.spec == P()
    assert [one.devices for one in placements(1, 2, None)] == [(x,) for x in jax.devices()[:2]]
    (default,) = placements(1, 1, None)
    assert (default.devices, default.mesh, default.pool) == ((jax.devices()[0],), None, None)
    (given,) = placements(1, 1, devices)
    assert (given.devices, given.mesh.size) == ((devices[0],), 1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(tensor_parallel_size=3), "tensor_parallel_size=3 must divide .* num_kv_heads=4"),
        (dict(tensor_parallel_size=4096), r"size=4096 \* data_parallel_size=1 must be at most"),
        (dict(data_parallel_size=4096), r"size=1 \* data_parallel_size=4096 must be at most"),
        (dict(tensor_parallel_size=2, devices=[0]), "must be at most 1, the number of devices"),
        (dict(data_parallel_size=2, devices=[0, 0, 1]), "devices=.* must all be different"),
        (dict(data_parallel_size=0), "data_parallel_size=0 must be an integer"),
    ],
)
def test_sizes_that_do_not_fit_the_model_or_the_machine_are_refused(sizes, message):
    mesh(3)
    sizes = SIZES | sizes
    devices = [jax.devices()[index] for index in sizes.pop("devices", ())] or None
    with pytest.raises(ValueError, match=message):
        Engine(WIDE, weights(WIDE), EngineConfig(**sizes), devices=devices)


@pytest.mark.parametrize(
    ("spec", "vocab_size", "message"),
    [
        (P("tensor", "data"), 40, r"\['head'\]=.* must name no other axis than \('tensor',\)"),
        (P(None, None, "tensor"), 40, r"\['head'\]=.* has more entries than an array of shape"),
        (P(None, "tensor"), 41, r"\['embed'\]=.* shards an axis of 41 elements into 2 parts"),
        ("tensor", 40, r"\['head'\]=tensor must be a PartitionSpec"),
        (None, 40, "param_specs have the structure"),
    ],
)
def test_specs_that_do_not_fit_the_weights_are_refused(spec, vocab_size, message):
    class Odd(type(MODEL)):
        def param_specs(self, params):
            specs = super().param_specs(params) | dict(head=spec)
            return specs if spec else {"head": P()}

    with pytest.raises(ValueError, match=message):
        mesh_engine(model=Odd(**vars(replace(MODEL, vocab_size=vocab_size))))


def test_an_engine_of_one_device_takes_weights_from_any():
    """Those of a trainer may be on a mesh; the engine stays on JAX's default device."""
    new = weights(MODEL, seed=2)
    engine = make_engine(MODEL, jax.device_put(weights(MODEL), mesh(2).devices[1]))
    cut = NamedSharding(mesh(2), P(None, "tensor"))
    wanted = tokens_of(serve(make_engine(MODEL, new), PROMPTS[:1], greedy()))
    for form in (lambda x: jax.device_put(x, cut), np.asarray):
        engine.update_params(jax.tree.map(form, new))
        assert tokens_of(serve(engine, PROMPTS[:1], greedy())) == wanted
    leaves = jax.tree.leaves((engine.replicas[0].weights.leaves, engine.table))
    assert all(leaf.devices() == {jax.devices()[0]} for leaf in leaves)


@pytest.mark.slow  # the next one has steps with drafts, too
def test_drafts_on_two_devices_leave_the_tokens_as_they_are():
    prompts, params = [[1, 2, 3, 4, 5] * 2, [7, 8] * 4], greedy(max_tokens=20)
    engine = mesh_engine(modes=GREEDY, speculative_config=NGRAM, num_steps=4)
    wanted = tokens_of(serve(one_device(), prompts, params))
    assert tokens_of(serve(engine, prompts, params)) == wanted
    assert engine.stats().spec_decode_num_accepted_tokens > 0


@pytest.mark.cpu_budget(14)  # programs of its own
def test_a_draft_model_on_two_devices_leaves_the_tokens_as_they_are():
    """Its KV head is in the pool twice, its weights are sharded; it is the model's first layer."""
    draft = replace(NARROW, num_layers=1)
    params = weights(NARROW)
    of_draft = {name: x[:1] if x.ndim > 2 else x for name, x in params.items()}
    config = dict(method="draft_model", model=draft, num_speculative_tokens=2, adaptive=False)
    engine = mesh_engine(
        modes=GREEDY, draft_params=of_draft, speculative_config=config, num_steps=4
    )
    wanted = tokens_of(serve(one_device(), PROMPTS[:3], greedy(max_tokens=20)))
    assert tokens_of(serve(engine, PROMPTS[:3], greedy(max_tokens=20))) == wanted
    assert engine.stats().spec_decode_num_draft_tokens > 20
    executor = engine.replicas[0].runner.executor
    assert not executor.draft_weights.leaves[0].is_fully_replicated
    assert len(executor.state.pool.layers) == 3
