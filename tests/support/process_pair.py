"""One process of two with a device each: `python -m tests.support.process_pair PORT INDEX FOLDER`.

Both read their parts of the checkpoint in FOLDER; then process 0 serves requests on both devices.
Each prints a line of JSON when its engine is closed, and process 0 another one when a second engine
has served; that goes on until the test kills a process. With a fourth argument requests may ask for
anything.
"""

import json
import sys
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh

from models.decoder import load_checkpoint
from tests.support.checkpoints import recorded_reads

SECONDS = 10  # after which jax.distributed ends processes whose peers are dead


def main(port: str, index: str, folder: str, *every: str) -> None:
    jax.config.update("jax_default_matmul_precision", "highest")
    times = dict(heartbeat_timeout_seconds=SECONDS, shutdown_timeout_seconds=SECONDS)
    jax.distributed.initialize(f"localhost:{port}", 2, int(index), **times)
    from tests.support import engine_calls as calls

    found: dict[str, Any] = {"share": share_read(folder)}
    engine, new = calls.make_engine(tensor_parallel_size=2, modes=None), calls.weights(seed=2)
    if engine.replicas.leader is None:
        compiled: list[str] = []
        jax.monitoring.register_event_duration_secs_listener(
            lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
        )
        engine.warmup(loads_of(calls, bool(every))[:1])
        engine.check()
        compiled.clear()
        found |= serve(engine, calls, new, bool(every), compiled)
        engine.close()
    else:
        found["updates"] = 0
        while engine.follow():
            engine.update_params(new)
            found["updates"] += 1
    print(json.dumps(found), flush=True)

    engine = calls.make_engine(tensor_parallel_size=2, modes=None)
    if engine.replicas.leader is not None:
        engine.follow()
    load = loads_of(calls, bool(every))[0]
    for served in range(10**6):
        calls.serve(engine, calls.PROMPTS, load, check=False)
        if not served:
            print("{}", flush=True)


def loads_of(calls: Any, every: bool) -> list[Any]:
    """What requests ask for, the most first, so that all use the steps of the first."""
    if not every:
        return [calls.sampling(n=2), calls.greedy()]
    most = calls.sampling(max_tokens=8, n=2, top_k=5, presence_penalty=1.0, logprobs=6)
    return [most, calls.greedy(), calls.greedy(beam_width=2, max_tokens=6)]


def serve(
    engine: Any, calls: Any, new: Any, every: bool, compiled: list[str] | None = None
) -> dict[str, Any]:
    """Tokens of several loads, then after a sleep, then with new weights; and `len(compiled)`."""
    loads = loads_of(calls, every)
    found = {"tokens": [calls.tokens_of(calls.serve(engine, calls.PROMPTS, x)) for x in loads]}
    found["compiled"] = len(compiled or ())
    engine.sleep()
    engine.wake_up()
    for name in ("after sleep", "of new weights"):
        found[name] = calls.tokens_of(calls.serve(engine, calls.PROMPTS, loads[1]))
        engine.update_params(new)
    calls.assert_every_page_is_free(engine)
    return found


def share_read(folder: str) -> float:
    """The largest share of a weight that this process reads, if its parts are right."""
    mesh = Mesh(np.array(jax.devices()), ("tensor",), axis_types=(AxisType.Auto,))
    with recorded_reads() as shares:
        decoder, _ = load_checkpoint(folder, mesh=mesh)
    alone, _ = load_checkpoint(folder)
    leaves = (jax.tree.leaves(nnx.state(each)) for each in (decoder, alone))
    for sharded, expected in zip(*leaves, strict=True):
        (shard,) = sharded.addressable_shards
        np.testing.assert_array_equal(shard.data, np.asarray(expected)[shard.index])
    return max(sum(parts) for name, parts in shares.items() if "norm" not in name)


if __name__ == "__main__":
    main(*sys.argv[1:])
