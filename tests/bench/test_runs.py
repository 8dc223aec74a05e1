"""Dry runs of the benches: right results, and tables of them."""

import jax
import pytest

from bench import between_attentions, experts
from bench.decode import __main__ as decode
from bench.decode import cascade, latents, layouts, mla
from bench.measuring import calls
from bench.parallel import __main__ as parallel
from bench.parallel import calls as parallel_calls
from bench.prefill import __main__ as prefill
from bench.prefill import mla as mla_prompts
from bench.serving import long_prompt, speculation, start, structured, traces, trainer
from bench.serving.requests import nano_vllm_trace
from bench.steps import sampling
from tests.bench.fakes import by_column, rows
from tests.support.marks import slow

CALLS = ["--shapes", "tiny", "--implementation", "xla", "--iterations", "3"]
two_devices = pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
on_a_clock = pytest.mark.usefixtures("short_chains", "clock")


@on_a_clock
def test_decode(dry_run) -> None:
    run, tables = dry_run(decode, *CALLS, "--no-peers", "--kv-dtypes", "bf16")
    assert run["meta"]["command"].startswith("python -m bench.decode --shapes tiny --impl")
    [shape], [option] = run["shapes"], run["options"]
    ours = shape["results"]["ours"]
    assert ours["status"] == "ok" and ours["relative_l2"] < 5e-3
    assert ours["kernel_us"] == {"median": 4.0, "p10": pytest.approx(3.6), "p90": 4.4}
    assert ours["wall_us"]["median"] == 4.5 and ours["kernels_per_run"] == 3
    assert ours["kernels"] == {"a": 3.0, "b": 1.0}
    assert option["results"]["ours"]["relative_l2"] < 5e-3 and option["base"]["name"] == "tiny"
    assert "- read only: 0.250 times pallas_paged in the geometric mean of 1 shapes" in tables
    assert [row["by"] for row in by_column(tables)] == [["pallas_paged: xla"], ["read only"]]


@on_a_clock
@pytest.mark.parametrize("bench", [decode, *slow([prefill])])
def test_int8_and_fp8_without_bf16(bench, dry_run) -> None:
    run, tables = dry_run(bench, *CALLS, "--no-peers", "--kv-dtypes", "int8", "fp8")
    assert run["shapes"] == [] and [x["name"] for x in run["one_byte"]] == ["tiny int8", "tiny fp8"]
    for found in run["one_byte"]:
        ours = found["results"]["ours"]
        assert ours["status"] == "ok" and ours["relative_l2"] < 5e-3
    times = [row["kernel us (p10 to p90)"][0] for row in by_column(tables)]
    assert times.count("4.0 (3.6 to 4.4)") == 2


@on_a_clock
def test_prefill(dry_run) -> None:
    [shape] = dry_run(prefill, *CALLS, "--kv-dtypes", "bf16")[0]["shapes"]
    ours, mha = (shape["results"][name] for name in ("ours", "mha"))
    assert shape["num_queries"] == 9 and ours["relative_l2"] < 5e-3
    assert ours["kernel_us"]["median"] == 4.0 and "one length" in mha["reason"]


@on_a_clock
@pytest.mark.slow
def test_prompts_of_latents_in_both_forms(dry_run) -> None:
    run, tables = dry_run(mla_prompts, *CALLS)
    (shape,) = run["shapes"]
    assert shape["num_flops"] == 2 * 4 * (12 + 8 + 12) * ((4 + 5) * 5 + (30 + 31 + 32) + 17)
    for result in shape["results"].values():
        assert result["status"] == "ok" and result["relative_l2"] < 1e-2
    assert [row["by"] for row in by_column(tables)] == [["absorbed"], ["by heads"]]


@on_a_clock
def test_cascade(dry_run) -> None:
    run, tables = dry_run(cascade, *CALLS)
    (shape,) = run["shapes"]
    for result in shape["results"].values():
        assert result["status"] == "ok" and result["relative_l2"] < 5e-3
        assert result["kernel_us"]["median"] == 4.0
    _, paged, floor = by_column(tables)
    assert paged["times the first"] == ["1.00"] and floor["times the first"] == ["0.25"]


