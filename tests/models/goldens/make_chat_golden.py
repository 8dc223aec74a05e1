"""Make chat/golden.json beside this file: conversations as transformers renders them.

    python -m venv hf && hf/bin/pip install -e ".[models]" transformers==5.24.0
    PYTHONPATH=. hf/bin/python tests/models/goldens/make_chat_golden.py

The file has for each template, conversation and set of options the token ids of the prompt, or null
where the template refuses it.
"""

import json
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

from tests.support.chat_folders import (
    CONVERSATIONS,
    NAMES,
    OPTIONS,
    TEMPLATES,
    save_chat_folder,
)


def main() -> None:
    golden = {}
    for name in NAMES:
        with tempfile.TemporaryDirectory() as folder:
            save_chat_folder(Path(folder), name)
            tokenizer = AutoTokenizer.from_pretrained(folder)
        for title, messages in CONVERSATIONS.items():
            for kind, options in OPTIONS.items():
                try:
                    options = {"add_generation_prompt": True} | options
                    ids = tokenizer.apply_chat_template(messages, **options)["input_ids"]
                except Exception as error:
                    print(f"{name}, {title}, {kind}: {error}")
                    ids = None
                golden[f"{name}, {title}, {kind}"] = ids
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(ids)}" for key, ids in golden.items())
    (TEMPLATES / "golden.json").write_text("{\n" + lines + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
