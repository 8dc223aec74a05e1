"""The examples of README and docs run as they stand and print what stands below them.

Those that take long are slow tests, which CI runs in its part `docs`.
"""

import json
import re
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

import pallas_paged as pp
from docs.site_hooks import markdown_of
from pallas_paged.engine import Engine
from pallas_paged.engine.sampling_params import MAX_LOGPROBS, SamplingMode
from tests.support import experts_oracle
from tests.support.attention_cases import TOLERANCE
from tests.support.attention_model import greedy_of_weights
from tests.support.attention_oracle import attend, relative_error
from tests.support.engine_calls import use_modes
from tests.support.plain_model import greedy_tokens

ROOT = Path(__file__).parents[1]
EXAMPLE = re.compile(r"```python\n(.*?)```\n(?:\n?```text\n(.*?)```\n)?", re.DOTALL)


def text_of(name: str) -> str:
    text = (ROOT / name).read_text(encoding="utf-8")
    return markdown_of(text) if name.endswith(".ipynb") else text


README = text_of("README.md")


def run_examples(text: str, names: dict, capsys) -> int:
    compared = 0
    for code, output in EXAMPLE.findall(text):
        exec(compile(code, "example", "exec", dont_inherit=True), names)
        printed = capsys.readouterr().out
        assert printed == output, code
        compared += bool(output)
    return compared


@pytest.fixture
def names(monkeypatch):
    """The namespace that all examples share; paths in them are relative to the checkout."""
    monkeypatch.chdir(ROOT)
    module = types.ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", module)  # dataclasses look their module up
    return vars(module)


@pytest.fixture
def one_mode(monkeypatch):
    """Engines have one mode for all that examples ask for, and so a fourth of the programs."""
    mode = SamplingMode(prompt_logprobs=0, logprobs=MAX_LOGPROBS, draws=True)

    def engine(*args, **options):
        made = Engine(*args, **options)
        use_modes(made, [mode])
        return made

    monkeypatch.setattr("pallas_paged.engine.Engine", engine)


def test_example_of_the_first_page_prints_the_stated_shapes(names, capsys):
    assert run_examples(text_of("docs/index.md"), names, capsys) == 1


@pytest.mark.slow  # all functions, one program each
def test_examples_of_the_attention_functions_equal_an_oracle(names, capsys):
    assert run_examples(README.partition("## Serving a model")[0], names, capsys) == 1
    functions, _, options = text_of("docs/attention.md").partition("## Functions")
    assert run_examples(functions, names, capsys) == 1
    pp.check_page_table(names["table"])
    given = (names[name] for name in ("q", "k", "v", "slots", "cu_q_lens"))
    q, k, v, slots, cu_q_lens = map(np.asarray, given)
    before = arrays_of(names["layer"], names["table"])
    num_free = int(names["table"].num_free)
    assert_close(names["out"], attend(q, *before, cu_q_lens, sliding_window=64)[0])

    assert run_examples(options, names, capsys) == 0
    pp.check_page_table(names["table"])
    after = arrays_of(names["layer"], names["table"])
    assert int(names["smaller"].num_free) == num_free + 4  # one page of each row

    def pages_of(tokens):
        """The pages of a pool that was empty before the tokens were written."""
        pages = np.zeros_like(before[0])
        pages.reshape(len(pages), -1, q.shape[-1])[:, slots] = tokens.swapaxes(0, 1)
        return pages

    written = pages_of(k), pages_of(v)
    exact, _ = attend(q, *written, *before[2:], cu_q_lens)
    assert 0 < relative_error(names["rounded"], exact) <= 0.02
    assert_close(names["out_of_parts"], attend(q, *written, *after[2:], cu_q_lens)[0])

    trees, of_three = np.asarray(names["trees"]), np.arange(0, 13, 3)
    assert_close(names["verified"], attend(q[:12], *before, of_three, tree_mask=trees)[0])
    assert names["ok"].all() and (after[2][:3, :6] == after[2][0, :6]).all()
    plain, _ = attend(q[:4], *after)
    for name in ("cascaded", "invariant"):
        assert_close(names[name], plain)
    for gradient, x in (("of_q", q), ("of_k", k), ("of_v", v)):
        assert names[gradient].shape == x.shape


def arrays_of(layer, table):
    """The pages `[num_kv_heads, num_pages, page_size, head_dim]` of a layer, and the table."""
    pages = (np.ascontiguousarray(np.moveaxis(x, 2, 0)) for x in (layer.k_pages, layer.v_pages))
    return *pages, np.asarray(table.block_tables), np.asarray(table.seq_lens)


def assert_close(actual, expected):
    assert relative_error(actual, expected) <= TOLERANCE["float32"]


@pytest.mark.usefixtures("exact_products")
def test_examples_of_experts_equal_an_oracle(names, capsys):
    assert run_examples(text_of("docs/experts.md"), names, capsys) == 2
    x, gate_up, down = (np.asarray(names[name]) for name in ("x", "gate_up", "down"))
    scores = np.asarray(jax.nn.softmax(x @ np.asarray(names["router"]).T))
    experts = np.argsort(-scores, axis=1)[:, :2]
    experts[4:] = -1  # padding
    weights = np.take_along_axis(scores, np.maximum(experts, 0), axis=1)
    weights /= weights.sum(axis=1, keepdims=True)
    expected = experts_oracle.fused_experts(x, gate_up, down, experts, weights)
    assert relative_error(names["out"], expected) < 1e-5


