"""The kernel between two attentions of one row whose MLP is one of experts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernels need JAX 0.11", allow_module_level=True)

from pallas_paged.decoder.kernels import one_row
from pallas_paged.decoder.kernels.one_row_mailbox import EMPTY
from pallas_paged.decoder.kernels.operands import BlockWeights, Routing
from pallas_paged.decoder.rms_norm import rms_norm
from pallas_paged.experts import fused_experts
from pallas_paged.kernels.mosaic_sm90.config import DecoderBlockConfig
from tests.support.block_weights import draw, weights_of

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


@pytest.mark.parametrize("normed", [True, False])
def test_the_row_goes_through_the_experts_with_the_largest_logits(normed):
    """The second call has the mailbox that the first one cleared."""
    routing = Routing(num_experts_per_tok=3, norm_topk_prob=normed, scaling=2.0 if normed else 16.0)
    w = routed_weights()
    config = DecoderBlockConfig(
        num_programs=1, o_splits=2, down_splits=3, router_splits=2, num_stages=3
    )
    sizes = dict(size=E, attended_size=A, hidden_size=3 * F, num_experts=X)
    mailboxes = one_row.new_mailboxes(config, **sizes)
    how = dict(eps=1e-5, config=config, routing=routing, interpret=True)
    for seed in (20, 21):
        attended, x = draw(seed, 1, A), draw(30 + seed, 1, E)
        *results, experts, mailboxes = one_row.between_attentions(attended, x, mailboxes, w, **how)
        assert (mailboxes[0] == EMPTY).all() and not (mailboxes[1] == EMPTY).all()
        *wanted, wanted_experts = separate_steps(attended, x, w, routing)
        np.testing.assert_array_equal(experts[:3], wanted_experts)
        for a, b in zip(results, wanted, strict=True):
            a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
            assert (np.abs(a - b) < 0.05 * b.std()).all()
