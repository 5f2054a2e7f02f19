"""A model hub for tests: enough of a hub's HTTP for `hf://` downloads.

Serves one directory as one repository with one commit, on the loopback or, for pods of a node, on
an address of this machine. A closed `gate` keeps the second half of the weights back, so that a
download can be observed half done.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import urllib.parse
from pathlib import Path

from tests.support.loopback_server import LoopbackHandler, LoopbackServer

COMMIT = "c0ffee" + "0" * 34
_JSON = {"Content-Type": "application/json"}


class Hub(LoopbackServer):
    """Args: repository: ORG/NAME; directory: its files, read at once; branches: other names of
    COMMIT; address: where to listen; token: what requests must carry, if anything.

    `files` are contents by name; `cuts` names files whose next whole download ends halfway, and
    `damaged` those that arrive with another last byte; contents of `denied` are refused;
    `refusal` is what every request gets; `asked` has every request as METHOD PATH [RANGE], in
    order.
    """

    def __init__(
        self,
        repository: str,
        directory: Path,
        branches: tuple[str, ...] = ("main",),
        *,
        address: str = "127.0.0.1",
        token: str = "",
    ) -> None:
        super().__init__(_Handler, address)
        self.repository, self.token = repository, token
        self.files = {f.name: f.read_bytes() for f in sorted(directory.iterdir()) if f.is_file()}
        self.revisions = (*branches, COMMIT)
        self.gate = threading.Event()
        self.gate.set()
        self.cuts: set[str] = set()
        self.damaged: set[str] = set()
        self.denied: set[str] = set()
        self.refusal: tuple[int, str] | None = None
        self.asked: list[str] = []

    def environment(self, home: Path) -> dict[str, str]:
        """For a process that is to take this for the hub."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1",
                "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # fmt: skip

    def shutdown(self) -> None:
        self.gate.set()
        super().shutdown()


class _Handler(LoopbackHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server, urllib.parse.unquote(self.path.split("?")[0]).strip("/")
        span = self.headers.get("range", "")
        hub.asked.append(f"{self.command} /{path} {span}".strip())
        api = f"api/models/{hub.repository}"
        if hub.refusal:
            self._refuse(*hub.refusal)
        elif hub.token and self.headers.get("authorization") != f"Bearer {hub.token}":
            self._refuse(401, "GatedRepo" if "authorization" in self.headers else "")
        elif path == api or path in {f"{api}/revision/{name}" for name in hub.revisions}:
            self.send(200, json.dumps(self._info()).encode(), _JSON)
        elif path in {f"{api}/tree/{name}" for name in hub.revisions}:
            tree = [{"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                    for name, data in hub.files.items()]  # fmt: skip
            self.send(200, json.dumps(tree).encode(), _JSON)
        elif path.startswith(f"{hub.repository}/resolve/"):
            revision, _, name = path.removeprefix(f"{hub.repository}/resolve/").partition("/")
            if revision not in hub.revisions:
                self._refuse(404, "RevisionNotFound")
            elif name not in hub.files:
                self._refuse(404, "EntryNotFound")
            elif name in hub.denied and self.command == "GET":
                self._refuse(403, "")
            else:
                self._file(name, span)
        else:
            self._refuse(404, "RevisionNotFound" if path.startswith(api) else "RepoNotFound")

    def _info(self) -> dict[str, object]:
        hub = self.server
        siblings = [{"rfilename": name, "size": len(data)} for name, data in hub.files.items()]
        return {"id": hub.repository, "modelId": hub.repository, "sha": COMMIT, "private": False,
                "downloads": 0, "likes": 0, "tags": [], "siblings": siblings}  # fmt: skip

    def _refuse(self, status: int, code: str) -> None:
        self.send(status, headers={"X-Error-Code": code} if code else None)

    def _file(self, name: str, span: str) -> None:
        data = self.server.files[name]
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", span)
        start = int(match[1]) if match else 0
        body = data[start : int(match[2]) + 1 if match and match[2] else None]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_etag(data)}"', "Accept-Ranges": "bytes"}
        if match:
            end = start + len(body) - 1
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
        self.send_head(206 if match else 200, len(body), headers)
        if self.command == "HEAD":
            return
        if name in self.server.damaged:
            body = body[:-1] + bytes([body[-1] ^ 1])
        half = len(body) // 2
        self.wfile.write(body[:half])
        self.wfile.flush()
        if name in self.server.cuts:
            self.server.cuts.discard(name)
            self.close_connection = True
            return
        if name.endswith(".safetensors"):
            self.server.gate.wait(60)
        with contextlib.suppress(OSError):  # the client may have closed the connection
            self.wfile.write(body[half:])


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
