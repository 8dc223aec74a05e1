"""Results of the decode bench as text."""

from __future__ import annotations

from bench.measuring import calls
from bench.measuring.report import kernel_us, number

NAMES = calls.OURS | {
    "jax_op": "JAX's own op",
    "xla_gather": "XLA gather",
    "cudnn_paged": "cuDNN paged",
    "plain ours": "the plain call",
    "plain triton": "the plain call, Triton",
    "plain mosaic": "the plain call, Mosaic",
    "floor": "read only",
}


def read_ceiling(run: dict) -> float | None:
    """The best rate of the floor kernel in GB/s."""
    times = ((floor["num_bytes"], kernel_us(floor)) for floor in run["floors"])
    return max((num_bytes / us / 1e3 for num_bytes, us in times if us), default=None)


def with_floors(run: dict, part: str) -> list[dict]:
    """The shapes of a part, with the floor of their bytes among the results."""
    floors = {floor["num_bytes"]: floor for floor in reversed(run["floors"][1:])}

    def added(shape: dict) -> dict:
        floor = floors.get(shape["num_bytes"])
        return shape | {"results": shape["results"] | ({"floor": floor} if floor else {})}

    return [added(shape) for shape in run[part]]


def _with_plain(shape: dict) -> dict:
    """A shape with options, with the plain call among the results."""
    plain = {f"plain {name}": result for name, result in shape["base"]["results"].items()}
    return shape | {"results": shape["results"] | plain}


def markdown(run: dict) -> str:
    """The tables, the provenance of their numbers and the summary."""
    parts = {
        "": with_floors(run, "shapes"),
        calls.ONE_BYTE_TITLE: with_floors(run, "one_byte"),
        "Options": [*map(_with_plain, run["options"])],
    }
    ceiling = number(read_ceiling(run), ".0f")
    return calls.markdown(parts, NAMES, run["meta"], f"Read ceiling: {ceiling} GB/s")
