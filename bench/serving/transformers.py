"""The baseline of Hugging Face transformers: `generate` in a process of its own.

JAX and torch would compete for the GPU's memory, so this runs before JAX uses the GPU.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.measuring.measure import failed
from bench.serving.batches import BatchTimes, serve_in_batches
from bench.serving.requests import TraceRequest
from models.decoder import ModelConfig

_START_S = 120.0  # time to load torch and make the weights


def run_transformers(
    config: ModelConfig,
    dtype: str,
    trace: Sequence[TraceRequest],
    *,
    batch_size: int,
    max_len: int,
    seconds: float,
) -> dict[str, Any]:
    """Serve a trace in a new process; return the summary or the reason why there is none.

    Args:
        config: of the model; its weights are random.
        dtype: of the model, by the name that torch and JAX share.
        trace: requests by arrival.
        batch_size: rows.
        max_len: tokens of memory that a row may take.
        seconds: no batch starts after this time; the process ends after about twice the time.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    arguments = (config, dtype, trace, batch_size, max_len, seconds)
    process = context.Process(target=_work, args=(sender, *arguments), daemon=True)
    process.start()
    sender.close()  # so that the pipe closes when the process ends
    try:
        limit = 2 * seconds + _START_S
        if receiver.poll(limit):
            return receiver.recv()
        return {"status": "failed", "reason": f"took more than {limit:.0f} s"}
    except EOFError:
        process.join()
        return {"status": "failed", "reason": f"its process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def _work(sender: Any, *arguments: Any) -> None:
    try:
        result = serve(*arguments)
    except Exception as error:  # without torch, transformers or memory the other systems go on
        result = failed(error)
    sender.send(result)


def serve(
    config: ModelConfig,
    dtype: str,
    trace: Sequence[TraceRequest],
    batch_size: int,
    max_len: int,
    seconds: float,
) -> dict[str, Any]:
    """Serve a trace in this process; arguments and result as in `run_transformers`."""
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    with torch.device(device):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**config.to_hugging_face(), pad_token_id=0)
        )
    model.eval()

    class FirstToken(transformers.StoppingCriteria):
        """Record the time of the first call, after the first token; never stop."""

        def __init__(self) -> None:
            self.time: float | None = None

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            if self.time is None:
                if device == "cuda":
                    torch.cuda.synchronize()
                self.time = time.perf_counter()
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    @torch.inference_mode()
    def run_batch(batch: Sequence[TraceRequest]) -> BatchTimes:
        padded_len = max(len(one.prompt) for one in batch)
        num_tokens = max(one.num_tokens for one in batch)
        prompts = np.zeros((len(batch), padded_len), np.int64)
        mask = np.zeros_like(prompts)
        for row, one in enumerate(batch):
            prompts[row, -len(one.prompt) :], mask[row, -len(one.prompt) :] = one.prompt, 1
        first = FirstToken()
        output = model.generate(
            torch.from_numpy(prompts).to(device),
            attention_mask=torch.from_numpy(mask).to(device),
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            do_sample=False,
            stopping_criteria=transformers.StoppingCriteriaList([first]),
        )
        shape = tuple(output.cpu().shape)
        if first.time is None or shape != (len(batch), padded_len + num_tokens):
            raise RuntimeError(f"generate gave {shape=} for {num_tokens=} after {padded_len=}")
        return BatchTimes(first_token=first.time, finish=time.perf_counter(), padded_len=padded_len)

    warm = [TraceRequest(arrival=0.0, prompt=one.prompt, num_tokens=8) for one in trace]
    run_batch(warm[:batch_size])
    record = serve_in_batches(
        trace, run_batch, batch_size=batch_size, max_len=max_len, seconds=seconds, grows=True
    )
    extra = {
        "device": device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "attention": model.config._attn_implementation,
        "batch_size": batch_size,
    }
    return record.summarize() | extra
