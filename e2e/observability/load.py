"""A mixed load: text, pictures seen before, new ones, and now and then one that is none.

Used by local.py and by the cluster's tests, so that every panel has something to show.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import random
import threading
import urllib.error
import urllib.request
from typing import Any

from foveal_runtime.bench.images import ImageKind, draw

_RANDOM = 20261121


class Load:
    """Threads that ask until told to stop: text, pictures seen before, new ones, and a bad one."""

    def __init__(self, urls: list[str], num_threads: int = 3) -> None:
        self.num_answers = self.num_refusals = 0
        self._urls, self._stop = urls, threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(num_threads)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, number: int) -> None:
        rng = random.Random(_RANDOM + number)
        for turn in itertools.count():
            if self._stop.is_set():
                return
            with contextlib.suppress(OSError, urllib.error.URLError):
                self._ask(self._urls[(turn + number) % len(self._urls)], rng, turn)

    def _ask(self, url: str, rng: random.Random, turn: int) -> None:
        content: list[dict[str, Any]] = [{"type": "text", "text": "What is in the picture? " * 8}]
        if turn % 7:
            # Every third picture is one of four, the others are new.
            which = rng.randrange(4) if rng.random() < 0.4 else 10 + rng.randrange(1 << 20)
            data = base64.b64encode(draw(which, ImageKind(64, 64))).decode()
            image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
            content.insert(0, image)
        if turn % 29 == 11:
            content[0] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        body = {
            "model": "tiny-vlm",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 8,
        }
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                reply.read()
                self.num_answers += 1
        except urllib.error.HTTPError:
            self.num_refusals += 1
