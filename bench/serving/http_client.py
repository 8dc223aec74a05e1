"""Send requests to a server at their times, and print when each answer began and ended.

Run as a process of its own, `python -m bench.serving.http_client URL FILE SECONDS`, so that it does
not share an interpreter with the server. FILE has a JSON list of `{"arrival", "body"}`; the bodies
ask for streams with usage.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any


async def _send(address: tuple[str, int], body: str, result: dict[str, Any], start: float) -> None:
    await asyncio.sleep(result["arrival"] - (time.perf_counter() - start))
    reader, writer = await asyncio.open_connection(*address)
    data = body.encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    tail = b""
    while piece := await reader.read(1 << 16):
        now = time.perf_counter() - start
        if "first_token" not in result and b"data: " in tail + piece:
            result["first_token"] = now
        tail = (tail + piece)[-4096:]
    writer.close()
    events = tail.decode(errors="replace").split("data: ")
    if len(events) < 3 or not events[-1].startswith("[DONE]"):
        raise RuntimeError(f"an answer ended with {tail[-500:]!r}")
    usage = json.loads(events[-2].partition("\n")[0])["usage"]
    result |= {"finish": now, "num_tokens": usage["completion_tokens"]}


async def _send_all(url: str, requests: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    host, port = url.removeprefix("http://").split(":")
    results = [{"arrival": request["arrival"]} for request in requests]
    start = time.perf_counter()
    tasks = [
        asyncio.create_task(_send((host, int(port)), request["body"], result, start))
        for request, result in zip(requests, results, strict=True)
    ]
    done, late = await asyncio.wait(tasks, timeout=seconds)
    wall = time.perf_counter() - start
    for task in late:
        task.cancel()  # closes its connection, which aborts its request
    for task in done:
        task.result()
    return {"wall": wall, "served": [result for result in results if "finish" in result]}


def main(argv: list[str]) -> None:
    """Send the requests of the file, and print a JSON object."""
    url, file, seconds = argv
    requests = json.loads(Path(file).read_text())
    print(json.dumps(asyncio.run(_send_all(url, requests, float(seconds)))))


if __name__ == "__main__":
    main(sys.argv[1:])
