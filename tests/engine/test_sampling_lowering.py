"""Sampling lowers for CUDA to a reduction or kernels, without loops, sorts or branches of XLA."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from pallas_paged.engine.sampling.sampler import sample
from pallas_paged.engine.sampling_params import SamplingMode
from tests.support.devices import lower_for_cuda
from tests.support.marks import slow
from tests.support.sampling_rows import metadata


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(300, 12), *slow([(1, 50257), (64, 128256)])])
def test_a_draw_is_kernels_and_no_loop_of_xla(num_rows, vocab_size):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), metadata(num_rows))
    logits = jax.ShapeDtypeStruct((num_rows, vocab_size), jnp.float32)
    lens = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    for mode in (
        SamplingMode(),
        SamplingMode(draws=True),
        SamplingMode(draws=True, filters=1),
        SamplingMode(draws=True, filters=2),
    ):
        function = functools.partial(sample, mode=mode)
        text = lower_for_cuda(function, logits, shapes, lens).as_text()
        # Not every mention: the kernels' own text has the files and functions it came from.
        kernels = set(re.findall(r'name = "(sampling_\w+)"', text))
        wanted = {"sampling_weigh", "sampling_draw"} if mode.draws else set()
        assert kernels == wanted | ({"sampling_search"} if mode.filters else set())
        assert ("stablehlo.reduce" in text) == (not mode.draws)  # no pass for the maximum
        assert not re.search(r"stablehlo\.(while|case|if|sort)|top_k", text)
