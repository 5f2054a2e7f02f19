"""Cache events as Dynamo's published indexer understands them: a router's own program, unmodified.

`make clients` installs it. It listens to the stream like a router and is asked over HTTP how much
of a prompt an engine holds.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from foveal_runtime.engine.events.stream import EventStream
from foveal_runtime.engine.events.vllm import VllmEventLog
from foveal_runtime.plan.local import free_port
from tests.support.engine_core_rig import A, B, Engine

ROOT = Path(__file__).resolve().parents[3]
CLIENTS = Path(os.environ.get("FOVEAL_CLIENTS", ROOT / ".venv" / "clients"))
PYTHON = CLIENTS / "bin" / "python"
BLOCK = 4
WAIT_SECONDS = 60.0

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(
        not list(CLIENTS.glob("lib/python*/site-packages/dynamo/indexer")),
        reason="`make clients` installs Dynamo's indexer",
    ),
]


@pytest.fixture
def stream() -> Iterator[EventStream]:
    made = EventStream("tcp://127.0.0.1:0", topic=b"", first=0)
    made.start()
    yield made
    made.close()


@pytest.fixture
def held(stream: EventStream) -> Iterator[Callable[[list[int]], int]]:
    """held(tokens) → how many of them the indexer believes the engine to hold."""
    port = free_port()
    command = [str(PYTHON), "-m", "dynamo.indexer", "--port", str(port), "--threads", "1",
               "--block-size", str(BLOCK), "--model-name", "m", "--workers",
               f"1={stream.endpoint}"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)

    def ask(path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}", json.dumps(body).encode() if body else None,
            {"content-type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def held(tokens: list[int]) -> int:
        scores = ask("/query", {"token_ids": tokens, "model_name": "m"})["scores"]
        return int(scores.get("1", {}).get("0", 0))

    def listens() -> bool:
        try:
            return "active" in json.dumps(ask("/workers")[0]["listeners"])
        except (urllib.error.URLError, OSError, LookupError):
            return False

    try:
        wait(listens)
        yield held
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_router_finds_the_prefix_that_an_engine_holds(
    stream: EventStream, held: Callable[[list[int]], int]
) -> None:
    """Through stores, evictions from a small pool, and a reset."""
    engine = Engine(events=VllmEventLog("e0", stream.publish), num_blocks=12)
    frontend = engine.connect()

    def serve(name: str, prompt: list[Any]) -> None:
        engine.up(frontend, frontend.request((name, 0), prompt))
        engine.run()

    probes: list[list[int]] = []

    def is_subscribed() -> bool:
        """The subscription arrives here some time after the indexer says that it listens."""
        probes.append([1000 + len(probes)] * 8)
        serve(f"probe{len(probes)}", probes[-1])
        return any(held(probe) for probe in probes)

    wait(is_subscribed)
    prompt = list(range(1, 17))
    serve("first", prompt)
    wait(lambda: held(prompt) == 16)
    assert held([*prompt[:8], *[99] * 8]) == 8, "to where they part"
    assert held([99, *prompt[1:]]) == 0
    assert held(prompt[:7]) == 4, "whole blocks alone"
    serve("image", [1, 2, A, 3])
    for number in range(6):  # the pool is small: the first prompt's blocks go
        serve(f"r{number}", [100 + number] * 24)
    wait(lambda: held(prompt) == 0)
    wait(lambda: held([105] * 24) >= 20)
    engine.up(frontend, frontend.sender.control("reset_prefix"))
    serve("last", [1, 2, B, 3])
    wait(lambda: held([105] * 24) == 0)
