"""Models whose layers with a window have other K/V heads than the layers that see all tokens."""

from dataclasses import replace

import jax
import pytest

from pallas_paged.engine import EngineConfig, KVCacheSpec
from pallas_paged.engine.device.pool import create_pool, page_bytes
from pallas_paged.engine.model import check_model
from tests.support.engine_calls import (
    assert_every_page_is_free,
    greedy,
    make_engine,
    run,
    serve,
    step,
    submit,
    tokens_of,
    weights,
)
from tests.support.marks import slow
from tests.support.mixed_model import TwoSizesModel
from tests.support.plain_model import greedy_tokens

MODEL = TwoSizesModel(vocab_size=40, max_model_len=128, sliding_window=6, num_full_layers=1)
PROMPTS = [[*range(30)], [7] * 9]
SIZES = dict(num_kv_heads=2, head_dim=512, window_num_kv_heads=8, window_head_dim=256)
SPEC = KVCacheSpec(num_layers=4, sliding_windows=(8, 8, None, 8), dtype="bfloat16", **SIZES)


@pytest.fixture(scope="module")
def wanted():
    """Tokens of each prompt, from all tokens before them."""
    return [greedy_tokens(MODEL, weights(MODEL), prompt, 40) for prompt in PROMPTS]


@pytest.mark.parametrize(("num_pages", "has_two_pools"), [(64, True), *slow([(40, False)])])
@pytest.mark.cpu_budget(8)  # compiles programs of its own
def test_tokens_are_those_of_a_model_without_pages(num_pages, has_two_pools, wanted):
    """After a sleep, and with a fork, too; the second turn finds the pages of the first."""
    engine = make_engine(MODEL, num_pages=num_pages)
    assert bool(engine.stats().num_window_pages) == has_two_pools
    requests = submit(engine, PROMPTS, [greedy(max_tokens=40, n=n) for n in (2, 1)])
    step(engine)
    engine.sleep()
    engine.wake_up()
    run(engine)
    assert tokens_of(requests) == [wanted[0], wanted[0], wanted[1]]
    text = PROMPTS[0] + wanted[0]
    (again,) = serve(engine, [[*text, 5]], greedy(max_tokens=10))
    assert again.num_cached_tokens == 68  # the full pages of 69 tokens with K and V
    assert tokens_of([again]) == [greedy_tokens(MODEL, weights(MODEL), [*text, 5], 10)]
    assert_every_page_is_free(engine)


@pytest.mark.parametrize("num_window_pages", [3, None])
def test_a_pool_has_the_sizes_of_each_layer(num_window_pages):
    pool = create_pool(
        SPEC, num_pages=9, num_window_pages=num_window_pages, page_size=4, dtype="bfloat16"
    )
    sizes = [(x.num_pages, x.num_kv_heads, x.k_pages.shape[-1]) for x in pool.layers]
    limited = num_window_pages or 9, 8, 256
    assert sizes == [limited, limited, (9, 2, 512), limited]


def test_a_page_has_the_bytes_of_each_layer():
    of_heads = 2 * 512 + 3 * 8 * 256
    assert page_bytes(SPEC, page_size=4, dtype="bfloat16") == 4 * 2 * 2 * of_heads


@pytest.mark.parametrize(
    ("num_devices", "in_pool", "on_each"), [(2, (2, 8), (1, 4)), (4, (4, 8), (1, 2))]
)
def test_devices_share_the_heads_of_each_kind(num_devices, in_pool, on_each):
    def heads(spec):
        return spec.num_kv_heads, spec.window_num_kv_heads

    assert heads(SPEC.on_devices(num_devices)) == in_pool
    assert heads(SPEC.on_each(num_devices)) == on_each


def test_devices_that_cannot_share_the_heads_of_windows_are_refused():
    spec = replace(SPEC, window_num_kv_heads=3)
    with pytest.raises(ValueError, match="must divide the model's window_num_kv_heads=3"):
        spec.on_devices(2)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the numbers are for 1 GiB")
def test_two_pools_take_the_memory_of_one():
    """Of layers with a window a page takes a sixteenth of the bytes here."""
    model = TwoSizesModel(
        num_layers=8, num_full_layers=2, num_heads=8, num_kv_heads=8, head_dim=64,
        sliding_window=1024, max_model_len=10**6,
    )  # fmt: skip
    num_pages, _, windows = EngineConfig(max_num_batched_tokens=2048).sizes(model)
    full, limited = (
        page_bytes(model.kv_cache_spec.of(group), page_size=16, dtype="float32")
        for group in model.kv_cache_spec.groups
    )
    assert 2**30 - 2 * (full + limited) < num_pages * full + windows.num_pages * limited <= 2**30


@pytest.mark.parametrize("name", ["window_num_kv_heads", "window_head_dim"])
@pytest.mark.parametrize("windows", [None, (8, 8, 8, 8)])
def test_sizes_of_windows_need_layers_of_two_kinds(name, windows):
    class OneKind(TwoSizesModel):
        none = dict.fromkeys(("window_num_kv_heads", "window_head_dim"))
        kv_cache_spec = replace(SPEC, sliding_windows=windows, **none | {name: 2})

    with pytest.raises(ValueError, match=f"{name}=2 must be None"):
        check_model(OneKind())
