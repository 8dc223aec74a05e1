"""Serves a checkpoint over HTTP: the work of `python -m models.server`."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from models.command.options import say
from models.command.setup import given, load_draft, load_model, prepare
from models.decoder import engine_model
from models.files import read_json
from models.text import Tokenizer, chat_defaults, read_chat_template, sampling_defaults
from pallas_paged.engine import (
    AsyncEngine,
    Engine,
    EngineConfig,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
)
from pallas_paged.server.server import listen, run
from pallas_paged.server.service import ServerConfig, Service

_GRAMMAR = StructuredOutputsParams(choice=["x"])
_ANY = SamplingParams(  # the steps of a request with a grammar and with these serve any
    structured_outputs=_GRAMMAR,
    top_k=2,
    top_p=0.5,
    logit_bias={0: 1.0},
    presence_penalty=1.0,
    logprobs=1,
)


def serve(
    args: argparse.Namespace,
    api_keys: tuple[str, ...],
    on_signal: Callable[[Callable[[int], object]], object],
) -> None:
    """Load the model, compile its steps, and serve until a signal.

    Args:
        args: parsed options.
        api_keys: a request must have one of them; empty: it needs none.
        on_signal: takes the function to call with the first signal.

    Raises:
        ValueError: an option is out of range, or the checkpoint is not usable.
        OSError: the address can't be used.
    """
    bound = listen(args.host, args.port)  # a port in use is an error before the loading
    limits = given(args, ServerConfig)
    limits.setdefault("served_model_name", args.checkpoint.resolve().name)
    if "pooling" not in limits:
        limits["pooling"] = _pooling_of(args.checkpoint)
    hosts = tuple(args.allowed_host or ())
    config = ServerConfig(**limits, api_keys=api_keys, allowed_hosts=hosts)
    prepare(args)
    draft_params = load_draft(args)
    engine_config = EngineConfig(**given(args, EngineConfig))
    template = read_chat_template(args.checkpoint, file=args.chat_template)
    tokenizer = Tokenizer(args.checkpoint)
    decoder, more, draft_params = load_model(args, draft_params)
    engine_config = replace(engine_config, **more)
    model, weights = engine_model(decoder, max_model_len=engine_config.max_model_len)
    engine = Engine(
        model, weights, config=engine_config, tokenizer=tokenizer, draft_params=draft_params
    )
    service = Service(
        AsyncEngine(engine),
        chat_template=template if template.exists else None,
        config=config,
        sampling_defaults=sampling_defaults(args.checkpoint),
        chat_defaults=chat_defaults(args.checkpoint, model, tokenizer, template),
    )
    if args.warmup != "none":
        defaults = service.sampling_defaults if args.warmup == "default" else None
        _warm_up(engine, defaults, waits=args.wait_for_warmup)
    run(service, bound, access_log=args.access_log, on_signal=on_signal)


def _pooling_of(folder: Path) -> str:
    """Return how a model of sentence-transformers makes vectors; "last" for any other.

    Raises:
        ValueError: the file is not JSON, or it makes them in another way than the engine can.
    """
    path = folder / "1_Pooling" / "config.json"
    if not path.is_file():
        return "last"
    prefix, known = "pooling_mode_", {"lasttoken": "last", "mean_tokens": "mean"}
    modes = [
        name.removeprefix(prefix)
        for name, is_used in read_json(path).items()
        if name.startswith(prefix) and is_used is True
    ]
    if len(modes) != 1 or modes[0] not in known:
        raise ValueError(f"{path}: {modes} must be one of {[*known]}; --pooling overrules it")
    return known[modes[0]]


def _warm_up(engine: Engine, defaults: dict[str, Any] | None, *, waits: bool) -> None:
    """Compile what requests with these parameters need, and greedy ones; None: any.

    With llguidance that includes requests with these parameters and a grammar, in steps that serve
    greedy ones too. If it does not wait, threads go on with what is not needed to serve.
    """
    say("compiling ...")
    start = time.perf_counter()
    params: list[SamplingParams | PoolingParams | None] = [None, PoolingParams(), _ANY]
    if defaults is not None:
        own = SamplingParams(**defaults)
        params = [own, SamplingParams(temperature=0.0), replace(own, structured_outputs=_GRAMMAR)]
    if importlib.util.find_spec("llguidance") is None:
        params.pop()  # the one with a grammar
    done = None
    if waits:
        engine.warmup(params, progress=True)
    else:
        done = engine.start_warmup(params, progress=True)
    say(f"compiled {engine.stats().compilations} programs in {time.perf_counter() - start:.0f} s")
    if done is not None and not done.done():
        say("compiling others beside the requests ...")
        done.add_done_callback(lambda done: _end_of_warmup(done, start))


def _end_of_warmup(done: Future[None], start: float) -> None:
    """Report that all is compiled; the log has errors."""
    if done.exception() is None:
        say(f"compiled all programs in {time.perf_counter() - start:.0f} s")
    gc.collect()
    gc.freeze()  # the new traces, as `run` did with all before
