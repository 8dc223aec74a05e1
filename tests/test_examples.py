"""The programs of `examples/` run in a small size, and do what their pages say.

The features that they show have tests of their own, so most are slow tests: CI runs these in its
part `docs`.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.attention_model import greedy_of_weights

ROOT = Path(__file__).parents[1]


def test_readme_names_each_example_and_none_is_longer_than_100_lines():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    paths = [path for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".ipynb")]
    named = {*re.findall(r"examples/[\w/]+\.\w+", readme)}
    assert {str(path.relative_to(ROOT)) for path in paths} == named
    for path in paths:
        if path.suffix == ".py":
            source = path.read_text(encoding="utf-8")
            assert f"python examples/{path.name}" in source and len(source.splitlines()) <= 100


def greedy(model, prompts, num_new, num_heads=4, num_kv_heads=2):
    """Tokens of `examples.flax_layer`, by dense attention."""

    @jax.jit
    def next_tokens(tokens):
        x = model.embed(tokens)
        for layer in model.layers:
            heads = layer.qkv(x).reshape(len(x), -1, layer.head_dim)
            q, k, v = jnp.split(heads, (num_heads, num_heads + num_kv_heads), axis=1)
            y = jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
            x = x + layer.out(y.reshape(x.shape))
        return model.embed.attend(x).argmax(-1)

    texts = []
    for prompt in prompts:
        tokens = np.zeros(max(map(len, prompts)) + num_new, np.int32)
        tokens[: len(prompt)] = prompt
        for end in range(len(prompt), len(prompt) + num_new):
            tokens[end] = next_tokens(tokens)[end - 1]
        texts.append(tokens[len(prompt) : len(prompt) + num_new].tolist())
    return texts


@pytest.mark.slow
def test_the_flax_model_decodes_what_dense_attention_does(capsys):
    pytest.importorskip("flax")
    from examples import flax_layer

    found = flax_layer.main()
    assert "new tokens of each sequence" in capsys.readouterr().out
    model = flax_layer.Model(2, 100, 64, rngs=flax_layer.nnx.Rngs(0))
    assert found == greedy(model, [[3, 1, 4, 1], [5, 9, 2]], 6)


@pytest.mark.slow
def test_the_equinox_samples_share_the_pages_of_their_prefix(capsys):
    pytest.importorskip("equinox")
    from examples import equinox_layer

    texts = np.array(equinox_layer.main())
    # Of 16 tokens the first 8 are one page for all three; the second page is each sample's own.
    assert capsys.readouterr().out == "three samples of 16 tokens in 4 pages\n"
    assert texts.shape == (3, 16) and (texts >= 0).all()
    assert (texts[:, :10] == texts[0, :10]).all() and len({tuple(x) for x in texts.tolist()}) == 3


@pytest.mark.usefixtures("exact_products")
@pytest.mark.cpu_budget(4)
def test_the_decode_loop_ends_at_the_end_token_and_where_pages_are_lacking(capsys):
    from examples import decode_loop

    found = decode_loop.main(max_tokens=30, num_pages=10)
    assert "of 10 pages are free" in capsys.readouterr().out
    weights = decode_loop.init()
    for prompt, text in zip(([3, 1, 4, 1], [5, 9, 2], [6, 5, 3, 5, 8], [9]), found, strict=True):
        assert text == greedy_of_weights(weights, prompt, len(text))
        assert decode_loop.END not in text[:-1]
    ends = [text[-1] == decode_loop.END for text in found]
    assert any(ends)
    # A row that got no page has filled those it had, all but the token that it chose last.
    assert any(not end and len(text) < 30 for end, text in zip(ends, found, strict=True))


@pytest.mark.slow
def test_the_prefix_example_shares_three_pages_of_three_sequences():
    from examples import prefix_sharing

    # Three full pages for all, and of each sequence one that is its own; or four for each of three.
    assert prefix_sharing.main() == (6, 12)


@pytest.mark.slow
def test_speculation_has_the_greedy_tokens_in_fewer_calls():
    from examples import speculation

    found, calls = speculation.main(num_tokens=30)
    assert calls < 29
    weights = speculation.init()
    for text in found:
        assert text[1:] == greedy_of_weights(weights, text[:1], 29)


@pytest.mark.slow
def test_rounds_of_reinforcement_learning_raise_the_reward():
    from examples import rl_round

    means = rl_round.main()
    assert means[-1] > means[0] + 0.1


@pytest.mark.slow
def test_the_served_model_answers_a_chat(monkeypatch):
    pytest.importorskip("starlette")
    from starlette.testclient import TestClient

    from examples import serve_own_model
    from pallas_paged.server import create_app

    answers = []

    def serve(*args, port, **options):  # the app of `serve`, without a socket
        with TestClient(create_app(*args, **options)) as client:
            chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
            chat |= {"model": "own", "temperature": 0, "return_token_ids": True}
            answers.append(client.post("/v1/chat/completions", json=chat).json())

    monkeypatch.setattr(serve_own_model, "serve", serve)
    serve_own_model.main()
    (answer,) = answers[0]["choices"]
    prompt, weights = list(b"user: Hi\nassistant: "), serve_own_model.Model().init()
    assert answer["token_ids"] == greedy_of_weights(weights, prompt, 8)
    assert answer["message"]["content"] == serve_own_model.Bytes().decode(answer["token_ids"])


@pytest.mark.slow
def test_the_agent_calls_tools_and_answers():
    openai = pytest.importorskip("openai")
    pytest.importorskip("llguidance")
    from starlette.testclient import TestClient

    from examples import agent_loop
    from models.decoder import engine_model, load_checkpoint
    from models.text import Tokenizer, chat_defaults, read_chat_template
    from pallas_paged.engine import AsyncEngine, Engine, EngineConfig
    from pallas_paged.engine.sampling_params import SamplingMode
    from pallas_paged.server import create_app
    from tests.support.engine_calls import use_modes

    folder = ROOT / "models" / "checkpoints" / "shakespeare"
    model, weights = engine_model(load_checkpoint(folder)[0])
    config = EngineConfig(num_pages=64, max_num_seqs=1, max_num_batched_tokens=64)
    tokenizer, template = Tokenizer(folder), read_chat_template(folder)
    engine = Engine(model, weights, config=config, tokenizer=tokenizer)
    use_modes(engine, [SamplingMode(masks=True)])
    defaults = chat_defaults(folder, model, tokenizer, template)
    app = create_app(AsyncEngine(engine), chat_template=template, chat_defaults=defaults)
    with TestClient(app) as client:
        api = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", http_client=client)
        called, answer = agent_loop.main(api)
    assert {*called} <= {*agent_loop.TOOLS} and len({*called}) == len(called)
    assert answer["city"] in agent_loop.CITIES and answer["verdict"] in ("Go!", "Stay at home.")


@pytest.mark.cpu_budget(5)  # a program for one device and one for all
def test_each_device_has_its_part_of_the_pages():
    from examples import several_gpus

    number, on_one, on_each = several_gpus.main(num_steps=2)
    assert number == min(8, 2 ** (len(jax.devices()).bit_length() - 1))
    assert on_each == on_one // number


@pytest.mark.slow
def test_int8_pages_take_half_the_memory_and_round_more():
    from examples import int8_kv

    found = int8_kv.main(length=64)
    sizes, errors = zip(*(found[dtype] for dtype in ("float32", "bfloat16", "int8")), strict=True)
    assert sizes == (2048, 1024, 528)  # of a token: 2 heads of 128 for K and for V; 4 scales
    assert 0 == errors[0] < errors[1] < errors[2] < 0.02
