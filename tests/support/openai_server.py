"""A scripted OpenAI-compatible server: a model list, streamed words, counters; it remembers
requests. For clients that block, so it has a thread of its own."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class OpenAIServer:
    """Use as a context manager. `key`: requests need it; `models`: those listed."""

    def __init__(self, words=("a ", "b"), key="", models=("m",), log=None) -> None:
        self.words, self.key, self.models = words, key, models
        self.bodies: list[dict] = []
        self.keys: set[str] = set()
        self.log = [] if log is None else log
        handler = type("Handler", (_Handler,), {"rig": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)

    def __enter__(self) -> OpenAIServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    rig: OpenAIServer

    def do_GET(self) -> None:
        self.rig.keys.add(self.headers.get("authorization", ""))
        if self.path == "/metrics":
            num = len(self.rig.bodies)
            text = (
                f"vllm:prefix_cache_hits_total {num}\nvllm:prefix_cache_queries_total {2 * num}\n"
            )
            return self._answer(200, text.encode())
        if self.rig.key and self.headers.get("authorization") != f"Bearer {self.rig.key}":
            return self._answer(401, b"{}")
        if self.path != "/v1/models":
            return self._answer(404, b"{}")
        models = {"data": [{"id": name} for name in self.rig.models]}
        return self._answer(200, json.dumps(models).encode())

    def do_POST(self) -> None:
        self.rig.keys.add(self.headers.get("authorization", ""))
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.rig.bodies.append(body)
        self.rig.log.append((self.rig, body))
        events = [{"choices": [{"delta": {"content": word}}]} for word in self.rig.words]
        events.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        usage = {"prompt_tokens": 10, "completion_tokens": len(self.rig.words)}
        events.append({"choices": [], "usage": usage})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._answer(200, "".join([*lines, "data: [DONE]\n\n"]).encode())

    def _answer(self, code: int, data: bytes) -> None:
        self.send_response(code)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing."""
