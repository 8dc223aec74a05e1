"""Sampling lowers for CUDA to a reduction or kernels, without loops, sorts or branches of XLA."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_paged.engine.sampling.logprobs import gather_logprobs
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


@pytest.mark.parametrize("mode", [SamplingMode(draws=True), SamplingMode(draws=True, filters=2)])
def test_kernels_read_masks_as_bits(mode):
    """Nothing else computes on all of the vocabulary."""
    arguments = _arguments(300, 5003)
    text = lower_for_cuda(functools.partial(_masked, mode=mode), *arguments).as_text()
    assert "300x157xi32" in text
    lines = [line for line in text.splitlines() if "300x5003x" in line or "5024x" in line]
    assert lines and all("custom_call" in x or "func" in x for x in lines), lines


def test_the_greedy_pass_unpacks_masks_as_it_reads_logits():
    compiled = jax.jit(functools.partial(_masked, mode=SamplingMode())).lower(*_arguments(30, 5003))
    entry = compiled.compile().as_text().split("ENTRY")[1]
    lines = [line for line in entry.splitlines() if re.search(r"= \w+\[30,(5003|157|5024)", line)]
    assert len(lines) == 2 and all("parameter(" in line for line in lines), lines


def test_the_best_tokens_take_no_constant_of_the_size_of_the_logits():
    """Kept by each program that returns log-probabilities, it would take 156 MB of 256 rows."""
    logits = jax.ShapeDtypeStruct((64, 50001), jnp.float32)
    tokens = jax.ShapeDtypeStruct((64,), jnp.int32)
    lowered = jax.jit(functools.partial(gather_logprobs, num_logprobs=20)).lower(logits, tokens)
    shapes = re.findall(r"= \w+\[([\d,]*)\]\S* constant\(", lowered.compile().as_text())
    assert all(math.prod(int(x) for x in one.split(",") if x) < 1000 for one in shapes)


def _masked(logits, rows, lens, masks, mode):
    return sample(logits, rows, lens, mode, masks=masks)


def _arguments(num_rows, vocab_size):
    rows = metadata(num_rows)
    logits = np.empty((num_rows, vocab_size), np.float32)
    masks = np.empty((num_rows, vocab_size // 32 + 1), np.int32)
    arguments = logits, rows, np.empty(num_rows, np.int32), masks
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