@on_a_clock
@pytest.mark.parametrize("dtype", ["bf16", *slow(["fp8"])])
def test_mla(dtype, dry_run) -> None:
    run, tables = dry_run(mla, *CALLS, "--kv-dtypes", dtype)
    (shape,) = run["shapes"]
    ours, limit = shape["results"]["ours"], shape["results"]["limit"]["kernel_us"]["median"]
    assert ours["status"] == "ok" and ours["relative_l2"] < 5e-3
    element_bytes = 24 + 4 if dtype == "fp8" else 2 * 24  # fp8 has a scale besides
    assert shape["num_bytes"] == sum(latents.TINY.seq_lens) * element_bytes
    pairs = (4 + 5) + (30 + 31 + 32) + 17
    assert shape["num_flops"] == 2 * 4 * (24 + 16) * pairs
    # The operations take longer, since the floor reads 1 GiB in 1 us here.
    assert limit == pytest.approx(shape["num_flops"] / calls.PEAK_TFLOPS / 1e6)
    assert [row["by"] for row in by_column(tables)] == [["pallas_paged: xla"], ["limit"]]


@on_a_clock
@pytest.mark.slow
def test_experts(dry_run) -> None:
    run, tables = dry_run(experts, *CALLS, "--peers")
    (shape,) = run["shapes"]
    tiny = experts.TINY
    assert shape["num_flops"] == 6 * tiny.num_tokens * tiny.k * tiny.size * tiny.features
    assert shape["num_bytes"] == int(shape["experts_hit"] * 6 * tiny.size * tiny.features)
    # Dense products take 8 us of this clock, which is longer than the read of the weights.
    assert shape["limit_us"] == 8.0 and tiny.k < shape["experts_hit"] < tiny.num_experts
    result = shape["results"]["xla"]
    assert result["status"] == "ok" and result["relative_l2"] < 5e-3
    assert result["kernel_us"]["median"] == pytest.approx(8 / tiny.num_calls)
    assert [row["by"] for row in by_column(tables)] == [["pallas_paged xla"]]


@on_a_clock
@pytest.mark.parametrize("names", [("HPND", "NH2D"), *slow([(layouts.LAYOUTS,)])], ids=" ".join)
def test_layouts(names, dry_run) -> None:
    run, tables = dry_run(layouts, *CALLS, "--layouts", *names)
    (shape,) = run["shapes"]
    assert list(shape["layouts"]) == list(names)
    for results in shape["layouts"].values():
        assert results["xla"]["status"] == "ok" and results["xla"]["relative_l2"] < 5e-3
    assert [row["by"] for row in by_column(tables)] == [[name] for name in names]


WAYS = {"context": [(1, "one pool"), (2, "context")], "sums": [(2, "default")]}
WAYS["attention"] = [(1, "jit"), (2, "jit"), (2, "shard_map")]
TWO = ["--tiny", "--devices", "1", "2", "--iterations", "1"]


@two_devices
@pytest.mark.parametrize("part", slow(WAYS))
def test_calls_on_one_device_and_on_two(part, dry_run, monkeypatch) -> None:
    monkeypatch.setattr(parallel_calls, "SUMS", ((2, 32),))
    run, tables = dry_run(parallel, *TWO, "--parts", part)
    found = [(one["devices"], one["way"]) for one in run[part]]
    assert found[: len(WAYS[part])] == WAYS[part]
    head, *body = rows(tables)
    assert len(body) == len(found) and head[1:3] == ["GPUs", "way"]
    assert part == "sums" or all(one["relative_l2"] < 1e-2 for one in run[part])


