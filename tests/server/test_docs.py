"""Examples of docs/server.md and of its tutorial, but for the address and the name of the model."""

import re
import shutil
from pathlib import Path

import pytest

from pallas_paged.server.app import app_of
from tests.support import plain_model

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs/server.md").read_text(encoding="utf-8")


@pytest.mark.slow  # CI runs it in its part `docs`
def test_the_example_of_the_docs(server):
    pytest.importorskip("openai")
    (code,) = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    names = {}
    code = code.replace("http://127.0.0.1:8000", server.url).replace('"shakespeare"', '"small"')
    exec(code, names)
    assert names["answer"].usage.completion_tokens == 60 and names["text"]
    assert names["streamed"] and len(names["vectors"]) == 2
    names["api"].close()


@pytest.mark.slow  # CI runs it in its parts `docs` and `wheel`
def test_the_tutorial_serves_its_own_model(tmp_path):
    pytest.importorskip("openai")
    from tests.support.own_server import answer_of_the_tutorial

    shutil.copy(plain_model.__file__, tmp_path / "plain_model.py")
    model = plain_model.PlainModel(vocab_size=256)
    prompt = list(b"user: Hi\nassistant: ")
    expected = plain_model.greedy_tokens(model, model.init(0), prompt, 8)
    assert answer_of_the_tutorial(ROOT / "docs/tutorials/serving.md", tmp_path) == expected


def test_the_docs_name_every_metric_and_endpoint(server):
    for name in server.metrics():
        name = re.sub(r"_(bucket|sum|count|created)$", "", name.partition("{")[0])
        assert name in DOCS
    for route in app_of(server.service).routes:
        path = route.path.partition("/{")[0]
        assert f"`GET {path}`" in DOCS or f"`POST {path}`" in DOCS or path.endswith((".css", ".js"))