def test_example_of_latents_equals_an_oracle(names, capsys):
    assert run_examples(text_of("docs/mla.md"), names, capsys) == 2
    layer, table = names["layer"], names["table"]
    pages = np.asarray(layer.k_pages).transpose(2, 0, 1, 3)
    q = np.concatenate([names["absorbed"], names["arrays"][1]], axis=-1)
    at = pages, pages[..., :512], np.asarray(table.block_tables), np.asarray(table.seq_lens)
    expected, lse = attend(q, *at, sm_scale=192**-0.5)
    for name in ("latents", "of_devices"):
        assert_close(names[name], expected)
    np.testing.assert_allclose(names["lse"], lse, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("one_mode")
@pytest.mark.slow  # serves the demo model
def test_engine_examples_print_the_stated_texts_and_serve_many_clients(names, capsys):
    assert run_examples(README.partition("## Serving a model")[2], names, capsys) == 1
    run_examples(text_of("docs/engine.md"), names, capsys)
    engine, prompts = names["engine"], [*names["prompts"], "JULIET:\n"]
    assert engine.idle and names["text"].strip() and len(names["both"]) == 2
    # Clients of `AsyncEngine` got what the engine itself returns.
    outputs = engine.generate(prompts, names["greedy"], progress=False)
    texts = [output.outputs[0].text for output in outputs]
    assert names["words"] == [text.split()[:5] for text in texts[:2]]
    assert names["text_of_thread"] == texts[2]
    expected = engine.score([[1, 2, 3]], [[4, 5]])
    np.testing.assert_allclose(names["scores"], expected, atol=1e-4)
    engine.check()


@pytest.mark.parametrize("name", ["start", "engine"])
def test_notebooks_have_no_outputs(name):
    notebook = json.loads((ROOT / f"examples/notebooks/{name}.ipynb").read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.mark.cpu_budget(6)
def test_tutorial_of_a_decode_loop_ends_with_the_tokens_of_a_larger_pool(names, capsys):
    assert run_examples(text_of("examples/notebooks/start.ipynb"), names, capsys) == 4
    for prompt, text, new in zip(names["prompts"], names["texts"], names["more"], strict=True):
        text = [*text, *(token for token in new[1:].tolist() if token >= 0)]
        assert text == greedy_of_weights(names["weights"], prompt, len(text))
    pp.check_page_table(names["cache"].table)


@pytest.mark.usefixtures("one_mode")
@pytest.mark.slow
def test_tutorial_of_the_engine_serves_a_plain_model(names, capsys):
    assert run_examples(text_of("examples/notebooks/engine.ipynb"), names, capsys) == 4
    model, params = names["model"], names["params"]
    for output in names["outputs"]:
        expected = greedy_tokens(model, params, output.prompt_token_ids, 8)
        assert output.outputs[0].token_ids == expected
    assert names["engine"].idle


@pytest.mark.usefixtures("exact_products", "one_mode")
@pytest.mark.slow  # serves and trains
def test_tutorial_of_reinforcement_learning_trains_the_demo_model(names, capsys):
    assert run_examples(text_of("docs/tutorials/rl.md"), names, capsys) == 1
    rollouts, lens = names["rollouts"], names["rollouts"].lens
    assert rollouts.mask.sum() == lens.sum() > 0
    completion_logprobs = jax.jit(names["completion_logprobs"])
    by_loss = completion_logprobs(names["old_params"], rollouts)
    np.testing.assert_allclose(rollouts.logprobs, by_loss, atol=1e-4)
    np.testing.assert_allclose(names["old_logprobs"], by_loss, atol=1e-4)
    assert not np.allclose(completion_logprobs(names["params"], rollouts), by_loss, atol=1e-2)


def test_example_of_a_chat_template_prints_the_stated_prompt(names, capsys):
    assert run_examples(text_of("docs/models.md"), names, capsys) == 1


def test_plain_model_of_the_tutorials_is_that_of_the_tests():
    source = text_of("tests/support/plain_model.py")
    model, _ = EXAMPLE.findall(text_of("examples/notebooks/engine.ipynb"))[0]
    (dense,) = re.findall(r"(?s)```python\n(def dense.*?)```", text_of("docs/tutorials/rl.md"))
    assert source.startswith(model) and "\n" + dense.strip() + "\n" in source


def test_readme_is_one_page_and_its_quick_start_two_commands_that_show_progress():
    assert len(README.splitlines()) <= 150
    section = README.split("## Quick start")[1].split("\n## ")[0]
    run, test = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    assert "-m models.generate --prompt" in run and "-m pytest" in test
    assert " -q" not in run + test


def test_changelog_and_citation_have_the_version_of_the_package():
    version = re.search(r'^version = "(.*)"$', text_of("pyproject.toml"), re.MULTILINE)[1]
    newest = re.search(r"^## ([\d.]+|Unreleased)", text_of("CHANGELOG.md"), re.MULTILINE)[1]
    assert newest in (version, "Unreleased")
    assert f"\nversion: {version}\n" in text_of("CITATION.cff")
