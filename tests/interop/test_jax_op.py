"""The twin of JAX's deprecated op, called as the op is."""

import inspect
from functools import partial

import jax
import numpy as np
import pytest

from pallas_paged.interop import jax_op
from tests.support.attention_cases import Case
from tests.support.attention_oracle import relative_error
from tests.support.marks import needs_triton

theirs = pytest.importorskip("jax.experimental.pallas.ops.gpu.paged_attention")


def arrays(**sizes):
    q, *rest = Case(head_dim=64, **sizes).make(poison=False)
    return q * np.float32(64**-0.5), *rest


def test_the_signature_is_that_of_jaxs_op():
    ours = inspect.signature(jax_op.paged_attention).parameters.values()
    wanted = inspect.signature(theirs.paged_attention).parameters.values()
    assert [(x.name, x.kind) for x in ours] == [(x.name, x.kind) for x in wanted]
    required = [(x.name, x.default is x.empty) for x in ours]
    assert required == [(x.name, x.default is x.empty) for x in wanted]


@needs_triton
@pytest.mark.parametrize("options", [{}, {"attn_logits_soft_cap": 1.5}], ids=["plain", "soft cap"])
def test_the_result_is_that_of_jaxs_op(options):
    given = arrays()
    options |= dict(k_splits=2, interpret=True)
    both = theirs.paged_attention, jax_op.paged_attention
    expected, out = (jax.jit(partial(function, **options))(*given) for function in both)
    assert relative_error(out, np.asarray(expected, np.float64)) <= 1e-3  # theirs may use TF32


@needs_triton
def test_scales_are_positional_and_no_lengths_mean_all_tokens():
    *given, _ = arrays(seq_lens=(64, 64, 64))
    k, v = ((np.clip(x, -2, 2) * 60).astype(np.int8) for x in given[1:3])
    scales = [np.full(k.shape[:3], x, np.float32) for x in (0.02, 0.03)]
    call = given[0], k, v, given[3], None, *scales
    expected = jax.jit(partial(theirs.paged_attention, k_splits=2, interpret=True))(*call)
    out = jax_op.paged_attention(*call, interpret=True)
    assert relative_error(out, np.asarray(expected, np.float64)) <= 1e-3
    with pytest.raises(
        ValueError, match=r"block_tables.shape=\(24,\) must be \[B, pages_per_seq\]"
    ):
        jax_op.paged_attention(*call[:3], given[3].ravel(), None, *scales)
