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
from pallas_paged.decoder.rms_norm import rms_norm
from pallas_paged.decoder.unmerged_attention import unmerged_attention
from pallas_paged.kernels.mosaic_sm90.config import DecoderBlockConfig, decoder_block_config
from pallas_paged.pages.layer import LayerKV
from tests.support import raw
from tests.support.block_weights import draw, routed_mlp, routed_weights
from tests.support.marks import needs_triton

A, E, F, N, X = SIZES = 512, 512, 256, 128, 128


@partial(jax.jit, static_argnums=3)
def separate_steps(attended, x, w, routing):
    x = x + attended @ w.o.T
    branch, experts = routed_mlp(rms_norm(x, w.mlp_norm, 1e-5), w, routing)
    x = x + branch
    return x, rms_norm(x, w.out_norm, 1e-5) @ w.qkv.T, experts[0]


def assert_same(found, wanted):
    *results, experts = found
    *wanted, wanted_experts = wanted
    np.testing.assert_array_equal(experts.reshape(-1), wanted_experts)
    for a, b in zip(results, wanted, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert (np.abs(a - b) < 0.05 * b.std()).all()


def test_the_row_goes_through_the_experts_with_the_largest_logits():
    """The second call has the mailbox that the first one cleared."""
    routing = Routing(num_experts_per_tok=3, norm_topk_prob=True, scaling=2.0)
    w = routed_weights(*SIZES)
    config = DecoderBlockConfig(
        num_programs=1, o_splits=2, down_splits=3, router_splits=2, num_stages=3
    )
    mailboxes = one_row.new_mailboxes(config, w)
    how = dict(eps=1e-5, config=config, routing=routing, interpret=True)
    for seed in (20, 21):
        attended, x = draw(seed, 1, A), draw(30 + seed, 1, E)
        *found, mailboxes = one_row.between_attentions(attended, x, mailboxes, w, **how)
        assert (mailboxes[0] == EMPTY).all() and not (mailboxes[1] == EMPTY).all()
        assert_same(found, separate_steps(attended, x, w, routing))


@needs_triton
def test_partial_states_and_mailboxes_go_from_layer_to_layer():
    """Weights that do not add up to 1; of equal logits the first ones are chosen."""
    routing = Routing(num_experts_per_tok=2, norm_topk_prob=False, scaling=9.0)
    w = routed_weights(*SIZES)
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
    q, x = draw(42, 1, A // 64, 64), draw(43, 1, E)
    attended, before, found = run(q, x, "mosaic_sm90_interpret")
    assert_same(found, separate_steps(attended, before, w, routing))
    attended, before, found = run(q, x, None)
    assert_same(found, separate_steps(attended, before, w, routing))


@pytest.mark.parametrize(
    "change", [dict(num_experts=64), dict(size=2880), dict(hidden_size=704)], ids=str
)
def test_sizes_that_do_not_fit_have_no_config(change):
    sizes = dict(size=2048, attended_size=4096, hidden_size=768, out_size=5120, num_experts=128)
    how = dict(experts_per_token=8, num_programs=132)
    config = decoder_block_config(**sizes, **how)
    assert (config.o_splits, config.down_splits, config.router_splits) == (4, 8, 8)
    assert decoder_block_config(**sizes | change, **how) is None