@two_devices
@pytest.mark.slow  # compiles the steps of engines
def test_steps_and_serving_on_one_device_and_on_two() -> None:
    sizes = ["--shapes", "tiny", "--serving-shape", "tiny", "--rows", "2", "--length", "16"]
    sizes += ["--steps", "4", "--requests", "4", "--max-len", "16", "--kv-gib", "0.001"]
    sizes += ["--max-num-batched-tokens", "32"]
    run = parallel.main([*TWO, "--parts", "steps", "serving", *sizes])
    assert [(one["model"], one["devices"]) for one in run["steps"]] == [("tiny", 1), ("tiny", 2)]
    assert all(one["wall_us"] > 0 for one in run["steps"])
    found = [(one["tensor_parallel_size"], one["data_parallel_size"]) for one in run["serving"]]
    assert found == [(1, 1), (2, 1), (1, 2)]


@pytest.mark.slow  # compiles the steps of an engine
def test_long_prompts_are_served_in_chunks_without_compiling(dry_run) -> None:
    sizes = ["--lengths", "40", "--max-num-batched-tokens", "16", "--runs", "2"]
    run, tables = dry_run(long_prompt, "--shape", "tiny", *sizes)
    [one] = run["results"]
    assert len(one["seconds"]) == 2 and min(one["seconds"]) > 0
    assert one["num_steps"] == 3 and one["compilations"] == 0
    assert "| 40 | 3 |" in tables


SPECULATION = ["--shape", "tiny", "--num-seqs", "2", "--max-tokens", "40", "--runs", "1"]
SPECULATION += ["--max-num-batched-tokens", "128"]


@pytest.mark.slow  # compiles the steps of five engines
def test_drafts_of_an_edit_are_right_more_often_than_those_of_random_tokens(dry_run) -> None:
    """That the tokens are those of the traces is checked by the bench itself."""
    run, tables = dry_run(speculation, *SPECULATION, "--trace", "edit", "random")
    edit, random = (one["always"] for one in run["results"])
    assert random["num_accepted"] < random["num_drafts"] / 10
    assert edit["num_accepted"] > edit["num_drafts"] / 3 and edit["num_steps"] < 30
    assert all(one["without"]["num_steps"] >= 40 for one in run["results"])
    assert [row["trace"] for row in by_column(tables)] == [["edit"], ["random"]]
    ties = run["near_ties"]
    assert ties["places"] == [] and ties["num_accepted"] > 0.9 * ties["num_drafts"] > 20
    assert "Near ties in float32" in tables and "0 of 2 rows of 40 tokens have another" in tables


@pytest.mark.slow  # compiles the steps of three engines
def test_drafts_of_a_model_are_right_as_often_as_was_asked(dry_run) -> None:
    draft = ["--draft-shape", "tiny", "--draft-percent", "75"]
    run, tables = dry_run(speculation, *SPECULATION, *draft, "--trace", "quotes", "--no-near-ties")
    [one] = run["results"]
    accepted, drafted = one["always"]["num_accepted"], one["always"]["num_drafts"]
    assert 0.3 < accepted / drafted < 0.75  # those behind a wrong one are wrong too
    assert "by a tiny, 75% of them the text's" in tables and "Near ties" not in tables


