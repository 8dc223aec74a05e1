"""Serves prompts, or a file of them: the work of `python -m models.generate` but for `--chat`."""

from __future__ import annotations

import argparse
import json
import math
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from models.command.options import say
from models.command.prompts import Job, JobMaker, parse_line
from models.command.setup import (
    given,
    load_draft,
    load_model,
    placements_of,
    prepare,
    print_defaults,
)
from models.decoder import engine_config, engine_model
from models.text import Tokenizer, read_chat_template
from pallas_paged.engine import (
    CompletionOutput,
    Engine,
    EngineConfig,
    EngineDeadError,
    EngineStats,
    Logprob,
    Request,
    RequestOutput,
    SamplingParams,
)


def serve(args: argparse.Namespace, lines: Sequence[str]) -> bool:
    """Serve the prompts of a command, and print their completions.

    Args:
        args: the parsed options.
        lines: of the prompts file; JSON objects if its name ends in .jsonl.

    Returns:
        Whether all prompts were served: none was refused, none failed.

    Raises:
        ValueError: an option is out of range, or the checkpoint is not usable; nothing was served.
    """
    prepare(args)
    draft_params = load_draft(args)
    options, sizes = given(args, SamplingParams), given(args, EngineConfig)
    # An option out of range is one error, not one for each prompt, and comes before the loading.
    SamplingParams(**options)
    EngineConfig(**sizes)
    places = placements_of(args)
    base_seed = options.pop("seed", secrets.randbits(32))
    if args.chat_template is not None:  # an error even where no prompt has messages
        read_chat_template(args.checkpoint, file=args.chat_template)

    decoder, more, draft_params = load_model(args, draft_params)
    sizes |= more
    tokenizer = Tokenizer(args.checkpoint)
    model, _ = engine_model(decoder, max_model_len=args.max_model_len)
    room = min(model.max_model_len, args.max_model_len or model.max_model_len)
    if args.num_pages is not None:
        room = min(room, args.num_pages * sizes.get("page_size", EngineConfig.page_size))

    is_jsonl = args.prompts_file is not None and args.prompts_file.name.endswith(".jsonl")
    entries = [(prompt, False) for prompt in args.prompt] + [(line, is_jsonl) for line in lines]
    as_json = args.json or args.prompts_file is not None
    bar = tqdm(total=len(entries), unit="prompt", disable=None if len(entries) > 1 else True)
    with bar, logging_redirect_tqdm():
        output = _Output(bar, as_json=as_json)
        maker = JobMaker(
            args=args,
            model=model,
            tokenizer=tokenizer,
            room=room,
            options=options,
            base_seed=base_seed,
        )
        print_defaults(maker.defaults)
        jobs = []
        for index, (entry, is_object) in enumerate(entries):
            try:
                jobs.append(maker.job(index, parse_line(entry) if is_object else {"prompt": entry}))
            except ValueError as error:
                output.refuse(index, str(error))
        config = engine_config(model, [(len(job.token_ids), job.params) for job in jobs], **sizes)
        model, weights = engine_model(decoder, max_model_len=config.max_model_len)
        engine = Engine(
            model, weights, config=config, tokenizer=tokenizer, draft_params=draft_params
        )
        start = time.perf_counter()
        with _compile_times() as compile_times:
            if jobs:
                bar.write("compiling and generating ...", file=sys.stderr)
            _run(engine, jobs, output)
        seconds = time.perf_counter() - start
    summary = _summary(engine.stats(), len(entries), seconds, sum(compile_times), base_seed)
    num_devices, kind = len(places) * places[0].num_devices, jax.devices()[0].device_kind
    say(f"{summary}; {num_devices} x {kind}")
    return output.all_served


def _run(engine: Engine, jobs: Sequence[Job], output: _Output) -> None:
    pending: dict[str, tuple[Job, Request]] = {}
    for job in jobs:
        try:
            request = engine.submit(list(job.token_ids), job.params, priority=job.priority)
            pending[request.request_id] = job, request
        except ValueError as error:
            output.refuse(job.index, str(error))
    try:
        while pending:
            for news in engine.step():
                job, request = pending[news.request_id]
                output.add(job, news)
                if news.finished:
                    del pending[news.request_id]
                    output.finish(job, request)
    except EngineDeadError as error:
        for job, _ in pending.values():
            output.refuse(job.index, str(error))
        # Options that this device can't run, or a lack of memory; anything else is a bug.
        expected = isinstance(error.__cause__, ValueError | NotImplementedError | MemoryError)
        if not expected and "RESOURCE_EXHAUSTED" not in str(error):
            raise


