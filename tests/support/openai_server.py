"""A scripted OpenAI-compatible server: a model list, streamed words, counters; it remembers
requests. For clients that block, so it has a thread of its own."""

from __future__ import annotations

import json

from tests.support.loopback_server import LoopbackHandler, LoopbackServer


class OpenAIServer(LoopbackServer):
    """`key`: requests need it; `models`: those listed."""

    def __init__(self, words=("a ", "b"), key="", models=("m",), log=None) -> None:
        super().__init__(_Handler)
        self.words, self.key, self.models = words, key, models
        self.bodies: list[dict] = []
        self.keys: set[str] = set()
        self.log = [] if log is None else log


class _Handler(LoopbackHandler):
    server: OpenAIServer

    def do_GET(self) -> None:
        self.server.keys.add(self.headers.get("authorization", ""))
        if self.path == "/metrics":
            num = len(self.server.bodies)
            text = (
                f"vllm:prefix_cache_hits_total {num}\nvllm:prefix_cache_queries_total {2 * num}\n"
            )
            return self.send(200, text.encode())
        if self.server.key and self.headers.get("authorization") != f"Bearer {self.server.key}":
            return self.send(401, b"{}")
        if self.path != "/v1/models":
            return self.send(404, b"{}")
        models = {"data": [{"id": name} for name in self.server.models]}
        return self.send(200, json.dumps(models).encode())

    def do_POST(self) -> None:
        self.server.keys.add(self.headers.get("authorization", ""))
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        self.server.log.append((self.server, body))
        events = [{"choices": [{"delta": {"content": word}}]} for word in self.server.words]
        events.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        usage = {"prompt_tokens": 10, "completion_tokens": len(self.server.words)}
        events.append({"choices": [], "usage": usage})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self.send(200, "".join([*lines, "data: [DONE]\n\n"]).encode())
