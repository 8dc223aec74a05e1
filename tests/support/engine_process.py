"""A process of an engine on several: `python -m tests.support.engine_process PORT INDEX SCENARIO`.

Process 0 serves requests, and prints the tokens as a line of JSON; the others follow it. In the
scenario "serve" it then closes the engine; in the scenario "die" it serves until the test kills a
process.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax

NUM_PROCESSES, DEVICES_EACH = 2, 2
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
    calls.serve(engine, calls.PROMPTS, calls.greedy(), check=False)
    print("serving", flush=True)
    while True:
        calls.serve(engine, calls.PROMPTS, calls.greedy(), check=False)


def serve(engine: Any, calls: Any, new: Any) -> list[list[list[int]]]:
    """Tokens of several loads, one of them after a sleep and one of them with new weights.

    All use the programs of the warm-up.
    """
    greedy = calls.greedy(max_tokens=8)
    every = calls.sampling(max_tokens=8, n=2, top_k=5, presence_penalty=1.0, logprobs=1)
    loads = [greedy, every, calls.greedy(beam_width=2, max_tokens=6)]
    calls.sample_as(engine, loads)
    engine.warmup([every])
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
