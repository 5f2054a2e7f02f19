"""Model sources of the tests' own: a hub-compatible server, reached from pods as the node's host.

One repository of one revision. It wants a token, serves ranges, and can cut a download short.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

HOST_IP = "10.200.0.1"
REPOSITORY = "tests/tiny-vlm"
REVISION = hashlib.sha1(b"tiny-vlm", usedforsecurity=False).hexdigest()
TOKEN = "hf_for_this_test_only"


class Hub(ThreadingHTTPServer):
    """Serves `folder` as REPOSITORY at REVISION; `cuts` names files whose first whole download
    ends halfway; `asked` is what was asked for, in order."""

    daemon_threads = True

    def __init__(self, folder: Path, address: str = HOST_IP) -> None:
        super().__init__((address, 0), _Handler)
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.cuts: set[str] = set()
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_port}"


@contextmanager
def serving(folder: Path, address: str = HOST_IP) -> Iterator[Hub]:
    hub = Hub(folder, address)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: object) -> None:
        return

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        span = self.headers.get("range", "")
        self.server.asked.append(f"{self.command} {path} {span}".strip())
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            self.refuse(401, "GatedRepo" if "authorization" in self.headers else "")
        elif match := re.fullmatch(rf"/api/models/{REPOSITORY}/revision/(main|{REVISION})", path):
            self.say(self.information(), "application/json")
        elif match := re.fullmatch(rf"/api/models/{REPOSITORY}/tree/(main|{REVISION})", path):
            self.say(json.dumps(self.tree()).encode(), "application/json")
        elif match := re.fullmatch(rf"/{REPOSITORY}/resolve/(?:main|{REVISION})/(.+)", path):
            self.send_file(match[1], span)
        else:
            known = path.startswith((f"/api/models/{REPOSITORY}", f"/{REPOSITORY}/"))
            self.refuse(404, "RevisionNotFound" if known else "RepoNotFound")

    def tree(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
            for name, data in self.server.files.items()
        ]

    def information(self) -> bytes:
        siblings = [{"rfilename": name} for name in self.server.files]
        found = {"id": REPOSITORY, "modelId": REPOSITORY, "sha": REVISION, "siblings": siblings}
        return json.dumps(found).encode()

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def say(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def send_file(self, name: str, span: str) -> None:
        data = self.server.files.get(name)
        if data is None:
            self.refuse(404, "EntryNotFound")
            return
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", span)
        start = int(match[1]) if match else 0
        part = data[start : int(match[2]) + 1 if match and match[2] else None]
        self.send_response(206 if match else 200)
        if match:
            end = start + len(part) - 1
            self.send_header("Content-Range", f"bytes {start}-{end}/{len(data)}")
        self.send_header("ETag", f'"{_etag(data)}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if name in self.server.cuts:
            self.server.cuts.discard(name)
            self.wfile.write(part[: len(part) // 2])
            self.close_connection = True
            return
        self.wfile.write(part)


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
