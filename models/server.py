"""The command `python -m models.server`: its options, and how it ends."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from models.command.options import (
    add_engine_options,
    add_model_options,
    add_template_option,
    status_of,
)
from models.command.signals import Signals

_API_KEY = "PALLAS_PAGED_API_KEY"
PACKAGES = ("httptools", "prometheus_client", "starlette", "uvicorn")
_EPILOG = """\
output:
  One line on the standard output when requests are accepted, with the address. Progress and errors
  go to the standard error.

signals:
  At Ctrl-C or SIGTERM the server accepts no more requests, and serves those that it has for up to
  --drain-timeout seconds. A second signal ends it at once.

exit status:
  0 after a shutdown, 2 bad options or files, 130 and 143 a signal before it served or a second one
"""


def run() -> NoReturn:
    """Run the command as a process of its own."""
    raise SystemExit(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; errors of its user are one line on stderr."""
    args = _parser().parse_args(argv)
    return status_of(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise ValueError(f"{', '.join(missing)} not found: install the extra [models]")
    signals = Signals(signal.SIGINT, signal.SIGTERM)
    print("importing JAX ...", file=sys.stderr, flush=True)
    from models.command.serve import serve

    serve(args, _api_keys(args), signals.call)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m models.server",
        description="Serve a checkpoint over HTTP, with the endpoints of OpenAI's API.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    server = parser.add_argument_group("server")
    add = server.add_argument
    add("--host", default="127.0.0.1", help="address (127.0.0.1: this machine only)")
    add("--port", type=int, default=8000, metavar="N", help="0: any free one (8000)")
    add("--served-model-name", metavar="NAME", help="of the model (the checkpoint's folder)")
    for name, metavar, text in (
        ("api-key", "KEY", f"that requests must have (${_API_KEY}, which other users can't list)"),
        ("allowed-host", "NAME", "that the header Host must have (any)"),
    ):
        add(f"--{name}", action="append", metavar=metavar, help=f"{text}; repeatable")
    text = "requests may have a priority, and so pass others"
    add("--allow-priority", action="store_true", default=None, help=text)
    for name, what in (("tool-call-parser", "calls of tools"), ("reasoning-parser", "reasoning")):
        text = f"how the model writes {what}, or none (auto: by its chat template)"
        add(f"--{name}", metavar="NAME", help=text)
    text = "states that /v1/embeddings takes, last or mean (as 1_Pooling/config.json says, or last)"
    add("--pooling", metavar="NAME", help=text)
    add_template_option(server)
    add(
        "--warmup",
        choices=("none", "default", "all"),
        default="default",
        help="compile what requests need: those without options and greedy ones, or all (default);"
        " the rest compiles when it first occurs",
    )
    text = "accept requests when all that is compiled, and not when what can serve them is"
    add("--wait-for-warmup", action="store_true", help=text)
    add("--access-log", action="store_true", help="a line for each request")
    limits = parser.add_argument_group("limits")
    for name, kind, default, text in (
        ("max-body-bytes", int, 8 << 20, "of a request"),
        ("max-total-body-bytes", int, 256 << 20, "of all bodies being read; more get status 503"),
        ("max-queue", int, 1024, "sequences that wait; more requests get status 429"),
        ("max-connections", int, 4096, "open at a time; more get status 503"),
        ("request-timeout", float, 600, "seconds of a request, its wait included"),
        ("drain-timeout", float, 30, "seconds that a shutdown waits for requests"),
    ):
        metavar = "N" if kind is int else "S"
        limits.add_argument(
            f"--{name}", type=kind, default=default, metavar=metavar, help=f"{text} ({default})"
        )
    add_model_options(parser)
    add_engine_options(parser)
    return parser


def _api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the keys of the options, or that of the environment."""
    if args.api_key is not None:
        return tuple(args.api_key)
    key = os.environ.get(_API_KEY)
    return (key,) if key else ()


if __name__ == "__main__":
    run()
