"""A model hub on the loopback, for tests: enough of its HTTP for `hf://` downloads.

Serves one directory as one repository with one commit. Used by the tests of fetch and of
`foveal up`; `hold` keeps the end of the weights back, so that a download can be looked at.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c0ffee" + "0" * 34


class Hub(ThreadingHTTPServer):
    """Args: repository: ORG/NAME; directory: its files; branches: what COMMIT may be called."""

    daemon_threads = True

    def __init__(
        self, repository: str, directory: Path, branches: tuple[str, ...] = ("main",)
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repository, self.directory = repository, directory
        self.revisions = (*branches, COMMIT)
        self.gate = threading.Event()
        self.gate.set()
        self.seen: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def environment(self, home: Path) -> dict[str, str]:
        """For a process that is to take this for the hub."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1",
                "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # fmt: skip

    def sizes(self) -> dict[str, int]:
        return {f.name: f.stat().st_size for f in sorted(self.directory.iterdir()) if f.is_file()}

    @contextlib.contextmanager
    def running(self) -> Iterator[Hub]:
        thread = threading.Thread(target=self.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.gate.set()
            self.shutdown()
            self.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"
    timeout = 30.0

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        hub, path = self.server, urllib.parse.unquote(self.path.split("?")[0]).strip("/")
        hub.seen.append(f"{self.command} /{path}")
        api = f"api/models/{hub.repository}"
        if path == api or path in {f"{api}/revision/{name}" for name in hub.revisions}:
            self._send(json.dumps(self._info()).encode(), {})
        elif path in {f"{api}/tree/{name}" for name in hub.revisions}:
            tree = [{"type": "file", "path": name, "size": size, "oid": COMMIT}
                    for name, size in hub.sizes().items()]  # fmt: skip
            self._send(json.dumps(tree).encode(), {})
        elif path.startswith(f"{hub.repository}/resolve/"):
            revision, _, name = path.removeprefix(f"{hub.repository}/resolve/").partition("/")
            if revision in hub.revisions and name in hub.sizes():
                self._file(hub.directory / name, with_body=with_body)
            else:
                self._refuse("EntryNotFound")
        else:
            self._refuse("RevisionNotFound" if path.startswith(api) else "RepoNotFound")

    def _info(self) -> dict[str, object]:
        hub = self.server
        siblings = [{"rfilename": name, "size": size} for name, size in hub.sizes().items()]
        return {"id": hub.repository, "modelId": hub.repository, "sha": COMMIT, "private": False,
                "downloads": 0, "likes": 0, "tags": [], "siblings": siblings}  # fmt: skip

    def _refuse(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _file(self, file: Path, *, with_body: bool) -> None:
        data = file.read_bytes()
        head = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        if not with_body:
            self._send(data, head, with_body=False)
            return
        start = 0
        if (given := self.headers.get("Range", "")).startswith("bytes="):
            start = int(given.removeprefix("bytes=").split("-")[0])
        body = data[start:]
        self.send_response(206 if start else 200)
        for key, value in head.items():
            self.send_header(key, value)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        half = len(body) // 2
        self.wfile.write(body[:half])
        self.wfile.flush()
        if file.suffix == ".safetensors":
            self.server.gate.wait(60)
        with contextlib.suppress(OSError):  # who waited may have gone
            self.wfile.write(body[half:])

    def _send(self, data: bytes, head: dict[str, str], *, with_body: bool = True) -> None:
        self.send_response(200)
        for key, value in {"Content-Type": "application/json", **head}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if with_body and self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        del format, args
