"""Many clients at once; most of them misbehave."""

import asyncio
import gc
import json
import random
import resource

import httpx
import pytest

from tests.support.servers import RunningServer, expected_text, http_request

PATH, NUM_TOKENS = "/v1/completions", 24
PROMPTS = [f"Prompt {number} says" for number in range(6)]
# What clients send, and the status that they get.
REFUSED = {
    "bad JSON": ({"content": b'{"prompt": "x'}, 400),
    "huge": ({"content": b" " * 2_000_000}, 413),
    "bad key": ({"headers": {"authorization": "Bearer other"}}, 401),
    "bad field": ({"json": {"temperature": -1}}, 400),
}
KINDS = ["good", "stream", "slow", "leaves", *REFUSED]
HEADERS = {"authorization": "Bearer key", "content-type": "application/json"}


async def leave(rng, address, fields):
    """Leave in the head, in the body, before the answer, or after some of it."""
    headers = [f"{name}: {value}" for name, value in HEADERS.items()][:1]
    request = http_request(PATH, fields | {"max_tokens": 200}, *headers)
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request[: rng.randrange(2 * len(request))])
    await writer.drain()
    if rng.random() < 0.5:
        await asyncio.wait([asyncio.create_task(reader.read(300))], timeout=0.2)
    if rng.random() < 0.5:
        writer.transport.abort()
    writer.close()


async def run_client(server, client, seed):
    """Behave in a random way, and check the answer; return the kind of client and the status."""
    rng = random.Random(seed)
    kind, prompt = KINDS[seed % len(KINDS)], rng.choice(PROMPTS)
    await asyncio.sleep(rng.random() * 0.5)
    fields = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
    if kind == "leaves":
        fields["stream"] = rng.random() < 0.5
        return kind, await leave(rng, server.bound.getsockname(), fields)
    if kind in REFUSED:
        request, expected = REFUSED[kind]
        answer = await client.post(PATH, **request)
        assert answer.status_code == expected and answer.json()["error"]["message"]
        return kind, expected
    async with client.stream("POST", PATH, json=fields | {"stream": kind != "good"}) as answer:
        body = b""
        async for piece in answer.aiter_raw(200):
            body += piece
            await asyncio.sleep(0.01 if kind == "slow" else 0)
    if answer.status_code == 429:
        return kind, 429
    events = [body]
    if kind != "good":
        *events, done, end = body.replace(b"data: ", b"").split(b"\n\n")
        assert (done, end) == (b"[DONE]", b"")
    choices = [json.loads(event)["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == expected_text(prompt, NUM_TOKENS)
    return kind, answer.status_code


def check_load(folder, num_clients, num_rounds, *, max_queue):
    """Run rounds of clients; return what each got. Every page is checked at the end."""

    async def run_round(number):
        seeds = range(number * num_clients, (number + 1) * num_clients)
        limits = httpx.Limits(max_connections=None)
        how = dict(base_url=server.url, headers=HEADERS, timeout=60, limits=limits)
        async with httpx.AsyncClient(**how) as client:
            return await asyncio.gather(*(run_client(server, client, seed) for seed in seeds))

    options = dict(api_keys=("key",), max_queue=max_queue, max_body_bytes=1_000_000)
    with RunningServer(folder, **options) as server:
        results, sizes = [], []
        for number in range(num_rounds):
            results += asyncio.run(asyncio.wait_for(run_round(number), 240))
            server.wait_until_idle()
            gc.collect()
            sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        assert server.metrics()['request_success_total{finished_reason="error"}'] == 0
    return results, sizes


def test_clients_of_all_kinds(tmp_path):
    results, _ = check_load(tmp_path, 40, 1, max_queue=4)
    assert {kind for kind, _ in results} == {*KINDS}
    statuses = {status for _, status in results}
    assert statuses - {429, None} == {200, 400, 401, 413}  # 429 depends on the speed


@pytest.mark.slow
def test_300_clients_of_all_kinds_again_and_again(tmp_path):
    results, sizes = check_load(tmp_path, 300, 5, max_queue=60)
    assert sum(status == 200 for _, status in results) > 300
    assert sizes[-1] - sizes[1] < 64 << 10  # KiB: memory that grows with requests would show
