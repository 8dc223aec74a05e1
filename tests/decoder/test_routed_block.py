"""The kernel between two attentions of one row whose MLP is one of experts."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernels need JAX 0.11", allow_module_level=True)

from pallas_paged.decoder.between_attentions import Residual, Routing, between_attentions
from pallas_paged.decoder.kernels import one_row
from pallas_paged.decoder.kernels.one_row_mailbox import EMPTY
from pallas_paged.decoder.kernels.one_row_product import Product
from pallas_paged.decoder.kernels.one_row_refs import new_mailboxes
from pallas_paged.decoder.unmerged_attention import unmerged_attention
from pallas_paged.kernels.mosaic_sm90.config import (
    DecoderBlockConfig,
    decoder_block_config,
)
from pallas_paged.pages.layer import LayerKV
from tests.support import raw
from tests.support.block_weights import draw, routed_mlp, routed_weights
from tests.support.devices import implementations_here
from tests.support.marks import by_implementation, needs_triton

A, E, F, N, X = SIZES = 512, 512, 256, 128, 128


@partial(jax.jit, static_argnums=3)
def separate_steps(attended, x, w, routing):
    how = dict(eps=1e-5, mlp=partial(routed_mlp, w=w, routing=routing), implementation="xla")
    residual, out, experts = between_attentions(attended, Residual(x=x), w, **how)
    return residual.x, out, experts[0]


def assert_same(found, wanted):
    *results, experts = found
    *wanted, wanted_experts = wanted
    np.testing.assert_array_equal(experts.reshape(-1), wanted_experts)
    for a, b in zip(results, wanted, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert (np.abs(a - b) < 0.05 * b.std()).all()


QWEN = Routing(num_experts_per_tok=3, norm_topk_prob=True, scaling=2.0)
GPT_OSS = Routing(num_experts_per_tok=4, norm_topk_prob=True, scaling=1.0, swiglu_limit=1.5)
# No multiples of what the kernel takes at once, with biases, and down of fewer experts than a tile.
ODD_SIZES = 512, 832, 192, 128, 32


@pytest.mark.parametrize(
    ("routing", "w", "tile", "experts_per_split"),
    [
        (QWEN, routed_weights(*SIZES), 64, 1),
        (GPT_OSS, routed_weights(*ODD_SIZES, biases=True), 40, 2),
    ],
    ids=["Qwen", "gpt-oss"],
)
def test_the_row_goes_through_the_experts_with_the_largest_logits(
    routing, w, tile, experts_per_split
):
    """The second call has the mailbox that the first one cleared."""
    config = DecoderBlockConfig(
        num_programs=1,
        o_splits=2,
        down_splits=routing.num_experts_per_tok // experts_per_split,
        experts_per_split=experts_per_split,
        router_splits=2,
        num_stages=3,
        **dict.fromkeys(("o_tile", "gate_up_tile", "down_tile", "qkv_tile"), tile),
    )
    mailboxes = new_mailboxes(config, w)
    how = dict(eps=1e-5, config=config, routing=routing, interpret=True)
    for seed in (20, 21):
        attended, x = draw(seed, 1, A), draw(30 + seed, 1, len(w.o))
        *found, mailboxes = one_row.between_attentions(attended, x, mailboxes, w, **how)
        assert (mailboxes[0] == EMPTY).all() and not (mailboxes[1] == EMPTY).all()
        assert_same(found, separate_steps(attended, x, w, routing))


# Weights that do not add up to 1, and each expert twice: of equal logits the first is chosen.
NOT_NORMED = Routing(num_experts_per_tok=2, norm_topk_prob=False, scaling=9.0)
KERNELS = ["mosaic_sm90_interpret", *({"mosaic_sm90"} & {*implementations_here()})]


@needs_triton
@pytest.mark.parametrize(
    ("routing", "sizes", "kernel"),
    by_implementation([(NOT_NORMED, SIZES), (GPT_OSS, ODD_SIZES)], KERNELS),
)
def test_partial_states_and_mailboxes_go_from_layer_to_layer(routing, sizes, kernel):
    w = routed_weights(*sizes, biases=routing is GPT_OSS)
    if routing is NOT_NORMED:
        w = dataclasses.replace(w, router=np.concatenate([w.router[:64]] * 2))
    pages = draw(40, 2, 32, 16, 64, scale=1.0), draw(41, 2, 32, 16, 64, scale=1.0)

    def run(q, x, implementation):
        layer = LayerKV(*pages, kv_layout="HPND")
        rows = np.arange(32, dtype=np.int32)[None], np.array([100], np.int32)
        attended = unmerged_attention(q, layer, *rows, **raw.by("triton_interpret"))
        how = dict(mlp=lambda normed: routed_mlp(normed, w, routing), routing=routing)
        residual = Residual(x=x)
        for _ in range(2):
            before = residual.x
            residual, out, experts = between_attentions(
                attended, residual, w, eps=1e-5, **how, **raw.by(implementation)
            )
        return attended.merged(), before, (residual.x, out, experts)

    run = jax.jit(run, static_argnums=2)
    q, x = draw(42, 1, A // 64, 64), draw(43, 1, len(w.o))
    attended, before, found = run(q, x, kernel)
    assert_same(found, separate_steps(attended, before, w, routing))
    attended, before, found = run(q, x, None)
    assert_same(found, separate_steps(attended, before, w, routing))


def test_what_a_layer_with_experts_needs_is_named():
    attended, residual, w = draw(0, 1, A), Residual(x=draw(1, 1, E)), routed_weights(*SIZES)
    run = partial(between_attentions, attended, residual, w, eps=1e-5)
    with pytest.raises(ValueError, match=r"weights\.router needs mlp"):
        run(routing=QWEN)
    how = dict(mlp=partial(routed_mlp, w=w, routing=QWEN), routing=QWEN)
    with pytest.raises(NotImplementedError, match="partial states of one row"):
        run(**how, implementation="mosaic_sm90", interpret=True)


@pytest.mark.parametrize(
    "change",
    [dict(num_experts=60), dict(size=2888), dict(hidden_size=712), dict(experts_per_token=40)],
    ids=str,
)
def test_sizes_that_do_not_fit_have_no_config(change):
    sizes = dict(size=2048, attended_size=4096, hidden_size=768, out_size=5120, num_experts=128)
    sizes |= dict(experts_per_token=8, num_programs=132)
    config = decoder_block_config(**sizes)
    assert (config.o_splits, config.down_splits, config.router_splits) == (4, 4, 8)
    assert config.experts_per_split == 2
    assert decoder_block_config(**sizes | change) is None


def test_blocks_and_items_cover_sizes_that_are_no_multiples():
    """gpt-oss-20b has 45 tiles of features, 11.25 blocks of columns and half a tile of logits."""
    size, attended, num_experts = 2880, 4096, 32
    sizes = dict(size=size, attended_size=attended, hidden_size=size, out_size=5120)
    config = decoder_block_config(
        **sizes, num_experts=num_experts, experts_per_token=4, num_programs=132
    )
    splits = config.o_splits, config.down_splits, config.router_splits
    assert (*splits, config.experts_per_split, config.num_stages) == (2, 2, 12, 2, 6)

    def check(shape, num_features, num_items, num_blocks, **how):
        weight = jax.ShapeDtypeStruct(shape, np.float16)
        product = Product(
            weight, num_programs=132, num_in_flight=2, num_features=num_features, **how
        )
        items = sum(int(product.num_items(np.int32(i))) for i in range(132))
        assert (items, product.num_blocks) == (num_items, num_blocks)

    check((size, attended), 3072, 64 * 2, 8, num_splits=2, tile=config.o_tile)
    check((num_experts, size), 128, 2 * 12, 1, num_splits=12)
    experts = dict(experts=(), tile=config.gate_up_tile)
    check((num_experts, size, 2, size), 3072, 64 * 4, 23, num_splits=4, **experts)
    check((num_experts, size, size), 3072, 64 * 2, 12, num_splits=2, **experts)
    check((5120, size), 5120, 128, 12, tile=config.qkv_tile)
