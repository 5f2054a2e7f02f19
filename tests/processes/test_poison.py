"""One request that crashes engines, in a load of 64 streams at two frontends and two engines."""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from foveal_runtime.main.launcher import LocalDeployment
from tests.support.processes.poisonable import MARKER

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]

NUM_STREAMS = 64
NUM_TOKENS = 900
NUM_COMPARED = 8
COMMAND = (sys.executable, "-m", "tests.support.processes.poisonable")


class Streams:
    """Long answers, under way at once; `started` once each has got a few tokens."""

    def __init__(self, urls: list[str], pool: ThreadPoolExecutor) -> None:
        self.under_way = 0
        self.started = threading.Event()
        self._lock = threading.Lock()
        self.answers = [pool.submit(self.run, urls[i % 2], i) for i in range(NUM_STREAMS)]

    def run(self, url: str, number: int) -> str:
        """The text, which must be whole."""
        body = {"model": "tiny-vlm", "prompt": [5, 6, 7 + number], "temperature": 0,
                "max_tokens": NUM_TOKENS, "min_tokens": NUM_TOKENS, "stream": True,
                "stream_options": {"include_usage": True}}  # fmt: skip
        num_events, done, text, event = 0, False, "", {}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                done = done or line == "data: [DONE]"
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, line
                text += "".join(choice["text"] for choice in event["choices"])
                num_events += 1
                if num_events == 5:
                    self._count()
        assert done
        assert event["usage"]["completion_tokens"] == NUM_TOKENS
        return text

    def _count(self) -> None:
        with self._lock:
            self.under_way += 1
            if self.under_way == NUM_STREAMS:
                self.started.set()


def tend(deployment: LocalDeployment, stop: threading.Event, deaths: list[int | None]) -> None:
    """Restarts engines that die, as the launcher and a kubelet do."""
    while not stop.wait(0.2):
        for child in deployment.engines:
            if not child.is_alive:
                deaths.append(child.exit_code)
                child.start()


def ask(url: str) -> httpx.Response:
    body = {"model": "tiny-vlm", "prompt": [*MARKER, 5], "max_tokens": 4}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=300)


def until_none_is_held(url: str, admin: dict[str, str]) -> None:
    """An engine passes the order on."""
    for _ in range(600):
        held = httpx.get(f"{url}/quarantine", headers=admin, timeout=60).json()["requests"]
        if not held:
            return
        time.sleep(0.05)
    raise AssertionError(f"still held: {held}")


def test_one_engine_life_and_no_stream(deploy: Any, start_seconds: float, tmp_path: Path) -> None:
    """Two lives were lost to it, and another frontend lost two more for the same request."""
    (tmp_path / "key").write_text("secret")

    def admit(engines: list[Any], frontends: list[Any]) -> tuple[list[Any], list[Any]]:
        key = str(tmp_path / "key")
        return engines, [msgspec.structs.replace(f, admin_key_file=key) for f in frontends]

    made = deploy(change=admit, num_engines=2, num_frontends=2, kv_bytes=128 << 20)
    deployment = LocalDeployment(
        [c.config for c in made.engines], [c.config for c in made.frontends],
        folder=tmp_path, env={"TMPDIR": str(tmp_path)}, command=COMMAND,
    )  # fmt: skip
    stop, deaths = threading.Event(), []
    with deployment, ThreadPoolExecutor(NUM_STREAMS) as pool:
        deployment.wait_ready(start_seconds)
        nurse = threading.Thread(target=tend, args=(deployment, stop, deaths))
        nurse.start()
        try:
            first, second = (child.url for child in deployment.frontends)
            streams = Streams([first, second], pool)
            assert streams.started.wait(300)
            refused = ask(first)
            assert refused.status_code == 500, refused.text
            assert refused.json()["error"]["code"] == "engine_error"
            assert deaths == [-11]
            for url in (second, first):
                again = ask(url)
                assert again.status_code == 422, again.text
                assert again.json()["error"]["code"] == "request_quarantined"
            texts = [one.result() for one in streams.answers]
            assert deaths == [-11]
            numbers = range(NUM_COMPARED)
            assert texts[:NUM_COMPARED] == list(
                pool.map(streams.run, [second] * NUM_COMPARED, numbers)
            ), "undisturbed, they say something else"

            admin = {"Authorization": "Bearer secret"}
            held = httpx.get(f"{second}/quarantine", headers=admin, timeout=60).json()
            assert "7 prompt tokens, max_tokens 4" in [one["shape"] for one in held["requests"]]
            cleared = httpx.post(f"{first}/reset_quarantine", headers=admin, timeout=60)
            assert cleared.status_code == 200, cleared.text
            deployment.wait_ready(start_seconds)
            until_none_is_held(second, admin)
            assert ask(second).status_code == 500, "it is taken again, and kills again"
        finally:
            stop.set()
            nurse.join()
