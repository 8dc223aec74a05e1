"""Runs the example of docs/server.md that serves a model of one's own, and asks it as a client.

Imports nothing of the checkout, so that .ci/wheel can run it beside the installed wheel:
`python own_server.py docs/server.md FOLDER`, with plain_model.py in the folder.
"""

import re
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

from openai import OpenAI


def answer_of_the_example(docs: Path, folder: Path) -> list[int]:
    """Return 8 greedy tokens after `messages`; the example must end with status 0 at SIGTERM."""
    blocks = re.findall(r"```python\n(.*?)```", docs.read_text(encoding="utf-8"), re.DOTALL)
    (code,) = (block for block in blocks if "serve(" in block)
    (folder / "own_model.py").write_text(code.replace("port=8000", "port=0"))
    command = [sys.executable, "own_model.py"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().split()[0]
            assert b"<html" in urlopen(url).read()
            with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
                answer = client.chat.completions.create(
                    model="own",
                    messages=[{"role": "user", "content": "Hi"}],
                    max_tokens=8,
                    temperature=0,
                    extra_body={"return_token_ids": True},
                )
            process.terminate()  # SIGINT is ignored in the background of a script
            assert process.wait(60) == 0
        finally:
            process.kill()
    return answer.choices[0].token_ids


if __name__ == "__main__":
    docs, folder = map(Path, sys.argv[1:])
    sys.path.insert(0, str(folder))
    from plain_model import PlainModel, greedy_tokens

    model = PlainModel(vocab_size=256)
    expected = greedy_tokens(model, model.init(0), list(b"user: Hi\nassistant: "), 8)
    assert answer_of_the_example(docs, folder) == expected
    print("served", expected)
