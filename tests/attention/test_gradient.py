"""Gradients of attention: right, or refused with the reason."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from tests.support.attention_cases import Case, SharedPrefixes
from tests.support.marks import slow

CALLS = [
    (pp.paged_attention, Case(head_dim=8, seq_lens=(9, 0, 5, 1))),
    (pp.ragged_paged_attention, Case(head_dim=8, seq_lens=(9, 0, 5, 1), q_lens=(4, 1, 7, 0))),
    (
        pp.cascade_attention,
        SharedPrefixes(
            case=Case(head_dim=8), seq_lens=(19, 0, 17, 1), prefix_lens=(16,), cu_group_sizes=(0, 3)
        ),
    ),
]
OPTIONS = dict(soft_cap=2.0, sliding_window=6)
PER_HEAD = (np.float32([0.5, 0.25, 0.1, 0.0]), np.float32([1.0, -1.0, 0.0, 2.0]))


@pytest.mark.parametrize(("function", "case"), CALLS, ids=["decode", "ragged", "cascade"])
class TestGradient:
    @pytest.mark.parametrize("options", [OPTIONS, *slow([{}])], ids=["options", "plain"])
    def test_equals_finite_differences(self, function, case, options):
        """The pool is poisoned: data that no row owns has a gradient of 0 and changes no other."""
        q, k_pages, v_pages, *rest = (jnp.asarray(x) for x in case.make())

        @jax.jit
        def total(q, k_pages, v_pages, slopes, sinks):
            per_head = dict(alibi_slopes=slopes, sinks=sinks) if options else {}
            out, lse = function(
                q, k_pages, v_pages, *rest, **per_head, **options, return_lse=True,
                implementation="xla",
            )  # fmt: skip
            return jnp.sin(out).sum() + jnp.where(jnp.isneginf(lse), 0.0, lse).sum()

        at = (q, k_pages, v_pages, *PER_HEAD)
        gradients = jax.jit(jax.grad(total, argnums=range(5)))(*at)
        rng = np.random.default_rng(0)
        for i, gradient in enumerate(gradients):
            step = 1e-2 * rng.standard_normal(gradient.shape).astype(np.float32)
            ahead, behind = (total(*at[:i], at[i] + s * step, *at[i + 1 :]) for s in (1, -1))
            expected = (ahead - behind) / 2
            np.testing.assert_allclose(np.vdot(gradient, step), expected, rtol=2e-2, atol=1e-4)

    def test_the_kernels_refuse_it(self, function, case):
        q, *rest = case.make()

        def total(q):
            return function(q, *rest, implementation="triton_interpret", sinks=PER_HEAD[1]).sum()

        with pytest.raises(NotImplementedError, match="no gradient; implementation='xla'"):
            jax.eval_shape(jax.grad(total), q)
