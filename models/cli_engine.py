"""The engine's part of the command line: `--prompts-file`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
from jax import monitoring
from tqdm import tqdm

from models.cli_common import DEFAULT_MAX_NEW_TOKENS, DEFAULT_TEMPERATURE, is_utf8, pool_size
from models.decoder import Decoder
from models.engine import Engine, EngineConfig, EngineDeadError
from models.engine_stats import EngineStats
from models.kv_cache import page_bytes, pool_dtype
from models.request import Completion, News, Request, SamplingParams
from models.tokenizer import Tokenizer

POOL_SHARE = 0.8  # of the device's memory beside the weights; the rest is for what a step computes
HOST_POOL_BYTES = 2**30  # most of a pool where the device does not tell its memory, as CPUs

_KEYS = [field.name for field in fields(SamplingParams)]
_NUMBERS = ("length_penalty", "temperature", "top_p", "min_p")  # the others check their types
_LISTS = ("stop", "stop_tokens")


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A prompt that can be submitted."""

    index: int
    prompt: str
    tokens: list[int]
    params: SamplingParams

    @property
    def length(self) -> int:
        """Most tokens of one of its sequences."""
        return len(self.tokens) + self.params.max_tokens


def serve(
    args: argparse.Namespace, lines: Sequence[str], model: Decoder, tokenizer: Tokenizer
) -> bool:
    """Serves all prompts of a command, and prints a JSON object a line as each is done.

    Args:
        args: of the command.
        lines: of the prompts' file, without blank ones; JSON objects if its name ends so.
        model: with its weights.
        tokenizer: of the model.

    Returns:
        Whether all of them were served: none was refused, and none failed.

    Raises:
        ValueError: an option is out of range; nothing has been served.
    """
    asked = _asked(args)
    _params(asked, room=1)  # what is wrong with an option is told once, not for each prompt
    config = EngineConfig(
        num_pages=1 if args.num_pages is None else args.num_pages,
        page_size=args.page_size,
        prefix_caching=not args.no_prefix_cache,
        kv_dtype=args.kv_dtype,
        implementation=args.implementation,
        **_given(max_seqs=args.max_seqs, token_budget=args.token_budget),
    )
    max_len = model.config.max_position_embeddings
    if args.num_pages is not None:
        max_len = min(max_len, config.num_pages * config.page_size)
    is_json = args.prompts_file.name.endswith(".jsonl")
    entries = [(prompt, False) for prompt in args.prompt]
    entries += [(line, is_json) for line in lines]
    with tqdm(total=len(entries), unit="prompt", disable=None) as bar:
        results = _Results(bar)
        jobs = []
        for index, (line, is_object) in enumerate(entries):
            try:
                prompt, options = _parse(line) if is_object else (line, {})
                jobs.append(_job(index, prompt, asked | options, tokenizer, max_len))
            except ValueError as error:
                results.refuse(index, error)
        # No wider tables than needed: without a kernel attention gathers all that they have.
        config = replace(config, max_len=min(max_len, max((job.length for job in jobs), default=1)))
        if args.num_pages is None:
            config = replace(config, num_pages=_num_pages(jobs, config, model))
        engine = Engine(model, None, tokenizer, config)
        start = time.perf_counter()
        with _compilations() as compilations:
            _serve(engine, jobs, results)
        seconds = time.perf_counter() - start
    print(_summary(engine.stats(), len(entries), seconds, sum(compilations)), file=sys.stderr)
    return results.all_served


class _Results:
    """What is printed of the prompts, in the order in which they are done."""

    def __init__(self, bar: tqdm):
        self.all_served = True
        self._bar = bar

    def refuse(self, index: int, error: ValueError) -> None:
        """Tells why a prompt can't be served."""
        self.all_served = False
        self._print({"index": index, "error": str(error)})

    def finish(self, job: _Job, request: Request) -> None:
        """Tells what came of a prompt."""
        if any(completion.finish_reason == "bad_logits" for completion in request.completions):
            self.all_served = False
        self._print(_record(job, request))

    def _print(self, record: Mapping[str, Any]) -> None:
        self._bar.write(json.dumps(record))  # above the bar, where both are on a terminal
        sys.stdout.flush()
        self._bar.update()


def _serve(engine: Engine, jobs: list[_Job], results: _Results) -> None:
    pending: dict[Request, _Job] = {}
    for job in jobs:
        try:
            pending[engine.submit(job.tokens, job.params)] = job
        except ValueError as error:
            results.refuse(job.index, error)
    while pending:
        for news in _step(engine):
            if news.request.finished and news.request in pending:
                results.finish(pending.pop(news.request), news.request)


def _step(engine: Engine) -> list[News]:
    try:
        return engine.step()
    except EngineDeadError as error:
        # The first step shows whether what was asked for can be run here; later it is a bug.
        if error.__cause__ is None or engine.stats().num_steps:
            raise
        raise error.__cause__ from None


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    """What the command asks of all prompts."""
    return _given(
        max_tokens=args.max_new_tokens,
        n=args.num_samples,
        best_of=args.best_of,
        beam_width=args.beam_width,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        stop=args.stop,
        logprobs=args.logprobs,
    )


