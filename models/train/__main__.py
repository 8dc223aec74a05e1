"""The command `python -m models.train --text FILE --out DIR`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from models.train.state import TrainConfig, add_options
from models.train.trainer import STATE_FILE, train


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m models.train",
        description="Train a byte-level Llama on a text file.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--text", type=Path, required=True, help="file to learn")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--about", default="", help="what the text is, for the model card")
    parser.add_argument("--resume", action="store_true", help="go on from the state in --out")
    add_options(parser, TrainConfig)
    args = vars(parser.parse_args(argv))
    path, out, about, resume = (args.pop(name) for name in ("text", "out", "about", "resume"))
    try:
        loss = train(TrainConfig(**args), path.read_bytes(), out, resume=resume, about=about)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        state = out / STATE_FILE
        what = f"continue with --resume from {state}" if state.is_file() else "no state was saved"
        print(f"interrupted: {what}", file=sys.stderr)
        return 130
    print(f"validation loss {loss:.4f} nats per byte, saved in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
