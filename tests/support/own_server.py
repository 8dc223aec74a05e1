"""Runs the programs of docs/tutorials/serving.md: a server of one's own model, and its client.

Imports nothing of the checkout, so that .ci/wheel can run it beside the installed wheel:
`python own_server.py serving.md FOLDER`, with plain_model.py in the folder.
"""

import re
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen


def answer_of_the_tutorial(page: Path, folder: Path) -> list[int]:
    """Return the tokens of the client's answer; the server must end with status 0 at SIGTERM."""
    server, client = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (folder / "own_model.py").write_text(server.replace("port=8000", "port=0"))
    command = [sys.executable, "own_model.py"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            url = line.split()[0]
            assert line.replace(url, "http://127.0.0.1:8000") in page.read_text(encoding="utf-8")
            assert b"<html" in urlopen(url).read()
            names = {}
            exec(client.replace("http://127.0.0.1:8000", url), names)
            assert names["text"]
            process.terminate()  # SIGINT is ignored in the background of a script
            assert process.wait(60) == 0
        finally:
            process.kill()
    return names["token_ids"]


if __name__ == "__main__":
    page, folder = map(Path, sys.argv[1:])
    sys.path.insert(0, str(folder))
    from plain_model import PlainModel, greedy_tokens

    model = PlainModel(vocab_size=256)
    expected = greedy_tokens(model, model.init(0), list(b"user: Hi\nassistant: "), 8)
    assert answer_of_the_tutorial(page, folder) == expected
    print("served", expected)
