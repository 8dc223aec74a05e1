"""Bytes that a decode step on many devices reads and sends: on paper and in programs."""

from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bench.parallel import programs as parallel_programs
from bench.parallel.model import Collective, Rates, decode_step
from bench.parallel.programs import compiled_collectives, read_collectives
from bench.serving.models import SHAPES
from models.decoder import Decoder
from models.decoder.sharding import config_on, param_specs
from tests.bench.fakes import by_column
from tests.support.marks import slow

TINY = replace(SHAPES["tiny"].config, num_q_heads=8)


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_on_paper_are_those_of_the_decoder(tensor, tied):
    config = replace(TINY, qkv_bias=True, o_bias=True, qk_norm=True, tie_word_embeddings=tied)
    make = partial(Decoder, config_on(config, tensor), dtype=jnp.float32)
    params = nnx.state(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
    if not tied:  # a step reads a few vectors of these
        del params["embed_tokens"]
    num_bytes = 0
    for x, spec in zip(*map(jax.tree.leaves, (params, param_specs(params))), strict=True):
        num_bytes += x.size * 4 // (tensor if "tensor" in spec else 1)
    step = decode_step(config, num_seqs=1, length=1, tensor=tensor, itemsize=4)
    assert step.weight_bytes == num_bytes


def test_kv_bytes_are_divided_among_the_devices_that_have_kv_heads_or_pages():
    sizes = dict(num_seqs=3, length=160)
    all_bytes = 3 * 160 * 2 * 2 * 2 * 16 * 2  # two layers, K and V of two heads of 16
    for more, part in (
        (dict(), 1),
        (dict(tensor=2), 1 / 2),
        (dict(tensor=8), 1 / 2),  # four copies of each head
        (dict(tensor=2, context=4), 1 / 8),
        (dict(kv_itemsize=1), (16 + 4) / 32),
    ):
        assert decode_step(TINY, **sizes, **more).kv_bytes == all_bytes * part, more


def test_times_on_one_host_and_on_two():
    rates = Rates(read=1000.0, link=100.0, network=10.0, collective_us=5.0)
    us = lambda *sizes: Collective(*sizes).us(rates)  # noqa: E731
    assert us("all-reduce", 800_000, 8) == pytest.approx(5 + 2 * 7 / 8 * 8)
    assert us("all-gather", 800_000, 8) == pytest.approx(5 + 7 / 8 * 8)
    # Each device of a host exchanges an eighth with its peer on the other host.
    assert us("all-reduce", 800_000, 16, 2) == pytest.approx(5 + 2 * 7 / 8 * 8 + 2 / 2 * 10)
    assert us("all-gather", 800_000, 2, 2) == pytest.approx(5 + 1 / 2 * 80)
    assert us("all-to-all", 800_000, 4, 2) == pytest.approx(5 + 1 / 4 * 8 + 1 / 2 * 80)
    step = decode_step(TINY, num_seqs=1, length=16, tensor=2, context=2)
    read = (step.weight_bytes + step.kv_bytes) / 1e6
    sent = sum(count * one.us(rates) for one, count in step.collectives.items())
    assert step.limit_us(rates) == pytest.approx(read + sent)


@pytest.mark.parametrize(
    ("tensor", "context", "hosts"),
    [(8, 1, (1,)), (16, 1, (2,)), (8, 2, (2, 2)), (4, 2, (1, 1)), (4, 4, (2, 2)), (16, 2, (4, 2))],
)
def test_collectives_span_the_hosts_of_their_devices(tensor, context, hosts):
    config = SHAPES["qwen3-32b"].config
    step = decode_step(config, num_seqs=1, length=1, tensor=tensor, context=context)
    spans = {one.kind: one.num_hosts for one in step.collectives}
    assert spans["all-reduce"] == spans["all-gather"] == hosts[0]
    assert ("all-to-all" in spans) == (context > 1)
    assert spans.get("all-to-all", hosts[-1]) == hosts[-1]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads programs for CPUs")
@pytest.mark.parametrize(("tensor", "context"), [(8, 1), (2, 2), *slow([(1, 1), (2, 1), (1, 4)])])
def test_programs_have_the_collectives_of_the_paper(tensor, context):
    sizes = dict(num_seqs=3, length=100, tensor=tensor, context=context)
    paper = decode_step(TINY, itemsize=4, **sizes)
    assert compiled_collectives(TINY, **sizes) == paper.collectives


def test_collectives_are_read_from_the_text_of_programs():
    found = read_collectives(
        """
  %a = f32[4,8]{0,1} all-gather(%x), replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={1}
  %b = bf16[4,8]{1,0} all-reduce(%x), replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add
  %c = (f32[2]{0}, s8[3]{0}) all-reduce(%x, %y), replica_groups={{0,1},{2,3}}, to_apply=%add
  %d = (f32[2]{0}, f32[16]{0}) all-gather-start(%x), replica_groups={}, dimensions={0}
  %e = f32[16]{0} all-gather-done(%d)
  ROOT %f = f32[] add(%x, %all-reduce.1)
        """,
        8,
    )
    sums = [Collective("all-reduce", 64, 4), Collective("all-reduce", 11, 2)]
    gathers = [Collective("all-gather", 128, 4), Collective("all-gather", 64, 8)]
    assert found == Counter(sums + gathers)


def test_the_bench_compares_paper_and_programs(dry_run, monkeypatch):
    def compiled(config, *, tensor, context, **sizes):
        one_device = {} if tensor == 2 else {"tensor": tensor, "context": context}
        return decode_step(config, itemsize=4, **sizes, **one_device).collectives

    monkeypatch.setattr(parallel_programs, "compiled_collectives", compiled)
    monkeypatch.setattr(jax, "devices", lambda: [jax.local_devices()[0]] * 4)
    args = ["--shapes", "tiny", "--rows", "2", "--length", "20"]
    run, tables = dry_run(parallel_programs, *args)
    found = {row["tensor x context"][0]: row["program"][0] for row in by_column(tables)}
    # 8 and 16 devices can't share four heads.
    assert found == {"1 x 1": "the same", "2 x 1": "DIFFERENT", "4 x 1": "the same"} | {
        "4 x 2": "-", "1 x 2": "the same", "1 x 8": "-",
    }  # fmt: skip
    one, two, *_ = run["results"]
    assert one["limit_us"] == one["read_us"] and not one["collectives"]
    latency = 7 * 20.0  # five sums and two gathers
    assert np.isclose(two["with_latency_us"] - two["limit_us"], latency)