def test_traces_are_of_different_files_and_repeat_their_prompts() -> None:
    for kind in traces.KINDS:
        found = traces.traces_of(kind, 3, 200)
        assert [len(one.answer) for one in found] == [200] * 3
        assert len({"".join(one.prompt) for one in found}) == 3
        assert found == traces.traces_of(kind, 3, 200)
        prompts, texts = traces.token_ids(found, 3 * 256, 500)
        assert [x // 256 for row in texts for x in row] == [0] * 500 + [1] * 500 + [2] * 500
        assert all(one == [*row[: len(one)]] for one, row in zip(prompts, texts, strict=True))
    [edit] = traces.traces_of("edit", 1, 200)
    assert "new_" in "".join(edit.answer) and "log.debug(" in "".join(edit.answer)
    with pytest.raises(ValueError, match="must be at most 20, its share of vocab_size=20"):
        traces.token_ids([edit], 20, 500)
    with pytest.raises(ValueError, match="must have at most length=300"):
        traces.token_ids([edit], 256, 300)


@pytest.mark.slow  # compiles the steps of two engines
def test_rows_with_grammars_decode_side_by_side(dry_run) -> None:
    pytest.importorskip("llguidance", reason="needs the extra [structured]")
    sizes = ["--num-seqs", "4", "--max-tokens", "32", "--runs", "1"]
    cases = ["--cases", "all allowed", "grammars"]
    run, tables = dry_run(structured, "--shape", "tiny", *sizes, *cases)
    for one in run["results"]:
        [times] = one["runs"]
        assert 0 < times["masks_s"] < times["seconds"] and times["num_steps"] >= 12
        assert times["num_tokens"] >= 3 * times["num_steps"]
    assert "| grammars: a JSON schema for each row |" in tables


def test_workload_is_that_of_nano_vllm() -> None:
    trace = nano_vllm_trace(256, min_len=100, max_len=1024, vocab_size=151936)
    assert all(100 <= len(one.prompt) <= 1024 for one in trace)
    assert sum(one.num_tokens for one in trace) == 133966  # as nano-vllm reports
    assert max(one.prompt.max() for one in trace) <= 10000
    assert all(one.params.temperature == 0.6 and one.params.ignore_eos for one in trace)


START = ["--shape", "tiny", "--max-model-len", "24", "--max-num-seqs", "4"]
START += ["--kv-gib", "0.001", "--max-num-batched-tokens", "16"]


@on_a_clock
@pytest.mark.slow
def test_ways_to_sample(dry_run) -> None:
    cases = ["greedy", "temperature", "one row with top_p, others greedy"]
    sizes = ["--rows", "1", "2", "--vocab", "40", "--iterations", "1"]
    run, tables = dry_run(sampling, *sizes, "--cases", *cases)
    assert [(one["num_rows"], one["case"]) for one in run["results"]] == [
        *((1, case) for case in cases[:2]), *((2, case) for case in cases)
    ]  # fmt: skip
    assert {row["over greedy"][0] for row in by_column(tables)} == {"+0.0"}


@pytest.mark.slow  # compiles the steps of an engine in two processes
def test_engine_starts_cold_and_then_warm(dry_run) -> None:
    run, tables = dry_run(start, *START)
    cold, warm = run["starts"]["cold"], run["starts"]["warm"]
    assert cold["from_cache"] == 0 < warm["from_cache"] == warm["compilations"]
    for found in (cold, warm):
        assert found["parts_s"]["imports"] > 0
        assert found["ready_s"] == pytest.approx(sum(found["parts_s"].values()))
    assert {"ready after s", "- warm-up"} <= {row[0] for row in rows(tables)}


@pytest.mark.slow  # compiles the steps of an engine
def test_trainer(dry_run, exact_products) -> None:
    args = ["--shape", "tiny", "--num-seqs", "2", "--prompt-len", "5", "--max-tokens", "6"]
    run, tables = dry_run(trainer, *args, "--max-num-batched-tokens", "16")
    for one in run["results"]:
        assert one["compilations"] == 0 or one["case"] == "score, the first time"
    (score,) = (one for one in run["results"] if one["case"] == "score")
    assert score["max_error"] < 1e-4 and score["num_tokens"] == 22
    assert [row[0] for row in rows(tables)].count("generate after it") == 2


@on_a_clock
def test_layers_between_attentions(dry_run) -> None:
    run, tables = dry_run(between_attentions, *CALLS, "--rows", "1", "3")
    tiny = between_attentions.TINY
    assert [x["name"] for x in run["shapes"]] == [f"tiny {n} rows 256/128/256/384" for n in (1, 3)]
    for shape in run["shapes"]:
        assert shape["num_bytes"] == 2 * 128 * (256 + 3 * 256 + 384) == tiny.num_bytes
        result = shape["results"]["xla"]
        assert result["status"] == "ok" and result["relative_l2"] < 1e-2
        assert result["kernel_us"]["median"] == pytest.approx(8 / tiny.num_layers)
    assert [row["by"] for row in by_column(tables)] == [["XLA"]] * 2