def _parse(line: str) -> tuple[str, dict[str, Any]]:
    """The prompt of a JSON object, and its other entries."""
    try:
        options = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(options, dict):
        raise ValueError(f"{line} must be a JSON object")
    prompt = options.pop("prompt", None)
    if not isinstance(prompt, str):
        raise ValueError(f"{prompt=} must be a text")
    for name, value in options.items():
        if name not in _KEYS:
            raise ValueError(f"unknown key {name!r}; there are prompt, {', '.join(_KEYS)}")
        if value is None:
            continue
        if name in _NUMBERS and not _is_finite(value):
            raise ValueError(f"{name}={value!r} must be a finite number")
        if name in _LISTS and not isinstance(value, list):
            raise ValueError(f"{name}={value!r} must be a list")
    return prompt, options


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # an integer may be too large for a float


def _job(
    index: int, prompt: str, options: dict[str, Any], tokenizer: Tokenizer, max_len: int
) -> _Job:
    if not is_utf8(prompt):
        raise ValueError("the prompt must be valid UTF-8")
    tokens = tokenizer.encode(prompt)
    params = _params(_given(**options), room=max_len - len(tokens))
    return _Job(index=index, prompt=prompt, tokens=tokens, params=params)


def _params(options: dict[str, Any], *, room: int) -> SamplingParams:
    """What is asked for, the rest as the command has it by default."""
    defaults: dict[str, Any] = {
        "max_tokens": max(1, min(DEFAULT_MAX_NEW_TOKENS, room)),
        "temperature": 0.0 if "beam_width" in options else DEFAULT_TEMPERATURE,
    }
    return SamplingParams(**defaults | options)


def _given(**values: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def _num_pages(jobs: Sequence[_Job], config: EngineConfig, model: Decoder) -> int:
    """Pages for all jobs at once, or as many as there is memory for."""
    dtype = pool_dtype(config.kv_dtype, model.embed_tokens.weight[...].dtype)
    bytes_each = page_bytes(model.config, page_size=config.page_size, dtype=dtype)

    def pages(num_tokens: int) -> int:
        return -(-min(num_tokens, config.max_len or 1) // config.page_size)

    memory = jax.devices()[0].memory_stats()
    if memory is not None:
        free_bytes = memory["bytes_limit"] - memory["bytes_in_use"]
        room = int(POOL_SHARE * free_bytes) // bytes_each
    else:
        full_rows = config.max_seqs * pages(config.max_len or 1)
        room = min(full_rows, HOST_POOL_BYTES // bytes_each)
    wanted = sum(min(job.params.num_rows, config.max_seqs) * pages(job.length) for job in jobs)
    return max(1, min(room, wanted))


@contextmanager
def _compilations() -> Iterator[list[float]]:
    """Collects the seconds that JAX traces and compiles for."""
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            seconds.append(duration_secs)

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        monitoring.unregister_event_duration_listener(listen)


def _record(job: _Job, request: Request) -> dict[str, Any]:
    def since_arrival(moment: float | None) -> float | None:
        return None if moment is None else round(moment - request.arrival, 6)

    return {
        "index": job.index,
        "prompt": job.prompt,
        "completions": [_completion(request, completion) for completion in request.completions],
        "num_prompt_tokens": len(request.prompt),
        "num_cached_tokens": request.num_cached_tokens,
        "num_preemptions": request.num_preemptions,
        "ttft_s": since_arrival(request.first_token_time),
        "latency_s": since_arrival(request.finish_time),
    }


def _completion(request: Request, completion: Completion) -> dict[str, Any]:
    record: dict[str, Any] = {
        "index": completion.index,
        "text": completion.text,
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
    }
    if request.params.wants_logprobs:
        record["cumulative_logprob"] = completion.cumulative_logprob
    if completion.logprobs is not None:
        record["logprobs"] = [{"logprob": x.token, "top": x.top} for x in completion.logprobs]
    return record


def _summary(stats: EngineStats, num_prompts: int, seconds: float, compiling: float) -> str:
    return (
        f"{stats.num_finished} of {num_prompts} prompts served in {seconds:.1f} s:"
        f" {stats.num_finished / seconds:.1f} requests/s,"
        f" {stats.generated_tokens / seconds:.1f} tokens/s"
        f" ({stats.compilations} shapes of steps compiled in {compiling:.1f} s)\n"
        f"time to first token p50 {stats.ttft_p50:.3f} s, p99 {stats.ttft_p99:.3f} s;"
        f" per token p50 {1e3 * stats.tpot_p50:.1f} ms, p99 {1e3 * stats.tpot_p99:.1f} ms\n"
        f"prefix cache hit rate {stats.cache_hit_rate:.1%};"
        f" pool of {stats.num_pages} pages, {pool_size(stats)},"
        f" utilization {stats.pool_utilization:.1%},"
        f" pages in use {stats.pages_used:.1%}, at most {stats.peak_pages_used:.1%};"
        f" {stats.num_preemptions} preemptions; {jax.devices()[0].device_kind}"
    )
