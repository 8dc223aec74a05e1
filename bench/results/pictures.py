"""The charts of docs/results.md, by the path of each in bench/results."""

from __future__ import annotations

from collections.abc import Callable

from bench.results import charts
from bench.results.store import CARDS, Store, scaling
from bench.results.svg import Series
from bench.steps.gap import gap_of

_OURS = Series("pallas_paged", "blue", "circle")
_ENGINE = Series("engine", "blue")
_DECODE = {
    "ours": _OURS,
    "cudnn_paged": Series("cuDNN paged", "pink", "square"),
    "jax_op": Series("JAX's own op", "orange", "diamond"),
    "xla_gather": Series("XLA gather", "green", "triangle"),
}
_OTHER_RUN = {
    "flashinfer": Series("FlashInfer, another run", "red", "down", hollow=True),
    "sdpa": Series("torch SDPA on contiguous K/V, another run", "black", "plus", hollow=True),
}
_PROMPTS = {
    "ours": Series("pallas_paged", "blue"),
    "flashinfer": Series("FlashInfer", "red"),
    "sdpa": Series("torch SDPA on contiguous K/V", "black"),
    "cudnn": Series("cuDNN on contiguous K/V", "pink"),
    "mha": Series("JAX's Triton mha on contiguous K/V", "orange"),
}
_RIDGE = 200  # operations per byte of K/V; below this a card is bound by memory
_PARTS = {
    "limit": Series("limit: weights and K/V read once", "grey"),
    "products": Series("products", "blue"),
    "attention": Series("attention", "orange"),
    "rest": Series("rest", "green"),
}


def _decode(store: Store, run: str, part: str, what: str, pages: str) -> str:
    card = run.partition("/")[0]
    shares = store.shares(run, part)
    outside = f"{card}/peers-decode"
    others = store.shares(outside) if outside in store else {}
    rows = []
    for name, found in shares.items():
        values = {series: found[key] for key, series in _DECODE.items() if key in found}
        more = others.get(name, {})
        values |= {series: more[key] for key, series in _OTHER_RUN.items() if key in more}
        rows.append((name, values))
    limit = store.ceiling(card)
    return charts.shares(
        f"{what} on an {CARDS[card]}: how much of the read limit they reach",
        f"{pages}, cold L2. The limit is {limit:.0f} GB/s, the best rate of a kernel that only"
        " reads.",
        "% of the read limit (more is better)",
        rows,
    )


def _prompts(store: Store, run: str, subtitle: str) -> str:
    if run not in store:
        return ""
    rates, card = store.tflops(run), CARDS[run.partition("/")[0]]
    rows = [
        (
            shape["name"].removeprefix("prefill "),
            {series: found[key] for key, series in _PROMPTS.items() if key in found},
        )
        for shape in store[run]["shapes"]
        if (found := rates[shape["name"]]) and shape["num_flops"] > _RIDGE * shape["num_bytes"]
    ]
    return charts.bars(
        f"Prompts on an {card}: operations of attention per second",
        subtitle,
        "TFLOP/s (more is better)",
        rows,
    )


def _steps(store: Store) -> str:
    rows = []
    for model in ("1b", "8b"):
        for one in store[f"h200/steps-{model}"]["results"]:
            over, limit = gap_of(one), one["limit_us"]
            if over is None:
                continue
            rest = over["rest"] + over["launches"]  # launches overlap kernels, and may be below 0
            found = {"limit": limit, **over, "rest": rest}
            values = {series: found[key] / limit for key, series in _PARTS.items()}
            name = f"{model}, {one['num_seqs']} x {one['context']:.0f}, {one['case']}"
            rows.append((name, values, f"{one['wall_us']:.0f} us"))
    return charts.parts(
        "A decode step on an H200: what it takes over its limit",
        "Model, sequences x tokens of each. Parts are what exceeds the time to read their bytes.",
        "times the limit (less is better)",
        rows,
    )


def _nano(store: Store) -> str:
    theirs = store["h200/nano-vllm"]
    engine = store["h200/serving-nano"]["systems"]["engine"]
    rows = [
        ("engine", {_ENGINE: engine["tokens_per_s"]}),
        (theirs["system"].partition(" (")[0], {_ENGINE: theirs["tokens_per_s"]}),
    ]
    return charts.bars(
        "nano-vllm's workload on H200s",
        "256 requests at once, Qwen3-0.6B in bf16. Two machines of the same kind.",
        "output tokens/s (more is better)",
        rows,
    )


def _gpus(store: Store) -> str:
    colors = {2: Series("2 GPUs", "blue"), 4: Series("4 GPUs", "orange")}
    rows = [
        (name if part != "serving" else f"{name}, serving", {colors[count]: ratio})
        for part, ratios in scaling(store).items()
        for (name, count), ratio in ratios.items()
    ]
    return charts.bars(
        "H200s beside one: attention, decode steps and serving",
        "The first four spread KV heads, the next three the pages of each row.",
        "times as fast as one GPU (more is better)",
        rows,
        spec=".2f",
    )


_BF16 = "shapes", "Decode calls", "bf16"
_ONE_BYTE = "one_byte", "Decode calls with one-byte pages", "int8, fp8"
CHARTS: dict[str, Callable[[Store], str]] = {
    "h100/decode": lambda store: _decode(store, "h100/decode", *_BF16),
    "h200/decode": lambda store: _decode(store, "h200/decode", *_BF16),
    "h200/decode-one-byte": lambda store: _decode(store, "h200/decode-one-byte", *_ONE_BYTE),
    "h200/peers-prefill": lambda store: _prompts(
        store, "h200/peers-prefill", "bf16, one run. FlashInfer reads pages too."
    ),
    "h100/prefill": lambda store: _prompts(store, "h100/prefill", "bf16, one run."),
    "h200/prefill": lambda store: _prompts(store, "h200/prefill", "bf16, one run."),
    "h200/steps": _steps,
    "h200/serving-nano": _nano,
    "2xh200/parallel": _gpus,
}
