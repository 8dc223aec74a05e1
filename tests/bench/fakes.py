"""Results that a GPU might have given, for tests of tables and charts."""

META = {"device": "a GPU", "jax": "0.0", "driver": "1", "date": "today", "command": "c"}
TARGETS = {"triton": "__gpu$xla.gpu.triton", "mosaic": "mosaic_gpu_v2"}
FAILED = {"status": "failed", "reason": "no"}
WRONG = {"status": "wrong", "relative_l2": 0.5, "reason": "off"}


def ok(us: float, *custom_calls: str, error: float = 2e-3, **more: object) -> dict:
    spread = {"median": us, "p10": us - 1, "p90": us + 1}
    result = {"status": "ok", "relative_l2": error, "custom_calls": list(custom_calls)}
    return result | {"kernel_us": spread, "wall_us": spread} | more


def ours(chosen: str, *, triton: float, mosaic: float) -> dict:
    """Results of both implementations, and of None, which chooses `chosen`."""
    found = {"triton": ok(triton, TARGETS["triton"]), "mosaic": ok(mosaic, TARGETS["mosaic"])}
    return {"ours": found[chosen], **found}


def rows(text: str) -> list[list[str]]:
    """The cells of all tables in a Markdown text, headers first, without separators."""
    lines = [line for line in text.splitlines() if line[:1] == "|" and line[:4] != "|---"]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def by_column(text: str) -> list[dict[str, list[str]]]:
    """The rows of the first table in a Markdown text by column; columns may share a name."""
    head, *body = rows(next(x for x in text.split("\n\n") if x.lstrip().startswith("|")))
    places = {name: [i for i, other in enumerate(head) if other == name] for name in head}
    return [{name: [row[i] for i in places[name]] for name in head} for row in body]
