"""A process of an engine on several: `python -m tests.support.engine_process PORT INDEX SCENARIO`.

Process 0 serves requests and prints what a scenario computes, as one line of JSON; the others
follow it.
"""

from __future__ import annotations

import json
import sys

import jax

NUM_PROCESSES, DEVICES_EACH = 2, 4
SECONDS = 10  # after which jax.distributed ends processes whose peers are dead


def main(port: int, index: int, scenario: str) -> None:
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.distributed.initialize(
        f"localhost:{port}",
        NUM_PROCESSES,
        index,
        heartbeat_timeout_seconds=SECONDS,
        shutdown_timeout_seconds=SECONDS,
    )
    from tests.support import engine_calls as calls

    num_devices = NUM_PROCESSES * DEVICES_EACH
    engine = calls.make_engine(calls.WIDE, tensor_parallel=num_devices)
    new = calls.weights(calls.WIDE, seed=2)
    if index > 0:
        while engine.follow():
            engine.update_params(new)
        print("closed", flush=True)
        return
    if scenario == "serve":
        found = serve(engine, calls, new)
        engine.close()
        print(json.dumps(found), flush=True)
        return
    # Serves until the test kills a process.
    print("serving", flush=True)
    while True:
        calls.serve(engine, calls.PROMPTS, calls.greedy(), check=False)


def serve(engine, calls, new) -> list[list[list[int]]]:
    """Tokens of several loads, one of them after a sleep and one of them with new weights."""
    loads = [calls.greedy(), calls.sampling(n=2, top_k=5), calls.greedy(beam_width=2)]
    loads.append(calls.greedy(presence_penalty=1.0))
    engine.warmup([loads[0]])
    found = [calls.tokens_of(calls.serve(engine, calls.PROMPTS, load)) for load in loads]
    engine.sleep()
    engine.wake()
    found.append(calls.tokens_of(calls.serve(engine, calls.PROMPTS, loads[0])))
    engine.update_params(new)
    found.append(calls.tokens_of(calls.serve(engine, calls.PROMPTS, loads[0])))
    calls.assert_every_page_is_free(engine)
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
