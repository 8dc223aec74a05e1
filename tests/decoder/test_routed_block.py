"""The kernel between two attentions of one row whose MLP is one of experts."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernels need JAX 0.11", allow_module_level=True)

from pallas_paged.decoder.between_attentions import Residual
from pallas_paged.decoder.kernels import one_row
from pallas_paged.decoder.kernels.one_row_mailbox import EMPTY
from pallas_paged.decoder.kernels.operands import BlockWeights, Routing
from pallas_paged.decoder.rms_norm import rms_norm
from pallas_paged.decoder.routed_between_attentions import routed_between_attentions
from pallas_paged.decoder.unmerged_attention import unmerged_attention
from pallas_paged.experts import fused_experts
from pallas_paged.kernels.mosaic_sm90.config import DecoderBlockConfig, decoder_block_config
from pallas_paged.pages.layer import LayerKV
from tests.support import raw
from tests.support.block_weights import draw, weights_of
from tests.support.marks import needs_triton

A, E, F, N, X = 512, 512, 256, 128, 128


def routed_weights(size=E, hidden=F, attended=A, out=N, experts=X) -> BlockWeights:
    w = weights_of(attended, size, hidden, out)
    w["gate_up"] = draw(50, experts, hidden, 2, size, scale=size**-0.5)
    w["down"] = draw(51, experts, size, hidden, scale=hidden**-0.5)
    return BlockWeights(**w, router=draw(52, experts, size, scale=1.0))


@partial(jax.jit, static_argnums=3)
def separate_steps(attended, x, w, routing):
    x = x + attended @ w.o.T
    normed = rms_norm(x, w.mlp_norm, 1e-5)
    logits = normed.astype(jnp.float32) @ w.router.astype(jnp.float32).T
    scores, experts = jax.lax.top_k(jax.nn.softmax(logits), routing.num_experts_per_tok)
    if routing.norm_topk_prob:
        scores /= scores.sum(axis=-1, keepdims=True)
    scores *= routing.scaling
    x = x + fused_experts(normed, w.gate_up, w.down, experts, scores, implementation="xla")
    return x, rms_norm(x, w.out_norm, 1e-5) @ w.qkv.T, experts[0]


def assert_same(found, wanted, k):
    *results, experts = found
    *wanted, wanted_experts = wanted
    np.testing.assert_array_equal(experts.reshape(-1)[:k], wanted_experts)
    for a, b in zip(results, wanted, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert (np.abs(a - b) < 0.05 * b.std()).all()


def test_the_row_goes_through_the_experts_with_the_largest_logits():
    """The second call has the mailbox that the first one cleared."""
    routing, w = Routing(num_experts_per_tok=3, norm_topk_prob=True, scaling=2.0), routed_weights()
    config = DecoderBlockConfig(
        num_programs=1, o_splits=2, down_splits=3, router_splits=2, num_stages=3
    )
    sizes = dict(size=E, attended_size=A, hidden_size=3 * F, num_experts=X)
    mailboxes = one_row.new_mailboxes(config, **sizes)
    how = dict(eps=1e-5, config=config, routing=routing, interpret=True)
    for seed in (20, 21):
        attended, x = draw(seed, 1, A), draw(30 + seed, 1, E)
        *found, mailboxes = one_row.between_attentions(attended, x, mailboxes, w, **how)
        assert (mailboxes[0] == EMPTY).all() and not (mailboxes[1] == EMPTY).all()
        assert_same(found, separate_steps(attended, x, w, routing), 3)


@needs_triton
def test_partial_states_and_mailboxes_go_from_layer_to_layer():
    """Weights that do not add up to 1; of equal logits the first ones are chosen."""
    routing, w = Routing(num_experts_per_tok=2, norm_topk_prob=False, scaling=9.0), routed_weights()
    w = dataclasses.replace(w, router=np.concatenate([w.router[:64]] * 2))
    pages = draw(40, 2, 32, 16, 64, scale=1.0), draw(41, 2, 32, 16, 64, scale=1.0)

    @jax.jit
    def run(q, x):
        layer = LayerKV(*pages, kv_layout="HPND")
        rows = np.arange(32, dtype=np.int32)[None], np.array([100], np.int32)
        attended = unmerged_attention(q, layer, *rows, **raw.by("triton_interpret"))
        residual = Residual(x=x)
        for _ in range(2):
            before = residual.x
            residual, out, experts = routed_between_attentions(
                attended, residual, w, routing, eps=1e-5, interpret=True
            )
        return attended.merged(), before, (residual.x, out, experts)

    attended, x, found = run(draw(42, 1, A // 64, 64), draw(43, 1, E))
    assert_same(found, separate_steps(attended, x, w, routing), 2)


@pytest.mark.parametrize(
    "change", [dict(num_experts=64), dict(size=2880), dict(hidden_size=704)], ids=str
)
def test_sizes_that_do_not_fit_have_no_config(change):
    sizes = dict(size=2048, attended_size=4096, hidden_size=768, out_size=5120, num_experts=128)
    how = dict(experts_per_token=8, num_programs=132)
    config = decoder_block_config(**sizes, **how)
    assert (config.o_splits, config.down_splits, config.router_splits) == (4, 8, 8)
    assert decoder_block_config(**sizes | change, **how) is None
