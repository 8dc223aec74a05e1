"""From options to a server that accepts requests."""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import socket
import sys
import time
from typing import Any

import prometheus_client

from models.chat import ChatTemplate
from models.checkpoint import load_checkpoint
from models.cli_serve import given, use_compilation_cache
from models.engine_model import engine_model
from models.generation_config import chat_defaults, sampling_defaults
from models.server.config import ServerConfig
from models.server.process import Signals
from models.server.server import serve
from models.server.service import Service
from models.tokenizer import Tokenizer
from pallas_paged.engine import Engine, EngineConfig, SamplingParams

# Seconds after which a thread of Python must let another one go on, where 0.005 is the default. The
# threads of the engine and of the connections need one another's results sooner.
_SWITCH_SECONDS = 0.0005


def start(
    args: argparse.Namespace, api_keys: tuple[str, ...], bound: socket.socket, signals: Signals
) -> None:
    """Load the model, compile its steps, and serve until a signal.

    Args:
        args: parsed options.
        api_keys: of which requests must have one; empty: none.
        bound: the socket.
        signals: of the process.

    Raises:
        ValueError: an option is out of range, or the checkpoint is not usable.
    """
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("pallas_paged").setLevel(logging.INFO)
    limits = given(args, ServerConfig)
    name = args.served_model_name or args.checkpoint.resolve().name
    config = ServerConfig(**limits, model_name=name, api_keys=api_keys)
    engine_config = EngineConfig(**given(args, EngineConfig))
    use_compilation_cache(args.compilation_cache)
    template = ChatTemplate(args.checkpoint, file=args.chat_template)
    tokenizer = Tokenizer(args.checkpoint)
    _say(f"loading {args.checkpoint} ...")
    decoder, _ = load_checkpoint(args.checkpoint, dtype=args.dtype)
    model, weights = engine_model(decoder, max_model_len=engine_config.max_model_len)
    engine = Engine(model, weights, config=engine_config, tokenizer=tokenizer)
    service = Service(
        engine,
        config,
        vocab_size=model.vocab_size,
        tokenizer=tokenizer,
        chat_template=template if template.exists else None,
        sampling_defaults=sampling_defaults(args.checkpoint),
        chat_defaults=chat_defaults(args.checkpoint, model.config, tokenizer, template),
    )
    if args.warmup != "none":
        _warm_up(engine, service.sampling_defaults if args.warmup == "default" else None)
    host, port = bound.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    stats = engine.stats()
    ready = f"{address} serves {name}: {engine.max_model_len} tokens of context"
    ready += f", {engine_config.max_num_seqs} sequences at a time, {stats.num_pages} pages of"
    ready += f" {engine_config.page_size} tokens ({stats.pool_bytes / 2**20:,.0f} MiB)"
    prepare_process()
    serve(service, bound, signals, ready, access_log=args.access_log)


def _warm_up(engine: Engine, defaults: dict[str, Any] | None) -> None:
    """Compile what requests with these parameters need, and greedy ones; None: any."""
    _say("compiling ...")
    start = time.perf_counter()
    params = None
    if defaults is not None:
        params = [SamplingParams(**defaults), SamplingParams(temperature=0.0)]
    engine.warmup(params, progress=True)
    _say(f"compiled {engine.stats().compilations} programs in {time.perf_counter() - start:.0f} s")


def prepare_process() -> None:
    """Set what the threads of a server need of their process."""
    prometheus_client.disable_created_metrics()  # a second line for each counter
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()  # the collector need not look at modules and traces again
    with contextlib.suppress(
        ImportError, OSError, ValueError
    ):  # where the system has no such limit
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