class _Output:
    """Prints completions in the order in which their prompts are done."""

    def __init__(self, bar: tqdm, *, as_json: bool):
        self.all_served = True
        self._bar = bar
        self._as_json = as_json
        self._streams = False

    def refuse(self, index: int, error: str) -> None:
        """Report why a prompt was not served."""
        self.all_served = False
        if self._as_json:
            self._write(json.dumps({"index": index, "error": error}) + "\n")
        else:
            self._bar.write(f"error: prompt {index + 1}: {error}", file=sys.stderr)
        self._bar.update()

    def add(self, job: Job, news: RequestOutput) -> None:
        """Print new text at once if this completion is the only one."""
        if self._as_json or self._bar.total > 1 or job.params.num_seqs > 1:
            return
        if not self._streams:
            self._streams = True
            self._write(str(job.prompt))
        self._write("".join(completion.text for completion in news.outputs))

    def finish(self, job: Job, request: Request) -> None:
        """Print the completions of a prompt."""
        if self._as_json:
            self._write(json.dumps(_record(job, request)) + "\n")
        elif self._streams:
            self._write("\n")
        else:
            for number, completion in enumerate(request.outputs, 1):
                title = f"prompt {job.index + 1} of {self._bar.total}"
                title += f", completion {number} of {len(request.outputs)}"
                title += f" ({completion.finish_reason})"
                self._write(f"=== {title}\n{job.prompt}{completion.text}\n\n")
        if any(completion.finish_reason == "error" for completion in request.outputs):
            self.all_served = False
            if not self._as_json:
                self._bar.write(f"error: prompt {job.index + 1}: {request.error}", file=sys.stderr)
        self._bar.update()

    def _write(self, text: str) -> None:
        self._bar.write(text, end="")  # above the bar, if both are on one terminal
        sys.stdout.flush()


@contextmanager
def _compile_times() -> Iterator[list[float]]:
    """Collect the seconds that JAX traces and compiles for."""
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def _record(job: Job, request: Request) -> dict[str, Any]:
    def since_arrival(moment: float | None) -> float | None:
        return None if moment is None else round(moment - request.arrival_time, 6)

    record: dict[str, Any] = {
        "index": job.index,
        "prompt": job.prompt,
        "outputs": [_completion(completion) for completion in request.outputs],
        "seed": request.seed,
        "num_prompt_tokens": len(request.prompt_token_ids),
        "num_cached_tokens": request.num_cached_tokens,
        "num_preemptions": request.num_preemptions,
        "ttft_s": since_arrival(request.first_token_time),
        "latency_s": since_arrival(request.finish_time),
    }
    if request.prompt_logprobs is not None:
        record["prompt_logprobs"] = _logprobs(request.prompt_logprobs)
    if request.error is not None:
        record["error"] = request.error
    return record


def _completion(completion: CompletionOutput) -> dict[str, Any]:
    names = ("index", "text", "token_ids", "finish_reason", "stop_reason")
    record: dict[str, Any] = {name: getattr(completion, name) for name in names}
    if completion.cumulative_logprob is not None:
        record["cumulative_logprob"] = _finite(completion.cumulative_logprob)
    if completion.logprobs is not None:
        record["logprobs"] = _logprobs(completion.logprobs)
    return record


def _logprobs(tokens: Sequence[dict[int, Logprob] | None]) -> list[dict[int, Any] | None]:
    return [
        entry
        and {
            token_id: {"logprob": _finite(each.logprob), "rank": each.rank}
            for token_id, each in entry.items()
        }
        for entry in tokens
    ]


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None  # JSON has no infinity


def _summary(
    stats: EngineStats, num_prompts: int, seconds: float, compile_seconds: float, seed: int
) -> str:
    rates = f"{stats.generated_tokens / seconds:.1f} tokens/s"
    pool = f"{stats.num_pages} pages, {stats.pool_bytes / 2**20:,.2f} MiB of {stats.kv_cache_dtype}"
    return (
        f"{stats.num_finished} of {num_prompts} prompts served in {seconds:.1f} s: {rates},"
        f" {stats.compilations} shapes of steps compiled in {compile_seconds:.1f} s; seed {seed}\n"
        f"time to first token p50 {stats.ttft_p50:.3f} s, p99 {stats.ttft_p99:.3f} s;"
        f" per token p50 {1e3 * stats.tpot_p50:.1f} ms, p99 {1e3 * stats.tpot_p99:.1f} ms\n"
        f"prefix cache hit rate {stats.cache_hit_rate:.1%}; pool of {pool}, at most"
        f" {stats.peak_pages_used:.1%} in use; {stats.num_preemptions} preemptions"
    )
